"""Results of simulations: one table with a number a row, and the facts about every run in it.

`simulate`, `sweep` and `compare` write the same two files. `results.parquet` has the columns `COLUMNS`. `results.json` has what
a table of numbers cannot hold: of every run its spec, its algorithm and its guarantee.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, TypeAdapter
from pydantic_core import to_json

from sottovoce_core.arrays import FloatArray, IntArray, summarize_fields
from sottovoce_core.budget.cost import LearnerCost, combine_costs
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.runs.transcript import import_parquet
from sottovoce_core.spec import describe_spec
from sottovoce_core.table import Table
from sottovoce_core.text import abbreviate_names

COLUMNS = ("spec", "setting", "seed", "round", "learner", "metric", "value")
"""Columns of the table of results, here and in `results.parquet`."""
RESULT_FILE_NAMES = ("results.parquet", "results.json")

_RESAMPLES = 10_000
"""Number of bootstrap resamples: enough that the ends of an interval hardly depend on the seed."""
_LEVEL = 0.95

_Epsilon = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
"""Epsilon in JSON, where null means infinite."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Description of a simulated run, without its measurements.

    Attributes:
        spec: name of the spec among the results.
        changes: fields that a sweep changed, and their values here.
        algorithm: name of the algorithm.
        threat_model: adversaries that the guarantee covers; None: none.
        epsilon_paper: by the paper's own formula, largest over the learners; infinite: no guarantee.
        epsilon_record_use: tight, of one use of one record, likewise; of all learners where they share their records.
        epsilon_record: tight, of the record that costs most in all its uses.
        delta: delta of both tight epsilons, that of the spec's `privacy`; 0: they are pure.
        floats: numbers in the message of a round.
        rounds: number of rounds of the run.
        learners: names of the learners.
        spec_yaml: the whole spec.
        rounds_per_s: replica-rounds a second of the simulator, without measuring; None: not known.
    """

    spec: str
    changes: Mapping[str, Any]
    algorithm: str
    threat_model: str | None
    epsilon_paper: _Epsilon
    epsilon_record_use: _Epsilon
    epsilon_record: _Epsilon
    floats: int
    rounds: int
    learners: tuple[str, ...]
    spec_yaml: str
    rounds_per_s: float | None = None
    delta: float = 0.0

    __repr__ = summarize_fields

    @property
    def setting(self) -> str:
        """Changes as text: `algorithm.sigma=2, topology.graph=ring`."""
        return ", ".join(f"{field}={value}" for field, value in self.changes.items())


def collect_facts(
    prepared: PreparedRun, spec: str, changes: Mapping[str, Any] | None = None, rounds_per_s: float | None = None
) -> Facts:
    """Collect the facts about a run; values of `changes` that are sections become text."""
    run, data = prepared.run, prepared.data
    costs = [LearnerCost(run, i, own) for i, own in enumerate(data.learners)]
    guarantees = [each.guarantee for each in costs]
    first, threat = guarantees[0], None
    if math.isfinite(first.epsilon()):
        threat = first.basis.threat_model.value
    elif first.output_epsilon is not None:
        threat = ThreatModel.OUTPUT.value
    return Facts(
        spec=spec,
        changes={
            field: value if value is None or isinstance(value, int | float | str) else str(value)
            for field, value in (changes or {}).items()
        },
        algorithm=run.algorithm.name,
        threat_model=threat,
        epsilon_paper=max(float(each.paper_epsilon[-1]) for each in guarantees),
        epsilon_record_use=combine_costs(costs, "record_use", run.spec.privacy.delta),
        epsilon_record=combine_costs(costs, "record", run.spec.privacy.delta),
        floats=sum(math.prod(shape) for shape in run.field_shapes.values()),
        rounds=run.spec.rounds,
        learners=run.spec.names,
        spec_yaml=describe_spec(run.spec),
        rounds_per_s=rounds_per_s,
        delta=run.spec.privacy.delta,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Simulated run with its measurements."""

    facts: Facts
    curves: Curves

    def __repr__(self) -> str:
        named = f"{self.facts.spec} {self.facts.setting}".strip()
        metrics = abbreviate_names([*self.curves.curves])
        return f"Result of {named!r}: {self.facts.algorithm}, epsilon {self.facts.epsilon_record_use:.4g}, {metrics}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Results:
    """Simulated runs, in order; no two have the same spec and setting."""

    runs: tuple[Result, ...]

    @property
    def metrics(self) -> Table:
        """Table with `COLUMNS`, one number a row.

        `setting` is empty where nothing was varied; `round` is the number of rounds done. Learner None is the mean over the
        network, and has a row for every seed, which counts replicas from 0. The row of a single learner is its mean over the
        seeds, and its seed is missing: a number for every learner and seed would make the table as many times as large.
        """
        parts = [part for result in self.runs for part in _iterate_columns(result)]
        if not parts:
            return Table.from_rows(COLUMNS, [])
        return Table({name: np.concatenate([part[k] for part in parts]) for k, name in enumerate(COLUMNS)})

    def summary(self, *, every_round: bool = False) -> Table:
        """Summarise each run and metric in a row: means over the seeds after the last round, or after every measured round.

        Returns:
            `spec`, the changed fields, `round`, `metric`, `mean` over learners and seeds, its `standard_error` by the spread over
            the seeds, `low` and `high` of its 95 % interval (percentile bootstrap, 10,000 resamples), `epsilon` of one use of a
            record, and the number of `seeds`. Errors and intervals of one seed are not-a-number.
        """
        fields = tuple(dict.fromkeys(field for each in self.runs for field in each.facts.changes))
        rows = []
        first = 0 if every_round else -1
        for each in self.runs:
            lead = (each.facts.spec, *(each.facts.changes.get(field) for field in fields))
            for metric, curve in each.curves.curves.items():
                ends = compute_bootstrap_intervals(curve.replicas[first:])
                found = zip(
                    each.curves.rounds[first:].tolist(), curve.mean[first:], curve.error[first:], *ends, strict=True
                )
                seeds = curve.replicas.shape[1]
                rows += [
                    (*lead, done, metric, *map(float, of), each.facts.epsilon_record_use, seeds) for done, *of in found
                ]
        return Table.from_rows(
            ("spec", *fields, "round", "metric", "mean", "standard_error", "low", "high", "epsilon", "seeds"), rows
        )

    def count_rounds_until(self, metric: str, threshold: float) -> Table:
        """Count the rounds until a metric reaches a threshold, for each run and seed.

        An accuracy reaches it from below, every other metric from above, by the mean over the learners.

        Args:
            metric: name of a measured metric.
            threshold: value to reach.

        Returns:
            `spec`, the changed fields, `seed`, and `rounds`: the first checkpoint at which it is reached; not-a-number: none.

        Raises:
            SpecError: the metric was not measured.

        >>> from sottovoce_core.api import simulate
        >>> from sottovoce_core.experiment import Experiment
        >>> done = simulate(Experiment(rounds=9, algorithm="ldp-dol"), 2, metrics=["consensus_error"], checkpoints=9)
        >>> done.results.count_rounds_until("consensus_error", 100.0)["rounds"]
        array([1., 1.])
        """
        fields = tuple(dict.fromkeys(field for each in self.runs for field in each.facts.changes))
        rows = []
        for each in self.runs:
            lead = (each.facts.spec, *(each.facts.changes.get(field) for field in fields))
            counts = each.curves.count_rounds_until(metric, threshold).tolist()
            rows += [(*lead, seed, count) for seed, count in enumerate(counts)]
        return Table.from_rows(("spec", *fields, "seed", "rounds"), rows)

    def __repr__(self) -> str:
        return repr(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def write(self, folder: Path, **more: Any) -> None:
        """Write `results.parquet` and `results.json`; a file that is not complete yet is called NAME.partial.

        Args:
            folder: that they are written to.
            more: further entries of `results.json`.

        Raises:
            SpecError: pyarrow is not installed.
        """
        table, (numbers, facts) = self.metrics.to_arrow(), (folder / name for name in RESULT_FILE_NAMES)
        place = table.column_names.index("seed")
        table = table.set_column(place, "seed", table.column("seed").cast("int64"))
        runs = [
            {**asdict(each.facts), "rounds_with_records": each.curves.rounds_with_records.tolist()}
            for each in self.runs
        ]
        document = to_json({"version": version("sottovoce"), **more, "runs": runs}, indent=2, inf_nan_mode="null")
        for path in (numbers, facts):
            draft = path.with_name(f"{path.name}.partial")
            draft.write_bytes(document + b"\n") if path == facts else import_parquet().write_table(table, draft)
            draft.replace(path)


class InterruptedSimulation(KeyboardInterrupt):
    """Ctrl-C during simulations, with the results until then.

    Attributes:
        results: of one simulation, the checkpoints until then; of several, the simulations that were complete. Epsilons are those
            of the whole runs.
    """

    def __init__(self, results: Results) -> None:
        super().__init__("simulations were interrupted; `results` has what was complete")
        self.results = results


def _iterate_columns(result: Result) -> Iterator[tuple[Any, ...]]:
    """Yield the columns of the rows of a run, for each metric: of the network, then of its learners."""
    facts, rounds = result.facts, result.curves.rounds
    for metric, curve in result.curves.curves.items():
        seeds = np.arange(curve.replicas.shape[1], dtype=np.float64)
        yield _build_columns(facts, metric, rounds, seeds, np.array([None]), curve.replicas)
        if curve.learners is not None:
            yield _build_columns(
                facts, metric, rounds, np.array([math.nan]), np.array(facts.learners, object), curve.learners
            )


def _build_columns(
    facts: Facts, metric: str, rounds: IntArray, seeds: FloatArray, learners: Any, values: FloatArray
) -> tuple[Any, ...]:
    """Return the columns for `values (rounds, seeds or learners)`."""
    many = values.shape[1]
    spec, setting, name = (np.full(values.size, text, object) for text in (facts.spec, facts.setting, metric))
    of_seed, of_learner = (np.tile(np.resize(each, many), len(rounds)) for each in (seeds, learners))
    return spec, setting, of_seed, np.repeat(rounds, many), of_learner, name, values.ravel()


def compute_bootstrap_intervals(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute the ends of 95 % percentile-bootstrap intervals of the means of `values (rows, seeds)`.

    Not-a-number for one seed. Efron & Tibshirani 1993, section 13.3.
    All rows are resampled alike, so that they do not depend on one another.
    """
    rows, n = values.shape
    if n < 2:
        return np.full(rows, math.nan), np.full(rows, math.nan)
    drawn = np.random.default_rng(0).integers(n, size=(_RESAMPLES, n))
    with np.errstate(invalid="ignore"):  # infinite values have no interval
        ends = [np.quantile(row[drawn].mean(axis=1), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]) for row in values]
    low, high = np.array(ends).T
    return low, high


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_results(path: Path | str) -> Results:
    """Read results of `simulate`, `sweep` or `compare`: from a folder, or from the `results.parquet` in it.

    Raises:
        CaptureError: there are none, or they cannot be read.
        SpecError: the file is of another kind, or pyarrow is not installed.

    >>> import tempfile
    >>> from sottovoce_core.api import simulate
    >>> from sottovoce_core.experiment import Experiment
    >>> done = simulate(Experiment(rounds=5, learners=3, algorithm="ldp-dol"), replicas=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done.results.write(Path(folder))
    ...     read_results(folder).metrics.where(metric="accuracy", learner=None, round=5)["seed"]
    array([0., 1.])
    """
    path = Path(path)
    if path.is_dir() and not (path / RESULT_FILE_NAMES[0]).is_file():
        raise CaptureError(
            f"{path} must hold a results.parquet, which `sottovoce simulate --write metrics`, `sweep` and `compare` write"
        )
    file = path / RESULT_FILE_NAMES[0] if path.is_dir() else path
    if not file.is_file():
        raise CaptureError(
            f"cannot read the results {path}: it must be a results.parquet that exists, or a folder with one"
        )
    if file.suffix != ".parquet":
        raise SpecError(
            f"results must be read from results.parquet or its folder, not from an exported table, got {path}"
        )
    try:
        arrow = import_parquet().ParquetFile(file).read()
        if tuple(arrow.column_names) != COLUMNS:
            raise ValueError(f"its columns must be {', '.join(COLUMNS)}, got {', '.join(arrow.column_names)}")
        document = json.loads(file.with_name(RESULT_FILE_NAMES[1]).read_text(encoding="utf-8"))
        found = _group_rows([arrow.column(name).to_pylist() for name in COLUMNS])
        runs = [_build_result(each, found) for each in document["runs"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # pyarrow's own are of these kinds
        raise CaptureError(f"cannot read the results {path}: {error}") from None
    return Results(tuple(runs))


_FACTS = TypeAdapter(Facts)
_Rows = dict[tuple[str, str], dict[str, list[tuple[Any, ...]]]]
"""Rows (seed, round, learner, value) by spec and setting, and by metric."""


def _group_rows(columns: Sequence[Sequence[Any]]) -> _Rows:
    found: _Rows = {}
    for spec, setting, seed, done, learner, metric, value in zip(*columns, strict=True):
        number = math.nan if value is None else float(value)
        found.setdefault((spec, setting), {}).setdefault(metric, []).append((seed, done, learner, number))
    return found


def _build_result(document: Mapping[str, Any], found: _Rows) -> Result:
    facts = _FACTS.validate_python(document)
    rows = found[facts.spec, facts.setting]
    rounds = sorted({done for of_metric in rows.values() for _, done, *_ in of_metric})
    curves = {metric: _build_curve(of_metric, rounds, facts.learners) for metric, of_metric in rows.items()}
    with_records = np.array(document["rounds_with_records"], dtype=np.float64)
    return Result(facts, Curves(np.array(rounds, dtype=np.int64), curves, with_records))


def _build_curve(rows: Sequence[tuple[Any, ...]], rounds: Sequence[int], learners: Sequence[str]) -> Curve:
    network = {(done, seed): value for seed, done, learner, value in rows if learner is None}
    each = {(done, learner): value for _, done, learner, value in rows if learner is not None}
    seeds = range(1 + max(seed for _, seed in network))
    replicas = np.array([[network[done, seed] for seed in seeds] for done in rounds])
    return Curve(replicas, np.array([[each[done, name] for name in learners] for done in rounds]) if each else None)
