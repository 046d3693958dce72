"""Catalogue of named data sets: content, owner, published files, and local copies.

`catalogue.toml` has the facts; nothing is read or downloaded here. Data sets that no package ships are `NAME.npz` in a folder;
`sottovoce data fetch` puts them there.
"""

from __future__ import annotations

import difflib
import importlib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class OriginalFile:
    """A file as published by its owner.

    Attributes:
        name: file name given by the owner; refers to the unpacked file, also if published as `NAME.gz` or in a zip archive.
        urls: URLs, to be tried in this order; `URL#MEMBER` is a file in a zip archive.
        size_bytes: size of the unpacked file; approximate if the owner does not state it.
        digest: `sha256:` or `md5:` and hexadecimal figures, of the unpacked file.
    """

    name: str
    urls: tuple[str, ...]
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A data set that a spec may name as `data.source`.

    Attributes:
        name: name of the source.
        title: title given by the owner.
        task: prediction task, in a few words.
        records: number of training records.
        features: columns that a learner sees: one for each value of a category, without the intercept.
        classes: meaning of the labels, in ascending order of the labels.
        licence: licence, as stated by `page` or by those who quote it.
        citation: citation requested by the owner.
        page: URL of further information.
        test_records: number of further records that the owner has set apart for tests.
        download_bytes: approximate size of the download. 0: a package ships the data.
        originals: original files. Empty: shipped by scikit-learn or made by this package.
        file_format: format of the originals; the training file comes first, then the test file.
        columns: columns of a `table`, in the order of the file; one is called `label`.
        ignored_columns: columns that are left out.
        labels: notation of the classes in a `table`, in their order; empty: by their names, or as numbers.
        is_synthetic: True if this package generates the records.
    """

    name: str
    title: str
    task: str
    records: int
    features: int
    classes: tuple[str, ...]
    licence: str
    citation: str
    page: str
    test_records: int = 0
    download_bytes: int = 0
    originals: tuple[OriginalFile, ...] = ()
    file_format: Literal["table", "libsvm", "idx", "cifar"] = "table"
    columns: tuple[str, ...] = ()
    ignored_columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    is_synthetic: bool = False


def _read() -> dict[str, CatalogueEntry]:
    facts = tomllib.loads(files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8"))
    found = {}
    for name, fields in facts.items():
        originals = tuple(OriginalFile(**_to_tuples(each)) for each in fields.pop("originals", ()))
        found[name] = CatalogueEntry(name, **_to_tuples(fields), originals=originals)
    return found


def _to_tuples(fields: Mapping[str, object]) -> dict[str, Any]:
    return {field: tuple(value) if isinstance(value, list) else value for field, value in fields.items()}


CATALOGUE: Mapping[str, CatalogueEntry] = _read()
"""Catalogue entries by name, shipped data sets first."""


def suggest_name(name: str) -> str:
    """Return a suggestion to append to an error about an unknown name: the nearest known one; empty if none is near."""
    near = difflib.get_close_matches(name.lower(), CATALOGUE, 1)
    return f"; did you mean {near[0]}?" if near else ""


DATA_FOLDER_VARIABLE = "SOTTOVOCE_DATA"


def get_data_folders() -> tuple[Path, ...]:
    """Return the folders to search for `NAME.npz`, in order: $SOTTOVOCE_DATA, if set, then the cache."""
    own, cache = os.environ.get(DATA_FOLDER_VARIABLE), _cache_folder()
    return (*([Path(own)] if own else []), *([cache] if cache else []))


def _cache_folder() -> Path | None:
    """Return the user's cache folder of this system; None without platformdirs, which the extra `audit` installs."""
    try:
        found: Path = importlib.import_module("platformdirs").user_cache_path("sottovoce", appauthor=False)
    except ImportError:
        return None
    return found / "data"


def find_dataset_file(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the file of a data set in the first of these folders that has it."""
    paths = (folder / f"{name}.npz" for folder in folders)
    return next((path for path in paths if path.is_file()), None)
