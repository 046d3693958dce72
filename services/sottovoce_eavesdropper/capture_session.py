"""A capture that is being recorded: its proxies, its writer, and whether all expected messages have arrived.

A capture that an eavesdropper left open when it died is resumed: same folder, same ports, the gap recorded. In a wiretap capture
it is unknown which rounds were in memory then: all of its channels get a gap, and it is never complete.

Copies that learners send (mirror) are validated: any process may send them, and one row that fits no column would end a capture.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from sottovoce_core.auditing.online_checks import Detection
from sottovoce_core.auditing.traffic_features import digest
from sottovoce_core.errors import CaptureError, PermissionDenied, RemoteProtocolError
from sottovoce_core.network.participation_schedule import resolve_learner_names
from sottovoce_core.registry import UNBOUNDED_ROUNDS
from sottovoce_core.runs.transcript import MAX_REMEMBERED_MESSAGES
from sottovoce_core.spec import MAX_LEARNERS
from sottovoce_core.text import format_learner_name
from sottovoce_eavesdropper.capture_checks import EXCHANGE_METHODS, CaptureRow, RecordedRound
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter
from sottovoce_eavesdropper.grpc_proxy import MAX_PAYLOAD_BYTES, GrpcProxy
from sottovoce_eavesdropper.parts import parse_part_number
from sottovoce_eavesdropper.proxy import Proxy
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_eavesdropper.tcp_proxy import TcpProxy
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.signatures import is_signature
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2

if TYPE_CHECKING:
    import pyarrow as pa


log = structlog.get_logger()


class EdgeProxy(Protocol):
    """Proxy of one edge, in this process or in a worker.

    Attributes:
        route: learners that open and accept the stream, and the address of the latter.
    """

    route: eavesdropper_pb2.Route

    async def open(self, listen: str) -> str:
        """Listen on `host:port`; return the address."""
        ...

    async def redirect(self, target: str) -> None:
        """Send later connections to another address, and cut open ones."""
        ...

    async def stop(self) -> None:
        """Accept no new connection, wait for the last calls, then end the rest."""
        ...


def build_proxy(
    route: eavesdropper_pb2.Route,
    file: CaptureWriter,
    participants: Participants,
    before: int,
    credentials: Credentials,
    refusals: Refusals,
) -> Proxy:
    """Build the proxy of an edge with `before` streams (wiretap: connections) recorded before."""
    if file.ciphertext is not None:
        return TcpProxy(route, file, connection_count=before, credentials=credentials)
    names = participants.get_end_names(route)
    return GrpcProxy(route, file, stream_count=before, end_names=names, credentials=credentials, refusals=refusals)


@dataclass(slots=True)
class CaptureSession:
    """A capture, the relays or wiretaps that feed it, its writer, and the state of its mirror streams."""

    writer: CaptureWriter
    proxies: list[EdgeProxy]
    writer_tasks: Tasks
    participants: Participants
    mirror_end_event: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    @contextlib.contextmanager
    def track_mirror_stream(self, sender: int) -> Iterator[None]:
        """Track a stream of a learner's copies during the block."""
        self.mirror_end_event.clear()
        self.writer.gaps.begin_stream(sender)
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            self.writer.gaps.end_stream(sender, is_complete=is_complete)
            if not self.has_pending_copies:
                self.mirror_end_event.set()

    def require_opener(self, caller: str) -> None:
        """Require that the caller is the coordinator that opened the capture.

        Raises:
            PermissionDenied: another one opened it.
        """
        if caller != self.writer.opener:
            raise PermissionDenied(f"the capture is of {self.writer.opener or 'a coordinator without an identity'}")

    @property
    def has_pending_copies(self) -> bool:
        """Return whether copies may still arrive, also of a learner that has not begun, because its run was short."""
        gaps = self.writer.gaps
        return gaps.has_pending_copies or (
            self.participants.is_mirrored
            and gaps.sender_count < self.participants.learner_count - gaps.idle_learner_count
        )

    async def redirect_routes(self, routes: Iterable[eavesdropper_pb2.Route]) -> None:
        """Redirect proxies to learners that have moved to other addresses."""
        targets = {(route.caller, route.callee): route.target for route in routes}
        known = [(each["caller"], each["callee"]) for each in self.writer.routes]
        now = [
            {**each, "target": targets.get(channel, each["target"])}
            for each, channel in zip(self.writer.routes, known, strict=True)
        ]
        if now != list(self.writer.routes):
            self.writer.routes = now
            await self.writer.write_metadata()  # for an eavesdropper that resumes the capture
        # Also without a change: a caller that gave up during the write asks again.
        for proxy, each in zip(self.proxies, now, strict=True):
            await proxy.redirect(each["target"])

    async def reconfigure(self, spec: str) -> None:
        """Replace the run's spec after learners have left or joined."""
        if spec != self.writer.spec:
            self.writer.reconfigure(spec)
            for source in self.writer.sources:
                await source.reconfigure(spec)
            await self.writer.write_metadata()

    def record_copies(self, request: eavesdropper_pb2.MirrorRequest, rows: Iterable[CaptureRow]) -> None:
        """Record mirrored copies."""
        for row in rows:
            self.writer.add_row(row)
        for message in request.messages:
            with contextlib.suppress(RemoteProtocolError):  # not a round: the online checks report it
                self.writer.gaps.record_round(request.sender, t=self.writer.codec.decode(message.payload)[0])

    async def close(self, drain_timeout_s: float, *, has_run_ended: bool = True) -> None:
        """Wait for mirrored copies and the last calls, then write the rest."""
        if self.is_closed:
            return
        if self.has_pending_copies and drain_timeout_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_timeout_s):
                    await self.mirror_end_event.wait()
        await asyncio.gather(*(proxy.stop() for proxy in self.proxies))
        await self.writer_tasks.end(WRITE_TIMEOUT_S)
        if has_run_ended and self.participants.is_mirrored:
            self.writer.gaps.expect_learners(len(self.participants.names))
        await self.writer.close(has_run_ended=has_run_ended)
        self.is_closed = True
        log.info(
            "capture closed",
            capture=self.writer.capture_id,
            messages=self.writer.message_count,
            bytes=self.writer.byte_count,
        )


# ---- captures that were left open ------------------------------------------------------------------------------------


def find_open_capture(location: str | Path, run_id: str) -> Capture | None:
    """Find the capture of a run that was not closed; None if there is none."""
    folder = open_folder(location)
    for name in folder.list_names():
        if not name.startswith(f"{run_id}-"):
            continue
        try:
            capture = open_capture(folder.get_subfolder(name))
        except CaptureError:
            continue
        if capture.metadata["run_id"] == run_id and not capture.is_complete:
            return capture
    return None


def compute_sent_rounds(capture: Capture) -> dict[int, tuple[int, int]]:
    """Return for each learner index one more than its last sent round, and the time of that in nanoseconds.

    The last round in a capture may be a resent, older one: so the newest parts are read until every learner was seen, and as many
    messages as a learner may have to resend.

    Raises:
        CaptureError: a part cannot be read.
    """
    found = dict[int, tuple[int, int]]()
    if not capture.shapes or capture.ciphertext is not None:  # not a run of ours, or not readable
        return found
    codec, rounds, read = RoundCodec(capture.shapes), capture.metadata["spec"].get("rounds"), 0
    max_rounds = rounds if isinstance(rounds, int) else UNBOUNDED_ROUNDS
    for part in sorted(filter(None, map(parse_part_number, capture.folder.list_names())), reverse=True):
        columns = ("caller", "callee", "sender", "kind", "method", "wall_ns", "payload")
        for _, batch in capture.read_parts(columns, part.__eq__):
            read += len(batch)
            for sender, t, at in _read_sent_messages(codec, batch):
                if t < max_rounds and t + 1 > found.get(sender, (0, 0))[0]:
                    found[sender] = t + 1, at
        if read >= MAX_REMEMBERED_MESSAGES and len(found) == len(capture.names):
            break
    return found


def _read_sent_messages(codec: RoundCodec, batch: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
    """Yield sender, round and time of the messages that learners sent under their own index."""
    import pyarrow.compute as pc

    messages = batch.filter(pc.equal(batch.column("kind"), "message"))
    rows, rounds, claimed, _ = codec.decode_many(messages.column("payload").to_pylist())
    senders, walls = (messages.column(name).to_numpy()[rows] for name in ("sender", "wall_ns"))
    methods = messages.column("method").to_pylist()
    decoded = zip(rows.tolist(), senders.tolist(), claimed.tolist(), rounds.tolist(), walls.tolist(), strict=True)
    yield from (
        (sender, t, at) for row, sender, name, t, at in decoded if sender == name and methods[row] in EXCHANGE_METHODS
    )


def resume_capture(capture: Capture, *, allow_imports: bool) -> tuple[CaptureWriter, Mapping[tuple[int, int], int]]:
    """Prepare a capture for further recording; return its writer and the number of streams (wiretap: connections) of each edge.

    Raises:
        CaptureError: the capture cannot be read.
        OSError: it cannot be written.
    """
    facts = capture.metadata
    file = CaptureWriter(
        capture.name,
        facts["capture_id"],
        facts["run_id"],
        json.dumps(facts["spec"]),
        facts["n_features"],
        facts["world"],
        facts["replica"],
        allow_imports,
        capture.shapes,
        facts["routes"],
        part_count=max(map(parse_part_number, capture.folder.list_names()), default=0),
    )
    file.opener = facts["opener"]
    file.checks.detection_count = facts["detection_count"]
    file.checks.first_detections = [Detection(**finding) for finding in facts["detections"]]
    file.checks.contradiction = next((each.text for each in file.checks.first_detections if each.is_contradiction), "")
    for gap in facts["gaps"]:  # only gaps of channels: those of copies follow from the recorded rounds
        if "receiver" in gap and gap["to"] is not None:
            file.gaps.resume_channel(gap["sender"], gap["receiver"], next_round=gap["from"], t=gap["to"])
    content = _count_rows(file, capture)
    if file.ciphertext is not None:
        file.is_interrupted = True
        return file, content.streams
    # Payloads are read only where needed: the relays of a long run must not wait until all of it was read.
    latest = _find_latest_parts(content.rows)
    needed = (
        latest | set(content.last_parts.values()) if file.routes else set(content.rows)
    )  # copies: every missing round
    _record_rounds(file, capture, needed, latest)
    return file, content.streams


@dataclass(slots=True)
class _RecordedContent:
    """Content of a capture's parts: rows of each part, streams of each edge, and the last part with a sender on an edge."""

    rows: dict[int, int] = field(default_factory=dict)
    streams: dict[tuple[int, int], int] = field(default_factory=dict)
    last_parts: dict[tuple[int, int, int], int] = field(default_factory=dict)


def _count_rows(file: CaptureWriter, capture: Capture) -> _RecordedContent:
    """Restore the writer's counts: messages and streams; for a wiretap ciphertext records and connections."""
    import pyarrow.compute as pc

    content, counts = _RecordedContent(), file.ciphertext
    kind, number = ("message", "stream") if counts is None else ("ciphertext", "connection")
    for part, batch in capture.read_parts(("caller", "callee", "sender", "kind", number, "size")):
        content.rows[part] = content.rows.get(part, 0) + len(batch)
        for each in _aggregate(batch, ("caller", "callee"), [(number, "max")]):
            edge = each["caller"], each["callee"]
            content.streams[edge] = max(content.streams.get(edge, 0), each[f"{number}_max"])
        for each in _aggregate(batch, ("kind",), [("size", "sum"), ("size", "count")]):
            if counts is not None:
                counts.add_rows(each["kind"], each["size_sum"], each["size_count"])
            elif each["kind"] == kind:
                file.message_count, file.byte_count = (
                    file.message_count + each["size_count"],
                    file.byte_count + each["size_sum"],
                )
        counted = batch.filter(pc.equal(batch.column("kind"), kind))
        for each in _aggregate(counted, ("caller", "callee", "sender"), [("size", "sum"), ("size", "count")]):
            content.last_parts[each["caller"], each["callee"], each["sender"]] = part
            file.count_traffic(each["caller"], each["callee"], each["sender"], each["size_sum"], each["size_count"])
    return content


def _aggregate(batch: pa.RecordBatch, keys: Sequence[str], sums: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    import pyarrow as pa

    found: list[dict[str, Any]] = pa.Table.from_batches([batch]).group_by(list(keys)).aggregate(list(sums)).to_pylist()
    return found


def _find_latest_parts(rows: Mapping[int, int]) -> set[int]:
    """Return the last parts that together have as many rows as the online checks remember messages."""
    found, held = set[int](), 0
    for part in sorted(rows, reverse=True):
        if held >= MAX_REMEMBERED_MESSAGES:
            break
        found.add(part)
        held += rows[part]
    return found


def _record_rounds(file: CaptureWriter, capture: Capture, needed: Collection[int], latest: Collection[int]) -> None:
    """Restore which rounds were recorded on each channel, and the messages that the online checks remember."""
    import pyarrow.compute as pc

    for route in file.routes:
        channel = route["caller"], route["callee"]
        file.awaited_rounds |= {channel: 0, channel[::-1]: 0}
    for part, batch in capture.read_parts(("caller", "callee", "sender", "kind", "payload"), needed.__contains__):
        messages = batch.filter(pc.equal(batch.column("kind"), "message"))
        payloads = messages.column("payload").to_pylist()
        rows, rounds, _, _ = file.codec.decode_many(payloads)
        caller, callee, sender = (messages.column(name).to_numpy()[rows] for name in ("caller", "callee", "sender"))
        channels = zip(sender.tolist(), (caller + callee - sender).tolist(), strict=True)
        for row, channel, t in zip(rows.tolist(), channels, rounds.tolist(), strict=True):
            if part in latest:
                file.checks.remember_round(RecordedRound(*channel, t, digest(payloads[row])))
            _record_round(file, channel, t)


def _record_round(file: CaptureWriter, channel: tuple[int, int], t: int) -> None:
    if file.routes:
        file.awaited_rounds[channel] = max(file.awaited_rounds[channel], t + 1)
    else:
        file.gaps.expect_sender(channel[0])
        file.gaps.record_round(channel[0], t=t)


# ---- copies of learners ----------------------------------------------------------------------------------------------


_MAX_COPIES_PER_REQUEST = 1_024
"""Maximum number of copies in one request; learners send far fewer."""
_MAX_INDEX, _MAX_TIME_NS = 2**31 - 1, 2**63 - 1
"""Largest values that the columns of a capture hold."""


@dataclass(frozen=True, slots=True)
class Participants:
    """Allowed participants of a capture.

    Attributes:
        learner_count: number of learners; if unknown, the largest that a column holds.
        is_mirrored: learners send copies. In a relayed run, a copy would be forged.
        names: names of the learners in order; empty if unknown, or too many for any run.
    """

    learner_count: int
    is_mirrored: bool
    names: tuple[str, ...] = ()

    @classmethod
    def from_spec(cls, spec: str) -> Participants:
        """Read participants from a run spec, a JSON document that need not be valid."""
        document = json.loads(spec)
        fields = document if isinstance(document, dict) else {}
        learners = fields.get("learners")
        n = learners if isinstance(learners, int) else len(learners) if isinstance(learners, list) else 0
        n = n if 0 < n <= _MAX_INDEX else _MAX_INDEX
        names = resolve_learner_names(learners) if isinstance(learners, int | list) and n <= MAX_LEARNERS else ()
        names = names if all(isinstance(name, str) for name in names) else ()
        return cls(n, fields.get("capture") == "mirror", names)

    def require_sender(self, index: int, caller: Principal | None) -> None:
        """Require that a learner with a certificate sends copies of its own messages; others cannot be identified.

        Raises:
            PermissionDenied: it sends them for another learner.
        """
        if caller is not None and not caller.is_one_of(
            *(f"{Role.LEARNER}/{name}" for name in self.names[index : index + 1])
        ):
            raise PermissionDenied(f"{caller} must not send copies for {format_learner_name(self.names, index)}")

    def require_learners(self, *indices: int) -> None:
        """Require valid learner indices.

        Raises:
            RemoteProtocolError: there is no such learner.
        """
        if wrong := [index for index in indices if index >= self.learner_count]:
            raise RemoteProtocolError(f"the capture is of {self.learner_count} learners, got learner {wrong[0]}")

    def get_end_names(self, route: eavesdropper_pb2.Route) -> tuple[str, str]:
        """Return the names of the learners that open and accept the stream of a route; empty if unknown."""
        known = self.names if max(route.caller, route.callee) < len(self.names) else ()
        return (known[route.caller], known[route.callee]) if known else ("", "")

    def build_rows(self, request: eavesdropper_pb2.MirrorRequest) -> list[CaptureRow]:
        """Build one row per receiver of each copied message, as a relay would, but without metadata and arrival times of its own.

        Raises:
            RemoteProtocolError: the capture takes no copies, or one is not valid for this run. Then nothing is recorded.
        """
        if not self.is_mirrored:
            raise RemoteProtocolError(
                "copies are accepted only for runs with `capture: mirror`, got a run of another one"
            )
        self.require_learners(request.sender)
        if len(request.messages) > _MAX_COPIES_PER_REQUEST:
            raise RemoteProtocolError(
                f"a request must have at most {_MAX_COPIES_PER_REQUEST} copies, got {len(request.messages)}"
            )
        now = time.monotonic_ns()
        return [row for message in request.messages for row in self._build_message_rows(request.sender, message, now)]

    def _build_message_rows(self, sender: int, message: eavesdropper_pb2.MirroredMessage, now: int) -> list[CaptureRow]:
        if len(message.receivers) > min(self.learner_count, MAX_LEARNERS):
            raise RemoteProtocolError(
                f"a message must have fewer receivers than the {self.learner_count} learners, got {len(message.receivers)}"
            )
        self.require_learners(*message.receivers)
        wall, size = 10**9 * message.sent_at.seconds + message.sent_at.nanos, len(message.payload)
        if size > MAX_PAYLOAD_BYTES or abs(wall) > _MAX_TIME_NS:
            text = f"a copy must have at most {MAX_PAYLOAD_BYTES} bytes and a time of 64 bits in nanoseconds"
            raise RemoteProtocolError(f"{text}, got {size} and {wall}")
        if sender in message.receivers or len(set(message.receivers)) < len(message.receivers):
            raise RemoteProtocolError(
                f"a message of {format_learner_name(self.names, sender)} must go to others, once to each"
            )
        rows, kind = [], "signature" if is_signature(message.payload) else "message"
        for receiver in message.receivers:
            caller, callee = sorted((sender, receiver))
            direction = "out" if sender == caller else "back"
            rows.append(CaptureRow(caller, callee, sender, direction, kind, 0, 0, "", wall, now, size, message.payload))
        return rows
