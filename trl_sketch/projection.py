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

import torch


PROJECTIONS = ("hadamard", "rademacher", "gaussian", "orthonormal")
SIGN_PROJECTIONS = ("hadamard", "rademacher")

Range = tuple[int, int]


def _int32(value: int) -> int:
    """The int32 that has the same bits as the low 32 bits of `value`."""
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


_GOLDEN = _int32(0x9E3779B9)  # odd, spreads consecutive counters over the word
_COLUMN_STREAM = _int32(0x5BD1E995)
_SIGN_BIT = _int32(0x80000000)


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


def counter_hash(key: torch.Tensor, rows: Range, cols: Range) -> torch.Tensor:
    """Independent 32-bit words for the counters (i, j), i in `rows`, j in `cols`.

    Args:
        key: 0-dim int32 tensor; a tensor and not an `int`, so that compiled code is not rebuilt for each key.
        rows: Half-open range of i.
        cols: Half-open range of j.

    Returns:
        int32 `(rows, cols)` on the device of `key`.
    """
    i = torch.arange(*rows, dtype=torch.int32, device=key.device)
    j = torch.arange(*cols, dtype=torch.int32, device=key.device)
    # The key comes first: Inductor would fold `arange * constant` into the step of an arange, whose overflow is undefined.
    row_words = hash_((i + key) * _GOLDEN)
    col_words = hash_((j + (key ^ _COLUMN_STREAM)) * _GOLDEN)
    words = row_words[:, None] ^ col_words[None, :]
    words += _GOLDEN
    return hash_(words)


def _rademacher(key: torch.Tensor, rows: Range, cols: Range, dtype: torch.dtype) -> torch.Tensor:
    """±1 `(rows, cols)`: row i is bit i % 32 of the words of row i // 32."""
    first, last = rows[0] // 32, -(-rows[1] // 32)
    words = counter_hash(key, (first, last), cols)
    shift = torch.arange(31, -1, -1, dtype=torch.int32, device=key.device)
    # Move the row's bit to the sign bit, then put it on the bits of 1.0: no multiplication, no conversion.
    sign = (words[:, None, :] << shift[None, :, None]) & _SIGN_BIT
    if dtype == torch.bfloat16:
        signs = ((sign >> 16).to(torch.int16) | 0x3F80).view(torch.bfloat16)
    else:
        signs = (sign | 0x3F800000).view(torch.float32).to(dtype)
    return signs.reshape(32 * words.shape[0], words.shape[1])[rows[0] - 32 * first : rows[1] - 32 * first]


def _parity_signs(rows: torch.Tensor, cols: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(−1)^popcount(rows & cols), `(len(rows), len(cols))`."""
    x = rows[:, None] & cols[None, :]
    for shift in (16, 8, 4, 2, 1):
        x ^= x >> shift
    return (1 - 2 * (x & 1)).to(dtype)


def _distinct_rows(key: torch.Tensor, rows: Range, bits: int) -> torch.Tensor:
    """`s_i` for i in `rows`: a keyed permutation of the integers below 2^bits, evaluated at i."""
    mask = (1 << bits) - 1
    x = torch.arange(*rows, dtype=torch.int32, device=key.device)
    constants = counter_hash(key, (0, 1), (0, 8))[0]
    for odd, shift in zip(constants[:4] | 1, constants[4:], strict=True):
        x = (x * odd + shift) & mask  # a bijection modulo 2^bits, as is the xor-shift
        x ^= x >> (bits + 1) // 2
    return x


def _hadamard(key: torch.Tensor, rows: Range, cols: Range, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """±1 `(rows, cols)`: σ(j)·(−1)^popcount(s_i & j) with distinct s_i and random signs σ."""
    bits = max(in_features - 1, 1).bit_length()
    s = _distinct_rows(key, rows, bits)
    # popcount(s & j) splits over the high and low bits of j: two small tables instead of one popcount per entry.
    low_bits = (bits + 1) // 2
    first, last = cols[0] >> low_bits, -(-cols[1] // (1 << low_bits))
    high = _parity_signs(s >> low_bits, torch.arange(first, last, dtype=torch.int32, device=key.device), dtype)
    low = _parity_signs(s, torch.arange(1 << low_bits, dtype=torch.int32, device=key.device), dtype)
    signs = (high[:, :, None] * low[:, None, :]).reshape(len(s), high.shape[1] * low.shape[1])
    offset = first << low_bits
    signs = signs[:, cols[0] - offset : cols[1] - offset]
    sigma = counter_hash(key ^ _COLUMN_STREAM, (0, 1), cols)[0]
    return signs * torch.where(sigma < 0, -1, 1).to(dtype)


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
    if kind == "hadamard":
        return _hadamard(key, rows, cols, in_features, dtype)
    if kind == "rademacher":
        return _rademacher(key, rows, cols, dtype)
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
