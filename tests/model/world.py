"""Learners, their folders, the streams between them, and a coordinator: what each does next, and what may go wrong.

What is decided is decided by the product (`runs.py`, `folders.py`, `channels.py`, `books.py`). What the product awaits, or
writes to a file, is a step here, and says which function it stands for. What happens between two awaits of one process is one
step; a death may cut it at any write.

A learner that dies is started again at once: being down is doing nothing. No deadline passes, but for one after which a learner
is lost; else from every state the run must be able to finish.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sottovoce_coordinator.run_state import RunState
from tests.model import books, folders, machine, promises
from tests.model.changing import Changing
from tests.model.runs import Shape
from tests.model.stage import Step
from tests.model.state import NONE, Coordinator, Faults, Process, State, less, with_item

BEGUN = ("issued", "confirmed", "called", "attached", "connected", "reported", "granted")
"""What has happened where a run is under way: all have joined, met their neighbours, and been granted rounds."""
HEARD = (*BEGUN, "said", "heard")
"""And as many rounds were said and heard as can be before one is learned."""


Terms = tuple[Shape, Faults, tuple[int, ...], tuple[int, ...], bool, tuple[str, ...]]


class World(Changing):
    """A run with its faults. Mistakes are subclasses (`mistakes.py`).

    Args:
        shape: of the run.
        faults: that may happen, at most.
        fed: learners whose records come from a feeder while the run goes on; the others have theirs.
        movable: learners that may leave, join, or be lost while they are away (default: all).
        chatty: learners report whenever something has changed, not only when it matters.
        begun: the kinds of steps that have been taken, as often as they could be, before anything fails. Then a stream is there
            in one step, from the call to where both ends use it.
        judged: the invariants that are looked at.
    """

    def __init__(
        self,
        shape: Shape,
        faults: Faults = NONE,
        fed: tuple[int, ...] = (),
        movable: tuple[int, ...] | None = None,
        *,
        chatty: bool = False,
        begun: tuple[str, ...] = (),
        judged: Collection[str] = promises.ALL,
    ) -> None:
        super().__init__(shape, fed, movable, chatty=chatty, at_once=bool(begun))
        self.faults, self.begun, self.judged = faults, begun, judged
        self.terms: Terms = (shape, faults, fed, self.movable, chatty, begun)
        """What it is of: worlds that agree in these are one, unless there is a mistake in them."""

    def start(self) -> State:
        """Nobody has joined, or the run is under way."""
        n, book = self.shape.learners, books.new_book(self.shape)
        each = tuple(folders.fresh_folder(self.shape, i, fed=i in self.fed) for i in range(n))
        coordinator = Coordinator(True, (self.membership(),) * n, book, book)
        state = State(each, (Process(),) * n, (), coordinator, (0,) * n, frozenset(), NONE)
        while following := [step.after for step in self.steps(state) if step.kind in self.begun]:
            state = following[0]
        return state._replace(faults=self.faults)

    def steps(self, state: State) -> Iterator[Step]:
        """All that may happen next."""
        for f, process in enumerate(state.processes):
            if not process.out:
                yield from self._joins(state, f)
                yield from self._reads(state, f)
                yield from self._round(state, f)
                yield from self._feeds(state, f)
                yield from self._calls(state, f)
                yield from self._dies(state, f)
        for number in range(len(state.streams)):
            yield from self._streams(state, number)
        yield from self._coordinates(state)
        yield from self._changes(state)
        yield from self._copies(state)

    # ---- folders --------------------------------------------------------------------------------------------

    def _copies(self, state: State) -> Iterator[Step]:
        """A copy is put back, or started, as a snapshot of its disk would be: that its files are others does not show."""
        faults, down = state.faults, state.processes[0] == Process()
        if state.copy is None and (faults.hot or (faults.copies and down)):
            copied = less(state._replace(copy=state.folders[0]), "copies" if faults.copies else "hot")
            yield machine.Step("copied", "the folder of learner 0 is copied", copied, fault=True)
        if state.copy is not None:
            if down and state.copy != state.folders[0]:
                back = state._replace(folders=with_item(state.folders, 0, state.copy), copy=None, set_back=True)
                yield machine.Step("restored", "the copy takes the place of the folder of learner 0", back, fault=True)
            beside = state._replace(
                folders=(*state.folders, state.copy), processes=(*state.processes, Process()), copy=None
            )
            yield machine.Step("started beside", "a second learner 0 is started on the copy", beside, fault=True)
        for f, process in enumerate(state.processes):
            log = folders.cut(state.folders[f].log)
            if faults.cuts and process == Process() and log is not None:
                shorter = less(self._put(state, f, process, state.folders[f]._replace(log=log)), "cuts")
                yield machine.Step(
                    "cut", f"the log of {self.shape.called(f)} loses its last entry", shorter, fault=True
                )

    # ---- what is judged -------------------------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        """The invariant that does not hold."""
        return promises.broken(self.shape, state, self.judged)

    def describe(self, state: State) -> list[str]:
        """How everybody stands, for whoever reads a trace."""
        told = []
        for f, process in enumerate(state.processes):
            session, who = process.session, self.shape.called(f)
            if session is None:
                told.append(f"{who}: {'out' if process.out else 'joining'}")
                continue
            rounds = f"{session.said} rounds said, {session.done} learned, {session.granted} granted"
            kept = [t for t, _ in session.kept]
            resting = ", resting" if process.resting else ""
            told.append(f"{who}: {session.state.name.lower()}{resting}; {rounds}; its links keep rounds {kept}")
        book = state.coordinator.book
        offline_intervals = "" if book.offline_intervals == "[]" else f", offline_intervals {book.offline_intervals}"
        return [*told, f"coordinator: run {book.state.value}, {book.granted} rounds granted{offline_intervals}"]

    def ended(self, state: State) -> bool:
        """The run is over: finished, failed for a reason, or a learner may not go on because of what was done to its folder."""
        if state.coordinator.kept.state in (RunState.FINISHED, RunState.FAILED):
            return True
        return state.damaged or (state.set_back and state.processes[0].out)
