"""The published methods of gossip gradient descent, as choices of its parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from sottovoce.algorithms.gradient_descent.accounting import (
    Adjacency,
    Divided,
    Following,
    Geometric,
    Harmonic,
    Power,
    Schedule,
)
from sottovoce.algorithms.gradient_descent.algorithm import GossipDescent, OwnValue, Point
from sottovoce.algorithms.gradient_descent.conditions import checked, require_change
from sottovoce.algorithms.gradient_descent.dpsr import Dpsr
from sottovoce.algorithms.parameters import AlgorithmSpec
from sottovoce.algorithms.per_learner import PerLearner, divided, times
from sottovoce.algorithms.setting import Finding, Setting
from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed, SpecError, require
from sottovoce.registry import Positive, Section

# ---- steps and noise -------------------------------------------------------------------------------------


class PowerStep(Section):
    """`alpha_t = scale / (t+1)^exponent`."""

    kind: Literal["power"] = "power"
    scale: Positive | None = None
    """None: R/G, radius of the decision set over bound on a record's gradient."""
    exponent: Annotated[float, Field(ge=0, le=10)] = 0.5


class GeometricStep(Section):
    """`alpha_t = scale ratio^t`."""

    kind: Literal["geometric"]
    scale: Positive = 1.0
    ratio: Annotated[float, Field(gt=0, lt=1)]


class HarmonicStep(Section):
    """`alpha_t = scale / (mu (t + shift))`, for strongly convex losses."""

    kind: Literal["harmonic"]
    scale: Positive = 1.0
    mu: Positive | None = None
    """Strong convexity (None: the loss's ridge)."""
    shift: Positive = 1.0


Step = Annotated[PowerStep | GeometricStep | HarmonicStep, Field(discriminator="kind")]


class NoNoise(Section):
    """Messages are said as they are: no guarantee."""

    kind: Literal["none"] = "none"


class PowerNoise(Section):
    """`rho_t = sigma/sqrt(2) (t+1)^varsigma`, as in LDP-DOL; sigma 0: no noise."""

    kind: Literal["power"] = "power"
    sigma: PerLearner = 1.0
    varsigma: PerLearner = 0.1


class GeometricNoise(Section):
    """`rho_t = scale ratio^t`."""

    kind: Literal["geometric"] = "geometric"
    scale: PerLearner
    ratio: Annotated[float, Field(gt=0, lt=1)]


class HarmonicNoise(Section):
    """`rho_t = scale / (t+1)`."""

    kind: Literal["harmonic"] = "harmonic"
    scale: PerLearner


class CalibratedNoise(Section):
    """The scale at which a record costs `epsilon` in the first message that shows it: proportional to the step before it.

    `charged: every_round` is what a T-fold composition asks for: T times the noise.
    """

    kind: Literal["calibrated"] = "calibrated"
    epsilon: PerLearner = 1.0
    charged: Literal["once", "every_round"] = "once"


NoiseScale = Annotated[
    NoNoise | PowerNoise | GeometricNoise | HarmonicNoise | CalibratedNoise, Field(discriminator="kind")
]


def louder(noise: NoiseScale, factors: tuple[float, ...]) -> NoiseScale:
    """The same noise, each learner's multiplied.

    Raises:
        SpecError: there is none.
    """
    match noise:
        case PowerNoise():
            return noise.model_copy(update={"sigma": times(noise.sigma, factors)})
        case GeometricNoise() | HarmonicNoise():
            return noise.model_copy(update={"scale": times(noise.scale, factors)})
        case CalibratedNoise():
            return noise.model_copy(update={"epsilon": divided(noise.epsilon, factors)})
        case NoNoise():
            raise SpecError(
                "algorithm.noise.kind must be power, geometric, harmonic or calibrated to be scaled, got none"
            )


# ---- the methods -----------------------------------------------------------------------------------------


class DsgdSpec(AlgorithmSpec):
    """DSGD (Pu, Olshevsky, Paschalidis 2021) with noise on its messages; the own noise stays out of the own update.

    The steps and the noise that Chen & Wang compare it with are those of LDP-DOL.
    """

    name: Literal["dsgd"]
    form: Literal["adapt_then_combine", "combine_then_adapt", "consensus"] = "adapt_then_combine"
    """consensus: the gradient is taken at the own x, as in LDP-DOL."""
    step: Step = PowerStep(scale=1.0, exponent=0.77)
    noise: NoiseScale = PowerNoise()

    def build(self, setting: Setting) -> tuple[GossipDescent, tuple[Finding, ...]]:
        point: Point = "own" if self.form == "consensus" else "mixed"
        play: Point = "mixed" if self.form == "adapt_then_combine" else "own"
        algorithm = descent(setting, self.name, self.step, self.noise, "clean", point, play)
        return algorithm, checked(algorithm, setting)

    def noisier(self, factors: tuple[float, ...]) -> DsgdSpec:
        return self.model_copy(update={"noise": louder(self.noise, factors)})


class NoisyDescentSpec(AlgorithmSpec):
    """Gossip gradient descent that mixes its own value as it was said."""

    step: Step = PowerStep(scale=1.0)
    noise: NoiseScale = NoNoise()
    gradient_at: Point = "mixed"
    play: Point = "own"
    adjacency: Adjacency = "record"

    def build(self, setting: Setting) -> tuple[GossipDescent, tuple[Finding, ...]]:
        algorithm = descent(
            setting, self.name, self.step, self.noise, "said", self.gradient_at, self.play, self.adjacency
        )
        return algorithm, checked(algorithm, setting)

    def noisier(self, factors: tuple[float, ...]) -> NoisyDescentSpec:
        return self.model_copy(update={"noise": louder(self.noise, factors)})


class DolaSpec(NoisyDescentSpec):
    """DOLA (Li, Zhou, Xiong, Wang, Wang 2018), with the noise that Chen & Wang give it."""

    name: Literal["dola"]
    noise: NoiseScale = HarmonicNoise(scale=0.35)


class DpdolaSpec(NoisyDescentSpec):
    """DOLA as Cheng, Liao, Li (2023) compare with it: noise of scale 1."""

    name: Literal["dpdola"]
    noise: NoiseScale = PowerNoise(sigma=math.sqrt(2.0), varsigma=0.0)


class PdopSpec(NoisyDescentSpec):
    """PDOP (Huang, Mitra, Vaidya 2015): steps that fade faster than the noise protect a whole fixed objective."""

    name: Literal["pdop"]
    step: Step = GeometricStep(kind="geometric", ratio=0.95)
    noise: NoiseScale = GeometricNoise(scale=0.5, ratio=0.98)
    adjacency: Adjacency = "learner"


class PdOgdSpec(NoisyDescentSpec):
    """DOLA as Wang et al. (2025) compare with it: `alpha_t = R/(G sqrt(t+1))`, noise by the budget, the public mix played."""

    name: Literal["pd-ogd"]
    step: Step = PowerStep()
    noise: NoiseScale = CalibratedNoise()
    play: Point = "mixed"


class DOgdSpec(AlgorithmSpec):
    """D-OGD (Yan et al. 2013): no noise, no privacy."""

    name: Literal["d-ogd"]
    step: Step = PowerStep()

    def build(self, setting: Setting) -> tuple[GossipDescent, tuple[Finding, ...]]:
        algorithm = descent(setting, self.name, self.step, NoNoise(), "clean", "own", "own")
        return algorithm, checked(algorithm, setting)

    def noisier(self, factors: tuple[float, ...]) -> DOgdSpec:
        raise SpecError("d-ogd has no noise; take pd-ogd")


def descent(
    setting: Setting,
    name: str,
    step: Step,
    noise: NoiseScale,
    own_value: OwnValue,
    gradient_at: Point,
    play: Point,
    adjacency: Adjacency = "record",
) -> GossipDescent:
    """The algorithm that a spec describes, not yet checked.

    Raises:
        CheckFailed: STEP_SCALE, STEP_MU, SIGMA, VARSIGMA_RANGE, GRAD_CHANGE or NOISE_EPSILON.
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
    steps = (_step(step, silent),) * setting.n_learners
    return replace(silent, step=steps, noise=noises(noise, setting, silent, steps))


def _step(step: Step, algorithm: GossipDescent) -> Schedule:
    match step:
        case GeometricStep():
            return Geometric(step.scale, step.ratio)
        case HarmonicStep():
            mu = step.mu or algorithm.loss.ridge
            require(mu > 0, "STEP_MU", f"a harmonic step needs mu, or a loss with a positive ridge, got ridge={mu}")
            return Harmonic(step.scale / mu, step.shift)
        case PowerStep():
            radius = algorithm.decision_set.largest_norm(algorithm.dim)
            bound = algorithm.constants().clip_norm + algorithm.loss.ridge * radius
            text = (
                "a step without a scale is R/G, which needs a finite bound G on gradients: set step.scale or clip_norm"
            )
            require(step.scale is not None or 0 < bound < math.inf, "STEP_SCALE", f"{text}, got G={bound}")
            return Power(step.scale or radius / bound, -step.exponent)


def noises(
    noise: NoiseScale, setting: Setting, algorithm: GossipDescent, steps: tuple[Schedule, ...]
) -> tuple[Schedule, ...]:
    """The noise scales of every learner, with its own steps.

    Raises:
        CheckFailed: SIGMA, VARSIGMA_RANGE, GRAD_CHANGE or NOISE_EPSILON.
        SpecError: a list of another length than the number of learners.
    """
    match noise:
        case NoNoise():
            return (Power(0.0, 0.0),) * setting.n_learners
        case PowerNoise():
            growth = setting.per_learner(noise.varsigma, "algorithm.noise.varsigma")
            for value in growth:
                require(-1 <= value <= 1, "VARSIGMA_RANGE", f"varsigma must lie in [-1, 1], got {value}")
            sizes = _sizes(setting, noise.sigma, "sigma")
            return tuple(Power(s / math.sqrt(2.0), v) for s, v in zip(sizes, growth, strict=True))
        case GeometricNoise():
            return tuple(Geometric(scale, noise.ratio) for scale in _sizes(setting, noise.scale, "scale"))
        case HarmonicNoise():
            return tuple(Harmonic(scale, 1.0) for scale in _sizes(setting, noise.scale, "scale"))
        case CalibratedNoise():
            change = algorithm.constants().change
            require_change(change)
            budgets = _sizes(setting, noise.epsilon, "epsilon")
            factors = [_factor(each, noise.charged, change, algorithm) for each in budgets]
            return tuple(Following(step, factor) for step, factor in zip(steps, factors, strict=True))


def _sizes(setting: Setting, value: PerLearner, field: str) -> tuple[float, ...]:
    sizes = setting.per_learner(value, f"algorithm.noise.{field}")
    for size in sizes:
        require(0 <= size < math.inf, "SIGMA", f"noise.{field} must be finite and at least 0, got {size}")
    return sizes


def _factor(epsilon: float, charged: str, change: float, algorithm: GossipDescent) -> float:
    """`sqrt(n) C / epsilon`, less what the lattice costs."""
    lattice = algorithm.dim * 2.0**-40
    share = epsilon / (algorithm.rounds if charged == "every_round" else 1) - lattice
    text = f"noise.epsilon must be above {lattice:.3g} a message, what rounding to the lattice costs"
    require(share > 0, "NOISE_EPSILON", f"{text}, got {epsilon}")
    return math.sqrt(algorithm.dim) * change / share


# ---- checks ----------------------------------------------------------------------------------------------


class DpsrSpec(AlgorithmSpec):
    """DPSR (Xiong et al. 2020), with the steps and the noise that Cheng, Liao, Li (2023) compare it with."""

    name: Literal["dpsr"]
    step: Step = PowerStep(scale=1.0)
    noise: NoiseScale = PowerNoise(sigma=math.sqrt(2.0), varsigma=0.0)

    def build(self, setting: Setting) -> tuple[Dpsr, tuple[Finding, ...]]:
        plain = descent(setting, self.name, self.step, self.noise, "said", "own", "own")
        shares = own_shares(setting)
        if (shares <= 0).any():
            text = "every learner needs a positive self weight, or its step is divided by 0"
            raise CheckFailed("SELF_WEIGHT", f"{text}, got a share of {shares.min()}")
        steps = tuple(Divided(each, tuple(column)) for each, column in zip(plain.step, shares.T.tolist(), strict=True))
        rescaled = replace(plain, step=steps, noise=noises(self.noise, setting, plain, steps))
        findings = checked(rescaled, setting, doubly_stochastic=False)
        if min(setting.rounds, setting.network.horizon) > 1:
            text = "the weights change from round to round: rescaling by e corrects those of a fixed network only"
            findings = (*findings, Finding("NETWORK_FIXED", text))
        return Dpsr(rescaled, plain.step, setting.n_learners), findings

    def noisier(self, factors: tuple[float, ...]) -> DpsrSpec:
        return self.model_copy(update={"noise": louder(self.noise, factors)})


def own_shares(setting: Setting) -> FloatArray:
    """`[e_t]_i` of every round and learner, `(rounds, learners)`: the diagonal of `W_{t-1} … W_0`."""
    product, shares = np.eye(setting.n_learners), np.empty((setting.rounds, setting.n_learners))
    for t in range(setting.rounds):
        shares[t] = np.diag(product)
        product = setting.network.at(t).matrix @ product
    return shares
