"""The book of a run: what learners are told, and how reports move and end it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sottovoce_coordinator.run_registry import ManagedRun
from sottovoce_coordinator.run_state import CaptureBinding, RunState, RunStateMachine
from sottovoce_core.errors import ViolationKind
from sottovoce_core.network.graphs import _Edges
from sottovoce_core.network.weights import combine_digests
from sottovoce_core.runs.run import build_run
from sottovoce_rpc.learner_status import (
    VIOLATION_KINDS,
    Attribution,
    LearnerState,
    LearnerStatus,
    WaitCause,
    WaitReport,
)
from sottovoce_rpc.specs import spec_from_wire
from sottovoce_wire.v1.coordinator_pb2 import Assignment, Neighbour, RoundLease, TopologyEpoch, Violation
from tests.examples import small_run
from tests.gossip import gossip_spec

ADDRESSES = ("a:1", "b:2", "c:3")
RUNNING, FINISHED = LearnerState.RUNNING, LearnerState.FINISHED


def book(**more: Any) -> RunStateMachine:
    more = {"clock": {"window": 4}, "topology": {"graph": "path"}, **more}
    return RunStateMachine("r-1", small_run(rounds=10, learners=["a", "b", "c"], **more), 3, ADDRESSES)


def status(learner: str, state: LearnerState, done: int = 0, ready: int = 0, detail: str = "") -> LearnerStatus:
    return LearnerStatus(learner, "r-1", state, detail, rounds_done=done, rounds_with_data=ready)


def running(held: RunStateMachine, ready: int = 0) -> list[bool]:
    return [held.handle_report(status(name, RUNNING, ready=ready)) for name in "abc"]


def test_who_cannot_go_on_has_said_what_it_had_said() -> None:
    """It knows nothing of its run any more, and the round in which the run failed is not 0."""
    held = book()
    running(held, ready=9)
    for name in "abc":
        held.handle_report(
            LearnerStatus(
                name, "r-1", RUNNING, rounds_done=4, rounds_committed=5, rounds_with_data=9, epsilon_spent=2.0
            )
        )
    held.handle_report(LearnerStatus("b", "r-1", LearnerState.FAILED, "its state folder is a copy"))
    assert (held.state, held.detail) == (RunState.FAILED, "b failed: its state folder is a copy")
    assert [(each.rounds_done, each.rounds_committed, each.epsilon_spent) for each in held.statuses] == [
        (4, 5, 2.0)
    ] * 3


# ---- what learners are told ------------------------------------------------------------------------------------------


def test_an_assignment_says_all_that_a_guarantee_rests_on() -> None:
    """The spec as it is, but for its graph: a list of edges."""
    held = book()
    held.capture_binding = CaptureBinding(mirror_address="mirror:9")
    told = held.build_assignment(1)
    spec = spec_from_wire(told.spec, imports=False)

    assert (told.index, told.n_features, told.mirror_address) == (1, 3, "mirror:9")
    assert spec.topology.graph == _Edges(kind="edges", edges=((0, 1), (1, 2)))
    assert spec.model_copy(update={"topology": held.run.spec.topology}) == held.run.spec


def test_an_epoch_names_the_neighbours_and_relays_in_their_place() -> None:
    held = book()
    held.capture_binding = CaptureBinding(relay_addresses={(1, 2): "relay:7", (0, 1): "relay:6"})
    weight = held.run.network.mixing(0).in_neighbour_weights(1)
    assignment, epoch, grant = held.build_resume_commands(1)

    assert isinstance(assignment, Assignment)
    told = (
        Neighbour(index=0, name="a", address="a:1", weight=weight[0], is_recipient=True),
        Neighbour(index=2, name="c", address="relay:7", weight=weight[2], is_recipient=True, relayed=True),
    )
    assert epoch == TopologyEpoch(neighbours=told)
    assert grant == RoundLease()


def test_behind_a_wiretap_is_the_neighbour_itself() -> None:
    held = book(capture="wiretap")
    held.capture_binding = CaptureBinding(relay_addresses={(1, 2): "tap:7", (0, 1): "tap:6"})
    _, epoch, _ = held.build_resume_commands(1)
    assert isinstance(epoch, TopologyEpoch)
    assert [(each.address, each.relayed) for each in epoch.neighbours] == [("a:1", False), ("tap:7", False)]


def test_of_a_fixed_topology_there_is_nothing_to_compare() -> None:
    held = book()
    running(held)
    assert held.build_next_lease() == RoundLease(until_round=4)


DIRECTED = {"kind": "edges", "edges": [(0, 1), (1, 2)], "directed": True}
BACK = {"kind": "edges", "edges": [(2, 0)], "directed": True}


def changing() -> RunStateMachine:
    """0 tells 1 and 1 tells 2 in rounds 0, 1, 3, 4, ...; 2 tells 0 in rounds 2, 5, ..."""
    sequence = {"kind": "periodic", "graphs": [DIRECTED, DIRECTED, BACK]}
    topology = {"sequence": sequence, "weights": "in_degree"}
    return RunStateMachine(
        "r-1", build_run(gossip_spec(topology, 10, ["a", "b", "c"], clock={"window": 4}), 3), 3, ADDRESSES
    )


def test_the_epoch_of_a_changing_topology_names_all_whom_a_learner_ever_talks_to() -> None:
    """Weights by index, and who is told in the first round."""
    held, found = changing(), []
    for i in range(3):
        _, epoch, _ = held.build_resume_commands(i)
        assert isinstance(epoch, TopologyEpoch) and epoch.first_round == 0
        told = [each.index for each in epoch.neighbours if each.is_recipient]
        found.append(({each.index: each.weight for each in epoch.neighbours}, told))
    assert found == [({1: 0.0, 2: 0.0}, [1]), ({0: 0.5, 2: 0.0}, [2]), ({0: 0.0, 1: 0.5}, [])]


def test_grants_of_a_changing_topology_hold_a_digest_of_its_rounds() -> None:
    """Who was away may lack the last round that it has done: the digest of its briefing begins there."""
    held = changing()
    running(held)
    network = held.run.network

    def granted(since: int, until: int) -> RoundLease:
        known = combine_digests(network.mixing(t).digest for t in range(since, until))
        return RoundLease(until_round=until, from_round=since, network_hash=known)

    assert held.build_next_lease() == granted(1, 4)
    for name in "abc":
        held.handle_report(status(name, RUNNING, 3))
    assert held.build_next_lease() == granted(4, 7)
    assert held.build_resume_commands(0)[-1] == granted(2, 7)


def test_routes_of_a_changing_topology_are_those_of_all_rounds() -> None:
    held = changing()
    assert [(i, j) for i, j, _ in held.list_routes()] == [(0, 1), (0, 2), (1, 2)]


def test_a_route_leads_from_the_lower_index_to_the_higher() -> None:
    assert book().list_routes() == [(0, 1, "b:2"), (1, 2, "c:3")]


# ---- the course of a run ---------------------------------------------------------------------------------------------


def test_nothing_is_granted_until_all_are_connected() -> None:
    held = book()
    assert held.clock.leased_until == 0
    assert running(held) == [False, False, True]
    assert held.state is RunState.RUNNING
    assert held.clock.leased_until == 4


def test_progress_brings_the_next_grant() -> None:
    held = book()
    running(held)
    assert [held.handle_report(status(name, RUNNING, 2)) for name in "abc"] == [False, False, True]
    assert held.clock.leased_until == 6


def test_records_that_came_before_all_were_connected_count() -> None:
    """A learner that has nothing new to tell does not report again: what it said while connecting must be enough."""
    held = book(clock={"mode": "data"})
    assert running(held, ready=7) == [False, False, True]
    assert held.clock.leased_until == 7


def test_a_run_is_finished_when_everybody_is() -> None:
    held = book()
    running(held)
    for name in "ab":
        held.handle_report(status(name, FINISHED, 10))
        assert not held.has_ended
    held.handle_report(status("c", FINISHED, 10))
    assert held.has_ended
    assert (held.state, held.detail) == (RunState.FINISHED, "")
    assert [each.rounds_done for each in held.statuses] == [10, 10, 10]


@pytest.mark.parametrize(
    ("state", "final", "text"),
    [
        (LearnerState.FAILED, RunState.FAILED, "b failed: no more disk"),
        (
            LearnerState.BUDGET_EXHAUSTED,
            RunState.STOPPED,
            "b stopped sending: no more disk",
        ),
    ],
)
def test_one_learner_can_end_a_run_and_is_named(state: LearnerState, final: RunState, text: str) -> None:
    held = book()
    running(held)
    held.handle_report(status("b", state, 3, detail="no more disk"))

    assert (held.state, held.detail) == (final, text)
    assert held.build_stop().reason == text


def test_a_run_ends_once() -> None:
    held = book()
    held.end(RunState.STOPPED, "first")
    held.end(RunState.FAILED, "second")
    held.handle_report(status("a", LearnerState.FAILED, detail="third"))
    assert (held.state, held.detail) == (RunState.STOPPED, "first")


def test_an_ended_run_grants_nothing_more() -> None:
    held = book()
    running(held)
    held.end(RunState.STOPPED, "")
    assert [held.handle_report(status(name, RUNNING, 4)) for name in "abc"] == [False] * 3
    assert held.clock.leased_until == 4


# ---- who is gone -----------------------------------------------------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_run_outlives_a_learner_that_comes_back_before_its_deadline() -> None:
    held = book()
    running(held)
    held.mark_disconnected(1, NOW)
    held.mark_connected(1)
    held.handle_deadline(1, NOW)
    assert not held.has_ended and held.disconnected_since == {}
    held.mark_disconnected(1, NOW + timedelta(seconds=1))
    held.handle_deadline(1, NOW)  # the deadline of the first absence
    assert not held.has_ended


def test_a_learner_that_does_not_come_back_fails_its_run_and_is_named() -> None:
    held = book()
    running(held)
    held.handle_report(status("b", RUNNING, 3))
    held.mark_disconnected(1, NOW)
    held.handle_deadline(1, NOW)
    assert (held.state, held.detail) == (RunState.FAILED, "b is gone since round 3, and did not come back within 60 s")


def test_a_learner_that_has_finished_is_not_missed() -> None:
    held = book()
    running(held)
    held.handle_report(status("b", FINISHED, 10))
    held.mark_disconnected(1, NOW)
    held.handle_deadline(1, NOW)
    assert not held.has_ended


def test_a_learner_that_gave_up_waiting_is_not_blamed_for_it() -> None:
    held = book()
    running(held)
    held.mark_disconnected(2, NOW)
    held.handle_report(status("b", RUNNING, 3), WaitReport(3, WaitCause.NEIGHBOUR, (2,)))
    failed = status("a", LearnerState.FAILED, 3, detail="waited 60 s for a neighbour (b) in round 3")
    held.handle_report(failed, WaitReport(3, WaitCause.NEIGHBOUR, (1,)))
    assert held.detail == "c is gone since round 0: a waited 60 s for a neighbour (b) in round 3"


def test_a_clock_that_waits_for_records_blames_who_has_none() -> None:
    held = book(clock={"mode": "data"})
    running(held)
    for name, ready in (("a", 9), ("c", 9)):
        held.handle_report(status(name, RUNNING, ready=ready), WaitReport(0, WaitCause.LEASE))
    held.handle_report(status("b", RUNNING), WaitReport(0, WaitCause.LEASE))
    failed = status("a", LearnerState.FAILED, ready=9, detail="waited 60 s for a lease of the coordinator in round 0")
    held.handle_report(failed, WaitReport(0, WaitCause.LEASE))
    assert held.detail.startswith("b has no records for round 0: a waited 60 s")


# ---- what learners say of their neighbours ---------------------------------------------------------------------------


def triangle(policy: str) -> RunStateMachine:
    return book(misconduct=policy, topology={"graph": "complete"})


def of(learner: int, known_by: Attribution = Attribution.CERTIFICATE, t: int = 3, by: int | None = None) -> Violation:
    (rule,) = (number for number, rule in VIOLATION_KINDS.items() if rule is ViolationKind.ROUND)
    return Violation(learner=learner, round=t, kind=rule, attribution=known_by.value, reporter=by)


def test_a_neighbour_that_breaks_a_rule_ends_the_run_whether_it_runs_yet_or_not() -> None:
    for begun in (False, True):
        held = triangle("stop")
        if begun:
            running(held)
        held.handle_report(status("a", RUNNING), None, [of(1)])
        assert held.state is RunState.FAILED
        assert held.detail == "b sent a round that was not its turn when round 3 was due, as a reported"


def test_what_is_said_before_the_run_begins_counts_when_it_has() -> None:
    held = triangle("drop")
    held.handle_report(status("a", RUNNING), None, [of(1)])
    held.handle_report(status("c", RUNNING), None, [of(1)])
    assert (held.state, held.pending_removals) == (RunState.CONNECTING, set())
    held.handle_report(status("b", RUNNING))
    held.handle_report(status("a", RUNNING), None, [of(1)])
    assert (held.state, held.pending_removals) == (RunState.RUNNING, {1})


@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_who_may_be_a_stranger_is_remembered_and_no_more(policy: str) -> None:
    held = triangle(policy)
    running(held)
    for name in "ac":
        held.handle_report(status(name, RUNNING), None, [of(1, Attribution.CLAIM)])
    assert (held.state, held.pending_removals, len(held.violations)) == (RunState.RUNNING, set(), 2)
    held.handle_report(status("a", LearnerState.FAILED, detail="its disk is gone"))
    assert held.detail.startswith(
        "a failed: its disk is gone; an unauthenticated sender under the name of b sent a round"
    )


def test_the_first_word_on_a_neighbour_stands_and_none_is_on_oneself() -> None:
    held = triangle("drop")
    running(held)
    for t in (3, 4, 10**12):
        held.handle_report(status("a", RUNNING), None, [of(1, t=t), of(0), of(7)])
    assert held.violations == {(0, 1): of(1, by=0)}


def test_a_text_tells_the_first_of_many() -> None:
    held = triangle("drop")
    running(held)
    held.handle_report(status("a", RUNNING), None, [of(1), of(2)])
    held.handle_report(status("b", RUNNING), None, [of(0)])
    held.handle_report(status("c", RUNNING), None, [of(0, Attribution.CLAIM)])
    assert held.append_violations("so").count(" reported") == 3 < len(held.violations)
    assert held.append_violations("so", learner=2).count(" reported") == 1


# ---- who watches -----------------------------------------------------------------------------------------------------


def test_who_watches_is_shown_what_all_have_done_after_ever_more_rounds() -> None:
    held = RunStateMachine("r-1", small_run(rounds=100, learners=["a", "b", "c"]), 3, ADDRESSES)
    course, shown = ManagedRun(held, datetime.now(UTC)), list[int]()
    running(held, ready=100)
    for done in range(1, 101):
        for name in "abc":
            before = course.view_event
            held.handle_report(status(name, RUNNING, done, 100))
            course.notify_if_due()
            if before.is_set():
                assert name == "c" and course.view_event is not before and not course.view_event.is_set()
                shown.append(done)
    assert shown[:10] == [*range(1, 11)] and len(shown) == 32 and shown[-1] > 90
