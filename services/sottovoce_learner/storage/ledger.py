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

from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.network.roster import ParticipationSchedule
from sottovoce_core.privacy.guarantee import Guarantee
from sottovoce_core.running.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_learner.storage.run_log import NO_RUN, Mark
from sottovoce_learner.storage.state_folder import FORMAT, Files, extend_chain, content, hash_text, host, require_format
from sottovoce_learner.storage.wal import Reading, read_log

OPENED, CLOSED, REPAIRED = "opened", "closed", "repaired"
_CHAIN_BYTES = 16

Facts = Mapping[str, Any]


# ---- lines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One line, its chain, and the first byte behind it."""

    facts: Facts
    chain: bytes
    end: int

    @property
    def kind(self) -> str:
        """store, opened, closed or repaired."""
        return str(self.facts.get("kind"))

    @property
    def at(self) -> datetime:
        """When it was written."""
        return datetime.fromisoformat(self.facts["at"])

    @classmethod
    def parse_all(cls, raw: bytes) -> tuple[Line, ...]:
        """All lines, up to the first that is not right."""
        found: list[Line] = []
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
            DataError: it is not.
        """
        require_format(path, self.facts.get("format", 0))
        if self.facts.get("learner") != learner:
            raise DataError(
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
    def first(cls, learner: str, store: str = "") -> bytes:
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
    said: int = 0
    spent: float = 0.0

    @property
    def algorithm(self) -> str:
        """Its name."""
        return str(json.loads(self.spec)["algorithm"]["name"])

    def guarantee(self, *, imports: bool) -> Guarantee:
        """What was promised.

        Args:
            imports: whether the spec may name code to import: it came from the run's coordinator.

        Raises:
            SpecError: the algorithm is not installed here, or may not be imported.
        """
        return self.run(imports=imports).guarantee(self.index)

    def run(self, *, imports: bool) -> Run:
        """What was run; arguments and errors as of `guarantee`."""
        return build_run(self.parsed(imports=imports), self.n_features)

    def parsed(self, *, imports: bool) -> RunSpec:
        """The run spec; arguments and errors as of `guarantee`."""
        return parse_spec(json.loads(self.spec), imports=imports)

    @property
    def budget(self) -> float | None:
        """What it must not exceed in this run; None: there is none."""
        document = json.loads(self.spec)
        budget = document.get("privacy", {}).get("budget")
        mine: float | None = budget[self.index] if isinstance(budget, list) else budget
        return mine

    @property
    def planned(self) -> float:
        """Epsilon of all its planned rounds; its budget, where that is less."""
        try:
            price = self.guarantee(imports=False).epsilon()
        except SpecError:  # of code that is not imported here
            price = math.inf
        return price if self.budget is None else min(price, self.budget)

    @property
    def fixed_spec(self) -> dict[str, Any]:
        """The spec without what may change in a run, and without what nobody set: another version may know more fields."""
        document: dict[str, Any] = _set(json.loads(self.spec))
        return {key: value for key, value in document.items() if key != "absences"}

    @property
    def roster(self) -> ParticipationSchedule:
        """Who takes part in which round."""
        return ParticipationSchedule.from_spec(json.loads(self.spec))

    @classmethod
    def of(cls, facts: Facts, learner: str) -> LedgerEntry:
        """A run that a line has opened."""
        return cls(learner, facts["run_id"], facts["index"], facts["n_features"], facts["spec"])

    @classmethod
    def unknown(cls, learner: str, run_id: str) -> LedgerEntry:
        """A run of which only its price is known."""
        return cls(learner, run_id or "repaired", 0, 1, json.dumps({"learners": 1, "algorithm": {"name": "unknown"}}))


def _set(section: Any) -> Any:
    """A document without fields that are None, as `plan_hash` takes it."""
    if not isinstance(section, dict):
        return section
    return {key: _set(value) for key, value in section.items() if value is not None}


# ---- all files of a learner ------------------------------------------------------------------------------------------


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

    @classmethod
    def look(cls, files: Files, *, copied: bool = False) -> Standing:
        """What stands there, whole or not.

        Raises:
            DataError: it is of a newer format, or a copy.
        """
        mark = Mark.read(files.mark, copied=copied)  # before the rest: whatever it says must be in them by then
        standing = cls(files, mark, Line.parse_all(content(files.runs)), None)
        if (opened := standing.opened) is None:
            return standing
        return replace(standing, log=read_log(files.log(opened.run_id)))

    @classmethod
    def of(cls, files: Files, *, copied: bool = False) -> Standing | None:
        """What stands there, every part held against the others; None where this learner was never here.

        Args:
            files: where.
            copied: they may be a copy.

        Raises:
            DataError: something was lost, cut, changed, or is another learner's.
        """
        while True:
            standing = cls.look(files, copied=copied)
            try:
                return standing.required()
            except DataError:
                # Its learner may be writing while we read: damage is what a second look shows unchanged.
                if cls.look(files, copied=copied) == standing:
                    raise

    @property
    def opened(self) -> LedgerEntry | None:
        """The run that was opened last, where it was not closed."""
        last = self.lines[-1].facts if self.lines else {}
        return LedgerEntry.of(last, self.files.learner) if last.get("kind") == OPENED else None

    @property
    def begun(self) -> bool:
        """Was the log of the open run made? Before, nothing can have been said in it."""
        opened, mark = self.opened, self.mark
        return opened is not None and mark is not None and mark.run == hash_text(opened.run_id)

    @property
    def elsewhere(self) -> float:
        """Epsilon of all runs that are closed."""
        return math.fsum(line.facts["spent"] for line in self.lines if line.kind in (CLOSED, REPAIRED))

    def runs(self) -> Iterator[LedgerEntry]:
        """Every run, with what it has cost."""
        about: dict[str, LedgerEntry] = {}
        for line in self.lines:
            if line.kind == OPENED:
                about[line.facts["run_id"]] = LedgerEntry.of(line.facts, self.files.learner)
            elif line.kind in (CLOSED, REPAIRED):
                run_id = line.facts["run_id"]
                known = about.get(run_id) or LedgerEntry.unknown(self.files.learner, run_id)
                about[run_id] = replace(known, said=line.facts["said"], spent=known.spent + line.facts["spent"])
        if (opened_now := self.opened) is not None and self.log is not None:
            about[opened_now.run_id] = replace(opened_now, said=self.log.said, spent=self.log.spent)
        yield from about.values()

    @property
    def under_way(self) -> tuple[LedgerEntry, bool] | None:
        """The run that is open, with what was said in it, and whether all of that was learned, too; None: there is none."""
        if self.opened is None or self.log is None:
            return None
        return replace(self.opened, said=self.log.said), 0 < self.log.said == self.log.done

    def spent(self, but: str = "") -> float:
        """Epsilon of all runs but one."""
        return math.fsum(run.spent for run in self.runs() if run.run_id != but)

    def sum_epsilon_since(self, moment: datetime, but: str) -> float:
        """Epsilon of all runs but one that were charged since a moment: a run counts whole, as of its end."""
        opened, log = self.opened, self.log
        charges = [log.spent] if opened is not None and opened.run_id != but and log is not None else []
        lines = (each for each in self.lines if each.kind in (CLOSED, REPAIRED) and each.at >= moment)
        return math.fsum([*charges, *(each.facts["spent"] for each in lines if each.facts["run_id"] != but)])

    @property
    def max_epsilon_spent(self) -> float | None:
        """The most epsilon that all runs can have cost, whatever one part of the files has lost; None: that cannot be known."""
        mark, lines, log = self.mark, self.lines, self.log
        known = self.elsewhere
        if mark is not None:
            open_now = 0.0 if mark.run == NO_RUN else mark.reserved.epsilon
            return max(known, mark.elsewhere) + max(open_now, log.spent if log else 0.0)
        if log is not None and log.entries:
            last = log.entries[-1]
            return max(known, last.in_all - last.spent) + max(last.spent, log.reserved.epsilon)
        if not lines or (self.files.logs() and self.opened is None):
            return None
        return known + (self.opened.planned if self.opened is not None else 0.0)

    def required(self) -> Standing | None:
        """What `of` returns, of what one look has shown; errors as there."""
        files, mark, lines = self.files, self.mark, self.lines
        if mark is None:
            # Before there is a mark, nothing can have been said.
            if files.mark.exists() or len(lines) > 1 or files.logs():
                self._damaged(f"the mark {files.mark} is lost or damaged")
            return self if lines else None
        if len(lines) < mark.lines:
            self._damaged(f"the ledger {files.runs} is lost, cut or damaged from line {len(lines) + 1} on")
        lines[0].require_readable(files.learner, files.runs)
        if lines[mark.lines - 1].chain != mark.lines_chain or lines[0].facts["store"] != mark.store.hex():
            self._damaged(f"the ledger {files.runs} and the mark {files.mark} are not of one learner")
        if self.opened is not None and len(lines) <= mark.lines and not self.begun:
            self._damaged(f"the mark {files.mark} is not of the run that is open, {self.opened.run_id!r}")
        if self.log is not None and self.opened is not None and self.begun:
            self._require_log(mark, self.log, self.opened)
        return self

    def _require_log(self, mark: Mark, log: Reading, opened: LedgerEntry) -> None:
        """The log holds all that the mark says, of this run and learner."""
        folder = self.files.log(opened.run_id)
        if log.about is None:
            self._damaged(f"the log {folder} is lost, or its first segment is damaged")
        of = (log.about.store, log.about.learner, log.about.run_id)
        if of != (mark.store.hex(), self.files.learner, opened.run_id):
            self._damaged(
                f"the log {folder} is of run {log.about.run_id!r} of {log.about.learner!r}, of another ledger"
            )
        if log.next <= mark.sequence:
            self._damaged(f"the log {log.path} is cut or damaged at entry {log.next} (byte {log.end})")
        if log.chain(mark.sequence) != mark.chain:
            self._damaged(f"the log {folder} is not the one that was written, from entry {mark.sequence} back")
        self._require_snapshot(log)
        if log.about.durability == "process" and mark.host != host():
            self._damaged(
                f"the log {folder} was written with durability 'process' before this machine was started again"
            )

    def _require_snapshot(self, log: Reading) -> None:
        """What was deleted of a log stands in a snapshot."""
        snapshot = log.snapshot
        if snapshot is None:
            if log.first:
                self._damaged(f"the log {log.folder} is lost up to entry {log.first}")
            return
        if log.chain(snapshot.covers) != snapshot.chain:
            self._damaged(f"the log {log.folder} is lost between entry {snapshot.covers} and entry {log.first}")
        path = log.folder / snapshot.name
        raw = content(path)
        if len(raw) != snapshot.size or hashlib.sha256(raw).digest() != snapshot.digest:
            self._damaged(f"the snapshot {path} is lost or damaged")

    def _damaged(self, what: str) -> NoReturn:
        name = self.files.learner
        most = self.max_epsilon_spent
        figure = "at most what its owner allows in all" if most is None else f"at most {most:.6g} in all"
        raise DataError(
            f"{what}: nothing is said. Put the state folder of {name!r} back as it was after its last message; where that is "
            f"lost, `sottovoce ledger --repair --state {self.files.folder} --learner {name!r}` charges what may have been spent, "
            f"{figure}"
        )
