"""Power of an audit of a foreign service: formulas for the optimal guesser, none of them a test.

The optimal guesser knows the distribution of every run in both worlds. Classifiers have to learn it, so they detect less.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import optimize, special, stats

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.blackbox import compute_classifier_level, count_guessed_runs
from sottovoce_core.auditing.bounds import AlphaAllocation, compute_epsilon_lower_bound
from sottovoce_core.auditing.traffic_features import RunTraffic
from sottovoce_core.auditing.verdict import DetectableEffect

_POWER = 0.9
"""Probability with which a minimum detectable effect is found."""

_LOSSES = 2**15
"""Number of sampled losses that represent the distribution of a run's loss."""

_GUESSED_FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Fractions of the runs, the clearest ones, that the optimal guesser may guess."""

_PRIMARY_TESTS = 8
"""Approximate number of primary tests of single numbers, which share half of their level."""

_MAX_RUNS = 2**20
"""Maximum number of runs of each world considered."""


def count_messages(runs: Sequence[RunTraffic]) -> int:
    """Count the messages of a run among which epsilon may be divided: those of one direction that vary, of the median run."""
    first: dict[tuple[str, int], bytes] = {}
    varied = set[tuple[str, int]]()
    for run in runs:
        for key, digest in _iterate_places(run):
            if first.setdefault(key, digest) != digest:
                varied.add(key)
    counts = [Counter(key[0].rpartition(" ")[2] for key, _ in _iterate_places(run) if key in varied) for run in runs]
    return max(1, int(np.median([max(each.values(), default=0) for each in counts])))


def _iterate_places(run: RunTraffic) -> Iterator[tuple[tuple[str, int], bytes]]:
    count = Counter[str]()
    for each in run.messages:
        yield (each.place, count[each.place]), each.digest
        count[each.place] += 1


class PowerAnalysis:
    """Power of a number of runs against a mechanism that loses more than claimed.

    The mechanism has Laplace noise on one number of each of some messages, among which epsilon is divided evenly; with a
    delta, it has Gaussian noise, for which the number of messages does not matter.
    """

    def __init__(self, claim: float, delta: float, messages: int, levels: AlphaAllocation) -> None:
        """Prepare the analysis of audits of this claim.

        Args:
            claim, delta: claim for a run.
            messages: number of messages that share it.
            levels: alpha allocation of the audit.
        """
        self._claim, self._delta, self._messages, self._level = claim, delta, messages, compute_classifier_level(levels)
        self._accuracies: dict[float, list[tuple[float, float]]] = {}
        generator = np.random.default_rng(0)
        if delta > 0.0:
            self._noise = stats.norm.ppf((np.arange(_LOSSES) + 0.5) / _LOSSES)[:, None]
        else:
            self._noise = generator.laplace(size=(_LOSSES, messages))

    def sample_losses(self, factor: float) -> FloatArray:
        """Sample losses of runs whose noise is the claimed one divided by a factor."""
        if self._delta > 0.0:
            shift = factor * _compute_gaussian_shift(self._claim, self._delta)
            losses: FloatArray = shift * self._noise[:, 0] + shift**2 / 2.0
            return losses
        shift = factor * self._claim / self._messages
        return np.asarray((np.abs(self._noise + shift) - np.abs(self._noise)).sum(axis=1))

    def can_detect(self, factor: float, runs: int) -> bool:
        """Return whether the optimal guesser exceeds the claim with such noise, with probability 0.9; runs of both worlds."""
        return self.compute_bound(factor, runs) > self._claim

    def compute_bound(self, factor: float, runs: int) -> float:
        """Compute the bound on epsilon that the optimal guesser reaches with probability 0.9; runs of both worlds."""
        guesses, best = count_guessed_runs(runs), 0.0
        for guessed_fraction, accuracy in self._compute_accuracies(factor):
            guess_count = int(guesses * guessed_fraction)
            correct = int(stats.binom.ppf(1.0 - _POWER, guess_count, accuracy)) if guess_count else 0
            best = max(best, compute_epsilon_lower_bound(correct, guess_count, self._level, self._delta, guesses))
        return best

    def _compute_accuracies(self, factor: float) -> list[tuple[float, float]]:
        """Compute the fractions of runs that the optimal guesser guesses, and the fraction of each that it guesses correctly."""
        if factor not in self._accuracies:
            losses = self.sample_losses(factor)
            sizes = np.abs(losses)
            thresholds = np.quantile(sizes, 1.0 - np.array(_GUESSED_FRACTIONS))
            guessed = [sizes >= min(each, sizes.max() * (1.0 - 1e-9)) for each in thresholds]
            self._accuracies[factor] = [(float(each.mean()), float((losses[each] > 0.0).mean())) for each in guessed]
        return self._accuracies[factor]

    def find_min_factor(self, runs: int) -> float:
        """Find the smallest factor that is detected; infinite: none up to 1,000 is."""
        factors = np.geomspace(1.02, 1000.0, 200).tolist()
        index = bisect_left(factors, True, key=lambda factor: self.can_detect(factor, runs))
        return factors[index] if index < len(factors) else math.inf

    def find_needed_runs(self, factor: float) -> float:
        """Find the runs of each world that detect such a factor, to a tenth; infinite: more than `_MAX_RUNS`."""
        runs = 16.0
        while not self.can_detect(factor, 2 * int(runs)):
            runs *= 1.1
            if runs > _MAX_RUNS:
                return math.inf
        return int(float(f"{runs:.2g}"))

    def list_detectable_effects(self, runs: int) -> Iterator[DetectableEffect]:
        """List the effects that guesses alone detect with probability 0.9, with these runs of both worlds."""
        factor = self.find_min_factor(runs)
        if math.isfinite(factor):
            distribution = "Gaussian" if self._delta else "Laplace"
            divided = self._messages > 1 and not self._delta
            spread = f", divided among {self._messages:,} messages" if divided else ""
            part = f"{100 / factor:.2g} % of the {distribution} noise that the claim needs{spread}"
            yield DetectableEffect("classifiers", factor, f"a service with {part} (optimal guesser)")
        guesses = count_guessed_runs(runs)
        for correct in range(1, guesses + 1):
            if compute_epsilon_lower_bound(correct, correct, self._level, self._delta, guesses) > self._claim:
                # This many correct guesses, with probability 0.9, of runs of world 1 that have the mark.
                fraction = float(stats.beta.ppf(_POWER, correct, guesses - correct + 1)) * 2.0
                if fraction < 1.0:
                    text = f"a mark that {100 * fraction:.2g} % of the runs of one world have, and none of the other"
                    yield DetectableEffect("worlds", fraction, text)
                return


def _compute_gaussian_shift(epsilon: float, delta: float) -> float:
    """Compute the maximum distance of the worlds under Gaussian noise, in standard deviations (Balle and Wang 2018)."""
    return float(
        optimize.brentq(lambda shift: _compute_gaussian_delta(shift, epsilon) - delta, 1e-9, 1e3 + 10.0 * epsilon)
    )


def compute_gaussian_epsilon(shift: float, delta: float) -> float:
    """Compute epsilon at a delta of Gaussian noise whose worlds are `shift` standard deviations apart; infinite at delta 0."""
    if shift == 0.0 or _compute_gaussian_delta(shift, 0.0) <= delta:
        return 0.0
    if delta == 0.0:
        return math.inf
    upper_bound = shift**2 / 2.0 + shift * math.sqrt(2.0 * math.log(1.0 / delta))
    return float(optimize.brentq(lambda epsilon: _compute_gaussian_delta(shift, epsilon) - delta, 0.0, upper_bound))


def _compute_gaussian_delta(shift: float, epsilon: float) -> float:
    far = float(special.log_ndtr(-shift / 2.0 - epsilon / shift))
    return float(special.ndtr(shift / 2.0 - epsilon / shift)) - math.exp(min(epsilon + far, 700.0))


def compute_noise_effect(numbers: int, levels: AlphaAllocation) -> tuple[DetectableEffect, bool]:
    """Compute the minimum detectable error of the scale of claimed noise, and whether half of the noise is detected."""
    level = levels.compute_level("conformance", "marginal", _PRIMARY_TESTS) / 2.0
    error = float(stats.norm.isf(level) + stats.norm.isf(1.0 - _POWER)) / math.sqrt(numbers)
    detects_half_noise = float(special.gammainc(numbers, 2.0 * special.gammaincinv(numbers, level))) >= _POWER
    return DetectableEffect.from_scale_error(error), detects_half_noise
