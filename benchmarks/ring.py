#!/usr/bin/env python3
"""How fast the real services exchange messages around a ring, beside the least that gRPC can do for it.

All cases of a group are run in turn with the group's yardstick, so that a ratio compares what ran within a minute. Targets
are shown, not enforced: the exit code is 1 only where something could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from measure import EVENT_ENGINE, Case, Floor, Sample, ring_of, run_floor, run_services
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce.errors import SottovoceError

FLOOR = Path(__file__).resolve().with_name("bare_ring.py")
START_TARGET_S = 5.0
MEMORY_TAIL = 4_200
"""Rounds planned after the last look at memory: more than a learner takes in ahead, so that this share stays the same."""

console = Console() if sys.stdout.isatty() else Console(width=100)


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are compared with the first of these floors."""

    floors: tuple[Floor, ...]
    cases: tuple[Case, ...]


@dataclass(slots=True)
class Results:
    """Samples by case or floor, one per repetition (None: it failed), and the floor that a case is compared with."""

    samples: dict[str, list[Sample | None]] = field(default_factory=dict)
    floor_of: dict[str, str] = field(default_factory=dict)
    memory: dict[int, tuple[float, ...]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def of(self, name: str) -> list[Sample]:
        """The samples that there are."""
        return [sample for sample in self.samples.get(name, []) if sample is not None]

    def ratio(self, name: str) -> float | None:
        """Median of the ratios of rounds/s to the floor of the same repetition."""
        return _median(case.rounds_per_s / floor.rounds_per_s for case, floor in self._pairs(name))

    def cpu_ratio(self, name: str) -> float | None:
        """The same of the learners' CPU per message: steadier than rounds/s on a machine that others use, too."""
        return _median(case.cpu_us["learner"] / floor.cpu_us["learner"] for case, floor in self._pairs(name))

    def _pairs(self, name: str) -> list[tuple[Sample, Sample]]:
        floor = self.samples.get(self.floor_of.get(name, ""), [])
        pairs = zip(self.samples.get(name, []), floor, strict=False)
        return [(a, b) for a, b in pairs if a is not None and b is not None]


def groups(rounds: int) -> tuple[Group, ...]:
    """Everything that is measured."""
    large, fifty = max(rounds // 4, 50), max(rounds // 8, 25)
    return (
        Group(
            (Floor("floor", rounds),),
            (
                Case("unrecorded", rounds, target=0.7),
                Case("mirror", rounds, capture="mirror", target=0.65),
                Case("relay", rounds, capture="relay", target=0.33),
                Case("power", large, durability="power"),
            ),
        ),
        Group(
            (Floor("floor-tls", rounds, tls=True),),
            (
                Case("tls", rounds, tls=True),
                Case("tls-mirror", rounds, tls=True, capture="mirror"),
                Case("tls-relay", rounds, tls=True, capture="relay"),
            ),
        ),
        Group(
            (Floor("floor-d10000", large, dim=10_000),),
            (
                Case("d10000", large, dim=10_000),
                Case("d10000-mirror", large, dim=10_000, capture="mirror"),
                Case("d10000-relay", large, dim=10_000, capture="relay"),
            ),
        ),
        Group(
            (
                Floor("floor50", fifty, learners=50, layout="--single"),
                Floor("floor50-processes", fifty, learners=50),
            ),
            (Case("ring50", fifty, learners=50, per_process=25),),
        ),
    )


ALONE = ("startup", "memory")
"""Cases without a floor."""


# ---- running ---------------------------------------------------------------------------------------------


class Bench:
    """Runs the chosen cases, and goes on where one of them fails."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results()

    async def run(self) -> None:
        """Everything, in turn."""
        chosen = set(self.options.cases)
        for group in groups(self.options.rounds):
            cases = [case for case in group.cases if case.name in chosen]
            for repeat in range(self.options.repeats if cases else 0):
                await self._group(group.floors, cases, repeat)
        if "startup" in chosen:
            for repeat in range(self.options.repeats):
                await self._keep("startup", repeat, self._services(Case("startup", 100, capture="relay")))
        if "memory" in chosen:
            await self._attempt("memory", self._memory)

    async def _group(self, floors: Sequence[Floor], cases: Iterable[Case], repeat: int) -> None:
        for floor in floors:
            await self._keep(floor.name, repeat, partial(run_floor, self.options.floor, floor))
        for case in cases:
            self.results.floor_of[case.name] = floors[0].name
            await self._keep(case.name, repeat, self._services(case))

    async def _keep(self, name: str, repeat: int, work: Callable[[], Awaitable[Sample]]) -> None:
        sample = await self._attempt(f"{name} {repeat + 1}/{self.options.repeats}", work)
        self.results.samples.setdefault(name, []).append(sample)

    async def _attempt(self, what: str, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            with console.status(what):
                return await work()
        except (SottovoceError, OSError, ValueError) as error:
            console.print(f"{what}: {error}", style="red", markup=False, highlight=False)
            self.results.failures.append(f"{what}: {error}")
            return None

    def _services(self, case: Case) -> Callable[[], Awaitable[Sample]]:
        async def work() -> Sample:
            with tempfile.TemporaryDirectory(dir=self.options.folder) as folder:
                return await run_services(case, Path(folder))

        return work

    async def _memory(self) -> None:
        marks = (max(self.options.memory_rounds // 10, 1), self.options.memory_rounds)
        case = Case("memory", marks[-1])
        with tempfile.TemporaryDirectory(dir=self.options.folder) as folder:
            async with ring_of(case, marks[-1] + MEMORY_TAIL, Path(folder)) as ring:
                for mark in marks:
                    self.results.memory[mark] = (await ring.reach(mark)).rss_mb


# ---- showing ---------------------------------------------------------------------------------------------


def _median(values: Iterable[float]) -> float | None:
    kept = list(values)
    return statistics.median(kept) if kept else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _cpu(samples: Sequence[Sample], role: str) -> str:
    return _number(_median(s.cpu_us[role] for s in samples if role in s.cpu_us), ".0f")


def _spread(samples: Sequence[Sample]) -> str:
    rates = [s.rounds_per_s for s in samples]
    return f"{min(rates):.0f}-{max(rates):.0f}" if rates else ""


def rates_table(results: Results, targets: dict[str, float | None]) -> Table:
    """Rounds/s, CPU and ratios, one case a line."""
    table = Table(
        title="Rings, medians over the repetitions", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("case", no_wrap=True)
    for head in ("rounds/s", "range", "ratio", "target", "learn", "x floor", "relay", "coord"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in results.samples:
        if name != "startup":
            table.add_row(*_row(results, name, targets.get(name)))
    table.caption = (
        "ratio: of the floor's rounds/s in the same repetition. learn, relay, coord: CPU microseconds per message of all "
        "learners, of the eavesdropper, of the coordinator. x floor: learn, in the floor's"
    )
    table.caption_justify = "left"
    return table


def _row(results: Results, name: str, target: float | None) -> list[str]:
    samples, ratio = results.of(name), results.ratio(name)
    shown = _number(ratio, ".2f")
    if ratio is not None and target is not None:
        shown = f"[{'green' if ratio >= target else 'yellow'}]{shown}[/]"
    rate = _number(_median(s.rounds_per_s for s in samples), ".0f")
    learn, relay, coordinator = (_cpu(samples, role) for role in ("learner", "eavesdropper", "coordinator"))
    more = _number(results.cpu_ratio(name), ".2f")
    return [name, rate, _spread(samples), shown, _number(target, ".2f"), learn, more, relay, coordinator]


def others(results: Results) -> list[str]:
    """Start-up and memory, a line each."""
    lines = []
    if samples := results.of("startup"):
        joined, running = (_median(getattr(s, name) for s in samples) for name in ("joined_s", "running_s"))
        lines.append(
            f"Start-up of seven processes: {_number(joined, '.2f')} s until all have joined (target {START_TARGET_S:g}), "
            f"{_number(running, '.2f')} s until learner 0 has its streams"
        )
    for mark, sizes in results.memory.items():
        lines.append(f"Resident memory of a learner in round {mark:,}: {_number(_median(sizes), '.1f')} MB")
    return lines


def as_json(options: argparse.Namespace, results: Results) -> str:
    """Everything that was measured."""
    kept = {name: [None if s is None else asdict(s) for s in samples] for name, samples in results.samples.items()}
    facts = {
        "rounds": options.rounds,
        "repeats": options.repeats,
        "cores": os.cpu_count(),
        "samples": kept,
        "ratio_to_floor": {name: results.ratio(name) for name in results.floor_of},
        "cpu_ratio_to_floor": {name: results.cpu_ratio(name) for name in results.floor_of},
        "memory_mb": results.memory,
        "failures": results.failures,
    }
    return json.dumps(facts, indent=2)


# ---- the command -----------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [case.name for group in groups(1) for case in group.cases] + list(ALONE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"which to run (default: all): {', '.join(names)}")
    parser.add_argument("--repeats", type=int, default=5, help="how often each case is run (default: 5)")
    parser.add_argument("--rounds", type=int, default=2000, help="measured rounds at d = 117 (default: 2000)")
    parser.add_argument("--memory-rounds", type=int, default=20_000, help="rounds of the memory case (default: 20000)")
    parser.add_argument("--quick", action="store_true", help="once, few rounds: does it run at all?")
    parser.add_argument(
        "--no-event-engine", action="store_true", help="services with GRPC_EXPERIMENTS as in deploy/README.md"
    )
    parser.add_argument("--floor", type=Path, default=FLOOR, help="the yardstick (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="where journals and captures are written (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to a file")
    options = parser.parse_args(arguments)
    options.cases = options.cases or names
    if unknown := sorted(set(options.cases) - set(names)):
        parser.error(f"unknown case {unknown[0]!r}: choose from {', '.join(names)}")
    if options.quick:
        options.repeats, options.rounds, options.memory_rounds = 1, min(options.rounds, 400), 1_000
    if min(options.repeats, options.rounds, options.memory_rounds) < 1:
        parser.error("--repeats, --rounds and --memory-rounds must be at least 1")
    if not options.floor.is_file():
        parser.error(f"there is no yardstick {options.floor}")
    return options


async def _until_told(work: Awaitable[None]) -> None:
    """SIGTERM ends a benchmark as Ctrl-C does: whatever it started is stopped first."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def main() -> int:
    """Measure, show, and say whether everything could be run."""
    options = parse()
    if options.no_event_engine:
        os.environ[EVENT_ENGINE] = "-event_engine_client,-event_engine_listener"
    bench = Bench(options)
    try:
        asyncio.run(_until_told(bench.run()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; what was measured until then:")
        bench.results.failures.append("stopped")
    targets = {case.name: case.target for group in groups(options.rounds) for case in group.cases}
    if set(bench.results.samples) - {"startup"}:
        console.print(rates_table(bench.results, targets))
    for line in others(bench.results):
        console.print(line, highlight=False)
    if options.json is not None:
        options.json.write_text(as_json(options, bench.results) + "\n", encoding="utf-8")
    return 1 if bench.results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
