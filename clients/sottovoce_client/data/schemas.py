"""`sottovoce schema`, and what `sottovoce spec check` tells of the files of a spec.

A schema is drafted from public records, or shown, by itself or beside a file of records. Of a spec's files: the columns, what
counts as 1, how many records a learner gets, who sends to whom.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.atomic_files import create_file, require_new
from sottovoce_client.data.catalogue import describe_constant_features
from sottovoce_client.formatting import MISSING_VALUE, format_count, format_number, pluralize
from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.arrays import AnyArray
from sottovoce_core.data.columns import read_cells, read_names
from sottovoce_core.data.dataset import encode_file, read_source, require_source_file
from sottovoce_core.data.encoding import EncodedRecords, Encoder, format_labels, map_labels
from sottovoce_core.data.fields import Category, Date, Number
from sottovoce_core.data.files import RawTable
from sottovoce_core.data.schema_inference import SchemaDraft, draft_schema
from sottovoce_core.data.spec import Schema
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.losses import Loss
from sottovoce_core.losses.linear import LogisticLoss, RidgeLoss, SoftmaxLoss
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import abbreviate_names
from sottovoce_core.yaml_files import parse_yaml

PUBLIC_SAMPLE_WARNING = (
    "The sample must be public: bounds and categories are read off it, and stand in a spec that everybody sees. Never draft from "
    "records that are to be protected."
)


# ---- drafting --------------------------------------------------------------------------------------------------------


def infer(sample: Path, label: str | None, out: Path | None, console: Console | None = None) -> None:
    """Draft a schema from public records, and write it.

    Args:
        sample: a `.csv` or `.parquet` file.
        label: its label column; None: `label`, else `y`, else the last one.
        out: where to write; None: to standard output.
        console: where to say what was found.

    Raises:
        SpecError: there is no such file or label, or a file at `out` already.
        DataError: the sample gives no schema.
    """
    console = console or terminal.create_console(stderr=True)
    require_new(out)
    _, header = read_names(require_source_file(sample, schema=True), label)
    columns = read_cells(sample)[0]
    try:
        made = draft_schema(columns, label, header)
    except SpecError as error:
        raise SpecError(f"{sample}: {error}") from None
    except DataError as error:
        told = str(error)
        raise DataError(told if told.startswith(str(sample)) else f"{sample}: {told}") from None
    console.print(PUBLIC_SAMPLE_WARNING, style="bold")
    if out is None:
        print(made.text, end="")
    else:
        with create_file(out) as file:
            file.write(made.text.encode())
        _print_draft(made, console)
        console.print(Text(f"{out}: put what is possible in place of what was seen"), soft_wrap=True)
    terminal.print_json_if_requested(lambda: {"out": out, "schema": parse_yaml(made.text)})


def _print_draft(made: SchemaDraft, console: Console) -> None:
    table = terminal.create_table("column", "taken for", "seen")
    for each in (*made.features, *made.ignored_columns):
        table.add_row(Text(each.name), "ignored" if each.field is None else each.field["type"], Text(each.why))
    table.add_row(Text(made.label.name), f"label: {(made.label.field or {})['type']}", "")
    console.print(table)


# ---- what one says ---------------------------------------------------------------------------------------------------


def check(
    schema: Schema, records: Path | None = None, spec: RunSpec | None = None, console: Console | None = None
) -> bool:
    """Print what a schema says; and how many records of a file fit it.

    Args:
        schema: it.
        records: a `.csv` or `.parquet` file of one's own.
        spec: a run that would use it: whose loss its label must suit.
        console: where to print.

    Returns:
        Whether all records fit.

    Raises:
        SpecError: there is no such file, or the label does not suit the run.
        DataError: the file cannot be read, or its columns are not those of the schema.
    """
    console = console or terminal.create_console()
    encoder = (
        Encoder.from_schema(schema, spec.loss, spec.data.positive)
        if spec
        else Encoder.from_schema(schema, _usual(schema))
    )
    found = None if records is None else encode_file(records, encoder)[0]
    console.print(_fields(schema))
    grid = terminal.create_fact_grid()
    for name, text in _facts(encoder, spec):
        grid.add_row(name, Text(text))
    console.print(grid)
    if records is not None and found is not None:
        _print_fit(records, found, console)
    fit = (
        None
        if found is None
        else {"records": len(found.accepted_mask), "fit": int(found.accepted_mask.sum()), "refused": found.reasons}
    )
    terminal.print_json_if_requested(
        lambda: {"schema": schema.model_dump(mode="json"), "features": schema.width, "file": fit}
    )
    return found is None or not found.refusals


def _usual(schema: Schema) -> Loss:
    """A loss that the label suits."""
    classes = schema.label.classes
    if classes is None:
        return RidgeLoss()
    return LogisticLoss() if len(classes) == 2 else SoftmaxLoss(classes=len(classes))


def _fields(schema: Schema) -> Table:
    table = terminal.create_table("field", "type")
    table.add_column("may say", overflow="fold")
    table.add_column("missing")
    table.add_column("beyond")
    table.add_column("features", justify="right")
    for name, feature in schema.features.items():
        beyond = feature.out_of_bounds if isinstance(feature, Number | Date) else MISSING_VALUE
        says = abbreviate_names(feature.words if isinstance(feature, Category) else (feature.accepted_values,))
        table.add_row(
            Text(name), feature.type, Text(says), feature.missing, beyond, format_count(len(feature.names(name)))
        )
    return table


def _facts(encoder: Encoder, spec: RunSpec | None) -> Iterator[tuple[str, str]]:
    schema = encoder.schema
    yield "label", _label_line(encoder)
    yield "ignored", abbreviate_names(schema.ignored) if schema.ignored else MISSING_VALUE
    yield "no value", abbreviate_names([*map(str, schema.missing_values), "empty text"])
    fields = pluralize(len(schema.features), "field")
    yield "features", f"{pluralize(schema.width, 'number')} of {fields}, each within [-1, 1]"
    yield "l2 norm", _norm_line(schema, spec)


def _label_line(encoder: Encoder) -> str:
    """What is learned: `outcome: 0 is home; 1 is died`."""
    label, values = encoder.schema.label, encoder.class_values
    if values is None:
        return f"{label.name}: a number from {label.accepted_values}, scaled onto [-1, 1]"
    meant: dict[float, list[str]] = {value: [] for value in sorted(values)}
    for word, value in zip(label.classes or (), values, strict=True):
        meant[value].append(word)
    return f"{label.name}: " + "; ".join(f"{value:g} is {abbreviate_names(words)}" for value, words in meant.items())


def _norm_line(schema: Schema, spec: RunSpec | None) -> str:
    """How long a record may be, and what a loss makes of that."""
    fields, intercept = len(schema.features), spec is None or spec.data.intercept
    bound = math.sqrt(fields + intercept)
    told = f"at most {format_number(bound)}{', the intercept included' if intercept else ''}"
    if spec is None:
        return f"{told}; a loss scales down what is longer than its feature_bound"
    limit = spec.loss.feature_bound
    if bound <= limit:
        return f"{told}: within loss.feature_bound, {format_number(limit)}"
    return f"{told}; what is longer than loss.feature_bound, {format_number(limit)}, is scaled down to it"


def _print_fit(records: Path, found: EncodedRecords, console: Console) -> None:
    """How many fit, and why the others do not: never what they say."""
    all_, fitting = len(found.accepted_mask), int(found.accepted_mask.sum())
    console.print()
    console.print(Text(f"{records}: {format_count(fitting)} of {pluralize(all_, 'record')} fit"), highlight=False)
    if found.refusals:
        first = {why: row for row, why in reversed([*found.refusals.items()])}
        table = terminal.create_table("refused", "why")
        table.columns[0].justify = "right"
        table.add_column("the first is row", justify="right")
        for why, times in found.reasons.items():
            table.add_row(format_count(times), Text(why), format_count(first[why]))
        console.print(table)
        console.print("Of a record the first reason counts; rows are counted from 0.", style="dim")
        if found.hint:
            console.print(Text(found.hint), soft_wrap=True)
    console.print("These are figures of the records themselves: nothing protects them.", style="dim")


_MAX_SHOWN_RECORDS = 5
"""Records."""
_MAX_SHOWN_COLUMNS = 12
"""That are shown of them."""
_MAX_NORM_RATIO = 10
"""Times as long as a loss leaves them: of such rows the largest features are all that is left."""


def describe_records(prepared: PreparedRun, folders: Sequence[Path]) -> Iterator[str]:
    """What a run makes of its records, and who sends to whom in graphs that are read from files.

    Args:
        prepared: the run.
        folders: where data sets that have a name are.

    Raises:
        SottovoceError: the records cannot be read.
    """
    spec, data = prepared.run.spec, prepared.data
    if (schema := spec.data.schema) is not None:
        names = (*schema.names, *(["intercept"] if spec.data.intercept else []))
        yield f"features: {abbreviate_names(names, 60)}"
        yield f"label {_label_line(Encoder.from_schema(schema, spec.loss, spec.data.positive))}"
        yield f"l2 norm of a record: {_norm_line(schema, spec)}"
    elif not spec.data.is_live:
        yield from _columns(spec, read_source(spec.data, folders))
    if not spec.data.is_live:
        sizes = [len(each.labels) for each in data.learners]
        got = pluralize(max(sizes), "record")
        if min(sizes) < max(sizes):
            got = f"{format_count(min(sizes))} to {got}"
        held = f"{format_count(len(data.test_labels))} held out for accuracy"
        yield f"learners: {pluralize(len(sizes), 'learner')} with {got} each; {held}"
    if spec.topology.has_file:
        yield from _edges(spec)


def find_long_records(prepared: PreparedRun) -> Iterator[RunWarning]:
    """Whether records that nothing scaled are mostly cut to a small part of their length."""
    spec, data = prepared.run.spec, prepared.data
    if spec.data.is_live or spec.data.scale != "none" or spec.data.schema is not None:
        return
    limit = spec.loss.feature_bound
    rows = [np.linalg.norm(each.features, axis=-1) > _MAX_NORM_RATIO * limit for each in data.learners]
    if np.mean(np.concatenate(rows)) > 0.5:
        how = "data.scale: standard" if len(data.test_labels) else "in the file, for no record is held out to scale by"
        yield RunWarning(
            "LONG_ROWS",
            f"more than half of the records are over {_MAX_NORM_RATIO} times as long as loss.feature_bound, {format_number(limit)}, and are cut "
            f"to it, so their largest features hide all others: scale them ({how}), or declare a schema with bounds",
        )


def _edges(spec: RunSpec) -> Iterator[str]:
    """Who is meant by the nodes of graphs that are read from files."""
    section = spec.topology.inline_files(spec.names).model_dump(mode="json")
    graphs = [section["graph"]] if section["graph"] else section["sequence"]["graphs"]
    for graph in graphs:
        if graph["kind"] == "edges":
            between = " to " if graph["directed"] else " and "
            told = [between.join(spec.names[i] for i in edge) for edge in graph["edges"]]
            yield f"graph: {pluralize(len(told), 'edge')}: {abbreviate_names(told)}"


def _columns(spec: RunSpec, table: RawTable) -> Iterator[str]:
    names = table.columns or tuple(f"column {k}" for k in range(table.features.shape[1]))
    yield f"{spec.data.source}: {pluralize(len(table.labels), 'record')}, as they are read:"
    if table.header_reason is not None:
        yield f"first line: names of the columns, for {table.header_reason}"
    intercept = ", and a constant one, the intercept (data.intercept)" if spec.data.intercept else ""
    yield f"features: {len(names)} ({abbreviate_names(names)}){intercept}"
    if note := describe_constant_features(table):
        yield f"note: {note}"
    label = "label" if table.label is None else f"label, column {table.label!r}"
    yield f"{label}: {_meaning(table.labels, spec.loss, spec.data.positive)}"
    yield f"the first {min(_MAX_SHOWN_RECORDS, len(table.labels))}, not scaled yet: {', '.join((*names[:_MAX_SHOWN_COLUMNS], 'label'))}"
    for row, own in zip(
        table.features[:_MAX_SHOWN_RECORDS], format_labels(table.labels[:_MAX_SHOWN_RECORDS]), strict=True
    ):
        cut = ", ..." if len(row) > _MAX_SHOWN_COLUMNS else ""
        yield f"  {', '.join(f'{value:g}' for value in row[:_MAX_SHOWN_COLUMNS])}{cut}, {own}"


def _meaning(labels: AnyArray, loss: Loss, positive: tuple[int | str, ...] | None) -> str:
    """What each label is for the loss, and how many records have it."""
    mapped, _ = map_labels(labels, loss, positive)
    if loss.n_classes is None:
        return f"a number from {mapped.min():g} to {mapped.max():g}"
    distinct, first, many = np.unique(labels, return_index=True, return_counts=True)
    told = [
        f"{text} is {mapped[k]:g} ({pluralize(int(n), 'record')})"
        for text, k, n in zip(format_labels(distinct), first, many, strict=True)
    ]
    how = (
        ""
        if positive is not None or not loss.has_binary_labels
        else "; where another is to be 1, name it in data.positive"
    )
    if loss.has_binary_labels and len(told) == 1:
        how += ": all are the same, so there is nothing to tell apart"
    return f"{abbreviate_names(told)}{how}"
