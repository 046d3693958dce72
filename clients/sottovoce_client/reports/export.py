"""Results as files for papers: tables as CSV and LaTeX, figures as SVG, PDF and PNG.

Exported figures are drawn by Matplotlib: plain files, fonts embedded, no browser needed. What is drawn is the same list of
marks that pages show, so that a figure is described once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sottovoce.errors import SpecError
from sottovoce.optional import import_extra
from sottovoce.table import Table
from sottovoce_client.documents import until_complete
from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.marks import COLOURS, Axis, Mark

FIGURES = ("svg", "pdf", "png")
_TABLES = {"csv": "csv", "tex": "tex", "latex": "tex"}
"""Formats of tables, and their suffixes."""
_WIDTH, _HEIGHT = 5.0, 3.2
"""Of a figure, in inches: a column and a half of most papers."""
_LETTERS, _SIGN, _ROW = 80, 11, 0.18
"""Of a row of its legend: how many there is room for, how many a line's sign is as wide as, and how high it is."""
_DPI = 200
_FEW_POINTS = 10
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_SHAPES = {"circle": "o", "diamond": "D", "cross": "x"}
_LOOK = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaee",
    "font.size": 9,
    "pdf.fonttype": 42,  # TrueType: journals refuse Matplotlib's own Type 3
    "svg.fonttype": "path",  # text as outlines looks alike where the font is missing
    "svg.hashsalt": "sottovoce",  # ids by content: the same figure, the same file
}


def formats(text: str) -> tuple[str, ...]:
    """`svg,csv` as formats, before there is anything to write.

    Raises:
        SpecError: one that there is not, or Matplotlib, which draws figures, is not installed.
    """
    found = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    known = (*FIGURES, *_TABLES)
    if unknown := [each for each in found if each not in known]:
        raise SpecError(f"--export must be of {', '.join(known)}, got {', '.join(unknown)}")
    if set(found) & set(FIGURES):
        _matplotlib()
    return found


def export(
    folder: Path,
    asked: Iterable[str],
    tables: Mapping[str, Table],
    figures: Sequence[Figure],
    short: Mapping[str, Table] | None = None,
) -> tuple[Path, ...]:
    """Write every table and figure in every format that fits it; returns the files.

    Args:
        folder: where to.
        asked: as `formats` gives them.
        tables: by the name of their files.
        figures: the figures.
        short: what stands in a paper for the table of the same name.

    Raises:
        SpecError: Matplotlib is not installed.
    """
    written = []
    for each in asked:
        if each in _TABLES:
            for name, table in tables.items():
                written.append(folder / f"{name}.{_TABLES[each]}")
                with until_complete(written[-1]) as draft:
                    table.to_csv(draft) if each == "csv" else (short or {}).get(name, table).to_latex(draft)
        else:
            for figure in figures:
                written.append(folder / f"{figure.name}.{each}")
                _write_figure(figure, written[-1])
    return tuple(written)


def _write_figure(figure: Figure, path: Path) -> None:
    """Write one figure; the suffix tells the format. The same figure gives the same bytes.

    Raises:
        SpecError: Matplotlib is not installed.
    """
    with _matplotlib().rc_context(_LOOK):
        names = [mark.name for mark in figure.marks if mark.name]
        across = max(1, min(len(names), _LETTERS // (max(map(len, names), default=0) + _SIGN)))
        rows = math.ceil(len(names) / across) if len(names) > 1 else 0
        canvas = _matplotlib(".figure").Figure(  # without pyplot: no window, no global state
            figsize=(_WIDTH, _HEIGHT + _ROW * rows), layout="constrained"
        )
        axes = canvas.add_subplot()
        for mark in figure.marks:
            _draw(axes, mark)
        view = figure.views[0]
        _set_axis(axes, "x", view.x)
        _set_axis(axes, "y", view.y)
        if rows:  # below the axes: nowhere over the curves
            canvas.legend(loc="outside lower center", ncols=across, frameon=False, fontsize=8, handlelength=3)
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        form = path.suffix[1:]
        with until_complete(path) as draft:
            canvas.savefig(draft, format=form, dpi=_DPI, metadata=undated.get(form))


def _draw(axes: Any, mark: Mark) -> None:
    colour = COLOURS[mark.colour][0]
    if mark.kind == "area":
        axes.fill_between(mark.x, mark.low, mark.y, color=colour, alpha=0.16, linewidth=0)
    elif mark.kind == "line":
        style = {"color": colour, "linestyle": _DASHES[mark.dash], "linewidth": 1.4}
        point = "o" if len(mark.x) <= _FEW_POINTS else None
        axes.plot(mark.x, mark.y, label=mark.name or None, marker=point, markersize=3, **style)
    elif mark.kind == "dots":
        style = {"color": colour, "marker": _SHAPES[mark.shape], "linestyle": "none", "markersize": 5}
        axes.errorbar(mark.x, mark.y, yerr=mark.low, label=mark.name or None, elinewidth=1, **style)


def _set_axis(axes: Any, which: str, said: Axis) -> None:
    getattr(axes, f"set_{which}label")(said.title)
    if said.log:
        getattr(axes, f"set_{which}scale")("log")
    elif said.form == "count":
        getattr(axes, f"{which}axis").get_major_locator().set_params(integer=True)


def _matplotlib(part: str = "") -> Any:
    return import_extra(f"matplotlib{part}", "Matplotlib", "a figure as a file", "plot")
