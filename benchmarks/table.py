#!/usr/bin/env python3
"""Table of all benchmarks and the machine: rings, simulator, audit, hosts, start-up, command line, install sizes.

The script runs the other benchmarks in turn. Nothing is asserted: the exit code is 1 only if a part could not run; the table
has the other parts. Ratios compare runs in turn, and are more reliable than figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from machine import machine, run_program, write_json
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
RINGS = ("unrecorded", "mirror", "relay", "tls")
SIMULATED = ("history-1", "history-100", "plain-1", "plain-100", "plain-1000")
HOSTED = (5, 100, 1_000)
SHELLS = {
    "`python -c pass`": ["-c", "pass"],
    "`import sottovoce`": ["-c", "import sottovoce"],
    "`sottovoce.load`, first used": ["-c", "import sottovoce; sottovoce.load"],
    "`sottovoce --help`": ["-m", "sottovoce_client", "--help"],
}
INSTALLS = {"a learner": (), "the demo, `[audit]`": ("audit",), "queries, `[audit,query]`": ("audit", "query")}


@dataclass(frozen=True, slots=True)
class Line:
    """Figure with its unit, and its ratios to floors that ran in turn with it, by the name of the floor."""

    what: str
    figure: float
    unit: str
    ratios: dict[str, float] = field(default_factory=dict)

    def row(self) -> str:
        """Format the row in Markdown."""
        ratios = "; ".join(f"{ratio:.2f} {name}" for name, ratio in self.ratios.items())
        digits = 0 if abs(self.figure) >= 100 else 1 if abs(self.figure) >= 10 else 2
        return f"| {self.what} | {self.figure:,.{digits}f} {self.unit} | {ratios} |"


@dataclass(frozen=True, slots=True)
class Options:
    """Effort of the measurements: repetitions, or the quick form of each."""

    repeats: int
    quick: bool


# ---- the parts ---------------------------------------------------------------------------------------------------------


def run_script(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script of this folder; return the results that it writes with `--json`.

    Raises:
        OSError: the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        run_program([sys.executable, str(HERE / script), *map(str, arguments), "--json", str(file)])
        return dict(json.loads(file.read_text(encoding="utf-8")))


def measure_rings(options: Options, loop: str) -> Iterator[Line]:
    """Measure rounds/s of the real services, on the same event loop as the floor, or on the installed one."""
    cases = RINGS[:1] if options.quick else RINGS
    found = run_script("ring.py", *cases, "--loop", loop, *_build_options(options))
    where = "" if loop == "installed" else f", all on {loop}"
    for name in cases:
        rate = statistics.median(s["rounds_per_s"] for s in found["samples"][name])
        ratios = {
            "of the bare ring": found["ratio_to_floor"][name],
            "of it with arithmetic": found["ratio_to_arithmetic"][name],
            "by CPU": 1 / found["cpu_ratio_to_floor"][name],
            "with arithmetic by CPU": 1 / found["cpu_ratio_to_arithmetic"][name],
        }
        yield Line(f"ring of 5, {name}{where}", rate, "rounds/s", ratios)


def measure_start_up(options: Options) -> Iterator[Line]:
    """Measure the start-up of seven processes."""
    samples = run_script("ring.py", "startup", *_build_options(options))["samples"]["startup"]
    yield Line("seven processes start and join", statistics.median(s["joined_s"] for s in samples), "s")


def measure_simulator(options: Options) -> Iterator[Line]:
    """Measure replica-rounds/s of the simulator."""
    cases = SIMULATED[:2] if options.quick else SIMULATED
    found = run_script("simulator.py", *cases, *(["--quick"] if options.quick else ["--repeats", options.repeats]))
    for name in cases:
        pairs = [(pair["case"], pair["floor"]) for pair in found["samples"][name]]
        rate = statistics.median(case["replica_rounds_per_s"] for case, _ in pairs)
        by_cpu = statistics.median(floor["cpu_us"] / case["cpu_us"] for case, floor in pairs)
        by_rate = statistics.median(a["replica_rounds_per_s"] / b["replica_rounds_per_s"] for a, b in pairs)
        yield Line(
            f"simulator, {name}", rate, "replica-rounds/s", {"of the bare NumPy loop": by_rate, "by CPU": by_cpu}
        )


def measure_audit(options: Options) -> Iterator[Line]:
    """Measure a whole audit."""
    found = run_script("audit.py", *(["--quick"] if options.quick else []))
    ratio = {"times the bare simulation in one process": found["seconds"] / found["floor_s"]}
    yield Line(
        f"audit, 2 x {found['runs']:,} runs of 50 rounds, {found['jobs']} processes", found["seconds"], "s", ratio
    )
    yield Line("audit, memory of all its processes", found["peak_mb"], "MB")


def measure_hosts(options: Options) -> Iterator[Line]:
    """Measure many learners of one process."""
    for each in run_script("hosting.py", *(["--quick"] if options.quick else HOSTED))["samples"]:
        many = f"{each['case']['learners']:,} learners in one process"
        yield Line(f"{many}, CPU a learner-round", each["host_us"], "us")
        yield Line(f"{many}, coordinator's CPU a learner-round", each["coordinator_us"], "us")
        yield Line(f"{many}, memory a learner", each["memory_mb"], "MB")


def measure_command_line(options: Options) -> Iterator[Line]:
    """Measure CPU seconds of commands, in turn."""
    samples: dict[str, list[float]] = {name: [] for name in SHELLS}
    for _ in range(3 if options.quick else 3 * options.repeats):
        for name, words in SHELLS.items():
            samples[name].append(run_program([sys.executable, *words]).cpu_s)
    for name, seconds in samples.items():
        yield Line(name, statistics.median(seconds), "s CPU")


def measure_installs(_: Options) -> Iterator[Line]:
    """Sum the sizes of the installed packages and their requirements: files that the packages list, without Python."""
    for what, extras in INSTALLS.items():
        yield Line(f"install for {what}", sum(map(_size_mb, _find_requirements("sottovoce", extras))), "MB")


def _find_requirements(name: str, extras: Sequence[str]) -> set[str]:
    """Return a package and all its requirements, also the indirect ones."""
    found: set[str] = set()
    pending = [(name, tuple(extras))]
    visited: set[tuple[str, tuple[str, ...]]] = set()
    while pending:
        current = pending.pop()
        if current in visited:
            continue
        visited.add(current)
        found.add(canonicalize_name(current[0]))
        for text in distribution(current[0]).requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *current[1])):
                pending.append((wanted.name, tuple(sorted(wanted.extras))))
    return found


def _size_mb(name: str) -> float:
    """Return the size of the files of a package as its installer lists them, or 0 if it is not installed."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return 0.0
    places = [Path(str(file.locate())) for file in files]
    return sum(place.stat().st_size for place in places if place.is_file()) / 1e6


def _build_options(options: Options) -> list[str]:
    return ["--quick"] if options.quick else ["--repeats", str(options.repeats)]


Part = Callable[[Options], Iterator[Line]]
PARTS: dict[str, Part] = {
    "ring": partial(measure_rings, loop="installed"),
    "loop": partial(measure_rings, loop="asyncio"),
    "start-up": measure_start_up,
    "simulator": measure_simulator,
    "audit": measure_audit,
    "hosts": measure_hosts,
    "command-line": measure_command_line,
    "installs": measure_installs,
}
SLOW = ("loop", "start-up", "audit")
"""Parts that the quick form omits."""


# ---- the table ---------------------------------------------------------------------------------------------------------


def format_markdown(lines: Sequence[Line], before: dict[str, Any], after: dict[str, Any]) -> str:
    """Format the table, below a line with date, machine and versions."""
    versions = ", ".join(f"{name} {after[name]}" for name in ("python", "numpy", "grpcio", "uvloop", "sottovoce"))
    where = (
        f"{after['date']}, {after['processor']}, {after['cores']} cores, {after['memory_gb']} GB, {after['system']}, "
        f"load {before['load']} before and {after['load']} after; {versions}"
    )
    rows = [line.row() for line in lines]
    return "\n".join([where, "", "| what | figure | beside a yardstick |", "|---|---|---|", *rows, ""])


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run (default: all): {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of rings and simulations (default: 5)")
    parser.add_argument(
        "--quick", action="store_true", help="each once and short, under a minute, without " + ", ".join(SLOW)
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json, too")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    options.parts = options.parts or [name for name in PARTS if not options.quick or name not in SLOW]
    return options


def main() -> int:
    """Run all parts, print and write the table, and return 1 if a part failed."""
    options = parse_arguments()
    before, lines, failures = machine(), list[Line](), list[str]()
    for name in options.parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            lines += PARTS[name](Options(options.repeats, options.quick))
        except (OSError, KeyError, ValueError) as error:
            failures.append(f"{name}: {error}")
            print(failures[-1], file=sys.stderr)
    text = format_markdown(lines, before, machine())
    print(text)
    if options.out is not None:
        Path(f"{options.out}.md").write_text(text, encoding="utf-8")
        facts = {"load_before": before["load"], "lines": [asdict(line) for line in lines], "failures": failures}
        write_json(Path(f"{options.out}.json"), facts)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
