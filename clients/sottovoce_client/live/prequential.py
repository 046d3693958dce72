"""Prequential evaluation: each record is predicted before it is learned. The results stay with the owner."""

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
    """Metric with River's interface; `river.utils.Rolling` makes one over the last records."""

    def update(self, y_true: Any, y_pred: Any) -> object:
        """Add one record."""


class _Drift(Protocol):
    """Drift detector with River's interface (`river.drift.ADWIN`)."""

    drift_detected: bool

    def update(self, x: float) -> object:
        """Add one error."""


@dataclass(slots=True)
class Calibration:
    """Calibration of the predicted probability of each record's most probable class.

    Attributes:
        bins: number of bins of equal width, of probabilities from 0 to 1.
        record_counts: `(bins,)` number of records in each.
        probability_sums: `(bins,)` sum of their probabilities.
        correct_counts: `(bins,)` number of correct predictions among them.
    """

    bins: int = 10
    record_counts: IntArray = field(init=False)
    probability_sums: FloatArray = field(init=False)
    correct_counts: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.record_counts, self.probability_sums = np.zeros(self.bins, dtype=np.int64), np.zeros(self.bins)
        self.correct_counts = np.zeros(self.bins)

    def update(self, probabilities: FloatArray, is_correct: Sequence[bool]) -> None:
        """Add records.

        Args:
            probabilities: `(records,)` probability of their most probable class.
            is_correct: `(records,)` whether that class was right.
        """
        bin_indices = np.minimum((probabilities * self.bins).astype(np.int64), self.bins - 1)
        self.record_counts += np.bincount(bin_indices, minlength=self.bins)
        self.probability_sums += np.bincount(bin_indices, weights=probabilities, minlength=self.bins)
        self.correct_counts += np.bincount(
            bin_indices, weights=np.asarray(is_correct, dtype=np.float64), minlength=self.bins
        )

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance of probability and accuracy, over all records; NaN: no records.

        Guo, Pleiss, Sun & Weinberger 2017, equation 3.
        """
        record_count = int(self.record_counts.sum())
        return (
            float(np.abs(self.correct_counts - self.probability_sums).sum() / record_count)
            if record_count
            else float("nan")
        )

    def iterate_bins(self) -> Iterator[tuple[int, float, float]]:
        """Yield for each non-empty bin: records, mean probability, and the share that was correct."""
        for records, probability_sum, correct_count in zip(
            self.record_counts.tolist(), self.probability_sums, self.correct_counts, strict=True
        ):
            if records:
                yield records, float(probability_sum / records), float(correct_count / records)


class PrequentialEvaluation:
    """Metrics, drift and calibration of predictions, updated as their labels become known. It sends nothing.

    Predict a record before you feed it. Metrics that require probabilities (`requires_labels` is false) get those, where
    the loss gives some. Those for two classes (`LogLoss`, `ROCAUC`) then take the class that counts as 1 for the positive
    one.

    Args:
        metrics: River metrics, or any objects with `update(y_true, y_pred)`; or sequences of them, such as River's sums
            of metrics.
        drift: drift detector: gets 0 for a correct label and 1 for a wrong one; for numbers, the distance.
        bins: number of bins of the calibration.

    Attributes:
        metrics: all metrics in one list.
        records: number of judged records.
        drifts: number of records after which each drift was detected; the latest thousand.
        calibration: calibration of probabilities.

    >>> class Right:
    ...     count = 0
    ...     def update(self, y_true, y_pred):
    ...         self.count += y_true == y_pred
    >>> evaluation = PrequentialEvaluation(right := Right())
    >>> evaluation.update(["home", "died"], Prediction(["home", "home"], np.zeros(2), rounds_done=3))
    >>> right.count, evaluation.records
    (1, 2)
    """

    def __init__(self, *metrics: _Metric | Sequence[_Metric], drift: _Drift | None = None, bins: int = 10) -> None:
        self.metrics: tuple[_Metric, ...] = tuple(
            each for group in metrics for each in (group if isinstance(group, Sequence) else [group])
        )
        self.records = 0
        self.drifts: deque[int] = deque(maxlen=_MAX_DRIFTS)
        self.calibration = Calibration(bins)
        self._drift = drift

    def __repr__(self) -> str:
        return f"PrequentialEvaluation of {self.records:,} records: {', '.join(map(str, self.metrics)) or 'no metrics'}"

    def update(self, labels: Iterable[Any], prediction: Prediction) -> None:
        """Judge a prediction, now that the labels are known.

        Args:
            labels: `(records,)`, as they are fed.
            prediction: prediction of the same records, from before they were fed.

        Raises:
            DataError: their numbers differ; or a metric requires probabilities, and there are none.
        """
        true_labels = _to_python(labels)
        if len(true_labels) != len(prediction.labels):
            raise DataError(
                f"labels must be one for each of {len(prediction.labels)} predictions, got {len(true_labels)}"
            )
        for metric in self.metrics:
            for label, predicted in zip(*_select_inputs(true_labels, prediction, metric), strict=True):
                metric.update(label, predicted)
        self._update_drift(true_labels, prediction)
        if prediction.probabilities is not None:
            is_correct = [label == predicted for label, predicted in zip(true_labels, prediction.labels, strict=True)]
            self.calibration.update(prediction.probabilities.max(axis=-1), is_correct)
        self.records += len(true_labels)

    def _update_drift(self, true_labels: list[Any], prediction: Prediction) -> None:
        if self._drift is None:
            return
        for n, (label, predicted) in enumerate(zip(true_labels, prediction.labels, strict=True), self.records + 1):
            self._drift.update(float(label != predicted) if prediction.classes is not None else abs(label - predicted))
            if self._drift.drift_detected:
                self.drifts.append(n)


def _select_inputs(true_labels: list[Any], prediction: Prediction, metric: _Metric) -> tuple[list[Any], list[Any]]:
    """Return what a metric compares: labels with labels, or with each class's probability."""
    classes, probabilities = prediction.classes, prediction.probabilities
    if classes is None or getattr(metric, "requires_labels", True):
        return true_labels, list(prediction.labels)
    if probabilities is None:
        raise DataError(f"{type(metric).__name__} must be given probabilities, and the loss of this run gives none")
    if len(classes) == 2:  # River's metrics look for the chance of True, for any class names
        true_labels, classes = [label == classes[1] for label in true_labels], (False, True)
    return true_labels, [dict(zip(classes, row, strict=True)) for row in probabilities.tolist()]


def _to_python(labels: Iterable[Any]) -> list[Any]:
    """Convert NumPy's values to Python's."""
    return [each.item() if isinstance(each, np.generic) else each for each in labels]
