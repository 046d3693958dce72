"""Which noise is a sum or a difference of other noise at the same coordinate: of the last rounds, or of the same one.

Of all sums and differences of one number or two none is kept: a table has the numbers, and a number that is looked up is one of
them if something in the table is what is left of it when another is taken off. So work grows with the numbers that are kept,
not with their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.lab.watch.keys import CHANCE, keys_of

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
        self._values, self._keys = values, keys_of(np.abs(values))
        self._columns = np.arange(values.shape[1])
        self._slots = _ROOM * len(values) + 1
        self._rows = np.zeros((self._slots, values.shape[1]), dtype=np.int64)
        for row, slots in reversed([*enumerate(self._keys % self._slots)]):  # what is written last stays
            self._rows[slots, self._columns] = row

    def summed(self, row: int, first: int) -> BoolArray:
        """`(2, numbers)` of a row: whether a number is a sum of rows before `first`, and if not, of rows before its own."""
        one = self._values[:row]
        rest = keys_of(np.abs(np.stack([self._values[row] - one, self._values[row] + one])))
        other = self._rows[rest % self._slots, self._columns]
        newer = np.maximum(other, np.arange(row)[:, None])
        found = (self._keys[other, self._columns] == rest) & (newer < row)
        before = (found & (newer < first)).any(axis=(0, 1))
        return np.stack([before, found.any(axis=(0, 1)) & ~before])
