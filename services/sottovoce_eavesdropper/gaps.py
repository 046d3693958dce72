"""Which rounds of a mirrored run did not come. Pure: a learner copies every round, so what is missing in between is a gap."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Sender:
    """Copies of one learner: rounds below `due` have come, but for those that are missing."""

    due: int = 0
    missing: list[range] = field(default_factory=list)
    streams: int = 0
    broken: bool = False


class Gaps:
    """Gaps in what the learners of one run have copied."""

    def __init__(self) -> None:
        self._senders: dict[int, _Sender] = {}

    def begun(self, sender: int) -> None:
        """A stream of copies has begun."""
        own = self._senders.setdefault(sender, _Sender())
        own.streams, own.broken = own.streams + 1, False

    def over(self, sender: int, *, well: bool) -> None:
        """It has ended: by the learner, who has no more, or by whatever came between."""
        own = self._senders[sender]
        own.streams -= 1
        own.broken = not well and own.streams == 0

    def came(self, sender: int, t: int) -> None:
        """A copy of a round has come, for the first time or again."""
        own = self._senders[sender]
        if t >= own.due:
            if t > own.due:
                own.missing.append(range(own.due, t))
            own.due = t + 1
            return
        parts = ((range(each.start, t), range(t + 1, each.stop)) if t in each else (each,) for each in own.missing)
        own.missing = [part for pair in parts for part in pair if part]

    @property
    def unsure(self) -> bool:
        """Some learner may have more to copy: its stream is there, or broke."""
        return any(own.streams or own.broken for own in self._senders.values())

    def facts(self) -> list[dict[str, Any]]:
        """For `capture.json`: by sender, rounds from `from` on, below `to`; `to` None: how many there were is not known."""
        found: list[dict[str, Any]] = []
        for sender, own in sorted(self._senders.items()):
            found += [{"sender": sender, "from": each.start, "to": each.stop} for each in own.missing]
            if own.broken or own.streams:
                found.append({"sender": sender, "from": own.due, "to": None})
        return found
