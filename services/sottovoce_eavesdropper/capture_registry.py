"""The captures of a process: opened with all their relays or not at all, taken up where they were left open, and found."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from sottovoce_core.errors import AlreadyExists, CaptureError, LimitReached, NotFound, RemoteProtocolError, SpecError
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_session import (
    CaptureSession,
    Participants,
    compute_sent_rounds,
    find_open_capture,
    resume_capture,
)
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.grpc_proxy import GrpcProxy
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_eavesdropper.tcp_proxy import TcpProxy
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.codec import from_fields
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2
from sottovoce_wire.v1.eavesdropper_pb2 import SentRounds

log = structlog.get_logger()

MAX_OPEN_CAPTURES, MAX_PROXIES = 1_024, 4_096
"""Captures, and relays of all of them, at a time: each relay is a port, and its opening takes a millisecond or two."""
_MAX_WORLD, _MAX_REPLICA = 2**7 - 1, 2**31 - 1


class CaptureRegistry:
    """Any number of captures, of one run each.

    Args:
        folder: where they are written: a path, or a URL for fsspec.
        host: where relays listen.
        credentials: of the eavesdropper.
        allow_imports: whether a run spec may name code to import.
    """

    def __init__(self, folder: str | Path, host: str, credentials: Credentials, *, allow_imports: bool) -> None:
        self._folder, self._host, self._credentials, self._allow_imports = folder, host, credentials, allow_imports
        self.sessions: dict[str, CaptureSession] = {}
        """By the capture's id, the oldest first."""
        self.refusals = Refusals()
        """Calls that relays refused."""
        self._tasks = Tasks()
        self._opening: list[int] = []  # relays of captures that are being opened
        self._taking_up: dict[str, asyncio.Task[CaptureSession | None]] = {}
        self._known = dict[str, tuple[str, list[SentRounds]]]()  # of captures that are complete, by their names

    async def open_capture(
        self, request: eavesdropper_pb2.OpenCaptureRequest, spec: str, opener: str
    ) -> CaptureSession:
        """Begin a capture, with one relay or wiretap per route.

        Args:
            request: which.
            spec: of its run, a document in JSON.
            opener: whose it is.

        Raises:
            RemoteProtocolError: a route is of nobody, or a channel comes twice.
            AlreadyExists: the run has an open one.
            LimitReached: there are as many captures or relays as are served.
            SottovoceError: it cannot be written, or a relay cannot listen.
        """
        Participants.from_spec(spec).require_learners(
            *(index for route in request.routes for index in (route.caller, route.callee))
        )
        for each in self.sessions.values():
            if each.writer.run_id == request.run_id and each.writer.is_open:
                raise AlreadyExists(
                    f"run {request.run_id!r} is captured already: {each.writer.capture_id}; close that first"
                )
        with self._room(request.routes):
            return await self._begun(request, spec, opener)

    async def stop(self) -> None:
        """Write everything that is in memory, then end. A capture that nobody closed stays open for who comes after."""
        await self._tasks.end()
        await asyncio.gather(*(each.close(drain_timeout_s=0.0, has_run_ended=False) for each in self.sessions.values()))

    def get(self, capture_id: str) -> CaptureSession:
        """The capture of this id.

        Raises:
            SpecError: no id is given.
            NotFound: there is none.
        """
        if not capture_id:
            raise SpecError("a capture's id is required, got none")
        if capture_id not in self.sessions:
            known = f"the last one is {next(reversed(self.sessions))!r}" if self.sessions else "there is none"
            raise NotFound(f"no capture {capture_id!r} here: {known}")
        return self.sessions[capture_id]

    async def list_sent_rounds(self, run_id: str, learners: Sequence[str], opener: str) -> list[SentRounds]:
        """How far learners were in captures of an opener, open or closed, of this process or of those before.

        Args:
            run_id: of this run alone; empty: of every run.
            learners: of these alone; empty: of all.
            opener: whose captures.

        Raises:
            CaptureError: one of them cannot be read.
            OSError: the place of captures cannot be read.
        """
        for each in self.sessions.values():
            if run_id in ("", each.writer.run_id):
                await each.writer.flush_fully()
        return await asyncio.to_thread(self._sent, run_id, frozenset(learners), opener)

    def _sent(self, run_id: str, learners: Collection[str], opener: str) -> list[SentRounds]:
        folder, found = open_folder(self._folder), list[SentRounds]()
        for name in folder.list_names():
            if name.startswith(run_id and f"{run_id}-"):
                whose, sent = self._known.get(name) or self._read_sent(folder, name)
                found += sent if whose == opener else ()
        return [each for each in found if run_id in ("", each.run_id) and (not learners or each.learner in learners)]

    def _read_sent(self, folder: Folder, name: str) -> tuple[str, list[SentRounds]]:
        """Whose capture it is, and how far learners were in it; of a folder that is none, nothing."""
        try:
            capture = open_capture(folder.get_subfolder(name))
        except CaptureError:
            return "", []
        known = capture.metadata["opener"], _sent_of(capture)
        if capture.is_complete:  # it never changes
            self._known[name] = known
        return known

    async def get_or_resume(self, run_id: str) -> CaptureSession:
        """The open capture of a run; one that was left open is taken up, though whoever asked no longer waits for that.

        Raises:
            NotFound: there is none.
            CaptureError: it is closed.
        """
        own = [each for each in self.sessions.values() if each.writer.run_id == run_id]
        if not own:
            if run_id not in self._taking_up:
                taking = self._taking_up[run_id] = self._tasks.start(self._take_up(run_id))
                taking.add_done_callback(lambda _: self._taking_up.pop(run_id))
            if (left := await asyncio.shield(self._taking_up[run_id])) is not None:
                return left
        for each in own:
            if each.writer.is_open:
                return each
        if own:
            raise CaptureError(f"the capture of run {run_id!r} is closed: {own[-1].writer.capture_id}")
        raise NotFound(f"no capture of run {run_id!r} here")

    async def _begun(self, request: eavesdropper_pb2.OpenCaptureRequest, spec: str, opener: str) -> CaptureSession:
        capture_id, who = f"{request.run_id}-{uuid.uuid4().hex[:6]}", Participants.from_spec(spec)
        folder = open_folder(self._folder).get_subfolder(Path(capture_id).name).name
        file = await asyncio.to_thread(_begin, folder, capture_id, request, spec, allow_imports=self._allow_imports)
        file.opener = opener
        new = (self._between(route, file, who) for route in request.routes)
        relays, addresses = await _listening((relay, f"{self._host}:0") for relay in new)
        file.routes = [_route(*each) for each in zip(request.routes, addresses, strict=True)]
        await file.write_metadata()
        return self._recording(file, relays)

    @contextlib.contextmanager
    def _room(self, routes: Sequence[eavesdropper_pb2.Route]) -> Iterator[None]:
        """While a capture is opened: refuse it beyond what is served, before a port is opened.

        Raises:
            RemoteProtocolError: a channel comes twice.
            LimitReached: there are as many captures or relays as are served.
        """
        if len({(route.caller, route.callee) for route in routes}) < len(routes):
            raise RemoteProtocolError("the routes of a capture must be of different channels")
        served = [*self._opening, *(len(each.proxies) for each in self.sessions.values() if not each.is_closed)]
        captures, relays = len(served) + 1, sum(served) + len(routes)
        if captures > MAX_OPEN_CAPTURES or relays > MAX_PROXIES:
            raise LimitReached(
                f"an eavesdropper serves at most {MAX_OPEN_CAPTURES} captures and {MAX_PROXIES} relays at a time, asked for "
                f"{captures} and {relays}: take `capture: mirror`, or another eavesdropper"
            )
        self._opening.append(len(routes))
        try:
            yield
        finally:
            self._opening.remove(len(routes))

    def _between(
        self, route: eavesdropper_pb2.Route, file: CaptureWriter, who: Participants, before: int = 0
    ) -> GrpcProxy | TcpProxy:
        """What stands between two learners, where so many streams, or connections, of theirs were recorded before."""
        if file.ciphertext is not None:
            return TcpProxy(route, file, connection_count=before, credentials=self._credentials)
        ends, refused = who.get_end_names(route), self.refusals
        return GrpcProxy(
            route, file, stream_count=before, end_names=ends, credentials=self._credentials, refusals=refused
        )

    def _recording(self, file: CaptureWriter, relays: list[GrpcProxy | TcpProxy]) -> CaptureSession:
        who = Participants.from_spec(file.spec)
        recording = self.sessions[file.capture_id] = CaptureSession(file, relays, Tasks(), who)
        recording.writer_tasks.start(file.write_parts(), "a capture is no longer written")
        log.info("capture opened", capture=file.capture_id, relays=len(relays), folder=file.storage_folder.name)
        return recording

    async def _take_up(self, run_id: str) -> CaptureSession | None:
        """A capture that an eavesdropper before this one left open; None: there is none."""
        left = await asyncio.to_thread(find_open_capture, self._folder, run_id)
        if left is None:
            return None
        file, before = await asyncio.to_thread(resume_capture, left, allow_imports=self._allow_imports)
        await file.write_metadata()
        who = Participants.from_spec(file.spec)

        def known() -> Iterator[tuple[GrpcProxy | TcpProxy, str]]:
            for each in file.routes:
                route = eavesdropper_pb2.Route(caller=each["caller"], callee=each["callee"], target=each["target"])
                yield self._between(route, file, who, before.get((route.caller, route.callee), 0)), each["address"]

        relays, _ = await _listening(
            known()
        )  # a port that is taken may be free later, and then the others must be, too
        return self._recording(file, relays)


async def _listening(
    wanted: Iterable[tuple[GrpcProxy | TcpProxy, str]],
) -> tuple[list[GrpcProxy | TcpProxy], list[str]]:
    """Let relays listen, all or none, each made when its turn comes: others are served in between.

    Args:
        wanted: relays, made one by one, and where each is to listen.

    Returns:
        The relays, and where they listen.

    Raises:
        SottovoceError: one of them cannot.
    """
    relays, addresses = list[GrpcProxy | TcpProxy](), list[str]()
    try:
        for relay, listen in wanted:
            relays.append(relay)
            addresses.append(await relay.open(listen))
    except BaseException:
        await asyncio.gather(*(relay.stop() for relay in relays))
        raise
    return relays, addresses


def _sent_of(capture: Capture) -> list[SentRounds]:
    """How far learners were in a capture.

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


def _route(route: eavesdropper_pb2.Route, address: str) -> dict[str, Any]:
    """As it is written down."""
    return {"caller": route.caller, "callee": route.callee, "target": route.target, "address": address}


def _begin(
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
