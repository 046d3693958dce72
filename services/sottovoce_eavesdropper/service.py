"""gRPC servicer of the eavesdropper: opens, lists, reads and closes captures."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from sottovoce_core.errors import CaptureError, PermissionDenied, SpecError
from sottovoce_eavesdropper.capture_registry import CaptureRegistry
from sottovoce_eavesdropper.capture_session import CaptureSession
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter, prefer_messages
from sottovoce_eavesdropper.grpc_proxy import FINISH_TIMEOUT_S, MAX_PAYLOAD_BYTES
from sottovoce_eavesdropper.parts import parse_part_number
from sottovoce_eavesdropper.storage import Folder, open_folder, require_folder
from sottovoce_eavesdropper.throughput import LoadMeter, combine_loads
from sottovoce_eavesdropper.worker import JoiningWorker
from sottovoce_rpc.access import UNIDENTIFIED_CALLER, Refusals, StreamLimit, release_read_slot
from sottovoce_rpc.addresses import require_address, require_host
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.logs import log_start, warn_if_open
from sottovoce_rpc.metrics import Catalogue, MetricSample, MetricsEndpoint, collect_common_metrics, serve_metrics
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import (
    MAX_CONCURRENT_CALLS,
    MAX_OVERHEAD_BYTES,
    RunningServer,
    announce,
    paginate,
    serve_until_stopped,
    start_server,
)
from sottovoce_rpc.specs import document_from_wire, require_run_id, resolve_run_id
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc
from sottovoce_wire.v1.eavesdropper_pb2 import WorkRequest, WorkResponse

log = structlog.get_logger()

SERVICE_NAME = "sottovoce_wire.v1.Eavesdropper"
_CHUNK_BYTES = 1024 * 1024
_MIRROR_DRAIN_TIMEOUT_S = 3.0
MAX_MIRROR_STREAMS = 4
"""Maximum number of one learner's mirror streams: one of its run, and some given up that have not ended yet."""
DRAIN_TIMEOUT_S = FINISH_TIMEOUT_S + WRITE_TIMEOUT_S
"""Time to write what is in memory after a request to stop."""
_EVERY_ADDRESS = ("0.0.0.0", "[::]", "::")  # noqa: S104 - no address is opened here
_MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES
"""Maximum bytes of a mirror request: the longest message that is recorded comes alone."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class EavesdropperConfig:
    """Configuration of an eavesdropper.

    Attributes:
        listen: `host:port` to listen on; port 0 picks a free one. Relays listen on free ports of the same host.
        folder: where captures are written: a path, or a URL for fsspec.
        advertise_host: name of this host for learners, if it differs from that of `listen`.
        allow_imports: allow a run spec to name code to import; without it, such a run is checked less.
        credentials: credentials of this eavesdropper.
        workers: number of processes that serve edges; 0: this one.
        remote_workers: number of workers that join from other hosts, in place of these.
    """

    listen: str = "127.0.0.1:0"
    folder: str | Path = "sottovoce-captures"
    advertise_host: str | None = None
    allow_imports: bool = False
    credentials: Credentials = field(default_factory=Credentials)
    workers: int = 0
    remote_workers: int = 0

    def __post_init__(self) -> None:
        if self.advertise_host is not None:
            require_host(self.advertise_host, "--advertise-host")


class Eavesdropper(eavesdropper_pb2_grpc.EavesdropperServicer):
    """Servicer of any number of captures, each of one run."""

    def __init__(self, config: EavesdropperConfig) -> None:
        self.config = config
        self._host = config.listen.rsplit(":", 1)[0]
        self._captures = CaptureRegistry(
            config.folder,
            self._host,
            config.credentials,
            allow_imports=config.allow_imports,
            workers=config.workers,
            remote_workers=config.remote_workers,
        )
        self._mirrors = StreamLimit(
            MAX_MIRROR_STREAMS if config.credentials.principal else MAX_CONCURRENT_CALLS, "copies"
        )
        own = self._captures.sessions.values
        self._meter = LoadMeter(lambda: sum(not each.writer.sources and each.writer.message_count for each in own()))
        self._tasks = Tasks()
        self.server: RunningServer | None = None
        self.address = ""

    async def start(self) -> str:
        """Listen; return the address.

        Raises:
            SottovoceError: the address cannot be listened on, the identity cannot be used, or captures cannot be written.
        """
        self.config.credentials.require_principal(Role.EAVESDROPPER)
        require_folder(self.config.folder)
        remote = "://" in str(self.config.folder)
        if remote:  # checked now, before a run loses its capture
            await asyncio.to_thread(lambda: open_folder(self.config.folder).require_writable())
        self.server = await start_server(
            self.config.listen,
            lambda server: eavesdropper_pb2_grpc.add_EavesdropperServicer_to_server(self, server),
            [SERVICE_NAME],
            self.config.credentials,
            _MAX_MESSAGE_BYTES,
        )
        self.address = self._advertise(self.server.address)
        self._captures.pool.address = self.server.address
        self._tasks.start(self._meter.run(), "the load is no longer measured")
        if not remote:
            warn_if_open(Path(self.config.folder), "folder of captures")
        return self.address

    def _measure_load(self) -> eavesdropper_pb2.Load:
        """Return the load of this process and its workers."""
        sizes = [each.writer.buffer_size for each in self._captures.sessions.values()]
        return combine_loads([self._meter.build_load(sizes), *self._captures.pool.list_loads()])

    async def stop(self) -> None:
        """Write everything in memory, then end. Captures that were not closed stay open, to be resumed."""
        await self._captures.stop()
        await self._tasks.end()
        if self.server is not None:
            await self.server.stop()

    def collect_metrics(self, refused: Refusals) -> Iterator[MetricSample]:
        """Yield samples for Prometheus; `refused` counts refused scrapes."""
        served = [] if self.server is None else [self.server.refusals]
        yield from collect_common_metrics([self.config.credentials], [refused, self._captures.refusals, *served])
        load = self._measure_load()
        yield from collect_metrics((each.writer for each in self._captures.sessions.values()), load)

    # ---- captures -----------------------------------------------------------------------------------------

    async def OpenCapture(
        self, request: eavesdropper_pb2.OpenCaptureRequest, context: Context
    ) -> eavesdropper_pb2.OpenCaptureResponse:
        """Open a capture, with one relay or wiretap per route; or resume one that was left open."""
        opener = self._get_caller_name(context)
        require_run_id(request.run_id)
        if request.resume:
            session = await self._captures.get_or_resume(request.run_id)
            session.require_opener(opener)
            await session.redirect_routes(request.routes)
            if request.spec:
                await session.reconfigure(_parse_spec(request.spec))
            return self._build_open_response(session)
        spec = _parse_spec(request.spec or "{}")
        return self._build_open_response(await self._captures.open_capture(request, spec, opener))

    def _build_open_response(self, session: CaptureSession) -> eavesdropper_pb2.OpenCaptureResponse:
        return eavesdropper_pb2.OpenCaptureResponse(
            capture_id=session.writer.capture_id,
            relay_addresses=[self._advertise(route["address"]) for route in session.writer.routes],
            mirror_address=self.address,
            location=session.writer.storage_folder.name,
            gaps=session.writer.gaps.gap_count,
            contradiction=session.writer.checks.contradiction,
        )

    async def CloseCapture(
        self, request: eavesdropper_pb2.CloseCaptureRequest, context: Context
    ) -> eavesdropper_pb2.CloseCaptureResponse:
        """Close a capture; closing it again returns the same counts."""
        capture = self._captures.get(request.capture_id)
        capture.require_opener(self._get_caller_name(context))
        await capture.close(drain_timeout_s=_MIRROR_DRAIN_TIMEOUT_S)
        return eavesdropper_pb2.CloseCaptureResponse(capture=_build_info(capture.writer))

    async def ListCaptures(
        self, request: eavesdropper_pb2.ListCapturesRequest, context: Context
    ) -> eavesdropper_pb2.ListCapturesResponse:
        """List captures of this process, of one run or all."""
        newest = dict(reversed(self._captures.sessions.items()))
        run_id = resolve_run_id(request.run_id, (each.writer.run_id for each in newest.values()))
        wanted = {key: each.writer for key, each in newest.items() if run_id in ("", each.writer.run_id)}
        files, following = paginate(wanted, request.page_size, request.page_token)
        infos = [_build_info(each, include_channels=bool(request.run_id)) for each in files]
        return eavesdropper_pb2.ListCapturesResponse(
            captures=infos, next_page_token=following, load=self._measure_load()
        )

    async def ListSentRounds(
        self, request: eavesdropper_pb2.ListSentRoundsRequest, context: Context
    ) -> eavesdropper_pb2.ListSentRoundsResponse:
        """Return how far learners were in captures of the caller, up to now."""
        if request.run_id:
            require_run_id(request.run_id)
        try:
            found = await self._captures.list_sent_rounds(
                request.run_id, request.learners, self._get_caller_name(context)
            )
        except OSError as error:
            raise CaptureError(f"captures cannot be read: {error.strerror or error}") from None
        return eavesdropper_pb2.ListSentRoundsResponse(sent_rounds=found)

    async def StreamCapture(
        self, request: eavesdropper_pb2.StreamCaptureRequest, context: Context
    ) -> AsyncIterator[eavesdropper_pb2.StreamCaptureResponse]:
        """Stream the files of a capture: `capture.json` first, then at least the parts that it counts."""
        file = self._captures.get(request.capture_id).writer
        if not request.first_part:  # followers of a capture call every second: only their first call is logged
            log.info(
                "capture read", capture=file.capture_id, caller=self._get_caller_name(context) or UNIDENTIFIED_CALLER
            )
        await file.flush_fully()
        for chunk in _split("capture.json", await asyncio.to_thread(_read_file, file.storage_folder, "capture.json")):
            yield chunk
        for name in await asyncio.to_thread(file.storage_folder.list_names):
            if parse_part_number(name) >= max(request.first_part, 1):
                for chunk in _split(name, await asyncio.to_thread(_read_file, file.storage_folder, name)):
                    yield chunk

    async def Mirror(
        self, requests: AsyncIterator[eavesdropper_pb2.MirrorRequest], context: Context
    ) -> eavesdropper_pb2.MirrorResponse:
        """Record copies from a learner, one row per receiver."""
        count = 0
        with contextlib.ExitStack() as stack:
            capture, caller = None, self.config.credentials.identify_caller(context)
            stack.enter_context(self._mirrors.hold_stream(caller))
            async for request in requests:
                session = capture or await self._captures.get_or_resume(request.run_id)
                session.participants.require_sender(request.sender, caller)
                rows = session.participants.build_rows(request)
                if capture is None:
                    capture = session
                    stack.enter_context(capture.track_mirror_stream(request.sender))
                capture.record_copies(request, rows)
                count += len(request.messages)
                await capture.writer.wait_for_buffer()
        return eavesdropper_pb2.MirrorResponse(messages=count)

    async def Work(self, requests: AsyncIterator[WorkRequest], context: Context) -> AsyncIterator[WorkResponse]:
        """Serve a worker of this eavesdropper."""
        release_read_slot()
        caller, own = self.config.credentials.identify_caller(context), self.config.credentials.principal
        if caller != own:
            raise PermissionDenied(f"a worker must have the identity of its eavesdropper, {own}, got {caller}")
        async for task in self._captures.pool.serve(requests, self._captures.find_writer):
            yield task

    def _get_caller_name(self, context: Context) -> str:
        """Return the caller's principal as text; empty for a caller without a certificate."""
        caller = self.config.credentials.identify_caller(context)
        return "" if caller is None else str(caller)

    def _advertise(self, address: str) -> str:
        """Return an address with the name of this host for learners, unless it is of a worker on another host."""
        host, _, port = address.rpartition(":")
        return f"{self.config.advertise_host or host}:{port}" if host == self._host else address


def _parse_spec(text: str) -> str:
    """Return a run spec as it is stored in a capture: a mapping of fields, which need not be valid.

    Raises:
        SpecError: it is not a mapping.
    """
    document = document_from_wire(text)
    if not isinstance(document, dict):
        raise SpecError(f"a run spec must be a mapping of fields, got {type(document).__name__}")
    return json.dumps(document)


def _read_file(folder: Folder, name: str) -> bytes:
    with folder.open(name) as file:
        content: bytes = file.read()
        return content


def _split(name: str, content: bytes) -> Iterator[eavesdropper_pb2.StreamCaptureResponse]:
    for start in range(0, max(len(content), 1), _CHUNK_BYTES):
        yield eavesdropper_pb2.StreamCaptureResponse(file=name, data=content[start : start + _CHUNK_BYTES])


def _build_info(file: CaptureWriter, *, include_channels: bool = False) -> eavesdropper_pb2.CaptureInfo:
    channels = file.channel_traffic.items() if include_channels else ()
    return eavesdropper_pb2.CaptureInfo(
        capture_id=file.capture_id,
        run_id=file.run_id,
        location=file.storage_folder.name,
        messages=file.message_count,
        bytes=file.byte_count,
        open=file.is_open,
        error=file.write_error or "",
        gaps=file.gaps.gap_count if file.is_open else len(file.gaps.build_metadata()),
        channels=[
            eavesdropper_pb2.ChannelTraffic(sender=sender, receiver=receiver, messages=messages, bytes=n_bytes)
            for (sender, receiver), (messages, n_bytes) in channels
        ],
    )


async def serve(
    config: EavesdropperConfig, *, stop_with_stdin: bool = False, metrics: MetricsEndpoint | None = None
) -> None:
    """Run the eavesdropper in this process until it is asked to stop.

    Args:
        config: configuration of the eavesdropper.
        stop_with_stdin: stop when standard input ends.
        metrics: endpoint for Prometheus; None: no metrics are served.

    Raises:
        SottovoceError: an address is in use.
    """
    prefer_messages()
    service, refused = Eavesdropper(config), Refusals()
    async with serve_metrics(metrics, CATALOGUE, lambda: service.collect_metrics(refused), refused):
        announce("eavesdropper", address=await service.start())
        log_start("eavesdropper", config.credentials.principal, address=service.address, folder=config.folder)
        await serve_until_stopped(
            lambda _: service.stop(), stop_with_stdin=stop_with_stdin, drain_timeout_s=DRAIN_TIMEOUT_S
        )


async def join(
    config: EavesdropperConfig,
    eavesdropper: str,
    *,
    stop_with_stdin: bool = False,
    metrics: MetricsEndpoint | None = None,
) -> None:
    """Run a worker of an eavesdropper on another host in this process until it is asked to stop.

    Args:
        config: configuration; `listen` is where the worker is checked for its health, and whose host its relays listen on.
        eavesdropper: address of the eavesdropper.
        stop_with_stdin: stop when standard input ends.
        metrics: endpoint for Prometheus; None: no metrics are served.

    Raises:
        SottovoceError: an address is in use or is not valid, or the identity cannot be used.
    """
    config.credentials.require_local(require_address(eavesdropper, "--join"))
    config.credentials.require_principal(Role.EAVESDROPPER)
    listen_host = config.listen.rpartition(":")[0]
    host = config.advertise_host or listen_host
    if host in _EVERY_ADDRESS:
        raise SpecError(
            f"--join needs --advertise-host, the name of this host for learners, got --listen {config.listen}"
        )
    prefer_messages()
    worker = JoiningWorker(eavesdropper, listen_host, host, config.credentials, allow_imports=config.allow_imports)
    server = await start_server(config.listen, lambda _: None, [], config.credentials)
    refused = Refusals()

    def collect() -> Iterator[MetricSample]:
        yield from collect_common_metrics([config.credentials], [refused, server.refusals])
        yield from collect_metrics((), worker.build_load())  # what is recorded counts at the eavesdropper

    async def stop() -> None:
        await worker.stop()
        await server.stop()

    async with serve_metrics(metrics, CATALOGUE, collect, refused):
        announce("eavesdropper", address=f"{host}:{server.address.rpartition(':')[2]}")
        log_start("worker of an eavesdropper", config.credentials.principal, eavesdropper=eavesdropper)
        worker.start()
        await serve_until_stopped(lambda _: stop(), stop_with_stdin=stop_with_stdin, drain_timeout_s=DRAIN_TIMEOUT_S)


# ---- metrics ---------------------------------------------------------------------------------------------------------


CATALOGUE = Catalogue("sottovoce_eavesdropper")
_metric = CATALOGUE.add_metric

_OPEN = _metric("captures_open", "Captures that are being recorded.")
_CAPTURES = _metric("captures_total", "Captures that were opened, or resumed, since the start.")
_MESSAGES = _metric("messages_total", "Messages recorded; of a wiretap, TLS records.")
_BYTES = _metric("recorded_bytes_total", "Bytes of recorded messages.")
_PARTS = _metric("parts_total", "Parts of captures that were written.")
_ROWS = _metric("rows_waiting", "Rows in memory that are not written yet.")
_BUFFERED_BYTES = _metric("rows_waiting_bytes", "Bytes of messages in rows that are not written yet.")
_BUSY = _metric(
    "busy_ratio", "Share of the last ten seconds in which the busiest process worked: near 1, runs wait for it."
)
_MEDIAN_DELAY, _TAIL_DELAY = (
    _metric(
        f"message_delay_{name}_seconds", f"Time that messages waited in the busiest process: {text} of ten seconds."
    )
    for name, text in (("median", "median"), ("tail", "99th percentile"))
)
_DETECTIONS = _metric("detections_total", "Detections, by kind: messages on a channel that must never occur.", "kind")
_UNCHECKED = _metric("captures_unchecked", "Captures that are being recorded in which not everything can be checked.")
_GAPS = _metric("missing_rounds", "Known intervals of missing rounds in captures that are being recorded.")
_ERRORS = _metric(
    "storage_errors_total", "Captures that could not be written any more: nothing more of them is recorded."
)


def collect_metrics(captures: Iterable[CaptureWriter], load: eavesdropper_pb2.Load) -> Iterator[MetricSample]:
    """Yield samples of an eavesdropper, from all its captures, and from the load of its processes."""
    files = list(captures)
    recorded = [file for file in files if file.is_open]
    yield _OPEN.sample(len(recorded))
    yield _CAPTURES.sample(len(files))
    yield _MESSAGES.sample(
        sum(file.message_count if file.ciphertext is None else file.ciphertext.records for file in files)
    )
    yield _BYTES.sample(sum(file.byte_count if file.ciphertext is None else file.ciphertext.bytes for file in files))
    yield _PARTS.sample(sum(file.part_count for file in files))
    yield _ROWS.sample(load.rows)
    yield _BUFFERED_BYTES.sample(load.bytes)
    yield _BUSY.sample(load.busy)
    yield _MEDIAN_DELAY.sample(load.median_delay_s)
    yield _TAIL_DELAY.sample(load.p99_delay_s)
    counts = Counter[str]()
    for file in files:
        counts.update(dict(file.checks.counts_by_kind))  # a copy: rows are checked in a thread
    for kind, count in counts.items():
        yield _DETECTIONS.sample(count, kind)
    yield _UNCHECKED.sample(sum(file.checks.unchecked_reason is not None for file in recorded))
    yield _GAPS.sample(sum(file.gaps.gap_count for file in recorded))
    yield _ERRORS.sample(sum(file.write_error is not None for file in files))
