"""Where data sets that have a name are looked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "SOTTOVOCE_DATA"


def data_folders() -> tuple[Path, ...]:
    """Folders with `NAME.npz`, in the order in which they are looked at: $SOTTOVOCE_DATA, where it is set, then the cache."""
    own, cache = os.environ.get(VARIABLE), cache_folder()
    return (*([Path(own)] if own else []), *([cache] if cache else []))


def cache_folder() -> Path | None:
    """The user's cache, as the system has it; None without platformdirs, which the extra `audit` brings."""
    try:
        found: Path = importlib.import_module("platformdirs").user_cache_path("sottovoce", appauthor=False)
    except ImportError:
        return None
    return found / "data"


def find(name: str, folders: Iterable[Path]) -> Path | None:
    """The file of a data set, in the first of these folders that has it."""
    paths = (folder / f"{name}.npz" for folder in folders)
    return next((path for path in paths if path.is_file()), None)
