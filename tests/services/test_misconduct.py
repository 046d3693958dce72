"""A neighbour that does what no correct one does: who is told of whom, and what becomes of the run by its policy.

Each service is the product's own; what one of them says on some of its channels, once, is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sottovoce_client.runs.run_client import Outcome
from sottovoce_coordinator.run_state import RunStateMachine
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.errors import ViolationKind
from sottovoce_core.noise import RecordedNoise
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec
from sottovoce_learner.peers.inbox import MessageReceiver
from sottovoce_learner.peers.outbox import NeighbourLink
from sottovoce_learner.session import Session
from sottovoce_rpc.learner_status import VIOLATION_KINDS, Attribution, LearnerState, read_attribution
from sottovoce_wire.v1 import coordinator_pb2
from tests.examples import made_up, small_spec
from tests.services.capturing import encode_round
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, Network, given_up_soon, network
from tests.services.test_roster import COMPLETE, as_amended, noise_for, transcript_of

pytestmark = pytest.mark.misbehaves

NAMES = ["ann", "ben", "cleo", "dora"]
DORA, T, ROUNDS = 3, 10, 40
LONG = {"window": 8, "deadline_s": 1000.0}
"""Longer than a test has patience: nothing of what it waits for comes by a deadline."""
SOON = {"window": 8, "deadline_s": 10.0}


def shorter_once_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once somebody was noticed, learners wait for less than that."""
    notice = MessageReceiver.record_violation

    def first(
        self: MessageReceiver, neighbour: int, rule: ViolationKind, known_by: Attribution, *, has_ended: bool
    ) -> bool:
        monkeypatch.setattr(MessageReceiver, "record_violation", notice)
        given_up_soon(monkeypatch)
        return notice(self, neighbour, rule, known_by, has_ended=has_ended)

    monkeypatch.setattr(MessageReceiver, "record_violation", first)


Wrong = Callable[[NeighbourLink, Callable[[int, bytes], None], int, bytes], None]
"""What is said in place of a round: the link, its usual way to say something, the round, and its true bytes."""


def _told(t: int, sender: int, value: float = 0.0) -> bytes:
    return encode_round(t, sender, Message({"y": np.full(3, value)}))


def _twice(link: NeighbourLink, say: Callable[[int, bytes], None], t: int, payload: bytes) -> None:
    say(t, payload)
    say(t, _told(t, DORA))


# Who does not sign: test_signatures.py.
WRONG: dict[ViolationKind, Wrong] = {
    ViolationKind.ENCODING: lambda link, say, t, payload: say(t, payload + b"\0"),
    ViolationKind.VALUE: lambda link, say, t, payload: say(t, _told(t, DORA, np.nan)),
    ViolationKind.ROUND: lambda link, say, t, payload: say(t, _told(t + 5, DORA)),
    ViolationKind.SENDER: lambda link, say, t, payload: say(t, _told(t, 0)),
    ViolationKind.EQUIVOCATION: _twice,
}


def misbehaving(
    monkeypatch: pytest.MonkeyPatch, wrong: Wrong, to: Collection[int], *, who: str = "dora", t: int = T
) -> None:
    """From its first session on, a learner says something wrong in a round to some of its neighbours."""
    made = Session.__init__
    once: list[str] = []

    def make(session: Session, *args: Any, **more: Any) -> None:
        made(session, *args, **more)
        if session.assignment.name != who or once:
            return
        once.append(who)
        for j in to:
            link = session.links[j]

            def say(at: int, payload: bytes, link: NeighbourLink = link, usual: Any = link.queue) -> None:
                if at == t:
                    wrong(link, usual, at, payload)
                else:
                    usual(at, payload)

            monkeypatch.setattr(link, "queue", say)

    monkeypatch.setattr(Session, "__init__", make)


def spec_of(policy: str = "stop", clock: dict[str, Any] = LONG, **more: Any) -> RunSpec:
    topology = {"topology": COMPLETE, "capture": "mirror", **more}
    return small_spec(ROUNDS, NAMES, on_violation=policy, clock=clock, **topology)


def words(rule: ViolationKind, by: str, whom: str = "dora", t: int = T) -> str:
    return f"{whom} sent {rule.value} when round {t} was due, as {by} reported"


def due(rule: ViolationKind) -> int:
    """Its round was heard when another content of it came."""
    return T + 1 if rule is ViolationKind.EQUIVOCATION else T


def is_as_simulated(outcome: Outcome, spec: RunSpec, noise: Path, lost: int = DORA) -> None:
    """The messages of those who are left, by the spec as it is in the end."""
    run, simulated = as_amended(spec.model_copy(update={"offline_intervals": outcome.offline_intervals}), noise)
    said = transcript_of(outcome, run).fields["y"]
    assert len(said) == ROUNDS
    left = [i for i in range(len(NAMES)) if i != lost]
    np.testing.assert_allclose(said[:, left], simulated.fields["y"][:, left], rtol=1e-9, atol=1e-12)
    heard = ~np.isnan(said[:, lost, 0, 0])
    np.testing.assert_allclose(said[heard, lost], simulated.fields["y"][heard, lost], rtol=1e-9, atol=1e-12)


class Noticed(NamedTuple):
    """Misconduct of a learner, in a round."""

    learner: int
    round: int
    rule: ViolationKind
    known_by: Attribution


async def noticed(up: Network, run_id: str) -> list[tuple[int, Noticed]]:
    """What the coordinator knows of it, and who noticed it."""
    view = await up.end(run_id)
    return [
        (each.reporter, Noticed(each.learner, each.round, VIOLATION_KINDS[each.kind], read_attribution(each)))
        for each in view.violations
    ]


# ---- stop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", WRONG)
async def test_the_run_fails_at_once_and_says_who_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: ViolationKind
) -> None:
    spec, ids = spec_of(), Identities(tmp_path / "ids")
    misbehaving(monkeypatch, WRONG[rule], [0])
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
        known = await noticed(up, outcome.run_id)
        counted = [(await up.status(name)).violation_count for name in NAMES]
    assert (outcome.state, outcome.detail) == ("failed", words(rule, "ann", t=due(rule)))
    assert known == [(0, Noticed(DORA, due(rule), rule, Attribution.CERTIFICATE))]
    assert counted[0] > 0 and counted[1:] == [0, 0, 0]


async def test_it_may_have_been_the_relay_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ids = spec_of(capture="relay"), Identities(tmp_path / "ids")
    misbehaving(monkeypatch, WRONG[ViolationKind.VALUE], [0])
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.detail) == (
        "failed",
        words(ViolationKind.VALUE, "ann", "dora, or the relay in between,"),
    )


async def test_who_is_known_by_name_alone_is_told_of_and_ends_nothing_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the clear a stranger may have said it; the run would go on if the neighbour said the true one then."""
    spec = spec_of(clock=SOON)
    misbehaving(monkeypatch, WRONG[ViolationKind.VALUE], [0])
    shorter_once_noticed(monkeypatch)
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
        known = await noticed(up, outcome.run_id)
    assert outcome.state == "failed"
    assert outcome.detail.startswith("no messages pass between ")
    assert outcome.detail.endswith(
        "; " + words(ViolationKind.VALUE, "ann", "an unauthenticated sender under the name of dora")
    )
    assert known == [(0, Noticed(DORA, T, ViolationKind.VALUE, Attribution.CLAIM))]


async def test_a_run_that_was_stopped_for_it_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends as it was simulated: what was said wrong changed nothing, and what a log has is said again as it was drawn."""
    spec, ids = spec_of(), Identities(tmp_path / "ids")
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    misbehaving(monkeypatch, WRONG[ViolationKind.VALUE], [0, 2])
    async with network(tmp_path, NAMES, noise=noise, identities=ids) as up:
        first = await up.run(spec, made_up(spec))
        outcome = await up.run(spec, made_up(spec), resume=first.run_id)
        known = await noticed(up, outcome.run_id)
    assert (first.state, outcome.state, outcome.detail) == ("failed", "finished", "")
    assert known == []


# ---- drop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", WRONG)
async def test_the_run_goes_on_without_whom_its_neighbours_accuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: ViolationKind
) -> None:
    """Who misbehaves says so to all: each notices it, or is told by the spec that the others did."""
    spec, ids = spec_of("drop"), Identities(tmp_path / "ids")
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    misbehaving(monkeypatch, WRONG[rule], [0, 1, 2])
    async with network(tmp_path, NAMES, noise=noise, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
        known = await noticed(up, outcome.run_id)
        end = await up.end(outcome.run_id)
        told = (await up.status("dora")).state
    assert outcome.state == "finished", outcome.detail
    (absence,) = outcome.offline_intervals or ()
    assert absence.learner == "dora" and set(absence.missed_from_rounds) == set(NAMES[:DORA])
    assert len(known) >= 2 and {each for _, each in known} == {Noticed(DORA, due(rule), rule, Attribution.CERTIFICATE)}
    assert end.learners[DORA].status.detail.startswith("lost: the run goes on without it; dora sent ")
    assert told is LearnerState.STOPPED
    is_as_simulated(outcome, spec, noise)


async def test_one_voice_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of the two may lie: the run fails as where no messages pass between them, and says what was noticed."""
    spec, ids = spec_of("drop", SOON), Identities(tmp_path / "ids")
    misbehaving(monkeypatch, WRONG[ViolationKind.VALUE], [0])
    shorter_once_noticed(monkeypatch)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "failed" and not outcome.offline_intervals
    assert outcome.detail.startswith("no messages pass between ")
    assert outcome.detail.endswith("; " + words(ViolationKind.VALUE, "ann"))


def accusing(monkeypatch: pytest.MonkeyPatch, who: str, whom: Collection[int], t: int) -> None:
    """A learner says of others that they misbehave, which they do not."""
    say = Session._send

    async def lies(self: Session, at: int) -> None:
        await say(self, at)
        if self.assignment.name == who and at == t:
            for j in whom:
                self.receiver.record_violation(
                    j, ViolationKind.VALUE, Attribution.CERTIFICATE, has_ended=self.lifecycle.has_ended
                )
                self.request_report()

    monkeypatch.setattr(Session, "_send", lies)


async def test_who_accuses_falsely_moves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it accuses everybody: it is written down who said so."""
    spec, ids = spec_of("drop"), Identities(tmp_path / "ids")
    noise, said = noise_for(build_run(spec, 3), tmp_path)
    accusing(monkeypatch, "dora", [0, 1, 2], T)
    async with network(tmp_path, NAMES, noise=noise, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
        known = await noticed(up, outcome.run_id)
    assert (outcome.state, outcome.detail, outcome.offline_intervals) == ("finished", "", ())
    assert {(by, each.learner) for by, each in known} == {(DORA, 0), (DORA, 1), (DORA, 2)}
    run = build_run(spec, 3)
    np.testing.assert_allclose(transcript_of(outcome, run).fields["y"], said.fields["y"], rtol=1e-9, atol=1e-12)


async def test_a_false_accusation_stops_a_run_as_silence_does_and_names_who_said_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, ids = spec_of("stop"), Identities(tmp_path / "ids")
    accusing(monkeypatch, "dora", [0], T)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "failed"
    assert outcome.detail.startswith(f"ann sent {ViolationKind.VALUE.value} when round ")
    assert outcome.detail.endswith(", as dora reported")


async def test_who_misbehaves_saves_itself_by_no_accusation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ids = spec_of("drop"), Identities(tmp_path / "ids")
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    misbehaving(monkeypatch, WRONG[ViolationKind.VALUE], [0, 1, 2])
    accusing(monkeypatch, "dora", [0, 1, 2], T - 2)
    async with network(tmp_path, NAMES, noise=noise, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished", outcome.detail
    (absence,) = outcome.offline_intervals or ()
    assert absence.learner == "dora"
    is_as_simulated(outcome, spec, noise)


# ---- clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "same"), [("clip", True), ("stop", False)])
async def test_what_is_clipped_is_clipped_alike_in_the_service_after_a_death_and_in_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, same: bool
) -> None:
    """Dora says a huge number to all, once; ann is started again after that. What is said then follows by a run that clips."""
    clock = {"mode": "paced", "period_s": 0.02, "window": 8, "deadline_s": 100.0}
    spec = spec_of(policy, clock, capture="relay")
    noise, honest = noise_for(build_run(spec, 3), tmp_path)
    misbehaving(monkeypatch, lambda link, say, t, payload: say(t, _told(t, DORA, 1e99)), [0, 1, 2])
    async with network(tmp_path, NAMES, noise=noise) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, T + 2)
        await up.leave("ann")
        await up.until_gone("ann")
        await up.join("ann", noise)
        outcome = await running
    assert (outcome.state, outcome.detail) == ("finished", "")
    clips = build_run(spec.model_copy(update={"on_violation": "clip"}), 3)
    said = transcript_of(outcome, clips)
    assert said.fields["y"][T, DORA].max() == 1e99
    with np.load(noise) as drawn:
        drawn_y = drawn["y"]
    differ = 0.0
    for i in range(DORA):
        machine, own = Replay(clips, i), made_up(spec).learners[i]
        for t in range(ROUNDS):
            expected = machine.emit(RecordedNoise({"y": drawn_y[:, i : i + 1]}))["y"]
            differ = max(differ, float(np.abs(expected[0] - said.fields["y"][t, i]).max()))
            machine.step(said.messages(t, i, machine.required_senders), own.batch(t))
    assert (differ < 1e-9) == same
    assert not np.allclose(said.fields["y"][T + 1, 0], honest.fields["y"][T + 1, 0])  # and it is no small matter


async def test_what_cannot_be_clipped_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ids = spec_of("clip"), Identities(tmp_path / "ids")
    misbehaving(monkeypatch, WRONG[ViolationKind.VALUE], [0])
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert (outcome.state, outcome.detail) == ("failed", words(ViolationKind.VALUE, "ann"))


# ---- a coordinator that dies in between ------------------------------------------------------------------------------


async def until_noticed(up: Network, *names: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if all(up.learners[name].require_session().receiver.violations for name in names):
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("policy", ["stop", "drop"])
async def test_a_coordinator_that_is_started_again_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """It dies before it does anything about it."""
    spec, ids = spec_of(policy), Identities(tmp_path / "ids")
    noise, _ = noise_for(build_run(spec, 3), tmp_path)
    misbehaving(monkeypatch, WRONG[ViolationKind.VALUE], [0, 1, 2])
    async with network(tmp_path, NAMES, noise=noise, identities=ids, durable=True) as up:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunStateMachine, "_enforce", lambda book: None)
            running = asyncio.ensure_future(up.run(spec, made_up(spec)))
            for name in NAMES[:DORA]:
                await up.until(name, LearnerState.RUNNING)
            await until_noticed(up, *NAMES[:DORA])
        await up.restart_coordinator()
        outcome = await running
    if policy == "stop":
        told = [words(ViolationKind.VALUE, name) for name in NAMES[:DORA]]
        assert outcome.state == "failed" and outcome.detail in told
        return
    assert outcome.state == "finished", outcome.detail
    (absence,) = outcome.offline_intervals or ()
    assert absence.learner == "dora"
    is_as_simulated(outcome, spec, noise)


# ---- what a coordinator takes from a learner -------------------------------------------------------------------------


async def test_what_a_learner_says_of_who_is_no_neighbour_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a ring, cleo is none of ann's: so is who is not in the run, and a rule that nobody knows."""
    spec = spec_of(topology={"graph": "ring"})
    extra = [
        coordinator_pb2.Violation(learner=2, round=1, kind=2, attribution=2),  # type: ignore[arg-type]
        coordinator_pb2.Violation(learner=2**32 - 1, round=2**63, kind=1, attribution=2),  # type: ignore[arg-type]
        coordinator_pb2.Violation(learner=1, round=1, kind=99, attribution=2),  # type: ignore[arg-type]
        coordinator_pb2.Violation(learner=1, round=2**64 - 1, kind=1, attribution=99),  # type: ignore[arg-type]
    ]
    lies = tuple(extra)
    monkeypatch.setattr(MessageReceiver, "violations", property(lambda self: lies if self._role.name == "ann" else ()))
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
        known = await noticed(up, outcome.run_id)
    assert (outcome.state, outcome.detail) == ("finished", "")
    assert known == [
        (0, Noticed(1, ROUNDS, ViolationKind.ENCODING, Attribution.CLAIM))
    ]  # how it knows it is unknown: the least that counts
