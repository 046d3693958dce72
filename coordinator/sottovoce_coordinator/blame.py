"""Who holds up a run: the sinks of the graph of who waits for whom. Pure.

A learner that waits for a neighbour is not to blame for it. Following the waits leads to somebody who is gone, who has no
records, or who waits for nobody; or round in a circle, where messages do not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sottovoce.network.roster import in_short
from sottovoce_rpc.learner_status import Cause, Waiting

_FEW = 10
"""Learners of whom all are named."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How one learner stands in a run.

    Attributes:
        name: the learner's.
        round: rounds that it has done.
        away: its stream has ended.
        waiting: what it has said that it waits for; None: nothing.
        starved: no round is granted because it has no records.
    """

    name: str
    round: int
    away: bool = False
    waiting: Waiting | None = None
    starved: bool = False


def blamed(standings: Sequence[Standing], who: int) -> tuple[int, ...]:
    """Indices of those because of whom learner `who` waits: those who are gone, else the furthest behind; or a circle."""
    reached = {who} | _beyond(standings, who)
    sinks = [i for i in sorted(reached) if not _waited_for(standings, i)]
    if not sinks:
        return tuple(i for i in sorted(reached) if i in _beyond(standings, i))
    found = [i for i in sinks if standings[i].away] or sinks
    least = min(standings[i].round for i in found)
    return tuple(i for i in found if standings[i].away or standings[i].round == least)


def _beyond(standings: Sequence[Standing], who: int) -> set[int]:
    """Everybody to whom the waits of a learner lead; itself, too, where they go round in a circle."""
    reached, due = set[int](), _waited_for(standings, who)
    while due:
        if (i := due.pop()) not in reached:
            reached.add(i)
            due += _waited_for(standings, i)
    return reached


def in_words(standings: Sequence[Standing], found: Sequence[int]) -> str:
    """What is wrong with those who were `blamed`."""
    first = standings[found[0]]
    names, are = _named(standings, found), "is" if len(found) == 1 else "are"
    if first.away:
        return f"{names} {are} gone since round {first.round}"
    if first.starved or (first.waiting is not None and first.waiting.cause is Cause.RECORDS):
        return f"{names} {'has' if len(found) == 1 else 'have'} no records for round {first.round}"
    if len(found) > 1 and first.waiting is not None and first.waiting.cause is Cause.NEIGHBOUR:
        return f"no messages pass between {names} in round {min(standings[i].round for i in found)}"
    if first.waiting is not None:
        return f"{names} waited for {first.waiting.cause.value} in round {first.round}"
    return f"{names} {are} silent in round {first.round}"


def _waited_for(standings: Sequence[Standing], who: int) -> list[int]:
    """Those whom a learner waits for; none: it is a sink."""
    own = standings[who]
    if own.away or own.waiting is None:
        return []
    others = [i for i in range(len(standings)) if i != who]
    match own.waiting.cause:
        case Cause.NEIGHBOUR:
            return [i for i in own.waiting.neighbours if i < len(standings)]
        case Cause.GRANT if not own.starved:  # the clock waits for whoever is furthest behind
            return [i for i in others if standings[i].starved or standings[i].round < own.round]
    return []


def _named(standings: Sequence[Standing], found: Sequence[int]) -> str:
    *names, last = (standings[i].name for i in found)
    if len(names) >= _FEW:
        return in_short([*names, last])
    return f"{', '.join(names)} and {last}" if names else last
