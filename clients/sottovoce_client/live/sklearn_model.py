"""Scikit-learn estimator of a learner. Scikit-learn is an optional dependency: import this module where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.metaestimators import available_if

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import DataError, SpecError


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base class of both estimators.

    Args:
        learner: `SyncLearner` that learns and predicts.
    """

    _can_learn = True

    def __init__(self, learner: Any) -> None:
        self.learner = learner

    @property
    def n_features_in_(self) -> int:
        """Number of fields of a record, or of numbers where the run has no schema."""
        data = self.learner.spec.data
        return len(data.schema.features) if data.schema is not None else int(data.features or 0)

    def partial_fit(self, X: Any, y: Any) -> Self:
        """Send records to the learner without waiting, as `SyncLearner.send` does.

        Args:
            X: with a schema, a table or mappings of fields to values; without, numbers `(records, features)`.
            y: `(records,)`.

        Raises:
            DataError: a record does not fit; none was sent.
            FailedPrecondition, Unavailable: an earlier record is not stored.
        """
        if not self._can_learn:
            raise SpecError("a clone must only predict: a record sent by several clones would be learned several times")
        self.learner.send(X, list(y))
        return self

    def fit(self, X: Any, y: Any = None) -> Self:
        """Raise an error: a learner cannot forget what it has learned.

        Raises:
            SpecError: always.
        """
        raise SpecError("a learner cannot be trained anew: call partial_fit, not fit")

    def predict(self, X: Any) -> Any:
        """Predict labels with the current model, `(records,)`."""
        return np.asarray(self.learner.predict(X).labels)

    def flush(self) -> None:
        """Wait until the learner has stored all sent records, as `SyncLearner.flush` does."""
        self.learner.flush()

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_clone__(self) -> Self:
        """Return an estimator that predicts with the same learner and does not learn."""
        clone = type(self)(self.learner)
        clone._can_learn = False
        return clone

    def __deepcopy__(self, memo: object) -> Self:
        return self.__sklearn_clone__()


def _has_probabilities(self: Any) -> bool:
    if self.learner.spec.loss.probabilities(np.zeros((1, *self._score_shape))) is None:
        kind = self.learner.spec.loss.kind
        raise AttributeError(
            f"probabilities need the loss logistic, with its exact history, or softmax; the run has {kind}"
        )
    return True


class SklearnClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Scikit-learn classifier of a learner, created by `SyncLearner.as_sklearn`.

    Labels are those of the records where the run has a schema, else 0, 1, ....
    """

    @property
    def classes_(self) -> Any:
        """All classes, `(classes,)`: the run has declared them."""
        return np.asarray(self.learner.records.class_names)

    @property
    def _score_shape(self) -> tuple[int, ...]:
        """Shape of one record's scores."""
        n = len(self.learner.records.class_names or ())
        return () if self.learner.spec.loss.has_binary_labels else (n,)

    def partial_fit(self, X: Any, y: Any, classes: Sequence[Any] | None = None) -> Self:
        """Send records, as `_Estimator.partial_fit` does.

        Args:
            X: with a schema, a table or mappings of fields to values; without, numbers `(records, features)`.
            y: `(records,)`.
            classes: all classes; only those that the run has declared.

        Raises:
            DataError: the run has no such class, or a record does not fit; none was sent.
        """
        if classes is not None and not set(np.asarray(classes).tolist()) <= set(self.classes_.tolist()):
            raise DataError(f"classes must be among the {len(self.classes_)} that the run declares")
        super().partial_fit(X, y)
        return self

    def decision_function(self, X: Any) -> FloatArray:
        """Return the scores, `(records,)` or `(records, classes)`."""
        scores: FloatArray = self.learner.predict(X).scores
        return scores

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Predict each class's probability, `(records, classes)`."""
        return self.learner.predict(X).probabilities


class SklearnRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Scikit-learn regressor of a learner, created by `SyncLearner.as_sklearn`."""
