"""Commands for a coordinator's runs: list, show, stop, resume, reconfigure; and for learners that lost their state folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Any, Literal, TypeVar

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.formatting import (
    MISSING_VALUE,
    describe_offline_interval,
    format_count,
    format_duration,
    format_number,
)
from sottovoce_client.runs.monitoring import RunListItem, format_time, make_run_list_item
from sottovoce_client.runs.run_client import RESUME_TIMEOUT_S, STOPPED_BY_OPERATOR
from sottovoce_core.network.participation_schedule import OfflineInterval
from sottovoce_core.text import escape_control
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.learner_status import LearnerStatus, describe_violations
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.tasks import await_answer
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, eavesdropper_pb2_grpc

CALL_TIMEOUT_S = 10.0

T = TypeVar("T")


async def list_runs(coordinator: str, console: Console | None = None, credentials: Credentials = NO_IDENTITY) -> None:
    """Print the list of runs, the newest first.

    Raises:
        SottovoceError: The coordinator is unreachable.
    """
    table = _table("run", "state", "started", "took", "rounds", "detail")
    for line in map(make_run_list_item, await get_all_runs(coordinator, credentials)):
        cells = line.state, format_time(line.started_at), _took(line), format_count(line.rounds_done)
        table.add_row(_text(line.run_id), *cells, _text(line.detail))
    (console or terminal.create_console()).print(table if table.row_count else "no runs")


async def get_run_documents(
    coordinator: str, run_id: str = "", credentials: Credentials = NO_IDENTITY
) -> list[dict[str, Any]]:
    """Return the JSON documents of all runs, the newest first, or of one.

    Raises:
        SottovoceError: The run does not exist, or the coordinator is unreachable.
    """
    runs = [await get_run(coordinator, run_id, credentials)] if run_id else await get_all_runs(coordinator, credentials)
    return [_document(run) for run in runs]


def _document(run: coordinator_pb2.Run) -> dict[str, Any]:
    line = make_run_list_item(run)
    return {
        "run_id": run.run_id,
        "state": line.state,
        "detail": run.detail,
        "started": run.started_at.ToDatetime(UTC),
        "ended": run.ended_at.ToDatetime(UTC) if run.HasField("ended_at") else None,
        "rounds_done": line.rounds_done,
        "capture": run.capture_location or None,
        "capture_error": run.capture_error or None,
        "learners": [
            {
                "name": each.status.learner,
                "address": each.address,
                "state": LearnerStatus.from_wire(each.status).state.name.lower(),
                "rounds_done": each.status.rounds_done,
                "epsilon": each.status.epsilon_charged,
                "disconnected_since": each.disconnected_at.ToDatetime(UTC)
                if each.HasField("disconnected_at")
                else None,
            }
            for each in run.learners
        ],
    }


async def show_run(
    coordinator: str, run_id: str, console: Console | None = None, credentials: Credentials = NO_IDENTITY
) -> None:
    """Print one run, and the states of its learners.

    Raises:
        SottovoceError: The run does not exist, or the coordinator is unreachable.
    """
    run = await get_run(coordinator, run_id, credentials)
    console, facts, line = console or terminal.create_console(), terminal.create_fact_grid(), make_run_list_item(run)
    planned = json.loads(run.spec)["rounds"]
    rows = {
        "state": line.state,
        "detail": line.detail,
        "started": format_time(line.started_at),
        "took": _took(line),
        "rounds": f"{format_count(line.rounds_done)}, no end planned"
        if planned is None
        else f"{format_count(line.rounds_done)} of {format_count(planned)}",
        "violations": "\n".join(map(escape_control, describe_violations(run))),
        "capture": "\n".join(map(escape_control, filter(None, (run.capture_location, run.capture_error)))),
    }
    for name, text in rows.items():
        if text:
            facts.add_row(name, Text(text))
    console.print(_text(run.run_id, style="bold"))
    console.print(facts)
    console.print(_learner_table(run))


async def stop_run(
    coordinator: str, run_id: str, console: Console | None = None, credentials: Credentials = NO_IDENTITY
) -> None:
    """Stop a run before its last round; if it has ended, print how.

    Raises:
        SottovoceError: The run does not exist, or the coordinator is unreachable.
    """
    run = await get_run(coordinator, run_id, credentials)
    had_ended = run.HasField("ended_at")
    if not had_ended:
        request = coordinator_pb2.StopRunRequest(run_id=run.run_id, reason=STOPPED_BY_OPERATOR)
        run = await call_service(coordinator, credentials, lambda stub: stub.StopRun(request, timeout=CALL_TIMEOUT_S))
    state = make_run_list_item(run).state
    ending = f"{state}: {run.detail}" if run.detail else state
    line = f"run {run.run_id} is over ({ending}): nothing is left to stop" if had_ended else f"{run.run_id} {ending}"
    (console or terminal.create_console()).print(_text(line))
    terminal.print_json_if_requested(lambda: _document(run))


async def resume_run(
    coordinator: str, run_id: str, console: Console | None = None, credentials: Credentials = NO_IDENTITY
) -> None:
    """Resume a failed run, and print which traffic will not be captured.

    Raises:
        SottovoceError: The run did not fail, a learner was in another run since, or the coordinator is unreachable.
    """
    request = coordinator_pb2.ResumeRunRequest(run_id=run_id)
    run = await call_service(coordinator, credentials, lambda stub: stub.ResumeRun(request, timeout=RESUME_TIMEOUT_S))
    console = console or terminal.create_console()
    line = make_run_list_item(run)
    console.print(_text(f"{line.run_id} {line.state} from round {format_count(line.rounds_done)} on"))
    if disconnected := [each.status.learner for each in run.learners if each.HasField("disconnected_at")]:
        console.print(_text(f"waiting for {', '.join(disconnected)}"))
    if run.capture_error:
        console.print(_text(run.capture_error))
    terminal.print_json_if_requested(lambda: _document(run))


async def reconfigure_run(
    coordinator: str,
    run_id: str,
    learner: str,
    console: Console | None = None,
    credentials: Credentials = NO_IDENTITY,
    *,
    joins: bool,
) -> None:
    """Let an active run continue without a learner; or let an offline learner take part, if it `joins`.

    Raises:
        SottovoceError: The change is refused, or the coordinator is unreachable.
    """
    request = coordinator_pb2.JoinRunRequest if joins else coordinator_pb2.LeaveRunRequest
    wanted, method = request(run_id=run_id, learner=learner), "JoinRun" if joins else "LeaveRun"
    await call_service(coordinator, credentials, lambda stub: getattr(stub, method)(wanted, timeout=RESUME_TIMEOUT_S))
    run = await get_run(coordinator, run_id, credentials)
    for each in json.loads(run.spec).get("offline_intervals") or ():
        if each["learner"] == learner:
            (console or terminal.create_console()).print(_text(describe_offline_interval(OfflineInterval(**each))))
    terminal.print_json_if_requested(lambda: _document(run))


async def rebind(
    coordinator: str, learner: str, console: Console | None = None, credentials: Credentials = NO_IDENTITY
) -> None:
    """Let the next learner of this name join with any state folder.

    Raises:
        SottovoceError: No learner of this name has joined, or it is connected; or the coordinator is unreachable.
    """
    request = coordinator_pb2.RebindLearnerRequest(learner=learner)
    await call_service(coordinator, credentials, lambda stub: stub.RebindLearner(request, timeout=CALL_TIMEOUT_S))
    (console or terminal.create_console()).print(
        _text(f"{learner} may join with another state folder, which does not contain its earlier spending")
    )
    terminal.print_json_if_requested(lambda: {"learner": learner})


async def get_run(coordinator: str, run_id: str, credentials: Credentials) -> coordinator_pb2.Run:
    """Fetch one run from a coordinator.

    Raises:
        SottovoceError: The run does not exist, or the coordinator is unreachable.
    """
    request = coordinator_pb2.GetRunRequest(run_id=run_id)
    return await call_service(coordinator, credentials, lambda stub: stub.GetRun(request, timeout=CALL_TIMEOUT_S))


async def get_all_runs(coordinator: str, credentials: Credentials) -> list[coordinator_pb2.Run]:
    """Fetch all runs that a coordinator keeps, the newest first.

    Raises:
        SottovoceError: It is unreachable.
    """
    runs: list[coordinator_pb2.Run] = []
    request = coordinator_pb2.ListRunsRequest()
    while True:
        page = await call_service(coordinator, credentials, lambda stub: stub.ListRuns(request, timeout=CALL_TIMEOUT_S))
        runs += page.runs
        if not page.next_page_token:
            return runs
        request.page_token = page.next_page_token


_STUBS: Mapping[Role, Callable[[grpc.aio.Channel], Any]] = {
    Role.COORDINATOR: coordinator_pb2_grpc.CoordinatorStub,
    Role.EAVESDROPPER: eavesdropper_pb2_grpc.EavesdropperStub,
}


async def call_service(
    address: str,
    credentials: Credentials,
    make_call: Callable[[Any], grpc.aio.UnaryUnaryCall[Any, T]],
    role: Role = Role.COORDINATOR,
) -> T:
    """Call a coordinator or an eavesdropper and return the answer; print a notice if the call waits for something.

    Raises:
        SottovoceError: The call was refused, or the service is unreachable.
    """
    async with open_channel(address, role, credentials=credentials) as channel:
        name = f"the {role} at {address}"
        try:
            return await await_answer(make_call(_STUBS[role](channel)), channel, name, terminal.print_notice)
        except grpc.aio.AioRpcError as error:
            raise convert_status_error(error, name) from None


def _learner_table(run: coordinator_pb2.Run) -> Table:
    table = _table("learner", "address", "state", "rounds", "ε spent")
    lost = {
        each["learner"]
        for each in json.loads(run.spec).get("offline_intervals") or ()
        if each.get("missed_from_rounds")
    }
    for each in run.learners:
        status = LearnerStatus.from_wire(each.status)
        is_disconnected = each.HasField("disconnected_at")
        state = (
            f"disconnected since {format_time(each.disconnected_at.ToDatetime(UTC).timestamp())}"
            if is_disconnected
            else status.state.name.lower()
        )
        state = "lost" if status.learner in lost else state
        table.add_row(
            _text(status.learner),
            _text(each.address),
            state,
            format_count(status.rounds_done),
            format_number(status.epsilon_charged),
        )
    return table


def _text(text: str, style: str = "") -> Text:
    """Return text from a coordinator, which may contain text of other participants, with control characters escaped."""
    return Text(escape_control(text), style=style)


def _table(*heads: str) -> Table:
    table = terminal.create_table()
    for head in heads:
        justify: Literal["left", "right"] = "right" if head in ("rounds", "took", "ε spent") else "left"
        table.add_column(head, overflow="fold", justify=justify, no_wrap=head == "run")  # an id must be copied in full
    return table


def _took(line: RunListItem) -> str:
    seconds = (time.time() if line.ended_at is None else line.ended_at) - line.started_at
    return format_duration(seconds) if seconds >= 0 else MISSING_VALUE
