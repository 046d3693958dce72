"""Runs with their times, as operators see them: under way, each on learners of its own, or over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from sottovoce_coordinator.run_state import CaptureBinding, RunState, RunStateMachine
from sottovoce_coordinator.store import CoordinatorStore, StoredRun, log_write_failures
from sottovoce_core.errors import FailedPrecondition, NotFound, SpecError
from sottovoce_core.runs.run import Run
from sottovoce_core.text import abbreviate_names
from sottovoce_rpc.learner_status import VIOLATION_KINDS, LearnerStatus
from sottovoce_rpc.specs import compute_next_report_round, resolve_run_id, spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2
from sottovoce_wire.v1.coordinator_pb2 import Stop
from sottovoce_wire.v1.eavesdropper_pb2 import SentRounds

MAX_ENDED_RUNS = 32
"""Runs that are remembered, beside those that are under way."""


@dataclass(slots=True)
class ManagedRun:
    """A run's book, and its times.

    Attributes:
        book: of the run.
        started, ended: when.
        durable: it outlives its coordinator.
        uncaptured: why nothing is captured any more; empty: it is, where the spec says so.
        unheard: why nothing is captured for now: its eavesdropper is away.
        resting: learners leave or join it, and all who are there rest until that is done.
        told: rounds below this one were granted to all learners that are there.
        heard: set when something is known of a learner, or it has ended.
        over: set when it has ended.
        shown: set, and another one in its place, when whoever watches it is to be shown it at once.
        closing: closes its capture, and says why that could not be written to its end; empty: it could.
    """

    machine: RunStateMachine
    started_at: datetime
    is_durable: bool = False
    capture_loss_reason: str = ""
    capture_outage_reason: str = ""
    is_quiesced: bool = False
    announced_lease: int = 0
    ended_at: datetime | None = None
    progress_event: asyncio.Event = field(default_factory=asyncio.Event)
    end_event: asyncio.Event = field(default_factory=asyncio.Event)
    view_event: asyncio.Event = field(default_factory=asyncio.Event)
    capture_close_task: asyncio.Task[str] | None = None
    _look: int = 0

    @property
    def outcome(self) -> tuple[RunState, datetime | None]:
        """Where it stands, and when it ended."""
        return self.machine.state, self.ended_at

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.machine.run_id

    @property
    def learners(self) -> frozenset[str]:
        """Names of its learners, of those that were lost, too."""
        return frozenset(self.machine.index)

    def has_learner(self, learner: str) -> bool:
        """Is a learner in it? Not one that was lost."""
        return learner in self.machine.index and self.machine.index[learner] not in self.machine.lost_learners

    def notify_watchers(self) -> None:
        """Whoever watches it is shown it at once: it has ended, or a curve is to have a point."""
        shown, self.view_event = self.view_event, asyncio.Event()
        shown.set()

    def notify_if_due(self) -> None:
        """Show it, where all learners have done a round after which a look is due."""
        if (done := self.machine.clock.completed_rounds) >= max(self._look, 1):
            self._look = compute_next_report_round(done, len(self.machine.addresses))
            self.notify_watchers()

    def build_view(self, *, include_spec: bool = False) -> coordinator_pb2.Run:
        """The run as it stands; `whole`: with the spec, which may be long."""
        book = self.machine
        run = coordinator_pb2.Run(
            run_id=book.run_id,
            state=coordinator_pb2.RunState.Value(f"RUN_STATE_{book.state.name}"),
            detail=book.detail,
            learners=[
                coordinator_pb2.Participant(
                    address=address,
                    status=status.to_wire(),
                    disconnected_at=_timestamp(book.disconnected_since[i])
                    if i in book.disconnected_since.keys() - book.lost_learners and not book.has_ended
                    else None,
                )
                for i, (address, status) in enumerate(zip(book.addresses, book.statuses, strict=True))
            ],
            started_at=_timestamp(self.started_at),
            ended_at=None if self.ended_at is None else _timestamp(self.ended_at),
            capture_id=book.capture_binding.capture_id,
            capture_location=book.capture_binding.location,
            durable=self.is_durable,
            capture_error=self._capture_error or ("" if book.has_ended else self.capture_outage_reason),
            attempt=book.attempt,
            violations=book.violations.values(),
        )
        if include_spec:
            run.spec, run.n_features = spec_to_wire(book.run.spec), book.n_features
        return run

    def encode_view(self) -> bytes:
        """The run as it is written down. Those who rest will go on as after another attempt, under whatever coordinator."""
        view = self.build_view()
        view.attempt += self.is_quiesced
        view.capture_error = self._capture_error  # an eavesdropper that is away may come back
        return view.SerializeToString()

    def build_final_command(self) -> Stop:
        """What a learner is told that comes back to it when it has ended."""
        return self.machine.build_stop()

    @property
    def _capture_error(self) -> str:
        closing = self.capture_close_task
        if closing is None or not closing.done() or closing.cancelled() or closing.exception() is not None:
            return self.capture_loss_reason
        return closing.result()

    def to_stored_run(self) -> StoredRun:
        """The run as it is written down."""
        whole, heard = self.build_view(include_spec=True), self.machine.capture_binding
        return StoredRun(self.machine.run_id, whole.spec, whole.n_features, heard, self.encode_view())

    @classmethod
    def from_stored_run(cls, kept: StoredRun, run: Run, now: datetime) -> ManagedRun:
        """A run that goes on as it was written down; its learners are yet to come back."""
        view = kept.build_view()
        addresses = tuple(each.address for each in view.learners)
        book = RunStateMachine(kept.run_id, run, kept.n_features, addresses, attempt=view.attempt)
        book.capture_binding = kept.capture_binding
        if view.capture_error:  # its relays are gone
            book.capture_binding = CaptureBinding(kept.capture_binding.capture_id, kept.capture_binding.location)
        book.restore(RunState.from_message(view), [LearnerStatus.from_wire(each.status) for each in view.learners], now)
        book.inherited_lease = kept.leased_until
        book.violations = {
            (each.reporter, each.learner): each for each in view.violations if each.kind in VIOLATION_KINDS
        }
        return cls(
            book, view.started_at.ToDatetime(UTC), is_durable=view.durable, capture_loss_reason=view.capture_error
        )


class RunRegistry:
    """The runs that are remembered, oldest first. No two that are under way have a learner in common.

    Args:
        store: where they are kept.
    """

    def __init__(self, store: CoordinatorStore) -> None:
        self._store = store
        self._runs: dict[str, ManagedRun | StoredRun] = {}
        self._starting: dict[str, asyncio.Event] = {}  # by learner; set once it is known how that went

    def resolve(self, run_id: str) -> ManagedRun | StoredRun:
        """One of them, by its id or as much of that as tells it from the others.

        Raises:
            NotFound: there is none of this name.
            SpecError: several begin so, or no id is given.
        """
        if not run_id:
            raise SpecError("a run's id is required, got none: `sottovoce runs show` has them")
        named = resolve_run_id(run_id, reversed(self._runs))
        if named not in self._runs:
            known = f"the last one is {next(reversed(self._runs))!r}" if self._runs else "there is none"
            raise NotFound(f"no run {run_id!r}: {known}")
        return self._runs[named]

    def get(self, run_id: str) -> ManagedRun | StoredRun | None:
        """One of them; None: there is none of this name."""
        return self._runs.get(run_id)

    def get_active(self, run_id: str) -> ManagedRun:
        """One that is under way.

        Raises:
            FailedPrecondition: it is over.
            NotFound: there is none of this name.
        """
        run = self.resolve(run_id)
        if not isinstance(run, ManagedRun) or run.machine.has_ended:
            over = run.build_view()
            how = (
                f"{RunState.from_message(over).value}: {over.detail}"
                if over.detail
                else RunState.from_message(over).value
            )
            raise FailedPrecondition(f"run {over.run_id} is over ({how})")
        return run

    def find_for_learner(self, run_id: str, learner: str) -> ManagedRun | None:
        """A run of this process, under way or not, if the learner is in it."""
        run = self._runs.get(run_id)
        return run if isinstance(run, ManagedRun) and learner in run.machine.index else None

    def list_sent_rounds(self, learners: Collection[str]) -> dict[str, list[SentRounds]]:
        """How far learners were in the runs that are remembered and over, by name."""
        found: dict[str, list[SentRounds]] = {name: [] for name in learners}
        for run_id, run in self._runs.items():
            view = run.build_view()
            for each in view.learners if view.HasField("ended_at") else ():
                name, rounds = each.status.learner, each.status.rounds_committed
                if rounds and name in found:
                    # The moment counts for what an owner charged meanwhile: after that, its learner is in this run no more.
                    found[name].append(SentRounds(run_id=run_id, learner=name, rounds=rounds, last_at=view.started_at))
        return found

    @property
    def runs_newest_first(self) -> dict[str, ManagedRun | StoredRun]:
        """All of them, by name."""
        return dict(reversed(self._runs.items()))

    @property
    def active_runs(self) -> list[ManagedRun]:
        """Those that have not ended."""
        return [run for run in self._runs.values() if isinstance(run, ManagedRun) and not run.machine.has_ended]

    def find_active(self, learner: str) -> ManagedRun | None:
        """The run under way that a learner is in; None: it is in none."""
        return next((course for course in self.active_runs if course.has_learner(learner)), None)

    def replace(self, course: ManagedRun) -> None:
        """A run that had ended goes on.

        Raises:
            NotFound: it was forgotten meanwhile.
        """
        self.resolve(course.machine.run_id)
        self._runs[course.machine.run_id] = course

    def add(self, run_id: str, run: ManagedRun | StoredRun) -> None:
        """Remember a run; of those that have ended the oldest is forgotten."""
        going = {course.machine.run_id for course in self.active_runs}
        ended = [each for each in self._runs if each not in going]
        for oldest in ended[: max(0, len(ended) - MAX_ENDED_RUNS + 1)]:
            del self._runs[oldest]
            with log_write_failures():
                self._store.delete_run(oldest)
        self._runs[run_id] = run

    @asynccontextmanager
    async def reserve_learners(self, learners: Sequence[str]) -> AsyncIterator[None]:
        """Keep learners for a run that is being started: whoever wants one of them, too, waits to see how that goes.

        Raises:
            FailedPrecondition: one of them is in a run that is under way.
        """
        while True:
            self._require_free(learners)
            if (other := next((self._starting[name] for name in learners if name in self._starting), None)) is None:
                break
            await other.wait()
        known = asyncio.Event()
        self._starting |= dict.fromkeys(learners, known)
        try:
            yield
        finally:
            for name in learners:
                del self._starting[name]
            known.set()

    def require_logs(self, run_id: str, learners: Sequence[str]) -> None:
        """No learner of a run has been in another one since: it would have begun a log in place of this run's.

        Raises:
            FailedPrecondition: one has.
        """
        known = list(self._runs)
        for later in known[known.index(run_id) + 1 :]:
            if lost := [name for name in learners if name in self._runs[later].learners]:
                raise FailedPrecondition(
                    f"{abbreviate_names(lost)} took part in run {later} since, and logs of one run are kept: start a new run"
                )

    def _require_free(self, learners: Sequence[str]) -> None:
        for course in self.active_runs:
            if taken := [name for name in learners if course.has_learner(name)]:
                run_id, are = course.machine.run_id, "is" if len(taken) == 1 else "are"
                raise FailedPrecondition(
                    f"{abbreviate_names(taken)} {are} in run {run_id}, which is under way: wait for its end, stop it first "
                    f"(`sottovoce runs stop {run_id}`), or take other learners"
                )


def _timestamp(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp
