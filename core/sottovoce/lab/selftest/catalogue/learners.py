"""Noise that learners share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from sottovoce.arrays import FloatArray
from sottovoce.lab.selftest.breaking import Change, correlating
from sottovoce.lab.selftest.evidence import Limit, correlated, each_message, each_number, event
from sottovoce.lab.selftest.mutants import MOST, SEEN, Mutant, laplace_only, noisy, together, unaided
from sottovoce.noise import Draw
from sottovoce.running.run import Run

_TIE = 2.0**-40
"""About the probability that a number is one that was said before."""


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

    return correlating(mix)


def _cancelling(share: float) -> Change:
    """All learners' numbers of a place sum to too little, by this share of the mean: 1, and the sum is zero."""

    def mix(scores: FloatArray, before: dict[Any, FloatArray], draw: Draw) -> FloatArray:
        n = len(scores)
        left: FloatArray = scores - share * scores.mean(axis=0, keepdims=True)
        left /= math.sqrt(1.0 - 2.0 * share / n + share**2 / n)
        return left

    return correlating(mix)


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


_across = partial(Mutant, family="conformance", kind="across learners", runs=MOST, quick=False)

LEARNERS = (
    *(
        Mutant(
            name,
            what,
            together(breaks),
            "conformance",
            SEEN,
            kind="across learners",
            limit=each_message(event(0.3, _TIE)),
        )
        for name, what, breaks in (
            ("one seed", "all learners draw from one seed", unaided(lambda: _one_seed)),
            ("clock as seed", "the starting second is the seed", noisy(_clock_seeded)),
        )
    ),
    *(
        _across(name, what, together(laplace_only(unaided(make))), limit=each_message(event(0.3, _TIE)))
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
            limit=_of_one(correlated(rho)),
        )
        for rho, lag in ((0.5, 3), (0.1, 0), (0.1, 3), (0.03, 0))
    ),
    _across(
        "summing to zero",
        "noise that cancels out over all learners",
        together(laplace_only(unaided(partial(_cancelling, 1.0)))),
        limit=each_message(100.0),
    ),
    *(
        _across(
            f"summing to {1.0 - share:g} of it",
            "noise that cancels out in part",
            together(laplace_only(unaided(partial(_cancelling, share)))),
            limit=_cancelled(share),
        )
        for share in (0.2, 0.05)
    ),
)
"""Noise that learners share."""
