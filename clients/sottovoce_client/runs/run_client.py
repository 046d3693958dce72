"""Python client of a run: start it on running services, feed and watch it, request predictions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import grpc
import numpy as np

from sottovoce_client import terminal
from sottovoce_client.runs.feeder import feed
from sottovoce_client.runs.summary import RunProgress
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import FailedPrecondition, PermissionDenied, SottovoceError, SpecError, Unavailable
from sottovoce_core.network.participation_schedule import OfflineInterval
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import escape_control
from sottovoce_rpc.codec import from_tensor, to_tensor
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.learner_status import LearnerStatus, describe_violations
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_rpc.tasks import Tasks, await_answer, call_with_early_metadata, extract_first_error
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, learner_pb2, learner_pb2_grpc

_CALL_TIMEOUT_S, _PREDICT_TIMEOUT_S, _RETRY_DELAY_S = 40.0, 30.0, 1.0
RESUME_TIMEOUT_S = 100.0
"""Timeout of resuming a run: its capture may still have to be closed."""
MAX_PROGRESS_ENTRIES = 4_096
"""Maximum number of progress entries kept for the report; above it, every second one is dropped."""
_UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes of a call to a service that dies or is stopped."""
_MAX_PREDICT_VALUES = 1_000_000
"""Maximum number of features in one prediction request."""
STOPPED_BY_OPERATOR = "the operator stopped the run"
STOPPED_BY_SIGTERM = "the command that ran it was ended by SIGTERM"
COMMAND_STOP_REASONS = (STOPPED_BY_OPERATOR, STOPPED_BY_SIGTERM)
"""Stop reasons of a run whose command was stopped."""
COORDINATOR_LABEL = "the coordinator"
"""Name of the coordinator in the list of disconnected processes."""
FEEDING_FAILED = "a feeder could not deliver its records"
"""Prefix of the stop reason of a run whose records could not be delivered."""

RunProgressCallback = Callable[[RunProgress, str], None]


class StopSignal(asyncio.Event):
    """Event that is set when a command is to stop.

    Attributes:
        reason: `STOPPED_BY_OPERATOR` or `STOPPED_BY_SIGTERM`, the stop reason of its run.
    """

    reason = STOPPED_BY_OPERATOR


class RunInterrupted(SottovoceError):
    """The command was stopped before its run began, or stopped twice, and does not wait for the end of its run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run, as the coordinator reports it.

    Attributes:
        capture_location: Folder of the capture, or its URL; None: no capture.
        capture_error: Reason why the capture could not be completed or closed; empty: no error.
        offline_intervals: Offline intervals of learners, with those that left or joined during the run.
        violations: Violations that learners reported of each other, in words.
        predictions: `(test records,)` labels by each learner on the held-out records; None: not available.
    """

    run_id: str
    state: str
    detail: str
    seconds: float
    statuses: tuple[LearnerStatus, ...]
    progress: tuple[RunProgress, ...]
    capture_location: str | None
    predictions: tuple[FloatArray | None, ...]
    capture_error: str = ""
    offline_intervals: tuple[OfflineInterval, ...] = ()
    violations: tuple[str, ...] = ()


async def run_on_services(
    coordinator: str,
    spec: RunSpec,
    data: PlacedData,
    watch: RunProgressCallback,
    stop: asyncio.Event | None = None,
    *,
    world: int | None = None,
    replica: int | None = None,
    resume: str = "",
    recover: str = "",
    place_data: Callable[[RunSpec], PlacedData] | None = None,
    credentials: Credentials = NO_IDENTITY,
) -> Outcome:
    """Run a spec on running services.

    Args:
        coordinator: Address of the coordinator.
        spec: Run spec.
        data: Records, which this process streams into the learners.
        watch: Called a few times a second.
        stop: When set, the run is stopped, and its partial outcome is returned.
        world, replica: Labels of the capture, if the run belongs to an audit; learners do not receive them.
        resume: Failed run of this spec to resume; empty: start a new one.
        place_data: Places the records if learners leave or join during the run (default: their placement does not change).
        recover: Run of this spec that its coordinator has lost, to be recovered by another one; empty: start a new one.
        credentials: Credentials of an operator, who also feeds the learners.

    Raises:
        SpecError: The run to resume has another spec.
        SottovoceError: The run was refused, or the coordinator is unreachable.
        RunInterrupted: The command was stopped before the run began.
    """
    async with open_channel(coordinator, Role.COORDINATOR, credentials=credentials) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        try:
            sent_spec = spec.model_copy(update={"topology": spec.topology.inline_files(spec.names)})
            request = coordinator_pb2.StartRunRequest(
                spec=spec_to_wire(sent_spec), n_features=data.n_features, world=world, replica=replica
            )
            stop = stop or asyncio.Event()
            started = await _await_start(_start_run(channel, coordinator, request, resume, recover), stop)
            place_data = place_data or (lambda _: data)
            monitor = _RunMonitor(stub, started, spec, data, watch, stop, place_data, credentials)
            return await monitor.run_to_end()
        except grpc.aio.AioRpcError as error:
            raise convert_status_error(error, f"the coordinator at {coordinator}") from None


async def _start_run(
    channel: grpc.aio.Channel, coordinator: str, wanted: coordinator_pb2.StartRunRequest, resume: str, recover: str
) -> coordinator_pb2.Run:
    """Start a new run; or resume a failed one, or recover a lost one."""
    if resume:
        return await _resume_run(coordinator_pb2_grpc.CoordinatorStub(channel), wanted, resume)
    lost = coordinator_pb2.RecoverRunRequest(run_id=recover, spec=wanted.spec, n_features=wanted.n_features)
    method, request = ("RecoverRun", lost) if recover else ("StartRun", wanted)
    if recover:
        terminal.print_notice(_describe_recovery(recover, json.loads(wanted.spec).get("capture", "none")))
    call = call_with_early_metadata(
        channel, f"/sottovoce_wire.v1.Coordinator/{method}", request, coordinator_pb2.Run, _CALL_TIMEOUT_S
    )
    return await await_answer(call, channel, f"the coordinator at {coordinator}", terminal.print_notice)


def _describe_recovery(run_id: str, capture: str) -> str:
    """Describe which checks are made on the learners' state folders before a run is recovered from them."""
    if capture in ("relay", "mirror"):
        known = "its capture shows whether one was rolled back, if the coordinator has the --eavesdropper that keeps it"
    else:
        known = (
            "no message of it was recorded, so it is unknown whether all were rolled back together, by a backup or a "
            "snapshot, and would repeat rounds with other noise: stop here (Ctrl-C) if one was restored"
        )
    return f"recovering {run_id} from the state folders of its learners: {known}"


async def _resume_run(
    stub: coordinator_pb2_grpc.CoordinatorAsyncStub, wanted: coordinator_pb2.StartRunRequest, run_id: str
) -> coordinator_pb2.Run:
    """Resume a failed run.

    Raises:
        SpecError: The run has another spec or other records.
    """
    run = await stub.GetRun(coordinator_pb2.GetRunRequest(run_id=run_id), timeout=_CALL_TIMEOUT_S)
    if (_parse_without_intervals(run.spec), run.n_features) != (
        _parse_without_intervals(wanted.spec),
        wanted.n_features,
    ):
        raise SpecError(
            f"run {run.run_id} must be resumed with the spec and the records that it was started with, and these are others"
        )
    return await stub.ResumeRun(coordinator_pb2.ResumeRunRequest(run_id=run.run_id), timeout=RESUME_TIMEOUT_S)


def _parse_without_intervals(spec: str) -> dict[str, Any]:
    """Parse a spec as sent on the wire, without the changes of learners that have left or joined."""
    return {name: value for name, value in json.loads(spec).items() if name != "offline_intervals"}


async def _await_start(start: Coroutine[Any, Any, coordinator_pb2.Run], stop: asyncio.Event) -> coordinator_pb2.Run:
    """Wait for a run to start, unless the command is stopped: learners may never join."""
    async with Tasks() as tasks:
        starting = tasks.start(start)
        await asyncio.wait([starting, tasks.start(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise RunInterrupted("stopped before the run began")
        return starting.result()


class _RunMonitor:
    """Active run: feeds and watches it, and stops it on request."""

    def __init__(
        self,
        stub: coordinator_pb2_grpc.CoordinatorAsyncStub,
        started: coordinator_pb2.Run,
        spec: RunSpec,
        data: PlacedData,
        watch: RunProgressCallback,
        stop: asyncio.Event,
        place: Callable[[RunSpec], PlacedData],
        credentials: Credentials,
    ) -> None:
        self._place, self._attempt, self._credentials = place, started.attempt, credentials
        self._stub, self._started, self._spec, self._data = stub, started, spec, data
        self._watch, self._stop = watch, stop
        self._began = time.monotonic()
        self._progress: list[RunProgress] = []
        self._addresses = [each.address for each in started.learners]
        self._moved = asyncio.Event()  # a learner has another address, or other learners take part
        self._lost: set[int] = set()
        self._known: Sequence[LearnerStatus] = ()
        self._feeding_error: BaseException | None = None
        self._give_up = asyncio.Event()

    async def run_to_end(self) -> Outcome:
        run_id = self._started.run_id
        self._record_view(self._started)  # the run exists from here on
        if self._attempt:  # learners may have left or joined before it failed
            await self._apply_changes(self._started)
        async with Tasks() as tasks:
            feeders = tasks.start(self._feed())
            feeders.add_done_callback(self._handle_feeding_end)
            tasks.start(self._stop_on_request())
            last = await self._watch_to_end()
        seconds = time.monotonic() - self._began
        state, detail = _state(last), last.detail
        if (
            last.detail.startswith(FEEDING_FAILED) and self._feeding_error is not None
        ):  # else the run ended for another reason
            state, detail = "failed", f"records could not be delivered: {extract_first_error(self._feeding_error)}"
        predictions = await asyncio.gather(*map(self._predict, self._spec.names, self._addresses))
        location = self._started.capture_location
        return Outcome(
            run_id,
            state,
            escape_control(detail),
            seconds,
            tuple(_statuses(last)),
            tuple(self._progress),
            location or None,
            tuple(predictions),
            escape_control(last.capture_error),
            self._spec.offline_intervals,
            describe_violations(last),
        )

    async def _feed(self) -> None:
        if self._spec.data.is_live:  # its sources send records themselves
            return
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._addresses)):
                group.create_task(self._feed_one(index))

    async def _feed_one(self, index: int) -> None:
        """Feed a learner, at its current address."""
        while True:
            address = self._addresses[index]
            if not (address and self._has_rounds(index)):  # it joins later
                await self._wait_for_change(index, address)
                continue
            if index in self._lost:
                return
            async with Tasks() as tasks:
                timeout_s, own = self._spec.clock.deadline_s, self._data.learners[index]
                feeding = tasks.start(
                    feed(
                        address,
                        self._started.run_id,
                        own,
                        timeout_s=timeout_s,
                        learner=self._spec.names[index],
                        credentials=self._credentials,
                    )
                )
                leaving = tasks.start(self._wait_for_change(index, address))
                await asyncio.wait([feeding, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not feeding.done():
                    continue
                try:
                    return feeding.result()
                except (Unavailable, FailedPrecondition):
                    if (
                        not self._spec.can_drop_learners
                    ):  # else the coordinator decides whether the run continues without it
                        raise

    async def _wait_for_change(self, index: int, address: str) -> None:
        """Wait until a learner has another address, joins the run, or is lost to it."""
        before = self._has_rounds(index)
        while self._addresses[index] == address and self._has_rounds(index) == before and index not in self._lost:
            await self._moved.wait()

    def _has_rounds(self, index: int) -> bool:
        """Return whether a learner has rounds for its records."""
        return self._spec.participation.learner_participation(index, self._spec.rounds).end > 0

    async def _apply_changes(self, view: coordinator_pb2.Run) -> None:
        """Apply a reconfiguration: learners have left or joined, or all resume from their logs."""
        run = await self._stub.GetRun(coordinator_pb2.GetRunRequest(run_id=view.run_id), timeout=_CALL_TIMEOUT_S)
        self._attempt = view.attempt
        intervals = [OfflineInterval(**each) for each in json.loads(run.spec).get("offline_intervals") or ()]
        self._lost = {self._spec.names.index(each.learner) for each in intervals if each.missed_from_rounds}
        if tuple(intervals) == self._spec.offline_intervals:
            return
        self._spec = self._spec.model_copy(update={"offline_intervals": tuple(intervals)})
        self._data = await asyncio.to_thread(self._place, self._spec)
        self._moved.set()
        self._moved = asyncio.Event()

    def _handle_feeding_end(self, task: asyncio.Task[None]) -> None:
        """Stop this run if its records could not be delivered; the feeder's error is the reason."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._feeding_error = error
            self._give_up.set()

    async def _stop_on_request(self) -> None:
        """Stop the run when requested. If the coordinator is disconnected and keeps its runs, repeat until it answers."""
        async with Tasks() as tasks:
            waits = [tasks.start(event.wait()) for event in (self._stop, self._give_up)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        requested = self._stop.reason if isinstance(self._stop, StopSignal) else STOPPED_BY_OPERATOR
        reason = requested if self._stop.is_set() else _describe_feeding_error(self._feeding_error)
        request = coordinator_pb2.StopRunRequest(run_id=self._started.run_id, reason=reason)
        for attempt in count():
            try:
                await self._stub.StopRun(request, timeout=_CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                if not (self._started.durable and error.code() in _UNREACHABLE_CODES):
                    raise
            if not attempt:
                terminal.print_notice(
                    "the coordinator is disconnected: the run is stopped when it is back; stopped once more, this command ends, "
                    "and the run continues"
                )
            await asyncio.sleep(_RETRY_DELAY_S)

    async def _watch_to_end(self) -> coordinator_pb2.Run:
        """Watch the run to its end and return its last view, also over an outage of a coordinator that keeps its runs."""
        request = coordinator_pb2.WatchRunRequest(run_id=self._started.run_id)
        last, disconnected_since = self._started, 0.0
        while True:
            try:
                async for view in self._stub.WatchRun(request):
                    last, disconnected_since = view, 0.0
                    self._record_view(view)
                    if view.attempt != self._attempt:
                        await self._apply_changes(view)
                if last.HasField("ended_at"):
                    return last
                raise Unavailable("the coordinator ended the stream of WatchRun without a reason")
            except (grpc.aio.AioRpcError, Unavailable) as error:
                _require_known(last, error)
                disconnected_since = disconnected_since or time.monotonic()
                is_unreachable = isinstance(error, Unavailable) or error.code() in _UNREACHABLE_CODES
                outage_s = time.monotonic() - disconnected_since
                if not (is_unreachable and last.durable and outage_s < self._spec.clock.coordinator_timeout_s):
                    raise
            self._watch(replace(self._make_progress(last), offline_learners=(COORDINATOR_LABEL,)), _state(last))
            await asyncio.sleep(_RETRY_DELAY_S)

    def _record_view(self, view: coordinator_pb2.Run) -> None:
        if view.state == coordinator_pb2.RUN_STATE_CONNECTING:  # the run begins after the last such view
            self._began = time.monotonic()
        now = [each.address for each in view.learners]
        if now != self._addresses:
            self._addresses = now
            self._moved.set()
            self._moved = asyncio.Event()
        self._progress.append(self._make_progress(view))
        if len(self._progress) > MAX_PROGRESS_ENTRIES:  # bounds the memory of a long run
            del self._progress[1:-1:2]
        self._watch(self._progress[-1], _state(view))

    def _make_progress(self, view: coordinator_pb2.Run) -> RunProgress:
        statuses = self._keep_newest(_statuses(view))
        return RunProgress(
            seconds=time.monotonic() - self._began,
            rounds=tuple(s.rounds_done for s in statuses),
            accuracy=tuple(s.prequential_accuracy for s in statuses),
            epsilon=tuple(s.epsilon_spent for s in statuses),
            epsilon_charged=tuple(s.epsilon_charged for s in statuses),
            messages=tuple(s.messages_sent for s in statuses),
            offline_learners=tuple(each.status.learner for each in view.learners if each.HasField("disconnected_at")),
            departed_learners=frozenset(i for i in range(len(statuses)) if has_left(self._spec, i)),
            violations=describe_violations(view),
            run_id=escape_control(view.run_id),
            capture_error=None if view.HasField("ended_at") else escape_control(view.capture_error),
        )

    def _keep_newest(self, reported: Sequence[LearnerStatus]) -> Sequence[LearnerStatus]:
        """Return the newest known statuses: a coordinator that was restarted may report older ones."""
        self._known = [
            before if (before.rounds_committed, before.rounds_done) > (now.rounds_committed, now.rounds_done) else now
            for before, now in zip(self._known or reported, reported, strict=True)
        ]
        return self._known

    async def _predict(self, name: str, address: str) -> FloatArray | None:
        """Request labels on the held-out records; None if the run did not opt in or the learner does not answer."""
        if not self._spec.telemetry.predict or not len(self._data.test_labels):
            return None
        async with open_channel(address, Role.LEARNER, name, credentials=self._credentials) as channel:
            rows, labels = self._data.test_features, list[FloatArray]()
            each = max(1, _MAX_PREDICT_VALUES // rows.shape[1])
            for first in range(0, len(rows), each):
                request = learner_pb2.PredictRequest(features=to_tensor(rows[first : first + each]))
                try:
                    answer = await learner_pb2_grpc.LearnerStub(channel).Predict(request, timeout=_PREDICT_TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    return None
                labels.append(from_tensor(answer.labels))
        return np.concatenate(labels)


def has_left(spec: RunSpec, index: int) -> bool:
    """Return whether a learner leaves before the last round, or was lost."""
    is_lost = any(each.missed_from_rounds and each.learner == spec.names[index] for each in spec.offline_intervals)
    return is_lost or spec.participation.learner_participation(index, spec.rounds).end < spec.rounds


def _require_known(run: coordinator_pb2.Run, error: Exception) -> None:
    """Require that a coordinator that keeps its runs still has this one.

    Raises:
        FailedPrecondition: It was started on another state folder.
    """
    if run.durable and isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND:
        raise FailedPrecondition(
            f"{error.details()}; if its coordinator has lost its state folder, `sottovoce run SPEC --recover {run.run_id}` "
            "recovers the run"
        ) from None


def _state(run: coordinator_pb2.Run) -> str:
    """Return the run's state in one word."""
    return coordinator_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()


def _statuses(run: coordinator_pb2.Run) -> list[LearnerStatus]:
    return [LearnerStatus.from_wire(each.status) for each in run.learners]


def _describe_feeding_error(error: BaseException | None) -> str:
    """Describe to all participants why records were not delivered: only a refused permission; other reasons are the owner's."""
    first = None if error is None else extract_first_error(error)
    return f"{FEEDING_FAILED}: {escape_control(str(first))}" if isinstance(first, PermissionDenied) else FEEDING_FAILED
