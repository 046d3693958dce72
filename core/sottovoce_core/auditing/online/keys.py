"""Keys of noise that was heard before, and sums of it: how a repeated number is noticed.

The table of keys has a constant size, and may be kept from run to run. A key is a number of noise, rounded so that a replay's
slip hardly ever moves it. The numbers of a learner, message after message, are one stream, and the table keeps for a key which
one came after it. If a key is heard again, up to its sign, what comes next should still be new: the table's guess is right with
probability below `CHANCE`.

A sum is of noise at the same coordinate, of the last rounds or of the same one. Of all sums and differences of one number or
two none is kept: a table has the numbers, and a number that is looked up is one of them if something in the table is what is
left of it when another is taken off. So work grows with the numbers that are kept, not with their pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.noise import GRID_BITS

# ---- keys ------------------------------------------------------------------------------------------------------------

_WINDOW_BITS = 6
"""A key is 64 lattice points wide: of equal numbers, one slip of a lattice point parts less than one in sixteen."""

CHANCE = (2.0**_WINDOW_BITS + 1.0) * 2.0 ** -(GRID_BITS + 1)
"""Of any given key, at most: so many points, each with a probability of at most half the finest spacing."""

SIZE = 2**20 - 3
"""Keys in a table, at most: a prime number, so that keys of coarse noise are spread, too. 16 MiB, used as they come."""


def _keys_of(values: FloatArray) -> IntArray:
    """The keys of standard Laplace numbers."""
    half = 1 << (_WINDOW_BITS - 1)
    keys: IntArray = (np.rint(values * 2.0**GRID_BITS).astype(np.int64) + half) >> _WINDOW_BITS
    return keys


@dataclass(frozen=True, slots=True)
class Novelty:
    """How new the numbers of a round are, `(learners,)` each.

    Attributes:
        known: numbers that were heard before, up to their sign, and were followed by another.
        expected: how many of these are expected at most.
        again: of those which followed, how many are as they were; by chance a share `CHANCE` of `known`.
        known_now, again_now: the same for what another learner said in this very round. Who copied whom is not known.
    """

    known: IntArray
    expected: FloatArray
    again: IntArray
    known_now: IntArray
    again_now: IntArray


class Keys:
    """Keys, and which key came next; a newer one pushes out what is in its slot.

    An empty slot holds 0 and 0: zero after zero is no noise, and is known from the start.

    Attributes:
        kept: keys in the table, at most.
    """

    def __init__(self) -> None:
        self._keys = np.zeros(SIZE, dtype=np.int64)
        self._next = np.zeros(SIZE, dtype=np.int64)
        self.kept = 1
        self._last: dict[int, int] = {}

    @classmethod
    def of(cls, table: IntArray) -> Keys:
        """Those of an earlier `table`."""
        keys = cls()
        keys._keys[table[0] % SIZE], keys._next[table[0] % SIZE] = table
        keys.kept += table.shape[1]
        return keys

    @property
    def table(self) -> IntArray:
        """`(2, keys)`: every key but 0, and which came next. Whoever has them and the messages knows the learners' states."""
        full = np.flatnonzero(self._keys)
        return np.stack([self._keys[full], self._next[full]])

    def begin_run(self) -> None:
        """The table is kept; the streams of learners begin anew."""
        self._last = {}

    def hear(self, values: FloatArray, exact: BoolArray) -> Novelty:
        """Take the numbers of a round.

        Args:
            values: `(learners, numbers)` standard Laplace numbers.
            exact: which of them are known to a few lattice points; the others are left out.
        """
        n = len(values)
        before, after, owner = self._links(_keys_of(np.where(exact, values, 0.0)), exact)
        slots = before % SIZE
        known = self._keys[slots] == before
        again = known & (self._next[slots] == after)
        chance = 2.0 * CHANCE * (self.kept + len(slots))  # those of this round may be said twice, too
        found = Novelty(
            known=np.bincount(owner[known], minlength=n),
            expected=np.bincount(owner, minlength=n).astype(np.float64) * chance,
            again=np.bincount(owner[again], minlength=n),
            known_now=np.zeros(n, dtype=np.int64),
            again_now=np.zeros(n, dtype=np.int64),
        )
        for i, j, same in _twice(before[~known], after[~known], owner[~known]):
            (found.known if i == j else found.known_now)[i] += 1
            (found.again if i == j else found.again_now)[i] += same
        self._keys[slots], self._next[slots] = before, after
        self.kept = min(self.kept + len(slots), SIZE)
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

_ROOM = 8
"""Slots of the table for every number: one in sixteen finds its slot taken, and is not kept."""


@dataclass(frozen=True, slots=True)
class Summed:
    """Numbers of a round that are 0, or one or two others, added or taken off, `(learners,)` each.

    Attributes:
        before: numbers that are so by noise of earlier rounds alone.
        expected: how many of these are expected at most.
        now, expected_now: the same of those that need noise of learners before them in this round. Who follows whom is not known.
    """

    before: IntArray
    expected: FloatArray
    now: IntArray
    expected_now: FloatArray


class Sums:
    """The noise of the last rounds, in one unit for all learners.

    Args:
        rounds: that are kept.
        learners: how many are watched.
        numbers: of all fields together.
    """

    def __init__(self, rounds: int, learners: int, numbers: int) -> None:
        self._learners = learners
        self._kept = np.zeros((rounds * learners, numbers))  # the oldest first; 0 where none is known

    def hear(self, values: FloatArray, scale: FloatArray, exact: BoolArray) -> Summed:
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
        chance = np.where(exact, CHANCE * unit / scale, 0.0)
        self._kept = np.concatenate([self._kept, noise])[self._learners :]
        return Summed(
            before=np.count_nonzero(found[:, 0], axis=1),
            expected=(chance * (1 + 2 * earlier) ** 2).sum(axis=1),
            now=np.count_nonzero(found[:, 1], axis=1),
            expected_now=(chance * 2 * others * (1 + 2 * (earlier + others))).sum(axis=1),
        )


class _Table:
    """Where a number stands, if it stands anywhere, up to its sign; of every coordinate by itself.

    Args:
        values: `(rows, numbers)`, the first known first, which keeps its slot.
    """

    def __init__(self, values: FloatArray) -> None:
        self._values, self._keys = values, _keys_of(np.abs(values))
        self._columns = np.arange(values.shape[1])
        self._slots = _ROOM * len(values) + 1
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
