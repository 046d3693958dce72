"""`sottovoce data list` and `sottovoce data describe`: the named data sets, and their contents."""

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
from sottovoce_core.data.synthetic import SYNTHETIC_SOURCES, describe_synthetic_source
from sottovoce_core.errors import SpecError
from sottovoce_core.yaml_files import write_yaml

_HEADS = ("name", "records", "held out", "features", "classes", "task", "licence", "download", "here")
_NUMBERS = ("records", "held out", "features", "classes", "download")
_OPTIONAL_COLUMNS = ("licence", "held out", "classes", "task")
"""Columns that are omitted on a narrow terminal, the least needed first."""


def require_dataset(name: str) -> CatalogueEntry:
    """Return the data set of this name.

    Raises:
        SpecError: It does not exist; the error suggests a similar name.
    """
    if (found := CATALOGUE.get(name)) is not None:
        return found
    if name in SYNTHETIC_SOURCES.built_in_classes:
        raise SpecError(
            f"a data set must have fixed records, and those of {name} are generated as a spec says: write "
            f"{describe_synthetic_source(name)}"
        )
    raise SpecError(f"there is no data set {name!r}: it must be one of {', '.join(CATALOGUE)}{suggest_name(name)}")


def show(folders: Sequence[Path], console: Console) -> None:
    """Print the table of data sets.

    Args:
        folders: Folders that contain data sets.
        console: Console of the table.
    """
    rows = []
    for source in CATALOGUE.values():
        numbers = (source.records, source.test_records, source.features, len(source.classes))
        counts = [f"{number:,}" if number else MISSING_VALUE for number in numbers]
        rows.append(
            [
                source.name,
                *counts,
                source.task,
                source.licence,
                _format_size(source.download_bytes),
                _locate(source, folders),
            ]
        )
    table, left_out = terminal.fit_table(
        console.width, _HEADS, rows, right_aligned=_NUMBERS, optional_columns=_OPTIONAL_COLUMNS
    )
    console.print(table)
    if left_out:
        console.print(f"a wider terminal shows {'; '.join(left_out)}as well; so does sottovoce data describe NAME")
    for folder in folders:
        console.print(
            Text(
                f"{_name_folder(folder)}: {folder}{f' (${DATA_FOLDER_VARIABLE})' if _name_folder(folder) == 'yours' else ''}"
            )
        )
    console.print("to download one: sottovoce data fetch NAME")
    for kind in SYNTHETIC_SOURCES.built_in_classes:
        console.print(Text(f"generated as a spec says: {describe_synthetic_source(kind)}"))
    terminal.print_json_if_requested(
        lambda: [
            {**_make_document(source), "download_bytes": source.download_bytes, "here": _locate(source, folders)}
            for source in CATALOGUE.values()
        ]
    )


def _make_document(source: CatalogueEntry) -> dict[str, Any]:
    """Build the JSON document of the published facts of a data set."""
    names = ("name", "title", "task", "records", "features", "classes", "licence", "citation", "page")
    return {name: getattr(source, name) for name in names} | {"held_out": source.test_records}


def _format_size(download: int) -> str:
    """Format a size in megabytes."""
    return (
        MISSING_VALUE if not download else f"{download / 1e6:.1f} MB" if download < 1e8 else f"{download / 1e6:.0f} MB"
    )


def _locate(source: CatalogueEntry, folders: Sequence[Path]) -> str:
    """Return the name of the folder that has the data set, `made`, `shipped` or `no`."""
    if not source.originals:
        return "made" if source.is_synthetic else "shipped"
    path = find_dataset_file(source.name, folders)
    return "no" if path is None else _name_folder(path.parent)


def _name_folder(folder: Path) -> str:
    return "yours" if str(folder) == os.environ.get(DATA_FOLDER_VARIABLE) else "cache"


_MAX_ROWS = 24
"""Maximum number of features, and of classes, that are shown."""
_MAX_NAMED_FEATURES = 8
"""Maximum number of constant features that are named."""


@dataclass(frozen=True, slots=True)
class _FeatureRange:
    """Adjacent columns of one kind and range.

    Attributes:
        first, last: Names, or indices from 0, of the first and last column.
        columns: Number of columns.
        kind: `constant`, `0 or 1`, `whole numbers` or `numbers`.
        least, most: Minimum and maximum of all values.
    """

    first: str
    last: str
    columns: int
    kind: str
    least: float
    most: float


def _summarise_features(table: RawTable) -> list[_FeatureRange]:
    """Summarise the columns of a table; adjacent ones of one kind and range are one entry."""
    found: list[_FeatureRange] = []
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
            found.append(_FeatureRange(name, name, 1, kind, least, most))
    return found


def describe_constant_features(table: RawTable) -> str:
    """Describe the features that have the same value in all records, in a sentence; empty if there is none."""
    spread = np.ptp(table.features, axis=0)
    names = table.columns or [f"column {k}" for k in range(table.features.shape[1])]
    constant = [name for name, width in zip(names, spread, strict=True) if not width]
    if not constant or len(table.labels) < 2:
        return ""
    more = f" and {len(constant) - _MAX_NAMED_FEATURES} more" if len(constant) > _MAX_NAMED_FEATURES else ""
    has, it, its = ("has", "it", "its") if len(constant) == 1 else ("have", "them", "their")
    return (
        f"{', '.join(constant[:_MAX_NAMED_FEATURES])}{more} {has} the same value in all records: nothing can be learned "
        f"from {it}, and every message carries {its} noise; leave {it} out"
    )


def count_classes(table: RawTable) -> list[tuple[str, int]] | None:
    """Count the training records of each label, in ascending order; None for the numbers of a regression.

    Labels are those of a regression if some are not integers, if there are more than a thousand different ones, or more than
    twenty with fewer than ten records each on average.
    """
    held_out = table.labels[:0] if table.test is None else table.test[1]
    labels = np.unique(np.concatenate([table.labels, held_out]))
    counts = np.bincount(np.searchsorted(labels, table.labels), minlength=len(labels))
    is_diverse = len(labels) > 1_000 or (len(labels) > 20 and 10 * len(labels) > len(table.labels))
    if labels.dtype.kind == "f" and (is_diverse or not (labels == np.floor(labels)).all()):
        return None
    texts = [f"{label:g}" if labels.dtype.kind == "f" else str(label) for label in labels]
    return list(zip(texts, counts.tolist(), strict=True))


def make_example_spec(source: str, table: RawTable, label: str | None = None) -> str:
    """Build a run spec that learns from a table, as YAML; `label` is the label column, if it was given."""
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
        has_names = table.learner.dtype.kind in "US"
        learners = np.unique(table.learner)
        document["learners"] = (
            [str(name) for name in learners] if has_names else int(learners.astype(np.float64).max()) + 1
        )
    if classes is None:
        bound = float(np.ceil(np.abs(table.labels).max()))
        document["loss"] = {"kind": "ridge", "label_bound": bound or 1.0}
    elif len(classes) > 2:
        document["loss"] = {"kind": "softmax", "classes": len(classes)}
    return write_yaml(document, flow=None)


# ---- terminal output -------------------------------------------------------------------------------------------------


def describe(source: str, folders: Sequence[Path], console: Console, label: str | None = None) -> None:
    """Print the content of a data set.

    Args:
        source: Value of `data.source`: a name, or a path.
        folders: Folders that contain data sets.
        console: Console of the output.
        label: Label column of a file.

    Raises:
        SpecError: The source does not exist.
        DataError: Its records are unusable.
    """
    known = CATALOGUE.get(source) if Path(source).suffix else require_dataset(source)
    path = find_dataset_file(source, folders) if known else Path(source)
    if known and known.originals and path is None:
        console.print(
            _make_grid(
                [*_describe_publication(known), ("here", f"no: sottovoce data fetch {source}"), *_originals(known)]
            )
        )
        terminal.print_json_if_requested(lambda: {"source": source, "published": _make_document(known), "file": None})
        return
    table = read_source(DataSpec(source=source, label=label), folders)
    rows = [*_describe_publication(known)] if known else [("source", source)]
    rows += [*_describe_content(table, known)]
    if path is not None and (known is None or known.originals):
        rows.append(("file", f"{path}, {path.stat().st_size:,} bytes, {compute_digest(path.read_bytes())}"))
    rows += [*_originals(known)] if known else []
    console.print(_make_grid(rows))
    _print_features(table, console)
    if note := describe_constant_features(table):
        console.print(Text(f"note: {note}"), soft_wrap=True)
    classes = count_classes(table)
    if classes is None or len(classes) > 1:
        console.print("\nExample of a spec:\n", style="dim")
        console.print(Text(make_example_spec(source, table, label)), end="", soft_wrap=True)
    terminal.print_json_if_requested(
        lambda: {
            "source": source,
            "published": None if known is None else _make_document(known),
            "file": path,
            "records": len(table.features),
            "held_out": 0 if table.test is None else len(table.test[1]),
            "features": _summarise_features(table),
            "classes": None if classes is None else [{"label": text, "records": count} for text, count in classes],
        }
    )


def _make_grid(rows: Sequence[tuple[str, str]]) -> Any:
    grid = terminal.create_fact_grid()
    for name, text in rows:
        grid.add_row(name, Text(text))
    return grid


def _describe_publication(known: CatalogueEntry) -> Iterator[tuple[str, str]]:
    yield "source", f"{known.name}: {known.title}"
    yield "task", known.task
    more = f", and {known.test_records:,} held out for tests" if known.test_records else ""
    yield (
        "published",
        f"{known.records:,} records{more}; {pluralize(known.features, 'feature')}; {_format_classes(len(known.classes))}",
    )
    yield "licence", known.licence
    yield "cite", known.citation
    yield "page", known.page


def _originals(known: CatalogueEntry) -> Iterator[tuple[str, str]]:
    for original in known.originals:
        yield "original", f"{original.name}, {original.digest}"


def _describe_content(table: RawTable, known: CatalogueEntry | None) -> Iterator[tuple[str, str]]:
    held_out = f", and {len(table.test[1]):,} held out for tests" if table.test is not None else ""
    yield "records", f"{len(table.features):,}{held_out}"
    yield "features", f"{table.features.shape[1]:,}"
    classes = count_classes(table)
    if classes is None:
        yield "labels", f"numbers from {_format_number(table.labels.min())} to {_format_number(table.labels.max())}"
    else:
        names = known.classes if known and len(known.classes) == len(classes) else [""] * len(classes)
        shown = [
            f"{label}{f' {name}' if name not in ('', label) else ''}: {count:,}"
            for (label, count), name in zip(classes, names, strict=True)
        ]
        more = f"; … {len(shown) - _MAX_ROWS:,} more" if len(shown) > _MAX_ROWS + 4 else ""
        yield _format_classes(len(classes)), "; ".join(shown[: _MAX_ROWS if more else None]) + more
    if classes is not None and (note := describe_similar_labels(name for name, _ in classes)):
        yield "note", f"labels {note}"
    if table.learner is not None:
        known_learners = np.unique(table.learner)
        yield "learners", f"{len(known_learners):,} in the column learner, the owner of each record"
    if table.round is not None:
        yield "rounds", "in the column round, the round of each record"


def _format_classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count:,} classes"


def _print_features(table: RawTable, console: Console) -> None:
    features = _summarise_features(table)
    table_view = terminal.create_table("feature", "kind")
    for head in ("count", "least", "largest"):
        table_view.add_column(head, justify="right")
    for each in features[:_MAX_ROWS]:
        name = each.first if each.columns == 1 else f"{each.first} … {each.last}"
        table_view.add_row(
            Text(name), each.kind, f"{each.columns:,}", _format_number(each.least), _format_number(each.most)
        )
    console.print()
    console.print(table_view)
    if rest := features[_MAX_ROWS:]:
        least, most = min(each.least for each in rest), max(each.most for each in rest)
        console.print(
            f"… and {sum(each.columns for each in rest):,} more, from {_format_number(least)} to {_format_number(most)}"
        )


def _format_number(value: float) -> str:
    """Format a number; integers in full."""
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
