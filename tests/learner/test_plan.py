"""The plan: a learner follows its own network, and a coordinator that follows another one is found out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_core.network.network import NetworkDigests
from sottovoce_core.network.topology import Topology
from sottovoce_core.network.weights import combine_digests
from sottovoce_learner.peers.neighbour_schedule import NeighbourSchedule

TURNS = {
    "sequence": {
        "kind": "periodic",
        "graphs": [
            {"kind": "edges", "edges": [(0, 1), (1, 2)], "directed": True},
            {"kind": "edges", "edges": [(0, 1), (1, 2)], "directed": True},
            {"kind": "edges", "edges": [(2, 0), (2, 1)], "directed": True},
        ],
    },
    "weights": "in_degree",
}
"""Learner 1 hears 0 and tells 2 in rounds 0 and 1, hears 2 in round 2; and so on."""


def plan(topology: dict[str, Any], n: int, index: int) -> NeighbourSchedule:
    network = Topology.model_validate(topology).build_network(n, 100)
    return NeighbourSchedule(network, index, NetworkDigests(network, 100))


def test_parts_follow_the_network() -> None:
    mine = plan(TURNS, 3, 1)
    parts = [mine.get_round_part(t) for t in (0, 2, 3, 5, 100)]
    assert [(dict(part.in_neighbours), part.out_neighbours, part.own_weight) for part in parts] == [
        ({0: 0.5}, (2,), 0.5),
        ({2: 0.5}, (), 0.5),
        ({0: 0.5}, (2,), 0.5),
        ({2: 0.5}, (), 0.5),
        ({0: 0.5}, (2,), 0.5),
    ]
    assert mine.neighbours == {0, 2}


@pytest.mark.parametrize(
    ("topology", "lockstep"),
    [
        ({"graph": "ring"}, True),
        ({"graph": "star", "weights": "out_degree"}, True),
        (
            {"graph": {"kind": "edges", "edges": [(0, 1), (1, 2), (2, 0)], "directed": True}, "weights": "in_degree"},
            False,
        ),
        (TURNS, False),
    ],
    ids=str,
)
def test_neighbours_that_need_each_other_every_round_go_in_lockstep(topology: dict[str, Any], lockstep: bool) -> None:
    assert plan(topology, 3, 0).is_lockstep == lockstep


def test_a_learner_alone_has_nobody_to_keep_step_with() -> None:
    alone = plan({"graph": "ring"}, 1, 0)
    assert not alone.is_lockstep
    alone.accept_epoch(0, {}, [])
    alone.require_epochs(100)
    assert alone.get_round_part(7).own_weight == 1.0


def test_a_fixed_network_needs_one_epoch_and_keeps_one_part() -> None:
    mine = plan({"graph": "ring"}, 3, 1)
    with pytest.raises(RemoteProtocolError, match="an epoch for round 0 must come first"):
        mine.require_epochs(1)
    mine.accept_epoch(0, {0: 1 / 3, 2: 1 / 3}, [0, 2])
    mine.require_epochs(10**9)
    assert mine.get_round_part(5) is mine.get_round_part(10**8)


def test_a_network_that_changes_needs_an_epoch_wherever_it_does() -> None:
    mine = plan(TURNS, 3, 1)
    mine.require_epochs(0)
    mine.accept_epoch(0, {0: 0.5, 2: 0.0}, [2])
    mine.require_epochs(2)
    with pytest.raises(RemoteProtocolError, match="an epoch for round 2 must come first"):
        mine.require_epochs(3)
    with pytest.raises(RemoteProtocolError, match="an epoch for round 2 must come first"):
        mine.accept_epoch(3, {0: 0.5}, [2])
    mine.accept_epoch(2, {2: 0.5}, [])
    mine.accept_epoch(3, {0: 0.5, 2: 0.0}, [2])
    mine.require_epochs(5)
    assert mine.announced_rounds == 5


def test_an_epoch_that_is_known_is_passed_over() -> None:
    """A learner that was away is told more than it lacks."""
    mine = plan(TURNS, 3, 1)
    mine.accept_epoch(0, {0: 0.5, 2: 0.0}, [2])
    mine.accept_epoch(1, {0: 0.5}, [2])
    mine.accept_epoch(0, {}, [])
    assert mine.announced_rounds == 2


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({0: 0.5}, [2]),  # 2, heard later, is not named
        ({0: 0.4, 2: 0.0}, [2]),
        ({0: math.nan, 2: 0.0}, [2]),
        ({0: 0.5, 2: math.nan}, [2]),
        ({0: 0.5, 2: 0.5}, [2]),
        ({0: 0.5, 2: 0.0}, []),
        ({0: 0.5, 2: 0.0}, [0, 2]),
        ({0: 0.5, 2: 0.0, 3: 0.0}, [2]),
        ({}, []),
    ],
    ids=str,
)
def test_an_epoch_of_another_network_is_refused(weights: dict[int, float], told: list[int]) -> None:
    mine = plan(TURNS, 3, 1)
    with pytest.raises(RemoteProtocolError, match=r"must be|must name"):
        mine.accept_epoch(0, weights, told)
    assert mine.announced_rounds == 0


def test_old_rounds_are_forgotten() -> None:
    mine = plan({"sequence": {"kind": "random", "probability": 0.5}}, 5, 0)
    for t in range(50):
        assert mine.get_in_neighbours(t + 1) is mine.get_round_part(t + 1).in_neighbours
        mine.forget(t)
    assert list(mine._cached_parts) == [50]


def digest(topology: dict[str, Any], n: int, first: int, until: int) -> bytes:
    """As a coordinator of this network says it."""
    network = Topology.model_validate(topology).build_network(n, 100)
    return combine_digests(network.mixing(t).digest for t in range(first, until))


def introduced() -> NeighbourSchedule:
    """Of learner 1, told the first epoch."""
    mine = plan(TURNS, 3, 1)
    mine.accept_epoch(0, {0: 0.5, 2: 0.0}, [2])
    return mine


def test_a_digest_stands_for_the_epochs_of_its_rounds() -> None:
    mine = introduced()
    mine.accept_digest(1, 7, digest(TURNS, 3, 1, 7))
    mine.require_epochs(7)
    mine.require_epochs(8)  # round 7 is as round 6
    with pytest.raises(RemoteProtocolError, match="an epoch for round 8 must come first"):
        mine.require_epochs(9)
    for t in range(6):
        mine.forget(t)
    mine.accept_digest(4, 9, digest(TURNS, 3, 4, 9))  # as after a reconnect: of rounds that are over, too
    mine.require_epochs(9)
    mine.accept_epoch(9, {0: 0.5}, [2])  # and epochs may follow
    assert mine.announced_rounds == 10


@pytest.mark.parametrize(
    ("first", "until", "of"),
    [(1, 7, {**TURNS, "weights": "out_degree"}), (1, 7, {"graph": "ring"}), (1, 6, TURNS), (2, 7, TURNS)],
    ids=["weights", "graphs", "fewer rounds", "other rounds"],
)
def test_a_digest_of_anything_else_is_found_out(first: int, until: int, of: dict[str, Any]) -> None:
    mine = introduced()
    with pytest.raises(
        RemoteProtocolError, match="in rounds 1 to 6 the senders and weights must be those of the run spec"
    ):
        mine.accept_digest(1, 7, digest(of, 3, first, until))
    assert mine.announced_rounds == 1


def test_a_digest_needs_the_rounds_before_it() -> None:
    with pytest.raises(RemoteProtocolError, match="an epoch for round 0 must come first"):
        plan(TURNS, 3, 1).accept_digest(1, 7, digest(TURNS, 3, 1, 7))
    with pytest.raises(RemoteProtocolError, match="an epoch for round 2 must come first"):
        introduced().accept_digest(5, 7, digest(TURNS, 3, 5, 7))
