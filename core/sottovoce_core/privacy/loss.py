"""Privacy loss of messages: pure epsilon and a Renyi curve, both of which add over messages, and epsilon at a delta.

Given all earlier messages, a message has a distribution of its own, so pure losses add up, and so do Renyi divergences of one
order (Mironov 2017, Proposition 1). `(epsilon, delta)` follows from the sum at every order; the best order counts.

**Laplace noise and an l2 bound.** Coordinates have independent Laplace noise of scale b and move by `a_1 … a_n`, with
`sum a_k^2 <= Phi^2`. A coordinate with `x = |a_k| / b` costs, at order alpha (Mironov 2017, Table II)::

    g(x) = log( alpha/(2 alpha - 1) exp((alpha - 1) x) + (alpha - 1)/(2 alpha - 1) exp(-alpha x) ) / (alpha - 1)

`g(sqrt(u))` is concave in u, so the largest sum over all such moves is attained by the one that is spread evenly::

    n g(Phi / (b sqrt(n))) = n g(e / n),     e = sqrt(n) Phi / b, the pure loss

Two messages on a lattice of spacing s move apart by at most one more spacing in every coordinate. That is part of e, as one
spacing; the Renyi curve counts two, because on the lattice the privacy curve is a chord between its atoms.

**Limits.** The numbers of records, and later runs, may depend on earlier messages. Then a sum of Renyi divergences may be
compared with a limit before every message, if its order was fixed before the first (Feldman & Zrnic 2021, Renyi filter).

**Any message of pure loss e** costs at most as much as randomised response (Kairouz, Oh & Viswanath 2015), which is at most
`min(e, alpha e^2 / 2)` at order alpha (Bun & Steinke 2016, Proposition 3.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import LATTICE_BITS

ORDERS: FloatArray = as_floats(1.0 + np.geomspace(0.01, 5_000.0, 200))
"""Orders of Renyi divergences `(orders,)`. Neighbours differ so little that the best of them costs at most 0.1 % of epsilon."""
ORDERS.flags.writeable = False

_GROWING, _FALLING = ORDERS / (2.0 * ORDERS - 1.0), (ORDERS - 1.0) / (2.0 * ORDERS - 1.0)
_LOG_GROWING = np.log(_GROWING)
"""Weights of both exponentials of g."""
_ALL = slice(None)
_CHUNK = 4_096
"""Number of messages whose Renyi divergences are in memory at once."""
_SMALL_SHIFT = 1e-6
"""Shift in noise scales below which a coordinate costs `alpha x^2 / 2`, an upper bound whose relative error is below 1e-6."""
_SMALL_RESPONSE = 1e-4
"""Loss below which randomised response costs `alpha e^2 / 2`, an upper bound whose relative error is below 1e-6."""
_LARGE_RESPONSE = 1e9
"""Loss above which randomised response costs at most the loss itself, which is its limit."""
_LATTICE_SHIFT = 2.0**-LATTICE_BITS


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Noise mechanism of a message, as far as its privacy loss depends on it: which losses a pure loss can stand for.

    Attributes:
        n_coordinates: number of coordinates with independent Laplace noise, if the pure losses follow from an l2 bound as
            `sqrt(n) Phi / b`; 1 if they follow from an l1 bound. 0: only the pure losses are known.
    """

    n_coordinates: int

    def __post_init__(self) -> None:
        if self.n_coordinates < 0:
            raise SpecError(f"n_coordinates must be at least 0, got {self.n_coordinates}")

    @classmethod
    def laplace(cls, n_coordinates: int = 1) -> Mechanism:
        """Return Laplace noise on each of n coordinates; see the attribute.

        Raises:
            SpecError: n_coordinates is below 1.
        """
        if n_coordinates < 1:
            raise SpecError(f"n_coordinates must be at least 1, got {n_coordinates}")
        return cls(n_coordinates)

    def loss(self, epsilon: float) -> PrivacyLoss:
        """Return the loss of a message of this pure epsilon."""
        return PrivacyLoss(epsilon, self.compute_renyi(np.array([epsilon]))[0])

    def compute_renyi(self, epsilons: FloatArray, orders: slice = _ALL) -> FloatArray:
        """Bound the Renyi divergences `(..., orders)` of messages of pure losses `epsilons (...,)`."""
        losses = np.asarray(epsilons, np.float64)[..., None]
        if not self.n_coordinates:
            return as_floats(np.minimum(losses, _compute_response_renyi(losses, ORDERS[orders])))
        shifts = np.where(losses > 0.0, losses / self.n_coordinates + _LATTICE_SHIFT, 0.0)
        return as_floats(np.minimum(losses, self.n_coordinates * _compute_coordinate_renyi(shifts, orders)))

    def sum_renyi(self, epsilons: FloatArray) -> FloatArray:
        """Bound the sum `(orders,)` of the Renyi divergences of messages of pure losses `epsilons (messages,)`."""
        values, times = np.unique(epsilons[epsilons > 0], return_counts=True)
        total = np.zeros(len(ORDERS))
        for k in range(0, len(values), _CHUNK):
            total += times[k : k + _CHUNK] @ self.compute_renyi(values[k : k + _CHUNK])
        return total


PURE = Mechanism(0)
"""Any message of this pure loss."""


@dataclass(frozen=True, slots=True, eq=False)
class PrivacyLoss:
    """Privacy loss of one or several messages.

    Attributes:
        pure: pure epsilon; infinite without a guarantee.
        renyi: `(orders,)` Renyi divergences at `ORDERS`, never above `pure`.
    """

    pure: float
    renyi: FloatArray

    def __add__(self, other: PrivacyLoss) -> PrivacyLoss:
        """Return the loss of both messages."""
        return PrivacyLoss(self.pure + other.pure, as_floats(self.renyi + other.renyi))

    def epsilon(self, delta: float = 0.0) -> float:
        """Return epsilon at a delta; at delta 0 the pure one.

        From Renyi divergences by Canonne, Kamath & Steinke 2020, Proposition 12.

        Raises:
            SpecError: delta is not at least 0 and below 1.
        """
        if not 0.0 <= delta < 1.0:
            raise SpecError(f"delta must be at least 0 and below 1, got {delta}")
        if delta == 0.0 or self.pure == math.inf:
            return self.pure
        return max(0.0, min(float(self.pure), float(np.min(self.renyi + _compute_slack(delta)))))

    def find_best_order(self, delta: float) -> int:
        """Return the index of the order that gives `epsilon` at a delta above 0."""
        return int(np.argmin(self.renyi + _compute_slack(delta)))


@lru_cache(32)
def _compute_slack(delta: float) -> FloatArray:
    """Compute the difference `(orders,)` between epsilon at a delta and the Renyi divergence."""
    return as_floats(np.log1p(-1.0 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1.0))


@dataclass(frozen=True, slots=True)
class EpsilonLimit:
    """Maximum epsilon, pure or at a delta, with which a sender compares its losses before every message.

    Attributes:
        epsilon: maximum; infinite: no limit, but a delta at which losses are stated.
        delta: delta at which it holds; 0: it is pure.
        order: index of the Renyi order by which losses are charged, fixed before the first message.
    """

    epsilon: float
    delta: float = 0.0
    order: int = 0

    @classmethod
    def choose(cls, epsilon: float, delta: float, planned: PrivacyLoss | None = None) -> EpsilonLimit:
        """Return a limit whose order is best for the planned messages, or else for many small losses.

        Args:
            epsilon: maximum epsilon.
            delta: delta; 0: pure.
            planned: loss of all planned messages; None: not known.
        """
        if not delta:
            return cls(epsilon)
        if planned is not None and (epsilon == math.inf or planned.epsilon(delta) <= epsilon):
            return cls(epsilon, delta, planned.find_best_order(delta))
        # The divergences of small losses grow in proportion to the order.
        return cls(epsilon, delta, int(np.argmax((min(epsilon, 1e6) - _compute_slack(delta)) / ORDERS)))

    def measure(self, loss: PrivacyLoss) -> float:
        """Return the epsilon by which a loss counts against this limit: never below `PrivacyLoss.epsilon`."""
        if not self.delta:
            return loss.pure
        charged = float(loss.renyi[self.order] + _compute_slack(self.delta)[self.order])
        # In this form, not-a-number is never charged as 0.
        return min(loss.pure, 0.0 if charged < 0.0 else charged)

    def measure_rounds(self, pure: FloatArray, renyi: FloatArray | None) -> FloatArray:
        """Return the epsilon `(rounds,)` that counts after every message.

        Args:
            pure: `(rounds,)` pure losses of the messages.
            renyi: `(rounds,)` their Renyi divergences at this order; None for a pure limit.
        """
        total = np.cumsum(pure)
        if renyi is None or not self.delta:
            return as_floats(total)
        slack = float(_compute_slack(self.delta)[self.order])
        return as_floats(np.maximum(0.0, np.minimum(total, np.cumsum(renyi) + slack)))


NO_LOSS = PrivacyLoss(0.0, np.zeros(len(ORDERS)))
"""Loss of a message that depends on no record."""


def _compute_response_renyi(losses: FloatArray, orders: FloatArray) -> FloatArray:
    """Compute the Renyi divergences `(..., orders)` of randomised response with losses `(..., 1)`."""
    finite = np.minimum(losses, _LARGE_RESPONSE)
    exact = np.logaddexp(orders * finite, (1.0 - orders) * finite) - np.logaddexp(0.0, finite)
    # For small losses the difference cancels: the bound is its first term. For large ones the loss itself is the bound.
    short = np.where(losses < _SMALL_RESPONSE, 0.5 * orders * np.minimum(losses, 1.0) ** 2, exact / (orders - 1.0))
    return np.where(losses > _LARGE_RESPONSE, losses, short)


def _compute_coordinate_renyi(shifts: FloatArray, which: slice) -> FloatArray:
    """Compute g `(..., orders)` for shifts `(..., 1)` in noise scales, at these orders."""
    orders, growing, falling = ORDERS[which], _GROWING[which], _FALLING[which]
    rises, falls = (orders - 1.0) * shifts, orders * shifts
    # Differences of exponentials cancel for short shifts, and overflow for long ones.
    short = np.log1p(growing * np.expm1(np.minimum(rises, 1.0)) + falling * np.expm1(-falls))
    long = rises + _LOG_GROWING[which] + np.log1p(falling / growing * np.exp(-rises - falls))
    exact = np.where(rises < 1.0, short, long) / (orders - 1.0)
    return np.where(shifts < _SMALL_SHIFT, 0.5 * orders * np.minimum(shifts, _SMALL_SHIFT) ** 2, exact)
