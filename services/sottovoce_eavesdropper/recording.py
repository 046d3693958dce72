"""A capture that is being recorded: what feeds it, and whether all has come that will."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import structlog

from sottovoce.errors import RemoteProtocolError, StrangerError
from sottovoce_eavesdropper.lookout import Row
from sottovoce_eavesdropper.mirrored import Participants
from sottovoce_eavesdropper.records import WRITE_S, CaptureFile
from sottovoce_eavesdropper.relay import Relay
from sottovoce_eavesdropper.wiretap import Wiretap
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2

log = structlog.get_logger()


@dataclass(slots=True)
class Recording:
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
        return gaps.unsure or (self.who.mirrored and gaps.senders < self.who.learners - gaps.bystanders)

    async def lead(self, routes: Iterable[eavesdropper_pb2.Route]) -> None:
        """Some learners are at other addresses than before."""
        targets = {(route.caller, route.callee): route.target for route in routes}
        known = [(each["caller"], each["callee"]) for each in self.file.routes]
        now = [
            {**each, "target": targets.get(way, each["target"])}
            for each, way in zip(self.file.routes, known, strict=True)
        ]
        if now != list(self.file.routes):
            self.file.routes = now
            await self.file.describe()  # for an eavesdropper after this one
        # Whoever asked may have given up while that was written, and asks again.
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

    async def close(self, drain_s: float, *, over: bool = True) -> None:
        """Let mirrored copies on their way arrive and the last calls end, write the rest."""
        if self.closed:
            return
        if self.unsure and drain_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self.mirrored.wait()
        await asyncio.gather(*(relay.stop() for relay in self.relays))
        await self.writing.end(WRITE_S)
        if over and self.who.mirrored:
            self.file.gaps.silent(len(self.who.names))
        await self.file.close(over=over)
        self.closed = True
        log.info("capture closed", capture=self.file.capture_id, messages=self.file.messages, bytes=self.file.bytes)
