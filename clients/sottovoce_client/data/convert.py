"""Conversion of the files that publishers provide to the arrays that `read_npz` reads, by file format.

Labels are numbers, in the order of the source's `classes`. A category becomes a column for each value; `?` is a missing value,
and has no column. The files match their digests: no untrusted archive is read here.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sottovoce_core.data.catalogue import CatalogueEntry
from sottovoce_core.errors import DataError
from sottovoce_core.optional import import_optional

Arrays = dict[str, npt.NDArray[Any]]


def convert(source: CatalogueEntry, files: Mapping[str, bytes]) -> Arrays:
    """Convert the original files of a data set to arrays.

    Args:
        source: Entry of the catalogue.
        files: Contents of its original files, by name.

    Raises:
        DataError: The files differ from the published ones, or have another number of records or classes.
        SpecError: A package that reads them is not installed.
    """
    try:
        arrays = _CONVERTERS[source.file_format](source, [files[original.name] for original in source.originals])
    except (ValueError, KeyError, IndexError, struct.error, tarfile.TarError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{', '.join(files)} cannot be read as {source.title}: {reason}; has its format changed?"
        ) from None
    for noun, labels, expected in (
        ("records", "y_train", source.records),
        ("records for tests", "y_test", source.test_records),
    ):
        if (n := len(arrays.get(labels, ()))) != expected:
            raise DataError(
                f"{', '.join(files)} must contain {expected:,} {noun}, got {n:,}: they are incomplete, or of another version"
            )
    return arrays


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    """Convert tables: numbers as they are, then one column for each value that a category has in the first file."""
    tables = [_table(source, content) for content in files]
    numeric, categorical = dict[str, list[Any]](), dict[str, list[Any]]()
    for name in source.columns:
        if name == "label" or name in source.ignored_columns:
            continue
        columns = [table[name] for table in tables]
        if columns[0].dtype.kind != "O":
            numeric[name] = columns
            continue
        for value in sorted({*columns[0]} - {None}):
            categorical[f"{name}={value}"] = [column == value for column in columns]
    features = {**numeric, **categorical}
    arrays = {"columns": np.array([*features])}
    for k, part in enumerate(("train", "test")[: len(tables)]):
        arrays[f"X_{part}"] = _shrink(np.column_stack([columns[k] for columns in features.values()]))
        arrays[f"y_{part}"] = _labels(tables[k]["label"], source)
    return arrays


def _table(source: CatalogueEntry, content: bytes) -> Arrays:
    """Read columns of numbers, or of text and None; skip lines that begin with `|`, `%` or `@`."""
    csv, compute = (
        import_optional(name, "pyarrow", "reading tables of data sets") for name in ("pyarrow.csv", "pyarrow.compute")
    )
    text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    lines = b"\n".join(line for line in text.splitlines() if line.strip() and line[:1] not in b"|%@")
    table = csv.read_csv(
        io.BytesIO(lines),
        read_options=csv.ReadOptions(column_names=source.columns),
        convert_options=csv.ConvertOptions(null_values=["?", " ?"], strings_can_be_null=True),
    )
    return {
        name: (compute.utf8_trim_whitespace(column) if str(column.type) == "string" else column).to_numpy()
        for name, column in zip(source.columns, table.columns, strict=True)
    }


def _shrink(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert integers to the smallest type that holds them."""
    if values.dtype.kind == "f":
        return values
    return values.astype(np.result_type(*map(np.min_scalar_type, (values.min(), values.max()))))


def _labels(column: npt.NDArray[Any], source: CatalogueEntry) -> npt.NDArray[Any]:
    """Return numeric labels as they are; for text, the index of each label among the classes, without a final dot.

    Raises:
        ValueError: A label is not among the classes.
    """
    if column.dtype.kind != "O":
        return column
    classes = source.labels or source.classes
    return np.array([classes.index(label.rstrip(".")) for label in column], dtype=np.uint8)


def _libsvm(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    datasets = import_optional("sklearn.datasets", "scikit-learn", "reading LIBSVM files")
    arrays: Arrays = {}
    for part, content in zip(("train", "test"), files, strict=True):
        features, labels = datasets.load_svmlight_file(
            io.BytesIO(content), n_features=source.features, zero_based=False
        )
        arrays |= {f"X_{part}": features.toarray().astype(np.uint8), f"y_{part}": labels.astype(np.int8)}
    return arrays


# ---- images ----------------------------------------------------------------------------------------------------------


def _idx_files(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    return dict(zip(("X_train", "y_train", "X_test", "y_test"), map(_idx, files), strict=True))


def _idx(content: bytes) -> npt.NDArray[np.uint8]:
    """Decode an array of bytes in the IDX format of MNIST: two zero bytes, 8 for bytes, number of axes, lengths, big-endian."""
    kind, axes = struct.unpack_from(">3sB", content)
    if kind != b"\0\0\x08":
        raise ValueError(f"an idx file of bytes must begin with 0x000008, got 0x{kind.hex()}")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 * (1 + axes)).reshape(shape)


def _cifar(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    """Convert records of a label and three planes of 32 x 32 to images (height, width, colour)."""
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    with tarfile.open(fileobj=io.BytesIO(files[0])) as archive:
        members: list[Any] = [archive.extractfile(f"cifar-10-batches-bin/{name}") for name in names]
        records = [np.frombuffer(member.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32) for member in members]
    arrays: Arrays = {}
    for part, rows in (("train", np.concatenate(records[:5])), ("test", records[5])):
        images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays |= {f"X_{part}": np.ascontiguousarray(images), f"y_{part}": rows[:, 0]}
    return arrays


_CONVERTERS: Mapping[str, Callable[[CatalogueEntry, Sequence[bytes]], Arrays]] = {
    "table": _tables,
    "libsvm": _libsvm,
    "idx": _idx_files,
    "cifar": _cifar,
}
