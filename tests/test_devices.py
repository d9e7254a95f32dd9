"""What lies on which device, as far as it shows without a second one: `meta`, whose tensors have no data, stands for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trl_sketch import SketchConfig, SketchOptimizer, SketchUpdate, get_sketch_model, kl, predicted_kl
from trl_sketch.model import sketch_state
from trl_sketch.projection import PROJECTIONS


IDS = torch.arange(2, 26).view(2, 12)


def steps(
    model: torch.nn.Module, config: SketchConfig, method: str
) -> tuple[list[float], list[torch.Tensor], list[bytes]]:
    """Two optimizer steps with a KL probe: what was predicted and realized, the weights, and the updates as they are sent."""
    get_sketch_model(model, config)
    optimizer = SketchOptimizer(model, lr=1e-2)
    sent: list[bytes] = []
    optimizer.listeners.append(lambda version, updates: sent.extend(update.to_bytes() for update in updates))
    inputs = {"input_ids": IDS}
    divergences = []
    for _ in range(2):
        before = list(kl.reference_states(model, [inputs]))
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.propose()
        divergences.append(predicted_kl(model, inputs, method=method))
        optimizer.scale(0.5)
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(kl.realized_kl(model, [inputs], before))
        optimizer.load_state_dict(optimizer.state_dict())
    return divergences, [layer.weight.detach().clone() for layer in optimizer.layers], sent


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"projection": "orthonormal", "update_rule": "sgd", "norm": "matrix"},
        {"update_rule": "adam", "refresh": "never", "norm": "none"},
        {"norm": "none", "spectral_power": 0.5},
    ],
    ids=str,
)
def test_nothing_goes_to_the_default_device(
    tiny_qwen3: Callable[..., Any], config: dict[str, Any], method: str
) -> None:
    """A script may have set another one, as `torch.set_default_device("cuda")` does, before its model is on it."""
    expected = steps(tiny_qwen3(), SketchConfig(rank=4, **config), method)
    model = tiny_qwen3()
    with torch.device("meta"):
        divergences, weights, sent = steps(model, SketchConfig(rank=4, **config), method)
        updates = [SketchUpdate.from_bytes(data) for data in sent]
    assert (divergences, sent) == (expected[0], expected[2])
    assert all(torch.equal(a, b) for a, b in zip(weights, expected[1], strict=True))
    for update in updates:
        tensors = (update.q, update.exponent, update.projection_key, update.rounding_key)
        assert all(tensor.device.type == "cpu" for tensor in tensors)


def test_the_mismatch_is_not_measured_on_the_default_device() -> None:
    batch = {
        "completion_ids": torch.tensor([[3, 2]]),
        "completion_mask": torch.ones(1, 2),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0]]),
        "old_per_token_logps": torch.tensor([[-1.5, -2.5]]),
    }
    with torch.device("meta"):
        assert kl.measure_mismatch([batch], {2}) == pytest.approx(0.5)


def replace_tensors(model: torch.nn.Module, device: str) -> None:
    """As libraries move a model that do not call `to`."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@pytest.mark.parametrize("move", [torch.nn.Module.to, replace_tensors])
@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_projections_follow_a_model_that_is_moved(
    tiny_qwen3: Callable[..., Any], projection: str, with_optimizer: bool, move: Callable[..., Any]
) -> None:
    """To where the model goes after it was given its sketches, with an optimizer made already or not."""
    model = get_sketch_model(tiny_qwen3(), SketchConfig(rank=4, projection=projection))
    if with_optimizer:
        optimizer = SketchOptimizer(model, lr=1e-3)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    move(model, "meta")
    loss = model(input_ids=IDS.to("meta"), labels=IDS.to("meta")).loss
    state = sketch_state(model)
    for group in state.groups:  # before backward, which allocates the sketches
        assert {t.device.type for t in (group.key, *group.kept)} == {"meta"}
    loss.backward()
    assert state.flat.device.type == "meta"


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_model_that_gets_its_weights_later(tiny_qwen3: Callable[..., Any], projection: str) -> None:
    """Sketched and optimized on `meta`, as large models are loaded, it trains as one that had its weights before."""
    config = SketchConfig(rank=4, projection=projection)
    model, later = tiny_qwen3(), tiny_qwen3()
    weights = model.state_dict()
    get_sketch_model(later.to("meta"), config)
    optimizers = [SketchOptimizer(get_sketch_model(model, config), lr=1e-2), SketchOptimizer(later, lr=1e-2)]
    later.to_empty(device="cpu")
    later.load_state_dict(weights)
    later.model.rotary_emb = model.model.rotary_emb  # its buffers are in no state_dict
    for own, optimizer in zip((model, later), optimizers, strict=True):
        own(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    for a, b in zip(*(optimizer.layers for optimizer in optimizers), strict=True):
        assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("proposed", [False, True])
def test_sketches_take_the_type_that_the_weights_are_given(tiny_qwen3: Callable[..., Any], proposed: bool) -> None:
    """Between two microbatches, or between proposal and step; nothing that was accumulated is lost."""
    models = [get_sketch_model(tiny_qwen3(), SketchConfig(rank=4)) for _ in range(2)]
    optimizers = [SketchOptimizer(model, lr=1e-2) for model in models]
    for changed, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model(input_ids=IDS, labels=IDS).loss.backward()
        if proposed:
            optimizer.propose()
        if changed:
            model.double()
            assert sketch_state(model).flat.dtype == torch.float64
        if not proposed:
            model(input_ids=IDS.flip(0, 1), labels=IDS).loss.backward()
        optimizer.step()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    for a, b in zip(*(optimizer.layers for optimizer in optimizers), strict=True):
        assert (a.weight.double() - b.weight).norm() < 1e-4 * b.weight.norm()


def test_keys_are_drawn_where_the_weights_are(tiny_qwen3: Callable[..., Any]) -> None:
    """Without a move, before anything else: compiled layers do not look for one."""
    state = sketch_state(get_sketch_model(tiny_qwen3(), SketchConfig(rank=4)))
    assert state.keys.device == state.device == torch.device("cpu")
    assert sketch_state(get_sketch_model(tiny_qwen3().to("meta"), SketchConfig(rank=4))).keys.device.type == "cpu"
