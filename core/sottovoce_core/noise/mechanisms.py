"""Additive noise on a message, and the density of what was said: shared by all algorithms that perturb a vector.

Laplace and Gaussian mechanisms work on the lattice of `noise.grid`: the vector is rounded to it before the noise is added.
What float64 rounds off their sum is a function of the sum, so it costs nothing. A scale of zero is no mechanism at all:
the vector is said as it is, and nothing is promised.

Our algorithms promise pure epsilon, so none has Gaussian noise: it is there for algorithms of one's own, and to compare.
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
"""Scales that Laplace noise keeps within, with probability above `1 - e^-64`, the lattice included; and of float64, with room."""


def add_laplace_noise(
    noise: NoiseSource,
    field: str,
    t: int,
    vector: FloatArray,
    scale: Scalars,
    future_scale: Callable[[int], Scalars] | None = None,
) -> FloatArray:
    """`vector (..., dim)` with independent Laplace noise of this scale on every coordinate.

    Args:
        noise: where it comes from.
        field: of the message that the noise is for.
        t: its round.
        vector: the secret; any leading axes.
        scale: one number, or one per learner; all zero: no noise.
        later: of a later round, where it is known (`NoiseRequest.later`).
    """
    return _said(noise, "laplace", field, t, vector, scale, future_scale)


def add_gaussian_noise(noise: NoiseSource, field: str, t: int, vector: FloatArray, scale: Scalars) -> FloatArray:
    """As `add_laplace_noise`, with discrete Gaussian noise of standard deviation `scale`."""
    return _said(noise, "gaussian", field, t, vector, scale)


def _said(
    noise: NoiseSource,
    law: Distribution,
    field: str,
    t: int,
    vector: FloatArray,
    scale: Scalars,
    later: Callable[[int], Scalars] | None = None,
) -> FloatArray:
    if not (scale if isinstance(scale, float) else np.count_nonzero(scale)):
        return vector
    spacing = lattice_spacing(scale)
    said = round_to_lattice(vector, spacing)
    said += noise(NoiseRequest(law, field, t, scale, spacing, vector.shape, later))
    return said


def field_lattice_spacing(field: str, scale: float) -> dict[str, float]:
    """What `LatticeAlgorithm.lattice` answers for one field, said by `add_laplace_noise` or `add_gaussian_noise`.

    A scale within rounding of a power of two has the finer of the two lattices.
    """
    return {field: float(lattice_spacing(scale * (1.0 - 1e-9)))} if MIN_NOISE_SCALE <= scale < math.inf else {}


def magnitude_bound(max_magnitude: float, scale: float) -> float:
    """What no number of a vector said by `add_laplace_noise` exceeds, but with probability below `e^-64` each.

    Args:
        largest: of the vector's own numbers, in absolute value.
        scale: of the noise; 0: none.
    """
    return max_magnitude * (1.0 + _ROUNDING) + _MAX_NOISE_SCALES * scale


def laplace_log_density(message: FloatArray, vector: FloatArray, scale: Scalars) -> FloatArray:
    """Log density `(...)` of having said `said (..., dim)` of a `vector`: what `add_laplace_noise` draws from.

    That of the continuous law: the mass of a lattice point, over `grid^dim`, is less by a factor of `1 - (grid/scale)^2 / 12`
    a coordinate, which is the same in all worlds. Without noise it is 0 where the two are equal, and -inf elsewhere.
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
    """Log density `(...)` of what leaves no choice: 0 where `said (..., dim)` is `vector` up to rounding, else -inf.

    Rounding, because a replay computes the same in another order: a millionth of a millionth of the largest number.
    """
    size = np.maximum(np.abs(vector), np.abs(message)).max(axis=-1, keepdims=True)
    return np.where((np.abs(message - vector) <= 1e-12 * np.maximum(size, 1.0)).all(axis=-1), 0.0, -np.inf)


def laplace_loss(sensitivity: float, dim: int, scale: float) -> float:
    """Privacy loss of one Laplace message: a vector of `dim` numbers that one record moves by `sensitivity` in l1 norm.

    Rounding to the lattice may move every coordinate by one more spacing: that slack is charged. Infinite without noise,
    and 0 for a message that no record can move.
    """
    if sensitivity == 0.0:
        return 0.0
    return (sensitivity + dim * float(lattice_spacing(scale))) / scale if scale > 0 else math.inf


def gaussian_log_density(message: FloatArray, vector: FloatArray, scale: Scalars) -> FloatArray:
    """Log density `(...)` of having said `said (..., dim)` of a `vector`: what `add_gaussian_noise` draws from."""
    if not np.count_nonzero(scale):
        return dirac_log_density(message, vector)
    distance = (message - round_to_lattice(vector, lattice_spacing(scale))) / scale
    total: FloatArray = np.sum(-0.5 * distance**2 - np.log(math.sqrt(2.0 * math.pi) * scale), axis=-1)
    return total


def gaussian_zcdp_rho(sensitivity: float, dim: int, scale: float) -> float:
    """Zero-concentrated privacy rho of one Gaussian message that one record moves by `sensitivity` in l2 norm.

    `(sensitivity + sqrt(dim) grid)^2 / (2 scale^2)`: of the discrete Gaussian (Canonne, Kamath, Steinke 2020, Theorem 14),
    with the lattice's slack. The rho of several messages add up. There is no finite pure epsilon.
    """
    if sensitivity == 0.0:
        return 0.0
    return (
        0.5 * ((sensitivity + math.sqrt(dim) * float(lattice_spacing(scale))) / scale) ** 2 if scale > 0 else math.inf
    )


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The epsilon of the (epsilon, delta) privacy that follows from rho (Bun and Steinke 2016, Proposition 1.3)."""
    return rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta))


def spherical_log_density(noise: FloatArray, rate: Scalars) -> FloatArray:
    """Log density `(...)` of a noise vector `(..., dim)` under `exp(-rate ||e||_2)`, up to a constant of dim alone."""
    dim = noise.shape[-1]
    total: FloatArray = dim * np.log(rate) - rate * np.linalg.norm(noise, axis=-1, keepdims=True)
    return total[..., 0]
