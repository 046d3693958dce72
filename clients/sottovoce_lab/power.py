"""`sottovoce lab power`: with how many runs every break of the catalogue is found, as a table and as a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.backends import Backend
from sottovoce_client.documents import write_json, write_text
from sottovoce_client.wording import NOTHING, count
from sottovoce_lab.broken_learners import BY_WIRETAP, ON_NETWORK
from sottovoce_lab.broken_services import (
    CALLED_AUDITS,
    CALLED_RUNGS,
    FOREIGN,
    SERVED_AUDITS,
    SERVED_RUNGS,
    measure_by_wiretap,
    measure_foreign,
    measure_on_network,
)
from sottovoce_lab.catalogue import CATALOGUE
from sottovoce_lab.measuring import CONFIDENCE, LADDER, WATCHED, Power, Served, ServiceKind, measure
from sottovoce_lab.mutants import FOUND
from sottovoce_lab.selftest import mutant_named, side_by_side

_HEADS = "broken learner", "what is wrong", "found by", "runs", "limit", "rounds"
_SERVICES = "broken service", *_HEADS[1:4], "audits"

_NEVER = "never"
"""A correct service is found with no number of runs."""

_AUDITED: dict[ServiceKind, tuple[Sequence[int], int, str]] = {
    "on real services": (
        SERVED_RUNGS,
        SERVED_AUDITS,
        "Coordinator, two learners and a relay, over gRPC, audited as `--on network` does. What is wrong with noise or centre\n"
        "is the same there as in the simulator: some breaks of noise stand here to show that, the others exist here alone.",
    ),
    "by wiretap": (
        SERVED_RUNGS,
        SERVED_AUDITS,
        "The same services, whose channels are encrypted, audited by sizes, times and connections alone, as `--on wiretap` does.",
    ),
    "foreign services": (
        CALLED_RUNGS,
        CALLED_AUDITS,
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
        backend: what works on it, as of `mapper_over`.
        jobs: at a time (default: one for each core).
        seed: of the first audit.
        out: folder for `power.md` and `power.json`; None: none are written.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if something was missed that gave enough evidence, else 0.

    Raises:
        SpecError: a mutant cannot be imported, or does not fit its run, or an extra is not installed.
    """
    console, most = console or terminal.console(), runs or LADDER[-1]
    chosen = [*CATALOGUE, *map(mutant_named, mutants)]
    work: list[Callable[[], Power | Served]] = [
        partial(measure, mutant, audits=audits, seed=seed, most=most) for mutant in chosen
    ]
    work += _serving(most, seed)
    results = side_by_side(work, backend, jobs)
    found = [each for each in results if isinstance(each, Power)]
    services = [each for each in results if isinstance(each, Served)]
    console.print(_found_table(found, most), *([_served_table(services)] if services else []))
    missed = [each.name for each in found if each.missed(most)]
    lost = [f"{each.name} ({each.kind})" for each in services if each.missed]
    console.print(_summary(found, services, [*missed, *lost]))
    told = {"seed": seed, "runs": most, "confidence": CONFIDENCE, "found": found, "services": services}
    terminal.tell(lambda: {"folder": out, **told})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "power.md", _page(found, services, most, seed))
        write_json(out / "power.json", told)
        console.out(f"{out}: power.md, power.json", highlight=False)
    return int(bool(missed or lost))


def _serving(most: int, seed: int) -> Iterable[Callable[[], Served]]:
    """The work on services, with as many runs as there may be."""
    wired, called = ([rung for rung in rungs if rung <= most] for rungs in (SERVED_RUNGS, CALLED_RUNGS))
    if wired:
        yield from (partial(measure_on_network, broken, rungs=wired, seed=seed) for broken in ON_NETWORK)
        yield from (partial(measure_by_wiretap, broken, rungs=wired, seed=seed) for broken in BY_WIRETAP)
    if called:
        yield from (partial(measure_foreign, broken, rungs=called, seed=seed) for broken in FOREIGN)


def _row(each: Power, most: int) -> tuple[str, ...]:
    """In the order of `_HEADS`."""
    needed = f"> {count(most)}" if each.needed is None else count(each.needed)
    limit = NOTHING if each.limit is None else "< 1" if each.limit < 1.0 else count(math.ceil(each.limit))
    rounds = NOTHING if not each.watched else f"> {WATCHED}" if each.rounds is None else count(each.rounds)
    return each.name, each.what, each.found_by or NOTHING, needed, limit, rounds


def _served_row(each: Served) -> tuple[str, ...]:
    """In the order of `_SERVICES`."""
    needed = count(each.needed) if each.needed is not None else _NEVER if each.correct else f"> {count(each.most)}"
    audits = f"{each.found} of {each.audits}" if each.correct or each.needed is not None else NOTHING
    return each.name, each.what, each.found_by or NOTHING, needed, audits


def _table(heads: Sequence[str], rows: Iterable[tuple[str, bool, bool, tuple[str, ...]]]) -> Table:
    """A table of rows `(class, missed, found, cells)`."""
    shown = terminal.table("class", *heads[:3])
    for head in heads[3:]:
        shown.add_column(head, justify="right")
    for kind, missed, found, (name, *rest) in rows:
        style = "bold red" if missed else "green" if found else "yellow"
        shown.add_row(Text(kind, "dim"), Text(name, style), *map(Text, rest))
    return shown


def _found_table(found: Sequence[Power], most: int) -> Table:
    rows = ((each.kind or NOTHING, each.missed(most), each.needed is not None, _row(each, most)) for each in found)
    return _table(_HEADS, rows)


def _served_table(services: Sequence[Served]) -> Table:
    rows = ((each.kind, each.missed, each.correct or each.needed is not None, _served_row(each)) for each in services)
    return _table(_SERVICES, rows)


def _summary(found: Sequence[Power], services: Sequence[Served], missed: Sequence[str]) -> Text:
    text = f"{sum(each.needed is not None for each in found)} of {len(found)} broken learners found"
    broken, correct = ([each for each in services if each.correct is right] for right in (False, True))
    if services:
        text += f", {sum(each.needed is not None for each in broken)} of {len(broken)} broken services"
        accused, held = sum(each.found for each in correct), sum(each.audits for each in correct)
        text += f"; {accused} of {held} audits accuse correct ones"
    if not missed:
        return Text(f"{text}; the others give too little evidence.", "bold green")
    return Text(f"{text}; missed: {', '.join(missed)}.", "bold red")


def _page(found: Sequence[Power], services: Sequence[Served], most: int, seed: int) -> str:
    """All classes as Markdown, a table each."""
    tried = ", ".join(count(rung) for rung in LADDER if rung <= most)
    audits = found[0].audits
    least = "" if most == LADDER[-1] else f" --runs {most}"
    lines = [
        "# How many runs find what",
        "",
        f"Made by `sottovoce lab power{least} --seed {seed} --out docs`; do not edit.",
        "[What this is](selftest.md#the-catalogue).",
        "",
        f"*runs*: of {tried} runs of each world, the fewest with which at least {100 * FOUND:g} % of {audits} audits",
        f"find it at a confidence of {100 * CONFIDENCE:g} %. *found by*: the part of the audit that found it most often, there.",
        f"*limit*: runs of each world that carry the evidence that it takes, ln {1.0 / (1.0 - CONFIDENCE):.0f} nats;",
        f"{NOTHING} where that is not known. *rounds*: within which as many of {audits} runs under watch raise an alarm;",
        f"{NOTHING} where one run, or its numbers, show nothing.",
    ]
    for named, some in groupby(found, key=lambda each: each.kind or "of one's own"):
        lines += ["", f"## {named.capitalize()}", "", _line(_HEADS), "|---|---|---|---:|---:|---:|"]
        lines += [_line(_row(each, most)) for each in some]
    for kind, own in groupby(services, key=lambda each: each.kind):
        lines += ["", f"## {kind.capitalize()}", "", *_served_lines(kind, list(own))]
    return "\n".join(lines) + "\n"


def _served_lines(kind: ServiceKind, services: Sequence[Served]) -> list[str]:
    """A paragraph and a table."""
    rungs, audits, told = _AUDITED[kind]
    tried = ", ".join(count(rung) for rung in rungs if rung <= services[0].most)
    return [
        told,
        f"*runs*: of {tried} runs of each world, the fewest with which at least {100 * FOUND:g} % of {audits} audits find it.",
        "*audits*: how many do, there; of a correct service, how many of all audits accuse it.",
        "",
        _line(_SERVICES),
        "|---|---|---|---:|---:|",
        *(_line(_served_row(each)) for each in services),
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
