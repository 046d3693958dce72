"""What must hold in every state. The larger part of P5, which is about ways between states, is held by `machine.explore`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

from sottovoce_coordinator.run_state import RunState
from tests.model import folders, runs
from tests.model.folders import Folder
from tests.model.runs import Shape
from tests.model.state import State


def broken(shape: Shape, state: State, judged: Collection[str]) -> str | None:
    """The first of these invariants that does not hold."""
    for name in judged:
        if (what := _INVARIANTS[name](shape, state)) is not None:
            return f"{name}: {what}"
    return None


def _one_content(shape: Shape, state: State) -> str | None:
    said = [runs.about(shape, message) for message in state.left]
    if len(set(said)) == len(said):
        return None
    learner, t = next(each for each in said if said.count(each) > 1)
    return f"two contents of round {t} have left learner {learner}"


def _charged(shape: Shape, state: State) -> str | None:
    said = {runs.about(shape, message) for message in state.left}
    for i in range(shape.learners):
        if i == 0 and _displaced(shape, state):
            continue  # its figures are no longer what they were: nothing may be said from it
        folder = state.folders[i]
        charged, prices = folders.charged(shape, i, folder), runs.prices(folder.shape(shape), i)
        rounds = max((t + 1 for learner, t in said if learner == i), default=0)
        if charged < prices[rounds]:
            return f"learner {i} has charged {charged:g}, and its messages up to round {rounds - 1} have left"
        if folders.stands(shape, i, folder) and charged > prices[folders.rounds_said(shape, i, folder.log)]:
            return f"learner {i} has charged {charged:g}, more than its messages cost"
    return None


def _learned_once(shape: Shape, state: State) -> str | None:
    for i in range(shape.learners):
        records = folders.records(shape, i, state.folders[i].log)
        if len(set(records)) < len(records):
            return f"learner {i} has taken batches {list(records)} in: one of them twice"
        if state.coordinator.book.state is RunState.FINISHED and len(records) < state.receipts[i]:
            return f"learner {i} has given receipts for {state.receipts[i]} batches, and learned {list(records)}"
    return None


def _refused_for_a_cause(shape: Shape, state: State) -> str | None:
    if state.damaged or _displaced(shape, state):
        return None
    lost = runs.lost(state.coordinator.book.shape(shape))
    out = [f for f, process in enumerate(state.processes) if process.out and shape.owner(f) not in lost]
    return f"{shape.called(out[0])} is refused for ever, and nobody has copied or cut its folder" if out else None


def _written_by_sender(shape: Shape, state: State) -> str | None:
    for f, process in enumerate(state.processes):
        for message in () if process.session is None else process.session.inputs.received_frames:
            sender, t = runs.about(shape, message)
            owned = [folder for g, folder in enumerate(state.folders) if shape.owner(g) == sender]
            lost = (sender == 0 and state.set_back) or not folders.stands(shape, sender, owned[0])
            if not lost and not any(message in folder.log for folder in owned):
                return f"{shape.called(f)} has learned from round {t} of learner {sender}, who has not written it down"
    return None


def _used_is_told(shape: Shape, state: State) -> str | None:
    run = state.coordinator.kept.shape(shape)
    return next((what for i in range(shape.learners) if (what := _untold(run, i, state.folders[i].log))), None)


@cache
def _untold(run: Shape, i: int, log: bytes) -> str | None:
    """What a log says that a learner has used, where the spec of the run or its message says something else."""
    for t, said in folders.learned(run, i, log):
        used = [runs.about(run, message) for message in said.received_frames]
        if (senders := tuple(j for j, _ in used)) != (wanted := runs.heard_in(run, i, t)):
            return f"learner {i} has used messages of {list(senders)} in round {t}, and by the spec those of {list(wanted)}"
        rounds = [own for _, own in used]
        if run.late != "reuse" and any(own != t for own in rounds):
            return f"learner {i} has used messages of rounds {rounds} in round {t}"
        if any(not t - run.window <= own <= t for own in rounds):
            return f"learner {i} has used messages of rounds {rounds} in round {t}: from too long before, or later ones"
        if (
            run.late == "reuse"
            and said.frame
            and runs.states(run, said.frame)[: len(rounds)] != tuple(map(float, rounds))
        ):
            return (
                f"learner {i} says that it used rounds {list(runs.states(run, said.frame))} in round {t}, not {rounds}"
            )
    return None


def _nothing_over_changes(shape: Shape, state: State) -> str | None:
    run = state.coordinator.kept.shape(shape)
    for i in range(shape.learners):
        if (t := _changed_before(shape, run, i, state.folders[i])) is not None:
            return (
                f"learner {i} has said round {t}, in which by the spec of the run others take part than by its ledger"
            )
    return None


@cache
def _changed_before(shape: Shape, run: Shape, i: int, folder: Folder) -> int | None:
    """A round that a learner has said, in which others take part now, or the learner itself does not."""
    own = folder.shape(shape)
    said = range(folders.rounds_said(shape, i, folder.log))
    said = range(runs.attendance(own, i).next_round(0), said.stop)
    changed = (t for t in said if runs.there(own, t) != runs.there(run, t) or i not in runs.there(run, t))
    return next(changed, None)


def _agreed(shape: Shape, state: State) -> str | None:
    for stream in state.streams:
        if all(stream.ends):
            one, other = (state.folders[f].shape(shape) for f in (stream.caller, stream.callee))
            if one != other:
                who = " and ".join(shape.called(f) for f in (stream.caller, stream.callee))
                return f"{who} exchange messages, and do not agree on who takes part"
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
    "P7": _used_is_told,
    "P8": _nothing_over_changes,
    "P9": _agreed,
}
ALL = tuple(_INVARIANTS)
