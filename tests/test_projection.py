"""Projections: exact signs from integers, any block alone, E[AᵀA] = I, and the errors that the papers predict."""

import hashlib
import math

import pytest
import torch

from trl_sketch import make_projection
from trl_sketch.projection import (
    PROJECTIONS,
    SIGN_PROJECTIONS,
    counter_hash,
    derive_key,
    hash_,
    projection_basis,
    projection_scale,
    unit_words,
)


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# (rank, in_features): one row, square, ranks that are no multiple of 32, sizes around powers of two.
SHAPES = [(1, 1), (1, 2), (2, 2), (3, 3), (5, 17), (17, 17), (33, 100), (1, 128), (70, 1023), (31, 1024), (40, 1025)]


def key_of(seed: int = 0, step: int = 0, name: str = "", stream: str = "projection") -> torch.Tensor:
    return torch.tensor(derive_key(seed, step, name, stream), dtype=torch.int32)


# ---------------------------------------------------------- the same in plain Python integers

MASK = 0xFFFFFFFF


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def word(key: int, i: int, j: int) -> int:
    """The random word of counter (i, j)."""
    row = lowbias32((i + key) * 0x9E3779B9 & MASK)
    col = lowbias32((j + (key ^ 0x5BD1E995)) * 0x9E3779B9 & MASK)
    return lowbias32(((row ^ col) + 0x9E3779B9) & MASK)


def unsigned_key(seed: int, step: int, name: str, stream: str) -> int:
    text = f"{seed}/{step}/{stream}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def rademacher_entry(key: int, i: int, j: int) -> int:
    return -1 if word(key, i // 32, j) >> (i % 32) & 1 else 1


def hadamard_row(key: int, i: int, in_features: int) -> int:
    """Which row of the Walsh–Hadamard matrix is row i of A."""
    bits = max(1, math.ceil(math.log2(in_features)))
    constants = [word(key, 0, c) for c in range(8)]
    for factor, shift in zip(constants[:4], constants[4:], strict=True):
        i = (i * (factor | 1) + shift) % 2**bits
        i ^= i >> (bits + 1) // 2
    return i


def hadamard_entry(key: int, i: int, j: int, in_features: int) -> int:
    sigma = -1 if word(key ^ 0x5BD1E995, 0, j) >> 31 else 1
    return sigma * (-1) ** (hadamard_row(key, i, in_features) & j).bit_count()


def test_hash_is_lowbias32():
    values = [0, 1, 2, 12345, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    signed = torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32)
    assert [h & MASK for h in hash_(signed).tolist()] == [lowbias32(v) for v in values]
    assert lowbias32(1) == 0x688990C0  # so that an error in both shows


def test_derived_keys_and_words_follow_their_definition():
    assert derive_key(3, 14, "a.b", "rounding") & MASK == unsigned_key(3, 14, "a.b", "rounding")
    key = key_of(3, 14, "a.b", "rounding")
    words = counter_hash(key, (5, 9), (1000, 1003))
    expected = [[word(int(key) & MASK, i, j) for j in range(1000, 1003)] for i in range(5, 9)]
    assert [[w & MASK for w in row] for row in words.tolist()] == expected


@pytest.mark.parametrize(("rank", "in_features"), SHAPES)
def test_sign_projections_match_plain_integers(rank, in_features):
    key = unsigned_key(7, 2, "layer", "projection")
    entries = {
        "rademacher": lambda i, j: rademacher_entry(key, i, j),
        "hadamard": lambda i, j: hadamard_entry(key, i, j, in_features),
    }
    rows = sorted({0, rank // 2, rank - 1})
    cols = sorted({0, 1 % in_features, in_features // 2, max(0, in_features - 2), in_features - 1})
    for kind, entry in entries.items():
        basis = projection_basis(kind, key_of(7, 2, "layer"), rank, in_features)
        assert basis.shape == (rank, in_features)
        got = [[int(basis[i, j]) for j in cols] for i in rows]
        assert got == [[entry(i, j) for j in cols] for i in rows], kind


# ---------------------------------------------------------- fixed values: a stored run must stay readable

KEYS = (115180892, 107357422, -1715219732)
SIGNS = {"hadamard": "+++----+++-+++-++-++-+--", "rademacher": "+------+++-+--+++---+-+-"}
DIGESTS = {"hadamard": "f8e9364b8258b497", "rademacher": "129db659843b5a3f"}
FLOATS = {
    "gaussian": [[-0.832928, 0.450266, -0.38947, 0.782936], [0.397186, 0.320632, -0.456299, 0.585687]],
    "orthonormal": [[-0.913931, 0.494055, -0.427346, 0.859078], [1.060197, 0.338306, -0.597309, 0.636203]],
}


def test_vectors_of_keys():
    assert derive_key(0, 0, "", "projection") == KEYS[0]
    assert derive_key(42, 7, "model.layers.0.mlp.up_proj", "projection") == KEYS[1]
    assert derive_key(42, 7, "model.layers.0.mlp.up_proj", "rounding") == KEYS[2]


@pytest.mark.parametrize("kind", SIGN_PROJECTIONS)
def test_vectors_of_signs(kind):
    assert "".join("+-"[int(s < 0)] for s in make_projection(kind, 3, 8).flatten()) == SIGNS[kind]
    basis = projection_basis(kind, key_of(42, 7, "model.layers.0.mlp.up_proj"), 48, 1536, dtype=torch.bfloat16)
    assert hashlib.sha256(basis.to(torch.int8).numpy().tobytes()).hexdigest()[:16] == DIGESTS[kind]


@pytest.mark.parametrize("kind", ["gaussian", "orthonormal"])
def test_vectors_of_floats(kind):
    torch.testing.assert_close(make_projection(kind, 2, 4), torch.tensor(FLOATS[kind]), rtol=0, atol=2e-6)


# ---------------------------------------------------------- structure


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_any_block_equals_the_same_block_of_the_whole(kind, dtype):
    rank, in_features = 45, 103
    whole = make_projection(kind, rank, in_features, seed=1, step=2, name="w", dtype=dtype)
    assert whole.shape == (rank, in_features) and whole.dtype == dtype
    row_blocks = [(0, 45), (0, 1), (31, 33), (32, 45), (44, 45), (7, 40)]
    col_blocks = [(0, 103), (0, 1), (1, 2), (15, 17), (16, 32), (64, 103), (102, 103), (5, 98)]
    for rows in row_blocks:
        for cols in col_blocks:
            block = make_projection(
                kind, rank, in_features, seed=1, step=2, name="w", dtype=dtype, rows=rows, cols=cols
            )
            assert torch.equal(block, whole[slice(*rows), slice(*cols)]), (rows, cols)


@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [((0, 0), (0, 103)), ((5, 5), (3, 9)), ((32, 32), (0, 9)), ((45, 45), (0, 103)), ((0, 45), (103, 103))]
    + [((0, 45), (0, 0)), ((0, 3), (7, 7)), ((0, 3), (64, 64)), ((9, 9), (7, 7))],
)
def test_an_empty_block_is_empty(kind, rows, cols):
    block = make_projection(kind, 45, 103, rows=rows, cols=cols)
    assert block.shape == (rows[1] - rows[0], cols[1] - cols[0])


@pytest.mark.parametrize(("rank", "in_features"), SHAPES)
def test_signs_are_exact_in_every_dtype(rank, in_features):
    for kind in SIGN_PROJECTIONS:
        basis = projection_basis(kind, key_of(1), rank, in_features)
        assert torch.equal(basis.abs(), torch.ones(rank, in_features)), kind
        for dtype in DTYPES:
            other = projection_basis(kind, key_of(1), rank, in_features, dtype=dtype)
            assert other.dtype == dtype and torch.equal(other.float(), basis)
            scaled = make_projection(kind, rank, in_features, seed=1, dtype=dtype)
            torch.testing.assert_close(scaled.double(), basis.double() / math.sqrt(rank), rtol=0.004, atol=0)
        assert projection_scale(kind, rank) == pytest.approx(1 / math.sqrt(rank), rel=1e-15)


@pytest.mark.parametrize("in_features", [1, 2, 16, 128, 1024])
def test_hadamard_rows_are_orthogonal_at_powers_of_two(in_features):
    rank = min(in_features, 200)
    basis = projection_basis("hadamard", key_of(5), rank, in_features, dtype=torch.float64)
    assert torch.equal(basis @ basis.T, in_features * torch.eye(rank, dtype=torch.float64))


@pytest.mark.parametrize("in_features", [1, 2, 3, 17, 100, 513, 1023, 1025])
@pytest.mark.parametrize("seed", range(3))
def test_hadamard_rows_are_distinct_up_to_full_rank(in_features, seed):
    basis = projection_basis("hadamard", key_of(seed), in_features, in_features)
    assert len(torch.unique(basis, dim=0)) == in_features


def test_other_rows_are_distinct():
    for kind in ("rademacher", "gaussian", "orthonormal"):
        assert len(torch.unique(make_projection(kind, 100, 100), dim=0)) == 100


@pytest.mark.parametrize(("rank", "in_features"), [(1, 1), (1, 7), (5, 17), (17, 17), (64, 300)])
def test_orthonormal_rows_are_orthogonal_with_length_root_k_over_r(rank, in_features):
    a = make_projection("orthonormal", rank, in_features, seed=3)
    torch.testing.assert_close(a @ a.T, in_features / rank * torch.eye(rank), rtol=1e-5, atol=1e-5 * in_features)


def test_gaussian_entries_are_normal():
    x = make_projection("gaussian", 256, 2048).double().flatten() * 16
    n = x.numel()
    # Moments 1 to 4 are 0, 1, 0, 3, with variances 1, 2, 15, 96; 4.5 standard errors.
    for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs((x**power).mean().item() - mean) < 4.5 * math.sqrt(variance / n), power
    assert abs((x.abs() < 1).double().mean().item() - math.erf(2**-0.5)) < 4.5 * 0.5 / math.sqrt(n)


# ---------------------------------------------------------- randomness


def test_every_bit_of_the_hash_is_fair_and_neighbours_are_independent():
    words = counter_hash(key_of(9), (0, 512), (0, 512)).long() & MASK
    bits = (words[None] >> torch.arange(32)[:, None, None] & 1).float().mul_(2).sub_(1)
    limit = 5 / 512
    assert bits.mean(dim=(1, 2)).abs().max() < limit
    assert (bits[:, 1:] * bits[:, :-1]).mean(dim=(1, 2)).abs().max() < limit
    assert (bits[:, :, 1:] * bits[:, :, :-1]).mean(dim=(1, 2)).abs().max() < limit
    assert (bits[1:] * bits[:-1]).mean(dim=(1, 2)).abs().max() < limit


def test_products_of_unit_words_are_uniform_and_have_no_pattern():
    n = 512
    for name in "abcd":
        u, v = unit_words(key_of(3, name=name), (0, n), (0, n))
        assert u.shape == (n, 1) and v.shape == (1, n) and torch.all(u & 1 == 1) and torch.all(v & 1 == 1)
        offsets = (u * v >> 16) & 0xFFFF
        expected = n * n / 256
        for byte in (offsets >> 8, offsets & 0xFF):  # chi-square with 255 degrees of freedom, to six deviations
            chi2 = ((torch.bincount(byte.flatten(), minlength=256) - expected) ** 2 / expected).sum()
            assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)
        x = (offsets.double() + 0.5) / 2**16 - 0.5
        x /= math.sqrt(1 / 12)
        shifts = [
            (x[1:], x[:-1]),
            (x[:, 1:], x[:, :-1]),
            (x[7:], x[:-7]),
            (x[:, 64:], x[:, :-64]),
            (x, x.flip(0)),
            (x, x.t()),
        ]
        for a, b in shifts:
            assert abs((a * b).mean()) < 4.5 * 2**0.5 / n
        # What a rank-one pattern would show in: the largest singular value is that of independent entries, 2√n.
        for y in (x, (offsets >> 15 & 1).double() * 2 - 1, (offsets & 1).double() * 2 - 1):
            assert 0.95 < torch.linalg.matrix_norm(y, 2) / (2 * math.sqrt(n)) < 1.08


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_mean_of_AtA_is_the_identity(kind):
    rank, in_features, draws = 4, 13, 1500
    a = torch.stack([make_projection(kind, rank, in_features, step=step, name="w") for step in range(draws)]).double()
    samples = a.transpose(1, 2) @ a
    error = samples.mean(dim=0) - torch.eye(in_features, dtype=torch.float64)
    standard_error = samples.std(dim=0) / math.sqrt(draws)
    if kind in SIGN_PROJECTIONS:  # the diagonal of AᵀA is 1 for every A
        assert error.diagonal().abs().max() < 1e-6
        error.fill_diagonal_(0)
        standard_error.fill_diagonal_(1)
    assert torch.all(error.abs() < 4.5 * standard_error)
    off = ~torch.eye(in_features, dtype=torch.bool)
    assert 0.4 < ((error / standard_error)[off] ** 2).mean() < 1.8  # the entries spread as chance has it


def cosine(gradient: torch.Tensor, a: torch.Tensor) -> float:
    rebuilt = gradient @ a.T @ a
    return torch.cosine_similarity(gradient.flatten(), rebuilt.flatten(), dim=0).item()


def mean_cosine(kind: str, rank: int, in_features: int, draws: int, d: int = 192) -> float:
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for seed in range(draws):
        gradient = torch.randn(d, in_features, generator=generator)
        total += cosine(gradient, make_projection(kind, rank, in_features, seed=seed, name="w"))
    return total / draws


@pytest.mark.parametrize(("rank", "in_features"), [(256, 1536), (128, 512), (64, 1000), (16, 300)])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "orthonormal"])
def test_cosine_of_the_rebuilt_gradient(kind, rank, in_features):
    expected = math.sqrt(rank / (in_features if kind == "orthonormal" else in_features + rank))
    assert mean_cosine(kind, rank, in_features, draws=max(8, 1600 // rank)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("in_features", "share"), [(1536, 0.97), (2048, 0.99)])
def test_hadamard_comes_close_to_orthonormal(in_features, share):
    orthonormal = mean_cosine("orthonormal", 256, in_features, draws=3)
    assert share * orthonormal <= mean_cosine("hadamard", 256, in_features, draws=3) <= 1.01 * orthonormal


def test_sketch_of_low_rank_and_sparse_gradients_is_unbiased():
    # A gradient that is aligned with the coordinates is where structured signs could go wrong.
    in_features = 96
    gradient = torch.zeros(3, in_features)
    gradient[0, 5], gradient[1, 64:], gradient[2] = 1, 1, 1
    for kind in PROJECTIONS:
        total = sum(gradient @ (a := make_projection(kind, 24, in_features, seed=s)).T @ a for s in range(300))
        error = (total / 300 - gradient).norm() / gradient.norm()
        assert error < 0.17, kind  # √(96 / 24 / 300) = 0.115 by chance


def test_hadamard_rows_are_chosen_without_favour():
    # A pair of columns (0, j) is confused by (AᵀA)_0j. Its mean square is that of rows drawn at random, for every j.
    rank, in_features, draws = 16, 128, 400
    squares = torch.zeros(in_features)
    for step in range(draws):
        a = make_projection("hadamard", rank, in_features, step=step)
        squares += (a[:, :1] * a).sum(dim=0) ** 2 / draws
    ratio = squares[1:] * rank * (in_features - 1) / (in_features - rank)
    assert ratio.min() > 0.6 and ratio.max() < 1.45  # 0.07 is the standard error


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_another_step_name_or_seed_gives_an_unrelated_projection(kind):
    rank, in_features = 64, 512
    settings = [(0, 0, "w"), (1, 0, "w"), (0, 1, "w"), (0, 2, "w"), (0, 0, "v"), (0, 0, "w.1"), (10, 1, "w")]
    matrices = [make_projection(kind, rank, in_features, seed=s, step=t, name=n).double() for s, t, n in settings]
    expected = in_features / rank**2  # of the squares of A Bᵀ, for independent A and B
    for i, a in enumerate(matrices):
        for b in matrices[:i]:
            product = a @ b.T
            assert (product**2).mean().item() == pytest.approx(expected, rel=0.25)
            assert product.abs().max() < 7 * math.sqrt(expected)
            assert abs((a * b).sum().item()) < 5 * math.sqrt(rank * expected)
    again = make_projection(kind, rank, in_features, seed=0, step=0, name="w").double()
    assert torch.equal(again, matrices[0])


def test_torch_generators_play_no_part():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = make_projection("hadamard", 8, 64)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(make_projection("hadamard", 8, 64), first)


# ---------------------------------------------------------- errors


@pytest.mark.parametrize("rank", [0, -1, 17])
def test_a_bad_rank_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank must be between 1 and in_features=16, got {rank}"):
        make_projection("hadamard", rank, 16)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="hadamard, rademacher, gaussian, orthonormal, got 'haddamard'"):
        make_projection("haddamard", 4, 16)


@pytest.mark.parametrize("block", [{"rows": (0, 5)}, {"rows": (-1, 2)}, {"rows": (3, 2)}, {"cols": (0, 17)}])
def test_a_block_outside_the_matrix_is_refused(block):
    with pytest.raises(ValueError, match="is not a block of a 4 x 16 projection"):
        make_projection("rademacher", 4, 16, **block)
