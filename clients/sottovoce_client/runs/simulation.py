"""`sottovoce simulate`: write the simulated rounds as Parquet, and print the final metrics."""

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
from sottovoce_core.results import InterruptedSimulation, Results
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.runs.metrics import CHECKPOINTS
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound
from sottovoce_core.runs.simulator import simulate_rounds as rounds_of
from sottovoce_core.runs.transcript import TranscriptWriter
from sottovoce_core.spec import dump_spec

_LARGE_OUTPUT_BYTES = 10**8
"""Size in bytes from which the command announces how much it will write."""


def estimate_sizes(run: Run, replicas: int, write: Collection[str]) -> dict[str, int]:
    """Estimate the bytes of each output file; compression does not shrink noise.

    Args:
        run: Simulated run.
        replicas: Number of repetitions.
        write: Names of outputs: `models`, `decisions`, `transcript` and `noise`; others are small.
    """
    rounds, each = run.spec.rounds, 8 * run.spec.n_learners * replicas
    message_bytes = rounds * each * sum(math.prod(shape) for shape in run.field_shapes.values())
    decision_bytes = each * run.algorithm.dim
    sizes = {
        "models": decision_bytes,
        "decisions": (rounds + 1) * decision_bytes,
        "transcript": message_bytes,
        "noise": message_bytes,
    }
    return {name: n_bytes for name, n_bytes in sizes.items() if name in write}


def require_disk_space(folder: Path, expected: Mapping[str, int]) -> None:
    """Check the free disk space, and announce a large output.

    Args:
        folder: Output folder, which need not exist yet.
        expected: Bytes by name, as `estimate_sizes` returns them.

    Raises:
        SpecError: The disk has too little free space.
    """
    needed = sum(expected.values())
    free = shutil.disk_usage(
        next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    ).free
    each = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in expected.items())
    if needed > free:
        raise SpecError(
            f"results must fit on the disk of {folder}: {format_bytes(free)} are free, about {format_bytes(needed)} are needed "
            f"({each}): write fewer outputs (--write), use fewer --replicas, or choose another --out"
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
    metrics: Sequence[str] | None = None,
    checkpoints: int | Sequence[int] = CHECKPOINTS,
) -> Simulation:
    """Simulate a run and write `spec.yaml`, and a Parquet file for each name in `outputs`.

    `decisions` are those in use when a round's records arrive; the last rows, of round `rounds`, are the final ones, which
    `models` contains alone. `metrics` writes `results.parquet` and `results.json`, and prints the final values.

    Args:
        folder: Output folder.
        experiment: Experiment to simulate.
        outputs: Names of outputs.
        replicas: Independent repetitions.
        seed: Seed of the noise.
        recorded_noise: File that replaces seeded noise.
        metrics: Names of metrics; None: the default ones.
        checkpoints: Numbers of rounds after which to measure, or how many.
    """
    spec = experiment.run.spec
    source = resolve_noise(recorded_noise, seed, experiment.run)
    recorder = Recorder(source) if "noise" in outputs else None
    next(rounds_of(experiment.run, experiment.records, SeededNoise(0)))  # an error in the first round leaves no files
    drafts = [folder / f"{name}.parquet.partial" for name in ("transcript", "decisions", "models", "noise")]
    with _remove_on_error(drafts), ExitStack() as files:

        def writer(name: str) -> TranscriptWriter | None:
            if name not in outputs:
                return None
            return files.enter_context(TranscriptWriter(folder / f"{name}.parquet", spec.name))

        transcript, decisions, models, noise = map(writer, ("transcript", "decisions", "models", "noise"))
        noise_writer = None if recorder is None or noise is None else _NoiseWriter(noise, recorder)
        report = files.enter_context(terminal.show_progress_bar("simulating"))

        def write_round(step: SimulatedRound) -> None:
            if transcript is not None:
                for name, value in step.message.fields.items():
                    transcript.write(step.t, name, value)
            if decisions is not None:
                decisions.write(step.t, "decision", step.decisions_before)
            if noise_writer is not None:
                noise_writer.write(step)
            report("simulating", step.t + 1, spec.rounds, "rounds")

        files.enter_context(_keep_interrupted_results(folder, experiment, seed, recorded_noise))
        done = simulate(
            experiment,
            replicas,
            metrics="metrics" in outputs and (metrics or True),
            checkpoints=checkpoints,
            noise=recorder or source,
            progress=write_round,
        )
        for file in filter(None, (decisions, models)):
            file.write(spec.rounds, "decision", done.decisions)
    write_text(folder / "spec.yaml", dump_spec(spec, folder))  # only after the results are complete
    size = f"{pluralize(spec.rounds, 'round')} of {pluralize(spec.n_learners, 'learner')}"
    print(f"{size}, {pluralize(replicas, 'replica')}: {folder}")
    if recorded_noise is None:  # recorded noise has no guarantee
        print(describe_epsilon(experiment))
    if isinstance(source, RecordedNoise) and source.unused_fields:
        own = ", ".join(sorted(source.requested_fields)) or "nothing"
        print(
            f"warning: {recorded_noise}: {', '.join(source.unused_fields)} was not used: this run draws {own}",
            file=sys.stderr,
        )
    if done.curves is not None:
        results = done.results if recorded_noise is None else _remove_guarantee(done.results)
        results.write(folder, seed=seed)
        _print_metrics(done.curves)
    return done


@contextmanager
def _keep_interrupted_results(
    folder: Path, experiment: Experiment, seed: int, recorded_noise: Path | None
) -> Iterator[None]:
    """Write the results of the checkpoints until then if Ctrl-C ends the block."""
    try:
        yield
    except InterruptedSimulation as interrupt:
        results = interrupt.results if recorded_noise is None else _remove_guarantee(interrupt.results)
        write_text(folder / "spec.yaml", dump_spec(experiment.run.spec, folder))
        results.write(folder, seed=seed)
        last, rounds = int(results.runs[0].curves.rounds[-1]), experiment.run.spec.rounds
        terminal.print_notice(f"results until round {last:,} of {rounds:,} are kept: {folder}")
        raise


@contextmanager
def _remove_on_error(drafts: Sequence[Path]) -> Iterator[None]:
    """Remove unfinished files if an error or Ctrl-C ends the block: the command can write them again."""
    try:
        yield
    except BaseException:
        for draft in drafts:
            draft.unlink(missing_ok=True)
        raise


def describe_epsilon(experiment: Experiment) -> str:
    """Describe the epsilon of a simulated experiment in one line."""
    if not math.isfinite(epsilon := experiment.epsilon()):
        return "epsilon per record use: infinite, there is no guarantee"
    shared = experiment.run.has_shared_records
    scope = "of all learners together" if shared else "of the learner with the largest"
    return f"epsilon per record use: {format_number(epsilon)}, {scope}"


@dataclass(frozen=True, slots=True)
class _NoiseWriter:
    """Writer of recorded noise; it writes each round once and removes it from the recorder.

    A field is a field of a noise request, which need not be a field of a message. Rounds without noise, also those before
    the first request, are written as zeros, so that the file has every round and can be read back.
    """

    file: TranscriptWriter
    recorder: Recorder
    numbers: dict[str, int] = field(default_factory=dict)
    """Dimension of each noise field."""

    def write(self, step: SimulatedRound) -> None:
        """Write the noise of a completed round."""
        lead = step.decisions_before.shape[:2]
        for name, rounds in self.recorder.noise_by_round.items():
            if name not in self.numbers:
                self.numbers[name] = rounds[step.t].shape[-1]
                for t in range(step.t):
                    self.file.write(t, name, np.zeros((*lead, self.numbers[name])))
            noise = rounds.pop(step.t, np.zeros(1))
            self.file.write(step.t, name, np.broadcast_to(noise, (*lead, self.numbers[name])))


def _remove_guarantee(results: Results) -> Results:
    """Return the same results with infinite epsilons, for noise without a guarantee."""
    infinite: dict[str, Any] = {f"epsilon_{kind}": math.inf for kind in ("paper", "record_use", "record")}
    (run,) = results.runs
    curves = dict(run.curves.curves)
    if (loss := curves.get("privacy_loss")) is not None and loss.learners is not None:
        curves["privacy_loss"] = Curve(np.full_like(loss.replicas, math.inf), np.full_like(loss.learners, math.inf))
    facts = replace(run.facts, threat_model=None, **infinite)
    return Results((replace(run, facts=facts, curves=replace(run.curves, curves=curves)),))


def get_final_metrics(curves: Curves) -> dict[str, Any]:
    """Return the network-wide values after the last round, by metric; with one replica the standard error is None."""
    return {name: {"mean": each.final_mean, "standard_error": each.final_error} for name, each in curves.curves.items()}


def _print_metrics(curves: Curves, console: Console | None = None) -> None:
    """Print the final values: a table on a terminal, else one line each."""
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
    if "average_loss" in curves and not curves.has_records_in_all_rounds:
        with_records, rounds = (
            format_number(float(curves.rounds_with_records[-1])),
            pluralize(int(curves.rounds[-1]), "round"),
        )
        text = f"average loss: over rounds with records, {with_records} of {rounds} on average over the learners"
        console.print(text, highlight=False, soft_wrap=True)
