"""Time of one training step: gradient sketches against LoRA and dense AdamW, part by part.

    python benchmarks/step.py                                      # SmolLM2-135M's shape, 4 x 256 tokens, ranks 64 and 256
    python benchmarks/step.py --shape embedded --rows 128 --tokens 19 --ranks 32
    python benchmarks/step.py --shape qwen3-1.7b --projections hadamard rademacher gaussian orthonormal    # on a GPU
    python benchmarks/step.py --methods sketch --profile trace.json    # where the time of a step goes

All methods have the same random weights, tokens and loss, and take turns in one process, so that what disturbs one disturbs
all; a table and, with `--output`, JSON give medians. `forward + backward` is that of all microbatches under bfloat16 autocast,
as TRL trains; `floor` is the same model frozen, whose backward has the gradients of inputs only. AdamW is the fused one, as
transformers chooses it. Dense training stands there twice: of the matrices that the sketch trains, in bfloat16, which is the
least that a dense step can take and what `of dense` compares with; and as TRL does it, of every weight in fp32, whose step
`step of AdamW's` compares with.

The bound adds to the floor the operations that a method cannot do without, at the rate at which this machine computes dense
weight gradients in the same run: 2·T·d·k for each matrix of d outputs and k inputs; LoRA 6·T·r·(d + k); a sketch 2·T·r·d
and, once for the matrices that share an input, 2·T·r·k.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shapes import SHAPES, keep_memory, make_model
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from trl.trainer.utils import add_fused_lm_head

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, kl
from trl_sketch.model import sketch_state
from trl_sketch.projection import PROJECTIONS, SIGN_PROJECTIONS
from trl_sketch.sync.update import Step, UpdateMessage, decode, new_run_id
from trl_sketch.weights import sign_dtype


PARTS = ("forward", "backward", "rule", "probe", "update", "sync", "draw")
Batches = list[torch.Tensor]  # token ids (rows, tokens) of each microbatch


class Contestant:
    """A model with a way to train it. `step` returns the seconds of each part."""

    name: str
    rank: int | None = None
    extra_operations = 0  # of the method's own in the linear layers, per token

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sent_bytes = 0

    def step(self, batches: Batches) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        for ids in batches:
            loss = self.timed(seconds, "forward", lambda ids=ids: self.loss(ids))
            self.timed(seconds, "backward", loss.backward)
        self.finish(seconds, batches)
        return seconds

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            return self.model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).log_probs.mean()

    def finish(self, seconds: dict[str, float], batches: Batches) -> None:
        """What comes after backward."""

    @staticmethod
    def timed(seconds: dict[str, float], part: str, function: Callable[[], Any]) -> Any:
        on_cuda = torch.cuda.is_available()
        start = time.perf_counter()
        with record_function(f"step/{part}"):
            result = function()
            if on_cuda:
                torch.cuda.synchronize()
        seconds[part] += time.perf_counter() - start
        return result


class Floor(Contestant):
    """No weight is trained; the gradient flows through."""

    name = "frozen (floor)"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        model.requires_grad_(False)
        model.enable_input_require_grads()
        add_fused_lm_head(model)


class Sketch(Contestant):
    def __init__(self, model: nn.Module, rank: int, projection: str, spectral_power: float = 1.0) -> None:
        super().__init__(model)
        self.name, self.rank, self.projection = f"sketch, {projection}", rank, projection
        add_fused_lm_head(model)
        settings = {"update_ratio": 6e-5, "kl_budget": None, "spectral_power": spectral_power}
        get_sketch_model(model, SketchConfig(rank=rank, projection=projection, **settings))
        self.optimizer = SketchOptimizer(model, lr=1.0)
        self.state = sketch_state(model)
        self.steps: list[Step] = []
        self.optimizer.listeners.append(
            lambda version, updates: self.steps.append(Step(version - 1, version, updates))
        )
        layers = self.state.layers.values()
        groups = self.state.groups
        self.extra_operations = 2 * sum(layer.out_features * layer.group.rank for layer in layers)
        self.extra_operations += 2 * sum(group.in_features * group.rank for group in groups)

    def finish(self, seconds: dict[str, float], batches: Batches) -> None:
        self.timed(seconds, "rule", lambda: self.optimizer.propose(max_grad_norm=1.0))
        probed = {"input_ids": batches[0][:2], "labels": batches[0][:2]}
        self.timed(seconds, "probe", lambda: kl.predicted_kl(self.model, probed, autocast_dtype=torch.bfloat16))
        self.steps.clear()
        self.timed(seconds, "update", self.optimizer.step)
        message = self.timed(seconds, "sync", lambda: UpdateMessage(new_run_id(), self.steps).to_bytes())
        self.timed(seconds, "sync", lambda: decode(message))
        self.sent_bytes = len(message)
        self.timed(seconds, "draw", lambda: self.draw(len(batches)))

    def draw(self, microbatches: int) -> None:
        """Once more what a step draws: in the forward pass of each microbatch, and in the update."""
        self.state.set_step(self.state.step)
        for group in self.state.groups:
            group.keep_basis(torch.bfloat16)
            for _ in range(microbatches):
                group.basis(torch.bfloat16)
        if self.projection in SIGN_PROJECTIONS:
            for group in self.state.groups:
                group.basis(sign_dtype(self.state.device))


class Trained(Contestant):
    """Parameters with gradients and AdamW."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)

    def finish(self, seconds: dict[str, float], batches: Batches) -> None:
        self.timed(seconds, "rule", lambda: nn.utils.clip_grad_norm_(self.parameters, 1.0))
        self.timed(seconds, "update", self.optimizer.step)
        self.optimizer.zero_grad(set_to_none=False)
        self.timed(seconds, "sync", self.send)

    def send(self) -> None:
        """All weights, as bytes in bfloat16."""
        weights = [p.detach() for p in self.model.parameters()]
        self.sent_bytes = sum(2 * w.numel() for w in weights)
        for weight in weights:
            weight.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()


class Dense(Trained):
    """AdamW on every weight in fp32, as TRL trains, or on the sketch's matrices in bf16."""

    def __init__(self, model: nn.Module, matrices_only: bool) -> None:
        add_fused_lm_head(model)
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")}
        if matrices_only:
            model.requires_grad_(False)
            for linear in linears.values():
                linear.weight.requires_grad_(True)
        super().__init__(model)
        self.name = "dense, matrices, bf16" if matrices_only else "dense, all, fp32"
        self.extra_operations = 2 * sum(m.weight.numel() for m in linears.values())


class Lora(Trained):
    name = "LoRA"

    def __init__(self, model: nn.Module, rank: int) -> None:
        add_fused_lm_head(model)
        adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
        super().__init__(adapted)
        self.rank = rank
        self.extra_operations = 6 * sum(p.numel() for p in self.parameters)

    def send(self) -> None:
        """As TRL does: merged into the weights, sent, and taken out again."""
        self.model.merge_adapter()
        super().send()
        self.model.unmerge_adapter()


def contestants(options: argparse.Namespace) -> list[Contestant]:
    def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        return make_model(options.shape, dtype, options.device, options.layers)

    found: list[Contestant] = []
    if "dense" in options.methods:
        found = [Floor(model()), Dense(model(), matrices_only=True), Dense(model(torch.float32), matrices_only=False)]
    for rank in options.ranks:
        if "lora" in options.methods:
            found.append(Lora(model(), rank))
        if "sketch" in options.methods:
            found += [Sketch(model(), rank, kind, options.spectral_power) for kind in options.projections]
    return found


def summarize(
    found: list[Contestant], measured: dict[int, list[dict[str, float]]], tokens: int
) -> list[dict[str, Any]]:
    """One row a contestant: medians of the parts, in seconds, and ratios."""
    rows = []
    for place, contestant in enumerate(found):
        runs = measured[place]
        row: dict[str, Any] = {"method": contestant.name, "rank": contestant.rank}
        row |= {part: statistics.median(run[part] for run in runs) for part in PARTS}
        row["forward + backward"] = statistics.median(run["forward"] + run["backward"] for run in runs)
        row["step"] = statistics.median(run["rule"] + run["update"] for run in runs)
        row["sent bytes"] = contestant.sent_bytes
        rows.append(row)
    floor = next((row for row in rows if row["method"] == Floor.name), None)
    for row, contestant in zip(rows, found, strict=True):
        if floor and contestant.extra_operations:
            matrices, every = rows[1], rows[2]
            rate = found[1].extra_operations / (matrices["forward + backward"] - floor["forward + backward"])
            row["bound"] = floor["forward + backward"] + contestant.extra_operations / rate
            row["of bound"] = row["forward + backward"] / row["bound"]
            row["of dense"] = row["forward + backward"] / matrices["forward + backward"]
            row["step of AdamW's"] = row["step"] / every["step"]
        lora = next((other for other in rows if other["method"] == "LoRA" and other["rank"] == row["rank"]), None)
        if lora and row is not lora:
            row["of LoRA"] = row["forward + backward"] / lora["forward + backward"]
        row["step of f + b"] = row["step"] / row["forward + backward"]
        row["draw of step"] = row["draw"] / (row["forward + backward"] + row["step"])
    return rows


COLUMNS = {
    "forward": "{:.3f}", "backward": "{:.3f}", "forward + backward": "{:.3f}", "of bound": "{:.2f}", "of dense": "{:.2f}",
    "of LoRA": "{:.2f}", "rule": "{:.3f}", "update": "{:.3f}", "step of f + b": "{:.1%}", "step of AdamW's": "{:.2f}",
    "probe": "{:.3f}", "draw of step": "{:.2%}", "sync": "{:.3f}", "sent bytes": "{:,}",
}  # fmt: skip


def as_table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("method", "rank"):
        table.add_column(name)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [form.format(row[name]) if row.get(name) else "" for name, form in COLUMNS.items()]
        table.add_row(row["method"], str(row["rank"] or ""), *cells)
    return table


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| method | rank | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * (len(COLUMNS) + 1)]
    for row in rows:
        cells = [form.format(row[name]) if row.get(name) else "" for name, form in COLUMNS.items()]
        lines.append(f"| {row['method']} | {row['rank'] or ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_profile(contestant: Contestant, batches: Batches, file: Path) -> str:
    """A trace of one step, to be opened in chrome://tracing or Perfetto, and a table of its operations."""
    contestant.step(batches)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as trace:
        contestant.step(batches)
    trace.export_chrome_trace(str(file))
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return trace.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rows", type=int, default=4, help="sequences in a microbatch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches in a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--projections", nargs="+", choices=PROJECTIONS, default=["hadamard"])
    parser.add_argument("--spectral_power", type=float, default=1.0, help="of the sketches' update")
    parser.add_argument(
        "--methods", nargs="+", choices=("dense", "lora", "sketch"), default=["dense", "lora", "sketch"]
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="file for rows and settings as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument(
        "--profile", type=Path, help="write a trace of one step of the last method to this file, and no table"
    )
    options = parser.parse_args()
    for file in (options.output, options.profile):
        if file and not file.absolute().parent.is_dir():
            parser.error(f"{file}: there is no folder {file.absolute().parent}")
    if min(options.repeats, options.rows, options.tokens, options.accumulation) < 1:
        parser.error("--repeats, --rows, --tokens and --accumulation must be at least 1")
    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)

    found = contestants(options)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.tokens)
    batches = [
        torch.randint(0, vocabulary, shape, generator=generator).to(options.device)
        for _ in range(options.accumulation)
    ]
    console = Console(width=230)
    if options.profile:
        console.print(write_profile(found[-1], batches, options.profile), highlight=False)
        console.print(f"{options.profile}: one step of {found[-1].name}, rank {found[-1].rank}")
        return
    measured: dict[int, list[dict[str, float]]] = {place: [] for place in range(len(found))}
    for repeat in track(range(options.repeats + 1), "rounds", console=console, transient=True):
        for place, contestant in enumerate(found):
            gc.collect()
            seconds = contestant.step(batches)
            if repeat:
                measured[place].append(seconds)
    rows = summarize(found, measured, options.rows * options.tokens)
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    title = (
        f"{options.shape}: {options.accumulation} x {options.rows} x {options.tokens} tokens, {device}, torch {torch.__version__}; "
        "seconds"
    )
    if options.markdown:
        print(f"{title}\n\n{as_markdown(rows)}")
    else:
        console.print(as_table(rows, title))
    if options.output:
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
        options.output.write_text(json.dumps({"title": title, "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
