"""Writing of a learner's files in its state folder: opening and closing runs in the ledger, and repairs by the owner.

Dependencies are written first: a line of the ledger before the log that it announces. Reading is in `ledger.py`.
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

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import CorruptStateError, FailedPrecondition, SpecError
from sottovoce_core.privacy.loss import PURE
from sottovoce_core.runs.participation import require_valid_reconfiguration
from sottovoce_core.runs.run import MAX_ACCOUNTED_ROUNDS, Run
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
"""Resolution of the times of lines."""


class LearnerStore:
    """State of one learner. Only the holder of its lock may open it.

    Args:
        folder: state folder.
        learner: learner name.
        keep_log: whether logs of runs are kept after the run.

    Raises:
        CorruptStateError: something was lost, cut, changed, or is another learner's.
    """

    def __init__(self, folder: Path, learner: str, *, keep_log: bool = False) -> None:
        self._files = LearnerPaths(folder, learner, keep_log)
        stored_state = StoredState.read_verified(self._files)
        self.stored_state = (
            self._create_store(stored_state)
            if stored_state is None or stored_state.high_water_mark is None
            else stored_state
        )

    def open_run(self, ledger_entry: LedgerEntry, options: LogOptions) -> RunLog:
        """Open the log of a new run, or of the current one. Any other open run is closed.

        Args:
            ledger_entry: ledger entry of the run.
            options: options of its log.

        Raises:
            FailedPrecondition: the run was closed: this learner has been in another one since.
            CorruptStateError: the open run has another spec.
        """
        stored_state, open_entry = self.stored_state, self.stored_state.open_entry
        if open_entry is not None and open_entry.run_id == ledger_entry.run_id:
            contents = stored_state.log if stored_state.has_open_run_log else None
            if _is_reconfigured(open_entry, ledger_entry, contents, self._files.ledger):
                self._append_opened(ledger_entry)
        else:
            if any(run.run_id == ledger_entry.run_id for run in stored_state.iterate_entries()):
                raise FailedPrecondition(
                    f"learner {ledger_entry.learner!r} has been in another run since run {ledger_entry.run_id!r}, "
                    "which is closed for it: start a new run"
                )
            self._append_closed(open_entry)
            self._append_opened(ledger_entry)
            contents = None
        other_runs_epsilon = self.stored_state.sum_epsilon(excluded_run_id=ledger_entry.run_id)
        return self._open_log(ledger_entry, options, other_runs_epsilon, contents)

    def _append_opened(self, ledger_entry: LedgerEntry) -> None:
        facts = {
            "kind": OPENED,
            "run_id": ledger_entry.run_id,
            "index": ledger_entry.index,
            "n_features": ledger_entry.n_features,
        }
        self._append_line({**facts, "spec": ledger_entry.spec})

    def _open_log(
        self, ledger_entry: LedgerEntry, options: LogOptions, other_runs_epsilon: float, contents: LogContents | None
    ) -> RunLog:
        folder, stored_state = self._files.get_log_folder(ledger_entry.run_id), self.stored_state
        if contents is None:
            shutil.rmtree(folder, ignore_errors=True)  # begun, and no message committed in it
            folder.mkdir(mode=0o700)
        header = LogHeader(
            stored_state.lines[0].facts["store"], ledger_entry.learner, ledger_entry.run_id, options.durability
        )
        with ExitStack() as stack:
            log = stack.enter_context(closing(WriteAheadLog(self._files, header, contents)))
            if contents is None:
                log.append(EntryKind.OPEN, 0, 0.0, other_runs_epsilon, ledger_entry.spec.encode())
                log.sync()
                sync_folder(self._files.folder)
            else:  # remains of an unfinished snapshot
                log.retire_segments(-1 if contents.snapshot is None else contents.snapshot.last_sequence)
            mark = self._build_mark()._replace(
                run_hash=hash_text(ledger_entry.run_id), sequence=log.sequence - 1, chain=log.chain
            )
            if contents is not None and stored_state.high_water_mark is not None:
                mark = mark._replace(
                    epsilon_spent=contents.entries[-1].epsilon_spent,
                    reservation=stored_state.high_water_mark.reservation,
                )
            mark_file = stack.enter_context(closing(HighWaterMarkFile(self._files.high_water_mark)))
            mark_file.write_both_slots(mark)
            self._forget_logs(excluded=folder)
            ledger = FileGuard(self._files.ledger)
            stack.pop_all()
        return RunLog(log, mark_file, mark, other_runs_epsilon, options, contents, ledger)

    def end(self) -> None:
        """Close the open run for good: its line gets the cost, and its log, with the records in it, is retired."""
        self._append_closed(self.stored_state.open_entry)
        self._build_mark().write(self._files.high_water_mark)
        self._forget_logs()

    def _forget_logs(self, excluded: Path | None = None) -> None:
        for other in self._files.list_log_folders():
            if other != excluded:
                if self._files.keep_log:
                    for segment in sorted(other.glob("*.log")):
                        self._files.retire_segment(segment)
                shutil.rmtree(other)

    def _append_closed(self, open_entry: LedgerEntry | None) -> None:
        if open_entry is not None:
            ended_run = next(run for run in self.stored_state.iterate_entries() if run.run_id == open_entry.run_id)
            self._append_line(
                {
                    "kind": CLOSED,
                    "run_id": ended_run.run_id,
                    "rounds_committed": ended_run.rounds_committed,
                    "epsilon_spent": ended_run.epsilon_spent,
                    "renyi": _round_up(_compute_renyi(ended_run, self.stored_state.log)),
                }
            )

    def _create_store(self, stored_state: StoredState | None) -> StoredState:
        """Create a store. Its first line is written before the mark: until then nothing depends on it."""
        self._files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stored_state is None:
            write_at(self._files.ledger, ChainedLine.encode_first(self._files.learner), 0)
        lines = ChainedLine.parse_all(self._files.ledger.read_bytes())
        lines[0].require_readable(self._files.learner, self._files.ledger)
        mark = HighWaterMark(bytes.fromhex(lines[0].facts["store"]), hash_boot_id(), 1, lines[0].chain)
        mark.write(self._files.high_water_mark)
        sync_folder(self._files.folder)
        return StoredState(self._files, mark, lines, None)

    def _append_line(self, facts: Facts) -> None:
        """Append a durable line; the mark follows when the run is open. A torn line after the last valid one is overwritten."""
        last = self.stored_state.lines[-1]
        write_at(self._files.ledger, ChainedLine.encode(facts, last.chain), last.end_offset)
        self.stored_state = replace(self.stored_state, lines=ChainedLine.parse_all(self._files.ledger.read_bytes()))

    def _build_mark(self) -> HighWaterMark:
        """Return a mark of the current ledger, without a run."""
        lines = self.stored_state.lines
        store = bytes.fromhex(lines[0].facts["store"])
        return HighWaterMark(
            store, hash_boot_id(), len(lines), lines[-1].chain, self.stored_state.closed_runs_epsilon, NO_RUN
        )


def _is_reconfigured(found: LedgerEntry, ledger_entry: LedgerEntry, contents: LogContents | None, path: Path) -> bool:
    """Return whether learners of the run have left or joined since.

    Raises:
        CorruptStateError: the run differs in another way.
    """
    if found == replace(ledger_entry, rounds_committed=found.rounds_committed, epsilon_spent=found.epsilon_spent):
        return False
    rounds = (0, 0) if contents is None else (contents.rounds_committed, contents.rounds_done)
    try:
        if (found.index, found.n_features, found.fixed_spec) != (
            ledger_entry.index,
            ledger_entry.n_features,
            ledger_entry.fixed_spec,
        ):
            raise SpecError("a run cannot change except for its offline intervals: start a new run")
        require_valid_reconfiguration(found.participation, ledger_entry.participation, ledger_entry.index, *rounds)
    except SpecError as error:
        raise CorruptStateError(
            f"the ledger {path} has run {ledger_entry.run_id!r} with another spec, index or number of features than "
            f"assigned now: {error}"
        ) from None
    return True


def end_run(folder: Path, learner: str, run_id: str = "", *, keep_log: bool = False) -> None:
    """Close a run that is over for all: retire its log; the ledger keeps its cost. Needs the learner's lock.

    Args:
        folder: state folder.
        learner: learner name.
        run_id: run to close, if it is open. Empty: a closed run whose log remained after a crash.
        keep_log: whether its log is kept; else it is deleted.

    Raises:
        CorruptStateError: as of `LearnerStore`.
        OSError: it could not be written or deleted.
    """
    files = LearnerPaths(folder, learner)
    stored_state = StoredState.read_verified(files)
    if (
        stored_state is not None
        and files.list_log_folders()
        and (stored_state.open_entry is None or stored_state.open_entry.run_id == run_id)
    ):
        LearnerStore(folder, learner, keep_log=keep_log).end()


# ---- spent epsilon ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repair:
    """Result of a repair.

    Attributes:
        epsilon_charged: epsilon added to what is known; 0: nothing was damaged.
        total_epsilon_spent: epsilon of all runs now.
        backup_folder: folder with the damaged files; None: none.
    """

    epsilon_charged: float
    total_epsilon_spent: float
    backup_folder: Path | None


class Ledger:
    """All runs of the learners of one state folder.

    Args:
        folder: state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_entries(self, learner: str | None = None) -> list[LedgerEntry]:
        """List every run (of one learner), by run id.

        Raises:
            CorruptStateError: something is lost or damaged: the spent epsilon is not known, so nothing more may be spent.
        """
        names = self.list_learners() if learner is None else [learner]
        standings = map(self._read_verified, names)
        found = [
            ledger_entry
            for stored_state in standings
            if stored_state is not None
            for ledger_entry in stored_state.iterate_entries()
        ]
        return sorted(found, key=lambda ledger_entry: ledger_entry.run_id)

    def sum_epsilon(self, learner: str) -> float:
        """Sum the epsilon of all runs of a learner: the loss of a record that was used in each of them.

        Raises:
            CorruptStateError: as of `list_entries`.
        """
        return math.fsum(ledger_entry.epsilon_spent for ledger_entry in self.list_entries(learner))

    def require_sent_rounds(self, learner: str, sent: Sequence[SentRounds]) -> None:
        """Compare the ledger with rounds known elsewhere: one that was set back, or recreated, lacks spent epsilon.

        An owner's charge (`sottovoce ledger --repair --charge`) covers all that was sent before.

        Raises:
            CorruptStateError: as of `list_entries`; or the ledger has fewer rounds of a run than were sent in it.
        """
        if not sent:
            return
        stored_state = self._read_verified(learner)
        runs, lines = ([], ()) if stored_state is None else ([*stored_state.iterate_entries()], stored_state.lines)
        known = {ledger_entry.run_id: ledger_entry.rounds_committed for ledger_entry in runs}
        charged = [line.written_at for line in lines if line.facts.get("charged_epsilon") is not None]
        for each in sent:
            is_covered = any(each.last_at.ToDatetime(UTC) < moment + _SECOND for moment in charged)
            if (known_rounds := known.get(each.run_id, 0)) < each.rounds and not is_covered:
                raise CorruptStateError(
                    f"the ledger of {learner!r} in {self.folder} must know all rounds that were sent, "
                    f"got {known_rounds} of {each.rounds} "
                    f"in run {each.run_id}: the state folder was set back or is a new one, and lacks spent epsilon. Restore the "
                    "newest folder; where it is lost, charge what was spent since: stop the learner, `sottovoce ledger "
                    f"--repair --state {self.folder} --learner {learner} --charge EPSILON`, start it"
                )

    def list_learners(self) -> list[str]:
        """List all learners that have a ledger here, or had one."""
        files = {path.stem for kind in ("runs", "mark") for path in self.folder.glob(f"*.{kind}")}
        return sorted(files | {path.name.partition("@")[2] for path in self.folder.glob("*@*") if path.is_dir()})

    def _read_verified(self, learner: str) -> StoredState | None:
        return StoredState.read_verified(LearnerPaths(self.folder, learner))

    # ---- checks and repairs by the owner ------------------------------------------------------------------------

    def verify(self, learner: str, *, imports: bool) -> list[LedgerEntry]:
        """Compare all lines and entries with each other, and every charge of the open run with its spec.

        Args:
            learner: learner name.
            imports: whether a spec may name code to import.

        Returns:
            All runs.

        Raises:
            CorruptStateError: something does not fit.
        """
        stored_state = self._read_verified(learner)
        if stored_state is None:
            return []
        entries = list(stored_state.iterate_entries())
        if stored_state.open_entry is not None and stored_state.log is not None:
            _require_charges(stored_state.open_entry, stored_state.log, imports=imports)
            renyi = _compute_renyi(entries[-1], stored_state.log)
            entries[-1] = replace(entries[-1], renyi=tuple(renyi.tolist()))
        return entries

    def repair(self, learner: str, charge: float | None = None) -> Repair:
        """Charge the maximum that may have been spent where files are lost or damaged, and record it in the ledger.

        Never lowers a figure. The run that was open is over for this learner. Damaged files are backed up.

        Args:
            learner: learner name.
            charge: minimum epsilon charged in addition to what the ledger knows; required where the maximum cannot be known.

        Raises:
            FailedPrecondition: the learner is running.
            CorruptStateError: what may have been spent cannot be known, and no charge was given.
        """
        files = LearnerPaths(self.folder, learner)
        with LearnerLock(self.folder, learner):
            try:
                stored_state = StoredState.read_verified(files)
            except CorruptStateError as error:
                return _repair_files(
                    files, StoredState.read(files, allow_copy=True), str(error).partition(":")[0], charge
                )
            if charge is not None:
                return _repair_files(files, stored_state or StoredState.read(files), "charged by the owner", charge)
            return Repair(0.0, stored_state.sum_epsilon() if stored_state else 0.0, None)

    def accept_moved_folder(self, learner: str) -> None:
        """Accept this copy of a state folder as the only one in use.

        Raises:
            FailedPrecondition: the learner is running.
            CorruptStateError: its files do not agree.
        """
        files = LearnerPaths(self.folder, learner)
        with LearnerLock(self.folder, learner):
            stored_state = StoredState.read_verified(files, allow_copy=True)
            if stored_state is None or stored_state.high_water_mark is None:
                raise CorruptStateError(f"there is no ledger of {learner!r} in the state folder {self.folder}")
            stored_state.high_water_mark.write(files.high_water_mark)


def _read_record_counts(run: Run, log: LogContents) -> IntArray:
    """Return the records of each round whose message is logged; 0 where they are not logged yet, or the learner is offline."""
    image = LearnerSnapshot.read_from_log(log, LearnerSnapshot.collect_named_objects(run))
    counts = list(array("I", b"" if image is None else image.record_counts))
    for entry in log.entries_after_snapshot:
        if entry.kind in (EntryKind.ROUND, EntryKind.CLOSE) and entry.round > len(counts):
            counts += [0] * (entry.round - 1 - len(counts))
            counts.append(RoundPayload.decode(entry.body).records)
    return np.array([*counts, 0][: log.rounds_committed], np.int64)


def _require_charges(ledger_entry: LedgerEntry, log: LogContents, *, imports: bool) -> None:
    """Raise `CorruptStateError` where the charge of a round differs from its spec."""
    try:
        run = ledger_entry.build_run(imports=imports)
    except SpecError:  # of an algorithm that is not installed here, or may not be imported
        return
    spent = np.cumsum(run.algorithm.accountant(ledger_entry.index).losses(_read_record_counts(run, log)))
    for entry in log.entries_after_snapshot:
        if entry.kind is EntryKind.ROUND and entry.epsilon_spent != spent[entry.round]:
            raise CorruptStateError(
                f"entry {entry.sequence} of the log of run {ledger_entry.run_id!r} charges "
                f"{entry.epsilon_spent:.6g} by round {entry.round}, "
                f"and its spec asks for {spent[entry.round]:.6g}: it was written by another version, or was changed"
            )


def _compute_renyi(ledger_entry: LedgerEntry, log: LogContents | None) -> FloatArray:
    """Compute the Renyi divergences `(orders,)` of the open run.

    They are those of its pure loss where its algorithm is not known here, or after more than `MAX_ACCOUNTED_ROUNDS` rounds.
    """
    pure = PURE.loss(ledger_entry.epsilon_spent).renyi
    if log is None or not 0 < log.rounds_committed <= MAX_ACCOUNTED_ROUNDS:
        return pure
    try:
        run = ledger_entry.build_run(imports=False)
        counts, accountant = _read_record_counts(run, log), run.algorithm.accountant(ledger_entry.index)
        if np.cumsum(accountant.losses(counts))[-1] != ledger_entry.epsilon_spent:
            return pure
        return np.minimum(pure, accountant.total_renyi(counts))
    except (SpecError, CorruptStateError):  # not installed, may not be imported, or of another version
        return pure


def _round_up(renyi: FloatArray) -> list[float]:
    """Round to five digits, and never below the number."""
    return [float(f"{1.0001 * each:.5g}") for each in renyi.tolist()]


def _repair_files(files: LearnerPaths, stored_state: StoredState, reason: str, charge: float | None) -> Repair:
    max_epsilon = stored_state.max_epsilon_spent
    if max_epsilon is None and charge is None:
        raise CorruptStateError(
            f"what {files.learner!r} has spent cannot be known from {files.folder}: give its maximum with --charge "
            "EPSILON, such as its owner's --budget in full"
        )
    known = stored_state.closed_runs_epsilon
    log_epsilon = (
        0.0 if stored_state.log is None else stored_state.log.epsilon_spent
    )  # the owner's charge is added to it
    added = max(0.0 if max_epsilon is None else max_epsilon - known, log_epsilon + (charge or 0.0))
    open_entry, mark = stored_state.open_entry, stored_state.high_water_mark
    facts = {
        "kind": REPAIRED,
        "run_id": "" if open_entry is None else open_entry.run_id,
        "rounds_committed": 0 if mark is None else mark.reservation.end_round,
        "epsilon_spent": added,
        "reason": reason,
        "charged_epsilon": charge,
    }
    backup_folder = _back_up(files)
    if stored_state.lines and stored_state.lines[0].facts.get("learner") == files.learner:
        raw = files.ledger.read_bytes()[: stored_state.lines[-1].end_offset]
    else:
        raw = ChainedLine.encode_first(files.learner, "" if mark is None else mark.store_id.hex())
    raw += ChainedLine.encode(facts, ChainedLine.parse_all(raw)[-1].chain)
    replace_file(files.ledger, raw)  # the ledger first: from then on the charge survives a crash
    lines = ChainedLine.parse_all(raw)
    draft = files.high_water_mark.with_name(f"{files.high_water_mark.name}.draft")
    draft.unlink(missing_ok=True)
    store = bytes.fromhex(lines[0].facts["store"])
    HighWaterMark(store, hash_boot_id(), len(lines), lines[-1].chain, known + added).write(draft)
    draft.replace(files.high_water_mark)
    for log in files.list_log_folders():
        shutil.rmtree(log)
    sync_folder(files.folder)
    return Repair(added, known + added, backup_folder)


def _back_up(files: LearnerPaths) -> Path:
    """Back up all files before anything is changed."""
    backup_folder = files.folder / "damaged" / f"{files.learner}-{secrets.token_hex(4)}"
    backup_folder.mkdir(mode=0o700, parents=True)
    for path in (files.ledger, files.high_water_mark):
        if path.exists():
            shutil.copy2(path, backup_folder)
    for log in files.list_log_folders():
        shutil.copytree(log, backup_folder / log.name)
    return backup_folder
