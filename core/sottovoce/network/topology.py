"""The coupling matrix W of one undirected graph (Chen & Wang 2025), and the network that a run spec describes.

`w_ij >= 0` is the weight that learner i gives to what it hears from j, zero where there is no edge. W is symmetric and
its rows sum to zero (`w_ii = -sum_j w_ij`), so -W is a weighted graph Laplacian: all eigenvalues are at most 0, and 0
is a simple one exactly if the graph is connected. `I + W` is the mixing matrix.

A `TopologySpec` is a graph, or a sequence of graphs, and a rule for weights. One undirected graph with symmetric weights is
a `Topology`; whatever else there is, is another `Network`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed
from sottovoce.network.graphs import Edge, adjacency_of, as_edges, is_directed
from sottovoce.network.network import (
    ROUNDING,
    Mixing,
    Network,
    PeriodicNetwork,
    RandomNetwork,
    couplings,
    cut_off,
    mix,
    reached,
)
from sottovoce.network.specs import (
    ConstantWeights,
    ErdosRenyi,
    Graph,
    GraphFile,
    InDegreeWeights,
    OutDegreeWeights,
    PeriodicGraphs,
    RandomGraphs,
    Ring,
    TopologySpec,
    WattsStrogatz,
    Weights,
)

__all__ = ["Edge", "Mixing", "Network", "Topology", "build_topology", "explicit", "names_files", "without_files"]


@dataclass(frozen=True, slots=True, eq=False)
class Topology(Network):
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
        return len(self.weights)

    @property
    def horizon(self) -> int:
        return 1

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


def build_topology(spec: TopologySpec, n_learners: int, rounds: int = 1) -> Network:
    """The network that a run spec describes.

    Args:
        spec: a graph or a sequence of graphs, and a rule for weights.
        n_learners: number of learners n.
        rounds: planned; a sequence must connect everybody within them.

    Raises:
        SpecError: a graph does not fit the number of learners, or its file cannot be used.
        CheckFailed: W_DISCONNECTED, W_DIRECTED, W_OWN; or W_SHAPE, if a constant weight is so large that row sums overflow.
    """
    match spec.sequence:
        case RandomGraphs():
            return _connected(RandomNetwork(spec.sequence, spec.weights, n_learners, rounds), rounds, spec)
        case PeriodicGraphs(graphs=graphs):
            return _connected(_periodic(graphs, spec.weights, n_learners), rounds, spec)
    graph = spec.graph or Ring(kind="ring")
    if is_directed(graph) or isinstance(spec.weights, InDegreeWeights | OutDegreeWeights):
        return _connected(_periodic((graph,), spec.weights, n_learners), 1, spec)
    try:
        return Topology.from_weights(_coupling(spec.weights, adjacency_of(graph, n_learners)))
    except CheckFailed as failure:
        if failure.code != "W_DISCONNECTED":
            raise
        raise CheckFailed(failure.code, f"{failure.text}; {_connect_advice(spec)}") from None


def explicit(spec: TopologySpec, n_learners: int) -> TopologySpec:
    """The same topology with its graphs as lists of edges: a learner elsewhere needs no file and no generator.

    A random sequence stays as it is: everybody draws it alone.

    Raises:
        SpecError: a graph does not fit the number of learners, or its file cannot be used.
    """
    if isinstance(spec.sequence, PeriodicGraphs):
        graphs = tuple(as_edges(graph, n_learners) for graph in spec.sequence.graphs)
        return spec.model_copy(update={"sequence": PeriodicGraphs(kind="periodic", graphs=graphs)})
    return spec if spec.graph is None else spec.model_copy(update={"graph": as_edges(spec.graph, n_learners)})


def without_files(spec: TopologySpec, n_learners: int) -> TopologySpec:
    """The same topology for somebody who has not the spec's files: as it is where it names none.

    Raises:
        SpecError: a file cannot be used.
    """
    return explicit(spec, n_learners) if names_files(spec) else spec


def names_files(spec: TopologySpec) -> bool:
    """Whether a graph is to be read from a file."""
    graphs = spec.sequence.graphs if isinstance(spec.sequence, PeriodicGraphs) else (spec.graph,)
    return any(isinstance(graph, GraphFile) for graph in graphs)


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
    missing = np.flatnonzero(~reached(_off_diagonal(weights)))
    if missing.size:
        raise CheckFailed(
            "W_DISCONNECTED",
            "the communication graph is not connected, got no path from learner 0 "
            f"to learner {int(missing[0])} ({missing.size} of {len(weights)} learners are cut off from learner 0)",
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


# ---- from a spec to weights ------------------------------------------------------------------------------


def _coupling(rule: Weights, adjacency: FloatArray) -> FloatArray:
    """W by a weight rule, `(n, n)`. All rules but constant weights keep |w_ii| < 1."""
    if not isinstance(rule, ConstantWeights):
        mix(rule, adjacency, directed=False)
    with np.errstate(over="ignore"):  # an infinite sum is refused as W_SHAPE
        coupling = couplings(rule, adjacency)
        return coupling - np.diag(coupling.sum(axis=1))


def _periodic(graphs: tuple[Graph, ...], rule: Weights, n: int) -> PeriodicNetwork:
    """The weights of these graphs, in turn."""
    return PeriodicNetwork(tuple(mix(rule, adjacency_of(graph, n), directed=is_directed(graph)) for graph in graphs))


def _connected(network: Network, rounds: int, spec: TopologySpec) -> Network:
    """The network, if its planned rounds together connect everybody with everybody.

    Raises:
        CheckFailed: W_DISCONNECTED.
    """
    union, lacking = np.zeros((network.n_learners, network.n_learners), dtype=bool), ""
    for t in range(min(rounds, network.horizon)):
        union |= network.at(t).neighbours > 0
        if not (lacking := cut_off(union)):
            return network
    what = (
        "the communication graph is" if network.horizon == 1 else f"the graphs of rounds 0 to {rounds - 1} together are"
    )
    raise CheckFailed("W_DISCONNECTED", f"{what} not strongly connected, got {lacking}; {_connect_advice(spec)}")


def _connect_advice(spec: TopologySpec) -> str:
    """What to change about graphs that came out disconnected."""
    match spec.sequence or spec.graph:
        case ErdosRenyi(probability=probability, seed=seed) | RandomGraphs(probability=probability, seed=seed):
            return f"take another seed (now {seed}) or a larger probability (now {probability})"
        case WattsStrogatz(nearest=nearest, seed=seed):
            return f"take another seed (now {seed}) or a larger nearest (now {nearest})"
        case _:
            return "add edges until every learner can reach every other"
