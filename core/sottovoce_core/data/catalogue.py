"""Data sets that have a name: what they hold, whose they are, the files that their owners publish, and where they lie.

`catalogue.toml` has the facts; nothing is read or downloaded here. Those that no package ships are `NAME.npz` in a folder; `sottovoce
data fetch` puts them there.
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
    """A file as its owner publishes it.

    Attributes:
        name: the owner's. What is packed where it lies, as `NAME.gz` or in a zip archive, is meant as it is without that.
        places: URLs, to be tried in this order; `URL#MEMBER` is a file in a zip archive.
        size: bytes, of what `name` means; about, where nobody is sure.
        digest: `sha256:` or `md5:` and hexadecimal figures, of the same.
    """

    name: str
    urls: tuple[str, ...]
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A data set that a spec may name as `data.source`.

    Attributes:
        name: of the source.
        title: its owner's name for it.
        task: what is to be told of a record, in a few words.
        records: how many there are to learn from.
        features: columns that a learner sees: one for each value of a category, without the intercept.
        classes: what the labels mean, in ascending order of the labels.
        licence: as it is stated where `page` leads, or by those who quote it.
        citation: what its owner asks to be cited.
        page: where to read more.
        held_out: how many more its owner has set apart for tests.
        download: bytes, about. 0: a package ships it.
        originals: what it is made from. Empty: it is here, shipped by scikit-learn or made by this package.
        form: how the originals are written; the records to learn from come first, then those for tests.
        columns: of a `table`, in the order of the file; one is called `label`.
        ignored: columns that are left out.
        labels: how a `table` writes the classes, in their order; empty: by their names, or as numbers.
        made: by this package, of nothing that happened.
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
        originals = tuple(OriginalFile(**_frozen(each)) for each in fields.pop("originals", ()))
        found[name] = CatalogueEntry(name, **_frozen(fields), originals=originals)
    return found


def _frozen(fields: Mapping[str, object]) -> dict[str, Any]:
    return {field: tuple(value) if isinstance(value, list) else value for field, value in fields.items()}


CATALOGUE: Mapping[str, CatalogueEntry] = _read()
"""All of them, by name: first those that are shipped."""


def suggest_name(name: str) -> str:
    """What to add to an error about a name that there is not: the nearest one, if one is near."""
    near = difflib.get_close_matches(name.lower(), CATALOGUE, 1)
    return f"; did you mean {near[0]}?" if near else ""


DATA_FOLDER_VARIABLE = "SOTTOVOCE_DATA"


def get_data_folders() -> tuple[Path, ...]:
    """Folders with `NAME.npz`, in the order in which they are looked at: $SOTTOVOCE_DATA, where it is set, then the cache."""
    own, cache = os.environ.get(DATA_FOLDER_VARIABLE), _cache_folder()
    return (*([Path(own)] if own else []), *([cache] if cache else []))


def _cache_folder() -> Path | None:
    """The user's cache, as the system has it; None without platformdirs, which the extra `audit` brings."""
    try:
        found: Path = importlib.import_module("platformdirs").user_cache_path("sottovoce", appauthor=False)
    except ImportError:
        return None
    return found / "data"


def find_dataset_file(name: str, folders: Iterable[Path]) -> Path | None:
    """The file of a data set, in the first of these folders that has it."""
    paths = (folder / f"{name}.npz" for folder in folders)
    return next((path for path in paths if path.is_file()), None)
