"""The update of weights: exact however it is cut, unbiased where it rounds, and what the policy makes of it."""

import math
import shutil
import struct

import pytest
import torch

from trl_sketch import SketchConfig, SketchOptimizer, SketchUpdate, get_sketch_model, make_projection, weights
from trl_sketch.projection import PROJECTIONS, SIGN_PROJECTIONS, counter_hash, derive_key, unit_words
from trl_sketch.weights import dequantize, quantize, subtract_


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
MASK = 0xFFFFFFFF


def add_(weight: torch.Tensor, delta: torch.Tensor, key: torch.Tensor, rows: tuple, cols: tuple) -> None:
    subtract_(weight, -delta, torch.ones(len(delta), 1), unit_words(key, rows, cols))


def key_of(seed: int = 0, step: int = 0, name: str = "w", stream: str = "rounding") -> torch.Tensor:
    return torch.tensor(derive_key(seed, step, name, stream), dtype=torch.int32)


def make_update(kind: str = "hadamard", shape=(37, 53), rank: int = 20, size: float = 1e-3, step: int = 3):
    generator = torch.Generator().manual_seed(step)
    q, exponent = quantize(size * torch.randn(shape[0], rank, generator=generator))
    keys = {"projection_key": key_of(step=step, stream="projection"), "rounding_key": key_of(step=step)}
    return SketchUpdate("w", kind, shape[1], q=q, exponent=exponent, **keys)


def make_weight(shape=(37, 53), dtype=BF16, std: float = 0.05):
    return (std * torch.randn(shape, generator=torch.Generator().manual_seed(9))).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({BF16: torch.int16, FP32: torch.int32, FP64: torch.int64}[x.dtype])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def applied(update: SketchUpdate, weight: torch.Tensor, **kwargs) -> torch.Tensor:
    result = weight.clone()
    update.apply_(result, **kwargs)
    return result


# ---------------------------------------------------------- against references


def as_float(bit_pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bit_pattern))[0]


def as_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def lowbias32(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x = (x ^ x >> 15) * 0x846CA68B & MASK
    return x ^ x >> 16


def entry_reference(update: SketchUpdate, weight: float, i: int, j: int) -> float:
    """One entry of the new bf16 weight, in plain Python numbers."""
    a = make_projection(update.projection, update.q.shape[1], update.in_features, step=3, name="w")
    signs = [1 if s > 0 else -1 for s in a[:, j].tolist()]
    total = sum(q * s for q, s in zip(update.q[i].tolist(), signs, strict=True))
    new = as_bits(weight + total * 2.0 ** int(update.exponent[i]))
    key = int(update.rounding_key) & MASK
    row = lowbias32((i + key) * 0x9E3779B9 & MASK)
    col = lowbias32((j + (key ^ 0x5BD1E995)) * 0x9E3779B9 & MASK)
    word = (row | 1) * (col | 1) & MASK
    return as_float((new + (word >> 16)) & 0xFFFF0000)


@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_entries_match_plain_python(kind):
    update, weight = make_update(kind), make_weight()
    new = applied(update, weight)
    for i, j in [(0, 0), (0, 1), (1, 0), (7, 52), (36, 51), (36, 52), (20, 33), (20, 34), (12, 16), (11, 3)]:
        assert new[i, j].item() == entry_reference(update, weight[i, j].item(), i, j), (i, j)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 10.0])
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_the_update_matches_float64(kind, size):
    update = make_update(kind, size=size)
    factor = update.q.double() * 2.0 ** update.exponent.double()[:, None]
    rank = factor.shape[1]
    a = make_projection(kind, rank, 53, step=3, name="w").double()
    delta = factor @ (torch.sign(a) if kind in SIGN_PROJECTIONS else a)  # 1/√r of signs is in the factor
    for dtype in (FP32, FP64):
        weight = make_weight(dtype=dtype)
        new = applied(update, weight)
        expected = weight.double() + delta
        if kind in SIGN_PROJECTIONS:  # exact sums: one rounding, that of the addition
            assert torch.equal(new, expected.to(dtype))
        else:
            assert (new.double() - expected).abs().max() < 1e-5 * size + 1e-8
    # In bf16: one of the two neighbours of the sum, each as often as its nearness to the sum says.
    if kind in SIGN_PROJECTIONS:
        weight = make_weight()
        new = applied(update, weight)
        total = (weight.double() + delta).float()
        low = (bits(total) & -0x10000).view(FP32)  # towards zero
        high = ((bits(total) & -0x10000) + 0x10000).view(FP32)
        assert torch.all((new == low) | ((new == high) & (low != total)))
        went_high = (new != low).double()
        probability = (total.double() - low) / (high.double() - low)
        standard_error = (probability * (1 - probability)).sum().sqrt()
        assert abs((went_high - probability).sum()) < 4 * standard_error


UPDATED = [
    0xBFC1, 0xBFAE, 0xBFA2, 0xBF90, 0xBF81, 0xBF64, 0xBF3E, 0xBF1E, 0xBF02, 0xBEBC, 0xBE78, 0xBE08,
    0x0000, 0x3E00, 0x3E80, 0x3EC0, 0x3F00, 0x3F20, 0x3F40, 0x3F58, 0x3F84, 0x3F90, 0x3FA0, 0x3FB4,
]  # fmt: skip


def test_update_vectors():
    # A resumed run and a rollout of another version must round alike.
    weight = (torch.arange(-12.0, 12.0) / 8).view(4, 6).to(BF16)
    q = torch.tensor([[3, -5], [127, 1], [0, 0], [-64, 64]], dtype=torch.int8)
    exponent = torch.tensor([-9, -14, 0, -12], dtype=torch.int8)
    update = SketchUpdate("w", "hadamard", 6, key_of(1, 2, stream="projection"), key_of(1, 2), q, exponent)
    update.apply_(weight)
    assert [b & 0xFFFF for b in bits(weight).flatten().tolist()] == UPDATED


# ---------------------------------------------------------- the same bits, however it is cut


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_any_shard_and_block_size_gives_the_same_bits(kind, dtype):
    update, weight = make_update(kind), make_weight(dtype=dtype)
    d, k = weight.shape
    whole = applied(update, weight)
    assert not same(whole, weight)
    basis = make_projection(kind, 20, k, step=3, name="w").sign()
    assert same(applied(update, weight, drawn=basis), whole)
    assert same(applied(update, weight, drawn=torch.zeros_like(basis)), weight)  # a basis at hand is not drawn again
    for elements in (1, 7, 53, 54, 300, 10**9):
        assert same(applied(update, weight, block_elements=elements), whole), elements
    row_cuts = [(i, i + 1) for i in range(d)], [(0, 0), (0, 1), (1, 18), (18, 18), (18, 37), (37, 37)]
    for cuts in row_cuts:
        parts = [applied(update, weight[a:b], rows=(a, b)) for a, b in cuts]
        assert same(torch.cat(parts), whole)
    col_cuts = [(j, j + 1) for j in range(k)], [(0, 1), (1, 4), (4, 31), (31, 32), (32, 53)], [(0, 16), (16, 53)]
    for cuts in col_cuts:
        parts = [applied(update, weight[:, a:b], cols=(a, b)) for a, b in cuts]
        assert same(torch.cat(parts, dim=1), whole)
    tile = applied(update, weight[5:30, 3:52], rows=(5, 30), cols=(3, 52), block_elements=100)
    assert same(tile, whole[5:30, 3:52].contiguous())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_an_empty_shard_is_left_alone(kind, dtype):
    update = make_update(kind)
    update.apply_(torch.empty(0, 53, dtype=dtype), rows=(37, 37))
    update.apply_(torch.empty(37, 0, dtype=dtype), cols=(53, 53))
    update.apply_(torch.empty(37, 0, dtype=dtype), cols=(6, 6))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_shard_may_be_a_view(dtype):
    update, weight = make_update(), make_weight(dtype=dtype)
    whole = applied(update, weight)
    view = weight.clone()
    update.apply_(view[4:9, 5:20], rows=(4, 9), cols=(5, 20))
    assert same(view[4:9, 5:20].contiguous(), whole[4:9, 5:20].contiguous())
    view[4:9, 5:20] = weight[4:9, 5:20]
    assert same(view, weight)
    transposed = weight.t().contiguous().t()
    update.apply_(transposed)
    assert same(transposed.contiguous(), whole)


@pytest.mark.parametrize("has_int8", [True, False])
def test_the_layout_of_the_factor_does_not_matter(has_int8, monkeypatch):
    # One row of a column-major factor has strides for which torch's int8 product is wrong.
    monkeypatch.setattr(weights, "_CPU_HAS_INT8", has_int8)
    update, weight = make_update(), make_weight()
    whole = applied(update, weight)
    update.q = update.q.t().contiguous().t()
    for elements in (1, 53, 36 * 53, 10**9):
        assert same(applied(update, weight, block_elements=elements), whole), elements


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_threads_do_not_matter(kind, dtype):
    shape = (700, 640)
    update, weight = make_update(kind, shape, rank=96), make_weight(shape, dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2):
            torch.set_num_threads(n)
            results += [applied(update, weight), applied(update, weight, block_elements=10**7)]
    finally:
        torch.set_num_threads(threads)
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("rank", [256, 1024])
def test_sums_are_exact_at_their_largest(rank):
    # Every term 127 of one sign: 127·r, beyond what bf16 or fp16 accumulation would hold.
    kind, k = "rademacher", 1024
    key = key_of(stream="projection")
    signs = make_projection(kind, rank, k, name="w").sign()
    q = (127 * signs[:, 5:6].T).to(torch.int8)
    weight = torch.zeros(1, k)
    SketchUpdate("w", kind, k, key, key_of(), q, torch.zeros(1, dtype=torch.int8)).apply_(weight)
    assert weight[0, 5] == 127 * rank
    assert torch.equal(weight.double(), q.double() @ signs.double())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("kind", "dtype"), [("hadamard", BF16), ("rademacher", FP32)])
def test_compiled_code_gives_the_same_bits_and_is_built_once(kind, dtype):
    def apply(weight, q, exponent, projection_key, rounding_key):
        SketchUpdate("w", kind, 53, projection_key, rounding_key, q, exponent).apply_(weight)
        return weight

    torch._dynamo.reset()
    compiled = torch.compile(apply)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (3, 4, 5):
            update, weight = make_update(kind, step=step), make_weight(dtype=dtype)
            new = compiled(weight.clone(), update.q, update.exponent, update.projection_key, update.rounding_key)
            assert same(new, applied(update, weight)), step


# ---------------------------------------------------------- stochastic rounding


def step_of(weight: float, towards: float) -> float:
    """Distance from a bf16 number to its neighbour in the direction of `towards`."""
    x = torch.tensor([weight], dtype=BF16)
    return (torch.nextafter(x, torch.tensor([towards], dtype=BF16)).double() - x.double()).abs().item()


WEIGHTS = {
    "positive": 0.0123,
    "negative": -0.0456,
    "large": 3e30,
    "one, from below": 1.0,
    "minus two": -2.0,
    "below two": 1.9921875,
    "smallest normal": 2.0**-126,
    "largest subnormal": 2.0**-126 - 2.0**-133,
    "subnormal": 2.0**-130,
    "negative subnormal": -(2.0**-133),
    "zero": 0.0,
}


@pytest.mark.parametrize("share", [0.01, -0.01, 0.3, 1.77, -2.4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_rounding_is_unbiased(name, share):
    """`share` is the intended movement in bf16 steps; at 2, 3 and beyond an exponent boundary it crosses it."""
    n, keys = 4096, 24
    start = torch.full((4, n), WEIGHTS[name], dtype=BF16)
    weight = start[0, 0].double().item()
    delta = torch.full((4, n), share * step_of(weight, math.copysign(math.inf, share)), dtype=FP32)
    intended = (start[0, 0].float() + delta[0, 0]).double().item() - weight
    assert intended == pytest.approx(delta[0, 0].double().item(), rel=1e-3)  # fp32 has room for it
    moved = []
    for step in range(keys):
        new = start.clone()
        add_(new, delta.clone(), key_of(step=step), (0, 4), (0, n))
        moved.append(new.double() - weight)
    moved = torch.stack(moved)
    values = moved.unique()
    assert len(values) == 2 and values[0] < intended < values[1]
    span = values[1] - values[0]
    assert span <= 2 * step_of(weight, math.copysign(math.inf, share)) * 1.001  # neighbours
    up = (intended - values[0]) / span
    standard_error = span * math.sqrt(up * (1 - up) / moved.numel())
    assert abs(moved.mean() - intended) < 4 * standard_error
    assert standard_error < 0.06 * abs(intended)  # so that the line above means something


def test_rounding_is_unbiased_through_a_whole_update():
    # Thousands of steps' worth of one small update: rounded from bf16 each time, the mean is that of float64.
    update, weight = make_update(size=2e-6, shape=(60, 80)), make_weight((60, 80))
    expected = applied(update, weight.double()) - weight.double()
    total = torch.zeros(60, 80, dtype=FP64)
    keys = 400
    for step in range(keys):
        update.rounding_key = key_of(step=step)
        total += applied(update, weight).double() - weight.double()
    moved = total / keys
    noise = (moved - expected).norm() / math.sqrt(moved.numel())
    slope = ((moved * expected).sum() / (expected**2).sum()).item()
    assert abs(slope - 1) < 4 * noise / expected.norm()
    assert 4 * noise / expected.norm() < 0.1
    # No drift towards zero or away from it.
    drift = ((moved - expected) * weight.double().sign()).mean()
    assert abs(drift) < 4 * noise / math.sqrt(moved.numel())


def test_rounding_of_neighbours_steps_and_matrices_is_independent():
    n = 256
    half = torch.full((n, n), 2.0**-8)  # half a step of 1.0

    def decisions(key: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(n, n, dtype=BF16)
        add_(weight, half.clone(), key, (0, n), (0, n))
        return (weight > 1).double() * 2 - 1

    x, y, z = decisions(key_of()), decisions(key_of(step=1)), decisions(key_of(name="v"))
    signs = make_projection("rademacher", n, n, name="w").sign().double()
    pairs = [(x, y), (x, z), (y, z), (x, signs), (x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[:, ::2], x[:, 1::2])]
    for a, b in [*pairs, (x, torch.ones_like(x))]:
        assert abs((a * b).mean()) < 4.5 / math.sqrt(a.numel())
    words = counter_hash(key_of(stream="projection"), (0, n), (0, n))
    assert abs((x * (words < 0).double().mul(2).sub(1)).mean()) < 4.5 / n


SPECIAL = [0.0, 2.0**-133, -(2.0**-133), 2.0**-126, 1.0, -1.5, 3.3895313892515355e38, -3.3895313892515355e38]


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_a_zero_update_changes_no_bit(kind, dtype):
    special = torch.tensor(SPECIAL, dtype=dtype)
    weight = torch.cat([special, torch.randn(64 - len(SPECIAL)).to(dtype)]).repeat(8, 1)
    q, exponent = quantize(torch.zeros(8, 6))
    assert not q.any()
    exponent = torch.tensor([0, -126, 103, 5, -9, 0, 1, -1], dtype=torch.int8)
    for step in range(4):
        update = SketchUpdate("w", kind, 64, key_of(stream="projection"), key_of(step=step), q, exponent)
        assert same(applied(update, weight), weight)


def test_a_zero_update_changes_none_of_two_million_weights():
    # The largest and the smallest of 2¹⁶ rounding offsets must not carry either.
    weight = make_weight((1024, 2048))
    new = weight.clone()
    add_(new, torch.zeros(1024, 2048), key_of(), (0, 1024), (0, 2048))
    assert same(new, weight)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_zero_update_keeps_the_sign_of_zero(dtype):
    weight = torch.tensor([0.0, -0.0, 0.0, -0.0], dtype=dtype).repeat(3, 1)
    q, exponent = quantize(torch.zeros(3, 2))
    update = SketchUpdate("w", "rademacher", 4, key_of(stream="projection"), key_of(), q, exponent)
    assert same(applied(update, weight), weight)


def test_a_sum_on_the_grid_is_not_rounded():
    weight = torch.linspace(1, 1.9921875, 128).to(BF16).repeat(4, 1)
    for share in (1, -3, 64):
        for step in range(8):
            new = weight.clone()
            add_(new, torch.full((4, 128), share / 128), key_of(step=step), (0, 4), (0, 128))
            exact = weight.double() + share / 128
            fits = exact.to(BF16).double() == exact
            assert fits.sum() > 200 and torch.equal(new.double()[fits], exact[fits])


# ---------------------------------------------------------- the int8 factor


@pytest.mark.parametrize("rank", [1, 4, 32, 256, 1024])
def test_int8_factor_costs_less_than_two_percent(rank):
    factor = torch.randn(512, rank, generator=torch.Generator().manual_seed(rank))
    factor *= torch.logspace(-6, 3, 512)[:, None]  # rows of any size: the scale is each row's own
    q, exponent = quantize(factor)
    assert q.dtype == torch.int8 and q.shape == factor.shape and exponent.shape == (512,)
    restored = dequantize(q, exponent)
    assert torch.equal(restored.double(), q.double() * 2.0 ** exponent.double()[:, None])
    unit = factor.norm(dim=1, keepdim=True)
    error = ((restored - factor) / unit).norm() / math.sqrt(512)
    assert error < 0.02
    bias = ((restored * factor).sum(dim=1) / unit[:, 0] ** 2).mean()
    assert abs(bias - 1) < 1e-3


def check_row(row: torch.Tensor) -> None:
    """q·2^e is the row to within half a step, no integer is cut off, and no smaller exponent would do."""
    q, exponent = quantize(row[None])
    step = 2.0 ** exponent.double().item()
    error = (q[0].double() * step - row.double()).abs().max().item()
    assert error <= step / 2 * (1 + 1e-6)
    assert q.min() >= -127 and -126 <= exponent.item() <= 103
    top = row.abs().max().double().item()
    if exponent.item() > -126 and top > 1e-42:  # below, fp32 cannot divide it by 127
        assert top > 127 * step / 2


@pytest.mark.parametrize("size", [1e33, 1e30, 1.0, 1e-6, 1e-35, 1e-37, 1e-40, 1.4e-45])
def test_rows_of_any_size(size):
    row = torch.randn(64, generator=torch.Generator().manual_seed(0)).clamp_(-1.1, 1.1) * torch.tensor(size)
    check_row(row)
    check_row(-row)


@pytest.mark.parametrize("power", [-100, -7, -1, 0, 1, 6, 7, 8, 100])
def test_rows_at_the_boundaries_of_the_exponent(power):
    for top in (1.0, 127.0, 127.5, 126.99, 127.01, 128.0, 63.5, 64.0, math.nextafter(127, 128) + 1e-5):
        for sign in (1, -1):
            check_row(torch.tensor([sign * top, -1.0, 0.3, 0.0]) * 2.0**power)
    q, exponent = quantize(torch.tensor([[127.0, -64.0, 1.0, -127.0]]) * 2.0**power)
    assert q.tolist() == [[127, -64, 1, -127]] and exponent.tolist() == [power]  # exact, with all of int8 in use


def test_rows_of_zeros_and_other_types():
    q, exponent = quantize(torch.tensor([[0.0, -0.0], [1.0, -2.0], [0.0, 0.0]]))
    assert not q[0].any() and not q[2].any() and torch.isfinite(dequantize(q, exponent)).all()
    factor = torch.randn(5, 8)
    for dtype in (BF16, FP64):
        other, same_exponent = quantize(factor.to(dtype)), quantize(factor.to(dtype).float())
        assert torch.equal(other[0], same_exponent[0]) and torch.equal(other[1], same_exponent[1])
    assert make_update().nbytes == 37 * (20 + 1)


# ---------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("weight", "block"),
    [
        (torch.zeros(53, 37), {}),
        (torch.zeros(37, 52), {}),
        (torch.zeros(37 * 53), {}),
        (torch.zeros(5, 53), {"rows": (0, 6)}),
        (torch.zeros(37, 53), {"cols": (0, 50)}),
    ],
)
def test_a_weight_of_another_shape_is_refused(weight, block):
    with pytest.raises(ValueError, match="w: the weight has shape .* were to be updated"):
        make_update().apply_(weight, **block)
    assert not weight.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_weight_of_another_type_is_refused(dtype):
    weight = torch.zeros(37, 53, dtype=dtype)
    with pytest.raises(ValueError, match=f"w: weights must be bfloat16, float32 or float64, got {dtype}"):
        make_update().apply_(weight)
    assert not weight.any()


@pytest.mark.parametrize("block", [{"rows": (30, 38)}, {"rows": (-1, 3)}, {"rows": (5, 4)}, {"cols": (50, 54)}])
def test_a_block_outside_the_matrix_is_refused(block):
    with pytest.raises(ValueError, match=r"w: .* is not a block of \(37, 53\)"):
        make_update().apply_(torch.zeros(8, 53), **block)


# ---------------------------------------------------------- what the policy makes of it


def draw_sequences(n: int, generator: torch.Generator, vocab: int = 32, length: int = 16) -> torch.Tensor:
    """Sequences whose next token is the sum of the last two, with one token in ten at random."""
    x = torch.randint(0, vocab, (n, 2), generator=generator)
    while x.shape[1] < length:
        noise = torch.randint(0, vocab, (n,), generator=generator)
        is_noise = torch.rand(n, generator=generator) < 0.1
        x = torch.cat([x, torch.where(is_noise, noise, (x[:, -1] + x[:, -2]) % vocab)[:, None]], dim=1)
    return x


@pytest.mark.slow
def test_bf16_policy_follows_the_fp32_master(tiny_qwen3, monkeypatch):
    """Steps of 6e-5 of the weights' size: what the policy of each copy fails to realize of the master's own KL.

    The master trains in fp32; the same factors are added to bf16 copies, rounded stochastically and to the nearest.
    All policies are computed in fp32, so that they differ by their weights alone.
    """
    generator = torch.Generator().manual_seed(0)
    model = tiny_qwen3(hidden_size=128, intermediate_size=256, head_dim=32)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    warm_start = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        x = draw_sequences(32, generator)
        warm_start.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        warm_start.step()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16).float()
        parameter.grad = None
    get_sketch_model(model, SketchConfig(rank=64, update_ratio=6e-5))
    optimizer = SketchOptimizer(model, lr=1e-3)
    weights = {name: p for name, p in model.named_parameters() if "_proj" in name}
    start = {name: p.detach().clone() for name, p in weights.items()}
    stochastic = {name: p.to(BF16) for name, p in start.items()}
    nearest = {name: p.to(BF16) for name, p in start.items()}

    original = SketchUpdate.apply_

    def apply_to_all(update, weight, *args, **kwargs):
        before = weight.clone()
        original(update, weight, *args, **kwargs)
        name = f"{update.name}.weight"
        original(update, stochastic[name])
        nearest[name].add_(weight - before)

    monkeypatch.setattr(SketchUpdate, "apply_", apply_to_all)
    probe = draw_sequences(32, generator)

    @torch.no_grad()
    def log_probabilities(copy: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = {name: p.data for name, p in weights.items()}
        for name, parameter in weights.items():
            parameter.data = copy[name].float()
        result = model(input_ids=probe).logits.double().log_softmax(-1)
        for name, parameter in weights.items():
            parameter.data = kept[name]
        return result

    def kl(p: torch.Tensor, q: torch.Tensor) -> float:
        return (p.exp() * (p - q)).sum(dim=-1).mean().item()

    def train(steps: int) -> None:
        for _ in range(steps):
            logits = model(input_ids=draw_sequences(8, generator)).logits
            (-logits[:, 1:].softmax(-1)[..., ::2].sum(-1).mean()).backward()  # reward: even tokens
            optimizer.step()

    def unrealized() -> tuple[float, float]:
        first, master = log_probabilities(start), log_probabilities({n: p.data for n, p in weights.items()})
        own = kl(first, master)
        return tuple(kl(log_probabilities(copy), master) / own for copy in (stochastic, nearest))

    train(10)
    moved = torch.stack([(p - start[n]).norm() ** 2 for n, p in weights.items()]).sum().sqrt()
    size = torch.stack([p.norm() ** 2 for p in start.values()]).sum().sqrt()
    assert 1.5e-4 < moved / size < 6.1e-4  # ten steps of 6e-5 in directions that agree in part
    rounded, ordinary = unrealized()
    assert rounded <= 0.05 and ordinary > 0.5, (rounded, ordinary)
    train(90)
    rounded, ordinary = unrealized()
    assert rounded <= 0.01 and ordinary > 0.5, (rounded, ordinary)
