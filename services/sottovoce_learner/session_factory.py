"""Opening of a learner's session in a run, from its spec, the owner's policy and the contents of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sottovoce_core.algorithms.interface import StateAxes
from sottovoce_core.errors import FailedPrecondition, SpecError
from sottovoce_core.noise import NoiseSource
from sottovoce_core.privacy.loss import EpsilonLimit
from sottovoce_core.runs.policy import DAYS_PER_MONTH, Policy
from sottovoce_core.runs.run import Run
from sottovoce_learner.assignment import CachedRun, RunAssignment
from sottovoce_learner.config import compute_max_message_bytes
from sottovoce_learner.ingest.record_queue import RecordQueue
from sottovoce_learner.peers.inbox import Inbox, MessageReceiver
from sottovoce_learner.peers.neighbour_schedule import NeighbourSchedule
from sottovoce_learner.peers.outbox import NeighbourLink, Outbox
from sottovoce_learner.privacy_filter import Allowance, PrivacyFilter
from sottovoce_learner.session import Session
from sottovoce_learner.state_machine import LearnerStateMachine
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_learner.storage.run_log import LogOptions, RunLog
from sottovoce_learner.storage.store import LearnerStore
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.specs import check_size


def open_session(
    role: RunAssignment,
    noise: NoiseSource,
    state_folder: Path,
    mirror: Callable[[bytes, list[int]], None] | None = None,
    *,
    policy: Policy,
    is_noise_private: bool = True,
    own_budget: float | None = None,
    credentials: Credentials = NO_IDENTITY,
    report_event: asyncio.Event | None = None,
    keep_log: bool = False,
    session_class: type[Session] = Session,
) -> Session:
    """Open a session, which resumes where the log of its run ends.

    Args:
        role: assignment of the learner.
        noise: noise source.
        state_folder: folder of the ledger and the logs of runs.
        mirror: receives every sent frame and its recipients, where the run is mirrored.
        policy: policy of the learner's owner.
        is_noise_private: False when the noise is not the operating system's.
        own_budget: maximum epsilon over all runs; None: no limit.
        credentials: credentials of the learner: with an identity it signs its messages, and its neighbours must sign theirs.
        report_event: set when a report is due.
        keep_log: whether the log is kept when the run is over.
        session_class: class of the session.

    Raises:
        CorruptStateError: the state folder is damaged, so that the spent epsilon is not known.
        FailedPrecondition: this learner has been in another run since.
        SpecError: the owner's policy does not allow the run, the spec cannot be run, or its messages are too long.
    """
    spec, index, mirrored = role.spec, role.index, mirror is not None
    run = policy.admit(
        spec, role.n_features, index, is_mirrored=mirrored, build=lambda *given: CachedRun.get_cached(*given).run
    )
    check_size(run.field_shapes)
    length, max_bytes = RoundCodec(run.field_shapes).message_bytes, compute_max_message_bytes(policy)
    if length > max_bytes:
        raise SpecError(
            f"this learner takes messages of at most {max_bytes} bytes, got a run whose messages have {length}: "
            "its owner allows more with max_parameters in the policy"
        )
    start, participation_schedule = run.algorithm.init(StateAxes(index)), role.cached_run.participation
    participation = participation_schedule.learner_participation(index, spec.rounds)
    record_queue = RecordQueue.from_spec(spec, role.n_features, participation)
    schedule = NeighbourSchedule(run.network, index, role.cached_run.digests, spec.names)
    buffer_rounds, retained_rounds = schedule.compute_buffer_rounds(
        min(spec.clock.window, spec.rounds), allows_late=run.has_bounded_staleness
    )
    allowance, run_log = _open_log(role, run, state_folder, policy, own_budget, length, keep_log=keep_log)
    privacy_filter = PrivacyFilter(run.algorithm.accountant(index), run.budget(index), allowance)
    state_machine = LearnerStateMachine(
        run, schedule, participation, privacy_filter, record_queue, start, retained_rounds
    )
    links = {j: NeighbourLink(retained_rounds) for j in sorted(schedule.neighbours)}
    outbox = Outbox(
        role, schedule, participation, state_machine.sent_digests, links, credentials, mirror, participation_schedule
    )
    _recover(state_machine, run_log, outbox)
    late_messages = state_machine.get_late_messages()
    inbox = Inbox(
        schedule.neighbours,
        schedule.get_in_neighbours,
        buffer_rounds,
        state_machine.rounds_done,
        late_messages=late_messages,
        names=spec.names,
    )
    receiver = MessageReceiver(role, state_machine.codec, inbox, credentials)
    return session_class(
        role,
        policy,
        noise,
        state_machine,
        run_log,
        outbox,
        receiver,
        is_noise_private=is_noise_private,
        report_event=report_event,
    )


def _open_log(
    role: RunAssignment,
    run: Run,
    state_folder: Path,
    policy: Policy,
    own_budget: float | None,
    message_size: int,
    *,
    keep_log: bool,
) -> tuple[Allowance, RunLog]:
    """Return the owner's limits with what other runs have spent, and the log of this run."""
    spec, store = role.spec, LearnerStore(state_folder, role.name, keep_log=keep_log)
    pure_budget = None if spec.privacy.delta else role.budget
    log_options = LogOptions(spec.durability, message_size, spec.clock.window, spec.rounds, pure_budget)
    entry = LedgerEntry(role.name, role.run_id, role.index, role.n_features, spec.model_dump_json())
    try:
        run_log = store.open_run(entry, log_options)
    except OSError as error:
        raise FailedPrecondition(f"the log of the run cannot be written: {error.strerror}") from None

    def limit_over_runs(epsilon: float | None) -> EpsilonLimit | None:
        return None if epsilon is None else EpsilonLimit.choose(epsilon, policy.delta)

    month = datetime.now(UTC) - timedelta(days=DAYS_PER_MONTH)
    return Allowance(
        run.plan_limit(role.index, policy.epsilon_per_run, policy.delta),
        limit_over_runs(policy.epsilon_per_month),
        limit_over_runs(own_budget),
        store.stored_state.sum_losses(month, excluded_run_id=role.run_id),
        store.stored_state.sum_losses(excluded_run_id=role.run_id),
    ), run_log


def _recover(state_machine: LearnerStateMachine, run_log: RunLog, outbox: Outbox) -> None:
    """Resume where the log ends: a message in it was sent, and none of its noise is drawn again."""
    if run_log.recovered_contents is not None:
        try:
            state_machine.recover(run_log.recovered_contents)
        except BaseException:
            run_log.close()
            raise
        run_log.recovered_contents = None
        outbox.repeat(state_machine.frames, state_machine.rounds_committed)
    state_machine.skip_offline_rounds(state_machine.learner_participation.end)
