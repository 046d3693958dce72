"""Elements of figures: marks on two axes, and views of them.

Infinite and missing values become gaps in a figure; the text of the page states which values are infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sottovoce_client.formatting import format_number, format_percent
from sottovoce_client.reports.page import COLOURS
from sottovoce_core.arrays import FloatArray, IntArray

Values = Sequence[float] | FloatArray | IntArray

PALETTE = tuple(COLOURS)[:8]
DASHES = ("solid", "dash", "dot", "dashdot")
BLUE, RED, GREEN, PINK = PALETTE[:4]
INK, FAINT, RULE, AREA = "ink", "faint", "rule", "area"
_MAX_CURVE_POINTS = 400
MarkKind = Literal["line", "dots", "bars", "area", "upright", "image", "arrow", "text"]


@dataclass(frozen=True, slots=True, eq=False)
class PlotMark:
    """A drawn element of a figure.

    Attributes:
        kind: `line` connects points, `dots` does not; `bars` start at zero and are centred at x; an `area` lies between `low`
            and y; an `upright` is a vertical line at x; an `image` fills the rectangle from the first x and y to the last; an
            `arrow` leads from the first of two points to the second; a `text` shows its name beside a point.
        x: Horizontal coordinates.
        y: Vertical coordinates.
        name: Name in the legend; empty: no entry.
        colour: Key of `COLOURS`.
        width: Width of lines, or size of dots, in pixels.
        dash: `solid`, `dash`, `dot` or `dashdot`.
        low: Lower edge of an area, or half the length of the error bars of dots.
        step: Position of the steps of a step line: `after` a point, or in the `middle` of two; empty: a straight line.
        shape: Shape of dots.
        is_reference: True for a curve that others are compared with.
        fill: Opacity of dots.
        image: `(rows, columns, 4)` colours with their opacity.
        panel: Name of the panel of a page that highlights the mark; empty: the mark is in every panel.
    """

    kind: MarkKind
    x: FloatArray
    y: FloatArray
    name: str = ""
    colour: str = "blue"
    width: float = 2.0
    dash: str = "solid"
    low: FloatArray | None = None
    step: Literal["", "after", "middle"] = ""
    shape: Literal["circle", "diamond", "cross"] = "circle"
    is_reference: bool = False
    fill: float = 1.0
    image: NDArray[np.uint8] | None = None
    panel: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        title: Label.
        log: True for a logarithmic scale.
        low: Lower limit; None: the smallest drawn value.
        high: Upper limit; None: the largest drawn value.
        value_format: Format of tick labels; a `count` has integer ticks.
        zero: True if a linear axis of nonnegative values starts at zero.
    """

    title: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    value_format: Literal["number", "share", "count"] = "number"
    zero: bool = False

    def format_value(self, value: float) -> str:
        """Format a value for the reader."""
        return format_percent(value) if self.value_format == "share" else format_number(value)


@dataclass(frozen=True, slots=True)
class PlotView:
    """A view of a figure: its axes, which are not drawn if neither has a title."""

    name: str
    x: Axis
    y: Axis


def select_evenly(length: int, max_points: int = _MAX_CURVE_POINTS) -> IntArray:
    """Return the positions of at most `max_points` of `length` values, including the first and the last."""
    return (
        np.unique(np.linspace(0, length - 1, min(length, max_points)).astype(int)) if length else np.zeros(0, dtype=int)
    )


def mask_nonpositive(values: FloatArray) -> FloatArray:
    """Replace values <= 0 by gaps, because a logarithmic axis cannot show them (the first messages cost nothing)."""
    return np.where(values > 0, values, math.nan)


def mask_nonfinite(values: Values) -> FloatArray:
    """Replace None and non-finite values by gaps."""
    given = np.array([math.nan if value is None else value for value in values], dtype=float)
    return np.where(np.isfinite(given), given, math.nan)


def shorten(name: str, max_chars: int = 18) -> str:
    """Shorten a name to at most `max_chars` characters."""
    return name if len(name) <= max_chars else f"{name[: max_chars - 1]}…"


# ---- marks -----------------------------------------------------------------------------------------------------------


def make_line(x: Values, y: Values, name: str, colour: str, **more: Any) -> PlotMark:
    """Make a curve, whose points are marked if they are few."""
    return PlotMark("line", mask_nonfinite(x), mask_nonfinite(y), name, colour, **more)


def make_reference_line(
    x: Values, y: Values, name: str, colour: str = INK, dash: str = "dash", **more: Any
) -> PlotMark:
    """Make a curve that others are compared with; its points are not marked."""
    return make_line(x, y, name, colour, **{"width": 1.5, "dash": dash, "is_reference": True, **more})


def make_dots(x: Values, y: Values, name: str, colour: str, **more: Any) -> PlotMark:
    """Make unconnected points."""
    return PlotMark("dots", mask_nonfinite(x), mask_nonfinite(y), name, colour, **{"width": 5.5, **more})


def make_diamond(x: float, y: float, name: str, colour: str) -> PlotMark:
    """Make a single highlighted point."""
    return make_dots([x], [y], name, colour, shape="diamond")


def make_bars(edges: FloatArray, heights: Values, name: str, colour: str) -> PlotMark:
    """Make a translucent histogram."""
    return PlotMark("bars", mask_nonfinite((edges[1:] + edges[:-1]) / 2), mask_nonfinite(heights), name, colour)


def make_band(x: Values, low: Values, high: Values, colour: str, name: str = "", width: float = 0.0) -> PlotMark:
    """Make the area between two curves; it is in the legend if it has a name."""
    return PlotMark("area", mask_nonfinite(x), mask_nonfinite(high), name, colour, width, low=mask_nonfinite(low))


def make_vertical_line(at: float, name: str, colour: str, dash: str) -> PlotMark:
    """Make a vertical line over the full height of the plot; it is hidden outside the limits of the axis."""
    return PlotMark("upright", mask_nonfinite([at]), mask_nonfinite([math.nan]), name, colour, 1.5, dash)


def make_range_band(rows: FloatArray, name: str, colour: str) -> list[PlotMark]:
    """Make a line of the largest of curves `(curves, rounds)` and a band down to the smallest; no marks if none is above zero."""
    kept = select_evenly(rows.shape[1], _MAX_CURVE_POINTS // 2)
    high, low = mask_nonpositive(rows.max(axis=0)[kept]), mask_nonpositive(rows.min(axis=0)[kept])
    if not np.isfinite(high).any():
        return []
    top = make_line(kept + 1, high, name, colour, width=2.2)
    if np.isinf(high).any() or np.array_equal(high, low, equal_nan=True):
        return [top]
    return [make_band(kept + 1, low, high, colour), top]


def spread_labels(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Move labels at ascending heights apart, so that neighbours differ by at least `gap`, and below `top` where they fit."""
    placed = list(heights)
    for k in range(1, len(placed)):
        placed[k] = max(placed[k], placed[k - 1] + gap)
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], top - gap * (len(placed) - 1 - k))
    return placed


# ---- views -----------------------------------------------------------------------------------------------------------


def make_round_axis(**more: Any) -> Axis:
    """Make an axis of rounds."""
    return Axis("round", **{"value_format": "count", **more})


def make_scale_views(x: Axis, title: str, *, logarithmic: bool) -> tuple[PlotView, PlotView]:
    """Make two views with a logarithmic and a linear vertical axis; the former is first if `logarithmic`."""
    views = PlotView("logarithmic", x, Axis(title, log=True)), PlotView("linear", x, Axis(title, zero=True))
    return views if logarithmic else views[::-1]


def choose_style(k: int) -> tuple[str, str]:
    """Return colour and dash of curve k: all of 32 curves differ, and consecutive curves differ in both, also in print."""
    return PALETTE[k % len(PALETTE)], DASHES[(k + k // len(PALETTE)) % len(DASHES)]


def is_log_axis_needed(values: FloatArray) -> bool:
    """Return whether only a logarithmic axis shows all values: they are positive and span at least two decades."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() >= 100 * known.min())
