"""Requests for noise, the lattice that noise is rounded to, and the cache of prefetched noise.

Sampling calls dominate the cost of one short vector, so vectors of later rounds are drawn in the same calls if their scales
are known. Each prefetched row is used once, in order. The cache is in memory only: no copy, pickle or forked process has it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from sottovoce_core.arrays import FloatArray, Scalars
from sottovoce_core.errors import SpecError

# ---- lattice ---------------------------------------------------------------------------------------------------------

MIN_NOISE_SCALE, MAX_NOISE_SCALE = 2.0**-900, 1e90
"""Range of noise scales: beyond it the lattice leaves the range of float64, or messages exceed the limit of the wire (1e100)."""

LATTICE_BITS = 40
"""Binary logarithm of the lattice points per noise scale: rounding moves a state by less than 2^-40 scales."""


def lattice_spacing(scale: Scalars) -> Scalars:
    """Return the lattice spacing for a scale: `2^-40 * scale`, rounded down to a power of two.

    It depends on the public schedule alone, never on data.

    Raises:
        SpecError: a scale without a lattice in float64: 0, infinite, NaN, or below about 1e-311.
    """
    if isinstance(scale, float):
        one = math.ldexp(1.0, math.frexp(scale)[1] - 1 - LATTICE_BITS)
        if not 0.0 < one <= scale < math.inf:
            raise SpecError(f"a noise scale must be positive, finite and have a lattice in float64, got {scale}")
        return one
    spacing: FloatArray = np.ldexp(1.0, np.frexp(scale)[1] - 1 - LATTICE_BITS)
    if not ((spacing > 0.0) & (spacing <= scale) & (scale < math.inf)).all():
        raise SpecError(f"noise scales must be positive, finite and have a lattice in float64, got {scale}")
    return spacing


def round_to_lattice(values: FloatArray, spacing: Scalars) -> FloatArray:
    """Round `values` to the nearest multiple of `spacing` (a power of two, so scaling is exact)."""
    rounded: FloatArray = values / spacing
    np.rint(rounded, out=rounded)
    rounded *= spacing
    return rounded


# ---- request ---------------------------------------------------------------------------------------------------------

Distribution = Literal["laplace", "gaussian", "spherical"]
"""Noise distribution: the density of a number x, or of a vector e along the last axis, is proportional to

- laplace: `exp(-|x|/scale)`,
- gaussian: `exp(-x^2 / (2 scale^2))`,
- spherical: `exp(-scale ||e||_2)`: here the scale is a rate, zeta, and the norm is `dim / scale` on average.
"""


@dataclass(frozen=True, slots=True)
class NoiseRequest:
    """Request for independent noise of one distribution, for one field of one round's message.

    Attributes:
        distribution: distribution of the numbers.
        field: message field.
        round: round of the message. An algorithm requests noise once for a field and a round.
        scale: scale of the distribution, in units of the message.
        spacing: spacing of the lattice of the numbers, a power of two; None: no lattice.
        shape: shape of the result.
        future_scale: scale of this field's noise in a later round, if known in advance, so that a source may prefetch. It does
            not affect the distribution: prefetched noise is used only for a request with exactly this scale.
    """

    distribution: Distribution
    field: str
    round: int
    scale: Scalars
    spacing: Scalars | None
    shape: tuple[int, ...]
    future_scale: Callable[[int], Scalars] | None = None

    def round_to_lattice(self, values: FloatArray) -> FloatArray:
        """Round `values` to the lattice, if there is one."""
        return values if self.spacing is None else round_to_lattice(values, self.spacing)

    def require_single_scale(self) -> tuple[float, float]:
        """Return scale and spacing, for a source that serves a single learner on lattices.

        Raises:
            TypeError: one scale per learner, or no lattice.
            SpecError: not `0 < spacing <= scale < inf`: the result would be no noise.
        """
        if not (isinstance(self.scale, float) and isinstance(self.spacing, float)):
            raise TypeError("noise of a deployed learner is for one learner: scale and spacing must be one number each")
        if not 0.0 < self.spacing <= self.scale < math.inf:  # this form also rejects NaN
            text = f"noise in field {self.field!r} must have 0 < spacing <= scale < inf"
            raise SpecError(f"{text}, got scale {self.scale} with spacing {self.spacing} in round {self.round}")
        return self.scale, self.spacing

    def require_single_rate(self) -> float:
        """Return the rate of spherical noise, for a source that serves a single learner.

        Raises:
            TypeError: one rate per learner.
            SpecError: the rate is 0, infinite or NaN: the result would be no noise, or nothing but noise.
        """
        if not isinstance(self.scale, float):
            raise TypeError("noise of a deployed learner is for one learner: the rate must be one number")
        if not (0.0 < self.scale < math.inf and 0.0 < 1.0 / self.scale < math.inf):
            text = f"spherical noise in field {self.field!r} must have a rate that is positive and finite, as 1/rate"
            raise SpecError(f"{text}, got {self.scale} in round {self.round}")
        return self.scale


NoiseSource = Callable[[NoiseRequest], FloatArray]
"""Source of a message's noise: the operating system, a seed, a recording, or none."""


# ---- prefetch --------------------------------------------------------------------------------------------------------

MAX_PREFETCH_ROWS = 64
"""Maximum number of rows that are drawn together."""

_process = [object()]
"""Identity of this process: a new object after a fork."""


def _renew_process() -> None:
    _process[0] = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_process)


class PrefetchKey(NamedTuple):
    """Request that one prefetched row answers: a row may only be used for an equal key."""

    round: int
    scale: float
    spacing: float
    shape: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Rate of the geometric distribution of a magnitude."""
        return self.spacing / self.scale

    def list_following(self, future_scale: Callable[[int], Scalars], max_rows: int) -> list[PrefetchKey]:
        """Return this row and those of the next rounds, at most `max_rows`, while the sampler splits numbers at the same bit."""
        rows, exponent = [self], math.frexp(self.rate)[1]
        for t in range(self.round + 1, self.round + max_rows):
            scale = future_scale(t)
            if not (isinstance(scale, float) and MIN_NOISE_SCALE <= scale <= MAX_NOISE_SCALE):
                break
            row = PrefetchKey(t, scale, float(lattice_spacing(scale)), self.shape)
            if math.frexp(row.rate)[1] != exponent:
                break
            rows.append(row)
        return rows


class PrefetchCache:
    """Prefetched rows by field. Threads may share it: a row is removed before it is checked."""

    def __init__(self) -> None:
        self._rows: dict[str, deque[tuple[object, PrefetchKey, FloatArray]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefetchCache, ()

    def take(self, field: str, row: PrefetchKey) -> FloatArray | None:
        """Return the prefetched numbers of this row. If the next ones are for another row, discard all."""
        rows = self._rows.get(field)
        if not rows:
            return None
        try:
            process, key, numbers = rows.popleft()
        except IndexError:  # another thread took the last one
            return None
        if process is _process[0] and key == row:
            return numbers
        rows.clear()
        return None

    def draw(
        self, field: str, rows: list[PrefetchKey], sample: Callable[[list[PrefetchKey]], Iterable[FloatArray]]
    ) -> FloatArray:
        """Sample `rows`, return the numbers of the first one and keep the others."""
        process = _process[0]
        first, *others = sample(rows)
        self._rows[field] = deque((process, row, numbers) for row, numbers in zip(rows[1:], others, strict=True))
        return first
