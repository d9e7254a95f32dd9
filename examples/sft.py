"""Supervised fine-tuning from gradient sketches, with TRL's own `SFTTrainer`: a tiny model learns to sort eight digits.

No GPU, no download; about 10 seconds on one core.

    OMP_NUM_THREADS=1 python examples/sft.py
"""

import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from trl_sketch import SketchCallback, SketchConfig, SketchOptimizer, get_sketch_model


sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from embedded import WarmStart, make_model, make_problems, make_tokenizer  # noqa: E402  (a tiny Qwen3, and its task)


STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60

tokenizer = make_tokenizer()
model = make_model(tokenizer, WarmStart())
dataset = Dataset.from_list(make_problems("train", 32 * STEPS)).rename_column("answer", "completion")
args = SFTConfig(
    output_dir=tempfile.mkdtemp(prefix="sketch-sft-"),
    max_steps=STEPS,
    per_device_train_batch_size=32,
    learning_rate=5e-4,
    lr_scheduler_type="linear",
    max_grad_norm=0,  # the size of an update does not depend on the size of the sketch
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    logging_steps=max(1, STEPS // 15),
    save_strategy="no",
    report_to="none",
)

# The three lines that any trainer needs: sketches, their optimizer, and the callback between backward and step.
get_sketch_model(model, SketchConfig(kl_budget=None, rank=32))
optimizer = SketchOptimizer(model, lr=args.learning_rate)
trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer, optimizers=(optimizer, None))
trainer.add_callback(SketchCallback(trainer))

trainer.train()
trainer.save_model()

model.print_trainable_parameters()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {args.output_dir}")
