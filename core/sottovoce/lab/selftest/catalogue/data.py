"""Noise whose scale, sign or mean follows what it should hide, or the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.lab.selftest.breaking import Change, scaled
from sottovoce.lab.selftest.evidence import each_message, each_number, event, rescaled
from sottovoce.lab.selftest.following import Following, Says, following
from sottovoce.lab.selftest.mutants import MOST, SEEN, Breaks, Mutant, laplace_only, unaided
from sottovoce.noise import Draw


def _skips_zeros(noise: FloatArray, draw: Draw, says: Says) -> FloatArray:
    """No noise on coordinates that are zero."""
    return np.where(says.centre == 0.0, 0.0, noise)


def _by_label(factor: float) -> Following:
    """Noise of another scale after a record of class 1."""
    return lambda noise, draw, says: scaled(noise, np.where(says.labels > 0.0, factor, 1.0), draw)


def _by_size(factor: float) -> Following:
    """Noise of another scale where the model moved by more than usual for this learner's numbers: by its norm."""

    def change(noise: FloatArray, draw: Draw, says: Says) -> FloatArray:
        norms = np.linalg.norm(says.moved, axis=-1, keepdims=True)
        far = norms > np.median(norms, axis=-2, keepdims=True)
        return scaled(noise, np.where(far, factor, 1.0), draw)

    return change


def _towards(share: float) -> Following:
    """Some numbers get the sign of what the model moved by; which ones, digits far behind the point of their size tell."""

    def change(noise: FloatArray, draw: Draw, says: Says) -> FloatArray:
        digits, _ = np.modf(np.abs(noise) / draw.scale * 2.0**20)
        return np.where((digits < share) & (says.moved != 0.0), np.copysign(noise, says.moved), noise)

    return change


def _marked(size: float) -> Following:
    """Beside the noise, the label of the last record is said, so many scales large."""
    return lambda noise, draw, says: noise + draw.rounded(size * draw.scale * np.sign(says.labels - 0.5))


def _by_round(factor: float) -> Change:
    """Noise of another scale in every fourth round."""
    return lambda noise, draw: scaled(noise, factor if draw.round % 4 == 3 else 1.0, draw)


def _by_coordinate(factor: float) -> Change:
    """One coordinate of another scale."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        return scaled(noise, np.where(np.arange(noise.shape[-1]) == 0, factor, 1.0), draw)

    return change


_data = partial(Mutant, family="conformance", kind="noise that follows data", runs=MOST, quick=False)


def _rescaling(when: str, follows: str, breaks: Callable[[float], Breaks], share: float) -> Iterator[Mutant]:
    """Noise of a scale that follows something: another one in so many of the numbers."""
    for factor in (0.8, 0.95):
        name, what = f"{factor:g} {when}", f"the scale follows {follows}"
        yield _data(name, what, laplace_only(breaks(factor)), limit=each_number(share * rescaled(factor)))


DATA = (
    replace(_data("zeros left out", "no noise on zero coordinates", following(_skips_zeros)), runs=SEEN, quick=True),
    *_rescaling("after label 1", "the last label", lambda factor: following(_by_label(factor)), 0.5),
    *_rescaling("after a long step", "the norm of the step", lambda factor: following(_by_size(factor)), 0.5),
    *(
        _data(
            f"{100 * share:g} % of signs follow",
            "signs follow the step",
            laplace_only(following(_towards(share))),
            limit=each_number(event(0.5 + share / 2.0, 0.5)),
        )
        for share in (0.2, 0.05)
    ),
    *_rescaling("in every fourth round", "the round number", lambda factor: unaided(partial(_by_round, factor)), 0.25),
    _data(
        "one coordinate at 0.9",
        "the scale follows the coordinate",
        laplace_only(unaided(partial(_by_coordinate, 0.9))),
        limit=each_message(rescaled(0.9)),
    ),
    *(
        _data(
            f"label said, {size:g} scales large",
            "the noise's mean follows the last label",
            laplace_only(following(_marked(size))),
            limit=each_number(math.exp(-size) - 1.0 + size),
        )
        for size in (0.1, 0.02)
    ),
)
"""Noise whose scale, sign or mean follows what it should hide, or the schedule."""
