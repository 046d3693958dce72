"""Ways to break a correct learner: what a change of noise is, another algorithm or loss, and what is known inside one.

`catalogue` makes broken learners of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.worlds import Share, children, overhear
from sottovoce.errors import SpecError
from sottovoce.losses import mean_gradient
from sottovoce.noise import Draw, Law, Noise, SeededNoise, no_noise
from sottovoce.optional import import_extra
from sottovoce.running.simulator import simulate

# ---- noise -----------------------------------------------------------------------------------------------------------


Change = Callable[[FloatArray, Draw], FloatArray]
"""From correct noise to what is said in its place."""


def changed(source: Noise, change: Change) -> Noise:
    """The noise of another source, changed."""
    return lambda draw: change(source(draw), draw)


def laws(plan: AuditPlan) -> set[Law]:
    """Which noise the algorithm asks for.

    Raises:
        SpecError: none.
    """
    asked: set[Law] = set()

    def note(draw: Draw) -> FloatArray:
        asked.add(draw.law)
        return no_noise(draw)

    for _ in simulate(plan.run, plan.data, note):
        pass
    if not asked:
        raise SpecError(f"{plan.run.algorithm.name} draws no noise")
    return asked


def in_scales(change: Callable[[FloatArray], FloatArray]) -> Change:
    """A change of noise in units of its scale; what comes of it is on the lattice again."""
    return lambda noise, draw: draw.rounded(change(noise / draw.scale) * draw.scale)


def scaled(noise: FloatArray, factor: float | FloatArray, draw: Draw) -> FloatArray:
    """Noise times a factor, on the lattice.

    Half of an odd number is always rounded to an even one, so a factor of few digits would show in low bits: it gets some more.
    """
    factors = np.where(np.asarray(factor) == 1.0, 1.0, np.asarray(factor) * (1.0 - 1e-9))
    return draw.rounded(factors * noise)


def times(factor: float) -> Change:
    """Noise of another scale."""
    return lambda noise, draw: scaled(noise, factor, draw)


def sometimes(change: Change, share: float, generator: np.random.Generator, *, messages: bool = False) -> Change:
    """A change of some numbers only, or of some messages, at random."""

    def partly(noise: FloatArray, draw: Draw) -> FloatArray:
        shape = (*noise.shape[:-1], 1) if messages else noise.shape
        return np.where(generator.random(shape) < share, change(noise, draw), noise)

    return partly


def correlating(mix: Callable[[FloatArray, dict[Any, FloatArray], Draw], FloatArray]) -> Change:
    """Noise of the right law that is not independent: its normal scores are mixed with what was there before."""
    special = import_extra("scipy.special", "scipy", "a self-test")
    before: dict[Any, FloatArray] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        drawn = noise / draw.scale
        scores = np.copysign(special.ndtri(0.5 * np.exp(-np.abs(drawn))), drawn)
        scores = mix(scores, before, draw)
        sizes = -special.log_ndtr(-np.abs(scores)) - math.log(2.0)
        return draw.rounded(np.copysign(sizes, scores) * draw.scale)

    return change


# ---- algorithms and losses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Altered:
    """An algorithm, a loss, or what is heard, but for what a subclass overrides."""

    correct: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "correct"), name)


# ---- beside the numbers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inside:
    """What an implementation knows, of some runs of one world, and may give away beside its noised numbers.

    Attributes:
        plan: the audit.
        world: 0 or 1.
        gradients: `(rounds, runs, numbers)` of the audited learner's records, at its model in use.
        generator: of anything random.
    """

    plan: AuditPlan
    world: int
    gradients: FloatArray
    generator: np.random.Generator

    @property
    def norms(self) -> FloatArray:
        """`(runs, rounds)` of the gradients."""
        norms: FloatArray = np.linalg.norm(self.gradients, axis=2).T
        return norms


def inside(plan: AuditPlan, share: Share) -> Inside:
    """Some runs of the simulator, as they look from inside."""
    plan = plan.pairs[share.pair]
    runs, _, other = children(share.seed, 3)
    same, learner = Share(share.world, share.runs, runs), plan.worlds.learner
    decisions = overhear(plan.run, plan.data, plan.worlds, same, SeededNoise, decisions=True).decisions
    assert decisions is not None  # noqa: S101 - asked for
    gradients = [_gradient(plan, share.world, t, said[learner]) for t, said in enumerate(decisions)]
    return Inside(plan, share.world, np.stack(gradients), np.random.default_rng(other))


def _gradient(plan: AuditPlan, world: int, t: int, point: FloatArray) -> FloatArray:
    """Of a round's records, as the learner computes it, at `point (runs, dim)`."""
    batch, loss = plan.worlds.of(world).batch(t), plan.run.loss
    features, labels = loss.enforce(batch.features, batch.labels)
    return mean_gradient(loss, point, replace(batch, features=features, labels=labels))
