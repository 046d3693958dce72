"""Entries of a log: no bit of one may be another, and none stands in the place of another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sottovoce_learner.storage.wal import START_CHAIN, EntryKind, LogEntry, Reservation, RoundPayload, read_entries

BODIES = st.binary(max_size=40)


def entry(k: int, body: bytes) -> LogEntry:
    return LogEntry(EntryKind.ROUND, k, k, 0.5 * k, 1.0 + k, body)


def written(bodies: list[bytes]) -> tuple[bytes, list[int]]:
    """A log, and where its entries end."""
    raw, chain, ends = b"", START_CHAIN, []
    for k, body in enumerate(bodies):
        more, chain = entry(k, body).encode(chain)
        raw += more
        ends.append(len(raw))
    return raw, ends


@given(st.lists(BODIES, max_size=4), st.binary(max_size=100))
def test_what_was_written_is_read_and_nothing_behind_it(bodies: list[bytes], behind: bytes) -> None:
    raw, ends = written(bodies)
    found = read_entries(raw + behind)
    assert [each._replace(chain=b"", end_offset=0) for each in found] == [
        entry(k, body) for k, body in enumerate(bodies)
    ]
    assert [placed.end_offset for placed in found] == ends
    assert all(end % 8 == 0 for end in ends)


def test_no_byte_of_a_log_may_be_another_one_or_missing() -> None:
    raw, ends = written([b"", b"1", b"12345678", b"123456789"])
    for k in range(len(raw)):
        before = sum(end <= k for end in ends)
        assert len(read_entries(raw[:k])) == before
        for flip in (1, 0x80, 0xFF):
            other = raw[:k] + bytes([raw[k] ^ flip]) + raw[k + 1 :]
            assert len(read_entries(other)) == before, k


def test_an_entry_stands_only_where_it_was_written() -> None:
    raw, ends = written([b"a", b"b", b"c"])
    first, second, third = raw[: ends[0]], raw[ends[0] : ends[1]], raw[ends[1] :]
    assert [len(read_entries(b"".join(parts))) for parts in ((second,), (first, third), (first, second, second))] == [
        0,
        1,
        2,
    ]
    assert read_entries(second, 0, 1, START_CHAIN) == []


@given(st.integers(0, 2**63), st.floats(0, 1e300), st.lists(st.binary(min_size=5, max_size=5), max_size=3))
def test_bodies_come_back(upto: int, epsilon: float, heard: list[bytes]) -> None:
    for frame in (b"frame", b""):
        for drawn in (b"noise", b""):
            said = RoundPayload(frame, tuple(heard), upto, 3, drawn)
            assert RoundPayload.decode(said.encode()) == said
    assert Reservation.decode(Reservation(upto, epsilon).encode()) == Reservation(upto, epsilon)
