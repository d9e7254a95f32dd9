"""KL control inside a real GRPO run on a tiny random Qwen3."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from trl_sketch import SketchCallback, SketchConfig, SketchGRPOTrainer, SketchOptimizer, get_sketch_model, kl
from trl_sketch.model import sketch_state


PROMPTS = Dataset.from_dict({"prompt": ["abc", "bcad", "fgh", "kl", "m", "dd", "cab", "hi"] * 4})


def alphabet_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(ord(c) - ord("a") for c in text) / (10 * max(len(text), 1)) for text in completions]


def build(folder: str, output: Path, config: SketchConfig, model: Any = None, **settings: Any) -> SketchGRPOTrainer:
    arguments: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return SketchGRPOTrainer(
        model=folder if model is None else model,
        reward_funcs=alphabet_reward,
        args=GRPOConfig(**arguments | settings),
        train_dataset=PROMPTS,
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=config,
    )


def logged(trainer: SketchGRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_updates_meet_the_budget(policy_folder: str, tmp_path: Path) -> None:
    config = SketchConfig(rank=16, kl_budget=1e-4, kl_budget_final=1e-5, alpha_max=1e6, log_realized_kl=1)
    trainer = build(policy_folder, tmp_path, config, max_steps=4, gradient_accumulation_steps=2, temperature=0.8)
    trainer.train()
    budgets = [kl.kl_budget(u, start=1e-4, final=1e-5, steps=4) for u in (1, 2, 3, 4)]
    assert logged(trainer, "sketch/kl_budget") == pytest.approx(budgets)
    assert logged(trainer, "sketch/predicted_kl") == pytest.approx(budgets)
    assert logged(trainer, "sketch/realized_kl") == pytest.approx(budgets, rel=0.05)
    assert len(logged(trainer, "sketch/alpha")) == 4


def test_alpha_is_capped_and_part_of_the_logged_ratio(policy_folder: str, tmp_path: Path) -> None:
    config = SketchConfig(rank=16, update_ratio=1e-6, kl_budget=1e-2, alpha_max=2.0)
    trainer = build(policy_folder, tmp_path, config, max_steps=2)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert logged(trainer, "sketch/alpha") == [2.0, 2.0]
    assert logged(trainer, "sketch/update_ratio") == pytest.approx([2e-6, 2e-6], rel=1e-3)
    names = [f"{name}.weight" for name in sketch_state(trainer.model).layers]
    weights = dict(trainer.model.named_parameters())
    moved = torch.stack([(weights[n] - before[n]).norm() for n in names]).norm()
    whole = torch.stack([before[n].norm() for n in names]).norm()
    assert 1e-6 < moved / whole < 4.5e-6


def test_no_budget_no_probe(policy_folder: str, tmp_path: Path) -> None:
    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16, kl_budget=None))

    class Look(TrainerCallback):
        hooks: list[int] = []

        def on_step_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            self.hooks.append(len(model._forward_pre_hooks))

    trainer.add_callback(Look())
    trainer.train()
    assert Look.hooks == [0, 0, 0]
    assert logged(trainer, "sketch/update_ratio")
    assert not logged(trainer, "sketch/alpha")
    assert not logged(trainer, "sketch/kl_budget")


def test_same_updates_with_checkpointing_and_with_either_probe(policy_folder: str, tmp_path: Path) -> None:
    """What a probe sees does not depend on how the model is run, so α does not either."""
    alphas = []
    for settings in (
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"kl_probe": "finite_difference"},
    ):
        probe = settings.pop("kl_probe", "jvp")
        trainer = build(policy_folder, tmp_path, SketchConfig(rank=16, kl_probe=str(probe)), **settings)
        trainer.train()
        alphas.append(logged(trainer, "sketch/alpha")[0])
    assert alphas == pytest.approx([alphas[0]] * 4, rel=2e-3)


def test_a_predicted_kl_that_is_not_finite_stops_before_a_weight_moves(policy_folder: str, tmp_path: Path) -> None:
    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16))

    def poison(grad: torch.Tensor) -> None:
        trainer.model.lm_head.weight.data.fill_(torch.nan)

    def break_head(module: Any, args: Any, output: torch.Tensor) -> None:
        """The LM head breaks when backward has passed the last layer, before the probe."""
        if output.requires_grad:
            output.register_hook(poison)

    trainer.model.model.layers[0].register_forward_hook(break_head)
    weights = {n: p.clone() for n, p in trainer.model.named_parameters() if "proj" in n}
    with pytest.raises(FloatingPointError, match="predicted KL"):
        trainer.train()
    for name, weight in weights.items():
        assert torch.equal(weight, trainer.model.get_parameter(name)), name


class NoForwardMode(torch.autograd.Function):
    """Identity that has no forward-mode derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_auto_falls_back_once_and_says_why(
    policy_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16, alpha_max=1e6))
    trainer.model.model.layers[1].register_forward_hook(lambda module, args, output: NoForwardMode.apply(output))
    with caplog.at_level(logging.WARNING, logger="trl_sketch"):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if "finite_difference" in record.getMessage()]
    assert len(warnings) == 1
    budgets = [kl.kl_budget(u, start=2e-4, final=2e-5, steps=3) for u in (1, 2, 3)]
    assert logged(trainer, "sketch/predicted_kl") == pytest.approx(budgets)


def test_asking_for_jvp_where_it_does_not_work_is_an_error(policy_folder: str, tmp_path: Path) -> None:
    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16, kl_probe="jvp"))
    trainer.model.model.layers[1].register_forward_hook(lambda module, args, output: NoForwardMode.apply(output))
    with pytest.raises((NotImplementedError, RuntimeError), match="(?i)jvp|forward"):
        trainer.train()


def test_mismatch_is_averaged_once_per_rollout_and_narrows_the_budget(policy_folder: str, tmp_path: Path) -> None:
    config = SketchConfig(rank=16, kl_budget=1e-3, kl_schedule="constant", mismatch_floor=0.1, alpha_max=1e6)
    trainer = build(policy_folder, tmp_path, config, max_steps=4, steps_per_generation=2, max_completion_length=12)
    measured = iter([4e-4, 8e-4])

    def disagree(inputs: Any) -> Any:
        """The rollout's log-probabilities, as vLLM would report them, a known amount above the trainer's."""
        output = SketchGRPOTrainer._generate_and_score_completions(trainer, inputs)
        output["old_per_token_logps"] = torch.full_like(output["completion_ids"], -1.0, dtype=torch.float32)
        output["sampling_per_token_logps"] = output["old_per_token_logps"] + next(measured)
        output["completion_ids"][:, 3] = trainer.eos_token_ids[0]
        output["completion_mask"][:] = (torch.arange(output["completion_ids"].shape[1]) <= 3).int()
        return output

    trainer._generate_and_score_completions = disagree
    trainer.train()
    second = 0.7 * 4e-4 + 0.3 * 8e-4
    assert logged(trainer, "sketch/mismatch") == pytest.approx([4e-4, 4e-4, second, second], rel=1e-3)
    budgets = [1e-3 - 4e-4, 1e-3 - 4e-4, 1e-3 - second, 1e-3 - second]
    assert logged(trainer, "sketch/kl_budget") == pytest.approx(budgets, rel=1e-3)
    assert trainer.optimizer.optimizer.state_dict()["param_groups"][0]["sketch"]["mismatch"] == pytest.approx(
        second, rel=1e-3
    )


def test_truncated_sampling_with_vllm_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    args = GRPOConfig(use_cpu=True, top_p=0.9, report_to="none")
    args.use_vllm = True
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = SketchOptimizer(get_sketch_model(model, SketchConfig(rank=2)))
    with caplog.at_level(logging.WARNING, logger="trl_sketch"):
        SketchCallback().on_train_begin(args, None, None, optimizer=optimizer, model=model)  # type: ignore[arg-type]
    assert "top_p=0.9" in caplog.text


@pytest.mark.parametrize(
    ("update_ratio", "said"), [(0.05, "less than a tenth of its size"), (1e-7, "enlarged by alpha_max"), (3e-4, None)]
)
def test_a_budget_that_does_not_suit_is_said_once(
    policy_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, update_ratio: float, said: str | None
) -> None:
    config = SketchConfig(rank=16, update_ratio=update_ratio, kl_budget=1e-5, kl_schedule="constant")
    trainer = build(policy_folder, tmp_path, config, max_steps=22, logging_steps=5)
    with caplog.at_level(logging.WARNING, logger="trl_sketch"):
        trainer.train()
    assert len([r for r in caplog.records if said is not None and said in r.getMessage()]) == (said is not None)
    if said is None:
        assert caplog.records == []


def test_training_again_starts_the_schedule_again(policy_folder: str, tmp_path: Path) -> None:
    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16), max_steps=3)
    trainer.train()
    first = logged(trainer, "sketch/kl_budget")
    trainer.train()
    assert logged(trainer, "sketch/kl_budget")[-3:] == first == sorted(first, reverse=True)


def test_a_training_that_an_error_ended_leaves_nothing_behind(policy_folder: str, tmp_path: Path) -> None:
    calls = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the judge is away")
        return [0.5] * len(completions) if len(calls) > 2 else alphabet_reward(completions)

    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16), logging_steps=2, max_steps=4)
    trainer.reward_funcs[0] = reward
    with pytest.raises(OSError, match="the judge"):
        trainer.train()
    trainer.train()
    assert not trainer.model._forward_pre_hooks
    assert logged(trainer, "grad_norm") == [0.0, 0.0]  # nothing of the first training, and no gradient in the second


def test_a_model_that_cannot_be_probed_is_named(policy_folder: str, tmp_path: Path) -> None:
    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16))
    trainer.model.lm_head.register_forward_hook(lambda module, args, output: output.flip(-1))
    with pytest.raises(NotImplementedError, match="does not work on Qwen3ForCausalLM.*Set kl_budget=None"):
        trainer.train()


def test_a_method_is_not_settled_by_a_step_without_responses(
    policy_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All responses of the first step are cut off and masked; the fallback is found at the first step that has some."""
    trainer = build(policy_folder, tmp_path, SketchConfig(rank=16), max_steps=3, mask_truncated_completions=True)
    trainer.model.model.layers[1].register_forward_hook(lambda module, args, output: NoForwardMode.apply(output))
    original, calls = trainer._generate_and_score_completions, []

    def generate(inputs: Any) -> Any:
        output = original(inputs)
        output["completion_mask"][:] = 1 if calls else 0
        calls.append(1)
        return output

    trainer._generate_and_score_completions = generate
    with caplog.at_level(logging.WARNING, logger="trl_sketch"):
        trainer.train()
    assert logged(trainer, "sketch/predicted_kl")[0] == 0
    assert sum("finite_difference" in record.getMessage() for record in caplog.records) == 1
