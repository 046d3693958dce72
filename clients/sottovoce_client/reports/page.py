"""HTML pages: self-contained files, to be opened, mailed and archived.

Python prepares values, figures and tables; text and structure are in `templates/`, where every page extends the skeleton
`page.html.j2`. Templates escape all values, and an undefined name is an error.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

from sottovoce_client import formatting
from sottovoce_client.atomic_files import Opener, write_text
from sottovoce_core.optional import import_optional

COLOURS = {
    "blue": ("#0072b2", "#58aee6"),
    "red": ("#d55e00", "#ff8f4a"),
    "green": ("#008a64", "#3fc99f"),
    "pink": ("#b5568f", "#e39bc6"),
    "orange": ("#b57a00", "#e6b04c"),
    "sky": ("#3391c9", "#9ad4f5"),
    "grey": ("#5f6870", "#b3bec8"),
    "brown": ("#8c6d31", "#c9a866"),
    "ink": ("#1f2933", "#e4eaf0"),
    "faint": ("#6b7785", "#93a1ae"),
    "rule": ("#8b97a3", "#75838f"),
    "area": ("#9aa5b1", "#7c8a97"),
    "below": ("#1f6fc0", "#1f6fc1"),
    "above": ("#d64a1c", "#d64a1d"),
    "soft": ("#4f5d6a", "#a9b6c2"),
    "line": ("#e1e6eb", "#2c3742"),
    "paper": ("#ffffff", "#18212a"),
}
"""Colours for the light and the dark scheme: Okabe and Ito's palette, which colour-blind readers can distinguish, darkened
where a colour would be pale on white."""
_MAX_PHONE_COLUMNS, _MAX_CARDS = 3, 50
_FILTERS = (
    "format_number",
    "format_p_value",
    "format_count",
    "pluralize",
    "format_percent",
    "format_percent_range",
    "format_bytes",
    "format_duration",
    "format_rounds_done",
)
"""Functions of `formatting` that are filters in templates."""


def render(template: str, **values: Any) -> str:
    """Render a template of `templates/`.

    Raises:
        SpecError: Jinja2 is not installed.
    """
    text: str = _templates().get_template(template).render(**values)
    return text


@cache
def _templates() -> Any:
    jinja = import_optional("jinja2", "Jinja2", "a page")
    environment = jinja.Environment(
        loader=jinja.PackageLoader("sottovoce_client.reports"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formatting, name) for name in _FILTERS}
    environment.tests["infinite"] = math.isinf
    return environment


@dataclass(frozen=True, slots=True)
class PageColumn:
    """A column of a table.

    Attributes:
        head: Heading.
        show: Function that formats a value.
        kind: Layout: `number` is right-aligned, `text` left-aligned, `long` left-aligned on several lines; `bar` shows a share
            with a bar.
        group: Heading above the neighbouring columns of the same group.
    """

    head: str
    show: Callable[[Any], str] = str
    kind: Literal["number", "text", "long", "bar"] = "number"
    group: str = ""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of a page; without rows it is false and not shown.

    Attributes:
        name: Unique name among the elements of the page.
        title: Caption.
        columns: Columns; the first names a row.
        rows: Rows of values, one for each column.
        exceeding_cells: Cells with a value above the claim, as (row, column).
        is_narrow: True if the table takes only the width that it needs.
    """

    name: str
    title: str
    columns: Sequence[PageColumn]
    rows: Sequence[Sequence[Any]]
    exceeding_cells: frozenset[tuple[int, int]] = frozenset()
    is_narrow: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Group headings and the number of columns that each spans; empty if no column has a group."""
        spans = [(group, len(list(each))) for group, each in itertools.groupby(c.group for c in self.columns)]
        return spans if any(group for group, _ in spans) else []

    @property
    def is_folded(self) -> bool:
        """True if a phone, which is too narrow for the columns, shows each row as a card; long tables are scrolled."""
        return len(self.columns) > _MAX_PHONE_COLUMNS and len(self.rows) <= _MAX_CARDS

    def format_rows(self) -> Iterator[list[str]]:
        """Yield the rows as formatted text."""
        for row in self.rows:
            yield [column.show(value) for column, value in zip(self.columns, row, strict=True)]

    def __html__(self) -> str:
        return render("table.html.j2", table=self) if self else ""


class PageElement(Protocol):
    """A figure or a table of a page; an empty one is false and not shown."""

    @property
    def name(self) -> str:
        """Unique name among the elements of the page."""
        ...

    def __bool__(self) -> bool: ...

    def __html__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        template: Name of its template.
        elements: Its figures and tables; the template finds them by name in `elements`.
        values: Other values of the template.
    """

    template: str
    elements: Sequence[PageElement]
    values: Mapping[str, Any]

    def to_html(self) -> str:
        """Render the page.

        Raises:
            SpecError: Jinja2 is not installed.
        """
        elements = {each.name: each for each in self.elements}
        script = render("page.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        skeleton = {"script": script, "script_digest": digest, "colours": COLOURS, "version": version("sottovoce")}
        return render(self.template, elements=elements, **skeleton, **self.values)

    def write(self, path: Path, *, opener: Opener | None = None) -> None:
        """Write the page to a file; `opener` is passed to `open`, such as `open_private`.

        Raises:
            SpecError: Jinja2 is not installed.
        """
        write_text(path, self.to_html(), opener=opener)
