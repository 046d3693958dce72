"""Services as processes of their own, each forked from one that has imported them: to be started takes no second."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import sottovoce_eavesdropper.service  # noqa: F401 - imported once, before processes are forked
from sottovoce_client.cli.services import _serve
from sottovoce_client.entry_point import main, set_environment_defaults
from sottovoce_learner import service as learner_service
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.host import serve
from tests.faults.victim import Point, strike

_LOOK_S = 0.02
_PORTS = range(12_000, 32_000)
"""Below those that a system gives to callers: a service that is started again finds its own one free."""

_LAZILY = ["networkx", "pandas", "pyarrow.compute", "pyarrow.pandas_compat", "pyarrow.parquet"]
"""What services import when they need it."""
_IMPORTED = ["__main__", "tests.faults.page", "tests.faults.soak", *_LAZILY]
"""By the process that all others are forked from."""

_forking = multiprocessing.get_context("forkserver")


class Process:
    """A service of ours.

    Args:
        work: what it does: `command` or `learners`, with its arguments.
        log: where its output goes: two files of this name, `.out` and `.err`.
        point: where it is struck; None: nowhere.
    """

    def __init__(self, work: Callable[[], None], log: Path, point: Point | None = None) -> None:
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        _forking.set_forkserver_preload(_IMPORTED)
        set_environment_defaults()  # before the first one is forked
        self._process: BaseProcess = _forking.Process(
            target=_begin, args=(work, str(self._out), str(self._err), point), daemon=True
        )
        self._process.start()
        self.killed = False

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended; None: it has not."""
        return self._process.exitcode

    @property
    def words(self) -> str:
        """What it has written to its standard error."""
        return self._err.read_text(encoding="utf-8", errors="replace") if self._err.exists() else ""

    async def up(self) -> bool:
        """Wait until it listens; False: it has ended."""
        while self.code is None:
            if self._out.exists() and self._out.read_text(encoding="utf-8").endswith("\n"):
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(json.loads(self._out.read_text(encoding="utf-8").splitlines()[0])["address"])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self.code is None:
            self.killed |= number is signal.SIGKILL
            os.kill(self.pid, number)

    async def over(self) -> int:
        """Wait for its end; returns how it ended."""
        while True:
            if (code := self.code) is not None:
                return code
            await asyncio.sleep(_LOOK_S)


def command(arguments: list[str]) -> None:
    """The command line, as it is."""
    sys.argv = ["sottovoce", *arguments]
    main()


def learners(configs: list[LearnerConfig]) -> None:
    """Learners in one process, each with a port of its own: by the command line they would have others after a death."""
    _serve(lambda: serve(configs))


def _begin(work: Callable[[], None], out: str, err: str, point: Point | None) -> None:
    for name, descriptor in ((out, 1), (err, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    # Logs are looked at when the run is over: they are not deleted then.
    learner_service.end_run = lambda *_, **__: None  # type: ignore[attr-defined]
    if point is not None:
        strike(point)
    work()


def chance(of: object) -> Random:
    """What is chosen by chance, the same again for the same name or number."""
    return Random(str(of))  # noqa: S311 - it chooses what goes wrong, and protects nothing


_GIVEN: deque[int] = deque(maxlen=1_000)


def free_port(random: Random) -> int:
    """A port that nobody listens on, nor was given before."""
    while True:
        if (port := random.choice(_PORTS)) in _GIVEN:
            continue
        with socket.socket() as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                asked.bind(("127.0.0.1", port))
            except OSError:
                continue
        _GIVEN.append(port)
        return port
