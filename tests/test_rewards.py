"""The recipes' reward functions: right, wrong and unparseable completions, as text and as chat."""

import json
import threading
from typing import Any

import pytest
import reasoning_gym
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


def score(function: Any, task: str, entry: dict[str, Any], completion: str) -> float:
    columns = {"answer": [entry["answer"]], "task": [task], "metadata": [json.dumps(entry["metadata"])]}
    return function(completions=[chat(completion)], prompts=[chat(entry["question"])], **columns)[0]


def test_reasoning_gym_takes_what_is_between_the_tags() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    right, wrong = entry["answer"], str(int(entry["answer"]) + 1)
    reward = rewards.reasoning_gym
    assert score(reward, "chain_sum", entry, f"Let me see. <answer>{right}</answer>") == 1.0
    assert score(reward, "chain_sum", entry, f"<answer>{wrong}</answer> no: <answer>\n{right}\n</answer>") == 1.0
    assert score(reward, "chain_sum", entry, f"<answer>{wrong}</answer>") == 0.0
    for unparseable in (right, f"<answer>{right}", ""):
        assert score(reward, "chain_sum", entry, unparseable) == 0.0


def test_reasoning_gym_number_takes_the_last_number() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    right = entry["answer"]
    reward = rewards.reasoning_gym_number
    assert score(reward, "chain_sum", entry, f"3 + 4 = {right}.") == 1.0
    assert score(reward, "chain_sum", entry, f"{right} and not 12345") == 0.0
    assert score(reward, "chain_sum", entry, "I cannot say.") == 0.0


def test_every_verifier_gives_its_own_score() -> None:
    """`word_ladder` and others give a part for an answer that is partly right."""
    partly = {}
    for task in ("word_ladder", "sentence_reordering", "manipulate_matrix"):
        data = reasoning_gym.create_dataset(task, size=1, seed=0)
        entry = data[0]
        for answer in (entry["answer"], entry["answer"][:-1], "nonsense"):
            ours = score(rewards.reasoning_gym, task, entry, f"<answer>{answer}</answer>")
            assert ours == data.score_answer(answer, entry)
            partly[task, answer == entry["answer"]] = ours
        assert partly[task, True] == 1.0
