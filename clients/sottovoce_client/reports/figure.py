"""Figures of pages and of exported files, drawn by Matplotlib."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client.atomic_files import write_atomically
from sottovoce_client.formatting import format_number
from sottovoce_client.reports.page import COLOURS, PageColumn, PageTable, render
from sottovoce_client.reports.plot_elements import PALETTE, Axis, PlotMark, PlotView, select_evenly, spread_labels
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.optional import import_optional
from sottovoce_core.table import Table

_MAX_TABLE_ROWS = 12
"""Maximum number of rows in the table of numbers below a figure."""


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A figure of a page; without marks it is false and not shown.

    Attributes:
        name: Unique name among the elements of the page; its HTML id is `plot-NAME`.
        title: Caption.
        marks: Drawn elements, from the bottom layer to the top.
        views: Selectable views; the first is shown initially.
        height: Height of the plot, in pixels.
        numbers: Table below the figure, for readers who do not see it; None: the values of the curves.
        label: Description for screen readers; empty: the axes, and the last values of the curves.
        has_end_labels: True if a page names curves and points at their ends; otherwise in a legend.
        is_table_beside: True if a page shows the table beside the plot, opened.
    """

    name: str
    title: str
    marks: Sequence[PlotMark]
    views: Sequence[PlotView]
    height: int = 300
    numbers: PageTable | None = None
    label: str = ""
    has_end_labels: bool = False
    is_table_beside: bool = False

    def __bool__(self) -> bool:
        return bool(self.marks)

    def __html__(self) -> str:
        """Render the figure as HTML."""
        if not self:
            return ""
        panels = self.panels
        with _apply_style(**{"svg.fonttype": "none", "savefig.transparent": True}):
            canvas = _PanelDrawing(self) if panels else _draw_figure(self, _PAGE_WIDTH, is_page=True)
            views = [
                (view.name, _inline_panels(self, view, k, canvas) if panels else [("", _inline(self, view, k, canvas))])
                for k, view in enumerate(self.views)
            ]
        columns = math.ceil(len(panels) / math.ceil(len(panels) / _MAX_PANEL_COLUMNS)) if panels else 1
        keys = [each for each in self.marks if each.name and not each.panel] if panels else []
        return render(
            "figure.html.j2",
            figure=self,
            views=views,
            columns=columns,
            keys=keys,
            numbers=self.numbers or _numbers(self),
        )

    @property
    def panels(self) -> list[str]:
        """Names of the panels of a page; empty: all marks are in one plot."""
        found = list(dict.fromkeys(each.panel for each in self.marks if each.panel))
        return found if len(found) > 1 else []

    def write(self, path: Path) -> None:
        """Write the first view to a file, in the format of its suffix. The same figure gives the same bytes.

        Raises:
            SpecError: Matplotlib is not installed.
        """
        form = path.suffix[1:]
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with write_atomically(path) as draft, _apply_style():
            canvas = _draw_figure(self)
            _apply_view(canvas, self, self.views[0])
            canvas.savefig(draft, format=form, dpi=_DPI, metadata=undated.get(form))

    def describe(self, view: PlotView, panel: str = "") -> str:
        """Describe a view, or one panel of it, for screen readers."""
        if self.label:
            return f"{self.title}: {self.label}"
        curves = [each for each in _curves(self.marks) if each.name and panel in ("", each.panel)]
        last = [(each.name, _last(each.y)) for each in curves]
        ends = [f"{name} ends at {view.y.format_value(value)}" for name, value in last if value is not None]
        axes = f"across {view.x.title}, up {view.y.title}" if view.y.title else f"across {view.x.title}"
        return ". ".join([f"{self.title}: {axes}", *([", ".join(ends)] if ends and len(ends) <= len(PALETTE) else [])])


def _curves(marks: Sequence[PlotMark]) -> list[PlotMark]:
    return [each for each in marks if each.kind == "line" and not each.is_reference]


def _last(values: FloatArray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else None


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(figure: Figure) -> PageTable:
    """Tabulate the named marks at a few x values: a row for each x value, or for each curve if there are many curves."""
    view = figure.views[0]
    named = [each for each in figure.marks if each.name and each.kind in ("line", "dots", "bars") and len(each.x)]
    curves = [each for each in named if not each.is_reference] or named
    x = np.unique(np.concatenate([each.x for each in curves])) if curves else np.zeros(0)
    few = len(named) <= len(PALETTE)
    x = x[select_evenly(len(x), 50 if any(each.kind == "bars" for each in named) else _MAX_TABLE_ROWS if few else 5)]
    values = [_interpolate(each, x) for each in named]
    heads = [view.x.format_value(float(each)) for each in x]
    name, title = f"numbers-{figure.name}", figure.title
    if few:
        columns = [PageColumn(view.x.title), *(PageColumn(each.name, view.y.format_value) for each in named)]
        rows = [(head, *row) for head, row in zip(heads, np.transpose(values).tolist(), strict=True)]
        return PageTable(name, title, columns, rows)
    columns = [PageColumn(view.y.title), *(PageColumn(f"{view.x.title} {head}", view.y.format_value) for head in heads)]
    return PageTable(
        name, title, columns, [(each.name, *row.tolist()) for each, row in zip(named, values, strict=True)]
    )


def _interpolate(each: PlotMark, x: FloatArray) -> FloatArray:
    """Return the drawn values at x; NaN outside the mark."""
    if each.kind == "line" and not each.step and len(each.x) > 1 and (np.diff(each.x) > 0).all():
        return np.interp(x, each.x, each.y, math.nan, math.nan)
    order = np.argsort(each.x, kind="stable")
    index = np.searchsorted(each.x[order], x, side="right") - 1
    found = each.y[order][np.maximum(index, 0)]
    outside = (index < 0) | ((each.x[order][np.maximum(index, 0)] != x) & (each.kind != "line"))
    return np.where(outside, math.nan, found)


# ---- drawing ---------------------------------------------------------------------------------------------------------

_WIDTH, _PAGE_WIDTH, _INCH = 480, 560, 96
"""Width in pixels of a figure for papers (1.5 columns of most journals) and on a page, which scales it; pixels per inch."""
_PANEL_WIDTH, _PANEL_HEIGHT = 300, 170
"""Size in pixels of a panel, which the page scales."""
_MAX_PANEL_COLUMNS = 5
_MAX_PALE_POINTS = 900
"""Maximum number of points of all pale curves behind the panels."""
_POINT = 72 / _INCH
"""Points per pixel."""
_LABEL_PX, _LABEL_CHAR_PX = 15, 6.4
"""Height of an end label, and width of its characters, in pixels."""
_LEGEND_CHARS, _LEGEND_SIGN_CHARS, _LEGEND_ROW_PX = 80, 14, 17
"""Characters that fit into a row of the legend, width of a line's sign in characters, and height of a row in pixels."""
_DPI = 200
_MAX_MARKED_POINTS = 10
"""Maximum number of points of a curve whose points are marked."""
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_SHAPES = {"circle": "o", "diamond": "D", "cross": "x"}
_STEPS = {"": "default", "after": "steps-post", "middle": "steps-mid"}
_MAX_DRAWABLE_VALUE = 1e100
"""Absolute value from which on numbers cannot be drawn and become gaps."""
_SOFT, _LINE, _RULE, _INK, _PAPER = (COLOURS[name][0] for name in ("soft", "line", "rule", "ink", "paper"))
_VARIABLES = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _SOFT,
    "grid.color": _LINE,
    "lines.solid_capstyle": "butt",
    "xtick.color": _RULE,
    "xtick.labelcolor": _SOFT,
    "ytick.color": _RULE,
    "ytick.labelcolor": _SOFT,
    "text.color": _INK,
    "text.parse_math": False,  # names are plain text
    "font.size": 9,
    "pdf.fonttype": 42,  # TrueType: journals refuse Matplotlib's own Type 3
    "svg.fonttype": "path",  # text as outlines, which does not depend on installed fonts
    "svg.hashsalt": "sottovoce",  # reproducible ids: the same figure gives the same file
}


_END_LABEL = "end-label"
"""Id of the groups of end labels in SVG, and their class on pages."""
_MARKED = re.compile(r'<g id="mark_(\d+)">')
_GROUP, _REFERENCE = re.compile(r' id="[^"]*_\d+"'), re.compile(r'( id="|href="#|url\(#)')
_COLOUR, _COORDINATES = re.compile(r"#[0-9a-f]{6}\b"), re.compile(r' (?:d|x|y)="[^"]*"')
_DIGITS = re.compile(r"(?<=\.\d)\d+|\s*\n|(?<=[ML]) ")
"""Patterns in SVG tags: marks, ids of groups, ids and references to them, colours, coordinates, and invisible digits."""


def _matplotlib(part: str = "") -> Any:
    return import_optional(f"matplotlib{part}", "Matplotlib", "a figure")


def _apply_style(**more: Any) -> Any:
    return _matplotlib().rc_context({**_STYLE, **more})


def _inline(figure: Figure, view: PlotView, k: int, canvas: Any) -> str:
    """Draw view k as inline SVG with the page's colour variables; a mark shows its name under the pointer."""
    _apply_view(canvas, figure, view, _select_end_labels(figure))
    return _wrap_svg(canvas, figure.describe(view), _export_svg(canvas, figure, f"{figure.name}-{k}-"))


def _wrap_svg(canvas: Any, label: str, drawing: str) -> str:
    width, height = (72 * side for side in canvas.get_size_inches())
    start = f'<svg class="drawn" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(label)}">'
    return f"{start}{drawing}</svg>"


def _export_svg(canvas: Any, figure: Figure, prefix: str) -> str:
    """Return the content of the SVG element of a canvas; all ids in it begin with a prefix that is unique on the page."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawing = buffer.getvalue().partition("</defs>")[2]  # the style before it would apply to the whole page

    def inline(found: re.Match[str]) -> str:
        """Rewrite a tag; text between tags, such as names, is not changed."""
        tag = found[0]
        if marked := _MARKED.fullmatch(tag):
            return f"<g><title>{html.escape(figure.marks[int(marked[1])].name)}</title>"
        if tag == f'<g id="{_END_LABEL}">':
            return f'<g class="{_END_LABEL}">'
        if ' id="' in tag or "#" in tag:
            tag = _GROUP.sub("", tag)  # nothing refers to them
            tag = _REFERENCE.sub(rf"\g<1>{prefix}", tag)
            tag = _COLOUR.sub(lambda colour: _VARIABLES.get(colour[0], colour[0]), tag)
        return _COORDINATES.sub(lambda coordinates: _DIGITS.sub("", coordinates[0]), tag)

    drawing = re.sub(r"(?<=>)\s+(?=<)", "", re.sub(r"<[^/>][^>]*>", inline, drawing))
    return drawing.rpartition("</svg>")[0]


class _PanelDrawing:
    """Drawing of a figure whose panels share their axes: the ground, which all panels show, and the marks of each.

    Attributes:
        canvas: Matplotlib figure of one panel, in which all marks are drawn.
        parts: Artists by the name of the panel; those of the ground under the empty name.
    """

    def __init__(self, figure: Figure) -> None:
        size = _PANEL_WIDTH / _INCH, _PANEL_HEIGHT / _INCH
        self.canvas = _matplotlib(".figure").Figure(size)
        self.axes = self.canvas.add_axes((0, 0, 1, 1))
        self.parts: dict[str, list[Any]] = {"": []}
        points = max(12, _MAX_PALE_POINTS // len(figure.panels))
        for k, mark in enumerate(figure.marks):
            if mark.panel and mark.kind == "line":
                kept = select_evenly(len(mark.x), points)
                pale = replace(mark, x=mark.x[kept], y=mark.y[kept], name="", colour="area", width=0.9, dash="solid")
                self._draw(pale, k, "")
            shown = replace(mark, colour=PALETTE[0], dash="solid") if mark.panel else mark
            self._draw(shown, k, mark.panel)

    def _draw(self, mark: PlotMark, k: int, part: str) -> None:
        before = set(self.axes.get_children())
        _draw(self.axes, mark, k)
        self.parts.setdefault(part, []).extend(each for each in self.axes.get_children() if each not in before)

    def show(self, part: str) -> None:
        """Show only the ground with its axes, or only the marks of a panel."""
        self.axes.set_axis_on() if not part else self.axes.set_axis_off()
        for name, artists in self.parts.items():
            for each in artists:
                each.set_visible(name == part)


def _inline_panels(figure: Figure, view: PlotView, k: int, drawing: _PanelDrawing) -> list[tuple[str, str]]:
    """Draw view k as one SVG per panel, with its name: its marks over those of all others, which are pale."""
    _apply_view(drawing.canvas, figure, view, is_panel=True)
    ground, panels = f"{figure.name}-{k}-ground", []
    for i, name in enumerate(figure.panels):
        if i:
            shared = f'<use href="#{ground}"/>'
        else:
            drawing.show("")
            shared = f'<g id="{ground}" class="ground">{_export_svg(drawing.canvas, figure, f"{ground}-")}</g>'
        drawing.show(name)
        own = _export_svg(drawing.canvas, figure, f"{figure.name}-{k}-{i}-")
        panels.append((name, _wrap_svg(drawing.canvas, figure.describe(view, name), shared + own)))
    return panels


def _draw_figure(figure: Figure, width: int = _WIDTH, *, is_page: bool = False) -> Any:
    """Draw the marks, once for all views; the legend is below the axes, so that it covers no curve."""
    labelled = _select_end_labels(figure) if is_page else []
    listed = [] if _has_no_axes(figure.views[0]) else _select_legend_marks(figure.marks)
    listed = [each for each in listed if each not in labelled]
    longest = max((len(each.name) for each in listed), default=0)
    across = max(1, min(len(listed), _LEGEND_CHARS // (longest + _LEGEND_SIGN_CHARS)))
    named = sum(bool(each.name) for each in figure.marks)
    rows = math.ceil(len(listed) / across) if named > 1 and listed else 0
    height = figure.height + (8 + _LEGEND_ROW_PX * rows if rows else 0)
    canvas = _matplotlib(".figure").Figure(
        (width / _INCH, height / _INCH)
    )  # without pyplot: no window, no global state
    axes = canvas.add_axes((0, 0, 1, 1))
    has_bands = len(figure.panels) <= len(PALETTE)  # more would overlap
    drawn = [(k, each) for k, each in enumerate(figure.marks) if has_bands or each.kind != "area" or not each.panel]
    signs = {id(mark): _draw(axes, mark, k) for k, mark in drawn}
    if rows:
        # Matplotlib leaves out names that begin with an underscore.
        names = [f"\u200b{mark.name}" if mark.name.startswith("_") else mark.name for mark in listed]
        handles = [signs[id(mark)] for mark in listed]
        # A page enlarges text where a figure is narrow: columns have space for that.
        spacing = 2.0 + 0.16 * max(map(len, names))
        style = {"frameon": False, "fontsize": 8, "handlelength": 3, "columnspacing": spacing}
        canvas.legend(handles, names, loc="lower center", ncols=across, **style)
    return canvas


def _has_no_axes(view: PlotView) -> bool:
    return not (view.x.title or view.y.title)


def _apply_view(
    canvas: Any, figure: Figure, view: PlotView, labelled: Sequence[PlotMark] = (), *, is_panel: bool = False
) -> None:
    """Set the axes of a view and the margins around them: Matplotlib's own layouts draw everything twice.

    Args:
        canvas: Drawing of the figure, or of one of its panels.
        figure: The figure.
        view: View to set.
        labelled: Marks whose names are written at their ends.
        is_panel: True for a panel, whose axes have few ticks and no titles: the page gives them once below all panels.
    """
    (axes,) = canvas.axes
    sides = [(each.y, each.low) for each in figure.marks if each.kind != "upright"]
    _set_axis(axes, "x", view.x, [each.x for each in figure.marks])
    _set_axis(axes, "y", view.y, [side for pair in sides for side in pair if side is not None])
    if _has_no_axes(view):
        axes.set_axis_off()
        return
    if is_panel:
        _thin_ticks(axes, view)
    width, height = _INCH * canvas.get_size_inches()
    widest = max(map(len, axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks())), default=1)
    longest = max((len(each.name) for each in labelled), default=0)
    left, right, top, bottom = 40 + 7 * widest, 14, 8, 42 + height - figure.height
    if is_panel:
        left, bottom = 12 + 10 * widest, 26  # on a phone the text is larger
    if labelled:
        right = min(30 + _LABEL_CHAR_PX * longest, width / 2)
    inner = width - left - right, height - top - bottom
    axes.set_position((left / width, bottom / height, inner[0] / width, inner[1] / height))
    # Fixed positions of the labels: Matplotlib's own placement measures all tick labels first.
    axes.xaxis.set_label_coords(0.5, -27 / inner[1])
    axes.yaxis.set_label_coords((22 - left) / inner[0], 0.5)
    _write_end_labels(axes, labelled, *inner)


def _thin_ticks(axes: Any, view: PlotView) -> None:
    for side, settings in (("x", view.x), ("y", view.y)):
        getattr(axes, f"set_{side}label")("")
        if not settings.log:
            axes.locator_params(axis=side, nbins=3)
    axes.tick_params(labelsize=8)


def _select_end_labels(figure: Figure) -> list[PlotMark]:
    """Return the marks that a page names at their ends."""
    ends = (each for each in figure.marks if each.name and each.kind in ("line", "dots") and _find_end(each))
    return list(ends) if figure.has_end_labels else []


def _find_end(mark: PlotMark) -> tuple[float, float] | None:
    """Return the last drawn point."""
    known = np.flatnonzero(np.isfinite(_mask_undrawable(mark.x)) & np.isfinite(_mask_undrawable(mark.y)))
    return (float(mark.x[known[-1]]), float(mark.y[known[-1]])) if known.size else None


def _write_end_labels(axes: Any, marks: Sequence[PlotMark], width: float, height: float) -> None:
    """Write names to the right of the axes, apart from each other, each with a leader from the end of its curve.

    Args:
        axes: Axes of the view.
        marks: Named curves and points.
        width: Width of the axes, in pixels.
        height: Height of the axes, in pixels.
    """
    for each in [text for text in axes.texts if text.get_gid() == _END_LABEL]:
        each.remove()
    ends = []
    for mark in marks:
        if (end := _find_end(mark)) is not None:
            x, y = axes.transAxes.inverted().transform(axes.transData.transform(end)).tolist()
            if math.isfinite(x) and math.isfinite(y):  # a logarithmic axis cannot show zero
                ends.append((min(max(y, 0.0), 1.0), min(x, 1.0), mark))
    ends.sort(key=lambda end: end[:2])
    heights = spread_labels([height * y for y, *_ in ends], _LABEL_PX, height)
    for label, (y, x, mark) in zip(heights, ends, strict=True):
        leader = {"arrowstyle": "-", "color": _RULE, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4}
        if mark.kind == "line":
            leader |= {"color": COLOURS[mark.colour][0], "linewidth": 1.0, "linestyle": _DASHES[mark.dash]}
        axes.annotate(
            mark.name,
            (x, y),
            (1 + 18 / width, label / height),
            "axes fraction",
            "axes fraction",
            arrowprops={**leader, "relpos": (0, 0.5)},
            va="center",
            fontsize=8.5,
            annotation_clip=False,
            gid=_END_LABEL,
        )


def _select_legend_marks(marks: Sequence[PlotMark]) -> list[PlotMark]:
    """Return the marks of the legend: many curves of one style are left out."""
    curves = _curves(marks)
    alike = len(curves) > len(PALETTE) and len({(each.colour, each.dash) for each in curves}) == 1
    return [each for each in marks if each.name and not (alike and each in curves)]


def _draw(axes: Any, mark: PlotMark, k: int) -> Any:
    """Draw a mark; return its handle for the legend."""
    colour, size, gid = COLOURS[mark.colour][0], mark.width * _POINT, f"mark_{k}" if mark.name else None
    x, y = _mask_undrawable(mark.x), _mask_undrawable(mark.y)
    stroke = {"color": colour, "linestyle": _DASHES[mark.dash], "linewidth": size, "gid": gid}
    if mark.kind == "upright":
        return axes.axvline(x[0], **stroke)
    if mark.kind == "image":
        return axes.imshow(mark.image, extent=(x[0], x[-1], y[-1], y[0]), aspect="auto", interpolation="none")
    if mark.kind == "arrow":
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": size, "shrinkA": 0, "shrinkB": 8}
        return axes.annotate("", (x[1], y[1]), (x[0], y[0]), arrowprops=style)
    if mark.kind == "text":  # on the outer side of the point
        sides = ("right", "center", "left")[_side(x[0])], ("top", "center", "bottom")[_side(y[0])]
        place = {"xytext": (11 * x[0], 11 * y[0]), "textcoords": "offset points"}
        return axes.annotate(mark.name, (x[0], y[0]), ha=sides[0], va=sides[1], **place)
    if mark.kind == "area":
        low = _mask_undrawable(mark.low)
        if size:
            axes.plot(x, np.column_stack([low, y]), color=colour, linewidth=size)
        return axes.fill_between(x, low, y, facecolor=(colour, 0.16), linewidth=0)
    if mark.kind == "bars":
        half = np.diff(x).mean() / 2 if len(x) > 1 else 0.5
        edges, heights = np.append(x - half, x[-1:] + half), np.nan_to_num(np.append(y, y[-1:]))
        return axes.fill_between(edges, heights, step="post", facecolor=(colour, 0.5), linewidth=0)
    if mark.kind == "dots":
        pale = COLOURS["paper"][0] if mark.shape == "diamond" else colour
        style = {"markersize": size if mark.shape == "circle" else 7, "markeredgecolor": pale, "alpha": mark.fill}
        error = None if mark.low is None else np.abs(_mask_undrawable(mark.low))
        drawn = axes.errorbar(x, y, error, fmt=_SHAPES[mark.shape], color=colour, elinewidth=1, **style)
        drawn[0].set_gid(gid)
        return drawn
    point = "o" if len(x) <= _MAX_MARKED_POINTS and not (mark.is_reference or mark.step) else None
    return axes.plot(x, y, drawstyle=_STEPS[mark.step], marker=point, markersize=3.5, **stroke)[0]


def _mask_undrawable(values: FloatArray | None) -> FloatArray:
    assert values is not None  # noqa: S101 - an area has two edges
    return np.where(np.abs(values) < _MAX_DRAWABLE_VALUE, values, math.nan)


def _side(at: float) -> int:
    return 1 + (at > 0.3) - (at < -0.3)


def _set_axis(axes: Any, which: str, settings: Axis, values: Sequence[FloatArray]) -> None:
    """Set title, scale, limits and ticks of an axis; `values` are all values drawn along it."""
    known = np.concatenate([*values, np.zeros(0)])
    known = known[np.abs(known) < _MAX_DRAWABLE_VALUE]  # only these are drawn
    low, high = settings.low, settings.high
    getattr(axes, f"set_{which}scale")("linear")  # resets the scale of another view
    axes.autoscale(axis=which)
    getattr(axes, f"set_{which}label")(settings.title)
    if settings.log:
        if math.isinf(getattr(axes.dataLim, f"minpos{which}")):  # nothing positive is drawn: Matplotlib would warn
            low, high = low or 1.0, high or 10.0
            getattr(axes, f"set_{which}lim")(low, high)
        getattr(axes, f"set_{which}scale")("log")
    elif settings.zero and low is None and (known >= 0).all():
        low = 0.0
    getattr(axes, f"set_{which}lim")(low, high)
    axis, ticker = getattr(axes, f"{which}axis"), _matplotlib(".ticker")
    if settings.log:
        ends = sorted(axis.get_view_interval())
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if ends[1] < 100 * ends[0] else (1,)))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif settings.value_format == "count":
        axis.get_major_locator().set_params(integer=True)
    if settings.value_format == "share":
        axis.set_major_formatter(ticker.PercentFormatter(1.0, symbol=" %"))
    else:
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    """Format a tick label: `10,000`, or `10⁵`."""
    power = math.log10(abs(value)) if value else 0.0
    if abs(power) > 4.5 and abs(power - round(power)) < 1e-9:
        return "10" + str(round(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return format_number(float(f"{value:.10g}"))


# ---- files -----------------------------------------------------------------------------------------------------------

FIGURE_FORMATS = ("svg", "pdf", "png")
_TABLES = {"csv": "csv", "tex": "tex", "latex": "tex"}
"""Suffixes of table files by format."""


def parse_formats(text: str) -> tuple[str, ...]:
    """Parse a list of formats such as `svg,csv`, before any work starts.

    Raises:
        SpecError: A format is unknown, or Matplotlib, which draws figures, is not installed.
    """
    found = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    known = (*FIGURE_FORMATS, *_TABLES)
    if unknown := [each for each in found if each not in known]:
        raise SpecError(f"--export must be of {', '.join(known)}, got {', '.join(unknown)}")
    if set(found) & set(FIGURE_FORMATS):
        _matplotlib()
    return found


def export(
    folder: Path,
    formats: Iterable[str],
    tables: Mapping[str, Table],
    figures: Sequence[Figure],
    paper_tables: Mapping[str, Table] | None = None,
) -> tuple[Path, ...]:
    """Write every table and figure in every format that fits it; return the files.

    Args:
        folder: Output folder.
        formats: Result of `parse_formats`.
        tables: Tables by file name.
        figures: Figures.
        paper_tables: Shorter versions for papers (LaTeX), by the name of the table that they replace.

    Raises:
        SpecError: Matplotlib is not installed.
    """
    written = []
    for each in formats:
        if each in _TABLES:
            for name, table in tables.items():
                written.append(folder / f"{name}.{_TABLES[each]}")
                with write_atomically(written[-1]) as draft:
                    table.to_csv(draft) if each == "csv" else (paper_tables or {}).get(name, table).to_latex(draft)
        else:
            for figure in figures:
                written.append(folder / f"{figure.name}.{each}")
                figure.write(written[-1])
    return tuple(written)
