"""Predicted KL of a proposed update, and the budget that scales it (LoGRA, section 2.3 and appendices A and D.1)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from . import distributed, probe
from .model import sketch_state
from .probe import Inputs


# The scores are computed tile by tile, so that what a probe needs beside the hidden states stays below 64 MiB.
_POSITIONS = 1024  # probed positions that go through the LM head together
_VOCABULARY = 2048  # rows of the LM head that are upcast together, at most
_HEAD_ELEMENTS = 2**22  # of those rows


def kl_budget(step: int, *, start: float, final: float, steps: int, schedule: str = "cosine") -> float:
    """Budget δ of an optimizer step (LoGRA, equation 16), in nats per predicted token.

    Args:
        step: u, counted from 1.
        start: δ_max, the budget of step 1.
        final: δ_min, reached at step `steps` and kept from there.
        steps: H, the horizon.
        schedule: `cosine`, or `constant` (always `start`).
    """
    if schedule == "constant":
        return start
    course = min(1.0, (step - 1) / (steps - 1)) if steps > 1 else 1.0
    return final + (start - final) / 2 * (1 + math.cos(math.pi * course))


def step_scale(q: float, budget: float, alpha_max: float) -> float:
    """α = min(α_max, √(δ/q)) (LoGRA, equation 7); 1 for q = 0, which must not enlarge a step.

    Raises:
        FloatingPointError: q is negative or not finite.
    """
    if not 0 <= q < math.inf:
        raise FloatingPointError(
            f"the predicted KL of the proposed update is {q}. No weight has been changed. Look for weights or logits that are "
            "not finite; skip_nonfinite_steps=True leaves such a step out"
        )
    return 1.0 if q == 0 else min(alpha_max, math.sqrt(budget / q))


def effective_budget(budget: float, mismatch: float | None, floor: float) -> float:
    """max(δ - κ, floor·δ) (LoGRA, equation 17); δ where there is no measurement κ of the mismatch."""
    return budget if mismatch is None else max(budget - max(mismatch, 0.0), floor * budget)


def measure_mismatch(batches: Sequence[dict[str, Any]], eos_token_ids: Sequence[int]) -> float | None:
    """Mean of rollout minus trainer log-probability over the tokens of completed responses, clamped at 0; or `None`.

    Every rank of a process group must call this. A response is completed if its last token ends it; one that was cut
    off at the length limit is left out.

    Args:
        batches: TRL's, with `completion_ids`, `completion_mask`, `sampling_per_token_logps` and `old_per_token_logps`,
            each `(batch, length)`.
        eos_token_ids: Tokens that end a response.
    """
    total = torch.zeros(2, dtype=torch.float64, device="cpu")
    for batch in batches:
        sampled, trained = batch.get("sampling_per_token_logps"), batch.get("old_per_token_logps")
        if sampled is None or trained is None:
            continue
        ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
        last = (mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)).clamp_min(0)
        is_complete = torch.isin(ids.gather(1, last[:, None]), torch.tensor(list(eos_token_ids), device=ids.device))
        difference = (sampled - trained).double()
        counted = mask & is_complete & difference.isfinite()
        if batch.get("tool_mask") is not None:
            counted &= batch["tool_mask"].bool()
        total += torch.stack([difference[counted].sum(), counted.sum().double()]).cpu()
    value, count = _sum_over_ranks(total, batches[0]["completion_ids"].device if batches else total.device)
    return max(value / count, 0.0) if count else None


def predicted_kl(
    model: PreTrainedModel,
    batches: Inputs | Sequence[Inputs],
    *,
    temperature: float = 1.0,
    method: str = "jvp",
    max_tokens: int | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> float:
    """q(D): the KL divergence that the proposed update causes per predicted token, to second order (LoGRA, equation 6).

    The proposal is that of [`SketchOptimizer.propose`] at α = 1; scaled by α it causes α²q. No weight, gradient, buffer,
    mode or random state of the model changes. Every rank of a process group must call this; the result averages over
    the positions of all of them.

    Args:
        model: A causal language model with a proposed update.
        batches: Arguments of the model's forward, or several of them. The contexts are the positions whose next label
            is not -100; without labels, those of the attention mask.
        temperature: T, of the sampling.
        method: `jvp` or `finite_difference`.
        max_tokens: Use at most this many positions of each response, the first ones.
        autocast_dtype: The type that the model is trained in by autocast, if it is (`jvp`).

    Raises:
        NotImplementedError: `jvp`, and an operation of the model has no forward-mode derivative.
        ValueError: No update has been proposed, or an argument is not allowed.
    """
    if not sketch_state(model).proposed:
        raise ValueError("predicted_kl() needs a proposed update: call propose() of the SketchOptimizer first")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if method not in ("jvp", "finite_difference"):
        raise ValueError(f"method must be jvp or finite_difference, got {method!r}")
    total = torch.zeros(2, dtype=torch.float64, device="cpu")
    for inputs in [batches] if isinstance(batches, dict) else batches:
        inputs, positions = probed_positions(inputs, max_tokens)
        if method == "jvp":
            h, rate = probe.jvp(model, inputs, autocast_dtype)
        else:
            h, rate = probe.finite_difference(model, inputs)
        h, rate = h[positions], rate[positions]  # the states at the other positions go before the scores come
        variances = _score_variance(model, h, rate, temperature)
        total += torch.stack([variances.sum(), variances.new_tensor(len(variances))])
    return _mean_over_ranks(total, model) / (2 * temperature**2)


def realized_kl(
    model: PreTrainedModel,
    batches: Sequence[Inputs],
    before: Sequence[torch.Tensor],
    *,
    temperature: float = 1.0,
    max_tokens: int | None = None,
) -> float:
    """KL divergence per predicted token from the policy that had the hidden states `before` to the present one.

    Args:
        model: The model, after its update.
        batches: Arguments of the model's forward.
        before: [`reference_states`] of each of them, from before the update.
        temperature: T.
        max_tokens: As it was for `before`.
    """
    total = torch.zeros(2, dtype=torch.float64, device="cpu")
    for old, new in zip(before, reference_states(model, batches, max_tokens=max_tokens), strict=True):
        divergence = _divergence(model, old, new - old, temperature)
        total += torch.stack([divergence.sum(), divergence.new_tensor(len(divergence))])
    return _mean_over_ranks(total, model)


def reference_states(
    model: PreTrainedModel, batches: Sequence[Inputs], *, max_tokens: int | None = None
) -> list[torch.Tensor]:
    """Hidden states `(positions, width)` at the probed positions of each batch, in fp32 arithmetic."""
    states = []
    for inputs in batches:
        inputs, positions = probed_positions(inputs, max_tokens)
        states.append(probe.hidden_states(model, inputs)[positions])
    return states


def even_batches(batches: list[Inputs], model: nn.Module) -> list[Inputs]:
    """As many batches on every rank: a rank with fewer gets batches of one token and no position that counts.

    The ranks of a sharded model must run equally many forward passes, and all must learn what works. Every rank of a
    process group must call this.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    empty = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    return batches + [empty] * (distributed.largest(len(batches), device) - len(batches))


def probed_positions(inputs: Inputs, max_tokens: int | None = None) -> tuple[Inputs, torch.Tensor]:
    """The inputs, cut behind the last context that is needed, and a bool mask `(batch, length)` of the contexts."""
    ids = inputs["input_ids"]
    if inputs.get("shift_labels") is not None:
        valid = inputs["shift_labels"] != -100
    else:
        labels = inputs.get("labels")
        if labels is None:
            mask = inputs.get("attention_mask")
            labels = ids if mask is None or mask.ndim != 2 else ids.masked_fill(mask == 0, -100)
        valid = F.pad(labels[:, 1:] != -100, (0, 1))
    if max_tokens is not None:
        valid = valid & (valid.cumsum(dim=1) <= max_tokens)
    columns = valid.any(dim=0).nonzero()
    length = int(columns[-1]) + 1 if len(columns) else 1
    is_cut = {
        name: isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[:2] == ids.shape
        for name, value in inputs.items()
    }
    cut = {name: value[:, :length] if is_cut[name] else value for name, value in inputs.items()}
    return cut, valid[:, :length]


# ---------------------------------------------------------------------- through the LM head, in chunks


def _score_variance(model: PreTrainedModel, h: torch.Tensor, rate: torch.Tensor, temperature: float) -> torch.Tensor:
    """Var_{v∼p}[ż_v] of each context, float64 `(positions,)` on the CPU, from `h` and `ḣ (positions, width)`."""
    softcap = _logit_softcap(model)
    head = _head(model)
    results = []
    for h_part, rate_part in zip(h.split(_POSITIONS), rate.split(_POSITIONS), strict=True):
        variance = _Variance(len(h_part), h.device)
        for z, dz in _scores(head, h_part, rate_part):
            if softcap is not None:
                z = softcap * torch.tanh(z / softcap)
                dz = dz * (1 - (z / softcap).square())
            variance.add(z / temperature, dz)
        results.append((variance.square / variance.weight).cpu())
    return torch.cat(results) if results else torch.zeros(0, dtype=torch.float64, device="cpu")


class _Variance:
    """Variance of x under softmax(z), over chunks of the vocabulary, with running maximum, mean and squared deviation.

    (The mean of the squares minus the square of the mean would leave nothing but rounding errors, of either sign, for a
    policy that is sure of its next token.)
    """

    def __init__(self, positions: int, device: torch.device) -> None:
        zeros = torch.zeros(positions, dtype=torch.float64, device=device)
        self.maximum, self.weight, self.mean, self.square = zeros - math.inf, zeros, zeros, zeros

    def add(self, z: torch.Tensor, x: torch.Tensor) -> None:
        """Add a chunk: scores and values, both `(positions, chunk)`."""
        top = z.amax(dim=1, keepdim=True)
        p = torch.exp(z - top)
        total = p.sum(dim=1, keepdim=True)
        mean = (p * x).sum(dim=1, keepdim=True) / total
        square = (p * (x - mean).square()).sum(dim=1)
        top, total, mean, square = (t.flatten().double() for t in (top, total, mean, square))

        maximum = torch.maximum(self.maximum, top)
        old, new = torch.exp(self.maximum - maximum), torch.exp(top - maximum)
        before, added = self.weight * old, total * new
        distance = mean - self.mean
        self.maximum, self.weight = maximum, before + added
        self.mean = self.mean + distance * added / self.weight
        self.square = self.square * old + square * new + distance.square() * before * added / self.weight


def _divergence(model: PreTrainedModel, h: torch.Tensor, change: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(p(h) ‖ p(h + change)) of each context, float64 `(positions,)` on the CPU.

    With d the change of the scores over T it is log E_p[e^d] − E_p[d]; small differences of large numbers are avoided.
    """
    softcap = _logit_softcap(model)
    head = _head(model)
    results = []
    for h_part, change_part in zip(h.split(_POSITIONS), change.split(_POSITIONS), strict=True):
        moments = _Moments(2)
        for z, dz in _scores(head, h_part, change_part):
            if softcap is not None:
                new = softcap * torch.tanh((z + dz) / softcap)
                z = softcap * torch.tanh(z / softcap)
                dz = new - z
            dz = dz / temperature
            moments.add(z / temperature, dz, torch.expm1(dz) - dz)
        mean, excess = moments.means()
        results.append((torch.log1p(mean + excess) - mean).cpu())
    return torch.cat(results) if results else torch.zeros(0, dtype=torch.float64, device="cpu")


class _Moments:
    """Means under softmax(z) of some quantities, over chunks of the vocabulary, with a running maximum."""

    def __init__(self, quantities: int) -> None:
        self.quantities = quantities
        self.maximum: torch.Tensor | None = None

    def add(self, z: torch.Tensor, *quantities: torch.Tensor) -> None:
        """Add a chunk: scores `(positions, chunk)` and quantities of the same shape."""
        top = z.amax(dim=1)
        if self.maximum is None:
            self.maximum = top
            self.sums = torch.zeros(self.quantities + 1, len(z), dtype=torch.float64, device=z.device)
        maximum = torch.maximum(self.maximum, top)
        self.sums *= torch.exp((self.maximum - maximum).double())
        weight = torch.exp(z - maximum[:, None])
        self.sums += torch.stack([weight.sum(dim=1), *((weight * q).sum(dim=1) for q in quantities)]).double()
        self.maximum = maximum

    def means(self) -> torch.Tensor:
        """float64 `(quantities, positions)`."""
        return self.sums[1:] / self.sums[0]


class _Head(NamedTuple):
    """The LM head: weight `(vocabulary, width)`, bias `(vocabulary,)` or `None`, and the factor of the scores."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float


def _head(model: PreTrainedModel) -> _Head:
    """The whole head; of a sharded model it is gathered, so that every rank must call this."""
    module: Any = model.get_output_embeddings()
    bias = getattr(module, "bias", None)
    weight = distributed.whole(module.weight.detach())
    return _Head(weight, None if bias is None else distributed.whole(bias.detach()), _logit_scale(model))


def _scores(head: _Head, h: torch.Tensor, dh: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scores and their change `(positions, chunk)` in fp32, a chunk of the vocabulary at a time."""
    h, dh = h.float(), dh.float()
    vocabulary, width = head.weight.shape
    step = max(1, min(_VOCABULARY, _HEAD_ELEMENTS // width))
    for start in range(0, vocabulary, step):
        part = slice(start, start + step)
        rows = head.weight[part].float()
        z = F.linear(h, rows, None if head.bias is None else head.bias[part].float())
        yield z.mul_(head.scale), F.linear(dh, rows).mul_(head.scale)


def _logit_softcap(model: PreTrainedModel) -> float | None:
    config = model.config.get_text_config()
    return getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)


def _logit_scale(model: PreTrainedModel) -> float:
    """The factor that some architectures apply to their logits."""
    config = model.config.get_text_config()
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return scaling if config.model_type == "hyperclovax" else 1 / scaling


@torch.no_grad()
def check_head(model: PreTrainedModel, inputs: Inputs) -> None:
    """See that the model's logits are what this module takes them for: the LM head, applied to the backbone's output.

    Args:
        model: A causal language model.
        inputs: Arguments of its forward, of which the first few tokens are used.

    Raises:
        NotImplementedError: They are not, as where a layer stands between the backbone and the head.
    """
    states: list[torch.Tensor] = []
    head = _head(model)
    ids = inputs["input_ids"][:1, :8]
    was_training = model.training
    handle = model.base_model.register_forward_hook(
        lambda module, args, output: states.append(output.last_hidden_state)
    )
    try:
        model.eval()
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1].float()
    finally:
        handle.remove()
        model.train(was_training)
    if not logits.isfinite().all():
        return  # the prediction itself will not be finite, and say so
    h = states[-1][0, -1:]
    z = torch.cat([scores for scores, _ in _scores(head, h, h)], dim=1)[0]
    softcap = _logit_softcap(model)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if z.shape != logits.shape or not torch.allclose(z, logits, rtol=0.05, atol=0.02 * logits.abs().max().item()):
        raise NotImplementedError(
            f"the logits of {type(model).__name__} are not its LM head applied to the output of its base model"
        )


def _mean_over_ranks(total: torch.Tensor, model: nn.Module) -> float:
    """total[0] / total[1] over all ranks; 0 without positions."""
    value, count = _sum_over_ranks(total, next(model.parameters()).device)
    return value / count if count else 0.0


def _sum_over_ranks(total: torch.Tensor, device: torch.device) -> list[float]:
    if dist.is_available() and dist.is_initialized():
        total = total.to(device)
        dist.all_reduce(total)
    return total.tolist()
