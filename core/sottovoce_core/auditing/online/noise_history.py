"""What is seen of a round, beside what was there before it: all that bets on noise may use.

Whatever a bet's stake depends on was known before the number that it bets on was: noise of the `LAGS` rounds before, what a
learner had when it drew, and of the same round the noise of learners that come before it. The order is fixed.

The table of keys has a constant size, and may be kept from run to run. A key is a number of noise, rounded so that a replay's
slip hardly ever moves it. The numbers of a learner, message after message, are one stream, and the table keeps for a key which
one came after it. If a key is heard again, up to its sign, what comes next should still be new: the table's guess is right with
probability below `KEY_MATCH_PROBABILITY`.

A sum is of noise at the same coordinate, of the last rounds or of the same one. Of all sums and differences of one number or
two none is kept: a table has the numbers, and a number that is looked up is one of them if something in the table is what is
left of it when another is taken off. So work grows with the numbers that are kept, not with their pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.conformance.block import MAX_NORMAL_SCORE
from sottovoce_core.auditing.conformance.residuals import ALL_BITS, ByteArray, Residuals
from sottovoce_core.noise import LATTICE_BITS

# ---- keys ------------------------------------------------------------------------------------------------------------

_WINDOW_BITS = 6
"""A key is 64 lattice points wide: of equal numbers, one slip of a lattice point parts less than one in sixteen."""

KEY_MATCH_PROBABILITY = (2.0**_WINDOW_BITS + 1.0) * 2.0 ** -(LATTICE_BITS + 1)
"""Of any given key, at most: so many points, each with a probability of at most half the finest spacing."""

MAX_TABLE_KEYS = 2**20 - 3
"""Keys in a table, at most: a prime number, so that keys of coarse noise are spread, too. 16 MiB, used as they come."""


def _keys_of(values: FloatArray) -> IntArray:
    """The keys of standard Laplace numbers."""
    half = 1 << (_WINDOW_BITS - 1)
    keys: IntArray = (np.rint(values * 2.0**LATTICE_BITS).astype(np.int64) + half) >> _WINDOW_BITS
    return keys


@dataclass(frozen=True, slots=True)
class _KeyRepeats:
    """How new the numbers of a round are, `(learners,)` each.

    Attributes:
        known: numbers that were heard before, up to their sign, and were followed by another.
        expected: how many of these are expected at most.
        again: of those which followed, how many are as they were; by chance a share `KEY_MATCH_PROBABILITY` of `known`.
        same_round_repeat_counts, same_round_followed_counts: the same for what another learner said in this very round. Who copied whom is not known.
    """

    repeat_counts: IntArray
    expected_counts: FloatArray
    followed_repeat_counts: IntArray
    same_round_repeat_counts: IntArray
    same_round_followed_counts: IntArray


class KeyTable:
    """Keys, and which key came next; a newer one pushes out what is in its slot.

    An empty slot holds 0 and 0: zero after zero is no noise, and is known from the start.

    Attributes:
        kept: keys in the table, at most.
    """

    def __init__(self) -> None:
        self._keys = np.zeros(MAX_TABLE_KEYS, dtype=np.int64)
        self._next = np.zeros(MAX_TABLE_KEYS, dtype=np.int64)
        self.key_count = 1
        self._last: dict[int, int] = {}

    @classmethod
    def from_table(cls, table: IntArray) -> KeyTable:
        """Those of an earlier `table`."""
        keys = cls()
        keys._keys[table[0] % MAX_TABLE_KEYS], keys._next[table[0] % MAX_TABLE_KEYS] = table
        keys.key_count += table.shape[1]
        return keys

    @property
    def table(self) -> IntArray:
        """`(2, keys)`: every key but 0, and which came next. Whoever has them and the messages knows the learners' states."""
        full = np.flatnonzero(self._keys)
        return np.stack([self._keys[full], self._next[full]])

    def begin_run(self) -> None:
        """The table is kept; the streams of learners begin anew."""
        self._last = {}

    def add_round(self, values: FloatArray, exact: BoolArray) -> _KeyRepeats:
        """Take the numbers of a round.

        Args:
            values: `(learners, numbers)` standard Laplace numbers.
            exact: which of them are known to a few lattice points; the others are left out.
        """
        n = len(values)
        before, after, owner = self._links(_keys_of(np.where(exact, values, 0.0)), exact)
        slots = before % MAX_TABLE_KEYS
        known = self._keys[slots] == before
        again = known & (self._next[slots] == after)
        chance = (
            2.0 * KEY_MATCH_PROBABILITY * (self.key_count + len(slots))
        )  # those of this round may be said twice, too
        found = _KeyRepeats(
            repeat_counts=np.bincount(owner[known], minlength=n),
            expected_counts=np.bincount(owner, minlength=n).astype(np.float64) * chance,
            followed_repeat_counts=np.bincount(owner[again], minlength=n),
            same_round_repeat_counts=np.zeros(n, dtype=np.int64),
            same_round_followed_counts=np.zeros(n, dtype=np.int64),
        )
        for i, j, same in _twice(before[~known], after[~known], owner[~known]):
            (found.repeat_counts if i == j else found.same_round_repeat_counts)[i] += 1
            (found.followed_repeat_counts if i == j else found.same_round_followed_counts)[i] += same
        self._keys[slots], self._next[slots] = before, after
        self.key_count = min(self.key_count + len(slots), MAX_TABLE_KEYS)
        return found

    def _links(self, keys: IntArray, exact: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
        """Every key, the one after it, both with the first one's sign taken off, and whose they are; in order."""
        before, after, owner = [], [], []
        for i, (row, kept) in enumerate(zip(keys, exact, strict=True)):
            own = row[kept]
            if i in self._last:
                own = np.concatenate([[self._last[i]], own])
            if len(own):
                self._last[i] = int(own[-1])
            before.append(own[:-1])
            after.append(own[1:])
            owner.append(np.full(max(len(own) - 1, 0), i))
        first = np.concatenate(before)
        sign = np.where(first < 0, -1, 1)
        return first * sign, np.concatenate(after) * sign, np.concatenate(owner)


def _twice(before: IntArray, after: IntArray, owner: IntArray) -> Iterator[tuple[int, int, bool]]:
    """Who said a key that was said in this round already, who had said it, and whether the same followed."""
    if len(np.unique(before)) == len(before):
        return
    said: dict[int, tuple[int, int]] = {}
    for key, following, i in zip(before.tolist(), after.tolist(), owner.tolist(), strict=True):
        if key in said:
            j, expected = said[key]
            yield i, j, expected == following
        said[key] = i, following


# ---- sums ------------------------------------------------------------------------------------------------------------

_SLOTS_PER_NUMBER = 8
"""Slots of the table for every number: one in sixteen finds its slot taken, and is not kept."""


@dataclass(frozen=True, slots=True)
class _SumRepeats:
    """Numbers of a round that are 0, or one or two others, added or taken off, `(learners,)` each.

    Attributes:
        before: numbers that are so by noise of earlier rounds alone.
        expected: how many of these are expected at most.
        now, expected_same_round_counts: the same of those that need noise of learners before them in this round. Who follows whom is not known.
    """

    earlier_counts: IntArray
    expected_counts: FloatArray
    same_round_counts: IntArray
    expected_same_round_counts: FloatArray


class _Sums:
    """The noise of the last rounds, in one unit for all learners.

    Args:
        rounds: that are kept.
        learners: how many are watched.
        numbers: of all fields together.
    """

    def __init__(self, rounds: int, learners: int, numbers: int) -> None:
        self._learners = learners
        self._kept = np.zeros((rounds * learners, numbers))  # the oldest first; 0 where none is known

    def hear(self, values: FloatArray, scale: FloatArray, exact: BoolArray) -> _SumRepeats:
        """Take the numbers of a round.

        Args:
            values: `(learners, numbers)` standard Laplace numbers.
            scale: the same, of the noise.
            exact: the same: which are known to a few lattice points; the others are left out.
        """
        noise = np.where(exact, values * scale, 0.0)
        unit = np.max(scale, axis=0, where=exact, initial=0.0)
        unit = np.where(unit > 0.0, unit, 1.0)
        blank = np.zeros((1, noise.shape[1]))
        table = _Table(np.concatenate([blank, self._kept, noise]) / unit)
        first = 1 + len(self._kept)
        found = np.array([table.summed(first + i, first) for i in range(self._learners)]) & exact[:, None]
        earlier = np.count_nonzero(self._kept, axis=0)
        others: IntArray = np.cumsum(exact, axis=0) - exact
        chance = np.where(exact, KEY_MATCH_PROBABILITY * unit / scale, 0.0)
        self._kept = np.concatenate([self._kept, noise])[self._learners :]
        return _SumRepeats(
            earlier_counts=np.count_nonzero(found[:, 0], axis=1),
            expected_counts=(chance * (1 + 2 * earlier) ** 2).sum(axis=1),
            same_round_counts=np.count_nonzero(found[:, 1], axis=1),
            expected_same_round_counts=(chance * 2 * others * (1 + 2 * (earlier + others))).sum(axis=1),
        )


class _Table:
    """Where a number stands, if it stands anywhere, up to its sign; of every coordinate by itself.

    Args:
        values: `(rows, numbers)`, the first known first, which keeps its slot.
    """

    def __init__(self, values: FloatArray) -> None:
        self._values, self._keys = values, _keys_of(np.abs(values))
        self._columns = np.arange(values.shape[1])
        self._slots = _SLOTS_PER_NUMBER * len(values) + 1
        self._rows = np.zeros((self._slots, values.shape[1]), dtype=np.int64)
        for row, slots in reversed([*enumerate(self._keys % self._slots)]):  # what is written last stays
            self._rows[slots, self._columns] = row

    def summed(self, row: int, first: int) -> BoolArray:
        """`(2, numbers)` of a row: whether a number is a sum of rows before `first`, and if not, of rows before its own."""
        one = self._values[:row]
        rest = _keys_of(np.abs(np.stack([self._values[row] - one, self._values[row] + one])))
        other = self._rows[rest % self._slots, self._columns]
        newer = np.maximum(other, np.arange(row)[:, None])
        found = (self._keys[other, self._columns] == rest) & (newer < row)
        before = (found & (newer < first)).any(axis=(0, 1))
        return np.stack([before, found.any(axis=(0, 1)) & ~before])


# ---- rounds ----------------------------------------------------------------------------------------------------------

LAGS = 8
"""Rounds before that noise is compared with."""

_MAX_LAG_ROUNDS = 64
"""Rounds before whose noise signs are compared with, at the same coordinate alone."""

SHIFTS = (-1, 0, 1)
"""Coordinates beside a number that it is compared with."""

_PAST = ("constant", "centre", "decision", "gradient", "record", "record with its label")
"""What a learner had before it drew: as in `Residuals.past`; the constant is for signs that are not fair."""

EQUALITY_TOLERANCE = 2.0**-36
"""Numbers closer than this, in scales, count as equal: 16 lattice points, more than a replay rounds off.

A standard Laplace number is so close to any given number with at most this probability."""

_MAX_EXACT_RESOLUTION = 2.0**-38
"""Resolution of float64, in scales, up to which numbers may be compared."""

_MAX_KNOWN_RESOLUTION = 2.0**-12
"""Resolution, in scales, beyond which nothing is said of a number."""

_MAX_RELATIVE_PAST = 5.0
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
        self.message_steps: IntArray = np.zeros(shape, np.int64)
        self.lost_bits: ByteArray = np.full(shape, ALL_BITS, np.int8)
        self.scale: FloatArray = np.ones(shape)
        self.resolution: FloatArray = np.zeros(shape)
        self.past: FloatArray = np.zeros((learners, len(_PAST), numbers))

    def put(self, row: int, start: int, noise: Residuals, message: FloatArray, past: Mapping[str, FloatArray]) -> None:
        """The noise of one field, `(1, 1, dim)`, of a learner's message; numbers from `start` on are this field's."""
        width = noise.values.shape[-1]
        at = row, slice(start, start + width)
        scale, centre = float(noise.scale[0]), noise.past["centre"][0, 0]
        self.resolution[at] = np.spacing(np.maximum(np.abs(message[0, 0]), np.abs(centre))) / scale
        self.values[at] = np.where(self.resolution[at] < _MAX_KNOWN_RESOLUTION, noise.values[0, 0], np.nan)
        self.steps[at], self.message_steps[at], self.lost_bits[at] = (
            noise.steps[0, 0],
            noise.message_steps[0, 0],
            noise.lost_bits[0, 0],
        )
        self.scale[at] = scale
        self.past[row, 0, start : start + width] = 1.0
        for k, name in enumerate(_PAST[1:], 1):
            value = centre if name == "centre" else past[name][0, 0] if name in past else None
            if value is not None and len(value) == width:
                self.past[row, k, start : start + width] = value


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """A round; arrays `(learners, numbers)`, 0 where no noise is known.

    Attributes:
        known: 1.0 where noise is known.
        tail: `exp(-|r|)`; 1 where unknown.
        sizes: |r|.
        signs: -1.0, 0.0 or 1.0.
        normal: normal scores of the numbers.
        steps, said, lost: as in `Residuals`.
        past: `(4, learners, len(_PAST), numbers)`, about 1 in size, and how much above 1, each with its squares.
        now: `(4, learners, numbers)` what is bet on: signs and that they are known, sizes without their mean and the same.
        beside: `(4, shifts * learners, numbers)` noise of all learners, shifted to all sides: normal scores and their squares,
            sizes evenly spread in [-1, 1] (`1 - 2 exp(-|r|)`) and theirs.
        before: `(4, LAGS * shifts * learners, numbers)` the same of the rounds before, which stand where they were written.
        order: `(LAGS,)` where the last round stands, the one before it, and so on.
        far: `((FARTHEST_LAG - LAGS) * learners, numbers)` normal scores of the rounds before those, the last one first.
        twice: `(learners,)` numbers that are 0, or as at one of `LAGS` rounds before in the same coordinate, up to the sign.
        cancelled: `(learners,)` numbers that are minus the noise of all learners before it in this round, together.
        exact: `(learners,)` numbers that could have been found so.
        heard: which numbers were heard before.
        summed: which are sums or differences of others, of as many rounds.
    """

    known_mask: FloatArray
    tail: FloatArray
    sizes: FloatArray
    signs: FloatArray
    normal_scores: FloatArray
    steps: IntArray
    message_steps: IntArray
    lost_bits: ByteArray
    past: FloatArray
    bet_targets: FloatArray
    same_round_noise: FloatArray
    earlier_noise: FloatArray
    lag_slots: IntArray
    far_noise: FloatArray
    repeat_counts: IntArray
    cancelled_counts: IntArray
    exact_counts: IntArray
    key_repeats: _KeyRepeats
    sum_repeats: _SumRepeats


def _shifted(values: FloatArray) -> FloatArray:
    """`(learners, numbers)` by all `SHIFTS`, one after another: `(shifts * learners, numbers)`."""
    return np.concatenate([np.roll(values, shift, axis=-1) for shift in SHIFTS], axis=-2)


def _with_squares(first: FloatArray, second: FloatArray) -> FloatArray:
    """Two arrays, each before its squares: `(4, ...)`."""
    return np.stack([first, first**2, second, second**2])


@dataclass(slots=True)
class NoiseHistory:
    """What is kept of the rounds before: as much after many rounds as after few.

    Args:
        learners: how many are watched.
        numbers: of all fields together.
        keys: those of the runs before.
    """

    learners: int
    numbers: int
    key_table: KeyTable
    _at: int = 0
    _rounds: int = 0
    _last: RoundObservation | None = None
    _values: FloatArray = field(init=False)
    _before: FloatArray = field(init=False)
    _order: IntArray = field(init=False)
    _squares: FloatArray = field(init=False)
    _sums: _Sums = field(init=False)
    _far: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        rows = LAGS * len(SHIFTS) * self.learners
        self._values = np.full((LAGS, self.learners, self.numbers), np.inf)
        self._before = np.zeros((4, rows, self.numbers))
        self._order = np.arange(LAGS)[::-1].copy()
        self._squares = np.zeros((self.learners, len(_PAST), 1))
        self._far = np.zeros((_MAX_LAG_ROUNDS * self.learners, self.numbers))
        self._sums = _Sums(LAGS, self.learners, self.numbers)
        self.key_table.begin_run()

    def see(self, said: RoundNoise) -> RoundObservation:
        """What there is to see of the next round, until the one after it (`before` and `far` are the memory itself)."""
        self._keep_last()
        known = np.isfinite(said.values)
        values = np.where(known, said.values, 0.0)
        sizes, signs = np.abs(values), np.sign(values)
        tail = np.exp(-sizes)
        normal, past = np.minimum(-special.ndtri(0.5 * tail), MAX_NORMAL_SCORE) * signs, self._even_past(said.past)
        exact = known & (said.resolution < _MAX_EXACT_RESOLUTION)
        self._last = seen = RoundObservation(
            known_mask=known.astype(np.float64),
            tail=tail,
            sizes=sizes,
            signs=signs,
            normal_scores=normal,
            steps=said.steps,
            message_steps=said.message_steps,
            lost_bits=said.lost_bits,
            past=_with_squares(past, np.clip(np.abs(past) - 1.0, -1.0, 1.0)),
            bet_targets=np.stack([signs, np.abs(signs), sizes - known, known]),
            same_round_noise=_with_squares(_shifted(normal), _shifted(np.where(known, 1.0 - 2.0 * tail, 0.0))),
            earlier_noise=self._before,
            lag_slots=self._order,
            far_noise=self._far[LAGS * self.learners :],
            repeat_counts=np.count_nonzero(exact & self._twice(said.values), axis=1),
            cancelled_counts=np.count_nonzero(exact & _cancelled(said, exact), axis=1),
            exact_counts=np.count_nonzero(exact, axis=1),
            key_repeats=self.key_table.add_round(values, exact),
            sum_repeats=self._sums.hear(values, said.scale, exact),
        )
        return seen

    def _keep_last(self) -> None:
        """The round before is over."""
        if self._last is None:
            return
        seen = self._last
        self._values[self._at] = np.where(seen.known_mask > 0.0, seen.signs * seen.sizes, np.inf)
        rows = len(SHIFTS) * self.learners
        here = slice(self._at * rows, (self._at + 1) * rows)
        self._before[:, here] = seen.same_round_noise
        self._order[:] = np.roll(self._order, 1)
        self._order[0] = self._at
        self._at = (self._at + 1) % LAGS
        self._far[self.learners :] = self._far[: -self.learners]
        self._far[: self.learners] = seen.normal_scores

    def _twice(self, values: FloatArray) -> BoolArray:
        nearest = np.minimum(np.abs(self._values - values), np.abs(self._values + values)).min(axis=0, initial=np.inf)
        twice: BoolArray = np.minimum(nearest, np.abs(values)) < EQUALITY_TOLERANCE
        return twice

    def _even_past(self, past: FloatArray) -> FloatArray:
        """Divided by its root mean square so far, this round's counted, which was known before the noise."""
        self._squares += np.mean(past**2, axis=-1, keepdims=True)
        self._rounds += 1
        size = np.sqrt(self._squares / self._rounds)
        return np.clip(
            np.divide(past, size, out=np.zeros_like(past), where=size > 0.0), -_MAX_RELATIVE_PAST, _MAX_RELATIVE_PAST
        )


def _cancelled(said: RoundNoise, exact: BoolArray) -> BoolArray:
    """Where the noise of a learner and of all before it adds up to nothing; scales may differ."""
    total = np.cumsum(np.where(exact, said.values * said.scale, 0.0), axis=0)
    cancelled: BoolArray = np.abs(total) < EQUALITY_TOLERANCE * said.scale
    cancelled[0] = False
    return cancelled
