"""Models of the benchmarks: random weights in the shapes of models that people train."""

import os
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config


def _shape(
    kind: type[PretrainedConfig], vocabulary: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int
) -> dict[str, Any]:
    return {
        "kind": kind,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "embedded": _shape(Qwen3Config, 14, 128, 384, 4, 4, 2) | {"head_dim": 32},
    "smollm2-135m": _shape(LlamaConfig, 49152, 576, 1536, 30, 9, 3) | {"head_dim": 64},
    "qwen2.5-0.5b": _shape(Qwen2Config, 151936, 896, 4864, 24, 14, 2),
    "qwen3-0.6b": _shape(Qwen3Config, 151936, 1024, 3072, 28, 16, 8) | {"head_dim": 128},
    "qwen3-1.7b": _shape(Qwen3Config, 151936, 2048, 6144, 28, 16, 8) | {"head_dim": 128},
    "qwen2.5-7b": _shape(Qwen2Config, 152064, 3584, 18944, 28, 28, 4),
}


def make_config(shape: str, layers: int | None = None) -> PretrainedConfig:
    """The configuration of a shape, with fewer layers if asked for."""
    settings = dict(SHAPES[shape])
    config = settings.pop("kind")(**settings, tie_word_embeddings=shape != "qwen2.5-7b", max_position_embeddings=32768)
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config


def make_model(shape: str, dtype: torch.dtype, device: str, layers: int | None = None) -> PreTrainedModel:
    """The model with the same random weights at each call, in training mode.

    Attention is eager on a CPU, where PyTorch's fused attention is slow in backward.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            make_config(shape, layers), dtype=dtype, attn_implementation="eager" if device == "cpu" else "sdpa"
        )
    return model.train()


def keep_memory() -> None:
    """Start the script anew so that freed memory stays with the process, on Linux without a GPU.

    Otherwise glibc gives large tensors back to the kernel and gets them again as pages to be cleared, which can take longer
    than what is to be measured; people who train on CPUs preload another allocator for that reason.
    """
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(2**28)}
    if sys.platform == "linux" and not torch.cuda.is_available() and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)
