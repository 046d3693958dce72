"""A learner as a model of River (https://riverml.xyz), to end a pipeline with. It is an extra: import this where it is used."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from river import base

from sottovoce_client.live.learner import Prediction
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import DataError, SpecError


class _Model:
    """What both have.

    Args:
        learner: a `SyncLearner`, that learns and predicts.
        features: what the numbers of a record are called, where its run has no schema.

    Raises:
        SpecError: the names do not fit the run.
    """

    _learns = True

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
        """Send a record to the learner, as `SyncLearner.send`: it is not waited for.

        Raises:
            DataError: it does not fit.
            FailedPrecondition, Unavailable: one that was sent before is not kept.
        """
        self._learner_of().send(self._rows([x]), [y])

    def learn_many(self, X: Any, y: Any) -> None:
        """The same of a data frame and its labels."""
        self._learner_of().send(self._table(X), list(y))

    def predict_one(self, x: dict[Any, Any], **more: Any) -> Any:
        """What the model in use says of a record: one call, which is waited for."""
        return self.learner.predict(self._rows([x])).labels[0]

    def predict_many(self, X: Any) -> Any:
        """The same of a data frame, in one call."""
        import pandas as pd

        return pd.Series(self.learner.predict(self._table(X)).labels, index=X.index)

    def flush(self) -> None:
        """Wait until all that was sent is in the learner's keeping, as `SyncLearner.flush`."""
        self.learner.flush()

    def clone(self, new_params: dict[str, Any] | None = None, include_attributes: bool = False) -> Self:
        """One that predicts with the same learner, and does not learn: a record that two bring would be learned twice."""
        made = copy.copy(self)
        made._learns = False
        return made

    def __deepcopy__(self, memo: object) -> Self:
        return self.clone()

    def _learner_of(self) -> Any:
        if not self._learns:
            raise SpecError(
                "a clone must only predict: a record that several clones bring would be learned by each of them"
            )
        return self.learner

    def _rows(self, records: list[dict[Any, Any]]) -> Any:
        """Records as `feed` takes them."""
        if self.features is None:
            return records
        if any(set(each) != set(self.features) for each in records):
            raise DataError(
                f"a record must have the {len(self.features)} features that as_river was told, and no others"
            )
        return [[each[name] for name in self.features] for each in records]

    def _table(self, X: Any) -> Any:
        """A data frame as `feed` takes it."""
        if self.features is None:
            return X
        if set(X.columns) != set(self.features):
            raise DataError(
                f"records must have the {len(self.features)} features that as_river was told, and no others"
            )
        return X[list(self.features)].to_numpy()


class RiverClassifier(_Model, base.MiniBatchClassifier):  # type: ignore[misc]  # as if River had no types
    """A learner of classes, as River has it. `SyncLearner.as_river` makes it.

    Labels are as the records have them where the run has a schema, else 0, 1, ....
    """

    def _chances(self, found: Prediction) -> FloatArray:
        """Probabilities, `(records, classes)`.

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

    def predict_proba_one(self, x: dict[Any, Any], **more: Any) -> dict[Any, float]:
        """Each class's chance.

        Raises:
            SpecError: the run's loss gives none.
        """
        found = self.learner.predict(self._rows([x]))
        return dict(zip(found.classes or (), self._chances(found)[0].tolist(), strict=True))

    def predict_proba_many(self, X: Any) -> Any:
        """The same of a data frame, a column for each class."""
        import pandas as pd

        found = self.learner.predict(self._table(X))
        return pd.DataFrame(self._chances(found), index=X.index, columns=found.classes)


class RiverRegressor(_Model, base.MiniBatchRegressor):  # type: ignore[misc]
    """A learner of numbers, as River has it. `SyncLearner.as_river` makes it."""
