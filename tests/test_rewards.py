"""The recipes' reward functions: right, wrong and unparseable completions, as text and as chat."""

import threading
from typing import Any

import pytest
import rewards


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"Thus the answer is $\boxed{\frac{1}{2}}$.", "0.5", 1.0),
        (r"So \boxed{34}", "34", 1.0),
        ("x = 3, so the final answer is $34$.", "34", 1.0),
        ("The final answer is 34", "34", 1.0),
        ("Answer: 34", "34", 1.0),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{35}", "34", 0.0),
        (r"First \boxed{34}, no: \boxed{35}", "34", 0.0),
        ("It is 34 or so, let me think about 34", "34", 0.0),
        (r"\boxed{", "34", 0.0),
        ("", "34", 0.0),
        ("I do not know.", "34", 0.0),
    ],
)
def test_math(completion: str, answer: str, reward: float) -> None:
    assert rewards.math_reward([completion, chat(completion)], [answer, answer]) == [reward, reward]


def test_math_leaves_out_what_has_no_mathematical_answer() -> None:
    assert rewards.math_reward([r"\boxed{1}", r"\boxed{1}"], ["", "1"]) == [None, 1.0]


def test_math_works_in_another_thread() -> None:
    """TRL calls reward functions from the main thread; servers do not."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(rewards.math_reward([r"\boxed{34}"], ["34"])))
    thread.start()
    thread.join()
    assert results == [[1.0]]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("15", "15", 1.0),
        ("7 + 8 = 15.", "15", 1.0),
        ("1,234", "1234", 1.0),
        ("It is 15.0", "15", 1.0),
        ("12-15", "15", 1.0),
        ("5 - 9 = -4", "-4", 1.0),
        ("5 - 9 = 4", "-4", 0.0),
        ("15 is not 16", "15", 0.0),
        ("fifteen", "15", 0.0),
        ("", "15", 0.0),
    ],
)
def test_last_number(completion: str, answer: str, reward: float) -> None:
    assert rewards.last_number([completion, chat(completion)], [answer, answer]) == [reward, reward]
