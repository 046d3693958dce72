"""Writer of captures: a folder with `capture.json` and numbered Parquet parts, each readable by itself.

A part is written whole or not at all (`storage`), so that every part can be read, however the process ended. At most the rows
in memory are lost: those recorded since the last written part was begun. That is `_PART_INTERVAL_S` seconds and the time to write
one part, or less if `MAX_PART_ROWS` messages fill a part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from sottovoce_core.auditing.online_checks import Detection
from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.network.participation_schedule import Participation, ParticipationSchedule
from sottovoce_core.registry import UNBOUNDED_ROUNDS
from sottovoce_core.runs.transcript import import_parquet
from sottovoce_core.spec import MAX_LEARNERS, MAX_OFFLINE_INTERVALS
from sottovoce_eavesdropper import CAPTURE_FORMAT, parts
from sottovoce_eavesdropper.capture_checks import CaptureChecks, CaptureRow, Gaps, decode_rounds, is_tapped
from sottovoce_eavesdropper.parts import encode_part, format_part_name, split_into_parts
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.codec import RoundCodec, Shapes
from sottovoce_rpc.logs import describe_failure
from sottovoce_wire.v1 import eavesdropper_pb2

if TYPE_CHECKING:
    pass

log = structlog.get_logger()

_PART_INTERVAL_S = 1.0
_MAX_BUFFERED_ROWS = 8 * parts.MAX_PART_ROWS
"""Maximum number of rows in memory: a wiretap's rows hold no bytes, and each byte on the wire may be a row."""
WRITE_TIMEOUT_S = 30.0
"""Time to finish a part when a capture ends."""
_SWITCH_INTERVAL_S = 0.000_2
"""Longest time that messages wait for a thread that checks and writes parts (Python's default is 5 ms)."""


def prefer_messages() -> None:
    """Let messages pass in this process without waiting long for the threads that check and write them."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@dataclass(slots=True)
class CiphertextCounts:
    """Counts of a wiretap.

    Attributes:
        connections: opened connections.
        records: TLS records; without TLS, chunks as they were read.
        bytes: bytes of all records, headers included.
    """

    connections: int = 0
    records: int = 0
    bytes: int = 0

    def add_rows(self, kind: str, size: int, times: int = 1) -> None:
        """Count rows of a kind; `size` is the total of their bytes."""
        if kind == "opened":
            self.connections += times
        elif kind == "ciphertext":
            self.records, self.bytes = self.records + times, self.bytes + size


class RowSource(Protocol):
    """Another process that records edges of a capture."""

    async def flush(self) -> None:
        """Send every row in memory."""
        ...

    async def reconfigure(self, spec: str) -> None:
        """Replace the run's spec."""
        ...

    async def close(self) -> None:
        """Send every row in memory, and end."""
        ...


@dataclass(slots=True, weakref_slot=True, eq=False)
class CaptureWriter:
    """Writer of one capture.

    Attributes:
        folder: location of the capture: a path, or a URL for fsspec.
        capture_id, run_id: ids of the capture and its run.
        spec: run spec, JSON.
        n_features: features of a record; 0 if unknown.
        world, replica: labels of the capture in an audit; None if there are none.
        allow_imports: allow the spec to name code to import.
        fields: fields of a round in order, with their shapes; empty if the capture is not of a run of ours.
        routes: caller, callee, target, and listen address of each proxy.
        gaps: missing rounds, in copies or while no eavesdropper relayed.
        opener: principal that opened the capture, `role/name`; empty for one without a certificate.
        awaited_rounds: for a resumed capture, next round of each (sender, receiver) until a message arrives.
        sources: processes that record edges of the capture.
        next_rounds: one more than the last round that they have recorded, by (sender, receiver).
        edge_counts: streams of the edges that they have recorded; for a wiretap connections.
        is_interrupted: an earlier eavesdropper died in this wiretap capture: unknown rounds are missing.
        part_count: number of written parts.
        message_count, byte_count: recorded messages (without hellos and metadata) and their bytes.
        channel_traffic: the same counts by (sender, receiver), for a run of ours; for a wiretap, of TLS records.
        ciphertext: counts of a wiretap; None for other captures.
        storage_folder: the opened folder.
        codec: codec of rounds of these fields.
        write_error: why nothing more can be written; None if there was no error.
    """

    folder: str | Path
    capture_id: str
    run_id: str
    spec: str
    n_features: int = 0
    world: int | None = None
    replica: int | None = None
    allow_imports: bool = False
    fields: Shapes = field(default_factory=dict)
    routes: Sequence[Mapping[str, Any]] = ()
    gaps: Gaps = field(default_factory=Gaps)
    awaited_rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    sources: list[RowSource] = field(default_factory=list)
    next_rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    edge_counts: dict[tuple[int, int], int] = field(default_factory=dict)
    opener: str = ""
    message_count: int = 0
    byte_count: int = 0
    is_open: bool = True
    write_error: str | None = None
    is_interrupted: bool = False
    part_count: int = 0
    channel_traffic: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    ciphertext: CiphertextCounts | None = field(init=False)
    storage_folder: Folder = field(init=False)
    codec: RoundCodec = field(init=False)
    checks: CaptureChecks = field(init=False)
    _rows: list[CaptureRow] = field(default_factory=list)
    _buffered_bytes: int = 0
    _complete: bool = False
    _due: list[tuple[bytes, int]] = field(default_factory=list)  # encoded parts that are not yet stored, and their rows
    _is_store_away: bool = False
    _full: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        import_parquet()
        spec = json.loads(self.spec)
        self.codec = RoundCodec(self.fields)
        self.checks = CaptureChecks(
            self.capture_id, spec, self.n_features, self.fields, allow_imports=self.allow_imports
        )
        self.gaps.participations = _compute_participations(spec)
        self.ciphertext = CiphertextCounts() if is_tapped(spec) else None
        self.storage_folder = open_folder(self.folder)
        self.storage_folder.make()
        if not self.part_count:  # a resumed capture keeps its metadata until more is known
            self._write_metadata()

    def add_row(self, row: CaptureRow) -> None:
        """Buffer a row; cheap, because it is called for every message that passes."""
        if not self.is_open:
            return
        self._rows.append(row)
        if row.kind == "message":
            self.message_count += 1
            self.byte_count += row.size
            self.count_traffic(row.caller, row.callee, row.sender, row.size)
            if self.awaited_rounds:
                self._end_gap(row)
        elif self.ciphertext is not None:
            self.ciphertext.add_rows(row.kind, row.size)
            if row.kind == "ciphertext":
                self.count_traffic(row.caller, row.callee, row.sender, row.size)
        self._buffered_bytes += len(row.payload)
        if len(self._rows) >= parts.MAX_PART_ROWS or self._buffered_bytes >= parts.MAX_PART_BYTES:
            self._full.set()

    @property
    def buffer_size(self) -> tuple[int, int]:
        """Number of rows in memory, and of the bytes of their payloads."""
        return len(self._rows), self._buffered_bytes

    def count_traffic(self, caller: int, callee: int, sender: int, size: int, times: int = 1) -> None:
        """Count messages, or TLS records, on an edge; `size` is the total of their bytes."""
        if self.fields or self.ciphertext is not None:  # else the senders are unknown, and unbounded in number
            channel = sender, caller + callee - sender
            known, n_bytes = self.channel_traffic.get(channel, (0, 0))
            self.channel_traffic[channel] = known + times, n_bytes + size

    def _end_gap(self, row: CaptureRow) -> None:
        """Record the gap that ends with the first round on a channel since the capture was resumed."""
        channel = row.sender, row.caller + row.callee - row.sender
        if channel in self.awaited_rounds:
            with contextlib.suppress(RemoteProtocolError):  # not a round: the online checks report it
                t, _, _ = self.codec.decode(row.payload)
                self.gaps.resume_channel(*channel, next_round=self.awaited_rounds.pop(channel), t=t)

    def reconfigure(self, spec: str) -> None:
        """Replace the run's spec after learners have left or joined; it is the same for the rounds recorded so far."""
        self.spec, document = spec, json.loads(spec)
        self.checks.reconfigure(document)
        self.gaps.participations = _compute_participations(document)

    async def write_metadata(self) -> None:
        """Write `capture.json`. Writes are serialized, so that the last one has the newest content.

        Raises:
            OSError: it cannot be written.
        """
        async with self._writing:
            await _run_to_end(self._write_metadata)

    async def write_parts(self) -> None:
        """Write parts until cancelled: whenever one is full, at the latest a second after the last one was begun."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self.is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(begun + _PART_INTERVAL_S, loop.time())):
                    await self._full.wait()
            self._full.clear()
            begun = loop.time()
            await self.flush()

    @property
    def is_behind(self) -> bool:
        """Return whether two full parts or very many rows are in memory: then messages arrive faster than the disk writes."""
        return self.is_open and (
            self._buffered_bytes >= 2 * parts.MAX_PART_BYTES or len(self._rows) >= _MAX_BUFFERED_ROWS
        )

    async def wait_for_buffer(self) -> None:
        """Write now if the writer is behind."""
        if self.is_behind:
            await self.flush()

    async def flush(self) -> None:
        """Write what is in memory.

        After a failed write the capture ends, and stays marked as incomplete. An unreachable remote store is waited for, as long
        as the unwritten rows fit in two parts.
        """
        async with self._writing:
            rows, self._rows, self._buffered_bytes = self._rows, [], 0
            if rows or self._due:
                await self._run_write(lambda: self._write(rows))

    async def _run_write(self, write: Callable[[], None]) -> None:
        try:
            await _run_to_end(write)
        except Exception as error:  # noqa: BLE001 - neither a full disk nor a bug may let memory grow
            self._handle_failure(error)

    async def add_part(self, part: eavesdropper_pb2.WorkerPart) -> None:
        """Write a part that a worker has checked and encoded; nothing if the capture has ended with an error."""
        for each in part.channels:
            caller, callee = sorted((each.sender, each.receiver))
            self.count_traffic(caller, callee, each.sender, each.bytes, each.messages)
            if self.ciphertext is None:
                self.message_count, self.byte_count = self.message_count + each.messages, self.byte_count + each.bytes
            else:
                self.ciphertext.add_rows("ciphertext", each.bytes, each.messages)
        if self.ciphertext is not None:
            self.ciphertext.connections += part.connections
        for edge in part.edges:
            self.edge_counts[edge.caller, edge.callee] = edge.count
        recorded, firsts = list(decode_rounds(part.recorded)), set(part.first_contents)
        for message in recorded:
            channel, t = (message.sender, message.receiver), message.round
            if channel in self.awaited_rounds:
                self.gaps.resume_channel(*channel, next_round=self.awaited_rounds.pop(channel), t=t)
            self.next_rounds[channel] = max(self.next_rounds.get(channel, 0), t + 1)
        if part.unchecked_reason:
            self.checks.unchecked_reason = part.unchecked_reason

        def write() -> None:
            known = self.checks.detection_count
            listed = [Detection(**json.loads(each)) for each in part.detections]
            for detection in listed:
                self.checks.record_detection(detection)
            for kind, number in part.detection_counts.items():
                self.checks.count_detections(kind, number - sum(each.kind == kind for each in listed))
            self.checks.check_versions((message, k in firsts) for k, message in enumerate(recorded))
            self._due.append((part.content, part.rows))
            self._write(())
            if self.checks.detection_count > known:
                self._write_metadata()

        async with self._writing:
            if self.write_error is None:
                await self._run_write(write)

    def interrupt_edges(self, edges: Iterable[tuple[int, int]]) -> None:
        """Note that the process which recorded these edges has ended with the rows in its memory: rounds may be missing."""
        if self.ciphertext is not None:
            self.is_interrupted = True
            return
        for caller, callee in edges:
            for channel in ((caller, callee), (callee, caller)):
                self.awaited_rounds.setdefault(channel, self.next_rounds.get(channel, 0))

    def _handle_failure(self, error: Exception) -> None:
        """Keep unwritten rows if a remote store may come back, else end the capture."""
        reason = {"reason": str(error)} if isinstance(error, OSError) else describe_failure(error)
        held_rows = sum(rows for _, rows in self._due)
        fits = sum(len(part) for part, _ in self._due) < 2 * parts.MAX_PART_BYTES and held_rows < _MAX_BUFFERED_ROWS
        if self.is_open and fits and self.storage_folder.is_remote and isinstance(error, OSError):
            if not self._is_store_away:
                log.error(
                    "the store of a capture does not answer: rows are held until it does",
                    capture=self.capture_id,
                    **reason,
                )
            self._is_store_away = True
            return
        self.is_open, self._due = False, []
        self.write_error = (error.strerror or str(error)) if isinstance(error, OSError) else type(error).__name__
        log.error("capture cannot be written: nothing more is recorded", capture=self.capture_id, **reason)

    async def close(self, *, has_run_ended: bool = True) -> None:
        """Write the rest; the capture is complete if everything arrived and was written.

        Args:
            has_run_ended: False if its run may go on, with an eavesdropper that resumes the capture.
        """
        async with self._closing:
            for source in self.sources:
                await source.close()
            self.is_open = False
            await self.flush()
            await self._write_end(has_run_ended=has_run_ended)

    async def flush_fully(self) -> None:
        """Write what is in memory; wait for the end of a capture that is being closed."""
        async with self._closing:
            if self.is_open:
                for source in self.sources:
                    await source.flush()
            await self.flush()

    async def _write_end(self, *, has_run_ended: bool) -> None:
        """Write how the capture ended."""
        spec_rounds = json.loads(self.spec).get("rounds", 0)
        rounds = UNBOUNDED_ROUNDS if spec_rounds is None else spec_rounds if isinstance(spec_rounds, int) else 0
        for channel, due in self.awaited_rounds.items():
            ends = (each.end for i, each in self.gaps.participations.items() if i in channel)
            if 0 < due < min((rounds, *ends)):  # 0: in a directed network the channel may never be used
                self.gaps.resume_channel(*channel, next_round=due, t=None)
        for each in self.routes if self.is_interrupted else ():
            for channel in ((each["caller"], each["callee"]), (each["callee"], each["caller"])):
                self.gaps.resume_channel(*channel, next_round=0, t=None)
        if self.write_error is None:
            self._complete = has_run_ended and not self.gaps.build_metadata()
            try:
                await self.write_metadata()
            except OSError as error:
                self._complete, self.write_error = False, error.strerror or str(error)

    def _write(self, rows: Sequence[CaptureRow]) -> None:
        """Check recorded rows, and write them in parts; runs in a thread."""
        known = self.checks.detection_count
        checked = self.checks.check_rows(rows)
        self._due += (
            (encode_part(part, self.run_id, self.world, self.replica), len(part)) for part in split_into_parts(checked)
        )
        while self._due:
            self.storage_folder.write(format_part_name(self.part_count + 1), self._due[0][0])
            self.part_count += 1
            del self._due[0]
        if self._is_store_away:
            log.info("the store of a capture answers again: nothing is lost", capture=self.capture_id)
            self._is_store_away = False
        if self.checks.detection_count > known:
            self._write_metadata()

    def _write_metadata(self) -> None:
        facts = {
            "format": CAPTURE_FORMAT,
            "capture_id": self.capture_id,
            "run_id": self.run_id,
            "world": self.world,
            "replica": self.replica,
            "n_features": self.n_features,
            "fields": {name: list(shape) for name, shape in self.fields.items()},
            "complete": self._complete,
            "gaps": self.gaps.build_metadata(),
            "routes": list(self.routes),
            "opener": self.opener,
            "messages": self.message_count,
            "bytes": self.byte_count,
            "ciphertext": None if self.ciphertext is None else asdict(self.ciphertext),
            **self.checks.build_metadata(),
            "spec": json.loads(self.spec),
        }
        self.storage_folder.write("capture.json", json.dumps(facts, indent=2).encode())


async def _run_to_end(work: Callable[[], None]) -> None:
    """Run blocking work in a thread; wait for its end even if cancelled, because a thread cannot be stopped half way."""
    writing = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        if (error := writing.exception()) is not None:  # more important than the cancellation: data is lost
            raise error from None
        raise


def _compute_participations(spec: Mapping[str, Any]) -> dict[int, Participation]:
    """Return the rounds of each learner, if some have offline intervals; the spec of a capture may be invalid."""
    try:
        learners = spec["learners"]
        if (learners if isinstance(learners, int) else len(learners)) > MAX_LEARNERS or len(
            spec["offline_intervals"]
        ) > MAX_OFFLINE_INTERVALS:
            return {}  # not a run of ours
        schedule, rounds = ParticipationSchedule.from_spec(spec), int(spec["rounds"] or UNBOUNDED_ROUNDS)
        return {
            i: schedule.learner_participation(i, rounds)
            for i in range(len(schedule.names) if schedule.offline_intervals else 0)
        }
    except (ValueError, TypeError, KeyError):
        return {}
