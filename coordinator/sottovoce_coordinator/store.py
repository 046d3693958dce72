"""What a coordinator remembers: learners and runs, in SQLite, in a folder or in memory alone.

What a coordinator tells is written, and synced, before it is told: incarnations, runs, how far learners may go, ends. How far
learners are is written about once a second: it is a lower bound.

Fencing is pure. A name is bound to the state folder (store) that was first confirmed under it. Each start of a learner gets
the next incarnation, in two steps: it is issued, the learner writes it to its folder and confirms, and only then does it
count. A death in between is harmless. A number is never issued twice, so two processes never have the same one, and the lower
is refused.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import structlog

from sottovoce_coordinator.run_state import CaptureBinding, RunState
from sottovoce_core.errors import (
    CorruptStateError,
    FailedPrecondition,
    PermissionDenied,
    RemoteProtocolError,
    Unavailable,
)
from sottovoce_rpc.commands import Origin
from sottovoce_wire.v1 import coordinator_pb2, learner_pb2

log = structlog.get_logger()

FILE, FORMAT = "coordinator.sqlite", 1
NONCE_BYTES = 16
BUSY_TIMEOUT_S = 5.0
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
class StoredRun:
    """A run as it was last written.

    Attributes:
        run_id: its name.
        spec, n_features: what is run, as it crosses the wire.
        overhearing: by whom it is captured.
        record: a `sottovoce_wire.v1.Run` without spec: state, times, addresses, and how far learners were.
        granted: no round from this one on was ever granted; some below it may not have been.
    """

    run_id: str
    spec: str
    n_features: int
    capture_binding: CaptureBinding
    encoded_view: bytes
    leased_until: int = 0

    @property
    def learners(self) -> frozenset[str]:
        """Names of its learners."""
        return frozenset(each.status.learner for each in self.build_view().learners)

    @property
    def outcome(self) -> tuple[RunState, datetime | None]:
        """How it ended, and when."""
        run = self.build_view()
        return RunState.from_message(run), run.ended_at.ToDatetime(UTC) if run.HasField("ended_at") else None

    def build_view(self, *, include_spec: bool = False) -> coordinator_pb2.Run:
        """The run as it ended; `whole`: with the spec."""
        run = coordinator_pb2.Run.FromString(self.encoded_view)
        if include_spec:
            run.spec, run.n_features = self.spec, self.n_features
        return run

    def build_final_command(self) -> coordinator_pb2.Stop:
        """What a learner is told that comes back to it."""
        run = self.build_view()
        return coordinator_pb2.Stop(reason=run.detail, final=run.state != coordinator_pb2.RUN_STATE_FAILED)

    def mark_resumed(self, uncaptured: str) -> StoredRun:
        """A run that failed, as it goes on; `uncaptured`: why nothing of it is captured from now on."""
        run = self.build_view()
        begun = any(each.status.rounds_committed for each in run.learners)
        run.state = coordinator_pb2.RUN_STATE_RUNNING if begun else coordinator_pb2.RUN_STATE_CONNECTING
        run.detail, run.attempt, run.capture_error = "", run.attempt + 1, uncaptured
        run.ClearField("ended_at")
        run.ClearField("violations")  # whoever takes it up knows of it
        for each in run.learners:
            if each.status.state != learner_pb2.LEARNER_STATE_FINISHED:
                each.status.state, each.status.detail = learner_pb2.LEARNER_STATE_CONNECTING, ""
        return replace(self, encoded_view=run.SerializeToString())

    def mark_failed(self, detail: str, now: datetime) -> StoredRun:
        """A run that cannot go on."""
        run = self.build_view()
        run.state, run.detail = coordinator_pb2.RUN_STATE_FAILED, detail
        run.ended_at.FromDatetime(now)
        return replace(self, encoded_view=run.SerializeToString())


class CoordinatorStore:
    """The memory of one coordinator.

    Args:
        folder: where it stands; None: in memory, and gone with the process.

    Raises:
        FailedPrecondition: another coordinator uses the folder.
        CorruptStateError: what stands there is damaged, or of a newer version.
        Unavailable: it cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock = None if folder is None else _claim(folder)
        self._where = "the coordinator's memory" if folder is None else str(folder / FILE)
        try:
            self._db = sqlite3.connect(":memory:" if folder is None else folder / FILE, timeout=BUSY_TIMEOUT_S)
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
    def is_durable(self) -> bool:
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

    def load_learners(self) -> dict[str, LearnerBinding]:
        """All learners that have joined, by name."""
        rows = self._db.execute("SELECT name, store, issued, confirmed FROM member")
        return {name: LearnerBinding(*known) for name, *known in rows}

    def save_learner(self, name: str, known: LearnerBinding) -> None:
        """Write what is known of a learner."""
        with self._written() as db:
            values = (name, known.store_id, known.issued_incarnation, known.confirmed_incarnation)
            db.execute("INSERT OR REPLACE INTO member VALUES (?, ?, ?, ?)", values)

    # ---- runs ---------------------------------------------------------------------------------------------

    def load_runs(self) -> list[StoredRun]:
        """All runs that were not forgotten, oldest first."""
        rows = self._db.execute(
            "SELECT id, spec, n_features, overhearing, view, granted FROM run ORDER BY number"
        ).fetchall()
        return [StoredRun(i, spec, n, _heard(text), view, until) for i, spec, n, text, view, until in rows]

    def add_run(self, run: StoredRun) -> None:
        """Write a new run."""
        with self._written() as db:
            db.execute(
                "INSERT INTO run (id, spec, n_features, overhearing, view) VALUES (?, ?, ?, ?, ?)",
                (run.run_id, run.spec, run.n_features, _told(run.capture_binding), run.encoded_view),
            )

    def reserve_lease(self, run_id: str, until: int, ahead: int, view: bytes) -> None:
        """Before rounds below `until` are granted: write so many more, that not every grant is one write."""
        if until <= self._granted.get(run_id, 0):
            return
        with self._written() as db:
            db.execute("UPDATE run SET granted = max(granted, ?), view = ? WHERE id = ?", (until + ahead, view, run_id))
        self._granted[run_id] = until + ahead

    def save_views(self, views: Mapping[str, bytes]) -> None:
        """Write how runs stand, by their names."""
        with self._written() as db:
            db.executemany("UPDATE run SET view = ? WHERE id = ?", [(view, run_id) for run_id, view in views.items()])

    def update_spec(self, run_id: str, spec: str, view: bytes) -> None:
        """Before learners are told that others leave or join: write the spec of a run, and how it stands."""
        with self._written() as db:
            db.execute("UPDATE run SET spec = ?, view = ? WHERE id = ?", (spec, view, run_id))

    def delete_run(self, run_id: str) -> None:
        """Nobody will ask for a run again."""
        with self._written() as db:
            db.execute("DELETE FROM run WHERE id = ?", (run_id,))
        self._granted.pop(run_id, None)

    # ---- the file -----------------------------------------------------------------------------------------

    @contextmanager
    def _written(self) -> Iterator[sqlite3.Connection]:
        """One transaction, synced.

        Raises:
            CorruptStateError: the file is damaged.
            Unavailable: it cannot be written: nothing of the transaction counts.
        """
        try:
            with self._db:
                yield self._db
        except sqlite3.OperationalError as error:
            raise Unavailable(f"{self._where} cannot be written: {error}") from None
        except sqlite3.DatabaseError as error:
            raise CorruptStateError(f"{self._where} is damaged: {error}; {_WAY_OUT}") from None

    def _prepare(self) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise CorruptStateError(f"{self._where} is damaged: {' '.join(found.split())}; {_WAY_OUT}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise CorruptStateError(
                f"{self._where} must be of format {FORMAT}, got {version}: use the version that wrote it"
            )
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
def log_write_failures() -> Iterator[None]:
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
        raise FailedPrecondition(
            f"another coordinator uses the state folder {folder}: stop it, or take another folder"
        ) from None
    return file


def _told(heard: CaptureBinding) -> str:
    relays: Sequence[Any] = [[*edge, address] for edge, address in heard.relay_addresses.items()]
    return json.dumps(
        {"id": heard.capture_id, "location": heard.location, "mirror": heard.mirror_address, "relays": relays}
    )


def _heard(text: str) -> CaptureBinding:
    told = json.loads(text)
    relays = {(i, j): address for i, j, address in told["relays"]}
    return CaptureBinding(told["id"], told["location"], relays, told["mirror"])


# ---- fencing: state folders and incarnations of learners -------------------------------------------------------------


STORE_ID_BYTES = 16
MAX_INCARNATION = 2**32
"""That anything can have had: a learner may tell whatever it likes, and its next starts need higher numbers."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a learner says of itself when it joins.

    Attributes:
        name, store: whose it is, and the number of its state folder.
        incarnation: the highest that the folder knows.
        rejoins: it is this process's own, confirmed: only the stream broke.
        journaled: rounds that it has journaled in the run that is under way; None: it is in none, or in another.
    """

    name: str
    store_id: bytes
    incarnation: int = 0
    is_rejoin: bool = False
    rounds_committed: int | None = None

    def __post_init__(self) -> None:
        if len(self.store_id) != STORE_ID_BYTES:
            raise RemoteProtocolError(
                f"a learner must say which state folder it speaks from, in {STORE_ID_BYTES} bytes, got {len(self.store_id)}: "
                "is it older than its coordinator?"
            )


@dataclass(frozen=True, slots=True)
class LearnerBinding:
    """What is known of a learner.

    Attributes:
        store: the number of the state folder that joined last; the name is bound to it once an incarnation is confirmed.
        issued, confirmed: the last incarnations; 0: none.
    """

    store_id: bytes = b""
    issued_incarnation: int = 0
    confirmed_incarnation: int = 0

    def admit(self, claim: Claim, *, is_connected: bool, rounds_committed: int = 0) -> LearnerBinding:
        """The membership with which a learner is let in: `issued` is its incarnation, to be confirmed unless it rejoins.

        Args:
            claim: what it says.
            live: a stream of a learner of this name is there.
            journaled: rounds of the run under way that it is known to have journaled.

        Raises:
            RemoteProtocolError: nothing was started as often as it says.
            PermissionDenied: it has another state folder.
            Unavailable: the learner is here already; if it has died, that will be noticed.
            FailedPrecondition: its state is an old one, or it is an old process.
        """
        name = claim.name
        if claim.incarnation > (
            most := max(self.issued_incarnation, MAX_INCARNATION)
        ):  # by a coordinator of before, maybe
            raise RemoteProtocolError(
                f"an incarnation is one more at each start of a learner, at most {most}, got {claim.incarnation}"
            )
        if self.confirmed_incarnation and claim.store_id != self.store_id:
            raise PermissionDenied(
                f"learner {name!r} has joined with another state folder than this one: start it on that folder, or take "
                f"another name; if the folder is lost, `sottovoce rebind {name}` lets this one take its place"
            )
        if claim.is_rejoin:
            return self._back(claim)
        if is_connected:
            raise Unavailable(f"learner {name!r} is here already: stop the other process, or take another name")
        if claim.incarnation < self.confirmed_incarnation or (
            claim.rounds_committed is not None and claim.rounds_committed < rounds_committed
        ):
            raise FailedPrecondition(
                f"the state folder of learner {name!r} is an old one: it knows incarnation {claim.incarnation} and "
                f"{claim.rounds_committed or 0} rounds, and must know {self.confirmed_incarnation} and {rounds_committed}. It would say rounds again "
                "with other noise: restore the newest state"
            )
        if claim.rounds_committed is None and rounds_committed:
            raise FailedPrecondition(
                f"the state folder of learner {name!r} has no log of the run that this learner is in, and {rounds_committed} rounds "
                "were said in it: it would say them again with other noise. Restore the newest state; where the log is lost, or "
                f"the ledger was repaired, let the run go on without this learner (`sottovoce runs leave RUN {name}`), or stop it"
            )
        return replace(
            self, store_id=claim.store_id, issued_incarnation=max(self.issued_incarnation, claim.incarnation) + 1
        )

    def _back(self, claim: Claim) -> LearnerBinding:
        """Of a process that never stopped; what a coordinator without a memory has forgotten, the learner knows."""
        if claim.incarnation < self.issued_incarnation:
            raise FailedPrecondition(
                f"learner {claim.name!r} has been started again as incarnation {self.issued_incarnation}: this process, "
                f"{claim.incarnation}, is an old one and ends"
            )
        return LearnerBinding(claim.store_id, claim.incarnation, claim.incarnation)

    def confirm(self, claim: Claim, incarnation: int) -> LearnerBinding:
        """The membership of a learner that has written its incarnation.

        Raises:
            FailedPrecondition: another one was issued since.
        """
        if (claim.store_id, incarnation) != (self.store_id, self.issued_incarnation):
            raise FailedPrecondition(
                f"learner {claim.name!r} must confirm incarnation {self.issued_incarnation}, got {incarnation}: it was started twice"
            )
        return replace(self, confirmed_incarnation=incarnation)

    def unbind(self) -> LearnerBinding:
        """The next state folder of this name is taken, whatever it knows; numbers go on."""
        return LearnerBinding(issued_incarnation=self.issued_incarnation)
