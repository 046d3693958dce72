"""Freshness: no noise number occurs twice, in a run or across runs, from any learner.

A fraction f of all keys is kept, those with a hash below a limit. Equal keys have equal hashes, so a fraction f of repeats is
kept, too; any two collections can be merged. A pair is kept if the hash of its first key is: the hash
of a pair begins with that one, so keys that are not kept are hashed once, and never paired.

Noise is rounded to keys, and equal keys are counted over all messages, learners, rounds and runs: of single numbers, which are
equal by chance occasionally, and of pairs, which never are.
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
"""Approximate probability that two different keys have equal hashes, except for the last bit."""

MAX_COPIES = 32
"""Maximum number of copies kept of one key: noise that is always equal would have no limit."""

_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _ONE = np.uint64(32), np.uint64(1)

_SLACK_KEYS = 2**10
"""Number of additional keys kept for a small fraction, because its number of keys is random."""

_PAIR_HASH_BITS = 44
"""Bits of a pair's hash that depend on both keys; the bits above are those of the first key's hash.

So pairs with equal first keys have equal hashes, except for the last bit, with probability 2^-43.
"""
_FIRST_HASH_MASK = np.uint64(_WHOLE - 2**_PAIR_HASH_BITS)


def _hash_keys(keys: Words) -> Words:
    """Hash each key by a bijection (the odd factor is one of SplitMix64's, Steele 2014)."""
    hashes = keys ^ _MIX[0]
    hashes *= _MIX[1]
    return hashes


def _hash_pairs(first: Words, second: Words) -> Words:
    """Hash two keys in order, from their hashes."""
    hashes = first ^ (first >> _HALF)
    hashes += second
    hashes *= _MIX[2]
    hashes ^= hashes >> _HALF
    hashes *= _MIX[1]
    hashes >>= np.uint64(64 - _PAIR_HASH_BITS)
    hashes |= first & _FIRST_HASH_MASK
    return hashes


@dataclass(frozen=True, slots=True)
class _Ties:
    """Pairs of equal keys: their number, the number expected by chance, and the places of one pair."""

    count: int
    expected: float
    places: tuple[int, int] | None

    @property
    def p_value(self) -> float:
        """Probability of at least this many ties (Poisson)."""
        return float(special.pdtrc(self.count - 1, self.expected)) if self.count else 1.0

    @property
    def two_sided_p_value(self) -> float:
        """Two-sided p-value: twice the smaller tail."""
        return min(1.0, 2.0 * min(self.p_value, float(special.pdtr(self.count, self.expected))))


class _Keys:
    """Collection of keys, each with a bit that comparisons may ignore, and its place.

    Attributes:
        offered_count: number of keys that it represents.
    """

    def __init__(self, max_keys: int, *, first_only: bool = False, fraction: float = 1.0) -> None:
        """Limit the number of keys kept: a fraction of all keys, or the first ones.

        A single key that recurs may be outside a fraction; among the first keys it is seen for certain. If it receives
        `fraction` of all keys, to be merged with the others, few need be kept until then: twice the final number, and some
        more, so that the limit is above the final one.
        """
        self.offered_count = 0
        self._max_keys = max_keys
        self._capacity = min(max_keys, int(np.ceil(2.0 * fraction * max_keys)) + _SLACK_KEYS)
        self._first_only = first_only
        self._limit = _WHOLE
        self._kept: list[Words] = []
        self._places: list[_Places] = []
        self._count = 0

    @property
    def fraction(self) -> float:
        """Fraction of all keys that is kept."""
        return self._limit / _WHOLE

    @property
    def key_count(self) -> int:
        """Number of kept keys; more after a merge, until they are reduced."""
        return self._count

    @property
    def is_full(self) -> bool:
        """True if no more keys are kept, because the first ones fill the capacity."""
        return self._first_only and self.key_count >= self._max_keys

    def add(self, keys: Words, places: _Places, known: BoolArray | None = None, bit: BoolArray | None = None) -> None:
        """Add keys.

        Args:
            keys: their hashes, of any shape.
            places: place of each; of the same shape, as all others.
            known: mask of the keys that count; None: all.
            bit: bit of each; None: 0.
        """
        index = self._choose(keys, known)
        words = keys[index] & ~_ONE
        if bit is not None:
            words |= bit[index].astype(np.uint64)
        self._store(words, places[index])

    def add_pairs(self, first: Words, second: Words, places: _Places, known: BoolArray | None = None) -> None:
        """Add keys of pairs, in order, by the hashes of both; otherwise as `add`."""
        index = self._choose(first, known)
        self._store(_hash_pairs(first[index], second[index]) & ~_ONE, places[index])

    def _choose(self, keys: Words, known: BoolArray | None) -> tuple[IntArray, ...]:
        """Return the index of the keys to keep."""
        self.offered_count += keys.size if known is None else int(np.count_nonzero(known))
        index = np.flatnonzero(self._is_below_limit(keys) if known is None else self._is_below_limit(keys) & known)
        while (
            len(index) > self._capacity and not self._first_only
        ):  # reduce before gathering, unless copies of one key dominate
            half = index[keys.ravel()[index] < np.uint64(self._limit // 2)]
            if 4 * len(half) > 3 * len(index):
                break
            self._limit //= 2
            index = half
        return np.unravel_index(index, keys.shape)

    def _store(self, words: Words, places: _Places) -> None:
        self._kept.append(words)
        self._places.append(places)
        self._count += len(words)
        if self._count > 2 * self._capacity:
            self._reduce()

    def merge(self, other: Self) -> None:
        """Merge another collection."""
        self.offered_count += other.offered_count
        self._limit = min(self._limit, other._limit)
        self._capacity = self._max_keys
        self._kept += other._kept
        self._places += other._places
        self._count += other._count
        if self._count > 2 * self._capacity:
            self._reduce()

    def _is_below_limit(self, keys: Words) -> BoolArray:
        inside: BoolArray = np.ones(keys.shape, np.bool_) if self._limit == _WHOLE else keys < np.uint64(self._limit)
        return inside

    def _reduce(self) -> None:
        """Halve the limit until few enough keys remain; if that hardly helps, drop copies beyond `MAX_COPIES` first."""
        words, places = np.concatenate([*self._kept, _NONE]), np.concatenate([*self._places, _NOWHERE])
        if self._limit < _WHOLE:
            words, places = _select_below(self._limit, words, places)
        if self._first_only:
            words, places = words[: self._max_keys], places[: self._max_keys]
            self.offered_count = len(words)
        while len(words) > self._capacity:
            half = _select_below(self._limit // 2, words, places)
            reduced = _drop_copies(words, places) if 4 * len(half[0]) > 3 * len(words) else (words, places)
            if len(reduced[0]) < len(words):
                words, places = reduced
            else:
                self._limit //= 2
                words, places = half
        self._kept, self._places, self._count = [words], [places], len(words)

    def count_ties(self, probability: float, *, with_bit: bool = False, given_kept: bool = False) -> _Ties:
        """Count pairs of equal keys.

        Args:
            probability: probability that two numbers have the same key.
            with_bit: keys with different bits are different.
            given_kept: keys are uniform, so the expected repeats follow from the number of kept keys.
        """
        self._reduce()
        order = np.argsort(self._kept[0])
        words = self._kept[0][order]
        if not with_bit:
            words = words & ~_ONE
        equal = words[1:] == words[:-1]
        starts = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
        sizes = starts[1::2] - starts[::2] + 1
        count = int((sizes * (sizes - 1) // 2).sum())
        probability += _COLLISION
        numbers = len(words) if given_kept else self.offered_count
        expected = (
            numbers * (numbers - 1) / 2.0 * (probability / self.fraction if given_kept else probability * self.fraction)
        )
        first = int(starts[0]) if count else None
        places = None if first is None else (int(self._places[0][order[first]]), int(self._places[0][order[first + 1]]))
        return _Ties(count, expected, places)


def _select_below(limit: int, words: Words, places: _Places) -> tuple[Words, _Places]:
    inside = words < np.uint64(limit)
    return words[inside], places[inside]


def _drop_copies(words: Words, places: _Places) -> tuple[Words, _Places]:
    order = np.argsort(words)
    words, places = words[order], places[order]
    is_kept = np.ones(len(words), np.bool_)
    is_kept[MAX_COPIES:] = words[MAX_COPIES:] != words[:-MAX_COPIES]
    return words[is_kept], places[is_kept]


_NONE: Words = np.empty(0, np.uint64)
_NOWHERE: _Places = np.empty(0, np.uint32)


# ---- repeats ---------------------------------------------------------------------------------------------------------

_MAX_FIRST_KEYS, _MAX_SINGLE_KEYS, _MAX_PAIR_KEYS = 2**17, 2**19, 2**20
"""Maximum number of keys kept of some numbers of the first runs, of numbers and of pairs; 12 bytes each."""

_MAX_FIRST_KEYS_PER_RUN = 256
"""Maximum number of keys of one run among the first keys."""

_CELL = 2.0**34
"""Cells per scale, 64 spacings wide: a replay that rounds by one spacing loses a tie with probability 1/32."""

SIZE_TIE_PROBABILITY = 1.0 / (2.0 * _CELL)
"""Probability that two sizes are in one cell; with equal signs half of it."""

_LEADING = 33
"""Bits of a mantissa that are compared where scales differ: a cell around x is at most `2^-33 x` wide.

Two exponential sizes of scales s and s' share one with probability at most `2^-33 s s' / (s + s')^2`: at most 2^-35.
"""

_RAW = 2.0 ** -(_LEADING + 2)

TOP_PAIR_TIE_PROBABILITY = 2.0**-70
"""Probability that the two largest sizes of two messages are in the same cells.

The joint density of their difference (exponential) and of the smaller one is squared and integrated, which gives at most a
quarter.
"""

_SINGLES = ("numbers", "unscaled numbers", "low words")
_PAIR_CHANCES = {"pairs": SIZE_TIE_PROBABILITY**2, "unscaled pairs": _RAW**2}
_PAIRS = (*_PAIR_CHANCES, "largest", "messages")
_LOW = np.int64(2**32 - 1)


class Freshness(ConformanceTest):
    """Tests that no noise is repeated, in a run or across runs."""

    part: ClassVar[BudgetPart] = "freshness"

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        self._first_keys = _Keys(_MAX_FIRST_KEYS, first_only=True)
        mosts = {**dict.fromkeys(_SINGLES, _MAX_SINGLE_KEYS), **dict.fromkeys(_PAIRS, _MAX_PAIR_KEYS)}
        self._keys = {kind: _Keys(most, fraction=fraction) for kind, most in mosts.items()}
        self._message_count = 0

    def add(self, block: Block) -> None:
        one_scale = not np.nanmax(block.scale, initial=0.0) > np.nanmin(block.scale, initial=np.inf)
        noisy = _find_noisy_rounds(block)
        for i, _, piece in block.iterate_pieces():
            self._add_piece(_PieceKeys.from_piece(piece, i, noisy), one_scale)

    def _add_piece(self, piece: _PieceKeys, one_scale: bool) -> None:
        sizes = piece.sizes
        cells = (sizes * _CELL).astype(np.int64).view(np.uint64)
        hashes = _hash_keys(cells)
        self._keys["numbers"].add(hashes, piece.places, piece.resolved, piece.block.values < 0.0)
        self._add_first_keys(hashes, piece)
        self._add_pairs("pairs", hashes, piece)
        self._add_largest(cells, piece)
        if not one_scale:
            raw = _hash_keys(_extract_leading_bits(sizes * np.nan_to_num(piece.block.scale)[:, :, None]))
            self._keys["unscaled numbers"].add(raw, piece.places, piece.resolved)
            self._add_pairs("unscaled pairs", raw, piece)
        self._add_words(piece)
        # Messages with any centre; and their number.
        self._add_pairs("messages", _hash_keys(piece.block.message_steps.view(np.uint64)), piece, 1)
        self._message_count += piece.messages

    def merge(self, other: Self) -> None:
        self._first_keys.merge(other._first_keys)
        for kind, keys in other._keys.items():
            self._keys[kind].merge(keys)
        self._message_count += other._message_count

    def _add_first_keys(self, hashes: Words, piece: _PieceKeys) -> None:
        """Add numbers at a few places of every run: one size that is often repeated is detected here with any hash."""
        if self._first_keys.is_full:
            return
        stride = -(-self._layout.numbers_per_run // _MAX_FIRST_KEYS_PER_RUN)
        _, t, k = np.nonzero(piece.places[:, :, 0] % stride == 0)
        known = None if piece.resolved is None else piece.resolved[0, t, :, k]
        self._first_keys.add(hashes[0, t, :, k], piece.places[0, t, :, k], known)

    def _add_pairs(self, kind: str, hashes: Words, piece: _PieceKeys, max_pairs: int | None = None) -> None:
        for first, second in piece.iterate_neighbours(max_pairs):
            known = None if piece.resolved is None else piece.resolved[first] & piece.resolved[second]
            self._keys[kind].add_pairs(hashes[first], hashes[second], piece.places[first], known)

    def _add_largest(self, cells: Words, piece: _PieceKeys) -> None:
        """Add the two largest sizes of every message of three numbers or more, at any position."""
        for _, part in piece.block.layout.iterate_field_slices():
            if part.stop - part.start > 2:
                known = None if piece.resolved is None else piece.resolved[..., part].sum(axis=-1) > 2
                largest = _hash_keys(np.partition(cells[..., part], -2, axis=-1)[..., -2:])
                places = piece.places[..., part.start]
                self._keys["largest"].add_pairs(largest[..., 1], largest[..., 0], places, known)

    def _add_words(self, piece: _PieceKeys) -> None:
        """Add the 32 low bits of K' or of -K', whichever is smaller, and which one it is."""
        signed = piece.block.steps.astype(np.int32)  # the low bits only
        words = np.abs(signed).view(np.uint32)  # the minimum is its own negative
        self._keys["low words"].add(_hash_keys(words.astype(np.uint64)), piece.places, piece.resolved, signed < 0)

    # ---- results -----------------------------------------------------------------------------------------------------

    def _iterate_tests(self) -> Iterator[Test]:
        if not self._message_count:
            return
        numbers, unscaled, words = (self._keys[kind] for kind in _SINGLES)
        singles = [
            ("numbers", numbers.count_ties(SIZE_TIE_PROBABILITY / 2.0, with_bit=True)),
            ("sizes", numbers.count_ties(SIZE_TIE_PROBABILITY)),
            ("unscaled sizes", unscaled.count_ties(_RAW)),
            ("sizes at some places", self._first_keys.count_ties(SIZE_TIE_PROBABILITY)),
        ]
        yield from self._test_fewest("ties", "no noise is repeated", singles, is_primary=True)
        pairs = [(kind, self._keys[kind].count_ties(chance)) for kind, chance in _PAIR_CHANCES.items()]
        yield from self._test_fewest("pair ties", "no two neighbouring numbers are repeated", pairs, is_primary=True)
        largest = [("two largest sizes", self._keys["largest"].count_ties(TOP_PAIR_TIE_PROBABILITY))]
        yield from self._test_fewest("permuted messages", "no message has the largest noise of another one", largest)
        messages = [("first two numbers", self._keys["messages"].count_ties(0.0))]
        yield from self._test_fewest("repeated messages", "no message is repeated", messages)
        low = [
            ("32 low bits", words.count_ties(2.0**-32, with_bit=True, given_kept=True)),
            ("32 low bits, or their negative", words.count_ties(2.0**-31, given_kept=True)),
        ]
        description = "low bits are repeated as often as by chance"
        yield from self._test_fewest("low words", description, low, two_sided=True)

    def _test_fewest(
        self,
        name: str,
        description: str,
        ties: Sequence[tuple[str, _Ties]],
        *,
        is_primary: bool = False,
        two_sided: bool = False,
    ) -> Iterator[Test]:
        """Test the least likely of these, times their number; empty if there are no keys."""
        counted = [
            (kind, each, each.two_sided_p_value if two_sided else each.p_value)
            for kind, each in ties
            if each.expected > 0.0
        ]
        if not counted:
            return
        kind, least, p_value = min(counted, key=lambda item: item[2])
        location = f"{kind}; {least.expected:.3g} expected{self._format_places(least)}"
        yield Test(name, description, least.count, min(1.0, p_value * len(counted)), location, is_primary)

    def _format_places(self, ties: _Ties) -> str:
        if ties.places is None:
            return ""
        first, second = (self._layout.name_place(place) for place in ties.places)
        return f"; {first}, in two runs" if first == second else f"; {first}, and {second}"


_Index = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _PieceKeys:
    """Piece of a block, and the mask of its numbers with keys.

    Attributes:
        block: the piece.
        resolved: mask of the keys: numbers whose last bit float64 resolves; None: all.
        places: place of each number in the whole block.
        noisy: for every field of one number, the rounds with keys of any learner in the block.
    """

    block: Block
    resolved: BoolArray | None
    places: npt.NDArray[np.uint32]
    noisy: Mapping[int, IntArray]

    @classmethod
    def from_piece(cls, piece: Block, learner: int, noisy: Mapping[int, IntArray]) -> Self:
        """Create the keys of a piece of one learner."""
        shape = piece.values.shape
        places = np.arange(shape[1] * shape[3], dtype=np.uint32) + np.uint32(learner * shape[1] * shape[3])
        resolved = None if piece.is_resolved.all() else piece.is_resolved
        return cls(piece, resolved, np.broadcast_to(places.reshape(1, shape[1], 1, shape[3]), shape), noisy)

    @property
    def sizes(self) -> FloatArray:
        """Sizes; 0 where there is no key."""
        return self.block.sizes if self.resolved is None else np.where(self.resolved, self.block.sizes, 0.0)

    @property
    def messages(self) -> int:
        """Number of messages with any key."""
        known = self.places[..., 0] >= 0 if self.resolved is None else self.resolved.any(axis=3)
        return int(np.count_nonzero(known))

    def iterate_neighbours(self, max_pairs: int | None = None) -> Iterator[tuple[_Index, _Index]]:
        """Iterate over neighbours along a field, at most `max_pairs` first ones; for a field of one number, over rounds."""
        for _, part in self.block.layout.iterate_field_slices():
            stop = part.stop if max_pairs is None else min(part.stop, part.start + max_pairs + 1)
            noisy = self.noisy.get(part.start, ())
            if stop - part.start > 1:
                yield (..., slice(part.start, stop - 1)), (..., slice(part.start + 1, stop))
            elif len(noisy) > 1:
                yield (slice(None), noisy[:-1], slice(None), part), (slice(None), noisy[1:], slice(None), part)


def _find_noisy_rounds(block: Block) -> Mapping[int, IntArray]:
    """Find the rounds of `_PieceKeys.noisy`."""
    single = [part for _, part in block.layout.iterate_field_slices() if part.stop - part.start == 1]
    return {part.start: np.flatnonzero(block.is_resolved[..., part].any(axis=(0, 2, 3))) for part in single}


def _extract_leading_bits(sizes: FloatArray) -> Words:
    """Extract the exponent and `_LEADING` bits of the mantissa."""
    return sizes.view(np.uint64) >> np.uint64(52 - _LEADING)
