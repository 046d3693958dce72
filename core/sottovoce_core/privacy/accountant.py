"""The meter of one learner's messages, and the one function that makes a guarantee of it.

A learner asks its meter what the next message costs, journals and charges that, and refuses to speak above its budget. A
guarantee is the same meter run over the planned rounds, so what is promised is what is charged.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod

import numpy as np

from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, FloatArray, IntArray, as_floats
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.guarantee import Adjacency, Guarantee, GuaranteeBasis, Mechanism


class Accountant(ABC):
    """Meters one learner's messages: what the next one costs, then that the round is over.

    A fresh one stands before round 0. It follows the *dearest* event, whichever that turns out to be: what it has charged
    after any round is at least what any single event has cost by then. Told in every round how many of its records differ,
    it follows that one change instead. Every default below is the careful one: more is charged, never less.

    Attributes:
        mechanism: what dominates a message.
        event: what two adjacent worlds differ in.
        shared: an event is every learner's: all hold the same records.
        follows: `advance` takes `replaced` into account. If not, k events are charged k times the dearest (group privacy).
        dominates: the losses of the dearest event are, sorted by size, at least those of any other event, place by place. Where
            they are increments of a maximum over records, they are not: a message may tell more than its increment.
        grounds: what the numbers rest on.
        published: a meter of published decisions, where those are promised something of their own; else None.
        is_valid_for_any_messages: the losses hold whatever the learner hears: messages of earlier rounds in place of those of this one, too.
        pauses: they hold where nothing is said in some rounds between others, and what was learned before is said after them:
            where a message may hide what it shows from later ones, they do not.
    """

    mechanism: Mechanism = Mechanism.PURE
    adjacency: Adjacency = Adjacency.RECORD_USE
    has_shared_records: bool = False
    can_track_replacements: bool = False
    has_dominating_losses: bool = False
    basis: GuaranteeBasis = GuaranteeBasis()
    output_accountant: Accountant | None = None
    is_valid_for_any_messages: bool = False
    can_pause: bool = False

    @abstractmethod
    def next_loss(self) -> float:
        """Privacy loss of the message of the current round, in the mechanism's currency: pure epsilon."""

    @abstractmethod
    def advance(self, records: int, n_replaced: int | None = None) -> None:
        """The round is over and brought `records` records.

        Args:
            records: how many.
            replaced: of them, how many differ between the two worlds; None: follow the dearest event. A meter is told in every
                round or in none.

        Raises:
            SpecError: not `0 <= replaced <= records`.
        """

    def paper_epsilon(self, rounds: int) -> FloatArray:
        """`(rounds,)` cumulative epsilon by the paper's own formula, of one record a round (default: the meter's own sum)."""
        return np.cumsum(self.losses(np.ones(rounds, np.int64)))

    def infinite_horizon_epsilon(self, counts: IntArray, n_replaced: IntArray | None) -> float:
        """A bound on the sum of all losses, however long the run goes on as `counts` and `replaced (rounds,)` say."""
        return math.inf

    def charge_rounds(self, counts: IntArray, n_replaced: IntArray | None) -> FloatArray:
        """`(rounds,)` losses of these rounds; it stands behind them afterwards."""
        told = [None] * len(counts) if n_replaced is None else n_replaced.tolist()
        losses = np.empty(len(counts))
        for t, (records, changed) in enumerate(zip(counts.tolist(), told, strict=True)):
            losses[t] = self.next_loss()
            self.advance(records, changed)
        return losses

    def losses(self, counts: IntArray) -> FloatArray:
        """`(rounds,)` what is charged for the messages, from here on, if rounds bring `counts (rounds,)` records."""
        return copy.deepcopy(self).charge_rounds(counts, None)

    def losses_by_change(self, counts: IntArray, changes: IntArray) -> FloatArray:
        """`(changes, rounds)` losses for each of many changes, which replace `changes (changes, rounds)` of the records."""
        if not self.can_track_replacements:
            many = [_events(self.adjacency, change) for change in changes]
            dearest = self.losses(counts)
            # Nothing replaced costs nothing, where 0 times infinity would be no number.
            return np.array([k * dearest if k else 0.0 * counts for k in many]).reshape(changes.shape)
        each = [copy.deepcopy(self).charge_rounds(counts, change) for change in changes]
        return np.array(each).reshape(changes.shape)


def _events(event: Adjacency, replaced: IntArray) -> int:
    """How many events a change makes that replaces `replaced (rounds,)` records."""
    if event is Adjacency.RECORD_USE:
        return int(replaced.sum())
    differ = int(np.count_nonzero(replaced))
    return differ if event is Adjacency.ROUND else min(differ, 1)


class FirstRecordAccountant(Accountant):
    """A meter whose dearest event is one of the first round that brings records: no later one costs more in any message."""

    can_track_replacements = True
    has_dominating_losses = True
    _seen = 0

    def count_replaced(self, records: int, n_replaced: int | None) -> int:
        """How many of the round's records differ: as told, or else one of the first that come.

        Raises:
            SpecError: not `0 <= replaced <= records`.
        """
        if n_replaced is None:
            n_replaced = 1 if records and not self._seen else 0
        require_replaced_count(records, n_replaced)
        self._seen += records
        return n_replaced


class PrecomputedAccountant(Accountant):
    """Losses that depend on nothing that comes, read off a list.

    Args:
        per_round: `(rounds,)`. They must hold for every single event: sorted by size, none may cost more at any place, and by
            no round may one have cost more than is listed until then.
        mechanism: what dominates a message.
        event: what is replaced.
        grounds: what the list rests on.
    """

    has_dominating_losses = True

    def __init__(
        self,
        round_losses: FloatArray,
        mechanism: Mechanism = Mechanism.PURE,
        adjacency: Adjacency = Adjacency.RECORD_USE,
        basis: GuaranteeBasis = Accountant.basis,
    ) -> None:
        self.round_losses, self.mechanism, self.adjacency, self.basis = round_losses, mechanism, adjacency, basis
        self.t = 0

    def next_loss(self) -> float:
        return float(self.round_losses[self.t])

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        self.t += 1


def require_replaced_count(records: int, n_replaced: int) -> None:
    """Raises `SpecError` unless `0 <= replaced <= records`."""
    if not 0 <= n_replaced <= records:
        raise SpecError(f"replaced must lie in [0, records={records}], got {n_replaced}")


def compute_guarantee(
    accountant: Accountant, rounds: int, counts: IntArray | None = None, n_replaced: IntArray | None = None
) -> Guarantee:
    """The promise of a meter: what it charges over the planned rounds, and what it says about itself.

    Args:
        accountant: a fresh one; it is left as it is.
        rounds: planned.
        counts: `(rounds,)` records of each round (default: one each).
        replaced: `(rounds,)` of them that differ between the two worlds (default: the dearest event).

    Raises:
        SpecError: too many rounds, numbers of another shape, below 0 or not whole, or more replaced than there are.
    """
    if rounds > MAX_ARRAY_ELEMENTS:
        raise SpecError(
            f"a guarantee is computed round by round, for at most {MAX_ARRAY_ELEMENTS} rounds, got {rounds}"
        )
    counts = np.ones(rounds, np.int64) if counts is None else _planned("counts", counts, rounds)
    if n_replaced is not None:
        n_replaced = _planned("replaced", n_replaced, rounds)
        if (n_replaced > counts).any():
            raise SpecError("replaced must be at most counts in every round, got more records replaced than there are")
    published = accountant.output_accountant
    return Guarantee(
        mechanism=accountant.mechanism,
        adjacency=accountant.adjacency,
        has_shared_records=accountant.has_shared_records,
        n_replaced=None if n_replaced is None else _many(accountant.adjacency, n_replaced),
        round_losses=_run(accountant, counts, n_replaced),
        paper_epsilon=accountant.paper_epsilon(rounds),
        infinite_horizon_epsilon=accountant.infinite_horizon_epsilon(counts, n_replaced),
        basis=accountant.basis,
        output_epsilon=None if published is None else as_floats(np.cumsum(_run(published, counts, n_replaced))),
    )


def _run(accountant: Accountant, counts: IntArray, replaced: IntArray | None) -> FloatArray:
    if replaced is None:
        return accountant.losses(counts)
    return as_floats(accountant.losses_by_change(counts, replaced[None])[0])


def _many(event: Adjacency, replaced: IntArray) -> int:
    return int(np.count_nonzero(replaced) if event is Adjacency.ROUND else replaced.sum())


def _planned(name: str, numbers: IntArray, rounds: int) -> IntArray:
    plan = np.asarray(numbers)
    if plan.shape != (rounds,) or not (plan >= 0).all() or (plan != np.floor(plan)).any():
        raise SpecError(f"{name} must be {rounds} whole numbers of at least 0, got {numbers}")
    return plan.astype(np.int64)
