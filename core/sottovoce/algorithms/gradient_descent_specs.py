"""The published methods of gossip gradient descent, as choices of its parts, and the conditions on their parameters.

What would void the privacy guarantee or leave it undefined is refused. What only voids a convergence theorem, or makes the
guarantee worse than its user may expect, is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from sottovoce.algorithms.gradient_descent import GossipDescent, OwnValue, Point
from sottovoce.errors import CheckFailed, SpecError
from sottovoce.privacy.gradient_descent import Adjacency, Following, Geometric, Harmonic, Power, Schedule
from sottovoce.setting import Finding, Setting
from sottovoce.spec import AlgorithmSpec, PerLearner, Positive, Section, divided, times

SMALLEST_SCALE = 2.0**-900
"""Below it the lattice of a message would leave the range of float64."""

RESOLUTION = 2.0**-32
"""A noise scale below so many radii of the decision set: float64 rounds messages by what a replay can notice."""

ROUNDING = 1e-9
"""How far sums of mixing weights may be from 1."""


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
            _require(mu > 0, "STEP_MU", f"a harmonic step needs mu, or a loss with a positive ridge, got ridge={mu}")
            return Harmonic(step.scale / mu, step.shift)
        case PowerStep():
            radius = algorithm.decision_set.radius(algorithm.dim)
            bound = algorithm.constants().clip_norm + algorithm.loss.ridge * radius
            text = (
                "a step without a scale is R/G, which needs a finite bound G on gradients: set step.scale or clip_norm"
            )
            _require(step.scale is not None or 0 < bound < math.inf, "STEP_SCALE", f"{text}, got G={bound}")
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
                _require(-1 <= value <= 1, "VARSIGMA_RANGE", f"varsigma must lie in [-1, 1], got {value}")
            sizes = _sizes(setting, noise.sigma, "sigma")
            return tuple(Power(s / math.sqrt(2.0), v) for s, v in zip(sizes, growth, strict=True))
        case GeometricNoise():
            return tuple(Geometric(scale, noise.ratio) for scale in _sizes(setting, noise.scale, "scale"))
        case HarmonicNoise():
            return tuple(Harmonic(scale, 1.0) for scale in _sizes(setting, noise.scale, "scale"))
        case CalibratedNoise():
            change = algorithm.constants().change
            _require_change(change)
            budgets = _sizes(setting, noise.epsilon, "epsilon")
            factors = [_factor(each, noise.charged, change, algorithm) for each in budgets]
            return tuple(Following(step, factor) for step, factor in zip(steps, factors, strict=True))


def _sizes(setting: Setting, value: PerLearner, field: str) -> tuple[float, ...]:
    sizes = setting.per_learner(value, f"algorithm.noise.{field}")
    for size in sizes:
        _require(0 <= size < math.inf, "SIGMA", f"noise.{field} must be finite and at least 0, got {size}")
    return sizes


def _factor(epsilon: float, charged: str, change: float, algorithm: GossipDescent) -> float:
    """`sqrt(n) C / epsilon`, less what the lattice costs."""
    lattice = algorithm.dim * 2.0**-40
    share = epsilon / (algorithm.rounds if charged == "every_round" else 1) - lattice
    text = f"noise.epsilon must be above {lattice:.3g} a message, what rounding to the lattice costs"
    _require(share > 0, "NOISE_EPSILON", f"{text}, got {epsilon}")
    return math.sqrt(algorithm.dim) * change / share


# ---- checks ----------------------------------------------------------------------------------------------


def _require(holds: bool, code: str, text: str) -> None:
    if not holds:
        raise CheckFailed(code, text)


def _require_change(change: float) -> None:
    text = (
        "a privacy budget needs a finite bound on the per-record gradient change where the gradient is taken (a mix of"
    )
    text += " noisy messages may lie anywhere): set clip_norm, or choose a loss whose gradients are bounded"
    _require(0 < change < math.inf, "GRAD_CHANGE", f"{text}, got {change}")


def checked(algorithm: GossipDescent, setting: Setting, *, doubly_stochastic: bool = True) -> tuple[Finding, ...]:
    """Refuse what has no guarantee or no meaning, and report the rest.

    Args:
        doubly_stochastic: whether the method converges to the common optimum only if columns of weights sum to 1, too.

    Raises:
        CheckFailed: NOISE_SOME, NOISE_SCALE, GRAD_CHANGE or ROW_SUM.
    """
    last = algorithm.rounds - 1
    smallest = [min(noise.at(0), noise.at(last)) for noise in algorithm.noise]
    noisy = max(smallest) > 0
    text = "either every learner's noise scale is positive in every round, or all are 0"
    _require(not noisy or min(smallest) > 0, "NOISE_SOME", f"{text}, got smallest scales {smallest}")
    all_noise = [noise.at(0) for noise in algorithm.noise]
    text = f"the noise scale must stay above {SMALLEST_SCALE:.0e} in all rounds, got {min(smallest):.3g}"
    _require(max(all_noise) == 0 or min(smallest) > SMALLEST_SCALE, "NOISE_SCALE", text)
    if noisy:
        _require_change(algorithm.constants().change)
    findings = [*_weight_findings(setting, doubly_stochastic)]
    if noisy:
        findings += _noise_findings(algorithm, min(smallest))
    return tuple(findings)


def _weight_findings(setting: Setting, doubly_stochastic: bool) -> Iterator[Finding]:
    """ROW_SUM is refused; NOT_DOUBLY_STOCHASTIC and OWN_WEIGHT are reported, for the first round in which they hold."""
    columns, own = 0.0, 0.0
    for t in range(min(setting.rounds, setting.network.horizon)):
        mixing = setting.network.at(t)
        rows = mixing.matrix.sum(axis=1)
        worst = int(np.argmax(np.abs(rows - 1.0)))
        text = "every learner's mixing weights, its own included, must sum to 1"
        _require(abs(rows[worst] - 1.0) <= ROUNDING, "ROW_SUM", f"{text}, got {rows[worst]} for {worst} in round {t}")
        columns = max(columns, float(np.abs(mixing.matrix.sum(axis=0) - 1.0).max()))
        own = min(own, float(mixing.own.min()))
    if doubly_stochastic and columns > ROUNDING:
        text = "mixing weights are not doubly stochastic: learners agree on an optimum that weighs them unequally"
        yield Finding("NOT_DOUBLY_STOCHASTIC", f"{text}, got column sums up to {columns:.3g} away from 1")
    if own < 0:
        text = "a negative own weight: mixing may amplify instead of averaging; lower the coupling weights"
        yield Finding("OWN_WEIGHT", f"{text}, got {own:.6g}")


def _noise_findings(algorithm: GossipDescent, smallest: float) -> Iterator[Finding]:
    """NOISE_FADES, NOISE_RESOLUTION."""
    last, step, noise = algorithm.rounds - 1, algorithm.step[0], algorithm.noise[0]
    if last > 1 and step.at(last - 1) / noise.at(last) > step.at(0) / noise.at(1) * (1 + ROUNDING):
        text = "the noise fades faster than the steps: later records cost more, without a bound for ever longer runs"
        yield Finding(
            "NOISE_FADES", f"{text}, got step/noise {step.at(last - 1) / noise.at(last):.3g} in the last round"
        )
    radius = algorithm.decision_set.radius(algorithm.dim)
    if smallest < RESOLUTION * radius:
        text = (
            "the noise falls near float64's resolution of messages, where the exact loss of a transcript is unreliable"
        )
        yield Finding("NOISE_RESOLUTION", f"{text}, got scale {smallest:.3g} for radius {radius}; stop earlier")
