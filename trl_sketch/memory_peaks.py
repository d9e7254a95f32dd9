"""Peaks of GPU memory in training, of the policy update and of the whole loop."""

from typing import Any

import torch
from torch import nn


class PeakMemory:
    """Follows `torch.cuda.max_memory_allocated`, which it resets where an update begins and ends.

    The policy update goes from the first forward pass with gradients to the end of the optimizer step, KL probe included;
    the loop is everything, generation included. (RGC reports the same two.)

    Args:
        model: The model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._updates = 0  # the largest of the updates since the last log
        self._loop = 0
        self._is_updating = False
        torch.cuda.reset_peak_memory_stats()
        self._handle = model.register_forward_pre_hook(self._begin_update)

    def remove(self) -> None:
        self._handle.remove()

    def end_update(self) -> None:
        """Call it when the optimizer step is done."""
        self._updates = max(self._updates, self._read())
        self._is_updating = False

    def metrics(self) -> dict[str, int]:
        """Bytes: of the largest update since the last call, and of the loop from the start."""
        self._loop = max(self._loop, torch.cuda.max_memory_allocated())
        updates, self._updates = self._updates, 0
        return {"sketch/peak_update_bytes": updates, "sketch/peak_loop_bytes": self._loop}

    def _begin_update(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled() and not self._is_updating:
            self._read()
            self._is_updating = True

    def _read(self) -> int:
        """The peak since the last reading, in bytes."""
        peak = torch.cuda.max_memory_allocated()
        self._loop = max(self._loop, peak)
        torch.cuda.reset_peak_memory_stats()
        return peak
