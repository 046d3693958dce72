"""`sottovoce lab self-test`: the mutants that the auditor finds, and its false alarms on correct learners."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json
from sottovoce_client.auditing.audit import choose_audited_learner
from sottovoce_client.backends import Backend, open_mapper
from sottovoce_client.formatting import MISSING_VALUE, format_count
from sottovoce_core.auditing.bounds import compute_confidence_interval
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.registry import import_object
from sottovoce_lab.auditor_evaluation import (
    AUDIT_LEVEL,
    WATCH_LEVEL,
    FalseAlarmCounts,
    MutantOutcome,
    measure_false_alarms,
    sum_false_alarms,
    try_mutant,
)
from sottovoce_lab.catalogue import QUICK_MUTANTS
from sottovoce_lab.mutants import ALGORITHM_RUNS, Mutant

_SEEDS_PER_TASK = 5
"""Audits of a correct learner in one task."""

_Result = TypeVar("_Result")
_Task = Callable[[], MutantOutcome | FalseAlarmCounts]


def run_self_test(
    prepared: PreparedRun | None = None,
    *,
    learner: str | None = None,
    mutants: Sequence[str] = (),
    audits: int = _SEEDS_PER_TASK,
    runs: int | None = None,
    backend: Backend = "processes",
    jobs: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    console: Console | None = None,
) -> int:
    """Test the auditor, and print the results.

    Args:
        prepared: the run that mutants break and that false alarms are counted on; None: small runs of all algorithms.
        learner: the audited learner of that run (default: the one with the largest epsilon).
        mutants: additional mutants, each `module:NAME`.
        audits: audits of every correct algorithm.
        runs: maximum runs of each world (default: each mutant's own).
        backend: parallel backend, as in `open_mapper`.
        jobs: maximum parallel tasks (default: one for each core).
        seed: seed of coins and noise.
        out: folder for `selftest.json`; None: it is not written.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if a mutant was missed, or false alarms are too many to be chance, else 0.

    Raises:
        SpecError: A mutant cannot be imported, or an optional dependency is not installed.
    """
    console = console or terminal.create_console()
    chosen = [*QUICK_MUTANTS, *map(load_mutant, mutants)]
    tasks = [
        *_list_mutant_tasks(chosen, prepared, learner, runs, seed),
        *_list_alarm_tasks(prepared, learner, audits, seed),
    ]
    results = run_in_parallel(tasks, backend, jobs)
    outcomes = [result for result in results if isinstance(result, MutantOutcome)]
    parts = [result for result in results if isinstance(result, FalseAlarmCounts)]
    alarms = [
        sum_false_alarms([part for part in parts if part.name == name])
        for name in dict.fromkeys(part.name for part in parts)
    ]
    _print(outcomes, alarms, console)
    document = _build_document(outcomes, alarms, seed)
    terminal.print_json_if_requested(lambda: {"folder": out, **document})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "selftest.json", document)
        console.out(f"{out}: selftest.json", highlight=False)
    return int(any(outcome.is_missed for outcome in outcomes) or _is_excessive(alarms))


def load_mutant(name: str) -> Mutant:
    """Import the mutant `module:NAME`.

    Raises:
        SpecError: It cannot be imported, or is no mutant.
    """
    found = import_object(name, "--mutant", is_own=True)
    if not isinstance(found, Mutant):
        raise SpecError(f"--mutant: {name} must be a sottovoce_lab.mutants.Mutant, got {type(found).__name__}")
    return found


# ---- tasks -----------------------------------------------------------------------------------------------------------


def _list_mutant_tasks(
    mutants: Sequence[Mutant], prepared: PreparedRun | None, learner: str | None, runs: int | None, seed: int
) -> Iterator[_Task]:
    given, own = None, 0
    if prepared is not None:
        given, own = (prepared.run, prepared.data), choose_audited_learner(prepared, learner)
    for mutant in mutants:
        yield partial(try_mutant, mutant, given, learner=own, max_runs=runs, seed=seed)


def _list_alarm_tasks(prepared: PreparedRun | None, learner: str | None, audits: int, seed: int) -> Iterator[_Task]:
    for start in range(0, audits, _SEEDS_PER_TASK):
        seeds = [seed + 1 + k for k in range(start, min(start + _SEEDS_PER_TASK, audits))]
        if prepared is None:
            for k, name in enumerate(
                ALGORITHM_RUNS
            ):  # other seeds: with the same coins, one false alarm would count several times
                yield partial(_measure_base_alarms, name, [100_000 * k + each for each in seeds])
        else:
            name, own = prepared.run.spec.algorithm.name, choose_audited_learner(prepared, learner)
            yield partial(measure_false_alarms, prepared.run, prepared.data, seeds, name=name, learner=own)


def _measure_base_alarms(name: str, seeds: Sequence[int]) -> FalseAlarmCounts:
    return measure_false_alarms(*ALGORITHM_RUNS[name].build(), seeds, name=name)


def run_in_parallel(tasks: Sequence[Callable[[], _Result]], backend: Backend, jobs: int | None) -> list[_Result]:
    """Run all tasks in parallel with a progress bar, and return their results in order."""
    results: list[_Result] = []
    with terminal.show_progress_bar("auditing") as report, open_mapper(backend, jobs) as map_tasks:
        for result in map_tasks(operator.call, tasks):
            results.append(result)
            report("auditing", len(results), len(tasks), "pieces")
    return results


def _is_excessive(alarms: Sequence[FalseAlarmCounts]) -> bool:
    return any(each.is_excessive for each in alarms) or (bool(alarms) and sum_false_alarms(alarms).is_excessive)


# ---- output ----------------------------------------------------------------------------------------------------------


def _print(outcomes: Sequence[MutantOutcome], alarms: Sequence[FalseAlarmCounts], console: Console) -> None:
    mutants = terminal.create_table("mutant", "fault", "found by")
    mutants.add_column("runs", justify="right")
    mutants.add_column("of", justify="right", header_style="dim")
    for outcome in outcomes:
        mutants.add_row(*_format_outcome(outcome))
    console.print(mutants)
    if alarms:
        correct = terminal.create_table("correct learner")
        for head in ("audits", "refuted", "95 % interval", "watched", "alarms", "95 % interval"):
            correct.add_column(head, justify="right")
        for each in (*alarms, sum_false_alarms(alarms)) if len(alarms) > 1 else alarms:
            correct.add_row(*_format_alarms(each, each.name if each in alarms else "all"))
        console.print(correct)
    console.print(_summarise(outcomes, alarms))


def _format_outcome(outcome: MutantOutcome) -> tuple[Text, ...]:
    max_runs = Text(format_count(outcome.max_runs), style="dim")
    if outcome.inapplicable_reason:
        return (
            Text(outcome.name, "dim"),
            Text(f"does not apply: {outcome.inapplicable_reason}", "dim"),
            Text(MISSING_VALUE),
            Text(MISSING_VALUE),
            max_runs,
        )
    if outcome.is_missed:
        return (
            Text(outcome.name, "bold red"),
            Text(outcome.description),
            Text("MISSED", "bold red"),
            Text(MISSING_VALUE),
            max_runs,
        )
    style = "green" if outcome.expected_family in outcome.families else "yellow"  # yellow: found by another family
    families, needed = Text(", ".join(outcome.families), style), Text(format_count(outcome.runs_needed or 0), style)
    return Text(outcome.name, style), Text(outcome.description), families, needed, max_runs


def _format_alarms(each: FalseAlarmCounts, name: str) -> tuple[Text, ...]:
    if not each.audits:
        return Text(name, "dim"), Text("no claim", "dim")
    style = "bold red" if each.is_excessive else "green"
    cells = [Text(name, style)]
    for trials, alarms in ((each.audits, each.refuted_audits), (each.watched_runs, each.alarmed_runs)):
        cells += [Text(format_count(trials)), Text(format_count(alarms), style), Text(_format_interval(alarms, trials))]
    return tuple(cells)


def _format_interval(alarms: int, trials: int) -> str:
    low, high = compute_confidence_interval(alarms, trials)
    return f"{100 * low:.1f}{MISSING_VALUE}{100 * high:.1f} %"


def _summarise(outcomes: Sequence[MutantOutcome], alarms: Sequence[FalseAlarmCounts]) -> Text:
    applicable = [outcome for outcome in outcomes if not outcome.inapplicable_reason]
    missed = [outcome.name for outcome in applicable if outcome.is_missed]
    names = f"; missed: {', '.join(missed)}" if missed else ""
    summary = f"{len(applicable) - len(missed)} of {len(applicable)} mutants found{names}."
    text = Text(summary, "bold red" if missed else "bold green")
    if alarms and (total := sum_false_alarms(alarms)).audits:
        expected = f"{100 * AUDIT_LEVEL:g} % are expected to", f"{100 * WATCH_LEVEL:g} %"
        false_alarms = (
            f" {total.refuted_audits} of {total.audits:,} audits of correct learners refuted them; at most {expected[0]}. "
            f"{total.alarmed_runs} of {total.watched_runs:,} runs under watch raised an alarm; at most {expected[1]}."
        )
        text.append(false_alarms, "bold red" if _is_excessive(alarms) else "not bold default")
    return text


def _build_document(outcomes: Sequence[MutantOutcome], alarms: Sequence[FalseAlarmCounts], seed: int) -> dict[str, Any]:
    """Build `selftest.json`: the outcomes of all mutants, and the false alarms of correct learners."""
    return {
        "seed": seed,
        # `missed`: it applies to the run and was not found.
        "mutants": [{**asdict(outcome), "missed": outcome.is_missed} for outcome in outcomes],
        "correct": [{**asdict(each), **_compute_intervals(each)} for each in alarms],
        "levels": {
            "audit": AUDIT_LEVEL,
            "watch": WATCH_LEVEL,
        },  # false alarm rates of an audit, and of a run under watch
    }


def _compute_intervals(each: FalseAlarmCounts) -> dict[str, Any]:
    """Compute 95 % Clopper-Pearson intervals of the false alarm rates; empty without audits."""
    if not each.audits:
        return {}
    return {
        "refuted_interval": compute_confidence_interval(each.refuted_audits, each.audits),
        "alarmed_interval": compute_confidence_interval(each.alarmed_runs, each.watched_runs),
        "is_excessive": each.is_excessive,  # too many to be chance
    }
