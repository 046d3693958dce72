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
from sottovoce.data import LearnerData, PlacedData, stack
from sottovoce.errors import CaptureError
from sottovoce.noise import NoNoise
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript

SCREENED_ROUNDS = 40
"""Rounds with a loss by which candidates are compared."""


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


@dataclass(frozen=True, slots=True)
class WorstSwap:
    """The replacement of one record, among those tried, that a transcript could tell apart best.

    Attributes:
        learner: whose record.
        loss: absolute realised loss of this very transcript.
        supremum: the largest loss that any transcript could have shown for this pair of data sets, given what was heard.
        by_round: `(rounds,)` cumulative realised loss.
    """

    learner: int
    loss: float
    supremum: float
    by_round: FloatArray


def worst_swap(
    run: Run, transcript: Transcript, data: PlacedData, learner: int, *, every_use: bool = False
) -> WorstSwap:
    """Swap the learner's first record for the candidates that move its gradient most, and keep the worst.

    Candidates: the same record with the other label, its mirror image, and a spread of the other learners' records. The
    worst is chosen by the first `SCREENED_ROUNDS` rounds that cost anything: a record weighs most in them.

    Args:
        run: the run that was overheard.
        transcript: what all learners said (one replica).
        data: what they learned.
        learner: whose record is swapped.
        every_use: swap the record in all rounds that use it, not only in the first.
    """
    own = data.learners[learner]
    others = [_with(own, features, label, every_use) for features, label in candidates(data, learner)]
    costly = np.flatnonzero(run.guarantee(learner).per_round)[:SCREENED_ROUNDS]
    screened = replay(run, transcript.until(int(costly[-1]) + 1 if len(costly) else 1), learner, [own, *others])
    worst = others[int(np.argmax(screened.supremum[:, 0]))]
    losses = replay(run, transcript, learner, [own, worst])
    by_round = np.cumsum(losses.realised[:, 0, 0])
    return WorstSwap(learner, abs(float(by_round[-1])), float(losses.supremum[0, 0]), by_round)


def _with(own: LearnerData, features: FloatArray, label: float, every_use: bool) -> LearnerData:
    if every_use:
        return own.with_record(int(own.order[0]), features, label)
    return own.with_use(0, features, label)


def candidates(data: PlacedData, learner: int, most: int = 24) -> list[tuple[FloatArray, float]]:
    """Replacements for a learner's first record: `most` of them are the other learners' records."""
    own = data.learners[learner]
    first = int(own.order[0])
    features, label = own.features[first], float(own.labels[first])
    labels = np.unique(np.concatenate([each.labels for each in data.learners]))
    other = float(labels[labels != label][0]) if np.any(labels != label) else label
    others = [each for i, each in enumerate(data.learners) if i != learner]
    pool = np.concatenate([each.features for each in others]) if others else own.features
    pool_labels = np.concatenate([each.labels for each in others]) if others else own.labels
    spread = np.unique(np.linspace(0, len(pool) - 1, most).astype(int))
    return [
        (features, other),
        (-features, label),
        (-features, other),
        *((pool[i], float(pool_labels[i])) for i in spread),
    ]
