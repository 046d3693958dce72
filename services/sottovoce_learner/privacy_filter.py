"""Privacy filter of a learner: rejects a message that would exceed the budget before it is sent. No network, file or clock."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import BudgetExhausted
from sottovoce_core.privacy.accountant import Accountant
from sottovoce_core.privacy.loss import NO_LOSS, EpsilonLimit, PrivacyLoss
from sottovoce_core.runs.policy import DAYS_PER_MONTH
from sottovoce_core.runs.run import format_above


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits set by the learner's owner, and the losses of other runs that count against them.

    Attributes:
        per_run: maximum of one run; None: no limit, here and below.
        per_month: maximum of all runs of a month together.
        in_all_runs: maximum of all runs together.
        other_runs_month_loss: loss of other runs of the last month.
        other_runs_loss: loss of all other runs.
    """

    per_run: EpsilonLimit | None = None
    per_month: EpsilonLimit | None = None
    in_all_runs: EpsilonLimit | None = None
    other_runs_month_loss: PrivacyLoss = NO_LOSS
    other_runs_loss: PrivacyLoss = NO_LOSS


@dataclass(frozen=True, slots=True)
class SpendingScope:
    """Runs whose losses count against a limit.

    Attributes:
        name: run, month or all.
        limit: the limit; None: there is none.
        other_loss: loss of other runs in this scope.
        subject, limit_text: parts of the sentence that refuses a message.
    """

    name: str
    limit: EpsilonLimit | None
    other_loss: PrivacyLoss
    subject: str
    limit_text: str


_NO_LIMITS = Allowance()


class PrivacyFilter:
    """Epsilon spent by one learner in a run.

    Args:
        accountant: accountant of the algorithm.
        budget: limit of this run by its spec; None: no limit.
        allowance: limits of the learner's owner.
    """

    def __init__(self, accountant: Accountant, budget: EpsilonLimit | None, allowance: Allowance = _NO_LIMITS) -> None:
        self._accountant, self._loss = accountant, NO_LOSS
        self._next_renyi: FloatArray | None = None
        allowed, own = "what this learner's owner allows", allowance
        time = f"epsilon spent in {DAYS_PER_MONTH} days"
        self._by_owner = (
            SpendingScope("run", own.per_run, NO_LOSS, "epsilon spent in this run", f"{allowed} in one,"),
            SpendingScope("month", own.per_month, own.other_runs_month_loss, time, f"{allowed} in that time,"),
            SpendingScope("all", own.in_all_runs, own.other_runs_loss, "epsilon spent in all runs", f"{allowed},"),
        )
        self._scopes = (SpendingScope("run", budget, NO_LOSS, "spent epsilon", "the budget of"), *self._by_owner)
        self.budget = _choose_stricter(budget, own.per_run)
        """Limit of this run, independent of other runs; None: no limit."""
        self._has_delta = any(each.limit is not None and each.limit.delta for each in self._scopes)
        self.record_counts = array("I")
        """Number of records of each completed round: all that the accountant has received."""

    @property
    def epsilon_spent(self) -> float:
        """Pure epsilon of all messages."""
        return self._loss.pure

    @property
    def scopes(self) -> tuple[SpendingScope, ...]:
        """The run with its stricter limit, the month, and all runs."""
        run, *others = self._by_owner
        return (SpendingScope(run.name, self.budget, run.other_loss, run.subject, run.limit_text), *others)

    def measure(self, scope: SpendingScope) -> float:
        """Return the epsilon spent in a scope, at the delta of its limit; pure without a limit."""
        return _measure(scope, self._loss)

    def admit_round(self, t: int) -> float:
        """Return the pure epsilon spent once the message of round t is sent.

        Raises:
            BudgetExhausted: it would exceed a limit, or cannot be computed.
        """
        loss = self._accountant.next_loss()
        if not loss >= 0.0:  # in this form, as below, not-a-number is refused, too
            raise BudgetExhausted(f"the privacy loss of round {t} must be at least 0, got {loss}: no message is sent")
        total = self._add(self._loss.pure + loss, self._accountant.next_renyi() if self._has_delta else None)
        for scope in self._scopes:
            if scope.limit is not None and scope.limit.epsilon < math.inf:
                self._require_within(scope, scope.limit, total, t)
        return total.pure

    def _add(self, pure: float, renyi: FloatArray | None) -> PrivacyLoss:
        """Return the loss with the next message; Renyi divergences are not followed without a limit at a delta."""
        self._next_renyi = renyi
        return PrivacyLoss(pure, self._loss.renyi if renyi is None else self._loss.renyi + renyi)

    def _require_within(self, scope: SpendingScope, limit: EpsilonLimit, total: PrivacyLoss, t: int) -> None:
        after = _measure(scope, total)
        if not after <= limit.epsilon:
            at_delta = f" (at delta {limit.delta:g})" if limit.delta else ""
            raise BudgetExhausted(
                f"sending round {t} would bring the {scope.subject} from {self.measure(scope):.6g} to "
                f"{format_above(after, limit.epsilon)}{at_delta}, above {scope.limit_text} {limit.epsilon:.6g}"
            )

    def charge(self, total: float) -> None:
        """Charge the admitted message: set the pure epsilon spent to what the log already holds."""
        self._loss = self._add(total, self._next_renyi)

    def advance(self, records: int) -> None:
        """Complete a round with this number of records."""
        self._accountant.advance(records)
        self.record_counts.append(records)


def _measure(scope: SpendingScope, loss: PrivacyLoss) -> float:
    """Return the epsilon of a loss together with that of other runs, at the delta of the scope's limit."""
    if scope.limit is None or not scope.limit.delta:
        return scope.other_loss.pure + loss.pure
    return scope.limit.measure(scope.other_loss + loss)


def _choose_stricter(budget: EpsilonLimit | None, own: EpsilonLimit | None) -> EpsilonLimit | None:
    """Return the smaller of two limits at one delta; at different deltas the budget of the spec, if it has one."""
    if budget is None or own is None:
        return budget or own
    if budget.epsilon == math.inf and own.epsilon < math.inf:
        return own
    return min(budget, own, key=lambda limit: limit.epsilon) if budget.delta == own.delta else budget
