"""Plots of results: a line with its band for every run or setting, and the figures of `sottovoce plot`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sottovoce_client.formatting import pluralize
from sottovoce_client.reports.figure import FIGURE_FORMATS, Figure, export
from sottovoce_client.reports.plot_elements import (
    PALETTE,
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
from sottovoce_core.runs.metrics import Curves
from sottovoce_core.table import Table

_BAND_STANDARD_ERRORS = 2.0
"""Standard errors on either side of a mean over rounds."""
_SHAPES: tuple[Literal["circle", "diamond", "cross"], ...] = ("circle", "diamond", "cross")

_SPEC = "spec"
"""The name of a spec, where that is what differs between the runs of a file."""
_EPSILON, _ROUNDS = "epsilon", "rounds"
_PRIVACY_PARAMETERS = ("epsilon", "alpha", "final_alpha")
"""Last parts of fields by which algorithms are asked for a privacy level, each in its own sense."""
_LEGEND_ORDER_SUFFIX = ", in the order of the legend"


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """Places on the axis, and mean, low and high there; `joined`: the points are of one curve."""

    x: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    joined: bool = True


def make_curve_line(curves: Curves, metric: str) -> _Line:
    """A metric over rounds: its mean, and two standard errors on either side."""
    curve = curves[metric]
    mean, error = curve.mean, _BAND_STANDARD_ERRORS * curve.error
    return _Line(as_floats(curves.rounds), mean, mean - error, mean + error)


@dataclass(frozen=True, slots=True)
class HorizontalAxis:
    """The horizontal axis of figures: what it shows of each run, and the runs.

    Attributes:
        results: by the name of their lines.
        changed: names of what differs between the runs of a file: changed fields, or the spec.
        x: `rounds`, `epsilon`, or one of `changed`.
    """

    results: Mapping[str, Results]
    changed_fields: tuple[str, ...]
    x: str

    @classmethod
    def choose(cls, results: Mapping[str, Results], x: str = "") -> HorizontalAxis:
        """The axis that was asked for.

        Args:
            results: by the name of their lines.
            x: empty: the first changed field with numbers, and `epsilon` where that is a privacy level by the algorithm's own
                reckoning; `epsilon` where specs differ; else the rounds.

        Raises:
            SpecError: there is no such x, or no epsilon is finite.
        """
        runs = [each for one in results.values() for each in one.runs]
        fields = tuple(dict.fromkeys(field for each in runs for field in each.facts.changes))
        several = any(len({each.facts.spec for each in one.runs}) > 1 for one in results.values())
        axis = cls(results, (*fields, *([_SPEC] if several else [])), x)
        finite = any(np.isfinite(each.facts.epsilon_record_use) for each in runs)
        if x and x not in (known := (_ROUNDS, _EPSILON, *axis.changed_fields)):
            raise SpecError(f"--x must be one of {', '.join(known)}, got {x}")
        if not x and not axis.changed_fields:
            return cls(results, axis.changed_fields, _ROUNDS)
        if not x:
            first = next(iter([*axis._numbers, *axis.changed_fields]))
            axis = cls(
                results, axis.changed_fields, _EPSILON if first == _SPEC or (_is_privacy(first) and finite) else first
            )
        if axis.x == _EPSILON and not finite:
            raise SpecError(
                "over epsilon there must be a finite one, and all of these promise nothing: take another --x"
            )
        return axis

    @property
    def title(self) -> str:
        """The words below the axis."""
        if self.x in (_ROUNDS, _EPSILON):
            return {_ROUNDS: "rounds", _EPSILON: "ε per event"}[self.x]
        if _is_privacy(self.x):
            return f"{self.x} (a parameter, not the ε per event)"
        return self.x if self.x in self._numbers else f"{self.x}{_LEGEND_ORDER_SUFFIX}"

    @property
    def omission_note(self) -> str:
        """What figures over epsilon cannot show, in words; empty: they show everything."""
        n = sum(np.isinf(run.facts.epsilon_record_use) for each in self.results.values() for run in each.runs)
        if self.x != _EPSILON or not n:
            return ""
        return f"not shown, for they promise nothing (epsilon is infinite): {pluralize(int(n), 'setting')}"

    def make_lines(self, results: Results) -> dict[str, list[tuple[str, _Line]]]:
        """By metric, each with its name.

        Along the field that is across, or the first one with numbers; every combination of the others is a line. Where there is
        none with numbers, every combination is a point of its own.
        """
        found: dict[str, list[tuple[str, _Line]]] = {}
        if self.x == _ROUNDS:
            for run in results.runs:
                name = self._name(run, self.changed_fields)
                for metric in run.curves.curves:
                    found.setdefault(metric, []).append((name, make_curve_line(run.curves, metric)))
            return found
        numbers = self._numbers
        along = self.x if self.x in numbers else next(iter(numbers), None) if self.x == _EPSILON else None
        others = [field for field in self.changed_fields if field != along]
        lines: dict[str, list[Result]] = {}
        for run in results.runs:
            lines.setdefault(self._name(run, others), []).append(run)
        words = dict.fromkeys(self._value(run, self.x) for run in results.runs)
        places = {value: value if self.x in (_EPSILON, *numbers) else float(k) for k, value in enumerate(words, 1)}
        for name, runs in lines.items():
            at = as_floats([places[self._value(run, self.x)] for run in runs])
            order = np.argsort(at, kind="stable")
            if not np.isfinite(at).any():  # its epsilon is infinite
                continue
            for metric in runs[0].curves.curves:
                last = np.concatenate([run.curves[metric].replicas[-1:] for run in runs])[order]
                curve = _Line(
                    at[order], last.mean(axis=1), *compute_bootstrap_intervals(last), joined=along is not None
                )
                found.setdefault(metric, []).append((name, curve))
        return found

    @property
    def _numbers(self) -> list[str]:
        """Changed fields whose values are numbers."""
        runs = [each for one in self.results.values() for each in one.runs]
        return [
            field
            for field in self.changed_fields
            if all(type(self._value(each, field)) in (int, float) for each in runs)
        ]

    @staticmethod
    def _value(run: Result, name: str) -> Any:
        known = {_SPEC: run.facts.spec, _EPSILON: run.facts.epsilon_record_use}
        return known[name] if name in known else run.facts.changes.get(name)

    def _name(self, run: Result, fields: Collection[str]) -> str:
        values = ((field, self._value(run, field)) for field in fields)
        return ", ".join(str(value) if field == _SPEC else f"{field} {value}" for field, value in values)


def _is_privacy(field: str) -> bool:
    """Whether a field asks for an epsilon of its algorithm's own, which need not be that of a record over the run."""
    return field.rpartition(".")[2] in _PRIVACY_PARAMETERS


def make_figures(across: HorizontalAxis, log: Collection[str] | None = None) -> list[Figure]:
    """One figure per metric.

    Args:
        across: the runs and their horizontal axis.
        log: which of `x` and `y` are logarithmic (default: rounds, and whatever spans two decades).
    """
    each = {name: across.make_lines(results) for name, results in across.results.items()}
    several = len(each) > 1
    shown = []
    for metric in dict.fromkeys(metric for lines in each.values() for metric in lines):
        words = metric.replace("_", " ")
        named = [
            (" ".join(filter(None, (file if several else "", name))), curve)
            for file, lines in each.items()
            for name, curve in lines.get(metric, ())
        ]
        named = named if len(named) > 1 else [(words, curve) for _, curve in named]
        shown.append(make_figure(metric, words, named, across.title, log=log))
    return shown


def make_figure(
    name: str,
    title: str,
    lines: Sequence[tuple[str, _Line | None]],
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
    x, y = across == "rounds" or is_log_axis_needed(at), form == "number" and is_log_axis_needed(reached)
    if log is not None:
        x, y = "x" in log, "y" in log
    whole = across == "rounds" or across.endswith(_LEGEND_ORDER_SUFFIX)
    view = PlotView(
        "", Axis(across, log=x, value_format="count" if whole else "number"), Axis(title, log=y, value_format=form)
    )
    return Figure(name, title.capitalize(), marks, (view,), height=340)


def _marks(name: str, curve: _Line, k: int, *, banded: bool) -> Iterator[PlotMark]:
    """The band, where there is one, and the line over it; of a point alone its error bar."""
    (colour, dash), name = choose_style(k), shorten(name, 40)
    known = bool(np.isfinite(curve.low).any() and np.isfinite(curve.high).any())
    if not curve.joined:
        half = (curve.high - curve.low) / 2 if known else None
        yield make_dots(curve.x, curve.mean, name, colour, width=7.0, shape=_SHAPES[k % len(_SHAPES)], low=half)
        return
    if known and banded:
        yield make_band(curve.x, curve.low, curve.high, colour)
    yield make_line(curve.x, curve.mean, name, colour, dash=dash)


def export_files(
    folder: Path,
    asked: Sequence[str],
    results: Results | Mapping[str, Results],
    shown: Sequence[Figure] | None = None,
    paper: Table | None = None,
) -> tuple[Path, ...]:
    """Write summaries and their figures in the formats that were asked for, and print the paths; returns them.

    Args:
        folder: that they are written to.
        asked: the formats.
        results: what the tables are of, by their names where there are several.
        shown: the figures (default: those that `plot` draws).
        paper: the table that a paper has room for (default: of the last round, without columns that say the same in all rows).

    Raises:
        SpecError: Matplotlib is not installed.
    """
    named = {"results": results} if isinstance(results, Results) else results
    if shown is None:
        shown = make_figures(HorizontalAxis.choose(named)) if set(asked) & set(FIGURE_FORMATS) else []
    tables = {name: each.summary(every_round=True) for name, each in named.items()} if asked else {}
    short_ones = {name: paper or _for_paper(each.summary()) for name, each in named.items()} if asked else {}
    written = export(folder, asked, tables, shown, short_ones)
    for path in written:
        print(path)
    return written


def _for_paper(table: Table) -> Table:
    told = ("metric", "mean", "standard_error", "low", "high")
    kept = [name for name, each in table.columns.items() if name in told or len(set(each.tolist())) > 1]
    words = {name: name if name not in told else name.replace("_", " ") for name in kept}
    metrics = np.array([metric.replace("_", " ") for metric in table["metric"]], dtype=object)
    return Table({words[name]: metrics if name == "metric" else table[name] for name in kept})
