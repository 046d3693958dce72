"""A learner, from programs without `await`: scripts, notebooks, threads, and libraries that learn record by record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sottovoce_client.live.calls import PlainCalls
from sottovoce_core.errors import SpecError
from sottovoce_core.optional import import_extra

if TYPE_CHECKING:
    from sottovoce_client.live.river_model import RiverClassifier, RiverRegressor
    from sottovoce_client.live.sklearn_model import SklearnClassifier, SklearnRegressor


class PlainLearner(PlainCalls):
    """A `ConnectedLearner` without `await`, on a thread of its own. `with connect_learner(...)` makes it."""

    def as_river(self, features: Sequence[str] | None = None) -> RiverClassifier | RiverRegressor:
        """A model of River that learns and predicts here: `learn_one`, `predict_one`. Needs the extra `river`.

        Args:
            features: what the numbers of a record are called, where the run has no schema.

        Raises:
            SpecError: River is not installed, the names do not fit the run, or several labels are one class in it.
        """
        import_extra("river", "river", "as_river", "river")
        self._require_apart("as_river")
        from sottovoce_client.live.river_model import RiverClassifier, RiverRegressor

        return (RiverRegressor if self.records.classes is None else RiverClassifier)(self, features)

    def as_sklearn(self) -> SklearnClassifier | SklearnRegressor:
        """An estimator of scikit-learn that learns and predicts here: `partial_fit`, `predict`. Needs the extra `audit`.

        Raises:
            SpecError: scikit-learn is not installed, or several labels are one class in the run.
        """
        import_extra("sklearn", "scikit-learn", "as_sklearn")
        self._require_apart("as_sklearn")
        from sottovoce_client.live.sklearn_model import SklearnClassifier, SklearnRegressor

        return (SklearnRegressor if self.records.classes is None else SklearnClassifier)(self)

    def _require_apart(self, what: str) -> None:
        if self.records.folded:
            raise SpecError(f"{what} needs a class for each label: in this run several labels count as one")
