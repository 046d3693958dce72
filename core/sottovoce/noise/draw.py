"""What a message asks noise for, and who answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sottovoce.arrays import FloatArray, Scalars
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
    """

    law: Law
    field: str
    round: int
    scale: Scalars
    grid: Scalars | None
    shape: tuple[int, ...]

    def rounded(self, values: FloatArray) -> FloatArray:
        """`values` on the lattice, if there is one."""
        return values if self.grid is None else on_grid(values, self.grid)

    def of_one(self) -> tuple[float, float]:
        """Scale and spacing, for a source that serves a single learner and draws on lattices.

        Raises:
            TypeError: there is one per learner, or no lattice.
        """
        if not (isinstance(self.scale, float) and isinstance(self.grid, float)):
            raise TypeError("a deployed learner draws for itself alone: scale must be one number, and grid another one")
        return self.scale, self.grid


Noise = Callable[[Draw], FloatArray]
"""Where the noise of a message comes from: the operating system, a seed, a recording, or nowhere."""
