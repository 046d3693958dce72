"""`sottovoce budget --tradeoff`: simulate at several privacy levels, fit what accuracy costs, and find the best level."""

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
from sottovoce_core.runs.metrics import Metrics
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import RunSpec

_ERROR = "error"
"""The metric `accuracy`, turned into the share of held-out records that are classified wrongly."""


@dataclass(frozen=True, slots=True)
class TradeoffRequest:
    """What to trade.

    Attributes:
        epsilons: levels to simulate at, of the learner that spends most, for one event over the whole run.
        metric: of `sottovoce_core.runs.metrics` that stands for the loss of accuracy; or `error`.
        utility: what privacy is worth.
        threshold: c3, the largest acceptable loss of accuracy (None: that of the fitted curve at the smallest level).
        ceiling: the largest acceptable level (None: the largest that is simulated).
        replicas: repetitions at every level.
        seed: of the noise.
    """

    epsilons: tuple[float, ...]
    metric: str = "average_loss"
    utility: Utility = field(default_factory=Utility)
    threshold: float | None = None
    ceiling: float | None = None
    replicas: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Measured:
    """The loss of accuracy at one level: its mean, and the standard error of that (not-a-number for one replica)."""

    epsilon: float
    loss: float
    error: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was measured, fitted and found."""

    measured: tuple[_Measured, ...]
    curve: AccuracyCurve
    threshold: float
    optimum: Optimum


def report_tradeoff(prepared: PreparedRun, folder: Path, trade: TradeoffRequest, console: Console | None = None) -> int:
    """Print the best level, and write `tradeoff.json` and `tradeoff.html`; returns the exit code.

    Raises:
        SpecError: too few levels, noise that cannot be calibrated, losses that do not fall, or no admissible level.
    """
    console = console or terminal.create_console()
    measured = []
    for epsilon in trade.epsilons:
        with terminal.show_progress_bar(f"simulating at epsilon {format_number(epsilon)}") as say:
            measured.append(_measure(prepared, epsilon, trade, say))
        loss = format_with_error(measured[-1].loss, measured[-1].error)
        console.print(f"epsilon {format_number(epsilon)}: {_words(trade.metric)} {loss}", highlight=False)
    answer = _answer_of(measured, trade)
    for text in _said(answer, trade):
        console.print(text, highlight=False, soft_wrap=True)
    write_json(folder / "tradeoff.json", _document(prepared.run.spec, answer, trade))
    page = folder / "tradeoff.html"
    code = terminal.attempt(str(page), lambda: _tradeoff_page(prepared.run.spec, answer, trade).write(page))
    terminal.print_json_file_if_requested(folder / "tradeoff.json")
    console.out(f"{folder}: tradeoff.json{'' if code else ', tradeoff.html'}", highlight=False)
    return code


def _measure(
    prepared: PreparedRun, epsilon: float, trade: TradeoffRequest, say: ProgressReporter = ignore_progress
) -> _Measured:
    """Simulate with the noise of one level; `say` is told how far it is."""
    spec, data = prepared.run.spec, prepared.data
    found = calibrate(spec, data, BudgetTarget((epsilon,) * spec.n_learners))
    run = build_run(found.spec, data.n_features)
    metrics = Metrics(run, data, checkpoints=(spec.rounds,))
    for step in simulate_rounds(run, data, SeededNoise(trade.seed), trade.replicas):
        metrics.add_round(step)
        say(f"simulating at epsilon {format_number(epsilon)}", step.t + 1, spec.rounds, "rounds")
    name = "accuracy" if trade.metric == _ERROR else trade.metric
    if name not in metrics.curves:
        known = [_ERROR if each == "accuracy" else each for each in metrics.curves.curves]
        raise SpecError(f"--metric must be one of {', '.join(known)}, got {trade.metric}")
    curve = metrics.curves[name]
    loss = 1.0 - curve.final_mean if trade.metric == _ERROR else curve.final_mean
    return _Measured(max(found.epsilons), loss, curve.final_error)


def _answer_of(measured: Sequence[_Measured], trade: TradeoffRequest) -> _Answer:
    """Fit and solve."""
    epsilons = [each.epsilon for each in measured]
    curve = fit_accuracy_curve(epsilons, [each.loss for each in measured])
    threshold = float(curve.evaluate(np.array(min(epsilons)))) if trade.threshold is None else trade.threshold
    ceiling = max(epsilons) if trade.ceiling is None else trade.ceiling
    return _Answer(tuple(measured), curve, threshold, optimise_alpha(curve, trade.utility, threshold, ceiling))


# ---- showing ---------------------------------------------------------------------------------------------------------


def _words(metric: str) -> str:
    return "share of wrong answers" if metric == _ERROR else metric.replace("_", " ")


def _said(answer: _Answer, trade: TradeoffRequest) -> list[str]:
    c, best = answer.curve, answer.optimum
    where = "a minimum inside" if best.is_interior else "an end of what is allowed, not a minimum"
    return [
        f"fitted: {_words(trade.metric)} = {format_number(c.c4)} exp(−{format_number(c.c5)} ε) + {format_number(c.c6)}",
        f"allowed: ε from {format_number(best.min_alpha)} to {format_number(best.max_alpha)}, loss at most {format_number(answer.threshold)}",
        f"best: ε = {format_number(best.alpha)}, {where}",
    ]


def _document(spec: RunSpec, answer: _Answer, trade: TradeoffRequest) -> dict[str, Any]:
    """`tradeoff.json`."""
    return {
        "name": spec.name,
        "algorithm": spec.algorithm.name,
        "metric": trade.metric,  # that stands for the loss of accuracy
        "replicas": trade.replicas,
        "seed": trade.seed,
        "measured": answer.measured,
        "curve": answer.curve,
        "utility": trade.utility,
        "threshold": answer.threshold,  # the largest acceptable loss of accuracy
        "optimum": answer.optimum,
    }


def _tradeoff_page(spec: RunSpec, answer: _Answer, trade: TradeoffRequest) -> Page:
    """The best level, and the curve that it was found on."""
    loss = _words(trade.metric)
    rows = [(each.epsilon, (each.loss, each.error)) for each in answer.measured]
    columns = (PageColumn("ε", format_number), PageColumn(loss, lambda measured: format_with_error(*measured)))
    exhibits = (
        _balance(answer, trade),
        _fitted(answer, loss),
        PageTable("levels", "Numbers", columns, rows, is_narrow=True),
    )
    return Page("tradeoff.html.j2", exhibits, {"spec": spec, "answer": answer, "trade": trade, "loss": loss})


def _balance(answer: _Answer, trade: TradeoffRequest) -> Figure:
    """J with its two parts over the allowed levels, and the optimum."""
    best = answer.optimum
    x = as_floats(np.geomspace(best.min_alpha, best.max_alpha, 300))
    loss, worth = answer.curve.evaluate(x), trade.utility.evaluate(x)
    marks = [
        make_line(x, as_floats(loss - worth), "J = L − U", RED),
        make_line(x, loss, "L: accuracy lost", BLUE, dash="dot"),
        make_line(x, worth, "U: worth of privacy", GREEN, dash="dot"),
        make_diamond(best.alpha, best.objective, f"best: ε = {format_number(best.alpha)}", PINK),
    ]
    return Figure("balance", "The best level", marks, (PlotView("", _EPSILON, Axis("in units of the loss")),))


def _fitted(answer: _Answer, loss: str) -> Figure:
    """Measured losses with two standard errors, and the curve through them."""
    measured, errors = answer.measured, np.array([each.error for each in answer.measured])
    ends = [each.epsilon for each in measured] + [answer.optimum.min_alpha, answer.optimum.max_alpha]
    x = as_floats(np.geomspace(min(ends), max(ends), 300))
    known = bool(np.isfinite(errors).all())
    name = "simulated" + (" ± 2 standard errors" if known else "")
    epsilons, losses = [each.epsilon for each in measured], [each.loss for each in measured]
    points = make_dots(epsilons, losses, name, BLUE, width=9, low=2 * errors if known else None)
    marks = [make_line(x, answer.curve.evaluate(x), "fitted", FAINT), points]
    return Figure("accuracy", "What accuracy costs", marks, (PlotView("", _EPSILON, Axis(loss)),))


_EPSILON = Axis("ε", log=True)
