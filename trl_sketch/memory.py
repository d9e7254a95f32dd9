"""Predict the memory of one training step from shapes: a closed formula.

It counts, per GPU and in bytes, what is kept from step to step and what the last microbatch of a step adds to it:

| part        | sketch         | lora              | dense        | rgc             | logra           |
|-------------|----------------|-------------------|--------------|-----------------|-----------------|
| weights     | 2 each         | 2 each            | 4 each       | 4 trained, 2 else | 4 each        |
| sketch      | 4 r ΣO         |                   |              | 4 r ΣO          | 8 r ΣO (S and U) |
| projection  | r Σ(2√I) + ΣI or less |                   |              | 2 r ΣI          | 4 r ΣI          |
| adapter     |                | 4 r (ΣO + ΣI)     |              |                 |                 |
| gradients   |                | 4 r (ΣO + ΣI)     | 4 N          |                 |                 |
| optimizer   | 4 ΣO (RowAdam) | 8 r (ΣO + ΣI)     | 8 N          |                 | 4 ΣO            |

N is the number of trained weights (those of attention and MLP, for every method), ΣO and ΣI are the rows and columns of
their matrices together. The first four columns give the gaps of RGC to LoRA that RGC's authors predicted and measured
(figure 2 there); `logra` is the storage that fits the savings that the LoGRA paper measured (table 1). With
`dtype="float32"` weights take four bytes, and nothing is cast.

What a microbatch adds, with t tokens in all, c bytes a computed number, width h, queries q, keys k, MLP m: per layer

    8ht + 4(q + k)t (if there are query and key norms) + c(2q + 2k)t + 3cmt

for norms, attention (a flash kernel) and MLP as transformers computes them; the sketch adds c r t for each group of
matrices with the same input, LoRA c(ΣI + r)t, because PEFT casts the input of every adapter, and dense its inputs. With
checkpointing one layer's are there at a time, and c h t for each layer. Where weights are cast (rgc, dense) or adapters
(lora), their bf16 copies count. TRL's fused LM head works in tiles of at most 4,096 tokens by 32,768 logits.

With several processes the engine is FSDP2: weights, adapters, gradients and moments are sharded, sketches are replicated,
and the embedding, the LM head and two layers are gathered at a time. (Under DDP nothing is sharded: take world_size=1.)

The formula agrees with [`memory_measure.measure`] within 3 percent; see tests/test_memory.py. Not in it: the CUDA context,
fragmentation, generation, and vLLM in the same process.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from transformers import PretrainedConfig

from .memory_models import Shape, load_config, shape_of


METHODS = ("sketch", "lora", "dense", "rgc", "logra")
PARTS = (
    "weights",
    "gathered",
    "sketch",
    "projection",
    "adapter",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "probe",
    "working",
)
ALIGNMENT = 512  # bytes, of CUDA's caching allocator
PROBE_RESPONSES = 2  # SketchConfig.kl_probe_responses
UPDATE_TEMPORARY = 64 * 2**20  # bound of what an update needs on the way
GIB = 2**30

_HEAD_TOKENS, _HEAD_LOGITS = 4096, 32768  # of a tile of TRL's fused LM head
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class Plan:
    """A training step whose memory is asked for.

    Args:
        config: Configuration of the model; see [`plan_for`].
        method: `sketch`, `lora`, `dense`, `rgc` or `logra`.
        rank: r; of no meaning for dense.
        tokens: Of a sequence, prompt and completion together.
        microbatch: Sequences that go through the model together.
        checkpointing: Whether activations are recomputed (gradient_checkpointing).
        dtype: That the model computes in.
        world_size: GPUs, with FSDP2 if several.

    Raises:
        ValueError: A field has a value that is not allowed.
    """

    config: PretrainedConfig
    method: str = "sketch"
    rank: int = 256
    tokens: int = 1024
    microbatch: int = 1
    checkpointing: bool = True
    dtype: torch.dtype = torch.bfloat16
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {', '.join(METHODS)}")
        for name, least in (("rank", 1), ("tokens", 2), ("microbatch", 1), ("world_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        if self.dtype not in _DTYPES.values():
            raise ValueError(f"dtype={self.dtype} must be one of {', '.join(_DTYPES)}")
        most = max(matrix.k for matrix in self.shape.matrices)
        if self.method != "dense" and self.rank > most:
            raise ValueError(
                f"rank={self.rank} is above {most}, the inputs of the model's largest matrix: choose a rank of at most {most}"
            )

    @property
    def shape(self) -> Shape:
        return _shape_of(self.config)

    @cached_property
    def batch_tokens(self) -> int:
        """t, tokens of a microbatch."""
        return self.tokens * self.microbatch

    @property
    def adapter_weights(self) -> int:
        """Numbers in LoRA's adapters: r (ΣO + ΣI)."""
        return self.rank * (self.shape.outputs + self.shape.inputs)


def plan_for(model: str, dtype: str = "bfloat16", **arguments: Any) -> Plan:
    """The plan for a model by name or folder; the other arguments are those of [`Plan`].

    Raises:
        ValueError: The model cannot be loaded, or an argument is not allowed; the message names it, and what to do.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(_DTYPES)}")
    return Plan(load_config(model), dtype=_DTYPES[dtype], **arguments)


_SHAPES: dict[int, tuple[PretrainedConfig, Shape]] = {}


def _shape_of(config: PretrainedConfig) -> Shape:
    """[`shape_of`], once a configuration (which has no hash)."""
    if id(config) not in _SHAPES:
        _SHAPES[id(config)] = config, shape_of(config)
    return _SHAPES[id(config)][1]


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes on one GPU.

    Attributes:
        state: Part → bytes that are there all the time.
        phases: Phase → part → bytes in its course: those of `state`, and what the phase adds at its peak.
    """

    state: dict[str, int]
    phases: dict[str, dict[str, int]]

    @property
    def peaks(self) -> dict[str, int]:
        """Phase → peak."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def total(self) -> int:
        """The peak of the step."""
        return max(self.peaks.values())

    @property
    def phase(self) -> str:
        """The phase that sets the peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def parts(self) -> dict[str, int]:
        """Part → bytes at the peak of the step; they sum to `total`."""
        return self.phases[self.phase]


def predict(plan: Plan) -> Prediction:
    """The memory of a training step; see the top of this module."""
    state = predict_state(plan)
    steps = _Step(plan)
    phases = {"head": steps.head(), "backward": steps.backward()}
    if plan.method == "lora":
        phases["forward"] = steps.forward_of_adapter()
    if plan.method == "sketch":
        phases["probe"] = steps.probe()
    if plan.method in ("sketch", "rgc", "logra"):
        phases["update"] = {"working": _update_temporary(plan)}
    return Prediction(state, {phase: state | added for phase, added in phases.items()})


def _update_temporary(plan: Plan) -> int:
    """A bound of what an update needs on the way: blocks of a matrix and of factors, or the whole of small ones."""
    ranks = [(matrix, min(plan.rank, matrix.k)) for matrix in plan.shape.matrices]
    blocks = max(16 * matrix.d * matrix.k + 4 * matrix.k * rank for matrix, rank in ranks)
    factors = 13 * sum(matrix.d * rank for matrix, rank in ranks)  # fp32 and its scaled copies, int8
    return min(UPDATE_TEMPORARY, blocks + factors)


def predict_state(plan: Plan) -> dict[str, int]:
    """Part → bytes that are kept from step to step, to the byte where nothing is sharded."""
    shape, rank, world = plan.shape, plan.rank, plan.world_size
    compute = plan.dtype.itemsize
    kept_in_fp32 = plan.method in ("dense", "logra")
    trained = 4 if kept_in_fp32 or plan.method == "rgc" else compute
    other = 4 if kept_in_fp32 else compute
    state = {
        "weights": _shard(
            trained * (shape.trained + shape.biases) + other * (shape.other_weights - shape.biases), world
        )
        + shape.buffer_bytes,
    }
    if world > 1:
        layers = 2 * shape.layer_weights
        state["gathered"] = compute * (shape.outside_layers + layers * (2 if plan.method == "dense" else 1))
    if plan.method in ("sketch", "rgc", "logra"):
        rows = sum(matrix.d * min(rank, matrix.k) for matrix in shape.matrices)
        columns = sum(matrix.k * min(rank, matrix.k) for matrix in shape.matrices)
        groups = {m.group if plan.method == "sketch" else m.name: m.k for m in shape.matrices}
        seeds = 4 * len(groups) + 4  # and the anchor of autograd
        if plan.method == "sketch":
            seeds += sum(_packed_signs(min(rank, k), k) for k in groups.values())
        state["sketch"] = (8 if plan.method == "logra" else 4) * rows
        state["projection"] = seeds + {"rgc": compute, "logra": 4}.get(plan.method, 0) * columns
        state["optimizer"] = (0 if plan.method == "rgc" else 4 * shape.outputs) + 16  # and two norms
    elif plan.method == "lora":
        numbers = plan.adapter_weights
        state["adapter"] = _shard(4 * numbers, world)
        state["gradients"] = _shard(4 * numbers, world)
        state["optimizer"] = _shard(8 * numbers, world) + 4 * 2 * len(shape.matrices)  # and step counts
    else:
        state["gradients"] = _shard(4 * shape.trained, world)
        state["optimizer"] = _shard(8 * shape.trained, world) + 4 * len(shape.matrices)
    return state


def crossing_rank(plan: Plan, other: str) -> int | None:
    """The smallest rank from which on `plan.method` needs no more than the method `other` at the same rank.

    Returns:
        `None` if there is no such rank. Below the one returned it needs more; 1: at no rank.
    """

    def needs_less(rank: int) -> bool:
        mine, theirs = (replace(plan, method=method, rank=rank) for method in (plan.method, other))
        return predict(mine).total <= predict(theirs).total

    return _first(needs_less, max(matrix.k for matrix in plan.shape.matrices))


def largest_rank(plan: Plan, limit: int) -> int | None:
    """The largest rank whose step takes at most `limit` bytes; `None` if none does."""
    most = max(matrix.k for matrix in plan.shape.matrices)
    too_large = _first(lambda rank: predict(replace(plan, rank=rank)).total > limit, most)
    if too_large is None:
        return most
    return too_large - 1 or None


def _first(holds: Any, most: int) -> int | None:
    """The smallest of 1 … most for which `holds`, which goes on to hold once it does."""
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _shard(size: int, world: int) -> int:
    return -(-size // world)


@lru_cache
def _packed_signs(rank: int, k: int) -> int:
    """Bytes of the compact form of Hadamard signs `(rank, k)`; see `projection.Signs`."""
    width = 1 << (max(k - 1, 1).bit_length() + 1) // 2
    return rank * (-(-k // width) + width) + k


class _Step:
    """What the phases of a microbatch add to the state, in bytes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.shape = plan, plan.shape
        self.t = plan.batch_tokens
        self.c = plan.dtype.itemsize
        self.is_cast = self.c == 2  # autocast
        self.residual = 4 if plan.method in ("dense", "logra") else self.c  # bytes a number in the residual stream
        # bf16 copies of fp32 weights; FSDP2 gathers in bf16 instead
        casts = {"rgc": self.shape.trained, "dense": self.shape.trained, "logra": self.shape.trained}
        copies = casts | {"lora": plan.adapter_weights} if plan.world_size == 1 else {"lora": plan.adapter_weights}
        self.copies = 2 * copies.get(plan.method, 0) if self.is_cast else 0

    @property
    def stream(self) -> int:
        """The residual stream, `(t, h)`."""
        return self.residual * self.shape.width * self.t

    def layer(self) -> int:
        """What one layer keeps for backward."""
        shape, t, c, layers = self.shape, self.t, self.c, self.shape.layers
        norms = 2 * (4 * shape.width + 4)
        if shape.has_qk_norm:
            norms += 4 * (shape.query + shape.key_value) + 4 * (shape.heads + shape.kv_heads)
        attention = c * 2 * (shape.query + shape.key_value) + 4 * shape.heads
        mlp = 3 * c * shape.intermediate
        return t * (norms + attention + mlp) + t * c * self._inputs() // layers + self.copies // layers

    def _inputs(self) -> int:
        """Numbers a token that all layers keep of the inputs of their matrices."""
        shape, rank = self.shape, self.plan.rank
        if self.plan.method == "sketch":
            return sum({matrix.group: min(rank, matrix.k) for matrix in shape.matrices}.values())
        if self.plan.method in ("rgc", "logra"):
            return sum(min(rank, matrix.k) for matrix in shape.matrices)
        shared = shape.layers * (
            2 * shape.width + shape.intermediate
        )  # what each group reads, the attention's output aside
        if self.plan.method == "lora":
            return (shape.inputs if self.is_cast else shared) + rank * len(shape.matrices)
        return shape.inputs - shape.layers * shape.query if self.is_cast else shared

    def kept(self) -> int:
        """What the forward pass of the backbone keeps."""
        shape = self.shape
        outside = 4 * shape.width * self.t + 2 * self.residual * (shape.query // shape.heads) * self.plan.tokens
        if self.plan.checkpointing:
            return shape.layers * self.stream + outside
        first = (4 * shape.width + 4) * self.t  # the first norm's input, which needs no gradient
        return shape.layers * self.layer() - first + outside

    def _tile(self) -> int:
        """A tile of logits, of one size whatever the vocabulary."""
        return self.c * min(self.t, _HEAD_TOKENS) * _HEAD_LOGITS

    def _head_casts(self) -> tuple[int, int]:
        """bf16 copies of a tile's tokens, and of its rows of the LM head."""
        if self.residual == self.c or self.plan.world_size > 1:
            return 0, 0
        width = self.c * self.shape.width
        return width * min(self.t, _HEAD_TOKENS), width * min(self.shape.vocabulary, _HEAD_LOGITS)

    def forward_of_adapter(self) -> dict[str, int]:
        """The last down_proj with LoRA: PEFT casts its input to fp32, and autocast casts that back."""
        shape, t, c = self.shape, self.t, self.c
        mlp = shape.intermediate * t
        casts = (4 + c) * mlp if self.is_cast and self.plan.checkpointing else 4 * mlp if self.is_cast else 0
        cached = self.copies if self.plan.checkpointing else 0
        activations = self.kept() - 4 * shape.width * t + cached
        return {"activations": activations, "working": casts + c * mlp + 4 * c * shape.width * t}

    def head(self) -> dict[str, int]:
        """The forward pass of the LM head."""
        tokens, rows = self._head_casts()
        cached = self.copies if self.plan.checkpointing and self.plan.method in ("lora", "dense") else 0
        return {"activations": self.kept() + 2 * self.stream + cached, "logits": self._tile() + tokens + rows}

    def backward(self) -> dict[str, int]:
        """Backward through the LM head, or through the last layer, whichever takes more."""
        tokens, rows = self._head_casts()
        summed = 4 * self.shape.width * self.t
        returned = self.stream if self.residual != 4 else 0
        head = {
            "activations": self.kept() + self.stream,
            "logits": self._tile() + tokens + 2 * rows,
            "working": summed + returned,
        }
        layer = {"activations": self._kept_in_layer(), "working": self._layer_working()}
        return max(head, layer, key=lambda parts: sum(parts.values()))

    def _kept_in_layer(self) -> int:
        if not self.plan.checkpointing:
            return self.kept() - 4 * self.shape.width * self.t
        return self.shape.layers * self.stream + self.layer()

    def _layer_working(self) -> int:
        """The MLP's derivatives, or what its forward has in hand when it is computed again."""
        shape, t, c, method = self.shape, self.t, self.c, self.plan.method
        hidden, mlp = c * shape.width * t, c * shape.intermediate * t
        kept_product = mlp if method in ("lora", "dense") else 0  # the input of down_proj, kept for its gradient
        down = 2 * shape.width * shape.intermediate if self.copies and method in ("rgc", "logra", "dense") else 0
        derivatives = 3 * mlp + hidden - kept_product - down
        again = 4 * hidden + (mlp if method != "dense" else 0)
        if method == "lora" and self.is_cast:
            again += 4 * shape.intermediate * t  # PEFT casts the input to fp32 first
        return max(derivatives, again) if self.plan.checkpointing else derivatives

    def probe(self) -> dict[str, int]:
        """The KL probe by `jvp`: values and derivatives, and no graph."""
        shape, c = self.shape, self.c
        t = min(PROBE_RESPONSES, self.plan.microbatch) * self.plan.tokens
        stream = 4 * shape.width * t
        scores = 4 * min(2**22, shape.query * t)
        heads = 4 * 2 * (shape.query + shape.key_value) + 2 * c * (shape.query + shape.key_value)
        attention = 5 * stream + heads * t + 6 * scores
        mlp = 5 * stream + 9 * c * shape.intermediate * t
        rows = min(2048, 2**22 // shape.width)
        head = 3 * stream + 4 * rows * (shape.width + 6 * min(t, 1024))
        return {"probe": max(attention, mlp, head) + 4 * shape.outputs}  # and the moment that the step will bring
