#!/usr/bin/env python3
"""How fast each sampler draws one message's noise, on one core, beside OpenDP's own call.

Samplers take turns, and the median of the repetitions is shown. Targets are shown, not enforced.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: one core
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce_core.noise import (
    Distribution,
    KeyedNoise,
    NoiseRequest,
    NoiseSource,
    OpenDpNoise,
    SeededNoise,
    SystemNoise,
    lattice_spacing,
)
from sottovoce_core.optional import format_install_hint

SCALE = 1.37
SPACING = lattice_spacing(SCALE)
Sample = Callable[[int], object]
"""Draws so many numbers."""

console = Console() if sys.stdout.isatty() else Console(width=100)


def numpy_alone() -> Sample:
    """What nobody should send: continuous numbers."""
    generator = np.random.default_rng(0)
    return lambda dim: generator.laplace(scale=SCALE, size=dim)


def opendp_alone(law: str, dims: list[int]) -> Sample:
    """The bare call of OpenDP, its measurement made beforehand: a list of floats in, a list of floats out."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    make = {"laplace": dp.m.make_laplace, "gaussian": dp.m.make_gaussian}[law]
    metric = {"laplace": dp.l1_distance(T=float), "gaussian": dp.l2_distance(T=float)}[law]
    measurements, zeros = {}, {dim: [0.0] * dim for dim in dims}
    for dim in dims:
        domain = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=dim)
        measurements[dim] = make(domain, metric, scale=SCALE, k=int(np.log2(SPACING)))
    return lambda dim: measurements[dim](zeros[dim])


def of(source: NoiseSource, law: Distribution = "laplace") -> Sample:
    """One of our sources, asked for one message's noise."""
    spacing = None if law == "spherical" else SPACING
    return lambda dim: source(NoiseRequest(law, "y", 0, SCALE, spacing, (dim,)))


def ahead(source: NoiseSource) -> Sample:
    """The same round after round, their scales known beforehand: short vectors are drawn ahead."""
    rounds = count()
    return lambda dim: source(NoiseRequest("laplace", "y", next(rounds), SCALE, SPACING, (dim,), lambda t: SCALE))


def samplers(dims: list[int]) -> dict[str, Sample]:
    """What is measured, by name."""
    system = SystemNoise()
    found = {
        "bitwise (default)": of(system),
        "bitwise, drawn ahead": ahead(system),
        "keyed": of(KeyedNoise("hush", "run", 0)),
        "seeded": of(SeededNoise(0)),
        "numpy, continuous": numpy_alone(),
        "bitwise, gaussian": of(system, "gaussian"),
        "bitwise, spherical": of(system, "spherical"),
    }
    if find_spec("opendp") is None:
        console.print(f"OpenDP is not installed: {format_install_hint('opendp')}", markup=False)
        return found
    return found | {
        "OpenDP's own call": opendp_alone("laplace", dims),
        "opendp": of(OpenDpNoise()),
        "OpenDP's own call, gaussian": opendp_alone("gaussian", dims),
    }


def seconds(sample: Sample, dim: int, at_least: float) -> float:
    """Of one draw: as many as fill the time."""
    draws, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < at_least:
        sample(dim)
        draws += 1
    return passed / draws


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[100, 10_000], help="numbers in a draw")
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement")
    parser.add_argument("--seconds", type=float, default=0.2, help="of every repetition, at least")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    draws = samplers(options.dims)
    times: dict[tuple[str, int], list[float]] = {(name, dim): [] for name in draws for dim in options.dims}
    for dim in options.dims:
        for draw in draws.values():
            draw(dim)
        for _ in range(options.repeats):
            for name, draw in draws.items():
                times[name, dim].append(seconds(draw, dim, options.seconds))
    console.print(table(list(draws), options.dims, {key: statistics.median(found) for key, found in times.items()}))


def table(names: list[str], dims: list[int], median: dict[tuple[str, int], float]) -> Table:
    """A row a sampler; for every size, microseconds a draw and million numbers a second."""
    shown = Table(box=box.SIMPLE_HEAD, title=f"Noise of scale {SCALE:g} on a lattice of 2^{int(np.log2(SPACING))}")
    shown.add_column("sampler")
    for dim in dims:
        shown.add_column(f"us, d = {dim:,}", justify="right")
        shown.add_column("million/s", justify="right")
    for name in names:
        cells = [(f"{1e6 * median[name, dim]:,.1f}", f"{1e-6 * dim / median[name, dim]:.3g}") for dim in dims]
        shown.add_row(name, *(cell for pair in cells for cell in pair))
    return shown


if __name__ == "__main__":
    main()
