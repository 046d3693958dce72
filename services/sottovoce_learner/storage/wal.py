"""The write-ahead log of one learner in one run: chained entries, in segments that are allocated before they are written.

A segment is a page that says whose it is and what its first entry stands behind, and entries after that. Nothing in a segment
is ever changed. Space is allocated ahead, all zero, so that a sync has no metadata to write. An entry is, little endian and
padded to 8 bytes,

    length u32 | kind u8 | 0 | sequence u64 | round u64 | spent f64 | in all f64 | crc32 of body u32 | 0
    body
    chain 16

with `chain_k = SHA-256(chain_{k-1} | header of entry k)[:16]`. The header holds the body's checksum, so an entry is right only
behind exactly those that were before it.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from sottovoce_learner.storage.state_folder import (
    FORMAT,
    DiskFull,
    FileGuard,
    LearnerPaths,
    extend_chain,
    list_with_suffix,
    read_if_exists,
    require_format,
    sync_folder,
)

Durability = Literal["process", "power"]

_MAGIC = b"sotto.l\0"
PAGE_BYTES = 4096
PREALLOCATED_BYTES, MAX_SEGMENT_BYTES = 256 * 1024, 64 * 1024 * 1024
"""Bytes allocated at a time, and those of a segment, unless one entry is longer."""
_HEADER = struct.Struct("<IB3xQQddI4x")
_GRANT = struct.Struct("<Qd")
_INPUTS = struct.Struct("<QIIII")
_SNAPSHOT = struct.Struct("<Q16s32sQQd")
CHAIN_BYTES = 16
START_CHAIN = bytes(CHAIN_BYTES)
"""What the first entry of all stands behind."""


# ---- entries ---------------------------------------------------------------------------------------------------------


class EntryKind(IntEnum):
    """What an entry says; the numbers are those on disk."""

    OPEN = 1
    RESERVATION = 2
    BATCH = 3
    ROUND = 4
    CLOSE = 5
    SNAPSHOT = 6


_KINDS = frozenset(EntryKind)


class LogEntry(NamedTuple):
    """One entry.

    Attributes:
        kind: what it says.
        sequence: how many entries of the run stand before it.
        round: that it is about.
        spent: epsilon of the run, with what this entry charges.
        in_all: epsilon of all runs of the learner, this one included.
        body: by its kind: `Reservation`, `Said`, `SnapshotPointer`, records, or the spec.
        chain: behind it, where it was read.
        end: first byte behind it, where it was read.
    """

    kind: EntryKind
    sequence: int
    round: int
    epsilon_spent: float
    total_epsilon_spent: float
    body: bytes
    chain: bytes = b""
    end_offset: int = 0

    def encode(self, chain: bytes) -> tuple[bytes, bytes]:
        """Its bytes behind `chain`, and the chain behind it."""
        kind, sequence, t, spent, in_all, body, *_ = self
        header = _HEADER.pack(len(body), kind, sequence, t, spent, in_all, zlib.crc32(body))
        after = extend_chain(chain, header)
        return b"".join((header, body, bytes(-len(body) % 8), after)), after


def read_entries(raw: bytes, at: int = 0, sequence: int = 0, chain: bytes = START_CHAIN) -> list[LogEntry]:
    """All entries from a place on, up to the first that is not right: the next in number, whole, and behind `chain`."""
    found: list[LogEntry] = []
    while (body_at := at + _HEADER.size) <= len(raw):
        length, kind, number, t, spent, in_all, checksum = _HEADER.unpack_from(raw, at)
        chain_at = body_at + length + -length % 8
        end = chain_at + CHAIN_BYTES
        if kind not in _KINDS or number != sequence or end > len(raw):
            break
        body, chain = raw[body_at : body_at + length], extend_chain(chain, raw[at:body_at])
        # The bytes without a meaning are zero, and under the chain or compared here: no bit may be another one.
        if raw[chain_at:end] != chain or any(raw[body_at + length : chain_at]) or zlib.crc32(body) != checksum:
            break
        found.append(LogEntry(EntryKind(kind), number, t, spent, in_all, body, chain, end))
        at, sequence = end, sequence + 1
    return found


class Reservation(NamedTuple):
    """What may be said before the next entry of its kind, reserved beforehand.

    Attributes:
        until: rounds below this one may be said.
        epsilon: of the run, the most that their messages may bring it to.
    """

    end_round: int
    max_epsilon: float

    def encode(self) -> bytes:
        """As an entry's body."""
        return _GRANT.pack(*self)

    @classmethod
    def decode(cls, body: bytes) -> Reservation:
        """`encode` backwards."""
        return cls(*_GRANT.unpack(body))


NO_RESERVATION = Reservation(0, 0.0)


class SnapshotPointer(NamedTuple):
    """Names a file that stands in place of all entries up to one, and is deleted when the next such file is there.

    Attributes:
        covers: sequence number of that entry.
        chain: behind it.
        digest: SHA-256 of the file.
        size: of the file, in bytes.
        reserved: the last reservation up to there.
    """

    last_sequence: int
    chain: bytes
    digest: bytes
    size: int
    reservation: Reservation

    @property
    def file_name(self) -> str:
        """Of the file, in the run's folder."""
        return f"{self.last_sequence:016d}.snapshot"

    def encode(self) -> bytes:
        """As an entry's body."""
        *facts, reserved = self
        return _SNAPSHOT.pack(*facts, *reserved)

    @classmethod
    def decode(cls, body: bytes) -> SnapshotPointer:
        """`encode` backwards."""
        covers, chain, digest, size, until, epsilon = _SNAPSHOT.unpack(body)
        return cls(covers, chain, digest, size, Reservation(until, epsilon))


class RoundPayload(NamedTuple):  # made in every round: a frozen dataclass takes four times as long
    """A round: what is said in it, and the inputs of the round before, from which it was made.

    Attributes:
        frame: the message, as it goes out; empty in the closing entry, after the last round.
        heard: frames of the round before, as they came.
        upto: batches that were in keeping when the round before took its records.
        records: that the round before brought.
        drawn: the noise of the message, where the state keeps some that no message shows.
    """

    frame: bytes
    received_frames: tuple[bytes, ...] = ()
    batch_count: int = 0
    records: int = 0
    hidden_noise: bytes = b""

    def with_message(self, frame: bytes, drawn: bytes = b"") -> RoundPayload:
        """The round that is made from these inputs."""
        return RoundPayload(frame, self.received_frames, self.batch_count, self.records, drawn)

    def encode(self) -> bytes:
        """As an entry's body."""
        length = len(self.received_frames[0]) if self.received_frames else len(self.frame)
        head = _INPUTS.pack(self.batch_count, self.records, len(self.received_frames), length, len(self.hidden_noise))
        return b"".join((head, *self.received_frames, self.hidden_noise, self.frame))

    @classmethod
    def decode(cls, body: bytes) -> RoundPayload:
        """`encode` backwards."""
        upto, records, count, length, hidden = _INPUTS.unpack_from(body)
        ends = [_INPUTS.size + k * length for k in range(count + 1)]
        heard, frame_at = tuple(body[a:b] for a, b in pairwise(ends)), ends[-1] + hidden
        return cls(body[frame_at:], heard, upto, records, body[ends[-1] : frame_at])


# ---- what a log holds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogHeader:
    """Whose log it is.

    Attributes:
        store: number of the learner's ledger, hexadecimal.
        learner: its name.
        run_id: the run.
        durability: `process` survives the death of the writer; `power` is on the disk when `sync` returns.
    """

    store_id: str
    learner: str
    run_id: str
    durability: Durability


@dataclass(frozen=True, slots=True)
class LogContents:
    """What a log holds.

    Attributes:
        about: as its first segment says; None where there is none.
        first: sequence number that its first entry must have; above 0 where a snapshot stands in place of what was before.
        base: chain that its first entry stands behind.
        entries: those that are right, oldest first.
        path: the newest segment.
        end: first byte of it behind the last right entry.
    """

    header: LogHeader | None
    first_sequence: int
    base: bytes
    entries: tuple[LogEntry, ...]
    path: Path
    end_offset: int

    @property
    def next_sequence(self) -> int:
        """The sequence number that is due."""
        return self.first_sequence + len(self.entries)

    @property
    def folder(self) -> Path:
        """Where it stands."""
        return self.path.parent

    def get_chain(self, sequence: int) -> bytes | None:
        """What stands behind an entry; None where it is not there."""
        at = sequence - self.first_sequence
        if at == -1:
            return self.base
        return self.entries[at].chain if 0 <= at < len(self.entries) else None

    @property
    def entries_after_snapshot(self) -> tuple[LogEntry, ...]:
        """Entries that no snapshot stands in place of."""
        return (
            self.entries
            if self.snapshot is None
            else self.entries[self.snapshot.last_sequence + 1 - self.first_sequence :]
        )

    def _newest(self, *kinds: EntryKind) -> LogEntry | None:
        return next((entry for entry in reversed(self.entries) if entry.kind in kinds), None)

    @property
    def snapshot(self) -> SnapshotPointer | None:
        """The newest; None: nothing is missing before the first entry."""
        newest = self._newest(EntryKind.SNAPSHOT)
        return None if newest is None else SnapshotPointer.decode(newest.body)

    @property
    def rounds_committed(self) -> int:
        """Rounds that were said."""
        newest = self._newest(EntryKind.ROUND, EntryKind.SNAPSHOT)
        return 0 if newest is None else newest.round + 1

    @property
    def rounds_done(self) -> int:
        """Rounds that were said and learned."""
        newest = self._newest(EntryKind.ROUND, EntryKind.SNAPSHOT, EntryKind.CLOSE)
        return 0 if newest is None else newest.round

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of the run."""
        return self.entries[-1].epsilon_spent if self.entries else 0.0

    @property
    def reservation(self) -> Reservation:
        """The last reservation."""
        if (newest := self._newest(EntryKind.RESERVATION)) is not None:
            return Reservation.decode(newest.body)
        return NO_RESERVATION if self.snapshot is None else self.snapshot.reservation


def read_log(*folders: Path, previous: LogContents | None = None) -> LogContents:
    """All that is right in a log, while its learner may write: where it deletes segments, up to the first of them.

    Args:
        folders: of its segments, each in the first of these folders that has it.
        after: what was read of it before: what came since is read.

    Raises:
        CorruptStateError: a segment is of a newer format.
    """
    before = previous or LogContents(None, 0, START_CHAIN, (), folders[-1] / "none", 0)
    about, path, end = before.header, before.path, before.end_offset
    first = due = before.next_sequence, before.entries[-1].chain if before.entries else before.base
    entries = list[LogEntry]()
    segments = {segment.name: segment for folder in reversed(folders) for segment in list_with_suffix(folder, ".log")}
    for name in sorted(segments):
        if about is not None and name < path.name:
            continue
        known = end if about is not None and name == path.name else 0
        raw = read_if_exists(segments[name], known)
        if not known:
            if (facts := _facts(raw, segments[name])) is None:
                break
            begin = facts["sequence"], bytes.fromhex(facts["chain"])
            if about is None:
                about, first, due = LogHeader(**facts["about"]), begin, begin
            if begin != due:
                break
        path, end = segments[name], known or PAGE_BYTES
        for entry in read_entries(raw, 0 if known else PAGE_BYTES, *due):
            entries.append(entry)
            end, due = known + entry.end_offset, (entry.sequence + 1, entry.chain)
    return LogContents(about, *first, tuple(entries), path, end)


# ---- writing ---------------------------------------------------------------------------------------------------------


class _DiskSpace:
    """Tells a disk that has no room from one that fails. Not of a sync: what that could not write may be lost."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull from None


_disk_space = _DiskSpace()


class WriteAheadLog:
    """A log, open for writing. Every error of the system is passed on: what could not be written whole does not count.

    Args:
        files: of the learner.
        about: whose it is.
        reading: what it holds already; None: it begins here.
    """

    def __init__(self, files: LearnerPaths, about: LogHeader, reading: LogContents | None = None) -> None:
        self.folder, self._about, self._files = files.get_log_folder(about.run_id), about, files
        self.sequence, self.chain = 0, START_CHAIN
        self._unsynced, self._doubtful = False, False
        if reading is None or reading.header is None:
            self._begin(0)
            return
        self.sequence, self._segment = reading.next_sequence, int(reading.path.stem)
        self.chain = reading.entries[-1].chain if reading.entries else reading.base
        self._file = os.open(reading.path, os.O_RDWR | os.O_CLOEXEC)
        self._at = reading.end_offset
        try:
            self._held = FileGuard(reading.path, self._file)
            self._wipe()
        except BaseException:
            self.close()
            raise

    def append(self, kind: EntryKind, t: int, spent: float, in_all: float, body: bytes) -> int:
        """Write an entry; returns its sequence number. Only after `sync` does it survive what it must.

        Raises:
            DiskFull: there is no room for it.
        """
        raw, after = LogEntry(kind, self.sequence, t, spent, in_all, body).encode(self.chain)
        if self._at > PAGE_BYTES and self._at + len(raw) > MAX_SEGMENT_BYTES:
            self.begin_segment()
        self._allocate(self._at + len(raw))
        with _disk_space:
            if os.pwrite(self._file, raw, self._at) != len(raw):
                raise DiskFull
        self._at, self.chain = self._at + len(raw), after
        self.sequence += 1
        self._unsynced = True
        return self.sequence - 1

    def sync(self) -> None:
        """Let all that was written survive what it must.

        Raises:
            OSError: it does not, or an earlier sync failed: what that could not write may be gone, though this one would say that
                all is well.
        """
        if self._doubtful:
            raise OSError(errno.EIO, "an earlier sync failed")
        if self._unsynced and self._about.durability == "power":
            self._doubtful = True
            os.fdatasync(self._file)
            self._doubtful = False
        self._unsynced = False

    def require_in_place(self) -> None:
        """Raise `CorruptStateError` unless what was written stands where a restart of the learner would look for it."""
        self._held.require_in_place(self._allocated)

    def retire_segments(self, covers: int) -> None:
        """Put away all segments that a snapshot, up to this entry, stands in place of; delete other snapshots, and drafts."""
        segments = sorted(self.folder.glob("*.log"))
        for segment, after in pairwise(segments):  # oldest first, so that what is left hangs together
            if (_facts(read_if_exists(after, size=PAGE_BYTES), after) or {"sequence": 0})["sequence"] > covers + 1:
                break
            self._files.retire_segment(segment)
        for other in self.folder.glob("*.snapshot*"):
            if other.name != f"{covers:016d}.snapshot":
                other.unlink()

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)

    def begin_segment(self) -> None:
        """Go on in a new segment."""
        self.sync()
        old = self._file
        self._begin(self._segment + 1)
        os.close(old)

    def _begin(self, number: int) -> None:
        path = _path(self.folder, number)
        with _disk_space:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with _disk_space:
                os.posix_fallocate(file, 0, PAGE_BYTES + PREALLOCATED_BYTES)
                os.pwrite(file, _header(self._about, self.sequence, self.chain), 0)
            os.fsync(file)
            sync_folder(self.folder)
            held = FileGuard(path, file)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._file, self._at, self._allocated = file, PAGE_BYTES, PAGE_BYTES + PREALLOCATED_BYTES
        self._segment, self._held = number, held

    def _allocate(self, size: int) -> None:
        if size > self._allocated:
            wanted = size + PREALLOCATED_BYTES
            with _disk_space:
                os.posix_fallocate(self._file, self._allocated, wanted - self._allocated)
            if self._about.durability == "power":
                os.fsync(self._file)
            self._allocated = wanted

    def _wipe(self) -> None:
        """What a torn write left behind the last entry is cut off: nothing rested on it."""
        os.ftruncate(self._file, self._at)
        self._allocated = self._at
        with suppress(DiskFull):  # there will be room, or the next entry waits for it
            self._allocate(self._at + 1)
        for other in self.folder.glob("*.log"):
            if int(other.stem) > self._segment:
                other.unlink()


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def _header(about: LogHeader, sequence: int, chain: bytes) -> bytes:
    facts = {"about": asdict(about), "sequence": sequence, "chain": chain.hex()}
    text = json.dumps(facts, separators=(",", ":")).encode()
    head = _MAGIC + FORMAT.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
    return head + zlib.crc32(head).to_bytes(4, "little")


def _facts(raw: bytes, path: Path) -> dict[str, Any] | None:
    """What a segment's first page says; None where it cannot be read."""
    end = 16 + int.from_bytes(raw[12:16], "little")
    if not raw.startswith(_MAGIC) or zlib.crc32(raw[:end]).to_bytes(4, "little") != raw[end : end + 4]:
        return None
    require_format(path, int.from_bytes(raw[8:12], "little"))
    facts: dict[str, Any] = json.loads(raw[16:end])
    return facts
