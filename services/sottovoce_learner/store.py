"""A learner's files in its state folder, open for writing: what is read from them is in `standing.py`.

Written first is what others rest on: a line of the ledger before the log that it announces, an entry before the mark, and the
mark before anything is seen. A death in between leaves more than was seen, never less.
"""

from __future__ import annotations

import errno
import fcntl
import math
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TextIO

from sottovoce.errors import DataError, LocalProtocolError, NotReady, SpecError, Unavailable
from sottovoce.running.participation import require_amendment
from sottovoce_learner import lines as ledger_lines
from sottovoce_learner.bodies import Grant, Said, Snapshot
from sottovoce_learner.entries import Kind
from sottovoce_learner.ledger_line import LedgerLine
from sottovoce_learner.lines import Held
from sottovoce_learner.log import About, Durability, Log, Reading, hashed, host, put_away, sync_folder, write_snapshot
from sottovoce_learner.mark import NO_RUN, Mark, MarkFile
from sottovoce_learner.standing import CLOSED, OPENED, Files, Standing, done, said, stand

SNAPSHOT_AFTER = 4 * 1024 * 1024
SNAPSHOT_ROUNDS = 1_000
"""A snapshot takes the place of a log that has grown by so many bytes, or so many rounds: each is replayed after a death."""
_A_ROUND = 2_048
"""Bytes of snapshots that a round may cost, where rounds make one due: small beside what replaying it costs."""


class Claim:
    """Exclusive use of a learner's files, until it is closed, or this process dies, however it does.

    Args:
        file: the lock, held.
        files: of the learner.
    """

    def __init__(self, file: TextIO, files: Files) -> None:
        self._file, self._files = file, files
        self._lock = Held(Path(file.name), file.fileno())
        self._held = [self._lock]

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def renew(self) -> None:
        """Note which files stand there now: from now on they must stay."""
        there = [path for path in (self._files.runs, self._files.mark) if path.exists()]
        self._held = [self._lock, *map(Held, there)]

    def require_in_place(self) -> None:
        """Raise an error unless the files are still there: another folder in their place is another ledger.

        Raises:
            DataError: one was deleted, moved, replaced or cut.
        """
        for each in self._held:
            each.require_in_place()

    def close(self) -> None:
        """Let another process be this learner."""
        self._file.close()


def claim(folder: Path, learner: str) -> Claim:
    """Keep every other process from being this learner on this folder: two of them would each spend the whole budget.

    Raises:
        NotReady: another process is this learner.
    """
    file = (folder / f"{learner}.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise NotReady(
            f"another process is learner {learner!r} on the state folder {folder}: stop it, or take another name or folder"
        ) from None
    return Claim(file, Files(folder, learner))


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
            self._rounds = said(reading)
            covered = reading.snapshot
            self._last_size = 0 if covered is None else covered.size
            self._grown = sum(len(entry.body) for entry in reading.entries)
            self._since = sum(entry.kind is Kind.ROUND for entry in reading.entries)

    def say(self, t: int, spent: float, said: Said) -> None:
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

    def turn(self) -> Callable[[bytes], Snapshot]:
        """Begin a segment; what stands before it may be replaced by a snapshot.

        Returns:
            Writes a snapshot of all up to here, given its bytes; in whatever thread.

        Raises:
            OSError: the segment could not be begun.
        """
        self._log.turn()
        self._grown = self._since = 0
        return partial(write_snapshot, self._log.folder, self._log.sequence - 1, self._log.chain, self._mark.reserved)

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
        """As `Standing.spent_since`."""
        return self._standing.spent_since(moment, but)

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
        with closing(MarkFile(self._files.mark)) as mark_file:
            mark_file.settle(self._base())
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
            facts = ledger_lines.dated(ledger_lines.first(secrets.token_hex(16), self._files.learner))
            ledger_lines.append(self._files.runs, ledger_lines.encode(facts, bytes(16))[0], 0)
        founded = Standing(self._files, None, tuple(ledger_lines.walk(self._files.runs.read_bytes())), None)
        ledger_lines.require_readable(list(founded.lines), self._files.learner, self._files.runs)
        first = founded.lines[0]
        mark = Mark(bytes.fromhex(first.facts["store"]), host(), 1, first.chain)
        with closing(MarkFile(self._files.mark)) as mark_file:
            mark_file.settle(mark)
        sync_folder(self._files.folder)
        return replace(founded, mark=mark), mark

    def _note(self, facts: ledger_lines.Facts) -> None:
        """One more line; the mark follows when the run is open."""
        last = self._standing.lines[-1]
        raw, _ = ledger_lines.encode(ledger_lines.dated(facts), last.chain)
        ledger_lines.append(self._files.runs, raw, last.end)
        lines = tuple(ledger_lines.walk(self._files.runs.read_bytes()))
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
    rounds = (0, 0) if reading is None else (said(reading), done(reading))
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
