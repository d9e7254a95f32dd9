"""Reward functions in TRL's form, that recipes and `trl-sketch eval` know by name."""

import functools
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any


_NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")  # the sign is one only if no number stands before it: 10-12


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion as TRL passes it: a string, or a list of chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def exact_match(completions: list, answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the completion is the answer, white space aside, and 0.0 elsewhere."""
    return [float(completion_text(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def math_reward(completions: list, answer: list[str], **kwargs: Any) -> list[float | None]:
    """1.0 where math-verify finds the completion's final answer equal to `answer`; 0.0 where not, or where it finds none.

    A final answer is boxed, or LaTeX or a number after words such as "the answer is". None, which leaves the example out,
    where `answer` is not a mathematical expression.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    in_main_thread = threading.current_thread() is threading.main_thread()  # its timeouts are signals, which need that
    timeout = 5 if in_main_thread else None
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    forms = [latex, ExprExtractionConfig(try_extract_without_anchor=False)]
    rewards: list[float | None] = []
    for completion, gold in zip(completions, map(str, answer), strict=True):
        marked = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
        expected = parse(marked, parsing_timeout=timeout)
        if not expected:
            rewards.append(None)
            continue
        text = completion_text(completion)
        found = parse(text, extraction_config=forms, extraction_mode="first_match", parsing_timeout=timeout)
        rewards.append(float(bool(found) and verify(expected, found, timeout_seconds=timeout)))
    return rewards


def last_number(completions: list, answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the last number of the completion is the answer; 0.0 where it is another, or where there is none."""
    found = [find_last_number(completion_text(c)) for c in completions]
    return [
        float(n is not None and Decimal(n) == Decimal(str(a).replace(",", "")))
        for n, a in zip(found, answer, strict=True)
    ]


def find_last_number(text: str) -> str | None:
    """The last number of a text, without separators of thousands."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def reasoning_gym(
    completions: list, prompts: list, answer: list[str], task: list[str], metadata: list[str], **kwargs: Any
) -> list[float]:
    """The score, 0 to 1, of the task's own verifier for what is between the last answer tags; 0.0 without them."""
    from reasoning_gym.utils import extract_answer

    answers = [extract_answer(completion_text(c)) for c in completions]
    return _verified(answers, prompts, answer, task, metadata)


def reasoning_gym_number(
    completions: list, prompts: list, answer: list[str], task: list[str], metadata: list[str], **kwargs: Any
) -> list[float]:
    """The score, 0 to 1, of the task's own verifier for the completion's last number; 0.0 where there is none."""
    answers = [find_last_number(completion_text(c)) for c in completions]
    return _verified(answers, prompts, answer, task, metadata)


def _verified(
    answers: list[str | None], prompts: list, gold: list[str], tasks: list[str], metadata: list[str]
) -> list[float]:
    scores = []
    for given, prompt, right, task, facts in zip(answers, prompts, gold, tasks, metadata, strict=True):
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        entry = {"question": question, "answer": right, "metadata": json.loads(facts)}
        scores.append(0.0 if given is None else float(_verifier(task)(answer=given, entry=entry)))
    return scores


@functools.cache
def _verifier(task: str) -> Callable[..., float]:
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Reasoning-Gym's verifiers come from a package: pip install reasoning-gym") from None
    return get_score_answer_fn(task)


REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "math": math_reward,
    "last_number": last_number,
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_number": reasoning_gym_number,
}


def load_reward(name: str) -> Callable[..., Any]:
    """A reward function: one of `REWARDS` by its name, or anybody's as `FILE.py:FUNCTION` or `package.module:FUNCTION`.

    The folder of a FILE.py becomes one that is imported from, so that it may import its neighbours.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no name of ours, or there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    place, colon, function = name.rpartition(":")
    if not colon:
        raise ValueError(
            f"--reward {name}: it must be FILE.py:FUNCTION, package.module:FUNCTION or one of {', '.join(REWARDS)}"
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise FileNotFoundError(f"--reward {name}: there is no file {place}")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise ValueError(f"--reward {name}: {place} cannot be imported ({error})") from error
    if not callable(getattr(module, function, None)):
        raise ValueError(f"--reward {name}: {place} has no function {function}")
    return getattr(module, function)


def _import_file(file: Path) -> ModuleType:
    """The module of a file, under a name that no other module has."""
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"_reward_of_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
