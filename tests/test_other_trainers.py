"""Sketched layers, `SketchOptimizer` and `SketchCallback` in TRL's own `SFTTrainer` and `RLOOTrainer`."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback, set_seed
from trl import RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from trl_sketch import SketchCallback, SketchConfig, SketchOptimizer, get_sketch_model
from trl_sketch.model import sketch_state


EXAMPLES = Path(__file__).parents[1] / "examples"
TEXTS = Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"] * 8, "completion": ["abab", "cdcd", "efef", "ghgh"] * 8})
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Watcher(TrainerCallback):
    """Keeps what a reporting callback is given, the norm of the sketches after each step, and whether a `.grad` is set."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.norms: list[float] = []
        self.keys: list[list[int]] = []
        self.has_grad = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.has_grad |= any(parameter.grad is not None for parameter in model.parameters())
        self.keys.append(sketch_state(model).keys.tolist())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.norms.append(sketch_state(model).flat.norm().item())


@pytest.fixture
def policy(policy_folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)


@pytest.fixture
def sft(policy_folder: str, tmp_path: Path) -> Callable[..., SFTTrainer]:
    """`sft(model, optimizer, learning_rate=…)`: an SFTTrainer, without a SketchCallback."""

    def build(model: PreTrainedModel, optimizer: Any, callbacks: Any = None, **settings: Any) -> SFTTrainer:
        return SFTTrainer(
            model,
            SFTConfig(str(tmp_path / "sft"), **SETTINGS | settings),
            train_dataset=TEXTS,
            eval_dataset=TEXTS.select(range(4)),
            processing_class=AutoTokenizer.from_pretrained(policy_folder),
            optimizers=(optimizer, None),
            callbacks=callbacks,
        )

    return build


def letter_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [text.count("h") / 4 for text in completions]


@pytest.fixture
def rloo(policy_folder: str, tmp_path: Path) -> Callable[..., RLOOTrainer]:
    """`rloo(model, optimizer, learning_rate=…)`: an RLOOTrainer, without a SketchCallback."""

    def build(model: PreTrainedModel, optimizer: Any, **settings: Any) -> RLOOTrainer:
        settings = {"num_generations": 4, "max_completion_length": 4} | settings
        return RLOOTrainer(
            model,
            letter_reward,
            RLOOConfig(str(tmp_path / "rloo"), **SETTINGS | settings),
            Dataset.from_dict({"prompt": ["abc", "bcad", "fgh", "kl"] * 8}),
            processing_class=AutoTokenizer.from_pretrained(policy_folder),
            optimizers=(optimizer, None),
        )

    return build


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ------------------------------------------------------------------------------------------------ SFTTrainer


def test_sft_learns_and_moves_the_selected_weights_only(sft: Callable[..., SFTTrainer], policy: Any) -> None:
    get_sketch_model(policy, SketchConfig(kl_budget=None, rank=8))
    watcher = Watcher()
    trainer = sft(
        policy,
        SketchOptimizer(policy, lr=2e-3),
        callbacks=[watcher],
        max_steps=15,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=5,
    )
    trainer.add_callback(SketchCallback(trainer))
    before = weights(policy)
    trainer.train()

    losses = logged(trainer, "loss")
    assert losses[0] > 2.5
    assert losses[-1] < 0.5 * losses[0]
    assert logged(trainer, "eval_loss")[-1] < logged(trainer, "eval_loss")[0]
    changed = differing(before, weights(policy))
    assert sorted(changed) == sorted(f"{name}.weight" for name in sketch_state(policy).layers)
    assert watcher.norms == [0] * 15
    assert not watcher.has_grad
    assert len({key for keys in watcher.keys for key in keys}) == 15 * len(watcher.keys[0])
    steps = [logs for logs in watcher.logs if "loss" in logs]
    assert len(steps) == 15
    assert all(logs["grad_norm"] > 0 and logs["sketch/update_ratio"] > 0 for logs in steps)
    assert [logs["grad_norm"] for logs in steps] == logged(trainer, "grad_norm")


@pytest.mark.parametrize("checkpointing", [{}, {"use_reentrant": True}, None])
def test_sft_with_full_rank_sketches_is_dense_sgd(
    sft: Callable[..., SFTTrainer], policy: Any, policy_folder: str, checkpointing: dict[str, Any] | None
) -> None:
    settings = {
        "max_steps": 1,
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.1,
        "learning_rate": 1.0,
        "gradient_checkpointing": checkpointing is not None,
        "gradient_checkpointing_kwargs": checkpointing,
    }
    dense = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    before = weights(dense)
    get_sketch_model(policy, SketchConfig(kl_budget=None, rank=64, update_rule="sgd", norm="none"))
    names = [f"{name}.weight" for name in sketch_state(policy).layers]
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_(name in names)
    dense.enable_input_require_grads()
    sgd = torch.optim.SGD([dense.get_parameter(name) for name in names], lr=1.0)

    ours, theirs = sft(policy, SketchOptimizer(policy, lr=1.0), **settings), sft(dense, sgd, **settings)
    ours.add_callback(SketchCallback(ours))
    for trainer in (ours, theirs):
        set_seed(0)
        trainer.train()
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-5)
    assert logged(ours, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=1e-3)
    assert logged(ours, "grad_norm")[0] > 0.1, "clipping has something to do"
    for name in names:
        step = policy.get_parameter(name).detach() - before[name]
        dense_step = dense.get_parameter(name).detach() - before[name]
        assert (step - dense_step).norm() < 0.015 * dense_step.norm(), name


def test_sft_in_bf16_saves_an_ordinary_checkpoint(
    sft: Callable[..., SFTTrainer], policy_folder: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.bfloat16)
    get_sketch_model(model, SketchConfig(kl_budget=None, rank=8))
    trainer = sft(model, SketchOptimizer(model, lr=1e-3), max_steps=3, bf16=True, save_strategy="steps", save_steps=3)
    trainer.add_callback(SketchCallback(trainer))
    before = weights(model)
    trainer.train()
    changed = differing(before, weights(model))
    assert len(changed) == len(sketch_state(model).layers)
    checkpoint = tmp_path / "sft" / "checkpoint-3"
    assert SketchConfig.from_pretrained(checkpoint) == SketchConfig(kl_budget=None, rank=8)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert loaded.dtype == torch.bfloat16
    assert differing(weights(loaded), weights(model)) == []
    ids = torch.randint(3, 16, (2, 7))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loaded(ids).logits.float(), model.eval()(ids).logits.float())


def test_callback_without_its_trainer_still_fills_the_history(sft: Callable[..., SFTTrainer], policy: Any) -> None:
    get_sketch_model(policy, SketchConfig(kl_budget=None, rank=8))
    trainer = sft(policy, SketchOptimizer(policy, lr=1e-3), callbacks=[SketchCallback()], max_steps=2)
    trainer.train()
    assert min(logged(trainer, "grad_norm")) > 0
    assert len(logged(trainer, "sketch/update_ratio")) == 2


def test_optimizer_alone_trains_as_with_the_callback(
    sft: Callable[..., SFTTrainer], policy: Any, policy_folder: str
) -> None:
    """Where no size depends on the sketch's, the callback adds the metrics and nothing else."""
    other = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    results = []
    for model, with_callback in ((policy, True), (other, False)):
        get_sketch_model(model, SketchConfig(kl_budget=None, rank=8))
        trainer = sft(model, SketchOptimizer(model, lr=1e-3), max_steps=2)
        if with_callback:
            trainer.add_callback(SketchCallback(trainer))
        set_seed(0)
        trainer.train()
        results.append(weights(model))
    assert differing(*results) == []


@pytest.mark.parametrize("case", ["passed", "default", "default, sketched model"])
def test_callback_refuses_a_foreign_optimizer(sft: Callable[..., SFTTrainer], policy: Any, case: str) -> None:
    """One that was passed, or TRL's default AdamW because `optimizers` was forgotten."""
    if "sketched" in case:
        get_sketch_model(policy, SketchConfig(kl_budget=None, rank=8))
    trainer = sft(policy, torch.optim.AdamW(policy.parameters(), lr=1e-3) if case == "passed" else None, max_steps=1)
    trainer.add_callback(SketchCallback(trainer))
    before = weights(policy)
    with pytest.raises(TypeError, match=r"AdamW.*optimizers=\(SketchOptimizer\(model"):
        trainer.train()
    assert differing(before, weights(policy)) == []


# ------------------------------------------------------------------------------------------------ RLOOTrainer


def test_rloo_learns(rloo: Callable[..., RLOOTrainer], policy: Any) -> None:
    get_sketch_model(policy, SketchConfig(kl_budget=None, rank=8))
    optimizer = SketchOptimizer(policy, lr=2e-3)
    trainer = rloo(
        policy,
        optimizer,
        max_steps=15,
        per_device_train_batch_size=32,
        num_generations=8,
        beta=0.0,
        learning_rate=2e-3,
    )
    trainer.add_callback(SketchCallback(trainer))
    before = weights(policy)
    set_seed(0)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert rewards[0] < 0.15
    assert sum(rewards[-3:]) / 3 > 0.6
    assert len(logged(trainer, "sketch/update_ratio")) == 15
    changed = differing(before, weights(policy))
    assert sorted(changed) == sorted(f"{name}.weight" for name in sketch_state(policy).layers)


def test_rloo_with_a_reference_model(rloo: Callable[..., RLOOTrainer], policy: Any) -> None:
    get_sketch_model(policy, SketchConfig(kl_budget=None, rank=8))
    initial = weights(policy)
    watcher = Watcher()
    trainer = rloo(
        policy,
        SketchOptimizer(policy, lr=1e-3),
        max_steps=3,
        beta=0.05,
        gradient_accumulation_steps=3,
        steps_per_generation=2,
        num_iterations=2,
    )
    trainer.add_callback(watcher)
    trainer.add_callback(SketchCallback(trainer))
    trainer.train()
    assert differing(initial, weights(trainer.ref_model)) == []
    assert len(differing(initial, weights(policy))) == len(sketch_state(policy).layers)
    assert logged(trainer, "kl")[0] == 0
    assert logged(trainer, "kl")[-1] != 0  # RLOO's is the mean log-ratio of the samples, of either sign
    assert watcher.norms == [0, 0, 0]
    assert not watcher.has_grad
    assert all("sketch/update_ratio" in logs for logs in watcher.logs if "loss" in logs)


# ------------------------------------------------------------------------------------------------ examples


def run_example(name: str, steps: int, folder: Path) -> str:
    """Run an example as a user does, in its own process; return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    command = [sys.executable, str(EXAMPLES / name), str(steps)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_sft_example(tmp_path: Path) -> None:
    output = run_example("sft.py", 20, tmp_path)
    found = re.search(r"loss (\S+) -> (\S+); the model is in (\S+)", output)
    assert found, output[-1000:]
    assert float(found[2]) < 0.5 * float(found[1])
    assert AutoModelForCausalLM.from_pretrained(found[3]).config.model_type == "qwen3"
    assert "sketch/update_ratio" in output


def test_rloo_example(tmp_path: Path) -> None:
    output = run_example("rloo.py", 8, tmp_path)
    found = re.search(r"reward (\S+) -> (\S+); the model is in (\S+)", output)
    assert found, output[-1000:]
    assert float(found[1]) < 0.2
    assert float(found[2]) > float(found[1]) + 0.3
    assert AutoModelForCausalLM.from_pretrained(found[3]).config.model_type == "qwen3"
    assert "sketch/update_ratio" in output
