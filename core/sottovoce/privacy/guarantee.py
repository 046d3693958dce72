"""What an algorithm promises about its messages, and the running meter behind the promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from sottovoce.arrays import FloatArray


class ThreatModel(StrEnum):
    """Who is listening."""

    WIRE = "wire"
    """Every message on every channel."""
    NEIGHBOUR = "neighbour"
    """The messages that reach one learner."""
    OUTPUT = "output"
    """The published decisions only."""


class Accountant(Protocol):
    """Meters one learner's messages: what the next one costs, then that the round is over.

    The learner service asks `next_loss` before it says anything, journals and charges it, and refuses to speak when its
    budget would be exceeded. A guarantee is the same meter run over the planned rounds.
    """

    def next_loss(self) -> float:
        """Privacy loss epsilon of the message of the current round."""
        ...

    def advance(self, new_records: int) -> None:
        """The round is over, and brought `new_records` records to the learner."""
        ...


@dataclass(slots=True)
class ListedLosses:
    """An accountant of losses that do not depend on how many records come: read off a list, round by round."""

    per_round: FloatArray
    t: int = 0

    def next_loss(self) -> float:
        return float(self.per_round[self.t])

    def advance(self, new_records: int) -> None:
        self.t += 1


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that a guarantee rests on, and what makes it true (clipping, scaling of rows, the decision set …)."""

    value: float
    enforced_by: str


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A promise about one learner's messages.

    Attributes:
        threat_model: who may listen without the promise being void.
        adjacency: which two data sets must look alike.
        mode: name of the accounting that `per_round` follows.
        per_round: `(rounds,)` privacy losses of the messages of rounds 0, 1, …; infinite where nothing is promised.
        paper: `(rounds,)` cumulative epsilon by the paper's own formula.
        infinite_horizon: a bound on the cumulative epsilon over infinitely many rounds, or infinity.
        proof: where the proof stands.
        constants: what the numbers rest on.
        output: `(rounds,)` cumulative epsilon against somebody who sees all published decisions and no message, where that
            is a promise of its own; None: nothing is said of published decisions. Never what a learner is charged: its
            messages are heard.
        shared: an event is every learner's, because all hold the same records: who hears all of them adds their losses up.
    """

    threat_model: ThreatModel
    adjacency: str
    mode: str
    per_round: FloatArray
    paper: FloatArray
    infinite_horizon: float
    proof: str
    constants: Mapping[str, Constant] = field(default_factory=dict)
    output: FloatArray | None = None
    shared: bool = False

    @property
    def cumulative(self) -> FloatArray:
        """`(rounds,)` epsilon after the messages of rounds 0..t."""
        return np.cumsum(self.per_round)

    def epsilon(self, rounds: int | None = None) -> float:
        """Cumulative epsilon of the first `rounds` messages (all planned ones by default), summed exactly."""
        from math import fsum

        return fsum(self.per_round[:rounds])
