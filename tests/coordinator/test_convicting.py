"""Who leaves a run for what others say of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_coordinator.round_clock import find_evictions

RING = [{1, 3}, {0, 2}, {1, 3}, {0, 2}]
STAR = [{1, 2, 3, 4}, {0}, {0}, {0}, {0}]
COMPLETE = [{0, 1, 2, 3} - {i} for i in range(4)]


@pytest.mark.parametrize(
    ("neighbours", "accusations", "leave"),
    [
        (RING, [], set()),
        (RING, [(0, 1)], set()),
        (RING, [(0, 1), (1, 0)], set()),
        (RING, [(0, 1), (2, 1)], {1}),
        (RING, [(0, 1), (0, 3)], set()),  # to accuse is held against nobody
        (RING, [(0, 1), (2, 1), (1, 0), (1, 2)], {1}),
        (RING, [(0, 1), (2, 1), (0, 3), (2, 3)], {1, 3}),
        (RING, [(0, 2), (1, 2), (3, 2)], {2}),  # 0 is no neighbour of 2: its voice is none, and the others are enough
        (RING, [(0, 2), (1, 2)], set()),
        (STAR, [(0, 1)], set()),  # its only neighbour
        (STAR, [(1, 0), (2, 0)], set()),  # half of them
        (STAR, [(1, 0), (2, 0), (3, 0)], {0}),
        (COMPLETE, [(0, 3), (1, 3)], {3}),
        (COMPLETE, [(0, 3), (0, 3)], set()),
    ],
)
def test_most_of_the_neighbours_and_two_at_least(neighbours: Any, accusations: Any, leave: set[int]) -> None:
    assert find_evictions(accusations, neighbours) == leave


@st.composite
def _graphs(draw: st.DrawFn) -> list[set[int]]:
    n = draw(st.integers(2, 8))
    edges = draw(st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
    return [{j for j in range(n) if j != i and ((i, j) in edges or (j, i) in edges)} for i in range(n)]


@given(_graphs(), st.data())
def test_liars_move_nobody_of_whom_they_are_no_majority(neighbours: list[set[int]], data: st.DataObject) -> None:
    """Whatever they say, and whoever else is accused rightly."""
    everybody = range(len(neighbours))
    liars = data.draw(st.sets(st.sampled_from(everybody)))
    accusations = (
        data.draw(st.lists(st.tuples(st.sampled_from(sorted(liars)), st.sampled_from(everybody)))) if liars else []
    )
    for i in find_evictions(accusations, neighbours):
        assert len(neighbours[i] & liars) > len(neighbours[i]) / 2
        assert len(neighbours[i] & liars) >= 2
