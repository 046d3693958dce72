"""The round clock: what it may never grant, and that it never leaves willing learners without a grant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_coordinator.round_clock import RoundClock
from sottovoce_core.spec import ClockSpec

sizes = st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 12))
"""Rounds, learners, window."""


def clock(mode: str, rounds: int, learners: int, window: int = 5) -> RoundClock:
    period = {"period_s": 1.0} if mode == "paced" else {}
    return RoundClock(ClockSpec.model_validate({"mode": mode, "window": window, **period}), rounds, learners)


@given(
    st.sampled_from(["free", "paced", "data"]),
    sizes,
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 60)), max_size=30),
)
def test_no_clock_grants_beyond_the_run_or_takes_back(
    mode: str, size: tuple[int, int, int], reports: list[tuple[int, int, int]]
) -> None:
    """Whatever is reported, in any order, and however often it ticks."""
    rounds, learners, window = size
    told = clock(mode, rounds, learners, window)
    granted = [told.start()]
    for learner, done, ready in reports:
        granted += [told.record_progress(learner % learners, done, ready), told.tick()]
        assert granted[-1] == told.leased_until

    assert granted == sorted(granted)
    assert granted[0] >= 0 and granted[-1] <= rounds


@given(sizes, st.data())
def test_a_free_clock_keeps_to_its_window_and_never_stalls(size: tuple[int, int, int], data: st.DataObject) -> None:
    """Learners go on as they please within the grant; nobody gets more than a window ahead of the slowest one."""
    rounds, learners, window = size
    told = clock("free", rounds, learners, window)
    assert told.leased_until == 0
    assert told.start() == min(window, rounds)
    done = [0] * learners
    while min(done) < rounds:
        able = [i for i in range(learners) if done[i] < told.leased_until]
        assert able, f"granted {told.leased_until} and all of {done} used it up"
        i = data.draw(st.sampled_from(able))
        done[i] = data.draw(st.integers(done[i] + 1, told.leased_until))
        told.record_progress(i, done[i], 0)
        assert told.leased_until <= min(rounds, min(done) + window)
        assert told.leased_until == rounds or 2 * (told.leased_until - min(done)) > window - 1


def test_a_free_clock_grants_before_the_window_is_used_up() -> None:
    told = clock("free", 1000, 2, 10)
    told.start()
    assert told.record_progress(0, 5, 0) == 10
    assert told.record_progress(1, 4, 0) == 10
    assert told.record_progress(1, 5, 0) == 15


def test_a_late_report_does_not_turn_back_the_clock() -> None:
    told = clock("free", 100, 1, 10)
    told.start()
    told.record_progress(0, 8, 0)
    assert told.record_progress(0, 3, 0) == 18


@given(sizes, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=30))
def test_a_data_clock_grants_what_everybody_has_records_for_within_its_window(
    size: tuple[int, int, int], reports: list[tuple[int, int]]
) -> None:
    """Nobody gets more than a window ahead of the slowest learner, here of one that has done nothing yet."""
    rounds, learners, window = size
    told, ready = clock("data", rounds, learners, window), [0] * learners
    assert told.start() == 0
    for learner, count in reports:
        ready[learner % learners] = max(ready[learner % learners], count)
        assert told.record_progress(learner % learners, 0, count) == min(min(ready), rounds, window)
        assert told.tick() == told.leased_until


def test_a_data_clock_goes_on_as_learners_do() -> None:
    told = clock("data", 100, 2, 10)
    assert [told.record_progress(i, 0, 30) for i in range(2)] == [0, 10]
    assert [told.record_progress(i, 5, 30) for i in range(2)] == [10, 15]
    assert [told.record_progress(i, 15, 17) for i in range(2)] == [15, 25]
    assert [told.record_progress(i, 25, 30) for i in range(2)] == [25, 30]


@given(sizes, st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 60))), max_size=60))
def test_a_paced_clock_grants_a_round_a_period_at_most_a_window_ahead(
    size: tuple[int, int, int], events: list[tuple[int, int] | None]
) -> None:
    """None is a tick; the others are reports of rounds done within the grant."""
    rounds, learners, window = size
    told, done = clock("paced", rounds, learners, window), [0] * learners
    assert told.start() == 0
    for event in events:
        before = told.leased_until
        if event is None:
            busy = before - min(done) >= window
            assert told.tick() == (before if busy else min(before + 1, rounds))
        else:
            i = event[0] % learners
            done[i] = max(done[i], min(event[1], before))
            assert told.record_progress(i, done[i], event[1]) == before


@pytest.mark.parametrize("mode", ["free", "data"])
def test_other_clocks_do_not_tick(mode: str) -> None:
    told = clock(mode, 10, 1, 3)
    before = told.start()
    assert told.tick() == before
