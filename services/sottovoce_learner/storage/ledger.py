"""Privacy ledger of one learner, for reading: whether its files in the state folder agree, and what may have been spent.

The ledger is an append-only file of chained lines. A line is `CHAIN JSON`: 16 bytes in hexadecimal, which are
`SHA-256(chain of the line before | JSON)[:16]`. The first line has the id of the ledger and the learner's name.

Log, ledger, high-water mark and snapshot are compared: a file that is cut, lost, set back or another learner's does not
fit, and then no message is sent. Nothing is counted twice: what the open run has cost is in its log, charged before the
message was sent; what closed runs have cost is in the ledger. A lost state folder is a lost ledger: keep it.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sottovoce_core.arrays import as_floats
from sottovoce_core.errors import CorruptStateError, SpecError
from sottovoce_core.network.participation_schedule import ParticipationSchedule
from sottovoce_core.privacy.guarantee import Guarantee
from sottovoce_core.privacy.loss import NO_LOSS, PURE, PrivacyLoss
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_learner.storage.run_log import NO_RUN, HighWaterMark
from sottovoce_learner.storage.state_folder import (
    FORMAT,
    LearnerPaths,
    extend_chain,
    hash_boot_id,
    hash_text,
    read_if_exists,
    require_format,
)
from sottovoce_learner.storage.wal import LogContents, read_log

OPENED, CLOSED, REPAIRED = "opened", "closed", "repaired"
_CHAIN_BYTES = 16

Facts = Mapping[str, Any]


# ---- lines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainedLine:
    """Line of the ledger, its chain, and the offset of its end."""

    facts: Facts
    chain: bytes
    end_offset: int

    @property
    def kind(self) -> str:
        """Kind of the line: store, opened, closed or repaired."""
        return str(self.facts.get("kind"))

    @property
    def written_at(self) -> datetime:
        """Time at which it was written."""
        return datetime.fromisoformat(self.facts["time"])

    @property
    def loss(self) -> PrivacyLoss:
        """Loss that a closed or repaired line charges. Of a repair, the pure epsilon alone is known."""
        pure, renyi = self.facts["epsilon_spent"], self.facts.get("renyi")
        return PURE.loss(pure) if renyi is None else PrivacyLoss(pure, as_floats(np.array(renyi)))

    @classmethod
    def parse_all(cls, raw: bytes) -> tuple[ChainedLine, ...]:
        """Parse all lines, up to the first that is not valid."""
        found: list[ChainedLine] = []
        start, chain = 0, bytes(_CHAIN_BYTES)
        while (end := raw.find(b"\n", start) + 1) > 0:
            text = raw[start + 2 * _CHAIN_BYTES + 1 : end - 1]
            chain = extend_chain(chain, text)
            if raw[start : start + 2 * _CHAIN_BYTES + 1] != chain.hex().encode() + b" ":
                break
            found.append(cls(json.loads(text), chain, end))
            start = end
        return tuple(found)

    def require_readable(self, learner: str, path: Path) -> None:
        """Check of the first line that it is this learner's, and of a known format.

        Raises:
            CorruptStateError: it is not.
        """
        require_format(path, self.facts.get("format", 0))
        if self.facts.get("learner") != learner:
            raise CorruptStateError(
                f"{path} must be the ledger of {learner!r}, got that of {self.facts.get('learner')!r}: restore the right "
                "one, or use `sottovoce ledger --repair`"
            )

    @staticmethod
    def encode(facts: Facts, chain: bytes = bytes(_CHAIN_BYTES)) -> bytes:
        """Encode a line after `chain`, with the time: recent spending is found by it."""
        now = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        text = json.dumps({**facts, **now}, separators=(",", ":")).encode()
        return extend_chain(chain, text).hex().encode() + b" " + text + b"\n"

    @classmethod
    def encode_first(cls, learner: str, store: str = "") -> bytes:
        """Encode the first line of a ledger: its id, drawn if it is new, and the learner's name."""
        facts = {"kind": "store", "format": FORMAT, "store": store or secrets.token_hex(16), "learner": learner}
        return cls.encode(facts)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Run of a learner in its ledger.

    Attributes:
        learner: learner name.
        run_id: run id.
        index: index of the learner in the run.
        n_features: features of a record.
        spec: full run spec, JSON: with the two fields above it determines the guarantee by which the learner was charged.
        rounds_committed: logged messages.
        epsilon_spent: epsilon charged for them; infinite without a guarantee.
        renyi: their Renyi divergences at `privacy.loss.ORDERS`, for epsilon at a delta; empty: not known.
    """

    learner: str
    run_id: str
    index: int
    n_features: int
    spec: str
    rounds_committed: int = 0
    epsilon_spent: float = 0.0
    renyi: tuple[float, ...] = field(default=(), compare=False)

    @property
    def loss(self) -> PrivacyLoss:
        """Loss of the run."""
        if not self.renyi:
            return PURE.loss(self.epsilon_spent) if self.epsilon_spent else NO_LOSS
        return PrivacyLoss(self.epsilon_spent, as_floats(np.array(self.renyi)))

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(json.loads(self.spec)["algorithm"]["name"])

    def build_guarantee(self, *, imports: bool) -> Guarantee:
        """Build the guarantee of the run.

        Args:
            imports: whether the spec may name code to import: it came from the run's coordinator.

        Raises:
            SpecError: the algorithm is not installed here, or may not be imported.
        """
        return self.build_run(imports=imports).guarantee(self.index)

    def build_run(self, *, imports: bool) -> Run:
        """Build the run; arguments and errors as of `build_guarantee`."""
        return build_run(self.parse_spec(imports=imports), self.n_features)

    def parse_spec(self, *, imports: bool) -> RunSpec:
        """Parse the run spec; arguments and errors as of `build_guarantee`."""
        return parse_spec(json.loads(self.spec), allow_imports=imports)

    @property
    def budget(self) -> float | None:
        """Maximum epsilon of this run; None: no limit."""
        document = json.loads(self.spec)
        budget = document.get("privacy", {}).get("budget")
        own_budget: float | None = budget[self.index] if isinstance(budget, list) else budget
        return own_budget

    @property
    def planned_epsilon(self) -> float:
        """Epsilon of all planned rounds, or the budget, if that is less."""
        try:
            epsilon = self.build_guarantee(imports=False).epsilon()
        except SpecError:  # of code that is not imported here
            epsilon = math.inf
        return epsilon if self.budget is None else min(epsilon, self.budget)

    @property
    def fixed_spec(self) -> dict[str, Any]:
        """Spec without fields that may change in a run, and without unset fields: another version may know more fields."""
        document: dict[str, Any] = _drop_unset(json.loads(self.spec))
        return {key: value for key, value in document.items() if key != "offline_intervals"}

    @property
    def participation(self) -> ParticipationSchedule:
        """Participation of all learners by round."""
        return ParticipationSchedule.from_spec(json.loads(self.spec))

    @classmethod
    def from_facts(cls, facts: Facts, learner: str) -> LedgerEntry:
        """Return the entry of a line that opened a run."""
        return cls(learner, facts["run_id"], facts["index"], facts["n_features"], facts["spec"])

    @classmethod
    def build_unknown(cls, learner: str, run_id: str) -> LedgerEntry:
        """Return an entry for a run whose epsilon alone is known."""
        return cls(learner, run_id or "repaired", 0, 1, json.dumps({"learners": 1, "algorithm": {"name": "unknown"}}))


def _drop_unset(section: Any) -> Any:
    """Remove fields that are None, as `plan_hash` does."""
    if not isinstance(section, dict):
        return section
    return {key: _drop_unset(value) for key, value in section.items() if value is not None}


# ---- all files of a learner ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredState:
    """Content of a learner's files.

    Attributes:
        files: paths of the files.
        high_water_mark: newest mark; None: there is none.
        lines: valid lines of the ledger.
        log: log of the open run, or None.
    """

    files: LearnerPaths
    high_water_mark: HighWaterMark | None
    lines: tuple[ChainedLine, ...]
    log: LogContents | None

    @classmethod
    def read(cls, files: LearnerPaths, *, allow_copy: bool = False) -> StoredState:
        """Read the files without comparing them.

        Raises:
            CorruptStateError: one has a newer format, or is a copy.
        """
        mark = HighWaterMark.read(
            files.high_water_mark, allow_copy=allow_copy
        )  # before the rest: what it covers must be in them by then
        stored_state = cls(files, mark, ChainedLine.parse_all(read_if_exists(files.ledger)), None)
        if (open_entry := stored_state.open_entry) is None:
            return stored_state
        return replace(stored_state, log=read_log(files.get_log_folder(open_entry.run_id)))

    @classmethod
    def read_verified(cls, files: LearnerPaths, *, allow_copy: bool = False) -> StoredState | None:
        """Read the state folder and verify that its files agree; None if the learner is new.

        Args:
            files: paths of the files.
            allow_copy: whether they may be a copy.

        Raises:
            CorruptStateError: something was lost, cut, changed, or is another learner's.
        """
        while True:
            stored_state = cls.read(files, allow_copy=allow_copy)
            try:
                return stored_state.verify()
            except CorruptStateError:
                # Its learner may be writing meanwhile: damage is what a second read shows unchanged.
                if cls.read(files, allow_copy=allow_copy) == stored_state:
                    raise

    @property
    def open_entry(self) -> LedgerEntry | None:
        """The last opened run, if it was not closed."""
        last = self.lines[-1].facts if self.lines else {}
        return LedgerEntry.from_facts(last, self.files.learner) if last.get("kind") == OPENED else None

    @property
    def has_open_run_log(self) -> bool:
        """Return whether the log of the open run was created. Before that, no message of it can have been sent."""
        open_entry, mark = self.open_entry, self.high_water_mark
        return open_entry is not None and mark is not None and mark.run_hash == hash_text(open_entry.run_id)

    @property
    def closed_runs_epsilon(self) -> float:
        """Epsilon of all closed runs."""
        return math.fsum(line.facts["epsilon_spent"] for line in self.lines if line.kind in (CLOSED, REPAIRED))

    def iterate_entries(self) -> Iterator[LedgerEntry]:
        """Yield every run, with what it has cost."""
        entries: dict[str, LedgerEntry] = {}
        for line in self.lines:
            if line.kind == OPENED:
                entries[line.facts["run_id"]] = LedgerEntry.from_facts(line.facts, self.files.learner)
            elif line.kind in (CLOSED, REPAIRED):
                run_id = line.facts["run_id"]
                known = entries.get(run_id) or LedgerEntry.build_unknown(self.files.learner, run_id)
                loss = known.loss + line.loss
                entries[run_id] = replace(
                    known,
                    rounds_committed=line.facts["rounds_committed"],
                    epsilon_spent=loss.pure,
                    renyi=tuple(loss.renyi.tolist()),
                )
        if (open_now := self.open_entry) is not None and self.log is not None:
            entries[open_now.run_id] = replace(
                open_now, rounds_committed=self.log.rounds_committed, epsilon_spent=self.log.epsilon_spent
            )
        yield from entries.values()

    @property
    def open_run_progress(self) -> tuple[LedgerEntry, bool] | None:
        """The open run with its committed rounds, and whether all of them were learned; None: there is none."""
        if self.open_entry is None or self.log is None:
            return None
        return replace(
            self.open_entry, rounds_committed=self.log.rounds_committed
        ), 0 < self.log.rounds_committed == self.log.rounds_done

    def sum_epsilon(self, excluded_run_id: str = "") -> float:
        """Sum the epsilon of all runs but one."""
        return math.fsum(run.epsilon_spent for run in self.iterate_entries() if run.run_id != excluded_run_id)

    def sum_losses(self, since: datetime | None = None, *, excluded_run_id: str) -> PrivacyLoss:
        """Sum the losses of closed runs, all of them or those closed since a moment, but one: a run counts as a whole."""
        total = NO_LOSS
        for line in self.lines:
            is_counted = line.kind in (CLOSED, REPAIRED) and line.facts["run_id"] != excluded_run_id
            if is_counted and (since is None or line.written_at >= since):
                total += line.loss
        return total

    @property
    def max_epsilon_spent(self) -> float | None:
        """Maximum epsilon that all runs can have cost, for any damage of the files; None: it cannot be known."""
        mark, lines, log = self.high_water_mark, self.lines, self.log
        known = self.closed_runs_epsilon
        if mark is not None:
            open_now = 0.0 if mark.run_hash == NO_RUN else mark.reservation.max_epsilon
            return max(known, mark.closed_runs_epsilon) + max(open_now, log.epsilon_spent if log else 0.0)
        if log is not None and log.entries:
            last = log.entries[-1]
            return max(known, last.total_epsilon_spent - last.epsilon_spent) + max(
                last.epsilon_spent, log.reservation.max_epsilon
            )
        if not lines or (self.files.list_log_folders() and self.open_entry is None):
            return None
        return known + (self.open_entry.planned_epsilon if self.open_entry is not None else 0.0)

    def verify(self) -> StoredState | None:
        """Compare the files after one read; result and errors as of `read_verified`."""
        files, mark, lines = self.files, self.high_water_mark, self.lines
        if mark is None:
            # Before there is a mark, no message can have been sent.
            if files.high_water_mark.exists() or len(lines) > 1 or files.list_log_folders():
                self._raise_damaged(f"the mark {files.high_water_mark} is lost or damaged")
            return self if lines else None
        if len(lines) < mark.line_count:
            self._raise_damaged(f"the ledger {files.ledger} is lost, cut or damaged from line {len(lines) + 1} on")
        lines[0].require_readable(files.learner, files.ledger)
        if lines[mark.line_count - 1].chain != mark.lines_chain or lines[0].facts["store"] != mark.store_id.hex():
            self._raise_damaged(
                f"the ledger {files.ledger} and the mark {files.high_water_mark} are not of one learner"
            )
        if self.open_entry is not None and len(lines) <= mark.line_count and not self.has_open_run_log:
            self._raise_damaged(
                f"the mark {files.high_water_mark} is not of the run that is open, {self.open_entry.run_id!r}"
            )
        if self.log is not None and self.open_entry is not None and self.has_open_run_log:
            self._require_log(mark, self.log, self.open_entry)
        return self

    def _require_log(self, mark: HighWaterMark, log: LogContents, open_entry: LedgerEntry) -> None:
        """Check that the log holds all that the mark has, for this run and learner."""
        folder = self.files.get_log_folder(open_entry.run_id)
        if log.header is None:
            self._raise_damaged(f"the log {folder} is lost, or its first segment is damaged")
        owner = (log.header.store_id, log.header.learner, log.header.run_id)
        if owner != (mark.store_id.hex(), self.files.learner, open_entry.run_id):
            self._raise_damaged(
                f"the log {folder} is of run {log.header.run_id!r} of {log.header.learner!r}, of another ledger"
            )
        if log.next_sequence <= mark.sequence:
            self._raise_damaged(
                f"the log {log.path} is cut or damaged at entry {log.next_sequence} (byte {log.end_offset})"
            )
        if log.get_chain(mark.sequence) != mark.chain:
            self._raise_damaged(f"the log {folder} is not the one that was written, from entry {mark.sequence} back")
        self._require_snapshot(log)
        if log.header.durability == "process" and mark.boot_id_hash != hash_boot_id():
            self._raise_damaged(
                f"the log {folder} was written with durability 'process' before this machine was started again"
            )

    def _require_snapshot(self, log: LogContents) -> None:
        """Check that deleted entries of a log are covered by a snapshot."""
        snapshot = log.snapshot
        if snapshot is None:
            if log.first_sequence:
                self._raise_damaged(f"the log {log.folder} is lost up to entry {log.first_sequence}")
            return
        if log.get_chain(snapshot.last_sequence) != snapshot.chain:
            self._raise_damaged(
                f"the log {log.folder} is lost between entry {snapshot.last_sequence} and entry {log.first_sequence}"
            )
        path = log.folder / snapshot.file_name
        raw = read_if_exists(path)
        if len(raw) != snapshot.size or hashlib.sha256(raw).digest() != snapshot.digest:
            self._raise_damaged(f"the snapshot {path} is lost or damaged")

    def _raise_damaged(self, damage: str) -> NoReturn:
        name = self.files.learner
        max_epsilon = self.max_epsilon_spent
        figure = (
            "at most what its owner allows in total" if max_epsilon is None else f"at most {max_epsilon:.6g} in total"
        )
        raise CorruptStateError(
            f"{damage}: no message is sent. Restore the state folder of {name!r} as it was after its last message; where that is "
            f"lost, `sottovoce ledger --repair --state {self.files.folder} --learner {name!r}` charges what may have been spent, "
            f"{figure}"
        )
