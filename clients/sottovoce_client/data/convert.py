"""From the files that owners publish to the arrays that `read_npz` reads, by their form.

Labels are numbers, in the order of the source's `classes`. Categories become a column for each value; `?` is a value that is
missing, and in none of these. The files are what their digests say: no stranger's archive comes here.
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
    """The arrays of a data set.

    Args:
        source: that has a name.
        files: its originals, by their names.

    Raises:
        DataError: they are not what its owner's files were, or do not have as many records and classes.
        SpecError: what reads them is not installed.
    """
    try:
        arrays = _FORMS[source.file_format](source, [files[original.name] for original in source.originals])
    except (ValueError, KeyError, IndexError, struct.error, tarfile.TarError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{', '.join(files)} cannot be read as {source.title}: {why}; has its form changed?") from None
    for what, labels, wanted in (
        ("records", "y_train", source.records),
        ("records for tests", "y_test", source.test_records),
    ):
        if (n := len(arrays.get(labels, ()))) != wanted:
            raise DataError(
                f"{', '.join(files)} must hold {wanted:,} {what}, got {n:,}: not whole, or of another version"
            )
    return arrays


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    """Numbers as they are, then one column for each value that a category has in the first file."""
    tables = [_table(source, content) for content in files]
    numbers, words = dict[str, list[Any]](), dict[str, list[Any]]()
    for name in source.columns:
        if name == "label" or name in source.ignored_columns:
            continue
        columns = [table[name] for table in tables]
        if columns[0].dtype.kind != "O":
            numbers[name] = columns
            continue
        for value in sorted({*columns[0]} - {None}):
            words[f"{name}={value}"] = [column == value for column in columns]
    features = {**numbers, **words}
    arrays = {"columns": np.array([*features])}
    for k, part in enumerate(("train", "test")[: len(tables)]):
        arrays[f"X_{part}"] = _narrow(np.column_stack([columns[k] for columns in features.values()]))
        arrays[f"y_{part}"] = _labels(tables[k]["label"], source)
    return arrays


def _table(source: CatalogueEntry, content: bytes) -> Arrays:
    """Columns of numbers, or of text and None; lines that begin with `|`, `%` or `@` say nothing."""
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


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Whole numbers in as few bytes as hold them."""
    if values.dtype.kind == "f":
        return values
    return values.astype(np.result_type(*map(np.min_scalar_type, (values.min(), values.max()))))


def _labels(column: npt.NDArray[Any], source: CatalogueEntry) -> npt.NDArray[Any]:
    """Numbers as they are; of text, where each label stands among the classes, a final dot aside.

    Raises:
        ValueError: it is none of them.
    """
    if column.dtype.kind != "O":
        return column
    classes = source.labels or source.classes
    return np.array([classes.index(label.rstrip(".")) for label in column], dtype=np.uint8)


def _libsvm(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    datasets = import_optional("sklearn.datasets", "scikit-learn", "reading files of LIBSVM")
    arrays: Arrays = {}
    for part, content in zip(("train", "test"), files, strict=True):
        features, labels = datasets.load_svmlight_file(
            io.BytesIO(content), n_features=source.features, zero_based=False
        )
        arrays |= {f"X_{part}": features.toarray().astype(np.uint8), f"y_{part}": labels.astype(np.int8)}
    return arrays


# ---- pictures --------------------------------------------------------------------------------------------------------


def _idx_files(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    return dict(zip(("X_train", "y_train", "X_test", "y_test"), map(_idx, files), strict=True))


def _idx(content: bytes) -> npt.NDArray[np.uint8]:
    """Bytes in MNIST's own form: two bytes of zero, 8 for bytes, the number of axes, then each length, big-endian."""
    kind, axes = struct.unpack_from(">3sB", content)
    if kind != b"\0\0\x08":
        raise ValueError(f"an idx file of bytes must begin with 0x000008, got 0x{kind.hex()}")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 * (1 + axes)).reshape(shape)


def _cifar(source: CatalogueEntry, files: Sequence[bytes]) -> Arrays:
    """A record is its label and three planes of 32 x 32; pictures become (height, width, colour)."""
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    with tarfile.open(fileobj=io.BytesIO(files[0])) as archive:
        members: list[Any] = [archive.extractfile(f"cifar-10-batches-bin/{name}") for name in names]
        records = [np.frombuffer(member.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32) for member in members]
    arrays: Arrays = {}
    for part, rows in (("train", np.concatenate(records[:5])), ("test", records[5])):
        pictures = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays |= {f"X_{part}": np.ascontiguousarray(pictures), f"y_{part}": rows[:, 0]}
    return arrays


_FORMS: Mapping[str, Callable[[CatalogueEntry, Sequence[bytes]], Arrays]] = {
    "table": _tables,
    "libsvm": _libsvm,
    "idx": _idx_files,
    "cifar": _cifar,
}
