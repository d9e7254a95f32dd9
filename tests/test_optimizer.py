"""SketchOptimizer against a float64 reference, its step sizes, its three calls, and its state."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from trl_sketch import SketchConfig, SketchOptimizer, SketchUpdate, get_sketch_model, make_projection
from trl_sketch.model import sketch_state


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
PROJECTIONS = ("hadamard", "rademacher", "gaussian", "orthonormal")


class Net(nn.Module):
    """Three matrices of different shapes; 16 inputs are a power of two, the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 40), nn.Linear(40, 16, bias=False), nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def make(dtype: torch.dtype = FP32, lr: float = 1e-3, **config) -> tuple[nn.Module, SketchOptimizer]:
    torch.manual_seed(0)
    model = get_sketch_model(Net().to(dtype), SketchConfig(**{"rank": 8} | config))
    return model, SketchOptimizer(model, lr=lr)


def backward(model: nn.Module, batch: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Add the gradient of a random regression, which `batch` fixes."""
    dtype = model.a.weight.dtype
    generator = torch.Generator().manual_seed(batch)
    x, y = torch.randn(32, 24, generator=generator), torch.randn(32, 7, generator=generator)
    loss = ((model(x.to(dtype)) - y.to(dtype)) ** 2).mean() * scale
    loss.backward()
    return loss.detach()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: module.weight.detach().clone() for name, module in model.named_children()}


def movement(model: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w.double() - before[name].double() for name, w in weights_of(model).items()}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.double().flatten() for t in tensors.values()])


def sketch_entry(optimizer: SketchOptimizer) -> dict:
    """The optimizer's own part of its state."""
    return optimizer.state_dict()["param_groups"][0]["sketch"]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a) and set(a) == set(b)


# ---------------------------------------------------------- against a float64 reference


class Reference:
    """The method with dense matrices, one matrix and one formula at a time."""

    def __init__(self, config: SketchConfig, lr: float) -> None:
        self.config, self.lr, self.initial_lr, self.t = config, lr, lr, 0
        self.v: dict[str, torch.Tensor] = {}
        self.m: dict[str, torch.Tensor] = {}

    def factors(self, weights, gradients, projections) -> dict[str, torch.Tensor]:
        """F in ΔW = F A, for each matrix."""
        config = self.config
        self.t += 1
        sketches = {n: g @ projections[n].T for n, g in gradients.items()}
        total = math.sqrt(sum((s**2).sum().item() for s in sketches.values()))
        count = sum(s.numel() for s in sketches.values())
        updates = {}
        for name, sketch in sketches.items():
            rms = {
                "global": total / math.sqrt(count),
                "matrix": (sketch**2).mean().sqrt().item(),
                "none": 1.0,
            }[config.norm]
            updates[name] = self.flattened(self.rule(name, sketch, rms or 1.0))
        dense = {n: (u @ projections[n]).norm().item() for n, u in updates.items()}
        if config.norm == "none":
            return {n: -self.lr * u for n, u in updates.items()}
        if config.update_ratio is None:
            target = {n: self.lr * math.sqrt(w.numel()) for n, w in weights.items()}
        else:
            ratio = config.update_ratio * self.lr / self.initial_lr
            target = {n: ratio * w.norm().item() for n, w in weights.items()}
        if config.norm == "global":
            wanted, reached = (math.sqrt(sum(x**2 for x in d.values())) for d in (target, dense))
            target, dense = dict.fromkeys(target, wanted), dict.fromkeys(dense, reached)
        return {n: -target[n] / dense[n] * u if dense[n] else torch.zeros_like(u) for n, u in updates.items()}

    def flattened(self, update: torch.Tensor) -> torch.Tensor:
        left, values, right = torch.linalg.svd(update, full_matrices=False)
        edge = values[0] * math.sqrt(len(values) * torch.finfo(FP64).eps)
        flat = (left * (values * values.clamp_min(edge) ** (self.config.spectral_power - 1))) @ right
        return flat * (update.norm() / flat.norm()) if update.any() else update

    def rule(self, name: str, sketch: torch.Tensor, rms: float) -> torch.Tensor:
        config, normalized = self.config, sketch / rms
        if config.update_rule == "sgd":
            return sketch
        correction = 1 - config.beta2**self.t
        if config.update_rule == "row_adam":
            square = (normalized**2).mean(dim=1, keepdim=True)
        else:
            square = normalized**2
            m = self.m.get(name, torch.zeros_like(sketch))
            self.m[name] = config.beta1 * m + (1 - config.beta1) * normalized
        v = self.v.get(name, torch.zeros_like(square))
        self.v[name] = config.beta2 * v + (1 - config.beta2) * square
        root = (self.v[name] / correction).sqrt()
        divisor = root + max(config.relative_epsilon * root.mean().item(), 1e-30)
        if config.update_rule == "adam":
            return self.m[name] / (1 - config.beta1**self.t) / divisor
        update = sketch / divisor
        if config.norm == "none":
            return update
        return update * (sketch.norm() / update.norm()) if update.any() else torch.zeros_like(update)


def gradient_at(step: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients with what can go wrong in them: rows and steps of very different size, and zeros."""
    generator = torch.Generator().manual_seed(step)
    result = {}
    for name, weight in weights.items():
        rows = torch.logspace(-2, 1, len(weight), dtype=FP64)[:, None]
        size = 10 ** torch.empty((), dtype=FP64).uniform_(-3, 1, generator=generator)
        result[name] = size * rows * torch.randn(weight.shape, dtype=FP64, generator=generator)
    result["a"][5] = 0  # a row that never has a gradient
    if step in (0, 4):
        result["b"].zero_()  # one matrix without a gradient
    if step == 9:
        for gradient in result.values():
            gradient.zero_()
    return result


@pytest.mark.parametrize("update_rule", ["sgd", "row_adam", "adam"])
@pytest.mark.parametrize(
    ("norm", "update_ratio", "projection", "spectral_power"),
    [
        ("global", None, "hadamard", 1.0),
        ("global", 3e-3, "gaussian", 0.5),
        ("matrix", None, "rademacher", 0.0),
        ("matrix", 3e-3, "orthonormal", 1.0),
        ("none", None, "hadamard", 1.0),
        ("none", None, "hadamard", 0.5),
    ],
)
def test_twenty_steps_match_the_reference(update_rule, norm, update_ratio, projection, spectral_power):
    refresh = "never" if update_rule == "adam" else "3"
    config = {"rank_pattern": {"b": 12}, "projection": projection, "refresh": refresh, "projection_seed": 7}
    config |= {"update_rule": update_rule, "norm": norm, "update_ratio": update_ratio, "share_projection": False}
    config |= {"beta1": 0.7, "beta2": 0.8, "relative_epsilon": 0.1}  # each of them visible
    config["spectral_power"] = spectral_power
    model, optimizer = make(FP64, lr=2e-3, **config)
    reference = Reference(optimizer.config, lr=2e-3)
    ranks = {"a": 8, "b": 12, "c": 8}
    slopes = []
    for step in range(20):
        lr = 2e-3 * (1 - step / 40)
        optimizer.param_groups[0]["lr"] = reference.lr = lr
        before = weights_of(model)
        drawn_at = 0 if refresh == "never" else step - step % 3
        projections = {
            n: make_projection(projection, ranks[n], w.shape[1], seed=7, step=drawn_at, name=n, dtype=FP64)
            for n, w in before.items()
        }
        gradients = gradient_at(step, before)
        for name, sketch in sketch_state(model).sketches.items():
            assert sketch.shape == (len(before[name]), ranks[name])
            sketch.copy_(gradients[name] @ projections[name].T)
        optimizer.step()
        expected = reference.factors(before, gradients, projections)
        moved = movement(model, before)
        said = optimizer.update_ratio.item() * flat(before).norm()
        assert said == pytest.approx(flat(moved).norm().item(), rel=0.02), step
        dot = square = 0.0
        for name, factor in expected.items():
            if not factor.any():
                assert torch.equal(model.get_submodule(name).weight, before[name]), (step, name)
                continue
            dense = factor @ projections[name]
            assert (moved[name] - dense).norm() < 0.02 * dense.norm(), (step, name)
            if torch.linalg.cond(projections[name]) < 100:  # signs may have a row that others add up to
                got = moved[name] @ torch.linalg.pinv(projections[name])
                # Half a step of the int8 grid is at most 1/127 of the row's largest entry.
                bound = factor.abs().amax(dim=1, keepdim=True) / 127 * 1.001 + 1e-12
                assert torch.all((got - factor).abs() <= bound), (step, name)
            dot += (moved[name] * dense).sum().item()
            square += (dense**2).sum().item()
        if step == 9 and update_rule != "adam":
            assert square == 0
        else:
            assert dot / square == pytest.approx(1, abs=0.012), step
            slopes.append(dot / square)
    assert sum(slopes) / len(slopes) == pytest.approx(1, abs=1.5e-3)  # rounding to int8 has no bias


def test_a_zero_sketch_changes_no_bit():
    for dtype, rule in itertools.product((FP32, BF16), ("sgd", "row_adam", "adam")):
        model, optimizer = make(dtype, lr=0.1, update_rule=rule, refresh="never")
        before = weights_of(model)
        for _ in range(2):
            optimizer.step()
        assert same_bits(weights_of(model), before)
        assert optimizer.grad_norm == 0 and optimizer.update_ratio == 0
        backward(model)
        optimizer.step()
        after = weights_of(model)
        assert not any(torch.equal(after[name], before[name]) for name in after)
        assert all(torch.isfinite(weight).all() for weight in after.values())


@pytest.mark.parametrize("norm", ["global", "matrix", "none"])
def test_a_matrix_without_gradient_stays_among_others_that_move(norm):
    for rule in ("sgd", "row_adam"):
        model, optimizer = make(BF16, lr=0.1, update_rule=rule, norm=norm)
        backward(model)
        sketch_state(model).sketches["b"].zero_()
        before = weights_of(model)
        optimizer.step()
        after = weights_of(model)
        assert torch.equal(after["b"], before["b"])
        assert not torch.equal(after["a"], before["a"]) and not torch.equal(after["c"], before["c"])


@pytest.mark.parametrize("size", [1e-18, 1e-21, 1e-23, 1e-30, 1e-42])
@pytest.mark.parametrize("norm", ["global", "matrix", "none"])
@pytest.mark.parametrize("update_rule", ["row_adam", "adam", "sgd"])
def test_a_gradient_whose_squares_are_lost_moves_no_weight_far(update_rule, norm, size):
    """One matrix whose sketch is so small that fp32 has no squares of it, among others that are not."""
    refresh = "never" if update_rule == "adam" else "every_step"
    for spectral_power in (1.0, 0.5):
        config = {"update_rule": update_rule, "refresh": refresh, "norm": norm, "spectral_power": spectral_power}
        model, optimizer = make(FP32, lr=1e-3, **config)
        before = weights_of(model)
        sketch_state(model).flat.normal_()
        sketch_state(model).sketches["b"].mul_(size)
        optimizer.step()
        largest = max(weight.abs().max().item() for weight in movement(model, before).values())
        assert 0 < largest < 0.05, (spectral_power, largest)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", ["global", "none"])
def test_a_non_finite_sketch_raises_before_anything_moves(value, norm):
    model, optimizer = make(norm=norm)
    backward(model)
    optimizer.step()
    backward(model, 1)
    state = copy.deepcopy(sketch_entry(optimizer))
    before = weights_of(model)
    sketch_state(model).sketches["b"][3, 2] = value
    with pytest.raises(FloatingPointError, match="sketch of b is not finite. No weight has been changed"):
        optimizer.step()
    assert same_bits(weights_of(model), before)
    assert torch.equal(sketch_entry(optimizer)["moments"]["second"], state["moments"]["second"])
    optimizer.zero_grad()  # after which training can go on
    backward(model, 2)
    optimizer.step()
    assert not same_bits(weights_of(model), before)
    sketch_state(model).flat.fill_(value)
    with pytest.raises(FloatingPointError, match=r"sketch of \w, \w, \w is not finite"):
        optimizer.propose()


# ---------------------------------------------------------- the size of a step


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(("rank", "update_rule"), [(1, "sgd"), (5, "row_adam"), (16, "sgd")])
@pytest.mark.parametrize("norm", ["global", "matrix"])
def test_root_mean_square_of_an_update_is_the_learning_rate(norm, projection, rank, update_rule):
    lr = 3e-3
    model, optimizer = make(lr=lr, norm=norm, projection=projection, rank=rank, update_rule=update_rule)
    for batch in range(3):
        before = weights_of(model)
        backward(model, batch, scale=10.0**batch)
        optimizer.step()
        moved = movement(model, before)
        assert flat(moved).square().mean().sqrt().item() == pytest.approx(lr, rel=0.01)
        ratio = (flat(moved).norm() / flat(before).norm()).item()
        assert optimizer.update_ratio.item() == pytest.approx(ratio, rel=0.01)
        each = [delta.square().mean().sqrt().item() for delta in moved.values()]
        if norm == "matrix":
            assert each == pytest.approx([lr] * 3, rel=0.01)
        else:
            assert max(each) / min(each) > 1.1  # one factor for all, not one for each


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("norm", ["global", "matrix"])
def test_update_ratio_follows_the_schedule(norm, projection):
    tau, course = 2e-3, [1.0, 0.5, 0.25, 0.0, 2.0]
    model, optimizer = make(lr=1e-5, norm=norm, projection=projection, update_ratio=tau)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: course[min(step, 4)])
    for batch, share in enumerate(course):
        before = weights_of(model)
        backward(model, batch)
        optimizer.step()
        scheduler.step()
        moved = movement(model, before)
        assert flat(moved).norm() / flat(before).norm() == pytest.approx(share * tau, rel=0.01)
        assert optimizer.update_ratio.item() == pytest.approx(share * tau, rel=0.01)
        if norm == "matrix":
            for name, delta in moved.items():
                assert delta.norm() / before[name].double().norm() == pytest.approx(share * tau, rel=0.01)


def test_update_ratio_holds_where_the_schedule_starts_at_zero():
    model, optimizer = make(lr=1e-5, update_ratio=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 2, 1.0))  # a warm-up
    ratios = []
    for batch in range(4):
        before = weights_of(model)
        backward(model, batch)
        optimizer.step()
        scheduler.step()
        ratios.append((flat(movement(model, before)).norm() / flat(before).norm()).item())
    assert ratios == pytest.approx([0, 1e-3, 2e-3, 2e-3], rel=0.01)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_learning_rate_of_zero_changes_no_bit(dtype):
    for norm in ("global", "matrix", "none"):
        model, optimizer = make(dtype, lr=0.0, norm=norm)
        before = weights_of(model)
        backward(model)
        optimizer.step()
        assert same_bits(weights_of(model), before)


@pytest.mark.parametrize("update_rule", ["sgd", "row_adam"])
@pytest.mark.parametrize("exponent", [-40, 20, 40])
def test_the_scale_of_the_loss_plays_no_part(update_rule, exponent):
    results = []
    for scale in (1.0, 2.0**exponent):
        model, optimizer = make(FP32, lr=1e-2, update_rule=update_rule)
        for batch in range(3):
            backward(model, batch, scale=scale)
            optimizer.step()
        results.append(weights_of(model))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=3e-4)  # 3 % of lr: one step of int8


def test_the_plain_norm_is_sgd_on_the_rebuilt_gradient():
    model, optimizer = make(FP64, lr=0.5, norm="none", update_rule="sgd")
    before = weights_of(model)
    gradients = dense_gradients(model)
    backward(model)
    optimizer.step()
    for name, delta in movement(model, before).items():
        a = make_projection("hadamard", 8, before[name].shape[1], name=name, dtype=FP64)
        expected = -0.5 * gradients[name] @ a.T @ a
        assert (delta - expected).norm() < 0.02 * expected.norm()


def dense_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of `backward(model, 0)` by ordinary autograd, on an untouched copy of the network."""
    plain = Net().to(model.a.weight.dtype)
    plain.load_state_dict(model.state_dict())
    backward(plain)
    return {name: module.weight.grad for name, module in plain.named_children()}


def test_max_grad_norm_clips_the_plain_norm_and_keeps_the_direction():
    moved, grad_norms = {}, {}
    for limit in (None, 0.0, 1e9, 0.05):
        model, optimizer = make(FP64, lr=0.1, norm="none", update_rule="sgd")
        before = weights_of(model)
        backward(model)
        optimizer.propose(max_grad_norm=limit)
        grad_norms[limit] = optimizer.grad_norm.item()
        optimizer.step()
        moved[limit] = flat(movement(model, before))
    norm = grad_norms[None]
    assert norm > 0.1 and set(grad_norms.values()) == {norm}  # the norm before clipping is what is reported
    assert torch.equal(moved[0.0], moved[None]) and torch.equal(moved[1e9], moved[None])
    assert moved[0.05].norm() / moved[None].norm() == pytest.approx(0.05 / norm, rel=0.01)
    assert torch.cosine_similarity(moved[0.05], moved[None], dim=0) > 0.9998


def test_max_grad_norm_leaves_normalized_updates_alone():
    results = []
    for limit in (None, 1e-4):
        model, optimizer = make(norm="global")
        backward(model)
        optimizer.propose(max_grad_norm=limit)
        optimizer.step()
        results.append(weights_of(model))
    assert same_bits(*results)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_grad_norm_estimates_the_dense_gradients(projection):
    model, optimizer = make(FP64, lr=0.0, projection=projection)
    dense = flat(dense_gradients(model)).square().sum().item()
    squares = []
    for _ in range(100):  # a step of size zero draws the next projection
        backward(model)
        optimizer.step()
        squares.append(optimizer.grad_norm.item() ** 2)
    squares = torch.tensor(squares, dtype=FP64)
    standard_error = (squares.std() / math.sqrt(len(squares))).item()
    assert standard_error < 0.05 * dense
    assert squares.mean().item() == pytest.approx(dense, abs=4 * standard_error)


@pytest.mark.parametrize("update_rule", ["sgd", "row_adam", "adam"])
def test_a_regression_is_learned(update_rule):
    refresh = "never" if update_rule == "adam" else "every_step"
    model, optimizer = make(FP32, lr=0.03, update_rule=update_rule, refresh=refresh, rank=12)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 80)
    losses = []
    for _ in range(80):
        losses.append(backward(model).item())
        optimizer.step()
        scheduler.step()
    assert losses[-1] < 0.2 * losses[0]


# ---------------------------------------------------------- propose, scale, step


def test_step_alone_is_propose_and_step():
    results = []
    for parts in (("step",), ("propose", "step")):
        model, optimizer = make(BF16)
        for batch in range(3):
            backward(model, batch)
            for part in parts:
                getattr(optimizer, part)()
        results.append(weights_of(model))
    assert same_bits(*results)


@pytest.mark.parametrize("update_rule", ["sgd", "row_adam", "adam"])
def test_propose_moves_nothing_and_scale_scales(update_rule):
    moved = {}
    for alphas in ((), (0.5,), (2.0,), (0.5, 0.5), (0.7,), (0.0,)):
        model, optimizer = make(FP64, update_rule=update_rule, refresh="never")
        before = weights_of(model)
        backward(model)
        optimizer.propose()
        for alpha in alphas:
            optimizer.scale(alpha)
        assert same_bits(weights_of(model), before)
        optimizer.step()
        moved[alphas] = flat(movement(model, before))
        # α belongs to one proposal.
        before = weights_of(model)
        backward(model, 1)
        optimizer.step()
        assert flat(movement(model, before)).norm().item() == pytest.approx(moved[()].norm().item(), rel=0.01)
    whole = moved[()]
    torch.testing.assert_close(moved[(0.5,)], 0.5 * whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(moved[(2.0,)], 2 * whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(moved[(0.5, 0.5)], 0.25 * whole, rtol=0, atol=1e-12)
    assert (moved[(0.7,)] - 0.7 * whole).norm() < 0.02 * whole.norm()
    assert not moved[(0.0,)].any()


def test_scale_wants_a_proposal_and_a_sensible_alpha():
    model, optimizer = make()
    with pytest.raises(RuntimeError, match=r"scale\(\) needs a proposal: call propose\(\) first"):
        optimizer.scale(0.5)
    backward(model)
    optimizer.propose()
    for alpha in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="alpha must be finite and not negative"):
            optimizer.scale(alpha)
    optimizer.step()
    with pytest.raises(RuntimeError, match="needs a proposal"):
        optimizer.scale(0.5)


def test_a_second_proposal_is_refused_and_the_first_stays():
    results = []
    for again in (False, True):
        model, optimizer = make(BF16, lr=1e-2)
        backward(model)
        optimizer.propose()
        if again:
            with pytest.raises(RuntimeError, match=r"propose\(\) was called twice"):
                optimizer.propose()
        optimizer.step()
        results.append(weights_of(model))
    assert same_bits(*results)


def test_backward_between_propose_and_step_is_refused():
    model, optimizer = make()
    backward(model)
    optimizer.propose()
    with pytest.raises(RuntimeError, match=r"backward\(\) between propose\(\) and step\(\)"):
        backward(model, 1)
    optimizer.zero_grad()
    assert not sketch_state(model).flat.any()
    before = weights_of(model)
    backward(model, 1)  # allowed again
    optimizer.step()
    assert not same_bits(weights_of(model), before)
    backward(model, 2)  # and after a step


@pytest.mark.parametrize("update_rule", ["sgd", "row_adam", "adam"])
def test_a_dropped_proposal_leaves_no_trace(update_rule):
    results = []
    for dropped in (False, True):
        model, optimizer = make(BF16, lr=1e-2, update_rule=update_rule, refresh="never")
        backward(model)
        optimizer.step()
        if dropped:
            backward(model, 1, scale=100.0)
            optimizer.propose()
            optimizer.scale(0.5)
            optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        results.append(weights_of(model))
    assert same_bits(*results)


def test_zero_grad_drops_a_proposal():
    model, optimizer = make(BF16)
    before = weights_of(model)
    backward(model)
    optimizer.propose()
    optimizer.zero_grad()
    optimizer.step()
    assert same_bits(weights_of(model), before)


def test_several_backwards_add_up():
    results = []
    for double in (False, True):
        model, optimizer = make(FP64, norm="none", update_rule="sgd")
        before = weights_of(model)
        backward(model, 0)
        if double:
            backward(model, 0)
        optimizer.step()
        results.append(flat(movement(model, before)))
    torch.testing.assert_close(results[1], 2 * results[0], rtol=0, atol=1e-9)


def test_step_runs_a_closure():
    model, optimizer = make()
    before = weights_of(model)
    loss = optimizer.step(lambda: backward(model))
    assert loss > 0 and not same_bits(weights_of(model), before)


@pytest.mark.parametrize(
    ("refresh", "drawn_at"),
    [("every_step", [0, 1, 2, 3, 4, 5]), ("never", [0] * 6), ("2", [0, 0, 2, 2, 4, 4]), (4, [0, 0, 0, 0, 4, 4])],
)
def test_projections_are_redrawn_when_due(refresh, drawn_at):
    for projection in PROJECTIONS:
        model, optimizer = make(FP64, refresh=refresh, projection=projection, projection_seed=3)
        for step in drawn_at:
            gradients = dense_gradients(model)
            backward(model)
            for name, sketch in sketch_state(model).sketches.items():
                a = make_projection(projection, 8, gradients[name].shape[1], seed=3, step=step, name=name, dtype=FP64)
                torch.testing.assert_close(sketch, gradients[name] @ a.T, rtol=1e-6, atol=1e-9)
            optimizer.step()


def test_a_step_is_deterministic_and_draws_nothing_from_torch():
    results = []
    for seed in (1, 2):
        model, optimizer = make(BF16, lr=1e-2, rank_pattern={"a": 3})
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        for batch in range(4):
            backward(model, batch)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), state)
        results.append(weights_of(model))
    assert same_bits(*results)
    model, optimizer = make(BF16, lr=1e-2, rank_pattern={"a": 3}, projection_seed=1)
    for batch in range(4):
        backward(model, batch)
        optimizer.step()
    assert not same_bits(weights_of(model), results[0])


def test_bf16_rounding_differs_from_step_to_step_where_the_projection_does_not():
    # The same sketch, twice, from the same weights: another rounding.
    results = []
    for step in (0, 1):
        model, optimizer = make(BF16, lr=1e-4, refresh="never", update_rule="sgd")
        sketch_state(model).set_step(step)
        backward(model)
        optimizer.step()
        results.append(weights_of(model))
    assert not same_bits(*results)


def test_bf16_weights_move_as_fp32_weights_do_on_average():
    # Steps far below the bf16 grid (lr 2e-5, grid 5e-4 and more): all of one direction, so that they add up.
    lr, steps = 2e-5, 60
    moved = {}
    for dtype in (FP32, BF16):
        model, optimizer = make(BF16, lr=lr, update_rule="sgd", rank_pattern={"b": 12, "c": 4})
        for module in model.children():
            module.weight.data = module.weight.data.to(dtype)
        before = weights_of(model)
        generator = torch.Generator().manual_seed(0)
        gradients = {n: torch.randn(w.shape, generator=generator) for n, w in before.items()}
        for step in range(steps):
            for name, sketch in sketch_state(model).sketches.items():
                rank = {"a": 8, "b": 12, "c": 4}[name]
                a = make_projection("hadamard", rank, gradients[name].shape[1], step=step, name=name)
                sketch.copy_(gradients[name] @ a.T)
            optimizer.step()
        assert all(module.weight.dtype == dtype for module in model.children())
        moved[dtype] = flat(movement(model, before))
    noise = (moved[BF16] - moved[FP32]).norm()
    slope = (moved[BF16] @ moved[FP32] / moved[FP32].norm() ** 2).item()
    standard_error = (noise / moved[FP32].norm() / math.sqrt(len(moved[FP32]))).item()
    assert standard_error < 0.1
    assert slope == pytest.approx(1, abs=4 * standard_error)


def test_matrices_that_share_a_projection_match_matrices_that_do_not(tiny_qwen3):
    # Shared or not, each matrix moves along its own rebuilt gradient.
    x = torch.randint(3, 32, (4, 12), generator=torch.Generator().manual_seed(0))
    for shared in (True, False):
        plain, model = tiny_qwen3(), tiny_qwen3()
        plain(input_ids=x, labels=x).loss.backward()
        config = SketchConfig(rank=8, update_rule="sgd", norm="none", share_projection=shared)
        optimizer = SketchOptimizer(get_sketch_model(model, config), lr=1.0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        after = dict(model.named_parameters())
        moved = [n for n in before if not torch.equal(before[n], after[n])]
        assert sorted(moved) == sorted(n for n in before if "_proj." in n)
        for name in moved:
            gradient = dict(plain.named_parameters())[name].grad
            owner = name.removesuffix(".weight")
            if shared:
                for other, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
                    owner = owner.replace(other, first)
            a = make_projection("hadamard", 8, gradient.shape[1], name=owner)
            expected = -gradient @ a.T @ a
            assert (after[name] - before[name] - expected).norm() < 0.03 * expected.norm(), name


# ---------------------------------------------------------- state


def through_a_file(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("update_rule", "refresh"), [("row_adam", "every_step"), ("row_adam", "2"), ("adam", "never"), ("sgd", "never")]
)
def test_a_resumed_run_continues_bit_for_bit(dtype, update_rule, refresh):
    config = {"update_rule": update_rule, "refresh": refresh, "rank_pattern": {"b": 12}, "projection_seed": 5}
    model, optimizer = make(dtype, lr=1e-2, **config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)

    def train(model, optimizer, scheduler, batches):
        for batch in batches:
            backward(model, batch)
            optimizer.step()
            scheduler.step()

    train(model, optimizer, scheduler, range(3))
    saved = through_a_file(optimizer.state_dict())
    saved_model, saved_scheduler = copy.deepcopy(model.state_dict()), scheduler.state_dict()
    at_saving = weights_of(model)
    train(model, optimizer, scheduler, range(3, 6))

    config["projection_seed"] = None  # the seed is in the state
    resumed, resumed_optimizer = make(dtype, lr=1e-2, **config)
    resumed_scheduler = torch.optim.lr_scheduler.LambdaLR(resumed_optimizer, lambda step: 1 - step / 10)
    backward(resumed, 77)
    resumed_optimizer.step()  # what was there before does not matter
    resumed.load_state_dict(saved_model)
    resumed_optimizer.load_state_dict(saved)
    resumed_scheduler.load_state_dict(saved_scheduler)
    assert same_bits(weights_of(resumed), at_saving)
    train(resumed, resumed_optimizer, resumed_scheduler, range(3, 6))
    assert same_bits(weights_of(resumed), weights_of(model))
    assert not same_bits(weights_of(model), at_saving)


def test_loading_a_fresh_state_starts_afresh():
    results = []
    for used in (False, True):
        model, optimizer = make(lr=1e-2)
        fresh, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        if used:
            for batch in (5, 6):
                backward(model, batch, scale=100.0)
                optimizer.step()
            model.load_state_dict(weights)
            optimizer.load_state_dict(fresh)
        backward(model)
        optimizer.step()
        results.append(weights_of(model))
    assert same_bits(*results)


def test_the_state_is_small():
    model, optimizer = make(update_rule="row_adam")
    backward(model)
    optimizer.step()
    entry = sketch_entry(optimizer)
    assert {kind: tuple(moment.shape) for kind, moment in entry["moments"].items()} == {"second": (40 + 16 + 7,)}
    assert entry["moments"]["second"].all()
    assert entry["counters"].tolist() == [1, optimizer.sketches.seed, 0]
    assert not optimizer.state_dict()["state"]
    model, optimizer = make(update_rule="sgd")
    backward(model)
    optimizer.step()
    assert not sketch_entry(optimizer)["moments"]


def test_a_foreign_state_is_refused():
    model, optimizer = make()
    backward(model)
    optimizer.step()
    good = optimizer.state_dict()
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="not the state of a SketchOptimizer"):
        optimizer.load_state_dict(adamw.state_dict())
    for version in (3, 99):
        good["param_groups"][0]["sketch"]["format_version"] = version
        with pytest.raises(ValueError, match=f"format version {version}.*resume with the version that wrote it"):
            optimizer.load_state_dict(good)
    with pytest.raises(ValueError, match="format version 1.*resume with the version that wrote it"):
        optimizer.load_state_dict(adamw.state_dict() | {"sketch": {"format_version": 1}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"exclude_modules": ["c"]}, "other matrices; it differs in c"),
        ({"update_rule": "adam", "refresh": "never"}, "saved with .*update_rule='adam'"),
        ({"update_rule": "adam", "refresh": "never", "rank": 4}, "saved with .*update_rule='adam'"),
    ],
)
def test_the_state_of_another_run_is_refused(config, message):
    model, optimizer = make()
    other, other_optimizer = make(**config)
    for pair in ((model, optimizer), (other, other_optimizer)):
        backward(pair[0])
        pair[1].step()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other_optimizer.state_dict())
    with pytest.raises(ValueError):
        other_optimizer.load_state_dict(optimizer.state_dict())


def test_moments_of_another_rank_are_refused():
    states = []
    for rank in (4, 8):
        model, optimizer = make(update_rule="adam", refresh="never", rank=rank)
        backward(model)
        optimizer.step()
        states.append((model, optimizer))
    before = weights_of(states[0][0])
    moments = copy.deepcopy(sketch_entry(states[0][1])["moments"])
    with pytest.raises(ValueError, match=r"saved with rank=8 and is resumed with rank=4"):
        states[0][1].load_state_dict(states[1][1].state_dict())
    assert same_bits(weights_of(states[0][0]), before)
    assert same_bits(sketch_entry(states[0][1])["moments"], moments)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_accelerate_wraps_it_without_moving_a_weight(dtype):
    try:
        accelerator = Accelerator(cpu=True)
        model, optimizer = make(dtype, lr=1e-2)
        twin, twin_optimizer = make(dtype, lr=1e-2)
        for batch in range(2):
            for m, o in ((model, optimizer), (twin, twin_optimizer)):
                backward(m, batch)
                o.step()
        before = weights_of(model)
        wrapped = accelerator.prepare(optimizer)
        assert same_bits(weights_of(model), before)
        for batch in range(2, 4):
            for m, o in ((model, wrapped), (twin, twin_optimizer)):
                backward(m, batch)
                o.step()
                o.zero_grad()
        assert same_bits(weights_of(model), weights_of(twin))
        wrapped.load_state_dict(wrapped.state_dict())
        assert same_bits(weights_of(model), weights_of(twin))
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


# ---------------------------------------------------------- errors


def test_what_it_is_made_from_is_checked():
    with pytest.raises(ValueError, match=r"no sketches: call get_sketch_model\(model, config\) first"):
        SketchOptimizer(Net())
    model, _ = make(rank=8)
    with pytest.raises(ValueError, match="config differs from the one given to get_sketch_model"):
        SketchOptimizer(model, SketchConfig(rank=4))
    with pytest.raises(ValueError, match="lr must be finite and not negative, got -1"):
        SketchOptimizer(model, lr=-1)
    assert SketchOptimizer(model, SketchConfig(rank=8)).config.rank == 8


def test_one_optimizer_at_a_time():
    model, first = make()
    backward(model)
    second = SketchOptimizer(model)
    with pytest.raises(RuntimeError, match="a model has one at a time"):
        first.step()
    second.step()


def test_a_negative_clipping_norm_is_refused():
    model, optimizer = make(norm="none", update_rule="sgd")
    backward(model)
    with pytest.raises(ValueError, match="max_grad_norm must not be negative, got -1"):
        optimizer.propose(max_grad_norm=-1)


@pytest.mark.parametrize("update_rule", ["sgd", "row_adam"])
def test_a_checkpoint_library_primes_and_carries_the_state(update_rule):
    """torch's primes an empty state with a step at lr = 0, and drops the state of what does not require grad."""
    model, optimizer = make(BF16, update_rule=update_rule)
    weights = weights_of(model)
    primed = get_optimizer_state_dict(model, optimizer)
    assert same_bits(weights_of(model), weights) and optimizer.sketches.step == 0
    assert primed["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"] != 0
    for batch in range(2):
        backward(model, batch)
        optimizer.step()
    optimizer.mismatch = 0.25
    weights, saved = weights_of(model), copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert same_bits(weights_of(model), weights) and optimizer.sketches.step == 2
    other, other_optimizer = make(BF16, update_rule=update_rule)
    other.load_state_dict(model.state_dict())
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(saved), options=options)
        assert same_bits(weights_of(other), weights)
        assert other_optimizer.sketches.step == 2 and other_optimizer.mismatch == 0.25
        assert same_bits(sketch_entry(other_optimizer)["moments"], sketch_entry(optimizer)["moments"])
    for m, o in ((model, optimizer), (other, other_optimizer)):
        backward(m, 2)
        o.step()
    assert same_bits(weights_of(model), weights_of(other)) and not same_bits(weights_of(model), weights)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=repr)
def test_what_a_broken_step_has_applied_is_not_applied_again(error, monkeypatch):
    model, optimizer = make()
    heard = []
    optimizer.listeners.append(lambda step, updates: heard.append((step, len(updates))))
    backward(model)
    optimizer.step()
    before, moments = weights_of(model), copy.deepcopy(sketch_entry(optimizer)["moments"])
    backward(model, 1)
    apply_ = SketchUpdate.apply_

    def failing(update, weight, *args, **kwargs):
        if update.name != "a":
            raise error
        apply_(update, weight, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SketchUpdate, "apply_", failing)
        with pytest.raises(type(error)):
            optimizer.step()
    after = weights_of(model)
    assert [name for name in after if not torch.equal(after[name], before[name])] == ["a"]
    assert not optimizer.sketches.proposed and not optimizer.sketches.flat.any()
    assert same_bits(sketch_entry(optimizer)["moments"], moments) and optimizer.skipped_steps == 1
    backward(model, 2)
    optimizer.step()
    assert heard == [(1, 3), (3, 3)]  # of a version in between nothing is known: a rollout needs whole weights


def test_an_optimizer_is_not_copied_without_its_model():
    model, optimizer = make()
    for copying in (copy.deepcopy, pickle.dumps, lambda own: torch.save(own, io.BytesIO())):
        with pytest.raises(TypeError, match="give the model's copy a new one, and load state_dict"):
            copying(optimizer)
    twin = SketchOptimizer(copy.deepcopy(model), lr=1e-3)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))


# Of a step of a fixed size the correction of the moments' bias is no part; of plain adam it is.
@pytest.mark.parametrize("config", [{"update_rule": "row_adam"}, {"update_rule": "adam", "norm": "none"}], ids=str)
def test_a_skipped_step_counts_and_changes_nothing(config):
    """The moments, and the correction of their bias, go by the steps that were made."""
    straight, optimizer = make(refresh="never", **config)
    for batch in (0, 2):
        backward(straight, batch)
        optimizer.step()

    model, optimizer = make(refresh="never", **config)
    steps = []
    optimizer.listeners.append(lambda step, updates: steps.append((step, len(updates))))
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    before, moments = weights_of(model), copy.deepcopy(sketch_entry(optimizer)["moments"])
    optimizer.propose()
    optimizer.skip()
    optimizer.step()
    assert same_bits(weights_of(model), before)
    assert same_bits(sketch_entry(optimizer)["moments"], moments)
    backward(model, 2)
    optimizer.step()
    assert same_bits(weights_of(model), weights_of(straight))
    assert steps == [(1, 3), (2, 0), (3, 3)]
    assert optimizer.skipped_steps == 1 and optimizer.sketches.step == 3
    _, restored = make(refresh="never", **config)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.skipped_steps == 1 and restored.sketches.step == 3


def test_listeners_get_the_updates_that_were_applied():
    model, optimizer = make(BF16)
    copies = {name: layer.weight.detach().clone() for name, layer in optimizer.sketches.layers.items()}

    def apply(step, updates):
        for update in updates:
            update.apply_(copies[update.name])

    optimizer.listeners.append(apply)
    for batch in range(5):
        backward(model, batch)
        optimizer.step()
    assert all(torch.equal(layer.weight, copies[name]) for name, layer in optimizer.sketches.layers.items())


def test_loading_drops_a_proposal():
    model, optimizer = make()
    saved = copy.deepcopy(optimizer.state_dict())
    backward(model)
    optimizer.propose()
    optimizer.load_state_dict(saved)
    assert not optimizer.sketches.proposed and not optimizer.sketches.flat.any()


@pytest.mark.parametrize("change", [{"projection": "gaussian"}, {"norm": "matrix"}, {"refresh": 2}])
def test_resuming_with_another_method_is_refused(change):
    _, saved = make(rank=4)
    _, optimizer = make(rank=4, **change)
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"saved with {name}=.*resume with the same settings"):
        optimizer.load_state_dict(saved.state_dict())


def test_the_configuration_is_the_models_own():
    config = SketchConfig(rank=4, norm="none", update_rule="sgd")
    net = get_sketch_model(Net(), config)
    config.norm = "matrix"
    assert SketchOptimizer(net).config.norm == "none"


def test_an_update_that_is_kept_keeps_no_other():
    model, optimizer = make()
    heard: list = []
    optimizer.listeners.append(lambda step, updates: heard.extend(updates))
    backward(model)
    optimizer.step()
    assert len(heard) > 1
    for update in heard:
        assert update.q.untyped_storage().nbytes() == update.q.numel()
        assert update.exponent.untyped_storage().nbytes() == update.exponent.numel()


def test_a_listener_that_fails_does_not_make_the_next_step_a_skipped_one():
    model, optimizer = make()

    def fail(step, updates):
        raise RuntimeError("no disk")

    optimizer.listeners.append(fail)
    optimizer.skip()
    with pytest.raises(RuntimeError, match="no disk"):
        optimizer.step()
    optimizer.listeners.clear()
    before = weights_of(model)
    backward(model)
    optimizer.step()
    assert any(moved.any() for moved in movement(model, before).values()) and optimizer.skipped_steps == 1
