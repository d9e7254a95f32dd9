"""Runs of several methods, side by side: which may be compared, and what their curves are.

Runs are compared only if they differ in nothing but the method, and every method has the same seeds and the same held-out
problems: then accuracies can be paired by seed and problem. `comparison_page` and `comparison_figure` show them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .records import KINDS, METHOD_SETTINGS, RECORD_FILE, RUN_SETTINGS, WHENS, RunRecord


Array = NDArray[np.floating]
TIMES = ("time/rollout", "time/update", "time/sync")
PREDICTED, REALIZED, BUDGET = "sketch/predicted_kl", "sketch/realized_kl", "sketch/kl_budget"
# Trainer against rollouts: as `recipes/meters.py` measures it, and as TRL does on what vLLM sampled.
GAPS = tuple(
    f"{name}/{what}" for name in ("rollout_gap", "sampling/sampling_logp_difference") for what in ("mean", "max")
)
_MOST_SHOWN = 10  # differences in one message


@dataclass
class Run:
    """A record and its folder."""

    folder: Path
    record: RunRecord


@dataclass
class Comparison:
    """Runs that may be compared.

    Attributes:
        methods: Runs by label, each in the order of `seeds`; the reference comes first.
        reference: Label of the method that the others are compared with.
        seeds: Of every method.
        allowed: Settings in which the runs differ although they are not of the method, because `--allow` let them, as
            sentences.
    """

    methods: dict[str, list[Run]]
    reference: str
    seeds: list[int]
    allowed: list[str]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.methods.values() for run in runs]

    @property
    def kinds(self) -> list[str]:
        """Of accuracies: `greedy`, and `sampled` if there are samples; none if nothing was evaluated."""
        after = self.runs[0].record.accuracy.get("after")
        if not after:
            return []
        return [kind for kind in KINDS if kind == "greedy" or (after[kind] and after[kind][0])]

    def scores(self, label: str, when: str, kind: str) -> Array:
        """Scores of a method's runs, (seeds, problems): `when` is `before` or `after`, `kind` `greedy` or `sampled`."""
        return np.stack([_scores(run, when, kind) for run in self.methods[label]])

    def differences(self, label: str, kind: str) -> Array:
        """After training, the method's scores minus the reference's, paired by seed and problem, (seeds, problems)."""
        return self.scores(label, "after", kind) - self.scores(self.reference, "after", kind)

    def shared_settings(self) -> dict[str, Any]:
        """What is alike in all runs, by dotted name."""
        all_of_them = [_flat(run.record.settings) for run in self.runs]
        free = {*METHOD_SETTINGS, *RUN_SETTINGS}
        return {
            name: value
            for name, value in sorted(all_of_them[0].items())
            if name not in free and all(name in other and other[name] == value for other in all_of_them)
        }

    def settings_of(self, label: str) -> dict[str, Any]:
        """What is a method's own, by dotted name: how its steps are made, and what `allowed` let through."""
        record, shared = self.methods[label][0].record, self.shared_settings()
        settings = _flat(record.settings) | _flat(record.method)
        return {n: v for n, v in sorted(settings.items()) if n not in shared and n not in RUN_SETTINGS}


# ------------------------------------------------------------------------------------------------------------- reading


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in these folders: each is one, or has some at any depth.

    Raises:
        FileNotFoundError: A folder is not there, or neither is nor has a run.
        ValueError: A record cannot be read.
    """
    found: dict[Path, Path] = {}  # by the real place: a folder may be given twice
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is no folder: give the output folders of runs, or a folder that has them"
            )
        inside = [folder] if (folder / RECORD_FILE).is_file() else sorted(f.parent for f in folder.rglob(RECORD_FILE))
        if not inside:
            begun = next(folder.rglob("checkpoint-*"), None)
            why = (
                f"it has {begun.relative_to(folder)}, so a run was begun there and has not ended: resume it, or leave it out"
                if begun
                else "it is not the output folder of a recipe"
            )
            raise FileNotFoundError(f"{folder} has no {RECORD_FILE}: {why}")
        for own in inside:
            found.setdefault(own.resolve(), own)
    return [Run(folder, RunRecord.load(folder)) for folder in found.values()]


def compare(runs: Sequence[Run], reference: str | None = None, allow: Sequence[str] = ()) -> Comparison:
    """Sort runs by method and seed, and see that they may be compared.

    Args:
        runs: The runs, see [`find_runs`].
        reference: Label of the method that the others are compared with; default: that of the first run.
        allow: Settings that may differ beside the method's, by name (`model_init_kwargs.attn_implementation`, `device`,
            `versions.torch`) or by the first part of it (`versions`).

    Raises:
        ValueError: They may not be compared; the message says where they differ, and in what.
    """
    for run in runs:
        _check_usable(run)
    methods = _by_method(runs)
    reference = reference or next(iter(methods))
    if reference not in methods:
        raise ValueError(f"reference={reference!r}: it must be one of {', '.join(methods)}")
    allowed = _check_alike(methods, allow)
    methods = {reference: methods[reference]} | methods  # it comes first
    return Comparison(methods, reference, [run.record.seed for run in methods[reference]], allowed)


def _check_usable(run: Run) -> None:
    record = run.record
    if not record.finished:
        raise ValueError(
            f"{run.folder} is not finished: step {record.steps} of {record.planned_steps}. Resume it, or leave it out"
        )
    if not record.log:
        raise ValueError(f"{run.folder} has no logged step: run it with logging_steps of {record.steps} at most")
    for entry in record.log:
        if not isinstance(entry.get("reward"), (int, float)):
            raise ValueError(
                f"{run.folder} has the reward {entry.get('reward')!r} at step {entry['step']}, which is no finite number: its "
                "curve cannot be drawn. Run it again with smaller steps, or leave the method out"
            )


def _by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.record.label, []).append(run)
    for label, members in methods.items():
        members.sort(key=lambda run: run.record.seed)
        for first, second in zip(members, members[1:], strict=False):
            if first.record.seed == second.record.seed:
                raise ValueError(
                    f"{label} has seed {first.record.seed} twice: in {first.folder} and in {second.folder}. Leave one out"
                )
    if len(methods) < 2:
        raise ValueError(f"there is nothing to compare: all runs are of {next(iter(methods), 'no method')}")
    seeds = {run.record.seed for run in runs}
    missing = {label: sorted(seeds - {run.record.seed for run in members}) for label, members in methods.items()}
    said = [f"{label} has no seed {', '.join(map(str, lacks))}" for label, lacks in missing.items() if lacks]
    if said:
        raise ValueError(f"every method needs the same seeds: {'; '.join(said)}. Run them, or leave their seeds out")
    return methods


def _check_alike(methods: dict[str, list[Run]], allow: Sequence[str]) -> list[str]:
    """Sentences about the differences that were allowed."""
    everyone = [run for members in methods.values() for run in members]
    found: dict[str, str] = {}
    for members in methods.values():  # of one method, all seeds have the same settings
        for run in members[1:]:
            _note_differences(found, members[0], run, RUN_SETTINGS, _everything)
    for run in everyone[1:]:
        _note_differences(found, everyone[0], run, (*RUN_SETTINGS, *METHOD_SETTINGS), _all_but_the_method)
    is_allowed = {name: any(name == own or name.startswith(f"{own}.") for own in allow) for name in found}
    refused = [name for name in found if not is_allowed[name]]
    if refused:
        listed = "\n  ".join(found[name] for name in refused[:_MOST_SHOWN])
        more = f"\n  and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
        raise ValueError(
            f"these runs differ in more than the method:\n  {listed}{more}\nRun them with the same settings. Or, if the "
            f"difference is meant, let it through, and the page will say so: --allow {' '.join(refused[:_MOST_SHOWN])}"
        )
    _check_problems(everyone)
    return [found[name] for name in found if is_allowed[name]]


def _check_problems(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        ours, theirs = first.record.problems, run.record.problems
        if ours != theirs:
            same = len(set(ours) & set(theirs))
            raise ValueError(
                f"the held-out problems differ, so accuracies cannot be paired: {first.folder} has {len(ours)}, {run.folder} "
                f"has {len(theirs)}, and {same} are in both" + (", in another order" if same == len(ours) else "")
            )
        if bool(first.record.accuracy) != bool(run.record.accuracy):
            without = first if run.record.accuracy else run
            raise ValueError(f"{without.folder} has no accuracy, and others have: evaluate it too, or none of them")


_ABSENT = object()


def _note_differences(found: dict[str, str], a: Run, b: Run, free: Sequence[str], settings: Any) -> None:
    """Add to `found`, by name, a sentence for every setting in which two runs differ."""
    ours, theirs = settings(a.record), settings(b.record)
    for name in sorted(ours.keys() | theirs.keys()):
        own, other = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
        if name not in free and own != other and name not in found:
            found[name] = f"{name}: {_shown(own)} in {a.folder}, {_shown(other)} in {b.folder}"


def _shown(value: Any) -> str:
    return "not set" if value is _ABSENT else repr(value)


def _all_but_the_method(record: RunRecord) -> dict[str, Any]:
    versions = {f"versions.{name}": version for name, version in record.versions.items()}
    return _flat(record.settings) | versions | {"device": record.device, "planned_steps": record.planned_steps}


def _everything(record: RunRecord) -> dict[str, Any]:
    return _all_but_the_method(record) | _flat(record.method)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# -------------------------------------------------------------------------------------------------------------- curves


@dataclass
class Curve:
    """One number of a method's runs, seed by seed.

    Attributes:
        x: Where it was taken, (n,).
        values: The number, (seeds, n).
    """

    x: Array
    values: Array

    @property
    def mean(self) -> Array:
        return self.values.mean(axis=0)

    @property
    def deviation(self) -> Array:
        """Standard deviation over seeds, (n,); zeros if there is one."""
        return deviation(self.values)


def deviation(values: Array) -> Array:
    """Standard deviation (with n − 1) over the first axis; zeros if there is one row."""
    return values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1:])


def logged(run: Run, name: str) -> tuple[Array, Array, Array]:
    """Steps, seconds and values, each (n,), of the log's entries in which `name` is a number."""
    entries = [entry for entry in run.record.log if entry.get(name) is not None]
    steps, seconds, values = (np.array([entry[key] for entry in entries], float) for key in ("step", "seconds", name))
    return steps, seconds, values


def smoothing_window(entries: int) -> int:
    """How many entries a smoothed value is the mean of: an odd number, about a twentieth of the run."""
    return (entries // 20) | 1


def smooth(values: Array, window: int) -> Array:
    """Centred moving mean, (n,); at the ends, of the entries that there are."""
    half = window // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def against_steps(runs: Sequence[Run], name: str, window: int = 1) -> Curve | None:
    """A method's curve at the steps that all its runs logged; None if there are none."""
    curves = []
    for run in runs:
        steps, _, values = logged(run, name)
        curves.append(dict(zip(steps, smooth(values, window), strict=True)))
    common = sorted(set.intersection(*map(set, curves)))
    return Curve(np.array(common), np.array([[own[step] for step in common] for own in curves])) if common else None


def against_seconds(runs: Sequence[Run], name: str, window: int = 1, points: int = 200) -> Curve | None:
    """A method's curve over the seconds that all its runs were at work, interpolated in each; None if there are none."""
    curves = [logged(run, name) for run in runs]
    if not all(len(values) for _, _, values in curves):
        return None
    first = max(seconds[0] for _, seconds, _ in curves)
    last = min(seconds[-1] for _, seconds, _ in curves)
    if first > last:
        return None
    x = np.linspace(first, last, points)
    return Curve(x, np.array([np.interp(x, seconds, smooth(values, window)) for _, seconds, values in curves]))


def accuracy_curve(runs: Sequence[Run], kind: str, unit: str) -> Curve:
    """Mean score before training, at the steps that all runs evaluated at (`accuracy/<kind>` in the log), and after training.

    `unit` of x is `step`, or `seconds`, of which the seeds' mean is taken.
    """
    inside = [logged(run, f"accuracy/{kind}") for run in runs]
    common = sorted(set.intersection(*(set(steps) for steps, _, _ in inside)))
    x, values = [], []
    for run, (steps, seconds, scores) in zip(runs, inside, strict=True):
        kept = np.isin(steps, common) & (steps < run.record.steps)
        before, after = (_scores(run, when, kind).mean() for when in WHENS)
        end = run.record.steps if unit == "step" else run.record.seconds
        x.append([0.0, *(steps if unit == "step" else seconds)[kept], end])
        values.append([before, *scores[kept], after])
    return Curve(np.array(x).mean(axis=0), np.array(values))


def memory_of(runs: Sequence[Run]) -> dict[str, float]:
    """Mean bytes by part."""
    names = dict.fromkeys(part for run in runs for part in run.record.memory)
    return {part: float(np.mean([run.record.memory.get(part, 0) for run in runs])) for part in names}


def seconds_per_step(run: Run) -> dict[str, float]:
    """Mean seconds of a step that went into `rollout`, `update` and `sync`, as far as they were logged, and into the `rest`."""
    parts = {}
    for name in TIMES:
        values = logged(run, name)[2]
        if len(values):
            parts[name.removeprefix("time/")] = float(values.mean())
    total = run.record.seconds / run.record.steps
    return parts | {"rest": max(0.0, total - sum(parts.values()))}


def _scores(run: Run, when: str, kind: str) -> Array:
    """(problems,): the mean over a problem's samples."""
    values = np.array(run.record.accuracy[when][kind], float)
    return values.mean(axis=1) if values.ndim == 2 else values
