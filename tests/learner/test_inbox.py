"""The inbox under any order of messages: what the rules permit is taken, everything else is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.errors import PermissionDenied, RemoteProtocolError, ViolationKind
from sottovoce_learner.peers.inbox import Inbox


def message(t: int, sender: int) -> Message:
    return Message({"y": np.array([float(t), float(sender)])})


def content(heard: Mapping[int, Message]) -> dict[int, list[float]]:
    return {j: said["y"].tolist() for j, said in heard.items()}


# By name: Hypothesis looks up the source of a lambda again for every step, which takes minutes in older versions.


def _somebody_is_due(model: Neighbourhood) -> bool:
    return any(due < model.round + model.ahead for due in model.due.values())


def _round_is_complete(model: Neighbourhood) -> bool:
    return model.complete()


def _there_are_neighbours(model: Neighbourhood) -> bool:
    return bool(model.due)


class Neighbourhood(RuleBasedStateMachine):
    """A model of the rules beside the real thing: `due` is the next round of each neighbour.

    Either all neighbours are heard in every round, and may be one round ahead; or some of them in turn, and may be three.
    """

    @initialize(neighbours=st.sets(st.integers(0, 6), max_size=4), first=st.integers(0, 3), data=st.data())
    def begin(self, neighbours: set[int], first: int, data: st.DataObject) -> None:
        self.heard, self.ahead = [neighbours], 2
        if data.draw(st.booleans()):
            some = st.sets(st.sampled_from(sorted(neighbours))) if neighbours else st.just(set[int]())
            self.heard, self.ahead = data.draw(st.lists(some, min_size=1, max_size=4)), 4
        self.inbox: Inbox[Message] = Inbox(neighbours, self.heard_in, self.ahead, first)
        self.round = first
        self.due = dict.fromkeys(neighbours, first)
        self._pass_over()

    def heard_in(self, t: int) -> set[int]:
        return self.heard[t % len(self.heard)]

    def _pass_over(self) -> None:
        """Nothing is due in rounds that a neighbour is not heard in."""
        for j in self.due:
            self.due[j] = max(self.due[j], self.round)
            while self.due[j] < self.round + self.ahead and j not in self.heard_in(self.due[j]):
                self.due[j] += 1

    @precondition(_somebody_is_due)
    @rule(data=st.data())
    def say_what_is_due(self, data: st.DataObject) -> None:
        j = data.draw(st.sampled_from(sorted(j for j, due in self.due.items() if due < self.round + self.ahead)))
        t = self.due[j]
        self.due[j] += 1
        self._pass_over()
        assert self.inbox.put(j, t, j, message(t, j)) == self.complete()

    @precondition(_round_is_complete)
    @rule()
    def go_on(self) -> None:
        expected = {j: [float(self.round), float(j)] for j in self.heard_in(self.round)}
        assert content(self.inbox.take()) == expected
        self.round += 1
        self._pass_over()

    @precondition(_there_are_neighbours)
    @rule(data=st.data(), t=st.integers(0, 12))
    def say_something_out_of_turn(self, data: st.DataObject, t: int) -> None:
        """What was said before is no misconduct: streams that break may bring it again."""
        j = data.draw(st.sampled_from(sorted(self.due)))
        if t == self.due[j] and t < self.round + self.ahead:
            t += 1
        text = f"learner {j} must send round {self.due[j]} next, got round {t}"
        with pytest.raises(RemoteProtocolError, match=text) as refused:
            self.inbox.put(j, t, j, message(-1, -1))
        assert refused.value.violation is (None if t < self.due[j] else ViolationKind.ROUND)

    @precondition(_there_are_neighbours)
    @rule(data=st.data(), sender=st.integers(0, 9))
    def speak_in_another_name(self, data: st.DataObject, sender: int) -> None:
        j = data.draw(st.sampled_from(sorted(self.due)))
        if sender != j:
            text = f"learner {j} sent a message in the name of learner {sender}"
            with pytest.raises(RemoteProtocolError, match=text) as refused:
                self.inbox.put(j, self.due[j], sender, message(-1, -1))
            assert refused.value.violation is ViolationKind.SENDER

    @rule(j=st.integers(0, 20))
    def let_a_stranger_speak(self, j: int) -> None:
        if j not in self.due:
            with pytest.raises(PermissionDenied, match=f"learner {j} is not a neighbour"):
                self.inbox.put(j, self.round, j, message(-1, -1))
            with pytest.raises(PermissionDenied) as refused:
                self.inbox.get_due_round(j)
            assert refused.value.violation is None

    @invariant()
    def the_inbox_agrees_with_the_model(self) -> None:
        assert self.inbox.round == self.round
        assert {j: self.inbox.get_due_round(j) for j in self.due} == self.due
        assert self.inbox.is_complete == self.complete()
        assert sorted(self.inbox.missing_neighbours) == sorted(j for j, due in self.due.items() if due <= self.round)

    def complete(self) -> bool:
        return all(self.due[j] > self.round for j in self.heard_in(self.round))


TestInbox = Neighbourhood.TestCase


def _somebody_may_speak(model: Latecomers) -> bool:
    return any(due < model.round + AHEAD for due in model.due.values())


def _there_is_enough(model: Latecomers) -> bool:
    return all(model.newest(j) >= max(model.round - AHEAD + 1, 0) for j in model.due)


AHEAD = 4


class Latecomers(RuleBasedStateMachine):
    """Rounds go on without who is late, but not for long: `due` is the next round of each neighbour, in order."""

    @initialize(neighbours=st.sets(st.integers(0, 6), max_size=3), first=st.integers(0, 6), data=st.data())
    def begin(self, neighbours: set[int], first: int, data: st.DataObject) -> None:
        """Who goes on after its death has the messages that it used last."""
        before = (
            st.dictionaries(st.sampled_from(sorted(neighbours)), st.integers(0, first - 1))
            if neighbours
            else st.just({})
        )
        last: dict[int, int] = data.draw(before) if first else {}
        self.round, self.due = first, {j: last.get(j, -1) + 1 for j in neighbours}
        self.inbox: Inbox[Message] = Inbox(
            {*neighbours, DEAF},
            lambda t: neighbours,
            AHEAD,
            first,
            late_messages={j: (t, message(t, j)) for j, t in last.items()},
        )

    def newest(self, j: int) -> int:
        """The last round up to this one that a neighbour has said; -1: none."""
        return min(self.due[j] - 1, self.round)

    @precondition(_somebody_may_speak)
    @rule(data=st.data())
    def say_what_is_due(self, data: st.DataObject) -> None:
        j = data.draw(st.sampled_from(sorted(j for j, due in self.due.items() if due < self.round + AHEAD)))
        t = self.due[j]
        self.due[j] += 1
        assert self.inbox.put(j, t, j, message(t, j)) == self.complete()

    @precondition(_there_is_enough)
    @rule()
    def go_on(self) -> None:
        expected = {j: [float(self.newest(j)), float(j)] for j in self.due}
        assert content(self.inbox.take()) == expected
        self.round += 1

    @rule(data=st.data(), t=st.integers(0, 20))
    def say_something_out_of_turn(self, data: st.DataObject, t: int) -> None:
        """Also who is told, and never heard."""
        for j, due in (*self.due.items(), (DEAF, -1)):
            if t != due or t >= self.round + AHEAD:
                with pytest.raises(RemoteProtocolError, match=f"learner {j} must send round .* next, got round {t}"):
                    self.inbox.put(j, t, j, message(-1, -1))

    @invariant()
    def the_inbox_agrees_with_the_model(self) -> None:
        assert (self.inbox.round, self.inbox.is_complete) == (self.round, self.complete())
        assert self.inbox.has_enough == _there_is_enough(self)
        assert {j: self.inbox.get_due_round(j) for j in self.due} == self.due
        assert sorted(self.inbox.missing_neighbours) == sorted(j for j in self.due if self.newest(j) != self.round)

    def complete(self) -> bool:
        return all(self.newest(j) == self.round for j in self.due)


DEAF = 9
"""A neighbour that hears, and is not heard."""
TestLatecomers = Latecomers.TestCase


def test_without_neighbours_every_round_is_complete() -> None:
    inbox: Inbox[Message] = Inbox((), lambda t: ())
    assert inbox.is_complete
    assert inbox.take() == {}
    assert inbox.round == 1
