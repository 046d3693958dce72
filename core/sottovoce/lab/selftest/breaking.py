"""Ways to break a correct learner: other noise, another algorithm, another loss, and what else may cross the wire.

Each does what the audited run claims, but for one thing. `mutants` gives them names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.algorithms.interface import Message
from sottovoce.arrays import FloatArray
from sottovoce.auditing.plan import AuditPlan
from sottovoce.errors import SpecError
from sottovoce.noise import Draw, Law, Noise, no_noise
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


def times(factor: float) -> Change:
    """Noise of another scale."""
    return lambda noise, draw: draw.rounded(factor * noise)


def gaussian(generator: np.random.Generator) -> Change:
    """Gaussian noise of the same variance."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        spherical = draw.law == "spherical"
        size, variance = (
            (1.0 / draw.scale, noise.shape[-1] + 1.0) if spherical else (draw.scale, 2.0)
        )  # of a coordinate
        return draw.rounded(generator.standard_normal(noise.shape) * np.sqrt(variance) * size)

    return change


def again() -> Change:
    """Every other round says the noise of the round before."""
    last: dict[str, tuple[int, FloatArray]] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        t, before = last.get(draw.field, (draw.round, noise))
        if t == draw.round - 1 and before.shape == noise.shape:
            del last[draw.field]
            return before
        last[draw.field] = draw.round, noise
        return noise

    return change


def every_run_alike(noise: FloatArray, draw: Draw) -> FloatArray:
    """All runs say the noise of the first one, as from a seed that never changes."""
    return np.broadcast_to(noise[..., :1, :], noise.shape).copy()


def first_only() -> Change:
    """The first message that should carry noise does, the later ones do not."""
    first: dict[str, int] = {}
    return lambda noise, draw: noise if first.setdefault(draw.field, draw.round) == draw.round else np.zeros_like(noise)


def but_one(skipped: int) -> Change:
    """No noise in one round."""
    return lambda noise, draw: np.zeros_like(noise) if draw.round == skipped else noise


def but_the_last(noise: FloatArray, draw: Draw) -> FloatArray:
    """No noise on the last coordinate."""
    noise = noise.copy()
    noise[..., -1] = 0.0
    return noise


def one_seed(noise: FloatArray, draw: Draw) -> FloatArray:
    """All learners draw what the first one draws."""
    return np.broadcast_to(noise[:1], noise.shape)


def clock_seeded(generator: np.random.Generator) -> Change:
    """Every learner is seeded by the second it started in, one of as many as there are learners."""
    started: dict[tuple[int, ...], Any] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        learners, replicas, _ = noise.shape
        seconds = started.setdefault((learners, replicas), generator.integers(0, learners, (learners, replicas, 1)))
        return np.take_along_axis(noise, seconds, axis=0)

    return change


def off_lattice(generator: np.random.Generator) -> Change:
    """Raw doubles: their low bits are those of a continuous draw, on no lattice."""

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        return noise if draw.grid is None else noise + (generator.random(noise.shape) - 0.5) * draw.grid

    return change


def biased(generator: np.random.Generator, extra: float = 0.015, near: float = 0.1) -> Change:
    """A sampler with too much mass near zero, by `extra`, within `near` scales."""
    share = extra * np.exp(near)  # as much of what is moved would have been near anyway

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        moved = draw.rounded(generator.uniform(-near, near, noise.shape) * draw.scale)
        return np.where(generator.random(noise.shape) < share, moved, noise)

    return change


# ---- algorithms and losses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Altered:
    """An algorithm, or a loss, but for what a subclass overrides."""

    correct: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "correct"), name)


class SkipsZeros(_Altered):
    """No noise on coordinates that are zero."""

    def speak(self, state: Any, noise: Noise) -> tuple[Any, Message]:
        _, clean = self.correct.speak(state, no_noise)

        def only_elsewhere(drawn: FloatArray, draw: Draw) -> FloatArray:
            return np.where(clean[draw.field] == 0.0, 0.0, drawn) if draw.field in clean.fields else drawn

        spoken: tuple[Any, Message] = self.correct.speak(state, changed(noise, only_elsewhere))
        return spoken


class SaysMinimiser(_Altered):
    """PVP that sends f in place of f + e."""

    def speak(self, state: Any, noise: Noise) -> tuple[Any, Message]:
        state, _ = self.correct.speak(state, noise)
        return state, Message({"y": state.primal})


@dataclass(frozen=True)
class Louder(_Altered):
    """A loss whose gradients are a factor larger."""

    factor: float

    def gradient_sum(self, theta: FloatArray, batch: Any) -> FloatArray:
        total: FloatArray = self.factor * self.correct.gradient_sum(theta, batch)
        return total


class Unclipped(_Altered):
    """A loss that takes records as they come, and gradients as they are."""

    def enforce(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        return features, labels


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


def norms(inside: Inside) -> FloatArray:
    """The gradient's norm, in every message's metadata."""
    lengths: FloatArray = np.linalg.norm(inside.gradients, axis=2).T
    return lengths


def sizes(inside: Inside) -> FloatArray:
    """Bytes of every message, where numbers whose gradient is zero are left out."""
    sent: FloatArray = 16.0 + 9.0 * np.count_nonzero(inside.gradients, axis=2).T
    return sent


def delays(inside: Inside) -> FloatArray:
    """Milliseconds of every round: 1, half a one more for a record that must be scaled down, and jitter."""
    own, bound = inside.plan.worlds.of(inside.world), inside.plan.run.loss.feature_bound
    rounds, runs = inside.gradients.shape[:2]
    slow = [np.count_nonzero(np.linalg.norm(own.batch(t).features, axis=1) > bound) for t in range(rounds)]
    return 1.0 + 0.5 * np.array(slow, np.float64) + inside.generator.exponential(0.3, (runs, rounds))
