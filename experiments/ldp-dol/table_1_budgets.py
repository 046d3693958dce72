"""Budgets of Table I from the noise level and the number of rounds alone, without the loss and the dimension."""

from __future__ import annotations

import math

import numpy as np

from sottovoce_core.experiment import Experiment


def measure(experiment: Experiment, replicas: int) -> dict[str, float]:
    """Return `sum_{t=0..T} 1/(b (t+1)^1.24)` for noise of scale `b (t+1)^varsigma` and T rounds.

    1.24 = 1 + v - u + varsigma, with v = 0.77, u = 0.65 and varsigma = 0.12 of the second learner. The sum is (25) of the paper
    with 1 for the product of its constants.
    """
    scale = experiment.run.algorithm.sigma[0] / math.sqrt(2)  # type: ignore[attr-defined]  # of LDP-DOL
    return {"budget_without_constants": float((np.arange(1.0, experiment.rounds + 2) ** -1.24).sum() / scale)}
