"""The figures of a run's report."""

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
    PALETTE,
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
"""So many learners have their names beside them; more show theirs under the pointer."""
MAX_HEATMAP_SHAPE = (500, 200)
"""Rounds and coordinates that a heatmap shows at most."""
_MIN_VISIBLE_NOISE_SCALES = 8.0
"""Noise scales that a number of noise alone exceeds too seldom to be seen: Laplace noise does once in 3,000."""
_BELOW, _ABOVE = (0x1F, 0x6F, 0xC0), (0xD6, 0x4A, 0x1C)
_MAX_MESSAGE_TABLE_ROWS = 8
EPSILON_STYLES = {
    "paper": ("by the paper’s formula", FAINT),
    "record": ("tight, per record", RED),
    "record_use": ("tight, per event", BLUE),
    "output": ("published decisions only", GREEN),
}
"""Epsilons of a learner, as pages call and colour them."""
_MAX_FIGURE_POINTS = 4800
"""Points of all curves of a figure: a page of many learners is not to be a large one."""
LEVEL_TITLES = {"record_use": "One use of the record replaced", "record": "All uses of the record replaced"}


def build_run_figures(summary: RunSummary) -> list[Figure]:
    """All figures of a report, in its order; one that has nothing to show is empty."""
    losses = [_losses(summary, level, title) for level, title in LEVEL_TITLES.items()]
    heard = (
        []
        if summary.capture is None or not summary.capture.sender_values.size
        else [_heard(summary.capture.sender_values)]
    )
    return [_graph(summary), _learning(summary), _budget(summary), *losses, *heard]


# ---- one line a learner ----------------------------------------------------------------------------------------------


def _learner_lines(names: Sequence[str], points: Sequence[tuple[FloatArray, FloatArray]]) -> list[PlotMark]:
    """A line for every learner: each in its colour when few; when many, thin and alike."""
    few = len(names) <= len(PALETTE)
    kept = [select_evenly(len(x), max(25, _MAX_FIGURE_POINTS // len(names))) for x, _ in points]
    points = [(x[k], y[k]) for k, (x, y) in zip(kept, points, strict=True)]
    return [
        make_line(x, y, name, PALETTE[i] if few else BLUE, width=1.8 if few else 1.0)
        for i, (name, (x, y)) in enumerate(zip(names, points, strict=True))
    ]


def _learning(summary: RunSummary) -> Figure:
    """Accuracy over rounds, and the non-private model's beside it; nothing where none is known.

    That is learners' own, of records before they are learned, where they told it; else on held-out records, as measured here.
    """
    title, told = "How they learned", summary.has_prequential_accuracy
    view = PlotView(
        "", make_round_axis(low=0.0), Axis("prequential accuracy" if told else "test accuracy", value_format="share")
    )
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
    kept = select_evenly(len(summary.progress))
    looks = [summary.progress[k] for k in kept]
    for i in range(len(summary.learners)):
        known = [math.nan if (told := look.accuracy[i]) is None else told for look in looks]
        yield as_floats([look.rounds[i] for look in looks]), as_floats(known)


def _curve(points: Sequence[tuple[int, float]]) -> tuple[FloatArray, FloatArray]:
    pairs = np.array(points, dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _level(value: float, last: float, name: str) -> PlotMark:
    return make_reference_line([0, last], [value, value], name)


# ---- budgets ---------------------------------------------------------------------------------------------------------


def stack_curves(curves: Sequence[FloatArray], rounds: Sequence[int]) -> FloatArray:
    """`(learners, most rounds)`: curves as far as each learner went; who has stopped spends no more."""
    longest = max(rounds)
    rows = np.zeros((len(curves), longest))
    for row, curve, done in zip(rows, curves, rounds, strict=True):
        row[:done] = curve[:done]
        row[done:] = curve[done - 1] if done else 0.0
    return rows


def _budget(summary: RunSummary) -> Figure:
    """Cumulative epsilons over rounds, and where the first learner stops."""
    rounds = [learner.rounds_done for learner in summary.learners]
    curves = {
        kind: stack_curves([getattr(each, f"epsilon_{kind}_curve") for each in summary.learners], rounds)
        for kind in ("paper", "record", "record_use")
    }
    budgets = [learner.epsilon_limit for learner in summary.learners if learner.epsilon_limit is not None]
    limit = min(budgets, default=math.inf)
    stop = (
        [make_reference_line([1, max(rounds)], [limit, limit], "where a learner stops")] if math.isfinite(limit) else []
    )
    return build_budget_figure("What it cost", curves, stop)


def build_budget_figure(title: str, curves: dict[str, FloatArray], marks: Sequence[PlotMark]) -> Figure:
    """Cumulative epsilons over rounds: the largest of all learners, and the range down to the smallest.

    Args:
        title: of the figure.
        curves: `(learners, rounds)` by kind, of `KINDS`.
        marks: what is drawn beside them; nothing is where no epsilon is finite and above zero.
    """
    drawn = {kind: make_range_band(rows, *EPSILON_STYLES[kind]) for kind, rows in curves.items()}
    ends = [float(rows[:, -1].max()) for kind, rows in curves.items() if drawn[kind]]
    ends = [each for each in ends if 0 < each < math.inf]
    logarithmic = len(ends) > 1 and max(ends) > 8 * min(ends)
    made = [mark for each in drawn.values() for mark in each]
    views = make_scale_views(make_round_axis(), "cumulative ε", logarithmic=logarithmic)
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
        (each, swap)
        for each in summary.learners
        if (swap := each.get_observed_loss(level)) is not None and swap.cumulative_loss.size
    ]
    if not swapped:
        return Figure(name, title, (), ())
    kept = [select_evenly(len(swap.cumulative_loss)) for _, swap in swapped]
    points = [(as_floats(k + 1), swap.cumulative_loss[k]) for k, (_, swap) in zip(kept, swapped, strict=True)]
    rounds = [len(swap.cumulative_loss) for _, swap in swapped]
    claims = stack_curves([getattr(each, f"epsilon_{level}_curve") for each, _ in swapped], rounds).max(axis=0)
    claims = claims[np.isfinite(claims)]  # a prefix: what has become infinite stays so
    near = 1.15 * max(float(np.abs(y[np.isfinite(y)]).max(initial=0)) for _, y in points) or 1.0
    far = float(claims.max(initial=0.0))
    across = make_round_axis(low=0.0)
    close = PlotView("closer", across, Axis("privacy loss so far", low=-near, high=near))
    whole = PlotView("whole budget", across, Axis("privacy loss so far"))
    views = (close, whole) if far > 4 * near else (whole, close) if far > 1.3 * near else (whole,)
    zero = make_reference_line([0, max(rounds)], [0, 0], "", RULE, "solid", width=1.0)
    marks = [*_claim(claims), zero, *_learner_lines([each.name for each, _ in swapped], points)]
    return Figure(name, title, marks, views)


def _claim(claims: FloatArray) -> list[PlotMark]:
    """The area that the claim allows, as far as it is finite."""
    if len(claims) < 2:
        return []
    kept = select_evenly(len(claims))
    return [make_band(kept + 1, -claims[kept], claims[kept], AREA, "± claimed ε", 1.2)]


# ---- who speaks to whom ----------------------------------------------------------------------------------------------


def _graph(summary: RunSummary) -> Figure:
    """Learners on a circle, the fuller the more accurate, and their channels; arrows where only one of two speaks."""
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
        said = [each.name] if each.test_accuracy is None else [each.name, format_percent(each.test_accuracy)]
        if few:
            marks.append(make_dots(x[[k]], y[[k]], "", "paper", width=18.0))  # no channel shines through
            marks.append(PlotMark("text", x[[k]], y[[k]], "\n".join([shorten(said[0]), *said[1:]])))
        fill = 0.15 if each.test_accuracy is None else fill
        marks.append(make_dots(x[[k]], y[[k]], ": ".join(said), BLUE, width=18.0 if few else 11.0, fill=fill))
    view = PlotView("", Axis("", low=-1.9, high=1.9), Axis("", low=-1.4, high=1.4))
    label = f"{pluralize(n, 'learner')}, {pluralize(len(both) + len(one_way), 'channel')}"
    return Figure("graph", "Who sends to whom", marks if n else (), (view,), 330, _graph_table(summary), label)


def _graph_table(summary: RunSummary) -> PageTable:
    names, one_way = [each.name for each in summary.learners], set(summary.one_way)
    rows = []
    for i, each in enumerate(summary.learners):
        both = {b if a == i else a for a, b in summary.edges if i in (a, b) and not {(a, b), (b, a)} & one_way}
        sides = both | {b for a, b in one_way if a == i}, both | {a for a, b in one_way if b == i}
        rows.append(
            (each.name, each.test_accuracy, *(", ".join(names[k] for k in sorted(side)) or "nobody" for side in sides))
        )
    heads = (
        PageColumn("test accuracy", format_percent),
        PageColumn("speaks to", kind="long"),
        PageColumn("hears", kind="long"),
    )
    return PageTable("numbers-graph", "Who sends to whom", (PageColumn("learner"), *heads), rows)


# ---- what was overheard ----------------------------------------------------------------------------------------------


def _heard(heard: FloatArray) -> Figure:
    """What one learner said: rounds across, coordinates down; blue below zero, red above, extreme values clipped."""
    rounds, coordinates = (select_evenly(n, most) for n, most in zip(heard.shape, MAX_HEATMAP_SHAPE, strict=True))
    shown = heard[np.ix_(rounds, coordinates)].T
    reach = _reach(shown) or 1.0
    part = np.nan_to_num(np.clip(shown / reach, -1, 1))
    # Colour grows out of the page's own ground, light or dark.
    pixels = np.empty((*part.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where((part < 0)[..., None], _BELOW, _ABOVE)
    pixels[..., 3] = np.rint(255 * np.abs(part))
    ends = [as_floats(np.array([0.5, n + 0.5])) for n in heard.shape]
    sides = [
        make_round_axis(low=0.5, high=ends[0][1]),
        Axis("coordinate", low=ends[1][1], high=0.5, value_format="count"),
    ]
    picture = PlotMark("image", ends[0], ends[1], image=pixels)
    scale = [
        PlotMark("bars", np.zeros(0), np.zeros(0), f"{sign}{format_number(reach, 2)} and beyond", colour)
        for sign, colour in (("−", "below"), ("", "above"))
    ]
    return Figure("heard", "What was recorded", [picture, *scale], (PlotView("", *sides),), 320, _heard_numbers(heard))


def _reach(heard: FloatArray) -> float:
    """What 2 % of the numbers lie beyond, whatever their sign; 0 of none."""
    known = np.abs(heard[np.isfinite(heard)])
    return float(np.quantile(known, 0.98)) if known.size else 0.0


def has_visible_signal(heard: FloatArray, scale: float) -> bool:
    """Whether what was said is more than noise of this scale, at a glance."""
    return _reach(heard) > _MIN_VISIBLE_NOISE_SCALES * scale


def _heard_numbers(heard: FloatArray) -> PageTable:
    """What was said in a few of the rounds, in short."""
    rows = []
    for t in select_evenly(len(heard), _MAX_MESSAGE_TABLE_ROWS).tolist():
        known = heard[t][np.isfinite(heard[t])]
        spread: list[Any] = [float(f(known)) if known.size else None for f in (np.min, np.median, np.max)]
        rows.append((f"{t + 1:,}", *spread))
    heads = ("smallest number", "median", "largest")
    return PageTable(
        "numbers-heard",
        "What was recorded",
        (PageColumn("round"), *(PageColumn(head, format_number) for head in heads)),
        rows,
    )
