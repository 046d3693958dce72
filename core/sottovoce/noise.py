"""Noise: discrete Laplace numbers on a lattice, from the operating system, a seed, a recording, or nowhere.

Why a lattice. A float64 Laplace number added to a float64 state leaks the state through its low bits (Mironov 2012). So
the state is rounded to a lattice `Z * grid` first, and the noise is discrete Laplace on that same lattice: every lattice
point can come from every state, and `log p(x) - log p(x')` is exactly `(|x'| - |x|) / scale`.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FloatArray, IntArray, Scalars
from sottovoce.errors import SpecError
from sottovoce.machine import Noise

GRID_BITS = 40
"""Lattice points per Laplace scale, as a power of two: rounding moves a state by less than 2^-40 scales."""

_LEVELS = 18
_POWERS = np.exp2(np.arange(_LEVELS))
_SURE = 2**16 - 2**5
"""A 16-bit coin below this accepts any low bits, for they are rejected with probability below 2^-11."""


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
    rounded: FloatArray = values / spacing
    np.rint(rounded, out=rounded)
    rounded *= spacing
    return rounded


class SystemNoise:
    """Noise of a deployed learner: discrete Laplace from cryptographic random bytes; no number is kept, there is no seed.

    The bytes are those of OpenSSL's generator, which the operating system seeds, again and again and after every fork; what
    it gave out cannot be computed from what it holds. They cost a tenth of the operating system's own.

    The magnitude of a discrete Laplace number is geometric with ratio `q = exp(-grid/scale)`, and the binary digits of a
    geometric number are independent. The low bits, whose value times `grid/scale` stays below 2^-11, are drawn together:
    uniform, accepted with probability `q^low`. Each of the 18 bits above (value v) is set with probability
    `1 / (1 + q^-v)`; the next one would be with probability below e^-64, and is not drawn. What is rejected is drawn again,
    and so is minus zero, else zero counted twice. Every comparison of a random number with a probability is decided by 16
    bits, and by 48 more where those tie.
    """

    def __init__(self, entropy: Callable[[int], bytes] = ssl.RAND_bytes) -> None:
        self._entropy = entropy

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        if not (isinstance(scale, float) and isinstance(grid, float)):
            raise TypeError("a deployed learner draws for itself alone: scale must be one number")
        rate = grid / scale
        drawn, rejected = self._attempt(math.prod(shape), rate)
        while rejected.size:
            drawn[rejected], still = self._attempt(rejected.size, rate)
            rejected = rejected[still]
        drawn *= grid
        return drawn.reshape(shape)

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        """In float64, with what that leaks in the low bits: a sum of exponentials in the direction of a normal vector."""
        count, pairs = math.prod(shape), -(-math.prod(shape) // 2)
        bits = np.frombuffer(self._entropy(8 * (count + 2 * pairs)), np.uint64) >> np.uint64(11)
        uniform = np.ldexp(bits + 0.5, -53)
        radius = -np.log(uniform[:count]).reshape(shape).sum(axis=-1, keepdims=True) / rate
        length, angle = np.sqrt(-2.0 * np.log(uniform[count : count + pairs])), 2.0 * np.pi * uniform[count + pairs :]
        normal = np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count].reshape(shape)
        normal *= radius / np.linalg.norm(normal, axis=-1, keepdims=True)
        return normal

    def _attempt(self, count: int, rate: float) -> tuple[FloatArray, IntArray]:
        """Signed whole numbers, and the places of those that do not count."""
        low_bits = max(0, -11 - math.frexp(rate)[1])
        if low_bits > 32:
            raise ValueError(f"scale must be at most 2^43 times grid, got {1 / rate:g} times")
        words = np.frombuffer(self._entropy((8 + 2 * _LEVELS) * count), np.uint16)
        coin, sign = words[:count], words[count : 2 * count].view(np.int16)
        low = words[2 * count : 4 * count].view(np.uint32) >> np.uint32(32 - low_bits) if low_bits else np.zeros(count)
        bits = self._high_bits(words[4 * count :].reshape(_LEVELS, count), math.ldexp(rate, low_bits))
        magnitude = (math.ldexp(1.0, low_bits) * _POWERS) @ bits
        magnitude += low
        rejected = np.flatnonzero(coin >= _SURE)
        if rejected.size:  # not yet: they are looked at more closely
            rejected = rejected[~self._below(coin[rejected], np.exp(-rate * low[rejected]))]
        if np.count_nonzero(magnitude) < count:
            rejected = np.union1d(rejected, np.flatnonzero((magnitude == 0) & (sign < 0)))
        return np.copysign(magnitude, sign), rejected

    def _high_bits(self, coarse: npt.NDArray[np.uint16], rate: float) -> FloatArray:
        """`(levels, count)` independent zeros and ones; the lowest level's value times `grid/scale` is `rate`."""
        chance = 1.0 / (1.0 + np.exp(np.minimum(rate * _POWERS, 700.0)))
        leading = (chance * 2.0**16).astype(np.uint16)[:, None]
        bits = coarse < leading
        tied = coarse == leading
        if np.count_nonzero(tied):
            level, sample = np.divmod(np.flatnonzero(tied), coarse.shape[1])
            bits[level, sample] = self._below(coarse[level, sample], chance[level])
        return bits.astype(np.float64)

    def _below(self, leading: npt.NDArray[np.uint16], chance: FloatArray) -> npt.NDArray[np.bool_]:
        """Whether 64 random bits, of which the leading 16 are drawn already, are below a probability as a fraction."""
        fine = np.frombuffer(self._entropy(8 * leading.size), np.uint64) >> np.uint64(16)
        whole = np.minimum(np.ldexp(chance, 64), np.nextafter(2.0**64, 0)).astype(np.uint64)
        return (leading.astype(np.uint64) << np.uint64(48) | fine) < whole


AHEAD = 2**14
"""Numbers that `SeededNoise` draws at a time, at least."""


class SeededNoise:
    """Noise for simulation: reproducible, fast, and no protection at all.

    Continuous Laplace numbers rounded to the lattice: at 2^-40 scales the difference to the discrete law is beyond any test.
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

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        direction = self._generator.standard_normal(shape)
        radius = self._generator.standard_gamma(shape[-1], (*shape[:-1], 1)) / rate
        drawn: FloatArray = direction * (radius / np.linalg.norm(direction, axis=-1, keepdims=True))
        return drawn


class NoNoise:
    """Silence: every number is zero."""

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
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

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        return self._kept(name, t, self.source.spherical(name, t, rate, shape))

    def _kept(self, name: str, t: int, drawn: FloatArray) -> FloatArray:
        self.rounds.setdefault(name, {})[t] = drawn
        return drawn
