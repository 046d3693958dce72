"""P-values of counts and sums, and of the worst of many places.

Those of sums of products are logarithms of two-sided p-values (`log_...`), so that small ones do not underflow. Most are
bounds that hold for every number of terms: a plain normal approximation rejects correct noise, because 20 products exceed five
deviations with probability 1.2e-5, not 6e-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy import special

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.bounds import Test
from sottovoce_core.auditing.conformance.block import MAX_NORMAL_SCORE

# ---- sums of products, correlations, spectra -------------------------------------------------------------------------

LOG_2 = math.log(2.0)


def compute_log_sign_p_values(total: FloatArray | float, square: FloatArray | float) -> FloatArray:
    """Compute the log p-value of a sum of fair signs times known numbers with sum of squares `square` (Hoeffding's bound)."""
    logs: FloatArray = np.minimum(0.0, LOG_2 - np.square(total) / (2.0 * np.maximum(square, 1e-300)))
    return logs


# ---- counts and sums -------------------------------------------------------------------------------------------------

_MIN_CELL_NUMBERS = 8
"""Minimum number of values per cell for the chi-square test."""

StatisticsAndPValues = tuple[FloatArray, FloatArray]
"""Statistics and their p-values, `(groups, tests)`; NaN where there are too few numbers."""


def compute_gamma_p_value(total: float, count: float) -> float:
    """Compute the exact two-sided p-value of a sum of `count` exponential numbers."""
    below, above = float(special.gammainc(count, total)), float(special.gammaincc(count, total))
    return min(1.0, 2.0 * min(below, above))


def compute_binomial_p_values(count: IntArray, trials: IntArray, probability: FloatArray | float) -> FloatArray:
    """Compute two-sided binomial p-values of counts: twice the smaller tail, at most 1.

    Tails are incomplete beta functions (DLMF 8.17.5). The tail on the other side of the mean is at least a half.
    """
    is_low = count < trials * probability
    successes = np.where(is_low, trials - count, count)
    tail = special.betainc(
        successes, trials - successes + 1, np.where(is_low, 1.0 - np.asarray(probability), probability)
    )
    return np.asarray(np.minimum(1.0, 2.0 * tail))


def judge_dyadic_counts(counts: IntArray, first: int = 1, max_level: int | None = None) -> StatisticsAndPValues:
    """Test whether the j-th of `counts`, `(groups, levels)`, is `2^-j` of the first, which counts all numbers.

    Args:
        counts: counts of numbers by level, all of them at level 0.
        first: smallest level j tested.
        max_level: largest level tested; None: up to `log2 N + 11`, beyond which nothing is expected.
    """
    trials, level = counts[:, :1], np.arange(first, counts.shape[1])[None]
    last_level = np.log2(np.maximum(trials, 1)) + 11 if max_level is None else max_level
    p_values = compute_binomial_p_values(counts[:, first:], trials, np.ldexp(1.0, -level))
    fraction = counts[:, first:] / np.maximum(trials, 1)
    return fraction, np.where((level <= last_level) & (trials > 0), p_values, np.nan)


def judge_even_counts(counts: IntArray) -> StatisticsAndPValues:
    """Test whether all cells of `counts`, `(groups, tests, cells)`, are equally likely, by chi-square; NaN if too few numbers."""
    cells = counts.shape[-1]
    trials = counts.sum(axis=-1)
    expected = np.maximum(trials, 1) / cells
    statistic = ((counts - expected[..., None]) ** 2).sum(axis=-1) / expected
    below, above = special.chdtr(cells - 1, statistic), special.chdtrc(cells - 1, statistic)
    return statistic, np.where(
        trials >= _MIN_CELL_NUMBERS * cells, np.minimum(1.0, 2.0 * np.minimum(below, above)), np.nan
    )


def select_worst_test(
    name: str,
    description: str,
    judged: StatisticsAndPValues,
    name_location: Callable[[tuple[int, ...]], str],
    *,
    is_primary: bool = False,
) -> list[Test]:
    """Return the test with the smallest p-value, times the number of tests; empty if none has enough numbers."""
    statistics, p_values = judged
    test_count = int(np.count_nonzero(np.isfinite(p_values)))
    if not test_count:
        return []
    index = tuple(int(k) for k in np.unravel_index(int(np.nanargmin(p_values)), p_values.shape))
    p_value = min(1.0, test_count * float(p_values[index]))
    return [Test(name, description, float(statistics[index]), p_value, name_location(index), is_primary)]


def pool_tests(
    name: str,
    description: str,
    judge: Callable[[IntArray], StatisticsAndPValues],
    counts: IntArray,
    detail: Callable[[int], str] = lambda _: "",
    place_names: Sequence[str] = (),
    *,
    is_primary: bool = False,
) -> list[Test]:
    """Test `counts`, `(places, ...)`, over all places together, and at the worst place if several are named.

    Args:
        name, description: as in `Test`.
        judge: function that tests every place.
        counts: counts of the places.
        detail: names a test within `judge`.
        place_names: names of the places.
        is_primary: as in `Test`, for all places together.
    """
    pooled = judge(counts.sum(axis=0, keepdims=True))
    tests = select_worst_test(name, description, pooled, lambda index: detail(index[1]), is_primary=is_primary)
    if len(place_names) > 1:
        tests += select_worst_test(
            f"learner {name}",
            description,
            judge(counts),
            lambda index: ", ".join(filter(None, (place_names[index[0]], detail(index[1])))),
        )
    return tests


@dataclass(frozen=True, slots=True)
class Scales:
    """Test that all groups have the same scale, from sums of exponential numbers, which are Gamma distributed.

    Attributes:
        groups: number of groups.
        squares: sum of the squared normal scores of their sums.
        p_value: two-sided p-value of the worst group alone.
        mean: mean of its numbers.
        worst_group: its index.
    """

    groups: int = 0
    squares: float = 0.0
    p_value: float = np.inf
    mean: float = np.nan
    worst_group: tuple[int, ...] = ()

    @classmethod
    def from_sums(cls, sums: FloatArray, counts: IntArray) -> Self:
        """Create from groups of any shape; those without numbers are omitted."""
        index = np.nonzero(counts)
        if not index[0].size:
            return cls()
        total, count = sums[index], counts[index]
        tail = np.empty_like(total)
        low = total < count
        tail[low] = special.gammainc(count[low], total[low])
        tail[~low] = special.gammaincc(count[~low], total[~low])
        scores = np.clip(
            special.ndtri(tail), -MAX_NORMAL_SCORE, MAX_NORMAL_SCORE
        )  # scores of the smaller tail, to keep precision
        k = int(tail.argmin())
        return cls(
            len(total),
            float(scores @ scores),
            min(1.0, 2.0 * float(tail[k])),
            float(total[k] / count[k]),
            tuple(int(axis[k]) for axis in index),
        )

    def merge(self, other: Self, shift: tuple[int, ...] = ()) -> Self:
        """Merge with other groups, whose indices continue from `shift`."""
        groups, squares = self.groups + other.groups, self.squares + other.squares
        if self.p_value <= other.p_value:
            return replace(self, groups=groups, squares=squares)
        moved = tuple(k + s for k, s in zip(other.worst_group, shift, strict=True)) if shift else other.worst_group
        return replace(other, groups=groups, squares=squares, worst_group=moved)

    def compute_scale_tests(self, unit: str, name_location: Callable[[tuple[int, ...]], str]) -> list[Test]:
        """Test the worst group, times their number; empty if there is only one."""
        if self.groups < 2:
            return []
        p_value = min(1.0, self.groups * self.p_value)
        description = f"the noise of every {unit} has its scale"
        return [
            Test(f"{unit} scale", description, self.mean, p_value, name_location(self.worst_group), is_primary=False)
        ]

    def compute_dispersion_tests(self, unit: str) -> list[Test]:
        """Test that the scores of all groups vary as expected: neither more nor less."""
        if self.groups < 2:
            return []
        p_value = compute_gamma_p_value(self.squares / 2.0, self.groups / 2.0)
        description = f"scales differ from {unit} to {unit} as much as by chance"
        return [Test(f"{unit} dispersion", description, self.squares / self.groups, p_value, "", is_primary=False)]
