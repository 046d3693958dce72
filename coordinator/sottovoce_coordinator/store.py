"""Durable state of a coordinator: learners and runs, in SQLite, in a folder or in memory only.

What a coordinator sends is written, and synced, before it is sent: incarnations, runs, leases, ends. The learners' progress is
written about once a second: it is a lower bound.

Fencing is pure. A name is bound to the state folder (store) that was first confirmed under it. Each start of a learner gets the
next incarnation, in two steps: the coordinator issues it; the learner writes it to its folder and confirms; only then does it
count. A death in between is harmless. A number is never issued twice, so two processes never have the same one, and the lower is
refused.
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

FILE, FORMAT = "coordinator.sqlite", 2
NONCE_BYTES = 16
BUSY_TIMEOUT_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS state (term INTEGER NOT NULL, nonce BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS member (
    name TEXT PRIMARY KEY, store BLOB NOT NULL, issued INTEGER NOT NULL, confirmed INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS run (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, spec TEXT NOT NULL, n_features INTEGER NOT NULL,
    capture_binding TEXT NOT NULL, view BLOB NOT NULL, leased_until INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it was last written.

    Attributes:
        run_id: id of the run.
        spec, n_features: the run, as on the wire.
        capture_binding: capture of the run.
        encoded_view: a `sottovoce_wire.v1.Run` without spec: state, times, addresses, and the learners' progress.
        leased_until: no round from this one on was ever leased; some below it may not have been.
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
        """State of the run, and when it ended."""
        run = self.build_view()
        return RunState.from_message(run), run.ended_at.ToDatetime(UTC) if run.HasField("ended_at") else None

    def build_view(self, *, include_spec: bool = False) -> coordinator_pb2.Run:
        """Decode the last view of the run; with its spec on request."""
        run = coordinator_pb2.Run.FromString(self.encoded_view)
        if include_spec:
            run.spec, run.n_features = self.spec, self.n_features
        return run

    def build_final_command(self) -> coordinator_pb2.Stop:
        """Build the Stop command for a learner that reconnects after the run has ended."""
        run = self.build_view()
        return coordinator_pb2.Stop(reason=run.detail, final=run.state != coordinator_pb2.RUN_STATE_FAILED)

    def mark_resumed(self, capture_loss_reason: str) -> StoredRun:
        """Return a failed run as resumed; `capture_loss_reason`: why nothing of it is captured from now on."""
        run = self.build_view()
        begun = any(each.status.rounds_committed for each in run.learners)
        run.state = coordinator_pb2.RUN_STATE_RUNNING if begun else coordinator_pb2.RUN_STATE_CONNECTING
        run.detail, run.attempt, run.capture_error = "", run.attempt + 1, capture_loss_reason
        run.ClearField("ended_at")
        run.ClearField("violations")  # the operator who resumes it knows of them
        for each in run.learners:
            if each.status.state != learner_pb2.LEARNER_STATE_FINISHED:
                each.status.state, each.status.detail = learner_pb2.LEARNER_STATE_CONNECTING, ""
        return replace(self, encoded_view=run.SerializeToString())

    def mark_failed(self, detail: str, now: datetime) -> StoredRun:
        """Return the run as failed."""
        run = self.build_view()
        run.state, run.detail = coordinator_pb2.RUN_STATE_FAILED, detail
        run.ended_at.FromDatetime(now)
        return replace(self, encoded_view=run.SerializeToString())


class CoordinatorStore:
    """Store of one coordinator.

    Args:
        folder: state folder; None: in memory, lost with the process.

    Raises:
        FailedPrecondition: another coordinator uses the folder.
        CorruptStateError: the file is damaged, or of another version.
        Unavailable: it cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock = None if folder is None else _lock_folder(folder)
        self._location = "the coordinator's memory" if folder is None else str(folder / FILE)
        try:
            self._db = sqlite3.connect(":memory:" if folder is None else folder / FILE, timeout=BUSY_TIMEOUT_S)
        except BaseException:
            self._release()
            raise
        try:
            with self._transaction():
                self._prepare()
            self.origin = self._begin_term() if folder is not None else Origin(0, secrets.token_bytes(NONCE_BYTES))
        except BaseException:
            self.close()
            raise
        self._leased_until: dict[str, int] = {}

    @property
    def is_durable(self) -> bool:
        """Return whether it outlives the process."""
        return self.origin.term > 0

    def outrank(self, term: int) -> None:
        """Take a later term than that of a coordinator whose state is lost."""
        if self.origin.term > term:
            return
        now = replace(self.origin, term=term + 1)
        with self._transaction() as db:
            db.execute("UPDATE state SET term = ?", (now.term,))
        self.origin = now

    def close(self) -> None:
        """Close the file, and unlock the folder."""
        self._db.close()
        self._release()

    # ---- learners -----------------------------------------------------------------------------------------

    def load_learners(self) -> dict[str, LearnerBinding]:
        """Load the bindings of all learners that have joined, by name."""
        rows = self._db.execute("SELECT name, store, issued, confirmed FROM member")
        return {name: LearnerBinding(*binding) for name, *binding in rows}

    def save_learner(self, name: str, binding: LearnerBinding) -> None:
        """Write the binding of a learner."""
        with self._transaction() as db:
            values = (name, binding.store_id, binding.issued_incarnation, binding.confirmed_incarnation)
            db.execute("INSERT OR REPLACE INTO member VALUES (?, ?, ?, ?)", values)

    # ---- runs ---------------------------------------------------------------------------------------------

    def load_runs(self) -> list[StoredRun]:
        """Load all remembered runs, oldest first."""
        rows = self._db.execute(
            "SELECT id, spec, n_features, capture_binding, view, leased_until FROM run ORDER BY number"
        ).fetchall()
        return [StoredRun(i, spec, n, _decode_binding(text), view, until) for i, spec, n, text, view, until in rows]

    def add_run(self, run: StoredRun) -> None:
        """Write a new run."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO run (id, spec, n_features, capture_binding, view) VALUES (?, ?, ?, ?, ?)",
                (run.run_id, run.spec, run.n_features, _encode_binding(run.capture_binding), run.encoded_view),
            )

    def reserve_lease(self, run_id: str, until: int, ahead: int, view: bytes) -> None:
        """Write a lease before it is sent, extended by `ahead` rounds, so that not every lease needs a write."""
        if until <= self._leased_until.get(run_id, 0):
            return
        with self._transaction() as db:
            db.execute(
                "UPDATE run SET leased_until = max(leased_until, ?), view = ? WHERE id = ?",
                (until + ahead, view, run_id),
            )
        self._leased_until[run_id] = until + ahead

    def save_views(self, views: Mapping[str, bytes]) -> None:
        """Write the views of runs, by id."""
        with self._transaction() as db:
            db.executemany("UPDATE run SET view = ? WHERE id = ?", [(view, run_id) for run_id, view in views.items()])

    def update_spec(self, run_id: str, spec: str, view: bytes) -> None:
        """Write the changed spec and the view of a run, before learners are informed that others leave or join."""
        with self._transaction() as db:
            db.execute("UPDATE run SET spec = ?, view = ? WHERE id = ?", (spec, view, run_id))

    def delete_run(self, run_id: str) -> None:
        """Delete a run."""
        with self._transaction() as db:
            db.execute("DELETE FROM run WHERE id = ?", (run_id,))
        self._leased_until.pop(run_id, None)

    # ---- the file -----------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction, and sync it.

        Raises:
            CorruptStateError: the file is damaged.
            Unavailable: it cannot be written; the transaction is rolled back.
        """
        try:
            with self._db:
                yield self._db
        except sqlite3.OperationalError as error:
            raise Unavailable(f"{self._location} cannot be written: {error}") from None
        except sqlite3.DatabaseError as error:
            raise CorruptStateError(f"{self._location} is damaged: {error}; {_RECOVERY_HINT}") from None

    def _prepare(self) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise CorruptStateError(f"{self._location} is damaged: {' '.join(found.split())}; {_RECOVERY_HINT}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise CorruptStateError(
                f"{self._location} must be of format {FORMAT}, got {version}: use the version that wrote it"
            )
        self._db.executescript(f"{_TABLES} PRAGMA user_version = {FORMAT};")

    def _begin_term(self) -> Origin:
        with self._transaction() as db:
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
    """Log a failed write that will be repeated soon, or may be lost."""
    try:
        yield
    except Unavailable as error:
        log.warning("not written", reason=str(error))


_RECOVERY_HINT = "restore an intact copy, or start with another folder: learners bring their incarnations along"


def _lock_folder(folder: Path) -> TextIO:
    """Lock the folder against other coordinators, until the file is closed or this process dies."""
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


def _encode_binding(binding: CaptureBinding) -> str:
    relays: Sequence[Any] = [[*edge, address] for edge, address in binding.relay_addresses.items()]
    return json.dumps(
        {"id": binding.capture_id, "location": binding.location, "mirror": binding.mirror_address, "relays": relays}
    )


def _decode_binding(text: str) -> CaptureBinding:
    document = json.loads(text)
    relays = {(i, j): address for i, j, address in document["relays"]}
    return CaptureBinding(document["id"], document["location"], relays, document["mirror"])


# ---- fencing: state folders and incarnations of learners -------------------------------------------------------------


STORE_ID_BYTES = 16
MAX_INCARNATION = 2**32
"""Maximum incarnation: a learner may claim any number, and its next starts need higher ones."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A learner's claim to a name when it joins.

    Attributes:
        name, store_id: the name, and the id of its state folder.
        incarnation: the highest in the folder.
        is_rejoin: it is this process's own and confirmed: only the stream broke.
        rounds_committed: committed rounds of the active run; None: it is in none, or in another.
    """

    name: str
    store_id: bytes
    incarnation: int = 0
    is_rejoin: bool = False
    rounds_committed: int | None = None

    def __post_init__(self) -> None:
        if len(self.store_id) != STORE_ID_BYTES:
            raise RemoteProtocolError(
                f"a learner must send the id of its state folder, in {STORE_ID_BYTES} bytes, got {len(self.store_id)}: "
                "is it older than its coordinator?"
            )


@dataclass(frozen=True, slots=True)
class LearnerBinding:
    """Binding of a name to a state folder.

    Attributes:
        store_id: id of the state folder that joined last; the name is bound to it once an incarnation is confirmed.
        issued_incarnation, confirmed_incarnation: the last ones; 0: none.
    """

    store_id: bytes = b""
    issued_incarnation: int = 0
    confirmed_incarnation: int = 0

    def admit(self, claim: Claim, *, is_connected: bool, rounds_committed: int = 0) -> LearnerBinding:
        """Admit a learner; return its binding, whose issued incarnation it must confirm unless it rejoins.

        Args:
            claim: its claim.
            is_connected: another stream of a learner of this name is connected.
            rounds_committed: rounds of the active run that it is known to have committed.

        Raises:
            RemoteProtocolError: the claimed incarnation is impossible.
            PermissionDenied: it has another state folder.
            Unavailable: the learner is connected already; if it has died, that will be detected.
            FailedPrecondition: its state is outdated, or it is an old process.
        """
        name = claim.name
        # Above its own numbers, too: an earlier coordinator without a state may have issued more.
        max_incarnation = max(self.issued_incarnation, MAX_INCARNATION)
        if claim.incarnation > max_incarnation:
            raise RemoteProtocolError(
                f"an incarnation is one more at each start of a learner, at most {max_incarnation}, got {claim.incarnation}"
            )
        if self.confirmed_incarnation and claim.store_id != self.store_id:
            raise PermissionDenied(
                f"learner {name!r} has joined with another state folder than this one: start it on that folder, or take "
                f"another name; if the folder is lost, `sottovoce rebind {name}` lets this one take its place"
            )
        if claim.is_rejoin:
            return self._readmit(claim)
        if is_connected:
            raise Unavailable(f"learner {name!r} is connected already: stop the other process, or take another name")
        if claim.incarnation < self.confirmed_incarnation or (
            claim.rounds_committed is not None and claim.rounds_committed < rounds_committed
        ):
            raise FailedPrecondition(
                f"the state folder of learner {name!r} is outdated: it has incarnation {claim.incarnation} and "
                f"{claim.rounds_committed or 0} rounds, and must have {self.confirmed_incarnation} and {rounds_committed}. "
                "It would send "
                "rounds again with other noise: restore the newest state"
            )
        if claim.rounds_committed is None and rounds_committed:
            raise FailedPrecondition(
                f"the state folder of learner {name!r} has no log of the run that this learner is in, and "
                f"{rounds_committed} rounds "
                "were sent in it: it would send them again with other noise. Restore the newest state; if the log is lost, or "
                f"the ledger was repaired, let the run go on without this learner (`sottovoce runs leave RUN {name}`), or stop it"
            )
        return replace(
            self, store_id=claim.store_id, issued_incarnation=max(self.issued_incarnation, claim.incarnation) + 1
        )

    def _readmit(self, claim: Claim) -> LearnerBinding:
        """Admit a process that never stopped; its claim restores what a coordinator without a state has lost."""
        if claim.incarnation < self.issued_incarnation:
            raise FailedPrecondition(
                f"learner {claim.name!r} has been started again as incarnation {self.issued_incarnation}: this process, "
                f"{claim.incarnation}, is an old one and ends"
            )
        return LearnerBinding(claim.store_id, claim.incarnation, claim.incarnation)

    def confirm(self, claim: Claim, incarnation: int) -> LearnerBinding:
        """Return the binding of a learner that has stored its incarnation.

        Raises:
            FailedPrecondition: another one was issued since.
        """
        if (claim.store_id, incarnation) != (self.store_id, self.issued_incarnation):
            raise FailedPrecondition(
                f"learner {claim.name!r} must confirm incarnation {self.issued_incarnation}, got {incarnation}: it was "
                "started twice"
            )
        return replace(self, confirmed_incarnation=incarnation)

    def unbind(self) -> LearnerBinding:
        """Return a binding that allows any next state folder of this name; incarnations continue."""
        return LearnerBinding(issued_incarnation=self.issued_incarnation)
