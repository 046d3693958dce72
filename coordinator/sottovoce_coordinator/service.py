"""The coordinator's gRPC face: learners join, report and follow; operators start, stop and watch runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from sottovoce_coordinator.capture_client import CaptureClient
from sottovoce_coordinator.learner_registry import Context, JoinedLearner, LearnerRegistry, read_introduction
from sottovoce_coordinator.metrics import CATALOGUE, collect_metrics
from sottovoce_coordinator.run_controller import RunController
from sottovoce_coordinator.run_launcher import RunLauncher
from sottovoce_coordinator.run_registry import ManagedRun, RunRegistry
from sottovoce_coordinator.run_state import RunState
from sottovoce_coordinator.store import CoordinatorStore
from sottovoce_core.errors import PermissionDenied, SottovoceError, Unavailable
from sottovoce_rpc.access import UNIDENTIFIED_CALLER, Refusals, release_read_slot
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import shorten_text
from sottovoce_rpc.learner_status import LearnerStatus, WaitReport
from sottovoce_rpc.logs import has_project_text, log_start, warn_if_open
from sottovoce_rpc.metrics import MetricSample, MetricsEndpoint, collect_common_metrics, serve_metrics
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import MAX_CONTROL_BYTES, RunningServer, announce, paginate, serve_until_stopped, start_server
from sottovoce_rpc.tasks import Tasks, build_wait_notifier, run_in_background
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc

log = structlog.get_logger()

SERVICE_NAME = "sottovoce_wire.v1.Coordinator"
WATCH_INTERVAL_S = 0.2
_MAX_VIEWED_LEARNERS_PER_S = 1_000
"""Learners that a watcher is shown a second, or all of them so often: a view has a line for each."""
_MAX_LOGGED_CHARS = 300
"""Characters of what an operator gives that stand in the log."""
_SAVE_INTERVAL_S = 1.0
"""How old what is written of the learners' progress may be."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """How a coordinator is deployed.

    Attributes:
        listen: `host:port` to listen on; port 0 picks one.
        eavesdropper: address of an eavesdropper, for runs that are captured.
        allow_imports: whether a run spec may name code to import.
        state: a folder; runs that are under way go on when a coordinator is started on it again. None: they end with it.
        credentials: of this coordinator.
    """

    listen: str = "127.0.0.1:0"
    eavesdropper: str | None = None
    allow_imports: bool = False
    state: Path | None = None
    credentials: Credentials = field(default_factory=Credentials)


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Any number of runs, each on learners of its own."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._store = CoordinatorStore(config.state)
        self._tasks = Tasks()
        self._members, self._courses = LearnerRegistry(self._store), RunRegistry(self._store)
        self._captures = CaptureClient(config.eavesdropper, self._tasks, config.credentials)
        self._conductor = RunController(self._store, self._members, self._captures, self._tasks)
        parts = self._store, self._members, self._courses, self._captures, self._conductor
        self._starter = RunLauncher(*parts, allow_imports=config.allow_imports)
        self._ending = False
        self._refused = Counter[str]()  # streams of learners, by kind of error
        self.server: RunningServer | None = None

    async def start(self) -> str:
        """Take up what a coordinator before this one has left, and listen; returns the address.

        Raises:
            SottovoceError: it cannot listen there, or its identity or its state cannot be used.
        """
        try:
            self.config.credentials.require_principal(Role.COORDINATOR)
            await self._starter.restore()
            self.server = await start_server(
                self.config.listen,
                lambda server: coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server),
                [SERVICE_NAME],
                self.config.credentials,
                MAX_CONTROL_BYTES,
            )
        except BaseException:
            self._store.close()
            raise
        if self.config.state is not None:
            warn_if_open(self.config.state, "state folder, and runs and addresses stand in it")
        if self._store.is_durable:
            self._tasks.start(self._keep(), "progress is no longer written")
        return self.server.address

    async def _keep(self) -> None:
        """Write down how far the learners are, about once a second."""
        while True:
            await asyncio.sleep(_SAVE_INTERVAL_S)
            self._conductor.save_progress(self._courses.active_runs)

    async def stop(self, why: str = "") -> None:
        """End the service, and the runs unless they are kept; `why`: for those."""
        if self._store.is_durable:
            self._conductor.save_progress(self._courses.active_runs)
        else:
            for course in self._courses.active_runs:
                self._conductor.end_run(
                    course, RunState.STOPPED, f"the coordinator was told to stop{f' ({why})' * bool(why)}"
                )
        self._members.end_streams()
        self._ending = True
        await self._tasks.end()
        if self.server is not None:
            await self.server.stop()
        self._store.close()

    # ---- learners -----------------------------------------------------------------------------------------

    async def Join(self, events: AsyncIterator[coordinator_pb2.LearnerMessage], context: Context) -> None:  # type: ignore[override] # reads and writes, so it is no generator
        """Hold the stream of one learner: its reports come in, its directives go out."""
        with self._counting():
            member = await read_introduction(
                events, self._store.origin, self.config.credentials.identify_caller(context)
            )
            # Before anything may end the stream: gRPC sends no status until this is out.
            await context.send_initial_metadata(())
            await self._members.admit(member, events, context, rounds_committed=self._journaled(member))
            release_read_slot()
            try:
                await self._welcome(member)
                async with run_in_background(member.send_commands(context), member.wait_until_displaced()):
                    async for event in events:
                        self._hear(member, event)
            finally:
                if self._members.remove(member):
                    log.info("left", learner=member.name)
                    if (course := self._courses.find_active(member.name)) is not None:
                        self._conductor.handle_disconnect(course, member.name)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what streams of learners are refused for."""
        try:
            yield
        except SottovoceError as error:
            self._refused[type(error).__name__] += 1
            raise

    def collect_metrics(self, refused: Refusals) -> Iterator[MetricSample]:
        """For Prometheus; refused: who asked for it, and may not."""
        refusals = [refused] if self.server is None else [refused, self.server.refusals]
        yield from collect_common_metrics([self.config.credentials], refusals)
        yield from collect_metrics(self._courses.runs_newest_first.values(), self._members, self._refused)

    def _journaled(self, member: JoinedLearner) -> int:
        """Rounds that a learner is known to have journaled in the run that it is in, by its word or by this coordinator's."""
        known, under_way = (
            self._courses.find_for_learner(member.introduction.run_id, member.name),
            self._courses.find_active(member.name),
        )
        course = known if under_way is None else under_way
        if course is not known:  # it says nothing of this run, and of another one it may have any log
            member.claim = replace(member.claim, rounds_committed=None)
        return 0 if course is None else course.machine.statuses[course.machine.index[member.name]].rounds_committed

    async def _welcome(self, member: JoinedLearner) -> None:
        """A learner goes on with its run, or is told why it cannot.

        Raises:
            Unavailable: it is in a run that is not known here, and that is not for this coordinator to end.
        """
        self._members.add(member)
        try:
            if (course := self._courses.find_active(member.name)) is not None:  # it was away
                self._conductor.handle_rejoin(course, member)
            elif member.introduction.run_id:
                member.enqueue_command(member.introduction.run_id, self._farewell(member))
            log.info("joined", learner=member.name, address=member.introduction.address)
        finally:  # what it told counts for who takes up its run, whether it stays or not
            await self._members.notify_waiters()

    def _farewell(self, member: JoinedLearner) -> coordinator_pb2.Stop:
        """Why a learner cannot go on with its run. One that is not known here may go on elsewhere."""
        run_id = member.introduction.run_id
        if (known := self._courses.get(run_id)) is not None:
            return known.build_final_command()
        if member.introduction.term:  # it waits for who keeps the run, and forgets nothing meanwhile
            raise Unavailable(
                f"this coordinator does not know run {run_id!r}: start it on the state folder that does; if that is lost, on an "
                f"empty one, and let it take the run up: `sottovoce run SPEC --recover {run_id}`"
            )
        return coordinator_pb2.Stop(
            reason="its coordinator does not know the run: it was started again without --state, or with another one"
        )

    def _hear(self, member: JoinedLearner, event: coordinator_pb2.LearnerMessage) -> None:
        """A learner's progress. What a newer learner tells besides is passed over.

        Raises:
            PermissionDenied: it reports in another one's name.
        """
        if event.WhichOneof("message") != "report":
            return
        status = LearnerStatus.from_wire(event.report.status)
        if status.learner != member.name:
            raise PermissionDenied(
                f"a report on this stream must be of learner {member.name!r}, got {status.learner!r}"
            )
        course = self._courses.find_for_learner(status.run_id, member.name)
        if course is not None and event.report.attempt == course.machine.attempt:
            self._conductor.handle_report(course, status, WaitReport.from_wire(event.report), event.report.violations)
        elif course is not None:
            self._conductor.handle_quiesced_report(course, status)

    # ---- operators ----------------------------------------------------------------------------------------

    async def StartRun(self, request: coordinator_pb2.StartRunRequest, context: Context) -> coordinator_pb2.Run:
        """Start a run on learners that have joined."""
        with self._audited("StartRun", context) as call:
            course = await self._starter.start(request, build_wait_notifier(context))
            book = course.machine
            call |= {"run_id": book.run_id, "learners": len(book.addresses), "capture": book.run.spec.capture}
        return course.build_view()

    async def StopRun(self, request: coordinator_pb2.StopRunRequest, context: Context) -> coordinator_pb2.Run:
        """Stop a run; one that has ended is as it was."""
        with self._audited("StopRun", context, run_id=request.run_id, reason=request.reason) as call:
            run = self._courses.resolve(request.run_id)
            call["run_id"] = run.build_view().run_id
            if isinstance(run, ManagedRun):
                self._conductor.end_run(run, RunState.STOPPED, shorten_text(request.reason) or "stopped by an operator")
        return run.build_view()

    async def ResumeRun(self, request: coordinator_pb2.ResumeRunRequest, context: Context) -> coordinator_pb2.Run:
        """Take up a run that failed."""
        with self._audited("ResumeRun", context, run_id=request.run_id) as call:
            course = await self._starter.resume(request.run_id)
            call["run_id"] = course.machine.run_id
        return course.build_view()

    async def LeaveRun(self, request: coordinator_pb2.LeaveRunRequest, context: Context) -> coordinator_pb2.Run:
        """Let a run go on without a learner."""
        with self._audited("LeaveRun", context, run_id=request.run_id, learner=request.learner) as call:
            course = self._courses.get_active(request.run_id)
            call["run_id"] = course.machine.run_id
            await self._conductor.run_operator_change(course, self._conductor.remove_learner(course, request.learner))
        return course.build_view()

    async def JoinRun(self, request: coordinator_pb2.JoinRunRequest, context: Context) -> coordinator_pb2.Run:
        """Let a learner take part in a run."""
        with self._audited("JoinRun", context, run_id=request.run_id, learner=request.learner) as call:
            course = self._courses.get_active(request.run_id)
            call["run_id"] = course.machine.run_id
            await self._conductor.run_operator_change(course, self._conductor.add_learner(course, request.learner))
        return course.build_view()

    async def RecoverRun(self, request: coordinator_pb2.RecoverRunRequest, context: Context) -> coordinator_pb2.Run:
        """Take up a run that its learners know, and no coordinator any more."""
        with self._audited("RecoverRun", context, run_id=request.run_id) as call:
            course = await self._starter.recover(request, build_wait_notifier(context))
            call["granted"] = course.machine.clock.leased_until
        return course.build_view()

    @contextlib.contextmanager
    def _audited(self, call: str, context: Context, **facts: str) -> Iterator[dict[str, object]]:
        """Log a call that changes something: who made it, of what, and what came of it. The block may add facts."""
        caller = self.config.credentials.identify_caller(context)
        told: dict[str, object] = {name: value[:_MAX_LOGGED_CHARS] for name, value in facts.items()}
        told |= {"call": call, "by": UNIDENTIFIED_CALLER if caller is None else caller.uri, "peer": context.peer()}
        try:
            yield told
        except asyncio.CancelledError:
            log.info("operator call", **told, outcome="cancelled")
            raise
        except Exception as error:
            why = shorten_text(str(error)) if has_project_text(error) else ""
            log.warning("operator call", **told, outcome="refused", kind=type(error).__name__, error=why)
            raise
        log.info("operator call", **told, outcome="done")

    async def GetRun(self, request: coordinator_pb2.GetRunRequest, context: Context) -> coordinator_pb2.Run:
        """A run as it stands, with its spec."""
        return self._courses.resolve(request.run_id).build_view(include_spec=True)

    async def ListRuns(
        self, request: coordinator_pb2.ListRunsRequest, context: Context
    ) -> coordinator_pb2.ListRunsResponse:
        """The runs that are remembered."""
        courses, following = paginate(self._courses.runs_newest_first, request.page_size, request.page_token)
        runs = [course.build_view() for course in courses]
        answer = coordinator_pb2.ListRunsResponse(runs=runs, next_page_token=following)
        answer.now.GetCurrentTime()
        return answer

    async def WatchRun(
        self, request: coordinator_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.Run]:
        """The run as it stands, several times a second and after ever more rounds, until it has ended."""
        run = self._courses.resolve(request.run_id)
        while isinstance(run, ManagedRun) and not run.machine.has_ended:
            if self._ending:
                raise Unavailable("the coordinator was told to end")
            shown = run.view_event
            yield run.build_view()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    max(WATCH_INTERVAL_S, len(run.machine.addresses) / _MAX_VIEWED_LEARNERS_PER_S)
                ):
                    await shown.wait()
        if (
            isinstance(run, ManagedRun) and run.capture_close_task is not None
        ):  # the last view comes when the capture is complete
            await asyncio.wait([run.capture_close_task])
        yield run.build_view()

    async def RebindLearner(
        self, request: coordinator_pb2.RebindLearnerRequest, context: Context
    ) -> coordinator_pb2.RebindLearnerResponse:
        """Take whatever state folder the next learner of this name has."""
        with self._audited("RebindLearner", context, learner=request.learner):
            self._members.unbind(request.learner)
        return coordinator_pb2.RebindLearnerResponse()


async def serve(
    config: CoordinatorConfig, *, stop_with_stdin: bool = False, metrics: MetricsEndpoint | None = None
) -> None:
    """Run the coordinator in this process until it is told to stop.

    Args:
        config: of the coordinator.
        with_stdin: stop when standard input ends.
        metrics: where it tells Prometheus how it is; None: nowhere.

    Raises:
        SottovoceError: an address is taken.
    """
    service, refused = Coordinator(config), Refusals()
    async with serve_metrics(metrics, CATALOGUE, lambda: service.collect_metrics(refused), refused):
        announce("coordinator", address=(address := await service.start()))
        log_start("coordinator", config.credentials.principal, address=address, state=config.state)
        await serve_until_stopped(service.stop, stop_with_stdin=stop_with_stdin)
