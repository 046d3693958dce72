"""How good predictions are while a model learns: each record is predicted before it is learned. It stays with the owner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sottovoce_client.live.learner import Prediction
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import DataError

_MAX_DRIFTS = 1_000


class _Metric(Protocol):
    """As River's are; `river.utils.Rolling` makes one of the last so many records."""

    def update(self, y_true: Any, y_pred: Any) -> object:
        """One more record."""


class _Drift(Protocol):
    """A detector of drift, as River's are (`river.drift.ADWIN`)."""

    drift_detected: bool

    def update(self, x: float) -> object:
        """One more error."""


@dataclass(slots=True)
class Calibration:
    """How often what is given a chance comes true: of each record the likeliest class.

    Attributes:
        bins: of equal width, of chances from 0 to 1.
        records: `(bins,)` how many had a chance in it.
        chance: `(bins,)` sum of their chances.
        true: `(bins,)` how many of them were right.
    """

    bins: int = 10
    record_counts: IntArray = field(init=False)
    probability_sums: FloatArray = field(init=False)
    correct_counts: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.record_counts, self.probability_sums = np.zeros(self.bins, dtype=np.int64), np.zeros(self.bins)
        self.correct_counts = np.zeros(self.bins)

    def update(self, chances: FloatArray, right: Sequence[bool]) -> None:
        """More records.

        Args:
            chances: `(records,)` that their likeliest classes were given.
            right: `(records,)` whether it was that one.
        """
        at = np.minimum((chances * self.bins).astype(np.int64), self.bins - 1)
        self.record_counts += np.bincount(at, minlength=self.bins)
        self.probability_sums += np.bincount(at, weights=chances, minlength=self.bins)
        self.correct_counts += np.bincount(at, weights=np.asarray(right, dtype=np.float64), minlength=self.bins)

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance of chance and share, over all records; NaN: there are none.

        Guo, Pleiss, Sun & Weinberger 2017, equation 3.
        """
        total = int(self.record_counts.sum())
        return float(np.abs(self.correct_counts - self.probability_sums).sum() / total) if total else float("nan")

    def iterate_bins(self) -> Iterator[tuple[int, float, float]]:
        """Of each bin that is not empty: records, mean chance, and the share that was right."""
        for records, chance, true in zip(
            self.record_counts.tolist(), self.probability_sums, self.correct_counts, strict=True
        ):
            if records:
                yield records, float(chance / records), float(true / records)


class PrequentialEvaluation:
    """Metrics, drift and calibration of predictions, as their labels become known. It sends nothing.

    Predict a record before you feed it. Metrics that ask for probabilities (`requires_labels` is false) get those, where the
    loss gives some. Those for two classes (`LogLoss`, `ROCAUC`) then take the class that counts as 1 for the positive one.

    Args:
        metrics: of River, or whatever has `update(y_true, y_pred)`; or several, such as River's sums of metrics.
        drift: is told 0 for a label that was right and 1 for one that was not; of numbers, the distance.
        bins: of the calibration.

    Attributes:
        metrics: as given, one by one.
        records: that were judged.
        drifts: after how many records each drift was detected; the latest thousand.
        calibration: of probabilities.

    >>> class Right:
    ...     of = 0
    ...     def update(self, y_true, y_pred):
    ...         self.of += y_true == y_pred
    >>> judged = Prequential(right := Right())
    >>> judged.update(["home", "died"], Prediction(["home", "home"], np.zeros(2), rounds_done=3))
    >>> right.of, judged.records
    (1, 2)
    """

    def __init__(self, *metrics: _Metric | Sequence[_Metric], drift: _Drift | None = None, bins: int = 10) -> None:
        self.metrics: tuple[_Metric, ...] = tuple(
            each for some in metrics for each in (some if isinstance(some, Sequence) else [some])
        )
        self.records = 0
        self.drifts: deque[int] = deque(maxlen=_MAX_DRIFTS)
        self.calibration = Calibration(bins)
        self._drift = drift

    def update(self, labels: Iterable[Any], prediction: Prediction) -> None:
        """Judge a prediction, now that the labels are known.

        Args:
            labels: `(records,)`, as they are fed.
            prediction: of the same records, from before they were fed.

        Raises:
            DataError: they are not equally many; or a metric needs probabilities, and there are none.
        """
        true = _plain(labels)
        if len(true) != len(prediction.labels):
            raise DataError(f"labels must be one for each of {len(prediction.labels)} predictions, got {len(true)}")
        for metric in self.metrics:
            for label, told in zip(*_compared(true, prediction, metric), strict=True):
                metric.update(label, told)
        self._look_for_drift(true, prediction)
        if prediction.probabilities is not None:
            right = [label == told for label, told in zip(true, prediction.labels, strict=True)]
            self.calibration.update(prediction.probabilities.max(axis=-1), right)
        self.records += len(true)

    def _look_for_drift(self, true: list[Any], prediction: Prediction) -> None:
        if self._drift is None:
            return
        for n, (label, told) in enumerate(zip(true, prediction.labels, strict=True), self.records + 1):
            self._drift.update(float(label != told) if prediction.classes is not None else abs(label - told))
            if self._drift.drift_detected:
                self.drifts.append(n)


def _compared(true: list[Any], prediction: Prediction, metric: _Metric) -> tuple[list[Any], list[Any]]:
    """What a metric compares with what: labels, or labels with each class's chance."""
    classes, chances = prediction.classes, prediction.probabilities
    if classes is None or getattr(metric, "requires_labels", True):
        return true, list(prediction.labels)
    if chances is None:
        raise DataError(f"{type(metric).__name__} must be given probabilities, and the loss of this run gives none")
    if len(classes) == 2:  # River's metrics look for the chance of True, whatever the classes are called
        true, classes = [label == classes[1] for label in true], (False, True)
    return true, [dict(zip(classes, row, strict=True)) for row in chances.tolist()]


def _plain(labels: Iterable[Any]) -> list[Any]:
    """Values of Python, in place of NumPy's."""
    return [each.item() if isinstance(each, np.generic) else each for each in labels]
