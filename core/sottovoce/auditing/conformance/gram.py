"""Correlations of all pairs of columns, and the spectrum, of noise laid out as samples of many columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy import special

from sottovoce.arrays import BoolArray, FloatArray
from sottovoce.auditing.conformance.chances import FEW, correlation_p, largest_p, smallest_p

_SAMPLES = 16
"""Below so many, correlations of all pairs together have no gamma law."""

_Singles = npt.NDArray[np.float32]


class Gram:
    """Sums over samples of products of columns.

    Attributes:
        sums: `(scores, columns, columns)`.
        squares: of a column, over the samples in which another one is known, too; likewise.
        counts: `(columns, columns)` samples in which both are known.
    """

    def __init__(self, scores: _Singles, known: BoolArray) -> None:
        """From `scores (scores, samples, columns)`, 0 where unknown."""
        self.sums: _Singles = scores.swapaxes(-1, -2) @ scores
        alive, some = (np.asarray(known.any(axis=axis)) for axis in (0, 1))
        if known[some][:, alive].all():  # as almost always: every sample has all columns
            both = (alive[:, None] & alive).astype(np.float32)
            self.counts: _Singles = np.count_nonzero(some) * both
            self.squares: _Singles = np.diagonal(self.sums, axis1=1, axis2=2)[:, :, None] * both
        else:
            there = known.astype(np.float32)
            self.counts = there.T @ there
            self.squares = (scores**2).swapaxes(-1, -2) @ there

    def add(self, other: Gram) -> None:
        """Take in other samples."""
        self.sums = self.sums + other.sums
        self.counts = self.counts + other.counts
        self.squares = self.squares + other.squares

    def worst_pair(self) -> Iterator[tuple[float, int, float, int, int, int]]:
        """For every score: p-value times pairs, pairs, correlation, score and the pair that is correlated most."""
        judged = np.triu(self.counts >= FEW, 1)
        pairs = int(np.count_nonzero(judged))
        for s in range(len(self.sums) if pairs else 0):
            rho = self._rho(s)
            # Among pairs of equally many samples the largest correlation is the least likely one.
            most = [
                np.where(judged & (self.counts == n), np.abs(rho), -1.0).argmax()
                for n in np.unique(self.counts[judged])
            ]
            at = np.unravel_index(np.array(most), rho.shape)
            p_values = correlation_p(rho[at], self.counts[at].astype(np.float64))
            k = int(p_values.argmin())
            yield float(p_values[k]) * pairs, pairs, float(rho[at][k]), s, int(at[0][k]), int(at[1][k])

    def all_pairs(self, score: int) -> tuple[float, float, float, int]:
        """Sum of squared correlations, what it is on average and its variance under the claim (exact), and pairs."""
        above = np.triu(self.counts >= _SAMPLES, 1)
        n = self.counts[above].astype(np.float64)
        squares = self._rho(score)[above] ** 2
        return float(squares.sum()), float((1.0 / n).sum()), float((2.0 * (n - 1.0) / (n**2 * (n + 2.0))).sum()), n.size

    def spectrum(self, score: int) -> Iterator[tuple[float, float, str]]:
        """Of the largest and of the smallest singular value: p-value, its square per sample, and which.

        None where something is unknown, and with fewer samples than columns: the transposed matrix has the same ones.
        """
        alive = np.diagonal(self.counts) > 0
        own, counts = self.sums[score][alive][:, alive], self.counts[alive][:, alive]
        columns = len(own)
        if columns < 2 or counts.min() != counts.max() or counts.min() < max(FEW, columns):
            return
        n = int(counts[0, 0])
        squares = np.linalg.eigvalsh(own.astype(np.float64))
        yield largest_p(float(squares[-1]), n, columns), float(squares[-1]) / n, "largest singular value"
        yield smallest_p(float(squares[0]), n, columns), float(squares[0]) / n, "smallest singular value"

    def _rho(self, score: int) -> FloatArray:
        squares = self.squares[score].astype(np.float64)
        lengths = np.sqrt(squares * squares.T)
        rho: FloatArray = np.where(lengths > 0.0, self.sums[score] / np.maximum(lengths, 1e-30), 0.0)
        return np.clip(rho, -1.0, 1.0)


def all_pairs_p(total: float, mean: float, variance: float) -> float:
    """Two-sided, of a sum of squared correlations: a gamma law of its mean and variance."""
    shape, scale = mean**2 / variance, variance / mean
    return 2.0 * min(0.5, float(special.gammainc(shape, total / scale)), float(special.gammaincc(shape, total / scale)))
