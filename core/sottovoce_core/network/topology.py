"""Section `topology` of a run spec: a graph, or a sequence of graphs, and a weight rule.

The coupling matrix W of one undirected graph (Chen & Wang 2025).

`w_ij >= 0` is the weight that learner i gives to messages of j, zero without an edge. W is symmetric and its rows sum to zero
(`w_ii = -sum_j w_ij`), so -W is a weighted graph Laplacian: all eigenvalues are at most 0, and 0 is simple exactly if the graph
is connected. `I + W` is the mixing matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from sottovoce_core.arrays import FloatArray, summarize_fields
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.network.graph_files import Edge
from sottovoce_core.network.graphs import AnyGraph, AnyGraphSequence, Graph
from sottovoce_core.network.network import (
    ChangingNetwork,
    Network,
    PartialNetwork,
    PeriodicNetwork,
    describe_disconnection,
    find_reachable,
)
from sottovoce_core.network.participation_schedule import Mask, ParticipationSchedule, resolve_learner_names
from sottovoce_core.network.weights import WEIGHT_SUM_TOLERANCE, AnyWeights, MetropolisWeights, Mixing
from sottovoce_core.registry import UNBOUNDED_ROUNDS, Section

# ---- fixed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class FixedNetwork(Network):
    """A connected graph of learners and its coupling matrix. Make one with `from_weights`.

    Instances compare by identity; compare `weights` to compare matrices.
    """

    weights: FloatArray
    """W, shape (n, n)."""
    _spectrum: FloatArray = field(init=False, repr=False)
    """Eigenvalues of W, ascending, shape (n,)."""
    _mixing: Mixing = field(init=False, repr=False)

    __repr__ = summarize_fields

    def __post_init__(self) -> None:
        _check_entries(self.weights)
        if lacking := describe_disconnection(_off_diagonal(self.weights)):
            raise AssumptionViolated("W_DISCONNECTED", f"the communication graph is not connected, got {lacking}")
        spectrum: FloatArray = np.linalg.eigvalsh(self.weights).astype(np.float64)
        _check_gap(spectrum)
        object.__setattr__(self, "_spectrum", spectrum)
        object.__setattr__(self, "_mixing", Mixing(_off_diagonal(self.weights), 1.0 + np.diag(self.weights)))

    @classmethod
    def from_weights(cls, matrix: Any) -> FixedNetwork:
        """Make the network with this coupling matrix, which is copied and made read-only.

        Raises:
            AssumptionViolated: W_SHAPE, W_NEGATIVE, W_ASYMMETRIC, W_ROW_SUM or W_DISCONNECTED: the first that fails.
        """
        try:
            weights: FloatArray = np.array(matrix, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise AssumptionViolated("W_SHAPE", f"weights must be a finite square matrix, got {error}") from None
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

    def neighbours(self, learner: int) -> frozenset[int]:
        return self._mixing.all_neighbours(learner)

    @property
    def delta_2(self) -> float:
        """Second largest eigenvalue of W, always negative: the slowest rate at which disagreement vanishes.

        It is the largest Rayleigh quotient of W over the non-zero vectors that sum to zero. A single learner has no such vector,
        so its `delta_2` is the supremum of the empty set, -inf: an upper limit proportional to `-delta_2` is then no limit.
        """
        return float(self._spectrum[-2]) if self.n_learners > 1 else float("-inf")

    @property
    def delta_m(self) -> float:
        """Smallest eigenvalue of W (0 for a single learner)."""
        return float(self._spectrum[0])

    def mixing(self, t: int) -> Mixing:
        """Return the weights, equal in all rounds: neighbours' `w_ij`, and `1 - |w_ii|` for the own value."""
        return self._mixing

    def own_weight(self, learner: int) -> float:
        """Return |w_ii|, the sum of the learner's neighbour weights."""
        return abs(float(self.weights[learner, learner]))


# ---- checks of W -----------------------------------------------------------------------------------------


def _off_diagonal(weights: FloatArray) -> FloatArray:
    """Copy the matrix with zeros on the diagonal."""
    coupling = weights.copy()
    np.fill_diagonal(coupling, 0.0)
    return coupling


def _check_entries(weights: FloatArray) -> None:
    """Check the entries: W_SHAPE, W_NEGATIVE, W_ASYMMETRIC, W_ROW_SUM."""
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or weights.size == 0:
        raise AssumptionViolated("W_SHAPE", f"weights must be a finite square matrix, got shape {weights.shape}")
    _raise_about_entry("W_SHAPE", "weights must be a finite square matrix", weights, ~np.isfinite(weights))
    _raise_about_entry("W_NEGATIVE", "coupling weights must be non-negative", weights, _off_diagonal(weights) < 0)
    # Relative to the largest entry, so that the checks are independent of scale and cannot overflow.
    relative = weights / (np.abs(weights).max() or 1.0)
    # However small its weight, an edge known to one end only would make that end wait for the other.
    one_sided = (weights > 0) != (weights.T > 0)
    asymmetric = (np.abs(relative - relative.T) > WEIGHT_SUM_TOLERANCE) | one_sided
    _raise_about_entry("W_ASYMMETRIC", "coupling weights must be symmetric", weights, asymmetric)
    unbalanced = np.diag(np.abs(relative.sum(axis=1)) > WEIGHT_SUM_TOLERANCE)
    text = "each diagonal weight must equal minus the sum of its row's neighbour weights"
    _raise_about_entry("W_ROW_SUM", text, weights, unbalanced)


def _raise_about_entry(code: str, text: str, weights: FloatArray, wrong: npt.NDArray[np.bool_]) -> None:
    """Raise an error about the first entry that is `wrong`, with the required value."""
    if not wrong.any():
        return
    i, j = (int(index) for index in np.argwhere(wrong)[0])
    got = f"w[{i}][{j}]={float(weights[i, j])!r}"
    if code == "W_ASYMMETRIC":
        got += f" but w[{j}][{i}]={float(weights[j, i])!r}"
    if code == "W_ROW_SUM":
        got += f" but neighbour weights that sum to {float(_off_diagonal(weights)[i].sum())!r}"
    raise AssumptionViolated(code, f"{text}, got {got}")


def _check_gap(spectrum: FloatArray) -> None:
    """Check W_DISCONNECTED for a graph connected only by weights that vanish in rounding.

    Users of delta_2 divide by it and take powers of it, so its sign must be certain. The error of a computed eigenvalue
    is about n machine epsilons times the spectral radius.
    """
    if len(spectrum) < 2:
        return
    error = len(spectrum) * float(np.finfo(np.float64).eps) * abs(float(spectrum[0]))
    if spectrum[-2] >= -error:
        raise AssumptionViolated(
            "W_DISCONNECTED",
            "the communication graph is not connected, "
            f"got delta_2={float(spectrum[-2]):.3g}, which is zero up to rounding ({error:.1g}): "
            "its weakest link is too small beside the largest weight",
        )


# ---- topology --------------------------------------------------------------------------------------------------------


class Topology(Section):
    """Edges and weights between learners: one graph (default: a ring), or a sequence of graphs."""

    graph: AnyGraph | None = None
    """One graph for all rounds; not with `sequence`."""
    sequence: AnyGraphSequence | None = None
    """A graph for each round; not with `graph`."""
    weights: AnyWeights = MetropolisWeights()
    """Rule for the mixing weights."""

    @model_validator(mode="before")
    @classmethod
    def _ring_by_default(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and fields.get("graph") is None and fields.get("sequence") is None:
            return {**fields, "graph": {"kind": "ring"}}
        return fields

    @model_validator(mode="after")
    def _graph_or_sequence(self) -> Self:
        if self.graph is not None and self.sequence is not None:
            raise ValueError("graph and sequence exclude each other; leave one of them out")
        return self

    def build_network(self, n_learners: int, rounds: int = 1, roster: ParticipationSchedule | None = None) -> Network:
        """Build the network of all planned rounds.

        Args:
            n_learners: number of learners n.
            rounds: number of planned rounds; a sequence must connect all learners within them.
            roster: participation by round (default: all learners, in all rounds).

        Raises:
            SpecError: a graph does not fit the number of learners, or its file cannot be used.
            AssumptionViolated: W_DISCONNECTED, W_DIRECTED, W_OWN; or W_SHAPE, if a constant weight is so large that row sums
                overflow.
        """
        names = resolve_learner_names(n_learners) if roster is None else roster.names
        whole = self.inline_files(names)._build_full_network(n_learners, rounds, () if roster is None else names)
        if roster is None or not roster.offline_intervals:
            return whole
        partial = self.build_partial_network(whole, roster)
        if self.sequence is None:
            self._require_connectivity(partial, rounds)
        return partial

    def build_partial_network(self, whole: Network, roster: ParticipationSchedule) -> PartialNetwork:
        """Build the network of the participants, connected or not.

        Args:
            whole: network of all learners.
            roster: participation by round.
        """
        return PartialNetwork(whole, roster, self.inline_files(roster.names)._mix_among)

    def _build_full_network(self, n_learners: int, rounds: int, names: Sequence[str]) -> Network:
        if self.sequence is not None:
            return self._require_union_connectivity(self._build_from_sequence(n_learners, rounds), rounds, names)
        graph = self._single_graph
        adjacency = graph.adjacency(n_learners)
        if graph.is_directed or not self.weights.is_symmetric:
            mixing = self.weights.mix(adjacency, is_directed=graph.is_directed)
            return self._require_union_connectivity(PeriodicNetwork((mixing,)), 1, names)
        coupling = self._coupling(adjacency)
        if lacking := describe_disconnection(adjacency, names):  # by name
            text = f"the communication graph is not connected, got {lacking}; {graph.advice}"
            raise AssumptionViolated("W_DISCONNECTED", text)
        return FixedNetwork.from_weights(coupling)

    def to_edge_list(self, learners: int | Sequence[str]) -> Topology:
        """Return the topology with its graphs as lists of edges: a learner elsewhere needs no file and no generator.

        A random sequence stays unchanged: every learner generates it independently.

        Args:
            learners: number of learners, or their names.

        Raises:
            SpecError: a graph does not fit the number of learners, or its file cannot be used.
        """
        names = resolve_learner_names(learners)
        return self.inline_files(names)._replace_graphs(lambda part: part.to_edge_list(len(names)))

    def inline_files(self, learners: int | Sequence[str]) -> Topology:
        """Return the topology with the content of its files inlined; unchanged if it names no file.

        Args:
            learners: number of learners, or their names.

        Raises:
            SpecError: a file cannot be used.
        """
        names = resolve_learner_names(learners)
        return self._replace_graphs(lambda part: part.inline_files(names)) if self.has_file else self

    def _replace_graphs(self, change: Callable[[Any], object]) -> Topology:
        parts = {"graph": self.graph, "sequence": self.sequence}
        return self.model_copy(update={key: part and change(part) for key, part in parts.items()})

    @property
    def has_file(self) -> bool:
        """True if a graph is read from a file, which others do not have."""
        return any(part.has_file for part in (self.graph, self.sequence) if part is not None)

    @property
    def _single_graph(self) -> Graph:
        assert self.graph is not None  # noqa: S101 - a ring, if there is no sequence
        return self.graph

    def _build_from_sequence(self, n: int, rounds: int) -> Network:
        assert self.sequence is not None  # noqa: S101 - checked before
        if (period := self.sequence.period) is None:
            if rounds >= UNBOUNDED_ROUNDS:
                text = "a sequence of graphs that does not repeat needs a number of rounds, got rounds: null"
                raise SpecError(f"topology.sequence: {text}; give one, or one graph")
            return ChangingNetwork(self.sequence, self.weights, n, rounds)
        return PeriodicNetwork(
            tuple(
                self.weights.mix(self.sequence.adjacency(t, n), is_directed=self.sequence.is_directed_at(t))
                for t in range(period)
            )
        )

    def _mix_among(self, t: int, there: Mask) -> Mixing:
        """Return the weights of a round in the graph among some learners, `(learners,)`."""
        n, sequence = len(there), self.sequence
        adjacency = self._single_graph.adjacency(n) if sequence is None else sequence.adjacency(t, n)
        adjacency *= np.outer(there, there)
        one_way = self._single_graph.is_directed if sequence is None else sequence.is_directed_at(t)
        if self.weights.has_unbounded_row_sums and not one_way:
            coupling = self._coupling(adjacency)
            own = 1.0 + np.diag(coupling)
            np.fill_diagonal(coupling, 0.0)
            return Mixing(coupling, own)
        return self.weights.mix(adjacency, is_directed=one_way)

    def _require_connectivity(self, network: PartialNetwork, rounds: int) -> None:
        """Require that each participant can reach every other one, in every round.

        Raises:
            AssumptionViolated: W_DISCONNECTED.
        """
        roster = network.participation
        for t in (0, *(change for change in roster.changes if change < rounds)):
            there = np.flatnonzero(roster.participant_mask(t))
            received = self._mix_among(t, roster.participant_mask(t)).neighbour_weights[np.ix_(there, there)]
            if (lost := np.flatnonzero(~(find_reachable(received) & find_reachable(received.T)))).size:
                first, other = roster.names[there[0]], roster.names[there[lost[0]]]
                raise AssumptionViolated(
                    "W_DISCONNECTED",
                    f"the communication graph among the {there.size} participants from round {t} on must be connected, "
                    f"got no path both ways between {first} and {other}; {self._single_graph.advice}, or "
                    "change offline_intervals",
                )

    def _coupling(self, adjacency: FloatArray) -> FloatArray:
        """Return W, `(n, n)`. All rules but free ones keep |w_ii| < 1."""
        if not self.weights.has_unbounded_row_sums:
            self.weights.mix(adjacency, is_directed=False)
        with np.errstate(over="ignore"):  # an infinite sum is refused as W_SHAPE
            coupling = self.weights.couplings(adjacency)
            return coupling - np.diag(coupling.sum(axis=1))

    def _require_union_connectivity(self, network: Network, rounds: int, names: Sequence[str]) -> Network:
        """Return the network if its planned rounds together connect all learners.

        Raises:
            AssumptionViolated: W_DISCONNECTED.
        """
        union, lacking = np.zeros((network.n_learners, network.n_learners), dtype=bool), ""
        for t in range(min(rounds, network.horizon)):
            union |= network.mixing(t).neighbour_weights > 0
            if not (lacking := describe_disconnection(union, names)):
                return network
        one = network.horizon == 1
        what = "the communication graph is" if one else f"the graphs of rounds 0 to {rounds - 1} together are"
        advice = (self.sequence or self._single_graph).advice
        raise AssumptionViolated("W_DISCONNECTED", f"{what} not strongly connected, got {lacking}; {advice}")
