"""What a learner signs, what its neighbours owe it, and when a signature is said again. In memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.errors import EquivocationError, RemoteProtocolError
from sottovoce_learner.peers.inbox import _UnsignedMessages
from sottovoce_learner.peers.outbox import NeighbourLink, SentDigests
from sottovoce_learner.storage.snapshot import pack, unpack
from sottovoce_rpc.signatures import ROUNDS_PER_BLOCK, Statement, compute_frame_digest
from tests.learner.test_links import Stream


def frame(t: int, what: str = "") -> bytes:
    return b"round %d %s" % (t, what.encode())


def said(rounds: range, what: str = "") -> SentDigests:
    own = SentDigests(2 * ROUNDS_PER_BLOCK)
    for t in rounds:
        own.add_round(t, compute_frame_digest(frame(t, what)), [2, 5])
    return own


def heard(rounds: range) -> _UnsignedMessages:
    unsigned = _UnsignedMessages()
    for t in rounds:
        unsigned.require_signed(1, t)
        unsigned.add(1, t, compute_frame_digest(frame(t)))
    return unsigned


def test_a_block_is_signed_whole_or_as_far_as_it_was_said() -> None:
    own = said(range(ROUNDS_PER_BLOCK + 3))
    whole, part = own.build_statement("run", 1, 0), own.build_statement("run", 1, 1)
    assert (whole.block, part.block) == (0, 1)
    assert [whole[t] for t in range(ROUNDS_PER_BLOCK)] == [
        compute_frame_digest(frame(t)) for t in range(ROUNDS_PER_BLOCK)
    ]
    assert [part[t] is None for t in range(ROUNDS_PER_BLOCK, 2 * ROUNDS_PER_BLOCK)] == [False] * 3 + [True] * (
        ROUNDS_PER_BLOCK - 3
    )


def test_what_was_said_long_ago_is_forgotten_and_what_is_remembered_comes_back() -> None:
    own = said(range(10 * ROUNDS_PER_BLOCK))
    again = unpack(pack(own.copy(), {}), {})
    assert sorted(own.digests) == [6, 7, 8, 9]
    assert again.build_statement("run", 1, 9) == own.build_statement("run", 1, 9)
    assert again == own and again.list_recipients(9) == [2, 5]


def test_of_a_neighbour_that_hears_seldom_the_last_block_is_remembered_however_old() -> None:
    own = SentDigests(1)
    for t in range(10 * ROUNDS_PER_BLOCK):
        own.add_round(t, compute_frame_digest(frame(t)), [2] if t != 3 else [2, 7])
    assert sorted(own.digests) == [0, 8, 9] and own.list_recipients(0) == [7] and own.list_recipients(9) == [2]
    assert own.build_statement("run", 1, 0)[3] == compute_frame_digest(frame(3))


def test_a_neighbour_signs_a_block_before_it_says_anything_of_another() -> None:
    unsigned = heard(range(5, ROUNDS_PER_BLOCK))
    with pytest.raises(
        RemoteProtocolError, match=f"must sign its messages from round 5 on before it sends round {ROUNDS_PER_BLOCK}"
    ):
        unsigned.require_signed(1, ROUNDS_PER_BLOCK)
    unsigned.require_signed(2, ROUNDS_PER_BLOCK)  # of whom nothing was heard
    assert unsigned.has_unsigned(1, 0) and unsigned.unsigned_neighbours == {1}
    unsigned.verify_statement(1, said(range(ROUNDS_PER_BLOCK)).build_statement("run", 1, 0))
    unsigned.require_signed(1, ROUNDS_PER_BLOCK)
    assert not unsigned.has_unsigned(1, 0) and not unsigned.unsigned_neighbours  # repetitions are not checked


def test_what_is_signed_is_what_was_said() -> None:
    with pytest.raises(EquivocationError, match="signed another message of round 3 than arrived here"):
        heard(range(3, 9)).verify_statement(1, said(range(ROUNDS_PER_BLOCK), "otherwise").build_statement("run", 1, 0))
    with pytest.raises(RemoteProtocolError, match="did not sign its message of round 8"):
        heard(range(9)).verify_statement(1, said(range(8)).build_statement("run", 1, 0))
    with pytest.raises(RemoteProtocolError, match="learner 1 signed in the name of learner 2"):
        heard(range(9)).verify_statement(1, Statement("run", 2, 0, said(range(9)).build_statement("run", 1, 0).digests))


def test_who_heard_some_rounds_checks_these() -> None:
    unsigned = heard(range(7, 8))
    unsigned.verify_statement(1, said(range(ROUNDS_PER_BLOCK)).build_statement("run", 1, 0))
    unsigned.require_signed(1, 5 * ROUNDS_PER_BLOCK)


def test_a_block_that_was_signed_in_part_is_signed_again() -> None:
    """Its learner was away for some rounds of it."""
    unsigned = heard(range(4))
    unsigned.verify_statement(1, said(range(4)).build_statement("run", 1, 0))
    for t in range(20, ROUNDS_PER_BLOCK):
        unsigned.require_signed(1, t)
        unsigned.add(1, t, compute_frame_digest(frame(t)))
    unsigned.verify_statement(1, said(range(ROUNDS_PER_BLOCK)).build_statement("run", 1, 0))
    unsigned.require_signed(1, ROUNDS_PER_BLOCK)


@given(
    rounds=st.integers(1, 5 * ROUNDS_PER_BLOCK), lacking=st.integers(0, 2 * ROUNDS_PER_BLOCK), told=st.integers(1, 40)
)
async def test_on_a_new_stream_signatures_stand_where_they_did(rounds: int, lacking: int, told: int) -> None:
    """Behind the rounds that they sign; the last one before what is lacking comes again, for nobody knows whether it came."""
    link, first, second = NeighbourLink(retained_rounds=3 * ROUNDS_PER_BLOCK), Stream(), Stream()
    due = list[tuple[int, bytes]]()
    link.attach(first, 0)
    for t in range(0, rounds):
        if t % told == 0:
            link.queue(t, frame(t))
            due.append((t, frame(t)))
        if t % ROUNDS_PER_BLOCK == ROUNDS_PER_BLOCK - 1 and any(
            each // ROUNDS_PER_BLOCK == t // ROUNDS_PER_BLOCK for each, _ in due
        ):
            link.queue_signature(t, lambda t=t: b"signature %d" % t)  # type: ignore[misc]
            due.append((t, b"signature %d" % t))
        await link.wait_flushed()
    assert first.written == [payload for _, payload in due]

    next_round = max(rounds - lacking, 0)
    signatures = [payload for t, payload in due if payload.startswith(b"signature") and t < next_round]
    link.attach(second, next_round)
    await link.wait_flushed()
    assert second.written == signatures[-1:] + [payload for t, payload in due if t >= next_round]
    await link.close()
