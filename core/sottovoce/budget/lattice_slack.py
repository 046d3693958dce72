"""Is rounding to the noise's lattice cheap? Its price is charged in any case; this tells when it is no longer small."""

from __future__ import annotations

import math

import numpy as np

from sottovoce.algorithms.setting import Caveat
from sottovoce.noise import GRID_BITS
from sottovoce.running.run import Run

SHARE = 1e-3
"""Of epsilon: what rounding may cost without a word."""

_LOOKED = 20_000
"""Rounds; longer runs are judged by the first so many."""
_FEW = 100
"""Rounds that are examined first: where their loss is large enough, no later round can make the share of the slack large."""
_SMALLEST = 0.01
"""An epsilon below which nobody goes: a run that is fine with it is not looked at any closer."""


def check_lattice(run: Run) -> tuple[Caveat, ...]:
    """LATTICE_SLACK, about the learner with the largest share.

    A message of n numbers costs at most `n 2^-40` for rounding. So a run of T messages stays below the share as long as
    `n T <= 1.1e9 epsilon`.
    """
    message = sum(math.prod(shape) for shape in run.algorithm.field_shapes().values()) * 2.0**-GRID_BITS
    if run.spec.rounds * message <= SHARE * _SMALLEST:
        return ()
    shares = [_share(run, learner, message) for learner in range(run.spec.n_learners)]
    share, learner, slack, epsilon = max(shares, key=lambda each: each[0])
    if share <= SHARE:
        return ()
    return (
        Caveat(
            "LATTICE_SLACK",
            f"rounding to the noise's lattice may cost at most {100 * SHARE:g} % of epsilon unnoticed, got up to {slack:.3g} of "
            f"{epsilon:.3g} for {run.spec.names[learner]} (it is charged); fewer rounds or parameters, or a larger epsilon, "
            "would do",
        ),
    )


def _share(run: Run, learner: int, message: float) -> tuple[float, int, float, float]:
    """Of the slack in a learner's epsilon, the learner, the slack at most, and the epsilon; 0 where nothing is promised."""
    rounds = min(run.spec.rounds, _LOOKED)
    losses = run.algorithm.accountant(learner).losses(np.ones(min(rounds, _FEW), np.int64))
    if SHARE * math.fsum(losses) < rounds * message:
        losses = run.algorithm.accountant(learner).losses(np.ones(rounds, np.int64))
    epsilon, slack = math.fsum(losses), int(np.count_nonzero(losses)) * message
    return (slack / epsilon if 0.0 < epsilon < math.inf else 0.0), learner, slack, epsilon
