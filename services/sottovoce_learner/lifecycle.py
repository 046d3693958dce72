"""Where a learner stands in a run: from connecting to the end, and whether it is taken up again from there. No network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from sottovoce.errors import RunOver, Unavailable
from sottovoce_learner.role import Role
from sottovoce_rpc.learner_status import LearnerState

log = structlog.get_logger()


class Lifecycle:
    """Of one session.

    Args:
        role: of the learner.
        report: reports now where it stands.
    """

    def __init__(self, role: Role, report: Callable[[], None]) -> None:
        self._role, self._report = role, report
        self.state, self.detail = LearnerState.CONNECTING, ""
        self._replaced, self._over = asyncio.Event(), asyncio.Event()

    def become(self, state: LearnerState, t: int, detail: str = "") -> None:
        """Another state, in this round."""
        self.state, self.detail = state, detail
        log.info("state", learner=self._role.name, state=state.name.lower(), round=t, detail=detail)
        self._report()

    @property
    def ended(self) -> bool:
        """True when nothing more will be said."""
        return not self.state.under_way

    @property
    def silent(self) -> bool:
        """True when a neighbour has nothing to expect. After the last round it may still lack what was said in it."""
        return self.ended and self.state is not LearnerState.FINISHED

    def replace(self) -> None:
        """Another session takes the run up."""
        self._replaced.set()

    async def replaced(self) -> Unavailable:
        """Wait until another session does; what whoever deals with this one is told then."""
        await self._replaced.wait()
        return Unavailable("this learner takes the run up again")

    def dismiss(self) -> None:
        """The run is over for good: nobody will take it up again."""
        self._over.set()

    @property
    def dismissed(self) -> bool:
        """Is the run over for good?"""
        return self._over.is_set()

    async def over(self) -> RunOver:
        """Wait until it is dismissed; what whoever brings records is told then."""
        await self._over.wait()
        return RunOver(self.ending, self._word)

    @property
    def ending(self) -> str:
        """That the run is over, and how."""
        return f"run {self._role.run_id} is over for this learner ({self._word})"

    @property
    def _word(self) -> str:
        return self.state.name.lower().replace("_", " ")
