"""The lattice: messages are on it, and cover it evenly, down to the last bit.

A discrete Laplace number K is as likely as -1 - K, up to the spacing over the scale; so every bit of its two's complement is
fair. Its low 32 bits are uniform together, and stay so whatever is added to them that was known before the draw: so are those of
what a replay finds, K', and of the message, a. Noise that was drawn coarser, or rounded to a short mantissa, has too many zeros.

Numbers are independent of each other, and so are their bits, however they are added modulo two: generators of low period,
and noise that is split into shares, show there and nowhere else.

Bits are counted from the lowest one that is resolved: where a scale is so close to a power of two that the learner's spacing may
be twice the one assumed, one bit is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import numpy as np
from scipy import stats

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.auditing.conformance.block import Block
from sottovoce.auditing.conformance.counts import Judged, binomial, by_place, dyadic, even, pooled, worst
from sottovoce.auditing.conformance.instrument import Instrument
from sottovoce.auditing.levels import Part, Test

_MOST_LOST = 4
"""Numbers with more unresolved bits than this are left out: the 32 bits above those are not uniform any more."""

_STARTS = (0, 4, 8, 12, 16, 20, 24, 32)
"""First bits of the bytes that are counted; the last one is there for its bits alone, which are fair, but not independent."""

_UNIFORM = 7
"""Bytes that are uniform, also in the message: those below 2^32."""

_ZEROS = 32
"""Most trailing zeros that are tested."""

_PRECISIONS = range(6, 38)
"""Lengths of mantissas that are tested, in bits."""

_SHORT = 4
"""Mantissas are looked at where a number has so many trailing zeros or more, as one in 16 has."""
_LOW = 2**_SHORT - 1
_LONG = range(38, 54)
"""And where it has so many bits, as nine in ten have: shorter ones end in few bits too often by chance."""
_WORD = 64

_TOGETHER = ("next coordinates", "next rounds", "next learners", "all of a message", "all learners")
"""Numbers whose bits are added modulo two."""

_SIGN = 32
"""The bit in whose place the sign is looked at, above those that are uniform."""

_DIGITS = np.arange(256)[:, None] >> np.arange(8) & 1


@dataclass(frozen=True, slots=True)
class _Words:
    """What K', or a, comes to in some runs; places are learners, each field by itself.

    Attributes:
        bytes: `(places, 8, 256)` numbers by each byte at `_STARTS`.
        zeros: `(places, 33)` numbers with at least so many trailing zeros.
        messages: `(numbers + 1, 65)` messages by the numbers judged, and by the fewest trailing zeros among these.
        coarsest: the most bits that are zero in all of one message, and where.
    """

    bytes: IntArray
    zeros: IntArray
    messages: IntArray
    coarsest: tuple[int, str] = (0, "")

    @classmethod
    def of(cls, block: Block, words: IntArray) -> Self:
        kept = [_looked_at(block, words, *place) for place in _places(block)]
        return cls(
            np.array([each.bytes for each in kept]),
            np.array([each.zeros for each in kept]),
            np.sum([each.messages for each in kept], axis=0),
            max(each.coarsest for each in kept),
        )

    def joined(self, other: Self) -> Self:
        """With those of other runs."""
        added = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)[:-1]}
        return type(self)(**added, coarsest=max(self.coarsest, other.coarsest))


def _places(block: Block) -> list[tuple[int, str, slice]]:
    return [(learner, name, part) for learner in range(len(block.learners)) for name, part in block.parts()]


def _resolved(block: Block, words: IntArray, learner: int, part: slice) -> tuple[IntArray, BoolArray]:
    """One place's words without the bits that are lost, and which are judged; the others are 0."""
    own, lost = words[learner, ..., part], block.lost[learner, ..., part]
    judged = lost <= _MOST_LOST
    if lost.any():
        own = np.where(judged, own >> np.where(judged, lost, 0).astype(np.int64), 0)
    return own, judged


def _looked_at(block: Block, words: IntArray, learner: int, name: str, part: slice) -> _Words:
    """One place, whose axis is left out."""
    own, judged = _resolved(block, words, learner, part)
    each = own.reshape(-1) if judged.all() else own[judged]
    counted, ending = _counted(each), _trailing(each[each & _LOW == 0])
    zeros = np.bincount(np.minimum(ending, _ZEROS), minlength=_ZEROS + 1)[::-1].cumsum()[::-1]
    zeros[:_SHORT] = [counted[0, :: 2**j].sum() for j in range(_SHORT)]
    # Zeros that all numbers of a message share are those of their union; what is not judged is 0 and adds no bit.
    fewest, numbers = _trailing(np.bitwise_or.reduce(own, axis=-1)), judged.sum(axis=-1)
    shape = block.values.shape[-1] + 1, _WORD + 1
    messages = np.bincount((numbers * shape[1] + fewest).reshape(-1), minlength=math.prod(shape)).reshape(shape)
    bits = numbers * np.minimum(fewest, _ZEROS)
    t = int(np.unravel_index(int(bits.argmax()), bits.shape)[0])
    where = f"{block.learners[learner]}, field {name!r}, round {t}"
    return _Words(counted, zeros, messages, (int(bits.max()), where))


def _together(block: Block) -> IntArray:
    """`(5, 8, 256)` as `_Words.bytes`: the bits of K' and its sign, added modulo two over `_TOGETHER`."""
    words, judged = np.zeros_like(block.steps), np.zeros(block.steps.shape, np.bool_)
    for learner, _, part in _places(block):
        own, judged[learner, ..., part] = _resolved(block, block.steps, learner, part)
        words[learner, ..., part] = own & (2**_SIGN - 1) | (own < 0).astype(np.int64) << _SIGN
    found = np.zeros((len(_TOGETHER), len(_STARTS), 256), np.int64)
    for _, part in block.parts():
        own, known = words[..., part], judged[..., part]
        for kind, axis in enumerate((3, 1, 0)):  # neighbours along a chain: their sums are independent of each other
            one, there = np.moveaxis(own, axis, 0), np.moveaxis(known, axis, 0)
            found[kind] += _counted((one[1:] ^ one[:-1])[there[1:] & there[:-1]])
        for kind, axis in ((3, 3), (4, 0)):
            if own.shape[axis] > 2:  # of two they are neighbours
                everywhere: BoolArray = np.logical_and.reduce(known, axis=axis)
                found[kind] += _counted(np.bitwise_xor.reduce(own, axis=axis)[everywhere])
    return found


def _mantissas(block: Block) -> IntArray:
    """`(64, 65)` numbers K' by length, and by that of what stands before the zeros in which they end; in the last column, all."""
    found = np.zeros((_WORD, _WORD + 1), np.int64)
    for learner, _, part in _places(block):
        own, judged = _resolved(block, block.steps, learner, part)
        each = own.reshape(-1) if judged.all() else own[judged]
        length, ends = _length(each), each & _LOW == 0
        before = np.maximum(length[ends] - _trailing(each[ends]), 0)
        found[:, :-1] += np.bincount(length[ends] * _WORD + before, minlength=_WORD**2).reshape(_WORD, _WORD)
        found[:, -1] += np.bincount(length, minlength=_WORD)
    return found


def _counted(words: IntArray) -> IntArray:
    """`_Words.bytes`: two bytes from every count of 12 bits, which is what memory holds close by."""
    found = [np.bincount(words >> start & 4095, minlength=4096) for start in _STARTS[:6:2]]
    pairs = [byte for each in found for byte in (each.reshape(16, 256).sum(axis=0), each.reshape(256, 16).sum(axis=1))]
    return np.stack(pairs + [np.bincount(words >> start & 255, minlength=256) for start in _STARTS[6:]])


def _length(words: IntArray) -> IntArray:
    """Bits of K, or of -1 - K if it is negative; 0 for 0. Below 2^53 they follow from the exponent of a float64 number."""
    exponents: IntArray = (words ^ (words >> 63)).astype(np.float64).view(np.int64) >> 52
    length: IntArray = np.maximum(exponents - 1022, 0)
    return length


def _trailing(words: IntArray) -> IntArray:
    """How many zeros they end in; 64 for 0."""
    lowest = np.frexp((words & -words).astype(np.float64))[1].astype(np.int64) - 1
    return np.where(words == 0, _WORD, lowest)


class Lattice(Instrument):
    """The lattice: messages are on it, and cover it evenly, down to the last bit."""

    part: ClassVar[Part] = "lattice"

    def __init__(self) -> None:
        self._places: tuple[str, ...] = ()
        self._off: IntArray | None = None
        self._words: tuple[_Words, ...] = ()
        self._mantissas = np.zeros((_WORD, _WORD + 1), np.int64)
        self._together = np.zeros((len(_TOGETHER), len(_STARTS), 256), np.int64)

    def add(self, block: Block) -> None:
        off = np.array([np.count_nonzero(each[..., part]) for each in block.off for _, part in block.parts()])
        if not off.any() and (block.lost > _MOST_LOST).all():
            return
        self._places = tuple(f"{learner}, field {name!r}" for learner in block.learners for name, _ in block.parts())
        self._take(off, (_Words.of(block, block.steps), _Words.of(block, block.said)), _mantissas(block))
        if block.close:
            self._together = self._together + _together(block)

    def merge(self, other: Self) -> None:
        if other._off is not None:
            self._places = other._places
            self._take(other._off, other._words, other._mantissas)
            self._together = self._together + other._together

    def _take(self, off: IntArray, words: tuple[_Words, ...], mantissas: IntArray) -> None:
        self._off = off if self._off is None else self._off + off
        pairs = zip(self._words, words, strict=True) if self._words else ()
        self._words = tuple(mine.joined(its) for mine, its in pairs) or words
        self._mantissas = self._mantissas + mantissas

    def tests(self) -> list[Test]:
        if self._off is None:
            return []
        steps, said = self._words
        off, at = int(self._off.sum()), self._places[int(self._off.argmax())]
        what = "all noise is on its lattice"
        return [
            Test("lattice", what, float(off), float(off == 0), at if off else "", primary=False),
            *self._covered("", "the noise", steps, _bits),
            *self._covered("said ", "messages", said, _uniform_bits),
            *_precise(self._mantissas),
            *_independent(self._together),
        ]

    def _covered(self, prefix: str, of: str, words: _Words, bits: Callable[[IntArray], Judged]) -> Iterator[Test]:
        """That all of the lattice is used: of K', or of a."""
        kinds = (
            ("bits", f"every bit of {of} is fair", bits, words.bytes, "bit {}".format, True),
            ("trailing zeros", f"{of} ends in zeros by chance", _ending, words.zeros, _at_least, not prefix),
            ("low bytes", f"low bits of {of} are uniform together", _bytes, words.bytes, _digits, False),
        )
        for name, what, judge, counts, detail, primary in kinds:
            yield from pooled(prefix + name, what, judge, counts, detail, primary=primary)
            yield from by_place(f"learner {prefix}{name}", what, judge, counts, self._places, detail)
        yield from _coarse(prefix + "coarse messages", f"no message of {of} is coarser", words)


def _bits(counts: IntArray) -> Judged:
    """Ones among 40 bits of `bytes`."""
    ones = np.einsum("pbv,vk->pbk", counts[:, [0, 2, 4, 6, 7]], _DIGITS).reshape(len(counts), -1)
    tries = counts[:, 0].sum(axis=-1)[:, None]
    return ones / np.maximum(tries, 1), np.where(tries > 0, binomial(ones, tries, 0.5), np.nan)


def _independent(counts: IntArray) -> list[Test]:
    """Bits that are added modulo two are as fair as each of them."""
    share, p_values = (each[:, : _SIGN + 1] for each in _bits(counts))

    def where(index: tuple[int, ...]) -> str:
        return f"{'signs' if index[1] == _SIGN else f'bit {index[1]}'} of {_TOGETHER[index[0]]}"

    return worst("bits together", "bits of the noise are independent from number to number", (share, p_values), where)


def _uniform_bits(counts: IntArray) -> Judged:
    """The first 32 of them."""
    share, p_values = _bits(counts)
    return share[:, :32], p_values[:, :32]


def _bytes(counts: IntArray) -> Judged:
    """Of numbers below 2^32: every four bits, and every eight."""
    low = counts[:, :_UNIFORM].reshape(len(counts), _UNIFORM, 16, 16)
    nibbles = np.concatenate([low.sum(axis=2), low[:, -1:].sum(axis=3)], axis=1)
    found = even(nibbles), even(counts[:, :_UNIFORM])
    return np.hstack([each[0] for each in found]), np.hstack([each[1] for each in found])


def _digits(k: int) -> str:
    first, width = (4 * k, 4) if k <= _UNIFORM else (_STARTS[k - _UNIFORM - 1], 8)
    return f"bits {first} to {first + width - 1}"


def _ending(counts: IntArray) -> Judged:
    """Of `zeros`."""
    return dyadic(counts, most=_ZEROS)


def _at_least(k: int) -> str:
    return f"{k + 1} zeros or more"


def _coarse(name: str, what: str, words: _Words) -> list[Test]:
    """Messages all of whose numbers end in zeros, of n numbers with probability `2^-jn`: too many, for the worst j."""
    if not words.messages[2:].any():
        return []  # a message of one number is that number
    numbers, levels = np.arange(1, len(words.messages)), np.arange(1, _ZEROS + 1)
    expected = words.messages[1:].sum(axis=1) @ np.exp2(-np.outer(numbers, levels))
    found = words.messages[1:].sum(axis=0)[::-1].cumsum()[::-1][levels]
    where = words.coarsest[1]
    return worst(name, what, (found[None], _too_many(found, expected)[None]), lambda _: where)


def _precise(mantissas: IntArray) -> list[Test]:
    """Numbers with mantissas of few bits: of those of length B, `2^-(B - p)` have at most p before the zeros; for the worst p."""
    lengths, precisions = np.array(_LONG), np.array(_PRECISIONS)
    if not mantissas[lengths, -1].any():
        return []
    expected = mantissas[lengths, -1] @ np.exp2(-np.maximum(lengths[:, None] - precisions, _SHORT))
    found = mantissas[lengths, :-1].sum(axis=0).cumsum()[precisions]
    what = "no number was rounded to a short mantissa"
    judged = found[None], _too_many(found, expected)[None]
    return worst("mantissas", what, judged, lambda k: f"{_PRECISIONS[k[1]]} bits or fewer", primary=True)


def _too_many(found: IntArray, expected: FloatArray) -> FloatArray:
    """Poisson's upper tail; it bounds that of a sum of rare events."""
    return np.asarray(stats.poisson.sf(found - 1, expected))
