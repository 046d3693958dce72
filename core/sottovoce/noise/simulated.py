"""Noise of simulations and replays: seeded, recorded, or none. It protects nobody."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import SpecError
from sottovoce.noise.draw import Draw, Noise

_LEADING = 7 if sys.byteorder == "little" else 0
"""Of the eight bytes of a float64: the one with its sign."""
AHEAD = 2**14
"""Numbers that `SeededNoise` draws at a time, at least."""


class SeededNoise:
    """Noise for simulation: reproducible, fast, and no protection at all.

    Continuous numbers rounded to the lattice: at 2^-40 scales the difference to the discrete law is beyond any test. Halves are
    rounded up, not to even: nine to twelve binary places are left of a number of 2^41 to 2^44 spacings, so that halves are
    frequent, and an even number of spacings would be said too often by 10^-4.
    """

    def __init__(self, seed: int | np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.SFC64(seed))
        self._ahead, self._used = np.empty(0), 0

    def __call__(self, draw: Draw) -> FloatArray:
        match draw.law:
            case "laplace":
                drawn = self._standard(math.prod(draw.shape)).reshape(draw.shape)
            case "gaussian":
                drawn = self._generator.standard_normal(draw.shape)
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

    def _standard(self, count: int) -> FloatArray:
        """Laplace numbers of scale 1, each given out once: small draws are cut from a large one, whose calls cost more."""
        if 4 * count > AHEAD:
            return self._signed(count)
        if self._used + count > self._ahead.size:
            self._ahead, self._used = self._signed(AHEAD), 0
        self._used += count
        return self._ahead[self._used - count : self._used]

    def _signed(self, count: int) -> FloatArray:
        drawn = self._generator.standard_exponential(count)
        signs = np.unpackbits(np.frombuffer(self._generator.bytes((count + 7) // 8), np.uint8), count=count)
        signs *= 128
        leading = drawn.view(np.uint8)[_LEADING::8]
        leading |= signs
        return drawn

    def _spherical(self, draw: Draw) -> FloatArray:
        direction = self._generator.standard_normal(draw.shape)
        radius = self._generator.standard_gamma(draw.shape[-1], (*draw.shape[:-1], 1)) / draw.scale
        drawn: FloatArray = direction * (radius / np.linalg.norm(direction, axis=-1, keepdims=True))
        return drawn


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
