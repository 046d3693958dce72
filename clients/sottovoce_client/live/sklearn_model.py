"""A learner as an estimator of scikit-learn. It is an extra: import this where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.metaestimators import available_if

from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import DataError, SpecError


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both have.

    Args:
        learner: a `SyncLearner`, that learns and predicts.
    """

    _learns = True

    def __init__(self, learner: Any) -> None:
        self.learner = learner

    @property
    def n_features_in_(self) -> int:
        """Fields of a record, or numbers where the run has no schema."""
        data = self.learner.spec.data
        return len(data.schema.features) if data.schema is not None else int(data.features or 0)

    def partial_fit(self, X: Any, y: Any) -> Self:
        """Send records to the learner, as `SyncLearner.send`: they are not waited for.

        Args:
            X: with a schema, a table or mappings of fields to values; without, numbers `(records, features)`.
            y: `(records,)`.

        Raises:
            DataError: one of them does not fit; none of them was sent.
            FailedPrecondition, Unavailable: some that were sent before are not kept.
        """
        if not self._learns:
            raise SpecError(
                "a clone must only predict: a record that several clones bring would be learned by each of them"
            )
        self.learner.send(X, list(y))
        return self

    def fit(self, X: Any, y: Any = None) -> Self:
        """Refused: what a learner has learned it cannot forget.

        Raises:
            SpecError: always.
        """
        raise SpecError("a learner cannot begin anew: call partial_fit, not fit")

    def predict(self, X: Any) -> Any:
        """Labels that the model in use gives, `(records,)`."""
        return np.asarray(self.learner.predict(X).labels)

    def flush(self) -> None:
        """Wait until all that was sent is in the learner's keeping, as `SyncLearner.flush`."""
        self.learner.flush()

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_clone__(self) -> Self:
        """One that predicts with the same learner, and does not learn."""
        made = type(self)(self.learner)
        made._learns = False
        return made

    def __deepcopy__(self, memo: object) -> Self:
        return self.__sklearn_clone__()


def _has_probabilities(self: Any) -> bool:
    if self.learner.spec.loss.probabilities(np.zeros((1, *self._tail))) is None:
        kind = self.learner.spec.loss.kind
        raise AttributeError(
            f"probabilities need the loss logistic, with its exact history, or softmax; the run has {kind}"
        )
    return True


class SklearnClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A learner of classes, as scikit-learn has it. `SyncLearner.as_sklearn` makes it.

    Labels are as the records have them where the run has a schema, else 0, 1, ....
    """

    @property
    def classes_(self) -> Any:
        """All that there are, `(classes,)`: the run has declared them."""
        return np.asarray(self.learner.records.class_names)

    @property
    def _tail(self) -> tuple[int, ...]:
        """Shape of one record's scores."""
        n = len(self.learner.records.class_names or ())
        return () if self.learner.spec.loss.binary else (n,)

    def partial_fit(self, X: Any, y: Any, classes: Sequence[Any] | None = None) -> Self:
        """As `_Estimator.partial_fit`.

        Args:
            X: with a schema, a table or mappings of fields to values; without, numbers `(records, features)`.
            y: `(records,)`.
            classes: that there are; nothing else than what the run has declared.

        Raises:
            DataError: it has no such class, or a record does not fit; none of them was sent.
        """
        if classes is not None and not set(np.asarray(classes).tolist()) <= set(self.classes_.tolist()):
            raise DataError(f"classes must be among the {len(self.classes_)} that the run declares")
        super().partial_fit(X, y)
        return self

    def decision_function(self, X: Any) -> FloatArray:
        """Scores, `(records,)` or `(records, classes)`."""
        scores: FloatArray = self.learner.predict(X).scores
        return scores

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Each class's chance, `(records, classes)`."""
        return self.learner.predict(X).probabilities


class SklearnRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A learner of numbers, as scikit-learn has it. `SyncLearner.as_sklearn` makes it."""
