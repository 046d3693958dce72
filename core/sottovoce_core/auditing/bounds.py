"""The error budget of an audit, what a test comes to, and lower bounds on epsilon from guesses.

Bonferroni's rule: whatever depends on what, a correct learner is refuted with probability at most the sum of all levels. The
budget is made once, with the plan. Every test and every bound carries its own part of it, so that verdict and pages read
the level from the value that they show. To add a test or a family, change `ALPHA_ALLOCATION`.

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

# ---- the error budget ------------------------------------------------------------------------------------------------

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
"""Of alpha, by family and part of it. They add up to one: a third for bounds on epsilon, the rest for tests."""

BLACK_BOX_ALLOCATION: Mapping[Family, Mapping[BudgetPart, Fraction]] = {
    "black box": {"classifiers": Fraction(1)},
}
"""Where nothing is known of the algorithm, there is one family."""

NOISE_ALLOCATION: Mapping[Family, Mapping[BudgetPart, Fraction]] = {
    "conformance": {"marginal": Fraction(1, 4), "dependence": Fraction(1, 8), "freshness": Fraction(1, 8)},
    "black box": {"classifiers": Fraction(1, 2)},
}
"""Where the noise is known, and nothing else."""


MIN_PRINTED_P_VALUE = 1e-300
"""Below it, numbers are too small to be told apart: a p-value is not written out."""


@dataclass(frozen=True, slots=True)
class Test:
    """One test and its result."""

    name: str
    description: str
    """What is tested, in a few words."""
    statistic: float
    p_value: float
    """How likely a statistic this extreme is where the claim holds."""
    location: str = ""
    """The learner, round and field that the statistic was largest at; empty if it belongs to no one place."""
    is_primary: bool = True
    """Whether it is of those that share the first half of their part's level; the others share the second half."""
    family: Family = "conformance"
    part: BudgetPart | None = None
    """Of the budget; None until the test has its part of one."""
    level: float = 0.0
    """A smaller p-value refutes the claim; 0 until the test has its part of a budget (`AlphaAllocation.judged`)."""

    __test__ = False  # pytest collects classes of this name

    @property
    def p_value_text(self) -> str:
        """The p-value in words: `p = 4.4e-07`, `p < 1e-300`."""
        return f"p < {MIN_PRINTED_P_VALUE:g}" if self.p_value < MIN_PRINTED_P_VALUE else f"p = {self.p_value:.2g}"

    @property
    def is_significant(self) -> bool:
        """Whether the claim fails here."""
        return self.p_value < self.level


@dataclass(frozen=True, slots=True)
class AlphaAllocation:
    """Who may raise a false alarm, with which probability.

    Attributes:
        alpha: of all together.
        shares: of it, by family and part of it.
    """

    alpha: float
    fractions: Mapping[Family, Mapping[BudgetPart, Fraction]] = field(default_factory=lambda: ALPHA_ALLOCATION)

    def compute_level(self, family: Family, part: BudgetPart, among: int = 1) -> float:
        """Of each of so many tests or bounds that share a part evenly."""
        share = self.fractions[family][part]
        return self.alpha * share.numerator / share.denominator / among

    def assign_levels(self, part: BudgetPart, tests: Sequence[Test]) -> tuple[Test, ...]:
        """Tests of a part, each with its level: half of it for the primary ones, half for the others, evenly."""
        family = next(family for family, parts in self.fractions.items() if part in parts)
        counts = Counter(test.is_primary for test in tests)
        level = {primary: self.compute_level(family, part, len(counts) * count) for primary, count in counts.items()}
        return tuple(replace(test, family=family, part=part, level=level[test.is_primary]) for test in tests)


# ---- lower bounds on epsilon -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """Guesses of fair coins, the lower bound on epsilon that they come to, and the claim that it is held against.

    Attributes:
        family: whose it is.
        guesser: who guesses.
        view: what it looks at, of what it could choose from; empty where there is no choice, or nothing to look at.
        correct, guesses: right guesses, of how many; abstentions are not counted.
        claim: epsilon that is promised for what the guesser sees.
        level: the probability with which the bound is above the true epsilon, at most.
        threshold: of hints weaker than this no guess was made; fixed on other runs.
        delta: at which epsilon is bounded.
        tested: runs whose worlds were to be guessed, abstentions counted; needed at a delta alone.
        where: the number that shows most, in words; empty: none alone shows anything.
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
        """The bound at another level, or with so many times the runs and the same rate of right guesses."""
        correct, guesses, tested = factor * self.correct_guesses, factor * self.guesses, factor * self.guessable_runs
        return compute_epsilon_lower_bound(correct, guesses, level, self.delta, tested)

    @property
    def name(self) -> str:
        """Who guesses from what."""
        return f"{self.guesser} on {self.view}" if self.view else self.guesser

    @property
    def is_above_claim(self) -> bool:
        """Whether the claim fails here."""
        return self.value > self.claim

    def find_deciding_factor(self, most: int = 2**20) -> int | None:
        """By what factor more runs with the same rate of right guesses would put it above the claim; None: never."""
        factor = 1
        while factor <= most:
            if self.compute_bound(self.level, factor) > self.claim:
                return factor
            factor *= 2
        return None


def compute_epsilon_lower_bound(correct: int, guesses: int, alpha: float, delta: float = 0.0, tested: int = 0) -> float:
    """The epsilon below which so many right guesses of fair coins are too many.

    Every run lives in one of two worlds by a fair coin. Whoever guesses the coin from what is epsilon-private, or abstains, is
    right at most as often as a binomial of chance `e^eps / (1 + e^eps)` (Steinke, Nasr, Jagielski 2023, Theorem 5.2): the
    bound is the logit of its Clopper-Pearson lower limit.

    At a delta, a run is guessed right with probability `e^eps` times that of a wrong guess, plus delta. So a part of the right
    guesses, at most a binomial of chance delta among all tested runs, is free, and the rest is bounded as before. Free ones are
    counted at the most that happens with half of alpha, and what they need of alpha is taken off it: the bound is exact for
    independent runs, and that of delta 0 as delta goes to zero.

    Args:
        correct: right guesses.
        guesses: all guesses, abstentions not counted.
        alpha: one minus the confidence.
        delta: at which epsilon is bounded.
        tested: runs whose worlds were to be guessed, abstentions counted; at least `guesses`.
    """
    if delta > 0.0:
        binomial = import_optional("scipy.stats", "scipy", "an audit").binom
        free = int(binomial.isf(alpha / 2.0, max(tested, guesses), delta))
        alpha -= float(binomial.sf(free, max(tested, guesses), delta))
        correct, guesses = max(0, correct - free), max(0, guesses - free)
    if correct == 0 or 2 * correct <= guesses:
        return 0.0
    stats = import_optional("scipy.stats", "scipy", "an audit")
    chance = float(stats.beta.ppf(alpha, correct, guesses - correct + 1))
    return max(0.0, math.log(chance / (1.0 - chance)))


def compute_needed_runs(epsilon: float, alpha: float = 0.05, share: float = 0.9) -> int:
    """Runs of each world until the bound of a mechanism that reaches epsilon is this share of it, on average.

    `271 (1 + e^eps) / eps^2` for 90 % at 95 % confidence.
    """
    quantile = float(import_optional("scipy.stats", "scipy", "an audit").norm.ppf(1.0 - alpha))
    return math.ceil((quantile / (1.0 - share)) ** 2 * (1.0 + math.exp(epsilon)) / epsilon**2)


MAX_RUNS = 10**9
"""More than anybody makes."""


def compute_min_runs(epsilon: float, alpha: float, of: float = 1.0, delta: float = 0.0) -> float:
    """Runs of each world whose coins, all guessed right, give a bound above epsilon; infinite where that is above `MOST_RUNS`.

    Args:
        epsilon: above which.
        alpha: one minus the confidence.
        of: the share of runs that is guessed.
        delta: at which epsilon is bounded.
    """
    if epsilon > math.log(2 * MAX_RUNS):  # each run shows less than a coin that falls so once in as many times
        return math.inf
    right = math.log(alpha) / -math.log1p(math.exp(-epsilon))
    if delta > 0.0:
        return _runs_at_delta(epsilon, alpha, of, delta)
    runs = math.ceil((math.floor(right) + 1) / of / 2)
    return runs if runs <= MAX_RUNS else math.inf


def _runs_at_delta(epsilon: float, alpha: float, of: float, delta: float) -> float:
    """By bisection: more right guesses show more, but for the steps of what is free."""

    def shows(runs: int) -> bool:
        guesses = int(2 * runs * of)
        return compute_epsilon_lower_bound(guesses, guesses, alpha, delta, guesses) > epsilon

    high = 1
    while not shows(high):
        high *= 2
        if high > MAX_RUNS:
            return math.inf
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high


def compute_max_provable_epsilon(runs: int, alpha: float) -> float:
    """The bound if the coins of all runs, so many of each world, are guessed right: about `ln(2 N / 3)` at 95 %."""
    return compute_epsilon_lower_bound(2 * runs, 2 * runs, alpha)


def choose_threshold(strengths: FloatArray, guesses: int, alpha: float) -> float:
    """From which strength on to guess, so that the bound is largest on average; below it: abstain.

    It must not see the runs that are audited: fed with them, the bound no longer holds.

    Args:
        strengths: `|log p(y|D) - log p(y|D')|` of runs of the claimed mechanism. A guess of strength s is right with
            chance `1 / (1 + e^-s)`.
        guesses: runs that will be audited.
        alpha: one minus the confidence.
    """
    ordered = np.sort(strengths)[::-1]
    right = np.cumsum(1.0 / (1.0 + np.exp(-ordered))) / len(ordered)
    lasts = np.unique(np.geomspace(1, len(ordered), 64).astype(int)) - 1
    lasts = np.unique(np.searchsorted(-ordered, -ordered[lasts], side="right") - 1)  # what is equal stays together
    bounds = [
        compute_epsilon_lower_bound(int(guesses * right[k]), int(guesses * (k + 1) / len(ordered)), alpha)
        for k in lasts.tolist()
    ]
    # A hair lower: equal losses differ by rounding.
    return float(ordered[lasts[int(np.argmax(bounds))]]) * (1.0 - 1e-9)


def compute_confidence_interval(count: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a rate, two-sided."""
    stats = import_optional("scipy.stats", "scipy", "a confidence interval")
    found = stats.binomtest(count, trials).proportion_ci(confidence)
    return float(found.low), float(found.high)
