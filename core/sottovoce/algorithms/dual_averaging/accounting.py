"""What messages of dual averaging cost (Cheng, Liao & Li 2023, Lemma 1 and Theorem 2, corrected).

Given all earlier messages, replacing the loss of one round moves a learner's clean dual vector on its own block only. Let
`D_t` bound that change in l2 when message t is said. The message costs at most `sqrt(d_i) D_t / sigma`, and

    D_{t+1} = k (2 B + r m_t)                        if the loss of round t is replaced
    D_{t+1} = k (min(2 B, G m_t) + r m_t)            if not,    m_t = min(diameter, c_t D_t)

with k the factor in front of a gradient (n, or 1 for decomposable losses), B its bound, G its Lipschitz constant, r the exact
ridge, and m_t the change of the decision that it is taken at. `noised` primal: the decision is a function of messages,
`c_t = 0`, and a replaced loss is charged once. `clean` primal: `c_t = alpha_t / w_t`, as the prox step is alpha-Lipschitz.

The first round is the worst one to replace: `D` starts alike in every round, and `c` is replaced by its largest later value,
so that it never grows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.errors import CheckFailed
from sottovoce.noise import GRID_BITS
from sottovoce.noise.mechanisms import laplace_loss
from sottovoce.privacy.accountant import FirstRecord, metered
from sottovoce.privacy.guarantee import Constant, Event, Grounds, Mechanism

Carry = Callable[[int], float]


@dataclass(frozen=True, slots=True, eq=False)
class DualSensitivity:
    """What moves one learner's messages.

    Attributes:
        block: d_i, number of coordinates that the learner's gradients enter.
        factor: k, in front of a gradient.
        gradient_bound: B, l2, of the gradient's data part on the block.
        smoothness: G, Lipschitz constant of that part in the decision; infinite: unknown.
        ridge: r.
        diameter: l2, of the part of the decision set in which the learner's decisions can differ.
        carry: from a planned round t to c_t, the Lipschitz constant of its decision in the clean dual vector.
        later: bound on c_t beyond the planned rounds; infinite: unknown.
    """

    block: int
    factor: float
    gradient_bound: float
    smoothness: float
    ridge: float
    diameter: float
    carry: Carry
    later: float

    def step(self, t: int, difference: float, replaced: bool) -> float:
        """`D_{t+1}` from `D_t`."""
        moved = min(self.diameter, self.carry(t) * difference)
        data = 2.0 * self.gradient_bound
        if not replaced:
            data = min(data, self.smoothness * moved) if moved else 0.0
        return self.factor * (data + self.ridge * moved)


class DualAveragingAccountant(FirstRecord):
    """Running meter of one learner: O(1) a round. Of a round's loss, one replaced record is as much as all of them.

    Args:
        sensitivity: what moves the learner's messages.
        sigma: Laplace scale.
        mode: of the primal step.
        paper_round: epsilon of one round by the paper's own formula, which it multiplies by the number of rounds.
        shared: several learners hold the same losses.
    """

    mechanism = Mechanism.LAPLACE
    event = Event.ROUND
    any_messages = True

    def __init__(
        self,
        sensitivity: DualSensitivity,
        sigma: float,
        mode: str = "noised",
        paper_round: float = math.inf,
        shared: bool = False,
    ) -> None:
        self._of, self._sigma, self._paper_round, self.shared = sensitivity, sigma, paper_round, shared
        self._t, self._difference = 0, 0.0
        proof = (
            "Cheng, Liao & Li 2023, Theorem 2, corrected: conditional on the past; sottovoce.algorithms.dual_averaging"
        )
        self.grounds = Grounds(mode, proof, _constants(sensitivity))

    @property
    def difference(self) -> float:
        """`D_t` of the current round: l2."""
        return self._difference

    def next_loss(self) -> float:
        """`(sqrt(d_i) D_t + d_i grid) / sigma`, or 0 while nothing can differ."""
        return laplace_loss(math.sqrt(self._of.block) * self._difference, self._of.block, self._sigma)

    def advance(self, records: int, replaced: int | None = None) -> None:
        """The round is over; its loss is replaced where `replaced` is not 0."""
        self._difference = self._of.step(self._t, self._difference, self.differ(records, replaced) > 0)
        self._t += 1

    def paper(self, rounds: int) -> FloatArray:
        return np.arange(1.0, rounds + 1.0) * self._paper_round

    def infinite_horizon(self, counts: IntArray, replaced: IntArray | None) -> float:
        """The planned rounds, and beyond them a geometric series, without lattice, or infinity."""
        ran = copy.deepcopy(self)
        planned = float(metered(ran, counts, replaced).sum())
        return planned + _tail(self._of, self._sigma, ran.difference)


def sigma_for(sensitivities: list[DualSensitivity], rounds: int, epsilon: float) -> float:
    """The noise scale at which one replaced loss costs `epsilon` in total, over all rounds and these learners together.

    Raises:
        CheckFailed: EPSILON, if the lattice alone costs that much.
    """
    total = slack = 0.0
    for each in sensitivities:
        meter = DualAveragingAccountant(each, 1.0)
        for _ in range(rounds):
            total += math.sqrt(each.block) * meter.difference
            slack += math.ldexp(each.block, -GRID_BITS) if meter.difference else 0.0
            meter.advance(1)
    if epsilon <= slack:
        raise CheckFailed("EPSILON", f"epsilon must be above what rounding costs ({slack:.3g}), got {epsilon}")
    return total / (epsilon - slack)


def _tail(sensitivity: DualSensitivity, sigma: float, difference: float) -> float:
    """Bound on what all messages after the planned rounds cost, without lattice: a geometric series, or infinity."""
    if difference == 0.0:
        return 0.0
    contraction = sensitivity.factor * (sensitivity.smoothness + sensitivity.ridge) * sensitivity.later
    if sensitivity.later == 0.0:  # and G may be infinite
        contraction = 0.0
    if not contraction < 1.0 or sigma == 0.0:
        return math.inf
    return math.sqrt(sensitivity.block) * difference / (1.0 - contraction) / sigma


def _constants(sensitivity: DualSensitivity) -> dict[str, Constant]:
    """Every finite constant with what enforces it."""
    constants = {
        "block": Constant(float(sensitivity.block), "the partition of the coordinates"),
        "factor": Constant(sensitivity.factor, "the number of learners"),
        "gradient_bound": Constant(
            sensitivity.gradient_bound, "clipping of the block's gradient, or the loss on rows scaled to feature_bound"
        ),
    }
    if sensitivity.later:
        constants |= {
            "smoothness": Constant(sensitivity.smoothness, "the loss, on rows scaled to feature_bound"),
            "ridge": Constant(sensitivity.ridge, "the loss, exactly"),
            "diameter": Constant(sensitivity.diameter, "projection onto the decision set"),
        }
    return {name: constant for name, constant in constants.items() if constant.value < math.inf}
