"""The Python client: start a run on services that are up, feed it, watch it, ask for its predictions."""

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
"""To take a run up again: its capture may still have to be closed."""
MAX_PROGRESS_ENTRIES = 4_096
"""At a run that are kept for its report; of more, every second one."""
_UNREACHABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""How a call ends whose service dies or is told to end."""
_MAX_PREDICT_VALUES = 1_000_000
"""Features that a learner is asked about in one message."""
STOPPED_BY_OPERATOR = "stopped by the operator"
STOPPED_BY_SIGTERM = "the command that ran it was ended by SIGTERM"
COMMAND_STOP_REASONS = (STOPPED_BY_OPERATOR, STOPPED_BY_SIGTERM)
"""Reasons of a run that was stopped because its command was told to end."""
COORDINATOR_LABEL = "the coordinator"
"""Who is away, in a look at a run whose coordinator does not answer."""
FEEDING_FAILED = "a feeder could not deliver its records"
"""Begins the reason of a run that was stopped for it."""

RunProgressCallback = Callable[[RunProgress, str], None]


class StopSignal(asyncio.Event):
    """Set when a command is told to end.

    Attributes:
        reason: `STOPPED_BY_OPERATOR` or `STOPPED_BY_SIGTERM`, which its run is stopped with.
    """

    reason = STOPPED_BY_OPERATOR


class RunInterrupted(SottovoceError):
    """Told to stop before there was a run to stop; or twice, and what comes of the run is not waited for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went, as the coordinator saw it.

    Attributes:
        capture: folder of the capture, or its URL; None where nothing was captured.
        capture_error: why the capture could not be written to its end, or be closed; empty: it could.
        offline_intervals: who was away when, with those who left or joined while it went on.
        misconduct: what learners noticed of each other, in words.
        predictions: `(test records,)` labels by each learner on the held-out records; None where they could not be asked.
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
    """Run a spec on services that are up.

    Args:
        coordinator: its address.
        spec: what to run.
        data: streamed into the learners by this process.
        watch: called a few times a second.
        stop: when set, the run is stopped, and what there is comes back.
        world, replica: labels of the capture, where the run is one of an audit; no learner is told.
        resume: a run of this spec that failed, to be taken up again; empty: a new one begins.
        place: places the records where learners leave or join while it goes on (default: as they are placed).
        recover: a run of this spec that its coordinator has lost, to be taken up by another one; empty: a new one begins.
        credentials: of an operator, who also feeds the learners.

    Raises:
        SpecError: the run that is to be taken up again is of another spec.
        SottovoceError: refused, or the coordinator could not be reached.
        Interrupted: told to stop before the run had begun.
    """
    async with open_channel(coordinator, Role.COORDINATOR, credentials=credentials) as to:
        stub = coordinator_pb2_grpc.CoordinatorStub(to)
        try:
            told = spec.model_copy(update={"topology": spec.topology.inline_files(spec.names)})
            request = coordinator_pb2.StartRunRequest(
                spec=spec_to_wire(told), n_features=data.n_features, world=world, replica=replica
            )
            stop = stop or asyncio.Event()
            started = await _unless_told(_begun(to, coordinator, request, resume, recover), stop)
            anew = place_data or (lambda _: data)
            return await _Running(stub, started, spec, data, watch, stop, anew, credentials).to_its_end()
        except grpc.aio.AioRpcError as error:
            raise convert_status_error(error, f"the coordinator at {coordinator}") from None


async def _begun(
    to: grpc.aio.Channel, coordinator: str, wanted: coordinator_pb2.StartRunRequest, resume: str, recover: str
) -> coordinator_pb2.Run:
    """A new run; or one that failed, or was lost, goes on."""
    if resume:
        return await _resumed(coordinator_pb2_grpc.CoordinatorStub(to), wanted, resume)
    lost = coordinator_pb2.RecoverRunRequest(run_id=recover, spec=wanted.spec, n_features=wanted.n_features)
    method, request = ("RecoverRun", lost) if recover else ("StartRun", wanted)
    if recover:
        terminal.print_notice(_before_recovery(recover, json.loads(wanted.spec).get("capture", "none")))
    call = call_with_early_metadata(
        to, f"/sottovoce_wire.v1.Coordinator/{method}", request, coordinator_pb2.Run, _CALL_TIMEOUT_S
    )
    return await await_answer(call, to, f"the coordinator at {coordinator}", terminal.print_notice)


def _before_recovery(run_id: str, capture: str) -> str:
    """What is known of the learners' state folders before a run goes on from them, and what nobody can know."""
    if capture in ("relay", "mirror"):
        known = "its capture is asked first whether one was set back, where the coordinator has an --eavesdropper that has it"
    else:
        known = (
            "no message of it was recorded, so nobody knows if all were set back together, by a backup or a snapshot, and would "
            "send rounds again with other noise: stop here (Ctrl-C) if one was restored"
        )
    return f"recovering {run_id} from the state folders of its learners: {known}"


async def _resumed(
    stub: coordinator_pb2_grpc.CoordinatorAsyncStub, wanted: coordinator_pb2.StartRunRequest, run_id: str
) -> coordinator_pb2.Run:
    """A run that failed goes on; the records that are brought are those of its spec.

    Raises:
        SpecError: they are not.
    """
    run = await stub.GetRun(coordinator_pb2.GetRunRequest(run_id=run_id), timeout=_CALL_TIMEOUT_S)
    if (_but_absences(run.spec), run.n_features) != (_but_absences(wanted.spec), wanted.n_features):
        raise SpecError(
            f"run {run.run_id} is of another spec or other records: take it up with those that it was started with"
        )
    return await stub.ResumeRun(coordinator_pb2.ResumeRunRequest(run_id=run.run_id), timeout=RESUME_TIMEOUT_S)


def _but_absences(spec: str) -> dict[str, Any]:
    """A spec as it crosses the wire, whoever has left or joined since."""
    return {name: value for name, value in json.loads(spec).items() if name != "offline_intervals"}


async def _unless_told(start: Coroutine[Any, Any, coordinator_pb2.Run], stop: asyncio.Event) -> coordinator_pb2.Run:
    """Wait for a run to start, unless told to stop: learners that never join would keep us waiting."""
    async with Tasks() as tasks:
        starting = tasks.start(start)
        await asyncio.wait([starting, tasks.start(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise RunInterrupted("stopped before the run had begun")
        return starting.result()


class _Running:
    """One run under way."""

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
        self._moved = asyncio.Event()  # some learner is elsewhere now
        self._lost: set[int] = set()
        self._known: Sequence[LearnerStatus] = ()
        self._unfed: BaseException | None = None
        self._give_up = asyncio.Event()

    async def to_its_end(self) -> Outcome:
        run_id = self._started.run_id
        self._see(self._started)  # from here on there is a run
        if self._attempt:  # learners may have left or joined before it failed
            await self._amended(self._started)
        async with Tasks() as tasks:
            feeders = tasks.start(self._feed())
            feeders.add_done_callback(self._feeding_over)
            tasks.start(self._stop_when_told())
            last = await self._watch_it()
        seconds = time.monotonic() - self._began
        state, detail = _state(last), last.detail
        if (
            last.detail.startswith(FEEDING_FAILED) and self._unfed is not None
        ):  # else it ended for another reason, and they with it
            state, detail = "failed", f"records could not be delivered: {extract_first_error(self._unfed)}"
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
        if self._spec.data.is_live:  # others bring them
            return
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._addresses)):
                group.create_task(self._feed_one(index))

    async def _feed_one(self, index: int) -> None:
        """A learner, wherever it is."""
        while True:
            address = self._addresses[index]
            if not (address and self._takes_part(index)):  # it joins later
                await self._until_gone(index, address)
                continue
            if index in self._lost:
                return
            async with Tasks() as tasks:
                patience_s, own = self._spec.clock.deadline_s, self._data.learners[index]
                feeding = tasks.start(
                    feed(
                        address,
                        self._started.run_id,
                        own,
                        timeout_s=patience_s,
                        learner=self._spec.names[index],
                        credentials=self._credentials,
                    )
                )
                leaving = tasks.start(self._until_gone(index, address))
                await asyncio.wait([feeding, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not feeding.done():
                    continue
                try:
                    return feeding.result()
                except (Unavailable, FailedPrecondition):
                    if not self._spec.can_drop_learners:  # else its coordinator says whether the run goes on without it
                        raise

    async def _until_gone(self, index: int, address: str) -> None:
        """Wait until a learner is at another address, or joins the run, or is lost to it."""
        before = self._takes_part(index)
        while self._addresses[index] == address and self._takes_part(index) == before and index not in self._lost:
            await self._moved.wait()

    def _takes_part(self, index: int) -> bool:
        """Is there any round for its records?"""
        return self._spec.participation.learner_participation(index, self._spec.rounds).end > 0

    async def _amended(self, view: coordinator_pb2.Run) -> None:
        """Learners have left or joined, or all go on from their logs."""
        run = await self._stub.GetRun(coordinator_pb2.GetRunRequest(run_id=view.run_id), timeout=_CALL_TIMEOUT_S)
        self._attempt = view.attempt
        told = [OfflineInterval(**each) for each in json.loads(run.spec).get("offline_intervals") or ()]
        self._lost = {self._spec.names.index(each.learner) for each in told if each.missed_from_rounds}
        if tuple(told) == self._spec.offline_intervals:
            return
        self._spec = self._spec.model_copy(update={"offline_intervals": tuple(told)})
        self._data = await asyncio.to_thread(self._place, self._spec)
        self._moved.set()
        self._moved = asyncio.Event()

    def _feeding_over(self, task: asyncio.Task[None]) -> None:
        """Without its records the run cannot go on: stop it, and no other one, and let the feeder's error say why."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._unfed = error
            self._give_up.set()

    async def _stop_when_told(self) -> None:
        """Once told to; a coordinator that is away and keeps the run is told when it is back."""
        async with Tasks() as tasks:
            waits = [tasks.start(event.wait()) for event in (self._stop, self._give_up)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        told = self._stop.reason if isinstance(self._stop, StopSignal) else STOPPED_BY_OPERATOR
        reason = told if self._stop.is_set() else _unfed(self._unfed)
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
                    "the coordinator is away: the run is stopped when it is back; told to stop once more, this command ends, and "
                    "the run goes on"
                )
            await asyncio.sleep(_RETRY_DELAY_S)

    async def _watch_it(self) -> coordinator_pb2.Run:
        """The last view of the run. A coordinator that keeps its runs may be away for a while: they go on when it is back."""
        request = coordinator_pb2.WatchRunRequest(run_id=self._started.run_id)
        last, away_since = self._started, 0.0
        while True:
            try:
                async for view in self._stub.WatchRun(request):
                    last, away_since = view, 0.0
                    self._see(view)
                    if view.attempt != self._attempt:
                        await self._amended(view)
                if last.HasField("ended_at"):
                    return last
                raise Unavailable("the coordinator ended the watch without a word")
            except (grpc.aio.AioRpcError, Unavailable) as error:
                _require_known(last, error)
                away_since = away_since or time.monotonic()
                gone = isinstance(error, Unavailable) or error.code() in _UNREACHABLE_CODES
                if not (
                    gone and last.durable and time.monotonic() - away_since < self._spec.clock.coordinator_timeout_s
                ):
                    raise
            self._watch(replace(self._look(last), offline_learners=(COORDINATOR_LABEL,)), _state(last))
            await asyncio.sleep(_RETRY_DELAY_S)

    def _see(self, view: coordinator_pb2.Run) -> None:
        if view.state == coordinator_pb2.RUN_STATE_CONNECTING:  # the run begins after the last of these
            self._began = time.monotonic()
        now = [each.address for each in view.learners]
        if now != self._addresses:
            self._addresses = now
            self._moved.set()
            self._moved = asyncio.Event()
        self._progress.append(self._look(view))
        if len(self._progress) > MAX_PROGRESS_ENTRIES:  # however long the run lasts
            del self._progress[1:-1:2]
        self._watch(self._progress[-1], _state(view))

    def _look(self, view: coordinator_pb2.Run) -> RunProgress:
        statuses = self._newest(_statuses(view))
        return RunProgress(
            seconds=time.monotonic() - self._began,
            rounds=tuple(s.rounds_done for s in statuses),
            accuracy=tuple(s.prequential_accuracy for s in statuses),
            epsilon=tuple(s.epsilon_spent for s in statuses),
            messages=tuple(s.messages_sent for s in statuses),
            offline_learners=tuple(each.status.learner for each in view.learners if each.HasField("disconnected_at")),
            departed_learners=frozenset(i for i in range(len(statuses)) if has_left(self._spec, i)),
            violations=describe_violations(view),
            run_id=escape_control(view.run_id),
            capture_error=None if view.HasField("ended_at") else escape_control(view.capture_error),
        )

    def _newest(self, told: Sequence[LearnerStatus]) -> Sequence[LearnerStatus]:
        """What is known of each learner: a coordinator that was away comes back with what it had kept, which may be less."""
        self._known = [
            before if (before.rounds_committed, before.rounds_done) > (now.rounds_committed, now.rounds_done) else now
            for before, now in zip(self._known or told, told, strict=True)
        ]
        return self._known

    async def _predict(self, name: str, address: str) -> FloatArray | None:
        """Labels on the held-out records; None where the run did not opt in or the learner is gone."""
        if not self._spec.telemetry.predict or not len(self._data.test_labels):
            return None
        async with open_channel(address, Role.LEARNER, name, credentials=self._credentials) as to:
            rows, labels = self._data.test_features, list[FloatArray]()
            each = max(1, _MAX_PREDICT_VALUES // rows.shape[1])
            for first in range(0, len(rows), each):
                request = learner_pb2.PredictRequest(features=to_tensor(rows[first : first + each]))
                try:
                    answer = await learner_pb2_grpc.LearnerStub(to).Predict(request, timeout=_PREDICT_TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    return None
                labels.append(from_tensor(answer.labels))
        return np.concatenate(labels)


def has_left(spec: RunSpec, index: int) -> bool:
    """Does a learner leave before the last round, or was it lost?"""
    lost = any(each.missed_from_rounds and each.learner == spec.names[index] for each in spec.offline_intervals)
    return lost or spec.participation.learner_participation(index, spec.rounds).end < spec.rounds


def _require_known(run: coordinator_pb2.Run, error: Exception) -> None:
    """A coordinator that keeps its runs, and knows nothing of this one, was started on another folder.

    Raises:
        FailedPrecondition: that is so.
    """
    if run.durable and isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND:
        raise FailedPrecondition(
            f"{error.details()}; if its coordinator has lost its state folder, `sottovoce run SPEC --recover {run.run_id}` takes "
            "the run up again"
        ) from None


def _state(run: coordinator_pb2.Run) -> str:
    """The run's state, in a word."""
    return coordinator_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()


def _statuses(run: coordinator_pb2.Run) -> list[LearnerStatus]:
    return [LearnerStatus.from_wire(each.status) for each in run.learners]


def _unfed(error: BaseException | None) -> str:
    """Why records could not be delivered, for all in the run: that their feeder may not. All else is for their owner alone."""
    first = None if error is None else extract_first_error(error)
    return f"{FEEDING_FAILED}: {escape_control(str(first))}" if isinstance(first, PermissionDenied) else FEEDING_FAILED
