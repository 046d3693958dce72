"""The design problem of Zhang & Zhu: printed fits, where the optimum lies, and what has none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sottovoce_core.budget.tradeoff import AccuracyCurve, Utility, fit_accuracy_curve, optimise_alpha
from sottovoce_core.errors import SpecError

DVP, PVP = AccuracyCurve(0.2, 25.0, 0.1), AccuracyCurve(20.0, 20.0, 0.1)


@pytest.mark.parametrize(("curve", "threshold", "expected"), [(DVP, 0.25, 0.1422), (PVP, 10.0, 0.4533)])
def test_interior_minima_of_the_published_fits(curve: AccuracyCurve, threshold: float, expected: float) -> None:
    best = optimise_alpha(curve, Utility(), threshold, 1.0)
    assert best.alpha == pytest.approx(expected, abs=5e-5)
    assert best.is_interior
    assert best.minima == (best.alpha,)
    h = 1e-6
    slope = [
        float(curve.evaluate(np.array(a)) - Utility().evaluate(np.array(a))) for a in (best.alpha - h, best.alpha + h)
    ]
    assert abs(slope[1] - slope[0]) / (2 * h) < 1e-6  # J' = 0
    assert optimise_alpha(
        AccuracyCurve(curve.c4, curve.c5, 0.7), Utility(), threshold + 0.6, 1.0
    ).alpha == pytest.approx(best.alpha)


def test_the_ends_are_compared_with_what_lies_inside() -> None:
    """J falls without bound towards 0: a threshold that hardly binds makes the lowest level the best one."""
    loose = optimise_alpha(DVP, Utility(), DVP.c4 + DVP.c6 - 1e-9, 1.0)
    assert not loose.is_interior
    assert loose.alpha == loose.min_alpha == pytest.approx(2e-10, rel=1e-3)
    assert loose.minima[0] == pytest.approx(0.1422, abs=1e-3)
    assert optimise_alpha(DVP, Utility(), 0.25, 0.05).alpha == 0.05


def test_no_grid_point_is_better() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        curve = AccuracyCurve(*np.exp(generator.normal(size=3)))
        utility = Utility(*np.exp(generator.normal(size=4)))
        best = optimise_alpha(curve, utility, curve.c6 + curve.c4 * generator.uniform(0.2, 0.98), 10.0)
        levels = np.geomspace(best.min_alpha, best.max_alpha, 5001)
        assert best.objective <= float((curve.evaluate(levels) - utility.evaluate(levels)).min()) + 1e-9
        assert best.min_alpha <= best.alpha <= best.max_alpha


@pytest.mark.parametrize(
    ("threshold", "ceiling", "reason"),
    [
        (0.31, 1.0, r"accuracy threshold c3 must be below c4 \+ c6 = 0\.3, got 0\.31"),
        (0.1, 1.0, r"accuracy threshold c3 must exceed c6 = 0\.1, got 0\.1"),
        (0.11, 0.1, "no admissible privacy level: accuracy threshold 0.11 needs epsilon above 0.11982"),
    ],
)
def test_problems_without_a_solution(threshold: float, ceiling: float, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        optimise_alpha(DVP, Utility(), threshold, ceiling)


@pytest.mark.parametrize(
    "weights", [(-1.0, 6.0, 9.0, 1.0), (0.02, 0.0, 9.0, 1.0), (0.02, 6.0, 0.0, 0.0), (1.0, math.inf, 1.0, 1.0)]
)
def test_weights_must_make_sense(weights: tuple[float, float, float, float]) -> None:
    with pytest.raises(SpecError, match="weights must be"):
        Utility(*weights)


# ---- fits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [DVP, PVP, AccuracyCurve(0.5, 0.35, 0.0), AccuracyCurve(1e3, 3.0, 7.0)])
def test_an_exact_curve_is_found(curve: AccuracyCurve) -> None:
    levels = np.array([0.01, 0.05, 0.1, 0.3, 0.5, 1.0]) * 20.0 / curve.c5
    found = fit_accuracy_curve(levels.tolist(), curve.evaluate(levels).tolist())
    assert (found.c4, found.c5, found.c6) == pytest.approx((curve.c4, curve.c5, curve.c6), rel=1e-3, abs=1e-4)


def test_noisy_losses_are_fitted_as_well_as_by_any_other_curve() -> None:
    generator = np.random.default_rng(3)
    levels = np.geomspace(0.02, 2.0, 12)
    losses = DVP.evaluate(levels) + 0.002 * generator.normal(size=12)
    found = fit_accuracy_curve(levels.tolist(), losses.tolist())
    error = float(np.sum((found.evaluate(levels) - losses) ** 2))
    for factor in (0.98, 1.02):
        others = (
            AccuracyCurve(found.c4 * factor, found.c5, found.c6),
            AccuracyCurve(found.c4, found.c5 * factor, found.c6),
            AccuracyCurve(found.c4, found.c5, found.c6 * factor),
        )
        assert all(float(np.sum((each.evaluate(levels) - losses) ** 2)) >= error for each in others)
    assert found.c5 == pytest.approx(DVP.c5, rel=0.3)


@pytest.mark.parametrize(
    ("levels", "losses", "reason"),
    [
        ([1.0, 2.0, 2.0], [3.0, 2.0, 1.0], "at least 3 different epsilons, got 2"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "must fall as epsilon grows"),
        ([1.0, 2.0, 3.0], [1.0, math.inf, 3.0], "must be finite"),
    ],
)
def test_what_cannot_be_fitted(levels: list[float], losses: list[float], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        fit_accuracy_curve(levels, losses)
