"""Random projections `A (r, k)` with `E[AᵀA] = I`, as pure functions of a key.

| kind          | entries                                             | source                    |
|---------------|-----------------------------------------------------|---------------------------|
| `hadamard`    | ±1/√r: random rows of a Walsh–Hadamard matrix, random column signs | ours        |
| `rademacher`  | ±1/√r, independent                                  | LoGRA, section 2.1        |
| `gaussian`    | N(0, 1/r), independent                              | LoGRA, figure 5           |
| `orthonormal` | orthonormal rows × √(k/r), QR of a Gaussian         | RGC, footnote 1           |

Every entry comes from a counter-based 32-bit integer hash of (key, i, j), written in torch integer operations: the same
bits on every device and rank, and any block of rows and columns on its own, without the rest of the matrix. (An
`orthonormal` matrix needs the whole QR, so its blocks are slices of it; it and `gaussian` go through floating-point
functions, which devices may round differently.)

The two sign projections are kept as their *basis*, exact ±1 in every dtype; the scale 1/√r travels beside it (see
[`projection_scale`]) and is folded into the sketch and into the update.
"""

import hashlib
import math
from dataclasses import dataclass

import torch


PROJECTIONS = ("hadamard", "rademacher", "gaussian", "orthonormal")
SIGN_PROJECTIONS = ("hadamard", "rademacher")

Range = tuple[int, int]


def _int32(value: int) -> int:
    """The int32 that has the same bits as the low 32 bits of `value`."""
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


_GOLDEN = _int32(0x9E3779B9)  # odd, spreads consecutive counters over the word
_COLUMN_STREAM = _int32(0x5BD1E995)
# How ±1 looks in a type: integers of the same width, the bits that flip the sign, and those of +1.
_SIGN_WORDS = {
    torch.bfloat16: (torch.int16, -0x8000, 0x3F80),
    torch.float16: (torch.int16, -0x8000, 0x3C00),
    torch.float32: (torch.int32, -0x80000000, 0x3F800000),
    torch.int8: (torch.int8, -2, 1),
}


def derive_key(seed: int, step: int, name: str, stream: str) -> int:
    """Key of one random stream of one matrix at one step, as a signed 32-bit integer.

    Args:
        seed: Base seed of the run.
        step: Optimizer step at which the stream was drawn.
        name: Name of the matrix, without the parts that wrappers add.
        stream: What the numbers are for (`"projection"`, `"rounding"`).
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_(x: torch.Tensor) -> torch.Tensor:
    """`lowbias32` (C. Wellons), a 32-bit mixing function, in place on an int32 tensor of any shape."""
    # `>>` is arithmetic on int32: the masks make the shifts logical. One temporary is used three times.
    shifted = x >> 16
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    x *= _int32(0x846CA68B)
    x ^= torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF)
    return x


def _row_and_col_words(key: torch.Tensor, rows: Range, cols: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """One 32-bit word per row, `(..., rows, 1)`, and one per column, `(..., 1, cols)`, of two streams of `key (...)`."""
    i = torch.arange(*rows, dtype=torch.int32, device=key.device)
    j = torch.arange(*cols, dtype=torch.int32, device=key.device)
    # The key comes first: Inductor would fold `arange * constant` into the step of an arange, whose overflow is undefined.
    counters = torch.cat([i + key[..., None], j + (key ^ _COLUMN_STREAM)[..., None]], dim=-1)
    words = hash_(counters * _GOLDEN)  # of both at once: with so few numbers it is the calls that take time
    return words[..., : len(i), None], words[..., None, len(i) :]


def counter_hash(key: torch.Tensor, rows: Range, cols: Range) -> torch.Tensor:
    """Independent 32-bit words for the counters (i, j), i in `rows`, j in `cols`.

    Args:
        key: int32 tensor `(...)`; a tensor and not an `int`, so that compiled code is not rebuilt for each key.
        rows: Half-open range of i.
        cols: Half-open range of j.

    Returns:
        int32 `(..., rows, cols)` on the device of `key`.
    """
    row_words, col_words = _row_and_col_words(key, rows, cols)
    words = row_words ^ col_words
    words += _GOLDEN
    return hash_(words)


def unit_words(key: torch.Tensor, rows: Range, cols: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd hash words `u_i (rows, 1)` and `v_j (1, cols)`, whose products `u_i·v_j` modulo 2³² are pairwise independent.

    Odd words are a group under multiplication modulo 2³², so each product is uniform over it, and any two of them are
    independent. One multiplication an entry makes this several times as fast as [`counter_hash`], whose words are
    independent in any number; for rounding, which adds one number to each entry, pairs are enough.

    Args:
        key: 0-dim int32 tensor.
        rows: Half-open range of i.
        cols: Half-open range of j.
    """
    row_words, col_words = _row_and_col_words(key, rows, cols)
    return row_words | 1, col_words | 1


def _parities(rows: torch.Tensor, size: int) -> torch.Tensor:
    """int8 `(*rows.shape, size)`: -1 where popcount(row & j) is odd, for j below `size`, else 0."""
    x = rows[..., None] & torch.arange(size, dtype=torch.int32, device=rows.device)
    for shift in (16, 8, 4, 2, 1):
        if size > 1 << shift:  # the bits above are zero
            x ^= x >> shift
    return (x & 1).neg_().to(torch.int8)


def _distinct_rows(key: torch.Tensor, rank: int, bits: int) -> torch.Tensor:
    """`s_i (..., r)`: a permutation, keyed by `key (...)`, of the integers below 2^bits, evaluated at i < r."""
    mask = (1 << bits) - 1
    x = torch.arange(rank, dtype=torch.int32, device=key.device)
    constants = counter_hash(key, (0, 1), (0, 8))
    for odd, shift in zip(constants[..., :4].unbind(-1), constants[..., 4:].unbind(-1), strict=True):
        x = (x * (odd | 1) + shift) & mask  # a bijection modulo 2^bits, as is the xor-shift
        x ^= x >> (bits + 1) // 2
    return x


@dataclass(frozen=True)
class Signs:
    """The sign projections of one or of several matrices of one shape, in a compact form from which blocks are cut.

    Drawing is in two parts. Hashing happens here, once for all matrices of a step: `hadamard` keeps the signs of the
    columns and the two factors of its rows, since popcount(s & j) splits over the high and the low bits of j; `rademacher`
    keeps one bit an entry. A block is then cut with two or three operations an entry, in the type that is asked for.

    Attributes:
        kind: `hadamard` or `rademacher`.
        rank: r.
        in_features: k.
        parts: Of `hadamard` int8 `(..., r, ⌈k/2ˡ⌉)`, `(..., r, 2ˡ)` and `(..., 1, k)`, each 0 or -1 (flip the sign); of
            `rademacher` int32 `(..., ⌈r/32⌉, k)`.
    """

    kind: str
    rank: int
    in_features: int
    parts: tuple[torch.Tensor, ...]

    @classmethod
    def draw(cls, kind: str, key: torch.Tensor, rank: int, in_features: int) -> "Signs":
        """Draw from keys, int32 `(...)`."""
        if kind == "rademacher":
            return cls(kind, rank, in_features, (counter_hash(key, (0, -(-rank // 32)), (0, in_features)),))
        bits = max(in_features - 1, 1).bit_length()
        low_bits = (bits + 1) // 2
        s = _distinct_rows(key, rank, bits)
        sigma = counter_hash(key ^ _COLUMN_STREAM, (0, 1), (0, in_features)) >> 31
        high = _parities(s >> low_bits, -(-in_features // (1 << low_bits)))
        low = _parities(s & (1 << low_bits) - 1, 1 << low_bits)
        return cls(kind, rank, in_features, (high, low, sigma.to(torch.int8)))

    def __getitem__(self, index: int) -> "Signs":
        """Those of one matrix, where several were drawn."""
        return Signs(self.kind, self.rank, self.in_features, tuple(part[index] for part in self.parts))

    def clone(self) -> "Signs":
        """A copy that has memory of its own."""
        return Signs(self.kind, self.rank, self.in_features, tuple(part.clone() for part in self.parts))

    def copy_(self, other: "Signs") -> None:
        """Take over what was drawn for the same shapes; the tensors stay the same ones, as compiled code wants it."""
        for own, new in zip(self.parts, other.parts, strict=True):
            own.copy_(new)

    def block(self, rows: Range, cols: Range, dtype: torch.dtype) -> torch.Tensor:
        """±1 `(rows, cols)` in `dtype`: bf16, fp16, fp32, fp64 or int8, of one matrix."""
        word, flip, one = _SIGN_WORDS.get(dtype, _SIGN_WORDS[torch.float32])
        cut = self._hadamard if self.kind == "hadamard" else self._bits
        signs = cut(rows, cols, word, flip, one)
        return signs.view(dtype) if dtype in _SIGN_WORDS else signs.view(torch.float32).to(dtype)

    def _hadamard(self, rows: Range, cols: Range, word: torch.dtype, flip: int, one: int) -> torch.Tensor:
        """Row i at column j: σ(j)·(−1)^popcount(s_i & j), with distinct s_i."""
        high, low, sigma = self.parts
        width = low.shape[-1]
        first, last = cols[0] // width, -(-cols[1] // width)
        high, low = (part[slice(*rows)].to(word).bitwise_and_(flip) for part in (high[:, first:last], low))
        words = (high[:, :, None] ^ low[:, None, :]).view(len(low), high.shape[1] * width)
        words = words[:, cols[0] - first * width : cols[1] - first * width]
        sigma = sigma[:, slice(*cols)].to(word).bitwise_and_(flip).bitwise_xor_(one)
        return words.bitwise_xor_(sigma) if words.is_contiguous() else words ^ sigma

    def _bits(self, rows: Range, cols: Range, word: torch.dtype, flip: int, one: int) -> torch.Tensor:
        """Row i is bit i % 32 of the words of row i // 32."""
        (words,) = self.parts
        first, last = rows[0] // 32, -(-rows[1] // 32)
        words = words[first:last, None, slice(*cols)]
        shift = torch.arange(31, -1, -1, dtype=torch.int32, device=words.device)
        signs = (words << shift[:, None]).bitwise_right_shift_(31)  # the bit becomes the sign, and then the whole word
        signs = signs.view(32 * len(words), signs.shape[-1])[rows[0] - 32 * first : rows[1] - 32 * first]
        return signs.to(word).bitwise_and_(flip).bitwise_xor_(one)


def _gaussian(key: torch.Tensor, rows: Range, cols: Range) -> torch.Tensor:
    """Standard normal fp32 `(rows, cols)` by Box–Muller."""
    radius = counter_hash(key, rows, cols)
    angle = hash_(radius + _COLUMN_STREAM)
    u = ((radius >> 8) & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
    v = ((angle >> 8) & 0xFFFFFF).float().mul_(2.0**-24 * 2 * math.pi)
    return u.log_().mul_(-2).sqrt_().mul_(v.cos_())


def _orthonormal(key: torch.Tensor, rank: int, in_features: int) -> torch.Tensor:
    """fp32 `(rank, in_features)` with orthonormal rows, Haar-distributed: QR with the sign correction."""
    frame, upper = torch.linalg.qr(_gaussian(key, (0, rank), (0, in_features)).t())
    return (frame * upper.diagonal().sign()).t()


def projection_scale(kind: str, rank: int) -> float:
    """The factor between [`projection_basis`] and A: 1/√r for sign projections, 1 for the others."""
    return rank**-0.5 if kind in SIGN_PROJECTIONS else 1.0


def projection_basis(
    kind: str,
    key: torch.Tensor,
    rank: int,
    in_features: int,
    *,
    rows: Range | None = None,
    cols: Range | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """A block of A / [`projection_scale`] on the device of `key`: exactly ±1 for the sign projections.

    Args:
        kind: One of `PROJECTIONS`.
        key: 0-dim int32 tensor, from [`derive_key`].
        rank: r, at most `in_features`.
        in_features: k.
        rows: Half-open range of rows, default all.
        cols: Half-open range of columns, default all.
        dtype: Of the result.

    Returns:
        `(rows, cols)`, the same bits as that block of the whole matrix.
    """
    if not 1 <= rank <= in_features:
        raise ValueError(f"rank must be between 1 and in_features={in_features}, got {rank}")
    rows = (0, rank) if rows is None else rows
    cols = (0, in_features) if cols is None else cols
    if not (0 <= rows[0] <= rows[1] <= rank and 0 <= cols[0] <= cols[1] <= in_features):
        raise ValueError(f"rows={rows}, cols={cols} is not a block of a {rank} x {in_features} projection")
    if kind in SIGN_PROJECTIONS:
        return Signs.draw(kind, key, rank, in_features).block(rows, cols, dtype)
    if kind == "gaussian":
        return _gaussian(key, rows, cols).mul_(rank**-0.5).to(dtype)
    if kind == "orthonormal":
        whole = _orthonormal(key, rank, in_features).mul_(math.sqrt(in_features / rank))
        return whole[rows[0] : rows[1], cols[0] : cols[1]].to(dtype)
    raise ValueError(f"projection must be one of {', '.join(PROJECTIONS)}, got {kind!r}")


def make_projection(
    kind: str,
    rank: int,
    in_features: int,
    *,
    seed: int = 0,
    step: int = 0,
    name: str = "",
    rows: Range | None = None,
    cols: Range | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The projection `A` of the matrix `name` at `step`, or a block of it, with `E[AᵀA] = I`.

    Args:
        kind: One of `hadamard`, `rademacher`, `gaussian`, `orthonormal`.
        rank: r.
        in_features: k.
        seed: Base seed of the run (`SketchConfig.projection_seed`).
        step: The optimizer step at which the projection was drawn.
        name: Name of the matrix (for matrices that share a projection: of the first of them).
        rows: Half-open range of rows, default all.
        cols: Half-open range of columns, default all.
        dtype: Of the result.
        device: Of the result.

    Returns:
        `(rows, cols)` block of the `(rank, in_features)` matrix A.

    Raises:
        ValueError: Unknown kind, rank above `in_features`, or a block outside the matrix.
    """
    key = torch.tensor(derive_key(seed, step, name, "projection"), dtype=torch.int32, device=device)
    basis = projection_basis(kind, key, rank, in_features, rows=rows, cols=cols, dtype=dtype)
    return basis * projection_scale(kind, rank)
