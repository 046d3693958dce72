"""Dependence between places: correlations of all pairs of columns, and spectra.

A lag adds up what is equally far apart; here every pair stands for itself, so that one pair among a million is seen, and noise
that sums to zero over all learners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray
from sottovoce_core.auditing.bounds import Test
from sottovoce_core.auditing.conformance.block import Block, Layout
from sottovoce_core.auditing.conformance.p_values import FEW, correlation_p, largest_p, smallest_p

# ---- columns ---------------------------------------------------------------------------------------------------------

_SAMPLES = 16
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

    def add(self, other: _Gram) -> None:
        """Take in other samples."""
        self.sums = self.sums + other.sums
        self.counts = self.counts + other.counts
        self.squares = self.squares + other.squares

    def worst_pair(self) -> Iterator[tuple[float, int, float, int, int, int]]:
        """For every score: p-value times pairs, pairs, correlation, score and the pair that is correlated most."""
        judged = np.triu(self.counts >= FEW, 1)
        pairs = int(np.count_nonzero(judged))
        for s in range(len(self.sums) if pairs else 0):
            rho = self._rho(s)
            # Among pairs of equally many samples the largest correlation is the least likely one.
            most = [
                np.where(judged & (self.counts == n), np.abs(rho), -1.0).argmax()
                for n in np.unique(self.counts[judged])
            ]
            at = np.unravel_index(np.array(most), rho.shape)
            p_values = correlation_p(rho[at], self.counts[at].astype(np.float64))
            k = int(p_values.argmin())
            yield float(p_values[k]) * pairs, pairs, float(rho[at][k]), s, int(at[0][k]), int(at[1][k])

    def all_pairs(self, score: int) -> tuple[float, float, float, int]:
        """Sum of squared correlations, what it is on average and its variance under the claim (exact), and pairs."""
        above = np.triu(self.counts >= _SAMPLES, 1)
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
        if columns < 2 or counts.min() != counts.max() or counts.min() < max(FEW, columns):
            return
        n = int(counts[0, 0])
        squares = np.linalg.eigvalsh(own.astype(np.float64))
        yield largest_p(float(squares[-1]), n, columns), float(squares[-1]) / n, "largest singular value"
        yield smallest_p(float(squares[0]), n, columns), float(squares[0]) / n, "smallest singular value"

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

COLUMNS = 1500
"""Most columns of a matrix: it takes 2 x 4 bytes of the square of this."""

_PAIRS = 30
"""So many pairs or fewer have no gamma law."""

_SCORES = ("values", "sizes")


@dataclass(frozen=True, slots=True)
class _Found:
    """What a test of one matrix comes to: a p-value, what it was computed from, and where."""

    p_value: float
    statistic: float = 0.0
    where: str = ""


@dataclass(frozen=True, slots=True)
class _Columns:
    """One way to lay numbers out: the axes of `(learners, rounds, runs, numbers)` that are samples; the others are columns."""

    what: str
    samples: tuple[int, ...]
    name: Callable[[Layout, int], str]
    by_voice: bool = False

    def of(self, layout: Layout, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`(samples, columns)`."""
        laid = layout.by_voice(numbers) if self.by_voice else numbers
        others = tuple(axis for axis in range(4) if axis not in self.samples)
        length = math.prod(laid.shape[axis] for axis in self.samples)
        return laid.transpose(*self.samples, *others).reshape(length, -1)

    def gram(self, layout: Layout, block: Block) -> _Gram:
        """Of the runs of a block."""
        scores = np.stack([self.of(layout, each).astype(np.float32) for each in (block.normal, block.normal_sizes)])
        return _Gram(scores, self.of(layout, block.known).astype(np.bool_))


def _learner_coordinate(layout: Layout, at: int) -> str:
    i, k = divmod(at, layout.numbers)
    return f"{layout.learner(i)}, {layout.number(k)}"


def _learner_round(layout: Layout, at: int) -> str:
    i, t = divmod(at, layout.rounds)
    return f"{layout.learner(i)}, round {t}"


_LEARNERS = _Columns("learners", (1, 2, 3), lambda layout, at: layout.voice(at), by_voice=True)
_COORDINATES = _Columns("coordinates of learners", (1, 2), _learner_coordinate)
_ROUNDS = _Columns("rounds of learners", (2, 3), _learner_round)
_PLACES = _Columns("places", (2,), lambda layout, at: layout.place(at))
_RUNS = _Columns("runs", (0, 1, 3), lambda layout, at: f"run {at} of a block")


class Pairs:
    """Matrices of scores of values and of sizes.

    Sums over runs are kept for learners, coordinates, rounds and places. Runs themselves are columns within a block only;
    across blocks, what is said again is found by its keys (`freshness`).
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._grams: dict[str, _Gram] = {}
        self._runs = _Runs()

    def add(self, block: Block) -> None:
        """Look at some more runs."""
        layout = self._layout = self._layout or Layout.of(block)
        for what, columns in _kept(layout).items():
            self._gather(what, columns.gram(layout, block))
        if 1 < block.runs <= COLUMNS:
            self._runs.add(_RUNS.gram(layout, block))

    def merge(self, other: Self) -> None:
        """Take in what another one keeps."""
        self._layout = self._layout or other._layout
        for what, gram in other._grams.items():
            self._gather(what, gram)
        self._runs.merge(other._runs)

    def _gather(self, what: str, gram: _Gram) -> None:
        if what in self._grams:
            self._grams[what].add(gram)
        else:
            self._grams[what] = gram

    def tests(self) -> Iterator[Test]:
        """Worst pair, all pairs, and spectrum, of every matrix."""
        if self._layout is None:
            return
        for what, columns in _kept(self._layout).items():
            if what in self._grams:
                yield from _judged(what, _of(self._grams[what], columns, self._layout), primary=columns is _COORDINATES)
        yield from _judged("runs", self._runs.found(), primary=False)


def _kept(layout: Layout) -> Mapping[str, _Columns]:
    """The matrices that are small enough, and have two columns."""
    learners = len(layout.learners)
    counts = {
        _LEARNERS: layout.voices,
        _COORDINATES: learners * layout.numbers,
        _ROUNDS: learners * layout.rounds,
        _PLACES: learners * layout.rounds * layout.numbers,
    }
    return {columns.what: columns for columns, count in counts.items() if 1 < count <= COLUMNS}


_WORST, _ALL, _SIZES, _SPECTRUM = "pairs of", "all pairs of", "all pairs of sizes of", "spectrum of"

_SAYS = {
    _WORST: "no two {} are correlated",
    _ALL: "all pairs of {} together are not correlated",
    _SIZES: "sizes of all pairs of {} together are not correlated",
    _SPECTRUM: "no sum over {} is larger or smaller than of independent noise",
}


def _judged(what: str, found: Mapping[str, list[_Found]], *, primary: bool) -> Iterator[Test]:
    """A test for each statistic: the least likely, times what was looked at."""
    for statistic, each in found.items():
        if each:
            least = min(each, key=lambda one: one.p_value)
            p_value = min(1.0, least.p_value * len(each))
            says = _SAYS[statistic].format(what)
            yield Test(
                f"{statistic} {what}", says, least.statistic, p_value, least.where, primary and statistic == _SIZES
            )


def _of(gram: _Gram, columns: _Columns, layout: Layout) -> dict[str, list[_Found]]:
    """What a matrix comes to, by statistic."""
    found: dict[str, list[_Found]] = {statistic: [] for statistic in _SAYS}
    for p_value, _, rho, score, first, second in gram.worst_pair():
        where = f"{_SCORES[score]} of {columns.name(layout, first)}, and of {columns.name(layout, second)}"
        found[_WORST].append(_Found(p_value, rho, where))
    for score, statistic in enumerate((_ALL, _SIZES)):
        total, mean, variance, pairs = gram.all_pairs(score)
        if pairs > _PAIRS:
            found[statistic].append(_Found(_all_pairs_p(total, mean, variance), total / mean, f"{pairs} pairs"))
    for score, of in enumerate(_SCORES):
        found[_SPECTRUM] += [_Found(p, each, f"{of}, {which}") for p, each, which in gram.spectrum(score)]
    return found


class _Runs:
    """Runs beside each other, a block at a time: what its matrix came to is kept, not the matrix."""

    def __init__(self) -> None:
        self._worst = _Found(np.inf)
        self._pairs = 0
        self._all = np.zeros((len(_SCORES), 3))
        self._together = 0
        self._spectrum = _Found(np.inf)
        self._spectra = 0

    def add(self, gram: _Gram) -> None:
        for p_value, pairs, rho, score, first, second in gram.worst_pair():
            where = f"{_SCORES[score]} of runs {first} and {second} of a block"
            self._worst = min(self._worst, _Found(p_value / pairs, rho, where), key=lambda each: each.p_value)
            self._pairs += pairs
        for score, of in enumerate(_SCORES):
            *sums, pairs = gram.all_pairs(score)
            self._all[score] += sums
            self._together += pairs
            for p_value, each, which in gram.spectrum(score):
                found = _Found(p_value, each, f"{of} of a block of runs, {which}")
                self._spectrum = min(self._spectrum, found, key=lambda each: each.p_value)
                self._spectra += 1

    def merge(self, other: Self) -> None:
        self._worst = min(self._worst, other._worst, key=lambda each: each.p_value)
        self._spectrum = min(self._spectrum, other._spectrum, key=lambda each: each.p_value)
        self._pairs += other._pairs
        self._all += other._all
        self._together += other._together
        self._spectra += other._spectra

    def found(self) -> dict[str, list[_Found]]:
        found: dict[str, list[_Found]] = {}
        if self._pairs:
            found[_WORST] = [_Found(self._worst.p_value * self._pairs, self._worst.statistic, self._worst.where)]
        if self._together > len(_SCORES) * _PAIRS:
            for statistic, (total, mean, variance) in zip((_ALL, _SIZES), self._all, strict=True):
                found[statistic] = [_Found(_all_pairs_p(total, mean, variance), total / mean, "runs of one block")]
        if self._spectra:
            least = self._spectrum
            found[_SPECTRUM] = [_Found(least.p_value * self._spectra, least.statistic, least.where)]
        return found
