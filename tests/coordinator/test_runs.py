"""The book of a run: what learners are told, and how reports move and end it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sottovoce.spec import parse_spec
from sottovoce_coordinator.runs import RunBook, missing
from sottovoce_wire.v1 import coordinator_pb2, learner_pb2
from tests.examples import small_run

ADDRESSES = ("a:1", "b:2", "c:3")
RUNNING = learner_pb2.LEARNER_STATE_RUNNING
FINISHED = learner_pb2.LEARNER_STATE_FINISHED


def book(**more: Any) -> RunBook:
    more = {"clock": {"window": 4}, "topology": {"graph": "path"}, **more}
    return RunBook("r-1", small_run(rounds=10, learners=["a", "b", "c"], **more), 3, ADDRESSES)


def status(
    learner: str, state: learner_pb2.LearnerState.ValueType, done: int = 0, ready: int = 0, detail: str = ""
) -> learner_pb2.LearnerStatus:
    return learner_pb2.LearnerStatus(
        learner=learner, run_id="r-1", state=state, round=done, data_rounds=ready, detail=detail
    )


def running(held: RunBook, ready: int = 0) -> list[bool]:
    return [held.report(status(name, RUNNING, ready=ready)) for name in "abc"]


# ---- what learners are told ------------------------------------------------------------------------------------------


def test_an_assignment_says_all_that_a_guarantee_rests_on() -> None:
    held = book()
    told = held.assignment(1, "mirror:9").assignment

    assert (told.run_id, told.index, told.n_features, told.mirror_address) == ("r-1", 1, 3, "mirror:9")
    assert parse_spec(json.loads(told.spec)) == held.run.spec
    assert list(told.own_weights) == [held.run.topology.own_weight(i) for i in range(3)]


def test_an_epoch_names_the_neighbours_and_relays_in_their_place() -> None:
    held = book()
    weight = held.run.topology.neighbours(1)
    told = held.epoch(1, {(1, 2): "relay:7", (0, 1): "relay:6"}).epoch

    assert [(n.index, n.name, n.address, n.weight) for n in told.neighbours] == [
        (0, "a", "a:1", weight[0]),
        (2, "c", "relay:7", weight[2]),
    ]
    assert sum(n.weight for n in told.neighbours) == pytest.approx(held.run.topology.own_weight(1))


def test_a_route_leads_from_the_lower_index_to_the_higher() -> None:
    routes = [(route.caller, route.callee, route.target) for route in book().routes()]
    assert routes == [(0, 1, "b:2"), (1, 2, "c:3")]


# ---- the course of a run ---------------------------------------------------------------------------------------------


def test_nothing_is_granted_until_all_are_connected() -> None:
    held = book()
    assert held.grant().grant.until_round == 0
    assert running(held) == [False, False, True]
    assert held.view().state == coordinator_pb2.RUN_STATE_RUNNING
    assert held.grant().grant.until_round == 4


def test_progress_brings_the_next_grant() -> None:
    held = book()
    running(held)
    assert [held.report(status(name, RUNNING, 2)) for name in "abc"] == [False, False, True]
    assert held.grant().grant.until_round == 6


def test_records_that_came_before_all_were_connected_count() -> None:
    """A learner that has nothing new to tell does not report again: what it said while connecting must be enough."""
    held = book(clock={"mode": "data"})
    assert running(held, ready=7) == [False, False, True]
    assert held.grant().grant.until_round == 7


def test_a_run_is_finished_when_everybody_is() -> None:
    held = book()
    running(held)
    for name in "ab":
        held.report(status(name, FINISHED, 10))
        assert not held.ended
    held.report(status("c", FINISHED, 10))
    assert held.ended
    assert (held.view().state, held.view().detail) == (coordinator_pb2.RUN_STATE_FINISHED, "")
    assert [each.round for each in held.view().learners] == [10, 10, 10]


@pytest.mark.parametrize(
    ("state", "final", "text"),
    [
        (learner_pb2.LEARNER_STATE_FAILED, coordinator_pb2.RUN_STATE_FAILED, "b failed: no more disk"),
        (
            learner_pb2.LEARNER_STATE_BUDGET_EXHAUSTED,
            coordinator_pb2.RUN_STATE_STOPPED,
            "b stopped speaking: no more disk",
        ),
    ],
)
def test_one_learner_can_end_a_run_and_is_named(
    state: learner_pb2.LearnerState.ValueType, final: coordinator_pb2.RunState.ValueType, text: str
) -> None:
    held = book()
    running(held)
    held.report(status("b", state, 3, detail="no more disk"))

    assert (held.state, held.detail) == (final, text)
    assert held.stop().stop.reason == text


def test_a_run_ends_once() -> None:
    held = book()
    held.end(coordinator_pb2.RUN_STATE_STOPPED, "first")
    held.end(coordinator_pb2.RUN_STATE_FAILED, "second")
    held.report(status("a", learner_pb2.LEARNER_STATE_FAILED, detail="third"))
    assert (held.state, held.detail) == (coordinator_pb2.RUN_STATE_STOPPED, "first")


def test_an_ended_run_grants_nothing_more() -> None:
    held = book()
    running(held)
    held.end(coordinator_pb2.RUN_STATE_STOPPED, "")
    assert [held.report(status(name, RUNNING, 4)) for name in "abc"] == [False] * 3
    assert held.grant().grant.until_round == 4


def test_who_is_missing_is_named_in_order() -> None:
    assert missing(["a", "b", "c"], {"b": 1, "x": 2}) == ["a", "c"]
