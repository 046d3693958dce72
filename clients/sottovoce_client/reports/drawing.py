"""Figures in the pages' style, each a value that a page shows and an export writes, and the pieces that they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray, IntArray, as_floats
from sottovoce_client.reports import svg
from sottovoce_client.reports.marks import PALETTE, Axis, Mark, Scale, Values, scaled
from sottovoce_client.reports.rendering import render
from sottovoce_client.reports.tables import Column, PageTable

BLUE, RED, GREEN, PINK = PALETTE[:4]
INK, FAINT, RULE, AREA = "ink", "faint", "rule", "area"
MOST_PANELS = 24
"""Curves that are drawn each on its own; more are drawn together, thin and alike."""
_MOST_POINTS = 400
_MOST_ROWS = 12
"""Of the numbers below a plot."""


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at a figure."""

    name: str
    x: Axis
    y: Axis


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A picture on a page; false, and not shown, where there is nothing to draw.

    Attributes:
        name: no other figure or table of the page has it; `plot-NAME` is its id there.
        title: what it shows.
        marks: what is drawn, the lowest first.
        views: ways to look at it; the first is shown until another one is chosen.
        height: of the plot, in pixels.
        numbers: what stands below it for those who do not see it; None: the curves' values.
    """

    name: str
    title: str
    marks: Sequence[Mark]
    views: Sequence[View]
    height: int = 300
    numbers: PageTable | None = None

    def __bool__(self) -> bool:
        return bool(self.marks)

    def __html__(self) -> str:
        """A piece of a page."""
        if not self:
            return ""
        curves = [each for each in self.marks if each.kind == "line" and not each.context]
        many = len(curves) > len(PALETTE)
        drawn = [_View(self, view, curves, panels=many and len(curves) <= MOST_PANELS) for view in self.views]
        listed = [each for each in self.marks if each.name and not (many and each in curves)]
        return render(
            "figure.html.j2",
            figure=self,
            views=drawn,
            legend=[(svg.key(each), each.name) for each in listed],
            curves=len(curves) if many else 0,
            panels=drawn[0].panels,
            numbers=self.numbers or _numbers(self),
        )


class _View:
    """A view, drawn."""

    def __init__(self, figure: Figure, view: View, curves: Sequence[Mark], *, panels: bool) -> None:
        self.name, self.x, self.y, self.panels = view.name, view.x, view.y, panels
        self._figure, self._curves = figure, curves
        self._across = scaled(view.x, _reach(figure.marks, "x"))
        self._up = scaled(view.y, _reach(figure.marks, "y"))
        self.ends = [_ends(self._across), _ends(self._up)]
        self.left = 16 + 7 * svg.widest(self._up)

    @property
    def label(self) -> str:
        """What is seen, for those who do not."""
        axes = f"across {self.x.title}, up {self.y.title}" if self.y.title else f"across {self.x.title}"
        last = [(each.name, _last(each.y)) for each in self._curves if each.name]
        told = [f"{name} ends at {self.y.said(value)}" for name, value in last if value is not None]
        return ". ".join(
            [f"{self._figure.title}: {axes}", *([", ".join(told)] if told and len(told) <= len(PALETTE) else [])]
        )

    def drawings(self) -> Iterator[tuple[str, str]]:
        """Titles, and the plots below them: one for everything, or one for every curve."""
        frame = svg.grid(self._across, self._up, 3 if self.panels else 6)
        if not self.panels:
            marks = svg.stretched(svg.mark(each, self._across, self._up) for each in self._figure.marks)
            over = "".join(svg.shapes(each, self._across, self._up) for each in self._figure.marks)
            yield "", frame + marks + over
            return
        around = [each for each in self._figure.marks if each not in self._curves]
        name = f"all-{self._figure.name}-{self.name.replace(' ', '-')}"
        drawings = svg.panels(self._curves, around, self._across, self._up, name)
        yield from ((each.name, frame + drawing) for each, drawing in zip(self._curves, drawings, strict=True))


def _ends(scale: Scale) -> str:
    kind = "log" if scale.axis.log else "linear"
    return f"{scale.low:.8g} {scale.high:.8g} {kind} {scale.axis.form}"


def _reach(marks: Sequence[Mark], which: str) -> FloatArray:
    """All values of one axis."""
    found: list[FloatArray] = []
    for each in marks:
        if which == "x":
            half = np.diff(each.x).mean() / 2 if each.kind == "bars" and len(each.x) > 1 else 0.0
            found += [each.x - half, each.x + half]
        elif each.kind != "upright":
            found.append(each.y)
            if each.low is not None:
                found += [each.low] if each.kind == "area" else [each.y - each.low, each.y + each.low]
    return np.concatenate([as_floats(each) for each in found]) if found else np.zeros(0)


def _last(values: FloatArray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else None


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(figure: Figure) -> PageTable:
    """The values of what has a name, at a few places across: a row for a place, or for a curve where these are many."""
    view = figure.views[0]
    named = [each for each in figure.marks if each.name and each.kind in ("line", "dots", "bars") and len(each.x)]
    curves = [each for each in named if not each.context] or named
    x = np.unique(np.concatenate([each.x for each in curves])) if curves else np.zeros(0)
    few = len(named) <= len(PALETTE)
    x = x[thinned(len(x), 50 if any(each.kind == "bars" for each in named) else _MOST_ROWS if few else 5)]
    values = [_at(each, x) for each in named]
    heads = [view.x.said(float(each)) for each in x]
    name, title = f"numbers-{figure.name}", figure.title
    if few:
        columns = [Column(view.x.title), *(Column(each.name, view.y.said) for each in named)]
        rows = [(head, *row) for head, row in zip(heads, np.transpose(values).tolist(), strict=True)]
        return PageTable(name, title, columns, rows)
    columns = [Column(view.y.title), *(Column(f"{view.x.title} {head}", view.y.said) for head in heads)]
    return PageTable(
        name, title, columns, [(each.name, *row.tolist()) for each, row in zip(named, values, strict=True)]
    )


def _at(each: Mark, x: FloatArray) -> FloatArray:
    """What is drawn there; not a number where nothing is."""
    if each.kind == "line" and not each.step and len(each.x) > 1 and (np.diff(each.x) > 0).all():
        return np.interp(x, each.x, each.y, math.nan, math.nan)
    order = np.argsort(each.x, kind="stable")
    place = np.searchsorted(each.x[order], x, side="right") - 1
    found = each.y[order][np.maximum(place, 0)]
    outside = (place < 0) | ((each.x[order][np.maximum(place, 0)] != x) & (each.kind != "line"))
    return np.where(outside, math.nan, found)


def thinned(length: int, most: int = _MOST_POINTS) -> IntArray:
    """Positions of at most `most` of `length` values, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(int)) if length else np.zeros(0, dtype=int)


def positive(values: FloatArray) -> FloatArray:
    """Gaps for what costs nothing, as the first messages do: a logarithmic axis cannot show it."""
    return np.where(values > 0, values, math.nan)


def finite(values: Values) -> FloatArray:
    """Gaps for what is not finite."""
    given = np.array([math.nan if value is None else value for value in values], dtype=float)
    return np.where(np.isfinite(given), given, math.nan)


def short(name: str, most: int = 18) -> str:
    """A name for which there is little room."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


# ---- marks -----------------------------------------------------------------------------------------------------------


def line(x: Values, y: Values, name: str, colour: str, **more: Any) -> Mark:
    """A curve; its points are marked where they are few."""
    return Mark("line", finite(x), finite(y), name, colour, **more)


def rule(x: Values, y: Values, name: str, colour: str = INK, dash: str = "dash", **more: Any) -> Mark:
    """A curve to compare others with, whose points mean nothing."""
    return line(x, y, name, colour, **{"width": 1.5, "dash": dash, "context": True, **more})


def dots(x: Values, y: Values, name: str, colour: str, **more: Any) -> Mark:
    """Points that no line connects."""
    return Mark("dots", finite(x), finite(y), name, colour, **{"width": 5.5, **more})


def diamond(x: float, y: float, name: str, colour: str) -> Mark:
    """The one point that matters."""
    return dots([x], [y], name, colour, shape="diamond")


def bars(edges: FloatArray, heights: Values, name: str, colour: str) -> Mark:
    """A histogram through which another one is seen."""
    return Mark("bars", finite((edges[1:] + edges[:-1]) / 2), finite(heights), name, colour)


def band(x: Values, low: Values, high: Values, colour: str, name: str = "", width: float = 0.0) -> Mark:
    """The area between two curves; in the legend if it has a name."""
    return Mark("area", finite(x), finite(high), name, colour, width, low=finite(low))


def upright(at: float, name: str, colour: str, dash: str) -> Mark:
    """A vertical line through the whole plot, which is not seen where the axis does not reach."""
    return Mark("upright", finite([at]), finite([math.nan]), name, colour, 1.5, dash)


def spread(rows: FloatArray, name: str, colour: str) -> list[Mark]:
    """The largest of curves `(curves, rounds)` as a line, and a band down to the smallest; nothing where none is above zero."""
    kept = thinned(rows.shape[1])
    high, low = positive(rows.max(axis=0)[kept]), positive(rows.min(axis=0)[kept])
    if not np.isfinite(high).any():
        return []
    top = line(kept + 1, high, name, colour, width=2.2)
    if np.isinf(high).any() or np.array_equal(high, low, equal_nan=True):
        return [top]
    return [band(kept + 1, low, high, colour), top]


# ---- views -----------------------------------------------------------------------------------------------------------


def rounds_across(**more: Any) -> Axis:
    """An axis of rounds."""
    return Axis("round", **{"form": "count", **more})


def switched(x: Axis, title: str, *, logarithmic: bool) -> tuple[View, View]:
    """Views whose vertical axis is logarithmic and linear, the better one first."""
    views = View("logarithmic", x, Axis(title, log=True)), View("linear", x, Axis(title, zero=True))
    return views if logarithmic else views[::-1]
