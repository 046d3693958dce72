"""What live records must be before a learner takes them in."""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import DataError
from sottovoce.spec import LossSpec


def check_batch(features: FloatArray, labels: FloatArray, n_features: int, loss: LossSpec) -> None:
    """Refuse records that the loss is not defined for.

    A message describes shapes and rules, and quotes no record value nor the place of one: it may travel to a feeder or
    into a log, where nothing of a record may go.

    Args:
        features: must be `(records, n_features)`, finite.
        labels: must be `(records,)`, finite; 0 or 1 for the logistic loss.
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
    if loss.kind == "logistic" and not np.isin(labels, (0.0, 1.0)).all():
        raise DataError("labels of the logistic loss must be 0 or 1, got another number; map your classes to 0 and 1")
