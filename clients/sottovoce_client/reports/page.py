"""Pages: one HTML file each, with everything that it needs inside, to be opened, mailed and archived.

Python prepares values, figures and tables; the words and the structure are in `templates/`, where every page extends the one
skeleton `page.html.j2`. Whatever a template shows is escaped, and a name that nothing defines is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from sottovoce_client import wording
from sottovoce_client.reports.drawing import Figure, extra

_FILTERS = ("number", "count", "plural", "share", "share_range", "size", "duration", "reached_of")
"""Functions of `wording` that templates may use."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        head: its heading.
        show: a value as people read it.
        kind: how it stands: `number` to the right, `text` to the left, `long` to the left, on several lines.
        group: heading above it and its neighbours of the same group.
    """

    head: str
    show: Callable[[Any], str] = str
    kind: Literal["number", "text", "long"] = "number"
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
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    above: frozenset[tuple[int, int]] = frozenset()
    narrow: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings above the columns' own, and how many columns each spans; none without any."""
        spans = [(group, len(list(each))) for group, each in itertools.groupby(c.group for c in self.columns)]
        return spans if any(group for group, _ in spans) else []

    def texts(self) -> Iterator[list[str]]:
        """Rows as people read them."""
        for row in self.rows:
            yield [column.show(value) for column, value in zip(self.columns, row, strict=True)]

    def __html__(self) -> str:
        return _render("table.html.j2", table=self) if self else ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        template: what it is made from.
        exhibits: its figures and tables, which the template finds by name in `shown`.
        values: what else the template shows.
    """

    template: str
    exhibits: Sequence[Figure | PageTable]
    values: Mapping[str, Any]

    def html(self) -> str:
        """The page as text.

        Raises:
            SpecError: plotly or Jinja2 are not installed.
        """
        script = extra("plotly.offline").get_plotlyjs()
        shown = {each.name: each for each in self.exhibits}
        return _render(self.template, plotly_js=script, shown=shown, version=version("sottovoce"), **self.values)

    def write(self, path: Path) -> None:
        """Write the page.

        Raises:
            SpecError: plotly or Jinja2 are not installed.
        """
        path.write_text(self.html(), encoding="utf-8")


def _render(template: str, **values: Any) -> str:
    text: str = _templates().get_template(template).render(**values)
    return text


@cache
def _templates() -> Any:
    jinja = extra("jinja2")
    made = jinja.Environment(
        loader=jinja.PackageLoader("sottovoce_client.reports"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(wording, name) for name in _FILTERS}
    made.tests["infinite"] = math.isinf
    return made
