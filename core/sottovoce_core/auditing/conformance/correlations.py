"""Dependence between places: correlations of all pairs of columns, and spectra.

A lag adds all pairs at the same distance; here every pair is tested, so that one pair among a million is detected, and noise
that sums to zero over all learners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout

# ---- distributions -------------------------------------------------------------------------------------------------

_MIN_SAMPLES = 8
"""Minimum number of samples of a tested pair: below, rounding is visible in a correlation close to one."""


def _compute_correlation_p_values(rho: FloatArray, samples: FloatArray | IntArray) -> FloatArray:
    """Compute the exact two-sided p-value of an uncentred correlation: `rho sqrt((n-1)/(1-rho^2))` is t with n - 1."""
    residual = np.maximum(1.0 - rho**2, 1e-6)  # sums are in single precision
    is_tested = samples >= _MIN_SAMPLES
    freedom = np.where(is_tested, samples - 1.0, 1.0)
    p_values: FloatArray = np.where(
        is_tested, 2.0 * special.stdtr(freedom, -np.abs(rho) * np.sqrt(freedom / residual)), 1.0
    )
    return p_values


def _approximate_largest(samples: int, columns: int) -> tuple[float, float]:
    """Return centre and scale of the largest squared singular value of a normal matrix (Johnstone 2001; Tracy-Widom)."""
    a, b = math.sqrt(samples - 0.5), math.sqrt(columns - 0.5)
    return (a + b) ** 2, (a + b) * (1.0 / a + 1.0 / b) ** (1.0 / 3.0)


def _compute_tracy_widom_p(value: float) -> float:
    """Compute the upper tail of the Tracy-Widom distribution for real matrices, by a gamma distribution (Chiani 2014)."""
    return float(special.gammaincc(46.446, max(0.0, value + 9.84801) / 0.186054))


def _compute_largest_p(square: float, samples: int, columns: int) -> float:
    """Compute the p-value of the largest squared singular value.

    The distribution is a limit: for 2 to 40 columns and 16 to 1,000 samples the p-value was at most 1.8 times too small, down
    to 1e-3.
    """
    centre, scale = _approximate_largest(samples, columns)
    return _compute_tracy_widom_p((square - centre) / scale)


def _compute_smallest_p(square: float, samples: int, columns: int) -> float:
    """Bound the p-value of the smallest squared singular value (Davidson and Szarek 2001): valid for every size."""
    more, less = max(samples, columns), min(samples, columns)
    short = math.sqrt(more) - math.sqrt(less) - math.sqrt(max(0.0, square))
    return math.exp(-(short**2) / 2.0) if short > 0.0 else 1.0


# ---- columns ---------------------------------------------------------------------------------------------------------

_MIN_GAMMA_SAMPLES = 16
"""Minimum number of samples for the gamma approximation of all correlations together."""

_Singles = npt.NDArray[np.float32]


class _Gram:
    """Sums over samples of products of columns.

    Attributes:
        sums: `(scores, columns, columns)`.
        squares: `(scores, columns, columns)` sum of squares of a column over the samples in which the other one is known, too.
        counts: `(columns, columns)` samples in which both are known.
    """

    def __init__(self, scores: _Singles, known: BoolArray) -> None:
        """Compute from `scores (scores, samples, columns)`, 0 where unknown."""
        self.sums: _Singles = scores.swapaxes(-1, -2) @ scores
        alive, some = (np.asarray(known.any(axis=axis)) for axis in (0, 1))
        if known[some][:, alive].all():  # the usual case: every sample has all columns
            both = (alive[:, None] & alive).astype(np.float32)
            self.counts: _Singles = np.count_nonzero(some) * both
            self.squares: _Singles = np.diagonal(self.sums, axis1=1, axis2=2)[:, :, None] * both
        else:
            there = known.astype(np.float32)
            self.counts = there.T @ there
            self.squares = (scores**2).swapaxes(-1, -2) @ there

    def __add__(self, other: _Gram) -> _Gram:
        """Add the sums of other samples."""
        total = copy(self)
        for name in ("sums", "squares", "counts"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    def find_worst_pairs(self) -> Iterator[tuple[float, int, float, int, int, int]]:
        """Find the worst pair of every score: p-value times pairs, pairs, correlation, score and the two columns."""
        is_tested = np.triu(self.counts >= _MIN_SAMPLES, 1)
        pairs = int(np.count_nonzero(is_tested))
        for s in range(len(self.sums) if pairs else 0):
            rho = self._compute_correlations(s)
            # Among pairs with equal sample counts the largest correlation is the least likely one.
            largest = [
                np.where(is_tested & (self.counts == n), np.abs(rho), -1.0).argmax()
                for n in np.unique(self.counts[is_tested])
            ]
            index = np.unravel_index(np.array(largest), rho.shape)
            p_values = _compute_correlation_p_values(rho[index], self.counts[index].astype(np.float64))
            k = int(p_values.argmin())
            yield float(p_values[k]) * pairs, pairs, float(rho[index][k]), s, int(index[0][k]), int(index[1][k])

    def sum_all_pairs(self, score: int) -> tuple[float, float, float, int]:
        """Sum squared correlations; return it with its exact mean and variance under the claim, and the number of pairs."""
        above = np.triu(self.counts >= _MIN_GAMMA_SAMPLES, 1)
        n = self.counts[above].astype(np.float64)
        squares = self._compute_correlations(score)[above] ** 2
        return float(squares.sum()), float((1.0 / n).sum()), float((2.0 * (n - 1.0) / (n**2 * (n + 2.0))).sum()), n.size

    def compute_spectrum(self, score: int) -> Iterator[tuple[float, float, str]]:
        """Compute, for the largest and the smallest singular value, the p-value, its square per sample, and its name.

        It is empty where something is unknown, and with fewer samples than columns: the transposed matrix has the same values.
        """
        alive = np.diagonal(self.counts) > 0
        own, counts = self.sums[score][alive][:, alive], self.counts[alive][:, alive]
        columns = len(own)
        if columns < 2 or counts.min() != counts.max() or counts.min() < max(_MIN_SAMPLES, columns):
            return
        n = int(counts[0, 0])
        squares = np.linalg.eigvalsh(own.astype(np.float64))
        yield _compute_largest_p(float(squares[-1]), n, columns), float(squares[-1]) / n, "largest singular value"
        yield _compute_smallest_p(float(squares[0]), n, columns), float(squares[0]) / n, "smallest singular value"

    def _compute_correlations(self, score: int) -> FloatArray:
        squares = self.squares[score].astype(np.float64)
        lengths = np.sqrt(squares * squares.T)
        rho: FloatArray = np.where(lengths > 0.0, self.sums[score] / np.maximum(lengths, 1e-30), 0.0)
        return np.clip(rho, -1.0, 1.0)


def _compute_all_pairs_p(total: float, mean: float, variance: float) -> float:
    """Compute the two-sided p-value of a sum of squared correlations, by a gamma distribution of its mean and variance."""
    shape, scale = mean**2 / variance, variance / mean
    return 2.0 * min(0.5, float(special.gammainc(shape, total / scale)), float(special.gammaincc(shape, total / scale)))


# ---- all pairs -------------------------------------------------------------------------------------------------------

MAX_COLUMNS = 1500
"""Maximum number of columns of a matrix: it takes 2 x 4 bytes times the square of this."""

_MAX_PAIRS_WITHOUT_GAMMA = 30
"""Maximum number of pairs for which no gamma approximation is used."""

_SCORES = ("values", "sizes")


@dataclass(frozen=True, slots=True)
class _Result:
    """Result of a test of one matrix: a p-value, its statistic, and its location."""

    p_value: float
    statistic: float = 0.0
    where: str = ""


def _select_least(results: Sequence[_Result]) -> _Result:
    return min(results, key=lambda each: each.p_value)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Arrangement of numbers as a matrix: sample axes of `(learners, rounds, runs, numbers)`; the others are columns."""

    title: str
    samples: tuple[int, ...]
    name: Callable[[Layout, int], str]
    by_sequence: bool = False

    def arrange(self, layout: Layout, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Arrange numbers as `(samples, columns)`."""
        stacked = layout.stack_sequences(numbers) if self.by_sequence else numbers
        others = tuple(axis for axis in range(4) if axis not in self.samples)
        length = math.prod(stacked.shape[axis] for axis in self.samples)
        return stacked.transpose(*self.samples, *others).reshape(length, -1)

    def compute_gram(self, layout: Layout, block: Block) -> _Gram:
        """Compute the Gram matrix of the runs of a block."""
        scores = np.stack(
            [self.arrange(layout, each).astype(np.float32) for each in (block.normal_scores, block.normal_size_scores)]
        )
        return _Gram(scores, self.arrange(layout, block.is_known).astype(np.bool_))


def _name_learner_coordinate(layout: Layout, at: int) -> str:
    i, k = divmod(at, layout.numbers_per_message)
    return f"{layout.learners[i]}, {layout.name_coordinate(k)}"


def _name_learner_round(layout: Layout, at: int) -> str:
    i, t = divmod(at, layout.rounds)
    return f"{layout.learners[i]}, round {t}"


_LEARNERS = _Columns("learners", (1, 2, 3), lambda layout, at: layout.name_sequence(at), by_sequence=True)
_COORDINATES = _Columns("coordinates of learners", (1, 2), _name_learner_coordinate)
_ROUNDS = _Columns("rounds of learners", (2, 3), _name_learner_round)
_PLACES = _Columns("places", (2,), lambda layout, at: layout.name_place(at))
_RUNS = _Columns("runs", (0, 1, 3), lambda layout, at: f"run {at} of a block")


class Correlations(ConformanceTest):
    """Tests of matrices of scores of values and of sizes.

    Sums over runs are kept for learners, coordinates, rounds and places. Runs are columns within a block only; across blocks,
    repeats are found by their keys (`freshness`).
    """

    part: ClassVar[BudgetPart] = "dependence"

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        self._grams: dict[str, _Gram] = {}
        self._runs = _Runs()

    def add(self, block: Block) -> None:
        self._add_grams(
            {columns.title: columns.compute_gram(self._layout, block) for columns in _select_columns(self._layout)}
        )
        if 1 < block.runs <= MAX_COLUMNS:
            self._runs.add(_RUNS.compute_gram(self._layout, block))

    def merge(self, other: Self) -> None:
        self._add_grams(other._grams)
        self._runs.merge(other._runs)

    def _add_grams(self, grams: Mapping[str, _Gram]) -> None:
        for title, gram in grams.items():
            self._grams[title] = self._grams[title] + gram if title in self._grams else gram

    def _iterate_tests(self) -> Iterator[Test]:
        """Test the worst pair, all pairs, and the spectrum, of every matrix."""
        for columns in _select_columns(self._layout) if self._grams else ():
            yield from _create_tests(columns.title, _evaluate_gram(self._grams[columns.title], columns, self._layout))
        yield from _create_tests("runs", self._runs.evaluate())


def _select_columns(layout: Layout) -> list[_Columns]:
    """Select the matrices that are small enough, and have at least two columns."""
    learners = len(layout.learners)
    counts = {
        _LEARNERS: layout.sequence_count,
        _COORDINATES: learners * layout.numbers_per_message,
        _ROUNDS: learners * layout.rounds,
        _PLACES: learners * layout.rounds * layout.numbers_per_message,
    }
    return [columns for columns, count in counts.items() if 1 < count <= MAX_COLUMNS]


_WORST, _ALL, _SIZES, _SPECTRUM = "pairs of", "all pairs of", "all pairs of sizes of", "spectrum of"

_DESCRIPTIONS = {
    _WORST: "no two {} are correlated",
    _ALL: "all pairs of {} together are not correlated",
    _SIZES: "sizes of all pairs of {} together are not correlated",
    _SPECTRUM: "no sum over {} is larger or smaller than of independent noise",
}


def _create_tests(title: str, results: Mapping[str, list[_Result]]) -> Iterator[Test]:
    """Create a test for each statistic: the least likely one, times their number."""
    for statistic, each in results.items():
        if each:
            least = _select_least(each)
            p_value = min(1.0, least.p_value * len(each))
            description = _DESCRIPTIONS[statistic].format(title)
            is_primary = title == _COORDINATES.title and statistic == _SIZES
            yield Test(f"{statistic} {title}", description, least.statistic, p_value, least.where, is_primary)


def _evaluate_gram(gram: _Gram, columns: _Columns, layout: Layout) -> dict[str, list[_Result]]:
    """Evaluate a matrix by statistic."""
    results: dict[str, list[_Result]] = {statistic: [] for statistic in _DESCRIPTIONS}
    for p_value, _, rho, score, first, second in gram.find_worst_pairs():
        where = f"{_SCORES[score]} of {columns.name(layout, first)}, and of {columns.name(layout, second)}"
        results[_WORST].append(_Result(p_value, rho, where))
    for score, statistic in enumerate((_ALL, _SIZES)):
        total, mean, variance, pairs = gram.sum_all_pairs(score)
        if pairs > _MAX_PAIRS_WITHOUT_GAMMA:
            results[statistic].append(
                _Result(_compute_all_pairs_p(total, mean, variance), total / mean, f"{pairs} pairs")
            )
    for score, score_name in enumerate(_SCORES):
        results[_SPECTRUM] += [
            _Result(p, each, f"{score_name}, {value_name}") for p, each, value_name in gram.compute_spectrum(score)
        ]
    return results


class _Tally:
    """Least likely of many results, and their number."""

    def __init__(self) -> None:
        self.least, self.count = _Result(np.inf), 0

    def add(self, result: _Result, count: int) -> None:
        self.least, self.count = _select_least([self.least, result]), self.count + count

    def list_results(self) -> list[_Result]:
        return [replace(self.least, p_value=self.least.p_value * self.count)] if self.count else []


class _Runs:
    """Statistics of runs as columns, block by block: the results of each matrix are kept, not the matrix."""

    def __init__(self) -> None:
        self._worst_pairs, self._spectra = _Tally(), _Tally()
        self._all = np.zeros((len(_SCORES), 3))
        self._pair_count = 0

    def add(self, gram: _Gram) -> None:
        for p_value, pairs, rho, score, first, second in gram.find_worst_pairs():
            where = f"{_SCORES[score]} of runs {first} and {second} of a block"
            self._worst_pairs.add(_Result(p_value / pairs, rho, where), pairs)
        for score, score_name in enumerate(_SCORES):
            *sums, pairs = gram.sum_all_pairs(score)
            self._all[score] += sums
            self._pair_count += pairs
            for p_value, each, value_name in gram.compute_spectrum(score):
                self._spectra.add(_Result(p_value, each, f"{score_name} of a block of runs, {value_name}"), 1)

    def merge(self, other: Self) -> None:
        self._worst_pairs.add(other._worst_pairs.least, other._worst_pairs.count)
        self._spectra.add(other._spectra.least, other._spectra.count)
        self._all += other._all
        self._pair_count += other._pair_count

    def evaluate(self) -> dict[str, list[_Result]]:
        results = {_WORST: self._worst_pairs.list_results(), _SPECTRUM: self._spectra.list_results()}
        if self._pair_count > len(_SCORES) * _MAX_PAIRS_WITHOUT_GAMMA:
            for statistic, (total, mean, variance) in zip((_ALL, _SIZES), self._all, strict=True):
                results[statistic] = [
                    _Result(_compute_all_pairs_p(total, mean, variance), total / mean, "runs of one block")
                ]
        return {statistic: results[statistic] for statistic in _DESCRIPTIONS if statistic in results}
