"""One response per prompt: advantages against a reward baseline that runs over the whole training (LoGRA, section 3.1).

GRPO compares a response with the others of its prompt, so TRL refuses `num_generations=1`. LoGRA compares it with a
running mean of all rewards instead. The setting belongs to GRPO and not to the sketch, LoRA and dense AdamW are compared
under it too, so its fields are in a `GRPOConfig` and not in `SketchConfig`.
"""

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from . import versions  # noqa: F401  refuses versions of TRL with other internals


ADVANTAGE_BASELINES = ("group", "running")
BASELINE_FILE = "reward_baseline.json"


class _One(int):
    """1, for which TRL's comparison `num_generations < 2` is false; its other checks see a 1."""

    def __lt__(self, other: Any) -> bool:
        return False


@dataclass
class SketchGRPOConfig(GRPOConfig):
    """[`trl.GRPOConfig`] that may ask for a running reward baseline, and with it for one response per prompt.

    Raises:
        ValueError: As `GRPOConfig`, and where a setting does not go together with `advantage_baseline`.
    """

    advantage_baseline: str = field(
        default="group",
        metadata={
            "help": "What a reward is compared with: group (the mean over the responses to the same prompt, as in GRPO) or "
            "running (a running mean of all rewards, as in LoGRA), which allows num_generations=1.",
            "choices": list(ADVANTAGE_BASELINES),
        },
    )
    baseline_weight: float = field(
        default=0.1, metadata={"help": "Weight of the newest batch in the running baseline."}
    )

    def __post_init__(self) -> None:
        if self.advantage_baseline not in ADVANTAGE_BASELINES:
            raise ValueError(
                f"advantage_baseline must be one of {', '.join(ADVANTAGE_BASELINES)}, got {self.advantage_baseline!r}"
            )
        if not 0 < self.baseline_weight <= 1:
            raise ValueError(f"baseline_weight must be in (0, 1], got {self.baseline_weight!r}")
        if self.advantage_baseline == "group":
            if self.num_generations == 1:
                raise ValueError(
                    "num_generations=1 leaves no other response of a prompt to compare with: set "
                    "advantage_baseline='running', or num_generations to at least 2"
                )
            super().__post_init__()
            return
        if self.scale_rewards not in ("none", "batch", False):
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} divides by the deviation within a prompt's responses, which "
                "advantage_baseline='running' does not look at: set scale_rewards='none' or 'batch'"
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} normalizes within a prompt's responses, "
                "which advantage_baseline='running' does not look at: set 'sum_then_normalize'"
            )
        if self.num_generations == 1:
            self.num_generations = _One(1)
        super().__post_init__()
        self.num_generations = int(self.num_generations or 0)


def running_advantages(
    rewards: torch.Tensor, baseline: float | None, *, weight: float, scale: bool = False
) -> tuple[torch.Tensor, float | None, float | None]:
    """Advantages of a batch against the mean reward of the batches before it.

    A response has no part in the baseline that it is compared with, so the gradient's mean stays what it is without one.
    The first batch has nothing before it, and is compared with its own mean.

    Args:
        rewards: `(N,)`, NaN where a response could not be scored.
        baseline: Of the batches before, `None` if there were none.
        weight: Of this batch in the next baseline.
        scale: Divide by the standard deviation of the batch's rewards.

    Returns:
        Advantages `(N,)`, 0 where the reward is NaN; the baseline they are taken against; the baseline of the next batch.
    """
    scored = rewards[~rewards.isnan()].double()
    if not len(scored):
        return torch.zeros_like(rewards), baseline, baseline
    mean = scored.mean().item()
    if baseline is None:
        baseline = mean
    advantages = rewards.double() - baseline
    if scale and len(scored) > 1:
        advantages = advantages / (scored.std() + 1e-4)  # as TRL
    advantages = advantages.nan_to_num(nan=0.0).to(rewards.dtype)
    return advantages, baseline, (1 - weight) * baseline + weight * mean


class BaselineGRPOTrainer(GRPOTrainer):
    """[`trl.GRPOTrainer`], which with `SketchGRPOConfig(advantage_baseline="running")` uses the running baseline.

    With any other arguments it is TRL's trainer.

    What it changes of TRL:
      * `_calculate_rewards` notes the rewards of all ranks, which are the same on all of them.
      * `_generate_and_score_completions` replaces the advantages, in the batch and in the table of completions, logs
        `sketch/reward_baseline`, and leaves out `frac_reward_zero_std`, which is 1 by definition for one response.
        Evaluation neither moves the baseline nor logs it.
      * `_save_rng_state` and `_load_optimizer_and_scheduler` keep the baseline in the checkpoint.
    """

    reward_baseline: float | None = None  # of all batches so far
    _scores: torch.Tensor

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._scores = super()._calculate_rewards(*args, **kwargs)
        return self._scores

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        args: Any = self.args
        model: Any = self.model
        table: Any = self._logs["advantages"]
        if getattr(args, "advantage_baseline", "group") != "running":
            return output
        mode = "train" if model.training else "eval"
        advantages, used, following = running_advantages(
            self._summed(self._scores),
            self.reward_baseline,
            weight=args.baseline_weight,
            scale=self.scale_rewards == "batch",
        )
        for _ in range(min(len(table), len(advantages))):
            table.pop()
        table.extend(advantages.tolist())
        if mode == "train":
            self.reward_baseline = following
            if used is not None:
                self._metrics[mode]["sketch/reward_baseline"].append(used)
        if self.num_generations == 1:
            self._metrics[mode].pop("frac_reward_zero_std", None)
        count = len(output["advantages"])
        start = self.accelerator.process_index * count
        output["advantages"] = advantages[start : start + count]
        return output

    def _summed(self, scores: torch.Tensor) -> torch.Tensor:
        """The weighted sum `(N,)` of what the reward functions gave `(N, functions)`; NaN where none gave anything."""
        total = (scores * self.reward_weights.to(scores.device)).nansum(dim=1)
        return total.masked_fill(scores.isnan().all(dim=1), torch.nan)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.reward_baseline is not None and self.args.should_save:
            with open(os.path.join(output_dir, BASELINE_FILE), "w") as file:
                json.dump({"reward_baseline": self.reward_baseline}, file)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self.reward_baseline = None
        path = os.path.join(checkpoint, BASELINE_FILE)
        if os.path.isfile(path):
            with open(path) as file:
                self.reward_baseline = json.load(file)["reward_baseline"]
