"""Runs as messages."""

from __future__ import annotations

from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from sottovoce_coordinator.runs import RunBook
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2


def run_to_wire(
    book: RunBook, started: datetime, ended: datetime | None, *, whole: bool = False
) -> coordinator_pb2.Run:
    """A run as it stands.

    Args:
        book: of the run.
        started, ended: when.
        whole: with the spec, which may be long.
    """
    run = coordinator_pb2.Run(
        run_id=book.run_id,
        state=coordinator_pb2.RunState.Value(f"RUN_STATE_{book.state.name}"),
        detail=book.detail,
        learners=[
            coordinator_pb2.Participant(address=address, status=status)
            for address, status in zip(book.addresses, book.statuses, strict=True)
        ],
        started_at=_timestamp(started),
        ended_at=None if ended is None else _timestamp(ended),
        capture_id=book.overhearing.capture_id,
        capture_location=book.overhearing.location,
    )
    if whole:
        run.spec, run.n_features = spec_to_wire(book.run.spec), book.n_features
    return run


def _timestamp(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp
