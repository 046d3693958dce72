"""`sottovoce status`: status of a deployment for an operator: a coordinator's runs, learners, an eavesdropper."""

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
from sottovoce_client.formatting import (
    MISSING_VALUE,
    format_bytes,
    format_count,
    format_duration,
    format_epsilon,
    format_number,
    format_percent,
    format_rounds_done,
)
from sottovoce_client.runs import coordinator_commands
from sottovoce_client.runs.monitoring import (
    CaptureListItem,
    LearnerView,
    RunHistory,
    RunListItem,
    RunObservation,
    RunPlan,
    RunView,
    ServiceAddresses,
    choose_run,
    format_time,
    limit_rate_to_clock,
    make_capture_list_item,
    make_run_list_item,
    make_run_view,
    parse_observation,
    parse_plan,
)
from sottovoce_client.runs.run_client import FEEDING_FAILED
from sottovoce_core.errors import FailedPrecondition, PermissionDenied, SottovoceError
from sottovoce_core.text import escape_control
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.tasks import await_answer
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2, learner_pb2_grpc

SAMPLE_INTERVAL_S = 1.0
"""Seconds between the two observations from which rates are computed."""
MAX_ROWS, MAX_CAPTURES = 40, 5
"""Maximum number of learners and of captures that are shown."""
_HEALTHY_STATES = ("running", "connecting", "finished")
_REPORTED_STATES = ("running", "connecting", "failed", "budget exhausted")
"""States in which a learner's own report may contain a fault; other states have ended or not begun."""
_IDLE_STATES = ("idle", "finished")
"""States in which a learner reports nothing but a missing coordinator."""
_STATE_LABELS = {"unspecified": "joined", "idle": "in no run"}
"""Labels of states that do not name themselves."""
_BUSY_SHARE = 0.9
"""Share of the time from which on a run waits for the eavesdropper."""
_NO_ADDRESSES = ServiceAddresses()
_NO_RUN = RunPlan("", None, "", (), (), "none", "free", None, is_live=False)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EavesdropperLoad:
    """Load of an eavesdropper in the last ten seconds.

    Attributes:
        messages_per_second: Messages that it recorded.
        busy: Share of the time in which its busiest process worked.
        median_delay_s, p99_delay_s: Time that messages waited in that process.
    """

    messages_per_second: float
    busy: float
    median_delay_s: float
    p99_delay_s: float


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """State of a deployment at one time.

    Attributes:
        observed_at: Unix time.
        run: Run that the coordinator reports; None: none, or the coordinator was not asked.
        other_runs: Other active runs.
        learners: Address and run of each learner that was asked; the run has that learner alone.
        captures: Captures of the eavesdropper, the newest first.
        unreachable_services: Errors of services that do not answer.
        load: Load of the eavesdropper; None if it was not asked.
    """

    observed_at: float
    run: RunView | None = None
    other_runs: tuple[RunListItem, ...] = ()
    learners: tuple[tuple[str, RunView], ...] = ()
    captures: tuple[CaptureListItem, ...] = ()
    unreachable_services: tuple[str, ...] = ()
    load: EavesdropperLoad | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        """Findings that an operator should check: of active or failed runs, and of services that do not answer."""
        views = [
            each
            for _, each in self.learners
            if each.state in _REPORTED_STATES or (each.state in _IDLE_STATES and each.detail)
        ]
        if self.run is not None and (
            self.run.ended_at is None or self.run.state == "failed" or _was_stopped_internally(self.run)
        ):
            views.insert(0, self.run)
        broken = [
            f"capture {each.name}: {each.state}" for each in self.captures if each.state not in ("open", "closed")
        ]
        if self.load is not None and self.load.busy >= _BUSY_SHARE:
            broken.append(_describe_busy(self.load))
        found = [line for view in views for line in _find_faults(view)]
        return tuple(dict.fromkeys([*self.unreachable_services, *found, *broken]))


def _describe_load(load: EavesdropperLoad) -> str:
    rate = f"{format_count(round(load.messages_per_second))} messages/s, busy {format_percent(load.busy)}"
    median, p99 = (f"{1_000 * each:.2g} ms" for each in (load.median_delay_s, load.p99_delay_s))
    return f"{rate}, a message waits {median} (99th percentile {p99})"


def _describe_busy(load: EavesdropperLoad) -> str:
    return (
        f"runs wait for the eavesdropper, which works {format_percent(load.busy)} of the time: give it more processes "
        "(--workers) or a machine of its own, or take `capture: mirror`"
    )


def _was_stopped_internally(run: RunView) -> bool:
    """Return whether the run was stopped by a cause other than an operator."""
    exhausted = any(each.state == "budget exhausted" for each in run.learners)
    return run.state == "stopped" and (exhausted or run.detail.startswith(FEEDING_FAILED))


def _find_faults(run: RunView) -> Iterator[str]:
    """Yield one line for each fault of a run."""
    if run.state == "failed" and run.ended_at is not None:
        yield f"the run failed: {run.detail or 'no reason is known'}"
    yield from run.warnings
    if run.ended_at is not None and _was_stopped_internally(run):
        yield f"the run stopped: {run.detail or 'no reason is known'}"
        return  # its learners report the same
    for each in run.learners:
        if each.state == "disconnected" and each.disconnected_since is not None:
            yield f"{each.name} is disconnected since {format_time(each.disconnected_since)}, after round {each.rounds_done}"
        elif each.state not in (*_HEALTHY_STATES, *_STATE_LABELS, "disconnected") and run.ended_at is None:
            yield f"{each.name} is {each.state}" if each.state == "lost" else f"{each.name}: {each.state}"
        yield from (f"{each.name}: {warning}" for warning in each.warnings)


# ---- requests --------------------------------------------------------------------------------------------------------


async def collect_status(
    addresses: ServiceAddresses = _NO_ADDRESSES,
    learners: Sequence[str] = (),
    run: str = "",
    credentials: Credentials = NO_IDENTITY,
) -> DeploymentStatus:
    """Ask all services concurrently; a service that does not answer is listed and does not hide the others.

    Args:
        addresses: Addresses of coordinator and eavesdropper; an empty one is not asked.
        learners: Addresses of learners, which answer their owners.
        run: Run to show; empty: the newest active run, else the newest run.
        credentials: Credentials of the caller.
    """
    problems: list[str] = []

    async def attempt(work: Awaitable[T]) -> T | None:
        try:
            return await work
        except SottovoceError as error:
            problems.append(escape_control(str(error)))
            return None

    ran, captures, answers = await asyncio.gather(
        attempt(_fetch_run(addresses.coordinator, run, credentials)) if addresses.coordinator else _skip(),
        attempt(_fetch_captures(addresses.eavesdropper, run, credentials)) if addresses.eavesdropper else _skip(),
        asyncio.gather(*(attempt(_fetch_learner_run(address, credentials)) for address in learners)),
    )
    shown, others = ran or (None, ())
    listed, load = captures or ((), None)
    found = tuple((address, each) for address, each in zip(learners, answers, strict=True) if each is not None)
    return DeploymentStatus(time.time(), shown, others, found, listed, tuple(problems), load)


async def _skip() -> None:
    """Return None, for a service that is not asked."""


async def _fetch_run(
    address: str, wanted: str, credentials: Credentials
) -> tuple[RunView | None, tuple[RunListItem, ...]]:
    """Fetch a run from its coordinator, and the other active runs."""
    lines = tuple(map(make_run_list_item, await coordinator_commands.get_all_runs(address, credentials)))
    run_id = wanted or choose_run(lines)
    if not run_id:
        return None, ()
    run, history = await coordinator_commands.get_run(address, run_id, credentials), RunHistory()
    plan = parse_plan(run.spec)
    history.add(parse_observation(run, None, time.monotonic()))
    if run.state == coordinator_pb2.RUN_STATE_RUNNING:
        await asyncio.sleep(SAMPLE_INTERVAL_S)
        run = await coordinator_commands.get_run(address, run_id, credentials)
        history.add(parse_observation(run, None, time.monotonic()))
    others = tuple(each for each in lines if each.ended_at is None and each.run_id != escape_control(run.run_id))
    return make_run_view(make_run_list_item(run), plan, history), others


async def _fetch_learner_run(address: str, credentials: Credentials) -> RunView:
    """Fetch the run of a learner, as it reports it to its owner."""
    async with open_channel(address, Role.LEARNER, credentials=credentials) as to:
        stub, name = learner_pb2_grpc.LearnerStub(to), f"the learner at {address}"

        async def get_status() -> LearnerStatus:
            call = stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=coordinator_commands.CALL_TIMEOUT_S)
            return LearnerStatus.from_wire((await await_answer(call, to, name, terminal.print_notice)).status)

        try:
            now, plan, history = await get_status(), _NO_RUN, RunHistory()
            if now.run_id:
                plan = await _fetch_plan(stub, name)
            history.add(RunObservation(time.monotonic(), (now,), (address,)))
            if now.state is LearnerState.RUNNING or now.detail:  # it may be about to join
                await asyncio.sleep(SAMPLE_INTERVAL_S)
                now = await get_status()
                history.add(RunObservation(time.monotonic(), (now,), (address,)))
        except grpc.aio.AioRpcError as error:
            raise convert_status_error(error, name) from None
    # The learner does not report when the run began.
    item = RunListItem(now.run_id, now.state.name.lower().replace("_", " "), now.detail, 0.0, None)
    return make_run_view(item, plan, history)


async def _fetch_plan(stub: Any, name: str) -> RunPlan:
    """Fetch a learner's run plan. Its owner may read it; an operator may only read the progress, and gets an empty plan."""
    request = learner_pb2.GetIntakeRequest(source="status")  # no records are sent under this name
    try:
        return replace(
            parse_plan((await stub.GetIntake(request, timeout=coordinator_commands.CALL_TIMEOUT_S)).spec),
            directed_edges=(),
        )
    except grpc.aio.AioRpcError as error:
        if not isinstance(refusal := convert_status_error(error, name), PermissionDenied | FailedPrecondition):
            raise refusal from None
        return _NO_RUN


async def _fetch_captures(
    address: str, run: str, credentials: Credentials
) -> tuple[tuple[CaptureListItem, ...], EavesdropperLoad]:
    """Fetch the newest captures of an eavesdropper, or of one run if it is given, and its load."""
    request = eavesdropper_pb2.ListCapturesRequest(run_id=run, page_size=MAX_CAPTURES)
    answer = await coordinator_commands.call_service(
        address,
        credentials,
        lambda stub: stub.ListCaptures(request, timeout=coordinator_commands.CALL_TIMEOUT_S),
        Role.EAVESDROPPER,
    )
    now = answer.load
    load = EavesdropperLoad(now.messages_per_second, now.busy, now.median_delay_s, now.p99_delay_s)
    return tuple(map(make_capture_list_item, answer.captures)), load


# ---- JSON output -----------------------------------------------------------------------------------------------------


def make_document(status: DeploymentStatus) -> dict[str, Any]:
    """Build the JSON document, with the keys of `runs show --json`."""
    return {
        "observed_at": _date(status.observed_at),
        "run": None if status.run is None else _run_document(status.run, status.observed_at),
        "active_runs": [
            {"run_id": each.run_id, "state": each.state, "rounds_done": each.rounds_done} for each in status.other_runs
        ],
        "learners": [_run_document(run, status.observed_at) for _, run in status.learners],
        "captures": status.captures,
        "eavesdropper": status.load,
        "faults": status.faults,
    }


def _run_document(run: RunView, now: float) -> dict[str, Any]:
    ahead = max((each.rounds_done for each in run.learners), default=0)
    return {
        "run_id": run.run_id or None,
        "name": run.name or None,
        "algorithm": run.algorithm or None,
        "state": run.state,
        "detail": run.detail,
        "started": _date(run.started_at) if run.started_at else None,
        "ended": None if run.ended_at is None else _date(run.ended_at),
        "rounds": run.rounds,
        "rounds_done": run.rounds_done,
        "rounds_per_second": run.rounds_per_second,
        "rounds_per_second_so_far": _mean_rate(run, now),
        "seconds_left": _seconds_left(run, now),
        "capture": run.capture,
        "learners": [
            {
                "name": each.name,
                "address": each.address,
                "state": _describe_state(each),
                "rounds_done": each.rounds_done,
                "rounds_behind": ahead - each.rounds_done,
                "epsilon": each.epsilon,
                "epsilon_limit": each.epsilon_limit,
                "delta": each.delta,
                "epsilon_other_runs": each.epsilon_other_runs,
                "records": each.records,
                "records_waiting": each.records_waiting,
                "accuracy": each.accuracy,
                "disconnected_since": None if each.disconnected_since is None else _date(each.disconnected_since),
            }
            for each in run.learners
        ],
    }


# ---- terminal output -------------------------------------------------------------------------------------------------


def show(status: DeploymentStatus, console: Console | None = None) -> None:
    """Print the status."""
    console = console or terminal.create_console()
    if status.run is not None:
        _print_run(status.run, status, console)
    for address, run in status.learners:
        _print_run(run, status, console, address)
    if status.captures:
        console.print(_captures_table(status.captures))
    if status.load is not None and status.load.messages_per_second:
        console.print(f"eavesdropper: {_describe_load(status.load)}")
    if status.run is None and not status.learners and not status.captures and not status.unreachable_services:
        console.print("no run: start one with sottovoce run SPEC, which reports the learners it waits for")
    facts = terminal.create_fact_grid()
    for line in status.faults:
        facts.add_row(Text("fault", style="bold red"), line)
    console.print(facts if status.faults else "nothing is wrong")


def _print_run(run: RunView, status: DeploymentStatus, console: Console, learner: str = "") -> None:
    """Print a run; `learner` is the address of the learner that reported it, if any."""
    named = f"{run.name} " if run.name else ""
    console.print(Text(escape_control(f"{named}{run.run_id}" if run.run_id else learner), style="bold"))
    facts = terminal.create_fact_grid()
    rows = {
        "reported by": escape_control(learner) if run.run_id else "",
        "state": f"{_describe_state(run)}{f': {run.detail}' if run.detail else ''}",
        "rounds": _progress_line(run, status.observed_at) if run.run_id else "",
        "started": format_time(run.started_at) if run.started_at else "",
        "algorithm": escape_control(run.algorithm),
        "captured": "" if run.capture == "none" else escape_control(run.capture),
        "other runs": ""
        if learner
        else "\n".join(f"{each.run_id}, round {each.rounds_done}" for each in status.other_runs),
        "all runs": _describe_total_cost(run.learners[0]) if learner else "",
    }
    for name, text in rows.items():
        if text:
            facts.add_row(name, text)
    console.print(facts)
    console.print(_learners_table(run))


def _progress_line(run: RunView, now: float) -> str:
    """Format the progress: `40 of 500 rounds, 12 rounds/s (10 so far), 38 s left`."""
    parts = [format_rounds_done(run.rounds_done, run.rounds)]
    mean = _mean_rate(run, now)
    if run.ended_at is not None or run.state != "running":
        return parts[0]
    so_far = f" ({format_number(mean, 3)} so far)" if mean is not None else ""
    parts.append(f"{format_number(run.rounds_per_second, 3)} rounds/s{so_far}")
    if (left := _seconds_left(run, now)) is not None:
        parts.append(f"about {format_duration(left)} left")
    return ", ".join(parts)


def _mean_rate(run: RunView, now: float) -> float | None:
    """Return the mean rounds per second since the start; None if unknown."""
    seconds = (now if run.ended_at is None else run.ended_at) - run.started_at
    return run.rounds_done / seconds if run.started_at and seconds > 0 else None


def _seconds_left(run: RunView, now: float) -> float | None:
    """Estimate the remaining seconds at the current rate that the clock sustains, else at the mean rate; None if unknown."""
    rate = run.rounds_per_second or _mean_rate(run, now)
    if run.rounds is None or run.state != "running" or not rate:
        return None
    return float(f"{max(0, run.rounds - run.rounds_done) / limit_rate_to_clock(rate, run.period_s):.2g}")


def _learners_table(run: RunView) -> Table:
    """Build the table of learners. If not all fit, learners with faults come first."""
    own = any(each.accuracy is not None for each in run.learners)
    table = terminal.create_table("learner", "state")
    for head in ("round", "behind", "ε spent", "ε limit", "records", "waiting", *(["accuracy"] if own else [])):
        table.add_column(head, justify="right")
    ahead, rows = max((each.rounds_done for each in run.learners), default=0), run.learners
    if len(rows) > MAX_ROWS:
        rows = tuple(
            sorted(
                rows,
                key=lambda each: (_describe_state(each) in _HEALTHY_STATES and not each.warnings, each.rounds_done),
            )
        )
    for each in rows[:MAX_ROWS]:
        cells = [
            format_count(each.rounds_done),
            format_count(ahead - each.rounds_done) if each.rounds_done < ahead else MISSING_VALUE,
        ]
        cells += [
            format_number(each.epsilon),
            "none" if each.epsilon_limit is None else format_epsilon(each.epsilon_limit, each.delta),
        ]
        cells += [format_count(each.records), format_count(each.records_waiting)]
        style = "" if _describe_state(each) in _HEALTHY_STATES else "yellow"
        table.add_row(
            Text(escape_control(each.name)),
            Text(_describe_state(each), style=style),
            *cells,
            *([format_percent(each.accuracy)] if own else []),
        )
    if len(rows) > MAX_ROWS:
        table.add_row(f"… {format_count(len(rows) - MAX_ROWS)} more", style="dim")
    return table


def _captures_table(captures: Sequence[CaptureListItem]) -> Table:
    table = terminal.create_table("capture")
    table.add_column("run", no_wrap=True, overflow="fold")  # an id is copied whole
    table.add_column("state")
    for head in ("messages", "bytes"):
        table.add_column(head, justify="right")
    for each in captures:
        table.add_row(
            Text(each.name), Text(each.run_id), Text(each.state), format_count(each.messages), format_bytes(each.bytes)
        )
    return table


def _describe_state(view: LearnerView | RunView) -> str:
    """Return the state in one word."""
    if isinstance(view, LearnerView) and view.state == "unspecified" and not view.address:
        return "not joined"
    return _STATE_LABELS.get(view.state, view.state)


def _describe_total_cost(learner: LearnerView) -> str:
    """Describe what a learner has spent in all its runs, for its owner."""
    budget, delta = learner.epsilon_owner_budget, learner.owner_delta
    limit = "no limit" if budget is None else f"of {format_epsilon(budget, delta)}"
    spent = format_number(learner.epsilon_other_runs + learner.epsilon)
    # Epsilons at a delta add up to a bound only.
    return f"ε {'at most ' if delta or learner.delta else ''}{spent}, {limit}"


def _date(when: float) -> datetime:
    return datetime.fromtimestamp(when, UTC)
