"""Worker of an eavesdropper: a process that serves edges of its captures, checks what passes, and sends it parts to store.

The eavesdropper starts it with a line of JSON on standard input, and ends it by the end of that; or it joins an eavesdropper on
another host. A worker has no state of its own: if it dies, what it had in memory is lost and named, and another one takes over
its edges (`worker_pool`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from sottovoce_core.errors import SottovoceError, Unavailable
from sottovoce_eavesdropper.capture_checks import CaptureRow, decode_rounds, encode_rounds
from sottovoce_eavesdropper.capture_session import Participants, build_proxy
from sottovoce_eavesdropper.capture_writer import CaptureWriter, prefer_messages
from sottovoce_eavesdropper.parts import encode_part, split_into_parts
from sottovoce_eavesdropper.proxy import Proxy
from sottovoce_eavesdropper.storage import Folder
from sottovoce_eavesdropper.throughput import LoadMeter
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.codec import from_fields
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.error_status import CallOutcome, convert_status_error
from sottovoce_rpc.logs import configure_logs, describe_failure
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import choose_loop_factory, open_channel
from sottovoce_rpc.tasks import Tasks, run_in_background
from sottovoce_wire.v1 import eavesdropper_pb2
from sottovoce_wire.v1.eavesdropper_pb2 import WorkerPart, WorkRequest, WorkResponse
from sottovoce_wire.v1.eavesdropper_pb2_grpc import EavesdropperStub

log = structlog.get_logger()

_LOAD_INTERVAL_S = 1.0
_JOIN_DELAY_S = 1.0
"""Delay before a worker joins its eavesdropper once more."""
_LOST = "the stream to the eavesdropper has ended"
Edge = tuple[int, int]
_Send = Callable[[WorkRequest], Coroutine[Any, Any, None]]


class _NoFolder(Folder):
    """Folder of a capture whose files another process writes."""

    def __init__(self) -> None:
        super().__init__(Path())

    def make(self) -> None:
        """Do nothing."""

    def write(self, name: str, content: bytes) -> None:
        """Do nothing."""


@dataclass(slots=True)
class SendingWriter(CaptureWriter):
    """Writer that sends parts, and waits until they are stored."""

    send: _Send = field(kw_only=True)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _stored: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    _is_abandoned: bool = False

    def __post_init__(self) -> None:
        CaptureWriter.__post_init__(self)
        self.storage_folder = _NoFolder()
        self.checks.rounds, self.checks.is_logged = [], False

    def abandon(self) -> None:
        """End, because nothing can be stored any more."""
        self.is_open, self._is_abandoned = False, True
        for waiting in self._stored.values():
            if not waiting.done():
                waiting.set_exception(Unavailable(_LOST))

    def confirm_stored(self, number: int) -> None:
        """Let the writer go on after a part was stored."""
        if (waiting := self._stored.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(None)

    def _write(self, rows: Sequence[CaptureRow]) -> None:
        """Check rows, and send them in parts; runs in a thread. Rows that cannot be sent are lost, as if the process had died."""
        with contextlib.suppress(Unavailable):
            for part in split_into_parts(rows):
                asyncio.run_coroutine_threadsafe(self._send_part(self._build_part(part)), self._loop).result()

    async def _send_part(self, part: WorkerPart) -> None:
        if self._is_abandoned:
            raise Unavailable(_LOST)
        self._stored[part.number] = stored = self._loop.create_future()
        await self.send(WorkRequest(part=part))
        await stored

    def _build_part(self, rows: Sequence[CaptureRow]) -> WorkerPart:
        checks = self.checks
        checked = checks.check_rows(rows)
        self.part_count += 1
        part = WorkerPart(
            capture_id=self.capture_id,
            number=self.part_count,
            content=encode_part(checked, self.run_id, self.world, self.replica),
            rows=len(rows),
            unchecked_reason=checks.unchecked_reason or "",
            detections=[json.dumps(asdict(each)) for each in checks.first_detections],
            detection_counts=checks.counts_by_kind,
        )
        checks.clear_detections()
        counted = "message" if self.ciphertext is None else "ciphertext"
        traffic, streams = dict[Edge, tuple[int, int]](), dict[Edge, int]()
        for row in rows:
            edge = row.caller, row.callee
            streams[edge] = max(streams.get(edge, 0), row.stream if self.ciphertext is None else row.connection)
            part.connections += row.kind == "opened"
            if row.kind == counted:
                channel = row.sender, row.caller + row.callee - row.sender
                messages, size = traffic.get(channel, (0, 0))
                traffic[channel] = messages + 1, size + row.size
        for (sender, receiver), (messages, size) in traffic.items():
            part.channels.add(sender=sender, receiver=receiver, messages=messages, bytes=size)
        for (caller, callee), count in streams.items():
            part.edges.add(caller=caller, callee=callee, count=count)
        rounds, checks.rounds = checks.rounds or [], []
        part.recorded.CopyFrom(encode_rounds([each for each, _ in rounds]))
        part.first_contents.extend(k for k, (_, is_first) in enumerate(rounds) if is_first)
        return part


@dataclass(slots=True)
class _Recording:
    """Edges of one capture in this worker."""

    writer: SendingWriter
    participants: Participants
    writing: Tasks = field(default_factory=Tasks)
    proxies: dict[Edge, Proxy] = field(default_factory=dict)


class Worker:
    """Worker process.

    Args:
        hello: what it tells the eavesdropper first.
        credentials: credentials of the eavesdropper.
        allow_imports: allow a run spec to name code to import.
        listen_host: host on which its proxies listen; empty: as the eavesdropper says.
    """

    def __init__(
        self,
        hello: eavesdropper_pb2.WorkerHello,
        credentials: Credentials,
        *,
        allow_imports: bool,
        listen_host: str = "",
    ) -> None:
        self._hello, self._listen_host = hello, listen_host
        self._credentials, self._allow_imports = credentials, allow_imports
        self._recordings: dict[str, _Recording] = {}
        self._refusals, self._sending, self._message_count = Refusals(), asyncio.Lock(), 0
        self._meter = LoadMeter(self._count_messages)

    async def run(self, eavesdropper: str) -> None:
        """Serve an eavesdropper until it ends the stream.

        Raises:
            SottovoceError: it cannot be reached, or refuses this worker.
        """
        async with (
            open_channel(eavesdropper, Role.EAVESDROPPER, credentials=self._credentials) as channel,
            Tasks() as tasks,
        ):
            call: Any = EavesdropperStub(channel).Work()

            async def send(report: WorkRequest) -> None:
                async with self._sending:
                    try:
                        await call.write(report)
                    except (
                        grpc.aio.AioRpcError,
                        asyncio.InvalidStateError,
                    ):  # the latter if the stream has ended before
                        raise Unavailable(_LOST) from None

            outcome = CallOutcome(call)
            try:
                await send(WorkRequest(hello=self._hello))
                async with run_in_background(self._meter.run(), self._report_load(send)):
                    async for task in call:
                        tasks.start(self._do(task, send), "a task failed")
            except (grpc.aio.AioRpcError, Unavailable):
                raise convert_status_error(
                    await outcome.wait_for_status(), f"the eavesdropper at {eavesdropper}"
                ) from None
            finally:  # what passes now could not be stored
                for recording in self._recordings.values():
                    recording.writer.abandon()
                await self._stop_proxies(0.0)
                await asyncio.gather(*(each.writing.end() for each in self._recordings.values()))

    async def _stop_proxies(self, timeout_s: float | None = None) -> None:
        proxies = [proxy for recording in self._recordings.values() for proxy in recording.proxies.values()]
        for proxy in proxies:
            proxy.stop_timeout_s = proxy.stop_timeout_s if timeout_s is None else timeout_s
        await asyncio.gather(*(proxy.stop() for proxy in proxies))

    async def leave(self) -> None:
        """Serve no new connection, wait for the last calls, and let the eavesdropper store what is in memory."""
        await self._stop_proxies()
        await asyncio.gather(*(each.writer.flush() for each in self._recordings.values()))

    def _count_messages(self) -> int:
        return self._message_count + sum(each.writer.message_count for each in self._recordings.values())

    async def _report_load(self, send: _Send) -> None:
        while True:
            await asyncio.sleep(_LOAD_INTERVAL_S)
            load = self.build_load()
            load.refusals.update(self._refusals.counts_by_reason)
            await send(WorkRequest(load=load))

    def build_load(self) -> eavesdropper_pb2.Load:
        """Return the load of this process."""
        return self._meter.build_load([each.writer.buffer_size for each in self._recordings.values()])

    async def _do(self, task: WorkResponse, send: _Send) -> None:
        """Do a task, and send its result."""
        if task.WhichOneof("work") == "stored":
            if (recording := self._recordings.get(task.capture_id)) is not None:
                recording.writer.confirm_stored(task.stored)
            return
        result = eavesdropper_pb2.TaskResult(task=task.task)
        try:
            result.address = await self._run_task(task, send)
        except SottovoceError as error:
            result.error_class, result.error = type(error).__name__, str(error)
        except Exception as error:  # noqa: BLE001 - the eavesdropper waits for an answer
            log.error("a task failed", **describe_failure(error))
            result.error_class, result.error = (
                Unavailable.__name__,
                "a worker of the eavesdropper failed: its log says why",
            )
        await send(WorkRequest(result=result))

    async def _run_task(self, task: WorkResponse, send: _Send) -> str:
        """Do a task; return the address of a proxy that it opens."""
        kind = task.WhichOneof("work")
        if kind == "open":
            self._recordings[task.capture_id] = self._open(task.capture_id, task.open, send)
            return ""
        if (recording := self._recordings.get(task.capture_id)) is None:
            return ""  # closed before
        writer = recording.writer
        if kind == "proxy":
            route, count = task.proxy.route, task.proxy.count
            for each in decode_rounds(task.proxy.recorded):
                writer.checks.remember_round(each)
            proxy = build_proxy(route, writer, recording.participants, count, self._credentials, self._refusals)
            host, _, port = task.proxy.listen.rpartition(":")
            try:
                address = await proxy.open(f"{self._listen_host or host}:{port}")
            except BaseException:
                await proxy.stop()
                raise
            recording.proxies[route.caller, route.callee] = proxy
            return f"{self._hello.host}:{address.rpartition(':')[2]}" if self._hello.host else address
        if kind == "redirect":
            await recording.proxies[task.redirect.caller, task.redirect.callee].redirect(task.redirect.target)
        elif kind == "spec":
            writer.reconfigure(task.spec)
        elif kind == "flush":
            await writer.flush()
        elif kind == "stop":
            if (stopped := recording.proxies.pop((task.stop.caller, task.stop.callee), None)) is not None:
                await stopped.stop()
        elif kind == "close":
            await recording.writing.end()
            await writer.flush()
            self._message_count += writer.message_count
            del self._recordings[task.capture_id]
        return ""

    def _open(self, capture_id: str, facts: eavesdropper_pb2.OpenCaptureRequest, send: _Send) -> _Recording:
        writer = SendingWriter(
            "",
            capture_id,
            facts.run_id,
            facts.spec,
            facts.n_features,
            facts.world if facts.HasField("world") else None,
            facts.replica if facts.HasField("replica") else None,
            self._allow_imports,
            from_fields(facts.fields),
            part_count=1,  # no metadata is written
            send=send,
        )
        recording = _Recording(writer, Participants.from_spec(facts.spec))
        recording.writing.start(writer.write_parts(), "a capture is no longer written")
        return recording


class JoiningWorker:
    """Worker on a host of its own, which joins an eavesdropper, again whenever it has lost it.

    Args:
        eavesdropper: address of the eavesdropper.
        listen_host: host on which its proxies listen.
        host: name of that host for learners.
        credentials: credentials of the eavesdropper.
        allow_imports: allow a run spec to name code to import.
    """

    def __init__(
        self, eavesdropper: str, listen_host: str, host: str, credentials: Credentials, *, allow_imports: bool
    ) -> None:
        self._eavesdropper = eavesdropper
        hello = eavesdropper_pb2.WorkerHello(host=host)
        self._build: Callable[[], Worker] = functools.partial(
            Worker, hello, credentials, allow_imports=allow_imports, listen_host=listen_host
        )
        self._worker = self._build()
        self._tasks = Tasks()

    def start(self) -> None:
        """Begin to join."""
        self._tasks.start(self._keep_joined(), "this worker does not join any more")

    async def stop(self) -> None:
        """Let the eavesdropper store what is in memory, then end."""
        await self._worker.leave()
        await self._tasks.end()

    def build_load(self) -> eavesdropper_pb2.Load:
        """Return the load of this process."""
        return self._worker.build_load()

    async def _keep_joined(self) -> None:
        known = ""
        while True:
            try:
                await self._worker.run(self._eavesdropper)
                reason = "the eavesdropper has ended"
            except SottovoceError as error:
                reason = str(error)
            if reason != known:
                log.warning(
                    "this worker serves nothing, and joins again", eavesdropper=self._eavesdropper, reason=reason
                )
            known = reason
            await asyncio.sleep(_JOIN_DELAY_S)
            self._worker = self._build()


async def _run(config: dict[str, Any]) -> None:
    folder = config["identity"]
    credentials = Credentials(None if folder is None else Path(folder), insecure=config["insecure"])
    hello = eavesdropper_pb2.WorkerHello(worker=config["worker"], token=bytes.fromhex(config["token"]))
    worker = Worker(hello, credentials, allow_imports=config["allow_imports"])
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with Tasks() as tasks:
        serving, ended = tasks.start(worker.run(config["eavesdropper"])), tasks.start(reader.read())
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)


def main() -> None:
    """Run a worker of the eavesdropper that has started this process."""
    config = json.loads(sys.stdin.readline())
    configure_logs(*config["log_options"])
    prefer_messages()
    # Ctrl-C reaches the whole process group, and the eavesdropper must first store what is in memory.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=choose_loop_factory()) as runner:
        runner.run(_run(config))


if __name__ == "__main__":
    main()
