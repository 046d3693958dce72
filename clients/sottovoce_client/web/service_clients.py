"""Clients of the services that the console polls: a coordinator, an eavesdropper, and the metrics of a watch."""

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
    """Options of the console.

    Attributes:
        folder: Results folder, whose `services.json` holds the addresses while `sottovoce up` runs there; None: no folder.
        addresses: Addresses from options; they take precedence.
        watch: Address of a watch's metrics endpoint; empty: no watch.
        insecure: Allow unencrypted connections to other machines.
    """

    folder: Path | None = None
    addresses: ServiceAddresses = field(default_factory=ServiceAddresses)
    watch: str = ""
    insecure: bool = False

    def resolve_addresses(self) -> ServiceAddresses:
        """Return the current addresses of the services.

        Raises:
            NotFound: Neither the options nor the folder give the coordinator's address.
        """
        found = _read_addresses(self.folder)
        addresses = ServiceAddresses(
            self.addresses.coordinator or found.coordinator,
            self.addresses.eavesdropper or ("" if self.addresses.coordinator else found.eavesdropper),
            self.addresses.identity or found.identity,
        )
        if not addresses.coordinator:
            raise NotFound(f"no run is up in {self.folder}: {_advice(self.folder)}")
        return addresses


def _advice(folder: Path | None) -> str:
    """Return what to do if the folder holds no addresses."""
    try:
        if folder is not None and not folder.exists():
            parse_address(str(folder), "FOLDER")
            return f"there is no such folder; to connect to a coordinator at that address, give --coordinator {folder}"
    except SpecError:
        pass
    return "`sottovoce up` writes services.json there while a run is up"


def _read_addresses(folder: Path | None) -> ServiceAddresses:
    """Read `services.json`; return no addresses if there is none."""
    try:
        found = json.loads((folder / "services.json").read_text(encoding="utf-8")) if folder is not None else {}
        identity = Path(found["identity"]) if found.get("identity") else None
        return ServiceAddresses(str(found.get("coordinator") or ""), str(found.get("eavesdropper") or ""), identity)
    except (OSError, ValueError, TypeError, AttributeError):
        return ServiceAddresses()


class ServiceClients:
    """gRPC stubs of a coordinator and of an eavesdropper, if there is one."""

    def __init__(self, addresses: ServiceAddresses, coordinator: Any, eavesdropper: Any) -> None:
        self.addresses, self.coordinator, self.eavesdropper = addresses, coordinator, eavesdropper

    @classmethod
    async def open(cls, addresses: ServiceAddresses, insecure: bool, stack: AsyncExitStack) -> ServiceClients:
        """Open the channels, which connect in the background."""
        credentials = Credentials(addresses.identity, insecure)
        channel = await stack.enter_async_context(
            open_channel(addresses.coordinator, Role.COORDINATOR, credentials=credentials)
        )
        coordinator, eavesdropper = coordinator_pb2_grpc.CoordinatorStub(channel), None
        if addresses.eavesdropper:
            channel = await stack.enter_async_context(
                open_channel(addresses.eavesdropper, Role.EAVESDROPPER, credentials=credentials)
            )
            eavesdropper = eavesdropper_pb2_grpc.EavesdropperStub(channel)
        return cls(addresses, coordinator, eavesdropper)

    async def list_runs(self) -> list[coordinator_pb2.Run]:
        request = coordinator_pb2.ListRunsRequest(page_size=_MAX_LISTED_RUNS)
        return list((await self._call_coordinator(self.coordinator.ListRuns(request, timeout=_CALL_TIMEOUT_S))).runs)

    async def get_run(self, run_id: str) -> coordinator_pb2.Run:
        request = coordinator_pb2.GetRunRequest(run_id=run_id)
        return await self._call_coordinator(self.coordinator.GetRun(request, timeout=_CALL_TIMEOUT_S))

    async def list_captures(self) -> list[eavesdropper_pb2.CaptureInfo]:
        request = eavesdropper_pb2.ListCapturesRequest(page_size=_MAX_LISTED_CAPTURES)
        answer = self.eavesdropper.ListCaptures(request, timeout=_CALL_TIMEOUT_S)
        return list((await _answer(answer, f"the eavesdropper at {self.addresses.eavesdropper}")).captures)

    async def fetch_traffic(self, run_id: str) -> Mapping[DirectedEdge, MessageCount] | None:
        """Return the eavesdropper's counts of messages and bytes by directed edge; None if there are none."""
        if self.eavesdropper is None:
            return None
        request = eavesdropper_pb2.ListCapturesRequest(run_id=run_id, page_size=1)
        try:
            (capture,) = (await self.eavesdropper.ListCaptures(request, timeout=_CALL_TIMEOUT_S)).captures
        except (grpc.aio.AioRpcError, ValueError):  # the list of captures shows the error; or no such capture
            return None
        return {(each.sender, each.receiver): (each.messages, each.bytes) for each in capture.channels} or None

    async def _call_coordinator(self, call: Awaitable[T]) -> T:
        return await _answer(call, f"the coordinator at {self.addresses.coordinator}")


async def _answer(call: Awaitable[T], peer: str) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise convert_status_error(error, peer) from None


@dataclass(frozen=True, slots=True)
class LearnerWatch:
    """E-values of a learner and their alarm thresholds, as natural logarithms; None: not reported."""

    name: str
    log_e_value: float
    change_log_e_value: float | None
    log_threshold: float | None
    change_log_threshold: float | None
    rounds: int
    alarms: int


@dataclass(frozen=True, slots=True)
class WatchView:
    """Metrics of `sottovoce watch` for a run; `combined` is the e-value of all learners together."""

    run: str
    learners: tuple[LearnerWatch, ...]
    combined: LearnerWatch | None
    alarms: int


_PREFIX = "sottovoce_watch_"
_WATCH_TIMEOUT_S, _MAX_METRICS_BYTES = 2.0, 4 * 1024 * 1024


def read_watch(address: str) -> tuple[WatchView, ...]:
    """Read the metrics of a watch, by run. Blocks for at most two seconds.

    Raises:
        SpecError: The address is malformed, or prometheus_client is not installed.
        Unavailable: The watch does not answer.
    """
    parse_address(address, "--watch")
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_WATCH_TIMEOUT_S) as answer:
            text = answer.read(_MAX_METRICS_BYTES).decode("utf-8", "replace")
        return _watch_views(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"the watch at {address} does not serve its metrics (--metrics): {reason}") from None


def _watch_views(text: str) -> tuple[WatchView, ...]:
    """Parse the metrics of a watch.

    Raises:
        ValueError: The text is not in Prometheus format.
    """
    parser = import_optional("prometheus_client.parser", "prometheus_client", "--watch", "console")
    values: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX):
                run, learner = sample.labels.get("run", ""), sample.labels.get("learner", "")
                values[run][learner][sample.name.removeprefix(_PREFIX)] = sample.value
    return tuple(_view(run, learners) for run, learners in values.items())


def _view(run: str, learners: dict[str, dict[str, float]]) -> WatchView:
    watches = {name: _learner_watch(name, values) for name, values in learners.items() if "log_e_value" in values}
    combined = watches.pop("", None)
    alarms = sum(int(values.get("alarms", 0)) for values in learners.values())
    return WatchView(escape_control(run), tuple(watches.values()), combined, alarms)


def _learner_watch(name: str, values: dict[str, float]) -> LearnerWatch:
    return LearnerWatch(
        name=escape_control(name),
        log_e_value=values["log_e_value"],
        change_log_e_value=values.get("change_log_e_value"),
        log_threshold=values.get("log_threshold"),
        change_log_threshold=values.get("change_log_threshold"),
        rounds=int(values.get("round", 0)),
        alarms=int(values.get("alarms", 0)),
    )
