"""An engine in the trainer's process computes with the trainer's weights: shared, and copied."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toy_trainer import ToyTrainer

from trl_sketch.sync.colocate import ColocatedWeights, vllm_model


TOKENS = torch.randint(3, 70, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def llm(vllm_environment, checkpoint) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(checkpoint("qwen2")),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        weight_transfer_config={"backend": "sketch"},
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def logprobs(llm: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities `(T - 1,)` of all tokens but the first."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([given[token].logprob for token, given in pairs])


@pytest.mark.parametrize("way", ["share", "copy"])
def test_the_engine_computes_with_the_trainers_weights(llm, checkpoint, way):
    trainer = ToyTrainer(checkpoint("qwen2"))
    weights = ColocatedWeights(vllm_model(llm), trainer.parameters)

    def mismatch() -> float:
        return (logprobs(llm, TOKENS) - trainer.logprobs(TOKENS)).abs().mean().item()

    assert set(getattr(weights, way)()) == set(trainer.parameters)
    before, start = mismatch(), trainer.logprobs(TOKENS)
    trainer.train(50)
    if way == "copy":
        weights.copy()
    assert mismatch() < 2 * before + 1e-3 < 0.05
    with torch.no_grad():  # a change that is larger than the two implementations' difference
        for parameter in trainer.parameters.values():
            parameter.mul_(1.5)
    if way == "copy":
        weights.copy()
    assert (trainer.logprobs(TOKENS) - start).abs().mean() > 0.1
    assert mismatch() < 0.05


def test_the_worker_has_the_status_methods(llm):
    (status,) = llm.collective_rpc("sketch_status")
    assert status["version"] is None and status["update_active"] is False
