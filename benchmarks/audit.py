#!/usr/bin/env python3
"""Benchmark of a whole audit: LDP-DOL, five learners on a ring, d = 117, 50 rounds, all three families and the report.

The floor is the bare simulation of as many runs (bare_simulation.py, one process): the difference is the cost of the statistics.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy; the client and the floor do the same
from joblib.externals.loky import get_reusable_executor
from machine import run_program, write_json
from rich.console import Console
from simulator import DIM, LEARNERS, build_data

from sottovoce_client.auditing.report import build_audit_page
from sottovoce_client.backends import open_mapper
from sottovoce_core.auditing.audit import audit_simulated
from sottovoce_core.auditing.plan import plan_audit
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import parse_spec

FLOOR = Path(__file__).resolve().with_name("bare_simulation.py")
ROUNDS = 50
TARGET_S, TARGET_MB = 120.0, 2048.0
SPEC = {
    "name": "audit",
    "rounds": ROUNDS,
    "learners": LEARNERS,
    "algorithm": {"name": "ldp-dol", "sigma": 40.0, "varsigma": 0.11},
    "loss": {"kind": "logistic", "ridge": 0.01, "feature_bound": 1.0},
    "topology": {"graph": "ring", "weights": {"kind": "constant", "value": 0.3}},
}


def measure_floor_s(floor: Path, runs: int) -> float:
    """Return the seconds that the bare simulation of `2 runs` takes in one process."""
    numbers = ("--learners", LEARNERS, "--dim", DIM, "--rounds", ROUNDS, "--replicas", runs // 10, "--history")
    done = run_program([sys.executable, str(floor), *map(str, numbers)])
    return 2 * runs * ROUNDS / float(json.loads(done.output)["replica_rounds_per_s"])


def measure_usage(jobs: int) -> tuple[float, float]:
    """Return CPU seconds of this process and its workers, and MB of memory; each worker counts as much as the largest.

    Workers are stopped first, because the system counts a child process only after its end.
    """
    if jobs > 1:
        get_reusable_executor().shutdown(wait=True)
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(each.ru_utime + each.ru_stime for each in (own, workers))
    return seconds, (own.ru_maxrss + (jobs * workers.ru_maxrss if jobs > 1 else 0)) / 1024


def main() -> int:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="runs of each world (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="200 runs, to test the benchmark itself")
    parser.add_argument("--floor", type=Path, default=FLOOR, help="script of the floor (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    options = parser.parse_args()
    runs = 200 if options.quick else options.runs
    console = Console(highlight=False)
    began = time.perf_counter()
    run = build_run(parse_spec(SPEC, allow_imports=True), DIM)
    stages: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder, console.status("auditing") as status:

        def start_stage(what: str) -> None:
            stages.append((time.perf_counter(), what))
            status.update(what)

        plan = plan_audit(run, build_data(ROUNDS), 0, runs=runs)
        with open_mapper("processes", options.jobs) as mapper:
            done = audit_simulated(plan, mapper=mapper, on_stage=start_stage)
        start_stage("report")
        build_audit_page(done, "learner-0", 0).write(Path(folder) / "audit.html")
        size = (Path(folder) / "audit.html").stat().st_size
    end = time.perf_counter()
    console.print(f"choosing the records to swap: {stages[0][0] - began:.1f} s")
    for (when, what), after in zip(stages, [*(when for when, _ in stages[1:]), end], strict=True):
        console.print(f"{what}: {after - when:.1f} s")
    console.print(
        f"in all: {end - began:.1f} s (target {TARGET_S:g}) with {runs:,} runs of each world, {options.jobs} processes"
    )
    cpu_s, peak_mb = measure_usage(options.jobs)
    console.print(f"processor time: {cpu_s:.1f} s")
    console.print(f"peak memory: {peak_mb:,.0f} MB (target {TARGET_MB:,.0f}); report {size / 1e6:.1f} MB")
    console.print(f"{done.verdict.kind}: {done.verdict.text}")
    bare = measure_floor_s(options.floor, runs)
    times = "" if options.quick else f"; the audit takes {(end - began) / bare:.1f} times that"  # else start-up
    console.print(f"bare simulation of as many runs in one process: {bare:.1f} s{times}")
    if options.json is not None:
        facts = {"runs": runs, "jobs": options.jobs, "seconds": end - began, "floor_s": bare}
        write_json(options.json, facts | {"cpu_s": cpu_s, "peak_mb": peak_mb})
    return 0


if __name__ == "__main__":
    sys.exit(main())
