"""Every state of a model, breadth first, to the end: a broken invariant comes with its shortest way, a dead end too.

A model says where it begins, what may happen next, which invariant a state breaks, and which states are ends. What is a fault may
happen, and never has to: from every state an end must be within reach without any.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

STUCK = "P5: from here no end is within reach, even if nothing fails any more"


class Step(NamedTuple, Generic[S]):
    """Something that happens.

    Attributes:
        kind: its name among those that a test insists on.
        text: as a person reads it.
        after: the state then.
        fault: it need not happen.
    """

    kind: str
    text: str
    after: S
    fault: bool = False


class Model(Protocol[S]):
    """What is explored."""

    def start(self) -> S:
        """The first state."""
        ...

    def steps(self, state: S) -> Iterator[Step[S]]:
        """All that may happen next."""
        ...

    def broken(self, state: S) -> str | None:
        """The invariant that does not hold, if there is one."""
        ...

    def describe(self, state: S) -> list[str]:
        """A state in words, line by line."""
        ...

    def ended(self, state: S) -> bool:
        """True where nothing more has to happen; nothing more does."""
        ...


@dataclass(slots=True)
class Explored:
    """What was found.

    Attributes:
        states: how many there are.
        taken: how often each kind of step was taken.
        ends: how many states are ends.
        broken: the invariant that does not hold; None: all hold everywhere.
        trace: the shortest way there, step by step.
        there: the state that it leads to, in words.
    """

    states: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    ends: int = 0
    broken: str | None = None
    trace: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.states:,} states, {self.taken.total():,} steps, {self.ends:,} ends: all invariants hold"
        numbered = (f"{number:4d}. {text}" for number, text in enumerate(self.trace, start=1))
        there = (f"      {text}" for text in self.there)
        return "\n".join([f"after {self.states:,} states: {self.broken}", *numbered, *there])


class _Search(Generic[S]):
    """States by number, in the order in which they were found, and the first way to each."""

    def __init__(self, model: Model[S]) -> None:
        self.model = model
        self.states: list[S] = []
        self.numbers: dict[S, int] = {}
        self.came_from = array("q")
        self.by: list[str] = []
        self.ends = bytearray()
        # Steps that are no faults, as pairs of numbers: an end must be reachable by these alone.
        self.sources, self.targets = array("q"), array("q")

    def number(self, state: S, before: int, text: str) -> int:
        """Of a state, new or known."""
        if (known := self.numbers.get(state)) is not None:
            return known
        self.numbers[state] = new = len(self.states)
        self.states.append(state)
        self.came_from.append(before)
        self.by.append(text)
        self.ends.append(self.model.ended(state))
        return new

    def trace(self, number: int) -> list[str]:
        """The shortest way to a state."""
        texts: list[str] = []
        while number > 0:
            texts.append(self.by[number])
            number = self.came_from[number]
        return texts[::-1]

    def stuck(self) -> int | None:
        """The first state from which no end can be reached without faults."""
        into: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self.sources, self.targets, strict=True):
            into[target].append(source)
        alive = bytearray(self.ends)
        due = [number for number, end in enumerate(alive) if end]
        while due:
            for source in into[due.pop()]:
                if not alive[source]:
                    alive[source] = True
                    due.append(source)
        found = alive.find(False)
        return None if found < 0 else found

    def found(self, found: Explored, broken: str | None, at: int) -> Explored:
        """The result: an invariant that does not hold in some state, or none."""
        found.states, found.ends, found.broken = len(self.states), sum(self.ends), broken
        if broken is not None:
            found.trace, found.there = self.trace(at), self.model.describe(self.states[at])
        return found


def explore(model: Model[S], most: int = 5_000_000) -> Explored:
    """All states that can be reached, or the first that breaks an invariant.

    Args:
        model: what is explored.
        most: states; beyond these the model is too large to be gone through.

    Raises:
        RuntimeError: there are more.
    """
    search, found = _Search(model), Explored()
    search.number(model.start(), 0, "")
    at = 0
    while at < len(search.states):
        state = search.states[at]
        if (broken := model.broken(state)) is not None:
            return search.found(found, broken, at)
        for step in () if search.ends[at] else model.steps(state):
            found.taken[step.kind] += 1
            target = search.number(step.after, at, step.text)
            if not step.fault:
                search.sources.append(at)
                search.targets.append(target)
        at += 1
        if at > most:
            raise RuntimeError(f"a world must have at most {most:,} states to be gone through, this one has more")
    stuck = search.stuck()
    return search.found(found, None if stuck is None else STUCK, stuck or 0)
