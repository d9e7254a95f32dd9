"""The Triton kernels: the bits of the torch operations in every case, interpreted on the CPU and on a GPU where there is one.

Triton decides at its import whether it interprets, so that is a process of its own; a second one compiles for GPUs that
need not be there.
"""

import importlib.util
import logging
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from trl_sketch import SketchUpdate, kernels, make_projection
from trl_sketch.projection import PROJECTIONS, SIGN_PROJECTIONS, derive_key


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
EVERYTHING = (slice(None), slice(None))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def key_of(step: int, stream: str) -> torch.Tensor:
    return torch.tensor(derive_key(0, step, "w", stream), dtype=torch.int32)


def make_update(kind: str, shape: tuple[int, int], rank: int, step: int = 0, exponents=(-18, -10)) -> SketchUpdate:
    generator = torch.Generator().manual_seed(step)
    q = torch.randint(-127, 128, (shape[0], rank), dtype=torch.int8, generator=generator)
    exponent = torch.randint(exponents[0], exponents[1] + 1, (shape[0],), dtype=torch.int8, generator=generator)
    return SketchUpdate("w", kind, shape[1], key_of(step, "projection"), key_of(step, "rounding"), q, exponent)


def make_weight(shape: tuple[int, int], dtype: torch.dtype, step: int = 0) -> torch.Tensor:
    return (0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(step))).to(dtype)


def differences(a: torch.Tensor, b: torch.Tensor) -> int:
    """In how many entries the bits differ, of all numbers; NaN is NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    a, b = a.contiguous(), b.contiguous()
    ints = torch.int16 if a.dtype == BF16 else torch.int32
    return int(((a.view(ints) != b.view(ints)) & ~(a.isnan() & b.isnan())).sum())


# ---------------------------------------------------------- by torch, interpreted, and on a GPU


def by_torch(update, base, index=EVERYTHING, rows=None, cols=None):
    """`base`, of which the part `index` is updated as the shard of `rows` and `cols`."""
    base = base.clone(memory_format=torch.preserve_format)
    with kernels.disabled():
        update.apply_(base[index], rows, cols)
    return base


def by_kernels(update, base, index=EVERYTHING, rows=None, cols=None):
    """The same; runs in the interpreting process."""
    from triton.knobs import runtime

    assert runtime.interpret
    base = base.clone(memory_format=torch.preserve_format)  # this process has it in shared memory
    (d, _), k = update.q.shape, update.in_features
    kernels.apply_(update, base[index], (0, d) if rows is None else rows, (0, k) if cols is None else cols)
    return base


def on_gpu(update, base, index=EVERYTHING, rows=None, cols=None):
    base = base.clone(memory_format=torch.preserve_format).cuda()
    update = update.to("cuda")
    assert kernels.usable(update, base[index])
    update.apply_(base[index], rows, cols)
    return base.cpu()


@pytest.fixture(scope="module")
def interpreter():
    """Calls a function of this module in a process in which Triton interprets."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()  # starts the process
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


@pytest.fixture(params=[pytest.param("interpreted", marks=needs_triton), pytest.param("gpu", marks=needs_gpu)])
def by_triton(request):
    """`by_triton(update, base, ...)`, as `by_torch`."""
    if request.param == "gpu":
        return on_gpu
    call = request.getfixturevalue("interpreter")
    return lambda *args, **kwargs: call(by_kernels, *args, **kwargs)


# ---------------------------------------------------------- the same bits

SHAPES = [  # (d, k, r): less than a tile, and more; ranks around the 32 of a word; k around powers of two
    (1, 1, 1), (3, 2, 2), (37, 130, 1), (37, 130, 3), (40, 33, 33), (64, 96, 16), (64, 96, 64), (5, 1000, 31),
    (129, 65, 32), (8, 220, 200), (140, 256, 256),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_every_bit_is_that_of_torch(by_triton, kind, dtype):
    for step, (d, k, rank) in enumerate(SHAPES):
        update, weight = make_update(kind, (d, k), rank, step), make_weight((d, k), dtype, step)
        expected = by_torch(update, weight)
        assert differences(expected, weight) > 0.4 * weight.numel() - 2  # so that the next line means something
        assert differences(by_triton(update, weight), expected) == 0, (d, k, rank)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_any_shard_has_the_bits_of_the_whole(by_triton, kind, dtype):
    d, k = 135, 150
    update, weight = make_update(kind, (d, k), 40), make_weight((d, k), dtype)
    whole = by_torch(update, weight)
    row_cuts = [(0, 135), (0, 1), (1, 130), (77, 135), (134, 135), (0, 128), (31, 97)]
    col_cuts = [(1, 150), (63, 65), (0, 64), (7, 8), (8, 9), (149, 150), (64, 150)]
    for rows, cols in zip(row_cuts, col_cuts, strict=True):
        index = (slice(*rows), slice(*cols))
        got = by_triton(update, weight[index].clone(), rows=rows, cols=cols)
        assert differences(got, whole[index]) == 0, (rows, cols)


@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_columns_that_take_more_than_16_bits(by_triton, kind):
    update, weight = make_update(kind, (2, 70_001), 40), make_weight((2, 9), BF16)
    cols = (69_990, 69_999)
    expected = by_torch(update, weight, cols=cols)
    assert differences(by_triton(update, weight, cols=cols), expected) == 0


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_weight_may_be_any_view(by_triton, dtype):
    d, k = 50, 70
    update = make_update("hadamard", (d, k), 20)
    base = make_weight((60, 90), dtype)
    index, rows, cols = (slice(3, 38), slice(7, 60)), (10, 45), (11, 64)
    # What is not of the view keeps its bits, at the edges of tiles too.
    expected = by_torch(update, base, index, rows, cols)
    assert differences(by_triton(update, base, index, rows, cols), expected) == 0
    transposed, strided = make_weight((k, d), dtype).t(), make_weight((2 * d, 3 * k), dtype)
    assert differences(by_triton(update, transposed), by_torch(update, transposed)) == 0
    index = (slice(None, None, 2), slice(1, None, 3))
    assert differences(by_triton(update, strided, index), by_torch(update, strided, index)) == 0


SPECIAL = [
    0.0,
    -0.0,
    2.0**-133,
    -(2.0**-133),
    2.0**-126,
    -1.0,
    1.9921875,
    3.3895313892515355e38,
    -3.3895313892515355e38,
]
SPECIAL += [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_special_weights_and_factors(by_triton, kind, dtype):
    weight = torch.tensor(SPECIAL, dtype=dtype).repeat(64, 6)
    d, k = weight.shape
    for step in range(3):
        update = make_update(kind, (d, k), 6, step)
        update.exponent = torch.tensor([-126, 103, 0, -100, 99, -30, -1, 1], dtype=torch.int8).repeat(d // 8)
        update.q[:8] = 0
        update.q[8:16] = 127
        update.q[16:24, 1:] = 0
        update.q[24:32, 2:] = 0
        update.q[32:40] = -127
        got, expected = by_triton(update, weight), by_torch(update, weight)
        assert differences(got, expected) == 0
        finite = torch.tensor(SPECIAL[:9], dtype=dtype).repeat(8, 1)
        assert differences(got[:8, :9], finite) == 0  # a zero factor changes no bit
        assert torch.equal(got[:8].isnan(), weight[:8].isnan())


def test_sums_at_their_largest(by_triton):
    # Every term 127 of one sign, and more of them than bf16, fp16 or int16 could add exactly.
    rank = k = 520
    signs = make_projection("rademacher", rank, k, name="w").sign()
    update = make_update("rademacher", (1, k), rank, exponents=(0, 0))
    update.q = (-127 * signs[:, 5:6].T).to(torch.int8)
    got = by_triton(update, torch.zeros(1, k))
    assert got[0, 5] == -127 * rank
    assert differences(got, by_torch(update, torch.zeros(1, k))) == 0


@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_random_cases(by_triton, kind):
    chance = random.Random(kind)
    for step in range(40):
        d, k = chance.randint(1, 150), chance.randint(1, 150)
        rank = chance.randint(1, min(k, 70))
        dtype = chance.choice([BF16, BF16, FP32])
        update, weight = make_update(kind, (d, k), rank, step, exponents=(-25, -5)), make_weight((d, k), dtype, step)
        rows, cols = (sorted(chance.sample(range(n + 1), 2)) for n in (d, k))
        index = (slice(*rows), slice(*cols))
        shard = index, tuple(rows), tuple(cols)
        assert differences(by_triton(update, weight, *shard), by_torch(update, weight, *shard)) == 0, (kind, step)


# ---------------------------------------------------------- compiled, without the device


def compile_for(capability: int) -> list[str]:
    """PTX of all kernels as they are for an ordinary weight; `ptxas` makes machine code of it too, or this fails."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trl_sketch import triton_kernels

    def ptx(kernel, signature, **constants):
        names = kernel.arg_names
        multiples_of_16 = ("weight", "q", "exponent", "words", "n_cols", "rank", "row_stride")
        hints = {(names.index(n),): [["tt.divisibility", 16]] for n in signature if n in multiples_of_16}
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, hints)
        options = {"num_warps": 4, "sanitize_overflow": False, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"]
        return compiled.asm["ptx"]

    numbers = ["first_row", "first_col", "n_rows", "n_cols", "rank", "row_stride"]
    pointers = {"q": "*i8", "exponent": "*i8", "words": "*u32", "key": "*i32"}
    sources = []
    for dtype in ("*i16", "*fp32"):
        signature = {"weight": dtype, **pointers, **dict.fromkeys(numbers, "i32")}
        tile = {"BF16": dtype == "*i16", "ROWS": 128, "COLS": 64}
        sources.append(ptx(triton_kernels._update, signature, col_stride=1, **tile))
        sources.append(ptx(triton_kernels._update, signature | {"col_stride": "i64"}, **tile))
    for hadamard in (True, False):
        signature = {"words": "*u32", "key": "*i32", "first_col": "i32", "n_cols": "i32"}
        sources.append(ptx(triton_kernels._draw_signs, signature, HADAMARD=hadamard, BITS=11, COLS=64))
    return sources


@needs_triton
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        patch.delenv("TRITON_INTERPRET", raising=False)
        for capability in (80, 90, 100):
            for source in pool.submit(compile_for, capability).result():
                # Neither subnormal numbers lost nor a multiplication and an addition in one
                assert ".entry" in source and ".ftz" not in source and "fma." not in source
                assert ".local" not in source


# ---------------------------------------------------------- when they are used


def test_a_cpu_weight_never_goes_through_a_kernel(monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(kernels, "apply_", refuse)
    monkeypatch.setattr(kernels, "_works", refuse)
    for dtype in (BF16, FP32, FP64):
        make_update("hadamard", (3, 8), 4).apply_(make_weight((3, 8), dtype))


def pretend(update, dtype=BF16, size=24):
    """Something that says of itself that it is a weight where `update` is, on a GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, device=update.q.device, numel=lambda: size)


def test_what_the_kernels_are_used_for(monkeypatch):
    tried = []
    monkeypatch.setattr(kernels, "_works", lambda *args: not tried.append(args))
    for kind in PROJECTIONS:
        for dtype in (BF16, FP32, FP64, torch.float16):
            update = make_update(kind, (3, 8), 4)
            expected = kind in SIGN_PROJECTIONS and dtype in (BF16, FP32)
            assert kernels.usable(update, pretend(update, dtype)) is expected
    assert tried == [(torch.device("cpu"), dtype, kind) for kind in SIGN_PROJECTIONS for dtype in (BF16, FP32)]
    update = make_update("hadamard", (3, 8), 4)
    assert not kernels.usable(update, pretend(update, size=0))
    with kernels.disabled():
        assert not kernels.usable(update, pretend(update))
        with kernels.disabled():
            pass
        assert not kernels.usable(update, pretend(update))
    assert kernels.usable(update, pretend(update))
    update.rounding_key = update.rounding_key.to("meta")
    assert not kernels.usable(update, pretend(update))


@pytest.mark.parametrize(
    ("outcome", "capability", "message"),
    [
        (True, (9, 0), None),
        (False, (9, 0), "differs"),
        (OSError("no gcc"), (8, 0), "OSError: no gcc"),
        (True, (7, 5), None),
    ],
)
def test_a_kernel_that_fails_or_differs_is_not_used(monkeypatch, caplog, outcome, capability, message):
    def same_bits(*_):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(kernels, "_same_bits", same_bits)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with caplog.at_level(logging.WARNING):
        works = kernels._works.__wrapped__(torch.device("cuda:0"), BF16, "hadamard")
    assert works is (outcome is True and capability >= (8, 0))
    assert [message in record.message for record in caplog.records] == ([True] if message else [])


def tried_here(*args):
    """[`kernels._same_bits`] as it is, and with a kernel that does nothing; runs in the interpreting process."""
    first = kernels._same_bits(torch.device("cpu"), *args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "apply_", lambda *_: None)
        return first, kernels._same_bits(torch.device("cpu"), *args)


@needs_triton
@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_the_trial_tells_a_kernel_that_works_from_one_that_does_not(interpreter, kind):
    for dtype in (BF16, FP32):
        assert interpreter(tried_here, dtype, kind) == (True, False)


def version_after(update, weight):
    before = weight._version
    kernels.apply_(update, weight, (0, 3), (0, 8))
    return weight._version - before


@needs_triton
def test_autograd_notices_the_change(interpreter):
    assert interpreter(version_after, make_update("hadamard", (3, 8), 4), make_weight((3, 8), BF16)) > 0


@needs_gpu
def test_nothing_is_compiled_at_a_later_step():
    import triton

    update, weight = make_update("hadamard", (144, 208), 16).to("cuda"), make_weight((144, 208), BF16).cuda()
    update.apply_(weight)
    compiled = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(details["repr"])
        keys = torch.arange(-5, 5, dtype=torch.int32, device="cuda")  # 0-dim tensors at any address
        for step in range(9):
            update.projection_key, update.rounding_key = keys[step], keys[step + 1]
            update.apply_(weight)
    assert compiled == []
