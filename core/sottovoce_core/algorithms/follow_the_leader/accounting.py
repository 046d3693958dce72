"""Privacy accountant of PD-FTGL and PD-OCG, and the noise of a binary-tree counter.

The counter (Dwork et al. 2010) adds one vector per leaf, with memory logarithmic in the number of leaves.

Node r covers the leaves `(r - lowbit(r), r]` and has one noise b(r), drawn when leaf r arrives. The sum over leaves 1..z
carries the noise of the nodes `z, z - lowbit(z), ... > 0`, one per binary one of z. These are the open nodes.

Rounds come in blocks of L. Block sums are the leaves of a learner's tree counter; the noise of a node is drawn when its last
leaf is sent. Given all nodes completed before, two adjacent worlds have taken equal decisions, so only the block with the
replaced record has another sum, and its gradients differ at the same decision: by at most C in l2, `C sqrt(d)` in
l1. Each of the at most `levels(N)` nodes above that leaf costs `C sqrt(d) / b`, with b the Laplace scale of a coordinate.

With noise before gossip, a learner's own tree protects its sums everywhere. With noise after gossip, messages are not
protected, only decisions; learner j's sum enters decision i with weight `|Q_ij|`, so a node costs
`sum_i |Q_ij| C sqrt(d) / b_i`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray, as_floats
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import LATTICE_BITS
from sottovoce_core.noise.mechanisms import laplace_loss
from sottovoce_core.privacy.accountant import Accountant, require_replaced_count
from sottovoce_core.privacy.guarantee import GuaranteeBasis
from sottovoce_core.privacy.loss import ORDERS, PURE, Mechanism

# ---- tree ------------------------------------------------------------------------------------------------------------


def lowbit(leaf: int) -> int:
    """Return the largest power of two that divides `leaf`: the number of leaves that node `leaf` covers."""
    return leaf & -leaf


def levels(leaves: int) -> int:
    """Return `floor(log2 N) + 1`, 0 for N = 0: the maximum number of nodes of 1..N that cover one leaf, attained by leaf 1."""
    return leaves.bit_length()


@dataclass(frozen=True, slots=True)
class OpenNodes:
    """Noise of the open nodes, the node with the most leaves first: an immutable value."""

    noise: tuple[FloatArray, ...] = ()

    def merged_noise(self, leaf: int) -> FloatArray:
        """Return the sum of the noise that `leaf` removes, because its node replaces the nodes with that noise.

        The prefix sum's noise changes by `b(leaf)` less this: `xi(z) = b(z) - sum over l < tz(z) of b(z - 2^l)`.
        """
        kept = len(self.noise) - lowbit(leaf).bit_length() + 1
        total: FloatArray = sum(self.noise[kept:], np.zeros(()))
        return total

    def add_leaf(self, leaf: int, noise: FloatArray) -> OpenNodes:
        """Return the open nodes after `leaf`, whose node has this noise."""
        kept = len(self.noise) - lowbit(leaf).bit_length() + 1
        return OpenNodes((*self.noise[:kept], noise))


# ---- accounting ------------------------------------------------------------------------------------------------------

TreeNodeCost = Callable[[float], float]
"""Loss of one node above a leaf by the weight of its replaced records: a record alone in its round has weight 1."""

_MARGIN = 1e-9
"""Share of a target that stays unspent, so that rounding never lifts a total above a budget of the same size."""


@dataclass(frozen=True, slots=True)
class BlockSchedule:
    """Schedule of blocks. Rounds and blocks count from 0, leaves from 1: leaf z is the sum of block z-1, sent in block z.

    Attributes:
        rounds: T.
        length: L rounds of a block; the last one may be shorter.
        steps: K gossip steps, in the first rounds of a block.
        leaves: N, number of block sums that are sent: later ones would never enter a decision that is used.
    """

    rounds: int
    length: int
    steps: int
    leaves: int

    def leaf(self, t: int) -> int:
        """Return the leaf that round t gossips, or 0."""
        leaf, step = divmod(t, self.length)
        return leaf if leaf <= self.leaves and step < self.steps else 0

    def is_block_start(self, t: int) -> bool:
        """Return whether round t is the first of its block."""
        return t % self.length == 0

    def is_block_end(self, t: int) -> bool:
        """Return whether round t is the last of its block."""
        return (t + 1) % self.length == 0


@dataclass(frozen=True, slots=True)
class LeafSensitivity:
    """Dimension d, and C, the largest l2 distance between two records' gradients at one decision."""

    dim: int
    gradient_change: float

    def node_privacy_loss(self, weight: float, scale: float) -> float:
        """Return the loss of a node with Laplace noise of this scale if the leaf moves by `weight C`, with lattice slack."""
        return laplace_loss(weight * math.sqrt(self.dim) * self.gradient_change, self.dim, scale)

    def calibrate_scale(self, epsilon: float, leaves: int, total_weight: float = 1.0, n_trees: int = 1) -> float:
        """Return the Laplace scale at which the worst-case record costs epsilon; 0 for infinite epsilon or without leaves.

        Args:
            epsilon: above 0.
            leaves: N.
            total_weight: total weight with which one learner's sum enters the released trees.
            n_trees: number of released trees: each rounds to its lattice.

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
    """Privacy accountant of one learner. It charges a leaf's node when the leaf is first sent.

    It charges the largest total of any record so far: with one record a round, that of a record of the first block.

    Args:
        blocks: schedule of blocks.
        cost: loss of a node.
        mechanism: noise mechanism of a node.
        basis: assumptions and proof of the numbers.
        paper_epsilon: cumulative epsilon of the paper from the first leaf on, for published decisions only.
        output_accountant: accountant of published decisions, if they have a guarantee of their own.
    """

    can_track_replacements = True

    def __init__(
        self,
        blocks: BlockSchedule,
        cost: TreeNodeCost,
        mechanism: Mechanism = PURE,
        basis: GuaranteeBasis = Accountant.basis,
        paper_epsilon: float = math.inf,
        output_accountant: TreeAccountant | None = None,
    ) -> None:
        self._blocks, self._cost, self._paper = blocks, cost, paper_epsilon
        self.mechanism, self.basis, self.output_accountant = mechanism, basis, output_accountant
        self._nodes = _Nodes(blocks.leaves)
        self._round = 0
        self._share = self._due = 0.0
        self._due_message: float | None = None
        self._renyi_spent = self._renyi_total = np.zeros(len(ORDERS))

    def next_loss(self) -> float:
        return self._due

    def next_renyi(self) -> FloatArray:
        """Return the rise of the largest total of any leaf, or for a followed change the divergences of its nodes."""
        if self._due_message is not None:
            return as_floats(self.mechanism.compute_renyi(np.array([self._due_message]))[0])
        total = self._nodes.compute_worst_renyi(self.mechanism)
        self._renyi_total, spent = total, self._renyi_spent
        return as_floats(np.subtract(total, spent, out=np.full(len(ORDERS), math.inf), where=np.isfinite(spent)))

    def advance(self, records: int, n_replaced: int | None = None) -> None:
        require_replaced_count(records, n_replaced or 0)
        if records:
            is_tracked = n_replaced is not None
            self._share = self._share + (n_replaced or 0) / records if is_tracked else max(self._share, 1.0 / records)
        self._renyi_spent = self._renyi_total
        self._round += 1
        self._due = 0.0
        if self._blocks.is_block_start(self._round):
            if self._blocks.leaf(self._round):
                cost = self._cost(self._share)
                self._due = self._nodes.charge_worst(cost) if n_replaced is None else self._nodes.charge_change(cost)
            self._share = 0.0
        self._due_message = None if n_replaced is None else self._due

    def losses(self, counts: IntArray) -> FloatArray:
        """Return the losses, computed leaf by leaf: runs are long, and most of their messages cost nothing."""
        length = self._blocks.length
        # Leaves are complete blocks, each sent in the round after it: the last block, which may be shorter, is never sent.
        leaves = min(self._blocks.leaves, max(len(counts) - 1, 0) // length)
        nodes, losses = _Nodes(self._blocks.leaves), np.zeros(len(counts))
        single = np.divide(1.0, counts, out=np.zeros(len(counts)), where=counts > 0)[: leaves * length]
        shares = single.reshape(leaves, length).max(axis=1, initial=0.0)
        losses[length : (leaves + 1) * length : length] = [
            nodes.charge_worst(self._cost(float(each))) for each in shares
        ]
        return losses

    def paper_epsilon(self, rounds: int) -> FloatArray:
        paper = np.zeros(rounds)
        if self._blocks.leaves:
            paper[self._blocks.length :] = self._paper
        return paper


class _Nodes:
    """Nodes so far, leaf by leaf: the loss of each for the records of one leaf, and the largest total of any leaf."""

    def __init__(self, leaves: int) -> None:
        self._costs, self._spent = np.zeros(leaves), np.zeros(leaves)
        self._leaf, self._worst = 0, 0.0
        self._counts = np.zeros(leaves, np.int64)
        self._worst_by_count = np.zeros(levels(leaves) + 1)

    def charge_worst(self, cost: float) -> float:
        """Add a leaf whose worst-case record costs `cost` a node, and return the rise of the largest total of any leaf."""
        covered = self._add_leaf(cost)
        self._spent[covered] += self._costs[covered]
        self._counts[covered] += 1
        np.maximum.at(self._worst_by_count, self._counts[covered], self._costs[covered])
        before, self._worst = self._worst, max(self._worst, float(self._spent[covered].max()))
        return self._worst - before if before < math.inf else math.inf

    def charge_change(self, cost: float) -> float:
        """Add a leaf in which the change costs `cost` a node, and return the loss of its node for all leaves below it."""
        return float(self._costs[self._add_leaf(cost)].sum())

    def compute_worst_renyi(self, mechanism: Mechanism) -> FloatArray:
        """Return the largest total `(orders,)` of the Renyi divergences of any leaf: all nodes above a leaf cost the same."""
        counts = np.arange(len(self._worst_by_count), dtype=np.float64)[:, None]
        return as_floats((counts * mechanism.compute_renyi(self._worst_by_count)).max(axis=0))

    def _add_leaf(self, cost: float) -> slice:
        """Add a leaf and return the leaves below its node."""
        self._leaf += 1
        self._costs[self._leaf - 1] = cost
        return slice(self._leaf - lowbit(self._leaf), self._leaf)
