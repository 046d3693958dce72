"""Privacy cost of one learner's messages in a planned run: for one use of a record, a record, or a group, pure or at a delta."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.budget.composition import (
    MessageLosses,
    RecordGroup,
    envelope,
    epsilon_for_delta,
    group_loss,
    group_record_losses,
    message_losses,
    worst_case_record_losses,
)
from sottovoce_core.data import LearnerData
from sottovoce_core.privacy.guarantee import Adjacency
from sottovoce_core.privacy.loss import ORDERS
from sottovoce_core.runs.run import Run

PrivacyUnit = Literal["record_use", "record"]
"""Unit whose loss is bounded: one use of a record, or a record in all of its uses."""


class LearnerCost:
    """Privacy cost of one learner's messages.

    Args:
        run: run with a planned end.
        learner: index of the learner.
        own: its records; only their numbers by round, and how often each is used, matter.
        rounds: number of first rounds to account (default: all).

    Attributes:
        guarantee: guarantee of one record use over these rounds.
        has_shared_records: all learners hold the same records, so that their losses add up.

    Raises:
        SpecError: the run has no planned end.
    """

    def __init__(self, run: Run, learner: int, own: LearnerData, rounds: int | None = None) -> None:
        self._run, self._learner, self._own = run, learner, own
        self.has_shared_records = run.has_shared_records
        self._counts = np.diff(own.offsets)
        end = run.participation(learner).end
        self._end = end if rounds is None else min(end, rounds)
        self.guarantee = run.guarantee(learner, self._counts).truncate(self._end)

    @cached_property
    def records(self) -> list[RecordGroup]:
        """The learner's records, grouped by their uses."""
        return group_record_losses(self._run.algorithm.accountant(self._learner), self._own, self._end)

    @cached_property
    def _single_use(self) -> FloatArray | None:
        return message_losses(self._run.algorithm.accountant(self._learner), self._counts, self._end)

    def losses(self, unit: PrivacyUnit) -> FloatArray:
        """Return the pure losses `(rounds,)` of the messages, for the worst-case unit."""
        if unit == "record_use":
            return self.guarantee.round_losses
        return worst_case_record_losses(self.records, self.guarantee.round_losses)

    def message_losses(self, unit: PrivacyUnit) -> MessageLosses:
        """Return the losses of the messages, pure and as Renyi divergences, which hold for every single unit."""
        mechanism, single = self.guarantee.mechanism, self._single_use
        renyi = self._single_use_renyi if unit == "record_use" else self._record_renyi
        if single is None:  # a message with the total loss dominates all its parts
            return MessageLosses(mechanism, np.array([math.fsum(self.losses(unit))]), renyi)
        if unit == "record":
            composable = [each.composable_losses(single) for each in self.records]
            single = envelope(composable) if composable else np.zeros_like(single)
        return MessageLosses(mechanism, single, renyi)

    @cached_property
    def _single_use_renyi(self) -> FloatArray:
        return self._run.algorithm.accountant(self._learner).total_renyi(self._counts[: self._end])

    @cached_property
    def _record_renyi(self) -> FloatArray:
        """Largest sum `(orders,)` of the Renyi divergences of a record in all of its uses."""
        return as_floats(np.max([np.zeros(len(ORDERS)), *map(self._sum_renyi, self.records)], axis=0))

    def _sum_renyi(self, group: RecordGroup) -> FloatArray:
        mechanism, losses = self.guarantee.mechanism, self.guarantee.round_losses
        if group.losses is not None:
            return mechanism.sum_renyi(group.losses)
        if group.n_uses == 1:
            return self._single_use_renyi
        if mechanism.n_coordinates and self._single_use is not None:
            # Convex in the loss: the sum is largest if all uses cost most in the same messages.
            return mechanism.sum_renyi(group.n_uses * self._single_use)
        return mechanism.sum_renyi(np.array([group.n_uses * math.fsum(losses)]))

    def epsilon(self, unit: PrivacyUnit = "record_use", delta: float = 0.0, *, has_distributions: bool = True) -> float:
        """Return epsilon of the worst-case unit, pure or at a delta; 0 for records if there are none.

        Args:
            unit: the unit.
            delta: delta; 0: pure epsilon.
            has_distributions: whether privacy loss distributions are composed, too; without them epsilon may be larger.

        Raises:
            SpecError: delta is not at least 0 and below 1, or dp-accounting is missing.
        """
        return compose_costs([self], unit, delta, has_distributions=has_distributions)

    def group_epsilon(self, size: int, *, all_uses: bool) -> float:
        """Return the pure epsilon of the `size` most expensive records together, each used once or with all of its uses."""
        if self.guarantee.adjacency is Adjacency.LEARNER:
            size = 1
        records = self.records if all_uses else [RecordGroup(size, 1, None)]
        return group_loss(records or [RecordGroup(size, 1, None)], self.guarantee.round_losses, size)


def combine_costs(
    costs: Sequence[LearnerCost],
    unit: PrivacyUnit = "record_use",
    delta: float = 0.0,
    *,
    has_distributions: bool = True,
) -> float:
    """Return epsilon of one unit against an adversary that observes all learners; arguments as of `LearnerCost.epsilon`.

    It is the largest of the learners; if they share their records, all of their messages depend on a unit.

    Raises:
        SpecError: as of `LearnerCost.epsilon`.
    """
    if not costs[0].has_shared_records:
        return max(each.epsilon(unit, delta, has_distributions=has_distributions) for each in costs)
    return compose_costs(costs, unit, delta, has_distributions=has_distributions)


def compose_costs(
    costs: Sequence[LearnerCost],
    unit: PrivacyUnit = "record_use",
    delta: float = 0.0,
    *,
    has_distributions: bool = True,
) -> float:
    """Return epsilon of one unit on which the messages of all these learners depend; arguments as of `LearnerCost.epsilon`.

    Raises:
        SpecError: as of `LearnerCost.epsilon`.
    """
    pure = math.fsum(math.fsum(each.losses(unit)) for each in costs)
    if not delta:
        return pure
    messages = [each.message_losses(unit) for each in costs]
    return min(pure, epsilon_for_delta(delta, messages, has_distributions=has_distributions))
