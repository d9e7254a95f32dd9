"""Results of an evaluation, and the paired comparison of two, from the lines that `evaluation` writes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .statistics import bootstrap_interval, pass_at_k


RIGHT = 1.0  # a completion of this score, or more, is right


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Results:
    """What a model reached.

    Attributes:
        problems: Number of problems.
        samples: Answers to each.
        pass_at: k → share of problems of which one of k answers is right, for k = 1, 2, 4, … and `samples`.
        score: Mean score; pass@1 where scores are 0 or 1.
        truncated: Share of answers that were cut off at `max_new_tokens`.
        unscored: Answers of which the reward function made nothing (None); they count as 0.
    """

    problems: int
    samples: int
    pass_at: dict[int, Estimate]
    score: Estimate
    truncated: float
    unscored: int

    def as_json(self) -> dict[str, Any]:
        estimates = {f"pass@{k}": own for k, own in self.pass_at.items()} | {"score": self.score}
        return {
            "problems": self.problems,
            "samples": self.samples,
            **{name: {"value": own.value, "interval": [own.low, own.high]} for name, own in estimates.items()},
            "truncated": self.truncated,
            "unscored": self.unscored,
        }


@dataclass(frozen=True)
class Difference:
    """Results of two evaluations of the same problems, and the second minus the first.

    Attributes:
        first: Of the first.
        second: Of the second.
        pass_at: k → difference of pass@k, paired by problem, for every k that both have.
        score: Difference of the mean scores.
        better: Problems that the second answers right more often.
        worse: Problems that it answers right less often.
    """

    first: Results
    second: Results
    pass_at: dict[int, Estimate]
    score: Estimate
    better: int
    worse: int


@dataclass(frozen=True)
class _Lines:
    """An output file: the ids, and scores and truncations as (problems, samples); a score that is None is 0 here."""

    ids: list[str]
    scores: NDArray[np.floating]
    truncated: NDArray[np.bool_]
    unscored: int

    def per_problem(self, k: int) -> NDArray[np.floating]:
        """pass@k of each problem, (problems,)."""
        samples = self.scores.shape[1]
        return np.array([pass_at_k(samples, int(right), k) for right in (self.scores >= RIGHT).sum(axis=1)])


def summarize(output: Path) -> Results:
    """Results of an output file.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read.
    """
    return _results(_read(output))


def compare_outputs(first: Path, second: Path) -> Difference:
    """Compare two outputs, paired by problem.

    Raises:
        FileNotFoundError: One is not there.
        ValueError: One cannot be read or is not finished, or they are of different problems.
    """
    a, b = _read(first), _read(second)
    for output in (first, second):
        summary = output.with_suffix(".summary.json")
        if summary.is_file() and not json.loads(summary.read_text())["finished"]:
            raise ValueError(f"{output} is not finished: run its evaluation again, and it goes on where it stopped")
    if set(a.ids) != set(b.ids):
        both = len(set(a.ids) & set(b.ids))
        raise ValueError(
            f"the problems differ, so they cannot be paired: {first} has {len(a.ids)}, {second} has {len(b.ids)}, and {both} are "
            "in both. Evaluate both on the same data set, with the same --split and --limit"
        )
    order = {own: index for index, own in enumerate(b.ids)}
    rows = [order[own] for own in a.ids]
    b = _Lines(a.ids, b.scores[rows], b.truncated[rows], b.unscored)
    ks = [k for k in _ks(a.scores.shape[1]) if k in _ks(b.scores.shape[1])]
    rate = b.per_problem(1) - a.per_problem(1)
    return Difference(
        first=_results(a),
        second=_results(b),
        pass_at={k: _estimate(b.per_problem(k) - a.per_problem(k)) for k in ks},
        score=_estimate(b.scores.mean(axis=1) - a.scores.mean(axis=1)),
        better=int((rate > 0).sum()),
        worse=int((rate < 0).sum()),
    )


def _read(output: Path) -> _Lines:
    if not output.is_file():
        raise FileNotFoundError(f"{output}: there is no such file")
    ids, scores, truncated = [], [], []
    for number, line in enumerate(output.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            ids.append(row["id"])
            scores.append(row["scores"])
            truncated.append(row["truncated"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{output}, line {number}, is no line of an evaluation: {error!r}") from None
    if not ids or len(set(ids)) < len(ids) or len({len(own) for own in scores}) > 1 or not scores[0]:
        raise ValueError(
            f"{output} must have a line for each problem, with the same number of scores, one or more, in each"
        )
    unscored = sum(score is None for own in scores for score in own)
    numbers = np.array([[0.0 if score is None else score for score in own] for own in scores])
    return _Lines(ids, numbers, np.array(truncated, dtype=bool), unscored)


def _results(lines: _Lines) -> Results:
    problems, samples = lines.scores.shape
    return Results(
        problems=problems,
        samples=samples,
        pass_at={k: _estimate(lines.per_problem(k)) for k in _ks(samples)},
        score=_estimate(lines.scores.mean(axis=1)),
        truncated=float(lines.truncated.mean()),
        unscored=lines.unscored,
    )


def _ks(samples: int) -> list[int]:
    """1, 2, 4, … up to the number of samples, and that number."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


def _estimate(values: NDArray[np.floating]) -> Estimate:
    """Of values (problems,)."""
    low, high = bootstrap_interval(values[np.newaxis])
    return Estimate(float(values.mean()), low, high)
