"""A capture that is being recorded: what feeds it, and whether all has come that will.

A capture that an eavesdropper left open when it died is taken up again: same folder, same ports, the gap named. Of a capture
by wiretap it is unknown which rounds lay in memory then: all of its ways are named, and it is never complete.

What learners copy (mirror) is checked: any process may call, and one row that fits no column would end a capture.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from sottovoce_core.auditing.online_checks import Detection
from sottovoce_core.errors import CaptureError, PermissionDenied, RemoteProtocolError
from sottovoce_core.network.participation_schedule import resolve_learner_names
from sottovoce_core.registry import UNBOUNDED_ROUNDS
from sottovoce_core.runs.transcript import MAX_REMEMBERED_MESSAGES
from sottovoce_core.spec import MAX_LEARNERS
from sottovoce_core.text import format_learner_name
from sottovoce_eavesdropper.capture_checks import EXCHANGE_METHODS, CaptureRow
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter, parse_part_number
from sottovoce_eavesdropper.grpc_proxy import MAX_PAYLOAD_BYTES, GrpcProxy
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_eavesdropper.tcp_proxy import TcpProxy
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.signatures import is_signature
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2

if TYPE_CHECKING:
    import pyarrow as pa


log = structlog.get_logger()


@dataclass(slots=True)
class CaptureSession:
    """A capture, the relays or wiretaps that feed it, and its writer; and whether all have ended that mirror into it."""

    writer: CaptureWriter
    proxies: list[GrpcProxy | TcpProxy]
    writer_tasks: Tasks
    participants: Participants
    mirror_end_event: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    @contextlib.contextmanager
    def track_mirror_stream(self, sender: int) -> Iterator[None]:
        """While a learner copies what it says."""
        self.mirror_end_event.clear()
        self.writer.gaps.begin_stream(sender)
        well = False
        try:
            yield
            well = True
        finally:
            self.writer.gaps.end_stream(sender, is_complete=well)
            if not self.has_pending_copies:
                self.mirror_end_event.set()

    def require_opener(self, caller: str) -> None:
        """A capture is its coordinator's.

        Raises:
            PermissionDenied: another one asks.
        """
        if caller != self.writer.opener:
            raise PermissionDenied(f"the capture is of {self.writer.opener or 'a coordinator without an identity'}")

    @property
    def has_pending_copies(self) -> bool:
        """Copies may be on their way: of a learner that has more, or has not begun, for its run was short."""
        gaps = self.writer.gaps
        return gaps.has_pending_copies or (
            self.participants.is_mirrored
            and gaps.sender_count < self.participants.learner_count - gaps.idle_learner_count
        )

    async def redirect_routes(self, routes: Iterable[eavesdropper_pb2.Route]) -> None:
        """Some learners are at other addresses than before."""
        targets = {(route.caller, route.callee): route.target for route in routes}
        known = [(each["caller"], each["callee"]) for each in self.writer.routes]
        now = [
            {**each, "target": targets.get(way, each["target"])}
            for each, way in zip(self.writer.routes, known, strict=True)
        ]
        if now != list(self.writer.routes):
            self.writer.routes = now
            await self.writer.write_metadata()  # for an eavesdropper after this one
        # Whoever asked may have given up while that was written, and asks again.
        for relay, each in zip(self.proxies, now, strict=True):
            await relay.redirect(each["target"])

    async def reconfigure(self, spec: str) -> None:
        """Learners leave or join: the run has another spec from now on."""
        if spec != self.writer.spec:
            self.writer.reconfigure(spec)
            await self.writer.write_metadata()

    def record_copies(self, request: eavesdropper_pb2.MirrorRequest, rows: Iterable[CaptureRow]) -> None:
        """Record copies."""
        for row in rows:
            self.writer.add_row(row)
        for message in request.messages:
            with contextlib.suppress(RemoteProtocolError):  # bytes of no round: what is wrong with them is noticed
                self.writer.gaps.record_round(request.sender, t=self.writer.codec.decode(message.payload)[0])

    async def close(self, drain_timeout_s: float, *, has_run_ended: bool = True) -> None:
        """Let mirrored copies on their way arrive and the last calls end, write the rest."""
        if self.is_closed:
            return
        if self.has_pending_copies and drain_timeout_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_timeout_s):
                    await self.mirror_end_event.wait()
        await asyncio.gather(*(relay.stop() for relay in self.proxies))
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


def find_open_capture(place: str | Path, run_id: str) -> Capture | None:
    """The capture of a run that was not closed; None: there is none."""
    folder = open_folder(place)
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
    """How far each learner was in a capture, by its index: one more than its last round, and when that passed, in nanoseconds.

    Of what was sent again a capture may have an older round last; so the newest parts are read until every learner was seen, and
    as many messages as a learner may have to send again.

    Raises:
        CaptureError: a part cannot be read.
    """
    found = dict[int, tuple[int, int]]()
    if not capture.shapes or capture.ciphertext is not None:  # of no run of ours, or nothing that can be read
        return found
    codec, rounds, read = RoundCodec(capture.shapes), capture.metadata["spec"].get("rounds"), 0
    most = rounds if isinstance(rounds, int) else UNBOUNDED_ROUNDS
    for part in sorted(filter(None, map(parse_part_number, capture.folder.list_names())), reverse=True):
        columns = ("caller", "callee", "sender", "kind", "method", "wall_ns", "payload")
        for _, batch in capture.read_parts(columns, part.__eq__):
            read += len(batch)
            for sender, t, at in _said(codec, batch):
                if t < most and t + 1 > found.get(sender, (0, 0))[0]:
                    found[sender] = t + 1, at
        if read >= MAX_REMEMBERED_MESSAGES and len(found) == len(capture.names):
            break
    return found


def _said(codec: RoundCodec, batch: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
    """Messages that a learner sent as itself: who, round, and when."""
    import pyarrow.compute as pc

    said = batch.filter(pc.equal(batch.column("kind"), "message"))
    rows, rounds, claimed, _ = codec.decode_many(said.column("payload").to_pylist())
    senders, walls = (said.column(name).to_numpy()[rows] for name in ("sender", "wall_ns"))
    methods = said.column("method").to_pylist()
    told = zip(rows.tolist(), senders.tolist(), claimed.tolist(), rounds.tolist(), walls.tolist(), strict=True)
    yield from (
        (sender, t, at) for row, sender, name, t, at in told if sender == name and methods[row] in EXCHANGE_METHODS
    )


def resume_capture(capture: Capture, *, allow_imports: bool) -> tuple[CaptureWriter, Mapping[tuple[int, int], int]]:
    """A capture to be written on, and how many streams of each edge it has; by wiretap, how many connections.

    Raises:
        CaptureError: what stands of it cannot be read.
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
    file.checks.detection_count = facts["noticed_count"]
    file.checks.first_detections = [Detection(**finding) for finding in facts["noticed"]]
    file.checks.contradiction = next((each.text for each in file.checks.first_detections if each.is_contradiction), "")
    for gap in facts["gaps"]:  # of channels; those of copies follow from the rounds that came
        if "receiver" in gap and gap["to"] is not None:
            file.gaps.resume_channel(gap["sender"], gap["receiver"], next_round=gap["from"], t=gap["to"])
    seen = _count(file, capture)
    if file.ciphertext is not None:
        file.is_interrupted = True
        return file, seen.streams
    # Payloads are read only where they say something: a long run's relays must not wait until all of it was read.
    latest = _latest(seen.rows)
    needed = latest | set(seen.last.values()) if file.routes else set(seen.rows)  # copies: each round that is missing
    _note_rounds(file, capture, needed, latest)
    return file, seen.streams


@dataclass(slots=True)
class _Seen:
    """What stands in the parts: rows of each, streams of each edge, and in which part a sender was last heard on an edge."""

    rows: dict[int, int] = field(default_factory=dict)
    streams: dict[tuple[int, int], int] = field(default_factory=dict)
    last: dict[tuple[int, int, int], int] = field(default_factory=dict)


def _count(file: CaptureWriter, capture: Capture) -> _Seen:
    """Count what was recorded: messages and streams; of a wiretap ciphertext and connections."""
    import pyarrow.compute as pc

    seen, counts = _Seen(), file.ciphertext
    kind, number = ("message", "stream") if counts is None else ("ciphertext", "connection")
    for part, batch in capture.read_parts(("caller", "callee", "sender", "kind", number, "size")):
        seen.rows[part] = seen.rows.get(part, 0) + len(batch)
        for each in _groups(batch, ("caller", "callee"), [(number, "max")]):
            way = each["caller"], each["callee"]
            seen.streams[way] = max(seen.streams.get(way, 0), each[f"{number}_max"])
        for each in _groups(batch, ("kind",), [("size", "sum"), ("size", "count")]):
            if counts is not None:
                counts.add_rows(each["kind"], each["size_sum"], each["size_count"])
            elif each["kind"] == kind:
                file.message_count, file.byte_count = (
                    file.message_count + each["size_count"],
                    file.byte_count + each["size_sum"],
                )
        said = batch.filter(pc.equal(batch.column("kind"), kind))
        for each in _groups(said, ("caller", "callee", "sender"), [("size", "sum"), ("size", "count")]):
            seen.last[each["caller"], each["callee"], each["sender"]] = part
            file.count_traffic(each["caller"], each["callee"], each["sender"], each["size_sum"], each["size_count"])
    return seen


def _groups(batch: pa.RecordBatch, keys: Sequence[str], sums: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    import pyarrow as pa

    found: list[dict[str, Any]] = pa.Table.from_batches([batch]).group_by(list(keys)).aggregate(list(sums)).to_pylist()
    return found


def _latest(rows: Mapping[int, int]) -> set[int]:
    """The last parts, with as many rows as messages are remembered where memory is bounded."""
    found, held = set[int](), 0
    for part in sorted(rows, reverse=True):
        if held >= MAX_REMEMBERED_MESSAGES:
            break
        found.add(part)
        held += rows[part]
    return found


def _note_rounds(file: CaptureWriter, capture: Capture, needed: Collection[int], latest: Collection[int]) -> None:
    import pyarrow.compute as pc

    for route in file.routes:
        way = route["caller"], route["callee"]
        file.awaited_rounds |= {way: 0, way[::-1]: 0}
    for part, batch in capture.read_parts(("caller", "callee", "sender", "kind", "payload"), needed.__contains__):
        said = batch.filter(pc.equal(batch.column("kind"), "message"))
        payloads = said.column("payload").to_pylist()
        rows, rounds, _, _ = file.codec.decode_many(payloads)
        caller, callee, sender = (said.column(name).to_numpy()[rows] for name in ("caller", "callee", "sender"))
        ways = zip(sender.tolist(), (caller + callee - sender).tolist(), strict=True)
        for row, way, t in zip(rows.tolist(), ways, rounds.tolist(), strict=True):
            if part in latest:
                file.checks.remember_round(*way, t, payloads[row])
            _note_round(file, way, t)


def _note_round(file: CaptureWriter, way: tuple[int, int], t: int) -> None:
    if file.routes:
        file.awaited_rounds[way] = max(file.awaited_rounds[way], t + 1)
    else:
        file.gaps.expect_sender(way[0])
        file.gaps.record_round(way[0], t=t)


# ---- copies of learners ----------------------------------------------------------------------------------------------


_MAX_COPIES_PER_REQUEST = 1_024
"""In one request: learners send far fewer at a time."""
_MAX_INDEX, _MAX_TIME_NS = 2**31 - 1, 2**63 - 1
"""Within the columns of a capture."""


@dataclass(frozen=True, slots=True)
class Participants:
    """Who may be in a capture.

    Attributes:
        learners: how many; as many as a column holds where nobody said.
        mirrored: whether learners send copies. Else a relay hears them, and a copy is somebody else's forgery.
        names: of the learners, in their order; empty where nobody said, or so many that no run has them.
    """

    learner_count: int
    is_mirrored: bool
    names: tuple[str, ...] = ()

    @classmethod
    def from_spec(cls, spec: str) -> Participants:
        """Read off a run spec as a document, JSON; it need not be valid."""
        document = json.loads(spec)
        fields = document if isinstance(document, dict) else {}
        told = fields.get("learners")
        n = told if isinstance(told, int) else len(told) if isinstance(told, list) else 0
        n = n if 0 < n <= _MAX_INDEX else _MAX_INDEX
        names = resolve_learner_names(told) if isinstance(told, int | list) and n <= MAX_LEARNERS else ()
        names = names if all(isinstance(name, str) for name in names) else ()
        return cls(n, fields.get("capture") == "mirror", names)

    def require_sender(self, index: int, caller: Principal | None) -> None:
        """A learner that has shown a certificate speaks for itself; others cannot be told apart.

        Raises:
            PermissionDenied: it speaks for another one.
        """
        if caller is not None and not caller.is_one_of(
            *(f"{Role.LEARNER}/{name}" for name in self.names[index : index + 1])
        ):
            raise PermissionDenied(f"{caller} must not speak for {format_learner_name(self.names, index)}")

    def require_learners(self, *indices: int) -> None:
        """Refuse whoever is not one of them.

        Raises:
            RemoteProtocolError: there is no such learner.
        """
        if wrong := [index for index in indices if index >= self.learner_count]:
            raise RemoteProtocolError(f"the capture is of {self.learner_count} learners, got learner {wrong[0]}")

    def get_end_names(self, route: eavesdropper_pb2.Route) -> tuple[str, str]:
        """The names of who opens a stream and who accepts it; empty where nobody said."""
        known = self.names if max(route.caller, route.callee) < len(self.names) else ()
        return (known[route.caller], known[route.callee]) if known else ("", "")

    def build_rows(self, request: eavesdropper_pb2.MirrorRequest) -> list[CaptureRow]:
        """One for each receiver of each message, as a relay would have it, but without metadata or its own times.

        Raises:
            RemoteProtocolError: the capture takes no copies, or one that is none of this run's. Nothing of it is kept.
        """
        if not self.is_mirrored:
            raise RemoteProtocolError("copies are taken where the run's capture is `mirror`, got a run of another one")
        self.require_learners(request.sender)
        if len(request.messages) > _MAX_COPIES_PER_REQUEST:
            raise RemoteProtocolError(
                f"a request must have at most {_MAX_COPIES_PER_REQUEST} copies, got {len(request.messages)}"
            )
        now = time.monotonic_ns()
        return [row for message in request.messages for row in self._rows(request.sender, message, now)]

    def _rows(self, sender: int, message: eavesdropper_pb2.MirroredMessage, now: int) -> list[CaptureRow]:
        if len(message.receivers) > min(self.learner_count, MAX_LEARNERS):
            raise RemoteProtocolError(
                f"a message of {self.learner_count} learners goes to fewer, got {len(message.receivers)}"
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
