"""Single numbers: scale, tails, support, signs, shape.

Sizes of standard Laplace numbers are exponential, so sums of N of them are of law Gamma(N), exactly; and `exp(-size)` is
uniform, so how many numbers lie in a given interval is binomial. All tests follow from sums by group and from one histogram.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import numpy as np
from scipy import stats

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import Part, Test
from sottovoce_core.auditing.conformance.block import Block, Instrument
from sottovoce_core.auditing.conformance.p_values import (
    Scales,
    by_place,
    dyadic,
    even,
    gamma,
    halves,
    maximum,
    pooled,
    worst,
)

_NEAR = 2.0**-34
"""Numbers closer to zero than this, in scales, count as zero: 64 lattice points, beyond what a replay rounds off.

Standard Laplace numbers are so close to any given number with a probability below this.
"""

_CLOSE = 2.0**-5
"""Sizes below this are looked at one by one for how close to zero they are."""
_CLOSEST = 34
_FURTHEST = 64

_BINS = 2**14
"""Of a histogram: the first bits of a float32 number. Sign, exponent, and 5 bits of the mantissa."""
_EDGES = np.ldexp(1.0 + np.arange(_BINS // 2) % 32 / 32.0, np.arange(_BINS // 2) // 32 - 127)
_CELL = np.minimum(64.0 * np.where(_EDGES <= 1.0, _EDGES, 0.0), 63.0).astype(np.intp)
_CELLS = np.concatenate([127 - _CELL, _CELL])
"""Of each bin, which of 128 equal cells of `F(r)` it is in: F is `1 - exp(-r)/2` above zero, and `exp(r)/2` below."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of some runs. Places are learners, each field by itself.

    Attributes:
        runs: how many.
        histogram: `(2^14,)` of `exp(-size)`, with the sign of the number.
        tails: `(places, 64)` numbers of sizes above `j ln 2`; of all at 0.
        near: `(places, 35)` numbers with `1 - exp(-size)` below `2^-j`; of all at 0.
        cells: `(places, 128)` numbers in equal cells of `F(r)`.
        signs: `(learners, numbers, 2)` positive numbers, and those that are not zero.
        zeros: `(places,)` numbers closer to zero than `_NEAR`.
        largest: `(places,)` size.
        sums: `(learners, numbers)` of sizes.
        counts: the same of numbers.
        round_sums: `(learners, rounds)` of sizes.
        round_counts: the same of numbers.
        by_run: scales of runs.
        by_message: scales of messages.
    """

    runs: int
    histogram: IntArray
    tails: IntArray
    near: IntArray
    cells: IntArray
    signs: IntArray
    zeros: IntArray
    largest: FloatArray
    sums: FloatArray
    counts: IntArray
    round_sums: FloatArray
    round_counts: IntArray
    by_run: Scales
    by_message: Scales

    @classmethod
    def of(cls, block: Block) -> Self:
        learners, rounds, runs, numbers = block.values.shape
        places = _Places.blank(learners * len(block.fields))
        signs = np.zeros((learners, numbers, 2), np.int64)
        sums, counts = np.zeros((learners, numbers)), np.zeros((learners, numbers), np.int64)
        messages = np.zeros((learners, rounds, runs)), np.zeros((learners, rounds, runs), np.int64)
        for i, some, piece in block.pieces():
            sizes, known = piece.sizes[0], piece.known[0]
            whole = known.all()
            if not whole:
                sizes = np.where(known, sizes, 0.0)
            messages[0][i, :, some] = sizes.sum(axis=-1)
            messages[1][i, :, some] = numbers if whole else known.sum(axis=-1)
            sums[i] += sizes.sum(axis=(0, 1))
            counts[i] += sizes.size // numbers if whole else known.sum(axis=(0, 1))
            negative = piece.values[0] < 0.0
            positive, below = (np.count_nonzero(each, axis=(0, 1)) for each in (piece.values[0] > 0.0, negative))
            signs[i] += np.stack([positive, positive + below], axis=-1)
            for place, (_, part) in enumerate(block.parts(), i * len(block.fields)):
                chosen = slice(None) if whole else known[..., part]
                places.look(place, sizes[..., part][chosen], negative[..., part][chosen])
        histograms = places.histograms
        places.near[:, 0] = histograms.sum(axis=1)
        return cls(
            runs,
            histograms.sum(axis=0),
            _above(histograms),
            places.near,
            np.array([np.bincount(_CELLS, each, 128) for each in histograms]).astype(np.int64),
            signs,
            places.zeros,
            places.largest,
            sums,
            counts,
            messages[0].sum(axis=-1),
            messages[1].sum(axis=-1),
            Scales.of(messages[0].sum(axis=(0, 1)), messages[1].sum(axis=(0, 1))),
            Scales.of(*messages) if numbers > 1 else Scales(),  # a message of one number is that number
        )

    def joined(self, other: Self) -> Self:
        """With other runs, which go on from these."""
        added = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name not in ("largest", "by_run", "by_message")
        }
        return type(self)(
            **added,
            largest=np.maximum(self.largest, other.largest),
            by_run=self.by_run.joined(other.by_run, (self.runs,)),
            by_message=self.by_message.joined(other.by_message, (0, 0, self.runs)),
        )


@dataclass(frozen=True, slots=True)
class _Places:
    """Of every place, what its sizes come to one by one: its histogram, and the rest as `_Kept` has it."""

    histograms: IntArray
    near: IntArray
    zeros: IntArray
    largest: FloatArray

    @classmethod
    def blank(cls, places: int) -> Self:
        """Of no number."""
        histograms, near, zeros = (
            np.zeros(shape, np.int64) for shape in ((places, _BINS), (places, _CLOSEST + 1), places)
        )
        return cls(histograms, near, zeros, np.zeros(places))

    def look(self, place: int, sizes: FloatArray, negative: BoolArray) -> None:
        """At some numbers of a place: their sizes, and which are below zero."""
        # Rounded to float32, an edge moves by 2^-25 of itself: less than chance does by far.
        uniform = np.exp(-sizes).astype(np.float32).reshape(-1)
        bins = uniform.view(np.uint32) | negative.reshape(-1).astype(np.uint32) << 31  # with the sign of the number
        bins >>= 18
        self.histograms[place] += np.bincount(bins.astype(np.intp), minlength=_BINS)
        close = sizes[sizes < _CLOSE]
        level = np.clip(-np.frexp(np.maximum(-np.expm1(-close), _NEAR / 2.0))[1], 0, _CLOSEST)
        self.near[place] += np.bincount(level, minlength=_CLOSEST + 1)[::-1].cumsum()[::-1]
        self.zeros[place] += np.count_nonzero(close < _NEAR)
        self.largest[place] = max(self.largest[place], sizes.max(initial=0.0))


def _above(histograms: IntArray) -> IntArray:
    """`(places, 64)` how many of the uniform numbers are below `2^-j`; all of them at 0."""
    octaves = histograms.reshape(-1, 2, 256, 32).sum(axis=(1, 3)).cumsum(axis=1)
    below: IntArray = octaves[:, 126 - np.arange(_FURTHEST)]  # float32's exponent 127 is that of 1
    below[:, 0] = octaves[:, -1]
    return below


class Marginal(Instrument):
    """Single numbers: scale, tails, support, signs, shape."""

    part: ClassVar[Part] = "marginal"

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._learners: tuple[str, ...] = ()
        self._numbers: tuple[str, ...] = ()
        self._fields: tuple[tuple[str, slice], ...] = ()

    def add(self, block: Block) -> None:
        if block.count:
            self._learners = block.learners
            self._numbers = tuple(block.place(k) for k in range(block.values.shape[-1]))
            self._fields = tuple(block.parts())
            self._take(_Kept.of(block))

    def merge(self, other: Self) -> None:
        if other._kept is not None:
            self._learners, self._numbers, self._fields = other._learners, other._numbers, other._fields
            self._take(other._kept)

    def _take(self, kept: _Kept) -> None:
        self._kept = kept if self._kept is None else self._kept.joined(kept)

    def tests(self) -> list[Test]:
        kept = self._kept
        if kept is None:
            return []
        return [*self._scales(kept), *self._signs(kept), *self._sizes(kept)]

    @property
    def _places(self) -> list[str]:
        return [f"{learner}, field {name!r}" for learner in self._learners for name, _ in self._fields]

    def _scales(self, kept: _Kept) -> Iterator[Test]:
        """Sums of sizes, of all numbers and by group."""
        total, count = float(kept.sums.sum()), int(kept.counts.sum())
        yield Test("scale", "the mean size is the scale", total / count, gamma(total, count), "")
        learners, numbers, places = self._learners, self._numbers, self._places
        several = len(learners) > 1
        starts = [part.start for _, part in self._fields]
        by_field = np.add.reduceat(kept.sums, starts, axis=1), np.add.reduceat(kept.counts, starts, axis=1)
        yield from Scales.of(by_field[0].reshape(-1), by_field[1].reshape(-1)).scale("learner", lambda k: places[k[0]])
        coordinates = Scales.of(kept.sums, kept.counts)
        rounds = Scales.of(kept.round_sums, kept.round_counts)
        if len(numbers) > 1:
            all_learners = Scales.of(kept.sums.sum(axis=0), kept.counts.sum(axis=0))
            yield from all_learners.scale("coordinate", lambda k: numbers[k[0]])
            yield from coordinates.dispersion("coordinate")
        if kept.round_sums.shape[1] > 1:
            all_learners = Scales.of(kept.round_sums.sum(axis=0), kept.round_counts.sum(axis=0))
            yield from all_learners.scale("round", lambda k: f"round {k[0]}")
            yield from rounds.dispersion("round")
        if several and len(numbers) > 1:
            yield from coordinates.scale("learner's coordinate", lambda k: f"{learners[k[0]]}, {numbers[k[1]]}")
        if several and kept.round_sums.shape[1] > 1:
            yield from rounds.scale("learner's round", lambda k: f"{learners[k[0]]}, round {k[1]}")
        yield from kept.by_run.scale("run", lambda k: f"run {k[0]}")
        yield from kept.by_run.dispersion("run")
        yield from kept.by_message.scale("message", lambda k: f"{learners[k[0]]}, round {k[1]}, run {k[2]}")
        yield from kept.by_message.dispersion("message")

    def _signs(self, kept: _Kept) -> Iterator[Test]:
        """Of numbers that are not zero."""
        what, (learners, numbers, _) = "both signs are as likely", kept.signs.shape
        counts = kept.signs.reshape(-1, 2)
        yield from pooled("signs", what, halves, counts, primary=True)
        if learners * numbers > 1:
            yield from worst(
                "coordinate signs",
                what,
                halves(counts),
                lambda k: f"{self._learners[k[0] // numbers]}, {self._numbers[k[0] % numbers]}",
            )

    def _sizes(self, kept: _Kept) -> Iterator[Test]:
        """How many are large, or small; the largest; the shape of the law."""
        places, what = self._places, "as many numbers are large as the law says"
        beyond = [f"sizes above {math.log(2.0) * j:.3g}" for j in range(_FURTHEST)]
        yield from pooled("tails", what, dyadic, kept.tails, lambda k: beyond[k + 1], primary=True)
        yield from by_place("learner tails", what, dyadic, kept.tails, places, lambda k: beyond[k + 1])
        count, largest = int(kept.counts.sum()), float(kept.largest.max())
        at = places[int(kept.largest.argmax())]
        yield Test("largest", "the largest number is as large as it should be", largest, maximum(largest, count), at)
        what = "as many numbers are close to zero as the law says"
        yield from pooled(
            "near zero", what, lambda counts: dyadic(counts, _NEAREST), kept.near, lambda k: f"2^-{k + _NEAREST}"
        )
        zeros, place = int(kept.zeros.sum()), places[int(kept.zeros.argmax())]
        chance = float(stats.binom.sf(zeros - 1, count, _NEAR))
        yield Test("zeros", "no number is without noise", zeros, chance, place if zeros else "", primary=False)
        what = "all parts of the law are as full as they should be"
        yield from pooled("shape", what, _shape, kept.cells)
        yield from by_place("learner shape", what, _shape, kept.cells, places)
        distance = _distance(kept.histogram)
        # Massart's constant (1990) makes the bound hold for any number of numbers; it is the law itself far out.
        p_value = min(1.0, 2.0 * math.exp(-2.0 * count * distance**2))
        yield Test("law", "the noise has its law", distance, p_value, "", primary=False)


_NEAREST = 1 - int(math.log2(_CLOSE))
"""Wider intervals about zero are left to `shape`."""


def _shape(cells: IntArray) -> tuple[FloatArray, FloatArray]:
    """Eight and 128 cells."""
    found = [even(cells.reshape(len(cells), 1, width, -1).sum(axis=-1)) for width in (8, 128)]
    return np.hstack([each[0] for each in found]), np.hstack([each[1] for each in found])


def _distance(histogram: IntArray) -> float:
    """Of Kolmogorov and Smirnov, seen at the edges of bins: never more than it is."""
    share = np.hstack([np.zeros((2, 1)), histogram.reshape(2, -1).cumsum(axis=1)[:, :-1]]) / histogram.sum()
    upto = _EDGES <= 1.0
    return float(np.abs(share - _EDGES / 2.0)[:, upto].max())
