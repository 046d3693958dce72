"""Learners, their folders, the streams between them, and a coordinator: what each does next, and what may go wrong.

What is decided is decided by the product (`parts.py`). What the product awaits, or writes to a file, is a step here, and says
which function it stands for. What happens between two awaits of one process is one step; a death may cut it at any write.

A run is under way, and each learner has opened it. A learner that dies is started again at once: being down is doing nothing.
No deadline ever passes: from every state the run must be able to finish.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import ClassVar, TypeAlias

from sottovoce.errors import NotReady, StrangerError, Unavailable
from sottovoce_coordinator.fencing import Claim, Membership
from sottovoce_coordinator.runs import RunState
from sottovoce_learner.bodies import Said
from sottovoce_learner.intake import Intake
from sottovoce_learner.links import Link
from sottovoce_learner.store import RunLog
from sottovoce_rpc.learner_status import LearnerState
from tests.model import machine, parts, promises
from tests.model.parts import Box, Folder, Greeting, Shape
from tests.model.state import (
    CALLEE,
    CALLER,
    NONE,
    Coordinator,
    Faults,
    Process,
    Session,
    State,
    Stream,
    less,
    still_open,
    with_end,
    with_item,
)

Step: TypeAlias = machine.Step[State]


class World:
    """A run with its faults. Mistakes are subclasses (`mistakes.py`).

    Args:
        shape: of the run.
        faults: that may happen, at most.
        fed: learners whose records come from a feeder while the run goes on; the others have theirs.
        chatty: learners report whenever something has changed, not only when it matters.
        judged: the invariants that are looked at.
    """

    SAYS: ClassVar[tuple[str, ...]] = ("drawn", "written", "sent")
    FEEDS: ClassVar[tuple[str, ...]] = ("written", "acknowledged")
    membership: type[Membership] = Membership
    run_log: Callable[..., RunLog] = RunLog
    intake: Callable[..., Intake] = Intake
    link: Callable[[], Link] = Link

    def __init__(
        self,
        shape: Shape,
        faults: Faults = NONE,
        fed: tuple[int, ...] = (),
        *,
        chatty: bool = False,
        judged: Collection[str] = promises.ALL,
    ) -> None:
        self.shape, self.faults, self.fed, self.chatty, self.judged = shape, faults, fed, chatty, judged

    def start(self) -> State:
        """Nobody has joined."""
        n, book = self.shape.learners, parts.new_book(self.shape)
        folders = tuple(parts.fresh_folder(self.shape, i, fed=i in self.fed) for i in range(n))
        coordinator = Coordinator(True, (self.membership(),) * n, book, book)
        return State(folders, (Process(),) * n, (), coordinator, (0,) * n, frozenset(), self.faults)

    def steps(self, state: State) -> Iterator[Step]:
        """All that may happen next."""
        for f, process in enumerate(state.processes):
            if not process.out:
                yield from self._joins(state, f)
                yield from self._round(state, f)
                yield from self._feeds(state, f)
                yield from self._calls(state, f)
                yield from self._dies(state, f)
        for number in range(len(state.streams)):
            yield from self._streams(state, number)
        yield from self._coordinates(state)
        yield from self._copies(state)

    # ---- who is who ---------------------------------------------------------------------------------------

    def _put(self, state: State, f: int, process: Process, folder: Folder | None = None) -> State:
        after = state._replace(processes=with_item(state.processes, f, process))
        return after if folder is None else after._replace(folders=with_item(state.folders, f, folder))

    def _live(self, state: State, f: int, session: Session) -> State:
        return self._put(state, f, state.processes[f]._replace(session=session))

    # ---- joining ------------------------------------------------------------------------------------------

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
        """`Learner._join`: what it says of itself; a damaged folder is in no run."""
        i, folder, session = self.shape.owner(f), state.folders[f], state.processes[f].session
        if session is not None:
            journaled = session.said if session.state is not LearnerState.FINISHED else None
        else:
            whole = parts.stands(self.shape, i, folder)
            journaled = parts.rounds_said(self.shape, i, folder.log) if whole else None
        return Claim(str(i), bytes([i] * 16), folder.incarnation, rejoins, journaled)

    def _introduces(self, state: State, f: int) -> Iterator[Step]:
        """`Coordinator._admit` up to the issue, which is durable, and `Learner._join`, which writes it."""
        i, coordinator, who = self.shape.owner(f), state.coordinator, self.shape.called(f)
        said = coordinator.book.statuses[i][2]
        try:
            member = coordinator.members[i].admit(self._claim(state, f), live=self._is_here(state, i), journaled=said)
        except Unavailable:  # it tries again
            return
        except (NotReady, StrangerError):
            yield self._refused(state, f)
            return
        issued = state._replace(coordinator=self._remembered(coordinator, i, member))
        folder = state.folders[f]._replace(incarnation=member.issued)
        written = self._put(issued, f, Process(written=True), folder)
        yield machine.Step("issued", f"{who} is issued incarnation {member.issued} and writes it down", written)
        if state.faults.answers:
            lost = less(issued, "answers")
            text = f"{who} is issued incarnation {member.issued}; the answer is lost"
            yield machine.Step("issue lost", text, lost, fault=True)

    def _confirms(self, state: State, f: int) -> Iterator[Step]:
        """`Coordinator._admit` from the confirmation on, `_welcome`, and the briefing, which `Learner._obey` follows."""
        i, coordinator, who = self.shape.owner(f), state.coordinator, self.shape.called(f)
        number = state.folders[f].incarnation
        try:
            member = coordinator.members[i].confirm(self._claim(state, f), number)
        except NotReady:
            yield self._refused(state, f)
            return
        confirmed = state._replace(coordinator=self._remembered(coordinator, i, member))
        text = f"{who} confirms incarnation {number}"
        yield machine.Step("confirmed", text, self._briefed(confirmed, f))
        if state.faults.answers:
            lost = less(self._put(confirmed, f, Process()), "answers")
            yield machine.Step("confirmation lost", f"{text}; the answer is lost", lost, fault=True)

    def _briefed(self, state: State, f: int) -> State:
        """A new session: the log is opened, and its state recovered from it (`Session.__init__`)."""
        i, folder = self.shape.owner(f), state.folders[f]
        if not parts.stands(self.shape, i, folder):
            return self._put(state, f, Process(out=True))._replace(damaged=True)
        folder = parts.reopened(self.shape, i, folder)
        back = parts.recovered(self.link, self.shape, i, self._believed(folder.log))
        n = len(parts.neighbours(self.shape, i))
        over = back.done == self.shape.rounds
        session = Session(
            LearnerState.FINISHED if over else LearnerState.CONNECTING,
            state.coordinator.book.granted,
            back.said,
            back.done,
            Said(b""),
            back.kept,
            Box(back.done, ((),) * n),
            (0,) * n,
        )
        return self._put(state, f, Process(confirmed=True, joined=True, session=session), folder)

    def _believed(self, log: bytes) -> bytes:
        """As much of a log as a learner goes by that is started again."""
        return log

    def _returns(self, state: State, f: int) -> Iterator[Step]:
        """A process that never stopped comes back (`Coordinator._take_back`)."""
        i, coordinator, process = self.shape.owner(f), state.coordinator, state.processes[f]
        session = process.session
        if session is None:
            return
        try:
            member = coordinator.members[i].admit(self._claim(state, f, rejoins=True), live=self._is_here(state, i))
        except NotReady:
            yield self._refused(state, f)
            return
        book = coordinator.book
        if session.state is not LearnerState.FINISHED:
            book = parts.taken_back(self.shape, book, session.granted)
        after = state._replace(coordinator=self._remembered(coordinator, i, member)._replace(book=book))
        back = process._replace(joined=True, session=session._replace(granted=max(session.granted, book.granted)))
        yield machine.Step(
            "returned", f"{self.shape.called(f)} comes back to the coordinator", self._put(after, f, back)
        )

    def _remembered(self, coordinator: Coordinator, i: int, member: Membership) -> Coordinator:
        """`Coordinator._remember`: durable before it is told."""
        return coordinator._replace(members=with_item(coordinator.members, i, member))

    def _refused(self, state: State, f: int) -> Step:
        gone = self._hung_up(self._put(state, f, Process(out=True)), f)
        return machine.Step("refused", f"{self.shape.called(f)} is refused, and ends", gone)

    # ---- a round ------------------------------------------------------------------------------------------

    def _round(self, state: State, f: int) -> Iterator[Step]:
        session = state.processes[f].session
        if session is None:
            return
        if session.state is LearnerState.CONNECTING and 0 not in session.known:
            # `Session._connected`. It waits for one neighbour after the other; that each has greeted is a little less.
            running = self._live(state, f, session._replace(state=LearnerState.RUNNING))
            yield machine.Step("connected", f"{self.shape.called(f)} has met its neighbours", running)
        if session.state is not LearnerState.RUNNING:
            return
        if session.said == session.done < session.granted:
            yield from self._says(state, f, session)
        filled = len(parts.records(self.shape, self.shape.owner(f), state.folders[f].log))
        if session.done < min(session.said, filled) and parts.complete(self.shape, self.shape.owner(f), session.box):
            yield from self._learns(state, f, session)

    def _says(self, state: State, f: int, session: Session) -> Iterator[Step]:
        """`Session._say`: nothing is awaited from the draw to the links, so only a death comes in between."""
        what = f"says round {session.said}"
        message = self._drawn(state, self.shape.owner(f), session.said)
        stages = [*self._stages(state, f, session, message)]
        yield machine.Step("said", f"{self.shape.called(f)} {what}", stages[-1][1])
        for name, stage in stages[:-1]:
            yield from self._death(stage, f, name, what)

    def _stages(self, state: State, f: int, session: Session, message: bytes) -> Iterator[tuple[str, State]]:
        t, i = session.said, self.shape.owner(f)
        for stage in self.SAYS:
            if stage == "drawn":
                yield "drawn", state
            elif stage == "written":  # `RunLog.say`, write by write
                said = Said(message, session.inputs.heard, session.inputs.upto, session.inputs.records)
                writes = parts.said(self.run_log, self.shape, i, state.folders[f], t, said)
                before = state
                for name, folder in zip(*writes, strict=True):
                    state = before._replace(folders=with_item(before.folders, f, folder))
                    yield name, state
            else:
                state = self._sent(state, f, session, message)
                yield "sent", state

    def _drawn(self, state: State, i: int, t: int) -> bytes:
        """A message with fresh noise: the first content of this round that nobody knows anything of."""
        logs = [folder.log for f, folder in enumerate(state.folders) if self.shape.owner(f) == i]
        if i == 0 and state.copy is not None:
            logs.append(state.copy.log)
        content = 0
        while True:
            message = parts.frame(self.shape, i, t, content)
            if message not in state.left and not any(message in log for log in logs):
                return message
            content += 1

    def _sent(self, state: State, f: int, session: Session, message: bytes) -> State:
        """`Link.say` for every neighbour: on its way wherever a stream is attached."""
        t = session.said
        kept = parts.kept(self.link, session.kept, t, message)
        after = self._live(state, f, session._replace(said=t + 1, kept=kept))
        streams = tuple(self._loaded(stream, f, (message,)) for stream in state.streams)
        return after._replace(streams=streams, left=state.left | {message})

    def _loaded(self, stream: Stream, f: int, messages: tuple[bytes, ...]) -> Stream:
        """What this process writes to a stream that it is attached to is on its way."""
        for end, number in ((CALLER, stream.caller), (CALLEE, stream.callee)):
            if number == f and stream.ends[end] and stream.ends[1 - end] is not None:
                to = 1 - end
                return stream._replace(on_way=with_end(stream.on_way, to, stream.on_way[to] + messages))
        return stream

    def _learns(self, state: State, f: int, session: Session) -> Iterator[Step]:
        """`Session._learn`, and after the last round `_close`; then it has finished."""
        i, t, folder, box = self.shape.owner(f), session.done, state.folders[f], session.box
        records = parts.records(self.shape, i, folder.log)
        inputs = Said(b"", tuple(messages[0] for messages in box.heard), len(records), 1)
        taken = Box(box.round + 1, tuple(messages[1:] for messages in box.heard))
        after = session._replace(done=t + 1, inputs=inputs, box=taken)
        if after.done < self.shape.rounds:
            yield machine.Step("learned", f"{self.shape.called(f)} learns round {t}", self._live(state, f, after))
            return
        writes = parts.closed(self.run_log, self.shape, i, folder, inputs)
        live = self._live(state, f, after._replace(state=LearnerState.FINISHED))
        stages = [live._replace(folders=with_item(state.folders, f, each)) for each in writes.folders]
        yield machine.Step(
            "finished", f"{self.shape.called(f)} learns round {t} and has finished", self._over(stages[-1], f)
        )
        for name, stage in zip(writes.names[:-1], stages, strict=False):
            yield from self._death(stage, f, name, f"learns round {t}")

    def _over(self, state: State, f: int) -> State:
        """What a learner does when it has finished: it stays."""
        return state

    def _silent(self, session: Session | None) -> bool:
        """`Session.silent`: who has finished still answers its neighbours."""
        return session is None

    # ---- records ------------------------------------------------------------------------------------------

    def _feeds(self, state: State, f: int) -> Iterator[Step]:
        """`Learner._ingest`: a batch is written down, settled, and answered with a receipt. Gaps are never sent."""
        i, process = self.shape.owner(f), state.processes[f]
        if i not in self.fed or process.session is None or process.session.state is LearnerState.FINISHED:
            return
        due = parts.due_next(self.intake, self.shape, i, state.folders[f].log)
        for number in range(state.receipts[i], min(due + 1, self.shape.rounds)):
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
        writes = parts.taken_in(self.run_log, self.intake, self.shape, i, folder, number)
        last = writes.folders[-1] if writes.folders else folder
        for stage in self.FEEDS:
            if stage == "acknowledged":
                due = parts.due_next(self.intake, self.shape, i, last.log)
                state = state._replace(receipts=with_item(state.receipts, i, due))
                yield "acknowledged", state
            else:
                before = state
                for name, each in zip(*writes, strict=True):
                    state = before._replace(folders=with_item(before.folders, f, each))
                    yield name, state

    # ---- streams between neighbours -----------------------------------------------------------------------

    def _greeting(self, state: State, f: int, neighbour: int) -> Greeting:
        session = state.processes[f].session
        assert session is not None, "only a learner in a run greets"
        known = session.known[parts.neighbours(self.shape, self.shape.owner(f)).index(neighbour)]
        return Greeting(self.shape.owner(f), state.folders[f].incarnation, session.said, session.box, known)

    def _greeted(self, state: State, f: int, neighbour: int, hello: bytes) -> tuple[State, int] | None:
        """`exchange._greeted`: what is known of the neighbour then, and what it lacks; None: it is refused."""
        own = self._greeting(state, f, neighbour)
        found, session = parts.greeted(self.shape, own, neighbour, hello), state.processes[f].session
        if found is None or session is None:
            return None
        asked, incarnation = found
        at = parts.neighbours(self.shape, own.learner).index(neighbour)
        return self._live(state, f, session._replace(known=with_item(session.known, at, incarnation))), asked

    def _calls(self, state: State, f: int) -> Iterator[Step]:
        """`exchange.keep_open` of the lower index; `accept` of the other reads its hello, and answers."""
        i = self.shape.owner(f)
        if self._silent(state.processes[f].session):
            return
        for j in parts.neighbours(self.shape, i):
            if j < i or any(
                s.caller == f and self.shape.owner(s.callee) == j and s.ends[0] is not None for s in state.streams
            ):
                continue
            hello = parts.hello(self.shape, self._greeting(state, f, j), j)
            for g, other in enumerate(state.processes):
                if self.shape.owner(g) != j or self._silent(other.session):
                    continue
                if (greeted := self._greeted(state, g, i, hello)) is None:
                    continue
                after, asked = greeted
                answer = parts.hello(self.shape, self._greeting(after, g, i), i)
                stream = Stream(f, g, (False, False), ((), ()), answer, asked)
                text = f"{self.shape.called(f)} calls {self.shape.called(g)}, which greets it"
                yield machine.Step("called", text, after._replace(streams=(*after.streams, stream)))

    def _streams(self, state: State, number: int) -> Iterator[Step]:
        stream = state.streams[number]
        for end, f in ((CALLER, stream.caller), (CALLEE, stream.callee)):
            who = self.shape.called(f)
            if stream.ends[end] is None:
                continue
            if stream.ends[end] is False:
                yield from self._attaches(state, number, end)
            elif stream.on_way[end]:
                yield from self._hears(state, number, end)
            if stream.ends[1 - end] is None:
                yield machine.Step("noticed", f"{who} notices that a stream is gone", self._gone(state, number, end))
            elif state.faults.streams:
                gone = less(self._gone(state, number, end), "streams")
                yield machine.Step("stream lost", f"a stream breaks, as {who} notices first", gone, fault=True)

    def _attaches(self, state: State, number: int, end: int) -> Iterator[Step]:
        """`exchange._hold`: the stream takes the place of others of this neighbour; what that one lacks is sent."""
        stream = state.streams[number]
        f, other = (stream.caller, stream.callee)[:: 1 if end == CALLER else -1]
        asked, after = stream.asked, state
        if end == CALLER:  # reads the callee's hello first
            greeted = self._greeted(state, f, self.shape.owner(other), stream.hello)
            if greeted is None:
                refused = self._gone(state, number, end)
                yield machine.Step(
                    "turned away", f"{self.shape.called(f)} refuses the hello of {self.shape.called(other)}", refused
                )
                return
            after, asked = greeted
        streams = [s if s is stream else self._displaced(s, f, self.shape.owner(other)) for s in after.streams]
        session = after.processes[f].session
        assert session is not None, "a stream of a process that died is gone"
        held = stream._replace(ends=with_end(stream.ends, end, True), hello=b"" if end == CALLER else stream.hello)
        streams[number] = self._loaded(held, f, parts.due(self.link, session.kept, asked))
        after = after._replace(streams=still_open(streams))
        yield machine.Step("attached", f"{self.shape.called(f)} uses the stream to {self.shape.called(other)}", after)

    def _displaced(self, stream: Stream, f: int, neighbour: int) -> Stream:
        """`Link.attach`: the stream that the link had is given up."""
        for end, (own, other) in enumerate(((stream.caller, stream.callee), (stream.callee, stream.caller))):
            if own == f and self.shape.owner(other) == neighbour and stream.ends[end]:
                return self._ended(stream, end)
        return stream

    def _ended(self, stream: Stream, end: int) -> Stream:
        return stream._replace(ends=with_end(stream.ends, end, None), on_way=with_end(stream.on_way, end, ()))

    def _gone(self, state: State, number: int, end: int) -> State:
        """One end gives a stream up; what is on its way to the other may still arrive there."""
        streams = with_item(state.streams, number, self._ended(state.streams[number], end))
        return state._replace(streams=still_open(streams))

    def _hears(self, state: State, number: int, end: int) -> Iterator[Step]:
        """`Session.hear`: the next message, or the end of the stream where it is not the one that is due."""
        stream = state.streams[number]
        f, session = (stream.caller, stream.callee)[end], state.processes[(stream.caller, stream.callee)[end]].session
        assert session is not None, "a stream of a process that died is gone"
        message, *rest = stream.on_way[end]
        sender, t = parts.about(self.shape, message)
        box = parts.heard(self.shape, self.shape.owner(f), session.box, sender, message)
        if box is None:
            text = f"{self.shape.called(f)} refuses round {t} of learner {sender}"
            yield machine.Step("message refused", text, self._gone(state, number, end))
            return
        read = stream._replace(on_way=with_end(stream.on_way, end, tuple(rest)))
        after = self._live(state, f, session._replace(box=box))
        after = after._replace(streams=still_open(with_item(state.streams, number, read)))
        yield machine.Step("heard", f"{self.shape.called(f)} hears round {t} of learner {sender}", after)

    def _hung_up(self, state: State, f: int) -> State:
        """A process is gone: so are its ends of all streams."""
        streams = state.streams
        for end in (CALLER, CALLEE):
            streams = tuple(self._ended(s, end) if (s.caller, s.callee)[end] == f else s for s in streams)
        return state._replace(streams=still_open(streams))

    # ---- deaths -------------------------------------------------------------------------------------------

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

    # ---- the coordinator ----------------------------------------------------------------------------------

    def _coordinates(self, state: State) -> Iterator[Step]:
        coordinator = state.coordinator
        if not coordinator.up:
            book = parts.taken_up(self.shape, coordinator.kept)
            back = state._replace(coordinator=coordinator._replace(up=True, book=book))
            yield machine.Step("coordinator back", "the coordinator is started again", back)
            return
        for f, process in enumerate(state.processes):
            if process.joined and process.session is not None:
                yield from self._reports(state, f, process.session)
        yield from self._coordinator_fails(state)

    def _is_here(self, state: State, i: int) -> bool:
        """A stream that is gone is noticed at once: until then nobody of this name would be let in, which is doing nothing."""
        return any(process.joined for f, process in enumerate(state.processes) if self.shape.owner(f) == i)

    def _reports(self, state: State, f: int, session: Session) -> Iterator[Step]:
        """`Coordinator._hear`, and `_go_on` where the grant has grown: written before it is told."""
        i, coordinator = self.shape.owner(f), state.coordinator
        status = (session.state, session.done, session.said)
        if self._tells(coordinator.book.statuses[i], session):
            book = parts.reported(self.shape, coordinator.book, i, status)
            written = book.granted > coordinator.book.granted or book.state is RunState.FINISHED
            after = coordinator._replace(book=book, kept=book if written else coordinator.kept)
            text = f"{self.shape.called(f)} reports: {session.state.name.lower()}, {session.said} rounds said"
            yield machine.Step("reported", text, state._replace(coordinator=after))
        if session.granted < coordinator.book.granted:
            granted = self._live(state, f, session._replace(granted=coordinator.book.granted))
            yield machine.Step("granted", f"{self.shape.called(f)} is granted more", granted)

    def _tells(self, before: tuple[LearnerState, int, int], session: Session) -> bool:
        """`Session._round`: when its state changes, or in time for the next grant. Chatty learners may at any time."""
        if self.chatty or before[0] is not session.state:
            return before != (session.state, session.done, session.said)
        due = session.granted < self.shape.rounds and 2 * (session.granted - session.done) <= self.shape.window
        return due and before[1] < session.done

    def _coordinator_fails(self, state: State) -> Iterator[Step]:
        coordinator, faults = state.coordinator, state.faults
        if faults.streams:
            for f, process in enumerate(state.processes):
                if process.joined or process.written:
                    alone = less(self._put(state, f, process._replace(joined=False, written=False)), "streams")
                    yield machine.Step("alone", f"{self.shape.called(f)} loses the coordinator", alone, fault=True)
        if faults.coordinator:
            processes = tuple(each._replace(joined=False, written=False) for each in state.processes)
            # Progress is written about once a second: it was just now, or not since the last grant.
            for kept in dict.fromkeys((coordinator.kept, coordinator.book)):
                down = self._forgets(coordinator._replace(up=False, kept=kept, book=kept))
                after = less(state._replace(processes=processes, coordinator=down), "coordinator")
                age = "new" if kept == coordinator.book else "old"
                text = f"the coordinator dies; what it last wrote about progress is {age}"
                yield machine.Step("coordinator died", text, after, fault=True)

    def _forgets(self, coordinator: Coordinator) -> Coordinator:
        """What does not survive its death, beside streams: nothing."""
        return coordinator

    # ---- folders ------------------------------------------------------------------------------------------

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
            log = parts.cut(state.folders[f].log)
            if faults.cuts and process == Process() and log is not None:
                shorter = less(self._put(state, f, process, state.folders[f]._replace(log=log)), "cuts")
                yield machine.Step(
                    "cut", f"the log of {self.shape.called(f)} loses its last entry", shorter, fault=True
                )

    # ---- what is judged -----------------------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        """The invariant that does not hold."""
        return promises.broken(self.shape, state, self.judged)

    def describe(self, state: State) -> list[str]:
        """How everybody stands, for whoever reads a trace."""
        told = []
        for f, process in enumerate(state.processes):
            session = process.session
            if session is None:
                told.append(f"{self.shape.called(f)}: {'out' if process.out else 'joining'}")
                continue
            rounds = f"{session.said} rounds said, {session.done} learned, {session.granted} granted"
            kept = [t for t, _ in session.kept]
            told.append(f"{self.shape.called(f)}: {session.state.name.lower()}; {rounds}; its links keep rounds {kept}")
        book = state.coordinator.book
        return [*told, f"coordinator: run {book.state.value}, {book.granted} rounds granted"]

    def ended(self, state: State) -> bool:
        """The run is over: finished, or a learner may not go on because of what was done to its folder."""
        if state.coordinator.kept.state is RunState.FINISHED:
            return True
        return state.damaged or (state.set_back and state.processes[0].out)
