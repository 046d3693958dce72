"""The eavesdropper's gRPC face: captures are opened, listed, read and closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from sottovoce.errors import CaptureError, NotReady, RemoteProtocolError, SpecError, StrangerError
from sottovoce_eavesdropper.lookout import Row
from sottovoce_eavesdropper.mirrored import Participants
from sottovoce_eavesdropper.records import WRITE_S, CaptureFile, part_number
from sottovoce_eavesdropper.relay import FINISH_S, MOST_PAYLOAD, Relay
from sottovoce_eavesdropper.resuming import left_open, resumed
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_eavesdropper.wiretap import Wiretap
from sottovoce_rpc.codec import RoundCodec, from_fields
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.principals import Role
from sottovoce_rpc.private import tell_if_open
from sottovoce_rpc.server import Service, announce, page, serve_until_stopped, start_server
from sottovoce_rpc.specs import document_from_wire, require_run_id
from sottovoce_rpc.status import answering
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2, eavesdropper_pb2_grpc

log = structlog.get_logger()

NAME = "sottovoce_wire.v1.Eavesdropper"
_CHUNK = 1024 * 1024
_MIRROR_DRAIN_S = 3.0
DRAIN_S = FINISH_S + WRITE_S
"""How long it may take to write what it holds, once it is told to stop."""
MOST_OPEN, MOST_RELAYS = 1_024, 4_096
"""Captures, and relays of all of them, at a time: each relay is a port, and its opening takes a millisecond or two."""
_MOST_MESSAGE = MOST_PAYLOAD + 32 * 1024 * 1024
"""Bytes of what learners copy: the longest message that is kept ends a batch of others."""
_MOST_WORLD, _MOST_REPLICA = 2**7 - 1, 2**31 - 1

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class EavesdropperConfig:
    """How an eavesdropper is deployed.

    Attributes:
        listen: `host:port` to listen on; port 0 picks one. Relays listen on free ports of the same host.
        folder: where captures are written: a path, or a URL for fsspec.
        advertise_host: name of this host for learners, where it differs from that of `listen`.
        allow_imports: whether a run spec may name code to import; without it, less can be noticed of such a run.
        credentials: of this eavesdropper.
    """

    listen: str = "127.0.0.1:0"
    folder: str | Path = "sottovoce-captures"
    advertise_host: str | None = None
    allow_imports: bool = False
    credentials: Credentials = field(default_factory=Credentials)


@dataclass(slots=True)
class _Recording:
    """A capture, the relays or wiretaps that feed it, and its writer; and whether all have ended that mirror into it."""

    file: CaptureFile
    relays: list[Relay | Wiretap]
    writing: Tasks
    who: Participants
    codec: RoundCodec
    mirrored: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    @contextlib.contextmanager
    def mirroring(self, sender: int) -> Iterator[None]:
        """While a learner copies what it says."""
        self.mirrored.clear()
        self.file.gaps.begun(sender)
        well = False
        try:
            yield
            well = True
        finally:
            self.file.gaps.over(sender, well=well)
            if not self.unsure:
                self.mirrored.set()

    def require_opener(self, caller: str) -> None:
        """A capture is its coordinator's.

        Raises:
            StrangerError: another one asks.
        """
        if caller != self.file.opener:
            raise StrangerError(f"the capture is of {self.file.opener or 'a coordinator without an identity'}")

    @property
    def unsure(self) -> bool:
        """Copies may be on their way: of a learner that has more, or has not begun, for its run was short."""
        gaps = self.file.gaps
        return gaps.unsure or (self.who.mirrored and gaps.senders < self.who.learners)

    async def lead(self, routes: Iterable[eavesdropper_pb2.Route]) -> None:
        """Some learners are at other addresses than before."""
        targets = {(route.caller, route.callee): route.target for route in routes}
        known = [(each["caller"], each["callee"]) for each in self.file.routes]
        now = [
            {**each, "target": targets.get(way, each["target"])}
            for each, way in zip(self.file.routes, known, strict=True)
        ]
        if now == list(self.file.routes):
            return
        self.file.routes = now
        await self.file.describe()  # for an eavesdropper after this one
        for relay, each in zip(self.relays, now, strict=True):
            await relay.lead(each["target"])

    async def amend(self, spec: str) -> None:
        """Learners leave or join: the run has another spec from now on."""
        if spec != self.file.spec:
            self.file.amend(spec)
            await self.file.describe()

    def take(self, request: eavesdropper_pb2.MirrorRequest, rows: Iterable[Row]) -> None:
        """Record copies."""
        for row in rows:
            self.file.add(row)
        for message in request.messages:
            with contextlib.suppress(RemoteProtocolError):  # bytes of no round: what is wrong with them is noticed
                self.file.gaps.came(request.sender, t=self.codec.decode(message.payload)[0])


class Eavesdropper(eavesdropper_pb2_grpc.EavesdropperServicer):
    """Any number of captures, of one run each."""

    def __init__(self, config: EavesdropperConfig) -> None:
        self.config = config
        self._captures: dict[str, _Recording] = {}
        self._tasks = Tasks()
        self._opening: list[int] = []  # relays of captures that are being opened
        self._taking_up: dict[str, asyncio.Task[_Recording | None]] = {}
        self.service: Service | None = None
        self.address = ""

    async def start(self) -> str:
        """Listen; returns the address.

        Raises:
            SottovoceError: it cannot listen there, or its identity cannot be used.
        """
        self.config.credentials.require(Role.EAVESDROPPER)
        self.service = await start_server(
            self.config.listen,
            lambda server: eavesdropper_pb2_grpc.add_EavesdropperServicer_to_server(self, server),
            [NAME],
            self.config.credentials,
            _MOST_MESSAGE,
        )
        self.address = self._advertised(self.service.address)
        if "://" not in str(self.config.folder):
            tell_if_open(Path(self.config.folder), "folder of captures")
        return self.address

    async def stop(self) -> None:
        """Write everything that is in memory, then end. A capture that nobody closed stays open for who comes after."""
        await self._tasks.end()
        await asyncio.gather(*(self._close(each, drain_s=0.0, over=False) for each in self._captures.values()))
        if self.service is not None:
            await self.service.stop()

    # ---- captures -----------------------------------------------------------------------------------------

    async def OpenCapture(
        self, request: eavesdropper_pb2.OpenCaptureRequest, context: Context
    ) -> eavesdropper_pb2.OpenCaptureResponse:
        """Begin a capture, with one relay or wiretap per route; or take up one that was left open."""
        async with answering(context):
            opener = self._caller(context)
            require_run_id(request.run_id)
            if request.resume:
                recording = await self._of_run(request.run_id)
                recording.require_opener(opener)
                await recording.lead(request.routes)
                if request.spec:
                    await recording.amend(_spec(request.spec))
                return self._opened(recording)
            spec = _spec(request.spec or "{}")
            who = Participants.of(spec)
            who.require(*(index for route in request.routes for index in (route.caller, route.callee)))
            with self._room(request.routes):
                return self._opened(await self._begun(request, spec, opener))

    async def _begun(self, request: eavesdropper_pb2.OpenCaptureRequest, spec: str, opener: str) -> _Recording:
        capture_id, who = f"{request.run_id}-{uuid.uuid4().hex[:6]}", Participants.of(spec)
        folder = open_folder(self.config.folder).below(Path(capture_id).name).name
        file = await asyncio.to_thread(
            _begin, folder, capture_id, request, spec, allow_imports=self.config.allow_imports
        )
        file.opener = opener
        new = (self._between(route, file, who) for route in request.routes)
        relays, addresses = await _listening((relay, f"{self._host()}:0") for relay in new)
        file.routes = [_route(*each) for each in zip(request.routes, addresses, strict=True)]
        await file.describe()
        return self._recording(file, relays)

    @contextlib.contextmanager
    def _room(self, routes: Sequence[eavesdropper_pb2.Route]) -> Iterator[None]:
        """While a capture is opened: refuse it beyond what is served, before a port is opened.

        Raises:
            RemoteProtocolError: a channel comes twice.
            NotReady: there are as many captures or relays as are served.
        """
        if len({(route.caller, route.callee) for route in routes}) < len(routes):
            raise RemoteProtocolError("the routes of a capture must be of different channels")
        served = [*self._opening, *(len(each.relays) for each in self._captures.values() if not each.closed)]
        captures, relays = len(served) + 1, sum(served) + len(routes)
        if captures > MOST_OPEN or relays > MOST_RELAYS:
            raise NotReady(
                f"an eavesdropper serves at most {MOST_OPEN} captures and {MOST_RELAYS} relays at a time, asked for "
                f"{captures} and {relays}: take `capture: mirror`, or another eavesdropper"
            )
        self._opening.append(len(routes))
        try:
            yield
        finally:
            self._opening.remove(len(routes))

    def _between(
        self, route: eavesdropper_pb2.Route, file: CaptureFile, who: Participants, before: int = 0
    ) -> Relay | Wiretap:
        """What stands between two learners, where so many streams, or connections, of theirs were recorded before."""
        credentials = self.config.credentials
        if file.ciphertext is not None:
            return Wiretap(route, file, connections=before, credentials=credentials)
        return Relay(route, file, streams=before, ends=who.ends(route), credentials=credentials)

    def _recording(self, file: CaptureFile, relays: list[Relay | Wiretap]) -> _Recording:
        who = Participants.of(file.spec)
        recording = self._captures[file.capture_id] = _Recording(file, relays, Tasks(), who, RoundCodec(file.fields))
        recording.writing.start(file.write_parts(), "a capture is no longer written")
        log.info("capture opened", capture=file.capture_id, relays=len(relays), folder=file.place.name)
        return recording

    def _opened(self, recording: _Recording) -> eavesdropper_pb2.OpenCaptureResponse:
        return eavesdropper_pb2.OpenCaptureResponse(
            capture_id=recording.file.capture_id,
            relay_addresses=[self._advertised(route["address"]) for route in recording.file.routes],
            mirror_address=self.address,
            location=recording.file.place.name,
            gaps=recording.file.gaps.missing,
        )

    async def _take_up(self, run_id: str) -> _Recording | None:
        """A capture that an eavesdropper before this one left open; None: there is none."""
        left = await asyncio.to_thread(left_open, self.config.folder, run_id)
        if left is None:
            return None
        file, before = await asyncio.to_thread(resumed, left, allow_imports=self.config.allow_imports)
        await file.describe()
        who = Participants.of(file.spec)

        def known() -> Iterator[tuple[Relay | Wiretap, str]]:
            for each in file.routes:
                route = eavesdropper_pb2.Route(caller=each["caller"], callee=each["callee"], target=each["target"])
                yield self._between(route, file, who, before.get((route.caller, route.callee), 0)), each["address"]

        relays, _ = await _listening(
            known()
        )  # a port that is taken may be free later, and then the others must be, too
        return self._recording(file, relays)

    async def CloseCapture(
        self, request: eavesdropper_pb2.CloseCaptureRequest, context: Context
    ) -> eavesdropper_pb2.CloseCaptureResponse:
        """End a capture; once closed, closing it again says what was captured."""
        async with answering(context):
            capture = self._known(request.capture_id)
            capture.require_opener(self._caller(context))
            await self._close(capture, drain_s=_MIRROR_DRAIN_S)
            return eavesdropper_pb2.CloseCaptureResponse(capture=_info(capture.file))

    async def ListCaptures(
        self, request: eavesdropper_pb2.ListCapturesRequest, context: Context
    ) -> eavesdropper_pb2.ListCapturesResponse:
        """The captures of this process, of one run or all."""
        async with answering(context):
            newest = reversed(self._captures.items())
            wanted = {key: c.file for key, c in newest if request.run_id in ("", c.file.run_id)}
            files, following = page(wanted, request.page_size, request.page_token)
            infos = [_info(each, ways=bool(request.run_id)) for each in files]
            return eavesdropper_pb2.ListCapturesResponse(captures=infos, next_page_token=following)

    async def StreamCapture(
        self, request: eavesdropper_pb2.StreamCaptureRequest, context: Context
    ) -> AsyncIterator[eavesdropper_pb2.StreamCaptureResponse]:
        """The files of a capture as they stand."""
        async with answering(context):
            capture = self._known(request.capture_id)
            await capture.file.flush()
            place = capture.file.place
            for name in await asyncio.to_thread(place.names):
                if name.endswith(".partial") or 0 < part_number(name) < request.first_part:
                    continue
                content = await asyncio.to_thread(_read, place, name)
                for start in range(0, max(len(content), 1), _CHUNK):
                    yield eavesdropper_pb2.StreamCaptureResponse(file=name, data=content[start : start + _CHUNK])

    async def Mirror(
        self, requests: AsyncIterator[eavesdropper_pb2.MirrorRequest], context: Context
    ) -> eavesdropper_pb2.MirrorResponse:
        """Copies from a learner: one row per receiver."""
        taken = 0
        async with answering(context), contextlib.AsyncExitStack() as held:
            capture, caller = None, self.config.credentials.caller(context)
            async for request in requests:
                of_run = capture or await self._of_run(request.run_id)
                of_run.who.require_itself(request.sender, caller)
                rows = of_run.who.rows(request)
                if capture is None:
                    capture = of_run
                    held.enter_context(capture.mirroring(request.sender))
                capture.take(request, rows)
                taken += len(request.messages)
                await capture.file.room()
        return eavesdropper_pb2.MirrorResponse(messages=taken)

    def _caller(self, context: Context) -> str:
        """Who opens a capture, as it is written down; empty: nobody has a name here."""
        caller = self.config.credentials.caller(context)
        return "" if caller is None else str(caller)

    def _known(self, capture_id: str) -> _Recording:
        if capture_id not in self._captures:
            raise CaptureError(f"no capture {capture_id!r} here; there are {sorted(self._captures)}")
        return self._captures[capture_id]

    async def _of_run(self, run_id: str) -> _Recording:
        """The open capture of a run; one that was left open is taken up, though whoever asked no longer waits for that."""
        own = [each for each in self._captures.values() if each.file.run_id == run_id]
        if not own:
            if run_id not in self._taking_up:
                taking = self._taking_up[run_id] = self._tasks.start(self._take_up(run_id))
                taking.add_done_callback(lambda _: self._taking_up.pop(run_id))
            if (left := await asyncio.shield(self._taking_up[run_id])) is not None:
                return left
        for each in own:
            if each.file.open:
                return each
        raise CaptureError(f"no open capture of run {run_id!r}")

    async def _close(self, capture: _Recording, drain_s: float, *, over: bool = True) -> None:
        """Let mirrored copies on their way arrive and the last calls end, write the rest."""
        if capture.closed:
            return
        if capture.unsure and drain_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await capture.mirrored.wait()
        await asyncio.gather(*(relay.stop() for relay in capture.relays))
        await capture.writing.end(WRITE_S)
        if over and capture.who.mirrored:
            capture.file.gaps.silent(len(capture.who.names))
        await capture.file.close(over=over)
        capture.closed = True
        log.info(
            "capture closed", capture=capture.file.capture_id, messages=capture.file.messages, bytes=capture.file.bytes
        )

    def _host(self) -> str:
        return self.config.listen.rsplit(":", 1)[0]

    def _advertised(self, address: str) -> str:
        return f"{self.config.advertise_host or self._host()}:{address.rsplit(':', 1)[1]}"


def _spec(text: str) -> str:
    """A run spec as it is kept beside the records: a mapping of fields, which need not be right.

    Raises:
        SpecError: it is none.
    """
    document = document_from_wire(text)
    if not isinstance(document, dict):
        raise SpecError(f"a run spec must be a mapping of fields, got {type(document).__name__}")
    return json.dumps(document)


async def _listening(
    wanted: Iterable[tuple[Relay | Wiretap, str]],
) -> tuple[list[Relay | Wiretap], list[str]]:
    """Let relays listen, all or none, each made when its turn comes: others are served in between.

    Args:
        wanted: relays, made one by one, and where each is to listen.

    Returns:
        The relays, and where they listen.

    Raises:
        SottovoceError: one of them cannot.
    """
    relays, addresses = list[Relay | Wiretap](), list[str]()
    try:
        for relay, listen in wanted:
            relays.append(relay)
            addresses.append(await relay.open(listen))
    except BaseException:
        await asyncio.gather(*(relay.stop() for relay in relays))
        raise
    return relays, addresses


def _route(route: eavesdropper_pb2.Route, address: str) -> dict[str, Any]:
    """As it is written down."""
    return {"caller": route.caller, "callee": route.callee, "target": route.target, "address": address}


def _read(place: Folder, name: str) -> bytes:
    with place.open(name) as file:
        content: bytes = file.read()
        return content


def _begin(
    folder: str, capture_id: str, request: eavesdropper_pb2.OpenCaptureRequest, spec: str, *, allow_imports: bool
) -> CaptureFile:
    if request.world > _MOST_WORLD or request.replica > _MOST_REPLICA:
        raise SpecError(
            f"world must be at most {_MOST_WORLD} and replica at most {_MOST_REPLICA}, got {request.world}, {request.replica}"
        )
    try:
        return CaptureFile(
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


def _info(file: CaptureFile, *, ways: bool = False) -> eavesdropper_pb2.CaptureInfo:
    told = file.ways.items() if ways else ()
    return eavesdropper_pb2.CaptureInfo(
        capture_id=file.capture_id,
        run_id=file.run_id,
        location=file.place.name,
        messages=file.messages,
        bytes=file.bytes,
        open=file.open,
        error=file.broken or "",
        gaps=file.gaps.missing if file.open else len(file.gaps.facts()),
        ways=[
            eavesdropper_pb2.Way(sender=sender, receiver=receiver, messages=messages, bytes=n_bytes)
            for (sender, receiver), (messages, n_bytes) in told
        ],
    )


async def serve(config: EavesdropperConfig, *, with_stdin: bool = False) -> None:
    """Run the eavesdropper in this process until it is told to stop.

    Raises:
        SottovoceError: the address is taken.
    """
    service = Eavesdropper(config)
    announce("eavesdropper", address=await service.start())
    await serve_until_stopped(service.stop, with_stdin=with_stdin, drain_s=DRAIN_S)
