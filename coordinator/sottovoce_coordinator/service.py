"""gRPC servicer of the coordinator: learners join, report and receive commands; operators start, stop and watch runs."""

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
"""Maximum learners per second in the views for a watcher: a view has a line for each learner of the run."""
_MAX_LOGGED_CHARS = 300
"""Maximum logged characters of an operator's input."""
_SAVE_INTERVAL_S = 1.0
"""Interval between writes of the learners' progress."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Configuration of a coordinator.

    Attributes:
        listen: `host:port` to listen on; port 0 picks a free one.
        eavesdropper: address of an eavesdropper, for runs that are captured.
        allow_imports: allow a run spec to name code to import.
        state: state folder; active runs go on when a coordinator is started on it again. None: they end with it.
        credentials: credentials of this coordinator.
    """

    listen: str = "127.0.0.1:0"
    eavesdropper: str | None = None
    allow_imports: bool = False
    state: Path | None = None
    credentials: Credentials = field(default_factory=Credentials)


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Servicer of any number of runs, each with learners of its own."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._store = CoordinatorStore(config.state)
        self._tasks = Tasks()
        self._learners, self._runs = LearnerRegistry(self._store), RunRegistry(self._store)
        self._captures = CaptureClient(config.eavesdropper, self._tasks, config.credentials)
        self._controller = RunController(self._store, self._learners, self._captures, self._tasks)
        parts = self._store, self._learners, self._runs, self._captures, self._controller
        self._launcher = RunLauncher(*parts, allow_imports=config.allow_imports)
        self._is_stopping = False
        self._refused = Counter[str]()  # streams of learners, by kind of error
        self.server: RunningServer | None = None

    async def start(self) -> str:
        """Restore the runs of the state folder, and listen; return the address.

        Raises:
            SottovoceError: the address cannot be listened on, or the identity or the state cannot be used.
        """
        try:
            self.config.credentials.require_principal(Role.COORDINATOR)
            await self._launcher.restore()
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
            warn_if_open(self.config.state, "state folder, which holds runs and addresses")
        if self._store.is_durable:
            self._tasks.start(self._save_periodically(), "progress is no longer written")
        return self.server.address

    async def _save_periodically(self) -> None:
        """Write the learners' progress, about once a second."""
        while True:
            await asyncio.sleep(_SAVE_INTERVAL_S)
            self._controller.save_progress(self._runs.active_runs)

    async def stop(self, reason: str = "") -> None:
        """End the service, and its runs unless they are durable; their detail gets the reason."""
        if self._store.is_durable:
            self._controller.save_progress(self._runs.active_runs)
        else:
            for managed in self._runs.active_runs:
                self._controller.end_run(
                    managed, RunState.STOPPED, f"the coordinator was asked to stop{f' ({reason})' * bool(reason)}"
                )
        self._learners.end_streams()
        self._is_stopping = True
        await self._tasks.end()
        if self.server is not None:
            await self.server.stop()
        self._store.close()

    # ---- learners -----------------------------------------------------------------------------------------

    async def Join(self, events: AsyncIterator[coordinator_pb2.LearnerMessage], context: Context) -> None:  # type: ignore[override] # reads and writes, so it is no generator
        """Serve the stream of one learner: its reports come in, its commands go out."""
        with self._count_refusals():
            member = await read_introduction(
                events, self._store.origin, self.config.credentials.identify_caller(context)
            )
            # Now, before an error can end the stream: gRPC sends no status before the initial metadata.
            await context.send_initial_metadata(())
            await self._learners.admit(member, events, context, rounds_committed=self._get_rounds_committed(member))
            release_read_slot()
            try:
                await self._connect_learner(member)
                async with run_in_background(member.send_commands(context), member.wait_until_displaced()):
                    async for event in events:
                        self._handle_message(member, event)
            finally:
                if self._learners.remove(member):
                    log.info("left", learner=member.name)
                    if (managed := self._runs.find_active(member.name)) is not None:
                        self._controller.handle_disconnect(managed, member.name)

    @contextlib.contextmanager
    def _count_refusals(self) -> Iterator[None]:
        """Count refused learner streams by kind of error."""
        try:
            yield
        except SottovoceError as error:
            self._refused[type(error).__name__] += 1
            raise

    def collect_metrics(self, refused: Refusals) -> Iterator[MetricSample]:
        """Yield samples for Prometheus; `refused` counts refused scrapes."""
        refusals = [refused] if self.server is None else [refused, self.server.refusals]
        yield from collect_common_metrics([self.config.credentials], refusals)
        yield from collect_metrics(self._runs.runs_newest_first.values(), self._learners, self._refused)

    def _get_rounds_committed(self, member: JoinedLearner) -> int:
        """Return the rounds that a learner is known to have committed in its run; clear its claim if it is of another run."""
        claimed, active = (
            self._runs.find_for_learner(member.introduction.run_id, member.name),
            self._runs.find_active(member.name),
        )
        managed = claimed if active is None else active
        if managed is not claimed:  # its claim is not about this run, and its log of another run may be any
            member.claim = replace(member.claim, rounds_committed=None)
        return 0 if managed is None else managed.machine.statuses[managed.machine.index[member.name]].rounds_committed

    async def _connect_learner(self, member: JoinedLearner) -> None:
        """Let a learner continue its run, or send it why that is not possible.

        Raises:
            Unavailable: its run is not known here, and another coordinator may lead it.
        """
        self._learners.add(member)
        try:
            if (managed := self._runs.find_active(member.name)) is not None:
                self._controller.handle_rejoin(managed, member)
            elif member.introduction.run_id:
                member.enqueue_command(member.introduction.run_id, self._build_stop(member))
            log.info("joined", learner=member.name, address=member.introduction.address)
        finally:  # a recovery of its run needs its introduction, whether it stays or not
            await self._learners.notify_waiters()

    def _build_stop(self, member: JoinedLearner) -> coordinator_pb2.Stop:
        """Build the Stop command for a learner that cannot continue its run.

        Raises:
            Unavailable: the run is not known here, and may go on under another coordinator.
        """
        run_id = member.introduction.run_id
        if (known := self._runs.get(run_id)) is not None:
            return known.build_final_command()
        if member.introduction.term:  # it waits for the coordinator that has the run, and keeps its state
            raise Unavailable(
                f"this coordinator does not know run {run_id!r}: start it on the state folder that does; if that is lost, on an "
                f"empty one, and recover the run: `sottovoce run SPEC --recover {run_id}`"
            )
        return coordinator_pb2.Stop(
            reason="its coordinator does not know the run: it was started again without --state, or with another one"
        )

    def _handle_message(self, member: JoinedLearner, event: coordinator_pb2.LearnerMessage) -> None:
        """Process a learner's report; other messages, of newer learners, are ignored.

        Raises:
            PermissionDenied: the report names another learner.
        """
        if event.WhichOneof("message") != "report":
            return
        status = LearnerStatus.from_wire(event.report.status)
        if status.learner != member.name:
            raise PermissionDenied(
                f"a report on this stream must be of learner {member.name!r}, got {status.learner!r}"
            )
        managed = self._runs.find_for_learner(status.run_id, member.name)
        if managed is not None and event.report.attempt == managed.machine.attempt:
            self._controller.handle_report(managed, status, WaitReport.from_wire(event.report), event.report.violations)
        elif managed is not None:
            self._controller.handle_quiesced_report(managed, status)

    # ---- operators ----------------------------------------------------------------------------------------

    async def StartRun(self, request: coordinator_pb2.StartRunRequest, context: Context) -> coordinator_pb2.Run:
        """Start a run on joined learners."""
        with self._log_operator_call("StartRun", context) as call:
            managed = await self._launcher.start(request, build_wait_notifier(context))
            machine = managed.machine
            call |= {"run_id": machine.run_id, "learners": len(machine.addresses), "capture": machine.run.spec.capture}
        return managed.build_view()

    async def StopRun(self, request: coordinator_pb2.StopRunRequest, context: Context) -> coordinator_pb2.Run:
        """Stop a run; nothing changes if it has ended."""
        with self._log_operator_call("StopRun", context, run_id=request.run_id, reason=request.reason) as call:
            run = self._runs.resolve(request.run_id)
            call["run_id"] = run.build_view().run_id
            if isinstance(run, ManagedRun):
                self._controller.end_run(
                    run, RunState.STOPPED, shorten_text(request.reason) or "stopped by an operator"
                )
        return run.build_view()

    async def ResumeRun(self, request: coordinator_pb2.ResumeRunRequest, context: Context) -> coordinator_pb2.Run:
        """Resume a failed run."""
        with self._log_operator_call("ResumeRun", context, run_id=request.run_id) as call:
            managed = await self._launcher.resume(request.run_id)
            call["run_id"] = managed.machine.run_id
        return managed.build_view()

    async def LeaveRun(self, request: coordinator_pb2.LeaveRunRequest, context: Context) -> coordinator_pb2.Run:
        """Remove a learner from a run."""
        with self._log_operator_call("LeaveRun", context, run_id=request.run_id, learner=request.learner) as call:
            managed = self._runs.get_active(request.run_id)
            call["run_id"] = managed.machine.run_id
            await self._controller.run_operator_change(
                managed, self._controller.remove_learner(managed, request.learner)
            )
        return managed.build_view()

    async def JoinRun(self, request: coordinator_pb2.JoinRunRequest, context: Context) -> coordinator_pb2.Run:
        """Add a learner to a run."""
        with self._log_operator_call("JoinRun", context, run_id=request.run_id, learner=request.learner) as call:
            managed = self._runs.get_active(request.run_id)
            call["run_id"] = managed.machine.run_id
            await self._controller.run_operator_change(managed, self._controller.add_learner(managed, request.learner))
        return managed.build_view()

    async def RecoverRun(self, request: coordinator_pb2.RecoverRunRequest, context: Context) -> coordinator_pb2.Run:
        """Recover a run that is known to its learners only."""
        with self._log_operator_call("RecoverRun", context, run_id=request.run_id) as call:
            managed = await self._launcher.recover(request, build_wait_notifier(context))
            call["leased"] = managed.machine.clock.leased_until
        return managed.build_view()

    @contextlib.contextmanager
    def _log_operator_call(self, call: str, context: Context, **facts: str) -> Iterator[dict[str, object]]:
        """Log a changing call: its caller, facts and outcome. The block may add facts."""
        caller = self.config.credentials.identify_caller(context)
        logged: dict[str, object] = {name: value[:_MAX_LOGGED_CHARS] for name, value in facts.items()}
        logged |= {
            "call": call,
            "caller": UNIDENTIFIED_CALLER if caller is None else caller.uri,
            "peer": context.peer(),
        }
        try:
            yield logged
        except asyncio.CancelledError:
            log.info("operator call", **logged, outcome="cancelled")
            raise
        except Exception as error:
            text = shorten_text(str(error)) if has_project_text(error) else ""
            log.warning("operator call", **logged, outcome="refused", kind=type(error).__name__, error=text)
            raise
        log.info("operator call", **logged, outcome="done")

    async def GetRun(self, request: coordinator_pb2.GetRunRequest, context: Context) -> coordinator_pb2.Run:
        """Return the current view of a run, with its spec."""
        return self._runs.resolve(request.run_id).build_view(include_spec=True)

    async def ListRuns(
        self, request: coordinator_pb2.ListRunsRequest, context: Context
    ) -> coordinator_pb2.ListRunsResponse:
        """List the remembered runs."""
        courses, following = paginate(self._runs.runs_newest_first, request.page_size, request.page_token)
        runs = [managed.build_view() for managed in courses]
        answer = coordinator_pb2.ListRunsResponse(runs=runs, next_page_token=following)
        answer.now.GetCurrentTime()
        return answer

    async def WatchRun(
        self, request: coordinator_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.Run]:
        """Stream views of a run until it has ended: several times a second, and after rounds ever further apart."""
        run = self._runs.resolve(request.run_id)
        while isinstance(run, ManagedRun) and not run.machine.has_ended:
            if self._is_stopping:
                raise Unavailable("the coordinator is stopping")
            view_event = run.view_event
            yield run.build_view()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    max(WATCH_INTERVAL_S, len(run.machine.addresses) / _MAX_VIEWED_LEARNERS_PER_S)
                ):
                    await view_event.wait()
        # The last view is sent when the capture is closed.
        if isinstance(run, ManagedRun) and run.capture_close_task is not None:
            await asyncio.wait([run.capture_close_task])
        yield run.build_view()

    async def RebindLearner(
        self, request: coordinator_pb2.RebindLearnerRequest, context: Context
    ) -> coordinator_pb2.RebindLearnerResponse:
        """Unbind a learner's name from its state folder, so that the next learner of this name may have any."""
        with self._log_operator_call("RebindLearner", context, learner=request.learner):
            self._learners.unbind(request.learner)
        return coordinator_pb2.RebindLearnerResponse()


async def serve(
    config: CoordinatorConfig, *, stop_with_stdin: bool = False, metrics: MetricsEndpoint | None = None
) -> None:
    """Run the coordinator in this process until it is asked to stop.

    Args:
        config: configuration of the coordinator.
        stop_with_stdin: stop when standard input ends.
        metrics: endpoint for Prometheus; None: no metrics are served.

    Raises:
        SottovoceError: an address is in use.
    """
    service, refused = Coordinator(config), Refusals()
    async with serve_metrics(metrics, CATALOGUE, lambda: service.collect_metrics(refused), refused):
        announce("coordinator", address=(address := await service.start()))
        log_start("coordinator", config.credentials.principal, address=address, state=config.state)
        await serve_until_stopped(service.stop, stop_with_stdin=stop_with_stdin)
