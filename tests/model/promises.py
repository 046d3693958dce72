"""What must hold in every state. The larger part of P5, which is about ways between states, is held by `machine.explore`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from sottovoce_coordinator.runs import RunState
from tests.model import parts
from tests.model.parts import Shape
from tests.model.state import State


def broken(shape: Shape, state: State, judged: Collection[str]) -> str | None:
    """The first of these invariants that does not hold."""
    for name in judged:
        if (what := _INVARIANTS[name](shape, state)) is not None:
            return f"{name}: {what}"
    return None


def _one_content(shape: Shape, state: State) -> str | None:
    said = [parts.about(shape, message) for message in state.left]
    if len(set(said)) == len(said):
        return None
    learner, t = next(each for each in said if said.count(each) > 1)
    return f"two contents of round {t} have left learner {learner}"


def _charged(shape: Shape, state: State) -> str | None:
    said = [learner for learner, _ in {parts.about(shape, message) for message in state.left}]
    for i in range(shape.learners):
        if i == 0 and _displaced(shape, state):
            continue  # its figures are no longer what they were: nothing may be said from it
        charged, rounds = parts.charged(shape, i, state.folders[i]), said.count(i)
        if charged < parts.prices(shape, i)[rounds]:
            return f"learner {i} has charged {charged:g}, and {rounds} of its messages have left"
    return None


def _learned_once(shape: Shape, state: State) -> str | None:
    for i in range(shape.learners):
        records = parts.records(shape, i, state.folders[i].log)
        if len(set(records)) < len(records):
            return f"learner {i} has taken batches {list(records)} in: one of them twice"
        if state.coordinator.book.state is RunState.FINISHED and len(records) < state.receipts[i]:
            return f"learner {i} has given receipts for {state.receipts[i]} batches, and learned {list(records)}"
    return None


def _refused_for_a_cause(shape: Shape, state: State) -> str | None:
    if any(process.out for process in state.processes) and not (state.damaged or _displaced(shape, state)):
        return "a learner is refused for ever, and nobody has copied or cut its folder"
    return None


def _written_by_sender(shape: Shape, state: State) -> str | None:
    for f, process in enumerate(state.processes):
        for message in () if process.session is None else process.session.inputs.heard:
            sender, t = parts.about(shape, message)
            owned = [folder for g, folder in enumerate(state.folders) if shape.owner(g) == sender]
            lost = (sender == 0 and state.set_back) or not parts.stands(shape, sender, owned[0])
            if not lost and not any(message in folder.log for folder in owned):
                return f"{shape.called(f)} has learned from round {t} of learner {sender}, who has not written it down"
    return None


def _displaced(shape: Shape, state: State) -> bool:
    """Was the first learner's folder set back, or a copy of it started?"""
    return state.set_back or len(state.folders) > shape.learners


_INVARIANTS: dict[str, Callable[[Shape, State], str | None]] = {
    "P1": _one_content,
    "P2": _charged,
    "P3": _learned_once,
    "P5": _refused_for_a_cause,
    "P6": _written_by_sender,
}
ALL = tuple(_INVARIANTS)
