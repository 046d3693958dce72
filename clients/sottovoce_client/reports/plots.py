"""The report's plots: each takes a summary and returns a piece of HTML that draws itself with plotly.js."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sottovoce.arrays import FloatArray, as_floats
from sottovoce_client.reports.drawing import (
    INK,
    LEGEND,
    PALETTE,
    Trace,
    axis,
    buttons,
    draw,
    finite,
    label,
    thinned,
)
from sottovoce_client.running.summary import LearnerSummary, RunSummary, Swap
from sottovoce_client.wording import share

KINDS = (
    ("paper", "by the paper’s formula", "#6b7785"),
    ("record", "tight, per record", "#D55E00"),
    ("event", "tight, per event", "#0072B2"),
)
"""Epsilons of a learner, as the page calls and colours them."""
MOST_HEARD = (500, 200)
"""Rounds and coordinates that a heatmap shows at most."""


# ---- the graph -------------------------------------------------------------------------------------------


def graph_plot(summary: RunSummary) -> str:
    """Learners on a circle, coloured by test accuracy."""
    angles = math.pi / 2 - 2 * math.pi * np.arange(len(summary.learners)) / len(summary.learners)
    reach = 1.0 if len(summary.learners) > 1 else 0.0  # a single one sits in the middle
    x, y = reach * np.cos(angles), reach * np.sin(angles)
    ends = [(x[i], x[j], y[i], y[j]) for i, j in summary.edges]
    lines = {
        "type": "scatter",
        "mode": "lines",
        "hoverinfo": "skip",
        "x": [value for a, b, _, _ in ends for value in (a, b, None)],
        "y": [value for _, _, a, b in ends for value in (a, b, None)],
        "line": {"color": "#b8c2cc", "width": 1.5 if len(ends) < 60 else 0.5},
    }
    hidden = {"visible": False, "fixedrange": True}
    return draw(
        "plot-graph",
        [lines, *_nodes(summary.learners, x, y)],
        380,
        showlegend=False,
        margin={"l": 8, "r": 8, "t": 16, "b": 16},
        xaxis={**hidden, "range": [-1.75, 1.75]},
        yaxis={**hidden, "range": [-1.35, 1.35], "scaleanchor": "x"},
    )


def _nodes(learners: Sequence[LearnerSummary], x: FloatArray, y: FloatArray) -> list[Trace]:
    few = len(learners) <= 16
    known = [each.test_accuracy for each in learners if each.test_accuracy is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high - low < 0.01:  # else the colours would make mountains of rounding
        low, high = low - 0.005, high + 0.005
    bar = {
        "title": {"text": "test<br>accuracy", "font": {"size": 11}},
        "tickformat": ".1%",
        "thickness": 10,
        "len": 0.7,
    }
    asked = [each.test_accuracy is not None for each in learners]
    colours = [each.test_accuracy if each.test_accuracy is not None else "#cfd6dd" for each in learners]
    node: Trace = {"type": "scatter", "x": finite(x), "y": finite(y), "hoverinfo": "text", "cliponaxis": False}
    marker: Trace = {"size": 30 if few else 14, "line": {"color": "white", "width": 2}, "color": colours}
    if all(asked):
        marker |= {"colorscale": "Cividis", "cmin": low, "cmax": high, "showscale": len(known) > 1, "colorbar": bar}
    elif any(asked):
        marker["color"] = ["#0072B2" if yes else "#cfd6dd" for yes in asked]
    hover = [f"{label(each.name, 60)}: {share(each.test_accuracy)}" for each in learners]
    nodes = [{**node, "mode": "markers", "marker": marker, "hovertext": hover}]
    if few:
        nodes.append(_names(learners, x, y))
    return nodes


def _names(learners: Sequence[LearnerSummary], x: FloatArray, y: FloatArray) -> Trace:
    sides = ["center" if abs(a) < 0.3 else "right" if a > 0 else "left" for a in x]
    heights = ["middle" if side != "center" else "top" if b > 0 else "bottom" for side, b in zip(sides, y, strict=True)]
    return {
        "type": "scatter",
        "mode": "text",
        "hoverinfo": "skip",
        "x": finite(x * 1.18),
        "y": finite(y * 1.18 if len(learners) > 1 else y + 0.18),
        "text": [label(each.name) for each in learners],
        "textposition": [f"{height} {side}" for height, side in zip(heights, sides, strict=True)],
        "cliponaxis": False,
    }


# ---- one line a learner ----------------------------------------------------------------------------------


def learner_lines(names: Sequence[str], points: Sequence[tuple[FloatArray, FloatArray]], value: str) -> list[Trace]:
    """A line for every learner: coloured and named when few; when many, thin, alike, and named under the pointer.

    Args:
        value: d3 format of the values.
    """
    few = len(names) <= len(PALETTE)
    thin = {"color": "rgba(0,114,178,0.35)", "width": 1}
    lines = [
        {
            "type": "scatter",
            "mode": "lines" if len(x) > 1 else "markers",
            "x": finite(x),
            "y": finite(y),
            "name": label(name),
            "showlegend": few and len(names) > 1,
            "line": {"color": PALETTE[i], "width": 1.8} if few else thin,
            "hovertemplate": f"round %{{x:,}}: %{{y:{value}}}",
        }
        for i, (name, (x, y)) in enumerate(zip(names, points, strict=True))
    ]
    return lines if few else [_key(f"{len(names)} learners (point at a line for its name)"), *lines]


def _key(text: str) -> Trace:
    """An entry of the legend that stands for many lines, and draws none."""
    return {"type": "scatter", "mode": "lines", "x": [None], "y": [None], "name": text, "line": {"color": PALETTE[0]}}


def learning_plot(summary: RunSummary) -> str:
    """Prequential accuracy over rounds, and the non-private model's accuracy beside it."""
    known = np.array([[math.nan if a is None else a for a in look.accuracy] for look in summary.progress])
    rounds = np.array([look.rounds for look in summary.progress], dtype=float)
    kept = thinned(len(summary.progress))
    points = [(rounds[kept, i], known[kept, i]) for i in range(len(summary.learners))]
    traces = learner_lines([each.name for each in summary.learners], points, ".1%")
    if summary.central_accuracy is not None:
        traces.append(_level(summary.central_accuracy, float(rounds.max()), "centralised, not private (test)"))
    return draw(
        "plot-learning",
        traces,
        380,
        xaxis=axis("round", tickformat=",", rangemode="tozero"),
        yaxis=axis("prequential accuracy", tickformat=".0%"),
    )


def _level(value: float, last: float, name: str) -> Trace:
    line = {"color": INK, "width": 1.5, "dash": "dash"}
    place = {"x": [0, last], "y": [value, value], "name": name, "showlegend": True}
    return {"type": "scatter", "mode": "lines", **place, "line": line, "hovertemplate": f"{share(value)}"}


# ---- budgets ---------------------------------------------------------------------------------------------


def stacked(curves: Sequence[FloatArray], rounds: Sequence[int]) -> FloatArray:
    """`(learners, most rounds)`: curves as far as each learner went; who has stopped spends no more."""
    longest = max(rounds)
    rows = np.zeros((len(curves), longest))
    for row, curve, done in zip(rows, curves, rounds, strict=True):
        row[:done] = curve[:done]
        row[done:] = curve[done - 1] if done else 0.0
    return rows


def budget_plot(summary: RunSummary) -> str:
    """Cumulative epsilons over rounds: the largest of all learners, and the range down to the smallest.

    Empty where no epsilon is finite and above zero.
    """
    rounds = [learner.rounds for learner in summary.learners]
    rows = {kind: stacked([getattr(e, f"{kind}_curve") for e in summary.learners], rounds) for kind, *_ in KINDS}
    traces = [trace for kind, name, colour in KINDS for trace in _spread(rows[kind], name, colour)]
    if not traces:
        return ""
    budgets = [learner.budget for learner in summary.learners if learner.budget is not None]
    if budgets and math.isfinite(min(budgets)):
        traces.append(_level(min(budgets), max(rounds), "where a learner stops"))
    ends = [row[:, -1].max() for row in rows.values() if np.isfinite(row[:, -1]).all()]
    logarithmic = len(ends) > 1 and max(ends) > 8 * min(ends)
    decades: Trace = {"yaxis.type": "log", "yaxis.dtick": 1}
    return draw(
        "plot-budget",
        traces,
        400,
        hovermode="x unified",
        xaxis=axis("round", tickformat=","),
        yaxis=axis("cumulative ε", type="log", dtick=1) if logarithmic else axis("cumulative ε"),
        updatemenus=buttons(
            ("logarithmic", decades),
            ("linear", {"yaxis.type": "linear", "yaxis.dtick": None}),
            active=int(not logarithmic),
        ),
    )


def _spread(rows: FloatArray, name: str, colour: str) -> list[Trace]:
    """The largest value over the learners as a line, and a band down to the smallest."""
    kept = thinned(rows.shape[1])
    high, low = rows.max(axis=0)[kept], rows.min(axis=0)[kept]
    if not (np.isfinite(high) & (high > 0)).any():
        return []
    across = {"type": "scatter", "mode": "lines", "x": (kept + 1).tolist()}
    line = {**across, "y": finite(_above_zero(high)), "name": name, "line": {"color": colour, "width": 2.2}}
    line["hovertemplate"] = "%{y:.4~g}"
    if not np.isfinite(high).all() or np.array_equal(high, low):
        return [line]
    band = {**across, "hoverinfo": "skip", "showlegend": False, "line": {"width": 0}}
    fill = {"fill": "tonexty", "fillcolor": _faded(colour)}
    return [{**band, "y": finite(_above_zero(low))}, {**band, **fill, "y": finite(_above_zero(high))}, line]


def _above_zero(values: FloatArray) -> FloatArray:
    """The first messages cost nothing, which a logarithmic axis cannot show: gaps."""
    return np.where(values > 0, values, math.nan)


def _faded(colour: str, alpha: float = 0.14) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


# ---- the capture -----------------------------------------------------------------------------------------


def loss_plot(summary: RunSummary, level: str) -> str:
    """Signed privacy loss of the capture for every learner's worst swap, between plus and minus the claim.

    Args:
        level: `event` or `record`.
    """
    swapped = [(each, swap) for each in summary.learners if (swap := swap_of(each, level)) is not None]
    kept = [thinned(len(swap.by_round)) for _, swap in swapped]
    points = [(as_floats(k + 1), swap.by_round[k]) for k, (_, swap) in zip(kept, swapped, strict=True)]
    rounds = [len(swap.by_round) for _, swap in swapped]
    claims = stacked([getattr(each, f"{level}_curve") for each, _ in swapped], rounds).max(axis=0)
    largest = max((float(np.abs(y[np.isfinite(y)]).max(initial=0)) for _, y in points), default=0.0)
    near = 1.15 * largest or 1.0
    return draw(
        f"plot-loss-{level}",
        [*_claim(claims), *learner_lines([each.name for each, _ in swapped], points, "+.4~g")],
        360,
        xaxis=axis("round", tickformat=","),
        yaxis=axis("privacy loss so far", zeroline=True, zerolinecolor="#b8c2cc"),
        legend={**LEGEND, "y": -0.2, "yanchor": "top"},
        updatemenus=buttons(
            ("whole budget", {"yaxis.autorange": True}),
            ("closer", {"yaxis.autorange": False, "yaxis.range": [-near, near]}),
        ),
    )


def swap_of(learner: LearnerSummary, level: str) -> Swap | None:
    """The learner's swap at this level: `event` or `record`."""
    return learner.swap_event if level == "event" else learner.swap_record


def _claim(claims: FloatArray) -> list[Trace]:
    """The area that the claim allows, as far as it is finite."""
    known = claims[np.isfinite(claims)]  # a prefix: what has become infinite stays so
    if len(known) < 2:
        return []
    kept = thinned(len(known))
    edge = {"type": "scatter", "mode": "lines", "x": (kept + 1).tolist(), "line": {"color": "#9aa5b1", "width": 1.2}}
    lower = {**edge, "y": finite(-known[kept]), "showlegend": False, "hoverinfo": "skip"}
    upper = {**edge, "y": finite(known[kept]), "name": "± claimed ε", "fill": "tonexty"}
    return [lower, {**upper, "fillcolor": "rgba(154,165,177,0.13)", "hovertemplate": "claimed: %{y:.4~g}"}]


def heard_plot(heard: FloatArray) -> str:
    """What one learner said: rounds across, coordinates down, extreme values clipped."""
    rounds, coordinates = (thinned(n, most) for n, most in zip(heard.shape, MOST_HEARD, strict=True))
    shown = heard[np.ix_(rounds, coordinates)].T
    known = np.abs(shown[np.isfinite(shown)])
    reach = float(np.quantile(known, 0.98)) if known.size else 1.0
    picture = {
        "type": "heatmap",
        "x": (rounds + 1).tolist(),
        "y": (coordinates + 1).tolist(),
        "z": [[None if v is None else float(f"{v:.3g}") for v in finite(row)] for row in shown],
        "zmin": -(reach or 1.0),
        "zmax": reach or 1.0,
        "colorscale": "RdBu",
        "reversescale": True,
        "colorbar": {"thickness": 10, "title": {"text": "value", "font": {"size": 11}}},
        "hovertemplate": "round %{x:,}, coordinate %{y}: %{z:.3~g}<extra></extra>",
    }
    return draw(
        "plot-heard",
        [picture],
        360,
        margin={"l": 62, "r": 40, "t": 12, "b": 48},
        xaxis=axis("round", tickformat=",", showgrid=False),
        yaxis=axis("coordinate", showgrid=False, autorange="reversed"),
    )
