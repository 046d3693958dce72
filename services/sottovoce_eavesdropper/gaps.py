"""Which rounds of a run did not come. Pure.

A learner copies every round, and on a channel that is relayed rounds follow each other; so what is missing in between is a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sottovoce.network.roster import Attendance


@dataclass(slots=True)
class _Sender:
    """Copies of one learner: rounds below `due` have come, but for those that are missing."""

    due: int = 0
    missing: list[range] = field(default_factory=list)
    streams: int = 0
    broken: bool = False


Way = tuple[int, ...]
"""Whose messages: a sender's, to all; or a sender's to a receiver."""


class Gaps:
    """Gaps in what was overheard of one run.

    Attributes:
        attendances: in which rounds learners take part, by index; of those who are not named, in all.
    """

    def __init__(self, attendances: Mapping[int, Attendance] | None = None) -> None:
        self.attendances = attendances or {}
        self._senders: dict[Way, _Sender] = {}

    def begun(self, *sender: int) -> None:
        """A stream of copies has begun."""
        own = self._senders.setdefault(sender, _Sender())
        own.streams, own.broken = own.streams + 1, False

    def known(self, *sender: int) -> None:
        """Copies of a learner came before; where none come any more, the end is missing."""
        self._senders.setdefault(sender, _Sender(broken=True))

    def silent(self, learners: int) -> None:
        """Of so many learners, all that is copied should have come: of one that never began everything is missing."""
        for learner in range(learners):
            attendance = self.attendances.get(learner)
            if (learner,) not in self._senders and (attendance is None or attendance.stretches):
                self.known(learner)

    def resumed(self, *way: int, due: int, t: int | None) -> None:
        """A way is overheard again, from round t on, where rounds below `due` had come; None: it never was."""
        own = self._senders.setdefault(way, _Sender())
        own.due, own.broken = max(own.due, due), t is None
        if t is not None:
            self.came(*way, t=t)

    def over(self, *sender: int, well: bool) -> None:
        """It has ended: by the learner, who has no more, or by whatever came between."""
        own = self._senders[sender]
        own.streams -= 1
        own.broken = not well and own.streams == 0

    def came(self, *way: int, t: int) -> None:
        """A round has come, for the first time or again; on a way that is not watched that says nothing."""
        own = self._senders.get(way)
        if own is None:
            return
        if t >= own.due:
            own.missing += self._lacking(way, range(own.due, t))
            own.due = t + 1
            return
        parts = ((range(each.start, t), range(t + 1, each.stop)) if t in each else (each,) for each in own.missing)
        own.missing = [part for pair in parts for part in pair if part]

    def _lacking(self, way: Way, rounds: range) -> list[range]:
        """Those of some rounds that did not come in which both ends take part."""
        parts = [rounds]
        for learner in way:
            if (attendance := self.attendances.get(learner)) is not None:
                cuts = ((part, each) for part in parts for each in attendance.stretches)
                parts = [range(max(part.start, each.start), min(part.stop, each.stop)) for part, each in cuts]
        return [part for part in parts if part]

    @property
    def unsure(self) -> bool:
        """Some learner may have more to copy: its stream is there, or broke."""
        return any(own.streams or own.broken for own in self._senders.values())

    @property
    def senders(self) -> int:
        """Learners that have begun to copy."""
        return sum(len(way) == 1 for way in self._senders)

    @property
    def bystanders(self) -> int:
        """Learners that take part in no round, and have nothing to copy."""
        return sum(not each.stretches for each in self.attendances.values())

    @property
    def missing(self) -> int:
        """Intervals that are missing so far: rounds before and after them have come."""
        return sum(len(own.missing) for own in self._senders.values())

    def facts(self) -> list[dict[str, Any]]:
        """For `capture.json`: by sender (and receiver), rounds from `from` on, below `to`; None: how many is not known."""
        found: list[dict[str, Any]] = []
        for way, own in sorted(self._senders.items()):
            named = dict(zip(("sender", "receiver"), way, strict=False))
            found += [{**named, "from": each.start, "to": each.stop} for each in own.missing]
            if own.broken or own.streams:
                found.append({**named, "from": own.due, "to": None})
        return found
