"""The numbers of KL control on trained models: the embedded tiny Qwen3, and SmolLM2-135M from a package."""

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from embedded import WarmStart, make_problems, warm_start_model
from smollm2 import smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, kl


BUDGET = 2e-4
FACTS = {
    "Name a planet.": "Jupiter is the largest planet of the solar system, and it has dozens of moons.",
    "What is the capital of France?": "The capital of France is Paris, a city on the river Seine.",
    "Give a number between one and ten.": "I choose seven, because many people think of it first.",
    "How does a bird fly?": "A bird flies by flapping its wings, which push the air down and back.",
}


def texts(name: str, tokenizer: Any) -> list[tuple[str, str]]:
    if name == "embedded":
        return [(row["prompt"], row["answer"]) for row in make_problems("train", 64)]
    return [
        (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
            ),
            a,
        )
        for q, a in FACTS.items()
    ]


def encode(name: str, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Prompts with left padding, and answers with labels."""
    pairs = texts(name, tokenizer)
    tokenizer.padding_side = "left"
    prompts = tokenizer([p for p, _ in pairs], return_tensors="pt", padding=True)
    tokenizer.padding_side = "right"
    answers = tokenizer([a + tokenizer.eos_token for _, a in pairs], return_tensors="pt", padding=True)
    ids = torch.cat([prompts["input_ids"], answers["input_ids"]], dim=1)
    mask = torch.cat([prompts["attention_mask"], answers["attention_mask"]], dim=1)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : prompts["input_ids"].shape[1]] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture(scope="module", params=["embedded", "smollm2"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, dict[str, torch.Tensor]]:
    folder = warm_start_model(WarmStart(seed=0)) if request.param == "embedded" else smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), encode(request.param, tokenizer)


def propose(
    base: Any, inputs: dict[str, torch.Tensor], dtype: torch.dtype, update_ratio: float = 2e-5, seed: int = 0
) -> tuple[Any, SketchOptimizer]:
    """A policy gradient with random advantages."""
    model = copy.deepcopy(base).to(dtype).train()
    get_sketch_model(model, SketchConfig(rank=32, update_ratio=update_ratio, projection_seed=seed))
    optimizer = SketchOptimizer(model, lr=1.0)
    log_p = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits.float().log_softmax(-1)
    log_p = log_p[:, :-1].gather(-1, inputs["input_ids"][:, 1:, None])[..., 0] * (inputs["labels"][:, 1:] != -100)
    advantages = torch.randn(len(log_p), generator=torch.Generator().manual_seed(seed))
    (-log_p.sum(dim=1) * advantages).mean().backward()
    optimizer.propose()
    return model, optimizer


@pytest.mark.parametrize(
    ("dtype", "method", "tolerance"),
    [
        (torch.float32, "jvp", 0.03),
        (torch.bfloat16, "jvp", 0.1),
        (torch.bfloat16, "finite_difference", 0.1),
    ],
)
def test_realized_kl_is_the_predicted_one(loaded: Any, dtype: torch.dtype, method: str, tolerance: float) -> None:
    """The realized KL is that of the weights as the rollout has them. Stochastic rounding moves it either way, by some
    percent in so small a model, so bf16 is averaged over three projections."""
    base, inputs = loaded
    realized = []
    for seed in range(1 if dtype == torch.float32 else 3):
        model, optimizer = propose(base, inputs, dtype, seed=seed)
        q = kl.predicted_kl(model, inputs, method=method)
        optimizer.scale(kl.step_scale(q, BUDGET, alpha_max=math.inf))
        before = kl.reference_states(model, [inputs])
        optimizer.step()
        realized.append(kl.realized_kl(model, [inputs], before))
    assert statistics.mean(realized) == pytest.approx(BUDGET, rel=tolerance)


def test_realized_kl_grows_with_the_square_of_alpha(loaded: Any) -> None:
    base, inputs = loaded
    model, _ = propose(base, inputs, torch.float32)
    at_budget = math.sqrt(BUDGET / kl.predicted_kl(model, inputs))
    points = []
    for alpha in (0.25, 0.5, 1.0, 2.0):
        model, optimizer = propose(base, inputs, torch.float32)
        optimizer.scale(alpha * at_budget)
        before = kl.reference_states(model, [inputs])
        optimizer.step()
        points.append((math.log(alpha), math.log(kl.realized_kl(model, [inputs], before))))
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    assert slope == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.01), (torch.bfloat16, 0.1)])
def test_finite_difference_agrees_with_jvp(loaded: Any, dtype: torch.dtype, tolerance: float) -> None:
    base, inputs = loaded
    for update_ratio in (1e-6, 1e-4, 1e-2):
        model, _ = propose(base, inputs, dtype, update_ratio)
        q = kl.predicted_kl(model, inputs)
        difference = kl.predicted_kl(model, inputs, method="finite_difference")
        assert difference == pytest.approx(q, rel=tolerance)
