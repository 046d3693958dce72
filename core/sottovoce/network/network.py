"""Networks: who hears whom with which weights, round by round, where graphs may be directed or change.

The mixing matrix A of a round has the receiver as its row: learner i gives `a_ij` to what it hears of j, and `a_ii` to its
own value. Rows that sum to one keep a consensus, columns that sum to one keep the sum (push-sum), both keep the average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import combinations
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed
from sottovoce.network.graphs import Edge, draw
from sottovoce.network.specs import (
    ConstantWeights,
    InDegreeWeights,
    LaplacianWeights,
    MaxDegreeWeights,
    MetropolisWeights,
    OutDegreeWeights,
    RandomGraphs,
    Weights,
)

ROUNDING = 1e-12
"""How far sums of weights may be from what they must be, relative to the largest weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """The weights of one round: what each learner (row) gives to what it hears of each other one (column), and to itself.

    Attributes:
        neighbours: `(n, n)`, zero where nothing is heard, and on the diagonal.
        own: `(n,)`.
    """

    neighbours: FloatArray
    own: FloatArray

    @property
    def matrix(self) -> FloatArray:
        """The whole mixing matrix, `(n, n)`."""
        return self.neighbours + np.diag(self.own)

    @property
    def row_stochastic(self) -> bool:
        """No weight is negative, and those that a learner gives sum to one."""
        return self._stochastic(axis=1)

    @property
    def column_stochastic(self) -> bool:
        """No weight is negative, and those that a learner's message gets sum to one."""
        return self._stochastic(axis=0)

    @property
    def spectral_gap(self) -> float:
        """`1 - sigma_2`, sigma_2 the second largest singular value of the matrix: of use where it is doubly stochastic.

        One learner alone has the gap 1.
        """
        values = np.linalg.svd(self.matrix, compute_uv=False)
        return 1.0 - float(values[1]) if len(values) > 1 else 1.0

    def heard_by(self, learner: int) -> dict[int, float]:
        """Weight of each learner that `learner` hears, by ascending index."""
        row = self.neighbours[learner]
        return {int(j): float(row[j]) for j in np.flatnonzero(row)}

    def told_by(self, learner: int) -> tuple[int, ...]:
        """Who hears `learner`, ascending."""
        return tuple(int(i) for i in np.flatnonzero(self.neighbours[:, learner]))

    def _stochastic(self, axis: int) -> bool:
        sums = self.neighbours.sum(axis=axis) + self.own
        least = min(float(self.neighbours.min()), float(self.own.min()))
        return least >= -ROUNDING and float(np.abs(sums - 1.0).max()) <= ROUNDING


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

    @property
    @abstractmethod
    def horizon(self) -> int:
        """Rounds 0 to `horizon - 1` say all there is to say: later ones repeat them, or are not planned."""

    @abstractmethod
    def at(self, t: int) -> Mixing:
        """The weights of round t."""

    @property
    def row_stochastic(self) -> bool:
        """Every learner's weights sum to one, in every round."""
        return all(self.at(t).row_stochastic for t in range(self.horizon))

    @property
    def column_stochastic(self) -> bool:
        """The weights of every learner's message sum to one, in every round."""
        return all(self.at(t).column_stochastic for t in range(self.horizon))

    @property
    def doubly_stochastic(self) -> bool:
        """Both."""
        return self.row_stochastic and self.column_stochastic

    def strongly_connected_within(self, limit: int) -> int | None:
        """The smallest B up to `limit` such that any B rounds in a row, taken together, connect everybody with everybody.

        It is the B of "B-strongly connected" with windows that may begin at any round; None where there is none.
        """
        longest = 1
        for start in range(self.horizon):
            within = rounds_to_connect(self, start, limit)
            if within is None:
                return None
            longest = max(longest, within)
        return longest


@dataclass(frozen=True, slots=True, eq=False)
class PeriodicNetwork(Network):
    """Weights that come again: round t has those of round `t mod period`. With one of them: a fixed directed graph.

    Attributes:
        mixings: of the rounds of a period.
    """

    mixings: tuple[Mixing, ...]

    @property
    def n_learners(self) -> int:
        return len(self.mixings[0].own)

    @property
    def edges(self) -> tuple[Edge, ...]:
        heard = np.any([mixing.neighbours > 0 for mixing in self.mixings], axis=0)
        return tuple((int(i), int(j)) for i, j in np.argwhere(np.triu(heard | heard.T, k=1)))

    @property
    def horizon(self) -> int:
        return len(self.mixings)

    def at(self, t: int) -> Mixing:
        return self.mixings[t % len(self.mixings)]


@dataclass(frozen=True, slots=True, eq=False)
class RandomNetwork(Network):
    """A graph drawn anew in every round, from a public seed.

    Attributes:
        graphs: how it is drawn.
        weights: of the graph of a round.
        learners: how many there are.
        rounds: planned.
    """

    graphs: RandomGraphs
    weights: Weights
    learners: int
    rounds: int

    def __post_init__(self) -> None:
        complete = np.ones((self.learners, self.learners)) - np.eye(self.learners)
        mix(self.weights, complete, directed=self.graphs.directed)  # no round asks for more than this one

    @property
    def n_learners(self) -> int:
        return self.learners

    @property
    def horizon(self) -> int:
        return self.rounds

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every pair: each may be drawn."""
        return tuple(combinations(range(self.learners), 2))

    @property
    def row_stochastic(self) -> bool:
        return not isinstance(self.weights, OutDegreeWeights)

    @property
    def column_stochastic(self) -> bool:
        by_rule = isinstance(self.weights, OutDegreeWeights)
        return by_rule or not (self.graphs.directed or isinstance(self.weights, InDegreeWeights))

    def at(self, t: int) -> Mixing:
        return mix(self.weights, draw(self.graphs, t, self.learners), directed=self.graphs.directed)


# ---- weights ---------------------------------------------------------------------------------------------


def couplings(rule: Weights, adjacency: FloatArray) -> FloatArray:
    """What learners (rows) give to what they hear of others (columns), `(n, n)`, by a weight rule."""
    hears, tells = adjacency.sum(axis=1), adjacency.sum(axis=0)
    match rule:
        case ConstantWeights(value=value):
            weights = adjacency * value
        case MetropolisWeights():
            weights = adjacency / (1.0 + np.maximum.outer(hears, hears))
        case MaxDegreeWeights():
            weights = adjacency / (1.0 + hears.max())
        case LaplacianWeights(step=step):
            weights = adjacency * step
        case OutDegreeWeights():
            weights = adjacency / (1.0 + tells)
        case InDegreeWeights():
            weights = adjacency / (1.0 + hears[:, None])
        case _:
            assert_never(rule)
    return weights / 2.0 if rule.lazy else weights


def mix(rule: Weights, adjacency: FloatArray, *, directed: bool) -> Mixing:
    """The mixing matrix of a graph.

    Args:
        rule: how to weigh.
        adjacency: `(n, n)`, 1 where the row hears the column.
        directed: whether the graph was meant to be directed.

    Raises:
        CheckFailed: W_DIRECTED or W_OWN.
    """
    if directed and isinstance(rule, ConstantWeights | MetropolisWeights | MaxDegreeWeights):  # a degree of both ends
        raise CheckFailed(
            "W_DIRECTED",
            f"{rule.kind} weights need undirected graphs, got a directed one; take out_degree weights (columns sum to one), "
            "in_degree or laplacian weights (rows sum to one)",
        )
    weights = couplings(rule, adjacency)
    own = 1.0 - weights.sum(axis=0 if isinstance(rule, OutDegreeWeights) else 1)
    if (own <= 0).any():
        i = int(np.argmin(own))
        heard = int(adjacency[i].sum())
        limit = (2.0 if rule.lazy else 1.0) / heard
        raise CheckFailed(
            "W_OWN",
            "every learner must keep a positive weight for its own value, "
            f"got {float(own[i]):.6g} for a learner that hears {heard} others by {rule.kind} weights; "
            f"take weights below {limit:.6g}",
        )
    return Mixing(weights, own)


# ---- connectivity ----------------------------------------------------------------------------------------


def rounds_to_connect(network: Network, start: int, limit: int) -> int | None:
    """How many rounds from `start` on, taken together, connect everybody with everybody; None if more than `limit`."""
    union = np.zeros((network.n_learners, network.n_learners), dtype=bool)
    for t in range(start, start + limit):
        union |= network.at(t).neighbours > 0
        if not cut_off(union):
            return t - start + 1
    return None


def cut_off(hears: npt.NDArray[Any]) -> str:
    """Who cannot reach whom, where the row hears the column; empty where messages of everybody reach everybody."""
    n = len(hears)
    if (deaf := np.flatnonzero(~reached(hears))).size:
        lost = f"{deaf.size} of {n} learners hear nothing of learner 0"
        return f"no path of messages from learner 0 to learner {int(deaf[0])} ({lost})"
    if (mute := np.flatnonzero(~reached(hears.T))).size:
        lost = f"learner 0 hears nothing of {mute.size} of {n} learners"
        return f"no path of messages from learner {int(mute[0])} to learner 0 ({lost})"
    return ""


def reached(hears: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whom the messages of learner 0 reach, over others where needed, `(n,)`: breadth first."""
    found = np.zeros(len(hears), dtype=bool)
    found[0] = True
    frontier = found
    while frontier.any():
        frontier = (hears[:, frontier] > 0).any(axis=1) & ~found
        found = found | frontier
    return found
