"""What a spec makes of its files, for `sottovoce spec check`: columns, what is 1, who gets how many, who hears whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sottovoce.algorithms.setting import Caveat
from sottovoce.arrays import AnyArray
from sottovoce.data import PlacedData
from sottovoce.data.dataset import read_source
from sottovoce.data.files import RawTable
from sottovoce.data.labels import map_labels, texts_of
from sottovoce.losses import Loss
from sottovoce.spec import RunSpec
from sottovoce_client.data.describe import constant_note
from sottovoce_client.wording import count, number, plural

_SHOWN = 5
"""Records."""
_COLUMNS, _CLASSES = 12, 12
"""That are shown of them, and of the labels."""
_EDGES = 12
"""Of a graph that are shown."""
_LONG = 10
"""Times as long as a loss leaves them: of such rows the largest features are all that is left."""


def reading_lines(spec: RunSpec, data: PlacedData, folders: Sequence[Path]) -> Iterator[str]:
    """Of records that are there; of those of a schema, which says what is read as what, only how they are dealt.

    Raises:
        SottovoceError: they cannot be read.
    """
    if spec.data.schema is None:
        yield from _columns(spec, read_source(spec.data, folders))
    sizes = [len(each.labels) for each in data.learners]
    got = plural(max(sizes), "record")
    if min(sizes) < max(sizes):
        got = f"{count(min(sizes))} to {got}"
    held = f"{count(len(data.test_labels))} held out for accuracy"
    yield f"learners: {plural(len(sizes), 'learner')} with {got} each; {held}"


def long_rows(spec: RunSpec, data: PlacedData) -> Iterator[Caveat]:
    """Whether records that nothing scaled are mostly cut to a small part of their length."""
    if spec.data.scale != "none" or spec.data.schema is not None:
        return
    limit = spec.loss.feature_bound
    rows = [np.linalg.norm(each.features, axis=-1) > _LONG * limit for each in data.learners]
    if np.mean(np.concatenate(rows)) > 0.5:
        how = "data.scale: standard" if len(data.test_labels) else "in the file, for no record is held out to scale by"
        yield Caveat(
            "LONG_ROWS",
            f"more than half of the records are over {_LONG} times as long as loss.feature_bound, {number(limit)}, and are cut "
            f"to it, so their largest features hide all others: scale them ({how}), or declare a schema with bounds",
        )


def graph_lines(spec: RunSpec) -> Iterator[str]:
    """The edges of graphs that are read from files: who is meant by their nodes."""
    if not spec.topology.file:
        return
    section = spec.topology.without_files(spec.names).model_dump(mode="json")
    graphs = [section["graph"]] if section["graph"] else section["sequence"]["graphs"]
    for graph in graphs:
        if graph["kind"] == "edges":
            between = " to " if graph["directed"] else " and "
            told = [between.join(spec.names[i] for i in edge) for edge in graph["edges"]]
            more = ", ..." if len(told) > _EDGES else ""
            yield f"graph: {plural(len(told), 'edge')}: {', '.join(told[:_EDGES])}{more}"


def _columns(spec: RunSpec, table: RawTable) -> Iterator[str]:
    names = table.columns or tuple(f"column {k}" for k in range(table.features.shape[1]))
    yield f"{spec.data.source}: {plural(len(table.labels), 'record')}, as they are read:"
    if table.header is not None:
        yield f"first line: names of the columns, for {table.header}"
    intercept = ", and a constant one, the intercept (data.intercept)" if spec.data.intercept else ""
    yield f"features: {len(names)} ({_some(names)}){intercept}"
    if note := constant_note(table):
        yield f"note: {note}"
    label = "label" if table.label is None else f"label, column {table.label!r}"
    yield f"{label}: {_meaning(table.labels, spec.loss, spec.data.positive)}"
    yield f"the first {min(_SHOWN, len(table.labels))}, not scaled yet: {_some((*names[:_COLUMNS], 'label'), _COLUMNS + 1)}"
    for row, own in zip(table.features[:_SHOWN], texts_of(table.labels[:_SHOWN]), strict=True):
        cut = ", ..." if len(row) > _COLUMNS else ""
        yield f"  {', '.join(f'{value:g}' for value in row[:_COLUMNS])}{cut}, {own}"


def _meaning(labels: AnyArray, loss: Loss, positive: tuple[int | str, ...] | None) -> str:
    """What each label is for the loss, and how many records have it."""
    mapped, _ = map_labels(labels, loss, positive)
    if loss.n_classes is None:
        return f"a number from {mapped.min():g} to {mapped.max():g}"
    distinct, first, many = np.unique(labels, return_index=True, return_counts=True)
    told = [
        f"{text} is {mapped[k]:g} ({plural(int(n), 'record')})"
        for text, k, n in zip(texts_of(distinct), first, many, strict=True)
    ]
    how = "" if positive is not None or not loss.binary else "; where another is to be 1, name it in data.positive"
    if loss.binary and len(told) == 1:
        how += ": all are the same, so there is nothing to tell apart"
    return f"{_some(told, _CLASSES)}{how}"


def _some(parts: Sequence[str], most: int = _COLUMNS) -> str:
    return ", ".join(parts[:most]) + (", ..." if len(parts) > most else "")
