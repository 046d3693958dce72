"""Figures of an audit: losses, guesses and rounds; noise, and the effect of one record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sottovoce_client.formatting import format_number
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.plot_elements import (
    AREA,
    BLUE,
    FAINT,
    GREEN,
    INK,
    PINK,
    RED,
    RULE,
    Axis,
    PlotMark,
    PlotView,
    make_band,
    make_bars,
    make_diamond,
    make_dots,
    make_line,
    make_reference_line,
    make_round_axis,
    make_scale_views,
    make_vertical_line,
    mask_nonpositive,
    select_evenly,
)
from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.audit import Audit
from sottovoce_core.auditing.bounds import Bound, compute_epsilon_lower_bound
from sottovoce_core.auditing.likelihood import RoundBounds, RunLosses
from sottovoce_core.auditing.online.canaries import EpsilonBound
from sottovoce_core.auditing.worlds import CoupledRuns

WORLD_STYLES = (("first world", BLUE), ("second world", RED))
MAX_SHOWN_CLAIM_FACTOR = 1.6
"""Maximum shown claim, as a multiple of the largest provable bound; a larger one is above the figure."""

_CLOSE_ROUNDS = 8
"""Rounds after the differing record in the close view."""


# ---- losses of whole runs --------------------------------------------------------------------------------------------


def mask_possible_runs(shown: RunLosses) -> BoolArray:
    """Return a mask, `(runs,)`, of the runs whose every message is possible in both worlds."""
    possible: BoolArray = np.isfinite(shown.largest_losses)
    return possible


def _compute_expected_counts(totals: FloatArray, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute the expected number of runs of each world in every bin, given the losses of all runs.

    A fair coin chose the world, so a run of loss L is of the first one with probability `1 / (1 + e^-L)`, if densities are as
    claimed.
    """
    chances = np.exp(-np.logaddexp(0.0, -totals))
    first, _ = np.histogram(totals, edges, weights=chances)
    both, _ = np.histogram(totals, edges)
    return first, both - first


def _plot_losses(shown: RunLosses, claim: float, paper: float) -> Figure:
    """Plot the losses of all runs in both worlds, and the claim; empty if every finite loss is zero."""
    title, known = "Privacy loss of every run", mask_possible_runs(shown)
    totals, worlds = shown.total[known], shown.worlds[known]
    reach = float(np.abs(totals).max(initial=0.0))
    if reach == 0.0:
        return Figure("losses", title, (), ())
    edges = np.linspace(-1.0001, 1.0001, 50 if len(totals) > 400 else 26) * reach
    marks = []
    for world, (name, colour) in enumerate(WORLD_STYLES):
        counts, _ = np.histogram(totals[worlds == world], edges)
        marks.append(make_bars(edges, counts, name, colour))
    for (name, colour), heights in zip(WORLD_STYLES, _compute_expected_counts(totals, edges), strict=True):
        marks.append(
            make_line((edges[1:] + edges[:-1]) / 2, heights, f"{name}, as claimed", colour, step="middle", width=1.6)
        )
    for name, value, colour, dash in (("± claim", claim, INK, "solid"), ("± the paper’s", paper, FAINT, "dot")):
        if 0.0 < value < math.inf:
            marks += [make_vertical_line(value, name, colour, dash), make_vertical_line(-value, "", colour, dash)]
    return Figure("losses", title, marks, _make_loss_views(reach, claim))


def _make_loss_views(reach: float, claim: float) -> tuple[PlotView, ...]:
    """Make views up to the largest loss and up to the claim; both if they are far apart."""
    near, far = 1.1 * reach, 1.15 * max(reach, claim if math.isfinite(claim) else 0.0)
    wide, close = (
        PlotView(name, Axis("privacy loss of a run", low=-end, high=end), Axis("runs", zero=True))
        for name, end in (("± claim", far), ("closer", near))
    )
    return (close, wide) if far > 2.5 * near else (wide, close) if far > 1.3 * near else (wide,)


# ---- guessing --------------------------------------------------------------------------------------------------------


def _compute_roc(shown: RunLosses) -> tuple[FloatArray, FloatArray]:
    """Compute false and true positive rates of guessing the first world if the loss is at least c, for all thresholds c."""
    order = np.argsort(-shown.total, kind="stable")
    ordered, first = shown.total[order], shown.worlds[order] == 0
    last = np.append(ordered[1:] != ordered[:-1], True)  # equal losses are guessed together
    rates = [np.cumsum(mine)[last] / max(1, int(mine.sum())) for mine in (~first, first)]
    false, true = (np.concatenate([np.zeros(1), each]) for each in rates)
    return false, true


def _compute_allowed_rates(epsilon: float, false: FloatArray) -> FloatArray:
    """Compute the largest true positive rates that epsilon allows: `min(e^eps FPR, 1 - e^-eps (1 - FPR))`."""
    allowed: FloatArray = np.minimum(np.exp(min(epsilon, 700.0)) * false, 1.0 - np.exp(-epsilon) * (1.0 - false))
    return allowed


def _plot_roc(shown: RunLosses, claim: float, bound: float) -> Figure:
    """Plot the ROC of the loss, and the region that the claim allows."""
    min_rate = 0.5 / max(1, len(shown.worlds))
    across = np.concatenate(
        [np.geomspace(min_rate / 10, 0.02, 40), np.linspace(0.025, 0.975, 77), 1 - np.geomspace(0.02, 1e-6, 20)]
    )
    marks: list[PlotMark] = []
    if math.isfinite(claim):
        lower = np.maximum(1.0 - _compute_allowed_rates(claim, 1.0 - across), min_rate / 10)
        allowed = _compute_allowed_rates(claim, across)
        marks.append(make_band(across, lower, allowed, AREA, f"allowed by ε = {format_number(claim)}", 1.2))
    if bound > 0.0:
        marks.append(
            make_reference_line(
                across, _compute_allowed_rates(bound, across), f"limit of ε = {format_number(bound, 3)}", GREEN
            )
        )
    marks.append(make_reference_line(across, across, "random guessing", FAINT, "dot"))
    false, true = _compute_roc(shown)
    kept = select_evenly(len(false))
    marks.append(make_line(false[kept], true[kept], "guessing by the loss", BLUE))
    views = [
        PlotView(name, *(Axis(f"{rate} positive rate", log=log, low=low, high=high) for rate in ("false", "true")))
        for name, log, low, high in (("linear", False, 0.0, 1.02), ("logarithmic", True, min_rate, 1.12))
    ]
    return Figure("roc", "Distinguishing the worlds", marks, views)


def _compute_progress(shown: RunLosses, bound: Bound, looks: int = 120) -> tuple[IntArray, FloatArray, FloatArray]:
    """Compute bounds as runs arrive, in a fixed random order, because they are made world by world.

    Returns:
        `(looks,)` runs so far, the bound that holds at all looks together, and the bound if all guesses so far were right.
    """
    order = np.random.default_rng(0).permutation(len(shown.total))
    totals, worlds = shown.total[order], shown.worlds[order]
    made = (np.abs(totals) > 0) & (np.abs(totals) >= bound.threshold)
    right = ((totals < 0) == (worlds == 1)).astype(np.float64)
    at = np.unique(np.geomspace(1, len(order), looks).astype(np.int64))
    best = np.array([compute_epsilon_lower_bound(int(n), int(n), bound.level) for n in at])
    process = EpsilonBound(np.linspace(0.0, 1.05 * float(best[-1]) + 1e-3, 500))
    lower, done = [], 0
    for n in at.tolist():
        for start in range(done, n, 4096):  # the memory of a bet grows with the guesses
            piece = slice(start, min(start + 4096, n))
            process.add(right[piece][made[piece]])
        lower.append(process.compute_lower_bound(bound.level))
        done = n
    return at, np.array(lower), best


def _plot_progress(shown: RunLosses, bound: Bound, claim: float) -> Figure:
    """Plot the lower bound as runs arrive; empty if no run was guessed."""
    title = "Lower bound by number of runs"
    if not bound.guesses:
        return Figure("progress", title, (), ())
    at, lower, best = _compute_progress(shown, bound)
    runs = len(shown.total)
    marks = [
        make_reference_line(at, best, "at best", PINK, "dot"),
        make_line(at, lower, "valid at every look", GREEN, step="after", width=2.2),
        make_diamond(runs, bound.value, "all runs, looked at once", GREEN),
    ]
    if claim <= MAX_SHOWN_CLAIM_FACTOR * float(best[-1]):
        marks.append(make_reference_line([1, runs], [claim, claim], "claim"))
    across = Axis("runs of both worlds so far", log=True, value_format="count")
    return Figure("progress", title, marks, (PlotView("", across, Axis("lower bound on ε", zero=True)),))


# ---- rounds ----------------------------------------------------------------------------------------------------------


def _plot_by_round(name: str, title: str, y_title: str, marks: Sequence[PlotMark]) -> Figure:
    """Plot marks over rounds, logarithmic if they span decades; empty if nothing finite is above zero."""
    known = [each for each in marks if np.isfinite(each.y).any()]
    if not known:
        return Figure(name, title, (), ())
    drawn = np.concatenate([each.y[np.isfinite(each.y)] for each in known])
    views = make_scale_views(make_round_axis(low=0.0), y_title, logarithmic=bool(drawn.max() > 30 * drawn.min()))
    return Figure(name, title, known, views)


def _plot_cumulative_losses(shown: RunLosses, claim: FloatArray) -> Figure:
    """Plot the claimed and the measured losses of all rounds so far."""
    kept = select_evenly(len(claim))
    curves = (
        ("largest loss of any run", shown.peak_by_round, RED),
        ("mean loss of all runs", shown.mean_by_round, BLUE),
    )
    marks = [
        _make_claim_mark(kept, claim),
        *(make_line(kept, mask_nonpositive(y[kept]), name, colour, width=2.2) for name, y, colour in curves),
    ]
    return _plot_by_round("cumulative", "All rounds so far", "privacy loss so far", marks)


def _make_claim_mark(kept: IntArray, claim: FloatArray) -> PlotMark:
    return make_reference_line(kept, mask_nonpositive(claim[kept]), "claimed at most", width=1.8)


def _plot_single_rounds(rounds: RoundBounds | None) -> Figure:
    """Plot the claim, the largest loss and the lower bound of every message; empty if they are not known."""
    name, title, y_title = "single", "Every message on its own", "privacy loss of the round"
    if rounds is None:
        return Figure(name, title, (), ())
    claim, bound = (np.array([getattr(each, key) for each in rounds.bounds]) for key in ("claim", "value"))
    kept = select_evenly(len(claim))
    lower, above = mask_nonpositive(bound[kept]), bound[kept] > claim[kept]
    marks = [
        _make_claim_mark(kept, claim),
        make_line(kept, mask_nonpositive(rounds.largest_losses[kept]), "largest loss of any message", BLUE, width=1.2),
        make_dots(kept, np.where(above, math.nan, lower), "lower bound", GREEN, width=6),
        make_dots(kept, np.where(above, lower, math.nan), "lower bound above the claim", RED, shape="cross"),
    ]
    return _plot_by_round(name, title, y_title, marks)


# ---- noise -----------------------------------------------------------------------------------------------------------


def plot_noise(noise: FloatArray) -> Figure:
    """Plot standardised noise, the standard Laplace density, and its 95 % band; empty without noise."""
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
    min_height = 0.3 / len(noise) / width
    low, high = np.maximum((chances - error) / width, min_height), (chances + error) / width
    heights = np.where(counts > 0, counts / len(noise) / width, math.nan)
    marks = [
        make_band(centres, low, high, INK, "19 of 20 lie here"),
        make_reference_line(centres, chances / width, "Laplace, as claimed", dash="solid"),
        make_dots(centres, heights, "found in the messages", BLUE),
    ]
    up = Axis("density", log=True, low=min_height, high=max(0.9, float(np.nanmax(heights))))
    return Figure("noise", title, marks, (PlotView("", Axis("noise, in units of its claimed scale"), up),))


def _compute_quantiles(noise: FloatArray, max_points: int = 200) -> tuple[FloatArray, FloatArray]:
    """Compute expected Laplace quantiles and those of the noise, tails included."""
    n = len(noise)
    ranks = select_evenly(n, max_points)
    tail = np.unique(np.geomspace(1, max(1, n), 40).astype(int)) - 1
    ranks = np.unique(np.concatenate([ranks, tail, n - 1 - tail]))
    p = (ranks + 0.5) / n
    expected = np.where(p < 0.5, np.log(2 * np.minimum(p, 0.5)), -np.log(2 * np.minimum(1 - p, 0.5)))
    return expected, np.sort(noise)[ranks]


def plot_quantiles(noise: FloatArray) -> Figure:
    """Plot quantiles of the noise against Laplace quantiles: a straight line for correct noise."""
    title = "Its quantiles"
    if not noise.any():
        return Figure("quantiles", title, (), ())
    expected, actual = _compute_quantiles(noise)
    ends = [expected[0], expected[-1]]
    marks = [
        make_reference_line(ends, ends, "as claimed", dash="solid"),
        make_dots(expected, actual, "found in the messages", BLUE),
    ]
    return Figure("quantiles", title, marks, (PlotView("", Axis("claimed quantile"), Axis("measured quantile")),))


# ---- effect of one record --------------------------------------------------------------------------------------------


def _plot_coupled_runs(name: str, title: str, pair: CoupledRuns, rounds: IntArray) -> Figure:
    """Plot one message coordinate over rounds in both worlds, with the same noise and without noise."""
    curves = (
        ("first world", pair.message_0, BLUE, "solid", 3.2),  # wider, so that the second does not hide it
        ("second world, same noise", pair.message_1, RED, "solid", 1.8),
        ("first world, no noise", pair.noiseless_0, BLUE, "dot", 3.2),
        ("second world, no noise", pair.noiseless_1, RED, "dot", 1.8),
    )
    thin = 1.0 if len(rounds) <= 100 else 0.6
    marks: list[PlotMark] = []
    if len(rounds) and rounds[0] <= pair.first_affected_round <= rounds[-1]:
        marks.append(make_vertical_line(pair.first_affected_round, "record learned", FAINT, "dot"))
    marks += [
        make_line(rounds, values[rounds], label, colour, width=thin * width, dash=dash)
        for label, values, colour, dash, width in curves
    ]
    zero = make_reference_line(rounds[[0, -1]], [0, 0], "", RULE, "solid", width=1.0) if len(rounds) else None
    return Figure(
        name,
        title,
        [*([zero] if zero else []), *marks],
        (PlotView("", make_round_axis(), Axis("value in the message")),),
    )


def _select_close_rounds(pair: CoupledRuns) -> IntArray:
    """Select the rounds around the first difference between the worlds."""
    length = len(pair.message_0)
    moved = find_moved_rounds(pair)
    start = min(pair.first_affected_round, int(moved[0]) if len(moved) else pair.first_affected_round)
    end = max(start, int(moved[0]) if len(moved) else start) + _CLOSE_ROUNDS
    return np.arange(max(0, start - 2), min(length, end + 1))


def find_moved_rounds(pair: CoupledRuns) -> IntArray:
    """Return the rounds in which the coordinate differs between the worlds, with the same noise or without noise."""
    return np.flatnonzero((pair.message_0 != pair.message_1) | (pair.noiseless_0 != pair.noiseless_1))


def find_most_different_number(done: Audit) -> tuple[int, int] | None:
    """Return the index of a visible round, from that of the largest shift on, and the coordinate with the largest difference.

    The difference is that of the means in the two worlds, in units of the spread. None: no such round is visible, or nothing
    differs.
    """
    later = np.flatnonzero(done.plan.adversary.visible_rounds >= done.coupled_runs.largest_shift_round)
    both = [done.visible_numbers[done.run_worlds == world] for world in (0, 1)]
    if min(map(len, both)) == 0:
        return None
    for k in later.tolist():
        means = [np.mean(part[:, k], axis=0) for part in both]
        spread = np.std(done.visible_numbers[:, k], axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):  # values that are equal in all runs
            apart = np.nan_to_num(np.abs(means[0] - means[1]) / spread)
        if apart.any():
            return k, int(apart.argmax())
    return None


def _plot_different_number(done: Audit, place: tuple[int, int] | None) -> Figure:
    """Plot one coordinate of one message over all runs, in both worlds; empty if none differs."""
    title = "With fresh noise in every run"
    if place is None:
        return Figure("coordinate", title, (), ())
    return plot_worlds(
        "coordinate", title, done.visible_numbers[:, place[0], place[1]], done.run_worlds, "value in the message"
    )


def plot_worlds(name: str, title: str, values: FloatArray, worlds: IntArray, axis: str) -> Figure:
    """Plot one value of every run, a histogram for each world."""
    known = np.isfinite(values)
    low, high = np.quantile(values[known], [0.002, 0.998]) if known.any() else (0.0, 1.0)
    if not low < high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    edges = np.linspace(low, high, 50 if len(values) > 400 else 26)
    marks = []
    for world, (label, colour) in enumerate(WORLD_STYLES):
        mine = values[known & (worlds == world)]
        shares = np.histogram(mine, edges)[0] / max(1, len(mine))
        marks.append(make_bars(edges, shares, label, colour))
    view = PlotView("", Axis(axis), Axis("share of runs", value_format="share", zero=True))
    return Figure(name, title, marks, (view,))


# ---- all of them ----------------------------------------------------------------------------------------------------


def build_figures(done: Audit, number: tuple[int, int] | None) -> Iterator[Figure]:
    """Plot all figures of an audit; `number` is the result of `find_most_different_number`."""
    found, plan, shown, pair = done.findings, done.plan, done.run_losses, done.coupled_runs
    if shown is not None:
        yield _plot_cumulative_losses(shown, plan.claim)
        yield _plot_single_rounds(found.round_bounds)
        if found.whole_run_bound is not None:
            yield _plot_losses(shown, found.claim, float(plan.guarantee.paper_epsilon[-1]))
            yield _plot_roc(shown, found.claim, found.whole_run_bound.value)
            yield _plot_progress(shown, found.whole_run_bound, found.claim)
    yield plot_noise(done.noise)
    yield plot_quantiles(done.noise)
    rounds, near = len(pair.message_0), _select_close_rounds(pair)
    yield _plot_coupled_runs("coupled", "The whole run", pair, select_evenly(rounds))
    close = _plot_coupled_runs("coupled-close", "Around the differing record", pair, near)
    yield close if len(near) < rounds else replace(close, marks=())
    yield _plot_different_number(done, number)
