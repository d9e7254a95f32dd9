"""What the time of a step depends on, counted and not timed: operations, waits for the device, draws, and garbage."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from growth import Point, fit, measure
from rich.console import Console
from torch import nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_sketch import SketchConfig, SketchOptimizer, distributed, get_sketch_model
from trl_sketch.layers import SketchLinear, _AccumulateSketch
from trl_sketch.model import sketch_state
from trl_sketch.projection import Signs


PROJECTIONS = ("hadamard", "rademacher", "gaussian", "orthonormal")
LAYERS = (2, 6)


def backward(model: nn.Module, microbatches: int = 1) -> None:
    ids = torch.arange(14).view(2, 7)
    for _ in range(microbatches):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def trained(model: nn.Module, **config: Any) -> tuple[nn.Module, SketchOptimizer]:
    """A model after its first step, which allocates and checks what later ones do not."""
    sketched = get_sketch_model(model.train(), SketchConfig(**{"rank": 8} | config))
    optimizer = SketchOptimizer(sketched, lr=1e-3)
    backward(sketched)
    optimizer.step()
    return sketched, optimizer


class Operations(TorchDispatchMode):
    """The operations that run in the block, and the matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.products: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        result = func(*args, **(kwargs or {}))
        if self.names[-1] == "mm":
            self.products[tuple(result.shape)] += 1
        return result


def operations(function: Callable[..., Any], *args: Any) -> list[str]:
    with Operations() as seen:
        function(*args)
    return seen.names


# ---------------------------------------------------------------------- garbage


def graph_objects(objects: list[Any]) -> Counter[str]:
    """Tensors and nodes of autograd's graph, by type."""
    return Counter(type(o).__name__ for o in objects if issubclass(type(o), torch.Tensor | Node))


@contextmanager
def cyclic_garbage() -> Iterator[Counter[str]]:
    """What only the garbage collector can free of the tensors and nodes that the block leaves behind."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(graph_objects(gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def step_in_parts(model: nn.Module, optimizer: SketchOptimizer) -> None:
    backward(model, microbatches=2)
    optimizer.propose(max_grad_norm=1.0)
    optimizer.scale(0.5)
    optimizer.step()


@pytest.mark.parametrize(
    ("update_rule", "checkpointing"),
    [("row_adam", None), ("row_adam", True), ("row_adam", False), ("adam", None)],
    ids=["stored", "reentrant", "non-reentrant", "adam"],
)
def test_a_step_leaves_no_cyclic_garbage(tiny_qwen3, update_rule, checkpointing):
    frozen = tiny_qwen3().train().requires_grad_(False)
    model, optimizer = trained(tiny_qwen3(), update_rule=update_rule, refresh="never")
    for each in (frozen, model):
        each.enable_input_require_grads()
        if checkpointing is not None:
            each.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    backward(frozen)
    with cyclic_garbage() as transformers_own:
        backward(frozen, microbatches=2)
    step_in_parts(model, optimizer)
    alive = graph_objects(gc.get_objects())
    with cyclic_garbage() as garbage:
        step_in_parts(model, optimizer)
    assert garbage - transformers_own == Counter()
    assert graph_objects(gc.get_objects()) - alive == Counter()  # nor does anything pile up
    assert not [name for name in alive if name.startswith(_AccumulateSketch.__name__)]


def test_garbage_would_be_noticed(tiny_qwen3, monkeypatch):
    model, optimizer = trained(tiny_qwen3())
    forward = _AccumulateSketch.forward

    def with_a_cycle(ctx, *args):
        ctx.itself = ctx
        return forward(ctx, *args)

    monkeypatch.setattr(_AccumulateSketch, "forward", staticmethod(with_a_cycle))
    with cyclic_garbage() as garbage:
        step_in_parts(model, optimizer)
    assert garbage  # the last node of each graph, which holds the others


# ---------------------------------------------------------------------- waits for the device


# What makes a CPU wait for a GPU: a value is read, a size depends on values, or something is copied between the two.
_READING = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "unique_dim"}
# The calls that do so without an operation, if all is on a CPU.
_COPYING = {torch.Tensor: ("cpu", "cuda", "numpy", "tolist", "to"), torch: ("as_tensor", "from_numpy", "tensor")}


class Waits(TorchDispatchMode):
    """Counts what would make a CPU wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> "Waits":
        self.patches = pytest.MonkeyPatch()
        for owner, names in _COPYING.items():
            for name in names:
                self.patches.setattr(owner, name, self.counting(getattr(owner, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.undo()

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            to_a_device = "device" in kwargs or any(isinstance(arg, str | torch.device) for arg in args)
            self.count += call.__name__ != "to" or to_a_device  # or else to another type
            return call(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in tree_leaves(args[1])
        )
        self.count += name in _READING or by_mask
        return func(*args, **(kwargs or {}))


def waits(function: Callable[[], Any]) -> int:
    with Waits() as seen:
        function()
    return seen.count


def waits_of_a_step(model: nn.Module, optimizer: SketchOptimizer) -> dict[str, int]:
    return {
        "forward and backward": waits(lambda: backward(model)),
        "propose": waits(lambda: optimizer.propose(max_grad_norm=1.0)),
        "scale": waits(lambda: optimizer.scale(0.5)),
        "step": waits(optimizer.step),
    }


@pytest.mark.parametrize(
    "config", [{}, {"norm": "none", "update_rule": "sgd"}, {"update_rule": "adam", "refresh": "never"}], ids=str
)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_no_layer_waits_for_the_device(tiny_qwen3, projection, config):
    few, many = (
        waits_of_a_step(*trained(tiny_qwen3(num_hidden_layers=layers), projection=projection, **config))
        for layers in LAYERS
    )
    assert few == many
    frozen = tiny_qwen3().requires_grad_(False)
    frozen.enable_input_require_grads()
    assert many["forward and backward"] == waits(lambda: backward(frozen))  # those are of transformers
    assert many["scale"] == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda grad: grad.tolist(),
        lambda grad: float(grad.sum()),
        lambda grad: bool(grad.any()),
        lambda grad: grad[grad > 0],
        lambda grad: grad.to("cpu"),
        lambda grad: torch.tensor([1, 2], device=grad.device),
    ],
    ids=["tolist", "float", "bool", "mask", "to", "tensor"],
)
def test_a_wait_would_be_noticed(tiny_qwen3, read, monkeypatch):
    accumulate = SketchLinear.accumulate
    model, _ = trained(tiny_qwen3())
    before = waits(lambda: backward(model))

    def and_read(self, grad, projected):
        read(grad)
        accumulate(self, grad, projected)

    monkeypatch.setattr(SketchLinear, "accumulate", and_read)
    assert waits(lambda: backward(model)) == before + 14


# ---------------------------------------------------------------------- one flat buffer


@pytest.fixture
def two_ranks(monkeypatch) -> list[torch.Tensor]:
    """Two processes, of which the other has the same sketches; the tensors that are reduced."""
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: reduced.append(tensor.mul_(2)))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    return reduced


def test_all_sketches_are_averaged_clipped_and_emptied_at_once(tiny_qwen3, two_ranks, monkeypatch):
    monkeypatch.setattr(distributed, "check_agreement", lambda *_: None)
    counts = []
    for layers in LAYERS:
        model, optimizer = trained(tiny_qwen3(num_hidden_layers=layers), norm="none", update_rule="sgd")
        flat = sketch_state(model).flat
        two_ranks.clear()
        ran = {}
        for max_grad_norm in (None, 1e-6):
            backward(model)
            ran[max_grad_norm] = operations(optimizer.propose, max_grad_norm)
            emptied = operations(optimizer.zero_grad)
        assert len(two_ranks) == 2 and all(tensor is flat for tensor in two_ranks)
        averaged = operations(distributed.average_, flat)
        clipped = Counter(ran[1e-6]) - Counter(ran[None])
        counts.append((averaged, clipped, emptied))
        assert emptied == ["zero_"]
        assert averaged == ["mul_", "div_"]  # the first is the other process
    assert counts[0] == counts[1]
    assert 0 < counts[0][1].total() < 10


# ---------------------------------------------------------------------- nothing twice, nothing by the row


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["stored", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_every_input_is_projected_once_a_microbatch(tiny_qwen3, share, checkpointing):
    model, _ = trained(tiny_qwen3(), rank=11, share_projection=share)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    with Operations() as seen:
        backward(model, microbatches=3)
    assert seen.products[14, 11] == 3 * 2 * (4 if share else 7)  # 14 tokens, rank 11; 2 layers


@pytest.mark.parametrize("update_rule", ["sgd", "row_adam", "adam"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_operations_of_a_step_do_not_depend_on_the_size_of_a_matrix(projection, update_rule):
    """(That fits into a block. Of `hadamard` they grow with log log k, and are fewer where k is a power of two.)"""
    counts = []
    for d, k in ((16, 72), (16, 250), (320, 72), (320, 250)):
        model = get_sketch_model(
            nn.ModuleDict({"mlp": nn.Linear(k, d, bias=False)}).bfloat16(),
            SketchConfig(rank=8, projection=projection, update_rule=update_rule, refresh="never"),
        )
        optimizer = SketchOptimizer(model, lr=1e-3)
        for _ in range(2):
            model.mlp(torch.ones(3, k, dtype=torch.bfloat16)).sum().backward()
            ran = operations(optimizer.step)
        counts.append(len(ran))
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("projection", ["hadamard", "rademacher"])
def test_signs_are_drawn_once_a_step_for_all_matrices_of_a_shape(tiny_qwen3, projection, monkeypatch):
    draw = Signs.draw
    shapes: list[tuple[int, int]] = []
    monkeypatch.setattr(Signs, "draw", lambda kind, key, *shape: shapes.append(shape) or draw(kind, key, *shape))
    for layers in LAYERS:
        model, optimizer = trained(tiny_qwen3(num_hidden_layers=layers), projection=projection)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for microbatches in (1, 4):
            shapes.clear()
            backward(model, microbatches)
            optimizer.step()
            assert sorted(shapes) == [(8, 32), (8, 48)]


# ---------------------------------------------------------------------- the benchmark of growth


def test_memory_grows_with_what_it_should():
    small = Point(width=288, layers=1, rank=8, tokens=128)
    points = [small, replace(small, rank=16), replace(small, tokens=256), replace(small, accumulation=3)]
    dense = [replace(point, method="dense", rank=0) for point in (small, points[3])]
    one, rank, tokens, accumulation, *of_dense = measure([*points, *dense], 1, "cpu", Console(quiet=True))
    rows = 288 * 3 + 96 * 2 + 768 * 2  # the rows of all matrices; the signs and the moments are small
    assert rank["state"] - one["state"] == pytest.approx(4 * 8 * rows, rel=0.05)
    assert one["state"] == tokens["state"] == accumulation["state"]
    assert accumulation["peak"] - one["peak"] == 8 * 2 * 128  # token ids
    assert one["peak"] < rank["peak"] < tokens["peak"]
    assert one["weights"] == of_dense[0]["weights"] == 288 * (2 * 288 + 2 * 96 + 3 * 768)
    assert of_dense[0]["state"] == pytest.approx(6 * one["weights"], rel=1e-3)
    assert one["peak"] < of_dense[0]["peak"]


def test_fits_of_a_line_and_of_powers():
    x = [1.0, 2.0, 4.0, 8.0]
    assert fit(x, [3 + 2 * value for value in x]) == pytest.approx(
        {"a": 3, "b": 2, "R2": 1, "exponent": 0.643}, abs=1e-3
    )
    assert fit(x, [value**2 for value in x])["exponent"] == pytest.approx(2)
    assert fit(x, [5.0] * 4) == pytest.approx({"a": 5, "b": 0, "R2": 1, "exponent": 0}, abs=1e-9)
