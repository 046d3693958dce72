"""The budget of a learner: a message that would exceed it is refused before it is sent. No network, no file, no clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from sottovoce_core.errors import BudgetExhausted
from sottovoce_core.privacy.accountant import Accountant
from sottovoce_core.runs.policy import DAYS_PER_MONTH
from sottovoce_core.runs.run import format_above


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a learner's owner allows, and what other runs have spent of it.

    Attributes:
        max_epsilon_per_run: epsilon of one run; None: no limit, here and below.
        max_epsilon_per_month: of all runs of a month together.
        in_all: of all runs together.
        lately: spent in other runs of the last month.
        elsewhere: spent in all other runs.
    """

    max_epsilon_per_run: float | None = None
    max_epsilon_per_month: float | None = None
    max_epsilon_in_all_runs: float | None = None
    other_runs_month_epsilon: float = 0.0
    other_runs_epsilon: float = 0.0


_NO_LIMITS = Allowance()


class PrivacyFilter:
    """Spending of one learner.

    Args:
        accountant: meters the algorithm.
        budget: epsilon that must not be exceeded in this run, as its spec says; None for no limit.
        allowance: its owner's.
    """

    def __init__(self, accountant: Accountant, budget: float | None, allowance: Allowance = _NO_LIMITS) -> None:
        self._accountant, self.allowance = accountant, allowance
        allowed = "what this learner's owner allows"
        self._limits = (
            ("spent epsilon", 0.0, budget, "the budget of"),
            ("epsilon spent in this run", 0.0, allowance.max_epsilon_per_run, f"{allowed} in one,"),
            (
                f"epsilon spent in {DAYS_PER_MONTH} days",
                allowance.other_runs_month_epsilon,
                allowance.max_epsilon_per_month,
                f"{allowed} in so many,",
            ),
            (
                "epsilon spent in all runs",
                allowance.other_runs_epsilon,
                allowance.max_epsilon_in_all_runs,
                f"{allowed},",
            ),
        )
        self.budget = min((each for each in (budget, allowance.max_epsilon_per_run) if each is not None), default=None)
        """Epsilon that is not exceeded in this run, whatever other runs have cost; None: there is no limit."""
        self.epsilon_spent = 0.0
        self.record_counts = array("I")
        """Records of each round that is over: all that the meter has been told."""

    def admit_round(self, t: int) -> float:
        """Epsilon spent once the message of round t is out.

        Raises:
            BudgetExhausted: that would be more than the budget, or what it would be cannot be told.
        """
        loss = self._accountant.next_loss()
        if not loss >= 0.0:  # in this form, as below, not-a-number is refused, too
            raise BudgetExhausted(f"the price of round {t} must be at least 0, got {loss}: nothing is said without one")
        after = self.epsilon_spent + loss
        for what, others, limit, whose in self._limits:
            if limit is not None and not others + after <= limit:
                raise BudgetExhausted(
                    f"saying round {t} would bring the {what} from {others + self.epsilon_spent:.6g} to "
                    f"{format_above(others + after, limit)}, above {whose} {limit:.6g}"
                )
        return after

    def charge(self, after: float) -> None:
        """Book what the journal already says."""
        self.epsilon_spent = after

    def advance(self, records: int) -> None:
        """The round brought so many records."""
        self._accountant.advance(records)
        self.record_counts.append(records)
