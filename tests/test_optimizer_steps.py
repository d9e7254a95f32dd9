"""The calls of SketchOptimizer: propose, scale, step; what is skipped, and what its listeners hear."""

import copy
import math

import pytest
import torch
from optimizer_support import backward, dense_gradients, flat, make, movement, same_bits, sketch_entry, weights_of

from trl_sketch import SketchConfig, SketchOptimizer, SketchUpdate, get_sketch_model, make_projection
from trl_sketch.model import sketch_state
from trl_sketch.projection import PROJECTIONS, Signs


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


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


def test_a_negative_clipping_norm_is_refused():
    model, optimizer = make(norm="none", update_rule="sgd")
    backward(model)
    with pytest.raises(ValueError, match="max_grad_norm must not be negative, got -1"):
        optimizer.propose(max_grad_norm=-1)


# ---------------------------------------------------------- steps that are skipped or break off


@pytest.mark.parametrize("config", [{}, {"update_rule": "adam", "refresh": "never"}, {"spectral_power": 0.5}], ids=str)
def test_a_proposal_that_breaks_off_is_dropped(config, monkeypatch):
    """Its sketches are half transformed: neither a second try nor the next step may take them for gradients."""
    weights = []
    for breaks in (False, True):
        model, optimizer = make(**config)
        backward(model)
        if breaks:
            with monkeypatch.context() as patch:
                patch.setattr(SketchOptimizer, "_step_sizes", lambda *args: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
            assert not optimizer.sketches.flat.any() and not optimizer.sketches.proposed
            backward(model)
        optimizer.step()
        weights.append(weights_of(model))
    assert same_bits(*weights)


@pytest.mark.parametrize("broken", [(0,), (1,), (1, 2)], ids=str)
def test_projections_whose_drawing_breaks_off_are_drawn_anew(broken, monkeypatch):
    """Also if that happens again while it is mended. Else a sketch would be of another projection than the key says that is sent along."""
    model, optimizer = make()
    backward(model)
    copy_, calls = Signs.copy_, []

    def failing(self, other):
        calls.append(other)
        if len(calls) - 1 in broken:
            raise KeyboardInterrupt
        copy_(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(Signs, "copy_", failing)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    heard = []
    optimizer.listeners.append(lambda step, updates: heard.extend(updates))
    replica = weights_of(model)
    backward(model, 1)
    optimizer.step()
    for update in heard:
        SketchUpdate.from_bytes(update.to_bytes()).apply_(replica[update.name])
    assert same_bits(replica, weights_of(model))


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


# ---------------------------------------------------------- listeners


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
