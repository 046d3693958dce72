#!/usr/bin/env python3
"""How long a whole audit takes: LDP-DOL, five learners on a ring, d = 117, 50 rounds, all three families and the report.

Beside it the bare simulation of as many runs (bare_simulation.py, one process): the rest is what the statistics cost.
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

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: as the client does, and the floor
from joblib.externals.loky import get_reusable_executor
from machine import used, write_json
from rich.console import Console
from simulator import DIM, LEARNERS, data_of

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


def floor_s(floor: Path, runs: int) -> float:
    """Seconds that the bare simulation of `2 runs` takes in one process."""
    numbers = ("--learners", LEARNERS, "--dim", DIM, "--rounds", ROUNDS, "--replicas", runs // 10, "--history")
    done = used([sys.executable, str(floor), *map(str, numbers)])
    return 2 * runs * ROUNDS / float(json.loads(done.said)["replica_rounds_per_s"])


def used_by(jobs: int) -> tuple[float, float]:
    """Processor time of this process and its workers, in seconds, and the memory: its own, and the largest worker's for each.

    Workers are sent home first: the system says of none that still waits what it has used.
    """
    if jobs > 1:
        get_reusable_executor().shutdown(wait=True)
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(each.ru_utime + each.ru_stime for each in (own, workers))
    return seconds, (own.ru_maxrss + (jobs * workers.ru_maxrss if jobs > 1 else 0)) / 1024


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="of each world (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="200 runs: does it run at all?")
    parser.add_argument("--floor", type=Path, default=FLOOR, help="the yardstick (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to a file")
    options = parser.parse_args()
    runs = 200 if options.quick else options.runs
    console = Console(highlight=False)
    began = time.perf_counter()
    run = build_run(parse_spec(SPEC, allow_imports=True), DIM)
    stages: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder, console.status("auditing") as status:

        def say(what: str) -> None:
            stages.append((time.perf_counter(), what))
            status.update(what)

        plan = plan_audit(run, data_of(ROUNDS), 0, runs=runs)
        with open_mapper("processes", options.jobs) as mapper:
            done = audit_simulated(plan, mapper=mapper, on_stage=say)
        say("report")
        build_audit_page(done, "learner-0", 0).write(Path(folder) / "audit.html")
        size = (Path(folder) / "audit.html").stat().st_size
    end = time.perf_counter()
    console.print(f"choosing the swap: {stages[0][0] - began:.1f} s")
    for (when, what), after in zip(stages, [*(when for when, _ in stages[1:]), end], strict=True):
        console.print(f"{what}: {after - when:.1f} s")
    console.print(
        f"in all: {end - began:.1f} s (target {TARGET_S:g}) with {runs:,} runs of each world, {options.jobs} processes"
    )
    cpu_s, peak_mb = used_by(options.jobs)
    console.print(f"processor time: {cpu_s:.1f} s")
    console.print(f"peak memory: {peak_mb:,.0f} MB (target {TARGET_MB:,.0f}); report {size / 1e6:.1f} MB")
    console.print(f"{done.verdict.kind}: {done.verdict.text}")
    bare = floor_s(options.floor, runs)
    times = "" if options.quick else f"; the audit takes {(end - began) / bare:.1f} times that"  # else mostly start-up
    console.print(f"bare simulation of as many runs in one process: {bare:.1f} s{times}")
    if options.json is not None:
        facts = {"runs": runs, "jobs": options.jobs, "seconds": end - began, "floor_s": bare}
        write_json(options.json, facts | {"cpu_s": cpu_s, "peak_mb": peak_mb})
    return 0


if __name__ == "__main__":
    sys.exit(main())
