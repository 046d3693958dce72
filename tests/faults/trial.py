"""One trial: a run of processes, something that is done to it, and what is found afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import grpc

from sottovoce.errors import CaptureError, DataError, SottovoceError
from sottovoce.spec import RunSpec
from sottovoce_client.running.operate import Outcome, run_on
from sottovoce_client.running.summary import Progress
from sottovoce_eavesdropper.reading import find_captures
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_learner.ledger import Ledger
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.server import channel
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc
from tests.examples import made_up, small_spec
from tests.faults.link import Link
from tests.faults.processes import Process, chance, command, free_port
from tests.faults.victim import Point
from tests.services.network import said_rounds

NAMES = ("ann", "ben", "cleo")
COORDINATOR, EAVESDROPPER = "coordinator", "eavesdropper"
PATIENCE_S, ENDING_S = 300.0, 60.0
"""For a run to end; for a service that is told to."""
PERIOD_S, FREE_ROUNDS = 0.02, 150
"""Of a paced clock; rounds a second that a run with a free clock is planned for."""
AGAIN = 1_000
"""From the seed of a try that came too late to that of the next one, of the same clock and noise."""
_SHAPES = {"y": (3,)}
_LOOK_S = 0.02

Said = tuple[int, int, bytes]
"""Sender, round, and the bytes."""


class TooLate(Exception):
    """The run was over before the fault was done: nothing was tried."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        name: of the fault.
        promise: what holds all the same, in a sentence.
        act: does it. What stands before its first `await` happens before any process is started.
        ends: a pattern of reasons with which a run may end that does not finish; empty: it must finish.
        must_end: it may not finish.
        linked: learners are reached, and reach the coordinator, by links.
        blind: rounds may be missing in the capture.
        deadline_s: of the clock.
    """

    name: str
    promise: str
    act: Callable[[Stage], Awaitable[None]]
    ends: str = ""
    must_end: bool = False
    linked: bool = False
    blind: bool = False
    deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What is found after a run.

    Attributes:
        fault: what was done.
        seed: by which it can be done again.
        spec: what was run.
        struck: the fault was done to its end.
        state, reason: how the run ended.
        overheard: what crossed the channels.
        logged: what learners have written down as said.
        spent: epsilon by each learner's ledger.
        repaired: learners whose ledger was damaged, and repaired.
        told: how far the learners are, as the coordinator has it.
        own: how far they are, as they say themselves.
        calm: what is said in an undisturbed run with the same noise; None: the noise is the operating system's.
        crashed: what ended, or spoke, as only a bug does.
        left: processes that did not end when they were told to.
    """

    fault: Fault
    seed: int
    spec: RunSpec
    struck: bool
    state: str
    reason: str
    overheard: tuple[Said, ...]
    logged: tuple[Said, ...]
    spent: Mapping[int, float]
    repaired: frozenset[int]
    told: tuple[int, ...]
    own: tuple[int, ...]
    calm: Mapping[tuple[int, int], bytes] | None
    crashed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def spec_of(clock: str, seconds: float, deadline_s: float) -> RunSpec:
    """A run that lasts about so long where nothing happens to it."""
    paced = clock == "paced"
    chosen = {"mode": clock, "window": 10 if paced else 40, "deadline_s": deadline_s, "patience_s": deadline_s}
    chosen |= {"period_s": PERIOD_S} if paced else {}
    rounds = round(seconds / PERIOD_S if paced else seconds * FREE_ROUNDS)
    return small_spec(rounds, list(NAMES), clock=chosen, capture="relay")


@dataclass
class Stage:
    """The processes of one run, at addresses that they keep.

    Attributes:
        folder: for everything that they write.
        spec: what is run.
        keyed: the noise follows from a seed.
        random: whatever is chosen by chance.
        links: to each learner (its name), and from each to the coordinator (`NAME out`); none: there are no links.
    """

    folder: Path
    spec: RunSpec
    keyed: bool
    random: Random
    linked: bool
    processes: dict[str, Process] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    rounds: int = 0
    over: bool = False
    _points: dict[str, Point] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _started: int = 0
    _begun: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._ports = {name: free_port(self.random) for name in (COORDINATOR, EAVESDROPPER, *NAMES)}
        if self.linked:
            for name in NAMES:
                self.links[name] = Link(free_port(self.random), self._ports[name])
                self.links[f"{name} out"] = Link(free_port(self.random), self._ports[COORDINATOR])

    @property
    def state(self) -> Path:
        """Where learners write."""
        return self.folder / "learners"

    def address(self, name: str) -> str:
        """Where a service listens."""
        return f"127.0.0.1:{self._ports[name]}"

    def arm(self, name: str, point: str, nth: int = 1) -> None:
        """The next process of this name is struck at a point."""
        self._points[name] = Point(point, nth)

    def chosen(self) -> str:
        """A learner, by chance."""
        return self.random.choice(NAMES)

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
        if name == EAVESDROPPER:
            return [name, *here, "--folder", str(self.folder / "captures")]
        if name == COORDINATOR:
            return [name, *here, "--eavesdropper", self.address(EAVESDROPPER), "--state", str(self.folder / name)]
        to = self.links[f"{name} out"].address if self.linked else self.address(COORDINATOR)
        others = ["--advertise", self.links[name].address] if self.linked else []
        noise = ["--noise-seed", "same"] if self.keyed else []
        return ["learner", "--name", name, "--coordinator", to, *here, *others, "--state", str(self.state), *noise]

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
            if (
                '"event": "state"' in process.words or '"directive refused"' in process.words
            ):  # in the run, or out of it
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

    def look(self, progress: Progress, state: str) -> None:
        """Note how far the run is."""
        self._begun.set()
        self.rounds = max(self.rounds, min(progress.rounds))

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


async def tried(fault: Fault, seed: int, folder: Path, seconds: float, calm: Calm) -> Trial:
    """Try a fault once; where the run was over before it was done, which a busy machine may bring, with another seed.

    Args:
        fault: what is done.
        seed: chooses clock (`seed % 2`), noise (`seed // 2 % 2`), moments and victims.
        folder: a new one, for all files.
        seconds: that the run lasts by itself.
        calm: the undisturbed runs.
    """
    spec = spec_of("paced" if seed % 2 else "free", seconds, fault.deadline_s)
    keyed = seed // 2 % 2 == 0
    expected = await calm.of(spec.clock.mode) if keyed else None
    stage = Stage(folder, spec, keyed, chance(f"{fault.name} {seed}"), fault.linked)
    try:
        return await _found(fault, seed, stage, expected)
    except TooLate:
        shutil.rmtree(folder)
        return await tried(fault, seed + AGAIN, folder, seconds, calm)


async def _found(fault: Fault, seed: int, stage: Stage, calm: Mapping[tuple[int, int], bytes] | None) -> Trial:
    state, reason, struck = "hung", "", False
    told = own = tuple[int, ...]()
    acting = asyncio.ensure_future(fault.act(stage))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0)  # what it does before anything is started
            await stage.begin()
            outcome = await _run(stage)
            stage.over = True
            state, reason = outcome.state, outcome.detail
            told = tuple(status.rounds_done for status in outcome.statuses)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(acting), ENDING_S)
            own = await _own(stage) if state == "finished" else ()
    except TimeoutError:
        pass
    except (SottovoceError, grpc.aio.AioRpcError) as error:
        state, reason = "failed", str(error)
    finally:
        struck = acting.done() and not acting.cancelled() and acting.exception() is None
        failed = acting.exception() if acting.done() and not acting.cancelled() else None
        acting.cancel()
        left = await stage.end()
    if failed is not None:
        raise failed
    reason = "; ".join((reason, *stage.refusals)) if stage.refusals else reason
    logged = tuple(_logged(stage.state))
    spent, repaired = await _ledgers(stage)
    return Trial(
        fault,
        seed,
        stage.spec,
        struck,
        state,
        reason,
        tuple(overheard(stage.folder / "captures")),
        logged,
        spent,
        repaired,
        told,
        own,
        calm,
        tuple(stage.crashed),
        tuple(left),
    )


async def _run(stage: Stage) -> Outcome:
    spec = stage.spec
    return await run_on(stage.address(COORDINATOR), spec, made_up(spec), stage.look, stage.stop)


async def _own(stage: Stage) -> tuple[int, ...]:
    """How far the learners are, as they say themselves."""
    found = []
    for name in NAMES:
        async with channel(stage.address(name)) as to:
            answer = await learner_pb2_grpc.LearnerStub(to).Status(learner_pb2.StatusRequest(), timeout=ENDING_S)
        found.append(LearnerStatus.from_wire(answer.status).rounds_done)
    return tuple(found)


def overheard(captures: Path) -> list[Said]:
    """What crossed the channels, once for each time."""
    codec, found = RoundCodec(_SHAPES), list[Said]()
    for capture in find_captures(open_folder(captures)):
        with contextlib.suppress(CaptureError):  # nothing was said
            for payload in capture.messages(("payload",))["payload"].to_pylist():
                t, sender, _ = codec.decode(payload)
                found.append((sender, t, payload))
    return found


def _logged(state: Path) -> list[Said]:
    """What stands in logs; of those that are damaged as much as is right."""
    found = []
    for sender, name in enumerate(NAMES):
        with contextlib.suppress(DataError, AssertionError):
            found += [(sender, t, said.frame) for t, said in said_rounds(state, name) if said.frame]
    return found


async def _ledgers(stage: Stage) -> tuple[dict[int, float], frozenset[int]]:
    """What the learners' ledgers say, after a repair where one is damaged."""
    spent, repaired = {}, set()
    for index, name in enumerate(NAMES):
        try:
            spent[index] = Ledger(stage.state).spent(name)
        except DataError:
            repaired.add(index)
            spent[index] = await _repaired(stage, name)
    return spent, frozenset(repaired)


async def _repaired(stage: Stage, name: str) -> float:
    """By the command. Where it cannot know what was spent, its owner would have to say so: that charges nothing by itself."""
    arguments = ["ledger", "repair", str(stage.state), "--learner", name]
    process = Process(partial(command, arguments), stage.folder / f"repair-{name}")
    await asyncio.wait_for(process.over(), ENDING_S)
    if process.code == 2 and "--charge" in process.words:
        return float("inf")
    return Ledger(stage.state).spent(name)


class Calm:
    """Undisturbed runs, one for each clock, made when the first trial asks.

    Args:
        folder: for their files.
        seconds: that each of them lasts.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._runs: dict[str, asyncio.Task[Mapping[tuple[int, int], bytes]]] = {}

    async def of(self, clock: str) -> Mapping[tuple[int, int], bytes]:
        """What is said under a clock, by sender and round."""
        if clock not in self._runs:
            self._runs[clock] = asyncio.ensure_future(self._made(clock))
        return await asyncio.shield(self._runs[clock])

    async def _made(self, clock: str) -> Mapping[tuple[int, int], bytes]:
        spec = spec_of(clock, self._seconds, PATIENCE_S)
        folder = self._folder / f"calm-{clock}"
        trial = await _found(UNDISTURBED, 0, Stage(folder, spec, True, chance(clock), False), None)
        said = {(sender, t): payload for sender, t, payload in trial.overheard}
        if trial.state != "finished" or len(said) != len(NAMES) * spec.rounds or trial.crashed:
            raise RuntimeError(f"an undisturbed run must finish, got {trial.state} {trial.reason!r} {trial.crashed}")
        shutil.rmtree(folder)
        return said


async def _nothing(stage: Stage) -> None:
    """Do nothing."""


UNDISTURBED = Fault("nothing", "the run finishes", _nothing)
