"""A wait begins with its cause, whatever wakes the waiter."""

from __future__ import annotations

import pytest

from sottovoce_core.spec import ClockSpec
from sottovoce_learner.progress import TimedWait, WaitTracker, _in_words
from sottovoce_rpc.learner_status import WaitCause, WaitReport
from sottovoce_wire.v1 import coordinator_pb2


def begun(t: int, cause: WaitCause, *, alone: bool = False) -> WaitTracker:
    """A learner that waits for a neighbour in round 3, and then for this."""
    waits = WaitTracker(ClockSpec(), list, [])
    waits.begin(3, WaitCause.NEIGHBOUR)
    waits.set_coordinator_away(is_away=alone)
    waits.begin(t, cause)
    return waits


def test_who_is_woken_and_lacks_the_same_has_waited_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", iter((10.0, 20.0)).__next__)
    assert begun(3, WaitCause.NEIGHBOUR).current_wait == TimedWait(3, WaitCause.NEIGHBOUR, False, 10.0)


@pytest.mark.parametrize(
    ("t", "cause", "alone"),
    [(4, WaitCause.NEIGHBOUR, False), (3, WaitCause.RECORDS, False), (3, WaitCause.NEIGHBOUR, True)],
)
def test_another_round_or_cause_is_another_wait(
    monkeypatch: pytest.MonkeyPatch, t: int, cause: WaitCause, alone: bool
) -> None:
    monkeypatch.setattr("time.monotonic", iter((10.0, 20.0)).__next__)
    assert begun(t, cause, alone=alone).current_wait == TimedWait(t, cause, alone, 20.0)


@pytest.mark.parametrize(
    ("cause", "alone", "limit"),
    [
        (WaitCause.NEIGHBOUR, False, 5.0),
        (WaitCause.LEASE, False, 7.0),  # a paced clock grants a round a period
        (WaitCause.RECORDS, False, 7.0),
        (WaitCause.RECORDS, True, 7.0),
        (WaitCause.NEIGHBOUR, True, 100.0),  # it may lack a grant that this one has
        (WaitCause.LEASE, True, 100.0),
        (WaitCause.DISK, False, 100.0),
    ],
)
def test_how_long_a_wait_may_last_depends_on_its_cause(cause: WaitCause, alone: bool, limit: float) -> None:
    clock = ClockSpec(mode="paced", period_s=2.0, deadline_s=5.0, patience_s=100.0)
    assert TimedWait(0, cause, alone, 0.0).compute_limit_s(clock) == limit


def test_a_wait_is_told_before_it_is_over() -> None:
    wait, short = TimedWait(0, WaitCause.NEIGHBOUR, False, 10.0), ClockSpec(deadline_s=1.0)
    assert [wait.is_reportable(short, 10.0 + lasted) for lasted in (0.2, 0.3)] == [False, True]
    assert [wait.is_reportable(ClockSpec(), 10.0 + lasted) for lasted in (0.9, 1.1)] == [False, True]


@pytest.mark.parametrize("cause", WaitCause)
def test_what_is_waited_for_crosses_the_wire(cause: WaitCause) -> None:
    told = WaitReport(7, cause, (1, 4))
    report = coordinator_pb2.Report.FromString(coordinator_pb2.Report(wait=told.to_wire()).SerializeToString())
    assert WaitReport.from_wire(report) == told


def test_no_wait_and_one_that_is_unknown_here_are_none() -> None:
    assert WaitReport.from_wire(coordinator_pb2.Report()) is None
    assert WaitReport.from_wire(coordinator_pb2.Report(wait=coordinator_pb2.Wait(round=1))) is None


def test_who_is_waited_for_is_named() -> None:
    names = [f"ward-{i}" for i in range(20)]
    assert _in_words(WaitReport(7, WaitCause.LEASE), names) == "a lease of the coordinator in round 7"
    assert _in_words(WaitReport(7, WaitCause.NEIGHBOUR, (3, 0)), names) == "a neighbour (ward-3, ward-0) in round 7"
    assert _in_words(WaitReport(7, WaitCause.NEIGHBOUR, tuple(range(20))), names).endswith(
        ", ward-9 and 10 more) in round 7"
    )
