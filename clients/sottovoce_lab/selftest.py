"""`sottovoce lab self-test`: broken learners, caught or not, and false alarms on correct ones."""

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

_LOT = 5
"""Audits of correct learners in one piece of work."""

_Result = TypeVar("_Result")
_Task = Callable[[], MutantOutcome | FalseAlarmCounts]


def run_self_test(
    prepared: PreparedRun | None = None,
    *,
    learner: str | None = None,
    mutants: Sequence[str] = (),
    audits: int = _LOT,
    runs: int | None = None,
    backend: Backend = "processes",
    jobs: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    console: Console | None = None,
) -> int:
    """Test the auditor, and print what came of it.

    Args:
        prepared: the run to break, and to find correct; None: small runs of all algorithms.
        learner: whose messages are audited, in that run (default: the one with the largest epsilon).
        mutants: more of them, each `module:NAME`.
        alarms: audits of every correct algorithm.
        runs: of each world, at most (default: each mutant's own limit).
        backend: what works on it, as of `open_mapper`.
        jobs: at a time (default: one for each core).
        seed: of coins and noise.
        out: folder for `selftest.json`; None: none is written.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if a mutant was missed, or false alarms are too many to be chance, else 0.

    Raises:
        SpecError: a mutant cannot be imported, or an extra is not installed.
    """
    console = console or terminal.create_console()
    chosen = [*QUICK_MUTANTS, *map(load_mutant, mutants)]
    work = [*_breaking(chosen, prepared, learner, runs, seed), *_correct(prepared, learner, audits, seed)]
    results = run_in_parallel(work, backend, jobs)
    outcomes = [result for result in results if isinstance(result, MutantOutcome)]
    lots = [result for result in results if isinstance(result, FalseAlarmCounts)]
    found = [
        sum_false_alarms([lot for lot in lots if lot.name == name]) for name in dict.fromkeys(lot.name for lot in lots)
    ]
    _print(outcomes, found, console)
    document = _document(outcomes, found, seed)
    terminal.print_json_if_requested(lambda: {"folder": out, **document})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "selftest.json", document)
        console.out(f"{out}: selftest.json", highlight=False)
    return int(any(outcome.is_missed for outcome in outcomes) or _too_many(found))


def load_mutant(name: str) -> Mutant:
    """The mutant of that name, `module:NAME`.

    Raises:
        SpecError: there is none.
    """
    found = import_object(name, "--mutant")
    if not isinstance(found, Mutant):
        raise SpecError(f"--mutant: {name} must be a sottovoce_lab.mutants.Mutant, got {type(found).__name__}")
    return found


# ---- work ------------------------------------------------------------------------------------------------------------


def _breaking(
    mutants: Sequence[Mutant], prepared: PreparedRun | None, learner: str | None, runs: int | None, seed: int
) -> Iterator[_Task]:
    given, own = None, 0
    if prepared is not None:
        given, own = (prepared.run, prepared.data), choose_audited_learner(prepared, learner)
    for mutant in mutants:
        yield partial(try_mutant, mutant, given, learner=own, max_runs=runs, seed=seed)


def _correct(prepared: PreparedRun | None, learner: str | None, alarms: int, seed: int) -> Iterator[_Task]:
    for start in range(0, alarms, _LOT):
        seeds = [seed + 1 + k for k in range(start, min(start + _LOT, alarms))]
        if prepared is None:
            for k, name in enumerate(ALGORITHM_RUNS):  # with the same coins, one false alarm would be several
                yield partial(_alarms_of, name, [100_000 * k + each for each in seeds])
        else:
            name, own = prepared.run.spec.algorithm.name, choose_audited_learner(prepared, learner)
            yield partial(measure_false_alarms, prepared.run, prepared.data, seeds, name=name, learner=own)


def _alarms_of(name: str, seeds: Sequence[int]) -> FalseAlarmCounts:
    return measure_false_alarms(*ALGORITHM_RUNS[name].build(), seeds, name=name)


def run_in_parallel(work: Sequence[Callable[[], _Result]], backend: Backend, jobs: int | None) -> list[_Result]:
    """Do all pieces of work, some at a time, and return their results in order; a bar shows how many are done."""
    results: list[_Result] = []
    with terminal.show_progress_bar("auditing") as say, open_mapper(backend, jobs) as over:
        for result in over(operator.call, work):
            results.append(result)
            say("auditing", len(results), len(work), "pieces")
    return results


def _too_many(found: Sequence[FalseAlarmCounts]) -> bool:
    return any(each.is_excessive for each in found) or (bool(found) and sum_false_alarms(found).is_excessive)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _print(outcomes: Sequence[MutantOutcome], found: Sequence[FalseAlarmCounts], console: Console) -> None:
    broken = terminal.create_table("broken learner", "what is wrong", "seen by")
    broken.add_column("runs", justify="right")
    broken.add_column("of", justify="right", header_style="dim")
    for outcome in outcomes:
        broken.add_row(*_outcome_row(outcome))
    console.print(broken)
    if found:
        correct = terminal.create_table("correct learner")
        for head in ("audits", "refuted", "95 % interval", "watched", "alarms", "95 % interval"):
            correct.add_column(head, justify="right")
        for each in (*found, sum_false_alarms(found)) if len(found) > 1 else found:
            correct.add_row(*_alarms_row(each, each.name if each in found else "all"))
        console.print(correct)
    console.print(_summary(outcomes, found))


def _outcome_row(outcome: MutantOutcome) -> tuple[Text, ...]:
    allowed = Text(format_count(outcome.allowed), style="dim")
    if outcome.unfit:
        return (
            Text(outcome.name, "dim"),
            Text(f"does not fit: {outcome.unfit}", "dim"),
            Text(MISSING_VALUE),
            Text(MISSING_VALUE),
            allowed,
        )
    if outcome.is_missed:
        return (
            Text(outcome.name, "bold red"),
            Text(outcome.what),
            Text("MISSED", "bold red"),
            Text(MISSING_VALUE),
            allowed,
        )
    style = "green" if outcome.expected in outcome.families else "yellow"  # yellow: by another family than expected
    seen, needed = Text(", ".join(outcome.families), style), Text(format_count(outcome.needed or 0), style)
    return Text(outcome.name, style), Text(outcome.what), seen, needed, allowed


def _alarms_row(each: FalseAlarmCounts, name: str) -> tuple[Text, ...]:
    if not each.audits:
        return Text(name, "dim"), Text("no claim", "dim")
    style = "bold red" if each.is_excessive else "green"
    cells = [Text(name, style)]
    for trials, alarms in ((each.audits, each.refuted), (each.watched, each.alarmed)):
        cells += [Text(format_count(trials)), Text(format_count(alarms), style), Text(_interval(alarms, trials))]
    return tuple(cells)


def _interval(alarms: int, trials: int) -> str:
    low, high = compute_confidence_interval(alarms, trials)
    return f"{100 * low:.1f}{MISSING_VALUE}{100 * high:.1f} %"


def _summary(outcomes: Sequence[MutantOutcome], found: Sequence[FalseAlarmCounts]) -> Text:
    fitting = [outcome for outcome in outcomes if not outcome.unfit]
    missed = [outcome.name for outcome in fitting if outcome.is_missed]
    names = f"; missed: {', '.join(missed)}" if missed else ""
    caught = f"{len(fitting) - len(missed)} of {len(fitting)} broken learners caught{names}."
    text = Text(caught, "bold red" if missed else "bold green")
    if found and (total := sum_false_alarms(found)).audits:
        expected = f"{100 * AUDIT_LEVEL:g} % are expected to", f"{100 * WATCH_LEVEL:g} %"
        said = (
            f" {total.refuted} of {total.audits:,} audits of correct learners refuted them; at most {expected[0]}. "
            f"{total.alarmed} of {total.watched:,} runs under watch raised an alarm; at most {expected[1]}."
        )
        text.append(said, "bold red" if _too_many(found) else "not bold default")
    return text


def _document(outcomes: Sequence[MutantOutcome], found: Sequence[FalseAlarmCounts], seed: int) -> dict[str, Any]:
    """`selftest.json`: broken learners and what came of them, correct ones and false alarms about them, as the classes say."""
    return {
        "seed": seed,
        # `missed`: it fits, and was not caught.
        "broken": [{**asdict(outcome), "missed": outcome.is_missed} for outcome in outcomes],
        "correct": [{**asdict(each), **_intervals(each)} for each in found],
        "levels": {
            "audit": AUDIT_LEVEL,
            "watch": WATCH_LEVEL,
        },  # of false alarms: of an audit, and of a run under watch
    }


def _intervals(each: FalseAlarmCounts) -> dict[str, Any]:
    """95 % (Clopper and Pearson), of the shares; nothing without audits."""
    if not each.audits:
        return {}
    return {
        "refuted_interval": compute_confidence_interval(each.refuted, each.audits),
        "alarmed_interval": compute_confidence_interval(each.alarmed, each.watched),
        "is_excessive": each.is_excessive,  # hardly any correct audit, or watch, would accuse it so often
    }
