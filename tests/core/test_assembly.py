"""Rounds out of messages: in whatever order they were overheard, each once, and whoever said two things is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.errors import CaptureError
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.transcript import BoundedDict, RoundReassembler
from tests.examples import small_run
from tests.gossip import gossip_spec

TURNS = {
    "sequence": {
        "kind": "periodic",
        "graphs": [{"kind": "edges", "edges": [[0, 1]]}, {"kind": "edges", "edges": [[1, 2]]}],
    }
}
"""Learners 0 and 1 talk in even rounds, 1 and 2 in odd ones."""


def take(assembly: RoundReassembler[str], t: int, i: int, what: str = "") -> None:
    assembly.add_message(i, i, t, f"{t} {i} {what}".encode(), f"{i}{what}")


def ready(assembly: RoundReassembler[str]) -> Iterator[tuple[int, list[str]]]:
    return ((t, sorted(said.values())) for t, said in assembly.pop_complete_rounds())


def test_rounds_come_in_order_whatever_the_order_of_arrival() -> None:
    assembly, found = RoundReassembler[str](3, 4, small_run(4).network), []
    for t, i in [(1, 0), (0, 2), (0, 0), (1, 1), (0, 2), (0, 1), (2, 0), (1, 2)]:
        take(assembly, t, i)
        found += list(ready(assembly))
    assert found == [(0, ["0", "1", "2"]), (1, ["0", "1", "2"])]
    assert (assembly.next_round, assembly.missing_senders, assembly.equivocations) == (2, [1, 2], [])


@given(st.permutations([(t, i, again) for t in range(4) for i in range(3) for again in range(2)]), st.integers(1, 24))
def test_every_order_gives_the_same_rounds(arrivals: list[tuple[int, int, int]], at_a_time: int) -> None:
    """Every message is overheard twice, for two neighbours."""
    assembly, found = RoundReassembler[str](3, 4), []
    for k, (t, i, _) in enumerate(arrivals, 1):
        take(assembly, t, i)
        if k % at_a_time == 0:
            found += list(ready(assembly))
    found += list(ready(assembly))
    assert found == [(t, ["0", "1", "2"]) for t in range(4)]
    assert assembly.equivocations == []


def test_only_those_are_waited_for_whom_somebody_hears() -> None:
    run = build_run(gossip_spec(TURNS, 4, 3), 3)
    known, unknown = RoundReassembler[str](3, 4, run.network), RoundReassembler[str](3, 4)
    for assembly in (known, unknown):
        for t, i in [(0, 0), (0, 1), (1, 1), (1, 2)]:
            take(assembly, t, i)
    assert list(ready(known)) == [(0, ["0", "1"]), (1, ["1", "2"])]
    assert list(ready(unknown)) == []
    assert unknown.missing_senders == [2]


@pytest.mark.parametrize("late", [False, True])
def test_whoever_says_two_things_is_known_and_the_first_stands(late: bool) -> None:
    assembly = RoundReassembler[str](2, 4)
    for i in range(2):
        take(assembly, 0, i)
    found = list(ready(assembly)) if late else []
    take(assembly, 0, 1, "other")
    assert [*found, *ready(assembly)] == [(0, ["0", "1"])]
    assert assembly.equivocations == [(0, 1)]


@pytest.mark.parametrize(("sender", "claimed", "t"), [(0, 1, 0), (2, 2, 0), (0, 0, 4), (0, 0, 2**64 - 1)])
def test_what_is_none_of_this_run_is_refused(sender: int, claimed: int, t: int) -> None:
    limit = "in one of 4 rounds" if t >= 4 else "and not as another"
    with pytest.raises(CaptureError, match=f"2 learners .* {limit}, got learner {claimed} in round {t} from learner"):
        RoundReassembler[str](2, 4).add_message(sender, claimed, t, b"", "")


def test_memory_may_be_bounded() -> None:
    """What is forgotten is neither said again, nor noticed."""
    assembly = RoundReassembler[str](1, 100, max_remembered=10)
    for t in range(100):
        take(assembly, t, 0)
        assert list(ready(assembly)) == [(t, ["0"])]
    assert len(assembly._versions) == 10 and not assembly._pending
    take(assembly, 3, 0, "other")
    take(assembly, 99, 0, "other")
    assert (list(ready(assembly)), assembly.equivocations) == ([], [(99, 0)])


def test_the_version_heard_first_stands_until_it_is_forgotten() -> None:
    versions = BoundedDict[str, bytes](2)
    assert [versions.setdefault("a", each) for each in (b"1", b"2", b"1")] == [b"1"] * 3
    versions.setdefault("b", b"1")
    versions.setdefault("c", b"1")
    assert versions.setdefault("a", b"2") == b"2"


def test_what_was_set_longest_ago_is_forgotten() -> None:
    recent = BoundedDict[int, int](2)
    for key in (1, 2, 1, 3):
        recent[key] = key
    assert list(recent) == [1, 3]
