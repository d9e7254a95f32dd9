"""`Clock`: where the time of a training step goes, and how much memory it takes."""

import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from trl_sketch import SketchOptimizer


_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Clock(TrainerCallback):
    """Adds to the trainer's log, for LoRA and dense AdamW as for the sketch:

    * `seconds` since training began, those before a resumption included;
    * `time/rollout` (generation and rewards), `time/sync` (weights to vLLM) and `time/update` (all the rest of a step: forward,
      backward, optimizer), in seconds a step, the mean of those since the last entry;
    * `memory/allocated`, the largest peak since the last entry in bytes: of the CUDA allocator, else of the process.

    It overrides nothing of the trainer: it stands around `_generate_and_score_completions` and vLLM's `sync_weights`.

    Attributes:
        seconds: That training took so far.
        memory: Part → bytes of its tensors on this rank: `weights`, `adapter`, `gradient`, `optimizer`, and for a sketch what
            `SketchOptimizer.state_tensors` names. Taken behind the first optimizer step.
        peaks: Peak of each step.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.device = trainer.args.device
        self.seconds = 0.0
        self.memory: dict[str, int] = {}
        self.peaks: list[int] = []
        self._spent: dict[str, float] = defaultdict(float)  # in the step that goes on
        self._steps: list[dict[str, float]] = []  # since the last log
        trainer._generate_and_score_completions = self._timed("rollout", trainer._generate_and_score_completions)
        if trainer.use_vllm:
            trainer.vllm_generation.sync_weights = self._timed("sync", trainer.vllm_generation.sync_weights)
        trainer.callback_handler.callbacks.insert(0, self)  # before those that report to W&B and others

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._spent[part] += self._now() - start
                self._peak = max(self._peak, peak_bytes(self.device))

        return timed

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done within the block, between two steps, takes no time."""
        start = self._now()
        try:
            yield
        finally:
            self._begin += self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._before = next((log["seconds"] for log in reversed(state.log_history) if "seconds" in log), 0.0)
        self._begin = self._now()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._spent.clear()
        self._peak = 0
        reset_peak(self.device)
        self._step_begin = self._now()

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        # Here too, because a SketchCallback takes CUDA's peaks of the update, and has them begin anew.
        self._peak = max(self._peak, peak_bytes(self.device))

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        if not self.memory:
            self.memory = memory_parts(model, getattr(optimizer, "optimizer", optimizer))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = self._now()
        self.seconds = self._before + now - self._begin
        sync = self._spent["sync"]
        rollout = self._spent["rollout"] - sync  # which is within it
        update = now - self._step_begin - rollout - sync
        peak = max(self._peak, peak_bytes(self.device))
        self.peaks.append(peak)
        self._steps.append(
            {"time/rollout": rollout, "time/update": update, "time/sync": sync, "memory/allocated": peak}
        )

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if not self._steps or "loss" not in (logs or {}):
            return
        steps, self._steps = self._steps, []
        entry = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        entry["memory/allocated"] = max(step["memory/allocated"] for step in steps)
        entry["seconds"] = self.seconds
        add_to_log(logs, state, entry)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.seconds = self._before + self._now() - self._begin


def add_to_log(logs: dict[str, float], state: TrainerState, entry: dict[str, float]) -> None:
    """Add to what is logged; the history is filled from it before callbacks see it."""
    logs.update(entry)
    state.log_history[-1].update(entry)


def memory_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Part → bytes of the tensors that training keeps; a storage counts once, and a sharded one as its own share."""
    adapter = [p for name, p in model.named_parameters() if ".lora_" in name]
    ours = {id(p) for p in adapter}
    parts = {
        "weights": [*(p for p in model.parameters() if id(p) not in ours), *model.buffers()],
        "adapter": adapter,
        "gradient": [p.grad for p in model.parameters() if p.grad is not None],
    }
    if isinstance(optimizer, SketchOptimizer):
        parts |= optimizer.state_tensors()
    else:
        parts["optimizer"] = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for part, tensors in parts.items():
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                sizes[part] = sizes.get(part, 0) + storage.nbytes()
    return sizes


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` begin anew, where that is possible."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Most bytes since `reset_peak`: of the CUDA allocator; of the process where training is on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        lines = _STATUS.read_text().splitlines()
        found = next((line for line in lines if line.startswith("VmHWM:")), None)
        if found:
            return int(found.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
