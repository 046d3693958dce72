"""The log of a run that is open for writing, the high-water mark beside it, and the snapshots that shorten it.

The mark says how far something visible rests on log and ledger: a log that was cut looks like one whose writer died, and the
mark says that it was longer. It has two slots, written in turn, after the entry and before what rests on it is seen: a torn
write spoils one slot, and the other stands for the write before. So it is a lower bound of what was written, never more.

Written first is what others rest on: an entry before the mark, and the mark before anything is seen. A death in between leaves
more than was seen, never less.
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
"""A snapshot takes the place of a log that has grown by so many bytes, or so many rounds: each is replayed after a death."""
_SNAPSHOT_BYTES_PER_ROUND = 2_048
"""Bytes of snapshots that a round may cost, where rounds make one due: small beside what replaying it costs."""


# ---- the high-water mark ---------------------------------------------------------------------------------------------


class HighWaterMark(NamedTuple):
    """What a learner's files must hold at least.

    Attributes:
        store: the ledger's own number.
        host: the machine since its start, as `state_folder.host` says.
        lines, lines_chain: of the ledger.
        elsewhere: epsilon of all runs that the ledger has closed.
        run: hash of the open run; `NO_RUN`: none.
        sequence, chain: of the run's last entry that something visible rests on.
        spent: epsilon of the run by then.
        reserved: the most that may have been said and spent in the run.
        turn: marks before this one.
        inode: of the file that it was written to.
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
        """The newest mark of a file; None where there is no whole one.

        Args:
            path: the file.
            copied: it may be a copy.

        Raises:
            CorruptStateError: it is of a newer format, or this file is a copy of the one that was written.
        """
        try:
            raw = path.read_bytes()
            inode = path.stat().st_ino
        except OSError:
            return None
        found = _newest(raw, path)
        if found is not None and found.inode != inode and not allow_copy:
            raise CorruptStateError(
                f"{path} was written at another place: this state folder is a copy, and two learners with one ledger would each "
                "spend the whole budget. Start the learner on the folder that it was in. Where this one is the newest and the "
                f"only one that is left, say so: `sottovoce ledger --adopt-copy --state {path.parent} --learner {path.stem}`"
            )
        return found

    def write(self, path: Path) -> None:
        """Make it in both slots of a file, and let it last."""
        with closing(HighWaterMarkFile(path)) as file:
            file.write_both_slots(self)


class HighWaterMarkFile:
    """The mark of one learner, open for writing.

    Args:
        path: the file; made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = _newest(os.pread(self._file, 2 * SLOT_BYTES, 0), path)
            self._inode = os.fstat(self._file).st_ino
            self._held = FileGuard(path, self._file)
        except BaseException:
            self.close()
            raise
        self._turn = 0 if found is None else found.write_count + 1

    def write(self, mark: HighWaterMark) -> None:
        """Make a mark, in the place of the one before the last.

        Raises:
            OSError: it could not be written.
        """
        os.pwrite(self._file, _encode(mark, self._turn, self._inode), self._turn % 2 * SLOT_BYTES)
        self._turn += 1

    def write_both_slots(self, mark: HighWaterMark, *, sync: bool = True) -> None:
        """Make a mark in both places, and let it last: no mark of before is left to fall back to."""
        self.write(mark)
        self.write(mark)
        if sync:
            os.fsync(self._file)

    def require_in_place(self) -> None:
        """Raise `CorruptStateError` unless the file is still there; once settled it has both slots."""
        self._held.require_in_place(SLOT_BYTES + 1)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)


def _encode(mark: HighWaterMark, turn: int, inode: int) -> bytes:
    *known, reserved, _, _ = mark
    raw = _SLOT.pack(_MAGIC, FORMAT, inode, turn, *known, *reserved)
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def _newest(raw: bytes, path: Path) -> HighWaterMark | None:
    slots = (_decode(raw[k * SLOT_BYTES : (k + 1) * SLOT_BYTES], path) for k in range(2))
    return max((mark for mark in slots if mark is not None), key=lambda mark: mark.write_count, default=None)


def _decode(raw: bytes, path: Path) -> HighWaterMark | None:
    if len(raw) < _SLOT.size + 4 or not raw.startswith(_MAGIC):
        return None
    if zlib.crc32(raw[: _SLOT.size]) != int.from_bytes(raw[_SLOT.size : _SLOT.size + 4], "little"):
        return None
    _, form, inode, turn, *known, until, reserved = _SLOT.unpack_from(raw)
    require_format(path, form)
    return HighWaterMark._make((*known, Reservation(until, reserved), turn, inode))


# ---- the log ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What a run's log is kept by.

    Attributes:
        durability: what a journaled message survives.
        message_size: length of every message.
        window: rounds reserved at a time.
        rounds: of the run.
        budget: epsilon that is never exceeded in the run; None: there is no limit.
    """

    durability: Durability
    message_size: int
    window: int
    rounds: int
    budget: float | None


class RunLog:
    """The log of the open run, and the mark beside it.

    Args:
        log: the log.
        mark_file: where the mark is made.
        mark: the newest.
        elsewhere: epsilon of all other runs.
        terms: what it is kept by.
        reading: what it holds from before; None: nothing.
        ledger: the file of the ledger, which has the run's line.
    """

    def __init__(
        self,
        log: WriteAheadLog,
        mark_file: HighWaterMarkFile,
        mark: HighWaterMark,
        elsewhere: float,
        terms: LogOptions,
        reading: LogContents | None,
        ledger: FileGuard,
    ) -> None:
        self._log, self._mark_file, self._mark, self._ledger = log, mark_file, mark, ledger
        self._elsewhere, self._terms, self.recovered_contents = elsewhere, terms, reading
        self.epsilon_spent = mark.epsilon_spent
        """Epsilon of the run, charged."""
        self._open = True
        self._grown = self._last_size = self._rounds = self._since = 0
        if reading is not None:
            self._rounds = reading.rounds_committed
            covered = reading.snapshot
            self._last_size = 0 if covered is None else covered.size
            self._grown = sum(len(entry.body) for entry in reading.entries)
            self._since = sum(entry.kind is EntryKind.ROUND for entry in reading.entries)

    def write_ahead(self, t: int, spent: float, said: RoundPayload) -> None:
        """Make a round's message and inputs last. Only after this may it be sent.

        Raises:
            LocalProtocolError: a message of another length: lengths must not depend on the data.
            OSError: it could not be written whole. It does not count, and must not be sent.
        """
        if len(said.frame) != self._terms.message_size:
            raise LocalProtocolError(
                f"a message must have {self._terms.message_size} bytes in every round, got {len(said.frame)}"
            )
        if t >= self._mark.reservation.end_round or not spent <= self._mark.reservation.max_epsilon:
            self._reserve(t, spent)
        self._append(EntryKind.ROUND, t, spent, said.encode())
        self._rounds, self._since = t + 1, self._since + 1
        self.epsilon_spent = spent
        self.make_durable()

    def close_rounds(self, rounds: int, said: RoundPayload) -> None:
        """Make the inputs of the last round last: the run is over, or the learner away from now on.

        Raises:
            OSError: they could not be written whole.
        """
        self._append(EntryKind.CLOSE, rounds, self.epsilon_spent, said.encode())
        self.make_durable()

    @property
    def is_snapshot_due(self) -> bool:
        """Has it grown so much that a snapshot should take its place?

        By bytes, snapshots write at most half of what the log does, and replay reads at most twice a snapshot. By rounds,
        they write `_SNAPSHOT_BYTES_PER_ROUND` bytes a round, and replay takes in a round for as many of a snapshot's, or `SNAPSHOT_AFTER_ROUNDS`.
        """
        by_bytes = self._grown > max(SNAPSHOT_AFTER_BYTES, 2 * self._last_size)
        return by_bytes or self._since > max(SNAPSHOT_AFTER_ROUNDS, self._last_size // _SNAPSHOT_BYTES_PER_ROUND)

    def begin_segment(self) -> SnapshotPointer:
        """Begin a segment; what stands before it may be replaced by a snapshot, whose file is not written yet.

        Raises:
            OSError: the segment could not be begun.
        """
        self._log.begin_segment()
        self._grown = self._since = 0
        return SnapshotPointer(self._log.sequence - 1, self._log.chain, b"", 0, self._mark.reservation)

    def write_snapshot(self, place: SnapshotPointer, raw: bytes) -> SnapshotPointer:
        """A snapshot's file, whole or not at all; in any thread.

        Raises:
            OSError: it could not be written.
        """
        replace_file(self._log.folder / place.file_name, raw)
        return place._replace(digest=hashlib.sha256(raw).digest(), size=len(raw))

    def commit_snapshot(self, snapshot: SnapshotPointer) -> None:
        """A snapshot is written: what it stands in place of is deleted.

        Raises:
            OSError: that failed.
        """
        if not self._open:
            return
        self._append(EntryKind.SNAPSHOT, self._rounds - 1, self.epsilon_spent, snapshot.encode())
        self._log.sync()
        self._last_size = snapshot.size
        self.make_durable()
        self._log.retire_segments(snapshot.last_sequence)

    def append_records(self, first_round: int, batch: bytes) -> None:
        """Write records down. Only after `settle` are they in keeping.

        Raises:
            Unavailable: the log is closed: the learner is ending, or done with the run.
            OSError: they could not be written whole, and do not count.
        """
        if not self._open:
            raise Unavailable("this learner takes no more records in: it is ending, or done with the run")
        self._append(EntryKind.BATCH, first_round, self.epsilon_spent, batch)

    @property
    def is_durable(self) -> bool:
        """True when all that was written lasts."""
        return self._log.sequence == self._mark.sequence + 1

    def make_durable(self) -> None:
        """Let all that was written last; then it may be seen.

        Raises:
            OSError: that failed, or it is closed.
            CorruptStateError: a file was deleted, moved, replaced or cut: what is written can be found by nobody.
        """
        if self.is_durable:
            return
        if not self._open:
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
        if self._open:
            self._open = False
            self._log.close()
            self._mark_file.close()

    def _reserve(self, t: int, spent: float) -> None:
        """Note what the rounds to come may cost, before any of them is said: who loses the log is charged that."""
        more = spent - self.epsilon_spent if math.isfinite(spent) else 0.0
        most = spent + (self._terms.window - 1) * more
        if self._terms.budget is not None:
            most = max(min(most, self._terms.budget), spent)
        grant = Reservation(min(t + self._terms.window, self._terms.rounds), most)
        self._append(EntryKind.RESERVATION, t, self.epsilon_spent, grant.encode())
        self._log.sync()
        self._mark = self._mark._replace(reservation=grant, sequence=self._log.sequence - 1, chain=self._log.chain)
        self._mark_file.write_both_slots(self._mark, sync=self._terms.durability == "power")

    def _append(self, kind: EntryKind, t: int, spent: float, body: bytes) -> None:
        self._log.append(kind, t, spent, self._elsewhere + spent, body)
        self._grown += len(body)


class SnapshotWriter:
    """Takes a learner's snapshots, while its rounds go on.

    Args:
        learner: its name.
        run_log: the log that they shorten.
        names: as for `pack`.
    """

    def __init__(self, learner: str, run_log: RunLog, names: Mapping[str, object]) -> None:
        self._learner, self._log, self._names = learner, run_log, names
        self._begun: tuple[LearnerSnapshot, SnapshotPointer] | None = None
        self._wanted, self._possible = asyncio.Event(), True

    @property
    def is_due(self) -> bool:
        """Should one be taken?"""
        return self._possible and self._begun is None and self._log.is_snapshot_due

    def begin(self, image: LearnerSnapshot) -> None:
        """Hold on to what the learner is, right after a round was said: its values never change, so it may go on at once."""
        try:
            self._begun = image, self._log.begin_segment()
        except OSError as error:
            log.warning("no snapshot", learner=self._learner, reason=error.strerror)
            return
        self._wanted.set()

    async def run(self) -> None:
        """Finish those that were begun, for ever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.finish()

    async def finish(self) -> None:
        """Write what is held on to, then let the log forget what was before. Where that fails, the log stays longer."""
        if self._begun is None:
            return
        try:
            self._log.commit_snapshot(await asyncio.to_thread(self._write, *self._begun))
        except UnpackableError as error:
            self._possible = False
            log.warning("no snapshots: the log stays whole", learner=self._learner, reason=str(error))
        except OSError as error:
            log.warning("no snapshot", learner=self._learner, reason=error.strerror)
        except Exception as error:  # noqa: BLE001 - of a state of somebody's own, or for want of memory: no reason to end the run
            self._possible = False
            log.error("no snapshots: the log stays whole", learner=self._learner, **describe_failure(error))
        finally:
            self._begun = None

    def _write(self, image: LearnerSnapshot, place: SnapshotPointer) -> SnapshotPointer:
        """In a thread: bytes of which the same image can be made. What they stand in place of is then deleted.

        Raises:
            Unpackable: it cannot.
            OSError: they could not be written.
        """
        raw = pack(image, self._names)
        try:
            same = is_packed_as(raw, unpack(raw, self._names), self._names)
        except CorruptStateError as error:
            raise UnpackableError(str(error)) from None
        if not same:
            raise UnpackableError("a state must be what its fields say, and this one comes back as another")
        return self._log.write_snapshot(place, raw)
