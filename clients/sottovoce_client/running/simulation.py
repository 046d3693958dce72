"""`sottovoce simulate`: the simulator's rounds as Parquet, and what they came to."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable

from sottovoce.door import Simulation, noise_of, simulate
from sottovoce.experiment import Experiment
from sottovoce.noise import Recorder
from sottovoce.running.metrics import Curves
from sottovoce.running.simulator import SimulatedRound
from sottovoce.running.transcript import TranscriptWriter, parquet
from sottovoce.spec import dump_spec
from sottovoce.table import Table
from sottovoce_client.documents import write_json
from sottovoce_client.wording import number


def simulate_to(
    folder: Path,
    experiment: Experiment,
    *,
    replicas: int,
    seed: int,
    noise: Path | None,
    record_noise: bool,
    metrics: bool = False,
) -> Simulation:
    """Simulate a run and write `spec.yaml`, `transcript.parquet`, `decisions.parquet` and, if asked, `noise.parquet`.

    Decisions are those in use when a round's records arrive; the last rows, of round `rounds`, are the final ones.
    With `metrics`, `metrics.parquet` and `metrics.json` are written, too, and the final values printed.
    """
    spec = experiment.run.spec
    recorder = Recorder(noise_of(noise, seed, spec.rounds))
    (folder / "spec.yaml").write_text(dump_spec(spec), encoding="utf-8")
    with ExitStack() as files:

        def writer(name: str) -> TranscriptWriter:
            return files.enter_context(TranscriptWriter(folder / f"{name}.parquet", spec.name))

        said, decided, drawn = writer("transcript"), writer("decisions"), writer("noise") if record_noise else None

        def write(step: SimulatedRound) -> None:
            for name, value in step.message.fields.items():
                said.write(step.t, name, value)
            decided.write(step.t, "decision", step.before)
            for name, values in recorder.drawn.items():
                if drawn is not None:
                    drawn.write(step.t, name, np.broadcast_to(values[-1], step.message[name].shape))
                values.clear()

        done = simulate(experiment, replicas, metrics=metrics, noise=recorder, progress=write)
        decided.write(spec.rounds, "decision", done.decisions)
    print(f"{spec.rounds} rounds of {spec.n_learners} learners, {replicas} replicas: {folder}")
    if done.curves is not None:
        write_table(done.metrics, folder / "metrics.parquet")
        write_json(folder / "metrics.json", means(done.curves))
        print_metrics(done.curves)
    return done


def write_table(table: Table, path: Path) -> None:
    """Write a Parquet file; what is missing is null.

    Raises:
        SpecError: pyarrow is not installed.
    """
    parquet().write_table(table.to_arrow(), path)


def means(curves: Curves) -> dict[str, Any]:
    """The whole network's curves for a file, by name: over learners and replicas.

    The standard error is by the spread over the replicas; null where there is one replica.
    """
    found = {name: {"mean": curve.mean, "standard_error": curve.error} for name, curve in curves.curves.items()}
    return {"rounds": curves.rounds, "metrics": found}  # done, where it was measured


def print_metrics(curves: Curves, console: Console | None = None) -> None:
    """The final values: a table on a terminal, else a line each."""
    console = console or Console()
    table = TerminalTable("metric", box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
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
