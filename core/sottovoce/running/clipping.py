"""Runs in which what a neighbour says is clipped to what a correct one can say, before it is used.

Not projected onto the decision set: what is said is a decision with noise, and lies outside; the mean of many such messages is
the mean decision, that of their projections is not. What is clipped lies further out than honest noise ever reaches, so a run
of correct learners is the same number by number, and one number of a neighbour moves nobody further than noise could.

It is a function of what was heard, which is the same in both worlds. So it costs nothing where a guarantee holds whatever
is heard, and is refused elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.algorithms.interface import Algorithm, Clippable, Message
from sottovoce.errors import CheckFailed, require
from sottovoce.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Clipping:
    """What becomes of messages before they are used.

    Attributes:
        bounds: of a learner and a round, as `Clippable.clip_bounds`; None: messages are used as they are.
    """

    bounds: Callable[[int, int], Mapping[str, float]] | None = None

    def of(self, sender: int, t: int, message: Message) -> Message:
        """One learner's message of a round; fields `(..., dim)`."""
        if self.bounds is None:
            return message
        most = self.bounds(sender, t)
        return Message({name: np.clip(value, -most[name], most[name]) for name, value in message.fields.items()})

    def of_all(self, t: int, message: Message) -> Message:
        """All learners' messages of a round; fields `(learners, replicas, dim)`."""
        if self.bounds is None:
            return message
        learners = len(next(iter(message.fields.values())))
        most = [self.bounds(i, t) for i in range(learners)]
        limits = {name: np.array([each[name] for each in most]).reshape(-1, 1, 1) for name in message.fields}
        return Message({name: np.clip(value, -limits[name], limits[name]) for name, value in message.fields.items()})


def clipping(spec: RunSpec, algorithm: Algorithm[Any]) -> Clipping:
    """What a run does with its messages.

    Raises:
        CheckFailed: MISCONDUCT_CLIP: it is to clip them, and cannot.
    """
    if spec.misconduct != "clip":
        return Clipping()
    code, name = "MISCONDUCT_CLIP", algorithm.name
    instead = "set misconduct to stop"
    if not isinstance(algorithm, Clippable):
        text = "messages can be clipped only where they are decisions with noise on them, and those of"
        raise CheckFailed(code, f"{text} {name} are not: nothing bounds what a correct neighbour may say; {instead}")
    text = "messages can be clipped only where the guarantee holds whatever is heard, and that of"
    require(algorithm.accountant(0).any_messages, code, f"{text} {name} does not say so; {instead}")
    bounded = all(map(math.isfinite, algorithm.clip_bounds(0, 0).values()))
    require(bounded, code, f"messages can be clipped only where the decision set is bounded; {instead}")
    text = "rounds may use older messages, of which each has bounds of its own: set clock.late to wait, or another clock.mode"
    require(spec.clock.hold_s is None, code, text)
    return Clipping(algorithm.clip_bounds)
