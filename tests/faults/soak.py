"""One long run of many learners, a fault every few seconds, and what it uses at its start, in its middle and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from sottovoce_client.runs.run_client import Outcome, run_on_services
from sottovoce_client.runs.summary import RunProgress
from sottovoce_core.spec import RunSpec
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.storage.store import Ledger
from tests.examples import ALLOWING, made_up, small_spec
from tests.faults.processes import Process, chance, command, free_port, learners
from tests.faults.promises import price
from tests.faults.stage import COORDINATOR, EAVESDROPPER, ENDING_S
from tests.faults.trial import overheard

NAMES = tuple(f"l{k:02d}" for k in range(20))
TOGETHER = 5
"""Learners in a process."""
SPARED = "learners 0"
"""Nothing is done to these: what they use grows, if anything does."""
BETWEEN_S = (2.0, 6.0)
"""From fault to fault."""
MOST_ROUNDS_S = 200
"""More a second than any machine makes."""
RECORDS = 1_000
LOSS = {"kind": "least_squares"}
"""What was learned is kept as sums: with a loss that keeps all records a learner grows with them."""
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What is used at a moment.

    Attributes:
        when: in words.
        rounds_s: rounds a second, since the moment before.
        disk: bytes of all files.
        memory: resident, bytes by process.
        descriptors: open, by process.
    """

    when: str
    rounds_s: float
    disk: int
    memory: dict[str, int]
    descriptors: dict[str, int]


@dataclass
class _Soak:
    """The processes."""

    folder: Path
    random: Random
    spec: RunSpec
    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    faults: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _started: int = 0

    def __post_init__(self) -> None:
        self.ports = {name: free_port(self.random) for name in (COORDINATOR, EAVESDROPPER, *NAMES)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Learners by process."""
        return {f"learners {k // TOGETHER}": NAMES[k : k + TOGETHER] for k in range(0, len(NAMES), TOGETHER)}

    def address(self, name: str) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.ports[name]}"

    async def start(self, name: str) -> None:
        """Start a process, and wait until it listens."""
        self._started += 1
        if name in self.groups:
            work = partial(learners, [self._config(each) for each in self.groups[name]])
        else:
            work = partial(command, self._command(name))
        self.processes[name] = Process(work, self.folder / f"{self._started:04d}-{name.replace(' ', '-')}")
        if not await self.processes[name].up():
            raise RuntimeError(f"{name} must start again, and ends: {self.processes[name].words[-500:]}")

    def _config(self, name: str) -> LearnerConfig:
        to, state = self.address(COORDINATOR), self.folder / "learners"
        return LearnerConfig(name, to, self.address(name), state_folder=state, policy=ALLOWING)

    def _command(self, name: str) -> list[str]:
        here = ["--listen", self.address(name)]
        if name == EAVESDROPPER:
            return [name, *here, "--folder", str(self.folder / "captures")]
        return [name, *here, "--eavesdropper", self.address(EAVESDROPPER), "--state", str(self.folder / name)]

    async def trouble(self) -> None:
        """Now and then kill a process, tell it to end, or freeze it."""
        while True:
            await asyncio.sleep(self.random.uniform(*BETWEEN_S))
            name = self.random.choice([each for each in self.processes if each != SPARED])
            process, kind = self.processes[name], self.random.choice(("killed", "frozen", "told to end"))
            self.faults += 1
            if kind == "frozen":
                process.signal(signal.SIGSTOP)
                await asyncio.sleep(self.random.uniform(0.5, 2.0))
                process.signal(signal.SIGCONT)
            elif not (kind == "told to end" and name == EAVESDROPPER):  # which closes the capture
                process.signal(signal.SIGKILL if kind == "killed" else signal.SIGTERM)
                await process.over()
                await self.start(name)

    async def usage(self, when: str, rounds: int, seconds: float) -> Usage:
        """What is used now."""
        found = {name: psutil.Process(process.pid) for name, process in self.processes.items()}
        disk = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        memory = {name: each.memory_info().rss for name, each in found.items()}
        return Usage(when, rounds / seconds, disk, memory, {name: each.num_fds() for name, each in found.items()})

    def look(self, progress: RunProgress, state: str) -> None:
        """Note how far the run is."""
        self.rounds = max(self.rounds, min(progress.rounds))
        if self.rounds:
            self.begun.set()

    async def end(self) -> list[str]:
        """Tell all to end; returns those that do not."""
        left = []
        for name, process in sorted(self.processes.items(), reverse=True):  # learners first
            process.signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.over(), ENDING_S)
            except TimeoutError:
                left.append(f"{name} did not end when it was told to")
                process.signal(signal.SIGKILL)
        return left


async def soak(folder: Path, minutes: float, seed: int) -> bool:
    """Run for so many minutes, print what was used, and say whether all held.

    Args:
        folder: for all files.
        minutes: that it takes.
        seed: of the faults.
    """
    rounds = max(100, round(minutes * 60 * MOST_ROUNDS_S))
    clock = {"window": 100, "deadline_s": PATIENCE_S, "outage_timeout_s": PATIENCE_S}
    topology = {"graph": {"kind": "ring"}}
    spec = small_spec(rounds, list(NAMES), clock=clock, capture="relay", topology=topology, loss=LOSS)
    run = _Soak(folder, chance(seed), spec)
    used, broken = list[Usage](), list[str]()
    try:
        for name in (EAVESDROPPER, COORDINATOR, *run.groups):
            await run.start(name)
        data = made_up(spec, records=RECORDS)
        running = asyncio.ensure_future(run_on_services(run.address(COORDINATOR), spec, data, run.look, run.stop))
        used = await _watched(run, running, minutes * 60)
        run.stop.set()
        outcome = await asyncio.wait_for(running, PATIENCE_S)
        if outcome.state not in ("finished", "stopped"):
            broken.append(f"the run {outcome.state}: {outcome.detail}")
    finally:
        broken += await run.end()
    broken += await asyncio.to_thread(_wrong, run)
    _show(used, run.faults)
    for each in broken[:10]:
        print(f"BROKEN: {each}")
    return not broken


async def _watched(run: _Soak, running: asyncio.Future[Outcome], seconds: float) -> list[Usage]:
    """Trouble all the time; a look after a tenth of it, at its half and at its end."""
    first: list[asyncio.Future[Any]] = [running, asyncio.ensure_future(run.begun.wait())]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    used, began = list[Usage](), time.monotonic()
    troubling = asyncio.ensure_future(run.trouble())
    try:
        for when, share in (("start", 0.1), ("middle", 0.5), ("end", 1.0)):
            rounds, since = run.rounds, time.monotonic()
            ends: list[asyncio.Future[Any]] = [troubling, running]
            await asyncio.wait(ends, timeout=began + share * seconds - since, return_when=asyncio.FIRST_COMPLETED)
            if troubling.done():
                troubling.result()
            with contextlib.suppress(psutil.Error):
                used.append(await run.usage(when, run.rounds - rounds, time.monotonic() - since))
            if running.done():
                break
    finally:
        troubling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await troubling
    for name, process in run.processes.items():  # frozen or dead, where trouble was cut short
        process.signal(signal.SIGCONT)
        if process.code is not None:
            await run.start(name)
    return used


def _wrong(run: _Soak) -> list[str]:
    """What no fault excuses."""
    broken, known, said = list[str](), dict[tuple[int, int], bytes](), [0] * len(NAMES)
    for sender, t, payload in overheard(run.folder / "captures"):
        said[sender] = max(said[sender], t + 1)
        if known.setdefault((sender, t), payload) != payload:
            broken.append(f"{NAMES[sender]} has two contents of round {t}")
    for index, name in enumerate(NAMES):
        spent, due = Ledger(run.folder / "learners").sum_epsilon(name), price(run.spec, index, said[index])
        if spent < due * (1 - 1e-9):
            broken.append(
                f"the ledger of {name} says {spent:.6g}, and {said[index]} rounds that it said cost {due:.6g}"
            )
    return broken


def _show(used: list[Usage], faults: int) -> None:
    table = Table(title=f"{len(NAMES)} learners, {faults} faults")
    table.add_column("")
    for each in used:
        table.add_column(each.when, justify="right")
    table.add_row("rounds a second", *(f"{each.rounds_s:.1f}" for each in used))
    table.add_row("disk, MB", *(f"{each.disk / 1e6:.1f}" for each in used))
    for name in used[-1].memory if used else ():
        table.add_row(f"{name}: memory, MB", *(f"{each.memory.get(name, 0) / 1e6:.0f}" for each in used))
        table.add_row(f"{name}: descriptors", *(str(each.descriptors.get(name, 0)) for each in used))
    Console(width=100).print(table)
