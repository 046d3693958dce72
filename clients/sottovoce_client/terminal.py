"""The terminal: text on it is text, whoever has written it; and tables, alike in every command."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from pydantic_core import to_json
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from sottovoce_core.text import escape_control_lines

_REDRAW_PERIOD_S = 0.1
"""A bar is drawn again after so long: what reports every millisecond is not slowed down by it."""

WAIT_NOTICE_DELAY_S = 1.5
"""After which whoever waits is told for what."""


def create_console(**look: Any) -> Console:
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
            yield Segment(text if control else escape_control_lines(text), style, control)


def print_json(document: Any) -> None:
    """A result for programs, on standard output: plain values, dataclasses, paths and arrays; what is not finite is null."""
    text = to_json(document, indent=2, inf_nan_mode="null", fallback=lambda array: array.tolist()).decode()
    print(text, file=_APART.get() or sys.stdout)


_APART: ContextVar[TextIO | None] = ContextVar("_APART", default=None)
"""Where `print_json` writes while words go elsewhere."""


@contextmanager
def reserve_stdout_for_json() -> Iterator[None]:
    """While it lasts, standard output has what `print_json` writes and nothing else: words go to standard error."""
    before = _APART.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _APART.reset(before)


def is_json_requested() -> bool:
    """Whether `--json` is in force."""
    return _APART.get() is not None


def print_json_if_requested(build_document: Callable[[], Any]) -> None:
    """What a command came to, as JSON, where that was asked for; in words it was said before."""
    if is_json_requested():
        print_json(build_document())


def print_json_file_if_requested(path: Path, **more: Any) -> None:
    """The same, where it has been written to a file; with its folder, and what else there is."""
    print_json_if_requested(lambda: {"folder": path.parent, **json.loads(path.read_bytes()), **more})


def print_notice(text: str) -> None:
    """A line for whoever waits: on standard error, beside what the command came for."""
    print(escape_control_lines(text), file=sys.stderr, flush=True)


INCOMPLETE_EXIT_CODE = 3
"""Exit code of a command whose results are there, but for a page or a figure of them that could not be made."""


def attempt(file_name: str, make: Callable[[], object]) -> int:
    """Make something of results that are written down already: whatever it raises, they are not lost.

    Args:
        what: is made, such as the name of a file.
        make: does it.

    Returns:
        The exit code: 0, or `INCOMPLETE`, after a line on standard error that says why.
    """
    from sottovoce_rpc.logs import describe_reason

    try:
        make()
    except Exception as error:  # noqa: BLE001 - drawing, and code of a user's own, may raise anything
        print_notice(
            f"sottovoce: {file_name} could not be made: {describe_reason(error)}. All other results are complete."
        )
        return INCOMPLETE_EXIT_CODE
    return 0


@contextmanager
def print_if_slow(text: str) -> Iterator[None]:
    """Print a line, once, where what is done within takes long."""
    timer = threading.Timer(WAIT_NOTICE_DELAY_S, print, [text], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ProgressReporter(Protocol):
    """Reports progress: `say("simulating", 40, 500, "rounds")` fills a bar; without numbers the bar moves."""

    def __call__(self, activity: str, done: int = 0, total: int = 0, unit: str = "") -> None: ...


def ignore_progress(activity: str, done: int = 0, total: int = 0, unit: str = "") -> None:
    """Report nothing."""


@contextmanager
def show_progress_bar(what: str) -> Iterator[ProgressReporter]:
    """Show a progress bar with the time left on standard error until the block ends; nothing where that is no terminal."""
    shown = create_console(stderr=True)
    if not shown.is_terminal:
        yield ignore_progress
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, transient=True, redirect_stdout=False) as progress:
        task, due = progress.add_task(what, total=None), 0.0

        def report(activity: str, done: int = 0, total: int = 0, unit: str = "") -> None:
            nonlocal due
            if not total:
                progress.reset(task, total=None, description=activity)
            elif time.monotonic() >= due or done == total:
                due = time.monotonic() + _REDRAW_PERIOD_S
                progress.update(
                    task, completed=done, total=total, description=f"{activity}: {done:,} of {total:,} {unit}"
                )

        yield report


def create_table(*heads: str, **look: Any) -> Table:
    """A table with these columns, to which more may be added; `look` is Rich's."""
    return Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", **look)


def fit_table(
    width: int,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right_aligned: Container[str],
    optional_columns: Sequence[str],
) -> tuple[Table, list[str]]:
    """A table that the terminal is wide enough for: text and heads break between words, and nothing else does.

    Args:
        width: of the terminal.
        heads, rows: what it says.
        right: heads of columns that stand to the right, as numbers do; they are never broken.
        spare: heads of columns that are left out where there is no room for all, the first one first.

    Returns:
        The table, and the heads that were left out.
    """
    columns = dict(zip(headings, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(headings, ())
    least = {head: max(map(cell_len, _whole(head, columns[head], head in right_aligned))) for head in headings}
    left_out: list[str] = []
    for head in optional_columns:
        if _room(width, least) < 0:
            left_out.append(head)
            del least[head]
    most = {head: max(map(cell_len, (head, *columns[head]))) for head in least}
    made = create_table()
    for head in sorted(least, key=lambda each: each in right_aligned):  # words gain more by room than heads of numbers
        wanted, room = most[head] - least[head], max(_room(width, least), 0)
        least[head] += min(wanted, room)
    for head, wide in least.items():
        made.add_column(head, justify="right" if head in right_aligned else "left", overflow="fold", width=wide)
    for cells in zip(*(columns[head] for head in least), strict=True):
        made.add_row(*cells)
    return made, left_out


def _whole(head: str, cells: Sequence[str], number: bool) -> list[str]:
    """What of a column must stay in one piece."""
    return [*head.split(), *(cells if number else " ".join(cells).split())]


def _room(width: int, columns: Mapping[str, int]) -> int:
    """What columns leave of a width, with their margins as in `table`."""
    return width - sum(columns.values()) - 2 * len(columns)


def create_fact_grid() -> Table:
    """Rows of a name and what there is to say."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid
