"""Write-ahead log of one learner in one run: chained entries, in preallocated segments.

A segment is a page with the log's owner and the chain before its first entry, followed by entries. Nothing in a segment
is ever changed. Space is allocated ahead, all zero, so that a sync has no metadata to write. An entry is, little endian
and padded to 8 bytes,

    length u32 | kind u8 | 0 | sequence u64 | round u64 | epsilon f64 | total epsilon f64 | crc32 of body u32 | 0
    body
    chain 16

with `chain_k = SHA-256(chain_{k-1} | header of entry k)[:16]`. The header holds the body's checksum, so an entry is valid
only after exactly the entries that preceded it.
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
"""Bytes allocated at a time, and maximum size of a segment, unless one entry is longer."""
_HEADER = struct.Struct("<IB3xQQddI4x")
_RESERVATION = struct.Struct("<Qd")
_PAYLOAD_HEAD = struct.Struct("<QIIII")
_SNAPSHOT = struct.Struct("<Q16s32sQQd")
CHAIN_BYTES = 16
START_CHAIN = bytes(CHAIN_BYTES)
"""Chain before the first entry."""


# ---- entries ---------------------------------------------------------------------------------------------------------


class EntryKind(IntEnum):
    """Kind of an entry; the numbers are those on disk."""

    OPEN = 1
    RESERVATION = 2
    BATCH = 3
    ROUND = 4
    CLOSE = 5
    SNAPSHOT = 6


_KINDS = frozenset(EntryKind)


class LogEntry(NamedTuple):
    """Entry of the log.

    Attributes:
        kind: kind of the body.
        sequence: number of entries of the run before it.
        round: its round.
        epsilon_spent: epsilon of the run, with what this entry charges.
        total_epsilon_spent: epsilon of all runs of the learner, this one included.
        body: by its kind: `Reservation`, `RoundPayload`, `SnapshotPointer`, records, or the spec.
        chain: chain after it, where it was read.
        end_offset: offset of its end, where it was read.
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
        """Encode it after `chain`; return its bytes, and the chain after it."""
        kind, sequence, t, epsilon_spent, total_epsilon, body, *_ = self
        header = _HEADER.pack(len(body), kind, sequence, t, epsilon_spent, total_epsilon, zlib.crc32(body))
        after = extend_chain(chain, header)
        return b"".join((header, body, bytes(-len(body) % 8), after)), after


def read_entries(raw: bytes, at: int = 0, sequence: int = 0, chain: bytes = START_CHAIN) -> list[LogEntry]:
    """Parse entries from an offset on, up to the first invalid one: each must be next in number, complete, and after `chain`."""
    found: list[LogEntry] = []
    while (body_at := at + _HEADER.size) <= len(raw):
        length, kind, number, t, epsilon_spent, total_epsilon, checksum = _HEADER.unpack_from(raw, at)
        chain_at = body_at + length + -length % 8
        end = chain_at + CHAIN_BYTES
        if kind not in _KINDS or number != sequence or end > len(raw):
            break
        body, chain = raw[body_at : body_at + length], extend_chain(chain, raw[at:body_at])
        # Padding is zero, and covered by the chain or compared here: no bit may differ.
        if raw[chain_at:end] != chain or any(raw[body_at + length : chain_at]) or zlib.crc32(body) != checksum:
            break
        found.append(LogEntry(EntryKind(kind), number, t, epsilon_spent, total_epsilon, body, chain, end))
        at, sequence = end, sequence + 1
    return found


class Reservation(NamedTuple):
    """Rounds and epsilon reserved before they are used, until the next entry of this kind.

    Attributes:
        end_round: rounds below this one may be committed.
        max_epsilon: maximum epsilon of the run after their messages.
    """

    end_round: int
    max_epsilon: float

    def encode(self) -> bytes:
        """Encode it as an entry's body."""
        return _RESERVATION.pack(*self)

    @classmethod
    def decode(cls, body: bytes) -> Reservation:
        """Decode an entry's body."""
        return cls(*_RESERVATION.unpack(body))


NO_RESERVATION = Reservation(0, 0.0)


class SnapshotPointer(NamedTuple):
    """Reference to a file that replaces all entries up to one, and is deleted when the next such file exists.

    Attributes:
        last_sequence: sequence number of that entry.
        chain: chain after it.
        digest: SHA-256 of the file.
        size: size of the file, in bytes.
        reservation: last reservation up to there.
    """

    last_sequence: int
    chain: bytes
    digest: bytes
    size: int
    reservation: Reservation

    @property
    def file_name(self) -> str:
        """Name of the file, in the run's folder."""
        return f"{self.last_sequence:016d}.snapshot"

    def encode(self) -> bytes:
        """Encode it as an entry's body."""
        *facts, reserved = self
        return _SNAPSHOT.pack(*facts, *reserved)

    @classmethod
    def decode(cls, body: bytes) -> SnapshotPointer:
        """Decode an entry's body."""
        last_sequence, chain, digest, size, until, epsilon = _SNAPSHOT.unpack(body)
        return cls(last_sequence, chain, digest, size, Reservation(until, epsilon))


class RoundPayload(NamedTuple):  # created in every round: a frozen dataclass takes four times as long
    """Message of a round, and the inputs of the round before, from which it was formed.

    Attributes:
        frame: encoded message; empty in the closing entry, after the last round.
        received_frames: frames of the round before, as received.
        batch_count: number of stored batches when the round before took its records.
        records: records of the round before.
        hidden_noise: noise of the message, where the state keeps noise that no message reveals.
    """

    frame: bytes
    received_frames: tuple[bytes, ...] = ()
    batch_count: int = 0
    records: int = 0
    hidden_noise: bytes = b""

    def with_message(self, frame: bytes, hidden_noise: bytes = b"") -> RoundPayload:
        """Return the payload of the round that is formed from these inputs."""
        return RoundPayload(frame, self.received_frames, self.batch_count, self.records, hidden_noise)

    def encode(self) -> bytes:
        """Encode it as an entry's body."""
        length = len(self.received_frames[0]) if self.received_frames else len(self.frame)
        head = _PAYLOAD_HEAD.pack(
            self.batch_count, self.records, len(self.received_frames), length, len(self.hidden_noise)
        )
        return b"".join((head, *self.received_frames, self.hidden_noise, self.frame))

    @classmethod
    def decode(cls, body: bytes) -> RoundPayload:
        """Decode an entry's body."""
        batch_count, records, count, length, noise_bytes = _PAYLOAD_HEAD.unpack_from(body)
        ends = [_PAYLOAD_HEAD.size + k * length for k in range(count + 1)]
        received_frames, frame_at = tuple(body[a:b] for a, b in pairwise(ends)), ends[-1] + noise_bytes
        return cls(body[frame_at:], received_frames, batch_count, records, body[ends[-1] : frame_at])


# ---- contents of a log -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogHeader:
    """Owner of a log.

    Attributes:
        store_id: id of the learner's ledger, hexadecimal.
        learner: learner name.
        run_id: run id.
        durability: `process` survives a crash of the writer; `power` is on disk when `sync` returns.
    """

    store_id: str
    learner: str
    run_id: str
    durability: Durability


@dataclass(frozen=True, slots=True)
class LogContents:
    """Contents of a log.

    Attributes:
        header: header of its first segment; None: there is none.
        first_sequence: sequence number of its first entry; above 0 where a snapshot replaces earlier ones.
        base: chain before its first entry.
        entries: valid entries, oldest first.
        path: newest segment.
        end_offset: offset in it after the last valid entry.
    """

    header: LogHeader | None
    first_sequence: int
    base: bytes
    entries: tuple[LogEntry, ...]
    path: Path
    end_offset: int

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next entry."""
        return self.first_sequence + len(self.entries)

    @property
    def folder(self) -> Path:
        """Folder of the log."""
        return self.path.parent

    def get_chain(self, sequence: int) -> bytes | None:
        """Return the chain after an entry; None if it is not there."""
        at = sequence - self.first_sequence
        if at == -1:
            return self.base
        return self.entries[at].chain if 0 <= at < len(self.entries) else None

    @property
    def entries_after_snapshot(self) -> tuple[LogEntry, ...]:
        """Entries that no snapshot replaces."""
        return (
            self.entries
            if self.snapshot is None
            else self.entries[self.snapshot.last_sequence + 1 - self.first_sequence :]
        )

    def _find_newest(self, *kinds: EntryKind) -> LogEntry | None:
        return next((entry for entry in reversed(self.entries) if entry.kind in kinds), None)

    @property
    def snapshot(self) -> SnapshotPointer | None:
        """The newest snapshot; None: no entry is replaced."""
        newest = self._find_newest(EntryKind.SNAPSHOT)
        return None if newest is None else SnapshotPointer.decode(newest.body)

    @property
    def rounds_committed(self) -> int:
        """Number of rounds whose message is logged."""
        newest = self._find_newest(EntryKind.ROUND, EntryKind.SNAPSHOT)
        return 0 if newest is None else newest.round + 1

    @property
    def rounds_done(self) -> int:
        """Number of rounds that were committed and learned."""
        newest = self._find_newest(EntryKind.ROUND, EntryKind.SNAPSHOT, EntryKind.CLOSE)
        return 0 if newest is None else newest.round

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of the run."""
        return self.entries[-1].epsilon_spent if self.entries else 0.0

    @property
    def reservation(self) -> Reservation:
        """The last reservation."""
        if (newest := self._find_newest(EntryKind.RESERVATION)) is not None:
            return Reservation.decode(newest.body)
        return NO_RESERVATION if self.snapshot is None else self.snapshot.reservation


def read_log(*folders: Path, previous: LogContents | None = None) -> LogContents:
    """Read the valid part of a log, also while its learner writes: if it deletes segments, up to the first of them.

    Args:
        folders: folders of its segments; each segment is read from the first of them that has it.
        previous: result of an earlier read: only newer entries are read.

    Raises:
        CorruptStateError: a segment has a newer format.
    """
    before = previous or LogContents(None, 0, START_CHAIN, (), folders[-1] / "none", 0)
    header, path, end = before.header, before.path, before.end_offset
    first = due = before.next_sequence, before.entries[-1].chain if before.entries else before.base
    entries = list[LogEntry]()
    segments = {segment.name: segment for folder in reversed(folders) for segment in list_with_suffix(folder, ".log")}
    for name in sorted(segments):
        if header is not None and name < path.name:
            continue
        known = end if header is not None and name == path.name else 0
        raw = read_if_exists(segments[name], known)
        if not known:
            if (facts := _parse_first_page(raw, segments[name])) is None:
                break
            begin = facts["sequence"], bytes.fromhex(facts["chain"])
            if header is None:
                header, first, due = LogHeader(**facts["about"]), begin, begin
            if begin != due:
                break
        path, end = segments[name], known or PAGE_BYTES
        for entry in read_entries(raw, 0 if known else PAGE_BYTES, *due):
            entries.append(entry)
            end, due = known + entry.end_offset, (entry.sequence + 1, entry.chain)
    return LogContents(header, *first, tuple(entries), path, end)


# ---- writing ---------------------------------------------------------------------------------------------------------


class _DiskSpace:
    """Context manager that separates a full disk from other errors. Not for a sync: its unwritten data may be lost."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull from None


_disk_space = _DiskSpace()


class WriteAheadLog:
    """Log that is open for writing. Every system error is raised: an incomplete write does not count.

    Args:
        files: paths of the learner.
        header: owner of the log.
        contents: existing contents; None: a new log.
    """

    def __init__(self, files: LearnerPaths, header: LogHeader, contents: LogContents | None = None) -> None:
        self.folder, self._header, self._files = files.get_log_folder(header.run_id), header, files
        self.sequence, self.chain = 0, START_CHAIN
        self._unsynced, self._has_failed_sync = False, False
        if contents is None or contents.header is None:
            self._create_segment(0)
            return
        self.sequence, self._segment = contents.next_sequence, int(contents.path.stem)
        self.chain = contents.entries[-1].chain if contents.entries else contents.base
        self._file = os.open(contents.path, os.O_RDWR | os.O_CLOEXEC)
        self._offset = contents.end_offset
        try:
            self._guard = FileGuard(contents.path, self._file)
            self._cut_torn_write()
        except BaseException:
            self.close()
            raise

    def append(self, kind: EntryKind, t: int, epsilon_spent: float, total_epsilon: float, body: bytes) -> int:
        """Write an entry; return its sequence number. It is durable only after `sync`.

        Raises:
            DiskFull: there is no space for it.
        """
        raw, after = LogEntry(kind, self.sequence, t, epsilon_spent, total_epsilon, body).encode(self.chain)
        if self._offset > PAGE_BYTES and self._offset + len(raw) > MAX_SEGMENT_BYTES:
            self.begin_segment()
        self._allocate(self._offset + len(raw))
        with _disk_space:
            if os.pwrite(self._file, raw, self._offset) != len(raw):
                raise DiskFull
        self._offset, self.chain = self._offset + len(raw), after
        self.sequence += 1
        self._unsynced = True
        return self.sequence - 1

    def sync(self) -> None:
        """Make all written entries durable, as `durability` requires.

        Raises:
            OSError: that failed, or an earlier sync failed: its data may be lost, though this sync would report success.
        """
        if self._has_failed_sync:
            raise OSError(errno.EIO, "an earlier sync failed")
        if self._unsynced and self._header.durability == "power":
            self._has_failed_sync = True
            os.fdatasync(self._file)
            self._has_failed_sync = False
        self._unsynced = False

    def require_in_place(self) -> None:
        """Raise `CorruptStateError` unless the entries are where a restarted learner would read them."""
        self._guard.require_in_place(self._allocated)

    def retire_segments(self, last_sequence: int) -> None:
        """Retire all segments that a snapshot up to this entry replaces; delete other snapshots, and drafts."""
        segments = sorted(self.folder.glob("*.log"))
        for segment, after in pairwise(segments):  # oldest first, so that the rest is contiguous
            if (_parse_first_page(read_if_exists(after, size=PAGE_BYTES), after) or {"sequence": 0})[
                "sequence"
            ] > last_sequence + 1:
                break
            self._files.retire_segment(segment)
        for path in self.folder.glob("*.snapshot*"):
            if path.name != f"{last_sequence:016d}.snapshot":
                path.unlink()

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)

    def begin_segment(self) -> None:
        """Continue in a new segment."""
        self.sync()
        old = self._file
        self._create_segment(self._segment + 1)
        os.close(old)

    def _create_segment(self, number: int) -> None:
        path = _segment_path(self.folder, number)
        with _disk_space:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with _disk_space:
                os.posix_fallocate(file, 0, PAGE_BYTES + PREALLOCATED_BYTES)
                os.pwrite(file, _encode_header(self._header, self.sequence, self.chain), 0)
            os.fsync(file)
            sync_folder(self.folder)
            guard = FileGuard(path, file)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._file, self._offset, self._allocated = file, PAGE_BYTES, PAGE_BYTES + PREALLOCATED_BYTES
        self._segment, self._guard = number, guard

    def _allocate(self, size: int) -> None:
        if size > self._allocated:
            size_after = size + PREALLOCATED_BYTES
            with _disk_space:
                os.posix_fallocate(self._file, self._allocated, size_after - self._allocated)
            if self._header.durability == "power":
                os.fsync(self._file)
            self._allocated = size_after

    def _cut_torn_write(self) -> None:
        """Cut off a torn write after the last entry: nothing depends on it."""
        os.ftruncate(self._file, self._offset)
        self._allocated = self._offset
        with suppress(DiskFull):  # the next entry waits for space
            self._allocate(self._offset + 1)
        for path in self.folder.glob("*.log"):
            if int(path.stem) > self._segment:
                path.unlink()


def _segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.log"


def _encode_header(header: LogHeader, sequence: int, chain: bytes) -> bytes:
    facts = {"about": asdict(header), "sequence": sequence, "chain": chain.hex()}
    text = json.dumps(facts, separators=(",", ":")).encode()
    head = _MAGIC + FORMAT.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
    return head + zlib.crc32(head).to_bytes(4, "little")


def _parse_first_page(raw: bytes, path: Path) -> dict[str, Any] | None:
    """Parse the first page of a segment; None if it cannot be read."""
    end = 16 + int.from_bytes(raw[12:16], "little")
    if not raw.startswith(_MAGIC) or zlib.crc32(raw[:end]).to_bytes(4, "little") != raw[end : end + 4]:
        return None
    require_format(path, int.from_bytes(raw[8:12], "little"))
    facts: dict[str, Any] = json.loads(raw[16:end])
    return facts
