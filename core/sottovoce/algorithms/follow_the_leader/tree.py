"""The noise of a binary-tree counter (Dwork et al. 2010), one vector per leaf, in memory that grows like the logarithm.

Node r covers the leaves `(r - lowbit(r), r]` and has one noise b(r), drawn when leaf r arrives. The sum over leaves 1..z
carries the noise of the nodes `z, z - lowbit(z), ... > 0`, one per binary one of z. These are the open nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray


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

    def merged(self, leaf: int) -> FloatArray:
        """Sum of the noise that goes away when `leaf` arrives, because its node swallows the nodes that carry it.

        The prefix sum's noise changes by `b(leaf)` less this: `xi(z) = b(z) - sum over l < tz(z) of b(z - 2^l)`.
        """
        kept = len(self.noise) - lowbit(leaf).bit_length() + 1
        total: FloatArray = sum(self.noise[kept:], np.zeros(()))
        return total

    def with_leaf(self, leaf: int, noise: FloatArray) -> OpenNodes:
        """The open nodes after `leaf`, whose node has this noise."""
        kept = len(self.noise) - lowbit(leaf).bit_length() + 1
        return OpenNodes((*self.noise[:kept], noise))
