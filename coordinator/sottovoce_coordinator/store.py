"""What a coordinator remembers: learners and runs, in SQLite, in a folder or in memory alone.

What a coordinator tells is written, and synced, before it is told: incarnations, runs, how far learners may go, ends. How far
learners are is written about once a second: it is a lower bound.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import structlog

from sottovoce.errors import DataError, NotReady, Unavailable
from sottovoce_coordinator.fencing import Membership
from sottovoce_coordinator.runs import Overhearing
from sottovoce_rpc.directives import Origin

log = structlog.get_logger()

FILE, FORMAT = "coordinator.sqlite", 1
NONCE_BYTES = 16
BUSY_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS state (term INTEGER NOT NULL, nonce BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS member (
    name TEXT PRIMARY KEY, store BLOB NOT NULL, issued INTEGER NOT NULL, confirmed INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS run (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, spec TEXT NOT NULL, n_features INTEGER NOT NULL,
    overhearing TEXT NOT NULL, view BLOB NOT NULL, granted INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run as it was last written.

    Attributes:
        run_id: its name.
        spec, n_features: what is run, as it crosses the wire.
        overhearing: by whom it is captured.
        view: a `sottovoce_wire.v1.Run` without spec: state, times, addresses, and how far learners were.
        granted: no round from this one on was ever granted; some below it may not have been.
    """

    run_id: str
    spec: str
    n_features: int
    overhearing: Overhearing
    view: bytes
    granted: int = 0


class Store:
    """The memory of one coordinator.

    Args:
        folder: where it stands; None: in memory, and gone with the process.

    Raises:
        NotReady: another coordinator uses the folder.
        DataError: what stands there is damaged, or of a newer version.
        Unavailable: it cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock = None if folder is None else _claim(folder)
        self._where = "the coordinator's memory" if folder is None else str(folder / FILE)
        try:
            self._db = sqlite3.connect(":memory:" if folder is None else folder / FILE, timeout=BUSY_S)
        except BaseException:
            self._release()
            raise
        try:
            with self._written():
                self._prepare()
            self.origin = self._begin_term() if folder is not None else Origin(0, secrets.token_bytes(NONCE_BYTES))
        except BaseException:
            self.close()
            raise
        self._granted: dict[str, int] = {}

    @property
    def durable(self) -> bool:
        """True when it outlives the process."""
        return self.origin.term > 0

    def outrank(self, term: int) -> None:
        """Be of a later term than a coordinator whose state is lost."""
        if self.origin.term > term:
            return
        now = replace(self.origin, term=term + 1)
        with self._written() as db:
            db.execute("UPDATE state SET term = ?", (now.term,))
        self.origin = now

    def close(self) -> None:
        """Let others have the folder."""
        self._db.close()
        self._release()

    # ---- learners -----------------------------------------------------------------------------------------

    def members(self) -> dict[str, Membership]:
        """All learners that have joined, by name."""
        rows = self._db.execute("SELECT name, store, issued, confirmed FROM member")
        return {name: Membership(*known) for name, *known in rows}

    def remember(self, name: str, known: Membership) -> None:
        """Write what is known of a learner."""
        with self._written() as db:
            values = (name, known.store, known.issued, known.confirmed)
            db.execute("INSERT OR REPLACE INTO member VALUES (?, ?, ?, ?)", values)

    # ---- runs ---------------------------------------------------------------------------------------------

    def runs(self) -> list[KeptRun]:
        """All runs that were not forgotten, oldest first."""
        rows = self._db.execute(
            "SELECT id, spec, n_features, overhearing, view, granted FROM run ORDER BY number"
        ).fetchall()
        return [KeptRun(i, spec, n, _heard(text), view, until) for i, spec, n, text, view, until in rows]

    def begin(self, run: KeptRun) -> None:
        """Write a new run."""
        with self._written() as db:
            db.execute(
                "INSERT INTO run (id, spec, n_features, overhearing, view) VALUES (?, ?, ?, ?, ?)",
                (run.run_id, run.spec, run.n_features, _told(run.overhearing), run.view),
            )

    def grant(self, run_id: str, until: int, ahead: int, view: bytes) -> None:
        """Before rounds below `until` are granted: write so many more, that not every grant is one write."""
        if until <= self._granted.get(run_id, 0):
            return
        with self._written() as db:
            db.execute("UPDATE run SET granted = max(granted, ?), view = ? WHERE id = ?", (until + ahead, view, run_id))
        self._granted[run_id] = until + ahead

    def keep(self, views: Mapping[str, bytes]) -> None:
        """Write how runs stand, by their names."""
        with self._written() as db:
            db.executemany("UPDATE run SET view = ? WHERE id = ?", [(view, run_id) for run_id, view in views.items()])

    def amend(self, run_id: str, spec: str, view: bytes) -> None:
        """Before learners are told that others leave or join: write the spec of a run, and how it stands."""
        with self._written() as db:
            db.execute("UPDATE run SET spec = ?, view = ? WHERE id = ?", (spec, view, run_id))

    def forget(self, run_id: str) -> None:
        """Nobody will ask for a run again."""
        with self._written() as db:
            db.execute("DELETE FROM run WHERE id = ?", (run_id,))
        self._granted.pop(run_id, None)

    # ---- the file -----------------------------------------------------------------------------------------

    @contextmanager
    def _written(self) -> Iterator[sqlite3.Connection]:
        """One transaction, synced.

        Raises:
            DataError: the file is damaged.
            Unavailable: it cannot be written: nothing of the transaction counts.
        """
        try:
            with self._db:
                yield self._db
        except sqlite3.OperationalError as error:
            raise Unavailable(f"{self._where} cannot be written: {error}") from None
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self._where} is damaged: {error}; {_WAY_OUT}") from None

    def _prepare(self) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise DataError(f"{self._where} is damaged: {' '.join(found.split())}; {_WAY_OUT}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise DataError(f"{self._where} must be of format {FORMAT}, got {version}: use the version that wrote it")
        self._db.executescript(f"{_TABLES} PRAGMA user_version = {FORMAT};")

    def _begin_term(self) -> Origin:
        with self._written() as db:
            (last,) = db.execute("SELECT coalesce(max(term), 0) FROM state").fetchone()
            origin = Origin(last + 1, secrets.token_bytes(NONCE_BYTES))
            db.execute("DELETE FROM state")
            db.execute("INSERT INTO state VALUES (?, ?)", (origin.term, origin.nonce))
        return origin

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()


@contextmanager
def whatever_disk() -> Iterator[None]:
    """What cannot be written now is tried again soon, or is none the worse for it."""
    try:
        yield
    except Unavailable as error:
        log.warning("not written", reason=str(error))


_WAY_OUT = "restore it from where it is whole, or start with another folder: learners bring their incarnations along"


def _claim(folder: Path) -> TextIO:
    """Keep every other coordinator off this folder, until the file is closed or this process dies."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / f"{FILE}.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"the state folder {folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise NotReady(f"another coordinator uses the state folder {folder}: stop it, or take another folder") from None
    return file


def _told(heard: Overhearing) -> str:
    relays: Sequence[Any] = [[*edge, address] for edge, address in heard.relays.items()]
    return json.dumps({"id": heard.capture_id, "location": heard.location, "mirror": heard.mirror, "relays": relays})


def _heard(text: str) -> Overhearing:
    told = json.loads(text)
    relays = {(i, j): address for i, j, address in told["relays"]}
    return Overhearing(told["id"], told["location"], relays, told["mirror"])
