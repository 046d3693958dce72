"""Registry of runs with their times: active ones, each with learners of its own, and ended ones."""

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
"""Maximum number of ended runs that are remembered."""


@dataclass(slots=True)
class ManagedRun:
    """A run's state machine, with its times and events.

    Attributes:
        machine: state machine of the run.
        started_at, ended_at: times of start and end.
        is_durable: the run outlives its coordinator.
        capture_loss_reason: why nothing is captured any more; empty if the capture is as the spec requires.
        capture_outage_reason: why nothing is captured at the moment: the eavesdropper is disconnected.
        is_quiesced: learners leave or join the run, and all others pause until that is done.
        announced_lease: rounds below this number were leased to all connected learners.
        progress_event: set when something new is known of a learner, or the run has ended.
        end_event: set when the run has ended.
        view_event: set, and replaced by a new one, when watchers must get a view at once.
        capture_close_task: closes the capture; its result is the error, or empty.
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
    _next_report_round: int = 0

    @property
    def outcome(self) -> tuple[RunState, datetime | None]:
        """State of the run, and when it ended."""
        return self.machine.state, self.ended_at

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.machine.run_id

    @property
    def learners(self) -> frozenset[str]:
        """Names of its learners, lost ones included."""
        return frozenset(self.machine.index)

    def has_learner(self, learner: str) -> bool:
        """Return whether a learner is in the run, and not lost to it."""
        return learner in self.machine.index and self.machine.index[learner] not in self.machine.lost_learners

    def notify_watchers(self) -> None:
        """Send watchers a view at once, because the run has ended, or its curve gets a point."""
        event, self.view_event = self.view_event, asyncio.Event()
        event.set()

    def notify_if_due(self) -> None:
        """Notify watchers after a round in which a progress report is due."""
        if (done := self.machine.clock.completed_rounds) >= max(self._next_report_round, 1):
            self._next_report_round = compute_next_report_round(done, len(self.machine.addresses))
            self.notify_watchers()

    def build_view(self, *, include_spec: bool = False) -> coordinator_pb2.Run:
        """Return the current view of the run; with its spec, which may be long, on request."""
        machine = self.machine
        run = coordinator_pb2.Run(
            run_id=machine.run_id,
            state=coordinator_pb2.RunState.Value(f"RUN_STATE_{machine.state.name}"),
            detail=machine.detail,
            learners=[
                coordinator_pb2.Participant(
                    address=address,
                    status=status.to_wire(),
                    disconnected_at=_to_timestamp(machine.disconnected_since[i])
                    if i in machine.disconnected_since.keys() - machine.lost_learners and not machine.has_ended
                    else None,
                )
                for i, (address, status) in enumerate(zip(machine.addresses, machine.statuses, strict=True))
            ],
            started_at=_to_timestamp(self.started_at),
            ended_at=None if self.ended_at is None else _to_timestamp(self.ended_at),
            capture_id=machine.capture_binding.capture_id,
            capture_location=machine.capture_binding.location,
            durable=self.is_durable,
            capture_error=self._capture_error or ("" if machine.has_ended else self.capture_outage_reason),
            attempt=machine.attempt,
            violations=machine.violations.values(),
        )
        if include_spec:
            run.spec, run.n_features = spec_to_wire(machine.run.spec), machine.n_features
        return run

    def encode_view(self) -> bytes:
        """Encode the view for the store. Quiesced learners will resume as in a later attempt, under any coordinator."""
        view = self.build_view()
        view.attempt += self.is_quiesced
        view.capture_error = self._capture_error  # without an outage, which may end
        return view.SerializeToString()

    def build_final_command(self) -> Stop:
        """Build the Stop command for a learner that reconnects after the run has ended."""
        return self.machine.build_stop()

    @property
    def _capture_error(self) -> str:
        task = self.capture_close_task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return self.capture_loss_reason
        return task.result()

    def to_stored_run(self) -> StoredRun:
        """Build the entry of the run in the store."""
        view, binding = self.build_view(include_spec=True), self.machine.capture_binding
        return StoredRun(self.machine.run_id, view.spec, view.n_features, binding, self.encode_view())

    @classmethod
    def from_stored_run(cls, stored: StoredRun, run: Run, now: datetime) -> ManagedRun:
        """Restore an active run from the store; its learners are yet to reconnect."""
        view = stored.build_view()
        addresses = tuple(each.address for each in view.learners)
        machine = RunStateMachine(stored.run_id, run, stored.n_features, addresses, attempt=view.attempt)
        machine.capture_binding = stored.capture_binding
        if view.capture_error:  # its relays no longer exist
            machine.capture_binding = CaptureBinding(stored.capture_binding.capture_id, stored.capture_binding.location)
        machine.restore(
            RunState.from_message(view), [LearnerStatus.from_wire(each.status) for each in view.learners], now
        )
        machine.inherited_lease = stored.leased_until
        machine.violations = {
            (each.reporter, each.learner): each for each in view.violations if each.kind in VIOLATION_KINDS
        }
        return cls(
            machine, view.started_at.ToDatetime(UTC), is_durable=view.durable, capture_loss_reason=view.capture_error
        )


class RunRegistry:
    """The remembered runs, oldest first. No two active runs share a learner.

    Args:
        store: durable store of the runs.
    """

    def __init__(self, store: CoordinatorStore) -> None:
        self._store = store
        self._runs: dict[str, ManagedRun | StoredRun] = {}
        self._starting: dict[str, asyncio.Event] = {}  # by learner; set when the start has succeeded or failed

    def resolve(self, run_id: str) -> ManagedRun | StoredRun:
        """Return the run with this id or unique id prefix.

        Raises:
            NotFound: there is no such run.
            SpecError: several ids have this prefix, or it is empty.
        """
        if not run_id:
            raise SpecError("a run id is required, got none: `sottovoce runs show` lists them")
        full_id = resolve_run_id(run_id, reversed(self._runs))
        if full_id not in self._runs:
            known = f"the last one is {next(reversed(self._runs))!r}" if self._runs else "there are no runs"
            raise NotFound(f"no run {run_id!r}: {known}")
        return self._runs[full_id]

    def get(self, run_id: str) -> ManagedRun | StoredRun | None:
        """Return the run with this id; None if there is none."""
        return self._runs.get(run_id)

    def get_active(self, run_id: str) -> ManagedRun:
        """Return an active run.

        Raises:
            FailedPrecondition: it has ended.
            NotFound: there is no such run.
        """
        run = self.resolve(run_id)
        if not isinstance(run, ManagedRun) or run.machine.has_ended:
            view = run.build_view()
            how = (
                f"{RunState.from_message(view).value}: {view.detail}"
                if view.detail
                else RunState.from_message(view).value
            )
            raise FailedPrecondition(f"run {view.run_id} is over ({how})")
        return run

    def find_for_learner(self, run_id: str, learner: str) -> ManagedRun | None:
        """Return a run of this process, active or ended, if the learner is in it."""
        run = self._runs.get(run_id)
        return run if isinstance(run, ManagedRun) and learner in run.machine.index else None

    def list_sent_rounds(self, learners: Collection[str]) -> dict[str, list[SentRounds]]:
        """Return how far learners were in the remembered runs that have ended, by name."""
        found: dict[str, list[SentRounds]] = {name: [] for name in learners}
        for run_id, run in self._runs.items():
            view = run.build_view()
            for each in view.learners if view.HasField("ended_at") else ():
                name, rounds = each.status.learner, each.status.rounds_committed
                if rounds and name in found:
                    # The time is compared with an owner's later charges: after one, its learner is no longer in this run.
                    found[name].append(SentRounds(run_id=run_id, learner=name, rounds=rounds, last_at=view.started_at))
        return found

    @property
    def runs_newest_first(self) -> dict[str, ManagedRun | StoredRun]:
        """All runs by id, the newest first."""
        return dict(reversed(self._runs.items()))

    @property
    def active_runs(self) -> list[ManagedRun]:
        """Runs that have not ended."""
        return [run for run in self._runs.values() if isinstance(run, ManagedRun) and not run.machine.has_ended]

    def find_active(self, learner: str) -> ManagedRun | None:
        """Return the active run of a learner; None if it is in none."""
        return next((managed for managed in self.active_runs if managed.has_learner(learner)), None)

    def replace(self, managed: ManagedRun) -> None:
        """Replace an ended run by its resumed one.

        Raises:
            NotFound: the run was dropped meanwhile.
        """
        self.resolve(managed.machine.run_id)
        self._runs[managed.machine.run_id] = managed

    def add(self, run_id: str, run: ManagedRun | StoredRun) -> None:
        """Add a run; drop the oldest ended ones beyond the limit."""
        active = {managed.machine.run_id for managed in self.active_runs}
        ended = [each for each in self._runs if each not in active]
        for oldest in ended[: max(0, len(ended) - MAX_ENDED_RUNS + 1)]:
            del self._runs[oldest]
            with log_write_failures():
                self._store.delete_run(oldest)
        self._runs[run_id] = run

    @asynccontextmanager
    async def reserve_learners(self, learners: Sequence[str]) -> AsyncIterator[None]:
        """Reserve learners for a run that is being started; wait for other starts that have reserved one of them.

        Raises:
            FailedPrecondition: one of them is in an active run.
        """
        while True:
            self._require_free(learners)
            if (other := next((self._starting[name] for name in learners if name in self._starting), None)) is None:
                break
            await other.wait()
        done = asyncio.Event()
        self._starting |= dict.fromkeys(learners, done)
        try:
            yield
        finally:
            for name in learners:
                del self._starting[name]
            done.set()

    def require_logs(self, run_id: str, learners: Sequence[str]) -> None:
        """Require that no learner of a run was in a later one, whose log has replaced this run's.

        Raises:
            FailedPrecondition: one was.
        """
        known = list(self._runs)
        for later in known[known.index(run_id) + 1 :]:
            if lost := [name for name in learners if name in self._runs[later].learners]:
                raise FailedPrecondition(
                    f"{abbreviate_names(lost)} took part in run {later} since, and logs of one run are kept: start a new run"
                )

    def _require_free(self, learners: Sequence[str]) -> None:
        for managed in self.active_runs:
            if taken := [name for name in learners if managed.has_learner(name)]:
                run_id, are = managed.machine.run_id, "is" if len(taken) == 1 else "are"
                raise FailedPrecondition(
                    f"{abbreviate_names(taken)} {are} in run {run_id}, which is under way: wait for its end, stop it first "
                    f"(`sottovoce runs stop {run_id}`), or take other learners"
                )


def _to_timestamp(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp
