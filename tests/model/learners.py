"""What a learner does: it joins and is briefed, speaks, hears and learns round by round, rests, and takes records in."""

from __future__ import annotations

from collections.abc import Iterator

from sottovoce_coordinator.store import Claim, LearnerBinding
from sottovoce_core.errors import FailedPrecondition, PermissionDenied, Unavailable
from sottovoce_learner.storage.wal import RoundPayload
from sottovoce_rpc.learner_status import LearnerState
from tests.model import channels, folders, machine, runs
from tests.model.folders import Folder
from tests.model.stage import Step
from tests.model.state import Begin, Coordinator, Directive, Process, Session, State, less, with_item
from tests.model.streams import Streams


class Learners(Streams):
    """Learners, on their folders."""

    # ---- joining --------------------------------------------------------------------------------------------

    def _joins(self, state: State, f: int) -> Iterator[Step]:
        process = state.processes[f]
        if not state.coordinator.up or process.joined:
            return
        if process.confirmed:
            yield from self._returns(state, f)
        elif process.written:
            yield from self._confirms(state, f)
        else:
            yield from self._introduces(state, f)

    def _claim(self, state: State, f: int, *, rejoins: bool = False) -> Claim:
        """`Learner._join`: what it says of itself."""
        i, folder, session = self.shape.owner(f), state.folders[f], state.processes[f].session
        journaled = None if session is None else session.said
        if session is None and folders.stands(self.shape, i, folder):
            journaled = folders.rounds_said(self.shape, i, folder.log)
        return Claim(str(i), bytes([i] * 16), folder.incarnation, rejoins, journaled)

    def _introduces(self, state: State, f: int) -> Iterator[Step]:
        """`Coordinator._admit` up to the issue, which is durable, and `Learner._join`, which writes it."""
        i, coordinator, who = self.shape.owner(f), state.coordinator, self.shape.called(f)
        if not folders.stands(self.shape, i, state.folders[f]):  # `Learner._require_whole`, before it joins
            yield self._refused(state._replace(damaged=True), f)
            return
        said = coordinator.book.statuses[i][2]
        try:
            member = coordinator.members[i].admit(
                self._claim(state, f), is_connected=self._is_here(state, i), rounds_committed=said
            )
        except Unavailable:  # it tries again
            return
        except (FailedPrecondition, PermissionDenied):
            yield self._refused(state, f)
            return
        issued = state._replace(coordinator=self._remembered(coordinator, i, member))
        folder = state.folders[f]._replace(incarnation=member.issued_incarnation)
        written = self._put(issued, f, Process(written=True), folder)
        yield machine.Step(
            "issued", f"{who} is issued incarnation {member.issued_incarnation} and writes it down", written
        )
        if state.faults.answers:
            lost = less(issued, "answers")
            text = f"{who} is issued incarnation {member.issued_incarnation}; the answer is lost"
            yield machine.Step("issue lost", text, lost, fault=True)

    def _confirms(self, state: State, f: int) -> Iterator[Step]:
        """`Coordinator._admit` from the confirmation on, and the welcome."""
        i, coordinator, who = self.shape.owner(f), state.coordinator, self.shape.called(f)
        number = state.folders[f].incarnation
        try:
            member = coordinator.members[i].confirm(self._claim(state, f), number)
        except FailedPrecondition:
            yield self._refused(state, f)
            return
        confirmed = state._replace(coordinator=self._remembered(coordinator, i, member))
        text = f"{who} confirms incarnation {number}"
        process = Process(confirmed=True, joined=True)
        yield machine.Step("confirmed", text, self._welcomed(self._put(confirmed, f, process), f))
        if state.faults.answers:
            lost = less(self._put(confirmed, f, Process()), "answers")
            yield machine.Step("confirmation lost", f"{text}; the answer is lost", lost, fault=True)

    def _returns(self, state: State, f: int) -> Iterator[Step]:
        """A process that never stopped comes back."""
        i, coordinator, process = self.shape.owner(f), state.coordinator, state.processes[f]
        try:
            member = coordinator.members[i].admit(
                self._claim(state, f, rejoins=True), is_connected=self._is_here(state, i)
            )
        except FailedPrecondition:
            yield self._refused(state, f)
            return
        after = state._replace(coordinator=self._remembered(coordinator, i, member))
        after = self._welcomed(self._put(after, f, process._replace(joined=True)), f)
        yield machine.Step("returned", f"{self.shape.called(f)} comes back to the coordinator", after)

    def _welcomed(self, state: State, f: int) -> State:
        """`Coordinator._connect_learner`, and `Learner._obey`, which follows it before anything else happens to it."""
        state, told = self._taken_back(state, f)
        return state if told is None else self._obeys(state, f, told)

    def _is_here(self, state: State, i: int) -> bool:
        """A stream that is gone is noticed at once: until then nobody of this name would be let in, which is doing nothing."""
        return any(process.joined for f, process in enumerate(state.processes) if self.shape.owner(f) == i)

    def _remembered(self, coordinator: Coordinator, i: int, member: LearnerBinding) -> Coordinator:
        """`LearnerRegistry._save_binding`: durable before it is told."""
        return coordinator._replace(members=with_item(coordinator.members, i, member))

    def _refused(self, state: State, f: int) -> Step:
        return machine.Step("refused", f"{self.shape.called(f)} is refused, and ends", self._out(state, f))

    def _out(self, state: State, f: int) -> State:
        return self._hung_up(self._put(state, f, Process(out=True)), f)

    def _taken_back(self, state: State, f: int) -> tuple[State, Directive | None]:
        """The coordinator's part: what it tells a learner that is there again."""
        raise NotImplementedError

    # ---- directives -----------------------------------------------------------------------------------------

    def _reads(self, state: State, f: int) -> Iterator[Step]:
        """`Following._follow_once`: the next directive."""
        process = state.processes[f]
        if not process.told:
            return
        told, *rest = process.told
        before = self._put(state, f, process._replace(told=tuple(rest)))
        who = self.shape.called(f)
        if isinstance(told, Begin):
            yield machine.Step("began", f"{who} begins attempt {told.attempt}", self._obeys(before, f, told))
            for name, stage in self._openings(before, f, told.absences):
                yield from self._death(stage, f, name, f"begins attempt {told.attempt}")
        elif told.over:
            yield machine.Step(
                "left out", f"{who} is told that the run goes on without it", self._obeys(before, f, told)
            )
        else:
            yield machine.Step("rested", f"{who} rests", self._obeys(before, f, told))

    def _obeys(self, state: State, f: int, told: Directive) -> State:
        """`Learner._obey`."""
        process = state.processes[f]
        session = process.session
        if isinstance(told, Begin):
            if session is None or told.attempt > process.attempt or process.resting:
                return self._begun(self._hung_up(state, f), f, told)
            return self._live(state, f, session._replace(granted=max(session.granted, told.granted)))
        if told.over:
            return self._out(state, f)
        if session is not None and session.state is not LearnerState.FINISHED:
            session = session._replace(state=LearnerState.STOPPED)
        return self._hung_up(self._put(state, f, process._replace(resting=True, session=session)), f)

    def _openings(self, state: State, f: int, absences: str) -> Iterator[tuple[str, State]]:
        """The folder after every write by which it is opened, but for the last."""
        writes = folders.opened(self.amended, self.shape, self.shape.owner(f), state.folders[f], absences)
        for name, folder in [] if writes is None else zip(writes.names[:-1], writes.folders, strict=False):
            yield name, state._replace(folders=with_item(state.folders, f, folder))

    def _begun(self, state: State, f: int, told: Begin) -> State:
        """`Learner._prepare`: a new session; the log is opened, and its state recovered from it (`Session.__init__`)."""
        i, folder, process = self.shape.owner(f), state.folders[f], state.processes[f]
        if not folders.stands(self.shape, i, folder):
            return self._put(state, f, Process(out=True))._replace(damaged=True)
        writes = folders.opened(self.amended, self.shape, i, folder, told.absences)
        if writes is None:
            return self._put(state, f, Process(out=True))
        folder = writes.folders[-1]
        shape = folder.shape(self.shape)
        back = folders.recovered(self.link, shape, i, self._believed(folder.log))
        if back is None:
            return self._put(state, f, Process(out=True), folder)
        over = back.done >= runs.attendance(shape, i).end
        session = Session(
            LearnerState.FINISHED if over else LearnerState.CONNECTING,
            told.granted,
            back.said,
            back.done,
            RoundPayload(b""),
            back.kept,
            channels.new_box(shape, i, back.done, back.heard),
            (0,) * len(runs.neighbours(shape, i)),
        )
        begun = process._replace(session=session, attempt=told.attempt, resting=False)
        return self._put(state, f, begun, folder)

    def _believed(self, log: bytes) -> bytes:
        """As much of a log as a learner goes by that is started again."""
        return log

    # ---- a round --------------------------------------------------------------------------------------------

    def _round(self, state: State, f: int) -> Iterator[Step]:
        session, shape, i = state.processes[f].session, self._own(state, f), self.shape.owner(f)
        if session is None:
            return
        if session.state is LearnerState.CONNECTING:
            # `Session._connected`. It waits for one neighbour after the other; that each has greeted is a little less.
            known = {j for j, number in zip(runs.neighbours(shape, i), session.known, strict=True) if number}
            if runs.met(shape, i, session.done) <= known:
                running = self._live(state, f, session._replace(state=LearnerState.RUNNING))
                yield machine.Step("connected", f"{self.shape.called(f)} has met its neighbours", running)
        if session.state is not LearnerState.RUNNING:
            return
        if session.said <= session.done < session.granted:
            yield from self._says(state, f, session)
        if session.done < min(session.said, folders.filled(self.intake, self.shape, i, state.folders[f])):
            if channels.complete(self.inbox, shape, i, session.box):
                yield from self._learns(state, f, session, "learned", f"learns round {session.done}")
            elif session.done < runs.attendance(shape, i).end - 1 and channels.enough(
                self.inbox, shape, i, session.box
            ):
                what = f"learns round {session.done}, without those who are late"
                yield from self._learns(state, f, session, "held", what)

    def _says(self, state: State, f: int, session: Session) -> Iterator[Step]:
        """`Session._send`: nothing is awaited from the draw to the links, so only a death comes in between."""
        what = f"says round {session.done}"
        message = self._drawn(state, f, session)
        stages = [*self._stages(state, f, session, message)]
        yield machine.Step("said", f"{self.shape.called(f)} {what}", stages[-1][1])
        for name, stage in stages[:-1]:
            yield from self._death(stage, f, name, what)

    def _stages(self, state: State, f: int, session: Session, message: bytes) -> Iterator[tuple[str, State]]:
        t, i = session.done, self.shape.owner(f)
        for stage in self.SAYS:
            if stage == "drawn":
                yield "drawn", state
            elif stage == "written":  # `RunLog.write_ahead`, write by write
                said = RoundPayload(
                    message, session.inputs.received_frames, session.inputs.batch_count, session.inputs.records
                )
                writes = folders.said(self.run_log, self.shape, i, state.folders[f], t, said)
                before = state
                for name, folder in zip(*writes, strict=True):
                    state = before._replace(folders=with_item(before.folders, f, folder))
                    yield name, state
            else:
                state = self._sent(state, f, session, message)
                yield "sent", state

    def _drawn(self, state: State, f: int, session: Session) -> bytes:
        """A message with fresh noise: the first content of this round that nobody knows anything of."""
        i, t, used = self.shape.owner(f), session.done, self._used(session)
        logs = [folder.log for g, folder in enumerate(state.folders) if self.shape.owner(g) == i]
        if i == 0 and state.copy is not None:
            logs.append(state.copy.log)
        content = 0
        while True:
            message = runs.frame(self.shape, i, t, content, used)
            if message not in state.left and not any(message in log for log in logs):
                return message
            content += 1

    def _used(self, session: Session) -> tuple[int, ...]:
        """What a message says was used, where rounds go on without late neighbours."""
        return tuple(runs.about(self.shape, message)[1] for message in session.inputs.received_frames)

    def _sent(self, state: State, f: int, session: Session, message: bytes) -> State:
        """`Link.queue` for every neighbour that is told: on its way wherever a stream is attached."""
        t, i, shape = session.done, self.shape.owner(f), self._own(state, f)
        kept = channels.kept(self.link, shape, i, session.kept, t, message)
        after = self._live(state, f, session._replace(said=t + 1, kept=kept))
        told = {i, *runs.told_in(shape, i, t)}
        streams = tuple(
            self._loaded(stream, f, (message,))
            if {*map(self.shape.owner, (stream.caller, stream.callee))} <= told
            else stream
            for stream in state.streams
        )
        return after._replace(streams=streams, left=state.left | {message})

    def _learns(self, state: State, f: int, session: Session, kind: str, what: str) -> Iterator[Step]:
        """`Session._learn`: where an absence follows, its inputs are written down; behind its last round it has finished."""
        i, shape, who = self.shape.owner(f), self._own(state, f), self.shape.called(f)
        heard, box = channels.taken(self.inbox, shape, i, session.box)
        batches = len(folders.records(self.shape, i, state.folders[f].log))
        inputs = RoundPayload(b"", heard, batches, 1)
        after = session._replace(done=session.done + 1, inputs=inputs, box=box)
        if after.done < runs.attendance(shape, i).end:
            yield machine.Step(kind, f"{who} {what}", self._live(state, f, after))
            return
        writes = folders.closed(self.run_log, self.shape, state.folders[f], after.done, inputs)
        live = self._live(state, f, after._replace(state=LearnerState.FINISHED))
        stages = [live._replace(folders=with_item(state.folders, f, each)) for each in writes.folders]
        yield machine.Step("finished", f"{who} {what} and has finished", self._over(stages[-1], f))
        for name, stage in zip(writes.names[:-1], stages, strict=False):
            yield from self._death(stage, f, name, what)

    def _over(self, state: State, f: int) -> State:
        """What a learner does when it has finished: it stays."""
        return state

    # ---- records --------------------------------------------------------------------------------------------

    def _feeds(self, state: State, f: int) -> Iterator[Step]:
        """`LearnerServicer.ingest`: a batch is written down, settled, and answered with a receipt. Gaps are never sent."""
        i, process = self.shape.owner(f), state.processes[f]
        session = process.session
        if i not in self.fed or session is None or session.state in (LearnerState.FINISHED, LearnerState.STOPPED):
            return
        most = sum(map(len, runs.attendance(self._own(state, f), i).intervals))
        due = folders.due_next(self.intake, self.shape, i, state.folders[f])
        for number in range(state.receipts[i], min(due + 1, most)):
            what = f"takes batch {number} in"
            stages = [*self._kept(state, f, number)]
            yield machine.Step("fed", f"{self.shape.called(f)} {what}", stages[-1][1])
            for name, stage in stages[:-1]:
                yield from self._death(stage, f, name, what)
            if state.faults.answers:
                lost = less(stages[-1][1]._replace(receipts=state.receipts), "answers")
                yield machine.Step(
                    "receipt lost", f"{self.shape.called(f)} {what}; the receipt is lost", lost, fault=True
                )

    def _kept(self, state: State, f: int, number: int) -> Iterator[tuple[str, State]]:
        i, folder = self.shape.owner(f), state.folders[f]
        writes = folders.taken_in(self.run_log, self.intake, self.shape, i, folder, number)
        last: Folder = writes.folders[-1] if writes.folders else folder
        for stage in self.FEEDS:
            if stage == "acknowledged":
                due = folders.due_next(self.intake, self.shape, i, last)
                state = state._replace(receipts=with_item(state.receipts, i, due))
                yield "acknowledged", state
            else:
                before = state
                for name, each in zip(*writes, strict=True):
                    state = before._replace(folders=with_item(before.folders, f, each))
                    yield name, state
