"""Pages: one HTML file each, with everything that it needs inside, to be opened, mailed and archived.

Python prepares values, figures and tables; the words and the structure are in `templates/`, where every page extends the one
skeleton `page.html.j2`. Whatever a template shows is escaped, and a name that nothing defines is an error.
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
"""In light and in dark: Okabe and Ito's, which all readers can tell apart, darker where they would be pale on white."""
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
"""Functions of `formatting` that templates may use."""


def render(template: str, **values: Any) -> str:
    """A template of `templates/`, filled in.

    Raises:
        SpecError: Jinja2 is not installed.
    """
    text: str = _templates().get_template(template).render(**values)
    return text


@cache
def _templates() -> Any:
    jinja = import_optional("jinja2", "Jinja2", "a page")
    made = jinja.Environment(
        loader=jinja.PackageLoader("sottovoce_client.reports"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(formatting, name) for name in _FILTERS}
    made.tests["infinite"] = math.isinf
    return made


@dataclass(frozen=True, slots=True)
class PageColumn:
    """A column of a table.

    Attributes:
        head: its heading.
        show: a value as people read it.
        kind: how it stands: `number` to the right, `text` to the left, `long` to the left, on several lines; `bar`: a share,
            and a bar of it.
        group: heading above it and its neighbours of the same group.
    """

    head: str
    show: Callable[[Any], str] = str
    kind: Literal["number", "text", "long", "bar"] = "number"
    group: str = ""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table on a page; false, and not shown, without rows.

    Attributes:
        name: no other figure or table of the page has it.
        title: what it shows.
        columns: the first one names a row.
        rows: of values, as many in each as there are columns.
        above: cells that show more than was claimed, as row and column.
        narrow: no wider than it must be.
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
        """Headings above the columns' own, and how many columns each spans; none without any."""
        spans = [(group, len(list(each))) for group, each in itertools.groupby(c.group for c in self.columns)]
        return spans if any(group for group, _ in spans) else []

    def format_rows(self) -> Iterator[list[str]]:
        """Rows as people read them."""
        for row in self.rows:
            yield [column.show(value) for column, value in zip(self.columns, row, strict=True)]

    def __html__(self) -> str:
        return render("table.html.j2", table=self) if self else ""


class PageElement(Protocol):
    """A figure or a table; false, and not shown, where there is nothing to show."""

    @property
    def name(self) -> str:
        """No other one of the page has it."""
        ...

    def __bool__(self) -> bool: ...

    def __html__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        template: what it is made from.
        exhibits: its figures and tables, which the template finds by name in `shown`.
        values: what else the template shows.
    """

    template: str
    elements: Sequence[PageElement]
    values: Mapping[str, Any]

    def to_html(self) -> str:
        """The page as text.

        Raises:
            SpecError: Jinja2 is not installed.
        """
        shown = {each.name: each for each in self.elements}
        script = render("page.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        skeleton = {"script": script, "script_digest": digest, "colours": COLOURS, "version": version("sottovoce")}
        return render(self.template, shown=shown, **skeleton, **self.values)

    def write(self, path: Path, *, opener: Opener | None = None) -> None:
        """Write the page; `opener`: as of `open`, such as `private`.

        Raises:
            SpecError: Jinja2 is not installed.
        """
        write_text(path, self.to_html(), opener=opener)
