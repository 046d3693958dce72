"""Replay: a learner's state from what was overheard, and the exact privacy loss of a transcript between adjacent data sets.

What was overheard fixes everything that reached a learner, so its state in any imagined data set can be computed, and with it
the density of every message it said. The privacy loss of the transcript is the sum over rounds of
`log p(message | D) - log p(message | D')`; the other learners' densities are equal in both worlds and cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce_core.algorithms.interface import HiddenNoiseAlgorithm, LocalMessages, Message, StateAxes
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import LearnerData, stack_batches
from sottovoce_core.errors import CaptureError
from sottovoce_core.noise import NoiseSource, no_noise
from sottovoce_core.runs.participation import update_offline_state
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.text import format_learner_name


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
        heard: what it said and heard in the round before, by sender.
    """

    def __init__(self, run: Run, learner: int, replicas: int = 1, worlds: int = 1) -> None:
        self.run, self.learner = run, learner
        self.t, self.is_known = 0, True
        self.received_messages: Mapping[int, Message] = {}
        self._attendance = run.participation(learner)
        self._shape = worlds, replicas
        # What it says is overheard before it learns the round's records: decisions may be made in between.
        self._state: Any = run.algorithm.init(StateAxes((learner,) * worlds, replicas))
        self._spoken = self._state

    @property
    def is_offline(self) -> bool:
        """Whether it is away in this round, and says nothing."""
        return self.t not in self._attendance

    @property
    def required_senders(self) -> frozenset[int]:
        """Whose messages of this round `step` needs: its own, and those that it hears."""
        return frozenset({self.learner, *self.run.network.mixing(self.t).in_neighbour_weights(self.learner)})

    @property
    def decision(self) -> FloatArray:
        """`(worlds, replicas, dim)`: the model in use when the records of the last step came."""
        decision = self.run.algorithm.decision(self._spoken)
        # One that follows from messages alone is made once, for all worlds.
        return np.broadcast_to(decision, (*self._shape, decision.shape[-1]))

    @property
    def model(self) -> FloatArray:
        """`(worlds, replicas, dim)`: the model after the last step."""
        decision = self.run.algorithm.decision(self._state)
        return np.broadcast_to(decision, (*self._shape, decision.shape[-1]))

    def emit(self, noise: NoiseSource) -> Message:
        """What it would say now with this noise; fields `(worlds, replicas, dim)`."""
        _, message = self.run.algorithm.emit(self._state, noise)
        return message

    def log_density(self, said: Message) -> FloatArray:
        """`(worlds, replicas)` log density of saying this now; fields `(1, replicas, dim)`. 0 where it is away."""
        if self.is_offline:
            return np.zeros(self._shape)
        _, density = self.run.algorithm.replay(self._state, said)
        return self._by_world(density)

    def step(self, messages: Mapping[int, Message], *batches: Batch) -> FloatArray | None:
        """The round is over: it said and heard this, and learned these records.

        Args:
            messages: by sender, of all who are `concerned`; fields `(1, replicas, dim)`. One that is left out, or
                not-a-number, was not overheard.
            batches: its records of the round, in every world.

        Returns:
            `(worlds, replicas)` log density of what it said, 0 where it is away. None: that is not known, nor anything of
            later rounds, for it was not overheard itself, or its state was lost before.
        """
        if self.is_known and self.is_offline:
            self._spoken = self._state
            self._state = update_offline_state(self.run.algorithm, self._state, stack_batches(batches))
            self.t += 1
            return np.zeros(self._shape)
        said = messages.get(self.learner)
        if not self.is_known or said is None or not _overheard(said):
            self.is_known = False
            return None
        self.received_messages = messages
        algorithm, mixing = self.run.algorithm, self.run.network.mixing(self.t)
        self._spoken, density = algorithm.replay(self._state, said)
        weights = mixing.in_neighbour_weights(self.learner)
        self.is_known = all(j in messages and _overheard(messages[j]) for j in weights)
        if self.is_known:
            used = {j: self.run.clipping.clip(j, self.t, messages[j]) for j in weights}
            heard = LocalMessages(weights, used, float(mixing.own_weights[self.learner]))
            self._state = algorithm.update(self._spoken, heard, stack_batches(batches))
            self.t += 1
        return self._by_world(density)

    def _by_world(self, density: FloatArray) -> FloatArray:
        """Equal worlds may share one row."""
        return density if density.shape == self._shape else np.broadcast_to(density, self._shape)


def iterate_replay(run: Run, transcript: Transcript, learner: int, own: LearnerData) -> Iterator[Replay]:
    """A learner after each of its rounds, by its records and what was overheard: `model` is its model then.

    It ends where that is not known any more: something was not heard, or (where rounds go on without late neighbours) whom the
    learner used in the last one. Nothing is known where noise stays in a state that no message shows.

    Args:
        run: the run that was overheard.
        transcript: what all learners said.
        learner: whose rounds.
        own: its records.
    """
    if isinstance(run.algorithm, HiddenNoiseAlgorithm) and run.algorithm.has_hidden_noise:
        return
    machine = Replay(run, learner, transcript.replicas)
    for t in range(min(transcript.rounds, run.participation(learner).end)):
        machine.step(transcript.messages(t, learner, machine.required_senders), own.batch(t))
        if not machine.is_known:
            return
        yield machine


def _overheard(message: Message) -> bool:
    return not any(math.isnan(value.min()) for value in message.fields.values())


@dataclass(frozen=True, slots=True)
class PrivacyLosses:
    """Privacy losses of one learner's messages between world 0 and each other world.

    Attributes:
        realised: `(rounds, worlds - 1, replicas)`: loss of what was said.
        largest: the same shape: the largest loss that any message of the round could have shown, given what was heard.
    """

    realised_losses: FloatArray
    max_losses: FloatArray

    @property
    def total(self) -> FloatArray:
        """`(worlds - 1, replicas)` loss of the whole transcript."""
        total: FloatArray = self.realised_losses.sum(axis=0)
        return total

    @property
    def supremum(self) -> FloatArray:
        """`(worlds - 1, replicas)` sum of the rounds' largest losses."""
        total: FloatArray = self.max_losses.sum(axis=0)
        return total


def replay(run: Run, transcript: Transcript, learner: int, worlds: Sequence[LearnerData]) -> PrivacyLosses:
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
        centre = Message({name: value[:1] for name, value in machine.emit(no_noise).fields.items()})
        at_centre = machine.log_density(centre)
        density = machine.step(
            transcript.messages(t, learner, machine.required_senders), *(world.batch(t) for world in worlds)
        )
        if density is None:
            break
        for losses, each in ((realised, density), (largest, at_centre)):
            losses.append(each[0] - each[1:])
        if not machine.is_known:
            break
    if not realised:
        raise CaptureError(
            f"nobody heard {format_learner_name(run.spec.names, learner)} in round 0, so what it said later cannot be replayed"
        )
    return PrivacyLosses(np.stack(realised), np.stack(largest))
