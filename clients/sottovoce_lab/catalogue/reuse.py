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


def _repeated(values: float, drawn: Callable[[Run], float]) -> MinRunsEstimator:
    """Something drawn from so many values comes twice, as birthdays do.

    Args:
        values: how many there are.
        drawn: in one run.
    """
    draws = math.sqrt(2.0 * values * math.log(1.0 / (1.0 - TARGET_POWER)))
    return lambda run, alpha: draws / (2.0 * drawn(run))


def _correlated(*correlations: float) -> float:
    """Nats of normal numbers with such correlations of each with one that was before it: `-ln(1 - rho^2)/2` each."""
    return sum(-0.5 * math.log1p(-(each**2)) for each in correlations)


def _correlating(mix: Callable[[FloatArray, NoiseRequest, NoiseMutationState], FloatArray]) -> NoiseMutation:
    """Noise of the right law that is not independent: its normal scores are mixed with what was there before."""

    def change(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
        special = import_optional("scipy.special", "scipy", "a self-test")
        drawn = noise / draw.scale
        scores = mix(np.copysign(special.ndtri(0.5 * np.exp(-np.abs(drawn))), drawn), draw, source)
        sizes = -special.log_ndtr(-np.abs(scores)) - math.log(2.0)
        return draw.round_to_lattice(np.copysign(sizes, scores) * draw.scale)

    return change


# ---- within ----------------------------------------------------------------------------------------------------------

_TIE = 2.0**-40
"""About the probability that a number is one that was said before."""


def _again(
    lag: int = 1,
    turn: Callable[[FloatArray], FloatArray] = lambda said: said,
    *,
    scaled: bool = False,
    learners: int | None = None,
) -> NoiseMutation:
    """Every other time, the noise of so many rounds before is said again.

    Args:
        lag: rounds.
        turn: what is done to it.
        scaled: it is said at the scale of the round, not at its own.
        learners: the first so many do so; None: all.
    """

    def change(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
        unit = draw.scale if scaled else 1.0
        before = source.memory.pop((draw.field, draw.round - lag), None)
        if before is None or before.shape != noise.shape:
            source.memory[draw.field, draw.round] = noise / unit
            return noise
        said = noise.copy()
        said[:learners] = draw.round_to_lattice(turn(before) * unit)[:learners]
        return said

    return change


def _halves(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """The second half of a message says the noise of the first one."""
    half = noise.shape[-1] // 2
    noise = noise.copy()
    noise[..., half : 2 * half] = noise[..., :half]
    return noise


def _relapse(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, share: float) -> FloatArray:
    """Some messages, at random, say the noise of the round before."""
    if (before := source.replace_previous(draw, noise)) is None:
        return noise
    return np.where(source.generator.random((*noise.shape[:-1], 1)) < share, draw.round_to_lattice(before), noise)


def _drifting(scores: FloatArray, draw: NoiseRequest, source: NoiseMutationState, rho: float) -> FloatArray:
    """Every number is correlated with the one of the round before."""
    before = source.memory.get(draw.field)
    if before is not None and before.shape == scores.shape:
        scores = rho * before + math.sqrt(1.0 - rho**2) * scores
    source.memory[draw.field] = scores
    return scores


_within = make_noise_mutant_factory("reuse within a run")
_HALF = estimate_from_messages(compute_bernoulli_kl(0.5, _TIE))
_next_coordinate, _backwards = partial(np.roll, shift=1, axis=-1), partial(np.flip, axis=-1)

IN_RUN_REUSE_MUTANTS = (
    _within("said again", "noise repeated every other round", _again(), _HALF, on="any", quick=True),
    _within("two rounds later", "noise said again two rounds later", _again(2), _HALF),
    _within("five rounds later", "noise said again five rounds later", _again(5), _HALF),
    _within("one learner, two rounds later", "one learner says it again", _again(2, learners=1), _HALF),
    _within("at another scale", "said again at the scale of its round", _again(scaled=True), _HALF),
    _within("antithetic", "the noise of the round before, with the other sign", _again(turn=np.negative), _HALF),
    _within("shifted coordinates", "said again one coordinate on", _again(turn=_next_coordinate), _HALF),
    _within("other way round", "said again from the last coordinate to the first", _again(turn=_backwards), _HALF),
    _within(
        "halves",
        "half a message repeats the other half",
        _halves,
        estimate_from_messages(compute_bernoulli_kl(1.0 - 1e-9, _TIE)),
    ),
    *(
        _within(
            f"{100 * share:g} % said again",
            "some messages repeat the round before",
            partial(_relapse, share=share),
            estimate_from_messages(compute_bernoulli_kl(share, _TIE), share),
        )
        for share in (0.01, 0.001)
    ),
    *(
        _within(
            f"correlation {rho:g} with the round before",
            "noise that drifts",
            _correlating(partial(_drifting, rho=rho)),
            estimate_from_numbers(_correlated(rho)),
        )
        for rho in (0.3, 0.1, 0.03)
    ),
)
"""Noise that a learner says again."""


# ---- learners --------------------------------------------------------------------------------------------------------


def _one_seed(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """All learners draw what the first one draws."""
    return np.broadcast_to(noise[:1], noise.shape)


def _clock_seeded(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """Every learner is seeded by the second it started in, one of as many as there are learners."""
    learners, replicas, _ = noise.shape
    if (learners, replicas) not in source.memory:
        source.memory[learners, replicas] = source.generator.integers(0, learners, (learners, replicas, 1))
    return np.take_along_axis(noise, source.memory[learners, replicas], axis=0)


def _first_learner(now: FloatArray, draw: NoiseRequest, source: NoiseMutationState, lag: int) -> FloatArray | None:
    """What the first learner had so many rounds before; None: nothing, or in other runs."""
    source.memory[draw.field, draw.round] = now[:1]
    before: FloatArray | None = source.memory.get((draw.field, draw.round - lag))
    return None if before is None or before.shape[1:] != now.shape[1:] else before


def _copied(turn: Callable[[FloatArray], FloatArray], lag: int = 0) -> NoiseMutation:
    """The second learner says what the first one drew so many rounds before."""

    def change(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
        if (before := _first_learner(noise, draw, source, lag)) is not None:
            noise = noise.copy()
            noise[1:2] = draw.round_to_lattice(turn(before))
        return noise

    return change


def _follower(scores: FloatArray, draw: NoiseRequest, source: NoiseMutationState, rho: float, lag: int) -> FloatArray:
    """The second learner's numbers are correlated with the first one's of so many rounds before."""
    if (first := _first_learner(scores, draw, source, lag)) is not None:
        scores = scores.copy()
        scores[1:2] = rho * first + math.sqrt(1.0 - rho**2) * scores[1:2]
    return scores


def _cancelling(scores: FloatArray, draw: NoiseRequest, source: NoiseMutationState, share: float) -> FloatArray:
    """All learners' numbers of a place sum to too little, by this share of the mean: 1, and the sum is zero."""
    n = len(scores)
    left: FloatArray = scores - share * scores.mean(axis=0, keepdims=True)
    left /= math.sqrt(1.0 - 2.0 * share / n + share**2 / n)
    return left


def _cancelled(share: float) -> MinRunsEstimator:
    """Of all learners' numbers of a place: `-ln(det R)/2` nats."""

    def limit(run: Run, alpha: float) -> float:
        n = run.spec.n_learners
        variance = 1.0 - 2.0 * share / n + share**2 / n
        nats = 0.5 * n * math.log(variance) - math.log(1.0 - share)
        return estimate_from_numbers(nats / n)(run, alpha)

    return limit


def _of_one(nats: float) -> MinRunsEstimator:
    """In every number of one learner."""
    return lambda run, alpha: estimate_from_numbers(nats / run.spec.n_learners)(run, alpha)


def _across(
    name: str,
    what: str,
    change: NoiseMutation,
    limit: MinRunsEstimator,
    *,
    noise_kind: NoiseKind = "laplace",
    quick: bool = False,
) -> Mutant:
    breaks = restrict_fault(
        mutate_noise(change, noise_kind), lambda plan: plan.run.spec.n_learners >= 2, "there is one learner only"
    )
    mutant: Mutant = make_mutant_factory("across learners")(name, what, breaks, limit, quick=quick)
    return mutant


_TIED = estimate_from_messages(compute_bernoulli_kl(0.3, _TIE))

CROSS_LEARNER_MUTANTS = (
    _across("one seed", "all learners draw from one seed", _one_seed, _TIED, noise_kind="any", quick=True),
    _across("clock as seed", "the starting second is the seed", _clock_seeded, _TIED, noise_kind="any", quick=True),
    _across("a shifted copy", "one learner's noise is another's, a coordinate on", _copied(_next_coordinate), _TIED),
    _across(
        "a late copy", "one learner's noise is another's, three rounds later", _copied(lambda said: said, 3), _TIED
    ),
    _across("a mirrored copy", "one learner's noise is another's, with the other sign", _copied(np.negative), _TIED),
    *(
        _across(
            f"correlation {rho:g} of two" + (f", {lag} rounds later" if lag else ""),
            "one learner's noise follows another's",
            _correlating(partial(_follower, rho=rho, lag=lag)),
            _of_one(_correlated(rho)),
        )
        for rho, lag in ((0.5, 3), (0.1, 0), (0.1, 3), (0.03, 0))
    ),
    _across(
        "summing to zero",
        "noise that cancels out over all learners",
        _correlating(partial(_cancelling, share=1.0)),
        estimate_from_messages(100.0),
    ),
    *(
        _across(
            f"summing to {1.0 - share:g} of it",
            "noise that cancels out in part",
            _correlating(partial(_cancelling, share=share)),
            _cancelled(share),
        )
        for share in (0.2, 0.05)
    ),
)
"""Noise that learners share."""


# ---- runs ------------------------------------------------------------------------------------------------------------


def _every_run_alike(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
    """All runs say the noise of the first one, as from a seed that never changes."""
    return np.broadcast_to(noise[..., :1, :], noise.shape).copy()


def _mixed(words: Any) -> Any:
    """64 bits that look random, of 64 bits that are not (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _numbers(seeds: Any, count: int) -> FloatArray:
    """The first standard Laplace numbers of streams, along the last axis, which `seeds` has with length 1."""
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = _mixed(_mixed(seeds.astype(np.uint64)) + places)
    sizes: FloatArray = -np.log1p(-((words >> np.uint64(11)).astype(np.float64)) * 2.0**-53)
    return np.where(words & np.uint64(1), sizes, -sizes)


def _streams(count: int, *, messages: bool = False) -> NoiseMutation:
    """A generator that knows so many seeds: it gets one of them for every learner of a run, or for every message."""

    def change(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState) -> FloatArray:
        shape = (*noise.shape[:-1], 1)
        seeds = source.generator.integers(0, count, shape)
        if not messages:
            seeds = source.memory.setdefault(shape, seeds) + (draw.round + 1) * 2**40
        return draw.round_to_lattice(_numbers(seeds, noise.shape[-1]) * draw.scale)

    return change


def _low_words(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, share: float) -> FloatArray:
    """The 32 low bits of some numbers are those of the number of the round before."""
    if draw.spacing is None:
        return noise
    steps, low = np.rint(noise / draw.spacing).astype(np.int64), np.int64(2**32 - 1)
    if (before := source.replace_previous(draw, steps)) is None:
        return noise
    mixed = (steps & ~low) | (before & low)
    return np.where(source.generator.random(noise.shape) < share, mixed, steps) * draw.spacing


def _restored(noise: FloatArray, draw: NoiseRequest, source: NoiseMutationState, share: float) -> FloatArray:
    """Some runs go on from a snapshot of the run before: they say its noise."""
    replicas = noise.shape[-2]
    if replicas not in source.memory:
        own = np.arange(replicas)
        source.memory[replicas] = np.where(source.generator.random(replicas) < share, np.maximum(own - 1, 0), own)
    return noise[..., source.memory[replicas], :]


_runs = make_noise_mutant_factory("across runs")


def _started(run: Run) -> float:
    return float(run.spec.n_learners)


CROSS_RUN_MUTANTS = (
    _runs(
        "constant seed",
        "every run draws from the same seed",
        _every_run_alike,
        _repeated(1.0, _started),
        on="any",
        quick=True,
    ),
    *(
        _runs(name, what, _streams(count), _repeated(float(count), _started))
        for name, what, count in (
            *((f"2^{bits} seeds", "a run's seed is one of few", 2**bits) for bits in (8, 12, 16, 20)),
            ("seconds of a day", "a learner's seed is the time it started", 86_400),
        )
    ),
    *(
        _runs(
            f"2^{bits} streams",
            "a message's seed is one of few",
            _streams(2**bits, messages=True),
            _repeated(2.0**bits, lambda run: float(run.spec.rounds * run.spec.n_learners)),
        )
        for bits in (16, 20, 24)
    ),
    *(
        _runs(
            f"low words again in {100 * share:g} %",
            "32 low bits said again a round later",
            partial(_low_words, share=share),
            estimate_from_numbers(compute_bernoulli_kl(share, 2.0**-32), share),
        )
        for share in (0.01, 0.0005)
    ),
    _runs(
        "restored",
        "2 % of the runs say the noise of the run before",
        partial(_restored, share=0.02),
        estimate_from_runs(compute_bernoulli_kl(0.02, 2.0**-60), 0.02),
    ),
)
"""Noise that runs share."""
