"""Asking the services: once a second for all browsers together, and not at all while nobody looks."""

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
from sottovoce_core.errors import FailedPrecondition, SottovoceError
from sottovoce_core.text import escape_control


@dataclass(frozen=True, slots=True)
class ConsoleProblem:
    """Who does not answer, as it was said, and since when."""

    text: str
    first_seen: float


@dataclass(frozen=True, slots=True)
class ConsoleState:
    """All that is shown.

    Attributes:
        at: Unix time.
        run: that is looked at; None: there is none, or nobody knows it.
        runs, captures, reports: to open, the newest first.
        watch: of this run.
        problems: who does not answer.
        folder: of the results; empty: none was given.
        gone: whether the coordinator does not answer, so that what is shown of the run is old.
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
        """JSON on one line; numbers that are not finite are text, which scripts make numbers of."""
        return to_json(self, inf_nan_mode="strings")


POLL_PERIOD_S = 1.0
_LIST_PERIOD_S, _FILE_SCAN_PERIOD_S = 5.0, 10.0
"""How often lists are asked for, and the folder is looked through."""
MAX_BROWSERS = 32
"""Browsers at a time."""
_MAX_REMEMBERED_RUNS = 16
"""Runs whose looks are remembered."""


@dataclass(slots=True)
class _Seen:
    """A run that is, or was, looked at."""

    attempt: int
    plan: RunPlan
    history: RunHistory
    view: RunView | None = None


class Poller:
    """What is known, for all who look; `run` asks for it."""

    def __init__(self, options: ConsoleOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._asked, self._clock = options, clock
        self._files = ResultFiles(options.folder)
        self._services: ServiceClients | None = None
        self._lookers: Counter[str] = Counter()
        self._wanted, self._ended = asyncio.Event(), False
        self._changed, self._turn = asyncio.Condition(), 0
        self._pages: dict[str, bytes] = {}
        self._known: dict[str, _Seen] = {}
        self._runs: tuple[RunListItem, ...] = ()
        self._captures: tuple[CaptureListItem, ...] = ()
        self._results, self._watched = ResultListing(), tuple[WatchView, ...]()
        self._problems: dict[str, ConsoleProblem] = {}
        self._due: dict[str, float] = {}

    @property
    def files(self) -> ResultFiles:
        """What may be opened."""
        return self._files

    @property
    def is_full(self) -> bool:
        """Whether nobody more may look."""
        return self._lookers.total() >= MAX_BROWSERS

    async def stream_states(self, run_id: str) -> AsyncIterator[bytes]:
        """The page as JSON, again at every look; ends when the console does.

        Args:
            run_id: the run to look at; empty: the newest, one under way before others.
        """
        with self._looking(run_id):
            turn = 0
            while await self._next(turn, run_id):
                turn = self._turn
                yield self._pages[run_id]

    async def _next(self, turn: int, run_id: str) -> bool:
        """Wait for a look after that one; False: there is none any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or (self._turn > turn and run_id in self._pages))
        return not self._ended

    @contextmanager
    def _looking(self, run_id: str) -> Iterator[None]:
        self._lookers[run_id] += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._lookers[run_id] -= 1
            self._lookers += Counter()  # drops who is at zero
            if not self._lookers:
                self._wanted.clear()
                self._pages.clear()  # whoever looks next sees what is, not what was

    async def end(self) -> None:
        """Let all who look go."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def run(self) -> None:
        """Look once a second while anybody does, until cancelled."""
        async with AsyncExitStack() as stack:
            while True:
                await self._wanted.wait()
                await self._look(stack)
                await asyncio.sleep(POLL_PERIOD_S)

    # ---- one look -----------------------------------------------------------------------------------------

    async def _look(self, stack: AsyncExitStack) -> None:
        await self._try("services", self._connect(stack))
        if self._services is not None:
            await self._every(_LIST_PERIOD_S, "runs", self._list_runs)
            if self._services.eavesdropper is not None:
                await self._every(_LIST_PERIOD_S, "captures", self._list_captures)
        await self._every(_FILE_SCAN_PERIOD_S, "files", self._look_through)
        if self._asked.watch:
            await self._every(2 * POLL_PERIOD_S, "watch", self._watch)
        looked = {wanted: wanted or choose_run(self._listed) for wanted in tuple(self._lookers)}
        told = {each.run_id for each in self._runs}
        over = {run_id for run_id in self._results.run_views if run_id not in told}  # services of now do not know them
        for run_id in set(looked.values()) - over - {""} if self._services is not None else ():
            await self._try(f"run {run_id}", self._ask(run_id))
        asked = {f"run {run_id}" for run_id in looked.values()}
        for stale in [what for what in self._problems if what.startswith("run ") and what not in asked]:
            del self._problems[stale]
        # Numbers that are not finite stand as text, which scripts make numbers of.
        self._pages = {wanted: to_json(self._page(run_id), inf_nan_mode="strings") for wanted, run_id in looked.items()}
        async with self._changed:
            self._turn += 1
            self._changed.notify_all()

    async def _every(self, seconds: float, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do so where it is due; what failed is due at once."""
        if what in self._problems or self._clock() >= self._due.get(what, 0.0):
            self._due[what] = self._clock() + seconds
            await self._try(what, work())

    async def _try(self, what: str, work: Awaitable[None]) -> None:
        """Do something, and remember why it could not be done, and since when."""
        try:
            await work
            self._problems.pop(what, None)
        except SottovoceError as error:
            before = self._problems.get(what)
            self._problems[what] = ConsoleProblem(
                escape_control(str(error)), time.time() if before is None else before.first_seen
            )

    async def _connect(self, stack: AsyncExitStack) -> None:
        """To where the services are now."""
        try:
            places = await asyncio.to_thread(self._asked.resolve_addresses)
        except FailedPrecondition:
            self._services = None
            await stack.aclose()
            raise
        if self._services is None or self._services.addresses != places:
            self._services = None
            await stack.aclose()
            self._services = await ServiceClients.open(places, self._asked.insecure, stack)
            self._due.clear()

    async def _list_runs(self) -> None:
        assert self._services is not None  # noqa: S101 - `_look` has seen to it
        self._runs = tuple(map(make_run_list_item, await self._services.list_runs()))

    async def _list_captures(self) -> None:
        assert self._services is not None  # noqa: S101 - as above
        self._captures = tuple(map(make_capture_list_item, await self._services.list_captures()))

    async def _look_through(self) -> None:
        self._results = await asyncio.to_thread(self._files.list_results)

    async def _watch(self) -> None:
        self._watched = ()  # what is old is not shown
        self._watched = await asyncio.to_thread(read_watch, self._asked.watch)

    async def _ask(self, run_id: str) -> None:
        """How a run stands."""
        assert self._services is not None  # noqa: S101 - as above
        told = await self._services.get_run(run_id)
        seen = self._known.pop(run_id, None)
        if seen is None or seen.attempt != told.attempt:  # or learners have left or joined
            seen = _Seen(told.attempt, parse_plan(told.spec), RunHistory())
        self._known[run_id] = seen
        heard = None if seen.plan.capture == "none" else await self._services.fetch_traffic(run_id)
        seen.history.add(parse_observation(told, heard, self._clock()))
        seen.view = make_run_view(make_run_list_item(told), seen.plan, seen.history)
        while len(self._known) > _MAX_REMEMBERED_RUNS:
            self._known.pop(next(iter(self._known)))

    @property
    def _listed(self) -> tuple[RunListItem, ...]:
        """Runs that the coordinator tells of, and then those that only their results tell of, the newest first."""
        told = {each.run_id for each in self._runs}
        found = [_ended_line(run) for run in self._results.run_views.values() if run.run_id not in told]
        return (*self._runs, *found)

    def _page(self, run_id: str) -> ConsoleState:
        shown = self._known[run_id].view if run_id in self._known else self._results.run_views.get(run_id)
        own = {
            what: told
            for what, told in self._problems.items()
            if not what.startswith("run ") or what == f"run {run_id}"
        }
        away = bool(own.keys() & {"services", "runs", f"run {run_id}"})
        # What services that are gone said last is old: their results say how it ended.
        ended = self._results.ended_runs if away else {}
        if shown is not None and run_id in ended:
            end = ended[run_id]
            shown = replace(shown, state=end.state, detail=end.detail, ended_at=shown.ended_at or end.ended_at)
        watched = [each for each in self._watched if shown is not None and each.run == shown.name]
        return ConsoleState(
            time=time.time(),
            version=version("sottovoce"),
            run=shown,
            runs=tuple(_as_ended(each, ended.get(each.run_id)) for each in self._listed),
            captures=_merged(self._captures, self._results.captures, gone=away),
            reports=self._results.reports,
            watch=watched[0] if watched else None,
            problems=tuple({each.text: each for each in own.values()}.values()),
            folder=escape_control(str(self._asked.folder or "")),
            is_stale=away,
        )


# ---- what services say, and results ---------------------------------------------------------------------------------


def _as_ended(line: RunListItem, end: RunListItem | None) -> RunListItem:
    """A run in the list, as its results say that it ended; None: they say nothing."""
    if end is None:
        return line
    return replace(line, state=end.state, detail=end.detail, ended_at=line.ended_at or end.ended_at)


def _merged(
    told: tuple[CaptureListItem, ...], found: tuple[CaptureListItem, ...], *, gone: bool = False
) -> tuple[CaptureListItem, ...]:
    """Captures that the eavesdropper tells of, with where they can be opened; then those that only lie in the folder.

    Args:
        told: by the eavesdropper.
        found: in the folder.
        gone: it tells nothing any more: what lies in the folder is newer.
    """
    by_name = {each.name: each for each in found}
    own = [each if each.name not in by_name else _as_found(each, by_name[each.name], gone) for each in told]
    return (*own, *(each for each in found if each.name not in {one.name for one in told}))


def _as_found(told: CaptureListItem, found: CaptureListItem, gone: bool) -> CaptureListItem:
    """A capture of which both say something."""
    return found if gone else replace(told, path=found.path)


def _ended_line(run: RunView) -> RunListItem:
    """The line of a run in the list."""
    return RunListItem(run.run_id, run.state, run.detail, run.started_at, run.ended_at, run.rounds_done)
