"""What a learner's owner allows holds, whoever asks: over real services, in every run, and after every start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_core.privacy.guarantee import Adjacency
from sottovoce_core.runs.policy import GuaranteeRequirements, Policy
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_eavesdropper import service as eavesdropping
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from sottovoce_learner.storage import ledger
from sottovoce_learner.storage.ledger import StoredState
from sottovoce_learner.storage.state_folder import LearnerPaths
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import coordinator_pb2
from tests.examples import ALLOWING, made_up, small_spec
from tests.gossip import GOSSIP
from tests.services.identities import Identities
from tests.services.network import Network, network, until_charged
from tests.services.test_resume import resume
from tests.services.test_roster import leave

NAMES = ["ann", "ben"]
ROUNDS = 6


def spec_of(**sections: Any) -> RunSpec:
    return small_spec(ROUNDS, NAMES, **{"clock": {"deadline_s": 100.0}, **sections})


def price(spec: RunSpec, rounds: int | None = None, learner: int = 0) -> float:
    """Epsilon of its first rounds, of one record each."""
    return build_run(spec, 3).guarantee(learner).epsilon(rounds)


async def restarted(up: Network, name: str, policy: Policy) -> None:
    """The same learner by another policy."""
    await up.leave(name)
    up.policy = policy
    await up.join(name)


ASKING: dict[str, tuple[Policy, dict[str, Any], str]] = {
    "algorithm": (Policy(algorithms=("dsgd",)), {}, "algorithms [dsgd], the spec asks for ldp-dol"),
    "code": (
        Policy(imports=(), epsilon_per_run=None),
        {"algorithm": {"name": GOSSIP}},
        f"imports [], the spec asks for [{GOSSIP}]",
    ),
    "price": (Policy(), {"algorithm": {"sigma": 1e-9}}, "epsilon_per_run 100, the spec asks for "),
    "no promise": (Policy(), {"algorithm": {"name": GOSSIP}}, "epsilon_per_run 100, the spec asks for inf"),
    "adjacency": (
        Policy(guarantees=GuaranteeRequirements(adjacency=Adjacency.LEARNER)),
        {},
        "guarantees.adjacency learner, the spec asks for record",
    ),
    "accuracy": (Policy(), {"telemetry": {"accuracy": True}}, "telemetry [], the spec asks for [accuracy]"),
    "both": (
        Policy(telemetry=("accuracy",)),
        {"telemetry": {"accuracy": True, "predict": True}},
        "telemetry [accuracy], the spec asks for [accuracy, predict]",
    ),
    "relay": (
        Policy(capture_modes=("mirror",)),
        {"capture": "relay"},
        "capture_modes [mirror], the spec asks for [relay]",
    ),
    "mirror": (Policy(capture_modes=()), {"capture": "mirror"}, "capture_modes never, the spec asks for [mirror]"),
    "features": (Policy(max_features=2), {}, "max_features 2, the spec asks for 3"),
    "rounds": (Policy(max_rounds=5), {}, "max_rounds 5, the spec asks for 6"),
    "learners": (Policy(max_learners=1), {}, "max_learners 1, the spec asks for 2"),
    "several": (
        Policy(algorithms=("dsgd",), capture_modes=()),
        {"capture": "relay", "telemetry": {"predict": True}},
        "algorithms [dsgd], the spec asks for ldp-dol; and telemetry [], the spec asks for [predict]; and capture_modes never, "
        "the spec asks for [relay]",
    ),
}


def asking(sections: dict[str, Any]) -> RunSpec:
    """A spec that asks for more; an algorithm of another name takes the place of the usual one."""
    document = spec_of().model_dump(mode="json")
    algorithm = {
        **({} if "name" in sections.get("algorithm", {}) else document["algorithm"]),
        **sections.get("algorithm", {}),
    }
    return parse_spec({**document, **sections, "algorithm": algorithm or document["algorithm"]}, allow_imports=True)


@pytest.mark.parametrize("what", ASKING)
async def test_a_run_outside_the_policy_fails_with_the_clause_and_its_learner_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of one learner; the other one's owner allows it. Nothing is said, nothing charged, and the next run goes well."""
    monkeypatch.setattr(eavesdropping, "_MIRROR_DRAIN_TIMEOUT_S", 0.0)  # nobody copies anything
    policy, sections, text = ASKING[what]
    spec = asking(sections)
    async with network(tmp_path, NAMES) as up:
        await restarted(up, "ann", policy)
        outcome = await up.run(spec, made_up(spec))
        status = await up.status("ann")
        charged = StoredState.read(LearnerPaths(tmp_path / "journals", "ann")).lines
        await restarted(up, "ann", ALLOWING)
        again = await up.run(spec_of(), made_up(spec_of()))
    assert outcome.state == "failed" and outcome.detail.startswith(
        "ann failed: the owner's policy (the default one) allows "
    )
    assert text in outcome.detail and "\n" not in outcome.detail
    assert (status.state, status.rounds_committed, status.run_id) == (LearnerState.FAILED, 0, outcome.run_id)
    assert len(charged) == 0
    assert again.state == "finished"


async def test_the_same_process_takes_the_next_run_that_fits(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        await restarted(up, "ann", Policy(epsilon_per_run=None, epsilon_per_month=None))
        outcomes = [
            await up.run(spec, made_up(spec))
            for spec in (spec_of(), spec_of(telemetry={"accuracy": True}), spec_of(capture="mirror"))
        ]
    assert [each.state for each in outcomes] == ["finished", "failed", "finished"]


# ---- whom its owner trusts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trusted", "joins"),
    [(None, True), (("main",), True), (("other",), False), (("other", "main"), True), (("main", "other"), True)],
)
async def test_a_learner_joins_the_coordinators_that_its_owner_trusts(
    tmp_path: Path, trusted: tuple[str, ...] | None, joins: bool
) -> None:
    ids = Identities(tmp_path / "ids")
    names = None if trusted is None else tuple(f"coordinator/{each}" for each in trusted)
    async with network(tmp_path, [], identities=ids) as up:
        config = LearnerConfig(
            "ann",
            up.coordinator,
            state_folder=tmp_path / "state",
            join_timeout_s=2.0 if joins else 0.5,
            credentials=ids.of("learner/ann"),
            policy=Policy(coordinators=names),
        )
        ann = Learner(config)
        following = asyncio.ensure_future(ann.follow(await ann.start()))
        if joins:
            await up.until_here("ann")
            following.cancel()
        else:
            with pytest.raises(
                Unavailable, match=r"coordinator/other, trusted by its owner, at .* another service is there"
            ):
                await following
        await ann.stop()


async def test_a_learner_leaves_a_coordinator_that_is_not_trusted_alone_when_it_comes_back(tmp_path: Path) -> None:
    """Another one has taken the address of the one that the learner followed."""
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, [], identities=ids) as up:
        up.policy = Policy(coordinators=("coordinator/main",))
        await up.join("ann")
        await up.join("ben")
        await up.until_here("ann")
        own = ids.at("coordinator/main")
        kept = {name: (own / name).read_bytes() for name in ("tls.key", "tls.crt")}
        for name in kept:
            (own / name).write_bytes((ids.at("coordinator/other") / name).read_bytes())
        await up.restart_coordinator()
        up.policy = ALLOWING
        await up.join("cleo")
        await up.until_here("cleo")
        assert up.coordinating is not None
        assert "ann" not in up.coordinating._learners and "ben" not in up.coordinating._learners
        for name, content in kept.items():
            (own / name).write_bytes(content)
        await up.restart_coordinator()
        await up.until_here("ann")


@pytest.mark.parametrize("careful", NAMES)
@pytest.mark.parametrize(("named", "state"), [(("other",), "failed"), (("other", "ear"), "finished")])
async def test_a_learner_is_recorded_by_whom_its_owner_accepts(
    tmp_path: Path, careful: str, named: tuple[str, ...], state: str
) -> None:
    """Ann opens the stream, and ben accepts it; either one's owner decides."""
    spec = spec_of(capture="relay", clock={"deadline_s": 1.0 if state == "failed" else 100.0})
    accepting = ALLOWING.model_copy(update={"eavesdroppers": tuple(f"eavesdropper/{each}" for each in named)})
    async with network(tmp_path, NAMES, identities=Identities(tmp_path / "ids")) as up:
        await restarted(up, careful, accepting)
        await up.until_here(careful)
        outcome = await up.run(spec, made_up(spec))
        statuses = [await up.status(name) for name in NAMES]
    assert outcome.state == state, outcome.detail
    assert {each.rounds_done for each in statuses} == {0 if state == "failed" else ROUNDS}


@pytest.mark.parametrize(("named", "copies"), [(("other",), False), (("other", "ear"), True)])
async def test_copies_go_to_whom_its_owner_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...], copies: bool
) -> None:
    if not copies:
        monkeypatch.setattr(eavesdropping, "_MIRROR_DRAIN_TIMEOUT_S", 1.0)  # it waits for ann's in vain
    spec = spec_of(capture="mirror")
    accepting = ALLOWING.model_copy(update={"eavesdroppers": tuple(f"eavesdropper/{each}" for each in named)})
    async with network(tmp_path, NAMES, identities=Identities(tmp_path / "ids")) as up:
        await restarted(up, "ann", accepting)
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished" and outcome.capture_location is not None
    senders = set(open_capture(outcome.capture_location).read_messages(["sender"])["sender"].to_pylist())
    assert senders == ({0, 1} if copies else {1})


@pytest.mark.parametrize("clause", ["coordinators", "eavesdroppers"])
async def test_whom_to_trust_needs_an_identity(tmp_path: Path, clause: str) -> None:
    policy = Policy.model_validate({clause: [f"{clause.removesuffix('s')}/main"]})
    with pytest.raises(SpecError, match=f"names {clause}, and needs a learner with an identity .*--identity FOLDER"):
        Learner(LearnerConfig("ann", "127.0.0.1:1", state_folder=tmp_path, policy=policy))


# ---- limits of what is spent -----------------------------------------------------------------------------------------


async def test_the_limit_of_a_run_holds_while_it_goes_on(tmp_path: Path) -> None:
    """Its plan is what the coordinator says; the learner counts what its rounds bring."""
    planned = spec_of(data={"batch_size": 1000})
    limit = (price(planned, 3) + price(planned, 4)) / 2
    async with network(tmp_path, NAMES) as up:
        await restarted(up, "ann", Policy(epsilon_per_run=limit))
        outcome = await up.run(planned, made_up(planned))  # of one record a round
    status = outcome.statuses[0]
    assert outcome.state == "stopped"
    assert status.state is LearnerState.BUDGET_EXHAUSTED and status.rounds_committed == 3
    assert f"above what this learner's owner allows in one, {limit:.6g}" in status.detail
    assert status.epsilon_spent == pytest.approx(price(planned, 3)) and status.epsilon_budget == limit


LIMITS: dict[str, tuple[Callable[[float], Policy], str]] = {
    "month": (lambda limit: Policy(epsilon_per_run=None, epsilon_per_month=limit), "spent in 30 days"),
    "all": (lambda limit: Policy(epsilon_per_run=None, epsilon_per_month=None, epsilon=limit), "spent in all runs"),
}


@pytest.mark.parametrize("which", LIMITS)
async def test_limits_hold_over_several_runs_and_starts(tmp_path: Path, which: str) -> None:
    made, text = LIMITS[which]
    spec, spent = spec_of(), []
    async with network(tmp_path, NAMES) as up:
        limit = 2.5 * price(spec)
        outcomes = []
        for _ in range(3):
            await restarted(up, "ann", made(limit))
            outcomes.append(await up.run(spec, made_up(spec)))
            spent.append(outcomes[-1].statuses[0].epsilon_spent)
    assert [each.state for each in outcomes] == ["finished", "finished", "stopped"]
    assert text in outcomes[-1].detail
    assert spent[2] > 0 and sum(spent) <= limit


async def test_the_smaller_of_budget_and_policy_holds(tmp_path: Path) -> None:
    spec = spec_of()
    whole = price(spec)
    async with network(tmp_path, NAMES) as up:
        for budget, policy, allowed in ((0.5 * whole, 0.8 * whole, 0.5), (9 * whole, 0.7 * whole, 0.7)):
            up.budget = budget
            await restarted(up, "ann", Policy(epsilon_per_run=None, epsilon_per_month=None, epsilon=policy))
            assert up.learners["ann"].config.own_budget == pytest.approx(allowed * whole)


# ---- what is a month -------------------------------------------------------------------------------------------------


def ago(days: float) -> type[datetime]:
    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Earlier:
            return super().now(tz) - timedelta(days=days)

    return Earlier


async def test_what_was_spent_before_the_last_30_days_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, files, outcomes = spec_of(), LearnerPaths(tmp_path / "journals", "ann"), []
    policy = Policy(epsilon_per_run=None, epsilon_per_month=1.5 * price(spec))
    async with network(tmp_path, NAMES) as up:
        for days in (30.1, 29.9, 0.0):
            await restarted(up, "ann", policy)
            with monkeypatch.context() as earlier:
                earlier.setattr(ledger, "datetime", ago(days))
                outcomes.append(await up.run(spec, made_up(spec)))
                await until_charged(files)
    old, new, last = outcomes
    assert [each.state for each in (old, new, last)] == ["finished", "finished", "stopped"]
    assert 0 < last.statuses[0].epsilon_spent < 0.51 * price(spec)


# ---- taken up again --------------------------------------------------------------------------------------------------


async def test_a_run_that_is_taken_up_again_is_held_against_the_policy_of_now(tmp_path: Path) -> None:
    """And goes on where it was, once its learner's owner allows it."""
    spec = spec_of(clock={"mode": "paced", "period_s": 0.02, "deadline_s": 100.0}, telemetry={"accuracy": True})
    data = made_up(spec)
    async with network(tmp_path, NAMES) as up:
        run_id = (await up.start(spec, 3)).run_id
        await up.until("ann", LearnerState.RUNNING)
        await restarted(up, "ann", Policy(epsilon_per_run=None))
        first = await up.end(run_id)
        await resume(up, run_id)
        second = await up.end(run_id)
        await restarted(up, "ann", ALLOWING)
        await resume(up, run_id)
        await up.feed(run_id, spec, data)
        last = await up.end(run_id)
    for each in (first, second):
        assert each.state == coordinator_pb2.RUN_STATE_FAILED
        assert "telemetry [], the spec asks for [accuracy]" in each.detail
    assert last.state == coordinator_pb2.RUN_STATE_FINISHED


async def test_code_of_a_run_before_is_not_imported_once_its_owner_forbids_it(tmp_path: Path) -> None:
    """A learner that is started again looks at the run that it has left open, to say which plan it follows."""
    spec = asking({"algorithm": {"name": GOSSIP}})
    async with network(tmp_path, NAMES) as up:
        await up.start(spec, 3)
        await up.until("ann", LearnerState.RUNNING)
        await restarted(up, "ann", ALLOWING)
        known = up.learners["ann"]._read_open_run()
        await restarted(up, "ann", ALLOWING.model_copy(update={"imports": ()}))
        forbidden = up.learners["ann"]._read_open_run()
    assert known["run_id"] == forbidden["run_id"]
    assert "plan_hash" in known and "plan_hash" not in forbidden


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_run_that_others_leave_is_held_against_the_policy_again(tmp_path: Path, allowed: bool) -> None:
    names = [*NAMES, "cleo"]
    clock = {"mode": "paced", "period_s": 0.01, "deadline_s": 100.0}
    spec = small_spec(100, names, topology={"graph": "complete"}, clock=clock)
    async with network(tmp_path, names) as up:
        await restarted(up, "ann", Policy.from_spec(spec))
        ann, running = up.learners["ann"], asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 3)
        if not allowed:
            ann.config = replace(ann.config, policy=Policy(max_rounds=99))
        await leave(up, ann.status.run_id, "cleo")
        outcome = await running
    assert outcome.state == ("finished" if allowed else "failed")
    refused = "ann failed: the owner's policy (the default one) allows max_rounds 99, the spec asks for 100; `max_rounds: 100`"
    assert outcome.detail.startswith("" if allowed else refused)
