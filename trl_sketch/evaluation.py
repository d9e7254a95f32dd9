"""Evaluate a model on a data set: `samples` answers to every problem, scored, one line of JSON for each problem.

Lines are written as they come, a batch at a time. A batch is sampled from the seed and its place alone, so an evaluation that
was killed goes on where it stopped, and ends with the file that it would have written at once. Beside `eval.jsonl`,
`eval.summary.json` has the settings from the start, and the results in the end.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from .evaluation_results import Results, summarize
from .problems import load_problems
from .records import package_versions, problem_id, replacing
from .rewards import load_reward


BACKENDS = ("auto", "vllm", "transformers")
DTYPES = ("auto", "bfloat16", "float16", "float32")
_WEIGHTS = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")


@dataclass(frozen=True)
class EvalSettings:
    """What decides the answers. The fields are the options of `trl-sketch eval`."""

    model: str
    dataset: str
    reward: str = "exact_match"
    dataset_config: str | None = None
    split: str | None = None
    limit: int | None = None
    samples: int = 4
    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int = 1024
    seed: int = 0
    chat: bool = False
    system_prompt: str | None = None
    backend: str = "auto"
    dtype: str = "auto"
    batch_size: int = 32
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "batch_size", "tensor_parallel_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: it must be 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"--temperature {self.temperature}: it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p {self.top_p}: it must be above 0, and 1 at most")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"--temperature 0 gives the same answer {self.samples} times: add --samples 1")
        for name, allowed in (("backend", BACKENDS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} {getattr(self, name)}: it must be one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Answer:
    """One sampled completion: its tokens, without what follows an end token, and whether it has none."""

    tokens: list[int]
    truncated: bool


class Engine(Protocol):
    """What generates; see `evaluation_engines`."""

    def generate(self, prompts: Sequence[list[int]], first: int) -> list[list[Answer]]:
        """`samples` answers to each prompt (token ids); `first` is the first one's place among all problems."""
        ...


def evaluate(
    settings: EvalSettings,
    output: Path,
    make_engine: Callable[[EvalSettings, int], Engine],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Results:
    """Evaluate, or go on with an evaluation that was stopped, and return the results.

    Args:
        settings: With a backend that is not `auto`.
        output: File of JSON lines; a summary is written beside it.
        make_engine: Called with the settings and the tokens of the longest prompt, if there is anything left to generate.
        progress: Called after every batch with the number of problems that are done, and of all.

    Raises:
        FileNotFoundError: The data set or the reward's file is not there.
        ValueError: A setting does not fit, or `output` is of an evaluation with others.
    """
    problems = _load(settings)
    reward = load_reward(settings.reward)
    facts = {
        "problems": _digest([[p["id"], p["answer"]] for p in problems]),
        "model_files": _model_files(settings.model),
    }
    summary = _Summary(output, asdict(settings) | facts)
    done = summary.resume(problems, settings.batch_size)
    start = perf_counter()
    progress(done, len(problems))
    if done < len(problems):
        tokenizer = _tokenizer(settings.model)
        prompts = [encode(tokenizer, problem["messages"]) for problem in problems]
        engine = make_engine(settings, max(map(len, prompts)))
        with output.open("a") as file:
            for first in range(done, len(problems), settings.batch_size):
                batch = problems[first : first + settings.batch_size]
                answers = engine.generate(prompts[first : first + len(batch)], first)
                rows = score(batch, answers, tokenizer, reward, settings.reward)
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
                file.flush()
                progress(first + len(batch), len(problems))
    results = summarize(output)
    summary.finish(results, perf_counter() - start)
    return results


# ------------------------------------------------------------------------------------------------------------ problems


def _load(settings: EvalSettings) -> list[dict[str, Any]]:
    """Rows of the data set, with the `id` of each and the `messages` (or text) that the model is given."""
    rows = load_problems(settings.dataset, settings.split, settings.dataset_config, columns=("prompt", "answer"))
    if settings.limit is not None:
        rows = rows.select(range(min(settings.limit, len(rows))))
    if not len(rows):
        raise ValueError(f"--dataset {settings.dataset} has no problem")
    seen: Counter[str] = Counter()
    problems = []
    for row in rows:
        own = problem_id(row["prompt"])
        seen[own] += 1
        number = f"-{seen[own]}" if seen[own] > 1 else ""  # the same prompt again
        problems.append({**row, "id": own + number, "messages": messages_of(row["prompt"], settings)})
    return problems


def messages_of(prompt: str | list[dict[str, str]], settings: EvalSettings) -> str | list[dict[str, str]]:
    """What the model is given: a prompt as it is, or as a chat, or with a system prompt before it.

    Raises:
        ValueError: The chat has a system prompt already.
    """
    if isinstance(prompt, str):
        if not settings.chat and settings.system_prompt is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if settings.system_prompt is None:
        return prompt
    if prompt[0]["role"] == "system":
        raise ValueError(f"--system_prompt: the prompts of {settings.dataset} have one already; leave it out")
    return [{"role": "system", "content": settings.system_prompt}, *prompt]


def encode(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a prompt, text or chat, as TRL gives it to the model.

    Raises:
        ValueError: It is a chat, and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not tokenizer.chat_template:
        raise ValueError(
            f"the prompts are chats, and {tokenizer.name_or_path} has no chat template: it needs a data set whose `prompt` is text"
        )
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"MODEL {model} cannot be loaded: is it a model's folder, or on the Hub? ({error})"
        ) from error


# ------------------------------------------------------------------------------------------------------------- scoring


def score(
    problems: Sequence[dict[str, Any]],
    answers: Sequence[Sequence[Answer]],
    tokenizer: Any,
    reward: Callable[..., list[float | None]],
    name: str,
) -> list[dict[str, Any]]:
    """A line of output for each problem; the reward function gets what it gets from TRL.

    Raises:
        ValueError: The reward function did not return a number or None for every completion.
    """
    texts = [[tokenizer.decode(a.tokens, skip_special_tokens=True) for a in own] for own in answers]
    repeated = [problem for problem, own in zip(problems, answers, strict=True) for _ in own]
    columns = {key: [problem[key] for problem in repeated] for key in problems[0] if key not in ("prompt", "messages")}
    completions = [
        text if isinstance(problem["messages"], str) else [{"role": "assistant", "content": text}]
        for problem, own in zip(problems, texts, strict=True)
        for text in own
    ]
    scores = reward(
        prompts=[problem["messages"] for problem in repeated],
        completions=completions,
        completion_ids=[a.tokens for own in answers for a in own],
        **columns,
    )
    if len(scores) != len(completions) or not all(s is None or math.isfinite(s) for s in scores):
        raise ValueError(
            f"--reward {name} must return a finite number, or None, for each of {len(completions)} completions"
        )
    rest = iter(scores)
    return [
        {
            "id": problem["id"],
            "prompt": problem["messages"],
            "answer": problem["answer"],
            "completions": own,
            "scores": [None if s is None else float(s) for s in (next(rest) for _ in own)],
            "truncated": [a.truncated for a in sampled],
        }
        for problem, own, sampled in zip(problems, texts, answers, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------- resuming


class _Summary:
    """`eval.summary.json` beside `eval.jsonl`: the settings, and whether and how the evaluation ended."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.output, self.settings = output, settings
        self.file = summary_file(output)
        self.seconds = 0.0

    def resume(self, problems: Sequence[dict[str, Any]], batch_size: int) -> int:
        """See that what is there was made with these settings, cut off an unfinished batch, and return how many are done.

        Raises:
            ValueError: It was made with other settings, or by something else.
        """
        if not self.output.exists():
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._write({"finished": False})
            return 0
        if not self.file.is_file():
            raise ValueError(
                f"--output {self.output} is there and has no {self.file.name}: take another name, or remove it"
            )
        before = json.loads(self.file.read_text())
        differences = [
            f"{name}: {before['settings'].get(name)!r} then, {value!r} now"
            for name, value in self.settings.items()
            if before["settings"].get(name) != value
        ]
        if differences:
            listed = "\n  ".join(differences)
            raise ValueError(
                f"--output {self.output} was begun with other settings:\n  {listed}\nTake the same, another --output, or remove it"
            )
        self.seconds = before.get("seconds", 0.0)
        whole = self.output.read_bytes().split(b"\n")[:-1]  # a line that was being written has no end
        done = len(whole) if len(whole) == len(problems) else len(whole) // batch_size * batch_size
        kept = [json.loads(line)["id"] for line in whole[:done]]
        if kept != [problem["id"] for problem in problems[:done]]:
            raise ValueError(f"--output {self.output} has lines of other problems: take another name, or remove it")
        with self.output.open("r+b") as file:
            file.truncate(sum(len(line) + 1 for line in whole[:done]))
        return done

    def finish(self, results: Results, seconds: float) -> None:
        self._write({"finished": True, "seconds": round(self.seconds + seconds, 3), "results": results.as_json()})

    def _write(self, more: dict[str, Any]) -> None:
        with replacing(self.file) as temporary:
            content = {"settings": self.settings, "versions": package_versions(), **more}
            temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def summary_file(output: Path) -> Path:
    return output.with_suffix(".summary.json")


def differing_settings(first: Path, second: Path) -> list[str]:
    """Sentences about the settings in which two outputs differ, as far as their summaries are there; the model may."""
    files = [summary_file(output) for output in (first, second)]
    if not all(file.is_file() for file in files):
        return []
    a, b = (json.loads(file.read_text())["settings"] for file in files)
    free = ("model", "model_files", "batch_size", "problems")
    names = [field.name for field in fields(EvalSettings) if field.name not in free]
    return [f"{name}: {a.get(name)!r} / {b.get(name)!r}" for name in names if a.get(name) != b.get(name)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:12]


def _model_files(model: str) -> str | None:
    """A checksum of names, sizes and times of a local model's files: a folder that was trained again is another model."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    return _digest([[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])
