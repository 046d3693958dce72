"""The terminal: text on it is text, whoever has written it; and tables, alike in every command."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from sottovoce.plain import plain_lines

_DRAWN_S = 0.1


def console(**look: Any) -> Console:
    """The terminal, or wherever standard output goes; `look` is Rich's.

    Names, details and captures come from others: no text is taken for markup, and what would steer the terminal is shown escaped.
    """
    made = Console(**{"markup": False, "emoji": False, **look})
    made.push_render_hook(_Plainly())
    return made


class _Plainly(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is printed, once it has its place and style: lines are those of whoever prints."""

    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else plain_lines(text), style, control)


def print_json(document: Any) -> None:
    """A result for programs, on standard output: plain values, dataclasses, paths and arrays; what is not finite is null."""
    print(to_json(document, indent=2, inf_nan_mode="null", fallback=lambda array: array.tolist()).decode())


def say(text: str) -> None:
    """A line for whoever waits: on standard error, beside what the command came for."""
    print(plain_lines(text), file=sys.stderr, flush=True)


@dataclass(slots=True)
class Bar:
    """How far something is: shown on a terminal, and nowhere else."""

    _shown: Progress | None
    _next: float = field(default=0.0, init=False)
    """When it is drawn again: what reports every millisecond is not slowed down by that."""

    def __call__(self, done: float, of: float) -> None:
        """So much of it is done."""
        if self._shown is not None and (done >= of or time.monotonic() >= self._next):
            self._next = time.monotonic() + _DRAWN_S
            self._shown.update(self._shown.task_ids[0], completed=done, total=of)

    def say(self, what: str) -> None:
        """What is being done; how much of it there is, is not known yet."""
        if self._shown is not None:
            self._shown.reset(self._shown.task_ids[0], total=None, description=what)


@contextmanager
def bar(what: str) -> Iterator[Bar]:
    """A bar with the time left, on standard error and until the block ends; nothing where that is no terminal."""
    shown = console(stderr=True)
    if not shown.is_terminal:
        yield Bar(None)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, transient=True, redirect_stdout=False) as progress:
        progress.add_task(what, total=None)
        yield Bar(progress)


def table(*heads: str, **look: Any) -> Table:
    """A table with these columns, to which more may be added; `look` is Rich's."""
    return Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", **look)


def facts() -> Table:
    """Rows of a name and what there is to say."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid
