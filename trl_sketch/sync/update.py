"""What is sent: messages of updates (a few steps of training) and of whole weights (a full sync, in chunks).

All integers are little-endian. A message is a header, records, and the CRC-32 of everything before it:

| offset | type   | header                                                           |
|--------|--------|------------------------------------------------------------------|
| 0      | 8 × u8 | magic, `TRLSKTCH`                                                |
| 8      | u16    | format version, 2                                                |
| 10     | u16    | kind: 1 updates, 2 weights                                       |
| 12     | u32    | number of steps (updates) or tensors (weights)                   |
| 16     | 16 × u8 | identity of the run that sends                                  |
| 32     | u64    | length of the whole message in bytes                             |
| 40     | i64    | version that is reached when the message has been applied        |
| 48     | u32    | index of the chunk (weights; 0 for updates)                      |
| 52     | u32    | number of chunks (weights; 1 for updates)                        |

A step is `i64 base version, i64 version, u32 number of records, u32 0`, then for each record `u32 length` and the bytes of
[`SketchUpdate.to_bytes`]: `u16 projection (0 hadamard, 1 rademacher, 2 gaussian, 3 orthonormal), u16 length of the name, u32
d, u32 k, u32 r, i32 key of the projection, i32 key of the rounding`, the name in UTF-8, `d` exponents (i8) and `d × r`
integers (i8, row by row).

A tensor is `u8 type (0 bf16, 1 fp32, 2 fp16), u8 dimensions, u16 length of the name, u32 × dimensions`, the name in UTF-8, and
its elements row by row.

Nothing is unpickled. Everything is checked before a message is returned: a ValueError says what is wrong.
"""

import math
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..weights import SketchUpdate


FORMAT_VERSION = 2  # of the bytes, and of what they stand for: raised when an update would give other weights
RUN_ID_BYTES = 16
CHUNK_BYTES = 64 * 2**20

_MAGIC = b"TRLSKTCH"
_UPDATES, _WEIGHTS = 1, 2
_HEADER = struct.Struct("<8sHHI16sQqII")
_STEP = struct.Struct("<qqII")
_LENGTH = struct.Struct("<I")
_TENSOR = struct.Struct("<BBH")
_CHECKSUM = struct.Struct("<I")
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def new_run_id() -> bytes:
    """A random identity for one run of one trainer. A resumed run is another run: its versions may go back."""
    return secrets.token_bytes(RUN_ID_BYTES)


@dataclass
class Step:
    """All updates of one optimizer step, from `base_version` to `version`."""

    base_version: int
    version: int
    updates: list[SketchUpdate]


@dataclass
class UpdateMessage:
    """Consecutive optimizer steps of the run `run_id`."""

    run_id: bytes
    steps: list[Step]

    @property
    def version(self) -> int:
        """The version after the last step."""
        return self.steps[-1].version

    def to_bytes(self) -> bytes:
        """The message in the layout of this module."""
        parts = []
        for step in self.steps:
            parts.append(_STEP.pack(step.base_version, step.version, len(step.updates), 0))
            for update in step.updates:
                record = update.to_bytes()
                parts += (_LENGTH.pack(len(record)), record)
        return _seal(_UPDATES, len(self.steps), self.run_id, self.version, 0, 1, parts)


@dataclass
class WeightMessage:
    """Chunk `index` of `count` of a full sync: after the last one the weights are those of `version`."""

    run_id: bytes
    version: int
    index: int
    count: int
    tensors: dict[str, torch.Tensor]

    def to_bytes(self) -> bytes:
        """The message in the layout of this module.

        Raises:
            ValueError: A tensor has a type that is not sent.
        """
        parts: list[bytes] = []
        for name, tensor in self.tensors.items():
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"{name}: weights are sent as bfloat16, float32 or float16, got {tensor.dtype}")
            encoded = name.encode()
            parts.append(_TENSOR.pack(_DTYPES.index(tensor.dtype), tensor.ndim, len(encoded)))
            parts.append(struct.pack(f"<{tensor.ndim}I", *tensor.shape))
            parts += (encoded, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return _seal(_WEIGHTS, len(self.tensors), self.run_id, self.version, self.index, self.count, parts)


def weight_messages(
    run_id: bytes, version: int, tensors: Mapping[str, torch.Tensor], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[WeightMessage]:
    """A full sync of `tensors` (checkpoint name to any shape) in messages of about `chunk_bytes` each.

    A tensor is not split, so that one message holds at least one.
    """
    chunks: list[dict[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not chunks or size + tensor.nbytes > chunk_bytes:
            chunks.append({})
            size = 0
        chunks[-1][name] = tensor
        size += tensor.nbytes
    for index, chunk in enumerate(chunks):
        yield WeightMessage(run_id, version, index, len(chunks), chunk)


def decode(data: bytes | memoryview) -> UpdateMessage | WeightMessage:
    """The message that these bytes are, its tensors on the CPU.

    Raises:
        ValueError: The bytes are not a whole, sound message of this format version; the text says what is wrong.
    """
    data = memoryview(data)
    if len(data) < _HEADER.size + _CHECKSUM.size:
        raise ValueError(f"the message is too short to be one: {len(data)} bytes")
    magic, version, kind, items, run_id, length, reached, index, count = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("the message does not begin with trl_sketch's magic bytes")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the message has format version {version}, this trl_sketch reads {FORMAT_VERSION}: install the same version of "
            "trl_sketch in the trainer's and the server's environment"
        )
    if length != len(data):
        raise ValueError(f"the message says that it has {length} bytes, but has {len(data)}")
    body, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    if zlib.crc32(body) != checksum:
        raise ValueError("the message's checksum does not match its bytes: it was damaged on its way")
    if items == 0:
        raise ValueError("the message is empty")
    reader = _Reader(body[_HEADER.size :])
    if kind == _UPDATES:
        steps = [_read_step(reader) for _ in range(items)]
        _check_steps(steps, reached)
        message: UpdateMessage | WeightMessage = UpdateMessage(run_id, steps)
    elif kind == _WEIGHTS:
        if not index < count:
            raise ValueError(f"chunk {index} of {count} does not exist")
        tensors = dict(_read_tensor(reader) for _ in range(items))
        if len(tensors) != items:
            raise ValueError("a tensor is in the message twice")
        message = WeightMessage(run_id, reached, index, count, tensors)
    else:
        raise ValueError(f"the message's kind must be {_UPDATES} or {_WEIGHTS}, got {kind}")
    if reader.left:
        raise ValueError(f"{reader.left} bytes follow the last record")
    return message


class _Reader:
    """A cursor over bytes that are not to be trusted."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise ValueError(f"a record needs {count} bytes, but {self.left} are left")
        self.position += count
        return self.data[self.position - count : self.position]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))


def _read_step(reader: _Reader) -> Step:
    base, version, records, _ = reader.unpack(_STEP)
    updates = [SketchUpdate.from_bytes(reader.take(*reader.unpack(_LENGTH))) for _ in range(records)]
    names = [update.name for update in updates]
    if len(set(names)) != len(names):
        raise ValueError(f"the step to version {version} has two updates of one matrix")
    return Step(base, version, updates)


def _check_steps(steps: Sequence[Step], reached: int) -> None:
    for step in steps:
        if not 0 <= step.base_version < step.version:
            raise ValueError(f"a step cannot go from version {step.base_version} to {step.version}")
    for step, following in zip(steps, steps[1:], strict=False):
        if step.version != following.base_version:
            raise ValueError(f"a step to version {step.version} is followed by one from {following.base_version}")
    if steps[-1].version != reached:
        raise ValueError(f"the last step goes to version {steps[-1].version}, but the header says {reached}")


def _read_tensor(reader: _Reader) -> tuple[str, torch.Tensor]:
    dtype, ndim, name_length = reader.unpack(_TENSOR)
    shape = reader.unpack(struct.Struct(f"<{ndim}I"))
    try:
        name = str(reader.take(name_length), "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the name of a tensor is not UTF-8: {error}") from None
    if dtype >= len(_DTYPES):
        raise ValueError(f"{name}: the type must be one of 0 to {len(_DTYPES) - 1}, got {dtype}")
    data = bytearray(reader.take(_DTYPES[dtype].itemsize * math.prod(shape)))
    tensor = (
        torch.frombuffer(data, dtype=_DTYPES[dtype]) if data else torch.empty(0, dtype=_DTYPES[dtype], device="cpu")
    )
    return name, tensor.view(shape)


def _seal(kind: int, items: int, run_id: bytes, version: int, index: int, count: int, parts: Iterable[bytes]) -> bytes:
    if len(run_id) != RUN_ID_BYTES:
        raise ValueError(f"a run's identity has {RUN_ID_BYTES} bytes, got {len(run_id)}")
    records = b"".join(parts)
    length = _HEADER.size + len(records) + _CHECKSUM.size
    body = _HEADER.pack(_MAGIC, FORMAT_VERSION, kind, items, run_id, length, version, index, count) + records
    return body + _CHECKSUM.pack(zlib.crc32(body))
