"""What is recorded of a channel: a row for each message, and for hellos, metadata and trailers."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One record.

    Attributes:
        caller, callee: the edge, from the learner that opens the stream to the one that accepts it.
        sender: whose bytes these are.
        direction: `out`, from caller to callee, or `back`.
        kind: `message`, `hello`, `metadata` or `trailers`.
        stream: counts the streams of an edge from 1; 0 where a learner mirrored the message.
        connection: counts the connections of an edge (its callers' addresses) from 1; 0 where mirrored.
        method: the gRPC method; empty where mirrored.
        wall_ns, mono_ns: Unix time and monotonic time, in nanoseconds.
        size: of the payload, in bytes.
        payload: the gRPC message as it crossed the channel, a hello too; metadata and trailers as JSON.
    """

    caller: int
    callee: int
    sender: int
    direction: str
    kind: str
    stream: int
    connection: int
    method: str
    wall_ns: int
    mono_ns: int
    size: int
    payload: bytes
