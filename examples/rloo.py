"""RLOO from gradient sketches, with TRL's own `RLOOTrainer`: a tiny model learns to answer with sevens.

No GPU, no download; about 10 seconds on one core.

    OMP_NUM_THREADS=1 python examples/rloo.py
"""

import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer

from trl_sketch import SketchCallback, SketchConfig, SketchOptimizer, get_sketch_model


sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from embedded import WarmStart, make_model, make_problems, make_tokenizer  # noqa: E402  (a tiny Qwen3)


STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


def sevens(completions, **kwargs):
    """The share of sevens among the eight tokens that a completion may have."""
    return [text.count("7") / 8 for text in completions]


tokenizer = make_tokenizer()
model = make_model(tokenizer, WarmStart())
dataset = Dataset.from_list(make_problems("train", 256)).select_columns("prompt")
args = RLOOConfig(
    output_dir=tempfile.mkdtemp(prefix="sketch-rloo-"),
    max_steps=STEPS,
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=8,
    learning_rate=3e-4,
    lr_scheduler_type="constant",
    beta=0.0,  # no reference model
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    logging_steps=max(1, STEPS // 10),
    save_strategy="no",
    report_to="none",
)

# The three lines that any trainer needs: sketches, their optimizer, and the callback between backward and step.
get_sketch_model(model, SketchConfig(kl_budget=None, rank=32))
optimizer = SketchOptimizer(model, lr=args.learning_rate)
trainer = RLOOTrainer(model, sevens, args, dataset, processing_class=tokenizer, optimizers=(optimizer, None))
trainer.add_callback(SketchCallback(trainer))

trainer.train()
trainer.save_model()

model.print_trainable_parameters()
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; the model is in {args.output_dir}")
