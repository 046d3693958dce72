"""Privacy cost of a whole run: reused records, groups, several learners, approximate DP, and rounding to the lattice.

**Sums.** Given all earlier messages, a learner's message has a distribution of its own; so the likelihood ratio of a whole
transcript is a product over rounds and learners, and pure losses add up. Replacing k records one after the other passes
through k - 1 data sets in between: a group of k costs at most the sum of the costs of its records alone.

**At a delta.** The smallest of three bounds holds: the pure sum, the sum of Renyi divergences (`privacy.loss`), and privacy loss
distributions, composed by Google's dp-accounting. For the last, each message is replaced by a pair of distributions that
dominates every pair of worlds, for any earlier messages; such pairs compose under adaptive composition (Zhu, Dong & Wang,
AISTATS 2022, Theorem 10). With many coordinates the Renyi divergences are far smaller, because they use the l2 bound.

- Laplace noise: a vector with independent Laplace noise of scale b on its coordinates, moved by at most s in l1, is dominated
  by one coordinate moved by s. Move one coordinate at a time, by `s_1 + … + s_n = s`. Tests of one such move are those of one
  Laplace number moved by s_k; that density is log-concave, so thresholds are best, and the trade-off curve is
  `f_k(a) = F(F^-1(1-a) - s_k)`. Curves of successive moves chain to `f_2(1 - f_1(a))` at worst (group privacy: Dong, Roth & Su
  2022), which is exactly the curve of one move by `s_1 + s_2`. With the loss `eps = s/b` this is a Laplace mechanism of scale
  `1/eps` and sensitivity 1. On a lattice of spacing `g <= 2^-40 b` the privacy curve meets the continuous one wherever the
  loss is an atom, and is a chord in between: `eps + 2g/b` dominates.
- Any other message of loss eps is dominated by randomised response (Kairouz, Oh & Viswanath 2015).

For that, a message's loss must bound the information of that single message about the record. An accountant that charges
increments of a running maximum over records guarantees less (`Accountant.has_dominating_losses` is false):
`message_losses` then examines every record.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.arrays import FloatArray, IntArray, as_floats
from sottovoce_core.data import LearnerData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.optional import import_optional
from sottovoce_core.privacy.accountant import Accountant
from sottovoce_core.privacy.guarantee import Adjacency
from sottovoce_core.privacy.loss import Mechanism, PrivacyLoss
from sottovoce_core.runs.run import Run

# ---- composition -----------------------------------------------------------------------------------------------------

MAX_ACCOUNTED_ROUNDS = 2_000_000
"""Maximum number of rounds accounted one by one for single records; above it, cheaper upper bounds are used."""
_INTERVAL, _MAX_PLD_POINTS = 1e-4, 50_000
"""Spacing of a discretised privacy loss, and its maximum number of points: above a total loss of 5 the spacing is wider.

The discretisation is pessimistic, and its error falls with the square of the spacing: below 1e-4 at a total of 50.
"""
_TRUNCATED_TAIL_MASS = 1e-15
"""Tail mass that a convolution may move to an infinite loss, which is pessimistic."""


# ---- records, groups, learners ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RecordGroup:
    """Records that are used in the same rounds, or equally often.

    Attributes:
        n_records: number of records.
        n_uses: number of uses of each.
        losses: `(rounds,)` losses of one of them in all of its uses, by message; None: at most `n_uses` times one use.
    """

    n_records: int
    n_uses: int
    losses: FloatArray | None

    def charged_losses(self, event_losses: FloatArray) -> FloatArray:
        """Return `losses`, or their bound from the losses of one use."""
        return as_floats(event_losses * self.n_uses) if self.losses is None else self.losses

    def composable_losses(self, event_losses: FloatArray) -> FloatArray:
        """Return losses that may be composed, given those of any single use `(rounds,)`.

        n times the losses of one use do not dominate n uses entry by entry: the losses may add up in other messages (3, 1 and
        1, 3 are 4, 4, which at some deltas reveals more than 6, 2). One message with the total loss dominates all its parts.
        """
        if self.losses is not None:
            return self.losses
        if self.n_uses == 1:
            return event_losses
        total = np.zeros_like(event_losses)
        total[0] = self.n_uses * math.fsum(event_losses)
        return total


def _count_usage_plans(own: LearnerData) -> Counter[tuple[int, ...]]:
    """Count the records of each usage plan: the rounds in which a record is used, one entry for each use."""
    rounds = np.repeat(np.arange(own.rounds), np.diff(own.offsets))
    by_record = np.argsort(own.order, kind="stable")
    _, first = np.unique(own.order[by_record], return_index=True)
    return Counter(tuple(uses.tolist()) for uses in np.split(rounds[by_record], first[1:]) if len(uses))


def group_record_losses(accountant: Accountant, own: LearnerData, end: int | None = None) -> list[RecordGroup]:
    """Group a learner's records by use and compute the losses of each in all of its uses, with a new accountant.

    The learner sends nothing from round `end` on (default: it sends in all rounds).

    A record used once costs at most one use. One used n times is accounted with all of its uses replaced; if that would take
    more than `MAX_ACCOUNTED_ROUNDS` rounds in all, or the accountant cannot follow it, n single uses are an upper bound. The
    privacy unit "all records of the learner" includes all uses.
    """
    plans = _count_usage_plans(own)
    if accountant.adjacency == Adjacency.LEARNER:
        return [RecordGroup(sum(plans.values()), 1, None)]
    exact = (
        accountant.can_track_replacements and sum(len(plan) > 1 for plan in plans) * own.rounds <= MAX_ACCOUNTED_ROUNDS
    )
    followed: list[tuple[int, tuple[int, ...]]] = []
    bounded = Counter[int]()
    for plan, records in plans.items():
        if len(plan) > 1 and exact:
            followed.append((records, plan))
        else:
            bounded[len(plan)] += records
    replaced = np.array([np.bincount(plan, minlength=own.rounds) for _, plan in followed]).reshape(-1, own.rounds)
    losses = _truncate(end, accountant.losses_by_change(np.diff(own.offsets), replaced))
    groups = [RecordGroup(records, len(plan), each) for (records, plan), each in zip(followed, losses, strict=True)]
    return groups + [RecordGroup(records, uses, None) for uses, records in bounded.items()]


def worst_case_record_losses(groups: Iterable[RecordGroup], event_losses: FloatArray) -> FloatArray:
    """Return the losses `(rounds,)` of the worst-case record in all of its uses; zeros without records."""
    charged = [each.charged_losses(event_losses) for each in groups]
    return max(charged, key=lambda losses: math.fsum(losses), default=np.zeros_like(event_losses))


def group_loss(groups: Iterable[RecordGroup], event_losses: FloatArray, size: int) -> float:
    """Return the sum of the losses of the `size` most expensive records of one learner, in all of their uses.

    For records that are used once, `[RecordGroup(size, 1, None)]` is enough. With fewer records, all are summed.
    """
    largest: list[float] = []
    for epsilon, count in sorted(
        ((math.fsum(each.charged_losses(event_losses)), each.n_records) for each in groups), reverse=True
    ):
        largest += [epsilon] * min(count, size - len(largest))
    return math.fsum(largest)


# ---- approximate DP ----------------------------------------------------------------------------------------------------


def message_losses(accountant: Accountant, counts: IntArray, end: int | None = None) -> FloatArray | None:
    """Return losses that may be composed: after sorting, each dominates the corresponding loss of every single record.

    If the accountant charges increments of a maximum over records, every round's record is accounted alone: the k-th entry is
    the largest k-th largest loss of all of them. The order does not matter to a composition, and more loss never makes it
    smaller.

    Args:
        accountant: a new accountant.
        counts: `(rounds,)` records of each round.
        end: the learner sends nothing from this round on (default: it sends in all rounds).

    Returns:
        `(rounds,)`, or None if only the sum of the losses is known: the computation would take more than
        `MAX_ACCOUNTED_ROUNDS` rounds, or the accountant cannot follow single records.
    """
    charged = _truncate(end, accountant.losses(counts))
    if accountant.has_dominating_losses:
        return charged
    rounds, nonempty = len(counts), np.flatnonzero(counts)
    if (
        not accountant.can_track_replacements
        or not np.isfinite(charged).all()
        or len(nonempty) * rounds > MAX_ACCOUNTED_ROUNDS
    ):
        return None
    return envelope(_truncate(end, accountant.losses_by_change(counts, np.eye(rounds, dtype=np.int64)[nonempty])))


def _truncate(end: int | None, losses: FloatArray) -> FloatArray:
    """Set losses `(..., rounds)` to 0 from round `end` on."""
    return losses if end is None else as_floats(np.where(np.arange(losses.shape[-1]) < end, losses, 0.0))


def envelope(losses: Sequence[FloatArray] | FloatArray) -> FloatArray:
    """Sort each row from the largest loss to the smallest, and return the maximum of every column `(rounds,)`."""
    return as_floats(np.sort(losses, axis=-1)[:, ::-1].max(axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class MessageLosses:
    """Losses of one learner's messages, which hold for every single unit.

    Attributes:
        mechanism: noise mechanism of the messages.
        losses: `(rounds,)` pure losses, each valid for any earlier messages: sorted by size, each is at least that of any unit.
        renyi: `(orders,)` sums of the Renyi divergences of all messages.
    """

    mechanism: Mechanism
    losses: FloatArray
    renyi: FloatArray


def epsilon_for_delta(delta: float, messages: Sequence[MessageLosses], *, has_distributions: bool = True) -> float:
    """Return epsilon at which the messages are together `(epsilon, delta)`-DP; never above the sum of their losses.

    Args:
        delta: above 0 and below 1.
        messages: messages of every learner that one record moves.
        has_distributions: whether privacy loss distributions are composed, too.

    Raises:
        SpecError: delta is out of range, or dp-accounting is missing.
    """
    require_delta(delta)
    pure = math.fsum(math.fsum(each.losses) for each in messages)
    if not pure or not math.isfinite(pure):
        return pure
    renyi = as_floats(np.sum([each.renyi for each in messages], axis=0))
    by_renyi = PrivacyLoss(pure, renyi).epsilon(delta)
    if not has_distributions:
        return by_renyi
    try:
        with np.errstate(over="ignore"):  # an epsilon of hundreds becomes infinite, and the other bound holds
            composed = _compose(messages, max(_INTERVAL, pure / _MAX_PLD_POINTS)).get_epsilon_for_delta(delta)
    except ValueError:  # dp-accounting cannot discretise the distribution of a message that costs hundreds
        return by_renyi
    return min(by_renyi, float(composed))


def require_delta(delta: float) -> float:
    """Return the delta if it is above 0 and below 1.

    Raises:
        SpecError: it is not.
    """
    if not 0.0 < delta < 1.0:
        raise SpecError(f"delta must be above 0 and below 1, got {delta}; for delta 0 use the pure epsilon")
    return delta


def _compose(messages: Sequence[MessageLosses], interval: float) -> Any:
    """Compose the privacy loss distributions of all messages: equal ones at once, then always the two smallest."""
    counts = Counter[tuple[float, bool]]()
    for each in messages:
        values, repeats = np.unique(each.losses[each.losses > 0], return_counts=True)
        has_laplace = each.mechanism.n_coordinates > 0
        counts.update({(loss, has_laplace): n for loss, n in zip(values.tolist(), repeats.tolist(), strict=True)})
    library = _library("privacy_loss_distribution")
    parameters = _library("common").DifferentialPrivacyParameters
    heap: list[tuple[float, int, Any]] = []
    for k, ((loss, has_laplace), times) in enumerate(sorted(counts.items())):
        if has_laplace:
            scale = 1.0 / (loss + 2.0 ** (1 - LATTICE_BITS))
            one = library.from_laplace_mechanism(scale, value_discretization_interval=interval)
        else:
            one = library.from_privacy_parameters(parameters(loss, 0.0), value_discretization_interval=interval)
        several = one if times == 1 else one.self_compose(times, tail_mass_truncation=_TRUNCATED_TAIL_MASS)
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
"""Maximum share of epsilon that rounding may cost without a warning."""

_MAX_EXAMINED_ROUNDS = 20_000
"""Maximum number of examined rounds; longer runs are judged by their first rounds."""
_INITIAL_ROUNDS = 100
"""Number of rounds examined first: if their loss is large enough, no later round can make the share of the slack large."""
_MIN_EPSILON = 0.01
"""Smallest practical epsilon: a run whose slack is small even for it is not examined further."""


def check_lattice(run: Run) -> tuple[RunWarning, ...]:
    """Return the warning LATTICE_SLACK about the learner with the largest share, if it is too large.

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
            f"rounding to the lattice should cost at most {100 * MAX_LATTICE_SHARE:g} % of epsilon, got up to {slack:.3g} of "
            f"{epsilon:.3g} for {run.spec.names[learner]} (it is charged); take fewer rounds or parameters, or a larger "
            "epsilon",
        ),
    )


def _share(run: Run, learner: int, message: float) -> tuple[float, int, float, float]:
    """Return the share of the slack in a learner's epsilon (0 without a guarantee), the learner, maximum slack and epsilon."""
    rounds = min(run.spec.rounds, _MAX_EXAMINED_ROUNDS)
    losses = run.algorithm.accountant(learner).losses(np.ones(min(rounds, _INITIAL_ROUNDS), np.int64))
    if MAX_LATTICE_SHARE * math.fsum(losses) < rounds * message:
        losses = run.algorithm.accountant(learner).losses(np.ones(rounds, np.int64))
    epsilon, slack = math.fsum(losses), int(np.count_nonzero(losses)) * message
    return (slack / epsilon if 0.0 < epsilon < math.inf else 0.0), learner, slack, epsilon
