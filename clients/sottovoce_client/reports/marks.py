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

from sottovoce_client.reports.page import COLOURS
from sottovoce_client.wording import number, share
from sottovoce_core.arrays import FloatArray, IntArray

Values = Sequence[float] | FloatArray | IntArray

PALETTE = tuple(COLOURS)[:8]
DASHES = ("solid", "dash", "dot", "dashdot")
BLUE, RED, GREEN, PINK = PALETTE[:4]
INK, FAINT, RULE, AREA = "ink", "faint", "rule", "area"
_MOST_POINTS = 400
Kind = Literal["line", "dots", "bars", "area", "upright", "image", "arrow", "text"]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
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

    kind: Kind
    x: FloatArray
    y: FloatArray
    name: str = ""
    colour: str = "blue"
    width: float = 2.0
    dash: str = "solid"
    low: FloatArray | None = None
    step: Literal["", "after", "middle"] = ""
    shape: Literal["circle", "diamond", "cross"] = "circle"
    context: bool = False
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
    form: Literal["number", "share", "count"] = "number"
    zero: bool = False

    def said(self, value: float) -> str:
        """A value as people read it."""
        return share(value) if self.form == "share" else number(value)


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at a figure; without titles of its axes these are not drawn."""

    name: str
    x: Axis
    y: Axis


def select_evenly(length: int, most: int = _MOST_POINTS) -> IntArray:
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


def make_dots(x: Values, y: Values, name: str, colour: str, **more: Any) -> Mark:
    """Points that no line connects."""
    return Mark("dots", finite(x), finite(y), name, colour, **{"width": 5.5, **more})


def make_diamond(x: float, y: float, name: str, colour: str) -> Mark:
    """The one point that matters."""
    return make_dots([x], [y], name, colour, shape="diamond")


def bars(edges: FloatArray, heights: Values, name: str, colour: str) -> Mark:
    """A histogram through which another one is seen."""
    return Mark("bars", finite((edges[1:] + edges[:-1]) / 2), finite(heights), name, colour)


def make_band(x: Values, low: Values, high: Values, colour: str, name: str = "", width: float = 0.0) -> Mark:
    """The area between two curves; in the legend if it has a name."""
    return Mark("area", finite(x), finite(high), name, colour, width, low=finite(low))


def upright(at: float, name: str, colour: str, dash: str) -> Mark:
    """A vertical line through the whole plot, which is not seen where the axis does not reach."""
    return Mark("upright", finite([at]), finite([math.nan]), name, colour, 1.5, dash)


def spread(rows: FloatArray, name: str, colour: str) -> list[Mark]:
    """The largest of curves `(curves, rounds)` as a line, and a band down to the smallest; nothing where none is above zero."""
    kept = select_evenly(rows.shape[1])
    high, low = positive(rows.max(axis=0)[kept]), positive(rows.min(axis=0)[kept])
    if not np.isfinite(high).any():
        return []
    top = line(kept + 1, high, name, colour, width=2.2)
    if np.isinf(high).any() or np.array_equal(high, low, equal_nan=True):
        return [top]
    return [make_band(kept + 1, low, high, colour), top]


# ---- views -----------------------------------------------------------------------------------------------------------


def make_round_axis(**more: Any) -> Axis:
    """An axis of rounds."""
    return Axis("round", **{"form": "count", **more})


def make_scale_views(x: Axis, title: str, *, logarithmic: bool) -> tuple[View, View]:
    """Views whose vertical axis is logarithmic and linear, the better one first."""
    views = View("logarithmic", x, Axis(title, log=True)), View("linear", x, Axis(title, zero=True))
    return views if logarithmic else views[::-1]


def styled(k: int) -> tuple[str, str]:
    """Colour and dash of the k-th of several curves: no two of 32 share both, and the next one differs in both, also in print."""
    return PALETTE[k % len(PALETTE)], DASHES[(k + k // len(PALETTE)) % len(DASHES)]


def is_log_axis_needed(values: FloatArray) -> bool:
    """Whether values are spread so far that only a logarithmic axis shows all of them: above zero, and over two decades."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() >= 100 * known.min())
