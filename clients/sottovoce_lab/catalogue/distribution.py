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


def _scale_one_learner(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Scale the noise of the first learner by 0.95."""
    factors = np.ones((len(noise), *(1 for _ in noise.shape[1:])))
    factors[0] = 0.95
    return scale_on_lattice(noise, factors, request)


def _scale_by_run(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, spread: float) -> FloatArray:
    """Scale the noise of every run by `1 + spread` or `1 - spread`, with equal probability."""
    replicas = noise.shape[-2]
    if replicas not in state.memory:
        state.memory[replicas] = 1.0 + spread * state.generator.choice((-1.0, 1.0), (replicas, 1))
    return scale_on_lattice(noise, state.memory[replicas], request)


_twice_zeta = restrict_fault(
    mutate_algorithm(lambda dvp: replace(dvp, calibration=replace(dvp.calibration, scale_rule="printed"))),
    lambda plan: plan.run.spec.algorithm.name == "dvp",
    "the algorithm must be dvp: only it has a rate alpha_hat",
)

_scale_mutant = partial(make_noise_mutant_factory("scale"), noise_kind="any")


def _make_scaled_mutant(factor: float, name: str, description: str = "", *, quick: bool = False) -> Mutant:
    description = description or f"noise of {factor:g} of its scale"
    limit = estimate_from_numbers(compute_scale_kl(factor))
    return _scale_mutant(name, description, scale_noise(factor), limit, quick=quick)


SCALE_MUTANTS = (
    _make_scaled_mutant(0.5, "half the noise", "noise of half its scale", quick=True),
    _make_scaled_mutant(0.9, "0.9 of the scale", quick=True),
    *(_make_scaled_mutant(factor, f"{factor:g} of the scale") for factor in (1.1, 0.97, 0.99, 0.997)),
    _scale_mutant("one learner at 0.95", "0.95 of its scale, one learner", _scale_one_learner),
    *(
        _scale_mutant(
            f"runs vary by {100 * spread:g} %", "runs of another scale", partial(_scale_by_run, spread=spread)
        )
        for spread in (0.2, 0.05)
    ),
    make_mutant_factory("scale")(
        "dvp, twice zeta",
        "zeta is alpha_hat: half the noise",
        _twice_zeta,
        family="likelihood",
        max_runs=4000,
        base="dvp",
        quick=True,
    ),
)
"""Mutants whose noise has the wrong scale."""


# ---- shape -----------------------------------------------------------------------------------------------------------


def _draw_gaussian(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Replace noise by Gaussian noise of the same variance."""
    spherical = request.distribution == "spherical"
    # Size and variance of a coordinate.
    size, variance = (1.0 / request.scale, noise.shape[-1] + 1.0) if spherical else (request.scale, 2.0)
    return request.round_to_lattice(state.generator.standard_normal(noise.shape) * np.sqrt(variance) * size)


def _skew_signs(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, positive: float) -> FloatArray:
    """Make a fraction `positive` of the values positive."""
    share = 2.0 * positive - 1.0  # half of the chosen values would be negative
    return np.where(state.generator.random(noise.shape) < share, np.abs(noise), noise)


def _compute_shape_kl(density: Callable[[FloatArray], FloatArray]) -> float:
    """Integrate the KL divergence in nats of a size with this density, in scales, from the claimed `exp(-x)`, on a grid."""
    sizes = np.linspace(0.0, 60.0, 600_001)
    actual = density(sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(actual > 0.0, actual * (np.log(actual) + sizes), 0.0)
    return float(np.trapezoid(terms, sizes))


def _normal_density(sizes: FloatArray) -> FloatArray:
    density: FloatArray = np.exp(-(sizes**2) / 4.0) / math.sqrt(math.pi)
    return density


_LOGISTIC = 0.5 / math.log(2.0)
"""Scale of the logistic distribution whose mean size is 1."""
_shape_mutant = make_noise_mutant_factory("tails and shape")


def _make_gaussian(share: float) -> Mutant:
    description = f"{100 * share:g} % of the numbers are Gaussian"
    nats = _compute_shape_kl(lambda sizes: share * _normal_density(sizes) + (1.0 - share) * np.exp(-sizes))
    mutation = apply_randomly(_draw_gaussian, share)
    return _shape_mutant(f"Gaussian in {100 * share:g} %", description, mutation, estimate_from_numbers(nats))


SHAPE_MUTANTS = (
    _shape_mutant(
        "Gaussian",
        "Gaussian noise, equal variance",
        _draw_gaussian,
        estimate_from_numbers(_compute_shape_kl(_normal_density)),
        noise_kind="any",
        quick=True,
    ),
    *map(_make_gaussian, (0.5, 0.2, 0.1)),
    _shape_mutant(
        "logistic",
        "logistic noise, equal mean size",
        apply_in_scale_units(lambda noise, state: state.generator.logistic(0.0, _LOGISTIC, noise.shape)),
        estimate_from_numbers(
            _compute_shape_kl(lambda sizes: 0.5 / _LOGISTIC / np.cosh(sizes / (2.0 * _LOGISTIC)) ** 2)
        ),
    ),
    _shape_mutant(
        "uniform",
        "uniform noise, equal mean size",
        apply_in_scale_units(lambda noise, state: state.generator.uniform(-2.0, 2.0, noise.shape)),
        estimate_from_numbers(_compute_shape_kl(lambda sizes: np.where(sizes < 2.0, 0.5, 0.0))),
    ),
    *(
        _shape_mutant(
            f"{100 * positive:g} % positive",
            "signs are not fair",
            partial(_skew_signs, positive=positive),
            estimate_from_numbers(compute_bernoulli_kl(positive, 0.5)),
        )
        for positive in (0.6, 0.51)
    ),
    _shape_mutant(
        "centred at 0.02",
        "noise with a mean of 0.02 scales",
        apply_in_scale_units(lambda noise, state: noise + 0.02),
        estimate_from_numbers(math.exp(-0.02) - 1.0 + 0.02),
    ),
)
"""Mutants whose noise has the right size and the wrong distribution."""


# ---- support ---------------------------------------------------------------------------------------------------------


def _noise_first_message(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Keep the noise of the first message only."""
    return noise if state.memory.setdefault(request.field, request.round) == request.round else np.zeros_like(noise)


def _skip_round(plan: AuditPlan) -> Fault:
    """Omit the noise of the last round that the black box may see."""
    skipped = int(plan.adversary.visible_rounds[-1])
    return mutate_noise(lambda noise, request, state: np.zeros_like(noise) if request.round == skipped else noise)(plan)


def _skip_last_coordinate(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Omit the noise of the last coordinate."""
    noise = noise.copy()
    noise[..., -1] = 0.0
    return noise


def _truncate(limit: float) -> NoiseMutation:
    """Condition Laplace noise on a size of at most `limit` scales."""
    return apply_in_scale_units(
        lambda noise, state: np.copysign(-np.log1p(-np.expm1(-np.abs(noise)) * np.expm1(-limit)), noise)
    )


def _clip(limit: float) -> NoiseMutation:
    """Clip noise to `limit` scales."""
    return apply_in_scale_units(lambda noise, state: np.clip(noise, -limit, limit))


def _bias_to_zero(
    noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, extra: float = 0.015, near: float = 0.1
) -> FloatArray:
    """Add probability `extra` to values within `near` scales of zero."""
    share = extra * np.exp(near)  # this fraction of the moved values was near zero before
    moved = request.round_to_lattice(state.generator.uniform(-near, near, noise.shape) * request.scale)
    return np.where(state.generator.random(noise.shape) < share, moved, noise)


_support_mutant = make_noise_mutant_factory("support and atoms")
_ATOM = 2.0**-41
"""Approximate probability of a single value."""


def _make_zeroed_mutant(share: float, *, messages: bool) -> Mutant:
    unit, estimate = ("messages", estimate_from_messages) if messages else ("numbers", estimate_from_numbers)
    mutation = apply_randomly(lambda noise, request, state: np.zeros_like(noise), share, per_message=messages)
    name = f"{100 * share:g} % of {unit} without noise"
    limit = estimate(compute_bernoulli_kl(share, _ATOM), share)
    return _support_mutant(name, "noise is left out at random", mutation, limit)


SUPPORT_MUTANTS = (
    _support_mutant(
        "first only", "noise on the first message alone", _noise_first_message, noise_kind="any", quick=True
    ),
    make_mutant_factory("support and atoms")("a round left out", "no noise in one round", _skip_round, quick=True),
    _support_mutant(
        "a coordinate left out", "no noise on the last coordinate", _skip_last_coordinate, noise_kind="any", quick=True
    ),
    _support_mutant(
        "biased sampler",
        "1.5 % too much mass near zero",
        _bias_to_zero,
        estimate_from_numbers(compute_bernoulli_kl(0.015 - math.expm1(-0.1), -math.expm1(-0.1))),
        noise_kind="lattice",
        quick=True,
        base="ldp-dol, 60,000 numbers",
    ),
    _make_zeroed_mutant(0.001, messages=True),
    _make_zeroed_mutant(0.001, messages=False),
    _make_zeroed_mutant(0.0001, messages=False),
    *(
        _support_mutant(
            f"none beyond {limit:g} scales",
            "noise is bounded",
            _truncate(limit),
            estimate_from_numbers(-math.log(-math.expm1(-limit))),
        )
        for limit in (4.0, 7.5, 10.0)
    ),
    *(
        _support_mutant(
            f"clipped at {limit:g} scales",
            "larger noise is clipped",
            _clip(limit),
            estimate_from_numbers(compute_bernoulli_kl(math.exp(-limit), _ATOM), math.exp(-limit)),
        )
        for limit in (6.0, 10.0)
    ),
    _support_mutant(
        "none within 0.01 scales",
        "no small noise",
        apply_in_scale_units(lambda noise, state: np.copysign(np.abs(noise) + 0.01, noise)),
        estimate_from_numbers(0.01),
    ),
)
"""Mutants whose noise is missing, bounded, or too often the same value."""
