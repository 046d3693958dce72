"""What PD-FTGL and PD-OCG cost (Wang et al., ICML 2025, Theorem 3.6, and the wire-private variant).

Rounds come in blocks of L. Block sums are the leaves of a learner's tree counter; the noise of a node is drawn when its last
leaf is said. Given all nodes completed before, two adjacent worlds have taken equal decisions, so only the block with the
replaced record has another sum, and its gradients differ at one and the same decision: by at most C in l2, `C sqrt(d)` in
l1. Each of the at most `levels(N)` nodes above that leaf costs `C sqrt(d) / b`, with b the Laplace scale of a coordinate.

Before gossip a learner's own tree protects its sums, wherever they go. After gossip nothing protects what is said; the
decisions alone are protected, and learner j's sum reaches decision i with weight `|Q_ij|`, so a node costs
`sum_i |Q_ij| C sqrt(d) / b_i`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sottovoce.algorithms.follow_the_leader.tree import levels, lowbit
from sottovoce.arrays import FloatArray, IntArray
from sottovoce.errors import SpecError
from sottovoce.noise import GRID_BITS
from sottovoce.noise.mechanisms import laplace_loss

NodeCost = Callable[[float], float]
"""Loss of one node above a leaf in which records of weight `share` are replaced: a record alone in its round has weight 1."""

MARGIN = 1e-9
"""Part of a target that is left unspent, so that rounding never carries a total over a budget of the same size."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which round does what. Rounds and blocks count from 0, leaves from 1: leaf z is the sum of block z-1, said in block z.

    Attributes:
        rounds: T.
        length: L rounds of a block; the last one may be shorter.
        steps: K gossip steps, in the first rounds of a block.
        leaves: N, the block sums that are said at all: later ones would never reach a decision that is used.
    """

    rounds: int
    length: int
    steps: int
    leaves: int

    def leaf(self, t: int) -> int:
        """The leaf that round t gossips, or 0."""
        leaf, step = divmod(t, self.length)
        return leaf if leaf <= self.leaves and step < self.steps else 0

    def opens(self, t: int) -> bool:
        """Is round t the first of its block?"""
        return t % self.length == 0

    def closes(self, t: int) -> bool:
        """Is round t the last of its block?"""
        return (t + 1) % self.length == 0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Dimension d, and C, the largest l2 distance between two records' gradients at one decision."""

    dim: int
    change: float

    def loss(self, weight: float, scale: float) -> float:
        """Of one node with Laplace noise of this scale, where the leaf moves by `weight C`; with the lattice's slack."""
        return laplace_loss(weight * math.sqrt(self.dim) * self.change, self.dim, scale)

    def scale(self, epsilon: float, leaves: int, reach: float = 1.0, trees: int = 1) -> float:
        """The Laplace scale at which the worst record costs epsilon; 0 for an infinite one, or for no leaf at all.

        Args:
            epsilon: above 0.
            leaves: N.
            reach: total weight with which one learner's sum enters the trees that are released.
            trees: how many those are: each rounds to its lattice.

        Raises:
            SpecError: epsilon is below the lattice's slack.
        """
        if epsilon == math.inf or not leaves:
            return 0.0
        slack = levels(leaves) * trees * self.dim * 2.0**-GRID_BITS
        spendable = epsilon * (1.0 - MARGIN) - slack
        if spendable <= 0.0:
            raise SpecError(
                f"algorithm.epsilon must be above {slack:g}, the slack of the noise's lattice, got {epsilon:g}"
            )
        return levels(leaves) * reach * math.sqrt(self.dim) * self.change / spendable


class TreeAccountant:
    """Running meter of one learner: implements `Accountant`. It charges a leaf's node when the leaf is first said.

    What is charged is what the dearest record has cost so far: with one record a round, one of the first block.
    """

    def __init__(self, blocks: Blocks, cost: NodeCost) -> None:
        self._blocks, self._cost = blocks, cost
        self._meter = _Meter(blocks.leaves)
        self._round = 0
        self._share = self._due = 0.0

    def next_loss(self) -> float:
        return self._due

    def advance(self, new_records: int) -> None:
        if new_records:
            self._share = max(self._share, 1.0 / new_records)
        self._round += 1
        self._due = 0.0
        if self._blocks.opens(self._round):
            if self._blocks.leaf(self._round):
                self._due = self._meter.add(self._cost(self._share))
            self._share = 0.0


class _Meter:
    """What the dearest record has cost, leaf by leaf."""

    def __init__(self, leaves: int) -> None:
        self._costs, self._spent = np.zeros(leaves), np.zeros(leaves)
        self._leaf, self._worst = 0, 0.0

    def add(self, cost: float) -> float:
        """The next leaf arrives, whose dearest record costs so much a node: how much more that makes."""
        self._leaf += 1
        self._costs[self._leaf - 1] = cost
        covered = slice(self._leaf - lowbit(self._leaf), self._leaf)
        self._spent[covered] += self._costs[covered]
        before, self._worst = self._worst, max(self._worst, float(self._spent[covered].max()))
        return self._worst - before if before < math.inf else math.inf


def tree_losses(
    blocks: Blocks, cost: NodeCost, counts: IntArray | None = None, replaced: IntArray | None = None
) -> FloatArray:
    """`(rounds,)` losses of the messages of all rounds.

    Args:
        blocks: what is said when.
        cost: of a node.
        counts: `(rounds,)` records of each round (default: one each).
        replaced: `(rounds,)` of them that differ (default: one, the dearest).

    Raises:
        SpecError: wrong shapes or counts.
    """
    count = np.ones(blocks.rounds) if counts is None else _planned("counts", counts, blocks.rounds)
    losses, sums = np.zeros(blocks.rounds), slice(0, blocks.leaves * blocks.length)
    # Leaves are whole blocks: the last block, which may be shorter, is never said.
    if replaced is None:
        meter = _Meter(blocks.leaves)
        single = np.divide(1.0, count, out=np.zeros_like(count), where=count > 0)
        shares = single[sums].reshape(blocks.leaves, blocks.length).max(axis=1, initial=0.0)
        added = [meter.add(cost(float(share))) for share in shares]
    else:
        changed = _planned("replaced", replaced, blocks.rounds)
        if (changed > count).any():
            raise SpecError("replaced must be at most counts in every round, got more records replaced than there are")
        moved = np.divide(changed, count, out=np.zeros_like(count), where=count > 0)
        costs = np.array([cost(float(m)) for m in moved[sums].reshape(blocks.leaves, blocks.length).sum(axis=1)])
        added = [float(costs[r - lowbit(r) : r].sum()) for r in range(1, blocks.leaves + 1)]
    losses[blocks.length : (blocks.leaves + 1) * blocks.length : blocks.length] = added
    return losses


def _planned(name: str, numbers: IntArray, rounds: int) -> FloatArray:
    plan = np.asarray(numbers, dtype=np.float64)
    if plan.shape != (rounds,) or not (plan >= 0).all():
        raise SpecError(f"{name} must be {rounds} whole numbers of at least 0, got {numbers}")
    return plan
