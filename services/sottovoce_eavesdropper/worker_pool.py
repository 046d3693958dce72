"""Workers of an eavesdropper: processes to which it deals the edges of its captures, and which it starts again when they die.

A worker connects to the eavesdropper (`Work`) and does tasks: open a capture and its proxies, redirect, flush, close. It sends
parts, which are stored one after the other under one count: a capture does not show how many workers there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from sottovoce_core import errors
from sottovoce_core.errors import PermissionDenied, SottovoceError, Unavailable
from sottovoce_eavesdropper.capture_writer import WRITE_TIMEOUT_S, CaptureWriter
from sottovoce_rpc import logs
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.codec import to_fields
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2
from sottovoce_wire.v1.eavesdropper_pb2 import WorkRequest, WorkResponse

log = structlog.get_logger()

_MAX_DEFAULT_WORKERS, _WORKER_BYTES = 8, 256 * 1024 * 1024
"""Maximum number of workers unless one is given, and bytes of memory that each of them may need."""
_LIMITS = Path("/sys/fs/cgroup")
_START_TIMEOUT_S, _TASK_TIMEOUT_S = 60.0, WRITE_TIMEOUT_S + 10.0
_RESTART_DELAYS_S = (0.0, 0.2, 1.0, 5.0)
"""Delays before a worker that dies again and again is started once more."""
_REOPEN_DELAYS_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Delays before a proxy is opened once more on a port that is not free yet."""


FindWriter = Callable[[str], CaptureWriter | None]
"""Returns the writer of a capture by its id; None if the capture is over."""


@dataclass(slots=True)
class _Stream:
    """Stream of a worker that is connected: tasks for it, and those that wait for their results."""

    tasks: asyncio.Queue[WorkResponse] = field(default_factory=asyncio.Queue)
    results: dict[int, asyncio.Future[str]] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerHandle:
    """A worker process, or several one after the other with the same edges.

    Attributes:
        number: its number, from 0.
        token: secret of its process.
        stream: its stream; None while it is not connected.
        load: what it has reported last.
        recordings: edges of captures that it serves.
    """

    number: int
    token: bytes = b""
    stream: _Stream | None = None
    load: eavesdropper_pb2.Load = field(default_factory=eavesdropper_pb2.Load)
    recordings: dict[str, RemoteRecording] = field(default_factory=dict)
    _connected: asyncio.Event = field(default_factory=asyncio.Event)
    _task_count: int = 0

    def connect(self) -> _Stream:
        """Note that its process has connected."""
        self.stream = _Stream()
        self._connected.set()
        return self.stream

    def disconnect(self, stream: _Stream) -> None:
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
        count = self._recording.writer.edge_counts[self.route.caller, self.route.callee]
        proxy = eavesdropper_pb2.OpenProxy(route=self.route, listen=listen, count=count)
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


async def _ignore_death(work: Any) -> None:
    """Wait for a task; one that ends because its worker does is done."""
    try:
        await work
    except Unavailable as error:
        log.warning("a worker of the eavesdropper did not finish a task", reason=str(error))


def count_default_workers() -> int:
    """Return the number of workers that suit the cores and the memory of this process: half of the cores, none below four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read_limit("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) // int(period))
    memory = _read_limit("memory.max")
    fitting = int(memory) // _WORKER_BYTES - 1 if memory.isdigit() else _MAX_DEFAULT_WORKERS
    return max(0, min(cores // 2, fitting, _MAX_DEFAULT_WORKERS)) if cores >= 4 else 0


def _read_limit(name: str) -> str:
    """Return a limit of this container; empty where there is none."""
    try:
        return (_LIMITS / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""


class WorkerPool:
    """Workers of an eavesdropper, which are started when the first edges are dealt.

    Args:
        count: number of workers; 0: edges are served in this process.
        credentials: credentials of the eavesdropper.
        allow_imports: allow a run spec to name code to import.
        refusals: counts callers that proxies of the workers refuse.
    """

    def __init__(self, count: int, credentials: Credentials, refusals: Refusals, *, allow_imports: bool) -> None:
        self.workers = [WorkerHandle(number) for number in range(count)]
        self.address = ""
        """Address of the eavesdropper."""
        self._credentials, self._allow_imports, self._refusals = credentials, allow_imports, refusals
        self._tasks = Tasks()
        self._processes: dict[int, asyncio.subprocess.Process | None] = {}
        self._is_stopping = False

    def start(self, edges: int) -> None:
        """Start as many workers as a capture with so many edges needs, unless they run already."""
        for worker in self.workers[:edges]:
            if worker.number not in self._processes:
                self._tasks.start(self._keep_running(worker), "a worker is no longer started")
                self._processes[worker.number] = None

    def deal(self, writer: CaptureWriter, number: int) -> RemoteRecording | None:
        """Return the recording to which the edge with this number belongs; None: this process serves it."""
        if not self.workers:
            return None
        worker = self.workers[number % len(self.workers)]
        recording = worker.recordings.get(writer.capture_id)
        if recording is None:
            recording = RemoteRecording(worker, writer)
            writer.sources.append(recording)
        return recording

    async def stop(self) -> None:
        """End all workers; what they have in memory must have been stored before."""
        self._is_stopping = True
        for process in filter(None, self._processes.values()):
            if process.stdin is not None:
                process.stdin.close()
        running = [process.wait() for process in self._processes.values() if process is not None]
        try:
            async with asyncio.timeout(_RESTART_DELAYS_S[-1]):
                await asyncio.gather(*running)
        except TimeoutError:
            for process in filter(None, self._processes.values()):
                if process.returncode is None:
                    process.kill()
        await self._tasks.end()

    async def _keep_running(self, worker: WorkerHandle) -> None:
        """Start the process of a worker, and start it again when it dies."""
        deaths = 0
        while not self._is_stopping:
            await asyncio.sleep(_RESTART_DELAYS_S[min(deaths, len(_RESTART_DELAYS_S) - 1)])
            worker.token = secrets.token_bytes(16)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "sottovoce_eavesdropper.worker", stdin=asyncio.subprocess.PIPE
            )
            self._processes[worker.number] = process
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            folder = self._credentials.folder
            config = {
                "worker": worker.number,
                "token": worker.token.hex(),
                "eavesdropper": self.address,
                "identity": None if folder is None else str(folder),
                "insecure": self._credentials.insecure,
                "allow_imports": self._allow_imports,
                "log_options": logs.log_options,
            }
            process.stdin.write(json.dumps(config).encode() + b"\n")
            code = await process.wait()
            deaths += 1
            if not self._is_stopping:
                log.error("a worker has ended, and is started again", worker=worker.number, code=code)

    # ---- their streams ----------------------------------------------------------------------------------------

    async def serve(self, requests: AsyncIterator[WorkRequest], find_writer: FindWriter) -> AsyncIterator[WorkResponse]:
        """Serve the stream of a worker: yield tasks for it.

        Args:
            requests: its reports.
            find_writer: finds the writers of their parts.

        Raises:
            PermissionDenied: this eavesdropper has not started the process.
        """
        first = await anext(aiter(requests), WorkRequest())
        hello = first.hello
        worker = self.workers[hello.worker] if hello.worker < len(self.workers) else None
        if worker is None or not worker.token or not secrets.compare_digest(worker.token, hello.token):
            raise PermissionDenied("this eavesdropper has not started this worker")
        stream = worker.connect()
        log.info("worker connected", worker=worker.number)
        async with Tasks() as tasks:
            reading = tasks.start(self._read_reports(worker, requests, stream, find_writer))
            reopening = [
                tasks.start(each.reopen(), "edges are not served again") for each in worker.recordings.values()
            ]
            try:
                while not reading.done():
                    waiting = tasks.start(stream.tasks.get())
                    await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
                    if waiting.done():
                        yield waiting.result()
            finally:
                worker.disconnect(stream)
                for each in reopening:
                    each.cancel()

    async def _read_reports(
        self, worker: WorkerHandle, requests: AsyncIterator[WorkRequest], stream: _Stream, find_writer: FindWriter
    ) -> None:
        refusals = dict[str, int]()
        async for request in requests:
            kind = request.WhichOneof("report")
            if kind == "result":
                worker.finish(request.result)
            elif kind == "part":
                if (writer := find_writer(request.part.capture_id)) is not None:
                    await writer.add_part(request.part)
                stored = WorkResponse(capture_id=request.part.capture_id, stored=request.part.number)
                stream.tasks.put_nowait(stored)
            elif kind == "load":
                worker.load = request.load
                for reason, count in request.load.refusals.items():
                    self._refusals.counts_by_reason[reason] += count - refusals.get(reason, 0)
                    refusals[reason] = count

    def list_loads(self) -> list[eavesdropper_pb2.Load]:
        """Return the last reports of the workers that are connected."""
        return [worker.load for worker in self.workers if worker.stream is not None]
