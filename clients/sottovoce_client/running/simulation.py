"""`sottovoce simulate`: the simulator's rounds as Parquet, and what they came to."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from sottovoce.door import Simulation, noise_of, simulate
from sottovoce.experiment import Experiment
from sottovoce.noise import RecordedNoise, Recorder
from sottovoce.running.metrics import Curves
from sottovoce.running.simulator import SimulatedRound
from sottovoce.running.transcript import TranscriptWriter, parquet
from sottovoce.spec import dump_spec
from sottovoce.table import Table
from sottovoce_client import terminal
from sottovoce_client.documents import write_json
from sottovoce_client.wording import with_error


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
    source = noise_of(noise, seed, experiment.run)
    recorder = Recorder(source) if record_noise else None
    (folder / "spec.yaml").write_text(dump_spec(spec, folder), encoding="utf-8")
    with ExitStack() as files:

        def writer(name: str) -> TranscriptWriter:
            return files.enter_context(TranscriptWriter(folder / f"{name}.parquet", spec.name))

        said, decided = writer("transcript"), writer("decisions")
        drawn = None if recorder is None else NoiseWriter(writer("noise"), recorder)

        def write(step: SimulatedRound) -> None:
            for name, value in step.message.fields.items():
                said.write(step.t, name, value)
            decided.write(step.t, "decision", step.before)
            if drawn is not None:
                drawn.write(step)

        done = simulate(experiment, replicas, metrics=metrics, noise=recorder or source, progress=write)
        decided.write(spec.rounds, "decision", done.decisions)
    print(f"{spec.rounds} rounds of {spec.n_learners} learners, {replicas} replicas: {folder}")
    if isinstance(source, RecordedNoise) and source.left:
        own = ", ".join(sorted(source.drawn)) or "nothing"
        print(f"warning: {noise}: {', '.join(source.left)} was not used: this run draws {own}", file=sys.stderr)
    if done.curves is not None:
        write_table(done.metrics, folder / "metrics.parquet")
        write_json(folder / "metrics.json", means(done.curves))
        print_metrics(done.curves)
    return done


@dataclass(frozen=True, slots=True)
class NoiseWriter:
    """Writes what a recorder holds, round after round, and lets go of it.

    A field is a field of a draw, which need not be one of a message. It has zeros in the rounds without a draw, also in those
    before its first one: so the file has every round, and can be read back.
    """

    file: TranscriptWriter
    recorder: Recorder
    numbers: dict[str, int] = field(default_factory=dict)
    """Of a draw, by field: `dim`."""

    def write(self, step: SimulatedRound) -> None:
        """Write the noise of a round that has passed."""
        lead = step.before.shape[:2]
        for name, rounds in self.recorder.rounds.items():
            if name not in self.numbers:
                self.numbers[name] = rounds[step.t].shape[-1]
                for t in range(step.t):
                    self.file.write(t, name, np.zeros((*lead, self.numbers[name])))
            drawn = rounds.pop(step.t, np.zeros(1))
            self.file.write(step.t, name, np.broadcast_to(drawn, (*lead, self.numbers[name])))


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
    console = console or terminal.console()
    table = terminal.table("metric")
    table.add_column(f"after {curves.rounds[-1]:,} rounds", justify="right")
    for name, curve in curves.curves.items():
        value = with_error(curve.final, curve.final_error)
        table.add_row(name.replace("_", " "), value)
        if not console.is_terminal:
            console.out(f"{name}: {value}", highlight=False)
    if console.is_terminal:
        console.print(table)
