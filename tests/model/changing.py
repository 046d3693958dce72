"""A run under way that learners leave or join, or that goes on without one (`sottovoce_coordinator.run_controller`).

All rest; the spec that follows is written down; then it is told. Between these the coordinator awaits, so anything may happen.
"""

from __future__ import annotations

from collections.abc import Iterator

from sottovoce_coordinator.run_state import RunState
from tests.model import books, machine, runs
from tests.model.books import Book
from tests.model.coordinating import LOST, RESTING, Coordinating
from tests.model.stage import Step
from tests.model.state import Begin, Change, Coordinator, State, less


class Changing(Coordinating):
    """Changes of who takes part."""

    def _changes(self, state: State) -> Iterator[Step]:
        coordinator = state.coordinator
        if not coordinator.up:
            return
        if coordinator.change is None:
            yield from self._asked(state)
            yield from self._gives_up(state)
        elif not coordinator.change.offline_intervals:
            yield from self._waits(state, coordinator.change)
        else:
            yield from self._tells_change(state, coordinator.change)

    # ---- it begins ------------------------------------------------------------------------------------------

    def _asked(self, state: State) -> Iterator[Step]:
        """`RunController.leave` of who is there, and `RunController.join`; what is refused changes nothing."""
        book = state.coordinator.book
        if book.state is not RunState.RUNNING or book.losing:
            return
        for verb in ("leave", "join"):
            for i in self.movable if getattr(state.faults, verb) else ():
                if self._is_here(state, i) and books.changed(self.shape, book, verb, i) is not None:
                    change = less(self._rests(state, Change(verb, i)), verb)
                    yield machine.Step(verb, f"learner {i} is to {verb}; all are told to rest", change, fault=True)

    def _gives_up(self, state: State) -> Iterator[Step]:
        """`RunController._watch_deadline` of a learner that is gone, and `RunController._continue_without_lost`."""
        book = state.coordinator.book
        if book.losing:
            yield machine.Step(
                "losing", "all are told to rest, for learners are lost", self._rests(state, Change("lose"))
            )
            return
        for i in self.movable if state.faults.lost else ():
            if not self._is_here(state, i) and (missed := books.missed(self.shape, book, i)) != book:
                coordinator = state.coordinator._replace(book=missed)
                given_up = less(state._replace(coordinator=coordinator), "lost")
                yield machine.Step("given up", f"learner {i} is given up", given_up, fault=True)

    def _rests(self, state: State, change: Change) -> State:
        """`RunController._quiesce`: that all will begin anew is written down, and then they are told to end what they do."""
        coordinator = state.coordinator._replace(change=change)
        ceiling = books.ceiling(self.shape, coordinator.book) + self.shape.window
        coordinator = coordinator._replace(kept=coordinator.record, reserved=max(coordinator.reserved, ceiling))
        processes = tuple(
            each._replace(told=(*each.told, RESTING)) if each.joined else each for each in state.processes
        )
        return state._replace(coordinator=coordinator, processes=processes)

    # ---- it is written down ---------------------------------------------------------------------------------

    def _waits(self, state: State, change: Change) -> Iterator[Step]:
        """`RunController._quiesce` until everybody rests, or for so long that who does not is lost."""
        coordinator = state.coordinator
        busy = self._waited_for(state)
        if not busy:
            yield self._written(state, change)
        elif state.faults.lost:
            names = ", ".join(f"learner {i}" for i in sorted(busy))
            book = coordinator.book._replace(losing=coordinator.book.losing | busy)
            late = less(state._replace(coordinator=coordinator._replace(book=book)), "lost")
            step = self._written(late, change)
            yield step._replace(
                kind="given up", text=f"{names} does not rest, and is given up; {step.text}", fault=True
            )

    def _waited_for(self, state: State) -> frozenset[int]:
        here = {self.shape.owner(f) for f, process in enumerate(state.processes) if process.joined}
        away = frozenset(range(self.shape.learners)) - here
        return books.busy(self.shape, state.coordinator.book, away)

    def _written(self, state: State, change: Change) -> Step:
        """`RunController._apply_change`: write the spec before sending it. An invalid one changes nothing or ends a run."""
        coordinator = state.coordinator
        offline_intervals = self._absences(coordinator.book, change)
        if offline_intervals is not None:
            after = coordinator._replace(change=change._replace(offline_intervals=offline_intervals))
            after = after._replace(kept=after.record._replace(offline_intervals=offline_intervals))
            kind, text = "written down", "the changed spec is written down"
        elif change.verb == "lose":
            book = coordinator.book._replace(state=RunState.FAILED)
            after = self._granting(coordinator._replace(book=book, change=None))
            kind, text = "failed", "the run cannot go on so, and ends"
        else:
            after = coordinator._replace(change=change._replace(offline_intervals=coordinator.kept.offline_intervals))
            kind, text = "as before", "the run cannot go on so, and will go on as before"
        return machine.Step(kind, text, state._replace(coordinator=after))

    def _absences(self, book: Book, change: Change) -> str | None:
        """Who takes part from now on; None: the run cannot go on so."""
        return books.changed(self.shape, book, change.verb, change.learner)

    # ---- it is told -----------------------------------------------------------------------------------------

    def _tells_change(self, state: State, change: Change) -> Iterator[Step]:
        """`RunController._restart_learners`."""
        coordinator, before = state.coordinator, state.coordinator.book
        book = books.amended(self.shape, before, change.offline_intervals)
        lost = runs.lost(book.shape(self.shape))
        book = book._replace(losing=book.losing - lost)
        after = self._told(coordinator._replace(book=book, change=None))
        told = Begin(book.attempt, book.offline_intervals, book.granted)
        processes = tuple(
            each._replace(told=(*each.told, LOST if self.shape.owner(f) in lost else told)) if each.joined else each
            for f, each in enumerate(state.processes)
        )
        yield machine.Step(
            "told", "all begin anew, by the changed spec", state._replace(coordinator=after, processes=processes)
        )

    def _told(self, coordinator: Coordinator) -> Coordinator:
        """What is written when a change was told: that it ends the run, if it does."""
        return coordinator if coordinator.book.state is RunState.RUNNING else self._granting(coordinator)
