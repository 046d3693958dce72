"""Noise that a learner says again, or that drifts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from sottovoce.arrays import FloatArray
from sottovoce.lab.selftest.breaking import Change, correlating
from sottovoce.lab.selftest.evidence import correlated, each_message, each_number, event
from sottovoce.lab.selftest.mutants import MOST, SEEN, Mutant, laplace_only, noisy, unaided
from sottovoce.noise import Draw

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

    return correlating(mix)


_within = partial(Mutant, family="conformance", kind="reuse within a run", runs=MOST, quick=False)
_HALF = each_message(event(0.5, _TIE))

WITHIN = (
    Mutant(
        "said again",
        "noise repeated every other round",
        unaided(_again),
        "conformance",
        SEEN,
        kind="reuse within a run",
        limit=_HALF,
    ),
    *(
        _within(name, what, laplace_only(unaided(make)), limit=_HALF)
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
        limit=each_message(event(1.0 - 1e-9, _TIE)),
    ),
    *(
        _within(
            f"{100 * share:g} % said again",
            "some messages repeat the round before",
            laplace_only(noisy(partial(_relapse, share=share))),
            limit=each_message(event(share, _TIE), share),
        )
        for share in (0.01, 0.001)
    ),
    *(
        _within(
            f"correlation {rho:g} with the round before",
            "noise that drifts",
            laplace_only(unaided(partial(_drifting, rho))),
            limit=each_number(correlated(rho)),
        )
        for rho in (0.3, 0.1, 0.03)
    ),
)
"""Noise that a learner says again."""
