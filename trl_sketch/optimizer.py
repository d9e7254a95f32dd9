"""`SketchOptimizer`: from the sketches of a model to new weights, in three calls: propose, scale, step."""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import distributed, rules
from .config import SketchConfig
from .layers import ProjectionGroup, SketchLinear
from .model import sketch_state
from .projection import derive_key, projection_basis
from .weights import FACTOR_ELEMENTS, SketchUpdate, quantize, row_blocks


logger = logging.getLogger(__name__)

STATE_FORMAT_VERSION = 2
# What must be the same when a run is resumed, or its statistics and projections would be of another method.
_RESUMED = ("rank", "rank_pattern", "projection", "refresh", "share_projection", "update_rule", "norm")
_MOMENTS = {"sgd": (), "row_adam": ("second",), "adam": ("first", "second")}


class SketchOptimizer(torch.optim.Optimizer):
    """Optimizer of the weights that [`get_sketch_model`] selected.

    ```python
    loss.backward()        # as often as there are microbatches
    optimizer.propose()    # S becomes U; nothing has moved yet
    optimizer.scale(0.5)   # optional: shrink or enlarge the step
    optimizer.step()       # W += -α c U A, sketches emptied, projection redrawn
    ```

    `step()` alone proposes and applies with α = 1. The learning rate is that of AdamW: without `update_ratio` an update
    has a root mean square of `lr` per weight, whatever the loss's scale (with `norm="none"` it is that of plain SGD).

    Args:
        model: A model that went through [`get_sketch_model`].
        config: Its configuration; by default the one that the model was made with.
        lr: Learning rate. With `update_ratio` set, only its course matters: the ratio applies at the initial `lr`.

    Raises:
        ValueError: The model has no sketches, `config` differs from the model's, or `lr` is negative or not finite.
    """

    def __init__(self, model: nn.Module, config: SketchConfig | None = None, lr: float = 1e-6) -> None:
        self.sketches = sketch_state(model)
        self.config = self.sketches.config
        if config is not None and config != self.config:
            raise ValueError(
                "config differs from the one given to get_sketch_model(); leave it out or pass the same one"
            )
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr must be finite and not negative, got {lr}")
        self._ticket = self.sketches.owner = object()
        self.layers = list(self.sketches.layers.values())
        self.sizes = [layer.out_features for layer in self.layers]
        self._model = model
        self._alpha = 1.0
        self._skips = False
        self._broke_off = False
        self._ranks_agree = False
        # Allocated here and not in the first backward, which may be compiled, and so that a state has always the same
        # entries, which checkpoint libraries count on.
        _ = self.sketches.flat
        self._moments = {kind: self._new_moment() for kind in _MOMENTS[self.config.update_rule]}
        self._next_moments: dict[str, torch.Tensor] = {}  # of a proposal; they become the moments in step()
        self.grad_norm: torch.Tensor | None = None
        self.update_ratio: torch.Tensor | None = None
        self.mismatch: float | None = None  # κ of the KL budget, smoothed; here to be saved with the optimizer
        self.skipped_steps = 0
        self.listeners: list[Callable[[int, list[SketchUpdate]], None]] = []
        super().__init__([layer.weight for layer in self.layers], defaults={"lr": lr, "initial_lr": lr})

    # ------------------------------------------------------------------ propose, scale, step

    @torch.no_grad()
    def propose(self, max_grad_norm: float | None = None) -> None:
        """Turn the sketches S into factors U, in place, and fix the size of the update. No weight moves.

        In a process group the sketches become their mean over all ranks first. Sets `grad_norm`, the norm of all sketches
        together (0-dim float64; its square is an unbiased estimate of the dense gradient's), and `update_ratio`, the
        proposal's ‖ΔW‖ / ‖W‖ over all selected weights.

        Args:
            max_grad_norm: Scale the sketches down to this norm, if theirs is larger (`None` or 0: do not).

        Raises:
            FloatingPointError: A sketch is not finite, on any rank; the message names the layers. No weight has moved.
            RuntimeError: An update is proposed already, a later optimizer has taken over the model, or the ranks of a
                process group have different projections or weights (also after a step of this rank broke off).
            ValueError: `max_grad_norm` is negative, or a weight is sharded in a way that is not supported.
        """
        state = self.sketches
        if state.owner is not self._ticket:
            raise RuntimeError("another SketchOptimizer has been made for this model since: a model has one at a time")
        if self._broke_off and distributed.world_size() > 1:
            raise RuntimeError(
                "a step broke off on this rank, so that the ranks have different weights: resume from a checkpoint"
            )
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm must not be negative, got {max_grad_norm}")
        if state.proposed:
            raise RuntimeError(
                "propose() was called twice: call step() to apply the proposal, or zero_grad() to drop it"
            )
        self._check_ranks(max_grad_norm)
        distributed.average_(state.flat)
        row_norm = torch.cat([torch.linalg.vector_norm(block, dim=1) for block, _ in state.rank_blocks()])
        norms = rules.per_matrix(row_norm, self.sizes)
        self._check_finite(norms)
        self.grad_norm = torch.linalg.vector_norm(norms)
        try:
            norms = self._transform(row_norm, norms, max_grad_norm)
            self._alpha = 1.0
            state.coefficients = self._step_sizes(self._applied_norms(norms))
        except BaseException:
            self.zero_grad()  # they are neither S nor U
            raise

    def _transform(self, row_norm: torch.Tensor, norms: torch.Tensor, max_grad_norm: float | None) -> torch.Tensor:
        """S becomes U, in place, from the norms of its rows and matrices; returns the norms of U `(M,)`."""
        config, state, blocks = self.config, self.sketches, self.sketches.rank_blocks()
        if max_grad_norm and config.norm == "none":  # otherwise the size of the sketch plays no part
            clip = (max_grad_norm / (torch.linalg.vector_norm(norms) + 1e-6)).clamp_max(1.0).to(row_norm.dtype)
            state.flat.mul_(clip)
            row_norm, norms = row_norm * clip, norms * clip

        unit = self._unit(norms)
        if config.update_rule == "row_adam":
            ranks = self._per_layer(lambda layer: layer.group.rank)
            row_mean_square = (row_norm / rules.per_row(unit, self.sizes)).square_()
            row_mean_square.div_(rules.per_row(ranks, self.sizes))
            multiplier = rules.row_adam(
                row_mean_square.to(row_norm.dtype),
                self._next_moment("second"),
                self.sizes,
                step=self._updates + 1,
                beta2=config.beta2,
                relative_epsilon=config.relative_epsilon,
                restore=config.norm != "none",
            )
            if config.norm == "none":
                norms = rules.per_matrix(row_norm * multiplier, self.sizes)
            for (block, _), part in zip(blocks, multiplier.split([len(block) for block, _ in blocks]), strict=True):
                block.mul_(part[:, None])
        elif config.update_rule == "adam":
            norms = self._adam(unit)
        if config.spectral_power != 1:
            self._flatten()
        return norms

    def _unit(self, norms: torch.Tensor) -> torch.Tensor:
        """What the sketches are divided by to be normalized, `(M,)`: their root mean square, all together or each."""
        numel = self._per_layer(lambda layer: layer.out_features * layer.group.rank)
        if self.config.norm == "none":
            return torch.ones_like(norms)
        if self.config.norm == "matrix":
            unit = norms / numel.sqrt()
        else:
            unit = (torch.linalg.vector_norm(norms) / numel.sum().sqrt()).expand_as(norms)
        return torch.where(unit > 0, unit, 1.0)

    def _adam(self, unit: torch.Tensor) -> torch.Tensor:
        flat = self.sketches.flat
        sizes = [layer.sketch.numel() for layer in self.layers]
        firsts, seconds = (self._next_moment(name).split(sizes) for name in ("first", "second"))
        for layer, first, second, scale in zip(self.layers, firsts, seconds, unit, strict=True):
            rules.adam_(
                layer.sketch.div_(scale.to(flat.dtype)),
                first.view_as(layer.sketch),
                second.view_as(layer.sketch),
                step=self._updates + 1,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                relative_epsilon=self.config.relative_epsilon,
            )
        return torch.stack([torch.linalg.vector_norm(layer.sketch, dtype=torch.float64) for layer in self.layers])

    def _flatten(self) -> None:
        """By one rank for all: how an eigendecomposition is rounded depends on the number of threads."""
        if distributed.rank() == 0:
            for layer in self.layers:
                rules.flatten_(layer.sketch, self.config.spectral_power)
        distributed.broadcast_(self.sketches.flat)

    def _applied_norms(self, norms: torch.Tensor) -> torch.Tensor:
        """‖U A‖ of each matrix `(M,)` from ‖U‖: √tr(UᵀU·AAᵀ), without forming U A."""
        result = []
        for group, members in self._by_group():
            gram = group.gram(self.sketches.flat.dtype)
            for index, layer in members:
                if gram is None:  # orthogonal rows
                    norm = norms[index] * (layer.in_features / group.rank) ** 0.5
                else:
                    parts = [layer.sketch[slice(*rows)] for rows in row_blocks((0, layer.out_features), group.rank)]
                    squares = [torch.linalg.vecdot(part @ gram, part).sum(dtype=torch.float64) for part in parts]
                    norm = torch.stack(squares).sum().clamp_min(0).sqrt()
                result.append((index, norm))
        return torch.stack([norm for _, norm in sorted(result, key=lambda item: item[0])])

    def _step_sizes(self, applied: torch.Tensor) -> torch.Tensor:
        """The factor c of each matrix `(M,)`, in `ΔW = -c U A`, from ‖U A‖ `(M,)`."""
        group = self.param_groups[0]
        lr, config = float(group["lr"]), self.config
        weight_norms = distributed.norms(self._weights(), self.sketches.flat.dtype)
        if config.norm == "none":
            sizes = torch.full_like(applied, lr)
        else:
            if config.update_ratio is None:
                target = lr * self._per_layer(lambda layer: layer.weight.numel()).sqrt()
            else:
                course = lr / group["initial_lr"] if group["initial_lr"] > 0 else 1.0
                target = config.update_ratio * course * weight_norms
            if config.norm == "global":
                target, reached = torch.linalg.vector_norm(target), torch.linalg.vector_norm(applied)
            else:
                reached = applied
            # A sketch of zeros stays an update of zeros.
            sizes = torch.where(reached > 0, target / reached, 0.0).expand_as(applied)
        moved = torch.linalg.vector_norm(sizes * applied)
        self.update_ratio = moved / torch.linalg.vector_norm(weight_norms).clamp_min(torch.finfo(torch.float32).tiny)
        self.sketches.update_ratio = self.update_ratio.item()
        return sizes

    def scale(self, alpha: float) -> None:
        """Multiply the proposed update by `alpha` (LoGRA, equation 4)."""
        if not self.sketches.proposed:
            raise RuntimeError("scale() needs a proposal: call propose() first")
        if not 0 <= alpha < float("inf"):
            raise ValueError(f"alpha must be finite and not negative, got {alpha}")
        self._alpha *= alpha

    def skip(self) -> None:
        """Drop the sketches and any proposal; the next [`step`] counts, and changes no weight and no moment."""
        self.zero_grad()
        self._skips = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the proposed update (propose first, if nothing is), empty the sketches, and go to the next projection.

        With empty sketches and a learning rate of 0, as checkpoint libraries call it to have a state made, it does
        nothing.

        An exception while weights are changed (Ctrl-C, no memory) leaves some of them changed and drops the rest of the
        update. With one process training can go on: the step counts as a skipped one, and a rollout gets whole weights at
        its next sync.

        Raises:
            FloatingPointError: See [`propose`].
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self.sketches
        updates: list[SketchUpdate] = []
        if self._skips:
            self.zero_grad()
            self.skipped_steps += 1
            state.set_step(state.step + 1)
        elif not state.proposed and self.param_groups[0]["lr"] == 0 and not state.flat.any():
            return loss
        else:
            if not state.proposed:
                self.propose()
            before = state.step
            try:
                updates = self._apply()
                self._moments |= self._next_moments
                self.zero_grad()
                state.set_step(before + 1)
            except BaseException:
                # What has been applied must not be so again, and these weights are of a version that nobody is sent.
                self._broke_off = True
                self.zero_grad()
                self.skipped_steps += state.step == before
                state.set_step(before + 1)
                raise
        self._skips = False  # before the listeners, of which one may fail
        for listener in self.listeners:
            listener(state.step, updates)
        return loss

    def _apply(self) -> list[SketchUpdate]:
        """Change the weights, a matrix at a time; the updates are kept only if somebody listens."""
        weights = self._weights()
        kept: list[SketchUpdate] = []
        group, drawn = None, None
        for layer, update in self._proposed_updates():
            if layer.group is not group:  # its members are neighbours
                group, drawn = layer.group, layer.group.drawn_for_update()
            block, rows, cols = distributed.local_block(weights[layer.index])
            update.apply_(block, rows, cols, drawn=drawn)
            if self.listeners:
                kept.append(update)
        return kept

    def _proposed_updates(self) -> Iterator[tuple[SketchLinear, SketchUpdate]]:
        """The proposed update of each matrix, scaled by α and quantized: of some matrices at a time, of which none is large."""
        state = self.sketches
        names = [layer.name for layer in self.layers]
        rounding = [derive_key(state.seed, state.step, name, "rounding") for name in names]
        rounding_keys = torch.tensor(rounding, dtype=torch.int32, device="cpu").to(state.flat.device)
        for sketches, layers in state.rank_blocks():
            for members, rows in _in_parts(layers, sketches.shape[1]):
                q = torch.empty(rows[1] - rows[0], sketches.shape[1], dtype=torch.int8, device=sketches.device)
                exponent = torch.empty(len(q), dtype=torch.int8, device=sketches.device)
                coefficients = torch.cat([layer.coefficient.expand(layer.out_features) for layer in members])
                for start, stop in row_blocks((0, len(q)), q.shape[1], FACTOR_ELEMENTS):
                    part = slice(start, stop)
                    factor = sketches[rows[0] :][part] * coefficients[part, None]
                    q[part], exponent[part] = quantize(factor.mul_(self._alpha))
                sizes = [layer.out_features for layer in members]
                for layer, own_q, own_exponent in zip(members, q.split(sizes), exponent.split(sizes), strict=True):
                    update = SketchUpdate(
                        name=layer.name,
                        projection=layer.group.kind,
                        in_features=layer.in_features,
                        projection_key=layer.group.key,
                        rounding_key=rounding_keys[layer.index],
                        q=own_q,
                        exponent=own_exponent,
                    )
                    if self.listeners:  # whoever keeps one update of several must not keep the memory of all
                        update.q, update.exponent = own_q.clone(), own_exponent.clone()
                    yield layer, update

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the sketches; drop a proposal."""
        self.sketches.zero_()
        self._next_moments = {}

    # ------------------------------------------------------------------ several ranks

    def _weights(self) -> list[torch.Tensor]:
        """The weights in the order of the layers; under FSDP2 the shards, also where whole ones are gathered just now."""
        distributed.reshard(self._model)
        return [layer.weight for layer in self.layers]

    def _check_ranks(self, max_grad_norm: float | None) -> None:
        """Once, before the first step: the ranks have the same settings, projections and weights."""
        if self._ranks_agree:
            return
        weights = {layer.name: weight for layer, weight in zip(self.layers, self._weights(), strict=True)}
        distributed.check_sharding(self._model, weights)
        if distributed.world_size() > 1:
            state = self.sketches
            shapes = [(layer.name, layer.out_features, layer.group.rank) for layer in self.layers]
            rates = [self.param_groups[0]["lr"], self.param_groups[0]["initial_lr"], max_grad_norm]
            drawn = {(g.kind, g.rank, g.in_features): g for g in state.groups}
            bases = {
                g.name: projection_basis(g.kind, g.key, g.rank, g.in_features, cols=(0, min(64, g.in_features)))
                for g in drawn.values()
            }
            # Where weights are sharded the ranks hold different parts, which FSDP2 took from one rank or loaded itself.
            plain = {name: p for name, p in self._model.named_parameters() if not isinstance(p, DTensor)}
            values = {
                "the matrices that are trained, or their settings": distributed.crc([self.config.to_dict(), shapes]),
                "the learning rate or max_grad_norm": distributed.crc(rates),
                "the seed or the step": distributed.crc([state.seed, state.step]),
                "the random projections": distributed.fingerprint({"keys": state.keys} | bases),
                "the weights": distributed.fingerprint(plain),
            }
            distributed.check_agreement(values, state.flat.device)
        self._ranks_agree = True

    # ------------------------------------------------------------------ state

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a SketchOptimizer cannot be copied or pickled without its model: give the model's copy a new one, and "
            "load state_dict() into it"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with an entry `sketch` in the parameter group: step, seed, moments, mismatch, and whose they are.

        It is there and not under `state` because checkpoint libraries drop the state of parameters that do not require
        grad. It has the same entries at all times.
        """
        state, sketches = super().state_dict(), self.sketches
        counters = [sketches.step, sketches.seed, self.skipped_steps]
        state["param_groups"][0]["sketch"] = {
            "format_version": STATE_FORMAT_VERSION,
            "config": json.dumps({name: getattr(self.config, name) for name in _RESUMED}),
            "matrices": json.dumps({layer.name: layer.out_features for layer in self.layers}),
            "counters": torch.tensor(counters, device=sketches.flat.device),
            "mismatch": self.mismatch,
            "moments": dict(self._moments),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what [`state_dict`] returned. No weight moves.

        Raises:
            ValueError: The state is not of this optimizer, of another format version, or of another set of matrices or method.
        """
        first, *others = state_dict["param_groups"]
        sketch = first.get("sketch")
        if sketch is None:
            if "sketch" in state_dict:
                raise ValueError(_other_version(state_dict["sketch"].get("format_version")))
            raise ValueError("this is not the state of a SketchOptimizer: it has no entry 'sketch'")
        if sketch["format_version"] != STATE_FORMAT_VERSION:
            raise ValueError(_other_version(sketch["format_version"]))
        saved = json.loads(sketch["config"])
        changed = {name: value for name, value in saved.items() if getattr(self.config, name) != value}
        if changed:
            was = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            now = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in changed)
            raise ValueError(f"the run was saved with {was} and is resumed with {now}: resume with the same settings")
        saved, here = json.loads(sketch["matrices"]), {layer.name: layer.out_features for layer in self.layers}
        if [*saved.items()] != [*here.items()]:
            odd = sorted({name for name, _ in saved.items() ^ here.items()}) or ["their order"]
            raise ValueError(f"the optimizer state belongs to other matrices; it differs in {', '.join(odd[:5])}")
        moments = {kind: self._new_moment() for kind in self._moments}
        for kind, moment in moments.items():  # of sgd there are none: checkpoint libraries leave empty entries out
            if sketch["moments"][kind].shape != moment.shape:
                raise ValueError(
                    f"the optimizer state has {sketch['moments'][kind].numel()} numbers in its {kind} moment, and "
                    f"{moment.numel()} are needed"
                )
            moment.copy_(sketch["moments"][kind])
        group = {name: value for name, value in first.items() if name != "sketch"}
        super().load_state_dict({"state": {}, **state_dict, "param_groups": [group, *others]})
        self.zero_grad()
        step, seed, self.skipped_steps = sketch["counters"].tolist()
        if seed != self.sketches.seed:
            logger.warning(
                "The run goes on with the seed of its projections, %d, and not with %d.", seed, self.sketches.seed
            )
        self._moments = moments
        self.mismatch = sketch["mismatch"]
        self._ranks_agree = self._broke_off = self._skips = False
        self.sketches.step = step
        self.sketches.set_seed(seed)

    @property
    def _updates(self) -> int:
        """Steps that have changed the moments."""
        return self.sketches.step - self.skipped_steps

    def _next_moment(self, kind: str) -> torch.Tensor:
        """A running moment of all matrices, for a rule to update in place: a copy, until the proposal is applied."""
        flat, moment = self.sketches.flat, self._moments[kind]
        if moment.is_meta:  # made before the model had its weights
            moment = self._new_moment()
        self._next_moments[kind] = moment.to(flat.device, flat.dtype, copy=True)
        return self._next_moments[kind]

    def _new_moment(self) -> torch.Tensor:
        """Zeros in one 1-D tensor: per row for row_adam, per entry for adam."""
        flat = self.sketches.flat
        return torch.zeros_like(flat) if self.config.update_rule == "adam" else flat.new_zeros(sum(self.sizes))

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """What training keeps from step to step beside the weights: `sketch`, `projection` and `optimizer`."""
        state = self.sketches
        kept = [basis for group in state.groups for basis in group.kept]
        last = [self.grad_norm, self.update_ratio]
        return {
            "sketch": [state.flat],
            "projection": [state.keys, state.anchor, *kept],
            "optimizer": [*self._moments.values(), *(norm for norm in last if norm is not None)],
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of [`state_tensors`]."""
        return sum(tensor.untyped_storage().nbytes() for part in self.state_tensors().values() for tensor in part)

    # ------------------------------------------------------------------ helpers

    def _by_group(self) -> list[tuple[ProjectionGroup, list[tuple[int, SketchLinear]]]]:
        members: dict[ProjectionGroup, list[tuple[int, SketchLinear]]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.group, []).append((index, layer))
        return list(members.items())

    def _per_layer(self, value: Callable[[SketchLinear], int]) -> torch.Tensor:
        """float64 `(M,)`."""
        values = [value(layer) for layer in self.layers]
        return torch.tensor(values, dtype=torch.float64, device=self.sketches.flat.device)

    def _check_finite(self, norms: torch.Tensor) -> None:
        bad = [layer.name for layer, ok in zip(self.layers, norms.isfinite().tolist(), strict=True) if not ok]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise FloatingPointError(
                f"the gradient sketch of {', '.join(bad[:3])}{more} is not finite. No weight has been changed. Look for a "
                "non-finite loss or reward, or lower the learning rate"
            )


def _other_version(version: Any) -> str:
    return (
        f"the optimizer state has format version {version}, this version of trl_sketch reads {STATE_FORMAT_VERSION}: "
        "resume with the version that wrote it"
    )


def _in_parts(layers: list[SketchLinear], rank: int) -> Iterator[tuple[list[SketchLinear], tuple[int, int]]]:
    """Layers in runs whose factors make up a temporary of an update, and their rows among those of all `layers`."""
    members: list[SketchLinear] = []
    start = stop = 0
    for layer in layers:
        if members and (stop - start + layer.out_features) * rank > FACTOR_ELEMENTS:
            yield members, (start, stop)
            members, start = [], stop
        members.append(layer)
        stop += layer.out_features
    yield members, (start, stop)
