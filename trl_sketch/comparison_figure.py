"""A comparison as a figure: reward and accuracy against steps and seconds, memory and time by part, KL."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from .comparison import (
    BUDGET,
    PREDICTED,
    REALIZED,
    Comparison,
    Curve,
    accuracy_curve,
    against_seconds,
    against_steps,
    logged,
    memory_of,
    seconds_per_step,
    smoothing_window,
)
from .comparison_page import PARTS, parts_of, size_of, unit_for
from .statistics import LEVEL, bootstrap_interval


# Okabe and Ito's colours, which are told apart without colour vision as well; and line styles, in case they are not.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), (0, (3, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STACK = ("#BBBBBB", "#332288", "#88CCEE", "#DDCC77", "#44AA99", "#AA4499", "#882255")  # Tol's, for parts of bars
_PART_COLORS = dict(zip(PARTS, _STACK, strict=False))
_TIME_COLORS = {"rollout": _STACK[1], "update": _STACK[4], "sync": _STACK[5], "rest": _STACK[0]}
_BELOW: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1.0, -0.22), "fontsize": 9, "columnspacing": 1.2}
_LOOKS: dict[str, Any] = {
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25},
    **{
        "axes.axisbelow": True,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
    },
}


def draw(comparison: Comparison, file: Path) -> None:
    """Write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = _rows(comparison)
    bars = 0.45 * len(comparison.methods) + 1.3
    heights = [bars if row[0] in ("final", "memory", "peak") else 3.2 for row in rows]
    with plt.rc_context(_LOOKS):  # type: ignore[arg-type]
        figure, axes = plt.subplot_mosaic(
            rows, figsize=(11, sum(heights) + 0.5), height_ratios=heights, layout="constrained"
        )
        figure.get_layout_engine().set(h_pad=0.09, w_pad=0.09)  # inches
        for name, axis in axes.items():
            _PANELS[name](comparison, axis)
        handles, labels = axes["reward steps"].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper center", ncols=min(4, len(labels)), fontsize=11, handlelength=3
        )
        figure.savefig(file, dpi=130)
        plt.close(figure)


def _rows(comparison: Comparison) -> list[Any]:
    """Names of the panels, row by row; those without data are left out."""
    rows: list[Any] = [["reward steps", "reward seconds"]]
    if comparison.kinds:
        rows += [["accuracy steps", "accuracy seconds"], ["final", "difference"]]
    single = ["memory"] * bool(parts_of(comparison)) + ["time"]
    single += ["peak"] * any(run.record.peak_bytes for run in comparison.runs)
    single += ["kl"] * any(len(logged(run, name)[2]) for run in comparison.runs for name in (PREDICTED, REALIZED))
    rows += [single[i : i + 2] for i in range(0, len(single), 2)]
    return [row if len(row) == 2 else row * 2 for row in rows]


# ------------------------------------------------------------------------------------------------------------- curves


def _look(index: int) -> dict[str, Any]:
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": _STYLES[index % len(_STYLES)]}


def _band(axis: Any, curve: Curve, index: int, label: str) -> None:
    look = _look(index)
    axis.plot(curve.x, curve.mean, linewidth=1.8, label=label, **look)
    low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
    axis.fill_between(curve.x, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _reward(comparison: Comparison, axis: Any, seconds: bool) -> None:
    window = min(smoothing_window(len(logged(run, "reward")[2])) for run in comparison.runs)
    for index, (label, runs) in enumerate(comparison.methods.items()):
        curve = (against_seconds if seconds else against_steps)(runs, "reward", window)
        if curve is not None:
            _band(axis, curve, index, label)
    said = f" (mean of {window} entries of the log)" if window > 1 else ""
    axis.set(xlabel="seconds of training" if seconds else "optimizer step", title="" if seconds else f"Reward{said}")
    axis.set_xlim(left=0)
    axis.set_ylabel("reward")


def _accuracy(comparison: Comparison, axis: Any, seconds: bool) -> None:
    """Before and after training, and in between where that was logged, each with a bar of one deviation."""
    kind = comparison.kinds[-1]
    curves = [accuracy_curve(runs, kind, "seconds" if seconds else "step") for runs in comparison.methods.values()]
    width = max(curve.x[-1] for curve in curves)
    for index, curve in enumerate(curves):
        aside = 0.012 * width * (index - (len(curves) - 1) / 2)  # bars at the same step would hide each other
        x, look = curve.x + aside, _look(index)
        axis.plot(x, 100 * curve.mean, linewidth=1, alpha=0.6, **look)
        style = {"fmt": _MARKERS[index % len(_MARKERS)], "capsize": 3, "markersize": 6, "color": look["color"]}
        axis.errorbar(x, 100 * curve.mean, 100 * curve.deviation, **style)
    problems = len(comparison.runs[0].record.problems)
    title = "" if seconds else f"Accuracy on {problems} held-out problems, {kind}"
    axis.set(xlabel="seconds of training" if seconds else "optimizer step", title=title, ylabel="percent right")
    axis.margins(x=0.04)


def _kl(comparison: Comparison, axis: Any) -> None:
    from matplotlib.lines import Line2D

    shown: dict[str, dict[str, Any]] = {}
    for index, runs in enumerate(comparison.methods.values()):
        color = _look(index)["color"]
        for name, key, style in (
            (PREDICTED, "predicted", {"linestyle": "-", "linewidth": 1.5}),
            (REALIZED, "realized", {"linestyle": ":", "linewidth": 1.8}),
            (BUDGET, "budget", {"linestyle": "--", "linewidth": 1, "alpha": 0.8}),
        ):
            window = 1 if name == BUDGET else min(smoothing_window(len(logged(run, name)[2])) for run in runs)
            curve = against_steps(runs, name, window)
            if curve is not None:
                shown[key] = style
                positive = curve.mean > 0
                axis.plot(curve.x[positive], curve.mean[positive], color=color, **style)
    handles = [Line2D([], [], color="black", **style) for style in shown.values()]
    axis.legend(handles, shown, fontsize=9, ncols=len(shown), loc="lower left", handlelength=2.5)
    axis.set(title="KL of a step", xlabel="optimizer step", ylabel="nats per token", yscale="log")
    low, high = axis.get_ylim()
    axis.set_ylim(low / (high / low) ** 0.15, high)  # room for the legend
    axis.set_xlim(left=0)


# --------------------------------------------------------------------------------------------------------------- bars


def _stack(
    axis: Any, rows: list[dict[str, float]], colors: dict[str, str], labels: list[str], ends: list[str]
) -> None:
    """A horizontal bar for each row, of its parts one behind the other; `ends` is written behind the bars."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    left = np.zeros(len(rows))
    visible = 0.003 * max(sum(row.values()) for row in rows)
    for name in names:
        sizes = np.array([row.get(name, 0.0) for row in rows])
        if sizes.max() > visible:
            axis.barh(range(len(rows)), sizes, 0.62, left=left, color=colors[name], label=name)
        left += sizes
    for y, (total, said) in enumerate(zip(left, ends, strict=True)):
        axis.annotate(said, (total, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    _name_rows(axis, labels)
    axis.set_xlim(0, 1.2 * max(left))
    columns = len(axis.get_legend_handles_labels()[0])
    axis.legend(**_BELOW, ncols=min(5, columns))


def _name_rows(axis: Any, labels: list[str]) -> None:
    axis.set_yticks(range(len(labels)), [textwrap.fill(label, 18) for label in labels])
    axis.invert_yaxis()
    axis.grid(False, axis="y")


def _memory(comparison: Comparison, axis: Any) -> None:
    memories = [memory_of(runs) for runs in comparison.methods.values()]
    parts = parts_of(comparison)
    scale, unit = unit_for(max(sum(memory.values()) for memory in memories))
    others = [part for part in parts if part not in _PART_COLORS]
    colors = _PART_COLORS | {part: _STACK[5 + i % 2] for i, part in enumerate(others)}
    rows = [{part: memory.get(part, 0) / scale for part in parts} for memory in memories]
    _stack(axis, rows, colors, [*comparison.methods], [size_of(sum(memory.values())) for memory in memories])
    axis.set(title="Memory of the tensors", xlabel=unit)


def _peak(comparison: Comparison, axis: Any) -> None:
    groups = [[run.record for run in runs] for runs in comparison.methods.values()]
    peaks = [float(np.mean([record.peak_bytes for record in records])) for records in groups]
    means = [float(np.mean([record.mean_bytes for record in records])) for records in groups]
    scale, unit = unit_for(max(peaks))
    rows = [{"average": mean / scale, "peak": (peak - mean) / scale} for mean, peak in zip(means, peaks, strict=True)]
    _stack(
        axis, rows, {"average": _STACK[1], "peak": _STACK[2]}, [*comparison.methods], [size_of(peak) for peak in peaks]
    )
    whole = "the whole process" if groups[0][0].device == "cpu" else "PyTorch's allocator"
    axis.set(title=f"Memory of {whole}, average and peak", xlabel=unit)


def _time(comparison: Comparison, axis: Any) -> None:
    rows = []
    for runs in comparison.methods.values():
        own = [seconds_per_step(run) for run in runs]
        names = dict.fromkeys(name for name in _TIME_COLORS if any(name in parts for parts in own))
        rows.append({name: float(np.mean([parts.get(name, 0.0) for parts in own])) for name in names})
    ends = [f"{sum(row.values()):#.3g} s" for row in rows]
    _stack(axis, rows, _TIME_COLORS, [*comparison.methods], ends)
    axis.set(title="Time of a step", xlabel="seconds")


# ------------------------------------------------------------------------------------------------- accuracy by method


def _final(comparison: Comparison, axis: Any) -> None:
    """A dot for every seed, and a line at their mean."""
    for index, label in enumerate(comparison.methods):
        for kind, place in zip(comparison.kinds, _places(comparison), strict=True):
            means = 100 * comparison.scores(label, "after", kind).mean(axis=1)
            y, style = index + place, _kind_style(kind, index)
            axis.plot(means, [y] * len(means), "o", markersize=6, alpha=0.75, **style)
            axis.plot([means.mean()] * 2, [y - 0.16, y + 0.16], color="black", linewidth=1.5)
    _name_rows(axis, [*comparison.methods])
    axis.set(title="Accuracy after training, a dot for each seed", xlabel="percent right")
    _legend_of_kinds(comparison, axis)


def _difference(comparison: Comparison, axis: Any) -> None:
    """The difference from the reference, with its interval."""
    labels = [label for label in comparison.methods if label != comparison.reference]
    for row, label in enumerate(labels):
        index = [*comparison.methods].index(label)
        for kind, place in zip(comparison.kinds, _places(comparison), strict=True):
            differences = 100 * comparison.differences(label, kind)
            low, high = bootstrap_interval(differences)
            mean, style = differences.mean(), _kind_style(kind, index)
            axis.errorbar(
                mean,
                row + place,
                xerr=[[max(0.0, mean - low)], [max(0.0, high - mean)]],
                fmt="o",
                capsize=4,
                markersize=6,
                **style,
            )
    axis.axvline(0, color="black", linewidth=1)
    _name_rows(axis, labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set(title=f"minus {comparison.reference}, with {LEVEL:.0%} interval", xlabel="points")


def _places(comparison: Comparison) -> list[float]:
    """Where the kinds of accuracy lie about a method's line."""
    return [0.0] if len(comparison.kinds) == 1 else [-0.18, 0.18]


def _kind_style(kind: str, index: int) -> dict[str, Any]:
    color = _look(index)["color"]
    return {"color": color, "markerfacecolor": "white" if kind == "greedy" else color}


def _legend_of_kinds(comparison: Comparison, axis: Any) -> None:
    from matplotlib.lines import Line2D

    looks: list[dict[str, Any]] = [
        {"markerfacecolor": "white" if kind == "greedy" else "black"} for kind in comparison.kinds
    ]
    handles = [Line2D([], [], color="black", marker="o", linestyle="none", **look) for look in looks]
    axis.legend(handles, comparison.kinds, **_BELOW, ncols=len(handles))


_PANELS: dict[str, Any] = {
    "reward steps": lambda comparison, axis: _reward(comparison, axis, seconds=False),
    "reward seconds": lambda comparison, axis: _reward(comparison, axis, seconds=True),
    "accuracy steps": lambda comparison, axis: _accuracy(comparison, axis, seconds=False),
    "accuracy seconds": lambda comparison, axis: _accuracy(comparison, axis, seconds=True),
    "final": _final,
    "difference": _difference,
    "memory": _memory,
    "time": _time,
    "peak": _peak,
    "kl": _kl,
}
