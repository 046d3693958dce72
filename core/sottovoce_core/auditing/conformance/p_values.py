"""P-values: of counts and sums, of correlations and spectra, and of the worst of many places.

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
from sottovoce_core.auditing.conformance.block import FARTHEST

# ---- sums of products, correlations, spectra -------------------------------------------------------------------------

_LOG_2 = math.log(2.0)
FEW = 8
"""Samples below which no pair is judged: rounding shows in a correlation close to one."""


def log_products(total: FloatArray, count: FloatArray, *, shared: bool = False) -> FloatArray:
    """Of a sum of `count` products of independent normal numbers (Chernoff's bound).

    Args:
        total: the sum, of any shape.
        count: of products; 0: nothing is known.
        shared: each number may be in two of the products, as in sums along one sequence.
    """
    rho = np.abs(total) / np.maximum(count, 1.0)
    root = np.sqrt(1.0 + 4.0 * rho**2)
    if shared:
        theta = rho / root
        rate = theta * rho + np.log((1.0 + 1.0 / root) / 2.0) / 2.0
    else:
        theta = 2.0 * rho / (1.0 + root)
        rate = theta * rho + np.log1p(-(theta**2)) / 2.0
    found: FloatArray = np.minimum(0.0, _LOG_2 - count * rate)
    return found


def log_signs(total: FloatArray | float, square: FloatArray | float) -> FloatArray:
    """Of a sum of fair signs times known numbers whose squares add up to `square` (Hoeffding's bound)."""
    found: FloatArray = np.minimum(0.0, _LOG_2 - np.square(total) / (2.0 * np.maximum(square, 1e-300)))
    return found


def log_sizes(total: float, square: float, largest: float) -> float:
    """Of a sum of known numbers times `e - 1`, e exponential (a sub-gamma sum; Boucheron, Lugosi, Massart 2013, section 2.4).

    Args:
        total: the sum.
        square: of the known numbers' squares, the sum.
        largest: of their sizes.
    """
    if square <= 0.0:
        return 0.0
    u = abs(total) * largest / square
    return min(0.0, _LOG_2 - square / largest**2 * (1.0 + u - math.sqrt(1.0 + 2.0 * u)))


def log_normal(total: FloatArray, variance: FloatArray) -> FloatArray:
    """Of normal numbers of this variance; exact."""
    deviations = np.abs(total) / np.sqrt(np.maximum(variance, 1e-300))
    found: FloatArray = np.minimum(0.0, _LOG_2 + special.log_ndtr(-deviations))
    return found


def correlation_p(rho: FloatArray, samples: FloatArray | IntArray) -> FloatArray:
    """Two-sided, of an uncentred correlation of normal numbers: `rho sqrt((n-1)/(1-rho^2))` is t with n - 1; exact."""
    left = np.maximum(1.0 - rho**2, 1e-6)  # sums are in single precision
    judged = samples >= FEW
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


def largest_p(square: float, samples: int, columns: int) -> float:
    """Of the largest squared singular value being this large.

    A limit law: for 2 to 40 columns and 16 to 1,000 samples it was at most 1.8 times too small, at p-values down to 1e-3.
    """
    centre, scale = _largest_law(samples, columns)
    return _tracy_widom_p((square - centre) / scale)


def smallest_p(square: float, samples: int, columns: int) -> float:
    """Of the smallest squared singular value being this small (Davidson and Szarek 2001): valid for every size."""
    more, less = max(samples, columns), min(samples, columns)
    short = math.sqrt(more) - math.sqrt(less) - math.sqrt(max(0.0, square))
    return math.exp(-(short**2) / 2.0) if short > 0.0 else 1.0


# ---- counts and sums -------------------------------------------------------------------------------------------------

_LEAST = 8
"""Numbers that chi-square wants in every cell."""

Judged = tuple[FloatArray, FloatArray]
"""Statistics and their p-values, `(groups, tests)`; NaN where there are too few numbers."""


def gamma(total: float, count: float) -> float:
    """Two-sided p-value of a sum of `count` exponential numbers: exact."""
    below, above = float(special.gammainc(count, total)), float(special.gammaincc(count, total))
    return min(1.0, 2.0 * min(below, above))


def maximum(size: float, count: int) -> float:
    """Two-sided p-value of the largest of `count` exponential numbers: `P(max <= x) = (1 - exp(-x))^N`."""
    exponent = count * math.log1p(-math.exp(-size)) if size > 0.0 else -math.inf
    return min(1.0, 2.0 * min(math.exp(exponent), -math.expm1(exponent)))


def binomial(count: IntArray, tries: IntArray, chance: FloatArray | float) -> FloatArray:
    """Of so many, both sides."""
    below, above = stats.binom.cdf(count, tries, chance), stats.binom.sf(count - 1, tries, chance)
    return np.asarray(np.minimum(1.0, 2.0 * np.minimum(below, above)))


def halves(counts: IntArray) -> Judged:
    """The first of `counts`, `(groups, 2)`, is half of the second."""
    share = counts[:, :1] / np.maximum(counts[:, 1:], 1)
    return share, np.where(counts[:, 1:] > 0, binomial(counts[:, :1], counts[:, 1:], 0.5), np.nan)


def dyadic(counts: IntArray, first: int = 1, most: int | None = None) -> Judged:
    """The j-th of `counts`, `(groups, levels)`, is `2^-j` of the first, which is that of all numbers.

    Args:
        counts: of numbers, all of them at 0.
        first: least j that is tested.
        most: largest one; None: as far as `log2 N + 11`, beyond which nothing is expected.
    """
    tries, level = counts[:, :1], np.arange(first, counts.shape[1])[None]
    furthest = np.log2(np.maximum(tries, 1)) + 11 if most is None else most
    p_values = binomial(counts[:, first:], tries, np.ldexp(1.0, -level))
    share = counts[:, first:] / np.maximum(tries, 1)
    return share, np.where((level <= furthest) & (tries > 0), p_values, np.nan)


def even(counts: IntArray) -> Judged:
    """All cells of `counts`, `(groups, tests, cells)`, are as likely: chi-square, both sides; NaN below `_LEAST` to a cell."""
    cells = counts.shape[-1]
    tries = counts.sum(axis=-1)
    expected = np.maximum(tries, 1) / cells
    statistic = ((counts - expected[..., None]) ** 2).sum(axis=-1) / expected
    below, above = special.chdtr(cells - 1, statistic), special.chdtrc(cells - 1, statistic)
    return statistic, np.where(tries >= _LEAST * cells, np.minimum(1.0, 2.0 * np.minimum(below, above)), np.nan)


def worst(
    name: str, what: str, judged: Judged, where: Callable[[tuple[int, ...]], str], *, primary: bool = False
) -> list[Test]:
    """The test of the least p-value, times how many there are; none if none has enough numbers."""
    statistics, p_values = judged
    among = int(np.count_nonzero(np.isfinite(p_values)))
    if not among:
        return []
    index = tuple(int(k) for k in np.unravel_index(int(np.nanargmin(p_values)), p_values.shape))
    p_value = min(1.0, among * float(p_values[index]))
    return [Test(name, what, float(statistics[index]), p_value, where(index), primary)]


def pooled(
    name: str,
    what: str,
    judge: Callable[[IntArray], Judged],
    counts: IntArray,
    detail: Callable[[int], str] = lambda _: "",
    *,
    primary: bool = False,
) -> list[Test]:
    """Of `counts`, `(places, ...)`, that of all places together; `detail` says in words which of its tests it is."""
    found = judge(counts.sum(axis=0, keepdims=True))
    return worst(name, what, found, lambda index: detail(index[1]), primary=primary)


def by_place(
    name: str,
    what: str,
    judge: Callable[[IntArray], Judged],
    counts: IntArray,
    places: Sequence[str],
    detail: Callable[[int], str] = lambda _: "",
) -> list[Test]:
    """The same of the worst place; none if there is only one."""
    if len(places) < 2:
        return []
    return worst(name, what, judge(counts), lambda index: ", ".join(filter(None, (places[index[0]], detail(index[1])))))


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
    worst: tuple[int, ...] = ()

    @classmethod
    def of(cls, sums: FloatArray, counts: IntArray) -> Self:
        """Groups of any shape; those without numbers are left out."""
        index = np.nonzero(counts)
        if not index[0].size:
            return cls()
        total, count = sums[index], counts[index]
        tail = np.empty_like(total)
        low = total < count
        tail[low] = special.gammainc(count[low], total[low])
        tail[~low] = special.gammaincc(count[~low], total[~low])
        scores = np.clip(special.ndtri(tail), -FARTHEST, FARTHEST)  # Of the small probability, never of one minus it.
        k = int(tail.argmin())
        return cls(
            len(total),
            float(scores @ scores),
            min(1.0, 2.0 * float(tail[k])),
            float(total[k] / count[k]),
            tuple(int(axis[k]) for axis in index),
        )

    def joined(self, other: Self, shift: tuple[int, ...] = ()) -> Self:
        """With other groups, whose indices go on from `shift`."""
        groups, squares = self.groups + other.groups, self.squares + other.squares
        if self.p_value <= other.p_value:
            return replace(self, groups=groups, squares=squares)
        moved = tuple(k + s for k, s in zip(other.worst, shift, strict=True)) if shift else other.worst
        return replace(other, groups=groups, squares=squares, worst=moved)

    def scale(self, unit: str, where: Callable[[tuple[int, ...]], str]) -> list[Test]:
        """The worst group, times their number; none if there is only one."""
        if self.groups < 2:
            return []
        p_value = min(1.0, self.groups * self.p_value)
        what = f"the noise of every {unit} has its scale"
        return [Test(f"{unit} scale", what, self.mean, p_value, where(self.worst), primary=False)]

    def dispersion(self, unit: str) -> list[Test]:
        """The scores of all groups are as spread as chance has it: neither wider nor closer."""
        if self.groups < 2:
            return []
        p_value = gamma(self.squares / 2.0, self.groups / 2.0)
        what = f"scales differ from {unit} to {unit} as much as by chance"
        return [Test(f"{unit} dispersion", what, self.squares / self.groups, p_value, "", primary=False)]
