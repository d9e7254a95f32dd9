"""The recipes as a person runs them."""

import difflib
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import pytest
import torch
from embedded import WarmStart, encode, evaluate, make_problems, warm_start_model
from meters import completion_log_probs
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from trl_sketch import SketchConfig, get_sketch_model
from trl_sketch.model import sketch_state
from trl_sketch.records import RunRecord


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
    assert (sketch.rank, sketch.norm, sketch.spectral_power) == (48, "none", 0.5)


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
    import grpo_dense
    import grpo_lora

    own = {"sketch": SketchConfig, "lora": grpo_lora.LoraArguments, "dense": grpo_dense.DenseArguments}
    monkeypatch.setattr(sys, "argv", ["recipe"])
    script, training, *_ = common.parse_arguments(f"{method}.yaml", own[method])
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
    found = evaluate(model, tokenizer, problems, samples=2, max_new_tokens=4)
    assert found.greedy_scores == [1.0] * 3 and found.greedy == 1.0
    assert [len(scores) for scores in found.sampled_scores] == [2, 2, 2]
    assert found.sampled == sum(map(sum, found.sampled_scores)) / 6
    assert math.isnan(evaluate(model, tokenizer, problems, samples=0, max_new_tokens=4).sampled)


def test_scores_are_those_of_their_problems(policy_folder: str) -> None:
    """Of each problem and, when sampled, of all of its samples, in whatever batches they are generated."""
    model, tokenizer = (kind.from_pretrained(policy_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    problems = [
        {"prompt": text, "answer": "", "worth": worth} for text, worth in (("ab", 0.25), ("c", 0.5), ("d", 1.0))
    ]

    def worth_of(completions: list, worth: list[float], **kwargs: Any) -> list[float | None]:
        return [None if value == 0.5 else value for value in worth]

    found = evaluate(model, tokenizer, problems, samples=3, reward=worth_of, max_new_tokens=2, batch_size=2)
    assert found.greedy_scores == [0.25, 0.0, 1.0]  # what cannot be scored counts as 0
    assert found.sampled_scores == [[0.25] * 3, [0.0] * 3, [1.0] * 3]


def test_validation_problems_are_others_than_those_of_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the embedded task and of a dataset without splits; training never sees those that the run is judged on."""
    monkeypatch.setattr(common, "warm_start_model", lambda *args, **kwargs: "model")
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}", "answer": ""}) + "\n" for i in range(200)))
    own = ["--model_name_or_path", "m", "--dataset_name", str(file)]
    for arguments, count in (([], 64), (own, 18)):
        jobs = {}
        for split in ("test", "validation"):
            script, training, _ = parse(
                monkeypatch, *arguments, "--dataset_test_split", split, "--num_eval_problems", str(count)
            )
            jobs[split] = common.prepare(script, training)
            held_out = {problem["prompt"] for problem in jobs[split].held_out}
            assert len(held_out) == count and held_out.isdisjoint(jobs[split].train["prompt"])
        test, validation = ({p["prompt"] for p in jobs[split].held_out} for split in ("test", "validation"))
        assert test.isdisjoint(validation)
        assert test.isdisjoint(jobs["validation"].train["prompt"])
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--dataset_test_split", "valid")


@pytest.mark.parametrize("name", ["num_eval_problems", "accuracy_every", "rollout_gap_every"])
def test_negative_numbers_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(monkeypatch, f"--{name}", "-1")
    assert f"--{name} -1: it must not be negative" in capsys.readouterr().err
    assert getattr(parse(monkeypatch, f"--{name}", "0")[0], name) == 0
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--max_prompt_length", "0")
    assert "--max_prompt_length 0: it must be a number of tokens" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["lora", "dense"])
def test_the_readme_says_how_the_scripts_differ(other: str) -> None:
    def main_of(method: str) -> list[str]:
        text = (ROOT / "recipes" / f"grpo_{method}.py").read_text()
        return text[text.index("def main") : text.index("if __name__")].splitlines()

    lines = list(difflib.unified_diff(main_of("sketch"), main_of(other), n=0, lineterm=""))[2:]
    block = "\n".join(line for line in lines if not line.startswith("@@"))
    assert f"```diff\n{block}\n```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("targets", [None, ["all-linear"], ["q_proj", "down_proj"]])
def test_dense_adamw_on_the_matrices_of_a_sketch(targets: list[str] | None, policy_folder: str) -> None:
    import grpo_dense

    model, sketched = (AutoModelForCausalLM.from_pretrained(policy_folder) for _ in range(2))
    grpo_dense.DenseArguments(targets).freeze_the_rest(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if targets is None:
        assert trained == {name for name, _ in model.named_parameters()}
        return
    get_sketch_model(sketched, SketchConfig(target_modules=None if targets == ["all-linear"] else targets))
    assert trained == {f"{name}.weight" for name in sketch_state(sketched).layers}


def trained_record(folder: Path, method: str, *arguments: str) -> RunRecord:
    """The record of six steps on 16 short problems, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module(f"grpo_{method}")
        words = ["--output_dir", str(folder), "--max_steps", "6", "--per_device_train_batch_size", "8"]
        words += ["--num_generations", "4", "--num_eval_problems", "8", "--logging_steps", "2"]
        patch.setattr(sys, "argv", [f"grpo_{method}.py", *words, *arguments])
        module.main()
    return RunRecord.load(folder)


def test_measuring_accuracy_leaves_the_training_as_it_is(warm_start: str, tmp_path: Path) -> None:
    plain = trained_record(tmp_path / "plain", "sketch")
    measured = trained_record(tmp_path / "measured", "sketch", "--accuracy_every", "3")
    assert plain.accuracy == measured.accuracy and plain.problems == measured.problems
    for name in ("reward", "loss", "grad_norm", "sketch/predicted_kl"):
        assert [entry[name] for entry in plain.log] == [entry[name] for entry in measured.log]
    assert ["accuracy/sampled" in entry for entry in measured.log] == [False, True, False]  # logged at steps 2, 4, 6
    assert [entry["step"] for entry in measured.log] == [2, 4, 6]


def test_measuring_takes_no_part_in_the_time(warm_start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = common.Accuracy([1.0] * 8, [[1.0]] * 8)
    monkeypatch.setattr(common, "accuracy", lambda trainer, job: time.sleep(0.5) or found)
    record = trained_record(tmp_path, "dense", "--accuracy_every", "1")  # behind five of the six steps
    steps = sum(
        2 * (entry["time/rollout"] + entry["time/update"]) for entry in record.log
    )  # each entry: two steps' mean
    assert abs(record.seconds - steps) < 1.25, (record.seconds, steps)


def test_weights_in_bf16_are_those_of_the_rollouts_and_an_fp32_master_is_not(warm_start: str, tmp_path: Path) -> None:
    """The gap that `rollout_gap_every` logs, which is measured behind every third step and logged at every second."""
    often = ["--rollout_gap_every", "3"]
    bf16 = trained_record(tmp_path / "bf16", "sketch", *often)
    assert ["rollout_gap/mean" in entry for entry in bf16.log] == [False, True, True]
    assert [entry["rollout_gap/max"] for entry in bf16.log[1:]] == [0.0, 0.0]
    fp32 = trained_record(tmp_path / "fp32", "dense", *often)
    assert all(1e-4 < entry["rollout_gap/mean"] < entry["rollout_gap/max"] < 1 for entry in fp32.log[1:])
    plain = trained_record(tmp_path / "plain", "dense")
    assert plain.accuracy == fp32.accuracy and plain.log[-1]["loss"] == fp32.log[-1]["loss"]


def test_what_the_gap_to_rollouts_cannot_look_at_is_refused(warm_start: str, tmp_path: Path) -> None:
    for method, arguments, message in (
        ("lora", ["--rollout_gap_every", "1"], "rollout_gap_every=1 looks at the model's own weights"),
        ("dense", ["--rollout_gap_every", "1", "--num_eval_problems", "0"], "set num_eval_problems to 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            trained_record(tmp_path, method, *arguments)


def test_log_probabilities_of_completions_do_not_depend_on_padding(warm_start: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(warm_start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(warm_start)
    problems = make_problems("held_out", 3)
    prompts = [problem["prompt"][-i:] for i, problem in enumerate(problems, start=3)]  # of different lengths
    answers = torch.tensor([[tokenizer.convert_tokens_to_ids(digit) for digit in "1234"]] * 3)
    inputs = encode(tokenizer, prompts)
    length = inputs["input_ids"].shape[1]
    tokens = torch.cat([inputs["input_ids"], answers], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(answers)], dim=1)
    with torch.no_grad():
        found = completion_log_probs(model, tokens, mask, length)
        for row, prompt in enumerate(prompts):
            alone = torch.cat([encode(tokenizer, [prompt])["input_ids"], answers[:1]], dim=1)
            assert alone.shape[1] == int(mask[row].sum())
            expected = model(alone).logits[0, -5:-1].log_softmax(-1).gather(1, answers[row, :, None]).squeeze(1)
            torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("folds", [False, True])
def test_a_frozen_head_is_not_copied_for_each_row(folds: bool, warm_start: str) -> None:
    """Without `fold_head` PyTorch copies it; should a later version not, the function is not needed any more."""
    model = AutoModelForCausalLM.from_pretrained(warm_start).requires_grad_(False)
    if folds:
        common.fold_head(model)
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profiler:
        model(torch.full((4, 9), 3), logits_to_keep=1)
    heads = [[4, 1, model.config.hidden_size], [4, model.config.hidden_size, model.config.vocab_size]]
    copied = [event for event in profiler.events() if event.name == "aten::bmm" and event.input_shapes[:2] == heads]
    assert bool(copied) != folds


def test_a_resumed_runs_record_has_the_earlier_steps(warm_start: str, tmp_path: Path) -> None:
    first = trained_record(tmp_path, "lora", "--save_strategy", "steps", "--save_steps", "4", "--logging_steps", "1")
    shutil.rmtree(tmp_path / "checkpoint-6", ignore_errors=True)
    again = trained_record(tmp_path, "lora", "--resume_from_checkpoint", "true", "--logging_steps", "1")
    assert [entry["step"] for entry in again.log] == [1, 2, 3, 4, 5, 6]
    assert again.log[:4] == first.log[:4]
    assert again.log[4]["seconds"] > again.log[3]["seconds"] and again.seconds >= again.log[-1]["seconds"]
    assert again.accuracy["before"] == first.accuracy["before"]
    memory = again.memory
    assert (
        memory["gradient"] == memory["adapter"] and 2 * memory["adapter"] < memory["optimizer"]
    )  # moments and step counts


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
    record = RunRecord.load(output)
    assert record.finished and record.label == {"sketch": "gradient sketch", "lora": "LoRA"}.get(method, "dense AdamW")
    assert 0.3 < sum(record.accuracy["before"]["greedy"]) / 64 < 0.65
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
