"""Audits of broken learners on real services: coordinator, learners and relay or wiretap, over gRPC, in one process."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from structlog.testing import capture_logs

from sottovoce.auditing.audit import Audit
from sottovoce.auditing.plan import AuditPlan
from sottovoce.experiment import Prepared
from sottovoce.lab.selftest.bases import BASES, Base
from sottovoce.lab.selftest.power import CONFIDENCE
from sottovoce.lab.selftest.trial import seen_by
from sottovoce.running.policy import Policy
from sottovoce.spec import RunSpec
from sottovoce_client.auditing.audit import AuditRequest
from sottovoce_client.auditing.captures import audit_of, find
from sottovoce_client.auditing.ciphertext import audit_ciphertext, plan_for_ciphertext
from sottovoce_client.auditing.ledger import Entry
from sottovoce_client.auditing.network import coins, in_turn
from sottovoce_client.auditing.started import Started, started
from sottovoce_client.auditing.worlds import Way, as_audited
from sottovoce_client.lab.breaks.learners import BrokenService, Noised, learners_of
from sottovoce_client.lab.breaks.served import Served, served
from sottovoce_client.running.local import issue_local
from sottovoce_client.running.operate import run_on
from sottovoce_client.terminal import say_nothing
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_learner.config import LearnerConfig
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.tasks import Tasks

RUNGS = (24, 48, 100)
"""Runs of each world that are tried, one after the other."""

AUDITS = 3
"""With each number of runs, all of runs of their own."""

_BASE = BASES["ldp-dol, epsilon 1"]
BASE = replace(_BASE, sections={**_BASE.sections, "learners": 2})
"""What runs: the fewer edges there are, the faster."""

ACCEPTING, CALLING = 1, 0
"""The learner that is audited by what relays hear, and by what wiretaps note: the one accepts streams, so it can end them; the
other one opens them, so it can open more."""


def measure_on_network(
    broken: BrokenService, *, rungs: Sequence[int] = RUNGS, audits: int = AUDITS, seed: int = 0
) -> Served:
    """Run real services in two worlds, and audit what relays heard.

    Args:
        broken: what is wrong with them.
        rungs: runs of each world.
        audits: with each number of runs.
        seed: of coins and audits; noise and times are those of the machine.
    """
    blank = Served(broken.name, broken.what, "on real services", broken.correct, max(rungs), audits, sure=broken.sure)

    def found_by(runs: int, each: int) -> str:
        plan = plan_beside_numbers(BASE, runs, each, learner=ACCEPTING)
        with made_with(broken, plan, "relay") as made:
            return _found_by(audit_of(plan, made, "real services", say_nothing))

    return served(blank, found_by, rungs, seed)


def measure_by_wiretap(
    broken: BrokenService, *, rungs: Sequence[int] = RUNGS, audits: int = AUDITS, seed: int = 0
) -> Served:
    """Run real services whose channels are encrypted in two worlds, and audit what wiretaps noted; arguments as above."""
    blank = Served(broken.name, broken.what, "by wiretap", broken.correct, max(rungs), audits, sure=broken.sure)

    def found_by(runs: int, each: int) -> str:
        plan = plan_beside_numbers(BASE, runs, each)
        with made_with(broken, plan, "wiretap") as made:
            done = audit_ciphertext(plan, made, each, say_nothing)
        return max(done.found.bounds, key=lambda bound: bound.value).view if done.verdict.kind == "refuted" else ""

    return served(blank, found_by, rungs, seed)


def plan_beside_numbers(
    base: Base, runs: int, seed: int, confidence: float = CONFIDENCE, *, learner: int = CALLING
) -> AuditPlan:
    """An audit of what passes beside numbers: a loud record against a silent one, which whatever depends on a norm tells apart.

    Args:
        base: what runs.
        runs: of each world.
        seed: of coins and audit.
        confidence: with which a correct learner is not refuted.
        learner: who is audited.
    """
    prepared = Prepared(*base.build())
    asked = AuditRequest(prepared.run.spec.names[learner], runs=runs, confidence=confidence, seed=seed)
    return plan_for_ciphertext(prepared, asked)


@contextmanager
def made_with(broken: BrokenService, plan: AuditPlan, capture: Way) -> Iterator[Started]:
    """All runs, as `sottovoce audit --on network` or `--on wiretap` makes them."""
    with tempfile.TemporaryDirectory() as folder, capture_logs():  # broken services have much to say
        pairs = in_turn(plan)
        ledger = asyncio.run(_make(broken, plan, pairs, Path(folder), capture))
        captures = find(open_folder(Path(folder) / "captures"))
        yield started(captures, plan.run, ledger, lambda replica: pairs[int(str(replica))])


def _found_by(done: Audit) -> str:
    """The part of the audit that refutes the claim most clearly, or the first family that does; empty: none does."""
    if done.verdict.kind != "refuted":
        return ""
    rejecting = [test for test in done.found.tests if test.rejects]
    strongest = min(rejecting, key=lambda test: test.p_value / test.level, default=None)
    return next(iter(seen_by(done.found)), "") if strongest is None else str(strongest.part)


# ---- runs ------------------------------------------------------------------------------------------------------------


async def _make(
    broken: BrokenService, plan: AuditPlan, pairs: Sequence[int], folder: Path, capture: Way
) -> dict[int, Entry]:
    """All runs, one after the other, and what became of them."""
    spec, ledger = as_audited(plan.run.spec, capture), dict[int, Entry]()
    data = [[pair.worlds.data(plan.data, world) for world in (0, 1)] for pair in plan.pairs]
    identities = folder / "identities" if capture == "wiretap" else None
    if identities is not None:
        await asyncio.to_thread(issue_local, identities, spec.names)
    own = _identity(identities, "operator-local")
    async with _services(broken, plan, spec, folder, identities) as (coordinator, learners):
        for k, (pair, world) in enumerate(zip(pairs, coins(plan).tolist(), strict=True)):
            for learner in learners:
                learner.world = world
            records = data[pair][world]
            outcome = await run_on(
                coordinator, spec, records, lambda *seen: None, world=world, replica=k, credentials=own
            )
            ledger[k] = Entry(outcome.run_id, outcome.state, world)
            if broken.lost is not None and broken.lost(world) and outcome.capture is not None:
                shutil.rmtree(outcome.capture)
    return ledger


@asynccontextmanager
async def _services(
    broken: BrokenService, plan: AuditPlan, spec: RunSpec, folder: Path, identities: Path | None
) -> AsyncIterator[tuple[str, list[Noised]]]:
    """All services of a run: their coordinator's address, and the learners."""
    own = _identity(identities, "eavesdropper-local")
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=folder / "captures", credentials=own))
    own = _identity(identities, "coordinator-local")
    coordinator = Coordinator(CoordinatorConfig(eavesdropper=await eavesdropper.start(), credentials=own))
    address = await coordinator.start()
    learners = learners_of(
        broken,
        plan,
        lambda name: LearnerConfig(
            name,
            address,
            state_folder=folder / "journals",
            policy=Policy.for_spec(spec),
            credentials=_identity(identities, f"learner-{name}"),
            owners=("operator/local",),
        ),
    )
    async with Tasks() as following:
        try:
            for learner in learners:
                following.start(learner.follow(await learner.start()))
            yield address, learners
        finally:
            for learner in learners:
                await learner.stop()
            await coordinator.stop()
            await eavesdropper.stop()


def _identity(folder: Path | None, name: str) -> Credentials:
    """Of a service; none where channels are not encrypted."""
    return Credentials() if folder is None else Credentials(folder / name)
