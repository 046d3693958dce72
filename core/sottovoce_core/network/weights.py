"""Weights of one round, and weight rules, chosen by their kind in the spec.

The mixing matrix A of a round has the recipient as its row: learner i gives `a_ij` to the message of j, and `a_ii` to its own
value. Rows that sum to one preserve consensus, columns that sum to one preserve the sum (push-sum), both preserve the average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from sottovoce_core.arrays import FloatArray, Scalars, broadcast_scalars, summarize_fields
from sottovoce_core.errors import AssumptionViolated
from sottovoce_core.registry import Positive, Registry, Section

# ---- mixing ----------------------------------------------------------------------------------------------------------

WEIGHT_SUM_TOLERANCE = 1e-12
"""Tolerance of sums of weights, relative to the largest weight."""
_DIGEST_RESOLUTION = 2.0**-24
"""Resolution of weights in a digest: machines may differ in the last bits of their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """Weights of one round: of each recipient (row) for the messages of each sender (column), and for its own value.

    Attributes:
        neighbour_weights: `(n, n)`, zero without an edge, and on the diagonal.
        own_weights: `(n,)`.
    """

    neighbour_weights: FloatArray
    own_weights: FloatArray
    _digests: list[bytes] = field(init=False, repr=False, default_factory=list)
    totals: Scalars = field(init=False, repr=False)
    """Total weight that each learner gives to all others, from `broadcast_scalars`."""
    own_scalars: Scalars = field(init=False, repr=False)
    """`own_weights`, from `broadcast_scalars`."""

    __repr__ = summarize_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", broadcast_scalars(self.neighbour_weights.sum(axis=1).tolist()))
        object.__setattr__(self, "own_scalars", broadcast_scalars(self.own_weights.tolist()))

    @property
    def digest(self) -> bytes:
        """SHA-256 of edges and weights: of all recipients, then of their senders, then of the weights."""
        if not self._digests:
            recipients, senders = np.nonzero(self.neighbour_weights)
            weights = np.rint(self.neighbour_weights[recipients, senders] / _DIGEST_RESOLUTION)
            parts = (recipients.astype("<u4"), senders.astype("<u4"), weights.astype("<f8"))
            self._digests.append(sha256(b"".join(part.tobytes() for part in parts)).digest())
        return self._digests[0]

    @property
    def matrix(self) -> FloatArray:
        """The whole mixing matrix, `(n, n)`."""
        return self.neighbour_weights + np.diag(self.own_weights)

    def in_neighbour_weights(self, learner: int) -> dict[int, float]:
        """Return the weight of each learner from which `learner` receives, by ascending index."""
        row = self.neighbour_weights[learner]
        return {int(j): float(row[j]) for j in np.flatnonzero(row)}

    def out_neighbours(self, learner: int) -> tuple[int, ...]:
        """Return the recipients of `learner`, ascending."""
        return tuple(int(i) for i in np.flatnonzero(self.neighbour_weights[:, learner]))

    def all_neighbours(self, learner: int) -> frozenset[int]:
        """Return all learners from which `learner` receives or to which it sends."""
        return frozenset((*self.in_neighbour_weights(learner), *self.out_neighbours(learner)))


def combine_digests(rounds: Iterable[bytes]) -> bytes:
    """Return the SHA-256 of the concatenated digests of several rounds, which covers the edges and weights of all of them."""
    return sha256(b"".join(rounds)).digest()


# ---- weights ---------------------------------------------------------------------------------------------------------


class WeightRule(Section, ABC):
    """A weight rule. `lazy` halves the weights of others, and keeps the rest: (I + P) / 2 instead of the mixing matrix P."""

    kind: str
    lazy: bool = False
    """Halve the weights of neighbours, and keep the rest for the own value."""

    is_symmetric: ClassVar[bool] = True
    """True if an undirected graph gets symmetric weights."""
    can_be_directed: ClassVar[bool] = True
    """True if the rule is defined for directed graphs."""
    is_column_stochastic: ClassVar[bool] = False
    """True if the columns sum to one, not the rows."""
    has_unbounded_row_sums: ClassVar[bool] = False
    """True if, on one fixed undirected graph, a learner may give the others more than 1 in all (allowed by Chen & Wang 2025)."""

    @abstractmethod
    def weigh(self, adjacency: FloatArray) -> FloatArray:
        """Return the weights that learners (rows) give to messages of others (columns), `(n, n)`, before `lazy`.

        Args:
            adjacency: `(n, n)`, 1 if the row receives from the column.
        """

    def couplings(self, adjacency: FloatArray) -> FloatArray:
        """Return the weights that learners (rows) give to messages of others (columns), `(n, n)`."""
        weights = self.weigh(adjacency)
        return weights / 2.0 if self.lazy else weights

    def mix(self, adjacency: FloatArray, *, is_directed: bool) -> Mixing:
        """Return the mixing matrix of a graph.

        Args:
            adjacency: `(n, n)`, 1 if the row receives from the column.
            is_directed: whether the graph is directed.

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
            in_degree = int(adjacency[i].sum())
            limit = (2.0 if self.lazy else 1.0) / in_degree
            raise AssumptionViolated(
                "W_OWN",
                "every learner must keep a positive weight for its own value, "
                f"got {float(own[i]):.6g} for a learner with {in_degree} in-neighbours and {self.kind} weights; "
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
"""Field of a spec: the weight rule of the named kind."""


class _ConstantWeights(WeightRule):
    """`w_ij = value` for every edge."""

    kind: Literal["constant"] = "constant"
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Weight of each edge."""

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
    """`w_ij = step` for every edge, below one over the largest number of in-neighbours: `I - step L`."""

    kind: Literal["laplacian"] = "laplacian"
    step: Positive
    """Weight of each edge."""

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        return adjacency * self.step


class _OutDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of out-neighbours of j)`: columns sum to one, as push-sum requires."""

    kind: Literal["out_degree"] = "out_degree"

    is_symmetric: ClassVar[bool] = False
    is_column_stochastic: ClassVar[bool] = True

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        out_degrees: FloatArray = adjacency.sum(axis=0)
        return adjacency / (1.0 + out_degrees)


class _InDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of in-neighbours of i)`: rows sum to one."""

    kind: Literal["in_degree"] = "in_degree"

    is_symmetric: ClassVar[bool] = False

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        in_degrees: FloatArray = adjacency.sum(axis=1, keepdims=True)
        return adjacency / (1.0 + in_degrees)
