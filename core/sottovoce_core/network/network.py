"""Networks: who sends to whom with which weights, round by round, where graphs may be directed or change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from sottovoce_core.network.graph_files import Edge
from sottovoce_core.network.graphs import GraphSequence
from sottovoce_core.network.participation_schedule import Mask, ParticipationSchedule
from sottovoce_core.network.weights import Mixing, WeightRule, combine_digests
from sottovoce_core.text import format_learner_name

# ---- network ---------------------------------------------------------------------------------------------------------

_MAX_CACHED_WEIGHTS = 2_000_000
"""Weights of a network that changes in every round that are kept: many learners of one process ask for the same rounds."""


class Network(ABC):
    """Who hears whom with which weights, round by round. Public: everybody may know all of it."""

    __slots__ = ()

    @property
    @abstractmethod
    def n_learners(self) -> int:
        """Number of learners n."""

    @property
    @abstractmethod
    def edges(self) -> tuple[Edge, ...]:
        """Pairs (i, j), i < j, ascending, of which one may hear the other in some round."""

    def neighbours(self, learner: int) -> frozenset[int]:
        """Everybody whom a learner hears or tells in some round."""
        return frozenset(j for edge in self.edges if learner in edge for j in edge if j != learner)

    @property
    @abstractmethod
    def horizon(self) -> int:
        """Rounds 0 to `horizon - 1` say all there is to say: later ones repeat them, or are not planned."""

    @abstractmethod
    def mixing(self, t: int) -> Mixing:
        """The weights of round t."""

    def planned_mixing(self, t: int) -> Mixing:
        """The weights of round t if everything that is said in it arrives: what conditions on weights are about."""
        return self.mixing(t)

    def sender_mask(self, t: int) -> Mask:
        """`(learners,)`: those whose message of round t somebody hears."""
        return np.asarray(self.mixing(t).neighbour_weights.any(axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class PeriodicNetwork(Network):
    """Weights that come again: round t has those of round `t mod period`. With one of them: a fixed directed graph.

    Attributes:
        mixings: of the rounds of a period.
    """

    mixings: tuple[Mixing, ...]

    @property
    def n_learners(self) -> int:
        return len(self.mixings[0].own_weights)

    @property
    def edges(self) -> tuple[Edge, ...]:
        heard = np.any([mixing.neighbour_weights > 0 for mixing in self.mixings], axis=0)
        return tuple((int(i), int(j)) for i, j in np.argwhere(np.triu(heard | heard.T, k=1)))

    def neighbours(self, learner: int) -> frozenset[int]:
        return frozenset().union(*(mixing.all_neighbours(learner) for mixing in self.mixings))

    @property
    def horizon(self) -> int:
        return len(self.mixings)

    def mixing(self, t: int) -> Mixing:
        return self.mixings[t % len(self.mixings)]


@dataclass(frozen=True, slots=True, eq=False)
class ChangingNetwork(Network):
    """A graph of its own for every round, from a sequence that is public and never comes again.

    Attributes:
        graphs: the sequence.
        weights: of the graph of a round.
        learners: how many there are.
        rounds: planned.
    """

    graphs: GraphSequence
    weights: WeightRule
    learners: int
    rounds: int
    _known: dict[int, Mixing] = field(init=False, repr=False, default_factory=dict)
    """The rounds that were asked for last."""

    def __post_init__(self) -> None:
        complete = np.ones((self.learners, self.learners)) - np.eye(self.learners)
        self.weights.mix(complete, is_directed=self.graphs.is_directed)  # no round asks for more than this one

    @property
    def n_learners(self) -> int:
        return self.learners

    @property
    def horizon(self) -> int:
        return self.rounds

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every pair: each may come."""
        return tuple(combinations(range(self.learners), 2))

    def neighbours(self, learner: int) -> frozenset[int]:
        return frozenset(range(self.learners)) - {learner}

    def mixing(self, t: int) -> Mixing:
        if t not in self._known:
            if len(self._known) >= max(_MAX_CACHED_WEIGHTS // self.learners**2, 1):
                del self._known[next(iter(self._known))]
            self._known[t] = self.weights.mix(
                self.graphs.adjacency(t, self.learners), is_directed=self.graphs.is_directed
            )
        return self._known[t]


@dataclass(frozen=True, slots=True, eq=False)
class PartialNetwork(Network):
    """The network of those who are there: in each round the graph among them, with the weights that the rule gives it.

    Attributes:
        whole: of all learners.
        roster: who is there in which round.
        among: the weights of a round among some of them, `(learners,)`.
    """

    full_network: Network
    participation: ParticipationSchedule
    mix_subset: Callable[[int, Mask], Mixing]
    _known: dict[int, Mixing] = field(init=False, repr=False, default_factory=dict)
    """By the first round from which they hold, where the whole network never changes."""

    @property
    def n_learners(self) -> int:
        return self.full_network.n_learners

    @property
    def edges(self) -> tuple[Edge, ...]:
        return self.full_network.edges

    def neighbours(self, learner: int) -> frozenset[int]:
        return self.full_network.neighbours(learner)

    @property
    def horizon(self) -> int:
        return max((0, *self.participation.changes)) + self.full_network.horizon

    def mixing(self, t: int) -> Mixing:
        if self.full_network.horizon > 1:
            return self._at(t)
        since = self.participation.last_change(t)
        if since not in self._known:
            self._known[since] = self._at(since)
        return self._known[since]

    def planned_mixing(self, t: int) -> Mixing:
        there = self.participation.participant_mask(t)
        return self.full_network.mixing(t) if there.all() else self.mix_subset(t, there)

    def sender_mask(self, t: int) -> Mask:
        """As of any network, but who may have been gone by then counts as nobody."""
        return np.asarray(self.mixing(t).neighbour_weights[~self.participation.unreceived_sender_mask(t)].any(axis=0))

    def _at(self, t: int) -> Mixing:
        return self.participation.redistribute_lost_weights(self.planned_mixing(t), t)


# ---- connectivity ----------------------------------------------------------------------------------------


def describe_disconnection(hears: npt.NDArray[Any], names: Sequence[str] = ()) -> str:
    """Who cannot reach whom, where the row hears the column; empty where messages of everybody reach everybody.

    Args:
        hears: `(learners, learners)`.
        names: of the learners, by index.
    """
    n, first = len(hears), format_learner_name(names, 0)
    if (deaf := np.flatnonzero(~find_reachable(hears))).size:
        lost = f"{deaf.size} of {n} learners hear nothing of {first}"
        return f"no path of messages from {first} to {format_learner_name(names, int(deaf[0]))} ({lost})"
    if (mute := np.flatnonzero(~find_reachable(hears.T))).size:
        lost = f"{first} hears nothing of {mute.size} of {n} learners"
        return f"no path of messages from {format_learner_name(names, int(mute[0]))} to {first} ({lost})"
    return ""


def find_reachable(hears: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whom the messages of learner 0 reach, over others where needed, `(n,)`: breadth first."""
    found = np.zeros(len(hears), dtype=bool)
    found[0] = True
    frontier = found
    while frontier.any():
        frontier = (hears[:, frontier] > 0).any(axis=1) & ~found
        found = found | frontier
    return found


# ---- digests ---------------------------------------------------------------------------------------------------------


class NetworkDigests:
    """By round, each computed once, and kept for a while.

    Args:
        network: of the run.
        keep: rounds of them; a network that never changes has one.
    """

    def __init__(self, network: Network, keep: int) -> None:
        self._network, self._keep = network, keep
        self._known: dict[int, bytes] = {}

    @property
    def is_needed(self) -> bool:
        """Does the network change? Else its first epoch says it all."""
        return self._network.horizon > 1

    def digest(self, t: int) -> bytes:
        """That of a round."""
        known = self._known.get(t)
        if known is None:
            known = self._known[t] = self._network.mixing(t).digest
            if len(self._known) > self._keep:  # rounds before those that are kept are asked for seldom
                del self._known[min(self._known)]
        return known

    def combined_digest(self, first: int, until: int) -> bytes:
        """Of rounds `first` to `until - 1` together; empty where none is needed."""
        if not self.is_needed or first >= until:
            return b""
        return combine_digests(map(self.digest, range(first, until)))
