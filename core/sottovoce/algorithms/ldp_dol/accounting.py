"""What LDP-DOL's messages cost (Chen & Wang 2025, section IV).

With the received messages fixed, a learner's messages are independent Laplace vectors around its clean states. So the loss of
message t is at most `sqrt(n) Phi_t / rho_t`, where `Phi_t` bounds the l2 change of `theta_t` (`sensitivity`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from sottovoce.algorithms.ldp_dol.horizon import infinite_horizon
from sottovoce.algorithms.ldp_dol.sensitivity import LearnerScales, Mode, Schedules, SensitivityRecursion, first_record
from sottovoce.arrays import FloatArray, IntArray
from sottovoce.noise import grid
from sottovoce.privacy.accountant import FirstRecord
from sottovoce.privacy.guarantee import Grounds, Mechanism
from sottovoce.privacy.regularity import Regularity


class LdpDolAccountant(FirstRecord):
    """Running meter of one learner: O(1) a round.

    Args:
        mode: of the recursion.
        known: of the loss.
        schedules: of all learners.
        learner: whose messages these are.
        smallest_own_weight: `min_j |w_jj|` over all learners, for the paper's formula (default: the own weight).

    Raises:
        CheckFailed: the mode does not apply to the loss (`require_mode`).
    """

    mechanism = Mechanism.LAPLACE

    def __init__(
        self,
        mode: Mode,
        known: Regularity,
        schedules: Schedules,
        learner: LearnerScales,
        smallest_own_weight: float | None = None,
    ) -> None:
        self._mode, self._known, self._schedules, self._learner = mode, known, schedules, learner
        self._smallest = learner.own_weight if smallest_own_weight is None else smallest_own_weight
        self._sensitivity = SensitivityRecursion(mode, known, schedules, learner.own_weight)
        self._root = math.sqrt(learner.dim)
        proof = "Chen & Wang 2025, Theorem 5 with (17)-(22) and the learner's own |w_ii|; sottovoce.algorithms.ldp_dol"
        self.grounds = Grounds(mode, proof, known.constants(learner.own_weight))

    @property
    def sensitivity(self) -> float:
        """`Phi_t` of the current round: l2."""
        return self._sensitivity.phi

    def next_loss(self) -> float:
        """`(sqrt(n) Phi_t + n grid_t) / rho_t`, or 0 while nothing can differ.

        The release rounds the state to a lattice, which can part two states by one more spacing in every coordinate.
        """
        if self._sensitivity.phi == 0.0:
            return 0.0
        scale = self._learner.laplace_scale(self._sensitivity.t)
        return (self._root * self._sensitivity.phi + self._learner.dim * float(grid(scale))) / scale

    def advance(self, records: int, replaced: int | None = None) -> None:
        self._sensitivity.advance(records, self.differ(records, replaced))

    def paper(self, rounds: int) -> FloatArray:
        """Theorem 5-(i).

        Its double sum is recursion (19), with `w_bar = min_j |w_jj|` in place of the own weight and the ridge as part of L.
        It knows neither batches nor a diameter. T rounds send messages 0..T-1; the paper sums to T.
        """
        smoothness = self._known.smoothness + self._known.ridge
        theirs = replace(self._known, smoothness=smoothness, ridge=0.0, diameter=math.inf)
        return np.cumsum(
            first_record(SensitivityRecursion("loose", theirs, self._schedules, self._smallest), self._learner, rounds)
        )

    def infinite_horizon(self, counts: IntArray, replaced: IntArray | None) -> float:
        """Of one replaced record among at least the smallest batch a round; what is used again has no end to be planned for."""
        batch = int(counts.min())
        if batch == 0 or (replaced is not None and replaced.sum() > 1):
            return math.inf
        return infinite_horizon(self._mode, self._known, self._schedules, self._learner, batch)
