"""Step sizes and noise scales by round: public numbers, fixed before the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """A positive number for every round: a step size or a noise scale. Public."""

    def at(self, t: int) -> float:
        """The number of round t, counted from 0."""
        ...


@dataclass(frozen=True, slots=True)
class Power:
    """`first (t+1)^exponent`."""

    first: float
    exponent: float

    def at(self, t: int) -> float:
        return self.first * math.pow(t + 1.0, self.exponent)


@dataclass(frozen=True, slots=True)
class Geometric:
    """`first ratio^t`."""

    first: float
    ratio: float

    def at(self, t: int) -> float:
        return self.first * math.pow(self.ratio, t)


@dataclass(frozen=True, slots=True)
class Harmonic:
    """`factor / (t + shift)`."""

    factor: float
    shift: float

    def at(self, t: int) -> float:
        return self.factor / (t + self.shift)


@dataclass(frozen=True, slots=True)
class Following:
    """`factor` times the step that made the message of the round; the first message, made by none, as the second."""

    step: Schedule
    factor: float

    def at(self, t: int) -> float:
        return self.factor * self.step.at(max(t - 1, 0))


@dataclass(frozen=True, slots=True)
class Divided:
    """`schedule`, divided by a number of each round; after the last of them by the last."""

    schedule: Schedule
    divisors: tuple[float, ...]

    def at(self, t: int) -> float:
        return self.schedule.at(t) / self.divisors[min(t, len(self.divisors) - 1)]
