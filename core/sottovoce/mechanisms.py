"""Additive noise on a message, and the density of what was said: shared by all algorithms that perturb a vector.

A Laplace mechanism works on the lattice of `noise.grid`: the vector is rounded to it before the noise is added. A scale of
zero is no mechanism at all: the vector is said as it is, and nothing is promised.
"""

from __future__ import annotations

import math

import numpy as np

from sottovoce.arrays import FloatArray, Scalars
from sottovoce.machine import Noise
from sottovoce.noise import grid, on_grid


def say_laplace(noise: Noise, name: str, t: int, vector: FloatArray, scale: Scalars) -> FloatArray:
    """`vector (..., dim)` with independent Laplace noise of this scale on every coordinate.

    Args:
        noise: where it comes from.
        name, t: field and round that the noise is for.
        vector: the secret; any leading axes.
        scale: one number, or one per learner; all zero: no noise.
    """
    if not np.count_nonzero(scale):
        return vector
    spacing = grid(scale)
    said = on_grid(vector, spacing)
    said += noise.laplace(name, t, scale, spacing, vector.shape)
    return said


def laplace_density(said: FloatArray, vector: FloatArray, scale: Scalars) -> FloatArray:
    """Log density `(...)` of having said `said (..., dim)` of a `vector`: what `say_laplace` draws from.

    Without noise it is 0 where the two are equal, and -inf elsewhere.
    """
    if not np.count_nonzero(scale):
        return certain_density(said, vector)
    distance = np.abs(said - on_grid(vector, grid(scale)))
    total: FloatArray = np.sum(-distance / scale - np.log(2.0 * scale), axis=-1)
    return total


def certain_density(said: FloatArray, vector: FloatArray) -> FloatArray:
    """Log density `(...)` of what leaves no choice: 0 where `said (..., dim)` is `vector` up to rounding, else -inf.

    Rounding, because a replay computes the same in another order: a millionth of a millionth of the largest number.
    """
    size = np.maximum(np.abs(vector), np.abs(said)).max(axis=-1, keepdims=True)
    return np.where((np.abs(said - vector) <= 1e-12 * np.maximum(size, 1.0)).all(axis=-1), 0.0, -np.inf)


def laplace_loss(sensitivity: float, dim: int, scale: float) -> float:
    """Privacy loss of one Laplace message: a vector of `dim` numbers that one record moves by `sensitivity` in l1 norm.

    Rounding to the lattice may move every coordinate by one more spacing: that slack is charged. Infinite without noise,
    and 0 for a message that no record can move.
    """
    if sensitivity == 0.0:
        return 0.0
    return (sensitivity + dim * float(grid(scale))) / scale if scale > 0 else math.inf


def spherical_density(noise: FloatArray, rate: Scalars) -> FloatArray:
    """Log density `(...)` of a noise vector `(..., dim)` under `exp(-rate ||e||_2)`, up to a constant of dim alone."""
    dim = noise.shape[-1]
    total: FloatArray = dim * np.log(rate) - rate * np.linalg.norm(noise, axis=-1, keepdims=True)
    return total[..., 0]
