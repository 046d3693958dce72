"""What the messages of gossip gradient descent cost.

A learner's next message, before noise, is `x_{t+1} = Pro(b - alpha_t (g(p) + r p))`: b mixes what was heard with its own
value, g is the mean gradient of the records of round t alone, p is b or its own `x_t`. With the messages of everybody fixed,
only the clean parts of b and p can tell records apart. Let `a_t` be the own weight if the own value enters b clean, and 0 if
it enters as it was said. With `D_t` the l2 distance of the `x_t` of two worlds::

    gradient at b      s = 1 - alpha_t r       B = |a_t| D_t
    gradient at x_t    s = a_t - alpha_t r     B = D_t

    D_{t+1} = min( |s| B + alpha_t min(L B + C m_t/n_t, 2G),
                   max(|s|, |s - alpha_t L|) B + alpha_t C m_t/n_t,      convex L-smooth losses only
                   diameter )

`n_t` records came in round t, `m_t` of them replaced. Message t costs `(sqrt(n) D_t + n grid_t) / rho_t` (the last term is
the lattice's), and nothing while `D_t = 0`. Record k first shows in message k+1. Where the own value enters b as it was said
and the gradient is taken there, message k+1 is also the last one that shows it.

Which record? Every record has losses of its own, and none dominates the others in every round. The guarantee must hold for
each. So after t rounds the cumulative epsilon is the largest of the totals of all records so far, a running maximum, and a
round's loss is its increment. Adding up every round's largest loss instead, as papers do, charges one record for what
different records cost: it is kept as the paper's figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.noise import lattice_spacing
from sottovoce_core.privacy.accountant import Accountant, require_replaced_count
from sottovoce_core.privacy.guarantee import Adjacency, GuaranteeBasis, Mechanism, Regularity

DescentAdjacency = Literal["record_use", "learner"]
"""Worlds differ in one record of a learner, or in all of them (a whole fixed objective)."""

RoundSchedule = Callable[[int], float]
"""A positive number for every round t, counted from 0: a step size or a noise scale. Public, fixed before the first round."""

MAX_FOLLOWED_RECORDS = 512
"""Records that the accountant follows at most; see `DescentAccountant`."""


@dataclass(frozen=True, slots=True)
class LearnerUpdate:
    """What of one learner's update and noise the module's head speaks of.

    Attributes:
        dim: n.
        step: alpha_t.
        noise: rho_t, the Laplace scale of message t; 0: no noise.
        own_weight: `a_t` by round.
        at_mix: whether the gradient is taken at b, not at x_t.
    """

    dim: int
    step: RoundSchedule
    noise: RoundSchedule
    own_weight: Callable[[int], float]
    is_gradient_at_mix: bool


class DescentAccountant(Accountant):
    """Running meter of one learner.

    It follows `(D_t, total)` for every record that may turn out the worst. A record with both numbers below another's stays
    below for ever, because the recursion is increasing, and is forgotten. Of more than `FRONTIER` records the two with the
    largest totals are followed as one with the larger of either number: an upper bound.

    Where an event is all records of a learner, or the meter is told what is replaced, that is one change, and all it follows.

    Args:
        known: of the loss where gradients are taken.
        update: of the learner.
        event: `record` or `learner`.
        own_weight: what the guarantee names as the own weight; None: nothing rests on one.
    """

    mechanism = Mechanism.LAPLACE
    can_track_replacements = True
    is_valid_for_any_messages = True

    def __init__(
        self,
        regularity: Regularity,
        update: LearnerUpdate,
        adjacency: Adjacency = Adjacency.RECORD_USE,
        own_weight: float | None = None,
    ) -> None:
        self._known, self._update, self.adjacency = regularity, update, adjacency
        self.has_dominating_losses = adjacency is Adjacency.LEARNER
        self.basis = GuaranteeBasis(
            "best", "sottovoce_core.algorithms.gradient_descent.accounting", regularity.constants(own_weight)
        )
        self._t = 0
        self._parted = np.zeros(1)  # of nobody yet
        self._totals = np.zeros(1)

    def next_loss(self) -> float:
        spent = float(self._totals.max())
        return (
            math.inf if spent == math.inf else float((self._totals + self._losses(self._t, self._parted)).max()) - spent
        )

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        totals = self._totals + self._losses(self._t, self._parted)
        if self.adjacency is Adjacency.LEARNER and n_replaced is None:
            n_replaced = records
        if n_replaced is None:
            parted = self._step(self._t, self._parted, 0.0)
            if records:
                newest = self._step(self._t, np.zeros(1), 1.0 / records)
                parted, totals = np.concatenate([newest, parted]), np.concatenate([np.zeros(1), totals])
            parted, totals = _frontier(parted, totals)
        else:
            require_replaced_count(records, n_replaced)
            parted = self._step(self._t, self._parted, n_replaced / records if n_replaced else 0.0)
        self._parted, self._totals = parted, totals
        self._t += 1

    def losses_by_change(self, counts: IntArray, changes: IntArray) -> FloatArray:
        """All changes at once: what every message tells about each of them, not an increment of a maximum."""
        parted, losses = np.zeros(len(changes)), np.empty(changes.shape)
        for t, records in enumerate(counts.tolist()):
            losses[:, t] = self._losses(t, parted)
            parted = self._step(t, parted, changes[:, t] / max(records, 1))
        return losses

    def paper_epsilon(self, rounds: int) -> FloatArray:
        """Every message by its own worst record, without the lattice: as papers add up."""
        update, parted, messages = self._update, np.zeros(2), np.empty(rounds)
        # The record that is furthest apart stays so, because the recursion is increasing; beside it the newest.
        share = np.ones(2) if self.adjacency is Adjacency.LEARNER else np.array([0.0, 1.0])
        for t in range(rounds):
            scale, sensitivity = update.noise(t), math.sqrt(update.dim) * float(parted[0])
            messages[t] = sensitivity / scale if scale else math.inf if sensitivity else 0.0
            parted[0] = self._step(t, parted, share).max()
        return np.cumsum(messages)

    def _losses(self, t: int, parted: FloatArray) -> FloatArray:
        """What message t tells about records whose worlds are `parted` by D_t."""
        dim, scale = self._update.dim, self._update.noise(t)
        if scale == 0.0:
            return np.where(parted > 0.0, math.inf, 0.0)
        losses: FloatArray = parted * (math.sqrt(dim) / scale)
        losses += (parted > 0.0) * (dim * float(lattice_spacing(scale)) / scale)
        return losses

    def _step(self, t: int, parted: FloatArray, share: float | FloatArray) -> FloatArray:
        """`D_{t+1}` from `D_t`, with the share `m_t/n_t` of the round's records replaced."""
        c, update = self._known, self._update
        step, own = update.step(t), update.own_weight(t)
        base, s = (abs(own) * parted, 1.0) if update.is_gradient_at_mix else (parted, own)
        s -= step * c.ridge
        # C may be infinite, and so may L and G.
        jolt = (
            share * c.clipped_gradient_change
            if c.clipped_gradient_change < math.inf
            else np.where(np.asarray(share) > 0.0, math.inf, 0.0)
        )
        pull = c.smoothness * base if c.smoothness < math.inf else np.where(base > 0.0, math.inf, 0.0)
        moved = abs(s) * base + step * np.minimum(pull + jolt, 2.0 * c.clip_norm)
        if c.can_use_convex_mode:
            moved = np.minimum(moved, max(abs(s), abs(s - step * c.smoothness)) * base + step * jolt)
        return np.minimum(moved, c.diameter)


def _frontier(parted: FloatArray, totals: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Without the records that others dominate: distances fall, totals rise."""
    order = np.lexsort((-totals, -parted))
    parted, totals = parted[order], totals[order]
    keep = np.append(True, totals[1:] > np.maximum.accumulate(totals)[:-1])
    parted, totals = parted[keep], totals[keep]
    if len(parted) > MAX_FOLLOWED_RECORDS:
        parted, totals = parted[:-1], np.append(totals[:-2], totals[-1])
    return parted, totals
