"""Figures in the pages' style, each a value that a page shows and an export writes, and the pieces that they are made of.

Nothing infinite or missing reaches a figure: such values become gaps, and the page says in words what is infinite.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.data.files import import_extra

# Okabe and Ito's colours, which all readers can tell apart, without the yellow, which is too pale on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4B4B4B", "#8C6D31")
BLUE, RED, GREEN, PINK = PALETTE[:4]
INK, FAINT, GRID, RULE, AREA, _CLEAR = "#1f2933", "#6b7785", "#e6eaee", "#b8c2cc", "#9aa5b1", "rgba(0,0,0,0)"
_MOST_POINTS = 400
_FEW_POINTS = 25
"""A curve of so many points, or fewer, shows them."""

Trace = dict[str, Any]
_Values = Sequence[float] | FloatArray | IntArray

_STYLE: Trace = {
    "template": None,
    "height": 390,
    "margin": {"l": 60, "r": 28, "t": 46, "b": 48},
    "paper_bgcolor": _CLEAR,
    "plot_bgcolor": _CLEAR,
    "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
    "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "font": {"size": 12}, "traceorder": "normal"},
    "modebar": {"bgcolor": _CLEAR, "color": RULE, "activecolor": INK},
    "hoverlabel": {"bgcolor": "white", "bordercolor": GRID, "font": {"color": INK}, "namelength": -1},
}


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A picture on a page; false, and not shown, where there is nothing to draw.

    Attributes:
        name: no other figure or table of the page has it; `plot-NAME` is its id there.
        title: what it shows.
        traces: plotly's.
        layout: plotly's, where it differs from `_STYLE`.
    """

    name: str
    title: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.traces)

    def drawn(self) -> Any:
        """The same as plotly's own `Figure`, which writes itself as HTML, JSON or an image."""
        return extra("plotly.graph_objects").Figure(list(self.traces), {**_STYLE, **self.layout})

    def __html__(self) -> str:
        """A piece of a page that draws itself with plotly.js."""
        if not self:
            return ""
        # Only the button that saves a picture: dragging zooms in, and a double click goes back.
        config = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage"]]}
        more = {"include_plotlyjs": False, "full_html": False, "div_id": f"plot-{self.name}"}
        text: str = extra("plotly.io").to_html(self.drawn(), config, **more)
        return text


def extra(module: str) -> Any:
    """A module that pages need, imported only when one is written.

    Raises:
        SpecError: it is not installed.
    """
    return import_extra(module, module.partition(".")[0], "a page")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def finite(values: _Values) -> list[float | None]:
    """Values for plotly, to five digits: None, which it draws as a gap, for what is not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def thinned(length: int, most: int = _MOST_POINTS) -> IntArray:
    """Positions of at most `most` of `length` values, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(int)) if length else np.zeros(0, dtype=int)


def positive(values: FloatArray) -> FloatArray:
    """Gaps for what costs nothing, as the first messages do: a logarithmic axis cannot show it."""
    return np.where(values > 0, values, math.nan)


def label(name: str, most: int = 18) -> str:
    """A name as plotly's text, in which it would read tags."""
    return html.escape(name if len(name) <= most else f"{name[: most - 1]}…")


# ---- traces ----------------------------------------------------------------------------------------------------------


def line(
    x: _Values, y: _Values, name: str, colour: str, *, width: float = 2.0, dash: str = "solid", **more: Any
) -> Trace:
    """A curve; its points are marked where they are few."""
    mode = "markers" if len(x) == 1 else "lines+markers" if len(x) <= _FEW_POINTS else "lines"
    look = {
        "mode": mode,
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"color": colour, "size": 5},
    }
    places = {"x": finite(x), "y": finite(y), "name": name}
    return {"type": "scatter", **places, **look, "hovertemplate": "%{y:.4~g}", **more}


def rule(x: _Values, y: _Values, name: str, colour: str = INK, dash: str = "dash", **more: Any) -> Trace:
    """A curve to compare others with, whose points mean nothing."""
    return line(x, y, name, colour, width=1.5, dash=dash, **{"mode": "lines", **more})


def dots(x: _Values, y: _Values, name: str, colour: str, **more: Any) -> Trace:
    """Points that no line connects."""
    return line(x, y, name, colour, **{"mode": "markers", "marker": {"size": 5.5, "color": colour}, **more})


def diamond(x: float, y: float, name: str, colour: str) -> Trace:
    """The one point that matters."""
    marker = {"size": 11, "symbol": "diamond", "color": colour, "line": {"color": "white", "width": 1.5}}
    return dots([x], [y], name, colour, marker=marker, cliponaxis=False)


def bars(edges: FloatArray, heights: _Values, name: str, colour: str, **more: Any) -> Trace:
    """A histogram through which another one is seen."""
    places = {"x": finite((edges[1:] + edges[:-1]) / 2), "y": finite(heights), "width": float(edges[1] - edges[0])}
    return {"type": "bar", **places, "name": name, "marker": {"color": colour, "opacity": 0.45}, **more}


def band(
    x: _Values, low: _Values, high: _Values, colour: str, name: str = "", width: float = 0.0, **more: Any
) -> list[Trace]:
    """The area between two curves; in the legend if it has a name."""
    look = {"mode": "lines", "hoverinfo": "skip", **more}
    edge = line(x, low, name, colour, width=width, **{**look, "showlegend": False})
    fill = {"fill": "tonexty", "fillcolor": _faded(colour), "showlegend": bool(name), **more}
    return [edge, {**edge, **fill, "y": finite(high)}]


def _faded(colour: str, alpha: float = 0.14) -> str:
    """The colour, of an area."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def spread(rows: FloatArray, name: str, colour: str) -> list[Trace]:
    """The largest of curves `(curves, rounds)` as a line, and a band down to the smallest; nothing where none is above zero."""
    kept = thinned(rows.shape[1])
    high, low = positive(rows.max(axis=0)[kept]), positive(rows.min(axis=0)[kept])
    if not np.isfinite(high).any():
        return []
    top = line(kept + 1, high, name, colour, width=2.2)
    if np.isinf(high).any() or np.array_equal(high, low, equal_nan=True):
        return [top]
    return [*band(kept + 1, low, high, colour), top]


# ---- axes ------------------------------------------------------------------------------------------------------------


def axis(title: str, **more: Any) -> Trace:
    """An axis in the page's style."""
    rules = {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True}
    return {"title": {"text": title, "font": {"size": 12, "color": FAINT}}, **rules, **more}


def round_axis(rounds: int, **more: Any) -> Trace:
    """An axis of so many rounds: no fractions of a round where there are few."""
    return axis("round", tickformat=",", **({"dtick": 1} if rounds <= 12 else {}), **more)


def switched(title: str, *, logarithmic: bool) -> Trace:
    """A layout whose vertical axis is turned from linear to logarithmic and back by buttons."""
    decades = {"type": "log", "dtick": 1, "exponentformat": "power"}
    views = (
        ("logarithmic", {f"yaxis.{key}": value for key, value in decades.items()}),
        ("linear", {"yaxis.type": "linear", "yaxis.dtick": None}),
    )
    vertical = axis(title, **(decades if logarithmic else {"rangemode": "tozero"}))
    return {"yaxis": vertical, "updatemenus": buttons(*views, active=int(not logarithmic))}


def buttons(*choices: tuple[str, Trace], active: int = 0, y: float = 1.02) -> list[Trace]:
    """A row of buttons above the plot's right end, each of which changes the layout."""
    row = [{"label": label, "method": "relayout", "args": [change]} for label, change in choices]
    place = {"x": 1, "xanchor": "right", "y": y, "yanchor": "bottom", "direction": "right", "type": "buttons"}
    look = {"bgcolor": "white", "bordercolor": GRID, "font": {"size": 11, "color": FAINT}, "pad": {"b": 2}}
    return [{"buttons": row, "active": active, "showactive": True, **place, **look}]


def upright(at: float, name: str, colour: str, dash: str) -> tuple[Trace, Trace]:
    """A vertical line through the whole plot, and its name; neither is seen where the axis does not reach."""
    place = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at}
    side = {"x": at, "y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "showarrow": False}
    shape = {"type": "line", **place, "line": {"color": colour, "width": 1.5, "dash": dash}}
    return shape, {**side, "text": name, "font": {"size": 11, "color": colour}}
