"""`sottovoce data list` and `sottovoce data describe`: the data sets that have a name, and what one holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.data.fetch import compute_digest
from sottovoce_client.formatting import MISSING_VALUE, pluralize
from sottovoce_core.data.catalogue import (
    CATALOGUE,
    DATA_FOLDER_VARIABLE,
    CatalogueEntry,
    find_dataset_file,
    suggest_name,
)
from sottovoce_core.data.dataset import read_source
from sottovoce_core.data.encoding import describe_similar_labels
from sottovoce_core.data.files import RawTable
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import SpecError
from sottovoce_core.yaml_files import write_yaml

_HEADS = ("name", "records", "held out", "features", "classes", "task", "licence", "download", "here")
_NUMBERS = ("records", "held out", "features", "classes", "download")
_SPARE = ("licence", "held out", "classes", "task")
"""Least needed first, where a terminal is narrow."""


def require_dataset(name: str) -> CatalogueEntry:
    """The data set of this name.

    Raises:
        SpecError: there is none; with the nearest, if one is near.
    """
    if (found := CATALOGUE.get(name)) is not None:
        return found
    raise SpecError(f"there is no data set {name!r}: it must be one of {', '.join(CATALOGUE)}{suggest_name(name)}")


def show(folders: Sequence[Path], console: Console) -> None:
    """Print the table.

    Args:
        folders: where data sets are looked for.
        console: where to print.
    """
    rows = []
    for source in CATALOGUE.values():
        numbers = (source.records, source.test_records, source.features, len(source.classes))
        counts = [f"{number:,}" if number else MISSING_VALUE for number in numbers]
        rows.append(
            [source.name, *counts, source.task, source.licence, _size(source.download_bytes), _here(source, folders)]
        )
    table, left_out = terminal.fit_table(console.width, _HEADS, rows, right_aligned=_NUMBERS, optional_columns=_SPARE)
    console.print(table)
    if left_out:
        console.print(f"a wider terminal shows {'; '.join(left_out)}, too; so does sottovoce data describe NAME")
    for folder in folders:
        console.print(
            Text(f"{_called(folder)}: {folder}{f' (${DATA_FOLDER_VARIABLE})' if _called(folder) == 'yours' else ''}")
        )
    console.print("to get one that is not here: sottovoce data fetch NAME")
    terminal.print_json_if_requested(
        lambda: [
            {**_facts_of(source), "download_bytes": source.download_bytes, "here": _here(source, folders)}
            for source in CATALOGUE.values()
        ]
    )


def _facts_of(source: CatalogueEntry) -> dict[str, Any]:
    """What is known of a data set before it is here, for programs."""
    names = ("name", "title", "task", "records", "held_out", "features", "classes", "licence", "citation", "page")
    return {name: getattr(source, name) for name in names}


def _size(download: int) -> str:
    """In megabytes."""
    return (
        MISSING_VALUE if not download else f"{download / 1e6:.1f} MB" if download < 1e8 else f"{download / 1e6:.0f} MB"
    )


def _here(source: CatalogueEntry, folders: Sequence[Path]) -> str:
    """In which folder it is."""
    if not source.originals:
        return "made" if source.is_synthetic else "shipped"
    path = find_dataset_file(source.name, folders)
    return "no" if path is None else _called(path.parent)


def _called(folder: Path) -> str:
    return "yours" if str(folder) == os.environ.get(DATA_FOLDER_VARIABLE) else "cache"


_MAX_ROWS = 24
"""Of features that are shown, and of classes."""
_MAX_NAMED_FEATURES = 8
"""Constant features that are named."""


@dataclass(frozen=True, slots=True)
class _Feature:
    """Neighbouring columns of one kind and range.

    Attributes:
        first, last: their names, or their numbers from 0.
        columns: how many they are.
        kind: `constant`, `0 or 1`, `whole numbers` or `numbers`.
        least, most: of all their values.
    """

    first: str
    last: str
    columns: int
    kind: str
    least: float
    most: float


def _features_of(table: RawTable) -> list[_Feature]:
    """The columns of a table; neighbours of one kind and range are one entry."""
    found: list[_Feature] = []
    names = table.columns or [str(k) for k in range(table.features.shape[1])]
    for name, column in zip(names, table.features.T, strict=True):
        least, most = float(column.min()), float(column.max())
        kind = "constant" if least == most else "numbers"
        if least < most and (column == np.floor(column)).all():
            kind = "0 or 1" if (least, most) == (0, 1) else "whole numbers"
        last = found[-1] if found else None
        if last is not None and (last.kind, last.least, last.most) == (kind, least, most):
            found[-1] = replace(last, last=name, columns=last.columns + 1)
        else:
            found.append(_Feature(name, name, 1, kind, least, most))
    return found


def describe_constant_features(table: RawTable) -> str:
    """The features that have one value in all records, in a sentence; empty where there is none."""
    spread = np.ptp(table.features, axis=0)
    names = table.columns or [f"column {k}" for k in range(table.features.shape[1])]
    same = [name for name, width in zip(names, spread, strict=True) if not width]
    if not same or len(table.labels) < 2:
        return ""
    more = f" and {len(same) - _MAX_NAMED_FEATURES} more" if len(same) > _MAX_NAMED_FEATURES else ""
    has, it, its = ("has", "it", "its") if len(same) == 1 else ("have", "them", "their")
    return (
        f"{', '.join(same[:_MAX_NAMED_FEATURES])}{more} {has} the same value in all records: nothing can be learned from {it}, and every "
        f"message carries {its} noise; leave {it} out"
    )


def count_classes(table: RawTable) -> list[tuple[str, int]] | None:
    """Labels in ascending order, and how many records to learn from have each; None: they are numbers of a regression.

    These are numbers some of which are not whole, or more than a thousand different ones, or more than twenty with fewer than
    ten records each on average.
    """
    held_out = table.labels[:0] if table.test is None else table.test[1]
    labels = np.unique(np.concatenate([table.labels, held_out]))
    counts = np.bincount(np.searchsorted(labels, table.labels), minlength=len(labels))
    many = len(labels) > 1_000 or (len(labels) > 20 and 10 * len(labels) > len(table.labels))
    if labels.dtype.kind == "f" and (many or not (labels == np.floor(labels)).all()):
        return None
    texts = [f"{label:g}" if labels.dtype.kind == "f" else str(label) for label in labels]
    return list(zip(texts, counts.tolist(), strict=True))


def make_example_spec(source: str, table: RawTable, label: str | None = None) -> str:
    """A run spec that learns from it, as YAML; `label` is the label column, where it was said."""
    classes = count_classes(table)
    data: dict[str, Any] = {"source": source, **({"label": label} if label else {})}
    document: dict[str, Any] = {
        "name": "example",
        "rounds": 500,
        "algorithm": "ldp-dol",
        "loss": "logistic",
        "data": data,
    }
    if table.round is not None:
        document["rounds"] = int(np.max(table.round.astype(np.float64))) + 1
    else:
        data |= {"scale": "standard", "batch_size": 4, "reuse": True}
    if table.learner is not None:
        named = table.learner.dtype.kind in "US"
        known = np.unique(table.learner)
        document["learners"] = [str(name) for name in known] if named else int(known.astype(np.float64).max()) + 1
    if classes is None:
        bound = float(np.ceil(np.abs(table.labels).max()))
        document["loss"] = {"kind": "ridge", "label_bound": bound or 1.0}
    elif len(classes) > 2:
        document["loss"] = {"kind": "softmax", "classes": len(classes)}
    return write_yaml(document, flow=None)


# ---- on the terminal -------------------------------------------------------------------------------------------------


def describe(source: str, folders: Sequence[Path], console: Console, label: str | None = None) -> None:
    """Print what a data set holds.

    Args:
        source: as `data.source`: a name, or a path.
        folders: where data sets that have a name are looked for.
        console: where to print.
        label: the label column of a file.

    Raises:
        SpecError: there is no such source.
        DataError: its records are unusable.
    """
    known = CATALOGUE.get(source) if Path(source).suffix else require_dataset(source)
    path = find_dataset_file(source, folders) if known else Path(source)
    if known and known.originals and path is None:
        console.print(_facts([*_about(known), ("here", f"no: sottovoce data fetch {source}"), *_originals(known)]))
        terminal.print_json_if_requested(lambda: {"source": source, "published": _facts_of(known), "file": None})
        return
    table = read_source(DataSpec(source=source, label=label), folders)
    rows = [*_about(known)] if known else [("source", source)]
    rows += [*_held(table, known)]
    if path is not None and (known is None or known.originals):
        rows.append(("file", f"{path}, {path.stat().st_size:,} bytes, {compute_digest(path.read_bytes())}"))
    rows += [*_originals(known)] if known else []
    console.print(_facts(rows))
    _print_features(table, console)
    if note := describe_constant_features(table):
        console.print(Text(f"note: {note}"), soft_wrap=True)
    classes = count_classes(table)
    if classes is None or len(classes) > 1:
        console.print("\nA spec that uses it:\n", style="dim")
        console.print(Text(make_example_spec(source, table, label)), end="", soft_wrap=True)
    terminal.print_json_if_requested(
        lambda: {
            "source": source,
            "published": None if known is None else _facts_of(known),
            "file": path,
            "records": len(table.features),
            "held_out": 0 if table.test is None else len(table.test[1]),
            "features": _features_of(table),
            "classes": None if classes is None else [{"label": text, "records": many} for text, many in classes],
        }
    )


def _facts(rows: Sequence[tuple[str, str]]) -> Any:
    grid = terminal.create_fact_grid()
    for name, text in rows:
        grid.add_row(name, Text(text))
    return grid


def _about(known: CatalogueEntry) -> Iterator[tuple[str, str]]:
    yield "source", f"{known.name}: {known.title}"
    yield "task", known.task
    more = f", and {known.test_records:,} held out for tests" if known.test_records else ""
    yield (
        "published",
        f"{known.records:,} records{more}; {pluralize(known.features, 'feature')}; {_classes(len(known.classes))}",
    )
    yield "licence", known.licence
    yield "cite", known.citation
    yield "page", known.page


def _originals(known: CatalogueEntry) -> Iterator[tuple[str, str]]:
    for original in known.originals:
        yield "original", f"{original.name}, {original.digest}"


def _held(table: RawTable, known: CatalogueEntry | None) -> Iterator[tuple[str, str]]:
    held_out = f", and {len(table.test[1]):,} held out for tests" if table.test is not None else ""
    yield "records", f"{len(table.features):,}{held_out}"
    yield "features", f"{table.features.shape[1]:,}"
    classes = count_classes(table)
    if classes is None:
        yield "labels", f"numbers from {_number(table.labels.min())} to {_number(table.labels.max())}"
    else:
        names = known.classes if known and len(known.classes) == len(classes) else [""] * len(classes)
        shown = [
            f"{label}{f' {name}' if name not in ('', label) else ''}: {count:,}"
            for (label, count), name in zip(classes, names, strict=True)
        ]
        more = f"; … {len(shown) - _MAX_ROWS:,} more" if len(shown) > _MAX_ROWS + 4 else ""
        yield _classes(len(classes)), "; ".join(shown[: _MAX_ROWS if more else None]) + more
    if classes is not None and (told := describe_similar_labels(name for name, _ in classes)):
        yield "note", f"labels {told}"
    if table.learner is not None:
        known_learners = np.unique(table.learner)
        yield "learners", f"{len(known_learners):,} in the column learner, which says whose a record is"
    if table.round is not None:
        yield "rounds", "in the column round, which says when a record is learned"


def _classes(many: int) -> str:
    return "1 class" if many == 1 else f"{many:,} classes"


def _print_features(table: RawTable, console: Console) -> None:
    found = _features_of(table)
    shown = terminal.create_table("feature", "kind")
    for head in ("how many", "least", "largest"):
        shown.add_column(head, justify="right")
    for each in found[:_MAX_ROWS]:
        name = each.first if each.columns == 1 else f"{each.first} … {each.last}"
        shown.add_row(Text(name), each.kind, f"{each.columns:,}", _number(each.least), _number(each.most))
    console.print()
    console.print(shown)
    if rest := found[_MAX_ROWS:]:
        least, most = min(each.least for each in rest), max(each.most for each in rest)
        console.print(f"… and {sum(each.columns for each in rest):,} more, from {_number(least)} to {_number(most)}")


def _number(value: float) -> str:
    """In full where it is whole."""
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
