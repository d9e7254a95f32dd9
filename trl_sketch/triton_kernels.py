"""The update of a weight as Triton kernels: `W -= (q·2^e) A`, rounded, with the bits of `weights.py`, in one pass.

1. [`_draw_signs`] writes the signs of A, one bit an entry: r·k/8 bytes, which stay in the GPU's cache.
2. [`_update`] has a tile of 128 x 64 weights to a program. For 32 rows of A at a time it takes a word of each column and
   32 columns of q, makes ±1 of the bits in registers, and multiplies int8 into int32; then it subtracts, rounds, writes.

So a weight is read once and written once, which is the floor. What else there is per weight: r/64 bytes of q and
r/1024 of signs, out of the cache; r multiply-adds on the tensor cores; r/128 signs, a few integer operations each, as a
sign serves all rows of a tile; and one multiplication for the rounding. Integers and a power of two leave nothing to the order of
summation, so that the tile, the shard and the device do not matter.

Imported only where Triton is there and is to be used: see `kernels.py`.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from . import projection
from .projection import Range


if TYPE_CHECKING:
    from .weights import SketchUpdate

# 64 sums for each of 128 threads: with more, fewer tiles are on a multiprocessor at a time than hide the reading of one.
_ROWS, _COLS, _WARPS = 128, 64, 4

_GOLDEN = tl.constexpr(projection._GOLDEN & 0xFFFFFFFF)
_COLUMN_STREAM = tl.constexpr(projection._COLUMN_STREAM & 0xFFFFFFFF)


# Words are uint32 here and int32 in `projection.py`: the same bits, and `>>` is logical without a mask.


@triton.jit
def _hash(x):
    """`projection.hash_`."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _row_word(key, i):
    return _hash((i + key) * _GOLDEN)


@triton.jit
def _col_word(key, j):
    return _hash((j + (key ^ _COLUMN_STREAM)) * _GOLDEN)


@triton.jit
def _counter_hash(row_word, col_word):
    """`projection.counter_hash`."""
    return _hash((row_word ^ col_word) + _GOLDEN)


@triton.jit(do_not_specialize=["first_col"], do_not_specialize_on_alignment=["key"])
def _draw_signs(words, key, first_col, n_cols, HADAMARD: tl.constexpr, BITS: tl.constexpr, COLS: tl.constexpr):
    """Bit b of `words[c, j]`, uint32 `(ceil(r / 32), n_cols)`, is set where A[32·c + b, first_col + j] is negative."""
    chunk = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    j = (first_col + col).to(tl.uint32)
    seed = tl.load(key).to(tl.uint32)
    if HADAMARD:
        # `projection._distinct_rows`
        bit = tl.arange(0, 32).to(tl.uint32)
        s = chunk.to(tl.uint32) * 32 + bit
        for n in tl.static_range(4):
            odd = _counter_hash(_row_word(seed, 0), _col_word(seed, n)) | 1
            shift = _counter_hash(_row_word(seed, 0), _col_word(seed, n + 4))
            s = (s * odd + shift) & ((1 << BITS) - 1)
            s ^= s >> ((BITS + 1) // 2)
        # `projection._parities`
        x = s[:, None] & j[None, :]
        x ^= x >> 16
        x ^= x >> 8
        x ^= x >> 4
        x ^= x >> 2
        x ^= x >> 1
        word = tl.sum((x & 1) << bit[:, None], axis=0)
        # σ, the top bit of a hash of its own, turns a whole column.
        column_seed = seed ^ _COLUMN_STREAM
        sigma = _counter_hash(_row_word(column_seed, 0), _col_word(column_seed, j)) >> 31
        word ^= sigma * 0xFFFFFFFF
    else:
        # `projection.Signs`
        word = _counter_hash(_row_word(seed, chunk.to(tl.uint32)), _col_word(seed, j))
    tl.store(words + chunk * n_cols + col, word, mask=col < n_cols)


@triton.jit(do_not_specialize=["first_row", "first_col", "n_rows"], do_not_specialize_on_alignment=["key"])
def _update(
    weight,
    q,
    exponent,
    words,
    key,
    first_row,
    first_col,
    n_rows,
    n_cols,
    rank,
    row_stride,
    col_stride,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Update one tile of `weight`, `(n_rows, n_cols)`: fp32, or bf16 seen as int16.

    `q`, `(d, rank)`, and `exponent`, `(d,)`, are int8 and the whole matrix's; `words` are the shard's, see
    [`_draw_signs`]. The shard begins at row `first_row` and column `first_col` of the whole matrix.
    """
    tiles = tl.cdiv(n_cols, COLS)
    tile = tl.program_id(0)
    row = tile // tiles * ROWS + tl.arange(0, ROWS)
    col = tile % tiles * COLS + tl.arange(0, COLS)
    row_fits, col_fits = row < n_rows, col < n_cols
    i = first_row + row

    bit = tl.arange(0, 32)
    total = tl.zeros((ROWS, COLS), dtype=tl.int32)
    for chunk in range(tl.cdiv(rank, 32)):
        a = chunk * 32 + bit
        # Beyond r q is 0, and the sign is anything.
        q_fits = row_fits[:, None] & (a < rank)[None, :]
        integers = tl.load(q + i.to(tl.int64)[:, None] * rank + a[None, :], mask=q_fits, other=0)
        word = tl.load(words + chunk * n_cols + col, mask=col_fits, other=0)
        negative = (word[None, :] >> bit.to(tl.uint32)[:, None]) & 1
        signs = ((negative * 0xFE) ^ 0x01).to(tl.int8)  # 0xFF or 0x01
        total = tl.dot(integers, signs, total, out_dtype=tl.int32)

    # As in `SketchUpdate.apply_`: 2^e from its bits, and +0.0 of every sum that is zero.
    power = tl.load(exponent + i, mask=row_fits, other=0).to(tl.int32)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    delta = total.to(tl.float32) * -scale[:, None] + 0.0
    target = weight + row.to(tl.int64)[:, None] * row_stride + col.to(tl.int64)[None, :] * col_stride
    fits = row_fits[:, None] & col_fits[None, :]
    old = tl.load(target, mask=fits, other=0)
    if BF16:
        new = (old.to(tl.uint32) << 16).to(tl.float32, bitcast=True) - delta
        # `projection.unit_words`, and the upper half of their product, as in `weights.subtract_`
        seed = tl.load(key).to(tl.uint32)
        row_word = _row_word(seed, i.to(tl.uint32)) | 1
        col_word = _col_word(seed, (first_col + col).to(tl.uint32)) | 1
        offset = (row_word[:, None] * col_word[None, :]) >> 16
        bits = new.to(tl.uint32, bitcast=True)
        # A GPU's NaN is 0x7FFFFFFF: an offset would make a zero of it.
        bits = tl.where(new == new, bits + offset, bits)
        tl.store(target, (bits >> 16).to(tl.int16), mask=fits)
    else:
        tl.store(target, old - delta, mask=fits)


def apply_(update: "SketchUpdate", weight: torch.Tensor, rows: Range, cols: Range) -> None:
    """[`SketchUpdate.apply_`] for a shard and an update for which `kernels.usable` holds.

    The keys stay on the device, and what is a number here is the same at every step: nothing is compiled anew.
    """
    (n_rows, n_cols), rank = weight.shape, update.q.shape[1]
    chunks = triton.cdiv(rank, 32)
    words = torch.empty(chunks, n_cols, dtype=torch.uint32, device=weight.device)
    bf16 = weight.dtype == torch.bfloat16
    # The hash overflows on purpose. The products are exact, fused with the addition or not; here they are not.
    options = {"num_warps": _WARPS, "sanitize_overflow": False, "enable_fp_fusion": False}
    with torch.cuda.device_of(weight):
        _draw_signs[(chunks, triton.cdiv(n_cols, _COLS))](
            words,
            update.projection_key,
            cols[0],
            n_cols,
            HADAMARD=update.projection == "hadamard",
            BITS=max(update.in_features - 1, 1).bit_length(),
            COLS=_COLS,
            **options,
        )
        _update[(triton.cdiv(n_rows, _ROWS) * triton.cdiv(n_cols, _COLS),)](
            weight.view(torch.int16) if bf16 else weight,
            update.q.contiguous(),
            update.exponent.contiguous(),
            words,
            update.rounding_key,
            rows[0],
            cols[0],
            n_rows,
            n_cols,
            rank,
            *weight.stride(),
            BF16=bf16,
            ROWS=_ROWS,
            COLS=_COLS,
            **options,
        )
    torch.autograd.graph.increment_version(weight)  # it was changed behind torch's back
