"""Mutants whose noise has another scale, another shape or another support."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.noise import NoiseRequest
from sottovoce_lab.mutants import (
    Fault,
    Mutant,
    NoiseMutation,
    NoiseMutationState,
    apply_in_scale_units,
    apply_randomly,
    compute_bernoulli_kl,
    compute_scale_kl,
    estimate_from_messages,
    estimate_from_numbers,
    make_mutant_factory,
    make_noise_mutant_factory,
    mutate_algorithm,
    mutate_noise,
    restrict_fault,
    scale_noise,
    scale_on_lattice,
)

# ---- scale -----------------------------------------------------------------------------------------------------------


def _one_learner(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """The first learner's scale is another one."""
    factors = np.ones((len(noise), *(1 for _ in noise.shape[1:])))
    factors[0] = 0.95
    return scale_on_lattice(noise, factors, draw)


def _by_run(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, spread: float) -> FloatArray:
    """Every run has a scale of its own, equally often too large and too small by as much."""
    replicas = noise.shape[-2]
    if replicas not in source.memory:
        source.memory[replicas] = 1.0 + spread * source.generator.choice((-1.0, 1.0), (replicas, 1))
    return scale_on_lattice(noise, source.memory[replicas], draw)


_twice_zeta = restrict_fault(
    mutate_algorithm(lambda dvp: replace(dvp, calibration=replace(dvp.calibration, scale_rule="printed"))),
    lambda plan: plan.run.spec.algorithm.name == "dvp",
    "only dvp has a rate of alpha_hat",
)

_scale = partial(make_noise_mutant_factory("scale"), on="any")


def _of_scale(factor: float, name: str, what: str = "", *, quick: bool = False) -> Mutant:
    what = what or f"noise of {factor:g} of its scale"
    return _scale(name, what, scale_noise(factor), estimate_from_numbers(compute_scale_kl(factor)), quick=quick)


SCALE_MUTANTS = (
    _of_scale(0.5, "half the noise", "noise of half its scale", quick=True),
    _of_scale(0.9, "0.9 of the scale", quick=True),
    *(_of_scale(factor, f"{factor:g} of the scale") for factor in (1.1, 0.97, 0.99, 0.997)),
    _scale("one learner at 0.95", "0.95 of its scale, one learner", _one_learner),
    *(
        _scale(f"runs vary by {100 * spread:g} %", "runs of another scale", partial(_by_run, spread=spread))
        for spread in (0.2, 0.05)
    ),
    make_mutant_factory("scale")(
        "dvp, twice zeta",
        "zeta is alpha_hat: half the noise",
        _twice_zeta,
        family="likelihood",
        runs=4000,
        base="dvp",
        quick=True,
    ),
)
"""Noise of another scale."""


# ---- shape -----------------------------------------------------------------------------------------------------------


def _gaussian(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """Gaussian noise of the same variance."""
    spherical = draw.distribution == "spherical"
    # Of a coordinate.
    size, variance = (1.0 / draw.scale, noise.shape[-1] + 1.0) if spherical else (draw.scale, 2.0)
    return draw.round_to_lattice(source.generator.standard_normal(noise.shape) * np.sqrt(variance) * size)


def _skewed(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, positive: float) -> FloatArray:
    """Too many numbers are positive."""
    share = 2.0 * positive - 1.0  # of what would be negative half the time
    return np.where(source.generator.random(noise.shape) < share, np.abs(noise), noise)


def _shaped(density: Callable[[FloatArray], FloatArray]) -> float:
    """Nats of a number with this density of its size, in scales, where `exp(-x)` is claimed; a sum over a fine grid."""
    sizes = np.linspace(0.0, 60.0, 600_001)
    its = density(sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(its > 0.0, its * (np.log(its) + sizes), 0.0)
    return float(np.trapezoid(terms, sizes))


def _normal(sizes: FloatArray) -> FloatArray:
    density: FloatArray = np.exp(-(sizes**2) / 4.0) / math.sqrt(math.pi)
    return density


_LOGISTIC = 0.5 / math.log(2.0)
"""Scale of the logistic law whose mean size is 1."""
_shape = make_noise_mutant_factory("tails and shape")


def _of_gaussian(share: float) -> Mutant:
    what = f"{100 * share:g} % of the numbers are Gaussian"
    nats = _shaped(lambda sizes: share * _normal(sizes) + (1.0 - share) * np.exp(-sizes))
    return _shape(f"Gaussian in {100 * share:g} %", what, apply_randomly(_gaussian, share), estimate_from_numbers(nats))


SHAPE_MUTANTS = (
    _shape(
        "Gaussian",
        "Gaussian noise, equal variance",
        _gaussian,
        estimate_from_numbers(_shaped(_normal)),
        on="any",
        quick=True,
    ),
    *map(_of_gaussian, (0.5, 0.2, 0.1)),
    _shape(
        "logistic",
        "logistic noise, equal mean size",
        apply_in_scale_units(lambda noise, source: source.generator.logistic(0.0, _LOGISTIC, noise.shape)),
        estimate_from_numbers(_shaped(lambda sizes: 0.5 / _LOGISTIC / np.cosh(sizes / (2.0 * _LOGISTIC)) ** 2)),
    ),
    _shape(
        "uniform",
        "uniform noise, equal mean size",
        apply_in_scale_units(lambda noise, source: source.generator.uniform(-2.0, 2.0, noise.shape)),
        estimate_from_numbers(_shaped(lambda sizes: np.where(sizes < 2.0, 0.5, 0.0))),
    ),
    *(
        _shape(
            f"{100 * positive:g} % positive",
            "signs are not fair",
            partial(_skewed, positive=positive),
            estimate_from_numbers(compute_bernoulli_kl(positive, 0.5)),
        )
        for positive in (0.6, 0.51)
    ),
    _shape(
        "centred at 0.02",
        "noise with a mean of 0.02 scales",
        apply_in_scale_units(lambda noise, source: noise + 0.02),
        estimate_from_numbers(math.exp(-0.02) - 1.0 + 0.02),
    ),
)
"""Noise of the right size and another law."""


# ---- support ---------------------------------------------------------------------------------------------------------


def _first_only(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """The first message that should carry noise does, the later ones do not."""
    return noise if source.memory.setdefault(draw.field, draw.round) == draw.round else np.zeros_like(noise)


def _without_a_round(plan: AuditPlan) -> Fault:
    """No noise in the last of the rounds that a black box would look at."""
    skipped = int(plan.adversary.visible_rounds[-1])
    return mutate_noise(lambda noise, draw, source: np.zeros_like(noise) if draw.round == skipped else noise)(plan)


def _but_the_last(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """No noise on the last coordinate."""
    noise = noise.copy()
    noise[..., -1] = 0.0
    return noise


def _within(most: float) -> NoiseMutation:
    """Laplace noise, given that it is not beyond so many scales."""
    return apply_in_scale_units(
        lambda noise, source: np.copysign(-np.log1p(-np.expm1(-np.abs(noise)) * np.expm1(-most)), noise)
    )


def _clipped(most: float) -> NoiseMutation:
    """What is beyond so many scales is said to be as many."""
    return apply_in_scale_units(lambda noise, source: np.clip(noise, -most, most))


def _biased(
    noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, extra: float = 0.015, near: float = 0.1
) -> FloatArray:
    """A sampler with too much mass near zero, by `extra`, within `near` scales."""
    share = extra * np.exp(near)  # as much of what is moved would have been near anyway
    moved = draw.round_to_lattice(source.generator.uniform(-near, near, noise.shape) * draw.scale)
    return np.where(source.generator.random(noise.shape) < share, moved, noise)


_support = make_noise_mutant_factory("support and atoms")
_ATOM = 2.0**-41
"""About the probability of a single number."""


def _of_zeros(share: float, *, messages: bool) -> Mutant:
    kind, each = ("messages", estimate_from_messages) if messages else ("numbers", estimate_from_numbers)
    left_out = apply_randomly(lambda noise, draw, source: np.zeros_like(noise), share, per_message=messages)
    name = f"{100 * share:g} % of {kind} without noise"
    return _support(name, "noise is left out at random", left_out, each(compute_bernoulli_kl(share, _ATOM), share))


SUPPORT_MUTANTS = (
    _support("first only", "noise on the first message alone", _first_only, on="any", quick=True),
    make_mutant_factory("support and atoms")("a round left out", "no noise in one round", _without_a_round, quick=True),
    _support("a coordinate left out", "no noise on the last coordinate", _but_the_last, on="any", quick=True),
    _support(
        "biased sampler",
        "1.5 % too much mass near zero",
        _biased,
        estimate_from_numbers(compute_bernoulli_kl(0.015 - math.expm1(-0.1), -math.expm1(-0.1))),
        on="lattice",
        quick=True,
        base="ldp-dol, 60,000 numbers",
    ),
    _of_zeros(0.001, messages=True),
    _of_zeros(0.001, messages=False),
    _of_zeros(0.0001, messages=False),
    *(
        _support(
            f"none beyond {most:g} scales",
            "noise is bounded",
            _within(most),
            estimate_from_numbers(-math.log(-math.expm1(-most))),
        )
        for most in (4.0, 7.5, 10.0)
    ),
    *(
        _support(
            f"clipped at {most:g} scales",
            "what is beyond is said to be as much",
            _clipped(most),
            estimate_from_numbers(compute_bernoulli_kl(math.exp(-most), _ATOM), math.exp(-most)),
        )
        for most in (6.0, 10.0)
    ),
    _support(
        "none within 0.01 scales",
        "no small noise",
        apply_in_scale_units(lambda noise, source: np.copysign(np.abs(noise) + 0.01, noise)),
        estimate_from_numbers(0.01),
    ),
)
"""Noise that is missing, bounded, or too often the same number."""
