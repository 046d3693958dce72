"""Figures of the report of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sottovoce_client.formatting import format_number, format_percent, pluralize
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import PageColumn, PageTable
from sottovoce_client.reports.plot_elements import (
    AREA,
    BLUE,
    FAINT,
    GREEN,
    RED,
    RULE,
    Axis,
    PlotMark,
    PlotView,
    make_band,
    make_dots,
    make_line,
    make_range_band,
    make_reference_line,
    make_round_axis,
    make_scale_views,
    select_evenly,
    shorten,
)
from sottovoce_client.runs.summary import RunSummary
from sottovoce_core.arrays import FloatArray, as_floats

_MAX_LABELLED_LEARNERS = 16
"""Maximum number of learners whose names are drawn; with more learners, names appear under the pointer."""
MAX_HEATMAP_SHAPE = (500, 200)
"""Maximum numbers of rounds and coordinates in a heatmap."""
_MIN_VISIBLE_NOISE_SCALES = 8.0
"""Multiple of the noise scale that noise alone exceeds too rarely to be visible (Laplace noise: 1 in 3,000)."""
_BELOW, _ABOVE = (0x1F, 0x6F, 0xC0), (0xD6, 0x4A, 0x1C)
_MAX_MESSAGE_TABLE_ROWS = 8
EPSILON_STYLES = {
    "paper": ("by the paper’s formula", FAINT),
    "record": ("tight, per record", RED),
    "record_use": ("tight, per record use", BLUE),
    "output": ("published decisions only", GREEN),
}
"""Names and colours of a learner's epsilons on pages, by kind."""
_MAX_FIGURE_POINTS, _MIN_LINE_POINTS, _MAX_LINE_POINTS = 2400, 12, 200
"""Maximum number of points in all curves of a figure, which limits the size of a page with many learners; limits per curve."""
LEVEL_TITLES = {"record_use": "One use of the record replaced", "record": "All uses of the record replaced"}


def is_single_use(summary: RunSummary) -> bool:
    """Return whether every record was used at most once, so that both levels have the same epsilon."""
    return all(each.epsilon_record_use == each.epsilon_record for each in summary.learners)


def get_level_titles(summary: RunSummary) -> dict[str, str]:
    """Return the levels that differ in this run, with the titles of their figures."""
    return {"record": "One record replaced"} if is_single_use(summary) else LEVEL_TITLES


def build_run_figures(summary: RunSummary) -> list[Figure]:
    """Build all figures of a report, in their order; a figure without data is empty."""
    losses = [_losses(summary, level, title) for level, title in get_level_titles(summary).items()]
    messages = (
        []
        if summary.capture is None or not summary.capture.sender_values.size
        else [_heatmap(summary.capture.sender_values)]
    )
    return [_graph(summary), _learning(summary), _budget(summary), *losses, *messages]


# ---- one line per learner --------------------------------------------------------------------------------------------


def _learner_lines(names: Sequence[str], points: Sequence[tuple[FloatArray, FloatArray]]) -> list[PlotMark]:
    """Make a line for every learner: each in a panel of its own if they are few, else all thin and of one colour."""
    few = len(names) <= _MAX_LABELLED_LEARNERS
    most = min(max(_MIN_LINE_POINTS, _MAX_FIGURE_POINTS // len(names)), _MAX_LINE_POINTS)
    kept = [select_evenly(len(x), most) for x, _ in points]
    points = [(x[k], y[k]) for k, (x, y) in zip(kept, points, strict=True)]
    return [
        make_line(x, y, name, BLUE, width=1.8 if few else 1.0, panel=name if few else "")
        for name, (x, y) in zip(names, points, strict=True)
    ]


def _learning(summary: RunSummary) -> Figure:
    """Plot the accuracy over rounds, with that of the centralised non-private model; empty if no accuracy is known.

    The accuracy is the prequential one that learners reported, else the one measured here on held-out records.
    """
    title, reported = "How they learned", summary.has_prequential_accuracy
    view = PlotView(
        "",
        make_round_axis(low=0.0),
        Axis("prequential accuracy" if reported else "test accuracy", value_format="share"),
    )
    if not reported and not any(each.test_curve for each in summary.learners):
        return Figure("learning", title, (), (view,))
    points = list(_reported_curves(summary)) if reported else [_curve(each.test_curve) for each in summary.learners]
    marks = _learner_lines([each.name for each in summary.learners], points)
    if summary.central_accuracy is not None:
        last = max(float(x.max(initial=0.0)) for x, _ in points)
        marks.append(_level(summary.central_accuracy, last, "centralised, not private (test)"))
    return Figure("learning", title, marks, (view,), height=330)


def _reported_curves(summary: RunSummary) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield rounds and reported accuracies of each learner."""
    kept = select_evenly(len(summary.progress))
    samples = [summary.progress[k] for k in kept]
    for i in range(len(summary.learners)):
        known = [math.nan if (accuracy := sample.accuracy[i]) is None else accuracy for sample in samples]
        yield as_floats([sample.rounds[i] for sample in samples]), as_floats(known)


def _curve(points: Sequence[tuple[int, float]]) -> tuple[FloatArray, FloatArray]:
    pairs = np.array(points, dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _level(value: float, last: float, name: str) -> PlotMark:
    return make_reference_line([0, last], [value, value], name)


# ---- budgets ---------------------------------------------------------------------------------------------------------


def stack_curves(curves: Sequence[FloatArray], rounds: Sequence[int]) -> FloatArray:
    """Stack curves as `(learners, max rounds)`; a learner that has stopped keeps its last value."""
    longest = max(rounds)
    rows = np.zeros((len(curves), longest))
    for row, curve, done in zip(rows, curves, rounds, strict=True):
        row[:done] = curve[:done]
        row[done:] = curve[done - 1] if done else 0.0
    return rows


def _budget(summary: RunSummary) -> Figure:
    """Plot cumulative epsilons over rounds, and the smallest limit."""
    rounds = [learner.rounds_done for learner in summary.learners]
    curves = {
        kind: stack_curves([getattr(each, f"epsilon_{kind}_curve") for each in summary.learners], rounds)
        for kind in ("paper", "record", "record_use")
        if kind != "record_use" or not is_single_use(summary)
    }
    budgets = [learner.epsilon_limit for learner in summary.learners if learner.epsilon_limit is not None]
    limit = min(budgets, default=math.inf)
    stop = (
        [make_reference_line([1, max(rounds)], [limit, limit], "where a learner stops")] if math.isfinite(limit) else []
    )
    return build_budget_figure("What it cost", curves, stop)


def build_budget_figure(title: str, curves: dict[str, FloatArray], marks: Sequence[PlotMark]) -> Figure:
    """Plot cumulative epsilons over rounds: the largest of all learners, and a band down to the smallest.

    Args:
        title: Title of the figure.
        curves: `(learners, rounds)` by kind, a key of `EPSILON_STYLES`.
        marks: Additional marks, drawn only if an epsilon is finite and above zero.
    """
    drawn = {kind: make_range_band(rows, *EPSILON_STYLES[kind]) for kind, rows in curves.items()}
    ends = [float(rows[:, -1].max()) for kind, rows in curves.items() if drawn[kind]]
    ends = [each for each in ends if 0 < each < math.inf]
    logarithmic = len(ends) > 1 and max(ends) > 8 * min(ends)
    made = [mark for each in drawn.values() for mark in each]
    views = make_scale_views(make_round_axis(), "cumulative ε", logarithmic=logarithmic)
    return Figure("budget", title, [*made, *marks] if made else (), views, has_end_labels=True)


# ---- the capture -----------------------------------------------------------------------------------------------------


def _losses(summary: RunSummary, level: str, title: str) -> Figure:
    """Plot the signed privacy loss of the capture for every learner's worst replacement, within plus and minus the claim.

    If the claim is so large that the losses would look like zero, the first view shows the losses alone.

    Args:
        summary: Summary of the run.
        level: `record_use` or `record`.
        title: Title of the figure.
    """
    name = f"loss-{level}"
    cases = [
        (each, observed)
        for each in summary.learners
        if (observed := each.get_observed_loss(level)) is not None and observed.cumulative_loss.size
    ]
    if not cases:
        return Figure(name, title, (), ())
    kept = [select_evenly(len(observed.cumulative_loss)) for _, observed in cases]
    points = [(as_floats(k + 1), observed.cumulative_loss[k]) for k, (_, observed) in zip(kept, cases, strict=True)]
    rounds = [len(observed.cumulative_loss) for _, observed in cases]
    claims = stack_curves([getattr(each, f"epsilon_{level}_curve") for each, _ in cases], rounds).max(axis=0)
    claims = claims[np.isfinite(claims)]  # a prefix: an infinite epsilon stays infinite
    near = 1.15 * max(float(np.abs(y[np.isfinite(y)]).max(initial=0)) for _, y in points) or 1.0
    far = float(claims.max(initial=0.0))
    across = make_round_axis(low=0.0)
    close = PlotView("closer", across, Axis("privacy loss so far", low=-near, high=near))
    full = PlotView("whole budget", across, Axis("privacy loss so far"))
    views = (close, full) if far > 4 * near else (full, close) if far > 1.3 * near else (full,)
    if len(cases) > _MAX_LABELLED_LEARNERS:
        views = views[:1]  # the page would be large
    zero = make_reference_line([0, max(rounds)], [0, 0], "", RULE, "solid", width=1.0)
    marks = [*_claim(claims), zero, *_learner_lines([each.name for each, _ in cases], points)]
    return Figure(name, title, marks, views)


def _claim(claims: FloatArray) -> list[PlotMark]:
    """Make the area that the claim allows, for the rounds in which it is finite."""
    if len(claims) < 2:
        return []
    kept = select_evenly(len(claims))
    return [make_band(kept + 1, -claims[kept], claims[kept], AREA, "± claimed ε", 1.2)]


# ---- the network -----------------------------------------------------------------------------------------------------


def _graph(summary: RunSummary) -> Figure:
    """Draw learners on a circle, more opaque with higher accuracy, and their edges; arrows for edges of one direction."""
    n, one_way = len(summary.learners), set(summary.one_way)
    angles = 2 * math.pi * np.arange(n) / max(n, 1)
    x, y = (np.sin(angles), np.cos(angles)) if n > 1 else (np.zeros(n), np.zeros(n))
    both = [pair for pair in summary.edges if not {pair, pair[::-1]} & one_way]
    gap = np.full(len(both), math.nan)
    ends = np.array(both, dtype=int).reshape(-1, 2)
    across, up = (as_floats(np.column_stack([side[ends], gap]).ravel()) for side in (x, y))
    few = n <= _MAX_LABELLED_LEARNERS
    marks = [PlotMark("line", across, up, "", RULE, 1.5 if few else 0.7, is_reference=True)]
    marks += [PlotMark("arrow", x[[a, b]], y[[a, b]], "", RULE, 1.0) for a, b in summary.one_way]
    known = [each.test_accuracy for each in summary.learners if each.test_accuracy is not None]
    low, reach = min(known, default=0.0), max(max(known, default=1.0) - min(known, default=0.0), 0.01)
    for k, each in enumerate(summary.learners):
        fill = 1.0 if n == 1 or not few else 0.4 + 0.6 * ((each.test_accuracy or low) - low) / reach
        label = [each.name] if each.test_accuracy is None else [each.name, format_percent(each.test_accuracy)]
        if few:
            marks.append(make_dots(x[[k]], y[[k]], "", "paper", width=18.0))  # hides the edges below the dot
            marks.append(PlotMark("text", x[[k]], y[[k]], "\n".join([shorten(label[0]), *label[1:]])))
        fill = 0.15 if each.test_accuracy is None else fill
        marks.append(make_dots(x[[k]], y[[k]], ": ".join(label), BLUE, width=18.0 if few else 11.0, fill=fill))
    view = PlotView("", Axis("", low=-1.9, high=1.9), Axis("", low=-1.4, high=1.4))
    text = f"{pluralize(n, 'learner')}, {pluralize(len(both) + len(one_way), 'edge')}"
    return Figure(
        "graph", "Who sends to whom", marks if n else (), (view,), 330, _graph_table(summary), text, is_table_beside=few
    )


def _graph_table(summary: RunSummary) -> PageTable:
    names, one_way = [each.name for each in summary.learners], set(summary.one_way)
    rows = []
    for i, each in enumerate(summary.learners):
        both = {b if a == i else a for a, b in summary.edges if i in (a, b) and not {(a, b), (b, a)} & one_way}
        sides = both | {b for a, b in one_way if a == i}, both | {a for a, b in one_way if b == i}
        rows.append(
            (each.name, each.test_accuracy, *(", ".join(names[k] for k in sorted(side)) or "none" for side in sides))
        )
    heads = (
        PageColumn("test accuracy", format_percent),
        PageColumn("sends to", kind="long"),
        PageColumn("receives from", kind="long"),
    )
    return PageTable("numbers-graph", "Who sends to whom", (PageColumn("learner"), *heads), rows)


# ---- recorded messages -----------------------------------------------------------------------------------------------


def _heatmap(messages: FloatArray) -> Figure:
    """Draw the messages `(rounds, coordinates)` of a learner as a heatmap: blue below zero, red above, extremes clipped."""
    rounds, coordinates = (select_evenly(n, size) for n, size in zip(messages.shape, MAX_HEATMAP_SHAPE, strict=True))
    selected = messages[np.ix_(rounds, coordinates)].T
    limit = _colour_limit(selected) or 1.0
    part = np.nan_to_num(np.clip(selected / limit, -1, 1))
    # Zero is transparent, so that the heatmap fits the light and the dark page.
    pixels = np.empty((*part.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where((part < 0)[..., None], _BELOW, _ABOVE)
    pixels[..., 3] = np.rint(255 * np.abs(part))
    ends = [as_floats(np.array([0.5, n + 0.5])) for n in messages.shape]
    sides = [
        make_round_axis(low=0.5, high=ends[0][1]),
        Axis("coordinate", low=ends[1][1], high=0.5, value_format="count"),
    ]
    picture = PlotMark("image", ends[0], ends[1], image=pixels)
    scale = [
        PlotMark("bars", np.zeros(0), np.zeros(0), f"{sign}{format_number(limit, 2)} and beyond", colour)
        for sign, colour in (("−", "below"), ("", "above"))
    ]
    views = (PlotView("", *sides),)
    return Figure("messages", "What was recorded", [picture, *scale], views, 320, _message_table(messages))


def _colour_limit(values: FloatArray) -> float:
    """Return the 98 % quantile of the absolute finite values; 0 without values."""
    known = np.abs(values[np.isfinite(values)])
    return float(np.quantile(known, 0.98)) if known.size else 0.0


def has_visible_signal(messages: FloatArray, scale: float) -> bool:
    """Return whether messages are visibly larger than noise of this scale."""
    return _colour_limit(messages) > _MIN_VISIBLE_NOISE_SCALES * scale


def _message_table(messages: FloatArray) -> PageTable:
    """Tabulate minimum, median and maximum of the messages of a few rounds."""
    rows = []
    for t in select_evenly(len(messages), _MAX_MESSAGE_TABLE_ROWS).tolist():
        known = messages[t][np.isfinite(messages[t])]
        spread: list[Any] = [float(f(known)) if known.size else None for f in (np.min, np.median, np.max)]
        rows.append((f"{t + 1:,}", *spread))
    heads = ("smallest number", "median", "largest")
    return PageTable(
        "numbers-messages",
        "What was recorded",
        (PageColumn("round"), *(PageColumn(head, format_number) for head in heads)),
        rows,
    )
