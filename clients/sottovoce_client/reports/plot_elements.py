"""What figures are made of: marks on two axes, and ways to look at them.

Nothing infinite or missing reaches a figure: such values become gaps, and the page says in words what is infinite.
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
    """Something drawn.

    Attributes:
        kind: `line` and `make_dots` connect points or do not; `bars` stand on zero, centred at x; an `area` lies between `low`
            and y; an `upright` goes through the whole plot at x; an `image` fills the rectangle from the first x and y to the
            last; an `arrow` leads from the first of two points to the second; a `text` shows its name beside a point.
        x: where across.
        y: how high.
        name: in the legend; empty: it is not there.
        colour: of `COLOURS`.
        width: of lines, or the size of dots, in pixels.
        dash: `solid`, `dash`, `dot` or `dashdot`.
        low: the lower edge of an area, or half the length of dots' error bars.
        step: where a line that goes in steps does so: `after` a point, or in the `middle` of two; empty: it is straight.
        shape: of dots.
        context: it is there to compare curves with.
        fill: opacity of dots.
        image: `(rows, columns, 4)` colours with their opacity.
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


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        title: what is on it.
        log: whether it is logarithmic.
        low: where it begins; None: with the least that is drawn.
        high: where it ends; None: with the most.
        form: how values are written; those of a `count` are whole.
        zero: it begins with zero at the latest, if it is not logarithmic.
    """

    title: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    value_format: Literal["number", "share", "count"] = "number"
    zero: bool = False

    def format_value(self, value: float) -> str:
        """A value as people read it."""
        return format_percent(value) if self.value_format == "share" else format_number(value)


@dataclass(frozen=True, slots=True)
class PlotView:
    """One way to look at a figure; without titles of its axes these are not drawn."""

    name: str
    x: Axis
    y: Axis


def select_evenly(length: int, max_points: int = _MAX_CURVE_POINTS) -> IntArray:
    """Positions of at most `most` of `length` values, the first and the last among them."""
    return (
        np.unique(np.linspace(0, length - 1, min(length, max_points)).astype(int)) if length else np.zeros(0, dtype=int)
    )


def mask_nonpositive(values: FloatArray) -> FloatArray:
    """Gaps for what costs nothing, as the first messages do: a logarithmic axis cannot show it."""
    return np.where(values > 0, values, math.nan)


def mask_nonfinite(values: Values) -> FloatArray:
    """Gaps for what is not finite."""
    given = np.array([math.nan if value is None else value for value in values], dtype=float)
    return np.where(np.isfinite(given), given, math.nan)


def shorten(name: str, max_chars: int = 18) -> str:
    """A name for which there is little room."""
    return name if len(name) <= max_chars else f"{name[: max_chars - 1]}…"


# ---- marks -----------------------------------------------------------------------------------------------------------


def make_line(x: Values, y: Values, name: str, colour: str, **more: Any) -> PlotMark:
    """A curve; its points are marked where they are few."""
    return PlotMark("line", mask_nonfinite(x), mask_nonfinite(y), name, colour, **more)


def make_reference_line(
    x: Values, y: Values, name: str, colour: str = INK, dash: str = "dash", **more: Any
) -> PlotMark:
    """A curve to compare others with, whose points mean nothing."""
    return make_line(x, y, name, colour, **{"width": 1.5, "dash": dash, "context": True, **more})


def make_dots(x: Values, y: Values, name: str, colour: str, **more: Any) -> PlotMark:
    """Points that no line connects."""
    return PlotMark("dots", mask_nonfinite(x), mask_nonfinite(y), name, colour, **{"width": 5.5, **more})


def make_diamond(x: float, y: float, name: str, colour: str) -> PlotMark:
    """The one point that matters."""
    return make_dots([x], [y], name, colour, shape="diamond")


def make_bars(edges: FloatArray, heights: Values, name: str, colour: str) -> PlotMark:
    """A histogram through which another one is seen."""
    return PlotMark("bars", mask_nonfinite((edges[1:] + edges[:-1]) / 2), mask_nonfinite(heights), name, colour)


def make_band(x: Values, low: Values, high: Values, colour: str, name: str = "", width: float = 0.0) -> PlotMark:
    """The area between two curves; in the legend if it has a name."""
    return PlotMark("area", mask_nonfinite(x), mask_nonfinite(high), name, colour, width, low=mask_nonfinite(low))


def make_vertical_line(at: float, name: str, colour: str, dash: str) -> PlotMark:
    """A vertical line through the whole plot, which is not seen where the axis does not reach."""
    return PlotMark("upright", mask_nonfinite([at]), mask_nonfinite([math.nan]), name, colour, 1.5, dash)


def make_range_band(rows: FloatArray, name: str, colour: str) -> list[PlotMark]:
    """The largest of curves `(curves, rounds)` as a line, and a band down to the smallest; nothing where none is above zero."""
    kept = select_evenly(rows.shape[1])
    high, low = mask_nonpositive(rows.max(axis=0)[kept]), mask_nonpositive(rows.min(axis=0)[kept])
    if not np.isfinite(high).any():
        return []
    top = make_line(kept + 1, high, name, colour, width=2.2)
    if np.isinf(high).any() or np.array_equal(high, low, equal_nan=True):
        return [top]
    return [make_band(kept + 1, low, high, colour), top]


# ---- views -----------------------------------------------------------------------------------------------------------


def make_round_axis(**more: Any) -> Axis:
    """An axis of rounds."""
    return Axis("round", **{"form": "count", **more})


def make_scale_views(x: Axis, title: str, *, logarithmic: bool) -> tuple[PlotView, PlotView]:
    """Views whose vertical axis is logarithmic and linear, the better one first."""
    views = PlotView("logarithmic", x, Axis(title, log=True)), PlotView("linear", x, Axis(title, zero=True))
    return views if logarithmic else views[::-1]


def choose_style(k: int) -> tuple[str, str]:
    """Colour and dash of the k-th of several curves: no two of 32 share both, and the next one differs in both, also in print."""
    return PALETTE[k % len(PALETTE)], DASHES[(k + k // len(PALETTE)) % len(DASHES)]


def is_log_axis_needed(values: FloatArray) -> bool:
    """Whether values are spread so far that only a logarithmic axis shows all of them: above zero, and over two decades."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() >= 100 * known.min())
