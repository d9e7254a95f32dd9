"""Quantize a factor and add `U A` to a weight: exactly, and in two bytes a weight.

The factor is kept as int8 integers with a power-of-two scale per row, and a sign projection as ±1. Then `Σ_j q_ij·a_jk`
is an exact integer in every order of summation (at most 127·r, below 2²⁴ in fp32), the scaling is exact, and the new
weight is one fp32 subtraction and one rounding, whose random bits are a hash of (key, i, j). The result has the same bits
for any shard, any block size, any number of threads and any device. (`gaussian` and `orthonormal` projections have no
exact sums: their result may differ in the last bit between devices and block sizes.)
"""

import dataclasses
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import kernels
from .projection import PROJECTIONS, SIGN_PROJECTIONS, Range, counter_hash, projection_basis


# Elements of a temporary: small enough to stay in a CPU's cache, 8 MiB on an accelerator. With what is computed on the way
# an update takes four to six times as much, whatever the matrix and the rank.
_BLOCK_ELEMENTS = {"cpu": 2**17}
_BLOCK_ELEMENTS_DEFAULT = 2**21
BASIS_ELEMENTS = 2**20  # of the columns of A that are drawn together
_MAX_EXPONENT = 126

# A record of one update: kind of A, length of the name, d, k, r, key of A, key of the rounding; little-endian, 24 bytes.
_RECORD = struct.Struct("<HHIIIii")


def row_blocks(rows: Range, width: int, elements: int = _BLOCK_ELEMENTS_DEFAULT) -> Iterator[Range]:
    """`rows` in parts of at most `elements` entries, for a matrix of `width` columns; at least a row each."""
    step = max(1, elements // max(1, width))
    for start in range(rows[0], rows[1], step):
        yield start, min(start + step, rows[1])


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32 for integers in [-126, 127], from the bits: exact on every device."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def quantize(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`factor ≈ q · 2^e`, with one exponent per row.

    Args:
        factor: `(d, r)`, finite.

    Returns:
        q: int8 `(d, r)` in [-127, 127].
        e: int8 `(d,)` in [-126, 126], the smallest for which the row fits.
    """
    factor = factor.float()
    mantissa, exponent = torch.frexp(factor.abs().amax(dim=1) / 127)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_(-_MAX_EXPONENT, _MAX_EXPONENT)
    q = (factor * _power_of_two(-exponent)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return q, exponent.to(torch.int8)


def dequantize(q: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """`q · 2^e` in fp32, `(d, r)`; exact."""
    return q.float() * _power_of_two(exponent)[:, None]


def _random_offsets(key: torch.Tensor, rows: Range, cols: Range) -> torch.Tensor:
    """int16 `(rows, cols)`, uniform over all 2¹⁶ values: the two halves of one hash word serve two columns."""
    first, last = cols[0] // 2, -(-cols[1] // 2)
    halves = counter_hash(key, rows, (first, last)).view(torch.int16)
    return halves[:, cols[0] - 2 * first : cols[1] - 2 * first]


def subtract_(weight: torch.Tensor, delta: torch.Tensor, key: torch.Tensor, rows: Range, cols: Range) -> None:
    """`weight -= delta`, in place: stochastically rounded in bf16, an ordinary subtraction in fp32 and fp64.

    Args:
        weight: A block of the whole matrix, bf16, fp32 or fp64.
        delta: fp32, same shape; overwritten.
        key: 0-dim int32 tensor, the key of the rounding.
        rows: The block's rows in the whole matrix.
        cols: The block's columns in the whole matrix.
    """
    if weight.dtype != torch.bfloat16:
        weight.sub_(delta)
        return
    bits = torch.sub(weight, delta, out=delta).view(torch.int32)
    # bf16 is the upper half of fp32: a uniform number added to the lower half carries with the probability of what is
    # cut off. Sign and magnitude are separate, so this rounds the magnitude, which is unbiased for both signs.
    bits.add_(_random_offsets(key, rows, cols)).add_(0x8000).bitwise_and_(-0x10000)
    weight.copy_(delta)


def _int8_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


@dataclass
class SketchUpdate:
    """The update `W += U A` of one matrix, in the form in which it is applied and sent.

    Attributes:
        name: The matrix.
        projection: Kind of A.
        in_features: k.
        projection_key: 0-dim int32 tensor, the key of A.
        rounding_key: 0-dim int32 tensor, the key of the stochastic rounding.
        q: int8 `(d, r)`, the factor's integers; sign, step size and the projection's scale are in it.
        exponent: int8 `(d,)`, the factor's exponents.
    """

    name: str
    projection: str
    in_features: int
    projection_key: torch.Tensor
    rounding_key: torch.Tensor
    q: torch.Tensor
    exponent: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the factor: d·(r + 1)."""
        return self.q.numel() + self.exponent.numel()

    def to(self, device: torch.device | str) -> "SketchUpdate":
        """The same update with its tensors on `device`."""
        tensors = {f: getattr(self, f).to(device) for f in ("projection_key", "rounding_key", "q", "exponent")}
        return dataclasses.replace(self, **tensors)

    def to_bytes(self) -> bytes:
        """The update as one record; the byte layout is in `docs/sync.md`."""
        name = self.name.encode()
        d, rank = self.q.shape
        head = _RECORD.pack(
            PROJECTIONS.index(self.projection),
            len(name),
            d,
            self.in_features,
            rank,
            int(self.projection_key),
            int(self.rounding_key),
        )
        return b"".join((head, name, _int8_bytes(self.exponent), _int8_bytes(self.q)))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "SketchUpdate":
        """The update of a record that [`to_bytes`] wrote, its tensors on the CPU.

        Raises:
            ValueError: The record is not whole, or a field has a value that no update has; the message says which.
        """
        data = memoryview(data)
        if len(data) < _RECORD.size:
            raise ValueError(f"an update's record has at least {_RECORD.size} bytes, got {len(data)}")
        kind, name_length, d, in_features, rank, projection_key, rounding_key = _RECORD.unpack_from(data)
        expected = _RECORD.size + name_length + d * (rank + 1)
        if len(data) != expected:
            raise ValueError(
                f"an update of shape ({d}, {in_features}) and rank {rank} has {expected} bytes, got {len(data)}"
            )
        try:
            name = str(data[_RECORD.size : _RECORD.size + name_length], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the name of an update is not UTF-8: {error}") from None
        if kind >= len(PROJECTIONS):
            raise ValueError(f"{name}: projection must be one of 0 to {len(PROJECTIONS) - 1}, got {kind}")
        if d < 1 or not 1 <= rank <= in_features:
            raise ValueError(
                f"{name}: an update has at least one row and 1 <= rank <= in_features, got {d} rows, rank {rank} and "
                f"in_features {in_features}"
            )
        values = torch.frombuffer(bytearray(data[_RECORD.size + name_length :]), dtype=torch.int8)
        exponent, q = values[:d], values[d:].view(d, rank)
        if int(exponent.max()) > _MAX_EXPONENT or int(exponent.min()) < -_MAX_EXPONENT:
            raise ValueError(f"{name}: exponents must be between -{_MAX_EXPONENT} and {_MAX_EXPONENT}")
        if int(q.min()) < -127:
            raise ValueError(f"{name}: the factor's integers must be between -127 and 127")
        return cls(
            name=name,
            projection=PROJECTIONS[kind],
            in_features=in_features,
            projection_key=torch.tensor(projection_key, dtype=torch.int32),
            rounding_key=torch.tensor(rounding_key, dtype=torch.int32),
            q=q,
            exponent=exponent,
        )

    @torch.no_grad()
    def apply_(
        self,
        weight: torch.Tensor,
        rows: Range | None = None,
        cols: Range | None = None,
        *,
        basis: torch.Tensor | None = None,
        block_elements: int | None = None,
    ) -> None:
        """Apply to `weight`, in place: the whole matrix, or the shard that holds its `rows` and `cols`.

        Args:
            weight: bf16, fp32 or fp64, of shape `(rows, cols)`.
            rows: Half-open range of the shard's rows in the whole matrix, default all.
            cols: Half-open range of the shard's columns in the whole matrix, default all.
            basis: The shard's columns of A / scale, `(r, cols)` in fp32, if they are at hand. Signs are otherwise drawn
                for some columns at a time, so that they take 4 MiB and not 4·r·k bytes.
            block_elements: Elements of a temporary.

        Raises:
            ValueError: The weight has another shape, or a type that cannot be updated.
        """
        d, rank = self.q.shape
        rows = (0, d) if rows is None else rows
        cols = (0, self.in_features) if cols is None else cols
        if not (0 <= rows[0] <= rows[1] <= d and 0 <= cols[0] <= cols[1] <= self.in_features):
            raise ValueError(f"{self.name}: rows={rows}, cols={cols} is not a block of ({d}, {self.in_features})")
        if weight.shape != (rows[1] - rows[0], cols[1] - cols[0]):
            raise ValueError(
                f"{self.name}: the weight has shape {tuple(weight.shape)}, but rows={rows}, cols={cols} of "
                f"({d}, {self.in_features}) were to be updated"
            )
        if weight.dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"{self.name}: weights must be bfloat16, float32 or float64, got {weight.dtype}")
        if kernels.usable(self, weight):
            kernels.apply_(self, weight, rows, cols)
            return
        if block_elements is None:
            block_elements = _BLOCK_ELEMENTS.get(weight.device.type, _BLOCK_ELEMENTS_DEFAULT)
        scale = -_power_of_two(self.exponent)
        in_parts = basis is None and self.projection in SIGN_PROJECTIONS
        for part in row_blocks(cols, rank, BASIS_ELEMENTS) if in_parts else [cols]:  # a row here is a column of A
            drawn = basis
            if drawn is None:
                drawn = projection_basis(self.projection, self.projection_key, rank, self.in_features, cols=part)
            columns = weight[:, part[0] - cols[0] : part[1] - cols[0]]
            for start, stop in row_blocks(rows, part[1] - part[0], block_elements):
                delta = torch.mm(self.q[start:stop].float(), drawn)
                # Adding 0 makes +0.0 of every sum that is zero, in whatever order it was formed; w - 0.0 is w, -0.0 too.
                delta.mul_(scale[start:stop, None]).add_(0.0)
                subtract_(columns[start - rows[0] : stop - rows[0]], delta, self.rounding_key, (start, stop), part)
