"""`recipes/ab.py`: many runs, killed and gone on with; sweeps; and one comparison with the real recipes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import ab
import pytest
import torch
import yaml
from embedded import WarmStart, warm_start_model
from transformers import AutoModelForCausalLM

from trl_sketch.records import RunRecord


RECIPES = Path(ab.__file__).parent
# A recipe without a model: it makes its steps, and its score is the nearer to 1 the nearer `size` is to 3.
STAND_IN = """
import sys, time, yaml
from trl_sketch.records import RunRecord
settings = yaml.safe_load(open(sys.argv[2]))
print("a line of its log", flush=True)
if settings.get("fails"):
    sys.exit("it went wrong")
for step in range(1, 4):
    print(f"step {step}/3  reward 0.5", flush=True)
    time.sleep(settings.get("pause", 0))
log = [{"step": s, "seconds": float(s), "reward": 0.5} for s in (1, 2, 3)]
score = 1 - abs(settings["size"] - 3) / 10 + settings["seed"] / 1e4
scores = {"greedy": [0.5, 0.5], "sampled": [[score], [score]]}
asked = {name: settings.get(name) for name in ("max_steps", "dataset_test_split")}
RunRecord(
    label=settings["run_name"], seed=settings["seed"], settings=asked, method={"size": settings["size"]}, versions={},
    device="cpu", steps=3, planned_steps=3, log=log, seconds=3.0, accuracy={"before": scores, "after": scores},
    problems=["a", "b"],
).write(settings["output_dir"])
"""


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(RECIPES / "ab.py"), str(folder), "--output", str(folder / "out"), *arguments]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        command(folder, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # background jobs of a shell ignore it
    )


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    process = start(folder, *arguments)
    printed, _ = process.communicate(timeout=300)
    return process.returncode, printed


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[..., Path]:
    """`experiment(methods, **rest of ab.yaml)`: a folder; a method without a script has the stand-in."""

    def make(methods: dict[str, Any], **content: Any) -> Path:
        (tmp_path / "stand_in.py").write_text(STAND_IN)
        (tmp_path / "base.yaml").write_text("max_steps: 3\nsize: 1.0\n")
        entries = {
            label: {"script": str(tmp_path / "stand_in.py"), "config": "base.yaml"} | entry
            for label, entry in methods.items()
        }
        (tmp_path / "ab.yaml").write_text(
            yaml.safe_dump({"seeds": [0], "methods": entries} | content, sort_keys=False)
        )
        return tmp_path

    return make


def test_all_methods_and_seeds_and_the_page(experiment: Callable[..., Path]) -> None:
    folder = experiment({"one": {}, "An other, 2": {"settings": {"size": 2.0}}}, seeds=[0, 1])
    status, printed = run(folder)
    assert status == 0, printed
    assert sorted(str(file.parent.relative_to(folder / "out")) for file in folder.glob("out/**/run.json")) == [
        "an-other-2/seed-0",
        "an-other-2/seed-1",
        "one/seed-0",
        "one/seed-1",
    ]
    assert RunRecord.load(folder / "out/an-other-2/seed-1").label == "An other, 2"
    assert (folder / "out/an-other-2/seed-1/log.txt").read_text().startswith("a line of its log\n")
    page = (folder / "out/comparison.md").read_text()
    assert "An other, 2" in page and "sampled − one" in page
    for line in ("1/4  one, seed 0", "2/4  An other, 2, seed 0", "3/4  one, seed 1"):
        assert line in printed
    assert re.search(r"1/4 .* about \d+ s left", printed)

    assert "4 of 4 runs are finished already" in run(folder)[1]
    before = {file: file.stat().st_ino for file in folder.glob("out/**/run.json")}
    status, printed = run(folder, "--seeds", "0", "1", "2", "--methods", "one")
    assert status == 0, printed
    assert (folder / "out/one/seed-2/run.json").is_file() and not (folder / "out/an-other-2/seed-2").exists()
    assert before == {file: file.stat().st_ino for file in before}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_it_goes_on_after_it_was_killed(number: int, experiment: Callable[..., Path]) -> None:
    folder = experiment({"first": {}, "second": {"settings": {"pause": 60}}})
    process = start(folder)
    log = folder / "out/second/seed-0/log.txt"
    wait_for(lambda: log.is_file() and "step 1/3" in log.read_text())
    process.send_signal(number)
    printed, _ = process.communicate(timeout=20)
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "Stopped." in printed
    wait_for(lambda: not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(log.parent) in _read(p)])  # no orphan
    finished = (folder / "out/first/seed-0/run.json").stat()

    (folder / "ab.yaml").write_text((folder / "ab.yaml").read_text().replace("pause: 60", "pause: 0"))
    (log.parent / "left over").touch()
    status, printed = run(folder)
    assert status == 0 and "1 of 2 runs are finished already" in printed and "first, seed 0" not in printed
    again = (folder / "out/first/seed-0/run.json").stat()
    assert (again.st_ino, again.st_mtime_ns) == (finished.st_ino, finished.st_mtime_ns)
    assert not (log.parent / "left over").exists()


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def test_two_at_once_are_refused(experiment: Callable[..., Path]) -> None:
    folder = experiment({"one": {"settings": {"pause": 60}}})
    process = start(folder)
    wait_for((folder / "out/one/seed-0/log.txt").is_file)
    status, printed = run(folder)
    assert status == 2 and "another process is running what is in" in printed
    process.terminate()
    process.communicate()


def test_a_run_that_fails_is_reported_and_the_others_go_on(experiment: Callable[..., Path]) -> None:
    folder = experiment({"bad": {"settings": {"fails": True}}, "good": {}, "better": {"settings": {"size": 3.0}}})
    status, printed = run(folder)
    assert status == 1
    assert "failed  bad, seed 0 ended with status 1" in printed and "bad/seed-0/log.txt" in printed
    assert "a line of its log\nit went wrong" in printed
    assert "1 of 3 runs failed: bad, seed 0" in printed
    assert (folder / "out/better/seed-0/run.json").is_file()
    assert (folder / "out/comparison.md").is_file(), printed
    file = folder / "ab.yaml"
    file.write_text(file.read_text().replace("fails: true", "fails: false"))
    status, printed = run(folder)
    assert status == 0 and "2 of 3 runs are finished already" in printed


def test_finished_runs_with_other_settings_are_refused_before_anything_starts(experiment: Callable[..., Path]) -> None:
    folder = experiment({"one": {}})
    assert run(folder)[0] == 0
    experiment({"new": {}, "one": {"settings": {"size": 2.0}}})
    status, printed = run(folder)
    assert status == 2 and "one/seed-0 has a finished run with other settings (size was 1.0 and is 2.0)" in printed
    assert not (folder / "out/new").exists()
    (folder / "out/new/seed-0").mkdir(parents=True)
    (folder / "out/new/seed-0/precious").touch()
    experiment({"new": {}})
    status, printed = run(folder)
    assert status == 2 and "has files, and no settings.yaml" in printed
    assert (folder / "out/new/seed-0/precious").exists()


# ------------------------------------------------------------------------------------------------------------ sweeps


def test_a_sweep_chooses_by_score(experiment: Callable[..., Path]) -> None:
    methods = {
        "plain": {"knob": "size", "values": [1.0, 2.0, 3.5], "settings": {"size": 2.0}},
        "several": {"knob": "size", "values": [{"size": s, "end": s / 10} for s in (2.9, 6.0, 9.0)]},
    }
    folder = experiment(methods, sweep={"seeds": [100, 101], "settings": {"max_steps": 7}})
    status, printed = run(folder, "--sweep", "--jobs", "2")
    assert status == 0, printed
    found = json.loads((folder / "sweep.json").read_text())
    assert (found["split"], found["seeds"], found["steps"]) == ("validation", [100, 101], 3)
    plain, several = found["methods"]["plain"], found["methods"]["several"]
    assert (plain["knob"], plain["values"], plain["chosen"]) == ("size", [1.0, 2.0, 3.5], 3.5)
    assert plain["scores"][0] == pytest.approx([0.81, 0.8101])
    assert several["values"] == [2.9, 6.0, 9.0] and several["chosen"] == 2.9
    assert "plain: the sweep chose size: 3.5, and its file says size: 2.0: change the file" in printed
    assert "several: the sweep chose size: 2.9, end: 0.29, and its file says size: 1.0, end: None" in printed
    assert "plain: 3.5 is at the edge of what was tried" in printed
    used = yaml.safe_load((folder / "out/several/size-6/seed-101/settings.yaml").read_text())
    assert used["end"] == 0.6 and used["dataset_test_split"] == "validation" and used["seed"] == 101
    assert used["max_steps"] == 7 and used["save_trained_model"] is False

    assert run(folder, "--seeds", "0", "--output", str(folder / "ab"))[0] == 0
    assert "validation" in (folder / "ab/comparison.md").read_text()


def test_a_sweep_of_some_methods_keeps_the_others(experiment: Callable[..., Path]) -> None:
    methods = {name: {"knob": "size", "values": [1.0, 2.0]} for name in ("a", "b")}
    folder = experiment(methods, sweep={"seeds": [100]})
    file, partial = folder / "sweep.json", folder / "out/sweep.json"
    assert run(folder, "--sweep", "--methods", "b")[0] == 0
    assert not file.exists() and list(json.loads(partial.read_text())["methods"]) == ["b"]
    assert run(folder, "--sweep")[0] == 0
    first = json.loads(file.read_text())

    methods["a"] = {
        "knob": "size",
        "values": [3.0, 4.0],
        "settings": {"size": 4.0},
    }  # as a person puts in what was chosen
    experiment(methods, sweep={"seeds": [100]})
    status, printed = run(folder, "--sweep", "--methods", "a")
    assert status == 0 and f"Written to {file}" in printed, printed
    second = json.loads(file.read_text())
    assert second["methods"]["a"]["values"] == [3.0, 4.0] and second["methods"]["b"] == first["methods"]["b"]
    assert list(second["methods"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "sweep"),
    [
        ({"values": [1.0, 5.0]}, {}),
        ({"knob": "rate"}, {}),
        ({"settings": {"end": 1.0}}, {}),
        ({"values": [{"size": 1.0, "end": 1.0}, {"size": 2.0, "end": 1.0}]}, {}),
        ({}, {"seeds": [101]}),
        ({}, {"settings": {"end": 1.0}}),
    ],
    ids=str,
)
def test_an_earlier_sweep_that_was_another_search_is_not_taken(
    experiment: Callable[..., Path], change: dict[str, Any], sweep: dict[str, Any]
) -> None:
    methods = {name: {"knob": "size", "values": [1.0, 2.0]} for name in ("a", "b")}
    folder = experiment(methods, sweep={"seeds": [100]})
    assert run(folder, "--sweep")[0] == 0
    first = (folder / "sweep.json").read_text()
    experiment(methods | {"b": methods["b"] | change}, sweep={"seeds": [100]} | sweep)
    status, printed = run(folder, "--sweep", "--methods", "a", "--output", str(folder / "other"))
    assert status == 0 and f"Written to {folder / 'other' / 'sweep.json'}" in printed, printed
    assert (folder / "sweep.json").read_text() == first


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"methods": {"b": []}}'])
def test_a_bad_sweep_file_stops_no_sweep(experiment: Callable[..., Path], content: str) -> None:
    methods = {name: {"knob": "size", "values": [1.0]} for name in ("a", "b")}
    folder = experiment(methods, sweep={"seeds": [100]})
    file = folder / "sweep.json"
    file.write_text(content)
    status, printed = run(folder, "--sweep", "--methods", "a")
    assert status == 0 and "The other methods' results are not used" in printed and str(file) in printed
    status, printed = run(folder, "--seeds", "0", "--output", str(folder / "ab"))
    assert status == 2 and f"--sweep {file}" in printed
    status, printed = run(folder, "--sweep")
    assert status == 0 and list(json.loads(file.read_text())["methods"]) == ["a", "b"]


def test_a_sweep_is_as_thorough_for_every_method(experiment: Callable[..., Path]) -> None:
    methods = {"a": {"knob": "size", "values": [1.0, 2.0]}, "b": {"knob": "size", "values": [1.0]}}
    status, printed = run(experiment(methods, sweep={"seeds": [100]}), "--sweep")
    assert status == 2 and "the same number of values to sweep, and they have a 2, b 1" in printed
    methods["b"]["values"] = [1.0, 3.0]
    status, printed = run(experiment(methods, seeds=[5], sweep={"seeds": [5, 6]}), "--sweep")
    assert status == 2 and "sweep.seeds has [5], which the A/B has too" in printed
    methods["b"]["settings"] = {"fails": True}
    folder = experiment(methods, sweep={"seeds": [100]})
    assert run(folder, "--sweep")[0] == 1 and not (folder / "sweep.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": {}}, "methods must be named"),
        ({"seeds": [0.5]}, "seeds must be a list of whole numbers"),
        ({"sede": [1]}, "has sede; it may have"),
        ({"methods": {"a": {"config": "base.yaml"}}}, "methods.a must have script"),
        ({"methods": {"a": {"script": "s", "config": "open.yaml"}}}, "must have rate, which open.yaml leaves open"),
        ({"methods": {"a": {"script": "s", "config": "missing.yaml"}}}, "No such file"),
        ({"methods": {"a": {"script": "s", "config": "base.yaml", "knob": "x", "values": [{"y": 1}]}}}, "must set x"),
    ],
)
def test_mistakes_in_the_definition_are_named(
    change: dict[str, Any], message: str, experiment: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = experiment({"a": {}})
    content = yaml.safe_load((folder / "ab.yaml").read_text()) | change
    (folder / "ab.yaml").write_text(yaml.safe_dump(content))
    (folder / "open.yaml").write_text("required: [rate]\n")
    assert ab.main([str(folder)]) == 2
    assert message in capsys.readouterr().out


def test_more_mistakes_are_named(experiment: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = experiment({"a": {}})
    for arguments, message in {
        (str(folder), "--methods", "b"): "--methods b",
        (str(folder), "--sweep"): "has no `sweep`",
        (str(folder), "--jobs", "0"): "--jobs 0 must be at least 1",
        (str(folder / "none"),): "has no ab.yaml",
    }.items():
        assert ab.main([*arguments]) == 2
        assert message in capsys.readouterr().out


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*/ab.yaml")), ids=lambda file: file.parent.name)
def test_the_definitions_of_the_repository_are_read(file: Path) -> None:
    experiment = ab.read_experiment(file.parent)
    for method in experiment.methods:
        assert (RECIPES / method.script).is_file()
        assert all(name in method.settings for point in method.values for name in point)
    if experiment.sweep is not None:
        assert ab.sweep_runs(experiment, experiment.methods, Path("out"))


# -------------------------------------------------------------------------------------------------- the real recipes


@pytest.mark.slow
def test_a_comparison_of_the_real_recipes_that_is_killed_and_goes_on(experiment: Callable[..., Path]) -> None:
    start_folder = warm_start_model(WarmStart(seed=0))
    folder = experiment(
        {
            "sketch": {"script": "grpo_sketch.py", "config": str(RECIPES / "embedded/sketch.yaml")},
            "dense": {"script": "grpo_dense.py", "config": str(RECIPES / "embedded/dense-matrices.yaml")},
        },
        settings={"max_steps": 3, "num_eval_problems": 16, "accuracy_every": 2},
    )
    process = start(folder)
    wait_for((folder / "out/dense/seed-0/settings.yaml").is_file)
    process.kill()
    process.communicate()
    finished = (folder / "out/sketch/seed-0/run.json").stat()
    status, printed = run(folder)
    assert status == 0, printed
    again = (folder / "out/sketch/seed-0/run.json").stat()
    assert (again.st_ino, again.st_mtime_ns) == (finished.st_ino, finished.st_mtime_ns)
    assert (folder / "out/comparison.md").is_file() and (folder / "out/comparison.png").is_file()

    records = {name: RunRecord.load(folder / f"out/{name}/seed-0") for name in ("sketch", "dense")}
    for name, record in records.items():
        after = record.accuracy["after"]
        assert len(record.problems) == len(after["greedy"]) == len(set(record.problems)) == 16
        assert {len(scores) for scores in after["sampled"]} == {4}
        printed = (folder / f"out/{name}/seed-0/log.txt").read_text()
        for kind in ("greedy", "sampled"):
            means = [
                fmean(fmean(s) if isinstance(s, list) else s for s in record.accuracy[when][kind])
                for when in ("before", "after")
            ]
            row = next(line for line in printed.splitlines() if line.startswith(f"│ {kind}"))
            assert re.findall(r"[\d.]+%", row) == [f"{mean:.1%}" for mean in means]
        assert record.label == name and record.steps == 3 == len(record.log)
        _check_times(record)
        assert [("accuracy/greedy" in entry, "accuracy/sampled" in entry) for entry in record.log] == [
            (False, False),
            (True, True),
            (False, False),
        ]
        assert record.peak_bytes >= record.mean_bytes > 0
    assert records["sketch"].problems == records["dense"].problems
    assert records["sketch"].accuracy["before"] == records["dense"].accuracy["before"]
    weights = 4 * 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 384)  # four layers in fp32
    memory = records["dense"].memory
    assert memory["gradient"] == weights and memory["optimizer"] == 2 * weights + 4 * 28  # moments and step counts
    assert memory["weights"] > weights and records["sketch"].memory["sketch"] < weights

    trained, before = (AutoModelForCausalLM.from_pretrained(f) for f in (folder / "out/dense/seed-0", start_folder))
    moved = {n for n, p in trained.named_parameters() if not torch.equal(p, before.get_parameter(n).to(p.dtype))}
    assert len(moved) == 28 and all(name.endswith("_proj.weight") for name in moved)


def _check_times(record: RunRecord) -> None:
    """A step consists of its parts; measuring accuracy in between takes no time."""
    earlier = 0.0
    for entry in record.log:
        parts = entry["time/rollout"] + entry["time/update"] + entry["time/sync"]
        assert entry["time/rollout"] > 0.01 and entry["time/update"] > 0.01 and entry["time/sync"] == 0
        step = entry["seconds"] - earlier
        assert parts <= step < parts + 0.2  # what is left is fetching data and logging
        assert entry["memory/allocated"] > 0
        earlier = entry["seconds"]
    assert record.seconds >= earlier
