"""The coordinator's gRPC face: learners join, report and follow; operators start, stop and watch runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import structlog

from sottovoce.errors import NotReady, RemoteProtocolError, SottovoceError, SpecError, StrangerError, Unavailable
from sottovoce.running.run import Run, build_run
from sottovoce.spec import LEARNER_NAME, RunSpec
from sottovoce_coordinator.courses import Course, PastRun, failed
from sottovoce_coordinator.fencing import Claim, Membership
from sottovoce_coordinator.runs import Overhearing, RunBook, RunState, missing
from sottovoce_coordinator.store import KeptRun, Store
from sottovoce_rpc.codec import to_fields
from sottovoce_rpc.directives import Confirmed, Directive, Issued, Origin, Stop, to_wire
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.server import HELLO_S, Service, announce, channel, page, serve_until_stopped, start_server
from sottovoce_rpc.specs import check_size, spec_from_wire, spec_to_wire
from sottovoce_rpc.status import answering, as_error
from sottovoce_rpc.tasks import Tasks, beside
from sottovoce_rpc.waiting import Waiting
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, eavesdropper_pb2, eavesdropper_pb2_grpc

log = structlog.get_logger()

NAME = "sottovoce_wire.v1.Coordinator"
WATCH_S = 0.2
_KEEP_S = 1.0
"""How old what is written of the learners' progress may be."""
_JOINING_S = 20.0
_CAPTURE_S = 10.0
_CLOSE_S = 60.0
"""For an eavesdropper to close a capture: it waits for what is on its way, and writes what it holds."""
_CAPTURED_S = 2.0
"""How often an eavesdropper is asked whether it still captures a run."""
MOST_RUNS = 32
"""Runs that are remembered."""
MOST_LEARNERS, MOST_EDGES = 1_024, 65_536
"""In a run: every learner is told all edges."""
_MOST_EPOCHS = 65_536
"""That may be announced at a time, where the network changes: one for each learner and round of a window."""
_NAMED = 10
"""Learners that an error names."""
_LONGEST_ADDRESS = 300
"""Characters of a learner's: a name of a host has at most 253."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """How a coordinator is deployed.

    Attributes:
        listen: `host:port` to listen on; port 0 picks one.
        eavesdropper: address of an eavesdropper, for runs that are captured.
        allow_imports: whether a run spec may name code to import.
        state: a folder; runs that are under way go on when a coordinator is started on it again. None: they end with it.
    """

    listen: str = "127.0.0.1:0"
    eavesdropper: str | None = None
    allow_imports: bool = False
    state: Path | None = None


@dataclass(slots=True)
class _Member:
    """A learner that has joined, and the directives on their way to it."""

    claim: Claim
    address: str
    origin: Origin
    run_id: str = ""  # it would go on with, and was granted so much of it
    granted: int = 0
    directives: asyncio.Queue[coordinator_pb2.Directive] = field(default_factory=asyncio.Queue)
    displaced: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The learner's."""
        return self.claim.name

    def tell(self, run_id: str, directive: Directive) -> None:
        """Say something as soon as the stream allows."""
        self.directives.put_nowait(to_wire(run_id, directive, self.origin))


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """One run at a time."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._store = Store(config.state)
        self._members: dict[str, _Member] = {}
        self._known = self._store.members()
        self._joined = asyncio.Condition()
        self._runs: dict[str, Course | PastRun] = {}  # oldest first; the last one may be under way
        self._starting = asyncio.Lock()
        self._tasks = Tasks()
        self.service: Service | None = None

    async def start(self) -> str:
        """Take up what a coordinator before this one has left, and listen; returns the address."""
        try:
            await self._resume()
            self.service = await start_server(
                self.config.listen,
                lambda server: coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server),
                [NAME],
            )
        except BaseException:
            self._store.close()
            raise
        if self._store.durable:
            self._tasks.start(self._keep(), "progress is no longer written")
        return self.service.address

    async def stop(self) -> None:
        """End the service, and the run unless it is kept."""
        if self._store.durable:
            self._write_progress()
        else:
            self._end(self._current, RunState.STOPPED, "the coordinator was told to stop")
        await asyncio.sleep(0)  # the streams take up the stop that was queued for them
        await self._tasks.end()
        if self.service is not None:
            await self.service.stop()
        self._store.close()

    # ---- what is kept -------------------------------------------------------------------------------------

    async def _resume(self) -> None:
        """The runs of this state; the last one goes on as its learners come back."""
        for kept in self._store.runs(MOST_RUNS):
            over = coordinator_pb2.Run.FromString(kept.view).HasField("ended_at")
            self._runs[kept.run_id] = PastRun(kept) if over else await self._resumed(kept)
        if (course := self._current) is not None:
            log.info("run goes on", run_id=course.book.run_id, granted=course.book.clock.granted)
            for index, since in course.book.away.items():
                self._tasks.start(self._deadline(course, index, since), "nobody misses a learner")
            self._accompany(course)

    async def _resumed(self, kept: KeptRun) -> Course | PastRun:
        """A run under way; over where it cannot be built again, such as without --allow-imports."""
        now = datetime.now(UTC)
        try:
            spec = await asyncio.to_thread(_spec, kept.spec, imports=self.config.allow_imports)
            run = await asyncio.to_thread(_built, spec, kept.n_features)
            return await asyncio.to_thread(Course.resumed, kept, run, now)
        except SottovoceError as error:
            over = failed(kept, f"its coordinator was started again and cannot go on with it: {error}", now)
            self._store.keep(kept.run_id, over.SerializeToString())
            log.error("run cannot go on", run_id=kept.run_id, reason=str(error))
            return PastRun(replace(kept, view=over.SerializeToString()))

    async def _keep(self) -> None:
        """Write down how far the learners are, about once a second."""
        while True:
            await asyncio.sleep(_KEEP_S)
            self._write_progress()

    def _write_progress(self) -> None:
        """Of the run that is under way; a disk that is full has no part in this."""
        course = self._current
        if course is not None and not course.book.ended:
            with self._whatever_disk():
                self._store.keep(course.book.run_id, course.view().SerializeToString())

    @contextlib.contextmanager
    def _whatever_disk(self) -> Iterator[None]:
        """What cannot be written now is tried again soon."""
        try:
            yield
        except Unavailable as error:
            log.warning("not written", reason=str(error))

    def _reserve(self, course: Course) -> None:
        """Before anybody is told how far it may go.

        Raises:
            Unavailable: it cannot be written.
        """
        book = course.book
        if book.clock.granted:
            ahead = (book.run.spec.clock.window + 1) // 2
            self._store.grant(book.run_id, book.clock.granted, ahead, course.view().SerializeToString())

    # ---- learners -----------------------------------------------------------------------------------------

    async def Join(self, events: AsyncIterator[coordinator_pb2.Event], context: Context) -> None:  # type: ignore[override] # reads and writes, so it is no generator
        """Hold the stream of one learner: its reports come in, its directives go out."""
        async with answering(context):
            member = await _introduced(events, self._store.origin)
            await self._admit(member, events, context)
            try:
                await self._welcome(member)
                async with beside(_tell(member, context), _displacement(member)):
                    async for event in events:
                        self._hear(member, event)
            finally:
                if self._members.get(member.name) is member:
                    del self._members[member.name]
                    log.info("left", learner=member.name)
                    self._miss(member.name)

    async def _admit(self, member: _Member, events: AsyncIterator[coordinator_pb2.Event], context: Context) -> None:
        """Let a learner in: with a new incarnation that it confirms, or with that of a process that never stopped.

        Raises:
            SottovoceError: it may not be this learner.
        """
        claim, known = member.claim, self._known.get(member.name, Membership())
        now = known.admit(claim, live=member.name in self._members, journaled=self._journaled(member))
        self._remember(member.name, now)
        if not claim.rejoins:
            await context.write(to_wire("", Issued(now.issued), member.origin))
            event = await _next(events, "a confirmation")
            if event is None or event.WhichOneof("event") != "confirmation":
                raise RemoteProtocolError("a learner must confirm the incarnation that it was issued")
            now = self._known[member.name].confirm(claim, event.confirmation.incarnation)
            self._remember(member.name, now)
        member.tell("", Confirmed(now.confirmed))

    def _remember(self, name: str, known: Membership) -> None:
        """Durable before it is told."""
        self._store.remember(name, known)
        self._known[name] = known

    def _journaled(self, member: _Member) -> int:
        """Rounds that a learner is known to have journaled in the run that it is in."""
        book = None if self._current is None else self._current.book
        if book is None or member.run_id != book.run_id or member.name not in book.run.spec.names:
            return 0
        return book.statuses[book.run.spec.names.index(member.name)].rounds_said

    async def _welcome(self, member: _Member) -> None:
        before = self._members.get(member.name)
        self._members[member.name] = member
        if before is not None:
            before.displaced.set()
        course = self._current
        if course is not None and not course.book.ended and member.name in course.book.run.spec.names:  # it was away
            self._take_back(course, member)
        elif member.run_id:
            member.tell(member.run_id, self._farewell(member.run_id))
        log.info("joined", learner=member.name, address=member.address)
        async with self._joined:
            self._joined.notify_all()

    def _take_back(self, course: Course, member: _Member) -> None:
        """A learner of the run is there again, and may know of more grants than this coordinator."""
        book = course.book
        index = book.run.spec.names.index(member.name)
        book.back(index)
        if member.run_id == book.run_id:
            book.clock.resume(member.granted)
        self._reserve(course)
        self._tell(book, {member.name: book.briefing(index)})
        self._go_on(course)

    def _farewell(self, run_id: str) -> Stop:
        """Why a learner cannot go on with a run. One that is not known here may go on elsewhere."""
        known = self._runs.get(run_id)
        if known is None:
            return Stop(
                "its coordinator does not know the run: it was started again without --state, or with another one"
            )
        return known.farewell()

    def _hear(self, member: _Member, event: coordinator_pb2.Event) -> None:
        """A learner's progress. What a newer learner tells besides is passed over.

        Raises:
            StrangerError: it reports in another one's name.
        """
        if event.WhichOneof("event") != "report":
            return
        status = LearnerStatus.from_wire(event.report.status)
        if status.learner != member.name:
            raise StrangerError(f"a report on this stream must be of learner {member.name!r}, got {status.learner!r}")
        course = self._current
        if course is None or status.run_id != course.book.run_id or member.name not in course.book.run.spec.names:
            return
        course.book.report(status, Waiting.from_wire(event.report))
        self._go_on(course)
        if course.book.ended:
            self._after_end(course)

    def _miss(self, name: str) -> None:
        """A learner's stream has ended: who is away is told at once; the run ends if it is not back by the deadline."""
        course = self._current
        if course is None or course.book.ended or name not in course.book.run.spec.names:
            return
        index, since = course.book.run.spec.names.index(name), datetime.now(UTC)
        course.book.left(index, since)
        log.warning("learner is gone", learner=name, round=course.book.statuses[index].rounds_done)
        self._tasks.start(self._deadline(course, index, since), "nobody misses a learner")

    async def _deadline(self, course: Course, index: int, since: datetime) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(course.over.wait(), course.book.run.spec.clock.deadline_s)
        course.book.miss(index, since)
        if course.book.ended:
            self._after_end(course)

    # ---- operators ----------------------------------------------------------------------------------------

    async def StartRun(self, request: coordinator_pb2.StartRunRequest, context: Context) -> coordinator_pb2.Run:
        """Start a run on the learners that have joined."""
        async with answering(context):
            self._require_idle()
            async with self._starting:
                spec = await asyncio.to_thread(_spec, request.spec, imports=self.config.allow_imports)
                course = await self._start(spec, request)
            book = course.book
            log.info("run", run_id=book.run_id, learners=len(book.addresses), capture=book.run.spec.capture)
            return course.view()

    async def StopRun(self, request: coordinator_pb2.StopRunRequest, context: Context) -> coordinator_pb2.Run:
        """Stop the run; one that has ended is as it was."""
        async with answering(context):
            run = self._the_run(request.run_id)
            if isinstance(run, Course):
                self._end(run, RunState.STOPPED, request.reason or "stopped by an operator")
            return run.view()

    async def GetRun(self, request: coordinator_pb2.GetRunRequest, context: Context) -> coordinator_pb2.Run:
        """A run as it stands, with its spec."""
        async with answering(context):
            return self._the_run(request.run_id).view(whole=True)

    async def ListRuns(
        self, request: coordinator_pb2.ListRunsRequest, context: Context
    ) -> coordinator_pb2.ListRunsResponse:
        """The runs that are remembered."""
        async with answering(context):
            newest = dict(reversed(self._runs.items()))
            courses, following = page(newest, request.page_size, request.page_token)
            runs = [course.view() for course in courses]
            return coordinator_pb2.ListRunsResponse(runs=runs, next_page_token=following)

    async def WatchRun(
        self, request: coordinator_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.Run]:
        """The run as it stands, several times a second, until it has ended."""
        async with answering(context):
            run = self._the_run(request.run_id)
            while isinstance(run, Course) and not run.book.ended:
                yield run.view()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(run.over.wait(), WATCH_S)
            if isinstance(run, Course) and run.closing is not None:  # the last view comes when the capture is complete
                await asyncio.wait([run.closing])
            yield run.view()

    async def RebindLearner(
        self, request: coordinator_pb2.RebindLearnerRequest, context: Context
    ) -> coordinator_pb2.RebindLearnerResponse:
        """Take whatever state folder the next learner of this name has."""
        async with answering(context):
            if request.learner not in self._known:
                raise NotReady(f"no learner {request.learner!r} has joined; there are {_named(sorted(self._known))}")
            if request.learner in self._members:
                raise NotReady(f"learner {request.learner!r} is here, with the state folder that it has: stop it first")
            self._remember(request.learner, self._known[request.learner].unbound())
            log.warning("learner unbound", learner=request.learner)
        return coordinator_pb2.RebindLearnerResponse()

    @property
    def _current(self) -> Course | None:
        """The newest run, under way or not; None where it ended before this process began."""
        newest = next(reversed(self._runs.values()), None)
        return newest if isinstance(newest, Course) else None

    def _the_run(self, run_id: str) -> Course | PastRun:
        if run_id not in self._runs:
            known = f"the last one is {next(reversed(self._runs))!r}" if self._runs else "there is none"
            raise NotReady(f"no run {run_id!r}: {known}")
        return self._runs[run_id]

    # ---- a run's course -----------------------------------------------------------------------------------

    def _require_idle(self) -> None:
        if self._starting.locked():
            raise NotReady("another run is being started")
        if self._current is not None and not self._current.book.ended:
            raise NotReady(f"run {self._current.book.run_id} is under way: stop it first")

    async def _start(self, spec: RunSpec, request: coordinator_pb2.StartRunRequest) -> Course:
        n_features = request.n_features
        if n_features < 1:
            raise SpecError(f"n_features must be at least 1, got {n_features}")
        _require_size(spec)
        await self._all_joined(spec)  # before anything as large as a network of them is made
        run = await asyncio.to_thread(_built, spec, n_features)
        self._require_joined(spec)  # gone in the meantime
        addresses = tuple(self._members[name].address for name in spec.names)
        run_id = f"{spec.name}-{uuid.uuid4().hex[:12]}"
        book = await asyncio.to_thread(RunBook, run_id, run, n_features, addresses)
        book.overhearing = await self._open_capture(book, request)
        try:
            briefings = await asyncio.to_thread(book.briefings)
            self._require_joined(spec)
        except BaseException:
            self._close_capture(book)
            raise
        course = Course(book, datetime.now(UTC), durable=self._store.durable)
        try:
            self._store.begin(course.kept())
        except SottovoceError:
            self._close_capture(book)
            raise
        self._runs[book.run_id] = course
        while len(self._runs) > MOST_RUNS:
            del self._runs[next(iter(self._runs))]
        self._begin(course, briefings)
        return course

    def _require_joined(self, spec: RunSpec) -> None:
        if absent := missing(spec.names, self._members):
            raise NotReady(f"learners have left: {_named(absent)}")

    async def _all_joined(self, spec: RunSpec) -> None:
        async with self._joined:
            try:
                await asyncio.wait_for(
                    self._joined.wait_for(lambda: not missing(spec.names, self._members)),
                    min(_JOINING_S, spec.clock.deadline_s),
                )
            except TimeoutError:
                absent = missing(spec.names, self._members)
                raise NotReady(
                    f"{len(absent)} of {spec.n_learners} learners have not joined: {_named(absent)}"
                ) from None

    async def _open_capture(self, book: RunBook, request: coordinator_pb2.StartRunRequest) -> Overhearing:
        capture = book.run.spec.capture
        if capture == "none":
            return Overhearing()
        address = self.config.eavesdropper
        if address is None:
            raise NotReady(
                f"capture: {capture} needs an eavesdropper; this coordinator was given none (--eavesdropper)"
            )
        edges = book.routes() if capture == "relay" else []
        opening = eavesdropper_pb2.OpenCaptureRequest(
            run_id=book.run_id,
            spec=spec_to_wire(book.run.spec),
            routes=[eavesdropper_pb2.Route(caller=i, callee=j, target=target) for i, j, target in edges],
            n_features=request.n_features,
            fields=to_fields(book.run.algorithm.field_shapes()),
            world=request.world if request.HasField("world") else None,
            replica=request.replica if request.HasField("replica") else None,
        )
        async with channel(address) as to:
            try:
                opened = await eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(opening, timeout=_CAPTURE_S)
            except grpc.aio.AioRpcError as error:
                raise as_error(error, f"the eavesdropper at {address}") from None
        relays = {(i, j): relay for (i, j, _), relay in zip(edges, opened.relay_addresses, strict=True)}
        return Overhearing(opened.capture_id, opened.location, relays, "" if relays else opened.mirror_address)

    def _begin(self, course: Course, briefings: Sequence[Sequence[Directive]]) -> None:
        """Brief every learner, all assignments before the first epoch, so that nobody meets a neighbour that knows nothing."""
        book = course.book
        names = book.run.spec.names
        for directives in zip(*briefings, strict=True):
            self._tell(book, {name: [own] for name, own in zip(names, directives, strict=True)})
        self._accompany(course)

    async def _keep_captured(self, course: Course, address: str) -> None:
        """An eavesdropper that was started again takes up the capture when it is asked: its relays are the way of messages."""
        book, away = course.book, False
        request = eavesdropper_pb2.OpenCaptureRequest(run_id=book.run_id, resume=True)
        async with channel(address) as to:
            while not book.ended:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(course.over.wait(), _CAPTURED_S)
                    return
                try:
                    await eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(request, timeout=_CAPTURE_S)
                    away = False
                except grpc.aio.AioRpcError as error:
                    if not away:
                        log.warning("nothing is captured", run_id=book.run_id, reason=error.details())
                    away = True

    def _accompany(self, course: Course) -> None:
        """What goes on beside a run until it ends."""
        if course.book.overhearing.capture_id and (address := self.config.eavesdropper) is not None:
            self._tasks.start(self._keep_captured(course, address), "a capture is not looked after")
        if (period_s := course.book.run.spec.clock.period_s) is not None:
            self._tasks.start(self._pace(course, period_s), "the clock stands still")

    async def _pace(self, course: Course, period_s: float) -> None:
        """Grant one round a period (paced mode)."""
        book = course.book
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not book.ended:
            due += period_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            if book.state is RunState.RUNNING:
                book.clock.tick()
                with self._whatever_disk():
                    self._go_on(course)

    def _go_on(self, course: Course) -> None:
        """Tell a grant that has grown; else directives would heap up for as long as a learner is behind."""
        book = course.book
        if book.clock.granted <= course.told:
            return
        self._reserve(course)
        course.told = book.clock.granted
        self._tell(book, dict(zip(book.run.spec.names, book.go_on(), strict=True)))

    def _tell(self, book: RunBook, directives: Mapping[str, Sequence[Directive]]) -> None:
        """Each learner its own; who is away is briefed when it joins again."""
        for name, own in directives.items():
            if name in self._members:
                for directive in own:
                    self._members[name].tell(book.run_id, directive)

    def _end(self, course: Course | None, state: RunState, detail: str) -> None:
        if course is not None and not course.book.ended:
            course.book.end(state, detail)
            self._after_end(course)

    def _after_end(self, course: Course) -> None:
        """Let the learners go, who hold their channels open even when they have finished, and close the capture, once."""
        if course.ended is not None:
            return
        course.ended = datetime.now(UTC)
        with self._whatever_disk():  # a coordinator after this one would find it under way, and its learners done
            self._store.keep(course.book.run_id, course.view().SerializeToString())
        self._tell(course.book, {name: [course.book.stop()] for name in course.book.run.spec.names})
        course.closing = self._close_capture(course.book)
        course.over.set()

    def _close_capture(self, book: RunBook) -> asyncio.Task[str] | None:
        address, capture_id = self.config.eavesdropper, book.overhearing.capture_id
        if not capture_id or address is None:
            return None
        return self._tasks.start(_close_capture(address, capture_id), "a capture is not closed")


def _require_size(spec: RunSpec) -> None:
    """Refuse a run of more learners, or of longer windows, than a coordinator serves.

    Raises:
        SpecError: it has more.
    """
    n, window = spec.n_learners, min(spec.clock.window, spec.rounds)
    if n > MOST_LEARNERS:
        raise SpecError(f"a coordinator serves at most {MOST_LEARNERS} learners, got {n}: simulate them")
    if spec.topology.sequence is not None and window * n > _MOST_EPOCHS:
        text = f"clock.window times learners must be at most {_MOST_EPOCHS} where the network changes"
        raise SpecError(f"{text}, got {window} * {n} = {window * n}")


def _built(spec: RunSpec, n_features: int) -> Run:
    """In a thread: a run whose messages and edges can be told.

    Raises:
        SpecError: they cannot, or as `build_run`.
    """
    run = build_run(spec, n_features)
    check_size(run.algorithm.field_shapes())
    if (edges := len(run.network.edges)) > MOST_EDGES:
        raise SpecError(f"a coordinator serves at most {MOST_EDGES} edges, got {edges}: take fewer, or simulate them")
    return run


def _named(learners: Sequence[str]) -> str:
    """Some of them, where there are many: an error has to fit into a status."""
    more = f" and {len(learners) - _NAMED} more" if len(learners) > _NAMED else ""
    return f"{', '.join(learners[:_NAMED])}{more}"


async def _introduced(events: AsyncIterator[coordinator_pb2.Event], origin: Origin) -> _Member:
    """Who opened a stream.

    Raises:
        RemoteProtocolError: it does not say, or by a name or an address that is none.
    """
    first = await _next(events, "an introduction")
    if first is None or first.WhichOneof("event") != "introduction" or not first.introduction.learner:
        raise RemoteProtocolError("a learner must introduce itself first, by its name")
    name, address = first.introduction.learner, first.introduction.address
    if re.fullmatch(LEARNER_NAME, name) is None:
        raise RemoteProtocolError(f"a learner's name must match {LEARNER_NAME}, got {name[:80]!r}")
    if len(address) > _LONGEST_ADDRESS:
        raise RemoteProtocolError(f"an address has at most {_LONGEST_ADDRESS} characters, got {len(address)}")
    said = first.introduction
    journaled = said.journaled if said.run_id else None
    claim = Claim(name, said.store, said.incarnation, said.rejoins, journaled)
    return _Member(claim, address, origin, said.run_id, said.granted)


async def _next(events: AsyncIterator[coordinator_pb2.Event], what: str) -> coordinator_pb2.Event | None:
    """What a learner says next; None: nothing more.

    Raises:
        RemoteProtocolError: it takes too long.
    """
    try:
        return await asyncio.wait_for(anext(aiter(events), None), HELLO_S)
    except TimeoutError:
        raise RemoteProtocolError(f"expected {what} within {HELLO_S:g} s, got nothing") from None


async def _tell(member: _Member, context: Context) -> None:
    """Send a learner what it is to do, as it comes."""
    while True:
        await context.write(await member.directives.get())


async def _displacement(member: _Member) -> None:
    """Another stream of the same process takes the place of this one, which it has given up.

    Raises:
        Unavailable: one has come.
    """
    await member.displaced.wait()
    raise Unavailable(f"another stream of learner {member.name} took the place of this one")


async def _close_capture(address: str, capture_id: str) -> str:
    """End a capture; why it could not be written to its end, as the eavesdropper says."""
    async with channel(address) as to:
        try:
            request = eavesdropper_pb2.CloseCaptureRequest(capture_id=capture_id)
            closed = await eavesdropper_pb2_grpc.EavesdropperStub(to).CloseCapture(request, timeout=_CLOSE_S)
        except grpc.aio.AioRpcError as error:
            log.warning("capture not closed", reason=error.details())
            return str(as_error(error, f"the eavesdropper at {address}"))
    return closed.capture.error


def _spec(text: str, *, imports: bool) -> RunSpec:
    """The spec that an operator sent. No file of this machine is read for it: graph files lie with the operator.

    Raises:
        SpecError: it is not valid, or names a file.
    """
    spec = spec_from_wire(text, imports=imports)
    if spec.topology.file:
        raise SpecError("topology: a spec that is sent must list its edges, got a graph file; the client does this")
    return spec


async def serve(config: CoordinatorConfig, *, with_stdin: bool = False) -> None:
    """Run the coordinator in this process until it is told to stop.

    Raises:
        SottovoceError: the address is taken.
    """
    service = Coordinator(config)
    announce("coordinator", address=await service.start())
    await serve_until_stopped(service.stop, with_stdin=with_stdin)
