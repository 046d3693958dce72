"""Mutants whose low bits are not those of a fair draw."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.random import Generator

from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import GRID_BITS, Draw, on_grid
from sottovoce_lab.mutants import (
    Change,
    Limit,
    Mutant,
    each_message,
    each_number,
    event,
    faults,
    in_scales,
    laplace_only,
    lattice_only,
    noisy,
    sometimes,
    unaided,
)

# ---- lattice ---------------------------------------------------------------------------------------------------------


def _raw(generator: Generator) -> Change:
    """Raw doubles: their low bits are those of a continuous draw, on no lattice."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        return noise if draw.grid is None else noise + (generator.random(noise.shape) - 0.5) * draw.grid

    return change


def _coarser(bits: int) -> Change:
    """On a lattice whose spacing is 2^bits times what it should be."""
    return lambda noise, draw: noise if draw.grid is None else on_grid(noise, 2.0**bits * draw.grid)


def _mantissas(bits: int) -> Change:
    """Numbers with so many significant bits; float32 has 24, float16 has 11."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        mantissa, exponent = np.frexp(noise)
        return draw.rounded(np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits))

    return change


def _one_bit(generator: Generator, bit: int, ones: float) -> Change:
    """One bit of the noise, counted in lattice spacings, is not fair."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        if draw.grid is None:
            return noise
        steps = np.rint(noise / draw.grid).astype(np.int64)
        raised = (steps >> bit & 1 == 0) & (generator.random(noise.shape) < 2.0 * ones - 1.0)
        changed: FloatArray = (steps + (raised.astype(np.int64) << bit)) * draw.grid
        return changed

    return change


def _few_bits(generator: Generator, bits: int) -> Change:
    """A uniform number of so many random bits through a logarithm: the law is right, and it has few values."""

    def sizes(noise: FloatArray) -> FloatArray:
        drawn: FloatArray = -np.log((generator.integers(0, 2**bits, noise.shape) + 0.5) * 2.0**-bits)
        return drawn

    return in_scales(lambda noise: np.copysign(sizes(noise), noise))


def _inverted(generator: Generator, bit: int, others: int = 0, shared: int = 0) -> Change:
    """Sizes are `-log((word + 1) / 2^53)`, of random words of 53 bits, and signs are a bit of a word.

    Args:
        generator: draws the words.
        bit: of the word, from the lowest one on.
        others: signs are a bit of the word of so many coordinates before.
        shared: signs are drawn apart, and each second number has so many low bits of the one before it.
    """

    def draw(noise: FloatArray) -> FloatArray:
        words = generator.integers(0, 2**_WORD_BITS, noise.shape)
        signs = 1.0 - 2.0 * (np.roll(words, others, axis=-1) >> bit & 1)
        if shared:
            signs, low = np.sign(noise), 2**shared - 1
            after = words[..., 1::2]
            words[..., 1::2] = after & ~low | words[..., : 2 * after.shape[-1] : 2] & low
        drawn: FloatArray = -signs * np.log((words + 1.0) * 2.0**-_WORD_BITS)
        return drawn

    return in_scales(draw)


_WORD_BITS = 53
_lattice = faults("lattice and low bits")


def _of_coarser(bits: int, share: float) -> Mutant:
    """In every number, or in a share of the messages."""
    name, what = f"lattice 2^{bits} coarser", "low bits of the noise are zero"
    if share == 1.0:
        return _lattice(name, what, lattice_only(unaided(partial(_coarser, bits))), each_number(bits * math.log(2.0)))
    breaks = noisy(lambda generator: sometimes(_coarser(bits), share, generator, messages=True))
    rare = event(share, 2.0 ** (-16 * bits))  # of 16 numbers
    return _lattice(f"{name} in {100 * share:g} %", what, lattice_only(breaks), each_message(rare, share))


def _of_mantissas(name: str, bits: int, share: float) -> Mutant:
    """A number of about 40 bits has so few with probability `2^(bits - 40)`."""
    breaks = noisy(lambda generator: sometimes(_mantissas(bits), share, generator))
    name = name if share == 1.0 else f"{name} in {100 * share:g} %"
    limit = each_number(event(share if share < 1.0 else 1.0 - 2.0**-20, 2.0 ** (bits - 40)), share)
    return _lattice(name, f"noise of {bits} significant bits", lattice_only(breaks), limit)


def _of_sign(bit: int) -> Limit:
    """Every number that resolves the bit has ln 2 nats; those with sizes of fewer than `(12 - bit) ln 2` do not."""
    return each_number(math.log(2.0) * 2.0 ** min(0, bit - 12))


LATTICE = (
    _lattice(
        "sign in the word of the size",
        "the sign is bit 8 of the 53 bits that its size comes from",
        laplace_only(noisy(partial(_inverted, bit=8))),
        _of_sign(8),
        quick=True,
    ),
    _lattice(
        "sign in a low bit of the word of the size",
        "the sign is the last of the 53 bits that its size comes from",
        laplace_only(noisy(partial(_inverted, bit=0))),
        _of_sign(0),
    ),
    _lattice(
        "sign in the word of another size",
        "the sign is bit 8 of the 53 bits that the size of the coordinate before comes from",
        laplace_only(noisy(partial(_inverted, bit=8, others=1))),
        _of_sign(8),
    ),
    _lattice(
        "words that overlap",
        "the sizes of two coordinates share 20 of 53 bits",
        laplace_only(noisy(partial(_inverted, bit=0, shared=20))),
        each_number(10.0 * math.log(2.0)),
    ),
    _lattice("raw doubles", "noise on no lattice", lattice_only(noisy(_raw)), each_number(1e3), quick=True),
    *(_of_coarser(bits, share) for bits, share in ((16, 1.0), (1, 1.0), (8, 0.005), (1, 0.01), (1, 0.001))),
    _of_mantissas("float32", 24, 1.0),
    *(_of_mantissas("float32", 24, share) for share in (0.01, 0.0002)),
    _of_mantissas("float16", 11, 0.001),
    _of_mantissas("30 bits", 30, 0.03),
    *(
        _lattice(
            f"bit {bit} is one in {100 * ones:g} %",
            "a low bit that is not fair",
            lattice_only(noisy(partial(_one_bit, bit=bit, ones=ones))),
            each_number(event(ones, 0.5)),
        )
        for bit, ones in ((5, 0.6), (12, 0.51))
    ),
    *(
        _lattice(
            f"{bits} random bits",
            "a uniform number of few bits, through a logarithm",
            laplace_only(noisy(partial(_few_bits, bits=bits))),
            each_number((GRID_BITS - bits) * math.log(2.0)),
        )
        for bits in (16, 24, 32)
    ),
)
"""Noise on another lattice, or with other low bits."""
