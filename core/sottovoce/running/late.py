"""Runs in which a round may go on without a neighbour that is late, with its newest message from before.

A message then also says which rounds' messages the update before it used, in a field of its own, of one length for all
learners and rounds. So what reached a learner is on the wire, as in a run that waits, and replay stays exact. No update uses
a message of a later round than its own: a learner that is behind computes what it would have computed without delay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.algorithms.interface import HeardByAll
from sottovoce.algorithms.setting import Caveat
from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed
from sottovoce.network.network import Network
from sottovoce.privacy.accountant import Accountant

USED = "used_rounds"
"""The field: for each neighbour that is heard, by ascending index, the round whose message was used; `NONE` beyond them, and
before the first update."""
NONE = -1.0


def slots(network: Network) -> int:
    """Numbers in the field: as many as the learner that hears most hears others; one where nobody hears anybody."""
    return max(int(np.count_nonzero(network.at(0).neighbours, axis=1).max()), 1)


def used_field(rounds: Sequence[float], width: int) -> FloatArray:
    """The field `(width,)`, where these rounds were used."""
    field = np.full(width, NONE)
    field[: len(rounds)] = rounds
    return field


def on_time(network: Network, t: int) -> FloatArray:
    """`(learners, width)`: what learners say in round t if nobody was late in the one before."""
    heard, width = np.count_nonzero(network.at(0).neighbours, axis=1), slots(network)
    return np.array([used_field([t - 1.0] * count if t else [], width) for count in heard.tolist()]).reshape(-1, width)


def late_caveats(accountant: Accountant, name: str, shapes: Sequence[str], network: Network) -> Iterator[Caveat]:
    """Check that a run may go on without late neighbours, and yield what that costs.

    Args:
        accountant: of a learner.
        name: of the algorithm.
        shapes: names of the fields of its messages.
        network: of the run.

    Raises:
        CheckFailed: LATE_GUARANTEE, LATE_NETWORK or LATE_FIELD.
    """
    instead = "set clock.late to wait, and clock.mode to another than async"
    if not accountant.any_messages:
        text = (
            "a round may go on without late neighbours only where the guarantee holds whatever messages a learner hears"
        )
        raise CheckFailed("LATE_GUARANTEE", f"{text}; that of {name} does not say so: {instead}")
    if network.horizon > 1:
        text = "a round may go on without late neighbours only in one graph for all rounds, got a network that changes"
        raise CheckFailed("LATE_NETWORK", f"{text}: {instead}")
    if USED in shapes:
        raise CheckFailed(
            "LATE_FIELD",
            f"no field of the messages of {name} may be called {USED!r} where rounds go on without late neighbours",
        )
    yield Caveat(
        "LATE_REGRET",
        "rounds may use older messages: the guarantee holds, but bounds on regret are for runs that wait; and what a network "
        "keeps in sum, as ADMM its duals and push-sum its weights, drifts with every late message",
    )


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late messages were.

    Attributes:
        share: of the messages that updates used, those of an earlier round than their own.
        rounds: the oldest was of so many rounds before.
    """

    share: float
    rounds: int


def lateness(said: FloatArray) -> Lateness:
    """Of a run, by what learners said of it, `(rounds, learners, replicas, width)`."""
    own = np.arange(-1, len(said) - 1).reshape(-1, 1, 1, 1)
    lags = (own - said)[np.isfinite(said) & (said != NONE)]
    return Lateness(float((lags > 0).mean()), int(lags.max())) if lags.size else Lateness(0.0, 0)


@dataclass(frozen=True, slots=True)
class HeardOfOthers(HeardByAll):
    """`Heard` of all learners, each of which has used messages of other rounds.

    Attributes:
        used: `(learners, width)` rounds, as said.
        earlier: field name to `(rounds, learners, replicas, dim)`.
    """

    used: FloatArray
    earlier: dict[str, list[FloatArray]]

    def _sum(self, weights: FloatArray, name: str) -> FloatArray:
        said = self.earlier[name]
        mixed = np.zeros_like(said[-1])
        for i, row in enumerate(weights):
            for k, j in enumerate(np.flatnonzero(row)):
                mixed[i] += row[j] * said[int(self.used[i, k])][j]
        return mixed
