"""Terminal output: escaped text, tables in one style, JSON results, notices and progress bars."""

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
from typing import Any, Literal, Protocol, TextIO

from pydantic_core import to_json
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from sottovoce_client.formatting import format_duration
from sottovoce_core.text import escape_control_lines

_REDRAW_PERIOD_S = 0.1
"""Minimum seconds between two redraws of a bar, so that frequent reports do not slow the work down."""

_LINE_PERIOD_S, _FIRST_LINE_DELAY_S = 30.0, 10.0
"""Seconds between two lines of progress where standard error is not a terminal, and until the first one."""

WAIT_NOTICE_DELAY_S = 1.5
"""Seconds of waiting after which a notice names what is awaited."""


def create_console(**options: Any) -> Console:
    """Create a Rich console for standard output, with Rich's `options`.

    Names, details and captures come from other machines: text is never parsed as markup, and control characters are escaped.
    """
    console = Console(**{"markup": False, "emoji": False, **options})
    console.push_render_hook(_EscapeHook())
    return console


class _EscapeHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Escaped:
    """A renderable whose control characters are escaped after layout; line breaks of the layout are kept."""

    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else escape_control_lines(text), style, control)


def print_json(document: Any) -> None:
    """Print a result as JSON: plain values, dataclasses, paths and arrays; non-finite numbers become null."""
    text = to_json(document, indent=2, inf_nan_mode="null", fallback=lambda array: array.tolist()).decode()
    print(text, file=_JSON_OUTPUT.get() or sys.stdout)


_JSON_OUTPUT: ContextVar[TextIO | None] = ContextVar("_JSON_OUTPUT", default=None)
"""Output of `print_json` while standard output is reserved for it; None: it is not reserved."""


@contextmanager
def reserve_stdout_for_json() -> Iterator[None]:
    """Reserve standard output for `print_json` in the block: all other output goes to standard error."""
    before = _JSON_OUTPUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _JSON_OUTPUT.reset(before)


def is_json_requested() -> bool:
    """Return whether `--json` is in force."""
    return _JSON_OUTPUT.get() is not None


def print_json_if_requested(build_document: Callable[[], Any]) -> None:
    """Print the result of a command as JSON if `--json` is in force."""
    if is_json_requested():
        print_json(build_document())


def print_json_file_if_requested(path: Path, **more: Any) -> None:
    """Print a JSON result file, its folder and `more` keys, if `--json` is in force."""
    print_json_if_requested(lambda: {"folder": path.parent, **json.loads(path.read_bytes()), **more})


def print_notice(text: str) -> None:
    """Print a notice on standard error, apart from the result of the command."""
    print(escape_control_lines(text), file=sys.stderr, flush=True)


INCOMPLETE_EXIT_CODE = 3
"""Exit code of a command whose results are complete except for a page or a figure."""


def attempt(file_name: str, make: Callable[[], object]) -> int:
    """Make a page or a figure of results that are already saved; an error does not fail the command.

    Args:
        file_name: Name of the file, for the error line.
        make: Function that makes it.

    Returns:
        The exit code: 0, or `INCOMPLETE_EXIT_CODE` after a line on standard error with the reason.
    """
    from sottovoce_rpc.logs import describe_reason

    try:
        make()
    except Exception as error:  # noqa: BLE001 - drawing and user code may raise any error
        print_notice(
            f"sottovoce: {file_name} could not be made: {describe_reason(error)}. All other results are complete."
        )
        return INCOMPLETE_EXIT_CODE
    return 0


@contextmanager
def print_if_slow(text: str) -> Iterator[None]:
    """Print a line if the block takes longer than `WAIT_NOTICE_DELAY_S`."""
    timer = threading.Timer(WAIT_NOTICE_DELAY_S, print, [text], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ProgressReporter(Protocol):
    """Progress callback: `report("simulating", 40, 500, "rounds")` fills a bar; without numbers the bar is indeterminate."""

    def __call__(self, activity: str, done: int = 0, total: int = 0, unit: str = "") -> None: ...


def ignore_progress(activity: str, done: int = 0, total: int = 0, unit: str = "") -> None:
    """Report nothing."""


@contextmanager
def show_progress_bar(activity: str) -> Iterator[ProgressReporter]:
    """Show a progress bar with the remaining time on standard error during the block.

    If that is not a terminal, print a line every `_LINE_PERIOD_S` instead, the first earlier: short work prints nothing.
    """
    console = create_console(stderr=True)
    if not console.is_terminal:
        yield _make_line_reporter()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task, due = progress.add_task(activity, total=None), 0.0

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


def _make_line_reporter() -> ProgressReporter:
    """Make a reporter that prints a line now and then: how much is done, the time since the start, and about what is left."""
    started = time.monotonic()
    due = started + _FIRST_LINE_DELAY_S

    def report(activity: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        nonlocal due
        if (now := time.monotonic()) < due:
            return
        due = now + _LINE_PERIOD_S
        amount = f": {done:,} of {total:,} {unit}" if total else ""
        left = format_duration(round((now - started) * (total - done) / done)) if 0 < done < total else ""
        print_notice(f"{activity}{amount}, after {now - started:,.0f} s{left and f', about {left} left'}")

    return report


def create_table(*headings: str, **options: Any) -> Table:
    """Create a table with these columns and Rich's `options`; more columns may be added."""
    return Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", **options)


def fit_table(
    width: int,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right_aligned: Container[str],
    optional_columns: Sequence[str],
) -> tuple[Table, list[str]]:
    """Build a table that fits the terminal: text and headings wrap only between words.

    Args:
        width: Width of the terminal.
        headings, rows: Content.
        right_aligned: Headings of right-aligned columns, such as numbers, whose cells never wrap.
        optional_columns: Headings of columns that are dropped, in this order, while the table is too wide.

    Returns:
        The table, and the dropped headings.
    """
    columns = dict(zip(headings, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(headings, ())
    widths = {head: max(map(cell_len, _unbreakable(head, columns[head], head in right_aligned))) for head in headings}
    dropped: list[str] = []
    for head in optional_columns:
        if _free_width(width, widths) < 0:
            dropped.append(head)
            del widths[head]
    full_widths = {head: max(map(cell_len, (head, *columns[head]))) for head in widths}
    table = create_table()
    for head in sorted(widths, key=lambda each: each in right_aligned):  # text gains more from width than numbers
        widths[head] += min(full_widths[head] - widths[head], max(_free_width(width, widths), 0))
    for head, column_width in widths.items():
        alignment: Literal["left", "right"] = "right" if head in right_aligned else "left"
        table.add_column(head, justify=alignment, overflow="fold", width=column_width)
    for cells in zip(*(columns[head] for head in widths), strict=True):
        table.add_row(*cells)
    return table, dropped


def _unbreakable(head: str, cells: Sequence[str], is_number: bool) -> list[str]:
    """Return the parts of a column that must not be broken."""
    return [*head.split(), *(cells if is_number else " ".join(cells).split())]


def _free_width(width: int, columns: Mapping[str, int]) -> int:
    """Return the width that the columns and their margins (see `create_table`) leave free."""
    return width - sum(columns.values()) - 2 * len(columns)


def create_fact_grid() -> Table:
    """Create a grid with rows of a name and a value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid
