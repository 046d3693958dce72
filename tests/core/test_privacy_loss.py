"""Privacy losses that add: Renyi divergences of Laplace messages with an l2 bound, and epsilon at a delta."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.loss import NO_LOSS, ORDERS, PURE, Mechanism, PrivacyLoss, _compute_coordinate_renyi

DELTA = 1e-5
TABLE = [
    (31, 1.0, 1, 0.665, 0.613),
    (31, 5.0, 38, 38.75, 36.7),
    (117, 1.0, 38, 2.500, 2.30),
    (117, 5.0, 38, 16.51, 15.5),
    (117, 5.0, 500, 99.93, 95.6),
    (1_000, 5.0, 38, 4.587, 4.25),
    (5_994, 5.0, 38, 1.684, 1.55),
]
"""Coordinates, pure loss of a message, messages, epsilon by Renyi divergences, and that of the shift that is spread evenly."""


def compose(mechanism: Mechanism, epsilon: float, messages: int) -> PrivacyLoss:
    """Loss of equal messages."""
    one = mechanism.loss(epsilon)
    return PrivacyLoss(messages * one.pure, messages * one.renyi)


@pytest.mark.parametrize(("n", "epsilon", "messages", "renyi", "attained"), TABLE)
def test_epsilon_at_a_delta_of_laplace_messages(
    n: int, epsilon: float, messages: int, renyi: float, attained: float
) -> None:
    found = compose(Mechanism.laplace(n), epsilon, messages).epsilon(DELTA)
    assert found == pytest.approx(renyi, rel=1e-3)
    assert attained < found < 1.1 * attained


@pytest.mark.parametrize(("n", "epsilon", "messages", "renyi", "attained"), [TABLE[0], TABLE[1], TABLE[3]])
def test_the_spread_shift_attains_nearly_as_much(
    n: int, epsilon: float, messages: int, renyi: float, attained: float
) -> None:
    """A lower bound for every method: the distribution of the loss if a record moves every coordinate by the same amount."""
    distribution = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    one = distribution.from_laplace_mechanism(
        n / epsilon, value_discretization_interval=epsilon / n / 200, pessimistic_estimate=False
    )
    lower_bound = one.self_compose(n * messages).get_epsilon_for_delta(DELTA)
    assert lower_bound == pytest.approx(attained, rel=0.02)
    assert lower_bound < compose(Mechanism.laplace(n), epsilon, messages).epsilon(DELTA)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("n", [1, 31])
def test_renyi_divergences_are_those_of_another_library(n: int, epsilon: float) -> None:
    rdp = pytest.importorskip("dp_accounting.rdp")
    event = pytest.importorskip("dp_accounting")
    accountant = rdp.RdpAccountant(orders=ORDERS.tolist())
    accountant.compose(event.SelfComposedDpEvent(event.LaplaceDpEvent(n / epsilon), n))
    np.testing.assert_allclose(Mechanism.laplace(n).loss(epsilon).renyi, accountant._rdp, rtol=1e-6)


def test_renyi_divergences_are_integrals() -> None:
    """Sum the divergence of both densities over a fine grid."""
    shift, x = 1.3, np.linspace(-80.0, 80.0, 2_000_001)
    log_p, log_q = -np.abs(x), -np.abs(x - shift)
    for k in (0, 60, 100, 130):
        terms = ORDERS[k] * log_p + (1.0 - ORDERS[k]) * log_q
        expected = math.log(np.trapezoid(np.exp(terms) / 2.0, x)) / (ORDERS[k] - 1.0)
        found = float(_compute_coordinate_renyi(np.array([[shift]]), slice(None))[0, k])
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_spread_shift_costs_most() -> None:
    """G is concave in the square of the shift, so no other shift with the same l2 norm costs more (Jensen)."""
    squares = np.concatenate([np.geomspace(1e-6, 1.0, 300)[:-1], np.linspace(1.0, 400.0, 600)])
    costs = _compute_coordinate_renyi(np.sqrt(squares)[:, None], slice(None))
    slopes = np.diff(costs, axis=0) / np.diff(squares)[:, None]
    assert (np.diff(slopes, axis=0) < 0.0).all()

    rng = np.random.default_rng(3)
    for _ in range(100):
        n, norm = int(rng.integers(2, 60)), 10.0 ** rng.uniform(-3.0, 1.5)
        shifts = np.abs(rng.standard_normal(n)) ** rng.uniform(0.1, 4.0)
        shifts *= norm / np.linalg.norm(shifts)
        spread = Mechanism.laplace(n).compute_renyi(np.array([math.sqrt(n) * norm]))[0]
        assert (_compute_coordinate_renyi(shifts[:, None], slice(None)).sum(axis=0) <= spread * (1.0 + 1e-9)).all()


def test_renyi_divergences_are_convex_in_the_loss() -> None:
    """So uses of a record cost most together if they cost most in the same messages."""
    losses = np.linspace(0.0, 60.0, 601)
    for mechanism in (Mechanism.laplace(1), Mechanism.laplace(31)):
        renyi = mechanism.compute_renyi(losses)
        assert (np.diff(renyi, axis=0) >= 0.0).all()
        assert (np.diff(renyi, 2, axis=0) > -1e-9).all()


@pytest.mark.parametrize("mechanism", [PURE, Mechanism.laplace(1), Mechanism.laplace(31)])
def test_two_messages_cost_at_most_one_with_the_sum_of_their_losses(mechanism: Mechanism) -> None:
    losses = np.geomspace(1e-5, 40.0, 60)
    apart, together = mechanism.compute_renyi(losses), mechanism.compute_renyi(losses[:, None] + losses)
    assert (apart[:, None] + apart <= together * (1.0 + 1e-6) + 1e-15).all()


@pytest.mark.parametrize("mechanism", [PURE, Mechanism.laplace(1), Mechanism.laplace(5_994)])
def test_any_size_of_loss(mechanism: Mechanism) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = [0.0, 5e-324, 1e-12, 1e-6, 1e-4, 1e-3, 1.0, 30.0, 1e3, 1e8, 1e300, math.inf]
        losses = [mechanism.loss(size) for size in sizes]
    assert losses[0].epsilon(DELTA) == 0.0 and losses[-1].epsilon(DELTA) == math.inf
    for loss, size in zip(losses[1:-1], sizes[1:-1], strict=True):
        assert 0.0 <= loss.epsilon(DELTA) <= loss.epsilon() == size
        assert (loss.renyi <= size).all() and (np.diff(loss.renyi) >= -1e-9 * loss.renyi[1:]).all()


def test_only_more_coordinates_save() -> None:
    """A message of one coordinate is a Laplace number; of any message of a pure loss, randomised response costs most."""
    by_n = [compose(Mechanism.laplace(n), 1.0, 20).epsilon(DELTA) for n in (1, 2, 8, 64)]
    assert by_n == sorted(by_n, reverse=True)
    assert compose(PURE, 1.0, 20).epsilon(DELTA) > by_n[0]
    response = math.log((math.exp(2.0) + math.exp(-1.0)) / (1.0 + math.exp(1.0)))
    k = int(np.argmin(np.abs(ORDERS - 2.0)))
    assert PURE.loss(1.0).renyi[k] == pytest.approx(response, rel=0.03)


def test_losses_add() -> None:
    one, other = Mechanism.laplace(3).loss(0.5), PURE.loss(0.25)
    both = one + other
    assert both.pure == 0.75
    np.testing.assert_array_equal(both.renyi, one.renyi + other.renyi)
    assert (one + NO_LOSS).epsilon(DELTA) == one.epsilon(DELTA)


@pytest.mark.parametrize("delta", [-0.1, 1.0, math.nan])
def test_a_delta_is_a_probability(delta: float) -> None:
    with pytest.raises(SpecError, match="at least 0 and below 1"):
        NO_LOSS.epsilon(delta)


def test_laplace_noise_is_on_some_coordinate() -> None:
    with pytest.raises(SpecError, match="at least 1, got 0"):
        Mechanism.laplace(0)
