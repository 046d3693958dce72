"""Accelerated gossip (Liu & Morse 2011), and the rate at which n learners agree on the mean of their vectors.

`m^{k+1} = (1+theta) P m^k - theta m^{k-1}` from `m^0 = m^-1`, with a symmetric doubly stochastic P. Every step keeps the mean,
and after K steps `m^K = Q_K m^0`. With sigma_2 the second largest singular value of P, `s = sqrt(1 - sigma_2^2)` and
`theta = 1/(1+s)`, for a positive semidefinite P::

    ||m^K - mean|| <= sqrt(2) (1+s)^(-K/2) ||m^0 - mean||

A P with a negative eigenvalue has no such bound; `(I+P)/2`, the lazy walk, has no negative eigenvalue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray, Scalars
from sottovoce_core.errors import AssumptionViolated
from sottovoce_core.network.topology import FixedNetwork

EIGENVALUE_TOLERANCE = 1e-12
"""Tolerance of an eigenvalue of P."""

LazyMode = bool | Literal["auto"]


@dataclass(frozen=True, slots=True, eq=False)
class Gossip:
    """A gossip matrix and its spectrum.

    Attributes:
        matrix: P, `(n, n)`, lazy or not.
        mixing_share: share of the topology's weights in P: 1, or 1/2 for the lazy walk.
        sigma_2: second largest singular value of P; 0 for one learner alone.
        min_eigenvalue: smallest eigenvalue of P.
    """

    matrix: FloatArray
    mixing_share: float
    sigma_2: float
    min_eigenvalue: float

    @classmethod
    def from_network(cls, network: FixedNetwork, lazy: LazyMode) -> Gossip:
        """Return the gossip matrix of a network.

        Args:
            network: symmetric, rows sum to one.
            lazy: take `(I+P)/2`; auto: only if P has a negative eigenvalue.

        Raises:
            AssumptionViolated: P_NEGATIVE or P_DISCONNECTED.
        """
        matrix, share = network.mixing(0).matrix, 1.0
        if lazy is True or (lazy == "auto" and np.linalg.eigvalsh(matrix)[0] < -EIGENVALUE_TOLERANCE):
            matrix, share = (np.eye(len(matrix)) + matrix) / 2.0, 0.5
        if matrix.min() < 0.0:
            text = "the mixing matrix must be doubly stochastic, with no negative weight"
            raise AssumptionViolated(
                "P_NEGATIVE", f"{text}, got {matrix.min():g}; lower the coupling weights, or take metropolis"
            )
        eigenvalues = np.linalg.eigvalsh(matrix)
        sigma_2 = float(np.abs(np.delete(eigenvalues, -1)).max(initial=0.0))
        if sigma_2 >= 1.0 - EIGENVALUE_TOLERANCE:
            text = "sigma_2 of the mixing matrix must be below 1, or learners never agree"
            raise AssumptionViolated(
                "P_DISCONNECTED", f"{text}, got {sigma_2:g}; connect the graph, or set lazy to true"
            )
        return cls(matrix, share, sigma_2, float(eigenvalues[0]))

    @property
    def n_learners(self) -> int:
        """Number of learners n."""
        return len(self.matrix)

    @property
    def spectral_gap(self) -> float:
        """Spectral gap `rho = 1 - sigma_2`."""
        return 1.0 - self.sigma_2

    @property
    def momentum(self) -> float:
        """Momentum `theta = 1/(1+s)`."""
        return 1.0 / (1.0 + self._s)

    def paper_steps(self, rounds: int) -> int:
        """Return `ceil(4 ln(nT sqrt(14 n)) / sqrt(rho))`: Theorem 3.6, (7), for an error of `2/(nT)` of the largest vector."""
        n = self.n_learners
        return max(1, math.ceil(4.0 * math.log(n * rounds * math.sqrt(14.0 * n)) / math.sqrt(self.spectral_gap)))

    def sharp_steps(self, rounds: int) -> int:
        """Return `ceil(2 ln(nT sqrt(n/2)) / ln(1+s))`: the same error by the module's bound, with about half as many steps."""
        n = self.n_learners
        if n == 1:
            return 1
        return max(1, math.ceil(2.0 * math.log(n * rounds * math.sqrt(n / 2.0)) / math.log1p(self._s)))

    def polynomial(self, steps: int, momentum: float) -> FloatArray:
        """Return `Q_K`, `(n, n)`: the effect of `steps` steps on the vectors of all learners. Its rows and columns sum to 1."""
        before = after = np.eye(self.n_learners)
        for _ in range(steps):
            before, after = after, (1.0 + momentum) * (self.matrix @ after) - momentum * before
        return after

    def mix(self, own_message: FloatArray, neighbour_sum: FloatArray, own_weight: Scalars) -> FloatArray:
        """Compute `P m` for one learner, or for all.

        Args:
            own_message: the learner's own message.
            neighbour_sum: the topology's weighted sum over neighbours.
            own_weight: the topology's weight of the own value.
        """
        if self.mixing_share == 1.0:
            return own_weight * own_message + neighbour_sum
        return (1.0 - self.mixing_share * (1.0 - own_weight)) * own_message + self.mixing_share * neighbour_sum

    @property
    def _s(self) -> float:
        return math.sqrt(1.0 - self.sigma_2**2)
