"""The weights of one round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from sottovoce.arrays import FloatArray, Scalars, scalars

ROUNDING = 1e-12
"""How far sums of weights may be from what they must be, relative to the largest weight."""
_GRAIN = 2.0**-24
"""Weights that round to the same multiple of it are the same to a digest: machines may differ in the last bits of theirs."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """The weights of one round: what each learner (row) gives to what it hears of each other one (column), and to itself.

    Attributes:
        neighbours: `(n, n)`, zero where nothing is heard, and on the diagonal.
        own: `(n,)`.
    """

    neighbours: FloatArray
    own: FloatArray
    _digests: list[bytes] = field(init=False, repr=False, default_factory=list)
    totals: Scalars = field(init=False, repr=False)
    """What each learner gives to all others, as `scalars`."""
    owns: Scalars = field(init=False, repr=False)
    """`own`, as `scalars`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", scalars(self.neighbours.sum(axis=1).tolist()))
        object.__setattr__(self, "owns", scalars(self.own.tolist()))

    @property
    def digest(self) -> bytes:
        """SHA-256 of who hears whom with which weight: of all hearers, then of whom they hear, then of the weights."""
        if not self._digests:
            hearers, heard = np.nonzero(self.neighbours)
            weights = np.rint(self.neighbours[hearers, heard] / _GRAIN)
            parts = (hearers.astype("<u4"), heard.astype("<u4"), weights.astype("<f8"))
            self._digests.append(sha256(b"".join(part.tobytes() for part in parts)).digest())
        return self._digests[0]

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

    def neighbours_of(self, learner: int) -> frozenset[int]:
        """Whom `learner` hears or tells."""
        return frozenset((*self.heard_by(learner), *self.told_by(learner)))

    def _stochastic(self, axis: int) -> bool:
        sums = self.neighbours.sum(axis=axis) + self.own
        least = min(float(self.neighbours.min()), float(self.own.min()))
        return least >= -ROUNDING and float(np.abs(sums - 1.0).max()) <= ROUNDING


def digest_of(rounds: Iterable[bytes]) -> bytes:
    """SHA-256 of the digests of several rounds, one after the other: of who hears whom in all of them."""
    return sha256(b"".join(rounds)).digest()
