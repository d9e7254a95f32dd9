"""A comparison as a page in Markdown. The figure beside it is made by `comparison_figure`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .comparison import (
    BUDGET,
    GAPS,
    PREDICTED,
    REALIZED,
    Array,
    Comparison,
    Run,
    deviation,
    logged,
    memory_of,
    seconds_per_step,
)
from .records import WHENS
from .statistics import LEVEL, RESAMPLES, bootstrap_interval


PARTS = ("weights", "adapter", "gradient", "sketch", "optimizer")  # in this order; others follow
_UNITS = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def page(comparison: Comparison, figure_file: str, command: str, sweep: dict[str, Any] | None = None) -> str:
    """The page.

    Args:
        comparison: The runs.
        figure_file: Name of the figure, from the page's folder.
        command: What made the page.
        sweep: See [`load_sweep`].
    """
    labels, seeds = [*comparison.methods], comparison.seeds
    count = f"{len(seeds)} seeds each" if len(seeds) > 1 else "one seed each"
    lines = [f"# {' · '.join(labels)}: {count}", "", f"    {command}", ""]
    if comparison.allowed:
        lines += ["> **These runs differ in more than the method.** It was allowed by `--allow`:", ">"]
        lines += [f"> * {sentence}" for sentence in comparison.allowed] + [""]
    lines += [f"![reward, accuracy, memory, time and KL]({figure_file})", ""]
    lines += ["Bands and ± are one standard deviation over seeds.", ""] if len(seeds) > 1 else []
    if comparison.kinds:
        lines += _accuracy(comparison)
    lines += _reward(comparison)
    lines += _memory(comparison)
    lines += _time(comparison)
    lines += _kl(comparison)
    lines += _gap(comparison)
    if sweep:
        lines += _sweep(sweep)
    lines += _settings(comparison)
    return "\n".join(lines).rstrip() + "\n"


# ------------------------------------------------------------------------------------------------------------ sections


def _accuracy(comparison: Comparison) -> list[str]:
    kinds, reference, problems = comparison.kinds, comparison.reference, len(comparison.runs[0].record.problems)
    seeds = comparison.seeds
    drawn = "seeds and problems are drawn anew" if len(seeds) > 1 else "problems are drawn anew; one seed cannot be"
    samples = comparison.runs[0].record.accuracy["after"]["sampled"]
    said = f" `sampled` is the mean of {len(samples[0])} samples a problem." if "sampled" in kinds else ""
    lines = [
        "## Accuracy",
        "",
        f"Percent of {problems} held-out problems.{said} Behind it the difference from {reference} in points, with a "
        f"{LEVEL:.0%} bootstrap interval: paired by seed and problem, {drawn}, {RESAMPLES:,} times.",
        "",
    ]
    header = [
        "",
        *(f"{when}, {kind}" for kind in kinds for when in WHENS),
        *(f"{kind} − {reference}" for kind in kinds),
    ]
    rows = []
    for label in comparison.methods:
        cells = [percent(comparison.scores(label, when, kind)) for kind in kinds for when in WHENS]
        for kind in kinds:
            cells.append("–" if label == reference else _points(comparison.differences(label, kind)))
        rows.append([label, *cells])
    lines += table(header, rows)
    if len(seeds) > 1:
        kind = kinds[-1]
        lines += [f"After training, {kind}, seed by seed:", ""]
        scores = {label: 100 * comparison.scores(label, "after", kind).mean(axis=1) for label in comparison.methods}
        lines += table(["seed", *map(str, seeds)], [[n, *(f"{v:.1f}" for v in own)] for n, own in scores.items()])
    return lines


def _reward(comparison: Comparison) -> list[str]:
    rows = []
    for label, runs in comparison.methods.items():
        rewards = [logged(run, "reward")[2] for run in runs]
        ends = [values[-max(1, len(values) // 10) :].mean() for values in rewards]
        rows.append([label, mean_and_deviation([v[0] for v in rewards], ".3f"), mean_and_deviation(ends, ".3f")])
    return ["## Reward", "", *table(["", "of the first step logged", "mean of the last tenth"], rows)]


def _memory(comparison: Comparison) -> list[str]:
    lines = ["## Memory", ""]
    parts = parts_of(comparison)
    if parts:
        lines += [
            "Of the tensors by part, as the runs counted them; what training keeps beside the weights is `training state`.",
            "",
        ]
        rows = []
        for label, runs in comparison.methods.items():
            memory = memory_of(runs)
            state = sum(memory.values()) - memory.get("weights", 0)
            cells = [size_of(memory.get(part, 0)) for part in parts]
            rows.append([label, *cells, f"**{size_of(state)}**", f"{state:,.0f}", size_of(sum(memory.values()))])
        lines += table(["", *parts, "training state", "in bytes", "together"], rows)
    if any(run.record.peak_bytes for run in comparison.runs):
        where = "the process" if comparison.runs[0].record.device == "cpu" else "PyTorch's allocator"
        lines += [f"While training, {where} held, with the model, activations and all else:", ""]
        scale, unit = unit_for(max(run.record.peak_bytes for run in comparison.runs))
        rows = []
        for label, runs in comparison.methods.items():
            sizes = ([getattr(run.record, f"{what}_bytes") / scale for run in runs] for what in ("mean", "peak"))
            rows.append([label, *(mean_and_deviation([*own], ".3f") for own in sizes)])
        lines += table(["", f"average, {unit}", f"peak, {unit}"], rows)
    return lines if len(lines) > 2 else []


def _time(comparison: Comparison) -> list[str]:
    device = comparison.runs[0].record.device
    names = list(dict.fromkeys(name for run in comparison.runs for name in seconds_per_step(run)))
    rows = []
    for label, runs in comparison.methods.items():
        own = [seconds_per_step(run) for run in runs]
        cells = [mean_and_deviation([parts.get(name, 0.0) for parts in own], ".3f") for name in names]
        step = mean_and_deviation([run.record.seconds / run.record.steps for run in runs], ".3f")
        rows.append([label, *cells, step, mean_and_deviation([run.record.seconds for run in runs], ".0f")])
    said = f"Seconds of a step and of the whole training, on {device}; `rest` is what lies between the parts."
    return ["## Time", "", said, "", *table(["", *names, "a step", "training"], rows)]


def _kl(comparison: Comparison) -> list[str]:
    rows = []
    for label, runs in comparison.methods.items():
        values = {name: [logged(run, name)[2] for run in runs] for name in (BUDGET, PREDICTED, REALIZED)}
        if any(len(own) for name in (PREDICTED, REALIZED) for own in values[name]):
            cells = [
                mean_and_deviation([v.mean() for v in own], ".2e") if all(map(len, own)) else "–"
                for own in values.values()
            ]
            rows.append([label, *cells])
    if not rows:
        return []
    said = "Nats per token that a step moves the policy by, mean over the steps that logged it."
    return ["## KL", "", said, "", *table(["", "budget", "predicted", "realized"], rows)]


def _gap(comparison: Comparison) -> list[str]:
    names = [name for name in GAPS if any(len(logged(run, name)[2]) for run in comparison.runs)]
    if not names:
        return []

    def cells(runs: list[Run], name: str) -> list[str]:
        values = [logged(run, name)[2] for run in runs]
        if not all(map(len, values)):
            return ["–", "–"]
        means, ends = [own.mean() for own in values], [own[-1] for own in values]
        return [mean_and_deviation(means, ".2e"), mean_and_deviation(ends, ".2e")]

    rows = [
        [label, *(cell for name in names for cell in cells(runs, name))] for label, runs in comparison.methods.items()
    ]
    said = (
        "How far apart the log-probabilities are that the trainer and the rollouts' model give a token, in nats: the mean of "
        "what was measured while training, and the last of it."
    )
    header = ["", *(f"`{name}`, {which}" for name in names for which in ("while training", "last"))]
    return ["## Trainer and rollouts", "", said, "", *table(header, rows)]


def _sweep(sweep: dict[str, Any]) -> list[str]:
    seeds = ", ".join(map(str, sweep["seeds"]))
    lines = [
        "## How the step sizes were chosen",
        "",
        f"By {sweep['criterion']}, on {sweep['split']}: {sweep['steps']} steps, seed {seeds}. Each value with its mean "
        "score; the one that was taken is bold.",
        "",
    ]
    rows = []
    for label, own in sweep["methods"].items():
        tried = []
        for value, scores in zip(own["values"], own["scores"], strict=True):
            said = f"{value:g}: {np.mean(scores):.3f}"
            tried.append(f"**{said}**" if value == own["chosen"] else said)
        rows.append([label, f"`{own['knob']}`", str(len(tried)), ", ".join(tried)])
    return lines + table(["", "what", "values", "value: score"], rows)


def _settings(comparison: Comparison) -> list[str]:
    record = comparison.runs[0].record
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines = ["## Settings", "", f"Seeds {', '.join(map(str, comparison.seeds))}; {record.device}; {versions}.", ""]
    shared = comparison.shared_settings()
    lines += ["<details>", f"<summary>{len(shared)} settings alike in all runs</summary>", "", *_yaml(shared)]
    lines += ["</details>", ""]
    for label in comparison.methods:
        lines += [f"{label}:", "", *_yaml(comparison.settings_of(label))]
    return lines


# --------------------------------------------------------------------------------------------------------------- cells


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, and an empty one."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows), ""]


def percent(scores: Array) -> str:
    """Mean ± deviation over the rows of (seeds, problems), in percent."""
    return mean_and_deviation(100 * scores.mean(axis=1), ".1f")


def mean_and_deviation(values: Sequence[float] | Array, form: str) -> str:
    """`12.3 ± 0.4`; of one value, the value."""
    own = np.asarray(values, float)
    said = format(own.mean(), form)
    return f"{said} ± {format(float(deviation(own)), form)}" if len(own) > 1 else said


def size_of(size: float) -> str:
    """Bytes as `1.5 MiB`; nothing as a dash."""
    if not size:
        return "–"
    for scale, unit in _UNITS:
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def unit_for(largest: float) -> tuple[int, str]:
    """Bytes of a unit, and its name, in which `largest` is at least one."""
    return next(((scale, unit) for scale, unit in _UNITS if largest >= scale), (1, "B"))


def parts_of(comparison: Comparison) -> list[str]:
    """Names of the parts of memory that any run has."""
    names = dict.fromkeys(part for run in comparison.runs for part, size in run.record.memory.items() if size)
    return [part for part in PARTS if part in names] + [part for part in names if part not in PARTS]


def _points(differences: Array) -> str:
    low, high = bootstrap_interval(differences)
    return f"{100 * differences.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _yaml(settings: dict[str, Any]) -> list[str]:
    return [
        "```yaml",
        *(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()),
        "```",
        "",
    ]


# --------------------------------------------------------------------------------------------------------------- sweep


def load_sweep(file: Path, labels: Iterable[str]) -> dict[str, Any]:
    """Read how the step sizes were chosen.

    ```json
    {"split": "512 development problems", "seeds": [0, 1], "steps": 200, "criterion": "the best sampled accuracy",
     "methods": {"LoRA": {"knob": "learning_rate", "values": [5e-4, 1e-3], "scores": [[0.7, 0.8], [0.8, 0.9]], "chosen": 1e-3}}}
    ```

    `scores` has a list for every value, with a score for every seed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not JSON, or something in it is missing or does not fit.
    """
    if not file.is_file():
        raise FileNotFoundError(f"--sweep {file}: there is no such file")

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"--sweep {file}: {message}")

    try:
        sweep = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--sweep {file} cannot be read as JSON: {error}") from None
    names = ("split", "seeds", "steps", "criterion", "methods")
    need(isinstance(sweep, dict) and all(name in sweep for name in names), f"it must have {', '.join(names)}")
    mappings = [sweep["methods"], *(sweep["methods"].values() if isinstance(sweep["methods"], dict) else ())]
    need(all(isinstance(value, dict) for value in mappings), "methods must have an object for each method")
    without = [label for label in labels if label not in sweep["methods"]]
    need(
        not without,
        f"methods has no {', '.join(without)}: every method that is compared has to be searched for as well",
    )
    for label, own in sweep["methods"].items():
        lacks = [name for name in ("knob", "values", "scores", "chosen") if name not in own]
        need(not lacks, f"{label} has no {', '.join(lacks)}")
        need(len(own["values"]) == len(own["scores"]), f"{label} must have a list of scores for each of its values")
        complete = all(len(scores) == len(sweep["seeds"]) for scores in own["scores"])
        need(complete, f"{label} must have a score for each of the seeds {sweep['seeds']}")
        need(own["chosen"] in own["values"], f"{label} has chosen={own['chosen']}, which is not among its values")
    return sweep
