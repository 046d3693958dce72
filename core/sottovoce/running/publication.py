"""What it costs to hand out a learner's model, or predictions of it: whether what was spent on messages covers it.

A model that is a function of messages tells nothing beyond them, so it costs nothing more (post-processing). Every other
model has seen records that no noise hides: no epsilon covers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from sottovoce.algorithms.interface import SaysItsModel
from sottovoce.running.run import Run
from sottovoce.spec import RunSpec


class Cover(StrEnum):
    """By what a model that leaves its owner is covered."""

    MESSAGES = "messages"
    """It follows from messages whose noise was charged."""
    DECISIONS = "decisions"
    """By a promise of its own, to whoever sees decisions and hears no message."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Publication:
    """What a model costs whose owner hands it out.

    Attributes:
        cover: by what it is covered.
        epsilon: of an event, in all that is known then of the learner's run; infinite: nothing is promised.
        text: why, for people.
    """

    cover: Cover
    epsilon: float
    text: str

    @property
    def protected(self) -> bool:
        """Does any promise hold?"""
        return self.cover is not Cover.NOTHING


def publication(
    run: Run, learner: int, rounds: int, spent: float | None = None, *, private: bool = True
) -> Publication:
    """What it costs to hand out a learner's model.

    Args:
        run: that made it.
        learner: its index.
        rounds: that the model has learned from.
        spent: epsilon of its messages, by its meter; None: as planned.
        private: whether the noise was the operating system's; seeded and recorded noise protects nobody.
    """
    name = run.algorithm.name
    if not rounds:
        return Publication(
            Cover.MESSAGES, 0.0, "no record was learned: it is where learning starts, which everybody knows"
        )
    if not private:
        return Publication(
            Cover.NOTHING,
            math.inf,
            "its noise is from a seed or a recording, which protects nobody: no epsilon covers it",
        )
    there = run.attendance(learner).stretches
    if there and there[0].stop < rounds:
        text = "its learner was away after it had learned, and goes on without noise then: no epsilon covers it"
        return Publication(Cover.NOTHING, math.inf, text)
    if not isinstance(run.algorithm, SaysItsModel) or not run.algorithm.says_model(rounds):
        return _published(run, learner, rounds)
    if spent is None:
        spent = run.guarantee(learner).epsilon(rounds)
    if spent == math.inf or not _noisy(run, learner):
        text = f"the model of {name} follows from its messages, and these carry no noise: no epsilon covers it"
        return Publication(Cover.NOTHING, math.inf, text)
    text = f"the model of {name} follows from messages that were charged: it costs nothing more"
    if run.algorithm.accountant(learner).shared:
        text += "; all learners hold the same records, so their epsilons add up"
    return Publication(Cover.MESSAGES, spent, text)


def _published(run: Run, learner: int, rounds: int) -> Publication:
    """What is promised of decisions alone; mostly nothing."""
    name = run.algorithm.name
    alone = None if run.spec.endless else run.guarantee(learner).output
    if alone is None:
        text = f"the model of {name} has learned from records in ways that no message shows: no epsilon covers it"
        return Publication(Cover.NOTHING, math.inf, text)
    if heard := _heard(run.spec):
        text = f"{name} promises to whoever sees decisions and hears no message, and {heard}: no epsilon covers it"
        return Publication(Cover.NOTHING, math.inf, text)
    text = f"{name} promises this to whoever sees decisions and hears no message; its messages carry no noise"
    return Publication(Cover.DECISIONS, float(alone[min(rounds, len(alone)) - 1]), text)


def _heard(spec: RunSpec) -> str:
    return f"this run was captured (capture: {spec.capture})" if spec.capture in ("relay", "mirror") else ""


def _noisy(run: Run, learner: int) -> bool:
    """A meter is finite where messages have noise; that of a run that has sent none yet says nothing."""
    rounds = 2 if run.spec.endless else run.spec.rounds
    return math.isfinite(run.planned_epsilon(learner, min(rounds, 1000)))
