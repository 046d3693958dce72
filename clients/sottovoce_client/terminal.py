"""Tables on the terminal, alike in every command."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table


def table(*heads: str, **look: Any) -> Table:
    """A table with these columns, to which more may be added; `look` is Rich's."""
    return Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", **look)


def facts() -> Table:
    """Rows of a name and what there is to say."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid
