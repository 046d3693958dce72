"""Who hears whom, and how strongly: the coupling matrix W of a run (Chen & Wang 2025).

`w_ij >= 0` is the weight that learner i gives to what it hears from j, zero where there is no edge. W is symmetric and
its rows sum to zero (`w_ii = -sum_j w_ij`), so -W is a weighted graph Laplacian: all eigenvalues are at most 0, and 0
is a simple one exactly if the graph is connected.

A `TopologySpec` is a graph and a rule for weights. Graph generators and file formats are networkx's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, assert_never
from xml.etree.ElementTree import ParseError

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed, SpecError
from sottovoce.spec import (
    Complete,
    ConstantWeights,
    Edges,
    ErdosRenyi,
    Graph,
    GraphFile,
    Grid,
    MaxDegreeWeights,
    MetropolisWeights,
    PathGraph,
    Ring,
    Star,
    TopologySpec,
    WattsStrogatz,
    Weights,
)

if TYPE_CHECKING:
    import networkx as nx

Edge = tuple[int, int]

ROUNDING = 1e-12
"""How far W may be from symmetric and from zero row sums, relative to its largest entry."""


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

    def heard_by(self, learner: int) -> dict[int, float]:
        """Weight of each learner that `learner` hears, by ascending index."""
        row = self.neighbours[learner]
        return {int(j): float(row[j]) for j in np.flatnonzero(row)}

    def told_by(self, learner: int) -> tuple[int, ...]:
        """Who hears `learner`, ascending."""
        return tuple(int(i) for i in np.flatnonzero(self.neighbours[:, learner]))


class Network(Protocol):
    """Who hears whom with which weights, round by round. Public: everybody may know all of it."""

    @property
    def n_learners(self) -> int:
        """Number of learners n."""
        ...

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Pairs (i, j), i < j, ascending, of which one hears the other in some round."""
        ...

    def at(self, t: int) -> Mixing:
        """The weights of round t."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """A connected graph of learners and its coupling matrix. Make one with `from_weights` or `build_topology`.

    Instances compare by identity; compare `weights` to compare matrices.
    """

    weights: FloatArray
    """W, shape (n, n)."""
    _spectrum: FloatArray = field(init=False, repr=False)
    """Eigenvalues of W, ascending, shape (n,)."""
    _mixing: Mixing = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_entries(self.weights)
        _check_reachable(self.weights)
        spectrum: FloatArray = np.linalg.eigvalsh(self.weights).astype(np.float64)
        _check_gap(spectrum)
        object.__setattr__(self, "_spectrum", spectrum)
        object.__setattr__(self, "_mixing", Mixing(_off_diagonal(self.weights), 1.0 + np.diag(self.weights)))

    @classmethod
    def from_weights(cls, matrix: Any) -> Topology:
        """The topology with this coupling matrix, copied and then read-only.

        Raises:
            CheckFailed: W_SHAPE, W_NEGATIVE, W_ASYMMETRIC, W_ROW_SUM or W_DISCONNECTED, whichever fails first.
        """
        try:
            weights: FloatArray = np.array(matrix, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise CheckFailed("W_SHAPE", f"weights must be a finite square matrix, got {error}") from None
        weights.setflags(write=False)
        return cls(weights)

    @property
    def n_learners(self) -> int:
        """Number of learners n."""
        return len(self.weights)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Undirected edges (i, j) with i < j, ascending."""
        rows, columns = np.nonzero(np.triu(self.weights, k=1))
        return tuple(zip(rows.tolist(), columns.tolist(), strict=True))

    @property
    def delta_2(self) -> float:
        """Second largest eigenvalue of W, always negative: the slowest rate at which disagreement dies out.

        It is the largest Rayleigh quotient of W over the non-zero vectors that sum to zero. One learner alone has no
        such vector, so its delta_2 is the supremum of the empty set, -inf: every upper limit proportional to -delta_2
        is then no limit.
        """
        return float(self._spectrum[-2]) if self.n_learners > 1 else float("-inf")

    @property
    def delta_m(self) -> float:
        """Smallest eigenvalue of W (0 for one learner alone)."""
        return float(self._spectrum[0])

    def at(self, t: int) -> Mixing:
        """The weights, the same in every round: neighbours' `w_ij`, and `1 - |w_ii|` for the own value."""
        return self._mixing

    def own_weight(self, learner: int) -> float:
        """|w_ii|, the sum of the learner's neighbour weights."""
        return abs(float(self.weights[learner, learner]))


def build_topology(spec: TopologySpec, n_learners: int) -> Topology:
    """The topology that a run spec describes.

    Raises:
        SpecError: the graph does not fit the number of learners, or its file cannot be used.
        CheckFailed: W_DISCONNECTED; or W_SHAPE, if a constant weight is so large that row sums overflow.
    """
    edges = _edges(spec.graph, n_learners)
    try:
        return Topology.from_weights(_weigh(spec.weights, _adjacency(edges, n_learners)))
    except CheckFailed as failure:
        if failure.code != "W_DISCONNECTED":
            raise
        raise CheckFailed(failure.code, f"{failure.text}; {_connect_advice(spec.graph)}") from None


def explicit(spec: TopologySpec, n_learners: int) -> TopologySpec:
    """The same topology with its graph as a list of edges: a learner elsewhere needs no file and no generator.

    Raises:
        SpecError: the graph does not fit the number of learners, or its file cannot be used.
    """
    if isinstance(spec.graph, Edges):
        return spec
    edges = tuple((min(edge), max(edge)) for edge in _edges(spec.graph, n_learners))
    return spec.model_copy(update={"graph": Edges(kind="edges", edges=edges)})


# ---- checks of W -----------------------------------------------------------------------------------------


def _off_diagonal(weights: FloatArray) -> FloatArray:
    """A copy with zeros on the diagonal."""
    coupling = weights.copy()
    np.fill_diagonal(coupling, 0.0)
    return coupling


def _check_entries(weights: FloatArray) -> None:
    """W_SHAPE, W_NEGATIVE, W_ASYMMETRIC, W_ROW_SUM."""
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or weights.size == 0:
        raise CheckFailed("W_SHAPE", f"weights must be a finite square matrix, got shape {weights.shape}")
    _refuse("W_SHAPE", "weights must be a finite square matrix", weights, ~np.isfinite(weights))
    _refuse("W_NEGATIVE", "coupling weights must be non-negative", weights, _off_diagonal(weights) < 0)
    # Against the largest entry, so that the checks mean the same for weights of any size and cannot overflow.
    relative = weights / (np.abs(weights).max() or 1.0)
    # However small the weight, an edge that one end alone knows would leave its other end waited for.
    one_sided = (weights > 0) != (weights.T > 0)
    asymmetric = (np.abs(relative - relative.T) > ROUNDING) | one_sided
    _refuse("W_ASYMMETRIC", "coupling weights must be symmetric", weights, asymmetric)
    unbalanced = np.diag(np.abs(relative.sum(axis=1)) > ROUNDING)
    text = "each diagonal weight must equal minus the sum of its row's neighbour weights"
    _refuse("W_ROW_SUM", text, weights, unbalanced)


def _refuse(code: str, text: str, weights: FloatArray, wrong: npt.NDArray[np.bool_]) -> None:
    """Raise about the first entry that is `wrong`, naming what the entry had to match."""
    if not wrong.any():
        return
    i, j = (int(index) for index in np.argwhere(wrong)[0])
    got = f"w[{i}][{j}]={float(weights[i, j])!r}"
    if code == "W_ASYMMETRIC":
        got += f" but w[{j}][{i}]={float(weights[j, i])!r}"
    if code == "W_ROW_SUM":
        got += f" but neighbour weights that sum to {float(_off_diagonal(weights)[i].sum())!r}"
    raise CheckFailed(code, f"{text}, got {got}")


def _check_reachable(weights: FloatArray) -> None:
    """W_DISCONNECTED, by breadth-first search from learner 0: exact, and it can name who is cut off."""
    reached = np.zeros(len(weights), dtype=bool)
    reached[0] = True
    frontier = reached
    while frontier.any():
        frontier = (weights[frontier] > 0).any(axis=0) & ~reached
        reached = reached | frontier
    cut_off = np.flatnonzero(~reached)
    if cut_off.size:
        raise CheckFailed(
            "W_DISCONNECTED",
            "the communication graph is not connected, got no path from learner 0 "
            f"to learner {int(cut_off[0])} ({cut_off.size} of {len(weights)} learners are cut off from learner 0)",
        )


def _check_gap(spectrum: FloatArray) -> None:
    """W_DISCONNECTED for a graph held together only by weights that vanish in rounding.

    Users of delta_2 divide by it and take powers of it, so its sign must be certain. The error of a computed eigenvalue
    is about n machine epsilons times the spectral radius.
    """
    if len(spectrum) < 2:
        return
    error = len(spectrum) * float(np.finfo(np.float64).eps) * abs(float(spectrum[0]))
    if spectrum[-2] >= -error:
        raise CheckFailed(
            "W_DISCONNECTED",
            "the communication graph is not connected, "
            f"got delta_2={float(spectrum[-2]):.3g}, which is zero up to rounding ({error:.1g}): "
            "its weakest link is too small beside the largest weight",
        )


# ---- from graph to W -------------------------------------------------------------------------------------


def _adjacency(edges: Iterable[Edge], n: int) -> FloatArray:
    """The 0/1 matrix of an undirected graph, shape (n, n). A pair given twice is one edge."""
    adjacency = np.zeros((n, n))
    for i, j in edges:
        adjacency[i, j] = adjacency[j, i] = 1.0
    return adjacency


def _weigh(rule: Weights, adjacency: FloatArray) -> FloatArray:
    """W by a weight rule, shape (n, n). Metropolis and max-degree weights keep |w_ii| < 1."""
    degrees = adjacency.sum(axis=1)
    match rule:
        case ConstantWeights(value=value):
            coupling = adjacency * value
        case MetropolisWeights():
            coupling = adjacency / (1.0 + np.maximum.outer(degrees, degrees))
        case MaxDegreeWeights():
            coupling = adjacency / (1.0 + degrees.max())
        case _:
            assert_never(rule)
    with np.errstate(over="ignore"):  # an infinite sum is refused as W_SHAPE
        return coupling - np.diag(coupling.sum(axis=1))


def _connect_advice(graph: Graph) -> str:
    """What to change about a graph that came out disconnected."""
    match graph:
        case ErdosRenyi(probability=probability, seed=seed):
            return f"take another seed (now {seed}) or a larger probability (now {probability})"
        case WattsStrogatz(nearest=nearest, seed=seed):
            return f"take another seed (now {seed}) or a larger nearest (now {nearest})"
        case _:
            return "add edges until every learner can reach every other"


# ---- graphs ----------------------------------------------------------------------------------------------


def _edges(graph: Graph, n: int) -> list[Edge]:
    """The edges of a graph on learners 0..n-1.

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
        case ErdosRenyi(probability=probability, seed=seed):
            return list(nx.gnp_random_graph(n, probability, seed=seed).edges)
        case WattsStrogatz():
            return _small_world_edges(graph, n)
        case GraphFile(path=path):
            return _file_edges(path, n)
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


def _file_edges(path: Path, n: int) -> list[Edge]:
    """The edges of a GraphML file or an edge list; its nodes, sorted, are learners 0..n-1.

    Names sort as integers if all are integers, else as text (`n10` before `n2`). Only who is joined to whom is read:
    the file's edge attributes, `weight` among them, are ignored, since weights come from the spec's rule.
    """
    graph = _read_graph(path)
    if len(graph) != n:
        raise SpecError(
            f"{path}: the graph must have one node per learner ({n}), got {len(graph)} nodes; "
            "change the file or the number of learners"
        )
    if graph.is_directed():
        raise SpecError(f"{path}: the graph must be undirected, got a directed one; set edgedefault to undirected")
    for name, other in graph.edges():
        if name == other:
            raise SpecError(f"{path}: an edge must join two different nodes, got ({name}, {other}); remove it")
    index = {name: i for i, name in enumerate(_sorted_names(graph))}
    return [(index[name], index[other]) for name, other in graph.edges()]


def _read_graph(path: Path) -> nx.Graph[str]:
    """The file as networkx reads it."""
    import networkx as nx

    try:
        if path.suffix.lower() == ".graphml":
            return nx.read_graphml(path)
        return nx.read_edgelist(path, data=False)
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
