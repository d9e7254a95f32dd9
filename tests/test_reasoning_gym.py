"""Reasoning-Gym's problems and verifiers in the recipes."""

import json
from pathlib import Path
from typing import Any

import common
import pyarrow.parquet as pq
import pytest
import rewards


reasoning_gym = pytest.importorskip("reasoning_gym")
reasoning_gym_mixture = pytest.importorskip("reasoning_gym_mixture")


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def read(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def held_out_of(folder: Path) -> list[dict[str, Any]]:
    """What a recipe makes of `--dataset_name FOLDER`."""
    return common.load_problems(common.ScriptArguments(model_name_or_path="m", dataset_name=str(folder)))[1]


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


def test_the_mixture_of_reasoning_gym(tmp_path: Path) -> None:
    """The eight tasks: columns, no repetitions, no overlap, and gold answers that their verifiers accept."""
    reasoning_gym_mixture.main(["--num_train", "12", "--num_eval", "4", "--output", str(tmp_path)])
    train, test = (read(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    assert {row["task"] for row in train} == {row["task"] for row in test} == set(reasoning_gym_mixture.TASKS)
    assert 90 <= len(train) <= 96 and 24 <= len(test) <= 32
    questions = [row["prompt"][-1]["content"] for row in train + test]
    assert len(set(questions)) == len(questions)
    assert all([m["role"] for m in row["prompt"]] == ["system", "user"] for row in train)
    assert "<answer>" in train[0]["prompt"][0]["content"]
    for rows in (train, test):
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        gold = [f"So: <answer>{answer}</answer>" for answer in columns["answer"]]
        scores = rewards.reasoning_gym(completions=gold, prompts=columns.pop("prompt"), **columns)
        assert scores == [1.0] * len(rows)
    assert len(held_out_of(tmp_path)) == len(test)


def test_the_mixtures_repetitions_and_overlaps_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seeds = []

    def generate(task: str, count: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
        seeds.append(seed)
        questions = ["a", "b", "a", "c"] if seed == 42 else ["d", "b", "d", "e"]
        return [{"question": q, "answer": q.upper(), "metadata": settings} for q in questions]

    monkeypatch.setattr(reasoning_gym_mixture, "generate", generate)
    options = ["--tasks", "t", "--settings", '{"t": {"k": 1}}', "--system_prompt", "", "--output", str(tmp_path)]
    reasoning_gym_mixture.main(options)
    kept = {split: [row["answer"] for row in read(tmp_path / f"{split}.parquet")] for split in ("train", "test")}
    assert kept == {"train": ["A", "B", "C"], "test": ["D", "E"]}
    assert seeds[1] - seeds[0] > 5000  # problem i of a seed is problem i - 1 of the next
    row = read(tmp_path / "train.parquet")[0]
    assert row["prompt"] == [{"role": "user", "content": "a"}] and json.loads(row["metadata"]) == {"k": 1}


def test_reasoning_gyms_neighbouring_seeds_share_problems() -> None:
    """Why the evaluation's seed is far away."""
    first, second = (reasoning_gym_mixture.generate("manipulate_matrix", 5, seed) for seed in (1, 2))
    assert [e["question"] for e in first[1:]] == [e["question"] for e in second[:-1]]
