"""The embedded default: a tiny model, a task and a reward that need no GPU, no hub and no download.

The task is to sort eight digits: prompt ``30418827=``, completion ``01234788`` and an end token. The model is a Qwen3 of
about 0.8 million weights with a tokenizer of one token per character. A short supervised phase (the *warm start*)
teaches it the task to roughly four right answers in ten; GRPO starts from there.

    python recipes/embedded.py          # builds the warm start for seed 0 and prints where it is
"""

import hashlib
import json
import math
import os
import random
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CACHE_VERSION = 1  # raise it whenever the code below would build a different warm start from the same settings
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789="
DIGITS = 8  # digits to sort in one problem
MAX_NEW_TOKENS = 10  # the answer is eight tokens and an end token

Split = Literal["train", "held_out", "validation"]


@dataclass(frozen=True)
class WarmStart:
    """Everything that decides what the warm start is. Its hash names the cached folder."""

    seed: int = 0
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    lm_head_scale: float = 8.0  # the LM head stays frozen under a sketch or LoRA, so its size fixes the temperature
    steps: int = 60
    batch_size: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers, 0 to 1."""

    greedy: float
    sampled: float  # mean over several samples a problem, at temperature 1


# ---------------------------------------------------------------------------------------------------------------- task


def split_of(prompt: str) -> Split:
    """Which split a problem belongs to, by a checksum of its text: 1/16 held out, 1/16 validation, the rest for training.

    A problem is thus in one split only, whoever draws it and from whatever seed.
    """
    bucket = zlib.crc32(prompt.encode()) % 16
    return "held_out" if bucket == 0 else "validation" if bucket == 1 else "train"


def draw_problem(rng: random.Random, split: Split) -> dict[str, str]:
    """Draw one problem of the split: ``{"prompt": "30418827=", "answer": "01234788"}``."""
    while True:
        digits = rng.choices("0123456789", k=DIGITS)
        prompt = "".join(digits) + "="
        if split_of(prompt) == split:
            return {"prompt": prompt, "answer": "".join(sorted(digits))}


def make_problems(split: Split, count: int, seed: int = 0) -> list[dict[str, str]]:
    """``count`` problems of a split, without repetition; always the same ones for the same arguments."""
    rng = random.Random(f"{split}-{seed}")
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < count:
        problem = draw_problem(rng, split)
        problems.setdefault(problem["prompt"], problem)
    return list(problems.values())


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion as TRL passes it: a string, or a list of chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def exact_match(completions: list, answer: list[str], **kwargs) -> list[float]:
    """TRL reward function: 1.0 where the completion is the answer, white space aside, and 0.0 elsewhere."""
    return [float(completion_text(c).strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


# ------------------------------------------------------------------------------------------------- tokenizer and model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character, padding on the left as generation needs it."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer: PreTrainedTokenizerBase, settings: WarmStart) -> Qwen3ForCausalLM:
    """An untrained fp32 model whose LM head is ``lm_head_scale`` times as large as usual."""
    torch.manual_seed(settings.seed)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        **special,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(settings.lm_head_scale)
    return model


# ---------------------------------------------------------------------------------------------------------- warm start


def supervised_batch(tokenizer: PreTrainedTokenizerBase, problems: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Token ids and labels, both (problems, tokens); the prompt's labels are -100, so only the answer is learned.

    All the problems have the same length, so nothing is padded.
    """
    prompts = tokenizer([p["prompt"] for p in problems])["input_ids"]
    answers = tokenizer([p["answer"] + tokenizer.eos_token for p in problems])["input_ids"]
    return {
        "input_ids": torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)]),
        "labels": torch.tensor([[-100] * len(p) + a for p, a in zip(prompts, answers, strict=True)]),
    }


def supervised_training(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: WarmStart, progress: bool = True
) -> None:
    """Train every parameter of the fp32 model in place on right answers, with a plain AdamW loop."""
    rng = random.Random(f"warm-start-{settings.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))
    model.train()
    for step in track(range(settings.steps), "Warm start (supervised)", disable=not progress):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
        batch = supervised_batch(tokenizer, [draw_problem(rng, "train") for _ in range(settings.batch_size)])
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def cache_root() -> Path:
    """``trl_sketch`` under ``$XDG_CACHE_HOME``, or under ``~/.cache`` where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_sketch"


def warm_start_model(settings: WarmStart | None = None, cache: Path | None = None, progress: bool = True) -> str:
    """Folder of the warm-started model and its tokenizer: an ordinary ``save_pretrained`` checkpoint in bfloat16.

    It is built once per settings (about 15 seconds on one core) and then found under ``cache`` (default: ``cache_root()``).
    """
    settings = settings or WarmStart()
    name = hashlib.sha256(json.dumps([CACHE_VERSION, asdict(settings)], sort_keys=True).encode()).hexdigest()[:12]
    folder = (cache or cache_root()) / f"sort{DIGITS}-seed{settings.seed}-{name}"
    if folder.is_dir():
        return str(folder)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, settings)
    supervised_training(model, tokenizer, settings, progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its final place and renamed at the end: a killed run leaves no half-written model to be found.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as unfinished:
        partial = Path(unfinished) / "model"
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process finished the same model first
            if not folder.is_dir():
                raise
    return str(folder)


# ---------------------------------------------------------------------------------------------------------- evaluation
