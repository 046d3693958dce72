"""Connection to a learner for programs without `await`: scripts, notebooks, threads, and libraries that learn single records."""

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
    """`ConnectedLearner` without `await`, on its own thread, created by `with connect_learner(...)`.

    Attributes:
        run_id, spec, records, source: as of `ConnectedLearner`.
    """

    def __init__(self, learner: ConnectedLearner, loop: asyncio.AbstractEventLoop) -> None:
        self._learner, self._loop = learner, loop

        async def send_encoded(features: FloatArray, labels: FloatArray) -> int:
            return await learner.feed(EncodedRecords(features, labels, None, np.ones(len(labels), dtype=bool), {}))

        self._background_sender = _BackgroundSender(send_encoded, loop)
        self.run_id, self.spec, self.records, self.source = (
            learner.run_id,
            learner.spec,
            learner.records,
            learner.source,
        )

    def __deepcopy__(self, memo: object) -> Self:
        """Return this connection: copies of its holder share it."""
        return self

    @property
    def position(self) -> int:
        """Position of the last fed record, as of `ConnectedLearner`."""
        return self._learner.position

    def feed(self, records: Any, labels: Any = None, *, positions: Sequence[int] | None = None) -> int:
        """Send records after all that were sent before, as `ConnectedLearner.feed` does.

        Raises:
            FailedPrecondition, Unavailable: also as of `send`.
        """
        self._background_sender.flush()
        return self._wait(self._learner.feed(records, labels, positions=positions))

    def send(self, records: Any, labels: Any = None) -> None:
        """Send records as `feed` does, but return before the learner has stored them: for loops over single records.

        They are learned in the order in which they were sent. A few thousand may be pending; then the call waits.

        Raises:
            DataError: a record does not fit; none was sent.
            FailedPrecondition, Unavailable: earlier records are not stored, and nothing more is sent. Connect again, and
                continue after `position`.
        """
        found = self.records.encode_strictly(records, labels)
        self._background_sender.put(found.features, found.labels)

    def flush(self) -> None:
        """Wait until the learner has stored all sent records; the end of the `with` block does this, too.

        Raises:
            FailedPrecondition, Unavailable: as of `send`.
        """
        self._background_sender.flush()

    def predict(self, records: Any) -> Prediction:
        """Predict as `ConnectedLearner.predict` does."""
        return self._wait(self._learner.predict(records))

    def predict_each(self, records: Iterable[Any]) -> Iterator[Prediction]:
        """Predict as `ConnectedLearner.predict_each` does; the records are read in another thread."""
        found = self._learner.predict_each(_read_in_thread(iter(records)))
        try:
            yield from self._iterate(found)
        finally:
            self._wait(found.aclose())

    def fetch_status(self) -> LearnerStatus:
        """Return the status, as `ConnectedLearner.fetch_status` does."""
        return self._wait(self._learner.fetch_status())

    def watch(self, interval_s: float = _STATUS_INTERVAL_S) -> Iterator[LearnerStatus]:
        """Yield the status, as `ConnectedLearner.watch` does."""
        return self._iterate(self._learner.watch(interval_s))

    def end(self, kind: type[BaseException] | None = None) -> None:
        """End the block: wait for the sent records.

        Args:
            kind: type of the exception that ends it, which hides errors of pending records; an interrupt does not wait.
        """
        if kind is None:
            self._background_sender.end()
        elif issubclass(kind, Exception):
            with contextlib.suppress(SottovoceError):
                self._background_sender.end()

    def as_river(self, features: Sequence[str] | None = None) -> RiverClassifier | RiverRegressor:
        """Return a River model that learns and predicts with this learner: `learn_one`, `predict_one`. Needs the extra `river`.

        Args:
            features: names of the numbers of a record, where the run has no schema.

        Raises:
            SpecError: River is not installed, the names do not fit the run, or several labels are one class in it.
        """
        import_optional("river", "river", "as_river", "river")
        self._require_distinct_labels("as_river")
        from sottovoce_client.live.river_model import RiverClassifier, RiverRegressor

        return (RiverRegressor if self.records.class_names is None else RiverClassifier)(self, features)

    def as_sklearn(self) -> SklearnClassifier | SklearnRegressor:
        """Return a scikit-learn estimator that learns and predicts with this learner. Needs the extra `audit`.

        Raises:
            SpecError: scikit-learn is not installed, or several labels are one class in the run.
        """
        import_optional("sklearn", "scikit-learn", "as_sklearn")
        self._require_distinct_labels("as_sklearn")
        from sottovoce_client.live.sklearn_model import SklearnClassifier, SklearnRegressor

        return (SklearnRegressor if self.records.class_names is None else SklearnClassifier)(self)

    def _require_distinct_labels(self, caller: str) -> None:
        if self.records.has_merged_labels:
            raise SpecError(f"{caller} needs a class for each label: in this run several labels count as one")

    def _iterate(self, found: AsyncIterator[T]) -> Iterator[T]:
        async def read_next() -> T | object:
            return await anext(found, _END)

        while (each := self._wait(read_next())) is not _END:
            yield each  # type: ignore[misc]  # the end marker never gets here

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _read_in_thread(records: Iterator[Any]) -> AsyncIterator[Any]:
    """Yield each item from a thread, so that the event loop stays free."""
    while (each := await asyncio.to_thread(next, records, _END)) is not _END:
        yield each


# ---- background sending ------------------------------------------------------------------------------------------------

MAX_PENDING_RECORDS = 4_096
"""Maximum number of records that were handed over and are not being sent yet."""


class _BackgroundSender:
    """Background sender of records.

    Records handed over during a call share the next one: so there are few messages where records come faster than
    receipts, and no delay where they come rarely. After a failure nothing more is sent, and every call raises the reason:
    later records must not be learned before the failed ones.

    Args:
        send_encoded: sends records `(records, features)` and their labels, and returns when they are stored.
        loop: event loop that it runs in.
    """

    def __init__(
        self, send_encoded: Callable[[FloatArray, FloatArray], Awaitable[object]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._send, self._loop = send_encoded, loop
        self._changed = threading.Condition()
        self._waiting: list[tuple[FloatArray, FloatArray]] = []
        self._records, self._is_sending = 0, False
        self._error: SottovoceError | None = None
        self._is_error_raised = False
        self._task: Future[None] | None = None  # keeps a reference to the task

    def put(self, features: FloatArray, labels: FloatArray) -> None:
        """Hand over records, as soon as there is space.

        Raises:
            SottovoceError: the reason why earlier records are not stored.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._records < MAX_PENDING_RECORDS or self._error is not None)
            self._raise_error()
            self._waiting.append((features, labels))
            self._records += len(labels)
            starts_task, self._is_sending = not self._is_sending, True
        if starts_task:
            self._task = asyncio.run_coroutine_threadsafe(self._send_all(), self._loop)

    def flush(self) -> None:
        """Wait until all records are stored.

        Raises:
            SottovoceError: the reason why some are not.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_sending)
            self._raise_error()

    def end(self) -> None:
        """Flush, but do not raise an error a second time."""
        if not self._is_error_raised:
            self.flush()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_error_raised = True
            raise self._error.with_traceback(None)

    def _take_waiting(self) -> list[tuple[FloatArray, FloatArray]]:
        """Take all waiting records."""
        with self._changed:
            batches, self._waiting, self._records = self._waiting, [], 0
            self._is_sending = bool(batches)
            self._changed.notify_all()
            return batches

    async def _send_all(self) -> None:
        error: SottovoceError = Unavailable("the sending of records was ended")
        batches: list[tuple[FloatArray, FloatArray]] = []
        try:
            while batches := self._take_waiting():
                await self._send(*map(np.concatenate, zip(*batches, strict=True)))
        except SottovoceError as failure:
            error = failure
        finally:
            if batches:
                self._fail(error, sum(len(labels) for _, labels in batches))

    def _fail(self, cause: SottovoceError, sending_count: int) -> None:
        with self._changed:
            kind = Unavailable if isinstance(cause, Unavailable) else FailedPrecondition
            self._error = kind(f"some of the last {sending_count + self._records} records are not stored: {cause}")
            self._waiting, self._records, self._is_sending = [], 0, False
            self._changed.notify_all()
