"""Replay: the exact privacy loss of a transcript between adjacent data sets.

What was overheard fixes everything that reached a learner, so its state in any imagined data set can be computed, and with it
the density of every message it said. The privacy loss of the transcript is the sum over rounds of
`log p(message | D) - log p(message | D')`; the other learners' densities are equal in both worlds and cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce.algorithms.interface import HeardFromNeighbours, Message, Who
from sottovoce.arrays import FloatArray
from sottovoce.data import LearnerData, stack
from sottovoce.errors import CaptureError
from sottovoce.noise import NoNoise
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Losses:
    """Privacy losses of one learner's messages between world 0 and each other world.

    Attributes:
        realised: `(rounds, worlds - 1, replicas)`: loss of what was said.
        largest: the same shape: the largest loss that any message of the round could have shown, given what was heard.
    """

    realised: FloatArray
    largest: FloatArray

    @property
    def total(self) -> FloatArray:
        """`(worlds - 1, replicas)` loss of the whole transcript."""
        total: FloatArray = self.realised.sum(axis=0)
        return total

    @property
    def supremum(self) -> FloatArray:
        """`(worlds - 1, replicas)` sum of the rounds' largest losses."""
        total: FloatArray = self.largest.sum(axis=0)
        return total


def replay(run: Run, transcript: Transcript, learner: int, worlds: Sequence[LearnerData]) -> Losses:
    """Replay one learner in several worlds at once; the first one is D, the others are adjacent to it.

    Args:
        run: the run that was overheard.
        transcript: what all learners said.
        learner: whose records differ between the worlds. Its messages are replayed as long as each was heard by somebody.
        worlds: that learner's records in each world.

    Raises:
        CaptureError: nobody heard it in the first round.
    """
    rounds = transcript.unbroken(learner)
    if rounds == 0:
        raise CaptureError(f"nobody heard learner {learner} in round 0, so what it said later cannot be replayed")
    algorithm = run.algorithm
    state = algorithm.start(Who((learner,) * len(worlds), transcript.replicas))
    realised: list[FloatArray] = []
    largest: list[FloatArray] = []
    for t in range(rounds):
        _, centre = algorithm.speak(state, NoNoise())
        in_first = Message({name: value[:1] for name, value in centre.fields.items()})
        _, at_centre = algorithm.overheard(state, in_first)
        state, density = algorithm.overheard(state, transcript.message(t, learner))
        mixing = run.topology.at(t)
        weights = mixing.heard_by(learner)
        messages = {j: transcript.message(t, j) for j in weights}
        heard = HeardFromNeighbours(weights, messages, float(mixing.own[learner]))
        state = algorithm.listen(state, heard, stack([world.batch(t) for world in worlds]))
        for losses, each in ((realised, density), (largest, at_centre)):
            by_world = np.broadcast_to(each, (len(worlds), transcript.replicas))  # equal worlds may share one row
            losses.append(by_world[0] - by_world[1:])
    return Losses(np.stack(realised), np.stack(largest))
