"""Where records come from: ordered sequences of messages, each with a position that rises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable


@dataclass(frozen=True, slots=True)
class Message:
    """One record, as it came.

    Attributes:
        body: fields and their values, or the bytes of a JSON object.
        position: where it stands in its part, 0 or above.
    """

    body: Mapping[str, Any] | bytes
    position: int


@dataclass(frozen=True, slots=True)
class Unreadable(Message):
    """What stands where a record should, and is none.

    Attributes:
        reason: why, in words that quote nothing of it.
    """

    reason: str


Misfit = Callable[[Sequence[str]], str]
"""Why names of columns are not those of a run's records; empty: they are."""


class Part(Protocol):
    """Messages in order: a file, a stream, one partition of a topic. A learner counts each under a name of its own.

    Attributes:
        name: that tells it from the other parts of what is fed; the same whenever the same is fed.
    """

    @property
    def name(self) -> str: ...

    def read(self, after: int) -> AsyncIterator[Sequence[Message]]:
        """Messages, positions ascending, a few at a time, as they come; it ends where nothing more can come.

        Args:
            after: position of the last one that the learner has; -1: it has none in this run.

        Raises:
            Unavailable: the source is away for too long.
            DataError: what was there is not there any more, or is another.
        """
        ...

    async def keep(self, position: int) -> None:
        """Everything up to a position is in the learner's keeping: the source may forget it."""
        ...


@runtime_checkable
class Tabular(Protocol):
    """A part whose messages all have the same fields, its columns: they are known before the first message."""

    def held(self, misfit: Misfit) -> Self:
        """The same part, which raises `DataError` in place of reading messages where its columns do not fit."""
        ...
