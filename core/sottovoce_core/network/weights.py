"""The weights of one round, and the rules for weights, by the kind that a spec gives.

The mixing matrix A of a round has the receiver as its row: learner i gives `a_ij` to what it hears of j, and `a_ii` to its
own value. Rows that sum to one keep a consensus, columns that sum to one keep the sum (push-sum), both keep the average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from sottovoce_core.arrays import FloatArray, Scalars, broadcast_scalars
from sottovoce_core.errors import AssumptionViolated
from sottovoce_core.registry import Positive, Registry, Section

# ---- mixing ----------------------------------------------------------------------------------------------------------

WEIGHT_SUM_TOLERANCE = 1e-12
"""How far sums of weights may be from what they must be, relative to the largest weight."""
_DIGEST_RESOLUTION = 2.0**-24
"""Weights that round to the same multiple of it are the same to a digest: machines may differ in the last bits of theirs."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """The weights of one round: what each learner (row) gives to what it hears of each other one (column), and to itself.

    Attributes:
        neighbours: `(n, n)`, zero where nothing is heard, and on the diagonal.
        own: `(n,)`.
    """

    neighbour_weights: FloatArray
    own_weights: FloatArray
    _digests: list[bytes] = field(init=False, repr=False, default_factory=list)
    totals: Scalars = field(init=False, repr=False)
    """What each learner gives to all others, as `broadcast_scalars`."""
    own_scalars: Scalars = field(init=False, repr=False)
    """`own`, as `broadcast_scalars`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", broadcast_scalars(self.neighbour_weights.sum(axis=1).tolist()))
        object.__setattr__(self, "own_scalars", broadcast_scalars(self.own_weights.tolist()))

    @property
    def digest(self) -> bytes:
        """SHA-256 of who hears whom with which weight: of all hearers, then of whom they hear, then of the weights."""
        if not self._digests:
            hearers, heard = np.nonzero(self.neighbour_weights)
            weights = np.rint(self.neighbour_weights[hearers, heard] / _DIGEST_RESOLUTION)
            parts = (hearers.astype("<u4"), heard.astype("<u4"), weights.astype("<f8"))
            self._digests.append(sha256(b"".join(part.tobytes() for part in parts)).digest())
        return self._digests[0]

    @property
    def matrix(self) -> FloatArray:
        """The whole mixing matrix, `(n, n)`."""
        return self.neighbour_weights + np.diag(self.own_weights)

    def in_neighbour_weights(self, learner: int) -> dict[int, float]:
        """Weight of each learner that `learner` hears, by ascending index."""
        row = self.neighbour_weights[learner]
        return {int(j): float(row[j]) for j in np.flatnonzero(row)}

    def out_neighbours(self, learner: int) -> tuple[int, ...]:
        """Who hears `learner`, ascending."""
        return tuple(int(i) for i in np.flatnonzero(self.neighbour_weights[:, learner]))

    def all_neighbours(self, learner: int) -> frozenset[int]:
        """Whom `learner` hears or tells."""
        return frozenset((*self.in_neighbour_weights(learner), *self.out_neighbours(learner)))


def combine_digests(rounds: Iterable[bytes]) -> bytes:
    """SHA-256 of the digests of several rounds, one after the other: of who hears whom in all of them."""
    return sha256(b"".join(rounds)).digest()


# ---- weights ---------------------------------------------------------------------------------------------------------


class WeightRule(Section, ABC):
    """A rule for weights. `lazy` halves what is heard, and keeps the rest: (I + P) / 2 in place of the mixing matrix P."""

    kind: str
    lazy: bool = False

    is_symmetric: ClassVar[bool] = True
    """Does an undirected graph get symmetric weights?"""
    can_be_directed: ClassVar[bool] = True
    """Has the rule a meaning for directed graphs?"""
    is_column_stochastic: ClassVar[bool] = False
    """Is it the columns that sum to one, not the rows?"""
    has_unbounded_row_sums: ClassVar[bool] = False
    """On one fixed undirected graph, may a learner give the others more than 1 in all (Chen & Wang 2025 allow it)?"""

    @abstractmethod
    def weigh(self, adjacency: FloatArray) -> FloatArray:
        """What learners (rows) give to what they hear of others (columns), `(n, n)`, before `lazy`.

        Args:
            adjacency: `(n, n)`, 1 where the row hears the column.
        """

    def couplings(self, adjacency: FloatArray) -> FloatArray:
        """What learners (rows) give to what they hear of others (columns), `(n, n)`."""
        weights = self.weigh(adjacency)
        return weights / 2.0 if self.lazy else weights

    def mix(self, adjacency: FloatArray, *, is_directed: bool) -> Mixing:
        """The mixing matrix of a graph.

        Args:
            adjacency: `(n, n)`, 1 where the row hears the column.
            one_way: whether the graph was meant to be directed.

        Raises:
            AssumptionViolated: W_DIRECTED or W_OWN.
        """
        if is_directed and not self.can_be_directed:
            raise AssumptionViolated(
                "W_DIRECTED",
                f"{self.kind} weights need undirected graphs, got a directed one; take out_degree weights (columns sum to "
                "one), in_degree or laplacian weights (rows sum to one)",
            )
        weights = self.couplings(adjacency)
        own = 1.0 - weights.sum(axis=0 if self.is_column_stochastic else 1)
        if (own <= 0).any():
            i = int(np.argmin(own))
            heard = int(adjacency[i].sum())
            limit = (2.0 if self.lazy else 1.0) / heard
            raise AssumptionViolated(
                "W_OWN",
                "every learner must keep a positive weight for its own value, "
                f"got {float(own[i]):.6g} for a learner that hears {heard} others by {self.kind} weights; "
                f"take weights below {limit:.6g}",
            )
        return Mixing(weights, own)


WEIGHTS: Registry[WeightRule] = Registry(
    WeightRule,  # type: ignore[type-abstract]  # of its subclasses
    {
        "constant": "_ConstantWeights",
        "metropolis": "MetropolisWeights",
        "max_degree": "_MaxDegreeWeights",
        "laplacian": "_LaplacianWeights",
        "out_degree": "_OutDegreeWeights",
        "in_degree": "_InDegreeWeights",
    },
    group="weights",
)

AnyWeights = Annotated[SerializeAsAny[WeightRule], WEIGHTS]
"""A field of a spec: the rule of the kind that it names."""


class _ConstantWeights(WeightRule):
    """`w_ij = value` for every edge."""

    kind: Literal["constant"] = "constant"
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    can_be_directed: ClassVar[bool] = False
    has_unbounded_row_sums: ClassVar[bool] = True

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        return adjacency * self.value


class MetropolisWeights(WeightRule):
    """`w_ij = 1 / (1 + max(degree_i, degree_j))`."""

    kind: Literal["metropolis"] = "metropolis"

    can_be_directed: ClassVar[bool] = False

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        degrees = adjacency.sum(axis=1)
        weights: FloatArray = adjacency / (1.0 + np.maximum.outer(degrees, degrees))
        return weights


class _MaxDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + largest degree)`."""

    kind: Literal["max_degree"] = "max_degree"

    can_be_directed: ClassVar[bool] = False

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        return adjacency / (1.0 + float(adjacency.sum(axis=1).max()))


class _LaplacianWeights(WeightRule):
    """`w_ij = step` for every edge, below one over the largest number of heard neighbours: `I - step L`."""

    kind: Literal["laplacian"] = "laplacian"
    step: Positive

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        return adjacency * self.step


class _OutDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom j tells)`: columns sum to one, as push-sum needs it."""

    kind: Literal["out_degree"] = "out_degree"

    is_symmetric: ClassVar[bool] = False
    is_column_stochastic: ClassVar[bool] = True

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        tells: FloatArray = adjacency.sum(axis=0)
        return adjacency / (1.0 + tells)


class _InDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom i hears)`: rows sum to one."""

    kind: Literal["in_degree"] = "in_degree"

    is_symmetric: ClassVar[bool] = False

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        hears: FloatArray = adjacency.sum(axis=1, keepdims=True)
        return adjacency / (1.0 + hears)
