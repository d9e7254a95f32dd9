"""The predicted KL of several ranks is one number: the mean over the positions of all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from transformers import Qwen3Config, Qwen3ForCausalLM

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, kl


def measure(inputs: list[dict[str, torch.Tensor]], rollout: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """What a rank with these batches finds, for the same proposal on each."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1,
    )  # fmt: skip
    model = get_sketch_model(Qwen3ForCausalLM(config), SketchConfig(rank=8, update_ratio=1e-3))
    optimizer = SketchOptimizer(model, lr=1.0)
    ids = torch.arange(3, 35).reshape(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.propose()
    before = kl.reference_states(model, inputs)
    q = kl.predicted_kl(model, inputs)
    optimizer.step()
    return {"q": q, "realized": kl.realized_kl(model, inputs, before), "mismatch": kl.measure_mismatch(rollout, [2])}


def batches() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Two batches of different lengths, and their rollouts with different mismatches; the third rank has nothing."""
    inputs, rollouts = [], []
    for length, mismatch in ((20, 0.1), (7, 0.4)):
        ids = torch.arange(3, 3 + length)[None] % 60 + 3
        inputs.append({"input_ids": ids, "labels": ids})
        ones = torch.ones(1, length)
        completion = torch.full((1, length), 2)
        rollouts.append(
            {
                "completion_ids": completion,
                "completion_mask": ones.int(),
                "old_per_token_logps": -ones,
                "sampling_per_token_logps": -ones + mismatch,
            }
        )
    return inputs, rollouts


def measure_own() -> dict[str, Any]:
    inputs, rollouts = batches()
    rank = dist.get_rank()
    return measure(inputs[rank : rank + 1], rollouts[rank : rank + 1])


def test_ranks_agree_and_weigh_positions() -> None:
    results = run(3, measure_own)
    assert results[0] == results[1] == results[2]  # to the last bit
    assert results[0] == pytest.approx(measure(*batches()), rel=1e-5)
