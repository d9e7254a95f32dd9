"""Real kills of real runs: whatever the moment, what is left resumes and ends as the run that nobody killed.

A server process imports torch and TRL once and forks a child per run, which takes half a second.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_support import build, checkpoints, contents, difference
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer

from trl_sketch import SketchConfig, SketchGRPOTrainer
from trl_sketch.checkpoint import UNFINISHED


SETTINGS: dict[str, dict[str, Any]] = {
    "one checkpoint is kept": {"save_total_limit": 1},
    "bf16 and KL control": {"bf16": True, "config": SketchConfig(rank=8, kl_budget=2e-2), "save_total_limit": 2},
    "adam, accumulation and two steps a rollout": {
        "config": SketchConfig(rank=8, kl_budget=None, update_rule="adam", refresh="never"),
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
}
STEPS = 4


class Stock(SketchGRPOTrainer):
    """Saves as TRL does."""

    _save_checkpoint = GRPOTrainer._save_checkpoint
    _get_output_dir = GRPOTrainer._get_output_dir
    _push_from_checkpoint = GRPOTrainer._push_from_checkpoint
    _finalize_training = GRPOTrainer._finalize_training
    _run_epoch = GRPOTrainer._run_epoch


def start(target: Callable[..., None], *args: Any, log: Path, **kwargs: Any) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "datasets", "trl.trainer.grpo_trainer", "trl_sketch.trainer"])
    process = context.Process(target=_child, args=(target, log, args, kwargs))
    process.start()
    return process


def _child(target: Callable[..., None], log: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # tqdm's lock would be a named semaphore, left by a kill
    torch.set_num_threads(1)
    target(*args, **kwargs)


def run(policy: str, output: Path, **settings: Any) -> None:
    """Train to the end, from the last checkpoint if there is one."""
    trainer = build(policy, output, max_steps=STEPS, **settings)
    output.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) is not None or None)
    assert trainer.state.global_step == STEPS


def finish(target: Callable[..., None], *args: Any, log: Path, **kwargs: Any) -> None:
    process = start(target, *args, log=log, **kwargs)
    process.join()
    assert process.exitcode == 0, log.read_text()


def kill(process: ForkServerProcess) -> bool:
    """SIGKILL; returns whether it came before the process had ended."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def wait_for(process: ForkServerProcess, condition: Callable[[], bool]) -> None:
    while not condition() and process.is_alive():
        time.sleep(2e-4)


def assert_whole(output: Path, expected: dict[int, dict[str, Any]]) -> None:
    """Every checkpoint there is has all the bits of the one that the uninterrupted run wrote at that step."""
    for checkpoint in checkpoints(output):
        found = contents(checkpoint)
        differs = difference(found, expected[found["step"]])
        assert differs is None, f"{differs} of {checkpoint}"


@pytest.mark.slow
@pytest.mark.parametrize("case", SETTINGS)
def test_kills_at_random_moments(policy_folder: str, tmp_path: Path, case: str) -> None:
    """Seven kills in each of three settings, most within a save; each resumes and ends in the bits of the straight run."""
    settings, log = SETTINGS[case], tmp_path / "log"
    straight = tmp_path / "straight"
    finish(run, policy_folder, straight, log=log, **settings | {"save_total_limit": None})
    expected = {contents(checkpoint)["step"]: contents(checkpoint) for checkpoint in checkpoints(straight)}
    assert list(expected) == list(range(1, STEPS + 1))

    draw = random.Random(case)
    for number in range(7):
        within_save = number < 4
        output = tmp_path / str(number)
        for _ in range(50):  # until the kill falls where it is to
            shutil.rmtree(output, ignore_errors=True)
            process = start(run, policy_folder, output, log=log, **settings)
            step = draw.randint(1, STEPS)
            staged = output / UNFINISHED / f"checkpoint-{step}"
            wait_for(process, staged.exists if within_save else output.exists)
            time.sleep(draw.uniform(0, 0.015) if within_save else draw.uniform(0, 0.5))
            if kill(process) and (staged.exists() or not within_save):
                break
        else:
            raise AssertionError("no kill fell into a save")
        assert_whole(output, expected)
        assert within_save <= (len(checkpoints(output)) >= min(step - 1, 1)), (
            "a save has taken an older checkpoint with it"
        )
        finish(run, policy_folder, output, log=log, **settings)
        assert_whole(output, expected)
        assert checkpoints(output)[-1].name == f"checkpoint-{STEPS}"
        assert not (output / UNFINISHED).exists()


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(policy_folder: str, tmp_path: Path) -> None:
    """Kills of resumed runs, each later than the one before: what a kill leaves is not in the way of the next run."""
    log, settings = tmp_path / "log", SETTINGS["one checkpoint is kept"]
    finish(run, policy_folder, tmp_path / "straight", log=log)
    expected = {
        contents(checkpoint)["step"]: contents(checkpoint) for checkpoint in checkpoints(tmp_path / "straight")
    }
    output, draw = tmp_path / "out", random.Random(0)
    for step in range(1, STEPS + 1):
        for _ in range(2):
            process = start(run, policy_folder, output, log=log, **settings)
            staged = output / UNFINISHED / f"checkpoint-{step}"
            wait_for(process, staged.exists)
            time.sleep(draw.uniform(0, 0.02))
            kill(process)
            assert_whole(output, expected)
            assert len(checkpoints(output)) >= min(step - 1, 1)
    finish(run, policy_folder, output, log=log, **settings)
    assert_whole(output, expected)
    assert [path.name for path in output.iterdir() if path.is_dir()] == [f"checkpoint-{STEPS}"]


# ------------------------------------------------------------------------------------- every moment of a save


def kill_at_every_file_operation(act: Callable[[], None], output: Path, check: Callable[[], None]) -> int:
    """Run `act` in forks that are killed at its first, second, … operation on a file or folder in `output`, until one ends.

    Each finds `output` as it is now, and `check` follows each. Returns the number of kills.
    """
    before = output.with_name("before")
    shutil.copytree(output, before)
    for moment in itertools.count(1):
        shutil.rmtree(output)
        shutil.copytree(before, output)
        state = random.getstate()
        process = os.fork()
        if process == 0:
            random.setstate(state)  # Python has drawn another seed
            operations = itertools.count(1)

            def hook(event: str, args: Any) -> None:
                if (
                    event in ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir")  # noqa: B023
                    and (str(output) in str(args[0]) or event in ("os.remove", "os.rmdir"))  # rmtree names no folder
                    and next(operations) == moment  # noqa: B023
                ):
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            try:
                act()
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        _, status = os.waitpid(process, 0)
        check()
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return moment - 1
    raise AssertionError


def save_again(policy: str, output: Path, cls: type[SketchGRPOTrainer]) -> None:
    """Steps 1 and 2 were saved; 2 is saved once more, and 1 has to go: a new folder, a replaced and a deleted one."""
    trainer = build(policy, output, cls, max_steps=2)
    trainer.train()
    trainer._save_checkpoint(trainer.model, None)  # the end of training has been logged
    trainer.args.save_total_limit = 1
    expected = {step: contents(output / f"checkpoint-{step}") for step in (1, 2)}

    def check() -> None:
        assert_whole(output, expected)
        last = get_last_checkpoint(output)
        assert last is not None and contents(Path(last))["step"] == 2

    kills = kill_at_every_file_operation(lambda: trainer._save_checkpoint(trainer.model, None), output, check)
    print(f"{kills} kills")
    assert kills > 50
    assert [path.name for path in output.glob("*") if path.is_dir()] == ["checkpoint-2"]


def end_training(policy: str, output: Path, cls: type[SketchGRPOTrainer]) -> None:
    """The end of a training that keeps the best checkpoint, not the last."""
    trainer = build(policy, output, cls, max_steps=2, save_total_limit=1)
    trainer.train()
    build(policy, output, max_steps=2).train()
    expected = {step: contents(output / f"checkpoint-{step}") for step in (1, 2)}
    trainer.state.best_model_checkpoint = str(output / "checkpoint-1")

    def check() -> None:
        assert_whole(output, expected)
        assert (output / "checkpoint-1").is_dir()

    kills = kill_at_every_file_operation(lambda: trainer._finalize_training(None, 1, time.time()), output, check)
    print(f"{kills} kills")
    assert kills > 10
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize("scenario", [save_again, end_training])
def test_a_kill_at_every_file_operation(policy_folder: str, tmp_path: Path, scenario: Callable[..., None]) -> None:
    finish(scenario, policy_folder, tmp_path / "out", SketchGRPOTrainer, log=tmp_path / "log")


@pytest.mark.parametrize("scenario", [save_again, end_training])
def test_of_the_test(policy_folder: str, tmp_path: Path, scenario: Callable[..., None]) -> None:
    """TRL's own way of saving does not pass it."""
    process = start(scenario, policy_folder, tmp_path / "out", Stock, log=tmp_path / "log")
    process.join()
    assert process.exitcode == 1
    assert re.search(r"in (assert_whole|check)\n", (tmp_path / "log").read_text())
