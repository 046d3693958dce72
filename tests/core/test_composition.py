"""Sums over uses, groups and learners, and epsilon at a delta: printed values, and bounds that no record may exceed."""

from __future__ import annotations

import functools
import math
import operator
import sys
from typing import Any

import numpy as np
import pytest

from sottovoce_core.arrays import FloatArray
from sottovoce_core.budget import composition
from sottovoce_core.budget.composition import (
    MessageLosses,
    RecordGroup,
    _count_usage_plans,
    envelope,
    epsilon_for_delta,
    group_loss,
    group_record_losses,
    message_losses,
    worst_case_record_losses,
)
from sottovoce_core.data import LearnerData
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.guarantee import Adjacency
from sottovoce_core.privacy.loss import PURE, Mechanism
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import parse_spec
from tests.examples import made_up, small_run

T = np.arange(1, 501)
LAPLACE = Mechanism.laplace()
RUNS: dict[str, dict[str, Any]] = {
    "ldp-dol": {},
    "dsgd": {},
    "dola": {},
    "pd-ftgl": {"noise_scale": 1.0, "block_length": 3},
    "dpps": {"sigma": 1.0, "clip": 1.0},
    "dvp": {"alpha": 0.3},
    "pvp": {"alpha": 0.3},
}


def epsilon_at(delta: float, losses: FloatArray, mechanism: Mechanism) -> float:
    """Epsilon of one learner's messages."""
    return epsilon_for_delta(delta, [MessageLosses(mechanism, losses, mechanism.sum_renyi(losses))])


def build(name: str) -> Run:
    """A small run of an algorithm, with the parameters of `RUNS`."""
    topology = {"topology": {"graph": "ring", "weights": "out_degree"}} if name == "dpps" else {}
    document = {"rounds": 12, "learners": 3, "algorithm": {"name": name, **RUNS.get(name, {})}, **topology}
    return build_run(parse_spec(document, allow_imports=True), 3)


def test_messages_that_cost_hundreds_have_an_epsilon_at_a_delta() -> None:
    """dp-accounting discretises their distributions with deltas out of order, and refuses them."""
    losses, mechanism = np.array([760.26, 5000.0]), Mechanism.laplace(112)
    with pytest.raises(ValueError, match="deltas are not in non-increasing order"):
        composition._compose([MessageLosses(mechanism, losses, mechanism.sum_renyi(losses))], losses.sum() / 50_000)
    assert 0.0 < epsilon_at(1e-5, losses, mechanism) <= losses.sum()


# ---- uses, groups, learners ------------------------------------------------------------------------------------------


def scheduled(order: list[int], offsets: list[int]) -> LearnerData:
    records = max(order) + 1
    return LearnerData(np.zeros((records, 3)), np.zeros(records), np.array(order), np.array(offsets))


def test_count_usage_plans_count_every_use_in_its_round() -> None:
    own = scheduled([0, 1, 0, 2, 1, 1, 3], [0, 2, 2, 4, 6, 7])
    assert _count_usage_plans(own) == {(0, 2): 1, (0, 3, 3): 1, (2,): 1, (4,): 1}


@pytest.mark.parametrize("name", RUNS)
def test_a_record_is_charged_for_all_of_its_uses(name: str) -> None:
    run = build(name)
    own = scheduled([k % 4 for k in range(12)], list(range(13)))
    counts = np.diff(own.offsets)
    event = run.guarantee(0, counts)
    found = group_record_losses(run.algorithm.accountant(0), own)
    assert [(each.n_records, each.n_uses) for each in found] == [(1, 3)] * 4
    for each, first in zip(found, range(4), strict=True):
        replaced = np.isin(np.arange(12) % 4, first).astype(np.int64)
        expected = run.guarantee(0, counts, replaced).round_losses
        np.testing.assert_allclose(each.charged_losses(event.round_losses), expected, rtol=1e-12, atol=1e-300)
    dearest = math.fsum(worst_case_record_losses(found, event.round_losses))
    assert event.epsilon() < dearest <= 3 * event.epsilon() * (1 + 1e-12)
    assert dearest == max(math.fsum(each.charged_losses(event.round_losses)) for each in found)


def test_many_plans_are_bounded_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    own = scheduled([0, 1, 0, 2, 1, 1], [0, 1, 2, 3, 4, 5, 6])
    run = small_run(6)
    exact = group_record_losses(run.algorithm.accountant(0), own)
    monkeypatch.setattr(composition, "MAX_ACCOUNTED_ROUNDS", 11)  # two records of several uses, over six rounds: 12
    bounded = group_record_losses(run.algorithm.accountant(0), own)
    event = run.guarantee(0).round_losses
    assert [each.losses is None for each in bounded] == [True] * 3
    assert math.fsum(worst_case_record_losses(bounded, event)) == pytest.approx(3 * math.fsum(event))
    assert math.fsum(worst_case_record_losses(exact, event)) < math.fsum(worst_case_record_losses(bounded, event))


def test_a_group_costs_the_sum_of_its_dearest_records() -> None:
    event = np.array([0.25, 0.5])
    records = [
        RecordGroup(2, 1, None),
        RecordGroup(1, 2, np.array([1.0, 1.0])),
        RecordGroup(5, 1, np.array([0.1, 0.0])),
    ]
    assert group_loss(records, event, 1) == 2.0
    assert group_loss(records, event, 2) == 2.75
    assert group_loss(records, event, 4) == pytest.approx(3.6)
    assert group_loss(records, event, 100) == pytest.approx(2 + 1.5 + 0.5)
    assert group_loss([RecordGroup(7, 1, None)], event, 7) == 7 * 0.75


def test_sums_are_exact() -> None:
    assert functools.reduce(operator.add, [0.1] * 10) != 1.0  # from Python 3.12 on, sum compensates
    assert group_loss([RecordGroup(10, 1, np.array([0.1]))], np.zeros(1), 10) == 1.0


def test_a_whole_objective_is_one_event_whatever_its_records() -> None:
    run = build("pdop")
    own = made_up(run.spec, batch=2, records=4).learners[0]
    assert run.guarantee(0).adjacency is Adjacency.LEARNER
    (everything,) = group_record_losses(run.algorithm.accountant(0), own)
    assert (everything.n_records, everything.n_uses, everything.losses) == (4, 1, None)
    assert build("dsgd").guarantee(0).adjacency is Adjacency.RECORD_USE


# ---- at a delta ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "pure", "at_delta"),
    [(np.full(500, 0.05), 25.0, 5.474), (0.2 / np.sqrt(T), 8.66, 2.22), (0.5 * 0.99**T, 49.2, 20.0)],
)
def test_reference_values_of_laplace_noise(losses: FloatArray, pure: float, at_delta: float) -> None:
    assert math.fsum(losses) == pytest.approx(pure, rel=1e-3)
    assert epsilon_at(1e-6, losses, LAPLACE) == pytest.approx(at_delta, rel=2e-3)


@pytest.mark.parametrize("mechanism", [LAPLACE, PURE])
def test_one_message_as_in_the_books(mechanism: Mechanism) -> None:
    """delta(e) is `1 - exp((e - eps)/2)` for Laplace noise, `(exp(eps) - exp(e)) / (exp(eps) + 1)` for randomised response."""
    eps, delta = 1.0, 0.05
    expected = eps + 2 * math.log1p(-delta)
    if mechanism is PURE:
        expected = math.log(math.exp(eps) - delta * (math.exp(eps) + 1))
    assert epsilon_at(delta, np.array([eps]), mechanism) == pytest.approx(expected, abs=2e-4)


def test_a_vector_of_laplace_numbers_is_dominated_by_one_of_them() -> None:
    """Spreading a shift over coordinates, and a finer lattice, only lower delta: the claim of the module's head."""
    eps = 1.0

    def worst(epsilon: float) -> float:
        return 1 - math.exp((epsilon - eps) / 2)

    x = np.linspace(-40, 41, 2001)
    p, q = (np.diff(np.where(x < m, np.exp(x - m) / 2, 1 - np.exp(m - x) / 2)) for m in (0.0, 0.5))
    both = np.outer(p, p), np.outer(q, q)  # two coordinates, moved by half of it each
    for epsilon in (0.0, 0.3, 0.6, 0.9):
        delta = float(np.maximum(both[0] - math.exp(epsilon) * both[1], 0).sum())
        assert 0 < delta <= worst(epsilon)


def test_less_than_pure_and_falling_with_delta() -> None:
    losses = np.full(40, 0.2)
    found = [epsilon_at(delta, losses, LAPLACE) for delta in (1e-9, 1e-6, 1e-3)]
    assert 8.0 > found[0] > found[1] > found[2] > 0
    assert epsilon_at(1e-6, losses, PURE) > found[1]
    assert epsilon_at(1e-300, losses, LAPLACE) == pytest.approx(8.0)
    assert epsilon_at(1e-6, np.zeros(3), LAPLACE) == 0.0
    assert epsilon_at(1e-6, np.array([1.0, math.inf]), LAPLACE) == math.inf
    assert epsilon_at(1e-6, np.full(200, 40.0), LAPLACE) < 7990.0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, math.nan])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(SpecError, match="delta must be above 0 and below 1"):
        epsilon_at(delta, np.ones(2), LAPLACE)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)
    with pytest.raises(SpecError, match=r"pip install '\.\[accounting\]'"):
        epsilon_at(1e-6, np.ones(2), LAPLACE)


@pytest.mark.parametrize("name", RUNS)
def test_message_losses_dominate_every_single_record(name: str) -> None:
    run = build(name)
    counts = np.array([2, 0, 1, 3, 1, 1, 1, 4, 1, 1, 1, 1])
    bound = message_losses(run.algorithm.accountant(0), counts)
    assert bound is not None
    bound = np.sort(bound)[::-1]
    for t in np.flatnonzero(counts):
        single = run.guarantee(0, counts, (np.arange(12) == t).astype(np.int64)).round_losses
        assert (np.sort(single)[::-1] <= bound * (1 + 1e-12)).all()


def test_increments_of_a_maximum_are_no_message_losses() -> None:
    """DOLA: each record shows in one message; its meter's increments are many small ones, the messages are not."""
    run = build("dola")
    bound = message_losses(run.algorithm.accountant(0), np.ones(12, np.int64))
    assert bound is not None
    assert np.count_nonzero(bound) == 1
    assert np.count_nonzero(run.guarantee(0).round_losses) > 1
    assert math.fsum(bound) == pytest.approx(run.guarantee(0).epsilon())


def test_too_many_rounds_leave_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "MAX_ACCOUNTED_ROUNDS", 143)
    one = np.ones(12, np.int64)
    assert message_losses(build("dsgd").algorithm.accountant(0), one) is None
    assert message_losses(build("ldp-dol").algorithm.accountant(0), one) is not None


def test_several_events_are_not_one_event_several_times() -> None:
    """Events that cost 3, 1 and 1, 3: together 4, 4. Neither twice the first nor twice the second dominates that."""
    delta, pure = 0.09, PURE
    together = epsilon_at(delta, np.array([4.0, 4.0]), pure)
    assert epsilon_at(delta, np.array([6.0, 2.0]), pure) < together - 0.005
    assert together < epsilon_at(delta, RecordGroup(1, 2, None).composable_losses(np.array([3.0, 1.0])), pure)


def test_uses_that_are_metered_or_single_are_composed_message_by_message() -> None:
    single, metered = np.array([3.0, 1.0]), np.array([4.0, 3.5])
    assert RecordGroup(1, 1, None).composable_losses(single) is single
    assert RecordGroup(1, 2, metered).composable_losses(single) is metered
    assert RecordGroup(1, 2, None).composable_losses(single).tolist() == [8.0, 0.0]


def test_envelope_sorts_first() -> None:
    np.testing.assert_array_equal(envelope([np.array([0.0, 1.0, 3.0]), np.array([2.0, 2.0, 0.0])]), [3.0, 2.0, 0.0])


def test_mechanisms() -> None:
    """Every message has three numbers."""
    found = {name: build(name).guarantee(0).mechanism for name in RUNS}
    assert found == dict.fromkeys(RUNS, Mechanism.laplace(3)) | {"dvp": PURE, "pvp": PURE}
