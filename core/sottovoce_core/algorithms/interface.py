"""The one seam: an algorithm is a pure state machine, driven alike by the service, the simulator and the auditor.

A round of one learner::

    state, message = algorithm.emit(state, noise)     # what goes on the wire
    state = algorithm.update(state, heard, batch)      # after all neighbours were heard and the record arrived

Shapes. A parameter array ends in the axis `dim`. The service drives one learner, so its arrays are `(dim,)`. The
simulator stacks all learners and many replicas, so its arrays are `(learners, replicas, dim)`; the auditor stacks
worlds in place of learners. An algorithm never asks which of the three it is: it computes along the last axis and lets
everything before it broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, Scalars, broadcast_scalars
from sottovoce_core.network.weights import Mixing
from sottovoce_core.noise.request import NoiseSource
from sottovoce_core.privacy.accountant import Accountant

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class StateAxes:
    """Which learners a state stands for, and how often.

    `learner` is one index (the service) or a tuple of them (the simulator, one entry per row of the leading axis; an
    auditor repeats one index once per world). `replicas` is None for arrays `(dim,)`, else the length of the replica axis.
    """

    learner: int | tuple[int, ...]
    replicas: int | None = None

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """The leading axes of every array of the state."""
        if isinstance(self.learner, int):
            return () if self.replicas is None else (self.replicas,)
        return (len(self.learner), 1 if self.replicas is None else self.replicas)

    def pick(self, per_learner: tuple[float, ...]) -> Scalars:
        """The entries of a per-learner parameter that belong to this state, ready to broadcast: one number if all are equal."""
        if isinstance(self.learner, int):
            return per_learner[self.learner]
        return broadcast_scalars([per_learner[i] for i in self.learner])


@dataclass(frozen=True, slots=True)
class Message:
    """What a learner says in one round: a small set of named tensors, the same lengths in every round."""

    fields: Mapping[str, FloatArray]

    def __getitem__(self, name: str) -> FloatArray:
        return self.fields[name]


class ReceivedMessages(Protocol):
    """What a learner heard from its neighbours in one round, with the coupling weights of that round's topology."""

    @property
    def total_weight(self) -> Scalars:
        """`|w_ii|`, the sum of the weights of the neighbours that were heard."""
        ...

    @property
    def own_weight(self) -> Scalars:
        """Weight of the learner's own value in a mix with what it heard: `1 - total_weight` where rows sum to one."""
        ...

    def weighted_sum(self, name: str) -> FloatArray:
        """`sum_j w_ij y_j` over the neighbours j, for the field `name`: an array of its own."""
        ...

    def total(self, name: str) -> FloatArray:
        """`sum_j y_j` over the neighbours j, without weights."""
        ...


@dataclass(frozen=True, slots=True)
class LocalMessages:
    """`ReceivedMessages` of one learner: neighbour index to weight, and to message."""

    weights: Mapping[int, float]
    messages: Mapping[int, Message]
    own_weight: float

    @property
    def total_weight(self) -> float:
        return sum(self.weights.values())

    def weighted_sum(self, name: str) -> FloatArray:
        total: FloatArray | None = None
        for j, weight in self.weights.items():
            term = weight * self.messages[j][name]
            if total is None:
                total = term
            else:
                total += term
        return np.zeros(()) if total is None else total  # a learner without neighbours hears nothing

    def total(self, name: str) -> FloatArray:
        total: FloatArray = np.sum([self.messages[j][name] for j in self.weights], axis=0)
        return total


@dataclass(frozen=True, slots=True)
class StackedMessages:
    """`ReceivedMessages` of all learners at once: messages `(learners, replicas, dim)`, and the weights of the round."""

    mixing: Mixing
    message: Message

    @property
    def total_weight(self) -> Scalars:
        return self.mixing.totals

    @property
    def own_weight(self) -> Scalars:
        return self.mixing.own_scalars

    def weighted_sum(self, name: str) -> FloatArray:
        return self._sum(self.mixing.neighbour_weights, name)

    def total(self, name: str) -> FloatArray:
        return self._sum((self.mixing.neighbour_weights != 0).astype(np.float64), name)

    def _sum(self, weights: FloatArray, name: str) -> FloatArray:
        said = self.message[name]
        mixed: FloatArray = weights.dot(said.reshape(len(said), -1))
        return mixed.reshape(said.shape)


@runtime_checkable
class LatticeAlgorithm(Protocol):
    """An algorithm whose messages are on a lattice in some rounds: who overhears them can check it without any data."""

    def lattice_spacings(self, learner: int, t: int) -> Mapping[str, float]:
        """Fields of a learner's message of round t whose every value is a multiple of a power of two, and that power.

        True of a vector rounded to the lattice, with noise on it, as `mechanisms.add_laplace_noise` says it; not of a weighted
        sum with what others said.
        """
        ...


@runtime_checkable
class Clippable(Protocol):
    """An algorithm whose messages are decisions with noise on them: what no correct learner says can be told, and clipped."""

    def clip_bounds(self, learner: int, t: int) -> Mapping[str, float]:
        """Of each field of a learner's message of round t, what no number of it exceeds in absolute value.

        But with a probability below `e^-64` a number; `mechanisms.magnitude_bound` says so of Laplace noise.
        """
        ...


@runtime_checkable
class HiddenNoiseAlgorithm(Protocol):
    """An algorithm whose state may hold noise that none of its messages shows: they do not tell the state then."""

    @property
    def has_hidden_noise(self) -> bool:
        """Whether it does, in this run."""
        ...


@runtime_checkable
class PublicModelAlgorithm(Protocol):
    """An algorithm whose model may follow from what everybody has heard: then it tells nothing that was not charged."""

    def is_model_public(self, rounds: int) -> bool:
        """Whether the decision after so many rounds is a function of messages alone, whatever the records are."""
        ...


class Algorithm(Protocol[StateT]):
    """A decentralised online learning algorithm, pure: no network, clock, file or global random state."""

    @property
    def name(self) -> str:
        """As in a spec."""
        ...

    @property
    def dim(self) -> int:
        """Number of parameters, the last axis of `decision`."""
        ...

    def field_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every field of a message without leading axes, in the order of the wire: what a receiver insists on."""
        ...

    def init(self, axes: StateAxes) -> StateT:
        """The state before round 0: independent of all data."""
        ...

    def emit(self, state: StateT, noise: NoiseSource) -> tuple[StateT, Message]:
        """Draw this round's noise, once, and form the message of this round."""
        ...

    def update(self, state: StateT, received: ReceivedMessages, batch: Batch) -> StateT:
        """Take in the neighbours' messages and the new records, update, and step to the next round."""
        ...

    def decision(self, state: StateT) -> FloatArray:
        """The model in use, `(..., dim)`. It is private: it leaves a learner only where the run opted in."""
        ...

    def replay(self, state: StateT, message: Message) -> tuple[StateT, FloatArray]:
        """Replay: the state after having said exactly `message`, and the log density of saying it, `(...)`.

        `listen` follows, as after `speak`. A message that could not have been said has log density `-inf`.
        """
        ...

    def noise_scale(self, learner: int, t: int) -> float:
        """Scale of the noise in a learner's message of round t: Laplace scale of a coordinate, or `1/rate`; 0: none."""
        ...

    def accountant(self, learner: int) -> Accountant:
        """A fresh meter of what this learner's messages cost, round by round: all that is promised of them follows from it."""
        ...
