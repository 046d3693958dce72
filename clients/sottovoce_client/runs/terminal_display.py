"""Terminal output of a run: its progress, and its summary."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.formatting import (
    MISSING_VALUE,
    NO_ACCURACY_NOTE,
    NO_TEST_RECORDS_NOTE,
    describe_detections,
    describe_measurement,
    describe_recorded_rounds,
    describe_staleness,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_percent_range,
    format_planned_rounds,
    format_rounds_done,
    pluralize,
)
from sottovoce_client.reports.run_figures import is_single_use
from sottovoce_client.reports.run_report import (
    LEVEL_LABELS,
    compose_statements,
    determine_verdict,
    find_worst_case,
    is_above_claim,
)
from sottovoce_client.runs.summary import LearnerSummary, ObservedPrivacyLoss, RunProgress, RunSummary
from sottovoce_core.text import escape_control

LIVE_INTERVAL_S = 0.125
PLAIN_INTERVAL_S = 2.0
MAX_ROWS = 10
"""Maximum number of learners in the final table."""
MAX_VIOLATION_LINES = 3
"""Maximum number of violation lines in the live display."""
_MAX_NAMED_LEARNERS = 3
"""Maximum number of disconnected learners that a line names."""
_VERDICT_STYLES = {"consistent": "green", "refuted": "bold red", "open": "yellow", "weak": "yellow"}
_STATE_STYLES = {"finished": "bold green", "stopped": "bold yellow", "failed": "bold red"}

_Clock = Callable[[], float]


@contextmanager
def display_run(
    title: str,
    rounds: int | None,
    names: Sequence[str],
    plain: bool = False,
    *,
    budgets: Sequence[float | None] = (),
    console: Console | None = None,
    clock: _Clock = time.monotonic,
) -> Iterator[_Lines | _Display]:
    """Show a run while the context lasts: live on a terminal, else (or if `plain`) as lines without escape codes.

    The live display disappears at the end, before `print_summary`. The yielded object's `update` takes the `progress`, the run's
    `state` in a word, and `captured_messages` (None: no capture); it can be called at any rate, and skips calls that follow too
    soon.

    Args:
        rounds: Planned rounds; None: unbounded.
        names: Names of the learners.
        budgets: Epsilon limits of the learners; empty: none.
    """
    console = console or terminal.create_console()
    if plain or not console.is_terminal:
        lines = _Lines(console, rounds, clock)
        lines.write(f"{title}: {pluralize(len(names), 'learner')}, {format_planned_rounds(rounds)}")
        yield lines
        return
    # No refreshing thread: nothing changes between two updates.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Display(live, title, rounds, names, budgets or [None] * len(names), clock)


class _Pace:
    """Speed over the last observations, so that a slow start does not count."""

    def __init__(self, rounds: int | None) -> None:
        self._planned = rounds
        self._observations: deque[tuple[float, int]] = deque(maxlen=40)

    def add(self, progress: RunProgress) -> None:
        self._observations.append((progress.seconds, progress.rounds_done))

    @property
    def done(self) -> int:
        """Minimum number of completed rounds over the learners."""
        return self._observations[-1][1] if self._observations else 0

    @property
    def speed(self) -> float:
        """Rounds per second."""
        if not self._observations:
            return 0.0
        first, (now, done) = (
            (self._observations[0] if len(self._observations) > 1 else (0.0, 0)),
            self._observations[-1],
        )
        return max(0, done - first[1]) / (now - first[0]) if now > first[0] else 0.0

    @property
    def time_left(self) -> str:
        """Estimated remaining time, in words; empty if unknown."""
        missing = (self._planned or 0) - self.done
        return format_duration(math.ceil(missing / self.speed)) if self.speed > 0 and missing > 0 else ""


class _Announcements:
    """Lines that are shown once, when the fact changes."""

    def __init__(self) -> None:
        self._run_id, self._capture_error = "", ""

    def list_new(self, progress: RunProgress) -> Iterator[str]:
        if progress.run_id != self._run_id:
            self._run_id = progress.run_id
            yield f"run {progress.run_id}"
        if progress.capture_error is not None and progress.capture_error != self._capture_error:
            self._capture_error = progress.capture_error
            yield progress.capture_error or "the run is captured again: its eavesdropper has reconnected"


# ---- lines ------------------------------------------------------------------------------------------------------------


class _Lines:
    """Line output: about every two seconds, at every tenth of the rounds, and when the state changes."""

    def __init__(self, console: Console, rounds: int | None, clock: _Clock) -> None:
        self._console, self._rounds, self._clock = console, rounds, clock
        self._pace = _Pace(rounds)
        self._last_time, self._last_tenth, self._last_state = clock(), 0, ""
        self._violation_count, self._announcements = 0, _Announcements()

    def write(self, text: str) -> None:
        # Neither wrapped at the assumed 80 columns of a pipe, nor coloured, nor parsed as markup.
        self._console.out(escape_control(text), highlight=False)

    def update(self, progress: RunProgress, state: str, captured_messages: int | None) -> None:
        self._pace.add(progress)
        for line in self._announcements.list_new(progress):
            self.write(line)
        now, tenth = self._clock(), 10 * self._pace.done // self._rounds if self._rounds else 0
        state = _append_offline_names(state, progress)
        known = (self._last_tenth, self._last_state, self._violation_count)
        if now - self._last_time < PLAIN_INTERVAL_S and (tenth, state, len(progress.violations)) == known:
            return
        self._last_time, self._last_tenth, self._last_state = now, tenth, state
        for line in progress.violations[self._violation_count :]:
            self.write(f"violation: {line}")
        self._violation_count = len(progress.violations)
        self.write("  ".join(self._parts(progress, state, captured_messages)))

    def _parts(self, progress: RunProgress, state: str, captured_messages: int | None) -> Iterator[str]:
        yield f"round {self._pace.done}" + (f"/{self._rounds}" if self._rounds else "")
        yield state
        yield f"{format_number(self._pace.speed, 3)} rounds/s"
        if any(value is not None for value in progress.accuracy):
            yield f"accuracy {format_percent_range(progress.accuracy)}"
        yield f"epsilon <= {format_number(max(progress.spending, default=0.0))}"
        if captured_messages is not None:
            yield f"{pluralize(captured_messages, 'message')} recorded"


# ---- live -------------------------------------------------------------------------------------------------------------


class _Display:
    """Live display: a bar over the rounds, and a row for each learner."""

    def __init__(
        self,
        live: Live,
        title: str,
        rounds: int | None,
        names: Sequence[str],
        budgets: Sequence[float | None],
        clock: _Clock,
    ) -> None:
        self._live, self._title, self._rounds, self._names, self._budgets = live, title, rounds, names, budgets
        self._clock, self._pace, self._shown = clock, _Pace(rounds), (-math.inf, "")
        self._announcements = _Announcements()

    def update(self, progress: RunProgress, state: str, captured_messages: int | None) -> None:
        for line in self._announcements.list_new(progress):  # above the display, and permanent
            self._live.console.print(Text(line, style="dim"))
        shown_at, shown_state = self._shown
        now = self._clock()
        if now - shown_at < LIVE_INTERVAL_S and state == shown_state:
            return
        self._shown = (now, state)
        self._pace.add(progress)
        self._live.update(self._render(progress, state, captured_messages), refresh=True)

    def _render(self, progress: RunProgress, state: str, captured_messages: int | None) -> RenderableType:
        head = Text.assemble(
            (self._title, "bold"),
            ("  ", ""),
            (_append_offline_names(state, progress), _STATE_STYLES.get(state, "cyan")),
        )
        violations = [_cut(f"violation: {line}") for line in progress.violations[:MAX_VIOLATION_LINES]]
        recorded = "" if captured_messages is None else f"{pluralize(captured_messages, 'message')} recorded"
        return Group(
            head,
            self._bar(),
            self._table(progress),
            *violations,
            *([Text(recorded, style="magenta")] if recorded else []),
        )

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        done, speed = f"round {format_count(self._pace.done)}", f"{format_number(self._pace.speed, 3)} rounds/s"
        if self._rounds is None:
            row.add_row(done, speed, "until it is stopped")
            return row
        bar = ProgressBar(total=self._rounds, completed=self._pace.done, width=28)
        time_left = f"{self._pace.time_left} left" if self._pace.time_left else ""
        row.add_row(bar, f"{done}/{format_count(self._rounds)}", speed, time_left)
        return row

    def _table(self, progress: RunProgress) -> Table:
        table = _table("learner", "round", "accuracy", "ε spent", "ε budget", "messages")
        fitting = max(3, self._live.console.height - 9 - min(len(progress.violations), MAX_VIOLATION_LINES))
        cells = zip(
            progress.rounds, progress.accuracy, progress.spending, self._budgets, progress.messages, strict=True
        )
        rows = list(zip(self._names, cells, strict=True))
        for name, (done, accuracy, spent, budget, messages) in rows[:fitting]:
            limit = "none" if budget is None else format_number(budget)
            near = "yellow" if budget is not None and spent > 0.9 * budget else ""
            table.add_row(
                Text(name),
                format_count(done),
                format_percent(accuracy),
                Text(format_number(spent), style=near),
                limit,
                format_count(messages),
            )
        if len(rows) > fitting:
            table.add_row(f"… {len(rows) - fitting} more", style="dim")
        return table


def _cut(line: str) -> Text:
    """Return a line that is cut at the width of the display."""
    return Text(line, style="bold red", no_wrap=True, overflow="ellipsis")


def _append_offline_names(state: str, progress: RunProgress) -> str:
    """Append the disconnected learners to the state."""
    names = progress.offline_learners
    if len(names) > _MAX_NAMED_LEARNERS:
        return f"{state}, {len(names)} learners are disconnected ({', '.join(names[:_MAX_NAMED_LEARNERS])}, ...)"
    return f"{state}, {', '.join(names)} {'is' if len(names) == 1 else 'are'} disconnected" if names else state


def _table(first: str, *others: str) -> Table:
    table = terminal.create_table()
    table.add_column(first, no_wrap=True, overflow="ellipsis", max_width=24, vertical="bottom")
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


# ---- summary ----------------------------------------------------------------------------------------------------------


def print_summary(summary: RunSummary, console: Console | None = None, report: Path | None = None) -> None:
    """Print the results of a run.

    Args:
        report: Path of the report, if it was written.
    """
    console = console or terminal.create_console()
    console.print(_state_line(summary))
    table, left_out = _learner_table(summary, console.width)
    console.print(table)
    if left_out:
        console.print(f"a wider terminal shows {', '.join(left_out)}, too; so do summary.json and --json")
    facts = terminal.create_fact_grid()
    for name, value in _facts(summary, report):
        facts.add_row(name, value)
    console.print(facts)


def _state_line(summary: RunSummary) -> Text:
    progress = f"{format_rounds_done(summary.rounds_done, summary.rounds)} in {format_duration(summary.seconds)}"
    line = Text.assemble((summary.name, "bold"), " ", (summary.state, _STATE_STYLES.get(summary.state, "cyan")))
    line.append(f": {progress}, {format_number(summary.rounds_per_second)} rounds/s")
    if summary.detail and summary.state != "finished":
        line.append(f"\n{summary.detail}", style=_STATE_STYLES.get(summary.state, ""))
    return line


def _learner_table(summary: RunSummary, width: int) -> tuple[Table, list[str]]:
    """Build the table of learners; return it with the headings of the columns that did not fit."""
    levels = ("record",) if is_single_use(summary) else ("record_use", "record")
    claims = [f"ε {LEVEL_LABELS[level]}" for level in levels]
    losses = ["privacy loss found"] if len(levels) == 1 else [f"loss found {LEVEL_LABELS[level]}" for level in levels]
    if summary.is_live and find_worst_case(summary) is None:
        losses = []  # unknown
    heads = ["learner", "records learned" if summary.is_live else "test accuracy", *claims, *losses]
    shown, more = summary.learners[:MAX_ROWS], len(summary.learners) - MAX_ROWS
    max_width = min(24, max(11, width - 69))
    rows = [(_truncate(each.name, max_width), *_make_cells(each, levels, live=summary.is_live)) for each in shown]
    if more > 0:
        rows.append((f"… {more} more", *[""] * (2 * len(levels) + 1)))
    if (central := summary.central_accuracy) is not None:
        rows.append(("centralised", format_percent(central), *["∞"] * len(levels), *[""] * len(levels)))
    cells = [row[: len(heads)] for row in rows]
    table, left_out = terminal.fit_table(
        width, heads, cells, right_aligned=heads[1:], optional_columns=(*losses[1:], *claims[1:], *losses[:1])
    )
    for row, each in zip(table.rows, shown, strict=False):
        row.style = "bold red" if any(map(_exceeds_claim, (each.record_use_loss, each.record_loss))) else ""
    for row in table.rows[len(shown) :]:
        row.style = "dim"
    if central is not None and len(rows) > 1:
        table.rows[-2].end_section = True
    return table, left_out


def _truncate(name: str, width: int) -> str:
    """Truncate a name to a number of terminal cells."""
    text = Text(name)
    text.truncate(width, overflow="ellipsis")
    return text.plain


def _make_cells(learner: LearnerSummary, levels: Sequence[str], *, live: bool) -> tuple[str, ...]:
    result = format_count(learner.records) if live else format_percent(learner.test_accuracy)
    epsilons = (format_number(getattr(learner, f"epsilon_{level}")) for level in levels)
    return (result, *epsilons, *(_format_loss(learner.get_observed_loss(level)) for level in levels))


def _format_loss(observed: ObservedPrivacyLoss | None) -> str:
    if observed is None:
        return MISSING_VALUE
    return f"{format_number(observed.loss, 3)} of {format_number(observed.claimed_epsilon, 3)}"


def _exceeds_claim(observed: ObservedPrivacyLoss | None) -> bool:
    return observed is not None and is_above_claim(max(observed.loss, observed.supremum), observed.claimed_epsilon)


def _facts(summary: RunSummary, report: Path | None) -> Iterator[tuple[str, Text]]:
    """Yield the facts under the table: name and text."""
    if summary.detections is not None and summary.detections.count:
        yield (
            "detections",
            Text(describe_detections(summary.detections.count, summary.detections.first), style="bold red"),
        )
    verdict = determine_verdict(summary)
    for name, text in compose_statements(summary).items():
        headline = Text.assemble((verdict.headline, _VERDICT_STYLES[verdict.tone]), ". ") if name == "found" else Text()
        yield name, headline + Text(text)
    accuracies = format_percent_range(learner.test_accuracy for learner in summary.learners)
    disagreement = f"; two learners differ on at most {format_percent(summary.disagreement)} of held-out records"
    if waiting := sum(learner.records_waiting for learner in summary.learners):
        yield (
            "waiting",
            Text(f"{pluralize(waiting, 'record')} waited when the run ended, and were not learned", style="yellow"),
        )
    if not summary.is_live:
        is_known = any(learner.test_accuracy is not None for learner in summary.learners)
        text = accuracies + (disagreement if summary.disagreement is not None else "")
        if not is_known:
            text = NO_ACCURACY_NOTE if summary.test_records else NO_TEST_RECORDS_NOTE
        yield "accuracy", Text("\n".join(filter(None, [text, describe_measurement(summary.publication_cost)])))
    if summary.offline_intervals:
        yield "offline", Text("\n".join(summary.offline_intervals))
    if summary.violations:
        yield "violations", Text("\n".join(summary.violations), style="bold red")
    if summary.capture is not None:
        recorded_rounds = describe_recorded_rounds(len(summary.capture.sender_values), summary.rounds_done)
        yield "capture", Text("\n".join(filter(None, [summary.capture.location, recorded_rounds])))
        if staleness := describe_staleness(summary.capture.staleness):
            yield "staleness", Text(staleness)
    if summary.wiretap is not None:
        yield "capture", Text(summary.wiretap.location)
    if report is not None:
        yield "report", Text(str(report), style="bold")
    for code, text in summary.warnings:
        yield "warning", Text.assemble((code, "yellow"), f"  {text}")
