"""What became of messages: counts, and never what stands in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sottovoce_rpc.learner_status import LearnerStatus


@dataclass(slots=True)
class Tally:
    """Of one source, since this feeder began.

    Attributes:
        source: under which the learner counts its records.
        fed: records that the learner has in keeping.
        again: messages that came a second time, and were passed over.
        waiting: messages that were read and are neither fed nor refused yet.
        refused: messages that are no records of the run, by reason.
        written: how many of those were in the dead-letter file before.
    """

    source: str
    fed: int = 0
    again: int = 0
    waiting: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    written: int = 0


@dataclass(slots=True)
class Account:
    """Of all sources of a feeder.

    Attributes:
        tallies: one for each source.
        run_id: that is fed; empty: no learner has been reached yet.
        status: of the learner, when it was last asked; None: it does not answer.
        awaited: what must be there before anything is fed.
        kept: what becomes of refused messages, as "written to a file"; empty: they are dropped.
    """

    tallies: list[Tally] = field(default_factory=list)
    run_id: str = ""
    awaited: str = "the learner to be in a run"
    status: LearnerStatus | None = None
    kept: str = ""

    @property
    def fed(self) -> int:
        """Records that the learner has in keeping."""
        return sum(each.fed for each in self.tallies)

    @property
    def again(self) -> int:
        """Messages that came a second time."""
        return sum(each.again for each in self.tallies)

    @property
    def waiting(self) -> int:
        """Messages that were read, and are on their way."""
        return sum(each.waiting for each in self.tallies)

    @property
    def refused(self) -> Counter[str]:
        """By reason."""
        return sum((each.refused for each in self.tallies), Counter())

    @property
    def dropped(self) -> int:
        """Refused messages that are kept nowhere."""
        return 0 if self.kept else self.refused.total()
