"""Mistakes in what is written, said again and believed: each is the world with one thing done wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

from sottovoce_coordinator.store import Claim, LearnerBinding
from sottovoce_learner.ingest.record_queue import PlannedRecordQueue, _NewRecords
from sottovoce_learner.peers.outbox import NeighbourLink, _Stream
from sottovoce_learner.storage.run_log import RunLog
from sottovoce_learner.storage.wal import RoundPayload
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import learner_pb2
from tests.model import folders
from tests.model.machine import Step
from tests.model.state import Coordinator, Process, State
from tests.model.world import World

# ---- what is written, and when -------------------------------------------------------------------------------------------


class SendsFirst(World):
    """A message is sent before it is in the log."""

    SAYS: ClassVar[tuple[str, ...]] = ("drawn", "sent", "written")


class DrawsAgain(World):
    """A restarted learner samples the last round again, although it is in the log."""

    def _believed(self, log: bytes) -> bytes:
        without = folders.cut(log)
        return log if without is None else without


class _ChargesLater(RunLog):
    def write_ahead(self, t: int, spent: float, said: RoundPayload) -> None:
        super().write_ahead(t, self.epsilon_spent, said)


class ChargesLater(World):
    """A message is charged together with the next one, after it was sent."""

    run_log = _ChargesLater


class _MarksReservationsOnly(RunLog):
    def make_durable(self) -> None:
        self._mark_file.write(self._mark)


class NoMark(World):
    """There is no high-water mark."""

    run_log = _MarksReservationsOnly


class _MarksMessagesOnly(RunLog):
    _kept = False

    def append_records(self, first_round: int, batch: bytes) -> None:
        super().append_records(first_round, batch)
        self._kept = True

    def make_durable(self) -> None:
        if not self._kept:
            super().make_durable()


class MarksMessagesOnly(World):
    """The high-water mark counts messages and not records."""

    run_log = _MarksMessagesOnly


class ReceiptFirst(World):
    """A receipt is sent before the records are in the log."""

    FEEDS: ClassVar[tuple[str, ...]] = ("acknowledged", "written")


class _TakesAgain(PlannedRecordQueue):
    def prepare(self, batch: learner_pb2.SampleBatch) -> _NewRecords | None:
        self._next_sequences[batch.source] = min(batch.sequence, self.get_next_sequence(batch.source))
        return super().prepare(batch)


class TakesAgain(World):
    """Records that are already in the log are accepted again."""

    intake = _TakesAgain


# ---- what is said again --------------------------------------------------------------------------------------------------


class _KeepsOne(NeighbourLink):
    def __init__(self, keep: int) -> None:
        super().__init__(retained_rounds=1)


class KeepsOne(World):
    """A link keeps one message only."""

    link = _KeepsOne


class _ResendsNothing(NeighbourLink):
    def attach(self, stream: _Stream, next_round: int, displaced: Callable[[], object] = lambda: None) -> None:
        super().attach(stream, next_round, displaced)
        self._due.clear()


class ResendsNothing(World):
    """Nothing is resent on a new stream."""

    link = _ResendsNothing


class FinishedLeaves(World):
    """A finished learner closes its streams."""

    def _over(self, state: State, f: int) -> State:
        return self._hung_up(state, f)

    def _silent(self, process: Process) -> bool:
        session = process.session
        return session is None or session.state is LearnerState.FINISHED


# ---- who may speak -------------------------------------------------------------------------------------------------------


class _OneStep(LearnerBinding):
    def admit(self, claim: Claim, *, is_connected: bool, rounds_committed: int = 0) -> LearnerBinding:
        known = super().admit(claim, is_connected=is_connected, rounds_committed=rounds_committed)
        return replace(known, confirmed_incarnation=known.issued_incarnation)


class NoConfirmation(World):
    """An incarnation is valid once it is issued, before it is confirmed."""

    membership = _OneStep


class SpeaksUnconfirmed(World):
    """A learner sends before its incarnation is confirmed."""

    def _introduces(self, state: State, f: int) -> Iterator[Step[State]]:
        for step in super()._introduces(state, f):
            if step.kind != "issued":
                yield step
                continue
            after = self._welcomed(self._put(step.after, f, Process(confirmed=True, joined=True)), f)
            yield step._replace(after=self._put(after, f, after.processes[f]._replace(written=True)))

    def _joins(self, state: State, f: int) -> Iterator[Step[State]]:
        process = state.processes[f]
        if not state.coordinator.up or not process.written or process.session is None:
            yield from super()._joins(state, f)
            return
        for step in self._confirms(state, f):
            if step.kind == "confirmed":  # the session that speaks already goes on
                yield step._replace(after=self._put(step.after, f, process._replace(written=False)))


class _NoIncarnations(LearnerBinding):
    def admit(self, claim: Claim, *, is_connected: bool, rounds_committed: int = 0) -> LearnerBinding:
        newest = replace(claim, incarnation=max(claim.incarnation, self.issued_incarnation))
        return super().admit(newest, is_connected=is_connected, rounds_committed=rounds_committed)


class NoIncarnations(World):
    """The coordinator ignores incarnations."""

    membership = _NoIncarnations


class _ConfirmsAny(LearnerBinding):
    def confirm(self, claim: Claim, incarnation: int) -> LearnerBinding:
        return replace(self, confirmed_incarnation=incarnation)


class ConfirmsAny(World):
    """The coordinator confirms any incarnation that it has ever issued."""

    membership = _ConfirmsAny


class ForgetsMembers(World):
    """A restarted coordinator forgets incarnations."""

    def _forgets(self, coordinator: Coordinator) -> Coordinator:
        return coordinator._replace(members=(self.membership(),) * self.shape.learners)
