"""The services that the console asks: a coordinator, an eavesdropper, and the metrics of a watch."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from sottovoce_client.runs.monitoring import DirectedEdge, MessageCount, ServiceAddresses
from sottovoce_core.errors import NotFound, SpecError, Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_core.text import escape_control
from sottovoce_rpc.addresses import parse_address
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc, eavesdropper_pb2, eavesdropper_pb2_grpc

_CALL_TIMEOUT_S = 4.0
_MAX_LISTED_RUNS, _MAX_LISTED_CAPTURES = 50, 50
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """What the console was asked to show.

    Attributes:
        folder: of results, in whose `services.json` addresses stand while `sottovoce up` runs there; None: there is none.
        places: given by hand; they win.
        watch: where a watch tells its numbers; empty: there is none.
        insecure: speak in the clear to other machines, too.
    """

    folder: Path | None = None
    addresses: ServiceAddresses = field(default_factory=ServiceAddresses)
    watch: str = ""
    insecure: bool = False

    def resolve_addresses(self) -> ServiceAddresses:
        """Where services are now.

        Raises:
            FailedPrecondition: nobody says where the coordinator is.
        """
        found = _told_in(self.folder)
        places = ServiceAddresses(
            self.addresses.coordinator or found.coordinator,
            self.addresses.eavesdropper or ("" if self.addresses.coordinator else found.eavesdropper),
            self.addresses.identity or found.identity,
        )
        if not places.coordinator:
            raise NotFound(f"no run is up in {self.folder}: {_advice(self.folder)}")
        return places


def _advice(folder: Path | None) -> str:
    """What to do where a folder says nothing."""
    try:
        if folder is not None and not folder.exists():
            parse_address(str(folder), "FOLDER")
            return f"there is no such folder; to ask a coordinator at that address, give --coordinator {folder}"
    except SpecError:
        pass
    return "`sottovoce up` writes services.json there while one is"


def _told_in(folder: Path | None) -> ServiceAddresses:
    """What `services.json` says; nothing where there is none."""
    try:
        told = json.loads((folder / "services.json").read_text(encoding="utf-8")) if folder is not None else {}
        identity = Path(told["identity"]) if told.get("identity") else None
        return ServiceAddresses(str(told.get("coordinator") or ""), str(told.get("eavesdropper") or ""), identity)
    except (OSError, ValueError, TypeError, AttributeError):
        return ServiceAddresses()


class ServiceClients:
    """Channels to a coordinator and, where there is one, an eavesdropper."""

    def __init__(self, places: ServiceAddresses, coordinator: Any, eavesdropper: Any) -> None:
        self.addresses, self.coordinator, self.eavesdropper = places, coordinator, eavesdropper

    @classmethod
    async def open(cls, places: ServiceAddresses, insecure: bool, stack: AsyncExitStack) -> ServiceClients:
        """Open the channels; they find out by themselves who is there."""
        credentials = Credentials(places.identity, insecure)
        to = await stack.enter_async_context(
            open_channel(places.coordinator, Role.COORDINATOR, credentials=credentials)
        )
        coordinator, eavesdropper = coordinator_pb2_grpc.CoordinatorStub(to), None
        if places.eavesdropper:
            to = await stack.enter_async_context(
                open_channel(places.eavesdropper, Role.EAVESDROPPER, credentials=credentials)
            )
            eavesdropper = eavesdropper_pb2_grpc.EavesdropperStub(to)
        return cls(places, coordinator, eavesdropper)

    async def list_runs(self) -> list[coordinator_pb2.Run]:
        request = coordinator_pb2.ListRunsRequest(page_size=_MAX_LISTED_RUNS)
        return list((await self._of_coordinator(self.coordinator.ListRuns(request, timeout=_CALL_TIMEOUT_S))).runs)

    async def get_run(self, run_id: str) -> coordinator_pb2.Run:
        request = coordinator_pb2.GetRunRequest(run_id=run_id)
        return await self._of_coordinator(self.coordinator.GetRun(request, timeout=_CALL_TIMEOUT_S))

    async def list_captures(self) -> list[eavesdropper_pb2.CaptureInfo]:
        request = eavesdropper_pb2.ListCapturesRequest(page_size=_MAX_LISTED_CAPTURES)
        answer = self.eavesdropper.ListCaptures(request, timeout=_CALL_TIMEOUT_S)
        return list((await _answer(answer, f"the eavesdropper at {self.addresses.eavesdropper}")).captures)

    async def fetch_traffic(self, run_id: str) -> Mapping[DirectedEdge, MessageCount] | None:
        """What the eavesdropper counted on every way; None: nobody tells."""
        if self.eavesdropper is None:
            return None
        request = eavesdropper_pb2.ListCapturesRequest(run_id=run_id, page_size=1)
        try:
            (capture,) = (await self.eavesdropper.ListCaptures(request, timeout=_CALL_TIMEOUT_S)).captures
        except (grpc.aio.AioRpcError, ValueError):  # its list says why; it knows no such capture
            return None
        return {(way.sender, way.receiver): (way.messages, way.bytes) for way in capture.ways} or None

    async def _of_coordinator(self, call: Awaitable[T]) -> T:
        return await _answer(call, f"the coordinator at {self.addresses.coordinator}")


async def _answer(call: Awaitable[T], who: str) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise convert_status_error(error, who) from None


@dataclass(frozen=True, slots=True)
class LearnerWatch:
    """Natural logarithms of a learner's e-values, and from where on they are an alarm; None: not told."""

    name: str
    log_e_value: float
    change_log_e_value: float | None
    log_threshold: float | None
    change_log_threshold: float | None
    rounds: int
    alarms: int


@dataclass(frozen=True, slots=True)
class WatchView:
    """What `sottovoce watch` says of a run; `together` is of all learners."""

    run: str
    learners: tuple[LearnerWatch, ...]
    combined: LearnerWatch | None
    alarms: int


_PREFIX = "sottovoce_watch_"
_WATCH_TIMEOUT_S, _MAX_METRICS_BYTES = 2.0, 4 * 1024 * 1024


def read_watch(address: str) -> tuple[WatchView, ...]:
    """What a watch says of each run that it watches. Blocks, for two seconds at most.

    Raises:
        SpecError: this is no address, or prometheus_client is not installed.
        Unavailable: it does not answer.
    """
    parse_address(address, "--watch")
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_WATCH_TIMEOUT_S) as answer:
            text = answer.read(_MAX_METRICS_BYTES).decode("utf-8", "replace")
        return _watch_views(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"the watch at {address} does not tell its numbers (--metrics): {reason}") from None


def _watch_views(text: str) -> tuple[WatchView, ...]:
    """The same, of its text.

    Raises:
        ValueError: it is none of Prometheus.
    """
    parser = import_optional("prometheus_client.parser", "prometheus_client", "--watch", "console")
    told: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX):
                run, learner = sample.labels.get("run", ""), sample.labels.get("learner", "")
                told[run][learner][sample.name.removeprefix(_PREFIX)] = sample.value
    return tuple(_view(run, learners) for run, learners in told.items())


def _view(run: str, learners: dict[str, dict[str, float]]) -> WatchView:
    lines = {name: _line(name, said) for name, said in learners.items() if "log_e_value" in said}
    together = lines.pop("", None)
    alarms = sum(int(said.get("alarms", 0)) for said in learners.values())
    return WatchView(escape_control(run), tuple(lines.values()), together, alarms)


def _line(name: str, said: dict[str, float]) -> LearnerWatch:
    return LearnerWatch(
        name=escape_control(name),
        log_e_value=said["log_e_value"],
        change_log_e_value=said.get("change_log_e_value"),
        log_threshold=said.get("log_threshold"),
        change_log_threshold=said.get("change_log_threshold"),
        rounds=int(said.get("round", 0)),
        alarms=int(said.get("alarms", 0)),
    )
