"""What the parts of a world share: its state's pieces put in place, who speaks by which run, and deaths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, TypeAlias

from sottovoce_coordinator.store import LearnerBinding
from sottovoce_learner.ingest.record_queue import PlannedRecordQueue
from sottovoce_learner.peers.inbox import Inbox
from sottovoce_learner.peers.outbox import NeighbourLink
from sottovoce_learner.storage import store
from sottovoce_learner.storage.run_log import RunLog
from tests.model import machine
from tests.model.folders import Amended, Folder
from tests.model.runs import Shape
from tests.model.state import CALLEE, CALLER, Process, Session, State, Stream, less, still_open, with_end, with_item

Step: TypeAlias = machine.Step[State]


class Stage:
    """A run, and the parts of the product that decide in it. Mistakes put others in their place.

    Args:
        shape: of the run.
        fed: learners whose records come from a feeder while the run goes on; the others have theirs.
        movable: learners that may leave, join, or be lost while they are away (default: all).
        chatty: learners report whenever something has changed, not only when it matters.
        at_once: a stream is there in one step, from the call to where both ends use it.
    """

    SAYS: ClassVar[tuple[str, ...]] = ("drawn", "written", "sent")
    FEEDS: ClassVar[tuple[str, ...]] = ("written", "acknowledged")
    membership: type[LearnerBinding] = LearnerBinding
    run_log: Callable[..., RunLog] = RunLog
    intake: Callable[..., PlannedRecordQueue] = PlannedRecordQueue
    link: Callable[[int], NeighbourLink] = NeighbourLink
    inbox: Callable[..., Inbox[bytes]] = Inbox
    amended: Amended = staticmethod(store._is_reconfigured)

    def __init__(
        self,
        shape: Shape,
        fed: tuple[int, ...] = (),
        movable: tuple[int, ...] | None = None,
        *,
        chatty: bool = False,
        at_once: bool = False,
    ) -> None:
        self.shape, self.fed, self.chatty, self.at_once = shape, fed, chatty, at_once
        self.movable = tuple(range(shape.learners)) if movable is None else movable

    def _put(self, state: State, f: int, process: Process, folder: Folder | None = None) -> State:
        after = state._replace(processes=with_item(state.processes, f, process))
        return after if folder is None else after._replace(folders=with_item(state.folders, f, folder))

    def _live(self, state: State, f: int, session: Session) -> State:
        return self._put(state, f, state.processes[f]._replace(session=session))

    def _own(self, state: State, f: int) -> Shape:
        """The run as this learner goes by it: its session's, which is what its ledger says."""
        return state.folders[f].shape(self.shape)

    # ---- streams end ----------------------------------------------------------------------------------------

    def _ended(self, stream: Stream, end: int) -> Stream:
        return stream._replace(ends=with_end(stream.ends, end, None), on_way=with_end(stream.on_way, end, ()))

    def _hung_up(self, state: State, f: int) -> State:
        """A process or its session is gone: so are its ends of all streams."""
        streams = state.streams
        for end in (CALLER, CALLEE):
            streams = tuple(self._ended(s, end) if (s.caller, s.callee)[end] == f else s for s in streams)
        return state._replace(streams=still_open(streams))

    # ---- deaths ---------------------------------------------------------------------------------------------

    def _dies(self, state: State, f: int) -> Iterator[Step]:
        if state.faults.deaths and state.processes[f] != Process():
            yield machine.Step(
                "died", f"{self.shape.called(f)} dies, and is started again", self._dead(state, f), fault=True
            )

    def _death(self, state: State, f: int, stage: str, what: str) -> Iterator[Step]:
        """In the middle of a step, behind one of its writes."""
        if state.faults.deaths:
            text = f"{self.shape.called(f)} {what}, but dies right after this: {stage}"
            yield machine.Step(f"died: {stage}", text, self._dead(state, f), fault=True)

    def _dead(self, state: State, f: int) -> State:
        return less(self._hung_up(self._put(state, f, Process()), f), "deaths")
