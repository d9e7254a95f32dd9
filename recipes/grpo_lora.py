"""GRPO with a LoRA adapter, to compare with `grpo_sketch.py`: the same script but for the lines that name the method.

The trainer is TRL's, with a running reward baseline where that is asked for (`--advantage_baseline running`).

```bash
python recipes/grpo_lora.py                 # the embedded default: no GPU, no hub
python recipes/grpo_lora.py --lora_r 32     # any field from the command line, or from YAML (--config FILE)
```
"""

from dataclasses import dataclass, field

from common import parse_arguments, prepare, run
from peft import LoraConfig
from report import report

from trl_sketch.baseline import BaselineGRPOTrainer


@dataclass
class LoraArguments:
    """The adapter, under TRL's names."""

    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapter is scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of the adapter's input."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the layers to adapt. Default: every linear layer but the LM head."},
    )

    def peft_config(self) -> LoraConfig:
        targets = self.lora_target_modules
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
        )


def main() -> None:
    script, training, lora = parse_arguments("lora.yaml", LoraArguments)
    job = prepare(script, training)
    trainer = BaselineGRPOTrainer(
        model=job.model,
        reward_funcs=job.rewards,
        args=training,
        train_dataset=job.train,
        peft_config=lora.peft_config(),
    )
    result = run(trainer, job)
    report("lora", lora, lora.lora_r, trainer, job, result)


if __name__ == "__main__":
    main()
