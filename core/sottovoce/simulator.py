"""The simulator: all learners of a graph in one process, many replicas at once, no network.

It drives the same algorithm object as the learner service. Arrays are `(learners, replicas, dim)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sottovoce.arrays import FloatArray
from sottovoce.data import PlacedData
from sottovoce.machine import HeardByAll, Message, Noise, Who
from sottovoce.run import Run


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """What happened in one round.

    Attributes:
        t: the round.
        message: what every learner said.
        before: decisions in use when the round's records arrived, `(learners, replicas, dim)`.
        after: decisions after the round.
    """

    t: int
    message: Message
    before: FloatArray
    after: FloatArray


def simulate(run: Run, data: PlacedData, noise: Noise, replicas: int = 1) -> Iterator[SimulatedRound]:
    """Run all rounds of a spec, one yielded value per round.

    Args:
        run: what to run.
        data: who learns what when; the same for all replicas.
        noise: its draws are `(learners, replicas, dim)`.
        replicas: independent repetitions.
    """
    algorithm = run.algorithm
    state = algorithm.start(Who(tuple(range(run.spec.n_learners)), replicas))
    for t in range(run.spec.rounds):
        before = algorithm.decision(state)
        state, message = algorithm.speak(state, noise)
        mixing = run.topology.at(t)
        state = algorithm.listen(state, HeardByAll(mixing.neighbours, mixing.own, message), data.stacked(t))
        yield SimulatedRound(t, message, before, algorithm.decision(state))
