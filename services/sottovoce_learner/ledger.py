"""The ledger: what a learner has spent in all its runs. It stands in the state folder, beside the journals.

Nothing is booked twice. What a run has cost is in its journal, charged before the message was sent; the ledger adds a line
about each run: which algorithm, by which guarantee. A state folder that is lost is a ledger that is lost: keep it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from sottovoce.errors import DataError, NotReady
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.running.run import build_run
from sottovoce.spec import parse_spec
from sottovoce_learner.journal import WAY_OUT, Journal, is_blank, last_entry, sync_folder


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One run of one learner.

    Attributes:
        learner: its name.
        run_id: the run.
        index: the learner's, in the run.
        n_features: features of a record.
        spec: the whole run spec, JSON: with the two before it says by which guarantee the learner was charged.
        said: messages journaled.
        spent: epsilon charged for them; infinite where nothing was promised.
    """

    learner: str
    run_id: str
    index: int
    n_features: int
    spec: str
    said: int = 0
    spent: float = 0.0

    @classmethod
    def read(cls, text: str) -> LedgerLine:
        """A line as its file has it, checked: a folder may come from elsewhere, or be old.

        Raises:
            ValueError: it is none.
        """
        try:
            line = cls(**json.loads(text))
            document = json.loads(line.spec)
            learners, names = document["learners"], (line.learner, line.run_id, document["algorithm"]["name"])
        except (TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"it is not a line: {error}") from None
        n = len(learners) if isinstance(learners, list) else learners
        whole = [n, line.index, line.n_features, line.said]
        if any(type(each) is not str for each in names):
            raise ValueError("learner, run_id and the algorithm must be named")
        if any(type(each) is not int for each in whole) or not 0 <= line.index < n:
            raise ValueError(f"index must be of one of {n} learners, got {line.index}")
        if line.n_features < 1 or line.said or line.spent:  # the latter two are in the journal alone
            raise ValueError("n_features must be at least 1, and said and spent are not told here")
        return line

    @property
    def algorithm(self) -> str:
        """Its name."""
        return str(json.loads(self.spec)["algorithm"]["name"])

    def guarantee(self, *, imports: bool) -> Guarantee:
        """What was promised.

        Args:
            imports: whether the spec may name code to import: it came from the run's coordinator.

        Raises:
            SpecError: the algorithm is not installed here, or may not be imported.
        """
        return build_run(parse_spec(json.loads(self.spec), imports=imports), self.n_features).guarantee(self.index)


def claim(folder: Path, learner: str) -> TextIO:
    """Keep every other process from being this learner on this folder: two of them would each spend the whole budget.

    The claim lasts until the file is closed, or this process dies, however it does.

    Raises:
        NotReady: another process is this learner.
    """
    file = (folder / f"{learner}.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise NotReady(
            f"another process is learner {learner!r} on the state folder {folder}: stop it, or take another name or folder"
        ) from None
    return file


class Ledger:
    """All runs of the learners of one state folder.

    Args:
        folder: where journals stand.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open_run(self, line: LedgerLine, message_size: int, durability: Literal["process", "power"]) -> Journal:
        """The journal of a run, before its first message; what the run is about is noted beside it.

        The journal is there first: a line without one means that a journal was lost.

        Args:
            line: about the run.
            message_size, durability: of the journal.

        Raises:
            DataError: what stands there is damaged, or about another run or learner: nothing is written over it.
        """
        path = self._path(line)
        about = path.with_suffix(".ledger")
        noted = about.exists()
        if noted:
            _require_same(_line(about), line, about)
            last_entry(path, line.run_id)  # raises where it is lost
        journal = Journal(path, line.run_id, message_size, durability)
        try:
            if not noted and journal.entries():
                raise DataError(f"the journal {path} has no line {about.name} beside it; {WAY_OUT}")
            if not noted:
                _note(line, about)
        except BaseException:
            journal.close()
            raise
        return journal

    def _path(self, line: LedgerLine) -> Path:
        """Neither a run's id nor a learner's name has an @, so no two share a file. Once it was a dash, which both may have."""
        old = self.folder / f"{line.run_id}-{line.learner}.journal"
        about = old.with_suffix(".ledger")
        if about.exists() and (found := _line(about)).run_id == line.run_id and found.learner == line.learner:
            return old
        return self.folder / f"{line.run_id}@{line.learner}.journal"

    def lines(self, learner: str | None = None) -> list[LedgerLine]:
        """Every run (of one learner), by run id.

        Raises:
            DataError: a line or a journal is damaged, or one of the two missing: what was spent cannot be known, so nothing
                more may be.
        """
        self._require_lines(learner)
        return list(self._all(learner))

    def spent(self, learner: str, but: str = "") -> float:
        """Epsilon of all runs of a learner, but one: what a record pays that was used in each of them.

        Raises:
            DataError: as `lines`.
        """
        return math.fsum(line.spent for line in self.lines(learner) if line.run_id != but)

    def _all(self, learner: str | None) -> Iterator[LedgerLine]:
        for about in sorted(self.folder.glob("*.ledger")):
            line = _line(about)
            if learner not in (None, line.learner):
                continue
            entry = last_entry(about.with_suffix(".journal"), line.run_id)
            yield line if entry is None else replace(line, said=entry.round + 1, spent=entry.spent)

    def _require_lines(self, learner: str | None) -> None:
        """No journal in which something was said stands without its line: it would count for nothing.

        Raises:
            DataError: one does.
        """
        for journal in sorted(self.folder.glob("*.journal")):
            about = journal.with_suffix(".ledger")
            theirs = learner is None or journal.stem.endswith((f"@{learner}", f"-{learner}"))
            # Asked again at the end: a journal that was new may have got its line by now.
            if theirs and not about.exists() and not is_blank(journal) and not about.exists():
                raise DataError(f"the journal {journal} has no line {about.name} beside it; {WAY_OUT}")


def _line(about: Path) -> LedgerLine:
    try:
        return LedgerLine.read(about.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the ledger's line {about} cannot be read: {error}; {WAY_OUT}") from None


def _require_same(found: LedgerLine, line: LedgerLine, about: Path) -> None:
    if (found.run_id, found.learner) != (line.run_id, line.learner):
        raise DataError(
            f"the ledger's line {about} is about run {found.run_id!r} of {found.learner!r}, and must be about run "
            f"{line.run_id!r} of {line.learner!r}"
        )


def _note(line: LedgerLine, about: Path) -> None:
    """Others may read this folder at any moment: a line is there whole, or not yet."""
    facts = {key: value for key, value in asdict(line).items() if key not in ("said", "spent")}
    draft = about.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(about)
    sync_folder(about.parent)
