"""Sketch-accumulating layers: their sketches against dense gradients, and what they keep in memory."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, make_projection
from trl_sketch.layers import ProjectionGroup, SketchLinear
from trl_sketch.model import sketch_state


SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen2": Qwen2Config}
PROJECTIONS = ["hadamard", "rademacher", "gaussian", "orthonormal"]
FIRST_OF_GROUP = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}

BF16 = torch.bfloat16


def language_model(kind: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> nn.Module:
    """A tiny model with random weights and (Qwen2) random biases; the same at each call."""
    settings = SIZES | {"tie_word_embeddings": False} | overrides
    if kind == "qwen3":
        settings["head_dim"] = 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](**settings))
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def batch(seed: int, rows: int = 3, tokens: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def accumulate(model: nn.Module, seeds: range = range(1), context: Any = None) -> nn.Module:
    for seed in seeds:
        with context or nullcontext():
            loss = model(**batch(seed)).loss
        loss.backward()
    return model


def wanted(dense: nn.Module, sketched: nn.Module, step: int = 0) -> dict[str, torch.Tensor]:
    """G Aᵀ `(d, r)` in float64 of every selected matrix, from the dense gradient and the public projection."""
    config, result = sketch_state(sketched).config, {}
    for name in sketch_state(sketched).layers:
        gradient = dense.get_submodule(name).weight.grad.double()
        own = name.rpartition(".")[2]
        owner = name.removesuffix(own) + FIRST_OF_GROUP.get(own, own) if config.share_projection else name
        rank = min((config.rank_pattern or {}).get(own, config.rank), gradient.shape[1])
        projection = make_projection(
            config.projection, rank, gradient.shape[1], step=step, name=owner, dtype=torch.float64
        )
        result[name] = gradient @ projection.T
    return result


def largest_error(sketches: dict[str, torch.Tensor], references: dict[str, torch.Tensor]) -> float:
    """The largest ‖S − reference‖ / ‖reference‖ of all matrices."""
    assert sketches.keys() == references.keys() and len(references) > 0
    assert all(reference.norm() > 0 for reference in references.values())
    return max(
        float((sketches[name].double() - reference).norm() / reference.norm())
        for name, reference in references.items()
    )


def sketches(model: nn.Module) -> dict[str, torch.Tensor]:
    return sketch_state(model).sketches


def check(sketched: nn.Module, dense: nn.Module, tolerance: float) -> None:
    assert largest_error(sketches(sketched), wanted(dense, sketched)) < tolerance


class Toy(nn.Module):
    """One group of three layers, in fp64, given one input or three."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.q_proj = nn.Linear(12, 10, bias)
        self.attn.k_proj = nn.Linear(12, 6, bias)
        self.attn.v_proj = nn.Linear(12, 6, bias)
        self.double()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = inputs * 3 if len(inputs) == 1 else inputs
        return (self.attn.q_proj(q).sin().sum(-1) * (self.attn.k_proj(k) * self.attn.v_proj(v)).cos().sum(-1)).sum()


def toys(bias: bool = False, seed: int = 0, **config: Any) -> tuple[Toy, Toy]:
    """A toy that sketches, and its dense twin."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        dense = Toy(bias)
    return get_sketch_model(copy.deepcopy(dense), SketchConfig(**{"rank": 4} | config)), dense


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---------------------------------------------------------------------- S = G Aᵀ on language models


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_sketch_is_the_projected_dense_gradient(kind: str, tied: bool, dtype: torch.dtype, tolerance: float) -> None:
    dense = language_model(kind, dtype, tie_word_embeddings=tied)
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=8))
    assert len(sketches(sketched)) == 14
    assert sketch_state(sketched).flat.dtype == dtype
    for model in (dense, sketched):
        accumulate(model, range(3))
    check(sketched, dense, tolerance)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_every_projection(projection: str, share: bool) -> None:
    dense = language_model("qwen3", torch.float64)
    config = SketchConfig(rank=8, projection=projection, share_projection=share, rank_pattern={"k_proj": 5})
    sketched = get_sketch_model(copy.deepcopy(dense), config)
    for model in (dense, sketched):
        accumulate(model)
    assert sketches(sketched)["model.layers.0.self_attn.k_proj"].shape == (16, 5)
    check(sketched, dense, 1e-12)


def test_full_rank_sketch_gives_the_dense_gradient_back() -> None:
    dense = language_model("llama", torch.float64)
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=32))
    for model in (dense, sketched):
        accumulate(model)
    name = "model.layers.1.mlp.up_proj"  # 32 inputs: the Hadamard rows are a basis
    projection = make_projection("hadamard", 32, 32, name="model.layers.1.mlp.gate_proj", dtype=torch.float64)
    torch.testing.assert_close(sketches(sketched)[name] @ projection, dense.get_submodule(name).weight.grad)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradient_checkpointing_counts_once(use_reentrant: bool) -> None:
    dense = language_model("qwen3", torch.float64).train()
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=8))
    sketched.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert sketched.is_gradient_checkpointing
    for model in (dense, sketched):
        accumulate(model, range(2))
    check(sketched, dense, 1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_group_reads_the_very_input_of_the_block(use_reentrant: bool) -> None:
    sketched, dense = toys()
    x = random(5, 12).requires_grad_()
    checkpoint(sketched, x, use_reentrant=use_reentrant).backward()
    dense(x).backward()
    check(sketched, dense, 1e-12)


def bf16_errors(dense: nn.Module, sketched: nn.Module, exact: nn.Module, context: Any = None) -> tuple[float, float]:
    """Errors of the dense gradient and of the sketch, against the fp32 model `exact`, both after the projection."""
    accumulate(exact, range(3))
    for model in (dense, sketched):
        accumulate(model, range(3), context)
    truth = wanted(exact, sketched)
    projected = wanted(dense, sketched)
    # The two differ by roundings only: of the dense gradient, and of X Aᵀ and Dᵀ(X Aᵀ).
    assert largest_error(sketches(sketched), projected) < 0.006
    return largest_error(projected, truth), largest_error(sketches(sketched), truth)


def test_bf16_model_is_as_near_to_fp32_as_the_dense_gradient() -> None:
    dense = language_model("qwen2", BF16)
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=8))
    of_dense, of_sketch = bf16_errors(dense, sketched, copy.deepcopy(dense).float())
    assert sketch_state(sketched).flat.dtype == torch.float32
    assert of_sketch < 1.2 * of_dense < 0.02


def test_bf16_autocast_with_fp32_weights() -> None:
    dense = language_model("qwen2")
    config = SketchConfig(rank=8, weight_precision="fp32")
    sketched = get_sketch_model(copy.deepcopy(dense), config, compute_dtype=BF16)
    assert sketched.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    autocast = torch.autocast("cpu", BF16)
    of_dense, of_sketch = bf16_errors(dense, sketched, copy.deepcopy(dense), autocast)
    assert of_sketch < 1.2 * of_dense < 0.02


def with_bf16_linears(model: nn.Module) -> nn.Module:
    """A dense model whose attention and MLP weights are bf16, and compute in bf16 wherever they are called."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.to(BF16)
            module.register_forward_pre_hook(lambda module, args: (args[0].to(BF16),))
            module.register_forward_hook(lambda module, args, y: y if torch.is_autocast_enabled("cpu") else y.float())
    return model


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "no autocast"])
def test_bf16_weights_in_an_fp32_model(autocast: bool) -> None:
    dense = language_model("qwen2")
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=8, weight_precision="bf16"))
    assert sketched.model.layers[0].self_attn.q_proj.weight.dtype == BF16
    assert sketched.model.norm.weight.dtype == sketched.lm_head.weight.dtype == torch.float32
    exact = copy.deepcopy(dense)
    exact.load_state_dict(sketched.state_dict())  # the same weights, in fp32
    dense = with_bf16_linears(dense)
    context = torch.autocast("cpu", BF16) if autocast else None
    with context or nullcontext():
        assert torch.equal(dense(**batch(0)).logits, sketched(**batch(0)).logits)
    of_dense, of_sketch = bf16_errors(dense, sketched, exact, context)
    assert of_sketch < 1.2 * of_dense < 0.02


def test_microbatches_are_added_in_fp32() -> None:
    layer = get_sketch_model(nn.ModuleDict({"mlp": nn.Linear(8, 4, bias=False)}).to(BF16), SketchConfig(rank=2)).mlp
    x, small = torch.ones(1, 8, dtype=BF16), torch.full((1, 4), 2.0**-10, dtype=BF16)
    layer(x).backward(torch.ones(1, 4, dtype=BF16))
    first = layer.sketch.clone()
    for _ in range(16):
        layer(x).backward(small)
    torch.testing.assert_close(layer.sketch, first * (1 + 16 * 2.0**-10), rtol=1e-6, atol=0)
    assert first.abs().max() > 0


# ---------------------------------------------------------------------- inputs of every kind


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["leaf", "differentiable"])
@pytest.mark.parametrize(
    "shape", [(12,), (5, 12), (1, 12), (1, 1, 12), (2, 5, 12), (2, 3, 2, 12), (0, 12), (2, 0, 12)]
)
def test_input_shapes(shape: tuple[int, ...], requires_grad: bool, bias: bool) -> None:
    sketched, dense = toys(bias)
    inputs = [random(*shape).requires_grad_(requires_grad) for _ in range(2)]
    outputs = [model(x) for model, x in zip((sketched, dense), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward()
    if 0 in shape:
        assert sketch_state(sketched).flat.shape == (22 * 4,) and not sketch_state(sketched).flat.any()
    else:
        check(sketched, dense, 1e-12)
    if requires_grad:
        assert inputs[0].grad is not None and inputs[0].grad.shape == shape
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: random(12, 5).T,
        lambda: random(5, 24)[:, ::2],
        lambda: random(3, 2, 12).transpose(0, 1),
        lambda: random(1, 1, 12).expand(2, 3, 12),
        lambda: random(2, 12, 4).permute(0, 2, 1)[:, 1:],
    ],
)
def test_non_contiguous_inputs(make: Callable[[], torch.Tensor], bias: bool) -> None:
    sketched, dense = toys(bias)
    assert not make().is_contiguous()
    sketched(make()).backward()
    dense(make()).backward()
    check(sketched, dense, 1e-12)


def test_non_contiguous_output_derivatives() -> None:
    sketched, dense = toys()
    x = random(2, 5, 12)
    for model in (sketched, dense):
        y = model.attn.q_proj(x)
        (y.transpose(1, 2) * random(2, 10, 5)).sum().backward()
        model.attn.k_proj(x).sum().backward()  # an expanded scalar
        model.attn.v_proj(x)[:, ::2].sin().sum().backward()
    check(sketched, dense, 1e-12)


def test_sequential_whose_input_needs_no_gradient() -> None:
    dense = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))}).double()
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=4))
    for model in (dense, sketched):
        model.mlp(random(6, 12)).square().sum().backward()
    assert list(sketches(sketched)) == ["mlp.0", "mlp.2"]
    check(sketched, dense, 1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 12)])
@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.add_(1.5),
        lambda y: F.relu_(y),
        lambda y: y.mul_(2).sin_(),
        lambda y: (y[..., 1:3].mul_(3), y)[1],
        lambda y: y.add_(random(y.shape[-1])).tanh(),
    ],
    ids=["add_", "relu_", "mul_sin_", "slice", "add_tanh"],
)
@pytest.mark.filterwarnings("error")
def test_output_may_be_changed_in_place(change: Callable[..., Any], shape: tuple[int, ...], bias: bool) -> None:
    sketched, dense = toys(bias)
    inputs = [random(*shape).requires_grad_() for _ in range(2)]
    for model, x in zip((sketched, dense), inputs, strict=True):
        total = torch.zeros((), dtype=torch.float64)
        for layer in (model.attn.q_proj, model.attn.k_proj, model.attn.v_proj):
            y = layer(x)
            changed = change(y)
            total = total + (changed if isinstance(changed, torch.Tensor) else y).square().sum()
        total.backward()
    check(sketched, dense, 1e-12)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-12)


def test_layer_used_twice_in_one_forward_counts_both() -> None:
    dense = nn.ModuleDict({"mlp": nn.Linear(12, 12)}).double()
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=4))
    for model in (dense, sketched):
        x = random(6, 12)
        (model.mlp(model.mlp(x).tanh()).square().sum() + model.mlp(x).sum()).backward()
    check(sketched, dense, 1e-12)


def test_two_backward_passes_through_one_graph_count_twice() -> None:
    sketched, dense = toys()
    loss = sketched(random(6, 12))
    loss.backward(retain_graph=True)
    loss.backward()
    dense(random(6, 12)).backward()
    assert largest_error(sketches(sketched), {n: 2 * g for n, g in wanted(dense, sketched).items()}) < 1e-12


# ---------------------------------------------------------------------- sharing X Aᵀ


@pytest.mark.parametrize("order", ["qkv", "kvq", "qkqv", "qqkv", "vvkkqq", "kqv"])
def test_members_of_a_group_run_in_any_order(order: str) -> None:
    sketched, dense = toys()
    for model in (sketched, dense):
        x = random(6, 12)
        sum(getattr(model.attn, f"{name}_proj")(x).sin().sum() for name in order).backward()
    check(sketched, dense, 1e-12)


@pytest.mark.parametrize("interleaved", [False, True], ids=["one after the other", "interleaved"])
def test_members_of_a_group_given_different_inputs(interleaved: bool) -> None:
    sketched, dense = toys()
    first, second = random(6, 12, seed=1), random(6, 12, seed=2)
    for model in (sketched, dense):
        if interleaved:  # as cross-attention does: q from one input, k and v from another
            model(first, second, second).backward()
            model(second, first, second).backward()
        else:
            model(first).backward()
            model(second).backward()
    check(sketched, dense, 1e-12)


def test_input_changed_in_place_between_members_is_noticed() -> None:
    sketched, dense = toys()
    for model in (sketched, dense):
        x = random(6, 12)
        terms = [model.attn.q_proj(x).sin().sum()]
        x = x.clone() if model is dense else x  # the dense layer saves x and would refuse the change
        x.mul_(2)
        terms.append(model.attn.k_proj(x).sin().sum())
        x = x.clone() if model is dense else x
        x.add_(1)
        terms.append(model.attn.v_proj(x).sin().sum())
        sum(terms).backward()
    check(sketched, dense, 1e-12)


@pytest.mark.parametrize("projection", ["hadamard", "gaussian"])
def test_same_input_after_a_new_projection_is_projected_anew(projection: str) -> None:
    sketched, dense = toys(projection=projection)
    x = random(6, 12)
    sketched.attn.q_proj(x).sum().backward()  # k and v did not run: X Aᵀ is still at hand
    sketch_state(sketched).zero_()
    sketch_state(sketched).set_step(1)
    sketched(x).backward()
    dense(x).backward()
    assert largest_error(sketches(sketched), wanted(dense, sketched, step=1)) < 1e-12


def test_group_members_of_different_precision() -> None:
    sketched, dense = toys()
    for model in (sketched, dense):
        model.float()
        model.attn.k_proj.to(BF16)
        x = random(6, 12, dtype=torch.float32)
        k = F.linear(x.to(BF16), model.attn.k_proj.weight).float() if model is dense else model.attn.k_proj(x)
        (model.attn.q_proj(x).sin().sum() + k.sin().sum() + model.attn.v_proj(x).sin().sum()).backward()
    errors = {n: float((sketches(sketched)[n] - g).norm() / g.norm()) for n, g in wanted(dense, sketched).items()}
    assert errors["attn.q_proj"] < 1e-6 and errors["attn.v_proj"] < 1e-6
    assert errors["attn.k_proj"] < 0.01


def test_group_members_inside_and_outside_autocast() -> None:
    sketched, dense = toys(weight_precision="fp32")
    for model in (sketched, dense):
        model.float()
        x = random(6, 12, dtype=torch.float32)
        with torch.autocast("cpu", BF16):
            q = model.attn.q_proj(x)
        k = model.attn.k_proj(x)
        with torch.autocast("cpu", BF16):
            v = model.attn.v_proj(x)
        assert (q.dtype, k.dtype, v.dtype) == (BF16, torch.float32, BF16)
        (q.float().sin().sum() + k.sin().sum() + v.float().sin().sum()).backward()
    errors = {n: float((sketches(sketched)[n] - g).norm() / g.norm()) for n, g in wanted(dense, sketched).items()}
    assert errors["attn.k_proj"] < 1e-6  # its X Aᵀ is not the one of the others, rounded to bf16
    assert errors["attn.q_proj"] < 0.01 and errors["attn.v_proj"] < 0.01


@contextmanager
def counted_projections() -> Iterator[list[int]]:
    """Row counts of all products X Aᵀ computed in the block."""
    calls: list[int] = []
    original = ProjectionGroup.basis

    def basis(self: ProjectionGroup, dtype: torch.dtype) -> torch.Tensor:
        calls.append(self.members)
        return original(self, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProjectionGroup, "basis", basis)
        yield calls


@pytest.mark.parametrize(("share", "count"), [(True, 1), (False, 3)], ids=["shared", "own"])
def test_group_computes_its_projection_once(share: bool, count: int) -> None:
    sketched, _ = toys(share_projection=share)
    with counted_projections() as calls:
        sketched(random(6, 12)).backward()
        assert len(calls) == count
        sketched(random(6, 12)).backward()
    assert len(calls) == 2 * count


def test_group_is_named_after_its_first_member() -> None:
    """The name is what a user passes to `make_projection` to get A."""
    model = nn.ModuleDict({name: nn.Linear(12, 6) for name in ("q_proj", "k_proj", "v_proj")})
    nested = nn.ModuleDict({"attn": copy.deepcopy(model)})
    for outer, name in ((nested, "attn.q_proj"), (model, "q_proj")):
        (group,) = sketch_state(get_sketch_model(outer, SketchConfig(rank=4))).groups
        assert (group.name, group.members) == (name, 3)
        projection = make_projection("hadamard", 4, 12, name=name)
        torch.testing.assert_close(group.basis(torch.float32) * group.scale, projection)


# ---------------------------------------------------------------------- what backward keeps


@contextmanager
def saved_for_backward(*models: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Storage → tensor, of everything that autograd keeps, without the weights of `models`."""
    weights = {p.untyped_storage().data_ptr() for model in models for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept.setdefault(storage, tensor.detach())  # keeps the storage, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def nbytes(kept: dict[int, torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_one_layer_keeps_tokens_times_rank(bias: bool, dtype: torch.dtype) -> None:
    dense = nn.ModuleDict({"mlp": nn.Linear(64, 96, bias)}).to(dtype)
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=8))
    x = random(2, 10, 64, dtype=dtype).requires_grad_()
    with saved_for_backward(dense) as kept:
        dense.mlp(x)
    assert nbytes(kept) == 20 * 64 * dtype.itemsize
    with saved_for_backward(sketched) as kept:
        sketched.mlp(x)
    assert nbytes(kept) == 20 * 8 * dtype.itemsize
    assert [tuple(tensor.shape) for tensor in kept.values()] == [(2, 10, 8)]


@pytest.mark.parametrize(("share", "count"), [(True, 1), (False, 3)], ids=["shared", "own"])
def test_group_keeps_its_projected_input_once(share: bool, count: int) -> None:
    sketched, dense = toys(share_projection=share)
    x = random(6, 12).requires_grad_()
    with saved_for_backward(sketched) as kept:
        outputs = [layer(x) for layer in (sketched.attn.q_proj, sketched.attn.k_proj, sketched.attn.v_proj)]
    assert nbytes(kept) == count * 6 * 4 * 8
    with saved_for_backward(dense) as kept:
        outputs += [layer(x) for layer in (dense.attn.q_proj, dense.attn.k_proj, dense.attn.v_proj)]
    assert nbytes(kept) == 6 * 12 * 8
    assert len(outputs) == 6


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_model_keeps_less_than_lora_and_dense(kind: str, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 32}
    rank, tokens, layers = 4, 3 * 7, 2
    dense = language_model(kind, dtype, **sizes)
    frozen = copy.deepcopy(dense).requires_grad_(False)
    frozen.enable_input_require_grads()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = get_peft_model(copy.deepcopy(dense), LoraConfig(r=rank, target_modules=targets, lora_dropout=0.0))
    lora.enable_input_require_grads()
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=rank))
    sketched.enable_input_require_grads()  # to be compared with the others; it does without
    sizes_of = {}
    for name, model in {"dense": dense, "frozen": frozen, "lora": lora, "sketch": sketched}.items():
        with saved_for_backward(model) as kept:
            loss = model(**batch(0)).loss
        sizes_of[name] = nbytes(kept)
        del loss
    # Four projections per layer (q/k/v, o, gate/up, down), and nothing else beside what a frozen model keeps.
    assert sizes_of["sketch"] - sizes_of["frozen"] == 4 * layers * tokens * rank * dtype.itemsize
    # Dense keeps at least the inputs of o_proj and down_proj, and the ones of the two groups.
    assert sizes_of["dense"] - sizes_of["sketch"] > layers * tokens * (64 + 64 + 64) * dtype.itemsize
    assert sizes_of["lora"] - sizes_of["sketch"] > layers * tokens * (64 + 64 + 64) * dtype.itemsize


class Outputs(TorchDispatchMode):
    """The shapes of all tensors that operations return, and how often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        largest = 0
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                largest = max(largest, tensor.numel())
                if not func.is_view:
                    self.shapes.add(tuple(tensor.shape))
        self.operations.append(f"{func.overloadpacket} {largest}")
        return result


def test_no_dense_gradient_is_ever_formed() -> None:
    dense = nn.ModuleDict({"mlp": nn.Linear(20, 30)})
    sketched = get_sketch_model(copy.deepcopy(dense), SketchConfig(rank=4))
    for model, formed in ((dense, True), (sketched, False)):
        with Outputs() as seen:
            model.mlp(random(2, 5, 20, dtype=torch.float32).requires_grad_()).sin().sum().backward()
        assert ((30, 20) in seen.shapes or (20, 30) in seen.shapes) is formed


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_backward_copies_no_output_derivative(bias: bool) -> None:
    """A copy of D (tokens × output width) would cost as much memory traffic as the layer's own input gradient."""
    sketched = get_sketch_model(nn.ModuleDict({"mlp": nn.Linear(20, 30, bias)}), SketchConfig(rank=4))
    y = sketched.mlp(random(2, 5, 20, dtype=torch.float32).requires_grad_())
    with Outputs() as seen:
        y.backward(random(2, 5, 30, dtype=torch.float32))
    copies = [o for o in seen.operations if o.split()[0] in ("aten.clone", "aten.copy_", "aten.new_zeros")]
    assert [o for o in copies if int(o.split()[1]) >= 2 * 5 * 30] == []


def test_no_weight_gets_a_gradient() -> None:
    sketched = get_sketch_model(language_model("qwen2"), SketchConfig(rank=8))
    accumulate(sketched, range(2))
    assert all(not p.requires_grad and p.grad is None for p in sketched.parameters())
    assert sketch_state(sketched).flat.abs().sum() > 0


# ---------------------------------------------------------------------- what adds nothing


def test_passes_without_backward_add_nothing() -> None:
    sketched = get_sketch_model(language_model("qwen3"), SketchConfig(rank=8))
    with counted_projections() as calls:
        with torch.no_grad():
            sketched(**batch(0))
        with torch.inference_mode():
            sketched.eval()(**batch(0))
        sketched.generate(batch(0)["input_ids"], max_new_tokens=3, do_sample=False)
    assert calls == []  # not even X Aᵀ is computed
    sketched(**batch(0))  # with a graph, but no backward
    assert not sketch_state(sketched).flat.any()
    accumulate(sketched)
    before = sketch_state(sketched).flat.clone()
    assert before.any()
    with torch.no_grad():
        sketched(**batch(1))
    sketched.generate(batch(0)["input_ids"], max_new_tokens=3, do_sample=False)
    assert torch.equal(before, sketch_state(sketched).flat)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_forward_is_unchanged_bit_for_bit(kind: str, precision: str, training: bool) -> None:
    model = language_model(kind, BF16 if precision == "bf16" else torch.float32, attention_dropout=0.2).train(training)
    untouched = copy.deepcopy(model)
    autocast = torch.autocast("cpu", BF16) if precision == "autocast" else nullcontext()
    sketched = get_sketch_model(model, SketchConfig(rank=8, projection="gaussian"))
    for grad in (True, False):
        results = []
        for m in (untouched, sketched):
            torch.manual_seed(3)  # dropout: the layers must not draw from the generator
            with torch.set_grad_enabled(grad), autocast:
                results.append((m(**batch(0)).logits, torch.get_rng_state()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_backward_after_a_proposal_is_refused() -> None:
    sketched, _ = toys()
    optimizer = SketchOptimizer(sketched, lr=1e-3)
    sketched(random(6, 12)).backward()
    optimizer.propose()
    before = sketch_state(sketched).flat.clone()
    loss = sketched(random(6, 12))
    with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\)"):
        loss.backward()
    assert torch.equal(before, sketch_state(sketched).flat)


# ---------------------------------------------------------------------- lifetimes


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def watched_projections() -> Iterator[list[weakref.ref]]:
    """Weak references to every X Aᵀ that is handed out."""
    seen: list[weakref.ref] = []
    original = ProjectionGroup.project

    def project(self: ProjectionGroup, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = original(self, x, dtype)
        seen.append(weakref.ref(result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProjectionGroup, "project", project)
        yield seen


def alive(references: list[weakref.ref]) -> int:
    return len({id(r()) for r in references if r() is not None})


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["stored", "reentrant", "non-reentrant"])
def test_activations_are_released_without_the_garbage_collector(checkpointing: bool | None) -> None:
    sketched = get_sketch_model(language_model("qwen3"), SketchConfig(rank=8)).train()
    if checkpointing is not None:
        sketched.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    activations: list[weakref.ref] = []

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        activations.extend((weakref.ref(args[0]), weakref.ref(output)))

    for layer in sketch_state(sketched).layers.values():
        layer.register_forward_hook(watch)
    with no_garbage_collector(), watched_projections() as projected:
        loss = sketched(**batch(0)).loss
        if checkpointing is None:
            assert alive(projected) == 4 * SIZES["num_hidden_layers"]
        loss.backward()
        assert len(activations) >= 2 * 14 and len(projected) >= 14
        del loss
        assert alive(projected) == 0
        assert alive(activations) == 0


def test_graph_that_never_runs_backward_is_released() -> None:
    sketched, _ = toys()
    with no_garbage_collector(), watched_projections() as projected:
        loss = sketched(random(6, 12))
        assert alive(projected) == 1
        del loss
        assert alive(projected) == 0


def test_projected_input_is_let_go_after_the_last_member() -> None:
    sketched, _ = toys()
    with no_garbage_collector(), watched_projections() as projected:
        x = random(6, 12)
        for name, held in (("q_proj", 1), ("k_proj", 1), ("v_proj", 0)):
            getattr(sketched.attn, name)(
                x
            )  # the output and its graph are dropped at once: only the group can hold X Aᵀ
            assert alive(projected) == held


def test_group_does_not_keep_its_input_alive() -> None:
    sketched, _ = toys()
    with no_garbage_collector():
        x = random(6, 12)
        reference = weakref.ref(x)
        sketched.attn.q_proj(x)  # the other two do not run
        del x
        assert reference() is None


# ---------------------------------------------------------------------- the buffer


def test_sketches_are_views_of_one_flat_buffer() -> None:
    sketched = get_sketch_model(language_model("qwen3"), SketchConfig(rank=8, rank_pattern={"down_proj": 4}))
    state = sketch_state(sketched)
    accumulate(sketched)
    storage = state.flat.untyped_storage().data_ptr()
    assert all(s.untyped_storage().data_ptr() == storage and s.is_contiguous() for s in state.sketches.values())
    assert torch.equal(torch.cat([s.flatten() for s in state.sketches.values()]), state.flat)
    blocks = state.rank_blocks()
    assert [block.shape[1] for block, _ in blocks] == [8, 4]
    assert blocks[1][0].shape == (2 * 32, 4)
    assert torch.equal(torch.cat([layer.sketch for layer in blocks[0][1]]), blocks[0][0])
    state.zero_()
    assert not any(layer.sketch.any() for layer in state.layers.values())


@pytest.mark.parametrize("allocated", [False, True], ids=["before the first backward", "after it"])
def test_deep_copy_is_independent(allocated: bool) -> None:
    original, dense = toys()
    if allocated:
        original(random(6, 12)).backward()
    before = sketch_state(original).flat.clone() if allocated else None
    twin = copy.deepcopy(original)
    assert sketch_state(twin) is not sketch_state(original)
    assert all(isinstance(layer, SketchLinear) for layer in (twin.attn.q_proj, twin.attn.k_proj))
    assert twin.attn.q_proj.state is sketch_state(twin) and twin.attn.q_proj.group is twin.attn.k_proj.group
    assert twin.attn.q_proj.group is not original.attn.q_proj.group
    assert sketch_state(twin).layers["attn.q_proj"] is twin.attn.q_proj

    sketch_state(twin).zero_()
    twin(random(6, 12)).backward()
    dense(random(6, 12)).backward()
    check(twin, dense, 1e-12)
    if before is None:
        assert not sketch_state(original).flat.any()
    else:
        assert torch.equal(sketch_state(original).flat, before)
    weight = original.attn.q_proj.weight.clone()
    SketchOptimizer(twin, lr=1e-2).step()
    assert torch.equal(original.attn.q_proj.weight, weight) and not torch.equal(twin.attn.q_proj.weight, weight)
    assert (sketch_state(original).step, sketch_state(twin).step) == (0, 1)
    sketch_state(original).zero_()
    original(random(6, 12)).backward()
    check(original, dense, 1e-12)  # its projection is still the one of step 0


# ---------------------------------------------------------------------- torch.compile


def check_compiled(
    sketched: nn.Module, dense: nn.Module, run: Callable[[nn.Module], torch.Tensor], error: float
) -> None:
    """Three steps of two microbatches: the sketch is right, and nothing is compiled after the first step."""
    torch.compiler.reset()
    optimizer = SketchOptimizer(sketched, lr=1e-3)
    compiled = torch.compile(sketched, backend="aot_eager")
    for step in range(3):
        dense.load_state_dict(sketched.state_dict())
        dense.zero_grad()
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            for _ in range(2):
                run(compiled).backward()
                run(dense).backward()
        assert largest_error(sketches(sketched), wanted(dense, sketched, step=step)) < error
        optimizer.step()
        assert not sketch_state(sketched).flat.any()
    torch.compiler.reset()


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_compiled_layers(share: bool) -> None:
    sketched, dense = toys(share_projection=share)
    x = random(6, 12)
    check_compiled(sketched, dense, lambda model: model(x), 1e-12)


@pytest.mark.slow
def test_compiled_language_model() -> None:
    dense = language_model("llama", num_hidden_layers=1)
    config = SketchConfig(rank=8, target_modules=["q_proj", "v_proj", "down_proj"])  # each takes seconds to compile
    sketched = get_sketch_model(copy.deepcopy(dense), config)
    check_compiled(sketched, dense, lambda model: model(**batch(0)).loss, 1e-5)


def test_checkpointing_projects_in_the_recomputation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    linear = F.linear
    layer = get_sketch_model(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)), SketchConfig(rank=4))
    monkeypatch.setattr(F, "linear", lambda x, w, *b: ranks.append(len(w)) or linear(x, w, *b))
    x = torch.randn(5, 16, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False).square().sum()
    assert ranks == [24, 16]  # the layers, and no X Aᵀ
    loss.backward()
    assert sorted(ranks[2:]) == [4, 4, 16, 24]
    expected = sketch_state(layer).flat.clone()
    sketch_state(layer).zero_()
    layer(x).square().sum().backward()
    assert torch.equal(sketch_state(layer).flat, expected)
