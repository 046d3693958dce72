"""Noise of simulations and replays: seeded, recorded, or none. It protects no learner.

Numbers of one law for replicas side by side: a replica's are the same beside any number of others.

A generator for each replica would take a call for each, which costs more than its numbers; one for all, going on where the last
replica ends, would give the first ones others in the next draw. So the first replica has a generator, from which the numbers of
several draws come at a time; all others share one, whose draws begin far apart in its sequence, and go replica by replica.
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
"""Numbers of the first replica that are drawn at a time, at least: small draws are cut from a large one, which is cheaper."""
_SUBSTREAM_DISTANCE = 2**64
"""Numbers between the beginnings of two draws of the others, of the 2^128 of a generator."""
_REPLICA_SPAWN_KEY = 0x7265706C
"""Of a seed's children, those with this word in front are of replicas, and of nothing else."""

ArraySampler = Callable[[np.random.Generator, FloatArray], None]
"""Fills an array, in order, the same in one call as in several."""


class ReplicaStreams:
    """The numbers of one law.

    Args:
        seed: of all replicas.
        law: its number; another one has generators of its own.
        fill: draws the numbers.
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
        self._waiting, self._used = np.empty(0), 0
        """Numbers of the first replica, and how many of them were given out."""
        self._begin, self._others = np.random.PCG64DXSM(others), np.random.Generator(np.random.PCG64DXSM(others))
        """Where the last draw of the others began; and what draws them."""

    def take(self, shape: tuple[int, ...]) -> FloatArray:
        """Numbers of this shape, which are the caller's: nobody else has them, before or after.

        Args:
            shape: `(learners, replicas, dim)`, `(replicas, dim)`, or `(dim,)` of the first replica.
        """
        learners, replicas, dim = (1, 1, *shape)[-3:]
        first = self._of_first(learners * dim)
        if replicas == 1:
            return first.reshape(shape)
        numbers = np.empty((replicas, len(first)))
        numbers[0] = first
        self._begin.advance(_SUBSTREAM_DISTANCE)
        self._others.bit_generator.state = self._begin.state
        self._fill(self._others, numbers[1:])
        return numbers.reshape(replicas, learners, dim).swapaxes(0, 1).reshape(shape)

    def _of_first(self, count: int) -> FloatArray:
        if self._used + count > self._waiting.size:
            self._waiting, self._used = np.empty(max(MIN_BLOCK_NUMBERS, count)), 0
            self._fill(self._first, self._waiting)
        self._used += count
        return self._waiting[self._used - count : self._used]


# ---- laws ------------------------------------------------------------------------------------------------------------

_CACHE_BLOCK_NUMBERS = 2**14
"""Numbers that stay in a processor's cache (128 KiB) while several steps work on them."""


def fill_laplace(generator: np.random.Generator, numbers: FloatArray) -> None:
    """Of scale 1: `-log|v|` with the sign of `v = 1 - 2u`, for u uniform in [0, 1).

    u is a multiple of 2^-53; half a multiple is added to it, which is exact, so that v is never 0.
    """
    flat = numbers.reshape(-1)
    for start in range(0, flat.size, _CACHE_BLOCK_NUMBERS):
        some = flat[start : start + _CACHE_BLOCK_NUMBERS]
        generator.random(out=some)
        some *= -2.0
        some += 1.0 - 2.0**-53
        np.copysign(np.log(np.abs(some)), some, out=some)


def fill_normal(generator: np.random.Generator, numbers: FloatArray) -> None:
    """Of mean 0 and variance 1."""
    generator.standard_normal(out=numbers)


# ---- simulated -------------------------------------------------------------------------------------------------------


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
                assert_never(draw.law)
        if draw.spacing is None:
            drawn *= draw.scale
            return drawn
        drawn *= draw.scale / draw.spacing
        drawn += 0.5
        np.floor(drawn, out=drawn)
        drawn *= draw.spacing
        return drawn

    def _spherical(self, draw: NoiseRequest) -> FloatArray:
        """A normal vector's direction, and the sum of as many exponential numbers as its norm: a gamma number."""
        direction = self._normal.take(draw.shape)
        direction *= 1.0 / np.linalg.norm(direction, axis=-1, keepdims=True)
        direction *= np.abs(self._laplace.take(draw.shape)).sum(axis=-1, keepdims=True) / draw.scale
        return direction


def no_noise(draw: NoiseRequest) -> FloatArray:
    """Silence: every number is zero."""
    return np.zeros(draw.shape)


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """Noise drawn earlier, said again: field name to array `(rounds, ..., dim)`, the shape of a draw after the round.

    A recording without replica axis serves all replicas alike.
    """

    fields: Mapping[str, FloatArray]
    requested_fields: set[str] = field(default_factory=set, compare=False)
    """Fields that were asked for: which an algorithm draws need not be those that it says."""

    @property
    def unused_fields(self) -> list[str]:
        """Fields that nobody has asked for."""
        return sorted(self.fields.keys() - self.requested_fields)

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        self.requested_fields.add(draw.field)
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

    source: NoiseSource
    noise_by_round: dict[str, dict[int, FloatArray]] = field(default_factory=dict)
    """What was drawn, by field and round."""

    @property
    def noise_by_field(self) -> dict[str, list[FloatArray]]:
        """The same as lists by round; zeros in rounds without noise. `RecordedNoise` takes them, stacked."""
        dense = {}
        for name, rounds in self.noise_by_round.items():
            blank = np.zeros_like(next(iter(rounds.values())))
            dense[name] = [rounds.get(t, blank) for t in range(max(rounds) + 1)]
        return dense

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        drawn = self.source(draw)
        self.noise_by_round.setdefault(draw.field, {})[draw.round] = drawn
        return drawn
