"""Standard numbers for replicas side by side, each replica's from a generator of its own.

So a replica's numbers are the same however many others there are. A call for each replica and round would cost more than the
numbers: those of several rounds are drawn in one, which changes none of them, for each comes from its generator in its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FITTING, FloatArray

AHEAD = 2**18
"""Numbers of all replicas that wait at most (2 MiB), or those of one draw."""
ENOUGH = 2**14
"""Numbers of one replica that wait at most, or those of one draw: a call that draws more costs no less a number."""
_REPLICA = 0x7265706C
"""Of a seed's children, those with this word before their number are replicas', and nobody else's."""

Fill = Callable[[FloatArray], object]
"""Fills a row with the next numbers, the same ones in one call as in several."""
Finish = Callable[[FloatArray, FloatArray], object]
"""Makes numbers others in place, each by itself, with room for as many more."""


@dataclass(frozen=True, slots=True)
class Standard:
    """A law of numbers.

    Attributes:
        key: an index of its own: it has generators of its own.
        fill: how a generator's numbers are drawn.
        finish: what becomes of them; None: they stay.
    """

    key: tuple[int, ...]
    fill: Callable[[np.random.Generator], Fill]
    finish: Finish | None = None


class Streams:
    """What is drawn of one law.

    Args:
        law: of the numbers.
        seed: of all replicas.
    """

    def __init__(self, law: Standard, seed: np.random.SeedSequence) -> None:
        self._law, self._seed = law, seed
        self._shape: tuple[int, ...] | None = None
        self._replicas, self._count = 0, 0
        """Of the draw of this shape, and numbers of each."""
        self._fills: list[Fill] = []
        self._numbers, self._used = np.empty((0, 0)), 0
        self._rows: list[FloatArray] = []
        """Of the numbers: those that were drawn last, after so many that were left."""
        self._left = 0
        self._room = np.empty(0)

    def take(self, shape: tuple[int, ...]) -> FloatArray:
        """Numbers that were not given out before: not to be written, and good until the next call.

        Replicas are the second axis, or the first one of two; one axis is of replica 0.
        """
        if shape != self._shape:
            self._shape = shape
            self._replicas = shape[min(len(shape), 3) - 2] if len(shape) > 1 else 1
            self._count = math.prod(shape) // max(self._replicas, 1)
        after = self._used + self._count
        if self._replicas != len(self._numbers) or after > self._numbers.shape[1]:
            self._draw(self._replicas, self._count)
            after = self._count
        numbers = self._numbers[:, self._used : after]
        self._used = after
        if self._replicas == 1 or len(shape) < 3:
            return numbers.reshape(shape)
        learners, replicas, *own = shape
        return numbers.reshape(replicas, learners, *own).swapaxes(0, 1)

    def _draw(self, replicas: int, count: int) -> None:
        """Numbers for this draw, and some to come; what waits for another number of replicas is thrown away."""
        while len(self._fills) < replicas:
            self._fills.append(self._law.fill(self._generator(len(self._fills))))
        width = count * max(min(AHEAD // max(replicas, 1), ENOUGH) // max(count, 1), 1)
        waiting = self._numbers[:, self._used :] if replicas == len(self._numbers) else np.empty((replicas, 0))
        left = waiting.shape[1]
        if left or self._left or self._numbers.shape != (replicas, width):
            self._numbers = np.empty((replicas, width))
            self._numbers[:, :left] = waiting
            self._rows, self._left = list(self._numbers[:, left:]), left
        self._used = 0
        some = max(FITTING // max(width - left, 1), 1)
        for k in range(0, replicas, some):
            for fill, row in zip(self._fills[k : k + some], self._rows[k : k + some], strict=False):
                fill(row)
            if self._law.finish is not None:
                self._finished(self._numbers[k : k + some, left:], self._law.finish)

    def _finished(self, numbers: FloatArray, finish: Finish) -> None:
        """As many at a time as fit into the processor's cache."""
        if not self._room.size:
            self._room = np.empty(FITTING)
        for k in range(0, numbers.shape[1], FITTING):
            part = numbers[:, k : k + FITTING]
            finish(part, self._room[: part.size].reshape(part.shape))

    def _generator(self, replica: int) -> np.random.Generator:
        seed, key = self._seed, (*self._seed.spawn_key, _REPLICA, *self._law.key, replica)
        own = np.random.SeedSequence(seed.entropy, spawn_key=key, pool_size=seed.pool_size)
        return np.random.Generator(np.random.SFC64(own))


def _uniform(generator: np.random.Generator) -> Fill:
    return lambda row: generator.random(out=row)


def _normal(generator: np.random.Generator) -> Fill:
    return lambda row: generator.standard_normal(out=row)


def _gamma(shape: int, generator: np.random.Generator) -> Fill:
    return lambda row: generator.standard_gamma(shape, out=row)


def _laplace(uniform: FloatArray, room: FloatArray) -> None:
    """Numbers u of [0, 1), multiples of 2^-53, made Laplace numbers of scale 1, in calls that work on many at a time.

    `-log|v|` with the other sign than `v = 2u - 1`. Half a multiple is added to u, so that v is never 0; it is exact.
    """
    uniform *= 2.0
    uniform -= 1.0 - 2.0**-53
    size = np.abs(uniform, out=room)
    np.log(size, out=size)  # below 0: the bit of its sign is set
    bits: npt.NDArray[np.uint64] = uniform.view(np.uint64)
    bits &= np.uint64(1 << 63)
    bits ^= size.view(np.uint64)


LAPLACE = Standard((0,), _uniform, _laplace)
"""Of scale 1."""
NORMAL = Standard((1,), _normal)


def gamma(shape: int) -> Standard:
    """Of scale 1."""
    return Standard((2, shape), partial(_gamma, shape))
