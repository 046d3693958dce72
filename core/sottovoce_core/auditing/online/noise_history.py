"""Observations of a round for bets on noise, and the earlier noise that they are compared with.

Everything that a bet's stake depends on was known before the number it bets on: noise of the `LAGS` earlier rounds, the
learner's state when it drew, and of the same round the noise of preceding learners. The order is fixed.

The table of keys has a constant size, and may be kept from run to run. A key is a noise number, rounded so that the rounding
error of a replay hardly ever changes it. The numbers of a learner, message after message, are one stream, and the table stores
for a key the one that followed it. If a key recurs, up to its sign, its successor should still be new: the table predicts it
correctly with probability below `KEY_MATCH_PROBABILITY`.

A sum is of noise at the same coordinate, of the last rounds or of the same one. Sums and differences of one or two numbers are
not stored: the table stores the numbers, and a number is such a sum if the table contains the remainder after another number
is subtracted or added. So work grows with the stored numbers, not with their pairs.
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
"""Logarithm of the width of a key, 64 lattice points: a slip of one point separates fewer than one in sixteen equal numbers."""

KEY_MATCH_PROBABILITY = (2.0**_WINDOW_BITS + 1.0) * 2.0 ** -(LATTICE_BITS + 1)
"""Maximum probability of any given key: the points of its window, each with at most half the finest spacing."""

MAX_TABLE_KEYS = 2**20 - 3
"""Maximum number of keys in a table: a prime, so that keys of coarse noise are spread, too. 16 MiB, allocated on use."""


def _compute_keys(values: FloatArray) -> IntArray:
    """Compute the keys of standard Laplace numbers."""
    half = 1 << (_WINDOW_BITS - 1)
    keys: IntArray = (np.rint(values * 2.0**LATTICE_BITS).astype(np.int64) + half) >> _WINDOW_BITS
    return keys


@dataclass(frozen=True, slots=True)
class _KeyRepeats:
    """Counts of repeated keys in a round, `(learners,)` each.

    Attributes:
        repeat_counts: numbers that occurred before, up to their sign, and had a successor.
        expected_counts: upper bound on the expected number of these.
        followed_repeat_counts: repeats with the same successor as before; by chance a fraction `KEY_MATCH_PROBABILITY` of
            `repeat_counts`.
        same_round_repeat_counts, same_round_followed_counts: the same for numbers of another learner in this round. The
            direction of copying is not known.
    """

    repeat_counts: IntArray
    expected_counts: FloatArray
    followed_repeat_counts: IntArray
    same_round_repeat_counts: IntArray
    same_round_followed_counts: IntArray


class KeyTable:
    """Hash table from keys to their successors; a newer key replaces an older one in its slot.

    An empty slot holds 0 and 0: zero after zero is no noise, and counts as known from the start.

    Attributes:
        key_count: maximum number of keys in the table.
    """

    def __init__(self) -> None:
        self._keys = np.zeros(MAX_TABLE_KEYS, dtype=np.int64)
        self._next = np.zeros(MAX_TABLE_KEYS, dtype=np.int64)
        self.key_count = 1
        self._last: dict[int, int] = {}

    @classmethod
    def from_table(cls, table: IntArray) -> KeyTable:
        """Restore the keys of an earlier `table`."""
        keys = cls()
        keys._keys[table[0] % MAX_TABLE_KEYS], keys._next[table[0] % MAX_TABLE_KEYS] = table
        keys.key_count += table.shape[1]
        return keys

    @property
    def table(self) -> IntArray:
        """`(2, keys)` every key but 0, and its successor. With these and the messages, the learners' states can be computed."""
        full = np.flatnonzero(self._keys)
        return np.stack([self._keys[full], self._next[full]])

    def begin_run(self) -> None:
        """Keep the table and begin new streams of the learners."""
        self._last = {}

    def add_round(self, values: FloatArray, exact: BoolArray) -> _KeyRepeats:
        """Add the numbers of a round.

        Args:
            values: `(learners, numbers)` standard Laplace numbers.
            exact: numbers known to a few lattice points; the others are excluded.
        """
        n = len(values)
        keys, successors, owner = self._link_keys(_compute_keys(np.where(exact, values, 0.0)), exact)
        slots = keys % MAX_TABLE_KEYS
        is_known = self._keys[slots] == keys
        is_followed = is_known & (self._next[slots] == successors)
        probability = 2.0 * KEY_MATCH_PROBABILITY * (self.key_count + len(slots))  # keys of this round may repeat, too
        repeats = _KeyRepeats(
            repeat_counts=np.bincount(owner[is_known], minlength=n),
            expected_counts=np.bincount(owner, minlength=n).astype(np.float64) * probability,
            followed_repeat_counts=np.bincount(owner[is_followed], minlength=n),
            same_round_repeat_counts=np.zeros(n, dtype=np.int64),
            same_round_followed_counts=np.zeros(n, dtype=np.int64),
        )
        for i, j, same in _find_same_round_repeats(keys[~is_known], successors[~is_known], owner[~is_known]):
            (repeats.repeat_counts if i == j else repeats.same_round_repeat_counts)[i] += 1
            (repeats.followed_repeat_counts if i == j else repeats.same_round_followed_counts)[i] += same
        self._keys[slots], self._next[slots] = keys, successors
        self.key_count = min(self.key_count + len(slots), MAX_TABLE_KEYS)
        return repeats

    def _link_keys(self, keys: IntArray, exact: BoolArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return every key, its successor, both with the sign of the first removed, and their learner; in order."""
        firsts, seconds, owner = [], [], []
        for i, (row, is_exact) in enumerate(zip(keys, exact, strict=True)):
            own = row[is_exact]
            if i in self._last:
                own = np.concatenate([[self._last[i]], own])
            if len(own):
                self._last[i] = int(own[-1])
            firsts.append(own[:-1])
            seconds.append(own[1:])
            owner.append(np.full(max(len(own) - 1, 0), i))
        first = np.concatenate(firsts)
        sign = np.where(first < 0, -1, 1)
        return first * sign, np.concatenate(seconds) * sign, np.concatenate(owner)


def _find_same_round_repeats(keys: IntArray, successors: IntArray, owner: IntArray) -> Iterator[tuple[int, int, bool]]:
    """Iterate over repeated keys of a round: the learner, the earlier learner, and whether the successor is the same."""
    if len(np.unique(keys)) == len(keys):
        return
    latest: dict[int, tuple[int, int]] = {}
    for key, successor, i in zip(keys.tolist(), successors.tolist(), owner.tolist(), strict=True):
        if key in latest:
            j, expected = latest[key]
            yield i, j, expected == successor
        latest[key] = i, successor


# ---- sums ------------------------------------------------------------------------------------------------------------

_SLOTS_PER_NUMBER = 8
"""Number of slots of the table per number: one in sixteen numbers finds its slot occupied, and is dropped."""


@dataclass(frozen=True, slots=True)
class _SumRepeats:
    """Counts of numbers of a round that are 0, or one or two others, added or subtracted, `(learners,)` each.

    Attributes:
        earlier_counts: sums of noise of earlier rounds alone.
        expected_counts: upper bound on the expected number of these.
        same_round_counts, expected_same_round_counts: the same for sums that need noise of preceding learners in this round.
            The direction of copying is not known.
    """

    earlier_counts: IntArray
    expected_counts: FloatArray
    same_round_counts: IntArray
    expected_same_round_counts: FloatArray


class _Sums:
    """Noise of the last rounds, in one unit for all learners.

    Args:
        rounds: number of rounds kept.
        learners: number of watched learners.
        numbers: numbers of all fields together.
    """

    def __init__(self, rounds: int, learners: int, numbers: int) -> None:
        self._learners = learners
        self._kept = np.zeros((rounds * learners, numbers))  # oldest first; 0 where the noise is not known

    def add_round(self, values: FloatArray, scale: FloatArray, exact: BoolArray) -> _SumRepeats:
        """Add the numbers of a round.

        Args:
            values: `(learners, numbers)` standard Laplace numbers.
            scale: `(learners, numbers)` noise scale.
            exact: `(learners, numbers)` whether a number is known to a few lattice points; the others are excluded.
        """
        noise = np.where(exact, values * scale, 0.0)
        unit = np.max(scale, axis=0, where=exact, initial=0.0)
        unit = np.where(unit > 0.0, unit, 1.0)
        blank = np.zeros((1, noise.shape[1]))
        table = _Table(np.concatenate([blank, self._kept, noise]) / unit)
        first = 1 + len(self._kept)
        is_sum = np.array([table.find_sums(first + i, first) for i in range(self._learners)]) & exact[:, None]
        earlier = np.count_nonzero(self._kept, axis=0)
        preceding: IntArray = np.cumsum(exact, axis=0) - exact
        probability = np.where(exact, KEY_MATCH_PROBABILITY * unit / scale, 0.0)
        self._kept = np.concatenate([self._kept, noise])[self._learners :]
        return _SumRepeats(
            earlier_counts=np.count_nonzero(is_sum[:, 0], axis=1),
            expected_counts=(probability * (1 + 2 * earlier) ** 2).sum(axis=1),
            same_round_counts=np.count_nonzero(is_sum[:, 1], axis=1),
            expected_same_round_counts=(probability * 2 * preceding * (1 + 2 * (earlier + preceding))).sum(axis=1),
        )


class _Table:
    """Hash table of numbers up to their sign, for each coordinate separately.

    Args:
        values: `(rows, numbers)`, earliest first; the earliest number keeps its slot.
    """

    def __init__(self, values: FloatArray) -> None:
        self._values, self._keys = values, _compute_keys(np.abs(values))
        self._columns = np.arange(values.shape[1])
        self._slots = _SLOTS_PER_NUMBER * len(values) + 1
        self._rows = np.zeros((self._slots, values.shape[1]), dtype=np.int64)
        for row, slots in reversed([*enumerate(self._keys % self._slots)]):  # the last write wins
            self._rows[slots, self._columns] = row

    def find_sums(self, row: int, first: int) -> BoolArray:
        """Return `(2, numbers)` whether each number of a row is a sum of rows before `first`, or else of rows before its own."""
        earlier = self._values[:row]
        remainder = _compute_keys(np.abs(np.stack([self._values[row] - earlier, self._values[row] + earlier])))
        other = self._rows[remainder % self._slots, self._columns]
        newer = np.maximum(other, np.arange(row)[:, None])
        found = (self._keys[other, self._columns] == remainder) & (newer < row)
        by_earlier = (found & (newer < first)).any(axis=(0, 1))
        return np.stack([by_earlier, found.any(axis=(0, 1)) & ~by_earlier])


# ---- rounds ----------------------------------------------------------------------------------------------------------

LAGS = 8
"""Number of earlier rounds whose noise is compared."""

_MAX_LAG_ROUNDS = 64
"""Number of earlier rounds whose noise signs are compared with, at the same coordinate only."""

SHIFTS = (-1, 0, 1)
"""Offsets of the coordinates with which a number is compared."""

_PAST = ("constant", "centre", "decision", "gradient", "record", "record with its label")
"""Quantities of a learner's state before it drew: as in `Residuals.past`; the constant detects unfair signs."""

EQUALITY_TOLERANCE = 2.0**-36
"""Distance, in scales, below which numbers count as equal: 16 lattice points, more than the rounding error of a replay.

A standard Laplace number is this close to any given number with at most this probability.
"""

_MAX_EXACT_RESOLUTION = 2.0**-38
"""Maximum resolution of float64, in scales, at which numbers may be compared."""

_MAX_KNOWN_RESOLUTION = 2.0**-12
"""Maximum resolution, in scales, at which a number counts as known."""

_MAX_RELATIVE_PAST = 5.0
"""Maximum of a value of the past in units of its root mean square; larger ones are clipped."""


class RoundNoise:
    """Noise of all watched learners in a round, fields concatenated.

    Args:
        learners: number of watched learners.
        numbers: numbers of all fields together.

    Attributes:
        values: `(learners, numbers)` standard Laplace numbers; NaN where not known.
        steps, message_steps, lost_bits: `(learners, numbers)` as in `Residuals`.
        scale: `(learners, numbers)` noise scale.
        resolution: `(learners, numbers)` resolution of float64, in scales.
        past: `(learners, len(_PAST), numbers)`; 0 where not known.
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

    def store(
        self, row: int, start: int, noise: Residuals, message: FloatArray, past: Mapping[str, FloatArray]
    ) -> None:
        """Store the noise of one field, `(1, 1, dim)`, of a learner's message, in the numbers from `start` on."""
        width = noise.values.shape[-1]
        place = row, slice(start, start + width)
        scale, centre = float(noise.scale[0]), noise.past["centre"][0, 0]
        self.resolution[place] = np.spacing(np.maximum(np.abs(message[0, 0]), np.abs(centre))) / scale
        self.values[place] = np.where(self.resolution[place] < _MAX_KNOWN_RESOLUTION, noise.values[0, 0], np.nan)
        self.steps[place] = noise.steps[0, 0]
        self.message_steps[place] = noise.message_steps[0, 0]
        self.lost_bits[place] = noise.lost_bits[0, 0]
        self.scale[place] = scale
        self.past[row, 0, start : start + width] = 1.0
        for k, name in enumerate(_PAST[1:], 1):
            value = centre if name == "centre" else past[name][0, 0] if name in past else None
            if value is not None and len(value) == width:
                self.past[row, k, start : start + width] = value


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """Observation of a round; arrays `(learners, numbers)`, 0 where no noise is known.

    Attributes:
        known_mask: 1.0 where noise is known.
        tail: `exp(-|r|)`; 1 where unknown.
        sizes: |r|.
        signs: -1.0, 0.0 or 1.0.
        normal_scores: normal scores of the numbers.
        steps, message_steps, lost_bits: as in `Residuals`.
        past: `(4, learners, len(_PAST), numbers)` past values scaled to about 1, and their excess above 1, each with its
            squares.
        bet_targets: `(4, learners, numbers)` signs and their squares, sizes minus their mean and the known mask.
        same_round_noise: `(4, shifts * learners, numbers)` noise of all learners at all shifts: normal scores and their
            squares, sizes uniform in [-1, 1] (`1 - 2 exp(-|r|)`) and their squares.
        earlier_noise: `(4, LAGS * shifts * learners, numbers)` the same for earlier rounds, in the slots where they were
            written.
        lag_slots: `(LAGS,)` slots of the earlier rounds, latest first.
        far_noise: `((_MAX_LAG_ROUNDS - LAGS) * learners, numbers)` normal scores of the rounds before those, latest first.
        repeat_counts: `(learners,)` numbers that are 0, or equal up to the sign to one of the `LAGS` earlier rounds at the
            same coordinate.
        cancelled_counts: `(learners,)` numbers that are minus the sum of the noise of all preceding learners in this round.
        exact_counts: `(learners,)` numbers precise enough to be counted in the two above.
        key_repeats: repeats of numbers by their keys.
        sum_repeats: numbers that are sums or differences of others, over `LAGS` rounds.
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


def _stack_shifts(values: FloatArray) -> FloatArray:
    """Shift `(learners, numbers)` by all `SHIFTS`, and concatenate: `(shifts * learners, numbers)`."""
    return np.concatenate([np.roll(values, shift, axis=-1) for shift in SHIFTS], axis=-2)


def _with_squares(first: FloatArray, second: FloatArray) -> FloatArray:
    """Stack two arrays, each followed by its squares: `(4, ...)`."""
    return np.stack([first, first**2, second, second**2])


@dataclass(slots=True)
class NoiseHistory:
    """Noise of earlier rounds, in constant memory.

    Args:
        learners: number of watched learners.
        numbers: numbers of all fields together.
        key_table: keys of earlier runs.
    """

    learners: int
    numbers: int
    key_table: KeyTable
    _slot: int = 0
    _rounds: int = 0
    _last: RoundObservation | None = None
    _values: FloatArray = field(init=False)
    _earlier: FloatArray = field(init=False)
    _lag_slots: IntArray = field(init=False)
    _squares: FloatArray = field(init=False)
    _sums: _Sums = field(init=False)
    _far: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        rows = LAGS * len(SHIFTS) * self.learners
        self._values = np.full((LAGS, self.learners, self.numbers), np.inf)
        self._earlier = np.zeros((4, rows, self.numbers))
        self._lag_slots = np.arange(LAGS)[::-1].copy()
        self._squares = np.zeros((self.learners, len(_PAST), 1))
        self._far = np.zeros((_MAX_LAG_ROUNDS * self.learners, self.numbers))
        self._sums = _Sums(LAGS, self.learners, self.numbers)
        self.key_table.begin_run()

    def observe(self, noise: RoundNoise) -> RoundObservation:
        """Return the observation of the next round, valid until the one after it.

        `earlier_noise` and `far_noise` are views of this memory.
        """
        self._store_last_round()
        known = np.isfinite(noise.values)
        values = np.where(known, noise.values, 0.0)
        sizes, signs = np.abs(values), np.sign(values)
        tail = np.exp(-sizes)
        normal_scores = np.minimum(-special.ndtri(0.5 * tail), MAX_NORMAL_SCORE) * signs
        past = self._normalize_past(noise.past)
        exact = known & (noise.resolution < _MAX_EXACT_RESOLUTION)
        self._last = observation = RoundObservation(
            known_mask=known.astype(np.float64),
            tail=tail,
            sizes=sizes,
            signs=signs,
            normal_scores=normal_scores,
            steps=noise.steps,
            message_steps=noise.message_steps,
            lost_bits=noise.lost_bits,
            past=_with_squares(past, np.clip(np.abs(past) - 1.0, -1.0, 1.0)),
            bet_targets=np.stack([signs, np.abs(signs), sizes - known, known]),
            same_round_noise=_with_squares(
                _stack_shifts(normal_scores), _stack_shifts(np.where(known, 1.0 - 2.0 * tail, 0.0))
            ),
            earlier_noise=self._earlier,
            lag_slots=self._lag_slots,
            far_noise=self._far[LAGS * self.learners :],
            repeat_counts=np.count_nonzero(exact & self._is_repeated(noise.values), axis=1),
            cancelled_counts=np.count_nonzero(exact & _is_cancelled(noise, exact), axis=1),
            exact_counts=np.count_nonzero(exact, axis=1),
            key_repeats=self.key_table.add_round(values, exact),
            sum_repeats=self._sums.add_round(values, noise.scale, exact),
        )
        return observation

    def _store_last_round(self) -> None:
        """Store the last observed round as earlier noise."""
        if self._last is None:
            return
        observation = self._last
        self._values[self._slot] = np.where(observation.known_mask > 0.0, observation.signs * observation.sizes, np.inf)
        rows = len(SHIFTS) * self.learners
        slot_rows = slice(self._slot * rows, (self._slot + 1) * rows)
        self._earlier[:, slot_rows] = observation.same_round_noise
        self._lag_slots[:] = np.roll(self._lag_slots, 1)
        self._lag_slots[0] = self._slot
        self._slot = (self._slot + 1) % LAGS
        self._far[self.learners :] = self._far[: -self.learners]
        self._far[: self.learners] = observation.normal_scores

    def _is_repeated(self, values: FloatArray) -> BoolArray:
        nearest = np.minimum(np.abs(self._values - values), np.abs(self._values + values)).min(axis=0, initial=np.inf)
        twice: BoolArray = np.minimum(nearest, np.abs(values)) < EQUALITY_TOLERANCE
        return twice

    def _normalize_past(self, past: FloatArray) -> FloatArray:
        """Divide by the root mean square so far, including this round, which was known before the noise."""
        self._squares += np.mean(past**2, axis=-1, keepdims=True)
        self._rounds += 1
        size = np.sqrt(self._squares / self._rounds)
        return np.clip(
            np.divide(past, size, out=np.zeros_like(past), where=size > 0.0), -_MAX_RELATIVE_PAST, _MAX_RELATIVE_PAST
        )


def _is_cancelled(noise: RoundNoise, exact: BoolArray) -> BoolArray:
    """Return where the noise of a learner and of all preceding ones adds to zero; scales may differ."""
    total = np.cumsum(np.where(exact, noise.values * noise.scale, 0.0), axis=0)
    cancelled: BoolArray = np.abs(total) < EQUALITY_TOLERANCE * noise.scale
    cancelled[0] = False
    return cancelled
