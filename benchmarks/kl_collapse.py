"""Reward of the embedded task with and without KL control, at a usual update and at one ten times as large.

python benchmarks/kl_collapse.py    # four runs, about five minutes on two cores; writes docs/kl-collapse.png
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig

from trl_sketch import SketchConfig, SketchGRPOTrainer


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))
from embedded import WarmStart, exact_match, make_problems, warm_start_model  # noqa: E402


def rewards(output: str, steps: int, seed: int = 0, schedule: str = "linear", **config: Any) -> list[float]:
    """Reward of each step of the embedded default; `config` goes to `SketchConfig`."""
    trainer = SketchGRPOTrainer(
        model=warm_start_model(WarmStart(seed=seed)),
        reward_funcs=exact_match,
        args=GRPOConfig(
            output_dir=output,
            use_cpu=not torch.cuda.is_available(),
            seed=seed,
            bf16=True,
            model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"},
            max_steps=steps,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=10,
            lr_scheduler_type=schedule,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(make_problems("train", 8192, seed=seed)),
        peft_config=SketchConfig(rank=32, norm="matrix", **config),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(ROOT / "docs" / "kl-collapse.png"))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    control = {"kl_budget": 0.1, "kl_budget_final": 0.003, "kl_probe_responses": 16}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, update_ratio in zip(axes, (0.01, 0.1), strict=True):
        for label, settings in (("no control", {"kl_budget": None}), ("KL control", control)):
            with tempfile.TemporaryDirectory() as output:
                values = rewards(output, options.steps, options.seed, update_ratio=update_ratio, **settings)
            smooth = [
                sum(values[max(0, i - 9) : i + 1]) / len(values[max(0, i - 9) : i + 1]) for i in range(len(values))
            ]
            axis.plot(range(1, len(values) + 1), smooth, label=label, linewidth=2)
            print(
                f"update_ratio {update_ratio}, {label}: mean reward of the last 10 steps {smooth[-1]:.2f}", flush=True
            )
        axis.set(title=f"update_ratio = {update_ratio}", xlabel="optimizer step", ylim=(0, 1))
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, loc="lower right" if update_ratio == 0.01 else "center right")
    axes[0].set_ylabel("reward (mean of 10 steps)")
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120)


if __name__ == "__main__":
    main()
