"""Captures of runs, as a coordinator asks an eavesdropper for them: opened, kept open, closed."""

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
"""For an eavesdropper to close a capture: it waits for what is on its way, and writes what it holds."""
EQUIVOCATION_TEXT = "a round was sent with two contents, whose difference no noise hides"
_CHECK_INTERVAL_S = 2.0
"""How often an eavesdropper is asked whether it still captures a run."""


Routes = Sequence[tuple[int, int, str]]
"""Caller, callee, and where the callee is."""


class CaptureClient:
    """What one eavesdropper captures.

    Args:
        address: the eavesdropper's; None: there is none.
        tasks: of the coordinator: nobody waits for a capture to be closed.
        credentials: of the coordinator.
    """

    def __init__(self, address: str | None, tasks: Tasks, credentials: Credentials = NO_IDENTITY) -> None:
        self.address, self._tasks, self._credentials = address, tasks, credentials

    async def _ask(self, call: str, request: Message, patience_s: float) -> Any:
        """An answer of the eavesdropper.

        Args:
            call: the method's name.
            request: to it.
            patience_s: for the answer.

        Raises:
            FailedPrecondition: there is no eavesdropper.
            SottovoceError: it cannot be reached, or refuses.
        """
        if self.address is None:
            raise FailedPrecondition("this coordinator was given no eavesdropper (--eavesdropper)")
        async with open_channel(self.address, Role.EAVESDROPPER, credentials=self._credentials) as to:
            try:
                return await getattr(eavesdropper_pb2_grpc.EavesdropperStub(to), call)(request, timeout=patience_s)
            except grpc.aio.AioRpcError as error:
                raise convert_status_error(error, f"the eavesdropper at {self.address}") from None

    async def open_capture(self, book: RunStateMachine, request: coordinator_pb2.StartRunRequest) -> CaptureBinding:
        """Have a run captured, if its spec says so.

        Raises:
            FailedPrecondition: there is no eavesdropper.
            SottovoceError: it cannot be reached, or refuses.
        """
        capture = book.run.spec.capture
        if capture == "none":
            return CaptureBinding()
        if self.address is None:
            raise FailedPrecondition(
                f"capture: {capture} needs an eavesdropper; this coordinator was given none (--eavesdropper)"
            )
        edges = book.list_routes() if book.run.spec.is_proxied else []
        opening = eavesdropper_pb2.OpenCaptureRequest(
            run_id=book.run_id,
            spec=spec_to_wire(book.run.spec),
            routes=_to_wire(edges),
            n_features=request.n_features,
            fields=to_fields(book.run.field_shapes),
            world=request.world if request.HasField("world") else None,
            replica=request.replica if request.HasField("replica") else None,
        )
        return _overhearing(await self._ask("OpenCapture", opening, _OPEN_TIMEOUT_S), edges)

    async def list_sent_rounds(
        self, run_id: str = "", learners: Sequence[str] = (), timeout_s: float = _RESUME_TIMEOUT_S
    ) -> Sequence[eavesdropper_pb2.SentRounds]:
        """How far learners were in captured runs; nothing where there is no eavesdropper.

        Args:
            run_id: of this run alone; empty: of every run.
            learners: of these alone; empty: of all.
            patience_s: for the answer.

        Raises:
            SottovoceError: the eavesdropper does not answer.
        """
        if self.address is None:
            return ()
        request = eavesdropper_pb2.ListSentRoundsRequest(run_id=run_id, learners=learners)
        answer: eavesdropper_pb2.ListSentRoundsResponse = await self._ask("ListSentRounds", request, timeout_s)
        return answer.sent_rounds

    async def recover_capture(self, book: RunStateMachine) -> tuple[CaptureBinding, str]:
        """What is still captured of a run whose coordinator lost its state; and why nothing is, where something should be."""
        capture = book.run.spec.capture
        if capture == "none":
            return CaptureBinding(), ""
        edges = book.list_routes() if book.run.spec.is_proxied else []
        try:
            return _overhearing(await self._asked(book.run_id, edges, patience_s=_RESUME_TIMEOUT_S), edges), ""
        except SottovoceError as error:
            return CaptureBinding(), _nothing(book.run_id, error)

    async def restore_sent_rounds(self, book: RunStateMachine) -> None:
        """Have a run that goes on know all that was captured of it: its coordinator's state may be an old one, too."""
        if not book.capture_binding.capture_id:
            return
        try:
            sent = await self.list_sent_rounds(book.run_id, timeout_s=_OPEN_TIMEOUT_S)
        except SottovoceError as error:
            log.warning("the capture does not say how far learners were", run_id=book.run_id, reason=str(error))
            return
        for each in sent:
            book.restore_sent_rounds(each)

    async def resume_capture(self, kept: StoredRun) -> str:
        """Go on with the capture of a run that failed; why that cannot be. Empty: it can, or there is none."""
        if not kept.capture_binding.capture_id:
            return ""
        try:
            await self._asked(kept.run_id, patience_s=_RESUME_TIMEOUT_S)
        except SottovoceError as error:
            return _nothing(kept.run_id, error)
        return ""

    async def reconfigure(self, book: RunStateMachine, run: Run) -> None:
        """Have the eavesdropper write down that learners leave or join; one that is away is told when it is back."""
        if book.capture_binding.capture_id:
            with contextlib.suppress(SottovoceError):
                await self._asked(book.run_id, spec=spec_to_wire(run.spec))

    async def _asked(
        self, run_id: str, routes: Routes = (), spec: str = "", patience_s: float = _OPEN_TIMEOUT_S
    ) -> eavesdropper_pb2.OpenCaptureResponse:
        """Have the eavesdropper go on with the capture of a run, if it does not.

        Args:
            run_id: the run.
            routes: where relays lead to from now on, where that has changed.
            spec: of the run from now on, where that has changed.
            patience_s: for the answer. One that was started again reads what it has first; it goes on with that, whoever waits.

        Raises:
            FailedPrecondition: there is no eavesdropper.
            SottovoceError: it cannot be reached, or the capture is closed.
        """
        request = eavesdropper_pb2.OpenCaptureRequest(run_id=run_id, resume=True, routes=_to_wire(routes), spec=spec)
        opened: eavesdropper_pb2.OpenCaptureResponse = await self._ask("OpenCapture", request, patience_s)
        return opened

    def monitor_capture(self, course: ManagedRun, fail: Callable[[str], None]) -> None:
        """An eavesdropper that was started again takes up the capture when it is asked: its relays are the way of messages.

        Args:
            course: of the run.
            fail: told why the run cannot go on, where its spec says so of a gap.
        """
        if course.machine.capture_binding.capture_id and not course.capture_loss_reason and self.address is not None:
            self._tasks.start(self._keep(course, fail), "a capture is not looked after")

    async def _keep(self, course: ManagedRun, fail: Callable[[str], None]) -> None:
        led, known = tuple[str, ...](), course.machine.run
        while not course.machine.has_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_INTERVAL_S):
                    await course.end_event.wait()
                return
            try:
                book, now = course.machine, course.machine.addresses
                moved = bool(book.capture_binding.relay_addresses) and now != led
                run, amended = book.run, spec_to_wire(book.run.spec) if book.run is not known else ""
                opened = await self._asked(book.run_id, book.list_routes() if moved else (), amended)
                led, known = now, run
                self._is_heard(course, "")
                if opened.contradiction:
                    fail(f"{EQUIVOCATION_TEXT}: {opened.contradiction}. Was the state folder of a learner set back?")
                elif why := _whole(course.machine, opened.gaps):
                    fail(why)
            except SottovoceError as error:
                self._is_heard(course, f"nothing is captured now: {error}")

    def _is_heard(self, course: ManagedRun, why_not: str) -> None:
        """An eavesdropper that goes, or is back, is told once, and whoever watches the run sees it at once."""
        if bool(why_not) != bool(course.capture_outage_reason):
            course.capture_outage_reason = why_not
            course.notify_watchers()
            if why_not:
                log.warning("nothing is captured", run_id=course.machine.run_id, reason=why_not)
            else:
                log.info("captured again", run_id=course.machine.run_id)

    def close_capture(self, book: RunStateMachine) -> asyncio.Task[str] | None:
        """End a run's capture; why it could not be written to its end, as the eavesdropper says. None: there is none."""
        if not book.capture_binding.capture_id or self.address is None:
            return None
        return self._tasks.start(self._close(book), "a capture is not closed")

    async def _close(self, book: RunStateMachine) -> str:
        if book.run.spec.offline_intervals:  # learners may have left or joined while it was away
            await self.reconfigure(book, book.run)
        request = eavesdropper_pb2.CloseCaptureRequest(capture_id=book.capture_binding.capture_id)
        try:
            closed: eavesdropper_pb2.CloseCaptureResponse = await self._ask("CloseCapture", request, _CLOSE_TIMEOUT_S)
        except SottovoceError as error:
            log.warning("capture not closed", reason=str(error))
            return str(error)
        return closed.capture.error or _whole(book, closed.capture.gaps)


def _overhearing(opened: eavesdropper_pb2.OpenCaptureResponse, routes: Routes) -> CaptureBinding:
    """What was opened; relays stand in the order of their routes."""
    relays = {(i, j): relay for (i, j, _), relay in zip(routes, opened.relay_addresses, strict=True)}
    return CaptureBinding(opened.capture_id, opened.location, relays, "" if relays else opened.mirror_address)


def _nothing(run_id: str, error: SottovoceError) -> str:
    """Why nothing of a run is captured any more."""
    log.warning("nothing is captured", run_id=run_id, reason=str(error))
    return f"nothing is captured since the run was taken up again: {error}"


def _to_wire(routes: Routes) -> list[eavesdropper_pb2.Route]:
    return [eavesdropper_pb2.Route(caller=i, callee=j, target=target) for i, j, target in routes]


def _whole(book: RunStateMachine, gaps: int) -> str:
    """What a run must say of gaps in its capture; empty: nothing, by its spec, or there is none."""
    if not gaps or book.run.spec.capture_gap != "fail":
        return ""
    return f"the capture must be whole (capture_gap: fail), and {gaps} intervals of rounds are missing in it"
