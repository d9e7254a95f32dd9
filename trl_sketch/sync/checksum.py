"""A checksum of a tensor that is the sum of the checksums of its parts, so that shards can be compared with the whole."""

import math

import torch

from ..projection import counter_hash, hash_


_BLOCK_ELEMENTS = 2**20
_BITS = {2: torch.int16, 4: torch.int32}
# Part of a checksum's definition: both sides must use the same.
_KEY = 0x5EED


@torch.no_grad()
def checksum(tensor: torch.Tensor, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> int:
    """Sum over all elements of a 32-bit hash of (position, bits); exact, and the same on every device.

    Args:
        tensor: bf16, fp16 or fp32 of any shape: a whole tensor, or the box of one that begins at `start`.
        start: Index in the whole tensor of the box's first element, default zeros.
        shape: Of the whole tensor, default the box's.

    Returns:
        An integer; those of disjoint boxes that make up a tensor add up to the tensor's.

    Raises:
        ValueError: The elements have another type.
    """
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"a checksum is of bfloat16, float16 or float32, got {tensor.dtype}")
    start = (0,) * tensor.ndim if start is None else start
    if tensor.ndim > 2:  # as if its parts lay one below the other
        shape = tuple(tensor.shape) if shape is None else shape
        offsets = [(start[0] + index) * shape[1] + start[1] for index in range(len(tensor))]
        return sum(
            checksum(part, (offset, *start[2:]), shape[1:]) for part, offset in zip(tensor, offsets, strict=True)
        )
    if tensor.ndim < 2:
        tensor, start = tensor.reshape(-1, 1), (*start, 0, 0)[:2]
    rows, cols = tensor.shape
    key = torch.tensor(_KEY, dtype=torch.int32, device=tensor.device)
    step = max(1, _BLOCK_ELEMENTS // max(1, cols))
    total = 0
    for first in range(0, rows, step):
        block = tensor[first : first + step].contiguous()
        words = counter_hash(key, (start[0] + first, start[0] + first + len(block)), (start[1], start[1] + cols))
        words += block.view(_BITS[block.element_size()]).to(torch.int32)
        total += int(hash_(words).sum(dtype=torch.int64))
    return total


def combine(boxes: list[tuple[tuple[int, ...], tuple[int, ...], int]], shape: tuple[int, ...]) -> int | None:
    """The checksum of a whole tensor of `shape` from `(start, shape, checksum)` of its boxes on all workers.

    A box that several workers hold counts once. `None` if they hold different elements in it, or do not cover the tensor.
    """
    values: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for start, size, value in boxes:
        if values.setdefault((tuple(start), tuple(size)), value) != value:
            return None
    if sum(math.prod(size) for _, size in values) != math.prod(shape):
        return None
    return sum(values.values())
