"""Launcher of runs: started by an operator, restored from the store, resumed after a failure, or recovered from the learners.

A run whose coordinator lost its state is recovered from its learners' introductions. Each learner reports the end of its lease
and which rounds it has sent, and never sends a round again; so the maximum over all of them is enough to go on, once all have
reported.
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
"""Maximum numbers of learners and of edges of a run: every learner receives all edges."""
_MAX_ANNOUNCED_EPOCHS = 65_536
"""Maximum number of epochs announced at a time if the network changes: one for each learner and round of a window."""


class RunLauncher:
    """Launcher that starts, resumes, recovers and restores runs, and passes them to the controller.

    Args:
        store: durable store of the runs.
        learners: connected learners.
        runs: remembered runs.
        captures: client of the eavesdropper.
        controller: controller of the runs.
        allow_imports: allow a run spec to name code to import.
    """

    def __init__(
        self,
        store: CoordinatorStore,
        learners: LearnerRegistry,
        runs: RunRegistry,
        captures: CaptureClient,
        controller: RunController,
        *,
        allow_imports: bool,
    ) -> None:
        self._store, self._learners, self._runs = store, learners, runs
        self._captures, self._controller, self._imports = captures, controller, allow_imports

    async def start(self, request: coordinator_pb2.StartRunRequest, notify: NotifyWait) -> ManagedRun:
        """Start a run on joined learners that are in no other run.

        Args:
            request: the operator's request.
            notify: called with what is waited for, if it takes long.

        Raises:
            SpecError: the spec cannot be run, or exceeds a limit.
            FailedPrecondition: a learner is in another run, or not connected; or an eavesdropper is required.
            SottovoceError: the run cannot be captured, or be stored.
        """
        spec = await self._parse_request(request)
        async with self._runs.reserve_learners(spec.names):
            # First, before anything as large as its network is built.
            await self._learners.wait_until_joined(
                _list_initial_learners(spec), min(_JOIN_TIMEOUT_S, spec.clock.deadline_s), notify
            )
            return await self._start(spec, request, notify)

    async def _parse_request(
        self, request: coordinator_pb2.StartRunRequest | coordinator_pb2.RecoverRunRequest
    ) -> RunSpec:
        spec = await asyncio.to_thread(_parse_spec, request.spec, imports=self._imports)
        if request.n_features < 1:
            raise SpecError(f"n_features must be at least 1, got {request.n_features}")
        _require_size(spec)
        return spec

    async def _start(self, spec: RunSpec, request: coordinator_pb2.StartRunRequest, notify: NotifyWait) -> ManagedRun:
        run = await asyncio.to_thread(_build_run, spec, request.n_features)
        self._learners.require_joined(_list_initial_learners(spec))  # building takes time
        addresses = tuple(
            self._learners.get(name).introduction.address if name in self._learners else "" for name in spec.names
        )
        run_id = f"{spec.name}-{uuid.uuid4().hex[:12]}"
        machine = await asyncio.to_thread(RunStateMachine, run_id, run, request.n_features, addresses)
        async with notify_if_slow(
            lambda: notify(f"the eavesdropper at {self._captures.address}: no answer yet; is it running?")
        ):
            machine.earlier_sent_rounds = await self._find_earlier_sent_rounds(spec)
            machine.capture_binding = await self._captures.open_capture(machine, request)
        try:
            commands = await asyncio.to_thread(machine.build_start_commands)
            self._learners.require_joined(_list_initial_learners(spec))
            managed = ManagedRun(machine, datetime.now(UTC), is_durable=self._store.is_durable)
            self._store.add_run(managed.to_stored_run())
        except BaseException:
            self._captures.close_capture(machine)
            raise
        self._runs.add(run_id, managed)
        self._controller.start_run(managed, commands)
        return managed

    async def _find_earlier_sent_rounds(self, spec: RunSpec) -> dict[int, tuple[SentRounds, ...]]:
        """Return how far learners were in earlier runs: here, or for learners unknown here, in captures of other coordinators.

        Raises:
            SottovoceError: the run is to be captured, and the eavesdropper does not answer.
        """
        known = self._runs.list_sent_rounds(spec.names)
        new = [name for name, sent in known.items() if not sent]
        if new and spec.capture != "none":
            for each in await self._captures.list_sent_rounds(learners=new):
                known[each.learner].append(each)
        return {i: tuple(known[name]) for i, name in enumerate(spec.names)}

    async def resume(self, run_id: str) -> ManagedRun:
        """Resume a failed run: its learners go on from their logs.

        Raises:
            FailedPrecondition: it did not fail, or a learner is, or was since, in another run.
            SpecError: it needs code that may not be imported.
            Unavailable: it cannot be stored.
        """
        run_id = (failed := self._get_failed(run_id)).build_view().run_id
        learners = _list_required_learners(failed)
        async with self._runs.reserve_learners(learners):
            past = self._get_failed(run_id)  # checked again: another call may have resumed it meanwhile
            self._runs.require_logs(run_id, learners)
            if isinstance(past, ManagedRun) and past.capture_close_task is not None:
                await asyncio.wait([past.capture_close_task])
            stored = past.to_stored_run() if isinstance(past, ManagedRun) else past
            spec = await asyncio.to_thread(_parse_spec, stored.spec, imports=self._imports)
            run = await asyncio.to_thread(_build_run, spec, stored.n_features)
            stored = stored.mark_resumed(await self._captures.resume_capture(stored))
            managed = await asyncio.to_thread(ManagedRun.from_stored_run, stored, run, datetime.now(UTC))
            self._store.save_views({run_id: stored.encoded_view})
            self._runs.replace(managed)
            self._controller.resume_run(managed)
            return managed

    def _get_failed(self, run_id: str) -> ManagedRun | StoredRun:
        run = self._runs.resolve(run_id)
        if (view := run.build_view()).state != coordinator_pb2.RUN_STATE_FAILED:
            raise FailedPrecondition(
                f"only a run that failed can be resumed, and run {view.run_id} is {RunState.from_message(view).value}"
            )
        return run

    async def recover(self, request: coordinator_pb2.RecoverRunRequest, notify: NotifyWait) -> ManagedRun:
        """Recover a run that only its learners know. No learner goes on before all have reported.

        Args:
            request: the operator's request.
            notify: called with what is waited for, if it takes long.

        Raises:
            AlreadyExists: the run is known here.
            FailedPrecondition: this coordinator has no state folder; or a learner is not connected, in another run, or has no log
                of this one.
            SpecError: it was started with another spec, or another number of features.
            RemoteProtocolError: the run id is not valid.
            Unavailable: the run cannot be stored.
        """
        run_id = request.run_id
        require_run_id(run_id)
        self._require_unknown(run_id)
        spec = await self._parse_request(request)
        async with self._runs.reserve_learners(spec.names):
            self._require_unknown(run_id)  # checked again: another call may have recovered it meanwhile
            joined = await self._learners.wait_until_reintroduced(spec.names, _JOIN_TIMEOUT_S, notify)
            _require_in_run(run_id, joined)
            run = await asyncio.to_thread(_build_run, spec, request.n_features)
            machine = await asyncio.to_thread(
                _build_recovered_machine, run_id, run, request.n_features, joined, datetime.now(UTC)
            )
            plan = await asyncio.to_thread(spec_from_wire, machine.build_assignment(0).spec, imports=self._imports)
            _require_plan(run_id, compute_plan_hash(plan, request.n_features), joined)
            await self._require_newest(run_id, run, joined)
            machine.capture_binding, uncaptured = await self._captures.recover_capture(machine)
            managed = ManagedRun(machine, datetime.now(UTC), is_durable=True, capture_loss_reason=uncaptured)
            self._learners.outrank(max(each.introduction.term for each in joined))
            self._store.add_run(managed.to_stored_run())
            self._runs.add(run_id, managed)
            self._controller.resume_run(managed)
            return managed

    async def _require_newest(self, run_id: str, run: Run, joined: Sequence[JoinedLearner]) -> None:
        """Check the learners' logs against the capture before they go on: all state folders may have been set back.

        A log that lacks captured rounds is refused: its learner would send them again with other noise.

        Raises:
            FailedPrecondition: a log lacks captured rounds.
            Unavailable: the eavesdropper does not answer.
        """
        sent = await self._captures.list_sent_rounds(run_id) if run.spec.capture in ("relay", "mirror") else ()
        captured = {each.learner: each.rounds for each in sent if each.run_id == run_id}
        committed = {each.name: each.claim.rounds_committed or 0 for each in joined}
        old = [i for i, name in enumerate(committed) if captured.get(name, 0) > committed[name]]
        if old:
            names = [joined[i].name for i in old]
            found = [f"{name} ({committed[name]} of {captured[name]} rounds)" for name in names]
            max_epsilon = max(run.guarantee(i).epsilon() for i in old)
            raise FailedPrecondition(
                f"each learner must have all captured rounds of run {run_id!r} in its log, got {abbreviate_names(found)}: "
                "state folders were set back, and rounds would be sent again with other noise. Put the newest folders back; "
                "if they are lost, charge what was spent since (`sottovoce ledger --repair --state FOLDER --learner NAME "
                f"--charge EPSILON`; all rounds of this run cost at most {max_epsilon:.6g}), and start a new run"
            )
        if not sent:
            log.warning(
                "no capture shows how far the learners were: if all state folders were set back, rounds are sent again",
                run_id=run_id,
            )

    def _require_unknown(self, run_id: str) -> None:
        if not self._store.is_durable:
            raise FailedPrecondition(
                "a lost run is recovered by a coordinator with a state folder: start this one with --state FOLDER"
            )
        if (known := self._runs.get(run_id)) is not None:
            raise AlreadyExists(
                f"run {run_id} is known here and is not lost; it is {known.outcome[0].value}. Resume a failed one by "
                f"`sottovoce runs resume {run_id}`"
            )

    async def restore(self) -> None:
        """Restore the runs of the store: active ones go on as their learners reconnect."""
        for stored in self._store.load_runs():
            has_ended = stored.build_view().HasField("ended_at")
            self._runs.add(stored.run_id, stored if has_ended else await self._restore_run(stored))
        for managed in self._runs.active_runs:
            self._controller.continue_run(managed)

    async def _restore_run(self, stored: StoredRun) -> ManagedRun | StoredRun:
        """Restore an active run; it fails if it cannot be built again, for example without --allow-imports."""
        now = datetime.now(UTC)
        try:
            spec = await asyncio.to_thread(_parse_spec, stored.spec, imports=self._imports)
            run = await asyncio.to_thread(_build_run, spec, stored.n_features)
            managed = await asyncio.to_thread(ManagedRun.from_stored_run, stored, run, now)
            await self._captures.restore_sent_rounds(managed.machine)
            return managed
        except SottovoceError as error:
            why = f"its coordinator was started again and cannot go on with it: {error}"
            failed = stored.mark_failed(why, now)
            self._store.save_views({stored.run_id: failed.encoded_view})
            rounds = min((each.status.rounds_done for each in failed.build_view().learners), default=0)
            log.error("run ended", run_id=stored.run_id, state="failed", reason=why, rounds=rounds)
            return failed


def _list_required_learners(run: ManagedRun | StoredRun) -> list[str]:
    """Return the learners of a run that are not lost to it."""
    view = run.build_view(include_spec=True)
    lost = {each["learner"] for each in json.loads(view.spec).get("absences") or () if each.get("unheard")}
    return [each.status.learner for each in view.learners if each.status.learner not in lost]


def _parse_spec(text: str, *, imports: bool) -> RunSpec:
    """Parse the spec of an operator. No local file is read for it: graph files are on the operator's machine.

    Raises:
        SpecError: it is not valid, or names a file.
    """
    spec = spec_from_wire(text, imports=imports)
    if spec.topology.has_file:
        raise SpecError("topology: a spec that is sent must list its edges, got a graph file; the client does this")
    return spec


def _list_initial_learners(spec: RunSpec) -> list[str]:
    """Return the learners that take part from the first round on; others may join later."""
    return [name for name, there in zip(spec.names, spec.participation.participant_mask(0), strict=True) if there]


def _require_size(spec: RunSpec) -> None:
    """Refuse a run that exceeds a coordinator's limits on learners or windows.

    Raises:
        SpecError: it does.
    """
    n, window = spec.n_learners, min(spec.clock.window, spec.rounds)
    if n > MAX_LEARNERS_PER_RUN:
        raise SpecError(f"a coordinator serves at most {MAX_LEARNERS_PER_RUN} learners, got {n}: simulate them")
    if spec.topology.sequence is not None and window * n > _MAX_ANNOUNCED_EPOCHS:
        text = f"clock.window times learners must be at most {_MAX_ANNOUNCED_EPOCHS} if the network changes"
        raise SpecError(f"{text}, got {window} * {n} = {window * n}")


def _build_run(spec: RunSpec, n_features: int) -> Run:
    """Build a run within the limits on messages and edges; called in a thread.

    Raises:
        SpecError: it exceeds them, or as of `build_run`.
    """
    run = build_run(spec, n_features)
    check_size(run.field_shapes)
    if (edges := len(run.network.edges)) > MAX_EDGES_PER_RUN:
        raise SpecError(
            f"a coordinator serves at most {MAX_EDGES_PER_RUN} edges, got {edges}: take fewer, or simulate them"
        )
    return run


# ---- recovery of runs from their learners ----------------------------------------------------------------------------


def _require_in_run(run_id: str, joined: Sequence[JoinedLearner]) -> None:
    """Require that each learner has the log of the run: without it, it would send its rounds again.

    Raises:
        FailedPrecondition: a learner has not.
    """
    if others := [each.introduction for each in joined if each.introduction.run_id != run_id]:
        logs = [f"{f'that of run {each.run_id!r}' if each.run_id else 'none'} with {each.learner}" for each in others]
        raise FailedPrecondition(
            f"each learner must have the log of run {run_id!r}, got {abbreviate_names(logs)}: is the run the right one, "
            "and the state "
            "folder the learner's own? Else it has been in another run since, or this one had ended: start a new run"
        )


def _require_plan(run_id: str, plan_hash: bytes, joined: Sequence[JoinedLearner]) -> None:
    """Require the same plan as in the learners' ledgers.

    Raises:
        SpecError: it is another one.
    """
    if others := [each.name for each in joined if each.introduction.plan_hash != plan_hash]:
        raise SpecError(
            f"run {run_id} has another spec or other records, by the ledgers of {abbreviate_names(others)}: recover it "
            "with those "
            "that it was started with"
        )


def _build_recovered_machine(
    run_id: str, run: Run, n_features: int, joined: Sequence[JoinedLearner], now: datetime
) -> RunStateMachine:
    """Build the state machine of a recovered run, before its learners get commands.

    Args:
        run_id, run, n_features: the run.
        joined: its learners, by index.
        now: time from which they count as disconnected.
    """
    addresses, attempt = (
        tuple(each.introduction.address for each in joined),
        max(each.introduction.attempt for each in joined),
    )
    machine = RunStateMachine(run_id, run, n_features, addresses, attempt=attempt)
    committed = [each.claim.rounds_committed or 0 for each in joined]
    statuses = [
        LearnerStatus(each.name, run_id, rounds_done=max(rounds - 1, 0), rounds_committed=rounds)
        for each, rounds in zip(joined, committed, strict=True)
    ]
    machine.restore(RunState.RUNNING if any(committed) else RunState.CONNECTING, statuses, now)
    machine.clock.raise_lease(max(each.introduction.lease_until_round for each in joined))
    return machine
