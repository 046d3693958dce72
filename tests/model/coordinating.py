"""What the coordinator does: it hears reports, grants rounds, takes learners back, dies and is started again."""

from __future__ import annotations

from collections.abc import Iterator

from sottovoce_coordinator.run_state import RunState
from sottovoce_rpc.learner_status import LearnerState
from tests.model import books, folders, machine, runs
from tests.model.books import Status
from tests.model.learners import Learners
from tests.model.stage import Step
from tests.model.state import Begin, Coordinator, Directive, Process, Session, State, Stop, less

RESTING, LOST = Stop(), Stop(over=True)


class Coordinating(Learners):
    """A coordinator, and the run that it leads."""

    def _coordinates(self, state: State) -> Iterator[Step]:
        coordinator = state.coordinator
        if not coordinator.up:
            book = books.taken_up(self.shape, coordinator.kept, coordinator.reserved)
            back = state._replace(coordinator=coordinator._replace(up=True, book=book))
            yield machine.Step("coordinator back", "the coordinator is started again", back)
            return
        for f, process in enumerate(state.processes):
            if process.joined and process.session is not None:
                yield from self._reports(state, f, process, process.session)
        yield from self._coordinator_fails(state)

    # ---- reports and grants ---------------------------------------------------------------------------------

    def _reports(self, state: State, f: int, process: Process, session: Session) -> Iterator[Step]:
        """`Coordinator._handle_message`: of this attempt, or, while all rest, of one before it; and what is granted."""
        i, coordinator = self.shape.owner(f), state.coordinator
        book, status = coordinator.book, (session.state, session.done, session.said)
        if process.attempt == book.attempt:
            if self._tells(coordinator, process, i, session):
                heard = books.reported(self.shape, book, i, status)
                after = state._replace(coordinator=self._granting(coordinator._replace(book=heard)))
                text = f"{self.shape.called(f)} reports: {session.state.name.lower()}, {session.said} rounds said"
                yield machine.Step("reported", text, after)
            if session.granted < book.granted and coordinator.change is None and not process.told:
                granted = self._live(state, f, session._replace(granted=book.granted))
                yield machine.Step("granted", f"{self.shape.called(f)} is granted more", granted)
        elif coordinator.change is not None and (rests := books.rests(self.shape, book, i, status)) != book:
            text = f"{self.shape.called(f)} reports of attempt {process.attempt}: {session.state.name.lower()}"
            yield machine.Step("reported before", text, state._replace(coordinator=coordinator._replace(book=rests)))

    def _tells(self, coordinator: Coordinator, process: Process, i: int, session: Session) -> bool:
        """`Session._round`: when its state changes, or in time for the next grant. Chatty learners may at any time.

        Where all are to rest, each tells when it does; one that has nothing to do before. Who is there again tells in any case,
        which matters where it is waited for, or the last one that is.
        """
        book, now = coordinator.book, (session.state, session.done, session.said)
        before: Status = book.statuses[i]
        if i in runs.lost(book.shape(self.shape)):
            return False
        if coordinator.change is not None and process.told and session.done < session.granted:
            return False
        if before == now:
            return i in book.unsure or books.reported(self.shape, book, i, now).state is not book.state
        if self.chatty or before[0] is not session.state or coordinator.change is not None:
            return True
        due = session.granted < self.shape.rounds and 2 * (session.granted - session.done) <= self.shape.window
        return due and before[1] < session.done

    def _granting(self, coordinator: Coordinator) -> Coordinator:
        """`RunController._handle_consequences`, `_grant`: an end is written before it is told, and so is how far grants may go.

        Who finds a grant written ahead by the coordinator before this one writes it again; that it does not is a little less.
        """
        book = coordinator.book
        if book.state in (RunState.FINISHED, RunState.FAILED):
            return coordinator._replace(kept=coordinator.record)
        if coordinator.change is not None or book.granted <= coordinator.reserved:
            return coordinator
        return coordinator._replace(kept=coordinator.record, reserved=book.granted + (self.shape.window + 1) // 2)

    # ---- who is there again ---------------------------------------------------------------------------------

    def _taken_back(self, state: State, f: int) -> tuple[State, Directive | None]:
        """`RunController.handle_rejoin`; who was lost is told so."""
        i, coordinator, process = self.shape.owner(f), state.coordinator, state.processes[f]
        book, session = coordinator.book, process.session
        if i in runs.lost(book.shape(self.shape)):
            return state, LOST
        speaks = session is not None and (session.state is LearnerState.FINISHED or not process.resting)
        granted = session.granted if speaks and session is not None else 0
        log = state.folders[f].log
        said, closed = folders.rounds_said(self.shape, i, log), self._closed(i, log)
        if coordinator.change is not None:
            book = books.rested(self.shape, book, i, granted, said, closed)
            return state._replace(coordinator=coordinator._replace(book=book)), RESTING
        book = books.taken_back(self.shape, book, i, max(granted, said))
        told = Begin(book.attempt, book.absences, book.granted)
        return state._replace(coordinator=self._granting(coordinator._replace(book=book))), told

    def _closed(self, i: int, log: bytes) -> bool:
        """What a learner that is started again tells of its last round."""
        return folders.closed_by(self.shape, i, log)

    # ---- what fails -----------------------------------------------------------------------------------------

    def _coordinator_fails(self, state: State) -> Iterator[Step]:
        coordinator, faults = state.coordinator, state.faults
        if faults.streams:
            for f, process in enumerate(state.processes):
                if process.joined or process.written:
                    alone = less(self._put(state, f, self._alone(process)), "streams")
                    yield machine.Step("alone", f"{self.shape.called(f)} loses the coordinator", alone, fault=True)
        if faults.coordinator:
            processes = tuple(map(self._alone, state.processes))
            # Progress is written about once a second: it was just now, or not since the last grant.
            for kept in dict.fromkeys((coordinator.kept, coordinator.record)):
                down = self._forgets(coordinator._replace(up=False, kept=kept, book=kept, change=None))
                after = less(state._replace(processes=processes, coordinator=down), "coordinator")
                age = "new" if kept == coordinator.record else "old"
                text = f"the coordinator dies; what it last wrote about progress is {age}"
                yield machine.Step("coordinator died", text, after, fault=True)

    def _alone(self, process: Process) -> Process:
        """Its stream to the coordinator is gone, with all that was on its way to it."""
        return process._replace(joined=False, written=False, told=())

    def _forgets(self, coordinator: Coordinator) -> Coordinator:
        """What does not survive its death, beside streams and a change that was not written down: nothing."""
        return coordinator
