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
from .projection import PROJECTIONS, SIGN_PROJECTIONS, Range, Signs, projection_basis, unit_words


# Elements of a temporary: small enough to stay in a CPU's cache, 4 MiB on an accelerator. With what is computed on the way
# an update takes four to six times as much, whatever the matrix and the rank.
_BLOCK_ELEMENTS = {"cpu": 3 * 2**16}
_BLOCK_ELEMENTS_DEFAULT = 2**20
BASIS_ELEMENTS = 2**20  # of the columns of A that are drawn together
FACTOR_ELEMENTS = 2**17  # of the factors that are quantized together
_MIN_EXPONENT, _MAX_EXPONENT = -126, 103  # q·2^e, and sums of less than 2²⁴ times 2^e, are normal numbers of fp32
_CPU_HAS_INT8 = torch.cpu._is_vnni_supported()  # else torch's int8 product is a plain loop

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
        e: int8 `(d,)` in [-126, 103], the smallest for which the row fits.
    """
    factor = factor.float()
    mantissa, exponent = torch.frexp(factor.abs().amax(dim=1) / 127)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_(_MIN_EXPONENT, _MAX_EXPONENT)
    q = (factor * _power_of_two(-exponent)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return q, exponent.to(torch.int8)


def dequantize(q: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """`q · 2^e` in fp32, `(d, r)`; exact."""
    return q.float() * _power_of_two(exponent)[:, None]


def subtract_(
    weight: torch.Tensor,
    delta: torch.Tensor,
    scale: torch.Tensor,
    words: tuple[torch.Tensor, torch.Tensor],
    work: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`weight -= delta * scale`, in place: stochastically rounded in bf16, one rounding to nearest in fp32 and fp64.

    Args:
        weight: A block `(m, n)` of the whole matrix, bf16, fp32 or fp64.
        delta: fp32 `(m, n)`.
        scale: fp32 `(m, 1)`, powers of two, so that the product is exact and a fused multiply-add changes nothing.
        words: int32 `(m, 1)` and `(1, n)`, of [`unit_words`] for the block's rows and columns in the whole matrix.
        work: fp32 and int32 `(m, n)`, to be overwritten, if such are at hand.
    """
    if weight.dtype != torch.bfloat16:
        weight.addcmul_(delta.to(weight.dtype), scale.to(weight.dtype), value=-1)
        return
    new, offsets = work or (torch.empty_like(delta), torch.empty_like(delta, dtype=torch.int32))
    # Types are converted by operations of their own: one that mixes them takes three times as long on a CPU.
    new.copy_(weight).addcmul_(delta, scale, value=-1)
    # bf16 is the upper half of fp32: a uniform number added to the lower half carries with the probability of what is
    # cut off. Sign and magnitude are separate, so this rounds the magnitude, which is unbiased for both signs.
    torch.mul(*words, out=offsets).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    if weight.device.type != "cpu":
        offsets.masked_fill_(new.isnan(), 0)  # a GPU's NaN is 0x7FFFFFFF, of which an offset would make a zero
    weight.view(torch.int16).copy_(new.view(torch.int32).add_(offsets).bitwise_right_shift_(16))


def sign_dtype(device: torch.device) -> torch.dtype:
    """Type in which signs are drawn for an exact product: int8 on a CPU that multiplies int8, up to ten times as fast."""
    return torch.int8 if device.type == "cpu" and _CPU_HAS_INT8 else torch.float32


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
        if int(exponent.max()) > _MAX_EXPONENT or int(exponent.min()) < _MIN_EXPONENT:
            raise ValueError(f"{name}: exponents must be between {_MIN_EXPONENT} and {_MAX_EXPONENT}")
        if int(q.min()) < -127:
            raise ValueError(f"{name}: the factor's integers must be between -127 and 127")
        return cls(
            name=name,
            projection=PROJECTIONS[kind],
            in_features=in_features,
            projection_key=torch.tensor(projection_key, dtype=torch.int32, device="cpu"),
            rounding_key=torch.tensor(rounding_key, dtype=torch.int32, device="cpu"),
            q=q,
            exponent=exponent,
        )

    def draw(self) -> Signs | torch.Tensor:
        """A / scale, to be handed to [`apply_`]: of updates that share it, it need then be drawn once."""
        rank = self.q.shape[1]
        if self.projection in SIGN_PROJECTIONS:
            return Signs.draw(self.projection, self.projection_key, rank, self.in_features)
        return projection_basis(self.projection, self.projection_key, rank, self.in_features)

    @torch.no_grad()
    def apply_(
        self,
        weight: torch.Tensor,
        rows: Range | None = None,
        cols: Range | None = None,
        *,
        drawn: Signs | torch.Tensor | None = None,
        block_elements: int | None = None,
    ) -> None:
        """Apply to `weight`, in place: the whole matrix, or the shard that holds its `rows` and `cols`.

        Args:
            weight: bf16, fp32 or fp64, of shape `(rows, cols)`.
            rows: Half-open range of the shard's rows in the whole matrix, default all.
            cols: Half-open range of the shard's columns in the whole matrix, default all.
            drawn: What [`draw`] returns, if it is at hand. Of signs a block of columns is made at a time, so that they
                take 4 MiB at most and not 4·r·k bytes.
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
        drawn = self.draw() if drawn is None else drawn
        scale = _power_of_two(self.exponent)
        for part in row_blocks(cols, rank, BASIS_ELEMENTS):  # a row here is a column of A
            if isinstance(drawn, Signs):
                basis = drawn.block((0, rank), part, sign_dtype(weight.device))
            else:
                basis = drawn[:, slice(*part)]
            row_words, col_words = unit_words(self.rounding_key, rows, part)
            columns = weight[:, part[0] - cols[0] : part[1] - cols[0]]
            blocks = list(row_blocks(rows, part[1] - part[0], block_elements))
            shape = max((stop - start for start, stop in blocks), default=0), part[1] - part[0]
            # Made once: what is freed and allocated anew for each block costs a CPU as much as all the arithmetic.
            integers = torch.empty(shape, dtype=torch.int32, device=weight.device)
            delta, new = (torch.empty(shape, dtype=torch.float32, device=weight.device) for _ in range(2))
            for start, stop in blocks:
                n = stop - start
                # In memory of its own: of some strides that a slice may have torch's int8 product makes wrong sums.
                negated = torch.neg(self.q[start:stop], out=self.q.new_empty(n, rank))
                if basis.dtype == torch.int8:
                    torch._int_mm(negated, basis, out=integers[:n])
                    delta[:n].copy_(integers[:n])
                else:
                    torch.mm(negated.float(), basis, out=delta[:n])
                    delta[:n].add_(0.0)  # +0.0 of every sum that is zero, in whatever order it was formed
                # Subtracted is the negated update: w - 0.0 is w, also where w is -0.0.
                block = columns[start - rows[0] : stop - rows[0]]
                words = row_words[start - rows[0] : stop - rows[0]], col_words
                subtract_(block, delta[:n], scale[start:stop, None], words, (new[:n], integers[:n]))
