"""Noise of about the right size and another law."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.random import Generator

from sottovoce.arrays import FloatArray
from sottovoce.lab.selftest.breaking import Change, in_scales, sometimes
from sottovoce.lab.selftest.evidence import each_number, event, shaped
from sottovoce.lab.selftest.mutants import MOST, SEEN, Mutant, laplace_only, noisy, unaided
from sottovoce.noise import Draw


def _gaussian(generator: Generator) -> Change:
    """Gaussian noise of the same variance."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        spherical = draw.law == "spherical"
        size, variance = (
            (1.0 / draw.scale, noise.shape[-1] + 1.0) if spherical else (draw.scale, 2.0)
        )  # of a coordinate
        return draw.rounded(generator.standard_normal(noise.shape) * np.sqrt(variance) * size)

    return change


def _drawn(sample: Callable[[Generator, tuple[int, ...]], FloatArray], generator: Generator) -> Change:
    """Noise of another law, in scales."""
    return in_scales(lambda noise: sample(generator, noise.shape))


def _logistic(generator: Generator, shape: tuple[int, ...]) -> FloatArray:
    return generator.logistic(0.0, _LOGISTIC, shape)


def _uniform(generator: Generator, shape: tuple[int, ...]) -> FloatArray:
    return generator.uniform(-2.0, 2.0, shape)


_LOGISTIC = 0.5 / math.log(2.0)
"""Scale of the logistic law whose mean size is 1."""


def _skewed(generator: Generator, positive: float) -> Change:
    """Too many numbers are positive."""
    share = 2.0 * positive - 1.0  # of what would be negative half the time
    return lambda noise, draw: np.where(generator.random(noise.shape) < share, np.abs(noise), noise)


def _shifted(by: float) -> Change:
    return in_scales(lambda noise: noise + by)


def _normal(sizes: FloatArray) -> FloatArray:
    density: FloatArray = np.exp(-(sizes**2) / 4.0) / math.sqrt(math.pi)
    return density


def _mixed(share: float) -> Callable[[FloatArray], FloatArray]:
    return lambda sizes: share * _normal(sizes) + (1.0 - share) * np.exp(-sizes)


def _of_logistic(sizes: FloatArray) -> FloatArray:
    density: FloatArray = 0.5 / _LOGISTIC / np.cosh(sizes / (2.0 * _LOGISTIC)) ** 2
    return density


_shape = partial(Mutant, family="conformance", kind="tails and shape", runs=MOST, quick=False)


def _of_gaussian(share: float) -> Mutant:
    breaks = noisy(lambda generator: sometimes(_gaussian(generator), share, generator))
    what = f"{100 * share:g} % of the numbers are Gaussian"
    return _shape(
        f"Gaussian in {100 * share:g} %", what, laplace_only(breaks), limit=each_number(shaped(_mixed(share)))
    )


SHAPE = (
    Mutant(
        "Gaussian",
        "Gaussian noise, equal variance",
        noisy(_gaussian),
        "conformance",
        SEEN,
        kind="tails and shape",
        limit=each_number(shaped(_normal)),
    ),
    *map(_of_gaussian, (0.5, 0.2, 0.1)),
    _shape(
        "logistic",
        "logistic noise, equal mean size",
        laplace_only(noisy(partial(_drawn, _logistic))),
        limit=each_number(shaped(_of_logistic)),
    ),
    _shape(
        "uniform",
        "uniform noise, equal mean size",
        laplace_only(noisy(partial(_drawn, _uniform))),
        limit=each_number(shaped(lambda sizes: np.where(sizes < 2.0, 0.5, 0.0))),
    ),
    *(
        _shape(
            f"{100 * positive:g} % positive",
            "signs are not fair",
            laplace_only(noisy(partial(_skewed, positive=positive))),
            limit=each_number(event(positive, 0.5)),
        )
        for positive in (0.6, 0.51)
    ),
    _shape(
        "centred at 0.02",
        "noise with a mean of 0.02 scales",
        laplace_only(unaided(partial(_shifted, 0.02))),
        limit=each_number(math.exp(-0.02) - 1.0 + 0.02),
    ),
)
"""Noise of the right size and another law."""
