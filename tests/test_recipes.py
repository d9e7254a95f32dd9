"""The recipes as a person runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import common
import pytest
from embedded import WarmStart, evaluate, make_problems, warm_start_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from trl_sketch import SketchConfig


ROOT = Path(__file__).parents[1]


def run(recipe: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    command = [sys.executable, str(ROOT / "recipes" / recipe), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)


@pytest.fixture(scope="module")
def warm_start() -> str:
    return warm_start_model(WarmStart(seed=0))


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[common.ScriptArguments, GRPOConfig, SketchConfig]:
    monkeypatch.setattr(sys, "argv", ["grpo_sketch.py", *arguments])
    return common.parse_arguments("sketch.yaml", SketchConfig)


def test_no_arguments_are_the_embedded_default(monkeypatch: pytest.MonkeyPatch) -> None:
    script, training, sketch = parse(monkeypatch)
    assert script.model_name_or_path is None
    assert (training.max_steps, training.output_dir) == (200, "runs/sketch")
    assert (sketch.rank, sketch.norm) == (32, "matrix")


def test_a_model_of_ones_own_takes_the_defaults_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    spellings = [
        ["--model_name_or_path", "m", "--dataset_name", "d", "--kl_budget", "1e-3"],
        ["--model_name_or_path=m", "--dataset_name=d", "--kl_budget=1e-3"],
        ["--model-name-or-path", "m", "--dataset-name", "d", "--kl-budget", "1e-3"],
    ]
    for arguments in spellings:
        script, training, sketch = parse(monkeypatch, *arguments)
        assert (script.model_name_or_path, script.dataset_name) == ("m", "d")
        assert training.max_steps == -1
        assert sketch == SketchConfig(kl_budget=1e-3)


def test_a_yaml_in_either_spelling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("rank: 7\nmodel_name_or_path: m\ndataset_name: d\n")
    for arguments in (["--config", str(file)], [f"--config={file}"]):
        script, _, sketch = parse(monkeypatch, *arguments)
        assert (script.model_name_or_path, sketch.rank) == ("m", 7)


@pytest.mark.parametrize("method", ["sketch", "lora", "dense"])
def test_every_yaml_is_parsed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_lora

    configs = {"sketch": [SketchConfig], "lora": [grpo_lora.LoraArguments], "dense": []}[method]
    monkeypatch.setattr(sys, "argv", ["recipe"])
    script, training, *_ = common.parse_arguments(f"{method}.yaml", *configs)
    assert training.output_dir == f"runs/{method}"
    assert training.max_steps == 200


def test_held_out_problems_are_not_trained_on() -> None:
    held_out = {row["prompt"] for row in make_problems("held_out", 512)}
    assert len(held_out) == 512
    for seed in (0, 1):
        assert held_out.isdisjoint(row["prompt"] for row in make_problems("train", 8192, seed=seed))
    for row in make_problems("held_out", 20):
        assert row["answer"] == "".join(sorted(row["prompt"].rstrip("=")))


@pytest.mark.parametrize("form", ["text", "chat"])
def test_evaluation_of_prompts_of_different_lengths(policy_folder: str, form: str) -> None:
    """In one batch, padded on the left, the model gives the answers that it gives to each prompt alone."""
    model, tokenizer = (kind.from_pretrained(policy_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    texts = ["abcde", "k", "hi"]
    prompts = texts if form == "text" else [[{"role": "user", "content": text}] for text in texts]
    answers = []
    for prompt in prompts:
        inputs = (
            prompt
            if form == "text"
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )
        tokens = tokenizer(inputs, return_tensors="pt")
        output = model.generate(**tokens, max_new_tokens=4, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(output, skip_special_tokens=True))
    problems = [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]
    assert evaluate(model, tokenizer, problems, samples=0, max_new_tokens=4).greedy == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sketch", "lora", "dense"])
def test_a_few_steps_of_the_embedded_default(method: str, warm_start: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run(
        f"grpo_{method}.py",
        "--seed",
        "0",
        "--max_steps",
        "3",
        "--num_eval_problems",
        "64",
        "--output_dir",
        str(output),
    )
    assert done.returncode == 0, done.stderr
    for word in ("greedy", "training state", "gradient sketch", "LoRA", "dense AdamW", "reward.png"):
        assert word in done.stdout
    result = json.loads((output / "result.json").read_text())
    assert result["method"] == method
    assert 0.3 < result["before"]["greedy"] < 0.65
    assert (output / "reward.png").stat().st_size > 10_000
    if method == "sketch":
        trained, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (output, warm_start))
        moved = {n for n, p in trained.named_parameters() if not p.equal(start.get_parameter(n))}
        assert len(moved) == 28 and all("proj" in name for name in moved)


@pytest.mark.slow
def test_a_model_and_a_dataset_of_ones_own(warm_start: str, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in make_problems("train", 64)))
    arguments = ["--model_name_or_path", warm_start, f"--dataset_name={file}", "--max_steps", "2", "--rank", "8"]
    arguments += ["--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "10"]
    done = run("grpo_sketch.py", *arguments, "--num_eval_problems", "6", "--output_dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "right on 6 held-out problems" in done.stdout


def test_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"prompt": "1", "solution": "2"}\n')
    mistakes = {
        ("--model_name_or_path", "m"): "needs --dataset_name",
        ("--model_name_or_path", "m", "--dataset_name", "missing.jsonl"): "there is no such file",
        ("--model_name_or_path", "m", "--dataset_name", str(file)): "lacks the columns ['answer']",
        ("--rewards", "nonsense"): "it must be among",
        ("--kl_budget", "-1"): "kl_budget must be None or positive",
    }
    for arguments, message in list(mistakes.items()):
        done = run("grpo_sketch.py", *arguments)
        assert done.returncode != 0
        assert message in done.stderr
