"""The size of a first AdamW step, against a step of torch's AdamW and against the sketches' own steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model
from trl_sketch.calibrate import calibrate, main
from trl_sketch.model import sketch_state


TOKENS = torch.tensor([[3, 5, 7, 11, 13, 17, 19, 23], [4, 8, 15, 16, 23, 9, 10, 12]])


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    (scale * model(input_ids=TOKENS, labels=TOKENS).loss).backward()


def selected(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if "proj" in n}


def distance(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    return sum((after[n].double() - before[n].double()).square().sum().item() for n in before) ** 0.5


def norm(weights: dict[str, torch.Tensor]) -> float:
    return sum(w.double().square().sum().item() for w in weights.values()) ** 0.5


@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["large gradients", "gradients near epsilon"])
def test_it_is_the_size_of_a_real_adamw_step(tiny_qwen3: Callable[..., Qwen3ForCausalLM], scale: float) -> None:
    model = tiny_qwen3(torch.float64)
    backward(model, scale)
    before = selected(model)
    result = calibrate(model, learning_rate=1e-4, epsilon=1e-8)
    assert distance(selected(model), before) == 0
    torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-8, weight_decay=0.0).step()
    moved = distance(selected(model), before)
    assert result.update_ratio == pytest.approx(moved / norm(before), rel=1e-5)
    assert result.weights == sum(w.numel() for w in before.values()) and result.matrices == len(before) == 14
    assert result.rms == pytest.approx(moved / result.weights**0.5, rel=1e-5)
    assert result.rms < (1.0 if scale == 1.0 else 0.7) * 1e-4


@pytest.mark.parametrize("norm_kind", ["matrix", "global", "none"])
def test_a_calibrated_sketch_moves_as_far(tiny_qwen3: Callable[..., Qwen3ForCausalLM], norm_kind: str) -> None:
    settings: dict[str, Any] = {"rank": 8, "projection": "orthonormal", "update_rule": "sgd", "norm": norm_kind}
    settings |= {"kl_budget": None, "share_projection": False}
    dense = tiny_qwen3()
    backward(dense)
    start = selected(dense)
    result = calibrate(dense, 1e-4, SketchConfig(**settings))
    if norm_kind != "none":
        settings["update_ratio"] = result.update_ratio
    model = get_sketch_model(tiny_qwen3(), SketchConfig(**settings))
    optimizer = SketchOptimizer(model, lr=result.plain_learning_rate if norm_kind == "none" else 1e-3)
    model.train()
    model.enable_input_require_grads()
    backward(model)
    assert len(sketch_state(model).layers) == result.matrices
    optimizer.step()
    # A sketch's factor is rounded to 8 bits.
    assert distance(selected(model), start) == pytest.approx(result.update_ratio * norm(start), rel=0.02)


def test_what_cannot_be_measured_is_named(tiny_qwen3: Callable[..., Qwen3ForCausalLM]) -> None:
    model = tiny_qwen3()
    with pytest.raises(ValueError, match="q_proj.weight has no gradient"):
        calibrate(model, 1e-6)
    backward(model, 0.0)
    with pytest.raises(ValueError, match="the gradient is zero"):
        calibrate(model, 1e-6)


@pytest.fixture
def arguments(policy_folder: str, tmp_path: Path) -> list[str]:
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("abc", "bcad", "fgh", "kl")))
    reward = tmp_path / "own_reward.py"
    reward.write_text("def reward(completions, **kwargs):\n    return [float(len(set(c))) for c in completions]\n")
    options = ["--model", policy_folder, "--dataset", str(data), "--reward", f"{reward}:reward", "--use_cpu"]
    return [*options, "--num_prompts", "4", "--num_generations", "4", "--max_completion_length", "4", "--rank", "8"]


def test_the_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*arguments, "--learning_rate", "1e-3"])
    printed = capsys.readouterr().out
    ratio, plain = (
        float(re.search(rf"^{name}: (\S+)", printed, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("update_ratio", "plain_learning_rate")
    )
    # Initial weights have a standard deviation of 0.02, and a first AdamW step moves each by nearly the learning rate.
    assert 0.8 * 1e-3 / 0.02 < ratio < 1.1 * 1e-3 / 0.02
    assert plain > 0


def test_mistakes_are_named(arguments: list[str], tmp_path: Path, offline: None) -> None:
    mistakes = {
        ("--reward", "nonsense"): "it must be FILE.py:FUNCTION",
        ("--reward", f"{tmp_path}/missing.py:f"): "there is no file",
        ("--reward", f"{tmp_path}/own_reward.py:f"): "has no f",
        ("--dataset", "missing.jsonl"): "there is no such file",
        ("--dataset", "somebody/something"): "pass a local file or folder",
        ("--microbatch", "5"): "must divide the batch of 16",
    }
    for change, message in mistakes.items():
        with pytest.raises(SystemExit, match=message):
            main([*arguments, *change])
