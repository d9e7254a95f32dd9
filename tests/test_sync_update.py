"""Messages between trainer and rollout: the bytes, and that nothing unsound is taken for a message."""

import struct
import zlib

import pytest
import torch

from trl_sketch import SketchUpdate
from trl_sketch.projection import PROJECTIONS
from trl_sketch.sync.checksum import checksum, combine
from trl_sketch.sync.update import (
    Step,
    UpdateMessage,
    WeightMessage,
    decode,
    new_run_id,
    weight_messages,
)


RUN = bytes(range(16))
HEADER, STEP = 56, 24


def make_update(
    name: str = "layers.0.q_proj", kind: str = "hadamard", d: int = 5, k: int = 12, r: int = 3, seed: int = 0
):
    generator = torch.Generator().manual_seed(seed)
    return SketchUpdate(
        name,
        kind,
        k,
        projection_key=torch.tensor(-7 - seed, dtype=torch.int32),
        rounding_key=torch.tensor(2**31 - 1, dtype=torch.int32),
        q=torch.randint(-127, 128, (d, r), generator=generator, dtype=torch.int8),
        exponent=torch.randint(-126, 104, (d,), generator=generator, dtype=torch.int8),
    )


def make_message(steps: int = 2) -> UpdateMessage:
    return UpdateMessage(
        RUN, [Step(i, i + 1, [make_update(), make_update("layers.0.k_proj", d=2)]) for i in range(steps)]
    )


def resealed(data: bytes, position: int, new: bytes) -> bytes:
    """The message with other bytes at `position`, and a checksum that fits them."""
    body = (data[:position] + new + data[position + len(new) :])[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def assert_same(a: SketchUpdate, b: SketchUpdate) -> None:
    assert (a.name, a.projection, a.in_features) == (b.name, b.projection, b.in_features)
    for field in ("projection_key", "rounding_key", "q", "exponent"):
        assert torch.equal(getattr(a, field), getattr(b, field)) and getattr(a, field).dtype == getattr(b, field).dtype


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_an_update_survives_its_record(kind):
    update = make_update("modèle.q", kind)
    assert_same(SketchUpdate.from_bytes(update.to_bytes()), update)


def test_the_layout_is_the_documented_one():
    update = make_update()
    record = update.to_bytes()
    name = b"layers.0.q_proj"
    assert record[:24] == struct.pack("<HHIIIii", 0, len(name), 5, 12, 3, -7, 2**31 - 1)
    assert record[24:] == name + update.exponent.numpy().tobytes() + update.q.numpy().tobytes()
    data = UpdateMessage(RUN, [Step(4, 5, [update])]).to_bytes()
    head = b"TRLSKTCH" + struct.pack("<HHI", 2, 1, 1) + RUN + struct.pack("<QqII", len(data), 5, 0, 1)
    assert data[:HEADER] == head
    assert data[HEADER : HEADER + STEP + 4] == struct.pack("<qqIII", 4, 5, 1, 0, len(record))
    assert data[HEADER + STEP + 4 : -4] == record
    assert data[-4:] == struct.pack("<I", zlib.crc32(data[:-4]))


def test_a_message_survives():
    message = make_message()
    read = decode(message.to_bytes())
    assert isinstance(read, UpdateMessage) and read.run_id == RUN and read.version == 2
    assert [(s.base_version, s.version) for s in read.steps] == [(0, 1), (1, 2)]
    for a, b in zip(message.steps, read.steps, strict=True):
        for x, y in zip(a.updates, b.updates, strict=True):
            assert_same(x, y)


def test_the_overhead_is_below_one_percent():
    """A model of 100 million weights, SmolLM-like: hidden 768, 12 layers, rank 16."""
    shapes = {"q": (768, 768), "k": (768, 768), "v": (768, 768), "o": (768, 768)}
    shapes |= {"gate": (2048, 768), "up": (2048, 768), "down": (768, 2048)}
    updates = [
        make_update(f"model.layers.{i}.self_attn.{name}_proj", d=d, k=k, r=16)
        for i in range(12)
        for name, (d, k) in shapes.items()
    ]
    data = UpdateMessage(RUN, [Step(0, 1, updates)]).to_bytes()
    payload = sum(update.nbytes for update in updates)
    assert payload == sum(17 * d for d, _ in shapes.values()) * 12
    assert payload < len(data) < 1.01 * payload
    assert 100 * len(data) < 2 * 12 * sum(d * k for d, k in shapes.values())


def test_every_truncation_and_every_flipped_byte_is_noticed():
    data = make_message(1).to_bytes()
    for length in range(len(data)):
        with pytest.raises(ValueError):
            decode(data[:length])
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(ValueError):
            decode(bytes(damaged))
    with pytest.raises(ValueError, match="says that it has"):
        decode(data + b"\0")


def test_sound_bytes_with_unsound_values_are_refused():
    data = UpdateMessage(RUN, [Step(0, 1, [make_update()])]).to_bytes()
    record = HEADER + STEP + 4
    exponents = record + 24 + len("layers.0.q_proj")
    for position, new, text in [
        (0, b"X", "magic"),
        (8, b"\3", "format version 3"),
        (10, b"\7", "kind"),
        (12, struct.pack("<I", 0), "empty"),
        (12, struct.pack("<I", 2), "are left"),
        (32, struct.pack("<Q", len(data) + 1), "says that it has"),
        (40, struct.pack("<q", 9), "header says 9"),
        (HEADER, struct.pack("<q", 1), "cannot go from version 1 to 1"),
        (HEADER, struct.pack("<q", -1), "cannot go from version -1"),
        (HEADER + 16, struct.pack("<I", 0), "follow the last record"),
        (HEADER + STEP, struct.pack("<I", 2**31), "are left"),
        (HEADER + STEP, struct.pack("<I", 10), "at least"),
        (record, struct.pack("<H", 4), "projection"),
        (record + 2, struct.pack("<H", 14), "has 58 bytes"),
        (record + 4, struct.pack("<I", 6), "bytes"),
        (record + 8, struct.pack("<I", 2), "1 <= rank <= in_features"),
        (record + 12, struct.pack("<I", 4), "bytes"),
        (record + 24, b"\xff", "UTF-8"),
        (exponents, b"\x7f", "exponents"),  # 127: the scale would be infinite
        (exponents, b"\x80", "exponents"),
        (exponents + 5, b"\x80", "integers"),
    ]:
        with pytest.raises(ValueError, match=text):
            decode(resealed(data, position, new))


def test_rank_zero_and_no_rows_are_refused():
    head = struct.pack("<HHIIIii", 0, 1, 4, 8, 0, 1, 1) + b"a"
    with pytest.raises(ValueError, match="rank 0"):
        SketchUpdate.from_bytes(head + bytes(4))
    with pytest.raises(ValueError, match="0 rows"):
        SketchUpdate.from_bytes(struct.pack("<HHIIIii", 0, 1, 0, 8, 2, 1, 1) + b"a")


def test_steps_must_follow_one_another():
    gap = UpdateMessage(RUN, [Step(0, 1, [make_update()]), Step(2, 3, [make_update()])])
    with pytest.raises(ValueError, match="followed by one from 2"):
        decode(gap.to_bytes())
    twice = UpdateMessage(RUN, [Step(0, 1, [make_update(), make_update()])])
    with pytest.raises(ValueError, match="two updates of one matrix"):
        decode(twice.to_bytes())


def test_weights_survive_in_chunks():
    tensors = {
        "a": torch.randn(7, 5).bfloat16(),
        "b": torch.randn(3),
        "c": torch.randn(2, 3, 4).half(),
        "d": torch.tensor(2.0),
    }
    messages = [decode(m.to_bytes()) for m in weight_messages(RUN, 12, tensors, chunk_bytes=60)]
    assert [(m.index, m.count, m.version) for m in messages] == [(0, 3, 12), (1, 3, 12), (2, 3, 12)]
    read = {name: tensor for m in messages for name, tensor in m.tensors.items()}
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_weights_are_checked():
    with pytest.raises(ValueError, match="sent as bfloat16"):
        WeightMessage(RUN, 0, 0, 1, {"a": torch.zeros(2, dtype=torch.float64)}).to_bytes()
    data = WeightMessage(RUN, 0, 0, 1, {"a": torch.zeros(2)}).to_bytes()
    for position, new, text in [(48, b"\1", "chunk 1 of 1"), (HEADER, b"\3", "type"), (HEADER + 4, b"\3", "are left")]:
        with pytest.raises(ValueError, match=text):
            decode(resealed(data, position, new))
    with pytest.raises(ValueError, match="16 bytes"):
        WeightMessage(b"short", 0, 0, 1, {"a": torch.zeros(2)}).to_bytes()


def test_run_ids_differ():
    assert len({new_run_id() for _ in range(100)}) == 100


# ---------------------------------------------------------- checksums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_checksums_of_parts_add_up(dtype):
    whole = torch.randn(37, 20).to(dtype)
    parts = [(0, 0, 12, 20), (12, 0, 25, 7), (12, 7, 25, 13)]
    boxes = [((r, c), (h, w), checksum(whole[r : r + h, c : c + w], (r, c), (37, 20))) for r, c, h, w in parts]
    assert sum(value for _, _, value in boxes) == checksum(whole) == combine(boxes, (37, 20))
    assert combine(boxes + boxes[:1], (37, 20)) == checksum(whole)  # a box on two workers
    assert combine(boxes[:2], (37, 20)) is None  # a part that no worker has
    assert combine([*boxes, (*boxes[0][:2], 1)], (37, 20)) is None  # workers that disagree
    experts = torch.randn(3, 8, 6).to(dtype)
    halves = [((0, r, 0), (3, 4, 6), checksum(experts[:, r : r + 4], (0, r, 0), (3, 8, 6))) for r in (0, 4)]
    assert combine(halves, (3, 8, 6)) == checksum(experts)
    assert checksum(experts) == checksum(experts.view(24, 6)) == checksum(experts.view(3, 2, 4, 6))


def test_a_checksum_sees_one_bit_and_the_order():
    weight = torch.randn(300, 40).bfloat16()
    changed = weight.clone()
    changed.view(torch.int16)[123, 7] ^= 1
    swapped = weight.flip(0)
    assert len({checksum(weight), checksum(changed), checksum(swapped), checksum(weight.t().contiguous())}) == 4
    assert checksum(weight.t().contiguous().t()) == checksum(weight)
    assert checksum(torch.zeros(4)) != checksum(-torch.zeros(4))
    assert isinstance(checksum(torch.tensor(1.0)), int)
    with pytest.raises(ValueError, match="int64"):
        checksum(torch.zeros(2, dtype=torch.int64))
