"""How the time and memory of a step grow: with the model, the rank, the tokens of a microbatch, the microbatches of a step.

    python benchmarks/growth.py            # a few minutes on two CPU threads; writes docs/growth.png and docs/growth.json
    python benchmarks/growth.py --quick    # two rounds of less

One quantity changes at a time; the others stay at those of `STANDARD`. Beside the sketch stands dense AdamW of the same
matrices in bfloat16, the least that a dense step can take. All points of a column take turns in one process. Time is the
median of the rounds. Memory is the peak of the bytes of all tensors that are alive in a step, weights and activations among
them, and beside it what is kept between steps apart from the weights: sketches and moments, or gradients and moments.

Every curve is fitted by a line `a + b·x`, whose R² is printed, and by a power of x, whose exponent is.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import step
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shapes import SHAPES, keep_memory, make_model
from trl.trainer.utils import add_fused_lm_head

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model
from trl_sketch.memory_measure import StorageTracker


ROOT = Path(__file__).resolve().parents[1]
SEQUENCE = 128  # tokens
VOCABULARY = 4096  # small, for the LM head is no part of the method
# SmolLM2-135M's layers, narrower and wider.
WIDTHS = {width: SHAPES["smollm2-135m"] | {
    "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": width * 8 // 3, "head_dim": width // 9,
} for width in (288, 576, 1152)}  # fmt: skip
SHAPES |= {f"width {width}": shape for width, shape in WIDTHS.items()}
TIMES, BYTES = ("forward + backward", "optimizer step"), ("peak", "state")
MIB = 2**20


@dataclass(frozen=True)
class Point:
    """A step that is measured."""

    method: str = "sketch"
    width: int = 576
    layers: int = 2
    rank: int = 64
    tokens: int = 512  # of a microbatch
    accumulation: int = 1


STANDARD = Point()
COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "width": ("million trained weights", tuple(WIDTHS)),
    "rank": ("rank", (16, 32, 64, 128, 256, 512)),
    "tokens": ("tokens of a microbatch", (128, 256, 512, 1024)),
    "accumulation": ("microbatches of a step", (1, 2, 4, 8)),
}


class Sketch(step.Contestant):
    """Nothing but the step itself: no probe, no message."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__(model)
        add_fused_lm_head(model)
        get_sketch_model(model, SketchConfig(rank=rank, update_ratio=6e-5, kl_budget=None))
        self.optimizer = SketchOptimizer(model, lr=1.0)

    def finish(self, seconds: dict[str, float], batches: step.Batches) -> None:
        self.timed(seconds, "rule", lambda: self.optimizer.propose(max_grad_norm=1.0))
        self.timed(seconds, "update", self.optimizer.step)

    def state(self) -> list[torch.Tensor]:
        return [tensor for part in self.optimizer.state_tensors().values() for tensor in part]


class Dense(step.Dense):
    """The same of AdamW."""

    def send(self) -> None:
        pass

    def state(self) -> list[torch.Tensor]:
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return moments + [p.grad for p in self.parameters if p.grad is not None]


def contestant(point: Point, device: str) -> Sketch | Dense:
    model = make_model(f"width {point.width}", torch.bfloat16, device, point.layers)
    return Sketch(model, point.rank) if point.method == "sketch" else Dense(model, matrices_only=True)


def batches_of(point: Point, device: str) -> step.Batches:
    generator = torch.Generator().manual_seed(0)
    shape = (point.accumulation, point.tokens // SEQUENCE, SEQUENCE)
    return [*torch.randint(0, VOCABULARY, shape, generator=generator).to(device)]


def memory(trained: Sketch | Dense, batches: step.Batches) -> dict[str, int]:
    """Bytes: the largest number that is alive in a step, and what stays, each with the model's own."""
    with StorageTracker(alignment=1) as tracker:
        for tensor in (*trained.model.parameters(), *trained.model.buffers()):
            tracker.assign(tensor, "weights")
        for tensor in trained.state():
            tracker.assign(tensor, "state")
        tracker.enter("step")
        trained.step(batches)
        peak = tracker.peaks["step"][0]
    return {"peak": peak, "state": sum(tensor.untyped_storage().nbytes() for tensor in trained.state())}


def measure(points: Sequence[Point], repeats: int, device: str, console: Console) -> list[dict[str, Any]]:
    """A row a point, measured in turns after a round that does not count."""
    models: dict[Point, Sketch | Dense] = {}  # what differs in its batches only is one model
    for point in points:
        same = replace(point, tokens=STANDARD.tokens, accumulation=1)
        models[point] = models.get(same) or contestant(point, device)
        models[same] = models[point]
    runs: dict[Point, list[dict[str, float]]] = {point: [] for point in points}
    for repeat in track(range(repeats + 1), "rounds", console=console, transient=True):
        for point in points:
            gc.collect()
            seconds = models[point].step(batches_of(point, device))
            if repeat:
                runs[point].append(seconds)
    rows = []
    for point in points:
        trained = sum(m.weight.numel() for n, m in models[point].model.named_modules() if n.endswith("_proj"))
        rows.append(asdict(point) | {
            "weights": trained,
            "forward + backward": statistics.median(run["forward"] + run["backward"] for run in runs[point]),
            "optimizer step": statistics.median(run["rule"] + run["update"] for run in runs[point]),
        } | memory(models[point], batches_of(point, device)))  # fmt: skip
    return rows


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """The line `a + b·x` through the points, its R² (1 where y does not change), and the exponent of a power of x."""
    slope, start = np.polyfit(x, y, 1)
    spread = np.sum((np.asarray(y) - np.mean(y)) ** 2)
    missed = np.sum((np.asarray(y) - start - slope * np.asarray(x)) ** 2)
    constant = spread <= 1e-12 * np.sum(np.square(y))
    exponent = np.polyfit(np.log(x), np.log(y), 1)[0]
    return {
        "a": float(start),
        "b": float(slope),
        "R2": 1.0 if constant else float(1 - missed / spread),
        "exponent": 0.0 if constant else float(exponent),
    }


def curves(column: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The curves of a column, with their fits."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        x = [row["weights"] / 1e6 if column == "width" else row[column] for row in own]
        for quantity in TIMES + BYTES:
            y = [row[quantity] for row in own]
            # Of what does not depend on x there is one point.
            fitted = fit(x, y) if len(x) > 1 else {"a": y[0], "b": 0.0, "R2": 1.0, "exponent": 0.0}
            found.append({"column": column, "method": method, "quantity": quantity, "x": x, "y": y} | fitted)
    return found


LABELS = {"sketch": "sketch", "dense": "dense AdamW"}
COLORS = {"sketch": "#0072B2", "dense": "#E69F00"}  # Okabe and Ito's
LOOKS: dict[str, dict[str, Any]] = {
    "forward + backward": {"marker": "o", "linestyle": "-"},
    "optimizer step": {"marker": "s", "linestyle": "--"},
    "peak": {"marker": "o", "linestyle": "-"},
    "state": {"marker": "s", "linestyle": "--"},
}
NAMES = {"peak": "peak of a step", "state": "kept between steps, without weights"}


def draw(found: list[dict[str, Any]], title: str, file: Path) -> None:
    """Points, and the lines that were fitted to them."""
    figure, axes = plt.subplots(2, len(COLUMNS), figsize=(14, 7), sharex="col", layout="constrained")
    for place, (column, (label, _)) in enumerate(COLUMNS.items()):
        own = [curve for curve in found if curve["column"] == column]
        ends = max(curve["x"][-1] for curve in own)
        for axis, quantities, unit in ((axes[0, place], TIMES, 1), (axes[1, place], BYTES, MIB)):
            for curve in own:
                if curve["quantity"] not in quantities:
                    continue
                look, color = LOOKS[curve["quantity"]], COLORS[curve["method"]]
                name = f"{LABELS[curve['method']]}: {NAMES.get(curve['quantity'], curve['quantity'])}"
                line = np.array([min(c["x"][0] for c in own), ends])
                axis.plot(line, (curve["a"] + curve["b"] * line) / unit, look["linestyle"], color=color, linewidth=1.3)
                if len(curve["x"]) > 1:
                    axis.plot(curve["x"], np.array(curve["y"]) / unit, look["marker"], color=color, markersize=5)
                axis.plot([], [], color=color, label=name, **look)  # for the legend
            axis.set_ylim(bottom=0)
            axis.set_xlim(left=0)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        axes[1, place].set_xlabel(label)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("MiB")
    for row, where in enumerate(("outside upper center", "outside lower center")):
        handles, labels = axes[row, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc=where, ncols=4, frameon=False, title="" if row else title)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def as_table(found: list[dict[str, Any]], title: str) -> Table:
    table = Table("against", "method", "", "first", "last", "times", "R² of a line", "exponent", title=title)
    for curve in found:
        if len(curve["x"]) == 1:
            continue
        unit, form = (1.0, "{:.3f} s") if curve["quantity"] in TIMES else (MIB, "{:.1f} MiB")
        first, last = curve["y"][0], curve["y"][-1]
        is_constant = max(curve["y"]) < 1.1 * min(curve["y"])
        table.add_row(
            f"{COLUMNS[curve['column']][0]}, {curve['x'][0]:.4g} to {curve['x'][-1]:.4g}",
            LABELS[curve["method"]],
            curve["quantity"],
            form.format(first / unit),
            form.format(last / unit),
            f"{last / first:.2f}",
            "constant" if is_constant else f"{curve['R2']:.3f}",
            "" if is_constant else f"{curve['exponent']:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of one layer; only to see that it runs")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "growth.png", help="figure; beside it goes JSON"
    )
    options = parser.parse_args()
    if options.quick and options.output == parser.get_default("output"):
        parser.error("--quick needs an --output of its own: its figure is not the one in docs/")
    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    repeats, layers = (2, 1) if options.quick else (options.repeats, STANDARD.layers)

    console, found = Console(width=140), []
    for column, (_, values) in COLUMNS.items():
        points: list[Point] = []
        for value in values[:3] if options.quick else values:
            changes: dict[str, Any] = {column: value}
            changed = replace(STANDARD, layers=layers, **changes)
            points += [changed, replace(changed, method="dense", rank=0)]
        points = [*dict.fromkeys(points)]  # dense has no rank
        found += curves(column, measure(points, repeats, options.device, console))
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    title = (
        f"{layers} layers, width {STANDARD.width}, {STANDARD.tokens} tokens, rank {STANDARD.rank}; {device}, "
        f"torch {torch.__version__}"
    )
    console.print(as_table(found, title))
    draw(found, title, options.output)
    content = {"title": title, "standard": asdict(replace(STANDARD, layers=layers)), "curves": found}
    options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
