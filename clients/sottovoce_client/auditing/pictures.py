"""The audit's plots of noise, of what a swap does, and of all learners, as HTML that draws itself with plotly.js."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.audit.audit import Audit, LearnerLoss
from sottovoce.audit.twins import Twins
from sottovoce_client.auditing.plots import BAR, BELOW, CLAIM, WORLDS, line, round_axis, upright
from sottovoce_client.reports.drawing import FAINT, Trace, axis, draw, finite, label, thinned
from sottovoce_client.wording import number

ZOOMED = 8
"""Rounds after the swap that the close view shows."""


# ---- noise -----------------------------------------------------------------------------------------------------------


def noise_plot(noise: FloatArray) -> str:
    """Standardised noise against the standard Laplace density, and where 95 of 100 correct bars lie."""
    reach = max(6.0, math.log(len(noise)) + 1.0)
    edges = np.linspace(-reach, reach, 81 if len(noise) > 2000 else 31)
    width = float(edges[1] - edges[0])
    counts, _ = np.histogram(noise, edges)
    centres = (edges[1:] + edges[:-1]) / 2
    chances = np.diff(np.where(edges < 0, 0.5 * np.exp(edges), 1.0 - 0.5 * np.exp(-np.abs(edges))))
    spread = 1.96 * np.sqrt(chances * (1.0 - chances) / len(noise))
    least = 0.3 / len(noise) / width
    low, high = np.maximum((chances - spread) / width, least), (chances + spread) / width
    edge = {"hoverinfo": "skip", "line": {"width": 0}}
    bars = np.where(counts > 0, counts / len(noise) / width, math.nan)
    dots = {"mode": "markers", "marker": {"size": 5.5, "color": WORLDS[0][1]}, "hovertemplate": "%{x:.2f}: %{y:.3~g}"}
    traces = [
        line(centres, low, "", CLAIM) | edge | {"showlegend": False},
        line(centres, high, "19 of 20 lie here", CLAIM)
        | edge
        | {"fill": "tonexty", "fillcolor": "rgba(154,165,177,0.28)"},
        line(centres, chances / width, "Laplace, as claimed", CLAIM, hoverinfo="skip"),
        line(centres, bars, "found in the messages", WORLDS[0][1]) | dots,
    ]
    return draw(
        "plot-noise",
        traces,
        380,
        margin={"l": 56, "r": 24, "t": 16, "b": 48},
        xaxis=axis("noise, in units of its claimed scale"),
        yaxis=axis(
            "density",
            type="log",
            dtick=1,
            exponentformat="power",
            range=[math.log10(least), math.log10(max(0.9, np.nanmax(bars)))],
        ),
        legend=BELOW,
    )


def quantiles(noise: FloatArray, most: int = 200) -> tuple[FloatArray, FloatArray]:
    """Quantiles that Laplace numbers should have, and those that these have; the tails are not left out."""
    n = len(noise)
    ranks = thinned(n, most)
    tail = np.unique(np.geomspace(1, max(1, n), 40).astype(int)) - 1
    ranks = np.unique(np.concatenate([ranks, tail, n - 1 - tail]))
    p = (ranks + 0.5) / n
    should = np.where(p < 0.5, np.log(2 * np.minimum(p, 0.5)), -np.log(2 * np.minimum(1 - p, 0.5)))
    return should, np.sort(noise)[ranks]


def quantile_plot(noise: FloatArray) -> str:
    """Quantiles of the noise against those of Laplace numbers: a straight line if all is well."""
    should, has = quantiles(noise)
    ends = np.array([should[0], should[-1]])
    hover = "should be %{x:.2f}, is %{y:.2f}<extra></extra>"
    dots = {"mode": "markers", "marker": {"size": 5.5, "color": WORLDS[0][1]}, "hovertemplate": hover}
    traces = [
        line(ends, ends, "as claimed", CLAIM, hoverinfo="skip"),
        line(should, has, "found in the messages", WORLDS[0][1]) | dots,
    ]
    return draw(
        "plot-quantiles",
        traces,
        380,
        margin={"l": 56, "r": 24, "t": 16, "b": 48},
        xaxis=axis("quantile that is claimed"),
        yaxis=axis("quantile that was found"),
        legend=BELOW,
    )


# ---- the swap --------------------------------------------------------------------------------------------------------


def twins_plot(name: str, pair: Twins, rounds: IntArray) -> str:
    """One number of the messages in both worlds, with the same noise and without any, over these rounds."""
    curves = (
        ("first world", pair.first, WORLDS[0][1], None),
        ("second world, same noise", pair.second, WORLDS[1][1], None),
        ("first world, no noise", pair.bare_first, WORLDS[0][1], "dot"),
        ("second world, no noise", pair.bare_second, WORLDS[1][1], "dot"),
    )
    few = len(rounds) <= 40
    traces = []
    for k, (title, values, colour, dash) in enumerate(curves):
        look: Trace = {
            "color": colour,
            "width": (1.8 if k % 2 else 3.2) * (1.0 if len(rounds) <= 100 else 0.6),
        }  # the second must not hide the first
        marks = {"mode": "lines+markers", "marker": {"size": 4 if k % 2 else 7}} if few else {}
        traces.append(
            line(rounds, values[rounds], title, colour) | {"line": {**look, "dash": dash} if dash else look} | marks
        )
    swapped, text = upright(pair.swapped, "swapped record learned", FAINT, "dot")
    inside = bool(len(rounds)) and rounds[0] <= pair.swapped <= rounds[-1]
    return draw(
        name,
        traces,
        380,
        hovermode="x unified",
        margin={"l": 56, "r": 24, "t": 30, "b": 48},
        xaxis=round_axis(len(rounds)),
        yaxis=axis("number that is said", zeroline=True, zerolinecolor=BAR),
        legend=BELOW,
        shapes=[swapped] if inside else [],
        annotations=[{**text, "xanchor": "left"}] if inside else [],
    )


def close_rounds(pair: Twins) -> IntArray:
    """The rounds around those that the swap moves first and most."""
    length = len(pair.first)
    moved = moving(pair)
    start = min(pair.swapped, int(moved[0]) if len(moved) else pair.swapped)
    end = max(start, int(moved[0]) if len(moved) else start) + ZOOMED
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


def said_plot(done: Audit, round_seen: int, coordinate: int) -> str:
    """One number of one round's message over all runs, in both worlds."""
    values = done.seen[:, round_seen, coordinate]
    known = np.isfinite(values)
    low, high = np.quantile(values[known], [0.002, 0.998]) if known.any() else (0.0, 1.0)
    if not low < high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    edges = np.linspace(low, high, 50 if len(values) > 400 else 26)
    traces = []
    for world, (name, colour) in enumerate(WORLDS):
        mine = values[known & (done.worlds == world)]
        shares = np.histogram(mine, edges)[0] / max(1, len(mine))
        bar = {
            "type": "bar",
            "x": finite((edges[1:] + edges[:-1]) / 2),
            "y": finite(shares),
            "width": edges[1] - edges[0],
        }
        look = {"marker": {"color": colour, "opacity": 0.5}, "name": name, "hovertemplate": "%{y:.1%}"}
        traces.append({**bar, **look})
    return draw(
        "plot-said",
        traces,
        380,
        barmode="overlay",
        bargap=0,
        hovermode="x",
        margin={"l": 56, "r": 24, "t": 30, "b": 48},
        xaxis=axis("number that is said"),
        yaxis=axis("share of runs", tickformat=".0%", rangemode="tozero"),
        legend=BELOW,
    )


# ---- learners --------------------------------------------------------------------------------------------------------


def learners_plot(losses: Sequence[LearnerLoss], names: Sequence[str], audited: int) -> str:
    """The claim of every learner as a grey bar, and in it the largest loss that was seen."""
    values = [v for each in losses for v in (each.claim, each.largest) if math.isfinite(v)]
    full = max(values, default=0.0) or 1.0
    titles = [label(names[each.learner]) for each in losses]
    titles = [f"<b>{t}</b>" if each.learner == audited else t for t, each in zip(titles, losses, strict=True)]
    colours = [WORLDS[int(each.largest > each.claim * (1 + 1e-9) + 1e-9)][1] for each in losses]
    common = {"type": "bar", "orientation": "h", "y": titles, "hoverinfo": "skip"}
    claims = {"x": [min(each.claim, 1.06 * full) for each in losses], "width": 0.72, "name": "claimed at most"}
    seen = {"x": [min(each.largest, 1.06 * full) for each in losses], "width": 0.34, "name": "largest loss seen"}
    texts = [f"{number(each.largest, 3)} of {number(each.claim)}" for each in losses]
    words = {"x": [1.6 * full] * len(losses), "y": titles, "text": texts, "mode": "text", "textposition": "middle left"}
    quiet = {"showlegend": False, "hoverinfo": "skip", "textfont": {"size": 12, "color": FAINT}}
    return draw(
        "plot-learners",
        [
            {**common, **claims, "marker": {"color": BAR}},
            {**common, **seen, "marker": {"color": colours}},
            {"type": "scatter", **words, **quiet},
        ],
        110 + 34 * len(losses),
        barmode="overlay",
        margin={"l": 90, "r": 24, "t": 34, "b": 44},
        xaxis=axis("privacy loss", range=[0, 1.6 * full], showticklabels=bool(values)),
        yaxis=axis("", autorange="reversed", showgrid=False),
    )
