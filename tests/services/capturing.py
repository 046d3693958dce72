"""Captures made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.capture_reader import Capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_rpc.codec import RoundCodec, to_fields
from sottovoce_wire.v1 import learner_pb2

METHOD = "/sottovoce_wire.v1.Learner/Exchange"
SHAPES = {"y": (3,)}


def encode_round(t: int, sender: int, message: Message) -> bytes:
    """What a learner says in a round, in fields of the message's own shapes."""
    return RoundCodec({name: value.shape for name, value in message.fields.items()}).encode(t, sender, message)


def hello(sender: int = 0, next_round: int = 0, run_id: str = "run-1", **more: Any) -> bytes:
    """What a learner says first on a stream."""
    usual = {"learner": sender, "next_round": next_round, "run_id": run_id, "fields": to_fields(SHAPES)}
    said = learner_pb2.Hello(**{"plan_hash": bytes(32), **usual, **more})
    return learner_pb2.ExchangeMessage(hello=said).SerializeToString()


def frame(t: int, sender: int, value: float = 0.0) -> bytes:
    """What a learner says in a round."""
    return encode_round(t, sender, Message({"y": np.full(3, value + t)}))


def row(payload: bytes, sender: int = 0, receiver: int = 1, *, stream: int = 1, at: int = 0, **more: Any) -> CaptureRow:
    """A message as the relay keeps it."""
    caller, callee = sorted((sender, receiver))
    direction = "out" if sender == caller else "back"
    usual = CaptureRow(caller, callee, sender, direction, "message", stream, 1, METHOD, at, at, len(payload), payload)
    return usual._replace(**more)


def conversation(rounds: int, *, value: float = 0.0) -> list[CaptureRow]:
    """Two learners tell each other everything."""
    ends = ((0, 1), (1, 0))
    return [row(frame(t, i, value), i, j, at=10**9 * t) for t in range(rounds) for i, j in ends]


def said_again(capture: Capture) -> list[bytes]:
    """The messages of a capture that are marked so; checks that they stand there before, on the same edge, and no other."""
    rows = capture.read_messages(("caller", "callee", "sender", "payload", "is_repeat")).to_pylist()
    said = [(row["caller"], row["callee"], row["sender"], row["payload"]) for row in rows]
    assert [row["is_repeat"] for row in rows] == [one in said[:k] for k, one in enumerate(said)]
    return [row["payload"] for row in rows if row["is_repeat"]]


async def captured(
    folder: str | Path,
    rows: list[CaptureRow],
    *,
    close: bool = True,
    spec: str = "{}",
    run_id: str = "run-1",
    **more: Any,
) -> CaptureWriter:
    """A capture of these records, in one part."""
    file = CaptureWriter(folder, "cap", run_id, spec, **{"fields": SHAPES, **more})
    for each in rows:
        file.add_row(each)
    await file.flush()
    if close:
        await file.close()
    return file
