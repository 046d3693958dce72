"""Noise of simulations and replays: seeded, recorded, or none. It protects nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import SpecError
from sottovoce.noise.draw import Draw, Noise
from sottovoce.noise.streams import Streams, laplace, normal


class SeededNoise:
    """Noise for simulation: reproducible, fast, and no protection at all.

    A replica's noise follows from the seed and its index: it is the same beside any number of others. Replicas are the second
    axis of a draw, or the first one of two; a draw of one axis is replica 0's.

    Continuous numbers rounded to the lattice: at 2^-40 scales the difference to the discrete law is beyond any test. Halves are
    rounded up, not to even: nine to twelve binary places are left of a number of 2^41 to 2^44 spacings, so that halves are
    frequent, and an even number of spacings would be said too often by 10^-4.
    """

    def __init__(self, seed: int | np.random.SeedSequence) -> None:
        seed = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        self._laplace, self._normal = Streams(seed, 0, laplace), Streams(seed, 1, normal)

    def __call__(self, draw: Draw) -> FloatArray:
        match draw.law:
            case "laplace":
                drawn = self._laplace.take(draw.shape)
            case "gaussian":
                drawn = self._normal.take(draw.shape)
            case "spherical":
                return self._spherical(draw)
            case _:
                assert_never(draw.law)
        if draw.grid is None:
            drawn *= draw.scale
            return drawn
        drawn *= draw.scale / draw.grid
        drawn += 0.5
        np.floor(drawn, out=drawn)
        drawn *= draw.grid
        return drawn

    def _spherical(self, draw: Draw) -> FloatArray:
        """A normal vector's direction, and the sum of as many exponential numbers as its norm: a gamma number."""
        direction = self._normal.take(draw.shape)
        direction *= 1.0 / np.linalg.norm(direction, axis=-1, keepdims=True)
        direction *= np.abs(self._laplace.take(draw.shape)).sum(axis=-1, keepdims=True) / draw.scale
        return direction


def no_noise(draw: Draw) -> FloatArray:
    """Silence: every number is zero."""
    return np.zeros(draw.shape)


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """Noise drawn earlier, said again: field name to array `(rounds, ..., dim)`, the shape of a draw after the round.

    A recording without replica axis serves all replicas alike.
    """

    fields: Mapping[str, FloatArray]
    drawn: set[str] = field(default_factory=set, compare=False)
    """Fields that were asked for: which an algorithm draws need not be those that it says."""

    @property
    def left(self) -> list[str]:
        """Fields that nobody has asked for."""
        return sorted(self.fields.keys() - self.drawn)

    def __call__(self, draw: Draw) -> FloatArray:
        self.drawn.add(draw.field)
        rounds = self.fields.get(draw.field, ())
        if draw.round >= len(rounds):
            raise SpecError(
                f"the recorded noise must have field {draw.field!r} for round {draw.round}, and it does not"
            )
        recorded = rounds[draw.round]
        try:
            return np.broadcast_to(recorded, draw.shape)
        except ValueError:
            text = (
                f"recorded noise of field {draw.field!r} must have shape {draw.shape} in a round, got {recorded.shape}"
            )
            raise SpecError(text) from None


@dataclass(slots=True)
class Recorder:
    """Passes another source's noise on, and keeps it."""

    source: Noise
    rounds: dict[str, dict[int, FloatArray]] = field(default_factory=dict)
    """What was drawn, by field and round."""

    @property
    def drawn(self) -> dict[str, list[FloatArray]]:
        """The same as lists by round; zeros in rounds without noise. `RecordedNoise` takes them, stacked."""
        dense = {}
        for name, rounds in self.rounds.items():
            blank = np.zeros_like(next(iter(rounds.values())))
            dense[name] = [rounds.get(t, blank) for t in range(max(rounds) + 1)]
        return dense

    def __call__(self, draw: Draw) -> FloatArray:
        drawn = self.source(draw)
        self.rounds.setdefault(draw.field, {})[draw.round] = drawn
        return drawn
