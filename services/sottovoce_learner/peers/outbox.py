"""Outbox: messages to neighbours, queued on one link each, mirrored where the run is, and signed block by block.

A message is durable in the log before it comes here (`storage/run_log.py`). A link is the stream to one neighbour, opened
by either side. It keeps the bytes of as many rounds as the neighbour may lack, exactly as logged, and their signatures.
When a stream is (re)opened, the neighbour names the first round it has not received, and the link continues from there
with the same bytes; the signature before that round may be lost, and is always sent again. Messages from neighbours are
in `inbox.py`.
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
"""Time limit for a write on a stream that has ended."""
_STREAM_END_ERRORS = (
    grpc.RpcError,
    grpc.aio.BaseError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    asyncio.CancelledError,
)
"""Errors of a write whose call is over."""


@dataclass(slots=True)
class SentDigests:
    """Digests of the last sent messages, for signatures.

    Of each neighbour it keeps the blocks whose signature may be lost, however old they are.

    Attributes:
        retained_rounds: number of rounds whose messages a neighbour may lack.
        digests: digests of sent messages, by block.
        recipients: last blocks of messages sent to each neighbour.
    """

    retained_rounds: int
    digests: dict[int, bytes] = field(default_factory=dict)
    recipients: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add_round(self, t: int, digest: bytes, recipients: Iterable[int]) -> None:
        """Add the message of a round and its recipients."""
        block, k = divmod(t, ROUNDS_PER_BLOCK)
        for j in recipients:
            if block not in (before := self.recipients.get(j, ())):
                self.recipients[j] = (*before, block)[-_count_retained_signatures(self.retained_rounds) :]
        if block not in self.digests:
            needed = set(chain.from_iterable(self.recipients.values()))
            self.digests = {each: digests for each, digests in self.digests.items() if each in needed}
        digests = self.digests.get(block, EMPTY_DIGESTS)
        self.digests[block] = digests[: DIGEST_BYTES * k] + digest + digests[DIGEST_BYTES * (k + 1) :]

    def build_statement(self, run_id: str, sender: int, block: int) -> Statement:
        """Return the statement to sign for a block."""
        return Statement(run_id, sender, block, self.digests[block])

    def list_recipients(self, block: int) -> list[int]:
        """Return the neighbours that were sent a message of a block."""
        return [j for j, sent_digests in self.recipients.items() if block in sent_digests]

    def copy(self) -> SentDigests:
        """Return a copy, which does not change."""
        return SentDigests(self.retained_rounds, dict(self.digests), dict(self.recipients))

    def restore(self, copy: SentDigests) -> None:
        """Restore the content of a copy."""
        self.digests, self.recipients = dict(copy.digests), dict(copy.recipients)


class _Stream(Protocol):
    """Writing half of a stream: a client call or a server context."""

    async def write(self, message: bytes) -> None:
        """Send one message."""
        ...


class NeighbourLink:
    """Ordered messages to one neighbour, over its current stream.

    Args:
        retained_rounds: number of messages that the neighbour may lack.
    """

    def __init__(self, retained_rounds: int = 2) -> None:
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=retained_rounds)
        self._signatures: deque[tuple[int, Callable[[], bytes]]] = deque(
            maxlen=_count_retained_signatures(retained_rounds)
        )
        self._due: deque[bytes] = deque(maxlen=2 * retained_rounds)
        self._stream: _Stream | None = None
        self._on_displaced: Callable[[], object] = lambda: None
        self._tasks = Tasks()
        self._writing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiter: asyncio.Future[None] | None = (
            None  # cheaper than an event, which creates a future for each wait, too
        )
        self.attached_event = asyncio.Event()
        self.stream_count = 0
        """Number of streams attached so far."""
        self.incarnation = 0
        """Highest incarnation in a Hello of the neighbour: a lower one is an old process, or a copy."""

    def queue(self, t: int, frame: bytes) -> None:
        """Send a round's bytes as soon as the stream allows; never waits."""
        self._frames.append((t, frame))
        self._due.append(frame)
        self._start_writing()

    def queue_signature(self, t: int, signature: Callable[[], bytes]) -> None:
        """Send the signature of a block after round t, if the neighbour got a message of the block.

        Args:
            t: round.
            signature: creates it; again for a repetition, because the signer's certificate may have been renewed.
        """
        self._signatures.append((t, signature))
        self._due.append(signature())
        self._start_writing()

    def attach(self, stream: _Stream, next_round: int, displaced: Callable[[], object] = lambda: None) -> None:
        """Attach a stream whose other end has received all rounds below `next_round`.

        Args:
            stream: replaces the current one.
            next_round: round to continue with.
            displaced: called when another stream replaces this one.
        """
        if self.has_stream(self._stream):
            self._on_displaced()
        self._stream, self._on_displaced = stream, displaced
        self.stream_count += 1
        self._due.clear()
        self._due.extend(self._list_missing(next_round))
        self.attached_event.set()
        self._start_writing()

    def _list_missing(self, next_round: int) -> list[bytes]:
        """Return what a neighbour lacks that has all rounds below `next_round`: a signature follows its round."""
        before = [signature() for t, signature in self._signatures if t < next_round][-1:]
        due = [(t, 0, frame) for t, frame in self._frames if t >= next_round]
        due += [(t, 1, signature()) for t, signature in self._signatures if t >= next_round]
        return [*before, *(payload for _, _, payload in sorted(due))]

    @property
    def queue_size(self) -> int:
        """Number of messages and signatures not written yet."""
        return len(self._due)

    def has_stream(self, stream: _Stream | None) -> bool:
        """Return whether the link writes to this stream."""
        return stream is not None and self._stream is stream

    def detach(self, stream: _Stream) -> None:
        """Detach a stream that has ended."""
        if self.has_stream(stream):
            self._stream = None
            self.attached_event.clear()
            self._wake()

    async def wait_flushed(self) -> None:
        """Wait until all messages are written, or the stream has ended."""
        await self._idle.wait()

    async def wait_idle(self) -> None:
        """Wait briefly until no write is in progress: a call that ends during a write does not end on the other side."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                await self._idle.wait()

    async def close(self) -> None:
        """Write nothing more."""
        self._stream = None
        await self._tasks.end()

    def _start_writing(self) -> None:
        if self._stream is not None:
            self._idle.clear()
            self._wake()
            if self._writing is None or self._writing.done():
                self._writing = self._tasks.start(self._write(), "a channel cannot be written")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _write(self) -> None:
        """Write due messages while there is a stream, one at a time: two concurrent writes on one stream are an error."""
        try:
            while (stream := self._stream) is not None:
                if self._due:
                    try:
                        await stream.write(self._due.popleft())
                    except _STREAM_END_ERRORS:
                        self.detach(stream)
                else:
                    self._idle.set()
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self._idle.set()


class Outbox:
    """Sent messages of a learner in a run.

    Args:
        role: assignment of the learner.
        plan: recipients of each round.
        learner_participation: rounds in which it participates.
        sent_digests: digests of its last messages.
        links: links to all neighbours.
        credentials: credentials of the learner: with an identity it signs its messages.
        mirror: receives every sent frame and its recipients; None: the run is not mirrored.
        participation: participation of all learners by round.
    """

    def __init__(
        self,
        role: RunAssignment,
        plan: NeighbourSchedule,
        learner_participation: Participation,
        sent_digests: SentDigests,
        links: Mapping[int, NeighbourLink],
        credentials: Credentials,
        mirror: Callable[[bytes, list[int]], None] | None,
        participation: ParticipationSchedule,
    ) -> None:
        self._role, self._plan, self._learner_participation, self._sent_digests, self.participation = (
            role,
            plan,
            learner_participation,
            sent_digests,
            participation,
        )
        self.links, self._credentials, self._mirror = links, credentials, mirror

    def get_active_links(self, t: int) -> dict[int, NeighbourLink]:
        """Return the links to neighbours that participate in a round and are not lost."""
        mask, lost = self.participation.participant_mask(t), self.participation.lost_senders(self._role.index, t)
        return {j: link for j, link in self.links.items() if mask[j] and j not in lost}

    def send_round(self, t: int, frame: bytes) -> None:
        """Queue a round's message for all recipients.

        Raises:
            FailedPrecondition: a signature is due, and the identity cannot sign.
        """
        recipients = self._plan.get_round_part(t).out_neighbours
        for j in recipients:
            self.links[j].queue(t, frame)
        if self._mirror is not None:
            self._mirror(frame, list(recipients))
        if self._ends_block(t):
            self._sign(t)

    def repeat(self, frames: Iterable[tuple[int, bytes]], committed: int) -> None:
        """Queue again what neighbours may lack after a crash, with its signatures.

        Args:
            frames: messages by round.
            committed: number of committed rounds.

        Raises:
            FailedPrecondition: the identity cannot sign.
        """
        for t, frame in frames:
            for j in self._plan.get_round_part(t).out_neighbours:
                self.links[j].queue(t, frame)
        for block in sorted(self._sent_digests.digests):
            t = min(ROUNDS_PER_BLOCK * (block + 1), committed) - 1
            if self._ends_block(t):
                self._sign(t)

    def end(self, committed: int) -> None:
        """Sign the last messages: nothing more follows.

        Raises:
            FailedPrecondition: the identity cannot sign.
        """
        if committed and not self._ends_block(committed - 1):
            self._sign(committed - 1)

    async def flush(self) -> None:
        """Wait until all messages are written, or the channels are broken."""
        await asyncio.gather(*(link.wait_flushed() for link in self.links.values()))

    async def close(self) -> None:
        """Send nothing more."""
        for link in self.links.values():
            await link.close()

    def _ends_block(self, t: int) -> bool:
        """Return whether the message of a round is followed by a signature."""
        return t % ROUNDS_PER_BLOCK == ROUNDS_PER_BLOCK - 1 or t + 1 not in self._learner_participation

    def _sign(self, t: int) -> None:
        """Send the signature of the block of round t to all recipients of its messages."""
        if self._credentials.principal is None:
            return
        block = t // ROUNDS_PER_BLOCK
        statement, recipients = (
            self._sent_digests.build_statement(self._role.run_id, self._role.index, block),
            self._sent_digests.list_recipients(block),
        )
        signature = _build_signer(statement, self._credentials)
        for j in recipients:
            self.links[j].queue_signature(t, signature)
        if self._mirror is not None and recipients:
            self._mirror(signature(), recipients)


def _count_retained_signatures(retained_rounds: int) -> int:
    """Return the number of signatures that a neighbour may lack that may lack `retained_rounds` rounds."""
    return retained_rounds // ROUNDS_PER_BLOCK + 2


def _build_signer(statement: Statement, credentials: Credentials) -> Callable[[], bytes]:
    """Return a function that signs once for all neighbours, and again after the identity was renewed."""
    signatures = dict[datetime | None, bytes]()

    def sign() -> bytes:
        if (expiry := credentials.expiry) not in signatures:
            signatures[expiry] = credentials.sign_statement(statement).encode()
        return signatures[expiry]

    return sign
