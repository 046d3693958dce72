"""The ledger: what learners have spent in all their runs, read from a state folder.

Nothing is booked twice. What the open run has cost is in its log, charged before the message was sent; what closed runs have
cost stands in the ledger's lines. Journals of earlier versions count, too, and cannot be gone on with. A state folder that is
lost is a ledger that is lost: keep it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from sottovoce.errors import DataError
from sottovoce_learner.ledger_line import LedgerLine
from sottovoce_learner.lines import ending
from sottovoce_learner.old_journal import WAY_OUT, is_blank, last_entry
from sottovoce_learner.standing import Files, stand
from sottovoce_rpc.directives import Sent

_SECOND = timedelta(seconds=1)
"""To which the moments of lines are written down."""


class Ledger:
    """All runs of the learners of one state folder.

    Args:
        folder: the state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, learner: str | None = None) -> list[LedgerLine]:
        """Every run (of one learner), by run id.

        Raises:
            DataError: something of it is lost or damaged: what was spent cannot be known, so nothing more may be.
        """
        names = self.learners() if learner is None else [learner]
        standings = [stand(Files(self.folder, name)) for name in names]
        now = [line for standing in standings if standing is not None for line in standing.runs()]
        return sorted((*now, *self.old(learner)), key=lambda line: line.run_id)

    def spent(self, learner: str, but: str = "") -> float:
        """Epsilon of all runs of a learner, but one: what a record pays that was used in each of them.

        Raises:
            DataError: as `lines`.
        """
        return math.fsum(line.spent for line in self.lines(learner) if line.run_id != but)

    def require_known(self, learner: str, sent: Sequence[Sent]) -> None:
        """Hold the ledger against what is known elsewhere: one that was set back, or begun anew, has forgotten what was spent.

        What its owner charged (`sottovoce ledger repair --charge`) stands for all that was sent before.

        Raises:
            DataError: as `lines`; or the ledger knows less of a run than was sent in it.
        """
        if not sent:
            return
        standing = stand(Files(self.folder, learner))
        runs, lines = ([], ()) if standing is None else ([*standing.runs()], standing.lines)
        known = {line.run_id: line.said for line in (*runs, *self.old(learner))}
        charged = [line.at for line in lines if line.facts.get("charge") is not None and line.at is not None]
        for each in sent:
            covered = any(each.at < moment + _SECOND for moment in charged)
            if (has := known.get(each.run_id, 0)) < each.rounds and not covered:
                raise DataError(
                    f"the ledger of {learner!r} in {self.folder} must know all rounds that were sent, got {has} of {each.rounds} "
                    f"in run {each.run_id}: the state folder was set back or is a new one, and has forgotten what was spent. Put "
                    "the newest folder back; where it is lost, charge what was spent since: stop the learner, `sottovoce ledger "
                    f"repair {self.folder} --learner {learner} --charge EPSILON`, start it"
                )

    def learners(self) -> list[str]:
        """Names of all learners that have a ledger here, or had one."""
        files = {path.stem for kind in ("runs", "mark") for path in self.folder.glob(f"*.{kind}")}
        return sorted(files | {path.name.partition("@")[2] for path in self.folder.glob("*@*") if path.is_dir()})

    # ---- journals of earlier versions -------------------------------------------------------------------------

    def old(self, learner: str | None = None) -> list[LedgerLine]:
        """Runs (of one learner) that are in journals of earlier versions.

        Raises:
            DataError: a line or a journal is damaged, or one of the two missing.
        """
        self._require_lines(learner)
        return list(self._all(learner))

    def _all(self, learner: str | None) -> Iterator[LedgerLine]:
        for about in ending(self.folder, ".ledger"):
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
        for journal in ending(self.folder, ".journal"):
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
