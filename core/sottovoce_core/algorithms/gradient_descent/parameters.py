"""The published methods of gossip gradient descent, as choices of its parts, and the conditions on them.

What would void the privacy guarantee or leave it undefined is refused. What only voids a convergence theorem, or makes the
guarantee worse than its user may expect, is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from sottovoce_core.algorithms.gradient_descent.accounting import DescentAdjacency, RoundSchedule
from sottovoce_core.algorithms.gradient_descent.algorithm import Dpsr, GossipDescent, OwnValue, Point
from sottovoce_core.algorithms.gradient_descent.schedules import (
    CalibratedNoise,
    GeometricNoise,
    GeometricStep,
    HarmonicNoise,
    NoiseScale,
    PowerNoise,
    PowerStep,
    StepSize,
    ZeroNoise,
    require_gradient_change,
)
from sottovoce_core.algorithms.run_context import AlgorithmSpec, RunContext, RunWarning, require_scales
from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, FloatArray
from sottovoce_core.errors import AssumptionViolated, SpecError, require


class DsgdSpec(AlgorithmSpec):
    """DSGD (Pu, Olshevsky, Paschalidis 2021) with noise on its messages; the own noise stays out of the own update.

    The steps and the noise that Chen & Wang compare it with are those of LDP-DOL.
    """

    name: Literal["dsgd"]
    form: Literal["adapt_then_combine", "combine_then_adapt", "consensus"] = "adapt_then_combine"
    """consensus: the gradient is taken at the own x, as in LDP-DOL."""
    step: StepSize = PowerStep(scale=1.0, exponent=0.77)
    noise: NoiseScale = PowerNoise()

    def build(self, context: RunContext) -> tuple[GossipDescent, tuple[RunWarning, ...]]:
        point: Point = "own" if self.form == "consensus" else "mixed"
        play: Point = "mixed" if self.form == "adapt_then_combine" else "own"
        algorithm = _descent(context, self.name, self.step, self.noise, "clean", point, play)
        return algorithm, _checked(algorithm, context)

    def scale_noise(self, factors: tuple[float, ...]) -> DsgdSpec:
        return self.model_copy(update={"noise": self.noise.scale_by(factors)})


class _NoisyDescentSpec(AlgorithmSpec):
    """Gossip gradient descent that mixes its own value as it was said."""

    step: StepSize = PowerStep(scale=1.0)
    noise: NoiseScale = ZeroNoise()
    gradient_at: Point = "mixed"
    play: Point = "own"
    adjacency: DescentAdjacency = "record_use"

    def build(self, context: RunContext) -> tuple[GossipDescent, tuple[RunWarning, ...]]:
        algorithm = _descent(
            context, self.name, self.step, self.noise, "said", self.gradient_at, self.play, self.adjacency
        )
        return algorithm, _checked(algorithm, context)

    def scale_noise(self, factors: tuple[float, ...]) -> _NoisyDescentSpec:
        return self.model_copy(update={"noise": self.noise.scale_by(factors)})


class DolaSpec(_NoisyDescentSpec):
    """DOLA (Li, Zhou, Xiong, Wang, Wang 2018), with the noise that Chen & Wang give it."""

    name: Literal["dola"]
    noise: NoiseScale = HarmonicNoise(scale=0.35)


class DpdolaSpec(_NoisyDescentSpec):
    """DOLA as Cheng, Liao, Li (2023) compare with it: noise of scale 1."""

    name: Literal["dpdola"]
    noise: NoiseScale = PowerNoise(sigma=math.sqrt(2.0), varsigma=0.0)


class PdopSpec(_NoisyDescentSpec):
    """PDOP (Huang, Mitra, Vaidya 2015): steps that fade faster than the noise protect a whole fixed objective."""

    name: Literal["pdop"]
    step: StepSize = GeometricStep(kind="geometric", ratio=0.95)
    noise: NoiseScale = GeometricNoise(scale=0.5, ratio=0.98)
    adjacency: DescentAdjacency = "learner"


class PdOgdSpec(_NoisyDescentSpec):
    """DOLA as Wang et al. (2025) compare with it: `alpha_t = R/(G sqrt(t+1))`, noise by the budget, the public mix played."""

    name: Literal["pd-ogd"]
    step: StepSize = PowerStep()
    noise: NoiseScale = CalibratedNoise()
    play: Point = "mixed"


class DOgdSpec(AlgorithmSpec):
    """D-OGD (Yan et al. 2013): no noise, no privacy."""

    name: Literal["d-ogd"]
    step: StepSize = PowerStep()

    def build(self, context: RunContext) -> tuple[GossipDescent, tuple[RunWarning, ...]]:
        algorithm = _descent(context, self.name, self.step, ZeroNoise(), "clean", "own", "own")
        return algorithm, _checked(algorithm, context)

    def scale_noise(self, factors: tuple[float, ...]) -> DOgdSpec:
        raise SpecError("d-ogd has no noise; take pd-ogd")


def _descent(
    setting: RunContext,
    name: str,
    step: StepSize,
    noise: NoiseScale,
    own_value: OwnValue,
    gradient_at: Point,
    play: Point,
    adjacency: DescentAdjacency = "record_use",
) -> GossipDescent:
    """The algorithm that a spec describes, not yet checked.

    Raises:
        AssumptionViolated: STEP_SCALE, STEP_MU, SIGMA, VARSIGMA_RANGE, GRAD_CHANGE or NOISE_EPSILON.
        SpecError: a list of another length than the number of learners.
    """
    silent = GossipDescent(
        name=name,
        dim=setting.dim,
        rounds=setting.rounds,
        step=(),
        noise=(),
        own_value=own_value,
        gradient_at=gradient_at,
        play=play,
        adjacency=adjacency,
        loss=setting.loss,
        decision_set=setting.decision_set,
        network=setting.network,
    )
    known = silent.regularity()
    steps = (step.build_schedule(setting, known),) * setting.n_learners
    return replace(silent, step=steps, noise=noise.build_schedules(setting, known, steps))


class DpsrSpec(AlgorithmSpec):
    """DPSR (Xiong et al. 2020), with the steps and the noise that Cheng, Liao, Li (2023) compare it with."""

    name: Literal["dpsr"]
    step: StepSize = PowerStep(scale=1.0)
    noise: NoiseScale = PowerNoise(sigma=math.sqrt(2.0), varsigma=0.0)

    def build(self, context: RunContext) -> tuple[Dpsr, tuple[RunWarning, ...]]:
        plain = _descent(context, self.name, self.step, self.noise, "said", "own", "own")
        shares = _own_shares(context)
        if (shares <= 0).any():
            text = "every learner needs a positive self weight, or its step is divided by 0"
            raise AssumptionViolated("SELF_WEIGHT", f"{text}, got a share of {shares.min()}")
        steps = tuple(
            partial(_divided, each, tuple(column)) for each, column in zip(plain.step, shares.T.tolist(), strict=True)
        )
        rescaled = replace(plain, step=steps, noise=self.noise.build_schedules(context, plain.regularity(), steps))
        findings = _checked(rescaled, context, doubly_stochastic=False)
        if min(context.rounds, context.network.horizon) > 1:
            text = "the weights change from round to round: rescaling by e corrects those of a fixed network only"
            findings = (*findings, RunWarning("NETWORK_FIXED", text))
        return Dpsr(rescaled, plain.step, context.n_learners), findings

    def scale_noise(self, factors: tuple[float, ...]) -> DpsrSpec:
        return self.model_copy(update={"noise": self.noise.scale_by(factors)})


def _divided(schedule: RoundSchedule, divisors: tuple[float, ...], t: int) -> float:
    """By a number of each round; after the last of them by the last."""
    return schedule(t) / divisors[min(t, len(divisors) - 1)]


def _own_shares(setting: RunContext) -> FloatArray:
    """`[e_t]_i` of every round and learner, `(rounds, learners)`: the diagonal of `W_{t-1} … W_0`."""
    setting.require_finite_rounds("dpsr, which divides the steps of all rounds beforehand,")
    if setting.rounds * setting.n_learners > MAX_ARRAY_ELEMENTS:
        raise MemoryError  # build_run says so in words
    product, shares = np.eye(setting.n_learners), np.empty((setting.rounds, setting.n_learners))
    for t in range(setting.rounds):
        shares[t] = np.diag(product)
        product = setting.network.mixing(t).matrix @ product
    return shares


# ---- conditions -------------------------------------------------------------------------------------------------------

_RESOLUTION = 2.0**-32
"""A noise scale below so many radii of the decision set: float64 rounds messages by what a replay can notice."""


_ROUNDING = 1e-9
"""How far sums of mixing weights may be from 1."""


def _checked(
    algorithm: GossipDescent, setting: RunContext, *, doubly_stochastic: bool = True
) -> tuple[RunWarning, ...]:
    """Refuse what has no guarantee or no meaning, and report the rest.

    Args:
        doubly_stochastic: whether the method converges to the common optimum only if columns of weights sum to 1, too.

    Raises:
        AssumptionViolated: NOISE_PARTIAL, NOISE_SCALE, GRAD_CHANGE or ROW_SUM.
    """
    last = algorithm.rounds - 1
    smallest = [min(noise(0), noise(last)) for noise in algorithm.noise]
    noisy = max(smallest) > 0
    text = "either every learner's noise scale is positive in every round, or all are 0"
    require(not noisy or min(smallest) > 0, "NOISE_PARTIAL", f"{text}, got smallest scales {smallest}")
    some = [noise(0) for noise in algorithm.noise]
    require(noisy or max(some) == 0, "NOISE_SCALE", f"noise must not fade to 0, got {some} in the first round")
    # A schedule rises or falls throughout, but for the rescaled steps of DPSR, which calibrated noise follows.
    looked_at = (0, last) if doubly_stochastic else range(algorithm.rounds)
    require_scales(noise(t) for noise in algorithm.noise for t in looked_at)
    if noisy:
        require_gradient_change(algorithm.regularity().clipped_gradient_change)
    findings = [*_weight_findings(setting, doubly_stochastic)]
    if noisy:
        findings += _noise_findings(algorithm, min(smallest))
    return tuple(findings)


def _weight_findings(setting: RunContext, doubly_stochastic: bool) -> Iterator[RunWarning]:
    """ROW_SUM is refused; NOT_DOUBLY_STOCHASTIC and OWN_WEIGHT are reported, for the first round in which they hold."""
    columns, own = 0.0, 0.0
    for t in range(min(setting.rounds, setting.network.horizon)):
        mixing = setting.network.mixing(t)
        rows = mixing.matrix.sum(axis=1)
        worst = int(np.argmax(np.abs(rows - 1.0)))
        text = "every learner's mixing weights, its own included, must sum to 1"
        require(abs(rows[worst] - 1.0) <= _ROUNDING, "ROW_SUM", f"{text}, got {rows[worst]} for {worst} in round {t}")
        columns = max(columns, float(np.abs(mixing.matrix.sum(axis=0) - 1.0).max()))
        own = min(own, float(mixing.own_weights.min()))
    if doubly_stochastic and columns > _ROUNDING:
        text = "mixing weights are not doubly stochastic: learners agree on an optimum that weighs them unequally"
        yield RunWarning("NOT_DOUBLY_STOCHASTIC", f"{text}, got column sums up to {columns:.3g} away from 1")
    if own < 0:
        text = "a negative own weight: mixing may amplify instead of averaging; lower the coupling weights"
        yield RunWarning("OWN_WEIGHT", f"{text}, got {own:.6g}")


def _noise_findings(algorithm: GossipDescent, smallest: float) -> Iterator[RunWarning]:
    """NOISE_FADES, NOISE_RESOLUTION."""
    last, step, noise = algorithm.rounds - 1, algorithm.step[0], algorithm.noise[0]
    if last > 1 and step(last - 1) / noise(last) > step(0) / noise(1) * (1 + _ROUNDING):
        text = "the noise fades faster than the steps: later records cost more, without a bound for ever longer runs"
        yield RunWarning("NOISE_FADES", f"{text}, got step/noise {step(last - 1) / noise(last):.3g} in the last round")
    radius = algorithm.decision_set.largest_norm(algorithm.dim)
    if smallest < _RESOLUTION * radius:
        text = (
            "the noise falls near float64's resolution of messages, where the exact loss of a transcript is unreliable"
        )
        yield RunWarning("NOISE_RESOLUTION", f"{text}, got scale {smallest:.3g} for radius {radius}; stop earlier")
