"""A run under way whose learners leave and join: its spec with other absences, as long as no round that is over changes."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from sottovoce.errors import NotReady, SpecError
from sottovoce.explaining import lines_of
from sottovoce.network.roster import Absence, Roster
from sottovoce.spec import RunSpec


def without(spec: RunSpec, learner: str, t: int, unheard: Mapping[str, int] | None = None) -> RunSpec:
    """The spec where a learner is away for good from round `t` on.

    Args:
        spec: of the run.
        learner: its name.
        t: no learner has said this round.
        unheard: where it was lost before: by name, the first round in which each neighbour did not hear it.

    Raises:
        NotReady: it is away already.
        SpecError: nobody would be there.
    """
    if spec.roster.attendance(spec.names.index(learner), spec.rounds).end <= t and not unheard:
        raise NotReady(f"{learner} is away from round {t} on as it is")
    others = [each for each in spec.absences or () if each.learner != learner]
    own = sorted((each for each in spec.absences or () if each.learner == learner), key=lambda each: each.first_round)
    before = [each for each in own if each.first_round < t]
    first = t
    if before and (before[-1].until_round is None or before[-1].until_round >= t):  # it is away then: it stays so
        first = before.pop().first_round
    last = {name: min(since, first) for name, since in (unheard or {}).items()}
    return _with(spec, [*others, *before, Absence(learner=learner, first_round=first, unheard=last)])


def with_learner(spec: RunSpec, learner: str, t: int) -> RunSpec:
    """The spec where a learner that was never there takes part from round `t` on.

    Not one that was there: its records are placed in the rounds of the spec, and those of rounds to come may have been brought.

    Raises:
        NotReady: it has no place that was kept for it.
    """
    if spec.roster.attendance(spec.names.index(learner), spec.rounds).stretches:
        raise NotReady(
            "only who has a place in the spec and no round yet joins a run under way "
            f"(`absences: [{{learner: {learner}}}]`), and {learner} has some: start a new run"
        )
    others = [each for each in spec.absences or () if each.learner != learner]
    own = [Absence(learner=learner, until_round=t)] if t else []
    return _with(spec, [*others, *own])


def _with(spec: RunSpec, absences: list[Absence]) -> RunSpec:
    document = {**spec.model_dump(mode="json"), "absences": [each.model_dump(mode="json") for each in absences]}
    try:
        return RunSpec.model_validate(document, context={"imports": True})
    except ValidationError as error:
        raise SpecError("; ".join(lines_of(error, document, RunSpec))) from None


def require_amendment(before: Roster, after: Roster, learner: int, said: int, done: int) -> None:
    """A learner's rounds that are over must be what they were.

    Args:
        before, after: who takes part when, as it was told before and now.
        learner: its index.
        said: rounds that it has said.
        done: of these, those whose messages and records it has learned.

    Raises:
        SpecError: one of them would be another one.
    """
    for t in sorted({0, *before.changes, *after.changes}):
        if t < done and _heard(before, learner, t) != _heard(after, learner, t):
            raise SpecError(f"round {t} of this learner is over, and would have other neighbours: start a new run")
    if said > done and before.is_there(learner, done) != after.is_there(learner, done):
        raise SpecError(f"round {done} was said by this learner, which would be away in it: start a new run")


def _heard(roster: Roster, learner: int, t: int) -> tuple[object, ...]:
    """What the weights that a learner gives in a round follow from."""
    there = roster.there(t)
    return there.tobytes(), {i for i in roster.lost_to(learner, t) if there[i]}
