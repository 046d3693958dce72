"""Decision sets: a projection is the nearest point, and what accounting reads off a set is true."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from sottovoce.arrays import FloatArray
from sottovoce.decision_sets import Box, DecisionSet, L2Ball, build_decision_set
from sottovoce.errors import SpecError
from sottovoce.spec import BoxSpec, L2BallSpec
from tests.strategies import decision_sets, vectors

DIM = 4
points = vectors(DIM, 1e3)


def distance(a: FloatArray, b: FloatArray) -> float:
    return float(np.linalg.norm(a - b))


@given(decision_sets, points, points)
def test_the_projection_is_the_nearest_point(chosen: DecisionSet, theta: FloatArray, other: FloatArray) -> None:
    """`<theta - p, q - p> <= 0` for every q of the set is what makes p the nearest point of a convex set."""
    nearest, inside = chosen.project(theta), chosen.project(other)

    assert distance(theta, nearest) <= distance(theta, inside) + 1e-9
    assert (theta - nearest) @ (inside - nearest) <= 1e-9 * (1 + distance(theta, nearest) * distance(inside, nearest))


@given(decision_sets, points, points)
def test_the_projection_does_not_expand(chosen: DecisionSet, one: FloatArray, two: FloatArray) -> None:
    assert distance(chosen.project(one), chosen.project(two)) <= distance(one, two) * (1 + 1e-12) + 1e-12


@given(decision_sets, points)
def test_projecting_twice_changes_nothing(chosen: DecisionSet, theta: FloatArray) -> None:
    once = chosen.project(theta)
    np.testing.assert_allclose(chosen.project(once), once, rtol=1e-14, atol=0)


@given(decision_sets, points, points)
def test_radius_and_diameter_hold(chosen: DecisionSet, one: FloatArray, two: FloatArray) -> None:
    first, second = chosen.project(one), chosen.project(two)

    assert np.linalg.norm(first) <= chosen.radius(DIM) * (1 + 1e-12)
    assert distance(first, second) <= chosen.diameter(DIM) * (1 + 1e-12)


@given(decision_sets, points, points)
def test_leading_axes_are_projected_each_by_itself(chosen: DecisionSet, one: FloatArray, two: FloatArray) -> None:
    stacked = chosen.project(np.stack([one, two]).reshape(2, 1, DIM))
    np.testing.assert_allclose(stacked[:, 0], [chosen.project(one), chosen.project(two)], rtol=1e-15, atol=0)


def test_a_point_inside_stays_as_it_is() -> None:
    theta = np.array([0.3, -0.4])
    assert L2Ball(0.5).project(theta).tolist() == [0.3, -0.4]
    assert Box(-0.4, 0.3).project(theta).tolist() == [0.3, -0.4]
    assert L2Ball(1.0).project(np.zeros(2)).tolist() == [0.0, 0.0]


def test_a_ball_scales_and_a_box_clips() -> None:
    assert L2Ball(5.0).project(np.array([6.0, 8.0])).tolist() == [3.0, 4.0]
    assert Box(-1.0, 2.0).project(np.array([6.0, -8.0, 0.5])).tolist() == [2.0, -1.0, 0.5]


def test_sizes_are_as_small_as_they_can_be() -> None:
    assert (L2Ball(5.0).radius(9), L2Ball(5.0).diameter(9)) == (5.0, 10.0)
    assert (Box(-1.0, 2.0).radius(9), Box(-1.0, 2.0).diameter(9)) == (6.0, 9.0)
    assert Box(-3.0, -1.0).radius(1) == 3.0


def test_a_spec_builds_its_set() -> None:
    assert build_decision_set(L2BallSpec(kind="l2_ball", radius=3.0)) == L2Ball(3.0)
    assert build_decision_set(BoxSpec(kind="box", low=-1.0, high=1.0)) == Box(-1.0, 1.0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, -math.pi)])
def test_an_empty_box_is_refused(low: float, high: float) -> None:
    with pytest.raises(SpecError, match=f"low must be below high, got low={low}, high={high}"):
        build_decision_set(BoxSpec(kind="box", low=low, high=high))
