"""Alpha allocation of an audit, test results, and lower bounds on epsilon from guesses.

By Bonferroni's rule, a correct learner is refuted with probability at most the sum of all levels, for any dependence.
The allocation is made once, with the plan. Every test and every bound carries its own level, so that verdict and pages read it
from the value that they show. To add a test or a family, change `ALPHA_ALLOCATION`.

Bounds are one-sided: a bound is above the true epsilon with probability at most alpha.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.optional import import_optional

# ---- alpha allocation ------------------------------------------------------------------------------------------------

Family = Literal["conformance", "likelihood", "black box"]
BudgetPart = Literal[
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

ALPHA_ALLOCATION: Mapping[Family, Mapping[BudgetPart, Fraction]] = {
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
"""Fractions of alpha by family and part. They add to one: a third for bounds on epsilon, the rest for tests."""

BLACK_BOX_ALLOCATION: Mapping[Family, Mapping[BudgetPart, Fraction]] = {
    "black box": {"classifiers": Fraction(1)},
}
"""Fractions of alpha if the algorithm is unknown: one family only."""

NOISE_ALLOCATION: Mapping[Family, Mapping[BudgetPart, Fraction]] = {
    "conformance": {"marginal": Fraction(1, 4), "dependence": Fraction(1, 8), "freshness": Fraction(1, 8)},
    "black box": {"classifiers": Fraction(1, 2)},
}
"""Fractions of alpha if only the noise is known."""


MIN_PRINTED_P_VALUE = 1e-300
"""P-value below which no exact value is printed: float64 cannot distinguish such values."""


@dataclass(frozen=True, slots=True)
class Test:
    """Test and its result."""

    name: str
    description: str
    """Tested property, in a few words."""
    statistic: float
    p_value: float
    """Probability of a statistic this extreme if the claim holds."""
    location: str = ""
    """Learner, round and field of the largest statistic; empty if it has no single location."""
    is_primary: bool = True
    """True if the test belongs to those that share the first half of their part's level; the others share the second half."""
    family: Family = "conformance"
    part: BudgetPart | None = None
    """Part of the allocation; None until a level is assigned."""
    level: float = 0.0
    """Level: a smaller p-value refutes the claim; 0 until it is assigned (`AlphaAllocation.assign_levels`)."""

    __test__ = False  # pytest collects classes of this name

    @property
    def p_value_text(self) -> str:
        """P-value as text: `p = 4.4e-07`, `p < 1e-300`."""
        return f"p < {MIN_PRINTED_P_VALUE:g}" if self.p_value < MIN_PRINTED_P_VALUE else f"p = {self.p_value:.2g}"

    @property
    def is_significant(self) -> bool:
        """True if the test refutes the claim."""
        return self.p_value < self.level


@dataclass(frozen=True, slots=True)
class AlphaAllocation:
    """Allocation of the false-alarm probability among families and parts.

    Attributes:
        alpha: false-alarm probability of all together.
        fractions: fractions of alpha, by family and part.
    """

    alpha: float
    fractions: Mapping[Family, Mapping[BudgetPart, Fraction]] = field(default_factory=lambda: ALPHA_ALLOCATION)

    def compute_level(self, family: Family, part: BudgetPart, among: int = 1) -> float:
        """Compute the level of each of `among` tests or bounds that share a part evenly."""
        share = self.fractions[family][part]
        return self.alpha * share.numerator / share.denominator / among

    def assign_levels(self, part: BudgetPart, tests: Sequence[Test]) -> tuple[Test, ...]:
        """Assign levels to the tests of a part: half of it for the primary ones, half for the others, evenly."""
        family = next(family for family, parts in self.fractions.items() if part in parts)
        counts = Counter(test.is_primary for test in tests)
        level = {
            is_primary: self.compute_level(family, part, len(counts) * count) for is_primary, count in counts.items()
        }
        return tuple(replace(test, family=family, part=part, level=level[test.is_primary]) for test in tests)


# ---- lower bounds on epsilon -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bound on epsilon from guesses of fair coins, and the claim that it is compared with.

    Attributes:
        family: family of the guesser.
        guesser: name of the guesser.
        view: view that the guesser chose; empty if there is no choice, or no data.
        correct_guesses, guesses: correct guesses, and all guesses; abstentions are not counted.
        claim: claimed epsilon for the guesser's view.
        level: maximum probability that the bound is above the true epsilon.
        threshold: minimum strength of evidence for a guess; fixed on other runs.
        delta: delta at which epsilon is bounded.
        guessable_runs: runs whose worlds were to be guessed, abstentions counted; used only if delta is positive.
        location: number with the largest effect, in words; empty: no single number has one.
        value: the bound.
    """

    family: Family
    guesser: str
    view: str
    correct_guesses: int
    guesses: int
    claim: float
    level: float
    threshold: float = 0.0
    delta: float = 0.0
    guessable_runs: int = 0
    location: str = ""
    value: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", self.compute_bound(self.level))

    def compute_bound(self, level: float, factor: int = 1) -> float:
        """Compute the bound at another level, or with `factor` times the runs and the same rate of correct guesses."""
        correct, guesses, guessable = factor * self.correct_guesses, factor * self.guesses, factor * self.guessable_runs
        return compute_epsilon_lower_bound(correct, guesses, level, self.delta, guessable)

    @property
    def name(self) -> str:
        """Guesser and view."""
        return f"{self.guesser} on {self.view}" if self.view else self.guesser

    @property
    def is_above_claim(self) -> bool:
        """True if the bound refutes the claim."""
        return self.value > self.claim

    def find_deciding_factor(self, max_factor: int = 2**20) -> int | None:
        """Find the factor of runs with the same rate of correct guesses that puts the bound above the claim; None: no factor."""
        factor = 1
        while factor <= max_factor:
            if self.compute_bound(self.level, factor) > self.claim:
                return factor
            factor *= 2
        return None


def compute_epsilon_lower_bound(correct: int, guesses: int, alpha: float, delta: float = 0.0, tested: int = 0) -> float:
    """Compute the epsilon below which this many correct guesses of fair coins are too many.

    A fair coin puts every run in one of two worlds. A guesser that sees an epsilon-private output, or abstains, is correct at
    most as often as a binomial with probability `e^eps / (1 + e^eps)` (Steinke, Nasr, Jagielski 2023, Theorem 5.2): the bound
    is the logit of its Clopper-Pearson lower limit.

    With a delta, a run is guessed correctly with probability at most `e^eps` times that of a wrong guess, plus delta. So a
    part of the correct guesses, at most a binomial with probability delta among all tested runs, is free, and the rest is
    bounded as before. The number of free ones is their upper quantile at half of alpha, and the alpha that this uses is
    subtracted: the bound is exact for independent runs, and that of delta 0 as delta goes to zero.

    Args:
        correct: correct guesses.
        guesses: all guesses, abstentions not counted.
        alpha: one minus the confidence.
        delta: delta at which epsilon is bounded.
        tested: runs whose worlds were to be guessed, abstentions counted; at least `guesses`.
    """
    if delta > 0.0:
        binomial = import_optional("scipy.stats", "scipy", "an audit").binom
        free = int(binomial.isf(alpha / 2.0, max(tested, guesses), delta))
        alpha -= float(binomial.sf(free, max(tested, guesses), delta))
        correct, guesses = max(0, correct - free), max(0, guesses - free)
    if correct == 0 or 2 * correct <= guesses:
        return 0.0
    special = import_optional("scipy.special", "scipy", "an audit")
    probability = float(special.betaincinv(correct, guesses - correct + 1, alpha))
    return max(0.0, math.log(probability / (1.0 - probability)))


def compute_needed_runs(epsilon: float, alpha: float = 0.05, fraction: float = 0.9) -> int:
    """Compute the runs of each world for which the mean bound of a mechanism of privacy loss epsilon is this fraction of it.

    `271 (1 + e^eps) / eps^2` for 90 % at 95 % confidence.
    """
    quantile = float(import_optional("scipy.special", "scipy", "an audit").ndtri(1.0 - alpha))
    return math.ceil((quantile / (1.0 - fraction)) ** 2 * (1.0 + math.exp(epsilon)) / epsilon**2)


MAX_RUNS = 10**9
"""Maximum number of runs considered; larger requirements count as infinite."""


def compute_min_runs(epsilon: float, alpha: float, guessed_fraction: float = 1.0, delta: float = 0.0) -> float:
    """Compute the runs of each world whose coins, all guessed correctly, give a bound above epsilon; infinite above `MAX_RUNS`.

    Args:
        epsilon: epsilon to exceed.
        alpha: one minus the confidence.
        guessed_fraction: fraction of the runs that is guessed.
        delta: delta at which epsilon is bounded.
    """
    if epsilon > math.log(2 * MAX_RUNS):  # each run is weaker evidence than an event of probability 1 / (2 MAX_RUNS)
        return math.inf
    correct = math.log(alpha) / -math.log1p(math.exp(-epsilon))
    if delta > 0.0:
        return _find_min_runs_at_delta(epsilon, alpha, guessed_fraction, delta)
    runs = math.ceil((math.floor(correct) + 1) / guessed_fraction / 2)
    return runs if runs <= MAX_RUNS else math.inf


def _find_min_runs_at_delta(epsilon: float, alpha: float, guessed_fraction: float, delta: float) -> float:
    """Find the minimum runs by bisection: more correct guesses raise the bound, except for the steps of the free ones."""

    def is_above(runs: int) -> bool:
        guesses = int(2 * runs * guessed_fraction)
        return compute_epsilon_lower_bound(guesses, guesses, alpha, delta, guesses) > epsilon

    high = 1
    while not is_above(high):
        high *= 2
        if high > MAX_RUNS:
            return math.inf
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


def compute_max_provable_epsilon(runs: int, alpha: float) -> float:
    """Compute the bound if the coins of all runs, `runs` of each world, are guessed correctly: about `ln(2 N / 3)` at 95 %."""
    return compute_epsilon_lower_bound(2 * runs, 2 * runs, alpha)


def choose_threshold(strengths: FloatArray, guesses: int, alpha: float) -> float:
    """Choose the minimum strength of a guess that maximises the expected bound; below it, abstain.

    It must not see the audited runs: otherwise the bound no longer holds.

    Args:
        strengths: `|log p(y|D) - log p(y|D')|` of runs of the claimed mechanism. A guess of strength s is correct with
            probability `1 / (1 + e^-s)`.
        guesses: number of runs that will be audited.
        alpha: one minus the confidence.
    """
    ordered = np.sort(strengths)[::-1]
    correct_rate = np.cumsum(1.0 / (1.0 + np.exp(-ordered))) / len(ordered)
    lasts = np.unique(np.geomspace(1, len(ordered), 64).astype(int)) - 1
    lasts = np.unique(np.searchsorted(-ordered, -ordered[lasts], side="right") - 1)  # equal strengths are not separated
    bounds = [
        compute_epsilon_lower_bound(int(guesses * correct_rate[k]), int(guesses * (k + 1) / len(ordered)), alpha)
        for k in lasts.tolist()
    ]
    # Slightly lower, because equal losses differ by rounding.
    return float(ordered[lasts[int(np.argmax(bounds))]]) * (1.0 - 1e-9)


def compute_confidence_interval(count: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Compute the two-sided Clopper-Pearson interval of a rate."""
    stats = import_optional("scipy.stats", "scipy", "a confidence interval")
    found = stats.binomtest(count, trials).proportion_ci(confidence)
    return float(found.low), float(found.high)
