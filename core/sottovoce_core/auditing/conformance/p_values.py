"""P-values: of counts and sums, and of the worst of many places.

Those of sums of products are logarithms of two-sided p-values (`log_...`), so that no small one is lost. Most are bounds that
hold for every number of terms: a plain normal law accuses correct noise, for 20 products exceed five deviations with probability
1.2e-5, not 6e-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy import special, stats

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.bounds import Test
from sottovoce_core.auditing.conformance.block import MAX_NORMAL_SCORE

# ---- sums of products, correlations, spectra -------------------------------------------------------------------------

LOG_2 = math.log(2.0)


def compute_log_sign_p_values(total: FloatArray | float, square: FloatArray | float) -> FloatArray:
    """Of a sum of fair signs times known numbers whose squares add up to `square` (Hoeffding's bound)."""
    found: FloatArray = np.minimum(0.0, LOG_2 - np.square(total) / (2.0 * np.maximum(square, 1e-300)))
    return found


# ---- counts and sums -------------------------------------------------------------------------------------------------

_MIN_CELL_NUMBERS = 8
"""Numbers that chi-square wants in every cell."""

StatisticsAndPValues = tuple[FloatArray, FloatArray]
"""Statistics and their p-values, `(groups, tests)`; NaN where there are too few numbers."""


def compute_gamma_p_value(total: float, count: float) -> float:
    """Two-sided p-value of a sum of `count` exponential numbers: exact."""
    below, above = float(special.gammainc(count, total)), float(special.gammaincc(count, total))
    return min(1.0, 2.0 * min(below, above))


def compute_binomial_p_values(count: IntArray, tries: IntArray, chance: FloatArray | float) -> FloatArray:
    """Of so many, both sides."""
    below, above = stats.binom.cdf(count, tries, chance), stats.binom.sf(count - 1, tries, chance)
    return np.asarray(np.minimum(1.0, 2.0 * np.minimum(below, above)))


def judge_dyadic_counts(counts: IntArray, first: int = 1, max_level: int | None = None) -> StatisticsAndPValues:
    """The j-th of `counts`, `(groups, levels)`, is `2^-j` of the first, which is that of all numbers.

    Args:
        counts: of numbers, all of them at 0.
        first: least j that is tested.
        most: largest one; None: as far as `log2 N + 11`, beyond which nothing is expected.
    """
    tries, level = counts[:, :1], np.arange(first, counts.shape[1])[None]
    furthest = np.log2(np.maximum(tries, 1)) + 11 if max_level is None else max_level
    p_values = compute_binomial_p_values(counts[:, first:], tries, np.ldexp(1.0, -level))
    share = counts[:, first:] / np.maximum(tries, 1)
    return share, np.where((level <= furthest) & (tries > 0), p_values, np.nan)


def judge_even_counts(counts: IntArray) -> StatisticsAndPValues:
    """All cells of `counts`, `(groups, tests, cells)`, are as likely: chi-square, both sides; NaN below `_LEAST` to a cell."""
    cells = counts.shape[-1]
    tries = counts.sum(axis=-1)
    expected = np.maximum(tries, 1) / cells
    statistic = ((counts - expected[..., None]) ** 2).sum(axis=-1) / expected
    below, above = special.chdtr(cells - 1, statistic), special.chdtrc(cells - 1, statistic)
    return statistic, np.where(
        tries >= _MIN_CELL_NUMBERS * cells, np.minimum(1.0, 2.0 * np.minimum(below, above)), np.nan
    )


def select_worst_test(
    name: str,
    what: str,
    judged: StatisticsAndPValues,
    where: Callable[[tuple[int, ...]], str],
    *,
    is_primary: bool = False,
) -> list[Test]:
    """The test of the least p-value, times how many there are; none if none has enough numbers."""
    statistics, p_values = judged
    among = int(np.count_nonzero(np.isfinite(p_values)))
    if not among:
        return []
    index = tuple(int(k) for k in np.unravel_index(int(np.nanargmin(p_values)), p_values.shape))
    p_value = min(1.0, among * float(p_values[index]))
    return [Test(name, what, float(statistics[index]), p_value, where(index), is_primary)]


def pool_tests(
    name: str,
    what: str,
    judge: Callable[[IntArray], StatisticsAndPValues],
    counts: IntArray,
    detail: Callable[[int], str] = lambda _: "",
    place_names: Sequence[str] = (),
    *,
    is_primary: bool = False,
) -> list[Test]:
    """Of `counts`, `(places, ...)`, that of all places together, and of the worst one where several are named.

    Args:
        name, what: as of `Test`.
        judge: the tests of every place.
        counts: of the places.
        detail: which of its tests it is, in words.
        places: of learners, in words.
        primary: as of `Test`, of all places together.
    """
    found = judge(counts.sum(axis=0, keepdims=True))
    tests = select_worst_test(name, what, found, lambda index: detail(index[1]), is_primary=is_primary)
    if len(place_names) > 1:
        tests += select_worst_test(
            f"learner {name}",
            what,
            judge(counts),
            lambda index: ", ".join(filter(None, (place_names[index[0]], detail(index[1])))),
        )
    return tests


@dataclass(frozen=True, slots=True)
class Scales:
    """Sums of exponential numbers in groups, each of law Gamma: has every group the same scale?

    Attributes:
        groups: how many.
        squares: sum of the squared normal scores of their sums.
        p_value: of the worst group, two-sided, for itself.
        mean: of its numbers.
        worst: its index.
    """

    groups: int = 0
    squares: float = 0.0
    p_value: float = np.inf
    mean: float = np.nan
    worst_group: tuple[int, ...] = ()

    @classmethod
    def from_sums(cls, sums: FloatArray, counts: IntArray) -> Self:
        """Groups of any shape; those without numbers are left out."""
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
        )  # Of the small probability, never of one minus it.
        k = int(tail.argmin())
        return cls(
            len(total),
            float(scores @ scores),
            min(1.0, 2.0 * float(tail[k])),
            float(total[k] / count[k]),
            tuple(int(axis[k]) for axis in index),
        )

    def merge(self, other: Self, shift: tuple[int, ...] = ()) -> Self:
        """With other groups, whose indices go on from `shift`."""
        groups, squares = self.groups + other.groups, self.squares + other.squares
        if self.p_value <= other.p_value:
            return replace(self, groups=groups, squares=squares)
        moved = tuple(k + s for k, s in zip(other.worst_group, shift, strict=True)) if shift else other.worst_group
        return replace(other, groups=groups, squares=squares, worst_group=moved)

    def compute_scale_tests(self, unit: str, where: Callable[[tuple[int, ...]], str]) -> list[Test]:
        """The worst group, times their number; none if there is only one."""
        if self.groups < 2:
            return []
        p_value = min(1.0, self.groups * self.p_value)
        what = f"the noise of every {unit} has its scale"
        return [Test(f"{unit} scale", what, self.mean, p_value, where(self.worst_group), is_primary=False)]

    def compute_dispersion_tests(self, unit: str) -> list[Test]:
        """The scores of all groups are as spread as chance has it: neither wider nor closer."""
        if self.groups < 2:
            return []
        p_value = compute_gamma_p_value(self.squares / 2.0, self.groups / 2.0)
        what = f"scales differ from {unit} to {unit} as much as by chance"
        return [Test(f"{unit} dispersion", what, self.squares / self.groups, p_value, "", is_primary=False)]
