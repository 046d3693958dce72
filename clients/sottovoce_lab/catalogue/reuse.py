"""Mutants that reuse noise: within a run, across learners and across runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import NoiseRequest
from sottovoce_core.optional import import_optional
from sottovoce_core.runs.run import Run
from sottovoce_lab.mutants import (
    TARGET_POWER,
    MinRunsEstimator,
    Mutant,
    NoiseKind,
    NoiseMutation,
    NoiseMutationState,
    compute_bernoulli_kl,
    estimate_from_messages,
    estimate_from_numbers,
    estimate_from_runs,
    make_mutant_factory,
    make_noise_mutant_factory,
    mutate_noise,
    restrict_fault,
)

# ---- evidence and mixtures -------------------------------------------------------------------------------------------


def _estimate_repeats(values: float, count_draws: Callable[[Run], float]) -> MinRunsEstimator:
    """Estimate the runs until a value is drawn twice (birthday bound).

    Args:
        values: number of possible values.
        count_draws: counts the draws of one run.
    """
    draws = math.sqrt(2.0 * values * math.log(1.0 / (1.0 - TARGET_POWER)))
    return lambda run, alpha: draws / (2.0 * count_draws(run))


def _compute_correlation_kl(*correlations: float) -> float:
    """Compute the nats of normal values with these correlations with an earlier one: `-ln(1 - rho^2)/2` each."""
    return sum(-0.5 * math.log1p(-(each**2)) for each in correlations)


def _correlate(mix: Callable[[FloatArray, NoiseRequest, NoiseMutationState], FloatArray]) -> NoiseMutation:
    """Make noise of the right distribution dependent: mix its normal scores with earlier ones."""

    def change(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
        special = import_optional("scipy.special", "scipy", "a self-test")
        drawn = noise / request.scale
        scores = mix(np.copysign(special.ndtri(0.5 * np.exp(-np.abs(drawn))), drawn), request, state)
        sizes = -special.log_ndtr(-np.abs(scores)) - math.log(2.0)
        return request.round_to_lattice(np.copysign(sizes, scores) * request.scale)

    return change


# ---- within a run ----------------------------------------------------------------------------------------------------

_TIE = 2.0**-40
"""Approximate probability that a value equals an earlier one."""


def _repeat_noise(
    lag: int = 1,
    transform: Callable[[FloatArray], FloatArray] = lambda noise: noise,
    *,
    scaled: bool = False,
    learners: int | None = None,
) -> NoiseMutation:
    """Repeat the noise of `lag` rounds before, every other time.

    Args:
        lag: rounds.
        transform: change of the repeated noise.
        scaled: repeat it at the scale of the current round, not at its own.
        learners: number of learners that do so, from the first on; None: all.
    """

    def change(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
        unit = request.scale if scaled else 1.0
        before = state.memory.pop((request.field, request.round - lag), None)
        if before is None or before.shape != noise.shape:
            state.memory[request.field, request.round] = noise / unit
            return noise
        repeated = noise.copy()
        repeated[:learners] = request.round_to_lattice(transform(before) * unit)[:learners]
        return repeated

    return change


def _repeat_half(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Use the noise of the first half of a message in the second half, too."""
    half = noise.shape[-1] // 2
    noise = noise.copy()
    noise[..., half : 2 * half] = noise[..., :half]
    return noise


def _repeat_randomly(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, share: float) -> FloatArray:
    """Repeat the noise of the previous round in a random fraction of the messages."""
    if (before := state.replace_previous(request, noise)) is None:
        return noise
    return np.where(state.generator.random((*noise.shape[:-1], 1)) < share, request.round_to_lattice(before), noise)


def _autocorrelate(scores: FloatArray, request: NoiseRequest, state: NoiseMutationState, rho: float) -> FloatArray:
    """Correlate every value with that of the previous round."""
    before = state.memory.get(request.field)
    if before is not None and before.shape == scores.shape:
        scores = rho * before + math.sqrt(1.0 - rho**2) * scores
    state.memory[request.field] = scores
    return scores


_within_run = make_noise_mutant_factory("reuse within a run")
_HALF = estimate_from_messages(compute_bernoulli_kl(0.5, _TIE))
_shift_coordinates, _reverse = partial(np.roll, shift=1, axis=-1), partial(np.flip, axis=-1)

IN_RUN_REUSE_MUTANTS = (
    _within_run("repeated", "noise repeated every other round", _repeat_noise(), _HALF, noise_kind="any", quick=True),
    _within_run("two rounds later", "noise repeated two rounds later", _repeat_noise(2), _HALF),
    _within_run("five rounds later", "noise repeated five rounds later", _repeat_noise(5), _HALF),
    _within_run("one learner, two rounds later", "one learner repeats its noise", _repeat_noise(2, learners=1), _HALF),
    _within_run("at another scale", "repeated at the scale of its round", _repeat_noise(scaled=True), _HALF),
    _within_run(
        "antithetic",
        "the noise of the round before, with the other sign",
        _repeat_noise(transform=np.negative),
        _HALF,
    ),
    _within_run(
        "shifted coordinates", "repeated, shifted by one coordinate", _repeat_noise(transform=_shift_coordinates), _HALF
    ),
    _within_run("other way round", "repeated, last coordinate first", _repeat_noise(transform=_reverse), _HALF),
    _within_run(
        "halves",
        "half a message repeats the other half",
        _repeat_half,
        estimate_from_messages(compute_bernoulli_kl(1.0 - 1e-9, _TIE)),
    ),
    *(
        _within_run(
            f"{100 * share:g} % repeated",
            "some messages repeat the round before",
            partial(_repeat_randomly, share=share),
            estimate_from_messages(compute_bernoulli_kl(share, _TIE), share),
        )
        for share in (0.01, 0.001)
    ),
    *(
        _within_run(
            f"correlation {rho:g} with the round before",
            "noise that drifts",
            _correlate(partial(_autocorrelate, rho=rho)),
            estimate_from_numbers(_compute_correlation_kl(rho)),
        )
        for rho in (0.3, 0.1, 0.03)
    ),
)
"""Mutants that reuse their own noise within a run."""


# ---- across learners -------------------------------------------------------------------------------------------------


def _share_seed(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Give all learners the noise of the first one."""
    return np.broadcast_to(noise[:1], noise.shape)


def _seed_by_clock(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Seed every learner by its starting second; the number of distinct seconds equals the number of learners."""
    learners, replicas, _ = noise.shape
    if (learners, replicas) not in state.memory:
        state.memory[learners, replicas] = state.generator.integers(0, learners, (learners, replicas, 1))
    return np.take_along_axis(noise, state.memory[learners, replicas], axis=0)


def _recall_first_learner(
    now: FloatArray, request: NoiseRequest, state: NoiseMutationState, lag: int
) -> FloatArray | None:
    """Return the first learner's values of `lag` rounds before; None if absent or of other runs."""
    state.memory[request.field, request.round] = now[:1]
    before: FloatArray | None = state.memory.get((request.field, request.round - lag))
    return None if before is None or before.shape[1:] != now.shape[1:] else before


def _copy_first_learner(transform: Callable[[FloatArray], FloatArray], lag: int = 0) -> NoiseMutation:
    """Give the second learner the noise of the first one of `lag` rounds before."""

    def change(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
        if (before := _recall_first_learner(noise, request, state, lag)) is not None:
            noise = noise.copy()
            noise[1:2] = request.round_to_lattice(transform(before))
        return noise

    return change


def _correlate_learners(
    scores: FloatArray, request: NoiseRequest, state: NoiseMutationState, rho: float, lag: int
) -> FloatArray:
    """Correlate the second learner's values with those of the first one of `lag` rounds before."""
    if (first := _recall_first_learner(scores, request, state, lag)) is not None:
        scores = scores.copy()
        scores[1:2] = rho * first + math.sqrt(1.0 - rho**2) * scores[1:2]
    return scores


def _reduce_sum(scores: FloatArray, request: NoiseRequest, state: NoiseMutationState, share: float) -> FloatArray:
    """Reduce the sum over all learners at a place, by this fraction of the mean; 1 makes the sum zero."""
    n = len(scores)
    reduced: FloatArray = scores - share * scores.mean(axis=0, keepdims=True)
    reduced /= math.sqrt(1.0 - 2.0 * share / n + share**2 / n)
    return reduced


def _estimate_reduced_sum(share: float) -> MinRunsEstimator:
    """Estimate runs from the evidence of all learners' values of a place: `-ln(det R)/2` nats."""

    def limit(run: Run, alpha: float) -> float:
        n = run.spec.n_learners
        variance = 1.0 - 2.0 * share / n + share**2 / n
        nats = 0.5 * n * math.log(variance) - math.log(1.0 - share)
        return estimate_from_numbers(nats / n)(run, alpha)

    return limit


def _estimate_from_one_learner(nats: float) -> MinRunsEstimator:
    """Estimate runs from the evidence per value of one learner."""
    return lambda run, alpha: estimate_from_numbers(nats / run.spec.n_learners)(run, alpha)


def _make_cross_learner(
    name: str,
    description: str,
    change: NoiseMutation,
    limit: MinRunsEstimator,
    *,
    noise_kind: NoiseKind = "laplace",
    quick: bool = False,
) -> Mutant:
    build_fault = restrict_fault(
        mutate_noise(change, noise_kind),
        lambda plan: plan.run.spec.n_learners >= 2,
        "the run must have two learners or more, and has one",
    )
    mutant: Mutant = make_mutant_factory("across learners")(name, description, build_fault, limit, quick=quick)
    return mutant


_TIED = estimate_from_messages(compute_bernoulli_kl(0.3, _TIE))

CROSS_LEARNER_MUTANTS = (
    _make_cross_learner(
        "one seed", "all learners draw from one seed", _share_seed, _TIED, noise_kind="any", quick=True
    ),
    _make_cross_learner(
        "clock as seed", "the starting second is the seed", _seed_by_clock, _TIED, noise_kind="any", quick=True
    ),
    _make_cross_learner(
        "a shifted copy",
        "one learner's noise is another's, a coordinate on",
        _copy_first_learner(_shift_coordinates),
        _TIED,
    ),
    _make_cross_learner(
        "a late copy",
        "one learner's noise is another's, three rounds later",
        _copy_first_learner(lambda noise: noise, 3),
        _TIED,
    ),
    _make_cross_learner(
        "a mirrored copy",
        "one learner's noise is another's, with the other sign",
        _copy_first_learner(np.negative),
        _TIED,
    ),
    *(
        _make_cross_learner(
            f"correlation {rho:g} of two" + (f", {lag} rounds later" if lag else ""),
            "one learner's noise follows another's",
            _correlate(partial(_correlate_learners, rho=rho, lag=lag)),
            _estimate_from_one_learner(_compute_correlation_kl(rho)),
        )
        for rho, lag in ((0.5, 3), (0.1, 0), (0.1, 3), (0.03, 0))
    ),
    _make_cross_learner(
        "summing to zero",
        "noise that cancels out over all learners",
        _correlate(partial(_reduce_sum, share=1.0)),
        estimate_from_messages(100.0),
    ),
    *(
        _make_cross_learner(
            f"summing to {1.0 - share:g} of it",
            "noise that cancels out in part",
            _correlate(partial(_reduce_sum, share=share)),
            _estimate_reduced_sum(share),
        )
        for share in (0.2, 0.05)
    ),
)
"""Mutants whose learners share noise."""


# ---- across runs -----------------------------------------------------------------------------------------------------


def _repeat_first_run(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
    """Give all runs the noise of the first one, as with a constant seed."""
    return np.broadcast_to(noise[..., :1, :], noise.shape).copy()


def _mix_bits(words: Any) -> Any:
    """Mix 64-bit words into pseudorandom ones (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _draw_streams(seeds: Any, count: int) -> FloatArray:
    """Draw the first standard Laplace values of streams, along the last axis, which `seeds` has with length 1."""
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = _mix_bits(_mix_bits(seeds.astype(np.uint64)) + places)
    sizes: FloatArray = -np.log1p(-((words >> np.uint64(11)).astype(np.float64)) * 2.0**-53)
    return np.where(words & np.uint64(1), sizes, -sizes)


def _draw_from_few_seeds(count: int, *, messages: bool = False) -> NoiseMutation:
    """Draw the seed of every learner of a run, or of every message, from `count` values."""

    def change(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState) -> FloatArray:
        shape = (*noise.shape[:-1], 1)
        seeds = state.generator.integers(0, count, shape)
        if not messages:
            seeds = state.memory.setdefault(shape, seeds) + (request.round + 1) * 2**40
        return request.round_to_lattice(_draw_streams(seeds, noise.shape[-1]) * request.scale)

    return change


def _repeat_low_bits(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, share: float) -> FloatArray:
    """Repeat the 32 low bits of the previous round in a fraction of the values."""
    if request.spacing is None:
        return noise
    steps, low = np.rint(noise / request.spacing).astype(np.int64), np.int64(2**32 - 1)
    if (before := state.replace_previous(request, steps)) is None:
        return noise
    mixed = (steps & ~low) | (before & low)
    return np.where(state.generator.random(noise.shape) < share, mixed, steps) * request.spacing


def _restore_run(noise: FloatArray, request: NoiseRequest, state: NoiseMutationState, share: float) -> FloatArray:
    """Give a fraction of the runs the noise of the previous run, as after restoring its snapshot."""
    replicas = noise.shape[-2]
    if replicas not in state.memory:
        own = np.arange(replicas)
        state.memory[replicas] = np.where(state.generator.random(replicas) < share, np.maximum(own - 1, 0), own)
    return noise[..., state.memory[replicas], :]


_across_runs = make_noise_mutant_factory("across runs")


def _count_learners(run: Run) -> float:
    return float(run.spec.n_learners)


CROSS_RUN_MUTANTS = (
    _across_runs(
        "constant seed",
        "every run draws from the same seed",
        _repeat_first_run,
        _estimate_repeats(1.0, _count_learners),
        noise_kind="any",
        quick=True,
    ),
    *(
        _across_runs(name, description, _draw_from_few_seeds(count), _estimate_repeats(float(count), _count_learners))
        for name, description, count in (
            *((f"2^{bits} seeds", "a run's seed is one of few", 2**bits) for bits in (8, 12, 16, 20)),
            ("seconds of a day", "a learner's seed is the time it started", 86_400),
        )
    ),
    *(
        _across_runs(
            f"2^{bits} streams",
            "a message's seed is one of few",
            _draw_from_few_seeds(2**bits, messages=True),
            _estimate_repeats(2.0**bits, lambda run: float(run.spec.rounds * run.spec.n_learners)),
        )
        for bits in (16, 20, 24)
    ),
    *(
        _across_runs(
            f"low words again in {100 * share:g} %",
            "32 low bits repeated a round later",
            partial(_repeat_low_bits, share=share),
            estimate_from_numbers(compute_bernoulli_kl(share, 2.0**-32), share),
        )
        for share in (0.01, 0.0005)
    ),
    _across_runs(
        "restored",
        "2 % of the runs repeat the noise of the run before",
        partial(_restore_run, share=0.02),
        estimate_from_runs(compute_bernoulli_kl(0.02, 2.0**-60), 0.02),
    ),
)
"""Mutants whose runs share noise."""
