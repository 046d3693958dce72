"""Epsilon against an adversary that sees the decisions of all learners and no message."""

from collections.abc import Mapping

from sottovoce_core.budget.cost import LearnerCost
from sottovoce_core.experiment import Experiment
from sottovoce_core.privacy.guarantee import Guarantee


def measure(experiment: Experiment, replicas: int) -> Mapping[str, float]:
    """Return the largest epsilon of the learners."""
    costs = [LearnerCost(experiment.run, i, own) for i, own in enumerate(experiment.records.learners)]
    return {"epsilon_of_decisions": max(_measure(each.guarantee) for each in costs)}


def _measure(guarantee: Guarantee) -> float:
    """Return epsilon of the decisions, which is that of the messages unless decisions have one of their own."""
    return guarantee.epsilon() if guarantee.output_epsilon is None else float(guarantee.output_epsilon[-1])
