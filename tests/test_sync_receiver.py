"""Plan and protocol of the rollout's end, on a small model that loads as vLLM's models do. (With vLLM: tests/vllm_sync.)"""

import base64
import json

import pytest
import torch
from torch import nn

from trl_sketch.sync.checksum import checksum
from trl_sketch.sync.plan import Parameter, record_plan
from trl_sketch.sync.receiver import Receiver
from trl_sketch.sync.update import Step, UpdateMessage, WeightMessage, weight_messages
from trl_sketch.weights import SketchUpdate, quantize


RUN, OTHER = bytes(16), bytes([1] * 16)
HIDDEN = 8


class Rollout(nn.Module):
    """Fused q and k with `parts` shards of which this is `part`, a transposed weight, a bias, a padded embedding."""

    def __init__(self, parts: int = 1, part: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.parts, self.part = parts, part
        size = 6 // parts
        self.qk = nn.Parameter(torch.zeros(2 * size, HIDDEN, dtype=dtype), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(HIDDEN, 12 // parts, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(6, dtype=dtype), requires_grad=False)
        self.conv = nn.Parameter(torch.zeros(HIDDEN, 5, dtype=dtype), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(16, HIDDEN, dtype=dtype), requires_grad=False)
        self.odd = nn.Parameter(torch.zeros(4, 4, dtype=torch.float32), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            size = 6 // self.parts
            if name in ("q.weight", "k.weight"):
                row = size * ("k" in name)
                self.qk.data.narrow(0, row, size).copy_(tensor.narrow(0, size * self.part, size))
            elif name == "down.weight":
                width = 12 // self.parts
                self.down.data.copy_(tensor[:, width * self.part : width * (self.part + 1)])
            elif name == "bias":
                self.bias.data.copy_(tensor)
            elif name == "conv.weight":
                self.conv.data.copy_(tensor.t())
            elif name == "embed.weight":
                self.embed.data[: len(tensor)].copy_(tensor)
                self.embed.data[len(tensor) :].fill_(0)
            elif name == "cast":
                self.odd.data.copy_(tensor.float() * 2)
            elif name == "temporary":
                torch.zeros(4, 4).copy_(tensor)
            elif name == "replaced":
                self.odd = nn.Parameter(tensor, requires_grad=False)
            elif name == "twice":
                self.odd.data.copy_(tensor)
                self.odd.data.copy_(tensor)
            elif name == "reshaped":
                self.odd.data.copy_(tensor.view(4, 4))
            elif name == "broadcast":
                self.odd.data.copy_(tensor)
            elif name == "ignored":
                pass
            elif name == "half":
                self.odd.data[:2].copy_(tensor[:2])
            else:
                raise KeyError(name)


SHAPES = {
    "q.weight": (6, HIDDEN),
    "k.weight": (6, HIDDEN),
    "down.weight": (HIDDEN, 12),
    "bias": (6,),
    "conv.weight": (5, HIDDEN),
    "embed.weight": (11, HIDDEN),
}
SKETCHED = ["q", "k", "down"]


def make_weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def make_step(version: int, names=SKETCHED, run_seed: int = 0, **changes) -> Step:
    generator = torch.Generator().manual_seed(1000 * run_seed + version)
    updates = []
    for index, name in enumerate(names):
        d, k = changes.get("shapes", SHAPES)[f"{name}.weight"]
        q, e = quantize(0.01 * torch.randn(d, 3, generator=generator))
        keys = [torch.tensor(100 * version + index + i, dtype=torch.int32) for i in (0, 50)]
        updates.append(SketchUpdate(name, "hadamard", k, *keys, q, e))
    return Step(version - 1, version, updates)


def description(weights, run: bytes = RUN, sketched=SKETCHED) -> dict:
    parameters = [[name, list(w.shape), str(w.dtype).removeprefix("torch.")] for name, w in weights.items()]
    info = {"run_id": run.hex(), "parameters": parameters, "sketched": [f"{name}.weight" for name in sketched]}
    return json.loads(json.dumps(info))  # what HTTP makes of it


def send(receiver: Receiver, message) -> str:
    body = message if isinstance(message, bytes) else message.to_bytes()
    receiver.receive("id", base64.b64encode(body).decode())
    status = json.loads(json.dumps(receiver.status()))
    assert status["last"]["id"] == "id"
    return status["last"]["outcome"]


def updates(*versions: int, run: bytes = RUN, **changes) -> UpdateMessage:
    return UpdateMessage(run, [make_step(v, **changes) for v in versions])


def full(receiver: Receiver, weights, version: int = 0, run: bytes = RUN) -> str:
    outcomes = {send(receiver, m) for m in weight_messages(run, version, weights, chunk_bytes=200)}
    return outcomes.pop() if len(outcomes) == 1 else str(outcomes)


@pytest.fixture
def weights():
    return make_weights()


@pytest.fixture
def receiver(weights) -> Receiver:
    """Initialized and at version 0."""
    receiver = Receiver(Rollout())
    receiver.initialize(description(weights))
    assert receiver.last["outcome"] == "applied"
    assert full(receiver, weights) == "applied"
    return receiver


def applied(weights, *versions: int) -> dict[str, torch.Tensor]:
    """What the trainer has."""
    result = {name: w.clone() for name, w in weights.items()}
    for version in versions:
        for update in make_step(version).updates:
            update.apply_(result[f"{update.name}.weight"])
    return result


def assert_holds(receivers: list[Receiver], weights, run: bytes = RUN) -> None:
    for name, weight in weights.items():
        for receiver in receivers:
            boxes = receiver.senders[run].plan.boxes[name]
            assert boxes
            for box in boxes:
                assert torch.equal(box.target.view(torch.int16), box.of(weight).view(torch.int16)), name


def snapshot(receiver: Receiver) -> list[torch.Tensor]:
    return [p.clone() for p in receiver.model.parameters()]


def unchanged(receiver: Receiver, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, receiver.model.parameters(), strict=True))


# ---------------------------------------------------------- the plan


def test_places_are_found_and_nothing_is_written():
    model = Rollout()
    plan = record_plan(model, [Parameter(n, s, torch.bfloat16) for n, s in SHAPES.items()])
    assert not plan.refused and all(not p.any() for p in model.parameters())
    found = {name: [(b.start, b.shape) for b in boxes] for name, boxes in plan.boxes.items()}
    assert found == {name: [((0,) * len(shape), shape)] for name, shape in SHAPES.items()}
    assert plan.boxes["k.weight"][0].target.data_ptr() == model.qk[6:].data_ptr()
    assert plan.boxes["conv.weight"][0].target.stride() == (1, 5)


def test_places_in_shards():
    for part in range(2):
        plan = record_plan(Rollout(2, part), [Parameter(n, s, torch.bfloat16) for n, s in SHAPES.items()])
        found = {name: [(b.start, b.shape) for b in boxes] for name, boxes in plan.boxes.items()}
        assert found["q.weight"] == found["k.weight"] == [((3 * part, 0), (3, HIDDEN))]
        assert found["down.weight"] == [((0, 6 * part), (HIDDEN, 6))]


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("cast", (4, 4), "computes something"),
        ("temporary", (4, 4), "temporary tensor"),
        ("twice", (4, 4), "twice"),
        ("reshaped", (2, 8), "reshapes"),
        ("broadcast", (4,), "broadcasts"),
        ("missing", (4, 4), "does not take it: KeyError"),
    ],
)
def test_what_is_not_a_plain_copy_is_refused(name, shape, reason):
    model = Rollout()
    plan = record_plan(model, [Parameter(name, shape, torch.bfloat16)])
    assert reason in plan.refused[name] and plan.boxes[name] == []
    assert not model.odd.is_meta and not model.odd.any()


@pytest.mark.parametrize("name", ["ignored", "half", "replaced"])
def test_what_the_loader_leaves_out_is_refused(name):
    receiver = Receiver(Rollout())
    receiver.initialize(description({name: torch.zeros(4, 4)}, sketched=[]))
    assert "leaves out" in receiver.status()["senders"][RUN.hex()]["refused"][name]
    assert not receiver.model.odd.is_meta


def test_layers_that_keep_something_computed_are_refused():
    model = Rollout()
    model.attention = type("MLAAttention", (nn.Module,), {})()
    assert "multi-head latent" in record_plan(model, [Parameter("bias", (6,), torch.bfloat16)]).refused["bias"]
    model = Rollout()
    model.layer = nn.Module()
    model.layer.cpu_linear = lambda x, w, b: x
    assert "packed copies" in record_plan(model, [Parameter("bias", (6,), torch.bfloat16)]).refused["bias"]
    model.layer.cpu_linear = nn.functional.linear
    assert not record_plan(model, [Parameter("bias", (6,), torch.bfloat16)]).refused
    model.quant_method = type("Fp8LinearMethod", (), {})()
    assert "Fp8LinearMethod" in record_plan(model, [Parameter("bias", (6,), torch.bfloat16)]).refused["bias"]


# ---------------------------------------------------------- the protocol


def test_a_full_sync_and_updates_give_the_trainers_bits(receiver, weights):
    assert_holds([receiver], weights)
    assert send(receiver, updates(1)) == "applied"
    assert send(receiver, updates(2, 3, 4)) == "applied"
    assert receiver.status()["version"] == 4
    assert_holds([receiver], applied(weights, 1, 2, 3, 4))
    assert not receiver.model.embed[11:].any()


def test_shards_give_the_trainers_bits(weights):
    receivers = [Receiver(Rollout(2, part), whole=False) for part in range(2)]
    for receiver in receivers:
        receiver.initialize(description(weights))
        assert full(receiver, weights) == send(receiver, updates(1, 2)) == "applied"
    assert_holds(receivers, applied(weights, 1, 2))


def test_a_replay_is_ignored(receiver, weights):
    assert send(receiver, updates(1, 2)) == "applied"
    assert send(receiver, updates(1, 2)) == send(receiver, updates(1)) == "replayed"
    assert send(receiver, updates(1, 2, 3)) == "applied"  # only its last step is new
    assert_holds([receiver], applied(weights, 1, 2, 3))


def test_a_gap_is_refused(receiver, weights):
    assert send(receiver, updates(1)) == "applied"
    assert send(receiver, updates(3)) == "gap"
    assert "from version 2 cannot follow version 1" in receiver.last["error"]
    assert receiver.version == 1
    assert_holds([receiver], applied(weights, 1))


def test_damaged_bytes_are_refused(receiver, weights):
    before = snapshot(receiver)
    body = updates(1).to_bytes()
    assert send(receiver, body[:-1]) == "damaged"
    for position in range(0, len(body), 7):
        assert send(receiver, body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :]) == "damaged"
    receiver.receive("id", "not base64!")
    assert receiver.last["outcome"] == "damaged"
    assert unchanged(receiver, before)
    assert send(receiver, updates(1)) == "applied"


def test_what_does_not_fit_is_refused_before_the_first_write(receiver, weights):
    before = snapshot(receiver)
    wrong_shape = SHAPES | {"down.weight": (HIDDEN, 10)}
    for message, text in [
        (updates(1, names=["q", "k"]), "no update of down.weight"),
        (updates(1, names=["q", "k", "down", "conv"]), "conv.weight is not among"),
        (updates(1, shapes=wrong_shape), "has shape (8, 12), its update (8, 10)"),
        (UpdateMessage(RUN, [make_step(1), make_step(2, shapes=wrong_shape)]), "its update (8, 10)"),
    ]:
        assert send(receiver, message) == "invalid"
        assert text in receiver.last["error"]
    assert unchanged(receiver, before) and receiver.version == 0
    for tensors, text in [
        ({"other": torch.zeros(2)}, "other is not among"),
        (weights | {"bias": torch.zeros(7, dtype=torch.bfloat16)}, "said to be"),
        (weights | {"bias": torch.zeros(6)}, "said to be"),
    ]:
        assert send(receiver, WeightMessage(RUN, 5, 0, 1, tensors)) == "invalid"
        assert text in receiver.last["error"]
    partial = {name: w for name, w in weights.items() if name != "bias"}
    assert send(receiver, WeightMessage(RUN, 5, 0, 1, partial)) == "invalid"
    assert "leave out bias" in receiver.last["error"]
    assert unchanged(receiver, before) and receiver.version == 0 and receiver.broken is None


def test_another_run_has_to_send_everything_first(receiver, weights):
    assert send(receiver, updates(1, run=OTHER)) == "unknown"
    receiver.initialize(description(weights, OTHER))
    assert send(receiver, updates(1, run=OTHER)) == "foreign"
    assert send(receiver, updates(1)) == "applied"  # the first run goes on as long as the other sends nothing whole
    other = make_weights(seed=1)
    assert full(receiver, other, version=7, run=OTHER) == "applied"
    assert_holds([receiver], other, OTHER)
    assert (receiver.run_id, receiver.version) == (OTHER, 7)
    assert send(receiver, updates(2)) == "unknown"


def test_before_the_first_full_sync_updates_are_refused(weights):
    receiver = Receiver(Rollout())
    assert send(receiver, updates(1)) == "unknown"
    receiver.initialize(description(weights))
    assert send(receiver, updates(1)) == "foreign"


def test_a_full_sync_that_ends_early_leaves_no_version(receiver, weights):
    assert send(receiver, updates(1)) == "applied"
    chunks = list(weight_messages(RUN, 9, weights, chunk_bytes=200))
    assert len(chunks) >= 3
    assert send(receiver, chunks[1]) == "gap"  # not begun
    assert send(receiver, chunks[0]) == "applied"
    assert receiver.version is None and "not been finished" in receiver.broken
    assert send(receiver, chunks[2]) == "gap"
    assert send(receiver, updates(2)) == "broken"
    assert send(receiver, chunks[1]) == "applied"
    assert send(receiver, chunks[0]) == "applied"  # begun anew
    assert full(receiver, weights, version=9) == "applied"
    assert receiver.version == 9 and receiver.broken is None
    assert_holds([receiver], weights)


def test_single_tensors_may_be_sent_again_at_the_same_version(receiver, weights):
    receiver.model.bias.add_(1)
    assert full(receiver, {"bias": weights["bias"]}) == "applied"
    assert receiver.version == 0 and receiver.broken is None
    assert_holds([receiver], weights)


@pytest.mark.parametrize("whole", [False, True])
def test_after_a_failed_write_everything_has_to_be_sent(receiver, weights, monkeypatch, whole):
    calls = []

    def fail_at_the_third(self, *args, **kwargs):
        calls.append(self.name)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return apply_(self, *args, **kwargs)

    apply_ = SketchUpdate.apply_
    with monkeypatch.context() as patch:
        patch.setattr(SketchUpdate, "apply_", fail_at_the_third)
        assert send(receiver, updates(1, 2)) == "failed"
    assert "device lost" in receiver.status()["broken"] and receiver.version is None
    assert send(receiver, updates(1)) == send(receiver, updates(2)) == "broken"
    if not whole:
        assert full(receiver, {"bias": weights["bias"]}) == "invalid"
        return
    assert full(receiver, weights) == send(receiver, updates(1)) == "applied"
    assert_holds([receiver], applied(weights, 1))


def test_checksums_name_the_tensor_that_differs(receiver, weights):
    def wrong() -> list[str]:
        replies = receiver.checksums(RUN.hex())
        return [n for n, boxes in replies.items() if sum(b[2] for b in boxes) != checksum(weights[n])]

    assert wrong() == []
    receiver.model.qk[8, 3] += 1
    assert wrong() == ["k.weight"]
    assert set(receiver.checksums(RUN.hex(), ["bias"])) == {"bias"}
    assert receiver.checksums(OTHER.hex()) == {}


def test_a_rollout_of_another_type_takes_whole_weights_only(weights):
    receiver = Receiver(Rollout())
    fp32 = make_weights(torch.float32)
    receiver.initialize(description(fp32))
    reasons = receiver.status()["senders"][RUN.hex()]["unsketchable"]
    assert set(reasons) == {f"{name}.weight" for name in SKETCHED}
    assert "torch.float32 in the trainer and torch.bfloat16 here" in reasons["q.weight"]
    assert full(receiver, fp32) == "applied"
    assert_holds([receiver], {name: w.bfloat16() for name, w in fp32.items()})
    assert send(receiver, updates(1)) == "invalid"
    both = Receiver(Rollout(dtype=torch.float32))
    both.initialize(description(fp32))
    assert full(both, fp32) == send(both, updates(1)) == "applied"
    expected = applied(fp32, 1)
    assert torch.equal(both.model.qk, torch.cat([expected["q.weight"], expected["k.weight"]]))


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"run_id": "zz", "parameters": [], "sketched": []},
        {"run_id": RUN.hex(), "parameters": [["a", [2], "int8"]], "sketched": []},
        {"run_id": RUN.hex(), "parameters": [], "sketched": ["a.weight"]},
    ],
)
def test_a_description_that_cannot_be_read_is_refused(info):
    receiver = Receiver(Rollout())
    receiver.initialize(info)
    assert receiver.last["outcome"] == "invalid" and receiver.senders == {}
