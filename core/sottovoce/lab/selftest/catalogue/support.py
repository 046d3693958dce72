"""Noise that is missing, bounded, or too often one and the same number."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.random import Generator

from sottovoce.arrays import FloatArray
from sottovoce.auditing.plan import AuditPlan
from sottovoce.lab.selftest.breaking import Change, in_scales, sometimes
from sottovoce.lab.selftest.evidence import each_message, each_number, event
from sottovoce.lab.selftest.mutants import MOST, SEEN, Broken, Mutant, laplace_only, lattice_only, noisy, unaided
from sottovoce.noise import Draw


def _first_only() -> Change:
    """The first message that should carry noise does, the later ones do not."""
    first: dict[str, int] = {}
    return lambda noise, draw: noise if first.setdefault(draw.field, draw.round) == draw.round else np.zeros_like(noise)


def _but_one(skipped: int) -> Change:
    """No noise in one round."""
    return lambda noise, draw: np.zeros_like(noise) if draw.round == skipped else noise


def _without_a_round(plan: AuditPlan) -> Broken:
    """No noise in the last of the rounds that a black box would look at."""
    return unaided(partial(_but_one, int(plan.listener.rounds[-1])))(plan)


def _but_the_last(noise: FloatArray, draw: Draw) -> FloatArray:
    """No noise on the last coordinate."""
    noise = noise.copy()
    noise[..., -1] = 0.0
    return noise


def _silent(noise: FloatArray, draw: Draw) -> FloatArray:
    return np.zeros_like(noise)


def _within(most: float) -> Change:
    """Laplace noise, given that it is not beyond so many scales."""
    return in_scales(lambda noise: np.copysign(-np.log1p(-np.expm1(-np.abs(noise)) * np.expm1(-most)), noise))


def _beyond(least: float) -> Change:
    """Laplace noise, given that it is not within so many scales."""
    return in_scales(lambda noise: np.copysign(np.abs(noise) + least, noise))


def _clipped(most: float) -> Change:
    """What is beyond so many scales is said to be as many."""
    return in_scales(lambda noise: np.clip(noise, -most, most))


def _biased(generator: Generator, extra: float = 0.015, near: float = 0.1) -> Change:
    """A sampler with too much mass near zero, by `extra`, within `near` scales."""
    share = extra * np.exp(near)  # as much of what is moved would have been near anyway

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        moved = draw.rounded(generator.uniform(-near, near, noise.shape) * draw.scale)
        return np.where(generator.random(noise.shape) < share, moved, noise)

    return change


_support = partial(Mutant, family="conformance", kind="support and atoms", runs=MOST, quick=False)
_ATOM = 2.0**-41
"""About the probability of a single number."""


def _of_zeros(share: float, *, messages: bool) -> Mutant:
    kind, each = ("messages", each_message) if messages else ("numbers", each_number)
    breaks = noisy(lambda generator: sometimes(_silent, share, generator, messages=messages))
    name = f"{100 * share:g} % of {kind} without noise"
    return _support(name, "noise is left out at random", laplace_only(breaks), limit=each(event(share, _ATOM), share))


SUPPORT = (
    *(
        replace(_support(name, what, breaks), runs=SEEN, quick=True)
        for name, what, breaks in (
            ("first only", "noise on the first message alone", unaided(_first_only)),
            ("a round left out", "no noise in one round", _without_a_round),
            ("a coordinate left out", "no noise on the last coordinate", unaided(lambda: _but_the_last)),
        )
    ),
    replace(
        _support("biased sampler", "1.5 % too much mass near zero", lattice_only(noisy(_biased))),
        runs=SEEN,
        quick=True,
        base="ldp-dol, 60,000 numbers",
        limit=each_number(event(0.015 - math.expm1(-0.1), -math.expm1(-0.1))),
    ),
    _of_zeros(0.001, messages=True),
    _of_zeros(0.001, messages=False),
    _of_zeros(0.0001, messages=False),
    *(
        _support(
            f"none beyond {most:g} scales",
            "noise is bounded",
            laplace_only(unaided(partial(_within, most))),
            limit=each_number(-math.log(-math.expm1(-most))),
        )
        for most in (4.0, 7.5, 10.0)
    ),
    *(
        _support(
            f"clipped at {most:g} scales",
            "what is beyond is said to be as much",
            laplace_only(unaided(partial(_clipped, most))),
            limit=each_number(event(math.exp(-most), _ATOM), math.exp(-most)),
        )
        for most in (6.0, 10.0)
    ),
    _support(
        "none within 0.01 scales",
        "no small noise",
        laplace_only(unaided(partial(_beyond, 0.01))),
        limit=each_number(0.01),
    ),
)
"""Noise that is missing, bounded, or too often the same number."""
