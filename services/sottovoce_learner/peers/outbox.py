"""The outbox: messages to neighbours, handed to a link each, copied where the run is mirrored, signed block by block.

A message is in the log, durable, before it comes here (`storage/run_log.py`). A link is the stream to one neighbour, whichever
side opened it. It keeps the bytes of as many rounds as the neighbour may lack, exactly as they stand in the log, and their
signatures. When a stream is opened (again), the neighbour names the first round it has not heard, and the link goes on from there
with the same bytes; the signature before that may not have come, and is said again in any case. What comes from neighbours is in
`inbox.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Protocol

import grpc

from sottovoce_core.network.participation_schedule import Participation, ParticipationSchedule
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.peers.neighbour_schedule import NeighbourSchedule
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.signatures import DIGEST_BYTES, EMPTY_DIGESTS, ROUNDS_PER_BLOCK, Statement
from sottovoce_rpc.tasks import Tasks

_IDLE_TIMEOUT_S = 1.0
"""How long a write to a stream that has ended is waited for."""
_STREAM_END_ERRORS = (
    grpc.RpcError,
    grpc.aio.BaseError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    asyncio.CancelledError,
)
"""How a write ends whose call is over."""


@dataclass(slots=True)
class SentDigests:
    """What this learner said last, as its signatures say it.

    Of each neighbour it remembers the blocks whose signature may not have come, however long ago it was told anything.

    Attributes:
        keep: rounds whose messages a neighbour may lack.
        digests: of what was said, by block.
        recipients: of each neighbour the last blocks in which it was told anything.
    """

    retained_rounds: int
    digests: dict[int, bytes] = field(default_factory=dict)
    recipients: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add_round(self, t: int, digest: bytes, told: Iterable[int]) -> None:
        """A round was said, to some neighbours."""
        block, k = divmod(t, ROUNDS_PER_BLOCK)
        for j in told:
            if block not in (before := self.recipients.get(j, ())):
                self.recipients[j] = (*before, block)[-_signatures_kept(self.retained_rounds) :]
        if block not in self.digests:
            needed = set(chain.from_iterable(self.recipients.values()))
            self.digests = {each: known for each, known in self.digests.items() if each in needed}
        known = self.digests.get(block, EMPTY_DIGESTS)
        self.digests[block] = known[: DIGEST_BYTES * k] + digest + known[DIGEST_BYTES * (k + 1) :]

    def build_statement(self, run_id: str, sender: int, block: int) -> Statement:
        """What is signed of a block."""
        return Statement(run_id, sender, block, self.digests[block])

    def list_recipients(self, block: int) -> list[int]:
        """Neighbours that were told anything of a block."""
        return [j for j, own in self.recipients.items() if block in own]

    def copy(self) -> SentDigests:
        """What it remembers now, which does not change."""
        return SentDigests(self.retained_rounds, dict(self.digests), dict(self.recipients))

    def restore(self, copy: SentDigests) -> None:
        """Remember what a copy does."""
        self.digests, self.recipients = dict(copy.digests), dict(copy.recipients)


class _Stream(Protocol):
    """The writing half of a stream: a client call and a server context look alike here."""

    async def write(self, message: bytes) -> None:
        """Send one message."""
        ...


class NeighbourLink:
    """Everything that is said to one neighbour, in order, over whichever stream is there.

    Args:
        keep: how many messages the neighbour may lack.
    """

    def __init__(self, keep: int = 2) -> None:
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._signatures: deque[tuple[int, Callable[[], bytes]]] = deque(maxlen=_signatures_kept(keep))
        self._due: deque[bytes] = deque(maxlen=2 * keep)
        self._stream: _Stream | None = None
        self._displaced: Callable[[], object] = lambda: None
        self._tasks = Tasks()
        self._writing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._woken: asyncio.Future[None] | None = None  # an event would make one for each wait, too, and more
        self.attached_event = asyncio.Event()
        self.stream_count = 0
        """That were attached."""
        self.incarnation = 0
        """The highest that the neighbour has greeted with: a lower one is an old process, or a copy."""

    def queue(self, t: int, frame: bytes) -> None:
        """Send a round's bytes as soon as the stream allows; never waits."""
        self._frames.append((t, frame))
        self._due.append(frame)
        self._kick()

    def queue_signature(self, t: int, signature: Callable[[], bytes]) -> None:
        """Send a signature behind round t, of a block in which the neighbour was told anything.

        Args:
            t: the round.
            signature: makes it; again where it is said again, for the signer's certificate may have been renewed.
        """
        self._signatures.append((t, signature))
        self._due.append(signature())
        self._kick()

    def attach(self, stream: _Stream, next_round: int, displaced: Callable[[], object] = lambda: None) -> None:
        """A stream is there, and its other end has heard everything below `next_round`.

        Args:
            stream: takes the place of the one that was there.
            next_round: the round to go on with.
            displaced: called when another stream takes this one's place.
        """
        if self.has_stream(self._stream):
            self._displaced()
        self._stream, self._displaced = stream, displaced
        self.stream_count += 1
        self._due.clear()
        self._due.extend(self._from(next_round))
        self.attached_event.set()
        self._kick()

    def _from(self, next_round: int) -> list[bytes]:
        """What a neighbour may lack that has heard everything below a round: a signature stands behind its round."""
        before = [signature() for t, signature in self._signatures if t < next_round][-1:]
        due = [(t, 0, frame) for t, frame in self._frames if t >= next_round]
        due += [(t, 1, signature()) for t, signature in self._signatures if t >= next_round]
        return [*before, *(payload for _, _, payload in sorted(due))]

    @property
    def queue_size(self) -> int:
        """Messages and signatures that are yet to be written."""
        return len(self._due)

    def has_stream(self, stream: _Stream | None) -> bool:
        """True when this is the stream that the link writes to."""
        return stream is not None and self._stream is stream

    def detach(self, stream: _Stream) -> None:
        """A stream has ended."""
        if self.has_stream(stream):
            self._stream = None
            self.attached_event.clear()
            self._wake()

    async def wait_flushed(self) -> None:
        """Wait until all that was said is written, or the stream is gone."""
        await self._idle.wait()

    async def wait_idle(self) -> None:
        """Wait for a moment until nothing is being written: a call that ends meanwhile does not end on the other side."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                await self._idle.wait()

    async def close(self) -> None:
        """Write nothing more."""
        self._stream = None
        await self._tasks.end()

    def _kick(self) -> None:
        if self._stream is not None:
            self._idle.clear()
            self._wake()
            if self._writing is None or self._writing.done():
                self._writing = self._tasks.start(self._write(), "a channel cannot be written")

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _write(self) -> None:
        """As long as there is a stream, write what is due, one message at a time: two writes in flight on one are an error."""
        try:
            while (stream := self._stream) is not None:
                if self._due:
                    try:
                        await stream.write(self._due.popleft())
                    except _STREAM_END_ERRORS:
                        self.detach(stream)
                else:
                    self._idle.set()
                    self._woken = asyncio.get_running_loop().create_future()
                    await self._woken
        finally:
            self._idle.set()


class Outbox:
    """What is said in a run, and to whom.

    Args:
        role: of the learner.
        plan: who is told in which round.
        attendance: the rounds in which it takes part.
        own: what it said last, as its signatures say it.
        links: to all neighbours.
        credentials: of the learner: with an identity it signs what it says.
        mirror: is given every frame that was said and who was told it; None: the run is not mirrored.
        roster: who takes part in which round.
    """

    def __init__(
        self,
        role: RunAssignment,
        plan: NeighbourSchedule,
        attendance: Participation,
        own: SentDigests,
        links: Mapping[int, NeighbourLink],
        credentials: Credentials,
        mirror: Callable[[bytes, list[int]], None] | None,
        roster: ParticipationSchedule,
    ) -> None:
        self._role, self._plan, self._attendance, self._own, self.participation = role, plan, attendance, own, roster
        self.links, self._credentials, self._mirror = links, credentials, mirror

    def get_active_links(self, t: int) -> dict[int, NeighbourLink]:
        """The links to those who are there in a round, and not lost."""
        there, lost = self.participation.participant_mask(t), self.participation.lost_senders(self._role.index, t)
        return {j: link for j, link in self.links.items() if there[j] and j not in lost}

    def send_round(self, t: int, frame: bytes) -> None:
        """Hand a round's message to everybody who is told.

        Raises:
            FailedPrecondition: a signature is due, and the identity cannot sign.
        """
        told = self._plan.get_round_part(t).out_neighbours
        for j in told:
            self.links[j].queue(t, frame)
        if self._mirror is not None:
            self._mirror(frame, list(told))
        if self._ends_block(t):
            self._sign(t)

    def repeat(self, frames: Iterable[tuple[int, bytes]], said: int) -> None:
        """After a death: what neighbours may lack, with its signatures.

        Args:
            frames: by round.
            said: rounds that were said.

        Raises:
            FailedPrecondition: the identity cannot sign.
        """
        for t, frame in frames:
            for j in self._plan.get_round_part(t).out_neighbours:
                self.links[j].queue(t, frame)
        for block in sorted(self._own.digests):
            t = min(ROUNDS_PER_BLOCK * (block + 1), said) - 1
            if self._ends_block(t):
                self._sign(t)

    def end(self, said: int) -> None:
        """Sign what was said last: nothing more follows.

        Raises:
            FailedPrecondition: the identity cannot sign.
        """
        if said and not self._ends_block(said - 1):
            self._sign(said - 1)

    async def flush(self) -> None:
        """Wait until all that was said is written, or the channels are broken."""
        await asyncio.gather(*(link.wait_flushed() for link in self.links.values()))

    async def close(self) -> None:
        """Say nothing more to anybody."""
        for link in self.links.values():
            await link.close()

    def _ends_block(self, t: int) -> bool:
        """Is a round followed by a signature, once it was said?"""
        return t % ROUNDS_PER_BLOCK == ROUNDS_PER_BLOCK - 1 or t + 1 not in self._attendance

    def _sign(self, t: int) -> None:
        """Tell whoever was told anything of the block of round t what was said in it, signed."""
        if self._credentials.principal is None:
            return
        block = t // ROUNDS_PER_BLOCK
        statement, told = (
            self._own.build_statement(self._role.run_id, self._role.index, block),
            self._own.list_recipients(block),
        )
        signature = _signature_of(statement, self._credentials)
        for j in told:
            self.links[j].queue_signature(t, signature)
        if self._mirror is not None and told:
            self._mirror(signature(), told)


def _signatures_kept(keep: int) -> int:
    """Signatures that a neighbour may lack which may lack so many rounds."""
    return keep // ROUNDS_PER_BLOCK + 2


def _signature_of(statement: Statement, credentials: Credentials) -> Callable[[], bytes]:
    """Makes a signature, once for all neighbours, and anew where the identity was renewed since."""
    made = dict[datetime | None, bytes]()

    def make() -> bytes:
        if (until := credentials.expiry) not in made:
            made[until] = credentials.sign_statement(statement).encode()
        return made[until]

    return make
