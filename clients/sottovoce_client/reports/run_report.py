"""The report of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sottovoce_client.reports.heard import MOST_HEARD, loud
from sottovoce_client.reports.page import Column, Page, PageTable
from sottovoce_client.reports.plots import KINDS, LEVELS, run_figures
from sottovoce_client.reports.verdict import PER, exceeds, is_single_use, statements, verdict_of, worst_case
from sottovoce_client.running.summary import LearnerSummary, RunSummary
from sottovoce_client.wording import (
    UNASKED,
    UNHELD,
    count,
    late_line,
    measured_line,
    noticed_line,
    number,
    share,
    size,
    whole_line,
)

_MOST_NOTICED = 20
_FEW_LOOKS = 8
"""Of a run that was watched so seldom the page says why its curves have few points."""

_STATEMENTS = {
    "run": "What was run",
    "promise": "What is promised",
    "found": "What was found",
    "limits": "What it does not mean",
}
"""Titles of the statements that open the page."""

COLUMNS: tuple[tuple[str, str, Callable[[Any], str], str], ...] = (
    ("records", "held", count, "records"),
    ("records", "most uses", count, "most_uses"),
    ("accuracy", "test", share, "test_accuracy"),
    ("accuracy", "own", share, "prequential_accuracy"),
    ("sent", "rounds", count, "rounds"),
    ("sent", "messages", count, "messages"),
    ("sent", "bytes", size, "bytes"),
    ("budget", "spent", number, "spent"),
    ("budget", "limit", lambda value: "none" if value is None else number(value), "budget"),
    ("claimed ε", "paper", number, "paper"),
    ("claimed ε", "event", number, "event"),
    ("claimed ε", "record", number, "record"),
    ("claimed ε", "forever", number, "infinite_horizon"),
)
"""Of every learner: the group and the head of a column, and how it shows which attribute."""


def run_page(summary: RunSummary) -> Page:
    """The report of a run."""
    learners, noticed = summary.learners, summary.noticed
    unpromised = [
        kind for kind in ("paper", "record", "event") if any(math.isinf(getattr(each, kind)) for each in learners)
    ]
    values = {
        "run": summary,
        "late": "" if summary.capture is None else late_line(summary.capture.late),
        "whole": "" if summary.capture is None else whole_line(len(summary.capture.heard), summary.rounds_done),
        "noticed": "" if noticed is None else noticed_line(noticed.count, noticed.first),
        "promised": any(math.isfinite(each.event) for each in learners),
        "unpromised": [KINDS[kind][0] for kind in unpromised],
        "verdict": verdict_of(summary),
        "statements": [(_STATEMENTS[name], text) for name, text in statements(summary).items()],
        "worst": worst_case(summary),
        "single_use": is_single_use(summary),
        "per": PER,
        "unasked": UNASKED if summary.test_records else UNHELD,
        "measured": measured_line(summary.measured),
        "most_noticed": _MOST_NOTICED,
        "most_heard": MOST_HEARD,
        "loud": (said := summary.capture) is not None and loud(said.heard, max(said.first_scale, said.last_scale)),
        "few_looks": _FEW_LOOKS,
    }
    return Page("run.html.j2", [*run_figures(summary), _learners(summary), grounds(summary.promise.constants)], values)


def grounds(constants: Sequence[tuple[str, Any, str]]) -> PageTable:
    """What a promise rests on: constants, their values, and what enforces them."""
    columns = (Column("constant"), Column("value", lambda value: value if isinstance(value, str) else number(value)))
    return PageTable("grounds", "Constants", (*columns, Column("enforced by", kind="long")), constants, narrow=True)


def _learners(summary: RunSummary) -> PageTable:
    columns = [Column(head, show, group=group) for group, head, show, _ in COLUMNS]
    for level in LEVELS:
        columns += [Column(head, number, group=f"loss, per {level}") for head in ("this", "largest", "claim")]
    rows = [(each.name, *_figures(each)) for each in summary.learners]
    above = {
        (row, 1 + len(COLUMNS) + 3 * k + part)
        for row, each in enumerate(summary.learners)
        for k, level in enumerate(LEVELS)
        if (swap := each.swap(level)) is not None
        for part, value in enumerate((swap.loss, swap.supremum))
        if exceeds(value, swap.budget)
    }
    return PageTable("learners", "Learner by learner", (Column("learner"), *columns), rows, frozenset(above))


def _figures(learner: LearnerSummary) -> Iterator[Any]:
    yield from (getattr(learner, attribute) for *_, attribute in COLUMNS)
    for level in LEVELS:
        swap = learner.swap(level)
        yield from (None,) * 3 if swap is None else (swap.loss, swap.supremum, swap.budget)
