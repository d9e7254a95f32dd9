"""Fifty optimizer steps arrive in vLLM's own models to the last bit: copied, shared, by message, whole and in shards."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_trainer import KINDS, ToyTrainer, add_naively

from trl_sketch.sync.checksum import checksum, combine
from trl_sketch.sync.colocate import ColocatedWeights
from trl_sketch.sync.plan import Box
from trl_sketch.sync.receiver import Receiver
from trl_sketch.sync.update import UpdateMessage, weight_messages
from trl_sketch.weights import SketchUpdate


STEPS = 50


@dataclass
class Run:
    """What a trainer started from, sent and came to."""

    run_id: bytes
    sketched: list[str]
    before: dict[str, torch.Tensor]
    message: UpdateMessage
    after: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def run_of(checkpoint: Callable[[str], Path]) -> Callable[[str], Run]:
    """`run_of(kind)`: one run of fifty steps, made once."""
    made: dict[str, Run] = {}

    def make(kind: str) -> Run:
        if kind not in made:
            trainer = ToyTrainer(checkpoint(kind))
            before = trainer.weights()
            trainer.train(STEPS)
            made[kind] = Run(trainer.run_id, trainer.sketched, before, trainer.take_updates(), trainer.weights())
        return made[kind]

    return make


def start(model: nn.Module, run: Run, whole: bool = True) -> Receiver:
    receiver = Receiver(model, whole)
    parameters = [[n, list(w.shape), str(w.dtype).removeprefix("torch.")] for n, w in run.before.items()]
    receiver.initialize({"run_id": run.run_id.hex(), "parameters": parameters, "sketched": run.sketched})
    status = receiver.status()
    assert status["last"]["outcome"] == "applied"
    assert status["senders"][run.run_id.hex()] == {"refused": {}, "unsketchable": {}, "cast": []}
    return receiver


def send(receiver: Receiver, message) -> None:
    receiver.receive(None, message.to_bytes())
    assert receiver.last["outcome"] == "applied", receiver.last


def differing(boxes: dict[str, list[Box]], weights: dict[str, torch.Tensor]) -> int:
    """Elements that are not the same bits."""
    return sum(
        int((box.target.view(torch.int16) != box.of(weights[name]).view(torch.int16)).sum())
        for name, parts in boxes.items()
        for box in parts
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_give_the_trainers_bits(
    kind, size, build_vllm_model, tensor_parallel_rank, checkpoint, run_of, monkeypatch
):
    run = run_of(kind)
    receivers = []
    for rank in range(size):
        tensor_parallel_rank(rank, size)
        receivers.append(start(build_vllm_model(checkpoint(kind)), run, whole=size == 1))

    # Every element of the checkpoint has a place, and vLLM's own loader has put there what the trainer starts from.
    replies = [receiver.checksums(run.run_id.hex()) for receiver in receivers]
    for name, weight in run.before.items():
        boxes = [(tuple(s), tuple(n), value) for reply in replies for s, n, value in reply[name]]
        assert combine(boxes, tuple(weight.shape)) == checksum(weight), name
    assert {len(reply["model.layers.0.self_attn.k_proj.weight"]) for reply in replies} == {1}

    for receiver in receivers:
        boxes = receiver.senders[run.run_id].plan.boxes
        assert differing(boxes, run.before) == 0 < differing(boxes, run.after)
        for message in weight_messages(run.run_id, 0, run.before, chunk_bytes=20_000):
            send(receiver, message)
        assert differing(boxes, run.before) == 0
        first, rest = run.message.steps[:1], run.message.steps[1:]
        send(receiver, UpdateMessage(run.run_id, first))
        send(receiver, UpdateMessage(run.run_id, rest))
        assert receiver.version == STEPS
        assert differing(boxes, run.after) == 0

    for message in weight_messages(run.run_id, 0, run.before):
        send(receivers[0], message)
    monkeypatch.setattr(SketchUpdate, "apply_", add_naively)
    send(receivers[0], run.message)
    assert differing(receivers[0].senders[run.run_id].plan.boxes, run.after) > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_shared_weights_are_one_copy(kind, build_vllm_model, checkpoint, run_of):
    run = run_of(kind)
    model = build_vllm_model(checkpoint(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # what vLLM had does not matter
    trainer = ToyTrainer(checkpoint(kind))
    own = {id(parameter): parameter.data_ptr() for parameter in trainer.parameters.values()}
    weights = ColocatedWeights(model, trainer.parameters)
    assert weights.refused == weights.why_not_shared() == {}
    assert weights.share() == list(trainer.parameters)
    assert weights.copy() == []
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for parameter in trainer.parameters.values():
        assert parameter.data_ptr() != own[id(parameter)]
        assert parameter.untyped_storage().data_ptr() in storages and parameter.is_contiguous()
    assert differing(weights.plan.boxes, run.before) == 0
    trainer.train(STEPS)
    assert differing(weights.plan.boxes, run.after) == 0  # and training has the same bits as without sharing
    assert weights.share() == list(trainer.parameters)  # nothing left to do
    assert differing(weights.plan.boxes, run.after) == 0
    head, embedding = trainer.model.lm_head.weight, trainer.model.model.embed_tokens.weight
    assert (head.data_ptr() == embedding.data_ptr()) == trainer.model.config.tie_word_embeddings


@pytest.mark.parametrize("kind", KINDS)
def test_copied_weights_are_the_trainers(kind, build_vllm_model, checkpoint, run_of):
    run = run_of(kind)
    model = build_vllm_model(checkpoint(kind))
    parameters = {name: nn.Parameter(weight.clone(), requires_grad=False) for name, weight in run.after.items()}
    weights = ColocatedWeights(model, parameters)
    assert differing(weights.plan.boxes, run.after) > 0
    assert weights.copy() == list(parameters)
    assert differing(weights.plan.boxes, run.after) == 0


def test_what_cannot_be_shared_is_copied(build_vllm_model, checkpoint, run_of):
    run = run_of("llama")
    parameters = {name: nn.Parameter(weight.clone(), requires_grad=False) for name, weight in run.after.items()}
    name = "model.layers.1.mlp.down_proj.weight"
    parameters[name].data = parameters[name].float()
    weights = ColocatedWeights(build_vllm_model(checkpoint("llama")), parameters)
    assert set(weights.why_not_shared()) == {name}
    assert "torch.float32 on cpu in the trainer and torch.bfloat16" in weights.why_not_shared()[name]
    assert set(weights.share()) == set(parameters) - {name}
    assert weights.copy() == [name]
    assert differing(weights.plan.boxes, run.after) == 0


def test_vllms_packed_weights_are_refused(vllm_here, build_vllm_model, checkpoint, run_of, monkeypatch):
    """The CPU build as it is: its LM head would go on computing with the old weights."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("only vLLM's CPU build packs weights")
    replaced = utils.dispatch_cpu_unquantized_gemm
    original = next(c.cell_contents for c in replaced.__closure__ if callable(c.cell_contents))
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", original)
    run = run_of("qwen3-tied")
    model = build_vllm_model(checkpoint("qwen3-tied"))
    parameters = {name: nn.Parameter(weight.clone(), requires_grad=False) for name, weight in run.after.items()}
    weights = ColocatedWeights(model, parameters)
    assert set(weights.refused) == set(parameters)
    assert "packed copies" in weights.refused["model.embed_tokens.weight"]
    assert weights.share() == weights.copy() == []
