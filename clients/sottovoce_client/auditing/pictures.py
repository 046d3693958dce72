"""The audit's figures of noise, of what a swap does, and of all learners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.auditing.audit import Audit, LearnerLoss
from sottovoce.auditing.twins import Twins
from sottovoce_client.auditing.plots import WORLDS
from sottovoce_client.reports.drawing import (
    BLUE,
    FAINT,
    GRID,
    INK,
    RED,
    Figure,
    Trace,
    axis,
    band,
    bars,
    dots,
    label,
    line,
    round_axis,
    rule,
    thinned,
    upright,
)
from sottovoce_client.wording import number

_ZOOMED = 8
"""Rounds after the swap that the close view shows."""


# ---- noise -----------------------------------------------------------------------------------------------------------


def noise_plot(noise: FloatArray) -> Figure:
    """Standardised noise against the standard Laplace density, and where 95 of 100 correct bars lie; nothing without noise."""
    title = "Its density"
    if not noise.any():
        return Figure("noise", title, ())
    reach = max(6.0, math.log(len(noise)) + 1.0)
    edges = np.linspace(-reach, reach, 81 if len(noise) > 2000 else 31)
    width = float(edges[1] - edges[0])
    counts, _ = np.histogram(noise, edges)
    centres = (edges[1:] + edges[:-1]) / 2
    chances = np.diff(np.where(edges < 0, 0.5 * np.exp(edges), 1.0 - 0.5 * np.exp(-np.abs(edges))))
    error = 1.96 * np.sqrt(chances * (1.0 - chances) / len(noise))
    least = 0.3 / len(noise) / width
    low, high = np.maximum((chances - error) / width, least), (chances + error) / width
    heights = np.where(counts > 0, counts / len(noise) / width, math.nan)
    traces = [
        *band(centres, low, high, INK, "19 of 20 lie here"),
        rule(centres, chances / width, "Laplace, as claimed", dash="solid", hoverinfo="skip"),
        dots(centres, heights, "found in the messages", BLUE, hovertemplate="%{x:.2f}: %{y:.3~g}"),
    ]
    ends = [math.log10(least), math.log10(max(0.9, np.nanmax(heights)))]
    up = axis("density", type="log", dtick=1, exponentformat="power", range=ends)
    return Figure("noise", title, traces, {"xaxis": axis("noise, in units of its claimed scale"), "yaxis": up})


def quantiles(noise: FloatArray, most: int = 200) -> tuple[FloatArray, FloatArray]:
    """Quantiles that Laplace numbers should have, and those that these have; the tails are not left out."""
    n = len(noise)
    ranks = thinned(n, most)
    tail = np.unique(np.geomspace(1, max(1, n), 40).astype(int)) - 1
    ranks = np.unique(np.concatenate([ranks, tail, n - 1 - tail]))
    p = (ranks + 0.5) / n
    should = np.where(p < 0.5, np.log(2 * np.minimum(p, 0.5)), -np.log(2 * np.minimum(1 - p, 0.5)))
    return should, np.sort(noise)[ranks]


def quantile_plot(noise: FloatArray) -> Figure:
    """Quantiles of the noise against those of Laplace numbers: a straight line if all is well."""
    title = "Its quantiles"
    if not noise.any():
        return Figure("quantiles", title, ())
    should, has = quantiles(noise)
    ends = [should[0], should[-1]]
    hover = {"hovertemplate": "should be %{x:.2f}, is %{y:.2f}<extra></extra>"}
    traces = [
        rule(ends, ends, "as claimed", dash="solid", hoverinfo="skip"),
        dots(should, has, "found in the messages", BLUE, **hover),
    ]
    layout = {"xaxis": axis("quantile that is claimed"), "yaxis": axis("quantile that was found")}
    return Figure("quantiles", title, traces, layout)


# ---- the swap --------------------------------------------------------------------------------------------------------


def twins_plot(name: str, title: str, pair: Twins, rounds: IntArray) -> Figure:
    """One number of the messages in both worlds, with the same noise and without any, over these rounds."""
    curves = (
        ("first world", pair.first, BLUE, "solid", 3.2),  # the second must not hide it
        ("second world, same noise", pair.second, RED, "solid", 1.8),
        ("first world, no noise", pair.bare_first, BLUE, "dot", 3.2),
        ("second world, no noise", pair.bare_second, RED, "dot", 1.8),
    )
    thin = 1.0 if len(rounds) <= 100 else 0.6
    traces = [
        line(rounds, values[rounds], said, colour, width=thin * width, dash=dash)
        for said, values, colour, dash, width in curves
    ]
    swapped, text = upright(pair.swapped, "swapped record learned", FAINT, "dot")
    inside = bool(len(rounds)) and rounds[0] <= pair.swapped <= rounds[-1]
    layout = {
        "hovermode": "x unified",
        "xaxis": round_axis(len(rounds)),
        "yaxis": axis("number that is said", zeroline=True, zerolinecolor=GRID),
        "shapes": [swapped] if inside else [],
        "annotations": [{**text, "xanchor": "left"}] if inside else [],
    }
    return Figure(name, title, traces, layout)


def close_rounds(pair: Twins) -> IntArray:
    """The rounds around those that the swap moves first and most."""
    length = len(pair.first)
    moved = moving(pair)
    start = min(pair.swapped, int(moved[0]) if len(moved) else pair.swapped)
    end = max(start, int(moved[0]) if len(moved) else start) + _ZOOMED
    return np.arange(max(0, start - 2), min(length, end + 1))


def moving(pair: Twins) -> IntArray:
    """Rounds in which the number differs between the worlds, with the same noise or without any."""
    return np.flatnonzero((pair.first != pair.second) | (pair.bare_first != pair.bare_second))


def most_different(done: Audit) -> tuple[int, int] | None:
    """Position of the round, and number in it, that the black box saw: of the telling round, or the first one after it.

    The number is the one whose means in the two worlds differ most, in units of its spread. None: no such round was seen, or
    nothing differs.
    """
    later = np.flatnonzero(done.plan.listener.rounds >= done.twins.telling)
    both = [done.seen[done.worlds == world] for world in (0, 1)]
    if min(map(len, both)) == 0:
        return None
    for k in later.tolist():
        means = [np.mean(part[:, k], axis=0) for part in both]
        spread = np.std(done.seen[:, k], axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):  # numbers that are equal in all runs
            apart = np.nan_to_num(np.abs(means[0] - means[1]) / spread)
        if apart.any():
            return k, int(apart.argmax())
    return None


def said_plot(done: Audit, place: tuple[int, int] | None) -> Figure:
    """One number of one round's message over all runs, in both worlds; nothing where none differs."""
    title = "With fresh noise in every run"
    if place is None:
        return Figure("said", title, ())
    values = done.seen[:, place[0], place[1]]
    known = np.isfinite(values)
    low, high = np.quantile(values[known], [0.002, 0.998]) if known.any() else (0.0, 1.0)
    if not low < high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    edges = np.linspace(low, high, 50 if len(values) > 400 else 26)
    traces = []
    for world, (name, colour) in enumerate(WORLDS):
        mine = values[known & (done.worlds == world)]
        shares = np.histogram(mine, edges)[0] / max(1, len(mine))
        traces.append(bars(edges, shares, name, colour, hovertemplate="%{y:.1%}"))
    layout = {"barmode": "overlay", "bargap": 0, "hovermode": "x", "xaxis": axis("number that is said")}
    return Figure(
        "said", title, traces, {**layout, "yaxis": axis("share of runs", tickformat=".0%", rangemode="tozero")}
    )


# ---- learners --------------------------------------------------------------------------------------------------------


def learners_plot(losses: Sequence[LearnerLoss], names: Sequence[str], audited: int) -> Figure:
    """The claim of every learner as a grey bar, and in it the largest loss that was seen."""
    values = [v for each in losses for v in (each.claim, each.largest) if math.isfinite(v)]
    full = max(values, default=0.0) or 1.0
    titles = [label(names[each.learner]) for each in losses]
    titles = [f"<b>{t}</b>" if each.learner == audited else t for t, each in zip(titles, losses, strict=True)]
    colours = [WORLDS[int(each.largest > each.claim * (1 + 1e-9) + 1e-9)][1] for each in losses]
    common: Trace = {"type": "bar", "orientation": "h", "y": titles, "hoverinfo": "skip"}
    claims = {"x": [min(each.claim, 1.06 * full) for each in losses], "width": 0.72, "name": "claimed at most"}
    seen = {"x": [min(each.largest, 1.06 * full) for each in losses], "width": 0.34, "name": "largest loss seen"}
    texts = [f"{number(each.largest, 3)} of {number(each.claim)}" for each in losses]
    beside = {"type": "scatter", "mode": "text", "x": [1.6 * full] * len(losses), "text": texts, "showlegend": False}
    bars_and_words = [
        {**common, **claims, "marker": {"color": GRID}},
        {**common, **seen, "marker": {"color": colours}},
        {
            "y": titles,
            **beside,
            "textposition": "middle left",
            "hoverinfo": "skip",
            "textfont": {"size": 12, "color": FAINT},
        },
    ]
    layout = {
        "height": 110 + 34 * len(losses),
        "barmode": "overlay",
        "margin": {"l": 90, "r": 24, "t": 12, "b": 44},
        "xaxis": axis("privacy loss", range=[0, 1.6 * full], showticklabels=bool(values)),
        "yaxis": axis("", autorange="reversed", showgrid=False),
    }
    return Figure("learners", "Learner by learner", bars_and_words if losses else (), layout)
