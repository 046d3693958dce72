"""What an audit of a service that is not ours could have found: formulas for the best of guessers, none of them a test.

The best guesser knows the law of every run in both worlds. Classifiers have to learn it, so they show less.
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
"""The probability with which what is named would have been found."""

_LOSSES = 2**15
"""Losses that stand for the law of a run's loss."""

_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Of the runs, the clearest, that the best guesser may guess."""

_MAIN = 8
"""Primary tests of single numbers share half of their level, about."""

_MAX_RUNS = 2**20
"""Of each world; with more nobody makes an audit."""


def count_messages(runs: Sequence[RunTraffic]) -> int:
    """Count the messages of a run among which epsilon may be divided: those of one direction that vary, of the median run."""
    first: dict[tuple[str, int], bytes] = {}
    varied = set[tuple[str, int]]()
    for run in runs:
        for key, digest in _places(run):
            if first.setdefault(key, digest) != digest:
                varied.add(key)
    counts = [Counter(key[0].rpartition(" ")[2] for key, _ in _places(run) if key in varied) for run in runs]
    return max(1, int(np.median([max(each.values(), default=0) for each in counts])))


def _places(run: RunTraffic) -> Iterator[tuple[tuple[str, int], bytes]]:
    count = Counter[str]()
    for each in run.messages:
        yield (each.place, count[each.place]), each.digest
        count[each.place] += 1


class PowerAnalysis:
    """What so many runs show of a mechanism that loses more than is claimed.

    The mechanism has Laplace noise on one number of each of some messages, among which epsilon is divided evenly; at a delta, it
    has Gaussian noise, for which it is all the same how many messages there are.
    """

    def __init__(self, claim: float, delta: float, messages: int, levels: AlphaAllocation) -> None:
        """Of audits of this claim.

        Args:
            claim, delta: what is claimed of a run.
            messages: that share it.
            levels: of the audit.
        """
        self._claim, self._delta, self._messages, self._level = claim, delta, messages, compute_classifier_level(levels)
        generator = np.random.default_rng(0)
        if delta > 0.0:
            self._noise = stats.norm.ppf((np.arange(_LOSSES) + 0.5) / _LOSSES)[:, None]
        else:
            self._noise = generator.laplace(size=(_LOSSES, messages))

    def sample_losses(self, factor: float) -> FloatArray:
        """Losses of runs whose noise is the claimed one divided by a factor."""
        if self._delta > 0.0:
            shift = factor * _gaussian_shift(self._claim, self._delta)
            losses: FloatArray = shift * self._noise[:, 0] + shift**2 / 2.0
            return losses
        shift = factor * self._claim / self._messages
        return np.asarray((np.abs(self._noise + shift) - np.abs(self._noise)).sum(axis=1))

    def can_detect(self, factor: float, runs: int) -> bool:
        """Whether the best guesser shows, nine times in ten, more than the claim of such noise; runs of both worlds."""
        return self.compute_bound(factor, runs) > self._claim

    def compute_bound(self, factor: float, runs: int) -> float:
        """The bound on epsilon that the best guesser shows of such noise, nine times in ten; runs of both worlds."""
        losses, guesses = self.sample_losses(factor), count_guessed_runs(runs)
        sizes, best = np.abs(losses), 0.0
        for share in _SHARES:
            least = min(float(np.quantile(sizes, 1.0 - share)), float(sizes.max()) * (1.0 - 1e-9))
            guessed = sizes >= least
            made = int(guesses * guessed.mean())
            right = int(stats.binom.ppf(1.0 - _POWER, made, float((losses[guessed] > 0.0).mean()))) if made else 0
            best = max(best, compute_epsilon_lower_bound(right, made, self._level, self._delta, guesses))
        return best

    def find_min_factor(self, runs: int) -> float:
        """The smallest factor that is found; infinite: none up to 1,000 is."""
        factors = np.geomspace(1.02, 1000.0, 200).tolist()
        found = bisect_left(factors, True, key=lambda factor: self.can_detect(factor, runs))
        return factors[found] if found < len(factors) else math.inf

    def find_needed_runs(self, factor: float) -> float:
        """Runs of each world with which such a factor is found, to a tenth; infinite: more than anybody makes."""
        runs = 16.0
        while not self.can_detect(factor, 2 * int(runs)):
            runs *= 1.1
            if runs > _MAX_RUNS:
                return math.inf
        return int(float(f"{runs:.2g}"))

    def list_detectable_effects(self, runs: int) -> Iterator[DetectableEffect]:
        """What would have been found by guesses alone, nine times in ten, in so many runs of both worlds."""
        factor = self.find_min_factor(runs)
        if math.isfinite(factor):
            law = "Gaussian" if self._delta else "Laplace"
            divided = self._messages > 1 and not self._delta
            spread = f", divided among {self._messages:,} messages" if divided else ""
            part = f"{100 / factor:.2g} % of the {law} noise that the claim needs{spread}"
            yield DetectableEffect("classifiers", factor, f"a service with {part} (by the best of guessers)")
        guesses = count_guessed_runs(runs)
        for right in range(1, guesses + 1):
            if compute_epsilon_lower_bound(right, right, self._level, self._delta, guesses) > self._claim:
                # So many right guesses, nine times in ten, of runs of world 1 that have the mark.
                share = float(stats.beta.ppf(_POWER, right, guesses - right + 1)) * 2.0
                if share < 1.0:
                    text = f"a mark that {100 * share:.2g} % of the runs of one world have, and none of the other"
                    yield DetectableEffect("worlds", share, text)
                return


def _gaussian_shift(epsilon: float, delta: float) -> float:
    """How many standard deviations apart Gaussian noise may put the worlds (Balle and Wang 2018)."""
    return float(optimize.brentq(lambda shift: _gaussian_delta(shift, epsilon) - delta, 1e-9, 1e3 + 10.0 * epsilon))


def compute_gaussian_epsilon(shift: float, delta: float) -> float:
    """Epsilon at a delta of Gaussian noise whose worlds are so many standard deviations apart; infinite at delta 0."""
    if shift == 0.0 or _gaussian_delta(shift, 0.0) <= delta:
        return 0.0
    if delta == 0.0:
        return math.inf
    most = shift**2 / 2.0 + shift * math.sqrt(2.0 * math.log(1.0 / delta))
    return float(optimize.brentq(lambda epsilon: _gaussian_delta(shift, epsilon) - delta, 0.0, most))


def _gaussian_delta(shift: float, epsilon: float) -> float:
    far = float(special.log_ndtr(-shift / 2.0 - epsilon / shift))
    return float(special.ndtr(shift / 2.0 - epsilon / shift)) - math.exp(min(epsilon + far, 700.0))


def compute_noise_effect(numbers: int, levels: AlphaAllocation) -> tuple[DetectableEffect, bool]:
    """The smallest error of the scale of claimed noise that is found in so many numbers, and whether half of the noise is."""
    level = levels.compute_level("conformance", "marginal", _MAIN) / 2.0
    error = float(stats.norm.isf(level) + stats.norm.isf(1.0 - _POWER)) / math.sqrt(numbers)
    halved = float(special.gammainc(numbers, 2.0 * special.gammaincinv(numbers, level))) >= _POWER
    return DetectableEffect("marginal", error, f"noise whose scale is wrong by {100 * error:.2g} %"), halved
