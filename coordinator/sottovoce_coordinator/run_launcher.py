"""How runs come to be under way: asked for by an operator, left by a coordinator before this one, or known to learners alone.

A run that only its learners know, since the state of its coordinator is lost, is put together from their reports. Each
learner reports how far it was granted and which rounds it has sent, and sends nothing again, so the most that any of them
knows is enough to go on, once all have reported.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import structlog

from sottovoce_coordinator.capture_client import CaptureClient
from sottovoce_coordinator.learner_registry import JoinedLearner, LearnerRegistry
from sottovoce_coordinator.run_controller import RunController
from sottovoce_coordinator.run_registry import ManagedRun, RunRegistry
from sottovoce_coordinator.run_state import RunState, RunStateMachine
from sottovoce_coordinator.store import CoordinatorStore, StoredRun
from sottovoce_core.errors import AlreadyExists, FailedPrecondition, SottovoceError, SpecError
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import abbreviate_names
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.specs import check_size, compute_plan_hash, require_run_id, spec_from_wire
from sottovoce_rpc.tasks import NotifyWait, notify_if_slow
from sottovoce_wire.v1 import coordinator_pb2
from sottovoce_wire.v1.eavesdropper_pb2 import SentRounds

log = structlog.get_logger()

_JOIN_TIMEOUT_S = 20.0
MAX_LEARNERS_PER_RUN, MAX_EDGES_PER_RUN = 1_024, 65_536
"""In a run: every learner is told all edges."""
_MAX_ANNOUNCED_EPOCHS = 65_536
"""That may be announced at a time, where the network changes: one for each learner and round of a window."""


class RunLauncher:
    """Starts runs, and hands them to their conductor.

    Args:
        store: where they are kept.
        members: the learners.
        courses: the runs that are remembered.
        captures: what the eavesdropper captures.
        conductor: leads them from then on.
        imports: whether a run spec may name code to import.
    """

    def __init__(
        self,
        store: CoordinatorStore,
        members: LearnerRegistry,
        courses: RunRegistry,
        captures: CaptureClient,
        conductor: RunController,
        *,
        allow_imports: bool,
    ) -> None:
        self._store, self._members, self._courses = store, members, courses
        self._captures, self._conductor, self._imports = captures, conductor, allow_imports

    async def start(self, request: coordinator_pb2.StartRunRequest, tell: NotifyWait) -> ManagedRun:
        """Start a run on learners that have joined, and are in no other run.

        Args:
            request: for it.
            tell: whoever asked for it, what is waited for.

        Raises:
            SpecError: it cannot be run, or is larger than a coordinator serves.
            FailedPrecondition: a learner is in another run, or not there; or an eavesdropper is needed.
            SottovoceError: it cannot be captured, or be kept.
        """
        spec = await self._asked_for(request)
        async with self._courses.reserve_learners(spec.names):
            # Before anything as large as a network of them is made.
            await self._members.wait_until_joined(_first(spec), min(_JOIN_TIMEOUT_S, spec.clock.deadline_s), tell)
            return await self._start(spec, request, tell)

    async def _asked_for(self, request: coordinator_pb2.StartRunRequest | coordinator_pb2.RecoverRunRequest) -> RunSpec:
        spec = await asyncio.to_thread(_spec, request.spec, imports=self._imports)
        if request.n_features < 1:
            raise SpecError(f"n_features must be at least 1, got {request.n_features}")
        _require_size(spec)
        return spec

    async def _start(self, spec: RunSpec, request: coordinator_pb2.StartRunRequest, tell: NotifyWait) -> ManagedRun:
        run = await asyncio.to_thread(_built, spec, request.n_features)
        self._members.require_joined(_first(spec))  # gone in the meantime
        addresses = tuple(
            self._members.get(name).introduction.address if name in self._members else "" for name in spec.names
        )
        run_id = f"{spec.name}-{uuid.uuid4().hex[:12]}"
        book = await asyncio.to_thread(RunStateMachine, run_id, run, request.n_features, addresses)
        async with notify_if_slow(
            lambda: tell(f"the eavesdropper at {self._captures.address}: no answer yet; is it running?")
        ):
            book.earlier_sent_rounds = await self._earlier(spec)
            book.capture_binding = await self._captures.open_capture(book, request)
        try:
            briefings = await asyncio.to_thread(book.build_start_commands)
            self._members.require_joined(_first(spec))
            course = ManagedRun(book, datetime.now(UTC), is_durable=self._store.is_durable)
            self._store.add_run(course.to_stored_run())
        except BaseException:
            self._captures.close_capture(book)
            raise
        self._courses.add(run_id, course)
        self._conductor.start_run(course, briefings)
        return course

    async def _earlier(self, spec: RunSpec) -> dict[int, tuple[SentRounds, ...]]:
        """What is known of the learners in earlier runs: here, or, of learners that are new here, by the captures of others.

        Raises:
            SottovoceError: the run is to be captured, and the eavesdropper does not answer.
        """
        known = self._courses.list_sent_rounds(spec.names)
        new = [name for name, sent in known.items() if not sent]
        if new and spec.capture != "none":
            for each in await self._captures.list_sent_rounds(learners=new):
                known[each.learner].append(each)
        return {i: tuple(known[name]) for i, name in enumerate(spec.names)}

    async def resume(self, run_id: str) -> ManagedRun:
        """Take up a run that failed: its learners go on from their logs.

        Raises:
            FailedPrecondition: it did not fail, or a learner is, or was since, in another run.
            SpecError: it needs code that is not imported.
            Unavailable: it cannot be kept.
        """
        run_id = (asked := self._failed(run_id)).build_view().run_id
        learners = _needed(asked)
        async with self._courses.reserve_learners(learners):
            past = self._failed(run_id)  # others may have taken it up meanwhile
            self._courses.require_logs(run_id, learners)
            if isinstance(past, ManagedRun) and past.capture_close_task is not None:
                await asyncio.wait([past.capture_close_task])
            kept = past.to_stored_run() if isinstance(past, ManagedRun) else past
            spec = await asyncio.to_thread(_spec, kept.spec, imports=self._imports)
            run = await asyncio.to_thread(_built, spec, kept.n_features)
            kept = kept.mark_resumed(await self._captures.resume_capture(kept))
            course = await asyncio.to_thread(ManagedRun.from_stored_run, kept, run, datetime.now(UTC))
            self._store.save_views({run_id: kept.encoded_view})
            self._courses.replace(course)
            self._conductor.resume_run(course)
            return course

    def _failed(self, run_id: str) -> ManagedRun | StoredRun:
        run = self._courses.resolve(run_id)
        if (view := run.build_view()).state != coordinator_pb2.RUN_STATE_FAILED:
            raise FailedPrecondition(
                f"only a run that failed can be taken up again, and run {view.run_id} is {RunState.from_message(view).value}"
            )
        return run

    async def recover(self, request: coordinator_pb2.RecoverRunRequest, tell: NotifyWait) -> ManagedRun:
        """Take up a run that this coordinator does not know, as all its learners do: before all have told, none goes on.

        Args:
            request: for it.
            tell: whoever asked for it, what is waited for.

        Raises:
            AlreadyExists: the run is known here.
            FailedPrecondition: this coordinator keeps nothing; a learner is not there, in another run, or has no log of this one.
            SpecError: it was started with another spec, or other features.
            RemoteProtocolError: the run's id is none.
            Unavailable: it cannot be kept.
        """
        run_id = request.run_id
        require_run_id(run_id)
        self._require_lost(run_id)
        spec = await self._asked_for(request)
        async with self._courses.reserve_learners(spec.names):
            self._require_lost(run_id)  # others may have taken it up meanwhile
            told = await self._members.wait_until_reintroduced(spec.names, _JOIN_TIMEOUT_S, tell)
            _require_in_run(run_id, told)
            run = await asyncio.to_thread(_built, spec, request.n_features)
            book = await asyncio.to_thread(_recovered, run_id, run, request.n_features, told, datetime.now(UTC))
            plan = await asyncio.to_thread(spec_from_wire, book.build_assignment(0).spec, imports=self._imports)
            _require_plan(run_id, compute_plan_hash(plan, request.n_features), told)
            await self._require_newest(run_id, run, told)
            book.capture_binding, uncaptured = await self._captures.recover_capture(book)
            course = ManagedRun(book, datetime.now(UTC), is_durable=True, capture_loss_reason=uncaptured)
            self._members.outrank(max(each.introduction.term for each in told))
            self._store.add_run(course.to_stored_run())
            self._courses.add(run_id, course)
            self._conductor.resume_run(course)
            return course

    async def _require_newest(self, run_id: str, run: Run, told: Sequence[JoinedLearner]) -> None:
        """Ask the capture of a run how far its learners were, before they go on: their state folders may all be old ones.

        No learner may have a log that lacks rounds which were captured: it would send them again with other noise.

        Raises:
            FailedPrecondition: one has.
            Unavailable: the eavesdropper does not answer.
        """
        sent = await self._captures.list_sent_rounds(run_id) if run.spec.capture in ("relay", "mirror") else ()
        captured = {each.learner: each.rounds for each in sent if each.run_id == run_id}
        journaled = {each.name: each.claim.rounds_committed or 0 for each in told}
        old = [i for i, name in enumerate(journaled) if captured.get(name, 0) > journaled[name]]
        if old:
            names = [told[i].name for i in old]
            found = [f"{name} ({journaled[name]} of {captured[name]} rounds)" for name in names]
            most = max(run.guarantee(i).epsilon() for i in old)
            raise FailedPrecondition(
                f"each learner must have all rounds of run {run_id!r} in its log that were captured, got {abbreviate_names(found)}: "
                "state folders were set back, and rounds would be sent again with other noise. Put the newest folders back; "
                "where they are lost, charge what was spent since (`sottovoce ledger --repair --state FOLDER --learner NAME "
                f"--charge EPSILON`; all rounds of this run cost {most:.6g} at most), and start a new run"
            )
        if not sent:
            log.warning(
                "no capture says how far the learners were: if all state folders were set back, rounds are sent again",
                run_id=run_id,
            )

    def _require_lost(self, run_id: str) -> None:
        if not self._store.is_durable:
            raise FailedPrecondition(
                "a run that was lost is taken up by a coordinator that keeps its runs: start this one with --state FOLDER"
            )
        if (known := self._courses.get(run_id)) is not None:
            raise AlreadyExists(
                f"run {run_id} is known here and is not lost; it is {known.outcome[0].value}. One that failed is taken up by "
                f"`sottovoce runs resume {run_id}`"
            )

    async def restore(self) -> None:
        """Take up the runs of this state: those that were under way go on as their learners come back."""
        for kept in self._store.load_runs():
            over = kept.build_view().HasField("ended_at")
            self._courses.add(kept.run_id, kept if over else await self._restored(kept))
        for course in self._courses.active_runs:
            self._conductor.continue_run(course)

    async def _restored(self, kept: StoredRun) -> ManagedRun | StoredRun:
        """A run under way; over where it cannot be built again, such as without --allow-imports."""
        now = datetime.now(UTC)
        try:
            spec = await asyncio.to_thread(_spec, kept.spec, imports=self._imports)
            run = await asyncio.to_thread(_built, spec, kept.n_features)
            course = await asyncio.to_thread(ManagedRun.from_stored_run, kept, run, now)
            await self._captures.restore_sent_rounds(course.machine)
            return course
        except SottovoceError as error:
            why = f"its coordinator was started again and cannot go on with it: {error}"
            over = kept.mark_failed(why, now)
            self._store.save_views({kept.run_id: over.encoded_view})
            rounds = min((each.status.rounds_done for each in over.build_view().learners), default=0)
            log.error("run ended", run_id=kept.run_id, state="failed", reason=why, rounds=rounds)
            return over


def _needed(run: ManagedRun | StoredRun) -> list[str]:
    """The learners of a run, but for those who are lost to it."""
    view = run.build_view(include_spec=True)
    lost = {
        each["learner"]
        for each in json.loads(view.spec).get("offline_intervals") or ()
        if each.get("missed_from_rounds")
    }
    return [each.status.learner for each in view.learners if each.status.learner not in lost]


def _spec(text: str, *, imports: bool) -> RunSpec:
    """The spec that an operator sent. No file of this machine is read for it: graph files lie with the operator.

    Raises:
        SpecError: it is not valid, or names a file.
    """
    spec = spec_from_wire(text, imports=imports)
    if spec.topology.has_file:
        raise SpecError("topology: a spec that is sent must list its edges, got a graph file; the client does this")
    return spec


def _first(spec: RunSpec) -> list[str]:
    """Those who take part from the first round on; others may join later."""
    return [name for name, there in zip(spec.names, spec.participation.participant_mask(0), strict=True) if there]


def _require_size(spec: RunSpec) -> None:
    """Refuse a run of more learners, or of longer windows, than a coordinator serves.

    Raises:
        SpecError: it has more.
    """
    n, window = spec.n_learners, min(spec.clock.window, spec.rounds)
    if n > MAX_LEARNERS_PER_RUN:
        raise SpecError(f"a coordinator serves at most {MAX_LEARNERS_PER_RUN} learners, got {n}: simulate them")
    if spec.topology.sequence is not None and window * n > _MAX_ANNOUNCED_EPOCHS:
        text = f"clock.window times learners must be at most {_MAX_ANNOUNCED_EPOCHS} where the network changes"
        raise SpecError(f"{text}, got {window} * {n} = {window * n}")


def _built(spec: RunSpec, n_features: int) -> Run:
    """In a thread: a run whose messages and edges can be told.

    Raises:
        SpecError: they cannot, or as `build_run`.
    """
    run = build_run(spec, n_features)
    check_size(run.field_shapes)
    if (edges := len(run.network.edges)) > MAX_EDGES_PER_RUN:
        raise SpecError(
            f"a coordinator serves at most {MAX_EDGES_PER_RUN} edges, got {edges}: take fewer, or simulate them"
        )
    return run


# ---- runs that only learners know ------------------------------------------------------------------------------------


def _require_in_run(run_id: str, told: Sequence[JoinedLearner]) -> None:
    """Each of these learners has the log of a run: who has not would say its rounds again.

    Raises:
        FailedPrecondition: one has not.
    """
    if others := [each.introduction for each in told if each.introduction.run_id != run_id]:
        logs = [f"{f'that of run {each.run_id!r}' if each.run_id else 'none'} with {each.learner}" for each in others]
        raise FailedPrecondition(
            f"each learner must have the log of run {run_id!r}, got {abbreviate_names(logs)}: is the run the right one, and the state "
            "folder the learner's own? Else it has been in another run since, or this one was over: start a new run"
        )


def _require_plan(run_id: str, plan_hash: bytes, told: Sequence[JoinedLearner]) -> None:
    """What the run is to go on with is what its learners were told, by their ledgers.

    Raises:
        SpecError: it is not.
    """
    if others := [each.name for each in told if each.introduction.plan_hash != plan_hash]:
        raise SpecError(
            f"run {run_id} is of another spec or other records, by the ledgers of {abbreviate_names(others)}: take it up with those "
            "that it was started with"
        )


def _recovered(run_id: str, run: Run, n_features: int, told: Sequence[JoinedLearner], now: datetime) -> RunStateMachine:
    """The book of the run; its learners, by index, are yet to be told.

    Args:
        run_id, run, n_features: what it is.
        told: what its learners know, by index.
        now: since when they are away.
    """
    addresses, attempt = (
        tuple(each.introduction.address for each in told),
        max(each.introduction.attempt for each in told),
    )
    book = RunStateMachine(run_id, run, n_features, addresses, attempt=attempt)
    said = [each.claim.rounds_committed or 0 for each in told]
    statuses = [
        LearnerStatus(each.name, run_id, rounds_done=max(rounds - 1, 0), rounds_committed=rounds)
        for each, rounds in zip(told, said, strict=True)
    ]
    book.restore(RunState.RUNNING if any(said) else RunState.CONNECTING, statuses, now)
    book.clock.raise_lease(max(each.introduction.lease_until_round for each in told))
    return book
