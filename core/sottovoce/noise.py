"""Noise: discrete Laplace numbers on a lattice, from the operating system, a seed, a recording, or nowhere.

Why a lattice. A float64 Laplace number added to a float64 state leaks the state through its low bits (Mironov 2012). So
the state is rounded to a lattice `Z * grid` first, and the noise is discrete Laplace on that same lattice: every lattice
point can come from every state, and `log p(x) - log p(x')` is exactly `(|x'| - |x|) / scale`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FloatArray, Scalars
from sottovoce.errors import SpecError
from sottovoce.machine import Noise

GRID_BITS = 40
"""Lattice points per Laplace scale, as a power of two: rounding moves a state by less than 2^-40 scales."""

_LOW_BITS = GRID_BITS - 10
_LEVELS = np.exp2(np.arange(_LOW_BITS, GRID_BITS + 7))
"""Values of the bits that are drawn one by one. The next one would be set with probability below e^-64."""


def grid(scale: Scalars) -> Scalars:
    """Lattice spacing for a Laplace scale: the power of two that is `2^-40 * scale`, rounded down.

    It depends on the public schedule alone, never on data.
    """
    if isinstance(scale, float):
        return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)
    spacing: FloatArray = np.ldexp(1.0, np.frexp(scale)[1] - 1 - GRID_BITS)
    return spacing


def on_grid(values: FloatArray, spacing: Scalars) -> FloatArray:
    """`values` rounded to the nearest multiple of `spacing` (a power of two, so scaling is exact)."""
    rounded: FloatArray = np.rint(values / spacing)
    rounded *= spacing
    return rounded


class SystemNoise:
    """Noise of a deployed learner: discrete Laplace from the operating system's entropy, nothing kept, no seed.

    The magnitude of a discrete Laplace number is geometric with ratio `q = exp(-grid/scale)`, and the binary digits of a
    geometric number are independent. Each high bit (value v) is set with probability `1 / (1 + q^-v)`: one comparison, in
    which 16 random bits decide, and 48 more settle the rare tie. The low bits together are uniform, accepted with
    probability `q^low` (at least .999). What is rejected is drawn again, and so is minus zero, else zero counted twice.
    """

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        if not (isinstance(scale, float) and isinstance(grid, float)):
            raise TypeError("a deployed learner draws for itself alone: scale must be one number")
        rate = grid / scale
        drawn, accepted = self._attempt(math.prod(shape), rate)
        while not accepted.all():
            again = np.flatnonzero(~accepted)
            drawn[again], accepted[again] = self._attempt(again.size, rate)
        drawn *= grid
        return drawn.reshape(shape)

    def _attempt(self, count: int, rate: float) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
        """Signed whole numbers, and which of them count."""
        low, coin = np.frombuffer(self._entropy(16 * count), np.uint64).reshape(2, count)
        magnitude = (low >> np.uint64(64 - _LOW_BITS)).astype(np.float64)
        accepted = coin < _as_fraction(np.exp(-rate * magnitude))
        magnitude += _LEVELS @ self._high_bits(count, rate)
        negative = np.frombuffer(self._entropy(count), np.int8) < 0
        accepted &= (magnitude > 0) | ~negative
        return np.negative(magnitude, out=magnitude, where=negative), accepted

    def _high_bits(self, count: int, rate: float) -> FloatArray:
        """`(levels, count)` independent zeros and ones."""
        with np.errstate(over="ignore"):  # the top levels: exp is infinite, the probability zero
            chance = _as_fraction(1.0 / (1.0 + np.exp(rate * _LEVELS)))
        coarse = np.frombuffer(self._entropy(2 * count * _LEVELS.size), np.uint16).reshape(_LEVELS.size, count)
        leading = (chance >> np.uint64(48)).astype(np.uint16)[:, None]
        bits = coarse < leading
        level, sample = np.nonzero(coarse == leading)
        if level.size:
            fine = np.frombuffer(self._entropy(8 * level.size), np.uint64) >> np.uint64(16)
            bits[level, sample] = fine < (chance[level] & np.uint64((1 << 48) - 1))
        return bits.astype(np.float64)


def _as_fraction(probability: FloatArray) -> npt.NDArray[np.uint64]:
    """Probabilities in (0, 1] as 64-bit fractions; one becomes the largest fraction."""
    return np.minimum(np.ldexp(probability, 64), np.nextafter(2.0**64, 0)).astype(np.uint64)


class SeededNoise:
    """Noise for simulation: reproducible, fast, and no protection at all.

    Continuous Laplace numbers rounded to the lattice: at 2^-40 scales the difference to the discrete law is beyond any test.
    """

    def __init__(self, seed: int | np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.SFC64(seed))

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        drawn = self._generator.standard_exponential(shape)
        signs = np.unpackbits(np.frombuffer(self._generator.bytes((drawn.size + 7) // 8), np.uint8), count=drawn.size)
        np.negative(drawn, out=drawn, where=signs.reshape(shape).view(bool))
        drawn *= scale
        return on_grid(drawn, grid)


class NoNoise:
    """Silence: every number is zero."""

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return np.zeros(shape)


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """Noise drawn earlier, said again: field name to array `(rounds, ..., dim)`, the shape of a draw after the round.

    A recording without replica axis serves all replicas alike.
    """

    fields: Mapping[str, FloatArray]

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
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
    drawn: dict[str, list[FloatArray]] = field(default_factory=dict)

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        drawn = self.source.laplace(name, t, scale, grid, shape)
        self.drawn.setdefault(name, []).append(drawn)
        return drawn
