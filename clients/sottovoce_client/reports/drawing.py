"""How the report draws: plotly's figures in the page's style.

Nothing infinite or missing reaches a plot: such values become gaps, and the page says in words what is infinite.
"""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.errors import SpecError

# Okabe and Ito's colours, which all readers can tell apart, without the yellow, which is too pale on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4B4B4B", "#8C6D31")
INK, FAINT, GRID, CLEAR = "#1f2933", "#6b7785", "#e6eaee", "rgba(0,0,0,0)"
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 12}, "traceorder": "normal"}
MOST_POINTS = 400

Trace = dict[str, Any]


def plotly(module: str) -> Any:
    """A module of plotly, imported only when a report is written.

    Raises:
        SpecError: it is not installed.
    """
    try:
        return importlib.import_module(f"plotly.{module}")
    except ImportError:
        raise SpecError("a report needs plotly: pip install 'sottovoce[audit]'") from None


def draw(name: str, traces: Sequence[Trace], height: int, **layout: Any) -> str:
    """HTML of one plot; `name` becomes its id on the page."""
    base = {
        "template": None,
        "height": height,
        "margin": {"l": 62, "r": 40, "t": 40, "b": 48},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        "legend": LEGEND,
        "modebar": {"bgcolor": CLEAR, "color": "#b8c2cc", "activecolor": INK},
        "hoverlabel": {"bgcolor": "white", "bordercolor": GRID, "font": {"color": INK}, "namelength": -1},
    }
    figure = plotly("graph_objects").Figure(list(traces), {**base, **layout})
    # Only the button that saves a picture: dragging zooms in, and a double click goes back.
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage"]]}
    text: str = plotly("io").to_html(figure, config, include_plotlyjs=False, full_html=False, div_id=name)
    return text


def axis(title: str, **more: Any) -> Trace:
    """An axis in the page's style."""
    line = {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True}
    return {"title": {"text": title, "font": {"size": 12, "color": FAINT}}, **line, **more}


def buttons(*choices: tuple[str, Trace], active: int = 0) -> list[Trace]:
    """A row of buttons above the plot's right end, each of which changes the layout."""
    row = [{"label": label, "method": "relayout", "args": [change]} for label, change in choices]
    place = {"x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "direction": "right", "type": "buttons"}
    look = {"bgcolor": "white", "bordercolor": GRID, "font": {"size": 11, "color": FAINT}, "pad": {"b": 2}}
    return [{"buttons": row, "active": active, "showactive": True, **place, **look}]


def finite(values: FloatArray) -> list[float | None]:
    """Values for plotly, to five digits: None, which it draws as a gap, for what is not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def thinned(length: int, most: int = MOST_POINTS) -> IntArray:
    """Positions of at most `most` of `length` values, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(int)) if length else np.zeros(0, dtype=int)


def label(name: str, most: int = 18) -> str:
    """A learner's name as plotly's text, in which it would read tags."""
    return html.escape(name if len(name) <= most else f"{name[: most - 1]}…")
