"""The information limit: how many runs carry enough evidence against a broken learner, for the best of all tests.

A break whose numbers follow Q where P is claimed gives KL(Q || P) nats each, on average. A test at a level alpha that knew the
break beforehand would need about `ln(1/alpha)` nats (Stein), and no other test needs fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.worlds import numbers_of
from sottovoce.running.run import Run

Limit = Callable[[Run, float], float]
"""From a run and a level to the runs of each world that carry enough evidence; conformance looks at both worlds."""


FOUND = 0.9
"""The probability with which something is to be found."""


def each_number(nats: float, share: float = 1.0) -> Limit:
    """So much evidence in every number that any learner says, on average; all of it in a share of them."""
    return lambda run, alpha: _enough(alpha, nats, share, numbers_of(run))


def each_message(nats: float, share: float = 1.0) -> Limit:
    """So much in every message."""
    return lambda run, alpha: _enough(alpha, nats, share, run.spec.rounds * run.spec.n_learners)


def each_run(nats: float, share: float = 1.0) -> Limit:
    """So much in every run."""
    return lambda run, alpha: _enough(alpha, nats, share, 1)


def _enough(alpha: float, nats: float, share: float, count: int) -> float:
    """Runs of each world; there are two. What is seldom must happen once at all."""
    return max(math.log(1.0 / alpha) / nats, math.log(1.0 / (1.0 - FOUND)) / share if share < 1.0 else 0.0) / (
        2.0 * count
    )


def repeated(values: float, drawn: Callable[[Run], float]) -> Limit:
    """Something drawn from so many values comes twice, as birthdays do.

    Args:
        values: how many there are.
        drawn: in one run.
    """
    draws = math.sqrt(2.0 * values * math.log(1.0 / (1.0 - FOUND)))
    return lambda run, alpha: draws / (2.0 * drawn(run))


def event(broken: float, claimed: float) -> float:
    """Nats of whether something happens: its probability, and the claimed one."""
    return _term(broken, claimed) + _term(1.0 - broken, 1.0 - claimed)


def _term(broken: float, claimed: float) -> float:
    return 0.0 if broken == 0.0 else broken * math.log(broken / claimed)


def rescaled(factor: float) -> float:
    """Nats of a number whose scale is another one."""
    return factor - 1.0 - math.log(factor)


def shaped(density: Callable[[FloatArray], FloatArray]) -> float:
    """Nats of a number with this density of its size, in scales, where `exp(-x)` is claimed; a sum over a fine grid."""
    sizes = np.linspace(0.0, 60.0, 600_001)
    its = density(sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(its > 0.0, its * (np.log(its) + sizes), 0.0)
    return float(np.trapezoid(terms, sizes))


def correlated(*correlations: float) -> float:
    """Nats of normal numbers with such correlations of each with one that was before it: `-ln(1 - rho^2)/2` each."""
    return sum(-0.5 * math.log1p(-(each**2)) for each in correlations)
