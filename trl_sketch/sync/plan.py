"""Where a checkpoint tensor lies in vLLM's parameters, found by watching vLLM's own loader.

`model.load_weights` is called with a meta tensor under a dispatch mode that records the destination and the source of every
copy and copies nothing. So there are no tables of names: fused q/k/v and gate/up, tied heads, transposed layouts and the
shards of tensor parallelism come out as what they are, boxes of the checkpoint tensor that are views of a parameter.
Whatever is not a plain copy into a parameter (a cast first, a re-packing, a temporary) is noticed, and named.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Parameter:
    """What the trainer has: a parameter's checkpoint name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Box:
    """A box of a checkpoint tensor, and where it lies.

    Attributes:
        target: View of one of the model's parameters, of the box's shape, with the checkpoint's order of dimensions.
        start: Index of the box's first element in the checkpoint tensor.
    """

    target: torch.Tensor = field(repr=False)
    start: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The box's shape."""
        return tuple(self.target.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box of `tensor`, which has the checkpoint tensor's shape; a view."""
        return tensor[tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))]


@dataclass
class Plan:
    """The boxes of every parameter that this worker holds, and what cannot be written in place, with the reason."""

    boxes: dict[str, list[Box]]
    refused: dict[str, str]

    def uncovered(self, parameters: Iterable[Parameter]) -> dict[str, int]:
        """Elements of each parameter that no box has (on a worker without parallelism there must be none)."""
        missing = {
            p.name: math.prod(p.shape) - sum(box.target.numel() for box in self.boxes[p.name])
            for p in parameters
            if p.name not in self.refused
        }
        return {name: count for name, count in missing.items() if count}


def record_plan(model: nn.Module, parameters: Iterable[Parameter]) -> Plan:
    """Record where the loader of `model` puts each of `parameters`. No weight is changed.

    A parameter of which this worker holds nothing (another pipeline stage has it) gets an empty list of boxes.

    Args:
        model: A model as vLLM builds it, with a method `load_weights` that takes (name, tensor) pairs.
        parameters: The trainer's, each name once (tied weights under one name, as `named_parameters()` gives them).
    """
    held: list[tuple[Any, str, torch.Tensor]] = [
        (holder, name, tensor)
        for module in model.modules()
        for holder in (module._parameters, module._buffers)
        for name, tensor in holder.items()
        if tensor is not None
    ]
    storages = {tensor.untyped_storage().data_ptr() for _, _, tensor in held if not tensor.is_meta}
    unsuitable, repacked = _unsuitable(model), _repacked(model)
    plan = Plan({}, {})
    try:
        for parameter in parameters:
            boxes, reason = _record(model, parameter, storages) if unsuitable is None else ([], unsuitable)
            if reason is None and _overlap(boxes):
                reason = "the loader writes some of its elements twice"
            if reason is None:
                found = [repacked.get(box.target.untyped_storage().data_ptr()) for box in boxes]
                reason = next((text for text in found if text is not None), None)
            plan.boxes[parameter.name] = [] if reason else boxes
            if reason:
                plan.refused[parameter.name] = reason
    finally:
        for holder, name, tensor in held:  # a loader may put in the meta tensor itself; then nothing of it is covered
            holder[name] = tensor
    return plan


class _Recorder(TorchDispatchMode):
    """Records each copy from the meta tensor `source` to memory, and copies nothing."""

    def __init__(self, source: torch.Tensor, storages: set[int]) -> None:
        super().__init__()
        self.source = source.untyped_storage()._cdata
        self.storages = storages
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.problem: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to_memory = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_meta
        if to_memory and func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if not source.is_meta:
                self.problem = "the loader copies something else than the checkpoint's tensor"
            elif source.untyped_storage()._cdata != self.source:
                self.problem = "the loader computes something from the checkpoint's tensor before it copies it"
            elif target.shape != source.shape:
                self.problem = "the loader broadcasts the checkpoint's tensor"
            elif target.untyped_storage().data_ptr() not in self.storages:
                self.problem = "the loader copies to a temporary tensor, not to a parameter"
            else:
                self.copies.append((target, source))
            return target
        if to_memory and func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            return args[0]  # padding
        return func(*args, **(kwargs or {}))


def _record(model: nn.Module, parameter: Parameter, storages: set[int]) -> tuple[list[Box], str | None]:
    source = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    load_weights: Any = model.load_weights
    try:
        with torch.no_grad(), _Recorder(source, storages) as recorder:
            load_weights([(parameter.name, source)])
    except Exception as error:  # whatever a model's loader may raise
        return [], f"the loader does not take it: {type(error).__name__}: {error}"
    if recorder.problem is not None:
        return [], recorder.problem
    boxes = [_box(target, view, parameter.shape) for target, view in recorder.copies]
    if None in boxes:
        return [], "the loader reshapes it"
    return [box for box in boxes if box is not None], None


def _box(target: torch.Tensor, view: torch.Tensor, shape: tuple[int, ...]) -> Box | None:
    """The box of a contiguous tensor of `shape` that `view` is, and `target` in its order of dimensions."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = tuple(view.storage_offset() // stride % size for stride, size in zip(strides, shape, strict=True))
    order: list[int] = []  # of the dimensions of the view that are longer than one, those of the whole tensor
    long = [dim for dim in range(view.ndim) if view.shape[dim] > 1]
    for dim in long:
        same = [d for d, s in enumerate(strides) if s == view.stride(dim) and shape[d] > 1 and d not in order]
        if not same or start[same[0]] + view.shape[dim] > shape[same[0]]:
            return None
        order.append(same[0])
    sizes = [1] * len(shape)
    for dim, whole in zip(long, order, strict=True):
        sizes[whole] = view.shape[dim]
    by_whole = sorted(range(len(long)), key=lambda i: order[i])
    target = target.squeeze().permute(by_whole) if long else target.reshape(())
    for dim, size in enumerate(sizes):
        if size == 1:
            target = target.unsqueeze(dim)
    return Box(target.detach(), start)


def _overlap(boxes: list[Box]) -> bool:
    return any(
        all(a.start[d] < b.start[d] + b.shape[d] and b.start[d] < a.start[d] + a.shape[d] for d in range(len(a.start)))
        for a, b in itertools.combinations(boxes, 2)
    )


def _unsuitable(model: nn.Module) -> str | None:
    """Why no weight of this model may be changed in place: it computes with copies that loading makes."""
    for name, module in model.named_modules():
        if type(module).__name__.startswith("MLA"):
            return f"{name} is multi-head latent attention, which keeps matrices computed from the weights"
        packed = getattr(module, "cpu_linear", None)
        if packed is not None and packed is not nn.functional.linear:
            return f"the model computes with packed copies of its weights, as of {name} (vLLM's CPU build does)"
    return None


def _repacked(model: nn.Module) -> dict[int, str]:
    """Storages that may not be changed in place, because their layer re-packs them after loading, with the reason."""
    result = {}
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
            for parameter in module.parameters(recurse=False):
                result[parameter.untyped_storage().data_ptr()] = f"{name} may re-pack it after loading ({method})"
    return result
