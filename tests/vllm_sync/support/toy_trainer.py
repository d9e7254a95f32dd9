"""Small checkpoints of the architectures under test, and a trainer that takes real optimizer steps on one of them."""

import copy
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model
from trl_sketch.projection import projection_basis
from trl_sketch.sync.update import Step, UpdateMessage, new_run_id
from trl_sketch.weights import SketchUpdate, dequantize


TOKENS = ["<pad>", "<bos>", "<eos>", *string.ascii_letters, *string.digits, *" .,+="]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # vLLM's
VOCABULARY = len(TOKENS)  # 70; vLLM pads it to 128
KINDS = {
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": False, "head_dim": 32}),
    # Its one key-value head is on both workers of a pair.
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False, "head_dim": 32, "num_key_value_heads": 1}),
    # vLLM's attention on the CPU wants heads of 32 at least.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "hidden_size": 128}),
}


def save_checkpoint(kind: str, folder: Path) -> None:
    """A bf16 checkpoint of two layers, all of it random, and a tokenizer with a token a character."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    model_class, config_class, settings = KINDS[kind]
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = config_class(**defaults | settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
        model.bfloat16().save_pretrained(folder)


class ToyTrainer:
    """Trains a checkpoint on random tokens at a relative step of 6e-5; the same bits at each run."""

    def __init__(self, folder: Path) -> None:
        self.run_id = new_run_id()
        self.model = get_sketch_model(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE),
            SketchConfig(rank=8, update_ratio=6e-5, kl_budget=None),
        )
        self.optimizer = SketchOptimizer(self.model, lr=1.0)
        self.optimizer.listeners.append(
            lambda version, updates: self.pending.append(Step(version - 1, version, updates))
        )
        self.parameters = dict(self.model.named_parameters())
        self.sketched = [f"{layer.name}.weight" for layer in self.optimizer.layers]
        self.pending: list[Step] = []
        self._generator = torch.Generator().manual_seed(0)

    @property
    def version(self) -> int:
        return self.optimizer.sketches.step

    def train(self, steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(3, VOCABULARY, (2, 12), generator=self._generator).to(DEVICE)
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()

    def take_updates(self) -> UpdateMessage:
        """The steps since the last call."""
        message = UpdateMessage(self.run_id, self.pending)
        self.pending = []
        return message

    def weights(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy({name: parameter.data for name, parameter in self.parameters.items()})

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities `(T - 1,)` of all tokens but the first."""
        logits = self.model(input_ids=torch.tensor([tokens], device=DEVICE)).logits[0, :-1].float().cpu()
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def add_naively(self: SketchUpdate, weight: torch.Tensor, rows=None, cols=None, *, drawn=None) -> None:
    """What `SketchUpdate.apply_` must not be: a bf16 addition, rounded to nearest."""
    basis = projection_basis(self.projection, self.projection_key, self.q.shape[1], self.in_features, cols=cols)
    delta = -(dequantize(self.q, self.exponent)[slice(*(rows or (None,)))] @ basis)
    weight.add_(delta.to(weight.dtype))
