"""Writing captures: a folder with `capture.json` and numbered Parquet parts, each complete in itself.

A part is there whole or not at all (`storage`), so that whatever stands there can be read, however the process ended. At
most what was in memory is lost: what came since the last part that is there was begun. That is `_PART_INTERVAL_S` seconds and the time
that one part takes to be written, or fewer where `MAX_PART_ROWS` messages fill a part.

Columns: those of a `Row`, and `run, world, replica`, the same in all rows of a capture.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.network.participation_schedule import Participation, ParticipationSchedule
from sottovoce_core.registry import UNBOUNDED_ROUNDS
from sottovoce_core.runs.transcript import import_parquet
from sottovoce_core.spec import MAX_LEARNERS, MAX_OFFLINE_INTERVALS
from sottovoce_eavesdropper import CAPTURE_FORMAT
from sottovoce_eavesdropper.capture_checks import CaptureChecks, CaptureRow, Gaps, is_tapped
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.codec import RoundCodec, Shapes
from sottovoce_rpc.logs import describe_failure

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger()

MAX_PART_ROWS, MAX_PART_BYTES, _PART_INTERVAL_S = 8_192, 64 * 1024 * 1024, 1.0
_MAX_BUFFERED_ROWS = 8 * MAX_PART_ROWS
"""Rows in memory: of a wiretap they hold no bytes, and a byte on the wire may be a row."""
WRITE_TIMEOUT_S = 30.0
"""How long a part under way may take to be written when a capture ends."""


def build_schema() -> pa.Schema:
    """The columns of a part."""
    import pyarrow as pa

    return pa.schema(
        [
            ("caller", pa.int32()),
            ("callee", pa.int32()),
            ("sender", pa.int32()),
            ("direction", pa.dictionary(pa.int8(), pa.string())),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("stream", pa.int32()),
            ("connection", pa.int32()),
            ("method", pa.dictionary(pa.int16(), pa.string())),
            ("wall_ns", pa.int64()),
            ("mono_ns", pa.int64()),
            ("size", pa.int64()),
            ("payload", pa.binary()),
            ("again", pa.bool_()),
            ("run", pa.dictionary(pa.int8(), pa.string())),
            ("world", pa.int8()),
            ("replica", pa.int32()),
        ]
    )


def format_part_name(number: int) -> str:
    """The file of a part; parts count from 1."""
    return f"part-{number:06d}.parquet"


def parse_part_number(name: str) -> int:
    """The number of a part's file; 0: it is none."""
    found = re.fullmatch(r"part-(\d{6,})\.parquet", name)
    return 0 if found is None else int(found[1])


@dataclass(slots=True)
class CiphertextCounts:
    """What a wiretap noted.

    Attributes:
        connections: that were opened.
        records: of TLS; where there is none, of what came at a time.
        bytes: of all records, with their headers.
    """

    connections: int = 0
    records: int = 0
    bytes: int = 0

    def add_rows(self, kind: str, size: int, times: int = 1) -> None:
        """So many rows of a kind, and the bytes of all of them."""
        if kind == "opened":
            self.connections += times
        elif kind == "ciphertext":
            self.records, self.bytes = self.records + times, self.bytes + size


@dataclass(slots=True)
class CaptureWriter:
    """One capture being written.

    Attributes:
        folder: where it stands: a path, or a URL for fsspec.
        capture_id, run_id: whose it is.
        spec: the run spec, JSON.
        n_features: of a record; 0 where nobody said.
        world, replica: what the capture is one of, in an audit; None where nobody said.
        allow_imports: whether the spec may name code to import.
        fields: of a round, in their order, and their shapes; none: the capture is of no run of ours.
        routes: of the relays: caller, callee, target, and the address where each listens.
        gaps: in what is mirrored, or was relayed while the eavesdropper was away.
        opener: who asked for it, `role/name`; empty: nobody who has shown a certificate.
        awaited: of a capture that is taken up again: (sender, receiver) to the round that is due, until one comes.
        interrupted: an eavesdropper before this one died, of a capture by wiretap: nobody knows which rounds passed then.
        parts: so many are written.
        messages, bytes: counts of messages (neither hellos nor metadata).
        ways: the same counts, from (sender, receiver), of a run of ours; of a wiretap, records of TLS.
        ciphertext: counts of what a wiretap noted; None: the capture is by none.
        place: the folder, opened.
        codec: of rounds of these fields.
        broken: why nothing more can be written; None: all could be.
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
    _held: int = 0
    _complete: bool = False
    _due: list[Sequence[CaptureRow]] = field(default_factory=list)  # looked at, and not yet in the store
    _away: bool = False
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
        self.gaps.participations = _attendances(spec)
        self.ciphertext = CiphertextCounts() if is_tapped(spec) else None
        self.storage_folder = open_folder(self.folder)
        self.storage_folder.make()
        if not self.part_count:  # else what stands there is true until more is known
            self._describe()

    def add_row(self, row: CaptureRow) -> None:
        """Keep a record; cheap, called for every message that passes."""
        if not self.is_open:
            return
        self._rows.append(row)
        if row.kind == "message":
            self.message_count += 1
            self.byte_count += row.size
            self.count_traffic(row.caller, row.callee, row.sender, row.size)
            if self.awaited_rounds:
                self._note_gap(row)
        elif self.ciphertext is not None:
            self.ciphertext.add_rows(row.kind, row.size)
            if row.kind == "ciphertext":
                self.count_traffic(row.caller, row.callee, row.sender, row.size)
        self._held += len(row.payload)
        if len(self._rows) >= MAX_PART_ROWS or self._held >= MAX_PART_BYTES:
            self._full.set()

    @property
    def buffer_size(self) -> tuple[int, int]:
        """Rows in memory, and the bytes of what they hold."""
        return len(self._rows), self._held

    def count_traffic(self, caller: int, callee: int, sender: int, size: int, times: int = 1) -> None:
        """So many messages, or records of TLS, passed on an edge, and the bytes of all of them."""
        if self.fields or self.ciphertext is not None:  # else who speaks is not known, nor how many there are
            way = sender, caller + callee - sender
            known, n_bytes = self.channel_traffic.get(way, (0, 0))
            self.channel_traffic[way] = known + times, n_bytes + size

    def _note_gap(self, row: CaptureRow) -> None:
        """The first round of a way since the capture was taken up again."""
        way = row.sender, row.caller + row.callee - row.sender
        if way in self.awaited_rounds:
            with contextlib.suppress(RemoteProtocolError):  # of no round: what is wrong with it is noticed
                t, _, _ = self.codec.decode(row.payload)
                self.gaps.resume_channel(*way, next_round=self.awaited_rounds.pop(way), t=t)

    def reconfigure(self, spec: str) -> None:
        """Learners leave or join: the run has another spec from now on, which says the same of what was recorded."""
        self.spec, document = spec, json.loads(spec)
        self.checks.reconfigure(document)
        self.gaps.participations = _attendances(document)

    async def write_metadata(self) -> None:
        """Write down what the capture is: one at a time, so that what stands there is whole, and the newest.

        Raises:
            OSError: it cannot be written.
        """
        async with self._writing:
            await _to_its_end(self._describe)

    async def write_parts(self) -> None:
        """Write parts as they fill up, or a second after the last one was begun, until cancelled."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self.is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(begun + _PART_INTERVAL_S, loop.time())):
                    await self._full.wait()
            self._full.clear()
            begun = loop.time()
            await self.flush()

    async def wait_for_buffer(self) -> None:
        """Wait while two parts or more are in memory, or very many rows: the wire is faster than the disk."""
        if self.is_open and (self._held >= 2 * MAX_PART_BYTES or len(self._rows) >= _MAX_BUFFERED_ROWS):
            await self.flush()

    async def flush(self) -> None:
        """Write what is in memory.

        Where that fails the capture ends, and what stands of it says that it is not complete. A store that is away is waited for,
        as long as two parts hold what it has not got.
        """
        async with self._writing:
            rows, self._rows, self._held = self._rows, [], 0
            if not rows and not self._due:
                return
            try:
                await _to_its_end(lambda: self._write(rows))
            except Exception as error:  # noqa: BLE001 - a full disk must not fill the memory as well, nor any bug
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        """A part could not be written."""
        reason = {"reason": str(error)} if isinstance(error, OSError) else describe_failure(error)
        held = sum(len(row.payload) for own in self._due for row in own)
        few = held < 2 * MAX_PART_BYTES and sum(map(len, self._due)) < _MAX_BUFFERED_ROWS
        if self.is_open and few and self.storage_folder.is_remote and isinstance(error, OSError):
            if not self._away:
                log.error(
                    "the store of a capture does not answer: held until it does", capture=self.capture_id, **reason
                )
            self._away = True
            return
        self.is_open, self._due = False, []
        self.write_error = (error.strerror or str(error)) if isinstance(error, OSError) else type(error).__name__
        log.error("capture cannot be written: nothing more is recorded", capture=self.capture_id, **reason)

    async def close(self, *, has_run_ended: bool = True) -> None:
        """Write the rest; if all came and could be written, the capture is complete.

        Args:
            over: False: its run may go on, and an eavesdropper after this one takes it up.
        """
        async with self._closing:
            self.is_open = False
            await self.flush()
            await self._conclude(over=has_run_ended)

    async def flush_fully(self) -> None:
        """Write what is in memory; of a capture that is being closed, all that it will ever say."""
        async with self._closing:
            await self.flush()

    async def _conclude(self, *, over: bool) -> None:
        """Write down how the capture ended."""
        told = json.loads(self.spec).get("rounds", 0)
        rounds = UNBOUNDED_ROUNDS if told is None else told if isinstance(told, int) else 0
        for way, due in self.awaited_rounds.items():
            ends = (each.end for i, each in self.gaps.participations.items() if i in way)
            if 0 < due < min((rounds, *ends)):  # 0: in a network with directions nothing may ever pass there
                self.gaps.resume_channel(*way, next_round=due, t=None)
        for each in self.routes if self.is_interrupted else ():
            for way in ((each["caller"], each["callee"]), (each["callee"], each["caller"])):
                self.gaps.resume_channel(*way, next_round=0, t=None)
        if self.write_error is None:
            self._complete = over and not self.gaps.build_metadata()
            try:
                await self.write_metadata()
            except OSError as error:
                self._complete, self.write_error = False, error.strerror or str(error)

    def _write(self, rows: Sequence[CaptureRow]) -> None:
        """In a thread: look at what was recorded, and write it in parts."""
        noticed = self.checks.detection_count
        self._due += _in_parts(self.checks.check_rows(rows))
        while self._due:
            self.storage_folder.write(
                format_part_name(self.part_count + 1), _part(self._due[0], self.run_id, self.world, self.replica)
            )
            self.part_count += 1
            del self._due[0]
        if self._away:
            log.info("the store of a capture answers again: nothing is lost", capture=self.capture_id)
            self._away = False
        if self.checks.detection_count > noticed:
            self._describe()

    def _describe(self) -> None:
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


async def _to_its_end(work: Callable[[], None]) -> None:
    """Write in a thread, and await it when cancelled, too: a thread cannot be stopped half way."""
    writing = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        if (error := writing.exception()) is not None:  # of more weight: what it was to write is lost
            raise error from None
        raise


def _in_parts(rows: Sequence[CaptureRow]) -> Iterator[Sequence[CaptureRow]]:
    """Runs of rows of at most `MAX_PART_ROWS`, and of `MAX_PART_BYTES` but for the last row."""
    begin, held = 0, 0
    for end, row in enumerate(rows, 1):
        held += len(row.payload)
        if end - begin == MAX_PART_ROWS or held >= MAX_PART_BYTES or end == len(rows):
            yield rows[begin:end]
            begin, held = end, 0


def _part(rows: Sequence[CaptureRow], run: str, world: int | None, replica: int | None) -> bytes:
    """A part, as the bytes of its file."""
    import pyarrow as pa

    labels = (run, -1 if world is None else world, -1 if replica is None else replica)
    columns = [*zip(*rows, strict=True), *([label] * len(rows) for label in labels)]
    table = pa.Table.from_arrays(
        [pa.array(column, kind.type) for column, kind in zip(columns, build_schema(), strict=True)],
        schema=build_schema(),
    )
    sink = pa.BufferOutputStream()
    import_parquet().write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _attendances(spec: Mapping[str, Any]) -> dict[int, Participation]:
    """In which rounds learners take part, where some are away; nobody has checked the spec that came with a capture."""
    try:
        told = spec["learners"]
        if (told if isinstance(told, int) else len(told)) > MAX_LEARNERS or len(
            spec["offline_intervals"]
        ) > MAX_OFFLINE_INTERVALS:
            return {}  # of no run of ours
        roster, rounds = ParticipationSchedule.from_spec(spec), int(spec["rounds"] or UNBOUNDED_ROUNDS)
        return {
            i: roster.learner_participation(i, rounds)
            for i in range(len(roster.names) if roster.offline_intervals else 0)
        }
    except (ValueError, TypeError, KeyError):
        return {}
