"""A learner's files in its state folder, open for writing: what is read from them is in `verify.py`.

Written first is what others rest on: a line of the ledger before the log that it announces, an entry before the mark, and the
mark before anything is seen. A death in between leaves more than was seen, never less.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import structlog

from sottovoce_core.errors import DataError, LocalProtocolError, NotReady, SpecError, Unavailable
from sottovoce_core.running.participation import require_amendment
from sottovoce_learner.storage.ledger import (
    CLOSED,
    NO_RUN,
    OPENED,
    REPAIRED,
    Facts,
    LedgerLine,
    Mark,
    MarkFile,
    append_line,
    first_line,
    read_lines,
    require_readable,
    write_mark,
)
from sottovoce_learner.storage.snapshot import Image, Unpackable, pack, packs_as, unpack
from sottovoce_learner.storage.state_folder import Files, Held, hashed, host, replace_file, sync_folder
from sottovoce_learner.storage.verify import Standing, stand
from sottovoce_learner.storage.wal import About, Durability, Grant, Kind, Log, Reading, Said, Snapshot, put_away
from sottovoce_rpc.logs import failure

log = structlog.get_logger()

SNAPSHOT_AFTER = 4 * 1024 * 1024
SNAPSHOT_ROUNDS = 1_000
"""A snapshot takes the place of a log that has grown by so many bytes, or so many rounds: each is replayed after a death."""
_A_ROUND = 2_048
"""Bytes of snapshots that a round may cost, where rounds make one due: small beside what replaying it costs."""


@dataclass(frozen=True, slots=True)
class Terms:
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
        log: Log,
        mark_file: MarkFile,
        mark: Mark,
        elsewhere: float,
        terms: Terms,
        reading: Reading | None,
        ledger: Held,
    ) -> None:
        self._log, self._mark_file, self._mark, self._ledger = log, mark_file, mark, ledger
        self._elsewhere, self._terms, self.reading = elsewhere, terms, reading
        self.spent = mark.spent
        """Epsilon of the run, charged."""
        self._open = True
        self._grown = self._last_size = self._rounds = self._since = 0
        if reading is not None:
            self._rounds = reading.said
            covered = reading.snapshot
            self._last_size = 0 if covered is None else covered.size
            self._grown = sum(len(entry.body) for entry in reading.entries)
            self._since = sum(entry.kind is Kind.ROUND for entry in reading.entries)

    def write_ahead(self, t: int, spent: float, said: Said) -> None:
        """Make a round's message and inputs last. Only after this may it be sent.

        Raises:
            LocalProtocolError: a message of another length: lengths must not depend on the data.
            OSError: it could not be written whole. It does not count, and must not be sent.
        """
        if len(said.frame) != self._terms.message_size:
            raise LocalProtocolError(
                f"a message must have {self._terms.message_size} bytes in every round, got {len(said.frame)}"
            )
        if t >= self._mark.reserved.until or not spent <= self._mark.reserved.epsilon:
            self._reserve(t, spent)
        self._append(Kind.ROUND, t, spent, said.encode())
        self._rounds, self._since = t + 1, self._since + 1
        self.spent = spent
        self.settle()

    def close_rounds(self, rounds: int, said: Said) -> None:
        """Make the inputs of the last round last: the run is over, or the learner away from now on.

        Raises:
            OSError: they could not be written whole.
        """
        self._append(Kind.CLOSE, rounds, self.spent, said.encode())
        self.settle()

    @property
    def due(self) -> bool:
        """Has it grown so much that a snapshot should take its place?

        By bytes, snapshots write at most half of what the log does, and replay reads at most twice a snapshot. By rounds,
        they write `_A_ROUND` bytes a round, and replay takes in a round for as many of a snapshot's, or `SNAPSHOT_ROUNDS`.
        """
        by_bytes = self._grown > max(SNAPSHOT_AFTER, 2 * self._last_size)
        return by_bytes or self._since > max(SNAPSHOT_ROUNDS, self._last_size // _A_ROUND)

    def turn(self) -> Snapshot:
        """Begin a segment; what stands before it may be replaced by a snapshot, whose file is not written yet.

        Raises:
            OSError: the segment could not be begun.
        """
        self._log.turn()
        self._grown = self._since = 0
        return Snapshot(self._log.sequence - 1, self._log.chain, b"", 0, self._mark.reserved)

    def write_snapshot(self, place: Snapshot, raw: bytes) -> Snapshot:
        """A snapshot's file, whole or not at all; in any thread.

        Raises:
            OSError: it could not be written.
        """
        replace_file(self._log.folder / place.name, raw)
        return place._replace(digest=hashlib.sha256(raw).digest(), size=len(raw))

    def covered(self, snapshot: Snapshot) -> None:
        """A snapshot is written: what it stands in place of is deleted.

        Raises:
            OSError: that failed.
        """
        if not self._open:
            return
        self._append(Kind.SNAPSHOT, self._rounds - 1, self.spent, snapshot.encode())
        self._log.sync()
        self._last_size = snapshot.size
        self.settle()
        self._log.forget(snapshot.covers)

    def keep(self, first_round: int, batch: bytes) -> None:
        """Write records down. Only after `settle` are they in keeping.

        Raises:
            Unavailable: the log is closed: the learner is ending, or done with the run.
            OSError: they could not be written whole, and do not count.
        """
        if not self._open:
            raise Unavailable("this learner takes no more records in: it is ending, or done with the run")
        self._append(Kind.BATCH, first_round, self.spent, batch)

    @property
    def settled(self) -> bool:
        """True when all that was written lasts."""
        return self._log.sequence == self._mark.sequence + 1

    def settle(self) -> None:
        """Let all that was written last; then it may be seen.

        Raises:
            OSError: that failed, or it is closed.
            DataError: a file was deleted, moved, replaced or cut: what is written can be found by nobody.
        """
        if self.settled:
            return
        if not self._open:
            raise OSError(errno.EBADF, "the log is closed")
        self._log.sync()
        for each in (self._log, self._mark_file, self._ledger):
            each.require_in_place()
        self._mark = self._mark._replace(sequence=self._log.sequence - 1, chain=self._log.chain, spent=self.spent)
        self._mark_file.write(self._mark)

    def close(self) -> None:
        """Close the files; they stay on disk."""
        if self._open:
            self._open = False
            self._log.close()
            self._mark_file.close()

    def _reserve(self, t: int, spent: float) -> None:
        """Note what the rounds to come may cost, before any of them is said: who loses the log is charged that."""
        more = spent - self.spent if math.isfinite(spent) else 0.0
        most = spent + (self._terms.window - 1) * more
        if self._terms.budget is not None:
            most = max(min(most, self._terms.budget), spent)
        grant = Grant(min(t + self._terms.window, self._terms.rounds), most)
        self._append(Kind.GRANT, t, self.spent, grant.encode())
        self._log.sync()
        self._mark = self._mark._replace(reserved=grant, sequence=self._log.sequence - 1, chain=self._log.chain)
        self._mark_file.settle(self._mark, sync=self._terms.durability == "power")

    def _append(self, kind: Kind, t: int, spent: float, body: bytes) -> None:
        self._log.append(kind, t, spent, self._elsewhere + spent, body)
        self._grown += len(body)


class Snapshots:
    """Takes a learner's snapshots, while its rounds go on.

    Args:
        learner: its name.
        run_log: the log that they shorten.
        names: as for `pack`.
    """

    def __init__(self, learner: str, run_log: RunLog, names: Mapping[str, object]) -> None:
        self._learner, self._log, self._names = learner, run_log, names
        self._begun: tuple[Image, Snapshot] | None = None
        self._wanted, self._possible = asyncio.Event(), True

    @property
    def due(self) -> bool:
        """Should one be taken?"""
        return self._possible and self._begun is None and self._log.due

    def begin(self, image: Image) -> None:
        """Hold on to what the learner is, right after a round was said: its values never change, so it may go on at once."""
        try:
            self._begun = image, self._log.turn()
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
            self._log.covered(await asyncio.to_thread(self._write, *self._begun))
        except Unpackable as error:
            self._possible = False
            log.warning("no snapshots: the log stays whole", learner=self._learner, reason=str(error))
        except OSError as error:
            log.warning("no snapshot", learner=self._learner, reason=error.strerror)
        except Exception as error:  # noqa: BLE001 - of a state of somebody's own, or for want of memory: no reason to end the run
            self._possible = False
            log.error("no snapshots: the log stays whole", learner=self._learner, **failure(error))
        finally:
            self._begun = None

    def _write(self, image: Image, place: Snapshot) -> Snapshot:
        """In a thread: bytes of which the same image can be made. What they stand in place of is then deleted.

        Raises:
            Unpackable: it cannot.
            OSError: they could not be written.
        """
        raw = pack(image, self._names)
        try:
            same = packs_as(raw, unpack(raw, self._names), self._names)
        except DataError as error:
            raise Unpackable(str(error)) from None
        if not same:
            raise Unpackable("a state must be what its fields say, and this one comes back as another")
        return self._log.write_snapshot(place, raw)


class Store:
    """The state of one learner. Only who has the claim on it may open it.

    Args:
        folder: the state folder.
        learner: its name.
        keep_log: whether logs of runs are kept when they are over.

    Raises:
        DataError: something was lost, cut, changed, or is another learner's.
    """

    def __init__(self, folder: Path, learner: str, *, keep_log: bool = False) -> None:
        self._files = Files(folder, learner, keep_log)
        standing = stand(self._files)
        if standing is None or standing.mark is None:
            standing, self._mark = self._founded(standing)
        else:
            self._mark = standing.mark
        self._standing = standing

    def spent(self, but: str) -> float:
        """Epsilon of all runs but one."""
        return math.fsum(run.spent for run in self._standing.runs() if run.run_id != but)

    def spent_since(self, moment: datetime, but: str) -> float:
        """Epsilon of all runs but one that were charged since a moment: a run counts whole, as of its end.

        Args:
            moment: since when.
            but: a run.
        """
        standing, opened = self._standing, self._standing.opened
        charges = (
            [standing.log.spent] if opened is not None and opened.run_id != but and standing.log is not None else []
        )
        lines = (each for each in standing.lines if each.kind in (CLOSED, REPAIRED) and each.at >= moment)
        return math.fsum([*charges, *(each.facts["spent"] for each in lines if each.facts["run_id"] != but)])

    def open_run(self, line: LedgerLine, terms: Terms, elsewhere: float) -> RunLog:
        """The log of a run: a new one, or the one that this learner was in. Any other run is closed by this.

        Args:
            line: about the run.
            terms: what its log is kept by.
            elsewhere: epsilon of all other runs.

        Raises:
            NotReady: the run was closed: this learner has been in another one since.
            DataError: what stands there is about another spec.
        """
        standing, opened = self._standing, self._standing.opened
        if opened is not None and opened.run_id == line.run_id:
            reading = standing.log if standing.begun else None
            if _amended(opened, line, reading, self._files.runs):
                self._open(line)
        else:
            if any(run.run_id == line.run_id for run in standing.runs()):
                raise NotReady(
                    f"learner {line.learner!r} has been in another run since run {line.run_id!r}, which is closed for it: "
                    "start a new run"
                )
            self._close(opened)
            self._open(line)
            reading = None
        return self._opened(line, terms, elsewhere, reading)

    def _open(self, line: LedgerLine) -> None:
        facts = {"kind": OPENED, "run_id": line.run_id, "index": line.index, "n_features": line.n_features}
        self._note({**facts, "spec": line.spec})

    def _opened(self, line: LedgerLine, terms: Terms, elsewhere: float, reading: Reading | None) -> RunLog:
        folder = self._files.log(line.run_id)
        if reading is None:
            shutil.rmtree(folder, ignore_errors=True)  # begun, and nothing said in it
            folder.mkdir(mode=0o700)
        about = About(self._mark.store.hex(), line.learner, line.run_id, terms.durability)
        with ExitStack() as opened:
            log = opened.enter_context(closing(Log(folder, about, reading, self._files.kept(folder))))
            if reading is None:
                log.append(Kind.OPEN, 0, 0.0, elsewhere, line.spec.encode())
                log.sync()
                sync_folder(self._files.folder)
            else:  # what a snapshot that was under way has left
                log.forget(-1 if reading.snapshot is None else reading.snapshot.covers)
            mark = self._base()._replace(run=hashed(line.run_id), sequence=log.sequence - 1, chain=log.chain)
            if reading is not None:
                mark = mark._replace(spent=reading.entries[-1].spent, reserved=self._mark.reserved)
            mark_file = opened.enter_context(closing(MarkFile(self._files.mark)))
            mark_file.settle(mark)
            self._forget_logs(but=folder)
            ledger = Held(self._files.runs)
            opened.pop_all()
        return RunLog(log, mark_file, mark, elsewhere, terms, reading, ledger)

    def end(self) -> None:
        """The open run is over for good: its line says what it has cost, and its log, with the records in it, is put away."""
        self._close(self._standing.opened)
        write_mark(self._files.mark, self._base())
        self._forget_logs()

    def _forget_logs(self, but: Path | None = None) -> None:
        for other in self._files.logs():
            if other != but:
                if self._files.keep_log:
                    for segment in sorted(other.glob("*.log")):
                        put_away(segment, self._files.kept(other))
                shutil.rmtree(other)

    def _close(self, opened: LedgerLine | None) -> None:
        if opened is not None:
            now = next(run for run in self._standing.runs() if run.run_id == opened.run_id)
            self._note({"kind": CLOSED, "run_id": now.run_id, "said": now.said, "spent": now.spent})

    def _founded(self, standing: Standing | None) -> tuple[Standing, Mark]:
        """A store of its own number. Its first line is there before the mark: until then nothing rests on it."""
        self._files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if standing is None:
            lines = append_line(self._files.runs, (), first_line(self._files.learner))
        else:
            lines = tuple(read_lines(self._files.runs.read_bytes()))
        require_readable(lines, self._files.learner, self._files.runs)
        mark = Mark(bytes.fromhex(lines[0].facts["store"]), host(), 1, lines[0].chain)
        write_mark(self._files.mark, mark)
        sync_folder(self._files.folder)
        return Standing(self._files, mark, lines, None), mark

    def _note(self, facts: Facts) -> None:
        """One more line; the mark follows when the run is open."""
        lines = append_line(self._files.runs, self._standing.lines, facts)
        self._standing = replace(self._standing, lines=lines)

    def _base(self) -> Mark:
        """A mark of the ledger as it is, without a run."""
        lines = self._standing.lines
        return Mark(self._mark.store, host(), len(lines), lines[-1].chain, self._standing.elsewhere, NO_RUN)


def _amended(found: LedgerLine, line: LedgerLine, reading: Reading | None, path: Path) -> bool:
    """Whether learners of the run have left or joined since.

    Raises:
        DataError: the run was another one by now.
    """
    if found == replace(line, said=found.said, spent=found.spent):
        return False
    rounds = (0, 0) if reading is None else (reading.said, reading.done)
    try:
        if (found.index, found.n_features, found.but_absences) != (line.index, line.n_features, line.but_absences):
            raise SpecError("a run cannot change but for its absences: start a new run")
        require_amendment(found.roster, line.roster, line.index, *rounds)
    except SpecError as error:
        raise DataError(
            f"the ledger {path} has run {line.run_id!r} with another spec, index or number of features than was told now: {error}"
        ) from None
    return True


def end_run(folder: Path, learner: str, run_id: str = "", *, keep_log: bool = False) -> None:
    """A run is over for all who were in it: its log is put away, the ledger keeps what it has cost. Only for who has the claim.

    Args:
        folder: the state folder.
        learner: its name.
        run_id: the run; nothing is done where another one is open. Empty: one that was over, and whose log a death has left.
        keep_log: whether its log is kept; else it is deleted.

    Raises:
        DataError: as `Store`.
        OSError: it could not be written or deleted.
    """
    files = Files(folder, learner)
    standing = stand(files)
    if standing is not None and files.logs() and (standing.opened is None or standing.opened.run_id == run_id):
        Store(folder, learner, keep_log=keep_log).end()
