"""Dependence between places: correlations of all pairs of columns, and spectra.

A lag adds up what is equally far apart; here every pair stands for itself, so that one pair among a million is seen, and noise
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

# ---- laws ----------------------------------------------------------------------------------------------------------

_MIN_SAMPLES = 8
"""Samples below which no pair is judged: rounding shows in a correlation close to one."""


def _correlation_p(rho: FloatArray, samples: FloatArray | IntArray) -> FloatArray:
    """Two-sided, of an uncentred correlation of normal numbers: `rho sqrt((n-1)/(1-rho^2))` is t with n - 1; exact."""
    left = np.maximum(1.0 - rho**2, 1e-6)  # sums are in single precision
    judged = samples >= _MIN_SAMPLES
    freedom = np.where(judged, samples - 1.0, 1.0)
    found: FloatArray = np.where(judged, 2.0 * special.stdtr(freedom, -np.abs(rho) * np.sqrt(freedom / left)), 1.0)
    return found


def _largest_law(samples: int, columns: int) -> tuple[float, float]:
    """Centre and scale of the largest squared singular value of a normal matrix (Johnstone 2001; Tracy and Widom's law)."""
    a, b = math.sqrt(samples - 0.5), math.sqrt(columns - 0.5)
    return (a + b) ** 2, (a + b) * (1.0 / a + 1.0 / b) ** (1.0 / 3.0)


def _tracy_widom_p(value: float) -> float:
    """Upper tail of the law for real matrices, by a gamma law (Chiani 2014)."""
    return float(special.gammaincc(46.446, max(0.0, value + 9.84801) / 0.186054))


def _largest_p(square: float, samples: int, columns: int) -> float:
    """Of the largest squared singular value being this large.

    A limit law: for 2 to 40 columns and 16 to 1,000 samples it was at most 1.8 times too small, at p-values down to 1e-3.
    """
    centre, scale = _largest_law(samples, columns)
    return _tracy_widom_p((square - centre) / scale)


def _smallest_p(square: float, samples: int, columns: int) -> float:
    """Of the smallest squared singular value being this small (Davidson and Szarek 2001): valid for every size."""
    more, less = max(samples, columns), min(samples, columns)
    short = math.sqrt(more) - math.sqrt(less) - math.sqrt(max(0.0, square))
    return math.exp(-(short**2) / 2.0) if short > 0.0 else 1.0


# ---- columns ---------------------------------------------------------------------------------------------------------

_MIN_GAMMA_SAMPLES = 16
"""Below so many, correlations of all pairs together have no gamma law."""

_Singles = npt.NDArray[np.float32]


class _Gram:
    """Sums over samples of products of columns.

    Attributes:
        sums: `(scores, columns, columns)`.
        squares: of a column, over the samples in which another one is known, too; likewise.
        counts: `(columns, columns)` samples in which both are known.
    """

    def __init__(self, scores: _Singles, known: BoolArray) -> None:
        """From `scores (scores, samples, columns)`, 0 where unknown."""
        self.sums: _Singles = scores.swapaxes(-1, -2) @ scores
        alive, some = (np.asarray(known.any(axis=axis)) for axis in (0, 1))
        if known[some][:, alive].all():  # as almost always: every sample has all columns
            both = (alive[:, None] & alive).astype(np.float32)
            self.counts: _Singles = np.count_nonzero(some) * both
            self.squares: _Singles = np.diagonal(self.sums, axis1=1, axis2=2)[:, :, None] * both
        else:
            there = known.astype(np.float32)
            self.counts = there.T @ there
            self.squares = (scores**2).swapaxes(-1, -2) @ there

    def __add__(self, other: _Gram) -> _Gram:
        """Of both samples."""
        found = copy(self)
        for name in ("sums", "squares", "counts"):
            setattr(found, name, getattr(self, name) + getattr(other, name))
        return found

    def worst_pair(self) -> Iterator[tuple[float, int, float, int, int, int]]:
        """For every score: p-value times pairs, pairs, correlation, score and the pair that is correlated most."""
        judged = np.triu(self.counts >= _MIN_SAMPLES, 1)
        pairs = int(np.count_nonzero(judged))
        for s in range(len(self.sums) if pairs else 0):
            rho = self._rho(s)
            # Among pairs of equally many samples the largest correlation is the least likely one.
            most = [
                np.where(judged & (self.counts == n), np.abs(rho), -1.0).argmax()
                for n in np.unique(self.counts[judged])
            ]
            at = np.unravel_index(np.array(most), rho.shape)
            p_values = _correlation_p(rho[at], self.counts[at].astype(np.float64))
            k = int(p_values.argmin())
            yield float(p_values[k]) * pairs, pairs, float(rho[at][k]), s, int(at[0][k]), int(at[1][k])

    def all_pairs(self, score: int) -> tuple[float, float, float, int]:
        """Sum of squared correlations, what it is on average and its variance under the claim (exact), and pairs."""
        above = np.triu(self.counts >= _MIN_GAMMA_SAMPLES, 1)
        n = self.counts[above].astype(np.float64)
        squares = self._rho(score)[above] ** 2
        return float(squares.sum()), float((1.0 / n).sum()), float((2.0 * (n - 1.0) / (n**2 * (n + 2.0))).sum()), n.size

    def spectrum(self, score: int) -> Iterator[tuple[float, float, str]]:
        """Of the largest and of the smallest singular value: p-value, its square per sample, and which.

        None where something is unknown, and with fewer samples than columns: the transposed matrix has the same ones.
        """
        alive = np.diagonal(self.counts) > 0
        own, counts = self.sums[score][alive][:, alive], self.counts[alive][:, alive]
        columns = len(own)
        if columns < 2 or counts.min() != counts.max() or counts.min() < max(_MIN_SAMPLES, columns):
            return
        n = int(counts[0, 0])
        squares = np.linalg.eigvalsh(own.astype(np.float64))
        yield _largest_p(float(squares[-1]), n, columns), float(squares[-1]) / n, "largest singular value"
        yield _smallest_p(float(squares[0]), n, columns), float(squares[0]) / n, "smallest singular value"

    def _rho(self, score: int) -> FloatArray:
        squares = self.squares[score].astype(np.float64)
        lengths = np.sqrt(squares * squares.T)
        rho: FloatArray = np.where(lengths > 0.0, self.sums[score] / np.maximum(lengths, 1e-30), 0.0)
        return np.clip(rho, -1.0, 1.0)


def _all_pairs_p(total: float, mean: float, variance: float) -> float:
    """Two-sided, of a sum of squared correlations: a gamma law of its mean and variance."""
    shape, scale = mean**2 / variance, variance / mean
    return 2.0 * min(0.5, float(special.gammainc(shape, total / scale)), float(special.gammaincc(shape, total / scale)))


# ---- all pairs -------------------------------------------------------------------------------------------------------

MAX_COLUMNS = 1500
"""Most columns of a matrix: it takes 2 x 4 bytes of the square of this."""

_MAX_PAIRS_WITHOUT_GAMMA = 30
"""So many pairs or fewer have no gamma law."""

_SCORES = ("values", "sizes")


@dataclass(frozen=True, slots=True)
class _Found:
    """What a test of one matrix comes to: a p-value, what it was computed from, and where."""

    p_value: float
    statistic: float = 0.0
    where: str = ""


def _least(found: Sequence[_Found]) -> _Found:
    return min(found, key=lambda each: each.p_value)


@dataclass(frozen=True, slots=True)
class _Columns:
    """One way to lay numbers out: the axes of `(learners, rounds, runs, numbers)` that are samples; the others are columns."""

    what: str
    samples: tuple[int, ...]
    name: Callable[[Layout, int], str]
    by_voice: bool = False

    def of(self, layout: Layout, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`(samples, columns)`."""
        laid = layout.stack_sequences(numbers) if self.by_voice else numbers
        others = tuple(axis for axis in range(4) if axis not in self.samples)
        length = math.prod(laid.shape[axis] for axis in self.samples)
        return laid.transpose(*self.samples, *others).reshape(length, -1)

    def gram(self, layout: Layout, block: Block) -> _Gram:
        """Of the runs of a block."""
        scores = np.stack(
            [self.of(layout, each).astype(np.float32) for each in (block.normal_scores, block.normal_size_scores)]
        )
        return _Gram(scores, self.of(layout, block.is_known).astype(np.bool_))


def _learner_coordinate(layout: Layout, at: int) -> str:
    i, k = divmod(at, layout.numbers_per_message)
    return f"{layout.learners[i]}, {layout.name_coordinate(k)}"


def _learner_round(layout: Layout, at: int) -> str:
    i, t = divmod(at, layout.rounds)
    return f"{layout.learners[i]}, round {t}"


_LEARNERS = _Columns("learners", (1, 2, 3), lambda layout, at: layout.name_sequence(at), by_voice=True)
_COORDINATES = _Columns("coordinates of learners", (1, 2), _learner_coordinate)
_ROUNDS = _Columns("rounds of learners", (2, 3), _learner_round)
_PLACES = _Columns("places", (2,), lambda layout, at: layout.name_place(at))
_RUNS = _Columns("runs", (0, 1, 3), lambda layout, at: f"run {at} of a block")


class Correlations(ConformanceTest):
    """Matrices of scores of values and of sizes.

    Sums over runs are kept for learners, coordinates, rounds and places. Runs themselves are columns within a block only;
    across blocks, what is said again is found by its keys (`freshness`).
    """

    part: ClassVar[BudgetPart] = "dependence"

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        self._grams: dict[str, _Gram] = {}
        self._runs = _Runs()

    def add(self, block: Block) -> None:
        self._gather({columns.what: columns.gram(self._layout, block) for columns in _kept(self._layout)})
        if 1 < block.runs <= MAX_COLUMNS:
            self._runs.add(_RUNS.gram(self._layout, block))

    def merge(self, other: Self) -> None:
        self._gather(other._grams)
        self._runs.merge(other._runs)

    def _gather(self, grams: Mapping[str, _Gram]) -> None:
        for what, gram in grams.items():
            self._grams[what] = self._grams[what] + gram if what in self._grams else gram

    def _every(self) -> Iterator[Test]:
        """Worst pair, all pairs, and spectrum, of every matrix."""
        for columns in _kept(self._layout) if self._grams else ():
            yield from _judged(columns.what, _of(self._grams[columns.what], columns, self._layout))
        yield from _judged("runs", self._runs.found())


def _kept(layout: Layout) -> list[_Columns]:
    """The matrices that are small enough, and have two columns."""
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


def _judged(what: str, found: Mapping[str, list[_Found]]) -> Iterator[Test]:
    """A test for each statistic: the least likely, times what was looked at."""
    for statistic, each in found.items():
        if each:
            least = _least(each)
            p_value = min(1.0, least.p_value * len(each))
            says, primary = _DESCRIPTIONS[statistic].format(what), what == _COORDINATES.what and statistic == _SIZES
            yield Test(f"{statistic} {what}", says, least.statistic, p_value, least.where, primary)


def _of(gram: _Gram, columns: _Columns, layout: Layout) -> dict[str, list[_Found]]:
    """What a matrix comes to, by statistic."""
    found: dict[str, list[_Found]] = {statistic: [] for statistic in _DESCRIPTIONS}
    for p_value, _, rho, score, first, second in gram.worst_pair():
        where = f"{_SCORES[score]} of {columns.name(layout, first)}, and of {columns.name(layout, second)}"
        found[_WORST].append(_Found(p_value, rho, where))
    for score, statistic in enumerate((_ALL, _SIZES)):
        total, mean, variance, pairs = gram.all_pairs(score)
        if pairs > _MAX_PAIRS_WITHOUT_GAMMA:
            found[statistic].append(_Found(_all_pairs_p(total, mean, variance), total / mean, f"{pairs} pairs"))
    for score, of in enumerate(_SCORES):
        found[_SPECTRUM] += [_Found(p, each, f"{of}, {which}") for p, each, which in gram.spectrum(score)]
    return found


class _Tally:
    """The least likely of many statistics, and how many there are."""

    def __init__(self) -> None:
        self.least, self.count = _Found(np.inf), 0

    def add(self, found: _Found, count: int) -> None:
        self.least, self.count = _least([self.least, found]), self.count + count

    def found(self) -> list[_Found]:
        return [replace(self.least, p_value=self.least.p_value * self.count)] if self.count else []


class _Runs:
    """Runs beside each other, a block at a time: what its matrix came to is kept, not the matrix."""

    def __init__(self) -> None:
        self._worst, self._spectra = _Tally(), _Tally()
        self._all = np.zeros((len(_SCORES), 3))
        self._together = 0

    def add(self, gram: _Gram) -> None:
        for p_value, pairs, rho, score, first, second in gram.worst_pair():
            where = f"{_SCORES[score]} of runs {first} and {second} of a block"
            self._worst.add(_Found(p_value / pairs, rho, where), pairs)
        for score, of in enumerate(_SCORES):
            *sums, pairs = gram.all_pairs(score)
            self._all[score] += sums
            self._together += pairs
            for p_value, each, which in gram.spectrum(score):
                self._spectra.add(_Found(p_value, each, f"{of} of a block of runs, {which}"), 1)

    def merge(self, other: Self) -> None:
        self._worst.add(other._worst.least, other._worst.count)
        self._spectra.add(other._spectra.least, other._spectra.count)
        self._all += other._all
        self._together += other._together

    def found(self) -> dict[str, list[_Found]]:
        found = {_WORST: self._worst.found(), _SPECTRUM: self._spectra.found()}
        if self._together > len(_SCORES) * _MAX_PAIRS_WITHOUT_GAMMA:
            for statistic, (total, mean, variance) in zip((_ALL, _SIZES), self._all, strict=True):
                found[statistic] = [_Found(_all_pairs_p(total, mean, variance), total / mean, "runs of one block")]
        return {statistic: found[statistic] for statistic in _DESCRIPTIONS if statistic in found}
