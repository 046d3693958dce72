"""Decoding rounds of a run of which nothing is known: the messages themselves say what fields they have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.errors import RemoteProtocolError
from sottovoce_rpc.codec import decode_frames, parse_round, round_length

if TYPE_CHECKING:
    import pyarrow as pa

LAST_ROUND = 2**62
"""What is beyond it is no round that anybody counted up to."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Group:
    """Messages with the same fields.

    Attributes:
        rows: of the batch.
        rounds, senders: that the messages claim.
        fields: name to `(messages, *shape)`.
    """

    rows: IntArray
    rounds: IntArray
    senders: IntArray
    fields: Mapping[str, FloatArray]


class Decoder:
    """Messages of equal length are taken to have equal fields, and decoded at once; if that fails, each by itself.

    Attributes:
        failed: messages that are no rounds.
    """

    def __init__(self) -> None:
        self.failed = 0
        self._shapes: dict[int, Shapes] = {}

    def groups(self, batch: pa.RecordBatch) -> Iterator[Group]:
        """The messages of a batch with the column `payload`."""
        payloads: list[bytes] = batch.column("payload").to_pylist()
        lengths = np.array([len(payload) for payload in payloads], dtype=np.int64)
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            left = rows
            if (shapes := self._shapes_of(length, payloads[rows[0]])) is not None:
                frames = np.frombuffer(b"".join(payloads[k] for k in rows), np.uint8).reshape(len(rows), length)
                rounds, senders, fields, right = decode_frames(frames, shapes)
                right &= rounds < LAST_ROUND
                kept = {name: values[right] for name, values in fields.items()}
                yield Group(rows[right], rounds[right].astype(np.int64), senders[right].astype(np.int64), kept)
                left = rows[~right]
            for row in left.tolist():
                yield from self._alone(row, payloads[row])

    def _shapes_of(self, length: int, payload: bytes) -> Shapes | None:
        """The fields of messages of this length; None where they are laid out in another way than ours."""
        if length not in self._shapes:
            try:
                _, _, message = parse_round(payload)
            except RemoteProtocolError:
                return None
            shapes = {name: value.shape for name, value in message.fields.items()}
            if round_length(shapes) != length or len(self._shapes) > 64:
                return None
            self._shapes[length] = shapes
        return self._shapes[length]

    def _alone(self, row: int, payload: bytes) -> Iterator[Group]:
        try:
            t, sender, message = parse_round(payload)
        except RemoteProtocolError:
            self.failed += 1
            return
        if t >= LAST_ROUND:
            self.failed += 1
            return
        fields = {name: value[None] for name, value in message.fields.items()}
        yield Group(np.array([row]), np.array([t]), np.array([sender]), fields)
