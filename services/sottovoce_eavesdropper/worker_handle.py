"""Handles of an eavesdropper's workers: their streams, and the edges of captures that each of them serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field

import structlog

from sottovoce_core import errors
from sottovoce_core.errors import SottovoceError, Unavailable
from sottovoce_eavesdropper.capture_checks import encode_rounds
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter
from sottovoce_rpc.codec import to_fields
from sottovoce_wire.v1 import eavesdropper_pb2
from sottovoce_wire.v1.eavesdropper_pb2 import WorkResponse

log = structlog.get_logger()

_START_TIMEOUT_S, _TASK_TIMEOUT_S = 60.0, WRITE_TIMEOUT_S + 10.0
_REOPEN_DELAYS_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Delays before a proxy is opened once more on a port that is not free yet."""


@dataclass(slots=True)
class WorkerStream:
    """Stream of a worker that is connected: tasks for it, and those that wait for their results."""

    tasks: asyncio.Queue[WorkResponse] = field(default_factory=asyncio.Queue)
    results: dict[int, asyncio.Future[str]] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerHandle:
    """A worker process, or several one after the other with the same edges.

    Attributes:
        number: its number, from 0.
        token: secret of its process; empty for one of another host.
        host: name of its host for learners, once it has joined from there.
        stream: its stream; None while it is not connected.
        load: what it has reported last.
        recordings: edges of captures that it serves.
    """

    number: int
    token: bytes = b""
    host: str = ""
    stream: WorkerStream | None = None
    load: eavesdropper_pb2.Load = field(default_factory=eavesdropper_pb2.Load)
    recordings: dict[str, RemoteRecording] = field(default_factory=dict)
    _connected: asyncio.Event = field(default_factory=asyncio.Event)
    _task_count: int = 0

    def connect(self) -> WorkerStream:
        """Note that its process has connected."""
        self.stream = WorkerStream()
        self._connected.set()
        return self.stream

    def disconnect(self, stream: WorkerStream) -> None:
        """Note that the stream of its process has ended, with what it had in memory."""
        if self.stream is stream:
            self.stream = None
            self._connected.clear()
        for waiting in stream.results.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("a worker of the eavesdropper has ended"))
        for recording in self.recordings.values():
            recording.interrupt()

    async def call(self, task: WorkResponse) -> str:
        """Let it do a task; return the address of a proxy that it opens.

        Raises:
            Unavailable: it has ended, or does not answer in time.
            SottovoceError: the task failed.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._connected.wait()
        except TimeoutError:
            raise Unavailable(f"worker {self.number} of the eavesdropper does not start: its log says why") from None
        stream = self.stream
        if stream is None:
            raise Unavailable("a worker of the eavesdropper has ended")
        self._task_count += 1
        task.task = self._task_count
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stream.results[task.task] = waiting
        stream.tasks.put_nowait(task)
        try:
            async with asyncio.timeout(_TASK_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            raise Unavailable(f"worker {self.number} of the eavesdropper does not answer") from None
        finally:
            stream.results.pop(task.task, None)

    def finish(self, result: eavesdropper_pb2.TaskResult) -> None:
        """Pass on the result of a task."""
        waiting = None if self.stream is None else self.stream.results.get(result.task)
        if waiting is None or waiting.done():
            return
        if not result.error_class:
            waiting.set_result(result.address)
            return
        kind = getattr(errors, result.error_class, Unavailable)
        waiting.set_exception((kind if issubclass(kind, SottovoceError) else Unavailable)(result.error))


class RemoteRecording:
    """Edges of one capture in a worker.

    Args:
        worker: the worker.
        writer: writer of the capture.
    """

    def __init__(self, worker: WorkerHandle, writer: CaptureWriter) -> None:
        self.worker, self.writer = worker, writer
        self.proxies: list[RemoteProxy] = []
        self._is_opened = self._is_closed = False
        worker.recordings[writer.capture_id] = self

    async def open(self) -> None:
        """Let the worker begin to record."""
        if not self._is_opened:
            await self._call_open()
            self._is_opened = True

    async def _call_open(self) -> None:
        writer = self.writer
        opening = eavesdropper_pb2.OpenCaptureRequest(
            run_id=writer.run_id,
            spec=writer.spec,
            n_features=writer.n_features,
            world=writer.world,
            replica=writer.replica,
            fields=to_fields(writer.fields),
        )
        await self.call(WorkResponse(open=opening))

    async def call(self, task: WorkResponse) -> str:
        """Let the worker do a task of this capture."""
        task.capture_id = self.writer.capture_id
        return await self.worker.call(task)

    def interrupt(self) -> None:
        """Note that the worker has died with rows of this capture in its memory."""
        self.writer.interrupt_edges((proxy.route.caller, proxy.route.callee) for proxy in self.proxies)

    async def reopen(self) -> None:
        """Serve the edges again in a new process, on the same ports."""
        if not self._is_opened or self._is_closed:
            return
        await self._call_open()
        await asyncio.gather(*(proxy.reopen() for proxy in self.proxies))

    async def flush(self) -> None:
        """Wait until every row in the worker's memory is stored; a worker that has died has none."""
        if self._is_opened and self.worker.stream is not None:
            await _ignore_death(self.call(WorkResponse(flush=eavesdropper_pb2.Flush())))

    async def reconfigure(self, spec: str) -> None:
        """Replace the run's spec."""
        if self.worker.stream is not None:  # else it gets the new one when it opens the capture again
            await _ignore_death(self.call(WorkResponse(spec=spec)))

    async def close(self) -> None:
        """Wait until every row in the worker's memory is stored, and end."""
        self._is_closed = True
        if self._is_opened and self.worker.stream is not None:
            await _ignore_death(self.call(WorkResponse(close=eavesdropper_pb2.Flush())))
        self.worker.recordings.pop(self.writer.capture_id, None)


class RemoteProxy:
    """Proxy of one edge in a worker.

    Args:
        route: learners that open and accept the stream, and the address of the latter.
        recording: the worker's edges of the capture.
        before: streams (wiretap: connections) of the edge recorded before.
    """

    def __init__(self, route: eavesdropper_pb2.Route, recording: RemoteRecording, before: int) -> None:
        self.route, self._recording, self._address = route, recording, ""
        recording.writer.edge_counts.setdefault((route.caller, route.callee), before)
        recording.proxies.append(self)

    async def open(self, listen: str) -> str:
        """Listen on `host:port`; return the address."""
        await self._recording.open()
        self._address = await self._call_open(listen)
        return self._address

    async def _call_open(self, listen: str) -> str:
        writer, ends = self._recording.writer, (self.route.caller, self.route.callee)
        recorded = encode_rounds(writer.checks.list_remembered(ends))
        proxy = eavesdropper_pb2.OpenProxy(
            route=self.route, listen=listen, count=writer.edge_counts[ends], recorded=recorded
        )
        return await self._recording.call(WorkResponse(proxy=proxy))

    async def reopen(self) -> None:
        """Listen again on the same port, once it is free."""
        for delay in (*_REOPEN_DELAYS_S, None):
            try:
                await self._call_open(self._address)
            except Unavailable:
                if delay is None or self._recording.worker.stream is None:
                    raise
                await asyncio.sleep(delay)
            else:
                return

    async def redirect(self, target: str) -> None:
        """Send later connections to another address, and cut open ones."""
        if target != self.route.target:
            self.route.target = target
            if self._recording.worker.stream is not None:  # else it is told when it opens the proxy again
                await _ignore_death(self._recording.call(WorkResponse(redirect=self.route)))

    async def stop(self) -> None:
        """Accept no new connection, wait for the last calls, then end the rest."""
        if self in self._recording.proxies:
            self._recording.proxies.remove(self)
            if self._recording.worker.stream is not None:
                await _ignore_death(self._recording.call(WorkResponse(stop=self.route)))


async def _ignore_death(work: Awaitable[object]) -> None:
    """Wait for a task; one that ends because its worker does is done."""
    try:
        await work
    except Unavailable as error:
        log.warning("a worker of the eavesdropper did not finish a task", reason=str(error))
