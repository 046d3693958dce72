"""Every draw is fresh: nothing is said twice, in a run or across runs, by anybody.

Noise is rounded to keys, and equal keys are counted over all messages, learners, rounds and runs: of single numbers, which are
equal by chance now and then, and of pairs, which never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.auditing.conformance.block import Block
from sottovoce.auditing.conformance.instrument import Instrument
from sottovoce.auditing.conformance.keys import Keys, Ties, Words, mixed
from sottovoce.auditing.conformance.layout import Layout
from sottovoce.auditing.levels import Part, Test

_SOME, _SINGLE, _PAIR = 2**17, 2**19, 2**20
"""Keys that are kept, at most, of some numbers of the first runs, of numbers and of pairs; 12 bytes each."""

_OF_A_RUN = 256
"""Numbers of a run that are among the former, at most."""

_CELL = 2.0**34
"""Cells per scale, 64 spacings wide: a replay that rounds by one spacing loses a tie with probability 1/32."""

EQUAL = 1.0 / (2.0 * _CELL)
"""Two sizes are in one cell with this probability; with equal signs half as often."""

_LEADING = 33
"""Bits of a mantissa that are compared where scales differ: a cell around x is at most `2^-33 x` wide.

Two exponential sizes of scales s and s' share one with probability at most `2^-33 s s' / (s + s')^2`: at most 2^-35.
"""

_RAW = 2.0 ** -(_LEADING + 2)

LARGEST = 2.0**-70
"""The two largest sizes of two messages are in the same cells: the joint density of their difference (exponential) and of the
lesser one is squared and summed to a quarter at most."""

_SINGLES = ("numbers", "numbers as they are", "low words")
_PAIR_CHANCES = {"pairs": EQUAL**2, "pairs as they are": _RAW**2}
_PAIRS = (*_PAIR_CHANCES, "largest", "messages")
_LOW = np.int64(2**32 - 1)


class Freshness(Instrument):
    """Every draw is fresh: nothing is said twice, in a run or across runs."""

    part: ClassVar[Part] = "freshness"

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._some = Keys(_SOME, first=True)
        self._keys = {kind: Keys(_SINGLE if kind in _SINGLES else _PAIR) for kind in (*_SINGLES, *_PAIRS)}
        self._said = 0

    def expect(self, share: float) -> None:
        for keys in self._keys.values():
            keys.expect(share)

    def add(self, block: Block) -> None:
        self._layout = self._layout or Layout.of(block)
        one_scale = not np.nanmax(block.scale, initial=0.0) > np.nanmin(block.scale, initial=np.inf)
        noisy = _noisy(block)
        for i, _, piece in block.pieces():
            self._look(_Seen.of(piece, i, noisy), one_scale)

    def _look(self, seen: _Seen, one_scale: bool) -> None:
        sizes = seen.sizes
        cells = (sizes * _CELL).astype(np.int64).view(np.uint64)
        hashes = mixed(cells)
        self._keys["numbers"].add(hashes, seen.places, seen.resolved, seen.block.values < 0.0)
        self._add_some(hashes, seen)
        self._add_pairs("pairs", hashes, seen)
        self._add_largest(cells, seen)
        if not one_scale:
            raw = mixed(_leading_bits(sizes * np.nan_to_num(seen.block.scale)[:, :, None]))
            self._keys["numbers as they are"].add(raw, seen.places, seen.resolved)
            self._add_pairs("pairs as they are", raw, seen)
        self._add_words(seen)
        self._add_messages(seen)

    def merge(self, other: Self) -> None:
        self._layout = self._layout or other._layout
        self._some.merge(other._some)
        for kind, keys in other._keys.items():
            self._keys[kind].merge(keys)
        self._said += other._said

    def _add_some(self, hashes: Words, seen: _Seen) -> None:
        """Numbers at a few places of every run: one size that is said often is seen here, whatever its hash."""
        if self._layout is None or self._some.full:
            return
        every = -(-self._layout.places // _OF_A_RUN)
        _, t, k = np.nonzero(seen.places[:, :, 0] % every == 0)
        known = None if seen.resolved is None else seen.resolved[0, t, :, k]
        self._some.add(hashes[0, t, :, k], seen.places[0, t, :, k], known)

    def _add_pairs(self, kind: str, hashes: Words, seen: _Seen) -> None:
        for one, other in seen.neighbours():
            known = None if seen.resolved is None else seen.resolved[one] & seen.resolved[other]
            self._keys[kind].add_pairs(hashes[one], hashes[other], seen.places[one], known)

    def _add_largest(self, cells: Words, seen: _Seen) -> None:
        """The two largest sizes of every message of three numbers or more, wherever they stand in it."""
        for _, part in seen.block.parts():
            if part.stop - part.start > 2:
                known = None if seen.resolved is None else seen.resolved[..., part].sum(axis=-1) > 2
                largest = mixed(np.partition(cells[..., part], -2, axis=-1)[..., -2:])
                places = seen.places[..., part.start]
                self._keys["largest"].add_pairs(largest[..., 1], largest[..., 0], places, known)

    def _add_words(self, seen: _Seen) -> None:
        """The 32 low bits of K', and of -K': the lesser of the two, and which it is."""
        signed = seen.block.steps.astype(np.int32)  # the low bits alone
        words = np.abs(signed).view(np.uint32)  # the least of all is its own negative
        self._keys["low words"].add(mixed(words.astype(np.uint64)), seen.places, seen.resolved, signed < 0)

    def _add_messages(self, seen: _Seen) -> None:
        """What was said, whatever the centre; and how many messages there were."""
        said = seen.block.said.view(np.uint64)
        for one, other in seen.first_two():
            known = None if seen.resolved is None else seen.resolved[one] & seen.resolved[other]
            self._keys["messages"].add_pairs(mixed(said[one]), mixed(said[other]), seen.places[one], known)
        self._said += seen.messages

    # ---- what they come to -------------------------------------------------------------------------------------------

    def tests(self) -> list[Test]:
        if self._layout is None or not self._said:
            return []
        return [test for test in self._every() if test is not None]

    def _every(self) -> Iterator[Test | None]:
        numbers, raw, words = (self._keys[kind] for kind in _SINGLES)
        either = [
            ("numbers", numbers.ties(EQUAL / 2.0, with_bit=True)),
            ("sizes", numbers.ties(EQUAL)),
            ("sizes as they are", raw.ties(_RAW)),
            ("sizes at some places", self._some.ties(EQUAL)),
        ]
        yield self._fewest("ties", "no noise is said again", either, primary=True)
        pairs = [(kind, self._keys[kind].ties(chance)) for kind, chance in _PAIR_CHANCES.items()]
        yield self._fewest("pair ties", "no two neighbouring numbers are said again", pairs, primary=True)
        largest = [("two largest sizes", self._keys["largest"].ties(LARGEST))]
        yield self._fewest("permuted messages", "no message has the largest noise of another one", largest)
        messages = [("first two numbers", self._keys["messages"].ties(0.0))]
        yield self._fewest("repeated messages", "no message is said again", messages)
        low = [
            ("32 low bits", words.ties(2.0**-32, with_bit=True, given_kept=True)),
            ("32 low bits, or their negative", words.ties(2.0**-31, given_kept=True)),
        ]
        what = "low bits are said again as often as chance has it"
        yield self._fewest("low words", what, low, two_sided=True)

    def _fewest(
        self,
        name: str,
        what: str,
        ties: Sequence[tuple[str, Ties]],
        *,
        primary: bool = False,
        two_sided: bool = False,
    ) -> Test | None:
        """The least likely of these, times their number; None: there are no keys."""
        there = [
            (kind, each, each.two_sided if two_sided else each.p_value) for kind, each in ties if each.expected > 0.0
        ]
        if not there:
            return None
        kind, least, p_value = min(there, key=lambda one: one[2])
        where = f"{kind}; {least.expected:.3g} expected{self._places(least)}"
        return Test(name, what, least.count, min(1.0, p_value * len(there)), where, primary)

    def _places(self, ties: Ties) -> str:
        if ties.places is None or self._layout is None:
            return ""
        one, other = (self._layout.place(place) for place in ties.places)
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
        resolved = None if piece.resolved.all() else piece.resolved
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

    def neighbours(self) -> Iterator[tuple[_Index, _Index]]:
        """All neighbours along a field; of a field of one number, of its rounds."""
        for _, part in self.block.parts():
            if part.stop - part.start > 1:
                yield (..., slice(part.start, part.stop - 1)), (..., slice(part.start + 1, part.stop))
            else:
                yield from self._rounds(part)

    def first_two(self) -> Iterator[tuple[_Index, _Index]]:
        """The first neighbours along every field."""
        for _, part in self.block.parts():
            if part.stop - part.start > 1:
                yield (..., slice(part.start, part.start + 1)), (..., slice(part.start + 1, part.start + 2))
            else:
                yield from self._rounds(part)

    def _rounds(self, part: slice) -> Iterator[tuple[_Index, _Index]]:
        noisy = self.noisy[part.start]
        if len(noisy) > 1:
            yield (slice(None), noisy[:-1], slice(None), part), (slice(None), noisy[1:], slice(None), part)


def _noisy(block: Block) -> Mapping[int, IntArray]:
    """`_Seen.noisy`."""
    single = [part for _, part in block.parts() if part.stop - part.start == 1]
    return {part.start: np.flatnonzero(block.resolved[..., part].any(axis=(0, 2, 3))) for part in single}


def _leading_bits(sizes: FloatArray) -> Words:
    """Exponent and `_LEADING` bits of the mantissa."""
    return sizes.view(np.uint64) >> np.uint64(52 - _LEADING)
