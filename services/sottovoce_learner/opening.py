"""Opens a learner's session in a run: by its spec, the policy of the learner's owner, and what the log already holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sottovoce_core.algorithms.interface import Who
from sottovoce_core.errors import FailedPrecondition, SpecError
from sottovoce_core.noise import NoiseSource
from sottovoce_core.running.policy import DAYS, Policy
from sottovoce_learner.budget import Allowance, PrivacyFilter
from sottovoce_learner.config import max_message_bytes
from sottovoce_learner.ingest.intake import RecordQueue
from sottovoce_learner.memory import Memory
from sottovoce_learner.peers.inbox import MessageReceiver, Inbox
from sottovoce_learner.peers.outbox import Link, Outbox
from sottovoce_learner.peers.plan import Plan
from sottovoce_learner.role import Role, Shared
from sottovoce_learner.session import Session
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_learner.storage.run_log import RunLog, Terms
from sottovoce_learner.storage.store import Store
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import NO_IDENTITY, Credentials
from sottovoce_rpc.specs import check_size


def open_session(
    role: Role,
    noise: NoiseSource,
    state_folder: Path,
    mirror: Callable[[bytes, list[int]], None] | None = None,
    *,
    policy: Policy,
    private: bool = True,
    own_budget: float | None = None,
    credentials: Credentials = NO_IDENTITY,
    changed: asyncio.Event | None = None,
    keep_log: bool = False,
    kind: type[Session] = Session,
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
    run = policy.admit(spec, role.n_features, index, mirrored=mirrored, build=lambda *given: Shared.of(*given).run)
    check_size(run.field_shapes)
    length, most = RoundCodec(run.field_shapes).length, max_message_bytes(policy)
    if length > most:
        raise SpecError(
            f"this learner takes messages of at most {most} bytes, got a run whose messages have {length}: "
            "its owner allows more with most_parameters in the policy"
        )
    start, roster = run.algorithm.start(Who(index)), role.shared.roster
    attendance = roster.attendance(index, spec.rounds)
    intake = RecordQueue.of(spec, role.n_features, attendance)
    plan = Plan(run.network, index, role.shared.digests, spec.names)
    ahead, keep = plan.reach(min(spec.clock.window, spec.rounds), late=run.late)
    allowance, run_log = _open_log(role, state_folder, policy, own_budget, length, keep_log=keep_log)
    books = PrivacyFilter(run.algorithm.accountant(index), role.budget, allowance)
    memory = Memory(run, plan, attendance, books, intake, start, keep)
    links = {j: Link(keep) for j in sorted(plan.neighbours)}
    telling = Outbox(role, plan, attendance, memory.own, links, credentials, mirror, roster)
    _recover(memory, run_log, telling)
    last = memory.get_late_messages()
    inbox = Inbox(plan.neighbours, plan.heard, ahead, memory.done, last=last, names=spec.names)
    hearing = MessageReceiver(role, memory.codec, inbox, credentials)
    return kind(role, policy, noise, memory, run_log, telling, hearing, private=private, changed=changed)


def _open_log(
    role: Role, state_folder: Path, policy: Policy, own_budget: float | None, message_size: int, *, keep_log: bool
) -> tuple[Allowance, RunLog]:
    """What the owner allows, with what all other runs have cost, and the log of this one."""
    spec, store = role.spec, Store(state_folder, role.name, keep_log=keep_log)
    terms = Terms(spec.durability, message_size, spec.clock.window, spec.rounds, role.budget)
    elsewhere = store.standing.spent(but=role.run_id)
    lately = store.standing.sum_epsilon_since(datetime.now(UTC) - timedelta(days=DAYS), role.run_id)
    line = LedgerEntry(role.name, role.run_id, role.index, role.n_features, spec.model_dump_json())
    try:
        run_log = store.open_run(line, terms, elsewhere)
    except OSError as error:
        raise FailedPrecondition(f"the log of the run cannot be written: {error.strerror}") from None
    return Allowance(policy.epsilon_per_run, policy.epsilon_per_month, own_budget, lately, elsewhere), run_log


def _recover(memory: Memory, run_log: RunLog, telling: Outbox) -> None:
    """Go on where the log ends: a message that it holds was sent, and none of its noise is drawn again."""
    if run_log.reading is not None:
        try:
            memory.recover(run_log.reading)
        except BaseException:
            run_log.close()
            raise
        run_log.reading = None
        telling.repeat(memory.frames, memory.said)
    memory.skip_offline_rounds(memory.attendance.end)
