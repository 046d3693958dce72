"""The coordinator's gRPC face: learners join and follow, operators start, stop and watch runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from sottovoce.errors import NotReady, SpecError
from sottovoce.network.topology import names_files
from sottovoce.running.run import build_run
from sottovoce.spec import RunSpec, parse_spec
from sottovoce_coordinator.runs import RunBook, missing
from sottovoce_rpc.codec import to_fields
from sottovoce_rpc.server import Service, announce, channel, serve_until_stopped, start_server
from sottovoce_rpc.status import answering, as_error
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, eavesdropper_pb2, eavesdropper_pb2_grpc

log = structlog.get_logger()

NAME = "sottovoce_wire.v1.Coordinator"
WATCH_S = 0.2
JOINING_S = 20.0
CAPTURE_S = 10.0

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """How a coordinator is deployed.

    Attributes:
        listen: `host:port` to listen on; port 0 picks one.
        eavesdropper: address of an eavesdropper, for runs that are captured.
        allow_imports: whether a run spec may name code to import.
    """

    listen: str = "127.0.0.1:0"
    eavesdropper: str | None = None
    allow_imports: bool = False


@dataclass(slots=True)
class Member:
    """A learner that has joined, and the directives on their way to it."""

    address: str
    directives: asyncio.Queue[coordinator_pb2.Directive]


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """One run at a time."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._members: dict[str, Member] = {}
        self._joined = asyncio.Condition()
        self._closing: asyncio.Task[None] | None = None
        self._book: RunBook | None = None
        self._over = asyncio.Event()  # of the run in the book
        self._capture: eavesdropper_pb2.OpenCaptureResponse | None = None
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.service: Service | None = None

    async def start(self) -> str:
        """Listen; returns the address."""
        self.service = await start_server(
            self.config.listen,
            lambda server: coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server),
            [NAME],
        )
        return self.service.address

    async def stop(self) -> None:
        """End the run and the service."""
        await self._end(coordinator_pb2.RUN_STATE_STOPPED, "the coordinator was told to stop")
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        if self.service is not None:
            await self.service.stop()

    # ---- learners -----------------------------------------------------------------------------------------

    async def Join(
        self, request: coordinator_pb2.JoinRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.Directive]:
        """Hold the stream of directives to one learner."""
        member = Member(request.address, asyncio.Queue())
        self._members[request.learner] = member
        book = self._book
        if book is not None and not book.ended and request.learner in book.run.spec.names:  # it was away
            for directive in book.briefing(book.run.spec.names.index(request.learner)):
                member.directives.put_nowait(directive)
        log.info("joined", learner=request.learner, address=request.address)
        async with self._joined:
            self._joined.notify_all()
        try:
            while True:
                yield await member.directives.get()
        finally:
            if self._members.get(request.learner) is member:
                del self._members[request.learner]
                log.info("left", learner=request.learner)

    async def Report(self, request: coordinator_pb2.ReportRequest, context: Context) -> coordinator_pb2.ReportResponse:
        """A learner's progress."""
        book = self._book
        if book is not None and request.status.run_id == book.run_id and request.status.learner in book.run.spec.names:
            if book.report(request.status):
                self._tell(book, book.go_on())
            if book.ended:
                await self._after_end(book)
        return coordinator_pb2.ReportResponse()

    # ---- operators ----------------------------------------------------------------------------------------

    async def StartRun(
        self, request: coordinator_pb2.StartRunRequest, context: Context
    ) -> coordinator_pb2.StartRunResponse:
        """Start a run on the learners that have joined."""
        async with answering(context):
            self._require_idle()
            async with self._starting:
                book, capture = await self._start(_spec(request.spec, imports=self.config.allow_imports), request)
            log.info("run", run_id=book.run_id, learners=len(book.addresses), capture=book.run.spec.capture)
            return coordinator_pb2.StartRunResponse(
                run_id=book.run_id,
                learners=[
                    coordinator_pb2.LearnerInfo(name=name, address=address)
                    for name, address in zip(book.run.spec.names, book.addresses, strict=True)
                ],
                capture_id=capture.capture_id if capture else "",
                capture_location=capture.location if capture else "",
            )
        raise AssertionError("answering() ends the call")

    async def StopRun(
        self, request: coordinator_pb2.StopRunRequest, context: Context
    ) -> coordinator_pb2.StopRunResponse:
        """Stop the run."""
        async with answering(context):
            self._the_run(request.run_id)
            await self._end(coordinator_pb2.RUN_STATE_STOPPED, request.reason or "stopped by an operator")
        return coordinator_pb2.StopRunResponse()

    async def WatchRun(
        self, request: coordinator_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.WatchRunResponse]:
        """The run as it stands, several times a second, until it has ended."""
        async with answering(context):
            book, over = self._the_run(request.run_id), self._over
            while not book.ended:
                yield book.view()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), WATCH_S)
            if self._closing is not None:  # the last view comes when the capture is complete
                await asyncio.wait([self._closing])
            yield book.view()

    def _the_run(self, run_id: str) -> RunBook:
        if self._book is None or self._book.run_id != run_id:
            known = "there is none" if self._book is None else f"the last one is {self._book.run_id!r}"
            raise NotReady(f"no run {run_id!r}: {known}")
        return self._book

    # ---- a run's course -----------------------------------------------------------------------------------

    def _require_idle(self) -> None:
        if self._starting.locked():
            raise NotReady("another run is being started")
        if self._book is not None and not self._book.ended:
            raise NotReady(f"run {self._book.run_id} is under way: stop it first")

    async def _start(
        self, spec: RunSpec, request: coordinator_pb2.StartRunRequest
    ) -> tuple[RunBook, eavesdropper_pb2.OpenCaptureResponse | None]:
        n_features = request.n_features
        if n_features < 1:
            raise SpecError(f"n_features must be at least 1, got {n_features}")
        run = build_run(spec, n_features)
        await self._all_joined(spec)
        addresses = tuple(self._members[name].address for name in spec.names)
        book = RunBook(f"{spec.name}-{uuid.uuid4().hex[:12]}", run, n_features, addresses)
        capture = await self._open_capture(book, request)
        if absent := missing(spec.names, self._members):  # gone in the meantime
            self._forget_capture(capture)
            raise NotReady(f"learners have left: {', '.join(absent)}")
        self._capture, self._closing = capture, None
        if capture is not None:
            book.use_capture(capture)
        self._begin(book)
        return book, capture

    async def _all_joined(self, spec: RunSpec) -> None:
        async with self._joined:
            try:
                await asyncio.wait_for(
                    self._joined.wait_for(lambda: not missing(spec.names, self._members)),
                    min(JOINING_S, spec.clock.deadline_s),
                )
            except TimeoutError:
                absent = missing(spec.names, self._members)
                raise NotReady(
                    f"{len(absent)} of {spec.n_learners} learners have not joined: {', '.join(absent)}"
                ) from None

    async def _open_capture(
        self, book: RunBook, request: coordinator_pb2.StartRunRequest
    ) -> eavesdropper_pb2.OpenCaptureResponse | None:
        if book.run.spec.capture == "none":
            return None
        address = self.config.eavesdropper
        if address is None:
            raise NotReady(
                f"capture: {book.run.spec.capture} needs an eavesdropper; this coordinator was given none (--eavesdropper)"
            )
        spec = json.dumps(book.run.spec.model_dump(mode="json"))
        routes = book.routes() if book.run.spec.capture == "relay" else []
        opening = eavesdropper_pb2.OpenCaptureRequest(
            run_id=book.run_id,
            spec=spec,
            routes=routes,
            n_features=request.n_features,
            fields=to_fields(book.run.algorithm.field_shapes()),
            world=request.world if request.HasField("world") else None,
            replica=request.replica if request.HasField("replica") else None,
        )
        async with channel(address) as to:
            try:
                return await eavesdropper_pb2_grpc.EavesdropperStub(to).OpenCapture(opening, timeout=CAPTURE_S)
            except grpc.aio.AioRpcError as error:
                raise as_error(error, f"the eavesdropper at {address}") from None

    def _begin(self, book: RunBook) -> None:
        """Brief every learner, all assignments before the first epoch, so that nobody meets a neighbour that knows nothing."""
        self._book, self._over = book, asyncio.Event()
        briefings = [book.briefing(index) for index in range(len(book.addresses))]
        for directives in zip(*briefings, strict=True):
            self._tell(book, [[directive] for directive in directives])
        if book.run.spec.clock.period_s is not None:
            self._spawn(self._pace(book, book.run.spec.clock.period_s))

    async def _pace(self, book: RunBook, period_s: float) -> None:
        """Grant one round a period (paced mode)."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not book.ended:
            due += period_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            if book.state == coordinator_pb2.RUN_STATE_RUNNING:
                book.clock.tick()
                self._tell(book, book.go_on())

    def _tell(self, book: RunBook, directives: Sequence[Sequence[coordinator_pb2.Directive]]) -> None:
        """Each learner, by index, its own; who is away is briefed when it joins again."""
        for name, own in zip(book.run.spec.names, directives, strict=True):
            if name in self._members:
                for directive in own:
                    self._members[name].directives.put_nowait(directive)

    async def _end(self, state: coordinator_pb2.RunState.ValueType, detail: str) -> None:
        if self._book is not None and not self._book.ended:
            self._book.end(state, detail)
            await self._after_end(self._book)

    async def _after_end(self, book: RunBook) -> None:
        """Let the learners go, who hold their channels open even when they have finished, and close the capture, once."""
        self._tell(book, [[book.stop()]] * len(book.addresses))
        capture, self._capture = self._capture, None
        self._forget_capture(capture)
        self._over.set()

    def _forget_capture(self, capture: eavesdropper_pb2.OpenCaptureResponse | None) -> None:
        if capture is not None and self.config.eavesdropper is not None:
            self._closing = self._spawn(self._close_capture(self.config.eavesdropper, capture.capture_id))

    async def _close_capture(self, address: str, capture_id: str) -> None:
        async with channel(address) as to:
            try:
                request = eavesdropper_pb2.CloseCaptureRequest(capture_id=capture_id)
                await eavesdropper_pb2_grpc.EavesdropperStub(to).CloseCapture(request, timeout=CAPTURE_S)
            except grpc.aio.AioRpcError as error:
                log.warning("capture not closed", reason=error.details())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _spec(text: str, *, imports: bool) -> RunSpec:
    """The spec that an operator sent. No file of this machine is read for it: graph files lie with the operator.

    Raises:
        SpecError: it is not valid, or names a file.
    """
    try:
        spec = parse_spec(json.loads(text), imports=imports)
    except json.JSONDecodeError as error:
        raise SpecError(f"the run spec must be JSON: {error}") from None
    if names_files(spec.topology):
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
