"""The ledger: what learners have spent in all their runs, read from a state folder.

Nothing is booked twice. What the open run has cost is in its log, charged before the message was sent; what closed runs have
cost stands in the ledger's lines. A state folder that is lost is a ledger that is lost: keep it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from sottovoce.errors import DataError
from sottovoce_learner.ledger_line import LedgerLine
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
        found = [line for standing in standings if standing is not None for line in standing.runs()]
        return sorted(found, key=lambda line: line.run_id)

    def spent(self, learner: str, but: str = "") -> float:
        """Epsilon of all runs of a learner, but one: what a record pays that was used in each of them.

        Raises:
            DataError: as `lines`.
        """
        return math.fsum(line.spent for line in self.lines(learner) if line.run_id != but)

    def require_known(self, learner: str, sent: Sequence[Sent]) -> None:
        """Hold the ledger against what is known elsewhere: one that was set back, or begun anew, has forgotten what was spent.

        What its owner charged (`sottovoce ledger --repair --charge`) stands for all that was sent before.

        Raises:
            DataError: as `lines`; or the ledger knows less of a run than was sent in it.
        """
        if not sent:
            return
        standing = stand(Files(self.folder, learner))
        runs, lines = ([], ()) if standing is None else ([*standing.runs()], standing.lines)
        known = {line.run_id: line.said for line in runs}
        charged = [line.at for line in lines if line.facts.get("charge") is not None]
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
