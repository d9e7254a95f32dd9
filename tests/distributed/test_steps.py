"""Optimizer steps of several ranks: against one process, against each other, whole weights and shards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run, traffic
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, kl
from trl_sketch.sync.checksum import checksum


BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 10


class Net(nn.Module):
    """7 rows are uneven on two ranks; of 2 rows, a third rank has none."""

    def __init__(self, widths: tuple[int, int] = (7, 2)) -> None:
        super().__init__()
        first, second = widths
        self.a, self.b, self.c = nn.Linear(24, first), nn.Linear(first, second, bias=False), nn.Linear(second, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def net(
    dtype: torch.dtype = FP32, widths: tuple[int, int] = (7, 2), lr: float = 1e-2, **config: Any
) -> tuple[nn.Module, SketchOptimizer]:
    torch.manual_seed(0)
    model = get_sketch_model(Net(widths).to(dtype), SketchConfig(**{"rank": 8, "kl_budget": None} | config))
    return model, SketchOptimizer(model, lr=lr)


def shard(model: nn.Module, optimizer: SketchOptimizer, **arguments: Any) -> None:
    """`fully_shard`, and the optimizer's parameters replaced, as accelerate does."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
    for layer in getattr(getattr(model, "model", None), "layers", [model.a] if isinstance(model, Net) else []):
        fully_shard(layer, **arguments)
    fully_shard(model, **arguments)
    parameters = dict(model.named_parameters())
    optimizer.param_groups[0]["params"] = [parameters[name] for name in held]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def microbatch(step: int, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(16, 24, generator=generator).to(dtype), torch.randn(16, 13, generator=generator).to(dtype)


def train_net(
    dtype: torch.dtype,
    sharding: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    microbatches: int = 4,
) -> tuple[dict[str, torch.Tensor], list[int], list[list[tuple[str, int]]], list[tuple[int, ...]]]:
    """Weights, a checksum of all of them after each step, the collectives of each step, and the shapes held here."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, optimizer = net(dtype, **config or {})
    if sharding == {"columns": True}:
        sharding = {"shard_placement_fn": lambda p: Shard(1) if p.shape[-1] in (2, 24) else None}
    if sharding is not None:
        shard(model, optimizer, **sharding)
    sums, collectives = [], []
    for step in range(STEPS):
        with traffic() as seen:
            for index in range(rank * microbatches // world, (rank + 1) * microbatches // world):
                x, y = microbatch(step, index, dtype)
                loss = ((model(x) - y) ** 2).mean() * world / microbatches
                loss.backward()
            optimizer.step()
        collectives.append(seen)
        sums.append(sum(map(checksum, whole(model).values())))
    held = optimizer.param_groups[0]["params"]
    shapes = [tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape) for p in held]
    return whole(model), sums, collectives, shapes


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Share of the elements that are not equal."""
    return sum((a[n] != b[n]).sum().item() for n in a) / sum(t.numel() for t in a.values())


def assert_same_steps(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Equal but for the order of some sums: it may move an entry of a factor to the next of its 8-bit values."""
    start = whole(net(FP32)[0])
    moved, apart = (torch.cat([(a[n].float() - x[n].float()).flatten() for n in a]) for x in (start, b))
    assert apart.norm() < 2e-3 * moved.norm()
    assert apart.abs().max() < STEPS * 1e-2 / 127


# ---------------------------------------------------------------------- the same steps, however many ranks make them

SHARDINGS = {"ddp": None, "fsdp2": {}, "fsdp2_kept": {"reshard_after_forward": False}, "columns": {"columns": True}}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    "config",
    [{}, {"update_rule": "sgd", "norm": "matrix", "update_ratio": 1e-2}, {"norm": "none", "spectral_power": 0.5}],
    ids=str,
)
def test_two_ranks_make_the_steps_of_one_process(config: dict, sharding: str) -> None:
    alone, *_ = train_net(FP32, config=config)
    (weights, sums, _, shapes), (_, others, *_) = run(2, train_net, FP32, SHARDINGS[sharding], config)
    assert sums == others and len(set(sums)) == STEPS  # the ranks have the same bits after every step
    held = {"ddp": (7, 24), "columns": (7, 12)}.get(sharding, (4, 24))
    assert shapes[0] == held
    assert differing(alone, whole(net(FP32)[0])) > 0.5
    assert_same_steps(alone, weights)


def train_with_threads_of_its_own(config: dict[str, Any]) -> list[int]:
    torch.set_num_threads(1 + dist.get_rank())
    return train_net(BF16, config=config)[1]


def test_ranks_with_other_numbers_of_threads_have_the_same_bits() -> None:
    """Which an eigendecomposition has not: one rank makes it for all."""
    config = {"widths": (384, 256), "rank": 128, "norm": "none", "lr": 1e-3, "spectral_power": 0.5}
    first, second = run(2, train_with_threads_of_its_own, config)
    assert first == second and len(set(first)) == STEPS


def test_a_rank_without_a_row_takes_part() -> None:
    """Of the two rows of `b`, three ranks hold one, one and none."""
    alone, *_ = train_net(FP32, microbatches=6)
    results = run(3, train_net, FP32, {}, {}, 6)
    assert results[0][1] == results[1][1] == results[2][1]
    assert_same_steps(alone, results[0][0])
    assert results[0][3] == [(3, 24), (1, 7), (5, 2)] and results[2][3] == [(1, 24), (0, 7), (3, 2)]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_in_bf16_few_elements_differ(sharding: str) -> None:
    """2 + 2 microbatches are added in another order than 4, which moves a sum by 1e-7 of itself. A weight sees it only
    where an entry of a factor lies as near to the border of two 8-bit values; then a row of weights is another one, and
    so is every gradient after that."""
    wide = {"widths": (501, 203), "lr": 1e-3}
    alone, *_ = train_net(BF16, config=wide)
    (weights, sums, *_), (_, others, *_) = run(2, train_net, BF16, SHARDINGS[sharding], wide)
    assert sums == others and len(set(sums)) == STEPS
    share = differing(alone, weights)
    print(f"{sharding}: {share:.2%} of {sum(w.numel() for w in alone.values())} elements differ after {STEPS} steps")
    assert share < 0.01


def test_fsdp2_makes_the_steps_of_ddp_to_the_bit_but_for_the_norms() -> None:
    """A plain step does not need the weights' norms, whose sum is split over the shards: then no bit differs."""
    config = {"norm": "none", "update_rule": "sgd"}
    ddp, fsdp = (run(2, train_net, FP32, SHARDINGS[name], config)[0][0] for name in ("ddp", "fsdp2"))
    assert differing(ddp, fsdp) == 0 and differing(ddp, whole(net(FP32)[0])) > 0.5


def test_one_all_reduce_of_the_sketches_per_step() -> None:
    """And nothing per microbatch. The first step also compares the ranks; shards add their norms up, 8 bytes a matrix."""
    sketch_bytes = 4 * (7 * 8 + 2 * 7 + 13 * 2)  # a rank is at most the number of inputs
    ddp = run(2, train_net, FP32, None)[0][2]
    assert [name for name, _ in ddp[0]] == ["allgather_", "allreduce_"]
    assert ddp[1:] == [[("allreduce_", sketch_bytes)]] * (STEPS - 1)
    sharded = run(2, train_net, FP32, {})[0][2]
    reductions = [[c for c in step if "gather" not in c[0]] for step in sharded]
    assert reductions == [[("allreduce_", sketch_bytes), ("allreduce_", 8 * 3)]] * STEPS


# ---------------------------------------------------------------------- what must not pass


def stopped(bad: float) -> tuple[str, bool, str]:
    """A loss that is not finite, on the second rank: the error, whether all weights are as they were, and after that."""
    model, optimizer = net()
    before = whole(model)
    x, y = microbatch(0, 0, FP32)
    scale = bad if dist.get_rank() == 1 else 1.0
    (((model(x) - y) ** 2).mean() * scale).backward()
    try:
        optimizer.step()
        message = ""
    except FloatingPointError as error:
        message = str(error)
    unchanged = differing(before, whole(model)) == 0
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    return message, unchanged, str(sum(map(checksum, whole(model).values())))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_loss_on_one_rank_stops_all_before_a_weight_moves(bad: float) -> None:
    first, second = run(2, stopped, bad)
    assert first == second
    assert "sketch of a, b, c is not finite. No weight has been changed" in first[0] and first[1]


def broken_off() -> str:
    """A step that breaks off on the second rank, and what it says of the next one."""
    model, optimizer = net()
    x, y = microbatch(0, 0, FP32)
    ((model(x) - y) ** 2).mean().backward()
    if dist.get_rank() == 0:
        optimizer.step()
        return ""
    optimizer._apply = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_a_rank_whose_step_broke_off_does_not_go_on() -> None:
    assert "the ranks have different weights: resume from a checkpoint" in run(2, broken_off)[1]


def disagreeing(how: str) -> tuple[str, bool]:
    second = dist.get_rank() == 1
    model, optimizer = net(**({"projection": "rademacher"} if second and how == "settings" else {}))
    if second and how == "rate":
        optimizer.param_groups[0]["lr"] *= 2
    if second and how == "order":
        model.a.weight.data = model.a.weight.data.flip(0)
    if second and how == "seed":
        optimizer.sketches.set_seed(1)
    if second and how == "projections":
        optimizer.sketches.keys.add_(1)
    if second and how == "weights":
        model.c.bias.data[3] += 1e-6
    before = whole(model)
    x, y = microbatch(0, 0, FP32)
    ((model(x) - y) ** 2).mean().backward()
    try:
        optimizer.step()
        message = ""
    except RuntimeError as error:
        message = str(error)
    return message, differing(before, whole(model)) == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("settings", "the matrices that are trained, or their settings and the random projections"),
        ("seed", "the seed or the step and the random projections"),
        ("projections", "the random projections"),
        ("rate", "the learning rate or max_grad_norm"),
        ("order", "the weights"),
        ("weights", "the weights"),
    ],
)
def test_ranks_that_disagree_stop_at_the_first_step(how: str, said: str) -> None:
    first, second = run(2, disagreeing, how)
    assert first == second
    assert first[0].startswith(f"rank 1 differs from rank 0 in {said}. No weight has been changed") and first[1]


def tensor_parallel(with_fsdp: bool) -> str:
    model = get_sketch_model(Net(), SketchConfig(rank=4))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    if with_fsdp:
        fully_shard(model, mesh=mesh["dp"])
    try:
        SketchOptimizer(model).step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("with_fsdp", [False, True])
def test_tensor_parallelism_is_refused(with_fsdp: bool) -> None:
    said = run(2, tensor_parallel, with_fsdp)
    assert said[0] == said[1]
    assert said[0].startswith("a is sharded as") and "DDP or FSDP2, without tensor parallelism" in said[0]


def sharded_first() -> str:
    model = Net()
    fully_shard(model)
    try:
        get_sketch_model(model, SketchConfig(rank=4))
    except ValueError as error:
        return str(error)
    return ""


def test_sharding_before_sketching_is_refused() -> None:
    assert "a has a weight that is sharded already" in run(1, sharded_first)[0]


def forward_in_between(made_first: bool) -> tuple[bool, bool]:
    """Validate between backward and step, which leaves the outermost weights gathered: do shards and forward follow?"""
    model = get_sketch_model(Net(), SketchConfig(rank=4))
    optimizer = SketchOptimizer(model, lr=1e-2) if made_first else None
    fully_shard(model)
    optimizer = optimizer or SketchOptimizer(model, lr=1e-2)
    before = whole(model)
    x, y = microbatch(0, 0, FP32)
    ((model(x) - y) ** 2).mean().backward()
    with torch.no_grad():
        old = model(x)
    optimizer.step()
    model.reshard()
    with torch.no_grad():
        new = model(x)
    return differing(before, whole(model)) > 0.5, bool((old != new).any())


@pytest.mark.parametrize("made_first", [False, True])
def test_what_is_gathered_at_the_step_is_not_taken_for_the_weights(made_first: bool) -> None:
    assert run(2, forward_in_between, made_first) == [(True, True)] * 2


# ---------------------------------------------------------------------- what is handed on, and the KL


def replicate() -> tuple[float, list[tuple[str, int]]]:
    """Share of the elements in which a copy that applies the handed-on updates differs, and what a step sends."""
    model, optimizer = net(BF16)
    copies = {name: layer.weight.detach().clone() for name, layer in optimizer.sketches.layers.items()}
    shard(model, optimizer)
    optimizer.listeners.append(lambda step, updates: [update.apply_(copies[update.name]) for update in updates])
    for step in range(STEPS):
        x, y = microbatch(step, dist.get_rank(), BF16)
        ((model(x) - y) ** 2).mean().backward()
        with traffic() as seen:
            optimizer.step()
    return differing(copies, {name: whole(model)[f"{name}.weight"] for name in copies}), seen


def test_a_shard_hands_on_whole_updates_without_gathering() -> None:
    """Every rank has the factors: a rollout is kept in step from any of them, and no weight is sent."""
    for share, seen in run(2, replicate):
        assert share == 0
        assert not [name for name, _ in seen if "gather" in name]


def probe(sharding: dict | None, method: str, dtype: torch.dtype) -> dict[str, Any]:
    """KL of a proposal from batches of different length on the ranks, of which the third has none."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = get_sketch_model(Qwen3ForCausalLM(config).to(dtype), SketchConfig(rank=8, update_ratio=1e-3))
    optimizer = SketchOptimizer(model, lr=1.0)
    if sharding is not None:
        shard(model, optimizer, **sharding)
    ids = torch.arange(3, 35).reshape(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.propose()
    rank = dist.get_rank()
    batches = [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:, :9], "labels": ids[:, :9]}][rank:]
    batches = kl.even_batches(batches, model)
    before = kl.reference_states(model, batches)
    if batches:
        kl.check_head(model, batches[0])
    q = kl.predicted_kl(model, batches, method=method)
    kinds = {type(layer.weight).__name__ for layer in optimizer.sketches.layers.values()}
    optimizer.step()
    realized = kl.realized_kl(model, batches, before)
    logits = model(input_ids=ids).logits.detach()
    return {"q": q, "realized": realized, "logits": logits, "kinds": kinds, "batches": len(batches)}


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_kept", "mixed"])
def test_the_kl_of_a_sharded_model(name: str, method: str) -> None:
    """It is that of the whole model; the shards are back after the probe, and the next forward sees the update."""
    mixed = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, output_dtype=BF16)}
    sharding, dtype = (mixed, BF16) if name == "mixed" else (SHARDINGS[name], FP32)
    expected = run(3, probe, None, method, dtype)
    sharded = run(3, probe, sharding, method, dtype)
    assert len({(r["q"], r["realized"]) for r in sharded}) == 1
    assert all(r["kinds"] == {"DTensor"} and r["batches"] == 2 for r in sharded)
    assert expected[0]["q"] > 0 and expected[0]["realized"] > 0
    assert sharded[0]["q"] == pytest.approx(expected[0]["q"], rel=1e-5)
    assert sharded[0]["realized"] == pytest.approx(expected[0]["realized"], rel=1e-3)
    torch.testing.assert_close(
        sharded[0]["logits"].float(), expected[0]["logits"].float(), rtol=0, atol=0.05 if dtype == BF16 else 1e-5
    )
