"""Where the update of a weight runs as a Triton kernel, and the check that it makes the bits of `weights.py` there.

torch's CUDA builds bring Triton along. It is imported at the first weight on a CUDA device, and nowhere else.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .projection import SIGN_PROJECTIONS, Range


if TYPE_CHECKING:
    from .weights import SketchUpdate

logger = logging.getLogger(__name__)

_enabled = True


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """While it lasts updates run as torch operations on every device, to compare with."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def usable(update: "SketchUpdate", weight: torch.Tensor) -> bool:
    """Whether `update` can go to `weight` by [`apply_`]; what cannot runs as torch operations, with the same result."""
    return (
        weight.is_cuda
        and _enabled
        and not torch.compiler.is_compiling()
        and weight.dtype in (torch.bfloat16, torch.float32)
        and update.projection in SIGN_PROJECTIONS
        and weight.numel() > 0
        and {t.device for t in (update.q, update.exponent, update.projection_key, update.rounding_key)}
        == {weight.device}
        and _works(weight.device, weight.dtype, update.projection)
    )


def apply_(update: "SketchUpdate", weight: torch.Tensor, rows: Range, cols: Range) -> None:
    """[`SketchUpdate.apply_`] by the kernels of `triton_kernels.py`."""
    from . import triton_kernels

    triton_kernels.apply_(update, weight, rows, cols)


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, projection: str) -> bool:
    """Whether the kernels run on `device` and make the bits that torch makes, tried once on a small matrix."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):  # as Triton itself
        return False
    try:
        problem = None if _same_bits(device, dtype, projection) else "its result differs from torch's"
    except Exception as error:  # no Triton, no C compiler for its launcher, a device that it does not know, ...
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        logger.warning("Weights on %s are updated by torch operations, not by the Triton kernel: %s", device, problem)
    return problem is None


@torch.no_grad()
def _same_bits(device: torch.device, dtype: torch.dtype, projection: str) -> bool:
    from .weights import SketchUpdate

    d, k, rank = 144, 208, 80  # multiples of 16, as real matrices, but not of a tile
    key = torch.tensor([123456789, -987654321], dtype=torch.int32, device=device)
    q = (torch.arange(d * rank, device=device) * 37 % 255 - 127).to(torch.int8).view(d, rank)
    exponent = (torch.arange(d, device=device) % 5 - 16).to(torch.int8)
    update = SketchUpdate("", projection, k, key[0], key[1], q, exponent)
    expected = torch.arange(d * k, device=device).sin().to(dtype).view(d, k)
    weight = expected.clone()
    with disabled():
        update.apply_(expected)
    apply_(update, weight, (0, d), (0, k))
    return torch.equal(weight, expected)
