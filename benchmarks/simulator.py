#!/usr/bin/env python3
"""Benchmark of the simulator: logistic regression on a ring of five, in comparison with a bare numpy loop of the same recursion.

Every case runs in turn with its floor, each in its own process, so that a ratio compares runs within a minute.
Targets are printed, not enforced: the exit code is 1 only if a case could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy; the client and the floor do the same
import numpy as np
from machine import run_program, write_json
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec

FLOOR = Path(__file__).resolve().with_name("bare_simulation.py")
LEARNERS, DIM = 5, 117
TARGET = 1.0

console = Console() if sys.stdout.isatty() else Console(width=100)

LDP_DOL = {"name": "ldp-dol", "sigma": 2**0.5, "varsigma": 0.11}
DSGD = {"name": "dsgd", "noise": {"kind": "power", "sigma": 2**0.5, "varsigma": 0.11}}
LOGISTIC = {"kind": "logistic", "ridge": 0.0, "feature_bound": 10.0}
SQUARED = {"kind": "ridge", "ridge": 0.0, "feature_bound": 10.0, "label_bound": 1.0}


@dataclass(frozen=True, slots=True)
class Case:
    """Case of the benchmark.

    Attributes:
        name: name on the command line.
        algorithm, loss: sections of the spec.
        replicas: number of replicas that run together.
        history: whether the gradient is of all records so far (also in the floor), or of the record of the round.
        target: wanted replica-rounds/s, relative to the floor.
    """

    name: str
    algorithm: dict[str, Any]
    loss: dict[str, Any]
    replicas: int
    history: bool = False
    target: float | None = TARGET


@dataclass(frozen=True, slots=True)
class Sample:
    """Result of one run: speed, CPU microseconds per replica-round, and peak memory of the process."""

    replica_rounds_per_s: float
    cpu_us: float
    peak_mb: float


@dataclass(slots=True)
class Results:
    """Pairs of samples of case and floor by case, one per repetition."""

    pairs: dict[str, list[tuple[Sample, Sample]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


CASES = (
    *(Case(f"history-{r}", LDP_DOL, LOGISTIC, r, history=True) for r in (1, 100, 1000)),
    *(Case(f"plain-{r}", DSGD, LOGISTIC, r) for r in (1, 100, 1000)),
    *(Case(f"squared-{r}", LDP_DOL, SQUARED, r, target=None) for r in (1, 100)),
)


# ---- one run ---------------------------------------------------------------------------------------------


def simulate_case(case: Case, rounds: int) -> dict[str, float]:
    """Simulate a case in this process, with the same records as the floor."""
    data = build_data(rounds)
    sections = {"algorithm": case.algorithm, "loss": case.loss, "decision_set": {"kind": "l2_ball", "radius": 1e5}}
    topology = {"graph": "ring", "weights": {"kind": "constant", "value": 0.3}}
    spec = parse_spec({"rounds": rounds, "learners": LEARNERS, "topology": topology, **sections}, allow_imports=True)
    run = build_run(spec, DIM)
    wall, cpu = time.perf_counter(), time.process_time()
    done = sum(1 for _ in simulate_rounds(run, data, SeededNoise(1), case.replicas))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert done == rounds
    units = case.replicas * rounds
    return {"replica_rounds_per_s": units / wall, "cpu_us": 1e6 * cpu / units}


def build_data(rounds: int) -> PlacedData:
    """Build data with one record per learner and round."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(LEARNERS, rounds, DIM)) / np.sqrt(DIM)
    labels = (features @ rng.normal(size=DIM) > 0).astype(np.float64)
    order, offsets = np.arange(rounds), np.arange(rounds + 1)
    learners = tuple(LearnerData(x, y, order, offsets) for x, y in zip(features, labels, strict=True))
    return PlacedData(learners, np.empty((0, DIM)), np.empty(0))


def run_sample(command: list[str]) -> Sample:
    """Run a program that prints a JSON line, and measure its peak memory.

    Raises:
        OSError: the program failed.
    """
    done = run_program(command)
    facts = json.loads(done.output)
    return Sample(facts["replica_rounds_per_s"], facts["cpu_us"], done.peak_mb)


def run_pair(case: Case, rounds: int, floor: Path) -> tuple[Sample, Sample]:
    """Run the floor and then the case; return the samples of case and floor."""
    numbers = {"--learners": LEARNERS, "--dim": DIM, "--rounds": rounds, "--replicas": case.replicas}
    arguments = [str(part) for both in numbers.items() for part in both] + ["--history"] * case.history
    floor_sample = run_sample([sys.executable, str(floor), *arguments])
    return run_sample([sys.executable, __file__, "--work", case.name, "--rounds", str(rounds)]), floor_sample


# ---- showing ---------------------------------------------------------------------------------------------


def build_table(results: Results) -> Table:
    """Build the table of medians over the repetitions, one line per case."""
    table = Table(title="Simulator, medians over the repetitions", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("case", no_wrap=True)
    for head in ("replica-rounds/s", "floor", "ratio", "CPU ratio", "target", "peak MB", "floor MB"):
        table.add_column(head, justify="right", no_wrap=True)
    targets = {case.name: case.target for case in CASES}
    for name, pairs in results.pairs.items():
        samples, floors = zip(*pairs, strict=True)
        row = (
            f"{statistics.median(s.replica_rounds_per_s for s in samples):,.0f}",
            f"{statistics.median(s.replica_rounds_per_s for s in floors):,.0f}",
            f"{statistics.median(a.replica_rounds_per_s / b.replica_rounds_per_s for a, b in pairs):.2f}",
            f"{statistics.median(b.cpu_us / a.cpu_us for a, b in pairs):.2f}",
            "" if targets[name] is None else f"{targets[name]:.1f}",
            f"{max(s.peak_mb for s in samples):.0f}",
            f"{max(s.peak_mb for s in floors):.0f}",
        )
        table.add_row(name, *row)
    return table


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"which to run (default: all): {', '.join(names)}")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each case (default: 5)")
    parser.add_argument("--rounds", type=int, default=2000, help="rounds (default: 2000)")
    parser.add_argument("--quick", action="store_true", help="one repetition, few rounds, to test the benchmark itself")
    parser.add_argument("--floor", type=Path, default=FLOOR, help="script of the floor (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to a file")
    parser.add_argument("--work", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.cases = options.cases or names
    if unknown := sorted(set(options.cases) - set(names)):
        parser.error(f"unknown case {unknown[0]!r}: choose from {', '.join(names)}")
    if options.quick:
        options.repeats, options.rounds = 1, min(options.rounds, 50)
    if min(options.repeats, options.rounds) < 1:
        parser.error("--repeats and --rounds must be at least 1")
    if not options.floor.is_file():
        parser.error(f"--floor must be a script, but there is no file {options.floor}")
    return options


def main() -> int:
    """Run the benchmark, print the results, and return 1 if a case failed."""
    options = parse_arguments()
    cases = {case.name: case for case in CASES}
    if options.work is not None:
        print(json.dumps(simulate_case(cases[options.work], options.rounds)))
        return 0
    results = Results()
    for repeat in range(options.repeats):
        for name in options.cases:
            label = f"{name} {repeat + 1}/{options.repeats}"
            try:
                with console.status(label):
                    results.pairs.setdefault(name, []).append(run_pair(cases[name], options.rounds, options.floor))
            except (OSError, ValueError) as error:
                console.print(f"{label}: {error}", style="red", markup=False, highlight=False)
                results.failures.append(f"{label}: {error}")
    results.pairs = {name: pairs for name, pairs in results.pairs.items() if pairs}
    console.print(build_table(results))
    if options.json is not None:
        samples = {
            name: [{"case": asdict(a), "floor": asdict(b)} for a, b in pairs] for name, pairs in results.pairs.items()
        }
        write_json(options.json, {"rounds": options.rounds, "samples": samples})
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
