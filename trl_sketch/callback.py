"""`SketchCallback`: the work between the last backward of an optimizer step and `optimizer.step()`, and its metrics."""

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import distributed, kl
from .memory_peaks import PeakMemory
from .optimizer import SketchOptimizer
from .probe import InputRecorder, Inputs


logger = logging.getLogger(__name__)

_JUDGED_STEPS = 10


class SketchCallback(TrainerCallback):
    """Proposes the update, clips, scales it to the KL budget, and adds `sketch/*` and `grad_norm` to the trainer's log.

    [`SketchGRPOTrainer`] adds it by itself. Other trainers take it beside a [`SketchOptimizer`]:

    ```python
    model = get_sketch_model(model, SketchConfig(rank=64, kl_budget=None))
    trainer = SFTTrainer(model, args=args, optimizers=(SketchOptimizer(model, lr=args.learning_rate), None), ...)
    trainer.add_callback(SketchCallback(trainer))
    ```

    Args:
        trainer: The trainer it is added to. Given, the callback moves in front of those that report to W&B and others,
            so that they see its metrics as well; without it the metrics appear only in the progress bar and in
            `state.log_history`.

    Raises:
        ValueError: The trainer runs in a way that sketches are not trained in, as DeepSpeed or FSDP1.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        if trainer is not None:
            distributed.check_engine(trainer)
            distributed.prepare_engine(trainer)
        self.trainer = trainer
        self._recorder: InputRecorder | None = None
        self._peaks: PeakMemory | None = None
        self._method: str | None = None  # of the KL probe, once it is known what works
        self._forget()

    def _forget(self) -> None:
        """Start afresh: also after a training that an error has ended."""
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        if self._peaks is not None:
            self._peaks.remove()
            self._peaks = None
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._before: tuple[list[Inputs], list[torch.Tensor]] | None = None  # an update whose KL is to be measured
        self._measured_rollout: Any = None
        self._first_alphas: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = self._optimizer(kwargs)
        optimizer.zero_grad()  # as the trainer does with dense gradients
        self._forget()
        self._measured_rollout = getattr(self.trainer, "_buffered_inputs", None)  # in κ already, when a run is resumed
        config = optimizer.config
        shared = {
            "the temperature, the schedule or max_steps": distributed.crc(
                [
                    getattr(args, n, None)
                    for n in ("temperature", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs")
                ]
            )
        }
        distributed.check_agreement(shared, optimizer.sketches.device)
        if self.trainer is not None:
            callbacks = self.trainer.callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)
        if optimizer.sketches.device.type == "cuda":
            self._peaks = PeakMemory(kwargs["model"])
        if config.kl_budget is not None:
            self._recorder = InputRecorder(kwargs["model"], config.kl_probe_responses)
            truncated = {name: getattr(args, name, None) for name in ("top_p", "top_k", "min_p")}
            if config.mismatch_subtraction and _truncates(truncated) and getattr(args, "use_vllm", False):
                logger.warning(
                    "mismatch_subtraction compares log-probabilities of truncated sampling (%s) with the trainer's, which "
                    "are not truncated: the measured mismatch is too large. Set mismatch_subtraction=False.",
                    ", ".join(f"{name}={value}" for name, value in truncated.items()),
                )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._forget()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = self._optimizer(kwargs)
        try:
            optimizer.propose(max_grad_norm=args.max_grad_norm)
            assert optimizer.grad_norm is not None and optimizer.update_ratio is not None
            alpha = 1.0 if self._recorder is None else self._scale(optimizer, args, state, kwargs["model"])
        except FloatingPointError as error:  # on every rank, or on none
            if not optimizer.config.skip_nonfinite_steps:
                raise
            logger.warning("Step %d is skipped: %s", state.global_step + 1, error)
            optimizer.skip()
            self._before = None
            if self._recorder is not None:
                self._recorder.take()
        else:
            self._metrics["grad_norm"].append(optimizer.grad_norm.item())
            self._metrics["sketch/update_ratio"].append(alpha * optimizer.update_ratio.item())

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._peaks is not None:
            self._peaks.end_update()
        if self._before is not None:
            batches, states = self._before
            self._before = None
            config = self._optimizer(kwargs).config
            realized = kl.realized_kl(
                kwargs["model"],
                batches,
                states,
                temperature=getattr(args, "temperature", 1.0),
                max_tokens=config.kl_probe_max_tokens,
            )
            self._metrics["sketch/realized_kl"].append(realized)

    def _scale(
        self, optimizer: SketchOptimizer, args: TrainingArguments, state: TrainerState, model: PreTrainedModel
    ) -> float:
        """Scale the proposal to the KL budget; returns α."""
        assert self._recorder is not None
        if not self._recorder.saw_forward:
            raise RuntimeError(
                "kl_budget needs the inputs of the model's forward, and none were seen (they must be passed by name): set "
                "kl_budget=None to train without KL control"
            )
        config = optimizer.config
        assert config.kl_budget is not None and config.kl_budget_final is not None
        batches = kl.even_batches(self._recorder.take(), model)
        q = self._predict(optimizer, args, model, batches)
        step = state.global_step + 1
        budget = kl.kl_budget(
            step,
            start=config.kl_budget,
            final=config.kl_budget_final,
            steps=config.kl_schedule_steps or state.max_steps,
            schedule=config.kl_schedule,
        )
        if config.mismatch_subtraction and self._update_mismatch(optimizer):
            budget = kl.effective_budget(budget, optimizer.mismatch, config.mismatch_floor)
        alpha = kl.step_scale(q, budget, config.alpha_max)
        optimizer.scale(alpha)
        self._metrics["sketch/kl_budget"].append(budget)
        self._metrics["sketch/predicted_kl"].append(alpha**2 * q)
        if q > 0:
            self._metrics["sketch/alpha"].append(alpha)
            self._judge(alpha, config.alpha_max)
        if config.log_realized_kl and step % config.log_realized_kl == 0:
            self._before = batches, kl.reference_states(model, batches, max_tokens=config.kl_probe_max_tokens)
        return alpha

    def _judge(self, alpha: float, alpha_max: float) -> None:
        """Say once, early in a run, that the budget and the size of the updates do not go together."""
        self._first_alphas.append(alpha)
        if len(self._first_alphas) != _JUDGED_STEPS:
            return
        if max(self._first_alphas) < 0.1:
            logger.warning(
                "The KL budget has held each of the first %d updates to less than a tenth of its size (sketch/alpha at most "
                "%.3f). That is right for an update that is far too large; if the run learns too slowly, raise kl_budget, or "
                "set kl_budget=None to train without control.",
                _JUDGED_STEPS,
                max(self._first_alphas),
            )
        elif min(self._first_alphas) >= alpha_max > 1:
            logger.warning(
                "Each of the first %d updates was enlarged by alpha_max=%s and stayed below the KL budget: the updates are "
                "small. If the run learns too slowly, raise learning_rate (or update_ratio).",
                _JUDGED_STEPS,
                alpha_max,
            )

    def _predict(
        self, optimizer: SketchOptimizer, args: TrainingArguments, model: PreTrainedModel, batches: list[Inputs]
    ) -> float:
        """q of the proposal, by the method that is asked for, or that the model supports."""
        arguments: dict[str, Any] = {
            "temperature": getattr(args, "temperature", 1.0),
            "max_tokens": optimizer.config.kl_probe_max_tokens,
            "autocast_dtype": torch.bfloat16 if self._computes_in_bf16(args) else None,
        }
        if self._method is not None:
            return kl.predicted_kl(model, batches, method=self._method, **arguments)
        methods = {"auto": ["jvp", "finite_difference"]}.get(optimizer.config.kl_probe, [optimizer.config.kl_probe])
        for method in methods:
            try:
                if batches:
                    kl.check_head(model, batches[0])
                q = kl.predicted_kl(model, batches, method=method, **arguments)
            except (torch.OutOfMemoryError, torch.distributed.DistError, FloatingPointError):
                raise
            except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
                if method == methods[-1]:
                    raise NotImplementedError(
                        f"KL control by {method} does not work on {type(model).__name__}: {error}. Set kl_budget=None to "
                        "train without it"
                    ) from error
                logger.warning(
                    "KL probe: finite_difference in fp32, because jvp does not work on this model: %s", error
                )
                continue
            if batches:  # else nothing has been tried
                self._method = method
            break
        return q

    def _computes_in_bf16(self, args: TrainingArguments) -> bool:
        return args.bf16 or (self.trainer is not None and self.trainer.accelerator.mixed_precision == "bf16")

    def _update_mismatch(self, optimizer: SketchOptimizer) -> bool:
        """Average a new measurement into κ, once per rollout; returns whether there is a κ."""
        rollout = getattr(self.trainer, "_buffered_inputs", None)
        if rollout is not None and rollout is not self._measured_rollout:
            self._measured_rollout = rollout
            measured = kl.measure_mismatch(rollout, getattr(self.trainer, "eos_token_ids", []))
            if measured is not None:
                weight = optimizer.config.mismatch_ema if optimizer.mismatch is not None else 1.0
                optimizer.mismatch = (1 - weight) * (optimizer.mismatch or 0.0) + weight * measured
        if optimizer.mismatch is None:
            return False
        self._metrics["sketch/mismatch"].append(optimizer.mismatch)
        return True

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
        rollout: Any = getattr(self.trainer, "vllm_generation", None)
        if rollout is not None:
            self._metrics |= rollout.metrics
            rollout.metrics = {}
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        optimizer = self._optimizer(kwargs)
        if optimizer.config.skip_nonfinite_steps:
            means["sketch/skipped_steps"] = optimizer.skipped_steps
        means["sketch/state_bytes"] = optimizer.state_bytes
        if self._peaks is not None:
            means |= self._peaks.metrics()
        for log in (logs, state.log_history[-1]):  # the second is filled from the first before callbacks see it
            log.pop("grad_norm", None)  # the trainer's own is that of no gradients
            log.update(means)

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


def _truncates(sampling: dict[str, Any]) -> bool:
    top_p, top_k, min_p = sampling["top_p"], sampling["top_k"], sampling["min_p"]
    return bool(
        (top_p is not None and top_p < 1) or (top_k is not None and top_k > 0) or (min_p is not None and min_p > 0)
    )
