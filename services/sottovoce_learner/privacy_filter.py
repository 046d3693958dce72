"""Privacy filter of a learner: rejects a message that would exceed the budget before it is sent. No network, file or clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from sottovoce_core.errors import BudgetExhausted
from sottovoce_core.privacy.accountant import Accountant
from sottovoce_core.runs.policy import DAYS_PER_MONTH
from sottovoce_core.runs.run import format_above


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits set by the learner's owner, and what other runs have spent of them.

    Attributes:
        max_epsilon_per_run: maximum epsilon of one run; None: no limit, here and below.
        max_epsilon_per_month: maximum epsilon of all runs of a month together.
        max_epsilon_in_all_runs: maximum epsilon of all runs together.
        other_runs_month_epsilon: epsilon spent in other runs of the last month.
        other_runs_epsilon: epsilon spent in all other runs.
    """

    max_epsilon_per_run: float | None = None
    max_epsilon_per_month: float | None = None
    max_epsilon_in_all_runs: float | None = None
    other_runs_month_epsilon: float = 0.0
    other_runs_epsilon: float = 0.0


_NO_LIMITS = Allowance()


class PrivacyFilter:
    """Epsilon spent by one learner in a run.

    Args:
        accountant: accountant of the algorithm.
        budget: maximum epsilon of this run by its spec; None: no limit.
        allowance: limits of the learner's owner.
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
                f"{allowed} in that time,",
            ),
            (
                "epsilon spent in all runs",
                allowance.other_runs_epsilon,
                allowance.max_epsilon_in_all_runs,
                f"{allowed},",
            ),
        )
        self.budget = min((each for each in (budget, allowance.max_epsilon_per_run) if each is not None), default=None)
        """Maximum epsilon of this run, independent of other runs; None: no limit."""
        self.epsilon_spent = 0.0
        self.record_counts = array("I")
        """Number of records of each completed round: all that the accountant has received."""

    def admit_round(self, t: int) -> float:
        """Return the epsilon spent once the message of round t is sent.

        Raises:
            BudgetExhausted: it would exceed the budget, or cannot be computed.
        """
        loss = self._accountant.next_loss()
        if not loss >= 0.0:  # in this form, as below, not-a-number is refused, too
            raise BudgetExhausted(f"the privacy loss of round {t} must be at least 0, got {loss}: no message is sent")
        total = self.epsilon_spent + loss
        for subject, spent_elsewhere, limit, limit_text in self._limits:
            if limit is not None and not spent_elsewhere + total <= limit:
                raise BudgetExhausted(
                    f"sending round {t} would bring the {subject} from {spent_elsewhere + self.epsilon_spent:.6g} to "
                    f"{format_above(spent_elsewhere + total, limit)}, above {limit_text} {limit:.6g}"
                )
        return total

    def charge(self, total: float) -> None:
        """Set the epsilon spent to what the log already holds."""
        self.epsilon_spent = total

    def advance(self, records: int) -> None:
        """Complete a round with this number of records."""
        self._accountant.advance(records)
        self.record_counts.append(records)
