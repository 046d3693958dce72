"""The calls of a learner without `await`, on a thread of its own; and what is sent behind a program's back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.data.encoding import Encoded
from sottovoce.errors import SottovoceError
from sottovoce_client.live.behind import Behind
from sottovoce_client.live.learner import ConnectedLearner, Prediction
from sottovoce_rpc.learner_status import LearnerStatus

T = TypeVar("T")

_LOOK_S = 0.5
_END = object()


class PlainCalls:
    """The calls of a `ConnectedLearner` without `await`, which go on on a thread of their own.

    Attributes:
        run_id, spec, records, source: as of `ConnectedLearner`.
    """

    def __init__(self, learner: ConnectedLearner, loop: asyncio.AbstractEventLoop) -> None:
        self._learner, self._loop = learner, loop

        async def bring(features: FloatArray, labels: FloatArray) -> int:
            return await learner.feed(Encoded(features, labels, None, np.ones(len(labels), dtype=bool), {}))

        self._behind = Behind(bring, loop)
        self.run_id, self.spec, self.records, self.source = (
            learner.run_id,
            learner.spec,
            learner.records,
            learner.source,
        )

    def __deepcopy__(self, memo: object) -> Self:
        """A connection is one, whoever copies what holds it."""
        return self

    @property
    def position(self) -> int:
        """As of `ConnectedLearner`."""
        return self._learner.position

    def feed(self, records: Any, labels: Any = None, *, positions: Sequence[int] | None = None) -> int:
        """As of `ConnectedLearner`; behind all that was sent before.

        Raises:
            NotReady, Unavailable: also as `send`.
        """
        self._behind.flush()
        return self._wait(self._learner.feed(records, labels, positions=positions))

    def send(self, records: Any, labels: Any = None) -> None:
        """As `feed`, but it comes back before they are in the learner's keeping: for loops that bring them one by one.

        They are learned in the order in which they were sent. A few thousand may be on their way; then it waits.

        Raises:
            DataError: one of them does not fit; none of them was sent.
            NotReady, Unavailable: some that were sent before are not kept, and nothing more is sent. Connect again, and go on
                behind `position`.
        """
        found = self.records.fitting(records, labels)
        self._behind.put(found.features, found.labels)

    def flush(self) -> None:
        """Wait until all that was sent is in the learner's keeping; the end of the `with` block does.

        Raises:
            NotReady, Unavailable: as `send`.
        """
        self._behind.flush()

    def predict(self, records: Any) -> Prediction:
        """As of `ConnectedLearner`."""
        return self._wait(self._learner.predict(records))

    def predictions(self, records: Iterable[Any]) -> Iterator[Prediction]:
        """As of `ConnectedLearner`; the records are read in another thread."""
        found = self._learner.predictions(_read(iter(records)))
        try:
            yield from self._each(found)
        finally:
            self._wait(found.aclose())

    def status(self) -> LearnerStatus:
        """As of `ConnectedLearner`."""
        return self._wait(self._learner.status())

    def watch(self, every_s: float = _LOOK_S) -> Iterator[LearnerStatus]:
        """As of `ConnectedLearner`."""
        return self._each(self._learner.watch(every_s))

    def end(self, kind: type[BaseException] | None = None) -> None:
        """The end of the block: wait for what was sent.

        Args:
            kind: of what ends it, which is told rather than why something is not kept; who interrupts does not wait.
        """
        if kind is None:
            self._behind.end()
        elif issubclass(kind, Exception):
            with contextlib.suppress(SottovoceError):
                self._behind.end()

    def _each(self, found: AsyncIterator[T]) -> Iterator[T]:
        async def one() -> T | object:
            return await anext(found, _END)

        while (each := self._wait(one())) is not _END:
            yield each  # type: ignore[misc]  # it is none of ours

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _read(records: Iterator[Any]) -> AsyncIterator[Any]:
    """Each as it comes, while others may be waited for."""
    while (each := await asyncio.to_thread(next, records, _END)) is not _END:
        yield each
