"""Faults while learners leave, join and are lost, and where rounds go on without who is late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from rich.console import Console

from sottovoce_client.runs import coordinator_commands
from sottovoce_core.errors import FailedPrecondition, SpecError, Unavailable
from sottovoce_core.network.participation_schedule import OfflineInterval
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, learner_pb2, learner_pb2_grpc
from tests.faults.stage import COORDINATOR, EAVESDROPPER, ENDING_S, NAMES, Stage, TooLate
from tests.faults.trial import Fault
from tests.services.network import said_rounds

Act = Callable[[Stage], Awaitable[None]]

LEAVES = "its messages are used to its last round, and the run finishes without it"
JOINS = "it participates from a round that no learner has sent, and the run finishes"
LOST = "the run finishes without it; it sends nothing more in that run"
WAITED_FOR = "others continue with its last message; it continues from its log, and the run finishes"
_LOST_S = 6.0
"""The deadline of runs that go on without who is gone."""
_LOOK_S = 0.05
_PLACE = NAMES[-1]

_COORDINATORS = ("before all rest", "one was told to rest", "all rest", "a change is written", "one was told a change")
_LEARNERS = ("told to rest", "rests", "before a ledger's line", "after a ledger's line", "prepared")
_FULL = ("full in a change", "full when all rest")
_SECOND = 2
"""They come by once when the run begins, and again when it changes."""


# ---- an operator -----------------------------------------------------------------------------------------------------


async def _run(stage: Stage) -> coordinator_pb2.Run:
    """The run as its coordinator has it, once that is there."""
    while True:
        async with open_channel(stage.address(COORDINATOR), Role.COORDINATOR, credentials=stage.credentials) as to:
            stub = coordinator_pb2_grpc.CoordinatorStub(to)
            with contextlib.suppress(grpc.aio.AioRpcError):
                (run,) = (await stub.ListRuns(coordinator_pb2.ListRunsRequest(), timeout=ENDING_S)).runs
                request = coordinator_pb2.GetRunRequest(run_id=run.run_id)
                whole: coordinator_pb2.Run = await stub.GetRun(request, timeout=ENDING_S)
                return whole
        await asyncio.sleep(_LOOK_S)


async def _leave(stage: Stage, name: str) -> None:
    """A learner leaves the run, whoever is away meanwhile."""
    stage.away.add(name)
    await _until_so(stage, partial(coordinator_commands.reconfigure_run, joins=False), name)


async def _join(stage: Stage, name: str) -> None:
    """A learner with a place joins the run, whoever is away meanwhile."""
    stage.away.discard(name)
    await _until_so(stage, partial(coordinator_commands.reconfigure_run, joins=True), name)


async def _until_so(stage: Stage, ask: Callable[..., Awaitable[None]], name: str) -> None:
    """Ask again where nobody has answered, or it could not be now."""
    run_id = (await _run(stage)).run_id
    while not stage.over:
        try:
            return await ask(stage.address(COORDINATOR), run_id, name, Console(quiet=True), stage.credentials)
        except SpecError:  # it is so: it was asked before
            return
        except (FailedPrecondition, Unavailable):
            await asyncio.sleep(_LOOK_S)
    raise TooLate


async def _until_lost(stage: Stage, name: str) -> None:
    """Until the run goes on without a learner that is gone."""
    stage.away.add(name)
    while not stage.over:
        told = [OfflineInterval(**each) for each in json.loads((await _run(stage)).spec).get("offline_intervals") or ()]
        if any(each.learner == name and each.missed_from_rounds for each in told):
            return
        await asyncio.sleep(_LOOK_S)


async def _until(stage: Stage, name: str, *states: LearnerState) -> None:
    """Until a learner is in one of these states, as it says itself."""
    while True:
        async with open_channel(stage.address(name), Role.LEARNER, name, credentials=stage.credentials) as to:
            answer = await learner_pb2_grpc.LearnerStub(to).GetStatus(learner_pb2.GetStatusRequest(), timeout=ENDING_S)
        if LearnerStatus.from_wire(answer.status).state in states:
            return
        await asyncio.sleep(_LOOK_S)


async def _until_silent(stage: Stage, name: str) -> None:
    """Until a learner that was lost knows it: its session is over."""
    await _until(stage, name, *(set(LearnerState) - {LearnerState.CONNECTING, LearnerState.RUNNING}))
    _hush(stage, name)


def _hush(stage: Stage, name: str) -> None:
    """From now on a learner must say no more."""
    stage.silent[name] = sum(bool(said.frame) for _, said in said_rounds(stage.state, name))


# ---- leaving and joining ---------------------------------------------------------------------------------------------


async def _leaves(stage: Stage) -> None:
    await stage.sometime()
    await _leave(stage, stage.chosen())


def _leaves_for_good(end: Callable[[Stage, str], Awaitable[None]]) -> Act:
    """Nobody needs its process any more, as soon as it has finished."""

    async def act(stage: Stage) -> None:
        await stage.sometime()
        await _leave(stage, name := stage.chosen())
        await _until(stage, name, LearnerState.FINISHED)
        await end(stage, name)

    return act


async def _joins(stage: Stage) -> None:
    stage.away.add(_PLACE)
    await stage.sometime()
    await _join(stage, _PLACE)


async def _joins_from_nowhere(stage: Stage) -> None:
    """It was not there before, nor when it was asked for."""
    stage.away.add(_PLACE)
    await stage.sometime()
    await stage.kill(_PLACE)
    joining = asyncio.ensure_future(_join(stage, _PLACE))
    await asyncio.sleep(stage.random.uniform(0.0, 1.0))
    await stage.start(_PLACE)
    await joining


async def _leaves_twice(stage: Stage) -> None:
    """Two operators ask at once, and one of them again."""
    await stage.sometime()
    name = stage.chosen()
    await asyncio.gather(_leave(stage, name), _leave(stage, name))
    await _leave(stage, name)


async def _leaves_and_joins(stage: Stage) -> None:
    """Two operators ask at once: one for the one, one for the other."""
    stage.away.add(_PLACE)
    await stage.sometime()
    await asyncio.gather(_leave(stage, stage.chosen(_PLACE)), _join(stage, _PLACE))


def _dies(who: str) -> Act:
    """Who leaves or joins, or another learner, dies at some point of it, and is started again."""

    async def act(stage: Stage) -> None:
        change, name = (_join, _PLACE) if who == "joins" else (_leave, stage.chosen())
        victim = stage.chosen(name) if who == "another" else name
        stage.away |= {_PLACE} if who == "joins" else set()
        stage.arm(victim, stage.random.choice(_LEARNERS), _SECOND)
        await stage.sometime()
        changing, dying = asyncio.ensure_future(change(stage, name)), asyncio.ensure_future(stage.death(victim))
        await asyncio.wait({changing, dying}, return_when=asyncio.FIRST_COMPLETED)
        if changing.done() and changing.exception() is not None:  # the run was over before
            dying.cancel()
        else:
            await dying
            await stage.start(victim)
        await changing

    return act


def _coordinator_dies(point: str) -> Act:
    async def act(stage: Stage) -> None:
        stage.arm(COORDINATOR, point)
        await stage.sometime()
        leaving = asyncio.ensure_future(_leave(stage, stage.chosen()))
        await stage.death(COORDINATOR)
        await stage.start(COORDINATOR)
        await leaving

    return act


async def _all_killed(stage: Stage) -> None:
    """Learners and coordinator, at some moment of a change."""
    await stage.sometime()
    leaving = asyncio.ensure_future(_leave(stage, stage.chosen()))
    await asyncio.sleep(stage.random.uniform(0.0, 0.3))
    await asyncio.gather(*map(stage.kill, stage.random.sample((*NAMES, COORDINATOR), len(NAMES) + 1)))
    await stage.start(COORDINATOR)
    await asyncio.gather(*map(stage.start, NAMES))
    await leaving


async def _frozen(stage: Stage) -> None:
    """Another learner than the one that leaves does not rest, nor does it say anything, for a while."""
    await stage.sometime()
    name = stage.chosen()
    leaving = asyncio.ensure_future(_leave(stage, name))
    await stage.freeze(stage.chosen(name), stage.random.uniform(1.0, 3.0))
    await leaving


async def _eavesdropper_killed(stage: Stage) -> None:
    await stage.sometime()
    leaving = asyncio.ensure_future(_leave(stage, stage.chosen()))
    await asyncio.sleep(stage.random.uniform(0.0, 0.2))
    await stage.kill(EAVESDROPPER)
    await stage.start(EAVESDROPPER)
    await leaving


async def _disk_full(stage: Stage) -> None:
    """The coordinator's, and for a while; the operator is told, and asks again."""
    stage.arm(COORDINATOR, stage.random.choice(_FULL))
    await stage.sometime()
    await _leave(stage, stage.chosen())


async def _gone_or_back(stage: Stage) -> None:
    """An operator sees a learner gone, and it may be back by then."""
    await stage.sometime()
    name = stage.chosen()
    await stage.kill(name)
    await asyncio.sleep(stage.random.uniform(0.0, 0.5))
    leaving = asyncio.ensure_future(_leave(stage, name))
    await asyncio.sleep(stage.random.uniform(0.0, 0.5))
    await stage.start(name)
    await leaving


async def _cut(stage: Stage) -> None:
    await stage.sometime()
    link = stage.links[stage.random.choice(sorted(stage.links))]
    leaving = asyncio.ensure_future(_leave(stage, stage.chosen()))
    await asyncio.sleep(stage.random.uniform(0.0, 0.2))
    link.forth.clear()
    link.back.clear()
    await asyncio.sleep(stage.random.uniform(1.0, 5.0))
    link.heal()
    await leaving


# ---- lost ------------------------------------------------------------------------------------------------------------


async def _killed_for_good(stage: Stage) -> None:
    await stage.sometime()
    name = stage.chosen()
    await stage.kill(name)
    _hush(stage, name)
    await _until_lost(stage, name)


async def _two_killed(stage: Stage) -> None:
    """One of them after the other; who is left goes on alone."""
    await stage.sometime()
    names = stage.random.sample(NAMES, 2)
    for name in names:
        await stage.kill(name)
        _hush(stage, name)
        await asyncio.sleep(stage.random.uniform(0.0, 2.0))
    for name in names:
        await _until_lost(stage, name)


async def _killed_and_back(stage: Stage) -> None:
    """Too late, with its log."""
    await _killed_for_good(stage)
    (name,) = stage.silent
    await stage.start(name)
    await _until_silent(stage, name)


async def _thawed(stage: Stage) -> None:
    await stage.sometime()
    name = stage.chosen()
    stage.processes[name].signal(signal.SIGSTOP)
    await _until_lost(stage, name)
    stage.processes[name].signal(signal.SIGCONT)
    await _until_silent(stage, name)


async def _thawed_too_late_to_rest(stage: Stage) -> None:
    """Another one leaves meanwhile: all rest for that, but for who is frozen."""
    await stage.sometime()
    name, leaver = stage.random.sample(NAMES, 2)
    stage.processes[name].signal(signal.SIGSTOP)
    leaving = asyncio.ensure_future(_leave(stage, leaver))
    await _until_lost(stage, name)
    stage.processes[name].signal(signal.SIGCONT)
    await _until_silent(stage, name)
    await leaving


async def _cut_off(stage: Stage) -> None:
    """From its coordinator alone: it hears its neighbours, and they hear it."""
    await stage.sometime()
    name = stage.chosen()
    link = stage.links[f"{name} out"]
    link.forth.clear()
    link.back.clear()
    await _until_lost(stage, name)
    link.heal()
    await _until_silent(stage, name)


async def _coordinator_dies_of_a_loss(stage: Stage) -> None:
    stage.arm(COORDINATOR, stage.random.choice(_COORDINATORS))
    await stage.sometime()
    name = stage.chosen()
    await stage.kill(name)
    _hush(stage, name)
    await stage.death(COORDINATOR)
    await stage.start(COORDINATOR)
    await _until_lost(stage, name)


async def _lost_on_a_full_disk(stage: Stage) -> None:
    """The coordinator's, and for a while."""
    stage.arm(COORDINATOR, stage.random.choice(_FULL))
    await _killed_for_good(stage)


async def _lost_and_told(stage: Stage) -> None:
    """An operator knows before the deadline, and another learner dies when it is told."""
    name = stage.chosen()
    other = stage.chosen(name)
    stage.arm(other, stage.random.choice(_LEARNERS), _SECOND)
    await stage.sometime()
    await stage.kill(name)
    _hush(stage, name)
    leaving = asyncio.ensure_future(_leave(stage, name))
    await stage.death(other)
    await stage.start(other)
    await leaving


# ---- late ------------------------------------------------------------------------------------------------------------


async def _late(stage: Stage) -> None:
    await stage.sometime()
    await stage.freeze(stage.chosen(), stage.random.uniform(1.0, 3.0))


async def _late_and_killed(stage: Stage) -> None:
    await stage.sometime()
    name = stage.chosen()
    await stage.kill(name)
    await asyncio.sleep(stage.random.uniform(1.0, 3.0))
    await stage.start(name)


async def _late_by_a_link(stage: Stage) -> None:
    await stage.sometime()
    link = stage.links[stage.random.choice(NAMES[1:])]  # messages pass on those
    link.forth.clear()
    link.back.clear()
    await asyncio.sleep(stage.random.uniform(1.0, 3.0))
    link.heal()


async def _everybody_killed(stage: Stage) -> None:
    """All learners, in any order, and back in another one."""
    await stage.sometime()
    names = list(NAMES)
    stage.random.shuffle(names)
    await asyncio.gather(*map(stage.kill, names))
    for name in stage.random.sample(names, len(names)):
        await stage.start(name)


async def _coordinator_killed(stage: Stage) -> None:
    await stage.sometime()
    await stage.kill(COORDINATOR)
    await asyncio.sleep(stage.random.uniform(0.0, 2.0))
    await stage.start(COORDINATOR)


def _changing(
    name: str, promise: str, act: Act, *, place: bool = False, linked: bool = False, blind: bool = False
) -> Fault:
    return Fault(name, promise, act, place=place, linked=linked, blind=blind, changing=True)


def _losing(name: str, act: Act, *, linked: bool = False) -> Fault:
    return Fault(name, LOST, act, linked=linked, deadline_s=_LOST_S, late="drop", changing=True)


def _holding(name: str, act: Act, *, linked: bool = False, late: str = "reuse") -> Fault:
    return Fault(name, WAITED_FOR, act, linked=linked, late=late, changing=True)


ROSTER = (
    _changing("one leaves", LEAVES, _leaves),
    _changing("one leaves and is told to end", LEAVES, _leaves_for_good(Stage.tell_to_end)),
    _changing("one joins", JOINS, _joins, place=True),
    _changing("one joins that was not there", JOINS, _joins_from_nowhere, place=True),
    _changing("one leaves, asked for by two at once", LEAVES, _leaves_twice),
    _changing("one leaves while another joins", "both: the run finishes", _leaves_and_joins, place=True),
    _changing("one leaves and dies meanwhile", LEAVES, _dies("leaves")),
    _changing("one joins and dies meanwhile", JOINS, _dies("joins"), place=True),
    _changing("one leaves, another dies meanwhile", LEAVES, _dies("another")),
    *(_changing(f"one leaves, coordinator dies: {point}", LEAVES, _coordinator_dies(point)) for point in _COORDINATORS),
    _changing("one leaves, all are killed", LEAVES, _all_killed),
    _changing("one leaves, another is frozen", LEAVES, _frozen),
    _changing("one leaves, a link is cut", LEAVES, _cut, linked=True),
    _changing(
        "one leaves, eavesdropper killed", f"{LEAVES}; the capture may lack rounds", _eavesdropper_killed, blind=True
    ),
    _changing("one leaves, coordinator's disk full for a while", LEAVES, _disk_full),
    _changing("one is killed and told to leave, and may be back", "the run finishes without it", _gone_or_back),
    _losing("killed for good, and lost", _killed_for_good),
    _losing("one leaves and is killed for good", _leaves_for_good(Stage.kill)),
    _losing("two killed for good, and lost", _two_killed),
    _losing("killed, lost, and back", _killed_and_back),
    _losing("frozen, lost, and thawed", _thawed),
    _losing("frozen, lost, and thawed, while one leaves", _thawed_too_late_to_rest),
    _losing("cut off from its coordinator, lost, and back", _cut_off, linked=True),
    _losing("lost, and the coordinator dies meanwhile", _coordinator_dies_of_a_loss),
    _losing("lost, coordinator's disk full for a while", _lost_on_a_full_disk),
    _losing("lost by an operator, another dies meanwhile", _lost_and_told),
    _holding("late: frozen", _late),
    _holding("late: killed", _late_and_killed),
    _holding("late: a link is cut", _late_by_a_link, linked=True),
    _holding("nobody waits: frozen", _late, late="async"),
    _holding("nobody waits: killed", _late_and_killed, late="async"),
    _holding("nobody waits: all learners killed", _everybody_killed, late="async"),
    _holding("nobody waits: coordinator killed", _coordinator_killed, late="async"),
    _holding("nobody waits: a link is cut", _late_by_a_link, linked=True, late="async"),
)
