"""The ledger's lines of one learner: a file of chained lines that only grows.

A line is `CHAIN JSON`: 16 bytes in hexadecimal, which are `SHA-256(chain of the line before | JSON)[:16]`. The first one is the
ledger's own number and the learner's name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sottovoce.errors import DataError

FORMAT = 1
_CHAIN = 16

Facts = Mapping[str, Any]


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


def encode(facts: Facts, chain: bytes) -> tuple[bytes, bytes]:
    """A line behind `chain`, and the chain behind it."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    after = _after(chain, text)
    return after.hex().encode() + b" " + text + b"\n", after


def walk(raw: bytes) -> list[Line]:
    """All lines, up to the first that is not right."""
    found: list[Line] = []
    at, chain = 0, bytes(_CHAIN)
    while (end := raw.find(b"\n", at) + 1) > 0:
        told, text = raw[at : at + 2 * _CHAIN], raw[at + 2 * _CHAIN + 1 : end - 1]
        chain = _after(chain, text)
        if told != chain.hex().encode() or raw[at + 2 * _CHAIN : at + 2 * _CHAIN + 1] != b" ":
            break
        found.append(Line(json.loads(text), chain, end))
        at = end
    return found


def require_readable(lines: list[Line], learner: str, path: Path) -> None:
    """The first line is this learner's, and of a format that is known.

    Raises:
        DataError: it is not.
    """
    first = lines[0].facts
    if (form := first.get("format", 0)) > FORMAT:
        raise DataError(f"{path} has format {form}, and this version reads up to {FORMAT}: take a newer Sottovoce")
    if first.get("learner") != learner:
        raise DataError(
            f"{path} must be the ledger of {learner!r}, and is that of {first.get('learner')!r}: put back the right one, or "
            "leave it to `sottovoce ledger --repair`"
        )


def first(store: str, learner: str) -> Facts:
    """The first line of a ledger: its own number, and whose it is."""
    return {"kind": "store", "format": FORMAT, "store": store, "learner": learner}


def dated(facts: Facts) -> Facts:
    """The same with the time, by which it is known what was spent lately."""
    return {**facts, "at": datetime.now(UTC).isoformat(timespec="seconds")}


def append(path: Path, line: bytes, at: int) -> None:
    """Let a line last; what a torn one left behind the last whole line goes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, at)
        if os.pwrite(descriptor, line, at) != len(line):
            os.ftruncate(descriptor, at)
            raise OSError(28, "No space left on device")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _after(chain: bytes, text: bytes) -> bytes:
    return hashlib.sha256(chain + text).digest()[:_CHAIN]


class Held:
    """A file that this process relies on, and where it must stay.

    Args:
        path: its place.
        descriptor: of the open file; None: whatever stands there now.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        found = path.stat() if descriptor is None else os.fstat(descriptor)
        self._path, self._file, self._size = os.fspath(path), (found.st_dev, found.st_ino), found.st_size

    def require_in_place(self, size: int | None = None) -> None:
        """Raise an error unless the same file is still there, with its content: one or two microseconds.

        Args:
            size: least number of bytes that it must have; None: as many as it had.

        Raises:
            DataError: it was deleted, moved, replaced or cut.
        """
        try:
            found = os.stat(self._path)
        except OSError:
            found = None
        if (
            found is None
            or (found.st_dev, found.st_ino) != self._file
            or found.st_size < (self._size if size is None else size)
        ):
            raise DataError(
                f"the state folder must stay where it is while its learner runs, and {self._path} was deleted, moved, replaced "
                "or cut: nothing more is sent. Stop the learner, and start it again when the folder is back as it was; where "
                "it is lost, charge what `sottovoce runs show` says to a new one "
                "(docs/deploy.md#backup-restore-and-move-of-a-learner)"
            )


def ending(folder: Path, suffix: str) -> list[Path]:
    """What stands in a folder under a name with this end, by name: a folder of many learners is looked through often."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [folder / name for name in sorted(names) if name.endswith(suffix)]


def content(path: Path) -> bytes:
    """Of a file; nothing where it is not, or was deleted just now."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
