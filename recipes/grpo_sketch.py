"""GRPO that trains all attention and MLP weights from low-rank gradient sketches.

```bash
python recipes/grpo_sketch.py                                        # the embedded default: no GPU, no hub
python recipes/grpo_sketch.py --rank 8 --update_ratio 0.02           # any field from the command line
python recipes/grpo_sketch.py --config recipes/embedded/sketch.yaml  # or from YAML
accelerate launch recipes/grpo_sketch.py --model_name_or_path Qwen/Qwen3-1.7B-Base --dataset_name problems.parquet \
    --rewards math --rank 256 --output_dir out
```

`grpo_lora.py` and `grpo_dense.py` are the same script for LoRA and for dense AdamW.
"""

from common import parse_arguments, prepare, run
from report import report

from trl_sketch import SketchConfig, SketchGRPOTrainer


def main() -> None:
    script, training, sketch = parse_arguments("sketch.yaml", SketchConfig)
    job = prepare(script, training)
    trainer = SketchGRPOTrainer(
        model=job.model,
        reward_funcs=job.rewards,
        args=training,
        train_dataset=job.train,
        peft_config=sketch,
    )
    result = run(trainer, job)
    report("sketch", sketch, sketch.rank, trainer, job, result)


if __name__ == "__main__":
    main()
