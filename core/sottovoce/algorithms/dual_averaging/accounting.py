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

import math
from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.errors import CheckFailed, SpecError
from sottovoce.noise import GRID_BITS
from sottovoce.noise.mechanisms import laplace_loss
from sottovoce.privacy.guarantee import Constant, Guarantee, ThreatModel


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """What moves one learner's messages.

    Attributes:
        block: d_i, number of coordinates that the learner's gradients enter.
        factor: k, in front of a gradient.
        gradient_bound: B, l2, of the gradient's data part on the block.
        smoothness: G, Lipschitz constant of that part in the decision; infinite: unknown.
        ridge: r.
        diameter: l2, of the part of the decision set in which the learner's decisions can differ.
        carry: `(rounds,)` Lipschitz constant c_t of the decision of round t in the clean dual vector.
        later: bound on c_t beyond the planned rounds; infinite: unknown.
    """

    block: int
    factor: float
    gradient_bound: float
    smoothness: float
    ridge: float
    diameter: float
    carry: FloatArray
    later: float

    @property
    def swing(self) -> float:
        """`2 k B`: l2 change of the dual vector right after a replaced loss."""
        return 2.0 * self.factor * self.gradient_bound

    def step(self, t: int, difference: float, replaced: bool) -> float:
        """`D_{t+1}` from `D_t`."""
        moved = min(self.diameter, float(self.carry[t]) * difference)
        data = 2.0 * self.gradient_bound
        if not replaced:
            data = min(data, self.smoothness * moved) if moved else 0.0
        return self.factor * (data + self.ridge * moved)


def never_growing(carry: FloatArray) -> FloatArray:
    """Each entry replaced by the largest from there on."""
    envelope: FloatArray = np.maximum.accumulate(carry[::-1])[::-1]
    return envelope


class DualAveragingAccountant:
    """Running meter of one learner: implements `Accountant`, O(1) a round."""

    def __init__(self, sensitivity: Sensitivity, sigma: float) -> None:
        self._of, self._sigma = sensitivity, sigma
        self._t, self._difference, self._seen = 0, 0.0, False

    @property
    def difference(self) -> float:
        """`D_t` of the current round: l2."""
        return self._difference

    def next_loss(self) -> float:
        """`(sqrt(d_i) D_t + d_i grid) / sigma`, or 0 while nothing can differ."""
        return laplace_loss(math.sqrt(self._of.block) * self._difference, self._of.block, self._sigma)

    def advance(self, new_records: int, replaced: bool | None = None) -> None:
        """The round is over. By default the loss of the first round with records is replaced: no later one costs more."""
        if replaced is None:
            replaced = new_records > 0 and not self._seen
        self._seen = self._seen or new_records > 0
        self._difference = self._of.step(self._t, self._difference, replaced)
        self._t += 1


def calibrate(sensitivities: list[Sensitivity], rounds: int, epsilon: float) -> float:
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


def dual_averaging_guarantee(
    sensitivity: Sensitivity,
    sigma: float,
    rounds: int,
    *,
    paper_round: float,
    adjacency: str,
    mode: str,
    counts: IntArray | None = None,
    replaced: IntArray | None = None,
) -> Guarantee:
    """The meter run over the planned rounds.

    Args:
        paper_round: epsilon of one round by the paper's own formula, which it multiplies by the number of rounds.
        adjacency: what is replaced, for a reader.
        mode: of the primal step.
        counts: `(rounds,)` new records of each round (default: one each).
        replaced: `(rounds,)`; the loss of a round is replaced where this is not 0 (default: the first with records).

    Raises:
        SpecError: wrong shapes.
    """
    meter = DualAveragingAccountant(sensitivity, sigma)
    per_round = np.empty(rounds)
    for name, numbers in (("counts", counts), ("replaced", replaced)):
        if numbers is not None and np.shape(numbers) != (rounds,):
            raise SpecError(f"{name} must be {rounds} whole numbers, got {numbers}")
    for t in range(rounds):
        per_round[t] = meter.next_loss()
        meter.advance(1 if counts is None else int(counts[t]), None if replaced is None else bool(replaced[t]))
    return Guarantee(
        threat_model=ThreatModel.WIRE,
        adjacency=adjacency,
        mode=mode,
        per_round=per_round,
        paper=np.arange(1.0, rounds + 1.0) * paper_round,
        infinite_horizon=float(per_round.sum()) + _tail(sensitivity, sigma, meter.difference),
        proof="Cheng, Liao & Li 2023, Theorem 2, corrected: conditional on the past; sottovoce.algorithms.dual_averaging",
        constants=_grounds(sensitivity),
    )


def _tail(sensitivity: Sensitivity, sigma: float, difference: float) -> float:
    """Bound on what all messages after the planned rounds cost, without lattice: a geometric series, or infinity."""
    if difference == 0.0:
        return 0.0
    contraction = sensitivity.factor * (sensitivity.smoothness + sensitivity.ridge) * sensitivity.later
    if sensitivity.later == 0.0:  # and G may be infinite
        contraction = 0.0
    if not contraction < 1.0 or sigma == 0.0:
        return math.inf
    return math.sqrt(sensitivity.block) * difference / (1.0 - contraction) / sigma


def _grounds(sensitivity: Sensitivity) -> dict[str, Constant]:
    """Every finite constant with what enforces it."""
    grounds = {
        "block": Constant(float(sensitivity.block), "the partition of the coordinates"),
        "factor": Constant(sensitivity.factor, "the number of learners"),
        "gradient_bound": Constant(
            sensitivity.gradient_bound, "clipping of the block's gradient, or the loss on rows scaled to feature_bound"
        ),
    }
    if np.any(sensitivity.carry):
        grounds |= {
            "smoothness": Constant(sensitivity.smoothness, "the loss, on rows scaled to feature_bound"),
            "ridge": Constant(sensitivity.ridge, "the loss, exactly"),
            "diameter": Constant(sensitivity.diameter, "projection onto the decision set"),
        }
    return {name: ground for name, ground in grounds.items() if ground.value < math.inf}
