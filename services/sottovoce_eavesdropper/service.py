"""The eavesdropper's gRPC face: captures are opened, listed, read and closed."""

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

from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_eavesdropper.capture_registry import CaptureRegistry
from sottovoce_eavesdropper.capture_session import CaptureSession
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter, parse_part_number
from sottovoce_eavesdropper.grpc_proxy import FINISH_TIMEOUT_S, MAX_PAYLOAD_BYTES
from sottovoce_eavesdropper.storage import Folder, open_folder, require_folder
from sottovoce_rpc.access import UNIDENTIFIED_CALLER, Refusals, StreamLimit
from sottovoce_rpc.addresses import require_host
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
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc

log = structlog.get_logger()

SERVICE_NAME = "sottovoce_wire.v1.Eavesdropper"
_CHUNK_BYTES = 1024 * 1024
_MIRROR_DRAIN_TIMEOUT_S = 3.0
MAX_MIRROR_STREAMS = 4
"""Streams of copies of one learner at a time: one of its run, and those that it gave up and that have not ended yet."""
DRAIN_TIMEOUT_S = FINISH_TIMEOUT_S + WRITE_TIMEOUT_S
"""How long it may take to write what it holds, once it is told to stop."""
_MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES
"""Bytes of what learners copy: the longest message that is kept comes alone."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class EavesdropperConfig:
    """How an eavesdropper is deployed.

    Attributes:
        listen: `host:port` to listen on; port 0 picks one. Relays listen on free ports of the same host.
        folder: where captures are written: a path, or a URL for fsspec.
        advertise_host: name of this host for learners, where it differs from that of `listen`.
        allow_imports: whether a run spec may name code to import; without it, less can be noticed of such a run.
        credentials: of this eavesdropper.
    """

    listen: str = "127.0.0.1:0"
    folder: str | Path = "sottovoce-captures"
    advertise_host: str | None = None
    allow_imports: bool = False
    credentials: Credentials = field(default_factory=Credentials)

    def __post_init__(self) -> None:
        if self.advertise_host is not None:
            require_host(self.advertise_host, "--advertise-host")


class Eavesdropper(eavesdropper_pb2_grpc.EavesdropperServicer):
    """Any number of captures, of one run each."""

    def __init__(self, config: EavesdropperConfig) -> None:
        self.config = config
        self._host = config.listen.rsplit(":", 1)[0]
        self._captures = CaptureRegistry(
            config.folder, self._host, config.credentials, allow_imports=config.allow_imports
        )
        self._mirrors = StreamLimit(
            MAX_MIRROR_STREAMS if config.credentials.principal else MAX_CONCURRENT_CALLS, "copies"
        )
        self.server: RunningServer | None = None
        self.address = ""

    async def start(self) -> str:
        """Listen; returns the address.

        Raises:
            SottovoceError: it cannot listen there, its identity cannot be used, or captures cannot be written.
        """
        self.config.credentials.require_principal(Role.EAVESDROPPER)
        require_folder(self.config.folder)
        remote = "://" in str(self.config.folder)
        if remote:  # before a run is there whose capture would be lost
            await asyncio.to_thread(lambda: open_folder(self.config.folder).require_writable())
        self.server = await start_server(
            self.config.listen,
            lambda server: eavesdropper_pb2_grpc.add_EavesdropperServicer_to_server(self, server),
            [SERVICE_NAME],
            self.config.credentials,
            _MAX_MESSAGE_BYTES,
        )
        self.address = self._advertised(self.server.address)
        if not remote:
            warn_if_open(Path(self.config.folder), "folder of captures")
        return self.address

    async def stop(self) -> None:
        """Write everything that is in memory, then end. A capture that nobody closed stays open for who comes after."""
        await self._captures.stop()
        if self.server is not None:
            await self.server.stop()

    def collect_metrics(self, refused: Refusals) -> Iterator[MetricSample]:
        """For Prometheus; refused: who asked for it, and may not."""
        served = [] if self.server is None else [self.server.refusals]
        yield from collect_common_metrics([self.config.credentials], [refused, self._captures.refusals, *served])
        yield from collect_metrics(each.writer for each in self._captures.sessions.values())

    # ---- captures -----------------------------------------------------------------------------------------

    async def OpenCapture(
        self, request: eavesdropper_pb2.OpenCaptureRequest, context: Context
    ) -> eavesdropper_pb2.OpenCaptureResponse:
        """Begin a capture, with one relay or wiretap per route; or take up one that was left open."""
        opener = self._caller(context)
        require_run_id(request.run_id)
        if request.resume:
            recording = await self._captures.get_or_resume(request.run_id)
            recording.require_opener(opener)
            await recording.redirect_routes(request.routes)
            if request.spec:
                await recording.reconfigure(_spec(request.spec))
            return self._opened(recording)
        spec = _spec(request.spec or "{}")
        return self._opened(await self._captures.open_capture(request, spec, opener))

    def _opened(self, recording: CaptureSession) -> eavesdropper_pb2.OpenCaptureResponse:
        return eavesdropper_pb2.OpenCaptureResponse(
            capture_id=recording.writer.capture_id,
            relay_addresses=[self._advertised(route["address"]) for route in recording.writer.routes],
            mirror_address=self.address,
            location=recording.writer.storage_folder.name,
            gaps=recording.writer.gaps.gap_count,
            contradiction=recording.writer.checks.contradiction,
        )

    async def CloseCapture(
        self, request: eavesdropper_pb2.CloseCaptureRequest, context: Context
    ) -> eavesdropper_pb2.CloseCaptureResponse:
        """End a capture; once closed, closing it again says what was captured."""
        capture = self._captures.get(request.capture_id)
        capture.require_opener(self._caller(context))
        await capture.close(drain_timeout_s=_MIRROR_DRAIN_TIMEOUT_S)
        return eavesdropper_pb2.CloseCaptureResponse(capture=_info(capture.writer))

    async def ListCaptures(
        self, request: eavesdropper_pb2.ListCapturesRequest, context: Context
    ) -> eavesdropper_pb2.ListCapturesResponse:
        """The captures of this process, of one run or all."""
        newest = dict(reversed(self._captures.sessions.items()))
        run_id = resolve_run_id(request.run_id, (each.writer.run_id for each in newest.values()))
        wanted = {key: each.writer for key, each in newest.items() if run_id in ("", each.writer.run_id)}
        files, following = paginate(wanted, request.page_size, request.page_token)
        infos = [_info(each, ways=bool(request.run_id)) for each in files]
        return eavesdropper_pb2.ListCapturesResponse(captures=infos, next_page_token=following)

    async def ListSentRounds(
        self, request: eavesdropper_pb2.ListSentRoundsRequest, context: Context
    ) -> eavesdropper_pb2.ListSentRoundsResponse:
        """How far learners were in captures of the caller, all that was recorded until now included."""
        if request.run_id:
            require_run_id(request.run_id)
        try:
            found = await self._captures.list_sent_rounds(request.run_id, request.learners, self._caller(context))
        except OSError as error:
            raise CaptureError(f"captures cannot be read: {error.strerror or error}") from None
        return eavesdropper_pb2.ListSentRoundsResponse(sent_rounds=found)

    async def StreamCapture(
        self, request: eavesdropper_pb2.StreamCaptureRequest, context: Context
    ) -> AsyncIterator[eavesdropper_pb2.StreamCaptureResponse]:
        """The files of a capture as they stand: first what it says of itself, then the parts, no fewer than that tells of."""
        file = self._captures.get(request.capture_id).writer
        if not request.first_part:  # else whoever follows a capture asks every second
            log.info("capture read", capture=file.capture_id, by=self._caller(context) or UNIDENTIFIED_CALLER)
        await file.flush_fully()
        for piece in _pieces("capture.json", await asyncio.to_thread(_read, file.storage_folder, "capture.json")):
            yield piece
        for name in await asyncio.to_thread(file.storage_folder.list_names):
            if parse_part_number(name) >= max(request.first_part, 1):
                for piece in _pieces(name, await asyncio.to_thread(_read, file.storage_folder, name)):
                    yield piece

    async def Mirror(
        self, requests: AsyncIterator[eavesdropper_pb2.MirrorRequest], context: Context
    ) -> eavesdropper_pb2.MirrorResponse:
        """Copies from a learner: one row per receiver."""
        taken = 0
        with contextlib.ExitStack() as held:
            capture, caller = None, self.config.credentials.identify_caller(context)
            held.enter_context(self._mirrors.hold_stream(caller))
            async for request in requests:
                of_run = capture or await self._captures.get_or_resume(request.run_id)
                of_run.participants.require_sender(request.sender, caller)
                rows = of_run.participants.build_rows(request)
                if capture is None:
                    capture = of_run
                    held.enter_context(capture.track_mirror_stream(request.sender))
                capture.record_copies(request, rows)
                taken += len(request.messages)
                await capture.writer.wait_for_buffer()
        return eavesdropper_pb2.MirrorResponse(messages=taken)

    def _caller(self, context: Context) -> str:
        """Who opens a capture, as it is written down; empty: nobody has a name here."""
        caller = self.config.credentials.identify_caller(context)
        return "" if caller is None else str(caller)

    def _advertised(self, address: str) -> str:
        return f"{self.config.advertise_host or self._host}:{address.rsplit(':', 1)[1]}"


def _spec(text: str) -> str:
    """A run spec as it is kept beside the records: a mapping of fields, which need not be right.

    Raises:
        SpecError: it is none.
    """
    document = document_from_wire(text)
    if not isinstance(document, dict):
        raise SpecError(f"a run spec must be a mapping of fields, got {type(document).__name__}")
    return json.dumps(document)


def _read(place: Folder, name: str) -> bytes:
    with place.open(name) as file:
        content: bytes = file.read()
        return content


def _pieces(name: str, content: bytes) -> Iterator[eavesdropper_pb2.StreamCaptureResponse]:
    for start in range(0, max(len(content), 1), _CHUNK_BYTES):
        yield eavesdropper_pb2.StreamCaptureResponse(file=name, data=content[start : start + _CHUNK_BYTES])


def _info(file: CaptureWriter, *, ways: bool = False) -> eavesdropper_pb2.CaptureInfo:
    told = file.channel_traffic.items() if ways else ()
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
            for (sender, receiver), (messages, n_bytes) in told
        ],
    )


async def serve(
    config: EavesdropperConfig, *, stop_with_stdin: bool = False, metrics: MetricsEndpoint | None = None
) -> None:
    """Run the eavesdropper in this process until it is told to stop.

    Args:
        config: of the eavesdropper.
        with_stdin: stop when standard input ends.
        metrics: where it tells Prometheus how it is; None: nowhere.

    Raises:
        SottovoceError: an address is taken.
    """
    service, refused = Eavesdropper(config), Refusals()
    async with serve_metrics(metrics, CATALOGUE, lambda: service.collect_metrics(refused), refused):
        announce("eavesdropper", address=await service.start())
        log_start("eavesdropper", config.credentials.principal, address=service.address, folder=config.folder)
        await serve_until_stopped(
            lambda _: service.stop(), stop_with_stdin=stop_with_stdin, drain_timeout_s=DRAIN_TIMEOUT_S
        )


# ---- its metrics -----------------------------------------------------------------------------------------------------


CATALOGUE = Catalogue("sottovoce_eavesdropper")
_metric = CATALOGUE.add_metric

_OPEN = _metric("captures_open", "Captures that are being recorded.")
_CAPTURES = _metric("captures_total", "Captures that were opened, or taken up again, since it started.")
_MESSAGES = _metric("messages_total", "Messages recorded; of a wiretap, records of TLS.")
_BYTES = _metric("recorded_bytes_total", "Bytes of them.")
_PARTS = _metric("parts_total", "Parts of captures that were written.")
_ROWS = _metric("rows_waiting", "Rows in memory, that are yet to be written.")
_HELD = _metric("rows_waiting_bytes", "Bytes of messages in them.")
_NOTICES = _metric("notices_total", "Things that must never happen on a channel, and did, by kind.", "kind")
_UNCHECKED = _metric("captures_unchecked", "Captures that are being recorded in which not everything can be noticed.")
_GAPS = _metric(
    "missing_rounds", "Rounds that are known to be missing, or stretches of them, in captures that are being recorded."
)
_ERRORS = _metric(
    "storage_errors_total", "Captures that could not be written any more: nothing more of them is recorded."
)


def collect_metrics(captures: Iterable[CaptureWriter]) -> Iterator[MetricSample]:
    """Of an eavesdropper; captures: all of this process."""
    files = list(captures)
    recorded = [file for file in files if file.is_open]
    yield _OPEN.sample(len(recorded))
    yield _CAPTURES.sample(len(files))
    yield _MESSAGES.sample(
        sum(file.message_count if file.ciphertext is None else file.ciphertext.records for file in files)
    )
    yield _BYTES.sample(sum(file.byte_count if file.ciphertext is None else file.ciphertext.bytes for file in files))
    yield _PARTS.sample(sum(file.part_count for file in files))
    rows, held = zip(*(file.buffer_size for file in files), strict=True) if files else ((), ())
    yield _ROWS.sample(sum(rows))
    yield _HELD.sample(sum(held))
    noticed = Counter[str]()
    for file in files:
        noticed.update(dict(file.checks.counts_by_kind))  # a copy: parts are looked at in a thread
    for kind, count in noticed.items():
        yield _NOTICES.sample(count, kind)
    yield _UNCHECKED.sample(sum(file.checks.unchecked_reason is not None for file in recorded))
    yield _GAPS.sample(sum(file.gaps.gap_count for file in recorded))
    yield _ERRORS.sample(sum(file.write_error is not None for file in files))
