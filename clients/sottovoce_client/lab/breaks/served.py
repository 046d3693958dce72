"""With how many runs a broken service is found: more and more runs, in some audits of each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sottovoce.lab.selftest.power import CONFIDENCE, found_in
from sottovoce.lab.selftest.trial import RARE
from sottovoce.optional import import_extra

Kind = Literal["on real services", "by wiretap", "foreign services"]

FoundBy = Callable[[int, int], str]
"""The part that refutes the claim in an audit with so many runs of each world, by the audit's seed; empty: none."""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a broken service, or of a correct one.

    Attributes:
        name, what, kind: of the break.
        correct: nothing is wrong, and no audit may say so.
        most: runs of each world, at most.
        audits: with each number of runs; of a correct service, with all numbers of runs together.
        needed: runs of each world with which enough audits find it; None: not with those that were tried.
        found_by: the part of the audit that found it most often, there.
        found: audits that find it, there; of a correct service, those that accuse it.
        sure: it must be found.
    """

    name: str
    what: str
    kind: Kind
    correct: bool
    most: int
    audits: int
    needed: int | None = None
    found_by: str = ""
    found: int = 0
    sure: bool = True

    @property
    def missed(self) -> bool:
        """It must be found and was not, or it is correct and was accused more often than chance explains."""
        if not self.correct:
            return self.sure and self.needed is None
        binomial = import_extra("scipy.stats", "scipy", "a self-test").binom
        return float(binomial.sf(self.found - 1, self.audits, 1.0 - CONFIDENCE)) < RARE


def served(blank: Served, found_by: FoundBy, rungs: Sequence[int], seed: int) -> Served:
    """Audit a broken service with more and more runs until it is found, and a correct one with all numbers of runs.

    Args:
        blank: which service, and how often.
        found_by: holds an audit.
        rungs: runs of each world that are tried, one after the other.
        seed: of the first audit.
    """
    seeds = range(seed, seed + blank.audits)
    if blank.correct:
        accusers = [who for runs in rungs for each in seeds if (who := found_by(runs, each))]
        return replace(blank, audits=len(rungs) * blank.audits, found_by="".join(accusers[:1]), found=len(accusers))
    for runs in rungs:
        if found := found_in((found_by(runs, each) for each in seeds), blank.audits):
            return replace(blank, needed=runs, found_by=found.most_common(1)[0][0], found=found.total())
    return blank
