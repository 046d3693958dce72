"""Networks: senders, recipients and weights of each round; graphs may be directed or change."""

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
"""Maximum number of cached weights of a network that changes every round: many learners of a process need the same rounds."""


class Network(ABC):
    """Senders, recipients and weights of each round. Public: everyone may know all of it."""

    __slots__ = ()

    @property
    @abstractmethod
    def n_learners(self) -> int:
        """Number of learners n."""

    @property
    @abstractmethod
    def edges(self) -> tuple[Edge, ...]:
        """Pairs (i, j), i < j, ascending, in which one learner receives from the other in some round."""

    def neighbours(self, learner: int) -> frozenset[int]:
        """Return all learners that a learner receives from or sends to in some round."""
        return frozenset(j for edge in self.edges if learner in edge for j in edge if j != learner)

    @property
    @abstractmethod
    def horizon(self) -> int:
        """Number of rounds that determine the network: later rounds repeat rounds 0 to `horizon - 1`, or are not planned."""

    @abstractmethod
    def mixing(self, t: int) -> Mixing:
        """Return the weights of round t."""

    def planned_mixing(self, t: int) -> Mixing:
        """Return the weights of round t if all of its messages arrive: conditions on weights concern these."""
        return self.mixing(t)

    def sender_mask(self, t: int) -> Mask:
        """Return the senders of round t that have a recipient, `(learners,)`."""
        return np.asarray(self.mixing(t).neighbour_weights.any(axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class PeriodicNetwork(Network):
    """Periodic weights: round t has those of round `t mod period`. With period one: a fixed directed graph.

    Attributes:
        mixings: weights of the rounds of a period.
    """

    mixings: tuple[Mixing, ...]

    @property
    def n_learners(self) -> int:
        return len(self.mixings[0].own_weights)

    @property
    def edges(self) -> tuple[Edge, ...]:
        is_edge = np.any([mixing.neighbour_weights > 0 for mixing in self.mixings], axis=0)
        return tuple((int(i), int(j)) for i, j in np.argwhere(np.triu(is_edge | is_edge.T, k=1)))

    def neighbours(self, learner: int) -> frozenset[int]:
        return frozenset().union(*(mixing.all_neighbours(learner) for mixing in self.mixings))

    @property
    def horizon(self) -> int:
        return len(self.mixings)

    def mixing(self, t: int) -> Mixing:
        return self.mixings[t % len(self.mixings)]


@dataclass(frozen=True, slots=True, eq=False)
class ChangingNetwork(Network):
    """A new graph for every round, from a public sequence that never repeats.

    Attributes:
        graphs: the sequence.
        weights: rule for the weights of a graph.
        learners: number of learners.
        rounds: number of planned rounds.
    """

    graphs: GraphSequence
    weights: WeightRule
    learners: int
    rounds: int
    _cache: dict[int, Mixing] = field(init=False, repr=False, default_factory=dict)
    """Weights of the latest requested rounds."""

    def __post_init__(self) -> None:
        complete = np.ones((self.learners, self.learners)) - np.eye(self.learners)
        self.weights.mix(complete, is_directed=self.graphs.is_directed)  # the most demanding graph of all

    @property
    def n_learners(self) -> int:
        return self.learners

    @property
    def horizon(self) -> int:
        return self.rounds

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All pairs: each may be an edge."""
        return tuple(combinations(range(self.learners), 2))

    def neighbours(self, learner: int) -> frozenset[int]:
        return frozenset(range(self.learners)) - {learner}

    def mixing(self, t: int) -> Mixing:
        if t not in self._cache:
            if len(self._cache) >= max(_MAX_CACHED_WEIGHTS // self.learners**2, 1):
                del self._cache[next(iter(self._cache))]
            self._cache[t] = self.weights.mix(
                self.graphs.adjacency(t, self.learners), is_directed=self.graphs.is_directed
            )
        return self._cache[t]


@dataclass(frozen=True, slots=True, eq=False)
class PartialNetwork(Network):
    """The network of the participants: in each round the graph among them, weighted by the rule.

    Attributes:
        full_network: network of all learners.
        participation: participation of all learners by round.
        mix_subset: function that weights a round's graph among some learners, `(learners,)`.
    """

    full_network: Network
    participation: ParticipationSchedule
    mix_subset: Callable[[int, Mask], Mixing]
    _cache: dict[int, Mixing] = field(init=False, repr=False, default_factory=dict)
    """Weights by the first round in which they apply, if the full network never changes."""

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
        if since not in self._cache:
            self._cache[since] = self._at(since)
        return self._cache[since]

    def planned_mixing(self, t: int) -> Mixing:
        there = self.participation.participant_mask(t)
        return self.full_network.mixing(t) if there.all() else self.mix_subset(t, there)

    def sender_mask(self, t: int) -> Mask:
        """Return the senders with a recipient; recipients that may have been gone by then do not count."""
        return np.asarray(self.mixing(t).neighbour_weights[~self.participation.unreceived_sender_mask(t)].any(axis=0))

    def _at(self, t: int) -> Mixing:
        return self.participation.redistribute_lost_weights(self.planned_mixing(t), t)


# ---- connectivity ----------------------------------------------------------------------------------------


def describe_disconnection(receives: npt.NDArray[Any], names: Sequence[str] = ()) -> str:
    """Describe two learners without a path of messages; empty if messages of every learner reach every other.

    Args:
        receives: `(learners, learners)`, positive if the row receives from the column.
        names: names of the learners, by index.
    """
    n, first = len(receives), format_learner_name(names, 0)
    if (unreached := np.flatnonzero(~find_reachable(receives))).size:
        lost = f"{unreached.size} of {n} learners receive nothing of {first}"
        return f"no path of messages from {first} to {format_learner_name(names, int(unreached[0]))} ({lost})"
    if (unreaching := np.flatnonzero(~find_reachable(receives.T))).size:
        lost = f"{first} receives nothing of {unreaching.size} of {n} learners"
        return f"no path of messages from {format_learner_name(names, int(unreaching[0]))} to {first} ({lost})"
    return ""


def find_reachable(receives: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return the learners that messages of learner 0 reach, directly or not, `(n,)`: breadth-first search."""
    found = np.zeros(len(receives), dtype=bool)
    found[0] = True
    frontier = found
    while frontier.any():
        frontier = (receives[:, frontier] > 0).any(axis=1) & ~found
        found = found | frontier
    return found


# ---- digests ---------------------------------------------------------------------------------------------------------


class NetworkDigests:
    """Network digests by round, each computed once, and cached for a while.

    Args:
        network: network of the run.
        keep: number of cached rounds; a network that never changes needs one.
    """

    def __init__(self, network: Network, keep: int) -> None:
        self._network, self._keep = network, keep
        self._cache: dict[int, bytes] = {}

    @property
    def is_needed(self) -> bool:
        """True if the network changes; otherwise the digest of its first epoch covers all rounds."""
        return self._network.horizon > 1

    def digest(self, t: int) -> bytes:
        """Return the digest of a round."""
        known = self._cache.get(t)
        if known is None:
            known = self._cache[t] = self._network.mixing(t).digest
            if len(self._cache) > self._keep:  # rounds before those that are kept are asked for seldom
                del self._cache[min(self._cache)]
        return known

    def combined_digest(self, first: int, until: int) -> bytes:
        """Return the digest of rounds `first` to `until - 1` together; empty if none is needed."""
        if not self.is_needed or first >= until:
            return b""
        return combine_digests(map(self.digest, range(first, until)))
