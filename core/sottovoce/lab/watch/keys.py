"""Which noise has been heard before: a table of keys, of constant size, that may be kept from run to run.

A key is a number of noise, rounded so that a replay's slip hardly ever moves it. The numbers of a learner, message after
message, are one stream, and the table keeps for a key which one came after it. If a key is heard again, up to its
sign, what comes next should still be new: the table's guess is right with probability below `CHANCE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.noise import GRID_BITS

_WINDOW_BITS = 6
"""A key is 64 lattice points wide: of equal numbers, one slip of a lattice point parts less than one in sixteen."""

CHANCE = (2.0**_WINDOW_BITS + 1.0) * 2.0 ** -(GRID_BITS + 1)
"""Of any given key, at most: so many points, each with a probability of at most half the finest spacing."""

SIZE = 2**20 - 3
"""Keys in a table, at most: a prime number, so that keys of coarse noise are spread, too. 16 MiB, used as they come."""


def keys_of(values: FloatArray) -> IntArray:
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
        before, after, owner = self._links(keys_of(np.where(exact, values, 0.0)), exact)
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
