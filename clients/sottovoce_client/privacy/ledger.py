"""`sottovoce ledger`: what learners have spent, read from their state folder, checked and repaired."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.formatting import MISSING_VALUE, format_count, format_number, pluralize
from sottovoce_core.errors import SpecError
from sottovoce_core.text import escape_control
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_learner.storage.store import Ledger

_HEADS = ("learner", "run", "algorithm", "threat model", "accounting", "messages", "ε")
_NUMBERS = ("messages", "ε")
_SPARE = ("accounting", "threat model", "algorithm")
"""Left out where there is no room for all."""


def _promise(line: LedgerEntry, imports: bool) -> tuple[str, str]:
    try:
        guarantee = line.build_guarantee(imports=imports)
    except SpecError:  # of an algorithm that is not installed here, or may not be imported
        return MISSING_VALUE, MISSING_VALUE
    return guarantee.basis.threat_model.value if math.isfinite(
        guarantee.epsilon()
    ) else MISSING_VALUE, guarantee.basis.mode


def _ledger_in(folder: Path) -> Ledger:
    """Raises `SpecError` where there is no such folder."""
    if not folder.is_dir():
        raise SpecError(
            f"the state folder must be one where a learner keeps its ledger, got {folder}, which is no folder: give what the "
            "learner was started with as --state"
        )
    return Ledger(folder)


def _require(ledger: Ledger, learner: str | None) -> None:
    """Raises `SpecError` where nothing is left of a ledger (of this learner), and no sign that there was one."""
    names = ledger.list_learners()
    if not names or learner not in (None, *names):
        there, whose = ", ".join(names) or "nobody", "" if learner is None else f" of {learner!r}"
        raise SpecError(f"no ledger{whose} in the state folder {ledger.folder}; there are ledgers of: {there}")


def show_ledger(
    folder: Path, learner: str | None, console: Console | None = None, *, allow_imports: bool = False
) -> None:
    """Print one line per run, and the sum of each learner.

    Args:
        folder: the state folder.
        learner: only this one's runs.
        console: where to print (default: standard output).
        allow_imports: import code that a run's spec names, to say what was promised; without, that is left open.

    Raises:
        SpecError: there is no such folder, or no run of this learner in it.
        CorruptStateError: the ledger cannot be read.
    """
    ledger = _ledger_in(folder)
    lines = ledger.list_entries(learner)
    if not lines:
        there = ", ".join(sorted({line.learner for line in ledger.list_entries()})) or "nobody"
        whose = "" if learner is None else f" of {learner!r}"
        raise SpecError(f"no runs{whose} in the state folder {folder}; there are runs of: {there}")
    console = console or terminal.create_console()
    table, left_out = terminal.fit_table(
        console.width, _HEADS, _rows(lines, allow_imports), right_aligned=_NUMBERS, optional_columns=_SPARE
    )
    console.print(table)
    if left_out:
        console.print(f"a wider terminal shows {', '.join(left_out)}, too; so does --json")
    terminal.print_json_if_requested(
        lambda: [
            {"learner": each.learner, "run": each.run_id, "algorithm": each.algorithm}
            | dict(zip(("threat_model", "accounting"), map(_known, _promise(each, allow_imports)), strict=True))
            | {"messages": each.rounds_committed, "epsilon": each.epsilon_spent}
            for each in lines
        ]
    )


def _rows(lines: Sequence[LedgerEntry], imports: bool) -> list[tuple[str, ...]]:
    """A row for each run, and one for all of a learner that was in several."""
    rows: list[tuple[str, ...]] = []
    for name in sorted({line.learner for line in lines}):
        own = [line for line in lines if line.learner == name]
        for line in own:
            counts = format_count(line.rounds_committed), format_number(line.epsilon_spent)
            rows.append(
                (
                    escape_control(name),
                    escape_control(line.run_id),
                    escape_control(line.algorithm),
                    *_promise(line, imports),
                    *counts,
                )
            )
        if len(own) > 1:
            total = format_number(math.fsum(line.epsilon_spent for line in own))
            rows.append(
                (
                    escape_control(name),
                    "all runs",
                    "",
                    "",
                    "",
                    format_count(sum(line.rounds_committed for line in own)),
                    total,
                )
            )
    return rows


def _known(text: str) -> str | None:
    return None if text == MISSING_VALUE else text


def verify_ledger(
    folder: Path, learner: str | None, console: Console | None = None, *, allow_imports: bool = False
) -> None:
    """Check a state folder, and say what was checked.

    Args:
        folder: the state folder.
        learner: only this one.
        console: where to print (default: standard output).
        allow_imports: import code that a run's spec names; without, its charges are not computed again.

    Raises:
        SpecError: there is no such folder, or no ledger (of this learner) in it.
        CorruptStateError: something is lost or damaged, or a charge is another one than the spec asks for.
    """
    out, ledger = console or terminal.create_console(), _ledger_in(folder)
    _require(ledger, learner)
    names = ledger.list_learners() if learner is None else [learner]
    found = []
    for name in names:
        runs = Ledger(folder).verify(name, imports=allow_imports)
        spent = format_number(math.fsum(run.epsilon_spent for run in runs))
        out.print(
            f"{name}: {pluralize(len(runs), 'run')}, ε {spent} in all: nothing is lost", markup=False, highlight=False
        )
        found.append({"learner": name, "runs": len(runs), "epsilon": math.fsum(run.epsilon_spent for run in runs)})
    terminal.print_json_if_requested(lambda: found)


def repair_ledger(folder: Path, learner: str, charge: float | None, console: Console | None = None) -> None:
    """Charge the most that may have been spent, and say what was done.

    Args:
        folder: the state folder.
        learner: whose ledger.
        charge: epsilon that is charged at least.
        console: where to print (default: standard output).

    Raises:
        SpecError: there is no such folder, or nothing of this learner in it, and no charge was given.
        FailedPrecondition: the learner is running.
        CorruptStateError: what may have been spent cannot be known, and no charge was given.
    """
    ledger = _ledger_in(folder)
    if charge is None:
        _require(ledger, learner)
    done, out = ledger.repair(learner, charge), console or terminal.create_console()
    if done.backup_folder is None:
        text = f"nothing is lost: ε {format_number(done.total_epsilon_spent)} in all, as before"
    else:
        figures = f"charged ε {format_number(done.epsilon_charged)}, which makes {format_number(done.total_epsilon_spent)} in all"
        text = f"{figures}; what was there is kept in {done.backup_folder}"
    out.print(text, markup=False, highlight=False, soft_wrap=True)
    charged = 0.0 if done.backup_folder is None else done.epsilon_charged
    terminal.print_json_if_requested(
        lambda: {
            "learner": learner,
            "charged": charged,
            "epsilon": done.total_epsilon_spent,
            "kept_in": done.backup_folder,
        }
    )


def adopt_ledger(folder: Path, learner: str, console: Console | None = None) -> None:
    """Take a copy of a state folder for the only one.

    Args:
        folder: the state folder.
        learner: whose ledger.
        console: where to print (default: standard output).

    Raises:
        SpecError: there is no such folder, or nothing of this learner in it.
        FailedPrecondition: the learner is running.
        CorruptStateError: it is not whole.
    """
    ledger = _ledger_in(folder)
    _require(ledger, learner)
    Ledger(folder).accept_moved_folder(learner)
    runs = ledger.list_entries(learner)
    spent = math.fsum(run.epsilon_spent for run in runs)
    text = (
        f"{learner} goes on from {folder}: {pluralize(len(runs), 'run')}, ε {format_number(spent)} in all\n"
        "What was sent after this copy was made is not in it. If it is a backup, charge that before the learner starts: "
        f"sottovoce ledger --repair --state {folder} --learner {learner} --charge EPSILON"
    )
    (console or terminal.create_console()).print(text, markup=False, highlight=False, soft_wrap=True)
    terminal.print_json_if_requested(lambda: {"learner": learner, "state": folder, "runs": len(runs), "epsilon": spent})
