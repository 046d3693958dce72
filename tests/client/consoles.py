"""Web consoles for tests: made-up runs, what is known of them, and a server on a port of this machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sottovoce_client.runs.monitoring import (
    CaptureListItem,
    RunHistory,
    RunListItem,
    RunObservation,
    RunPlan,
    RunView,
    make_run_view,
    parse_plan,
)
from sottovoce_client.web.app import create_console_app, create_server
from sottovoce_client.web.poller import ConsoleState
from sottovoce_client.web.result_files import ReportEntry, ResultFiles
from sottovoce_client.web.service_clients import LearnerWatch, WatchView
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.specs import spec_to_wire
from tests.examples import small_spec

TOKEN = "a" * 30
COOKIE = "sottovoce-console-0"
NOON = 1_800_000_000.0


def plan(n: int = 3, **more: Any) -> RunPlan:
    """Of a run of `n` learners."""
    return parse_plan(spec_to_wire(small_spec(1000, [f"learner-{i}" for i in range(n)], **more)))


def status(i: int, rounds: int = 20, **more: Any) -> LearnerStatus:
    """Of a learner that says a message of 100 bytes a round to two neighbours, and takes five records in."""
    made = LearnerStatus(
        learner=f"learner-{i}",
        run_id="run-1",
        state=LearnerState.RUNNING,
        rounds_done=rounds,
        messages_sent=2 * rounds,
        bytes_sent=200 * rounds,
        epsilon_spent=0.05 * rounds,
        epsilon_charged=0.05 * rounds,
        epsilon_budget=4.0,
        records=5 * rounds,
        records_waiting=i,
    )
    return replace(made, **more)


def look(at: float, n: int = 3, rounds: int = 20, **more: Any) -> RunObservation:
    """At `n` learners that have done so many rounds."""
    return RunObservation(
        at, tuple(status(i, rounds) for i in range(n)), tuple(f"127.0.0.1:{7401 + i}" for i in range(n)), **more
    )


COURSE = RunListItem("run-1", "running", "", NOON, None)


def a_run(n: int = 3, course: RunListItem = COURSE, planned: RunPlan | None = None) -> RunView:
    """One that has done 20 rounds, one a second."""
    history = RunHistory()
    for second in range(21):
        history.add(look(100.0 + second, n, second))
    return make_run_view(course, planned or plan(n), history)


def a_page(n: int = 3, **more: Any) -> ConsoleState:
    """With a run, and something in every list."""
    lines = tuple(LearnerWatch(f"learner-{i}", 0.5 * i, -0.2, 12.0, 15.0, 20, 0) for i in range(n))
    watch = WatchView("run", lines, LearnerWatch("", 0.1, -0.3, 8.0, 13.0, 20, 0), 0)
    shown = ConsoleState(
        time=NOON + 20.0,
        version="1.2.3",
        run=a_run(n),
        runs=(
            RunListItem("run-1", "running", "", NOON, None, 20),
            RunListItem("run-0", "failed", "learner-1 is gone", NOON - 500.0, NOON - 400.0, 7),
        ),
        captures=(
            CaptureListItem(
                "run-1-ab", "run-1", "/somewhere/run-1-ab", "open", 120, 12000, "captures/run-1-ab/capture.json"
            ),
        ),
        reports=(ReportEntry("old/report.html", "old, finished", 4_800_000, NOON - 9000.0, "run-0"),),
        watch=watch,
        folder="results",
    )
    return replace(shown, **more)


class Told:
    """What a console knows: as tests say."""

    def __init__(self, page: ConsoleState, folder: Path | None = None) -> None:
        self.files, self.is_full, self.asked = ResultFiles(folder), False, list[str]()
        self._page, self._turn, self._changed, self._ended = page, 0, asyncio.Condition(), False

    async def put(self, page: ConsoleState) -> None:
        """Show this from now on."""
        async with self._changed:
            self._page, self._turn = page, self._turn + 1
            self._changed.notify_all()

    async def end(self) -> None:
        """Let all go."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def stream_states(self, run_id: str) -> AsyncIterator[bytes]:
        self.asked.append(run_id)
        turn = -1
        while not self._ended:
            if self._turn != turn:
                turn = self._turn
                yield self._page.to_json()
            async with self._changed:
                await self._changed.wait_for(partial(self._new_since, turn))

    def _new_since(self, turn: int) -> bool:
        return self._ended or self._turn != turn


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def served(told: Told, port: int, token: str = TOKEN) -> AsyncIterator[str]:
    """A console that answers at this port while the block lasts; gives the address that opens it."""
    server = create_server(create_console_app(told, token, COOKIE))  # type: ignore[arg-type]
    listening = socket.create_server(("127.0.0.1", port))
    serving = asyncio.ensure_future(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{port}/?token={token}"
    finally:
        await told.end()
        server.should_exit = True
        await serving
        listening.close()
