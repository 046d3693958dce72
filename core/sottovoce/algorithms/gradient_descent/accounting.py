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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.noise import grid
from sottovoce.privacy.constants import Constants

Adjacency = Literal["record", "learner"]
"""Worlds differ in one record of a learner, or in all of them (a whole fixed objective)."""

FRONTIER = 512
"""Records that the accountant follows at most; see `DescentAccountant`."""


class Schedule(Protocol):
    """A positive number for every round: a step size or a noise scale. Public."""

    def at(self, t: int) -> float:
        """The number of round t, counted from 0."""
        ...


@dataclass(frozen=True, slots=True)
class Power:
    """`first (t+1)^exponent`."""

    first: float
    exponent: float

    def at(self, t: int) -> float:
        return self.first * math.pow(t + 1.0, self.exponent)


@dataclass(frozen=True, slots=True)
class Geometric:
    """`first ratio^t`."""

    first: float
    ratio: float

    def at(self, t: int) -> float:
        return self.first * math.pow(self.ratio, t)


@dataclass(frozen=True, slots=True)
class Harmonic:
    """`factor / (t + shift)`."""

    factor: float
    shift: float

    def at(self, t: int) -> float:
        return self.factor / (t + self.shift)


@dataclass(frozen=True, slots=True)
class Following:
    """`factor` times the step that made the message of the round; the first message, made by none, as the second."""

    step: Schedule
    factor: float

    def at(self, t: int) -> float:
        return self.factor * self.step.at(max(t - 1, 0))


@dataclass(frozen=True, slots=True)
class Divided:
    """`schedule`, divided by a number of each round; after the last of them by the last."""

    schedule: Schedule
    divisors: tuple[float, ...]

    def at(self, t: int) -> float:
        return self.schedule.at(t) / self.divisors[min(t, len(self.divisors) - 1)]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One learner's share of the module's head.

    Attributes:
        dim: n.
        step: alpha_t.
        noise: rho_t, the Laplace scale of message t; 0: no noise.
        own_weight: `a_t` by round.
        at_mix: whether the gradient is taken at b, not at x_t.
    """

    dim: int
    step: Schedule
    noise: Schedule
    own_weight: Callable[[int], float]
    at_mix: bool


class DescentAccountant:
    """Running meter of one learner: implements `Accountant`.

    It follows `(D_t, total)` for every record that may turn out the worst. A record with both numbers below another's stays
    below for ever, because the recursion is increasing, and is forgotten. Of more than `FRONTIER` records the two with the
    largest totals are followed as one with the larger of either number: an upper bound.

    Args:
        together: replaced records are one change, as many as `advance` is told (all by default); else each is one of its own.
    """

    def __init__(self, constants: Constants, mechanism: Mechanism, *, together: bool) -> None:
        self._constants, self._mechanism, self._together = constants, mechanism, together
        self._swing = 2.0 * constants.clip_norm
        self._t, self._scale = 0, mechanism.noise.at(0)
        self._parted = np.zeros(1)  # of nobody yet
        self._totals = np.zeros(1)

    @property
    def together(self) -> bool:
        """Are replaced records one change? Then every loss is what its message tells about that change."""
        return self._together

    def next_loss(self) -> float:
        spent = float(self._totals.max())
        return math.inf if spent == math.inf else float((self._totals + self._losses()).max()) - spent

    @property
    def message_loss(self) -> float:
        """The largest loss of the message of this round alone over all records, without the lattice: as papers count."""
        sensitivity = math.sqrt(self._mechanism.dim) * float(self._parted.max())
        return sensitivity / self._scale if self._scale else math.inf if sensitivity else 0.0

    def advance(self, new_records: int, replaced: int | None = None) -> None:
        """The round is over and brought `new_records` records, `replaced` of which are replaced together (default: all)."""
        totals = self._totals + self._losses()
        if self._together:
            replaced = new_records if replaced is None else replaced
            self._parted, self._totals = self._step(self._parted, replaced / new_records if replaced else 0.0), totals
        else:
            parted = self._step(self._parted, 0.0)
            if new_records:
                newest = self._step(np.zeros(1), 1.0 / new_records)
                parted, totals = np.concatenate([newest, parted]), np.concatenate([np.zeros(1), totals])
            self._parted, self._totals = _frontier(parted, totals)
        self._t += 1
        self._scale = self._mechanism.noise.at(self._t)

    def losses_of(self, counts: IntArray, replaced: IntArray) -> FloatArray:
        """`(changes, rounds)`: what every message tells about each of many changes of records, metered from round 0.

        Args:
            counts: `(rounds,)` records of each round.
            replaced: `(changes, rounds)` how many of them each change replaces.
        """
        meter = DescentAccountant(self._constants, self._mechanism, together=True)
        meter._parted, losses = np.zeros(len(replaced)), np.empty(replaced.shape)
        for t, new_records in enumerate(counts.tolist()):
            losses[:, t] = meter._losses()
            meter._parted = meter._step(meter._parted, replaced[:, t] / max(new_records, 1))
            meter._t += 1
            meter._scale = meter._mechanism.noise.at(meter._t)
        return losses

    def _losses(self) -> FloatArray:
        """What the message of this round tells about each record that is followed."""
        if self._scale == 0.0:
            return np.where(self._parted > 0.0, math.inf, 0.0)
        dim = self._mechanism.dim
        losses: FloatArray = self._parted * (math.sqrt(dim) / self._scale)
        losses += (self._parted > 0.0) * (dim * float(grid(self._scale)) / self._scale)
        return losses

    def _step(self, parted: FloatArray, share: float | FloatArray) -> FloatArray:
        """`D_{t+1}` from `D_t`, with the share `m_t/n_t` of the round's records replaced."""
        c, mechanism = self._constants, self._mechanism
        step, own = mechanism.step.at(self._t), mechanism.own_weight(self._t)
        base, s = (abs(own) * parted, 1.0) if mechanism.at_mix else (parted, own)
        s -= step * c.ridge
        # C may be infinite, and so may L and G.
        jolt = share * c.change if c.change < math.inf else np.where(np.asarray(share) > 0.0, math.inf, 0.0)
        pull = c.smoothness * base if c.smoothness < math.inf else np.where(base > 0.0, math.inf, 0.0)
        moved = abs(s) * base + step * np.minimum(pull + jolt, self._swing)
        if c.convex_step:
            moved = np.minimum(moved, max(abs(s), abs(s - step * c.smoothness)) * base + step * jolt)
        return np.minimum(moved, c.diameter)


def _frontier(parted: FloatArray, totals: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Without the records that others dominate: distances fall, totals rise."""
    order = np.lexsort((-totals, -parted))
    parted, totals = parted[order], totals[order]
    keep = np.append(True, totals[1:] > np.maximum.accumulate(totals)[:-1])
    parted, totals = parted[keep], totals[keep]
    if len(parted) > FRONTIER:
        parted, totals = parted[:-1], np.append(totals[:-2], totals[-1])
    return parted, totals


def run_meter(
    accountant: DescentAccountant, counts: Iterable[int], replaced: Iterable[int | None]
) -> tuple[FloatArray, FloatArray]:
    """The meter run over rounds with these numbers of records, and of replaced ones.

    Returns:
        `(rounds,)` losses, and `(rounds,)` cumulative epsilon as the papers add it up: every message by its own worst record.
    """
    losses, messages = [], []
    for new_records, changed in zip(counts, replaced, strict=True):
        losses.append(accountant.next_loss())
        messages.append(accountant.message_loss)
        accountant.advance(new_records, changed)
    return np.array(losses), np.cumsum(messages)
