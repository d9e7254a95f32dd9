"""What KL control is for: an update that is ten times too large, on the embedded default."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from embedded import WarmStart, exact_match, make_problems, warm_start_model
from trl import GRPOConfig

from trl_sketch import SketchConfig, SketchGRPOTrainer


def rewards(output: Path, steps: int, **config: Any) -> list[float]:
    trainer = SketchGRPOTrainer(
        model=warm_start_model(WarmStart(seed=0)),
        reward_funcs=exact_match,
        args=GRPOConfig(
            output_dir=str(output),
            use_cpu=True,
            bf16=True,
            model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"},
            max_steps=steps,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=10,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(make_problems("train", 1024, seed=0)),
        peft_config=SketchConfig(rank=32, norm="matrix", update_ratio=0.1, **config),
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


@pytest.mark.slow
def test_a_step_ten_times_too_large_collapses_without_control_and_learns_with_it(tmp_path: Path) -> None:
    free = rewards(tmp_path / "free", 30, kl_budget=None)
    controlled = rewards(
        tmp_path / "controlled", 60, kl_budget=0.1, kl_budget_final=0.02, kl_schedule="cosine", kl_probe_responses=16
    )
    assert sum(controlled[:3]) / 3 < 0.4  # the warm start: 0.27
    assert sum(free[-10:]) / 10 < 0.05
    assert sum(controlled[-10:]) / 10 > 0.5
