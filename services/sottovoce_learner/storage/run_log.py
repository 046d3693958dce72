"""Log of the open run, its high-water mark, and the snapshots that shorten it.

The mark holds how far visible effects depend on log and ledger: a cut log looks like one whose writer crashed, and the
mark shows that it was longer. It has two slots, written in turn, after the entry and before its effects are visible: a
torn write damages one slot, and the other holds the previous write. So it is a lower bound of what was written.

Dependencies are written first: an entry before the mark, and the mark before any visible effect. A crash in between
leaves more than was visible, never less.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog

from sottovoce_core.errors import CorruptStateError, LocalProtocolError, Unavailable
from sottovoce_learner.storage.snapshot import LearnerSnapshot, UnpackableError, is_packed_as, pack, unpack
from sottovoce_learner.storage.state_folder import FORMAT, FileGuard, replace_file, require_format
from sottovoce_learner.storage.wal import (
    NO_RESERVATION,
    Durability,
    EntryKind,
    LogContents,
    Reservation,
    RoundPayload,
    SnapshotPointer,
    WriteAheadLog,
)
from sottovoce_rpc.logs import describe_failure

log = structlog.get_logger()

_SLOT = struct.Struct("<8sI4xQQ16s16sQ16sd16sQ16sdQd")
_MAGIC = b"sotto.m\0"
SLOT_BYTES = 512
NO_RUN = bytes(16)
SNAPSHOT_AFTER_BYTES = 4 * 1024 * 1024
SNAPSHOT_AFTER_ROUNDS = 1_000
"""Growth of a log, in bytes or rounds, after which a snapshot replaces it: entries are replayed after a crash."""
_SNAPSHOT_BYTES_PER_ROUND = 2_048
"""Maximum bytes of snapshots per round, where the rounds make one due: small compared with the cost of a replay."""


# ---- the high-water mark ---------------------------------------------------------------------------------------------


class HighWaterMark(NamedTuple):
    """Lower bound of the content of a learner's files.

    Attributes:
        store_id: id of the ledger.
        boot_id_hash: hash of the machine's boot, as of `state_folder.hash_boot_id`.
        line_count, lines_chain: lines of the ledger.
        closed_runs_epsilon: epsilon of all runs that the ledger has closed.
        run_hash: hash of the open run; `NO_RUN`: none.
        sequence, chain: the run's last entry with a visible effect.
        epsilon_spent: epsilon of the run by then.
        reservation: maximum that may have been committed and spent in the run.
        write_count: number of marks before this one.
        inode: inode of the file that it was written to.
    """

    store_id: bytes
    boot_id_hash: bytes
    line_count: int
    lines_chain: bytes
    closed_runs_epsilon: float = 0.0
    run_hash: bytes = NO_RUN
    sequence: int = 0
    chain: bytes = bytes(16)
    epsilon_spent: float = 0.0
    reservation: Reservation = NO_RESERVATION
    write_count: int = 0
    inode: int = 0

    @classmethod
    def read(cls, path: Path, *, allow_copy: bool = False) -> HighWaterMark | None:
        """Read the newest mark of a file; None if there is no valid one.

        Args:
            path: path of the file.
            allow_copy: whether it may be a copy.

        Raises:
            CorruptStateError: it has a newer format, or this file is a copy of the one that was written.
        """
        try:
            raw = path.read_bytes()
            inode = path.stat().st_ino
        except OSError:
            return None
        found = _find_newest_mark(raw, path)
        if found is not None and found.inode != inode and not allow_copy:
            raise CorruptStateError(
                f"{path} was written elsewhere: this state folder is a copy, and two learners with one ledger would each "
                "spend the full budget. Start the learner on the original folder. If this one is the newest and the only "
                f"one left, accept it: `sottovoce ledger --adopt-copy --state {path.parent} --learner {path.stem}`"
            )
        return found

    def write(self, path: Path) -> None:
        """Write it durably to both slots of a file."""
        with closing(HighWaterMarkFile(path)) as file:
            file.write_both_slots(self)


class HighWaterMarkFile:
    """Mark of one learner, open for writing.

    Args:
        path: path of the file, created if missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = _find_newest_mark(os.pread(self._file, 2 * SLOT_BYTES, 0), path)
            self._inode = os.fstat(self._file).st_ino
            self._guard = FileGuard(path, self._file)
        except BaseException:
            self.close()
            raise
        self._write_count = 0 if found is None else found.write_count + 1

    def write(self, mark: HighWaterMark) -> None:
        """Write a mark to the slot of the one before the last.

        Raises:
            OSError: it could not be written.
        """
        os.pwrite(self._file, _encode_mark(mark, self._write_count, self._inode), self._write_count % 2 * SLOT_BYTES)
        self._write_count += 1

    def write_both_slots(self, mark: HighWaterMark, *, sync: bool = True) -> None:
        """Write a mark durably to both slots: no earlier mark remains."""
        self.write(mark)
        self.write(mark)
        if sync:
            os.fsync(self._file)

    def require_in_place(self) -> None:
        """Raise `CorruptStateError` unless the file is still there; a durable one has both slots."""
        self._guard.require_in_place(SLOT_BYTES + 1)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)


def _encode_mark(mark: HighWaterMark, turn: int, inode: int) -> bytes:
    *known, reserved, _, _ = mark
    raw = _SLOT.pack(_MAGIC, FORMAT, inode, turn, *known, *reserved)
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def _find_newest_mark(raw: bytes, path: Path) -> HighWaterMark | None:
    slots = (_decode_mark(raw[k * SLOT_BYTES : (k + 1) * SLOT_BYTES], path) for k in range(2))
    return max((mark for mark in slots if mark is not None), key=lambda mark: mark.write_count, default=None)


def _decode_mark(raw: bytes, path: Path) -> HighWaterMark | None:
    if len(raw) < _SLOT.size + 4 or not raw.startswith(_MAGIC):
        return None
    if zlib.crc32(raw[: _SLOT.size]) != int.from_bytes(raw[_SLOT.size : _SLOT.size + 4], "little"):
        return None
    _, format_version, inode, turn, *known, end_round, reserved = _SLOT.unpack_from(raw)
    require_format(path, format_version)
    return HighWaterMark._make((*known, Reservation(end_round, reserved), turn, inode))


# ---- the log ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of a run's log.

    Attributes:
        durability: failures that a logged message survives.
        message_size: size of every message.
        window: rounds reserved at a time.
        rounds: rounds of the run.
        budget: maximum epsilon of the run; None: no limit.
    """

    durability: Durability
    message_size: int
    window: int
    rounds: int
    budget: float | None


class RunLog:
    """Log of the open run, with its mark.

    Args:
        log: write-ahead log.
        mark_file: file of the mark.
        mark: newest mark.
        other_runs_epsilon: epsilon of all other runs.
        options: options of the log.
        contents: earlier contents of the log; None: none.
        ledger: guard of the ledger file, which has the run's line.
    """

    def __init__(
        self,
        log: WriteAheadLog,
        mark_file: HighWaterMarkFile,
        mark: HighWaterMark,
        other_runs_epsilon: float,
        options: LogOptions,
        contents: LogContents | None,
        ledger: FileGuard,
    ) -> None:
        self._log, self._mark_file, self._mark, self._ledger = log, mark_file, mark, ledger
        self._other_runs_epsilon, self._options, self.recovered_contents = other_runs_epsilon, options, contents
        self.epsilon_spent = mark.epsilon_spent
        """Charged epsilon of the run."""
        self._is_open = True
        self._bytes_since_snapshot = self._last_snapshot_bytes = self._rounds = self._rounds_since_snapshot = 0
        if contents is not None:
            self._rounds = contents.rounds_committed
            snapshot = contents.snapshot
            self._last_snapshot_bytes = 0 if snapshot is None else snapshot.size
            self._bytes_since_snapshot = sum(len(entry.body) for entry in contents.entries)
            self._rounds_since_snapshot = sum(entry.kind is EntryKind.ROUND for entry in contents.entries)

    def write_ahead(self, t: int, spent: float, payload: RoundPayload) -> None:
        """Make a round's message and inputs durable. Only after this may it be sent.

        Raises:
            LocalProtocolError: a message of another size: sizes must not depend on the data.
            OSError: it could not be written in full. It does not count, and must not be sent.
        """
        if len(payload.frame) != self._options.message_size:
            raise LocalProtocolError(
                f"a message must have {self._options.message_size} bytes in every round, got {len(payload.frame)}"
            )
        if t >= self._mark.reservation.end_round or not spent <= self._mark.reservation.max_epsilon:
            self._reserve(t, spent)
        self._append(EntryKind.ROUND, t, spent, payload.encode())
        self._rounds, self._rounds_since_snapshot = t + 1, self._rounds_since_snapshot + 1
        self.epsilon_spent = spent
        self.make_durable()

    def close_rounds(self, rounds: int, payload: RoundPayload) -> None:
        """Make the inputs of the last round durable: the run is over, or the learner offline from now on.

        Raises:
            OSError: they could not be written in full.
        """
        self._append(EntryKind.CLOSE, rounds, self.epsilon_spent, payload.encode())
        self.make_durable()

    @property
    def is_snapshot_due(self) -> bool:
        """Return whether the log has grown enough to be replaced by a snapshot.

        By bytes, snapshots write at most half of what the log does, and replay reads at most twice a snapshot. By rounds,
        they write `_SNAPSHOT_BYTES_PER_ROUND` bytes a round, and replay covers one round for as many bytes of a snapshot,
        or `SNAPSHOT_AFTER_ROUNDS`.
        """
        is_due_by_bytes = self._bytes_since_snapshot > max(SNAPSHOT_AFTER_BYTES, 2 * self._last_snapshot_bytes)
        return is_due_by_bytes or self._rounds_since_snapshot > max(
            SNAPSHOT_AFTER_ROUNDS, self._last_snapshot_bytes // _SNAPSHOT_BYTES_PER_ROUND
        )

    def begin_segment(self) -> SnapshotPointer:
        """Begin a segment; a snapshot, whose file is not written yet, may replace what precedes it.

        Raises:
            OSError: the segment could not be begun.
        """
        self._log.begin_segment()
        self._bytes_since_snapshot = self._rounds_since_snapshot = 0
        return SnapshotPointer(self._log.sequence - 1, self._log.chain, b"", 0, self._mark.reservation)

    def write_snapshot(self, pointer: SnapshotPointer, raw: bytes) -> SnapshotPointer:
        """Write a snapshot's file atomically; callable from any thread.

        Raises:
            OSError: it could not be written.
        """
        replace_file(self._log.folder / pointer.file_name, raw)
        return pointer._replace(digest=hashlib.sha256(raw).digest(), size=len(raw))

    def commit_snapshot(self, snapshot: SnapshotPointer) -> None:
        """Delete the entries that a written snapshot replaces.

        Raises:
            OSError: that failed.
        """
        if not self._is_open:
            return
        self._append(EntryKind.SNAPSHOT, self._rounds - 1, self.epsilon_spent, snapshot.encode())
        self._log.sync()
        self._last_snapshot_bytes = snapshot.size
        self.make_durable()
        self._log.retire_segments(snapshot.last_sequence)

    def append_records(self, first_round: int, batch: bytes) -> None:
        """Write records to the log. They are stored only after `make_durable`.

        Raises:
            Unavailable: the log is closed: the learner is ending, or done with the run.
            OSError: they could not be written in full, and do not count.
        """
        if not self._is_open:
            raise Unavailable("this learner takes no more records: it is ending, or done with the run")
        self._append(EntryKind.BATCH, first_round, self.epsilon_spent, batch)

    @property
    def is_durable(self) -> bool:
        """Return whether all written entries are durable."""
        return self._log.sequence == self._mark.sequence + 1

    def make_durable(self) -> None:
        """Make all written entries durable; then their effects may be visible.

        Raises:
            OSError: that failed, or the log is closed.
            CorruptStateError: a file was deleted, moved, replaced or cut: the entries could not be found again.
        """
        if self.is_durable:
            return
        if not self._is_open:
            raise OSError(errno.EBADF, "the log is closed")
        self._log.sync()
        for each in (self._log, self._mark_file, self._ledger):
            each.require_in_place()
        self._mark = self._mark._replace(
            sequence=self._log.sequence - 1, chain=self._log.chain, epsilon_spent=self.epsilon_spent
        )
        self._mark_file.write(self._mark)

    def close(self) -> None:
        """Close the files; they stay on disk."""
        if self._is_open:
            self._is_open = False
            self._log.close()
            self._mark_file.close()

    def _reserve(self, t: int, spent: float) -> None:
        """Log what the next rounds may cost, before any of them is sent: after the loss of the log, that is charged."""
        round_epsilon = spent - self.epsilon_spent if math.isfinite(spent) else 0.0
        max_epsilon = spent + (self._options.window - 1) * round_epsilon
        if self._options.budget is not None:
            max_epsilon = max(min(max_epsilon, self._options.budget), spent)
        reservation = Reservation(min(t + self._options.window, self._options.rounds), max_epsilon)
        self._append(EntryKind.RESERVATION, t, self.epsilon_spent, reservation.encode())
        self._log.sync()
        self._mark = self._mark._replace(
            reservation=reservation, sequence=self._log.sequence - 1, chain=self._log.chain
        )
        self._mark_file.write_both_slots(self._mark, sync=self._options.durability == "power")

    def _append(self, kind: EntryKind, t: int, spent: float, body: bytes) -> None:
        self._log.append(kind, t, spent, self._other_runs_epsilon + spent, body)
        self._bytes_since_snapshot += len(body)


class SnapshotWriter:
    """Writer of a learner's snapshots, concurrent with its rounds.

    Args:
        learner: learner name.
        run_log: log that they shorten.
        names: as for `pack`.
    """

    def __init__(self, learner: str, run_log: RunLog, names: Mapping[str, object]) -> None:
        self._learner, self._log, self._names = learner, run_log, names
        self._pending: tuple[LearnerSnapshot, SnapshotPointer] | None = None
        self._finish_event, self._is_possible = asyncio.Event(), True

    @property
    def is_due(self) -> bool:
        """Return whether a snapshot should be taken."""
        return self._is_possible and self._pending is None and self._log.is_snapshot_due

    def begin(self, image: LearnerSnapshot) -> None:
        """Keep a snapshot taken directly after a commit: its values never change, so the learner may go on at once."""
        try:
            self._pending = image, self._log.begin_segment()
        except OSError as error:
            log.warning("no snapshot", learner=self._learner, reason=error.strerror)
            return
        self._finish_event.set()

    async def run(self) -> None:
        """Finish started snapshots, forever."""
        while True:
            await self._finish_event.wait()
            self._finish_event.clear()
            await self.finish()

    async def finish(self) -> None:
        """Write the kept snapshot, then shorten the log. If that fails, the log stays longer."""
        if self._pending is None:
            return
        try:
            self._log.commit_snapshot(await asyncio.to_thread(self._write, *self._pending))
        except UnpackableError as error:
            self._is_possible = False
            log.warning("no snapshots: the log is kept in full", learner=self._learner, reason=str(error))
        except OSError as error:
            log.warning("no snapshot", learner=self._learner, reason=error.strerror)
        except Exception as error:  # noqa: BLE001 - a user's state, or too little memory, must not end the run
            self._is_possible = False
            log.error("no snapshots: the log is kept in full", learner=self._learner, **describe_failure(error))
        finally:
            self._pending = None

    def _write(self, image: LearnerSnapshot, pointer: SnapshotPointer) -> SnapshotPointer:
        """Write, in a thread, bytes that restore to an equal snapshot. Only then the replaced entries are deleted.

        Raises:
            UnpackableError: they do not.
            OSError: they could not be written.
        """
        raw = pack(image, self._names)
        try:
            is_restored_equal = is_packed_as(raw, unpack(raw, self._names), self._names)
        except CorruptStateError as error:
            raise UnpackableError(str(error)) from None
        if not is_restored_equal:
            raise UnpackableError("a state must be restored equal from its fields, got another value")
        return self._log.write_snapshot(pointer, raw)
