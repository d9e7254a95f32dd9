"""Fixtures shared by the tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@pytest.fixture
def tiny_qwen3() -> Callable[..., Qwen3ForCausalLM]:
    """`tiny_qwen3(dtype=torch.float32, **config)`: a new model of two layers, the same at each call."""

    def build(dtype: torch.dtype = torch.float32, **overrides: Any) -> Qwen3ForCausalLM:
        settings: dict[str, Any] = {
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Qwen3ForCausalLM(Qwen3Config(**settings | overrides)).to(dtype)

    return build


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is not asked, whatever the environment says."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint for trainers: fp32, two layers, widths that are powers of two, one token a character, a chat template."""
    folder = str(tmp_path_factory.mktemp("policy"))
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklm"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template="{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}",
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # it stays frozen: as it is, no hidden state would make any token likely
    model.save_pretrained(folder)
    return folder
