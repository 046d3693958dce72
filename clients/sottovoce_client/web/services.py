"""The services that the console asks: where they are, and what they say, as values."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any, TypeVar

import grpc

from sottovoce.errors import NotReady, SpecError
from sottovoce.text import plain
from sottovoce_client.web.plans import Way
from sottovoce_client.web.view import CaptureLine, Count, Course, Look, RunLine
from sottovoce_rpc.addresses import place_of
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import LearnerStatus, misconduct_lines
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import channel
from sottovoce_rpc.status import as_error
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, eavesdropper_pb2, eavesdropper_pb2_grpc

_CALL_S = 4.0
_MOST_RUNS, _MOST_CAPTURES = 50, 50

_STATES = {value: name.removeprefix("RUN_STATE_").lower() for name, value in coordinator_pb2.RunState.items()}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Places:
    """Where services listen, and who asks them.

    Attributes:
        coordinator, eavesdropper: addresses; empty: there is none.
        identity: folder of an operator's; None: there is none.
    """

    coordinator: str = ""
    eavesdropper: str = ""
    identity: Path | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the console was asked to show.

    Attributes:
        folder: of results, in whose `services.json` addresses stand while `sottovoce up` runs there; None: there is none.
        places: given by hand; they win.
        watch: where a watch tells its numbers; empty: there is none.
        insecure: speak in the clear to other machines, too.
    """

    folder: Path | None = None
    places: Places = Places()
    watch: str = ""
    insecure: bool = False

    def now(self) -> Places:
        """Where services are now.

        Raises:
            NotReady: nobody says where the coordinator is.
        """
        found = _told_in(self.folder)
        places = Places(
            self.places.coordinator or found.coordinator,
            self.places.eavesdropper or ("" if self.places.coordinator else found.eavesdropper),
            self.places.identity or found.identity,
        )
        if not places.coordinator:
            raise NotReady(f"no run is up in {self.folder}: {_advice(self.folder)}")
        return places


def _advice(folder: Path | None) -> str:
    """What to do where a folder says nothing."""
    try:
        if folder is not None and not folder.exists():
            place_of(str(folder), "FOLDER")
            return f"there is no such folder; to ask a coordinator at that address, give --coordinator {folder}"
    except SpecError:
        pass
    return "`sottovoce up` writes services.json there while one is"


def _told_in(folder: Path | None) -> Places:
    """What `services.json` says; nothing where there is none."""
    try:
        told = json.loads((folder / "services.json").read_text(encoding="utf-8")) if folder is not None else {}
        identity = Path(told["identity"]) if told.get("identity") else None
        return Places(str(told.get("coordinator") or ""), str(told.get("eavesdropper") or ""), identity)
    except (OSError, ValueError, TypeError, AttributeError):
        return Places()


class Services:
    """Channels to a coordinator and, where there is one, an eavesdropper."""

    def __init__(self, places: Places, coordinator: Any, eavesdropper: Any) -> None:
        self.places, self.coordinator, self.eavesdropper = places, coordinator, eavesdropper

    @classmethod
    async def reach(cls, places: Places, insecure: bool, stack: AsyncExitStack) -> Services:
        """Open the channels; they find out by themselves who is there."""
        credentials = Credentials(places.identity, insecure)
        to = await stack.enter_async_context(channel(places.coordinator, Role.COORDINATOR, credentials=credentials))
        coordinator, eavesdropper = coordinator_pb2_grpc.CoordinatorStub(to), None
        if places.eavesdropper:
            to = await stack.enter_async_context(
                channel(places.eavesdropper, Role.EAVESDROPPER, credentials=credentials)
            )
            eavesdropper = eavesdropper_pb2_grpc.EavesdropperStub(to)
        return cls(places, coordinator, eavesdropper)

    async def runs(self) -> list[coordinator_pb2.Run]:
        request = coordinator_pb2.ListRunsRequest(page_size=_MOST_RUNS)
        return list((await self._of_coordinator(self.coordinator.ListRuns(request, timeout=_CALL_S))).runs)

    async def run(self, run_id: str) -> coordinator_pb2.Run:
        request = coordinator_pb2.GetRunRequest(run_id=run_id)
        return await self._of_coordinator(self.coordinator.GetRun(request, timeout=_CALL_S))

    async def captures(self) -> list[eavesdropper_pb2.CaptureInfo]:
        request = eavesdropper_pb2.ListCapturesRequest(page_size=_MOST_CAPTURES)
        answer = self.eavesdropper.ListCaptures(request, timeout=_CALL_S)
        return list((await _answer(answer, f"the eavesdropper at {self.places.eavesdropper}")).captures)

    async def heard(self, run_id: str) -> Mapping[Way, Count] | None:
        """What the eavesdropper counted on every way; None: nobody tells."""
        if self.eavesdropper is None:
            return None
        request = eavesdropper_pb2.ListCapturesRequest(run_id=run_id, page_size=1)
        try:
            (capture,) = (await self.eavesdropper.ListCaptures(request, timeout=_CALL_S)).captures
        except (grpc.aio.AioRpcError, ValueError):  # its list says why; it knows no such capture
            return None
        return {(way.sender, way.receiver): (way.messages, way.bytes) for way in capture.ways} or None

    async def _of_coordinator(self, call: Awaitable[T]) -> T:
        return await _answer(call, f"the coordinator at {self.places.coordinator}")


async def _answer(call: Awaitable[T], who: str) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise as_error(error, who) from None


# ---- what was said, as values ------------------------------------------------------------------------------------------


def course_of(run: coordinator_pb2.Run) -> Course:
    """Where a run stands."""
    notices = [*misconduct_lines(run), *([run.capture_error] if run.capture_error else [])]
    line = run_line(run)
    return Course(
        line.run_id,
        line.state,
        line.detail,
        line.started,
        line.ended,
        tuple(map(plain, notices)),
        plain(run.capture_location),
    )


def run_line(run: coordinator_pb2.Run) -> RunLine:
    """A run in the list."""
    statuses = tuple(LearnerStatus.from_wire(each.status) for each in run.learners)
    return RunLine(
        run_id=plain(run.run_id),
        state=_STATES.get(run.state, "of a newer version"),
        detail=plain(run.detail),
        started=run.started_at.ToDatetime(UTC).timestamp(),
        ended=run.ended_at.ToDatetime(UTC).timestamp() if run.HasField("ended_at") else None,
        round=Look(0.0, statuses).round,
    )


def look_at(run: coordinator_pb2.Run, heard: Mapping[Way, Count] | None, at: float) -> Look:
    """A look at a run's learners.

    Args:
        run: as its coordinator says.
        heard: what the eavesdropper counted.
        at: when.
    """
    return Look(
        at,
        tuple(LearnerStatus.from_wire(each.status) for each in run.learners),
        tuple(plain(each.address) for each in run.learners),
        tuple(
            each.away_since.ToDatetime(UTC).timestamp() if each.HasField("away_since") else None
            for each in run.learners
        ),
        heard,
    )


def capture_line(told: eavesdropper_pb2.CaptureInfo) -> CaptureLine:
    """A capture in the list."""
    state = told.error or ("open" if told.open else "closed")
    if told.gaps:
        state += f"; rounds are missing in {told.gaps} {'place' if told.gaps == 1 else 'places'}"
    location = plain(told.location)
    return CaptureLine(
        Path(location).name or location, plain(told.run_id), location, plain(state), told.messages, told.bytes
    )
