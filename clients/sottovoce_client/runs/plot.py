"""Plots of results: a line with its band for every run or setting, and the figures of `sottovoce plot`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sottovoce_client.formatting import format_number, pluralize
from sottovoce_client.reports.figure import FIGURE_FORMATS, Figure, export
from sottovoce_client.reports.plot_elements import (
    Axis,
    PlotMark,
    PlotView,
    choose_style,
    is_log_axis_needed,
    make_band,
    make_dots,
    make_line,
    shorten,
)
from sottovoce_core.arrays import FloatArray, as_floats
from sottovoce_core.errors import SpecError
from sottovoce_core.results import Result, Results, compute_bootstrap_intervals
from sottovoce_core.runs.curves import Curves
from sottovoce_core.runs.metrics import is_share
from sottovoce_core.table import Table
from sottovoce_core.text import suggest_name

_BAND_STANDARD_ERRORS = 2.0
"""Half width of a band over rounds, in standard errors."""
_MAX_LINES_TOGETHER = 6
"""Maximum number of lines that a page shows in one plot; of more, each has a panel of its own."""
_SHAPES: tuple[Literal["circle", "diamond", "cross"], ...] = ("circle", "diamond", "cross")

_SPEC = "spec"
"""Name of the spec as a changed field, if the runs of a file differ in their specs."""
_EPSILON, _ROUNDS = "epsilon", "rounds"
EPSILON_TITLE = "ε per record use"
"""Title of an axis of epsilon."""
_PRIVACY_LOSS = "privacy_loss"
"""The metric whose lines say their final epsilon, because an infinite one cannot be drawn."""
_PRIVACY_PARAMETERS = ("epsilon", "alpha", "final_alpha")
"""Last parts of the fields that set a privacy parameter, which each algorithm defines for itself."""
_LEGEND_ORDER_SUFFIX = ", in the order of the legend"


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Line of a plot: positions on the axis, mean, low and high.

    `is_curve`: the points belong to one curve. `end`: addition to its name in the legend.
    """

    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    is_curve: bool = True
    end: str = ""


def make_curve_line(curves: Curves, metric: str) -> Line:
    """Return a metric over rounds: its mean, and two standard errors on either side; a privacy loss with its final epsilon."""
    curve = curves[metric]
    mean, error = curve.mean, _BAND_STANDARD_ERRORS * curve.error
    end = ""
    if metric == _PRIVACY_LOSS:
        end = f", ε {format_number(curve.final_mean)}" + ", not drawn" * bool(np.isinf(mean).all())
    return Line(as_floats(curves.rounds), mean, mean - error, mean + error, end=end)


def make_final_line(x: FloatArray, curves: Sequence[Curves], metric: str, *, is_curve: bool) -> Line:
    """Return a metric after the last round over `x`, one value for each of `curves`, with 95 % bootstrap intervals."""
    last = np.concatenate([each[metric].replicas[-1:] for each in curves])
    return Line(x, last.mean(axis=1), *compute_bootstrap_intervals(last), is_curve=is_curve)


def name_metric(metric: str) -> str:
    """Return the name of a metric for people, with its unit."""
    return metric.replace("_", " ") + ", pure ε per record use" * (metric == _PRIVACY_LOSS)


@dataclass(frozen=True, slots=True)
class HorizontalAxis:
    """Horizontal axis of figures: the runs, and the value of each run that is on the axis.

    Attributes:
        results: Results by the name of their lines.
        changed_fields: Fields that differ between the runs of a file, or `spec`.
        x: `rounds`, `epsilon`, or one of `changed_fields`.
    """

    results: Mapping[str, Results]
    changed_fields: tuple[str, ...]
    x: str

    @classmethod
    def choose(cls, results: Mapping[str, Results], x: str = "") -> HorizontalAxis:
        """Choose the horizontal axis.

        Args:
            results: Results by the name of their lines.
            x: Wanted axis. Empty: the first changed field with numbers, or `epsilon` if that field is a privacy parameter of the
                algorithm; `epsilon` if specs differ; else the rounds.

        Raises:
            SpecError: `x` does not exist, or no epsilon is finite.
        """
        runs = [each for one in results.values() for each in one.runs]
        fields = tuple(dict.fromkeys(field for each in runs for field in each.facts.changes))
        has_several_specs = any(len({each.facts.spec for each in one.runs}) > 1 for one in results.values())
        axis = cls(results, (*fields, *([_SPEC] if has_several_specs else [])), x)
        finite = any(np.isfinite(each.facts.epsilon_record_use) for each in runs)
        if x and x not in (known := (_ROUNDS, _EPSILON, *axis.changed_fields)):
            raise SpecError(f"--x must be one of {', '.join(known)}, got {x}{suggest_name(x, known)}")
        if not x and not axis.changed_fields:
            return cls(results, axis.changed_fields, _ROUNDS)
        if not x:
            first = next(iter([*axis._numbers, *axis.changed_fields]))
            axis = cls(
                results, axis.changed_fields, _EPSILON if first == _SPEC or (_is_privacy(first) and finite) else first
            )
        if axis.x == _EPSILON and not finite:
            raise SpecError(
                "an axis of epsilon needs a finite epsilon, and all of these are infinite: choose another --x"
            )
        return axis

    @property
    def title(self) -> str:
        """Label of the axis."""
        if self.x in (_ROUNDS, _EPSILON):
            return {_ROUNDS: "rounds", _EPSILON: EPSILON_TITLE}[self.x]
        if _is_privacy(self.x):
            return f"{self.x} (a parameter, not the ε per record use)"
        return self.x if self.x in self._numbers else f"{self.x}{_LEGEND_ORDER_SUFFIX}"

    @property
    def omission_note(self) -> str:
        """Note on what figures over epsilon omit; empty: nothing."""
        n = sum(np.isinf(run.facts.epsilon_record_use) for each in self.results.values() for run in each.runs)
        if self.x != _EPSILON or not n:
            return ""
        return f"not shown, because their epsilon is infinite (no guarantee): {pluralize(int(n), 'setting')}"

    def make_lines(self, results: Results) -> dict[str, list[tuple[str, Line]]]:
        """Return the lines of each metric, with their names.

        A line follows the field on the axis, or else the first field with numbers; there is one for every combination of the
        other fields. Without such a field, every combination is a point of its own.
        """
        found: dict[str, list[tuple[str, Line]]] = {}
        if self.x == _ROUNDS:
            for run in results.runs:
                name = self._name(run, self.changed_fields)
                for metric in run.curves.curves:
                    found.setdefault(metric, []).append((name, make_curve_line(run.curves, metric)))
            return found
        numbers = self._numbers
        fields = [
            field
            for field in self.changed_fields
            if field == _SPEC or any(field in run.facts.changes for run in results.runs)
        ]
        own_numbers = [field for field in fields if all(_is_number(self._value(run, field)) for run in results.runs)]
        line_field = self.x if self.x in numbers else next(iter(own_numbers), None) if self.x == _EPSILON else None
        others = [field for field in fields if field != line_field]
        lines: dict[str, list[Result]] = {}
        for run in results.runs:
            lines.setdefault(self._name(run, others), []).append(run)
        values = dict.fromkeys(self._value(run, self.x) for run in results.runs)
        positions = {value: value if self.x in (_EPSILON, *numbers) else float(k) for k, value in enumerate(values, 1)}
        for name, runs in lines.items():
            x = as_floats([positions[self._value(run, self.x)] for run in runs])
            order = np.argsort(x, kind="stable")
            if not np.isfinite(x).any():  # its epsilon is infinite
                continue
            for metric in runs[0].curves.curves:
                if metric == _PRIVACY_LOSS and self.x == _EPSILON:  # that is the axis
                    continue
                curve = make_final_line(
                    x[order], [runs[k].curves for k in order], metric, is_curve=line_field is not None
                )
                found.setdefault(metric, []).append((name, curve))
        return found

    @property
    def _numbers(self) -> list[str]:
        """Changed fields whose values are all numbers."""
        runs = [each for one in self.results.values() for each in one.runs]
        return [field for field in self.changed_fields if all(_is_number(self._value(each, field)) for each in runs)]

    @staticmethod
    def _value(run: Result, name: str) -> Any:
        known = {_SPEC: run.facts.spec, _EPSILON: run.facts.epsilon_record_use}
        return known[name] if name in known else run.facts.changes.get(name)

    def _name(self, run: Result, fields: Collection[str]) -> str:
        values = ((field, self._value(run, field)) for field in fields)
        return ", ".join(str(value) if field == _SPEC else f"{field} {value}" for field, value in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_privacy(field: str) -> bool:
    """Return whether a field sets an algorithm's own privacy parameter, which can differ from a record's epsilon over the run."""
    return field.rpartition(".")[2] in _PRIVACY_PARAMETERS


def make_figures(axis: HorizontalAxis, log: Collection[str] | None = None) -> list[Figure]:
    """Make one figure per metric that has finite values.

    Args:
        axis: Runs and their horizontal axis.
        log: Logarithmic axes, of `x` and `y` (default: rounds, and values that span two decades).
    """
    each = {name: axis.make_lines(results) for name, results in axis.results.items()}
    has_several_files = len(each) > 1
    figures = []
    for metric in dict.fromkeys(metric for lines in each.values() for metric in lines):
        words = name_metric(metric)
        named = [
            (" ".join(filter(None, (file if has_several_files else "", name))), curve)
            for file, lines in each.items()
            for name, curve in lines.get(metric, ())
        ]
        if not any(np.isfinite(curve.mean).any() for _, curve in named):
            continue
        named = named if len(named) > 1 else [(words, curve) for _, curve in named]
        form: Literal["number", "share"] = "share" if is_share(metric) else "number"
        figures.append(make_figure(metric, words, named, axis.title, log=log, form=form))
    # The trade-off of privacy and accuracy is the first question to a figure over epsilon.
    return sorted(figures, key=lambda each: each.name != "accuracy") if axis.x == _EPSILON else figures


def make_figure(
    name: str,
    title: str,
    lines: Sequence[tuple[str, Line | None]],
    x_title: str,
    *,
    log: Collection[str] | None = None,
    form: Literal["number", "share"] = "number",
) -> Figure:
    """Make the figure of a metric over rounds or over a changed field: a line with its band for every name.

    Args:
        name: Name of the figure.
        title: Title of the metric.
        lines: Lines with their names; None: the metric is not available.
        x_title: Title of the horizontal axis.
        log: Logarithmic axes, as in `make_figures`.
        form: Value format of the metric.
    """
    drawn = [each for _, each in lines if each is not None]
    has_panels = len(lines) > _MAX_LINES_TOGETHER and all(each.is_curve for each in drawn)
    marks = [
        mark
        for k, (label, each) in enumerate(lines)
        if each is not None
        for mark in _make_marks(shorten(label, 40) + each.end, each, k, has_panel=has_panels)
    ]
    positions = np.concatenate([*(each.x for each in drawn), np.zeros(0)])
    values = np.concatenate([*(side for each in drawn for side in (each.mean, each.low, each.high)), np.zeros(0)])
    x, y = x_title == "rounds" or is_log_axis_needed(positions), form == "number" and is_log_axis_needed(values)
    if log is not None:
        x, y = "x" in log, "y" in log
    known = positions[np.isfinite(positions)]
    is_narrow = x_title == EPSILON_TITLE and known.size > 0 and known.max() < 1.5 * known.min()
    low, high = (0.5 * known.min(), 1.5 * known.max()) if is_narrow else (None, None)
    has_counts = x_title == "rounds" or x_title.endswith(_LEGEND_ORDER_SUFFIX)
    view = PlotView(
        "",
        Axis(x_title, log=x, low=low, high=high, value_format="count" if has_counts else "number"),
        Axis(title, log=y, value_format=form),
    )
    title, height = f"{title[:1].upper()}{title[1:]}", max(340, 60 + 15 * len(lines))
    return Figure(name, title, marks, (view,), 340 if has_panels else height, has_end_labels=len(lines) > 1)


def _make_marks(name: str, curve: Line, k: int, *, has_panel: bool) -> Iterator[PlotMark]:
    """Yield the band, if there is one, and the line over it; for a single point its error bar."""
    colour, dash = choose_style(k)
    has_interval = bool(np.isfinite(curve.low).any() and np.isfinite(curve.high).any())
    if not curve.is_curve:
        half = (curve.high - curve.low) / 2 if has_interval else None
        yield make_dots(curve.x, curve.mean, name, colour, width=7.0, shape=_SHAPES[k % len(_SHAPES)], low=half)
        return
    panel = name if has_panel else ""
    if has_interval:
        yield replace(make_band(curve.x, curve.low, curve.high, colour), panel=panel)
    yield make_line(curve.x, curve.mean, name, colour, dash=dash, panel=panel)


def export_files(
    folder: Path,
    formats: Sequence[str],
    results: Results | Mapping[str, Results],
    figures: Sequence[Figure] | None = None,
    paper_table: Table | None = None,
) -> tuple[Path, ...]:
    """Write summaries and their figures in the requested formats, and print the paths; return the paths.

    Args:
        folder: Output folder.
        formats: Requested formats.
        results: Results of the tables, by name if there are several.
        figures: Figures (default: those that `plot` draws).
        paper_table: Table for a paper (default: the last round, without columns that are the same in all rows).

    Raises:
        SpecError: Matplotlib is not installed.
    """
    named = {"results": results} if isinstance(results, Results) else results
    if figures is None:
        figures = make_figures(HorizontalAxis.choose(named)) if set(formats) & set(FIGURE_FORMATS) else []
    tables = {name: each.summary(every_round=True) for name, each in named.items()} if formats else {}
    paper_tables = (
        {name: paper_table or _shorten_table(each.summary()) for name, each in named.items()} if formats else {}
    )
    written = export(folder, formats, tables, figures, paper_tables)
    for path in written:
        print(path)
    return written


def _shorten_table(table: Table) -> Table:
    common = ("metric", "mean", "standard_error", "low", "high")
    kept = [name for name, each in table.columns.items() if name in common or len(set(each.tolist())) > 1]
    words = {name: name if name not in common else name.replace("_", " ") for name in kept}
    metrics = np.array([metric.replace("_", " ") for metric in table["metric"]], dtype=object)
    return Table({words[name]: metrics if name == "metric" else table[name] for name in kept})
