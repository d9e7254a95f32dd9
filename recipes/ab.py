"""Run all methods of an experiment with several seeds, one after the other, and write the page that compares them.

```bash
python recipes/ab.py recipes/embedded                   # five seeds of each method, into runs/ab-embedded
python recipes/ab.py recipes/embedded --seeds 0 1       # fewer; those that are finished are not run again
python recipes/ab.py recipes/embedded --sweep --jobs 2  # each method's step size, on the validation split
```

It can be stopped at any time and started again. The file `ab.yaml` of the folder names the methods:

```yaml
seeds: [0, 1, 2]
settings: {save_strategy: "no"}    # of all runs, over those of the methods' files
sweep:
  seeds: [100, 101]                # none of the above
  settings: {max_steps: 100}       # of the sweep's runs, over all others
methods:
  sketch:
    script: grpo_sketch.py
    config: sketch.yaml            # beside ab.yaml
    settings: {rank: 32}           # over those of its file
    knob: kl_budget                # what is swept, and its name on the page
    values:                        # of the knob; or settings, where it sets several
      - {kl_budget: 0.1, kl_budget_final: 0.005}
      - {kl_budget: 0.2, kl_budget_final: 0.01}
  dense AdamW:
    script: grpo_dense.py
    config: dense.yaml
    knob: learning_rate
    values: [1.0e-4, 2.0e-4]
```

A sweep gives every method the same number of values, the same seeds and steps, and is judged on a split that the A/B does
not look at. It writes `sweep.json` beside `ab.yaml`, for the page; the chosen values are for a person to put into the files.
With `--methods` it takes the others from the `sweep.json` that is there, if theirs were the same seeds, steps, settings and values.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from runs import Run, run_all
from settings import read_settings

from trl_sketch import cli
from trl_sketch.comparison_page import load_sweep
from trl_sketch.records import RunRecord


DEFINITION, SWEEP_FILE, PAGE = "ab.yaml", "sweep.json", "comparison.md"
SWEEP_SPLIT = "validation"
CRITERION = "mean sampled accuracy after training"

console = Console(soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------- ab.yaml


@dataclass(frozen=True)
class Method:
    """A method of an experiment, as `ab.yaml` has it."""

    label: str
    script: str
    settings: dict[str, Any]  # of its file, and what ab.yaml says over it
    knob: str = ""
    values: tuple[dict[str, Any], ...] = ()  # settings that are swept, each with one of the knob's name

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")


@dataclass(frozen=True)
class Sweep:
    """How step sizes are searched for."""

    seeds: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """What `ab.yaml` says."""

    folder: Path
    seeds: tuple[int, ...]
    methods: tuple[Method, ...]
    sweep: Sweep | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def read_experiment(folder: Path) -> Experiment:
    """Read the `ab.yaml` of a folder, and the files that it names.

    Raises:
        FileNotFoundError: There is none, or a file that it names is missing.
        ValueError: It says something that has no meaning here, or asks for an unequal sweep.
    """
    file = folder / DEFINITION
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {DEFINITION}, which names the methods to compare; see recipes/ab.py")
    content = _mapping(yaml.safe_load(file.read_text()), str(file), {"seeds", "methods"}, {"settings", "sweep"})
    common = _mapping(content.get("settings", {}), f"{file}: settings")
    methods = tuple(
        _read_method(folder, label, entry, common, f"{file}: methods.{label}")
        for label, entry in _mapping(content["methods"], f"{file}: methods").items()
    )
    if not methods or len({method.slug for method in methods}) < len(methods):
        raise ValueError(f"{file}: methods must be named, and differently in letters and digits")
    seeds = _seeds(content["seeds"], f"{file}: seeds")
    sweep = None
    if "sweep" in content:
        entry = _mapping(content["sweep"], f"{file}: sweep", {"seeds"}, {"settings"})
        sweep = Sweep(_seeds(entry["seeds"], f"{file}: sweep.seeds"), entry.get("settings", {}))
        counts = {method.label: len(method.values) for method in methods}
        if len(set(counts.values())) > 1 or not all(counts.values()):
            said = ", ".join(f"{label} {count}" for label, count in counts.items())
            raise ValueError(
                f"{file}: every method must have the same number of values to sweep, and they have {said}"
            )
    return Experiment(folder, seeds, methods, sweep)


def _read_method(folder: Path, label: str, entry: Any, common: dict[str, Any], place: str) -> Method:
    entry = _mapping(entry, place, {"script", "config"}, {"settings", "knob", "values"})
    settings, required = read_settings(folder / entry["config"])
    settings |= common | _mapping(entry.get("settings", {}), f"{place}.settings")
    missing = sorted(required - settings.keys())
    if missing:
        raise ValueError(f"{place}.settings must have {', '.join(missing)}, which {entry['config']} leaves open")
    knob = str(entry.get("knob", ""))
    points = [value if isinstance(value, dict) else {knob: value} for value in entry.get("values", [])]
    for point in points:
        if knob not in point or point.keys() != points[0].keys():
            raise ValueError(
                f"{place}.values: {point} must set {knob or 'the setting that `knob` names'}, and the same settings as the others"
            )
    values = tuple({name: float(value) for name, value in point.items()} for point in points)
    return Method(label, entry["script"], settings, knob, values)


def _mapping(
    value: Any, place: str, required: set[str] | None = None, allowed: set[str] | None = None
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be a mapping, and is {value!r}")
    if required is not None:
        known = required | (allowed or set())
        if missing := sorted(required - value.keys()):
            raise ValueError(f"{place} must have {', '.join(missing)}")
        if unknown := sorted(value.keys() - known):
            raise ValueError(f"{place} has {', '.join(unknown)}; it may have {', '.join(sorted(known))}")
    return value


def _seeds(value: Any, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(seed) is int for seed in value):
        raise ValueError(f"{place} must be a list of whole numbers, and is {value!r}")
    return tuple(value)


# -------------------------------------------------------------------------------------------------------------- A/B


def ab_runs(experiment: Experiment, methods: Sequence[Method], seeds: Sequence[int], output: Path) -> list[Run]:
    """Seed by seed, so that what is there after a while is a comparison."""
    return [
        Run(
            name=f"{method.label}, seed {seed}",
            script=method.script,
            settings=method.settings | {"run_name": method.label, "seed": seed},
            folder=output / method.slug / f"seed-{seed}",
        )
        for seed in seeds
        for method in methods
    ]


# ------------------------------------------------------------------------------------------------------------ sweep


def sweep_runs(experiment: Experiment, methods: Sequence[Method], output: Path) -> dict[str, list[list[Run]]]:
    """For each method, for each value, a run for each seed.

    Raises:
        ValueError: `ab.yaml` has no sweep, or one with seeds of the A/B.
    """
    sweep = experiment.sweep
    if sweep is None:
        raise ValueError(f"{experiment.folder / DEFINITION} has no `sweep`; see recipes/ab.py")
    if common := sorted(set(sweep.seeds) & set(experiment.seeds)):
        raise ValueError(f"sweep.seeds has {common}, which the A/B has too: step sizes are chosen on other seeds")
    return {
        method.label: [
            [
                Run(
                    name=f"{method.label}, {method.knob} {point[method.knob]:g}, seed {seed}",
                    script=method.script,
                    settings=method.settings
                    | {"dataset_test_split": SWEEP_SPLIT, "save_trained_model": False}
                    | sweep.settings
                    | point
                    | {"run_name": method.label, "seed": seed},
                    folder=output / method.slug / f"{method.knob}-{point[method.knob]:g}" / f"seed-{seed}",
                )
                for seed in sweep.seeds
            ]
            for point in method.values
        ]
        for method in methods
    }


def score(folder: Path) -> float:
    """What a run of a sweep is judged by."""
    sampled = RunRecord.load(folder).accuracy["after"]["sampled"]
    return fmean(fmean(samples) for samples in sampled)


def sweep_result(
    experiment: Experiment, methods: Sequence[Method], runs: dict[str, list[list[Run]]]
) -> dict[str, Any]:
    """What `sweep.json` has."""
    assert experiment.sweep is not None
    found: dict[str, Any] = {}
    for method in methods:
        scores = [[score(run.folder) for run in seeds] for seeds in runs[method.label]]
        values = [point[method.knob] for point in method.values]
        best = max(range(len(values)), key=lambda i: fmean(scores[i]))
        found[method.label] = {
            "knob": method.knob,
            "values": values,
            "scores": scores,
            "chosen": values[best],
            "searched": searched(experiment, method),
        }
    first = runs[methods[0].label][0][0]
    steps = RunRecord.load(first.folder).steps
    seeds = list(experiment.sweep.seeds)
    return {"split": SWEEP_SPLIT, "seeds": seeds, "steps": steps, "criterion": CRITERION, "methods": found}


def searched(experiment: Experiment, method: Method) -> str:
    """Tells whether two sweeps of a method were the same search: a hash of all settings but the values that are tried."""
    assert experiment.sweep is not None
    settings = method.settings | experiment.sweep.settings
    fixed = {name: value for name, value in settings.items() if name not in {"output_dir", *method.values[0]}}
    said = json.dumps([method.script, fixed, method.values], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def with_earlier(experiment: Experiment, result: dict[str, Any]) -> dict[str, Any] | None:
    """A sweep of some methods, completed by what the experiment's `sweep.json` has of the others.

    Returns:
        `None` where methods are missing still, or the earlier sweep was another search.

    Raises:
        ValueError: The file is not what a sweep writes, or lacks a method.
    """
    found, file = result["methods"], experiment.folder / SWEEP_FILE
    others = {method.label for method in experiment.methods} - found.keys()
    if not others:
        return result
    if not file.is_file():
        return None
    earlier = load_sweep(file, others)
    methods = earlier["methods"] | found
    if any(earlier[key] != result[key] for key in result.keys() - {"methods"}):
        return None
    if any(methods[m.label].get("searched") != searched(experiment, m) for m in experiment.methods):
        return None
    return result | {"methods": {method.label: methods[method.label] for method in experiment.methods}}


def print_sweep(methods: Sequence[Method], result: dict[str, Any]) -> None:
    """The scores, and what is to be done about them."""
    seeds = ", ".join(map(str, result["seeds"]))
    title = (
        f"{result['criterion'].capitalize()}, {result['split']} split, {result['steps']} steps, mean of seeds {seeds}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    table.add_column("knob")
    for index in range(len(methods[0].values)):
        table.add_column(f"value {index + 1}", justify="right")
    for method in methods:
        found = result["methods"][method.label]
        cells = []
        for value, scores in zip(found["values"], found["scores"], strict=True):
            cell = f"{value:g}: {fmean(scores):.1%}"
            cells.append(f"[bold]{cell}[/]" if value == found["chosen"] else cell)
        table.add_row(method.label, method.knob, *cells)
    console.print(table)
    for method in methods:
        found = result["methods"][method.label]
        if len(found["values"]) > 1 and found["chosen"] in (min(found["values"]), max(found["values"])):
            console.print(
                f"{method.label}: {found['chosen']:g} is at the edge of what was tried: try values beyond it"
            )
    print_differences(methods, result)


def print_differences(methods: Sequence[Method], result: dict[str, Any]) -> None:
    """Say where a method's file has another value than the sweep has chosen."""
    for method in methods:
        chosen = result["methods"].get(method.label, {}).get("chosen")
        point = next((point for point in method.values if point[method.knob] == chosen), {})
        own = {name: method.settings.get(name) for name in point}
        if any(own[name] is None or float(own[name]) != value for name, value in point.items()):
            said, now = (", ".join(f"{name}: {value}" for name, value in what.items()) for what in (point, own))
            console.print(f"{method.label}: the sweep chose {said}, and its file says {now}: change the file")


# ------------------------------------------------------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 where a run failed; 2 for a mistake of the caller; 130 where it was stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder of the experiment, with an ab.yaml.")
    parser.add_argument("--seeds", type=int, nargs="+", help="Seeds of the A/B. Default: those of ab.yaml.")
    parser.add_argument("--output", type=Path, help="Folder to write. Default: runs/ab-NAME, or runs/sweep-NAME.")
    parser.add_argument("--methods", nargs="+", metavar="LABEL", help="Only these. Default: all of ab.yaml.")
    parser.add_argument("--sweep", action="store_true", help="Search for each method's step size instead.")
    parser.add_argument(
        "--jobs", type=int, default=1, help="Runs at a time; with more than one, times mean nothing. Default: 1."
    )
    args = parser.parse_args(arguments)
    try:
        experiment = read_experiment(args.folder)
        methods = choose(experiment, args.methods)
        output = args.output or Path("runs") / f"{'sweep' if args.sweep else 'ab'}-{experiment.name}"
        if args.jobs < 1:
            raise ValueError(f"--jobs {args.jobs} must be at least 1")
        if args.sweep and args.seeds:
            raise ValueError(f"--seeds is for the A/B: the sweep's are in {experiment.folder / DEFINITION}")
        if args.sweep:
            return run_sweep(experiment, methods, output, args.jobs)
        return run_ab(experiment, methods, args.seeds or experiment.seeds, output, args.jobs)
    except (OSError, ValueError) as error:
        console.print(f"ab.py: error: {error}", markup=False, style="red")
        return 2
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on; the run that was going on begins anew.")
        return 130


def choose(experiment: Experiment, labels: list[str] | None) -> list[Method]:
    """The methods with these labels; all of them without.

    Raises:
        ValueError: There is no such method.
    """
    known = [method.label for method in experiment.methods]
    unknown = sorted(set(labels or []) - set(known))
    if unknown:
        raise ValueError(
            f"--methods {', '.join(unknown)}: {experiment.folder / DEFINITION} has {', '.join(map(repr, known))}"
        )
    return [method for method in experiment.methods if labels is None or method.label in labels]


def run_ab(experiment: Experiment, methods: list[Method], seeds: Sequence[int], output: Path, jobs: int) -> int:
    """All methods and seeds, and the page."""
    runs = ab_runs(experiment, methods, seeds, output)
    failed = run_all(runs, output, console, jobs)
    folders = [run.folder for run in runs if run.is_finished]
    status = 0
    if len({folder.parent for folder in folders}) > 1:  # of two methods
        options: list[str] = []
        sweep = experiment.folder / SWEEP_FILE
        if sweep.is_file():
            options += ["--sweep", str(sweep)]
            print_differences(methods, load_sweep(sweep, []))
        status = cli.main(["compare", *map(str, folders), "--output", str(output / PAGE), *options])
    return _report(failed, len(runs)) or status


def run_sweep(experiment: Experiment, methods: list[Method], output: Path, jobs: int) -> int:
    """All values of all methods, and the choice."""
    runs = sweep_runs(experiment, methods, output)
    # Value by value, so that all methods see the same state of a busy machine.
    order = [run for values in zip(*runs.values(), strict=True) for seeds in values for run in seeds]
    failed = run_all(order, output, console, jobs)
    if not failed:
        result = sweep_result(experiment, methods, runs)
        print_sweep(methods, result)
        try:
            whole = with_earlier(experiment, result)
        except ValueError as error:
            console.print(f"The other methods' results are not used: {error}", markup=False)
            whole = None
        file = (output if whole is None else experiment.folder) / SWEEP_FILE
        _write(file, json.dumps(whole or result, indent=1) + "\n")
        console.print(f"Written to {file}")
    return _report(failed, len(order))


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.replace(file)


def _report(failed: list[Run], total: int) -> int:
    if failed:
        names = "; ".join(run.name for run in failed)
        console.print(f"{len(failed)} of {total} runs failed: {names}. The same command tries them again.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
