"""The terminal: how a run is getting on, and what it came to."""

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
from sottovoce_client.reports.run_report import (
    LEVEL_LABELS,
    compose_statements,
    determine_verdict,
    find_worst_case,
    is_above_claim,
    is_single_use,
)
from sottovoce_client.runs.summary import LearnerSummary, ObservedPrivacyLoss, RunProgress, RunSummary
from sottovoce_core.text import escape_control

LIVE_INTERVAL_S = 0.125
PLAIN_INTERVAL_S = 2.0
MAX_ROWS = 10
"""Learners that the final table shows at most."""
MAX_VIOLATION_LINES = 3
"""Lines on misconduct that the live display shows at most."""
_MAX_NAMED_LEARNERS = 3
"""Learners that a line names at most, where more are away."""
_KINDS = {"consistent": "green", "refuted": "bold red", "open": "yellow", "weak": "yellow"}
_STATES = {"finished": "bold green", "stopped": "bold yellow", "failed": "bold red"}

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

    The live display disappears at the end, to make room for `print_summary`. Either may be told as often as one likes, of
    `progress`, the run's `state` in a word, and messages `overheard` (None: nobody listens); what comes too soon after the last
    it leaves out.

    Args:
        rounds: planned; None: no end is.
        names: of the learners.
        budgets: where each learner stops; left out for nowhere.
    """
    console = console or terminal.create_console()
    if plain or not console.is_terminal:
        lines = _Lines(console, rounds, clock)
        lines.say(f"{title}: {pluralize(len(names), 'learner')}, {format_planned_rounds(rounds)}")
        yield lines
        return
    # No refreshing thread: nothing changes between two updates.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Display(live, title, rounds, names, budgets or [None] * len(names), clock)


class _Pace:
    """Speed over the last few looks, so that a slow start is forgotten."""

    def __init__(self, rounds: int | None) -> None:
        self._planned = rounds
        self._looks: deque[tuple[float, int]] = deque(maxlen=40)

    def look(self, progress: RunProgress) -> None:
        self._looks.append((progress.seconds, progress.rounds_done))

    @property
    def done(self) -> int:
        """Rounds that all learners have done."""
        return self._looks[-1][1] if self._looks else 0

    @property
    def speed(self) -> float:
        """Rounds per second."""
        if not self._looks:
            return 0.0
        (since, before), (now, done) = (self._looks[0] if len(self._looks) > 1 else (0.0, 0)), self._looks[-1]
        return max(0, done - before) / (now - since) if now > since else 0.0

    @property
    def left(self) -> str:
        """Time to go, in words; nothing where that is not known."""
        missing = (self._planned or 0) - self.done
        return format_duration(math.ceil(missing / self.speed)) if self.speed > 0 and missing > 0 else ""


class _News:
    """What is said once, when it comes."""

    def __init__(self) -> None:
        self._run, self._uncaptured = "", ""

    def of(self, progress: RunProgress) -> Iterator[str]:
        if progress.run_id != self._run:
            self._run = progress.run_id
            yield f"run {progress.run_id}"
        if progress.capture_error is not None and progress.capture_error != self._uncaptured:
            self._uncaptured = progress.capture_error
            yield progress.capture_error or "the run is captured again: its eavesdropper is back"


# ---- lines ------------------------------------------------------------------------------------------------------------


class _Lines:
    """A line about every two seconds, at every tenth of the rounds, and when the state changes."""

    def __init__(self, console: Console, rounds: int | None, clock: _Clock) -> None:
        self._console, self._rounds, self._clock = console, rounds, clock
        self._pace = _Pace(rounds)
        self._said_at, self._said_tenth, self._said_state = clock(), 0, ""
        self._said_misconduct, self._news = 0, _News()

    def say(self, text: str) -> None:
        # As it is: neither wrapped at the 80 columns that a pipe is said to have, nor coloured, nor read as markup.
        self._console.out(escape_control(text), highlight=False)

    def update(self, progress: RunProgress, state: str, captured_messages: int | None) -> None:
        self._pace.look(progress)
        for line in self._news.of(progress):
            self.say(line)
        now, tenth = self._clock(), 10 * self._pace.done // self._rounds if self._rounds else 0
        state = _with_away(state, progress)
        known = (self._said_tenth, self._said_state, self._said_misconduct)
        if now - self._said_at < PLAIN_INTERVAL_S and (tenth, state, len(progress.violations)) == known:
            return
        self._said_at, self._said_tenth, self._said_state = now, tenth, state
        for line in progress.violations[self._said_misconduct :]:
            self.say(f"misconduct: {line}")
        self._said_misconduct = len(progress.violations)
        self.say("  ".join(self._parts(progress, state, captured_messages)))

    def _parts(self, progress: RunProgress, state: str, overheard: int | None) -> Iterator[str]:
        yield f"round {self._pace.done}" + (f"/{self._rounds}" if self._rounds else "")
        yield state
        yield f"{format_number(self._pace.speed, 3)} rounds/s"
        if any(value is not None for value in progress.accuracy):
            yield f"accuracy {format_percent_range(progress.accuracy)}"
        yield f"epsilon <= {format_number(max(progress.epsilon, default=0.0))}"
        if overheard is not None:
            yield f"{pluralize(overheard, 'message')} recorded"


# ---- live -------------------------------------------------------------------------------------------------------------


class _Display:
    """A bar over the rounds, and a row for each learner."""

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
        self._news = _News()

    def update(self, progress: RunProgress, state: str, captured_messages: int | None) -> None:
        for line in self._news.of(progress):  # above the picture, and stays
            self._live.console.print(Text(line, style="dim"))
        shown_at, shown_state = self._shown
        now = self._clock()
        if now - shown_at < LIVE_INTERVAL_S and state == shown_state:
            return
        self._shown = (now, state)
        self._pace.look(progress)
        self._live.update(self._picture(progress, state, captured_messages), refresh=True)

    def _picture(self, progress: RunProgress, state: str, overheard: int | None) -> RenderableType:
        head = Text.assemble(
            (self._title, "bold"), ("  ", ""), (_with_away(state, progress), _STATES.get(state, "cyan"))
        )
        noticed = [_cut(f"misconduct: {line}") for line in progress.violations[:MAX_VIOLATION_LINES]]
        said = "" if overheard is None else f"{pluralize(overheard, 'message')} recorded"
        return Group(
            head, self._bar(), self._table(progress), *noticed, *([Text(said, style="magenta")] if said else [])
        )

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        done, speed = f"round {format_count(self._pace.done)}", f"{format_number(self._pace.speed, 3)} rounds/s"
        if self._rounds is None:
            row.add_row(done, speed, "until it is stopped")
            return row
        bar = ProgressBar(total=self._rounds, completed=self._pace.done, width=28)
        left = f"{self._pace.left} left" if self._pace.left else ""
        row.add_row(bar, f"{done}/{format_count(self._rounds)}", speed, left)
        return row

    def _table(self, progress: RunProgress) -> Table:
        table = _table("learner", "round", "accuracy", "ε spent", "ε budget", "messages")
        fitting = max(3, self._live.console.height - 9 - min(len(progress.violations), MAX_VIOLATION_LINES))
        cells = zip(progress.rounds, progress.accuracy, progress.epsilon, self._budgets, progress.messages, strict=True)
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
    """On one line of the display, however long it is."""
    return Text(line, style="bold red", no_wrap=True, overflow="ellipsis")


def _with_away(state: str, progress: RunProgress) -> str:
    """The state, and who is gone meanwhile."""
    gone = progress.offline_learners
    if len(gone) > _MAX_NAMED_LEARNERS:
        return f"{state}, {len(gone)} learners are away ({', '.join(gone[:_MAX_NAMED_LEARNERS])}, ...)"
    return f"{state}, {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} away" if gone else state


def _table(first: str, *others: str) -> Table:
    table = terminal.create_table()
    table.add_column(first, no_wrap=True, overflow="ellipsis", max_width=24, vertical="bottom")
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


# ---- at the end -------------------------------------------------------------------------------------------------------


def print_summary(summary: RunSummary, console: Console | None = None, report: Path | None = None) -> None:
    """Print what a run came to.

    Args:
        report: where the report lies, if one was written.
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
    reached = f"{format_rounds_done(summary.rounds_done, summary.rounds)} in {format_duration(summary.seconds)}"
    line = Text.assemble((summary.name, "bold"), " ", (summary.state, _STATES.get(summary.state, "cyan")))
    line.append(f": {reached}, {format_number(summary.rounds_per_second)} rounds/s")
    if summary.detail and summary.state != "finished":
        line.append(f"\n{summary.detail}", style=_STATES.get(summary.state, ""))
    return line


def _learner_table(summary: RunSummary, width: int) -> tuple[Table, list[str]]:
    """A row for each learner, and the heads of the columns that did not fit."""
    levels = ("record",) if is_single_use(summary) else ("record_use", "record")
    claims = [f"ε {LEVEL_LABELS[level]}" for level in levels]
    losses = ["privacy loss found"] if len(levels) == 1 else [f"loss found {LEVEL_LABELS[level]}" for level in levels]
    if summary.is_live and find_worst_case(summary) is None:
        losses = []  # not known
    heads = ["learner", "records learned" if summary.is_live else "test accuracy", *claims, *losses]
    shown, more = summary.learners[:MAX_ROWS], len(summary.learners) - MAX_ROWS
    most = min(24, max(11, width - 69))
    rows = [(_shortened(each.name, most), *_cells(each, levels, live=summary.is_live)) for each in shown]
    if more > 0:
        rows.append((f"… {more} more", *[""] * (2 * len(levels) + 1)))
    if (central := summary.central_accuracy) is not None:
        rows.append(("centralised", format_percent(central), *["∞"] * len(levels), *[""] * len(levels)))
    cells = [row[: len(heads)] for row in rows]
    table, left_out = terminal.fit_table(
        width, heads, cells, right_aligned=heads[1:], optional_columns=(*losses[1:], *claims[1:], *losses[:1])
    )
    for row, each in zip(table.rows, shown, strict=False):
        row.style = "bold red" if any(map(_refuted, (each.record_use_loss, each.record_loss))) else ""
    for row in table.rows[len(shown) :]:
        row.style = "dim"
    if central is not None and len(rows) > 1:
        table.rows[-2].end_section = True
    return table, left_out


def _shortened(name: str, most: int) -> str:
    """A name in so many cells."""
    text = Text(name)
    text.truncate(most, overflow="ellipsis")
    return text.plain


def _cells(learner: LearnerSummary, levels: Sequence[str], *, live: bool) -> tuple[str, ...]:
    learned = format_count(learner.records) if live else format_percent(learner.test_accuracy)
    epsilons = (format_number(getattr(learner, f"epsilon_{level}")) for level in levels)
    return (learned, *epsilons, *(_loss(learner.get_observed_loss(level)) for level in levels))


def _loss(swap: ObservedPrivacyLoss | None) -> str:
    return (
        MISSING_VALUE if swap is None else f"{format_number(swap.loss, 3)} of {format_number(swap.claimed_epsilon, 3)}"
    )


def _refuted(swap: ObservedPrivacyLoss | None) -> bool:
    return swap is not None and is_above_claim(max(swap.loss, swap.supremum), swap.claimed_epsilon)


def _facts(summary: RunSummary, report: Path | None) -> Iterator[tuple[str, Text]]:
    """Lines under the table: a name and what there is to say."""
    if summary.detections is not None and summary.detections.count:
        yield "noticed", Text(describe_detections(summary.detections.count, summary.detections.first), style="bold red")
    verdict = determine_verdict(summary)
    for name, text in compose_statements(summary).items():
        headline = Text.assemble((verdict.headline, _KINDS[verdict.tone]), ". ") if name == "found" else Text()
        yield name, headline + Text(text)
    accuracies = format_percent_range(learner.test_accuracy for learner in summary.learners)
    disagree = f"; two learners differ on at most {format_percent(summary.disagreement)} of held-out records"
    if waiting := sum(learner.records_waiting for learner in summary.learners):
        yield (
            "waiting",
            Text(
                f"{pluralize(waiting, 'record')} waited when the run ended, and no learner learned them", style="yellow"
            ),
        )
    if not summary.is_live:
        known = any(learner.test_accuracy is not None for learner in summary.learners)
        found = accuracies + (disagree if summary.disagreement is not None else "")
        if not known:
            found = NO_ACCURACY_NOTE if summary.test_records else NO_TEST_RECORDS_NOTE
        yield "accuracy", Text("\n".join(filter(None, [found, describe_measurement(summary.publication_cost)])))
    if summary.offline_intervals:
        yield "away", Text("\n".join(summary.offline_intervals))
    if summary.violations:
        yield "misconduct", Text("\n".join(summary.violations), style="bold red")
    if summary.capture is not None:
        whole = describe_recorded_rounds(len(summary.capture.sender_values), summary.rounds_done)
        yield "capture", Text("\n".join(filter(None, [summary.capture.location, whole])))
        if late := describe_staleness(summary.capture.staleness):
            yield "late", Text(late)
    if summary.wiretap is not None:
        yield "capture", Text(summary.wiretap.location)
    if report is not None:
        yield "report", Text(str(report), style="bold")
    for code, text in summary.warnings:
        yield "warning", Text.assemble((code, "yellow"), f"  {text}")
