"""Privacy accountant of gossip gradient descent.

A learner's next message, before noise, is `x_{t+1} = Pro(b - alpha_t (g(p) + r p))`: b mixes the received messages with its
own value, g is the mean gradient of the records of round t alone, p is b or its own `x_t`. With all messages fixed, only the
clean parts of b and p depend on the records. Let `a_t` be the own weight if the own value enters b without noise, and 0 if it
enters with noise. With `D_t` the l2 distance of the `x_t` of two worlds::

    gradient at b      s = 1 - alpha_t r       B = |a_t| D_t
    gradient at x_t    s = a_t - alpha_t r     B = D_t

    D_{t+1} = min( |s| B + alpha_t min(L B + C m_t/n_t, 2G),
                   max(|s|, |s - alpha_t L|) B + alpha_t C m_t/n_t,      convex L-smooth losses only
                   diameter )

Round t has `n_t` records, `m_t` of them replaced. Message t costs `(sqrt(n) D_t + n grid_t) / rho_t` (the last term is
the lattice's), and nothing while `D_t = 0`. Record k first influences message k+1. If the own value enters b with noise and
the gradient is taken at b, message k+1 is also the last one that depends on it.

Worst-case record. Every record has its own losses, and none dominates the others in every round. The guarantee must hold for
each. So after t rounds the cumulative epsilon is the largest of the totals of all records so far, a running maximum, and a
round's loss is its increment. The sum of every round's largest loss, as in papers, charges one record for the costs of
different records: it is kept as the paper's figure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.noise import LATTICE_BITS, lattice_spacing
from sottovoce_core.privacy.accountant import Accountant, RenyiFrontier, require_replaced_count
from sottovoce_core.privacy.guarantee import Adjacency, GuaranteeBasis, Regularity
from sottovoce_core.privacy.loss import Mechanism

DescentAdjacency = Literal["record_use", "learner"]
"""Privacy unit: one record of a learner, or all of them (a whole fixed objective)."""

RoundSchedule = Callable[[int], float]
"""Positive number for every round t, counted from 0: a step size or a noise scale, public and fixed before the first round."""

MAX_FOLLOWED_RECORDS = 512
"""Maximum number of records that the accountant follows; see `DescentAccountant`."""


@dataclass(frozen=True, slots=True)
class LearnerUpdate:
    """Update and noise of a learner, in the symbols of the module docstring.

    Attributes:
        dim: n.
        step: alpha_t.
        noise: rho_t, the Laplace scale of message t; 0: no noise.
        own_weight: `a_t` by round.
        is_gradient_at_mix: the gradient is taken at b, not at x_t.
        later_costs: bounds on the largest `alpha_k / rho_{k+1}` of all k >= t, and on their sum, if B is 0: a record moves one
            message; None: it may move more.
    """

    dim: int
    step: RoundSchedule
    noise: RoundSchedule
    own_weight: Callable[[int], float]
    is_gradient_at_mix: bool
    later_costs: Callable[[int], tuple[float, float]] | None = None


class DescentAccountant(Accountant):
    """Privacy accountant of one learner.

    It follows `(D_t, total)` for every record that may become the worst case. A record with both numbers below another's stays
    below for ever, because the recursion is increasing, and is dropped. Above `MAX_FOLLOWED_RECORDS` records, the two with the
    largest totals are followed as one with the larger of each number: an upper bound.

    If the privacy unit is all records of a learner, or `advance` receives the replaced records, it follows that one change.

    Args:
        regularity: constants of the loss at the points of its gradients.
        update: update of the learner.
        adjacency: `record_use` or `learner`.
        own_weight: own weight named in the guarantee; None: the guarantee does not depend on it.
    """

    can_track_replacements = True
    is_valid_for_any_messages = True

    def __init__(
        self,
        regularity: Regularity,
        update: LearnerUpdate,
        adjacency: Adjacency = Adjacency.RECORD_USE,
        own_weight: float | None = None,
    ) -> None:
        self._regularity, self._update, self.adjacency = regularity, update, adjacency
        self.mechanism = Mechanism.laplace(update.dim)
        self.has_dominating_losses = adjacency is Adjacency.LEARNER
        proof = (
            "the distance of a learner's values between adjacent data sets, given all messages; docs/theory/gossip.md"
        )
        self.basis = GuaranteeBasis("best", proof, regularity.constants(own_weight))
        self._t = 0
        self._distances = np.zeros(1)  # of no record yet
        self._totals = np.zeros(1)
        self._renyi: RenyiFrontier | None = None

    def next_loss(self) -> float:
        spent = float(self._totals.max())
        return (
            math.inf
            if spent == math.inf
            else float((self._totals + self._losses(self._t, self._distances)).max()) - spent
        )

    def next_renyi(self) -> FloatArray:
        if self._renyi is None:
            self._renyi = RenyiFrontier.start(self._t)
        return self._renyi.price(self.mechanism.compute_renyi(self._losses(self._t, self._renyi.distances)))

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        totals = self._totals + self._losses(self._t, self._distances)
        if self.adjacency is Adjacency.LEARNER and n_replaced is None:
            n_replaced = records
        share, newest = 0.0, None
        if n_replaced is None:
            distances = self._step(self._t, self._distances, 0.0)
            if records:
                newest = self._step(self._t, np.zeros(1), 1.0 / records)
                distances, totals = np.concatenate([newest, distances]), np.concatenate([np.zeros(1), totals])
            distances, totals = _frontier(distances, totals)
        else:
            require_replaced_count(records, n_replaced)
            share = n_replaced / records if n_replaced else 0.0
            distances = self._step(self._t, self._distances, share)
        if self._renyi is not None:
            self._renyi.advance(
                self._step(self._t, self._renyi.distances, share), None if newest is None else float(newest[0])
            )
        self._distances, self._totals = distances, totals
        self._t += 1

    def losses_by_change(self, counts: IntArray, changes: IntArray) -> FloatArray:
        """Compute the losses of all changes at once: the loss of every message, not the increment of a maximum."""
        distances, losses = np.zeros(len(changes)), np.empty(changes.shape)
        for t, records in enumerate(counts.tolist()):
            losses[:, t] = self._losses(t, distances)
            distances = self._step(t, distances, changes[:, t] / max(records, 1))
        return losses

    def paper_epsilon(self, rounds: int) -> FloatArray:
        """Return the sum of every message's worst-case loss, without the lattice, as papers compute it."""
        update, distances, messages = self._update, np.zeros(2), np.empty(rounds)
        # The record with the largest distance keeps it, because the recursion is increasing; also follow the newest.
        share = np.ones(2) if self.adjacency is Adjacency.LEARNER else np.array([0.0, 1.0])
        for t in range(rounds):
            scale, sensitivity = update.noise(t), math.sqrt(update.dim) * float(distances[0])
            messages[t] = sensitivity / scale if scale else math.inf if sensitivity else 0.0
            distances[0] = self._step(t, distances, share).max()
        return np.cumsum(messages)

    def infinite_horizon_epsilon(self, counts: IntArray, n_replaced: IntArray | None) -> float:
        """Bound the cost if a record moves one message: the largest of all rounds, with at least the smallest batch so far.

        All records of a learner cost the sum of all rounds, without the lattice, whose sum diverges. Infinite if a record moves
        several messages or is used several times, or if no bound on later rounds is known.
        """
        update, c, is_learner = self._update, self._regularity, self.adjacency is Adjacency.LEARNER
        if update.later_costs is None or (n_replaced is not None and (is_learner or n_replaced.sum() > 1)):
            return math.inf
        advanced = copy.deepcopy(self)
        planned = float(advanced.charge_rounds(counts, n_replaced).sum()) + advanced.next_loss()
        if n_replaced is not None or planned == 0.0:
            return planned
        largest, total = update.later_costs(len(counts))
        share = 1.0 if is_learner else 1.0 / float(counts[counts > 0].min())
        change = math.sqrt(update.dim) * min(share * c.clipped_gradient_change, 2.0 * c.clip_norm)
        if is_learner:
            return planned + change * total
        return max(planned, change * largest + update.dim * 2.0**-LATTICE_BITS)

    def _losses(self, t: int, distances: FloatArray) -> FloatArray:
        """Return the losses of message t for records with distances D_t."""
        dim, scale = self._update.dim, self._update.noise(t)
        if scale == 0.0:
            return np.where(distances > 0.0, math.inf, 0.0)
        losses: FloatArray = distances * (math.sqrt(dim) / scale)
        losses += (distances > 0.0) * (dim * float(lattice_spacing(scale)) / scale)
        return losses

    def _step(self, t: int, distances: FloatArray, share: float | FloatArray) -> FloatArray:
        """Compute `D_{t+1}` from `D_t`, with the share `m_t/n_t` of the round's records replaced."""
        c, update = self._regularity, self._update
        step, own = update.step(t), update.own_weight(t)
        base, s = (abs(own) * distances, 1.0) if update.is_gradient_at_mix else (distances, own)
        s -= step * c.ridge
        # C, L and G may be infinite.
        record_change = (
            share * c.clipped_gradient_change
            if c.clipped_gradient_change < math.inf
            else np.where(np.asarray(share) > 0.0, math.inf, 0.0)
        )
        point_change = c.smoothness * base if c.smoothness < math.inf else np.where(base > 0.0, math.inf, 0.0)
        moved = abs(s) * base + step * np.minimum(point_change + record_change, 2.0 * c.clip_norm)
        if c.can_use_convex_mode:
            moved = np.minimum(moved, max(abs(s), abs(s - step * c.smoothness)) * base + step * record_change)
        return np.minimum(moved, c.diameter)


def _frontier(distances: FloatArray, totals: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Drop dominated records: sorted by falling distance, totals must rise."""
    order = np.lexsort((-totals, -distances))
    distances, totals = distances[order], totals[order]
    keep = np.append(True, totals[1:] > np.maximum.accumulate(totals)[:-1])
    distances, totals = distances[keep], totals[keep]
    if len(distances) > MAX_FOLLOWED_RECORDS:
        distances, totals = distances[:-1], np.append(totals[:-2], totals[-1])
    return distances, totals
