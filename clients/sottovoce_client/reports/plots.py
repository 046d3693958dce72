"""The figures of a run's report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from sottovoce.arrays import FloatArray, as_floats
from sottovoce_client.reports.drawing import (
    AREA,
    BLUE,
    FAINT,
    GREEN,
    RED,
    RULE,
    Figure,
    View,
    band,
    line,
    rounds_across,
    rule,
    spread,
    switched,
    thinned,
)
from sottovoce_client.reports.graph import Graph
from sottovoce_client.reports.heard import heard_figure
from sottovoce_client.reports.marks import PALETTE, Axis, Mark
from sottovoce_client.running.summary import RunSummary

KINDS = {
    "paper": ("by the paper’s formula", FAINT),
    "record": ("tight, per record", RED),
    "event": ("tight, per event", BLUE),
    "output": ("published decisions only", GREEN),
}
"""Epsilons of a learner, as pages call and colour them."""
_MOST_TOGETHER = 6400
"""Points of all curves of a figure: a page of many learners is not to be a large one."""
LEVELS = {"event": "One use of the record replaced", "record": "All uses of the record replaced"}


def run_figures(summary: RunSummary) -> list[Figure | Graph]:
    """All figures of a report, in its order; one that has nothing to show is empty."""
    losses = [_losses(summary, level, title) for level, title in LEVELS.items()]
    heard = [] if summary.capture is None or not summary.capture.heard.size else [heard_figure(summary.capture.heard)]
    names, accuracies = zip(*((each.name, each.test_accuracy) for each in summary.learners), strict=True)
    graph = Graph("graph", "Who sends to whom", names, accuracies, summary.edges, summary.one_way)
    return [graph, _learning(summary), _budget(summary), *losses, *heard]


# ---- one line a learner ----------------------------------------------------------------------------------------------


def _learner_lines(names: Sequence[str], points: Sequence[tuple[FloatArray, FloatArray]]) -> list[Mark]:
    """A line for every learner: each in its colour when few; when many, thin and alike."""
    few = len(names) <= len(PALETTE)
    kept = [thinned(len(x), max(50, _MOST_TOGETHER // len(names))) for x, _ in points]
    points = [(x[k], y[k]) for k, (x, y) in zip(kept, points, strict=True)]
    return [
        line(x, y, name, PALETTE[i] if few else BLUE, width=1.8 if few else 1.0)
        for i, (name, (x, y)) in enumerate(zip(names, points, strict=True))
    ]


def _learning(summary: RunSummary) -> Figure:
    """Accuracy over rounds, and the non-private model's beside it; nothing where none is known.

    That is learners' own, of records before they are learned, where they told it; else on held-out records, as measured here.
    """
    title, told = "How they learned", summary.accuracy_told
    view = View("", rounds_across(low=0.0), Axis("prequential accuracy" if told else "test accuracy", form="share"))
    if not told and not any(each.test_curve for each in summary.learners):
        return Figure("learning", title, (), (view,))
    points = list(_told(summary)) if told else [_curve(each.test_curve) for each in summary.learners]
    marks = _learner_lines([each.name for each in summary.learners], points)
    if summary.central_accuracy is not None:
        last = max(float(x.max(initial=0.0)) for x, _ in points)
        marks.append(_level(summary.central_accuracy, last, "centralised, not private (test)"))
    return Figure("learning", title, marks, (view,), height=330)


def _told(summary: RunSummary) -> Iterator[tuple[FloatArray, FloatArray]]:
    """What each learner told of its accuracy."""
    kept = thinned(len(summary.progress))
    looks = [summary.progress[k] for k in kept]
    for i in range(len(summary.learners)):
        known = [math.nan if (told := look.accuracy[i]) is None else told for look in looks]
        yield as_floats([look.rounds[i] for look in looks]), as_floats(known)


def _curve(points: Sequence[tuple[int, float]]) -> tuple[FloatArray, FloatArray]:
    pairs = np.array(points, dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _level(value: float, last: float, name: str) -> Mark:
    return rule([0, last], [value, value], name)


# ---- budgets ---------------------------------------------------------------------------------------------------------


def stacked(curves: Sequence[FloatArray], rounds: Sequence[int]) -> FloatArray:
    """`(learners, most rounds)`: curves as far as each learner went; who has stopped spends no more."""
    longest = max(rounds)
    rows = np.zeros((len(curves), longest))
    for row, curve, done in zip(rows, curves, rounds, strict=True):
        row[:done] = curve[:done]
        row[done:] = curve[done - 1] if done else 0.0
    return rows


def _budget(summary: RunSummary) -> Figure:
    """Cumulative epsilons over rounds, and where the first learner stops."""
    rounds = [learner.rounds for learner in summary.learners]
    curves = {
        kind: stacked([getattr(each, f"{kind}_curve") for each in summary.learners], rounds)
        for kind in ("paper", "record", "event")
    }
    budgets = [learner.budget for learner in summary.learners if learner.budget is not None]
    limit = min(budgets, default=math.inf)
    stop = [rule([1, max(rounds)], [limit, limit], "where a learner stops")] if math.isfinite(limit) else []
    return spent_plot("What it cost", curves, stop)


def spent_plot(title: str, curves: dict[str, FloatArray], marks: Sequence[Mark]) -> Figure:
    """Cumulative epsilons over rounds: the largest of all learners, and the range down to the smallest.

    Args:
        title: of the figure.
        curves: `(learners, rounds)` by kind, of `KINDS`.
        marks: what is drawn beside them; nothing is where no epsilon is finite and above zero.
    """
    drawn = {kind: spread(rows, *KINDS[kind]) for kind, rows in curves.items()}
    ends = [float(rows[:, -1].max()) for kind, rows in curves.items() if drawn[kind]]
    ends = [each for each in ends if 0 < each < math.inf]
    logarithmic = len(ends) > 1 and max(ends) > 8 * min(ends)
    made = [mark for each in drawn.values() for mark in each]
    views = switched(rounds_across(), "cumulative ε", logarithmic=logarithmic)
    return Figure("budget", title, [*made, *marks] if made else (), views)


# ---- the capture -----------------------------------------------------------------------------------------------------


def _losses(summary: RunSummary, level: str, title: str) -> Figure:
    """Signed privacy loss of the capture for every learner's worst swap, between plus and minus the claim.

    Where the losses would lie on zero beside the claim, they are shown from close by at first.

    Args:
        level: `event` or `record`.
        title: of the figure.
    """
    name = f"loss-{level}"
    swapped = [
        (each, swap) for each in summary.learners if (swap := each.swap(level)) is not None and swap.by_round.size
    ]
    if not swapped:
        return Figure(name, title, (), ())
    kept = [thinned(len(swap.by_round)) for _, swap in swapped]
    points = [(as_floats(k + 1), swap.by_round[k]) for k, (_, swap) in zip(kept, swapped, strict=True)]
    rounds = [len(swap.by_round) for _, swap in swapped]
    claims = stacked([getattr(each, f"{level}_curve") for each, _ in swapped], rounds).max(axis=0)
    claims = claims[np.isfinite(claims)]  # a prefix: what has become infinite stays so
    near = 1.15 * max(float(np.abs(y[np.isfinite(y)]).max(initial=0)) for _, y in points) or 1.0
    far = float(claims.max(initial=0.0))
    across = rounds_across(low=0.0)
    close = View("closer", across, Axis("privacy loss so far", low=-near, high=near))
    whole = View("whole budget", across, Axis("privacy loss so far"))
    views = (close, whole) if far > 4 * near else (whole, close) if far > 1.3 * near else (whole,)
    zero = rule([0, max(rounds)], [0, 0], "", RULE, "solid", width=1.0)
    marks = [*_claim(claims), zero, *_learner_lines([each.name for each, _ in swapped], points)]
    return Figure(name, title, marks, views)


def _claim(claims: FloatArray) -> list[Mark]:
    """The area that the claim allows, as far as it is finite."""
    if len(claims) < 2:
        return []
    kept = thinned(len(claims))
    return [band(kept + 1, -claims[kept], claims[kept], AREA, "± claimed ε", 1.2)]
