"""Noise that no message shows: it is written down with the message, and drawn from there after a death. No file, no clock."""

from __future__ import annotations

import math

import numpy as np

from sottovoce.algorithms.interface import Algorithm, WithHiddenNoise
from sottovoce.arrays import FloatArray, as_floats
from sottovoce.errors import DataError
from sottovoce.noise import Draw, Noise


def hides_noise(algorithm: Algorithm[object]) -> bool:
    """Whether the messages of this run do not tell the state that said them."""
    return isinstance(algorithm, WithHiddenNoise) and algorithm.hides_noise


class Kept:
    """Passes the noise of one round on, and keeps it.

    Args:
        source: where it comes from.
    """

    def __init__(self, source: Noise) -> None:
        self._source = source
        self._drawn: list[FloatArray] = []

    def __call__(self, draw: Draw) -> FloatArray:
        noise = self._source(draw)
        self._drawn.append(noise)
        return noise

    @property
    def drawn(self) -> bytes:
        """All of it so far, in order."""
        return b"".join(noise.tobytes() for noise in self._drawn)


class DrawnAgain:
    """The noise of one round, as it was drawn.

    Args:
        drawn: what was kept.

    Attributes:
        left: what is not yet drawn of it.
    """

    def __init__(self, drawn: bytes) -> None:
        self.left = as_floats(np.frombuffer(drawn))

    def __call__(self, draw: Draw) -> FloatArray:
        """The next numbers.

        Raises:
            DataError: there are not so many.
        """
        count = math.prod(draw.shape)
        if count > len(self.left):
            left = len(self.left)
            raise DataError(
                f"a round needs {count} more numbers of noise, and its entry has {left}: another version wrote it"
            )
        noise, self.left = self.left[:count].reshape(draw.shape), self.left[count:]
        return noise
