"""The inbox: which messages of which neighbours are here, and what may come next. No network, no clock.

The rules. A neighbour says each round once, in order, beginning with the first round that it is a neighbour in. It may
be one round ahead of us, never more, because it needs our message to go on. Whatever else comes is its error, and changes
nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable

from sottovoce.errors import RemoteProtocolError, StrangerError
from sottovoce.machine import Message


class Inbox:
    """Messages of the current round and the next one.

    Args:
        neighbours: indices of those whose messages every round needs.
        first_round: the round to begin with.
    """

    def __init__(self, neighbours: Iterable[int], first_round: int = 0) -> None:
        self.round = first_round
        self._next = dict.fromkeys(neighbours, first_round)
        self._heard: dict[int, dict[int, Message]] = {}

    def next_round(self, neighbour: int) -> int:
        """The first round whose message of this neighbour is not here yet.

        Raises:
            StrangerError: not a neighbour.
        """
        if neighbour not in self._next:
            raise StrangerError(f"learner {neighbour} is not a neighbour")
        return self._next[neighbour]

    def put(self, neighbour: int, t: int, sender: int, message: Message) -> bool:
        """Take a message in; True when the current round is now complete.

        Raises:
            RemoteProtocolError: sent in somebody else's name, or out of turn.
        """
        due = self.next_round(neighbour)
        if sender != neighbour:
            raise RemoteProtocolError(f"learner {neighbour} sent a message in the name of learner {sender}")
        if t != due or t > self.round + 1:
            raise RemoteProtocolError(
                f"learner {neighbour} must say round {due} next, got round {t} (we are in round {self.round})"
            )
        self._next[neighbour] = t + 1
        self._heard.setdefault(t, {})[neighbour] = message
        return self.complete

    @property
    def complete(self) -> bool:
        """True when all neighbours were heard in the current round."""
        return len(self._heard.get(self.round, ())) == len(self._next)

    @property
    def missing(self) -> list[int]:
        """Neighbours not heard yet in the current round."""
        return [j for j, due in self._next.items() if due <= self.round]

    def take(self) -> dict[int, Message]:
        """The messages of the current round, complete; the next round becomes the current one."""
        heard = self._heard.pop(self.round, {})
        self.round += 1
        return heard
