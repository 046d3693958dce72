"""A learner, from programs without `await`: scripts, notebooks, threads, and libraries that learn record by record."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from sottovoce_client.live.learner import ConnectedLearner, Prediction
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data.encoding import EncodedRecords
from sottovoce_core.errors import FailedPrecondition, SottovoceError, SpecError, Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_rpc.learner_status import LearnerStatus

if TYPE_CHECKING:
    from sottovoce_client.live.river_model import RiverClassifier, RiverRegressor
    from sottovoce_client.live.sklearn_model import SklearnClassifier, SklearnRegressor

T = TypeVar("T")

_STATUS_INTERVAL_S = 0.5
_END = object()


class SyncLearner:
    """A `ConnectedLearner` without `await`, on a thread of its own. `with connect_learner(...)` makes it.

    Attributes:
        run_id, spec, records, source: as of `ConnectedLearner`.
    """

    def __init__(self, learner: ConnectedLearner, loop: asyncio.AbstractEventLoop) -> None:
        self._learner, self._loop = learner, loop

        async def bring(features: FloatArray, labels: FloatArray) -> int:
            return await learner.feed(EncodedRecords(features, labels, None, np.ones(len(labels), dtype=bool), {}))

        self._behind = _Behind(bring, loop)
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
            FailedPrecondition, Unavailable: also as `send`.
        """
        self._behind.flush()
        return self._wait(self._learner.feed(records, labels, positions=positions))

    def send(self, records: Any, labels: Any = None) -> None:
        """As `feed`, but it comes back before they are in the learner's keeping: for loops that bring them one by one.

        They are learned in the order in which they were sent. A few thousand may be on their way; then it waits.

        Raises:
            DataError: one of them does not fit; none of them was sent.
            FailedPrecondition, Unavailable: some that were sent before are not kept, and nothing more is sent. Connect again, and go on
                behind `position`.
        """
        found = self.records.encode_strictly(records, labels)
        self._behind.put(found.features, found.labels)

    def flush(self) -> None:
        """Wait until all that was sent is in the learner's keeping; the end of the `with` block does.

        Raises:
            FailedPrecondition, Unavailable: as `send`.
        """
        self._behind.flush()

    def predict(self, records: Any) -> Prediction:
        """As of `ConnectedLearner`."""
        return self._wait(self._learner.predict(records))

    def predict_each(self, records: Iterable[Any]) -> Iterator[Prediction]:
        """As of `ConnectedLearner`; the records are read in another thread."""
        found = self._learner.predict_each(_read(iter(records)))
        try:
            yield from self._each(found)
        finally:
            self._wait(found.aclose())

    def fetch_status(self) -> LearnerStatus:
        """As of `ConnectedLearner`."""
        return self._wait(self._learner.fetch_status())

    def watch(self, interval_s: float = _STATUS_INTERVAL_S) -> Iterator[LearnerStatus]:
        """As of `ConnectedLearner`."""
        return self._each(self._learner.watch(interval_s))

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

    def as_river(self, features: Sequence[str] | None = None) -> RiverClassifier | RiverRegressor:
        """A model of River that learns and predicts here: `learn_one`, `predict_one`. Needs the extra `river`.

        Args:
            features: what the numbers of a record are called, where the run has no schema.

        Raises:
            SpecError: River is not installed, the names do not fit the run, or several labels are one class in it.
        """
        import_optional("river", "river", "as_river", "river")
        self._require_apart("as_river")
        from sottovoce_client.live.river_model import RiverClassifier, RiverRegressor

        return (RiverRegressor if self.records.class_names is None else RiverClassifier)(self, features)

    def as_sklearn(self) -> SklearnClassifier | SklearnRegressor:
        """An estimator of scikit-learn that learns and predicts here: `partial_fit`, `predict`. Needs the extra `audit`.

        Raises:
            SpecError: scikit-learn is not installed, or several labels are one class in the run.
        """
        import_optional("sklearn", "scikit-learn", "as_sklearn")
        self._require_apart("as_sklearn")
        from sottovoce_client.live.sklearn_model import SklearnClassifier, SklearnRegressor

        return (SklearnRegressor if self.records.class_names is None else SklearnClassifier)(self)

    def _require_apart(self, what: str) -> None:
        if self.records.has_merged_labels:
            raise SpecError(f"{what} needs a class for each label: in this run several labels count as one")

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


# ---- records that are not waited for -----------------------------------------------------------------------------------

MAX_PENDING_RECORDS = 4_096
"""Records that were handed over and are not on their way yet."""


class _Behind:
    """Records on their way behind a program's back.

    What is handed over while others are on their way goes next, all together: so there are few messages where records come
    faster than receipts, and none waits where they come seldom. Once something fails, nothing more is brought, and every
    call says why: what follows must not be learned before it.

    Args:
        bring: brings records `(records, features)` and their labels, and comes back when they are kept.
        loop: where it does.
    """

    def __init__(
        self, bring: Callable[[FloatArray, FloatArray], Awaitable[object]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._bring, self._loop = bring, loop
        self._changed = threading.Condition()
        self._waiting: list[tuple[FloatArray, FloatArray]] = []
        self._records, self._bringing = 0, False
        self._error: SottovoceError | None = None
        self._told = False
        self._task: Future[None] | None = None  # its owner

    def put(self, features: FloatArray, labels: FloatArray) -> None:
        """Hand records over, as soon as there is room.

        Raises:
            SottovoceError: why some that were handed over before are not kept.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._records < MAX_PENDING_RECORDS or self._error is not None)
            self._require_well()
            self._waiting.append((features, labels))
            self._records += len(labels)
            begins, self._bringing = not self._bringing, True
        if begins:
            self._task = asyncio.run_coroutine_threadsafe(self._bring_all(), self._loop)

    def flush(self) -> None:
        """Wait until all that was handed over is kept.

        Raises:
            SottovoceError: why some of it is not.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._bringing)
            self._require_well()

    def end(self) -> None:
        """As `flush`, but what was said before is not said again."""
        if not self._told:
            self.flush()

    def _require_well(self) -> None:
        if self._error is not None:
            self._told = True
            raise self._error.with_traceback(None)

    def _taken(self) -> list[tuple[FloatArray, FloatArray]]:
        """All that waits."""
        with self._changed:
            taken, self._waiting, self._records = self._waiting, [], 0
            self._bringing = bool(taken)
            self._changed.notify_all()
            return taken

    async def _bring_all(self) -> None:
        error: SottovoceError = Unavailable("the sending of records was ended")
        taken: list[tuple[FloatArray, FloatArray]] = []
        try:
            while taken := self._taken():
                await self._bring(*map(np.concatenate, zip(*taken, strict=True)))
        except SottovoceError as failure:
            error = failure
        finally:
            if taken:
                self._fail(error, sum(len(labels) for _, labels in taken))

    def _fail(self, why: SottovoceError, under_way: int) -> None:
        with self._changed:
            kind = Unavailable if isinstance(why, Unavailable) else FailedPrecondition
            self._error = kind(f"of the last {under_way + self._records} records some are not kept: {why}")
            self._waiting, self._records, self._bringing = [], 0, False
            self._changed.notify_all()
