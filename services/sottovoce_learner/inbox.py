"""The inbox: which messages of which neighbours are here, and what may come next. No network, no clock.

The rules. A neighbour says each round in which we hear it once, in order. It may be so many rounds ahead of us, never more:
one where it needs our message of every round to go on, else what the round clock grants beyond the slowest learner.
Whatever else comes is its error, and changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from sottovoce.algorithms.interface import Message
from sottovoce.errors import RemoteProtocolError, StrangerError


class Inbox:
    """Messages of the current round and the next ones.

    Args:
        neighbours: indices of those whose messages may come.
        heard: round to those whose messages it needs, some of `neighbours`.
        ahead: rounds, the current one included, whose messages may come.
        first_round: the round to begin with.
    """

    def __init__(
        self,
        neighbours: Iterable[int],
        heard: Callable[[int], Collection[int]],
        ahead: int = 2,
        first_round: int = 0,
    ) -> None:
        self.round, self._heard_in, self._ahead = first_round, heard, ahead
        self._next = dict.fromkeys(neighbours, first_round)
        self._heard: dict[int, dict[int, Message]] = {}
        self._needed = len(heard(first_round))

    def next_round(self, neighbour: int) -> int:
        """The first round whose message of this neighbour is due, as far as it may be ahead.

        Raises:
            StrangerError: not a neighbour.
        """
        if neighbour not in self._next:
            raise StrangerError(f"learner {neighbour} is not a neighbour")
        due, beyond = max(self._next[neighbour], self.round), self.round + self._ahead
        while due < beyond and neighbour not in self._heard_in(due):
            due += 1
        return due

    def put(self, neighbour: int, t: int, sender: int, message: Message) -> bool:
        """Take a message in; True when the current round is now complete.

        Raises:
            RemoteProtocolError: sent in somebody else's name, or out of turn.
        """
        due = self.next_round(neighbour)
        if sender != neighbour:
            raise RemoteProtocolError(f"learner {neighbour} sent a message in the name of learner {sender}")
        if t != due or t >= self.round + self._ahead:
            raise RemoteProtocolError(
                f"learner {neighbour} must say round {due} next, got round {t} (we are in round {self.round})"
            )
        self._next[neighbour] = t + 1
        self._heard.setdefault(t, {})[neighbour] = message
        return self.complete

    @property
    def complete(self) -> bool:
        """True when everybody was heard whom the current round needs."""
        return len(self._heard.get(self.round, ())) == self._needed

    @property
    def missing(self) -> list[int]:
        """Neighbours not heard yet in the current round."""
        return [j for j in self._heard_in(self.round) if self._next[j] <= self.round]

    def take(self) -> dict[int, Message]:
        """The messages of the current round, complete; the next round becomes the current one."""
        heard = self._heard.pop(self.round, {})
        self.round += 1
        self._needed = len(self._heard_in(self.round))
        return heard
