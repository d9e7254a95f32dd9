"""`run.json`: written whole, read back, and refused where a field is not what it should be."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from trl_sketch.records import RunRecord, package_versions, problem_id, replacing


def record(**changes: Any) -> RunRecord:
    own: dict[str, Any] = {
        "label": "sketch",
        "seed": 3,
        "settings": {"max_steps": 2, "model_init_kwargs": {"dtype": "bfloat16"}},
        "method": {"rank": 32},
        "versions": {"python": "3.11"},
        "device": "cpu",
        "steps": 2,
        "planned_steps": 2,
        "log": [{"step": 1, "seconds": 0.5, "reward": 0.25}, {"step": 2, "seconds": 1.0, "reward": 0.5}],
        "seconds": 1.1,
        "accuracy": {when: {"greedy": [1.0, 0], "sampled": [[0, 1], [1, 1]]} for when in ("before", "after")},
        "problems": [problem_id("1+1="), problem_id("2+2=")],
        "memory": {"weights": 100, "gradient": 20},
        "peak_bytes": 10**9,
        "mean_bytes": 10**8,
    }
    return RunRecord(**own | changes)


def test_it_comes_back(tmp_path: Path) -> None:
    file = record().write(tmp_path / "new" / "folder")
    assert RunRecord.load(tmp_path / "new" / "folder") == record()
    assert [path.name for path in file.parent.iterdir()] == ["run.json"]
    assert json.loads(file.read_text())["format_version"] == 1


def test_what_is_not_finite_in_the_log_is_none(tmp_path: Path) -> None:
    log = [{"step": 1, "seconds": 0.5, "reward": math.nan, "sketch/realized_kl": math.inf}]
    record(log=log).write(tmp_path)
    assert RunRecord.load(tmp_path).log == [{"step": 1, "seconds": 0.5, "reward": None, "sketch/realized_kl": None}]
    assert math.isnan(log[0]["reward"])  # the caller's own log is as it was


def test_an_old_record_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    record().write(tmp_path)
    with pytest.raises(ValueError, match="settings and method"):
        record(method={"rank": Path("x")}).write(tmp_path)
    with pytest.raises(RuntimeError), replacing(tmp_path / "run.json") as temporary:
        temporary.write_text("half")
        raise RuntimeError("killed")
    assert RunRecord.load(tmp_path) == record()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_is_finished_when_its_steps_are_made() -> None:
    assert record().finished and not record(steps=1).finished


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": 3}, "label=3 must be a string"),
        ({"seed": "0"}, "seed='0' must be a whole number"),
        ({"steps": True}, "steps=True must be a whole number"),
        ({"memory": {"weights": 1.5}}, r"memory.weights=1.5 must be a number of bytes"),
        ({"log": [{"step": 1, "reward": 1.0}]}, r"log\[0\].seconds=None must be a number"),
        ({"log": [{"step": 1, "seconds": 2.0}, {"step": 1, "seconds": 3.0}]}, r"log\[1\] has step 1 at 3 s"),
        (
            {"log": [{"step": 1, "seconds": 2.0}, {"step": 2, "seconds": 1.0}]},
            "seconds must go up, in a resumed run too",
        ),
        ({"accuracy": {"after": {}}}, "it must have before and after, or be empty"),
        ({"problems": ["a"]}, "accuracy.before.greedy must have an entry for each of the 1 problems"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**changes).write(tmp_path)
    (tmp_path / "run.json").write_text(
        json.dumps({"format_version": 1, **dataclasses.asdict(record()), **changes}, allow_nan=False)
    )
    with pytest.raises(ValueError, match=message):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("score", [math.nan, None, "1"])
def test_accuracies_are_finite_numbers(tmp_path: Path, kind: str, score: Any) -> None:
    accuracy = record().accuracy
    accuracy["after"][kind][0] = score if kind == "greedy" else [score, 1]
    with pytest.raises(ValueError, match=f"accuracy.after.{kind} must consist of finite numbers"):
        record(accuracy=accuracy).write(tmp_path)


def test_problems_have_the_same_number_of_samples(tmp_path: Path) -> None:
    accuracy = record().accuracy
    accuracy["after"]["sampled"][1] = [1]
    with pytest.raises(ValueError, match="same number of samples for every problem"):
        record(accuracy=accuracy).write(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "format_version None"),
        ('{"format_version": 2}', "format_version 2, and this version of trl_sketch reads 1"),
        ('{"format_version": 1, "seed": NaN}', "NaN is not a number"),
        ('{"format_version": 1, "seed": 1, "colour": 2}', "unknown colour; missing device, label"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        RunRecord.load(tmp_path)
    assert str(tmp_path / "run.json") in str(error.value)


def test_a_folder_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no run.json"):
        RunRecord.load(tmp_path)


def test_a_problems_id_is_its_prompts() -> None:
    chat = [{"role": "user", "content": "1+1="}]
    assert problem_id(chat) == problem_id([{"content": "1+1=", "role": "user"}]) != problem_id("1+1=")
    assert len({problem_id("a"), problem_id("b"), problem_id("é")}) == 3 and len(problem_id("a")) == 12


def test_versions() -> None:
    versions = package_versions()
    assert versions["torch"].startswith("2.") and "trl_sketch" in versions and "python" in versions
