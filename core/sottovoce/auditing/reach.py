"""What an audit would have found, had it been there: the smallest violations that so many runs show nine times in ten.

Formulas, at the levels in use; all are approximate, and none is a test. An audit that could not even have found a learner without
noise says nothing for the learner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import special, stats

from sottovoce.arrays import FloatArray
from sottovoce.auditing.blackbox import level, tested
from sottovoce.auditing.bounds import ceiling, epsilon_lower_bound
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.verdict import Reach
from sottovoce.noise import GRID_BITS

_POWER = 0.9
"""The probability with which what is named would have been found."""

_NEAR_LAGS = 9
"""Of two learners' noise, about: the same or the next round and coordinate, and rounds two apart."""


_SIGNED_BITS = 500
"""Comparisons of a number's sign with bits of its own uniform number, about."""

_RESOLVED = 1.6
"""Numbers for each bit of evidence: one in ten has the other sign, and there may be fewer than are expected."""


def most(plan: AuditPlan) -> float:
    """The largest lower bound that so many runs could give, if all guesses were right; 0 where nothing is guessed."""
    if not plan.paired:
        return 0.0
    if plan.listener.replayable:
        return ceiling(plan.runs, plan.levels.of("likelihood", "whole runs"))
    guesses = tested(2 * plan.runs)
    return epsilon_lower_bound(guesses, guesses, level(plan.levels))


def reaches(plan: AuditPlan, numbers: int, *, on_lattice: bool = True) -> tuple[Reach, ...]:
    """What would have been found, class by class.

    Args:
        plan: the audit.
        numbers: of noise that conformance looked at.
        on_lattice: whether that noise is on a lattice.
    """
    return (*_of_noise(plan, numbers, on_lattice), *_of_worlds(plan))


def _of_noise(plan: AuditPlan, numbers: int, on_lattice: bool) -> Iterator[Reach]:
    if not numbers:
        return
    error = (_normal(plan.levels.of("conformance", "marginal", 8) / 2) + _normal(1 - _POWER)) / math.sqrt(numbers)
    yield Reach("marginal", error, f"noise whose scale is wrong by {_percent(error)}")
    learners = plan.run.spec.n_learners
    messages = 2 * plan.all_runs * plan.run.spec.rounds * learners
    if learners > 1:
        products = max(1.0, plan.close * numbers / learners)
        among = _NEAR_LAGS * learners * (learners - 1) / 2
        share = plan.levels.of("conformance", "dependence", 8) / among
        together = min(1.0, (_normal(share / 2) + 1.6) / math.sqrt(products))
        yield Reach("dependence", together, f"noise of two learners that is correlated by {together:.2g}")
    enough = _RESOLVED * -math.log2(plan.levels.of("conformance", "dependence", 40) / _SIGNED_BITS)
    if on_lattice and plan.close * numbers >= enough:
        bits = GRID_BITS + math.floor(math.log2(plan.close * numbers / enough))
        yield Reach("dependence", bits, f"signs that are any of the first {bits} bits behind their sizes")
    centre = math.sqrt(35.0 / messages)
    yield Reach("dependence", centre, f"centres that are wrong by {centre:.2g} scales in every message")
    streams = messages * (messages - 1) / (2 * math.log(1 / (1 - _POWER)))
    if streams >= 1.0:
        yield Reach("freshness", streams, f"noise from a generator of up to {streams:,.0f} different streams")


def _of_worlds(plan: AuditPlan) -> Iterator[Reach]:
    if not plan.paired:
        return
    if plan.listener.replayable:
        needed = _epsilon_found(plan)
        if math.isfinite(needed):
            yield Reach("whole runs", needed, f"guesses of whole runs that need an epsilon of {needed:.3g}")
    area = 0.5 + 5.6 / math.sqrt(6 * min(pair.runs for pair in plan.pairs))
    if area < 1.0:
        worlds = "the worlds of any pair" if plan.beside else "the worlds"
        yield Reach("worlds", area, f"a length, a time or a count that tells {worlds} apart with an AUC of {area:.2g}")


def _epsilon_found(plan: AuditPlan) -> float:
    """The smallest epsilon, if all of it shows in every run, that guesses put above the claim; infinite: none."""
    guesses, share = 2 * plan.runs, plan.levels.of("likelihood", "whole runs")
    if ceiling(plan.runs, share) <= plan.epsilon:
        return math.inf
    for epsilon in np.geomspace(max(plan.epsilon, 1e-3), max(plan.epsilon, 1e-3) + 40.0, 200).tolist():
        usual = int(stats.binom.ppf(1 - _POWER, guesses, special.expit(epsilon)))
        if epsilon_lower_bound(usual, guesses, share) > plan.epsilon:
            return float(epsilon)
    return math.inf


def blind(plan: AuditPlan, numbers: int, losses: FloatArray) -> str:
    """The plainest violation that the audit could not have found, in words; empty: it could have found these.

    Args:
        plan: the audit.
        numbers: of noise that conformance looked at.
        losses: exact losses of all runs; none where they are not known.
    """
    exceeds = most(plan) > plan.epsilon
    share = plan.levels.of("likelihood", "calibration", 8)
    chances = special.expit(np.abs(losses[np.isfinite(losses)]))
    certain = bool(len(chances)) and float(np.log(chances).sum()) < math.log(share / 2)
    if not (numbers or exceeds or certain):
        return "a learner without noise"
    least = special.gammaincinv(max(numbers, 1), plan.levels.of("conformance", "marginal", 8) / 2)
    halved = numbers > 0 and float(special.gammainc(numbers, 2.0 * least)) >= _POWER
    slope = float(np.sum(losses[np.isfinite(losses)] ** 2 * chances * (1.0 - chances))) > 4.9**2
    if not (halved or exceeds or slope):
        return "a learner with half of its noise"
    return ""


def _normal(above: float) -> float:
    """The normal number that is exceeded so often."""
    quantile: float = stats.norm.isf(above)
    return quantile


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
