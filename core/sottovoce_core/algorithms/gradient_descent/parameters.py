"""The published methods of gossip gradient descent, as choices of its parts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from sottovoce_core.algorithms.gradient_descent.accounting import Adjacency, Schedule
from sottovoce_core.algorithms.gradient_descent.algorithm import Dpsr, GossipDescent, OwnValue, Point
from sottovoce_core.algorithms.gradient_descent.choices import (
    CalibratedNoise,
    GeometricNoise,
    GeometricStep,
    HarmonicNoise,
    NoiseScale,
    PowerNoise,
    PowerStep,
    StepSize,
    ZeroNoise,
)
from sottovoce_core.algorithms.gradient_descent.conditions import checked
from sottovoce_core.algorithms.setting import AlgorithmSpec, Caveat, Setting
from sottovoce_core.arrays import MOST_NUMBERS, FloatArray
from sottovoce_core.errors import CheckFailed, SpecError


class DsgdSpec(AlgorithmSpec):
    """DSGD (Pu, Olshevsky, Paschalidis 2021) with noise on its messages; the own noise stays out of the own update.

    The steps and the noise that Chen & Wang compare it with are those of LDP-DOL.
    """

    name: Literal["dsgd"]
    form: Literal["adapt_then_combine", "combine_then_adapt", "consensus"] = "adapt_then_combine"
    """consensus: the gradient is taken at the own x, as in LDP-DOL."""
    step: StepSize = PowerStep(scale=1.0, exponent=0.77)
    noise: NoiseScale = PowerNoise()

    def build(self, setting: Setting) -> tuple[GossipDescent, tuple[Caveat, ...]]:
        point: Point = "own" if self.form == "consensus" else "mixed"
        play: Point = "mixed" if self.form == "adapt_then_combine" else "own"
        algorithm = _descent(setting, self.name, self.step, self.noise, "clean", point, play)
        return algorithm, checked(algorithm, setting)

    def noisier(self, factors: tuple[float, ...]) -> DsgdSpec:
        return self.model_copy(update={"noise": self.noise.louder(factors)})


class _NoisyDescentSpec(AlgorithmSpec):
    """Gossip gradient descent that mixes its own value as it was said."""

    step: StepSize = PowerStep(scale=1.0)
    noise: NoiseScale = ZeroNoise()
    gradient_at: Point = "mixed"
    play: Point = "own"
    adjacency: Adjacency = "record"

    def build(self, setting: Setting) -> tuple[GossipDescent, tuple[Caveat, ...]]:
        algorithm = _descent(
            setting, self.name, self.step, self.noise, "said", self.gradient_at, self.play, self.adjacency
        )
        return algorithm, checked(algorithm, setting)

    def noisier(self, factors: tuple[float, ...]) -> _NoisyDescentSpec:
        return self.model_copy(update={"noise": self.noise.louder(factors)})


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
    adjacency: Adjacency = "learner"


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

    def build(self, setting: Setting) -> tuple[GossipDescent, tuple[Caveat, ...]]:
        algorithm = _descent(setting, self.name, self.step, ZeroNoise(), "clean", "own", "own")
        return algorithm, checked(algorithm, setting)

    def noisier(self, factors: tuple[float, ...]) -> DOgdSpec:
        raise SpecError("d-ogd has no noise; take pd-ogd")


def _descent(
    setting: Setting,
    name: str,
    step: StepSize,
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
    known = silent.regularity()
    steps = (step.schedule(setting, known),) * setting.n_learners
    return replace(silent, step=steps, noise=noise.schedules(setting, known, steps))


class DpsrSpec(AlgorithmSpec):
    """DPSR (Xiong et al. 2020), with the steps and the noise that Cheng, Liao, Li (2023) compare it with."""

    name: Literal["dpsr"]
    step: StepSize = PowerStep(scale=1.0)
    noise: NoiseScale = PowerNoise(sigma=math.sqrt(2.0), varsigma=0.0)

    def build(self, setting: Setting) -> tuple[Dpsr, tuple[Caveat, ...]]:
        plain = _descent(setting, self.name, self.step, self.noise, "said", "own", "own")
        shares = _own_shares(setting)
        if (shares <= 0).any():
            text = "every learner needs a positive self weight, or its step is divided by 0"
            raise CheckFailed("SELF_WEIGHT", f"{text}, got a share of {shares.min()}")
        steps = tuple(
            partial(_divided, each, tuple(column)) for each, column in zip(plain.step, shares.T.tolist(), strict=True)
        )
        rescaled = replace(plain, step=steps, noise=self.noise.schedules(setting, plain.regularity(), steps))
        findings = checked(rescaled, setting, doubly_stochastic=False)
        if min(setting.rounds, setting.network.horizon) > 1:
            text = "the weights change from round to round: rescaling by e corrects those of a fixed network only"
            findings = (*findings, Caveat("NETWORK_FIXED", text))
        return Dpsr(rescaled, plain.step, setting.n_learners), findings

    def noisier(self, factors: tuple[float, ...]) -> DpsrSpec:
        return self.model_copy(update={"noise": self.noise.louder(factors)})


def _divided(schedule: Schedule, divisors: tuple[float, ...], t: int) -> float:
    """By a number of each round; after the last of them by the last."""
    return schedule(t) / divisors[min(t, len(divisors) - 1)]


def _own_shares(setting: Setting) -> FloatArray:
    """`[e_t]_i` of every round and learner, `(rounds, learners)`: the diagonal of `W_{t-1} … W_0`."""
    setting.require_end("dpsr, which divides the steps of all rounds beforehand,")
    if setting.rounds * setting.n_learners > MOST_NUMBERS:
        raise MemoryError  # build_run says so in words
    product, shares = np.eye(setting.n_learners), np.empty((setting.rounds, setting.n_learners))
    for t in range(setting.rounds):
        shares[t] = np.diag(product)
        product = setting.network.at(t).matrix @ product
    return shares
