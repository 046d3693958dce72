#!/usr/bin/env python3
"""One table of what the others here measure, and where: rings, simulator, audit, hosts, start-up, command line, install sizes.

The scripts beside it measure, in turn. Nothing is asserted: the exit code is 1 only where something could not be run; the table
has all else. Trust ratios, which are of runs side by side, more than figures.
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

from machine import machine, used, write_json
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
    """A figure and its unit, and what it is in those of a yardstick that took turns with it, by the yardstick's name."""

    what: str
    figure: float
    unit: str
    ratios: dict[str, float] = field(default_factory=dict)

    def row(self) -> str:
        """In Markdown."""
        beside = "; ".join(f"{ratio:.2f} {of}" for of, ratio in self.ratios.items())
        digits = 0 if abs(self.figure) >= 100 else 1 if abs(self.figure) >= 10 else 2
        return f"| {self.what} | {self.figure:,.{digits}f} {self.unit} | {beside} |"


@dataclass(frozen=True, slots=True)
class Options:
    """How thoroughly: repetitions, or the quick form of each."""

    repeats: int
    quick: bool


# ---- what is measured --------------------------------------------------------------------------------------------------


def results(script: str, *arguments: object) -> dict[str, Any]:
    """What a script of this folder writes with `--json`.

    Raises:
        OSError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        used([sys.executable, str(HERE / script), *map(str, arguments), "--json", str(file)])
        return dict(json.loads(file.read_text(encoding="utf-8")))


def rings(options: Options, loop: str) -> Iterator[Line]:
    """Rounds/s of the real services; on the same event loop as the floor, or as they are installed."""
    cases = RINGS[:1] if options.quick else RINGS
    found = results("ring.py", *cases, "--loop", loop, *_how(options))
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


def start_up(options: Options) -> Iterator[Line]:
    """Seven processes."""
    samples = results("ring.py", "startup", *_how(options))["samples"]["startup"]
    yield Line("seven processes start and join", statistics.median(s["joined_s"] for s in samples), "s")


def simulator(options: Options) -> Iterator[Line]:
    """Replica-rounds/s."""
    cases = SIMULATED[:2] if options.quick else SIMULATED
    found = results("simulator.py", *cases, *(["--quick"] if options.quick else ["--repeats", options.repeats]))
    for name in cases:
        pairs = [(pair["case"], pair["floor"]) for pair in found["samples"][name]]
        rate = statistics.median(ours["replica_rounds_per_s"] for ours, _ in pairs)
        by_cpu = statistics.median(floor["cpu_us"] / ours["cpu_us"] for ours, floor in pairs)
        by_rate = statistics.median(a["replica_rounds_per_s"] / b["replica_rounds_per_s"] for a, b in pairs)
        yield Line(
            f"simulator, {name}", rate, "replica-rounds/s", {"of the bare NumPy loop": by_rate, "by CPU": by_cpu}
        )


def audit(options: Options) -> Iterator[Line]:
    """A whole audit."""
    found = results("audit.py", *(["--quick"] if options.quick else []))
    ratio = {"times the bare simulation in one process": found["seconds"] / found["floor_s"]}
    yield Line(
        f"audit, 2 x {found['runs']:,} runs of 50 rounds, {found['jobs']} processes", found["seconds"], "s", ratio
    )
    yield Line("audit, memory of all its processes", found["peak_mb"], "MB")


def hosts(options: Options) -> Iterator[Line]:
    """Learners of one process."""
    for each in results("hosting.py", *(["--quick"] if options.quick else HOSTED))["samples"]:
        many = f"{each['case']['learners']:,} learners in one process"
        yield Line(f"{many}, CPU a learner-round", each["host_us"], "us")
        yield Line(f"{many}, coordinator's CPU a learner-round", each["coordinator_us"], "us")
        yield Line(f"{many}, memory a learner", each["memory_mb"], "MB")


def command_line(options: Options) -> Iterator[Line]:
    """CPU seconds, in turn."""
    samples: dict[str, list[float]] = {name: [] for name in SHELLS}
    for _ in range(3 if options.quick else 3 * options.repeats):
        for name, words in SHELLS.items():
            samples[name].append(used([sys.executable, *words]).cpu_s)
    for name, seconds in samples.items():
        yield Line(name, statistics.median(seconds), "s CPU")


def installs(_: Options) -> Iterator[Line]:
    """Sizes of the packages that are installed here, with all that they ask for; files that they list, without Python."""
    for what, extras in INSTALLS.items():
        yield Line(f"install for {what}", sum(map(_size_mb, _wanted("sottovoce", extras))), "MB")


def _wanted(name: str, extras: Sequence[str]) -> set[str]:
    """A package, and what it asks for, and so on."""
    found: set[str] = set()
    ask = [(name, tuple(extras))]
    asked: set[tuple[str, tuple[str, ...]]] = set()
    while ask:
        one = ask.pop()
        if one in asked:
            continue
        asked.add(one)
        found.add(canonicalize_name(one[0]))
        for text in distribution(one[0]).requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *one[1])):
                ask.append((wanted.name, tuple(sorted(wanted.extras))))
    return found


def _size_mb(name: str) -> float:
    """Of a package's files, as its installer lists them; nothing, where it is not installed."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return 0.0
    places = [Path(str(file.locate())) for file in files]
    return sum(place.stat().st_size for place in places if place.is_file()) / 1e6


def _how(options: Options) -> list[str]:
    return ["--quick"] if options.quick else ["--repeats", str(options.repeats)]


Work = Callable[[Options], Iterator[Line]]
PARTS: dict[str, Work] = {
    "ring": partial(rings, loop="installed"),
    "loop": partial(rings, loop="asyncio"),
    "start-up": start_up,
    "simulator": simulator,
    "audit": audit,
    "hosts": hosts,
    "command-line": command_line,
    "installs": installs,
}
SLOW = ("loop", "start-up", "audit")
"""Parts that the quick form leaves out."""


# ---- the table ---------------------------------------------------------------------------------------------------------


def markdown(lines: Sequence[Line], before: dict[str, Any], after: dict[str, Any]) -> str:
    """The table, below a line that says where and when."""
    versions = ", ".join(f"{name} {after[name]}" for name in ("python", "numpy", "grpcio", "uvloop", "sottovoce"))
    where = (
        f"{after['date']}, {after['processor']}, {after['cores']} cores, {after['memory_gb']} GB, {after['system']}, "
        f"load {before['load']} before and {after['load']} after; {versions}"
    )
    rows = [line.row() for line in lines]
    return "\n".join([where, "", "| what | figure | beside a yardstick |", "|---|---|---|", *rows, ""])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which (default: all): {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=5, help="how often rings and simulations run (default: 5)")
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
    """Measure, show, write, and say whether everything could be run."""
    options = parse()
    before, lines, failures = machine(), list[Line](), list[str]()
    for name in options.parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            lines += PARTS[name](Options(options.repeats, options.quick))
        except (OSError, KeyError, ValueError) as error:
            failures.append(f"{name}: {error}")
            print(failures[-1], file=sys.stderr)
    text = markdown(lines, before, machine())
    print(text)
    if options.out is not None:
        Path(f"{options.out}.md").write_text(text, encoding="utf-8")
        facts = {"load_before": before["load"], "lines": [asdict(line) for line in lines], "failures": failures}
        write_json(Path(f"{options.out}.json"), facts)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
