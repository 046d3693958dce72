"""The books: nobody overspends, and a refusal changes nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.errors import BudgetExhausted
from sottovoce.privacy.accountant import Accountant
from sottovoce_learner.books import Books, Owned
from tests.examples import small_run


class Meter(Accountant):
    """An accountant that charges a list of prices."""

    def __init__(self, prices: list[float]) -> None:
        self.prices, self.records = list(prices), list[int]()

    def next_loss(self) -> float:
        return self.prices[len(self.records)]

    def advance(self, records: int, replaced: int | None = None) -> None:
        self.records.append(records)


prices = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20)


@given(prices, st.one_of(st.none(), st.floats(0.0, 50.0)))
def test_spending_adds_up_and_never_exceeds_the_budget(losses: list[float], budget: float | None) -> None:
    books = Books(Meter(losses), budget)
    for t, loss in enumerate(losses):
        before = books.spent
        try:
            after = books.price(t)
        except BudgetExhausted:
            assert budget is not None
            assert before + loss > budget
            assert books.spent == before
            return
        assert books.spent == before  # a price is not a charge
        books.charge(after)
        books.round_over(1)
    assert books.spent == pytest.approx(math.fsum(losses))
    assert budget is None or books.spent <= budget


def test_the_refusal_says_what_would_be_spent() -> None:
    books = Books(Meter([1.0, 1.5]), 2.0)
    books.charge(books.price(0))
    books.round_over(3)
    text = "saying round 1 would bring the spent epsilon from 1 to 2.5, above the budget of 2"
    with pytest.raises(BudgetExhausted, match=text):
        books.price(1)


def test_exactly_the_budget_may_be_spent() -> None:
    assert Books(Meter([2.0]), 2.0).price(0) == 2.0


def test_an_infinite_price_exceeds_every_budget() -> None:
    with pytest.raises(BudgetExhausted):
        Books(Meter([math.inf]), 1e300).price(0)
    assert Books(Meter([math.inf]), None).price(0) == math.inf


@pytest.mark.parametrize("price", [math.nan, -1.0])
def test_what_has_no_price_is_not_said(price: float) -> None:
    for books in (
        Books(Meter([price]), None),
        Books(Meter([price]), 2.0),
        Books(Meter([price]), None, Owned(in_all=2.0)),
    ):
        with pytest.raises(BudgetExhausted, match="the price of round 0 must be at least 0"):
            books.price(0)


def test_what_was_spent_elsewhere_and_is_no_number_leaves_nothing() -> None:
    with pytest.raises(BudgetExhausted, match="above what this learner's owner allows"):
        Books(Meter([0.5]), None, Owned(in_all=2.0, elsewhere=math.nan)).price(0)


def test_the_meter_hears_of_every_record() -> None:
    meter = Meter([1.0] * 3)
    books = Books(meter, None)
    for count in (2, 0, 5):
        books.round_over(count)
    assert meter.records == [2, 0, 5]


def test_the_books_of_a_run_end_where_its_guarantee_does() -> None:
    run = small_run(rounds=30)
    books = Books(run.algorithm.accountant(0), None)
    for t in range(30):
        books.charge(books.price(t))
        books.round_over(1)
    assert books.spent == pytest.approx(run.guarantee(0).epsilon(), rel=1e-12)
    assert books.spent > 0
