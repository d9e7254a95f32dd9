"""The embedded default: a tiny model, a task and a reward that need no GPU, no hub and no download.

The task is to sort eight digits: prompt `30418827=`, completion `01234788` and an end token. The model is a Qwen3 of
about 0.8 million weights with a tokenizer of one token per character. A short supervised phase (the *warm start*)
teaches it the task to roughly four right answers in ten; GRPO starts from there.

```bash
python recipes/embedded.py    # builds the warm start of seed 0 and prints where it is
```
"""

import hashlib
import json
import math
import os
import random
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from rich.progress import Progress, TextColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trl_sketch.rewards import exact_match


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
    batch_size: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    target_accuracy: float = 0.42  # greedy, on 512 validation problems: the training stops there
    max_steps: int = 100


@dataclass(frozen=True)
class Accuracy:
    """Scores, 0 to 1, of a model's answers to problems, and their means."""

    greedy_scores: list[float]  # of one answer a problem
    sampled_scores: list[list[float]]  # of several a problem, at temperature 1

    @property
    def greedy(self) -> float:
        return fmean(self.greedy_scores)

    @property
    def sampled(self) -> float:
        """NaN if nothing was sampled."""
        return fmean(score for scores in self.sampled_scores for score in scores) if self.sampled_scores else math.nan


# ---------------------------------------------------------------------------------------------------------------- task


def split_of(prompt: str) -> Split:
    """Which split a problem belongs to, by a checksum of its text: 1/16 held out, 1/16 validation, the rest for training.

    A problem is thus in one split only, whoever draws it and from whatever seed.
    """
    bucket = zlib.crc32(prompt.encode()) % 16
    return "held_out" if bucket == 0 else "validation" if bucket == 1 else "train"


def draw_problem(rng: random.Random, split: Split) -> dict[str, str]:
    """Draw one problem of the split: `{"prompt": "30418827=", "answer": "01234788"}`."""
    while True:
        digits = rng.choices("0123456789", k=DIGITS)
        prompt = "".join(digits) + "="
        if split_of(prompt) == split:
            return {"prompt": prompt, "answer": "".join(sorted(digits))}


def make_problems(split: Split, count: int, seed: int = 0) -> list[dict[str, str]]:
    """`count` problems of a split, without repetition; always the same ones for the same arguments."""
    rng = random.Random(f"{split}-{seed}")
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < count:
        problem = draw_problem(rng, split)
        problems.setdefault(problem["prompt"], problem)
    return list(problems.values())


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
    """An untrained fp32 model whose LM head is `lm_head_scale` times as large as usual."""
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
    """Train every parameter of the fp32 model in place on right answers, with a plain AdamW loop.

    Accuracy rises steeply and at another step for every seed, so the loop stops at `target_accuracy`, which it
    measures after every second step once the learning rate has warmed up; 35 to 45 are usual.
    """
    rng = random.Random(f"warm-start-{settings.seed}")
    validation = make_problems("validation", 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))
    bar = Progress(
        *Progress.get_default_columns(), TextColumn("{task.fields[accuracy]:.0%} right"), disable=not progress
    )
    with bar:
        task = bar.add_task("Warm start", total=settings.target_accuracy, accuracy=0.0)
        model.train()
        for step in range(1, settings.max_steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * min(1.0, step / settings.warmup_steps)
            batch = supervised_batch(tokenizer, [draw_problem(rng, "train") for _ in range(settings.batch_size)])
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step > settings.warmup_steps and step % 2 == 0:
                accuracy = evaluate(model, tokenizer, validation, samples=0).greedy
                bar.update(task, completed=accuracy, accuracy=accuracy)
                if accuracy >= settings.target_accuracy:
                    break


def cache_root() -> Path:
    """`trl_sketch` under `$XDG_CACHE_HOME`, or under `~/.cache` where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_sketch"


def warm_start_model(settings: WarmStart | None = None, cache: Path | None = None, progress: bool = True) -> str:
    """Folder of the warm-started model and its tokenizer: an ordinary `save_pretrained` checkpoint in bfloat16.

    It is built once per settings (about 15 seconds on one core) and then found under `cache` (default: `cache_root()`).
    """
    settings = settings or WarmStart()
    name = hashlib.sha256(json.dumps([CACHE_VERSION, asdict(settings)], sort_keys=True).encode()).hexdigest()[:12]
    folder = (cache or cache_root()) / f"sort{DIGITS}-seed{settings.seed}-{name}"
    if folder.is_dir():
        return str(folder)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the fastest for so small a model, and the same result whatever the caller has set
    try:
        supervised_training(model, tokenizer, settings, progress)
    finally:
        torch.set_num_threads(threads)
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


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, Any]],
    samples: int = 4,
    reward: Callable[..., list[float | None]] = exact_match,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 512,
) -> Accuracy:
    """Rewards of the model's answers to `problems`, which have the keys `prompt` (text or chat) and `answer`.

    One greedy answer per problem, and `samples` answers at temperature 1 without top-k or top-p. At most `batch_size` answers
    are generated at a time. Sampling starts from a fixed seed; the caller's random state and the model's train or eval mode
    stay as they were.
    """
    was_training = model.training
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        options = {"reward": reward, "batch_size": batch_size, "max_new_tokens": max_new_tokens}
        greedy = _rewards(model, tokenizer, problems, **options, do_sample=False)
        repeated = [problem for problem in problems for _ in range(samples)]
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        sampled = _rewards(model, tokenizer, repeated, **options, **sampling) if samples else []
    model.train(was_training)
    return Accuracy(greedy, [sampled[i : i + samples] for i in range(0, len(sampled), samples or 1)])


def _rewards(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, Any]],
    reward: Callable[..., list[float | None]],
    batch_size: int,
    **generation: Any,
) -> list[float]:
    """The reward of one generated answer per problem; an answer that cannot be scored (None) counts as 0."""
    scores: list[float] = []
    for start in range(0, len(problems), batch_size):
        batch = problems[start : start + batch_size]
        columns = {name: [problem[name] for problem in batch] for name in batch[0]}
        inputs = encode(tokenizer, columns["prompt"]).to(model.device)
        tokens = model.generate(**inputs, **generation)[:, inputs["input_ids"].shape[1] :]
        completions = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        columns["prompts"] = columns.pop("prompt")  # TRL's name for it
        scores += [score or 0.0 for score in reward(completions=completions, **columns)]
    return scores


def encode(tokenizer: PreTrainedTokenizerBase, prompts: list[Any]) -> BatchEncoding:
    """Token ids and mask, both (prompts, tokens), padded on the left, of plain prompts or of chats."""
    side = {"padding_side": "left"}
    if isinstance(prompts[0], str):
        return tokenizer(prompts, return_tensors="pt", padding=True, **side)
    return tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True, tokenizer_kwargs=side
    )


if __name__ == "__main__":
    print(warm_start_model())
