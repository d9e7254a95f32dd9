"""Weights and updates through a real `vllm serve`, and what it makes of everything that can go wrong on the way."""

from pathlib import Path

import pytest
import torch
from toy_trainer import ToyTrainer, add_naively
from vllm_server import TENSOR_PARALLEL, running_server

from trl_sketch.sync.client import ServerClient, SyncError
from trl_sketch.sync.update import Step, UpdateMessage, new_run_id
from trl_sketch.weights import SketchUpdate


TOKENS = torch.randint(3, 70, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def mismatch(server, trainer: ToyTrainer) -> float:
    """Mean absolute difference between the server's log-probabilities and the trainer's."""
    return (server.logprobs(TOKENS) - trainer.logprobs(TOKENS)).abs().mean().item()


def follow(server, trainer: ToyTrainer, fresh: bool = False) -> ServerClient:
    """Fifty steps in batches of one to twenty, and that nothing gets lost."""
    client = ServerClient(server.url, trainer.run_id)
    client.initialize(trainer.parameters, trainer.sketched)
    assert client.version() is None
    if fresh:  # vLLM's own loader has put into the places that were found what the trainer starts from
        assert client.differing(trainer.parameters) == []
    client.send_weights(0, trainer.parameters, chunk_bytes=40_000)
    assert client.version() == 0 and client.differing(trainer.parameters) == []
    before = mismatch(server, trainer)
    for steps in (1, 1, 8, 20, 20):
        trainer.train(steps)
        client.send_updates(trainer.take_updates())
        client.reset_prefix_cache()
        assert client.version() == trainer.version
    assert trainer.version == 50
    assert client.differing(trainer.parameters) == []
    assert mismatch(server, trainer) < 2 * before + 1e-3 < 0.05
    return client


@pytest.fixture
def trainer(server) -> ToyTrainer:
    return ToyTrainer(server.folder)


@pytest.fixture
def client(server, trainer) -> ServerClient:
    """Of `trainer`, whose weights the server has."""
    client = ServerClient(server.url, trainer.run_id)
    client.initialize(trainer.parameters, trainer.sketched)
    client.send_weights(0, trainer.parameters)
    return client


def assert_refused(client: ServerClient, message: UpdateMessage, outcome: str, text: str) -> None:
    with pytest.raises(SyncError, match=text) as error:
        client.send_updates(message)
    assert error.value.outcome == outcome


def test_fifty_steps_arrive_to_the_last_bit(server, trainer):
    client = follow(server, trainer)
    assert server.post("/collective_rpc", {"method": "sketch_status"})["results"][0]["version"] == 50
    assert client.bytes_sent > 0


def test_a_naive_addition_does_not(server, trainer, client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(SketchUpdate, "apply_", add_naively)
        trainer.train(50)
    client.send_updates(trainer.take_updates())
    assert set(client.differing(trainer.parameters)) == set(trainer.sketched)


def test_a_replay_changes_nothing(client, trainer):
    trainer.train(2)
    message = trainer.take_updates()
    client.send_updates(message)
    client.send_updates(message)
    assert client.version() == 2 and client.differing(trainer.parameters) == []


def test_a_gap_is_refused_and_a_full_sync_answers_it(client, trainer):
    trainer.train(1)
    trainer.take_updates()  # lost
    trainer.train(1)
    assert_refused(client, trainer.take_updates(), "gap", "from version 1 cannot follow version 0")
    assert client.version() == 0
    client.send_weights(2, trainer.parameters)
    trainer.train(1)
    client.send_updates(trainer.take_updates())
    assert client.version() == 3 and client.differing(trainer.parameters) == []


def test_damaged_bodies_are_refused(client, trainer, server):
    trainer.train(1)
    body = trainer.take_updates().to_bytes()
    server.post("/start_weight_update", {})
    for damaged in (body[:-100], body[:1000] + bytes([body[1000] ^ 4]) + body[1001:], b"", b"{}" * 100):
        with pytest.raises(SyncError) as error:
            client.send_bytes(damaged)
        assert error.value.outcome == "damaged"
    client.send_bytes(body)  # the update that was started goes on
    server.post("/finish_weight_update", {})
    assert client.version() == 1 and client.differing(trainer.parameters) == []


def test_another_models_weights_are_refused(server, client, trainer):
    other = ServerClient(server.url, new_run_id())
    wrong = dict(trainer.parameters) | {"model.layers.7.mlp.down_proj.weight": torch.zeros(64, 96).bfloat16()}
    with pytest.raises(SyncError, match=r"layers\.7\.mlp\.down_proj\.weight: the loader does not take it") as error:
        other.initialize(wrong, [])
    assert error.value.outcome == "unsupported"
    half = dict(trainer.parameters) | {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 48).bfloat16()}
    with pytest.raises(SyncError, match="down_proj"):
        other.initialize(half, [])
    fp32 = {name: parameter.float() for name, parameter in trainer.parameters.items()}
    reasons = other.initialize(fp32, trainer.sketched)  # whole weights can be sent
    assert set(reasons) == set(trainer.sketched)
    assert set(reasons.values()) == {"it is torch.float32 in the trainer and torch.bfloat16 here"}
    trainer.train(1)
    client.send_updates(trainer.take_updates())  # and the run that has the server has noticed nothing
    assert client.differing(trainer.parameters) == []


def test_updates_that_do_not_fit_are_refused(client, trainer):
    trainer.train(1)
    (step,) = trainer.take_updates().steps
    for updates, text in [
        (step.updates[1:], "has no update of"),
        ([*step.updates, SketchUpdate(**vars(step.updates[0]) | {"name": "lm_head"})], "lm_head.weight is not among"),
        ([SketchUpdate(**vars(step.updates[0]) | {"in_features": 99}), *step.updates[1:]], "its update"),
    ]:
        assert_refused(client, UpdateMessage(trainer.run_id, [Step(0, 1, updates)]), "invalid", text)
    client.send_updates(UpdateMessage(trainer.run_id, [step]))
    assert client.differing(trainer.parameters) == []


def test_a_second_trainer_takes_over_with_a_full_sync_only(server, client, trainer):
    second = ToyTrainer(server.folder)
    late = ServerClient(server.url, second.run_id)
    second.train(1)
    message = second.take_updates()
    assert_refused(late, message, "unknown", "has to be initialized")
    late.initialize(second.parameters, second.sketched)
    assert_refused(late, message, "foreign", "another run's")
    trainer.train(1)
    client.send_updates(trainer.take_updates())
    late.send_weights(1, second.parameters)
    assert late.version() == 1 and client.version() is None
    trainer.train(1)
    assert_refused(client, trainer.take_updates(), "unknown", "has to be initialized")
    assert late.differing(second.parameters) == []


def test_a_trainer_that_died_between_start_and_finish_is_cleaned_up_after(server, client, trainer):
    server.post("/start_weight_update", {})
    trainer.train(1)
    client.send_updates(trainer.take_updates())
    assert client.version() == 1


def test_an_unfinished_full_sync_is_no_version(client, trainer):
    parts = list(trainer.parameters.items())
    with pytest.raises(SyncError, match="leave out") as error:
        client.send_weights(1, dict(parts[:4]), chunk_bytes=1)
    assert error.value.outcome == "invalid"
    assert client.version() is None
    trainer.train(1)
    assert_refused(client, trainer.take_updates(), "broken", "has not been finished")
    client.send_weights(1, trainer.parameters)
    assert client.version() == 1 and client.differing(trainer.parameters) == []


@pytest.mark.slow
def test_tensor_parallel_workers_follow_as_well(checkpoint, tmp_path: Path):
    """Two worker processes: fifty steps, an error that reaches one of them and leaves no stale reply behind, and sleep."""
    flags = ("--tensor-parallel-size", "2", "--enable-sleep-mode")
    environment = TENSOR_PARALLEL | {"VLLM_SLEEPS_ON_CPU": "1"}
    with running_server(checkpoint("qwen2"), tmp_path / "log", *flags, **environment) as server:
        trainer = ToyTrainer(server.folder)
        client = follow(server, trainer, fresh=True)
        assert len(client.status()) == 2
        trainer.train(1)
        trainer.take_updates()
        trainer.train(1)
        assert_refused(client, trainer.take_updates(), "gap", "from version 51")
        client.send_weights(52, trainer.parameters)
        assert client.version() == 52 and client.differing(trainer.parameters) == []
        check_sleep(server, client, trainer)


def check_sleep(server, client: ServerClient, trainer: ToyTrainer) -> None:
    """At level 1 the weights come back and updates go on; at level 2 the checksums find that they did not."""
    before = mismatch(server, trainer)
    server.post("/sleep?level=1", {})
    assert set(client.differing(trainer.parameters)) >= set(trainer.sketched)  # asleep there are none
    server.post("/wake_up", {})
    trainer.train(3)
    client.send_updates(trainer.take_updates())
    assert client.version() == 55 and client.differing(trainer.parameters) == []
    client.reset_prefix_cache()
    assert mismatch(server, trainer) < 2 * before + 1e-3
    server.post("/sleep?level=2", {})
    server.post("/wake_up", {})
    assert client.version() == 55 and set(client.differing(trainer.parameters)) == set(trainer.parameters)
    client.send_weights(55, trainer.parameters)
    client.reset_prefix_cache()
    assert client.differing(trainer.parameters) == [] and mismatch(server, trainer) < 2 * before + 1e-3
