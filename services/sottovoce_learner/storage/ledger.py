"""The privacy ledger of one learner, read: whether its files in the state folder fit together, and what may have been spent.

The ledger is a file of chained lines that only grows. A line is `CHAIN JSON`: 16 bytes in hexadecimal, which are
`SHA-256(chain of the line before | JSON)[:16]`. The first one is the ledger's own number and the learner's name.

Log, ledger, mark and snapshot are held against each other: whatever is cut, lost, set back or another learner's does not fit,
and then nothing is said. Nothing is booked twice: what the open run has cost is in its log, charged before the message was
sent; what closed runs have cost stands in the ledger's lines. A state folder that is lost is a ledger that is lost: keep it.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from sottovoce_core.errors import CorruptStateError, SpecError
from sottovoce_core.network.participation_schedule import ParticipationSchedule
from sottovoce_core.privacy.guarantee import Guarantee
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
    """One line, its chain, and the first byte behind it."""

    facts: Facts
    chain: bytes
    end_offset: int

    @property
    def kind(self) -> str:
        """store, opened, closed or repaired."""
        return str(self.facts.get("kind"))

    @property
    def written_at(self) -> datetime:
        """When it was written."""
        return datetime.fromisoformat(self.facts["at"])

    @classmethod
    def parse_all(cls, raw: bytes) -> tuple[ChainedLine, ...]:
        """All lines, up to the first that is not right."""
        found: list[ChainedLine] = []
        at, chain = 0, bytes(_CHAIN_BYTES)
        while (end := raw.find(b"\n", at) + 1) > 0:
            text = raw[at + 2 * _CHAIN_BYTES + 1 : end - 1]
            chain = extend_chain(chain, text)
            if raw[at : at + 2 * _CHAIN_BYTES + 1] != chain.hex().encode() + b" ":
                break
            found.append(cls(json.loads(text), chain, end))
            at = end
        return tuple(found)

    def require_readable(self, learner: str, path: Path) -> None:
        """Of the first one: it is this learner's, and of a format that is known.

        Raises:
            CorruptStateError: it is not.
        """
        require_format(path, self.facts.get("format", 0))
        if self.facts.get("learner") != learner:
            raise CorruptStateError(
                f"{path} must be the ledger of {learner!r}, and is that of {self.facts.get('learner')!r}: put back the right "
                "one, or leave it to `sottovoce ledger --repair`"
            )

    @staticmethod
    def encode(facts: Facts, chain: bytes = bytes(_CHAIN_BYTES)) -> bytes:
        """A line behind `chain`, with the time, by which it is known what was spent lately."""
        now = {"at": datetime.now(UTC).isoformat(timespec="seconds")}
        text = json.dumps({**facts, **now}, separators=(",", ":")).encode()
        return extend_chain(chain, text).hex().encode() + b" " + text + b"\n"

    @classmethod
    def encode_first(cls, learner: str, store: str = "") -> bytes:
        """The first line of a ledger: its own number, drawn where it has none yet, and whose it is."""
        facts = {"kind": "store", "format": FORMAT, "store": store or secrets.token_hex(16), "learner": learner}
        return cls.encode(facts)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One run of one learner.

    Attributes:
        learner: its name.
        run_id: the run.
        index: the learner's, in the run.
        n_features: features of a record.
        spec: the whole run spec, JSON: with the two before it says by which guarantee the learner was charged.
        said: messages journaled.
        spent: epsilon charged for them; infinite where nothing was promised.
    """

    learner: str
    run_id: str
    index: int
    n_features: int
    spec: str
    rounds_committed: int = 0
    epsilon_spent: float = 0.0

    @property
    def algorithm(self) -> str:
        """Its name."""
        return str(json.loads(self.spec)["algorithm"]["name"])

    def build_guarantee(self, *, imports: bool) -> Guarantee:
        """What was promised.

        Args:
            imports: whether the spec may name code to import: it came from the run's coordinator.

        Raises:
            SpecError: the algorithm is not installed here, or may not be imported.
        """
        return self.build_run(imports=imports).guarantee(self.index)

    def build_run(self, *, imports: bool) -> Run:
        """What was run; arguments and errors as of `guarantee`."""
        return build_run(self.parse_spec(imports=imports), self.n_features)

    def parse_spec(self, *, imports: bool) -> RunSpec:
        """The run spec; arguments and errors as of `guarantee`."""
        return parse_spec(json.loads(self.spec), allow_imports=imports)

    @property
    def budget(self) -> float | None:
        """What it must not exceed in this run; None: there is none."""
        document = json.loads(self.spec)
        budget = document.get("privacy", {}).get("budget")
        mine: float | None = budget[self.index] if isinstance(budget, list) else budget
        return mine

    @property
    def planned_epsilon(self) -> float:
        """Epsilon of all its planned rounds; its budget, where that is less."""
        try:
            price = self.build_guarantee(imports=False).epsilon()
        except SpecError:  # of code that is not imported here
            price = math.inf
        return price if self.budget is None else min(price, self.budget)

    @property
    def fixed_spec(self) -> dict[str, Any]:
        """The spec without what may change in a run, and without what nobody set: another version may know more fields."""
        document: dict[str, Any] = _set(json.loads(self.spec))
        return {key: value for key, value in document.items() if key != "offline_intervals"}

    @property
    def participation(self) -> ParticipationSchedule:
        """Who takes part in which round."""
        return ParticipationSchedule.from_spec(json.loads(self.spec))

    @classmethod
    def from_facts(cls, facts: Facts, learner: str) -> LedgerEntry:
        """A run that a line has opened."""
        return cls(learner, facts["run_id"], facts["index"], facts["n_features"], facts["spec"])

    @classmethod
    def build_unknown(cls, learner: str, run_id: str) -> LedgerEntry:
        """A run of which only its price is known."""
        return cls(learner, run_id or "repaired", 0, 1, json.dumps({"learners": 1, "algorithm": {"name": "unknown"}}))


def _set(section: Any) -> Any:
    """A document without fields that are None, as `plan_hash` takes it."""
    if not isinstance(section, dict):
        return section
    return {key: _set(value) for key, value in section.items() if value is not None}


# ---- all files of a learner ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredState:
    """What stands in a learner's files.

    Attributes:
        files: where.
        mark: the newest; None: there is none.
        lines: of the ledger, those that are right.
        log: of the open run, or None.
    """

    files: LearnerPaths
    high_water_mark: HighWaterMark | None
    lines: tuple[ChainedLine, ...]
    log: LogContents | None

    @classmethod
    def read(cls, files: LearnerPaths, *, allow_copy: bool = False) -> StoredState:
        """What stands there, whole or not.

        Raises:
            CorruptStateError: it is of a newer format, or a copy.
        """
        mark = HighWaterMark.read(
            files.high_water_mark, allow_copy=allow_copy
        )  # before the rest: whatever it says must be in them by then
        standing = cls(files, mark, ChainedLine.parse_all(read_if_exists(files.ledger)), None)
        if (opened := standing.open_entry) is None:
            return standing
        return replace(standing, log=read_log(files.get_log_folder(opened.run_id)))

    @classmethod
    def read_verified(cls, files: LearnerPaths, *, allow_copy: bool = False) -> StoredState | None:
        """What stands there, every part held against the others; None where this learner was never here.

        Args:
            files: where.
            copied: they may be a copy.

        Raises:
            CorruptStateError: something was lost, cut, changed, or is another learner's.
        """
        while True:
            standing = cls.read(files, allow_copy=allow_copy)
            try:
                return standing.verify()
            except CorruptStateError:
                # Its learner may be writing while we read: damage is what a second look shows unchanged.
                if cls.read(files, allow_copy=allow_copy) == standing:
                    raise

    @property
    def open_entry(self) -> LedgerEntry | None:
        """The run that was opened last, where it was not closed."""
        last = self.lines[-1].facts if self.lines else {}
        return LedgerEntry.from_facts(last, self.files.learner) if last.get("kind") == OPENED else None

    @property
    def has_open_run_log(self) -> bool:
        """Was the log of the open run made? Before, nothing can have been said in it."""
        opened, mark = self.open_entry, self.high_water_mark
        return opened is not None and mark is not None and mark.run_hash == hash_text(opened.run_id)

    @property
    def closed_runs_epsilon(self) -> float:
        """Epsilon of all runs that are closed."""
        return math.fsum(line.facts["epsilon_spent"] for line in self.lines if line.kind in (CLOSED, REPAIRED))

    def iterate_entries(self) -> Iterator[LedgerEntry]:
        """Every run, with what it has cost."""
        about: dict[str, LedgerEntry] = {}
        for line in self.lines:
            if line.kind == OPENED:
                about[line.facts["run_id"]] = LedgerEntry.from_facts(line.facts, self.files.learner)
            elif line.kind in (CLOSED, REPAIRED):
                run_id = line.facts["run_id"]
                known = about.get(run_id) or LedgerEntry.build_unknown(self.files.learner, run_id)
                about[run_id] = replace(
                    known,
                    rounds_committed=line.facts["rounds_committed"],
                    epsilon_spent=known.epsilon_spent + line.facts["epsilon_spent"],
                )
        if (opened_now := self.open_entry) is not None and self.log is not None:
            about[opened_now.run_id] = replace(
                opened_now, rounds_committed=self.log.rounds_committed, epsilon_spent=self.log.epsilon_spent
            )
        yield from about.values()

    @property
    def open_run_progress(self) -> tuple[LedgerEntry, bool] | None:
        """The run that is open, with what was said in it, and whether all of that was learned, too; None: there is none."""
        if self.open_entry is None or self.log is None:
            return None
        return replace(
            self.open_entry, rounds_committed=self.log.rounds_committed
        ), 0 < self.log.rounds_committed == self.log.rounds_done

    def sum_epsilon(self, excluded_run_id: str = "") -> float:
        """Epsilon of all runs but one."""
        return math.fsum(run.epsilon_spent for run in self.iterate_entries() if run.run_id != excluded_run_id)

    def sum_epsilon_since(self, moment: datetime, but: str) -> float:
        """Epsilon of all runs but one that were charged since a moment: a run counts whole, as of its end."""
        opened, log = self.open_entry, self.log
        charges = [log.epsilon_spent] if opened is not None and opened.run_id != but and log is not None else []
        lines = (each for each in self.lines if each.kind in (CLOSED, REPAIRED) and each.written_at >= moment)
        return math.fsum([*charges, *(each.facts["epsilon_spent"] for each in lines if each.facts["run_id"] != but)])

    @property
    def max_epsilon_spent(self) -> float | None:
        """The most epsilon that all runs can have cost, whatever one part of the files has lost; None: that cannot be known."""
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
        """What `of` returns, of what one look has shown; errors as there."""
        files, mark, lines = self.files, self.high_water_mark, self.lines
        if mark is None:
            # Before there is a mark, nothing can have been said.
            if files.high_water_mark.exists() or len(lines) > 1 or files.list_log_folders():
                self._damaged(f"the mark {files.high_water_mark} is lost or damaged")
            return self if lines else None
        if len(lines) < mark.line_count:
            self._damaged(f"the ledger {files.ledger} is lost, cut or damaged from line {len(lines) + 1} on")
        lines[0].require_readable(files.learner, files.ledger)
        if lines[mark.line_count - 1].chain != mark.lines_chain or lines[0].facts["store"] != mark.store_id.hex():
            self._damaged(f"the ledger {files.ledger} and the mark {files.high_water_mark} are not of one learner")
        if self.open_entry is not None and len(lines) <= mark.line_count and not self.has_open_run_log:
            self._damaged(
                f"the mark {files.high_water_mark} is not of the run that is open, {self.open_entry.run_id!r}"
            )
        if self.log is not None and self.open_entry is not None and self.has_open_run_log:
            self._require_log(mark, self.log, self.open_entry)
        return self

    def _require_log(self, mark: HighWaterMark, log: LogContents, opened: LedgerEntry) -> None:
        """The log holds all that the mark says, of this run and learner."""
        folder = self.files.get_log_folder(opened.run_id)
        if log.header is None:
            self._damaged(f"the log {folder} is lost, or its first segment is damaged")
        of = (log.header.store_id, log.header.learner, log.header.run_id)
        if of != (mark.store_id.hex(), self.files.learner, opened.run_id):
            self._damaged(
                f"the log {folder} is of run {log.header.run_id!r} of {log.header.learner!r}, of another ledger"
            )
        if log.next_sequence <= mark.sequence:
            self._damaged(f"the log {log.path} is cut or damaged at entry {log.next_sequence} (byte {log.end_offset})")
        if log.get_chain(mark.sequence) != mark.chain:
            self._damaged(f"the log {folder} is not the one that was written, from entry {mark.sequence} back")
        self._require_snapshot(log)
        if log.header.durability == "process" and mark.boot_id_hash != hash_boot_id():
            self._damaged(
                f"the log {folder} was written with durability 'process' before this machine was started again"
            )

    def _require_snapshot(self, log: LogContents) -> None:
        """What was deleted of a log stands in a snapshot."""
        snapshot = log.snapshot
        if snapshot is None:
            if log.first_sequence:
                self._damaged(f"the log {log.folder} is lost up to entry {log.first_sequence}")
            return
        if log.get_chain(snapshot.last_sequence) != snapshot.chain:
            self._damaged(
                f"the log {log.folder} is lost between entry {snapshot.last_sequence} and entry {log.first_sequence}"
            )
        path = log.folder / snapshot.file_name
        raw = read_if_exists(path)
        if len(raw) != snapshot.size or hashlib.sha256(raw).digest() != snapshot.digest:
            self._damaged(f"the snapshot {path} is lost or damaged")

    def _damaged(self, what: str) -> NoReturn:
        name = self.files.learner
        most = self.max_epsilon_spent
        figure = "at most what its owner allows in all" if most is None else f"at most {most:.6g} in all"
        raise CorruptStateError(
            f"{what}: nothing is said. Put the state folder of {name!r} back as it was after its last message; where that is "
            f"lost, `sottovoce ledger --repair --state {self.files.folder} --learner {name!r}` charges what may have been spent, "
            f"{figure}"
        )
