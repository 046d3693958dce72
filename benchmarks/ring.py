#!/usr/bin/env python3
"""Benchmark of the message rate of the real services on a ring, in comparison with a floor: the minimum of gRPC calls.

All cases of a group run in turn with the floor of the group, so that a ratio compares runs within a minute. Targets
are printed, not enforced: the exit code is 1 only if a case could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from machine import median, write_json
from measure import EVENT_ENGINE, Case, Floor, Loops, Sample, run_floor, run_services, start_ring
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce_core.errors import SottovoceError
from sottovoce_eavesdropper.capture_reader import find_captures
from sottovoce_eavesdropper.storage import open_folder

ARITHMETIC = "-arith"
"""Suffix of the name of a floor with the minimum arithmetic."""
FLOOR = Path(__file__).resolve().with_name("bare_ring.py")
STARTUP_TARGET_S = 5.0
TAIL = 4_200
"""Rounds after the last measurement of a long run: more than a learner receives in advance, so that this share stays equal."""
LONG = (1_000, 10_000, 100_000, 200_000)
"""Rounds after which a long run is measured."""

console = Console() if sys.stdout.isatty() else Console(width=110)


@dataclass(frozen=True, slots=True)
class Group:
    """Group of cases compared with a floor, and with the same floor with the minimum arithmetic.

    Attributes:
        other_floors: other floors, for information.
    """

    floor: Floor
    cases: tuple[Case, ...]
    other_floors: tuple[Floor, ...] = ()

    @property
    def floors(self) -> tuple[Floor, ...]:
        """All floors of the group."""
        return self.floor, replace(self.floor, name=self.floor.name + ARITHMETIC, arithmetic=True), *self.other_floors

    def with_loops(self, loops: Loops) -> Group:
        """Return the group with these event loops."""
        floor, *other_floors = (replace(each, loops=loops) for each in (self.floor, *self.other_floors))
        return Group(floor, tuple(replace(case, loops=loops) for case in self.cases), tuple(other_floors))


@dataclass(frozen=True, slots=True)
class SizeUsage:
    """Usage of three learners on a ring, recorded by relays, by size of a message.

    Attributes:
        dim: numbers in a message.
        rounds: measured rounds.
        message: bytes of one message.
        captured: bytes of the capture per recorded message.
        rounds_per_s: rate of the run.
        cpu_us: CPU microseconds per message, by role of the process.
        peak_mb: largest resident memory of a process, by role.
    """

    dim: int
    rounds: int
    message: float
    captured: float
    rounds_per_s: float
    cpu_us: dict[str, float]
    peak_mb: dict[str, float]


@dataclass(frozen=True, slots=True)
class LongRunUsage:
    """Usage of two learners of one process after a number of rounds with the squared loss.

    Attributes:
        rounds: rounds done.
        cpu_us: CPU microseconds per learner-round, by role, in the last tenth of the rounds, or the last 500.
        rss_mb: resident memory of the learners' process.
    """

    rounds: int
    cpu_us: dict[str, float]
    rss_mb: float


@dataclass(slots=True)
class Results:
    """Samples by case or floor, one per repetition (None: the run failed), and the floor of each case."""

    samples: dict[str, list[Sample | None]] = field(default_factory=dict)
    floor_of: dict[str, str] = field(default_factory=dict)
    long: list[LongRunUsage] = field(default_factory=list)
    by_size: list[SizeUsage] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def get_samples(self, name: str) -> list[Sample]:
        """Return the samples of a case or floor without the failed ones."""
        return [sample for sample in self.samples.get(name, []) if sample is not None]

    def ratio(self, name: str, kind: str = "") -> float | None:
        """Return the median ratio of rounds/s to the floor of the same repetition, or to its kind `ARITHMETIC`."""
        return median(case.rounds_per_s / floor.rounds_per_s for case, floor in self._pairs(name, kind))

    def cpu_ratio(self, name: str, kind: str = "") -> float | None:
        """Return the same ratio of the learners' CPU per message, which varies less than rounds/s on a shared machine."""
        return median(case.cpu_us["learner"] / floor.cpu_us["learner"] for case, floor in self._pairs(name, kind))

    def _pairs(self, name: str, kind: str) -> list[tuple[Sample, Sample]]:
        floor = self.samples.get(self.floor_of.get(name, "") + kind, [])
        pairs = zip(self.samples.get(name, []), floor, strict=False)
        return [(a, b) for a, b in pairs if a is not None and b is not None]


def build_groups(rounds: int) -> tuple[Group, ...]:
    """Build all groups."""
    large, fifty = max(rounds // 4, 50), max(rounds // 8, 25)
    return (
        Group(
            Floor("floor", rounds),
            (
                Case("unrecorded", rounds, target=0.60),
                Case("mirror", rounds, capture="mirror", target=0.50),
                Case("relay", rounds, capture="relay", target=0.33),
                Case("relay-2", rounds, capture="relay", workers=2),
                Case("relay-8", rounds, capture="relay", workers=8),
                Case("power", large, durability="power"),
            ),
        ),
        Group(
            Floor("floor-tls", rounds, tls=True),
            (
                Case("tls", rounds, tls=True),
                Case("tls-mirror", rounds, tls=True, capture="mirror"),
                Case("tls-relay", rounds, tls=True, capture="relay"),
            ),
        ),
        Group(
            Floor("floor-d10000", large, dim=10_000),
            (
                Case("d10000", large, dim=10_000),
                Case("d10000-mirror", large, dim=10_000, capture="mirror"),
                Case("d10000-relay", large, dim=10_000, capture="relay"),
            ),
        ),
        Group(
            Floor("floor50", fifty, learners=50, layout="--single"),
            (
                Case("ring50", fifty, learners=50, per_process=25),
                Case("ring50-relay", fifty, learners=50, per_process=25, capture="relay"),
                Case("ring50-relay-8", fifty, learners=50, per_process=25, capture="relay", workers=8),
            ),
            (Floor("floor50-processes", fifty, learners=50),),
        ),
    )


CASES_WITHOUT_FLOOR = ("startup", "rounds", "scale")
"""Cases without a floor."""
HEAVY = ("relay-2", "relay-8", "ring50", "ring50-relay", "ring50-relay-8")
"""Cases that the quick form omits unless they are named: they start fifty processes, or want more cores than two."""
DIMS = (100, 1_000, 10_000, 100_000, 1_000_000)


# ---- running ---------------------------------------------------------------------------------------------


class Bench:
    """Runner of the chosen cases, which continues after a failure."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results()

    async def run(self) -> None:
        """Run all chosen cases in turn."""
        chosen = set(self.options.cases)
        for group in build_groups(self.options.rounds):
            cases = [case for case in group.cases if case.name in chosen]
            chosen_group = replace(group, cases=tuple(cases)).with_loops(self.options.loop)
            for repeat in range(self.options.repeats if cases else 0):
                await self._run_group(chosen_group, repeat)
        if "startup" in chosen:
            for repeat in range(self.options.repeats):
                await self._add_sample("startup", repeat, self._services(Case("startup", 100, capture="relay")))
        if "rounds" in chosen:
            await self._attempt("rounds", self._measure_long)
        for dim in self.options.dims if "scale" in chosen else ():
            await self._attempt(f"scale, d = {dim:,}", partial(self._measure_scale, dim))

    async def _run_group(self, group: Group, repeat: int) -> None:
        for floor in group.floors:
            await self._add_sample(
                floor.name, repeat, partial(run_floor, self.options.floor, floor, self.options.folder)
            )
        for case in group.cases:
            self.results.floor_of[case.name] = group.floor.name
            await self._add_sample(case.name, repeat, self._services(case))

    async def _add_sample(self, name: str, repeat: int, work: Callable[[], Awaitable[Sample]]) -> None:
        sample = await self._attempt(f"{name} {repeat + 1}/{self.options.repeats}", work)
        self.results.samples.setdefault(name, []).append(sample)

    async def _attempt(self, label: str, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            with console.status(label):
                return await work()
        except (SottovoceError, OSError, ValueError) as error:
            console.print(f"{label}: {error}", style="red", markup=False, highlight=False)
            self.results.failures.append(f"{label}: {error}")
            return None

    def _services(self, case: Case) -> Callable[[], Awaitable[Sample]]:
        async def work() -> Sample:
            with tempfile.TemporaryDirectory(dir=self.options.folder) as folder:
                return await run_services(case, Path(folder))

        return work

    async def _measure_long(self) -> None:
        last = max(self.options.long)
        case = Case("rounds", last, learners=2, per_process=2)
        with tempfile.TemporaryDirectory(dir=self.options.folder) as folder:
            async with start_ring(case, last + TAIL, Path(folder)) as ring:
                for target in sorted(self.options.long):
                    begin = await ring.wait_for_round(target - max(target // 10, min(target, 500)))
                    end = await ring.wait_for_round(target)
                    units = case.learners * (end.round - begin.round)
                    used = {role: 1e6 * (end.cpu_s[role] - begin.cpu_s[role]) / units for role in end.cpu_s}
                    self.results.long.append(LongRunUsage(end.round, used, sum(end.rss_mb)))

    async def _measure_scale(self, dim: int) -> None:
        rounds = max(min(self.options.rounds, 4_000_000 // dim), 8)
        margin = max(rounds // 10, 4)
        case = Case("scale", rounds, dim=dim, learners=3, capture="relay", deadline_s=600.0)
        with tempfile.TemporaryDirectory(dir=self.options.folder) as folder:
            async with start_ring(case, rounds + 2 * margin, Path(folder)) as ring:
                begin, end = await ring.wait_for_round(margin), await ring.wait_for_round(margin + rounds)
            (capture,) = find_captures(open_folder(Path(folder) / "captures"))
            messages, size = capture.count_messages()
            stored = sum(capture.folder.get_size(name) for name in capture.folder.list_names())
        passed = end.round - begin.round
        used = {role: 1e6 * (end.cpu_s[role] - begin.cpu_s[role]) / case.messages(passed) for role in end.cpu_s}
        rate = passed / (end.at - begin.at)
        self.results.by_size.append(SizeUsage(dim, passed, size / messages, stored / messages, rate, used, end.peak_mb))


# ---- showing ---------------------------------------------------------------------------------------------


def _format_number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _format_cpu(samples: Sequence[Sample], role: str) -> str:
    return _format_number(median(s.cpu_us[role] for s in samples if role in s.cpu_us), ".0f")


def _format_range(samples: Sequence[Sample]) -> str:
    rates = [s.rounds_per_s for s in samples]
    return f"{min(rates):.0f}-{max(rates):.0f}" if rates else ""


def build_rates_table(results: Results, targets: dict[str, float | None]) -> Table:
    """Build the table of rounds/s, CPU and ratios, one line per case."""
    table = Table(
        title="Rings, medians over the repetitions", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("case", no_wrap=True)
    for head in ("rounds/s", "range", "ratio", "arith", "target", "learn", "x floor", "x arith", "relay", "coord"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in results.samples:
        if name != "startup":
            table.add_row(*_build_row(results, name, targets.get(name)))
    table.caption = (
        "ratio: of the floor's rounds/s in the same repetition; arith: of the floor's with the least arithmetic. learn, relay, "
        "coord: CPU microseconds per message of all learners, of the eavesdropper, of the coordinator. x: learn, in a floor's"
    )
    table.caption_justify = "left"
    return table


def _build_row(results: Results, name: str, target: float | None) -> list[str]:
    samples, ratio = results.get_samples(name), results.ratio(name)
    shown = _format_number(ratio, ".2f")
    if ratio is not None and target is not None:
        shown = f"[{'green' if ratio >= target else 'yellow'}]{shown}[/]"
    rate = _format_number(median(s.rounds_per_s for s in samples), ".0f")
    learn, relay, coordinator = (_format_cpu(samples, role) for role in ("learner", "eavesdropper", "coordinator"))
    arith, *more = (
        _format_number(value, ".2f")
        for value in (results.ratio(name, ARITHMETIC), results.cpu_ratio(name), results.cpu_ratio(name, ARITHMETIC))
    )
    return [
        name,
        rate,
        _format_range(samples),
        shown,
        arith,
        _format_number(target, ".2f"),
        learn,
        *more,
        relay,
        coordinator,
    ]


def format_other_lines(results: Results) -> list[str]:
    """Format the results of start-up and of long runs, one line each."""
    lines = []
    if samples := results.get_samples("startup"):
        joined, running = (median(getattr(s, name) for s in samples) for name in ("joined_s", "running_s"))
        lines.append(
            f"Start-up of seven processes: {_format_number(joined, '.2f')} s until all have joined "
            f"(target {STARTUP_TARGET_S:g}), {_format_number(running, '.2f')} s until learner 0 has its streams"
        )
    for each in results.long:
        learner, coordinator = (each.cpu_us[role] for role in ("learner", "coordinator"))
        lines.append(
            f"Two learners in a process after {each.rounds:,} rounds: {learner:.0f} us CPU per learner-round, {coordinator:.0f} "
            f"of the coordinator, {each.rss_mb:.1f} MB resident"
        )
    return lines


def build_scale_table(by_size: Sequence[SizeUsage]) -> Table:
    """Build the table of usage by size of a message, one line per size."""
    table = Table(title="Three learners, relayed", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in (
        "d",
        "message B",
        "captured B",
        "rounds/s",
        "learn us",
        "relay us",
        "learn MB",
        "relay MB",
        "coord MB",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for each in by_size:
        sizes = (each.dim, each.message, each.captured)
        cpu = (each.cpu_us[role] for role in ("learner", "eavesdropper"))
        peaks = (each.peak_mb[role] for role in ("learner", "eavesdropper", "coordinator"))
        numbers = [*(f"{size:,.0f}" for size in sizes), f"{each.rounds_per_s:,.1f}", *(f"{us:,.0f}" for us in cpu)]
        table.add_row(*numbers, *(f"{peak:,.0f}" for peak in peaks))
    table.caption = (
        "captured: bytes of the capture, a recorded message. us: CPU a message of all learners, of the eavesdropper. "
        "MB: largest resident memory of a process"
    )
    table.caption_justify = "left"
    return table


def to_json(options: argparse.Namespace, results: Results) -> dict[str, Any]:
    """Return all results as JSON values."""
    kept = {name: [None if s is None else asdict(s) for s in samples] for name, samples in results.samples.items()}
    return {
        "rounds": options.rounds,
        "repeats": options.repeats,
        "samples": kept,
        "loop": options.loop,
        "ratio_to_floor": {name: results.ratio(name) for name in results.floor_of},
        "ratio_to_arithmetic": {name: results.ratio(name, ARITHMETIC) for name in results.floor_of},
        "cpu_ratio_to_floor": {name: results.cpu_ratio(name) for name in results.floor_of},
        "cpu_ratio_to_arithmetic": {name: results.cpu_ratio(name, ARITHMETIC) for name in results.floor_of},
        "long": [asdict(each) for each in results.long],
        "scale": [asdict(each) for each in results.by_size],
        "failures": results.failures,
    }


# ---- the command -----------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = [case.name for group in build_groups(1) for case in group.cases] + list(CASES_WITHOUT_FLOOR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"which to run (default: all): {', '.join(names)}")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each case (default: 5)")
    parser.add_argument("--rounds", type=int, default=2000, help="measured rounds at d = 117 (default: 2000)")
    parser.add_argument(
        "--long",
        type=int,
        nargs="+",
        default=LONG,
        help=f"rounds after which the case `rounds` is measured (default: {LONG})",
    )
    parser.add_argument(
        "--dims", type=int, nargs="+", default=DIMS, help=f"numbers in a message of the scale case (default: {DIMS})"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one repetition, few rounds, no ring50, to test the benchmark itself"
    )
    parser.add_argument(
        "--loop",
        choices=get_args(Loops),
        default="installed",
        help="event loop of services and floor; installed (default): uvloop for services if installed, asyncio for the floor",
    )
    parser.add_argument(
        "--no-event-engine", action="store_true", help="services with GRPC_EXPERIMENTS as in benchmarks/README.md"
    )
    parser.add_argument("--floor", type=Path, default=FLOOR, help="script of the floor (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder of logs and captures (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to a file")
    options = parser.parse_args(arguments)
    options.cases = options.cases or [name for name in names if not (options.quick and name in HEAVY)]
    if unknown := sorted(set(options.cases) - set(names)):
        parser.error(f"unknown case {unknown[0]!r}: choose from {', '.join(names)}")
    if options.quick:
        options.repeats, options.rounds, options.long = 1, min(options.rounds, 400), [1_000]
        options.dims = [min(options.dims)]
    if min(options.repeats, options.rounds, *options.dims) < 1 or min(options.long) < 100:
        parser.error("--repeats, --rounds and --dims must be at least 1, --long at least 100")
    if not options.floor.is_file():
        parser.error(f"--floor must be a script, but there is no file {options.floor}")
    return options


async def _run_until_signal(work: Awaitable[None]) -> None:
    """Run the benchmark; SIGTERM ends it as Ctrl-C does, after all services have stopped."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def main() -> int:
    """Run the benchmark, print the results, and return 1 if a case failed."""
    options = parse_arguments()
    if options.no_event_engine:
        os.environ[EVENT_ENGINE] = "-event_engine_client,-event_engine_listener"
    bench = Bench(options)
    try:
        asyncio.run(_run_until_signal(bench.run()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; results until then:")
        bench.results.failures.append("stopped")
    targets = {case.name: case.target for group in build_groups(options.rounds) for case in group.cases}
    if set(bench.results.samples) - {"startup"}:
        console.print(build_rates_table(bench.results, targets))
    if bench.results.by_size:
        console.print(build_scale_table(bench.results.by_size))
    for line in format_other_lines(bench.results):
        console.print(line, highlight=False)
    if options.json is not None:
        write_json(options.json, to_json(options, bench.results))
    return 1 if bench.results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
