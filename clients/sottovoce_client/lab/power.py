"""`sottovoce audit --self-test --power`: with how many runs every break of the catalogue is found, as a table and as a page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce.lab.selftest.catalogue import CATALOGUE
from sottovoce.lab.selftest.evidence import FOUND
from sottovoce.lab.selftest.power import CONFIDENCE, LADDER, WATCHED, Power, measure
from sottovoce_client import terminal
from sottovoce_client.documents import write_json
from sottovoce_client.lab.selftest import mutant_named, side_by_side
from sottovoce_client.wording import NOTHING, count

HEADS = "broken learner", "what is wrong", "found by", "runs", "limit", "rounds"


def measure_power(
    *,
    mutants: Sequence[str] = (),
    runs: int | None = None,
    audits: int = 10,
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
        jobs: processes (default: one for each core).
        seed: of the first audit.
        out: folder for `power.md` and `power.json`; None: none are written.
        console: where to print (default: standard output).

    Returns:
        The exit code: 1 if something was missed that gave enough evidence, else 0.

    Raises:
        SpecError: a mutant cannot be imported, or does not fit its run, or an extra is not installed.
    """
    console, most = console or Console(), runs or LADDER[-1]
    chosen = [*CATALOGUE, *map(mutant_named, mutants)]
    work = [partial(measure, mutant, audits=audits, seed=seed, most=most) for mutant in chosen]
    found: list[Power] = []
    with console.status("") as status:
        for each in side_by_side(work, jobs or os.cpu_count() or 1):
            found.append(each)
            status.update(f"{len(found)} of {len(work)}")
    missed = [each for each in found if each.missed(most)]
    console.print(_table(found, most))
    console.print(_summary(found, missed))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "power.md").write_text(page(found, most, seed), encoding="utf-8")
        write_json(out / "power.json", {"seed": seed, "runs": most, "confidence": CONFIDENCE, "found": found})
        console.out(f"{out}: power.md, power.json", highlight=False)
    return int(bool(missed))


def _row(each: Power, most: int) -> tuple[str, ...]:
    """In the order of `HEADS`."""
    needed = f"> {count(most)}" if each.needed is None else count(each.needed)
    limit = NOTHING if each.limit is None else "< 1" if each.limit < 1.0 else count(math.ceil(each.limit))
    rounds = NOTHING if not each.watched else f"> {WATCHED}" if each.rounds is None else count(each.rounds)
    return each.name, each.what, each.found_by or NOTHING, needed, limit, rounds


def _table(found: Sequence[Power], most: int) -> Table:
    shown = terminal.table("class", *HEADS[:3])
    for head in HEADS[3:]:
        shown.add_column(head, justify="right")
    for each in found:
        style = "bold red" if each.missed(most) else "yellow" if each.needed is None else "green"
        name, *rest = _row(each, most)
        shown.add_row(Text(each.kind or NOTHING, "dim"), Text(name, style), *map(Text, rest))
    return shown


def _summary(found: Sequence[Power], missed: Sequence[Power]) -> Text:
    text = f"{sum(each.needed is not None for each in found)} of {len(found)} broken learners found"
    if not missed:
        return Text(f"{text}; the others give too little evidence.", "bold green")
    return Text(f"{text}; missed: {', '.join(each.name for each in missed)}.", "bold red")


def page(found: Sequence[Power], most: int, seed: int) -> str:
    """All classes as Markdown, a table each."""
    tried = ", ".join(count(rung) for rung in LADDER if rung <= most)
    audits = found[0].audits
    least = "" if most == LADDER[-1] else f" --runs {most}"
    lines = [
        "# How many runs find what",
        "",
        f"Made by `sottovoce audit --self-test --power{least} --seed {seed} --out docs`; do not edit.",
        "[What this is](selftest.md#the-catalogue).",
        "",
        f"*runs*: of {tried} runs of each world, the fewest with which at least {100 * FOUND:g} % of {audits} audits",
        f"find it at a confidence of {100 * CONFIDENCE:g} %. *found by*: the part of the audit that found it most often, there.",
        f"*limit*: runs of each world that carry the evidence that it takes, ln {1.0 / (1.0 - CONFIDENCE):.0f} nats;",
        f"{NOTHING} where that is not known. *rounds*: within which as many of {audits} runs under watch raise an alarm;",
        f"{NOTHING} where one run, or its numbers, show nothing.",
    ]
    for kind, some in groupby(found, key=lambda each: each.kind or "of one's own"):
        lines += ["", f"## {kind.capitalize()}", "", _line(HEADS), "|---|---|---|---:|---:|---:|"]
        lines += [_line(_row(each, most)) for each in some]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
