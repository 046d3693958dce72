"""Numbers of one law for replicas side by side: a replica's are the same beside any number of others.

A generator for each replica would take a call for each, which costs more than its numbers; one for all, going on where the last
replica ends, would give the first ones others in the next draw. So the first replica has a generator, from which the numbers of
several draws come at a time; all others share one, whose draws begin far apart in its sequence, and go replica by replica.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sottovoce.arrays import FloatArray

AHEAD = 2**14
"""Numbers of the first replica that are drawn at a time, at least: small draws are cut from a large one, which is cheaper."""
_APART = 2**64
"""Numbers between the beginnings of two draws of the others, of the 2^128 of a generator."""
_REPLICAS = 0x7265706C
"""Of a seed's children, those with this word in front are of replicas, and of nothing else."""

Fill = Callable[[np.random.Generator, FloatArray], None]
"""Fills an array, in order, the same in one call as in several."""


class Streams:
    """The numbers of one law.

    Args:
        seed: of all replicas.
        law: its number; another one has generators of its own.
        fill: draws the numbers.
    """

    def __init__(self, seed: np.random.SeedSequence, law: int, fill: Fill) -> None:
        first, others = (
            np.random.SeedSequence(
                seed.entropy, spawn_key=(*seed.spawn_key, _REPLICAS, law, k), pool_size=seed.pool_size
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
        self._begin.advance(_APART)
        self._others.bit_generator.state = self._begin.state
        self._fill(self._others, numbers[1:])
        return numbers.reshape(replicas, learners, dim).swapaxes(0, 1).reshape(shape)

    def _of_first(self, count: int) -> FloatArray:
        if self._used + count > self._waiting.size:
            self._waiting, self._used = np.empty(max(AHEAD, count)), 0
            self._fill(self._first, self._waiting)
        self._used += count
        return self._waiting[self._used - count : self._used]


# ---- laws ------------------------------------------------------------------------------------------------------------

_FITTING = 2**14
"""Numbers that stay in a processor's cache (128 KiB) while several steps work on them."""


def laplace(generator: np.random.Generator, numbers: FloatArray) -> None:
    """Of scale 1: `-log|v|` with the sign of `v = 1 - 2u`, for u uniform in [0, 1).

    u is a multiple of 2^-53; half a multiple is added to it, which is exact, so that v is never 0.
    """
    flat = numbers.reshape(-1)
    for start in range(0, flat.size, _FITTING):
        some = flat[start : start + _FITTING]
        generator.random(out=some)
        some *= -2.0
        some += 1.0 - 2.0**-53
        np.copysign(np.log(np.abs(some)), some, out=some)


def normal(generator: np.random.Generator, numbers: FloatArray) -> None:
    """Of mean 0 and variance 1."""
    generator.standard_normal(out=numbers)
