"""Rules for weights, by the kind that a spec gives. To add one: its class, and a line in `WEIGHTS`.

The mixing matrix A of a round has the receiver as its row: learner i gives `a_ij` to what it hears of j, and `a_ii` to its
own value. Rows that sum to one keep a consensus, columns that sum to one keep the sum (push-sum), both keep the average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed
from sottovoce.network.mixing import Mixing
from sottovoce.registry import Positive, Registry, Section


class WeightRule(Section, ABC):
    """A rule for weights. `lazy` halves what is heard, and keeps the rest: (I + P) / 2 in place of the mixing matrix P."""

    kind: str
    lazy: bool = False

    symmetric: ClassVar[bool] = True
    """Does an undirected graph get symmetric weights?"""
    directed: ClassVar[bool] = True
    """Has the rule a meaning for directed graphs?"""
    columns: ClassVar[bool] = False
    """Is it the columns that sum to one, not the rows?"""
    free: ClassVar[bool] = False
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

    def mix(self, adjacency: FloatArray, *, one_way: bool) -> Mixing:
        """The mixing matrix of a graph.

        Args:
            adjacency: `(n, n)`, 1 where the row hears the column.
            one_way: whether the graph was meant to be directed.

        Raises:
            CheckFailed: W_DIRECTED or W_OWN.
        """
        if one_way and not self.directed:
            raise CheckFailed(
                "W_DIRECTED",
                f"{self.kind} weights need undirected graphs, got a directed one; take out_degree weights (columns sum to "
                "one), in_degree or laplacian weights (rows sum to one)",
            )
        weights = self.couplings(adjacency)
        own = 1.0 - weights.sum(axis=0 if self.columns else 1)
        if (own <= 0).any():
            i = int(np.argmin(own))
            heard = int(adjacency[i].sum())
            limit = (2.0 if self.lazy else 1.0) / heard
            raise CheckFailed(
                "W_OWN",
                "every learner must keep a positive weight for its own value, "
                f"got {float(own[i]):.6g} for a learner that hears {heard} others by {self.kind} weights; "
                f"take weights below {limit:.6g}",
            )
        return Mixing(weights, own)


WEIGHTS: Registry[WeightRule] = Registry(
    WeightRule,  # type: ignore[type-abstract]  # of its subclasses
    {
        "constant": "ConstantWeights",
        "metropolis": "MetropolisWeights",
        "max_degree": "MaxDegreeWeights",
        "laplacian": "LaplacianWeights",
        "out_degree": "OutDegreeWeights",
        "in_degree": "InDegreeWeights",
    },
    group="weights",
)

AnyWeights = Annotated[SerializeAsAny[WeightRule], WEIGHTS]
"""A field of a spec: the rule of the kind that it names."""


class ConstantWeights(WeightRule):
    """`w_ij = value` for every edge."""

    kind: Literal["constant"] = "constant"
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    directed: ClassVar[bool] = False
    free: ClassVar[bool] = True

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        return adjacency * self.value


class MetropolisWeights(WeightRule):
    """`w_ij = 1 / (1 + max(degree_i, degree_j))`."""

    kind: Literal["metropolis"] = "metropolis"

    directed: ClassVar[bool] = False

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        degrees = adjacency.sum(axis=1)
        weights: FloatArray = adjacency / (1.0 + np.maximum.outer(degrees, degrees))
        return weights


class MaxDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + largest degree)`."""

    kind: Literal["max_degree"] = "max_degree"

    directed: ClassVar[bool] = False

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        return adjacency / (1.0 + float(adjacency.sum(axis=1).max()))


class LaplacianWeights(WeightRule):
    """`w_ij = step` for every edge, below one over the largest number of heard neighbours: `I - step L`."""

    kind: Literal["laplacian"] = "laplacian"
    step: Positive

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        return adjacency * self.step


class OutDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom j tells)`: columns sum to one, as push-sum needs it."""

    kind: Literal["out_degree"] = "out_degree"

    symmetric: ClassVar[bool] = False
    columns: ClassVar[bool] = True

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        tells: FloatArray = adjacency.sum(axis=0)
        return adjacency / (1.0 + tells)


class InDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom i hears)`: rows sum to one."""

    kind: Literal["in_degree"] = "in_degree"

    symmetric: ClassVar[bool] = False

    def weigh(self, adjacency: FloatArray) -> FloatArray:
        hears: FloatArray = adjacency.sum(axis=1, keepdims=True)
        return adjacency / (1.0 + hears)
