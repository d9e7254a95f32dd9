"""`WholeCheckpoints`: what is in a checkpoint, what is deleted, and what a full disk leaves. Kills are in test_crashes.py."""

import ctypes
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_support import PROMPTS, build, checkpoints, contents, difference
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from test_crashes import finish, start
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, TrainingArguments
from transformers.trainer_callback import TrainerState

from trl_sketch import SketchConfig, SketchGRPOTrainer, SketchOptimizer, get_sketch_model
from trl_sketch.checkpoint import UNFINISHED, WholeCheckpoints
from trl_sketch.model import sketch_state


def names(output: Path) -> list[str]:
    """The folders in the output folder: checkpoints, and what is left of others."""
    return sorted(path.name for path in output.iterdir() if path.is_dir())


def in_memory(trainer: SketchGRPOTrainer) -> dict[str, Any]:
    """What a save that fails must not change."""
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()},
        "optimizer": trainer.optimizer.state_dict(),
        "step": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "random": torch.random.get_rng_state(),
    }


# ------------------------------------------------------------------------------------------------ contents


def test_a_finished_run_resumes_to_the_same_weights(policy_folder: str, tmp_path: Path) -> None:
    """A run that is killed after its last save has nothing left to train. (Transformers would take one more step.)"""
    build(policy_folder, tmp_path).train()
    before = contents(tmp_path / "checkpoint-4")
    resumed = build(policy_folder, tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert difference(dict(resumed.model.named_parameters()), before["weights"]) is None
    assert difference(contents(tmp_path / "checkpoint-4"), before) is None

    longer = build(policy_folder, tmp_path, max_steps=5)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 5


def test_weights_alone_do_not_resume_the_run(policy_folder: str, tmp_path: Path) -> None:
    """A test of the tests that compare: without the optimizer's state, or that of the generators, the end is another."""
    build(policy_folder, tmp_path).train()
    whole = contents(tmp_path / "checkpoint-4")
    for missing in ("optimizer.pt", "rng_state.pth"):
        build(policy_folder, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert difference(contents(tmp_path / "checkpoint-4")["weights"], whole["weights"]) is None
        (tmp_path / "checkpoint-2" / missing).rename(tmp_path / missing)
        if missing == "optimizer.pt":  # transformers loads both or neither
            (tmp_path / "checkpoint-2" / "scheduler.pt").rename(tmp_path / "scheduler.pt")
        build(policy_folder, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert difference(contents(tmp_path / "checkpoint-4")["weights"], whole["weights"]) is not None, missing
        for file in tmp_path.glob("*.pt*"):
            file.rename(tmp_path / "checkpoint-2" / file.name)


@pytest.mark.parametrize(
    ("changes", "rollouts"),
    [
        ({"num_iterations": 2}, [1, 0, 1, 0]),
        ({"steps_per_generation": 3}, [1, 1, 0, 1]),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}, [1, 1, 1, 0]),
    ],
)
def test_a_run_resumes_within_a_rollout(
    policy_folder: str, tmp_path: Path, changes: dict[str, Any], rollouts: list[int]
) -> None:
    """Where several optimizer steps use one rollout, it is in the checkpoint. (TRL would make another.)"""
    straight, output = tmp_path / "straight", tmp_path / "out"
    build(policy_folder, straight, **changes).train()
    expected = {contents(checkpoint)["step"]: contents(checkpoint) for checkpoint in checkpoints(straight)}
    assert [len(expected[step]["rollout"]) for step in (1, 2, 3, 4)] == rollouts
    for step in (1, 2, 3):
        resumed = build(policy_folder, output, **changes)
        resumed.train(resume_from_checkpoint=str(straight / f"checkpoint-{step}"))
        assert difference(contents(output / "checkpoint-4"), expected[4]) is None, step
    resumed.train(resume_from_checkpoint=str(straight / "checkpoint-2"))  # a trainer that has trained already
    assert difference(contents(output / "checkpoint-4"), expected[4]) is None


def test_the_mismatch_of_a_rollout_counts_once(policy_folder: str, tmp_path: Path) -> None:
    """Also where the run was resumed within the rollout."""

    class Disagreeing(SketchGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            """The rollout's log-probabilities, as vLLM would report them, a known amount above the trainer's."""
            output = super()._generate_and_score_completions(inputs)
            output["old_per_token_logps"] = torch.full_like(output["completion_ids"], -1.0, dtype=torch.float32)
            output["sampling_per_token_logps"] = output["old_per_token_logps"] + 4e-4 * (1 + self.state.global_step)
            output["completion_ids"][:, 3] = self.eos_token_ids[0]
            output["completion_mask"][:] = (torch.arange(output["completion_ids"].shape[1]) <= 3).int()
            return output

    settings: dict[str, Any] = {
        "config": SketchConfig(rank=8, kl_budget=1e-2),
        "steps_per_generation": 2,
        "max_completion_length": 12,
    }
    build(policy_folder, tmp_path, Disagreeing, **settings).train()
    expected = contents(tmp_path / "checkpoint-4")
    assert expected["optimizer"]["param_groups"][0]["sketch"]["mismatch"] == pytest.approx(
        0.7 * 4e-4 + 0.3 * 12e-4, rel=1e-3
    )
    build(policy_folder, tmp_path, Disagreeing, **settings).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    assert difference(contents(tmp_path / "checkpoint-4"), expected) is None


def test_another_plan_makes_another_rollout(policy_folder: str, tmp_path: Path) -> None:
    build(policy_folder, tmp_path, max_steps=1, num_iterations=2).train()
    resumed = build(policy_folder, tmp_path, max_steps=2, num_iterations=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert contents(tmp_path / "checkpoint-2")["rollout"] == []


def test_state_of_an_unknown_format_is_refused(policy_folder: str, tmp_path: Path) -> None:
    build(policy_folder, tmp_path, max_steps=1).train()
    path = tmp_path / "checkpoint-1" / "optimizer.pt"
    state = torch.load(path)
    state["param_groups"][0]["sketch"]["format_version"] = 99
    torch.save(state, path)
    with pytest.raises(ValueError, match="format version 99.*resume with the version that wrote it"):
        build(policy_folder, tmp_path, max_steps=2).train(resume_from_checkpoint=True)


def test_damaged_checkpoints_are_named(policy_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the one before them; a missing optimizer state is warned about, since save_only_model leaves it out."""
    build(policy_folder, tmp_path, max_steps=3).train()
    newest, before = tmp_path / "checkpoint-3", tmp_path / "checkpoint-2"

    def said(**changes: Any) -> str:
        with pytest.raises(ValueError) as caught:
            build(policy_folder, tmp_path, max_steps=4, save_strategy="no", **changes).train(
                resume_from_checkpoint=True
            )
        return str(caught.value)

    whole = (newest / "optimizer.pt").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no archive"):
        (newest / "optimizer.pt").write_bytes(damaged)
        assert said().startswith(f"{newest} cannot be read: ")
    (newest / "optimizer.pt").write_bytes(whole)
    (newest / "scheduler.pt").unlink()
    assert said() == f"{newest} is damaged: it has no scheduler.pt; resume from {before}"
    (newest / "optimizer.pt").unlink()
    with caplog.at_level("WARNING"):
        build(policy_folder, tmp_path, max_steps=4, save_strategy="no").train(resume_from_checkpoint=True)
    assert f"{newest} has no optimizer state, as with save_only_model" in caplog.text
    (newest / "trainer_state.json").unlink()
    assert said() == f"{newest} is not a checkpoint, since it has no trainer_state.json; resume from {before}"
    for folder in (newest, before, tmp_path / "checkpoint-1"):
        shutil.rmtree(folder)
    assert (
        said() == f"resume_from_checkpoint=True, and there is no checkpoint in {tmp_path}: leave it out to start anew"
    )


def test_two_runs_do_not_write_to_one_folder(policy_folder: str, tmp_path: Path) -> None:
    """As after a launcher was killed, whose processes go on; the lock goes with the process that has it."""
    holder = "import fcntl, sys, time; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); "
    holder += "f.write('17'); f.flush(); print('locked', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "_training")], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        trainer = build(policy_folder, tmp_path, max_steps=1)
        with pytest.raises(RuntimeError, match=f"process 17 trains into {tmp_path}: wait for it, stop it"):
            trainer.train()
        assert names(tmp_path) == []
        other.kill()
    trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]


def test_the_projections_keep_the_seed_of_the_checkpoint(
    policy_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(policy_folder, tmp_path, config=SketchConfig(kl_budget=None, rank=8, projection_seed=1), max_steps=1).train()
    resumed = build(
        policy_folder, tmp_path, config=SketchConfig(kl_budget=None, rank=8, projection_seed=2), max_steps=2
    )
    with caplog.at_level("WARNING"):
        resumed.train(resume_from_checkpoint=True)
    assert "goes on with the seed of its projections, 1, and not with 2" in caplog.text
    assert sketch_state(resumed.model).seed == 1


def test_save_only_model(policy_folder: str, tmp_path: Path) -> None:
    trainer = build(policy_folder, tmp_path, max_steps=2, save_only_model=True)
    trainer.train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "config.json", "trainer_state.json", "sketch_config.json", "tokenizer.json"} <= files
    assert not files & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype="auto")
    assert difference(dict(loaded.named_parameters()), dict(trainer.model.named_parameters())) is None

    resumed = build(policy_folder, tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=True)  # with a new optimizer
    assert resumed.state.global_step == 3


def test_tied_weights_are_saved_once(policy_folder: str, tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(policy_folder).config
    config.tie_word_embeddings = True
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    trainer = build(policy_folder, tmp_path / "out", model=model, max_steps=2)
    trainer.train()
    saved = load_file(tmp_path / "out" / "checkpoint-1" / "model.safetensors")
    assert "model.embed_tokens.weight" in saved and "lm_head.weight" not in saved
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-2", dtype="auto")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert difference(dict(loaded.named_parameters()), dict(trainer.model.named_parameters())) is None

    resumed = build(policy_folder, tmp_path / "out", model=Qwen3ForCausalLM(config), max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight
    assert difference(dict(resumed.model.named_parameters()), dict(loaded.named_parameters())) is None


# ------------------------------------------------------------------------------------- what is kept, and the best


def test_what_is_kept(policy_folder: str, tmp_path: Path) -> None:
    """The newest, and nothing that is unfinished, be it of this process or of one before."""
    left = tmp_path / UNFINISHED / "checkpoint-1" / "rng_state_1.pth"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    build(policy_folder, tmp_path, max_steps=1).train()
    assert left.name not in os.listdir(tmp_path / "checkpoint-1")
    build(policy_folder, tmp_path, save_total_limit=2).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    build(policy_folder, tmp_path, save_total_limit=1).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_new_run_in_an_old_folder(policy_folder: str, tmp_path: Path) -> None:
    """The checkpoints of a run that came further are the old ones, and those of the same step are replaced."""
    build(policy_folder, tmp_path).train()
    build(policy_folder, tmp_path, max_steps=2, seed=1, save_total_limit=2).train()
    other = tmp_path.with_name("other")
    build(policy_folder, other, max_steps=2, seed=1).train()
    kept = {name: contents(tmp_path / name)["weights"] for name in names(tmp_path)}
    assert len(kept) == 2 and "checkpoint-2" in kept
    assert difference(kept["checkpoint-2"], contents(other / "checkpoint-2")["weights"]) is None


@pytest.mark.parametrize("limit", [1, 2, None])
def test_the_best_checkpoint(policy_folder: str, tmp_path: Path, limit: int | None) -> None:
    """It is kept, recorded under its name, and loaded at the end; a run that resumes knows it."""
    settings: dict[str, Any] = {
        "eval_dataset": PROMPTS.select(range(4)),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "greater_is_better": False,  # the reward rises: an early checkpoint is the best
        "save_total_limit": limit,
        "learning_rate": 1e-2,
        "max_steps": 4,
    }
    trainer = build(policy_folder, tmp_path / "out", **settings)
    trainer.train()
    rewards = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    step = rewards.index(min(rewards)) + 1
    assert step < 4, "the best is the last: this tests nothing"
    best = tmp_path / "out" / f"checkpoint-{step}"
    assert trainer.state.best_model_checkpoint == str(best)
    assert difference(dict(trainer.model.named_parameters()), load_file(best / "model.safetensors")) is None
    expected = {1: [best.name], 2: [best.name, "checkpoint-4"], None: [f"checkpoint-{n}" for n in (1, 2, 3, 4)]}
    assert names(tmp_path / "out") == expected[limit]
    for checkpoint in checkpoints(tmp_path / "out"):
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step >= step:
            assert state.best_model_checkpoint == str(best)
        else:
            assert UNFINISHED not in str(state.best_model_checkpoint)

    resumed = build(policy_folder, tmp_path / "out", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(best)
    assert difference(dict(resumed.model.named_parameters()), load_file(best / "model.safetensors")) is None


def test_a_push_takes_the_whole_checkpoint(
    policy_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = []

    def push(trainer: Any, folder: str) -> None:
        assert difference(dict(trainer.model.named_parameters()), contents(Path(folder))["weights"]) is None
        pushed.append(Path(folder))

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    trainer = build(policy_folder, tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]


def test_a_push_in_the_background_leaves_out_what_is_unfinished() -> None:
    files = ["README.md", f"{UNFINISHED}/checkpoint-2/model.safetensors", "checkpoint-1/model.safetensors"]
    assert list(filter_repo_objects(files, ignore_patterns=["_*", "checkpoint-*"])) == ["README.md"]


# ------------------------------------------------------------------------------------------------ a full disk


def test_a_file_that_cannot_be_written(policy_folder: str, tmp_path: Path) -> None:
    """At each size of file that is refused: the error is reported, nothing is left, training goes on when there is room."""
    straight, output = tmp_path / "straight", tmp_path / "out"
    constant = {"lr_scheduler_type": "constant"}
    build(policy_folder, straight, **constant).train()
    trainer = build(policy_folder, output, max_steps=2, save_strategy="no", **constant)
    trainer.train()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # so that a write raises, as on a full disk

    def save(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            trainer._save_checkpoint(trainer.model, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    before = in_memory(trainer)
    sizes = {path.stat().st_size for path in (straight / "checkpoint-2").iterdir()}
    for limit in sorted({0, *(size - 1 for size in sizes)}):
        with pytest.raises(
            OSError, match=r"checkpoint-2 could not be saved: .*Free disk space.*no whole checkpoint yet"
        ):
            save(limit)
        assert names(output) == []
        assert difference(in_memory(trainer), before) is None
    save(max(sizes) + 1000)
    assert (
        difference(contents(output / "checkpoint-2")["weights"], contents(straight / "checkpoint-2")["weights"])
        is None
    )
    resumed = build(policy_folder, output, **constant)
    with pytest.raises(OSError, match=rf"checkpoint-3 could not be saved: .* is {output}/checkpoint-2\. The weights"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) - 1, hard))
        try:
            resumed.train(resume_from_checkpoint=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(output) == ["checkpoint-2"]
    resumed.train(resume_from_checkpoint=True)
    assert (
        difference(contents(output / "checkpoint-4")["weights"], contents(straight / "checkpoint-4")["weights"])
        is None
    )


def small_disk(folder: Path, size: int) -> bool:
    """Mount a disk of `size` bytes that goes away with this process; returns whether that is allowed here."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER | CLONE_NEWNS
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())


def fill_a_disk(policy: str, output: Path) -> None:
    """Save with ever more room, page by page, until there is enough."""
    output.mkdir()
    if not small_disk(output, 8 << 20):
        print("no disk could be mounted")
        return
    trainer = build(policy, output, max_steps=2, save_total_limit=1)
    trainer.train()
    expected = contents(output / "checkpoint-2")
    trainer.state.best_global_step = 3
    before = in_memory(trainer)
    messages = []
    for pages in range(2000):
        with (output / "ballast").open("wb") as ballast:
            disk = os.statvfs(output)
            os.posix_fallocate(ballast.fileno(), 0, (disk.f_bavail - pages) * disk.f_frsize)
        trainer.state.global_step = 3
        try:
            trainer._save_checkpoint(trainer.model, None)
            break
        except OSError as error:
            messages.append(str(error))
            trainer.state.global_step = 2
            assert names(output) == ["checkpoint-2"]
            assert difference(in_memory(trainer), before) is None
            assert difference(contents(output / "checkpoint-2"), expected) is None
    assert names(output) == ["checkpoint-3"]
    saved = contents(output / "checkpoint-3")
    assert all(difference(saved[part], expected[part]) is None for part in ("weights", "optimizer", "scheduler"))
    assert len(messages) > 20 and all("could not be saved" in message for message in messages)
    assert any(os.strerror(errno.ENOSPC) in message for message in messages)
    print(f"{len(messages)} full disks")


def test_a_full_disk(policy_folder: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    finish(fill_a_disk, policy_folder, tmp_path / "disk", log=log)
    if "no disk could be mounted" in log.read_text():
        pytest.skip("no disk could be mounted")


# ------------------------------------------------------------------------------------------------ several processes


class Slow(WholeCheckpoints):
    """The second process writes later than the first, or is killed before it has."""

    killed = False

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.process_index == 1:
            time.sleep(0.3)
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def save_in_one_of_two(rank: int, port: int, policy: str, output: Path, killed: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model = get_sketch_model(AutoModelForCausalLM.from_pretrained(policy), SketchConfig(kl_budget=None, rank=8))
    args = TrainingArguments(output_dir=str(output), use_cpu=True, ddp_backend="gloo", report_to="none")
    trainer = Slow(model, args, optimizers=(SketchOptimizer(model, lr=1e-3), None))
    trainer.create_scheduler(1)
    trainer.killed = killed
    assert trainer.args.world_size == 2
    trainer._save_checkpoint(model, None)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(os.listdir(output / "checkpoint-0"))  # in both, at once


@pytest.mark.parametrize("killed", [False, True])
def test_a_checkpoint_waits_for_every_process(policy_folder: str, tmp_path: Path, killed: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    (tmp_path / "out" / UNFINISHED / "checkpoint-0" / "of a process that was killed").mkdir(parents=True)
    arguments = (port, policy_folder, tmp_path / "out", killed)
    processes = [start(save_in_one_of_two, rank, *arguments, log=log) for rank, log in enumerate(logs)]
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    assert codes == ([1, -signal.SIGKILL] if killed else [0, 0]), [log.read_text() for log in logs]
    assert names(tmp_path / "out") == ([] if killed else ["checkpoint-0"])
