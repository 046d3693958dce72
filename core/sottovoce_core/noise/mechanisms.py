"""Additive noise on a message and the density of the observed message, for all algorithms that perturb a vector.

Laplace and Gaussian mechanisms work on the lattice of `noise.request`: the vector is rounded to it before the noise is added.
The float64 rounding of the sum is a function of the sum, so it costs nothing. With a scale of zero the vector is sent
unchanged, without a guarantee.

The built-in algorithms guarantee pure epsilon, so none uses Gaussian noise: it is for your own algorithms, and for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sottovoce_core.arrays import FloatArray, Scalars
from sottovoce_core.noise import (
    MIN_NOISE_SCALE,
    Distribution,
    NoiseRequest,
    NoiseSource,
    lattice_spacing,
    round_to_lattice,
)

_MAX_NOISE_SCALES, _ROUNDING = 65.0, 1e-9
"""Bound on Laplace noise in scales, lattice included, that holds with probability above `1 - e^-64`; and a margin for float64."""


def add_laplace_noise(
    noise: NoiseSource,
    field: str,
    t: int,
    vector: FloatArray,
    scale: Scalars,
    future_scale: Callable[[int], Scalars] | None = None,
) -> FloatArray:
    """Return `vector (..., dim)` plus independent Laplace noise of this scale on every coordinate.

    Args:
        noise: source of the noise.
        field: message field that the noise is for.
        t: round of the message.
        vector: the secret; any leading axes.
        scale: one number, or one per learner; all zero: no noise.
        future_scale: scale of a later round, if known (`NoiseRequest.future_scale`).
    """
    return _add_noise(noise, "laplace", field, t, vector, scale, future_scale)


def add_gaussian_noise(noise: NoiseSource, field: str, t: int, vector: FloatArray, scale: Scalars) -> FloatArray:
    """Return `vector (..., dim)` plus discrete Gaussian noise of standard deviation `scale`, like `add_laplace_noise`."""
    return _add_noise(noise, "gaussian", field, t, vector, scale)


def _add_noise(
    noise: NoiseSource,
    distribution: Distribution,
    field: str,
    t: int,
    vector: FloatArray,
    scale: Scalars,
    future_scale: Callable[[int], Scalars] | None = None,
) -> FloatArray:
    if not (scale if isinstance(scale, float) else np.count_nonzero(scale)):
        return vector
    spacing = lattice_spacing(scale)
    message = round_to_lattice(vector, spacing)
    message += noise(NoiseRequest(distribution, field, t, scale, spacing, vector.shape, future_scale))
    return message


def field_lattice_spacing(field: str, scale: float) -> dict[str, float]:
    """Return `LatticeAlgorithm.lattice_spacings` of one field with noise of `add_laplace_noise` or `add_gaussian_noise`.

    A scale within rounding of a power of two gets the finer of the two lattices.
    """
    return {field: float(lattice_spacing(scale * (1.0 - 1e-9)))} if MIN_NOISE_SCALE <= scale < math.inf else {}


def magnitude_bound(max_magnitude: float, scale: float) -> float:
    """Bound the numbers of a vector with noise of `add_laplace_noise`; each exceeds it with probability below `e^-64`.

    Args:
        max_magnitude: largest absolute value in the vector without noise.
        scale: noise scale; 0: no noise.
    """
    return max_magnitude * (1.0 + _ROUNDING) + _MAX_NOISE_SCALES * scale


def laplace_log_density(message: FloatArray, vector: FloatArray, scale: Scalars) -> FloatArray:
    """Return the log density `(...)` with which `add_laplace_noise` turns `vector` into `message`, both `(..., dim)`.

    It is the density of the continuous distribution: the mass of a lattice point, over `spacing^dim`, is less by a factor of
    `1 - (spacing/scale)^2 / 12` a coordinate, equal in all worlds. Without noise it is 0 if the two are equal, else -inf.
    """
    if not np.count_nonzero(scale):
        return dirac_log_density(message, vector)
    distance = message - round_to_lattice(vector, lattice_spacing(scale))
    np.abs(distance, out=distance)
    distance /= scale
    distance += np.log(2.0 * scale)
    total: FloatArray = -distance.sum(axis=-1)
    return total


def dirac_log_density(message: FloatArray, vector: FloatArray) -> FloatArray:
    """Return the log density `(...)` of a message without noise: 0 if `message (..., dim)` equals `vector`, else -inf.

    The tolerance is 1e-12 of the largest number, because a replay computes the same sum in another order.
    """
    size = np.maximum(np.abs(vector), np.abs(message)).max(axis=-1, keepdims=True)
    return np.where((np.abs(message - vector) <= 1e-12 * np.maximum(size, 1.0)).all(axis=-1), 0.0, -np.inf)


def laplace_loss(sensitivity: float, dim: int, scale: float) -> float:
    """Return the privacy loss of one Laplace message of `dim` numbers that one record moves by `sensitivity` in l1 norm.

    Rounding to the lattice may move every coordinate by one more spacing: that slack is charged. The loss is infinite
    without noise, and 0 for a message that no record can move.
    """
    if sensitivity == 0.0:
        return 0.0
    return (sensitivity + dim * float(lattice_spacing(scale))) / scale if scale > 0 else math.inf


def gaussian_log_density(message: FloatArray, vector: FloatArray, scale: Scalars) -> FloatArray:
    """Return the log density `(...)` with which `add_gaussian_noise` turns `vector` into `message`, both `(..., dim)`."""
    if not np.count_nonzero(scale):
        return dirac_log_density(message, vector)
    distance = (message - round_to_lattice(vector, lattice_spacing(scale))) / scale
    total: FloatArray = np.sum(-0.5 * distance**2 - np.log(math.sqrt(2.0 * math.pi) * scale), axis=-1)
    return total


def gaussian_zcdp_rho(sensitivity: float, dim: int, scale: float) -> float:
    """Return rho of zero-concentrated DP of one Gaussian message that one record moves by `sensitivity` in l2 norm.

    `(sensitivity + sqrt(dim) spacing)^2 / (2 scale^2)` for the discrete Gaussian (Canonne, Kamath, Steinke 2020, Theorem 14),
    with the lattice's slack. The rho of several messages add up. There is no finite pure epsilon.
    """
    if sensitivity == 0.0:
        return 0.0
    return (
        0.5 * ((sensitivity + math.sqrt(dim) * float(lattice_spacing(scale))) / scale) ** 2 if scale > 0 else math.inf
    )


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return epsilon of the (epsilon, delta) privacy that follows from rho (Bun and Steinke 2016, Proposition 1.3)."""
    return rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta))


def spherical_log_density(noise: FloatArray, rate: Scalars) -> FloatArray:
    """Return the log density `(...)` of noise `(..., dim)` under `exp(-rate ||e||_2)`, up to a constant of dim alone."""
    dim = noise.shape[-1]
    total: FloatArray = dim * np.log(rate) - rate * np.linalg.norm(noise, axis=-1, keepdims=True)
    return total[..., 0]
