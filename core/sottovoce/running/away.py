"""Rounds in which a learner is away (`sottovoce.network.roster`): it goes on alone, without noise and without records."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from sottovoce.algorithms.interface import Algorithm, HeardFromNeighbours, Message
from sottovoce.arrays import Batch, FloatArray
from sottovoce.data import PlacedData
from sottovoce.errors import DataError
from sottovoce.network.roster import Mask, Roster
from sottovoce.noise import Noise, no_noise
from sottovoce.noise.draw import Draw
from sottovoce.text import in_short

StateT = TypeVar("StateT")


def go_on_alone(algorithm: Algorithm[StateT], state: StateT, nothing: Batch) -> StateT:
    """The state after a round in which the learner was away.

    Args:
        algorithm: of the run.
        state: before the round.
        nothing: the round's records, of which there are none.
    """
    spoken, _ = algorithm.speak(state, no_noise)
    return algorithm.listen(spoken, HeardFromNeighbours({}, {}, 1.0), nothing)


def hushed(noise: Noise, there: Mask) -> Noise:
    """Noise of all learners `(learners, replicas, dim)`, in which those who are away draw none."""

    def of_those(draw: Draw) -> FloatArray:
        return np.where(there.reshape(-1, 1, 1), noise(draw), 0.0)

    return of_those


def unsaid(message: Message, there: Mask) -> Message:
    """What all learners say, not-a-number for those who are away."""
    said = there.reshape(-1, 1, 1)
    return Message({name: np.where(said, value, np.nan) for name, value in message.fields.items()})


def require_no_records(data: PlacedData, roster: Roster, rounds: int) -> None:
    """Who is away learns nothing.

    Raises:
        DataError: there are records for such a round.
    """
    found = list[str]()
    for i, own in enumerate(data.learners) if roster.absences else ():
        busy = np.diff(own.offsets[: rounds + 1]) > 0
        if (wrong := np.flatnonzero(busy & ~roster.attendance(i, len(busy)).mask())).size:
            found.append(f"{roster.names[i]} in round {wrong[0]}")
    if found:
        raise DataError(
            f"learners must have no records in rounds in which they are away, got some of {in_short(found)}: place the data by "
            "the same spec"
        )
