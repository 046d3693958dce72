"""The audit's plots of losses and guesses, as HTML that draws itself with plotly.js.

Rounds are counted from 0, as in the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.audit.bounds import Bound, epsilon_lower_bound
from sottovoce.audit.likelihood import Ratios
from sottovoce.audit.rounds import RoundBounds
from sottovoce.lab.watch.sequential import EpsilonBound
from sottovoce_client.reports.drawing import FAINT, INK, LEGEND, Trace, axis, buttons, draw, finite, thinned
from sottovoce_client.wording import number

WORLDS = (("first world", "#0072B2"), ("second world", "#D55E00"))
CLAIM, PAPER, BOUND, BEST = INK, "#6b7785", "#009E73", "#CC79A7"
AREA, BAR = "rgba(154,165,177,0.16)", "#dfe5ea"
BELOW = {**LEGEND, "y": -0.2, "yanchor": "top"}
SHOWN_CLAIM = 1.6
"""Of what so many runs can show at best: a larger claim lies above the picture."""


def line(x: Sequence[float] | FloatArray | IntArray, y: FloatArray, name: str, colour: str, **more: object) -> Trace:
    """A line, or a point where there is but one."""
    style = {"color": colour, "width": 2.0, **({"dash": more.pop("dash")} if "dash" in more else {})}
    places = {"x": finite(np.asarray(x, dtype=float)), "y": finite(y)}
    mode = {"mode": "lines" if len(places["x"]) > 1 else "markers"}
    return {"type": "scatter", **mode, **places, "name": name, "line": style, "hovertemplate": "%{y:.4~g}", **more}


def round_axis(rounds: int, **more: object) -> Trace:
    """An axis of so many rounds: no fractions of a round where there are few."""
    return axis("round", tickformat=",", **({"dtick": 1} if rounds <= 12 else {}), **more)


def upright(at: float, name: str, colour: str, dash: str) -> tuple[Trace, Trace]:
    """A vertical line through the whole plot, and its name; neither is seen where the axis does not reach."""
    place = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at}
    shape = {"type": "line", **place, "line": {"color": colour, "width": 1.5, "dash": dash}}
    side = {"x": at, "y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "showarrow": False}
    return shape, {**side, "text": name, "font": {"size": 11, "color": colour}}


# ---- losses of whole runs --------------------------------------------------------------------------------------------


def possible(shown: Ratios) -> BoolArray:
    """`(runs,)` whose every message could have been said in both worlds."""
    known: BoolArray = np.isfinite(shown.largest)
    return known


def expected(totals: FloatArray, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """How many runs of either world each bin should hold, given the losses of all runs.

    A fair coin chose the world, so a run of loss L lives in the first one with chance `1 / (1 + e^-L)`, if densities are as
    claimed.
    """
    chances = 1.0 / (1.0 + np.exp(-totals))
    first, _ = np.histogram(totals, edges, weights=chances)
    both, _ = np.histogram(totals, edges)
    return first, both - first


def loss_plot(shown: Ratios, claim: float, paper: float) -> str:
    """Losses of all runs in both worlds, between plus and minus the claim; empty where every finite loss is zero."""
    known = possible(shown)
    totals, worlds = shown.total[known], shown.worlds[known]
    reach = float(np.abs(totals).max(initial=0.0))
    if reach == 0.0:
        return ""
    edges = np.linspace(-1.0001, 1.0001, 50 if len(totals) > 400 else 26) * reach
    centres = (edges[1:] + edges[:-1]) / 2
    traces: list[Trace] = []
    for world, (name, colour) in enumerate(WORLDS):
        counts, _ = np.histogram(totals[worlds == world], edges)
        bar = {"type": "bar", "x": finite(centres), "y": counts.tolist(), "width": edges[1] - edges[0], "name": name}
        traces.append({**bar, "marker": {"color": colour, "opacity": 0.45}, "hovertemplate": "%{y:,} runs"})
    for (name, colour), counts in zip(WORLDS, expected(totals, edges), strict=True):
        smooth = {"shape": "hvh", "color": colour, "width": 1.6}
        traces.append(
            line(centres, counts, f"{name}, as claimed", colour) | {"line": smooth, "hovertemplate": "%{y:.1f}"}
        )
    marks = [("claim", claim, CLAIM, "solid"), ("paper", paper, PAPER, "dot")]
    drawn = [
        upright(sign * value, f"{'−' if sign < 0 else ''}{name}", colour, dash)
        for name, value, colour, dash in marks
        if 0.0 < value < math.inf
        for sign in (-1, 1)
    ]
    near, far = 1.1 * reach, 1.15 * max(reach, claim if math.isfinite(claim) else 0.0)
    views = (("± claim", {"xaxis.range": [-far, far]}), ("closer", {"xaxis.range": [-near, near]}))
    close = far > 2.5 * near
    return draw(
        "plot-losses",
        traces,
        400,
        barmode="overlay",
        bargap=0,
        hovermode="x",
        margin={"l": 56, "r": 24, "t": 52, "b": 48},
        xaxis=axis(
            "privacy loss of a run", range=[-near, near] if close else [-far, far], zeroline=True, zerolinecolor=BAR
        ),
        yaxis=axis("runs", tickformat=",", rangemode="tozero"),
        legend=BELOW,
        shapes=[shape for shape, _ in drawn],
        annotations=[text for _, text in drawn],
        updatemenus=_above(buttons(*views, active=int(close))) if far > 1.3 * near else [],
    )


def _above(menu: list[Trace]) -> list[Trace]:
    """Clear of what is written along the upper edge."""
    return [{**each, "y": 1.07} for each in menu]


# ---- guessing --------------------------------------------------------------------------------------------------------


def roc(shown: Ratios) -> tuple[FloatArray, FloatArray]:
    """False and true positive rates of guessing the first world where the loss is at least c, for every c that matters."""
    order = np.argsort(-shown.total, kind="stable")
    ordered, first = shown.total[order], shown.worlds[order] == 0
    last = np.append(ordered[1:] != ordered[:-1], True)  # equal losses are guessed together
    rates = [np.cumsum(mine)[last] / max(1, int(mine.sum())) for mine in (~first, first)]
    false, true = (np.concatenate([np.zeros(1), each]) for each in rates)
    return false, true


def allowed(epsilon: float, false: FloatArray) -> FloatArray:
    """The largest true positive rate that epsilon allows: `min(e^eps FPR, 1 - e^-eps (1 - FPR))`."""
    most: FloatArray = np.minimum(np.exp(min(epsilon, 700.0)) * false, 1.0 - np.exp(-epsilon) * (1.0 - false))
    return most


def roc_plot(shown: Ratios, claim: float, bound: float) -> str:
    """How well the loss tells the worlds apart, and how well the claim allows it to."""
    least = 0.5 / max(1, len(shown.worlds))
    across = np.concatenate(
        [np.geomspace(least / 10, 0.02, 40), np.linspace(0.025, 0.975, 77), 1 - np.geomspace(0.02, 1e-6, 20)]
    )
    traces: list[Trace] = []
    if math.isfinite(claim):
        edge = {"hoverinfo": "skip", "line": {"color": "#9aa5b1", "width": 1.2}}
        lower = np.maximum(1.0 - allowed(claim, 1.0 - across), least / 10)
        traces.append(line(across, lower, "", CLAIM) | edge | {"showlegend": False})
        upper = {"fill": "tonexty", "fillcolor": AREA}
        traces.append(line(across, allowed(claim, across), f"allowed by ε = {number(claim)}", CLAIM) | edge | upper)
    if bound > 0.0:
        traces.append(
            line(
                across, allowed(bound, across), f"edge of ε = {number(bound, 3)}", BOUND, dash="dash", hoverinfo="skip"
            )
        )
    traces.append(line(across, across, "blind guessing", FAINT, dash="dot", hoverinfo="skip"))
    false, true = roc(shown)
    kept = thinned(len(false))
    hover = "true %{y:.3f}, false %{x:.3f}<extra></extra>"
    traces.append(line(false[kept], true[kept], "guessing by the loss", WORLDS[0][1], hovertemplate=hover))
    decades = [math.log10(least), 0.05]
    logarithmic = {f"{each}axis.{key}": value for each in "xy" for key, value in (("type", "log"), ("range", decades))}
    linear = {f"{each}axis.{key}": value for each in "xy" for key, value in (("type", "linear"), ("range", [0, 1.02]))}
    return draw(
        "plot-roc",
        traces,
        400,
        margin={"l": 56, "r": 24, "t": 52, "b": 48},
        xaxis=axis("false positive rate", range=[0, 1.02]),
        yaxis=axis("true positive rate", range=[0, 1.02]),
        legend=BELOW,
        updatemenus=buttons(("linear", linear), ("logarithmic", logarithmic)),
    )


def progress(shown: Ratios, guessed: Bound, looks: int = 120) -> tuple[IntArray, FloatArray, FloatArray]:
    """Bounds as runs come in, in a fixed random order, for they are made world by world.

    Returns:
        `(looks,)` runs so far, the bound that holds at all looks together, and that if all guesses so far were right.
    """
    order = np.random.default_rng(0).permutation(len(shown.total))
    totals, worlds = shown.total[order], shown.worlds[order]
    made = (np.abs(totals) > 0) & (np.abs(totals) >= guessed.threshold)
    right = ((totals < 0) == (worlds == 1)).astype(np.float64)
    at = np.unique(np.geomspace(1, len(order), looks).astype(np.int64))
    best = np.array([epsilon_lower_bound(int(n), int(n), guessed.level) for n in at])
    process = EpsilonBound(np.linspace(0.0, 1.05 * float(best[-1]) + 1e-3, 500))
    lower, done = [], 0
    for n in at.tolist():
        for start in range(done, n, 4096):  # what a bet holds in memory grows with the guesses
            piece = slice(start, min(start + 4096, n))
            process.add(right[piece][made[piece]])
        lower.append(process.lower(guessed.level))
        done = n
    return at, np.array(lower), best


def progress_plot(shown: Ratios, guessed: Bound, claim: float) -> str:
    """The lower bound as runs come in."""
    at, lower, best = progress(shown, guessed)
    traces = [
        line(at, best, "at best", BEST, dash="dot"),
        line(at, lower, "valid at every look", BOUND) | {"line": {"color": BOUND, "width": 2.2, "shape": "hv"}},
    ]
    marker = {"size": 11, "symbol": "diamond", "color": BOUND, "line": {"color": "white", "width": 1.5}}
    point = {"x": [len(shown.total)], "y": [guessed.value], "mode": "markers", "marker": marker, "cliponaxis": False}
    traces.append({"type": "scatter", **point, "name": "all runs, looked at once", "hovertemplate": "%{y:.4~g}"})
    if claim <= SHOWN_CLAIM * float(best[-1]):
        ends = np.array([1.0, float(len(shown.total))])
        traces.append(line(ends, np.full(2, claim), "claim", CLAIM, dash="dash"))
    return draw(
        "plot-progress",
        traces,
        380,
        hovermode="x unified",
        margin={"l": 56, "r": 24, "t": 16, "b": 48},
        xaxis=axis("runs of both worlds so far", type="log", dtick=1, tickformat=","),
        yaxis=axis("lower bound on ε", rangemode="tozero"),
        legend=BELOW,
    )


# ---- rounds ----------------------------------------------------------------------------------------------------------


def _by_round(name: str, curves: Sequence[tuple[str, FloatArray, Trace]], what: str) -> str:
    """Lines over rounds, logarithmic where they are decades apart; empty where nothing finite is above zero."""
    known = [(title, np.where(values > 0, values, math.nan), look) for title, values, look in curves]
    known = [each for each in known if np.isfinite(each[1]).any()]
    if not known:
        return ""
    drawn = np.concatenate([values[np.isfinite(values)] for _, values, _ in known])
    logarithmic = bool(drawn.max() > 30 * drawn.min())
    traces = []
    for title, values, look in known:
        kept = thinned(len(values))
        traces.append({**line(kept, values[kept], title, INK), "connectgaps": False, **look})
    views = (
        ("logarithmic", {"yaxis.type": "log", "yaxis.dtick": 1}),
        ("linear", {"yaxis.type": "linear", "yaxis.dtick": None}),
    )
    return draw(
        name,
        traces,
        380,
        hovermode="x unified",
        showlegend=True,
        margin={"l": 56, "r": 24, "t": 46, "b": 48},
        xaxis=round_axis(len(known[0][1]), rangemode="tozero"),
        yaxis=axis(what, type="log", dtick=1, exponentformat="power")
        if logarithmic
        else axis(what, rangemode="tozero"),
        legend=BELOW,
        updatemenus=buttons(*views, active=int(not logarithmic)),
    )


def cumulative_plot(shown: Ratios, claim: FloatArray) -> str:
    """What the rounds so far are claimed to show at most, and what they did show."""
    colour = WORLDS[0][1]
    return _by_round(
        "plot-cumulative",
        (
            ("claimed at most", claim, {"line": {"color": CLAIM, "width": 1.8, "dash": "dash"}}),
            ("largest loss of any run", shown.peak, {"line": {"color": WORLDS[1][1], "width": 2.2}}),
            ("mean loss of all runs", shown.typical, {"line": {"color": colour, "width": 2.2}}),
        ),
        "privacy loss so far",
    )


def single_plot(rounds: RoundBounds) -> str:
    """Every message on its own: the claim, the largest loss and the lower bound."""
    dots = {"mode": "markers", "marker": {"size": 7, "color": BOUND}}
    over = {**dots, "marker": {"size": 9, "symbol": "x", "color": WORLDS[1][1]}}
    claim, bound = (np.array([getattr(each, key) for each in rounds.bounds]) for key in ("claim", "value"))
    above = bound > claim
    return _by_round(
        "plot-single",
        (
            ("claimed at most", claim, {"line": {"color": CLAIM, "width": 1.8, "dash": "dash"}}),
            ("largest loss of any message", rounds.largest, {"line": {"color": WORLDS[0][1], "width": 1.2}}),
            ("lower bound", np.where(above, math.nan, bound), dots),
            ("lower bound above the claim", np.where(above, bound, math.nan), over),
        ),
        "privacy loss of the round",
    )
