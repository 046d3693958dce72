"""`sottovoce plot`: figures of what `simulate` and `sweep` wrote, a line with its band for every file or setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray, as_floats
from sottovoce.door import METRICS
from sottovoce.errors import CaptureError, SpecError
from sottovoce.running.transcript import parquet
from sottovoce.table import Table
from sottovoce_client.reports.drawing import Figure, View, band, line, short
from sottovoce_client.reports.export import FIGURES, export
from sottovoce_client.reports.marks import PALETTE, Axis, Mark
from sottovoce_client.reports.page import Page
from sottovoce_client.running.sweep import RESULTS

_BAND = 2.0
"""Standard errors on either side of the mean of a simulation."""

_Line = tuple[str, Sequence[Any], FloatArray, FloatArray, FloatArray]
"""Name, places on the axis, and mean, low and high there."""


def read_results(path: Path) -> Table:
    """The table in a `metrics.parquet` or `sweep.parquet`, or in the folder that holds one.

    Raises:
        CaptureError: it cannot be read, or the folder has none.
        SpecError: it is neither, or pyarrow is not installed.
    """
    if path.is_dir():
        found = [path / name for name in ("metrics.parquet", "sweep.parquet") if (path / name).is_file()]
        if not found:
            raise CaptureError(
                f"{path} has neither a metrics.parquet, which `sottovoce simulate --write metrics` writes, nor a sweep.parquet"
            )
        path = found[0]
    if not path.is_file():
        raise CaptureError(f"cannot read the results {path}: it must be a metrics.parquet or sweep.parquet that exists")
    try:
        arrow = parquet().ParquetFile(path).read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise CaptureError(f"cannot read the results {path}: {error}") from None
    names = tuple(arrow.column_names)
    if names != METRICS and names[-len(RESULTS) :] != RESULTS:
        raise SpecError(f"{path} must be a metrics.parquet or a sweep.parquet, got the columns {', '.join(names)}")
    return Table({name: _column(arrow.column(name)) for name in names})


def _column(column: Any) -> Any:
    """NumPy's; missing numbers as not-a-number."""
    values = column.to_numpy()
    return values if values.dtype.kind in "iuf" else values.astype(object)


def figures(tables: Mapping[str, Table]) -> list[Figure]:
    """One figure per metric.

    Args:
        tables: by the name of their lines; all of simulations, or all of sweeps.

    Raises:
        SpecError: some are of simulations and some of sweeps.
    """
    kinds = {tuple(table.columns) == METRICS for table in tables.values()}
    if len(kinds) > 1:
        raise SpecError("plot takes results of simulate, or of sweep, not both at once")
    simulated = kinds == {True}
    each = {name: _of_simulation(table) if simulated else _of_sweep(table) for name, table in tables.items()}
    metrics = dict.fromkeys(metric for curves in each.values() for metric in curves)
    return [
        _figure(
            metric,
            [(name, curves[metric]) for name, curves in each.items() if metric in curves],
            next(iter(tables.values())),
        )
        for metric in metrics
    ]


def _of_simulation(table: Table) -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = {}
    for metric in dict.fromkeys(table["metric"]):
        whole = table.where(metric=metric, learner=None)
        mean, error = as_floats(whole["mean"]), _BAND * as_floats(whole["standard_error"])
        found[metric] = [("", whole["rounds"].tolist(), mean, mean - error, mean + error)]
    return found


def _of_sweep(table: Table) -> dict[str, list[_Line]]:
    """The first changed field is the axis; every combination of the others is a line."""
    first, *others = _changed(table)
    found: dict[str, list[_Line]] = {}
    for metric in dict.fromkeys(table["metric"]):
        mine = table.where(metric=metric)
        for setting in dict.fromkeys(zip(*(mine[name].tolist() for name in others), strict=True)) if others else [()]:
            line = mine.where(**dict(zip(others, setting, strict=True)))
            name = ", ".join(f"{field} {value}" for field, value in zip(others, setting, strict=True))
            x = line[first]
            order = np.argsort(x, kind="stable") if x.dtype.kind in "iuf" else np.arange(len(x))
            ends = (as_floats(line[end][order]) for end in ("mean", "low", "high"))
            found.setdefault(metric, []).append((name, x[order].tolist(), *ends))
    return found


def _changed(table: Table) -> list[str]:
    """The fields that a sweep changed, or `seeds` where it changed none."""
    return list(table.columns)[: -len(RESULTS)] or ["seeds"]


def _figure(metric: str, curves: Sequence[tuple[str, list[_Line]]], table: Table) -> Figure:
    words, simulated = metric.replace("_", " "), tuple(table.columns) == METRICS
    marks: list[Mark] = []
    several = sum(len(lines) for _, lines in curves) > 1
    flat = [
        (" ".join(filter(None, (file if len(curves) > 1 else "", curve[0]))), curve)
        for file, lines in curves
        for curve in lines
    ]
    for k, (name, curve) in enumerate(flat):
        marks += _marks(name if several else words, curve, PALETTE[k % len(PALETTE)])
    x = Axis("rounds", log=True, form="count") if simulated else Axis(_changed(table)[0])
    return Figure(metric, words, marks, (View("", x, Axis(words)),), height=340)


def _marks(name: str, curve: _Line, colour: str) -> Iterator[Mark]:
    """The band, where there is one, and the line over it."""
    _, x, mean, low, high = curve
    if np.isfinite(low).all() and np.isfinite(high).all():
        yield band(x, low, high, colour)
    yield line(x, mean, short(name, 40), colour)


def export_results(folder: Path, asked: Sequence[str], tables: Mapping[str, Table]) -> tuple[Path, ...]:
    """Write tables and their figures in the formats that were asked for, and say where; returns the files.

    Raises:
        SpecError: Matplotlib is not installed.
    """
    shown = figures(tables) if set(asked) & set(FIGURES) else []
    written = export(folder, asked, tables, shown)
    for path in written:
        print(path)
    return written


def write_page(path: Path, shown: Sequence[Figure]) -> None:
    """A self-contained page with all figures.

    Raises:
        SpecError: Jinja2 is not installed.
    """
    Page("plot.html.j2", shown, {"figures": shown}).write(path)
