"""A learner's files in its state folder, read: whether they fit together, what may have been spent, and how damage is repaired.

Log, ledger, mark and snapshot are held against each other: whatever is cut, lost, set back or another learner's does not fit,
and then nothing is said. Nothing is booked twice: what the open run has cost is in its log, charged before the message was
sent; what closed runs have cost stands in the ledger's lines. A state folder that is lost is a ledger that is lost: keep it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import shutil
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from pathlib import Path
from typing import NoReturn

from sottovoce_core.errors import DataError, SpecError
from sottovoce_learner.storage.ledger import (
    CLOSED,
    NO_RUN,
    OPENED,
    REPAIRED,
    LedgerLine,
    Line,
    Mark,
    dated,
    encode_line,
    first_line,
    read_lines,
    read_mark,
    require_readable,
    write_mark,
)
from sottovoce_learner.storage.snapshot import names_of, read_image
from sottovoce_learner.storage.state_folder import Files, claim, content, hashed, host, replace_file, sync_folder
from sottovoce_learner.storage.wal import Kind, Reading, Said, read_log
from sottovoce_wire.v1.eavesdropper_pb2 import Sent

_SECOND = timedelta(seconds=1)
"""To which the moments of lines are written down."""


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
        return LedgerLine.of(last, self.files.learner) if last.get("kind") == OPENED else None

    @property
    def begun(self) -> bool:
        """Was the log of the open run made? Before, nothing can have been said in it."""
        opened, mark = self.opened, self.mark
        return opened is not None and mark is not None and mark.run == hashed(opened.run_id)

    @property
    def elsewhere(self) -> float:
        """Epsilon of all runs that are closed."""
        return math.fsum(line.facts["spent"] for line in self.lines if line.kind in (CLOSED, REPAIRED))

    def runs(self) -> Iterator[LedgerLine]:
        """Every run, with what it has cost."""
        about: dict[str, LedgerLine] = {}
        for line in self.lines:
            if line.kind == OPENED:
                about[line.facts["run_id"]] = LedgerLine.of(line.facts, self.files.learner)
            elif line.kind in (CLOSED, REPAIRED):
                run_id = line.facts["run_id"]
                known = about.get(run_id) or LedgerLine.unknown(self.files.learner, run_id)
                about[run_id] = replace(known, said=line.facts["said"], spent=known.spent + line.facts["spent"])
        if (opened_now := self.opened) is not None and self.log is not None:
            about[opened_now.run_id] = replace(opened_now, said=self.log.said, spent=self.log.spent)
        yield from about.values()


def look(files: Files, *, copied: bool = False) -> Standing:
    """What stands there, whole or not.

    Raises:
        DataError: it is of a newer format, or a copy.
    """
    mark = read_mark(files.mark, copied=copied)  # before the rest: whatever it says must be in them by then
    raw = content(files.runs)
    standing = Standing(files, mark, tuple(read_lines(raw)), None)
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
    rounds = standing.log.said
    return replace(standing.opened, said=rounds), 0 < rounds == standing.log.done


def _required(standing: Standing) -> Standing | None:
    files, mark, lines = standing.files, standing.mark, standing.lines
    if mark is None:
        # Before there is a mark, nothing can have been said.
        if files.mark.exists() or len(lines) > 1 or files.logs():
            _damaged(standing, f"the mark {files.mark} is lost or damaged")
        return standing if lines else None
    if len(lines) < mark.lines:
        _damaged(standing, f"the ledger {files.runs} is lost, cut or damaged from line {len(lines) + 1} on")
    require_readable(lines, files.learner, files.runs)
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


# ---- what was spent, and what may have been --------------------------------------------------------------------------


class Ledger:
    """All runs of the learners of one state folder.

    Args:
        folder: the state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, learner: str | None = None) -> list[LedgerLine]:
        """Every run (of one learner), by run id.

        Raises:
            DataError: something of it is lost or damaged: what was spent cannot be known, so nothing more may be.
        """
        names = self.learners() if learner is None else [learner]
        standings = [stand(Files(self.folder, name)) for name in names]
        found = [line for standing in standings if standing is not None for line in standing.runs()]
        return sorted(found, key=lambda line: line.run_id)

    def spent(self, learner: str) -> float:
        """Epsilon of all runs of a learner: what a record pays that was used in each of them.

        Raises:
            DataError: as `lines`.
        """
        return math.fsum(line.spent for line in self.lines(learner))

    def require_known(self, learner: str, sent: Sequence[Sent]) -> None:
        """Hold the ledger against what is known elsewhere: one that was set back, or begun anew, has forgotten what was spent.

        What its owner charged (`sottovoce ledger --repair --charge`) stands for all that was sent before.

        Raises:
            DataError: as `lines`; or the ledger knows less of a run than was sent in it.
        """
        if not sent:
            return
        standing = stand(Files(self.folder, learner))
        runs, lines = ([], ()) if standing is None else ([*standing.runs()], standing.lines)
        known = {line.run_id: line.said for line in runs}
        charged = [line.at for line in lines if line.facts.get("charge") is not None]
        for each in sent:
            covered = any(each.last_at.ToDatetime(UTC) < moment + _SECOND for moment in charged)
            if (has := known.get(each.run_id, 0)) < each.rounds and not covered:
                raise DataError(
                    f"the ledger of {learner!r} in {self.folder} must know all rounds that were sent, got {has} of {each.rounds} "
                    f"in run {each.run_id}: the state folder was set back or is a new one, and has forgotten what was spent. Put "
                    "the newest folder back; where it is lost, charge what was spent since: stop the learner, `sottovoce ledger "
                    f"repair {self.folder} --learner {learner} --charge EPSILON`, start it"
                )

    def learners(self) -> list[str]:
        """Names of all learners that have a ledger here, or had one."""
        files = {path.stem for kind in ("runs", "mark") for path in self.folder.glob(f"*.{kind}")}
        return sorted(files | {path.name.partition("@")[2] for path in self.folder.glob("*@*") if path.is_dir()})


def most_spent(standing: Standing) -> float | None:
    """The most epsilon that all runs can have cost, whatever one part of the files has lost; None: that cannot be known."""
    mark, lines, log = standing.mark, standing.lines, standing.log
    known = standing.elsewhere
    if mark is not None:
        open_now = 0.0 if mark.run == NO_RUN else mark.reserved.epsilon
        return max(known, mark.elsewhere) + max(open_now, log.spent if log else 0.0)
    if log is not None and log.entries:
        last = log.entries[-1]
        return max(known, last.in_all - last.spent) + max(last.spent, log.reserved.epsilon)
    if not lines or (standing.files.logs() and standing.opened is None):
        return None
    return known + (_planned(standing.opened) if standing.opened is not None else 0.0)


def _planned(line: LedgerLine) -> float:
    """Epsilon of all planned rounds of a run; its budget, where that is less."""
    try:
        price = line.guarantee(imports=False).epsilon()
    except SpecError:  # of code that is not imported here
        price = math.inf
    budget = line.budget
    return price if budget is None else min(price, budget)


# ---- what its owner can do about it ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair has done.

    Attributes:
        charged: epsilon that was added to what is known; 0: nothing was damaged.
        in_all: epsilon of all runs now.
        aside: where what was damaged lies; None: nothing was.
    """

    charged: float
    in_all: float
    aside: Path | None


def verify(folder: Path, learner: str, *, imports: bool) -> list[LedgerLine]:
    """Hold every line and entry against the others, and every charge of the open run against its spec.

    Args:
        folder: the state folder.
        learner: its name.
        imports: whether a spec may name code to import.

    Returns:
        All runs.

    Raises:
        DataError: something does not fit.
    """
    standing = stand(Files(folder, learner))
    if standing is None:
        return []
    if standing.opened is not None and standing.log is not None:
        _require_charges(standing.opened, standing.log, imports=imports)
    return list(standing.runs())


def _require_charges(line: LedgerLine, log: Reading, *, imports: bool) -> None:
    """Raises `DataError` where a round was charged another price than its spec asks for."""
    try:
        run = line.run(imports=imports)
    except SpecError:  # of an algorithm that is not installed here, or may not be imported
        return
    accountant = run.algorithm.accountant(line.index)
    image, spent = read_image(log, names_of(run)), 0.0
    if image is not None:
        for records in array("I", image.counts):
            spent += accountant.next_loss()
            accountant.advance(records)
        spent += accountant.next_loss()
    for entry in log.uncovered:
        if entry.kind in (Kind.ROUND, Kind.CLOSE) and entry.round > 0:
            accountant.advance(Said.decode(entry.body).records)
        if entry.kind is Kind.ROUND:
            spent += accountant.next_loss()
            if entry.spent != spent:
                raise DataError(
                    f"entry {entry.sequence} of the log of run {line.run_id!r} charges {entry.spent:.6g} by round {entry.round}, "
                    f"and its spec asks for {spent:.6g}: it was written by another version, or is not the one that was written"
                )


def repair(folder: Path, learner: str, charge: float | None = None) -> Repair:
    """Where something is lost or damaged, charge the most that may have been spent, and say so in the ledger for ever.

    Never lowers a figure. The run that was open is over for this learner. What was damaged is kept aside.

    Args:
        folder: the state folder.
        learner: its name.
        charge: epsilon that is charged at least, beside what the ledger still knows; needed where the most cannot be known.

    Raises:
        NotReady: the learner is running.
        DataError: what may have been spent cannot be known, and no charge was given.
    """
    files = Files(folder, learner)
    with claim(folder, learner):
        try:
            whole = stand(files)
        except DataError as error:
            return _repaired(files, look(files, copied=True), str(error).partition(":")[0], charge)
        if charge is not None:
            return _repaired(files, whole or look(files), "charged by the owner", charge)
        return Repair(0.0, sum(run.spent for run in whole.runs()) if whole else 0.0, None)


def moved(folder: Path, learner: str) -> None:
    """This copy of a state folder is whole, and the only one that is left in use.

    Raises:
        NotReady: the learner is running.
        DataError: it is not whole.
    """
    files = Files(folder, learner)
    with claim(folder, learner):
        standing = stand(files, copied=True)
        if standing is None or standing.mark is None:
            raise DataError(f"there is no ledger of {learner!r} in the state folder {folder}")
        write_mark(files.mark, standing.mark)


def _repaired(files: Files, standing: Standing, why: str, charge: float | None) -> Repair:
    most = most_spent(standing)
    if most is None and charge is None:
        raise DataError(
            f"what {files.learner!r} has spent cannot be known from {files.folder}: say what it was at most with --charge "
            "EPSILON, such as its owner's --budget in full"
        )
    known = standing.elsewhere
    still = 0.0 if standing.log is None else standing.log.spent  # beside it stands what the owner charges
    added = max(0.0 if most is None else most - known, still + (charge or 0.0))
    opened, mark = standing.opened, standing.mark
    facts = {
        "kind": REPAIRED,
        "run_id": "" if opened is None else opened.run_id,
        "said": 0 if mark is None else mark.reserved.until,
        "spent": added,
        "why": why,
        "charge": charge,
    }
    aside = _set_aside(files)
    raw = _whole_lines(files, standing)
    raw += encode_line(dated(facts), read_lines(raw)[-1].chain)[0]
    replace_file(files.runs, raw)  # the ledger first: from then on the charge stands, whatever dies
    lines = read_lines(raw)
    draft = files.mark.with_name(f"{files.mark.name}.draft")
    draft.unlink(missing_ok=True)
    write_mark(draft, Mark(bytes.fromhex(lines[0].facts["store"]), host(), len(lines), lines[-1].chain, known + added))
    draft.replace(files.mark)
    for log in files.logs():
        shutil.rmtree(log)
    sync_folder(files.folder)
    return Repair(added, known + added, aside)


def _set_aside(files: Files) -> Path:
    """Keep a copy of everything, before anything is changed."""
    aside = files.folder / "damaged" / f"{files.learner}-{secrets.token_hex(4)}"
    aside.mkdir(mode=0o700, parents=True)
    for path in (files.runs, files.mark):
        if path.exists():
            shutil.copy2(path, aside)
    for log in files.logs():
        shutil.copytree(log, aside / log.name)
    return aside


def _whole_lines(files: Files, standing: Standing) -> bytes:
    """The lines that are right; where there is none, the first line of a ledger."""
    if standing.lines and standing.lines[0].facts.get("learner") == files.learner:
        return files.runs.read_bytes()[: standing.lines[-1].end]
    store = "" if standing.mark is None else standing.mark.store.hex()
    return encode_line(first_line(files.learner, store), bytes(16))[0]
