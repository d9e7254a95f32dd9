"""`trl-sketch compare`: its numbers against slow and obvious ones, and what it refuses to put side by side."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trl_sketch import cli
from trl_sketch.comparison import (
    Comparison,
    accuracy_curve,
    against_seconds,
    against_steps,
    compare,
    find_runs,
    seconds_per_step,
    smooth,
    smoothing_window,
)
from trl_sketch.records import RunRecord, problem_id
from trl_sketch.statistics import bootstrap_interval


PROBLEMS = 6


def scores(seed: int, label: str) -> dict[str, list[Any]]:
    generator = np.random.default_rng([seed, *label.encode()])
    return {
        "greedy": generator.integers(2, size=PROBLEMS).tolist(),
        "sampled": generator.integers(2, size=(PROBLEMS, 2)).tolist(),
    }


def record(label: str, seed: int, **changes: Any) -> RunRecord:
    """A run of 40 steps whose reward grows by 0.01 a step from its seed on; a LoRA step takes two seconds, another one."""
    per_step = 2.0 if label == "LoRA" else 1.0
    sketch = {"sketch/predicted_kl": 2e-3, "sketch/realized_kl": 1e-3, "sketch/kl_budget": 4e-3}
    own: dict[str, Any] = {
        "label": label,
        "seed": seed,
        "settings": {
            "max_steps": 40,
            "num_generations": 8,
            "learning_rate": 1e-3 if label == "LoRA" else 1e-4,
            "model_init_kwargs": {
                "dtype": "float32" if label == "dense" else "bfloat16",
                "attn_implementation": "eager",
            },
            "seed": seed,
            "output_dir": f"runs/{label}-{seed}",
        },
        "method": {"sketch": {"rank": 32, "projection_seed": seed}, "LoRA": {"lora_r": 8}}.get(label, {}),
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "device": "cpu",
        "steps": 40,
        "planned_steps": 40,
        "log": [
            {
                "step": step,
                "seconds": per_step * step,
                "reward": seed + 0.01 * step,
                "time/rollout": 0.5,
                "time/update": 0.25,
                **(sketch if label == "sketch" else {}),
            }
            for step in range(1, 41)
        ],
        "seconds": per_step * 40,
        "accuracy": {"before": scores(seed, "before"), "after": scores(seed, label)},
        "problems": [problem_id(f"{i}=") for i in range(PROBLEMS)],
        "memory": {"weights": 2**20, "gradient": 1000, **({"adapter": 500} if label == "LoRA" else {})},
        "peak_bytes": 2**30,
        "mean_bytes": 2**29,
    }
    return RunRecord(**own | changes)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(label, seed, **changes)` writes a run and returns its folder."""

    def make(label: str, seed: int, folder: str | None = None, **changes: Any) -> Path:
        path = tmp_path / "runs" / (folder or f"{label}-{seed}")
        record(label, seed, **changes).write(path)
        return path

    return make


@pytest.fixture
def runs(write: Write) -> Path:
    """A folder with two seeds of three methods."""
    for label, seed in itertools.product(("sketch", "LoRA", "dense"), (0, 1)):
        folder = write(label, seed)
    return folder.parent


def compared(folder: Path, **options: Any) -> Comparison:
    return compare(find_runs([folder]), **options)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """What the command says when it refuses."""
    assert cli.main(["compare", *map(str, arguments)]) == 2
    return capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- intervals


def slow_means(values: np.ndarray, count: int) -> Iterator[float]:
    generator = np.random.default_rng(1)
    rows, columns = values.shape
    for _ in range(count):
        drawn_rows = [generator.integers(rows) for _ in range(rows)]
        drawn_columns = [generator.integers(columns) for _ in range(columns)]
        yield float(np.mean([[values[i, j] for j in drawn_columns] for i in drawn_rows]))


def test_the_interval_is_that_of_a_slow_bootstrap() -> None:
    generator = np.random.default_rng(0)
    seeds, problems = generator.normal(size=(5, 1)), generator.normal(size=(1, 40))
    values = 0.3 * seeds + 0.5 * problems + generator.normal(size=(5, 40)) + 0.2
    low, high = np.quantile([*slow_means(values, 4000)], [0.025, 0.975])
    ours = bootstrap_interval(values)
    assert ours == pytest.approx((low, high), abs=0.06 * (high - low))
    # Were seeds or problems not drawn anew, it would be narrower by more than that.
    flat = bootstrap_interval(values.mean(axis=0, keepdims=True))
    assert flat[1] - flat[0] < 0.9 * (high - low)
    flat = bootstrap_interval(values.mean(axis=1, keepdims=True))
    assert flat[1] - flat[0] < 0.9 * (high - low)


def test_the_interval_of_all_possible_draws() -> None:
    """Of two seeds and two problems there are sixteen draws, equally likely."""
    values = np.array([[0.0, 1.0], [2.0, 5.0]])
    pairs = [*itertools.product((0, 1), repeat=2)]
    means = [values[np.ix_(rows, columns)].mean() for rows in pairs for columns in pairs]
    for level in (0.5, 0.8):
        expected = np.quantile(np.repeat(means, 1000), [(1 - level) / 2, (1 + level) / 2])
        assert bootstrap_interval(values, level=level) == pytest.approx(expected, abs=1e-9)


def test_intervals_repeat_and_cover_constants() -> None:
    values = np.random.default_rng(3).normal(size=(3, 10))
    assert bootstrap_interval(values, resamples=1500) == bootstrap_interval(values.tolist(), resamples=1500)
    assert bootstrap_interval(np.full((2, 3), 0.25)) == pytest.approx((0.25, 0.25))


@pytest.mark.parametrize("values", [[1.0, 2.0], [[]], [[np.nan]]])
def test_what_has_no_interval(values: list) -> None:
    with pytest.raises(ValueError, match="must be a matrix"):
        bootstrap_interval(values)


def test_accuracies_are_paired_by_seed_and_problem(runs: Path) -> None:
    comparison = compared(runs, reference="sketch")
    differences = comparison.differences("LoRA", "sampled")
    for row, seed in enumerate((0, 1)):
        for problem in range(PROBLEMS):
            ours, theirs = (np.mean(scores(seed, label)["sampled"][problem]) for label in ("LoRA", "sketch"))
            assert differences[row, problem] == ours - theirs
    assert np.array_equal(comparison.differences("sketch", "greedy"), np.zeros((2, PROBLEMS)))


# -------------------------------------------------------------------------------------------------------------- curves


def test_bands_by_hand(runs: Path) -> None:
    """Rewards are 0.01·step and 1 + 0.01·step: half of one between them, and a deviation of √½."""
    comparison = compared(runs, reference="sketch")
    curve = against_steps(comparison.methods["sketch"], "reward")
    assert curve is not None
    assert np.array_equal(curve.x, np.arange(1, 41))
    assert curve.mean == pytest.approx(0.5 + 0.01 * np.arange(1, 41))
    assert curve.deviation == pytest.approx(np.full(40, 0.5**0.5))
    curve = against_seconds(comparison.methods["LoRA"], "reward", points=79)
    assert curve is not None
    assert curve.x == pytest.approx(np.arange(2, 81))
    assert curve.mean == pytest.approx(0.5 + 0.005 * np.arange(2, 81))  # half of it is between two steps
    assert against_steps(comparison.methods["LoRA"], "sketch/predicted_kl") is None
    assert against_seconds(comparison.methods["LoRA"], "sketch/predicted_kl") is None


def test_seeds_of_different_speed_meet_at_the_same_second(write: Write) -> None:
    slow = [{"step": s, "seconds": 4.0 * s, "reward": 0.01 * s} for s in range(1, 41)]
    write("sketch", 0, log=slow, seconds=160.0)
    write("sketch", 1)
    folder = write("LoRA", 0)
    write("LoRA", 1)
    curve = against_seconds(compared(folder.parent).methods["sketch"], "reward", points=37)
    assert curve is not None
    assert curve.x == pytest.approx(np.arange(4, 41))
    assert curve.values[0] == pytest.approx(0.01 * np.arange(4, 41) / 4)
    assert curve.values[1] == pytest.approx(1 + 0.01 * np.arange(4, 41))


def test_smoothing() -> None:
    assert [smoothing_window(n) for n in (1, 15, 39, 40, 200)] == [1, 1, 1, 3, 11]
    values = np.array([1.0, 2.0, 6.0, 3.0])
    assert smooth(values, 1).tolist() == values.tolist()
    assert smooth(values, 3) == pytest.approx([1.5, 3.0, 11 / 3, 4.5])


def test_accuracy_between_the_ends_is_in_its_curve(write: Write) -> None:
    log = record("sketch", 0).log
    log[9]["accuracy/greedy"] = 0.25
    write("sketch", 0, log=log)
    folder = write("LoRA", 0)
    methods = compared(folder.parent).methods
    curve = accuracy_curve(methods["sketch"], "greedy", "step")
    before, after = (np.mean(scores(0, name)["greedy"]) for name in ("before", "sketch"))
    assert curve.x.tolist() == [0, 10, 40] and curve.values.tolist() == [[before, 0.25, after]]
    assert accuracy_curve(methods["LoRA"], "greedy", "seconds").x.tolist() == [0, 80]


def test_a_step_is_split(runs: Path) -> None:
    run = compared(runs).methods["LoRA"][0]
    assert seconds_per_step(run) == {"rollout": 0.5, "update": 0.25, "rest": 1.25}


# ------------------------------------------------------------------------------------------------------------ the page


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The first table under a heading: label → cells."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return {row[0]: row[1:] for row in [rows[0], *rows[2:]]}


def test_the_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "docs" / "result.md"
    assert cli.main(["compare", str(runs), "--reference", "sketch", "--output", str(output)]) == 0
    assert "6 runs of sketch, LoRA, dense" in capsys.readouterr().out
    assert (tmp_path / "docs" / "result.png").read_bytes().startswith(b"\x89PNG")
    page = output.read_text()
    assert page.startswith("# sketch · LoRA · dense: 2 seeds each\n")
    assert f"trl-sketch compare {runs} --reference sketch --output {output}" in page
    assert "more than the method" not in page

    accuracy = rows_of(page, "Accuracy")
    assert accuracy[""][-2:] == ["greedy − sketch", "sampled − sketch"] and accuracy["sketch"][-2:] == ["–", "–"]
    greedy = {label: np.array([scores(seed, label)["greedy"] for seed in (0, 1)]) for label in ("sketch", "LoRA")}
    means = 100 * greedy["LoRA"].mean(axis=1)
    assert accuracy["LoRA"][1] == f"{means.mean():.1f} ± {means.std(ddof=1):.1f}"
    difference = greedy["LoRA"] - greedy["sketch"]
    low, high = bootstrap_interval(difference)
    assert accuracy["LoRA"][4] == f"{100 * difference.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"

    assert rows_of(page, "Reward")["dense"] == ["0.510 ± 0.707", "0.885 ± 0.707"]
    assert rows_of(page, "Memory")["LoRA"] == ["1 MiB", "500 B", "1000 B", "**1.46 KiB**", "1,500", "1 MiB"]
    assert rows_of(page, "Time")["LoRA"] == [f"{x} ± 0.000" for x in ("0.500", "0.250", "1.250", "2.000")] + ["80 ± 0"]
    assert rows_of(page, "KL")["sketch"] == [f"{x} ± 0.00e+00" for x in ("4.00e-03", "2.00e-03", "1.00e-03")]
    assert "LoRA" not in rows_of(page, "KL")
    settings = page.split("## Settings")[1]
    shared, *own = settings.split("```yaml\n")[1:]
    assert shared.splitlines()[:3] == [
        "max_steps: 40",
        'model_init_kwargs.attn_implementation: "eager"',
        "num_generations: 8",
    ]
    assert own[0].startswith('learning_rate: 0.0001\nmodel_init_kwargs.dtype: "bfloat16"\nrank: 32\n```')
    assert "Seeds 0, 1; cpu; python 3.11.9, torch 2.13.0." in settings


def test_how_far_the_trainer_is_from_its_rollouts(write: Write, tmp_path: Path) -> None:
    log = record("dense", 0).log
    log[9] = log[9] | {"rollout_gap/mean": 0.5}
    log[19] = log[19] | {"rollout_gap/mean": 0.1}
    write("sketch", 0)
    folder = write("dense", 0, log=log).parent
    assert cli.main(["compare", str(folder), "--output", str(tmp_path / "page.md")]) == 0
    rows = rows_of((tmp_path / "page.md").read_text(), "Trainer and rollouts")
    assert rows[""] == ["`rollout_gap/mean`, while training", "`rollout_gap/mean`, last"]
    assert rows["dense"] == ["3.00e-01", "1.00e-01"] and rows["sketch"] == ["–", "–"]


def test_one_seed_without_accuracy_and_kl(write: Write, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"accuracy": {}, "problems": [], "memory": {}, "peak_bytes": 0}
    folders = [write(label, 0, **changes) for label in ("LoRA", "dense")]
    output = tmp_path / "page.md"
    assert cli.main(["compare", *map(str, folders), "--output", str(output)]) == 0
    page = output.read_text()
    assert page.startswith("# LoRA · dense: one seed each") and "±" not in page
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## Reward", "## Time", "## Settings"]


def test_how_the_step_sizes_were_chosen(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = {"knob": "learning_rate", "values": [1e-4, 1e-3], "scores": [[0.5, 0.7], [0.2, 0.4]], "chosen": 1e-4}
    sweep: dict[str, Any] = {"split": "512 other problems", "seeds": [7, 8], "steps": 20, "criterion": "the best mean"}
    sweep["methods"] = {label: dict(method) for label in ("sketch", "LoRA", "dense")}
    file, output = tmp_path / "sweep.json", tmp_path / "page.md"
    arguments = [runs, "--output", output, "--sweep", file]

    assert f"--sweep {file}: there is no such file" in refusal(capsys, *arguments)
    file.write_text(json.dumps(sweep))
    assert cli.main(["compare", *map(str, arguments)]) == 0
    page = output.read_text()
    assert "By the best mean, on 512 other problems: 20 steps, seed 7, 8." in page
    expected = ["`learning_rate`", "2", "**0.0001: 0.600**, 0.001: 0.300"]
    assert rows_of(page, "How the step sizes were chosen")["dense"] == expected
    for change, message in (
        ({"chosen": 1}, "dense has chosen=1, which is not among its values"),
        ({"scores": [[0.5], [0.2, 0.4]]}, r"dense must have a score for each of the seeds [7, 8]"),
        ({"values": [1e-4]}, "dense must have a list of scores for each of its values"),
    ):
        sweep["methods"]["dense"] = method | change
        file.write_text(json.dumps(sweep))
        assert message in refusal(capsys, *arguments)
    del sweep["methods"]["dense"]
    file.write_text(json.dumps(sweep))
    assert "methods has no dense" in refusal(capsys, *arguments)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_settings_that_differ_are_named_with_both_values_and_folders(
    runs: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = record("dense", 1).settings | {"num_generations": 4, "temperature": 0.5}
    other = write(
        "dense", 1, settings=settings, device="cuda: NVIDIA H200", versions={"python": "3.11.9", "torch": "2.14"}
    )
    said = refusal(capsys, runs)
    assert "num_generations: 8 in" in said and f"4 in {other}" in said and str(runs / "dense-0") in said
    assert "temperature: not set in" in said and "device: 'cpu' in" in said and "versions.torch: '2.13.0' in" in said
    assert "--allow device num_generations temperature versions.torch" in said

    output = tmp_path / "page.md"
    allow = ["--allow", "device", "num_generations", "--allow", "temperature"]
    assert "--allow versions.torch\n" in refusal(capsys, runs, *allow)
    assert cli.main(["compare", str(runs), *allow, "--allow", "versions", "--output", str(output)]) == 0
    page = output.read_text()
    assert "> **These runs differ in more than the method.**" in page
    assert re.search(r"> \* num_generations: 8 in \S+, 4 in \S+dense-1", page)
    assert "num_generations: 8" not in page.split("alike in all runs")[1].split("```\n")[0]


def test_a_methods_own_settings_are_the_same_for_its_seeds(
    runs: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = record("LoRA", 1).settings
    write("LoRA", 1, settings=settings | {"learning_rate": 5e-4})
    assert "learning_rate: 0.001 in" in refusal(capsys, runs)
    write("LoRA", 1, method={"lora_r": 16})
    assert "lora_r: 8 in" in refusal(capsys, runs)
    write("LoRA", 1, settings=settings | {"model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"}})
    assert "model_init_kwargs.attn_implementation: 'eager' in" in refusal(capsys, runs)


def test_seeds_have_to_match(runs: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write("LoRA", 2)
    said = refusal(capsys, runs)
    assert "dense has no seed 2; sketch has no seed 2" in said and "LoRA has no" not in said
    write("LoRA", 1, folder="again")
    said = refusal(capsys, *sorted(path for path in runs.iterdir() if path != folder))
    assert f"LoRA has seed 1 twice: in {runs / 'LoRA-1'} and in {runs / 'again'}" in said
    assert refusal(capsys, runs / "LoRA-0", runs / "LoRA-1").startswith(
        "trl-sketch compare: error: there is nothing to compare: all runs are of LoRA"
    )


def test_a_folder_that_is_given_twice_counts_once(runs: Path) -> None:
    assert len(find_runs([runs, runs / "LoRA-0", runs / "." / "LoRA-1"])) == 6


@pytest.mark.parametrize("shuffled", [True, False])
def test_held_out_problems_have_to_be_the_same(
    runs: Path, write: Write, capsys: pytest.CaptureFixture[str], shuffled: bool
) -> None:
    """Scores in another order would be paired with the wrong problems."""
    problems = record("dense", 0).problems
    other = write("dense", 0, problems=problems[::-1] if shuffled else [*problems[:-1], problem_id("other")])
    said = refusal(capsys, runs)
    assert "the held-out problems differ" in said and str(other) in said
    assert ("6 are in both, in another order" if shuffled else "5 are in both") in said


def test_what_is_no_finished_run(runs: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    assert f"{empty} is no folder" in refusal(capsys, runs, empty)
    (empty / "plots").mkdir(parents=True)
    assert f"{empty} has no run.json: it is not the output folder of a recipe" in refusal(capsys, runs, empty)
    (empty / "checkpoint-20").mkdir()
    assert "it has checkpoint-20, so a run was begun there and has not ended" in refusal(capsys, runs, empty)

    folder = write("LoRA", 0, steps=39)
    assert f"{folder} is not finished: step 39 of 40" in refusal(capsys, runs)
    write("LoRA", 0, log=[])
    assert f"{folder} has no logged step" in refusal(capsys, runs)
    write("LoRA", 0, log=[{"step": 1, "seconds": 1.0, "reward": float("nan")}])
    assert f"{folder} has the reward None at step 1" in refusal(capsys, runs)
    write("LoRA", 0, accuracy={})
    assert f"{folder} has no accuracy, and others have" in refusal(capsys, runs)
    (folder / "run.json").write_text((folder / "run.json").read_text()[:-20])
    assert f"{folder / 'run.json'} cannot be read as JSON" in refusal(capsys, runs)
    (folder / "run.json").write_text('{"format_version": 1, "seconds": NaN}')
    assert "NaN is not a number" in refusal(capsys, runs)


def test_other_mistakes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "reference='RGC': it must be one of LoRA, dense, sketch" in refusal(capsys, runs, "--reference", "RGC")
    assert "--output page.html must end in .md" in refusal(capsys, runs, "--output", "page.html")
