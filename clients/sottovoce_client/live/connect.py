"""Connecting to a learner, from programs with and without `await`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_client.live.sender import LearnerEndpoint
from sottovoce_client.live.sync_learner import SyncLearner
from sottovoce_core.errors import FailedPrecondition, SottovoceError, SpecError
from sottovoce_core.text import escape_control
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.server import wait_until_reachable
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import learner_pb2, learner_pb2_grpc

_CONNECT_TIMEOUT_S = 10.0
_NO_RUN_RETRY_INTERVAL_S = 0.2


class connect_learner:  # noqa: N801 - it reads as a function, and is entered in two ways
    """A learner that is in a run of live records (`data.source: live`), for an `async with` block, or a plain `with`.

    Args:
        address: of the learner, `host:port`.
        source: what your records are counted under. Who feeds under the same name later goes on where this one ended.
        name: of the learner, which it must say, and its certificate hold where it has one (default: any).
        identity: folder with the identity of the learner's owner or feeder, `tls.crt`, `tls.key` and `ca.crt`; None: this machine
            only.
        insecure: without one, speak in the clear to other machines, too.
        patience_s: how long the learner may be away, or between two runs, before a call fails.
        allow_imports: import code that the run's spec names (`module:Class`); whoever starts runs can then have any installed
            code run here.
        tell: called with why the learner is waited for, as soon as that is known (default: nobody is told).

    Raises:
        SpecError: it is on another machine, and there is no identity; or the records of its run are not live.
        FailedPrecondition: it is another learner than `name`, or in no run, for longer than `patience_s`; or the files of the identity
            cannot be used.
        Unavailable: nobody answers there.

    >>> import asyncio
    >>> async def main() -> None:
    ...     async with connect_learner("host:7001", source="ward 3") as learner:
    ...         await learner.feed([{"age": 61, "ward": "icu", "outcome": "home"}])
    ...         print((await learner.predict([{"age": 70, "ward": "icu"}])).labels)
    """

    def __init__(
        self,
        address: str,
        *,
        source: str = "client",
        name: str = "",
        identity: str | Path | None = None,
        insecure: bool = False,
        patience_s: float = 60.0,
        allow_imports: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        folder = None if identity is None else Path(identity)
        self._at = LearnerEndpoint(address, name, Credentials(folder, insecure))
        self._source, self._patience_s, self._imports = source, patience_s, allow_imports
        self._tell, self._told = notify, ""
        self._tasks = Tasks()
        self._channel: Any = None

    async def __aenter__(self) -> ConnectedLearner:
        at = self._at
        self._channel = at.open_channel()
        try:
            who, seconds = f"the learner at {at.address}", min(_CONNECT_TIMEOUT_S, self._patience_s)
            await wait_until_reachable(self._channel, who, seconds, lambda why, _: self._waits(why))
            stub = learner_pb2_grpc.LearnerStub(self._channel)
            told = await self._in_a_run(stub)
            try:
                return ConnectedLearner(
                    at,
                    stub,
                    told,
                    self._source,
                    self._patience_s,
                    self._tasks,
                    self._waits,
                    allow_imports=self._imports,
                )
            except SpecError as error:
                raise await self._refused(stub, error) from None
        except BaseException:
            await self._channel.close()
            raise

    def _waits(self, why: str) -> None:
        if self._tell is not None and why != self._told:
            self._told = why
            self._tell(why)

    async def _refused(self, stub: Any, error: SpecError) -> SpecError:
        """Why a run takes no records from here; of one that is over, that first."""
        with contextlib.suppress(SottovoceError):
            now = await self._at.fetch_status(stub)
            if now.run_id and not now.state.is_active:
                over = f"{escape_control(now.run_id)} ({now.state.name.lower().replace('_', ' ')})"
                return SpecError(f"no run is under way at {self._at.address}: {over} is over for this learner; {error}")
        return error

    async def _in_a_run(self, stub: Any) -> learner_pb2.GetIntakeResponse:
        """Wait until it is in one."""
        until = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                told = await self._at.fetch_intake(stub, self._source)
            except FailedPrecondition as error:
                self._waits(str(error))
                if asyncio.get_running_loop().time() > until:
                    raise FailedPrecondition(
                        f"the learner at {self._at.address} does not take records: {error}"
                    ) from None
                await asyncio.sleep(_NO_RUN_RETRY_INTERVAL_S)
            else:
                if self._at.name:
                    self._at.require_name(await self._at.fetch_status(stub))
                return told

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.end()
        await self._channel.close()

    def __enter__(self) -> SyncLearner:
        loop = _background()
        entered: Future[ConnectedLearner] = asyncio.run_coroutine_threadsafe(self.__aenter__(), loop)
        self._plain = SyncLearner(entered.result(), loop)
        return self._plain

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._plain.end(kind)
        finally:
            asyncio.run_coroutine_threadsafe(self.__aexit__(kind, error, trace), _background()).result()


@cache
def _background() -> asyncio.AbstractEventLoop:
    """A loop for programs without one, on a thread that lasts as long as the process.

    gRPC shares a queue between a process's loops: one that is closed would break the others.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sottovoce", daemon=True).start()
    return loop
