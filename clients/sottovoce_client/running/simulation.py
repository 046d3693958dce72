"""`sottovoce simulate`: the simulator's rounds as Parquet, and what they came to."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce.data.files import import_extra
from sottovoce.errors import SpecError
from sottovoce.noise import Noise, RecordedNoise, Recorder, SeededNoise
from sottovoce.running.metrics import Curves, Metrics
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import TranscriptWriter, read_noise
from sottovoce.spec import dump_spec
from sottovoce_client.documents import Document
from sottovoce_client.prepare import Prepared
from sottovoce_client.wording import number


def simulate_to(
    folder: Path,
    prepared: Prepared,
    *,
    replicas: int,
    seed: int,
    noise: Path | None,
    record_noise: bool,
    metrics: bool = False,
) -> None:
    """Simulate a run and write `spec.yaml`, `transcript.parquet`, `decisions.parquet` and, if asked, `noise.parquet`.

    Decisions are those in use when a round's records arrive; the last rows, of round `rounds`, are the final ones.
    With `metrics`, `metrics.parquet` and `metrics.json` are written, too, and the final values printed.
    """
    run = prepared.run
    recorder = Recorder(_noise(noise, seed, run.spec.rounds))
    measured = Metrics(run, prepared.data) if metrics else None
    (folder / "spec.yaml").write_text(dump_spec(run.spec), encoding="utf-8")
    with ExitStack() as files:
        said = files.enter_context(TranscriptWriter(folder / "transcript.parquet", run.spec.name))
        decided = files.enter_context(TranscriptWriter(folder / "decisions.parquet", run.spec.name))
        drawn = None
        if record_noise:
            drawn = files.enter_context(TranscriptWriter(folder / "noise.parquet", run.spec.name))
        after = None
        for step in simulate(run, prepared.data, recorder, replicas):
            for name, value in step.message.fields.items():
                said.write(step.t, name, value)
            decided.write(step.t, "decision", step.before)
            for name, values in recorder.drawn.items():
                if drawn is not None:
                    drawn.write(step.t, name, np.broadcast_to(values[-1], step.message[name].shape))
                values.clear()
            if measured is not None:
                measured.take(step)
            after = step.after
        if after is not None:
            decided.write(run.spec.rounds, "decision", after)
    print(f"{run.spec.rounds} rounds of {run.spec.n_learners} learners, {replicas} replicas: {folder}")
    if measured is not None:
        write_metrics(folder, measured.curves, run.spec.names)
        print_metrics(measured.curves)


def _noise(path: Path | None, seed: int, rounds: int) -> Noise:
    if path is None:
        return SeededNoise(seed)
    fields = read_noise(path)
    if short := [name for name, values in fields.items() if len(values) < rounds]:
        raise SpecError(f"{path}: noise must cover {rounds} rounds, and {short} does not")
    return RecordedNoise(fields)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def write_metrics(folder: Path, curves: Curves, names: tuple[str, ...]) -> None:
    """Write `metrics.parquet` (one row per number) and `metrics.json` (curves of the whole network).

    Columns: `rounds` done, `metric`, `learner` (null: the whole network), `mean` and `standard_error` (of the network's
    mean over the replicas; null for a learner, and where there is one replica).
    """
    arrow, parquet = (import_extra(f"pyarrow{part}", "pyarrow", "metrics.parquet") for part in ("", ".parquet"))
    rows: list[tuple[int, str, str | None, float, float | None]] = []
    for metric, curve in curves.curves.items():
        for k, rounds in enumerate(curves.rounds.tolist()):
            error = float(curve.error[k])
            rows.append((rounds, metric, None, float(curve.mean[k]), error if math.isfinite(error) else None))
            if curve.learners is not None:
                rows += [(rounds, metric, name, float(curve.learners[k, i]), None) for i, name in enumerate(names)]
    types = (arrow.int64(), arrow.string(), arrow.string(), arrow.float64(), arrow.float64())
    columns = ("rounds", "metric", "learner", "mean", "standard_error")
    arrays = [arrow.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    parquet.write_table(arrow.table(dict(zip(columns, arrays, strict=True))), folder / "metrics.parquet")
    MetricsFile(rounds=curves.rounds.tolist(), metrics=means(curves)).write(folder / "metrics.json")


class Mean(Document):
    """A number over the rounds."""

    mean: list[float]
    """Over learners and replicas."""
    standard_error: list[float]
    """Of that mean, by the spread over the replicas; null where there is one replica."""


class MetricsFile(Document):
    """`metrics.json`: the whole network's curves."""

    rounds: list[int]
    """Done, where it was measured."""
    metrics: dict[str, Mean]
    """By name."""


def means(curves: Curves) -> dict[str, Mean]:
    """The whole network's curves, by name."""
    return {
        name: Mean(mean=curve.mean.tolist(), standard_error=curve.error.tolist())
        for name, curve in curves.curves.items()
    }


def print_metrics(curves: Curves, console: Console | None = None) -> None:
    """The final values: a table on a terminal, else a line each."""
    console = console or Console()
    table = Table("metric", box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column(f"after {curves.rounds[-1]:,} rounds", justify="right")
    for name, curve in curves.curves.items():
        value = with_error(curve.final, curve.final_error)
        table.add_row(name.replace("_", " "), value)
        if not console.is_terminal:
            console.out(f"{name}: {value}", highlight=False)
    if console.is_terminal:
        console.print(table)


def with_error(value: float, error: float, digits: int = 4) -> str:
    """`0.1234 ± 0.0012`; the error only where there is one, beyond rounding."""
    if math.isnan(error) or error <= 1e-9 * abs(value):
        return number(value, digits)
    return f"{number(value, digits)} ± {number(error, 2)}"
