#!/usr/bin/env python3
"""Plot of costs by number of learners, parameters, rounds and rate of records, from measured data: docs/images/scale.svg.

python benchmarks/hosting.py 5 20 50 200 1000 --json benchmarks/measured/learners.json
python benchmarks/ring.py scale --rounds 200  --json benchmarks/measured/parameters.json
python benchmarks/ring.py rounds              --json benchmarks/measured/rounds.json
python benchmarks/ingest.py --rates           --json benchmarks/measured/records.json
python benchmarks/curves.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

matplotlib.use("svg")
HERE = Path(__file__).resolve().parent
MEASURED, PICTURE = HERE / "measured", HERE.parent / "docs" / "images" / "scale.svg"
COLOURS = ("#0072B2", "#D55E00", "#009E73")
LOOK = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sottovoce"}


@dataclass(frozen=True, slots=True)
class Curves:
    """Panel of the plot: a title with the unit, and curves by name over the same points."""

    title: str
    curves: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Column:
    """Column of panels over one variable: CPU time, memory, and one more."""

    label: str
    points: Sequence[float]
    panels: tuple[Curves, ...]


def build_learners(found: Mapping[str, Any]) -> Column:
    """Build the column from the results of `hosting.py`."""
    samples = found["samples"]
    series = {name: [s[name] for s in samples] for name in samples[0] if name != "case"}
    cpu = {"host": series["host_us"], "coordinator": series["coordinator_us"]}
    return Column(
        "learners, in one process",
        [s["case"]["learners"] for s in samples],
        (
            Curves("CPU, µs a learner-round", cpu),
            Curves("memory, MB a learner", {"host": series["memory_mb"]}),
            Curves("from start to, s", {"all in the run": series["joined_s"], "first round": series["running_s"]}),
        ),
    )


def build_parameters(found: Mapping[str, Any]) -> Column:
    """Build the column from the results of `ring.py scale`; a learner sends two messages a round."""
    samples = found["scale"]
    cpu = {role: [2 * s["cpu_us"][role] for s in samples] for role in ("learner", "eavesdropper")}
    memory = {role: [s["peak_mb"][role] for s in samples] for role in ("learner", "eavesdropper", "coordinator")}
    size = {"on the wire": [s["message"] for s in samples], "in a capture": [s["captured"] for s in samples]}
    panels = (
        Curves("CPU, µs a learner-round", cpu),
        Curves("memory of a process, MB", memory),
        Curves("bytes a message", size),
    )
    return Column("numbers in a message", [s["dim"] for s in samples], panels)


def build_rounds(found: Mapping[str, Any]) -> Column:
    """Build the column from the results of `ring.py rounds`."""
    samples = found["long"]
    cpu = {
        "learner": [s["cpu_us"]["learner"] for s in samples],
        "coordinator": [s["cpu_us"]["coordinator"] for s in samples],
    }
    panels = (
        Curves("CPU, µs a learner-round", cpu),
        Curves("memory of two learners, MB", {"": [s["rss_mb"] for s in samples]}),
    )
    return Column("rounds", [s["rounds"] for s in samples], panels)


def build_records(found: Mapping[str, Any]) -> Column:
    """Build the column from the results of `ingest.py --rates`; a logarithmic axis has no rate 0."""
    samples = [s for s in found["rates"] if s["rate"]]
    panels = (
        Curves("CPU of a learner, ms a second", {"": [1e3 * s["cpu"] for s in samples]}),
        Curves("memory of a learner, MB", {"": [s["rss_mb"] for s in samples]}),
        Curves("its log, kB a second", {"": [s["written"] / 1e3 for s in samples]}),
    )
    return Column("records a second", [s["rate"] for s in samples], panels)


COLUMNS = {"learners": build_learners, "parameters": build_parameters, "rounds": build_rounds, "records": build_records}


def draw(columns: Sequence[Column], path: Path) -> None:
    """Draw all panels; the same numbers give the same bytes."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(12.5, 8), layout="constrained")
        grid = figure.subplots(3, len(columns), squeeze=False)
        for k, column in enumerate(columns):
            for axes, curves in zip(grid[:, k], column.panels, strict=False):
                draw_panel(axes, column, curves)
            for axes in grid[len(column.panels) :, k]:
                axes.set_axis_off()
        figure.savefig(path, metadata={"Date": None})


def draw_panel(axes: Axes, column: Column, curves: Curves) -> None:
    """Draw a panel with logarithmic axes, from 0.3 of the minimum to 3 times the maximum, so that flat curves look flat."""
    for (name, values), colour in zip(curves.curves.items(), COLOURS, strict=False):
        # A value of 0, which is less than a clock tick, is not on a logarithmic axis.
        measurable = [value or float("nan") for value in values]
        axes.plot(column.points, measurable, "o-", color=colour, markersize=4, linewidth=1.5, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    all_values = [value for values in curves.curves.values() for value in values if value > 0]
    axes.set_ylim(0.3 * min(all_values), 3 * max(all_values))
    if max(all_values) < 30 * min(all_values):
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(format_short))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(curves.title, fontsize=9, loc="left")
    axes.set_xlabel(column.label)
    axes.grid(color="#e6eaee")
    axes.set_axisbelow(True)
    if all(curves.curves):
        axes.legend(frameon=False, fontsize=8)


def format_short(value: float, _: int) -> str:
    """Format a number: 10k for 10,000, and 2M for two million."""
    size, sign = next(((size, sign) for size, sign in ((1e6, "M"), (1e3, "k")) if value >= size), (1.0, ""))
    return f"{value / size:g}{sign}"


def main() -> None:
    """Read the measurements and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE, help="default: %(default)s")
    options = parser.parse_args()
    found = {name: MEASURED / f"{name}.json" for name in COLUMNS}
    draw([COLUMNS[name](json.loads(file.read_text(encoding="utf-8"))) for name, file in found.items()], options.out)


if __name__ == "__main__":
    main()
