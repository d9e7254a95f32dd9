"""The package's reward functions, under the recipes' names; `REWARDS` has the names that `--rewards` takes."""

from trl_sketch.rewards import (
    REWARDS,
    exact_match,
    find_last_number,
    last_number,
    math_reward,
    reasoning_gym,
    reasoning_gym_number,
)


__all__ = [
    "REWARDS",
    "exact_match",
    "find_last_number",
    "last_number",
    "math_reward",
    "reasoning_gym",
    "reasoning_gym_number",
]
