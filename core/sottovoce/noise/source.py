"""Where noise comes from."""

from __future__ import annotations

from typing import Protocol

from sottovoce.arrays import FloatArray, Scalars


class Noise(Protocol):
    """Where the noise of a message comes from: the operating system, a seed, a recording, or nowhere."""

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        """Independent discrete Laplace numbers, multiples of `grid`, with mass proportional to `exp(-|x|/scale)`.

        Args:
            name: field of the message that the noise is for.
            t: round.
            scale: Laplace scale, in units of the message.
            grid: spacing of the lattice, a power of two.
            shape: shape of the result.
        """
        ...

    def gaussian(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        """Independent discrete Gaussian numbers, multiples of `grid`, with mass proportional to `exp(-x^2 / (2 scale^2))`.

        Args:
            name: field of the message that the noise is for.
            t: round.
            scale: sigma, in units of the message.
            grid: spacing of the lattice, a power of two.
            shape: shape of the result.
        """
        ...

    def spherical(self, name: str, t: int, rate: Scalars, shape: tuple[int, ...]) -> FloatArray:
        """Independent vectors along the last axis with density proportional to `exp(-rate ||e||_2)`, not on a lattice.

        Args:
            name: field of the message that the noise is for.
            t: round.
            rate: zeta; the norm of a vector is `dim / rate` on average.
            shape: shape of the result.
        """
        ...
