"""Participation in a run: offline learners, learners that leave or join, bounded staleness, and clipping of messages.

Bounded staleness: a round may continue without a late neighbour, with its newest earlier message.

A message then also states the rounds of the messages used in the previous update, in an additional field of equal length for all
learners and rounds. So every used message is known from the wire, as in a run that waits, and replay stays exact. No update uses
a message of a later round than its own: a learner that is behind computes what it would have computed without delay.

Clipping: a neighbour's message is clipped to the range of a correct learner's messages before it is used.

Messages are not projected onto the decision set: a message is a decision with noise, and lies outside; the mean of many such
messages is the mean decision, that of their projections is not. Clipped values lie further out than honest noise ever reaches, so
a run of correct learners is unchanged in every number, and a neighbour can shift nothing further than noise could.

Clipping is a function of received messages, which are equal in both worlds. So it costs nothing if a guarantee holds for any
received messages, and is refused otherwise.
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

# ---- offline learners ------------------------------------------------------------------------------------------------

StateT = TypeVar("StateT")


def update_offline_state(algorithm: Algorithm[StateT], state: StateT, nothing: Batch) -> StateT:
    """Return the state after a round in which the learner was offline.

    Args:
        algorithm: algorithm of the run.
        state: state before the round.
        nothing: empty batch of the round.
    """
    emitted, _ = algorithm.emit(state, no_noise)
    return algorithm.update(emitted, LocalMessages({}, {}, 1.0), nothing)


def mask_offline_noise(noise: NoiseSource, there: Mask) -> NoiseSource:
    """Return noise of all learners `(learners, replicas, dim)`, zero for offline learners."""

    def request_noise(draw: NoiseRequest) -> FloatArray:
        return np.where(there.reshape(-1, 1, 1), noise(draw), 0.0)

    return request_noise


def mask_offline_messages(message: Message, there: Mask) -> Message:
    """Return the messages of all learners, not-a-number for offline ones."""
    is_present = there.reshape(-1, 1, 1)
    return Message({name: np.where(is_present, value, np.nan) for name, value in message.fields.items()})


def require_no_records(data: PlacedData, roster: ParticipationSchedule, rounds: int) -> None:
    """Require that offline learners have no records.

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
            f"learners must have no records in rounds in which they are offline, got some of {abbreviate_names(found)}: "
            "place the data by the same spec"
        )


# ---- reconfiguration -------------------------------------------------------------------------------------------------


def remove_learner(spec: RunSpec, learner: str, t: int, missed_from_rounds: Mapping[str, int] | None = None) -> RunSpec:
    """Return the spec with a learner permanently offline from round `t` on.

    Args:
        spec: spec of the run.
        learner: name of the learner.
        t: round for which no learner has sent a message yet.
        missed_from_rounds: if the learner was lost before: by name, the first round whose message each neighbour missed.

    Raises:
        FailedPrecondition: it is offline already.
        SpecError: no learner would be left.
    """
    if (
        spec.participation.learner_participation(spec.names.index(learner), spec.rounds).end <= t
        and not missed_from_rounds
    ):
        raise FailedPrecondition(
            f"{learner} must participate from round {t} on to leave, and is offline from then on already"
        )
    others = [each for each in spec.offline_intervals if each.learner != learner]
    own = sorted(
        (each for each in spec.offline_intervals if each.learner == learner), key=lambda each: each.first_round
    )
    before = [each for each in own if each.first_round < t]
    first = t
    if before and (
        before[-1].until_round is None or before[-1].until_round >= t
    ):  # offline at t: the interval is extended
        first = before.pop().first_round
    last = {name: min(since, first) for name, since in (missed_from_rounds or {}).items()}
    return _replace_intervals(
        spec, [*others, *before, OfflineInterval(learner=learner, first_round=first, missed_from_rounds=last)]
    )


def add_learner(spec: RunSpec, learner: str, t: int) -> RunSpec:
    """Return the spec with a learner that never participated joining from round `t` on.

    A former participant cannot join: its records are placed in the rounds of the spec, and later records may have been used
    already.

    Raises:
        FailedPrecondition: no place is reserved for it.
    """
    if spec.participation.learner_participation(spec.names.index(learner), spec.rounds).intervals:
        raise FailedPrecondition(
            "only a learner with a place in the spec and no participation so far can join a run under way "
            f"(`offline_intervals: [{{learner: {learner}}}]`), and {learner} has participated: start a new run"
        )
    others = [each for each in spec.offline_intervals if each.learner != learner]
    own = [OfflineInterval(learner=learner, until_round=t)] if t else []
    return _replace_intervals(spec, [*others, *own])


def _replace_intervals(spec: RunSpec, offline_intervals: list[OfflineInterval]) -> RunSpec:
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
    """Require that a learner's completed rounds stay as they were.

    Args:
        before, after: participation schedules, as sent before and now.
        learner: index of the learner.
        committed_rounds: number of rounds whose message it has committed.
        learned_rounds: number of these rounds whose messages and records it has learned.

    Raises:
        SpecError: one of them would change.
    """
    for t in sorted({0, *before.changes, *after.changes}):
        if t < learned_rounds and _weight_key(before, learner, t) != _weight_key(after, learner, t):
            raise SpecError(
                f"the neighbours of a completed round must not change, got others in round {t}: start a new run"
            )
    if committed_rounds > learned_rounds and before.is_participating(learner, learned_rounds) != after.is_participating(
        learner, learned_rounds
    ):
        raise SpecError(f"this learner has sent round {learned_rounds}, and would be offline in it: start a new run")


def _weight_key(roster: ParticipationSchedule, learner: int, t: int) -> tuple[object, ...]:
    """Return everything that determines the weights of a learner in a round."""
    there = roster.participant_mask(t)
    return there.tobytes(), {i for i in roster.lost_senders(learner, t) if there[i]}


# ---- bounded staleness -----------------------------------------------------------------------------------------------

USED_ROUNDS_FIELD = "used_rounds"
"""Name of the field with the used rounds: for each in-neighbour, by ascending index, the round whose message was used; `NONE`
after them, and before the first update."""
NO_ROUND = -1.0


def compute_used_rounds_width(network: Network) -> int:
    """Return the length of the field: the largest number of in-neighbours of a learner, at least one."""
    return max(int(np.count_nonzero(network.mixing(0).neighbour_weights, axis=1).max()), 1)


def encode_used_rounds(rounds: Sequence[float], width: int) -> FloatArray:
    """Return the field `(width,)` for these used rounds."""
    field = np.full(width, NO_ROUND)
    field[: len(rounds)] = rounds
    return field


def encode_punctual_rounds(network: Network, t: int) -> FloatArray:
    """Return the fields `(learners, width)` of round t if no message of the previous round was late."""
    in_degrees, width = (
        np.count_nonzero(network.mixing(0).neighbour_weights, axis=1),
        compute_used_rounds_width(network),
    )
    return np.array(
        [encode_used_rounds([t - 1.0] * count if t else [], width) for count in in_degrees.tolist()]
    ).reshape(-1, width)


def check_bounded_staleness(
    accountant: Accountant, name: str, shapes: Sequence[str], network: Network
) -> Iterator[RunWarning]:
    """Check that a run may use stale messages, and yield warnings about the consequences.

    Args:
        accountant: accountant of a learner.
        name: name of the algorithm.
        shapes: names of the fields of its messages.
        network: network of the run.

    Raises:
        AssumptionViolated: LATE_GUARANTEE, LATE_NETWORK or LATE_FIELD.
    """
    instead = "set clock.staleness to wait, and clock.mode to another than async"
    if not accountant.is_valid_for_any_messages:
        text = "a round may continue without late neighbours only if the guarantee holds for any received messages"
        raise AssumptionViolated("LATE_GUARANTEE", f"{text}; that of {name} does not say so: {instead}")
    if network.horizon > 1:
        text = (
            "a round may continue without late neighbours only in one graph for all rounds, got a network that changes"
        )
        raise AssumptionViolated("LATE_NETWORK", f"{text}: {instead}")
    if USED_ROUNDS_FIELD in shapes:
        raise AssumptionViolated(
            "LATE_FIELD",
            f"no field of the messages of {name} may be called {USED_ROUNDS_FIELD!r} where rounds go on without late neighbours",
        )
    yield RunWarning(
        "LATE_REGRET",
        "rounds may use older messages: the guarantee holds, but bounds on regret are for runs that wait; and sums that networks "
        "preserves, such as the duals of ADMM and the weights of push-sum, drift with every late message",
    )


@dataclass(frozen=True, slots=True)
class StalenessStatistics:
    """Statistics of late messages.

    Attributes:
        share: share of used messages that were of an earlier round than the update.
        rounds: maximum age of a used message, in rounds.
    """

    stale_share: float
    max_lag_rounds: int


def measure_staleness(values: FloatArray) -> StalenessStatistics:
    """Measure staleness in a run, from the field of used rounds, `(rounds, learners, replicas, width)`."""
    own = np.arange(-1, len(values) - 1).reshape(-1, 1, 1, 1)
    lags = (own - values)[np.isfinite(values) & (values != NO_ROUND)]
    return StalenessStatistics(float((lags > 0).mean()), int(lags.max())) if lags.size else StalenessStatistics(0.0, 0)


@dataclass(frozen=True, slots=True)
class StaleStackedMessages(StackedMessages):
    """`ReceivedMessages` of all learners, which may have used messages of different rounds.

    Attributes:
        used_rounds: `(learners, width)` used rounds.
        earlier: field name to `(rounds, learners, replicas, dim)`.
    """

    used_rounds: FloatArray
    message_history: dict[str, list[FloatArray]]

    def _sum(self, weights: FloatArray, name: str) -> FloatArray:
        values = self.message_history[name]
        mixed = np.zeros_like(values[-1])
        for i, row in enumerate(weights):
            for k, j in enumerate(np.flatnonzero(row)):
                mixed[i] += row[j] * values[int(self.used_rounds[i, k])][j]
        return mixed


# ---- clipping --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clipping:
    """Clipping of received messages.

    Attributes:
        bounds: bounds for a learner and a round, from `clip_bounds` of the algorithm; None: messages are used unchanged.
    """

    bounds: Callable[[int, int], Mapping[str, float]] | None = None

    def clip(self, sender: int, t: int, message: Message) -> Message:
        """Clip one learner's message of a round; fields `(..., dim)`."""
        if self.bounds is None:
            return message
        bounds = self.bounds(sender, t)
        return Message({name: np.clip(value, -bounds[name], bounds[name]) for name, value in message.fields.items()})

    def clip_all(self, t: int, message: Message) -> Message:
        """Clip all learners' messages of a round; fields `(learners, replicas, dim)`."""
        if self.bounds is None:
            return message
        learners = len(next(iter(message.fields.values())))
        bounds = [self.bounds(i, t) for i in range(learners)]
        limits = {name: np.array([each[name] for each in bounds]).reshape(-1, 1, 1) for name in message.fields}
        return Message({name: np.clip(value, -limits[name], limits[name]) for name, value in message.fields.items()})


def build_clipping(spec: RunSpec, algorithm: Algorithm[Any]) -> Clipping:
    """Build the clipping of a run.

    Raises:
        AssumptionViolated: VIOLATION_CLIP: clipping is requested, and not possible.
    """
    if spec.on_violation != "clip":
        return Clipping()
    code, name = "VIOLATION_CLIP", algorithm.name
    instead = "set on_violation to stop"
    if not isinstance(algorithm, Clippable):
        text = "messages can be clipped only if they are decisions with noise on them, and those of"
        raise AssumptionViolated(
            code, f"{text} {name} are not: nothing bounds what a correct neighbour may say; {instead}"
        )
    text = "messages can be clipped only if the guarantee holds for any received messages, and that of"
    require(algorithm.accountant(0).is_valid_for_any_messages, code, f"{text} {name} does not say so; {instead}")
    bounded = all(map(math.isfinite, algorithm.clip_bounds(0, 0).values()))
    require(bounded, code, f"messages can be clipped only if the decision set is bounded; {instead}")
    text = "rounds may use older messages, each with its own bounds: set clock.staleness to wait, or another clock.mode"
    require(spec.clock.staleness_timeout_s is None, code, text)
    return Clipping(algorithm.clip_bounds)
