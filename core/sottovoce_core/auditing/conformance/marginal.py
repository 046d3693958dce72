"""Tests of single numbers: scale, tails, support, signs, shape.

Sizes of standard Laplace numbers are exponential, so sums of N of them are distributed as Gamma(N), exactly; and `exp(-size)`
is uniform, so the count of numbers in a given interval is binomial. All tests follow from sums by group and from one
histogram.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.p_values import (
    Scales,
    StatisticsAndPValues,
    compute_binomial_p_values,
    compute_gamma_p_value,
    judge_dyadic_counts,
    judge_even_counts,
    pool_tests,
    select_worst_test,
)

_NEAR = 2.0**-34
"""Distance from zero, in scales, below which numbers count as zero: 64 lattice points, beyond the rounding of a replay.

Standard Laplace numbers are this close to any given number with a probability below this.
"""

_MAX_NEAR_ZERO_SIZE = 2.0**-5
"""Maximum size of the numbers whose distance from zero is tested."""
_MAX_NEAR_ZERO_LEVEL = 34
_MAX_TAIL_LEVEL = 64

_BINS = 2**14
"""Count of bins of a histogram: the first bits of a float32 number. Sign, exponent, and 5 bits of the mantissa."""
_EDGES = np.ldexp(1.0 + np.arange(_BINS // 2) % 32 / 32.0, np.arange(_BINS // 2) // 32 - 127)
_CELL = np.minimum(64.0 * np.where(_EDGES <= 1.0, _EDGES, 0.0), 63.0).astype(np.intp)
_CELLS = np.concatenate([127 - _CELL, _CELL])
"""Cell of each bin, out of 128 equal cells of `F(r)`: F is `1 - exp(-r)/2` above zero, and `exp(r)/2` below."""


def _count_tails(histograms: IntArray) -> IntArray:
    """Count the uniform numbers below `2^-j`, `(places, 64)`; all of them at 0."""
    octaves = histograms.reshape(-1, 2, 256, 32).sum(axis=(1, 3)).cumsum(axis=1)
    below: IntArray = octaves[:, 126 - np.arange(_MAX_TAIL_LEVEL)]  # float32's exponent 127 is that of 1
    below[:, 0] = octaves[:, -1]
    return below


class Marginal(ConformanceTest):
    """Tests of single numbers: scale, tails, support, signs, shape. Places are learners, each field separately."""

    part: ClassVar[BudgetPart] = "marginal"
    additive_names: ClassVar[tuple[str, ...]] = (
        *("_runs", "_histogram", "_tails", "_near", "_cells", "_signs", "_zeros"),
        *("_sums", "_counts", "_round_sums", "_round_counts"),
    )

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        learners, places = len(layout.learners), layout.sequence_count
        self._runs = 0
        self._histogram = np.zeros(_BINS, np.int64)
        """Histogram of `exp(-size)`, with the sign of the number."""
        self._tails = np.zeros((places, _MAX_TAIL_LEVEL), np.int64)
        """Counts of sizes above `j ln 2`; of all numbers at 0."""
        self._near = np.zeros((places, _MAX_NEAR_ZERO_LEVEL + 1), np.int64)
        """Counts of numbers with `1 - exp(-size)` below `2^-j`; of all numbers at 0."""
        self._cells = np.zeros((places, 128), np.int64)
        """Counts of numbers in equal cells of `F(r)`."""
        self._signs = np.zeros((learners, layout.numbers_per_message, 2), np.int64)
        """Counts of positive numbers, and of non-zero numbers."""
        self._zeros = np.zeros(places, np.int64)
        """Counts of numbers closer to zero than `_NEAR`."""
        self._largest = np.zeros(places)
        """Largest size."""
        self._sums = np.zeros((learners, layout.numbers_per_message))
        self._counts = np.zeros((learners, layout.numbers_per_message), np.int64)
        """Sums of sizes, and their counts; by learner and coordinate, and by learner and round."""
        self._round_sums = np.zeros((learners, layout.rounds))
        self._round_counts = np.zeros((learners, layout.rounds), np.int64)
        self._by_run, self._by_message = Scales(), Scales()

    def add(self, block: Block) -> None:
        if not block.count:
            return
        learners, rounds, runs, numbers = block.values.shape
        fields = [part for _, part in block.layout.iterate_field_slices()]
        histograms = np.zeros((len(self._zeros), _BINS), np.int64)
        sums, message_sums = np.zeros((learners, numbers)), np.zeros((learners, rounds, runs))
        message_counts = np.zeros((learners, rounds, runs), np.int64)
        for i, part_runs, piece in block.iterate_pieces():
            sizes, known = piece.sizes[0], piece.is_known[0]
            is_complete = known.all()
            if not is_complete:
                sizes = np.where(known, sizes, 0.0)
            message_sums[i, :, part_runs] = sizes.sum(axis=-1)
            message_counts[i, :, part_runs] = numbers if is_complete else known.sum(axis=-1)
            sums[i] += sizes.sum(axis=(0, 1))
            self._counts[i] += sizes.size // numbers if is_complete else known.sum(axis=(0, 1))
            negative = piece.values[0] < 0.0
            positive, below = (np.count_nonzero(each, axis=(0, 1)) for each in (piece.values[0] > 0.0, negative))
            self._signs[i] += np.stack([positive, positive + below], axis=-1)
            for place, part in enumerate(fields, i * len(fields)):
                mask = slice(None) if is_complete else known[..., part]
                histograms[place] += self._add_sizes(place, sizes[..., part][mask], negative[..., part][mask])
        self._near[:, 0] += histograms.sum(axis=1)
        self._histogram += histograms.sum(axis=0)
        self._tails += _count_tails(histograms)
        self._cells += np.array([np.bincount(_CELLS, each, 128) for each in histograms]).astype(np.int64)
        self._sums += sums
        self._round_sums += message_sums.sum(axis=-1)
        self._round_counts += message_counts.sum(axis=-1)
        self._merge_scales(
            runs,
            Scales.from_sums(message_sums.sum(axis=(0, 1)), message_counts.sum(axis=(0, 1))),
            Scales.from_sums(message_sums, message_counts)
            if numbers > 1
            else Scales(),  # a message of one number is that number
        )

    def _add_sizes(self, place: int, sizes: FloatArray, negative: BoolArray) -> IntArray:
        """Add sizes of a place, with a mask of the negative ones; return their histogram."""
        close = sizes[sizes < _MAX_NEAR_ZERO_SIZE]
        level = np.clip(-np.frexp(np.maximum(-np.expm1(-close), _NEAR / 2.0))[1], 0, _MAX_NEAR_ZERO_LEVEL)
        self._near[place, 1:] += np.bincount(level, minlength=_MAX_NEAR_ZERO_LEVEL + 1)[::-1].cumsum()[::-1][1:]
        self._zeros[place] += np.count_nonzero(close < _NEAR)
        self._largest[place] = max(self._largest[place], sizes.max(initial=0.0))
        # Rounding to float32 moves an edge by 2^-25 of itself: far less than chance does.
        uniform = np.exp(-sizes).astype(np.float32).reshape(-1)
        bins = uniform.view(np.uint32) | negative.reshape(-1).astype(np.uint32) << 31  # with the sign of the number
        bins >>= 18
        return np.bincount(bins.astype(np.intp), minlength=_BINS)

    def merge(self, other: Self) -> None:
        self._largest = np.maximum(self._largest, other._largest)
        self._merge_scales(0, other._by_run, other._by_message)
        super().merge(other)

    def _merge_scales(self, runs: int, by_run: Scales, by_message: Scales) -> None:
        """Merge the scales of further runs."""
        self._by_run = self._by_run.merge(by_run, (self._runs,))
        self._by_message = self._by_message.merge(by_message, (0, 0, self._runs))
        self._runs += runs

    def _iterate_tests(self) -> Iterator[Test]:
        if self._runs:
            yield from self._test_scales()
            yield from self._test_signs()
            yield from self._test_sizes()

    def _test_scales(self) -> Iterator[Test]:
        """Test sums of sizes, of all numbers and by group."""
        total, count = float(self._sums.sum()), int(self._counts.sum())
        yield Test("scale", "the mean size is the scale", total / count, compute_gamma_p_value(total, count), "")
        layout = self._layout
        learners, numbers, places = layout.learners, layout.coordinates, layout.sequence_names
        several = len(learners) > 1
        starts = [part.start for _, part in layout.iterate_field_slices()]
        by_field = np.add.reduceat(self._sums, starts, axis=1), np.add.reduceat(self._counts, starts, axis=1)
        yield from Scales.from_sums(by_field[0].reshape(-1), by_field[1].reshape(-1)).compute_scale_tests(
            "learner", lambda k: places[k[0]]
        )
        coordinates = Scales.from_sums(self._sums, self._counts)
        rounds = Scales.from_sums(self._round_sums, self._round_counts)
        if len(numbers) > 1:
            all_learners = Scales.from_sums(self._sums.sum(axis=0), self._counts.sum(axis=0))
            yield from all_learners.compute_scale_tests("coordinate", lambda k: numbers[k[0]])
            yield from coordinates.compute_dispersion_tests("coordinate")
        if self._round_sums.shape[1] > 1:
            all_learners = Scales.from_sums(self._round_sums.sum(axis=0), self._round_counts.sum(axis=0))
            yield from all_learners.compute_scale_tests("round", lambda k: f"round {k[0]}")
            yield from rounds.compute_dispersion_tests("round")
        if several and len(numbers) > 1:
            yield from coordinates.compute_scale_tests(
                "learner's coordinate", lambda k: f"{learners[k[0]]}, {numbers[k[1]]}"
            )
        if several and self._round_sums.shape[1] > 1:
            yield from rounds.compute_scale_tests("learner's round", lambda k: f"{learners[k[0]]}, round {k[1]}")
        yield from self._by_run.compute_scale_tests("run", lambda k: f"run {k[0]}")
        yield from self._by_run.compute_dispersion_tests("run")
        yield from self._by_message.compute_scale_tests(
            "message", lambda k: f"{learners[k[0]]}, round {k[1]}, run {k[2]}"
        )
        yield from self._by_message.compute_dispersion_tests("message")

    def _test_signs(self) -> Iterator[Test]:
        """Test the signs of the non-zero numbers."""
        description, (learners, numbers, _) = "both signs are as likely", self._signs.shape
        counts = self._signs.reshape(-1, 2)
        yield from pool_tests("signs", description, _judge_halves, counts, is_primary=True)
        if learners * numbers > 1:
            yield from select_worst_test(
                "coordinate signs",
                description,
                _judge_halves(counts),
                lambda k: f"{self._layout.learners[k[0] // numbers]}, {self._layout.coordinates[k[0] % numbers]}",
            )

    def _test_sizes(self) -> Iterator[Test]:
        """Test the counts of large and small numbers; the largest; the shape of the distribution."""
        places, description = self._layout.sequence_names, "as many numbers are large as the distribution implies"
        tail_names = [f"sizes above {math.log(2.0) * j:.3g}" for j in range(_MAX_TAIL_LEVEL)]
        yield from pool_tests(
            "tails", description, judge_dyadic_counts, self._tails, lambda k: tail_names[k + 1], places, is_primary=True
        )
        count, largest = int(self._counts.sum()), float(self._largest.max())
        largest_place = places[int(self._largest.argmax())]
        yield Test(
            "largest",
            "the largest number is as large as expected",
            largest,
            _compute_maximum_p_value(largest, count),
            largest_place,
        )
        description = "as many numbers are close to zero as the distribution implies"
        yield from pool_tests(
            "near zero",
            description,
            lambda counts: judge_dyadic_counts(counts, _MIN_NEAR_ZERO_LEVEL),
            self._near,
            lambda k: f"2^-{k + _MIN_NEAR_ZERO_LEVEL}",
        )
        zeros, place = int(self._zeros.sum()), places[int(self._zeros.argmax())]
        p_value_zeros = float(special.betainc(zeros, count - zeros + 1, _NEAR)) if zeros else 1.0
        yield Test(
            "zeros", "no number is without noise", zeros, p_value_zeros, place if zeros else "", is_primary=False
        )
        description = "all parts of the distribution are as frequent as expected"
        yield from pool_tests("shape", description, _judge_shape, self._cells, place_names=places)
        distance = _compute_distance(self._histogram)
        # Massart's constant (1990) makes the bound hold for any sample size; it is the exact tail far out.
        p_value = min(1.0, 2.0 * math.exp(-2.0 * count * distance**2))
        yield Test("distribution", "the noise has its distribution", distance, p_value, "", is_primary=False)


_MIN_NEAR_ZERO_LEVEL = 1 - int(math.log2(_MAX_NEAR_ZERO_SIZE))
"""Minimum level of the intervals about zero; wider ones are covered by `shape`."""


def _judge_shape(cells: IntArray) -> tuple[FloatArray, FloatArray]:
    """Test eight and 128 cells."""
    found = [judge_even_counts(cells.reshape(len(cells), 1, width, -1).sum(axis=-1)) for width in (8, 128)]
    return np.hstack([each[0] for each in found]), np.hstack([each[1] for each in found])


def _compute_distance(histogram: IntArray) -> float:
    """Compute the Kolmogorov-Smirnov distance at the edges of bins: never more than the exact one."""
    fraction = np.hstack([np.zeros((2, 1)), histogram.reshape(2, -1).cumsum(axis=1)[:, :-1]]) / histogram.sum()
    is_probability = _EDGES <= 1.0
    return float(np.abs(fraction - _EDGES / 2.0)[:, is_probability].max())


def _compute_maximum_p_value(size: float, count: int) -> float:
    """Compute the two-sided p-value of the largest of `count` exponential numbers: `P(max <= x) = (1 - exp(-x))^N`."""
    exponent = count * math.log1p(-math.exp(-size)) if size > 0.0 else -math.inf
    return min(1.0, 2.0 * min(math.exp(exponent), -math.expm1(exponent)))


def _judge_halves(counts: IntArray) -> StatisticsAndPValues:
    """Test whether the first of `counts`, `(groups, 2)`, is half of the second."""
    fraction = counts[:, :1] / np.maximum(counts[:, 1:], 1)
    return fraction, np.where(counts[:, 1:] > 0, compute_binomial_p_values(counts[:, :1], counts[:, 1:], 0.5), np.nan)
