"""Accountant of one learner's messages, and the function that computes a guarantee from it.

A learner asks its accountant for the cost of the next message, logs and charges it, and sends nothing above its budget. A
guarantee is the same accountant run over the planned rounds, so the guarantee equals the charge.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod

import numpy as np

from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, FloatArray, IntArray, as_floats
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.guarantee import Adjacency, Guarantee, GuaranteeBasis
from sottovoce_core.privacy.loss import ORDERS, PURE, EpsilonLimit, Mechanism

MAX_FOLLOWED_UNITS = 16
"""Maximum number of units whose Renyi divergences an accountant follows: more change no digit on the built-in algorithms."""


class Accountant(ABC):
    """Privacy accountant of one learner: the loss of the next message, then an update at the end of the round.

    A new accountant is at the start of round 0. It follows the worst-case privacy unit: its total charge after any round is at
    least the cost of every single unit up to then. If `advance` receives the number of replaced records in every round, it
    follows that one change instead. Every default below is conservative: it charges more, never less.

    Attributes:
        mechanism: noise mechanism of a message: it says what its pure loss means at a delta.
        adjacency: privacy unit in which two adjacent worlds differ.
        has_shared_records: all learners hold the same records, so a unit belongs to all of them.
        can_track_replacements: `advance` uses `n_replaced`. If not, k units are charged k times the worst case (group privacy).
        has_dominating_losses: the worst-case losses, sorted by size, are entry by entry at least those of any other unit. Not so
            where they are increments of a maximum over records: a message may reveal more than its increment.
        basis: assumptions and proof of the numbers.
        output_accountant: accountant of published decisions, if those have a guarantee of their own; else None.
        is_valid_for_any_messages: the losses hold for any received messages, including messages of earlier rounds in place of
            those of this round.
        can_pause: the losses hold if the learner sends nothing in some rounds and sends afterwards what it learned before. They
            do not where a message may hide its information from later messages.
    """

    mechanism: Mechanism = PURE
    adjacency: Adjacency = Adjacency.RECORD_USE
    has_shared_records: bool = False
    can_track_replacements: bool = False
    has_dominating_losses: bool = False
    basis: GuaranteeBasis = GuaranteeBasis()
    output_accountant: Accountant | None = None
    is_valid_for_any_messages: bool = False
    can_pause: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.adjacency.value}, {self.mechanism}"

    @abstractmethod
    def next_loss(self) -> float:
        """Return the privacy loss of the message of the current round, in pure epsilon."""

    def next_renyi(self) -> FloatArray:
        """Return the Renyi divergences `(orders,)` of the message of the current round, at `privacy.loss.ORDERS`.

        Call it in every round from the first on, or never. Like the losses, their sum after any round is at least the cost of
        every single unit up to then. The default takes the pure loss if that may be an increment of a maximum over records.
        """
        loss = self.next_loss()
        if self.has_dominating_losses:
            return as_floats(self.mechanism.compute_renyi(np.array([loss]))[0])
        return as_floats(np.full(len(ORDERS), loss))

    @abstractmethod
    def advance(self, records: int, n_replaced: int | None = None) -> None:
        """End the round.

        Args:
            records: number of records of the round.
            n_replaced: number of them that differ between the two worlds, given in every round or in none; None: follow the
                worst-case unit.

        Raises:
            SpecError: not `0 <= n_replaced <= records`.
        """

    def paper_epsilon(self, rounds: int) -> FloatArray:
        """Return the cumulative epsilon `(rounds,)` of the paper's formula for one record a round (default: the own sum)."""
        return np.cumsum(self.losses(np.ones(rounds, np.int64)))

    def infinite_horizon_epsilon(self, counts: IntArray, n_replaced: IntArray | None) -> float:
        """Bound the sum of all losses of a run that goes on for ever like `counts` and `n_replaced`, both `(rounds,)`."""
        return math.inf

    def charge_rounds(self, counts: IntArray, n_replaced: IntArray | None) -> FloatArray:
        """Advance over these rounds and return their losses `(rounds,)`."""
        replaced = [None] * len(counts) if n_replaced is None else n_replaced.tolist()
        losses = np.empty(len(counts))
        for t, (records, changed) in enumerate(zip(counts.tolist(), replaced, strict=True)):
            losses[t] = self.next_loss()
            self.advance(records, changed)
        return losses

    def total_renyi(self, counts: IntArray) -> FloatArray:
        """Return the sum `(orders,)` of the Renyi divergences from here on if the rounds have `counts (rounds,)` records."""
        if self.has_dominating_losses:
            return self.mechanism.sum_renyi(self.losses(counts))
        advanced, total = copy.deepcopy(self), np.zeros(len(ORDERS))
        for records in counts.tolist():
            total += advanced.next_renyi()
            advanced.advance(records)
        return total

    def spending(self, counts: IntArray, limit: EpsilonLimit) -> FloatArray:
        """Return the epsilon `(rounds,)` that counts against a limit after every message; arguments as of `losses`."""
        losses = self.losses(counts)
        if not limit.delta:
            return limit.measure_rounds(losses, None)
        if self.has_dominating_losses:
            order = slice(limit.order, limit.order + 1)
            return limit.measure_rounds(losses, self.mechanism.compute_renyi(losses, order)[:, 0])
        advanced, renyi = copy.deepcopy(self), np.empty(len(counts))
        for t, records in enumerate(counts.tolist()):
            renyi[t] = advanced.next_renyi()[limit.order]
            advanced.advance(records)
        return limit.measure_rounds(losses, renyi)

    def losses(self, counts: IntArray) -> FloatArray:
        """Return the `(rounds,)` losses charged from here on if the rounds have `counts (rounds,)` records."""
        return copy.deepcopy(self).charge_rounds(counts, None)

    def losses_by_change(self, counts: IntArray, changes: IntArray) -> FloatArray:
        """Return the losses `(changes, rounds)` of each change; `changes (changes, rounds)` counts the replaced records."""
        if not self.can_track_replacements:
            units = [_count_changed_units(self.adjacency, change) for change in changes]
            worst = self.losses(counts)
            # No replacement costs 0, but 0 times an infinite loss would be NaN.
            return np.array([k * worst if k else 0.0 * counts for k in units]).reshape(changes.shape)
        each = [copy.deepcopy(self).charge_rounds(counts, change) for change in changes]
        return np.array(each).reshape(changes.shape)


def _count_changed_units(adjacency: Adjacency, replaced: IntArray) -> int:
    """Count the privacy units that a change of `replaced (rounds,)` records touches."""
    if adjacency is Adjacency.RECORD_USE:
        return int(replaced.sum())
    rounds = int(np.count_nonzero(replaced))
    return rounds if adjacency is Adjacency.ROUND else min(rounds, 1)


class FirstRecordAccountant(Accountant):
    """Accountant whose worst-case record is one of the first round with records: no later one costs more in any message."""

    can_track_replacements = True
    has_dominating_losses = True
    _seen = 0

    def count_replaced(self, records: int, n_replaced: int | None) -> int:
        """Return the number of replaced records of the round: `n_replaced`, or by default one record of the first with any.

        Raises:
            SpecError: not `0 <= n_replaced <= records`.
        """
        if n_replaced is None:
            n_replaced = 1 if records and not self._seen else 0
        require_replaced_count(records, n_replaced)
        self._seen += records
        return n_replaced


class RenyiFrontier:
    """Units that may cost most at some Renyi order: the difference that each leaves in the next message, and its total cost.

    A unit with a smaller difference and a smaller total at every order than another one never becomes the worst, because the cost
    of a message and the next difference are nondecreasing in the difference. Above `MAX_FOLLOWED_UNITS` units, the two with the
    smallest differences are followed as one with the larger of each number: an upper bound.

    Attributes:
        distances: `(units,)` differences, from the largest to the smallest.
    """

    def __init__(self) -> None:
        self.distances = np.zeros(1)  # of no unit yet
        self._totals = np.zeros((1, len(ORDERS)))
        self._costs = self._totals

    @classmethod
    def start(cls, t: int) -> RenyiFrontier:
        """Return the frontier before round 0.

        Raises:
            SpecError: t is another round: earlier messages would not be counted.
        """
        if t:
            raise SpecError(f"Renyi divergences must be requested from round 0 on, got round {t} first")
        return cls()

    def price(self, costs: FloatArray) -> FloatArray:
        """Return the rise `(orders,)` of the largest total if the message costs the units `costs (units, orders)`."""
        self._costs = costs
        before = self._totals.max(axis=0)
        with np.errstate(invalid="ignore"):  # infinite totals
            rise = (self._totals + costs).max(axis=0) - before
        return as_floats(np.where(np.isinf(before), np.inf, rise))

    def advance(self, distances: FloatArray, newest: float | None) -> None:
        """Charge the priced message, and set the differences `(units,)` after the round; a new unit may begin with `newest`."""
        totals = self._totals + self._costs
        if newest is not None:
            distances, totals = np.append(distances, newest), np.vstack([totals, np.zeros(len(ORDERS))])
        order = np.argsort(-distances, kind="stable")
        distances, totals = distances[order], totals[order]
        largest = np.maximum.accumulate(totals)
        keep = np.append(True, (totals[1:] > largest[:-1]).any(axis=1))
        distances, totals = distances[keep], totals[keep]
        if len(distances) > MAX_FOLLOWED_UNITS:
            totals = np.vstack([totals[:-2], np.maximum(totals[-2], totals[-1])])
            distances = distances[:-1]
        self.distances, self._totals = distances, totals


class PrecomputedAccountant(Accountant):
    """Accountant with a fixed list of losses, independent of the records.

    Args:
        round_losses: `(rounds,)`. They must hold for every single privacy unit: sorted by size, no unit may cost more in any
            entry, and up to no round may a unit have cost more than the sum of the list.
        mechanism: noise mechanism of a message: it says what its pure loss means at a delta.
        adjacency: privacy unit.
        basis: assumptions and proof of the list.
    """

    has_dominating_losses = True

    def __init__(
        self,
        round_losses: FloatArray,
        mechanism: Mechanism = PURE,
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
    """Raise `SpecError` unless `0 <= n_replaced <= records`."""
    if not 0 <= n_replaced <= records:
        raise SpecError(f"n_replaced must lie in [0, records={records}], got {n_replaced}")


def compute_guarantee(
    accountant: Accountant, rounds: int, counts: IntArray | None = None, n_replaced: IntArray | None = None
) -> Guarantee:
    """Compute the guarantee of an accountant over the planned rounds.

    Args:
        accountant: a new accountant; it is not changed.
        rounds: planned rounds.
        counts: `(rounds,)` records of each round (default: one each).
        n_replaced: `(rounds,)` records that differ between the two worlds (default: the worst-case unit).

    Raises:
        SpecError: too many rounds; numbers of another shape, negative or not whole; or more replaced records than records.
    """
    if rounds > MAX_ARRAY_ELEMENTS:
        raise SpecError(
            f"a guarantee is computed round by round, for at most {MAX_ARRAY_ELEMENTS} rounds, got {rounds}"
        )
    counts = np.ones(rounds, np.int64) if counts is None else _require_counts("counts", counts, rounds)
    if n_replaced is not None:
        n_replaced = _require_counts("n_replaced", n_replaced, rounds)
        if (n_replaced > counts).any():
            raise SpecError("n_replaced must be at most counts in every round, got more replaced records than records")
    output = accountant.output_accountant
    return Guarantee(
        mechanism=accountant.mechanism,
        adjacency=accountant.adjacency,
        has_shared_records=accountant.has_shared_records,
        n_replaced=None if n_replaced is None else _count_replaced(accountant.adjacency, n_replaced),
        round_losses=_losses(accountant, counts, n_replaced),
        paper_epsilon=accountant.paper_epsilon(rounds),
        infinite_horizon_epsilon=accountant.infinite_horizon_epsilon(counts, n_replaced),
        basis=accountant.basis,
        output_epsilon=None if output is None else as_floats(np.cumsum(_losses(output, counts, n_replaced))),
    )


def _losses(accountant: Accountant, counts: IntArray, replaced: IntArray | None) -> FloatArray:
    if replaced is None:
        return accountant.losses(counts)
    return as_floats(accountant.losses_by_change(counts, replaced[None])[0])


def _count_replaced(adjacency: Adjacency, replaced: IntArray) -> int:
    return int(np.count_nonzero(replaced) if adjacency is Adjacency.ROUND else replaced.sum())


def _require_counts(name: str, numbers: IntArray, rounds: int) -> IntArray:
    plan = np.asarray(numbers)
    if plan.shape != (rounds,) or not (plan >= 0).all() or (plan != np.floor(plan)).any():
        raise SpecError(f"{name} must be {rounds} whole numbers of at least 0, got {numbers}")
    return plan.astype(np.int64)
