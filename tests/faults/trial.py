"""One trial: a run of processes, something that is done to it, and what is found afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from sottovoce_client.runs.run_client import run_on_services
from sottovoce_client.transcripts.verify import LearnerSignatures, read_signatures
from sottovoce_core.errors import CaptureError, CorruptStateError, EquivocationError, SottovoceError
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import find_captures
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_learner.storage.store import Ledger
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc
from tests.examples import made_up
from tests.faults.processes import Process, chance, command
from tests.faults.stage import COORDINATOR, ENDING_S, NAMES, Stage, TooLate, spec_of
from tests.services.network import said_rounds

PATIENCE_S = 300.0
"""For a run to end."""
FEATURES = 3
AGAIN = 1_000
"""From the seed of a try that came too late to that of the next one, of the same clock and noise."""

Said = tuple[int, int, bytes]
"""Sender, round, and the bytes."""


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
        late: what becomes of who is late, by the clock; `async`: the clock that waits for nobody.
        place: one learner is away until it joins.
        changing: who takes part, or who is waited for, changes: what is said is what the simulator says by the spec as it is in
            the end.
    """

    name: str
    promise: str
    act: Callable[[Stage], Awaitable[None]]
    ends: str = ""
    must_end: bool = False
    linked: bool = False
    blind: bool = False
    deadline_s: float = 60.0
    late: str = "wait"
    place: bool = False
    changing: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What is found after a run.

    Attributes:
        fault: what was done.
        seed: by which it can be done again.
        spec: what was run, as it was in the end.
        keyed: the noise follows from a seed.
        struck: the fault was done to its end.
        state, reason: how the run ended.
        overheard: what crossed the channels.
        logged: what learners have written down as said.
        spent: epsilon by each learner's ledger.
        repaired: learners whose ledger was damaged, and repaired.
        told: how far the learners are, as the coordinator has it.
        own: how far they are, as they say themselves.
        calm: what is said in an undisturbed run with the same noise; None: this one is not to be compared with any.
        unread: why the capture is no transcript of the whole run; empty: it is.
        away: who must be away in the end.
        silent: how many rounds had been said by who must say no more.
        crashed: what ended, or spoke, as only a bug does.
        left: processes that did not end when they were told to.
        signed: where channels are encrypted, what learners have said and signed, by name.
    """

    fault: Fault
    seed: int
    spec: RunSpec
    keyed: bool
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
    unread: str = ""
    away: frozenset[str] = frozenset()
    silent: Mapping[str, int] = field(default_factory=dict)
    crashed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    signed: Mapping[str, LearnerSignatures] = field(default_factory=dict)


async def tried(fault: Fault, seed: int, folder: Path, seconds: float, calm: Calm) -> Trial:
    """Try a fault once; where the run was over before it was done, which a busy machine may bring, with another seed.

    Args:
        fault: what is done.
        seed: chooses clock (`seed % 2`), noise (`seed // 2 % 2`), whether channels are encrypted (one of the two), moments and
            victims.
        folder: a new one, for all files.
        seconds: that the run lasts by itself.
        calm: the undisturbed runs.
    """
    spec = spec_of("paced" if seed % 2 else "free", seconds, fault.deadline_s, fault.late, place=fault.place)
    keyed = seed // 2 % 2 == 0
    expected = await calm.of(spec.clock.mode) if keyed and not fault.changing else None
    encrypted = (seed % 2 == 0) != keyed
    stage = Stage(folder, spec, keyed, encrypted, chance(f"{fault.name} {seed}"), fault.linked)
    try:
        return await _found(fault, seed, stage, expected)
    except TooLate:
        shutil.rmtree(folder)
        return await tried(fault, seed + AGAIN, folder, seconds, calm)


async def _found(fault: Fault, seed: int, stage: Stage, calm: Mapping[tuple[int, int], bytes] | None) -> Trial:
    spec, state, reason, struck = stage.spec, "hung", "", False
    told = own = tuple[int, ...]()
    acting = asyncio.ensure_future(fault.act(stage))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0)  # what it does before anything is started
            await stage.begin()
            outcome = await run_on_services(
                stage.address(COORDINATOR),
                spec,
                made_up(spec),
                stage.look,
                stage.stop,
                place_data=made_up,
                credentials=stage.credentials,
            )
            stage.over = True
            spec = spec.model_copy(update={"offline_intervals": outcome.offline_intervals})
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
    spent, repaired = await _ledgers(stage)
    return Trial(
        fault,
        seed,
        spec,
        stage.keyed,
        struck,
        state,
        reason,
        tuple(overheard(stage.folder / "captures")),
        tuple(_logged(stage.state)),
        spent,
        repaired,
        told,
        own,
        calm,
        _unread(stage.folder / "captures", spec, blind=fault.blind),
        frozenset(stage.away),
        stage.silent,
        tuple(stage.crashed),
        tuple(left),
        _signed(stage.folder / "captures", stage.authorities),
    )


async def _own(stage: Stage) -> tuple[int, ...]:
    """How far the learners are, as they say themselves; -1 where one is not there any more."""
    found = []
    for name in NAMES:
        if stage.processes[name].code is not None:
            found.append(-1)
            continue
        async with open_channel(stage.address(name), Role.LEARNER, name, credentials=stage.credentials) as to:
            answer = await learner_pb2_grpc.LearnerStub(to).GetStatus(learner_pb2.GetStatusRequest(), timeout=ENDING_S)
        found.append(LearnerStatus.from_wire(answer.status).rounds_done)
    return tuple(found)


def overheard(captures: Path) -> list[Said]:
    """What crossed the channels, once for each time."""
    found = list[Said]()
    for capture in find_captures(open_folder(captures)):
        codec = RoundCodec(capture.shapes)
        with contextlib.suppress(CaptureError):  # nothing was said
            for payload in capture.read_messages(("payload",))["payload"].to_pylist():
                t, sender, _ = codec.decode(payload)
                found.append((sender, t, payload))
    return found


def _signed(captures: Path, authorities: bytes) -> dict[str, LearnerSignatures]:
    """What a capture proves."""
    found = list(find_captures(open_folder(captures))) if authorities else []
    return read_signatures(found[0], authorities) if found else {}


def _unread(captures: Path, spec: RunSpec, *, blind: bool) -> str:
    """Why a capture is no transcript of the run: of all its rounds, unless it may lack some."""
    run = build_run(spec, FEATURES)
    try:
        (capture,) = find_captures(open_folder(captures))
        if capture.metadata["spec"]["offline_intervals"] != spec.model_dump(mode="json")["offline_intervals"]:
            return f"it says of who is away {capture.metadata['spec']['offline_intervals']}"
        if blind:
            return ""
        said = capture.read_transcript(run.field_shapes, run.spec.n_learners, run.network)
    except (CaptureError, EquivocationError) as error:
        return str(error)
    # Who is left alone is not overheard, and what was lost with two learners may be.
    rounds = 1 + max(t for t in range(spec.rounds) if run.network.sender_mask(t).any())
    return "" if said.rounds >= rounds else f"it has {said.rounds} of {rounds} rounds"


def _logged(state: Path) -> list[Said]:
    """What stands in logs; of those that are damaged as much as is right."""
    found = []
    for sender, name in enumerate(NAMES):
        with contextlib.suppress(CorruptStateError, AssertionError):
            found += [(sender, t, said.frame) for t, said in said_rounds(state, name) if said.frame]
    return found


async def _ledgers(stage: Stage) -> tuple[dict[int, float], frozenset[int]]:
    """What the learners' ledgers say, after a repair where one is damaged."""
    spent, repaired = {}, set()
    for index, name in enumerate(NAMES):
        try:
            spent[index] = Ledger(stage.state).sum_epsilon(name)
        except CorruptStateError:
            repaired.add(index)
            spent[index] = await _repaired(stage, name)
    return spent, frozenset(repaired)


async def _repaired(stage: Stage, name: str) -> float:
    """By the command. Where it cannot know what was spent, its owner would have to say so: that charges nothing by itself."""
    arguments = ["ledger", "--repair", "--state", str(stage.state), "--learner", name]
    process = Process(partial(command, arguments), stage.folder / f"repair-{name}")
    await asyncio.wait_for(process.over(), ENDING_S)
    if process.code == 2 and "--charge" in process.words:
        return float("inf")
    return Ledger(stage.state).sum_epsilon(name)


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
        trial = await _found(UNDISTURBED, 0, Stage(folder, spec, True, False, chance(clock), False), None)
        said = {(sender, t): payload for sender, t, payload in trial.overheard}
        if trial.state != "finished" or len(said) != len(NAMES) * spec.rounds or trial.crashed:
            raise RuntimeError(f"an undisturbed run must finish, got {trial.state} {trial.reason!r} {trial.crashed}")
        shutil.rmtree(folder)
        return said


async def _nothing(stage: Stage) -> None:
    """Do nothing."""


UNDISTURBED = Fault("nothing", "the run finishes", _nothing)
