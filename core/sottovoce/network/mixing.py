"""The weights of one round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray

ROUNDING = 1e-12
"""How far sums of weights may be from what they must be, relative to the largest weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """The weights of one round: what each learner (row) gives to what it hears of each other one (column), and to itself.

    Attributes:
        neighbours: `(n, n)`, zero where nothing is heard, and on the diagonal.
        own: `(n,)`.
    """

    neighbours: FloatArray
    own: FloatArray

    @property
    def matrix(self) -> FloatArray:
        """The whole mixing matrix, `(n, n)`."""
        return self.neighbours + np.diag(self.own)

    @property
    def row_stochastic(self) -> bool:
        """No weight is negative, and those that a learner gives sum to one."""
        return self._stochastic(axis=1)

    @property
    def column_stochastic(self) -> bool:
        """No weight is negative, and those that a learner's message gets sum to one."""
        return self._stochastic(axis=0)

    @property
    def spectral_gap(self) -> float:
        """`1 - sigma_2`, sigma_2 the second largest singular value of the matrix: of use where it is doubly stochastic.

        One learner alone has the gap 1.
        """
        values = np.linalg.svd(self.matrix, compute_uv=False)
        return 1.0 - float(values[1]) if len(values) > 1 else 1.0

    def heard_by(self, learner: int) -> dict[int, float]:
        """Weight of each learner that `learner` hears, by ascending index."""
        row = self.neighbours[learner]
        return {int(j): float(row[j]) for j in np.flatnonzero(row)}

    def told_by(self, learner: int) -> tuple[int, ...]:
        """Who hears `learner`, ascending."""
        return tuple(int(i) for i in np.flatnonzero(self.neighbours[:, learner]))

    def _stochastic(self, axis: int) -> bool:
        sums = self.neighbours.sum(axis=axis) + self.own
        least = min(float(self.neighbours.min()), float(self.own.min()))
        return least >= -ROUNDING and float(np.abs(sums - 1.0).max()) <= ROUNDING
