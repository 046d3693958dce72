"""The lattice: messages are on it, and cover it evenly, down to the last bit.

A discrete Laplace number K is as likely as -1 - K, up to the spacing over the scale; so every bit of its two's complement is
fair. Its low 32 bits are uniform together, and stay so whatever is added to them that was known before the draw: so are those of
what a replay finds, K', and of the message, a. Noise that was drawn coarser, or rounded to a short mantissa, has too many zeros.

Numbers are independent of each other, and so are their bits, however they are added modulo two: bits that alternate from number
to number, and noise that is split into shares, show there and nowhere else. `uniforms` tests the random words behind the noise.

Bits are counted from the lowest one that is resolved: where a scale is so close to a power of two that the learner's spacing may
be twice the one assumed, one bit is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import numpy as np
from scipy import stats

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.p_values import (
    StatisticsAndPValues,
    compute_binomial_p_values,
    judge_dyadic_counts,
    judge_even_counts,
    pool_tests,
    select_worst_test,
)
from sottovoce_core.auditing.conformance.residuals import ByteArray

_MAX_LOST_BITS = 4
"""Numbers with more unresolved bits than this are left out: the 32 bits above those are not uniform any more."""

_STARTS = (0, 4, 8, 12, 16, 20, 24, 32)
"""First bits of the bytes that are counted; the last one is there for its bits alone, which are fair, but not independent."""

_UNIFORM = 7
"""Bytes that are uniform, also in the message: those below 2^32."""

_MAX_TRAILING_ZEROS = 32
"""Most trailing zeros that are tested."""

_PRECISIONS = range(6, 38)
"""Lengths of mantissas that are tested, in bits."""

_MIN_TRAILING_ZEROS = 4
"""Mantissas are looked at where a number has so many trailing zeros or more, as one in 16 has."""
_LOW = 2**_MIN_TRAILING_ZEROS - 1
_LONG = range(38, 54)
"""And where it has so many bits, as nine in ten have: shorter ones end in few bits too often by chance."""
_WORD = 64

_TOGETHER = ("next coordinates", "next rounds", "next learners", "all of a message", "all learners")
"""Numbers whose bits are added modulo two."""

_SIGN = 32
"""The bit in whose place the sign is looked at, above those that are uniform."""

_DIGITS = np.arange(256)[:, None] >> np.arange(8) & 1


class _Words:
    """What K', or a, comes to in some runs; places are learners, each field by itself.

    Attributes:
        bytes: `(places, 8, 256)` numbers by each byte at `_STARTS`; of a only where they are uniform.
        zeros: `(places, 33)` numbers with at least so many trailing zeros.
        messages: `(numbers + 1, 65)` messages by the numbers judged, and by the fewest trailing zeros among these.
        coarsest: the most bits that are zero in all of one message, and where.
    """

    def __init__(self, layout: Layout, starts: Sequence[int]) -> None:
        self._places, self._starts = layout.sequence_names, starts
        self.bytes = np.zeros((layout.sequence_count, len(_STARTS), 256), np.int64)
        self.zeros = np.zeros((layout.sequence_count, _MAX_TRAILING_ZEROS + 1), np.int64)
        self.messages = np.zeros((layout.numbers_per_message + 1, _WORD + 1), np.int64)
        self.coarsest = (0, "")

    def merge(self, other: _Words) -> None:
        """Take in those of other runs."""
        self.bytes += other.bytes
        self.zeros += other.zeros
        self.messages += other.messages
        self.coarsest = max(self.coarsest, other.coarsest)

    def add(self, place: int, own: _Judged) -> None:
        """A piece of one of the places."""
        counted, ending = _counted(own.chosen, self._starts), _trailing(own.ends)
        self.bytes[place] += counted
        zeros = np.bincount(np.minimum(ending, _MAX_TRAILING_ZEROS), minlength=_MAX_TRAILING_ZEROS + 1)[::-1].cumsum()[
            ::-1
        ]
        zeros[:_MIN_TRAILING_ZEROS] = [counted[0, :: 2**j].sum() for j in range(_MIN_TRAILING_ZEROS)]
        self.zeros[place] += zeros
        # Zeros that all numbers of a message share are those of their union; what is not judged is 0 and adds no bit.
        fewest = _trailing(np.bitwise_or.reduce(own.words, axis=-1))
        numbers = np.broadcast_to(own.numbers, fewest.shape)
        cells = (numbers * (_WORD + 1) + fewest).reshape(-1)
        self.messages += np.bincount(cells, minlength=self.messages.size).reshape(self.messages.shape)
        bits = numbers * np.minimum(fewest, _MAX_TRAILING_ZEROS)
        t = int(np.unravel_index(int(bits.argmax()), bits.shape)[0])
        self.coarsest = max(self.coarsest, (int(bits.max()), f"{self._places[place]}, round {t}"))


@dataclass(frozen=True, slots=True)
class _Judged:
    """Words of one field of one learner in some runs, without the bits that are lost.

    Attributes:
        words: `(rounds, runs, numbers)`; 0 where nothing is judged.
        numbers: `(rounds, runs)` how many of a message are judged, or one number for all.
        chosen: those that are judged, in one row.
        ends: of these, those that have `_MIN_TRAILING_ZEROS` trailing zeros or more.
    """

    words: IntArray
    numbers: IntArray | int
    chosen: IntArray
    ends: IntArray

    @classmethod
    def of(cls, words: IntArray, lost: ByteArray) -> Self:
        """Of `(rounds, runs, numbers)`."""
        own, judged = _without_lost(words, lost)
        chosen = own.reshape(-1) if judged is None else own[judged]
        numbers = words.shape[-1] if judged is None else judged.sum(axis=-1)
        return cls(own, numbers, chosen, chosen[np.flatnonzero(chosen & _LOW == 0)])


def _without_lost(words: IntArray, lost: ByteArray) -> tuple[IntArray, BoolArray | None]:
    """Words without their lost bits, 0 where nothing is judged; and where something is, None: everywhere."""
    if not lost.any():
        return np.ascontiguousarray(words), None
    judged = lost <= _MAX_LOST_BITS
    return np.where(judged, words >> np.where(judged, lost, 0).astype(np.int64), 0), judged


def _together(block: Block) -> IntArray:
    """`(5, 8, 256)` as `_Words.bytes`: the bits of K' and its sign, added modulo two over `_TOGETHER`."""
    found = np.zeros((len(_TOGETHER), len(_STARTS), 256), np.int64)
    for _, part in block.iterate_run_pieces():
        own, judged = _without_lost(part.steps, part.lost_bits)
        words = own & (2**_SIGN - 1) | (own < 0).astype(np.int64) << _SIGN
        for _, field in block.layout.iterate_field_slices():
            found += _added(words[..., field], None if judged is None else judged[..., field])
    return found


def _added(own: IntArray, known: BoolArray | None) -> IntArray:
    """`_together` of a field in some runs; `known`: where something is judged, None: everywhere."""
    found = np.zeros((len(_TOGETHER), len(_STARTS), 256), np.int64)
    for kind, axis in enumerate((3, 1, 0)):  # neighbours along a chain: their sums are independent of each other
        one, there = np.moveaxis(own, axis, 0), None if known is None else np.moveaxis(known, axis, 0)
        sums = one[1:] ^ one[:-1]
        found[kind] = _counted(sums.reshape(-1) if there is None else sums[there[1:] & there[:-1]])
    for kind, axis in ((3, 3), (4, 0)):
        if own.shape[axis] > 2:  # of two they are neighbours
            sums = np.bitwise_xor.reduce(own, axis=axis)
            found[kind] = _counted(sums.reshape(-1) if known is None else sums[np.logical_and.reduce(known, axis=axis)])
    return found


def _mantissas(own: _Judged) -> IntArray:
    """`(64, 65)` numbers K' by length, and by that of what stands before the zeros in which they end; in the last column, all."""
    found = np.zeros((_WORD, _WORD + 1), np.int64)
    length = _length(own.ends)
    before = np.maximum(length - _trailing(own.ends), 0)
    found[:, :-1] = np.bincount(length * _WORD + before, minlength=_WORD**2).reshape(_WORD, _WORD)
    exponents = np.bincount(_exponents(own.chosen), minlength=_ONE + _WORD)
    found[0, -1], found[1:, -1] = exponents[0], exponents[_ONE : _ONE + _WORD - 1]
    return found


def _counted(words: IntArray, starts: Sequence[int] = _STARTS) -> IntArray:
    """`_Words.bytes` at these of `_STARTS`: two bytes from every count of 12 bits, which is what memory holds close by."""
    found = np.zeros((len(_STARTS), 256), np.int64)
    for k in range(0, 6, 2):
        twelve = np.bincount(_cut(words, starts[k], 4095), minlength=4096)
        found[k], found[k + 1] = twelve.reshape(16, 256).sum(axis=0), twelve.reshape(256, 16).sum(axis=1)
    for k in range(6, len(starts)):
        found[k] = np.bincount(_cut(words, starts[k], 255), minlength=256)
    return found


def _cut(words: IntArray, start: int, mask: int) -> IntArray:
    bits = words >> start
    bits &= mask
    return bits


_ONE = 1023
"""The exponent of 1 in float64."""


def _exponents(words: IntArray) -> IntArray:
    """Of K, or of -1 - K if it is negative, as float64 has it; 0 for 0."""
    sizes = words >> 63
    sizes ^= words
    exponents: IntArray = sizes.astype(np.float64).view(np.int64)
    exponents >>= 52
    return exponents


def _length(words: IntArray) -> IntArray:
    """Bits of K, or of -1 - K if it is negative; 0 for 0. Below 2^53 they follow from the exponent of a float64 number."""
    length: IntArray = np.maximum(_exponents(words) - (_ONE - 1), 0)
    return length


def _trailing(words: IntArray) -> IntArray:
    """How many zeros they end in; 64 for 0."""
    lowest = np.frexp((words & -words).astype(np.float64))[1].astype(np.int64) - 1
    return np.where(words == 0, _WORD, lowest)


class Lattice(ConformanceTest):
    """The lattice: messages are on it, and cover it evenly, down to the last bit."""

    part: ClassVar[BudgetPart] = "lattice"

    additive_names: ClassVar[tuple[str, ...]] = ("_off", "_judged", "_mantissas", "_together")

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        self._off = np.zeros(layout.sequence_count, np.int64)
        self._judged = 0  # blocks
        self._steps, self._said = _Words(layout, _STARTS), _Words(layout, _STARTS[:_UNIFORM])
        self._mantissas = np.zeros((_WORD, _WORD + 1), np.int64)
        self._together = np.zeros((len(_TOGETHER), len(_STARTS), 256), np.int64)

    def add(self, block: Block) -> None:
        parts = [part for _, part in block.layout.iterate_field_slices()]
        off = np.array([np.count_nonzero(each[..., part]) for each in block.is_off_lattice for part in parts])
        if not off.any() and (block.lost_bits > _MAX_LOST_BITS).all():
            return
        self._off += off
        self._judged += 1
        for learner, _, piece in block.iterate_pieces():
            for place, part in enumerate(parts, learner * len(parts)):
                lost = piece.lost_bits[0, ..., part]
                noise = _Judged.of(piece.steps[0, ..., part], lost)
                self._steps.add(place, noise)
                self._said.add(place, _Judged.of(piece.message_steps[0, ..., part], lost))
                self._mantissas += _mantissas(noise)
        if block.has_past:
            self._together += _together(block)

    def merge(self, other: Self) -> None:
        super().merge(other)
        self._steps.merge(other._steps)
        self._said.merge(other._said)

    def _every(self) -> Iterator[Test]:
        if not self._judged:
            return
        off, at = int(self._off.sum()), self._layout.sequence_names[int(self._off.argmax())]
        what = "all noise is on its lattice"
        yield Test("lattice", what, float(off), float(off == 0), at if off else "", is_primary=False)
        yield from self._covered("", "the noise", self._steps, _bits)
        yield from self._covered("said ", "messages", self._said, _uniform_bits)
        yield from _precise(self._mantissas)
        yield from _independent(self._together)

    def _covered(
        self, prefix: str, of: str, words: _Words, bits: Callable[[IntArray], StatisticsAndPValues]
    ) -> Iterator[Test]:
        """That all of the lattice is used: of K', or of a."""
        ending, zeros = partial(judge_dyadic_counts, max_level=_MAX_TRAILING_ZEROS), lambda k: f"{k + 1} zeros or more"
        kinds: tuple[
            tuple[str, str, Callable[[IntArray], StatisticsAndPValues], IntArray, Callable[[int], str], bool], ...
        ] = (
            ("bits", f"every bit of {of} is fair", bits, words.bytes, "bit {}".format, True),
            ("trailing zeros", f"{of} ends in zeros by chance", ending, words.zeros, zeros, not prefix),
            ("low bytes", f"low bits of {of} are uniform together", _bytes, words.bytes, _digits, False),
        )
        for name, what, judge, counts, detail, primary in kinds:
            yield from pool_tests(
                prefix + name, what, judge, counts, detail, self._layout.sequence_names, is_primary=primary
            )
        yield from _coarse(prefix + "coarse messages", f"no message of {of} is coarser", words)


def _bits(counts: IntArray) -> StatisticsAndPValues:
    """Ones among 40 bits of `bytes`."""
    ones = np.einsum("pbv,vk->pbk", counts[:, [0, 2, 4, 6, 7]], _DIGITS).reshape(len(counts), -1)
    tries = counts[:, 0].sum(axis=-1)[:, None]
    return ones / np.maximum(tries, 1), np.where(tries > 0, compute_binomial_p_values(ones, tries, 0.5), np.nan)


def _independent(counts: IntArray) -> list[Test]:
    """Bits that are added modulo two are as fair as each of them."""
    share, p_values = (each[:, : _SIGN + 1] for each in _bits(counts))

    def where(index: tuple[int, ...]) -> str:
        return f"{'signs' if index[1] == _SIGN else f'bit {index[1]}'} of {_TOGETHER[index[0]]}"

    return select_worst_test(
        "bits together", "bits of the noise are independent from number to number", (share, p_values), where
    )


def _uniform_bits(counts: IntArray) -> StatisticsAndPValues:
    """The first 32 of them."""
    share, p_values = _bits(counts)
    return share[:, :32], p_values[:, :32]


def _bytes(counts: IntArray) -> StatisticsAndPValues:
    """Of numbers below 2^32: every four bits, and every eight."""
    low = counts[:, :_UNIFORM].reshape(len(counts), _UNIFORM, 16, 16)
    nibbles = np.concatenate([low.sum(axis=2), low[:, -1:].sum(axis=3)], axis=1)
    found = judge_even_counts(nibbles), judge_even_counts(counts[:, :_UNIFORM])
    return np.hstack([each[0] for each in found]), np.hstack([each[1] for each in found])


def _digits(k: int) -> str:
    first, width = (4 * k, 4) if k <= _UNIFORM else (_STARTS[k - _UNIFORM - 1], 8)
    return f"bits {first} to {first + width - 1}"


def _coarse(name: str, what: str, words: _Words) -> list[Test]:
    """Messages all of whose numbers end in zeros, of n numbers with probability `2^-jn`: too many, for the worst j."""
    if not words.messages[2:].any():
        return []  # a message of one number is that number
    numbers, levels = np.arange(1, len(words.messages)), np.arange(1, _MAX_TRAILING_ZEROS + 1)
    expected = words.messages[1:].sum(axis=1) @ np.exp2(-np.outer(numbers, levels))
    found = words.messages[1:].sum(axis=0)[::-1].cumsum()[::-1][levels]
    where = words.coarsest[1]
    return select_worst_test(name, what, (found[None], _too_many(found, expected)[None]), lambda _: where)


def _precise(mantissas: IntArray) -> list[Test]:
    """Numbers with mantissas of few bits: of those of length B, `2^-(B - p)` have at most p before the zeros; for the worst p."""
    lengths, precisions = np.array(_LONG), np.array(_PRECISIONS)
    if not mantissas[lengths, -1].any():
        return []
    expected = mantissas[lengths, -1] @ np.exp2(-np.maximum(lengths[:, None] - precisions, _MIN_TRAILING_ZEROS))
    found = mantissas[lengths, :-1].sum(axis=0).cumsum()[precisions]
    what = "no number was rounded to a short mantissa"
    judged = found[None], _too_many(found, expected)[None]
    return select_worst_test("mantissas", what, judged, lambda k: f"{_PRECISIONS[k[1]]} bits or fewer", is_primary=True)


def _too_many(found: IntArray, expected: FloatArray) -> FloatArray:
    """Poisson's upper tail; it bounds that of a sum of rare events."""
    return np.asarray(stats.poisson.sf(found - 1, expected))
