"""SketchOptimizer against a float64 reference, and the size of its steps."""

import copy
import itertools
import math

import pytest
import torch
from optimizer_support import backward, dense_gradients, flat, make, movement, same_bits, sketch_entry, weights_of

from trl_sketch import SketchConfig, make_projection
from trl_sketch.model import sketch_state
from trl_sketch.projection import PROJECTIONS


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


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
