"""GRPO with dense AdamW, to compare with `grpo_sketch.py`: the same script but for the lines that name the method.

The trainer is TRL's, with a running reward baseline where that is asked for (`--advantage_baseline running`).

```bash
python recipes/grpo_dense.py                         # the embedded default: no GPU, no hub
python recipes/grpo_dense.py --learning_rate 1e-4    # any field from the command line, or from YAML (--config FILE)
python recipes/grpo_dense.py --dense_target_modules all-linear    # only the matrices that a sketch trains
```
"""

from dataclasses import dataclass, field

from common import parse_arguments, prepare, run
from report import report
from torch import nn

from trl_sketch import SketchConfig
from trl_sketch.baseline import BaselineGRPOTrainer
from trl_sketch.model import select_layers


COMPARED_RANK = 32  # of the sketch and of LoRA in the table of bytes; dense AdamW has no rank


@dataclass
class DenseArguments:
    """What is trained."""

    dense_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the linear layers whose weight matrices are all that is trained, or all-linear: those of "
            "attention and MLP, as a sketch trains them. Default: every weight of the model."
        },
    )

    def freeze_the_rest(self, model: nn.Module) -> None:
        """Freeze all but the matrices that a sketch with these `target_modules` trains, if any are named."""
        targets = self.dense_target_modules
        if targets is None:
            return
        layers = select_layers(model, SketchConfig(target_modules=None if targets == ["all-linear"] else targets))
        chosen = [layer.weight for _, layer in layers]
        model.requires_grad_(False)
        for weight in chosen:
            weight.requires_grad_(True)


def main() -> None:
    script, training, dense = parse_arguments("dense.yaml", DenseArguments)
    job = prepare(script, training)
    trainer = BaselineGRPOTrainer(
        model=job.model,
        reward_funcs=job.rewards,
        args=training,
        train_dataset=job.train,
    )
    dense.freeze_the_rest(trainer.model)
    result = run(trainer, job)
    report("dense", dense, COMPARED_RANK, trainer, job, result)


if __name__ == "__main__":
    main()
