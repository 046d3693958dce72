"""Requests for noise, the lattice that noise is rounded to, and rows of noise that were drawn ahead.

Rows of noise that were drawn before they are asked for: each is given out once, in order.

Most of what one short vector costs are the calls that draw it, so those of later rounds are drawn in the same calls where their
scales are known. They lie in memory alone, and in no copy, no pickle and no forked process.
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
"""Of noise: beyond them its lattice leaves the range of float64, or its messages what the wire carries (1e100)."""

LATTICE_BITS = 40
"""Lattice points per scale of the noise, as a power of two: rounding moves a state by less than 2^-40 scales."""


def lattice_spacing(scale: Scalars) -> Scalars:
    """Lattice spacing for a scale: the power of two that is `2^-40 * scale`, rounded down.

    It depends on the public schedule alone, never on data.

    Raises:
        SpecError: a scale that has no lattice in float64: 0, infinite, not a number, or below about 1e-311.
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
    """`values` rounded to the nearest multiple of `spacing` (a power of two, so scaling is exact)."""
    rounded: FloatArray = values / spacing
    np.rint(rounded, out=rounded)
    rounded *= spacing
    return rounded


# ---- draw ------------------------------------------------------------------------------------------------------------

Distribution = Literal["laplace", "gaussian", "spherical"]
"""How likely a number x, or a vector e along the last axis, is: its probability is proportional to

- laplace: `exp(-|x|/scale)`,
- gaussian: `exp(-x^2 / (2 scale^2))`,
- spherical: `exp(-scale ||e||_2)`: here the scale is a rate, zeta, and the norm is `dim / scale` on average.
"""


@dataclass(frozen=True, slots=True)
class NoiseRequest:
    """One draw of noise: independent numbers of one law, for one field of one round's message.

    Attributes:
        law: of the numbers.
        field: of the message.
        round: of the message. An algorithm draws once for a field and a round.
        scale: of the law, in units of the message.
        grid: spacing of the lattice that the numbers are on, a power of two; None: they are on none.
        shape: of the result.
        later: the scale of this field's noise in a later round, where it is known beforehand; a source may draw ahead then. Of
            no effect on the law: what is drawn ahead is given out for a draw with that very scale alone.
    """

    distribution: Distribution
    field: str
    round: int
    scale: Scalars
    spacing: Scalars | None
    shape: tuple[int, ...]
    future_scale: Callable[[int], Scalars] | None = None

    def round_to_lattice(self, values: FloatArray) -> FloatArray:
        """`values` on the lattice, if there is one."""
        return values if self.spacing is None else round_to_lattice(values, self.spacing)

    def require_single_scale(self) -> tuple[float, float]:
        """Scale and spacing, for a source that serves a single learner and draws on lattices.

        Raises:
            TypeError: there is one per learner, or no lattice.
            SpecError: not `0 < grid <= scale < inf`: what would come out is no noise.
        """
        if not (isinstance(self.scale, float) and isinstance(self.spacing, float)):
            raise TypeError("a deployed learner draws for itself alone: scale must be one number, and grid another one")
        if not 0.0 < self.spacing <= self.scale < math.inf:  # in this form not-a-number is refused, too
            text = f"noise in field {self.field!r} must have 0 < grid <= scale < inf"
            raise SpecError(f"{text}, got scale {self.scale} on a grid of {self.spacing} in round {self.round}")
        return self.scale, self.spacing

    def require_single_rate(self) -> float:
        """The rate of spherical noise, for a source that serves a single learner.

        Raises:
            TypeError: there is one per learner.
            SpecError: it is 0, infinite or not a number: what would come out is no noise, or nothing but noise.
        """
        if not isinstance(self.scale, float):
            raise TypeError("a deployed learner draws for itself alone: the rate must be one number")
        if not (0.0 < self.scale < math.inf and 0.0 < 1.0 / self.scale < math.inf):
            text = f"spherical noise in field {self.field!r} must have a rate that is positive and finite, as 1/rate"
            raise SpecError(f"{text}, got {self.scale} in round {self.round}")
        return self.scale


NoiseSource = Callable[[NoiseRequest], FloatArray]
"""Where the noise of a message comes from: the operating system, a seed, a recording, or nowhere."""


# ---- ahead -----------------------------------------------------------------------------------------------------------

MAX_PREFETCH_ROWS = 64
"""That are drawn together."""

_process = [object()]
"""This process: another object after a fork."""


def _forked() -> None:
    _process[0] = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class PrefetchKey(NamedTuple):
    """What one row is for: two that are alike may have the same numbers, and no others."""

    round: int
    scale: float
    spacing: float
    shape: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Of the geometric law of a magnitude."""
        return self.spacing / self.scale

    def list_following(self, future_scale: Callable[[int], Scalars], max_rows: int) -> list[PrefetchKey]:
        """This row and those of the next rounds, fewer than `most` of them where the sampler would cut a number elsewhere."""
        rows, cut = [self], math.frexp(self.rate)[1]
        for t in range(self.round + 1, self.round + max_rows):
            scale = future_scale(t)
            if not (isinstance(scale, float) and MIN_NOISE_SCALE <= scale <= MAX_NOISE_SCALE):
                break
            row = PrefetchKey(t, scale, float(lattice_spacing(scale)), self.shape)
            if math.frexp(row.rate)[1] != cut:
                break
            rows.append(row)
        return rows


class PrefetchCache:
    """What waits, by field. Threads may share it: a row is taken out before it is looked at."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[object, PrefetchKey, FloatArray]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefetchCache, ()

    def take(self, field: str, row: PrefetchKey) -> FloatArray | None:
        """The numbers that wait for this row. If the next ones are for another, all are thrown away."""
        waiting = self._waiting.get(field)
        if not waiting:
            return None
        try:
            process, due, numbers = waiting.popleft()
        except IndexError:  # another thread has taken the last
            return None
        if process is _process[0] and due == row:
            return numbers
        waiting.clear()
        return None

    def draw(
        self, field: str, rows: list[PrefetchKey], sample: Callable[[list[PrefetchKey]], Iterable[FloatArray]]
    ) -> FloatArray:
        """The numbers of the first of `rows`; those of the others wait."""
        process = _process[0]
        first, *others = sample(rows)
        self._waiting[field] = deque((process, row, numbers) for row, numbers in zip(rows[1:], others, strict=True))
        return first
