"""A run under way whose learners leave and join: its spec with other absences, as long as no round that is over changes."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from sottovoce.errors import SpecError
from sottovoce.network.roster import Absence, Roster
from sottovoce.running.run import Run
from sottovoce.spec import RunSpec


def without(spec: RunSpec, learner: str, t: int, unheard: Mapping[str, int] | None = None) -> RunSpec:
    """The spec where a learner is away for good from round `t` on.

    Args:
        spec: of the run.
        learner: its name.
        t: no learner has said this round.
        unheard: where it was lost before: by name, the first round in which each neighbour did not hear it.

    Raises:
        SpecError: it is away already, or nobody would be there.
    """
    if not spec.roster.attendance(spec.names.index(learner), spec.rounds).end > t and not unheard:
        raise SpecError(f"{learner} is away from round {t} on as it is")
    others = [each for each in spec.absences or () if each.learner != learner or each.first_round < t]
    kept = [each if each.learner != learner else _ended(each, t) for each in others]
    return _with(spec, [*kept, Absence(learner=learner, first_round=t, unheard=unheard or {})])


def with_again(spec: RunSpec, learner: str, t: int) -> RunSpec:
    """The spec where a learner that is away takes part from round `t` on.

    Raises:
        SpecError: it is not away, or was lost: others do not know how far it was.
    """
    found = [each for each in spec.absences or () if each.learner == learner]
    if any(each.unheard for each in found):
        raise SpecError(f"{learner} was lost in this run, and cannot take part in it again: start a new run")
    away = next((each for each in found if each.until_round is None or each.until_round > t), None)
    if away is None:
        raise SpecError(f"{learner} is not away from round {t} on")
    kept = [each for each in found if each.first_round < t]
    others = [each for each in spec.absences or () if each.learner != learner]
    return _with(spec, [*others, *(_ended(each, t) for each in kept)])


def _ended(absence: Absence, t: int) -> Absence:
    """The same, over before round t."""
    over = absence.until_round is not None and absence.until_round <= t
    return absence if over else absence.model_copy(update={"until_round": t})


def _with(spec: RunSpec, absences: list[Absence]) -> RunSpec:
    document = {**spec.model_dump(mode="json"), "absences": [each.model_dump(mode="json") for each in absences]}
    try:
        return RunSpec.model_validate(document, context={"imports": True})
    except ValidationError as error:
        raise SpecError("; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())) from None


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
    return roster.there(t).tobytes(), roster.lost_to(learner, t)


def require_noise(before: Run, after: Run) -> None:
    """Noise must not follow from who is there: messages that were said had that of the spec before.

    Raises:
        SpecError: it does.
    """
    ends = (0, before.spec.rounds - 1)
    for i in range(before.spec.n_learners):
        if any(before.algorithm.noise_scale(i, t) != after.algorithm.noise_scale(i, t) for t in ends):
            raise SpecError(
                f"the noise of {before.spec.algorithm.name} follows from who is there, by its epsilon: give the scale of the "
                "noise, and learners can leave and join"
            )
