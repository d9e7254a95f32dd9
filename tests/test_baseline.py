"""One response per prompt against a running reward baseline: the numbers, the trainers, checkpoints and evaluation."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

from trl_sketch import SketchConfig, SketchGRPOConfig, SketchGRPOTrainer
from trl_sketch.baseline import BaselineGRPOTrainer, running_advantages


PROMPTS = Dataset.from_dict({"prompt": ["abc", "bcad", "fgh", "kl", "m", "dd", "cab", "hi"] * 4})
RUNNING = {"num_generations": 1, "advantage_baseline": "running", "scale_rewards": "none"}


def alphabet_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(ord(c) - ord("a") for c in text) / (10 * max(len(text), 1)) for text in completions]


def only_even_lengths(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0 if len(text) % 2 == 0 else None for text in completions]


@pytest.fixture
def make(policy_folder: str, tmp_path: Path) -> Callable[..., Any]:
    """`make(cls, reward_funcs=…, eval_dataset=…, **settings)`; it notes the rewards and advantages of each rollout."""

    def build(
        cls: type[GRPOTrainer] = SketchGRPOTrainer,
        reward_funcs: Any = alphabet_reward,
        eval_dataset: Any = None,
        **settings: Any,
    ) -> Any:
        class Watched(cls):  # type: ignore[misc, valid-type]
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                output = super()._generate_and_score_completions(inputs)
                summed = self._summed(self._scores) if isinstance(self, BaselineGRPOTrainer) else None
                self.seen.append((self.model.training, summed, output["advantages"]))
                return output

        defaults = {
            "output_dir": str(tmp_path / "out"),
            "use_cpu": True,
            "bf16": False,
            "max_steps": 3,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        trainer = Watched(
            model=policy_folder,
            reward_funcs=reward_funcs,
            args=SketchGRPOConfig(**defaults | RUNNING | settings),
            train_dataset=PROMPTS,
            eval_dataset=eval_dataset,
            processing_class=AutoTokenizer.from_pretrained(policy_folder),
            **({"peft_config": SketchConfig(kl_budget=None, rank=8)} if issubclass(cls, SketchGRPOTrainer) else {}),
        )
        trainer.seen = []
        return trainer

    return build


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def slow_advantages(
    batches: list[list[float]], weight: float, scale: bool = False
) -> tuple[list[list[float]], list[float | None]]:
    """Advantages and baselines of a whole run, a response at a time."""
    baseline, advantages, baselines = None, [], []
    for batch in batches:
        scored = [reward for reward in batch if not math.isnan(reward)]
        mean = sum(scored) / len(scored) if scored else None
        if baseline is None:
            baseline = mean
        baselines.append(baseline)
        divisor = 1.0
        if scale and len(scored) > 1:
            divisor = math.sqrt(sum((r - mean) ** 2 for r in scored) / (len(scored) - 1)) + 1e-4
        advantages.append([0.0 if math.isnan(reward) else (reward - baseline) / divisor for reward in batch])
        if mean is not None:
            baseline = (1 - weight) * baseline + weight * mean
    return advantages, baselines


@pytest.mark.parametrize("scale", [False, True])
def test_advantages_are_those_of_the_slow_reference(scale: bool) -> None:
    nan = math.nan
    batches = [[nan, nan], [1.0, 0.0, 0.0, nan], [1.0, 1.0], [nan], [0.25, 0.5, 0.75, 0.0, 1.0], [0.5]]
    expected, baselines = slow_advantages(batches, 0.1, scale)
    baseline = None
    for batch, advantages, compared_with in zip(batches, expected, baselines, strict=True):
        ours, used, baseline = running_advantages(torch.tensor(batch), baseline, weight=0.1, scale=scale)
        torch.testing.assert_close(ours, torch.tensor(advantages))
        assert used == (compared_with if compared_with is None else pytest.approx(compared_with, rel=1e-12))


def test_the_numbers_of_three_batches_by_hand() -> None:
    ours, used, baseline = running_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), None, weight=0.1)
    assert (ours.tolist(), used, baseline) == ([0.75, -0.25, -0.25, -0.25], 0.25, 0.25)
    ours, used, baseline = running_advantages(torch.tensor([1.0, 1.0]), baseline, weight=0.1)
    assert (ours.tolist(), used) == ([0.75, 0.75], 0.25) and baseline == pytest.approx(0.325)
    ours, used, _ = running_advantages(torch.tensor([0.0, 1.0]), baseline, weight=0.1)
    assert ours.tolist() == pytest.approx([-0.325, 0.675]) and used == pytest.approx(0.325)


@pytest.mark.parametrize("cls", [SketchGRPOTrainer, BaselineGRPOTrainer])
def test_a_run_with_one_response_per_prompt(make: Callable[..., Any], cls: type[GRPOTrainer]) -> None:
    trainer = make(cls, baseline_weight=0.3, log_completions=False)
    trainer.train()
    rewards = [summed.tolist() for _, summed, _ in trainer.seen]
    assert [len(batch) for batch in rewards] == [6, 6, 6]  # odd microbatches: TRL would want an even batch
    advantages, baselines = slow_advantages(rewards, 0.3)
    for (_, _, ours), expected in zip(trainer.seen, advantages, strict=True):
        torch.testing.assert_close(ours.cpu(), torch.tensor(expected))
    assert logged(trainer, "sketch/reward_baseline") == pytest.approx(baselines)
    assert logged(trainer, "reward") == pytest.approx([sum(batch) / 6 for batch in rewards])
    assert logged(trainer, "frac_reward_zero_std") == []
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages[-1])
    assert trainer.num_generations == 1 and type(trainer.num_generations) is int


def test_several_reward_functions_and_unscorable_responses(make: Callable[..., Any]) -> None:
    both = make(reward_funcs=[alphabet_reward, only_even_lengths], reward_weights=[1.0, 0.5], scale_rewards="batch")
    both.train()
    last = zip(*(both._logs["rewards"][name] for name in ("alphabet_reward", "only_even_lengths")), strict=True)
    by_hand = [a + (0.0 if math.isnan(b) else 0.5 * b) for a, b in last]
    assert both.seen[-1][1].tolist() == pytest.approx(by_hand)
    advantages, baselines = slow_advantages([summed.tolist() for _, summed, _ in both.seen], 0.1, scale=True)
    assert logged(both, "sketch/reward_baseline") == pytest.approx(baselines)
    torch.testing.assert_close(both.seen[-1][2], torch.tensor(advantages[-1]))

    one = make(reward_funcs=only_even_lengths)
    one.train()
    unscorable = torch.cat([summed for _, summed, _ in one.seen]).isnan()
    assert unscorable.any() and not unscorable.all()
    assert not torch.cat([ours for _, _, ours in one.seen])[unscorable].any()
    assert all(math.isfinite(loss) for loss in logged(one, "loss"))


def test_several_responses_per_prompt_may_use_it_too(make: Callable[..., Any]) -> None:
    trainer = make(num_generations=3)
    trainer.train()
    advantages, _ = slow_advantages([summed.tolist() for _, summed, _ in trainer.seen], 0.1)
    torch.testing.assert_close(trainer.seen[-1][2], torch.tensor(advantages[-1]))


def test_evaluation_leaves_the_baseline_alone(make: Callable[..., Any]) -> None:
    evaluation = PROMPTS.select(range(4))
    plain = make()
    plain.train()
    evaluated = make(
        eval_dataset=evaluation, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2, eval_on_start=True
    )
    evaluated.train()
    assert evaluated.seen[0][0] is False  # before there was any baseline
    assert len(logged(evaluated, "eval_reward")) == 4
    training = [summed.tolist() for is_training, summed, _ in evaluated.seen if is_training]
    _, baselines = slow_advantages(training, 0.1)
    assert logged(evaluated, "sketch/reward_baseline") == pytest.approx(baselines)
    assert "eval_sketch/reward_baseline" not in {name for entry in evaluated.state.log_history for name in entry}


def test_a_resumed_run_has_the_same_bits(make: Callable[..., Any], tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    whole = make(**settings)
    whole.train()
    for step in (1, 2):  # within a rollout, and between two
        resumed = make(**settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
        assert logged(resumed, "sketch/reward_baseline") == logged(whole, "sketch/reward_baseline")
        assert resumed.reward_baseline == whole.reward_baseline
        for name, weight in whole.model.named_parameters():
            assert torch.equal(weight, resumed.model.get_parameter(name)), name


def test_without_it_the_trainer_is_trls(make: Callable[..., Any]) -> None:
    settings = {"num_generations": 3, "advantage_baseline": "group", "scale_rewards": "group"}
    ours, trls = make(BaselineGRPOTrainer, **settings), make(GRPOTrainer, **settings)
    for trainer in (ours, trls):
        set_seed(trainer.args.seed)
        trainer.train()
    assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(ours.seen, trls.seen, strict=True))
    assert logged(ours, "sketch/reward_baseline") == [] and len(logged(ours, "frac_reward_zero_std")) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "set advantage_baseline='running'"),
        ({"advantage_baseline": "mean"}, "advantage_baseline must be one of group, running, got 'mean'"),
        ({"advantage_baseline": "running"}, "set scale_rewards='none' or 'batch'"),
        (RUNNING | {"baseline_weight": 0.0}, r"baseline_weight must be in \(0, 1\]"),
        (RUNNING | {"multi_objective_aggregation": "normalize_then_sum"}, "set 'sum_then_normalize'"),
        (RUNNING | {"num_generations": 3, "per_device_train_batch_size": 4}, "must be divisible by num_generations"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        SketchGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_trl_still_refuses_one_generation(tmp_path: Path) -> None:
    """If this fails, TRL has learned it: `SketchGRPOConfig.__post_init__` can go."""
    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=1)


def test_the_settings_survive_a_round_trip(tmp_path: Path) -> None:
    config = SketchGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **RUNNING)
    assert type(config.num_generations) is int
    values = config.to_dict()
    assert (values["num_generations"], values["advantage_baseline"], values["baseline_weight"]) == (1, "running", 0.1)
