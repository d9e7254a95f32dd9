"""Bootstrap intervals over seeds and problems, and pass@k."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK = 1_000  # resamples at a time: 8 MB for a thousand problems


def bootstrap_interval(
    values: ArrayLike, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of `values`, whose rows (seeds) and columns (problems) are both drawn anew.

    Another seed would have trained another model, and other problems would have judged it: both are samples. For a paired
    comparison, `values` are differences. With one row (or column) only the other is drawn.

    Args:
        values: Scores or differences, (seeds, problems).
        resamples: How often rows and columns are drawn, with replacement, as many as there are.
        level: Share of the resampled means inside of the interval.
        seed: Of the draws: the same values have the same interval.

    Raises:
        ValueError: `values` is no matrix, is empty, or is not all finite.
    """
    matrix = np.asarray(values, dtype=float)
    if matrix.ndim != 2 or not matrix.size or not np.isfinite(matrix).all():
        raise ValueError(f"values of shape {matrix.shape} must be a matrix (seeds, problems) of finite numbers")
    generator = np.random.default_rng(seed)
    means = [
        ((_draws(generator, count, matrix.shape[0]) @ matrix) * _draws(generator, count, matrix.shape[1])).sum(axis=1)
        for count in [_CHUNK] * (resamples // _CHUNK) + [resamples % _CHUNK] * bool(resamples % _CHUNK)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _draws(generator: np.random.Generator, count: int, size: int) -> NDArray[np.floating]:
    """`count` samples with replacement of `size` things, as each thing's share of the sample: (count, size), rows sum to 1."""
    return generator.multinomial(size, np.full(size, 1 / size), size=count) / size


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, of `samples` of which `right` were (Chen et al. 2021).

    It is the share of the choices of k samples in which one is right: `1 - C(samples - right, k) / C(samples, k)`.

    Raises:
        ValueError: There are fewer than k samples, or more right ones than samples.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right: k must be 1 to the number of samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
