"""The audit's figures of noise, of what a swap does, and of all learners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from sottovoce_client.auditing.plots import WORLDS
from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.marks import (
    BLUE,
    FAINT,
    INK,
    RED,
    RULE,
    Axis,
    Mark,
    View,
    band,
    bars,
    dots,
    line,
    rounds_across,
    rule,
    thinned,
    upright,
)
from sottovoce_client.reports.page import Column, PageTable
from sottovoce_client.wording import number, share
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.audit import Audit, LearnerLoss
from sottovoce_core.auditing.worlds import Twins

_ZOOMED = 8
"""Rounds after the swap that the close view shows."""


# ---- noise -----------------------------------------------------------------------------------------------------------


def noise_plot(noise: FloatArray) -> Figure:
    """Standardised noise against the standard Laplace density, and where 95 of 100 correct bars lie; nothing without noise."""
    title = "Its density"
    if not noise.any():
        return Figure("noise", title, (), ())
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
    marks = [
        band(centres, low, high, INK, "19 of 20 lie here"),
        rule(centres, chances / width, "Laplace, as claimed", dash="solid"),
        dots(centres, heights, "found in the messages", BLUE),
    ]
    up = Axis("density", log=True, low=least, high=max(0.9, float(np.nanmax(heights))))
    return Figure("noise", title, marks, (View("", Axis("noise, in units of its claimed scale"), up),))


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
        return Figure("quantiles", title, (), ())
    should, has = quantiles(noise)
    ends = [should[0], should[-1]]
    marks = [rule(ends, ends, "as claimed", dash="solid"), dots(should, has, "found in the messages", BLUE)]
    return Figure(
        "quantiles", title, marks, (View("", Axis("quantile that is claimed"), Axis("quantile that was found")),)
    )


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
    marks: list[Mark] = []
    if len(rounds) and rounds[0] <= pair.swapped <= rounds[-1]:
        marks.append(upright(pair.swapped, "swapped record learned", FAINT, "dot"))
    marks += [
        line(rounds, values[rounds], said, colour, width=thin * width, dash=dash)
        for said, values, colour, dash, width in curves
    ]
    zero = rule(rounds[[0, -1]], [0, 0], "", RULE, "solid", width=1.0) if len(rounds) else None
    return Figure(
        name, title, [*([zero] if zero else []), *marks], (View("", rounds_across(), Axis("number that is said")),)
    )


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
        return Figure("said", title, (), ())
    return worlds_plot("said", title, done.seen[:, place[0], place[1]], done.worlds, "number that is said")


def worlds_plot(name: str, title: str, values: FloatArray, worlds: IntArray, axis: str) -> Figure:
    """One number of every run, a histogram for each world."""
    known = np.isfinite(values)
    low, high = np.quantile(values[known], [0.002, 0.998]) if known.any() else (0.0, 1.0)
    if not low < high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    edges = np.linspace(low, high, 50 if len(values) > 400 else 26)
    marks = []
    for world, (which, colour) in enumerate(WORLDS):
        mine = values[known & (worlds == world)]
        shares = np.histogram(mine, edges)[0] / max(1, len(mine))
        marks.append(bars(edges, shares, which, colour))
    view = View("", Axis(axis), Axis("share of runs", form="share", zero=True))
    return Figure(name, title, marks, (view,))


# ---- learners --------------------------------------------------------------------------------------------------------


def learners_table(losses: Sequence[LearnerLoss], names: Sequence[str], audited: int) -> PageTable:
    """The largest loss that was seen of every learner, against its claim."""
    rows = [
        (
            f"{names[each.learner]}, audited" if each.learner == audited else names[each.learner],
            each.swap,
            each.largest,
            each.claim,
            each.largest / each.claim if 0 < each.claim < math.inf else math.nan,
        )
        for each in losses
    ]
    above = [k for k, each in enumerate(losses) if each.largest > each.claim * (1 + 1e-9) + 1e-9]
    columns = (
        Column("learner"),
        Column("swap that shows most", kind="long"),
        Column("its largest loss", partial(number, digits=3)),
        Column("claimed at most", number),
        Column("so much of the claim", share, kind="bar"),
    )
    return PageTable("learners", "Learner by learner", columns, rows, frozenset((row, 2) for row in above))
