"""Runs with their times, as operators see them: under way, or over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from sottovoce.running.run import Run
from sottovoce_coordinator.runs import RunBook, RunState
from sottovoce_coordinator.store import KeptRun
from sottovoce_rpc.directives import Stop
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2


@dataclass(slots=True)
class Course:
    """A run's book, and its times.

    Attributes:
        book: of the run.
        started, ended: when.
        durable: it outlives its coordinator.
        told: rounds below this one were granted to all learners that are there.
        over: set when it has ended.
        closing: closes its capture, and says why that could not be written to its end; empty: it could.
    """

    book: RunBook
    started: datetime
    durable: bool = False
    told: int = 0
    ended: datetime | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    closing: asyncio.Task[str] | None = None

    def view(self, *, whole: bool = False) -> coordinator_pb2.Run:
        """The run as it stands; `whole`: with the spec, which may be long."""
        book = self.book
        run = coordinator_pb2.Run(
            run_id=book.run_id,
            state=coordinator_pb2.RunState.Value(f"RUN_STATE_{book.state.name}"),
            detail=book.detail,
            learners=[
                coordinator_pb2.Participant(
                    address=address,
                    status=status.to_wire(),
                    away_since=_timestamp(book.away[i]) if i in book.away and not book.ended else None,
                )
                for i, (address, status) in enumerate(zip(book.addresses, book.statuses, strict=True))
            ],
            started_at=_timestamp(self.started),
            ended_at=None if self.ended is None else _timestamp(self.ended),
            capture_id=book.overhearing.capture_id,
            capture_location=book.overhearing.location,
            durable=self.durable,
            capture_error=self.closing.result() if self.closing is not None and _well(self.closing) else "",
        )
        if whole:
            run.spec, run.n_features = spec_to_wire(book.run.spec), book.n_features
        return run

    def farewell(self) -> Stop:
        """What a learner is told that comes back to it when it has ended."""
        return self.book.stop()

    def kept(self) -> KeptRun:
        """The run as it is written down."""
        whole, heard = self.view(whole=True), self.book.overhearing
        return KeptRun(self.book.run_id, whole.spec, whole.n_features, heard, self.view().SerializeToString())

    @classmethod
    def resumed(cls, kept: KeptRun, run: Run, now: datetime) -> Course:
        """A run that was under way when its coordinator died; its learners are yet to come back."""
        view = coordinator_pb2.Run.FromString(kept.view)
        addresses = tuple(each.address for each in view.learners)
        book = RunBook(kept.run_id, run, kept.n_features, addresses)
        book.overhearing = kept.overhearing
        state = RunState(coordinator_pb2.RunState.Name(view.state).removeprefix("RUN_STATE_").lower())
        book.restore(state, [LearnerStatus.from_wire(each.status) for each in view.learners], now)
        return cls(book, view.started_at.ToDatetime(UTC), durable=True)


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that ended before this process began."""

    kept: KeptRun

    def view(self, *, whole: bool = False) -> coordinator_pb2.Run:
        """The run as it ended; `whole`: with the spec."""
        run = coordinator_pb2.Run.FromString(self.kept.view)
        if whole:
            run.spec, run.n_features = self.kept.spec, self.kept.n_features
        return run

    def farewell(self) -> Stop:
        """What a learner is told that comes back to it."""
        run = self.view()
        return Stop(run.detail, over=run.state != coordinator_pb2.RUN_STATE_FAILED)


def failed(kept: KeptRun, detail: str, now: datetime) -> coordinator_pb2.Run:
    """A run that cannot go on, as it is written down."""
    run = coordinator_pb2.Run.FromString(kept.view)
    run.state, run.detail = coordinator_pb2.RUN_STATE_FAILED, detail
    run.ended_at.CopyFrom(_timestamp(now))
    return run


def _well(task: asyncio.Task[str]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _timestamp(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp
