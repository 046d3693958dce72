"""Captures of an eavesdropper process: opened with all their proxies or not at all, resumed if left open, and found again."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from sottovoce_core.errors import AlreadyExists, CaptureError, LimitReached, NotFound, RemoteProtocolError, SpecError
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_session import (
    CaptureSession,
    EdgeProxy,
    Participants,
    build_proxy,
    compute_sent_rounds,
    find_open_capture,
    resume_capture,
)
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_eavesdropper.worker_handle import RemoteProxy
from sottovoce_eavesdropper.worker_pool import WorkerPool
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.codec import from_fields
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2
from sottovoce_wire.v1.eavesdropper_pb2 import SentRounds

log = structlog.get_logger()

MAX_OPEN_CAPTURES, MAX_PROXIES = 1_024, 4_096
"""Maximum numbers of open captures and of all their proxies: each proxy is a port, and takes a millisecond or two to open."""
_MAX_WORLD, _MAX_REPLICA = 2**7 - 1, 2**31 - 1


class CaptureRegistry:
    """Registry of captures, each of one run.

    Args:
        folder: where captures are written: a path, or a URL for fsspec.
        host: host on which proxies listen.
        credentials: credentials of the eavesdropper.
        allow_imports: allow a run spec to name code to import.
        workers: number of processes that serve edges; 0: this one.
        remote_workers: number of workers that join from other hosts, in place of these.
    """

    def __init__(
        self,
        folder: str | Path,
        host: str,
        credentials: Credentials,
        *,
        allow_imports: bool,
        workers: int = 0,
        remote_workers: int = 0,
    ) -> None:
        self._folder, self._host, self._credentials, self._allow_imports = folder, host, credentials, allow_imports
        self.sessions: dict[str, CaptureSession] = {}
        """Capture sessions by capture id, the oldest first."""
        self.refusals = Refusals()
        """Calls that relays refused."""
        self.pool = WorkerPool(
            remote_workers or workers,
            credentials,
            self.refusals,
            allow_imports=allow_imports,
            remote=remote_workers > 0,
        )
        self._writers = WeakValueDictionary[str, CaptureWriter]()  # also of captures that are being opened
        self._tasks = Tasks()
        self._opening: list[int] = []  # proxy counts of captures that are being opened
        self._resuming: dict[str, asyncio.Task[CaptureSession | None]] = {}
        self._sent_rounds = dict[str, tuple[str, list[SentRounds]]]()  # of complete captures, by folder name

    async def open_capture(
        self, request: eavesdropper_pb2.OpenCaptureRequest, spec: str, opener: str
    ) -> CaptureSession:
        """Open a capture, with one relay or wiretap per route.

        Args:
            request: description of the capture.
            spec: run spec, a JSON document.
            opener: principal of the coordinator that opens it.

        Raises:
            RemoteProtocolError: a route names no learner of the run, or a channel comes twice.
            AlreadyExists: the run has an open capture.
            LimitReached: there are too many captures or proxies.
            SottovoceError: the capture cannot be written, or a proxy cannot listen.
        """
        Participants.from_spec(spec).require_learners(
            *(index for route in request.routes for index in (route.caller, route.callee))
        )
        for each in self.sessions.values():
            if each.writer.run_id == request.run_id and each.writer.is_open:
                raise AlreadyExists(
                    f"run {request.run_id!r} is captured already: {each.writer.capture_id}; close that first"
                )
        with self._reserve_capacity(request.routes):
            return await self._open_capture(request, spec, opener)

    async def stop(self) -> None:
        """Write everything in memory, then end. Captures that were not closed stay open, to be resumed."""
        await self._tasks.end()
        await asyncio.gather(*(each.close(drain_timeout_s=0.0, has_run_ended=False) for each in self.sessions.values()))
        await self.pool.stop()

    def find_writer(self, capture_id: str) -> CaptureWriter | None:
        """Return the writer of a capture that a worker records; None if it is over."""
        return self._writers.get(capture_id)

    def get(self, capture_id: str) -> CaptureSession:
        """Return the capture with this id.

        Raises:
            SpecError: the id is empty.
            NotFound: there is no such capture.
        """
        if not capture_id:
            raise SpecError("a capture's id is required, got none")
        if capture_id not in self.sessions:
            known = f"the last one is {next(reversed(self.sessions))!r}" if self.sessions else "there are no captures"
            raise NotFound(f"no capture {capture_id!r} here: {known}")
        return self.sessions[capture_id]

    async def list_sent_rounds(self, run_id: str, learners: Sequence[str], opener: str) -> list[SentRounds]:
        """Return how far learners were in captures of an opener, open or closed, also in those of earlier processes.

        Args:
            run_id: this run only; empty: every run.
            learners: these learners only; empty: all.
            opener: principal that opened the captures.

        Raises:
            CaptureError: a capture cannot be read.
            OSError: the folder of captures cannot be read.
        """
        for each in self.sessions.values():
            if run_id in ("", each.writer.run_id):
                await each.writer.flush_fully()
        return await asyncio.to_thread(self._find_sent_rounds, run_id, frozenset(learners), opener)

    def _find_sent_rounds(self, run_id: str, learners: Collection[str], opener: str) -> list[SentRounds]:
        folder, found = open_folder(self._folder), list[SentRounds]()
        for name in folder.list_names():
            if name.startswith(run_id and f"{run_id}-"):
                owner, sent = self._sent_rounds.get(name) or self._read_sent_rounds(folder, name)
                found += sent if owner == opener else ()
        return [each for each in found if run_id in ("", each.run_id) and (not learners or each.learner in learners)]

    def _read_sent_rounds(self, folder: Folder, name: str) -> tuple[str, list[SentRounds]]:
        """Read the opener of a capture and how far learners were in it; nothing if the folder is not a capture."""
        try:
            capture = open_capture(folder.get_subfolder(name))
        except CaptureError:
            return "", []
        sent = capture.metadata["opener"], _build_sent_rounds(capture)
        if capture.is_complete:  # it never changes
            self._sent_rounds[name] = sent
        return sent

    async def get_or_resume(self, run_id: str) -> CaptureSession:
        """Return the open capture of a run; resume one that was left open, even if the caller gives up waiting.

        Raises:
            NotFound: there is none.
            CaptureError: it is closed.
        """
        own = [each for each in self.sessions.values() if each.writer.run_id == run_id]
        if not own:
            if run_id not in self._resuming:
                task = self._resuming[run_id] = self._tasks.start(self._resume(run_id))
                task.add_done_callback(lambda _: self._resuming.pop(run_id))
            if (resumed := await asyncio.shield(self._resuming[run_id])) is not None:
                return resumed
        for each in own:
            if each.writer.is_open:
                return each
        if own:
            raise CaptureError(f"the capture of run {run_id!r} is closed: {own[-1].writer.capture_id}")
        raise NotFound(f"no capture of run {run_id!r} here")

    async def _open_capture(
        self, request: eavesdropper_pb2.OpenCaptureRequest, spec: str, opener: str
    ) -> CaptureSession:
        capture_id, participants = f"{request.run_id}-{uuid.uuid4().hex[:6]}", Participants.from_spec(spec)
        if request.routes:
            await self.pool.prepare(len(request.routes))
        folder = open_folder(self._folder).get_subfolder(Path(capture_id).name).name
        file = await asyncio.to_thread(
            _create_writer, folder, capture_id, request, spec, allow_imports=self._allow_imports
        )
        file.opener = opener
        new = (self._build_proxy(k, route, file, participants) for k, route in enumerate(request.routes))
        proxies, addresses = await _start_proxies(((proxy, f"{self._host}:0") for proxy in new), file)
        file.routes = [_describe_route(*each) for each in zip(request.routes, addresses, strict=True)]
        await file.write_metadata()
        return self._start_session(file, proxies)

    @contextlib.contextmanager
    def _reserve_capacity(self, routes: Sequence[eavesdropper_pb2.Route]) -> Iterator[None]:
        """Count a capture that is being opened; refuse it beyond the limits, before a port is opened.

        Raises:
            RemoteProtocolError: a channel comes twice.
            LimitReached: there are too many captures or proxies.
        """
        if len({(route.caller, route.callee) for route in routes}) < len(routes):
            raise RemoteProtocolError("the routes of a capture must be of different channels")
        open_counts = [*self._opening, *(len(each.proxies) for each in self.sessions.values() if not each.is_closed)]
        captures, proxies = len(open_counts) + 1, sum(open_counts) + len(routes)
        if captures > MAX_OPEN_CAPTURES or proxies > MAX_PROXIES:
            raise LimitReached(
                f"an eavesdropper serves at most {MAX_OPEN_CAPTURES} captures and {MAX_PROXIES} relays at a time, asked for "
                f"{captures} and {proxies}: take `capture: mirror`, or another eavesdropper"
            )
        self._opening.append(len(routes))
        try:
            yield
        finally:
            self._opening.remove(len(routes))

    def _build_proxy(
        self,
        number: int,
        route: eavesdropper_pb2.Route,
        file: CaptureWriter,
        participants: Participants,
        before: int = 0,
        address: str = "",
    ) -> EdgeProxy:
        """Build the proxy of the edge with this number, here or in a worker; `address` is its own in a resumed capture."""
        recording = self.pool.deal(file, number, address)
        if recording is None:
            return build_proxy(route, file, participants, before, self._credentials, self.refusals)
        self._writers[file.capture_id] = file
        return RemoteProxy(route, recording, before)

    def _start_session(self, file: CaptureWriter, proxies: list[EdgeProxy]) -> CaptureSession:
        participants = Participants.from_spec(file.spec)
        session = self.sessions[file.capture_id] = CaptureSession(file, proxies, Tasks(), participants)
        session.writer_tasks.start(file.write_parts(), "a capture is no longer written")
        log.info("capture opened", capture=file.capture_id, relays=len(proxies), folder=file.storage_folder.name)
        return session

    async def _resume(self, run_id: str) -> CaptureSession | None:
        """Resume a capture that an earlier eavesdropper left open; None if there is none."""
        left = await asyncio.to_thread(find_open_capture, self._folder, run_id)
        if left is None:
            return None
        if routes := left.metadata["routes"]:
            await self.pool.prepare(len(routes))
        file, before = await asyncio.to_thread(resume_capture, left, allow_imports=self._allow_imports)
        await file.write_metadata()
        participants = Participants.from_spec(file.spec)

        def build_proxies() -> Iterator[tuple[EdgeProxy, str]]:
            for number, each in enumerate(file.routes):
                route = eavesdropper_pb2.Route(caller=each["caller"], callee=each["callee"], target=each["target"])
                count = before.get((route.caller, route.callee), 0)
                proxy = self._build_proxy(number, route, file, participants, count, each["address"])
                yield proxy, each["address"]

        # All or none: a port in use may be free later, and then the other ports must be free, too.
        proxies, _ = await _start_proxies(build_proxies(), file)
        return self._start_session(file, proxies)


async def _start_proxies(
    wanted: Iterable[tuple[EdgeProxy, str]], file: CaptureWriter
) -> tuple[list[EdgeProxy], list[str]]:
    """Start all proxies or none. They are built one by one, so that other calls are served in between.

    Args:
        wanted: proxies, built lazily, with the listen address of each.
        file: writer of their capture.

    Returns:
        The proxies, and their actual addresses.

    Raises:
        SottovoceError: a proxy cannot listen.
    """
    proxies, addresses = list[EdgeProxy](), list[str]()
    try:
        for proxy, listen in wanted:
            proxies.append(proxy)
            addresses.append(await proxy.open(listen))
    except BaseException:
        await asyncio.gather(*(proxy.stop() for proxy in proxies))
        await asyncio.gather(*(source.close() for source in file.sources))
        raise
    return proxies, addresses


def _build_sent_rounds(capture: Capture) -> list[SentRounds]:
    """Return how far learners were in a capture.

    Raises:
        CaptureError: it cannot be read.
    """
    names, found = capture.names, list[SentRounds]()
    for sender, (rounds, at) in compute_sent_rounds(capture).items():
        if sender < len(names):
            last_at = Timestamp()
            last_at.FromNanoseconds(at)
            found.append(
                SentRounds(run_id=capture.metadata["run_id"], learner=names[sender], rounds=rounds, last_at=last_at)
            )
    return found


def _describe_route(route: eavesdropper_pb2.Route, address: str) -> dict[str, Any]:
    """Return a route as `capture.json` holds it."""
    return {"caller": route.caller, "callee": route.callee, "target": route.target, "address": address}


def _create_writer(
    folder: str, capture_id: str, request: eavesdropper_pb2.OpenCaptureRequest, spec: str, *, allow_imports: bool
) -> CaptureWriter:
    if request.world > _MAX_WORLD or request.replica > _MAX_REPLICA:
        raise SpecError(
            f"world must be at most {_MAX_WORLD} and replica at most {_MAX_REPLICA}, got {request.world}, {request.replica}"
        )
    try:
        return CaptureWriter(
            folder,
            capture_id,
            request.run_id,
            spec,
            request.n_features,
            request.world if request.HasField("world") else None,
            request.replica if request.HasField("replica") else None,
            allow_imports,
            from_fields(request.fields),
        )
    except OSError as error:
        raise CaptureError(f"cannot write to the folder {folder}: {error.strerror or error}") from None
