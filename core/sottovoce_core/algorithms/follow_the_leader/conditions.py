"""What the theory of PD-FTGL and PD-OCG asks of a run, and the parameters it proposes (Wang et al., ICML 2025).

What would void the privacy guarantee or leave the algorithm undefined is refused. What only voids a regret theorem, or an
expectation of the user's, is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sottovoce_core.algorithms.follow_the_leader.accounting import Blocks, LeafSensitivity, levels
from sottovoce_core.algorithms.follow_the_leader.gossip import Gossip
from sottovoce_core.algorithms.setting import Caveat, Setting
from sottovoce_core.arrays import MOST_NUMBERS
from sottovoce_core.errors import CheckFailed

_BISECTIONS = 64
"""Between any two numbers of float64 forty suffice: the ratio's logarithm, at most 1500, is halved down to 1e-9."""
MOST_STEPS = 2**20
"""Of gossip in a block: each is a product of two matrices before the run begins."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What the formulas know of a run.

    Attributes:
        rounds: T.
        radius: R, largest l2 norm in the decision set.
        lipschitz: G, bound on a record's data gradient; may be infinite.
        alpha: strong convexity; the loss's exact ridge.
    """

    rounds: int
    radius: float
    lipschitz: float
    alpha: float

    def paper_numerator(self, dim: int) -> float:
        """`6 sqrt(d) (G + alpha R) (2 + log2 T)`: epsilon times Laplace scale in Theorem 3.6."""
        bound = self.lipschitz + self.alpha * self.radius
        return 6.0 * math.sqrt(dim) * bound * (2.0 + math.log2(self.rounds))

    def regularization(self, length: int, lag: float, error: float) -> float:
        """The h that the regret bound (8) is least for, and `alpha L` where that is larger.

        The bound, a learner: `h R^2 + L sum_z lag G L (G + 2 alpha R)/(alpha z L + 2h) + L sum_z 3 G E/(alpha z L + 2h)`, the
        second sum from z = 0. For alpha = 0 that is `sqrt(G T (lag G L + 3 E)/2) / R`.

        Args:
            length: L.
            lag: how strongly waiting for blocks counts: 12 in (8), and 30 in (11) with its last term.
            error: E, expected l2 distance of the learner's prefix sum from the exact mean.

        Raises:
            CheckFailed: GRADIENT_BOUND or REGULARIZATION.
        """
        G, R, L, alpha = require_bound(self.lipschitz, "the default regularization"), self.radius, length, self.alpha
        lagging, noisy = lag * G * L * (G + 2.0 * alpha * R), 3.0 * G * error
        low, high = alpha * L, math.sqrt(self.rounds * (lagging + noisy) / 2.0) / R
        if not math.isfinite(high):
            text = "the default regularization must be a finite number, got one beyond float64"
            raise CheckFailed("REGULARIZATION", f"{text}; take less noise or a smaller loss, or set regularization")
        if not low:
            return high
        blocks = math.ceil(self.rounds / L)
        if blocks >= MOST_NUMBERS:
            text = f"the default regularization is found for fewer than {MOST_NUMBERS} blocks, got {blocks}"
            raise CheckFailed("REGULARIZATION", f"{text}; set regularization, or a longer block")
        grown = alpha * L * np.arange(blocks + 1)

        def falling(h: float) -> bool:
            """Would a larger h make the bound less?"""
            c = (grown + 2.0 * h) ** -2
            return bool(2.0 * L * (lagging * c[1:].sum() + noisy * c[:-1].sum()) > R * R)

        if not falling(low):
            return low
        for _ in range(_BISECTIONS):
            if high / low <= 1.0 + 1e-9:
                break
            middle = math.sqrt(low) * math.sqrt(high)
            low, high = (middle, high) if falling(middle) else (low, middle)
        return high


def problem_of(setting: Setting) -> Problem:
    """Read off the setting.

    Raises:
        CheckFailed: ORIGIN or ENDLESS.
    """
    setting.require_end("an algorithm whose regularization follows from the number of rounds")
    if not setting.decision_set.contains_origin:
        raise CheckFailed("ORIGIN", "the decision set must contain the origin (Assumption 3.1), got one that does not")
    radius = setting.decision_set.largest_norm(setting.dim)
    return Problem(setting.rounds, radius, setting.loss.gradient_bound(radius), setting.loss.ridge)


def require_bound(lipschitz: float, what: str) -> float:
    """G, if there is one.

    Raises:
        CheckFailed: GRADIENT_BOUND.
    """
    if lipschitz == math.inf:
        text = f"{what} rests on a bound of a record's gradient, got none"
        raise CheckFailed("GRADIENT_BOUND", f"{text}; set loss.clip_norm")
    return lipschitz


def plan_blocks(rounds: int, length: int, steps: int, delay: int, advice: int) -> Blocks:
    """The schedule.

    Args:
        rounds: T.
        length: L.
        steps: K.
        delay: blocks at the end whose sums no decision needs.
        advice: a shorter block that would do.

    Raises:
        CheckFailed: BLOCK_LENGTH or GOSSIP_STEPS.
    """
    enough = f"rounds of at least {2 * length + 1}"
    hint = f"set {enough}, or block_length to {advice}" if 2 * advice < rounds else f"set {enough}, or a shorter block"
    if not 1 <= length <= rounds:
        raise CheckFailed("BLOCK_LENGTH", f"block_length must be in 1..horizon={rounds}, got {length}; {hint}")
    if 2 * length >= rounds:
        text = f"block_length must be below half the horizon ({rounds} rounds), else no decision ever moves"
        raise CheckFailed("BLOCK_LENGTH", f"{text}, got {length}; {hint}")
    if steps > length:
        text = f"gossip_steps must not exceed block_length={length}, got {steps}"
        raise CheckFailed("GOSSIP_STEPS", f"{text}; raise block_length or lower gossip_steps")
    if steps > MOST_STEPS:
        raise CheckFailed("GOSSIP_STEPS", f"gossip_steps must be at most {MOST_STEPS}, got {steps}; set it")
    return Blocks(rounds, length, steps, max(math.ceil(rounds / length) - delay, 0))


def prefix_error(scale: float, dim: int, blocks: Blocks, gossip: Gossip, momentum: float, *, before: bool) -> float:
    """Bound on E, the l2 size of the noise in a prefix sum: `b sqrt(2 d levels)`, of which gossip before averages n copies."""
    noise = scale * math.sqrt(2.0 * dim * levels(blocks.leaves))
    n = gossip.n_learners
    return noise * (1.0 / math.sqrt(n) + math.sqrt(2.0 * n) * momentum ** (blocks.steps / 2.0)) if before else noise


def findings(
    blocks: Blocks, gossip: Gossip, sensitivity: LeafSensitivity, *, exposed: bool, paper_scale: bool
) -> Iterator[Caveat]:
    """What the run's user is told."""
    sharp, paper = gossip.sharp_steps(blocks.rounds), gossip.paper_steps(blocks.rounds)
    if not blocks.leaves:
        count = math.ceil(blocks.rounds / blocks.length)
        yield Caveat(
            "NO_MOVE", f"no decision ever moves: there must be one block more, got {count}; shorten block_length"
        )
    if blocks.steps < sharp:
        text = "learners agree less than Theorems 3.6 and 3.9 assume: gossip_steps should be at least"
        yield Caveat(
            "GOSSIP_SHORT", f"{text} {sharp}, got {blocks.steps}; the regret bounds do not apply, privacy does"
        )
    if paper_scale and blocks.steps < paper:
        text = "the paper's noise scale rests on gossip_steps of at least"
        yield Caveat("PAPER_SCALE", f"{text} {paper}, got {blocks.steps}; the claim is computed from the steps taken")
    if exposed:
        text = "noise_placement after_gossip says sums of gradients without noise: on the wire epsilon is infinite"
        hint = "only published decisions are protected; take before_gossip"
        yield Caveat("WIRE_EXPOSED", f"{text}, and {hint} (a record moves a sum by up to {sensitivity.change:g})")
