"""`sottovoce compare`: several specs on the same data, in the simulator, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.documents import write_json, write_text
from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.drawing import export as write_files
from sottovoce_client.reports.marks import PALETTE
from sottovoce_client.reports.page import Column, Page, PageTable
from sottovoce_client.running.plot import curve_line, figure_of, names_of
from sottovoce_client.running.simulation import means
from sottovoce_client.wording import NOTHING, count, number, with_error
from sottovoce_core.budget.composition import dearest_record, record_losses
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.experiment import Experiment, Prepared, experiment_of, require_count
from sottovoce_core.noise import SeededNoise
from sottovoce_core.privacy.guarantee import Guarantee, ThreatModel, overall
from sottovoce_core.running.metrics import Curves, Metrics
from sottovoce_core.running.simulator import simulate
from sottovoce_core.spec import RunSpec, load_spec, parse_spec
from sottovoce_core.table import Table
from sottovoce_core.text import plain
from sottovoce_core.yaml_files import parse_yaml

HEADS = (
    "spec",
    "algorithm",
    "threat model",
    "ε, paper",
    "ε per event",
    "ε per record",
    "accuracy",
    "average loss",
    "regret per round",
    "consensus error",
    "floats sent",
    "rounds/s",
)
_TEXTS = 3
"""So many columns are words, those after them numbers."""
_SPARE = (
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
"""Least needed first, where a terminal is narrow."""
_PLOTS: tuple[tuple[str, str, Literal["number", "share"]], ...] = (
    ("average_loss", "average network loss", "number"),
    ("accuracy", "accuracy on held-out records", "share"),
    ("tracking_error", "tracking error", "number"),
    ("consensus_error", "consensus error", "number"),
)
"""Metrics that are drawn: their names, what the page calls them, and how their values are written."""
_PAPER = ("spec", "algorithm", "ε per event", "ε per record", "accuracy", "average loss", "regret per round")
"""Columns that a paper has room for."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one spec came to.

    Attributes:
        source: its file, or its name in the field.
        algorithm: its name.
        threat_model: who may listen without the guarantee being void; a dash where it is void for everybody.
        paper: epsilon by the paper's own formula, of the learner with the largest; infinite: nothing is promised.
        event: tight, of one use of one record, likewise; the sum over the learners where they share their records.
        record: tight, of the record that costs most in all its uses.
        floats: numbers that a learner says in a round.
        rounds: of the run.
        rounds_per_s: replica-rounds a second, without what measuring took.
        curves: what was measured.
    """

    source: str
    algorithm: str
    threat_model: str
    paper: float
    event: float
    record: float
    floats: int
    rounds: int
    rounds_per_s: float
    curves: Curves


_Source = tuple[str, Callable[[], RunSpec]]
"""What a spec is called, and how to load it."""


def from_files(paths: Sequence[Path]) -> list[_Source]:
    """Specs that lie in files."""
    return [(str(path), partial(load_spec, path)) for path in paths]


def the_field() -> list[_Source]:
    """The specs of `field.yaml`: every algorithm on one problem."""
    document = parse_yaml(files("sottovoce_client.running").joinpath("field.yaml").read_text(encoding="utf-8"))
    specs = [{**document["common"], **each} for each in document["runs"]]
    return [(each["name"], partial(parse_spec, each, imports=True, source=each["name"])) for each in specs]


def compare_to(
    sources: Sequence[_Source],
    prepare: Callable[[RunSpec], Prepared],
    folder: Path,
    *,
    replicas: int,
    seed: int,
    export: Sequence[str] = (),
    console: Console | None = None,
) -> int:
    """Run all specs, print a table, and write `compare.json`, `compare.md` and `compare.html`, and files for papers.

    What cannot be run is said, and the others are run: the exit code is then 1; else 3 if the page or a file could not be made.

    Args:
        sources: the specs. They must hold the same records out.
        prepare: loads the data and checks the run.
        folder: where results are written.
        replicas: repetitions of each, which differ in their noise alone.
        seed: of the noise, the same for each.
        export: formats of files for papers.
        console: where the table is printed.
    """
    console = console or terminal.console()
    results, failures, first, code = [], [], None, 0
    for k, (source, load) in enumerate(sources, 1):
        try:
            spec = load()
            first = first or spec
            _require_same_records(spec.data, first.data)
            with terminal.bar(title := f"spec {k} of {len(sources)}, {source}") as say:
                told = partial(say, title, unit="rounds")
                results.append(result_of(source, prepare(spec), replicas, seed, told))
        except (SottovoceError, ArithmeticError, ValueError) as error:  # an algorithm of somebody else's may raise more
            failures.append((source, str(error)))
            console.out(f"{source}: {error}", highlight=False, style="red" if console.is_terminal else None)
    if results:
        _print_table(results, console) if console.is_terminal else console.out(_as_markdown(results), highlight=False)
        code = write_comparison(folder, results, failures, replicas, seed)
        console.out(f"{folder}: compare.json, compare.md{'' if code else ', compare.html'}", highlight=False)
        code = terminal.attempt("a file of --export", lambda: _export(folder, export, results, console)) or code
    return 1 if failures else code


def _export(folder: Path, formats: Sequence[str], results: Sequence[Result], console: Console) -> None:
    tables, short_ones = {"compare": table_of(results, _names(results))}, {"compare": _paper(results)}
    for path in write_files(folder, formats, tables, _figures(results), short_ones):
        console.out(str(path), highlight=False)


_SAME = ("source", "schema", "label", "positive", "test_fraction", "scale", "intercept", "seed")
"""Fields of `data` that choose the records and hold some of them out; who gets which, and when, may differ."""


def _require_same_records(data: DataSpec, first: DataSpec) -> None:
    """Refuse specs that learn from, or hold out, other records than the first one.

    Raises:
        SpecError: these do.
    """
    for field in _SAME:
        if (came := getattr(data, field)) != (wanted := getattr(first, field)):
            raise SpecError(f"data.{field} must be that of the first spec, {wanted!r}, got {came!r}")


def result_of(
    source: str,
    prepared: Prepared,
    replicas: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, rounds: None,
) -> Result:
    """Simulate and measure one run; `progress` is told how many of how many rounds are done."""
    run, data = prepared.run, prepared.data
    metrics, rounds, seconds = Metrics(run, data), simulate(run, data, SeededNoise(seed), replicas), 0.0
    while True:
        began = time.perf_counter()
        step = next(rounds, None)
        seconds += time.perf_counter() - began
        if step is None:
            break
        metrics.take(step)
        progress(step.t + 1, run.spec.rounds)
    events, records = [], []
    for i, own in enumerate(data.learners):
        counts = np.diff(own.offsets)
        events.append(run.guarantee(i, counts))
        losses = record_losses(run.algorithm.accountant(i), own, run.attendance(i).end)
        records.append(dearest_record(losses, events[-1].per_round))
    shared = events[0].shared
    return Result(
        source=source,
        algorithm=run.algorithm.name,
        threat_model=_safe_from(events[0]),
        paper=max(float(each.paper[-1]) for each in events),
        event=overall((each.epsilon() for each in events), shared=shared),
        record=overall(records, shared=shared),
        floats=sum(math.prod(shape) for shape in run.field_shapes.values()),
        rounds=run.spec.rounds,
        rounds_per_s=replicas * run.spec.rounds / seconds,
        curves=metrics.curves,
    )


def _safe_from(guarantee: Guarantee) -> str:
    if math.isfinite(guarantee.epsilon()):
        return guarantee.grounds.threat_model.value
    return NOTHING if guarantee.output is None else ThreatModel.OUTPUT.value


# ---- showing ---------------------------------------------------------------------------------------------------------


def _names(results: Sequence[Result]) -> list[str]:
    return names_of([result.source for result in results])


def _rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    return [_row(result, name) for result, name in zip(results, _names(results), strict=True)]


def _row(result: Result, name: str) -> tuple[str, ...]:
    regret = _final(result, "static_regret", 1.0 / (float(result.curves.with_records[-1]) or math.nan))
    return (
        name,
        result.algorithm,
        result.threat_model,
        number(result.paper),
        number(result.event),
        number(result.record),
        _final(result, "accuracy"),
        _final(result, "average_loss"),
        regret,
        _final(result, "consensus_error"),
        count(result.floats),
        number(result.rounds_per_s, 3),
    )


def _final(result: Result, name: str, factor: float = 1.0) -> str:
    if name not in result.curves:
        return NOTHING
    curve = result.curves[name]
    return with_error(factor * curve.final, factor * curve.final_error)


def _print_table(results: Sequence[Result], console: Console) -> None:
    table, left_out = terminal.fitted(console.width, HEADS, _rows(results), right=HEADS[_TEXTS:], spare=_SPARE)
    console.print(table)
    if left_out:
        console.out(f"a wider terminal shows {'; '.join(left_out)}, too; so does compare.html", highlight=False)


def _as_markdown(results: Sequence[Result]) -> str:
    """The table for a page of documentation."""
    rule = ["---"] * _TEXTS + ["---:"] * (len(HEADS) - _TEXTS)
    rows = [HEADS, rule, *([plain(cell).replace("|", "\\|") for cell in row] for row in _rows(results))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---- files -----------------------------------------------------------------------------------------------------------


def write_comparison(
    folder: Path, results: Sequence[Result], failures: Sequence[tuple[str, str]], replicas: int, seed: int
) -> int:
    """Write `compare.json`, `compare.md` and `compare.html`; returns the exit code."""
    document = {
        "replicas": replicas,
        "seed": seed,
        "results": [_document(result) for result in results],
        "failures": [{"spec": source, "error": error} for source, error in failures],
    }
    write_json(folder / "compare.json", document)
    write_text(folder / "compare.md", _as_markdown(results) + "\n")
    page = folder / "compare.html"
    return terminal.attempt(str(page), lambda: compare_page(results).write(page))


def _document(result: Result) -> dict[str, Any]:
    """What one spec came to; an epsilon of null is infinite."""
    return {
        "spec": result.source,
        "algorithm": result.algorithm,
        "threat_model": result.threat_model,
        "epsilon_paper": result.paper,
        "epsilon_event": result.event,
        "epsilon_record": result.record,
        "floats_per_learner_and_round": result.floats,
        "replica_rounds_per_s": result.rounds_per_s,
        **means(result.curves),
    }


def compare_page(results: Sequence[Result]) -> Page:
    """The table, and one figure per metric, a line per spec."""
    figures = _figures(results)
    columns = [Column(head, kind="text" if k < _TEXTS else "number") for k, head in enumerate(HEADS)]
    table = PageTable("results", "Algorithms side by side", columns, _rows(results))
    return Page("compare.html.j2", [table, *figures], {"figures": figures, "banded": len(results) <= len(PALETTE)})


def _figures(results: Sequence[Result]) -> list[Figure]:
    names = _names(results)
    return [
        figure_of(
            metric.replace("_", "-"),
            title,
            [
                (name, curve_line(result.curves.rounds, result.curves[metric]) if metric in result.curves else None)
                for name, result in zip(names, results, strict=True)
            ],
            "rounds",
            form=form,
        )
        for metric, title, form in _PLOTS
    ]


def table_of(results: Sequence[Result], names: Sequence[str]) -> Table:
    """All numbers, a row for each spec: of metrics the last values and their standard errors."""
    metrics = dict.fromkeys(name for result in results for name in result.curves.curves)
    rows = []
    for result, name in zip(results, names, strict=True):
        curves = [result.curves.curves.get(each) for each in metrics]
        ends = [(math.nan, math.nan) if each is None else (each.final, each.final_error) for each in curves]
        promised = (result.threat_model, result.paper, result.event, result.record)
        rows.append((name, result.algorithm, *promised, result.floats, result.rounds, *chain.from_iterable(ends)))
    heads = (
        "spec",
        "algorithm",
        "threat_model",
        "epsilon_paper",
        "epsilon_event",
        "epsilon_record",
        "floats",
        "rounds",
    )
    return Table.of((*heads, *(f"{each}{more}" for each in metrics for more in ("", "_standard_error"))), rows)


def _paper(results: Sequence[Result]) -> Table:
    """The columns of the table on the screen that a paper has room for, as they are there."""
    kept = [HEADS.index(head) for head in _PAPER]
    return Table.of(_PAPER, [[row[k] for k in kept] for row in _rows(results)])


def compare(
    experiments: Mapping[str, Experiment | Path | str] | Sequence[Experiment | Path | str],
    replicas: int = 10,
    seed: int = 0,
) -> Table:
    """Simulate several experiments that hold the same records out, and put what they came to side by side.

    Args:
        experiments: by what they are called; or a list, each called by its own name. Paths are those of spec files.
        replicas: repetitions of each, which differ in their noise alone.
        seed: of the noise, the same for each.

    Returns:
        One row per experiment: `spec`, `algorithm`, `threat_model`, `epsilon_paper`, `epsilon_event`, `epsilon_record` (as
        `sottovoce compare` has them), `floats` that a learner says in a round, `rounds`, and each metric after the last round
        with its standard error.

    Raises:
        SpecError: names are not different, records are not the same, or one cannot be run as it is.
        DataError: the data cannot be used.

    >>> from sottovoce_core.experiment import Experiment
    >>> loud = Experiment(rounds=5, learners=3, algorithm={"name": "ldp-dol", "sigma": 4.0})
    >>> table = compare({"loud": loud, "quiet": loud.replace(**{"algorithm.sigma": 1.0})}, replicas=2)
    >>> table["spec"].tolist(), bool(table["epsilon_event"][0] < table["epsilon_event"][1])
    (['loud', 'quiet'], True)
    """
    require_count("replicas", replicas)
    if isinstance(experiments, Mapping):
        named = [(name, experiment_of(each)) for name, each in experiments.items()]
    else:
        named = [(each.name, each) for each in map(experiment_of, experiments)]
    names = [name for name, _ in named]
    if not names or len(set(names)) < len(names):
        raise SpecError(
            f"experiments to compare must have different names, got {', '.join(names) or 'none'}: give them as a mapping by name"
        )
    for _, each in named:
        _require_same_records(each.data, named[0][1].data)
    return table_of([result_of(name, each.prepared, replicas, seed) for name, each in named], names)
