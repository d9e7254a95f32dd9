"""The update rules as functions, against slow references in Python's own floats."""

import math
import random

import pytest
import torch

from trl_sketch import rules


SIZES = [4, 1, 6, 3]


def row_adam_reference(
    history: list[list[float]], beta2: float, relative_epsilon: float, restore: bool
) -> list[float]:
    """LoGRA, equation 15, for one matrix: multipliers of its rows after a history of mean squares (step, row)."""
    v = [0.0] * len(history[0])
    for mean_squares in history:
        v = [beta2 * old + (1 - beta2) * new for old, new in zip(v, mean_squares, strict=True)]
    root = [math.sqrt(x / (1 - beta2 ** len(history))) for x in v]
    epsilon = relative_epsilon * sum(root) / len(root)
    norm = [math.sqrt(x) for x in history[-1]]
    if not any(norm):
        return [0.0] * len(norm)
    scaled = [n / (s + epsilon) if n else 0.0 for n, s in zip(norm, root, strict=True)]
    ratio = math.hypot(*norm) / math.hypot(*scaled) if restore else 1.0
    return [ratio / (s + epsilon) if s + epsilon else 0.0 for s in root]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("beta2", "relative_epsilon"), [(0.95, 1e-8), (0.9, 0.3), (0.0, 0.1)])
@pytest.mark.parametrize("restore", [True, False])
def test_row_adam_matches_its_reference(restore, dtype, beta2, relative_epsilon):
    rng = random.Random(0)
    second = torch.zeros(sum(SIZES), dtype=dtype)
    histories: list[list[list[float]]] = [[] for _ in SIZES]
    for step in range(1, 21):
        values = [[rng.lognormvariate(0, 2) for _ in range(size)] for size in SIZES]
        values[0][2] = 0.0  # a row that never has a gradient
        values[3] = [0.0] * 3 if step in (1, 2, 7) else values[3]  # a matrix that sometimes has none
        for history, value in zip(histories, values, strict=True):
            history.append(value)
        mean_square = torch.tensor(sum(values, []), dtype=dtype)
        settings = {"step": step, "beta2": beta2, "relative_epsilon": relative_epsilon, "restore": restore}
        multiplier = rules.row_adam(mean_square.clone(), second, SIZES, **settings)
        assert multiplier.dtype == dtype and torch.isfinite(multiplier).all()
        # What counts is the multiplier of a row that has a gradient.
        got = (multiplier * mean_square.sqrt()).split(SIZES)
        for history, part, value in zip(histories, got, values, strict=True):
            reference = row_adam_reference(history, beta2, relative_epsilon, restore)
            expected = [m * math.sqrt(v) for m, v in zip(reference, value, strict=True)]
            assert part.tolist() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-12), step


def test_row_adam_restores_the_norm_of_each_matrix():
    mean_square = torch.tensor([1.0, 4.0, 0.0, 9.0, 2.0, 3.0, 1e-12, 1e12], dtype=torch.float64)
    sizes = [4, 2, 2]
    second = torch.rand(8, dtype=torch.float64)
    multiplier = rules.row_adam(mean_square.clone(), second, sizes, step=5, beta2=0.95, relative_epsilon=1e-8)
    before = mean_square.split(sizes)
    after = (mean_square * multiplier**2).split(sizes)
    for x, y in zip(before, after, strict=True):
        assert y.sum().item() == pytest.approx(x.sum().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_adam_changes_only_the_second_moment(dtype):
    mean_square = torch.tensor([2.0, 3.0], dtype=dtype)
    rules.row_adam(mean_square, torch.zeros(2, dtype=dtype), [2], step=1, beta2=0.95, relative_epsilon=1e-8)
    assert mean_square.tolist() == [2.0, 3.0]


def test_row_adam_moves_loud_rows_less():
    second = torch.zeros(2, dtype=torch.float64)
    for step in (1, 2, 3):
        mean_square = torch.tensor([1.0, 100.0], dtype=torch.float64)
        multiplier = rules.row_adam(mean_square.clone(), second, [2], step=step, beta2=0.95, relative_epsilon=1e-8)
    assert (multiplier[0] / multiplier[1]).item() == pytest.approx(10, rel=1e-6)
    equalized = (multiplier * mean_square.sqrt()).tolist()
    assert equalized[0] == pytest.approx(equalized[1], rel=1e-6)


def test_row_adam_unrestored_moves_a_matrix_by_what_its_history_says():
    """A step whose gradient is a tenth of what it was before is about a tenth as long, and not as long as all others."""
    second, lengths = torch.zeros(2, dtype=torch.float64), []
    for step in range(1, 12):
        mean_square = torch.tensor([4.0, 100.0], dtype=torch.float64) * (0.01 if step == 11 else 1.0)
        settings = {"step": step, "beta2": 0.999, "relative_epsilon": 1e-8, "restore": False}
        multiplier = rules.row_adam(mean_square, second, [2], **settings)
        lengths.append((multiplier * mean_square.sqrt()).tolist())
    assert lengths[:10] == [pytest.approx([1.0, 1.0], rel=1e-6)] * 10
    assert lengths[10] == pytest.approx([0.1 / math.sqrt(10.01 / 11)] * 2, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relative_epsilon", [1e-8, 0.2])
def test_adam_matches_its_reference(dtype, relative_epsilon):
    rng, beta1, beta2 = random.Random(1), 0.8, 0.9
    first, second = torch.zeros(5, 3, dtype=dtype), torch.zeros(5, 3, dtype=dtype)
    m, v = [0.0] * 15, [0.0] * 15
    for step in range(1, 21):
        values = [rng.gauss(0, 1) * 10 ** rng.uniform(-2, 2) for _ in range(15)]
        values[3:6] = [0.0] * 3  # a row of zeros
        values = [0.0] * 15 if step == 8 else values
        sketch = torch.tensor(values, dtype=dtype).view(5, 3)
        rules.adam_(sketch, first, second, step=step, beta1=beta1, beta2=beta2, relative_epsilon=relative_epsilon)
        m = [beta1 * old + (1 - beta1) * new for old, new in zip(m, values, strict=True)]
        v = [beta2 * old + (1 - beta2) * new * new for old, new in zip(v, values, strict=True)]
        root = [math.sqrt(x / (1 - beta2**step)) for x in v]
        epsilon = relative_epsilon * sum(root) / 15
        expected = [x / (1 - beta1**step) / (s + epsilon) for x, s in zip(m, root, strict=True)]
        tolerance = {torch.float32: 3e-5, torch.float64: 1e-12}[dtype]
        assert sketch.flatten().tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance / 10), step


def test_adam_of_nothing_is_nothing():
    sketch, first, second = torch.zeros(3, 2, 3)
    rules.adam_(sketch, first, second, step=1, beta1=0.9, beta2=0.95, relative_epsilon=1e-8)
    assert not sketch.any() and not first.any() and not second.any()


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (16, 16), (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("power", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25], ids=str)
def test_flatten_raises_singular_values_to_a_power(shape, power, dtype, tolerance, size):
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(shape[0], min(shape), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(shape[1], min(shape), dtype=torch.float64))
    values = torch.logspace(0, -2, min(shape), dtype=torch.float64)
    before, expected = ((left * v) @ right.T for v in (values, values**power))
    sketch = (size * before).to(dtype)
    rules.flatten_(sketch, power)
    expected *= size * before.norm() / expected.norm()
    assert (sketch.double() - expected).norm() < tolerance * expected.norm()


def test_flatten_enlarges_no_noise_beyond_what_a_dtype_can_tell():
    """A direction below rounding gets at most the gain of the edge, and a matrix of one direction stays as it is."""
    left, right = torch.linalg.qr(torch.randn(32, 2))[0], torch.linalg.qr(torch.randn(8, 2))[0]
    for weak in (0.0, 1e-7):
        before = (left * torch.tensor([1.0, weak])) @ right.T
        sketch = before.clone()
        rules.flatten_(sketch, 0.0)
        edge = (8 * torch.finfo(torch.float32).eps) ** 0.5
        assert (sketch - before).norm() < 1e-3 + 2 * weak / edge
    sketch = torch.zeros(32, 8)
    rules.flatten_(sketch, 0.5)
    assert not sketch.any()
    for entry in (1e-44, 1e-38, 3e38):  # the least and the largest numbers
        sketch = torch.zeros(32, 8)
        sketch[3, 5] = entry
        before = sketch.clone()
        rules.flatten_(sketch, 0.5)
        torch.testing.assert_close(sketch, before, rtol=1e-5, atol=0)


def test_flatten_works_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sketch = torch.randn(40, 8, dtype=torch.float64)
    whole, parts = sketch.clone(), sketch.clone()
    rules.flatten_(whole, 0.5)
    monkeypatch.setattr(rules, "BLOCK_ELEMENTS", 24)
    rules.flatten_(parts, 0.5)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    assert (parts - sketch).norm() > 0.01 * sketch.norm()


def test_norms_per_matrix_and_spread_per_row():
    rows = torch.tensor([3.0, 4.0, 0.0, 5.0, 12.0, 0.0])
    norms = rules.per_matrix(rows, [2, 1, 3])
    assert norms.dtype == torch.float64 and norms.tolist() == [5.0, 0.0, 13.0]
    assert rules.per_row(norms, [2, 1, 3]).tolist() == [5.0, 5.0, 0.0, 13.0, 13.0, 13.0]
