"""What is seen of a round, beside what was there before it: all that bets on noise may use.

Whatever a bet's stake depends on was known before the number that it bets on was: noise of the `LAGS` rounds before, what a
learner had when it drew, and of the same round the noise of learners that come before it. The order is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.conformance.block import FARTHEST
from sottovoce_core.auditing.conformance.residuals import ALL, ByteArray, Residuals
from sottovoce_core.auditing.online.keys import Keys, Novelty, Summed, Sums

LAGS = 8
"""Rounds before that noise is compared with."""

_FARTHEST_LAG = 64
"""Rounds before whose noise signs are compared with, at the same coordinate alone."""

SHIFTS = (-1, 0, 1)
"""Coordinates beside a number that it is compared with."""

_PAST = ("constant", "centre", "decision", "gradient", "record", "record with its label")
"""What a learner had before it drew: as in `Residuals.past`; the constant is for signs that are not fair."""

NEAR = 2.0**-36
"""Numbers closer than this, in scales, count as equal: 16 lattice points, more than a replay rounds off.

A standard Laplace number is so close to any given number with at most this probability."""

_EXACT = 2.0**-38
"""Resolution of float64, in scales, up to which numbers may be compared."""

_RESOLVED = 2.0**-12
"""Resolution, in scales, beyond which nothing is said of a number."""

_OUTLIER = 5.0
"""No value of the past counts for more than so many times its root mean square."""


class RoundNoise:
    """The noise that all watched learners said in a round, fields side by side.

    Args:
        learners: how many are watched.
        numbers: of all fields together.

    Attributes:
        values: `(learners, numbers)` standard Laplace numbers; NaN where none is known.
        steps, said, lost: the same, as in `Residuals`.
        scale: the same, of the noise.
        resolution: the same: what float64 tells apart, in scales.
        past: `(learners, len(_PAST), numbers)`; 0 where nothing is known.
    """

    def __init__(self, learners: int, numbers: int) -> None:
        shape = learners, numbers
        self.values: FloatArray = np.full(shape, np.nan)
        self.steps: IntArray = np.zeros(shape, np.int64)
        self.said: IntArray = np.zeros(shape, np.int64)
        self.lost: ByteArray = np.full(shape, ALL, np.int8)
        self.scale: FloatArray = np.ones(shape)
        self.resolution: FloatArray = np.zeros(shape)
        self.past: FloatArray = np.zeros((learners, len(_PAST), numbers))

    def put(self, row: int, start: int, noise: Residuals, message: FloatArray, past: Mapping[str, FloatArray]) -> None:
        """The noise of one field, `(1, 1, dim)`, of a learner's message; numbers from `start` on are this field's."""
        width = noise.values.shape[-1]
        at = row, slice(start, start + width)
        scale, centre = float(noise.scale[0]), noise.past["centre"][0, 0]
        self.resolution[at] = np.spacing(np.maximum(np.abs(message[0, 0]), np.abs(centre))) / scale
        self.values[at] = np.where(self.resolution[at] < _RESOLVED, noise.values[0, 0], np.nan)
        self.steps[at], self.said[at], self.lost[at] = noise.steps[0, 0], noise.said[0, 0], noise.lost[0, 0]
        self.scale[at] = scale
        self.past[row, 0, start : start + width] = 1.0
        for k, name in enumerate(_PAST[1:], 1):
            value = centre if name == "centre" else past[name][0, 0] if name in past else None
            if value is not None and len(value) == width:
                self.past[row, k, start : start + width] = value


@dataclass(frozen=True, slots=True)
class _Before:
    """Noise of earlier rounds, `(LAGS * shifts * learners, numbers)` each: the same for all learners.

    Rounds stand where they were written; a new one takes the place of the oldest.

    Attributes:
        normal: normal scores.
        squares: of these.
        even: sizes, evenly spread in [-1, 1].
        even_squares: of these.
    """

    normal: FloatArray
    squares: FloatArray
    even: FloatArray
    even_squares: FloatArray
    order: IntArray
    """`(LAGS,)` where the last round stands, the one before it, and so on."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A round; arrays `(learners, numbers)`, 0 where no noise is known.

    Attributes:
        known: 1.0 where noise is known.
        tail: `exp(-|r|)`; 1 where unknown.
        sizes: |r|.
        signs: -1.0, 0.0 or 1.0.
        normal: normal scores of the numbers.
        even: `1 - 2 exp(-|r|)`, evenly spread in [-1, 1].
        steps, said, lost: as in `Residuals`.
        past: `(learners, len(_PAST), numbers)`, about 1 in size.
        before: noise of the rounds before, of all learners, shifted to all sides.
        far: `((FARTHEST_LAG - LAGS) * learners, numbers)` normal scores of the rounds before those, the last one first.
        twice: `(learners,)` numbers that are 0, or as at one of `LAGS` rounds before in the same coordinate, up to the sign.
        cancelled: `(learners,)` numbers that are minus the noise of all learners before it in this round, together.
        exact: `(learners,)` numbers that could have been found so.
        heard: which numbers were heard before.
        summed: which are sums or differences of others, of as many rounds.
    """

    known: FloatArray
    tail: FloatArray
    sizes: FloatArray
    signs: FloatArray
    normal: FloatArray
    even: FloatArray
    steps: IntArray
    said: IntArray
    lost: ByteArray
    past: FloatArray
    before: _Before
    far: FloatArray
    twice: IntArray
    cancelled: IntArray
    exact: IntArray
    heard: Novelty
    summed: Summed


def shifted(values: FloatArray) -> FloatArray:
    """`(..., learners, numbers)` by all `SHIFTS`, one after another: `(..., shifts * learners, numbers)`."""
    return np.concatenate([np.roll(values, shift, axis=-1) for shift in SHIFTS], axis=-2)


@dataclass(slots=True)
class Memory:
    """What is kept of the rounds before: as much after many rounds as after few.

    Args:
        learners: how many are watched.
        numbers: of all fields together.
        keys: those of the runs before.
    """

    learners: int
    numbers: int
    keys: Keys
    _at: int = 0
    _rounds: int = 0
    _last: Seen | None = None
    _values: FloatArray = field(init=False)
    _before: _Before = field(init=False)
    _squares: FloatArray = field(init=False)
    _sums: Sums = field(init=False)
    _far: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        rows = LAGS * len(SHIFTS) * self.learners
        self._values = np.full((LAGS, self.learners, self.numbers), np.inf)
        blank = [np.zeros((rows, self.numbers)) for _ in range(4)]
        self._before = _Before(blank[0], blank[1], blank[2], blank[3], np.arange(LAGS)[::-1].copy())
        self._squares = np.zeros((self.learners, len(_PAST), 1))
        self._far = np.zeros((_FARTHEST_LAG * self.learners, self.numbers))
        self._sums = Sums(LAGS, self.learners, self.numbers)
        self.keys.begin_run()

    def see(self, said: RoundNoise) -> Seen:
        """What there is to see of the next round, until the one after it (`before` and `far` are the memory itself)."""
        self._keep_last()
        known = np.isfinite(said.values)
        values = np.where(known, said.values, 0.0)
        sizes, signs = np.abs(values), np.sign(values)
        tail = np.exp(-sizes)
        exact = known & (said.resolution < _EXACT)
        self._last = seen = Seen(
            known=known.astype(np.float64),
            tail=tail,
            sizes=sizes,
            signs=signs,
            normal=np.minimum(-special.ndtri(0.5 * tail), FARTHEST) * signs,
            even=np.where(known, 1.0 - 2.0 * tail, 0.0),
            steps=said.steps,
            said=said.said,
            lost=said.lost,
            past=self._even_past(said.past),
            before=self._before,
            far=self._far[LAGS * self.learners :],
            twice=np.count_nonzero(exact & self._twice(said.values), axis=1),
            cancelled=np.count_nonzero(exact & _cancelled(said, exact), axis=1),
            exact=np.count_nonzero(exact, axis=1),
            heard=self.keys.hear(values, exact),
            summed=self._sums.hear(values, said.scale, exact),
        )
        return seen

    def _keep_last(self) -> None:
        """The round before is over."""
        if self._last is None:
            return
        seen = self._last
        self._values[self._at] = np.where(seen.known > 0.0, seen.signs * seen.sizes, np.inf)
        rows = len(SHIFTS) * self.learners
        here = slice(self._at * rows, (self._at + 1) * rows)
        normal, even = shifted(seen.normal), shifted(seen.even)
        self._before.normal[here], self._before.squares[here] = normal, normal**2
        self._before.even[here], self._before.even_squares[here] = even, even**2
        self._before.order[:] = np.roll(self._before.order, 1)
        self._before.order[0] = self._at
        self._at = (self._at + 1) % LAGS
        self._far[self.learners :] = self._far[: -self.learners]
        self._far[: self.learners] = seen.normal

    def _twice(self, values: FloatArray) -> BoolArray:
        nearest = np.minimum(np.abs(self._values - values), np.abs(self._values + values)).min(axis=0, initial=np.inf)
        twice: BoolArray = np.minimum(nearest, np.abs(values)) < NEAR
        return twice

    def _even_past(self, past: FloatArray) -> FloatArray:
        """Divided by its root mean square so far, this round's counted, which was known before the noise."""
        self._squares += np.mean(past**2, axis=-1, keepdims=True)
        self._rounds += 1
        size = np.sqrt(self._squares / self._rounds)
        return np.clip(np.divide(past, size, out=np.zeros_like(past), where=size > 0.0), -_OUTLIER, _OUTLIER)


def _cancelled(said: RoundNoise, exact: BoolArray) -> BoolArray:
    """Where the noise of a learner and of all before it adds up to nothing; scales may differ."""
    total = np.cumsum(np.where(exact, said.values * said.scale, 0.0), axis=0)
    cancelled: BoolArray = np.abs(total) < NEAR * said.scale
    cancelled[0] = False
    return cancelled
