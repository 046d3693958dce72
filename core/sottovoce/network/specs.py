"""Graphs and weights as a spec names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from sottovoce.registry import Positive, Section, shorthand


class Ring(Section):
    """Every learner has two neighbours."""

    kind: Literal["ring"]


class PathGraph(Section):
    """A line."""

    kind: Literal["path"]


class Star(Section):
    """The first learner is everybody's neighbour."""

    kind: Literal["star"]


class Complete(Section):
    """Everybody is everybody's neighbour."""

    kind: Literal["complete"]


class Grid(Section):
    """A rectangular grid of `rows` times `columns` learners."""

    kind: Literal["grid"]
    rows: PositiveInt
    columns: PositiveInt


class ErdosRenyi(Section):
    """Every pair is an edge with this probability; `directed`: every ordered pair."""

    kind: Literal["erdos_renyi"]
    probability: Annotated[float, Field(gt=0, le=1)]
    seed: NonNegativeInt = 0
    directed: bool = False


class WattsStrogatz(Section):
    """A ring in which everybody knows the `nearest` next ones, each edge rewired with this probability."""

    kind: Literal["watts_strogatz"]
    nearest: PositiveInt
    probability: Annotated[float, Field(ge=0, le=1)]
    seed: NonNegativeInt = 0


class Edges(Section):
    """The edges, as pairs of learner indices counted from 0; `directed`: the first one tells the second one."""

    kind: Literal["edges"]
    edges: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    directed: bool = False


class GraphFile(Section):
    """A file: GraphML (`.graphml`), or an edge list of two whitespace-separated node names a line.

    `directed`: the first node of an edge, its source, tells the second one.
    """

    kind: Literal["file"]
    path: Path
    directed: bool = False


Graph = Annotated[
    Ring | PathGraph | Star | Complete | Grid | ErdosRenyi | WattsStrogatz | Edges | GraphFile,
    Field(discriminator="kind"),
    BeforeValidator(shorthand),
]


class PeriodicGraphs(Section):
    """These graphs, one a round, from the first one again when they have run out."""

    kind: Literal["periodic"]
    graphs: Annotated[tuple[Graph, ...], Field(min_length=1)]


class RandomGraphs(Section):
    """A new graph every round, in which every pair is an edge with this probability; `directed`: every ordered pair.

    The seed is public: everybody can draw the graph of every round alone.
    """

    kind: Literal["random"]
    probability: Annotated[float, Field(gt=0, le=1)]
    seed: NonNegativeInt = 0
    directed: bool = False


GraphSequence = Annotated[PeriodicGraphs | RandomGraphs, Field(discriminator="kind")]


class WeightRule(Section):
    """A rule for weights. `lazy` halves what is heard, and keeps the rest: (I + P) / 2 in place of the mixing matrix P."""

    lazy: bool = False


class ConstantWeights(WeightRule):
    """`w_ij = value` for every edge."""

    kind: Literal["constant"]
    value: Positive


class MetropolisWeights(WeightRule):
    """`w_ij = 1 / (1 + max(degree_i, degree_j))`."""

    kind: Literal["metropolis"]


class MaxDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + largest degree)`."""

    kind: Literal["max_degree"]


class LaplacianWeights(WeightRule):
    """`w_ij = step` for every edge, below one over the largest number of heard neighbours: `I - step L`."""

    kind: Literal["laplacian"]
    step: Positive


class OutDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom j tells)`: columns sum to one, as push-sum needs it."""

    kind: Literal["out_degree"]


class InDegreeWeights(WeightRule):
    """`w_ij = 1 / (1 + number of those whom i hears)`: rows sum to one."""

    kind: Literal["in_degree"]


Weights = Annotated[
    ConstantWeights | MetropolisWeights | MaxDegreeWeights | LaplacianWeights | OutDegreeWeights | InDegreeWeights,
    Field(discriminator="kind"),
    BeforeValidator(shorthand),
]


class TopologySpec(Section):
    """Who hears whom, and with which weights: one graph (default: a ring), or a sequence of graphs."""

    graph: Graph | None = None
    sequence: GraphSequence | None = None
    weights: Weights = MetropolisWeights(kind="metropolis")

    @model_validator(mode="before")
    @classmethod
    def _ring_by_default(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and fields.get("graph") is None and fields.get("sequence") is None:
            return {**fields, "graph": {"kind": "ring"}}
        return fields

    @model_validator(mode="after")
    def _graph_or_sequence(self) -> TopologySpec:
        if self.graph is not None and self.sequence is not None:
            raise ValueError("graph and sequence exclude each other; leave one of them out")
        return self
