"""Schemas: draft them from public records, check records against them, and describe the records of a spec.

The descriptions serve `sottovoce init --schema-only`, `sottovoce data describe` and `sottovoce spec check`: columns, positive
class, records per learner, and edges between learners.
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
    "The sample must be public: bounds and categories are read from it, and are part of a spec that all participants see. Never "
    "draft from records that must be protected."
)


# ---- drafting --------------------------------------------------------------------------------------------------------


def infer(sample: Path, label: str | None, out: Path | None, console: Console | None = None) -> None:
    """Draft a schema from public records, and write it.

    Args:
        sample: A `.csv` or `.parquet` file.
        label: Label column; None: `label`, else `y`, else the last one.
        out: Output file; None: standard output.
        console: Console of the report.

    Raises:
        SpecError: The file or the label does not exist, or `out` exists already.
        DataError: No schema can be drafted from the sample.
    """
    console = console or terminal.create_console(stderr=True)
    require_new(out)
    _, header = read_names(require_source_file(sample, schema=True), label)
    columns = read_cells(sample)[0]
    try:
        draft = draft_schema(columns, label, header)
    except SpecError as error:
        raise SpecError(f"{sample}: {error}") from None
    except DataError as error:
        text = str(error)
        raise DataError(text if text.startswith(str(sample)) else f"{sample}: {text}") from None
    console.print(PUBLIC_SAMPLE_WARNING, style="bold")
    if out is None:
        print(draft.text, end="")
    else:
        with create_file(out) as file:
            file.write(draft.text.encode())
        _print_draft(draft, console)
        console.print(Text(f"{out}: widen the observed values to the possible ones"), soft_wrap=True)
    terminal.print_json_if_requested(lambda: {"out": out, "schema": parse_yaml(draft.text)})


def _print_draft(draft: SchemaDraft, console: Console) -> None:
    table = terminal.create_table("column", "type", "observed")
    for each in (*draft.features, *draft.ignored_columns):
        table.add_row(Text(each.name), "ignored" if each.field is None else each.field["type"], Text(each.why))
    table.add_row(Text(draft.label.name), f"label: {(draft.label.field or {})['type']}", "")
    console.print(table)


# ---- checking --------------------------------------------------------------------------------------------------------


def check(
    schema: Schema, records: Path | None = None, spec: RunSpec | None = None, console: Console | None = None
) -> bool:
    """Print a schema, and the number of records of a file that fit it.

    Args:
        schema: Schema to print.
        records: A `.csv` or `.parquet` file.
        spec: Run whose loss must accept the label.
        console: Console of the report.

    Returns:
        Whether all records fit.

    Raises:
        SpecError: The file does not exist, or the loss does not accept the label.
        DataError: The file cannot be read, or its columns are not those of the schema.
    """
    console = console or terminal.create_console()
    encoder = (
        Encoder.from_schema(schema, spec.loss, spec.data.positive)
        if spec
        else Encoder.from_schema(schema, _choose_loss(schema))
    )
    encoded = None if records is None else encode_file(records, encoder)[0]
    console.print(_field_table(schema))
    grid = terminal.create_fact_grid()
    for name, text in _facts(encoder, spec):
        grid.add_row(name, Text(text))
    console.print(grid)
    if records is not None and encoded is not None:
        _print_fit(records, encoded, console)
    fit = (
        None
        if encoded is None
        else {
            "records": len(encoded.accepted_mask),
            "fit": int(encoded.accepted_mask.sum()),
            "refused": encoded.reasons,
        }
    )
    terminal.print_json_if_requested(
        lambda: {"schema": schema.model_dump(mode="json"), "features": schema.width, "file": fit}
    )
    return encoded is None or not encoded.refusals


def _choose_loss(schema: Schema) -> Loss:
    """Choose a loss that accepts the label."""
    classes = schema.label.classes
    if classes is None:
        return RidgeLoss()
    return LogisticLoss() if len(classes) == 2 else SoftmaxLoss(classes=len(classes))


def _field_table(schema: Schema) -> Table:
    table = terminal.create_table("field", "type")
    table.add_column("values", overflow="fold")
    table.add_column("missing")
    table.add_column("out of bounds")
    table.add_column("features", justify="right")
    for name, feature in schema.features.items():
        beyond = feature.out_of_bounds if isinstance(feature, Number | Date) else MISSING_VALUE
        values = abbreviate_names(feature.words if isinstance(feature, Category) else (feature.accepted_values,))
        table.add_row(
            Text(name), feature.type, Text(values), feature.missing, beyond, format_count(len(feature.names(name)))
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
    """Describe the label: `outcome: 0 is home; 1 is died`."""
    label, values = encoder.schema.label, encoder.class_values
    if values is None:
        return f"{label.name}: a number from {label.accepted_values}, scaled onto [-1, 1]"
    words_by_value: dict[float, list[str]] = {value: [] for value in sorted(values)}
    for word, value in zip(label.classes or (), values, strict=True):
        words_by_value[value].append(word)
    return f"{label.name}: " + "; ".join(
        f"{value:g} is {abbreviate_names(words)}" for value, words in words_by_value.items()
    )


def _norm_line(schema: Schema, spec: RunSpec | None) -> str:
    """Describe the maximum norm of a record, and its clipping by a loss."""
    fields, intercept = len(schema.features), spec is None or spec.data.intercept
    bound = math.sqrt(fields + intercept)
    text = f"at most {format_number(bound)}{', the intercept included' if intercept else ''}"
    if spec is None:
        return f"{text}; a loss scales down records above its feature_bound"
    limit = spec.loss.feature_bound
    if bound <= limit:
        return f"{text}: within loss.feature_bound, {format_number(limit)}"
    return f"{text}; records above loss.feature_bound, {format_number(limit)}, are scaled down to it"


def _print_fit(records: Path, encoded: EncodedRecords, console: Console) -> None:
    """Print how many records fit, and the reasons for the others, without their values."""
    total, fitting = len(encoded.accepted_mask), int(encoded.accepted_mask.sum())
    console.print()
    console.print(Text(f"{records}: {format_count(fitting)} of {pluralize(total, 'record')} fit"), highlight=False)
    if encoded.refusals:
        first = {reason: row for row, reason in reversed([*encoded.refusals.items()])}
        table = terminal.create_table("refused", "reason")
        table.columns[0].justify = "right"
        table.add_column("first row", justify="right")
        for reason, count in encoded.reasons.items():
            table.add_row(format_count(count), Text(reason), format_count(first[reason]))
        console.print(table)
        console.print("Only the first reason of a record counts; rows are numbered from 0.", style="dim")
        if encoded.hint:
            console.print(Text(encoded.hint), soft_wrap=True)
    console.print("These figures describe the records themselves and are not protected.", style="dim")


_MAX_SHOWN_RECORDS = 5
"""Maximum number of records that are shown."""
_MAX_SHOWN_COLUMNS = 12
"""Maximum number of columns that are shown."""
_MAX_NORM_RATIO = 10
"""Ratio of norm to bound above which the largest features dominate a clipped row."""


def describe_records(prepared: PreparedRun, folders: Sequence[Path]) -> Iterator[str]:
    """Describe how a run reads its records, and the edges of graphs that are read from files.

    Args:
        prepared: The run.
        folders: Folders that contain data sets.

    Raises:
        SottovoceError: The records cannot be read.
    """
    spec, data = prepared.run.spec, prepared.data
    if (schema := spec.data.schema) is not None:
        names = (*schema.names, *(["intercept"] if spec.data.intercept else []))
        yield f"features: {abbreviate_names(names, 60)}"
        yield f"label {_label_line(Encoder.from_schema(schema, spec.loss, spec.data.positive))}"
        yield f"l2 norm of a record: {_norm_line(schema, spec)}"
    elif not spec.data.is_live:
        yield from _describe_table(spec, read_source(spec.data, folders))
    if not spec.data.is_live:
        sizes = [len(each.labels) for each in data.learners]
        range_text = pluralize(max(sizes), "record")
        if min(sizes) < max(sizes):
            range_text = f"{format_count(min(sizes))} to {range_text}"
        held = f"{format_count(len(data.test_labels))} held out for accuracy"
        yield f"learners: {pluralize(len(sizes), 'learner')} with {range_text} each; {held}"
    if spec.topology.has_file:
        yield from _describe_edges(spec)


def find_long_records(prepared: PreparedRun) -> Iterator[RunWarning]:
    """Find unscaled records that are mostly clipped to a small part of their norm."""
    spec, data = prepared.run.spec, prepared.data
    if spec.data.is_live or spec.data.scale.kind != "none" or spec.data.schema is not None:
        return
    limit = spec.loss.feature_bound
    rows = [np.linalg.norm(each.features, axis=-1) > _MAX_NORM_RATIO * limit for each in data.learners]
    if np.mean(np.concatenate(rows)) > 0.5:
        remedy = "data.scale: standard" if len(data.test_labels) else "in the file, because no record is held out"
        yield RunWarning(
            "LONG_ROWS",
            f"more than half of the records are over {_MAX_NORM_RATIO} times as long as loss.feature_bound, "
            f"{format_number(limit)}, and are clipped to it, so their largest features hide all others: scale them ({remedy}), "
            "or declare a schema with bounds",
        )


def _describe_edges(spec: RunSpec) -> Iterator[str]:
    """Describe the edges of graphs that are read from files, with the names of learners."""
    section = spec.topology.inline_files(spec.names).model_dump(mode="json")
    graphs = [section["graph"]] if section["graph"] else section["sequence"]["graphs"]
    for graph in graphs:
        if graph["kind"] == "edges":
            between = " to " if graph["directed"] else " and "
            edges = [between.join(spec.names[i] for i in edge) for edge in graph["edges"]]
            yield f"graph: {pluralize(len(edges), 'edge')}: {abbreviate_names(edges)}"


def _describe_table(spec: RunSpec, table: RawTable) -> Iterator[str]:
    names = table.columns or tuple(f"column {k}" for k in range(table.features.shape[1]))
    yield f"{spec.data.source}: {pluralize(len(table.labels), 'record')}, as they are read:"
    if table.header_reason is not None:
        yield f"first line: names of the columns, because {table.header_reason}"
    intercept = ", and a constant one, the intercept (data.intercept)" if spec.data.intercept else ""
    yield f"features: {len(names)} ({abbreviate_names(names)}){intercept}"
    if note := describe_constant_features(table):
        yield f"note: {note}"
    label = "label" if table.label is None else f"label, column {table.label!r}"
    yield f"{label}: {_describe_labels(table.labels, spec.loss, spec.data.positive)}"
    yield (
        f"the first {min(_MAX_SHOWN_RECORDS, len(table.labels))}, not scaled yet: "
        f"{', '.join((*names[:_MAX_SHOWN_COLUMNS], 'label'))}"
    )
    for row, own in zip(
        table.features[:_MAX_SHOWN_RECORDS], format_labels(table.labels[:_MAX_SHOWN_RECORDS]), strict=True
    ):
        cut = ", ..." if len(row) > _MAX_SHOWN_COLUMNS else ""
        yield f"  {', '.join(f'{value:g}' for value in row[:_MAX_SHOWN_COLUMNS])}{cut}, {own}"


def _describe_labels(labels: AnyArray, loss: Loss, positive: tuple[int | str, ...] | None) -> str:
    """Describe the value of each label for the loss, and its number of records."""
    mapped, _ = map_labels(labels, loss, positive)
    if loss.n_classes is None:
        return f"a number from {mapped.min():g} to {mapped.max():g}"
    distinct, first, counts = np.unique(labels, return_index=True, return_counts=True)
    meanings = [
        f"{text} is {mapped[k]:g} ({pluralize(int(n), 'record')})"
        for text, k, n in zip(format_labels(distinct), first, counts, strict=True)
    ]
    note = (
        ""
        if positive is not None or not loss.has_binary_labels
        else "; to make another one the positive class, name it in data.positive"
    )
    if loss.has_binary_labels and len(meanings) == 1:
        note += ": all are the same, so there is nothing to learn"
    return f"{abbreviate_names(meanings)}{note}"
