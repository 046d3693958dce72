"""A schema drafted from public records.

The draft fits every record that it was made from. What it says of them stands in a spec that everybody sees, so they must be
public; and somebody who knows the field must put what is possible in place of what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from pydantic import ValidationError

from sottovoce.data import guessing
from sottovoce.data.cells import Missing, cells_of, normal
from sottovoce.data.columns import default_label, require_column
from sottovoce.data.files import column_called
from sottovoce.data.guessing import ALWAYS, Drafted, Seen
from sottovoce.data.schema import Schema
from sottovoce.errors import DataError
from sottovoce.explaining import requirement
from sottovoce.yaml_files import write_yaml

_WIDE = 100
"""Characters of a line."""
_HEAD = """\
# A draft: types, bounds and categories are read off the sample, which must be public, for everybody sees them here.
# Put what is possible in place of what was seen: a record that says anything else is refused (or, beyond its bounds, clipped
# with `beyond: clip`). A missing value may be refused, neutral or flagged.
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """A schema that was drafted; `text` is its file.

    Attributes:
        columns: features, and what is ignored, in the order of the sample.
        label: what is learned.
        missing_values: what counts as no value.
    """

    columns: tuple[Drafted, ...]
    label: Drafted
    missing_values: tuple[str, ...]

    @property
    def features(self) -> tuple[Drafted, ...]:
        """What is learned from."""
        return tuple(each for each in self.columns if each.field is not None)

    @property
    def ignored(self) -> tuple[Drafted, ...]:
        """What is not."""
        return tuple(each for each in self.columns if each.field is None)

    @property
    def document(self) -> dict[str, Any]:
        """The schema, as YAML gives it."""
        return {
            "features": {each.name: dict(each.field or {}) for each in self.features},
            "ignored": [each.name for each in self.ignored],
            "label": {"name": self.label.name, **(self.label.field or {})},
            "missing_values": list(self.missing_values),
        }

    @property
    def text(self) -> str:
        """The schema as a file, with what was seen in comments."""
        document = self.document
        parts = [_HEAD, "features:\n"]
        parts += [indent(_commented(each.why, {each.name: each.field}), "  ") for each in self.features]
        if self.ignored:
            parts += ["ignored:\n", *(indent(_commented(each.why, [each.name]), "  ") for each in self.ignored)]
        parts.append(_commented(self.label.why, {"label": document["label"]}))
        if self.missing_values != ALWAYS:
            parts.append(_dumped({"missing_values": document["missing_values"]}))
        return "".join(parts)


def _commented(comment: str, entry: Any) -> str:
    return f"# {comment}\n" * bool(comment) + _dumped(entry)


def _dumped(entry: Any) -> str:
    """A mapping or a list as YAML: on a line where it is short."""
    if isinstance(entry, dict) and len(entry) == 1:
        line = write_yaml(entry, flow=True)[1:-2]
        if len(line) <= _WIDE and "\n" not in line:
            return f"{line}\n"
    return write_yaml(entry)


def draft(columns: Mapping[str, Any], label: str | None = None, header: str | None = None) -> Draft:
    """Draft a schema from the columns of public records.

    Args:
        columns: by name, one value for each record: as `Encoder.columns` takes them.
        label: the label column; None: `label`, else `y`, else the last one.
        header: why the names of a file's columns are names, as `RawTable.header`.

    Raises:
        SpecError: there is no such label column.
        DataError: there is no record, nothing to learn from, or the label is none that can be learned.
    """
    named = {normal(name): cells_of(column, name) for name, column in columns.items()}
    if len(named) < len(columns) or len({len(cells) for cells in named.values()}) > 1:
        raise DataError("columns must have names that differ, and equally many values")
    if len(named) < 2 or not all(len(cells) for cells in named.values()):
        raise DataError("a schema is drafted from records: there must be one, with a field to learn from and a label")
    if "" in named:
        at = [*named].index("")
        raise DataError(
            f"every column must have a name, and column {at} (counted from 0) has none: name it or drop it (pandas "
            "writes the index of a table so)"
        )
    label = default_label([*named]) if label is None else normal(label)
    require_column([*named], label, "the label must be one of the columns")
    missing_values = (*ALWAYS, *guessing.gaps(named.values(), ALWAYS))
    seen = {name: Seen.of(cells, Missing.of(missing_values)) for name, cells in named.items()}
    drafted = tuple(guessing.feature(name, each) for name, each in seen.items() if name != label)
    called = {name: column_called(k, name, header).replace("column '", "'") for k, name in enumerate(named)}
    made = Draft(drafted, guessing.label(label, seen[label], called[label]), missing_values)
    if not made.features:
        why = "; ".join(f"{called[each.name]}: {each.why}" for each in made.ignored)
        raise DataError(f"there must be a column to learn from beside the label, and there is none ({why})")
    try:
        Schema.model_validate(made.document)
    except ValidationError as error:
        problem = error.errors()[0]
        where, what = ".".join(map(str, problem["loc"])), requirement(problem)
        raise DataError(f"these columns give no schema: {f'{where}: ' if where else ''}{what}") from None
    return made
