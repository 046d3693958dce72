"""The streams between neighbours: opened, greeted on, written to, read from, broken."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import channels, machine, runs
from tests.model.channels import Greeting
from tests.model.stage import Stage, Step
from tests.model.state import CALLEE, CALLER, Process, State, Stream, less, still_open, with_end, with_item


class Streams(Stage):
    """What passes between neighbours."""

    def _greeting(self, state: State, f: int, neighbour: int) -> Greeting:
        session = state.processes[f].session
        assert session is not None, "only a learner in a run greets"
        i = self.shape.owner(f)
        known = session.known[runs.neighbours(self.shape, i).index(neighbour)]
        return Greeting(i, state.folders[f].incarnation, session.said, session.done, session.box, known)

    def _greeted(self, state: State, f: int, neighbour: int, hello: bytes) -> tuple[State, int] | None:
        """`exchange._greeted`: what is known of the neighbour then, and what it lacks; None: it is refused."""
        own = self._greeting(state, f, neighbour)
        found, session = channels.greeted(self._own(state, f), own, neighbour, hello), state.processes[f].session
        if found is None or session is None:
            return None
        asked, incarnation = found
        at = runs.neighbours(self.shape, own.learner).index(neighbour)
        return self._live(state, f, session._replace(known=with_item(session.known, at, incarnation))), asked

    def _calls(self, state: State, f: int) -> Iterator[Step]:
        """`exchange.keep_open` of the lower index; `accept` of the other reads its hello, and answers."""
        i = self.shape.owner(f)
        if self._silent(state.processes[f]):
            return
        for j in runs.neighbours(self.shape, i):
            if j < i or any(
                s.caller == f and self.shape.owner(s.callee) == j and s.ends[0] is not None for s in state.streams
            ):
                continue
            hello = channels.hello(self._own(state, f), self._greeting(state, f, j), j)
            for g, other in enumerate(state.processes):
                if self.shape.owner(g) != j or self._silent(other):
                    continue
                if (greeted := self._greeted(state, g, i, hello)) is None:
                    continue
                after, asked = greeted
                answer = channels.hello(self._own(after, g), self._greeting(after, g, i), i)
                stream = Stream(f, g, (False, False), ((), ()), answer, asked)
                text = f"{self.shape.called(f)} calls {self.shape.called(g)}, which greets it"
                after = after._replace(streams=(*after.streams, stream))
                yield machine.Step("called", text, self._met_at_once(after) if self.at_once else after)

    def _met_at_once(self, state: State) -> State:
        """Both ends of the newest stream use it."""
        for end in (CALLEE, CALLER):
            (state,) = (step.after for step in self._attaches(state, len(state.streams) - 1, end))
        return state

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
        """`exchange._use_stream`: the stream takes the place of others of this neighbour; what that one lacks is sent."""
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
        i, j = self.shape.owner(f), self.shape.owner(other)
        streams[number] = self._loaded(held, f, channels.due(self.link, self._own(state, f), i, session.kept, j, asked))
        after = after._replace(streams=still_open(streams))
        yield machine.Step("attached", f"{self.shape.called(f)} uses the stream to {self.shape.called(other)}", after)

    def _displaced(self, stream: Stream, f: int, neighbour: int) -> Stream:
        """`Link.attach`: the stream that the link had is given up."""
        for end, (own, other) in enumerate(((stream.caller, stream.callee), (stream.callee, stream.caller))):
            if own == f and self.shape.owner(other) == neighbour and stream.ends[end]:
                return self._ended(stream, end)
        return stream

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
        sender, t = runs.about(self.shape, message)
        box = channels.heard(self.inbox, self._own(state, f), self.shape.owner(f), session.box, sender, message)
        if box is None:
            text = f"{self.shape.called(f)} refuses round {t} of learner {sender}"
            yield machine.Step("message refused", text, self._gone(state, number, end))
            return
        read = stream._replace(on_way=with_end(stream.on_way, end, tuple(rest)))
        after = self._live(state, f, session._replace(box=box))
        after = after._replace(streams=still_open(with_item(state.streams, number, read)))
        yield machine.Step("heard", f"{self.shape.called(f)} hears round {t} of learner {sender}", after)

    def _loaded(self, stream: Stream, f: int, messages: tuple[bytes, ...]) -> Stream:
        """What this process writes to a stream that it is attached to is on its way."""
        for end, number in ((CALLER, stream.caller), (CALLEE, stream.callee)):
            if number == f and stream.ends[end] and stream.ends[1 - end] is not None:
                to = 1 - end
                return stream._replace(on_way=with_end(stream.on_way, to, stream.on_way[to] + messages))
        return stream

    def _silent(self, process: Process) -> bool:
        """`Lifecycle.silent`: who has finished still answers its neighbours, until it is told to rest."""
        return process.session is None or process.resting
