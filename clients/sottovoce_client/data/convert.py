"""From the files that owners publish to the arrays that `read_npz` reads, one function for each data set.

A value that is missing (`?`) has the code -1. Labels are numbers, in the order of the source's `classes`. Archives are unpacked
in memory: never more than was expected, and no name in an archive becomes a path.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from sottovoce_core.data.known import KnownSource
from sottovoce_core.errors import DataError
from sottovoce_core.optional import import_extra

_BROKEN = (EOFError, OSError, zlib.error, tarfile.TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError)
"""What Python's readers raise of a file that is torn, of another kind, encrypted, or packed as they do not know."""


def gunzip(packed: bytes, most: int) -> bytes:
    """What is in a gzip file.

    Raises:
        DataError: it is none, it ends too early, or there are more than `most` bytes in it.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            return _read(file, most)
    except EOFError:
        raise DataError(f"the gzip file ends too early, after {len(packed):,} bytes: it did not arrive whole") from None
    except _BROKEN:
        raise DataError("must be a gzip file, and is none, or a broken one") from None


def unzip(packed: bytes, member: str, most: int) -> bytes:
    """A file of a zip archive.

    Raises:
        DataError: it is no such archive, lacks the file, or the file has more than `most` bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive, archive.open(member) as file:
            return _read(file, most)
    except KeyError:
        raise DataError(f"the zip archive must hold {member}, and does not") from None
    except _BROKEN:
        raise DataError("must be a zip archive, and is none, or a broken one") from None


def _untar(packed: bytes, members: Sequence[str], most: int) -> list[bytes]:
    """Files of a `.tar.gz` archive.

    Raises:
        DataError: it is no such archive, lacks one of them, one is a link, or there are more than `most` bytes in it.
    """
    content = gunzip(packed, most)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            return [_member(archive, member, most) for member in members]
    except _BROKEN:
        raise DataError("must be a tar archive, and is none, or a broken one") from None


def _member(archive: tarfile.TarFile, name: str, most: int) -> bytes:
    try:
        found = archive.getmember(name)
    except KeyError:
        raise DataError(f"the tar archive must hold {name}, and does not") from None
    file = archive.extractfile(found) if found.isreg() else None  # a link leads elsewhere
    if file is None:
        raise DataError(f"{name} in the tar archive must be a file, and is something else")
    with file:
        return _read(file, most)


def _read(file: IO[bytes] | gzip.GzipFile, most: int) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"there must be at most {most:,} bytes in it, and there are more")
    return content


Arrays = dict[str, npt.NDArray[Any]]
Files = Mapping[str, bytes]


def convert(source: KnownSource, files: Files) -> Arrays:
    """The arrays of a data set.

    Args:
        source: that has a name.
        files: its originals, by their names.

    Raises:
        DataError: they are not what its owner's files were, or do not have as many records and classes.
        SpecError: what reads them is not installed.
    """
    try:
        arrays = _CONVERT[source.name](source, files)
    except (ValueError, KeyError, IndexError, struct.error) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{', '.join(files)} cannot be read as {source.title}: {why}; has its form changed?") from None
    labels = {"records": arrays.get("y", arrays.get("y_train")), "records for tests": arrays.get("y_test")}
    for what, (found, wanted) in zip(
        labels, zip(labels.values(), (source.records, source.held_out), strict=True), strict=True
    ):
        n = 0 if found is None else len(found)
        if n != wanted:
            raise DataError(
                f"{', '.join(files)} must hold {wanted:,} {what}, got {n:,}: not whole, or of another version"
            )
    return arrays


# ---- tables ----------------------------------------------------------------------------------------------------------

_MUSHROOM_COLUMNS = (
    "cap-shape",
    "cap-surface",
    "cap-color",
    "bruises",
    "odor",
    "gill-attachment",
    "gill-spacing",
    "gill-size",
    "gill-color",
    "stalk-shape",
    "stalk-root",
    "stalk-surface-above-ring",
    "stalk-surface-below-ring",
    "stalk-color-above-ring",
    "stalk-color-below-ring",
    "veil-type",
    "veil-color",
    "ring-number",
    "ring-type",
    "spore-print-color",
    "population",
    "habitat",
)


def _mushrooms(source: KnownSource, files: Files) -> Arrays:
    """Codes of 22 categories, and one column for each value of those in which nothing is missing."""
    table = _table(files["agaricus-lepiota.data"], 1 + len(_MUSHROOM_COLUMNS))
    values = [_values(column) for column in table[:, 1:].T]
    codes = np.column_stack([_codes(column, of) for column, of in zip(table[:, 1:].T, values, strict=True)])
    whole = [j for j in range(len(values)) if (codes[:, j] >= 0).all()]  # LIBSVM's own rule: without stalk-root
    one_hot = np.hstack([codes[:, j, None] == np.arange(len(values[j])) for j in whole])
    names = [f"{_MUSHROOM_COLUMNS[j]}={value}" for j in whole for value in values[j]]
    return {
        "X": codes,
        "y": _labels(table[:, 0], ("e", "p")),
        "columns": np.array(_MUSHROOM_COLUMNS),
        "class_names": np.array(source.classes),
        "X_onehot": one_hot.astype(np.uint8),
        "onehot_names": np.array(names),
        **{f"values_{j:02}": of for j, of in enumerate(values)},
    }


_ADULT_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)
_ADULT_NUMBERS = (0, 2, 4, 10, 11, 12)
_ADULT_CATEGORIES = (1, 3, 5, 6, 7, 8, 9, 13)


def _adult(source: KnownSource, files: Files) -> Arrays:
    """Numbers as they are, and codes of categories; the values are those of the training file."""
    arrays: Arrays = {}
    tables = {"train": _table(files["adult.data"], 15), "test": _table(files["adult.test"], 15)}
    values = {j: _values(tables["train"][:, j]) for j in _ADULT_CATEGORIES}
    for part, table in tables.items():
        arrays[f"num_{part}"] = table[:, _ADULT_NUMBERS].astype(np.int32)
        arrays[f"cat_{part}"] = np.column_stack([_codes(table[:, j], values[j]) for j in _ADULT_CATEGORIES])
        arrays[f"y_{part}"] = _labels(np.char.rstrip(table[:, 14], "."), source.classes)
    return {
        **arrays,
        "num_columns": np.array([_ADULT_COLUMNS[j] for j in _ADULT_NUMBERS]),
        "cat_columns": np.array([_ADULT_COLUMNS[j] for j in _ADULT_CATEGORIES]),
        "class_names": np.array(source.classes),
        **{f"values_{_ADULT_COLUMNS[j]}": of for j, of in values.items()},
    }


def _a9a(source: KnownSource, files: Files) -> Arrays:
    datasets = import_extra("sklearn.datasets", "scikit-learn", "reading files of LIBSVM")

    def part(name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        features, labels = datasets.load_svmlight_file(
            io.BytesIO(files[name]), n_features=source.features, zero_based=False
        )
        return features.toarray().astype(np.uint8), labels.astype(np.int8)

    (train, y_train), (test, y_test) = part("a9a"), part("a9a.t")
    return {"X_train": train, "y_train": y_train, "X_test": test, "y_test": y_test}


_LETTER_COLUMNS = (
    *("x-box", "y-box", "width", "high", "onpix", "x-bar", "y-bar", "x2bar", "y2bar", "xybar", "x2ybr", "xy2br"),
    *("x-ege", "xegvy", "y-ege", "yegvx"),
)


def _letter(source: KnownSource, files: Files) -> Arrays:
    table = _table(files["letter-recognition.data"], 1 + len(_LETTER_COLUMNS))
    return {
        "X": table[:, 1:].astype(np.uint8),
        "y": _labels(table[:, 0], source.classes),
        "columns": np.array(_LETTER_COLUMNS),
        "class_names": np.array(source.classes),
    }


def _poker(source: KnownSource, files: Files) -> Arrays:
    """Suit and rank of five cards."""
    columns = [f"{what}{card}" for card in range(1, 6) for what in "SC"]
    train = _numbers(files["poker-hand-training-true.data"], 11, np.uint8)
    test = _numbers(files["poker-hand-testing.data"], 11, np.uint8)
    return {
        "X_train": train[:, :10],
        "y_train": train[:, 10],
        "X_test": test[:, :10],
        "y_test": test[:, 10],
        "columns": np.array(columns),
        "class_names": np.array(source.classes),
    }


_COVTYPE_COLUMNS = (
    "elevation",
    "aspect",
    "slope",
    "horizontal-distance-to-hydrology",
    "vertical-distance-to-hydrology",
    "horizontal-distance-to-roadways",
    "hillshade-9am",
    "hillshade-noon",
    "hillshade-3pm",
    "horizontal-distance-to-fire-points",
    *(f"wilderness-area-{k}" for k in range(1, 5)),
    *(f"soil-type-{k}" for k in range(1, 41)),
)


def _covtype(source: KnownSource, files: Files) -> Arrays:
    """Labels are 1 to 7, as in the file."""
    text = gunzip(files["covtype.data.gz"], 1 << 28)
    table = _numbers(text, 1 + len(_COVTYPE_COLUMNS), np.int16)
    return {
        "X": table[:, :-1],
        "y": table[:, -1].astype(np.uint8),
        "columns": np.array(_COVTYPE_COLUMNS),
        "class_names": np.array(source.classes),
    }


def _electricity(source: KnownSource, files: Files) -> Arrays:
    """Days of the week are the numbers 1 to 7, as in the file."""
    arff = import_extra("scipy.io.arff", "scipy", "reading .arff files")
    try:
        table, attributes = arff.loadarff(io.StringIO(files["electricity.arff"].decode("utf-8")))
    except (arff.ArffError, NotImplementedError, StopIteration) as error:
        raise ValueError(str(error) or "no ARFF file") from None
    *columns, label = attributes.names()
    if len(columns) != source.features:
        raise ValueError(f"there must be {source.features} attributes and a class, got {[*columns, label]}")
    return {
        "X": np.column_stack([table[name].astype(np.float64) for name in columns]),
        "y": _labels(table[label].astype(np.str_), source.classes),
        "columns": np.array(columns),
        "class_names": np.array(source.classes),
    }


# ---- pictures --------------------------------------------------------------------------------------------------------


def _mnist(source: KnownSource, files: Files) -> Arrays:
    return {
        "X_train": _idx(files["train-images-idx3-ubyte"], 3),
        "y_train": _idx(files["train-labels-idx1-ubyte"], 1),
        "X_test": _idx(files["t10k-images-idx3-ubyte"], 3),
        "y_test": _idx(files["t10k-labels-idx1-ubyte"], 1),
    }


def _idx(content: bytes, axes: int) -> npt.NDArray[np.uint8]:
    """Bytes in MNIST's own form: two bytes of zero, 8 for bytes, the number of axes, then each length, big-endian."""
    magic, *shape = struct.unpack_from(f">{1 + axes}I", content)
    if magic != 0x800 + axes:
        raise ValueError(f"an idx file of bytes with {axes} axes begins with {0x800 + axes:#06x}, got {magic:#06x}")
    return np.frombuffer(content, np.uint8, offset=4 * (1 + axes)).reshape(shape)


_CIFAR_FOLDER = "cifar-10-batches-bin"
_CIFAR_SHAPE = (3, 32, 32)


def _cifar10(source: KnownSource, files: Files) -> Arrays:
    """A record is its label and three planes of 32 x 32; pictures become (height, width, colour)."""
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    batches = _untar(files["cifar-10-binary.tar.gz"], [f"{_CIFAR_FOLDER}/{name}" for name in names], 1 << 28)
    records = [np.frombuffer(batch, np.uint8).reshape(-1, 1 + int(np.prod(_CIFAR_SHAPE))) for batch in batches]

    def pictures(part: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(part[:, 1:].reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1))

    train, test = np.concatenate(records[:5]), records[5]
    return {
        "X_train": pictures(train),
        "y_train": train[:, 0],
        "X_test": pictures(test),
        "y_test": test[:, 0],
        "class_names": np.array(source.classes),
    }


# ---- parts of a table ------------------------------------------------------------------------------------------------


def _table(content: bytes, columns: int) -> npt.NDArray[np.str_]:
    """`(rows, columns)` of a file with commas between; empty lines and those that begin with a bar say nothing."""
    lines = (line for line in content.decode("ascii").splitlines() if line.strip() and not line.startswith("|"))
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    for k, row in enumerate(rows, 1):
        if len(row) != columns:
            raise ValueError(f"record {k} must have {columns} fields, got {len(row)}")
    return np.array(rows, dtype=np.str_).reshape(len(rows), columns)


def _numbers(content: bytes, columns: int, kind: type[np.integer[Any]]) -> npt.NDArray[Any]:
    """The same of whole numbers alone."""
    found = np.loadtxt(io.BytesIO(content), dtype=kind, delimiter=",", ndmin=2)
    if found.shape[1] != columns:
        raise ValueError(f"records must have {columns} fields, got {found.shape[1]}")
    return found


def _values(column: npt.NDArray[np.str_]) -> npt.NDArray[np.str_]:
    """What occurs in a column, in alphabetical order, as narrow as it may be."""
    found = sorted(set(column.tolist()) - {"?"})
    return np.array(found, dtype=np.str_)


def _codes(column: npt.NDArray[np.str_], values: npt.NDArray[np.str_]) -> npt.NDArray[np.int8]:
    """Where each value stands among `values`; -1: it is missing."""
    index = {"?": -1, **{str(value): k for k, value in enumerate(values)}}
    return np.array([index[value] for value in column.tolist()], dtype=np.int8)


def _labels(column: npt.NDArray[np.str_], classes: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Where each label stands among the classes.

    Raises:
        ValueError: it is none of them.
    """
    return np.array([classes.index(label) for label in column.tolist()], dtype=np.uint8)


_CONVERT: Mapping[str, Callable[[KnownSource, Files], Arrays]] = {
    "mushrooms": _mushrooms,
    "adult": _adult,
    "a9a": _a9a,
    "letter": _letter,
    "mnist": _mnist,
    "poker": _poker,
    "cifar10": _cifar10,
    "covtype": _covtype,
    "electricity": _electricity,
}
