"""The section `topology` of a run spec: a graph, or a sequence of graphs, and a rule for weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed, SpecError
from sottovoce.network.fixed import FixedNetwork
from sottovoce.network.graphs import AnyGraph, AnyGraphSequence, Graph
from sottovoce.network.mixing import Mixing
from sottovoce.network.network import ChangingNetwork, Network, PartialNetwork, PeriodicNetwork, cut_off, reached
from sottovoce.network.roster import Mask, Roster, names_of
from sottovoce.network.weights import AnyWeights, MetropolisWeights
from sottovoce.registry import ENDLESS, Section


class Topology(Section):
    """Who hears whom, and with which weights: one graph (default: a ring), or a sequence of graphs."""

    graph: AnyGraph | None = None
    sequence: AnyGraphSequence | None = None
    weights: AnyWeights = MetropolisWeights()

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

    def network(self, n_learners: int, rounds: int = 1, roster: Roster | None = None) -> Network:
        """Who hears whom in which round.

        Args:
            n_learners: number of learners n.
            rounds: planned; a sequence must connect everybody within them.
            roster: who is there in which of them (default: everybody, in all).

        Raises:
            SpecError: a graph does not fit the number of learners, or its file cannot be used.
            CheckFailed: W_DISCONNECTED, W_DIRECTED, W_OWN; or W_SHAPE, if a constant weight is so large that row sums
                overflow.
        """
        names = names_of(n_learners) if roster is None else roster.names
        whole = self.without_files(names)._whole(n_learners, rounds, () if roster is None else names)
        if roster is None or not roster.absences:
            return whole
        partial = self.among(whole, roster)
        if self.sequence is None:
            self._require_connected(partial, rounds)
        return partial

    def among(self, whole: Network, roster: Roster) -> PartialNetwork:
        """The network of those who are there, connected or not.

        Args:
            whole: of all learners.
            roster: who is there in which round.
        """
        return PartialNetwork(whole, roster, self.without_files(roster.names)._among)

    def _whole(self, n_learners: int, rounds: int, names: Sequence[str]) -> Network:
        if self.sequence is not None:
            return self._connected(self._of_sequence(n_learners, rounds), rounds, names)
        graph = self._one_graph
        if graph.one_way or not self.weights.symmetric:
            mixing = self.weights.mix(graph.adjacency(n_learners), one_way=graph.one_way)
            return self._connected(PeriodicNetwork((mixing,)), 1, names)
        adjacency = graph.adjacency(n_learners)
        try:
            return FixedNetwork.from_weights(self._coupling(adjacency))
        except CheckFailed as failure:
            if failure.code != "W_DISCONNECTED":
                raise
            lacking = cut_off(adjacency, names)  # by name, where whole learners are, and not a weight too small
            text = f"the communication graph is not connected, got {lacking}" if lacking else failure.text
            raise CheckFailed(failure.code, f"{text}; {graph.advice}") from None

    def explicit(self, learners: int | Sequence[str]) -> Topology:
        """The same topology with its graphs as lists of edges: a learner elsewhere needs no file and no generator.

        A random sequence stays as it is: everybody draws it alone.

        Args:
            learners: how many, or their names.

        Raises:
            SpecError: a graph does not fit the number of learners, or its file cannot be used.
        """
        names = names_of(learners)
        without = self.without_files(names)
        if without.sequence is not None:
            return without.model_copy(update={"sequence": without.sequence.listed(len(names))})
        return without.model_copy(update={"graph": without._one_graph.listed(len(names))})

    def without_files(self, learners: int | Sequence[str]) -> Topology:
        """The same topology with what its files say in their place: as it is where it names none.

        Args:
            learners: how many, or their names.

        Raises:
            SpecError: a file cannot be used.
        """
        if not self.file:
            return self
        names = names_of(learners)
        parts = {"graph": self.graph, "sequence": self.sequence}
        return self.model_copy(update={key: part and part.read(names) for key, part in parts.items()})

    @property
    def file(self) -> bool:
        """Is a graph read from a file, which others have not?"""
        return any(part.file for part in (self.graph, self.sequence) if part is not None)

    @property
    def _one_graph(self) -> Graph:
        assert self.graph is not None  # noqa: S101 - a ring, where there is no sequence
        return self.graph

    def _of_sequence(self, n: int, rounds: int) -> Network:
        assert self.sequence is not None  # noqa: S101 - asked before
        if (period := self.sequence.period) is None:
            if rounds >= ENDLESS:
                text = "a sequence of graphs that does not repeat needs a number of rounds, got rounds: null"
                raise SpecError(f"topology.sequence: {text}; give one, or one graph")
            return ChangingNetwork(self.sequence, self.weights, n, rounds)
        return PeriodicNetwork(
            tuple(
                self.weights.mix(self.sequence.adjacency(t, n), one_way=self.sequence.one_way_at(t))
                for t in range(period)
            )
        )

    def _among(self, t: int, there: Mask) -> Mixing:
        """The weights of a round in the graph among those who are there, `(learners,)`."""
        n, sequence = len(there), self.sequence
        graph = self._one_graph if sequence is None else sequence
        adjacency = self._one_graph.adjacency(n) if sequence is None else sequence.adjacency(t, n)
        adjacency *= np.outer(there, there)
        one_way = graph.one_way if sequence is None else sequence.one_way_at(t)
        if self.weights.free and not one_way:
            coupling = self._coupling(adjacency)
            own = 1.0 + np.diag(coupling)
            np.fill_diagonal(coupling, 0.0)
            return Mixing(coupling, own)
        return self.weights.mix(adjacency, one_way=one_way)

    def _require_connected(self, network: PartialNetwork, rounds: int) -> None:
        """Whoever is there must reach everybody who is, in every round.

        Raises:
            CheckFailed: W_DISCONNECTED.
        """
        roster = network.roster
        for t in (0, *(change for change in roster.changes if change < rounds)):
            there = np.flatnonzero(roster.there(t))
            hears = self._among(t, roster.there(t)).neighbours[np.ix_(there, there)]
            if (lost := np.flatnonzero(~(reached(hears) & reached(hears.T)))).size:
                first, other = roster.names[there[0]], roster.names[there[lost[0]]]
                raise CheckFailed(
                    "W_DISCONNECTED",
                    f"the communication graph among the {there.size} learners who are there from round {t} on is not connected, "
                    f"got no path both ways between {first} and {other}; {self._one_graph.advice}, or change absences",
                )

    def _coupling(self, adjacency: FloatArray) -> FloatArray:
        """W, `(n, n)`. All rules but free ones keep |w_ii| < 1."""
        if not self.weights.free:
            self.weights.mix(adjacency, one_way=False)
        with np.errstate(over="ignore"):  # an infinite sum is refused as W_SHAPE
            coupling = self.weights.couplings(adjacency)
            return coupling - np.diag(coupling.sum(axis=1))

    def _connected(self, network: Network, rounds: int, names: Sequence[str]) -> Network:
        """The network, if its planned rounds together connect everybody with everybody.

        Raises:
            CheckFailed: W_DISCONNECTED.
        """
        union, lacking = np.zeros((network.n_learners, network.n_learners), dtype=bool), ""
        for t in range(min(rounds, network.horizon)):
            union |= network.at(t).neighbours > 0
            if not (lacking := cut_off(union, names)):
                return network
        one = network.horizon == 1
        what = "the communication graph is" if one else f"the graphs of rounds 0 to {rounds - 1} together are"
        advice = (self.sequence or self._one_graph).advice
        raise CheckFailed("W_DISCONNECTED", f"{what} not strongly connected, got {lacking}; {advice}")
