"""Noise of simulations and replays: seeded, recorded, or none. It protects no learner.

A replica's numbers are the same for any number of replicas. A generator per replica would need a call for each, which costs
more than its numbers; one generator for all would change the numbers of the first replicas in the next request. So the first
replica has its own generator, which fills a buffer for several requests; all others share a second one, whose requests start
far apart in its sequence and are filled replica by replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.noise.request import NoiseRequest, NoiseSource

# ---- streams ---------------------------------------------------------------------------------------------------------

MIN_BLOCK_NUMBERS = 2**14
"""Minimum numbers of the first replica drawn at a time: small requests share one large draw, which is cheaper."""
_SUBSTREAM_DISTANCE = 2**64
"""Distance between the starts of two requests of the other replicas, of the generator's 2^128 numbers."""
_REPLICA_SPAWN_KEY = 0x7265706C
"""First word of the spawn keys of replicas, used for nothing else."""

ArraySampler = Callable[[np.random.Generator, FloatArray], None]
"""Function that fills an array in order, equally in one call or in several."""


class ReplicaStreams:
    """Random numbers of one distribution for all replicas.

    Args:
        seed: seed of all replicas.
        distribution_index: number of the distribution; each has its own generators.
        fill: sampler of the numbers.
    """

    def __init__(self, seed: np.random.SeedSequence, distribution_index: int, fill: ArraySampler) -> None:
        first, others = (
            np.random.SeedSequence(
                seed.entropy,
                spawn_key=(*seed.spawn_key, _REPLICA_SPAWN_KEY, distribution_index, k),
                pool_size=seed.pool_size,
            )
            for k in range(2)
        )
        self._fill, self._first = fill, np.random.Generator(np.random.SFC64(first))
        self._buffer, self._used = np.empty(0), 0
        """Numbers of the first replica, and the count of used ones."""
        self._begin, self._others = np.random.PCG64DXSM(others), np.random.Generator(np.random.PCG64DXSM(others))
        """State at the start of the others' last request, and their generator."""

    def take(self, shape: tuple[int, ...]) -> FloatArray:
        """Return unused numbers of this shape; no other call returns them.

        Args:
            shape: `(learners, replicas, dim)`, `(replicas, dim)`, or `(dim,)` for the first replica.
        """
        learners, replicas, dim = (1, 1, *shape)[-3:]
        first = self._take_first_replica(learners * dim)
        if replicas == 1:
            return first.reshape(shape)
        numbers = np.empty((replicas, len(first)))
        numbers[0] = first
        self._begin.advance(_SUBSTREAM_DISTANCE)
        self._others.bit_generator.state = self._begin.state
        self._fill(self._others, numbers[1:])
        return numbers.reshape(replicas, learners, dim).swapaxes(0, 1).reshape(shape)

    def _take_first_replica(self, count: int) -> FloatArray:
        if self._used + count > self._buffer.size:
            self._buffer, self._used = np.empty(max(MIN_BLOCK_NUMBERS, count)), 0
            self._fill(self._first, self._buffer)
        self._used += count
        return self._buffer[self._used - count : self._used]


# ---- distributions ---------------------------------------------------------------------------------------------------

_CACHE_BLOCK_NUMBERS = 2**14
"""Numbers that fit in a processor's cache (128 KiB) during several steps."""


def fill_laplace(generator: np.random.Generator, numbers: FloatArray) -> None:
    """Fill with Laplace numbers of scale 1: `-log|v|` with the sign of `v = 1 - 2u`, for u uniform in [0, 1).

    u is a multiple of 2^-53; half a multiple is added, which is exact, so that v is never 0.
    """
    flat = numbers.reshape(-1)
    for start in range(0, flat.size, _CACHE_BLOCK_NUMBERS):
        block = flat[start : start + _CACHE_BLOCK_NUMBERS]
        generator.random(out=block)
        block *= -2.0
        block += 1.0 - 2.0**-53
        np.copysign(np.log(np.abs(block)), block, out=block)


def fill_normal(generator: np.random.Generator, numbers: FloatArray) -> None:
    """Fill with normal numbers of mean 0 and variance 1."""
    generator.standard_normal(out=numbers)


# ---- sources ---------------------------------------------------------------------------------------------------------


class SeededNoise:
    """Noise for simulation: reproducible, fast, and without protection.

    A replica's noise follows from the seed and its index, for any number of replicas. Replicas are the second axis of a
    request, or the first one of two; a request with one axis is for replica 0.

    Continuous numbers are rounded to the lattice: at 2^-40 scales no test can see the difference to the discrete distribution.
    Halves are rounded up, not to even: a number of 2^41 to 2^44 spacings has nine to twelve binary places left, so halves are
    frequent, and an even number of spacings would be sent too often by 10^-4.
    """

    def __init__(self, seed: int | np.random.SeedSequence) -> None:
        seed = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        self._laplace, self._normal = ReplicaStreams(seed, 0, fill_laplace), ReplicaStreams(seed, 1, fill_normal)

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        match draw.distribution:
            case "laplace":
                drawn = self._laplace.take(draw.shape)
            case "gaussian":
                drawn = self._normal.take(draw.shape)
            case "spherical":
                return self._spherical(draw)
            case _:
                assert_never(draw.distribution)
        if draw.spacing is None:
            drawn *= draw.scale
            return drawn
        drawn *= draw.scale / draw.spacing
        drawn += 0.5
        np.floor(drawn, out=drawn)
        drawn *= draw.spacing
        return drawn

    def _spherical(self, draw: NoiseRequest) -> FloatArray:
        """Sample the direction of a normal vector with a gamma norm, the sum of `dim` exponential numbers."""
        direction = self._normal.take(draw.shape)
        direction *= 1.0 / np.linalg.norm(direction, axis=-1, keepdims=True)
        direction *= np.abs(self._laplace.take(draw.shape)).sum(axis=-1, keepdims=True) / draw.scale
        return direction


def no_noise(draw: NoiseRequest) -> FloatArray:
    """Return zeros."""
    return np.zeros(draw.shape)


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """Noise recorded earlier: field name to array `(rounds, ..., dim)`, the shape of a request after the round axis.

    A recording without a replica axis is used for all replicas.
    """

    fields: Mapping[str, FloatArray]
    requested_fields: set[str] = field(default_factory=set, compare=False)
    """Requested fields: an algorithm may request noise for fields other than those it sends."""

    @property
    def unused_fields(self) -> list[str]:
        """Recorded fields without a request."""
        return sorted(self.fields.keys() - self.requested_fields)

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        self.requested_fields.add(draw.field)
        rounds = self.fields.get(draw.field, ())
        if draw.round >= len(rounds):
            raise SpecError(
                f"the recorded noise must have field {draw.field!r} for round {draw.round}, got {len(rounds)} rounds of it"
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
    """Noise source that forwards and records the noise of another source."""

    source: NoiseSource
    noise_by_round: dict[str, dict[int, FloatArray]] = field(default_factory=dict)
    """Recorded noise by field and round."""

    @property
    def noise_by_field(self) -> dict[str, list[FloatArray]]:
        """Recorded noise as lists by round, with zeros in rounds without noise. Stacked, it is input of `RecordedNoise`."""
        dense = {}
        for name, rounds in self.noise_by_round.items():
            zeros = np.zeros_like(next(iter(rounds.values())))
            dense[name] = [rounds.get(t, zeros) for t in range(max(rounds) + 1)]
        return dense

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        drawn = self.source(draw)
        self.noise_by_round.setdefault(draw.field, {})[draw.round] = drawn
        return drawn
