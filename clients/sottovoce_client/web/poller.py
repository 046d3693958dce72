"""Poll the services for the web console: once a second for all browsers together, and only while a browser is connected."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

from pydantic_core import to_json

from sottovoce_client.runs.monitoring import (
    CaptureListItem,
    RunHistory,
    RunListItem,
    RunPlan,
    RunView,
    choose_run,
    make_capture_list_item,
    make_run_list_item,
    make_run_view,
    parse_observation,
    parse_plan,
)
from sottovoce_client.web.result_files import ReportEntry, ResultFiles, ResultListing
from sottovoce_client.web.service_clients import ConsoleOptions, ServiceClients, WatchView, read_watch
from sottovoce_core.errors import NotFound, SottovoceError
from sottovoce_core.text import escape_control


@dataclass(frozen=True, slots=True)
class ConsoleProblem:
    """An error of a poll, and the Unix time at which it first occurred."""

    text: str
    first_seen: float


@dataclass(frozen=True, slots=True)
class ConsoleState:
    """State that the page shows.

    Attributes:
        time: Unix time.
        run: The selected run; None: there is no run, or no service and no result knows it.
        runs, captures, reports: Lists of the page, the newest first.
        watch: E-values of this run.
        problems: Errors of the last polls.
        folder: Results folder; empty: none was given.
        is_stale: True if the coordinator does not answer, so that the state of the run is old.
    """

    time: float
    version: str
    run: RunView | None = None
    runs: tuple[RunListItem, ...] = ()
    captures: tuple[CaptureListItem, ...] = ()
    reports: tuple[ReportEntry, ...] = ()
    watch: WatchView | None = None
    problems: tuple[ConsoleProblem, ...] = ()
    folder: str = ""
    is_stale: bool = False

    def to_json(self) -> bytes:
        """Return JSON on one line; non-finite numbers are strings, which JavaScript's `Number` converts."""
        return to_json(self, inf_nan_mode="strings")


POLL_PERIOD_S = 1.0
_LIST_PERIOD_S, _FILE_SCAN_PERIOD_S = 5.0, 10.0
"""Seconds between two requests for the lists, and between two scans of the results folder."""
MAX_BROWSERS = 32
"""Maximum number of simultaneously connected browsers."""
_MAX_REMEMBERED_RUNS = 16
"""Maximum number of runs whose histories are kept."""


@dataclass(slots=True)
class _PolledRun:
    """A run that a browser shows or has shown."""

    attempt: int
    plan: RunPlan
    history: RunHistory
    view: RunView | None = None


class Poller:
    """Shared state of all connected browsers, which `run` polls from the services."""

    def __init__(self, options: ConsoleOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._clock = options, clock
        self._files = ResultFiles(options.folder)
        self._services: ServiceClients | None = None
        self._browsers: Counter[str] = Counter()  # by the run that they show
        self._has_browsers, self._ended = asyncio.Event(), False
        self._changed, self._poll_count = asyncio.Condition(), 0
        self._states: dict[str, bytes] = {}
        self._polled: dict[str, _PolledRun] = {}
        self._runs: tuple[RunListItem, ...] = ()
        self._captures: tuple[CaptureListItem, ...] = ()
        self._results, self._watched = ResultListing(), tuple[WatchView, ...]()
        self._problems: dict[str, ConsoleProblem] = {}
        self._due: dict[str, float] = {}

    @property
    def files(self) -> ResultFiles:
        """Index of the results folder."""
        return self._files

    @property
    def is_full(self) -> bool:
        """True if no more browsers are accepted."""
        return self._browsers.total() >= MAX_BROWSERS

    async def stream_states(self, run_id: str) -> AsyncIterator[bytes]:
        """Yield the state as JSON after every poll, until the console ends.

        Args:
            run_id: The run to show; empty: the newest active run, else the newest run.
        """
        with self._register_browser(run_id):
            seen = 0
            while await self._wait_for_poll(seen, run_id):
                seen = self._poll_count
                yield self._states[run_id]

    async def _wait_for_poll(self, seen: int, run_id: str) -> bool:
        """Wait for a poll after poll number `seen`; return False if the console has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or (self._poll_count > seen and run_id in self._states))
        return not self._ended

    @contextmanager
    def _register_browser(self, run_id: str) -> Iterator[None]:
        self._browsers[run_id] += 1
        self._has_browsers.set()
        try:
            yield
        finally:
            self._browsers[run_id] -= 1
            self._browsers += Counter()  # removes zero counts
            if not self._browsers:
                self._has_browsers.clear()
                self._states.clear()  # the next browser waits for a new state

    async def end(self) -> None:
        """End all streams."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def run(self) -> None:
        """Poll once a second while a browser is connected, until cancelled."""
        async with AsyncExitStack() as stack:
            while True:
                await self._has_browsers.wait()
                await self._poll(stack)
                await asyncio.sleep(POLL_PERIOD_S)

    # ---- one poll -----------------------------------------------------------------------------------------

    async def _poll(self, stack: AsyncExitStack) -> None:
        await self._try("services", self._connect(stack))
        if self._services is not None:
            await self._every(_LIST_PERIOD_S, "runs", self._list_runs)
            if self._services.eavesdropper is not None:
                await self._every(_LIST_PERIOD_S, "captures", self._list_captures)
        await self._every(_FILE_SCAN_PERIOD_S, "files", self._scan_files)
        if self._options.watch:
            await self._every(2 * POLL_PERIOD_S, "watch", self._watch)
        selected = {requested: requested or choose_run(self._run_list) for requested in tuple(self._browsers)}
        listed = {each.run_id for each in self._runs}
        ended = {
            run_id for run_id in self._results.run_views if run_id not in listed
        }  # unknown to the running services
        for run_id in set(selected.values()) - ended - {""} if self._services is not None else ():
            await self._try(f"run {run_id}", self._poll_run(run_id))
        current = {f"run {run_id}" for run_id in selected.values()}
        for stale in [task for task in self._problems if task.startswith("run ") and task not in current]:
            del self._problems[stale]
        self._states = {requested: self._state(run_id).to_json() for requested, run_id in selected.items()}
        async with self._changed:
            self._poll_count += 1
            self._changed.notify_all()

    async def _every(self, seconds: float, task: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task if it is due; a task that failed is due at once."""
        if task in self._problems or self._clock() >= self._due.get(task, 0.0):
            self._due[task] = self._clock() + seconds
            await self._try(task, work())

    async def _try(self, task: str, work: Awaitable[None]) -> None:
        """Run a task; store the error if it fails, with the time of the first failure."""
        try:
            await work
            self._problems.pop(task, None)
        except SottovoceError as error:
            before = self._problems.get(task)
            self._problems[task] = ConsoleProblem(
                escape_control(str(error)), time.time() if before is None else before.first_seen
            )

    async def _connect(self, stack: AsyncExitStack) -> None:
        """Connect to the services at their current addresses."""
        try:
            addresses = await asyncio.to_thread(self._options.resolve_addresses)
        except NotFound:
            self._services = None
            await stack.aclose()
            raise
        if self._services is None or self._services.addresses != addresses:
            self._services = None
            await stack.aclose()
            self._services = await ServiceClients.open(addresses, self._options.insecure, stack)
            self._due.clear()

    async def _list_runs(self) -> None:
        assert self._services is not None  # noqa: S101 - `_poll` calls this only when connected
        self._runs = tuple(map(make_run_list_item, await self._services.list_runs()))

    async def _list_captures(self) -> None:
        assert self._services is not None  # noqa: S101 - as above
        self._captures = tuple(map(make_capture_list_item, await self._services.list_captures()))

    async def _scan_files(self) -> None:
        self._results = await asyncio.to_thread(self._files.list_results)

    async def _watch(self) -> None:
        self._watched = ()  # old values are not shown
        self._watched = await asyncio.to_thread(read_watch, self._options.watch)

    async def _poll_run(self, run_id: str) -> None:
        """Fetch the state of a run, and update its history and view."""
        assert self._services is not None  # noqa: S101 - as above
        run = await self._services.get_run(run_id)
        polled = self._polled.pop(run_id, None)
        if polled is None or polled.attempt != run.attempt:  # learners may have left or joined
            polled = _PolledRun(run.attempt, parse_plan(run.spec), RunHistory())
        self._polled[run_id] = polled
        traffic = None if polled.plan.capture == "none" else await self._services.fetch_traffic(run_id)
        polled.history.add(parse_observation(run, traffic, self._clock()))
        polled.view = make_run_view(make_run_list_item(run), polled.plan, polled.history)
        while len(self._polled) > _MAX_REMEMBERED_RUNS:
            self._polled.pop(next(iter(self._polled)))

    @property
    def _run_list(self) -> tuple[RunListItem, ...]:
        """Runs that the coordinator lists, then runs that only the results folder holds, each the newest first."""
        listed = {each.run_id for each in self._runs}
        found = [_make_list_item(run) for run in self._results.run_views.values() if run.run_id not in listed]
        return (*self._runs, *found)

    def _state(self, run_id: str) -> ConsoleState:
        view = self._polled[run_id].view if run_id in self._polled else self._results.run_views.get(run_id)
        problems = {
            task: problem
            for task, problem in self._problems.items()
            if not task.startswith("run ") or task == f"run {run_id}"
        }
        is_stale = bool(problems.keys() & {"services", "runs", f"run {run_id}"})
        # The last answers of services that have ended are old: the results hold the final state.
        ended = self._results.ended_runs if is_stale else {}
        if view is not None and run_id in ended:
            end = ended[run_id]
            view = replace(view, state=end.state, detail=end.detail, ended_at=view.ended_at or end.ended_at)
        if view is not None and view.ended_at is not None and not self._options.addresses.coordinator:
            problems.pop("services", None)  # after a run its folder names no services
        watched = [each for each in self._watched if view is not None and each.run == view.name]
        return ConsoleState(
            time=time.time(),
            version=version("sottovoce"),
            run=view,
            runs=tuple(_set_end(each, ended.get(each.run_id)) for each in self._run_list),
            captures=_merge_captures(self._captures, self._results.captures, is_stale=is_stale),
            reports=self._results.reports,
            watch=watched[0] if watched else None,
            problems=tuple({each.text: each for each in problems.values()}.values()),
            folder=escape_control(str(self._options.folder or "")),
            is_stale=is_stale,
        )


# ---- merging answers of services with results ------------------------------------------------------------------------


def _set_end(item: RunListItem, end: RunListItem | None) -> RunListItem:
    """Set the final state of a run from its results; None: they do not hold it."""
    if end is None:
        return item
    return replace(item, state=end.state, detail=end.detail, ended_at=item.ended_at or end.ended_at)


def _merge_captures(
    listed: tuple[CaptureListItem, ...], found: tuple[CaptureListItem, ...], *, is_stale: bool = False
) -> tuple[CaptureListItem, ...]:
    """Merge captures of the eavesdropper with those of the folder, then append those that only the folder holds.

    Args:
        listed: Captures that the eavesdropper lists.
        found: Captures in the folder, with the paths under which they can be opened.
        is_stale: True if the eavesdropper no longer answers, so that the files in the folder are newer.
    """
    by_name = {each.name: each for each in found}
    merged = [
        each
        if each.name not in by_name
        else by_name[each.name]
        if is_stale
        else replace(each, path=by_name[each.name].path)
        for each in listed
    ]
    return (*merged, *(each for each in found if each.name not in {one.name for one in listed}))


def _make_list_item(run: RunView) -> RunListItem:
    return RunListItem(run.run_id, run.state, run.detail, run.started_at, run.ended_at, run.rounds_done)
