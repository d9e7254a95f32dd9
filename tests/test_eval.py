"""`trl-sketch eval`: its numbers against brute force, its answers from a real tiny model, killed and resumed."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_sketch import cli
from trl_sketch.evaluation import EvalSettings, evaluate
from trl_sketch.evaluation_engines import TransformersEngine, choose_backend, make_engine
from trl_sketch.evaluation_results import compare_outputs, summarize
from trl_sketch.records import problem_id
from trl_sketch.statistics import bootstrap_interval, pass_at_k


PROMPTS = ["".join(letters) for letters in itertools.permutations("abcde", 3)]  # sixty
REWARD = (
    "def reward(completions, answer, **kwargs):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sixty problems; with `reward`, an answer is right if it has the prompt's first letter."""
    (tmp_path / "own_reward.py").write_text(REWARD)
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "answer": p[0]}) + "\n" for p in PROMPTS))
    return file


@pytest.fixture
def arguments(policy_folder: str, data: Path) -> list[str]:
    reward = f"{data.parent / 'own_reward.py'}:reward"
    options = ["--reward", reward, "--max_new_tokens", "4", "--temperature", "1", "--top_p", "1", "--batch_size", "8"]
    return ["eval", policy_folder, str(data), "--backend", "transformers", *options]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert cli.main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        scores = [1] * right + [0] * (samples - right)
        choices = [*itertools.combinations(scores, k)]
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_what_cannot_be(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {samples} samples"):
        pass_at_k(samples, right, k)


def write_lines(file: Path, scores: dict[str, list[float | None]]) -> Path:
    rows = ({"id": own, "scores": s, "truncated": [False] * (len(s) - 1) + [True]} for own, s in scores.items())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_results_by_hand(tmp_path: Path) -> None:
    scores: dict[str, list[float | None]] = {"a": [1, 0, 0], "b": [1, 1, 1], "c": [0.5, None, 0]}
    results = summarize(write_lines(tmp_path / "a.jsonl", scores))
    assert (results.problems, results.samples, results.unscored) == (3, 3, 1)
    assert {k: own.value for k, own in results.pass_at.items()} == pytest.approx({1: 4 / 9, 2: 5 / 9, 3: 2 / 3})
    assert results.score.value == pytest.approx((1 / 3 + 1 + 0.5 / 3) / 3)
    assert results.truncated == pytest.approx(1 / 3)
    own = results.pass_at[2]
    assert (own.low, own.high) == bootstrap_interval([[2 / 3, 1.0, 0.0]])


def test_a_comparison_is_paired_by_problem_whatever_the_order(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    easy = generator.random(200)
    ours = {f"p{i}": (generator.random(4) < p).astype(float).tolist() for i, p in enumerate(easy)}
    theirs = {f"p{i}": (generator.random(2) < p + 0.1).astype(float).tolist() for i, p in enumerate(easy)}
    a = write_lines(tmp_path / "a.jsonl", ours)
    b = write_lines(tmp_path / "b.jsonl", dict(sorted(theirs.items(), reverse=True)))
    difference = compare_outputs(a, b)
    by_hand = np.array([np.mean(theirs[own]) - np.mean(ours[own]) for own in ours])
    assert difference.pass_at.keys() == {1, 2}
    assert difference.pass_at[1].value == pytest.approx(by_hand.mean())
    assert (difference.pass_at[1].low, difference.pass_at[1].high) == pytest.approx(bootstrap_interval(by_hand[None]))
    assert (difference.better, difference.worse) == ((by_hand > 0).sum(), (by_hand < 0).sum())
    # Problems differ much more than the models do: unpaired, the interval would be wider.
    unpaired = np.sqrt(sum(np.var([np.mean(s) for s in own.values()]) for own in (ours, theirs)) / 200)
    assert difference.pass_at[1].high - difference.pass_at[1].low < 0.85 * 2 * 1.96 * unpaired


def test_outputs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_lines(tmp_path / "a.jsonl", {"x": [1], "y": [0]})
    b = write_lines(tmp_path / "b.jsonl", {"x": [1], "z": [0], "w": [0]})
    said = refusal(capsys, "eval", "--compare", a, b)
    assert f"{a} has 2, {b} has 3, and 1 are in both" in said
    b.write_text(a.read_text() + '{"id": "half')
    assert f"{b}, line 3, is no line of an evaluation" in refusal(capsys, "eval", "--compare", a, b)
    b.write_text(a.read_text() * 2)
    assert "must have a line for each problem" in refusal(capsys, "eval", "--compare", a, b)
    b.write_text(a.read_text())
    (tmp_path / "b.summary.json").write_text('{"finished": false}')
    assert f"{b} is not finished" in refusal(capsys, "eval", "--compare", a, b)
    assert "there is no such file" in refusal(capsys, "eval", "--compare", a, tmp_path / "missing.jsonl")
    assert "leave out model" in refusal(capsys, "eval", "model", "--compare", a, b)
    assert "a MODEL and a DATASET are needed" in refusal(capsys, "eval", "model")


# ------------------------------------------------------------------------------------------------------------- answers


def test_the_command(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out" / "first.jsonl"
    assert cli.main([*arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    rows = lines_of(output)
    assert [row["id"] for row in rows] == [problem_id(p) for p in PROMPTS]
    for row in rows:
        assert row["scores"] == [float(row["answer"] in text) for text in row["completions"]]
        assert all(len(text) <= 4 for text in row["completions"]) and len(row["truncated"]) == 4
    flags = [flag for row in rows for flag in row["truncated"]]
    assert 0 < sum(flags) < len(flags)
    assert len({text for row in rows for text in row["completions"]}) > 100

    summary = json.loads((tmp_path / "out" / "first.summary.json").read_text())
    counts = [int(sum(row["scores"])) for row in rows]
    for k in (1, 2, 4):
        expected = np.mean([pass_at_k(4, count, k) for count in counts])
        assert summary["results"][f"pass@{k}"]["value"] == pytest.approx(expected)
        assert re.search(rf"pass@{k} +│ +{100 * expected:.1f} ", printed)
    assert summary["finished"] and summary["settings"]["backend"] == "transformers"
    assert "mean score" not in printed

    # The same seed gives the same file; another one another.
    for seed in ("0", "1"):
        assert cli.main([*arguments, "--seed", seed, "--output", str(tmp_path / f"seed{seed}.jsonl")]) == 0
    assert (tmp_path / "seed0.jsonl").read_bytes() == output.read_bytes() != (tmp_path / "seed1.jsonl").read_bytes()
    capsys.readouterr()
    assert cli.main(["eval", "--compare", str(output), str(tmp_path / "seed1.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "B − A" in printed and "They differ in seed: 0 / 1" in printed
    # A finished evaluation is not made again.
    assert cli.main([*arguments, "--output", str(output)]) == 0


def test_greedy_answers_are_those_of_a_plain_loop(policy_folder: str, arguments: list[str], tmp_path: Path) -> None:
    """One prompt at a time, without padding, each time the likeliest token."""
    output = tmp_path / "greedy.jsonl"
    assert (
        cli.main([*arguments, "--temperature", "0", "--samples", "1", "--output", str(output), "--limit", "20"]) == 0
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(policy_folder),
        AutoTokenizer.from_pretrained(policy_folder),
    )
    rows = lines_of(output)
    assert len(rows) == 20
    for row in rows:
        tokens = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        new: list[int] = []
        while len(new) < 4 and tokenizer.eos_token_id not in new:
            with torch.no_grad():
                new.append(int(model(tokens).logits[0, -1].argmax()))
            tokens = torch.cat([tokens, torch.tensor([[new[-1]]])], dim=1)
        assert row["completions"] == [tokenizer.decode(new, skip_special_tokens=True)]
        assert row["truncated"] == [tokenizer.eos_token_id not in new]


def test_sampling_ignores_the_checkpoints_own(policy_folder: str, data: Path, tmp_path: Path) -> None:
    """A checkpoint may carry a top_k and a repetition penalty: here they would leave one token to choose."""
    folder = tmp_path / "model"
    shutil.copytree(policy_folder, folder)
    file = folder / "generation_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"top_k": 1, "do_sample": True, "repetition_penalty": 3.0})
    )
    settings: dict[str, Any] = {"dataset": str(data), "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4}
    plain, own = (
        TransformersEngine(EvalSettings(model=str(m), **settings), 3).generate([[3, 4, 5]], 0)
        for m in (policy_folder, folder)
    )
    assert plain == own and len({tuple(answer.tokens) for answer in own[0]}) > 1


def test_chats_system_prompts_and_other_columns(
    policy_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, seen = tmp_path / "seeing.py", tmp_path / "seen.json"
    see = f"    open({str(seen)!r}, 'w').write(json.dumps(given))\n    return [None] * len(given['completions'])\n"
    module.write_text(f"import json\n\ndef reward(**given):\n{see}")
    file = tmp_path / "chats.jsonl"
    rows = [{"prompt": "ab", "answer": "a", "task": "t0"}, {"prompt": "ab", "answer": "b", "task": "t1"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--reward", f"{module}:reward", "--max_new_tokens", "2", "--samples", "2", "--backend", "transformers"]
    output = tmp_path / "chat.jsonl"
    command = ["eval", policy_folder, str(file), *options]
    assert cli.main([*command, "--chat", "--system_prompt", "cd", "--output", str(output)]) == 0
    assert "4 answers have no score" in capsys.readouterr().out
    given = json.loads(seen.read_text())
    assert given["task"] == ["t0", "t0", "t1", "t1"] and given["answer"] == ["a", "a", "b", "b"]
    expected = [{"role": "system", "content": "cd"}, {"role": "user", "content": "ab"}]
    assert given["prompts"] == [expected] * 4
    assert [message["role"] for completion in given["completions"] for message in completion] == ["assistant"] * 4
    first, second = lines_of(output)
    assert first["prompt"] == expected and first["scores"] == [None, None]
    assert (first["id"], second["id"]) == (problem_id("ab"), problem_id("ab") + "-2")

    file.write_text(json.dumps({"prompt": expected, "answer": "a"}) + "\n")
    said = refusal(capsys, *command, "--system_prompt", "cd", "--output", tmp_path / "again.jsonl")
    assert "--system_prompt: the prompts of" in said and "have one already" in said


def test_an_adapter_is_evaluated_on_its_model(
    policy_folder: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What recipes/grpo_lora.py leaves: an adapter that is merged answers the same."""
    torch.manual_seed(0)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(policy_folder), LoraConfig(r=4, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    folders = {"adapter": tmp_path / "adapter", "merged": tmp_path / "merged", "base": Path(policy_folder)}
    model.save_pretrained(folders["adapter"])
    model.merge_and_unload().save_pretrained(folders["merged"])
    for name in ("adapter", "merged"):
        AutoTokenizer.from_pretrained(policy_folder).save_pretrained(folders[name])
    answers = {}
    for name, folder in folders.items():
        output = tmp_path / f"{name}.jsonl"
        options = ["--temperature", "0", "--samples", "1", "--output", str(output)]
        assert cli.main(["eval", str(folder), *arguments[2:], *options]) == 0
        answers[name] = [row["completions"] for row in lines_of(output)]
    assert answers["adapter"] == answers["merged"] != answers["base"]
    settings = EvalSettings(model=str(folders["adapter"]), dataset="d")
    assert choose_backend(settings) == "transformers"


# ------------------------------------------------------------------------------------------------------------- resuming


def evaluated(policy_folder: str, data: Path, output: Path, **options: Any) -> bytes:
    reward = f"{data.parent / 'own_reward.py'}:reward"
    settings = EvalSettings(
        policy_folder,
        str(data),
        reward,
        max_new_tokens=4,
        temperature=1.0,
        backend="transformers",
        batch_size=7,
        **options,
    )
    evaluate(settings, output, make_engine)
    return output.read_bytes()


@pytest.mark.parametrize("kept", [0, 30, 2000, -30])
def test_it_goes_on_after_any_byte(policy_folder: str, data: Path, tmp_path: Path, kept: int) -> None:
    whole = evaluated(policy_folder, data, tmp_path / "whole.jsonl")
    evaluated(policy_folder, data, tmp_path / "cut.jsonl")
    (tmp_path / "cut.jsonl").write_bytes(whole[:kept])
    assert evaluated(policy_folder, data, tmp_path / "cut.jsonl") == whole


def test_what_was_done_is_not_done_again(policy_folder: str, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    rows = evaluated(policy_folder, data, output).splitlines(keepends=True)
    marked = [row.replace(b'"completions"', b'"mark": 1, "completions"') for row in rows]
    output.write_bytes(b"".join(marked[:17]))  # two batches of seven, and three that are made again
    assert evaluated(policy_folder, data, output) == b"".join(marked[:14] + rows[14:])


@pytest.mark.slow
def test_it_goes_on_after_a_sigkill(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    prompts = ["".join(letters) for letters in itertools.permutations("abcdefg", 4)]
    file.write_text("".join(json.dumps({"prompt": p, "answer": p[0]}) + "\n" for p in prompts))
    command = [*arguments, "--batch_size", "2"]
    command[2] = str(file)
    output, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trl_sketch.cli", *command, "--output", str(output)],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not (output.exists() and output.read_bytes().count(b"\n") >= 20):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = output.read_bytes().count(b"\n")
    assert 20 <= done < len(prompts)
    assert not json.loads((tmp_path / "killed.summary.json").read_text())["finished"]
    for own in (output, whole):
        assert cli.main([*command, "--output", str(own)]) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert json.loads((tmp_path / "killed.summary.json").read_text())["finished"]


def test_it_does_not_go_on_with_other_settings(
    policy_folder: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(policy_folder, folder)
    evaluated(str(folder), data, output)
    for options, message in (
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"samples": 2, "top_p": 0.5}, "samples: 4 then, 2 now\n  top_p: 0.95 then, 0.5 now"),
        ({"limit": 3}, "limit: None then, 3 now"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluated(str(folder), data, output, **options)
    (folder / "model.safetensors").touch()  # trained again, into the same folder
    with pytest.raises(ValueError, match="model_files: '[0-9a-f]+' then, '[0-9a-f]+' now"):
        evaluated(str(folder), data, output)
    (tmp_path / "out.summary.json").unlink()
    with pytest.raises(ValueError, match="is there and has no out.summary.json"):
        evaluated(str(folder), data, output)
    evaluated(policy_folder, data, tmp_path / "data.jsonl")
    data.write_text(data.read_text().replace('"answer": "a"', '"answer": "b"'))
    with pytest.raises(ValueError, match="problems: '[0-9a-f]+' then"):
        evaluated(policy_folder, data, tmp_path / "data.jsonl")


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "0"], "--samples 0: it must be 1 or more"),
        (["--temperature", "-1"], "--temperature -1.0: it must be 0 or more"),
        (["--temperature", "nan"], "--temperature nan: it must be 0 or more"),
        (["--top_p", "0"], "--top_p 0.0: it must be above 0"),
        (["--temperature", "0"], "add --samples 1"),
        (["--reward", "nonsense"], "it must be FILE.py:FUNCTION, package.module:FUNCTION or one of exact_match, math"),
        (["--reward", "nowhere.py:f"], "there is no file nowhere.py"),
        (["--reward", "nowhere.at_all:f"], "nowhere.at_all cannot be imported"),
        (["--reward", "json:f"], "json has no function f"),
        (["--max_new_tokens", "62"], "the longest prompt has 3 tokens, and .* has room for 64. At most 61"),
        (["--tensor_parallel_size", "2"], "needs --backend vllm"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert re.search(message, refusal(capsys, *arguments, "--output", tmp_path / "out.jsonl", *options))


def test_data_sets_that_are_not_there(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    def said(dataset: Any, *options: str) -> str:
        return refusal(capsys, *arguments[:2], dataset, *arguments[3:], "--output", tmp_path / "out.jsonl", *options)

    assert "--dataset somebody/something is no folder here" in (message := said("somebody/something"))
    assert "pass a local file or folder" in message
    assert "--dataset missing.parquet: there is no such file" in said("missing.parquet")
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"question": "a", "answer": "b"}\n')
    assert "lacks the column prompt; it has question, answer: rename it" in said(wrong)
    folder = tmp_path / "folder"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"prompt": "ab", "answer": split}) + "\n")
    assert "has no split 'dev': it has" in said(folder, "--split", "dev")
    for options, answer in (([], "test"), (["--split", "train"], "train")):
        output = tmp_path / f"{answer}.jsonl"
        assert cli.main([*arguments[:2], str(folder), *arguments[3:], "--output", str(output), *options]) == 0
        assert [row["answer"] for row in lines_of(output)] == [answer]


def test_a_model_that_is_not_there(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    said = refusal(capsys, "eval", tmp_path / "nothing", *arguments[2:], "--output", tmp_path / "out.jsonl")
    assert f"MODEL {tmp_path / 'nothing'} cannot be loaded" in said


@pytest.mark.parametrize("result", ["[1.0]", "[float('nan')] * len(completions)"])
def test_a_reward_that_returns_something_else(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], result: str
) -> None:
    name = f"odd_{abs(hash(result))}"
    (tmp_path / f"{name}.py").write_text(f"def reward(completions, **kwargs):\n    return {result}\n")
    said = refusal(capsys, *arguments, "--output", tmp_path / "out.jsonl", "--reward", f"{tmp_path / name}.py:reward")
    assert "must return a finite number, or None, for each of 32 completions" in said


def test_the_recipes_rewards_are_the_packages() -> None:
    import rewards

    from trl_sketch.rewards import REWARDS, load_reward

    assert rewards.REWARDS is REWARDS
    check: Callable[..., list[float]] = load_reward("exact_match")
    assert check(completions=[" 12 ", [{"role": "assistant", "content": "13"}]], answer=["12", "12"]) == [1.0, 0.0]
