"""What is measured between the steps of a run, and takes no part in their time."""

from collections.abc import Callable
from typing import Any

import torch
from clock import Clock, add_to_log
from embedded import encode
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOTrainer


class Meter(TrainerCallback):
    """Measures something every so many optimizer steps, and adds it to the log with the next step that is logged.

    Args:
        trainer: Of the run.
        clock: Stands still while this measures.
        every: Steps between two measurements.
        measure: What is measured, by its name in the log.
        at_end: Measure behind the last step too.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        clock: Clock,
        every: int,
        measure: Callable[[], dict[str, float]],
        *,
        at_end: bool,
    ) -> None:
        self.clock, self.every, self.measure, self.at_end = clock, every, measure, at_end
        self._measured: dict[str, float] = {}
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(callbacks.index(clock) + 1, self)  # behind the end of a step's time, before those that report

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.every == 0 and (self.at_end or state.global_step < state.max_steps):
            with self.clock.stopped():
                self._measured = self.measure()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in (logs or {}):
            add_to_log(logs, state, self._measured)
            self._measured = {}


@torch.no_grad()
def rollout_gap(trainer: GRPOTrainer, prompts: list[Any]) -> dict[str, float]:
    """How far the trainer's log-probabilities are from those of a rollout engine with weights in bf16.

    The engine is a copy of the model with every parameter rounded to the nearest bf16, which computes in bf16, as vLLM does.
    It answers each prompt once at temperature 1, from a fixed seed, and both give the log-probabilities of its answers. Their
    kernels are the same, so what is seen is due to the weights, and to autocast, under which the trainer computes.

    Args:
        trainer: Of a model that keeps its own weights, not of an adapter; in one process.
        prompts: Texts or chats.

    Returns:
        `rollout_gap/mean` and `rollout_gap/max`: |log p of the trainer − log p of the engine| over the tokens, in nats.
    """
    model, tokenizer = trainer.model, trainer.processing_class
    prompt = encode(tokenizer, prompts).to(model.device)
    length = prompt["input_ids"].shape[1]
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(0)
        engine = AutoModelForCausalLM.from_config(  # draws weights, which are then overwritten
            model.config, dtype=torch.bfloat16, attn_implementation=model.config._attn_implementation
        )
        engine.load_state_dict(model.state_dict())
        engine.to(model.device).eval()
        tokens = engine.generate(
            **prompt,
            max_new_tokens=trainer.args.max_completion_length,
            generation_config=model.generation_config,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    end = tokens[:, length:] == tokenizer.eos_token_id
    is_completion = end.cumsum(1) - end.long() == 0  # up to the first end, and that one
    mask = torch.cat([prompt["attention_mask"], is_completion.long()], dim=1)
    was_training = model.training
    model.eval()
    with trainer.accelerator.autocast():
        ours = completion_log_probs(model, tokens, mask, length)
    model.train(was_training)
    gap = (ours - completion_log_probs(engine, tokens, mask, length)).abs()[is_completion]
    return {"rollout_gap/mean": gap.mean().item(), "rollout_gap/max": gap.max().item()}


def completion_log_probs(
    model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, length: int
) -> torch.Tensor:
    """Log-probabilities (rows, tokens − length) of what follows the first `length` tokens, in fp32."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    log_probs = log_softmax(logits[:, length - 1 : -1].float(), dim=-1)
    return log_probs.gather(2, tokens[:, length:, None]).squeeze(2)
