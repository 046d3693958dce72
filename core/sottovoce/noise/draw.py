"""What a message asks noise for, and who answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sottovoce.arrays import FloatArray, Scalars
from sottovoce.errors import SpecError
from sottovoce.noise.lattice import on_grid

Law = Literal["laplace", "gaussian", "spherical"]
"""How likely a number x, or a vector e along the last axis, is: its probability is proportional to

- laplace: `exp(-|x|/scale)`,
- gaussian: `exp(-x^2 / (2 scale^2))`,
- spherical: `exp(-scale ||e||_2)`: here the scale is a rate, zeta, and the norm is `dim / scale` on average.
"""


@dataclass(frozen=True, slots=True)
class Draw:
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

    law: Law
    field: str
    round: int
    scale: Scalars
    grid: Scalars | None
    shape: tuple[int, ...]
    later: Callable[[int], Scalars] | None = None

    def rounded(self, values: FloatArray) -> FloatArray:
        """`values` on the lattice, if there is one."""
        return values if self.grid is None else on_grid(values, self.grid)

    def of_one(self) -> tuple[float, float]:
        """Scale and spacing, for a source that serves a single learner and draws on lattices.

        Raises:
            TypeError: there is one per learner, or no lattice.
            SpecError: not `0 < grid <= scale < inf`: what would come out is no noise.
        """
        if not (isinstance(self.scale, float) and isinstance(self.grid, float)):
            raise TypeError("a deployed learner draws for itself alone: scale must be one number, and grid another one")
        if not 0.0 < self.grid <= self.scale < math.inf:  # in this form not-a-number is refused, too
            text = f"noise in field {self.field!r} must have 0 < grid <= scale < inf"
            raise SpecError(f"{text}, got scale {self.scale} on a grid of {self.grid} in round {self.round}")
        return self.scale, self.grid

    def rate_of_one(self) -> float:
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


Noise = Callable[[Draw], FloatArray]
"""Where the noise of a message comes from: the operating system, a seed, a recording, or nowhere."""
