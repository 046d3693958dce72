"""Mutants that reuse noise: within a run, across learners and across runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from sottovoce_core.arrays import FloatArray
from sottovoce_core.noise import Draw
from sottovoce_core.optional import import_extra
from sottovoce_core.running.run import Run
from sottovoce_lab.mutants import (
    FOUND,
    Change,
    Limit,
    each_message,
    each_number,
    each_run,
    event,
    faults,
    laplace_only,
    noisy,
    together,
    unaided,
)

# ---- evidence and mixtures -------------------------------------------------------------------------------------------


def _repeated(values: float, drawn: Callable[[Run], float]) -> Limit:
    """Something drawn from so many values comes twice, as birthdays do.

    Args:
        values: how many there are.
        drawn: in one run.
    """
    draws = math.sqrt(2.0 * values * math.log(1.0 / (1.0 - FOUND)))
    return lambda run, alpha: draws / (2.0 * drawn(run))


def _correlated(*correlations: float) -> float:
    """Nats of normal numbers with such correlations of each with one that was before it: `-ln(1 - rho^2)/2` each."""
    return sum(-0.5 * math.log1p(-(each**2)) for each in correlations)


def _correlating(mix: Callable[[FloatArray, dict[Any, FloatArray], Draw], FloatArray]) -> Change:
    """Noise of the right law that is not independent: its normal scores are mixed with what was there before."""
    special = import_extra("scipy.special", "scipy", "a self-test")
    before: dict[Any, FloatArray] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        drawn = noise / draw.scale
        scores = np.copysign(special.ndtri(0.5 * np.exp(-np.abs(drawn))), drawn)
        scores = mix(scores, before, draw)
        sizes = -special.log_ndtr(-np.abs(scores)) - math.log(2.0)
        return draw.rounded(np.copysign(sizes, scores) * draw.scale)

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
) -> Change:
    """Every other time, the noise of so many rounds before is said again.

    Args:
        lag: rounds.
        turn: what is done to it.
        scaled: it is said at the scale of the round, not at its own.
        learners: the first so many do so; None: all.
    """
    fresh: dict[tuple[str, int], FloatArray] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        unit = draw.scale if scaled else 1.0
        before = fresh.pop((draw.field, draw.round - lag), None)
        if before is None or before.shape != noise.shape:
            fresh[draw.field, draw.round] = noise / unit
            return noise
        said = noise.copy()
        said[:learners] = draw.rounded(turn(before) * unit)[:learners]
        return said

    return change


def _halves(noise: FloatArray, draw: Draw) -> FloatArray:
    """The second half of a message says the noise of the first one."""
    half = noise.shape[-1] // 2
    noise = noise.copy()
    noise[..., half : 2 * half] = noise[..., :half]
    return noise


def _relapse(generator: Generator, share: float) -> Change:
    """Some messages, at random, say the noise of the round before."""
    last: dict[str, FloatArray] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        before, last[draw.field] = last.get(draw.field), noise
        if before is None or before.shape != noise.shape:
            return noise
        return np.where(generator.random((*noise.shape[:-1], 1)) < share, draw.rounded(before), noise)

    return change


def _drifting(rho: float) -> Change:
    """Every number is correlated with the one of the round before."""

    def mix(scores: FloatArray, before: dict[Any, FloatArray], draw: Draw) -> FloatArray:
        last = before.get(draw.field)
        if last is not None and last.shape == scores.shape:
            scores = rho * last + math.sqrt(1.0 - rho**2) * scores
        before[draw.field] = scores
        return scores

    return _correlating(mix)


_within = faults("reuse within a run")
_HALF = each_message(event(0.5, _TIE))

WITHIN = (
    _within("said again", "noise repeated every other round", unaided(_again), _HALF, quick=True),
    *(
        _within(name, what, laplace_only(unaided(make)), _HALF)
        for name, what, make in (
            ("two rounds later", "noise said again two rounds later", partial(_again, 2)),
            ("five rounds later", "noise said again five rounds later", partial(_again, 5)),
            ("one learner, two rounds later", "one learner says it again", partial(_again, 2, learners=1)),
            ("at another scale", "said again at the scale of its round", partial(_again, scaled=True)),
            ("antithetic", "the noise of the round before, with the other sign", partial(_again, turn=np.negative)),
            (
                "shifted coordinates",
                "said again one coordinate on",
                partial(_again, turn=partial(np.roll, shift=1, axis=-1)),
            ),
            (
                "other way round",
                "said again from the last coordinate to the first",
                partial(_again, turn=partial(np.flip, axis=-1)),
            ),
        )
    ),
    _within(
        "halves",
        "half a message repeats the other half",
        laplace_only(unaided(lambda: _halves)),
        each_message(event(1.0 - 1e-9, _TIE)),
    ),
    *(
        _within(
            f"{100 * share:g} % said again",
            "some messages repeat the round before",
            laplace_only(noisy(partial(_relapse, share=share))),
            each_message(event(share, _TIE), share),
        )
        for share in (0.01, 0.001)
    ),
    *(
        _within(
            f"correlation {rho:g} with the round before",
            "noise that drifts",
            laplace_only(unaided(partial(_drifting, rho))),
            each_number(_correlated(rho)),
        )
        for rho in (0.3, 0.1, 0.03)
    ),
)
"""Noise that a learner says again."""


# ---- learners --------------------------------------------------------------------------------------------------------


def _one_seed(noise: FloatArray, draw: Draw) -> FloatArray:
    """All learners draw what the first one draws."""
    return np.broadcast_to(noise[:1], noise.shape)


def _clock_seeded(generator: Generator) -> Change:
    """Every learner is seeded by the second it started in, one of as many as there are learners."""
    started: dict[tuple[int, ...], Any] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        learners, replicas, _ = noise.shape
        seconds = started.setdefault((learners, replicas), generator.integers(0, learners, (learners, replicas, 1)))
        return np.take_along_axis(noise, seconds, axis=0)

    return change


def _copied(turn: Callable[[FloatArray], FloatArray], lag: int = 0) -> Change:
    """The second learner says what the first one drew so many rounds before."""
    drawn: dict[tuple[str, int], FloatArray] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        drawn[draw.field, draw.round] = noise[:1]
        before = drawn.get((draw.field, draw.round - lag))
        if before is None or before.shape[1:] != noise.shape[1:]:
            return noise
        noise = noise.copy()
        noise[1:2] = draw.rounded(turn(before))
        return noise

    return change


def _follower(rho: float, lag: int = 0) -> Change:
    """The second learner's numbers are correlated with the first one's of so many rounds before."""

    def mix(scores: FloatArray, before: dict[Any, FloatArray], draw: Draw) -> FloatArray:
        before[draw.field, draw.round] = scores[:1]
        first = before.get((draw.field, draw.round - lag))
        if first is not None and first.shape[1:] == scores.shape[1:]:
            scores = scores.copy()
            scores[1:2] = rho * first + math.sqrt(1.0 - rho**2) * scores[1:2]
        return scores

    return _correlating(mix)


def _cancelling(share: float) -> Change:
    """All learners' numbers of a place sum to too little, by this share of the mean: 1, and the sum is zero."""

    def mix(scores: FloatArray, before: dict[Any, FloatArray], draw: Draw) -> FloatArray:
        n = len(scores)
        left: FloatArray = scores - share * scores.mean(axis=0, keepdims=True)
        left /= math.sqrt(1.0 - 2.0 * share / n + share**2 / n)
        return left

    return _correlating(mix)


def _cancelled(share: float) -> Limit:
    """Of all learners' numbers of a place: `-ln(det R)/2` nats."""

    def limit(run: Run, alpha: float) -> float:
        n = run.spec.n_learners
        variance = 1.0 - 2.0 * share / n + share**2 / n
        nats = 0.5 * n * math.log(variance) - math.log(1.0 - share)
        return each_number(nats / n)(run, alpha)

    return limit


def _of_one(nats: float) -> Limit:
    """In every number of one learner."""
    return lambda run, alpha: each_number(nats / run.spec.n_learners)(run, alpha)


_across = faults("across learners")
_TIED = each_message(event(0.3, _TIE))

LEARNERS = (
    *(
        _across(name, what, together(breaks), _TIED, quick=True)
        for name, what, breaks in (
            ("one seed", "all learners draw from one seed", unaided(lambda: _one_seed)),
            ("clock as seed", "the starting second is the seed", noisy(_clock_seeded)),
        )
    ),
    *(
        _across(name, what, together(laplace_only(unaided(make))), _TIED)
        for name, what, make in (
            (
                "a shifted copy",
                "one learner's noise is another's, a coordinate on",
                partial(_copied, partial(np.roll, shift=1, axis=-1)),
            ),
            (
                "a late copy",
                "one learner's noise is another's, three rounds later",
                partial(_copied, lambda said: said, 3),
            ),
            ("a mirrored copy", "one learner's noise is another's, with the other sign", partial(_copied, np.negative)),
        )
    ),
    *(
        _across(
            f"correlation {rho:g} of two" + (f", {lag} rounds later" if lag else ""),
            "one learner's noise follows another's",
            together(laplace_only(unaided(partial(_follower, rho, lag)))),
            _of_one(_correlated(rho)),
        )
        for rho, lag in ((0.5, 3), (0.1, 0), (0.1, 3), (0.03, 0))
    ),
    _across(
        "summing to zero",
        "noise that cancels out over all learners",
        together(laplace_only(unaided(partial(_cancelling, 1.0)))),
        each_message(100.0),
    ),
    *(
        _across(
            f"summing to {1.0 - share:g} of it",
            "noise that cancels out in part",
            together(laplace_only(unaided(partial(_cancelling, share)))),
            _cancelled(share),
        )
        for share in (0.2, 0.05)
    ),
)
"""Noise that learners share."""


# ---- runs ------------------------------------------------------------------------------------------------------------


def _every_run_alike(noise: FloatArray, draw: Draw) -> FloatArray:
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


def _streams(generator: Generator, count: int, *, messages: bool = False) -> Change:
    """A generator that knows so many seeds: it gets one of them for every learner of a run, or for every message."""
    chosen: dict[tuple[int, ...], Any] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        shape = (*noise.shape[:-1], 1)
        if messages:
            seeds = generator.integers(0, count, shape)
        else:
            seeds = chosen.setdefault(shape, generator.integers(0, count, shape)) + (draw.round + 1) * 2**40
        return draw.rounded(_numbers(seeds, noise.shape[-1]) * draw.scale)

    return change


def _low_words(generator: Generator, share: float) -> Change:
    """The 32 low bits of some numbers are those of the number of the round before."""
    last: dict[str, Any] = {}
    low = np.int64(2**32 - 1)

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        if draw.grid is None:
            return noise
        steps = np.rint(noise / draw.grid).astype(np.int64)
        before, last[draw.field] = last.get(draw.field), steps
        if before is None or before.shape != steps.shape:
            return noise
        mixed = (steps & ~low) | (before & low)
        return np.where(generator.random(noise.shape) < share, mixed, steps) * draw.grid

    return change


def _restored(generator: Generator, share: float) -> Change:
    """Some runs go on from a snapshot of the run before: they say its noise."""
    chosen: dict[int, Any] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        replicas = noise.shape[-2]
        if replicas not in chosen:
            own = np.arange(replicas)
            chosen[replicas] = np.where(generator.random(replicas) < share, np.maximum(own - 1, 0), own)
        return noise[..., chosen[replicas], :]

    return change


_runs = faults("across runs")


def _spoken(run: Run) -> float:
    return float(run.spec.rounds * run.spec.n_learners)


def _started(run: Run) -> float:
    return float(run.spec.n_learners)


RUNS = (
    _runs(
        "constant seed",
        "every run draws from the same seed",
        unaided(lambda: _every_run_alike),
        _repeated(1.0, _started),
        quick=True,
    ),
    *(
        _runs(
            f"2^{bits} seeds",
            "a run's seed is one of few",
            laplace_only(noisy(partial(_streams, count=2**bits))),
            _repeated(2.0**bits, _started),
        )
        for bits in (8, 12, 16, 20)
    ),
    _runs(
        "seconds of a day",
        "a learner's seed is the time it started",
        laplace_only(noisy(partial(_streams, count=86_400))),
        _repeated(86_400.0, _started),
    ),
    *(
        _runs(
            f"2^{bits} streams",
            "a message's seed is one of few",
            laplace_only(noisy(partial(_streams, count=2**bits, messages=True))),
            _repeated(2.0**bits, _spoken),
        )
        for bits in (16, 20, 24)
    ),
    *(
        _runs(
            f"low words again in {100 * share:g} %",
            "32 low bits said again a round later",
            laplace_only(noisy(partial(_low_words, share=share))),
            each_number(event(share, 2.0**-32), share),
        )
        for share in (0.01, 0.0005)
    ),
    _runs(
        "restored",
        "2 % of the runs say the noise of the run before",
        laplace_only(noisy(partial(_restored, share=0.02))),
        each_run(event(0.02, 2.0**-60), 0.02),
    ),
)
"""Noise that runs share."""
