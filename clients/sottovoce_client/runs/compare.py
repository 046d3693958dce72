"""`sottovoce compare`: simulate several specs on the same data and show the results side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_text
from sottovoce_client.formatting import MISSING_VALUE, format_count, format_number, format_with_error, pluralize
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import Page, PageColumn, PageTable
from sottovoce_client.reports.plot_elements import make_reference_line
from sottovoce_client.runs.plot import (
    EPSILON_TITLE,
    export_files,
    make_curve_line,
    make_figure,
    make_final_line,
    name_metric,
)
from sottovoce_client.runs.simulation import get_final_metrics
from sottovoce_client.runs.tuning import equalise
from sottovoce_core.arrays import as_floats
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.experiment import Experiment, PreparedRun, load, require_count, resolve_experiment
from sottovoce_core.noise import SeededNoise
from sottovoce_core.results import RESULT_FILE_NAMES, InterruptedSimulation, Result, Results, collect_facts
from sottovoce_core.runs.metrics import (
    CHECKPOINTS,
    DEFAULT_METRICS,
    METRICS,
    Metrics,
    is_share,
    resolve_checkpoints,
    select_metrics,
)
from sottovoce_core.runs.simulator import limit_blas_threads, simulate_rounds
from sottovoce_core.table import Table
from sottovoce_core.text import escape_control
from sottovoce_core.yaml_files import parse_yaml

HEADS = (
    "spec",
    "algorithm",
    "threat model",
    "ε, paper",
    "ε per record use",
    "ε per record",
    "accuracy",
    "average loss",
    "regret per round",
    "consensus error",
    "floats sent",
    "rounds/s",
)
_ASKED_FIRST = ("spec", "algorithm", "threat model", "ε per record use", "accuracy", "average loss")
"""Columns of the table on the page; the table with all columns is folded below it."""
_TIGHT = ("ε per record use", "ε per record")
"""Columns whose epsilons are at the delta of the spec."""
_TEXT_COLUMN_COUNT = 3
"""Number of leading text columns; the others are numbers."""
_OPTIONAL_COLUMNS = (
    "rounds/s",
    "floats sent",
    "threat model",
    "ε, paper",
    "consensus error",
    "regret per round",
    "algorithm",
    "ε per record",
    "average loss",
)
"""Columns that are omitted on a narrow terminal, the least needed first."""
_PLOTS: tuple[tuple[str, str, Literal["number", "share"]], ...] = (
    ("average_loss", "average network loss", "number"),
    ("accuracy", "accuracy on held-out records", "share"),
    ("tracking_error", "tracking error", "number"),
    ("consensus_error", "consensus error", "number"),
)
"""Plotted metrics: name, title, and value format."""
_MIN_EPSILON_RATIO = 1.01
"""Ratio of the largest and smallest epsilon above which an algorithm has a line; calibrated ones differ by less."""
_METRIC_OF_HEAD = {
    "accuracy": "accuracy",
    "average loss": "average_loss",
    "regret per round": "static_regret",
    "consensus error": "consensus_error",
}
"""Metric of each column that shows one."""
_MAX_SHOWN_METRICS = 4
"""Number of measured metrics up to which each has a column; of more, those of `HEADS` and those that are no default."""
_NOT_IN_PAPERS = ("threat model", "ε, paper", "consensus error", "floats sent", "rounds/s")
"""Columns that are left out of the table exported for papers."""


_Source = tuple[str, Callable[[], Experiment]]
"""Name of a spec, and the function that loads it."""


def list_file_sources(paths: Sequence[Path]) -> list[_Source]:
    """Return the sources of spec files."""
    return [(str(path), partial(load, path)) for path in paths]


def list_builtin_sources() -> list[_Source]:
    """Return the specs of `builtin_algorithms.yaml`: every algorithm on one problem."""
    document = parse_yaml(
        files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text(encoding="utf-8")
    )
    specs = [{**document["common"], **each} for each in document["runs"]]
    return [
        (each["name"], partial(Experiment.model_validate, each, context={"source": each["name"]})) for each in specs
    ]


def make_spec_names(sources: Sequence[str]) -> list[str]:
    """Return a name for each spec: the file's name, with its folders if two files have the same name."""
    stems = [Path(source).stem for source in sources]
    return [
        str(Path(source).with_suffix("")) if stems.count(name) > 1 else name
        for source, name in zip(sources, stems, strict=True)
    ]


def compare_to_folder(
    sources: Sequence[_Source],
    on_ready: Callable[[PreparedRun], object],
    folder: Path,
    *,
    replicas: int,
    seed: int,
    targets: Sequence[float] = (),
    delta: float = 0.0,
    tune: Mapping[str, Sequence[Any]] | None = None,
    export_formats: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    checkpoints: int | Sequence[int] = CHECKPOINTS,
    console: Console | None = None,
) -> int:
    """Run all specs, print a table, and write the results, `compare.md`, `compare.html`, and files for papers.

    Ctrl-C keeps the complete specs.
    A spec that cannot be run is reported and skipped; the exit code is then 1. It is 3 if the page or a file cannot be written.

    Args:
        sources: Specs, which must hold out the same records.
        on_ready: Called with each run before it is simulated.
        folder: Output folder.
        replicas: Repetitions of each spec, which differ in their noise alone.
        seed: Seed of the noise, the same for each spec.
        targets: Epsilons of one use of a record; the noise of every spec is calibrated to each of them. Empty: as it is.
        delta: Delta of the targets and of the epsilons in the table; 0: those of the specs.
        tune: Values of fields of which each spec gets the best ones, as of `sv.sweep`.
        export_formats: Formats of the files for papers.
        metrics: Names of metrics; None: the default ones.
        checkpoints: Numbers of rounds after which to measure, or how many.
        console: Console of the table.
    """
    console = console or terminal.create_console()
    runs, failures, first, code = [], [], None, 0
    is_interrupted = False
    names = make_spec_names([source for source, _ in sources])
    planned = [(*one, name, *each) for one, name in zip(sources, names, strict=True) for each in _list_targets(targets)]
    for k, (source, load_one, name, target, changes) in enumerate(planned, 1):
        try:
            experiment = equalise(load_one(), target, delta, tune, seed)
            first = first or experiment
            _require_same_records(experiment.data, first.data)
            with terminal.show_progress_bar(title := f"run {k} of {len(planned)}, {source}") as report:
                on_ready(experiment.prepared_run)
                runs.append(
                    simulate_and_measure(
                        name,
                        experiment,
                        replicas,
                        seed,
                        partial(report, title, unit="rounds"),
                        changes=changes,
                        metrics=metrics,
                        checkpoints=checkpoints,
                    )
                )
        except KeyboardInterrupt:
            if not runs:
                raise
            is_interrupted = True
            terminal.print_notice(f"results of {pluralize(len(runs), 'run')} of {len(planned)} are kept: {folder}")
            break
        except (SottovoceError, ArithmeticError, ValueError) as error:  # user-defined algorithms may raise these
            failures.append({"spec": source, "error": str(error)})
            console.out(f"{source}: {error}", highlight=False, style="red" if console.is_terminal else None)
    if runs:
        results = Results(tuple(runs))
        _print_table(results, console) if console.is_terminal else console.out(
            format_markdown(results), highlight=False
        )
        results.write(folder, seed=seed, failures=failures)
        write_text(folder / "compare.md", format_markdown(results) + "\n")
        page = folder / "compare.html"
        code = terminal.attempt(str(page), lambda: make_compare_page(results).write(page))
        written = [*RESULT_FILE_NAMES, "compare.md", *(() if code else ("compare.html",))]
        console.out(f"{folder}: {', '.join(written)}", highlight=False)
        plain, heads = _list_columns(results), _list_heads(results)
        columns = [k for k, head in enumerate(plain) if head not in _NOT_IN_PAPERS]
        paper = Table.from_rows([heads[k] for k in columns], [[row[k] for k in columns] for row in _rows(results)])
        files = partial(
            export_files,
            folder,
            export_formats,
            results,
            [*filter(None, [_plot_over_epsilon(results)]), *_figures(results)],
            paper,
        )
        code = terminal.attempt("a file of --export", files) or code
        documents = [{**asdict(each.facts), "metrics": get_final_metrics(each.curves)} for each in runs]
        terminal.print_json_if_requested(lambda: {"folder": folder, "runs": documents, "failures": failures})
    if is_interrupted:
        raise KeyboardInterrupt
    return 1 if failures else code


def _list_targets(targets: Sequence[float]) -> list[tuple[float | None, dict[str, float]]]:
    """List the targets of every spec (None: its own noise), and if there are several the changed field that names each."""
    if len(targets) > 1:
        return [(target, {"target": target}) for target in map(float, targets)]
    return [(next(iter(targets), None), {})]


_RECORD_FIELDS = ("source", "schema", "label", "positive", "test_fraction", "scale", "intercept", "seed")
"""Fields of `data` that choose the records and hold some of them out; their distribution and order may differ."""


def _require_same_records(data: DataSpec, first: DataSpec) -> None:
    """Require the same records, learned and held out, as in the first spec.

    Raises:
        SpecError: A field of `data` differs.
    """
    for field in _RECORD_FIELDS:
        if (received := getattr(data, field)) != (wanted := getattr(first, field)):
            raise SpecError(f"data.{field} must be that of the first spec, {wanted!r}, got {received!r}")


def simulate_and_measure(
    name: str,
    experiment: Experiment,
    replicas: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, rounds: None,
    *,
    changes: Mapping[str, Any] | None = None,
    metrics: Sequence[str] | None = None,
    checkpoints: int | Sequence[int] = CHECKPOINTS,
) -> Result:
    """Simulate and measure one run with these `changes`; call `progress` with the completed rounds and all rounds."""
    run, data = experiment.run, experiment.records
    measured = Metrics(run, data, metrics=metrics, checkpoints=checkpoints)
    rounds, seconds = simulate_rounds(run, data, SeededNoise(seed), replicas), 0.0
    with limit_blas_threads():
        while True:
            began = time.perf_counter()
            step = next(rounds, None)
            seconds += time.perf_counter() - began
            if step is None:
                break
            measured.add_round(step)
            progress(step.t + 1, run.spec.rounds)
    rate = replicas * run.spec.rounds / seconds
    return Result(collect_facts(experiment.prepared_run, name, changes, rounds_per_s=rate), measured.curves)


# ---- output ----------------------------------------------------------------------------------------------------------


def _list_shown_metrics(results: Results) -> list[str]:
    """List the metrics of the table: all if few were measured; else those of `HEADS`, and those that are no default."""
    measured = list(dict.fromkeys(name for each in results.runs for name in each.curves.curves))
    if len(measured) <= _MAX_SHOWN_METRICS:
        return measured
    return [name for name in measured if name in _METRIC_OF_HEAD.values() or name not in DEFAULT_METRICS]


def _list_columns(results: Results) -> tuple[str, ...]:
    """List the columns: those of `HEADS` without metrics that were not measured, and one for each other metric."""
    shown = _list_shown_metrics(results)
    usual = [head for head in HEADS if head not in _METRIC_OF_HEAD or _METRIC_OF_HEAD[head] in shown]
    others = [_format_metric(name) for name in shown if name not in _METRIC_OF_HEAD.values()]
    place = usual.index("floats sent")
    return (*usual[:place], *others, *usual[place:])


def _format_metric(name: str) -> str:
    return name.replace("_", " ")


def _list_heads(results: Results) -> tuple[str, ...]:
    """Return the heads of the columns, with the delta of the epsilons."""
    deltas = {each.facts.delta for each in results.runs}
    columns = _list_columns(results)
    if deltas == {0.0}:
        return columns
    at_delta = f", delta {deltas.pop():g}" if len(deltas) == 1 else ", at the spec's delta"
    return tuple(head + at_delta * (head in _TIGHT) for head in columns)


def _rows(results: Results) -> list[tuple[str, ...]]:
    columns = _list_columns(results)
    return [_row(each, columns) for each in results.runs]


def _row(result: Result, columns: Sequence[str]) -> tuple[str, ...]:
    facts = result.facts
    regret = _final(result, "static_regret", 1.0 / (float(result.curves.rounds_with_records[-1]) or math.nan))
    cells = {
        "spec": facts.spec,
        "algorithm": facts.algorithm,
        "threat model": facts.threat_model or MISSING_VALUE,
        "ε, paper": format_number(facts.epsilon_paper),
        "ε per record use": format_number(facts.epsilon_record_use),
        "ε per record": format_number(facts.epsilon_record),
        **{_format_metric(name): _final(result, name) for name in METRICS},
        "regret per round": regret,
        "floats sent": format_count(facts.floats),
        "rounds/s": format_number(facts.rounds_per_s, 3),
    }
    return tuple(cells[head] for head in columns)


def _final(result: Result, name: str, factor: float = 1.0) -> str:
    if name not in result.curves:
        return MISSING_VALUE
    curve = result.curves[name]
    return format_with_error(factor * curve.final_mean, factor * curve.final_error)


def _print_table(results: Results, console: Console) -> None:
    columns, heads = _list_columns(results), _list_heads(results)
    optional_columns = [heads[columns.index(head)] for head in _OPTIONAL_COLUMNS if head in columns]
    table, left_out = terminal.fit_table(
        console.width,
        heads,
        _rows(results),
        right_aligned=heads[_TEXT_COLUMN_COUNT:],
        optional_columns=optional_columns,
    )
    console.print(table)
    if left_out:
        console.out(f"a wider terminal shows {'; '.join(left_out)}, too; so does compare.html", highlight=False)


def format_markdown(results: Results) -> str:
    """Format the table as Markdown."""
    rule = ["---"] * _TEXT_COLUMN_COUNT + ["---:"] * (len(_list_columns(results)) - _TEXT_COLUMN_COUNT)
    rows = [
        _list_heads(results),
        rule,
        *([escape_control(cell).replace("|", "\\|") for cell in row] for row in _rows(results)),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def make_compare_page(results: Results) -> Page:
    """Build the page: accuracy over epsilon, the table, and one figure per metric with a line per spec."""
    trade, figures = _plot_over_epsilon(results), _figures(results)
    plain, heads, rows = _list_columns(results), _list_heads(results), _rows(results)

    def tabulate(name: str, title: str, kept: Sequence[int]) -> PageTable:
        columns = [PageColumn(heads[k], kind="text" if k < _TEXT_COLUMN_COUNT else "number") for k in kept]
        return PageTable(name, title, columns, [[row[k] for k in kept] for row in rows])

    asked = [k for k, head in enumerate(plain) if head in _ASKED_FIRST]
    tables = (
        tabulate("results", "Algorithms side by side", asked),
        tabulate("results-in-full", "Algorithms side by side, all columns", range(len(plain))),
    )
    unbounded = [each.facts.spec for each in results.runs if not math.isfinite(each.facts.epsilon_record_use)]
    has_bands = any(np.isfinite(curve.error).any() for each in results.runs for curve in each.curves.curves.values())
    values = {"trade": trade, "figures": figures, "unbounded": unbounded, "banded": has_bands}
    return Page("compare.html.j2", [*tables, *figures, trade], values)


def _plot_over_epsilon(results: Results) -> Figure:
    """Plot the final accuracy, or else the loss, over epsilon.

    There is a line per algorithm, or per spec with several targets; and a point per algorithm with one epsilon.

    A dashed line shows the best result without a finite epsilon. Empty with less than two points.
    """
    title = "Accuracy over ε"
    plots = [each for each in _PLOTS if all(each[0] in run.curves for run in results.runs)]
    finite = [each for each in results.runs if math.isfinite(each.facts.epsilon_record_use)]
    if not plots or len(finite) < 2:
        return Figure("over-epsilon", title, (), ())
    metric, words, form = next((each for each in plots if each[0] == "accuracy"), plots[0])
    groups: dict[str, list[Result]] = {}
    for run in sorted(finite, key=lambda each: each.facts.epsilon_record_use):
        groups.setdefault(run.facts.spec if run.facts.changes else run.facts.algorithm, []).append(run)
    lines = []
    for group, runs in groups.items():
        x = as_floats([each.facts.epsilon_record_use for each in runs])
        if x[-1] > _MIN_EPSILON_RATIO * x[0]:
            lines.append((group, make_final_line(x, [each.curves for each in runs], metric, is_curve=True)))
        else:
            points = [make_final_line(x[:1], [each.curves], metric, is_curve=False) for each in runs]
            lines += [(each.facts.spec, point) for each, point in zip(runs, points, strict=True)]
    name = f"{words[:1].upper()}{words[1:]} over ε"
    figure = make_figure("over-epsilon", words, lines, EPSILON_TITLE, form=form)
    unbounded = [each for each in results.runs if each not in finite]
    if not unbounded or figure.panels:
        return replace(figure, title=name)
    best = (max if form == "share" else min)(unbounded, key=lambda each: each.curves[metric].final_mean)
    level, across = best.curves[metric].final_mean, [each.facts.epsilon_record_use for each in finite]
    line = make_reference_line([min(across), max(across)], [level, level], f"{best.facts.spec}, no finite ε")
    return replace(figure, title=name, marks=[*figure.marks, line])


def _figures(results: Results) -> list[Figure]:
    named = [(f"{each.facts.spec} {each.facts.setting}".strip(), each.curves) for each in results.runs]
    return [
        make_figure(
            metric.replace("_", "-"),
            title,
            [(name, make_curve_line(curves, metric) if metric in curves else None) for name, curves in named],
            "rounds",
            form=form,
        )
        for metric, title, form in _list_plots(results)
    ]


def _list_plots(results: Results) -> list[tuple[str, str, Literal["number", "share"]]]:
    """List the plots of measured metrics: those of `_PLOTS`, and of every column that `HEADS` lacks."""
    shown = _list_shown_metrics(results)
    usual = [plot for plot in _PLOTS if any(plot[0] in each.curves for each in results.runs)]
    known = {*_METRIC_OF_HEAD.values(), *(metric for metric, *_ in usual)}
    return usual + [
        (name, name_metric(name), "share" if is_share(name) else "number") for name in shown if name not in known
    ]


def compare(
    experiments: Mapping[str, Experiment | Path | str] | Sequence[Experiment | Path | str],
    replicas: int = 10,
    seed: int = 0,
    *,
    target: float | Sequence[float] | None = None,
    delta: float = 0.0,
    tune: Mapping[str, Sequence[Any]] | None = None,
    metrics: Sequence[str] | None = None,
    checkpoints: int | Sequence[int] = CHECKPOINTS,
) -> Results:
    """Simulate several experiments that hold out the same records, and return their results side by side.

    Args:
        experiments: Mapping from name to experiment; or a list, each under its own name. Paths are those of spec files.
        replicas: Repetitions of each, which differ in their noise alone.
        seed: Seed of the noise, the same for each.
        target: Epsilon of one use of a record to which the noise of each experiment is calibrated; several: each experiment is
            calibrated to each of them. None: as it is.
        delta: Delta of the target and of the epsilons in the results (0: that of each experiment).
        tune: Values of fields of which each experiment gets the best ones, as tuned on the held-out records, which are public;
            fields that it does not have are left out.
        metrics: Names of metrics to compute (docs/reference/metrics.md). Default: losses, regrets, agreement and accuracy.
        checkpoints: Numbers of rounds after which to measure; or how many, evenly spread on a logarithmic scale up to the last.

    Returns:
        A run per experiment, and per target if there are several.
        `summary()` has a row for each run and metric; `runs[k].facts` has the guarantee of the k-th.

    Raises:
        SpecError: Names are not unique, records differ, or an experiment cannot be run or measured.
        DataError: The data cannot be used.
        InterruptedSimulation: Ctrl-C after the first experiment; its `results` have the complete ones.

    >>> from sottovoce_core.experiment import Experiment
    >>> noisy = Experiment(rounds=5, learners=3, algorithm={"name": "ldp-dol", "sigma": 4.0})
    >>> results = compare({"noisy": noisy, "precise": noisy.replace(**{"algorithm.sigma": 1.0})}, replicas=2)
    >>> [(run.facts.spec, round(run.facts.epsilon_record_use, 2)) for run in results.runs]
    [('noisy', 11.22), ('precise', 44.9)]
    """
    require_count("replicas", replicas)
    if isinstance(experiments, Mapping):
        named = [(name, resolve_experiment(each)) for name, each in experiments.items()]
    else:
        named = [(each.name, each) for each in map(resolve_experiment, experiments)]
    names = [name for name, _ in named]
    if not names or len(set(names)) < len(names):
        raise SpecError(
            f"experiments to compare must have different names, got {', '.join(names) or 'none'}: give them as a mapping by name"
        )
    for _, each in named:
        _require_same_records(each.data, named[0][1].data)
    targets = [] if target is None else [target] if isinstance(target, int | float) else target
    planned = [
        (name, equalise(each, one, delta, tune, seed), changes)
        for name, each in named
        for one, changes in _list_targets(targets)
    ]
    for _, each, _ in planned:  # before the first is simulated
        select_metrics(each.run, each.records, metrics)
        resolve_checkpoints(each.rounds, checkpoints)
    runs: list[Result] = []
    try:
        for name, each, changes in planned:
            measured = simulate_and_measure(
                name, each, replicas, seed, changes=changes, metrics=metrics, checkpoints=checkpoints
            )
            runs.append(measured)
    except KeyboardInterrupt:
        if not runs:
            raise
        raise InterruptedSimulation(Results(tuple(runs))) from None
    return Results(tuple(runs))
