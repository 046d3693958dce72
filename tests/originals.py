"""The files that the real data sets were made from, rebuilt from the arrays in `$SOTTOVOCE_DATA`, byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def rebuilt(source: str, folder: Path) -> dict[str, bytes]:
    """The originals of a source, by their names; of poker's test file only the part that there is."""
    with np.load(folder / f"{source}.npz", allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return _REBUILD[source](arrays)


def _mushrooms(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    letters = [np.array([*arrays[f"values_{j:02}"], "?"])[arrays["X"][:, j]] for j in range(22)]  # -1: the last one
    return {"agaricus-lepiota.data": _lines([np.array(["e", "p"])[arrays["y"]], *letters])}


def _adult(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    def part(name: str, dot: str) -> bytes:
        numbers, codes = iter(arrays[f"num_{name}"].T), iter(arrays[f"cat_{name}"].T)
        words = [np.array([*arrays[f"values_{column}"], "?"]) for column in arrays["cat_columns"]]
        spelled = (of[code] for of, code in zip(words, codes, strict=True))
        columns = [next(numbers if j in (0, 2, 4, 10, 11, 12) else spelled) for j in range(14)]
        labels = np.array([f"<=50K{dot}", f">50K{dot}"])[arrays[f"y_{name}"]]
        return _lines([*columns, labels], ", ") + b"\n"

    return {"adult.data": part("train", ""), "adult.test": b"|1x3 Cross validator\n" + part("test", ".")}


def _a9a(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    def part(features: Array, labels: Array) -> bytes:
        rows = zip(features, labels, strict=True)
        ones = (" ".join(f"{k + 1}:1" for k in np.flatnonzero(row)) + f"|{label:+d}" for row, label in rows)
        return "".join(f"{label} {text} \n" for text, _, label in (each.partition("|") for each in ones)).encode()

    return {
        "a9a": part(arrays["X_train"], arrays["y_train"]),
        "a9a.t": part(arrays["X_test"], arrays["y_test"]),
    }


def _letter(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    return {"letter-recognition.data": _lines([arrays["class_names"][arrays["y"]], *arrays["X"].T])}


def _poker(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    def part(features: Array, labels: Array) -> bytes:
        return _lines([*features.T, labels], end="\r\n")

    return {
        "poker-hand-training-true.data": part(arrays["X_train"], arrays["y_train"]),
        "poker-hand-testing.data": part(arrays["X_test_part"], arrays["y_test_part"]),
    }


def _mnist(arrays: Mapping[str, Array]) -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx(arrays["X_train"]),
        "train-labels-idx1-ubyte": idx(arrays["y_train"]),
        "t10k-images-idx3-ubyte": idx(arrays["X_test"]),
        "t10k-labels-idx1-ubyte": idx(arrays["y_test"]),
    }


def idx(values: Array) -> bytes:
    """Bytes, in MNIST's own form."""
    return struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape) + values.tobytes()


def _lines(columns: Iterable[Array], between: str = ",", end: str = "\n") -> bytes:
    rows = zip(*(column.astype(str) for column in columns), strict=True)
    return "".join(between.join(row) + end for row in rows).encode()


_REBUILD: Mapping[str, Callable[[Mapping[str, Array]], dict[str, bytes]]] = {
    "mushrooms": _mushrooms,
    "adult": _adult,
    "a9a": _a9a,
    "letter": _letter,
    "mnist": _mnist,
    "poker": _poker,
}
