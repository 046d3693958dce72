"""Lattice tests: messages are on the lattice, and cover it evenly, down to the last bit.

A discrete Laplace number K is as likely as -1 - K, up to the spacing over the scale; so every bit of its two's complement is
fair. Its low 32 bits are uniform together, and remain so after the addition of anything known before the draw: so are those of
the replayed noise, K', and of the message, a. Noise that was drawn coarser, or rounded to a short mantissa, has too many
zeros.

Numbers are independent of each other, and so are sums of their bits modulo two: bits that alternate from number to number, and
noise that is split into parts, are detected there and nowhere else. `uniforms` tests the random words behind the noise.

Bits are counted from the lowest resolved one: if a scale is so close to a power of two that the learner's spacing may be twice
the assumed one, one bit is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import numpy as np
from scipy import special

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
"""Maximum count of unresolved bits of a tested number: the 32 bits above more of them are not uniform any more."""

_BYTE_STARTS = (0, 4, 8, 12, 16, 20, 24, 32)
"""First bits of the counted bytes; the last byte is used for single bits only, which are fair, but not independent."""

_UNIFORM_BYTES = 7
"""Count of uniform bytes, also in the message: those below 2^32."""

_MAX_TRAILING_ZEROS = 32
"""Maximum count of trailing zeros that is tested."""

_PRECISIONS = range(6, 38)
"""Lengths of mantissas that are tested, in bits."""

_MIN_TRAILING_ZEROS = 4
"""Minimum count of trailing zeros of a number whose mantissa is tested; one in 16 has as many."""
_LOW_MASK = 2**_MIN_TRAILING_ZEROS - 1
_TESTED_LENGTHS = range(38, 54)
"""Lengths in bits of the numbers whose mantissas are tested, nine in ten; shorter ones end in few bits by chance."""
_WORD = 64

_COMBINATIONS = ("next coordinates", "next rounds", "next learners", "all of a message", "all learners")
"""Sets of numbers whose bits are added modulo two."""

_SIGN_BIT = 32
"""Bit position that represents the sign, above the uniform bits."""

_BYTE_BITS = np.arange(256)[:, None] >> np.arange(8) & 1


class _Words:
    """Statistics of K', or a, over some runs; places are learners, each field separately.

    Attributes:
        bytes: `(places, 8, 256)` counts of numbers by each byte at `_BYTE_STARTS`; for a only where they are uniform.
        zeros: `(places, 33)` counts of numbers with at least j trailing zeros.
        messages: `(numbers + 1, 65)` counts of messages by the count of tested numbers, and the minimum of their trailing
            zeros.
        coarsest: maximum count of bits that are zero in all numbers of one message, and its place.
    """

    def __init__(self, layout: Layout, starts: Sequence[int]) -> None:
        self._places, self._starts = layout.sequence_names, starts
        self.bytes = np.zeros((layout.sequence_count, len(_BYTE_STARTS), 256), np.int64)
        self.zeros = np.zeros((layout.sequence_count, _MAX_TRAILING_ZEROS + 1), np.int64)
        self.messages = np.zeros((layout.numbers_per_message + 1, _WORD + 1), np.int64)
        self.coarsest = (0, "")

    def merge(self, other: _Words) -> None:
        """Merge the statistics of other runs."""
        self.bytes += other.bytes
        self.zeros += other.zeros
        self.messages += other.messages
        self.coarsest = max(self.coarsest, other.coarsest)

    def add(self, place: int, own: _TestedWords) -> None:
        """Add a piece of one of the places."""
        counts, trailing = _count_bytes(own.chosen, self._starts), _count_trailing_zeros(own.ends)
        self.bytes[place] += counts
        zeros = np.bincount(np.minimum(trailing, _MAX_TRAILING_ZEROS), minlength=_MAX_TRAILING_ZEROS + 1)[
            ::-1
        ].cumsum()[::-1]
        zeros[:_MIN_TRAILING_ZEROS] = [counts[0, :: 2**j].sum() for j in range(_MIN_TRAILING_ZEROS)]
        self.zeros[place] += zeros
        # Common trailing zeros are those of the union of all bits; numbers that are not tested are 0 and add no bit.
        fewest = _count_trailing_zeros(np.bitwise_or.reduce(own.words, axis=-1))
        numbers = np.broadcast_to(own.numbers, fewest.shape)
        cells = (numbers * (_WORD + 1) + fewest).reshape(-1)
        self.messages += np.bincount(cells, minlength=self.messages.size).reshape(self.messages.shape)
        bits = numbers * np.minimum(fewest, _MAX_TRAILING_ZEROS)
        t = int(np.unravel_index(int(bits.argmax()), bits.shape)[0])
        self.coarsest = max(self.coarsest, (int(bits.max()), f"{self._places[place]}, round {t}"))


@dataclass(frozen=True, slots=True)
class _TestedWords:
    """Words of one field of one learner in some runs, without the lost bits.

    Attributes:
        words: `(rounds, runs, numbers)`; 0 where not tested.
        numbers: `(rounds, runs)` count of tested numbers per message, or one count for all.
        chosen: tested words, flat.
        ends: tested words with at least `_MIN_TRAILING_ZEROS` trailing zeros.
    """

    words: IntArray
    numbers: IntArray | int
    chosen: IntArray
    ends: IntArray

    @classmethod
    def from_words(cls, words: IntArray, lost_bits: ByteArray) -> Self:
        """Create from words `(rounds, runs, numbers)` and their lost bits."""
        own, is_tested = _remove_lost_bits(words, lost_bits)
        chosen = own.reshape(-1) if is_tested is None else own[is_tested]
        numbers = words.shape[-1] if is_tested is None else is_tested.sum(axis=-1)
        return cls(own, numbers, chosen, chosen[np.flatnonzero(chosen & _LOW_MASK == 0)])


def _remove_lost_bits(words: IntArray, lost_bits: ByteArray) -> tuple[IntArray, BoolArray | None]:
    """Remove the lost bits of words, 0 where not tested; also return the mask of tested words, None: all."""
    if not lost_bits.any():
        return np.ascontiguousarray(words), None
    is_tested = lost_bits <= _MAX_LOST_BITS
    return np.where(is_tested, words >> np.where(is_tested, lost_bits, 0).astype(np.int64), 0), is_tested


def _count_combined_bits(block: Block) -> IntArray:
    """Count `(5, 8, 256)` as `_Words.bytes`: the bits of K' and its sign, added modulo two over `_COMBINATIONS`."""
    counts = np.zeros((len(_COMBINATIONS), len(_BYTE_STARTS), 256), np.int64)
    for _, part in block.iterate_run_pieces():
        own, is_tested = _remove_lost_bits(part.steps, part.lost_bits)
        words = own & (2**_SIGN_BIT - 1) | (own < 0).astype(np.int64) << _SIGN_BIT
        for _, field in block.layout.iterate_field_slices():
            counts += _count_combined_field_bits(
                words[..., field], None if is_tested is None else is_tested[..., field]
            )
    return counts


def _count_combined_field_bits(own: IntArray, is_tested: BoolArray | None) -> IntArray:
    """Count combined bits of one field in some runs; `is_tested` is a mask, None: all."""
    counts = np.zeros((len(_COMBINATIONS), len(_BYTE_STARTS), 256), np.int64)
    for kind, axis in enumerate((3, 1, 0)):  # sums of neighbours along a chain are independent of each other
        moved = np.moveaxis(own, axis, 0)
        is_moved_tested = None if is_tested is None else np.moveaxis(is_tested, axis, 0)
        sums = moved[1:] ^ moved[:-1]
        counts[kind] = _count_bytes(
            sums.reshape(-1) if is_moved_tested is None else sums[is_moved_tested[1:] & is_moved_tested[:-1]]
        )
    for kind, axis in ((3, 3), (4, 0)):
        if own.shape[axis] > 2:  # two of them are neighbours, already counted
            sums = np.bitwise_xor.reduce(own, axis=axis)
            counts[kind] = _count_bytes(
                sums.reshape(-1) if is_tested is None else sums[np.logical_and.reduce(is_tested, axis=axis)]
            )
    return counts


def _count_mantissas(own: _TestedWords) -> IntArray:
    """Count K' `(64, 65)` by length, and by length without trailing zeros; the last column counts all."""
    counts = np.zeros((_WORD, _WORD + 1), np.int64)
    length = _count_bits(own.ends)
    without_zeros = np.maximum(length - _count_trailing_zeros(own.ends), 0)
    counts[:, :-1] = np.bincount(length * _WORD + without_zeros, minlength=_WORD**2).reshape(_WORD, _WORD)
    exponents = np.bincount(_compute_exponents(own.chosen), minlength=_EXPONENT_OF_ONE + _WORD)
    counts[0, -1], counts[1:, -1] = exponents[0], exponents[_EXPONENT_OF_ONE : _EXPONENT_OF_ONE + _WORD - 1]
    return counts


def _count_bytes(words: IntArray, starts: Sequence[int] = _BYTE_STARTS) -> IntArray:
    """Count `_Words.bytes` at `starts`: two bytes from every count of 12 bits, which fits into a cache."""
    counts = np.zeros((len(_BYTE_STARTS), 256), np.int64)
    for k in range(0, 6, 2):
        twelve = np.bincount(_extract_bits(words, starts[k], 4095), minlength=4096)
        counts[k], counts[k + 1] = twelve.reshape(16, 256).sum(axis=0), twelve.reshape(256, 16).sum(axis=1)
    for k in range(6, len(starts)):
        counts[k] = np.bincount(_extract_bits(words, starts[k], 255), minlength=256)
    return counts


def _extract_bits(words: IntArray, start: int, mask: int) -> IntArray:
    bits = words >> start
    bits &= mask
    return bits


_EXPONENT_OF_ONE = 1023
"""Exponent of 1 in float64."""


def _compute_exponents(words: IntArray) -> IntArray:
    """Compute the float64 exponent of K, or of -1 - K if it is negative; 0 for 0."""
    sizes = words >> 63
    sizes ^= words
    exponents: IntArray = sizes.astype(np.float64).view(np.int64)
    exponents >>= 52
    return exponents


def _count_bits(words: IntArray) -> IntArray:
    """Count bits of K, or of -1 - K if it is negative; 0 for 0. Below 2^53 the count follows from the float64 exponent."""
    length: IntArray = np.maximum(_compute_exponents(words) - (_EXPONENT_OF_ONE - 1), 0)
    return length


def _count_trailing_zeros(words: IntArray) -> IntArray:
    """Count trailing zeros; 64 for 0."""
    lowest = np.frexp((words & -words).astype(np.float64))[1].astype(np.int64) - 1
    return np.where(words == 0, _WORD, lowest)


class Lattice(ConformanceTest):
    """Tests that messages are on the lattice, and cover it evenly, down to the last bit."""

    part: ClassVar[BudgetPart] = "lattice"

    additive_names: ClassVar[tuple[str, ...]] = ("_off_counts", "_block_count", "_mantissas", "_combined_bits")

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        self._off_counts = np.zeros(layout.sequence_count, np.int64)
        self._block_count = 0
        self._steps, self._messages = _Words(layout, _BYTE_STARTS), _Words(layout, _BYTE_STARTS[:_UNIFORM_BYTES])
        self._mantissas = np.zeros((_WORD, _WORD + 1), np.int64)
        self._combined_bits = np.zeros((len(_COMBINATIONS), len(_BYTE_STARTS), 256), np.int64)

    def add(self, block: Block) -> None:
        parts = [part for _, part in block.layout.iterate_field_slices()]
        off_counts = np.array([np.count_nonzero(each[..., part]) for each in block.is_off_lattice for part in parts])
        if not off_counts.any() and (block.lost_bits > _MAX_LOST_BITS).all():
            return
        self._off_counts += off_counts
        self._block_count += 1
        for learner, _, piece in block.iterate_pieces():
            for place, part in enumerate(parts, learner * len(parts)):
                lost_bits = piece.lost_bits[0, ..., part]
                noise = _TestedWords.from_words(piece.steps[0, ..., part], lost_bits)
                self._steps.add(place, noise)
                self._messages.add(place, _TestedWords.from_words(piece.message_steps[0, ..., part], lost_bits))
                self._mantissas += _count_mantissas(noise)
        if block.has_past:
            self._combined_bits += _count_combined_bits(block)

    def merge(self, other: Self) -> None:
        super().merge(other)
        self._steps.merge(other._steps)
        self._messages.merge(other._messages)

    def _iterate_tests(self) -> Iterator[Test]:
        if not self._block_count:
            return
        off_count, place = int(self._off_counts.sum()), self._layout.sequence_names[int(self._off_counts.argmax())]
        description = "all noise is on its lattice"
        yield Test(
            "lattice",
            description,
            float(off_count),
            float(off_count == 0),
            place if off_count else "",
            is_primary=False,
        )
        yield from self._test_coverage("", "the noise", self._steps, _judge_bits)
        yield from self._test_coverage("sent ", "messages", self._messages, _judge_uniform_bits)
        yield from _test_mantissas(self._mantissas)
        yield from _test_combined_bits(self._combined_bits)

    def _test_coverage(
        self, prefix: str, subject: str, words: _Words, judge_bits: Callable[[IntArray], StatisticsAndPValues]
    ) -> Iterator[Test]:
        """Test that the whole lattice is used, by K' or by a."""
        judge_zeros = partial(judge_dyadic_counts, max_level=_MAX_TRAILING_ZEROS)

        def name_zeros(k: int) -> str:
            return f"{k + 1} zeros or more"

        tests: tuple[
            tuple[str, str, Callable[[IntArray], StatisticsAndPValues], IntArray, Callable[[int], str], bool], ...
        ] = (
            ("bits", f"every bit of {subject} is fair", judge_bits, words.bytes, "bit {}".format, True),
            (
                "trailing zeros",
                f"{subject} has trailing zeros by chance only",
                judge_zeros,
                words.zeros,
                name_zeros,
                not prefix,
            ),
            ("low bytes", f"low bits of {subject} are uniform together", _judge_bytes, words.bytes, _name_bits, False),
        )
        for name, description, judge, counts, detail, is_primary in tests:
            yield from pool_tests(
                prefix + name, description, judge, counts, detail, self._layout.sequence_names, is_primary=is_primary
            )
        yield from _test_coarse_messages(prefix + "coarse messages", f"no message of {subject} is coarser", words)


def _judge_bits(counts: IntArray) -> StatisticsAndPValues:
    """Test the ones among 40 bits of `bytes`."""
    ones = np.einsum("pbv,vk->pbk", counts[:, [0, 2, 4, 6, 7]], _BYTE_BITS).reshape(len(counts), -1)
    trials = counts[:, 0].sum(axis=-1)[:, None]
    return ones / np.maximum(trials, 1), np.where(trials > 0, compute_binomial_p_values(ones, trials, 0.5), np.nan)


def _test_combined_bits(counts: IntArray) -> list[Test]:
    """Test that bits added modulo two are as fair as single bits."""
    fraction, p_values = (each[:, : _SIGN_BIT + 1] for each in _judge_bits(counts))

    def name_location(index: tuple[int, ...]) -> str:
        return f"{'signs' if index[1] == _SIGN_BIT else f'bit {index[1]}'} of {_COMBINATIONS[index[0]]}"

    return select_worst_test(
        "bits together", "bits of the noise are independent from number to number", (fraction, p_values), name_location
    )


def _judge_uniform_bits(counts: IntArray) -> StatisticsAndPValues:
    """Test the first 32 bits."""
    fraction, p_values = _judge_bits(counts)
    return fraction[:, :32], p_values[:, :32]


def _judge_bytes(counts: IntArray) -> StatisticsAndPValues:
    """Test, for bits below 2^32, every four bits, and every eight."""
    low = counts[:, :_UNIFORM_BYTES].reshape(len(counts), _UNIFORM_BYTES, 16, 16)
    nibbles = np.concatenate([low.sum(axis=2), low[:, -1:].sum(axis=3)], axis=1)
    results = judge_even_counts(nibbles), judge_even_counts(counts[:, :_UNIFORM_BYTES])
    return np.hstack([each[0] for each in results]), np.hstack([each[1] for each in results])


def _name_bits(k: int) -> str:
    first, width = (4 * k, 4) if k <= _UNIFORM_BYTES else (_BYTE_STARTS[k - _UNIFORM_BYTES - 1], 8)
    return f"bits {first} to {first + width - 1}"


def _test_coarse_messages(name: str, description: str, words: _Words) -> list[Test]:
    """Test for too many messages whose n numbers all have j trailing zeros, probability `2^-jn`, for the worst j."""
    if not words.messages[2:].any():
        return []  # a message of one number is that number
    numbers, levels = np.arange(1, len(words.messages)), np.arange(1, _MAX_TRAILING_ZEROS + 1)
    expected = words.messages[1:].sum(axis=1) @ np.exp2(-np.outer(numbers, levels))
    counts = words.messages[1:].sum(axis=0)[::-1].cumsum()[::-1][levels]
    location = words.coarsest[1]
    return select_worst_test(
        name, description, (counts[None], _compute_upper_tail(counts, expected)[None]), lambda _: location
    )


def _test_mantissas(mantissas: IntArray) -> list[Test]:
    """Test for short mantissas: a fraction `2^-(B - p)` of length B has at most p bits before the zeros; for the worst p."""
    lengths, precisions = np.array(_TESTED_LENGTHS), np.array(_PRECISIONS)
    if not mantissas[lengths, -1].any():
        return []
    expected = mantissas[lengths, -1] @ np.exp2(-np.maximum(lengths[:, None] - precisions, _MIN_TRAILING_ZEROS))
    counts = mantissas[lengths, :-1].sum(axis=0).cumsum()[precisions]
    description = "no number was rounded to a short mantissa"
    results = counts[None], _compute_upper_tail(counts, expected)[None]
    return select_worst_test(
        "mantissas", description, results, lambda k: f"{_PRECISIONS[k[1]]} bits or fewer", is_primary=True
    )


def _compute_upper_tail(counts: IntArray, expected: FloatArray) -> FloatArray:
    """Compute the upper Poisson tail, which bounds that of a sum of rare events."""
    return np.where(counts > 0, special.gammainc(np.maximum(counts, 1), expected), 1.0)
