"""Plots of results: a line with its band for every file or setting, and the figures of `sottovoce plot`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sottovoce_client.reports.drawing import FIGURES, Figure, export
from sottovoce_client.reports.marks import PALETTE, Axis, Mark, View, band, decades, dots, line, short, styled
from sottovoce_client.reports.page import Page
from sottovoce_client.running.sweep import RESULTS
from sottovoce_client.wording import plural
from sottovoce_core.arrays import FloatArray, IntArray, as_floats
from sottovoce_core.door import METRICS
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.running.metrics import Curve
from sottovoce_core.running.transcript import parquet
from sottovoce_core.table import Table

_BAND = 2.0
"""Standard errors on either side of the mean of a simulation."""
_SHAPES: tuple[Literal["circle", "diamond", "cross"], ...] = ("circle", "diamond", "cross")
WRITTEN = ("metrics.parquet", "sweep.parquet", "compare.json")
"""What can be drawn."""

_SETTING = "spec"
"""What differs between the rows of a comparison: the specs."""
EPSILON = "epsilon"
_PRIVACY_PARAMETERS = ("epsilon", "alpha", "final_alpha")
"""Last parts of fields by which algorithms are asked for a privacy level, each in its own sense."""
_ORDERED = ", in the order of the legend"


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Name, places on the axis, and mean, low and high there; `joined`: the points are of one curve."""

    name: str
    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    joined: bool = True


def read_results(path: Path) -> Table:
    """The table in a `metrics.parquet`, `sweep.parquet` or `compare.json`, or in the folder that holds one.

    Raises:
        CaptureError: it cannot be read, or the folder has none.
        SpecError: it is none, or pyarrow is not installed.
    """
    if path.is_dir():
        found = [path / name for name in WRITTEN if (path / name).is_file()]
        if not found:
            raise CaptureError(
                f"{path} has neither a metrics.parquet, which `sottovoce simulate --write metrics` writes, nor a sweep.parquet, "
                "nor the compare.json of a comparison"
            )
        path = found[0]
    if not path.is_file():
        raise CaptureError(
            f"cannot read the results {path}: it must be a metrics.parquet, sweep.parquet or compare.json that exists, or a "
            "folder with one"
        )
    if path.suffix == ".json":
        return _of_comparison(path)
    if path.suffix != ".parquet":
        hint = {".csv": "; an exported table cannot be read back: the .parquet file lies beside it"}.get(path.suffix)
        raise SpecError(
            f"plot reads metrics.parquet, sweep.parquet or compare.json, or the folders they are in, got {path}{hint or ''}"
        )
    try:
        arrow = parquet().ParquetFile(path).read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise CaptureError(f"cannot read the results {path}: {error}") from None
    names = tuple(arrow.column_names)
    if names != METRICS and names[-len(RESULTS) :] != RESULTS:
        raise SpecError(f"{path} must be a metrics.parquet or a sweep.parquet, got the columns {', '.join(names)}")
    return Table({name: _column(arrow.column(name)) for name in names})


def _of_comparison(path: Path) -> Table:
    """What the specs of a comparison came to: as a sweep of them, the intervals being two standard errors.

    Raises:
        CaptureError: it is no comparison.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        names = names_of([each["spec"] for each in document["results"]])
        rows = [
            (name, metric, *_final(found), _number(each["epsilon_event"]), document["replicas"])
            for name, each in zip(names, document["results"], strict=True)
            for metric, found in each["metrics"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise CaptureError(f"cannot read the results {path}: it is not what `sottovoce compare` wrote") from None
    return Table.of((_SETTING, *RESULTS), rows)


def _final(found: Mapping[str, Any]) -> tuple[float, float, float]:
    """Mean, low and high after the last round."""
    mean, error = _number(found["mean"][-1], math.nan), _BAND * _number(found["standard_error"][-1], math.nan)
    return mean, mean - error, mean + error


def _number(value: float | None, missing: float = math.inf) -> float:
    return missing if value is None else float(value)


def _column(column: Any) -> Any:
    """NumPy's; missing numbers as not-a-number."""
    values = column.to_numpy()
    return values if values.dtype.kind in "iuf" else values.astype(object)


def names_of(sources: Sequence[str]) -> list[str]:
    """What each is called: its file's name, and with its folders where two would be called alike."""
    stems = [Path(source).stem for source in sources]
    return [
        str(Path(source).with_suffix("")) if stems.count(name) > 1 else name
        for source, name in zip(sources, stems, strict=True)
    ]


def curve_line(rounds: IntArray, curve: Curve) -> Line:
    """A metric over rounds: its mean, and two standard errors on either side."""
    return Line("", as_floats(rounds), curve.mean, curve.mean - _BAND * curve.error, curve.mean + _BAND * curve.error)


def figures(tables: Mapping[str, Table], x: str = "", log: Collection[str] | None = None) -> list[Figure]:
    """One figure per metric.

    Args:
        tables: by the name of their lines; all of simulations, or all of sweeps and comparisons.
        x: what is across: of sweeps `epsilon` or a changed field (default: the first one with numbers, and `epsilon` where that
            is a privacy level by the algorithm's own reckoning; of a comparison `epsilon`); of simulations the rounds alone.
        log: which of `x` and `y` are logarithmic (default: rounds, and whatever spans two decades).

    Raises:
        SpecError: some are of simulations and some of sweeps, or there is no such x.
    """
    kinds = {tuple(table.columns) == METRICS for table in tables.values()}
    if len(kinds) > 1:
        raise SpecError("plot takes results of simulate, or of sweep and compare, not both at once")
    simulated = kinds == {True}
    if simulated and x not in ("", "rounds"):
        raise SpecError(
            f"--x must be rounds for results of simulate, got {x}: epsilon is in those of `sottovoce sweep` and `compare`"
        )
    each = {name: _of_simulation(table) if simulated else _of_sweep(table, x) for name, table in tables.items()}
    metrics = dict.fromkeys(metric for curves in each.values() for metric in curves)
    title = "rounds" if simulated else _title(next(iter(tables.values())), x)
    return [
        _figure(metric, [(name, curves[metric]) for name, curves in each.items() if metric in curves], title, log)
        for metric in metrics
    ]


def _of_simulation(table: Table) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for metric in dict.fromkeys(table["metric"]):
        whole = table.where(metric=metric, learner=None)
        mean, error = as_floats(whole["mean"]), _BAND * as_floats(whole["standard_error"])
        found[metric] = [Line("", as_floats(whole["rounds"]), mean, mean - error, mean + error)]
    return found


def _of_sweep(table: Table, x: str) -> dict[str, list[Line]]:
    """Along the field that is across, or the first one with numbers; every combination of the others is a line.

    Where there is none with numbers, every combination is a point of its own.

    Raises:
        SpecError: there is no such x, or no epsilon is finite.
    """
    changed, across = _changed(table), _across(table, x)
    numbers = [name for name in changed if _numeric(table, name)]
    along = across if across in numbers else next(iter(numbers), None) if across == EPSILON else None
    others = [name for name in changed if name != along]
    places = {value: float(k) for k, value in enumerate(dict.fromkeys(table[across].tolist()), 1)}
    found: dict[str, list[Line]] = {}
    for metric in dict.fromkeys(table["metric"]):
        mine = table.where(metric=metric)
        for setting in dict.fromkeys(zip(*(mine[name].tolist() for name in others), strict=True)) if others else [()]:
            line = mine.where(**dict(zip(others, setting, strict=True)))
            name = ", ".join(_said(field, value) for field, value in zip(others, setting, strict=True))
            at = as_floats(
                line[across] if _numeric(table, across) else [places[each] for each in line[across].tolist()]
            )
            if not np.isfinite(at).any():  # its epsilon is infinite
                continue
            order = np.argsort(at, kind="stable")
            mean, low, high = (as_floats(line[end])[order] for end in ("mean", "low", "high"))
            found.setdefault(metric, []).append(Line(name, at[order], mean, low, high, along is not None))
    return found


def not_shown(tables: Mapping[str, Table], x: str = "") -> str:
    """What figures over epsilon cannot show, in words; empty: they show everything."""
    found = [table for table in tables.values() if tuple(table.columns) != METRICS and _across(table, x) == EPSILON]
    gone = [set(zip(*(t[name][np.isinf(t[EPSILON])].tolist() for name in _changed(t)), strict=True)) for t in found]
    n = sum(map(len, gone))
    return f"not shown, for they promise nothing (epsilon is infinite): {plural(n, 'setting')}" if n else ""


def _said(field: str, value: Any) -> str:
    return str(value) if field == _SETTING else f"{field} {value}"


def _across(table: Table, x: str) -> str:
    """The column that is across.

    Raises:
        SpecError: there is no such, or nothing of it can be shown.
    """
    changed = _changed(table)
    if x and x not in (EPSILON, *changed):
        raise SpecError(f"--x must be epsilon or a field that was changed, {', '.join(changed)}, got {x}")
    first = next(iter([*(name for name in changed if _numeric(table, name)), *changed]))
    promised = changed == [_SETTING] or (_is_privacy_parameter(first) and np.isfinite(as_floats(table[EPSILON])).any())
    across = x or (EPSILON if promised else first)
    if across == EPSILON and not np.isfinite(as_floats(table[EPSILON])).any():
        raise SpecError("over epsilon there must be a finite one, and all of these promise nothing: take another --x")
    return across


def _is_privacy_parameter(field: str) -> bool:
    """Whether a field asks for an epsilon of its algorithm's own, which need not be that of a record over the run."""
    return field.rpartition(".")[2] in _PRIVACY_PARAMETERS


def _title(table: Table, x: str) -> str:
    if (across := _across(table, x)) == EPSILON:
        return "ε per event"
    if _is_privacy_parameter(across):
        return f"{across} (a parameter, not the ε per event)"
    return across if _numeric(table, across) else f"{across}{_ORDERED}"


def _numeric(table: Table, name: str) -> bool:
    return table[name].dtype.kind in "iuf"


def _changed(table: Table) -> list[str]:
    """The fields that a sweep changed, or `seeds` where it changed none."""
    return list(table.columns)[: -len(RESULTS)] or ["seeds"]


def _figure(metric: str, curves: Sequence[tuple[str, list[Line]]], across: str, log: Collection[str] | None) -> Figure:
    words = metric.replace("_", " ")
    flat = [
        (" ".join(filter(None, (file if len(curves) > 1 else "", curve.name))), curve)
        for file, lines in curves
        for curve in lines
    ]
    return figure_of(metric, words, flat if len(flat) > 1 else [(words, curve) for _, curve in flat], across, log=log)


def figure_of(
    name: str,
    title: str,
    lines: Sequence[tuple[str, Line | None]],
    across: str,
    *,
    log: Collection[str] | None = None,
    form: Literal["number", "share"] = "number",
) -> Figure:
    """A metric over rounds, or over what was changed: a line with its band for every name.

    Args:
        name: of the figure.
        title: of the metric.
        lines: by their names; None: this one has no such metric.
        across: what is across.
        log: as of `figures`.
        form: how values of the metric are written.
    """
    drawn, banded = [each for _, each in lines if each is not None], len(lines) <= len(PALETTE)  # more hide each other
    marks = [
        mark
        for k, (called, each) in enumerate(lines)
        if each is not None
        for mark in _marks(called, each, k, banded=banded)
    ]
    at = np.concatenate([*(each.x for each in drawn), np.zeros(0)])
    reached = np.concatenate([*(side for each in drawn for side in (each.mean, each.low, each.high)), np.zeros(0)])
    x, y = across == "rounds" or decades(at), form == "number" and decades(reached)
    if log is not None:
        x, y = "x" in log, "y" in log
    whole = across == "rounds" or across.endswith(_ORDERED)
    view = View("", Axis(across, log=x, form="count" if whole else "number"), Axis(title, log=y, form=form))
    return Figure(name, title.capitalize(), marks, (view,), height=340)


def _marks(name: str, curve: Line, k: int, *, banded: bool) -> Iterator[Mark]:
    """The band, where there is one, and the line over it; of a point alone its error bar."""
    (colour, dash), name = styled(k), short(name, 40)
    known = bool(np.isfinite(curve.low).any() and np.isfinite(curve.high).any())
    if not curve.joined:
        half = (curve.high - curve.low) / 2 if known else None
        yield dots(curve.x, curve.mean, name, colour, width=7.0, shape=_SHAPES[k % len(_SHAPES)], low=half)
        return
    if known and banded:
        yield band(curve.x, curve.low, curve.high, colour)
    yield line(curve.x, curve.mean, name, colour, dash=dash)


def _for_paper(table: Table) -> Table:
    """A table as short as a paper has room for: of a simulation what the whole network came to after the last round."""
    if tuple(table.columns) != METRICS or not len(table):
        return table
    last = table.where(rounds=int(table["rounds"].max()), learner=None)
    names = [name.replace("_", " ") for name in last["metric"].tolist()]
    rows = list(zip(names, last["mean"].tolist(), last["standard_error"].tolist(), strict=True))
    return Table.of(("metric", "mean", "standard error"), rows)


def export_results(
    folder: Path, asked: Sequence[str], tables: Mapping[str, Table], shown: Sequence[Figure] | None = None
) -> tuple[Path, ...]:
    """Write tables and their figures in the formats that were asked for, and say where; returns the files.

    Raises:
        SpecError: Matplotlib is not installed.
    """
    if shown is None:
        shown = figures(tables) if set(asked) & set(FIGURES) else []
    written = export(folder, asked, tables, shown, {name: _for_paper(table) for name, table in tables.items()})
    for path in written:
        print(path)
    return written


def write_page(path: Path, shown: Sequence[Figure]) -> None:
    """A self-contained page with all figures.

    Raises:
        SpecError: Jinja2 is not installed.
    """
    Page("plot.html.j2", shown, {"figures": shown}).write(path)
