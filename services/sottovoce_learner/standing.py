"""A learner's files in its state folder, read: what stands there, whether it fits together, and what may have been spent.

    NAME.lock            held for the life of the process
    NAME.runs            the ledger: chained lines, each run opened, closed, or repaired (`lines.py`)
    NAME.mark            how far something visible rests on the others (`mark.py`)
    RUN@NAME/K.log       the log of the open run, and of the last one until another is opened (`log.py`)
    kept/RUN@NAME/K.log  what was put away of logs, where they are kept (`kept.py`)

Each is held against the others: whatever is cut, lost, set back or another learner's does not fit, and then nothing is said.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from sottovoce.errors import DataError, SpecError
from sottovoce_learner import lines as ledger_lines
from sottovoce_learner.bodies import Grant
from sottovoce_learner.entries import Kind
from sottovoce_learner.ledger_line import LedgerLine
from sottovoce_learner.lines import Line, content, ending
from sottovoce_learner.log import Reading, hashed, host, read_log
from sottovoce_learner.mark import NO_RUN, Mark, read_mark

OPENED, CLOSED, REPAIRED = "opened", "closed", "repaired"
KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Files:
    """Where a learner's files stand.

    Attributes:
        folder: the state folder.
        learner: its name.
        keep_log: logs of runs are kept when they are over.
    """

    folder: Path
    learner: str
    keep_log: bool = False

    @property
    def runs(self) -> Path:
        """The ledger."""
        return self.folder / f"{self.learner}.runs"

    @property
    def mark(self) -> Path:
        """The mark."""
        return self.folder / f"{self.learner}.mark"

    def log(self, run_id: str) -> Path:
        """The folder of a run's log. A run's id has no @, so no two share one."""
        return self.folder / f"{run_id}@{self.learner}"

    def kept(self, log: Path) -> Path | None:
        """Where of a log stands what is no longer needed to go on; None: nowhere."""
        return self.folder / KEPT / log.name if self.keep_log else None

    def logs(self) -> list[Path]:
        """Folders of all logs that are there."""
        own = (each for each in ending(self.folder, f"@{self.learner}") if each.name.partition("@")[2] == self.learner)
        return [each for each in own if each.is_dir()]


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands in a learner's files.

    Attributes:
        files: where.
        mark: the newest; None: there is none.
        lines: of the ledger, those that are right.
        log: of the open run, or None.
    """

    files: Files
    mark: Mark | None
    lines: tuple[Line, ...]
    log: Reading | None

    @property
    def opened(self) -> LedgerLine | None:
        """The run that was opened last, where it was not closed."""
        last = self.lines[-1].facts if self.lines else {}
        return _line(last, self.files.learner) if last.get("kind") == OPENED else None

    @property
    def begun(self) -> bool:
        """Was the log of the open run made? Before, nothing can have been said in it."""
        opened, mark = self.opened, self.mark
        return opened is not None and mark is not None and mark.run == hashed(opened.run_id)

    @property
    def elsewhere(self) -> float:
        """Epsilon of all runs that are closed."""
        return math.fsum(line.facts["spent"] for line in self.lines if line.kind in (CLOSED, REPAIRED))

    def spent_since(self, moment: datetime, but: str) -> float:
        """Epsilon of all runs but one that were charged since a moment: a run counts whole, as of its end.

        Args:
            moment: since when.
            but: a run.
        """
        opened = self.opened
        charges = [spent(self.log)] if opened is not None and opened.run_id != but and self.log is not None else []
        lines = (each for each in self.lines if each.kind in (CLOSED, REPAIRED) and each.at >= moment)
        return math.fsum([*charges, *(each.facts["spent"] for each in lines if each.facts["run_id"] != but)])

    def runs(self) -> Iterator[LedgerLine]:
        """Every run, with what it has cost."""
        about: dict[str, LedgerLine] = {}
        for line in self.lines:
            if line.kind == OPENED:
                opened = _line(line.facts, self.files.learner)
                about[opened.run_id] = opened
            elif line.kind in (CLOSED, REPAIRED):
                run_id = line.facts["run_id"]
                known = about.get(run_id) or LedgerLine.unknown(self.files.learner, run_id)
                about[run_id] = replace(known, said=line.facts["said"], spent=known.spent + line.facts["spent"])
        if (opened_now := self.opened) is not None and self.log is not None:
            about[opened_now.run_id] = replace(opened_now, said=said(self.log), spent=spent(self.log))
        yield from about.values()


def said(log: Reading) -> int:
    """Rounds that were said, by a log."""
    telling = (Kind.ROUND, Kind.SNAPSHOT)
    return next((entry.round + 1 for entry in reversed(log.entries) if entry.kind in telling), 0)


def done(log: Reading) -> int:
    """Rounds that were said and learned, by a log."""
    telling = (Kind.ROUND, Kind.SNAPSHOT, Kind.CLOSE)
    return next((entry.round for entry in reversed(log.entries) if entry.kind in telling), 0)


def spent(log: Reading) -> float:
    """Epsilon of a run, by its log."""
    return log.entries[-1].spent if log.entries else 0.0


def reserved(log: Reading) -> Grant | None:
    """The last reservation in a log."""
    grants = (entry.body for entry in reversed(log.entries) if entry.kind is Kind.GRANT)
    newest = next((Grant.decode(body) for body in grants), None)
    return newest if newest is not None or log.snapshot is None else log.snapshot.reserved


def look(files: Files, *, copied: bool = False) -> Standing:
    """What stands there, whole or not.

    Raises:
        DataError: it is of a newer format, or a copy.
    """
    mark = read_mark(files.mark, copied=copied)  # before the rest: whatever it says must be in them by then
    raw = content(files.runs)
    standing = Standing(files, mark, tuple(ledger_lines.walk(raw)), None)
    if (opened := standing.opened) is None:
        return standing
    return replace(standing, log=read_log(files.log(opened.run_id)))


def stand(files: Files, *, copied: bool = False) -> Standing | None:
    """What stands there, every part held against the others; None where this learner was never here.

    Args:
        files: where.
        copied: they may be a copy.

    Raises:
        DataError: something was lost, cut, changed, or is another learner's.
    """
    while True:
        standing = look(files, copied=copied)
        try:
            return _required(standing)
        except DataError:
            # Its learner may be writing while we read: damage is what a second look shows unchanged.
            if look(files, copied=copied) == standing:
                raise


def under_way(files: Files) -> tuple[LedgerLine, bool] | None:
    """The run that a learner was in last, if it is open, with what was said in it, and whether all of that was learned, too.

    Raises:
        DataError: as `stand`.
    """
    standing = stand(files)
    if standing is None or standing.opened is None or standing.log is None:
        return None
    rounds = said(standing.log)
    return replace(standing.opened, said=rounds), 0 < rounds == done(standing.log)


def _required(standing: Standing) -> Standing | None:
    files, mark, lines = standing.files, standing.mark, standing.lines
    if mark is None:
        # Before there is a mark, nothing can have been said.
        if files.mark.exists() or len(lines) > 1 or files.logs():
            _damaged(standing, f"the mark {files.mark} is lost or damaged")
        return standing if lines else None
    if len(lines) < mark.lines:
        _damaged(standing, f"the ledger {files.runs} is lost, cut or damaged from line {len(lines) + 1} on")
    ledger_lines.require_readable(list(lines), files.learner, files.runs)
    if lines[mark.lines - 1].chain != mark.lines_chain or lines[0].facts["store"] != mark.store.hex():
        _damaged(standing, f"the ledger {files.runs} and the mark {files.mark} are not of one learner")
    if standing.opened is not None and len(lines) <= mark.lines and not standing.begun:
        _damaged(standing, f"the mark {files.mark} is not of the run that is open, {standing.opened.run_id!r}")
    if standing.log is not None and standing.opened is not None and standing.begun:
        _require_log(standing, mark, standing.log, standing.opened)
    return standing


def _require_log(standing: Standing, mark: Mark, log: Reading, opened: LedgerLine) -> None:
    """The log holds all that the mark says, of this run and learner."""
    folder = standing.files.log(opened.run_id)
    if log.about is None:
        _damaged(standing, f"the log {folder} is lost, or its first segment is damaged")
    of = (log.about.store, log.about.learner, log.about.run_id)
    if of != (mark.store.hex(), standing.files.learner, opened.run_id):
        _damaged(
            standing, f"the log {folder} is of run {log.about.run_id!r} of {log.about.learner!r}, of another ledger"
        )
    if log.next <= mark.sequence:
        _damaged(standing, f"the log {log.path} is cut or damaged at entry {log.next} (byte {log.end})")
    if log.chain(mark.sequence) != mark.chain:
        _damaged(standing, f"the log {folder} is not the one that was written, from entry {mark.sequence} back")
    _require_snapshot(standing, log)
    if log.about.durability == "process" and mark.host != host():
        _damaged(
            standing, f"the log {folder} was written with durability 'process' before this machine was started again"
        )


def _require_snapshot(standing: Standing, log: Reading) -> None:
    """What was deleted of a log stands in a snapshot."""
    snapshot = log.snapshot
    if snapshot is None:
        if log.first:
            _damaged(standing, f"the log {log.folder} is lost up to entry {log.first}")
        return
    if log.chain(snapshot.covers) != snapshot.chain:
        _damaged(standing, f"the log {log.folder} is lost between entry {snapshot.covers} and entry {log.first}")
    path = log.folder / snapshot.name
    raw = content(path)
    if len(raw) != snapshot.size or hashlib.sha256(raw).digest() != snapshot.digest:
        _damaged(standing, f"the snapshot {path} is lost or damaged")


def _damaged(standing: Standing, what: str) -> NoReturn:
    name = standing.files.learner
    most = most_spent(standing)
    figure = "at most what its owner allows in all" if most is None else f"at most {most:.6g} in all"
    raise DataError(
        f"{what}: nothing is said. Put the state folder of {name!r} back as it was after its last message; where that is lost, "
        f"`sottovoce ledger --repair --state {standing.files.folder} --learner {name!r}` charges what may have been spent, "
        f"{figure}"
    )


# ---- what may have been spent ----------------------------------------------------------------------------------------


def most_spent(standing: Standing) -> float | None:
    """The most epsilon that all runs can have cost, whatever one part of the files has lost; None: that cannot be known."""
    mark, lines, log = standing.mark, standing.lines, standing.log
    known = standing.elsewhere
    if mark is not None:
        open_now = 0.0 if mark.run == NO_RUN else mark.reserved.epsilon
        return max(known, mark.elsewhere) + max(open_now, spent(log) if log else 0.0)
    if log is not None and log.entries:
        last, grant = log.entries[-1], reserved(log)
        open_now = max(last.spent, grant.epsilon if grant is not None else 0.0)
        return max(known, last.in_all - last.spent) + open_now
    if not lines or (standing.files.logs() and standing.opened is None):
        return None
    return known + (planned(standing.opened) if standing.opened is not None else 0.0)


def planned(line: LedgerLine) -> float:
    """Epsilon of all planned rounds of a run; its budget, where that is less."""
    try:
        price = line.guarantee(imports=False).epsilon()
    except SpecError:  # of code that is not imported here
        price = math.inf
    budget = line.budget
    return price if budget is None else min(price, budget)


def _line(facts: ledger_lines.Facts, learner: str) -> LedgerLine:
    return LedgerLine(learner, facts["run_id"], facts["index"], facts["n_features"], facts["spec"])
