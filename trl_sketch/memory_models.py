"""From the name of a model to what its memory depends on, without its weights."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .config import SketchConfig
from .model import get_sketch_model, sketch_state


# Shapes of some common models, from their config.json, so that these need no hub.
BUILT_IN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "model_shapes.json").read_text())
_SAME_SHAPE = ("-Base", "-Instruct")


@dataclass(frozen=True)
class Matrix:
    """A weight `(d, k)` that is trained, and the projection that it shares with others."""

    name: str
    d: int
    k: int
    group: str


@dataclass(frozen=True)
class Shape:
    """What the memory of a model's training depends on.

    Attributes:
        layers: Decoder layers.
        width: h, of the residual stream.
        query: Heads times head dimension.
        key_value: Key-value heads times head dimension.
        heads: Query heads.
        kv_heads: Key-value heads.
        intermediate: m, of the MLP.
        vocabulary: Rows of the LM head.
        has_qk_norm: Whether queries and keys are normalized per head (Qwen3).
        matrices: The trained ones, those of attention and MLP.
        biases: Numbers in the biases of these layers, which are kept in the type of their weights.
        other_weights: Numbers in all parameters but the trained matrices, biases included (a tied head counts once).
        outside_layers: Of these, numbers in parameters outside the decoder layers: embedding, LM head, last norm.
        buffer_bytes: Bytes of the buffers.
    """

    layers: int
    width: int
    query: int
    key_value: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    has_qk_norm: bool
    matrices: tuple[Matrix, ...]
    biases: int
    other_weights: int
    outside_layers: int
    buffer_bytes: int

    @property
    def trained(self) -> int:
        """N, numbers in the trained matrices."""
        return sum(matrix.d * matrix.k for matrix in self.matrices)

    @property
    def outputs(self) -> int:
        """ΣO, rows of all trained matrices."""
        return sum(matrix.d for matrix in self.matrices)

    @property
    def inputs(self) -> int:
        """ΣI, columns of all trained matrices."""
        return sum(matrix.k for matrix in self.matrices)

    @property
    def layer_weights(self) -> int:
        """Numbers in one decoder layer (the mean)."""
        return (self.trained + self.other_weights - self.outside_layers) // self.layers


def load_config(model: str) -> PretrainedConfig:
    """The configuration of a causal language model.

    Args:
        model: A folder with a config.json, the name of a built-in shape, or a name on the hub.

    Raises:
        ValueError: There is no such model, it cannot be fetched, or it is not a causal language model.
    """
    settings = BUILT_IN.get(model) or next(
        (BUILT_IN[model.removesuffix(end)] for end in _SAME_SHAPE if model.removesuffix(end) in BUILT_IN), None
    )
    if settings is not None and not Path(model).is_dir():
        settings = dict(settings)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    if _looks_like_a_folder(model) and not (Path(model) / "config.json").is_file():
        problem = "has no config.json" if Path(model).is_dir() else "does not exist"
        raise ValueError(
            f"model={model!r}: the folder {problem}. Give a folder that save_pretrained() wrote, or a name"
        )
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        known = ", ".join(BUILT_IN)
        offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")
        why = "HF_HUB_OFFLINE is set, and it is not in the cache" if offline else str(error).splitlines()[0]
        raise ValueError(
            f"model={model!r} could not be loaded: {why}. Give a folder with a config.json, a name on the hub, or one of "
            f"the built-in shapes: {known}"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model={model!r} is not a causal language model (model_type {config.model_type!r}): GRPO trains those only"
        )
    return config


def _looks_like_a_folder(model: str) -> bool:
    return Path(model).exists() or model.startswith((".", "/", "~")) or model.count("/") > 1


def meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device: shapes only."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def shape_of(config: PretrainedConfig) -> Shape:
    """The shape of a model, from its modules and its configuration.

    Raises:
        ValueError: The model has layers that sketches do not train; see [`get_sketch_model`].
    """
    model = meta_model(config, torch.bfloat16)
    names = [name for name, _ in model.named_modules()]
    buffers = sum(buffer.numel() * buffer.dtype.itemsize for buffer in model.buffers())
    parameters = dict(model.named_parameters())
    get_sketch_model(model, SketchConfig(rank=1))
    layers = sketch_state(model).layers
    matrices = tuple(
        Matrix(name, layer.out_features, layer.in_features, layer.group.name) for name, layer in layers.items()
    )
    trained = {f"{name}.weight" for name in layers}
    others = {name: p.numel() for name, p in parameters.items() if name not in trained}
    text: Any = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        query=heads * head_dim,
        key_value=kv_heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        has_qk_norm=any(name.endswith("q_norm") for name in names),
        matrices=matrices,
        biases=sum(others.get(f"{name}.bias", 0) for name in layers),
        other_weights=sum(others.values()),
        outside_layers=sum(n for name, n in others.items() if not any(part.isdecimal() for part in name.split("."))),
        buffer_bytes=buffers,
    )
