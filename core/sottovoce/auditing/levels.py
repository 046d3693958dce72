"""The error budget of an audit: the chance of a false alarm, divided among all that is looked at; and what a test comes to.

Bonferroni's rule: whatever depends on what, a correct learner is refuted with probability at most the sum of all levels. The
budget is made once, with the plan. Every test and every bound carries its own part of it, so that verdict and pages read
the level from the value that they show. To add a test or a family, change `SHARES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

Family = Literal["conformance", "likelihood", "black box"]
Part = Literal[
    "marginal",
    "lattice",
    "dependence",
    "freshness",
    "calibration",
    "whole runs",
    "single rounds",
    "classifiers",
    "worlds",
]

SHARES: Mapping[Family, Mapping[Part, Fraction]] = {
    "conformance": {
        "marginal": Fraction(2, 15),
        "lattice": Fraction(1, 10),
        "dependence": Fraction(1, 6),
        "freshness": Fraction(1, 10),
    },
    "likelihood": {
        "whole runs": Fraction(1, 9),
        "single rounds": Fraction(1, 9),
        "calibration": Fraction(1, 15),
    },
    "black box": {"classifiers": Fraction(1, 9), "worlds": Fraction(1, 10)},
}
"""Of alpha, by family and part of it. They add up to one: a third for bounds on epsilon, the rest for tests."""

BLIND: Mapping[Family, Mapping[Part, Fraction]] = {
    "black box": {"classifiers": Fraction(1)},
}
"""Where nothing is known of the algorithm, there is one family."""

OF_NOISE: Mapping[Family, Mapping[Part, Fraction]] = {
    "conformance": {"marginal": Fraction(1, 4), "dependence": Fraction(1, 8), "freshness": Fraction(1, 8)},
    "black box": {"classifiers": Fraction(1, 2)},
}
"""Where the noise is known, and nothing else."""


LEAST_CHANCE = 1e-300
"""Below it, numbers are too small to be told apart: a p-value is not written out."""


@dataclass(frozen=True, slots=True)
class Test:
    """One test and its result."""

    name: str
    what: str
    """What is tested, in a few words."""
    statistic: float
    p_value: float
    """How likely a statistic this extreme is where the claim holds."""
    where: str
    """The learner, round and field that the statistic was largest at; empty if it belongs to no one place."""
    primary: bool = True
    """Whether it is of those that share the first half of their part's level; the others share the second half."""
    family: Family = "conformance"
    part: Part | None = None
    """Of the budget; None until the test has its part of one."""
    level: float = 0.0
    """A smaller p-value refutes the claim; 0 until the test has its part of a budget (`Levels.judged`)."""

    __test__ = False  # pytest collects classes of this name

    @property
    def chance(self) -> str:
        """The p-value in words: `p = 4.4e-07`, `p < 1e-300`."""
        return f"p < {LEAST_CHANCE:g}" if self.p_value < LEAST_CHANCE else f"p = {self.p_value:.2g}"

    @property
    def rejects(self) -> bool:
        """Whether the claim fails here."""
        return self.p_value < self.level


@dataclass(frozen=True, slots=True)
class Levels:
    """Who may raise a false alarm, with which probability.

    Attributes:
        alpha: of all together.
        shares: of it, by family and part of it.
    """

    alpha: float
    shares: Mapping[Family, Mapping[Part, Fraction]] = field(default_factory=lambda: SHARES)

    def family(self, family: Family) -> float:
        """Of all parts of a family together."""
        return self._of(sum(self.shares[family].values(), Fraction(0)))

    def of(self, family: Family, part: Part, among: int = 1) -> float:
        """Of each of so many tests or bounds that share a part evenly."""
        return self._of(self.shares[family][part]) / among

    def judged(self, part: Part, tests: Sequence[Test]) -> tuple[Test, ...]:
        """Tests of a part, each with its level: half of it for the primary ones, half for the others, evenly."""
        family = next(family for family, parts in self.shares.items() if part in parts)
        counts = Counter(test.primary for test in tests)
        level = {primary: self.of(family, part, len(counts) * count) for primary, count in counts.items()}
        return tuple(replace(test, family=family, part=part, level=level[test.primary]) for test in tests)

    def _of(self, share: Fraction) -> float:
        return self.alpha * share.numerator / share.denominator
