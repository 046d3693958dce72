"""Opens a learner's session in a run: by its spec, the policy of the learner's owner, and what the log already holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sottovoce_core.algorithms.interface import StateAxes
from sottovoce_core.errors import FailedPrecondition, SpecError
from sottovoce_core.noise import NoiseSource
from sottovoce_core.runs.policy import DAYS_PER_MONTH, Policy
from sottovoce_learner.assignment import CachedRun, RunAssignment
from sottovoce_learner.config import max_message_bytes
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
    """Open a session, which goes on where the log of its run ends.

    Args:
        role: what to do.
        noise: where noise comes from.
        state_folder: where the ledger and the logs of runs stand.
        mirror: is given every frame that was sent and who heard it, where the run is mirrored.
        policy: of the learner's owner.
        private: False when the noise is not the operating system's.
        own_budget: epsilon that the owner allows in all runs together; None: no limit.
        credentials: of the learner: with an identity it signs what it says, and so must its neighbours.
        changed: set when there is something to report.
        keep_log: whether the log is kept when the run is over.
        kind: of session.

    Raises:
        DataError: what stands in the state folder is damaged, so that what was spent is not known.
        FailedPrecondition: this learner has been in another run since.
        SpecError: the owner's policy does not allow the run, the spec cannot be run, or its messages are too long.
    """
    spec, index, mirrored = role.spec, role.index, mirror is not None
    run = policy.admit(
        spec, role.n_features, index, is_mirrored=mirrored, build=lambda *given: CachedRun.get_cached(*given).run
    )
    check_size(run.field_shapes)
    length, most = RoundCodec(run.field_shapes).message_bytes, max_message_bytes(policy)
    if length > most:
        raise SpecError(
            f"this learner takes messages of at most {most} bytes, got a run whose messages have {length}: "
            "its owner allows more with max_parameters in the policy"
        )
    start, roster = run.algorithm.init(StateAxes(index)), role.cached_run.participation
    attendance = roster.learner_participation(index, spec.rounds)
    intake = RecordQueue.from_spec(spec, role.n_features, attendance)
    plan = NeighbourSchedule(run.network, index, role.cached_run.digests, spec.names)
    ahead, keep = plan.compute_buffer_rounds(min(spec.clock.window, spec.rounds), allows_late=run.has_bounded_staleness)
    allowance, run_log = _open_log(role, state_folder, policy, own_budget, length, keep_log=keep_log)
    books = PrivacyFilter(run.algorithm.accountant(index), role.budget, allowance)
    memory = LearnerStateMachine(run, plan, attendance, books, intake, start, keep)
    links = {j: NeighbourLink(keep) for j in sorted(plan.neighbours)}
    telling = Outbox(role, plan, attendance, memory.sent_digests, links, credentials, mirror, roster)
    _recover(memory, run_log, telling)
    last = memory.get_late_messages()
    inbox = Inbox(
        plan.neighbours, plan.get_in_neighbours, ahead, memory.rounds_done, late_messages=last, names=spec.names
    )
    hearing = MessageReceiver(role, memory.codec, inbox, credentials)
    return session_class(
        role,
        policy,
        noise,
        memory,
        run_log,
        telling,
        hearing,
        is_noise_private=is_noise_private,
        report_event=report_event,
    )


def _open_log(
    role: RunAssignment,
    state_folder: Path,
    policy: Policy,
    own_budget: float | None,
    message_size: int,
    *,
    keep_log: bool,
) -> tuple[Allowance, RunLog]:
    """What the owner allows, with what all other runs have cost, and the log of this one."""
    spec, store = role.spec, LearnerStore(state_folder, role.name, keep_log=keep_log)
    terms = LogOptions(spec.durability, message_size, spec.clock.window, spec.rounds, role.budget)
    elsewhere = store.stored_state.sum_epsilon(excluded_run_id=role.run_id)
    lately = store.stored_state.sum_epsilon_since(datetime.now(UTC) - timedelta(days=DAYS_PER_MONTH), role.run_id)
    line = LedgerEntry(role.name, role.run_id, role.index, role.n_features, spec.model_dump_json())
    try:
        run_log = store.open_run(line, terms, elsewhere)
    except OSError as error:
        raise FailedPrecondition(f"the log of the run cannot be written: {error.strerror}") from None
    return Allowance(policy.epsilon_per_run, policy.epsilon_per_month, own_budget, lately, elsewhere), run_log


def _recover(memory: LearnerStateMachine, run_log: RunLog, telling: Outbox) -> None:
    """Go on where the log ends: a message that it holds was sent, and none of its noise is drawn again."""
    if run_log.recovered_contents is not None:
        try:
            memory.recover(run_log.recovered_contents)
        except BaseException:
            run_log.close()
            raise
        run_log.recovered_contents = None
        telling.repeat(memory.frames, memory.rounds_committed)
    memory.skip_offline_rounds(memory.learner_participation.end)
