"""The parts of a session, built for a run: by its spec, the policy of the learner's owner, and what the log already holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sottovoce_core.algorithms.interface import Who
from sottovoce_core.errors import NotReady, SpecError
from sottovoce_core.running.policy import DAYS, Policy
from sottovoce_core.running.run import Run
from sottovoce_learner.config import max_message_bytes
from sottovoce_learner.ingest.queue import intake_for
from sottovoce_learner.memory import Allowance, Books, Memory
from sottovoce_learner.peers.inbox import Hearing, Inbox, Received
from sottovoce_learner.peers.outbox import Link, Telling
from sottovoce_learner.peers.plan import Plan
from sottovoce_learner.role import Role
from sottovoce_learner.sharing import digests_of, roster_of, run_of
from sottovoce_learner.storage.ledger import LedgerLine
from sottovoce_learner.storage.recovery import recover
from sottovoce_learner.storage.snapshot import names_of
from sottovoce_learner.storage.store import RunLog, Snapshots, Store, Terms
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.specs import check_size


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a session.

    Attributes:
        run_log: the log of the run, open for writing.
        snapshots: take the place of its beginning.
        memory: state and steps of a round; what the log says is in it already.
        telling: messages to neighbours, with what they may lack after a death.
        hearing: messages of neighbours.
    """

    run_log: RunLog
    snapshots: Snapshots
    memory: Memory
    telling: Telling
    hearing: Hearing


def build_parts(
    role: Role,
    state_folder: Path,
    mirror: Callable[[bytes, list[int]], None] | None,
    policy: Policy,
    own_budget: float | None,
    credentials: Credentials,
    *,
    keep_log: bool,
) -> Parts:
    """Build the parts of a session, which goes on where its log ends; arguments and errors as of `Session`."""
    spec, index = role.spec, role.index
    run = policy.admit(spec, role.n_features, index, mirrored=mirror is not None, build=run_of)
    check_size(run.field_shapes)
    codec = RoundCodec(run.field_shapes)
    if codec.length > (most := max_message_bytes(policy)):
        raise SpecError(
            f"this learner takes messages of at most {most} bytes, got a run whose messages have {codec.length}: "
            "its owner allows more with most_parameters in the policy"
        )
    start, roster = run.algorithm.start(Who(index)), roster_of(spec)
    allowance, run_log = _open_log(role, state_folder, policy, own_budget, codec.length, keep_log=keep_log)
    books = Books(run.algorithm.accountant(index), role.budget, allowance)
    attendance = roster.attendance(index, spec.rounds)
    intake = intake_for(spec, role.n_features, attendance)
    plan = Plan(run.network, index, digests_of(run), spec.names)
    ahead, keep = plan.reach(min(spec.clock.window, spec.rounds), late=run.late)
    memory = Memory(run, plan, attendance, books, intake, start, keep)
    links = {j: Link(keep) for j in sorted(plan.neighbours)}
    telling = Telling(role, attendance, memory.own, links, credentials, mirror, roster)
    _recover(run, run_log, memory, telling)
    last = memory.heard_last()
    inbox = Inbox[Received](plan.neighbours, plan.heard, ahead, memory.done, last=last, names=spec.names)
    hearing = Hearing(role, memory.codec, inbox, credentials)
    return Parts(run_log, Snapshots(role.name, run_log, names_of(run)), memory, telling, hearing)


def _open_log(
    role: Role, state_folder: Path, policy: Policy, own_budget: float | None, message_size: int, *, keep_log: bool
) -> tuple[Allowance, RunLog]:
    """What the owner allows, with what all other runs have cost, and the log of this one."""
    spec, store = role.spec, Store(state_folder, role.name, keep_log=keep_log)
    terms = Terms(spec.durability, message_size, spec.clock.window, spec.rounds, role.budget)
    elsewhere = store.spent(but=role.run_id)
    lately = store.spent_since(datetime.now(UTC) - timedelta(days=DAYS), role.run_id)
    line = LedgerLine(role.name, role.run_id, role.index, role.n_features, spec.model_dump_json())
    try:
        run_log = store.open_run(line, terms, elsewhere)
    except OSError as error:
        raise NotReady(f"the log of the run cannot be written: {error.strerror}") from None
    return Allowance(policy.epsilon_per_run, policy.epsilon_per_month, own_budget, lately, elsewhere), run_log


def _recover(run: Run, run_log: RunLog, memory: Memory, telling: Telling) -> None:
    """Go on where the log ends: what it says was said is said, and nothing of it is drawn again."""
    if (reading := run_log.reading) is not None:
        try:
            recover(memory, reading, names_of(run))
        except BaseException:
            run_log.close()
            raise
        run_log.reading = None
        telling.repeat(memory.frames, lambda t: memory.plan.part(t).told, memory.said)
    memory.pass_absence(memory.attendance.end)
