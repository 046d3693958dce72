"""Lattice noise from the operating system, OpenDP, a key, a seed or a recording, or no noise.

Why a lattice. A float64 Laplace number added to a float64 state leaks the state through its low bits (Mironov 2012). So
the state is rounded to a lattice `Z * grid` first, and the noise is discrete Laplace on that same lattice: every lattice
point can come from every state, and `log p(x) - log p(x')` is exactly `(|x'| - |x|) / scale`.

A noise source answers a `NoiseRequest` (`request`). `samplers` has the sources of deployed learners, `simulation` those of
simulations and replays, `mechanisms` adds noise to a vector.
"""

from sottovoce_core.noise.request import (
    LATTICE_BITS,
    MAX_NOISE_SCALE,
    MIN_NOISE_SCALE,
    Distribution,
    NoiseRequest,
    NoiseSource,
    lattice_spacing,
    round_to_lattice,
)
from sottovoce_core.noise.samplers import KeyedNoise, OpenDpNoise, SystemNoise
from sottovoce_core.noise.simulation import RecordedNoise, Recorder, SeededNoise, no_noise

__all__ = [
    "LATTICE_BITS",
    "MAX_NOISE_SCALE",
    "MIN_NOISE_SCALE",
    "Distribution",
    "KeyedNoise",
    "NoiseRequest",
    "NoiseSource",
    "OpenDpNoise",
    "RecordedNoise",
    "Recorder",
    "SeededNoise",
    "SystemNoise",
    "lattice_spacing",
    "no_noise",
    "round_to_lattice",
]
