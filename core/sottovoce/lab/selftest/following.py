"""Algorithms whose noise follows what it should hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sottovoce.algorithms.interface import Heard, Message
from sottovoce.arrays import Batch, FloatArray
from sottovoce.lab.selftest.breaking import Altered, changed
from sottovoce.lab.selftest.mutants import Breaks, altered
from sottovoce.noise import Draw, Noise, no_noise


@dataclass(frozen=True, slots=True)
class _Known:
    """What a learner has when it speaks.

    Attributes:
        state: as the correct algorithm has it.
        before: the same, one round earlier.
        batch: the records of the round before; None: there was none.
    """

    state: Any
    before: Any
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class Says:
    """What it would say in this round, and what may make its noise another one.

    Attributes:
        centre: without noise.
        moved: by how much that is not what it said before, without noise.
        labels: of the first record of the round before; 0 where there was none. The same for all replicas.
    """

    centre: FloatArray
    moved: FloatArray
    labels: FloatArray


Following = Callable[[FloatArray, Draw, Says], FloatArray]
"""From correct noise, and what it should know nothing of, to what is said in its place."""


@dataclass(frozen=True)
class _Follows(Altered):
    """An algorithm whose noise follows what it should hide."""

    change: Following

    def start(self, who: Any) -> _Known:
        state = self.correct.start(who)
        return _Known(state, state)

    def speak(self, known: _Known, noise: Noise) -> tuple[_Known, Message]:
        _, clean = self.correct.speak(known.state, no_noise)
        _, old = self.correct.speak(known.before, no_noise)
        labels = np.zeros((1, 1, 1)) if known.batch is None else known.batch.labels[..., :1, None]

        def follow(drawn: FloatArray, draw: Draw) -> FloatArray:
            if draw.field not in clean.fields:
                return drawn
            centre = clean[draw.field]
            return self.change(drawn, draw, Says(centre, centre - old[draw.field], labels))

        state, said = self.correct.speak(known.state, changed(noise, follow))
        return replace(known, state=state), said

    def listen(self, known: _Known, heard: Heard, batch: Batch) -> _Known:
        return _Known(self.correct.listen(known.state, heard, batch), known.state, batch if batch.size else None)

    def overheard(self, known: _Known, message: Message) -> tuple[_Known, FloatArray]:
        state, density = self.correct.overheard(known.state, message)
        return replace(known, state=state), density

    def decision(self, known: _Known) -> FloatArray:
        decision: FloatArray = self.correct.decision(known.state)
        return decision


def following(change: Following) -> Breaks:
    """A break of an algorithm: its noise is changed with knowledge of what it should hide."""
    return altered(lambda algorithm: _Follows(algorithm, change))
