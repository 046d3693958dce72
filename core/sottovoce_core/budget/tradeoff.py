"""Choice of a privacy level: the design problem (28) of Zhang & Zhu (IEEE TIFS 2017), with the constraint that it needs.

With alpha a privacy loss, a fitted curve gives the loss of accuracy, and a utility the value of privacy::

    L_acc(alpha)  = c4 exp(-c5 alpha) + c6                      c4, c5 > 0: the loss falls as alpha grows
    U_priv(alpha) = w1 ln( w2 / (w3 alpha + w4 alpha^2) )
    minimise J(alpha) = L_acc(alpha) - U_priv(alpha)    over 0 < alpha <= alpha_U,  L_acc(alpha) <= c3

J falls without bound as alpha tends to 0, so the paper's problem has no solution unless c3 < c4 + c6; that means
`alpha >= -ln((c3 - c6) / c4) / c5`. J is not convex: it is evaluated on a logarithmic grid, refined around every local
minimum, and compared with both ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.optional import import_optional

_GRID_POINTS = 2_000
"""Points of the logarithmic grid."""


@dataclass(frozen=True, slots=True)
class AccuracyCurve:
    """Loss of accuracy `L_acc`: c4 is the gain from full privacy to none, c5 its rate, c6 the remaining loss."""

    c4: float
    c5: float
    c6: float

    def evaluate(self, alpha: FloatArray) -> FloatArray:
        """Return the loss of accuracy at privacy losses `alpha`, of any shape."""
        return self.c4 * np.exp(-self.c5 * alpha) + self.c6

    def find_min_alpha(self, loss: float) -> float:
        """Return the smallest alpha at which the curve is at most `loss`.

        Raises:
            SpecError: the curve is always at most `loss`, or never.
        """
        if not loss < self.c4 + self.c6:
            raise SpecError(f"accuracy threshold c3 must be below c4 + c6 = {self.c4 + self.c6:.6g}, got {loss:.6g}")
        if not loss > self.c6:
            raise SpecError(f"accuracy threshold c3 must exceed c6 = {self.c6:.6g}, got {loss:.6g}")
        return -math.log((loss - self.c6) / self.c4) / self.c5


@dataclass(frozen=True, slots=True)
class Utility:
    """Utility of privacy `U_priv`, in units of the loss of accuracy. The defaults are the paper's."""

    w1: float = 0.02
    w2: float = 6.0
    w3: float = 9.0
    w4: float = 1.0

    def __post_init__(self) -> None:
        weights = (self.w1, self.w2, self.w3, self.w4)
        if not (all(0 <= weight < math.inf for weight in weights) and self.w1 * self.w2 > 0 and self.w3 + self.w4 > 0):
            text = "weights must be finite and at least 0, w1, w2 and one of w3, w4 above it"
            raise SpecError(f"{text}, got {', '.join(f'{weight:g}' for weight in weights)}")

    def evaluate(self, alpha: FloatArray) -> FloatArray:
        """Return the utility of privacy losses `alpha` above 0, of any shape."""
        utility: FloatArray = self.w1 * np.log(self.w2 / (self.w3 * alpha + self.w4 * alpha**2))
        return utility


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best admissible privacy level.

    Attributes:
        alpha: the level.
        objective: J at alpha.
        min_alpha: smallest admissible level, at which the accuracy threshold is met exactly.
        max_alpha: largest admissible level.
        is_interior: alpha is a local minimum, not an end of the admissible levels.
        minima: all local minima, ascending.
    """

    alpha: float
    objective: float
    min_alpha: float
    max_alpha: float
    is_interior: bool
    minima: tuple[float, ...]


def optimise_alpha(curve: AccuracyCurve, utility: Utility, threshold: float, max_alpha: float) -> Optimum:
    """Solve the design problem.

    Args:
        curve: L_acc.
        utility: U_priv.
        threshold: c3, the largest loss of accuracy that is acceptable.
        max_alpha: alpha_U, the largest acceptable privacy loss.

    Raises:
        SpecError: the threshold does not lie between c6 and c4 + c6, no level is admissible, or SciPy is missing.
    """
    lowest = curve.find_min_alpha(threshold)
    if not lowest <= max_alpha:
        text = f"no admissible privacy level: accuracy threshold {threshold:.6g} needs epsilon above {lowest:.6g}"
        raise SpecError(f"{text}, and at most {max_alpha:.6g} is allowed; raise either")

    def objective(alpha: Any) -> Any:
        return curve.evaluate(alpha) - utility.evaluate(alpha)

    grid = np.geomspace(lowest, max_alpha, _GRID_POINTS)
    values = objective(grid)
    dips = np.flatnonzero((values[1:-1] < values[:-2]) & (values[1:-1] <= values[2:])) + 1
    minima = tuple(_refine_minimum(objective, grid[k - 1], grid[k + 1]) for k in dips.tolist())
    best = min((*minima, lowest, max_alpha), key=objective)
    return Optimum(best, float(objective(best)), lowest, max_alpha, best in minima, minima)


def _refine_minimum(objective: Callable[[Any], Any], low: float, high: float) -> float:
    options = {"xatol": 1e-12 * high}
    return float(_optimize().minimize_scalar(objective, bounds=(low, high), method="bounded", options=options).x)


def fit_accuracy_curve(epsilons: Sequence[float], losses: Sequence[float]) -> AccuracyCurve:
    """Fit the accuracy curve to measured losses by least squares.

    For a given c5 the best c4, c6 >= 0 follow linearly; c5 is searched on a logarithmic grid and refined.

    Args:
        epsilons: privacy levels, at least three different ones.
        losses: one loss for each level.

    Raises:
        SpecError: too few levels, values that are not finite, losses that do not fall with epsilon, or SciPy is missing.
    """
    x, y = np.asarray(epsilons, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    if len(np.unique(x)) < 3:
        raise SpecError(f"a curve of three numbers needs at least 3 different epsilons, got {len(np.unique(x))}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise SpecError(f"epsilons and losses must be finite, got losses {y.tolist()} at {x.tolist()}")
    nnls = _optimize().nnls

    def residual(log_rate: float) -> float:
        return float(nnls(_basis(x, math.exp(log_rate)), y)[1])

    # From a curve that is almost straight over all levels to one that has fallen before the second level.
    rates = np.linspace(math.log(0.1 / float(np.ptp(x))), math.log(50.0 / float(np.diff(np.unique(x)).min())), 400)
    errors = [residual(rate) for rate in rates]
    k = int(np.argmin(errors))
    found = _optimize().minimize_scalar(
        residual, bounds=(rates[max(k - 1, 0)], rates[min(k + 1, len(rates) - 1)]), method="bounded"
    )
    rate = math.exp(found.x if found.fun <= errors[k] else rates[k])
    c4, c6 = nnls(_basis(x, rate), y)[0]
    if not c4 > 0.0:
        text = "the loss must fall as epsilon grows, or there is no trade-off"
        raise SpecError(f"{text}, got {', '.join(f'{value:.4g}' for value in y)}; use more replicas, or other epsilons")
    return AccuracyCurve(float(c4), rate, float(c6))


def _basis(x: FloatArray, rate: float) -> FloatArray:
    columns: FloatArray = np.stack([np.exp(-rate * x), np.ones_like(x)], axis=1)
    return columns


def _optimize() -> Any:
    return import_optional("scipy.optimize", "SciPy", "a trade-off")
