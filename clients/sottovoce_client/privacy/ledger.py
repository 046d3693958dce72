"""`sottovoce ledger`: show, verify and repair the privacy ledgers in a state folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.formatting import MISSING_VALUE, format_count, format_epsilon, format_number, pluralize
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.loss import NO_LOSS, PrivacyLoss
from sottovoce_core.text import escape_control
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_learner.storage.store import Ledger

_HEADS = ("learner", "run", "algorithm", "threat model", "accounting", "messages")
"""Columns before that of epsilon."""
_OPTIONAL_COLUMNS = ("accounting", "threat model", "algorithm")
"""Columns that are omitted on a narrow terminal, the least needed first."""


def _describe_guarantee(entry: LedgerEntry, imports: bool) -> tuple[str, str]:
    """Return the threat model and the accounting mode of an entry."""
    try:
        guarantee = entry.build_guarantee(imports=imports)
    except SpecError:  # of an algorithm that is not installed here, or may not be imported
        return MISSING_VALUE, MISSING_VALUE
    return guarantee.basis.threat_model.value if math.isfinite(
        guarantee.epsilon()
    ) else MISSING_VALUE, guarantee.basis.mode


def _open_ledger(folder: Path) -> Ledger:
    """Open the ledgers of a state folder; raise `SpecError` if there is no such folder."""
    if not folder.is_dir():
        raise SpecError(
            f"the state folder must contain a learner's ledger, got {folder}, which is not a folder: give the --state that the "
            "learner was started with"
        )
    return Ledger(folder)


def _require_ledger(ledger: Ledger, learner: str | None) -> None:
    """Raise `SpecError` if there is no ledger (of this learner), and no sign of a lost one."""
    names = ledger.list_learners()
    if not names or learner not in (None, *names):
        known, whose = ", ".join(names) or "none", "" if learner is None else f" of {learner!r}"
        raise SpecError(f"no ledger{whose} in the state folder {ledger.folder}; there are ledgers of: {known}")


def show_ledger(
    folder: Path,
    learner: str | None,
    console: Console | None = None,
    *,
    delta: float = 0.0,
    allow_imports: bool = False,
) -> None:
    """Print one line for each run, and the total of each learner.

    Args:
        folder: State folder.
        learner: Learner to show; None: all.
        delta: Delta of the epsilons; 0: pure.
        console: Console (default: standard output).
        allow_imports: Whether to import code that a run's spec names; if not, the guarantees of such runs are not shown.

    Raises:
        SpecError: There is no such folder, or no run of this learner in it.
        CorruptStateError: The ledger cannot be read.
    """
    ledger = _open_ledger(folder)
    lines = ledger.list_entries(learner)
    if delta:  # of the open run, verification computes what a delta needs
        names = sorted({line.learner for line in lines})
        lines = [line for name in names for line in ledger.verify(name, imports=allow_imports)]
    if not lines:
        known = ", ".join(sorted({line.learner for line in ledger.list_entries()})) or "none"
        whose = "" if learner is None else f" of {learner!r}"
        raise SpecError(f"no runs{whose} in the state folder {folder}; there are runs of: {known}")
    console = console or terminal.create_console()
    table, left_out = terminal.fit_table(
        console.width,
        (*_HEADS, _head(delta)),
        _rows(lines, delta, allow_imports),
        right_aligned=("messages", _head(delta)),
        optional_columns=_OPTIONAL_COLUMNS,
    )
    console.print(table)
    if left_out:
        console.print(f"a wider terminal shows {', '.join(left_out)}as well; so does --json")
    terminal.print_json_if_requested(
        lambda: [
            {"learner": each.learner, "run": each.run_id, "algorithm": each.algorithm}
            | dict(
                zip(
                    ("threat_model", "accounting"),
                    map(_none_if_missing, _describe_guarantee(each, allow_imports)),
                    strict=True,
                )
            )
            | {"messages": each.rounds_committed, "epsilon": each.loss.epsilon(delta), "delta": delta}
            for each in lines
        ]
    )


def _head(delta: float) -> str:
    return f"ε at delta {delta:g}" if delta else "ε"


def _sum_losses(entries: Sequence[LedgerEntry]) -> PrivacyLoss:
    return sum((each.loss for each in entries), NO_LOSS)


def _rows(lines: Sequence[LedgerEntry], delta: float, imports: bool) -> list[tuple[str, ...]]:
    """Return a row for each run, and a total of each learner that was in several runs."""
    rows: list[tuple[str, ...]] = []
    for name in sorted({line.learner for line in lines}):
        own = [line for line in lines if line.learner == name]
        for line in own:
            counts = format_count(line.rounds_committed), format_number(line.loss.epsilon(delta))
            rows.append(
                (
                    escape_control(name),
                    escape_control(line.run_id),
                    escape_control(line.algorithm),
                    *_describe_guarantee(line, imports),
                    *counts,
                )
            )
        if len(own) > 1:
            total = format_number(_sum_losses(own).epsilon(delta))
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


def _none_if_missing(text: str) -> str | None:
    return None if text == MISSING_VALUE else text


def verify_ledger(
    folder: Path,
    learner: str | None,
    console: Console | None = None,
    *,
    delta: float = 0.0,
    allow_imports: bool = False,
) -> None:
    """Verify a state folder, and print the result.

    Args:
        folder: State folder.
        learner: Learner to verify; None: all.
        delta: Delta of the epsilons; 0: pure.
        console: Console (default: standard output).
        allow_imports: Whether to import code that a run's spec names; if not, the charges of such runs are not computed again.

    Raises:
        SpecError: There is no such folder, or no ledger (of this learner) in it.
        CorruptStateError: Something is lost or damaged, or a charge differs from that of the spec.
    """
    out, ledger = console or terminal.create_console(), _open_ledger(folder)
    _require_ledger(ledger, learner)
    names = ledger.list_learners() if learner is None else [learner]
    found = []
    for name in names:
        runs = Ledger(folder).verify(name, imports=allow_imports)
        spent = _sum_losses(runs).epsilon(delta)
        out.print(
            f"{name}: {pluralize(len(runs), 'run')}, ε {format_epsilon(spent, delta)} in total: the ledger is complete",
            markup=False,
            highlight=False,
        )
        found.append({"learner": name, "runs": len(runs), "epsilon": spent, "delta": delta})
    terminal.print_json_if_requested(lambda: found)


def repair_ledger(folder: Path, learner: str, charge: float | None, console: Console | None = None) -> None:
    """Charge the most that may have been spent, and print the result.

    Args:
        folder: State folder.
        learner: Learner whose ledger is repaired.
        charge: Minimum epsilon to charge.
        console: Console (default: standard output).

    Raises:
        SpecError: There is no such folder, or nothing of this learner in it, and no charge was given.
        FailedPrecondition: The learner is running.
        CorruptStateError: The possible spending is unknown, and no charge was given.
    """
    ledger = _open_ledger(folder)
    if charge is None:
        _require_ledger(ledger, learner)
    done, out = ledger.repair(learner, charge), console or terminal.create_console()
    if done.backup_folder is None:
        text = f"the ledger is complete: ε {format_number(done.total_epsilon_spent)} in total, as before"
    else:
        figures = (
            f"charged ε {format_number(done.epsilon_charged)}; the total is {format_number(done.total_epsilon_spent)}"
        )
        text = f"{figures}; a backup of the former state is in {done.backup_folder}"
    out.print(text, markup=False, highlight=False, soft_wrap=True)
    charged = 0.0 if done.backup_folder is None else done.epsilon_charged
    terminal.print_json_if_requested(
        lambda: {
            "learner": learner,
            "charged": charged,
            "epsilon": done.total_epsilon_spent,
            "backup": done.backup_folder,
        }
    )


def adopt_ledger(folder: Path, learner: str, console: Console | None = None) -> None:
    """Declare a copy of a state folder as the only one that is used.

    Args:
        folder: State folder.
        learner: Learner whose ledger it has.
        console: Console (default: standard output).

    Raises:
        SpecError: There is no such folder, or nothing of this learner in it.
        FailedPrecondition: The learner is running.
        CorruptStateError: The copy is incomplete.
    """
    ledger = _open_ledger(folder)
    _require_ledger(ledger, learner)
    Ledger(folder).accept_moved_folder(learner)
    runs = ledger.list_entries(learner)
    spent = math.fsum(run.epsilon_spent for run in runs)
    text = (
        f"{learner} continues from {folder}: {pluralize(len(runs), 'run')}, ε {format_number(spent)} in total\n"
        "Messages that were sent after this copy was made are not in it. If it is a backup, charge them before the learner "
        "starts: "
        f"sottovoce ledger --repair --state {folder} --learner {learner} --charge EPSILON"
    )
    (console or terminal.create_console()).print(text, markup=False, highlight=False, soft_wrap=True)
    terminal.print_json_if_requested(lambda: {"learner": learner, "state": folder, "runs": len(runs), "epsilon": spent})
