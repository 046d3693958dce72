"""Coupling matrices: what is refused, what each graph and weight rule gives, and the paper's ring of five."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.network.topology import FixedNetwork, Topology

pytestmark = pytest.mark.each

TEXTS = {
    "W_SHAPE": "weights must be a finite square matrix",
    "W_NEGATIVE": "coupling weights must be non-negative",
    "W_ASYMMETRIC": "coupling weights must be symmetric",
    "W_ROW_SUM": "each diagonal weight must equal minus the sum of its row's neighbour weights",
    "W_DISCONNECTED": "the communication graph is not connected",
}


def topology(graph: Any, n: int, weights: Any = "metropolis") -> FixedNetwork:
    built = Topology.model_validate({"graph": graph, "weights": weights}).build_network(n)
    assert isinstance(built, FixedNetwork)
    return built


def constant(value: float) -> dict[str, Any]:
    return {"kind": "constant", "value": value}


def laplacian(coupling: Any) -> FloatArray:
    """W for off-diagonal weights."""
    coupling = as_floats(coupling)
    weights: FloatArray = coupling - np.diag(coupling.sum(axis=1))
    return weights


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Any simple graph of at most eight learners: (n, edges)."""
    n = draw(st.integers(1, 8))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    return n, draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []


@st.composite
def connected_graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A random tree, with further edges."""
    n, more = draw(graphs())
    tree = [(draw(st.integers(0, j - 1)), j) for j in range(1, n)]
    return n, sorted({*tree, *more})


WEIGHTS = st.one_of(
    st.sampled_from(["metropolis", "max_degree"]),
    st.floats(1e-6, 1e6).map(constant),
)


# ---- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "matrix", "got"),
    [
        ("W_SHAPE", [[0.0, 0.0]], "shape (1, 2)"),
        ("W_SHAPE", [0.0], "shape (1,)"),
        ("W_SHAPE", np.zeros((0, 0)), "shape (0, 0)"),
        ("W_SHAPE", [[0.0], [0.0, 1.0]], "inhomogeneous"),
        ("W_SHAPE", [["a"]], "'a'"),
        ("W_SHAPE", [[-1.0, math.nan], [1.0, -1.0]], "w[0][1]=nan"),
        ("W_SHAPE", [[-1.0, 1.0], [math.inf, -1.0]], "w[1][0]=inf"),
        ("W_NEGATIVE", [[1.0, -1.0], [-1.0, 1.0]], "w[0][1]=-1.0"),
        ("W_ASYMMETRIC", [[-1.0, 1.0], [2.0, -2.0]], "w[0][1]=1.0 but w[1][0]=2.0"),
        ("W_ROW_SUM", [[-1.0, 1.0], [1.0, 0.0]], "w[1][1]=0.0 but neighbour weights that sum to 1.0"),
        ("W_ROW_SUM", [[-0.5]], "w[0][0]=-0.5 but neighbour weights that sum to 0.0"),
        ("W_DISCONNECTED", np.zeros((2, 2)), "learner 1 (1 of 2 learners"),
    ],
)
def test_a_wrong_matrix_is_refused_with_what_came(code: str, matrix: Any, got: str) -> None:
    with pytest.raises(AssumptionViolated) as failure:
        FixedNetwork.from_weights(matrix)
    assert failure.value.code == code
    assert failure.value.text.startswith(TEXTS[code])
    assert got in failure.value.text


@pytest.mark.parametrize(
    ("code", "matrix"),
    [
        ("W_SHAPE", [[math.nan, -1.0]]),
        ("W_NEGATIVE", [[0.0, -1.0], [2.0, 0.0]]),
        ("W_ASYMMETRIC", [[0.0, 1.0], [2.0, 0.0]]),
        ("W_ROW_SUM", [[0.0, 0.0], [0.0, 1.0]]),
    ],
)
def test_the_first_condition_that_fails_is_the_one_reported(code: str, matrix: Any) -> None:
    with pytest.raises(AssumptionViolated) as failure:
        FixedNetwork.from_weights(matrix)
    assert failure.value.code == code


def test_the_constructor_checks_too() -> None:
    with pytest.raises(AssumptionViolated, match="W_DISCONNECTED"):
        FixedNetwork(np.zeros((2, 2)))


def test_the_first_learner_that_cannot_be_reached_is_named() -> None:
    two_pairs = [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    with pytest.raises(AssumptionViolated, match=r"from learner 0 to learner 1 \(2 of 4 learners"):
        FixedNetwork.from_weights(laplacian(two_pairs))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_rounding_is_forgiven_and_more_is_not_at_any_scale(scale: float) -> None:
    weights = laplacian(np.ones((3, 3)) - np.eye(3))
    weights[0, 1] *= 1 + 1e-14
    assert FixedNetwork.from_weights(weights * scale).n_learners == 3
    weights[0, 1] *= 1 + 1e-9
    with pytest.raises(AssumptionViolated, match="W_ASYMMETRIC"):
        FixedNetwork.from_weights(weights * scale)


def test_an_edge_that_one_end_alone_knows_is_refused_however_small() -> None:
    weights = laplacian([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    weights[0, 2] = 1e-15
    with pytest.raises(AssumptionViolated, match=r"w\[0\]\[2\]=1e-15 but w\[2\]\[0\]=0.0.*W_ASYMMETRIC"):
        FixedNetwork.from_weights(weights)


def test_a_link_that_vanishes_in_rounding_does_not_connect() -> None:
    """Two pairs joined by a link of 1e-20: delta_2 is about -1e-20, which cannot be told from 0."""
    coupling = np.array([[0, 1, 0, 0], [1, 0, 1e-20, 0], [0, 1e-20, 0, 1], [0, 0, 1, 0]])
    with pytest.raises(AssumptionViolated, match=r"zero up to rounding.*W_DISCONNECTED"):
        FixedNetwork.from_weights(laplacian(coupling))
    coupling[1, 2] = coupling[2, 1] = 1e-6
    assert FixedNetwork.from_weights(laplacian(coupling)).delta_2 == pytest.approx(-1e-6, rel=1e-5)


def test_the_matrix_is_a_copy_and_read_only() -> None:
    mine = laplacian([[0, 1], [1, 0]])
    built = FixedNetwork.from_weights(mine)
    mine[0, 1] = 5.0
    assert built.weights[0, 1] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        built.weights[0, 1] = 5.0


# ---- what a topology says --------------------------------------------------------------------------------------------


def test_the_ring_of_five_of_the_paper() -> None:
    """Chen & Wang 2025, experiments: w_ij = 0.3 gives w_ii = -0.6, delta_2 = -0.4146, delta_m = -1.0854."""
    ring = topology("ring", 5, constant(0.3))
    assert ring.weights.diagonal() == pytest.approx([-0.6] * 5)
    assert round(ring.delta_2, 4) == -0.4146
    assert round(ring.delta_m, 4) == -1.0854


def test_neighbours_edges_and_own_weight_of_a_weighted_path() -> None:
    path = FixedNetwork.from_weights(laplacian([[0, 0, 0.25], [0, 0, 0.5], [0.25, 0.5, 0]]))
    assert path.mixing(0).in_neighbour_weights(2) == {0: 0.25, 1: 0.5}
    assert list(path.mixing(0).in_neighbour_weights(2)) == [0, 1]
    assert path.mixing(0).in_neighbour_weights(0) == {2: 0.25}
    assert path.edges == ((0, 2), (1, 2))
    assert [path.own_weight(i) for i in range(3)] == [0.25, 0.5, 0.75]
    assert path.mixing(0).neighbour_weights.tolist() == [[0, 0, 0.25], [0, 0, 0.5], [0.25, 0.5, 0]]


def test_one_learner_alone_is_connected_and_has_no_disagreement() -> None:
    alone = FixedNetwork.from_weights([[0.0]])
    assert (alone.n_learners, alone.edges, alone.mixing(0).in_neighbour_weights(0), alone.own_weight(0)) == (
        1,
        (),
        {},
        0.0,
    )
    assert (alone.delta_2, alone.delta_m) == (-math.inf, 0.0)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "n", "edges"),
    [
        ("ring", 1, []),
        ("ring", 2, [(0, 1)]),
        ("ring", 4, [(0, 1), (0, 3), (1, 2), (2, 3)]),
        ("path", 1, []),
        ("path", 3, [(0, 1), (1, 2)]),
        ("star", 1, []),
        ("star", 4, [(0, 1), (0, 2), (0, 3)]),
        ("complete", 1, []),
        ("complete", 3, [(0, 1), (0, 2), (1, 2)]),
        ({"kind": "grid", "rows": 2, "columns": 3}, 6, [(0, 1), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (4, 5)]),
        ({"kind": "erdos_renyi", "probability": 1.0}, 3, [(0, 1), (0, 2), (1, 2)]),
        ({"kind": "watts_strogatz", "nearest": 2, "probability": 0.0}, 4, [(0, 1), (0, 3), (1, 2), (2, 3)]),
        ({"kind": "edges", "edges": [(2, 0), (1, 2), (0, 2)]}, 3, [(0, 2), (1, 2)]),
        ({"kind": "edges", "edges": []}, 1, []),
    ],
)
def test_edges_of_each_graph(graph: Any, n: int, edges: list[tuple[int, int]]) -> None:
    built = topology(graph, n)
    assert built.n_learners == n
    assert list(built.edges) == edges


@pytest.mark.parametrize(
    "graph",
    [{"kind": "erdos_renyi", "probability": 0.5}, {"kind": "watts_strogatz", "nearest": 4, "probability": 0.5}],
)
def test_random_graphs_are_a_function_of_their_seed(graph: dict[str, Any]) -> None:
    first, again, other = (topology(graph | {"seed": seed}, 12).edges for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("graph", "advice"),
    [
        ({"kind": "erdos_renyi", "probability": 0.01, "seed": 7}, r"another seed \(now 7\) or a larger probability"),
        (
            {"kind": "watts_strogatz", "nearest": 2, "probability": 1.0, "seed": 3},
            r"another seed \(now 3\) or a larger",
        ),
        ({"kind": "edges", "edges": [(0, 1)]}, "add edges"),
    ],
)
def test_a_disconnected_graph_is_refused_with_advice(graph: dict[str, Any], advice: str) -> None:
    with pytest.raises(AssumptionViolated, match=advice) as failure:
        topology(graph, 20)
    assert failure.value.code == "W_DISCONNECTED"
    assert failure.value.text.startswith(TEXTS["W_DISCONNECTED"])


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"kind": "grid", "rows": 2, "columns": 3}, r"number of learners \(4\), got 2 \* 3 = 6"),
        ({"kind": "watts_strogatz", "nearest": 4, "probability": 0.1}, r"below the number of learners \(4\), got 4"),
        ({"kind": "watts_strogatz", "nearest": 3, "probability": 0.1}, "must be even.*got 3"),
        ({"kind": "edges", "edges": [(0, 4)]}, r"counted from 0 to 3, got the edge \(0, 4\)"),
        ({"kind": "edges", "edges": [(4, 0)]}, r"counted from 0 to 3, got the edge \(4, 0\)"),
        ({"kind": "edges", "edges": [(0, 1), (2, 2)]}, r"two different learners, got \(2, 2\)"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(graph: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        topology(graph, 4)


def test_a_constant_weight_whose_row_sums_overflow_is_refused() -> None:
    with pytest.raises(AssumptionViolated, match="W_SHAPE"):
        topology("ring", 5, constant(1e308))


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (constant(0.2), [0.2, 0.2, 0.2]),
        ("metropolis", [1 / 4, 1 / 4, 1 / 3]),
        ("max_degree", [1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_weights_of_each_rule(weights: Any, expected: list[float]) -> None:
    """Learner 0 has degree 3, learner 1 degree 1, learners 2 and 3 degree 2."""
    built = topology({"kind": "edges", "edges": [(0, 1), (0, 2), (0, 3), (2, 3)]}, 4, weights)
    assert [built.mixing(0).neighbour_weights[edge] for edge in [(0, 1), (0, 2), (2, 3)]] == pytest.approx(expected)


# ---- properties ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(connected_graphs(), WEIGHTS)
def test_w_is_a_symmetric_zero_row_sum_matrix_with_a_gap(graph: tuple[int, list[tuple[int, int]]], rule: Any) -> None:
    n, edges = graph
    built = topology({"kind": "edges", "edges": edges}, n, rule)
    scale = np.abs(built.weights).max()
    assert np.array_equal(built.weights, built.weights.T)
    assert np.abs(built.weights.sum(axis=1)).max() <= 1e-14 * scale
    assert (built.mixing(0).neighbour_weights >= 0).all()
    assert list(built.edges) == edges
    assert built.delta_2 < 0 or n == 1
    # Gershgorin: every eigenvalue lies within |w_ii| of w_ii.
    assert -2 * scale * (1 + 1e-12) <= built.delta_m <= 0


@settings(deadline=None)
@given(connected_graphs(), st.sampled_from(["metropolis", "max_degree"]))
def test_degree_weights_never_overshoot(graph: tuple[int, list[tuple[int, int]]], rule: str) -> None:
    n, edges = graph
    built = topology({"kind": "edges", "edges": edges}, n, rule)
    assert all(built.own_weight(i) < 1 for i in range(n))


@settings(deadline=None)
@given(graphs(), WEIGHTS)
def test_a_graph_is_refused_exactly_if_networkx_finds_it_disconnected(
    graph: tuple[int, list[tuple[int, int]]], rule: Any
) -> None:
    n, edges = graph
    reference = nx.Graph(edges)
    reference.add_nodes_from(range(n))
    expected = (
        nullcontext() if nx.is_connected(reference) else pytest.raises(AssumptionViolated, match="W_DISCONNECTED")
    )
    with expected:
        topology({"kind": "edges", "edges": edges}, n, rule)


@settings(deadline=None)
@given(connected_graphs())
def test_neighbours_give_back_the_matrix(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, edges = graph
    built = topology({"kind": "edges", "edges": edges}, n)
    rebuilt = np.zeros((n, n))
    for i in range(n):
        for j, weight in built.mixing(0).in_neighbour_weights(i).items():
            rebuilt[i, j] = weight
        rebuilt[i, i] = -built.own_weight(i)
    assert np.array_equal(FixedNetwork.from_weights(rebuilt).weights, built.weights)


def test_importing_the_module_does_not_import_networkx() -> None:
    """A learner gets its weights from the coordinator, and need not wait for a graph library."""
    code = "import sys, sottovoce_core.network.topology; sys.exit('networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
