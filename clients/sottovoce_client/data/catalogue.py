"""`sottovoce data list`: every data set that has a name, and whether it is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from sottovoce.data.folders import VARIABLE, cache_folder, find
from sottovoce.data.known import KNOWN, KnownSource, nearest
from sottovoce.errors import SpecError
from sottovoce_client import terminal
from sottovoce_client.wording import NOTHING

HEADS = ("name", "records", "held out", "features", "classes", "task", "licence", "download", "here")
_NUMBERS = ("records", "held out", "features", "classes", "download")
_SPARE = ("licence", "held out", "classes", "task")
"""Least needed first, where a terminal is narrow."""


def known(name: str) -> KnownSource:
    """The data set of this name.

    Raises:
        SpecError: there is none; with the nearest, if one is near.
    """
    if (found := KNOWN.get(name)) is not None:
        return found
    raise SpecError(f"there is no data set {name!r}: it must be one of {', '.join(KNOWN)}{nearest(name)}")


def show(folders: Sequence[Path], console: Console) -> None:
    """Print the table.

    Args:
        folders: where data sets are looked for.
        console: where to print.
    """
    rows = []
    for source in KNOWN.values():
        numbers = (source.records, source.held_out, source.features, len(source.classes))
        counts = [f"{number:,}" if number else NOTHING for number in numbers]
        rows.append([source.name, *counts, source.task, source.licence, _size(source.download), _here(source, folders)])
    table, left_out = terminal.fitted(console.width, HEADS, rows, right=_NUMBERS, spare=_SPARE)
    console.print(table)
    if left_out:
        console.print(f"a wider terminal shows {'; '.join(left_out)}, too; so does sottovoce data describe NAME")
    for folder in folders:
        console.print(Text(f"{_called(folder)}: {folder}{f' (${VARIABLE})' if _called(folder) == 'yours' else ''}"))
    console.print("to get one that is not here: sottovoce data fetch NAME")
    terminal.tell(
        lambda: [
            {**facts_of(source), "download_bytes": source.download, "here": _here(source, folders)}
            for source in KNOWN.values()
        ]
    )


def facts_of(source: KnownSource) -> dict[str, Any]:
    """What is known of a data set before it is here, for programs."""
    names = ("name", "title", "task", "records", "held_out", "features", "classes", "licence", "citation", "page")
    return {name: getattr(source, name) for name in names}


def _size(download: int) -> str:
    """In megabytes."""
    return NOTHING if not download else f"{download / 1e6:.1f} MB" if download < 1e8 else f"{download / 1e6:.0f} MB"


def _here(source: KnownSource, folders: Sequence[Path]) -> str:
    """In which folder it is."""
    if not source.originals:
        return "made" if source.made else "shipped"
    path = find(source.name, folders)
    return "no" if path is None else _called(path.parent)


def _called(folder: Path) -> str:
    return "cache" if folder == cache_folder() else "yours"
