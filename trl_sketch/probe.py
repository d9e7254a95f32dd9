"""Forward passes along a proposed update: hidden states `h` and their rate of change `ḣ`, without touching a weight.

* [`jvp`]: forward-mode differentiation. Each selected layer adds `(x Aᵀ) factorᵀ` to the tangent of its output, so the
  update is never formed. In bf16 only the products are bf16: the residual stream is kept in fp32, without which q comes
  out several percent low.
* [`finite_difference`]: two passes in fp32 with `± ε (x Aᵀ) factorᵀ` beside the layers' own output, ε such that the
  update is 2e-5 of the weights. Weights are upcast one layer at a time. (In bf16 rounding would drown the difference.)

Both switch the model to evaluation mode and to an attention of our own, for the duration of the pass. It works block by
block of queries, so that its memory grows with the length and not with its square; fused attention kernels have no
forward-mode derivative, and some no fp32.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from . import distributed
from .layers import SketchLinear
from .model import sketch_state


_ATTENTION = "sketch_probe"
_ATTENTION_ELEMENTS = 2**22  # of a temporary of the blocked attention, at most
_FINITE_DIFFERENCE_RATIO = 2e-5
_NOT_FOR_BACKBONE = ("labels", "shift_labels", "fused_lm_head", "num_items_in_batch", "logits_to_keep", "return_dict")

# The attention implementations that a probe stands in for.
_replaced: ContextVar[frozenset[str | None]] = ContextVar("_replaced", default=frozenset())

Inputs = dict[str, Any]


# ---------------------------------------------------------------------- what is probed


class InputRecorder:
    """Keeps the inputs of the first responses that a model is trained on between two optimizer steps.

    Args:
        model: A causal language model whose forward is given its arguments by name.
        responses: How many to keep.
    """

    def __init__(self, model: nn.Module, responses: int) -> None:
        self.responses = responses
        self.saw_forward = False
        self._batches: list[Inputs] = []
        self._missing = responses
        self._handle = model.register_forward_pre_hook(self._record, with_kwargs=True)

    def take(self) -> list[Inputs]:
        """The recorded inputs; recording starts anew."""
        batches, self._batches, self._missing = self._batches, [], self.responses
        return batches

    def remove(self) -> None:
        self._handle.remove()

    def _record(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        if not (module.training and torch.is_grad_enabled()) or kwargs.get("input_ids") is None:
            return
        self.saw_forward = True
        if self._missing == 0:
            return
        ids, labels = kwargs["input_ids"], kwargs.get("labels")
        rows = torch.arange(len(ids), device=ids.device)
        if labels is not None:
            rows = rows[(labels[:, 1:] != -100).any(dim=1)]
        rows = rows[: self._missing]
        if len(rows) == 0:
            return
        self._missing -= len(rows)
        self._batches.append(
            {
                name: value[rows] if isinstance(value, torch.Tensor) and value.shape[:1] == ids.shape[:1] else value
                for name, value in kwargs.items()
            }
        )


# ---------------------------------------------------------------------- the passes


def hidden_states(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """The last hidden states `(batch, length, width)` in fp32 arithmetic, of the weights as they are."""
    with _probing(model, _plain_linear), _upcast(model):
        return _backbone(model, inputs)


def jvp(
    model: PreTrainedModel, inputs: Inputs, autocast_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and their derivative along the proposed update, both `(batch, length, width)`.

    Args:
        model: A model with a proposed update.
        inputs: Arguments of its forward.
        autocast_dtype: The type that the model is trained in by autocast, if it is. A bf16 model is probed by autocast
            in any case.

    Raises:
        NotImplementedError: An operation of the model has no forward-mode derivative.
    """
    if any(layer.weight.dtype == torch.bfloat16 for layer in sketch_state(model).layers.values()):
        autocast_dtype = torch.bfloat16
    device = next(model.parameters()).device.type
    autocast = torch.autocast(device, dtype=autocast_dtype, enabled=autocast_dtype is not None)
    with forward_ad.dual_level(), _probing(model, _dual_linear), _fp32_embeddings(model), autocast:
        primal, tangent = forward_ad.unpack_dual(_backbone(model, inputs))
        if tangent is None:
            raise NotImplementedError("an operation of the model dropped the forward-mode derivative")
        return primal, tangent


def finite_difference(model: PreTrainedModel, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`jvp`], by a symmetric difference in fp32."""
    update_ratio = sketch_state(model).update_ratio
    epsilon = _FINITE_DIFFERENCE_RATIO / update_ratio if update_ratio > 0 else 1.0
    above, below = (_displaced(model, inputs, sign * epsilon) for sign in (1, -1))
    return (above + below) / 2, (above - below) / (2 * epsilon)


def _displaced(model: PreTrainedModel, inputs: Inputs, epsilon: float) -> torch.Tensor:
    with _probing(model, functools.partial(_branched_linear, epsilon=epsilon)), _upcast(model):
        return _backbone(model, inputs)


def _backbone(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    arguments = {name: value for name, value in inputs.items() if name not in _NOT_FOR_BACKBONE}
    arguments |= {"use_cache": False, "return_dict": True}
    if not distributed.is_sharded(model):
        return model.base_model(**arguments).last_hidden_state
    # FSDP2 gathers weights as its modules are run, all of them and from the outermost on: so the head is, for one position.
    states: list[torch.Tensor] = []
    head: Any = model.get_output_embeddings()
    handles = [
        model.base_model.register_forward_hook(lambda module, args, output: states.append(output.last_hidden_state)),
        head.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),)),
    ]
    try:
        model(**arguments, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return states[-1]


# ---------------------------------------------------------------------- what a selected layer does in a pass


def _projected(layer: SketchLinear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return F.linear(x.to(dtype), layer.group.basis(dtype))


def _dual_linear(layer: SketchLinear, x: torch.Tensor) -> torch.Tensor:
    x, tangent = forward_ad.unpack_dual(x)
    y = layer.linear(x)
    rate = F.linear(_projected(layer, x, y.dtype), layer.proposed_factor().to(y.dtype))
    if tangent is not None:
        rate = rate + F.linear(tangent.to(y.dtype), layer.weight.to(y.dtype))
    return forward_ad.make_dual(y, rate.to(y.dtype))


def _plain_linear(layer: SketchLinear, x: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def _branched_linear(layer: SketchLinear, x: torch.Tensor, epsilon: float) -> torch.Tensor:
    branch = F.linear(_projected(layer, x, x.dtype), layer.proposed_factor().to(x.dtype))
    return _plain_linear(layer, x).add_(branch, alpha=epsilon)


# ---------------------------------------------------------------------- switching the model, and back


@contextlib.contextmanager
def _probing(model: PreTrainedModel, linear: Callable[[SketchLinear, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """No gradients, evaluation mode, our attention, `linear` in the selected layers; everything is put back."""
    state = sketch_state(model)
    training = [module for module in model.modules() if module.training]
    # A model that does not look its attention up keeps its own, which is plain enough to be differentiated as a rule.
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    swaps = all(module._can_set_attn_implementation() for module in owners)
    all_configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in all_configs if swaps and isinstance(config, PretrainedConfig)}
    attention = [(config, config._attn_implementation_internal) for config in configs.values()]
    token = _replaced.set(frozenset(implementation for _, implementation in attention))
    try:
        for module in training:
            module.training = False
        for config, _ in attention:
            config._attn_implementation_internal = _ATTENTION
        state.probe = linear
        # a compiled model would be compiled again for the probe
        with torch.no_grad(), distributed.exact_inputs(model), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _replaced.reset(token)
        state.probe = None
        for config, implementation in attention:
            config._attn_implementation_internal = implementation
        for module in training:
            module.training = True


@contextlib.contextmanager
def _upcast(model: PreTrainedModel) -> Iterator[None]:
    """The backbone computes in fp32: the parameters of a module are upcast while it runs, and no longer."""
    originals: dict[nn.Parameter, torch.Tensor] = {}

    def upcast(module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype.itemsize < 4 and parameter not in originals:
                originals[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in originals:
                parameter.data = originals.pop(parameter)

    handles = []
    for module in model.base_model.modules():
        # The selected layers upcast their own weights, and of an embedding only the output is needed.
        if not isinstance(module, SketchLinear | nn.Embedding) and any(True for _ in module.parameters(recurse=False)):
            handles += [module.register_forward_pre_hook(upcast), module.register_forward_hook(restore)]
    device = next(model.parameters()).device
    try:
        with torch.autocast(device.type, enabled=False), _fp32_embeddings(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in originals.items():
            parameter.data = data


@contextlib.contextmanager
def _fp32_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """The residual stream starts in fp32, and stays."""

    def upcast(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.float() if output.dtype.itemsize < 4 else output

    embeddings = [module for module in model.base_model.modules() if isinstance(module, nn.Embedding)]
    handles = [module.register_forward_hook(upcast) for module in embeddings]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------- attention, by blocks of queries


class _MaskRows:
    """An attention mask that is made a block of rows at a time."""

    def __init__(self, q_offset: int = 0, **kwargs: Any) -> None:
        self.q_offset, self.kwargs = q_offset, kwargs

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """bool `(batch, 1, stop - start, keys)`, True where a query sees a key."""
        arguments = self.kwargs | {"q_length": stop - start, "q_offset": self.q_offset + start}
        mask = sdpa_mask(**arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        assert mask is not None
        return mask


def _mask_rows(mask: Any, start: int, stop: int, keys: int, device: torch.device) -> torch.Tensor:
    """Rows of whatever mask the model hands to its attention, as an additive or a boolean tensor."""
    if isinstance(mask, _MaskRows):
        return mask.rows(start, stop)
    if mask is not None:
        return mask[:, :, start:stop, :keys]
    return torch.arange(start, stop, device=device)[:, None] >= torch.arange(keys, device=device)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention and, if an input carries one, its forward-mode derivative.

    Args:
        module: The attention layer.
        query: `(batch, heads, queries, head_dim)`; dual or not, as are key and value.
        key: `(batch, kv_heads, keys, head_dim)`.
        value: `(batch, kv_heads, keys, value_dim)`.
        attention_mask: Of any kind; `None` is causal.
        scaling: Of the scores; default 1/√head_dim.
        dropout: Not used: probes run in evaluation mode.
        softcap: c in c·tanh(score / c); left out where the model runs on sdpa, which leaves it out as well.

    Returns:
        `(batch, queries, heads, value_dim)`, and no attention weights.
    """
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks")
    if "sdpa" in _replaced.get():
        softcap = None
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    scaling = width**-0.5 if scaling is None else scaling

    def grouped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        primal, tangent = forward_ad.unpack_dual(x)
        return tuple(None if t is None else t.unflatten(1, (kv_heads, -1)) for t in (primal, tangent))  # type: ignore

    (q, dq), (k, dk), (v, dv) = grouped(query), grouped(key), grouped(value)
    k_t = k.transpose(-1, -2)
    dk_t = None if dk is None else dk.transpose(-1, -2)
    is_dual = any(t is not None for t in (dq, dk, dv))
    lowest = torch.finfo(torch.float32).min
    outputs, rates = [], []
    block = max(1, min(_ATTENTION_ELEMENTS, query.numel()) // max(1, batch * heads * keys))
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        rows = slice(start, stop)
        score = (q[..., rows, :] @ k_t).float() * scaling
        rate = torch.zeros_like(score) if is_dual else None
        if rate is not None and dq is not None:
            rate += (dq[..., rows, :] @ k_t).float() * scaling
        if rate is not None and dk_t is not None:
            rate += (q[..., rows, :] @ dk_t).float() * scaling
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
            if rate is not None:
                rate *= 1 - (score / softcap).square()
        mask = _mask_rows(attention_mask, start, stop, keys, score.device)
        mask = mask.unsqueeze(2) if mask.ndim == 4 else mask
        score = score.masked_fill(~mask, lowest) if mask.dtype == torch.bool else score + mask
        p = torch.softmax(score, dim=-1)
        outputs.append(p.to(v.dtype) @ v)
        if rate is not None:
            dp = p * (rate - (p * rate).sum(dim=-1, keepdim=True))
            change = dp.to(v.dtype) @ v
            rates.append(change if dv is None else change + p.to(v.dtype) @ dv)

    def merged(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, dim=-2).flatten(1, 2).transpose(1, 2).contiguous()

    output = merged(outputs)
    return (forward_ad.make_dual(output, merged(rates)) if is_dual else output), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, _MaskRows)
