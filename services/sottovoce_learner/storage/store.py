"""A learner's files in its state folder, written: its ledger, whose runs open and close, and what its owner can do about damage.

Written first is what others rest on: a line of the ledger before the log that it announces. What is read is in `ledger.py`.
"""

from __future__ import annotations

import math
import secrets
import shutil
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from pathlib import Path

from sottovoce_core.errors import CorruptStateError, FailedPrecondition, SpecError
from sottovoce_core.runs.participation import require_valid_reconfiguration
from sottovoce_learner.storage.ledger import (
    CLOSED,
    OPENED,
    REPAIRED,
    ChainedLine,
    Facts,
    LedgerEntry,
    StoredState,
)
from sottovoce_learner.storage.run_log import NO_RUN, HighWaterMark, HighWaterMarkFile, LogOptions, RunLog
from sottovoce_learner.storage.snapshot import LearnerSnapshot
from sottovoce_learner.storage.state_folder import (
    FileGuard,
    LearnerLock,
    LearnerPaths,
    hash_boot_id,
    hash_text,
    replace_file,
    sync_folder,
    write_at,
)
from sottovoce_learner.storage.wal import EntryKind, LogContents, LogHeader, RoundPayload, WriteAheadLog
from sottovoce_wire.v1.eavesdropper_pb2 import SentRounds

_SECOND = timedelta(seconds=1)
"""To which the moments of lines are written down."""


class LearnerStore:
    """The state of one learner. Only who has the claim on it may open it.

    Args:
        folder: the state folder.
        learner: its name.
        keep_log: whether logs of runs are kept when they are over.

    Raises:
        CorruptStateError: something was lost, cut, changed, or is another learner's.
    """

    def __init__(self, folder: Path, learner: str, *, keep_log: bool = False) -> None:
        self._files = LearnerPaths(folder, learner, keep_log)
        standing = StoredState.read_verified(self._files)
        self.stored_state = (
            self._founded(standing) if standing is None or standing.high_water_mark is None else standing
        )

    def open_run(self, line: LedgerEntry, terms: LogOptions, elsewhere: float) -> RunLog:
        """The log of a run: a new one, or the one that this learner was in. Any other run is closed by this.

        Args:
            line: about the run.
            terms: what its log is kept by.
            elsewhere: epsilon of all other runs.

        Raises:
            FailedPrecondition: the run was closed: this learner has been in another one since.
            CorruptStateError: what stands there is about another spec.
        """
        standing, opened = self.stored_state, self.stored_state.open_entry
        if opened is not None and opened.run_id == line.run_id:
            reading = standing.log if standing.has_open_run_log else None
            if _amended(opened, line, reading, self._files.ledger):
                self._open(line)
        else:
            if any(run.run_id == line.run_id for run in standing.iterate_entries()):
                raise FailedPrecondition(
                    f"learner {line.learner!r} has been in another run since run {line.run_id!r}, which is closed for it: "
                    "start a new run"
                )
            self._close(opened)
            self._open(line)
            reading = None
        return self._opened(line, terms, elsewhere, reading)

    def _open(self, line: LedgerEntry) -> None:
        facts = {"kind": OPENED, "run_id": line.run_id, "index": line.index, "n_features": line.n_features}
        self._note({**facts, "spec": line.spec})

    def _opened(self, line: LedgerEntry, terms: LogOptions, elsewhere: float, reading: LogContents | None) -> RunLog:
        folder, standing = self._files.get_log_folder(line.run_id), self.stored_state
        if reading is None:
            shutil.rmtree(folder, ignore_errors=True)  # begun, and nothing said in it
            folder.mkdir(mode=0o700)
        about = LogHeader(standing.lines[0].facts["store"], line.learner, line.run_id, terms.durability)
        with ExitStack() as opened:
            log = opened.enter_context(closing(WriteAheadLog(self._files, about, reading)))
            if reading is None:
                log.append(EntryKind.OPEN, 0, 0.0, elsewhere, line.spec.encode())
                log.sync()
                sync_folder(self._files.folder)
            else:  # what a snapshot that was under way has left
                log.retire_segments(-1 if reading.snapshot is None else reading.snapshot.last_sequence)
            mark = self._base()._replace(run_hash=hash_text(line.run_id), sequence=log.sequence - 1, chain=log.chain)
            if reading is not None and standing.high_water_mark is not None:
                mark = mark._replace(
                    epsilon_spent=reading.entries[-1].epsilon_spent, reservation=standing.high_water_mark.reservation
                )
            mark_file = opened.enter_context(closing(HighWaterMarkFile(self._files.high_water_mark)))
            mark_file.write_both_slots(mark)
            self._forget_logs(but=folder)
            ledger = FileGuard(self._files.ledger)
            opened.pop_all()
        return RunLog(log, mark_file, mark, elsewhere, terms, reading, ledger)

    def end(self) -> None:
        """The open run is over for good: its line says what it has cost, and its log, with the records in it, is put away."""
        self._close(self.stored_state.open_entry)
        self._base().write(self._files.high_water_mark)
        self._forget_logs()

    def _forget_logs(self, but: Path | None = None) -> None:
        for other in self._files.list_log_folders():
            if other != but:
                if self._files.keep_log:
                    for segment in sorted(other.glob("*.log")):
                        self._files.retire_segment(segment)
                shutil.rmtree(other)

    def _close(self, opened: LedgerEntry | None) -> None:
        if opened is not None:
            now = next(run for run in self.stored_state.iterate_entries() if run.run_id == opened.run_id)
            self._note(
                {
                    "kind": CLOSED,
                    "run_id": now.run_id,
                    "rounds_committed": now.rounds_committed,
                    "epsilon_spent": now.epsilon_spent,
                }
            )

    def _founded(self, standing: StoredState | None) -> StoredState:
        """A store of its own number. Its first line is there before the mark: until then nothing rests on it."""
        self._files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if standing is None:
            write_at(self._files.ledger, ChainedLine.encode_first(self._files.learner), 0)
        lines = ChainedLine.parse_all(self._files.ledger.read_bytes())
        lines[0].require_readable(self._files.learner, self._files.ledger)
        mark = HighWaterMark(bytes.fromhex(lines[0].facts["store"]), hash_boot_id(), 1, lines[0].chain)
        mark.write(self._files.high_water_mark)
        sync_folder(self._files.folder)
        return StoredState(self._files, mark, lines, None)

    def _note(self, facts: Facts) -> None:
        """One more line, which lasts; the mark follows when the run is open. What a torn one left behind the last goes."""
        last = self.stored_state.lines[-1]
        write_at(self._files.ledger, ChainedLine.encode(facts, last.chain), last.end_offset)
        self.stored_state = replace(self.stored_state, lines=ChainedLine.parse_all(self._files.ledger.read_bytes()))

    def _base(self) -> HighWaterMark:
        """A mark of the ledger as it is, without a run."""
        lines = self.stored_state.lines
        store = bytes.fromhex(lines[0].facts["store"])
        return HighWaterMark(
            store, hash_boot_id(), len(lines), lines[-1].chain, self.stored_state.closed_runs_epsilon, NO_RUN
        )


def _amended(found: LedgerEntry, line: LedgerEntry, reading: LogContents | None, path: Path) -> bool:
    """Whether learners of the run have left or joined since.

    Raises:
        CorruptStateError: the run was another one by now.
    """
    if found == replace(line, rounds_committed=found.rounds_committed, epsilon_spent=found.epsilon_spent):
        return False
    rounds = (0, 0) if reading is None else (reading.rounds_committed, reading.rounds_done)
    try:
        if (found.index, found.n_features, found.fixed_spec) != (line.index, line.n_features, line.fixed_spec):
            raise SpecError("a run cannot change but for its offline_intervals: start a new run")
        require_valid_reconfiguration(found.participation, line.participation, line.index, *rounds)
    except SpecError as error:
        raise CorruptStateError(
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
        CorruptStateError: as `Store`.
        OSError: it could not be written or deleted.
    """
    files = LearnerPaths(folder, learner)
    standing = StoredState.read_verified(files)
    if (
        standing is not None
        and files.list_log_folders()
        and (standing.open_entry is None or standing.open_entry.run_id == run_id)
    ):
        LearnerStore(folder, learner, keep_log=keep_log).end()


# ---- what was spent, and what may have been --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair has done.

    Attributes:
        charged: epsilon that was added to what is known; 0: nothing was damaged.
        in_all: epsilon of all runs now.
        aside: where what was damaged lies; None: nothing was.
    """

    epsilon_charged: float
    total_epsilon_spent: float
    backup_folder: Path | None


class Ledger:
    """All runs of the learners of one state folder.

    Args:
        folder: the state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_entries(self, learner: str | None = None) -> list[LedgerEntry]:
        """Every run (of one learner), by run id.

        Raises:
            CorruptStateError: something of it is lost or damaged: what was spent cannot be known, so nothing more may be.
        """
        names = self.list_learners() if learner is None else [learner]
        standings = map(self._standing, names)
        found = [line for standing in standings if standing is not None for line in standing.iterate_entries()]
        return sorted(found, key=lambda line: line.run_id)

    def sum_epsilon(self, learner: str) -> float:
        """Epsilon of all runs of a learner: what a record pays that was used in each of them.

        Raises:
            CorruptStateError: as `lines`.
        """
        return math.fsum(line.epsilon_spent for line in self.list_entries(learner))

    def require_sent_rounds(self, learner: str, sent: Sequence[SentRounds]) -> None:
        """Hold the ledger against what is known elsewhere: one that was set back, or begun anew, has forgotten what was spent.

        What its owner charged (`sottovoce ledger --repair --charge`) stands for all that was sent before.

        Raises:
            CorruptStateError: as `lines`; or the ledger knows less of a run than was sent in it.
        """
        if not sent:
            return
        standing = self._standing(learner)
        runs, lines = ([], ()) if standing is None else ([*standing.iterate_entries()], standing.lines)
        known = {line.run_id: line.rounds_committed for line in runs}
        charged = [line.written_at for line in lines if line.facts.get("charge") is not None]
        for each in sent:
            covered = any(each.last_at.ToDatetime(UTC) < moment + _SECOND for moment in charged)
            if (has := known.get(each.run_id, 0)) < each.rounds and not covered:
                raise CorruptStateError(
                    f"the ledger of {learner!r} in {self.folder} must know all rounds that were sent, got {has} of {each.rounds} "
                    f"in run {each.run_id}: the state folder was set back or is a new one, and has forgotten what was spent. Put "
                    "the newest folder back; where it is lost, charge what was spent since: stop the learner, `sottovoce ledger "
                    f"repair {self.folder} --learner {learner} --charge EPSILON`, start it"
                )

    def list_learners(self) -> list[str]:
        """Names of all learners that have a ledger here, or had one."""
        files = {path.stem for kind in ("runs", "mark") for path in self.folder.glob(f"*.{kind}")}
        return sorted(files | {path.name.partition("@")[2] for path in self.folder.glob("*@*") if path.is_dir()})

    def _standing(self, learner: str) -> StoredState | None:
        return StoredState.read_verified(LearnerPaths(self.folder, learner))

    # ---- what its owner can do about it -----------------------------------------------------------------------

    def verify(self, learner: str, *, imports: bool) -> list[LedgerEntry]:
        """Hold every line and entry against the others, and every charge of the open run against its spec.

        Args:
            learner: its name.
            imports: whether a spec may name code to import.

        Returns:
            All runs.

        Raises:
            CorruptStateError: something does not fit.
        """
        standing = self._standing(learner)
        if standing is None:
            return []
        if standing.open_entry is not None and standing.log is not None:
            _require_charges(standing.open_entry, standing.log, imports=imports)
        return list(standing.iterate_entries())

    def repair(self, learner: str, charge: float | None = None) -> Repair:
        """Where something is lost or damaged, charge the most that may have been spent, and say so in the ledger for ever.

        Never lowers a figure. The run that was open is over for this learner. What was damaged is kept aside.

        Args:
            learner: its name.
            charge: epsilon that is charged at least, beside what the ledger still knows; needed where the most cannot be known.

        Raises:
            FailedPrecondition: the learner is running.
            CorruptStateError: what may have been spent cannot be known, and no charge was given.
        """
        files = LearnerPaths(self.folder, learner)
        with LearnerLock(self.folder, learner):
            try:
                whole = StoredState.read_verified(files)
            except CorruptStateError as error:
                return _repaired(files, StoredState.read(files, allow_copy=True), str(error).partition(":")[0], charge)
            if charge is not None:
                return _repaired(files, whole or StoredState.read(files), "charged by the owner", charge)
            return Repair(0.0, whole.sum_epsilon() if whole else 0.0, None)

    def accept_moved_folder(self, learner: str) -> None:
        """This copy of a state folder is whole, and the only one that is left in use.

        Raises:
            FailedPrecondition: the learner is running.
            CorruptStateError: it is not whole.
        """
        files = LearnerPaths(self.folder, learner)
        with LearnerLock(self.folder, learner):
            standing = StoredState.read_verified(files, allow_copy=True)
            if standing is None or standing.high_water_mark is None:
                raise CorruptStateError(f"there is no ledger of {learner!r} in the state folder {self.folder}")
            standing.high_water_mark.write(files.high_water_mark)


def _require_charges(line: LedgerEntry, log: LogContents, *, imports: bool) -> None:
    """Raises `CorruptStateError` where a round was charged another price than its spec asks for."""
    try:
        run = line.build_run(imports=imports)
    except SpecError:  # of an algorithm that is not installed here, or may not be imported
        return
    accountant = run.algorithm.accountant(line.index)
    image, spent = LearnerSnapshot.read_from_log(log, LearnerSnapshot.collect_named_objects(run)), 0.0
    if image is not None:
        for records in array("I", image.record_counts):
            spent += accountant.next_loss()
            accountant.advance(records)
        spent += accountant.next_loss()
    for entry in log.entries_after_snapshot:
        if entry.kind in (EntryKind.ROUND, EntryKind.CLOSE) and entry.round > 0:
            accountant.advance(RoundPayload.decode(entry.body).records)
        if entry.kind is EntryKind.ROUND:
            spent += accountant.next_loss()
            if entry.epsilon_spent != spent:
                raise CorruptStateError(
                    f"entry {entry.sequence} of the log of run {line.run_id!r} charges {entry.epsilon_spent:.6g} by round {entry.round}, "
                    f"and its spec asks for {spent:.6g}: it was written by another version, or is not the one that was written"
                )


def _repaired(files: LearnerPaths, standing: StoredState, why: str, charge: float | None) -> Repair:
    most = standing.max_epsilon_spent
    if most is None and charge is None:
        raise CorruptStateError(
            f"what {files.learner!r} has spent cannot be known from {files.folder}: say what it was at most with --charge "
            "EPSILON, such as its owner's --budget in full"
        )
    known = standing.closed_runs_epsilon
    still = 0.0 if standing.log is None else standing.log.epsilon_spent  # beside it stands what the owner charges
    added = max(0.0 if most is None else most - known, still + (charge or 0.0))
    opened, mark = standing.open_entry, standing.high_water_mark
    facts = {
        "kind": REPAIRED,
        "run_id": "" if opened is None else opened.run_id,
        "rounds_committed": 0 if mark is None else mark.reservation.end_round,
        "epsilon_spent": added,
        "why": why,
        "charge": charge,
    }
    aside = _set_aside(files)
    if standing.lines and standing.lines[0].facts.get("learner") == files.learner:
        raw = files.ledger.read_bytes()[: standing.lines[-1].end_offset]
    else:
        raw = ChainedLine.encode_first(files.learner, "" if mark is None else mark.store_id.hex())
    raw += ChainedLine.encode(facts, ChainedLine.parse_all(raw)[-1].chain)
    replace_file(files.ledger, raw)  # the ledger first: from then on the charge stands, whatever dies
    lines = ChainedLine.parse_all(raw)
    draft = files.high_water_mark.with_name(f"{files.high_water_mark.name}.draft")
    draft.unlink(missing_ok=True)
    store = bytes.fromhex(lines[0].facts["store"])
    HighWaterMark(store, hash_boot_id(), len(lines), lines[-1].chain, known + added).write(draft)
    draft.replace(files.high_water_mark)
    for log in files.list_log_folders():
        shutil.rmtree(log)
    sync_folder(files.folder)
    return Repair(added, known + added, aside)


def _set_aside(files: LearnerPaths) -> Path:
    """Keep a copy of everything, before anything is changed."""
    aside = files.folder / "damaged" / f"{files.learner}-{secrets.token_hex(4)}"
    aside.mkdir(mode=0o700, parents=True)
    for path in (files.ledger, files.high_water_mark):
        if path.exists():
            shutil.copy2(path, aside)
    for log in files.list_log_folders():
        shutil.copytree(log, aside / log.name)
    return aside
