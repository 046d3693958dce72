"""Interface of an algorithm: a pure state machine that the service, the simulator and the auditor drive in the same way.

A round of one learner::

    state, message = algorithm.emit(state, noise)        # message for the wire
    state = algorithm.update(state, received, batch)     # after all messages of neighbours and the records arrived

Shapes. A parameter array ends in the axis `dim`. The service drives one learner, so its arrays are `(dim,)`. The
simulator stacks all learners and many replicas, so its arrays are `(learners, replicas, dim)`; the auditor stacks
worlds in place of learners. An algorithm need not know its driver: it computes along the last axis and broadcasts
over all other axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from sottovoce_core.arrays import Batch, FloatArray, Scalars, broadcast_scalars
from sottovoce_core.network.weights import Mixing
from sottovoce_core.noise.request import NoiseSource
from sottovoce_core.privacy.accountant import Accountant

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class StateAxes:
    """Learners and replicas on the leading axes of a state.

    `learner` is one index (the service) or a tuple of them (the simulator: one entry per row of the leading axis; the
    auditor repeats one index for every world). `replicas` is None for arrays `(dim,)`, else the length of the replica axis.
    """

    learner: int | tuple[int, ...]
    replicas: int | None = None

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """Lengths of the leading axes of every array of the state."""
        if isinstance(self.learner, int):
            return () if self.replicas is None else (self.replicas,)
        return (len(self.learner), 1 if self.replicas is None else self.replicas)

    def pick(self, per_learner: tuple[float, ...]) -> Scalars:
        """Return the entries of a per-learner parameter for this state, ready to broadcast: one number if all are equal."""
        if isinstance(self.learner, int):
            return per_learner[self.learner]
        return broadcast_scalars([per_learner[i] for i in self.learner])


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a learner in one round: named arrays, with the same shapes in every round."""

    fields: Mapping[str, FloatArray]

    def __getitem__(self, name: str) -> FloatArray:
        return self.fields[name]


class ReceivedMessages(Protocol):
    """Messages that a learner received from its neighbours in one round, with the coupling weights of that round's topology."""

    @property
    def total_weight(self) -> Scalars:
        """Sum `|w_ii|` of the weights of the neighbours whose messages were received."""
        ...

    @property
    def own_weight(self) -> Scalars:
        """Weight of the learner's own value in a mix with received messages: `1 - total_weight` if rows sum to one."""
        ...

    def weighted_sum(self, name: str) -> FloatArray:
        """Return `sum_j w_ij y_j` over the neighbours j for the field `name`, as a new array."""
        ...

    def total(self, name: str) -> FloatArray:
        """Return `sum_j y_j` over the neighbours j, without weights."""
        ...


@dataclass(frozen=True, slots=True)
class LocalMessages:
    """`ReceivedMessages` of one learner, with weights and messages by neighbour index."""

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
        return np.zeros(()) if total is None else total  # a learner without neighbours receives nothing

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
        values = self.message[name]
        mixed: FloatArray = weights.dot(values.reshape(len(values), -1))
        return mixed.reshape(values.shape)


@runtime_checkable
class LatticeAlgorithm(Protocol):
    """Algorithm whose messages are on a lattice in some rounds, which an observer can check without any data."""

    def lattice_spacings(self, learner: int, t: int) -> Mapping[str, float]:
        """Return the fields of a learner's message of round t whose values are all multiples of a power of two, and that power.

        This holds for the result of `mechanisms.add_laplace_noise`, not for a weighted sum with messages of others.
        """
        ...


@runtime_checkable
class Clippable(Protocol):
    """Algorithm whose messages are decisions plus noise, so that values no correct learner sends can be detected and clipped."""

    def clip_bounds(self, learner: int, t: int) -> Mapping[str, float]:
        """Return a bound on the absolute values of each field of a learner's message of round t.

        Each number exceeds it with probability below `e^-64`; `mechanisms.magnitude_bound` computes it for Laplace noise.
        """
        ...


@runtime_checkable
class HiddenNoiseAlgorithm(Protocol):
    """Algorithm whose state may contain noise that is in none of its messages, so that messages do not determine the state."""

    @property
    def has_hidden_noise(self) -> bool:
        """Return whether the state contains hidden noise in this run."""
        ...


@runtime_checkable
class PublicModelAlgorithm(Protocol):
    """Algorithm whose model may be a function of the messages: it then reveals nothing that was not charged."""

    def is_model_public(self, rounds: int) -> bool:
        """Return whether the decision after `rounds` rounds is a function of the messages alone, for any records."""
        ...


@runtime_checkable
class ReleasedDecisionAlgorithm(Protocol):
    """Algorithm whose messages are decisions, with or without noise, as opposed to dual variables or sums of gradients."""

    def released_decision(self, message: Message) -> FloatArray:
        """Return the decision `(..., dim)` that an observer reads from a message, which may be outside the decision set."""
        ...


@runtime_checkable
class BlockAlgorithm(Protocol):
    """Algorithm whose learners can own a block of coordinates each: the network's decision is assembled from all blocks."""

    @property
    def owned_mask(self) -> npt.NDArray[np.bool_]:
        """`(learners, dim)`, the coordinates that a learner owns. If they overlap, there is no assembled decision."""
        ...


class Algorithm(Protocol[StateT]):
    """Decentralised online learning algorithm, pure: no network, clock, file or global random state."""

    @property
    def name(self) -> str:
        """Name of the algorithm in a spec."""
        ...

    @property
    def dim(self) -> int:
        """Number of parameters, the last axis of `decision`."""
        ...

    def field_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every message field without leading axes, in the order of the wire. Receivers enforce it."""
        ...

    def init(self, axes: StateAxes) -> StateT:
        """Return the state before round 0, independent of all data."""
        ...

    def emit(self, state: StateT, noise: NoiseSource) -> tuple[StateT, Message]:
        """Draw this round's noise, once, and compute the message of this round."""
        ...

    def update(self, state: StateT, received: ReceivedMessages, batch: Batch) -> StateT:
        """Update the state with the neighbours' messages and the new records, and advance to the next round."""
        ...

    def decision(self, state: StateT) -> FloatArray:
        """Return the current model `(..., dim)`. It is private: it leaves a learner only if the run allows it."""
        ...

    def replay(self, state: StateT, message: Message) -> tuple[StateT, FloatArray]:
        """Return the state after sending exactly `message`, and the log density `(...)` of that message.

        `update` follows, as after `emit`. A message that could not have been sent has log density `-inf`.
        """
        ...

    def noise_scale(self, learner: int, t: int) -> float:
        """Return the noise scale of a learner's message of round t: Laplace scale of a coordinate, or `1/rate`; 0: none."""
        ...

    def accountant(self, learner: int) -> Accountant:
        """Return a new accountant of this learner's messages. Every guarantee about them follows from it."""
        ...
