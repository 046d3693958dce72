#!/usr/bin/env python3
"""Benchmark of the samplers of noise, on one core, in comparison with OpenDP's own call.

Samplers run in turn; the table has the median of the repetitions. Targets are printed, not enforced.
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
"""Function that draws the given number of noise values."""

console = Console() if sys.stdout.isatty() else Console(width=100)


def build_numpy_sampler() -> Sample:
    """Build a sampler of continuous numbers by NumPy, which are not safe to send."""
    generator = np.random.default_rng(0)
    return lambda dim: generator.laplace(scale=SCALE, size=dim)


def build_opendp_sampler(distribution: str, dims: list[int]) -> Sample:
    """Build a sampler of OpenDP's own call, its measurement built before: list of floats in, list of floats out."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    make = {"laplace": dp.m.make_laplace, "gaussian": dp.m.make_gaussian}[distribution]
    metric = {"laplace": dp.l1_distance(T=float), "gaussian": dp.l2_distance(T=float)}[distribution]
    measurements, zeros = {}, {dim: [0.0] * dim for dim in dims}
    for dim in dims:
        domain = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=dim)
        measurements[dim] = make(domain, metric, scale=SCALE, k=int(np.log2(SPACING)))
    return lambda dim: measurements[dim](zeros[dim])


def build_sampler(source: NoiseSource, distribution: Distribution = "laplace") -> Sample:
    """Build a sampler that requests the noise of one message from a source."""
    spacing = None if distribution == "spherical" else SPACING
    return lambda dim: source(NoiseRequest(distribution, "y", 0, SCALE, spacing, (dim,)))


def build_sampler_ahead(source: NoiseSource) -> Sample:
    """Build a sampler of consecutive rounds with known scales: the source draws short vectors in advance."""
    rounds = count()
    return lambda dim: source(NoiseRequest("laplace", "y", next(rounds), SCALE, SPACING, (dim,), lambda t: SCALE))


def build_samplers(dims: list[int]) -> dict[str, Sample]:
    """Build all samplers, by name."""
    system = SystemNoise()
    found = {
        "bitwise (default)": build_sampler(system),
        "bitwise, drawn ahead": build_sampler_ahead(system),
        "keyed": build_sampler(KeyedNoise("hush", "run", 0)),
        "seeded": build_sampler(SeededNoise(0)),
        "numpy, continuous": build_numpy_sampler(),
        "bitwise, gaussian": build_sampler(system, "gaussian"),
        "bitwise, spherical": build_sampler(system, "spherical"),
    }
    if find_spec("opendp") is None:
        console.print(f"OpenDP is not installed: {format_install_hint('opendp')}", markup=False)
        return found
    return found | {
        "OpenDP's own call": build_opendp_sampler("laplace", dims),
        "opendp": build_sampler(OpenDpNoise()),
        "OpenDP's own call, gaussian": build_opendp_sampler("gaussian", dims),
    }


def measure_seconds(sample: Sample, dim: int, at_least: float) -> float:
    """Measure the seconds of one draw: repeat it until `at_least` seconds have passed."""
    draws, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < at_least:
        sample(dim)
        draws += 1
    return passed / draws


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[100, 10_000], help="numbers in a draw")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of every measurement")
    parser.add_argument("--seconds", type=float, default=0.2, help="minimum duration of every repetition")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    draws = build_samplers(options.dims)
    times: dict[tuple[str, int], list[float]] = {(name, dim): [] for name in draws for dim in options.dims}
    for dim in options.dims:
        for draw in draws.values():
            draw(dim)
        for _ in range(options.repeats):
            for name, draw in draws.items():
                times[name, dim].append(measure_seconds(draw, dim, options.seconds))
    console.print(
        build_table(list(draws), options.dims, {key: statistics.median(found) for key, found in times.items()})
    )


def build_table(names: list[str], dims: list[int], median: dict[tuple[str, int], float]) -> Table:
    """Build the table, one row per sampler: for every size, microseconds per draw and million numbers per second."""
    table = Table(box=box.SIMPLE_HEAD, title=f"Noise of scale {SCALE:g} on a lattice of 2^{int(np.log2(SPACING))}")
    table.add_column("sampler")
    for dim in dims:
        table.add_column(f"us, d = {dim:,}", justify="right")
        table.add_column("million/s", justify="right")
    for name in names:
        cells = [(f"{1e6 * median[name, dim]:,.1f}", f"{1e-6 * dim / median[name, dim]:.3g}") for dim in dims]
        table.add_row(name, *(cell for pair in cells for cell in pair))
    return table


if __name__ == "__main__":
    main()
