"""`sottovoce simulate`: the simulator's rounds as Parquet."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from sottovoce.errors import SpecError
from sottovoce.machine import Noise
from sottovoce.noise import RecordedNoise, Recorder, SeededNoise
from sottovoce.simulator import simulate
from sottovoce.spec import dump_spec
from sottovoce.transcript import TranscriptWriter, read_noise
from sottovoce_client.prepare import Prepared


def simulate_to(
    folder: Path, prepared: Prepared, *, replicas: int, seed: int, noise: Path | None, record_noise: bool
) -> None:
    """Simulate a run and write `spec.yaml`, `transcript.parquet`, `decisions.parquet` and, if asked, `noise.parquet`.

    Decisions are those in use when a round's records arrive; the last rows, of round `rounds`, are the final ones.
    """
    run = prepared.run
    recorder = Recorder(_noise(noise, seed, run.spec.rounds))
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
            after = step.after
        if after is not None:
            decided.write(run.spec.rounds, "decision", after)
    print(f"{run.spec.rounds} rounds of {run.spec.n_learners} learners, {replicas} replicas: {folder}")


def _noise(path: Path | None, seed: int, rounds: int) -> Noise:
    if path is None:
        return SeededNoise(seed)
    fields = read_noise(path)
    if short := [name for name, values in fields.items() if len(values) < rounds]:
        raise SpecError(f"{path}: noise must cover {rounds} rounds, and {short} does not")
    return RecordedNoise(fields)
