"""What the tests of checkpoints and of crashes share."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer
from trl import GRPOConfig

from trl_sketch import SketchConfig, SketchGRPOTrainer


PROMPTS = Dataset.from_dict({"prompt": ["abc", "bcad", "fgh", "kl", "m", "dd", "cab", "hi"] * 4})


def alphabet_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(ord(c) - ord("a") for c in text) / (10 * max(len(text), 1)) for text in completions]


def build(
    policy: str,
    output: Path,
    cls: type[SketchGRPOTrainer] = SketchGRPOTrainer,
    config: SketchConfig | None = None,
    model: Any = None,
    eval_dataset: Any = None,
    **changes: Any,
) -> SketchGRPOTrainer:
    """A trainer that saves a checkpoint after each of its four steps; `changes` go to GRPOConfig."""
    settings = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 4,
        "save_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return cls(
        model=policy if model is None else model,
        reward_funcs=alphabet_reward,
        args=GRPOConfig(**settings | changes),
        train_dataset=PROMPTS,
        eval_dataset=eval_dataset,
        processing_class=AutoTokenizer.from_pretrained(policy),
        peft_config=config or SketchConfig(kl_budget=None, rank=8),
    )


def checkpoints(output: Path) -> list[Path]:
    """The folders that a resume may take, oldest first."""
    return sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def contents(checkpoint: Path) -> dict[str, Any]:
    """All that training goes on from. It cannot be read from a checkpoint that is not whole."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    metrics = ["step", "loss", "reward", "grad_norm", "learning_rate", "sketch/alpha", "sketch/update_ratio"]
    return {
        "weights": load_file(checkpoint / "model.safetensors"),
        "optimizer": torch.load(checkpoint / "optimizer.pt"),
        "scheduler": torch.load(checkpoint / "scheduler.pt"),
        "rollout": [torch.load(path) for path in checkpoint.glob("rollout_*.pt")],
        "random": torch.load(checkpoint / "rng_state.pth", weights_only=False),
        "step": state["global_step"],
        "log": [{name: entry.get(name) for name in metrics} for entry in state["log_history"]],
        "config": json.loads((checkpoint / "sketch_config.json").read_text()),
    }


def difference(first: Any, second: Any, place: str = "") -> str | None:
    """Where two nested values first differ, in any bit."""
    if isinstance(first, (torch.Tensor, np.ndarray)):
        same = torch.equal(torch.as_tensor(first), torch.as_tensor(second))
        return None if same else place
    if isinstance(first, (list, tuple)):
        first, second = dict(enumerate(first)), dict(enumerate(second))
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return f"keys of {place}"
        places = (difference(first[key], second[key], f"{place}/{key}") for key in first)
        return next((found for found in places if found is not None), None)
    return None if first == second else place
