"""What PD-FTGL and PD-OCG cost, and the noise of a binary-tree counter.

The noise of a binary-tree counter (Dwork et al. 2010), one vector per leaf, in memory that grows like the logarithm.

Node r covers the leaves `(r - lowbit(r), r]` and has one noise b(r), drawn when leaf r arrives. The sum over leaves 1..z
carries the noise of the nodes `z, z - lowbit(z), ... > 0`, one per binary one of z. These are the open nodes.

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

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.noise.mechanisms import laplace_loss
from sottovoce_core.privacy.accountant import Accountant, require_replaced_count
from sottovoce_core.privacy.guarantee import GuaranteeBasis, Mechanism

# ---- tree ------------------------------------------------------------------------------------------------------------


def lowbit(leaf: int) -> int:
    """The largest power of two that divides it: how many leaves node `leaf` covers."""
    return leaf & -leaf


def levels(leaves: int) -> int:
    """`floor(log2 N) + 1`, 0 for N = 0: the most nodes of 1..N that cover one leaf. Leaf 1 is covered by so many."""
    return leaves.bit_length()


@dataclass(frozen=True, slots=True)
class OpenNodes:
    """Noise of the open nodes, the node that covers most first: a value."""

    noise: tuple[FloatArray, ...] = ()

    def merged_noise(self, leaf: int) -> FloatArray:
        """Sum of the noise that goes away when `leaf` arrives, because its node swallows the nodes that carry it.

        The prefix sum's noise changes by `b(leaf)` less this: `xi(z) = b(z) - sum over l < tz(z) of b(z - 2^l)`.
        """
        kept = len(self.noise) - lowbit(leaf).bit_length() + 1
        total: FloatArray = sum(self.noise[kept:], np.zeros(()))
        return total

    def add_leaf(self, leaf: int, noise: FloatArray) -> OpenNodes:
        """The open nodes after `leaf`, whose node has this noise."""
        kept = len(self.noise) - lowbit(leaf).bit_length() + 1
        return OpenNodes((*self.noise[:kept], noise))


# ---- accounting ------------------------------------------------------------------------------------------------------

TreeNodeCost = Callable[[float], float]
"""Loss of one node above a leaf in which records of weight `share` are replaced: a record alone in its round has weight 1."""

_MARGIN = 1e-9
"""Part of a target that is left unspent, so that rounding never carries a total over a budget of the same size."""


@dataclass(frozen=True, slots=True)
class BlockSchedule:
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

    def is_block_start(self, t: int) -> bool:
        """Is round t the first of its block?"""
        return t % self.length == 0

    def is_block_end(self, t: int) -> bool:
        """Is round t the last of its block?"""
        return (t + 1) % self.length == 0


@dataclass(frozen=True, slots=True)
class LeafSensitivity:
    """Dimension d, and C, the largest l2 distance between two records' gradients at one decision."""

    dim: int
    gradient_change: float

    def node_privacy_loss(self, weight: float, scale: float) -> float:
        """Of one node with Laplace noise of this scale, where the leaf moves by `weight C`; with the lattice's slack."""
        return laplace_loss(weight * math.sqrt(self.dim) * self.gradient_change, self.dim, scale)

    def calibrate_scale(self, epsilon: float, leaves: int, total_weight: float = 1.0, n_trees: int = 1) -> float:
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
        slack = levels(leaves) * n_trees * self.dim * 2.0**-LATTICE_BITS
        spendable = epsilon * (1.0 - _MARGIN) - slack
        if spendable <= 0.0:
            raise SpecError(
                f"algorithm.epsilon must be above {slack:g}, the slack of the noise's lattice, got {epsilon:g}"
            )
        return levels(leaves) * total_weight * math.sqrt(self.dim) * self.gradient_change / spendable


class TreeAccountant(Accountant):
    """Running meter of one learner. It charges a leaf's node when the leaf is first said.

    What is charged is what the dearest record has cost so far: with one record a round, one of the first block.

    Args:
        blocks: what is said when.
        cost: of a node.
        grounds: what the numbers rest on.
        paper: cumulative epsilon by the paper from the first leaf on: of published decisions alone.
        published: the meter of published decisions, where they are promised something of their own.
    """

    mechanism = Mechanism.LAPLACE
    can_track_replacements = True

    def __init__(
        self,
        blocks: BlockSchedule,
        cost: TreeNodeCost,
        basis: GuaranteeBasis = Accountant.basis,
        paper_epsilon: float = math.inf,
        output_accountant: TreeAccountant | None = None,
    ) -> None:
        self._blocks, self._cost, self._paper = blocks, cost, paper_epsilon
        self.basis, self.output_accountant = basis, output_accountant
        self._nodes = _Nodes(blocks.leaves)
        self._round = 0
        self._share = self._due = 0.0

    def next_loss(self) -> float:
        return self._due

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        require_replaced_count(records, n_replaced or 0)
        if records:
            told = n_replaced is not None
            self._share = self._share + (n_replaced or 0) / records if told else max(self._share, 1.0 / records)
        self._round += 1
        self._due = 0.0
        if self._blocks.is_block_start(self._round):
            if self._blocks.leaf(self._round):
                cost = self._cost(self._share)
                self._due = self._nodes.dearest(cost) if n_replaced is None else self._nodes.covered(cost)
            self._share = 0.0

    def losses(self, counts: IntArray) -> FloatArray:
        """Leaf by leaf: runs are long, and most of their messages cost nothing."""
        leaves, length = self._blocks.leaves, self._blocks.length
        nodes, losses = _Nodes(leaves), np.zeros(len(counts))
        # Leaves are whole blocks: the last block, which may be shorter, is never said.
        single = np.divide(1.0, counts, out=np.zeros(len(counts)), where=counts > 0)[: leaves * length]
        shares = single.reshape(leaves, length).max(axis=1, initial=0.0)
        losses[length : (leaves + 1) * length : length] = [nodes.dearest(self._cost(float(each))) for each in shares]
        return losses

    def paper_epsilon(self, rounds: int) -> FloatArray:
        paper = np.zeros(rounds)
        if self._blocks.leaves:
            paper[self._blocks.length :] = self._paper
        return paper


class _Nodes:
    """The nodes so far, leaf by leaf: what each costs about the records of one leaf, and what the dearest leaf has cost."""

    def __init__(self, leaves: int) -> None:
        self._costs, self._spent = np.zeros(leaves), np.zeros(leaves)
        self._leaf, self._worst = 0, 0.0

    def dearest(self, cost: float) -> float:
        """The next leaf arrives, whose dearest record costs so much a node: how much more the dearest of all has cost."""
        covered = self._arrived(cost)
        self._spent[covered] += self._costs[covered]
        before, self._worst = self._worst, max(self._worst, float(self._spent[covered].max()))
        return self._worst - before if before < math.inf else math.inf

    def covered(self, cost: float) -> float:
        """The next leaf arrives, in which a change costs so much a node: what its node costs, about all leaves below it."""
        return float(self._costs[self._arrived(cost)].sum())

    def _arrived(self, cost: float) -> slice:
        """The leaves below the node of the leaf that arrives."""
        self._leaf += 1
        self._costs[self._leaf - 1] = cost
        return slice(self._leaf - lowbit(self._leaf), self._leaf)
