"""Networks that change or are directed: which weights fit which graphs, what sums to one, and who reaches whom when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce_core.errors import AssumptionViolated, CaptureError, SpecError
from sottovoce_core.network.graphs import _Edges, _RandomGraphs
from sottovoce_core.network.network import Network, NetworkDigests, PeriodicNetwork, describe_disconnection
from sottovoce_core.network.participation_schedule import ParticipationSchedule
from sottovoce_core.network.topology import FixedNetwork, Topology
from sottovoce_core.network.weights import MetropolisWeights, Mixing, combine_digests
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec
from tests.examples import made_up
from tests.gossip import gossip_spec

pytestmark = pytest.mark.each

CYCLE = {"kind": "edges", "edges": [(0, 1), (1, 2), (2, 0)], "directed": True}
FORK = {"kind": "edges", "edges": [(0, 1), (0, 2), (1, 2), (2, 0)], "directed": True}
"""0 tells 1 and 2, 1 tells 2, 2 tells 0."""


def network(n: int, rounds: int = 50, **topology: Any) -> Network:
    return Topology.model_validate(topology).build_network(n, rounds)


def periodic(*graphs: Any) -> dict[str, Any]:
    return {"kind": "periodic", "graphs": list(graphs)}


def edges(*pairs: tuple[int, int], directed: bool = False) -> dict[str, Any]:
    return {"kind": "edges", "edges": list(pairs), "directed": directed}


def random(probability: float = 0.3, seed: int = 0, *, directed: bool = False) -> dict[str, Any]:
    return {"kind": "random", "probability": probability, "seed": seed, "directed": directed}


def step(value: float) -> dict[str, Any]:
    return {"kind": "laplacian", "step": value}


# ---- weights ---------------------------------------------------------------------------------------------------------


def sums_to_one(built: Network, rounds: int | None = None) -> tuple[bool, bool]:
    """Whether rows, and columns, of the weights of all rounds do."""
    matrices = np.stack([built.mixing(t).matrix for t in range(rounds or built.horizon)])
    assert matrices.min() >= 0.0
    rows, columns = (bool((np.abs(matrices.sum(axis=axis) - 1.0) <= 1e-12).all()) for axis in (2, 1))
    return rows, columns


@pytest.mark.parametrize(
    ("weights", "matrix"),
    [
        ("out_degree", [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]),
        ("in_degree", [[1 / 2, 0, 1 / 2], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]]),
        (step(0.2), [[0.8, 0, 0.2], [0.2, 0.8, 0], [0.2, 0.2, 0.6]]),
        ({"kind": "in_degree", "lazy": True}, [[3 / 4, 0, 1 / 4], [1 / 4, 3 / 4, 0], [1 / 6, 1 / 6, 2 / 3]]),
        ({"kind": "out_degree", "lazy": True}, [[2 / 3, 0, 1 / 4], [1 / 6, 3 / 4, 0], [1 / 6, 1 / 4, 3 / 4]]),
    ],
)
def test_weights_of_a_directed_graph(weights: Any, matrix: Any) -> None:
    """Rows receive: 0 tells 1 and 2, so column 0 has its messages."""
    built = network(3, graph=FORK, weights=weights)
    np.testing.assert_allclose(built.mixing(7).matrix, matrix, rtol=1e-15)
    assert sums_to_one(built) == ("out_degree" not in str(weights), "out_degree" in str(weights))
    assert built.mixing(0).in_neighbour_weights(2) == {0: matrix[2][0], 1: matrix[2][1]}
    assert [built.mixing(0).out_neighbours(i) for i in range(3)] == [(1, 2), (2,), (0,)]
    assert built.edges == ((0, 1), (0, 2), (1, 2))


@pytest.mark.parametrize("weights", ["in_degree", "out_degree", step(0.4)])
def test_a_balanced_directed_graph_is_doubly_stochastic(weights: Any) -> None:
    built = network(3, graph=CYCLE, weights=weights)
    assert isinstance(built, PeriodicNetwork)
    assert sums_to_one(built) == (True, True)


@pytest.mark.parametrize("weights", ["metropolis", "max_degree", step(0.3), {"kind": "constant", "value": 0.3}])
def test_one_undirected_graph_with_symmetric_weights_is_a_topology(weights: Any) -> None:
    built = network(5, graph="ring", weights=weights)
    assert isinstance(built, FixedNetwork)
    assert sums_to_one(built) == (True, True)
    assert built.horizon == 1


@pytest.mark.parametrize("weights", ["in_degree", "out_degree"])
def test_degree_weights_of_an_undirected_graph_are_not_symmetric(weights: str) -> None:
    """A star: the centre has degree 3, the others 1."""
    built = network(4, graph="star", weights=weights)
    assert isinstance(built, PeriodicNetwork)
    matrix = built.mixing(0).matrix if weights == "in_degree" else built.mixing(0).matrix.T
    np.testing.assert_allclose(matrix[:2, :2], [[1 / 4, 1 / 4], [1 / 2, 1 / 2]])


def test_lazy_weights_have_no_negative_eigenvalue() -> None:
    plain, lazy = (
        network(4, graph="ring", weights={"kind": "constant", "value": 0.45, "lazy": lazy}) for lazy in (False, True)
    )
    np.testing.assert_allclose(lazy.mixing(0).matrix, (np.eye(4) + plain.mixing(0).matrix) / 2)
    assert np.linalg.eigvalsh(plain.mixing(0).matrix)[0] < -0.1
    assert np.linalg.eigvalsh(lazy.mixing(0).matrix)[0] >= 0.0


@pytest.mark.parametrize("rule", ["metropolis", "max_degree", {"kind": "constant", "value": 0.1}])
@pytest.mark.parametrize(
    "where", [{"graph": CYCLE}, {"sequence": periodic("ring", CYCLE)}, {"sequence": random(directed=True)}]
)
def test_rules_for_undirected_graphs_are_refused_on_directed_ones(rule: Any, where: dict[str, Any]) -> None:
    with pytest.raises(
        AssumptionViolated, match=r"weights need undirected graphs, got a directed one; take out_degree"
    ) as no:
        network(3, weights=rule, **where)
    assert no.value.code == "W_DIRECTED"


@pytest.mark.parametrize(
    ("weights", "where", "limit"),
    [
        (step(0.5), {"graph": "ring"}, "0.5"),
        (step(0.5), {"graph": FORK}, "0.5"),
        ({"kind": "constant", "value": 0.6}, {"sequence": periodic("ring", "path")}, "0.5"),
        (step(0.25), {"sequence": random()}, "0.25"),
        ({"kind": "laplacian", "step": 1.0, "lazy": True}, {"graph": "ring"}, "1"),
    ],
)
def test_a_learner_must_keep_some_weight_for_itself(weights: Any, where: dict[str, Any], limit: str) -> None:
    n = 3 if where.get("graph") == FORK else 5
    with pytest.raises(
        AssumptionViolated, match=rf"positive weight for its own value, got .*; take weights below {limit} "
    ) as no:
        network(n, weights=weights, **where)
    assert no.value.code == "W_OWN"


# ---- sequences -------------------------------------------------------------------------------------------------------


def test_a_periodic_sequence_comes_again() -> None:
    built = network(3, sequence=periodic(edges((0, 1)), edges((1, 2)), edges((1, 2))))
    assert [[built.mixing(t).out_neighbours(i) for i in range(3)] for t in (0, 1, 3, 301)] == [
        [(1,), (0,), ()],
        [(), (2,), (1,)],
        [(1,), (0,), ()],
        [(), (2,), (1,)],
    ]
    assert built.mixing(0).own_weights.tolist() == [0.5, 0.5, 1.0]
    assert (sums_to_one(built), built.edges, built.horizon) == ((True, True), ((0, 1), (1, 2)), 3)


@pytest.mark.parametrize("directed", [False, True])
def test_a_random_sequence_is_a_function_of_seed_and_round(directed: bool) -> None:
    def drawn(seed: int) -> list[Any]:
        graphs = _RandomGraphs(kind="random", probability=0.3, seed=seed, directed=directed)
        return [graphs.adjacency(t, 12).tolist() for t in (5, 0, 1)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1]


def test_a_random_sequence_is_the_same_on_every_machine() -> None:
    """Numbers of this implementation: if they change, learners of different versions cannot run together."""
    graphs = _RandomGraphs(kind="random", probability=0.5, seed=7)
    pairs = [tuple(pair) for pair in np.argwhere(np.triu(graphs.adjacency(3, 5))).tolist()]
    assert pairs == [(0, 3), (1, 2), (2, 3)]


@pytest.mark.parametrize("directed", [False, True])
def test_pairs_are_drawn_with_their_probability_and_independently(directed: bool) -> None:
    """1000 rounds of 20 learners, p = 0.3. Each mean is within 6 standard errors but for a chance below 1e-6 for all."""
    graphs = _RandomGraphs(kind="random", probability=0.3, seed=1, directed=directed)
    drawn = np.stack([graphs.adjacency(t, 20) for t in range(1000)])
    assert set(np.unique(drawn)) == {0.0, 1.0}
    assert not drawn[:, range(20), range(20)].any()
    means = drawn.mean(axis=0)[~np.eye(20, dtype=bool)]
    error = np.sqrt(0.3 * 0.7 / 1000)
    assert np.abs(means - 0.3).max() < 6 * error
    both = (drawn * drawn.transpose(0, 2, 1)).mean(axis=0)[~np.eye(20, dtype=bool)]
    assert np.abs(both - (0.09 if directed else 0.3)).max() < 6 * error


@pytest.mark.parametrize(
    ("weights", "directed", "rows", "columns"),
    [
        ("metropolis", False, True, True),
        (step(0.1), False, True, True),
        ("in_degree", False, True, False),
        ("out_degree", False, False, True),
        (step(0.1), True, True, False),
        ("in_degree", True, True, False),
        ("out_degree", True, False, True),
    ],
)
def test_what_sums_to_one_in_a_random_sequence_follows_from_the_rule(
    weights: Any, directed: bool, rows: bool, columns: bool
) -> None:
    built = network(8, sequence=random(directed=directed), weights=weights)
    assert sums_to_one(built, 30) == (rows, columns)
    assert len(built.edges) == 28
    assert built.horizon == 50


# ---- connectivity ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "lost"),
    [
        ({"graph": edges((0, 1), (2, 3))}, "is not connected, got no path of messages from ann to Krankenhaus Süd"),
        ({"graph": edges((0, 1), (1, 2), (2, 0), (2, 3), directed=True), "weights": "in_degree"}, "from eve to ann "),
        ({"sequence": periodic(edges((0, 1)), edges((2, 3))), "weights": "in_degree"}, "from ann to Krankenhaus Süd"),
    ],
    ids=["graph", "directed", "sequence"],
)
def test_learners_that_are_cut_off_are_named(where: dict[str, Any], lost: str) -> None:
    with pytest.raises(AssumptionViolated, match=lost):
        Topology.model_validate(where).build_network(
            4, 50, ParticipationSchedule(["ann", "ben", "Krankenhaus Süd", "eve"], [])
        )


@pytest.mark.parametrize(
    ("where", "lost"),
    [
        ({"graph": edges((0, 1), (1, 2), (2, 0), (2, 3), directed=True)}, "from learner 3 to learner 0 .*1 of 4"),
        ({"graph": edges((0, 1), (1, 2), (2, 0), (3, 2), directed=True)}, "from learner 0 to learner 3 .*1 of 4"),
        (
            {"sequence": periodic(edges((0, 1)), edges((2, 3)))},
            r"rounds 0 to 49 .*from learner 0 to learner 2 \(2 of 4",
        ),
        ({"sequence": random(1e-9, 4)}, r"another seed \(now 4\) or a larger probability \(now 1e-09\)"),
    ],
)
def test_a_network_that_never_connects_everybody_is_refused(where: dict[str, Any], lost: str) -> None:
    with pytest.raises(AssumptionViolated, match=lost) as no:
        network(4, weights="in_degree", **where)
    assert no.value.code == "W_DISCONNECTED"
    assert "not strongly connected" in no.value.text


def test_a_sequence_must_connect_everybody_within_the_rounds_of_the_run() -> None:
    """The second graph comes too late."""
    sequence = periodic(edges((0, 1)), edges((1, 2)))
    with pytest.raises(AssumptionViolated, match="W_DISCONNECTED"):
        network(3, 1, sequence=sequence)
    assert network(3, 2, sequence=sequence).n_learners == 3
    document = {"rounds": 1, "learners": 3, "topology": {"sequence": sequence}, "algorithm": {"name": "ldp-dol"}}
    with pytest.raises(AssumptionViolated, match="W_DISCONNECTED"):
        build_run(parse_spec(document, allow_imports=True), 3)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.data())
def test_strong_connectivity_is_networkx_s(n: int, data: st.DataObject) -> None:
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    reference: nx.DiGraph[int] = nx.DiGraph(chosen)
    reference.add_nodes_from(range(n))
    hears = np.zeros((n, n))
    for i, j in chosen:
        hears[j, i] = 1.0
    assert (describe_disconnection(hears) == "") == nx.is_strongly_connected(reference)


# ---- files, and what a learner is given ------------------------------------------------------------------------------


def test_directed_edges_of_files_lead_from_teller_to_hearer(tmp_path: Path) -> None:
    listed, graphml = tmp_path / "a.txt", tmp_path / "b.graphml"
    listed.write_text("1 0\n0 2\n2 1\n", encoding="utf-8")
    nx.write_graphml(nx.DiGraph([("1", "0"), ("0", "2"), ("2", "1")]), graphml)
    for path in (listed, graphml):
        graph = {"kind": "file", "path": path, "directed": True}
        built = network(3, graph=graph, weights="out_degree")
        assert [built.mixing(0).out_neighbours(i) for i in range(3)] == [(2,), (0,), (1,)]
        told = Topology.model_validate({"graph": graph, "weights": "out_degree"}).to_edge_list(3)
        assert isinstance(told.graph, _Edges) and told.graph.directed
        assert sorted(told.graph.edges) == [(0, 2), (1, 0), (2, 1)]


def test_a_graphml_file_is_directed_exactly_if_the_spec_says_so(tmp_path: Path) -> None:
    path = tmp_path / "b.graphml"
    nx.write_graphml(nx.Graph([("a", "b")]), path)
    with pytest.raises(SpecError, match="must be directed, got an undirected one"):
        network(2, graph={"kind": "file", "path": path, "directed": True}, weights="out_degree")


def test_random_digraphs_are_directed() -> None:
    graph = {"kind": "erdos_renyi", "probability": 0.4, "seed": 1, "directed": True}
    heard = network(12, graph=graph, weights="in_degree").mixing(0).neighbour_weights > 0
    assert (heard != heard.T).any()


@pytest.mark.parametrize(
    "topology",
    [
        {"graph": "ring"},
        {"graph": FORK, "weights": "out_degree"},
        {"graph": {"kind": "erdos_renyi", "probability": 0.8, "seed": 0, "directed": True}, "weights": "in_degree"},
        {"sequence": periodic("ring", "star", {"kind": "erdos_renyi", "probability": 0.5})},
        {"sequence": periodic(FORK, CYCLE), "weights": "out_degree"},
        {"sequence": random(directed=True), "weights": step(0.1)},
    ],
    ids=str,
)
def test_an_explicit_topology_is_the_same_and_needs_no_graph_library(topology: dict[str, Any]) -> None:
    spec = Topology.model_validate(topology)
    told = Topology.model_validate(spec.to_edge_list(3).model_dump(mode="json"))
    ours, theirs = spec.build_network(3, 20), told.build_network(3, 20)
    for t in range(8):
        assert np.array_equal(ours.mixing(t).matrix, theirs.mixing(t).matrix)
    assert told.to_edge_list(3) == told
    code = (
        "import sys; from sottovoce_core.network.topology import Topology\n"
        f"Topology.model_validate_json({told.model_dump_json()!r}).build_network(3, 20).mixing(3)\n"
        "sys.exit('networkx' in sys.modules)"
    )
    if "random" in str(topology) or topology == {"graph": "ring"}:  # a process each: two are enough
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_graph_and_a_sequence_exclude_each_other() -> None:
    with pytest.raises(SpecError, match="graph and sequence exclude each other"):
        parse_spec(
            {"rounds": 3, "algorithm": {"name": "ldp-dol"}, "topology": {"graph": "ring", "sequence": random()}},
            allow_imports=True,
        )


def test_an_algorithm_for_one_undirected_graph_refuses_others() -> None:
    for topology in ({"graph": CYCLE, "weights": "in_degree"}, {"sequence": random(0.9)}):
        document = {"rounds": 9, "learners": 3, "topology": topology, "algorithm": {"name": "ldp-dol"}}
        with pytest.raises(AssumptionViolated, match="TOPOLOGY_FIXED"):
            build_run(parse_spec(document, allow_imports=True), 3)


# ---- what was not overheard ------------------------------------------------------------------------------------------


def test_a_learner_is_replayed_until_nobody_heard_it() -> None:
    """The realised losses of the rounds before are those of the whole transcript."""
    graphs = periodic(edges((0, 1)), "ring", "ring", "ring", edges((0, 2)), "ring")
    spec = gossip_spec({"sequence": graphs}, 6, 3)
    run, data = build_run(spec, 3), made_up(spec)
    said = np.stack([each.message["y"] for each in simulate_rounds(run, data, SeededNoise(1))])
    whole, gaps = Transcript({"y": said}), said.copy()
    gaps[4, 1], gaps[0, 2] = np.nan, np.nan
    broken, other = Transcript({"y": gaps}), data.learners[0]

    assert [broken.count_complete_rounds(i) for i in range(3)] == [6, 4, 0]
    assert [whole.count_complete_rounds(i) for i in range(3)] == [6, 6, 6]
    expected = replay(run, whole, 1, [data.learners[1], other]).realised_losses
    found = replay(run, broken, 1, [data.learners[1], other]).realised_losses
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected[:4], rtol=1e-12)
    with pytest.raises(CaptureError, match="replay needs the message of learner-2 in round 0"):
        replay(run, broken, 2, [data.learners[2], other])


def test_a_digest_tells_networks_apart_and_forgives_the_last_bit() -> None:
    """Machines may differ in the last bits of a weight."""
    true = MetropolisWeights().mix(np.ones((4, 4)) - np.eye(4), is_directed=False)
    nearly = Mixing(np.nextafter(true.neighbour_weights, 1.0) * (true.neighbour_weights > 0), true.own_weights)
    heavier, fewer = true.neighbour_weights.copy(), true.neighbour_weights.copy()
    heavier[0, 1] += 1e-6
    fewer[0, 1] = 0.0
    turned = Mixing(fewer.T.copy(), true.own_weights)
    assert not np.array_equal(nearly.neighbour_weights, true.neighbour_weights)
    assert nearly.digest == true.digest
    others = {
        true.digest,
        Mixing(heavier, true.own_weights).digest,
        Mixing(fewer, true.own_weights).digest,
        turned.digest,
    }
    assert len(others) == 4


def test_digests_of_rounds_are_the_same_whatever_is_kept_of_them() -> None:
    """Also of rounds before those that are kept, which somebody may ask for who was away for long."""
    rings = {"sequence": {"kind": "periodic", "graphs": ["ring", "star", "path"]}}
    network = Topology.model_validate(rings).build_network(5, 50)
    few, all_ = NetworkDigests(network, 2), NetworkDigests(network, 50)
    asked = [(1, 9), (0, 3), (7, 20), (2, 19)]
    expected = [combine_digests(network.mixing(t).digest for t in range(*each)) for each in asked]
    assert [few.combined_digest(*each) for each in asked] == [all_.combined_digest(*each) for each in asked] == expected
    assert len(set(expected)) == len(asked)
    assert few.combined_digest(4, 4) == b"" == NetworkDigests(Topology().build_network(5), 2).combined_digest(1, 9)
