"""Every YAML file of every experiment, as its script reads it: parsed, matched with its neighbours, its trainer made.

The models are a tiny stand-in, and so are the data: nothing is downloaded.
"""

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import common
import pytest
import yaml
from settings import method_of, read_settings

from trl_sketch import SketchConfig


RECIPES = Path(common.__file__).parent
FILES = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name != "accelerate")
RUNNABLE = [path for path in FILES if "output_dir" in yaml.safe_load(path.read_text())]
EXPERIMENTS = sorted({path.parent for path in RUNNABLE})
GIVEN = {"update_ratio": "1e-4", "learning_rate": "1e-2", "model_name_or_path": "somebody/something"}
# In what the methods of an experiment may differ, beside the fields of their own configs.
METHOD = {
    *("output_dir", "logging_dir", "run_name", "model_init_kwargs", "learning_rate", "lr_scheduler_type"),
    *(
        "lr_scheduler_kwargs",
        "warmup_steps",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "weight_decay",
        "max_grad_norm",
    ),
}


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def arguments_of(path: Path, *more: str) -> list[str]:
    _, required = read_settings(path)
    given = [word for name in sorted(required) for word in (f"--{name}", GIVEN[name])]
    return ["--config", str(path), *given, *more]


def parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[Any]]:
    """The script's arguments, the trainer's, and the method's."""
    method = method_of(read_settings(path)[0])
    own = {"lora": ("grpo_lora", "LoraArguments"), "dense": ("grpo_dense", "DenseArguments")}
    configs = [SketchConfig]
    if method in own:
        module, name = own[method]
        configs = [getattr(importlib.import_module(module), name)]
    monkeypatch.setattr(sys, "argv", [f"grpo_{method}.py", *arguments_of(path)])
    script, training, *rest = common.parse_arguments("unused", *configs)
    return script, training, rest


def parsed_sketch(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, SketchConfig]:
    _, training, (sketch,) = parse(RECIPES / name, monkeypatch)
    return training, sketch


def differences(path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    first, second = (parse(p, monkeypatch)[:2] for p in (path, other))
    return {
        field.name
        for a, b in zip(first, second, strict=True)
        for field in dataclasses.fields(a)
        if getattr(a, field.name) != getattr(b, field.name)
    }


def test_the_experiments_are_there() -> None:
    assert {folder.name for folder in EXPERIMENTS} == {
        "embedded",
        "kl-budget",
        "qwen-27b-reasoning-gym",
        "qwen2.5-math-1.5b-dapo",
        "qwen2.5-math-7b-dapo",
        "qwen3-1.7b-gsm8k",
        "rank-and-basis",
        "smollm2-135m",
        "smollm2-135m-chain-sum",
        "smollm2-135m-precision",
    }
    outputs = [read_settings(path)[0]["output_dir"] for path in RUNNABLE]
    assert len(set(outputs)) == len(outputs)
    for path, output in zip(RUNNABLE, outputs, strict=True):
        if path.parent.name != "embedded":
            assert output == f"runs/{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_every_setting_arrives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, training, rest = parse(path, monkeypatch)
    values = {name: getattr(config, name) for config in (script, training, *rest) for name in vars(config)}
    for name, value in read_settings(path)[0].items():
        if name == "report_to":
            assert value == "none" and values[name] == []
        elif isinstance(value, dict):
            assert values[name] == value, name
        else:
            assert str(getattr(values[name], "value", values[name])) == str(value), name
    assert common.REWARDS.keys() >= set(script.rewards)


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_an_experiments_runs_differ_in_the_method_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [path for path in RUNNABLE if path.parent == folder]
    for other in others:
        assert differences(first, other, monkeypatch) <= METHOD, other


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": "abc"}], "answer": "a", "task": "chain_sum", "metadata": "{}"}
    ] * 40
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_its_trainer_is_made(
    path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: str, problems: str, tmp_path: Path
) -> None:
    """By the script itself, up to the call that would train."""
    method = method_of(read_settings(path)[0])
    recipe = importlib.import_module(f"grpo_{method}")
    made: list[Any] = []
    monkeypatch.setattr(recipe, "run", lambda trainer, job: made.append((trainer, job)))
    monkeypatch.setattr(recipe, "report", lambda *args: None)
    small = ["--model_name_or_path", policy_folder, "--dataset_name", problems, "--output_dir", str(tmp_path)]
    small += ["--use_vllm", "false", "--use_cpu", "true", "--max_completion_length", "4"]
    monkeypatch.setattr(sys, "argv", [f"grpo_{method}.py", *arguments_of(path, *small)])
    recipe.main()
    ((trainer, job),) = made
    assert len(job.train) > 0 and len(trainer.train_dataset) == len(job.train)
    assert type(trainer).__name__ == {"sketch": "SketchGRPOTrainer"}.get(method, "BaselineGRPOTrainer")
    assert sum("lora_" in name for name, _ in trainer.model.named_parameters()) == (28 if method == "lora" else 0)


# ------------------------------------------------------------------------------------------------ the papers' numbers


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_logras_main_experiment(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 4, on four training GPUs."""
    folder = f"qwen2.5-math-{size}-dapo"
    training, sketch = parsed_sketch(f"{folder}/sketch.yaml", monkeypatch)
    assert sketch == SketchConfig.logra(update_ratio=6e-5)
    assert (sketch.kl_budget, sketch.kl_budget_final, sketch.kl_schedule_steps) == (2e-4, 2e-5, 300)
    assert 4 * training.per_device_train_batch_size * training.gradient_accumulation_steps == 128
    assert (training.num_generations, training.advantage_baseline, training.baseline_weight) == (1, "running", 0.1)
    script, dense, _ = parse(RECIPES / folder / "dense.yaml", monkeypatch)
    assert script.model_name_or_path == f"Qwen/Qwen2.5-Math-{size.upper()}"
    assert (dense.learning_rate, dense.lr_scheduler_kwargs, dense.warmup_steps) == (1e-6, {"min_lr": 1e-7}, 9)
    assert (dense.adam_beta1, dense.adam_beta2, dense.adam_epsilon, dense.weight_decay) == (0.9, 0.95, 1e-8, 0.0)
    _, lora, (adapter,) = parse(RECIPES / folder / "lora.yaml", monkeypatch)
    assert (adapter.lora_r, lora.learning_rate, lora.lr_scheduler_type) == (256, 2e-4, "constant")


def test_logras_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 3.3 and appendix D.2."""
    training, sketch = parsed_sketch("qwen-27b-reasoning-gym/sketch.yaml", monkeypatch)
    assert (sketch.kl_probe, sketch.kl_schedule_steps, sketch.rank) == ("finite_difference", 1000, 256)
    assert (training.seed, training.vllm_max_model_length, training.num_generations) == (42, 16384, 1)
    assert 4 * training.per_device_train_batch_size * training.gradient_accumulation_steps == 128


def test_logras_ablations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures 5 and 6."""
    budgets = {
        path.stem: parsed_sketch(name_of(path), monkeypatch)[1] for path in RUNNABLE if path.parent.name == "kl-budget"
    }
    assert {
        name: (c.kl_budget, c.kl_budget_final, c.kl_schedule) for name, c in budgets.items() if c.kl_budget is not None
    } == {
        "constant-large": (1.5e-3, 1.5e-3, "constant"),
        "constant-small": (1.5e-4, 1.5e-4, "constant"),
        "annealed": (2e-4, 2e-5, "cosine"),
    }
    assert budgets["none"].kl_budget is None and budgets["annealed"].kl_schedule_steps == 1500
    assert {c.update_ratio for c in budgets.values()} == {6e-5}
    assert not any(c.mismatch_subtraction for c in budgets.values())
    bases = [parsed_sketch(name_of(path), monkeypatch)[1] for path in RUNNABLE if path.parent.name == "rank-and-basis"]
    assert {(c.rank, c.projection, c.refresh) for c in bases} == {
        (rank, *basis)
        for rank in (4, 16, 64, 256)
        for basis in (("rademacher", "never"), ("rademacher", "every_step"), ("gaussian", "every_step"))
    }


def test_rgcs_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (64, 128, 256):
        training, normalized = parsed_sketch(f"qwen3-1.7b-gsm8k/normalized-r{rank}.yaml", monkeypatch)
        assert normalized == SketchConfig.rgc(rank, update_ratio=1e-4)
        plain_training, plain = parsed_sketch(f"qwen3-1.7b-gsm8k/plain-r{rank}.yaml", monkeypatch)
        assert plain == SketchConfig.rgc(rank, norm="none") and plain_training.learning_rate == 1e-2
        assert training.max_steps == 200
        assert training.per_device_train_batch_size * training.gradient_accumulation_steps == 64


def test_the_ablation_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs differ in what a trained weight is kept in, and compute in bf16."""
    runs = {name: parsed_sketch(f"smollm2-135m-precision/{name}.yaml", monkeypatch) for name in ("bf16", "fp32")}
    for name, (training, sketch) in runs.items():
        assert (sketch.update_ratio, sketch.kl_budget, sketch.weight_precision, training.bf16) == (
            6e-5,
            None,
            name,
            True,
        )
        assert training.model_init_kwargs["dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[name]
    assert dataclasses.replace(runs["fp32"][1], weight_precision="bf16") == runs["bf16"][1]


# ------------------------------------------------------------------------------------------------------- the YAML files


def test_includes_and_what_is_required(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "common.yaml").write_text("required: [c, d]\na: 1\nb: 1\n")
    (tmp_path / "sub" / "method.yaml").write_text("include: ../common.yaml\nb: 2\nc: 2\n")
    (tmp_path / "sub" / "two.yaml").write_text("include: [method.yaml, other.yaml]\n")
    (tmp_path / "sub" / "other.yaml").write_text("b: 3\n")
    assert read_settings(tmp_path / "common.yaml") == ({"a": 1, "b": 1}, {"c", "d"})
    assert read_settings(tmp_path / "sub" / "method.yaml") == ({"a": 1, "b": 2, "c": 2}, {"d"})
    assert read_settings(tmp_path / "sub" / "two.yaml") == ({"a": 1, "b": 3, "c": 2}, {"d"})
    (tmp_path / "loop.yaml").write_text("include: loop.yaml\n")
    with pytest.raises(ValueError, match=r"loop\.yaml includes itself"):
        read_settings(tmp_path / "loop.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="must contain a YAML mapping"):
        read_settings(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("required: [learning_rate]\n", "needs --learning_rate"),
        ("ranks: 7\n", "has settings that grpo_sketch.py does not know: --ranks 7"),
        ("include: missing.yaml\n", "No such file"),
    ],
)
def test_mistakes_in_a_file_are_named(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["recipes/grpo_sketch.py", "--config", str(file)])
    with pytest.raises(SystemExit):
        common.parse_arguments("unused", SketchConfig)
    assert message in capsys.readouterr().err


def test_the_command_line_goes_before_the_file_and_the_file_may_set_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOMETHING", "old")
    file = tmp_path / "mine.yaml"
    file.write_text("required: [learning_rate]\nenv: {SOMETHING: 7}\nrank: 8\nlearning_rate: 1e-3\n")
    monkeypatch.setattr(sys, "argv", ["grpo_sketch.py", "--config", str(file), "--rank", "9"])
    _, training, sketch = common.parse_arguments("unused", SketchConfig)
    assert (sketch.rank, training.learning_rate) == (9, 1e-3)
    assert os.environ["SOMETHING"] == "7"
