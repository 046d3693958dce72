"""Who holds up a run: those at the end of the waits, never one that only waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_coordinator.round_clock import LearnerProgress, describe_stragglers, find_stragglers
from sottovoce_rpc.learner_status import WaitCause, WaitReport


def waits(name: str, t: int, *neighbours: int, cause: WaitCause = WaitCause.NEIGHBOUR) -> LearnerProgress:
    return LearnerProgress(name, t, wait=WaitReport(t, cause, neighbours))


ANN, BEN = waits("ann", 7, 1), waits("ben", 7, 2)


@pytest.mark.parametrize(
    ("cleo", "words"),
    [
        (LearnerProgress("cleo", 7, is_disconnected=True), "cleo is gone since round 7"),
        (LearnerProgress("cleo", 6), "cleo is silent in round 6"),
        (waits("cleo", 7, cause=WaitCause.RECORDS), "cleo has no records for round 7"),
        (waits("cleo", 6, 1), "no messages pass between ben and cleo in round 6"),
        (replace(waits("cleo", 7, cause=WaitCause.LEASE), is_starved=True), "cleo has no records for round 7"),
        (waits("cleo", 7, cause=WaitCause.LEASE), "cleo waited for a lease of the coordinator in round 7"),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_the_end_of_a_chain_of_waits_is_blamed(cleo: LearnerProgress, words: str) -> None:
    """Ann waits for ben, who waits for cleo."""
    standings = [ANN, replace(BEN, round=cleo.round), cleo]
    assert describe_stragglers(standings, find_stragglers(standings, 0)) == words


def test_those_who_are_gone_are_blamed_before_those_who_are_slow() -> None:
    standings = [
        waits("ann", 9, 1, 2, 3),
        LearnerProgress("ben", 3),
        LearnerProgress("cleo", 9, is_disconnected=True),
        LearnerProgress("dan", 8, is_disconnected=True),
    ]
    assert describe_stragglers(standings, find_stragglers(standings, 0)) == "cleo and dan are gone since round 9"


def test_a_circle_is_named_whole_and_without_those_who_wait_for_it() -> None:
    """Ben has heard cleo's message of round 4, and cleo not his: they wait in different rounds."""
    standings = [waits("ann", 6, 1, 3), waits("ben", 5, 2), waits("cleo", 4, 1), waits("dan", 5, 2)]
    for who in range(4):
        assert find_stragglers(standings, who) == (1, 2)
    assert describe_stragglers(standings, (1, 2)) == "no messages pass between ben and cleo in round 4"


def test_who_waits_for_a_grant_waits_for_the_slowest() -> None:
    standings = [
        waits("ann", 20, cause=WaitCause.LEASE),
        waits("ben", 12, 2),
        LearnerProgress("cleo", 12),
        LearnerProgress("dan", 20),
    ]
    assert find_stragglers(standings, 0) == (2,)


def test_a_learner_that_waits_for_nobody_is_blamed_itself() -> None:
    standings = [LearnerProgress("ann", 3), BEN, LearnerProgress("cleo", 7, is_disconnected=True)]
    assert find_stragglers(standings, 0) == (0,)


@given(st.data())
def test_nobody_that_only_waits_is_blamed_as_long_as_somebody_does_not(data: st.DataObject) -> None:
    """Any graph of waits: whoever is blamed is gone, waits for no learner, or is in a circle out of which no wait leads."""
    n = data.draw(st.integers(2, 6))
    standings = []
    for i in range(n):
        others = st.sets(st.sampled_from([j for j in range(n) if j != i]), min_size=1).map(tuple)
        causes = st.sampled_from([WaitCause.NEIGHBOUR, WaitCause.RECORDS])
        told = data.draw(st.none() | st.builds(WaitReport, st.just(0), causes, others))
        standings.append(LearnerProgress(str(i), data.draw(st.integers(0, 2)), data.draw(st.booleans()), told))

    def follows(i: int) -> set[int]:
        own = standings[i]
        waiting = None if own.is_disconnected else own.wait
        return set(waiting.neighbours) if waiting is not None and waiting.cause is WaitCause.NEIGHBOUR else set()

    reached = {0}
    while (more := reached.union(*(follows(i) for i in reached))) != reached:
        reached = more
    found = find_stragglers(standings, 0)
    assert found and set(found) <= reached
    if any(not follows(i) for i in reached):
        assert not any(follows(i) for i in found)
    assert describe_stragglers(standings, found)
