"""Tests of the bits of the uniform numbers behind the noise: against signs, against each other, and against those of neighbours.

`u = exp(-size)` is uniform in (0, 1]. A sampler that inverts its law computes the size from a random word, and u has the bits of
that word, or of its complement. A sign that is a bit of the same word, or of the word of a neighbouring number, makes some
outputs impossible (Doornik 2005 found this flaw in generators of normal numbers); so do two sizes that share bits.

Bit j of u has the value `2^-j`. The lattice determines u to about `2^-40 u`, so bit 40 + k is resolved in small u only: in one
number of 2^k. Tests of signs hold whatever a lattice resolves: given its size, a correct number has either sign with the same
probability. Spherical noise is on no lattice, and is not judged.
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
"""Bits of u in a word of 64 bits, whose highest bit is 0: bit j of u is bit 63 - j of the word."""

_PAIRED = 39
"""First bits of u that are compared in pairs: resolved in every judged number. With the 0 in front they are five bytes."""

_COMPARED = 50
"""First bits of u that are compared with the same bit of a neighbour: the words of correct samplers may have 53 bits."""

_MAX_NUMBERS = 2**16
"""Maximum count of numbers of a block that are judged whatever their size: a bit that another one decides shows in a hundred."""

_MAX_SMALL_UNIFORM = 2.0**-6
"""Own signs of smaller u are judged in all of a block: they resolve bits that most numbers do not."""

_MAX_LOST_BITS = 1
"""Maximum count of unresolved low bits of a judged number."""

_BELOW_ONE = float(np.nextafter(1.0, 0.0))

_MIN_PARALLEL_WORDS = 96
"""Minimum count of words whose bits are added in parallel."""

Singles = npt.NDArray[np.float32]

_NEIGHBOURS = (("coordinate", 3), ("round", 1), ("learner", 0))
"""Kinds of neighbouring numbers, and the axis of a block along which their distance is one."""

_NEXT_ONES = tuple(f"the next {kind}" for kind, _ in _NEIGHBOURS)
_PREVIOUS_ONES = tuple(f"the previous {kind}" for kind, _ in _NEIGHBOURS)


class Uniforms(ConformanceTest):
    """Tests of the bits of the uniform numbers behind the noise.

    Signs are compared with each bit, and with the sum modulo two of each two adjacent bits: if words are multiples of `2^-b`, u
    lies where its bit b changes, and may be rounded to either side; the sum of bits b and b + 1 is resolved.
    """

    part: ClassVar[BudgetPart] = "dependence"
    additive_names: ClassVar[tuple[str, ...]] = ("_own_signs", "_neighbours_signs", "_unequal", "_pairs")

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        # All but `_pairs` by bit of a word, from the lowest one on.
        self._own_signs = np.zeros((2, 3, _WORD), np.int64)
        """Of small u, and of the first numbers: those whose sign is unequal to a bit, or to a bit plus the next one; and all."""
        self._neighbours_signs = np.zeros((2 * len(_NEIGHBOURS), 3, _WORD), np.int64)
        """The same of the first numbers, where bits are those of a neighbour."""
        self._unequal = np.zeros((len(_NEIGHBOURS), 2, _WORD), np.int64)
        """Pairs of neighbours whose bits are unequal, and all pairs."""
        self._pairs = np.zeros((1 + len(_NEIGHBOURS), _PAIRED + 1, _PAIRED + 1), np.int64)
        """Sums of products of two bits, each +1 or -1; the 0 in front of all others is always +1."""

    def add(self, block: Block) -> None:
        if not (block.lost_bits <= _MAX_LOST_BITS).any():
            return
        small = _Words.of(block, np.nonzero(block.tail < _MAX_SMALL_UNIFORM))
        self._own_signs[0] += _unequal_signs(small, small)
        words = _Words.of(block, _first_numbers(block))
        self._own_signs[1] += _unequal_signs(words, words)
        bits = _signs_of_bits(words)
        self._pairs[0] += _products(bits, bits)
        for k, (_, axis) in enumerate(_NEIGHBOURS):
            ends = [(*(slice(None),) * axis, part) for part in (slice(None, -1), slice(1, None))]
            first, second = map(words.at, ends)
            self._neighbours_signs[k] += _unequal_signs(first, second)
            self._neighbours_signs[k + len(_NEIGHBOURS)] += _unequal_signs(second, first)
            self._unequal[k] += _unequal_bits(first, second)
            self._pairs[k + 1] += _products(*(bits[end] for end in ends))

    def _every(self) -> Iterator[Test]:
        """Worst bit of each kind, and worst pair of bits."""

        def signed_bit(at: tuple[int, ...]) -> str:
            kind, adjacent, bit = at
            bits = f"bits {bit + 1} and {bit + 2}" if adjacent else f"bit {bit + 1}"
            return f"{bits} of exp(-size) of {(*_NEXT_ONES, *_PREVIOUS_ONES)[kind]}"

        own, neighbours, unequal = map(_halves, (self._own_signs, self._neighbours_signs, self._unequal))
        what = "no sign is a bit of the uniform number behind its size"
        yield from select_worst_test(
            "signs and bits", what, own, lambda at: signed_bit(at).partition(" of the ")[0], is_primary=True
        )
        what = "no sign is a bit of the uniform number behind a neighbour's size"
        yield from select_worst_test("signs and neighbours' bits", what, neighbours, signed_bit)
        what = "neighbours' uniform numbers share no bit"
        compared = unequal[0][..., :_COMPARED], unequal[1][..., :_COMPARED]
        yield from select_worst_test(
            "shared bits", what, compared, lambda at: f"bit {at[2] + 1} of exp(-size), also of {_NEXT_ONES[at[0]]}"
        )
        what = "bits of uniform numbers are fair and independent"
        yield from select_worst_test("pairs of bits", what, self._judged_pairs(), _pair)

    def _judged_pairs(self) -> StatisticsAndPValues:
        numbers = self._pairs[:, :1, :1]
        p_values = np.where(numbers > 0, compute_binomial_p_values((numbers - self._pairs) // 2, numbers, 0.5), np.nan)
        p_values[0][np.tril_indices(_PAIRED + 1)] = np.nan  # within a number, each pair once
        p_values[1:, 0], p_values[1:, :, 0] = np.nan, np.nan  # single bits are judged within a number
        return self._pairs / np.maximum(numbers, 1), p_values


def _pair(at: tuple[int, ...]) -> str:
    kind, first, second = at
    if not first:
        return f"bit {second} of exp(-size)"
    return f"bit {first} of exp(-size), and bit {second}" + (f" of {_NEXT_ONES[kind - 1]}" if kind else "")


def _halves(counts: IntArray) -> StatisticsAndPValues:
    """Each of `counts (kinds, rows, 64)` is half of that in the last row; by bit of u, from the first one on."""
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
        judged: ones in all bits of judged numbers.
        negative: ones in all bits of negative numbers.
    """

    bits: IntArray
    resolved: IntArray
    judged: IntArray
    negative: IntArray

    @classmethod
    def of(cls, block: Block, at: tuple[IntArray, ...]) -> Self:
        """Of the numbers at an index of a block."""
        judged = block.lost_bits[at] <= _MAX_LOST_BITS
        u = np.where(judged, np.minimum(block.tail[at], _BELOW_ONE), 0.5)
        # u is at least 2^(exponent - 1023), so bits are resolved up to bit LATTICE_BITS + 1022 - exponent.
        exponent = u.view(np.int64) >> 52
        unresolved = np.clip(exponent + (_BITS - LATTICE_BITS - 1022), 0, _BITS)
        known, negative = -judged.astype(np.int64), -(block.values[at] < 0.0).astype(np.int64)
        return cls((u * 2.0**_BITS).astype(np.int64), known << unresolved, known, negative)

    def at(self, index: tuple[slice, ...]) -> _Words:
        """Those at an index."""
        return _Words(self.bits[index], self.resolved[index], self.judged[index], self.negative[index])


def _unequal_signs(signs: _Words, bits: _Words) -> IntArray:
    """`(3, 64)`: numbers whose sign is unequal to a bit, or to a bit plus the next one; and all numbers."""
    resolved, unequal = bits.resolved & signs.judged, bits.bits ^ signs.negative
    return np.stack([_ones(unequal & resolved), _ones((unequal ^ bits.bits << 1) & resolved), _ones(resolved)])


def _unequal_bits(first: _Words, second: _Words) -> IntArray:
    """`(2, 64)`: neighbours whose bits are unequal, and all neighbours."""
    resolved = first.resolved & second.resolved
    return np.stack([_ones((first.bits ^ second.bits) & resolved), _ones(resolved)])


def _signs_of_bits(words: _Words) -> Singles:
    """`(..., 40)` the first bits as +1 (of 0) and -1; zeros for a number that is not judged."""
    bytes_ = words.bits[..., None].astype(">i8").view(np.uint8)[..., : (_PAIRED + 1) // 8]
    signs = np.unpackbits(bytes_, axis=-1).astype(np.float32)
    signs *= -2.0
    signs += 1.0
    if not words.judged.all():
        signs *= words.judged[..., None] != 0
    return signs


def _products(first: Singles, second: Singles) -> IntArray:
    """Sums of products as `Uniforms._pairs`; single precision holds them, for they are below 2^24."""
    columns = [each.reshape(-1, _PAIRED + 1) for each in (first, second)]
    return (columns[0].T @ columns[1]).astype(np.int64)


def _ones(words: IntArray) -> IntArray:
    """`(64,)` counts of words in which a bit is one, from the lowest bit on.

    Three words at a time are added, all bits in parallel, as a full adder does: the sum, and a carry of twice the weight.
    """
    found, weight, left = np.zeros(_WORD, np.int64), 1, words.reshape(-1)
    while left.size:
        carries = []
        while left.size > _MIN_PARALLEL_WORDS:
            third = left.size // 3
            one, two, three = left[:third], left[third : 2 * third], left[2 * third : 3 * third]
            total = one ^ two
            carries.append(one & two | total & three)
            total ^= three
            left = np.concatenate([total, left[3 * third :]])
        bits = np.unpackbits(left.astype("<i8", copy=False).view(np.uint8), bitorder="little")
        found += weight * bits.reshape(-1, _WORD).sum(axis=0, dtype=np.int64)
        left, weight = np.concatenate([*carries, left[:0]]), 2 * weight
    return found


def _first_numbers(block: Block) -> tuple[IntArray, ...]:
    """An index of at most `_MAX_NUMBERS` numbers: the first ones along each axis, without the rounds that have no noise."""
    rounds = np.flatnonzero(np.isfinite(block.scale).any(axis=(0, 2)))
    lengths = [len(block.values), len(rounds), *block.values.shape[2:]]
    while math.prod(lengths) > _MAX_NUMBERS:
        longest = lengths.index(max(lengths))
        lengths[longest] = -(-lengths[longest] // 2)
    axes = [np.arange(length) for length in lengths]
    axes[1] = rounds[: lengths[1]]
    return np.ix_(*axes)
