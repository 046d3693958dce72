"""Frames of HTTP/2 that relays have recorded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.auditing.http2_frames import FrameSample, Http2Frame, find_violations, split_frames


def recorded(frame: Http2Frame) -> bytes:
    head = frame.size.to_bytes(3) + bytes([frame.kind, frame.flags])
    return head + frame.stream.to_bytes(4) + frame.content


def frame_of(kind: int, flags: int, stream: int, content: bytes) -> Http2Frame:
    """A frame as a relay records it."""
    return Http2Frame(kind, flags, stream, len(content), b"" if kind == 0 and flags <= 1 else content)


frames = st.builds(
    frame_of,
    st.integers(0, 12) | st.integers(0, 255),
    st.sampled_from([0, 1, 4, 5]) | st.integers(0, 255),
    st.integers(0, 3) | st.integers(0, 2**32 - 1),
    st.sampled_from([bytes(4), bytes(8), b"\x80" + bytes(3)]) | st.binary(max_size=30),
)


@given(st.lists(frames))
def test_frames_are_read_as_they_were_recorded(passed: list[Http2Frame]) -> None:
    """And what is passed over at once breaks no rule."""
    data = b"".join(map(recorded, passed))
    assert list(split_frames(data)) == passed
    assert list(find_violations(data)) == [text for each in passed if (text := each.describe_violation())]


@given(st.binary(max_size=200))
def test_any_bytes_are_read(data: bytes) -> None:
    FrameSample().add("request", data)
    assert all(find_violations(data))


def test_of_each_kind_and_place_the_first_frames_are_kept() -> None:
    sample, ping, unknown = FrameSample(), frame_of(6, 0, 0, bytes(8)), frame_of(83, 0, 0, b"x")
    for place in ("request", "response"):
        sample.add(place, recorded(ping) * 1000 + recorded(unknown))
    assert sample.frames == [(place, each) for place in ("request", "response") for each in (*[ping] * 16, unknown)]
