"""Keys of what must never come twice: many numbers in, few kept, and every repeat among those found.

A share f of all keys is kept, those whose hash is below a limit. Equal keys have equal hashes, so a share f of repeats is kept,
too; any two collections unite, whatever was seen where. A pair is kept where its first one's hash is: the hash of a pair begins
as that one does, so what is not kept is hashed once, and never paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy import special

from sottovoce.arrays import BoolArray, IntArray

Words = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.uint32]

_WHOLE = 2**64
_COLLISION = 2.0**-63
"""Two different keys have equal hashes, but for the last bit, with about this probability."""

COPIES = 32
"""Of one key, at most, are kept: where every number is the same there would be no end of them."""

_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _ONE = np.uint64(32), np.uint64(1)

_SOME = 2**10
"""Keys that are kept of a small share beyond twice its part: how many there are of it is up to chance."""

_REST = 44
"""Bits of a pair's hash in which both have a say; the ones above are those of the first one's.

So pairs whose first ones are equal have equal hashes, but for the last bit, with probability 2^-43.
"""
_FIRST = np.uint64(_WHOLE - 2**_REST)


def mixed(keys: Words) -> Words:
    """A hash of each key, a bijection (the odd factor is one of SplitMix64's, Steele 2014)."""
    found = keys ^ _MIX[0]
    found *= _MIX[1]
    return found


def paired(first: Words, second: Words) -> Words:
    """A hash of two keys in order, from theirs."""
    found = first ^ (first >> _HALF)
    found += second
    found *= _MIX[2]
    found ^= found >> _HALF
    found *= _MIX[1]
    found >>= np.uint64(64 - _REST)
    found |= first & _FIRST
    return found


@dataclass(frozen=True, slots=True)
class Ties:
    """Pairs of equal keys: how many there are, how many chance makes on average, and the places of one pair."""

    count: int
    expected: float
    places: tuple[int, int] | None

    @property
    def p_value(self) -> float:
        """Of so many or more (Poisson)."""
        return float(special.pdtrc(self.count - 1, self.expected)) if self.count else 1.0

    @property
    def two_sided(self) -> float:
        """Of so many or more, or so few or less, whichever is rarer, times two."""
        return min(1.0, 2.0 * min(self.p_value, float(special.pdtr(self.count, self.expected))))


class Keys:
    """A collection of keys, each with a bit that may be left out when they are compared, and the place that it comes from.

    Attributes:
        offered: keys that it stands for.
    """

    def __init__(self, most: int, *, first: bool = False) -> None:
        """At most so many are kept: of a share of all keys, or those that came first.

        A single key that comes over and over may be outside of a share; among the first ones it is seen for certain.
        """
        self.offered = 0
        self._most = self._room = most
        self._first = first
        self._limit = _WHOLE
        self._kept: list[Words] = []
        self._places: list[_Places] = []
        self._count = 0

    def expect(self, share: float) -> None:
        """It is to take in such a share of all keys, and to be merged with those of the others: then few need be kept so long.

        Twice as many as come to be kept in the end, and some, so that the limit is above the last one.
        """
        self._room = min(self._most, int(np.ceil(2.0 * share * self._most)) + _SOME)

    @property
    def share(self) -> float:
        """Of all keys, that is kept."""
        return self._limit / _WHOLE

    @property
    def kept(self) -> int:
        """Keys that are kept: after a merge, until they are thinned, some more."""
        return self._count

    @property
    def full(self) -> bool:
        """Whether nothing more is kept: of those that come first, as many as there is room for."""
        return self._first and self.kept >= self._most

    def add(self, keys: Words, places: _Places, known: BoolArray | None = None, bit: BoolArray | None = None) -> None:
        """Take in keys.

        Args:
            keys: their hashes, of any shape.
            places: where each comes from; of the same shape, as all others.
            known: which of them count; None: all.
            bit: the bit of each; None: 0.
        """
        at = self._chosen(keys, known)
        words = keys[at] & ~_ONE
        if bit is not None:
            words |= bit[at].astype(np.uint64)
        self._keep(words, places[at])

    def add_pairs(self, first: Words, second: Words, places: _Places, known: BoolArray | None = None) -> None:
        """Take in keys of two, in order: the hashes of either; all else is as for single ones."""
        at = self._chosen(first, known)
        self._keep(paired(first[at], second[at]) & ~_ONE, places[at])

    def _chosen(self, keys: Words, known: BoolArray | None) -> tuple[IntArray, ...]:
        """Where keys are to be kept."""
        self.offered += keys.size if known is None else int(np.count_nonzero(known))
        at = np.flatnonzero(self._inside(keys) if known is None else self._inside(keys) & known)
        while (
            len(at) > self._room and not self._first
        ):  # fewer before they are gathered, unless one key makes them many
            half = at[keys.ravel()[at] < np.uint64(self._limit // 2)]
            if 4 * len(half) > 3 * len(at):
                break
            self._limit //= 2
            at = half
        return np.unravel_index(at, keys.shape)

    def _keep(self, words: Words, places: _Places) -> None:
        self._kept.append(words)
        self._places.append(places)
        self._count += len(words)
        if self._count > 2 * self._room:
            self._thin()

    def merge(self, other: Self) -> None:
        """Take in those of another collection."""
        self.offered += other.offered
        self._limit = min(self._limit, other._limit)
        self._room = self._most
        self._kept += other._kept
        self._places += other._places
        self._count += other._count
        if self._count > 2 * self._room:
            self._thin()

    def _inside(self, keys: Words) -> BoolArray:
        inside: BoolArray = np.ones(keys.shape, np.bool_) if self._limit == _WHOLE else keys < np.uint64(self._limit)
        return inside

    def _thin(self) -> None:
        """Halve the limit until few enough keys are left; where that hardly helps, drop copies beyond `COPIES` first."""
        words, places = np.concatenate([*self._kept, _NONE]), np.concatenate([*self._places, _NOWHERE])
        if self._limit < _WHOLE:
            words, places = _below(self._limit, words, places)
        if self._first:
            words, places = words[: self._most], places[: self._most]
            self.offered = len(words)
        while len(words) > self._room:
            half = _below(self._limit // 2, words, places)
            few = _few_copies(words, places) if 4 * len(half[0]) > 3 * len(words) else (words, places)
            if len(few[0]) < len(words):
                words, places = few
            else:
                self._limit //= 2
                words, places = half
        self._kept, self._places, self._count = [words], [places], len(words)

    def ties(self, chance: float, *, with_bit: bool = False, given_kept: bool = False) -> Ties:
        """Pairs of equal keys.

        Args:
            chance: that two numbers have the same key.
            with_bit: keys whose bits differ are different.
            given_kept: keys are spread evenly, so that as many repeats are among those kept as their number says.
        """
        self._thin()
        order = np.argsort(self._kept[0])
        words = self._kept[0][order]
        if not with_bit:
            words = words & ~_ONE
        equal = words[1:] == words[:-1]
        starts = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
        sizes = starts[1::2] - starts[::2] + 1
        count = int((sizes * (sizes - 1) // 2).sum())
        chance += _COLLISION
        numbers = len(words) if given_kept else self.offered
        expected = numbers * (numbers - 1) / 2.0 * (chance / self.share if given_kept else chance * self.share)
        first = int(starts[0]) if count else None
        places = None if first is None else (int(self._places[0][order[first]]), int(self._places[0][order[first + 1]]))
        return Ties(count, expected, places)


def _below(limit: int, words: Words, places: _Places) -> tuple[Words, _Places]:
    inside = words < np.uint64(limit)
    return words[inside], places[inside]


def _few_copies(words: Words, places: _Places) -> tuple[Words, _Places]:
    order = np.argsort(words)
    words, places = words[order], places[order]
    few = np.ones(len(words), np.bool_)
    few[COPIES:] = words[COPIES:] != words[:-COPIES]
    return words[few], places[few]


_NONE: Words = np.empty(0, np.uint64)
_NOWHERE: _Places = np.empty(0, np.uint32)
