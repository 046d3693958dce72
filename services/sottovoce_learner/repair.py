"""What an owner can do about a ledger: check it, charge the most where a part of it is lost, or say that it was moved."""

from __future__ import annotations

import secrets
import shutil
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sottovoce.errors import DataError, SpecError
from sottovoce_learner import lines as ledger_lines
from sottovoce_learner.bodies import Said
from sottovoce_learner.entries import Entry, Kind
from sottovoce_learner.ledger_line import LedgerLine
from sottovoce_learner.log import Reading, host, sync_folder
from sottovoce_learner.mark import Mark, MarkFile
from sottovoce_learner.snapshots import named, read_image
from sottovoce_learner.standing import REPAIRED, Files, Standing, look, most_spent, spent, stand
from sottovoce_learner.store import claim


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair has done.

    Attributes:
        charged: epsilon that was added to what is known; 0: nothing was damaged.
        in_all: epsilon of all runs now.
        aside: where what was damaged lies; None: nothing was.
    """

    charged: float
    in_all: float
    aside: Path | None


def verify(folder: Path, learner: str, *, imports: bool) -> list[LedgerLine]:
    """Hold every line and entry against the others, and every charge of the open run against its spec.

    Args:
        folder: the state folder.
        learner: its name.
        imports: whether a spec may name code to import.

    Returns:
        All runs.

    Raises:
        DataError: something does not fit.
    """
    standing = stand(Files(folder, learner))
    if standing is None:
        return []
    if standing.opened is not None and standing.log is not None:
        _require_charges(standing.opened, standing.log, imports=imports)
    return list(standing.runs())


def _require_charges(line: LedgerLine, log: Reading, *, imports: bool) -> None:
    """Raises `DataError` where a round was charged another price than its spec asks for."""
    try:
        run = line.run(imports=imports)
    except SpecError:  # of an algorithm that is not installed here, or may not be imported
        return
    accountant = run.algorithm.accountant(line.index)
    image, spent = read_image(log, named(run)), 0.0
    if image is not None:
        for records in array("I", image.counts):
            spent += accountant.next_loss()
            accountant.advance(records)
        spent += accountant.next_loss()
    for entry, said in _rounds(log):
        if entry.round > 0:
            accountant.advance(said.records)
        if entry.kind is Kind.ROUND:
            spent += accountant.next_loss()
            if entry.spent != spent:
                raise DataError(
                    f"entry {entry.sequence} of the log of run {line.run_id!r} charges {entry.spent:.6g} by round {entry.round}, "
                    f"and its spec asks for {spent:.6g}: it was written by another version, or is not the one that was written"
                )


def repair(folder: Path, learner: str, charge: float | None = None) -> Repair:
    """Where something is lost or damaged, charge the most that may have been spent, and say so in the ledger for ever.

    Never lowers a figure. The run that was open is over for this learner. What was damaged is kept aside.

    Args:
        folder: the state folder.
        learner: its name.
        charge: epsilon that is charged at least, beside what the ledger still knows; needed where the most cannot be known.

    Raises:
        NotReady: the learner is running.
        DataError: what may have been spent cannot be known, and no charge was given.
    """
    files = Files(folder, learner)
    held = claim(folder, learner)
    try:
        try:
            whole = stand(files)
        except DataError as error:
            return _repaired(files, look(files, copied=True), str(error).partition(":")[0], charge)
        if charge is not None:
            return _repaired(files, whole or look(files), "charged by the owner", charge)
        return Repair(0.0, sum(run.spent for run in whole.runs()) if whole else 0.0, None)
    finally:
        held.close()


def moved(folder: Path, learner: str) -> None:
    """This copy of a state folder is whole, and the only one that is left in use.

    Raises:
        NotReady: the learner is running.
        DataError: it is not whole.
    """
    files = Files(folder, learner)
    held = claim(folder, learner)
    try:
        standing = stand(files, copied=True)
        if standing is None or standing.mark is None:
            raise DataError(f"there is no ledger of {learner!r} in the state folder {folder}")
        with closing(MarkFile(files.mark)) as mark_file:
            mark_file.settle(standing.mark)
    finally:
        held.close()


def _repaired(files: Files, standing: Standing, why: str, charge: float | None) -> Repair:
    most = most_spent(standing)
    if most is None and charge is None:
        raise DataError(
            f"what {files.learner!r} has spent cannot be known from {files.folder}: say what it was at most with --charge "
            "EPSILON, such as its owner's --budget in full"
        )
    known = standing.elsewhere
    still = 0.0 if standing.log is None else spent(standing.log)  # beside it stands what the owner charges
    added = max(0.0 if most is None else most - known, still + (charge or 0.0))
    opened, mark = standing.opened, standing.mark
    facts = {
        "kind": REPAIRED,
        "run_id": "" if opened is None else opened.run_id,
        "said": 0 if mark is None else mark.reserved.until,
        "spent": added,
        "why": why,
        "charge": charge,
    }
    aside = _set_aside(files)
    prefix = _prefix(files, standing)
    line, _ = ledger_lines.encode(ledger_lines.dated(facts), ledger_lines.walk(prefix)[-1].chain)
    _replace(files, prefix + line, known + added)
    for log in files.logs():
        shutil.rmtree(log)
    sync_folder(files.folder)
    return Repair(added, known + added, aside)


def _set_aside(files: Files) -> Path:
    """Keep a copy of everything, before anything is changed."""
    aside = files.folder / "damaged" / f"{files.learner}-{secrets.token_hex(4)}"
    aside.mkdir(mode=0o700, parents=True)
    for path in (files.runs, files.mark):
        if path.exists():
            shutil.copy2(path, aside)
    for log in files.logs():
        shutil.copytree(log, aside / log.name)
    return aside


def _prefix(files: Files, standing: Standing) -> bytes:
    """The lines that are right; where there is none, the first line of a ledger."""
    if standing.lines and standing.lines[0].facts.get("learner") == files.learner:
        return files.runs.read_bytes()[: standing.lines[-1].end]
    store = secrets.token_hex(16) if standing.mark is None else standing.mark.store.hex()
    return ledger_lines.encode(ledger_lines.first(store, files.learner), bytes(16))[0]


def _replace(files: Files, raw: bytes, elsewhere: float) -> None:
    """The ledger first: from then on the charge stands, whatever dies."""
    draft = files.folder / f"{files.learner}.draft"
    draft.unlink(missing_ok=True)
    ledger_lines.append(draft, raw, 0)
    draft.replace(files.runs)
    lines = ledger_lines.walk(raw)
    with closing(MarkFile(draft)) as mark_file:
        mark_file.settle(Mark(bytes.fromhex(lines[0].facts["store"]), host(), len(lines), lines[-1].chain, elsewhere))
    draft.replace(files.mark)


def _rounds(log: Reading) -> Iterator[tuple[Entry, Said]]:
    for entry in log.uncovered:
        if entry.kind in (Kind.ROUND, Kind.CLOSE):
            yield entry, Said.decode(entry.body)
