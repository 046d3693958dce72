"""Numbers of one scale for replicas side by side, each replica's from a generator of its own.

So a replica's numbers are the same beside any number of others. A call for each replica and draw would take longer than the
numbers: those of several draws come in one call, which changes none of them, for a generator gives them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sottovoce.arrays import FloatArray

AHEAD = 2**18
"""Numbers of all replicas that are drawn at a time (2 MiB), at least those of one draw."""
AHEAD_OF_ONE = 2**14
"""Numbers of one replica that are drawn at a time, at most: with more, a call costs no less a number."""
_REPLICA = 0x7265706C
"""Of a seed's children, those with this word in front of their number are replicas', and nobody else's."""
_FITTING = 2**14
"""Numbers that stay in a processor's cache (128 KiB) while several steps work on them."""

Fill = Callable[[Sequence[np.random.Generator], FloatArray], None]
"""Fills each row with the next numbers of its generator, the same ones in one call as in several."""


class Streams:
    """The numbers of one law.

    Args:
        seed: of all replicas.
        law: its number; another one has generators of its own.
        fill: draws the numbers.
    """

    def __init__(self, seed: np.random.SeedSequence, law: int, fill: Fill) -> None:
        self._seed, self._law, self._fill = seed, law, fill
        self._generators: list[np.random.Generator] = []
        self._numbers, self._used = np.empty((0, 0)), 0
        """`(replicas, numbers)`, and how many of each replica were given out."""

    def take(self, shape: tuple[int, ...]) -> FloatArray:
        """Numbers that were not given out before: not to be written to, and good until the next call.

        Args:
            shape: `(learners, replicas, dim)`, `(replicas, dim)`, or `(dim,)` of replica 0.
        """
        learners, replicas, dim = (1, 1, *shape)[-3:]
        count = learners * dim
        if replicas != len(self._numbers) or self._used + count > self._numbers.shape[1]:
            self._draw(replicas, count)
        numbers = self._numbers[:, self._used : self._used + count]
        self._used += count
        return numbers.reshape(replicas, learners, dim).swapaxes(0, 1).reshape(shape)

    def _draw(self, replicas: int, count: int) -> None:
        """Numbers for this draw and for some like it; those that wait for another number of replicas are thrown away."""
        while len(self._generators) < replicas:
            self._generators.append(self._generator(len(self._generators)))
        draws = max(min(AHEAD // max(replicas, 1), AHEAD_OF_ONE) // max(count, 1), 1)
        waiting = self._numbers[:, self._used :] if replicas == len(self._numbers) else np.empty((replicas, 0))
        left = waiting.shape[1]
        if left or self._numbers.shape != (replicas, draws * count):
            self._numbers = np.concatenate([waiting, np.empty((replicas, draws * count))], axis=1)
        self._used = 0
        some = max(_FITTING // max(draws * count, 1), 1)
        for k in range(0, replicas, some):
            self._fill(self._generators[k : k + some], self._numbers[k : k + some, left:])

    def _generator(self, replica: int) -> np.random.Generator:
        key = (*self._seed.spawn_key, _REPLICA, self._law, replica)
        own = np.random.SeedSequence(self._seed.entropy, spawn_key=key, pool_size=self._seed.pool_size)
        return np.random.Generator(np.random.SFC64(own))


# ---- laws ------------------------------------------------------------------------------------------------------------


def laplace(generators: Sequence[np.random.Generator], rows: FloatArray) -> None:
    """Of scale 1: `-log|v|` with the sign of `v = 1 - 2u`, for u uniform in [0, 1).

    u is a multiple of 2^-53; half a multiple is added to it, which is exact, so that v is never 0.
    """
    for generator, row in zip(generators, rows, strict=False):
        generator.random(out=row)
    rows *= -2.0
    rows += 1.0 - 2.0**-53
    np.copysign(np.log(np.abs(rows)), rows, out=rows)


def normal(generators: Sequence[np.random.Generator], rows: FloatArray) -> None:
    """Of mean 0 and variance 1."""
    for generator, row in zip(generators, rows, strict=False):
        generator.standard_normal(out=row)
