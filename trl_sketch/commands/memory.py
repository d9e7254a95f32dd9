"""`trl-sketch memory`: what a training step takes, part by part, and whether it fits."""

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..memory import GIB, METHODS, PARTS, Plan, Prediction, crossing_rank, largest_rank, plan_for, predict


RESERVED = 1.0  # GiB of a card that a step cannot use: the CUDA context, and what fragmentation leaves idle
_WIDTH = 150  # of tables that are not printed to a terminal
_NAMES = {"gathered": "gathered weights", "activations": "saved activations", "working": "temporaries"}
_RANKLESS = ("dense",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        action="append",
        required=True,
        help="a folder with a config.json, a built-in shape (Qwen/Qwen3-1.7B, …) or a name on the hub; may be repeated. "
        "Only the config is read",
    )
    add("--rank", action="append", type=int, help="rank of sketch and LoRA; may be repeated (default: 256)")
    add("--method", action="append", choices=METHODS, help="may be repeated (default: sketch, lora and dense)")
    add("--tokens", type=int, default=1024, help="of a sequence, prompt and completion together (default: 1024)")
    add("--microbatch", type=int, default=1, help="per_device_train_batch_size (default: 1)")
    add(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute activations in backward, as GRPOConfig does by default (default: yes)",
    )
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="what the model computes in (default: bfloat16)",
    )
    add("--world-size", type=int, default=1, help="GPUs, with FSDP2 if more than one (default: 1)")
    add("--gpu-memory", action="append", type=float, metavar="GIB", help="a card to judge; may be repeated")
    add(
        "--measure",
        nargs="?",
        const="auto",
        choices=("auto", "cuda", "fake"),
        help="also run a whole training step: on the GPU with random weights (cuda), or on tensors without data (fake, some "
        "seconds); auto: on the GPU if there is one",
    )
    add("--plot", metavar="FILE.png", help="write the parts as a bar chart")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print bytes as JSON, and nothing else")
    printed.add_argument(
        "--markdown", action="store_true", help="print the totals as a Markdown table, and nothing else"
    )


@dataclass(frozen=True)
class _Row:
    """A line of the table."""

    model: str
    plan: Plan
    prediction: Prediction
    measured: int | None
    measured_on: str | None

    @property
    def rank(self) -> str:
        return "–" if self.plan.method in _RANKLESS else str(self.plan.rank)


def run(args: argparse.Namespace) -> int:
    cards = args.gpu_memory or []
    for card in cards:
        if not RESERVED < card < 1e6:
            raise ValueError(
                f"gpu_memory={card:g} must be more than {RESERVED:g} GiB and less than a million: give the card's memory, as 24"
            )
    rows = [row for model in args.model for row in _rows(model, args)]
    if args.plot:
        _plot(rows, cards, args.plot)
    if args.json:
        print(json.dumps([_as_json(row, cards) for row in rows], indent=2))
    elif args.markdown:
        _print_markdown(rows, cards)
    else:
        _print_tables(rows, cards, args)
    return 0


def _rows(model: str, args: argparse.Namespace) -> list[_Row]:
    first = plan_for(
        model,
        args.dtype,
        tokens=args.tokens,
        microbatch=args.microbatch,
        checkpointing=args.gradient_checkpointing,
        world_size=args.world_size,
        method="dense",
        rank=1,
    )
    rows = []
    methods = args.method or ["sketch", "lora", "dense"]
    for method in dict.fromkeys(methods):
        for rank in [1] if method in _RANKLESS else dict.fromkeys(args.rank or [256]):
            plan = replace(first, method=method, rank=rank)
            measured, device = _measured(plan, args.measure)
            rows.append(_Row(model, plan, predict(plan), measured, device))
    return rows


def _measured(plan: Plan, how: str | None) -> tuple[int | None, str | None]:
    """Peak of a step in bytes, and where it was run."""
    if how is None or plan.method == "logra":
        return None, None
    if plan.world_size > 1:
        raise ValueError(
            f"world_size={plan.world_size} with measure: one GPU is measured. Leave --measure out, or set --world-size 1"
        )
    import torch

    from ..memory_measure import measure, measure_on_cuda

    if how == "cuda" or (how == "auto" and torch.cuda.is_available()):
        return measure_on_cuda(plan).peak, "cuda"
    return measure(plan).peak, "fake"


def _fits(row: _Row, card: float) -> bool:
    return row.prediction.total <= (card - RESERVED) * GIB


def _as_json(row: _Row, cards: list[float]) -> dict[str, Any]:
    plan, prediction = row.plan, row.prediction
    return {
        "model": row.model,
        "method": plan.method,
        "rank": None if plan.method in _RANKLESS else plan.rank,
        "tokens": plan.tokens,
        "microbatch": plan.microbatch,
        "gradient_checkpointing": plan.checkpointing,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "world_size": plan.world_size,
        "engine": _engine(plan),
        "total_bytes": prediction.total,
        "peak_phase": prediction.phase,
        "parts_bytes": prediction.parts,
        "phases_bytes": prediction.peaks,
        "measured_bytes": row.measured,
        "measured_on": row.measured_on,
        "less_than_lora_from_rank": None if plan.method in ("lora", *_RANKLESS) else crossing_rank(plan, "lora"),
        "fits": {f"{card:g}": _fits(row, card) for card in cards},
    }


def _engine(plan: Plan) -> str:
    if plan.world_size == 1:
        return "one GPU (DDP: the same on each)"
    return f"FSDP2 on {plan.world_size} GPUs: weights, adapters, gradients and moments sharded, sketches replicated"


# ---------------------------------------------------------------------- tables


def _print_tables(rows: list[_Row], cards: list[float], args: argparse.Namespace) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    plan = rows[0].plan
    checkpointing = "with" if plan.checkpointing else "without"
    console.print(
        f"GiB per GPU at the peak of a training step of {plan.microbatch} x {plan.tokens} tokens in {args.dtype}, "
        f"{checkpointing} gradient checkpointing. Engine: {_engine(plan)}.",
        highlight=False,
        soft_wrap=True,
    )
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        console.print(_parts_table(model, mine, cards))
        for line in _remarks(mine, cards):
            console.print(line, highlight=False, soft_wrap=True)
    console.print(
        "Not counted: generation, vLLM in the same process, the CUDA context and fragmentation"
        + (f" (for which the verdicts leave {RESERVED:g} GiB)." if cards else "."),
        highlight=False,
        style="dim",
        soft_wrap=True,
    )


def _parts_table(model: str, rows: list[_Row], cards: list[float]) -> Table:
    """A column for each method and rank, a line for each part."""
    table = Table(title=model, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.plan.method}\nr = {row.rank}" if row.rank != "–" else row.plan.method, justify="right")
    predictions = [row.prediction for row in rows]
    for part in PARTS:
        if any(prediction.parts.get(part, 0) for prediction in predictions):
            table.add_row(_NAMES.get(part, part), *(_gib(prediction.parts.get(part, 0)) for prediction in predictions))
    table.add_section()
    table.add_row("total", *(_gib(prediction.total) for prediction in predictions), style="bold")
    table.add_row("peak in", *(prediction.phase for prediction in predictions))
    for phase in ("probe", "update"):
        if any(phase in prediction.peaks for prediction in predictions):
            peaks = [prediction.peaks.get(phase, 0) for prediction in predictions]
            table.add_row(f"peak of the {phase}", *(_gib(peak) for peak in peaks), style="dim")
    if any(row.measured for row in rows):
        where = next(row.measured_on for row in rows if row.measured)
        table.add_row(f"measured ({where})", *(_gib(row.measured or 0) for row in rows))
    for card in cards:
        verdicts = ["[green]fits[/]" if _fits(row, card) else "[red]too large[/]" for row in rows]
        table.add_row(f"on {card:g} GiB", *verdicts)
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}" if size else ""


def _remarks(rows: list[_Row], cards: list[float]) -> list[str]:
    """What was not measured, where methods cross, and the largest ranks that fit."""
    plans = {row.plan.method: row.plan for row in rows if row.plan.method not in _RANKLESS}
    methods = list(plans)
    lines = []
    if any(row.measured for row in rows) and "logra" in plans:
        lines.append("logra is predicted only: its storage is not implemented here.")
    if "lora" in plans:
        for method in methods:
            if method != "lora":
                rank = crossing_rank(plans[method], "lora")
                where = "at no rank" if rank is None else "at every rank" if rank == 1 else f"from rank {rank} on"
                lines.append(f"{method} needs less than lora {where}.")
    if "lora" not in plans and "dense" in {row.plan.method for row in rows}:
        for method in methods:
            most = largest_rank(plans[method], next(r.prediction.total for r in rows if r.plan.method == "dense"))
            lines.append(f"{method} needs less than dense {'at no rank' if most is None else f'up to rank {most}'}.")
    for card in cards:
        ranks = {method: largest_rank(plan, int((card - RESERVED) * GIB)) for method, plan in plans.items()}
        said = [f"{method} up to rank {rank}" if rank else f"{method} at no rank" for method, rank in ranks.items()]
        if said:
            lines.append(f"{card:g} GiB: " + ", ".join(said) + ".")
    return lines


def _print_markdown(rows: list[_Row], cards: list[float]) -> None:
    measured_on = next((row.measured_on for row in rows if row.measured_on), None)
    measured = [] if measured_on is None else [f"measured ({measured_on})"]
    header = ["model", "method", "rank", "GiB", *measured, *(f"{card:g} GiB card" for card in cards)]
    print("| " + " | ".join(header) + " |")
    print("|" + "|".join(["---"] * len(header)) + "|")
    for row in rows:
        total = row.prediction.total / GIB
        verdicts = [
            f"fits, {card - RESERVED - total:.1f} to spare"
            if _fits(row, card)
            else f"{total - card + RESERVED:.1f} short"
            for card in cards
        ]
        own = ["–" if row.measured is None else f"{row.measured / GIB:.2f}"] if measured else []
        print("| " + " | ".join([row.model, row.plan.method, row.rank, f"{total:.2f}", *own, *verdicts]) + " |")


def _plot(rows: list[_Row], cards: list[float], path: str) -> None:
    """A stacked bar for each row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    several = len({row.model for row in rows}) > 1
    labels = [
        (f"{row.model}\n" if several else "") + row.plan.method + ("" if row.rank == "–" else f", rank {row.rank}")
        for row in rows
    ]
    figure, axes = plt.subplots(figsize=(9, 2 + 0.45 * len(rows)), layout="constrained")
    left = [0.0] * len(rows)
    for part, color in zip(PARTS, plt.get_cmap("tab20").colors, strict=False):  # type: ignore[attr-defined]
        sizes = [row.prediction.parts.get(part, 0) / GIB for row in rows]
        if any(size > 0.0005 for size in sizes):
            axes.barh(range(len(rows)), sizes, left=left, label=_NAMES.get(part, part), color=color)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.2f}", va="center")
    for card in cards:
        axes.axvline(card, color="black", linestyle="--", linewidth=0.8)
        axes.text(card, 1.01, f"{card:g} GiB", ha="center", va="bottom", transform=axes.get_xaxis_transform())
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("GiB per GPU at the peak of a training step")
    if not several:
        axes.set_title(rows[0].model, loc="left", pad=18 if cards else 6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
