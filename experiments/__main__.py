"""Command line: run items of the papers, and print our values beside the paper's."""

from __future__ import annotations

import argparse
import itertools
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.item import PAPERS, Item, list_items, load_item
from experiments.page import format_cells, list_measures, write_pages
from experiments.run import read_results, run_item, store_results
from experiments.verdict import compare_with_stored, judge
from sottovoce_client.terminal import show_progress_bar
from sottovoce_core.errors import SottovoceError

_UNFINISHED = Path("sottovoce-runs/experiments")
"""Folder of the rows of interrupted commands, which the next one does not compute again."""


def main() -> int:
    """Run the command; return its exit code: 1 if `--check` finds a difference, 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument(
        "paper", nargs="?", choices=[*PAPERS, "all"], help="default: list all items with their verdicts"
    )
    parser.add_argument("item", nargs="?", help="default: all items of the paper")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_const", const="full", dest="form", help="all rounds and replicas")
    form.add_argument(
        "--check",
        action="store_const",
        const="check",
        dest="form",
        help="short runs on data that are always there; compared with the stored ones",
    )
    parser.add_argument(
        "--store", action="store_true", help="store the results in experiments/, and write the pages anew"
    )
    parser.add_argument("--pages", action="store_true", help="write the pages in docs/ from the stored results")
    parser.add_argument("--backend", default="processes", help="processes, ray, dask, or the address of a cluster")
    parser.add_argument("--jobs", type=int, help="parallel runs (default: one for each core)")
    options, console = parser.parse_args(), Console(highlight=False)
    papers = list(PAPERS) if options.paper in (None, "all") else [options.paper]
    pairs = [(paper, name) for paper in papers for name in list_items(paper) if options.item in (None, name)]
    if not pairs:
        parser.error(f"the item must be one of {', '.join(list_items(options.paper))}, got {options.item}")
    if options.paper is None:
        return _list(console, pairs, pages=options.pages)
    failed = 0
    for paper, name in pairs:
        try:
            failed = max(failed, _run(console, paper, name, options))
        except (SottovoceError, ValidationError) as error:
            console.print(f"{paper} {name}: {error}", style="red", markup=False)
            failed = 2
    if options.store:
        write_pages()
    return failed


def _list(console: Console, pairs: list[tuple[str, str]], *, pages: bool) -> int:
    if pages:
        write_pages()
        return 0
    table = Table("paper", "item", "title", "verdict", box=box.SIMPLE_HEAD)
    for paper, name in pairs:
        item, stored = load_item(paper, name), read_results(paper, name).get("full")
        table.add_row(paper, name, item.title, judge(item, stored)[0] if stored else "not run")
    console.print(table)
    return 0


def _run(console: Console, paper: str, name: str, options: argparse.Namespace) -> int:
    """Run an item and print its results; return 1 if they differ from the stored ones."""
    item, form = load_item(paper, name), options.form or "quick"
    if form not in item.forms:
        console.print(f"{paper} {name}: has no form {form}")
        return 0
    if item.needs is not None and find_spec(item.needs) is None:
        console.print(f"{paper} {name}: skipped, because it needs {item.needs}, which is not installed")
        return 0
    with show_progress_bar(f"{paper} {name}") as report:
        document = run_item(paper, name, form, _UNFINISHED, report, options.backend, options.jobs)
    console.print(f"\n{item.title}", style="bold")
    console.print(item.shows, markup=False)
    table = _tabulate(item, document)
    wide = Console(highlight=False, width=max(console.width, 200))
    Console(highlight=False, width=wide.measure(table).maximum).print(table)  # not cut to the terminal
    differences = []
    if form == "check":
        differences = (
            []
            if options.store
            else compare_with_stored(
                document, read_results(paper, name).get("check", {}), item.forms["check"].tolerance
            )
        )
        console.print(
            "\n".join(differences) or f"equal to the stored results, in {document['seconds']} s", markup=False
        )
    else:
        verdict, reasons = judge(item, document)
        console.print(f"verdict: {verdict}, after {document['seconds']} s", style="bold")
        console.print("\n".join(reasons), markup=False)
    if options.store:
        console.print(store_results(paper, name, document), markup=False)
    return int(bool(differences))


def _tabulate(item: Item, document: dict[str, Any]) -> Table:
    """Tabulate the results: a section for each variant, a row for each setting, and ours beside the paper's."""
    is_printed = document["form"] != "check"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for measure, has_paper in list_measures(item):
        table.add_column(item.names.get(measure, measure.replace("_", " ")), justify="right", no_wrap=True)
        if has_paper and is_printed:
            table.add_column("paper", justify="right", style="dim", no_wrap=True)
    for variant, rows in itertools.groupby(document["rows"], lambda row: row["variant"]):
        if variant:
            table.add_section()
            table.add_row(variant, style="bold")
        for row in rows:
            cells = (cell if is_printed else cell[:1] for cell in format_cells(item, row))
            table.add_row(row["setting"] or "the run", *itertools.chain(*cells))
    return table


if __name__ == "__main__":
    sys.exit(main())
