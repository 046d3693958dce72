"""What passed on the wire in one run, as far as it is looked at: between learners, or a foreign service and its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from sottovoce.arrays import FloatArray

HEAD, WIDTH = 64, 128
"""Of a message: the first bytes, and of each of its fields the first numbers, that are looked at."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decoder read from a message.

    Attributes:
        fields: name to numbers, of any shape.
        round, sender: whose word it is, and in which round: one sender must not say two things in a round. None: no rounds;
            the side of the connection that it came from.
    """

    fields: Mapping[str, Any]
    round: int | None = None
    sender: str | int | None = None


@dataclass(frozen=True, slots=True)
class Overheard:
    """One thing that passed.

    Attributes:
        kind: `message`, `metadata` or `trailers`; between learners also `hello`, with which a stream begins, and `signature`, of
            what was said. Of a wiretap `ciphertext`, or `opened` and `closed`: a connection, and either side of it.
        method: the gRPC method; between learners with the edge, and of a wiretap the edge alone.
        direction: `out`, to the service, or `back`.
        stream: counts the streams of the run from 0; of a wiretap, the connections.
        seconds: since the run began.
        size: in bytes, all of it.
        head: the first `HEAD` bytes of a message.
        digest: of all its bytes.
        entries: of metadata, hellos and trailers, key and value.
        status: code and text of trailers.
        decoded: what the decoder read, each field flat and at most `WIDTH` long; None: nothing.
        whose: `said` by the one who is audited, `told` to it, or `others`'. Of a foreign service everything counts as said.
    """

    kind: Literal["message", "hello", "signature", "metadata", "trailers", "ciphertext", "opened", "closed"]
    method: str
    direction: Literal["out", "back"]
    stream: int
    seconds: float
    size: int
    head: bytes = b""
    digest: bytes = b""
    entries: tuple[tuple[str, str], ...] = ()
    status: tuple[str, str] = ("", "")
    decoded: Decoded | None = None
    whose: Literal["said", "told", "others"] = "said"

    @property
    def place(self) -> str:
        """Method and direction, for people."""
        return f"{self.method} {'request' if self.direction == 'out' else 'response'}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One run.

    Attributes:
        world: 0 or 1.
        name: where it is in the captures.
        began: orders the runs.
        heard: all that passed, in order of time.
    """

    world: int
    name: str
    began: float
    heard: tuple[Overheard, ...]

    @property
    def messages(self) -> tuple[Overheard, ...]:
        """Only the messages of the one who is audited."""
        return tuple(each for each in self.heard if each.kind == "message" and each.whose == "said")

    @property
    def near(self) -> tuple[Overheard, ...]:
        """What the one who is audited said and was told."""
        return tuple(each for each in self.heard if each.whose != "others")


def digest(payload: bytes) -> bytes:
    """Equal for equal bytes, and, for all that matters, only for them."""
    return blake2b(payload, digest_size=16).digest()


def numbers(values: Any) -> FloatArray:
    """A decoded field as it is looked at: flat, float64, at most `WIDTH` long, without infinities.

    Raises:
        TypeError, ValueError: these are not numbers.
    """
    flat = np.asarray(values)
    if flat.dtype.kind not in "biuf":
        raise TypeError(f"a field must hold numbers, got {flat.dtype}")
    return np.clip(np.nan_to_num(flat.reshape(-1)[:WIDTH].astype(np.float64)), -1e100, 1e100)
