"""GRPO with dense AdamW on every weight, to compare with `grpo_sketch.py`: the same script but for the method's lines.

The trainer is TRL's, with a running reward baseline where that is asked for (`--advantage_baseline running`).

```bash
python recipes/grpo_dense.py                         # the embedded default: no GPU, no hub
python recipes/grpo_dense.py --learning_rate 1e-4    # any field from the command line, or from YAML (--config FILE)
```
"""

from common import parse_arguments, prepare, run
from report import report

from trl_sketch.baseline import BaselineGRPOTrainer


COMPARED_RANK = 32  # of the sketch and of LoRA in the table of bytes; dense AdamW has no rank


def main() -> None:
    script, training = parse_arguments("dense.yaml")
    job = prepare(script, training)
    trainer = BaselineGRPOTrainer(
        model=job.model,
        reward_funcs=job.rewards,
        args=training,
        train_dataset=job.train,
    )
    result = run(trainer, job)
    trains = "every weight, embeddings, norms and LM head included, in fp32 (the table counts the matrices only)"
    report("dense", COMPARED_RANK, trains, trainer, job, result, script.plot_file)


if __name__ == "__main__":
    main()
