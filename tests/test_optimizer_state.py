"""How a SketchOptimizer is made, saved and loaded."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from optimizer_support import Net, backward, make, same_bits, sketch_entry, weights_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model


BF16, FP32 = torch.bfloat16, torch.float32


# ---------------------------------------------------------- making one


def test_what_it_is_made_from_is_checked():
    with pytest.raises(ValueError, match=r"no sketches: call get_sketch_model\(model, config\) first"):
        SketchOptimizer(Net())
    model, _ = make(rank=8)
    with pytest.raises(ValueError, match="config differs from the one given to get_sketch_model"):
        SketchOptimizer(model, SketchConfig(rank=4))
    with pytest.raises(ValueError, match="lr must be finite and not negative, got -1"):
        SketchOptimizer(model, lr=-1)
    assert SketchOptimizer(model, SketchConfig(rank=8)).config.rank == 8


def test_the_configuration_is_the_models_own():
    config = SketchConfig(rank=4, norm="none", update_rule="sgd")
    net = get_sketch_model(Net(), config)
    config.norm = "matrix"
    assert SketchOptimizer(net).config.norm == "none"


def test_one_optimizer_at_a_time():
    model, first = make()
    backward(model)
    second = SketchOptimizer(model)
    with pytest.raises(RuntimeError, match="a model has one at a time"):
        first.step()
    second.step()


def test_an_optimizer_is_not_copied_without_its_model():
    model, optimizer = make()
    for copying in (copy.deepcopy, pickle.dumps, lambda own: torch.save(own, io.BytesIO())):
        with pytest.raises(TypeError, match="give the model's copy a new one, and load state_dict"):
            copying(optimizer)
    twin = SketchOptimizer(copy.deepcopy(model), lr=1e-3)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))


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
