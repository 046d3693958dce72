"""The stage of a trial: the processes of one run, at addresses that they keep, and what can be done to them."""

from __future__ import annotations

import asyncio
import re
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from sottovoce_client.runs.summary import RunProgress
from sottovoce_core.spec import RunSpec
from sottovoce_rpc.certificates import AUTHORITIES_FILE
from sottovoce_rpc.credentials import Credentials
from tests.examples import ALLOWING_FILE, small_spec
from tests.faults.link import Link
from tests.faults.processes import Process, command, free_port
from tests.faults.victim import Point
from tests.services.identities import Identities
from tests.services.network import OPERATOR

NAMES = ("ann", "ben", "cleo")
COORDINATOR, EAVESDROPPER = "coordinator", "eavesdropper"
NOISE_SEED = "same"
"""That noise follows from, where it follows from anything."""
ENDING_S = 60.0
"""For a service that is told to end."""
PERIOD_S, FREE_ROUNDS = 0.02, 150
"""Of a paced clock; rounds a second that a run with a free clock is planned for."""
LATE_S = 0.05
"""Until a round goes on without who is late, where it does."""
_LOOK_S = 0.02


class TooLate(Exception):
    """The run was over before the fault was done: nothing was tried."""


def spec_of(clock: str, seconds: float, deadline_s: float, late: str = "wait", *, place: bool = False) -> RunSpec:
    """A run that lasts about so long where nothing happens to it.

    Args:
        clock: `free` or `paced`.
        seconds: that it lasts.
        deadline_s: of the clock.
        late: what becomes of who is late; `async`: by the clock that waits for nobody.
        place: the last learner is away until it joins.
    """
    paced = clock == "paced" and late != "async"
    chosen: dict[str, Any] = {
        "mode": late if late == "async" else clock,
        "window": 10 if paced else 40,
        "deadline_s": deadline_s,
        "outage_timeout_s": deadline_s,
    }
    chosen |= {"period_s": PERIOD_S} if paced else {}
    if late != "async":  # a clock of its own: nobody is waited for at all
        chosen |= {"staleness": late, "stale_after_s": LATE_S} if late == "reuse" else {"staleness": late}
    rounds = round(seconds / PERIOD_S if paced else seconds * FREE_ROUNDS)
    offline_intervals = [{"learner": NAMES[-1]}] if place else []
    return small_spec(rounds, list(NAMES), clock=chosen, capture="relay", offline_intervals=offline_intervals)


@dataclass
class Stage:
    """The processes of one run, at addresses that they keep.

    Attributes:
        folder: for everything that they write.
        spec: what is run.
        keyed: the noise follows from a seed.
        encrypted: all have identities, and learners sign what they say.
        random: whatever is chosen by chance.
        links: to each learner (its name), and from each to the coordinator (`NAME out`); none: there are no links.
        away: who must be away in the end.
        silent: how many rounds had been said, by its log, by who must say no more.
    """

    folder: Path
    spec: RunSpec
    keyed: bool
    encrypted: bool
    random: Random
    linked: bool
    processes: dict[str, Process] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    silent: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    over: bool = False
    _points: dict[str, Point] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _started: int = 0
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _identities: Identities | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        if self.encrypted:
            self._identities = Identities(self.folder / "identities")
        self._ports = {name: free_port(self.random) for name in (COORDINATOR, EAVESDROPPER, *NAMES)}
        if self.linked:
            for name in NAMES:
                self.links[name] = Link(free_port(self.random), self._ports[name])
                self.links[f"{name} out"] = Link(free_port(self.random), self._ports[COORDINATOR])

    @property
    def state(self) -> Path:
        """Where learners write."""
        return self.folder / "learners"

    @property
    def credentials(self) -> Credentials:
        """Of who starts the run, and owns the learners."""
        return Credentials() if self._identities is None else self._identities.of(OPERATOR)

    @property
    def authorities(self) -> bytes:
        """That are believed; empty: nobody shows who it is."""
        return b"" if self._identities is None else (self._identities.authority.folder / AUTHORITIES_FILE).read_bytes()

    def address(self, name: str) -> str:
        """Where a service listens."""
        return f"127.0.0.1:{self._ports[name]}"

    def arm(self, name: str, point: str, nth: int = 1) -> None:
        """The next process of this name is struck at a point."""
        self._points[name] = Point(point, nth)

    def chosen(self, *but: str) -> str:
        """A learner, by chance, and none of these."""
        return self.random.choice([name for name in NAMES if name not in but])

    # ---- processes ----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start all of them."""
        for link in self.links.values():
            await link.start()
        await self.start(EAVESDROPPER)
        await self.start(COORDINATOR)
        await asyncio.gather(*map(self.start, NAMES))

    async def start(self, name: str) -> None:
        """Start a process, and wait until it listens or has ended."""
        if name in self.processes:
            self._look_at(name)
        self._started += 1
        log = self.folder / f"{self._started:02d}-{name}"
        process = self.processes[name] = Process(
            partial(command, self._command(name)), log, self._points.pop(name, None)
        )
        await process.up()

    def _command(self, name: str) -> list[str]:
        here = ["--listen", self.address(name)]
        if self._identities is not None:
            role = name if name in (COORDINATOR, EAVESDROPPER) else "learner"
            here += ["--identity", str(self._identities.at(f"{role}/{name}"))]
        if name == EAVESDROPPER:
            return [name, *here, "--folder", str(self.folder / "captures")]
        if name == COORDINATOR:
            return [name, *here, "--eavesdropper", self.address(EAVESDROPPER), "--state", str(self.folder / name)]
        to = self.links[f"{name} out"].address if self.linked else self.address(COORDINATOR)
        others = ["--advertise", self.links[name].address] if self.linked else []
        noise = ["--noise-seed", NOISE_SEED] if self.keyed else []
        others += ["--owner", OPERATOR] if self.encrypted else []
        where = [*here, *others, "--state", str(self.state), "--policy", str(ALLOWING_FILE)]
        return ["learner", "--name", name, "--coordinator", to, *where, *noise]

    async def kill(self, name: str) -> None:
        """As `kill -9` does."""
        self.processes[name].signal(signal.SIGKILL)
        await self.processes[name].over()

    async def tell_to_end(self, name: str) -> None:
        """As SIGTERM does."""
        self.processes[name].signal(signal.SIGTERM)
        await asyncio.wait_for(self.processes[name].over(), ENDING_S)

    async def freeze(self, name: str, seconds: float) -> None:
        """Stop it for a while, as SIGSTOP and SIGCONT do."""
        self.processes[name].signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.processes[name].signal(signal.SIGCONT)

    async def death(self, name: str) -> None:
        """Wait until a process has died at the point that it was armed with."""
        process = self.processes[name]
        process.killed = await process.over() == -signal.SIGKILL

    async def says(self, name: str, words: str) -> None:
        """Wait until a process has written these words to its log."""
        while True:
            if words in self.processes[name].words:
                return
            await asyncio.sleep(_LOOK_S)

    async def comes_back(self, name: str) -> None:
        """Start a process that may be refused: if it ends by itself, its last words are the reason, and the run is stopped."""
        await self.start(name)
        process = self.processes[name]
        while True:
            if process.code is not None:
                self.refusals.append(f"exit {process.code}: {process.words.strip().splitlines()[-1]}")
                self.stop.set()
                return
            if '"event": "state"' in process.words or '"command refused"' in process.words:  # in the run, or out of it
                return
            await asyncio.sleep(_LOOK_S)

    async def end(self) -> list[str]:
        """Tell all to end, learners first; returns those that do not."""
        left = []
        for names in (NAMES, (COORDINATOR,), (EAVESDROPPER,)):
            here = [name for name in names if name in self.processes]
            for name in here:
                self.processes[name].signal(signal.SIGTERM)
            for name in here:
                try:
                    await asyncio.wait_for(self.processes[name].over(), ENDING_S)
                except TimeoutError:
                    left.append(name)
                    self.processes[name].signal(signal.SIGKILL)
                self._look_at(name)
        for link in self.links.values():
            await link.stop()
        return left

    def _look_at(self, name: str) -> None:
        process = self.processes[name]
        found = [*re.findall(r".*\bbug\b.*|.*internal error.*", process.words), *tracebacks(process.words)]
        if process.code not in (0, 2) and not process.killed:
            found.append(f"exit {process.code}")
        self.crashed += [f"{name}: {line.strip()}" for line in found]

    # ---- the run ------------------------------------------------------------------------------------------

    def look(self, progress: RunProgress, state: str) -> None:
        """Note how far the run is."""
        self._begun.set()
        there = [rounds for i, rounds in enumerate(progress.rounds) if i not in progress.departed_learners]
        self.rounds = max(self.rounds, min(there))

    async def until(self, share: float) -> None:
        """Wait until the slowest learner has done so much of the rounds, and then for a moment."""
        await self._begun.wait()
        while True:
            if self.rounds >= share * self.spec.rounds:
                break
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(self.random.uniform(0.0, 0.1))
        if self.over:
            raise TooLate

    async def sometime(self) -> None:
        """Wait until a moment in the run, by chance."""
        await self.until(self.random.uniform(0.02, 0.4))


def tracebacks(words: str) -> list[str]:
    """Last lines of tracebacks; gRPC prints those of its own coroutines when it ends, which are no fault of ours."""
    found = re.findall(r"Traceback \(most recent call last\):\n((?:  .*\n)*)(.*)", words)
    return [error for frames, error in found if re.search(r'File "(?!src/python/grpcio/)', frames)]
