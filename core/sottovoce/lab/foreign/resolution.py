"""How far apart two numbers of a field lie at least, if they differ: what they were rounded to before they were said."""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import BoolArray, FloatArray

_CLEAR = 64.0
"""A rounding is one if it is so many times coarser than the floats: else every number would be said to be rounded."""

_FEW = 16
"""Fewer gaps between numbers show no step."""


def resolution(ordered: FloatArray) -> FloatArray:
    """Of finite numbers in order, each by itself: the coarsest rounding that all of them have been through.

    Known are floats of any size, multiples of a power of two, of ten, or of any step, and so many digits.
    """
    floats = _spacing(ordered)
    coarsest = np.maximum(np.maximum(floats, _short(ordered)), _grid(ordered))
    for found in (_decimals(ordered, floats), _digits(ordered, floats), _step(ordered, floats)):
        if found is not None:
            coarsest = np.maximum(coarsest, found)
    return coarsest


def _spacing(values: FloatArray) -> FloatArray:
    """To the next float32 where all are float32 numbers, else to the next float64."""
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
        if (single == values).all():
            return np.spacing(np.abs(single)).astype(np.float64)
    return np.spacing(np.abs(values))


def _short(values: FloatArray) -> FloatArray:
    """To the next float with a mantissa as long as the longest of these: float16, bfloat16, or any other."""
    mantissas, exponents = np.frexp(values)
    bits = np.abs(mantissas * 2.0**53).astype(np.int64)
    zeros = np.bitwise_count((bits & -bits) - 1).astype(np.int64)[bits > 0].min(initial=53)
    with np.errstate(under="ignore"):
        spacing: FloatArray = np.where(bits > 0, np.ldexp(1.0, exponents - 53 + int(zeros)), 0.0)
    return spacing


def _grid(values: FloatArray) -> float:
    """The largest power of two of which all are multiples."""
    mantissas, exponents = np.frexp(values)
    whole = np.abs(mantissas * 2.0**53).astype(np.int64)
    zeros = np.bitwise_count((whole & -whole) - 1).astype(np.int64)
    return float(np.ldexp(1.0, int((exponents - 53 + zeros).min())))


def _decimals(values: FloatArray, floats: FloatArray) -> float | None:
    """The largest power of ten of which all are multiples; None: of none that floats could not be by chance."""
    for places in range(-6, 16):
        unit = 10.0**-places
        if unit <= _CLEAR * float(floats.max()):
            return None
        if (np.abs(values - np.round(values, places)) <= floats).all():
            return unit
    return None


def _digits(values: FloatArray, floats: FloatArray) -> FloatArray | None:
    """The last digit of each, where all have so few; None: they do not."""
    sizes = np.where(values == 0.0, np.abs(values).max(), np.abs(values))
    if not sizes.any():
        return None
    exponents = np.floor(np.log10(sizes))
    with np.errstate(over="ignore", under="ignore"):
        units = 10.0**exponents
        if not (np.isfinite(units) & (units > 0)).all():
            return None
        leading = values / units
        for digits in range(1, 16):
            last = units * 10.0 ** (1 - digits)
            if (last <= _CLEAR * floats).any():
                return None
            if (np.abs(leading - np.round(leading, digits - 1)) * units <= 2.0 * floats).all():
                return last
    return None


def _step(ordered: FloatArray, floats: FloatArray) -> float | None:
    """The step between the levels of a quantiser: the smallest gap, or a small fraction of it, that divides all others."""
    finest = float(floats.max())
    gaps = np.diff(ordered)
    gaps = gaps[gaps > _CLEAR * finest]
    if len(gaps) < _FEW:
        return None
    smallest = float(gaps.min())
    return next((smallest / parts for parts in range(1, 17) if _divides(smallest / parts, gaps, finest).all()), None)


def _divides(step: float, gaps: FloatArray, finest: float) -> BoolArray:
    """Whether gaps are multiples of a step, as far as floats can tell; a single False where they tell of too few."""
    told = gaps[gaps * finest <= 0.01 * step * step] / step
    if len(told) < _FEW:
        return np.zeros(1, dtype=np.bool_)
    near: BoolArray = np.abs(told - np.rint(told)) < 0.05
    return near
