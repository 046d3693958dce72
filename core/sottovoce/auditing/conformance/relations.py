"""Linear relations: noise that adds up to nothing over learners, or is the sum or the difference of what was drawn before."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Self

import numpy as np
from scipy import special

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.conformance.block import Block
from sottovoce.auditing.levels import Test

_CLOSE = 2.0**-30
"""In scales: a sum of independent noise is so close to zero with at most this probability, whatever else is in it.

The density of a Laplace number is at most 1/2, and so is that of its sum with anything independent. It is 2^10 spacings: a
replay that rounds elsewhere hides no relation.
"""

_Relation = tuple[tuple[int, int], ...]
"""Rounds, counted back from the latest, and the signs that their noise is added with."""

_RELATIONS: tuple[_Relation, ...] = tuple(
    ((0, 1), *zip(back, signs, strict=True))
    for back in ((1,), (2,), (1, 2))
    for signs in itertools.product((1, -1), repeat=len(back))
)


class Relations:
    """How many sums are almost zero, among how many."""

    def __init__(self) -> None:
        self._learners = np.zeros(2, np.int64)
        self._rounds: Counter[_Relation] = Counter()
        self._tried = 0

    def add(self, block: Block) -> None:
        """Look at some more runs."""
        units = [np.ones_like(block.scale)]
        if np.nanmax(block.scale, initial=0.0) > np.nanmin(block.scale, initial=np.inf):
            units.append(np.nan_to_num(block.scale))
        for _, part in block.by_runs():
            for scale in units:  # in scales, and as they are
                noise = part.values * scale[:, :, None]
                if not part.resolved.all():
                    noise[~part.resolved] = np.nan
                if len(noise) > 1:
                    self._learners += _near_zero(noise.sum(axis=0), scale.max(axis=0))
                self._add_rounds(noise, scale)

    def _add_rounds(self, noise: FloatArray, scale: FloatArray) -> None:
        for relation in _RELATIONS:
            longest = relation[-1][0]
            if longest < noise.shape[1]:
                parts = [slice(longest - back, noise.shape[1] - back) for back, _ in relation]
                total = noise[:, parts[0]].copy()
                for part, (_, sign) in zip(parts[1:], relation[1:], strict=True):
                    (np.add if sign > 0 else np.subtract)(total, noise[:, part], out=total)
                zeros, tried = _near_zero(total, np.maximum.reduce([scale[:, part] for part in parts]))
                self._rounds[relation] += int(zeros)
                self._tried += int(tried)

    def merge(self, other: Self) -> None:
        """Take in what another one keeps."""
        self._learners += other._learners
        self._rounds.update(other._rounds)
        self._tried += other._tried

    def tests(self) -> Iterator[Test]:
        """Sums over all learners; sums and differences of rounds."""
        zeros, tried = (int(each) for each in self._learners)
        if tried:
            what = "noise does not add up to nothing over learners"
            yield Test("sums of learners", what, zeros, _chance(zeros, tried), "all learners", primary=False)
        if self._tried:
            most = max(self._rounds, key=lambda relation: self._rounds[relation])
            total = sum(self._rounds.values())
            what = "no noise is a sum or a difference of noise drawn before"
            where = " ".join(f"{'+-'[sign < 0]} round t-{back}" if back else "round t" for back, sign in most)
            yield Test("sums of rounds", what, total, _chance(total, self._tried), where, primary=False)


def _near_zero(total: FloatArray, scale: FloatArray) -> IntArray:
    """How many sums `(..., runs, numbers)` are close to zero, and how many are known."""
    np.abs(total, out=total)
    near = total < _CLOSE * scale[..., None, :]  # not where it is unknown
    return np.array([np.count_nonzero(near), total.size - np.count_nonzero(np.isnan(total))])


def _chance(zeros: int, tried: int) -> float:
    """Of so many or more (Poisson)."""
    return float(special.pdtrc(zeros - 1, tried * _CLOSE)) if zeros else 1.0
