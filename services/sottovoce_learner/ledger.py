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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from sottovoce.errors import DataError, NotReady
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.running.run import build_run
from sottovoce.spec import parse_spec
from sottovoce_learner.journal import last_entry


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

    @property
    def algorithm(self) -> str:
        """Its name."""
        return str(json.loads(self.spec)["algorithm"]["name"])

    def guarantee(self) -> Guarantee:
        """What was promised.

        Raises:
            SpecError: the algorithm is not installed here.
        """
        return build_run(parse_spec(json.loads(self.spec)), self.n_features).guarantee(self.index)


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

    def open_run(self, line: LedgerLine) -> Path:
        """Note what a run is about, before its first message; returns where its journal belongs."""
        path = self.folder / f"{line.run_id}-{line.learner}.journal"
        about = path.with_suffix(".ledger")
        if not about.exists():
            facts = {key: value for key, value in asdict(line).items() if key not in ("said", "spent")}
            # Others may read this folder at any moment: a line is there whole, or not yet.
            draft = path.with_suffix(".draft")
            with draft.open("w", encoding="utf-8") as file:
                json.dump(facts, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(about)
        return path

    def lines(self, learner: str | None = None) -> list[LedgerLine]:
        """Every run (of one learner), by run id.

        Raises:
            DataError: a line cannot be read: what it cost cannot be known, so nothing more may be spent.
        """
        return list(self._all(learner))

    def spent(self, learner: str, but: str = "") -> float:
        """Epsilon of all runs of a learner, but one: what a record pays that was used in each of them.

        Raises:
            DataError: a line cannot be read.
        """
        return math.fsum(line.spent for line in self.lines(learner) if line.run_id != but)

    def _all(self, learner: str | None) -> Iterator[LedgerLine]:
        for about in sorted(self.folder.glob("*.ledger")):
            try:
                facts = json.loads(about.read_text(encoding="utf-8"))
                line = LedgerLine(**facts)
            except (OSError, ValueError, TypeError) as error:
                raise DataError(f"the ledger's line {about} cannot be read: {error}") from None
            if learner not in (None, line.learner):
                continue
            entry = last_entry(about.with_suffix(".journal"))
            if entry is None:
                yield line
            else:
                yield LedgerLine(**facts, said=entry.round + 1, spent=entry.spent)
