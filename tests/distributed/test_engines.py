"""GRPO under DDP and FSDP2, as accelerate sets them up: the same runs, checkpoints, and what is refused."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from datasets import Dataset
from ranks import free_port, run
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, SFTConfig, SFTTrainer

from trl_sketch import SketchCallback, SketchConfig, SketchGRPOTrainer, SketchOptimizer, get_sketch_model
from trl_sketch.memory import Plan, predict_state
from trl_sketch.model import sketch_state
from trl_sketch.sync.checksum import checksum


ENVIRONMENT = {  # what accelerate launch makes of recipes/accelerate/fsdp2.yaml
    "ddp": {},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    },
}
ENVIRONMENT["fsdp2_sharded"] = ENVIRONMENT["fsdp2"] | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
PROMPTS = Dataset.from_dict({"prompt": ["abc", "bcad", "fgh", "kl", "m", "dd", "cab", "hi"] * 4})
KL = {"kl_budget": 1e-2, "log_realized_kl": 1}


def alphabet_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(ord(c) - ord("a") for c in text) / (10 * max(len(text), 1)) for text in completions]


class Watch(TrainerCallback):
    """The weights and moments that training starts from, and a checksum of the weights after every step."""

    def __init__(self, uneven: bool) -> None:
        self.uneven = uneven
        self.lengths: list[int] = []
        self.checksums: list[int] = []
        self.start: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.start = {name: whole(p) for name, p in model.named_parameters()}
        self.start |= kwargs["optimizer"].optimizer.state_dict()["param_groups"][0]["sketch"]["moments"]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.checksums.append(sum(checksum(whole(p)) for p in model.parameters()))
        if self.uneven:
            ids = torch.full((1, 3), 5)
            longest = 2 + 20 * args.process_index
            output = model.generate(ids, do_sample=False, min_new_tokens=longest, max_new_tokens=longest)
            self.lengths.append(output.shape[1] - 3)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def held_bytes(tensors: torch.nn.Module | list[torch.Tensor]) -> int:
    """Of this rank's tensors, or of its part of a model."""
    if isinstance(tensors, torch.nn.Module):
        tensors = [*tensors.parameters(), *tensors.buffers()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


class NaNOnTheSecondRank(SketchGRPOTrainer):
    """Its loss is not a number on rank 1, in the second step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("nan") if self.state.global_step == 1 and self.args.process_index == 1 else loss


def grpo(
    folder: str,
    engine: str,
    config: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    resume: str | bool = False,
    trainer_class: type[SketchGRPOTrainer] = SketchGRPOTrainer,
    save_to: str | None = None,
    uneven: bool = False,
) -> dict[str, Any]:
    """Train on this rank; what came of it."""
    os.environ |= ENVIRONMENT[engine]
    world = int(os.environ["WORLD_SIZE"])
    arguments = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 8 // world,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    transformers.logging.disable_progress_bar()
    watch = Watch(uneven)
    trainer = trainer_class(
        model=folder,
        reward_funcs=alphabet_reward,
        args=GRPOConfig(**arguments | (settings or {})),
        train_dataset=PROMPTS,
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=SketchConfig(**KL | (config or {})),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=resume)
        error = ""
    except (FloatingPointError, OSError) as e:
        error = str(e)
    state = sketch_state(trainer.model)
    optimizer: Any = trainer.optimizer.optimizer
    if save_to:
        trainer.save_model(save_to)
    return {
        "engine": trainer.accelerator.distributed_type,
        "kinds": {type(layer.weight).__name__ for layer in state.layers.values()},
        "weights": {name: whole(p) for name, p in trainer.model.named_parameters()},
        "weight_bytes": held_bytes(trainer.model),
        "state_bytes": {part: held_bytes(tensors) for part, tensors in optimizer.state_tensors().items()},
        "state": optimizer.state_dict()["param_groups"][0]["sketch"],
        "log": [
            {k: v for k, v in log.items() if "sketch/" in k or k == "grad_norm"} for log in trainer.state.log_history
        ],
        "start": watch.start,
        "lengths": watch.lengths,
        "checksums": watch.checksums,
        "step": trainer.state.global_step,
        "error": error,
    }


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def launch(world: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return run(world, _grpo, args, kwargs, launched=True)


def _grpo(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return grpo(*args, **kwargs)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_fsdp2_trains_as_ddp_does(policy_folder: str, tmp_path: Path, bf16: bool) -> None:
    """Rollout, loss, KL control and update; the ranks hold the same bits after every step."""
    settings = {"bf16": bf16, "model_init_kwargs": {"dtype": "bfloat16" if bf16 else "float32"}}
    results = {engine: launch(2, policy_folder, engine, settings=settings) for engine in ("ddp", "fsdp2")}
    for engine, kind in (("ddp", "Parameter"), ("fsdp2", "DTensor")):
        first, second = results[engine]
        assert first["kinds"] == {kind} and first["step"] == 3
        assert first["checksums"] == second["checksums"] and len(set(first["checksums"])) == 3
        assert first["log"] == second["log"]
        assert_same(first["weights"], second["weights"])
    ddp, fsdp = results["ddp"][0], results["fsdp2"][0]
    assert (ddp["engine"], fsdp["engine"]) == (DistributedType.MULTI_CPU, DistributedType.FSDP)
    for a, b in zip(ddp["log"][:1], fsdp["log"][:1], strict=True):
        assert a["sketch/predicted_kl"] > 0 and a["sketch/realized_kl"] > 0
        assert a == pytest.approx(b, rel=0.05 if bf16 else 1e-4)
    start = dict(AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).named_parameters())
    moved, apart = (
        torch.cat([(ddp["weights"][n].float() - other[n].float()).flatten() for n in start])
        for other in (start, fsdp["weights"])
    )
    assert apart.norm() < (0.1 if bf16 else 1e-3) * moved.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_rank_keeps_is_what_is_predicted(policy_folder: str, dtype: torch.dtype) -> None:
    """Weights and training state of each rank, to the byte: under FSDP2 its shards, and the whole of the sketches."""
    settings = {
        "max_steps": 1,
        "bf16": dtype == torch.bfloat16,
        "model_init_kwargs": {"dtype": str(dtype).split(".")[1]},
    }
    plan = Plan(AutoConfig.from_pretrained(policy_folder), rank=16, tokens=2, dtype=dtype, world_size=2)
    predicted = predict_state(plan)
    del predicted["gathered"]  # for a moment
    for rank in launch(2, policy_folder, "fsdp2", {"rank": 16}, settings):
        assert {"weights": rank["weight_bytes"], **rank["state_bytes"]} == predicted


def test_a_rank_waits_for_one_that_generates_longer(policy_folder: str) -> None:
    """Every token takes gathered weights, to which all ranks contribute."""
    first, second = launch(2, policy_folder, "fsdp2", settings={"max_steps": 2}, uneven=True)
    assert (first["lengths"], second["lengths"]) == ([2, 2], [22, 22])
    assert first["checksums"] == second["checksums"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp2_sharded"])
def test_a_resumed_run_has_the_same_bits(policy_folder: str, tmp_path: Path, engine: str) -> None:
    """Six steps are three, a checkpoint, and three: weights, moments, mismatch, budget, projections."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path / engine)}
    settings |= {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    straight = launch(2, policy_folder, engine, settings=settings)
    resumed = launch(2, policy_folder, engine, settings=settings, resume=str(tmp_path / engine / "checkpoint-3"))
    for a, b in zip(straight, resumed, strict=True):
        assert_same(a["weights"], b["weights"])
        assert torch.equal(a["state"]["moments"]["second"], b["state"]["moments"]["second"])
        assert a["state"]["counters"].tolist() == b["state"]["counters"].tolist() == [6, 42, 0]
        assert a["checksums"][3:] == b["checksums"]
    assert straight[0]["log"] == resumed[0]["log"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp2_sharded"])
def test_a_run_goes_on_with_another_number_of_processes(policy_folder: str, tmp_path: Path, engine: str) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path / engine)}
    settings |= {"lr_scheduler_type": "constant"}
    two = launch(2, policy_folder, engine, settings=settings)[0]
    settings |= {"per_device_train_batch_size": 4, "max_steps": 4}
    for world in (1, 3) if engine == "ddp" else (3,):  # on one process accelerate does not shard
        ranks = launch(world, policy_folder, engine, settings=settings, resume=str(tmp_path / engine / "checkpoint-3"))
        for rank in ranks:
            assert_same(rank["start"], two["weights"] | two["state"]["moments"])
            assert rank["checksums"] == ranks[0]["checksums"] != two["checksums"][-1:]
            assert rank["state"]["counters"].tolist() == [4, 42, 0]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_saved_model_is_an_ordinary_one(tiny_qwen3: Any, policy_folder: str, tmp_path: Path, engine: str) -> None:
    """Its tied weight is saved once; a checkpoint of the model alone is one that loads."""
    tied = str(tmp_path / "tied")
    tiny_qwen3(tie_word_embeddings=True).save_pretrained(tied)
    AutoTokenizer.from_pretrained(policy_folder).save_pretrained(tied)
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "output_dir": str(tmp_path / "out"),
        "save_only_model": True,
    }
    saved = tmp_path / "saved"
    result = launch(2, tied, engine, settings=settings | {"max_steps": 2}, save_to=str(saved))[0]
    for folder in (saved, tmp_path / "out" / "checkpoint-2"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118  a safetensors file is no dict
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_same(dict(model.named_parameters()), result["weights"])
    assert not list((tmp_path / "out" / "checkpoint-2").glob("*optim*"))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_bad_loss_on_one_rank(policy_folder: str, engine: str) -> None:
    """It stops all ranks with one message, before a weight moves; or the step is skipped on all, and counted."""
    first, second = launch(2, policy_folder, engine, trainer_class=NaNOnTheSecondRank)
    assert first["error"] == second["error"]
    assert "is not finite. No weight has been changed" in first["error"]
    assert first["step"] == 1 and sum(map(checksum, first["weights"].values())) == first["checksums"][0]
    assert_same(first["weights"], second["weights"])

    config = {"skip_nonfinite_steps": True}
    first, second = launch(2, policy_folder, engine, config=config, trainer_class=NaNOnTheSecondRank)
    assert first["error"] == second["error"] == "" and first["step"] == 3
    for rank in (first, second):
        assert rank["checksums"][0] == rank["checksums"][1] != rank["checksums"][2]
        assert rank["state"]["counters"].tolist() == [3, 42, 1]
    assert first["checksums"] == second["checksums"]
    assert [log["sketch/skipped_steps"] for log in first["log"] if "sketch/skipped_steps" in log] == [0, 1, 1]
    assert [("grad_norm" in log) for log in first["log"][:3]] == [True, False, True]


def refused(folder: str, environment: dict[str, str]) -> str:
    os.environ |= environment
    try:
        grpo(folder, "ddp")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"FSDP_VERSION": "1"}, "FSDP1 flattens weights across layers.*set fsdp_version: 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params keeps the weights on the CPU.*set it to false"),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"},
            "parallelism_config has cp_size=2: train with DDP or FSDP2.*without it",
        ),
    ],
    ids=["fsdp1", "offload", "cp"],
)
def test_other_shardings_are_refused(policy_folder: str, environment: dict[str, str], said: str) -> None:
    for message in run(2, refused, policy_folder, ENVIRONMENT["fsdp2"] | environment, launched=True):
        assert re.match(said, message), message


def resumed_elsewhere(folder: str, engine: str, checkpoint: str) -> str:
    try:
        grpo(folder, engine, resume=checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_engine_is_refused(policy_folder: str, tmp_path: Path) -> None:
    names = {
        "ddp": "one process or DDP",
        "fsdp2": "FSDP2 with FULL_STATE_DICT",
        "fsdp2_sharded": "FSDP2 with SHARDED_STATE_DICT",
    }
    for engine in names:
        settings = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / engine), "max_steps": 1}
        launch(2, policy_folder, engine, settings=settings)
    for written, here in (("ddp", "fsdp2"), ("fsdp2", "ddp"), ("fsdp2", "fsdp2_sharded"), ("fsdp2_sharded", "fsdp2")):
        checkpoint = str(tmp_path / written / "checkpoint-1")
        for said in run(2, resumed_elsewhere, policy_folder, here, checkpoint, launched=True):
            assert said.startswith(
                f"{checkpoint} was written by {names[written]} and this run uses {names[here]}: resume with"
            )


def sft(folder: str) -> tuple[list[float], int, bool]:
    """Another trainer, with the callback: the logged norms, a checksum of the weights, and whether they have moved."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    get_sketch_model(model, SketchConfig(rank=8, kl_budget=1e-3))
    before = sum(checksum(p) for p in model.parameters())
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, max_steps=3, learning_rate=1e-3, logging_steps=1, report_to="none",
            save_strategy="no", per_device_train_batch_size=2, log_level="error", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": ["abc", "bcad", "fgh", "kl", "mmm", "dd", "cab", "hi"] * 2}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        optimizers=(SketchOptimizer(model, lr=1e-3), None),
    )  # fmt: skip
    trainer.add_callback(SketchCallback(trainer))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    after = sum(checksum(p) for p in model.parameters())
    return [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log], after, after != before


def test_another_trainer_in_two_processes(policy_folder: str) -> None:
    first, second = run(2, sft, policy_folder, launched=True)
    assert first == second and len(first[0]) == 3 and first[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_recipe_runs_as_the_readme_launches_it(tmp_path: Path, name: str) -> None:
    root = Path(__file__).parents[2]
    arguments = ["--max_steps", "2", "--output_dir", str(tmp_path), "--num_eval_problems", "32"]
    arguments += ["--per_device_train_batch_size", "16", "--save_strategy", "steps", "--save_steps", "2"]
    command = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(root / "recipes" / "accelerate" / f"{name}.yaml"),
    ]
    command += ["--main_process_port", str(free_port()), str(root / "recipes" / "grpo_sketch.py"), *arguments]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "right on 32 held-out problems" in done.stdout
    assert {path.name for path in (tmp_path / "checkpoint-2").glob("rng_state_*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    assert (tmp_path / "checkpoint-2" / "pytorch_model_fsdp.bin").exists() == (name == "fsdp2")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "qwen3"
