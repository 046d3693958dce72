"""The lattice that noise and what it hides are rounded to."""

from __future__ import annotations

import math

import numpy as np

from sottovoce.arrays import FloatArray, Scalars

GRID_BITS = 40
"""Lattice points per scale of the noise, as a power of two: rounding moves a state by less than 2^-40 scales."""


def grid(scale: Scalars) -> Scalars:
    """Lattice spacing for a scale: the power of two that is `2^-40 * scale`, rounded down.

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
