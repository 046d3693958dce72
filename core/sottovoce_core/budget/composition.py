"""The cost of a whole run: records used again, groups, several learners, approximate DP, and rounding to the lattice.

**Sums.** A learner's messages, given everything said before, have a law of their own; so the likelihood ratio of a whole
transcript is a product over rounds and learners, and pure losses add up. Replacing k records one after the other passes
through k - 1 data sets in between: a group of k costs at most the sum of what its records cost alone.

**At a delta.** `(epsilon, delta)` by privacy loss distributions, composed by Google's dp-accounting. Per message one takes
a pair of laws that dominates every pair of worlds, whatever was said before; such pairs compose under adaptive composition
(Zhu, Dong & Wang, AISTATS 2022, Theorem 10).

- `laplace`: a vector with independent Laplace noise of scale b on its coordinates, moved by at most s in l1, is dominated
  by one coordinate moved by s. Move one coordinate at a time, by `s_1 + … + s_n = s`. Tests of one such move are those of one
  Laplace number moved by s_k; that law is log-concave, so thresholds are best, and the trade-off curve is
  `f_k(a) = F(F^-1(1-a) - s_k)`. Curves of successive moves chain to `f_2(1 - f_1(a))` at worst (group privacy: Dong, Roth & Su
  2022), which is exactly the curve of one move by `s_1 + s_2`. With the loss `eps = s/b` this is a Laplace mechanism of scale
  `1/eps` and sensitivity 1. On a lattice of spacing `g <= 2^-40 b` the privacy curve meets the continuous one wherever the
  loss is an atom, and is a chord in between: `eps + 2g/b` dominates.
- `pure`: any other message of loss eps is dominated by randomised response (Kairouz, Oh & Viswanath 2015).

For that, a message's loss must bound what that very message tells about the record. A meter that charges increments of a
running maximum over records promises less (`Accountant.dominates` is false): `message_losses` then looks at every record.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.arrays import FloatArray, IntArray, as_floats
from sottovoce_core.data import LearnerData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.optional import import_optional
from sottovoce_core.privacy.accountant import Accountant
from sottovoce_core.privacy.guarantee import Adjacency, Mechanism
from sottovoce_core.runs.run import Run

# ---- composition -----------------------------------------------------------------------------------------------------

MAX_ACCOUNTED_ROUNDS = 2_000_000
"""Rounds that are metered one by one for the sake of single records; beyond, cheaper upper bounds are used."""
_INTERVAL, _MAX_PLD_POINTS = 1e-4, 50_000
"""Spacing of a discretised privacy loss, and how many points it may take: above a total loss of 5 it is wider.

The discretisation is pessimistic, and its error falls with the square of the spacing: below 1e-4 at a total of 50.
"""
_TRUNCATED_TAIL_MASS = 1e-15
"""Tail mass that a convolution may move to an infinite loss, which is pessimistic."""


# ---- records, groups, learners ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RecordGroup:
    """Records that are used alike.

    Attributes:
        records: how many.
        uses: of each of them.
        losses: `(rounds,)` what one of them costs in all of its uses, message by message; None: at most `uses` events.
    """

    n_records: int
    n_uses: int
    losses: FloatArray | None

    def charged_losses(self, event_losses: FloatArray) -> FloatArray:
        """`losses`, or the bound on them, given what an event costs."""
        return as_floats(event_losses * self.n_uses) if self.losses is None else self.losses

    def composable_losses(self, event_losses: FloatArray) -> FloatArray:
        """Losses that composition may rest on, given those of any single event `(rounds,)`.

        n times the losses of one event do not dominate n events place by place: they may meet in other messages (3, 1 and
        1, 3 are 4, 4, which at some deltas tells more than 6, 2). One message with the whole loss dominates all its parts.
        """
        if self.losses is not None:
            return self.losses
        if self.n_uses == 1:
            return event_losses
        whole = np.zeros_like(event_losses)
        whole[0] = self.n_uses * math.fsum(event_losses)
        return whole

    def truncate(self, rounds: int) -> RecordGroup:
        """The same for the first messages."""
        return self if self.losses is None else replace(self, losses=self.losses[:rounds])


def _plans_of_use(own: LearnerData) -> Counter[tuple[int, ...]]:
    """In which rounds records are used, one entry for each use, and how many records share such a plan."""
    rounds = np.repeat(np.arange(own.rounds), np.diff(own.offsets))
    by_record = np.argsort(own.order, kind="stable")
    _, first = np.unique(own.order[by_record], return_index=True)
    return Counter(tuple(uses.tolist()) for uses in np.split(rounds[by_record], first[1:]) if len(uses))


def group_record_losses(accountant: Accountant, own: LearnerData, end: int | None = None) -> list[RecordGroup]:
    """What every record of a learner costs in all of its uses, by a fresh meter of its messages.

    It says nothing from round `end` on (default: it speaks to the last round).

    A record used once costs at most what an event does. One used n times is metered with all of its uses replaced; where
    that would take more than `MOST_STEPS` rounds in all, or the meter cannot follow it, n events are an upper bound. An
    event that replaces all of the learner's records includes all uses.
    """
    plans = _plans_of_use(own)
    if accountant.adjacency == Adjacency.LEARNER:
        return [RecordGroup(sum(plans.values()), 1, None)]
    exact = (
        accountant.can_track_replacements and sum(len(plan) > 1 for plan in plans) * own.rounds <= MAX_ACCOUNTED_ROUNDS
    )
    metered: list[tuple[int, tuple[int, ...]]] = []
    bounded = Counter[int]()
    for plan, records in plans.items():
        if len(plan) > 1 and exact:
            metered.append((records, plan))
        else:
            bounded[len(plan)] += records
    replaced = np.array([np.bincount(plan, minlength=own.rounds) for _, plan in metered]).reshape(-1, own.rounds)
    losses = _until(end, accountant.losses_by_change(np.diff(own.offsets), replaced))
    found = [RecordGroup(records, len(plan), each) for (records, plan), each in zip(metered, losses, strict=True)]
    return found + [RecordGroup(records, uses, None) for uses, records in bounded.items()]


def worst_case_record_epsilon(groups: Iterable[RecordGroup], event_losses: FloatArray) -> float:
    """What the record that costs most costs in all of its uses, given what an event costs `(rounds,)`."""
    return math.fsum(worst_case_record_losses(groups, event_losses))


def worst_case_record_losses(groups: Iterable[RecordGroup], event_losses: FloatArray) -> FloatArray:
    """The same message by message, `(rounds,)`; zeros without records."""
    charged = [each.charged_losses(event_losses) for each in groups]
    return max(charged, key=lambda losses: math.fsum(losses), default=np.zeros_like(event_losses))


def group_loss(groups: Iterable[RecordGroup], event_losses: FloatArray, size: int) -> float:
    """What the dearest `size` of one learner's records cost together, in all of their uses: the sum of their own losses.

    For records that are used once, `[Alike(size, 1, None)]` will do. Of fewer records than that, all are meant.
    """
    dearest: list[float] = []
    for epsilon, many in sorted(
        ((math.fsum(each.charged_losses(event_losses)), each.n_records) for each in groups), reverse=True
    ):
        dearest += [epsilon] * min(many, size - len(dearest))
    return math.fsum(dearest)


# ---- approximate DP ----------------------------------------------------------------------------------------------------


def message_losses(accountant: Accountant, counts: IntArray, end: int | None = None) -> FloatArray | None:
    """Losses that dominate those of every single record, message by message after sorting: what composition may rest on.

    Where the meter charges increments of a maximum over records, every round's record is metered alone: the k-th entry is
    the largest k-th largest loss of all of them. Order does not matter to a composition, and more loss never makes it
    smaller.

    Args:
        accountant: a fresh meter.
        counts: `(rounds,)` records of each round.
        end: the learner says nothing from this round on (default: it speaks to the last round).

    Returns:
        `(rounds,)`, or None where the sum of the losses is all there is: that would take more than `MOST_STEPS` rounds, or the
        meter does not follow single records.
    """
    charged = _until(end, accountant.losses(counts))
    if accountant.has_dominating_losses:
        return charged
    rounds, coming = len(counts), np.flatnonzero(counts)
    if (
        not accountant.can_track_replacements
        or not np.isfinite(charged).all()
        or len(coming) * rounds > MAX_ACCOUNTED_ROUNDS
    ):
        return None
    return envelope(_until(end, accountant.losses_by_change(counts, np.eye(rounds, dtype=np.int64)[coming])))


def _until(end: int | None, losses: FloatArray) -> FloatArray:
    """Losses `(..., rounds)` of who says nothing from round `end` on."""
    return losses if end is None else as_floats(np.where(np.arange(losses.shape[-1]) < end, losses, 0.0))


def envelope(losses: Sequence[FloatArray] | FloatArray) -> FloatArray:
    """`(rounds,)`: each sorted from the largest loss to the smallest, and the largest at every place."""
    return as_floats(np.sort(losses, axis=-1)[:, ::-1].max(axis=0))


def epsilon_for_delta(delta: float, losses: FloatArray, mechanism: Mechanism) -> float:
    """Epsilon at which the composed messages are `(epsilon, delta)`-DP; never above the sum of their losses.

    Args:
        delta: above 0 and below 1.
        losses: `(rounds,)` pure losses of the messages, each valid whatever was said before.
        mechanism: what dominates a message; see the module's head.

    Raises:
        SpecError: delta is out of range, or dp-accounting is missing.
    """
    if not 0.0 < delta < 1.0:
        raise SpecError(f"delta must be above 0 and below 1, got {delta}; at delta 0 the pure epsilon is the answer")
    charged = losses[losses > 0]
    pure = math.fsum(losses)
    if not len(charged) or not math.isfinite(pure):
        return pure
    composed = _composed(charged, mechanism, max(_INTERVAL, pure / _MAX_PLD_POINTS))
    return min(pure, float(composed.get_epsilon_for_delta(delta)))


def _composed(losses: FloatArray, mechanism: Mechanism, interval: float) -> Any:
    """The privacy loss distribution of all messages: equal ones at once, then always the two smallest."""
    library = _library("privacy_loss_distribution")
    parameters = _library("common").DifferentialPrivacyParameters
    heap: list[tuple[float, int, Any]] = []
    for k, (loss, times) in enumerate(zip(*np.unique(losses, return_counts=True), strict=True)):
        if mechanism == Mechanism.LAPLACE:
            scale = 1.0 / (loss + 2.0 ** (1 - LATTICE_BITS))
            one = library.from_laplace_mechanism(scale, value_discretization_interval=interval)
        else:
            one = library.from_privacy_parameters(parameters(loss, 0.0), value_discretization_interval=interval)
        several = one if times == 1 else one.self_compose(int(times), tail_mass_truncation=_TRUNCATED_TAIL_MASS)
        heap.append((float(loss * times), k, several))
    heapq.heapify(heap)
    while len(heap) > 1:
        small, _, one = heapq.heappop(heap)
        large, k, other = heapq.heappop(heap)
        heapq.heappush(heap, (small + large, k, one.compose(other, tail_mass_truncation=_TRUNCATED_TAIL_MASS)))
    return heap[0][2]


def _library(module: str) -> Any:
    return import_optional(f"dp_accounting.pld.{module}", "dp-accounting", "epsilon at a delta", "accounting")


# ---- lattice slack ---------------------------------------------------------------------------------------------------

MAX_LATTICE_SHARE = 1e-3
"""Of epsilon: what rounding may cost without a word."""

_MAX_EXAMINED_ROUNDS = 20_000
"""Rounds; longer runs are judged by the first so many."""
_INITIAL_ROUNDS = 100
"""Rounds that are examined first: where their loss is large enough, no later round can make the share of the slack large."""
_MIN_EPSILON = 0.01
"""An epsilon below which nobody goes: a run that is fine with it is not looked at any closer."""


def check_lattice(run: Run) -> tuple[RunWarning, ...]:
    """LATTICE_SLACK, about the learner with the largest share.

    A message of n numbers costs at most `n 2^-40` for rounding. So a run of T messages stays below the share as long as
    `n T <= 1.1e9 epsilon`.
    """
    message = sum(math.prod(shape) for shape in run.algorithm.field_shapes().values()) * 2.0**-LATTICE_BITS
    if run.spec.rounds * message <= MAX_LATTICE_SHARE * _MIN_EPSILON:
        return ()
    shares = [_share(run, learner, message) for learner in range(run.spec.n_learners)]
    share, learner, slack, epsilon = max(shares, key=lambda each: each[0])
    if share <= MAX_LATTICE_SHARE:
        return ()
    return (
        RunWarning(
            "LATTICE_SLACK",
            f"rounding to the noise's lattice may cost at most {100 * MAX_LATTICE_SHARE:g} % of epsilon unnoticed, got up to {slack:.3g} of "
            f"{epsilon:.3g} for {run.spec.names[learner]} (it is charged); fewer rounds or parameters, or a larger epsilon, "
            "would do",
        ),
    )


def _share(run: Run, learner: int, message: float) -> tuple[float, int, float, float]:
    """Of the slack in a learner's epsilon, the learner, the slack at most, and the epsilon; 0 where nothing is promised."""
    rounds = min(run.spec.rounds, _MAX_EXAMINED_ROUNDS)
    losses = run.algorithm.accountant(learner).losses(np.ones(min(rounds, _INITIAL_ROUNDS), np.int64))
    if MAX_LATTICE_SHARE * math.fsum(losses) < rounds * message:
        losses = run.algorithm.accountant(learner).losses(np.ones(rounds, np.int64))
    epsilon, slack = math.fsum(losses), int(np.count_nonzero(losses)) * message
    return (slack / epsilon if 0.0 < epsilon < math.inf else 0.0), learner, slack, epsilon
