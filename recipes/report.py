"""What a recipe leaves at its end: a table of accuracies, one of bytes, the plot and the record `run.json`."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import Job, Result, console
from rich.table import Table
from torch import nn
from trl import GRPOTrainer

from trl_sketch.layers import SketchLinear
from trl_sketch.records import RunRecord, package_versions, problem_id


METHODS = {"sketch": "gradient sketch", "lora": "LoRA", "dense": "dense AdamW"}
TRAINED = {
    "sketch": "every attention and MLP matrix; embeddings, norms and LM head stay as they were",
    "lora": "an fp32 adapter beside every attention and MLP matrix; the model's own weights stay as they were",
    "dense": "every weight, embeddings, norms and LM head included (the table counts the matrices only)",
    "same matrices": "the matrices that a sketch trains; embeddings, norms and LM head stay as they were",
}


def matrix_shapes(model: nn.Module, rank: int) -> list[tuple[int, int, int]]:
    """(outputs, inputs, rank) of the matrices that a sketch trains: by default every linear layer but the LM head."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in name}
    sketched = [m for m in linears.values() if isinstance(m, SketchLinear)]
    if sketched:
        return [(m.out_features, m.in_features, m.group.rank) for m in sketched]
    head = model.get_output_embeddings()
    others = [m for m in linears.values() if m is not head]
    return [(m.out_features, m.in_features, min(rank, m.in_features)) for m in others]


def state_bytes(shapes: list[tuple[int, int, int]], update_rule: str = "row_adam") -> dict[str, tuple[int, int]]:
    """Bytes of (weights, training state) that each method needs for matrices of these (outputs, inputs, rank).

    Dense AdamW keeps fp32 weights, and a gradient and two moments of the same size. LoRA keeps bf16 weights, and in fp32
    the adapter, its gradient and two moments. A sketch keeps bf16 weights, and in fp32 the sketch and what `update_rule`
    keeps: nothing, for RowAdam one number per row, or for Adam two per entry. Activations, projections, and parameters outside these
    matrices are not counted.
    """
    weights = sum(d * k for d, k, _ in shapes)
    moments = {"sgd": lambda d, r: 0, "row_adam": lambda d, r: 4 * d, "adam": lambda d, r: 8 * d * r}[update_rule]
    return {
        "sketch": (2 * weights, sum(4 * d * r + moments(d, r) for d, _, r in shapes)),
        "lora": (2 * weights, sum(16 * r * (d + k) for d, k, r in shapes)),
        "dense": (4 * weights, 12 * weights),
    }


def is_partly_frozen(model: nn.Module) -> bool:
    return any(not parameter.requires_grad for parameter in model.parameters())


def report(method: str, settings: Any, rank: int, trainer: GRPOTrainer, job: Job, result: Result) -> None:
    """Print accuracies, training state, time and files; write the plot and `run.json` into the output folder.

    Args:
        method: `sketch`, `lora` or `dense`.
        settings: The method's own, a dataclass.
        rank: Of the sketch or the adapter; for `dense`, the one that the others are compared at.
    """
    if not trainer.is_world_process_zero():
        return
    output, plot_file = Path(trainer.args.output_dir), job.script.plot_file
    has_rewards = any("reward" in log for log in trainer.state.log_history)
    if has_rewards:
        plot(trainer.state.log_history, job, result, output / plot_file)

    if result.before and result.after:
        table = Table(title=job.title, title_justify="left")
        table.add_column(f"right on {len(job.held_out)} held-out problems")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right", style="bold")
        table.add_row("greedy", f"{result.before.greedy:.1%}", f"{result.after.greedy:.1%}")
        table.add_row("sampled at temperature 1", f"{result.before.sampled:.1%}", f"{result.after.sampled:.1%}")
        console.print(table)

    shapes = matrix_shapes(trainer.model, rank)
    ranks = sorted({own for _, _, own in shapes})
    said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    table = Table(title=f"Bytes for the attention and MLP matrices, each at {said}", title_justify="left")
    table.add_column("")
    for column in ("weights", "training state", "together"):
        table.add_column(column, justify="right")
    for name, (weights, state) in state_bytes(shapes, getattr(settings, "update_rule", "row_adam")).items():
        cells = [METHODS[name], f"{weights:,}", f"{state:,}", f"{weights + state:,}"]
        table.add_row(*cells, style="bold" if name == method else None)
    console.print(table)

    trains = "same matrices" if method == "dense" and is_partly_frozen(trainer.model) else method
    console.print(f"Trained  {TRAINED[trains]}")
    console.print(f"Time     {result.clock.seconds:.0f} s, up to step {trainer.state.global_step}")
    console.print(f"Model    {output if job.script.save_trained_model else 'not saved'}")
    console.print(f"Plot     {output / plot_file if has_rewards else 'none: no step was logged'}")
    file = record(trainer.args.run_name or METHODS[method], settings, trainer, job, result).write(output)
    console.print(f"Record   {file}")


def record(label: str, settings: Any, trainer: GRPOTrainer, job: Job, result: Result) -> RunRecord:
    """All of the run that a comparison needs."""
    args, state, clock = trainer.args, trainer.state, result.clock
    asked = json.loads(json.dumps(asdict(job.script) | args.to_dict(), default=str))
    numbers = [{k: v for k, v in log.items() if isinstance(v, int | float)} for log in state.log_history]
    accuracy = {}
    if result.before and result.after:
        accuracy = {
            when: {"greedy": scores.greedy_scores, "sampled": scores.sampled_scores}
            for when, scores in (("before", result.before), ("after", result.after))
        }
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else ""
    return RunRecord(
        label=label,
        seed=args.seed,
        settings=asked,
        method=json.loads(json.dumps(asdict(settings), default=str)),
        versions=package_versions(),
        device=f"cuda: {device}" if device else args.device.type,
        steps=state.global_step,
        planned_steps=state.max_steps,
        log=[log for log in numbers if "seconds" in log],
        seconds=clock.seconds,
        accuracy=accuracy,
        problems=[problem_id(problem["prompt"]) for problem in job.held_out],
        memory=clock.memory,
        peak_bytes=max(clock.peaks, default=0),
        mean_bytes=round(fmean(clock.peaks)) if clock.peaks else 0,
    )


def plot(log_history: list[dict[str, Any]], job: Job, result: Result, file: Path) -> None:
    """Write the reward curve; below it, if the run logged them, the step control's predicted KL, its budget and α."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [log["step"] for log in log_history if "reward" in log]
    rewards = [log["reward"] for log in log_history if "reward" in log]
    windows = [rewards[max(0, i - 5) : i + 6] for i in range(len(rewards))]
    smooth = [sum(window) / len(window) for window in windows]
    controlled = [log for log in log_history if log.get("sketch/predicted_kl")]

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    figure, axes = plt.subplots(
        2 if controlled else 1, sharex=True, squeeze=False, figsize=(8, 7 if controlled else 4.5), layout="constrained"
    )
    top = axes[0, 0]
    top.plot(steps, rewards, color="tab:blue", alpha=0.3, linewidth=1, label="reward of a step")
    top.plot(steps, smooth, color="tab:blue", linewidth=2.2, label="mean of 11 steps around it")
    if result.before and result.after:
        for kind, marker, color in (("greedy", "o", "tab:orange"), ("sampled", "D", "tab:green")):
            start, end = getattr(result.before, kind), getattr(result.after, kind)
            label = f"held-out, {kind}: {start:.0%} → {end:.0%}"
            top.plot(
                [0, steps[-1]], [start, end], marker, color=color, markersize=9, clip_on=False, zorder=3, label=label
            )
    top.set(title=job.title, ylabel="reward", xlim=(0, steps[-1]))
    if max(rewards) <= 1 and min(rewards) >= 0:
        top.set_ylim(0, 1)
    top.legend(loc="lower right", frameon=False)

    if controlled:
        bottom = axes[1, 0]
        x = [log["step"] for log in controlled]
        bottom.plot(x, [log["sketch/predicted_kl"] for log in controlled], color="tab:purple", label="predicted KL")
        if "sketch/kl_budget" in controlled[0]:
            budget = [log["sketch/kl_budget"] for log in controlled]
            bottom.plot(x, budget, color="black", linestyle="--", label="KL budget")
        bottom.set(yscale="log", ylabel="KL of a step, nats per token")
        right = bottom.twinx()
        right.plot(x, [log["sketch/alpha"] for log in controlled], color="tab:red", alpha=0.7, label="α (right)")
        right.set(ylabel="α", ylim=(0, None))
        right.grid(False)
        lines = bottom.get_lines() + right.get_lines()
        bottom.legend(lines, [line.get_label() for line in lines], loc="lower center", frameon=False, ncols=3)
    axes[-1, 0].set_xlabel("optimizer step")
    figure.savefig(file, dpi=130)
    plt.close(figure)
