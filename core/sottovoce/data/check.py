"""What live records must be before a learner takes them in."""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import DataError
from sottovoce.losses import Loss


def check_batch(features: FloatArray, labels: FloatArray, n_features: int, loss: Loss) -> None:
    """Refuse records that the loss is not defined for.

    A message describes shapes and rules, and quotes no record value nor the place of one: it may travel to a feeder or
    into a log, where nothing of a record may go.

    Args:
        features: must be `(records, n_features)`, finite.
        labels: must be `(records,)`, finite; class numbers from 0 for losses of many classes, 0 or 1 for those of two.
        n_features: length of a feature row, intercept included where the run appends one.
        loss: the loss of the run.

    Raises:
        DataError: one of these does not hold.
    """
    if features.ndim != 2:
        raise DataError(f"features must have the shape (records, {n_features}), got {features.ndim} axes")
    if features.shape[1] != n_features:
        raise DataError(f"a record must have {n_features} features, got {features.shape[1]}")
    if labels.shape != features.shape[:1]:
        raise DataError(f"labels must have the shape {features.shape[:1]}, one for each record, got {labels.shape}")
    if not np.isfinite(features).all():
        raise DataError("features must be finite numbers, got NaN or infinity")
    if not np.isfinite(labels).all():
        raise DataError("labels must be finite numbers, got NaN or infinity")
    if (classes := loss.n_classes) is None:
        return
    if not np.isin(labels, np.arange(classes)).all():
        allowed = f"whole numbers from 0 to {classes - 1}" if classes > 2 else "0 or 1"
        raise DataError(
            f"labels of the {loss.kind} loss must be {allowed}, got another number; number your classes from 0"
        )
