"""Participation in a run: learners that are away, leave or join, neighbours that are late, and messages that are clipped.

Runs in which a round may go on without a neighbour that is late, with its newest message from before.

A message then also says which rounds' messages the update before it used, in a field of its own, of one length for all
learners and rounds. So what reached a learner is on the wire, as in a run that waits, and replay stays exact. No update uses
a message of a later round than its own: a learner that is behind computes what it would have computed without delay.

Runs in which what a neighbour says is clipped to what a correct one can say, before it is used.

Not projected onto the decision set: what is said is a decision with noise, and lies outside; the mean of many such messages is
the mean decision, that of their projections is not. What is clipped lies further out than honest noise ever reaches, so a run
of correct learners is the same number by number, and one number of a neighbour moves nobody further than noise could.

It is a function of what was heard, which is the same in both worlds. So it costs nothing where a guarantee holds whatever
is heard, and is refused elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from sottovoce_core.algorithms.interface import Algorithm, Clippable, LocalMessages, Message, StackedMessages
from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import AssumptionViolated, DataError, FailedPrecondition, SpecError, require
from sottovoce_core.network.network import Network
from sottovoce_core.network.participation_schedule import Mask, OfflineInterval, ParticipationSchedule
from sottovoce_core.noise import NoiseSource, no_noise
from sottovoce_core.noise.request import NoiseRequest
from sottovoce_core.privacy.accountant import Accountant
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import abbreviate_names
from sottovoce_core.validation_errors import format_validation_errors

# ---- away ------------------------------------------------------------------------------------------------------------

StateT = TypeVar("StateT")


def update_offline_state(algorithm: Algorithm[StateT], state: StateT, nothing: Batch) -> StateT:
    """The state after a round in which the learner was away.

    Args:
        algorithm: of the run.
        state: before the round.
        nothing: the round's records, of which there are none.
    """
    spoken, _ = algorithm.emit(state, no_noise)
    return algorithm.update(spoken, LocalMessages({}, {}, 1.0), nothing)


def mask_offline_noise(noise: NoiseSource, there: Mask) -> NoiseSource:
    """Noise of all learners `(learners, replicas, dim)`, in which those who are away draw none."""

    def of_those(draw: NoiseRequest) -> FloatArray:
        return np.where(there.reshape(-1, 1, 1), noise(draw), 0.0)

    return of_those


def mask_offline_messages(message: Message, there: Mask) -> Message:
    """What all learners say, not-a-number for those who are away."""
    said = there.reshape(-1, 1, 1)
    return Message({name: np.where(said, value, np.nan) for name, value in message.fields.items()})


def require_no_records(data: PlacedData, roster: ParticipationSchedule, rounds: int) -> None:
    """Who is away learns nothing.

    Raises:
        DataError: there are records for such a round.
    """
    found = list[str]()
    for i, own in enumerate(data.learners) if roster.offline_intervals else ():
        busy = np.diff(own.offsets[: rounds + 1]) > 0
        if (wrong := np.flatnonzero(busy & ~roster.learner_participation(i, len(busy)).mask())).size:
            found.append(f"{roster.names[i]} in round {wrong[0]}")
    if found:
        raise DataError(
            f"learners must have no records in rounds in which they are away, got some of {abbreviate_names(found)}: place the data by "
            "the same spec"
        )


# ---- amending --------------------------------------------------------------------------------------------------------


def remove_learner(spec: RunSpec, learner: str, t: int, missed_from_rounds: Mapping[str, int] | None = None) -> RunSpec:
    """The spec where a learner is away for good from round `t` on.

    Args:
        spec: of the run.
        learner: its name.
        t: no learner has said this round.
        missed_from_rounds: where it was lost before: by name, the first round in which each neighbour did not hear it.

    Raises:
        FailedPrecondition: it is away already.
        SpecError: nobody would be there.
    """
    if (
        spec.participation.learner_participation(spec.names.index(learner), spec.rounds).end <= t
        and not missed_from_rounds
    ):
        raise FailedPrecondition(f"{learner} is away from round {t} on as it is")
    others = [each for each in spec.offline_intervals if each.learner != learner]
    own = sorted(
        (each for each in spec.offline_intervals if each.learner == learner), key=lambda each: each.first_round
    )
    before = [each for each in own if each.first_round < t]
    first = t
    if before and (before[-1].until_round is None or before[-1].until_round >= t):  # it is away then: it stays so
        first = before.pop().first_round
    last = {name: min(since, first) for name, since in (missed_from_rounds or {}).items()}
    return _with(spec, [*others, *before, OfflineInterval(learner=learner, first_round=first, missed_from_rounds=last)])


def add_learner(spec: RunSpec, learner: str, t: int) -> RunSpec:
    """The spec where a learner that was never there takes part from round `t` on.

    Not one that was there: its records are placed in the rounds of the spec, and those of rounds to come may have been brought.

    Raises:
        FailedPrecondition: it has no place that was kept for it.
    """
    if spec.participation.learner_participation(spec.names.index(learner), spec.rounds).intervals:
        raise FailedPrecondition(
            "only who has a place in the spec and no round yet joins a run under way "
            f"(`offline_intervals: [{{learner: {learner}}}]`), and {learner} has some: start a new run"
        )
    others = [each for each in spec.offline_intervals if each.learner != learner]
    own = [OfflineInterval(learner=learner, until_round=t)] if t else []
    return _with(spec, [*others, *own])


def _with(spec: RunSpec, offline_intervals: list[OfflineInterval]) -> RunSpec:
    document = {
        **spec.model_dump(mode="json"),
        "offline_intervals": [each.model_dump(mode="json") for each in offline_intervals],
    }
    try:
        return RunSpec.model_validate(document, context={"imports": True})
    except ValidationError as error:
        raise SpecError("; ".join(format_validation_errors(error, document, RunSpec))) from None


def require_valid_reconfiguration(
    before: ParticipationSchedule,
    after: ParticipationSchedule,
    learner: int,
    committed_rounds: int,
    learned_rounds: int,
) -> None:
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
        if t < learned_rounds and _heard(before, learner, t) != _heard(after, learner, t):
            raise SpecError(f"round {t} of this learner is over, and would have other neighbours: start a new run")
    if committed_rounds > learned_rounds and before.is_participating(learner, learned_rounds) != after.is_participating(
        learner, learned_rounds
    ):
        raise SpecError(f"round {learned_rounds} was said by this learner, which would be away in it: start a new run")


def _heard(roster: ParticipationSchedule, learner: int, t: int) -> tuple[object, ...]:
    """What the weights that a learner gives in a round follow from."""
    there = roster.participant_mask(t)
    return there.tobytes(), {i for i in roster.lost_senders(learner, t) if there[i]}


# ---- late ------------------------------------------------------------------------------------------------------------

USED_ROUNDS_FIELD = "used_rounds"
"""The field: for each neighbour that is heard, by ascending index, the round whose message was used; `NONE` beyond them, and
before the first update."""
NO_ROUND = -1.0


def compute_used_rounds_width(network: Network) -> int:
    """Numbers in the field: as many as the learner that hears most hears others; one where nobody hears anybody."""
    return max(int(np.count_nonzero(network.mixing(0).neighbour_weights, axis=1).max()), 1)


def encode_used_rounds(rounds: Sequence[float], width: int) -> FloatArray:
    """The field `(width,)`, where these rounds were used."""
    field = np.full(width, NO_ROUND)
    field[: len(rounds)] = rounds
    return field


def encode_punctual_rounds(network: Network, t: int) -> FloatArray:
    """`(learners, width)`: what learners say in round t if nobody was late in the one before."""
    heard, width = np.count_nonzero(network.mixing(0).neighbour_weights, axis=1), compute_used_rounds_width(network)
    return np.array([encode_used_rounds([t - 1.0] * count if t else [], width) for count in heard.tolist()]).reshape(
        -1, width
    )


def check_bounded_staleness(
    accountant: Accountant, name: str, shapes: Sequence[str], network: Network
) -> Iterator[RunWarning]:
    """Check that a run may go on without late neighbours, and yield what that costs.

    Args:
        accountant: of a learner.
        name: of the algorithm.
        shapes: names of the fields of its messages.
        network: of the run.

    Raises:
        AssumptionViolated: LATE_GUARANTEE, LATE_NETWORK or LATE_FIELD.
    """
    instead = "set clock.staleness to wait, and clock.mode to another than async"
    if not accountant.is_valid_for_any_messages:
        text = (
            "a round may go on without late neighbours only where the guarantee holds whatever messages a learner hears"
        )
        raise AssumptionViolated("LATE_GUARANTEE", f"{text}; that of {name} does not say so: {instead}")
    if network.horizon > 1:
        text = "a round may go on without late neighbours only in one graph for all rounds, got a network that changes"
        raise AssumptionViolated("LATE_NETWORK", f"{text}: {instead}")
    if USED_ROUNDS_FIELD in shapes:
        raise AssumptionViolated(
            "LATE_FIELD",
            f"no field of the messages of {name} may be called {USED_ROUNDS_FIELD!r} where rounds go on without late neighbours",
        )
    yield RunWarning(
        "LATE_REGRET",
        "rounds may use older messages: the guarantee holds, but bounds on regret are for runs that wait; and what a network "
        "keeps in sum, as ADMM its duals and push-sum its weights, drifts with every late message",
    )


@dataclass(frozen=True, slots=True)
class StalenessStatistics:
    """How late messages were.

    Attributes:
        share: of the messages that updates used, those of an earlier round than their own.
        rounds: the oldest was of so many rounds before.
    """

    stale_share: float
    max_lag_rounds: int


def measure_staleness(said: FloatArray) -> StalenessStatistics:
    """Of a run, by what learners said of it, `(rounds, learners, replicas, width)`."""
    own = np.arange(-1, len(said) - 1).reshape(-1, 1, 1, 1)
    lags = (own - said)[np.isfinite(said) & (said != NO_ROUND)]
    return StalenessStatistics(float((lags > 0).mean()), int(lags.max())) if lags.size else StalenessStatistics(0.0, 0)


@dataclass(frozen=True, slots=True)
class StaleStackedMessages(StackedMessages):
    """`ReceivedMessages` of all learners, each of which has used messages of other rounds.

    Attributes:
        used: `(learners, width)` rounds, as said.
        earlier: field name to `(rounds, learners, replicas, dim)`.
    """

    used_rounds: FloatArray
    message_history: dict[str, list[FloatArray]]

    def _sum(self, weights: FloatArray, name: str) -> FloatArray:
        said = self.message_history[name]
        mixed = np.zeros_like(said[-1])
        for i, row in enumerate(weights):
            for k, j in enumerate(np.flatnonzero(row)):
                mixed[i] += row[j] * said[int(self.used_rounds[i, k])][j]
        return mixed


# ---- clipping --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clipping:
    """What becomes of messages before they are used.

    Attributes:
        bounds: of a learner and a round, as `Clippable.clip_bounds`; None: messages are used as they are.
    """

    bounds: Callable[[int, int], Mapping[str, float]] | None = None

    def clip(self, sender: int, t: int, message: Message) -> Message:
        """One learner's message of a round; fields `(..., dim)`."""
        if self.bounds is None:
            return message
        most = self.bounds(sender, t)
        return Message({name: np.clip(value, -most[name], most[name]) for name, value in message.fields.items()})

    def clip_all(self, t: int, message: Message) -> Message:
        """All learners' messages of a round; fields `(learners, replicas, dim)`."""
        if self.bounds is None:
            return message
        learners = len(next(iter(message.fields.values())))
        most = [self.bounds(i, t) for i in range(learners)]
        limits = {name: np.array([each[name] for each in most]).reshape(-1, 1, 1) for name in message.fields}
        return Message({name: np.clip(value, -limits[name], limits[name]) for name, value in message.fields.items()})


def build_clipping(spec: RunSpec, algorithm: Algorithm[Any]) -> Clipping:
    """What a run does with its messages.

    Raises:
        AssumptionViolated: VIOLATION_CLIP: it is to clip them, and cannot.
    """
    if spec.on_violation != "clip":
        return Clipping()
    code, name = "VIOLATION_CLIP", algorithm.name
    instead = "set on_violation to stop"
    if not isinstance(algorithm, Clippable):
        text = "messages can be clipped only where they are decisions with noise on them, and those of"
        raise AssumptionViolated(
            code, f"{text} {name} are not: nothing bounds what a correct neighbour may say; {instead}"
        )
    text = "messages can be clipped only where the guarantee holds whatever is heard, and that of"
    require(algorithm.accountant(0).is_valid_for_any_messages, code, f"{text} {name} does not say so; {instead}")
    bounded = all(map(math.isfinite, algorithm.clip_bounds(0, 0).values()))
    require(bounded, code, f"messages can be clipped only where the decision set is bounded; {instead}")
    text = "rounds may use older messages, of which each has bounds of its own: set clock.staleness to wait, or another clock.mode"
    require(spec.clock.staleness_timeout_s is None, code, text)
    return Clipping(algorithm.clip_bounds)
