"""The figures of a run's report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sottovoce.arrays import FloatArray, as_floats
from sottovoce_client.reports.drawing import (
    AREA,
    BLUE,
    FAINT,
    GREEN,
    PALETTE,
    RED,
    RULE,
    Figure,
    Trace,
    axis,
    band,
    buttons,
    finite,
    label,
    line,
    round_axis,
    rule,
    spread,
    switched,
    thinned,
)
from sottovoce_client.running.summary import LearnerSummary, RunSummary
from sottovoce_client.wording import share

KINDS = {
    "paper": ("by the paper’s formula", FAINT),
    "record": ("tight, per record", RED),
    "event": ("tight, per event", BLUE),
    "output": ("published decisions only", GREEN),
}
"""Epsilons of a learner, as pages call and colour them."""
LEVELS = {"event": "One use of the record swapped", "record": "All uses of the record swapped"}
MOST_HEARD = (500, 200)
"""Rounds and coordinates that a heatmap shows at most."""
_UNKNOWN = "#cfd6dd"
_MANY_EDGES = 60


def run_figures(summary: RunSummary) -> list[Figure]:
    """All figures of a report, in its order; one that has nothing to show is empty."""
    losses = [_losses(summary, level, title) for level, title in LEVELS.items()]
    heard = [] if summary.capture is None or not summary.capture.heard.size else [_heard(summary.capture.heard)]
    return [_graph(summary), _learning(summary), _budget(summary), *losses, *heard]


# ---- the graph -------------------------------------------------------------------------------------------------------


def _graph(summary: RunSummary) -> Figure:
    """Learners on a circle, coloured by test accuracy; an arrow leads from who speaks to who only listens."""
    angles = math.pi / 2 - 2 * math.pi * np.arange(len(summary.learners)) / len(summary.learners)
    reach = 1.0 if len(summary.learners) > 1 else 0.0  # a single one sits in the middle
    x, y = reach * np.cos(angles), reach * np.sin(angles)
    hidden = {"visible": False, "fixedrange": True}
    layout = {
        "showlegend": False,
        "margin": {"l": 8, "r": 8, "t": 16, "b": 16},
        "xaxis": {**hidden, "range": [-1.75, 1.75]},
        "yaxis": {**hidden, "range": [-1.35, 1.35], "scaleanchor": "x"},
        "annotations": _arrows(summary, x, y),
    }
    return Figure("graph", "Who spoke to whom", [_edges(summary, x, y), *_nodes(summary.learners, x, y)], layout)


def _edges(summary: RunSummary, x: FloatArray, y: FloatArray) -> Trace:
    across, up = (np.array([[z[i], z[j], math.nan] for i, j in summary.edges]).ravel() for z in (x, y))
    width = 1.5 if len(summary.edges) < _MANY_EDGES else 0.5
    return line(across, up, "", RULE, width=width, mode="lines", hoverinfo="skip")


def _arrows(summary: RunSummary, x: FloatArray, y: FloatArray) -> list[Trace]:
    """Heads of arrows, clear of the nodes: plotly draws them as annotations without a text."""
    clear = 17 if len(summary.learners) <= 16 else 9
    look = {"text": "", "showarrow": True, "arrowhead": 2, "arrowsize": 1.4, "arrowcolor": FAINT, "standoff": clear}
    look |= {"arrowwidth": 1.5 if len(summary.edges) < _MANY_EDGES else 0.5, "startstandoff": clear}
    place = {"xref": "x", "yref": "y", "axref": "x", "ayref": "y"}
    return [{**look, **place, "ax": x[i], "ay": y[i], "x": x[j], "y": y[j]} for i, j in summary.one_way]


def _nodes(learners: Sequence[LearnerSummary], x: FloatArray, y: FloatArray) -> list[Trace]:
    few = len(learners) <= 16
    node: Trace = {"type": "scatter", "x": finite(x), "y": finite(y), "hoverinfo": "text", "cliponaxis": False}
    marker = {"size": 30 if few else 14, "line": {"color": "white", "width": 2}, **_shades(learners)}
    hover = [f"{label(each.name, 60)}: {share(each.test_accuracy)}" for each in learners]
    nodes = {**node, "mode": "markers", "marker": marker, "hovertext": hover}
    return [nodes, _names(learners, x, y)] if few else [nodes]


def _shades(learners: Sequence[LearnerSummary]) -> Trace:
    """Colours by accuracy: a scale where all are known, else who answered at all."""
    found = [each.test_accuracy for each in learners]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return {"color": [_UNKNOWN if each is None else BLUE for each in found]}
    low, high = min(known), max(known)
    if high - low < 0.01:  # else the colours would make mountains of rounding
        low, high = low - 0.005, high + 0.005
    title = {"text": "test<br>accuracy", "font": {"size": 11}}
    bar = {"title": title, "tickformat": ".1%", "thickness": 10, "len": 0.7}
    scale = {"colorscale": "Cividis", "cmin": low, "cmax": high, "showscale": len(known) > 1, "colorbar": bar}
    return {"color": known, **scale}


def _names(learners: Sequence[LearnerSummary], x: FloatArray, y: FloatArray) -> Trace:
    sides = ["center" if abs(a) < 0.3 else "right" if a > 0 else "left" for a in x]
    heights = ["middle" if side != "center" else "top" if b > 0 else "bottom" for side, b in zip(sides, y, strict=True)]
    away = {"x": finite(x * 1.18), "y": finite(y * 1.18 if len(learners) > 1 else y + 0.18)}
    look = {"type": "scatter", "mode": "text", "hoverinfo": "skip", "cliponaxis": False}
    places = [f"{height} {side}" for height, side in zip(heights, sides, strict=True)]
    return {**look, **away, "text": [label(each.name) for each in learners], "textposition": places}


# ---- one line a learner ----------------------------------------------------------------------------------------------


def _learner_lines(names: Sequence[str], points: Sequence[tuple[FloatArray, FloatArray]], value: str) -> list[Trace]:
    """A line for every learner: coloured and named when few; when many, thin, alike, and named under the pointer.

    Args:
        value: d3 format of the values.
    """
    few = len(names) <= len(PALETTE)
    look: Trace = {"showlegend": few and len(names) > 1, "hovertemplate": f"round %{{x:,}}: %{{y:{value}}}"}
    thin = {"color": "rgba(0,114,178,0.35)", "width": 1}
    lines = [
        line(x, y, label(name), PALETTE[i], width=1.8, **look)
        if few
        else line(x, y, label(name), BLUE, **look) | {"line": thin}
        for i, (name, (x, y)) in enumerate(zip(names, points, strict=True))
    ]
    many = f"{len(names)} learners (point at a line for its name)"
    # An entry of the legend that stands for all of them, and draws none.
    return lines if few else [line([math.nan] * 2, [math.nan] * 2, many, BLUE, mode="lines"), *lines]


def _learning(summary: RunSummary) -> Figure:
    """Prequential accuracy over rounds, and the non-private model's accuracy beside it; nothing where none is known."""
    title = "How they learned"
    known = np.array([[math.nan if a is None else a for a in look.accuracy] for look in summary.progress])
    if not np.isfinite(known).any():
        return Figure("learning", title, ())
    rounds = np.array([look.rounds for look in summary.progress], dtype=float)
    kept = thinned(len(summary.progress))
    points = [(rounds[kept, i], known[kept, i]) for i in range(len(summary.learners))]
    traces = _learner_lines([each.name for each in summary.learners], points, ".1%")
    if summary.central_accuracy is not None:
        traces.append(_level(summary.central_accuracy, float(rounds.max()), "centralised, not private (test)"))
    layout = {"xaxis": axis("round", tickformat=",", rangemode="tozero")}
    return Figure("learning", title, traces, {**layout, "yaxis": axis("prequential accuracy", tickformat=".0%")})


def _level(value: float, last: float, name: str) -> Trace:
    return rule([0, last], [value, value], name, showlegend=True)


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
    stop = [_level(limit, max(rounds), "where a learner stops")] if math.isfinite(limit) else []
    return spent_plot("What it cost", curves, stop)


def spent_plot(title: str, curves: dict[str, FloatArray], marks: Sequence[Trace]) -> Figure:
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
    traces = [trace for each in drawn.values() for trace in each]
    layout = {"hovermode": "x unified", "xaxis": axis("round", tickformat=","), "height": 400}
    layout |= switched("cumulative ε", logarithmic=logarithmic)
    return Figure("budget", title, [*traces, *marks] if traces else (), layout)


# ---- the capture -----------------------------------------------------------------------------------------------------


def _losses(summary: RunSummary, level: str, title: str) -> Figure:
    """Signed privacy loss of the capture for every learner's worst swap, between plus and minus the claim.

    Args:
        level: `event` or `record`.
        title: of the figure.
    """
    swapped = [
        (each, swap) for each in summary.learners if (swap := each.swap(level)) is not None and swap.by_round.size
    ]
    if not swapped:
        return Figure(f"loss-{level}", title, ())
    kept = [thinned(len(swap.by_round)) for _, swap in swapped]
    points = [(as_floats(k + 1), swap.by_round[k]) for k, (_, swap) in zip(kept, swapped, strict=True)]
    rounds = [len(swap.by_round) for _, swap in swapped]
    claims = stacked([getattr(each, f"{level}_curve") for each, _ in swapped], rounds).max(axis=0)
    near = 1.15 * max(float(np.abs(y[np.isfinite(y)]).max(initial=0)) for _, y in points) or 1.0
    layout = {
        "height": 370,
        "xaxis": axis("round", tickformat=","),
        "yaxis": axis("privacy loss so far", zeroline=True, zerolinecolor=RULE),
        "updatemenus": buttons(
            ("whole budget", {"yaxis.autorange": True}),
            ("closer", {"yaxis.autorange": False, "yaxis.range": [-near, near]}),
        ),
    }
    lines = _learner_lines([each.name for each, _ in swapped], points, "+.4~g")
    return Figure(f"loss-{level}", title, [*_claim(claims), *lines], layout)


def _claim(claims: FloatArray) -> list[Trace]:
    """The area that the claim allows, as far as it is finite."""
    known = claims[np.isfinite(claims)]  # a prefix: what has become infinite stays so
    if len(known) < 2:
        return []
    kept = thinned(len(known))
    return band(kept + 1, -known[kept], known[kept], AREA, "± claimed ε", 1.2)


def _heard(heard: FloatArray) -> Figure:
    """What one learner said: rounds across, coordinates down, extreme values clipped."""
    rounds, coordinates = (thinned(n, most) for n, most in zip(heard.shape, MOST_HEARD, strict=True))
    shown = heard[np.ix_(rounds, coordinates)].T
    known = np.abs(shown[np.isfinite(shown)])
    reach = (float(np.quantile(known, 0.98)) if known.size else 1.0) or 1.0
    picture = {
        "type": "heatmap",
        "x": (rounds + 1).tolist(),
        "y": (coordinates + 1).tolist(),
        "z": [[None if v is None else float(f"{v:.3g}") for v in finite(row)] for row in shown],
        "zmin": -reach,
        "zmax": reach,
        "colorscale": "RdBu",
        "reversescale": True,
        "colorbar": {"thickness": 10, "title": {"text": "value", "font": {"size": 11}}},
        "hovertemplate": "round %{x:,}, coordinate %{y}: %{z:.3~g}<extra></extra>",
    }
    down = axis("coordinate", showgrid=False, autorange="reversed")
    layout = {"height": 360, "margin": {"l": 62, "r": 40, "t": 12, "b": 48}, "yaxis": down}
    across = round_axis(len(heard), showgrid=False)
    return Figure("heard", "What was overheard", [picture], {**layout, "xaxis": across})
