"""Decision sets: a projection is the nearest point, and what accounting reads off a set is true."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import TypeAdapter, ValidationError

from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.decision_sets import (
    AnyDecisionSet,
    Box,
    DecisionSet,
    L2Ball,
    _Block,
    _L1Ball,
    _Product,
    _Simplex,
    _TraceNorm,
)
from sottovoce_core.errors import SpecError
from tests.examples import small_run
from tests.strategies import decision_sets, matrices, vectors

DIM = 6
points = vectors(DIM, 1e3)


def distance(a: FloatArray, b: FloatArray) -> float:
    return float(np.linalg.norm(a - b))


def holds(chosen: DecisionSet, point: FloatArray, slack: float = 1e-9) -> bool:
    """Is it in the set? From the definition, relative to the size of the set."""
    match chosen:
        case L2Ball():
            return bool(np.linalg.norm(point) <= chosen.radius * (1 + slack))
        case _L1Ball():
            return bool(np.abs(point).sum() <= chosen.radius * (1 + slack))
        case _Simplex():
            return bool((point >= 0).all() and abs(point.sum() - chosen.radius) <= slack * chosen.radius)
        case Box():
            return bool(((chosen.low <= point) & (point <= chosen.high)).all())
        case _TraceNorm():
            return bool(
                np.linalg.norm(point.reshape(chosen.rows, chosen.columns), "nuc") <= chosen.radius * (1 + slack)
            )
        case _Product():
            parts = np.split(point, np.cumsum([block.size for block in chosen.blocks])[:-1])
            return all(holds(block.set, part) for block, part in zip(chosen.blocks, parts, strict=True))
    raise AssertionError(chosen)


def extreme_points(chosen: DecisionSet, dim: int, seed: int) -> FloatArray:
    """Some of them, or all where they are few: a linear function is smallest at one of them."""
    generator = np.random.default_rng(seed)
    match chosen:
        case L2Ball():
            normal = generator.normal(size=(50, dim))
            return as_floats(chosen.radius * normal / np.linalg.norm(normal, axis=1, keepdims=True))
        case _L1Ball():
            return np.concatenate([chosen.radius * np.eye(dim), -chosen.radius * np.eye(dim)])
        case _Simplex():
            return chosen.radius * np.eye(dim)
        case Box():
            return np.array(list(product([chosen.low, chosen.high], repeat=dim)))
        case _TraceNorm():
            left, right = generator.normal(size=(50, chosen.rows, 1)), generator.normal(size=(50, 1, chosen.columns))
            rank_one = left * right / (np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=2))[..., None]
            return as_floats(chosen.radius * rank_one.reshape(50, dim))
        case _Product():
            own = [extreme_points(block.set, block.size, seed) for block in chosen.blocks]
            return np.stack([np.concatenate([each[generator.integers(len(each))] for each in own]) for _ in range(50)])
    raise AssertionError(chosen)


# ---- projection ------------------------------------------------------------------------------------------------------


@given(decision_sets, points, points, st.integers(0, 2**32))
def test_the_projection_is_the_nearest_point(
    chosen: DecisionSet, theta: FloatArray, other: FloatArray, seed: int
) -> None:
    """`<theta - p, q - p> <= 0` for every q of the set is what makes p the nearest point of a convex set."""
    nearest = chosen.project(theta)
    candidates = np.vstack([chosen.project(other), extreme_points(chosen, DIM, seed)])
    size = distance(theta, nearest) * (chosen.diameter(DIM) + 1e-3)

    assert holds(chosen, nearest)
    assert ((candidates - nearest) @ (theta - nearest) <= 1e-9 * (1 + size)).all()
    assert (distance(theta, nearest) <= np.linalg.norm(candidates - theta, axis=1) + 1e-9).all()


@given(decision_sets, points, points)
def test_the_projection_does_not_expand(chosen: DecisionSet, one: FloatArray, two: FloatArray) -> None:
    assert distance(chosen.project(one), chosen.project(two)) <= distance(one, two) * (1 + 1e-12) + 1e-12


@given(decision_sets, points)
def test_projecting_twice_changes_nothing(chosen: DecisionSet, theta: FloatArray) -> None:
    once = chosen.project(theta)
    np.testing.assert_allclose(chosen.project(once), once, rtol=1e-14, atol=1e-13 * chosen.largest_norm(DIM))


@given(decision_sets, points, points)
def test_radius_and_diameter_hold(chosen: DecisionSet, one: FloatArray, two: FloatArray) -> None:
    first, second = chosen.project(one), chosen.project(two)

    assert np.linalg.norm(first) <= chosen.largest_norm(DIM) * (1 + 1e-12)
    assert distance(first, second) <= chosen.diameter(DIM) * (1 + 1e-12)


@given(decision_sets, points, points)
def test_leading_axes_are_projected_each_by_itself(chosen: DecisionSet, one: FloatArray, two: FloatArray) -> None:
    stacked = chosen.project(np.stack([one, two]).reshape(2, 1, DIM))
    alone = [chosen.project(one), chosen.project(two)]
    np.testing.assert_allclose(stacked[:, 0], alone, rtol=1e-15, atol=1e-13 * chosen.largest_norm(DIM))


def test_a_point_inside_stays_as_it_is() -> None:
    theta = np.array([0.3, -0.4])
    assert L2Ball(radius=0.5).project(theta).tolist() == [0.3, -0.4]
    assert Box(low=-0.4, high=0.3).project(theta).tolist() == [0.3, -0.4]
    assert L2Ball(radius=1.0).project(np.zeros(2)).tolist() == [0.0, 0.0]
    assert _L1Ball(radius=0.7).project(theta).tolist() == [0.3, -0.4]
    assert _TraceNorm(rows=1, columns=2, radius=0.5).project(theta).tolist() == [0.3, -0.4]
    both = np.array([[0.3, -0.4], [3.0, -4.0]])
    assert _L1Ball(radius=0.7).project(both)[0].tolist() == [0.3, -0.4]
    assert _TraceNorm(rows=1, columns=2, radius=0.5).project(both)[0].tolist() == [0.3, -0.4]


def test_a_ball_scales_and_a_box_clips() -> None:
    assert L2Ball(radius=5.0).project(np.array([6.0, 8.0])).tolist() == [3.0, 4.0]
    assert Box(low=-1.0, high=2.0).project(np.array([6.0, -8.0, 0.5])).tolist() == [2.0, -1.0, 0.5]


def test_sizes_are_as_small_as_they_can_be() -> None:
    assert (L2Ball(radius=5.0).largest_norm(9), L2Ball(radius=5.0).diameter(9)) == (5.0, 10.0)
    assert (Box(low=-1.0, high=2.0).largest_norm(9), Box(low=-1.0, high=2.0).diameter(9)) == (6.0, 9.0)
    assert Box(low=-3.0, high=-1.0).largest_norm(1) == 3.0


def test_projections_by_hand() -> None:
    """Shifted and cut off; of a matrix, its singular values."""
    assert _Simplex(radius=1.0).project(np.array([0.5, 0.9, -3.0])) == pytest.approx([0.3, 0.7, 0.0])
    assert _Simplex(radius=2.0).project(np.zeros(4)) == pytest.approx([0.5] * 4)
    assert _L1Ball(radius=1.0).project(np.array([-0.5, 0.9, 0.1])) == pytest.approx([-0.3, 0.7, 0.0])
    assert _TraceNorm(rows=2, columns=2, radius=3.0).project(np.array([3.0, 0.0, 0.0, -2.0])) == pytest.approx(
        [2.0, 0.0, 0.0, -1.0]
    )
    parts = _Product(blocks=(_Block(size=2, set=L2Ball(radius=1.0)), _Block(size=1, set=Box(low=-1.0, high=1.0))))
    assert parts.project(np.array([3.0, 4.0, -5.0])) == pytest.approx([0.6, 0.8, -1.0])


def test_far_away_points_keep_their_digits() -> None:
    """Shifting by the largest coordinate first, the sum is exact to rounding of what remains."""
    theta = 1e9 + np.array([0.0, 0.25, 0.5, -1e12])
    nearest = _Simplex(radius=1.0).project(theta)
    assert nearest == pytest.approx([1 / 12, 1 / 3, 7 / 12, 0.0], abs=1e-15)


def test_sizes_of_the_other_sets() -> None:
    assert (_L1Ball(radius=5.0).largest_norm(9), _L1Ball(radius=5.0).diameter(9)) == (5.0, 10.0)
    assert (_Simplex(radius=5.0).largest_norm(9), _Simplex(radius=5.0).diameter(9)) == (5.0, 5.0 * math.sqrt(2))
    assert _Simplex(radius=5.0).diameter(1) == 0.0
    assert (
        _TraceNorm(rows=3, columns=4, radius=5.0).largest_norm(12),
        _TraceNorm(rows=3, columns=4, radius=5.0).diameter(12),
    ) == (5.0, 10.0)
    assert _Product(
        blocks=(_Block(size=2, set=L2Ball(radius=3.0)), _Block(size=7, set=_Simplex(radius=4.0)))
    ).largest_norm(9) == pytest.approx(5.0)
    assert _Product(blocks=(_Block(size=2, set=L2Ball(radius=3.0)), _Block(size=7, set=_Simplex(radius=4.0)))).diameter(
        9
    ) == pytest.approx(math.sqrt(36 + 32))


# ---- the linear minimisation oracle ----------------------------------------------------------------------------------


@given(decision_sets, points, points, st.integers(0, 2**32))
def test_no_point_is_lower_than_the_minimiser(
    chosen: DecisionSet, direction: FloatArray, other: FloatArray, seed: int
) -> None:
    lowest = chosen.minimise(direction)
    candidates = np.vstack([chosen.project(other), extreme_points(chosen, DIM, seed)])
    unit = direction / (np.abs(direction).max() or 1.0)  # a direction may be so small that its norm is zero
    slack = 1e-12 * float(np.linalg.norm(unit)) * chosen.largest_norm(DIM)

    assert holds(chosen, lowest)
    assert (candidates @ unit >= lowest @ unit - slack).all()


def test_the_length_of_a_direction_does_not_matter() -> None:
    direction = np.array([3.0, -4.0])
    for size in (1.0, 1e-200, 1e-300, 1e200):
        np.testing.assert_allclose(L2Ball(radius=5.0).minimise(size * direction), [-3.0, 4.0], rtol=1e-12)


@given(decision_sets, hnp.arrays(np.float64, (2, 2, DIM), elements=st.floats(-1e3, 1e3)))
def test_leading_axes_are_minimised_each_by_itself(chosen: DecisionSet, directions: FloatArray) -> None:
    """Values, not points: where several are lowest, any will do."""
    values = np.vecdot(chosen.minimise(directions), directions)
    alone = [[chosen.minimise(each) @ each for each in row] for row in directions]
    np.testing.assert_allclose(values, alone, rtol=1e-9, atol=1e-9)


@given(decision_sets)
def test_nothing_to_minimise_gives_the_origin_where_there_is_one(chosen: DecisionSet) -> None:
    at_zero = chosen.minimise(np.zeros(DIM))
    assert holds(chosen, at_zero)
    assert chosen.contains_origin == holds(chosen, np.zeros(DIM))
    if chosen.contains_origin:
        assert at_zero.tolist() == [0.0] * DIM


@settings(max_examples=30)
@given(
    st.sampled_from([(26, 16), (3, 40), (1, 5), (7, 7)]), st.integers(0, 2**32), st.sampled_from([1e-160, 1.0, 1e160])
)
def test_the_trace_norms_minimum_is_the_largest_singular_value(shape: tuple[int, int], seed: int, scale: float) -> None:
    """Against NumPy's SVD, tall and wide, and where squares leave the range of numbers."""
    matrix = scale * np.random.default_rng(seed).normal(size=shape)
    lowest = _TraceNorm(rows=shape[0], columns=shape[1], radius=10.0).minimise(matrix.ravel())

    assert lowest @ (matrix.ravel() / scale) == pytest.approx(-10.0 * np.linalg.norm(matrix / scale, 2), rel=1e-13)
    assert np.linalg.matrix_rank(lowest.reshape(shape)) == 1


@given(matrices(3, 4, 10.0))
def test_a_repeated_singular_value_is_no_trouble(matrix: FloatArray) -> None:
    orthogonal = np.linalg.qr(matrix.T + np.eye(4, 3))[0].T  # three singular values of 1
    assert _TraceNorm(rows=3, columns=4, radius=2.0).minimise(orthogonal.ravel()) @ orthogonal.ravel() == pytest.approx(
        -2.0
    )


# ---- from a spec -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "chosen"),
    [
        ({"kind": "l2_ball", "radius": 3}, L2Ball(radius=3.0)),
        ({"kind": "box", "low": -1, "high": 1}, Box(low=-1.0, high=1.0)),
        ({"kind": "l1_ball", "radius": 3}, _L1Ball(radius=3.0)),
        ({"kind": "simplex"}, _Simplex(radius=1.0)),
        ({"kind": "trace_norm", "rows": 26, "columns": 16, "radius": 10}, _TraceNorm(rows=26, columns=16, radius=10.0)),
        (
            {
                "kind": "product",
                "blocks": [
                    {"size": 6, "set": {"kind": "trace_norm", "rows": 2, "columns": 3, "radius": 1}},
                    {"size": 4, "set": {"kind": "l2_ball", "radius": 2}},
                ],
            },
            _Product(
                blocks=(
                    _Block(size=6, set=_TraceNorm(rows=2, columns=3, radius=1.0)),
                    _Block(size=4, set=L2Ball(radius=2.0)),
                )
            ),
        ),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_spec_builds_its_set(section: dict[str, Any], chosen: DecisionSet) -> None:
    assert TypeAdapter(AnyDecisionSet).validate_python(section) == chosen


def test_a_set_of_another_size_than_the_parameters_is_refused() -> None:
    _L1Ball(radius=1.0).require_dim(7)
    _TraceNorm(rows=2, columns=3, radius=1.0).require_dim(6)
    with pytest.raises(SpecError, match="set requires 6 parameters, and the loss has 7"):
        _TraceNorm(rows=2, columns=3, radius=1.0).require_dim(7)
    softmax, letter = {"kind": "softmax", "classes": 26}, {"kind": "trace_norm", "rows": 26, "radius": 10.0}
    assert small_run(loss=softmax, decision_set={**letter, "columns": 16}, n_features=16).algorithm.dim == 416
    with pytest.raises(SpecError, match="requires 416 parameters, and the loss has 442"):
        small_run(loss=softmax, decision_set={**letter, "columns": 16}, n_features=17)


def test_a_block_of_another_size_than_its_matrices_is_refused() -> None:
    block = {"size": 7, "set": {"kind": "trace_norm", "rows": 2, "columns": 3, "radius": 1}}
    with pytest.raises(ValidationError, match="a block of 6 parameters must have that size, got 7"):
        TypeAdapter(AnyDecisionSet).validate_python({"kind": "product", "blocks": [block]})


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, -math.pi)])
def test_an_empty_box_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValidationError, match=f"low must be below high, got low={low}, high={high}"):
        Box(low=low, high=high)
