"""Bets on noise. Each keeps sums over rounds, `(learners, width)`, and knows the e-value that such sums have.

So bets of one learner, of all learners together, and of some rounds only are the same sums, added up otherwise. Every e-value is
that of numbers which come one after another, each independent standard Laplace given all before it; whatever a stake depends
on was known before (`seen`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from scipy import special

from sottovoce.arrays import FloatArray
from sottovoce.lab.watch.seen import Seen


class Bet(ABC):
    """One kind of bet.

    Attributes:
        name: of what it sees.
    """

    name: ClassVar[str]

    @abstractmethod
    def sums(self, seen: Seen) -> FloatArray:
        """What a round adds, `(learners, width)`."""

    @abstractmethod
    def e(self, sums: FloatArray) -> FloatArray:
        """Logarithm of the e-value `(...)` of sums `(..., width)`."""


def krichevsky_trofimov(counted: FloatArray, law: FloatArray) -> FloatArray:
    """Log e-value of a mixture over all laws on cells against this one, `counted (..., cells)`.

    Krichevsky and Trofimov 1981: the laws are Dirichlet, with one half for each cell.
    """
    cells, n = counted.shape[-1], counted.sum(axis=-1)
    no_bet = math.lgamma(cells / 2) - cells * math.lgamma(0.5)
    each = special.gammaln(counted + 0.5) - counted * np.log(law)
    e: FloatArray = no_bet - special.gammaln(n + cells / 2) + each.sum(axis=-1)
    return e


def too_many(counted: FloatArray, expected: FloatArray) -> FloatArray:
    """Log e-value of so many events that each were rare, given all before: a mixture over how much more often they come.

    For a rate l, `l^counted exp(-(l - 1) expected)`; rates have the law Gamma(1/2, 1e-4), some thousands at first, above 1:
    only so may `expected` be more than is expected.
    """
    shape, few = 0.5, 1e-4
    after, seen = shape + counted, few + expected
    with np.errstate(divide="ignore"):  # far fewer than expected: nothing is left
        above_one = np.log(special.gammaincc(after, seen)) - math.log(special.gammaincc(shape, few))
    whole = special.gammaln(after) - math.lgamma(shape) + shape * math.log(few) - after * np.log(seen)
    e: FloatArray = whole + above_one + expected
    return e
