"""Tests of the bits of the uniform numbers behind the noise: against signs, against each other, and against those of neighbours.

`u = exp(-size)` is uniform in (0, 1]. A sampler that inverts its distribution function computes the size from a random word,
and u has the bits of that word, or of its complement. A sign that is a bit of the same word, or of the word of a neighbouring
number, makes some outputs impossible (Doornik 2005 found this flaw in generators of normal numbers); so do two sizes that
share bits.

Bit j of u has the value `2^-j`. The lattice determines u to about `2^-40 u`, so bit 40 + k is resolved in small u only: in one
number of 2^k. Tests of signs hold at any resolution: given its size, a correct number has either sign with the same
probability. Spherical noise is on no lattice, and is not tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from sottovoce_core.arrays import IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.p_values import (
    StatisticsAndPValues,
    compute_binomial_p_values,
    select_worst_test,
)
from sottovoce_core.noise import LATTICE_BITS

_WORD = 64
_BITS = _WORD - 1
"""Count of bits of u in a word of 64 bits, whose highest bit is 0: bit j of u is bit 63 - j of the word."""

_PAIRED = 39
"""Count of first bits of u compared in pairs: resolved in every tested number. With the leading 0 they are five bytes."""

_COMPARED = 50
"""Count of first bits of u that are compared with the same bit of a neighbour: the words of correct samplers may have 53 bits."""

_MAX_NUMBERS = 2**16
"""Maximum count of numbers of a block tested at any size: a dependent bit is detected in a hundred numbers."""

_MAX_SMALL_UNIFORM = 2.0**-6
"""Maximum u of the numbers tested in the whole block against their own signs: they resolve additional bits."""

_MAX_LOST_BITS = 1
"""Maximum count of unresolved low bits of a tested number."""

_BELOW_ONE = float(np.nextafter(1.0, 0.0))

_MIN_PARALLEL_WORDS = 96
"""Minimum count of words whose bits are added in parallel."""

Singles = npt.NDArray[np.float32]

_NEIGHBOURS = (("coordinate", 3), ("round", 1), ("learner", 0))
"""Kinds of neighbouring numbers, and the axis of a block along which their distance is one."""

_NEXT_NAMES = tuple(f"the next {kind}" for kind, _ in _NEIGHBOURS)
_PREVIOUS_NAMES = tuple(f"the previous {kind}" for kind, _ in _NEIGHBOURS)


class Uniforms(ConformanceTest):
    """Tests of the bits of the uniform numbers behind the noise.

    Signs are compared with each bit, and with the sum modulo two of each two adjacent bits: if words are multiples of `2^-b`, u
    lies where its bit b changes, and may be rounded to either side; the sum of bits b and b + 1 is resolved.
    """

    part: ClassVar[BudgetPart] = "dependence"
    additive_names: ClassVar[tuple[str, ...]] = ("_own_signs", "_neighbour_signs", "_unequal", "_pairs")

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        # All but `_pairs` are indexed by bit of a word, from the lowest one on.
        self._own_signs = np.zeros((2, 3, _WORD), np.int64)
        """Counts for small u, and for the first numbers: sign unequal to a bit, or to a bit plus the next one; and all."""
        self._neighbour_signs = np.zeros((2 * len(_NEIGHBOURS), 3, _WORD), np.int64)
        """Counts for the first numbers as above, with the bits of a neighbour."""
        self._unequal = np.zeros((len(_NEIGHBOURS), 2, _WORD), np.int64)
        """Counts of pairs of neighbours with unequal bits, and of all pairs."""
        self._pairs = np.zeros((1 + len(_NEIGHBOURS), _PAIRED + 1, _PAIRED + 1), np.int64)
        """Sums of products of two bits, each +1 or -1; the leading 0 is always +1."""

    def add(self, block: Block) -> None:
        if not (block.lost_bits <= _MAX_LOST_BITS).any():
            return
        small = _Words.from_block(block, np.nonzero(block.tail < _MAX_SMALL_UNIFORM))
        self._own_signs[0] += _count_unequal_signs(small, small)
        words = _Words.from_block(block, _index_first_numbers(block))
        self._own_signs[1] += _count_unequal_signs(words, words)
        bits = _convert_bits_to_signs(words)
        self._pairs[0] += _multiply_bits(bits, bits)
        for k, (_, axis) in enumerate(_NEIGHBOURS):
            ends = [(*(slice(None),) * axis, part) for part in (slice(None, -1), slice(1, None))]
            first, second = map(words.select, ends)
            self._neighbour_signs[k] += _count_unequal_signs(first, second)
            self._neighbour_signs[k + len(_NEIGHBOURS)] += _count_unequal_signs(second, first)
            self._unequal[k] += _count_unequal_bits(first, second)
            self._pairs[k + 1] += _multiply_bits(*(bits[end] for end in ends))

    def _iterate_tests(self) -> Iterator[Test]:
        """Test the worst bit of each kind, and the worst pair of bits."""

        def name_signed_bit(at: tuple[int, ...]) -> str:
            kind, adjacent, bit = at
            bits = f"bits {bit + 1} and {bit + 2}" if adjacent else f"bit {bit + 1}"
            return f"{bits} of exp(-size) of {(*_NEXT_NAMES, *_PREVIOUS_NAMES)[kind]}"

        own, neighbours, unequal = map(_judge_halves, (self._own_signs, self._neighbour_signs, self._unequal))
        description = "no sign is a bit of the uniform number behind its size"
        yield from select_worst_test(
            "signs and bits", description, own, lambda at: name_signed_bit(at).partition(" of the ")[0], is_primary=True
        )
        description = "no sign is a bit of the uniform number behind a neighbour's size"
        yield from select_worst_test("signs and neighbours' bits", description, neighbours, name_signed_bit)
        description = "neighbours' uniform numbers share no bit"
        compared = unequal[0][..., :_COMPARED], unequal[1][..., :_COMPARED]
        yield from select_worst_test(
            "shared bits",
            description,
            compared,
            lambda at: f"bit {at[2] + 1} of exp(-size), also of {_NEXT_NAMES[at[0]]}",
        )
        description = "bits of uniform numbers are fair and independent"
        yield from select_worst_test("pairs of bits", description, self._judge_pairs(), _name_pair)

    def _judge_pairs(self) -> StatisticsAndPValues:
        numbers = self._pairs[:, :1, :1]
        p_values = np.where(numbers > 0, compute_binomial_p_values((numbers - self._pairs) // 2, numbers, 0.5), np.nan)
        p_values[0][np.tril_indices(_PAIRED + 1)] = np.nan  # within a number, each pair once
        p_values[1:, 0], p_values[1:, :, 0] = np.nan, np.nan  # single bits are judged within a number
        return self._pairs / np.maximum(numbers, 1), p_values


def _name_pair(at: tuple[int, ...]) -> str:
    kind, first, second = at
    if not first:
        return f"bit {second} of exp(-size)"
    return f"bit {first} of exp(-size), and bit {second}" + (f" of {_NEXT_NAMES[kind - 1]}" if kind else "")


def _judge_halves(counts: IntArray) -> StatisticsAndPValues:
    """Test whether each of `counts (kinds, rows, 64)` is half of that in the last row; by bit of u, from the first one on."""
    ordered = counts[..., :_BITS][..., ::-1]
    unequal, all_of_them = ordered[:, :-1], ordered[:, -1:]
    p_values = np.where(all_of_them > 0, compute_binomial_p_values(unequal, all_of_them, 0.5), np.nan)
    return unequal / np.maximum(all_of_them, 1), p_values


@dataclass(frozen=True, slots=True)
class _Words:
    """Bits of u in words, of any shape.

    Attributes:
        bits: bit j of u in bit 63 - j.
        resolved: ones where bits are resolved.
        judged: ones in all bits of tested numbers.
        negative: ones in all bits of negative numbers.
    """

    bits: IntArray
    resolved: IntArray
    judged: IntArray
    negative: IntArray

    @classmethod
    def from_block(cls, block: Block, at: tuple[IntArray, ...]) -> Self:
        """Create the words of the numbers at an index of a block."""
        judged = block.lost_bits[at] <= _MAX_LOST_BITS
        u = np.where(judged, np.minimum(block.tail[at], _BELOW_ONE), 0.5)
        # u is at least 2^(exponent - 1023), so bits are resolved up to bit LATTICE_BITS + 1022 - exponent.
        exponent = u.view(np.int64) >> 52
        unresolved = np.clip(exponent + (_BITS - LATTICE_BITS - 1022), 0, _BITS)
        known, negative = -judged.astype(np.int64), -(block.values[at] < 0.0).astype(np.int64)
        return cls((u * 2.0**_BITS).astype(np.int64), known << unresolved, known, negative)

    def select(self, index: tuple[slice, ...]) -> _Words:
        """Select words by an index."""
        return _Words(self.bits[index], self.resolved[index], self.judged[index], self.negative[index])


def _count_unequal_signs(signs: _Words, bits: _Words) -> IntArray:
    """Count `(3, 64)`: numbers whose sign is unequal to a bit, or to a bit plus the next one; and all numbers."""
    resolved, unequal = bits.resolved & signs.judged, bits.bits ^ signs.negative
    return np.stack(
        [_count_ones(unequal & resolved), _count_ones((unequal ^ bits.bits << 1) & resolved), _count_ones(resolved)]
    )


def _count_unequal_bits(first: _Words, second: _Words) -> IntArray:
    """Count `(2, 64)`: neighbours with unequal bits, and all neighbours."""
    resolved = first.resolved & second.resolved
    return np.stack([_count_ones((first.bits ^ second.bits) & resolved), _count_ones(resolved)])


def _convert_bits_to_signs(words: _Words) -> Singles:
    """Convert the first bits, `(..., 40)`, to +1 (for 0) and -1; zeros for a number that is not tested."""
    bytes_ = words.bits[..., None].astype(">i8").view(np.uint8)[..., : (_PAIRED + 1) // 8]
    signs = np.unpackbits(bytes_, axis=-1).astype(np.float32)
    signs *= -2.0
    signs += 1.0
    if not words.judged.all():
        signs *= words.judged[..., None] != 0
    return signs


def _multiply_bits(first: Singles, second: Singles) -> IntArray:
    """Sum products as `Uniforms._pairs`; single precision is exact, because sums are below 2^24."""
    columns = [each.reshape(-1, _PAIRED + 1) for each in (first, second)]
    return (columns[0].T @ columns[1]).astype(np.int64)


def _count_ones(words: IntArray) -> IntArray:
    """Count, for each bit, the words in which it is one, `(64,)` from the lowest bit on.

    Three words at a time are added, all bits in parallel, as in a full adder: the sum, and a carry of twice the weight.
    """
    counts, weight, remaining = np.zeros(_WORD, np.int64), 1, words.reshape(-1)
    while remaining.size:
        carries = []
        while remaining.size > _MIN_PARALLEL_WORDS:
            third = remaining.size // 3
            one, two, three = remaining[:third], remaining[third : 2 * third], remaining[2 * third : 3 * third]
            total = one ^ two
            carries.append(one & two | total & three)
            total ^= three
            remaining = np.concatenate([total, remaining[3 * third :]])
        bits = np.unpackbits(remaining.astype("<i8", copy=False).view(np.uint8), bitorder="little")
        counts += weight * bits.reshape(-1, _WORD).sum(axis=0, dtype=np.int64)
        remaining, weight = np.concatenate([*carries, remaining[:0]]), 2 * weight
    return counts


def _index_first_numbers(block: Block) -> tuple[IntArray, ...]:
    """Index at most `_MAX_NUMBERS` numbers: the first ones along each axis, without the rounds that have no noise."""
    rounds = np.flatnonzero(np.isfinite(block.scale).any(axis=(0, 2)))
    lengths = [len(block.values), len(rounds), *block.values.shape[2:]]
    while math.prod(lengths) > _MAX_NUMBERS:
        longest = lengths.index(max(lengths))
        lengths[longest] = -(-lengths[longest] // 2)
    axes = [np.arange(length) for length in lengths]
    axes[1] = rounds[: lengths[1]]
    return np.ix_(*axes)
