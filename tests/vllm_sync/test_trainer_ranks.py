"""GRPO with vLLM in the trainer's processes, and with several trainer processes; each test in processes of its own.

(vLLM's engine initializes torch.distributed in its process, and for good.)
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_runs import FP32, colocated, recipe, served
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm_server import IN_PROCESS, running_server


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import run  # noqa: E402
from test_engines import ENVIRONMENT  # noqa: E402


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def run_colocated(
    folder: Path,
    output: Path,
    sketch: dict[str, Any] | None = None,
    world: int = 1,
    resume: Path | None = None,
    engine: str = "ddp",
    disturb: bool = False,
    **settings: Any,
) -> list[dict[str, Any]]:
    environment = IN_PROCESS | ENVIRONMENT[engine]
    arguments = (str(folder), str(output), sketch or {}, settings, environment, resume and str(resume), disturb)
    return run(world, colocated, *arguments, launched=True)


# ---------------------------------------------------------- one process


@pytest.fixture(scope="module")
def shared_run(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The default in colocate mode, with a checkpoint after each two of its four steps."""
    output = tmp_path_factory.mktemp("shared")
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    (result,) = run_colocated(checkpoint("qwen3-tied"), output, {"vllm_sync": "auto"}, **settings)
    return output, result


def test_weights_are_shared_where_that_is_possible(shared_run, checkpoint):
    output, result = shared_run
    assert set(result["shared"]) == set(result["weights"])
    assert result["differing"] == [] and result["pending"] == 0
    assert result["versions"] == [0, 1, 2, 3] and set(result["bytes"]) == {0}
    assert 0 < result["mismatch"][-1] < 2 * result["mismatch"][0] + 1e-3 < 0.01
    start = load_file(checkpoint("qwen3-tied") / "model.safetensors")
    assert sum(not torch.equal(weight, start[name]) for name, weight in result["weights"].items()) == 14
    for saved in (output / "saved", output / "checkpoint-4"):
        tensors = load_file(saved / "model.safetensors")
        assert_same(tensors, result["weights"])  # also the views of one storage: q, k and v, gate and up
        assert_same(dict(AutoModelForCausalLM.from_pretrained(saved, dtype="auto").named_parameters()), tensors)


@pytest.mark.slow
def test_a_resumed_run_that_shares_has_the_same_bits(shared_run, checkpoint, tmp_path):
    output, straight = shared_run
    (resumed,) = run_colocated(
        checkpoint("qwen3-tied"), tmp_path, {"vllm_sync": "share"}, resume=output / "checkpoint-2", max_steps=4
    )
    assert set(resumed["shared"]) == set(resumed["weights"])
    assert resumed["versions"][-2:] == [2, 3] and resumed["differing"] == []
    assert_same(resumed["weights"], straight["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["sketch", "full"])
def test_every_way_gives_the_same_rollouts_and_weights(sync, shared_run, checkpoint, tmp_path):
    (result,) = run_colocated(checkpoint("qwen3-tied"), tmp_path, {"vllm_sync": sync}, max_steps=4)
    assert result["rollouts"] == shared_run[1]["rollouts"]
    assert_same(result["weights"], shared_run[1]["weights"])
    assert result["differing"] == [] and result["pending"] == 0
    assert result["shared"] == []


@pytest.mark.slow
def test_a_vllm_that_sleeps_gets_whole_weights_when_it_wakes(shared_run, checkpoint, tmp_path):
    """TRL puts it to sleep at level 2 when it is made and after each rollout: nothing is left of its weights."""
    (result,) = run_colocated(checkpoint("qwen3-tied"), tmp_path, max_steps=4, vllm_enable_sleep_mode=True)
    assert result["slept"] == [2] * 5
    assert result["rollouts"] == shared_run[1]["rollouts"]
    assert_same(result["weights"], shared_run[1]["weights"])
    assert result["differing"] == [] and result["pending"] == 0 and result["shared"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sync"), [("qwen3", "share"), ("llama", "share"), ("qwen2", "sketch")])
def test_other_models(kind, sync, checkpoint, tmp_path):
    """(Fifty steps of each, without an engine, are in `test_models.py`.)"""
    sketch = {"vllm_sync": sync, "update_ratio": 6e-5, "full_sync_every": 4}
    (result,) = run_colocated(checkpoint(kind), tmp_path, sketch, max_steps=8)
    assert result["versions"] == list(range(8)) and result["differing"] == []
    assert set(result["shared"]) == (set(result["weights"]) if sync == "share" else set())
    assert sum(result["mismatch"][-4:]) < 2 * sum(result["mismatch"][:4]) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["share", "sketch"])
def test_weights_that_have_come_apart_are_put_right(sync, checkpoint, tmp_path):
    """In vLLM, found by checksums; and a parameter that somebody has given memory of its own, as `module.to` does."""
    sketch = {"vllm_sync": sync, "full_sync_every": 4}
    (result,) = run_colocated(checkpoint("qwen3-tied"), tmp_path, sketch, disturb=True, max_steps=6)
    assert result["differing"] == []
    assert set(result["shared"]) == (set(result["weights"]) if sync == "share" else set())


@pytest.mark.slow
def test_an_fp32_trainer_copies_its_weights_into_a_bf16_model(checkpoint, tmp_path):
    """(TRL has vLLM load the type that the checkpoint has.)"""
    (result,) = run_colocated(checkpoint("qwen3-tied"), tmp_path, **FP32)
    assert result["shared"] == [] and result["versions"] == [0, 1, 2]
    assert 0 < result["mismatch"][-1] < 2 * result["mismatch"][0] + 1e-3


# ---------------------------------------------------------- several processes


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_and_a_server(engine, server, tmp_path):
    """After the first sync nothing goes through the process group but what the main process says of it."""
    sketch = {"full_sync_every": 2}
    arguments = (str(server.folder), str(tmp_path), server.url, sketch, {"per_device_train_batch_size": 4})
    first, second = run(2, served, *arguments, ENVIRONMENT[engine], launched=True)
    assert first["kinds"] == second["kinds"] == {"DTensor" if engine == "fsdp2" else "Parameter"}
    assert_same(first["weights"], second["weights"])
    assert first["differing"] == [] and first["pending"] == second["pending"] == 0
    size = sum(weight.nbytes for weight in first["weights"].values())
    whole, *updates = first["bytes"]
    assert whole > size > 10 * max(updates)
    for rank in (first, second):
        gathers = [sum("all_gather" in name for name, _ in sync) for sync in rank["syncs"]]
        assert gathers[0] == (24 if engine == "fsdp2" else 0)
        traffic = [sum(count for _, count in sync) for sync in rank["syncs"][1:]]
        assert len(traffic) == 3 and max(traffic) < size / 5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_with_vllm_in_each(engine, checkpoint, tmp_path):
    """Under FSDP2 the shards cannot be shared: each rank's vLLM is written once, and then gets updates."""
    sketch, settings = {"full_sync_every": 1}, {"per_device_train_batch_size": 4}
    first, second = run_colocated(checkpoint("qwen3-tied"), tmp_path, sketch, world=2, engine=engine, **settings)
    assert first["kinds"] == {"DTensor" if engine == "fsdp2" else "Parameter"}
    assert_same(first["weights"], second["weights"])
    for rank in (first, second):
        assert rank["differing"] == [] and rank["pending"] == 0
        assert bool(rank["shared"]) == (engine == "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["auto", "sketch"])
def test_two_ranks_with_one_vllm(sync, checkpoint, tmp_path):
    """Tensor parallelism in the trainers' processes: whole tensors are shared, halves get updates or copies."""
    sketch = {"vllm_sync": sync, "full_sync_every": 2}
    settings = {"per_device_train_batch_size": 4, "vllm_tensor_parallel_size": 2, "max_steps": 4}
    first, second = run_colocated(checkpoint("qwen3-tied"), tmp_path, sketch, world=2, **settings)
    assert_same(first["weights"], second["weights"])
    for rank in (first, second):
        assert rank["differing"] == [] and rank["pending"] == 0
        assert all("norm" in name for name in rank["shared"]) and bool(rank["shared"]) == (sync == "auto")
        assert 0 < rank["mismatch"][-1] < 2 * rank["mismatch"][0] + 1e-3 < 0.01


@pytest.mark.slow
def test_all_ranks_stop_when_the_main_one_cannot_go_on(tmp_path, checkpoint):
    """Nothing waits for a message that does not come."""
    settings = {"per_device_train_batch_size": 4, "vllm_server_timeout": 0.5}
    arguments = (str(checkpoint("qwen3-tied")), str(tmp_path), "http://127.0.0.1:9", {}, settings, {})
    for rank in run(2, served, *arguments, launched=True):
        assert rank == {"error": "the vLLM server at http://127.0.0.1:9 did not answer for 0.5 s"}


# ---------------------------------------------------------- the embedded default


RECIPE = ["--use_vllm", "true", "--max_steps", "3", "--num_eval_problems", "0", "--per_device_train_batch_size", "32"]


def assert_learned_something(output: Path) -> None:
    assert (output / "run.json").is_file() and (output / "reward.png").is_file()
    assert {p.name for p in output.glob("model.safetensors")}


@pytest.mark.slow
def test_the_recipe_with_vllm_in_its_process(tmp_path):
    settings = ["--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.3", "--output_dir", str(tmp_path)]
    run(1, recipe, "grpo_sketch.py", [*RECIPE, *settings], IN_PROCESS, launched=True)
    assert_learned_something(tmp_path)


@pytest.mark.slow
def test_the_recipe_with_a_server(tmp_path):
    from embedded import WarmStart, warm_start_model

    with running_server(Path(warm_start_model(WarmStart(seed=0))), tmp_path / "log") as server:
        settings = ["--vllm_mode", "server", "--vllm_server_base_url", server.url, "--output_dir", str(tmp_path)]
        run(1, recipe, "grpo_sketch.py", [*RECIPE, *settings], {}, launched=True)
    assert_learned_something(tmp_path)
