"""Every draw is fresh: no number comes twice, in a run or across runs, from any learner.

A share f of all keys is kept, those whose hash is below a limit. Equal keys have equal hashes, so a share f of repeats is kept,
too; any two collections unite, whatever was seen where. A pair is kept where its first one's hash is: the hash of a pair begins
as that one does, so what is not kept is hashed once, and never paired.

Noise is rounded to keys, and equal keys are counted over all messages, learners, rounds and runs: of single numbers, which are
equal by chance now and then, and of pairs, which never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout

# ---- keys ------------------------------------------------------------------------------------------------------------

Words = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.uint32]

_WHOLE = 2**64
_COLLISION = 2.0**-63
"""Two different keys have equal hashes, but for the last bit, with about this probability."""

MAX_COPIES = 32
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


def _mixed(keys: Words) -> Words:
    """A hash of each key, a bijection (the odd factor is one of SplitMix64's, Steele 2014)."""
    found = keys ^ _MIX[0]
    found *= _MIX[1]
    return found


def _paired(first: Words, second: Words) -> Words:
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
class _Ties:
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


class _Keys:
    """A collection of keys, each with a bit that may be left out when they are compared, and the place that it comes from.

    Attributes:
        offered: keys that it stands for.
    """

    def __init__(self, most: int, *, first: bool = False, share: float = 1.0) -> None:
        """At most so many are kept: of a share of all keys, or those that came first.

        A single key that comes over and over may be outside of a share; among the first ones it is seen for certain.
        Where it takes in such a share of all keys, to be merged with the others, few need be kept so long: twice as many as
        come to be kept in the end, and some, so that the limit is above the last one.
        """
        self.offered = 0
        self._most = most
        self._room = min(most, int(np.ceil(2.0 * share * most)) + _SOME)
        self._first = first
        self._limit = _WHOLE
        self._kept: list[Words] = []
        self._places: list[_Places] = []
        self._count = 0

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
        self._keep(_paired(first[at], second[at]) & ~_ONE, places[at])

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
        """Halve the limit until few enough keys are left; where that hardly helps, drop copies beyond `MAX_COPIES` first."""
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

    def ties(self, chance: float, *, with_bit: bool = False, given_kept: bool = False) -> _Ties:
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
        return _Ties(count, expected, places)


def _below(limit: int, words: Words, places: _Places) -> tuple[Words, _Places]:
    inside = words < np.uint64(limit)
    return words[inside], places[inside]


def _few_copies(words: Words, places: _Places) -> tuple[Words, _Places]:
    order = np.argsort(words)
    words, places = words[order], places[order]
    few = np.ones(len(words), np.bool_)
    few[MAX_COPIES:] = words[MAX_COPIES:] != words[:-MAX_COPIES]
    return words[few], places[few]


_NONE: Words = np.empty(0, np.uint64)
_NOWHERE: _Places = np.empty(0, np.uint32)


# ---- repeats ---------------------------------------------------------------------------------------------------------

_MAX_FIRST_KEYS, _MAX_SINGLE_KEYS, _MAX_PAIR_KEYS = 2**17, 2**19, 2**20
"""Keys that are kept, at most, of some numbers of the first runs, of numbers and of pairs; 12 bytes each."""

_MAX_FIRST_KEYS_PER_RUN = 256
"""Numbers of a run that are among the former, at most."""

_CELL = 2.0**34
"""Cells per scale, 64 spacings wide: a replay that rounds by one spacing loses a tie with probability 1/32."""

SIZE_TIE_PROBABILITY = 1.0 / (2.0 * _CELL)
"""Two sizes are in one cell with this probability; with equal signs half as often."""

_LEADING = 33
"""Bits of a mantissa that are compared where scales differ: a cell around x is at most `2^-33 x` wide.

Two exponential sizes of scales s and s' share one with probability at most `2^-33 s s' / (s + s')^2`: at most 2^-35.
"""

_RAW = 2.0 ** -(_LEADING + 2)

LARGEST_PAIR_TIE_PROBABILITY = 2.0**-70
"""The two largest sizes of two messages are in the same cells: the joint density of their difference (exponential) and of the
lesser one is squared and summed to a quarter at most."""

_SINGLES = ("numbers", "numbers as they are", "low words")
_PAIR_CHANCES = {"pairs": SIZE_TIE_PROBABILITY**2, "pairs as they are": _RAW**2}
_PAIRS = (*_PAIR_CHANCES, "largest", "messages")
_LOW = np.int64(2**32 - 1)


class Freshness(ConformanceTest):
    """Every draw is fresh: nothing is said twice, in a run or across runs."""

    part: ClassVar[BudgetPart] = "freshness"

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        self._some = _Keys(_MAX_FIRST_KEYS, first=True)
        mosts = {**dict.fromkeys(_SINGLES, _MAX_SINGLE_KEYS), **dict.fromkeys(_PAIRS, _MAX_PAIR_KEYS)}
        self._keys = {kind: _Keys(most, share=share) for kind, most in mosts.items()}
        self._said = 0

    def add(self, block: Block) -> None:
        one_scale = not np.nanmax(block.scale, initial=0.0) > np.nanmin(block.scale, initial=np.inf)
        noisy = _noisy(block)
        for i, _, piece in block.iterate_pieces():
            self._look(_Seen.of(piece, i, noisy), one_scale)

    def _look(self, seen: _Seen, one_scale: bool) -> None:
        sizes = seen.sizes
        cells = (sizes * _CELL).astype(np.int64).view(np.uint64)
        hashes = _mixed(cells)
        self._keys["numbers"].add(hashes, seen.places, seen.resolved, seen.block.values < 0.0)
        self._add_some(hashes, seen)
        self._add_pairs("pairs", hashes, seen)
        self._add_largest(cells, seen)
        if not one_scale:
            raw = _mixed(_leading_bits(sizes * np.nan_to_num(seen.block.scale)[:, :, None]))
            self._keys["numbers as they are"].add(raw, seen.places, seen.resolved)
            self._add_pairs("pairs as they are", raw, seen)
        self._add_words(seen)
        # What was said, whatever the centre; and how many messages there were.
        self._add_pairs("messages", _mixed(seen.block.message_steps.view(np.uint64)), seen, 1)
        self._said += seen.messages

    def merge(self, other: Self) -> None:
        self._some.merge(other._some)
        for kind, keys in other._keys.items():
            self._keys[kind].merge(keys)
        self._said += other._said

    def _add_some(self, hashes: Words, seen: _Seen) -> None:
        """Numbers at a few places of every run: one size that is said often is seen here, whatever its hash."""
        if self._some.full:
            return
        every = -(-self._layout.numbers_per_run // _MAX_FIRST_KEYS_PER_RUN)
        _, t, k = np.nonzero(seen.places[:, :, 0] % every == 0)
        known = None if seen.resolved is None else seen.resolved[0, t, :, k]
        self._some.add(hashes[0, t, :, k], seen.places[0, t, :, k], known)

    def _add_pairs(self, kind: str, hashes: Words, seen: _Seen, most: int | None = None) -> None:
        for one, other in seen.neighbours(most):
            known = None if seen.resolved is None else seen.resolved[one] & seen.resolved[other]
            self._keys[kind].add_pairs(hashes[one], hashes[other], seen.places[one], known)

    def _add_largest(self, cells: Words, seen: _Seen) -> None:
        """The two largest sizes of every message of three numbers or more, wherever they stand in it."""
        for _, part in seen.block.layout.iterate_field_slices():
            if part.stop - part.start > 2:
                known = None if seen.resolved is None else seen.resolved[..., part].sum(axis=-1) > 2
                largest = _mixed(np.partition(cells[..., part], -2, axis=-1)[..., -2:])
                places = seen.places[..., part.start]
                self._keys["largest"].add_pairs(largest[..., 1], largest[..., 0], places, known)

    def _add_words(self, seen: _Seen) -> None:
        """The 32 low bits of K', and of -K': the lesser of the two, and which it is."""
        signed = seen.block.steps.astype(np.int32)  # the low bits alone
        words = np.abs(signed).view(np.uint32)  # the least of all is its own negative
        self._keys["low words"].add(_mixed(words.astype(np.uint64)), seen.places, seen.resolved, signed < 0)

    # ---- what they come to -------------------------------------------------------------------------------------------

    def _every(self) -> Iterator[Test]:
        if not self._said:
            return
        numbers, raw, words = (self._keys[kind] for kind in _SINGLES)
        either = [
            ("numbers", numbers.ties(SIZE_TIE_PROBABILITY / 2.0, with_bit=True)),
            ("sizes", numbers.ties(SIZE_TIE_PROBABILITY)),
            ("sizes as they are", raw.ties(_RAW)),
            ("sizes at some places", self._some.ties(SIZE_TIE_PROBABILITY)),
        ]
        yield from self._fewest("ties", "no noise is said again", either, primary=True)
        pairs = [(kind, self._keys[kind].ties(chance)) for kind, chance in _PAIR_CHANCES.items()]
        yield from self._fewest("pair ties", "no two neighbouring numbers are said again", pairs, primary=True)
        largest = [("two largest sizes", self._keys["largest"].ties(LARGEST_PAIR_TIE_PROBABILITY))]
        yield from self._fewest("permuted messages", "no message has the largest noise of another one", largest)
        messages = [("first two numbers", self._keys["messages"].ties(0.0))]
        yield from self._fewest("repeated messages", "no message is said again", messages)
        low = [
            ("32 low bits", words.ties(2.0**-32, with_bit=True, given_kept=True)),
            ("32 low bits, or their negative", words.ties(2.0**-31, given_kept=True)),
        ]
        what = "low bits are said again as often as chance has it"
        yield from self._fewest("low words", what, low, two_sided=True)

    def _fewest(
        self,
        name: str,
        what: str,
        ties: Sequence[tuple[str, _Ties]],
        *,
        primary: bool = False,
        two_sided: bool = False,
    ) -> Iterator[Test]:
        """The least likely of these, times their number; none where there are no keys."""
        there = [
            (kind, each, each.two_sided if two_sided else each.p_value) for kind, each in ties if each.expected > 0.0
        ]
        if not there:
            return
        kind, least, p_value = min(there, key=lambda one: one[2])
        where = f"{kind}; {least.expected:.3g} expected{self._places(least)}"
        yield Test(name, what, least.count, min(1.0, p_value * len(there)), where, primary)

    def _places(self, ties: _Ties) -> str:
        if ties.places is None:
            return ""
        one, other = (self._layout.name_place(place) for place in ties.places)
        return f"; {one}, in two runs" if one == other else f"; {one}, and {other}"


_Index = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A piece of a block, and which of its numbers have keys.

    Attributes:
        block: the piece.
        resolved: where there are keys: where float64 resolves the last bit; None: everywhere.
        places: of each number, in all of the block.
        noisy: by the place of a field of one number, the rounds with keys of any learner in the block.
    """

    block: Block
    resolved: BoolArray | None
    places: npt.NDArray[np.uint32]
    noisy: Mapping[int, IntArray]

    @classmethod
    def of(cls, piece: Block, learner: int, noisy: Mapping[int, IntArray]) -> Self:
        """A piece of this learner."""
        shape = piece.values.shape
        places = np.arange(shape[1] * shape[3], dtype=np.uint32) + np.uint32(learner * shape[1] * shape[3])
        resolved = None if piece.is_resolved.all() else piece.is_resolved
        return cls(piece, resolved, np.broadcast_to(places.reshape(1, shape[1], 1, shape[3]), shape), noisy)

    @property
    def sizes(self) -> FloatArray:
        """0 where there is no key."""
        return self.block.sizes if self.resolved is None else np.where(self.resolved, self.block.sizes, 0.0)

    @property
    def messages(self) -> int:
        """Those that have any key."""
        known = self.places[..., 0] >= 0 if self.resolved is None else self.resolved.any(axis=3)
        return int(np.count_nonzero(known))

    def neighbours(self, most: int | None = None) -> Iterator[tuple[_Index, _Index]]:
        """All neighbours along a field, or so many of the first ones; of a field of one number, of its rounds."""
        for _, part in self.block.layout.iterate_field_slices():
            stop = part.stop if most is None else min(part.stop, part.start + most + 1)
            noisy = self.noisy.get(part.start, ())
            if stop - part.start > 1:
                yield (..., slice(part.start, stop - 1)), (..., slice(part.start + 1, stop))
            elif len(noisy) > 1:
                yield (slice(None), noisy[:-1], slice(None), part), (slice(None), noisy[1:], slice(None), part)


def _noisy(block: Block) -> Mapping[int, IntArray]:
    """`_Seen.noisy`."""
    single = [part for _, part in block.layout.iterate_field_slices() if part.stop - part.start == 1]
    return {part.start: np.flatnonzero(block.is_resolved[..., part].any(axis=(0, 2, 3))) for part in single}


def _leading_bits(sizes: FloatArray) -> Words:
    """Exponent and `_LEADING` bits of the mantissa."""
    return sizes.view(np.uint64) >> np.uint64(52 - _LEADING)
