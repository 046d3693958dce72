"""`sottovoce status`: one look at what goes on, for an operator: at a coordinator's runs, at learners, at an eavesdropper."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.running import known
from sottovoce_client.running.monitoring import (
    CaptureListItem,
    History,
    LearnerView,
    RunObservation,
    ServiceAddresses,
    Plan,
    RunListItem,
    RunView,
    make_capture_list_item,
    lasting,
    parse_observation,
    moment,
    newest,
    plan_of,
    make_run_list_item,
    make_run_view,
)
from sottovoce_client.running.operate import FEEDING_FAILED
from sottovoce_client.wording import NOTHING, count, duration, number, format_rounds_done, share, size
from sottovoce_core.errors import FailedPrecondition, SottovoceError, PermissionDenied
from sottovoce_core.text import plain
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import channel
from sottovoce_rpc.status import convert_status_error
from sottovoce_rpc.tasks import answered
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2, learner_pb2_grpc

SAMPLE_INTERVAL_S = 1.0
"""Between two looks at what goes on: rounds a second are those of this while."""
MOST_ROWS, MAX_CAPTURES = 40, 5
"""Learners and captures that are shown."""
_HEALTHY_STATES = ("running", "connecting", "finished")
_REPORTED_STATES = ("running", "connecting", "failed", "budget exhausted")
"""States in which what a learner says of itself may be a fault; others are over, or have not begun."""
_IDLE_STATES = ("idle", "finished")
"""States in which a learner says nothing of itself, but that it has no coordinator."""
_STATE_LABELS = {"unspecified": "joined", "idle": "in no run"}
"""How a learner stands of whose state nothing is known."""
_NOWHERE = ServiceAddresses()
_NO_RUN = Plan("", None, "", (), (), "none", "free", None, live=False)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Status:
    """How everything stands.

    Attributes:
        at: Unix time.
        run: as its coordinator tells; None: it has none, or was not asked.
        others: also under way.
        learners: the run of each learner that was asked, with that learner alone, by address.
        captures: of the eavesdropper, the newest first.
        problems: who does not answer.
    """

    at: float
    run: RunView | None = None
    others: tuple[RunListItem, ...] = ()
    learners: tuple[tuple[str, RunView], ...] = ()
    captures: tuple[CaptureListItem, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """What an operator should look at: of what goes on, or failed; and who does not answer."""
        seen = [each for _, each in self.learners if each.state in _REPORTED_STATES or (each.state in _IDLE_STATES and each.detail)]
        if self.run is not None and (self.run.ended is None or self.run.state == "failed" or _ended_itself(self.run)):
            seen.insert(0, self.run)
        broken = [
            f"capture {each.name}: {each.state}" for each in self.captures if each.state not in ("open", "closed")
        ]
        told = [line for view in seen for line in _faults_of(view)]
        return tuple(dict.fromkeys([*self.problems, *told, *broken]))


def _ended_itself(run: RunView) -> bool:
    """Was it stopped by what nobody asked for?"""
    exhausted = any(each.state == "budget exhausted" for each in run.learners)
    return run.state == "stopped" and (exhausted or run.detail.startswith(FEEDING_FAILED))


def _faults_of(run: RunView) -> Iterator[str]:
    """What is wrong with a run, a line on each."""
    if run.state == "failed" and run.ended is not None:
        yield f"the run failed: {run.detail or 'nobody says why'}"
    yield from run.warnings
    if run.ended is not None and _ended_itself(run):
        yield f"the run stopped: {run.detail or 'nobody says why'}"
        return  # its learners say the same
    for each in run.learners:
        if each.state == "away" and each.away_since is not None:
            yield f"{each.name} is away since {moment(each.away_since)}, after round {each.rounds}"
        elif each.state not in (*_HEALTHY_STATES, *_STATE_LABELS, "away") and run.ended is None:
            yield f"{each.name} is {each.state}" if each.state == "lost" else f"{each.name}: {each.state}"
        yield from (f"{each.name}: {notice}" for notice in each.warnings)


# ---- asking ----------------------------------------------------------------------------------------------------------


async def look(
    places: ServiceAddresses = _NOWHERE, learners: Sequence[str] = (), run: str = "", credentials: Credentials = NO_IDENTITY
) -> Status:
    """Ask everybody at the same time; who does not answer is a problem, and hides nobody else.

    Args:
        places: of coordinator and eavesdropper; what is empty is not asked.
        learners: addresses of learners, which their owners ask.
        run: to look at; empty: the newest, one under way before others.
        credentials: of whoever asks.
    """
    problems: list[str] = []

    async def tried(work: Awaitable[T]) -> T | None:
        try:
            return await work
        except SottovoceError as error:
            problems.append(plain(str(error)))
            return None

    ran, captures, told = await asyncio.gather(
        tried(_run(places.coordinator, run, credentials)) if places.coordinator else _nothing(),
        tried(_captures(places.eavesdropper, run, credentials)) if places.eavesdropper else _nothing(),
        asyncio.gather(*(tried(_learner(address, credentials)) for address in learners)),
    )
    shown, others = ran or (None, ())
    found = tuple((at, each) for at, each in zip(learners, told, strict=True) if each is not None)
    return Status(time.time(), shown, others, found, captures or (), tuple(problems))


async def _nothing() -> None:
    """Nobody to ask."""


async def _run(at: str, wanted: str, who: Credentials) -> tuple[RunView | None, tuple[RunListItem, ...]]:
    """A run as its coordinator tells, and which others are under way."""
    lines = tuple(map(make_run_list_item, await known.all_runs(at, who)))
    run_id = wanted or newest(lines)
    if not run_id:
        return None, ()
    run, history = await known.get_run(at, run_id, who), History()
    plan = plan_of(run.spec)
    history.add(parse_observation(run, None, time.monotonic()))
    if run.state == coordinator_pb2.RUN_STATE_RUNNING:
        await asyncio.sleep(SAMPLE_INTERVAL_S)
        run = await known.get_run(at, run_id, who)
        history.add(parse_observation(run, None, time.monotonic()))
    others = tuple(each for each in lines if each.ended is None and each.run_id != plain(run.run_id))
    return make_run_view(make_run_list_item(run), plan, history), others


async def _learner(address: str, credentials: Credentials) -> RunView:
    """The run that a learner is in, as it tells its owner."""
    async with channel(address, Role.LEARNER, credentials=credentials) as to:
        stub, who = learner_pb2_grpc.LearnerStub(to), f"the learner at {address}"

        async def told() -> LearnerStatus:
            call = stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=known.CALL_S)
            return LearnerStatus.from_wire((await answered(call, to, who, terminal.say)).status)

        try:
            now, plan, history = await told(), _NO_RUN, History()
            if now.run_id:
                plan = await _planned(stub, who)
            history.add(RunObservation(time.monotonic(), (now,), (address,)))
            if now.state is LearnerState.RUNNING or now.detail:  # it may be about to join
                await asyncio.sleep(SAMPLE_INTERVAL_S)
                now = await told()
                history.add(RunObservation(time.monotonic(), (now,), (address,)))
        except grpc.aio.AioRpcError as error:
            raise convert_status_error(error, who) from None
    # When the run began it does not tell.
    course = RunListItem(now.run_id, now.state.name.lower().replace("_", " "), now.detail, 0.0, None)
    return make_run_view(course, plan, history)


async def _planned(stub: Any, who: str) -> Plan:
    """What a learner is in, whose owner asks; an operator may know how far it is, and no more."""
    request = learner_pb2.GetIntakeRequest(source="status")  # under which nobody brings records
    try:
        return replace(plan_of((await stub.GetIntake(request, timeout=known.CALL_S)).spec), ways=())
    except grpc.aio.AioRpcError as error:
        if not isinstance(refusal := convert_status_error(error, who), PermissionDenied | FailedPrecondition):
            raise refusal from None
        return _NO_RUN


async def _captures(at: str, run: str, credentials: Credentials) -> tuple[CaptureListItem, ...]:
    """The newest captures of an eavesdropper; of one run, where one is asked for."""
    request = eavesdropper_pb2.ListCapturesRequest(run_id=run, page_size=MAX_CAPTURES)
    told = await known.asked(
        at, credentials, lambda stub: stub.ListCaptures(request, timeout=known.CALL_S), Role.EAVESDROPPER
    )
    return tuple(map(make_capture_list_item, told.captures))


# ---- for programs ----------------------------------------------------------------------------------------------------


def document(status: Status) -> dict[str, Any]:
    """For programs, in the words of `runs show --json`."""
    return {
        "at": _date(status.at),
        "run": None if status.run is None else _run_document(status.run, status.at),
        "under_way": [{"run": each.run_id, "state": each.state, "rounds_done": each.round} for each in status.others],
        "learners": [_run_document(run, status.at) for _, run in status.learners],
        "captures": status.captures,
        "faults": status.faults,
    }


def _run_document(run: RunView, now: float) -> dict[str, Any]:
    ahead = max((each.rounds for each in run.learners), default=0)
    return {
        "run": run.run_id or None,
        "name": run.name or None,
        "algorithm": run.algorithm or None,
        "state": run.state,
        "detail": run.detail,
        "started": _date(run.started) if run.started else None,
        "ended": None if run.ended is None else _date(run.ended),
        "rounds": run.rounds,
        "rounds_done": run.round,
        "rounds_per_second": run.rate,
        "rounds_per_second_so_far": _mean_rate(run, now),
        "seconds_left": _seconds_left(run, now),
        "capture": run.capture,
        "learners": [
            {
                "name": each.name,
                "address": each.address,
                "state": _standing(each),
                "rounds_done": each.rounds,
                "rounds_behind": ahead - each.rounds,
                "epsilon": each.epsilon,
                "epsilon_limit": each.limit,
                "epsilon_other_runs": each.elsewhere,
                "records": each.records,
                "records_waiting": each.waiting,
                "accuracy": each.accuracy,
                "away_since": None if each.away_since is None else _date(each.away_since),
            }
            for each in run.learners
        ],
    }


# ---- for people ------------------------------------------------------------------------------------------------------


def show(status: Status, console: Console | None = None) -> None:
    """Print it."""
    console = console or terminal.console()
    if status.run is not None:
        _print_run(status.run, status, console)
    for at, run in status.learners:
        _print_run(run, status, console, at)
    if status.captures:
        console.print(_captures_table(status.captures))
    if status.run is None and not status.learners and not status.captures and not status.problems:
        console.print("no run: whoever starts one (sottovoce run SPEC) is told which learners it waits for")
    facts = terminal.facts()
    for line in status.faults:
        facts.add_row(Text("fault", style="bold red"), line)
    console.print(facts if status.faults else "nothing is wrong")


def _print_run(run: RunView, status: Status, console: Console, learner: str = "") -> None:
    """A run; of a learner that was asked itself, what it says of it."""
    named = f"{run.name} " if run.name else ""
    console.print(Text(plain(f"{named}{run.run_id}" if run.run_id else learner), style="bold"))
    facts = terminal.facts()
    told = {
        "told by": plain(learner) if run.run_id else "",
        "state": f"{_standing(run)}{f': {run.detail}' if run.detail else ''}",
        "rounds": _progress_line(run, status.at) if run.run_id else "",
        "started": moment(run.started) if run.started else "",
        "algorithm": plain(run.algorithm),
        "captured": "" if run.capture == "none" else plain(run.capture),
        "under way": "" if learner else "\n".join(f"{each.run_id}, round {each.round}" for each in status.others),
        "all runs": _in_all(run.learners[0]) if learner else "",
    }
    for name, text in told.items():
        if text:
            facts.add_row(name, text)
    console.print(facts)
    console.print(_learners_table(run))


def _progress_line(run: RunView, now: float) -> str:
    """`40 of 500 rounds, 12 rounds/s (10 so far), 38 s left`."""
    parts = [format_rounds_done(run.round, run.rounds)]
    mean = _mean_rate(run, now)
    if run.ended is not None or run.state != "running":
        return parts[0]
    so_far = f" ({number(mean, 3)} so far)" if mean is not None else ""
    parts.append(f"{number(run.rate, 3)} rounds/s{so_far}")
    if (left := _seconds_left(run, now)) is not None:
        parts.append(f"about {duration(left)} left")
    return ", ".join(parts)


def _mean_rate(run: RunView, now: float) -> float | None:
    """Rounds a second since it was started; None: that is not known."""
    seconds = (now if run.ended is None else run.ended) - run.started
    return run.round / seconds if run.started and seconds > 0 else None


def _seconds_left(run: RunView, now: float) -> float | None:
    """At the pace of now, as far as it lasts; where no round fell into this while, at that since the start. None: not known."""
    pace = run.rate or _mean_rate(run, now)
    if run.rounds is None or run.state != "running" or not pace:
        return None
    return float(f"{max(0, run.rounds - run.round) / lasting(pace, run.period_s):.2g}")


def _learners_table(run: RunView) -> Table:
    """Those in trouble first, where not all are shown."""
    own = any(each.accuracy is not None for each in run.learners)
    table = terminal.table("learner", "state")
    for head in ("round", "behind", "ε spent", "ε limit", "records", "waiting", *(["accuracy"] if own else [])):
        table.add_column(head, justify="right")
    ahead, rows = max((each.rounds for each in run.learners), default=0), run.learners
    if len(rows) > MOST_ROWS:
        rows = tuple(sorted(rows, key=lambda each: (_standing(each) in _HEALTHY_STATES and not each.warnings, each.rounds)))
    for each in rows[:MOST_ROWS]:
        cells = [count(each.rounds), count(ahead - each.rounds) if each.rounds < ahead else NOTHING]
        cells += [number(each.epsilon), "none" if each.limit is None else number(each.limit)]
        cells += [count(each.records), count(each.waiting)]
        style = "" if _standing(each) in _HEALTHY_STATES else "yellow"
        table.add_row(
            Text(plain(each.name)),
            Text(_standing(each), style=style),
            *cells,
            *([share(each.accuracy)] if own else []),
        )
    if len(rows) > MOST_ROWS:
        table.add_row(f"… {count(len(rows) - MOST_ROWS)} more", style="dim")
    return table


def _captures_table(captures: Sequence[CaptureListItem]) -> Table:
    table = terminal.table("capture")
    table.add_column("run", no_wrap=True, overflow="fold")  # an id is copied whole
    table.add_column("state")
    for head in ("messages", "bytes"):
        table.add_column(head, justify="right")
    for each in captures:
        table.add_row(Text(each.name), Text(each.run_id), Text(each.state), count(each.messages), size(each.bytes))
    return table


def _standing(of: LearnerView | RunView) -> str:
    """In a word."""
    if isinstance(of, LearnerView) and of.state == "unspecified" and not of.address:
        return "not joined"
    return _STATE_LABELS.get(of.state, of.state)


def _in_all(learner: LearnerView) -> str:
    """What a learner has spent in all its runs, for its owner."""
    limit = "no limit" if learner.epsilon_owner_budget is None else f"of {number(learner.epsilon_owner_budget)}"
    return f"ε {number(learner.elsewhere + learner.epsilon)}, {limit}"


def _date(when: float) -> datetime:
    return datetime.fromtimestamp(when, UTC)
