"""Tables of pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sottovoce_client.reports.rendering import render


@dataclass(frozen=True, slots=True)
class Column:
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
        return render("table.html.j2", table=self) if self else ""
