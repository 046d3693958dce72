"""A service that dies, or finds its disk full, at a named point: its methods are patched before it begins."""

from __future__ import annotations

import asyncio
import errno
import io
import math
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, NoReturn

from sottovoce_coordinator.run_controller import RunController
from sottovoce_coordinator.store import CoordinatorStore
from sottovoce_core.errors import Unavailable
from sottovoce_eavesdropper.storage import Folder
from sottovoce_learner.service import Learner
from sottovoce_learner.session import Session
from sottovoce_learner.storage.run_log import RunLog
from sottovoce_learner.storage.store import LearnerStore as Ledgers
from sottovoce_learner.storage.wal import EntryKind

FULL_S = 3.0
_TRANSPORT_S = 0.05
"""For what was said last."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Point(NamedTuple):
    """Where a process is struck.

    Attributes:
        name: a name of `POINTS`.
        nth: the how manieth time that it comes by.
    """

    name: str
    nth: int = 1


def strike(point: Point) -> None:
    """Let this process be struck at a point."""
    POINTS[point.name](point.nth)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process that was killed goes on")


def _usual(*arguments: Any) -> bool:
    return True


def _dies(owner: type, method: str, *, after: bool, when: Callable[..., bool] = _usual) -> Callable[[int], None]:
    """Death before or after the n-th call that counts."""

    def arm(nth: int) -> None:
        true, calls = getattr(owner, method), 0

        def due(*arguments: Any) -> bool:
            nonlocal calls
            calls += when(*arguments)
            return calls == nth and when(*arguments)

        @wraps(true)
        def plain(*arguments: Any) -> Any:
            last = due(*arguments)
            if last and not after:
                _die()
            found = true(*arguments)
            if last:
                _die()
            return found

        @wraps(true)
        async def awaited(*arguments: Any) -> Any:
            last = due(*arguments)
            if last and not after:
                _die()
            found = await true(*arguments)
            if last:
                _die()
            return found

        setattr(owner, method, awaited if asyncio.iscoroutinefunction(true) else plain)

    return arm


def _told_one(nth: int) -> None:
    """Death when the message is written to one neighbour, and nothing to the others."""
    true, calls = Session._send, 0

    async def say(self: Session, t: int) -> None:
        nonlocal calls
        calls += 1
        if calls < nth:
            await true(self, t)
            return
        frame = await self._speak(t)
        first = min(self.plan.get_round_part(t).out_neighbours)
        self.links[first].queue(t, frame)
        await self.links[first].wait_flushed()
        await asyncio.sleep(_TRANSPORT_S)
        _die()

    Session._send = say  # type: ignore[method-assign]


def _tells_one(method: str) -> Callable[[int], None]:
    """Death when one learner, and no other, was told what a step of a change tells all."""

    def arm(nth: int) -> None:
        true, calls = getattr(RunController, method), 0

        @wraps(true)
        def telling(self: RunController, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                tell, told = self._learners.enqueue_commands, list[str]()

                def to_one(run_id: str, directives: Any) -> None:
                    if not told:
                        told.extend(list(directives)[:1])
                        tell(run_id, {told[0]: directives[told[0]]})

                self._learners.enqueue_commands = to_one  # type: ignore[method-assign, assignment]
                asyncio.get_running_loop().call_later(_TRANSPORT_S, _die)
            return true(self, *arguments)

        setattr(RunController, method, telling)

    return arm


def _full(seconds: float) -> Callable[[int], None]:
    """From the n-th write to a log on, and for so long, the disk takes half of what it is given, and then nothing.

    What has its room already, as the mark has, is written.
    """

    def arm(nth: int) -> None:
        true, calls, until = os.pwrite, 0, math.inf

        def pwrite(file: int, raw: Any, at: int) -> int:
            nonlocal calls, until
            to_log = os.readlink(f"/proc/self/fd/{file}").endswith(".log")
            calls += to_log
            if calls < nth or time.monotonic() >= until or not to_log:
                return true(file, raw, at)
            if until == math.inf:
                until = time.monotonic() + seconds
                true(file, raw[: len(raw) // 2], at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.pwrite = pwrite

    return arm


def _full_captures(nth: int) -> None:
    """From the n-th file on, none of a capture can be written."""
    true, calls = Folder.write, 0

    def write(self: Folder, name: str, content: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true(self, name, content)

    Folder.write = write  # type: ignore[method-assign]


def _full_in_a_change(nth: int) -> None:
    """From the n-th change of who takes part on, and for some seconds, a coordinator's disk takes nothing."""
    true, calls = RunController._quiesce, 0

    @wraps(true)
    async def rest(self: RunController, course: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            _full_for_a_while(1)
        await true(self, course)

    RunController._quiesce = rest  # type: ignore[method-assign, assignment]


def _full_when_all_rest(nth: int) -> None:
    """As before, once all rest for that."""
    true, calls = CoordinatorStore.update_spec, 0

    @wraps(true)
    def amend(self: CoordinatorStore, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            _full_for_a_while(1)
        true(self, *arguments)

    CoordinatorStore.update_spec = amend  # type: ignore[assignment, method-assign]


def _full_for_a_while(nth: int) -> None:
    """From the n-th write on, and for some seconds, a coordinator's disk takes nothing."""
    true, calls, until = CoordinatorStore._transaction, 0, math.inf

    @contextmanager
    def written(self: CoordinatorStore) -> Iterator[sqlite3.Connection]:
        nonlocal calls, until
        calls += 1
        if calls == nth:
            until = time.monotonic() + FULL_S
        if calls >= nth and time.monotonic() < until:
            raise Unavailable(f"{self._location} cannot be written: database or disk is full")
        with true(self) as db:
            yield db

    CoordinatorStore._transaction = written  # type: ignore[method-assign]


def _read_only(nth: int) -> None:
    """Nothing can be opened for writing but what is no file of a state."""
    true_open, true_io = os.open, io.open

    def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & _WRITES and not str(path).startswith("/dev/"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return true_open(path, flags, *more, **named)

    def io_opened(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        if set(mode) & set("wax+") and not str(path).startswith("/dev/"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return true_io(path, mode, *more, **named)

    os.open, io.open = opened, io_opened  # type: ignore[assignment]


def _a_round(log: RunLog, kind: EntryKind, *more: Any) -> bool:
    return kind is EntryKind.ROUND


def _confirmation(store: CoordinatorStore, name: str, known: Any) -> bool:
    return bool(known.issued_incarnation == known.confirmed_incarnation)


def _written_grant(store: CoordinatorStore, run_id: str, until: int, *more: Any) -> bool:
    return until > store._leased_until.get(run_id, 0)


POINTS: dict[str, Callable[[int], None]] = {
    "drawn": _dies(RunLog, "write_ahead", after=False),
    "journaled": _dies(RunLog, "_append", after=True, when=_a_round),
    "marked": _dies(RunLog, "write_ahead", after=True),
    "told one": _told_one,
    "heard": _dies(Session, "hear", after=True),
    "learned": _dies(Session, "_learn", after=True),
    "kept": _dies(RunLog, "keep", after=True),
    "closed": _dies(RunLog, "close_rounds", after=True),
    "full": _full(math.inf),
    "no room for a while": _full(FULL_S),
    "full captures": _full_captures,
    "full for a while": _full_for_a_while,
    "full in a change": _full_in_a_change,
    "full when all rest": _full_when_all_rest,
    "read-only": _read_only,
    "before a grant": _dies(CoordinatorStore, "reserve_lease", after=False, when=_written_grant),
    "after a grant": _dies(CoordinatorStore, "reserve_lease", after=True, when=_written_grant),
    "before a confirmation": _dies(CoordinatorStore, "save_learner", after=False, when=_confirmation),
    "after a confirmation": _dies(CoordinatorStore, "save_learner", after=True, when=_confirmation),
    "before all rest": _dies(RunController, "_quiesce", after=False),
    "one was told to rest": _tells_one("_quiesce"),
    "all rest": _dies(RunController, "_quiesce", after=True),
    "a change is written": _dies(CoordinatorStore, "update_spec", after=True),
    "one was told a change": _tells_one("_restart_learners"),
    "told to rest": _dies(Learner, "_end_run", after=False),
    "rests": _dies(Learner, "_end_run", after=True),
    "before a ledger's line": _dies(Ledgers, "_open", after=False),
    "after a ledger's line": _dies(Ledgers, "_open", after=True),
    "prepared": _dies(Learner, "_prepare", after=True),
}
