"""River model of a learner (https://riverml.xyz), for the end of a pipeline.

River is an optional dependency: import this module where it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from river import base

from sottovoce_client.live.learner import Prediction
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import DataError, SpecError


class _Model:
    """Base class of both models.

    Args:
        learner: `SyncLearner` that learns and predicts.
        features: names of the numbers of a record, where its run has no schema.

    Raises:
        SpecError: the names do not fit the run.
    """

    _can_learn = True

    def __init__(self, learner: Any, features: Sequence[str] | None = None) -> None:
        self.learner, self.features = learner, features
        data = learner.spec.data
        if data.schema is not None and features is not None:
            raise SpecError("features must be left out: the schema of the run names them")
        if data.schema is None and (
            features is None or len(set(features)) != len(features) or len(features) != data.features
        ):
            got = "none" if features is None else f"{len(set(features))}"
            raise SpecError(f"features must be {data.features} different names, for this run has no schema, got {got}")

    def learn_one(self, x: dict[Any, Any], y: Any) -> None:
        """Send a record to the learner without waiting, as `SyncLearner.send` does.

        Raises:
            DataError: it does not fit.
            FailedPrecondition, Unavailable: an earlier record is not stored.
        """
        self._get_learning_learner().send(self._to_rows([x]), [y])

    def learn_many(self, X: Any, y: Any) -> None:
        """Send a data frame and its labels, as `learn_one` does."""
        self._get_learning_learner().send(self._to_table(X), list(y))

    def predict_one(self, x: dict[Any, Any], **options: Any) -> Any:
        """Predict a record with the current model: one call, which is waited for."""
        return self.learner.predict(self._to_rows([x])).labels[0]

    def predict_many(self, X: Any) -> Any:
        """Predict a data frame in one call."""
        import pandas as pd

        return pd.Series(self.learner.predict(self._to_table(X)).labels, index=X.index)

    def flush(self) -> None:
        """Wait until the learner has stored all sent records, as `SyncLearner.flush` does."""
        self.learner.flush()

    def clone(self, new_params: dict[str, Any] | None = None, include_attributes: bool = False) -> Self:
        """Return a model that predicts with the same learner and does not learn: a record sent by two would be learned twice."""
        model = copy.copy(self)
        model._can_learn = False
        return model

    def __deepcopy__(self, memo: object) -> Self:
        return self.clone()

    def _get_learning_learner(self) -> Any:
        if not self._can_learn:
            raise SpecError("a clone must only predict: a record sent by several clones would be learned several times")
        return self.learner

    def _to_rows(self, records: list[dict[Any, Any]]) -> Any:
        """Convert records to the input of `feed`."""
        if self.features is None:
            return records
        if any(set(each) != set(self.features) for each in records):
            raise DataError(f"a record must have the {len(self.features)} features given to as_river, and no others")
        return [[each[name] for name in self.features] for each in records]

    def _to_table(self, X: Any) -> Any:
        """Convert a data frame to the input of `feed`."""
        if self.features is None:
            return X
        if set(X.columns) != set(self.features):
            raise DataError(f"records must have the {len(self.features)} features given to as_river, and no others")
        return X[list(self.features)].to_numpy()


class RiverClassifier(_Model, base.MiniBatchClassifier):  # type: ignore[misc]  # River is untyped here
    """River classifier of a learner, created by `SyncLearner.as_river`.

    Labels are those of the records where the run has a schema, else 0, 1, ....
    """

    def _require_probabilities(self, found: Prediction) -> FloatArray:
        """Return the probabilities, `(records, classes)`.

        Raises:
            SpecError: there are none.
        """
        if found.probabilities is None:
            kind = self.learner.spec.loss.kind
            raise SpecError(
                f"probabilities need the loss logistic, with its exact history, or softmax; the run has {kind}"
            )
        return found.probabilities

    @property
    def _multiclass(self) -> bool:
        return len(self.learner.records.class_names or ()) > 2

    def predict_proba_one(self, x: dict[Any, Any], **options: Any) -> dict[Any, float]:
        """Predict each class's probability.

        Raises:
            SpecError: the run's loss gives none.
        """
        found = self.learner.predict(self._to_rows([x]))
        return dict(zip(found.classes or (), self._require_probabilities(found)[0].tolist(), strict=True))

    def predict_proba_many(self, X: Any) -> Any:
        """Predict the probabilities of a data frame, a column for each class."""
        import pandas as pd

        found = self.learner.predict(self._to_table(X))
        return pd.DataFrame(self._require_probabilities(found), index=X.index, columns=found.classes)


class RiverRegressor(_Model, base.MiniBatchRegressor):  # type: ignore[misc]
    """River regressor of a learner, created by `SyncLearner.as_river`."""
