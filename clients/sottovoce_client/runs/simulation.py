"""`sottovoce simulate`: the simulator's rounds as Parquet, and what they came to."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_text
from sottovoce_client.formatting import format_bytes, format_number, format_with_error, pluralize
from sottovoce_core.api import Simulation, resolve_noise, simulate
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment
from sottovoce_core.noise import RecordedNoise, Recorder, SeededNoise
from sottovoce_core.results import Results
from sottovoce_core.runs.metrics import Curves
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound
from sottovoce_core.runs.simulator import simulate_rounds as rounds_of
from sottovoce_core.runs.transcript import TranscriptWriter
from sottovoce_core.spec import dump_spec

_LARGE_OUTPUT_BYTES = 10**8
"""Bytes from which on it is said before they are written how many there will be."""


def estimate_sizes(run: Run, replicas: int, write: Collection[str]) -> dict[str, int]:
    """About how many bytes each of these files will have: numbers of noise do not shrink when they are compressed.

    Args:
        run: what is simulated.
        replicas: repetitions.
        write: of `models`, `decisions`, `transcript` and `noise`; others are small.
    """
    rounds, each = run.spec.rounds, 8 * run.spec.n_learners * replicas
    said = rounds * each * sum(math.prod(shape) for shape in run.field_shapes.values())
    decided = each * run.algorithm.dim
    known = {"models": decided, "decisions": (rounds + 1) * decided, "transcript": said, "noise": said}
    return {name: n_bytes for name, n_bytes in known.items() if name in write}


def require_disk_space(place: Path, expected: Mapping[str, int]) -> None:
    """Say how much will be written where that is much.

    Args:
        place: the folder, which need not be there yet.
        expected: bytes by name, as `sizes` gives them.

    Raises:
        SpecError: its disk has less room.
    """
    needed = sum(expected.values())
    free = shutil.disk_usage(next(each for each in (place.absolute(), *place.absolute().parents) if each.is_dir())).free
    each = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in expected.items())
    if needed > free:
        raise SpecError(
            f"results must fit on the disk of {place}, where {format_bytes(free)} are free, and will have about {format_bytes(needed)} "
            f"({each}): --write less, take fewer --replicas, or another --out"
        )
    if needed >= _LARGE_OUTPUT_BYTES:
        terminal.print_notice(f"about {format_bytes(needed)} will be written: {each}")


def simulate_to_folder(
    folder: Path,
    experiment: Experiment,
    *,
    outputs: Collection[str],
    replicas: int,
    seed: int,
    recorded_noise: Path | None,
) -> Simulation:
    """Simulate a run and write `spec.yaml`, and a Parquet file for each name of `write`.

    `decisions` are those in use when a round's records arrive; the last rows, of round `rounds`, are the final ones, which
    `models` has alone. With `metrics`, these are `results.parquet` and `results.json`, and the final values are printed.
    """
    spec = experiment.run.spec
    source = resolve_noise(recorded_noise, seed, experiment.run)
    recorder = Recorder(source) if "noise" in outputs else None
    next(
        rounds_of(experiment.run, experiment.records, SeededNoise(0))
    )  # what is refused in its first round leaves no files
    drafts = [folder / f"{name}.parquet.partial" for name in ("transcript", "decisions", "models", "noise")]
    with _or_none(drafts), ExitStack() as files:

        def writer(name: str) -> TranscriptWriter | None:
            if name not in outputs:
                return None
            return files.enter_context(TranscriptWriter(folder / f"{name}.parquet", spec.name))

        said, decided, final, drawn = map(writer, ("transcript", "decisions", "models", "noise"))
        noises = None if recorder is None or drawn is None else _NoiseWriter(drawn, recorder)
        say = files.enter_context(terminal.show_progress_bar("simulating"))

        def took(step: SimulatedRound) -> None:
            if said is not None:
                for name, value in step.message.fields.items():
                    said.write(step.t, name, value)
            if decided is not None:
                decided.write(step.t, "decision", step.decisions_before)
            if noises is not None:
                noises.write(step)
            say("simulating", step.t + 1, spec.rounds, "rounds")

        done = simulate(experiment, replicas, metrics="metrics" in outputs, noise=recorder or source, progress=took)
        for file in filter(None, (decided, final)):
            file.write(spec.rounds, "decision", done.decisions)
    write_text(folder / "spec.yaml", dump_spec(spec, folder))  # now that there is something that it is of
    of = f"{pluralize(spec.rounds, 'round')} of {pluralize(spec.n_learners, 'learner')}"
    print(f"{of}, {pluralize(replicas, 'replica')}: {folder}")
    if recorded_noise is None:  # recorded noise promises nothing
        print(describe_epsilon(experiment))
    if isinstance(source, RecordedNoise) and source.unused_fields:
        own = ", ".join(sorted(source.requested_fields)) or "nothing"
        print(
            f"warning: {recorded_noise}: {', '.join(source.unused_fields)} was not used: this run draws {own}",
            file=sys.stderr,
        )
    if done.curves is not None:
        results = done.results if recorded_noise is None else _unpromised(done.results)
        results.write(folder, seed=seed)
        _print_metrics(done.curves)
    return done


@contextmanager
def _or_none(drafts: Sequence[Path]) -> Iterator[None]:
    """Where an error or Ctrl-C ends the block, these files go: nobody has use for a part of what a command can make again."""
    try:
        yield
    except BaseException:
        for draft in drafts:
            draft.unlink(missing_ok=True)
        raise


def describe_epsilon(experiment: Experiment) -> str:
    """What was simulated costs, in a line."""
    if not math.isfinite(epsilon := experiment.epsilon()):
        return "epsilon per event: infinite, for nothing is promised"
    shared = experiment.guarantee(0).has_shared_records
    whose = "of all learners together" if shared else "of the learner with the largest"
    return f"epsilon per event: {format_number(epsilon)}, {whose}"


@dataclass(frozen=True, slots=True)
class _NoiseWriter:
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
        lead = step.decisions_before.shape[:2]
        for name, rounds in self.recorder.noise_by_round.items():
            if name not in self.numbers:
                self.numbers[name] = rounds[step.t].shape[-1]
                for t in range(step.t):
                    self.file.write(t, name, np.zeros((*lead, self.numbers[name])))
            drawn = rounds.pop(step.t, np.zeros(1))
            self.file.write(step.t, name, np.broadcast_to(drawn, (*lead, self.numbers[name])))


def _unpromised(results: Results) -> Results:
    """The same results, of noise that promises nothing."""
    nothing: dict[str, Any] = {f"epsilon_{kind}": math.inf for kind in ("paper", "record_use", "record")}
    (run,) = results.runs
    return Results((replace(run, facts=replace(run.facts, threat_model=None, **nothing)),))


def get_final_metrics(curves: Curves) -> dict[str, Any]:
    """The whole network's values after the last round, by name; the standard error is null where there is one replica."""
    return {name: {"mean": each.final_mean, "standard_error": each.final_error} for name, each in curves.curves.items()}


def _print_metrics(curves: Curves, console: Console | None = None) -> None:
    """The final values: a table on a terminal, else a line each."""
    console = console or terminal.create_console()
    table = terminal.create_table("metric")
    table.add_column(f"after {curves.rounds[-1]:,} rounds", justify="right")
    for name, curve in curves.curves.items():
        value = format_with_error(curve.final_mean, curve.final_error)
        table.add_row(name.replace("_", " "), value)
        if not console.is_terminal:
            console.out(f"{name}: {value}", highlight=False)
    if console.is_terminal:
        console.print(table)
    if not curves.has_records_in_all_rounds:
        had, of = format_number(float(curves.rounds_with_records[-1])), pluralize(int(curves.rounds[-1]), "round")
        text = f"average loss: over the rounds that brought records, {had} of {of} on average over the learners"
        console.print(text, highlight=False, soft_wrap=True)
