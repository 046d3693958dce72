"""Links over streams in memory: order, the same bytes again after a break, and one write at a time."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_learner.peers import outbox
from sottovoce_learner.peers.outbox import NeighbourLink


class Stream:
    """A stream in memory. `hold` keeps writes waiting until `release`; `broken` makes them fail."""

    def __init__(self, *, hold: bool = False, broken: BaseException | None = None) -> None:
        self.written: list[bytes] = []
        self.broken = broken
        self._free = asyncio.Event()
        self._writing = False
        if not hold:
            self._free.set()

    async def write(self, message: bytes) -> None:
        assert not self._writing, "two writes in flight on one stream"
        self._writing = True
        try:
            await self._free.wait()
            await asyncio.sleep(0)
            if self.broken is not None:
                raise self.broken
            self.written.append(message)
        finally:
            self._writing = False

    def release(self) -> None:
        self._free.set()


def frame(t: int) -> bytes:
    return b"round %d" % t


async def settled() -> None:
    """Let every task that can go on do so."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_rounds_are_written_in_order() -> None:
    link, stream = NeighbourLink(), Stream()
    link.attach(stream, 0)
    for t in range(5):
        link.queue(t, frame(t))
        await link.wait_flushed()
    assert stream.written == [frame(t) for t in range(5)]


async def test_what_was_said_before_the_stream_came_is_written_then() -> None:
    link, stream = NeighbourLink(), Stream()
    link.queue(0, frame(0))
    link.queue(1, frame(1))
    assert not link.attached_event.is_set()
    link.attach(stream, 0)
    await link.wait_flushed()

    assert link.attached_event.is_set()
    assert stream.written == [frame(0), frame(1)]


async def test_a_slow_stream_gets_one_write_at_a_time() -> None:
    link, stream = NeighbourLink(), Stream(hold=True)
    link.attach(stream, 0)
    link.queue(0, frame(0))
    await settled()
    link.queue(1, frame(1))
    await settled()
    assert stream.written == []
    stream.release()
    await link.wait_flushed()
    assert stream.written == [frame(0), frame(1)]


@pytest.mark.parametrize(("heard", "again"), [(3, [3, 4]), (4, [4]), (5, [])])
async def test_a_new_stream_goes_on_where_the_neighbour_stands_with_the_same_bytes(
    heard: int, again: list[int]
) -> None:
    link, first, second = NeighbourLink(), Stream(), Stream()
    link.attach(first, 0)
    for t in range(5):
        link.queue(t, frame(t))
    await link.wait_flushed()
    link.detach(first)
    link.attach(second, heard)
    await link.wait_flushed()

    assert second.written == [frame(t) for t in again]
    link.queue(5, frame(5))
    await link.wait_flushed()
    assert second.written == [frame(t) for t in [*again, 5]]


@pytest.mark.parametrize("heard", range(6, 12))
async def test_a_link_says_as_much_again_as_a_neighbour_may_lack(heard: int) -> None:
    """Five messages of a neighbour that is told in even rounds."""
    link, first, second = NeighbourLink(5), Stream(), Stream()
    link.attach(first, 0)
    for t in range(0, 14, 2):
        link.queue(t, frame(t))
        await link.wait_flushed()
    link.detach(first)
    link.queue(14, frame(14))
    link.attach(second, heard)
    await link.wait_flushed()

    assert first.written == [frame(t) for t in range(0, 14, 2)]
    assert second.written == [frame(t) for t in range(6, 16, 2) if t >= heard]


BREAKS = [
    asyncio.InvalidStateError("the call is over"),
    grpc.aio.UsageError("the call is over"),
    grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
async def test_a_broken_write_detaches_and_nothing_is_lost(error: BaseException) -> None:
    link, stream = NeighbourLink(), Stream(broken=error)
    link.attach(stream, 0)
    link.queue(0, frame(0))
    await link.wait_flushed()
    assert not link.attached_event.is_set()

    link.queue(1, frame(1))  # nobody there: no write, no error
    again = Stream()
    link.attach(again, 0)
    await link.wait_flushed()
    assert again.written == [frame(0), frame(1)]


@pytest.mark.parametrize("fails", [True, False])
async def test_a_stream_that_comes_while_a_write_hangs_is_served_when_that_write_ends(fails: bool) -> None:
    """The neighbour waits for our message, so nothing more will be said that could wake the link up."""
    link, old, new = NeighbourLink(), Stream(hold=True), Stream()
    link.attach(old, 0)
    link.queue(0, frame(0))
    await settled()
    link.attach(new, 0)
    await settled()
    old.broken = asyncio.InvalidStateError("the call is over") if fails else None
    old.release()
    await settled()

    assert new.written == [frame(0)]
    assert link.attached_event.is_set()


async def test_flushed_waits_for_a_stream_that_took_over() -> None:
    link, old, new = NeighbourLink(), Stream(hold=True), Stream()
    link.attach(old, 0)
    link.queue(0, frame(0))
    await settled()
    link.attach(new, 0)
    flushed = asyncio.ensure_future(link.wait_flushed())
    await settled()
    assert not flushed.done()
    old.release()
    await flushed
    assert new.written == [frame(0)]


async def test_the_end_of_an_old_stream_does_not_detach_the_new_one() -> None:
    link, old, new = NeighbourLink(), Stream(), Stream()
    link.attach(old, 0)
    link.attach(new, 0)
    link.detach(old)
    assert link.attached_event.is_set()
    link.queue(0, frame(0))
    await link.wait_flushed()
    assert (old.written, new.written) == ([], [frame(0)])


async def test_flushed_without_a_word_returns() -> None:
    await NeighbourLink().wait_flushed()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=12))
def test_whatever_breaks_the_neighbour_hears_every_round_once_in_order(rounds: list[tuple[bool, int]]) -> None:
    """Before each round the stream may break, with some of what was written lost on the way; at most one round is."""

    async def play() -> None:
        link, heard = NeighbourLink(), list[bytes]()
        stream = Stream()
        link.attach(stream, 0)
        for t, (breaks, lost) in enumerate(rounds):
            link.queue(t, frame(t))
            if breaks:
                await link.wait_flushed()
                arrived = stream.written[: max(0, len(stream.written) - min(lost, 1))]
                heard += arrived
                link.detach(stream)
                stream = Stream()
                link.attach(stream, len(heard))
            await link.wait_flushed()
            if not breaks and lost:
                await settled()
        heard += stream.written
        assert heard == [frame(t) for t in range(len(rounds))]

    asyncio.run(play())


async def test_a_stream_that_has_ended_is_quiet_before_its_call_ends() -> None:
    """GRPC takes one write or end at a time: an end that comes too soon is lost, and the other side waits for ever."""
    link, stream = NeighbourLink(), Stream(hold=True)
    await link.wait_idle()  # nothing was ever written
    link.attach(stream, 0)
    link.queue(0, frame(0))
    link.queue(1, frame(1))
    await settled()
    link.detach(stream)
    ending = asyncio.ensure_future(link.wait_idle())
    await settled()
    assert not ending.done()
    stream.release()
    await ending
    assert stream.written == [frame(0)] and not stream._writing


async def test_a_write_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_IDLE_TIMEOUT_S", 0.01)
    link, stream = NeighbourLink(), Stream(hold=True)
    link.attach(stream, 0)
    link.queue(0, frame(0))
    await settled()
    link.detach(stream)
    await asyncio.wait_for(link.wait_idle(), 100.0)
    assert stream._writing
    await link.close()
