"""Graphs and sequences of graphs, chosen by their kind in the spec. To add one: its class, and a line in `GRAPHS`.

Generators are networkx's, imported only where used: a learner receives the edges. Random graphs of a sequence are generated
here, since every learner generates them independently, round by round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, SerializeAsAny

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.network.graph_files import Edge, read_edges
from sottovoce_core.network.participation_schedule import resolve_learner_names
from sottovoce_core.registry import Count, Registry, Section


class _Source(Section, ABC):
    """A graph, or a sequence of graphs."""

    kind: str

    @property
    def has_file(self) -> bool:
        """True if a graph is read from a file, which other machines do not have."""
        return False

    @property
    def is_directed(self) -> bool:
        """True if an edge may carry messages in one direction only: the field `directed`, if there is one."""
        return bool(getattr(self, "directed", False))

    @property
    def advice(self) -> str:
        """Remedy for disconnected graphs."""
        return "add edges until every learner can reach every other"

    def inline_files(self, names: Sequence[str]) -> Self:
        """Replace files by their content.

        Args:
            names: names of the learners, by index; a file may name its nodes so.

        Raises:
            SpecError: a file cannot be used.
        """
        return self


class Graph(_Source):
    """Edges between learners."""

    @abstractmethod
    def pairs(self, n: int) -> list[Edge]:
        """Return the edges on learners 0..n-1; of a directed graph, from the sender to the recipient.

        Raises:
            SpecError: the graph does not fit n learners, or its file cannot be used.
        """

    def adjacency(self, n: int) -> FloatArray:
        """Return the 0/1 matrix, `(n, n)`: 1 if learner i (row) receives from learner j. A duplicate edge counts once.

        Raises:
            SpecError: as `pairs`.
        """
        adjacency = np.zeros((n, n))
        for i, j in self.pairs(n):
            adjacency[j, i] = 1.0
            if not self.is_directed:
                adjacency[i, j] = 1.0
        return adjacency

    def to_edge_list(self, n: int) -> _Edges:
        """Return the graph as a list of edges, which needs no file, no generator and no code of others.

        Raises:
            SpecError: as `pairs`.
        """
        pairs = ((i, j) if self.is_directed else (min(i, j), max(i, j)) for i, j in self.pairs(n))
        return _Edges(edges=tuple(pairs), directed=self.is_directed)


GRAPHS: Registry[Graph] = Registry(
    Graph,  # type: ignore[type-abstract]  # of its subclasses
    {
        "ring": "_Shape",
        "path": "_Shape",
        "star": "_Shape",
        "complete": "_Shape",
        "grid": "_Grid",
        "erdos_renyi": "_ErdosRenyi",
        "watts_strogatz": "_WattsStrogatz",
        "edges": "_Edges",
        "file": "_GraphFile",
    },
    group="graphs",
    suggestions={
        "circle": "ring",
        "cycle": "ring",
        "line": "path",
        "chain": "path",
        "full": "complete",
        "clique": "complete",
    },
)

AnyGraph = Annotated[SerializeAsAny[Graph], GRAPHS]
"""Field of a spec: the graph of the named kind."""


class _Shape(Graph):
    """A ring, where every learner has two neighbours; a path; a star around the first learner; or a complete graph."""

    kind: Literal["ring", "path", "star", "complete"]

    def pairs(self, n: int) -> list[Edge]:
        import networkx as nx

        makers = {"ring": nx.cycle_graph, "path": nx.path_graph, "star": nx.star_graph, "complete": nx.complete_graph}
        graph = makers[self.kind](n - 1 if self.kind == "star" else n)
        return [(i, j) for i, j in graph.edges if i != j]  # networkx's ring of one node is a self-loop


class _Grid(Graph):
    """A rectangular grid of `rows` times `columns` learners, numbered row by row."""

    kind: Literal["grid"] = "grid"
    rows: Count
    """Number of rows."""
    columns: Count
    """Number of columns; rows times columns is the number of learners."""

    def pairs(self, n: int) -> list[Edge]:
        import networkx as nx

        if self.rows * self.columns != n:
            raise SpecError(
                f"topology.graph: rows * columns of a grid must be the number of learners ({n}), "
                f"got {self.rows} * {self.columns} = {self.rows * self.columns}; change rows, columns or learners"
            )
        cells = nx.grid_2d_graph(self.rows, self.columns)
        return list(nx.convert_node_labels_to_integers(cells, ordering="sorted").edges)


class _RandomEdges(_Source):
    """Random graphs in which every pair is an edge with the same probability."""

    probability: Annotated[float, Field(gt=0, le=1)]
    """Probability of an edge."""
    seed: NonNegativeInt = 0
    """Seed of the graph."""
    directed: bool = False
    """Directed edges: each direction has the probability on its own."""

    @property
    def advice(self) -> str:
        return f"take another seed (now {self.seed}) or a larger probability (now {self.probability})"


class _ErdosRenyi(_RandomEdges, Graph):
    """Every pair is an edge with this probability; `directed`: every ordered pair."""

    kind: Literal["erdos_renyi"] = "erdos_renyi"

    def pairs(self, n: int) -> list[Edge]:
        import networkx as nx

        return list(nx.gnp_random_graph(n, self.probability, seed=self.seed, directed=self.directed).edges)


class _WattsStrogatz(Graph):
    """A ring with edges to the `nearest` next learners, half on either side, each rewired with a probability."""

    kind: Literal["watts_strogatz"] = "watts_strogatz"
    nearest: Count
    """Number of neighbours before rewiring; even."""
    probability: Annotated[float, Field(ge=0, le=1)]
    """Probability that an edge is rewired."""
    seed: NonNegativeInt = 0
    """Seed of the graph."""

    @property
    def advice(self) -> str:
        return f"take another seed (now {self.seed}) or a larger nearest (now {self.nearest})"

    def pairs(self, n: int) -> list[Edge]:
        import networkx as nx

        if self.nearest >= n:
            raise SpecError(
                f"topology.graph.nearest must be below the number of learners ({n}), got {self.nearest}; "
                "lower it, or take the complete graph"
            )
        if self.nearest % 2:  # networkx would round it down silently
            raise SpecError(
                f"topology.graph.nearest must be even, half on either side of the ring, got {self.nearest}; "
                "take an even number"
            )
        return list(nx.watts_strogatz_graph(n, self.nearest, self.probability, seed=self.seed).edges)


class _Edges(Graph):
    """Edges as pairs of learner indices counted from 0; `directed`: from sender to recipient."""

    kind: Literal["edges"] = "edges"
    edges: Annotated[tuple[tuple[NonNegativeInt, NonNegativeInt], ...], Field(examples=[[[0, 1], [1, 2]]])]
    """Pairs of learner indices from 0."""
    directed: bool = False
    """Directed edges: the first of a pair sends to the second."""

    def to_edge_list(self, n: int) -> _Edges:
        return self

    def pairs(self, n: int) -> list[Edge]:
        for i, j in self.edges:
            if max(i, j) >= n:
                raise SpecError(
                    f"topology.graph.edges: learners must be counted from 0 to {n - 1}, got the edge ({i}, {j}); "
                    "change the edge or the number of learners"
                )
            if i == j:
                raise SpecError(
                    f"topology.graph.edges: an edge must join two different learners, got ({i}, {j}); remove it"
                )
        return list(self.edges)


class _GraphFile(Graph):
    """A file: GraphML (`.graphml`), or a list of edges, two learners a line with a blank between them.

    Its nodes are the learners' names, or all of the numbers 0..n-1. `directed`: the first node of an edge, its source, sends to
    the second one. Only the edges are read: weights follow the spec's rule.
    """

    kind: Literal["file"] = "file"
    path: Path
    """Path of the file."""
    directed: bool = False
    """Directed edges: the first of a pair sends to the second."""

    @property
    def has_file(self) -> bool:
        return True

    def inline_files(self, names: Sequence[str]) -> _Edges:  # type: ignore[override]  # another kind of graph
        return _Edges(edges=read_edges(self.path, names, directed=self.directed), directed=self.directed)

    def pairs(self, n: int) -> list[Edge]:
        return self.inline_files(resolve_learner_names(n)).pairs(n)


# ---- sequences -------------------------------------------------------------------------------------------


class GraphSequence(_Source):
    """A graph for every round. Public: everyone can compute the graph of every round independently."""

    @property
    def period(self) -> int | None:
        """Number of rounds after which the graphs repeat; None: never."""
        return None

    def is_directed_at(self, t: int) -> bool:
        """Return whether an edge of round t may carry messages in one direction only."""
        return self.is_directed

    @abstractmethod
    def adjacency(self, t: int, n: int) -> FloatArray:
        """Return the 0/1 matrix of round t, `(n, n)`, the same on every machine.

        Raises:
            SpecError: a graph does not fit n learners, or its file cannot be used.
        """

    def to_edge_list(self, n: int) -> GraphSequence:
        """Return the sequence in a form for others, who have no files.

        Raises:
            SpecError: as `adjacency`.
        """
        return self


SEQUENCES: Registry[GraphSequence] = Registry(
    GraphSequence,  # type: ignore[type-abstract]  # of its subclasses
    {"periodic": "_PeriodicGraphs", "random": "_RandomGraphs"},
    group="graph_sequences",
)

AnyGraphSequence = Annotated[SerializeAsAny[GraphSequence], SEQUENCES]
"""Field of a spec: the sequence of the named kind."""


class _PeriodicGraphs(GraphSequence):
    """Graphs in turn, one a round, repeated from the first one."""

    kind: Literal["periodic"] = "periodic"
    graphs: Annotated[tuple[AnyGraph, ...], Field(min_length=1)]
    """Graphs; round t has number t mod length."""

    @property
    def period(self) -> int:
        return len(self.graphs)

    @property
    def is_directed(self) -> bool:
        return any(graph.is_directed for graph in self.graphs)

    def is_directed_at(self, t: int) -> bool:
        return self.graphs[t % len(self.graphs)].is_directed

    @property
    def has_file(self) -> bool:
        return any(graph.has_file for graph in self.graphs)

    def inline_files(self, names: Sequence[str]) -> Self:
        return self.model_copy(update={"graphs": tuple(graph.inline_files(names) for graph in self.graphs)})

    def adjacency(self, t: int, n: int) -> FloatArray:
        return self.graphs[t % len(self.graphs)].adjacency(n)

    def to_edge_list(self, n: int) -> Self:
        return self.model_copy(update={"graphs": tuple(graph.to_edge_list(n) for graph in self.graphs)})


class _RandomGraphs(_RandomEdges, GraphSequence):
    """A new graph every round, in which every pair is an edge with this probability; `directed`: every ordered pair.

    The seed is public: everyone can generate the graph of every round independently.
    """

    kind: Literal["random"] = "random"

    def adjacency(self, t: int, n: int) -> FloatArray:
        """Generate the graph of a round from the spec and the round alone.

        Uses the raw numbers of PCG64, which NumPy promises never to change, and draws the pairs row by row (undirected: those
        above the diagonal).
        """
        above = np.triu(np.ones((n, n), dtype=bool), k=1)
        wanted = above | above.T if self.directed else above
        numbers = np.random.PCG64(np.random.SeedSequence((self.seed, t))).random_raw(int(wanted.sum()))
        adjacency = np.zeros((n, n))
        adjacency[wanted] = (np.asarray(numbers) >> np.uint64(11)) * 2.0**-53 < self.probability
        return adjacency if self.directed else adjacency + adjacency.T
