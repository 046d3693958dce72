"""Connections to a learner, for programs with and without `await`."""

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
    """Connection to a learner in a run of live records (`data.source: live`), for an `async with` block, or a plain `with`.

    Args:
        address: address of the learner, `host:port`.
        source: name under which your records are counted. A later feeder with the same name continues where this one ended.
        name: name that the learner must report, and its certificate hold, if it has one (default: any).
        identity: folder with the identity of the learner's owner or feeder, `tls.crt`, `tls.key` and `ca.crt`; None: this
            machine only.
        insecure: connect to other machines without an identity and without encryption, too.
        patience_s: how long the learner may be unreachable, or between two runs, before a call fails.
        allow_imports: import code that the run's spec names (`module:Class`); then an operator who starts runs can have
            any code run here that is installed or lies in the working folder.
        notify: called with the reason for which the learner is waited for, as soon as it is known (default: not reported).

    Raises:
        SpecError: it is on another machine, and there is no identity; or the records of its run are not live.
        FailedPrecondition: it is another learner than `name`, or in no run for longer than `patience_s`; or the identity
            cannot be used.
        Unavailable: the address does not answer.

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
        self._endpoint = LearnerEndpoint(address, name, Credentials(folder, insecure))
        self._source, self._patience_s, self._imports = source, patience_s, allow_imports
        self._notify, self._last_reason = notify, ""
        self._tasks = Tasks()
        self._channel: Any = None

    def __repr__(self) -> str:
        return f"connect_learner({self._endpoint.address!r})"

    async def __aenter__(self) -> ConnectedLearner:
        endpoint = self._endpoint
        self._channel = endpoint.open_channel()
        try:
            who, seconds = f"the learner at {endpoint.address}", min(_CONNECT_TIMEOUT_S, self._patience_s)
            await wait_until_reachable(self._channel, who, seconds, lambda why, _: self._report_wait(why))
            stub = learner_pb2_grpc.LearnerStub(self._channel)
            intake = await self._wait_for_run(stub)
            try:
                return ConnectedLearner(
                    endpoint,
                    stub,
                    intake,
                    self._source,
                    self._patience_s,
                    self._tasks,
                    self._report_wait,
                    allow_imports=self._imports,
                )
            except SpecError as error:
                raise await self._explain_refusal(stub, error) from None
        except BaseException:
            await self._channel.close()
            raise

    def _report_wait(self, why: str) -> None:
        if self._notify is not None and why != self._last_reason:
            self._last_reason = why
            self._notify(why)

    async def _explain_refusal(self, stub: Any, error: SpecError) -> SpecError:
        """Return the error for a run that takes no records from here; for a run that is over, that comes first."""
        with contextlib.suppress(SottovoceError):
            status = await self._endpoint.fetch_status(stub)
            if status.run_id and not status.state.is_active:
                ended_run = f"{escape_control(status.run_id)} ({status.state.name.lower().replace('_', ' ')})"
                return SpecError(
                    f"no run is active at {self._endpoint.address}: {ended_run} is over for this learner; {error}"
                )
        return error

    async def _wait_for_run(self, stub: Any) -> learner_pb2.GetIntakeResponse:
        """Wait until the learner is in a run."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                intake = await self._endpoint.fetch_intake(stub, self._source)
            except FailedPrecondition as error:
                self._report_wait(str(error))
                if asyncio.get_running_loop().time() > deadline:
                    raise FailedPrecondition(
                        f"the learner at {self._endpoint.address} does not take records: {error}"
                    ) from None
                await asyncio.sleep(_NO_RUN_RETRY_INTERVAL_S)
            else:
                if self._endpoint.name:
                    self._endpoint.require_name(await self._endpoint.fetch_status(stub))
                return intake

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.end()
        await self._channel.close()

    def __enter__(self) -> SyncLearner:
        loop = _get_background_loop()
        entered: Future[ConnectedLearner] = asyncio.run_coroutine_threadsafe(self.__aenter__(), loop)
        self._sync_learner = SyncLearner(entered.result(), loop)
        return self._sync_learner

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._sync_learner.end(kind)
        finally:
            asyncio.run_coroutine_threadsafe(self.__aexit__(kind, error, trace), _get_background_loop()).result()


@cache
def _get_background_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for programs without one, on a thread that lives as long as the process.

    gRPC shares a queue between a process's loops: closing one would break the others.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sottovoce", daemon=True).start()
    return loop
