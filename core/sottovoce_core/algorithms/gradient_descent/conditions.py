"""The conditions on gossip gradient descent.

What would void the privacy guarantee or leave it undefined is refused. What only voids a convergence theorem, or makes the
guarantee worse than its user may expect, is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sottovoce_core.algorithms.gradient_descent.algorithm import GossipDescent
from sottovoce_core.algorithms.setting import Caveat, Setting, require_scales
from sottovoce_core.errors import require

_RESOLUTION = 2.0**-32
"""A noise scale below so many radii of the decision set: float64 rounds messages by what a replay can notice."""


_ROUNDING = 1e-9
"""How far sums of mixing weights may be from 1."""


def require_change(change: float) -> None:
    """GRAD_CHANGE."""
    text = (
        "a privacy budget needs a finite bound on the per-record gradient change where the gradient is taken (a mix of"
    )
    text += " noisy messages may lie anywhere): set clip_norm, or choose a loss whose gradients are bounded"
    require(0 < change < math.inf, "GRAD_CHANGE", f"{text}, got {change}")


def checked(algorithm: GossipDescent, setting: Setting, *, doubly_stochastic: bool = True) -> tuple[Caveat, ...]:
    """Refuse what has no guarantee or no meaning, and report the rest.

    Args:
        doubly_stochastic: whether the method converges to the common optimum only if columns of weights sum to 1, too.

    Raises:
        CheckFailed: NOISE_SOME, NOISE_SCALE, GRAD_CHANGE or ROW_SUM.
    """
    last = algorithm.rounds - 1
    smallest = [min(noise(0), noise(last)) for noise in algorithm.noise]
    noisy = max(smallest) > 0
    text = "either every learner's noise scale is positive in every round, or all are 0"
    require(not noisy or min(smallest) > 0, "NOISE_SOME", f"{text}, got smallest scales {smallest}")
    some = [noise(0) for noise in algorithm.noise]
    require(noisy or max(some) == 0, "NOISE_SCALE", f"noise must not fade to 0, got {some} in the first round")
    # A schedule rises or falls throughout, but for the rescaled steps of DPSR, which calibrated noise follows.
    looked_at = (0, last) if doubly_stochastic else range(algorithm.rounds)
    require_scales(noise(t) for noise in algorithm.noise for t in looked_at)
    if noisy:
        require_change(algorithm.regularity().change)
    findings = [*_weight_findings(setting, doubly_stochastic)]
    if noisy:
        findings += _noise_findings(algorithm, min(smallest))
    return tuple(findings)


def _weight_findings(setting: Setting, doubly_stochastic: bool) -> Iterator[Caveat]:
    """ROW_SUM is refused; NOT_DOUBLY_STOCHASTIC and OWN_WEIGHT are reported, for the first round in which they hold."""
    columns, own = 0.0, 0.0
    for t in range(min(setting.rounds, setting.network.horizon)):
        mixing = setting.network.at(t)
        rows = mixing.matrix.sum(axis=1)
        worst = int(np.argmax(np.abs(rows - 1.0)))
        text = "every learner's mixing weights, its own included, must sum to 1"
        require(abs(rows[worst] - 1.0) <= _ROUNDING, "ROW_SUM", f"{text}, got {rows[worst]} for {worst} in round {t}")
        columns = max(columns, float(np.abs(mixing.matrix.sum(axis=0) - 1.0).max()))
        own = min(own, float(mixing.own.min()))
    if doubly_stochastic and columns > _ROUNDING:
        text = "mixing weights are not doubly stochastic: learners agree on an optimum that weighs them unequally"
        yield Caveat("NOT_DOUBLY_STOCHASTIC", f"{text}, got column sums up to {columns:.3g} away from 1")
    if own < 0:
        text = "a negative own weight: mixing may amplify instead of averaging; lower the coupling weights"
        yield Caveat("OWN_WEIGHT", f"{text}, got {own:.6g}")


def _noise_findings(algorithm: GossipDescent, smallest: float) -> Iterator[Caveat]:
    """NOISE_FADES, NOISE_RESOLUTION."""
    last, step, noise = algorithm.rounds - 1, algorithm.step[0], algorithm.noise[0]
    if last > 1 and step(last - 1) / noise(last) > step(0) / noise(1) * (1 + _ROUNDING):
        text = "the noise fades faster than the steps: later records cost more, without a bound for ever longer runs"
        yield Caveat("NOISE_FADES", f"{text}, got step/noise {step(last - 1) / noise(last):.3g} in the last round")
    radius = algorithm.decision_set.largest_norm(algorithm.dim)
    if smallest < _RESOLUTION * radius:
        text = (
            "the noise falls near float64's resolution of messages, where the exact loss of a transcript is unreliable"
        )
        yield Caveat("NOISE_RESOLUTION", f"{text}, got scale {smallest:.3g} for radius {radius}; stop earlier")
