"""Noise of simulations and replays: seeded, recorded, or none. It protects nobody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sottovoce.arrays import FloatArray, Scalars
from sottovoce.errors import SpecError
from sottovoce.noise.source import Noise

AHEAD = 2**14
"""Numbers that `SeededNoise` draws at a time, at least."""


class SeededNoise:
    """Noise for simulation: reproducible, fast, and no protection at all.

    Continuous numbers rounded to the lattice: at 2^-40 scales the difference to the discrete law is beyond any test.
    """

    def __init__(self, seed: int | np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.SFC64(seed))
        self._ahead = np.empty(0)

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        drawn: FloatArray = self._standard(math.prod(shape)).reshape(shape) * (scale / grid)
        np.rint(drawn, out=drawn)
        drawn *= grid
        return drawn

    def _standard(self, count: int) -> FloatArray:
        """Laplace numbers of scale 1: small draws are cut from a large one, for numpy's calls cost more than they."""
        if 4 * count > AHEAD:
            return self._signed(count)
        if self._ahead.size < count:
            self._ahead = self._signed(AHEAD)
        drawn, self._ahead = self._ahead[:count], self._ahead[count:]
        return drawn

    def _signed(self, count: int) -> FloatArray:
        drawn = self._generator.standard_exponential(count)
        bits = np.unpackbits(np.frombuffer(self._generator.bytes((count + 7) // 8), np.uint8), count=count)
        drawn *= 1 - 2 * bits.view(np.int8)
        return drawn

    def gaussian(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        drawn: FloatArray = self._generator.standard_normal(shape) * (scale / grid)
        np.rint(drawn, out=drawn)
        drawn *= grid
        return drawn

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        direction = self._generator.standard_normal(shape)
        radius = self._generator.standard_gamma(shape[-1], (*shape[:-1], 1)) / rate
        drawn: FloatArray = direction * (radius / np.linalg.norm(direction, axis=-1, keepdims=True))
        return drawn


class NoNoise:
    """Silence: every number is zero."""

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return np.zeros(shape)

    def gaussian(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return np.zeros(shape)

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return np.zeros(shape)


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """Noise drawn earlier, said again: field name to array `(rounds, ..., dim)`, the shape of a draw after the round.

    A recording without replica axis serves all replicas alike.
    """

    fields: Mapping[str, FloatArray]

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return self._drawn(name, t, shape)

    def gaussian(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return self._drawn(name, t, shape)

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return self._drawn(name, t, shape)

    def _drawn(self, name: str, t: int, shape: tuple[int, ...]) -> FloatArray:
        if name not in self.fields or t >= len(self.fields[name]):
            raise SpecError(f"the recorded noise must have field {name!r} for round {t}, and it does not")
        try:
            return np.broadcast_to(self.fields[name][t], shape)
        except ValueError:
            raise SpecError(
                f"recorded noise of field {name!r} must have shape {shape} in a round, got {self.fields[name][t].shape}"
            ) from None


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

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return self._kept(name, t, self.source.laplace(name, t, scale, grid, shape))

    def gaussian(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return self._kept(name, t, self.source.gaussian(name, t, scale, grid, shape))

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return self._kept(name, t, self.source.spherical(name, t, rate, shape))

    def _kept(self, name: str, t: int, drawn: FloatArray) -> FloatArray:
        self.rounds.setdefault(name, {})[t] = drawn
        return drawn
