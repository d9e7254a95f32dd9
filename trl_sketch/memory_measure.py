"""Measure the memory of one training step: without weights and without a GPU (`FakeTensorMode`), or on a CUDA device.

The step is the real one: the model of transformers, the layers, the optimizer and the KL probe of this package, PEFT's
LoRA or torch's AdamW, TRL's fused LM head. It is the second microbatch of an optimizer step: the gradients of the first are
there. Without a GPU only shapes are computed, on fake CPU tensors (backward on fake CUDA tensors aborts where torch was
built without CUDA), and three things stand in for what a GPU would run:

* attention is a flash kernel: it keeps q, k, v, its output and a log-sum-exp per head and query;
* the tiles of TRL's LM head are folded by kernels that allocate nothing, and summed in fp32 in place;
* a number that the code reads from a tensor is 1, or the last position of a sequence.

Every storage counts, from its first appearance to its end, rounded up to 512 bytes as CUDA's caching allocator does. What an
operation allocates inside is not seen.
"""

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from . import kl, weights
from .config import SketchConfig
from .memory import ALIGNMENT, PROBE_RESPONSES, Plan
from .memory_models import meta_model
from .model import get_sketch_model, sketch_state
from .optimizer import SketchOptimizer


_ATTENTION = "sketch_memory"
_SKETCHED = ("sketch", "rgc")


# ---------------------------------------------------------------------- counting


@dataclass(frozen=True)
class Measurement:
    """What a step took.

    Attributes:
        phases: Phase → peak in bytes: `forward`, `head`, `backward`, `propose`, `probe`, `update`.
        parts: Phase → part → bytes at that peak; empty on CUDA, where only totals are known.
        left: Part → bytes that are alive after the step; empty on CUDA.
    """

    phases: dict[str, int]
    parts: dict[str, dict[str, int]]
    left: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])


class _Meter(Protocol):
    def enter(self, phase: str) -> None: ...

    def assign(self, tensor: torch.Tensor, part: str) -> None: ...


class StorageTracker(TorchDispatchMode):
    """Follows the bytes of all storages that appear while it is active.

    Args:
        last_position: What an integer that is read from a tensor shall be.
        alignment: Every storage is rounded up to a multiple of so many bytes.

    Attributes:
        current: Bytes that are alive.
        parts: The same by part; a storage belongs to the phase that it appeared in, until it is given a part.
        peaks: Phase → largest `current` while it lasted, and the parts at that moment.
    """

    def __init__(self, last_position: int = 1, alignment: int = ALIGNMENT) -> None:
        super().__init__()
        self.last_position, self.alignment = last_position, alignment
        self.phase = "setup"
        self.current = 0
        self.parts: Counter[str] = Counter()
        self.peaks: dict[str, tuple[int, dict[str, int]]] = {}
        self._live: dict[int, tuple[int, str]] = {}

    def enter(self, phase: str) -> None:
        """What appears from now on belongs to `phase`."""
        self.phase = phase
        self._look()

    def assign(self, tensor: torch.Tensor, part: str) -> None:
        """The storage of `tensor` belongs to `part`."""
        self._see(tensor)
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            size, before = self._live[key]
            self._live[key] = size, part
            self.parts[before] -= size
            self.parts[part] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._without_data(func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    @staticmethod
    def _is_fake(tensor: Any) -> bool:
        return isinstance(tensor, torch._subclasses.FakeTensor)

    def _without_data(self, func: Any, args: Any) -> Any:
        """The result of an operation that depends on data, where there is none; `None` for all others."""
        if not args or not self._is_fake(args[0]):
            return None
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else self.last_position
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.long)
        if func is torch.ops.aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            mask = args[1][0]
            return args[0].new_empty(mask.numel(), *args[0].shape[mask.ndim :])
        return None

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // self.alignment) * self.alignment
        if key in self._live or size == 0:
            return
        self._live[key] = size, self.phase
        self.current += size
        self.parts[self.phase] += size
        weakref.finalize(storage, self._free, key)
        self._look()

    def _look(self) -> None:
        if self.current > self.peaks.get(self.phase, (-1, {}))[0]:
            self.peaks[self.phase] = self.current, {part: size for part, size in self.parts.items() if size}

    def _free(self, key: int) -> None:
        size, part = self._live.pop(key)
        self.current -= size
        self.parts[part] -= size


class _CudaMeter:
    """Peaks of a CUDA device, as its caching allocator counts them."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.phases: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        self.phases[self.phase] = max(self.phases.get(self.phase, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        self.phase = phase

    def assign(self, tensor: torch.Tensor, part: str) -> None:
        pass


# ---------------------------------------------------------------------- what a GPU would run


@torch.library.custom_op("trl_sketch::flash_forward", mutates_args=())
def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only shapes")


@_flash_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[-1]), q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("trl_sketch::flash_backward", mutates_args=())
def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only shapes")


@_flash_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_flash_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


_flash_forward.register_autograd(
    lambda ctx, grad, _: _flash_backward(grad, *ctx.saved_tensors), setup_context=_save_for_flash_backward
)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    if torch.is_autocast_enabled(query.device.type):  # as scaled_dot_product_attention on CUDA
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _flash_forward(query, key, value)[0], None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)


@contextlib.contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Let TRL's LM head and this package's update work in the blocks, and with the temporaries, that they have on CUDA."""
    from trl.kernels import chunked_logprob

    with (
        mock.patch.object(chunked_logprob, "_forward_tile", lambda *args, **kwargs: None),
        mock.patch.object(chunked_logprob, "_backward_tile", lambda *args, **kwargs: None),
        mock.patch.object(chunked_logprob, "_addmm_fp32", lambda accumulated, a, b: None),
        mock.patch.object(weights, "_BLOCK_ELEMENTS", {}),
        mock.patch.object(weights, "_CPU_HAS_INT8", False),
    ):
        yield


def fused_log_probs(hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities as TRL's fused LM head computes them where it has its Triton kernels.

    Args:
        hidden: `(batch, length, width)`.
        head: The LM head.
        labels: `(batch, length)`.
    """
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    shifted = hidden[:, :-1].flatten(0, 1)
    rows = torch.arange(len(shifted), device=hidden.device)
    result: Any = ChunkedLogProbFunction.apply(
        shifted[rows], head.weight, None, labels[:, 1:].flatten(), 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
        ("log_probs", "entropy"),
    )  # fmt: skip
    return result[0]


# ---------------------------------------------------------------------- one training step


def measure(plan: Plan, update: bool = True) -> Measurement:
    """Measure a step without a GPU, on fake tensors.

    Args:
        plan: The step.
        update: Whether to go on behind backward, to the proposal, the KL probe and the update; without, it is quicker.
    """
    model = _build(plan)
    with FakeTensorMode(allow_non_fake_inputs=True), StorageTracker(plan.tokens - 1) as tracker, _as_on_cuda():
        _run(plan, model, tracker, "cpu", _ATTENTION, update)
        return _result(tracker)


def measure_on_cpu(plan: Plan) -> Measurement:
    """Measure a step of a small model with real tensors; nothing is rounded up."""
    model = _build(plan)
    with StorageTracker(alignment=1) as tracker:
        _run(plan, model, tracker, "cpu", "sdpa")
        return _result(tracker)


def measure_on_cuda(plan: Plan) -> Measurement:
    """Measure a step on the current CUDA device, with random weights.

    Raises:
        ValueError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "measuring on a GPU needs a CUDA device, and torch sees none: `--measure fake` measures on tensors without data"
        )
    model = _build(plan)
    meter = _CudaMeter()
    _run(plan, model, meter, "cuda", "sdpa")
    meter.phases.pop("setup")
    return Measurement(meter.phases, {}, {})


def _result(tracker: StorageTracker) -> Measurement:
    _, left = tracker.peaks.pop("end")
    peaks = {phase: peak for phase, peak in tracker.peaks.items() if phase != "setup"}
    return Measurement({k: total for k, (total, _) in peaks.items()}, {k: p for k, (_, p) in peaks.items()}, left)


def _build(plan: Plan) -> PreTrainedModel:
    """The model on the meta device, with what the method adds to it, and what it trains."""
    model = meta_model(plan.config, plan.dtype)
    if plan.method == "sketch":
        get_sketch_model(model, SketchConfig(rank=plan.rank), compute_dtype=plan.dtype)
    elif plan.method == "rgc":
        get_sketch_model(model, SketchConfig.rgc(plan.rank))
    elif plan.method == "lora":
        from peft import LoraConfig, get_peft_model

        names = sorted({matrix.name.rpartition(".")[2] for matrix in plan.shape.matrices})
        config = LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=names)
        get_peft_model(model, config, low_cpu_mem_usage=True)  # in place
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()  # as `autocast_adapter_dtype` does where there is data
    elif plan.method == "dense":
        model.float()  # AdamW needs fp32 weights
        trained = {f"{matrix.name}.weight" for matrix in plan.shape.matrices}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
    else:
        raise ValueError(f"method={plan.method!r} cannot be measured, only predicted: it is not implemented here")
    return model


def _run(plan: Plan, model: PreTrainedModel, meter: _Meter, device: str, attention: str, update: bool = True) -> None:
    """The last microbatch of an optimizer step, and the step."""
    model.to_empty(device=device)
    model.tie_weights()
    if attention != _ATTENTION:
        _fill(model)
    model.config._attn_implementation_internal = attention
    model.train()
    if plan.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gc.collect()
    for parameter in model.parameters():
        is_adapter = plan.method == "lora" and parameter.requires_grad
        meter.assign(parameter, "adapter" if is_adapter else "weights")
    for buffer in model.buffers():
        meter.assign(buffer, "weights")
    optimizer: torch.optim.Optimizer
    if plan.method in _SKETCHED:
        optimizer = _sketch_optimizer(model, plan, device)
        _assign_sketches(optimizer, meter)
    else:
        optimizer = _adamw(trained, meter)

    ids = torch.zeros(plan.microbatch, plan.tokens, dtype=torch.long, device=device)
    autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=plan.dtype == torch.bfloat16)
    backbone: Any = model.base_model
    with autocast:
        meter.enter("forward")
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
        meter.enter("head")
        loss = fused_log_probs(hidden, model.get_output_embeddings(), ids).sum()
        del hidden
    meter.enter("backward")
    loss.backward()
    del loss
    if isinstance(optimizer, SketchOptimizer) and update:
        _assign_sketches(optimizer, meter)
        meter.enter("propose")
        optimizer.propose()
        if plan.method == "sketch":
            meter.enter("probe")
            kl.predicted_kl(
                model,
                {"input_ids": ids[:PROBE_RESPONSES], "labels": ids[:PROBE_RESPONSES]},
                autocast_dtype=plan.dtype if plan.dtype == torch.bfloat16 else None,
            )
    if update:
        meter.enter("update")
        optimizer.step()
    if isinstance(optimizer, SketchOptimizer):
        _assign_sketches(optimizer, meter)
    del ids
    gc.collect()
    meter.enter("end")


def _sketch_optimizer(model: PreTrainedModel, plan: Plan, device: str) -> SketchOptimizer:
    """The optimizer of a model that was given its sketches on the meta device, after the first microbatch."""
    state = sketch_state(model)
    state.anchor = torch.zeros((), requires_grad=True, device="cpu")
    state.keys = torch.zeros(len(state.groups), dtype=torch.int32, device=device)
    state.set_step(0)
    for group in state.groups:
        group.keep_basis(plan.dtype)
    return SketchOptimizer(model)


def _assign_sketches(optimizer: SketchOptimizer, meter: _Meter) -> None:
    for part, tensors in optimizer.state_tensors().items():
        for tensor in tensors:
            meter.assign(tensor, part)


def _adamw(trained: list[nn.Parameter], meter: _Meter) -> torch.optim.Optimizer:
    """torch's fused AdamW, TRL's default, with its moments and the gradients of earlier microbatches."""
    optimizer = torch.optim.AdamW(trained, fused=True)
    meter.enter("gradients")
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        for tensor in state.values():
            meter.assign(tensor, "optimizer")
    for parameter in trained:
        meter.assign(parameter.grad, "gradients")  # type: ignore[arg-type]
    return optimizer


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Random weights; finite is all that they have to be."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    for buffer in model.buffers():
        buffer.fill_(0.5)
