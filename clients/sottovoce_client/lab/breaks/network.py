"""Audits of broken learners on real services: coordinator, learners and relay, over gRPC, in one process of their own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from structlog.testing import capture_logs

from sottovoce.auditing.audit import Audit
from sottovoce.auditing.plan import AuditPlan, plan_audit
from sottovoce.lab.selftest.bases import BASES
from sottovoce.lab.selftest.power import CONFIDENCE
from sottovoce.lab.selftest.trial import seen_by
from sottovoce.running.policy import Policy
from sottovoce_client.auditing.captures import audit_of, find
from sottovoce_client.auditing.ledger import Entry
from sottovoce_client.auditing.network import coins, in_turn
from sottovoce_client.auditing.started import started
from sottovoce_client.auditing.worlds import as_audited
from sottovoce_client.lab.breaks.learners import BrokenService, Noised, learners_of
from sottovoce_client.lab.breaks.served import Served, served
from sottovoce_client.running.operate import run_on
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_learner.service import LearnerConfig
from sottovoce_rpc.tasks import Tasks

RUNGS = (24, 48, 100)
"""Runs of each world that are tried, one after the other."""

AUDITS = 3
"""With each number of runs, all of runs of their own."""

_BASE = BASES["ldp-dol, epsilon 1"]
BASE = replace(_BASE, sections={**_BASE.sections, "learners": 2})
"""What runs: the fewer edges there are, the faster."""

ACCEPTING = 1
"""The learner that is audited: it accepts streams, so it can end them."""


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
        run, data = BASE.build()
        plan = plan_audit(run, data, ACCEPTING, runs=runs, confidence=CONFIDENCE, seed=each)
        with tempfile.TemporaryDirectory() as folder, capture_logs():  # broken services have much to say
            return _found_by(_audited(broken, plan, Path(folder)))

    return served(blank, found_by, rungs, seed)


def _audited(broken: BrokenService, plan: AuditPlan, folder: Path) -> Audit:
    """Make all runs, and audit them as `sottovoce audit --on network` does."""
    pairs = in_turn(plan)
    ledger = asyncio.run(_make(broken, plan, pairs, folder))
    runs = started(find(open_folder(folder / "captures")), plan.run, ledger, lambda replica: pairs[int(str(replica))])
    return audit_of(plan, runs, "real services", lambda what: None)


def _found_by(done: Audit) -> str:
    """The part of the audit that refutes the claim most clearly, or the first family that does; empty: none does."""
    if done.verdict.kind != "refuted":
        return ""
    rejecting = [test for test in done.found.tests if test.rejects]
    strongest = min(rejecting, key=lambda test: test.p_value / test.level, default=None)
    return next(iter(seen_by(done.found)), "") if strongest is None else str(strongest.part)


# ---- runs ------------------------------------------------------------------------------------------------------------


async def _make(broken: BrokenService, plan: AuditPlan, pairs: Sequence[int], folder: Path) -> dict[int, Entry]:
    """All runs, one after the other, and what became of them."""
    spec, ledger = as_audited(plan.run.spec), dict[int, Entry]()
    data = [[pair.worlds.data(plan.data, world) for world in (0, 1)] for pair in plan.pairs]
    async with _services(broken, plan, folder) as (coordinator, learners):
        for k, (pair, world) in enumerate(zip(pairs, coins(plan).tolist(), strict=True)):
            for learner in learners:
                learner.world = world
            outcome = await run_on(coordinator, spec, data[pair][world], lambda *seen: None, world=world, replica=k)
            ledger[k] = Entry(outcome.run_id, outcome.state, world)
            if broken.lost is not None and broken.lost(world) and outcome.capture is not None:
                shutil.rmtree(outcome.capture)
    return ledger


@asynccontextmanager
async def _services(broken: BrokenService, plan: AuditPlan, folder: Path) -> AsyncIterator[tuple[str, list[Noised]]]:
    """All services of a run: their coordinator's address, and the learners."""
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=folder / "captures"))
    coordinator = Coordinator(CoordinatorConfig(eavesdropper=await eavesdropper.start()))
    address = await coordinator.start()
    policy = Policy.for_spec(as_audited(plan.run.spec))
    learners = learners_of(
        broken, plan, lambda name: LearnerConfig(name, address, state_folder=folder / "journals", policy=policy)
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
