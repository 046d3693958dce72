"""Decoding rounds of a capture, many at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.errors import RemoteProtocolError
from sottovoce_rpc.codec import RoundCodec, Shapes, codec_of

if TYPE_CHECKING:
    import pyarrow as pa

LAST_ROUND = 2**62
"""What is beyond it is no round that anybody counted up to."""


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
    """Decodes the rounds of one capture.

    Args:
        shapes: the fields of a round; none: nobody said, and all numbers of a message are one field.

    Attributes:
        failed: messages that are no rounds.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.failed = 0
        self._codec = RoundCodec(shapes) if shapes else None

    def groups(self, batch: pa.RecordBatch) -> Iterator[Group]:
        """The messages of a batch with the column `payload`."""
        payloads: list[bytes] = batch.column("payload").to_pylist()
        self.failed += len(payloads)
        for codec in [self._codec] if self._codec else _codecs(payloads):
            rows, rounds, senders, fields = codec.decode_many(payloads)
            kept = rounds < LAST_ROUND
            self.failed -= int(np.count_nonzero(kept))
            fields = {name: values[kept] for name, values in fields.items()}
            yield Group(rows[kept], rounds[kept].astype(np.int64), senders[kept].astype(np.int64), fields)


def _codecs(payloads: list[bytes]) -> list[RoundCodec]:
    """Of the rounds among these, one for each length."""
    found: dict[int, RoundCodec] = {}
    for payload in payloads:
        if len(payload) not in found:
            try:
                codec = codec_of(payload)
            except RemoteProtocolError:
                continue
            found[codec.length] = codec
    return list(found.values())
