"""Replay: a learner's state from captured messages, and the exact privacy loss of a transcript between adjacent data sets.

Captured messages determine everything that reached a learner, so its state for any assumed data set can be computed, and from it
the density of every message it sent. The privacy loss of the transcript is the sum over rounds of
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
    """State of a learner, replayed from captured messages: in one world, or in several at once.

    The next round can be queried without side effects (`emit`, `log_density`); `step` completes it. A copy (`copy.copy`)
    continues independently.

    Args:
        run: the captured run.
        learner: index of the learner.
        replicas: number of runs at once.
        worlds: number of data sets at once.

    Attributes:
        t: the next round.
        is_known: False once a message is missing on which the state depends.
        received_messages: sent and received messages of the previous round, by sender.
    """

    def __init__(self, run: Run, learner: int, replicas: int = 1, worlds: int = 1) -> None:
        self.run, self.learner = run, learner
        self.t, self.is_known = 0, True
        self.received_messages: Mapping[int, Message] = {}
        self._attendance = run.participation(learner)
        self._shape = worlds, replicas
        # Its message is captured before it learns the round's records: decisions may be made in between.
        self._state: Any = run.algorithm.init(StateAxes((learner,) * worlds, replicas))
        self._emitted_state = self._state

    @property
    def is_offline(self) -> bool:
        """True if it is offline in this round, and sends nothing."""
        return self.t not in self._attendance

    @property
    def required_senders(self) -> frozenset[int]:
        """Senders whose messages of this round `step` needs: the learner itself, and its in-neighbours."""
        return frozenset({self.learner, *self.run.network.mixing(self.t).in_neighbour_weights(self.learner)})

    @property
    def decision(self) -> FloatArray:
        """Model in use when the records of the last step came, `(worlds, replicas, dim)`."""
        decision = self.run.algorithm.decision(self._emitted_state)
        # A decision that depends on messages alone is computed once, for all worlds.
        return np.broadcast_to(decision, (*self._shape, decision.shape[-1]))

    @property
    def model(self) -> FloatArray:
        """Model after the last step, `(worlds, replicas, dim)`."""
        decision = self.run.algorithm.decision(self._state)
        return np.broadcast_to(decision, (*self._shape, decision.shape[-1]))

    def emit(self, noise: NoiseSource) -> Message:
        """Return the message that this noise would give now; fields `(worlds, replicas, dim)`."""
        _, message = self.run.algorithm.emit(self._state, noise)
        return message

    def log_density(self, own_message: Message) -> FloatArray:
        """Return the log density of sending this message now, `(worlds, replicas)`; fields `(1, replicas, dim)`. 0 if offline."""
        if self.is_offline:
            return np.zeros(self._shape)
        _, density = self.run.algorithm.replay(self._state, own_message)
        return self._by_world(density)

    def step(self, messages: Mapping[int, Message], *batches: Batch) -> FloatArray | None:
        """Complete the round with the sent and received messages and the learned records.

        Args:
            messages: by sender, of all `required_senders`; fields `(1, replicas, dim)`. A message that is left out, or
                not-a-number, was not captured.
            batches: records of the round, in every world.

        Returns:
            `(worlds, replicas)` log density of the sent message, 0 if offline. None: it is unknown, as in all later rounds,
            because the message was not captured, or the state was lost before.
        """
        if self.is_known and self.is_offline:
            self._emitted_state = self._state
            self._state = update_offline_state(self.run.algorithm, self._state, stack_batches(batches))
            self.t += 1
            return np.zeros(self._shape)
        own_message = messages.get(self.learner)
        if not self.is_known or own_message is None or not _is_captured(own_message):
            self.is_known = False
            return None
        self.received_messages = messages
        algorithm, mixing = self.run.algorithm, self.run.network.mixing(self.t)
        self._emitted_state, density = algorithm.replay(self._state, own_message)
        weights = mixing.in_neighbour_weights(self.learner)
        self.is_known = all(j in messages and _is_captured(messages[j]) for j in weights)
        if self.is_known:
            used = {j: self.run.clipping.clip(j, self.t, messages[j]) for j in weights}
            local_messages = LocalMessages(weights, used, float(mixing.own_weights[self.learner]))
            self._state = algorithm.update(self._emitted_state, local_messages, stack_batches(batches))
            self.t += 1
        return self._by_world(density)

    def _by_world(self, density: FloatArray) -> FloatArray:
        """Expand the densities to all worlds; equal worlds may share one row."""
        return density if density.shape == self._shape else np.broadcast_to(density, self._shape)


def iterate_replay(run: Run, transcript: Transcript, learner: int, own: LearnerData) -> Iterator[Replay]:
    """Yield the replay of a learner after each round, from its records and captured messages: `model` is the model then.

    Ends when the state becomes unknown: a message was not captured, or (with bounded staleness) the messages used in the last
    round are unknown. Yields nothing if noise stays in a state that no message shows.

    Args:
        run: the captured run.
        transcript: messages of all learners.
        learner: index of the learner.
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


def _is_captured(message: Message) -> bool:
    return not any(math.isnan(value.min()) for value in message.fields.values())


@dataclass(frozen=True, slots=True)
class PrivacyLosses:
    """Privacy losses of one learner's messages between world 0 and each other world.

    Attributes:
        realised_losses: `(rounds, worlds - 1, replicas)`: loss of the sent messages.
        max_losses: the same shape: the largest loss of any message of the round, given the received messages.
    """

    realised_losses: FloatArray
    max_losses: FloatArray

    @property
    def total(self) -> FloatArray:
        """Loss of the whole transcript, `(worlds - 1, replicas)`."""
        total: FloatArray = self.realised_losses.sum(axis=0)
        return total

    @property
    def supremum(self) -> FloatArray:
        """Sum of the rounds' largest losses, `(worlds - 1, replicas)`."""
        total: FloatArray = self.max_losses.sum(axis=0)
        return total


def replay(run: Run, transcript: Transcript, learner: int, worlds: Sequence[LearnerData]) -> PrivacyLosses:
    """Replay one learner in several worlds at once; the first one is D, the others are adjacent to it.

    Args:
        run: the captured run.
        transcript: messages of all learners.
        learner: learner whose records differ between the worlds. Its messages are replayed up to the first one not captured.
        worlds: that learner's records in each world.

    Raises:
        CaptureError: its first message was not captured.
    """
    machine = Replay(run, learner, transcript.replicas, len(worlds))
    realised: list[FloatArray] = []
    largest: list[FloatArray] = []
    for t in range(transcript.rounds):
        # With Laplace noise, no message distinguishes the first world from another better than the centre of its density.
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
            f"replay needs the message of {format_learner_name(run.spec.names, learner)} in round 0, and it was not captured"
        )
    return PrivacyLosses(np.stack(realised), np.stack(largest))
