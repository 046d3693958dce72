"""`sottovoce lab power`: with how many runs every break of the catalogue is found, as a table and as a page."""

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

_HEADS = "broken learner", "what is wrong", "found by", "runs", "limit", "rounds"
_SERVICES = "broken service", *_HEADS[1:4], "audits"

_NEVER = "never"
"""A correct service is found with no number of runs."""

_AUDITED: dict[ServiceKind, tuple[Sequence[int], int, str]] = {
    "on real services": (
        SERVICE_RUN_COUNTS,
        SERVICE_AUDIT_COUNT,
        "Coordinator, two learners and a relay, over gRPC, audited as `--on network` does. What is wrong with noise or centre\n"
        "is the same there as in the simulator: some breaks of noise stand here to show that, the others exist here alone.",
    ),
    "by wiretap": (
        SERVICE_RUN_COUNTS,
        SERVICE_AUDIT_COUNT,
        "The same services, whose channels are encrypted, audited by sizes, times and connections alone, as `--on wiretap` does.",
    ),
    "foreign services": (
        FOREIGN_RUN_COUNTS,
        FOREIGN_AUDIT_COUNT,
        "A small gRPC server behind relays, which answers with a gradient and a loss, at parameters that are others in every\n"
        "call; audited with a decoder, at a claim of epsilon 1, as `sottovoce eavesdropper audit` does. A run is one call.",
    ),
}
"""Runs of each world that are tried, audits with each number of runs, and what it is that is audited."""


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
    """Measure, and print what came of it.

    Args:
        mutants: more than the catalogue has, each `module:NAME`.
        runs: of each world, at most.
        audits: with each number of runs.
        backend: what works on it, as of `open_mapper`.
        jobs: at a time (default: one for each core).
        seed: of the first audit.
        out: folder for `power.md` and `power.json`; None: none are written.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if something was missed that gave enough evidence, else 0.

    Raises:
        SpecError: a mutant cannot be imported, or does not fit its run, or an extra is not installed.
    """
    console, most = console or terminal.create_console(), runs or POWER_RUN_COUNTS[-1]
    chosen = [*CATALOGUE, *map(load_mutant, mutants)]
    work: list[Callable[[], PowerMeasurement]] = [
        partial(measure_mutant_power, mutant, audits=audits, seed=seed, max_runs=most) for mutant in chosen
    ]
    results = run_in_parallel([*work, *_serving(most, seed)], backend, jobs)
    found, services = results[: len(work)], results[len(work) :]
    console.print(_table(_HEADS, found))
    if services:
        console.print(_table(_SERVICES, services))
    missed = [each.name if each.base else f"{each.name} ({each.kind})" for each in results if each.is_missed]
    console.print(_summary(found, services, missed))
    told = {"seed": seed, "runs": most, "confidence": CONFIDENCE, "found": found, "services": services}
    terminal.print_json_if_requested(lambda: {"folder": out, **told})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "power.md", _page(found, services, most, seed))
        write_json(out / "power.json", told)
        console.out(f"{out}: power.md, power.json", highlight=False)
    return int(bool(missed))


def _serving(most: int, seed: int) -> Iterator[Callable[[], PowerMeasurement]]:
    """The work on services, with as many runs as there may be."""
    wired, called = ([rung for rung in rungs if rung <= most] for rungs in (SERVICE_RUN_COUNTS, FOREIGN_RUN_COUNTS))
    if wired:
        yield from (
            partial(measure_service_power, broken, "relay", run_counts=wired, seed=seed) for broken in NETWORK_MUTANTS
        )
        yield from (
            partial(measure_service_power, broken, "wiretap", run_counts=wired, seed=seed) for broken in WIRETAP_MUTANTS
        )
    if called:
        yield from (
            partial(measure_foreign_power, broken, run_counts=called, seed=seed) for broken in FOREIGN_SERVICE_MUTANTS
        )


def _row(each: PowerMeasurement) -> tuple[str, ...]:
    """In the order of `_HEADS`, or of `_SERVICES`."""
    needed = (
        format_count(each.needed)
        if each.needed is not None
        else _NEVER
        if each.correct
        else f"> {format_count(each.most)}"
    )
    cells = each.name, each.what, each.found_by or MISSING_VALUE, needed
    if not each.base:
        return *cells, f"{each.found} of {each.audits}" if each.correct or each.needed is not None else MISSING_VALUE
    limit = MISSING_VALUE if each.limit is None else "< 1" if each.limit < 1.0 else format_count(math.ceil(each.limit))
    rounds = (
        MISSING_VALUE
        if not each.watched
        else f"> {MAX_WATCHED_ROUNDS}"
        if each.rounds is None
        else format_count(each.rounds)
    )
    return *cells, limit, rounds


def _table(heads: Sequence[str], found: Sequence[PowerMeasurement]) -> Table:
    shown = terminal.create_table("class", *heads[:3])
    for head in heads[3:]:
        shown.add_column(head, justify="right")
    for each in found:
        style = "bold red" if each.is_missed else "green" if each.correct or each.needed is not None else "yellow"
        name, *rest = _row(each)
        shown.add_row(Text(each.kind or MISSING_VALUE, "dim"), Text(name, style), *map(Text, rest))
    return shown


def _summary(found: Sequence[PowerMeasurement], services: Sequence[PowerMeasurement], missed: Sequence[str]) -> Text:
    text = f"{sum(each.needed is not None for each in found)} of {len(found)} broken learners found"
    broken, correct = ([each for each in services if each.correct is right] for right in (False, True))
    if services:
        text += f", {sum(each.needed is not None for each in broken)} of {len(broken)} broken services"
        accused, held = sum(each.found for each in correct), sum(each.audits for each in correct)
        text += f"; {accused} of {held} audits accuse correct ones"
    if not missed:
        return Text(f"{text}; the others give too little evidence.", "bold green")
    return Text(f"{text}; missed: {', '.join(missed)}.", "bold red")


def _page(found: Sequence[PowerMeasurement], services: Sequence[PowerMeasurement], most: int, seed: int) -> str:
    """All classes as Markdown, a table each."""
    tried = ", ".join(format_count(rung) for rung in POWER_RUN_COUNTS if rung <= most)
    audits = found[0].audits
    least = "" if most == POWER_RUN_COUNTS[-1] else f" --runs {most}"
    lines = [
        "# How many runs find what",
        "",
        f"Made by `sottovoce lab power{least} --seed {seed} --out docs`; do not edit.",
        "[What this is](selftest.md#the-catalogue).",
        "",
        f"*runs*: of {tried} runs of each world, the fewest with which at least {100 * TARGET_POWER:g} % of {audits} audits",
        f"find it at a confidence of {100 * CONFIDENCE:g} %. *found by*: the part of the audit that found it most often, there.",
        f"*limit*: runs of each world that carry the evidence that it takes, ln {1.0 / (1.0 - CONFIDENCE):.0f} nats;",
        f"{MISSING_VALUE} where that is not known. *rounds*: within which as many of {audits} runs under watch raise an alarm;",
        f"{MISSING_VALUE} where one run, or its numbers, show nothing.",
    ]
    for named, some in groupby(found, key=lambda each: each.kind or "of one's own"):
        lines += ["", f"## {named.capitalize()}", "", *_lines(_HEADS, some)]
    for kind, own in groupby(services, key=lambda each: each.kind):
        rungs, audits, told = _AUDITED[kind]
        tried, share = ", ".join(format_count(rung) for rung in rungs if rung <= most), f"{100 * TARGET_POWER:g} %"
        lines += [
            "",
            f"## {kind.capitalize()}",
            "",
            told,
            f"*runs*: of {tried} runs of each world, the fewest with which at least {share} of {audits} audits find it.",
            "*audits*: how many do, there; of a correct service, how many of all audits accuse it.",
            "",
            *_lines(_SERVICES, own),
        ]
    return "\n".join(lines) + "\n"


def _lines(heads: Sequence[str], found: Iterable[PowerMeasurement]) -> list[str]:
    """A table as Markdown."""
    head, *rows = [f"| {' | '.join(cells)} |" for cells in (heads, *map(_row, found))]
    return [head, f"|{'---|' * 3}{'---:|' * (len(heads) - 3)}", *rows]
