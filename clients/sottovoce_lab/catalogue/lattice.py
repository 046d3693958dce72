"""Mutants whose low bits are not those of a fair draw."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import LATTICE_BITS, NoiseRequest, round_to_lattice
from sottovoce_lab.mutants import (
    MinRunsEstimator,
    Mutant,
    NoiseMutation,
    NoiseMutationState,
    apply_in_scale_units,
    apply_randomly,
    compute_bernoulli_kl,
    estimate_from_messages,
    estimate_from_numbers,
    make_noise_mutant_factory,
)


def _raw(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """Raw doubles: their low bits are those of a continuous draw, on no lattice."""
    return noise if draw.spacing is None else noise + (source.generator.random(noise.shape) - 0.5) * draw.spacing


def _coarser(bits: int) -> NoiseMutation:
    """On a lattice whose spacing is 2^bits times what it should be."""
    return lambda noise, draw, source: (
        noise if draw.spacing is None else round_to_lattice(noise, 2.0**bits * draw.spacing)
    )


def _mantissas(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, bits: int) -> FloatArray:
    """Numbers with so many significant bits; float32 has 24, float16 has 11."""
    mantissa, exponent = np.frexp(noise)
    return draw.round_to_lattice(np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits))


def _one_bit(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, bit: int, ones: float) -> FloatArray:
    """One bit of the noise, counted in lattice spacings, is not fair."""
    if draw.spacing is None:
        return noise
    steps = np.rint(noise / draw.spacing).astype(np.int64)
    raised = (steps >> bit & 1 == 0) & (source.generator.random(noise.shape) < 2.0 * ones - 1.0)
    changed: FloatArray = (steps + (raised.astype(np.int64) << bit)) * draw.spacing
    return changed


def _few_bits(bits: int) -> NoiseMutation:
    """A uniform number of so many random bits through a logarithm: the law is right, and it has few values."""

    def draw(noise: FloatArray, source: NoiseMutationState) -> FloatArray:
        words = source.generator.integers(0, 2**bits, noise.shape)
        drawn: FloatArray = np.copysign(-np.log((words + 0.5) * 2.0**-bits), noise)
        return drawn

    return apply_in_scale_units(draw)


def _inverted(bit: int, others: int = 0, shared: int = 0) -> NoiseMutation:
    """Sizes are `-log((word + 1) / 2^53)`, of random words of 53 bits, and signs are a bit of a word.

    Args:
        bit: of the word, from the lowest one on.
        others: signs are a bit of the word of so many coordinates before.
        shared: signs are drawn apart, and each second number has so many low bits of the one before it.
    """

    def draw(noise: FloatArray, source: NoiseMutationState) -> FloatArray:
        words = source.generator.integers(0, 2**_WORD_BITS, noise.shape)
        signs = 1.0 - 2.0 * (np.roll(words, others, axis=-1) >> bit & 1)
        if shared:
            signs, low = np.sign(noise), 2**shared - 1
            after = words[..., 1::2]
            words[..., 1::2] = after & ~low | words[..., : 2 * after.shape[-1] : 2] & low
        drawn: FloatArray = -signs * np.log((words + 1.0) * 2.0**-_WORD_BITS)
        return drawn

    return apply_in_scale_units(draw)


_WORD_BITS = 53
_lattice = make_noise_mutant_factory("lattice and low bits")


def _of_coarser(bits: int, share: float) -> Mutant:
    """In every number, or in a share of the messages."""
    name, what = f"lattice 2^{bits} coarser", "low bits of the noise are zero"
    if share == 1.0:
        return _lattice(name, what, _coarser(bits), estimate_from_numbers(bits * math.log(2.0)), on="lattice")
    rare = estimate_from_messages(compute_bernoulli_kl(share, 2.0 ** (-16 * bits)), share)  # of 16 numbers
    change = apply_randomly(_coarser(bits), share, per_message=True)
    return _lattice(f"{name} in {100 * share:g} %", what, change, rare, on="lattice")


def _of_mantissas(name: str, bits: int, share: float) -> Mutant:
    """A number of about 40 bits has so few with probability `2^(bits - 40)`."""
    change = apply_randomly(partial(_mantissas, bits=bits), share)
    name = name if share == 1.0 else f"{name} in {100 * share:g} %"
    limit = estimate_from_numbers(
        compute_bernoulli_kl(share if share < 1.0 else 1.0 - 2.0**-20, 2.0 ** (bits - 40)), share
    )
    return _lattice(name, f"noise of {bits} significant bits", change, limit, on="lattice")


def _of_sign(bit: int) -> MinRunsEstimator:
    """Every number that resolves the bit has ln 2 nats; those with sizes of fewer than `(12 - bit) ln 2` do not."""
    return estimate_from_numbers(math.log(2.0) * 2.0 ** min(0, bit - 12))


LATTICE_MUTANTS = (
    _lattice(
        "sign in the word of the size",
        "the sign is bit 8 of the 53 bits that its size comes from",
        _inverted(8),
        _of_sign(8),
        quick=True,
    ),
    _lattice(
        "sign in a low bit of the word of the size",
        "the sign is the last of the 53 bits that its size comes from",
        _inverted(0),
        _of_sign(0),
    ),
    _lattice(
        "sign in the word of another size",
        "the sign is bit 8 of the 53 bits that the size of the coordinate before comes from",
        _inverted(8, others=1),
        _of_sign(8),
    ),
    _lattice(
        "words that overlap",
        "the sizes of two coordinates share 20 of 53 bits",
        _inverted(0, shared=20),
        estimate_from_numbers(10.0 * math.log(2.0)),
    ),
    _lattice("raw doubles", "noise on no lattice", _raw, estimate_from_numbers(1e3), on="lattice", quick=True),
    *(_of_coarser(bits, share) for bits, share in ((16, 1.0), (1, 1.0), (8, 0.005), (1, 0.01), (1, 0.001))),
    _of_mantissas("float32", 24, 1.0),
    *(_of_mantissas("float32", 24, share) for share in (0.01, 0.0002)),
    _of_mantissas("float16", 11, 0.001),
    _of_mantissas("30 bits", 30, 0.03),
    *(
        _lattice(
            f"bit {bit} is one in {100 * ones:g} %",
            "a low bit that is not fair",
            partial(_one_bit, bit=bit, ones=ones),
            estimate_from_numbers(compute_bernoulli_kl(ones, 0.5)),
            on="lattice",
        )
        for bit, ones in ((5, 0.6), (12, 0.51))
    ),
    *(
        _lattice(
            f"{bits} random bits",
            "a uniform number of few bits, through a logarithm",
            _few_bits(bits),
            estimate_from_numbers((LATTICE_BITS - bits) * math.log(2.0)),
        )
        for bits in (16, 24, 32)
    ),
)
"""Noise on another lattice, or with other low bits."""
