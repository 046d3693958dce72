"""Mutants with wrong low bits."""

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


def _leave_lattice(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Replace noise by raw doubles, with the low bits of a continuous draw."""
    if request.spacing is None:
        return noise
    return noise + (state.generator.random(noise.shape) - 0.5) * request.spacing


def _coarsen(bits: int) -> NoiseMutation:
    """Round noise to a lattice whose spacing is 2^bits times the correct one."""
    return lambda noise, request, state: (
        noise if request.spacing is None else round_to_lattice(noise, 2.0**bits * request.spacing)
    )


def _shorten_mantissa(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, bits: int) -> FloatArray:
    """Round noise to this number of significant bits; float32 has 24, float16 has 11."""
    mantissa, exponent = np.frexp(noise)
    return request.round_to_lattice(np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits))


def _bias_bit(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, bit: int, ones: float) -> FloatArray:
    """Set one bit of the noise, counted in lattice spacings, with probability `ones`."""
    if request.spacing is None:
        return noise
    steps = np.rint(noise / request.spacing).astype(np.int64)
    raised = (steps >> bit & 1 == 0) & (state.generator.random(noise.shape) < 2.0 * ones - 1.0)
    changed: FloatArray = (steps + (raised.astype(np.int64) << bit)) * request.spacing
    return changed


def _draw_from_few_bits(bits: int) -> NoiseMutation:
    """Draw sizes as the logarithm of a uniform number of this many random bits: the right distribution, but few values."""

    def draw(noise: FloatArray, state: NoiseMutationState) -> FloatArray:
        words = state.generator.integers(0, 2**bits, noise.shape)
        drawn: FloatArray = np.copysign(-np.log((words + 0.5) * 2.0**-bits), noise)
        return drawn

    return apply_in_scale_units(draw)


def _draw_by_inversion(bit: int, others: int = 0, shared: int = 0) -> NoiseMutation:
    """Draw sizes as `-log((word + 1) / 2^53)` of random 53-bit words, and signs from a bit of a word.

    Args:
        bit: bit of the word that is the sign, counted from the lowest one.
        others: take the sign from the word of this many coordinates before.
        shared: draw signs separately, and let each second word share this many low bits with the one before it.
    """

    def draw(noise: FloatArray, state: NoiseMutationState) -> FloatArray:
        words = state.generator.integers(0, 2**_WORD_BITS, noise.shape)
        signs = 1.0 - 2.0 * (np.roll(words, others, axis=-1) >> bit & 1)
        if shared:
            signs, low = np.sign(noise), 2**shared - 1
            after = words[..., 1::2]
            words[..., 1::2] = after & ~low | words[..., : 2 * after.shape[-1] : 2] & low
        drawn: FloatArray = -signs * np.log((words + 1.0) * 2.0**-_WORD_BITS)
        return drawn

    return apply_in_scale_units(draw)


_WORD_BITS = 53
_lattice_mutant = make_noise_mutant_factory("lattice and low bits")


def _make_coarser(bits: int, share: float) -> Mutant:
    """Make a mutant with a coarser lattice in every value, or in a fraction of the messages."""
    name, description = f"lattice 2^{bits} coarser", "low bits of the noise are zero"
    if share == 1.0:
        limit = estimate_from_numbers(bits * math.log(2.0))
        return _lattice_mutant(name, description, _coarsen(bits), limit, noise_kind="lattice")
    rare = estimate_from_messages(compute_bernoulli_kl(share, 2.0 ** (-16 * bits)), share)  # a message has 16 values
    mutation = apply_randomly(_coarsen(bits), share, per_message=True)
    return _lattice_mutant(f"{name} in {100 * share:g} %", description, mutation, rare, noise_kind="lattice")


def _make_short_mantissa(name: str, bits: int, share: float) -> Mutant:
    """Make a mutant with few significant bits; a correct value of about 40 bits has so few with probability `2^(bits - 40)`."""
    mutation = apply_randomly(partial(_shorten_mantissa, bits=bits), share)
    name = name if share == 1.0 else f"{name} in {100 * share:g} %"
    limit = estimate_from_numbers(
        compute_bernoulli_kl(share if share < 1.0 else 1.0 - 2.0**-20, 2.0 ** (bits - 40)), share
    )
    return _lattice_mutant(name, f"noise of {bits} significant bits", mutation, limit, noise_kind="lattice")


def _estimate_sign_bit(bit: int) -> MinRunsEstimator:
    """Estimate ln 2 nats of every value that resolves the bit; sizes below `(12 - bit) ln 2` do not."""
    return estimate_from_numbers(math.log(2.0) * 2.0 ** min(0, bit - 12))


LATTICE_MUTANTS = (
    _lattice_mutant(
        "sign in the word of the size",
        "the sign is bit 8 of the 53 bits that its size comes from",
        _draw_by_inversion(8),
        _estimate_sign_bit(8),
        quick=True,
    ),
    _lattice_mutant(
        "sign in a low bit of the word of the size",
        "the sign is the last of the 53 bits that its size comes from",
        _draw_by_inversion(0),
        _estimate_sign_bit(0),
    ),
    _lattice_mutant(
        "sign in the word of another size",
        "the sign is bit 8 of the 53 bits that the size of the coordinate before comes from",
        _draw_by_inversion(8, others=1),
        _estimate_sign_bit(8),
    ),
    _lattice_mutant(
        "words that overlap",
        "the sizes of two coordinates share 20 of 53 bits",
        _draw_by_inversion(0, shared=20),
        estimate_from_numbers(10.0 * math.log(2.0)),
    ),
    _lattice_mutant(
        "raw doubles",
        "noise on no lattice",
        _leave_lattice,
        estimate_from_numbers(1e3),
        noise_kind="lattice",
        quick=True,
    ),
    *(_make_coarser(bits, share) for bits, share in ((16, 1.0), (1, 1.0), (8, 0.005), (1, 0.01), (1, 0.001))),
    _make_short_mantissa("float32", 24, 1.0),
    *(_make_short_mantissa("float32", 24, share) for share in (0.01, 0.0002)),
    _make_short_mantissa("float16", 11, 0.001),
    _make_short_mantissa("30 bits", 30, 0.03),
    *(
        _lattice_mutant(
            f"bit {bit} is one in {100 * ones:g} %",
            "a low bit that is not fair",
            partial(_bias_bit, bit=bit, ones=ones),
            estimate_from_numbers(compute_bernoulli_kl(ones, 0.5)),
            noise_kind="lattice",
        )
        for bit, ones in ((5, 0.6), (12, 0.51))
    ),
    *(
        _lattice_mutant(
            f"{bits} random bits",
            "a uniform number of few bits, through a logarithm",
            _draw_from_few_bits(bits),
            estimate_from_numbers((LATTICE_BITS - bits) * math.log(2.0)),
        )
        for bits in (16, 24, 32)
    ),
)
"""Mutants whose noise is on another lattice, or has other low bits."""
