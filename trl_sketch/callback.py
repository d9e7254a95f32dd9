"""`SketchCallback`: the work between the last backward of an optimizer step and `optimizer.step()`, and its metrics."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .optimizer import SketchOptimizer


class SketchCallback(TrainerCallback):
    """Proposes the update, clips, and adds `sketch/*` and `grad_norm` to the trainer's log.

    [`SketchGRPOTrainer`] adds it by itself. Other trainers take it beside a [`SketchOptimizer`]:

    ```python
    model = get_sketch_model(model, SketchConfig(rank=64))
    trainer = SFTTrainer(model, args=args, optimizers=(SketchOptimizer(model, lr=args.learning_rate), None), ...)
    trainer.add_callback(SketchCallback(trainer))
    ```

    Args:
        trainer: The trainer it is added to. Given, the callback moves in front of those that report to W&B and others,
            so that they see its metrics as well; without it the metrics appear only in the progress bar and in
            `state.log_history`.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        self.trainer = trainer
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._optimizer(kwargs)
        if self.trainer is not None:
            callbacks = self.trainer.callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = self._optimizer(kwargs)
        optimizer.propose(max_grad_norm=args.max_grad_norm)
        assert optimizer.grad_norm is not None and optimizer.update_ratio is not None
        self._metrics["grad_norm"].append(optimizer.grad_norm.item())
        self._metrics["sketch/update_ratio"].append(optimizer.update_ratio.item())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:  # the log of an evaluation, or of the end of training
            return
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        logs.update(means)
        state.log_history[-1].update(means)  # filled from `logs` before callbacks see it

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and checkpoint.is_dir():
            self._optimizer(kwargs).config.save_pretrained(checkpoint)

    @staticmethod
    def _optimizer(kwargs: dict[str, Any]) -> SketchOptimizer:
        """The `SketchOptimizer` inside accelerate's wrapper."""
        optimizer = kwargs.get("optimizer")
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inner, SketchOptimizer):
            raise TypeError(
                f"SketchCallback needs a SketchOptimizer, the trainer has a {type(inner).__name__}: pass "
                "optimizers=(SketchOptimizer(model, lr=args.learning_rate), None) to the trainer"
            )
        return inner
