"""Input format of a run's model: how unlabelled records become rows, and the names of the classes."""

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
from sottovoce_core.data.synthetic import SyntheticSource
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.runs.placement import FeatureTransform, fit_feature_transform
from sottovoce_core.spec import RunSpec

LabelValue = str | float


@dataclass(frozen=True, slots=True, eq=False)
class InputFormat:
    """Input format of a run's model, created by `InputFormat.from_spec`.

    Attributes:
        spec: Spec of the run.
        n_features: Number of features of a row, including the intercept.
        columns: Names of the features without the intercept; None: they are identified by position.
        preparation: Transform from features to rows.
        classes: Names of the loss's classes 0, 1, ...; None: labels are numbers.
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
        """Derive the input format of a run.

        Args:
            spec: Spec of the run; its paths may be of another machine.
            n_features: Number of features of a row.
            local_spec: The same spec with local paths; None: not available.
            folders: Folders of named data sets.

        Raises:
            SpecError: `local_spec` reads records differently, or scaling constants depend on records that are not available.
            DataError: The records of the run cannot be read.
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
        is_public = isinstance(data.source, SyntheticSource) or data.source in CATALOGUE
        local = data if is_public else None if local_spec is None else local_spec.data
        if local is not None:
            table = read_source(local, folders)
            labels = table.labels if table.test is None else np.concatenate([table.labels, table.test[1]])
            transform = fit_feature_transform(local, load_dataset(local, loss, folders=folders))
            return cls(spec, n_features, table.columns, transform, _name_classes(labels, loss, data.positive))
        if not data.scale.is_stated:
            raise SpecError(
                f"records of this run are scaled by constants of the held-out records of {data.source}: give the run's spec "
                "with --spec on a machine that has that file"
            )
        numbers = None if loss.n_classes is None else tuple(range(loss.n_classes))
        transform = FeatureTransform.from_scale(data.scale, n_features - data.intercept, intercept=data.intercept)
        return cls(spec, n_features, None, transform, numbers)

    def read_rows(self, path: Path) -> FloatArray:
        """Read the records of a file as rows of the run.

        Raises:
            SpecError: There is no such file, or its format is not supported.
            DataError: It is unreadable, or its records do not fit the run.
        """
        require_source_file(path)
        features, expected = self._features(path), self.n_features - self.preparation.intercept
        if features.shape[1] != expected:
            raise DataError(
                f"{path}: a record must have {expected} features, got {features.shape[1]} (a column label or y is no feature)"
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
                row, reason = next(iter(found.refusals.items()))
                count = f"{len(found.refusals):,} of {len(found.accepted_mask):,} records do not fit the schema"
                raise DataError(f"{path}: {count}; the first is row {row} (counted from 0), {reason}")
            return found.features
        features = read_features(path, self.columns, data.label)
        if not np.isfinite(features).all():
            row = int(np.argwhere(~np.isfinite(features))[0][0])
            raise DataError(f"{path}: row {row} (counted from 0) must have only finite numbers")
        return features


def _require_same(spec: RunSpec, own: RunSpec) -> None:
    """Raise `SpecError` if two specs make different rows of the same records."""
    same = own.model_copy(update={"data": own.data.model_copy(update={"source": spec.data.source})})
    for section in ("data", "loss"):
        if getattr(same, section) != getattr(spec, section):
            raise SpecError(f"--spec must be the spec of the learner's run, and its section {section} differs")


def _name_classes(
    labels: AnyArray, loss: Loss, positive: tuple[int | str, ...] | None
) -> tuple[LabelValue, ...] | None:
    """Return the names of the classes; a class of several labels, or of none, is named by its index."""
    if loss.n_classes is None:
        return None
    mapped, _ = map_labels(labels, loss, positive)
    distinct, first = np.unique(labels, return_index=True)
    members: list[list[str]] = [[] for _ in range(loss.n_classes)]
    for text, k in zip(format_labels(distinct), first.tolist(), strict=True):
        members[int(mapped[k])].append(text)
    names = [texts[0] if len(texts) == 1 else k for k, texts in enumerate(members)]
    return tuple(int(name) if str(name).isdigit() else name for name in names)
