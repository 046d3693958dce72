"""From graph specs to who hears whom: an adjacency matrix whose entry (i, j) is 1 where learner i hears learner j.

Graph generators and file formats are networkx's; random graphs of a sequence are drawn here, since every learner draws
them alone, round by round.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, assert_never
from xml.etree.ElementTree import ParseError

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import SpecError
from sottovoce.network.specs import (
    Complete,
    Edges,
    ErdosRenyi,
    Graph,
    GraphFile,
    Grid,
    PathGraph,
    RandomGraphs,
    Ring,
    Star,
    WattsStrogatz,
)

if TYPE_CHECKING:
    import networkx as nx

Edge = tuple[int, int]


def adjacency_of(graph: Graph, n: int) -> FloatArray:
    """The 0/1 matrix of a graph, `(n, n)`. An edge given twice is one edge.

    Raises:
        SpecError: the graph is not one of n learners, or its file cannot be used.
    """
    adjacency = np.zeros((n, n))
    directed = is_directed(graph)
    for i, j in _edges(graph, n):
        adjacency[j, i] = 1.0
        if not directed:
            adjacency[i, j] = 1.0
    return adjacency


def is_directed(graph: Graph) -> bool:
    """True where an edge is a way for messages in one direction only."""
    return isinstance(graph, Edges | ErdosRenyi | GraphFile) and graph.directed


def as_edges(graph: Graph, n: int) -> Edges:
    """The same graph as a list of edges.

    Raises:
        SpecError: the graph is not one of n learners, or its file cannot be used.
    """
    if isinstance(graph, Edges):
        return graph
    directed = is_directed(graph)
    edges = ((i, j) if directed else (min(i, j), max(i, j)) for i, j in _edges(graph, n))
    return Edges(kind="edges", edges=tuple(edges), directed=directed)


def draw(graphs: RandomGraphs, t: int, n: int) -> FloatArray:
    """The adjacency matrix of round t, `(n, n)`: a function of the spec and the round, the same on every machine.

    It uses the raw numbers of PCG64, which NumPy promises never to change, and draws the pairs of a row after those of the
    row before (undirected: those above the diagonal).
    """
    above = np.triu(np.ones((n, n), dtype=bool), k=1)
    wanted = above | above.T if graphs.directed else above
    numbers = np.random.PCG64(np.random.SeedSequence((graphs.seed, t))).random_raw(int(wanted.sum()))
    adjacency = np.zeros((n, n))
    adjacency[wanted] = (np.asarray(numbers) >> np.uint64(11)) * 2.0**-53 < graphs.probability
    return adjacency if graphs.directed else adjacency + adjacency.T


# ---- generators ------------------------------------------------------------------------------------------


def _edges(graph: Graph, n: int) -> list[Edge]:
    """The edges of a graph on learners 0..n-1; of a directed one, from the one who tells to the one who hears.

    Raises:
        SpecError: the graph is not one of n learners.
    """
    if isinstance(graph, Edges):
        return _listed_edges(graph.edges, n)
    import networkx as nx  # here, because it is slow to import and a learner is given the edges

    match graph:
        case Ring():
            return list(nx.cycle_graph(n).edges) if n > 1 else []  # networkx's ring of one is a self-loop
        case PathGraph():
            return list(nx.path_graph(n).edges)
        case Star():
            return list(nx.star_graph(n - 1).edges)
        case Complete():
            return list(nx.complete_graph(n).edges)
        case Grid():
            return _grid_edges(graph, n)
        case ErdosRenyi(probability=probability, seed=seed, directed=directed):
            return list(nx.gnp_random_graph(n, probability, seed=seed, directed=directed).edges)
        case WattsStrogatz():
            return _small_world_edges(graph, n)
        case GraphFile():
            return _file_edges(graph, n)
        case _:
            assert_never(graph)


def _grid_edges(grid: Grid, n: int) -> list[Edge]:
    """Learners are numbered row by row."""
    import networkx as nx

    if grid.rows * grid.columns != n:
        raise SpecError(
            f"topology.graph: rows * columns of a grid must be the number of learners ({n}), "
            f"got {grid.rows} * {grid.columns} = {grid.rows * grid.columns}; change rows, columns or learners"
        )
    cells = nx.grid_2d_graph(grid.rows, grid.columns)
    return list(nx.convert_node_labels_to_integers(cells, ordering="sorted").edges)


def _small_world_edges(graph: WattsStrogatz, n: int) -> list[Edge]:
    """A ring in which each learner knows `nearest / 2` on either side, then rewired at random."""
    import networkx as nx

    nearest = graph.nearest
    if nearest >= n:
        raise SpecError(
            f"topology.graph.nearest must be below the number of learners ({n}), got {nearest}; "
            "lower it, or take the complete graph"
        )
    if nearest % 2:  # networkx would round it down without a word
        raise SpecError(
            f"topology.graph.nearest must be even, half on either side of the ring, got {nearest}; take an even number"
        )
    return list(nx.watts_strogatz_graph(n, nearest, graph.probability, seed=graph.seed).edges)


def _listed_edges(edges: Iterable[Edge], n: int) -> list[Edge]:
    """The edges, if they are between different learners of 0..n-1."""
    listed = list(edges)
    for i, j in listed:
        if max(i, j) >= n:
            raise SpecError(
                f"topology.graph.edges: learners must be counted from 0 to {n - 1}, got the edge ({i}, {j}); "
                "change the edge or the number of learners"
            )
        if i == j:
            raise SpecError(
                f"topology.graph.edges: an edge must join two different learners, got ({i}, {j}); remove it"
            )
    return listed


# ---- graph files -----------------------------------------------------------------------------------------


def _file_edges(file: GraphFile, n: int) -> list[Edge]:
    """The edges of a GraphML file or an edge list; its nodes, sorted, are learners 0..n-1.

    Names sort as integers if all are integers, else as text (`n10` before `n2`). Only who is joined to whom is read:
    the file's edge attributes, `weight` among them, are ignored, since weights come from the spec's rule.
    """
    path, graph = file.path, _read_graph(file)
    if len(graph) != n:
        raise SpecError(
            f"{path}: the graph must have one node per learner ({n}), got {len(graph)} nodes; "
            "change the file or the number of learners"
        )
    if graph.is_directed() and not file.directed:
        raise SpecError(
            f"{path}: the graph must be undirected, got a directed one; set edgedefault to undirected, "
            "or topology.graph.directed to true"
        )
    if file.directed and not graph.is_directed():
        raise SpecError(f"{path}: the graph must be directed, got an undirected one; set edgedefault to directed")
    for name, other in graph.edges():
        if name == other:
            raise SpecError(f"{path}: an edge must join two different nodes, got ({name}, {other}); remove it")
    index = {name: i for i, name in enumerate(_sorted_names(graph))}
    return [(index[name], index[other]) for name, other in graph.edges()]


def _read_graph(file: GraphFile) -> nx.Graph[str]:
    """The file as networkx reads it."""
    import networkx as nx

    path: Path = file.path
    try:
        if path.suffix.lower() == ".graphml":
            return nx.read_graphml(path)
        return nx.read_edgelist(path, data=False, create_using=nx.DiGraph if file.directed else nx.Graph)
    # What networkx lets through on malformed GraphML, beside its own error: missing or mistyped attributes, broken XML.
    except (OSError, ValueError, KeyError, TypeError, ParseError, nx.NetworkXException) as error:
        raise SpecError(
            f"{path}: must be readable as GraphML (.graphml) or as an edge list, got {type(error).__name__}: {error}; "
            "check the path and the file"
        ) from None


def _sorted_names(names: Iterable[str]) -> list[str]:
    """Ascending as integers if all are integers, else as text."""
    as_text = sorted(names)
    try:
        return sorted(as_text, key=int)
    except ValueError:
        return as_text
