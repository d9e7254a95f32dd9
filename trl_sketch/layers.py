"""The sketch-accumulating linear layer, the projections it shares, and the flat buffer of all sketches.

For inputs `X (T, k)` and output derivatives `D (T, d)` a layer adds `Dᵀ (X Aᵀ)` to its sketch `S (d, r)` (LoGRA,
equation 2) and forms no dense gradient. Its weight is frozen for autograd, so the ordinary `F.linear` keeps nothing of
X; a pass-through node behind it keeps `X Aᵀ (T, r)`.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .config import SketchConfig
from .projection import SIGN_PROJECTIONS, Signs, derive_key, projection_basis, projection_scale
from .weights import BASIS_ELEMENTS, row_blocks, sign_dtype


class _AccumulateSketch(torch.autograd.Function):
    """Identity on a layer's output `y (…, d)`; its backward adds `Dᵀ p` to the layer's sketch.

    `anchor` is a scalar that requires grad, so that a layer is reached by backward even where its input does not
    require grad. `p` is `X Aᵀ / scale (…, r)`.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, anchor: torch.Tensor, p: torch.Tensor, layer: "SketchLinear"
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(p)
        ctx.mark_dirty(y)  # returned as it is, and not as a view of itself, so that it may be changed in place later
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (p,) = ctx.saved_tensors
        ctx.layer.accumulate(grad, p)
        return grad if ctx.needs_input_grad[0] else None, None, None, None


@dataclass(eq=False)
class ProjectionGroup:
    """Layers that share one projection, because they read the same input.

    `X Aᵀ` is computed for the first of them that runs and handed to the others, as long as they are given the very same
    tensor; a member that is given another input gets its own.
    """

    name: str
    kind: str
    rank: int
    in_features: int
    key: torch.Tensor = field(repr=False)  # 0-dim int32 view of SketchState.keys
    signs: Signs | None = field(default=None, repr=False)  # of a sign projection, drawn by SketchState for this step
    members: int = 0
    _basis: torch.Tensor | None = field(default=None, repr=False)
    _input: Callable[[], torch.Tensor | None] | None = field(default=None, repr=False)
    _input_version: int = -1
    _projected: torch.Tensor | None = field(default=None, repr=False)
    _remaining: int = 0

    @property
    def scale(self) -> float:
        """A / basis: the sketch and the update fold it in."""
        return projection_scale(self.kind, self.rank)

    @property
    def kept(self) -> list[torch.Tensor]:
        """The tensors from which A is made: the signs in their compact form, or the copy of A / scale, if one is kept."""
        if self.signs is not None:
            return list(self.signs.parts)
        return [] if self._basis is None else [self._basis]

    def basis(self, dtype: torch.dtype) -> torch.Tensor:
        """A / scale `(r, k)`. Signs are unpacked anew at each call; of a dear projection the copy that is kept is returned."""
        if self._basis is not None and self._basis.dtype == dtype:
            return self._basis
        if self.signs is not None:
            return self.signs.block((0, self.rank), (0, self.in_features), dtype)
        return projection_basis(self.kind, self.key, self.rank, self.in_features, dtype=dtype)

    def keep_basis(self, dtype: torch.dtype) -> None:
        """Keep a copy of A / scale in `dtype` until it is redrawn, if it is dear: the QR takes longer than all else here.

        The type is the one that the model computes in, bf16 as a rule: 2·r·k bytes, as RGC has.
        """
        if self.kind not in SIGN_PROJECTIONS:
            self._basis = self.basis(dtype)

    def gram(self, dtype: torch.dtype) -> torch.Tensor | None:
        """A Aᵀ `(r, r)`, or `None` where it is (k/r)·I, because the rows of A are orthogonal."""
        if self.kind == "orthonormal" or (self.kind == "hadamard" and self.in_features.bit_count() == 1):
            return None
        drawn = self.basis(dtype) if self.signs is None else self.signs
        gram = self.key.new_zeros(self.rank, self.rank, dtype=dtype)
        for cols in row_blocks((0, self.in_features), self.rank, BASIS_ELEMENTS):  # a row here is a column of A
            part = drawn.block((0, self.rank), cols, dtype) if isinstance(drawn, Signs) else drawn[:, slice(*cols)]
            gram.addmm_(part, part.t())
        return gram.mul_(self.scale**2)

    def drawn_for_update(self) -> Signs | torch.Tensor:
        """What [`SketchUpdate.apply_`] takes: on a CPU signs, unless they are many, as they are multiplied there.

        So they are cut once for all members. Elsewhere each update cuts them, or its kernel does.
        """
        if self.signs is None:
            return self.basis(torch.float32)
        is_small = self.rank * self.in_features <= BASIS_ELEMENTS
        return self.basis(sign_dtype(self.key.device)) if is_small and self.key.device.type == "cpu" else self.signs

    @torch.no_grad()
    def project(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`X Aᵀ / scale`, `(…, r)`, of `x (…, k)`, computed in `dtype`."""
        if torch.compiler.is_compiling():  # sharing would break the graph
            return F.linear(x.to(dtype), self.basis(dtype))
        cached = self._projected
        if (
            cached is None
            or self._input is None
            or self._input() is not x
            or self._input_version != x._version
            or cached.dtype != dtype
        ):
            self.keep_basis(dtype)
            cached = F.linear(x.to(dtype), self.basis(dtype))
            self._input, self._input_version = weakref.ref(x), x._version
            self._projected, self._remaining = cached, self.members
        self._remaining -= 1
        if self._remaining == 0:
            self._projected = self._input = None
        return cached

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_basis": None, "_input": None, "_projected": None, "_remaining": 0}

    def redrawn(self) -> None:
        """Forget what belongs to the last key."""
        self._basis = self._projected = self._input = None


def _is_forgotten() -> bool:
    """Whether what is saved for backward just now is dropped, because activation checkpointing will compute it again.

    (The first forward pass of a reentrant checkpoint is without gradients in any case. Selective checkpointing counts the
    operations of both passes, which must then be the same.)
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != checkpoint.__name__:
        return False
    is_first_pass = hooks[0].__qualname__.startswith(f"{checkpoint._checkpoint_hook.__name__}.")
    selective = checkpoint._CachingTorchDispatchMode
    return is_first_pass and not any(isinstance(mode, selective) for mode in _get_current_dispatch_mode_stack())


class SketchLinear(nn.Linear):
    """An `nn.Linear` that accumulates the sketch of its weight's gradient in backward.

    It is made from an existing layer, in place, by [`get_sketch_model`]: the module, its parameters, their names and its
    hooks stay. Its forward gives the same bits as before.
    """

    name: str
    index: int  # its place in SketchState.layers
    group: ProjectionGroup
    state: "SketchState"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.state.probe is not None:
            return self.state.probe(self, input)
        y = self.linear(input)
        if not torch.is_grad_enabled():
            return y
        if self.bias is not None and y.ndim != 2:
            # F.linear returns a view here, and a change of a view in place would cost backward a copy
            y = torch.ops.aten._unsafe_view(y, y.shape)
        if not torch.compiler.is_compiling() and _is_forgotten():
            projected = y.new_empty(()).expand(*input.shape[:-1], self.group.rank)  # of the shape that is expected
        else:
            if not torch.compiler.is_compiling():
                self.state.follow(input.device)  # where weights were moved by other means
            projected = self.group.project(input, y.dtype)
        return _AccumulateSketch.apply(y, self.state.anchor, projected, self)

    def _apply(self, *args: Any, **kwargs: Any) -> "SketchLinear":
        """What `to`, `cuda`, `double` and `to_empty` call: the projections and the sketches go along."""
        super()._apply(*args, **kwargs)
        self.state.follow(self.weight.device)
        self.state.forget_views()
        return self

    def linear(self, input: torch.Tensor) -> torch.Tensor:
        """The ordinary `x Wᵀ + b`, `(…, d)`."""
        weight, bias = self.weight, self.bias
        if input.dtype == weight.dtype or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        # a bf16 weight in a model that is otherwise fp32, used outside autocast
        return F.linear(input.to(weight.dtype), weight, bias).to(input.dtype)

    @property
    def coefficient(self) -> torch.Tensor:
        """The factor between the buffer and the proposed update, 0-dim in the type of the sketch."""
        assert self.state.coefficients is not None
        return (self.state.coefficients[self.index] * -self.group.scale).to(self.state.flat.dtype)

    def proposed_factor(self) -> torch.Tensor:
        """The factor `(d, r)` of the proposed update `ΔW = factor · (A / scale)`, at α = 1 and not yet quantized."""
        return self.sketch * self.coefficient

    @property
    def sketch(self) -> torch.Tensor:
        """S `(d, r)`, a view of the flat buffer: the sum over microbatches of `Dᵀ (X Aᵀ)`."""
        return self.state.sketches[self.name]

    def accumulate(self, grad: torch.Tensor, projected: torch.Tensor) -> None:
        """S += Dᵀ (X Aᵀ), for `grad` D `(…, d)` and `projected` X Aᵀ / scale `(…, r)`.

        Raises:
            RuntimeError: An update has been proposed and not applied; its factor lies in the buffer of the sketches.
        """
        if self.state.proposed:
            raise RuntimeError(
                "backward() between propose() and step(): call step() or zero_grad() of the optimizer first"
            )
        sketch = self.sketch
        derivative = grad.reshape(-1, self.out_features).t()
        projected = projected.reshape(-1, self.group.rank)
        if derivative.dtype == sketch.dtype:
            sketch.addmm_(derivative, projected, alpha=self.group.scale)
        else:
            sketch.add_(derivative @ projected, alpha=self.group.scale)


class SketchState:
    """All sketches of a model: the layers in a fixed order, their projections, and one flat buffer.

    Attributes:
        config: The configuration.
        layers: Name → layer, ordered by rank and then as in the model, so that sketches of one rank are adjacent.
        groups: The projections.
        anchor: A scalar that requires grad.
        coefficients: After [`SketchOptimizer.propose`], when the buffer holds factors U instead of sketches S: the
            factor c of each matrix in `ΔW = -c U A`, float64 `(M,)`. Else `None`.
        update_ratio: ‖ΔW‖ / ‖W‖ of the proposal.
        owner: Stands for the optimizer that was made last for this model.
        probe: If set, called as `probe(layer, input)` in the place of every layer's forward.
    """

    def __init__(self, config: SketchConfig, layers: dict[str, SketchLinear], groups: list[ProjectionGroup]) -> None:
        self.config = config
        self.layers = dict(sorted(layers.items(), key=lambda item: -item[1].group.rank))
        self.groups = groups
        self.seed = config.projection_seed or 0
        self.step = 0
        self.coefficients: torch.Tensor | None = None
        self.update_ratio = 0.0
        self.owner = object()
        self.probe: Callable[[SketchLinear, torch.Tensor], torch.Tensor] | None = None
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        for index, layer in enumerate(self.layers.values()):
            layer.index = index
            layer.state = self
        self._flat: torch.Tensor | None = None
        self._sketches: dict[str, torch.Tensor] = {}
        self.keys = torch.empty(0, dtype=torch.int32, device=self.device if self.device.type != "meta" else "cpu")
        self._is_drawn = False
        self.set_step(0)

    @property
    def proposed(self) -> bool:
        """Whether an update has been proposed and not applied."""
        return self.coefficients is not None

    @property
    def device(self) -> torch.device:
        return next(iter(self.layers.values())).weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the sketches: fp32, or fp64 for fp64 weights."""
        is_double = any(layer.weight.dtype == torch.float64 for layer in self.layers.values())
        return torch.float64 if is_double else torch.float32

    @property
    def flat(self) -> torch.Tensor:
        """All sketches in one 1-D tensor, allocated on the weights' device at first use."""
        self._allocate()
        assert self._flat is not None
        return self._flat

    @property
    def sketches(self) -> dict[str, torch.Tensor]:
        """Name → S `(d, r)`, views of `flat`."""
        self._allocate()
        return self._sketches

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sketches": {}, "probe": None}  # a copy's views would not be views of its buffer

    def _allocate(self) -> None:
        device = self.device
        if self._sketches and self._flat is not None and self._flat.device == device:
            return
        sizes = [layer.out_features * layer.group.rank for layer in self.layers.values()]
        if self._flat is None or self._flat.is_meta:
            self._flat = torch.zeros(sum(sizes), dtype=self.dtype, device=device)
        self._flat = self._flat.to(device, self.dtype)
        if self.coefficients is not None:
            self.coefficients = self.coefficients.to(device)
        self._sketches = {
            name: chunk.view(layer.out_features, layer.group.rank)
            for (name, layer), chunk in zip(self.layers.items(), self._flat.split(sizes), strict=True)
        }
        self.follow(device)

    def follow(self, device: torch.device) -> None:
        """Have the projections on `device`, and complete if something broke off while they were drawn."""
        if self.keys.device != device or not self._is_drawn:
            self._draw(device)

    def forget_views(self) -> None:
        """Have the buffer looked at again before it is used: its weights may have another device or type."""
        self._sketches = {}

    def _draw(self, device: torch.device) -> None:
        """Make the keys of the step, hand them out, and draw the signs of all groups of one shape together."""
        self._is_drawn = False
        period = self.config.refresh_steps
        drawn_at = 0 if period is None else self.step - self.step % period
        keys = [derive_key(self.seed, drawn_at, group.name, "projection") for group in self.groups]
        self.keys = torch.tensor(keys, dtype=torch.int32, device="cpu").to(device)
        alike: dict[tuple[str, int, int], list[int]] = {}
        for index, group in enumerate(self.groups):
            group.key = self.keys[index]
            if group.kind in SIGN_PROJECTIONS:
                alike.setdefault((group.kind, group.rank, group.in_features), []).append(index)
        for (kind, rank, in_features), indices in alike.items():
            drawn = Signs.draw(kind, self.keys[indices], rank, in_features)
            for place, index in enumerate(indices):
                group = self.groups[index]
                if group.signs is None or group.signs.parts[0].device != self.keys.device:
                    group.signs = drawn[place].clone()
                else:
                    group.signs.copy_(drawn[place])
        for group in self.groups:
            group.redrawn()
        self._is_drawn = True

    def rank_blocks(self) -> list[tuple[torch.Tensor, list[SketchLinear]]]:
        """The buffer as one `(Σd, r)` matrix per distinct rank, with the layers whose rows it stacks."""
        by_rank: dict[int, list[SketchLinear]] = {}
        for layer in self.layers.values():
            by_rank.setdefault(layer.group.rank, []).append(layer)
        sizes = [rank * sum(layer.out_features for layer in layers) for rank, layers in by_rank.items()]
        chunks = self.flat.split(sizes)
        return [(chunk.view(-1, rank), layers) for chunk, (rank, layers) in zip(chunks, by_rank.items(), strict=True)]

    def set_step(self, step: int) -> None:
        """Set the optimizer step; where a refresh is due, every projection is drawn anew."""
        self.step = step
        self._draw(self.keys.device)

    def set_seed(self, seed: int) -> None:
        """Set the base seed of projections and rounding."""
        self.seed = seed
        self.set_step(self.step)

    def zero_(self) -> None:
        """Empty the sketches and drop a proposal."""
        if self._flat is not None:
            self._flat.zero_()
        self.coefficients = None
