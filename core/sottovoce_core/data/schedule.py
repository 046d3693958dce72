"""Learning schedule: the records of each learner and round, shared by simulator, feeders and auditor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, IntArray, summarize_fields
from sottovoce_core.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class LearnerData:
    """Records of one learner, with their learning schedule.

    Attributes:
        features: `(records, features)`, scaled, with the intercept.
        labels: `(records,)`.
        order: `(uses,)` rows in learning order.
        offsets: `(rounds + 1,)`: round t learns the rows `order[offsets[t]:offsets[t + 1]]`.
    """

    features: FloatArray
    labels: FloatArray
    order: IntArray
    offsets: IntArray

    __repr__ = summarize_fields

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.offsets) - 1

    def rows(self, t: int) -> IntArray:
        """Return the rows learned in round t.

        Raises:
            IndexError: t is not a round of the run.
        """
        if not 0 <= t < self.rounds:
            raise IndexError(f"round must be in [0, {self.rounds}), got {t}")
        return self.order[self.offsets[t] : self.offsets[t + 1]]

    def batch(self, t: int) -> Batch:
        """Return the records of round t: features `(records, features)`."""
        rows = self.rows(t)
        return Batch(self.features[rows], self.labels[rows])

    def uses(self) -> IntArray:
        """Count how often each record is learned, `(records,)`."""
        return np.bincount(self.order, minlength=len(self.labels)).astype(np.int64)

    def find_rounds(self, row: int) -> list[int]:
        """Return the rounds that learn this record, each once, ascending."""
        positions = np.flatnonzero(self.order == row)
        rounds = np.searchsorted(self.offsets, positions, side="right") - 1
        return [int(t) for t in np.unique(rounds)]

    def uses_by_round(self, row: int) -> IntArray:
        """Count how often each round learns this record, `(rounds,)`."""
        rounds = np.searchsorted(self.offsets, np.flatnonzero(self.order == row), side="right") - 1
        return np.bincount(rounds, minlength=self.rounds)

    def with_record(self, row: int, features: FloatArray, label: float) -> LearnerData:
        """Return a copy with one record replaced, in all its uses.

        Args:
            row: row of the record.
            features: `(features,)`, as placed: scaled, with the intercept.
            label: in the domain of the loss.

        Raises:
            DataError: no such row, another number of features, or not finite.
        """
        self._check(row, len(self.labels), "row", features, label)
        all_features, labels = self.features.copy(), self.labels.copy()
        all_features[row], labels[row] = features, label
        return replace(self, features=all_features, labels=labels)

    def with_use(self, position: int, features: FloatArray, label: float) -> LearnerData:
        """Return a copy with one use of a record replaced: an adjacent data set if the privacy unit is one use of a record.

        The new record is appended as the last row and `order[position]` points at it; the old one keeps its other uses.

        Args:
            position: index into `order`.
            features: `(features,)`, as placed: scaled, with the intercept.
            label: in the domain of the loss.

        Raises:
            DataError: no such use, another number of features, or not finite.
        """
        self._check(position, len(self.order), "position", features, label)
        order = self.order.copy()
        order[position] = len(self.labels)
        return LearnerData(np.vstack([self.features, features]), np.append(self.labels, label), order, self.offsets)

    def _check(self, index: int, count: int, name: str, features: FloatArray, label: float) -> None:
        """Require that the replaced record or use exists, and that the new record fits."""
        if not 0 <= index < count:
            raise DataError(f"{name} must be in [0, {count}), got {index}")
        if features.shape != self.features.shape[1:]:
            raise DataError(f"a record must have the shape {self.features.shape[1:]}, got {features.shape}")
        if not (np.isfinite(features).all() and np.isfinite(label)):
            raise DataError("features and label of a record must be finite, got NaN or infinity")


@dataclass(frozen=True, slots=True, eq=False)
class PlacedData:
    """Records of a whole run.

    Attributes:
        learners: records of each learner, by index.
        test_features: `(test records, features)`, scaled, with the intercept; public.
        test_labels: `(test records,)`.
    """

    learners: tuple[LearnerData, ...]
    test_features: FloatArray
    test_labels: FloatArray

    __repr__ = summarize_fields

    @property
    def n_features(self) -> int:
        """Length of a feature row, intercept included."""
        return int(self.test_features.shape[1])

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.learners[0].rounds

    def stack_round(self, t: int) -> Batch:
        """Stack the records of round t of all learners: features `(learners, slots, features)`.

        Learners with fewer records than the maximum are padded with zeros, marked by `mask`; None if there is no padding.
        """
        return stack_batches([learner.batch(t) for learner in self.learners])

    def with_learner(self, learner: int, data: LearnerData) -> PlacedData:
        """Return a copy with the records of one learner replaced (an adjacent world)."""
        return replace(self, learners=(*self.learners[:learner], data, *self.learners[learner + 1 :]))


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Stack batches of single learners `(records, features)` to one `(learners, slots, features)`, padded if ragged."""
    if len(batches) == 1:
        return Batch(batches[0].features[None], batches[0].labels[None])
    sizes = np.array([batch.size for batch in batches])
    if (sizes == sizes[0]).all():
        return Batch(np.stack([b.features for b in batches]), np.stack([b.labels for b in batches]))
    slots = int(sizes.max())
    features = np.zeros((len(batches), slots, batches[0].features.shape[1]))
    labels = np.zeros((len(batches), slots))
    for i, batch in enumerate(batches):
        features[i, : batch.size], labels[i, : batch.size] = batch.features, batch.labels
    return Batch(features, labels, (np.arange(slots) < sizes[:, None]).astype(np.float64))
