"""What the console shows, of what is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from sottovoce_client.runs.monitoring import (
    RunHistory,
    RunObservation,
    _edge_views,
    _learner_views,
    make_run_list_item,
    make_run_view,
    parse_plan,
)
from sottovoce_client.web.service_clients import _watch_views
from sottovoce_core.errors import SpecError
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2
from tests.client.consoles import COURSE, NOON, a_page, a_run, look, plan, status
from tests.examples import small_spec


def test_a_plan_is_what_a_spec_says() -> None:
    clock = {"mode": "paced", "period_s": 0.5}
    made = parse_plan(spec_to_wire(small_spec(7, ["ann", "ben", "eve"], name="trial", clock=clock, capture="mirror")))
    assert (made.name, made.rounds, made.algorithm, made.learners) == ("trial", 7, "ldp-dol", ("ann", "ben", "eve"))
    assert (made.capture, made.clock, made.period_s, made.is_live) == ("mirror", "paced", 0.5, False)
    assert set(made.directed_edges) == {(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)}


def test_a_directed_edge_leads_one_way() -> None:
    one = plan(3, topology=DIRECTED)
    edges = _edge_views(one.directed_edges, look(0.0), None)
    assert {(each.a, each.b) for each in edges if each.is_one_way} == set(one.directed_edges)


DIRECTED = {
    "graph": {"kind": "edges", "edges": [[0, 1], [1, 2], [2, 0]], "directed": True},
    "weights": {"kind": "out_degree"},
}


def test_a_graph_that_only_code_could_tell_is_left_out() -> None:
    document = spec_to_wire(small_spec(7, 3)).replace('"kind": "ring"', '"kind": "somebody.else:Graph"')
    assert "somebody.else" in document
    assert parse_plan(document).directed_edges == ()


def test_a_spec_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="must be JSON"):
        parse_plan("{")


@pytest.mark.parametrize(
    "change", [{"learners": None}, {"rounds": "many"}, {"offline_intervals": [{"who": 1}]}, {"clock": 3}]
)
def test_a_spec_that_says_things_otherwise_is_refused(change: dict[str, object]) -> None:
    document = json.loads(spec_to_wire(small_spec(7, 3)))
    with pytest.raises(SpecError, match="must have a format that this version can read"):
        parse_plan(json.dumps({**document, **change}))


def test_a_state_of_a_newer_coordinator_is_said_to_be_one() -> None:
    assert make_run_list_item(coordinator_pb2.Run(run_id="run-1", state=99)).state == "unknown (newer version)"  # type: ignore[arg-type]


def test_rates_are_of_the_last_seconds() -> None:
    run = a_run()
    assert run.rounds_per_second == pytest.approx(1.0)
    assert run.remaining_s == pytest.approx(980.0)
    assert run.recent_rates == (1.0,) * 20
    assert [each.records_per_second for each in run.learners] == pytest.approx([5.0] * 3)
    first, *_ = run.edges
    assert (first.forward_rate, first.backward_rate, first.bytes_per_second, first.messages) == pytest.approx(
        (1.0, 1.0, 200.0, 40)
    )


def test_slow_rounds_are_looked_at_for_longer() -> None:
    slow = plan(3, clock={"mode": "paced", "period_s": 20.0})
    history = RunHistory()
    for second in range(121):
        history.add(look(float(second), rounds=second // 20))
    assert make_run_view(COURSE, slow, history).rounds_per_second == pytest.approx(0.05)


def test_one_look_knows_no_rate() -> None:
    history = RunHistory()
    history.add(look(5.0))
    run = make_run_view(COURSE, plan(), history)
    assert (run.rounds_per_second, run.remaining_s, run.recent_rates) == (None, None, ())
    assert [each.records_per_second for each in run.learners] == [None] * 3


def test_a_run_that_is_over_went_at_its_mean_rate() -> None:
    over = a_run(course=replace(COURSE, state="finished", ended_at=NOON + 40.0))
    assert (over.rounds_per_second, over.remaining_s) == (0.5, None)


def test_what_the_eavesdropper_counts_goes_before_what_learners_say() -> None:
    ways = plan().directed_edges
    before = look(0.0, channel_traffic=dict.fromkeys(ways, (10, 1000)))
    now = look(2.0, channel_traffic={**dict.fromkeys(ways, (14, 1400)), (0, 1): (20, 9000)})
    (first, *_) = _edge_views(ways, now, before)
    assert (first.forward_rate, first.backward_rate, first.bytes_per_second, first.messages) == (5.0, 2.0, 4200.0, 34)
    again = _edge_views(ways, now, look(0.0))  # it was not asked before: nothing to compare with
    assert {each.forward_rate for each in again} == {0.0}


def test_counts_that_began_anew_are_no_rate() -> None:
    assert {
        each.forward_rate for each in _edge_views(plan().directed_edges, look(5.0, rounds=1), look(0.0, rounds=9))
    } == {0.0}


def test_rows_say_how_learners_stand() -> None:
    statuses = (
        status(0, epsilon_charged=3.7),
        status(1, state=LearnerState.BUDGET_EXHAUSTED, detail="that would be above the budget of 4"),
        status(2, noise_is_not_private=True, violation_count=2, epsilon_owner_budget=3.0, epsilon_other_runs=1.5),
    )
    now = RunObservation(0.0, statuses, disconnected_since=(None, None, NOON))
    before = RunObservation(0.0, (status(0, epsilon_charged=3.65), *statuses[1:]))
    ann, ben, eve = _learner_views(plan(), now, before)
    assert (ann.state, ann.epsilon_limit, ann.warnings) == ("running", 4.0, ("its budget is nearly used up",))
    assert (ben.state, ben.warnings) == ("budget exhausted", ("that would be above the budget of 4",))
    assert (eve.state, eve.disconnected_since, eve.epsilon_limit, eve.epsilon_owner_budget, eve.epsilon_other_runs) == (
        "disconnected",
        NOON,
        1.5,
        3.0,
        1.5,
    )
    assert eve.warnings[0] == "its noise is not private: this run has no privacy guarantee"
    assert eve.warnings[-1] == "protocol violations on its channels: 2"
    lost = replace(plan(), lost_learners=frozenset({"learner-2"}))
    assert _learner_views(lost, now, None)[2].state == "lost"


def test_a_budget_is_nearly_used_up_only_where_more_of_it_is_being_spent() -> None:
    """A price that is paid in the first round leaves nothing to look at, however near it is."""
    looks = [RunObservation(float(t), (status(0, rounds, epsilon_charged=3.998),)) for t, rounds in enumerate((1, 20))]
    for before in (None, RunObservation(0.0, (status(0, 0),)), looks[0]):
        (ann,) = _learner_views(plan(1), looks[1], before)
        assert ann.warnings == ()
    (ann,) = _learner_views(plan(1), RunObservation(2.0, (status(0, 21, epsilon_charged=3.999),)), looks[1])
    assert ann.warnings == ("its budget is nearly used up",)


def test_a_round_is_one_that_all_have_done_who_have_more_to_do() -> None:
    done = status(0, 30, state=LearnerState.STOPPED)
    assert RunObservation(0.0, (done, status(1, 12), status(2, 13))).rounds_done == 12
    assert RunObservation(0.0, (done,)).rounds_done == 30
    assert RunObservation(0.0, ()).rounds_done == 0


WATCH = """
# TYPE sottovoce_watch_log_e_value gauge
sottovoce_watch_log_e_value{learner="",run="wards"} 0.5
sottovoce_watch_log_e_value{learner="north",run="wards"} 2.5
sottovoce_watch_log_threshold{learner="north",run="wards"} 12.0
sottovoce_watch_change_log_e_value{learner="north",run="wards"} -Inf
sottovoce_watch_round{learner="north",run="wards"} 17.0
sottovoce_watch_alarms{learner="north",run="wards"} 1.0
sottovoce_watch_alarms{learner="",run="wards"} 0.0
python_info 1.0
"""


def test_what_a_watch_tells_prometheus() -> None:
    pytest.importorskip("prometheus_client")
    (told,) = _watch_views(WATCH)
    assert (told.run, told.alarms) == ("wards", 1)
    assert told.combined is not None and (told.combined.log_e_value, told.combined.log_threshold) == (0.5, None)
    (north,) = told.learners
    assert (north.name, north.log_e_value, north.log_threshold, north.rounds) == ("north", 2.5, 12.0, 17)
    assert north.change_log_e_value == float("-inf") and north.change_log_threshold is None


def test_a_run_without_an_end_is_a_run() -> None:
    spec = small_spec(None, [f"learner-{i}" for i in range(3)], data={"source": "live", "features": 2})
    planned = parse_plan(spec_to_wire(spec))
    shown = a_run(planned=planned)
    assert (planned.rounds, shown.rounds, shown.remaining_s) == (None, None, None)
    assert shown.rounds_done == 20 and shown.rounds_per_second == pytest.approx(1.0) and len(shown.edges) == 3


@pytest.mark.parametrize(("number", "text"), [(math.inf, "Infinity"), (-math.inf, "-Infinity"), (math.nan, "NaN")])
def test_numbers_that_are_not_finite_reach_a_page_as_text(number: float, text: str) -> None:
    shown = json.loads(a_page(run=replace(a_run(), rounds_per_second=number, recent_rates=(number, 1.5))).to_json())[
        "run"
    ]
    assert (shown["rounds_per_second"], shown["recent_rates"]) == (text, [text, 1.5])
