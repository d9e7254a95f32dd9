"""vLLM in the trainer's process: one copy of the weights where that is possible, one batched copy where it is not."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .plan import Box, Parameter, Plan, record_plan
from .receiver import why_no_updates


def vllm_model(llm: Any) -> nn.Module:
    """The model inside a `vllm.LLM` that runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`, as TRL sets it).

    Raises:
        ValueError: The model is in another process.
    """
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    if worker is None:
        raise ValueError("vLLM's model is in another process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM starts")
    return getattr(worker, "worker", worker).model_runner.model


class ColocatedWeights:
    """The trainer's parameters and where they lie in a vLLM model of this process.

    Args:
        model: vLLM's, from [`vllm_model`].
        parameters: The trainer's by checkpoint name, each once (as `named_parameters()` gives them).
        whole: Whether `model` is the whole model and not a shard.

    Attributes:
        refused: Names that cannot be written in place, with the reason: they need vLLM's own loading at each sync.
        shared: Names that [`share`] made views of vLLM's storage.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, whole: bool = True) -> None:
        self.parameters = dict(parameters)
        described = [Parameter(name, tuple(p.shape), p.dtype) for name, p in self.parameters.items()]
        self.plan: Plan = record_plan(model, described)
        if whole:
            for name, count in self.plan.uncovered(described).items():
                self.plan.refused[name] = f"the loader leaves out {count} of its elements"
        self.shared: list[str] = []

    @property
    def refused(self) -> dict[str, str]:
        """Names that cannot be written in place, with the reason."""
        return self.plan.refused

    def why_not_shared(self) -> dict[str, str]:
        """The names that [`share`] would leave as they are, with the reason."""
        reasons = {name: _why_not(p, self.plan.boxes[name]) for name, p in self.parameters.items()}
        return self.refused | {n: r for n, r in reasons.items() if r is not None and n not in self.refused}

    @torch.no_grad()
    def share(self) -> list[str]:
        """Make the trainer's parameters views of vLLM's storage, with the trainer's values, where that is possible.

        A shared parameter's `data` lies in vLLM's weight from now on: an update of one is an update of both. The others
        are for [`copy`].

        Returns:
            The names that are shared.
        """
        kept = self.why_not_shared()
        for name, parameter in self.parameters.items():
            if name not in kept:
                target = self.plan.boxes[name][0].target
                if target.data_ptr() != parameter.data_ptr():
                    target.copy_(parameter)
                    parameter.data = target
        self.shared = [name for name in self.parameters if name not in kept]
        return self.shared

    def unsketchable(self, names: Iterable[str]) -> dict[str, str]:
        """Those of `names` that updates would not keep equal, with the reason."""
        described = [Parameter(n, tuple(self.parameters[n].shape), self.parameters[n].dtype) for n in names]
        reasons = {p.name: why_no_updates(p, self.plan) for p in described}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @torch.no_grad()
    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole parameter into vLLM's weights."""
        for box in self.plan.boxes[name]:
            box.target.copy_(box.of(tensor))

    @torch.no_grad()
    def copy(self, names: Iterable[str] | None = None) -> list[str]:
        """Write the trainer's values into vLLM's weights in one pass, except for those that are shared.

        Args:
            names: Of these parameters, default all.

        Returns:
            The names that were written.
        """
        kept = set(self.shared) | set(self.refused)
        written = [name for name in (self.parameters if names is None else names) if name not in kept]
        pairs = [(box.target, box.of(self.parameters[name])) for name in written for box in self.plan.boxes[name]]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
        return written


def _why_not(parameter: nn.Parameter, boxes: list[Box]) -> str | None:
    if type(parameter.data) is not torch.Tensor:
        return f"it is a {type(parameter.data).__name__} in the trainer"
    if len(boxes) != 1 or boxes[0].shape != tuple(parameter.shape):
        return "vLLM holds it in parts"
    target = boxes[0].target
    if target.dtype != parameter.dtype or target.device != parameter.device:
        return f"it is {parameter.dtype} on {parameter.device} in the trainer and {target.dtype} on {target.device} in vLLM"
    if target.is_inference() or not target.is_contiguous():
        return "vLLM holds it in another layout"
    return None
