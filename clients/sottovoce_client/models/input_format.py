"""Records without labels, as a run reads them; and what its classes are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sottovoce_core.arrays import AnyArray, FloatArray
from sottovoce_core.data.catalogue import CATALOGUE
from sottovoce_core.data.columns import read_cells, read_features
from sottovoce_core.data.dataset import load_dataset, read_source, require_source_file
from sottovoce_core.data.encoding import Encoder, format_labels, map_labels
from sottovoce_core.data.live_records import LiveRecordEncoder
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.runs.placement import FeatureTransform, fit_feature_transform
from sottovoce_core.spec import RunSpec

LabelValue = str | float


@dataclass(frozen=True, slots=True, eq=False)
class InputFormat:
    """What a record is in a run, without its label. `InputFormat.of` makes one.

    Attributes:
        spec: of the run.
        n_features: of a row, with the intercept.
        columns: names of the features before the intercept; None: they are told apart by place.
        preparation: from features to rows.
        classes: what the loss's classes 0, 1, ... are called; None: labels are numbers.
    """

    spec: RunSpec
    n_features: int
    columns: tuple[str, ...] | None
    preparation: FeatureTransform
    classes: tuple[LabelValue, ...] | None

    @classmethod
    def from_spec(
        cls, spec: RunSpec, n_features: int, local_spec: RunSpec | None = None, folders: Sequence[Path] = ()
    ) -> InputFormat:
        """For a run.

        Args:
            spec: of the run, whose paths may lead to files of another machine.
            n_features: of a row.
            own: the same spec, whose paths lead to files that are here; None: it is not known.
            folders: where data sets that have a name are.

        Raises:
            SpecError: `own` says something else of the records; or constants are read off records that are not here.
            DataError: the records of the run cannot be read.
        """
        data, loss = spec.data, spec.loss
        if local_spec is not None:
            _require_same(spec, local_spec)
        if data.is_live or data.schema is not None:
            encoder = None if data.schema is None else Encoder.from_schema(data.schema, loss, data.positive)
            names = None if data.schema is None else data.schema.names
            return cls(
                spec,
                n_features,
                names,
                FeatureTransform(data.intercept),
                LiveRecordEncoder(data, loss, encoder).class_names,
            )
        here = data if data.source in CATALOGUE else None if local_spec is None else local_spec.data
        if here is not None:
            table = read_source(here, folders)
            labels = table.labels if table.test is None else np.concatenate([table.labels, table.test[1]])
            ready = fit_feature_transform(here, load_dataset(here, loss, folders=folders))
            return cls(spec, n_features, table.columns, ready, _called(labels, loss, data.positive))
        if data.scale != "none":
            raise SpecError(
                f"records of this run are scaled by constants of those held out of {data.source}: give the run's spec "
                "with --spec, where that file is"
            )
        numbers = None if loss.n_classes is None else tuple(range(loss.n_classes))
        return cls(spec, n_features, None, FeatureTransform(data.intercept), numbers)

    def read_rows(self, path: Path) -> FloatArray:
        """The records of a file, as rows of the run.

        Raises:
            SpecError: there is no such file, or it is of another format.
            DataError: it is unreadable, or its records are not those of the run.
        """
        require_source_file(path)
        features, want = self._features(path), self.n_features - self.preparation.intercept
        if features.shape[1] != want:
            raise DataError(
                f"{path}: a record of this run has {want} features, got {features.shape[1]} (a column label or y is none)"
            )
        return self.preparation(features)

    def _features(self, path: Path) -> FloatArray:
        data = self.spec.data
        if data.schema is not None:
            cells, _, _ = read_cells(require_source_file(path, schema=True))
            found = Encoder.from_schema(data.schema, self.spec.loss, data.positive).encode_columns(
                cells, has_labels=False
            )
            if found.refusals:
                row, why = next(iter(found.refusals.items()))
                many = f"{len(found.refusals):,} of {len(found.accepted_mask):,} records do not fit the schema"
                raise DataError(f"{path}: {many}; the first is row {row} (counted from 0), {why}")
            return found.features
        features = read_features(path, self.columns, data.label)
        if not np.isfinite(features).all():
            row = int(np.argwhere(~np.isfinite(features))[0][0])
            raise DataError(f"{path}: row {row} (counted from 0) must have finite numbers alone")
        return features


def _require_same(spec: RunSpec, own: RunSpec) -> None:
    """Raises `SpecError` where two specs make other rows of the same records."""
    same = own.model_copy(update={"data": own.data.model_copy(update={"source": spec.data.source})})
    for section in ("data", "loss"):
        if getattr(same, section) != getattr(spec, section):
            raise SpecError(
                f"--spec must be the spec of the learner's run, and its section {section} says something else"
            )


def _called(labels: AnyArray, loss: Loss, positive: tuple[int | str, ...] | None) -> tuple[LabelValue, ...] | None:
    """Names of the classes; a number where several labels are one class, or none is."""
    if loss.n_classes is None:
        return None
    mapped, _ = map_labels(labels, loss, positive)
    distinct, first = np.unique(labels, return_index=True)
    called: list[list[str]] = [[] for _ in range(loss.n_classes)]
    for text, k in zip(format_labels(distinct), first.tolist(), strict=True):
        called[int(mapped[k])].append(text)
    named = [texts[0] if len(texts) == 1 else k for k, texts in enumerate(called)]
    return tuple(int(name) if str(name).isdigit() else name for name in named)
