"""The audit's figures of losses and guesses. Rounds are counted from 0, as in the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.marks import (
    AREA,
    BLUE,
    FAINT,
    GREEN,
    INK,
    PINK,
    RED,
    Axis,
    Mark,
    View,
    band,
    bars,
    diamond,
    dots,
    line,
    positive,
    rounds_across,
    rule,
    switched,
    thinned,
    upright,
)
from sottovoce_client.wording import number
from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import Bound, epsilon_lower_bound
from sottovoce_core.auditing.likelihood import Ratios, RoundBounds
from sottovoce_core.auditing.online.canaries import EpsilonBound

WORLDS = (("first world", BLUE), ("second world", RED))
SHOWN_CLAIM = 1.6
"""Of what so many runs can show at best: a larger claim lies above the picture."""


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
    chances = np.exp(-np.logaddexp(0.0, -totals))
    first, _ = np.histogram(totals, edges, weights=chances)
    both, _ = np.histogram(totals, edges)
    return first, both - first


def loss_plot(shown: Ratios, claim: float, paper: float) -> Figure:
    """Losses of all runs in both worlds, between plus and minus the claim; nothing where every finite loss is zero."""
    title, known = "How much every run gives away", possible(shown)
    totals, worlds = shown.total[known], shown.worlds[known]
    reach = float(np.abs(totals).max(initial=0.0))
    if reach == 0.0:
        return Figure("losses", title, (), ())
    edges = np.linspace(-1.0001, 1.0001, 50 if len(totals) > 400 else 26) * reach
    marks = []
    for world, (name, colour) in enumerate(WORLDS):
        counts, _ = np.histogram(totals[worlds == world], edges)
        marks.append(bars(edges, counts, name, colour))
    for (name, colour), heights in zip(WORLDS, expected(totals, edges), strict=True):
        marks.append(
            line((edges[1:] + edges[:-1]) / 2, heights, f"{name}, as claimed", colour, step="middle", width=1.6)
        )
    for name, value, colour, dash in (("± claim", claim, INK, "solid"), ("± the paper’s", paper, FAINT, "dot")):
        if 0.0 < value < math.inf:
            marks += [upright(value, name, colour, dash), upright(-value, "", colour, dash)]
    return Figure("losses", title, marks, _near_and_far(reach, claim))


def _near_and_far(reach: float, claim: float) -> tuple[View, ...]:
    """As far across as the losses go, or as the claim, and both where they are far apart."""
    near, far = 1.1 * reach, 1.15 * max(reach, claim if math.isfinite(claim) else 0.0)
    wide, close = (
        View(name, Axis("privacy loss of a run", low=-end, high=end), Axis("runs", zero=True))
        for name, end in (("± claim", far), ("closer", near))
    )
    return (close, wide) if far > 2.5 * near else (wide, close) if far > 1.3 * near else (wide,)


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


def roc_plot(shown: Ratios, claim: float, bound: float) -> Figure:
    """How well the loss tells the worlds apart, and how well the claim allows it to."""
    least = 0.5 / max(1, len(shown.worlds))
    across = np.concatenate(
        [np.geomspace(least / 10, 0.02, 40), np.linspace(0.025, 0.975, 77), 1 - np.geomspace(0.02, 1e-6, 20)]
    )
    marks: list[Mark] = []
    if math.isfinite(claim):
        lower = np.maximum(1.0 - allowed(claim, 1.0 - across), least / 10)
        marks.append(band(across, lower, allowed(claim, across), AREA, f"allowed by ε = {number(claim)}", 1.2))
    if bound > 0.0:
        marks.append(rule(across, allowed(bound, across), f"edge of ε = {number(bound, 3)}", GREEN))
    marks.append(rule(across, across, "blind guessing", FAINT, "dot"))
    false, true = roc(shown)
    kept = thinned(len(false))
    marks.append(line(false[kept], true[kept], "guessing by the loss", BLUE))
    views = [
        View(name, *(Axis(f"{what} positive rate", log=log, low=low, high=high) for what in ("false", "true")))
        for name, log, low, high in (("linear", False, 0.0, 1.02), ("logarithmic", True, least, 1.12))
    ]
    return Figure("roc", "How well the worlds can be told apart", marks, views)


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


def progress_plot(shown: Ratios, guessed: Bound, claim: float) -> Figure:
    """The lower bound as runs come in; nothing where no run was guessed."""
    title = "What more runs add"
    if not guessed.guesses:
        return Figure("progress", title, (), ())
    at, lower, best = progress(shown, guessed)
    runs = len(shown.total)
    marks = [
        rule(at, best, "at best", PINK, "dot"),
        line(at, lower, "valid at every look", GREEN, step="after", width=2.2),
        diamond(runs, guessed.value, "all runs, looked at once", GREEN),
    ]
    if claim <= SHOWN_CLAIM * float(best[-1]):
        marks.append(rule([1, runs], [claim, claim], "claim"))
    across = Axis("runs of both worlds so far", log=True, form="count")
    return Figure("progress", title, marks, (View("", across, Axis("lower bound on ε", zero=True)),))


# ---- rounds ----------------------------------------------------------------------------------------------------------


def _by_round(name: str, title: str, what: str, marks: Sequence[Mark]) -> Figure:
    """Marks over rounds, logarithmic where they are decades apart; nothing where nothing finite is above zero."""
    known = [each for each in marks if np.isfinite(each.y).any()]
    if not known:
        return Figure(name, title, (), ())
    drawn = np.concatenate([each.y[np.isfinite(each.y)] for each in known])
    views = switched(rounds_across(low=0.0), what, logarithmic=bool(drawn.max() > 30 * drawn.min()))
    return Figure(name, title, known, views)


def cumulative_plot(shown: Ratios, claim: FloatArray) -> Figure:
    """What the rounds so far are claimed to show at most, and what they did show."""
    kept = thinned(len(claim))
    curves = (("largest loss of any run", shown.peak, RED), ("mean loss of all runs", shown.typical, BLUE))
    marks = [
        _claimed(kept, claim),
        *(line(kept, positive(y[kept]), name, colour, width=2.2) for name, y, colour in curves),
    ]
    return _by_round("cumulative", "All rounds so far", "privacy loss so far", marks)


def _claimed(kept: IntArray, claim: FloatArray) -> Mark:
    return rule(kept, positive(claim[kept]), "claimed at most", width=1.8)


def single_plot(rounds: RoundBounds | None) -> Figure:
    """Every message on its own: the claim, the largest loss and the lower bound; nothing where they are not known."""
    name, title, what = "single", "Every message on its own", "privacy loss of the round"
    if rounds is None:
        return Figure(name, title, (), ())
    claim, bound = (np.array([getattr(each, key) for each in rounds.bounds]) for key in ("claim", "value"))
    kept = thinned(len(claim))
    lower, above = positive(bound[kept]), bound[kept] > claim[kept]
    marks = [
        _claimed(kept, claim),
        line(kept, positive(rounds.largest[kept]), "largest loss of any message", BLUE, width=1.2),
        dots(kept, np.where(above, math.nan, lower), "lower bound", GREEN, width=6),
        dots(kept, np.where(above, lower, math.nan), "lower bound above the claim", RED, shape="cross"),
    ]
    return _by_round(name, title, what, marks)
