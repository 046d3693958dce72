"""What stands in the entries of a log, by their kind: values, to bytes and back. No file, no clock."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_GRANT = struct.Struct("<Qd")
_INPUTS = struct.Struct("<QIIII")
_SNAPSHOT = struct.Struct("<Q16s32sQ")


@dataclass(frozen=True, slots=True)
class Grant:
    """What may be said before the next entry of its kind, reserved beforehand.

    Attributes:
        until: rounds below this one may be said.
        epsilon: of the run, the most that their messages may bring it to.
    """

    until: int
    epsilon: float

    def encode(self) -> bytes:
        """As an entry's body."""
        return _GRANT.pack(self.until, self.epsilon)

    @classmethod
    def decode(cls, body: bytes) -> Grant:
        """`encode` backwards."""
        return cls(*_GRANT.unpack(body))


NOTHING = Grant(0, 0.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What stands in a file of its own in place of all entries up to one, and is deleted when the next such file is there.

    Attributes:
        covers: sequence number of that entry.
        chain: behind it.
        digest: SHA-256 of the file.
        size: of the file, in bytes.
        reserved: the last reservation up to there.
    """

    covers: int
    chain: bytes
    digest: bytes
    size: int
    reserved: Grant

    @property
    def name(self) -> str:
        """Of the file, in the run's folder."""
        return f"{self.covers:016d}.snapshot"

    def encode(self) -> bytes:
        """As an entry's body."""
        return _SNAPSHOT.pack(self.covers, self.chain, self.digest, self.size) + self.reserved.encode()

    @classmethod
    def decode(cls, body: bytes) -> Snapshot:
        """`encode` backwards."""
        covers, chain, digest, size = _SNAPSHOT.unpack_from(body)
        return cls(covers, chain, digest, size, Grant.decode(body[_SNAPSHOT.size :]))


class Said(NamedTuple):  # made in every round: a frozen dataclass takes four times as long
    """A round: what is said in it, and the inputs of the round before, from which it was made.

    Attributes:
        frame: the message, as it goes out; empty in the closing entry, after the last round.
        heard: frames of the round before, as they came.
        upto: batches that were in keeping when the round before took its records.
        records: that the round before brought.
        drawn: the noise of the message, where the state keeps some that no message shows.
    """

    frame: bytes
    heard: tuple[bytes, ...] = ()
    upto: int = 0
    records: int = 0
    drawn: bytes = b""

    def before(self, frame: bytes, drawn: bytes = b"") -> Said:
        """The round that is made from these inputs."""
        return Said(frame, self.heard, self.upto, self.records, drawn)

    def encode(self) -> bytes:
        """As an entry's body."""
        length = len(self.heard[0]) if self.heard else len(self.frame)
        head = _INPUTS.pack(self.upto, self.records, len(self.heard), length, len(self.drawn))
        return b"".join((head, *self.heard, self.drawn, self.frame))

    @classmethod
    def decode(cls, body: bytes) -> Said:
        """`encode` backwards."""
        upto, records, count, length, hidden = _INPUTS.unpack_from(body)
        ends = [_INPUTS.size + k * length for k in range(count + 1)]
        heard, frame_at = tuple(body[a:b] for a, b in pairwise(ends)), ends[-1] + hidden
        return cls(body[frame_at:], heard, upto, records, body[ends[-1] : frame_at])
