"""Privacy accountant of dual averaging (Cheng, Liao & Li 2023, Lemma 1 and Theorem 2, corrected).

Given all earlier messages, replacing the loss of one round moves a learner's clean dual vector on its own block only. Let
`D_t` bound that change in l2 when message t is sent. The message costs at most `sqrt(d_i) D_t / sigma`, and

    D_{t+1} = k (min(2 B, C + G m_t) + r m_t)        if the loss of round t is replaced
    D_{t+1} = k (min(2 B, G m_t) + r m_t)            if not,    m_t = min(diameter, c_t D_t)

with k the factor of a gradient (n, or 1 for decomposable losses), B its bound, C the largest distance of the gradients of two
losses at one decision (at most 2 B), G its Lipschitz constant, r the exact ridge, and m_t the change of the decision at which
it is taken. `noised` primal: the decision is a function of messages, `c_t = 0`, and a replaced loss is charged once.
`clean` primal: `c_t = alpha_t / w_t`, because the prox step is alpha-Lipschitz.

Worst-case round. `D` starts at `k C` after every round, and `D_{t+1}` is nondecreasing in `D_t` and in `c_t`. So if `c_t`
never grows, the worst round to replace is the first round with records: by induction, `D` s rounds after it is at least `D`
s rounds after a later one. With push-sum, `w_t` may fall faster than `alpha_t`; then `c_t` grows, and any round may be the
worst. The guarantee must hold for each, so the accountant charges the largest total of all rounds so far, and the loss of a
message is the increment of that maximum.

This is an upper bound on every graph, static or changing: the recursion bounds the cost of any one round by `c_t` of the
run's own graph, and a learner keeps `w_t` at least at the value of that graph, for any received messages. Several replaced
rounds (a reused record) are followed together by the same recursion.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import AssumptionViolated
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.noise.mechanisms import laplace_loss
from sottovoce_core.privacy.accountant import Accountant, RenyiFrontier, require_replaced_count
from sottovoce_core.privacy.guarantee import Adjacency, Constant, GuaranteeBasis
from sottovoce_core.privacy.loss import Mechanism

LipschitzSchedule = Callable[[int], float]


@dataclass(frozen=True, slots=True, eq=False)
class DualSensitivity:
    """Constants that bound the change of one learner's messages.

    Attributes:
        block_size: d_i, number of coordinates that the learner's gradients enter.
        gradient_factor: k, factor of a gradient.
        gradient_bound: B, l2 bound of the gradient's data part on the block.
        gradient_change: C, l2 distance of those parts of two losses at one decision.
        smoothness: G, Lipschitz constant of that part in the decision; infinite: unknown.
        ridge: r.
        diameter: l2 diameter of the part of the decision set in which the learner's decisions can differ.
        decision_lipschitz: c_t by planned round t, the Lipschitz constant of its decision in the clean dual vector.
        has_growing_lipschitz: some c_t is above an earlier one.
        later_lipschitz_bound: bound on c_t after the planned rounds; infinite: unknown.
    """

    block_size: int
    gradient_factor: float
    gradient_bound: float
    gradient_change: float
    smoothness: float
    ridge: float
    diameter: float
    decision_lipschitz: LipschitzSchedule
    has_growing_lipschitz: bool
    later_lipschitz_bound: float

    def next_difference(self, t: int, difference: float, is_replaced: bool) -> float:
        """Compute `D_{t+1}` from `D_t`."""
        moved = min(self.diameter, self.decision_lipschitz(t) * difference)
        change = self.gradient_change if is_replaced else 0.0
        data = min(2.0 * self.gradient_bound, change + self.smoothness * moved) if moved else change
        return self.gradient_factor * (data + self.ridge * moved)


class DualAveragingAccountant(Accountant):
    """Privacy accountant of one learner. In a round's loss, one replaced record counts as much as all of them.

    It follows `(D_t, total)` for every round that may become the worst one to replace (`_frontier`); if c_t never grows, only
    for the first one with records, in O(1) a round. If `advance` receives the replaced records, it follows that one change.

    Args:
        sensitivity: constants that bound the change of the learner's messages.
        sigma: Laplace scale.
        mode: mode of the primal step.
        paper_round_epsilon: epsilon of one round by the paper's formula, which multiplies it by the number of rounds.
        has_shared_records: several learners hold the same losses.
    """

    adjacency = Adjacency.ROUND
    can_track_replacements = True
    is_valid_for_any_messages = True

    def __init__(
        self,
        sensitivity: DualSensitivity,
        sigma: float,
        mode: str = "noised",
        paper_round_epsilon: float = math.inf,
        has_shared_records: bool = False,
    ) -> None:
        self._sensitivity, self._sigma, self._paper_round, self.has_shared_records = (
            sensitivity,
            sigma,
            paper_round_epsilon,
            has_shared_records,
        )
        self.mechanism = Mechanism.laplace(sensitivity.block_size)
        self.has_dominating_losses = not sensitivity.has_growing_lipschitz
        self._t, self._seen = 0, 0
        self._followed = [(0.0, 0.0)]  # of no round yet
        self._renyi: RenyiFrontier | None = None
        proof = "Cheng, Liao & Li 2023, Theorem 2, corrected: conditional on the past; docs/theory/dpsda.md"
        self.basis = GuaranteeBasis(mode, proof, _constants(sensitivity))

    @property
    def difference(self) -> float:
        """Largest `D_t` of the current round, in l2."""
        return max(difference for difference, _ in self._followed)

    def next_loss(self) -> float:
        """Return `(sqrt(d_i) D_t + d_i grid) / sigma`, 0 while nothing differs; for several rounds, the rise of the maximum."""
        if len(self._followed) == 1:
            return self._cost(self._followed[0][0])
        spent = max(total for _, total in self._followed)
        if spent == math.inf:
            return math.inf
        return max(total + self._cost(difference) for difference, total in self._followed) - spent

    def next_renyi(self) -> FloatArray:
        if self.has_dominating_losses:
            return super().next_renyi()
        if self._renyi is None:
            self._renyi = RenyiFrontier.start(self._t)
        losses = np.array([self._cost(difference) for difference in self._renyi.distances.tolist()])
        return self._renyi.price(self.mechanism.compute_renyi(losses))

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        """End the round; its loss is replaced if `n_replaced` is above 0."""
        sensitivity, t = self._sensitivity, self._t
        starts = n_replaced is None and records > 0 and (sensitivity.has_growing_lipschitz or not self._seen)
        if n_replaced is not None:
            require_replaced_count(records, n_replaced)
        self._followed = [
            (sensitivity.next_difference(t, difference, bool(n_replaced)), total + self._cost(difference))
            for difference, total in self._followed
        ]
        newest = sensitivity.next_difference(t, 0.0, True) if starts else None
        if newest is not None:
            self._followed = _frontier([*self._followed, (newest, 0.0)])
        if self._renyi is not None:
            followed = self._renyi.distances.tolist()
            moved = [sensitivity.next_difference(t, difference, bool(n_replaced)) for difference in followed]
            self._renyi.advance(np.array(moved), newest)
        self._seen += records
        self._t += 1

    def _cost(self, difference: float) -> float:
        """Return the loss of a message whose clean values differ by `difference` in l2."""
        return laplace_loss(
            math.sqrt(self._sensitivity.block_size) * difference, self._sensitivity.block_size, self._sigma
        )

    def paper_epsilon(self, rounds: int) -> FloatArray:
        return np.arange(1.0, rounds + 1.0) * self._paper_round

    def infinite_horizon_epsilon(self, counts: IntArray, n_replaced: IntArray | None) -> float:
        """Bound the planned rounds, and all later ones by a geometric series without lattice, or infinity."""
        advanced = copy.deepcopy(self)
        planned = float(advanced.charge_rounds(counts, n_replaced).sum())
        return planned + _tail(self._sensitivity, self._sigma, advanced.difference)


class _WithoutLattice(DualAveragingAccountant):
    """Accountant without the cost of the lattice: its losses are proportional to `1 / sigma`."""

    def _cost(self, difference: float) -> float:
        return math.sqrt(self._sensitivity.block_size) * difference / self._sigma


def calibrate_sigma(sensitivities: list[DualSensitivity], rounds: int, epsilon: float) -> float:
    """Return the noise scale at which one replaced loss costs `epsilon` over all rounds and these learners together.

    Raises:
        AssumptionViolated: EPSILON, if the lattice alone costs `epsilon` or more.
    """
    total = slack = 0.0
    for each in sensitivities:
        accountant = _WithoutLattice(each, 1.0)
        for _ in range(rounds):
            total += accountant.next_loss()
            slack += math.ldexp(each.block_size, -LATTICE_BITS) if accountant.difference else 0.0
            accountant.advance(1)
    if epsilon <= slack:
        raise AssumptionViolated("EPSILON", f"epsilon must be above the cost of rounding ({slack:.3g}), got {epsilon}")
    return total / (epsilon - slack)


NEGLIGIBLE_DIFFERENCE_RATIO = 2.0**-40
"""Share of the largest difference below which rounds are followed as one."""
MAX_FOLLOWED_ROUNDS = 512
"""Maximum number of rounds that an accountant follows."""


def _frontier(followed: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Select the rounds `(D_t, total)` that may become the worst ones to replace: differences fall, totals rise.

    A round with both numbers at most another's stays so for ever, because the recursion is increasing, and is dropped. Rounds
    with a negligible difference, and those above `MAX_FOLLOWED_ROUNDS`, are followed as one with the larger of each number: an
    upper bound.
    """
    kept: list[tuple[float, float]] = []
    for difference, total in sorted(followed, reverse=True):
        if not kept or total > kept[-1][1]:
            kept.append((difference, total))
    while len(kept) > 2 and (
        kept[-2][0] <= NEGLIGIBLE_DIFFERENCE_RATIO * kept[0][0] or len(kept) > MAX_FOLLOWED_ROUNDS
    ):
        kept[-2:] = [(kept[-2][0], kept[-1][1])]
    return kept


def _tail(sensitivity: DualSensitivity, sigma: float, difference: float) -> float:
    """Bound the cost of all messages after the planned rounds, without lattice: a geometric series, or infinity."""
    if difference == 0.0:
        return 0.0
    contraction = (
        sensitivity.gradient_factor * (sensitivity.smoothness + sensitivity.ridge) * sensitivity.later_lipschitz_bound
    )
    if sensitivity.later_lipschitz_bound == 0.0:  # and G may be infinite
        contraction = 0.0
    if not contraction < 1.0 or sigma == 0.0:
        return math.inf
    return math.sqrt(sensitivity.block_size) * difference / (1.0 - contraction) / sigma


def _constants(sensitivity: DualSensitivity) -> dict[str, Constant]:
    """Return every finite constant with what enforces it."""
    constants = {
        "block": Constant(float(sensitivity.block_size), "the partition of the coordinates"),
        "factor": Constant(sensitivity.gradient_factor, "the number of learners"),
        "gradient_bound": Constant(
            sensitivity.gradient_bound, "clipping of the block's gradient, or the loss on rows scaled to feature_bound"
        ),
    }
    if sensitivity.gradient_change < 2.0 * sensitivity.gradient_bound:
        constants["gradient_change"] = Constant(
            sensitivity.gradient_change, "the loss, on rows scaled to feature_bound"
        )
    if sensitivity.later_lipschitz_bound:
        constants |= {
            "smoothness": Constant(sensitivity.smoothness, "the loss, on rows scaled to feature_bound"),
            "ridge": Constant(sensitivity.ridge, "the loss, exactly"),
            "diameter": Constant(sensitivity.diameter, "projection onto the decision set"),
        }
    return {name: constant for name, constant in constants.items() if constant.value < math.inf}
