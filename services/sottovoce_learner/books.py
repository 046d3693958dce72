"""The learner's books: what the next message costs, what was spent, and the refusal to overspend."""

from __future__ import annotations

from array import array

from sottovoce.errors import BudgetExhausted
from sottovoce.privacy.accountant import Accountant


class Books:
    """Spending of one learner.

    Args:
        accountant: meters the algorithm.
        budget: epsilon that must not be exceeded in this run; None for no limit.
        own_budget: epsilon that its owner allows in all runs together; None for no limit.
        elsewhere: epsilon spent in other runs.
    """

    def __init__(
        self,
        accountant: Accountant,
        budget: float | None,
        *,
        own_budget: float | None = None,
        elsewhere: float = 0.0,
    ) -> None:
        self._accountant = accountant
        self.budget, self.own_budget, self.elsewhere = budget, own_budget, elsewhere
        self.spent = 0.0
        self.counts = array("I")
        """Records of each round that is over: all that the meter has been told."""

    def price(self, t: int) -> float:
        """Epsilon spent once the message of round t is out.

        Raises:
            BudgetExhausted: that would be more than the budget, or what it would be cannot be told.
        """
        loss = self._accountant.next_loss()
        if not loss >= 0.0:  # in this form, as below, not-a-number is refused, too
            raise BudgetExhausted(f"the price of round {t} must be at least 0, got {loss}: nothing is said without one")
        after = self.spent + loss
        if self.budget is not None and not after <= self.budget:
            raise BudgetExhausted(
                f"saying round {t} would bring the spent epsilon from {self.spent:.6g} to {after:.6g}, "
                f"above the budget of {self.budget:.6g}"
            )
        if self.own_budget is not None and not self.elsewhere + after <= self.own_budget:
            raise BudgetExhausted(
                f"saying round {t} would bring the epsilon spent in all runs from {self.elsewhere + self.spent:.6g} to "
                f"{self.elsewhere + after:.6g}, above what this learner's owner allows, {self.own_budget:.6g}"
            )
        return after

    def charge(self, after: float) -> None:
        """Book what the journal already says."""
        self.spent = after

    def round_over(self, records: int) -> None:
        """The round brought so many records."""
        self._accountant.advance(records)
        self.counts.append(records)
