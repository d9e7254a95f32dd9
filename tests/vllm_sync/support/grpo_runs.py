"""Short runs of `SketchGRPOTrainer` with vLLM, in this process and in others, and what came of them."""

import functools
import os
import sys
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm_sleeps
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig
from trl.generation import vllm_generation

from trl_sketch import SketchConfig, SketchGRPOTrainer
from trl_sketch.sync.servers import RolloutError


PROMPTS = Dataset.from_dict({"prompt": ["abc", "hello", "foo", "bar", "xyzzy", "12", "q", "W."] * 4})
BF16 = {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
FP32 = {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(ord(c) for c in text) % 97 / 97 for text in completions]


def make_trainer(
    folder: Path | str,
    output: Path | str,
    sketch: dict[str, Any] | None = None,
    cls: type[SketchGRPOTrainer] = SketchGRPOTrainer,
    callbacks: list[TrainerCallback] | None = None,
    **settings: Any,
) -> SketchGRPOTrainer:
    """Of three steps; `sketch` goes to SketchConfig and `settings` to GRPOConfig."""
    defaults = {
        "output_dir": str(output),
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_timeout": 60.0,
    }
    transformers.logging.disable_progress_bar()
    trainer = cls(
        model=str(folder),
        reward_funcs=reward,
        args=GRPOConfig(**defaults | BF16 | settings),
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS.select(range(8)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=SketchConfig(**{"rank": 8, "kl_budget": None} | (sketch or {})),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Rollouts(TrainerCallback):
    """The completions of every step. It may take the storage of one weight away, and change another in vLLM."""

    def __init__(self, disturb: bool) -> None:
        self.completions: list[list[int]] = []
        self.disturb = disturb

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        buffered = self.trainer._buffered_inputs
        self.completions.append(torch.cat([part["completion_ids"] for part in buffered]).tolist())
        if self.disturb and state.global_step == 2:
            places = self.trainer.vllm_generation._colocated
            weight = places.parameters["model.layers.0.mlp.up_proj.weight"]
            weight.data = weight.data.clone()
            if not places.shared:
                places.plan.boxes["model.layers.1.mlp.up_proj.weight"][0].target[0, 0] += 1


def logged(trainer: SketchGRPOTrainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


# ---------------------------------------------------------- on the ranks of tests/distributed/ranks.py


def colocated(
    folder: str,
    output: str,
    sketch: dict[str, Any],
    settings: dict[str, Any],
    environment: dict[str, str],
    resume: str | None = None,
    disturb: bool = False,
) -> dict[str, Any]:
    """Train with vLLM in this process; if wanted, something happens to the weights after the second step."""
    _prepare_vllm(environment)
    if settings.get("vllm_enable_sleep_mode"):
        vllm_sleeps.install()
    if settings.get("vllm_tensor_parallel_size", 1) > 1:
        _name_shared_memory()
    rollouts = Rollouts(disturb)
    trainer = rollouts.trainer = make_trainer(folder, output, sketch, callbacks=[rollouts], **COLOCATED | settings)
    trainer.train(resume_from_checkpoint=resume)
    generation = trainer.vllm_generation
    generation.sync_weights()
    places = generation._colocated
    assert places is not None
    weights = {name: whole(p) for name, p in trainer.model.named_parameters()}
    storages = {p.untyped_storage().data_ptr() for p in _vllm_model(trainer).parameters()}
    held = {name: p for name, p in trainer.model.named_parameters() if not isinstance(p, DTensor)}
    trainer.save_model(output + "/saved")
    return {
        "weights": weights,
        "rollouts": rollouts.completions,
        "shared": [name for name, p in held.items() if p.untyped_storage().data_ptr() in storages],
        "differing": [
            name for name, w in weights.items() for b in places.plan.boxes[name] if not torch.equal(b.target, b.of(w))
        ],
        "mismatch": logged(trainer, "sampling/sampling_logp_difference/mean"),
        "versions": logged(trainer, "sketch/weight_version"),
        "bytes": logged(trainer, "sketch/sync_bytes"),
        "pending": len(generation._steps),
        "kinds": {type(p).__name__ for p in trainer.model.parameters()},
        "slept": list(vllm_sleeps.Forgetful.slept),
    }


COLOCATED = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 64}


def served(
    folder: str, output: str, url: str, sketch: dict[str, Any], settings: dict[str, Any], environment: dict[str, str]
) -> dict[str, Any]:
    """Train with a server; the collectives of every sync."""
    from ranks import traffic

    os.environ.update(environment)
    try:
        trainer = make_trainer(folder, output, sketch, vllm_server_base_url=url, **settings)
    except RolloutError as error:
        return {"error": str(error)}
    generation, syncs = trainer.vllm_generation, []
    sync_weights = generation.sync_weights

    def watched() -> None:
        with traffic() as collectives:
            sync_weights()
        syncs.append(list(collectives))

    generation.sync_weights = watched
    trainer.train()
    generation.sync_weights()
    weights = {name: whole(p) for name, p in trainer.model.named_parameters()}
    is_main = trainer.accelerator.is_main_process
    return {
        "weights": weights,
        "syncs": syncs,
        "kinds": {type(p).__name__ for p in trainer.model.parameters()},
        "bytes": logged(trainer, "sketch/sync_bytes"),
        "differing": generation.servers.clients[0].differing(weights) if is_main else [],
        "pending": len(generation._steps),
    }


def recipe(name: str, arguments: list[str], environment: dict[str, str]) -> None:
    """A recipe, as from the command line."""
    import runpy

    _prepare_vllm(environment)
    path = Path(__file__).parents[3] / "recipes" / name
    sys.path.insert(0, str(path.parent))
    sys.argv = [name, *arguments]
    runpy.run_path(str(path), run_name="__main__")


def _prepare_vllm(environment: dict[str, str]) -> None:
    """Also, TRL's engine compiles nothing: that would take longer than the run."""
    os.environ.update(environment)
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)[:1]


def _name_shared_memory() -> None:
    """Of vLLM's workers on a CPU: in a trainer's processes all runs give it one name, and leave it behind."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    named = _CPUSHMDistributed.make_group_name

    def own_name(communicator: Any) -> str:
        name = os.environ["MASTER_PORT"] + named(communicator).lstrip("/")
        file = Path(f"/dev/shm/{name}_{communicator.rank}")
        Finalize(None, file.unlink, kwargs={"missing_ok": True}, exitpriority=0)  # when this process ends
        return name

    _CPUSHMDistributed.make_group_name = staticmethod(own_name)


def _vllm_model(trainer: SketchGRPOTrainer) -> torch.nn.Module:
    from trl_sketch.sync.colocate import vllm_model

    return vllm_model(trainer.vllm_generation.llm)
