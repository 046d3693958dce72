"""`sottovoce budget --tradeoff`: simulate at several privacy levels, fit the loss of accuracy, and find the best level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json
from sottovoce_client.formatting import format_number, format_with_error
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import Page, PageColumn, PageTable
from sottovoce_client.reports.plot_elements import (
    BLUE,
    FAINT,
    GREEN,
    PINK,
    RED,
    Axis,
    PlotView,
    make_diamond,
    make_dots,
    make_line,
)
from sottovoce_client.terminal import ProgressReporter, ignore_progress
from sottovoce_core.arrays import as_floats
from sottovoce_core.budget.calibration import BudgetTarget, calibrate
from sottovoce_core.budget.tradeoff import AccuracyCurve, Optimum, Utility, fit_accuracy_curve, optimise_alpha
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.metrics import Metrics, list_metrics
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import suggest_name


@dataclass(frozen=True, slots=True)
class TradeoffRequest:
    """Request for a tradeoff between privacy and accuracy.

    Attributes:
        epsilons: Levels to simulate at, per record use over the whole run, of the learner that spends most.
        delta: Delta of the levels; 0: they are pure.
        metric: Metric of `sottovoce_core.runs.metrics` that measures the loss of accuracy.
        utility: Utility of privacy.
        threshold: c3, the largest acceptable loss of accuracy (None: that of the fitted curve at the smallest level).
        ceiling: Largest acceptable level (None: the largest simulated one).
        replicas: Repetitions at every level.
        seed: Seed of the noise.
    """

    epsilons: tuple[float, ...]
    metric: str = "average_loss"
    utility: Utility = field(default_factory=Utility)
    threshold: float | None = None
    ceiling: float | None = None
    replicas: int = 20
    seed: int = 0
    delta: float = 0.0


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Loss of accuracy at one level: its mean, and the standard error of the mean (not-a-number for one replica)."""

    epsilon: float
    loss: float
    error: float


@dataclass(frozen=True, slots=True)
class _Result:
    """Measurements, fitted curve and optimum."""

    measurements: tuple[_Measurement, ...]
    curve: AccuracyCurve
    threshold: float
    optimum: Optimum


def report_tradeoff(prepared: PreparedRun, folder: Path, trade: TradeoffRequest, console: Console | None = None) -> int:
    """Print the best level, and write `tradeoff.json` and `tradeoff.html`; return the exit code.

    Raises:
        SpecError: Too few levels, noise that cannot be calibrated, losses that do not decrease, or no admissible level.
    """
    console = console or terminal.create_console()
    measurements = []
    for epsilon in trade.epsilons:
        with terminal.show_progress_bar(f"simulating at epsilon {format_number(epsilon)}") as report:
            measurements.append(_measure(prepared, epsilon, trade, report))
        loss = format_with_error(measurements[-1].loss, measurements[-1].error)
        console.print(f"epsilon {format_number(epsilon)}: {_name_metric(trade.metric)} {loss}", highlight=False)
    answer = _solve(measurements, trade)
    for text in _describe(answer, trade):
        console.print(text, highlight=False, soft_wrap=True)
    write_json(folder / "tradeoff.json", _document(prepared.run.spec, answer, trade))
    page = folder / "tradeoff.html"
    code = terminal.attempt(str(page), lambda: _tradeoff_page(prepared.run.spec, answer, trade).write(page))
    terminal.print_json_file_if_requested(folder / "tradeoff.json")
    console.out(f"{folder}: tradeoff.json{'' if code else ', tradeoff.html'}", highlight=False)
    return code


def _measure(
    prepared: PreparedRun, epsilon: float, trade: TradeoffRequest, report: ProgressReporter = ignore_progress
) -> _Measurement:
    """Simulate with the noise of one level; `report` is called with the progress."""
    spec, data = prepared.run.spec, prepared.data
    found = calibrate(spec, data, BudgetTarget((epsilon,) * spec.n_learners, delta=trade.delta))
    run = build_run(found.spec, data.n_features)
    accuracies = [name for name in list_metrics(run, data) if name.endswith("accuracy")]  # the more, the better
    known = [name for name in list_metrics(run, data) if name not in (*accuracies, "privacy_loss")]
    if trade.metric not in known:
        raise SpecError(
            f"--metric must be one of {', '.join(known)}, got {trade.metric}{suggest_name(trade.metric, known)}"
        )
    metrics = Metrics(run, data, metrics=[trade.metric], checkpoints=1)
    for step in simulate_rounds(run, data, SeededNoise(trade.seed), trade.replicas):
        metrics.add_round(step)
        report(f"simulating at epsilon {format_number(epsilon)}", step.t + 1, spec.rounds, "rounds")
    curve = metrics.curves[trade.metric]
    return _Measurement(max(found.epsilons), curve.final_mean, curve.final_error)


def _solve(measurements: Sequence[_Measurement], trade: TradeoffRequest) -> _Result:
    """Fit the curve and find the optimum."""
    epsilons = [each.epsilon for each in measurements]
    curve = fit_accuracy_curve(epsilons, [each.loss for each in measurements])
    threshold = float(curve.evaluate(np.array(min(epsilons)))) if trade.threshold is None else trade.threshold
    ceiling = max(epsilons) if trade.ceiling is None else trade.ceiling
    return _Result(tuple(measurements), curve, threshold, optimise_alpha(curve, trade.utility, threshold, ceiling))


# ---- output ----------------------------------------------------------------------------------------------------------


def _name_metric(metric: str) -> str:
    return "share of wrong answers" if metric == "error" else metric.replace("_", " ")


def _describe(answer: _Result, trade: TradeoffRequest) -> list[str]:
    c, best = answer.curve, answer.optimum
    position = "a minimum in the interior" if best.is_interior else "a boundary of the allowed range, not a minimum"
    return [
        f"fitted: {_name_metric(trade.metric)} = {format_number(c.c4)} exp(−{format_number(c.c5)} ε) + {format_number(c.c6)}",
        f"allowed: ε from {format_number(best.min_alpha)} to {format_number(best.max_alpha)}, "
        f"loss at most {format_number(answer.threshold)}",
        f"best: ε = {format_number(best.alpha)}, {position}",
    ]


def _document(spec: RunSpec, answer: _Result, trade: TradeoffRequest) -> dict[str, Any]:
    """Build `tradeoff.json`."""
    return {
        "name": spec.name,
        "algorithm": spec.algorithm.name,
        "metric": trade.metric,  # measures the loss of accuracy
        "delta": trade.delta,  # of all epsilons
        "replicas": trade.replicas,
        "seed": trade.seed,
        "measurements": answer.measurements,
        "curve": answer.curve,
        "utility": trade.utility,
        "threshold": answer.threshold,  # largest acceptable loss of accuracy
        "optimum": answer.optimum,
    }


def _tradeoff_page(spec: RunSpec, answer: _Result, trade: TradeoffRequest) -> Page:
    """Build the page: the best level, and the curve it was found on."""
    loss = _name_metric(trade.metric)
    rows = [(each.epsilon, (each.loss, each.error)) for each in answer.measurements]
    columns = (PageColumn("ε", format_number), PageColumn(loss, lambda value: format_with_error(*value)))
    elements = (
        _plot_objective(answer, trade),
        _plot_fit(answer, loss),
        PageTable("levels", "Numbers", columns, rows, is_narrow=True),
    )
    return Page("tradeoff.html.j2", elements, {"spec": spec, "answer": answer, "trade": trade, "loss": loss})


def _plot_objective(answer: _Result, trade: TradeoffRequest) -> Figure:
    """Plot J with its two parts over the allowed levels, and the optimum."""
    best = answer.optimum
    x = as_floats(np.geomspace(best.min_alpha, best.max_alpha, 300))
    loss, utility = answer.curve.evaluate(x), trade.utility.evaluate(x)
    marks = [
        make_line(x, as_floats(loss - utility), "J = L − U", RED),
        make_line(x, loss, "L: accuracy lost", BLUE, dash="dot"),
        make_line(x, utility, "U: utility of privacy", GREEN, dash="dash"),
        make_diamond(best.alpha, best.objective, f"best: ε = {format_number(best.alpha)}", PINK),
    ]
    return Figure(
        "balance", "The best level", marks, (PlotView("", _EPSILON, Axis("in units of the loss")),), has_end_labels=True
    )


def _plot_fit(answer: _Result, loss: str) -> Figure:
    """Plot measured losses with two standard errors, and the fitted curve."""
    measurements, errors = answer.measurements, np.array([each.error for each in answer.measurements])
    ends = [each.epsilon for each in measurements] + [answer.optimum.min_alpha, answer.optimum.max_alpha]
    x = as_floats(np.geomspace(min(ends), max(ends), 300))
    has_errors = bool(np.isfinite(errors).all())
    name = "simulated" + (" ± 2 standard errors" if has_errors else "")
    epsilons, losses = [each.epsilon for each in measurements], [each.loss for each in measurements]
    points = make_dots(epsilons, losses, name, BLUE, width=9, low=2 * errors if has_errors else None)
    marks = [make_line(x, answer.curve.evaluate(x), "fitted", FAINT), points]
    return Figure("accuracy", "Loss of accuracy by epsilon", marks, (PlotView("", _EPSILON, Axis(loss)),))


_EPSILON = Axis("ε", log=True)
