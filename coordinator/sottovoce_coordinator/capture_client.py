"""Client of the eavesdropper: opens, monitors and closes the captures of a coordinator's runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message

from sottovoce_coordinator.run_registry import ManagedRun
from sottovoce_coordinator.run_state import CaptureBinding, RunStateMachine
from sottovoce_coordinator.store import StoredRun
from sottovoce_core.errors import FailedPrecondition, SottovoceError
from sottovoce_core.runs.run import Run
from sottovoce_rpc.codec import to_fields
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, eavesdropper_pb2_grpc

log = structlog.get_logger()

_OPEN_TIMEOUT_S = 10.0
_RESUME_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 60.0
"""Time for an eavesdropper to close a capture: it waits for messages on their way, and writes what is in memory."""
EQUIVOCATION_TEXT = "a round was sent with two contents, whose difference no noise hides"
_CHECK_INTERVAL_S = 2.0
"""Interval between checks that the eavesdropper still captures a run."""


Routes = Sequence[tuple[int, int, str]]
"""Caller, callee, and address of the callee."""


class CaptureClient:
    """Client of one eavesdropper.

    Args:
        address: address of the eavesdropper; None: there is none.
        tasks: tasks of the coordinator, in which captures are closed without delaying a caller.
        credentials: credentials of the coordinator.
    """

    def __init__(self, address: str | None, tasks: Tasks, credentials: Credentials = NO_IDENTITY) -> None:
        self.address, self._tasks, self._credentials = address, tasks, credentials

    async def _call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Call the eavesdropper.

        Args:
            method: name of the method.
            request: request message.
            timeout_s: time limit.

        Raises:
            FailedPrecondition: there is no eavesdropper.
            SottovoceError: it cannot be reached, or refuses.
        """
        if self.address is None:
            raise FailedPrecondition("this coordinator was given no eavesdropper (--eavesdropper)")
        async with open_channel(self.address, Role.EAVESDROPPER, credentials=self._credentials) as channel:
            try:
                return await getattr(eavesdropper_pb2_grpc.EavesdropperStub(channel), method)(
                    request, timeout=timeout_s
                )
            except grpc.aio.AioRpcError as error:
                raise convert_status_error(error, f"the eavesdropper at {self.address}") from None

    async def open_capture(self, machine: RunStateMachine, request: coordinator_pb2.StartRunRequest) -> CaptureBinding:
        """Open a capture of a run, if its spec requires one.

        Raises:
            FailedPrecondition: there is no eavesdropper.
            SottovoceError: it cannot be reached, or refuses.
        """
        capture = machine.run.spec.capture
        if capture == "none":
            return CaptureBinding()
        if self.address is None:
            raise FailedPrecondition(
                f"capture: {capture} needs an eavesdropper; this coordinator was given none (--eavesdropper)"
            )
        edges = machine.list_routes() if machine.run.spec.is_proxied else []
        opening = eavesdropper_pb2.OpenCaptureRequest(
            run_id=machine.run_id,
            spec=spec_to_wire(machine.run.spec),
            routes=_to_wire(edges),
            n_features=request.n_features,
            fields=to_fields(machine.run.field_shapes),
            world=request.world if request.HasField("world") else None,
            replica=request.replica if request.HasField("replica") else None,
        )
        return _build_binding(await self._call("OpenCapture", opening, _OPEN_TIMEOUT_S), edges)

    async def list_sent_rounds(
        self, run_id: str = "", learners: Sequence[str] = (), timeout_s: float = _RESUME_TIMEOUT_S
    ) -> Sequence[eavesdropper_pb2.SentRounds]:
        """Return how far learners were in captured runs; empty if there is no eavesdropper.

        Args:
            run_id: this run only; empty: every run.
            learners: these learners only; empty: all.
            timeout_s: time limit.

        Raises:
            SottovoceError: the eavesdropper does not answer.
        """
        if self.address is None:
            return ()
        request = eavesdropper_pb2.ListSentRoundsRequest(run_id=run_id, learners=learners)
        answer: eavesdropper_pb2.ListSentRoundsResponse = await self._call("ListSentRounds", request, timeout_s)
        return answer.sent_rounds

    async def recover_capture(self, machine: RunStateMachine) -> tuple[CaptureBinding, str]:
        """Resume the capture of a run whose coordinator lost its state; return it, or why nothing is captured any more."""
        capture = machine.run.spec.capture
        if capture == "none":
            return CaptureBinding(), ""
        edges = machine.list_routes() if machine.run.spec.is_proxied else []
        try:
            return _build_binding(await self._resume(machine.run_id, edges, timeout_s=_RESUME_TIMEOUT_S), edges), ""
        except SottovoceError as error:
            return CaptureBinding(), _describe_loss(machine.run_id, error)

    async def restore_sent_rounds(self, machine: RunStateMachine) -> None:
        """Restore from the capture how far learners were: the coordinator's own state may be outdated, too."""
        if not machine.capture_binding.capture_id:
            return
        try:
            sent = await self.list_sent_rounds(machine.run_id, timeout_s=_OPEN_TIMEOUT_S)
        except SottovoceError as error:
            log.warning("the capture does not report how far learners were", run_id=machine.run_id, reason=str(error))
            return
        for each in sent:
            machine.restore_sent_rounds(each)

    async def resume_capture(self, stored: StoredRun) -> str:
        """Resume the capture of a failed run; return why that is not possible, empty if it is, or there is none."""
        if not stored.capture_binding.capture_id:
            return ""
        try:
            await self._resume(stored.run_id, timeout_s=_RESUME_TIMEOUT_S)
        except SottovoceError as error:
            return _describe_loss(stored.run_id, error)
        return ""

    async def reconfigure(self, machine: RunStateMachine, run: Run) -> None:
        """Send the changed spec to the eavesdropper; a disconnected one gets it when it is back."""
        if machine.capture_binding.capture_id:
            with contextlib.suppress(SottovoceError):
                await self._resume(machine.run_id, spec=spec_to_wire(run.spec))

    async def _resume(
        self, run_id: str, routes: Routes = (), spec: str = "", timeout_s: float = _OPEN_TIMEOUT_S
    ) -> eavesdropper_pb2.OpenCaptureResponse:
        """Ask the eavesdropper to continue the capture of a run; nothing changes if it already does.

        Args:
            run_id: the run.
            routes: new routes of the relays, if they have changed.
            spec: new spec of the run, if it has changed.
            timeout_s: time limit. A restarted eavesdropper first reads the capture, and continues that after the limit.

        Raises:
            FailedPrecondition: there is no eavesdropper.
            SottovoceError: it cannot be reached, or the capture is closed.
        """
        request = eavesdropper_pb2.OpenCaptureRequest(run_id=run_id, resume=True, routes=_to_wire(routes), spec=spec)
        response: eavesdropper_pb2.OpenCaptureResponse = await self._call("OpenCapture", request, timeout_s)
        return response

    def monitor_capture(self, managed: ManagedRun, fail: Callable[[str], None]) -> None:
        """Monitor a capture: a restarted eavesdropper resumes it when asked, and the run's messages pass through its relays.

        Args:
            managed: the run.
            fail: called with the reason if the run cannot go on, because of a gap or an equivocation.
        """
        if managed.machine.capture_binding.capture_id and not managed.capture_loss_reason and self.address is not None:
            self._tasks.start(self._monitor(managed, fail), "a capture is not monitored")

    async def _monitor(self, managed: ManagedRun, fail: Callable[[str], None]) -> None:
        sent_addresses, sent_run = tuple[str, ...](), managed.machine.run
        while not managed.machine.has_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_INTERVAL_S):
                    await managed.end_event.wait()
                return
            try:
                machine, addresses = managed.machine, managed.machine.addresses
                has_moved = bool(machine.capture_binding.relay_addresses) and addresses != sent_addresses
                run, spec = machine.run, spec_to_wire(machine.run.spec) if machine.run is not sent_run else ""
                response = await self._resume(machine.run_id, machine.list_routes() if has_moved else (), spec)
                sent_addresses, sent_run = addresses, run
                self._update_outage(managed, "")
                if response.contradiction:
                    fail(f"{EQUIVOCATION_TEXT}: {response.contradiction}. Was the state folder of a learner set back?")
                elif why := _describe_gaps(managed.machine, response.gaps):
                    fail(why)
            except SottovoceError as error:
                self._update_outage(managed, f"nothing is captured now: {error}")

    def _update_outage(self, managed: ManagedRun, reason: str) -> None:
        """Record the start or end of an outage; watchers of the run are notified at once."""
        if bool(reason) != bool(managed.capture_outage_reason):
            managed.capture_outage_reason = reason
            managed.notify_watchers()
            if reason:
                log.warning("nothing is captured", run_id=managed.machine.run_id, reason=reason)
            else:
                log.info("captured again", run_id=managed.machine.run_id)

    def close_capture(self, machine: RunStateMachine) -> asyncio.Task[str] | None:
        """Close a run's capture in a task; its result is the eavesdropper's error, or empty. None if there is no capture."""
        if not machine.capture_binding.capture_id or self.address is None:
            return None
        return self._tasks.start(self._close(machine), "a capture is not closed")

    async def _close(self, machine: RunStateMachine) -> str:
        if (
            machine.run.spec.offline_intervals
        ):  # learners may have left or joined while the eavesdropper was disconnected
            await self.reconfigure(machine, machine.run)
        request = eavesdropper_pb2.CloseCaptureRequest(capture_id=machine.capture_binding.capture_id)
        try:
            closed: eavesdropper_pb2.CloseCaptureResponse = await self._call("CloseCapture", request, _CLOSE_TIMEOUT_S)
        except SottovoceError as error:
            log.warning("capture not closed", reason=str(error))
            return str(error)
        return closed.capture.error or _describe_gaps(machine, closed.capture.gaps)


def _build_binding(response: eavesdropper_pb2.OpenCaptureResponse, routes: Routes) -> CaptureBinding:
    """Return the binding to an opened capture; its relays are in the order of the routes."""
    relays = {(i, j): relay for (i, j, _), relay in zip(routes, response.relay_addresses, strict=True)}
    return CaptureBinding(response.capture_id, response.location, relays, "" if relays else response.mirror_address)


def _describe_loss(run_id: str, error: SottovoceError) -> str:
    """Log and describe why nothing of a run is captured any more."""
    log.warning("nothing is captured", run_id=run_id, reason=str(error))
    return f"nothing is captured since the run was resumed: {error}"


def _to_wire(routes: Routes) -> list[eavesdropper_pb2.Route]:
    return [eavesdropper_pb2.Route(caller=i, callee=j, target=target) for i, j, target in routes]


def _describe_gaps(machine: RunStateMachine, gaps: int) -> str:
    """Describe gaps in a capture that the spec does not allow; empty if there are none."""
    if not gaps or machine.run.spec.capture_gap != "fail":
        return ""
    return f"the capture must be complete (capture_gap: fail), and {gaps} intervals of rounds are missing in it"
