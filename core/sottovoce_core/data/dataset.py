"""The class `Dataset`, its sources, and the validation of live records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from sottovoce_core.arrays import (
    AnyArray,
    Batch,
    BoolArray,
    FloatArray,
    IntArray,
    as_floats,
    has_unrepresentable_integers,
    summarize_fields,
)
from sottovoce_core.data.catalogue import CATALOGUE, DATA_FOLDER_VARIABLE, find_dataset_file, suggest_name
from sottovoce_core.data.cells import normalise_text
from sottovoce_core.data.columns import WRONG_VALUE_COUNT_REASON, Cells, read_cells, read_columns
from sottovoce_core.data.encoding import EncodedRecords, Encoder, format_labels, map_labels
from sottovoce_core.data.files import (
    RECORD_FILE_SUFFIXES,
    SCHEMA_FILE_SUFFIXES,
    UNCERTAIN_HEADER_REASON,
    RawTable,
    describe_column_mismatch,
    read_npz,
)
from sottovoce_core.data.memory import FILE_ADVICE, IN_MEMORY, MemoryRecords
from sottovoce_core.data.schema_inference import require_learnable
from sottovoce_core.data.spec import DataSpec, Schema
from sottovoce_core.data.synthetic import (
    SYNTHETIC_SOURCES,
    SyntheticSource,
    describe_synthetic_source,
    generate_vital_signs,
)
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.optional import import_optional
from sottovoce_core.registry import MAX_MAGNITUDE


def check_batch(features: FloatArray, labels: FloatArray, n_features: int, loss: Loss) -> None:
    """Validate records against the domain of the loss.

    An error describes shapes and rules, and quotes neither a record's value nor its place: it may reach a feeder or a log, where
    nothing of a record may appear.

    Args:
        features: must be `(records, n_features)`, finite.
        labels: must be `(records,)`, finite; class numbers from 0 for losses of many classes, 0 or 1 for those of two.
        n_features: length of a feature row, intercept included where the run appends one.
        loss: the loss of the run.

    Raises:
        DataError: one of these requirements does not hold.
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


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Records of one source, before placement on learners.

    Attributes:
        name: the source.
        features: `(records, features)`, finite.
        labels: `(records,)` in the domain of the loss.
        classes: `(records,)` rank of the original label; partitions use classes, although a binary loss has only two labels.
            None: the labels are the classes.
        learner: `(records,)` learner of each record: an index into `learner_names` if present, else into the learners of the run.
        learner_names: learners' names in the source.
        round: `(records,)` the round in which a record is learned.
        test: part held out by the source itself: `(records, features)` and `(records,)`.
        class_names: names of the classes in the source, by rank; empty if the label is a number.
        columns: names of the feature columns, for warnings; None: the source has none, or they may be values of a record.
    """

    name: str
    features: FloatArray
    labels: FloatArray
    classes: IntArray | None = None
    learner: IntArray | None = None
    learner_names: tuple[str, ...] | None = None
    round: IntArray | None = None
    test: Batch | None = None
    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None

    __repr__ = summarize_fields


def load_dataset(data: DataSpec, loss: Loss, *, folders: Sequence[Path] = (), labels_required: bool = True) -> Dataset:
    """Read the records of `data.source` and map their labels to the domain of the loss.

    Args:
        data: section of the spec.
        loss: determines the mapped labels: 0 and 1, class numbers, or unchanged numbers.
        folders: folders to search for the `.npz` files of named data sets (`get_data_folders`).
        labels_required: as in `map_labels`.

    Raises:
        SpecError: no such source, or the package that reads it is not installed.
        DataError: the records are unusable; the message names the row and the column.
    """
    if data.is_live:
        raise SpecError(
            f"data.source must be a data set or a file of records, got {data.source}, whose records come later"
        )
    if data.schema is not None:
        return _load_by_schema(data, data.schema, loss)
    table = read_source(data, folders)
    labels = table.labels if table.test is None else np.concatenate([table.labels, table.test[1]])
    mapped, classes = map_labels(labels, loss, data.positive, labels_required=labels_required)
    n = len(table.features)
    test = None if table.test is None else Batch(table.test[0], mapped[n:])
    named = () if loss.n_classes is None else tuple(format_labels(np.unique(labels)))
    placed = _convert_placement(table.learner, table.round, str(data.source))
    columns = None if table.header_reason == UNCERTAIN_HEADER_REASON else table.columns
    return Dataset(str(data.source), table.features, mapped[:n], classes[:n], *placed, test, named, columns)


def read_source(data: DataSpec, folders: Sequence[Path] = ()) -> RawTable:
    """Read the unprocessed records of `data.source`; labels are float64 or text.

    Raises:
        SpecError, DataError: as `load_dataset`.
    """
    table = _read_table(data, folders)
    _require_valid_table(table, str(data.source))
    return table if data.only_labels is None else _select_labels(table, data.only_labels)


def _select_labels(table: RawTable, wanted: tuple[int | str, ...]) -> RawTable:
    """Return the records that have one of these labels, also of the test part.

    Raises:
        SpecError: no record has one of the labels.
    """
    names = list(map(str, wanted))

    def is_wanted(labels: AnyArray) -> BoolArray:
        distinct, places = np.unique(labels, return_inverse=True)
        is_chosen: BoolArray = np.isin(format_labels(distinct), names)[places]
        return is_chosen

    if unknown := set(names).difference(format_labels(np.unique(table.labels))):
        raise SpecError(f"data.only_labels must be labels that occur, got {', '.join(sorted(unknown))}")
    used = is_wanted(table.labels)
    test = None if table.test is None else (table.test[0][rows := is_wanted(table.test[1])], table.test[1][rows])
    learner, rounds = (None if each is None else each[used] for each in (table.learner, table.round))
    return replace(
        table, features=table.features[used], labels=table.labels[used], learner=learner, round=rounds, test=test
    )


def _read_table(data: DataSpec, folders: Sequence[Path]) -> RawTable:
    """Read the source as a table whose labels are float64 or text."""
    if isinstance(data.source, SyntheticSource):
        return data.source.generate()
    if isinstance(data.source, MemoryRecords):
        return _convert_labels(data.source.read(data.label), IN_MEMORY)
    if data.source == IN_MEMORY:
        raise SpecError(f"data.source: the records of this spec were in the memory of a Python process: {FILE_ADVICE}")
    known = CATALOGUE.get(data.source)
    if known is not None and known.is_synthetic:
        return generate_vital_signs()
    if known is not None and not known.originals:
        return RawTable(*_read_shipped(data.source))
    if known is not None:
        return _convert_labels(read_npz(_find_public_file(data.source, folders)), data.source)
    if data.source in SYNTHETIC_SOURCES.built_in_classes:
        raise SpecError(f"data.source {data.source} needs its fields: write {describe_synthetic_source(data.source)}")
    path = Path(data.source)
    if path.suffix.lower() not in RECORD_FILE_SUFFIXES:
        raise SpecError(
            f"data.source must be one of {', '.join(CATALOGUE)}, a path to a {', '.join(RECORD_FILE_SUFFIXES)} file, or the "
            f"fields of a synthetic source ({', '.join(SYNTHETIC_SOURCES.built_in_classes)}), got {path}"
            f"{suggest_name(data.source)}"
        )
    require_source_file(path)
    return _convert_labels(
        read_npz(path) if path.suffix.lower() == ".npz" else read_columns(path, data.label), data.source
    )


def _read_shipped(name: str) -> tuple[FloatArray, FloatArray]:
    """Read features and labels of a data set that scikit-learn ships.

    The file is read directly, because importing scikit-learn takes two seconds of every command. Its loader is imported
    only where a version keeps the file elsewhere.

    Raises:
        SpecError: scikit-learn is not installed.
    """
    package, (file, heading_lines) = find_spec("sklearn"), _SHIPPED_FILES[name]
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets" / "data" / file
        if path.is_file():
            rows = np.loadtxt(path, delimiter=",", skiprows=heading_lines)
            return rows[:, :-1].copy(), rows[:, -1].copy()
    loaders = import_optional("sklearn.datasets", "scikit-learn", f"data.source {name}")
    features, labels = getattr(loaders, f"load_{name}")(return_X_y=True)
    return as_floats(features), as_floats(labels)


_SHIPPED_FILES = {"breast_cancer": ("breast_cancer.csv", 1), "digits": ("digits.csv.gz", 0)}
"""Files of scikit-learn, and the number of lines before the first record."""


def _load_by_schema(data: DataSpec, schema: Schema, loss: Loss) -> Dataset:
    """Read all records of a file by a schema."""
    encoder, path = Encoder.from_schema(schema, loss, data.positive), Path(str(data.source))
    if isinstance(data.source, MemoryRecords):
        found, learner, rounds = _encode_cells(IN_MEMORY, data.source.read_cells(), encoder)
    else:
        found, learner, rounds = encode_file(path, encoder)
    if found.refusals:
        listed_reasons = "; ".join(f"{reason} ({times:,})" for reason, times in found.reasons.items())
        row, why = next(iter(found.refusals.items()))
        counts = f"{len(found.refusals):,} of {len(found.accepted_mask):,} records do not fit the schema"
        hint = f"; {found.hint}" if found.hint else ""
        raise DataError(f"{path}: {counts}: {listed_reasons}; the first is row {row} (counted from 0), {why}{hint}")
    placed = _convert_placement(learner, rounds, str(data.source))
    named = schema.label.classes or ()
    return Dataset(str(data.source), found.features, found.labels, found.classes, *placed, class_names=named)


def encode_file(path: Path, encoder: Encoder) -> tuple[EncodedRecords, AnyArray | None, AnyArray | None]:
    """Encode the records of a file, whose columns must be those of the schema; also return its columns `learner` and `round`.

    Raises:
        SpecError: no such file, or another format.
        DataError: unreadable, a field has no column, a column is neither declared nor ignored, or there is no record.
    """
    ragged = list[int]()
    return _encode_cells(path, read_cells(require_source_file(path, schema=True), ragged), encoder, ragged)


def _encode_cells(
    source: Path | str, cells: Cells, encoder: Encoder, ragged: Sequence[int] = ()
) -> tuple[EncodedRecords, AnyArray | None, AnyArray | None]:
    """Encode columns as `encode_file` does those of a file; `ragged` has rows with another number of values."""
    columns, learner, rounds = cells
    schema, there = encoder.schema, {normalise_text(name) for name in columns}
    declared = [*schema.features, schema.label.name]
    wanted = {name: name in there for name in declared}
    if why := describe_column_mismatch(
        there, wanted, {*declared, *schema.ignored}, "declare it, or name it under ignored"
    ):
        raise DataError(f"{source} {why}")
    found = encoder.encode_columns(columns).merge_unreadable(dict.fromkeys(ragged, WRONG_VALUE_COUNT_REASON))
    if not len(found.accepted_mask):
        raise DataError(f"{source} must hold at least one record")
    return found, learner, rounds


def require_source_file(path: Path, *, schema: bool = False) -> Path:
    """Return the path of a file of records, if the file exists.

    Args:
        path: path of the file.
        schema: whether a schema reads it.

    Raises:
        SpecError: no such file, or another format.
    """
    if schema and path.suffix.lower() not in SCHEMA_FILE_SUFFIXES:
        raise SpecError(f"a file for a schema must be {' or '.join(SCHEMA_FILE_SUFFIXES)}, got {path}")
    if path.suffix.lower() not in RECORD_FILE_SUFFIXES:
        raise SpecError(f"FILE must be a {', '.join(RECORD_FILE_SUFFIXES)} file of records, got {path}")
    if path.is_dir():
        raise SpecError(f"records must be in a file, got the folder {path}; name a file in it")
    if not path.is_file():
        raise SpecError(f"records must be in a file that exists, got {path} (absolute path {path.absolute()})")
    return path


def _find_public_file(source: str, folders: Sequence[Path]) -> Path:
    """Find the file of a public data set.

    Raises:
        SpecError: not found; names the command that downloads it, and the paths searched.
    """
    if (path := find_dataset_file(source, folders)) is not None:
        return path
    places = (
        ", ".join(str(folder / f"{source}.npz") for folder in folders)
        or f"no folder, because {DATA_FOLDER_VARIABLE} is not set"
    )
    raise SpecError(
        f"data.source {source} must be on this machine, and is not: run `sottovoce data fetch {source}`, or set "
        f"{DATA_FOLDER_VARIABLE} to a folder that has {source}.npz; searched {places}"
    )


def _convert_labels(table: RawTable, source: str) -> RawTable:
    """Return the table with labels as float64 or text."""

    def plain(labels: AnyArray) -> AnyArray:
        if labels.dtype.kind not in "biufUS":
            raise DataError(f"{source}: labels must be numbers or text, got {labels.dtype}")
        return (
            labels.astype(np.str_)
            if labels.dtype.kind in "US" or has_unrepresentable_integers(labels)
            else as_floats(labels)
        )

    test = None if table.test is None else (table.test[0], plain(table.test[1]))
    return replace(table, labels=plain(table.labels), test=test)


# ---- checks ----------------------------------------------------------------------------------------------


def _require_valid_table(table: RawTable, source: str) -> None:
    """Require matching shapes and finite numbers."""
    if not table.features.size:
        raise DataError(f"{source} must hold at least one record and one feature, got {table.features.shape}")
    for name, values in (("labels", table.labels), ("learner", table.learner), ("round", table.round)):
        _check_length(name, values, len(table.features), source)
    _check_finite(table, table.features, table.labels, source)
    require_learnable(table, source)
    if table.test is not None:
        features, labels = table.test
        if features.shape[1] != table.features.shape[1]:
            want = table.features.shape[1]
            raise DataError(
                f"{source}: test records must have {want} features like the others, got {features.shape[1]}"
            )
        if labels.dtype.kind != table.labels.dtype.kind:
            raise DataError(
                f"{source}: labels must be all numbers or all text, got {table.labels.dtype}, {labels.dtype}"
            )
        _check_length("test labels", labels, len(features), source)
        _check_finite(table, features, labels, f"{source}, test part")


def _check_length(name: str, values: AnyArray | None, records: int, source: str) -> None:
    """Require one entry a record."""
    if values is not None and values.shape != (records,):
        raise DataError(f"{source}: {name} must have the shape ({records},), one for each record, got {values.shape}")


def _check_finite(table: RawTable, features: FloatArray, labels: AnyArray, source: str) -> None:
    """Raise an error that names the first number that is not finite, or so large that its square is not."""
    if features.size and not -MAX_MAGNITUDE <= features.min() <= features.max() <= MAX_MAGNITUDE:  # not-a-number, too
        odd = ~(np.abs(features) <= MAX_MAGNITUDE)
        row, column = (int(index) for index in np.argwhere(odd)[0])
        where = f"{source}: row {row} (counted from 0), {table.describe_column(column)}"
        raise DataError(f"{where} {_describe_number_requirement(features[row, column])}")
    if labels.dtype.kind == "f" and (odd := ~(np.abs(labels) <= MAX_MAGNITUDE)).any():
        row = int(np.flatnonzero(odd)[0])
        raise DataError(
            f"{source}: row {row} (counted from 0), label column {_describe_number_requirement(labels[row])}"
        )


def _describe_number_requirement(number: float) -> str:
    """State the requirement for a number, and the number; a finite one is not quoted."""
    if np.isfinite(number):
        return f"must be between -{MAX_MAGNITUDE:g} and {MAX_MAGNITUDE:g}, got a larger number: rescale the column, or drop it"
    return f"must be a finite number, got {number}"


def _convert_placement(
    learner: AnyArray | None, rounds: AnyArray | None, source: str
) -> tuple[IntArray | None, tuple[str, ...] | None, IntArray | None]:
    """Convert the placement columns: learners as indices, names of these indices if the column holds names, and rounds."""
    placed = None if rounds is None else _convert_indices(rounds, "round", source)
    if learner is None or learner.dtype.kind not in "US":
        return None if learner is None else _convert_indices(learner, "learner", source), None, placed
    names, index = np.unique(learner.astype(np.str_), return_inverse=True)
    return index.astype(np.int64), tuple(map(str, names)), placed


def _convert_indices(values: AnyArray, column: str, source: str) -> IntArray:
    """Convert a column of integers from 0."""
    if values.dtype.kind not in "biuf":
        raise DataError(f"{source}: column {column!r} must hold integers, got {values.dtype}")
    numbers = as_floats(values)
    bad = np.flatnonzero(~((numbers >= 0) & (numbers < 2**53) & (numbers == np.floor(numbers))))
    if bad.size:
        where = f"{source}: row {bad[0]} (counted from 0), column {column!r}"
        raise DataError(f"{where} must be an integer >= 0, got {numbers[bad[0]]:g}")
    return numbers.astype(np.int64)
