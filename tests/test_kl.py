"""Predicted KL against slow references, and against the KL that an update really causes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, kl, probe
from trl_sketch.model import sketch_state


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def build(architecture: str = "qwen3", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    config, model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    }[architecture]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = model(config(**SIZES | overrides, attn_implementation="eager" if architecture == "gemma2" else "sdpa"))
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(8 if not made.config.tie_word_embeddings else 1)
    return made.to(dtype).train()


def batch(rows: int = 3, length: int = 24, padded: bool = True, vocabulary: int = 300) -> dict[str, torch.Tensor]:
    """Prompts with left padding, a third of the tokens; only the rest has labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
        mask[1, -4:] = 0  # a short completion
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def propose(model: Any, inputs: dict[str, torch.Tensor], update_ratio: float, **config: Any) -> SketchOptimizer:
    get_sketch_model(model, SketchConfig(rank=16, update_ratio=update_ratio, **config))
    optimizer = SketchOptimizer(model, lr=1.0)
    model(**inputs).loss.backward()
    optimizer.propose()
    return optimizer


def dense_updates(model: Any) -> dict[str, torch.Tensor]:
    """ΔW of the proposal, as dense matrices."""
    return {
        f"{name}.weight": layer.proposed_factor() @ layer.group.basis(torch.float32)
        for name, layer in sketch_state(model).layers.items()
    }


def reference_kl(model: Any, inputs: dict[str, torch.Tensor], temperature: float) -> float:
    """Equation 6 with dense updates, dense logits and eager attention, in fp32."""
    updates = dense_updates(model)
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain = plain.float().eval()  # in float64 eager attention gives NaN for padding rows
    plain.config._attn_implementation = "eager"
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}

    def logits(moved: dict[str, torch.Tensor]) -> torch.Tensor:
        arguments = {k: v for k, v in inputs.items() if k != "labels"}
        return functional_call(plain, weights | moved, kwargs=arguments | {"use_cache": False}).logits

    start = {name: weights[name] for name in updates}
    z, rate = torch.func.jvp(logits, (start,), (updates,))
    contexts = inputs["labels"][:, 1:] != -100
    z, rate = z[:, :-1][contexts].double(), rate[:, :-1][contexts].double()
    p = torch.softmax(z / temperature, dim=-1)
    variance = (p * rate.square()).sum(-1) - (p * rate).sum(-1).square()
    return variance.mean().item() / (2 * temperature**2)


# ---------------------------------------------------------------------- budget


def test_cosine_budget_is_equation_16() -> None:
    course = [kl.kl_budget(u, start=2e-4, final=2e-5, steps=300) for u in range(1, 402)]
    assert course[0] == 2e-4
    assert course[299] == pytest.approx(2e-5)
    assert course[149] == pytest.approx(2e-5 + 0.9e-4 * (1 + math.cos(math.pi * 149 / 299)))
    assert all(later <= earlier for earlier, later in zip(course, course[1:], strict=False))
    assert course[400] == course[299]


def test_constant_budget_and_a_single_step() -> None:
    assert kl.kl_budget(77, start=1e-3, final=1e-5, steps=10, schedule="constant") == 1e-3
    assert kl.kl_budget(1, start=1e-3, final=1e-5, steps=1) == 1e-5


def test_step_scale() -> None:
    assert kl.step_scale(8e-4, 2e-4, 3.0) == pytest.approx(0.5)
    assert kl.step_scale(1e-9, 2e-4, 3.0) == 3.0
    assert kl.step_scale(0.0, 2e-4, 3.0) == 1.0
    for q in (math.nan, math.inf, -1e-9):
        with pytest.raises(FloatingPointError, match="No weight has been changed"):
            kl.step_scale(q, 2e-4, 3.0)


def test_effective_budget_is_equation_17() -> None:
    assert kl.effective_budget(2e-4, 5e-5, 0.5) == pytest.approx(1.5e-4)
    assert kl.effective_budget(2e-4, 1e-2, 0.5) == pytest.approx(1e-4)
    assert kl.effective_budget(2e-4, -1e-2, 0.5) == 2e-4
    assert kl.effective_budget(2e-4, None, 0.5) == 2e-4


# ---------------------------------------------------------------------- mismatch


def rollout_batch() -> dict[str, torch.Tensor]:
    return {
        "completion_ids": torch.tensor([[5, 6, 2, 0], [5, 6, 7, 8], [9, 2, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]),
        "old_per_token_logps": torch.tensor([[-1.0, -1, -1, 9], [-1, -1, -1, -1], [-2, -2, 9, 9]]),
        "sampling_per_token_logps": torch.tensor([[-0.9, -0.8, -1, 0], [5, 5, 5, 5], [-2.1, math.nan, 0, 0]]),
    }


def test_mismatch_is_the_signed_mean_over_completed_responses() -> None:
    # the second response was cut off, one log-probability of the third is missing: (0.1 + 0.2 + 0 - 0.1) / 4
    assert kl.measure_mismatch([rollout_batch()], [2]) == pytest.approx(0.05, rel=1e-5)
    assert kl.measure_mismatch([rollout_batch(), rollout_batch()], [2]) == pytest.approx(0.05, rel=1e-5)


def test_mismatch_is_clamped_and_may_be_missing() -> None:
    below = rollout_batch()
    below["sampling_per_token_logps"] = below["old_per_token_logps"] - 1
    assert kl.measure_mismatch([below], [2]) == 0.0
    assert kl.measure_mismatch([rollout_batch()], [99]) is None  # nothing is completed
    assert kl.measure_mismatch([{k: v for k, v in rollout_batch().items() if "logps" not in k}], [2]) is None
    assert kl.measure_mismatch([], [2]) is None


# ---------------------------------------------------------------------- prediction


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "initializer_range": 0.2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("gemma2", {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    ],
)
@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
def test_prediction_equals_the_dense_reference(architecture: str, overrides: dict[str, Any], method: str) -> None:
    model, inputs = build(architecture, **overrides), batch()
    propose(model, inputs, 1e-4)
    q = kl.predicted_kl(model, inputs, temperature=0.7, method=method)
    assert q == pytest.approx(reference_kl(model, inputs, 0.7), rel=1e-3)


@pytest.mark.parametrize(("architecture", "attention"), [("qwen3", "sdpa"), ("gemma2", "eager"), ("gemma2", "sdpa")])
def test_a_probe_runs_the_model_as_it_is_run(architecture: str, attention: str) -> None:
    """Also where that leaves something out: sdpa does not cap the scores of Gemma 2."""
    model, inputs = build(architecture, attn_logit_softcapping=0.5, initializer_range=0.3).eval(), batch()
    model.config._attn_implementation = attention
    get_sketch_model(model, SketchConfig(rank=4))
    arguments = {name: value for name, value in inputs.items() if name != "labels"}
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        own = model.model(**arguments).last_hidden_state[seen]
    torch.testing.assert_close(probe.hidden_states(model, arguments)[seen], own, rtol=1e-4, atol=1e-4)


def test_blocks_of_attention_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(), batch()
    propose(model, inputs, 1e-4)
    whole = kl.predicted_kl(model, inputs)
    monkeypatch.setattr(probe, "_ATTENTION_ELEMENTS", 3 * 4 * 24 * 5)  # five queries at a time
    assert kl.predicted_kl(model, inputs) == pytest.approx(whole, rel=1e-5)


def test_packed_sequences_do_not_see_each_other() -> None:
    model = build()
    apart = batch(rows=2, padded=False)
    propose(model, apart, 1e-4)
    q = kl.predicted_kl(model, apart)
    packed = {name: value.reshape(1, -1) for name, value in apart.items() if name != "attention_mask"}
    packed["position_ids"] = torch.arange(24).repeat(2)[None]
    assert kl.predicted_kl(model, packed) == pytest.approx(q, rel=1e-4)


def test_batches_average_over_positions() -> None:
    model, inputs = build(), batch()
    propose(model, inputs, 1e-4)
    rows = [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(3)]
    assert kl.predicted_kl(model, rows) == pytest.approx(kl.predicted_kl(model, inputs), rel=1e-5)
    assert kl.predicted_kl(model, []) == 0.0


def test_max_tokens_takes_the_first_positions_of_each_response() -> None:
    model, inputs = build(), batch()
    propose(model, inputs, 1e-4)
    labels = inputs["labels"].clone()
    labels[:, 8 + 5 :] = -100
    cut, positions = kl.probed_positions(inputs, max_tokens=5)
    assert positions.sum(dim=1).tolist() == [5, 5, 5]
    assert cut["input_ids"].shape == (3, 12)  # the last context is at 11
    expected = kl.predicted_kl(model, inputs | {"labels": labels})
    assert kl.predicted_kl(model, inputs, max_tokens=5) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_difference_agrees_over_four_orders_of_magnitude(dtype: torch.dtype) -> None:
    for update_ratio in (1e-6, 1e-4, 1e-2):
        model, inputs = build(dtype=dtype), batch()
        propose(model, inputs, update_ratio)
        jvp = kl.predicted_kl(model, inputs)
        difference = kl.predicted_kl(model, inputs, method="finite_difference")
        assert difference == pytest.approx(jvp, rel=0.01 if dtype == torch.float32 else 0.1)


def test_autocast_predicts_what_fp32_does() -> None:
    model, inputs = build(), batch()
    propose(model, inputs, 1e-4)
    q = kl.predicted_kl(model, inputs)
    mixed = kl.predicted_kl(model, inputs, autocast_dtype=torch.bfloat16)
    assert mixed == pytest.approx(q, rel=0.05)
    assert mixed != q


def test_realized_kl_is_the_predicted_one_at_the_budget() -> None:
    """In fp32; test_kl_models.py has trained models and bf16."""
    model, inputs = build(), batch(rows=8)
    optimizer = propose(model, inputs, 1e-4)
    q = kl.predicted_kl(model, inputs)
    optimizer.scale(kl.step_scale(q, 2e-4, alpha_max=math.inf))
    before = kl.reference_states(model, [inputs])
    optimizer.step()
    assert kl.realized_kl(model, [inputs], before) == pytest.approx(2e-4, rel=0.03)


def test_realized_kl_grows_with_the_square_of_alpha() -> None:
    points = []
    for alpha in (0.25, 0.5, 1.0, 2.0):
        model, inputs = build(), batch()
        optimizer = propose(model, inputs, 3e-4)
        optimizer.scale(alpha)
        before = kl.reference_states(model, [inputs])
        optimizer.step()
        points.append((math.log(alpha), math.log(kl.realized_kl(model, [inputs], before))))
    x, y = (torch.tensor(values) for values in zip(*points, strict=True))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert slope.item() == pytest.approx(2, abs=0.05)


def test_realized_kl_equals_the_definition() -> None:
    model, inputs = build(), batch()
    optimizer = propose(model, inputs, 1e-2)
    before = kl.reference_states(model, [inputs])
    log_p = model(**inputs).logits.double().div(0.7).log_softmax(-1)
    optimizer.step()
    log_new = model(**inputs).logits.double().div(0.7).log_softmax(-1)
    contexts = inputs["labels"][:, 1:] != -100
    expected = (log_p.exp() * (log_p - log_new)).sum(-1)[:, :-1][contexts].mean().item()
    assert kl.realized_kl(model, [inputs], before, temperature=0.7) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("scale", [20, 1000])
def test_a_policy_that_is_sure_of_its_tokens(scale: float) -> None:
    """The variance is not lost in rounding: it is that of float64, and never negative."""
    model, inputs = build(), batch()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    propose(model, inputs, 1e-4)
    inputs, positions = kl.probed_positions(inputs)
    h, rate = (x[positions] for x in probe.jvp(model, inputs))
    head = model.lm_head.weight.detach().double()
    p = torch.softmax(h.double() @ head.t(), dim=-1)
    dz = rate.double() @ head.t()
    expected = (p * (dz - (p * dz).sum(-1, keepdim=True)).square()).sum(-1)
    variance = kl._score_variance(model, h, rate, 1.0)
    assert (variance >= 0).all()
    torch.testing.assert_close(variance, expected, rtol=1e-2, atol=1e-9 * dz.square().max().item())


def test_a_head_with_a_layer_before_it_is_noticed() -> None:
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        is_decoder=True,
    )
    with pytest.raises(NotImplementedError, match="BertLMHeadModel are not its LM head"):
        kl.check_head(BertLMHeadModel(config), {"input_ids": torch.arange(3, 9)[None]})
    for architecture in ("qwen3", "gemma2"):
        model = build(architecture)
        before = snapshot(get_sketch_model(model, SketchConfig(rank=4)))
        kl.check_head(model, batch())
        assert_same(before, snapshot(model))


def test_a_model_with_an_attention_of_its_own() -> None:
    config = GPTJConfig(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
    inputs = batch(padded=False)
    model = GPTJForCausalLM(config).train()
    optimizer = propose(model, inputs, 1e-3)
    q = kl.predicted_kl(model, inputs)
    assert kl.predicted_kl(model, inputs, method="finite_difference") == pytest.approx(q, rel=0.01)
    before = kl.reference_states(model, [inputs])
    optimizer.step()
    assert kl.realized_kl(model, [inputs], before) == pytest.approx(q, rel=0.05)


def test_misuse_is_named() -> None:
    model, inputs = build(), batch()
    get_sketch_model(model, SketchConfig(rank=4))
    with pytest.raises(ValueError, match="call propose"):
        kl.predicted_kl(model, inputs)
    SketchOptimizer(model).propose()
    for arguments, message in (({"temperature": 0}, "temperature"), ({"method": "x"}, "jvp or finite_difference")):
        with pytest.raises(ValueError, match=message):
            kl.predicted_kl(model, inputs, **arguments)


# ---------------------------------------------------------------------- what a probe leaves behind, and what it takes


def snapshot(model: Any) -> dict[str, Any]:
    state = sketch_state(model)
    return {
        "tensors": {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers(), ("S", state.flat)]},
        "storage": {n: p.data_ptr() for n, p in model.named_parameters()},
        "grads": [n for n, p in model.named_parameters() if p.grad is not None],
        "training": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "attention": model.config._attn_implementation,
        "use_cache": model.config.use_cache,
        "rng": torch.get_rng_state(),
        "grad_mode": torch.is_grad_enabled(),
        "checkpointing": model.is_gradient_checkpointing,
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, tensor in before.pop("tensors").items():
        assert torch.equal(tensor, after["tensors"][name]), name
    assert torch.equal(before.pop("rng"), after["rng"])
    assert before == {name: value for name, value in after.items() if name in before}


@pytest.mark.parametrize("method", ["jvp", "finite_difference", "realized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_probe_changes_nothing(method: str, dtype: torch.dtype) -> None:
    model, inputs = build(dtype=dtype, attention_dropout=0.5), batch()
    model.gradient_checkpointing_enable()
    model.model.layers[0].eval()  # a module that is not in the mode of the rest
    propose(model, inputs, 1e-4)
    before = snapshot(model)
    if method == "realized":
        kl.reference_states(model, [inputs])
    else:
        kl.predicted_kl(model, inputs, method=method)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
def test_a_failing_probe_changes_nothing(method: str) -> None:
    model, inputs = build(dtype=torch.bfloat16), batch()
    propose(model, inputs, 1e-4)

    def fail(*args: Any) -> None:
        raise OSError("in the middle")

    handle = model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(fail)
    before = snapshot(model)
    with pytest.raises(OSError, match="in the middle"):
        kl.predicted_kl(model, inputs, method=method)
    assert_same(before, snapshot(model))
    handle.remove()


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_no_tensor_of_tokens_by_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(vocab_size=20_000), batch(rows=4, length=60, padded=False, vocabulary=20_000)
    propose(model, inputs, 1e-4)
    q = kl.predicted_kl(model, inputs)
    monkeypatch.setattr(kl, "_VOCABULARY", 1000)
    monkeypatch.setattr(kl, "_POSITIONS", 64)
    with LargestTensor() as largest:
        assert kl.predicted_kl(model, inputs) == pytest.approx(q, rel=1e-5)
    assert largest.numel <= 20_000 * 64  # the LM head itself; tokens by vocabulary would be 160 * 20,000


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
def test_memory_grows_with_the_length_and_not_with_its_square(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ATTENTION_ELEMENTS", 2**14)
    largest = []
    for length in (256, 1024):
        model, inputs = build(), batch(rows=1, length=length, padded=False)
        propose(model, inputs, 1e-4)
        with LargestTensor() as tracked:
            kl.predicted_kl(model, inputs, method=method)
        largest.append(tracked.numel)
    assert largest[1] <= 4 * largest[0]


# ---------------------------------------------------------------------- what is recorded


def test_recorder_keeps_the_first_responses_with_labels() -> None:
    model = build()
    recorder = probe.InputRecorder(model, responses=3)
    inputs = batch()
    unlabelled = inputs | {"labels": inputs["labels"].clone()}
    unlabelled["labels"][1] = -100
    with torch.no_grad():
        model(**inputs)
    model.eval()
    model(**inputs)
    assert not recorder.saw_forward
    model.train()
    model(**unlabelled)
    model(**inputs)
    model(**inputs)
    first, second = recorder.take()
    assert torch.equal(first["input_ids"], inputs["input_ids"][[0, 2]])
    assert torch.equal(second["attention_mask"], inputs["attention_mask"][:1])
    assert recorder.take() == []
    recorder.remove()
    assert not model._forward_pre_hooks


def test_positions_without_labels_are_those_of_the_attention_mask() -> None:
    inputs = batch()
    del inputs["labels"]
    _, positions = kl.probed_positions(inputs)
    assert positions.sum(dim=1).tolist() == [24 - 5 - 0, 24 - 4 - 1, 23]


def test_reference_is_recomputed_for_every_proposal(tiny_qwen3: Callable[..., Any]) -> None:
    """q follows the proposal: twice the ratio, four times the KL."""
    values = []
    for update_ratio in (1e-4, 2e-4):
        model = tiny_qwen3()
        inputs = batch(vocabulary=32)
        propose(model, inputs, update_ratio)
        values.append(kl.predicted_kl(model, inputs))
    assert values[1] / values[0] == pytest.approx(4, rel=1e-3)
