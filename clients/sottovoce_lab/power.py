"""`sottovoce lab power`: the number of runs with which every mutant of the catalogue is found, as a table and as a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.atomic_files import write_json, write_text
from sottovoce_client.backends import Backend
from sottovoce_client.formatting import MISSING_VALUE, format_count
from sottovoce_lab.auditor_evaluation import (
    CONFIDENCE,
    MAX_WATCHED_ROUNDS,
    POWER_RUN_COUNTS,
    PowerMeasurement,
    ServiceKind,
    measure_mutant_power,
)
from sottovoce_lab.catalogue import CATALOGUE
from sottovoce_lab.mutants import TARGET_POWER
from sottovoce_lab.selftest import load_mutant, run_in_parallel
from sottovoce_lab.service_mutants import NETWORK_MUTANTS, WIRETAP_MUTANTS
from sottovoce_lab.service_power import (
    FOREIGN_AUDIT_COUNT,
    FOREIGN_RUN_COUNTS,
    FOREIGN_SERVICE_MUTANTS,
    SERVICE_AUDIT_COUNT,
    SERVICE_RUN_COUNTS,
    measure_foreign_power,
    measure_service_power,
)

_MUTANT_HEADS = "mutant", "fault", "found by", "runs", "limit", "rounds"
_SERVICE_HEADS = "service", *_MUTANT_HEADS[1:4], "audits"

_NEVER = "never"
"""Number of runs with which a correct service is found."""

_SERVICE_AUDITS: dict[ServiceKind, tuple[Sequence[int], int, str]] = {
    "on real services": (
        SERVICE_RUN_COUNTS,
        SERVICE_AUDIT_COUNT,
        "Coordinator, two learners and a relay over gRPC, audited as with `--on network`. Faults of noise or centre have the\n"
        "same effect as in the simulator; some are measured here to show this. The other faults exist only here.",
    ),
    "by wiretap": (
        SERVICE_RUN_COUNTS,
        SERVICE_AUDIT_COUNT,
        "The same services with encrypted channels, audited by sizes, times and connections alone, as with `--on wiretap`.",
    ),
    "foreign services": (
        FOREIGN_RUN_COUNTS,
        FOREIGN_AUDIT_COUNT,
        "A small gRPC server behind relays answers with a gradient and a loss, at different parameters in every call. It is\n"
        "audited with a decoder, at a claim of epsilon 1, as by `sottovoce eavesdropper audit`. A run is one call.",
    ),
}
"""Numbers of runs of each world, audits with each number, and a description, by kind of service."""


def measure_power(
    *,
    mutants: Sequence[str] = (),
    runs: int | None = None,
    audits: int = 10,
    backend: Backend = "processes",
    jobs: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    console: Console | None = None,
) -> int:
    """Measure power, and print the results.

    Args:
        mutants: mutants in addition to the catalogue, each `module:NAME`.
        runs: maximum runs of each world.
        audits: audits with each number of runs.
        backend: parallel backend, as in `open_mapper`.
        jobs: maximum parallel tasks (default: one for each core).
        seed: seed of the first audit.
        out: folder for `power.md` and `power.json`; None: they are not written.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if a fault with enough evidence was missed, else 0.

    Raises:
        SpecError: A mutant cannot be imported, or does not apply to its run, or an optional dependency is not installed.
    """
    console, max_runs = console or terminal.create_console(), runs or POWER_RUN_COUNTS[-1]
    chosen = [*CATALOGUE, *map(load_mutant, mutants)]
    tasks: list[Callable[[], PowerMeasurement]] = [
        partial(measure_mutant_power, mutant, audits=audits, seed=seed, max_runs=max_runs) for mutant in chosen
    ]
    results = run_in_parallel([*tasks, *_list_service_tasks(max_runs, seed)], backend, jobs)
    found, services = results[: len(tasks)], results[len(tasks) :]
    console.print(_build_table(_MUTANT_HEADS, found))
    if services:
        console.print(_build_table(_SERVICE_HEADS, services))
    missed = [each.name if each.base else f"{each.name} ({each.kind})" for each in results if each.is_missed]
    console.print(_summarise(found, services, missed))
    document = {"seed": seed, "runs": max_runs, "confidence": CONFIDENCE, "found": found, "services": services}
    terminal.print_json_if_requested(lambda: {"folder": out, **document})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "power.md", _build_page(found, services, max_runs, seed))
        write_json(out / "power.json", document)
        console.out(f"{out}: power.md, power.json", highlight=False)
    return int(bool(missed))


def _list_service_tasks(max_runs: int, seed: int) -> Iterator[Callable[[], PowerMeasurement]]:
    """Yield the measurements of services, with all numbers of runs up to the maximum."""
    network, foreign = (
        [count for count in counts if count <= max_runs] for counts in (SERVICE_RUN_COUNTS, FOREIGN_RUN_COUNTS)
    )
    if network:
        yield from (
            partial(measure_service_power, mutant, "relay", run_counts=network, seed=seed) for mutant in NETWORK_MUTANTS
        )
        yield from (
            partial(measure_service_power, mutant, "wiretap", run_counts=network, seed=seed)
            for mutant in WIRETAP_MUTANTS
        )
    if foreign:
        yield from (
            partial(measure_foreign_power, mutant, run_counts=foreign, seed=seed) for mutant in FOREIGN_SERVICE_MUTANTS
        )


def _format_row(each: PowerMeasurement) -> tuple[str, ...]:
    """Format cells in the order of `_MUTANT_HEADS`, or of `_SERVICE_HEADS`."""
    needed = (
        format_count(each.runs_needed)
        if each.runs_needed is not None
        else _NEVER
        if each.correct
        else f"> {format_count(each.max_runs)}"
    )
    cells = each.name, each.description, each.found_by or MISSING_VALUE, needed
    if not each.base:
        counted = each.correct or each.runs_needed is not None
        return *cells, f"{each.audits_found} of {each.audits}" if counted else MISSING_VALUE
    limit = MISSING_VALUE
    if each.min_runs is not None:
        limit = "< 1" if each.min_runs < 1.0 else format_count(math.ceil(each.min_runs))
    rounds = (
        MISSING_VALUE
        if not each.watched_runs
        else f"> {MAX_WATCHED_ROUNDS}"
        if each.rounds_to_alarm is None
        else format_count(each.rounds_to_alarm)
    )
    return *cells, limit, rounds


def _build_table(heads: Sequence[str], found: Sequence[PowerMeasurement]) -> Table:
    table = terminal.create_table("class", *heads[:3])
    for head in heads[3:]:
        table.add_column(head, justify="right")
    for each in found:
        style = "bold red" if each.is_missed else "green" if each.correct or each.runs_needed is not None else "yellow"
        name, *rest = _format_row(each)
        table.add_row(Text(each.kind or MISSING_VALUE, "dim"), Text(name, style), *map(Text, rest))
    return table


def _summarise(found: Sequence[PowerMeasurement], services: Sequence[PowerMeasurement], missed: Sequence[str]) -> Text:
    text = f"{sum(each.runs_needed is not None for each in found)} of {len(found)} mutants found"
    faulty, correct = ([each for each in services if each.correct is value] for value in (False, True))
    if services:
        text += f", {sum(each.runs_needed is not None for each in faulty)} of {len(faulty)} faulty services"
        refuted, audits = sum(each.audits_found for each in correct), sum(each.audits for each in correct)
        text += f"; {refuted} of {audits} audits refute correct ones"
    if not missed:
        return Text(f"{text}; the others give too little evidence.", "bold green")
    return Text(f"{text}; missed: {', '.join(missed)}.", "bold red")


def _build_page(
    found: Sequence[PowerMeasurement], services: Sequence[PowerMeasurement], max_runs: int, seed: int
) -> str:
    """Build the page: a Markdown table for every class."""
    tried = ", ".join(format_count(count) for count in POWER_RUN_COUNTS if count <= max_runs)
    audits = found[0].audits
    options = "" if max_runs == POWER_RUN_COUNTS[-1] else f" --runs {max_runs}"
    lines = [
        "# Power of the audit",
        "",
        "The number of runs with which an audit finds each fault of a catalogue of faulty learners (mutants). For auditors who",
        "plan an audit, and developers who change its tests. [Methods](../audit/methods.md#test-the-auditor) explains it.",
        f"Written by `sottovoce lab power{options} --seed {seed} --out docs/developers`; do not edit.",
        "",
        f"- *runs*: the fewest of {tried} runs of each world with which at least {100 * TARGET_POWER:g} % of {audits} audits",
        f"  find the fault at a confidence of {100 * CONFIDENCE:g} %.",
        "- *found by*: the part of the audit that found it most often.",
        f"- *limit*: the runs of each world with enough evidence, ln {1.0 / (1.0 - CONFIDENCE):.0f} nats;",
        f"  {MISSING_VALUE} if not known.",
        f"- *rounds*: the rounds within which as many of {audits} runs under `sottovoce watch` raise an alarm;",
        f"  {MISSING_VALUE} if a single run, or its values, cannot show the fault.",
    ]
    for kind, group in groupby(found, key=lambda each: each.kind or "additional mutants"):
        lines += ["", f"## {kind.capitalize()}", "", *_build_lines(_MUTANT_HEADS, group)]
    for service_kind, group in groupby(services, key=lambda each: each.kind):
        counts, audits, description = _SERVICE_AUDITS[service_kind]
        tried, share = (
            ", ".join(format_count(count) for count in counts if count <= max_runs),
            f"{100 * TARGET_POWER:g} %",
        )
        lines += [
            "",
            f"## {service_kind.capitalize()}",
            "",
            description,
            f"*runs*: the fewest of {tried} runs of each world with which at least {share} of {audits} audits find the fault.",
            "*audits*: the number of these audits that find it; for a correct service, of all audits that refute it.",
            "",
            *_build_lines(_SERVICE_HEADS, group),
        ]
    return "\n".join(lines) + "\n"


def _build_lines(heads: Sequence[str], found: Iterable[PowerMeasurement]) -> list[str]:
    """Build a Markdown table."""
    head, *rows = [f"| {' | '.join(cells)} |" for cells in (heads, *map(_format_row, found))]
    return [head, f"|{'---|' * 3}{'---:|' * (len(heads) - 3)}", *rows]
