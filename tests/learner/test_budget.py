"""The books: nobody overspends, and a refusal changes nothing."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.errors import BudgetExhausted
from sottovoce_core.privacy.accountant import Accountant, PrecomputedAccountant
from sottovoce_core.privacy.loss import NO_LOSS, ORDERS, PURE, EpsilonLimit, Mechanism, PrivacyLoss
from sottovoce_learner.privacy_filter import Allowance, PrivacyFilter
from tests.claims import SETUPS
from tests.examples import small_run


class Meter(Accountant):
    """An accountant that charges a list of prices."""

    def __init__(self, prices: list[float]) -> None:
        self.prices, self.records = list(prices), list[int]()

    def next_loss(self) -> float:
        return self.prices[len(self.records)]

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        self.records.append(records)


def limit(epsilon: float | None) -> EpsilonLimit | None:
    return None if epsilon is None else EpsilonLimit(epsilon)


def epsilon_of(limit: EpsilonLimit | None) -> float | None:
    return None if limit is None else limit.epsilon


prices = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20)


@given(prices, st.one_of(st.none(), st.floats(0.0, 50.0)))
def test_spending_adds_up_and_never_exceeds_the_budget(losses: list[float], budget: float | None) -> None:
    books = PrivacyFilter(Meter(losses), limit(budget))
    for t, loss in enumerate(losses):
        before = books.epsilon_spent
        try:
            after = books.admit_round(t)
        except BudgetExhausted:
            assert budget is not None
            assert before + loss > budget
            assert books.epsilon_spent == before
            return
        assert books.epsilon_spent == before  # a price is not a charge
        books.charge(after)
        books.advance(1)
    assert books.epsilon_spent == pytest.approx(math.fsum(losses))
    assert budget is None or books.epsilon_spent <= budget


limits = st.one_of(st.none(), st.floats(0.0, 50.0).map(EpsilonLimit))
others = st.floats(0.0, 20.0).map(PURE.loss)


@given(prices, st.one_of(st.none(), st.floats(0.0, 50.0)), st.builds(Allowance, limits, limits, limits, others, others))
def test_no_limit_of_the_owner_is_exceeded_and_none_stops_before(
    losses: list[float], budget: float | None, allowed: Allowance
) -> None:
    books = PrivacyFilter(Meter(losses), limit(budget), allowed)
    before = (
        (0.0, budget),
        (0.0, epsilon_of(allowed.per_run)),
        (allowed.other_runs_month_loss.pure, epsilon_of(allowed.per_month)),
        (allowed.other_runs_loss.pure, epsilon_of(allowed.in_all_runs)),
    )

    def fits(spent: float) -> bool:
        return all(limit is None or elsewhere + spent <= limit for elsewhere, limit in before)

    for t, loss in enumerate(losses):
        try:
            books.charge(books.admit_round(t))
        except BudgetExhausted:
            assert not fits(books.epsilon_spent + loss)
            return
        books.advance(1)
        assert fits(books.epsilon_spent)


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (
            Allowance(per_run=EpsilonLimit(2.0)),
            "spent in this run from 1 to 2.5, above what this learner's owner allows in one, 2",
        ),
        (
            Allowance(per_month=EpsilonLimit(5.0), other_runs_month_loss=PURE.loss(3.0)),
            "spent in 30 days from 4 to 5.5, above what this learner's owner allows in that time, 5",
        ),
        (
            Allowance(in_all_runs=EpsilonLimit(5.0), other_runs_loss=PURE.loss(3.0)),
            "spent in all runs from 4 to 5.5, above what this learner's owner allows, 5",
        ),
    ],
)
def test_the_refusal_says_which_limit_of_the_owner_holds(allowed: Allowance, text: str) -> None:
    books = PrivacyFilter(Meter([1.0, 1.5]), None, allowed)
    books.charge(books.admit_round(0))
    books.advance(1)
    with pytest.raises(BudgetExhausted, match=re.escape(f"would bring the epsilon {text}")):
        books.admit_round(1)


def test_the_refusal_says_what_would_be_spent() -> None:
    books = PrivacyFilter(Meter([1.0, 1.5]), EpsilonLimit(2.0))
    books.charge(books.admit_round(0))
    books.advance(3)
    text = "sending round 1 would bring the spent epsilon from 1 to 2.5, above the budget of 2"
    with pytest.raises(BudgetExhausted, match=text):
        books.admit_round(1)


def test_exactly_the_budget_may_be_spent() -> None:
    assert PrivacyFilter(Meter([2.0]), EpsilonLimit(2.0)).admit_round(0) == 2.0


def test_an_infinite_price_exceeds_every_budget() -> None:
    with pytest.raises(BudgetExhausted):
        PrivacyFilter(Meter([math.inf]), EpsilonLimit(1e300)).admit_round(0)
    assert PrivacyFilter(Meter([math.inf]), None).admit_round(0) == math.inf


@pytest.mark.parametrize("price", [math.nan, -1.0])
def test_what_has_no_price_is_not_said(price: float) -> None:
    for books in (
        PrivacyFilter(Meter([price]), None),
        PrivacyFilter(Meter([price]), EpsilonLimit(2.0)),
        PrivacyFilter(Meter([price]), None, Allowance(in_all_runs=EpsilonLimit(2.0))),
    ):
        with pytest.raises(BudgetExhausted, match="the privacy loss of round 0 must be at least 0"):
            books.admit_round(0)


def test_what_was_spent_elsewhere_and_is_no_number_leaves_nothing() -> None:
    with pytest.raises(BudgetExhausted, match="above what this learner's owner allows"):
        PrivacyFilter(
            Meter([0.5]),
            None,
            Allowance(in_all_runs=EpsilonLimit(2.0), other_runs_loss=PrivacyLoss(math.nan, NO_LOSS.renyi)),
        ).admit_round(0)


def test_the_meter_hears_of_every_record() -> None:
    meter = Meter([1.0] * 3)
    books = PrivacyFilter(meter, None)
    for count in (2, 0, 5):
        books.advance(count)
    assert meter.records == [2, 0, 5]


def test_the_books_of_a_run_end_where_its_guarantee_does() -> None:
    run = small_run(rounds=30)
    books = PrivacyFilter(run.algorithm.accountant(0), None)
    for t in range(30):
        books.charge(books.admit_round(t))
        books.advance(1)
    assert books.epsilon_spent == pytest.approx(run.guarantee(0).epsilon(), rel=1e-12)
    assert books.epsilon_spent > 0


@pytest.mark.parametrize("name", ["ldp-dol", "dsgd", "dola", "pd-ftgl", "dpsda-c", "pvp", "dvp"])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.01])
def test_a_run_that_costs_its_budget_at_a_delta_sends_all_messages(name: str, delta: float) -> None:
    """And with a little less all but the last one. What is charged is never below the epsilon of what was sent."""
    run = SETUPS[name].build()
    accountant, counts = run.algorithm.accountant(0), run.planned_counts(0)
    cost = run.planned_loss(0, delta).epsilon(delta)
    assert 0.0 < cost <= run.planned_loss(0).epsilon() < math.inf
    for share, sent in ((1.0 + 1e-9, len(counts)), (1.0 - 1e-6, None)):
        limit = run.plan_limit(0, share * cost, delta)
        assert limit is not None
        books, renyi = PrivacyFilter(run.algorithm.accountant(0), limit), accountant.total_renyi(counts)
        spending = accountant.spending(counts, limit)
        try:
            for t, records in enumerate(counts.tolist()):
                books.charge(books.admit_round(t))
                assert books.measure(books.scopes[0]) == pytest.approx(spending[t], rel=1e-9)
                books.advance(records)
        except BudgetExhausted:
            assert sent is None
            assert spending[len(books.record_counts)] > limit.epsilon
        assert books.measure(books.scopes[0]) <= limit.epsilon
        if sent is not None:
            assert len(books.record_counts) == sent
            assert books.measure(books.scopes[0]) >= PrivacyLoss(books.epsilon_spent, renyi).epsilon(delta) * (
                1.0 - 1e-9
            )


def test_limits_at_a_delta_count_other_runs() -> None:
    """Their Renyi divergences add up: far less than their epsilons do."""
    mechanism, delta = Mechanism.laplace(100), 1e-6
    one = mechanism.loss(0.5)
    alone = (one + one).epsilon(delta)
    limit = EpsilonLimit.choose(1.01 * alone, delta, one + one)
    accountant = PrecomputedAccountant(np.array([0.5, 0.5]), mechanism)
    books = PrivacyFilter(accountant, None, Allowance(in_all_runs=limit, other_runs_loss=one))
    books.charge(books.admit_round(0))
    books.advance(1)
    with pytest.raises(BudgetExhausted, match=r"epsilon spent in all runs from .* \(at delta 1e-06\), above"):
        books.admit_round(1)
    assert alone < one.epsilon(delta) + one.epsilon(delta)


@pytest.mark.parametrize("name", SETUPS)
def test_a_price_that_is_asked_for_again_is_the_same(name: str) -> None:
    """A message that could not be logged is priced again."""
    run = SETUPS[name].build()
    accountant, counts, total = run.algorithm.accountant(0), run.planned_counts(0), np.zeros(len(ORDERS))
    for records in counts.tolist():
        price = accountant.next_renyi()
        np.testing.assert_array_equal(accountant.next_renyi(), price)
        total += price
        accountant.advance(records)
    assert total == pytest.approx(run.algorithm.accountant(0).total_renyi(counts), rel=1e-9)
