"""The lattice that noise and what it hides are rounded to."""

from __future__ import annotations

import math

import numpy as np

from sottovoce.arrays import FloatArray, Scalars
from sottovoce.errors import SpecError

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-900, 1e90
"""Of noise: beyond them its lattice leaves the range of float64, or its messages what the wire carries (1e100)."""

GRID_BITS = 40
"""Lattice points per scale of the noise, as a power of two: rounding moves a state by less than 2^-40 scales."""


def grid(scale: Scalars) -> Scalars:
    """Lattice spacing for a scale: the power of two that is `2^-40 * scale`, rounded down.

    It depends on the public schedule alone, never on data.

    Raises:
        SpecError: a scale that has no lattice in float64: 0, infinite, not a number, or below about 1e-311.
    """
    if isinstance(scale, float):
        one = math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)
        if not 0.0 < one <= scale < math.inf:
            raise SpecError(f"a noise scale must be positive, finite and have a lattice in float64, got {scale}")
        return one
    spacing: FloatArray = np.ldexp(1.0, np.frexp(scale)[1] - 1 - GRID_BITS)
    if not ((spacing > 0.0) & (spacing <= scale) & (scale < math.inf)).all():
        raise SpecError(f"noise scales must be positive, finite and have a lattice in float64, got {scale}")
    return spacing


def on_grid(values: FloatArray, spacing: Scalars) -> FloatArray:
    """`values` rounded to the nearest multiple of `spacing` (a power of two, so scaling is exact)."""
    rounded: FloatArray = values / spacing
    np.rint(rounded, out=rounded)
    rounded *= spacing
    return rounded
