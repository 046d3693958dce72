"""Published methods of gossip gradient descent as combinations of options, and their conditions.

A condition of the privacy guarantee raises an error. A condition of a convergence theorem only, or one that makes the
guarantee worse than its user may expect, gives a warning.
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
    """DSGD (Pu, Olshevsky, Paschalidis 2021) with noise on its messages; the own noise does not enter the own update.

    Steps and noise are those of LDP-DOL, as in the comparison of Chen & Wang.
    """

    name: Literal["dsgd"]
    form: Literal["adapt_then_combine", "combine_then_adapt", "consensus"] = "adapt_then_combine"
    """consensus: the gradient is taken at the own x, as in LDP-DOL."""
    step: StepSize = PowerStep(scale=1.0, exponent=0.77)
    """Step sizes alpha_t."""
    noise: NoiseScale = PowerNoise()
    """Scales rho_t of the noise of messages."""

    def build(self, context: RunContext) -> tuple[GossipDescent, tuple[RunWarning, ...]]:
        point: Point = "own" if self.form == "consensus" else "mixed"
        play: Point = "mixed" if self.form == "adapt_then_combine" else "own"
        algorithm = _descent(context, self.name, self.step, self.noise, "clean", point, play)
        return algorithm, _check(algorithm, context)

    def scale_noise(self, factors: tuple[float, ...]) -> DsgdSpec:
        return self.model_copy(update={"noise": self.noise.scale_by(factors)})


class _NoisyDescentSpec(AlgorithmSpec):
    """Gossip gradient descent that mixes its own value with the noise of its message."""

    step: StepSize = PowerStep(scale=1.0)
    """Step sizes alpha_t."""
    noise: NoiseScale = ZeroNoise()
    """Scales rho_t of the noise of messages."""
    gradient_at: Point = "mixed"
    """Point of the gradient: the own value, or the mean that is mixed from messages."""
    play: Point = "own"
    """Decision of a round: the own value, or the mean that is mixed from messages."""
    adjacency: DescentAdjacency = "record_use"
    """Privacy unit: one use of a record, or all records of a learner with any objective (Huang et al. 2015)."""

    def build(self, context: RunContext) -> tuple[GossipDescent, tuple[RunWarning, ...]]:
        algorithm = _descent(
            context, self.name, self.step, self.noise, "noised", self.gradient_at, self.play, self.adjacency
        )
        return algorithm, _check(algorithm, context)

    def scale_noise(self, factors: tuple[float, ...]) -> _NoisyDescentSpec:
        return self.model_copy(update={"noise": self.noise.scale_by(factors)})


class DolaSpec(_NoisyDescentSpec):
    """DOLA (Li, Zhou, Xiong, Wang, Wang 2018), with the noise of Chen & Wang's comparison."""

    name: Literal["dola"]
    noise: NoiseScale = HarmonicNoise(scale=0.35)


class DpdolaSpec(_NoisyDescentSpec):
    """DOLA with noise of scale 1, as in the comparison of Cheng, Liao, Li (2023)."""

    name: Literal["dpdola"]
    noise: NoiseScale = PowerNoise(sigma=math.sqrt(2.0), varsigma=0.0)


class PdopSpec(_NoisyDescentSpec):
    """PDOP (Huang, Mitra, Vaidya 2015): steps that fade faster than the noise protect a whole fixed objective."""

    name: Literal["pdop"]
    step: StepSize = GeometricStep(kind="geometric", ratio=0.95)
    noise: NoiseScale = GeometricNoise(scale=0.5, ratio=0.98)
    adjacency: DescentAdjacency = "learner"


class PdOgdSpec(_NoisyDescentSpec):
    """DOLA as in the comparison of Wang et al. (2025): `alpha_t = R/(G sqrt(t+1))`, calibrated noise, the public mix played."""

    name: Literal["pd-ogd"]
    step: StepSize = PowerStep()
    noise: NoiseScale = CalibratedNoise()
    play: Point = "mixed"


class DOgdSpec(AlgorithmSpec):
    """D-OGD (Yan et al. 2013): no noise, no privacy."""

    name: Literal["d-ogd"]
    step: StepSize = PowerStep()
    """Step sizes alpha_t."""

    def build(self, context: RunContext) -> tuple[GossipDescent, tuple[RunWarning, ...]]:
        algorithm = _descent(context, self.name, self.step, ZeroNoise(), "clean", "own", "own")
        return algorithm, _check(algorithm, context)

    def scale_noise(self, factors: tuple[float, ...]) -> DOgdSpec:
        raise SpecError("d-ogd has no noise; take pd-ogd")


def _descent(
    context: RunContext,
    name: str,
    step: StepSize,
    noise: NoiseScale,
    own_value: OwnValue,
    gradient_at: Point,
    play: Point,
    adjacency: DescentAdjacency = "record_use",
) -> GossipDescent:
    """Build the algorithm of a spec, not yet checked.

    Raises:
        AssumptionViolated: STEP_SCALE, STEP_MU, SIGMA, VARSIGMA_RANGE, GRAD_CHANGE or NOISE_EPSILON.
        SpecError: a list has another length than the number of learners.
    """
    without_noise = GossipDescent(
        name=name,
        dim=context.dim,
        rounds=context.rounds,
        step=(),
        noise=(),
        own_value=own_value,
        gradient_at=gradient_at,
        play=play,
        adjacency=adjacency,
        loss=context.loss,
        decision_set=context.decision_set,
        network=context.network,
    )
    regularity = without_noise.regularity()
    steps = (step.build_schedule(context, regularity),) * context.n_learners
    return replace(without_noise, step=steps, noise=noise.build_schedules(context, regularity, steps))


class DpsrSpec(AlgorithmSpec):
    """DPSR (Xiong et al. 2020), with the steps and the noise of the comparison of Cheng, Liao, Li (2023)."""

    name: Literal["dpsr"]
    step: StepSize = PowerStep(scale=1.0)
    """Step sizes alpha_t, before they are rescaled."""
    noise: NoiseScale = PowerNoise(sigma=math.sqrt(2.0), varsigma=0.0)
    """Scales rho_t of the noise of messages."""

    def build(self, context: RunContext) -> tuple[Dpsr, tuple[RunWarning, ...]]:
        unscaled = _descent(context, self.name, self.step, self.noise, "noised", "own", "own")
        shares = _own_shares(context)
        if (shares <= 0).any():
            text = "every learner needs a positive self weight, or its step is divided by 0"
            raise AssumptionViolated("SELF_WEIGHT", f"{text}, got a share of {shares.min()}")
        steps = tuple(
            partial(_divide, each, tuple(column)) for each, column in zip(unscaled.step, shares.T.tolist(), strict=True)
        )
        rescaled = replace(
            unscaled, step=steps, noise=self.noise.build_schedules(context, unscaled.regularity(), steps)
        )
        findings = _check(rescaled, context, doubly_stochastic=False)
        if min(context.rounds, context.network.horizon) > 1:
            text = "the weights change from round to round: rescaling by e corrects those of a fixed network only"
            findings = (*findings, RunWarning("NETWORK_FIXED", text))
        return Dpsr(rescaled, unscaled.step, context.n_learners), findings

    def scale_noise(self, factors: tuple[float, ...]) -> DpsrSpec:
        return self.model_copy(update={"noise": self.noise.scale_by(factors)})


def _divide(schedule: RoundSchedule, divisors: tuple[float, ...], t: int) -> float:
    """Divide by the divisor of the round, or by the last one after it."""
    return schedule(t) / divisors[min(t, len(divisors) - 1)]


def _own_shares(context: RunContext) -> FloatArray:
    """Compute `[e_t]_i` of every round and learner, `(rounds, learners)`: the diagonal of `W_{t-1} … W_0`."""
    context.require_finite_rounds("dpsr, which divides the steps of all rounds in advance,")
    if context.rounds * context.n_learners > MAX_ARRAY_ELEMENTS:
        raise MemoryError  # build_run explains it
    product, shares = np.eye(context.n_learners), np.empty((context.rounds, context.n_learners))
    for t in range(context.rounds):
        shares[t] = np.diag(product)
        product = context.network.mixing(t).matrix @ product
    return shares


# ---- conditions -------------------------------------------------------------------------------------------------------

_RESOLUTION = 2.0**-32
"""Smallest noise scale, in radii of the decision set, at which float64 rounding of messages does not disturb a replay."""


_ROUNDING = 1e-9
"""Tolerance of sums of mixing weights around 1."""


def _check(algorithm: GossipDescent, context: RunContext, *, doubly_stochastic: bool = True) -> tuple[RunWarning, ...]:
    """Raise an error for parameters without a guarantee or meaning, and return warnings for the rest.

    Args:
        doubly_stochastic: the method converges to the common optimum only if columns of weights also sum to 1.

    Raises:
        AssumptionViolated: NOISE_PARTIAL, NOISE_SCALE, GRAD_CHANGE or ROW_SUM.
    """
    last = algorithm.rounds - 1
    smallest = [min(noise(0), noise(last)) for noise in algorithm.noise]
    noisy = max(smallest) > 0
    text = "either every learner's noise scale is positive in every round, or all are 0"
    require(not noisy or min(smallest) > 0, "NOISE_PARTIAL", f"{text}, got smallest scales {smallest}")
    first = [noise(0) for noise in algorithm.noise]
    require(noisy or max(first) == 0, "NOISE_SCALE", f"noise must not fade to 0, got {first} in the first round")
    # A schedule is monotone, except the rescaled steps of DPSR, which calibrated noise follows.
    examined = (0, last) if doubly_stochastic else range(algorithm.rounds)
    require_scales(noise(t) for noise in algorithm.noise for t in examined)
    if noisy:
        require_gradient_change(algorithm.regularity().clipped_gradient_change)
    findings = [*_weight_findings(context, doubly_stochastic)]
    if noisy:
        findings += _noise_findings(algorithm, min(smallest))
    return tuple(findings)


def _weight_findings(context: RunContext, doubly_stochastic: bool) -> Iterator[RunWarning]:
    """Raise ROW_SUM, for the first round in which it holds; yield the warnings NOT_DOUBLY_STOCHASTIC and OWN_WEIGHT."""
    columns, own = 0.0, 0.0
    for t in range(min(context.rounds, context.network.horizon)):
        mixing = context.network.mixing(t)
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
    """Yield the warnings NOISE_FADES and NOISE_RESOLUTION."""
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
