"""Replay: a learner's state from what was overheard, and the exact privacy loss of a transcript between adjacent data sets.

What was overheard fixes everything that reached a learner, so its state in any imagined data set can be computed, and with it
the density of every message it said. The privacy loss of the transcript is the sum over rounds of
`log p(message | D) - log p(message | D')`; the other learners' densities are equal in both worlds and cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.algorithms.interface import HeardFromNeighbours, Message, Who
from sottovoce.arrays import Batch, FloatArray
from sottovoce.data import LearnerData, PlacedData, stack
from sottovoce.errors import CaptureError
from sottovoce.noise import Noise, no_noise
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript

SCREENED_ROUNDS = 40
"""Rounds with a loss by which candidates are compared."""


class Replay:
    """One learner's state, replayed from what is overheard: in one world, or in several side by side.

    A round may be asked about, which changes nothing (`says`, `density`), and then it is over (`step`). A copy (`copy.copy`)
    goes on from there by itself.

    Args:
        run: the run that is overheard.
        learner: its index.
        replicas: runs side by side.
        worlds: data sets side by side.

    Attributes:
        t: the next round.
        known: False once something was not overheard that the state depends on.
    """

    def __init__(self, run: Run, learner: int, replicas: int = 1, worlds: int = 1) -> None:
        self.run, self.learner = run, learner
        self.t, self.known = 0, True
        self._shape = worlds, replicas
        # What it says is overheard before it learns the round's records: decisions may be made in between.
        self._state: Any = run.algorithm.start(Who((learner,) * worlds, replicas))
        self._spoken = self._state

    @property
    def concerned(self) -> frozenset[int]:
        """Whose messages of this round `step` needs: its own, and those that it hears."""
        return frozenset({self.learner, *self.run.topology.at(self.t).heard_by(self.learner)})

    @property
    def decision(self) -> FloatArray:
        """`(worlds, replicas, dim)`: the model in use when the records of the last step came."""
        return self.run.algorithm.decision(self._spoken)

    def says(self, noise: Noise) -> Message:
        """What it would say now with this noise; fields `(worlds, replicas, dim)`."""
        _, message = self.run.algorithm.speak(self._state, noise)
        return message

    def density(self, said: Message) -> FloatArray:
        """`(worlds, replicas)` log density of saying this now; fields `(1, replicas, dim)`."""
        _, density = self.run.algorithm.overheard(self._state, said)
        return self._by_world(density)

    def step(self, messages: Mapping[int, Message], *batches: Batch) -> FloatArray | None:
        """The round is over: it said and heard this, and learned these records.

        Args:
            messages: by sender, of all who are `concerned`; fields `(1, replicas, dim)`. One that is left out, or
                not-a-number, was not overheard.
            batches: its records of the round, in every world.

        Returns:
            `(worlds, replicas)` log density of what it said. None: that is not known, nor anything of later rounds, for
            it was not overheard itself, or its state was lost before.
        """
        said = messages.get(self.learner)
        if not self.known or said is None or not _overheard(said):
            self.known = False
            return None
        algorithm, mixing = self.run.algorithm, self.run.topology.at(self.t)
        self._spoken, density = algorithm.overheard(self._state, said)
        weights = mixing.heard_by(self.learner)
        self.known = all(j in messages and _overheard(messages[j]) for j in weights)
        if self.known:
            heard = HeardFromNeighbours(weights, messages, float(mixing.own[self.learner]))
            self._state = algorithm.listen(self._spoken, heard, stack(batches))
            self.t += 1
        return self._by_world(density)

    def _by_world(self, density: FloatArray) -> FloatArray:
        """Equal worlds may share one row."""
        return density if density.shape == self._shape else np.broadcast_to(density, self._shape)


def _overheard(message: Message) -> bool:
    return not any(math.isnan(value.min()) for value in message.fields.values())


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
    machine = Replay(run, learner, transcript.replicas, len(worlds))
    realised: list[FloatArray] = []
    largest: list[FloatArray] = []
    for t in range(transcript.rounds):
        # No message with Laplace noise tells the first world from another one better than the centre of its density.
        centre = {name: value[:1] for name, value in machine.says(no_noise).fields.items()}
        at_centre = machine.density(Message(centre))
        density = machine.step(transcript.messages(t, machine.concerned), *(world.batch(t) for world in worlds))
        if density is None:
            break
        for losses, each in ((realised, density), (largest, at_centre)):
            losses.append(each[0] - each[1:])
        if not machine.known:
            break
    if not realised:
        raise CaptureError(f"nobody heard learner {learner} in round 0, so what it said later cannot be replayed")
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
