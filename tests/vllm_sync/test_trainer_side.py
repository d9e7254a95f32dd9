"""GRPO with vLLM servers: what is sent, that the weights are equal, and what happens when something goes wrong."""

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_runs import FP32, logged, make_trainer
from transformers import TrainerCallback
from trl.generation.vllm_client import VLLMClient
from vllm_server import Server, running_server

from trl_sketch import SketchGRPOTrainer
from trl_sketch.sync.client import ServerClient
from trl_sketch.sync.servers import RolloutError


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What goes to servers: `("whole", version)`, and `("updates", base version of each step..., version)`."""
    record: list[tuple[Any, ...]] = []
    send_weights, send_updates = ServerClient.send_weights, ServerClient.send_updates

    def whole(self, version, *args, **kwargs):
        send_weights(self, version, *args, **kwargs)
        record.append(("whole", version))

    def updates(self, message):
        send_updates(self, message)
        record.append(("updates", *(step.base_version for step in message.steps), message.version))

    monkeypatch.setattr(ServerClient, "send_weights", whole)
    monkeypatch.setattr(ServerClient, "send_updates", updates)
    return record


@pytest.fixture
def train_with(server: Server, tmp_path: Path) -> Any:
    """`train_with(**settings)`: a trainer of the server's model."""

    def make(*args: Any, **settings: Any) -> SketchGRPOTrainer:
        return make_trainer(server.folder, tmp_path, *args, **{"vllm_server_base_url": server.url} | settings)

    return make


class At(TrainerCallback):
    """Calls `action` after the optimizer step `step`, before the sync that follows it."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def assert_in_step(trainer: SketchGRPOTrainer) -> None:
    """After a sync every server has the trainer's bits and version, and nothing is kept that has been sent."""
    generation = trainer.vllm_generation
    generation.sync_weights()
    parameters = dict(trainer.model.named_parameters())
    for client in generation.servers.clients:
        assert client.differing(parameters) == []
        assert client.version() == generation.version
    assert generation._steps == []


def test_fifty_steps_of_grpo(train_with, sent, monkeypatch):
    """At a relative step of 6e-5: the weights are equal, and log-probabilities agree as well as before the first."""
    reset, resets = ServerClient.reset_prefix_cache, []
    monkeypatch.setattr(ServerClient, "reset_prefix_cache", lambda self: resets.append(reset(self)))
    trainer = train_with({"update_ratio": 6e-5, "full_sync_every": 20}, max_steps=50)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert sent == [("whole", 0), *(("updates", step, step + 1) for step in range(49))]
    assert len(resets) == 50
    assert_in_step(trainer)
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, start[name])]
    assert len(moved) == 14
    assert logged(trainer, "sketch/weight_version") == list(range(50))
    first, *others = logged(trainer, "sketch/sync_bytes")
    payload = sum(layer.out_features * 9 for layer in trainer.optimizer.optimizer.layers)
    assert first > sum(p.nbytes for p in start.values())
    assert payload < min(others) and max(others) < payload + 14 * 100 < first / 10
    assert all(0 < seconds < 60 for seconds in logged(trainer, "sketch/sync_seconds"))
    mismatch = logged(trainer, "sampling/sampling_logp_difference/mean")
    assert sum(mismatch[-10:]) / 10 < 2 * sum(mismatch[:10]) / 10 < 0.01


class NaNInTheThirdStep(SketchGRPOTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("nan") if self.state.global_step == 2 else loss


def test_several_steps_between_two_rollouts_go_in_one_request(train_with, sent):
    """Also one that is skipped; two from `num_iterations`, and two from `steps_per_generation`."""
    trainer = train_with({"skip_nonfinite_steps": True}, cls=NaNInTheThirdStep, num_iterations=2, max_steps=5)
    trainer.train()
    assert sent == [("whole", 0), ("updates", 0, 1, 2), ("updates", 2, 3, 4)]
    assert logged(trainer, "sketch/skipped_steps")[-1] == 1
    assert_in_step(trainer)
    sent.clear()
    trainer = train_with(steps_per_generation=2, max_steps=3)
    trainer.train()
    assert sent == [("whole", 0), ("updates", 0, 1, 2)]
    assert_in_step(trainer)


def test_evaluating_first_and_training_twice(train_with, sent):
    """The second training begins at the `global_step` of the last sync, which TRL takes for nothing new."""
    trainer = train_with(max_steps=1)
    trainer.evaluate()
    trainer.train()
    assert sent == [("whole", 0)]
    trainer.train()
    trainer.evaluate()
    assert sent == [("whole", 0), ("updates", 0, 1), ("updates", 1, 2)]
    assert_in_step(trainer)


def test_a_resumed_run_begins_with_whole_weights(train_with, sent, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = train_with(**settings)
    straight.train()
    sent.clear()
    resumed = train_with(**settings)
    resumed.evaluate()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sent == [("whole", 0), ("whole", 2), ("updates", 2, 3)]
    assert_in_step(resumed)
    sent.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # nothing is left to train
    resumed.evaluate()
    assert sent == [("whole", 4)]


def test_a_second_trainer_stops_the_first(train_with, server):
    second = train_with()
    first = train_with(max_steps=5, callbacks=[At(2, lambda: second.vllm_generation.sync_weights())])
    with pytest.raises(RolloutError, match="another trainer has sent its weights to the vLLM server at " + server.url):
        first.train()
    assert first.state.global_step == 2
    second.train()
    assert_in_step(second)


@pytest.mark.parametrize("sync", ["auto", "full"])
def test_a_second_trainer_stops_one_that_sends_whole_weights_too(train_with, sync):
    first, second = train_with({"vllm_sync": sync}), train_with()
    first.vllm_generation.sync_weights()
    second.vllm_generation.sync_weights()
    with pytest.raises(RolloutError, match="another trainer"):
        first.vllm_generation.sync_weights() if sync == "full" else first.evaluate()


def test_weights_that_were_changed_are_found_and_sent_again(train_with, sent, caplog):
    name = "model.layers.1.mlp.up_proj.weight"

    def change() -> None:
        (client,) = trainer.vllm_generation.servers.clients
        weight = trainer.model.get_parameter(name).detach() + 1
        client.send_weights(client.version(), {name: weight})
        sent.clear()

    trainer = train_with({"full_sync_every": 4}, max_steps=6, callbacks=[At(2, change)])
    trainer.train()
    assert sent == [("updates", 1, 2), ("updates", 2, 3), ("updates", 3, 4), ("whole", 4), ("updates", 4, 5)]
    assert [r.message for r in caplog.records if "are not the trainer's in" in r.message] == [
        f"The weights of the vLLM server at {trainer.vllm_generation.servers.clients[0].base_url} are not the trainer's "
        f"in {name}: full sync."
    ]
    assert_in_step(trainer)


def test_an_fp32_trainer_sends_whole_weights_to_a_bf16_server(train_with, sent, caplog):
    trainer = train_with(max_steps=3, **FP32)
    trainer.train()
    assert sent == [("whole", 0), ("whole", 1), ("whole", 2)]
    said = [record.message for record in caplog.records if "gets whole weights at every sync" in record.message]
    assert len(said) == 1 and "it is torch.float32 in the trainer and torch.bfloat16 here" in said[0]
    assert trainer.vllm_generation._steps == []
    with pytest.raises(RolloutError, match="vllm_sync='sketch' is not possible.*torch.float32 in the trainer"):
        train_with({"vllm_sync": "sketch"}, **FP32).train()


def test_sharing_needs_vllm_in_the_process_and_awake(train_with):
    with pytest.raises(ValueError, match="vllm_mode='colocate'"):
        train_with({"vllm_sync": "share"})
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode throws vLLM's away"):
        train_with({"vllm_sync": "share"}, vllm_mode="colocate", vllm_enable_sleep_mode=True)


class Unready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        paths = {"/health": b"", "/server_info": self.server.info}
        body = paths.get(self.path.partition("?")[0])
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def unready() -> Iterator[HTTPServer]:
    """A server that is up, and answers `/server_info` with `info` (`None`: not at all)."""
    with HTTPServer(("127.0.0.1", 0), Unready) as fake:
        threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True).start()
        yield fake
        fake.shutdown()


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (None, "start it with VLLM_SERVER_DEV_MODE=1"),
        (b'{"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}', "--weight-transfer-config"),
    ],
)
def test_a_server_that_was_not_started_as_it_must_be(checkpoint, tmp_path, unready, info, text):
    unready.info = info
    url = f"http://127.0.0.1:{unready.server_port}"
    with pytest.raises(RolloutError, match=text) as error:
        make_trainer(checkpoint("qwen3-tied"), tmp_path, vllm_server_base_url=url)
    assert url in str(error.value)


def test_a_server_that_is_not_there(checkpoint, tmp_path):
    with pytest.raises(RolloutError, match="the vLLM server at http://127.0.0.1:9 did not answer for 0.5 s"):
        make_trainer(
            checkpoint("qwen3-tied"), tmp_path, vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=0.5
        )


# ---------------------------------------------------------- servers that die


@pytest.fixture(scope="module")
def mortal(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this module's own, that tests may end and start."""
    with running_server(checkpoint("qwen3-tied"), tmp_path_factory.mktemp("mortal") / "log") as server:
        yield server


def restart(server: Server) -> None:
    server.end()
    server.start()


@pytest.mark.slow
def test_a_server_that_was_killed_and_comes_back(mortal, tmp_path, sent, monkeypatch):
    """Once before a sync, and once between a sync and the rollout, which is done again with the right weights."""
    trainer = make_trainer(
        mortal.folder,
        tmp_path,
        max_steps=5,
        vllm_server_base_url=mortal.url,
        callbacks=[At(2, lambda: restart(mortal))],
    )
    generate, versions = VLLMClient.generate, []

    def generate_and_look(self, *args, **kwargs):
        if trainer.state.global_step == 4 and 4 not in versions:
            versions.append(4)
            restart(mortal)
            mortal.wait()
        result = generate(self, *args, **kwargs)
        versions.append(trainer.vllm_generation.servers.clients[0].version())
        return result

    monkeypatch.setattr(VLLMClient, "generate", generate_and_look)
    trainer.train()
    assert sent == [("whole", 0), ("updates", 0, 1), ("whole", 2), ("updates", 2, 3), ("updates", 3, 4), ("whole", 4)]
    assert versions == [0, 1, 2, 3, 4, None, 4]
    assert trainer.state.global_step == 5
    assert_in_step(trainer)


@pytest.mark.slow
def test_a_server_that_stays_away(mortal, tmp_path, sent, checkpoint):
    """A checkpoint is saved, from which the run goes on with the bits of one that was not interrupted."""
    settings = {"vllm_server_base_url": mortal.url, "max_steps": 4, "generation_kwargs": {"seed": 1}}
    straight = make_trainer(mortal.folder, tmp_path, **settings)
    straight.train()
    trainer = make_trainer(mortal.folder, tmp_path, callbacks=[At(2, mortal.end)], **settings)
    trainer.vllm_generation.servers.timeout = 1.5
    with pytest.raises(RolloutError) as error:
        trainer.train()
    saved = tmp_path / "checkpoint-2"
    assert f"the vLLM server at {mortal.url} did not answer for 1.5 s" in str(error.value)
    assert f"A checkpoint was saved in {saved}" in str(error.value) and saved.is_dir()
    mortal.start()
    mortal.wait()
    sent.clear()
    resumed = make_trainer(mortal.folder, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(saved))
    assert sent == [("whole", 2), ("updates", 2, 3)]
    assert_in_step(resumed)
    for (name, weight), other in zip(resumed.model.named_parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


@pytest.mark.slow
def test_two_servers_are_in_step(server, mortal, tmp_path, sent, monkeypatch):
    """Prompts are shared out and the completions are in order; one server is restarted."""
    trainer = make_trainer(
        server.folder,
        tmp_path,
        max_steps=3,
        vllm_server_base_url=f"{server.url}, {mortal.url}",
        callbacks=[At(2, lambda: restart(mortal))],
    )
    generate, asked = VLLMClient.generate, []

    def record(self, prompts, *args, **kwargs):
        asked.append((self.base_url, len(prompts)))
        return generate(self, prompts, *args, **kwargs)

    monkeypatch.setattr(VLLMClient, "generate", record)
    trainer.train()
    assert sent == [("whole", 0)] * 2 + [("updates", 0, 1)] * 2 + [("updates", 1, 2), ("whole", 2)]
    assert sorted(asked) == sorted([(server.url, 1), (mortal.url, 1)] * 3)
    assert_in_step(trainer)

    generation = trainer.vllm_generation
    prompts = [[3 + i, 4 + i] for i in range(5)]
    generation.temperature = 0.0
    (ids, completions, logprobs, tokens) = generation.generate(prompts, None, 1)
    assert ids == prompts and len(completions) == len(logprobs) == len(tokens) == 5
    assert sorted(asked[-2:]) == sorted([(server.url, 3), (mortal.url, 2)])
    one = VLLMClient(base_url=server.url)
    for prompt, completion in zip(prompts, completions, strict=True):
        alone = generate(one, [prompt], n=1, temperature=0.0, max_tokens=generation.max_completion_length)
        assert alone["completion_ids"] == [completion]


@pytest.mark.slow
def test_an_fp32_trainer_sends_updates_to_an_fp32_server(checkpoint, tmp_path, sent):
    flags = ("--dtype", "float32")
    with running_server(checkpoint("qwen2"), tmp_path / "log", *flags) as server:
        trainer = make_trainer(server.folder, tmp_path, vllm_server_base_url=server.url, **FP32)
        trainer.train()
        assert sent == [("whole", 0), ("updates", 0, 1), ("updates", 1, 2)]
        assert_in_step(trainer)


def test_requests_to_generate_are_tried_again(train_with, monkeypatch, caplog):
    """Nothing is lost if a server does not answer for a moment: it still has its weights."""
    import requests

    generate, failures = VLLMClient.generate, iter([True, False, False, True, True, True])

    def fail_at_times(self, *args, **kwargs):
        if next(failures):
            raise requests.exceptions.ConnectionError("busy")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(VLLMClient, "generate", fail_at_times)
    trainer = train_with()
    with caplog.at_level(logging.WARNING), pytest.raises(RolloutError, match="3 times in a row"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert sum("did not generate: busy" in record.message for record in caplog.records) == 4


def test_a_server_that_refuses_to_generate(train_with):
    trainer = train_with()
    trainer.vllm_generation.vllm_client.model = "another"
    with pytest.raises(RolloutError, match="a vLLM server does not generate: .*404"):
        trainer.train()
