"""All states of small worlds: what a run promises holds in each, and every mistake is found. `-s` prints how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.catalogue import DROP, HOLD, JOIN, MISTAKES, Mistake
from tests.model.machine import STUCK, Explored, Step, explore
from tests.model.runs import Shape
from tests.model.state import Faults
from tests.model.world import BEGUN, HEARD, Terms, World

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parent.parent.parent

DROP2, THREE = DROP._replace(rounds=2), DROP._replace(learners=3)
QUICK = {
    "nothing fails": World(Shape(2, 3)),
    "a death, three rounds": World(Shape(2, 3), Faults(deaths=1)),
    "a death, small grants": World(Shape(2, 2, window=1), Faults(deaths=1)),
    "a death, and a lost answer": World(Shape(2, 1), Faults(deaths=1, answers=1)),
    "lost streams": World(Shape(2, 2), Faults(streams=2)),
    "the coordinator dies": World(Shape(2, 3, window=2), Faults(coordinator=1)),
    "three learners in a row": World(Shape(3, 1, graph="path")),
    "a copied folder": World(Shape(2, 1), Faults(copies=1)),
    "a copied folder, one learner": World(Shape(1, 1), Faults(deaths=1, answers=1, copies=1), chatty=True),
    "records, and a cut log": World(Shape(1, 2), Faults(deaths=1, answers=1, cuts=1), fed=(0,), chatty=True),
    "late neighbours": World(HOLD._replace(window=2), begun=BEGUN),
    "late neighbours, and a death": World(HOLD, Faults(deaths=1), begun=BEGUN),
    "one leaves": World(DROP2, Faults(leave=1), begun=BEGUN),
    "one leaves, and a death": World(DROP, Faults(leave=1, deaths=1), movable=(1,), begun=BEGUN),
    "one leaves, and the coordinator dies": World(DROP, Faults(leave=1, coordinator=1), begun=BEGUN),
    "one is to leave twice, and the coordinator dies": World(
        DROP, Faults(leave=2, coordinator=1), movable=(1,), begun=BEGUN
    ),
    "one joins, and the coordinator dies": World(JOIN, Faults(join=1, coordinator=1), (1,), begun=BEGUN),
    "one is lost, and lives": World(DROP2, Faults(streams=1, lost=1), begun=BEGUN),
    "one is lost when the coordinator was started again": World(
        DROP2._replace(window=1), Faults(coordinator=1, lost=1), begun=BEGUN
    ),
    "one is lost, and another one dies": World(DROP, Faults(deaths=1, streams=1, lost=1), begun=HEARD),
    "one leaves, and others do not rest": World(DROP, Faults(leave=1, lost=1), movable=(1,), begun=HEARD),
    "one of three is lost": World(THREE, Faults(streams=1, lost=1), movable=(2,), begun=HEARD),
}
LONG = {
    "two deaths": World(Shape(2, 2), Faults(deaths=2)),
    "a death and a lost stream": World(Shape(2, 3), Faults(deaths=1, streams=1)),
    "a death, and the coordinator's": World(Shape(2, 1), Faults(deaths=1, coordinator=1)),
    "a lost stream, and the coordinator dies": World(Shape(2, 1), Faults(streams=1, coordinator=1)),
    "a death, grants of two rounds": World(Shape(2, 3, window=2), Faults(deaths=1)),
    "a death, chatty learners": World(Shape(2, 2), Faults(deaths=1), chatty=True),
    "three learners": World(Shape(3, 1)),
    "three learners in a row, a lost stream": World(Shape(3, 1, graph="path"), Faults(streams=1)),
    "three learners in a row, a death": World(Shape(3, 1, graph="path"), Faults(deaths=1)),
    "a copied folder, and a death": World(Shape(2, 1), Faults(deaths=1, copies=1)),
    "a copied folder, everything fails": World(
        Shape(1, 1), Faults(deaths=1, streams=1, answers=1, coordinator=1, copies=1), chatty=True
    ),
    "records of two learners": World(Shape(2, 1), Faults(deaths=1, answers=1), fed=(0, 1)),
    "a cut log": World(Shape(2, 2), Faults(deaths=1, cuts=1)),
    "late neighbours, four rounds": World(HOLD._replace(rounds=4, window=2), begun=BEGUN),
    "late neighbours, lost streams": World(HOLD._replace(window=2), Faults(streams=1), begun=BEGUN),
    "late neighbours, four rounds and a death": World(HOLD._replace(rounds=4), Faults(deaths=1), begun=BEGUN),
    "one of two rounds leaves, and a death": World(DROP2, Faults(leave=1, deaths=1), begun=BEGUN),
    "one of two rounds leaves, and the coordinator dies": World(DROP2, Faults(leave=1, coordinator=1), begun=BEGUN),
    "one is lost in its first round, and another one dies": World(
        DROP, Faults(deaths=1, streams=1, lost=1), movable=(1,), begun=BEGUN
    ),
    "one is lost, and the coordinator dies": World(
        DROP, Faults(streams=1, lost=1, coordinator=1), movable=(1,), begun=BEGUN
    ),
}
STEPS = {
    *(
        "leave",
        "join",
        "given up",
        "losing",
        "rested",
        "reported before",
        "written down",
        "as before",
        "failed",
        "told",
    ),
    *("began", "left out", "died: amended", "held"),
    *("issued", "issue lost", "confirmed", "confirmation lost", "returned", "reported", "granted"),
    *("called", "attached", "connected", "said", "heard", "message refused", "learned", "finished", "noticed"),
    *("fed", "receipt lost", "died", "died: drawn", "died: reserved", "died: journaled", "died: marked", "died: kept"),
    *("died: closed", "stream lost", "alone", "coordinator died", "coordinator back"),
    *("copied", "restored", "started beside", "refused", "cut"),
}
"""Every kind of step that a correct world takes."""


_found: dict[Terms, Explored] = {}


def explored(world: World) -> Explored:
    """A world that several tests look at is gone through once."""
    if world.terms not in _found:
        _found[world.terms] = explore(world)
    return _found[world.terms]


@pytest.mark.parametrize("name", QUICK)
def test_what_a_run_promises_holds_in_every_state(name: str) -> None:
    found = explored((QUICK | LONG)[name])
    print(f"{name}: {found}")
    assert found.broken is None, str(found)
    assert found.ends > 0


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", LONG)
def test_it_holds_in_larger_worlds(name: str) -> None:
    test_what_a_run_promises_holds_in_every_state(name)


def test_every_kind_of_step_is_taken() -> None:
    taken = sum((explored(world).taken for world in QUICK.values()), Counter[str]())
    assert set(taken) == STEPS


@pytest.mark.parametrize(
    ("mistake", "invariant"),
    [
        pytest.param(mistake, invariant, id=f"{mistake.world.__name__}-{invariant}")
        for mistake in MISTAKES
        for invariant in mistake.breaks
    ],
)
def test_every_mistake_is_found(mistake: Mistake, invariant: str) -> None:
    """And its world is correct without it: what is found is the mistake."""
    found = explore(mistake.judged(invariant))
    print(f"{mistake.said}: {found}")
    assert (found.broken or "").startswith(invariant)
    assert explored(mistake.right).broken is None


@pytest.mark.parametrize("learners", [1, 2])
def test_what_cannot_be_promised(learners: int) -> None:
    """A folder is copied while its learner runs, and put back before another start: nobody may know what was said since."""
    found = explore(World(Shape(learners, 1), Faults(deaths=1, hot=1)))
    assert (found.broken or "").startswith("P1"), str(found)


def test_the_page_names_every_mistake() -> None:
    page = " ".join((CHECKOUT / "docs" / "developers" / "model-checking.md").read_text(encoding="utf-8").split())
    assert [each.said for each in MISTAKES if f"| {each.said} | {', '.join(each.breaks)} |" not in page] == []


class Stairs:
    """Up by one or two, never above four; a fall from three leads to where nothing goes on."""

    def start(self) -> int:
        return 0

    def steps(self, state: int) -> Iterator[Step[int]]:
        for up in (1, 2):
            if 0 <= state <= 4 - up:
                yield Step("up", f"{up} up", state + up)
        if state == 3:
            yield Step("fall", "falls", -1, fault=True)

    def broken(self, state: int) -> str | None:
        return None

    def ended(self, state: int) -> bool:
        return state == 4

    def describe(self, state: int) -> list[str]:
        return [f"at {state}"]


class Crumbling(Stairs):
    def broken(self, state: int) -> str | None:
        return "P0: the top is reached" if state == 4 else None


def test_the_shortest_way_to_what_is_broken_is_told() -> None:
    assert str(explore(Crumbling())) == "\n".join(
        ["after 6 states: P0: the top is reached", "   1. 2 up", "   2. 2 up", "      at 4"]
    )


def test_a_state_that_no_end_follows_is_found() -> None:
    found = explore(Stairs())
    assert (found.states, found.ends, found.broken, found.trace) == (6, 1, STUCK, ["1 up", "2 up", "falls"])


def test_a_world_that_is_too_large_is_no_success() -> None:
    with pytest.raises(RuntimeError, match="at most 3 states"):
        explore(Stairs(), most=3)
