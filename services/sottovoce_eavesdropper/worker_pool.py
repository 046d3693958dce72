"""Workers of an eavesdropper: processes to which it deals the edges of its captures.

It starts them, again when they die; or they join it from other hosts (`sottovoce eavesdropper --join`), each known by its host,
because learners have the addresses of its relays. A worker connects to the eavesdropper (`Work`) and does tasks: open a capture
and its proxies, redirect, flush, close. It sends parts, which are stored one after the other under one count: a capture does not
show how many workers there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog

from sottovoce_core.errors import LimitReached, PermissionDenied, Unavailable
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.worker_handle import RemoteRecording, WorkerHandle, WorkerStream
from sottovoce_rpc import logs
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2
from sottovoce_wire.v1.eavesdropper_pb2 import WorkRequest, WorkResponse

log = structlog.get_logger()

_MAX_DEFAULT_WORKERS, _WORKER_BYTES = 8, 256 * 1024 * 1024
"""Maximum number of workers unless one is given, and bytes of memory that each of them may need."""
_LIMITS = Path("/sys/fs/cgroup")
_JOIN_TIMEOUT_S = 5.0
"""Time that a capture waits for workers of other hosts; then its edges are dealt to those that have joined."""
_SILENCE_TIMEOUT_S = 15.0
"""Time after which a worker of another host that reports nothing is taken as dead: a host may vanish without a word."""
_RESTART_DELAYS_S = (0.0, 0.2, 1.0, 5.0)
"""Delays before a worker that dies again and again is started once more."""


FindWriter = Callable[[str], CaptureWriter | None]
"""Returns the writer of a capture by its id; None if the capture is over."""


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
        remote: the workers join from other hosts; else this process starts them.
        credentials: credentials of the eavesdropper.
        allow_imports: allow a run spec to name code to import.
        refusals: counts callers that proxies of the workers refuse.
    """

    def __init__(
        self, count: int, credentials: Credentials, refusals: Refusals, *, allow_imports: bool, remote: bool = False
    ) -> None:
        self.workers = [WorkerHandle(number) for number in range(count)]
        self.address = ""
        """Address of the eavesdropper."""
        self._credentials, self._allow_imports, self._refusals = credentials, allow_imports, refusals
        self._is_remote, self._joined = remote, asyncio.Event()
        self._tasks = Tasks()
        self._processes: dict[int, asyncio.subprocess.Process | None] = {}
        self._is_stopping = False

    async def prepare(self, edges: int) -> None:
        """Start as many workers as a capture with so many edges needs, unless they run already; or wait for those that join.

        Raises:
            Unavailable: none has joined.
        """
        if not self._is_remote:
            for worker in self.workers[:edges]:
                if worker.number not in self._processes:
                    self._tasks.start(self._keep_running(worker), "a worker is no longer started")
                    self._processes[worker.number] = None
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                await self._joined.wait()
        connected = sum(worker.stream is not None for worker in self.workers)
        if not connected:
            raise Unavailable(
                f"edges are served by {len(self.workers)} workers on other hosts (--remote-workers), and none has joined: start "
                "each with `sottovoce eavesdropper --join HOST:PORT`"
            )
        if connected < len(self.workers):
            log.warning("not all workers have joined", joined=connected, wanted=len(self.workers))

    def deal(self, writer: CaptureWriter, number: int, address: str = "") -> RemoteRecording | None:
        """Return the recording to which an edge belongs; None: this process serves it.

        Args:
            writer: writer of the capture.
            number: number of the edge.
            address: address at which learners know its proxy, if the capture is resumed.

        Raises:
            Unavailable: the edge was served by a host that has no worker here.
        """
        workers = self.workers
        if self._is_remote:
            host, own = address.rpartition(":")[0], self.address.rpartition(":")[0]
            workers = [each for each in workers if (each.host == host if host else each.stream is not None)]
            if not workers and host != own:
                raise Unavailable(f"relays of this capture are at {host}, from where no worker has joined")
        if not workers:
            return None
        worker = workers[number % len(workers)]
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
                sys.executable, "-P", "-m", "sottovoce_eavesdropper.worker", stdin=asyncio.subprocess.PIPE
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
        worker = self._admit(first.hello)
        stream = worker.connect()
        log.info("worker connected", worker=worker.number, **({"host": worker.host} if worker.host else {}))
        if all(each.stream is not None for each in self.workers):
            self._joined.set()
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
                self._joined.clear()
                for each in reopening:
                    each.cancel()

    def _admit(self, hello: eavesdropper_pb2.WorkerHello) -> WorkerHandle:
        """Return the worker that a process is; one of another host takes the place of the last one from there, or a free one.

        Raises:
            PermissionDenied: this eavesdropper has not started the process, and takes none of other hosts.
            LimitReached: all places are taken.
        """
        if self._is_remote and hello.host and not hello.token:
            free = [worker for worker in self.workers if worker.stream is None]
            found = next((each for each in free if each.host == hello.host), None) or next(
                (each for each in free if not each.host or not each.recordings), None
            )
            if found is None:
                raise LimitReached(
                    f"all {len(self.workers)} workers of this eavesdropper (--remote-workers) have joined, got one more from "
                    f"{hello.host}: start the eavesdropper for more, or end another worker"
                )
            found.host = hello.host
            return found
        worker = self.workers[hello.worker] if hello.worker < len(self.workers) else None
        if worker is None or not worker.token or not secrets.compare_digest(worker.token, hello.token):
            raise PermissionDenied(
                "this eavesdropper has not started this worker, and takes none of other hosts (--remote-workers)"
            )
        return worker

    async def _read_reports(
        self, worker: WorkerHandle, requests: AsyncIterator[WorkRequest], stream: WorkerStream, find_writer: FindWriter
    ) -> None:
        refusals, following = dict[str, int](), aiter(requests)
        while True:
            try:
                async with asyncio.timeout(_SILENCE_TIMEOUT_S if worker.host else None):
                    request = await anext(following)
            except StopAsyncIteration:
                return
            except TimeoutError:
                log.error("a worker of another host does not report any more", worker=worker.number, host=worker.host)
                return
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
