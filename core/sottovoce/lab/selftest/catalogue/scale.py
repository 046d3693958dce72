"""Noise of another scale: in all numbers, in those of one learner, or from run to run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.random import Generator

from sottovoce.arrays import FloatArray
from sottovoce.lab.selftest.breaking import Change, scaled, times
from sottovoce.lab.selftest.evidence import each_number, rescaled
from sottovoce.lab.selftest.mutants import MOST, SEEN, Mutant, altered, noisy, unaided, where
from sottovoce.noise import Draw


def _one_learner(factor: float) -> Change:
    """The first learner's scale is another one."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        factors = np.ones((len(noise), *(1 for _ in noise.shape[1:])))
        factors[0] = factor
        return scaled(noise, factors, draw)

    return change


def _by_run(generator: Generator, spread: float) -> Change:
    """Every run has a scale of its own, equally often too large and too small by as much."""
    factors: dict[int, FloatArray] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        replicas = noise.shape[-2]
        own = factors.setdefault(replicas, 1.0 + spread * generator.choice((-1.0, 1.0), (replicas, 1)))
        return scaled(noise, own, draw)

    return change


_twice_zeta = where(lambda plan: plan.run.spec.algorithm.name == "dvp", "only dvp has a rate of alpha_hat")(
    altered(lambda dvp: replace(dvp, calibration=replace(dvp.calibration, scale="printed")))
)

_scale = partial(Mutant, family="conformance", kind="scale", runs=MOST, quick=False)


def _of_scale(factor: float, name: str, what: str = "") -> Mutant:
    breaks = unaided(partial(times, factor))
    return _scale(name, what or f"noise of {factor:g} of its scale", breaks, limit=each_number(rescaled(factor)))


SCALE = (
    replace(_of_scale(0.5, "half the noise", "noise of half its scale"), runs=SEEN, quick=True),
    replace(_of_scale(0.9, "0.9 of the scale"), runs=SEEN, quick=True),
    *(_of_scale(factor, f"{factor:g} of the scale") for factor in (1.1, 0.97, 0.99, 0.997)),
    _scale("one learner at 0.95", "0.95 of its scale, one learner", unaided(partial(_one_learner, 0.95))),
    *(
        _scale(f"runs vary by {100 * spread:g} %", "runs of another scale", noisy(partial(_by_run, spread=spread)))
        for spread in (0.2, 0.05)
    ),
    Mutant(
        "dvp, twice zeta", "zeta is alpha_hat: half the noise", _twice_zeta, "likelihood", 4000, "dvp", kind="scale"
    ),
)
"""Noise of another scale."""
