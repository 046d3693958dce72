"""Mistakes where rounds go on without late neighbours, and where learners leave, join or are lost."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sottovoce_core.errors import RemoteProtocolError
from sottovoce_learner.peers.inbox import Inbox
from sottovoce_learner.storage.ledger import LedgerEntry
from sottovoce_rpc.specs import compute_plan_hash
from sottovoce_wire.v1 import learner_pb2
from tests.model import runs
from tests.model.books import Book
from tests.model.machine import Step
from tests.model.state import Change, Coordinator, Directive, Session, State
from tests.model.world import World

# ---- late neighbours -------------------------------------------------------------------------------------------------


class StatesWhatWasDue(World):
    """A message reports the due messages as used, although older ones were used."""

    def _used(self, session: Session) -> tuple[int, ...]:
        return tuple(session.done - 1 for _ in session.inputs.received_frames)


class _Newest(Inbox[bytes]):
    def take(self) -> dict[int, bytes]:
        newest = {j: content for _, heard in sorted(self._received.items()) for j, content in heard.items()}
        return {**super().take(), **newest}


class UsesTheNewest(World):
    """The newest message is used even if it is of a later round."""

    inbox = _Newest


class _AnyAge(Inbox[bytes]):
    @property
    def has_enough(self) -> bool:
        return all(self._next[j] > 0 for j in self._get_senders(self.round))


class UsesAnyAge(World):
    """The age of a replacing message has no limit."""

    inbox = _AnyAge


class _NoneOfThePast(Inbox[bytes]):
    def put(self, neighbour: int, t: int, sender: int, content: bytes) -> bool:
        if t < self.round:
            raise RemoteProtocolError(f"round {t} is over")
        return super().put(neighbour, t, sender, content)


class RefusesThePast(World):
    """A late message of a finished round is refused."""

    inbox = _NoneOfThePast


# ---- learners leave, join, and are lost ------------------------------------------------------------------------------


class TellsFirst(World):
    """A reconfiguration is sent before it is stored."""

    def _written(self, state: State, change: Change) -> Step[State]:
        step = super()._written(state, change)
        kept = step.after.coordinator._replace(kept=state.coordinator.kept)
        return step._replace(after=step.after._replace(coordinator=kept))

    def _coordinates(self, state: State) -> Iterator[Step[State]]:
        coordinator = state.coordinator
        if (
            coordinator.up
            and coordinator.change is None
            and coordinator.kept.offline_intervals != coordinator.book.offline_intervals
        ):
            kept = coordinator.record._replace(offline_intervals=coordinator.book.offline_intervals)
            after = state._replace(coordinator=coordinator._replace(kept=kept))
            yield Step("written down", "the changed spec is written down", after)
        yield from super()._coordinates(state)


class HearsOtherPlans(TellsFirst):
    """A reconfiguration is sent before it is stored, and hellos do not compare plans."""

    def _greeted(self, state: State, f: int, neighbour: int, hello: bytes) -> tuple[State, int] | None:
        said = learner_pb2.ExchangeMessage.FromString(hello)
        said.hello.plan_hash = compute_plan_hash(runs.run_of(self._own(state, f)).spec, runs.FEATURES)
        return super()._greeted(state, f, neighbour, said.SerializeToString())


class ChangesWhatWasSaid(World):
    """The first changed round was already sent by a learner."""

    def _absences(self, book: Book, change: Change) -> str | None:
        return super()._absences(_said(book, -1), change)


class TakesAnySpec(ChangesWhatWasSaid):
    """The first changed round was already sent by a learner, and learners accept any spec."""

    @staticmethod
    def amended(found: LedgerEntry, line: LedgerEntry, *rest: object) -> bool:
        return found.spec != line.spec


class WaitsForNobody(World):
    """A reconfiguration does not wait until all learners have stopped."""

    def _waited_for(self, state: State) -> frozenset[int]:
        return frozenset()


class ChangesWithoutSome(World):
    """A learner leaves although others have not stopped by the deadline."""

    def _absences(self, book: Book, change: Change) -> str | None:
        return super()._absences(book if change.verb == "lose" else book._replace(losing=frozenset()), change)


class RestsOn(World):
    """A restarted coordinator takes learners for stopped that have continued."""

    def _coordinates(self, state: State) -> Iterator[Step[State]]:
        kept = state.coordinator.kept
        for step in super()._coordinates(state):
            after = step.after.coordinator
            if step.kind == "coordinator back":
                after = after._replace(book=after.book._replace(statuses=kept.statuses))
            yield step._replace(after=step.after._replace(coordinator=after))


class BriefsWhoReturns(World):
    """A learner that reconnects during a reconfiguration gets its usual commands."""

    def _taken_back(self, state: State, f: int) -> tuple[State, Directive | None]:
        change = state.coordinator.change
        as_ever = state._replace(coordinator=state.coordinator._replace(change=None))
        after, told = super()._taken_back(as_ever, f)
        return after._replace(coordinator=after.coordinator._replace(change=change)), told


class LosesFromTheReport(World):
    """A lost learner is offline from the first round that it has not reported."""

    def _absences(self, book: Book, change: Change) -> str | None:
        offline_intervals, said = (
            json.loads(super()._absences(book, change) or "null"),
            max(said for _, _, said in book.statuses),
        )
        for each in offline_intervals or ():
            each["first_round"] = min(each["first_round"], said)
            each["missed_from_rounds"] = {name: min(t, said) for name, t in each["missed_from_rounds"].items()}
        return offline_intervals and json.dumps(offline_intervals)


class ForgetsGrants(World):
    """A restarted coordinator does not know the last leased round."""

    def _forgets(self, coordinator: Coordinator) -> Coordinator:
        return coordinator._replace(reserved=0)


class CountsAsHeard(World):
    """All messages of a lost learner count as used, even those that no neighbour has learned."""

    def _absences(self, book: Book, change: Change) -> str | None:
        return super()._absences(_said(book, 1), change)


class ForgetsWhatClosed(World):
    """A restarted learner does not report that it has learned the last round."""

    def _closed(self, i: int, log: bytes) -> bool:
        return False


def _said(book: Book, more: int) -> Book:
    """The same, as if each learner had said so many rounds more."""
    return book._replace(statuses=tuple((state, done, max(said + more, 0)) for state, done, said in book.statuses))
