"""OpenDP's samplers on our lattice: the reference that ours are compared with, and a choice of their own."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import SpecError
from sottovoce.noise.bitwise import SystemNoise
from sottovoce.noise.draw import Draw
from sottovoce.optional import get_extra


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
            raise SpecError(f"noise from OpenDP needs its package: {get_extra('opendp')}") from None
        self._opendp.enable_features("contrib")  # what has a proof, but no audit yet; for the whole process

    def __call__(self, draw: Draw) -> FloatArray:
        opendp = self._opendp
        match draw.law:
            case "laplace":
                make, metric = opendp.m.make_laplace, opendp.l1_distance(T=float)
            case "gaussian":
                make, metric = opendp.m.make_gaussian, opendp.l2_distance(T=float)
            case _:
                return super().__call__(draw)
        (scale, grid), count = draw.of_one(), math.prod(draw.shape)
        domain = opendp.vector_domain(opendp.atom_domain(T=float, nan=False), size=count)
        add_noise = make(domain, metric, scale=scale, k=math.frexp(grid)[1] - 1)
        return np.array(add_noise([0.0] * count)).reshape(draw.shape)
