"""The privacy ledger of one learner: a file of chained lines that only grows, and the high-water mark beside it.

A line is `CHAIN JSON`: 16 bytes in hexadecimal, which are `SHA-256(chain of the line before | JSON)[:16]`. The first one is the
ledger's own number and the learner's name.

The mark says how far something visible rests on log and ledger: a log that was cut looks like one whose writer died, and the
mark says that it was longer. It has two slots, written in turn, after the entry and before what rests on it is seen: a torn
write spoils one slot, and the other stands for the write before. So it is a lower bound of what was written, never more.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sottovoce_core.errors import DataError
from sottovoce_core.network.roster import Roster
from sottovoce_core.privacy.guarantee import Guarantee
from sottovoce_core.running.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_learner.storage.state_folder import FORMAT, Held, chained, require_format, write_at
from sottovoce_learner.storage.wal import NOTHING, Grant

OPENED, CLOSED, REPAIRED = "opened", "closed", "repaired"
_CHAIN = 16
_SLOT = struct.Struct("<8sI4xQQ16s16sQ16sd16sQ16sdQd")
_MAGIC = b"sotto.m\0"
SLOT = 512
NO_RUN = bytes(16)

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
        """When it was written. The first line, which charges nothing, has no date."""
        return datetime.fromisoformat(self.facts["at"])


def encode_line(facts: Facts, chain: bytes) -> tuple[bytes, bytes]:
    """A line behind `chain`, and the chain behind it."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    after = chained(chain, text)
    return after.hex().encode() + b" " + text + b"\n", after


def read_lines(raw: bytes) -> list[Line]:
    """All lines, up to the first that is not right."""
    found: list[Line] = []
    at, chain = 0, bytes(_CHAIN)
    while (end := raw.find(b"\n", at) + 1) > 0:
        text = raw[at + 2 * _CHAIN + 1 : end - 1]
        chain = chained(chain, text)
        if raw[at : at + 2 * _CHAIN + 1] != chain.hex().encode() + b" ":
            break
        found.append(Line(json.loads(text), chain, end))
        at = end
    return found


def dated(facts: Facts) -> Facts:
    """The same with the time, by which it is known what was spent lately."""
    return {**facts, "at": datetime.now(UTC).isoformat(timespec="seconds")}


def append_line(path: Path, lines: tuple[Line, ...], facts: Facts) -> tuple[Line, ...]:
    """Let another line last, with its time; returns all.

    What a torn one left behind the last whole line goes.
    """
    chain, at = (lines[-1].chain, lines[-1].end) if lines else (bytes(_CHAIN), 0)
    write_at(path, encode_line(dated(facts), chain)[0], at)
    return tuple(read_lines(path.read_bytes()))


def require_readable(lines: tuple[Line, ...], learner: str, path: Path) -> None:
    """The first line is this learner's, and of a format that is known.

    Raises:
        DataError: it is not.
    """
    first = lines[0].facts
    require_format(path, first.get("format", 0))
    if first.get("learner") != learner:
        raise DataError(
            f"{path} must be the ledger of {learner!r}, and is that of {first.get('learner')!r}: put back the right one, or "
            "leave it to `sottovoce ledger --repair`"
        )


def first_line(learner: str, store: str = "") -> Facts:
    """The first line of a ledger: its own number, drawn where it has none yet, and whose it is."""
    return {"kind": "store", "format": FORMAT, "store": store or secrets.token_hex(16), "learner": learner}


@dataclass(frozen=True, slots=True)
class LedgerLine:
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
    def but_absences(self) -> dict[str, Any]:
        """The spec without what may change in a run, and without what nobody set: another version may know more fields."""
        document: dict[str, Any] = _set(json.loads(self.spec))
        return {key: value for key, value in document.items() if key != "absences"}

    @property
    def roster(self) -> Roster:
        """Who takes part in which round."""
        return Roster.of_spec(json.loads(self.spec))

    @classmethod
    def of(cls, facts: Facts, learner: str) -> LedgerLine:
        """A run that a line has opened."""
        return cls(learner, facts["run_id"], facts["index"], facts["n_features"], facts["spec"])

    @classmethod
    def unknown(cls, learner: str, run_id: str) -> LedgerLine:
        """A run of which only its price is known."""
        return cls(learner, run_id or "repaired", 0, 1, json.dumps({"learners": 1, "algorithm": {"name": "unknown"}}))


def _set(section: Any) -> Any:
    """A document without fields that are None, as `plan_hash` takes it."""
    if not isinstance(section, dict):
        return section
    return {key: _set(value) for key, value in section.items() if value is not None}


# ---- the high-water mark ---------------------------------------------------------------------------------------------


class Mark(NamedTuple):
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

    store: bytes
    host: bytes
    lines: int
    lines_chain: bytes
    elsewhere: float = 0.0
    run: bytes = NO_RUN
    sequence: int = 0
    chain: bytes = bytes(16)
    spent: float = 0.0
    reserved: Grant = NOTHING
    turn: int = 0
    inode: int = 0


class MarkFile:
    """The mark of one learner, open for writing.

    Args:
        path: the file; made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = _newest(os.pread(self._file, 2 * SLOT, 0), path)
            self._inode = os.fstat(self._file).st_ino
            self._held = Held(path, self._file)
        except BaseException:
            self.close()
            raise
        self._turn = 0 if found is None else found.turn + 1

    def write(self, mark: Mark) -> None:
        """Make a mark, in the place of the one before the last.

        Raises:
            OSError: it could not be written.
        """
        os.pwrite(self._file, _encode(mark, self._turn, self._inode), self._turn % 2 * SLOT)
        self._turn += 1

    def settle(self, mark: Mark, *, sync: bool = True) -> None:
        """Make a mark in both places, and let it last: no mark of before is left to fall back to."""
        self.write(mark)
        self.write(mark)
        if sync:
            os.fsync(self._file)

    def require_in_place(self) -> None:
        """Raise `DataError` unless the file is still there; once settled it has both slots."""
        self._held.require_in_place(SLOT + 1)

    def close(self) -> None:
        """Close the file; it stays on disk."""
        os.close(self._file)


def write_mark(path: Path, mark: Mark) -> None:
    """Make a mark in both slots of a file, and let it last."""
    with closing(MarkFile(path)) as file:
        file.settle(mark)


def read_mark(path: Path, *, copied: bool = False) -> Mark | None:
    """The newest mark of a file; None where there is no whole one.

    Args:
        path: the file.
        copied: it may be a copy.

    Raises:
        DataError: it is of a newer format, or this file is a copy of the one that was written.
    """
    try:
        raw = path.read_bytes()
        inode = path.stat().st_ino
    except OSError:
        return None
    found = _newest(raw, path)
    if found is not None and found.inode != inode and not copied:
        raise DataError(
            f"{path} was written at another place: this state folder is a copy, and two learners with one ledger would each "
            "spend the whole budget. Start the learner on the folder that it was in. Where this one is the newest and the only "
            f"one that is left, say so: `sottovoce ledger --moved --state {path.parent} --learner {path.stem}`"
        )
    return found


def _encode(mark: Mark, turn: int, inode: int) -> bytes:
    *known, reserved, _, _ = mark
    raw = _SLOT.pack(_MAGIC, FORMAT, inode, turn, *known, *reserved)
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def _newest(raw: bytes, path: Path) -> Mark | None:
    slots = (_decode(raw[k * SLOT : (k + 1) * SLOT], path) for k in range(2))
    return max((mark for mark in slots if mark is not None), key=lambda mark: mark.turn, default=None)


def _decode(raw: bytes, path: Path) -> Mark | None:
    if len(raw) < _SLOT.size + 4 or not raw.startswith(_MAGIC):
        return None
    if zlib.crc32(raw[: _SLOT.size]) != int.from_bytes(raw[_SLOT.size : _SLOT.size + 4], "little"):
        return None
    _, form, inode, turn, *known, until, reserved = _SLOT.unpack_from(raw)
    require_format(path, form)
    return Mark._make((*known, Grant(until, reserved), turn, inode))
