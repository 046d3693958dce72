"""OpenDP's samplers on our lattice: the reference that ours are compared with, and a choice of their own."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray, Scalars
from sottovoce.errors import SpecError
from sottovoce.noise.bitwise import SystemNoise
from sottovoce.noise.lattice import of_one


class OpenDpNoise(SystemNoise):
    """Discrete Laplace and Gaussian numbers from OpenDP 0.14.2 or later (extra `opendp`), in exact arithmetic.

    OpenDP adds noise to a vector of floats on `Z * 2^k`. Given zeros it returns the noise, so the law and the lattice are
    those of `SystemNoise`, and so is accounting. About 10 us a number. Spherical noise is still that of `SystemNoise`.

    Raises:
        SpecError: OpenDP is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            self._opendp: Any = importlib.import_module("opendp.prelude")
        except ImportError:
            raise SpecError("noise from OpenDP needs its package: pip install 'sottovoce[opendp]'") from None
        self._opendp.enable_features("contrib")  # what has a proof, but no audit yet; for the whole process

    def laplace(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        metric = self._opendp.l1_distance(T=float)
        return self._drawn(self._opendp.m.make_laplace, metric, *of_one(scale, grid), shape)

    def gaussian(self, name: str, t: int, scale: Scalars, grid: Scalars, shape: tuple[int, ...]) -> FloatArray:
        metric = self._opendp.l2_distance(T=float)
        return self._drawn(self._opendp.m.make_gaussian, metric, *of_one(scale, grid), shape)

    def _drawn(self, make: Any, metric: Any, scale: float, grid: float, shape: tuple[int, ...]) -> FloatArray:
        count = math.prod(shape)
        domain = self._opendp.vector_domain(self._opendp.atom_domain(T=float, nan=False), size=count)
        add_noise = make(domain, metric, scale=scale, k=math.frexp(grid)[1] - 1)
        return np.array(add_noise([0.0] * count)).reshape(shape)
