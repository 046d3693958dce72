"""A run built from a checked spec, the same for simulator, learner, coordinator and auditor; and the cost of its models.

Publishing a learner's model, or predictions of it, costs nothing more if the model is a function of messages (post-processing).
Every other model depends on records without noise in between: no epsilon covers it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product
from typing import Any

import numpy as np

from sottovoce_core.algorithms.interface import Algorithm, PublicModelAlgorithm
from sottovoce_core.algorithms.run_context import RunContext, RunWarning, broadcast_to_learners
from sottovoce_core.algorithms.validation import require_algorithm
from sottovoce_core.arrays import FloatArray, IntArray, summarize_fields
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.network.network import Network, PartialNetwork
from sottovoce_core.network.participation_schedule import OfflineInterval, Participation, ParticipationSchedule
from sottovoce_core.privacy.accountant import compute_guarantee
from sottovoce_core.privacy.guarantee import Guarantee
from sottovoce_core.privacy.loss import PURE, EpsilonLimit, PrivacyLoss
from sottovoce_core.runs.participation import (
    USED_ROUNDS_FIELD,
    Clipping,
    build_clipping,
    check_bounded_staleness,
    compute_used_rounds_width,
)
from sottovoce_core.spec import RunSpec

# ---- run -------------------------------------------------------------------------------------------------------------

MAX_PARAMETERS = 2**24
"""Maximum number of parameters of a model: services and readers of captures accept no larger messages."""
MAX_ACCOUNTED_ROUNDS = 100_000
"""Number of rounds of a run that are priced before it begins: limits are enforced during the run in any case."""
MAX_ROUNDS_AT_DELTA = 10_000
"""Number of rounds that are priced at a delta: Renyi divergences cost up to 0.3 ms a round, and the process waits for them."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that may start: every check of its algorithm has passed.

    `warnings` are the conditions that void a theorem without making the run unsafe; `clipping` is applied to received messages
    before they are used.
    """

    spec: RunSpec
    network: Network
    algorithm: Algorithm[Any]
    warnings: tuple[RunWarning, ...]
    clipping: Clipping = field(default_factory=Clipping)

    __repr__ = summarize_fields

    @property
    def loss(self) -> Loss:
        """Loss of one record."""
        return self.spec.loss

    @property
    def has_shared_records(self) -> bool:
        """True if all learners hold the same records, so that the privacy losses of all of them add up."""
        return self.spec.data.partition.is_shared or self.algorithm.accountant(0).has_shared_records

    @property
    def has_bounded_staleness(self) -> bool:
        """True if a round may continue without a late neighbour."""
        return self.spec.clock.staleness_timeout_s is not None

    def require_synchronous_rounds(self, what: str) -> None:
        """Refuse a round-by-round analysis of a run with bounded staleness.

        Raises:
            SpecError: the run has bounded staleness.
        """
        if self.has_bounded_staleness:
            raise SpecError(
                f"{what} needs a run that waits for late neighbours (clock.staleness: wait, and a mode other than async): "
                "elsewhere only a later message shows which messages were used before it; audit its capture"
            )

    @property
    def field_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every field of a message on the wire, in order."""
        shapes = self.algorithm.field_shapes()
        return (
            {**shapes, USED_ROUNDS_FIELD: (compute_used_rounds_width(self.network),)}
            if self.has_bounded_staleness
            else shapes
        )

    def participation(self, learner: int) -> Participation:
        """Return the planned participation of a learner."""
        return self.spec.participation.learner_participation(learner, self.spec.rounds)

    def guarantee(self, learner: int, counts: IntArray | None = None, replaced: IntArray | None = None) -> Guarantee:
        """Return the guarantee of one learner's messages over the planned rounds.

        After its last round the learner sends nothing. An earlier round in which it is offline is charged as if it sent a
        message.

        Args:
            learner: index of the learner.
            counts: `(rounds,)` records of each round (default: one each in rounds of participation).
            replaced: `(rounds,)` number of them that differ between the worlds (default: the most expensive use of a record).

        Raises:
            SpecError: no planned end; numbers of another shape, or below 0, or more replaced records than there are.
        """
        if self.spec.is_unbounded:
            raise SpecError("the cost of all rounds needs a number of rounds, got rounds: null: give one")
        attendance = self.participation(learner)
        if counts is None and self.spec.offline_intervals:
            counts = attendance.mask().astype(np.int64)
        promised = compute_guarantee(self.algorithm.accountant(learner), self.spec.rounds, counts, replaced)
        return promised.truncate(attendance.end)

    def planned_counts(self, learner: int, max_rounds: int | None = None) -> IntArray:
        """Return the records of each round until a learner's last one, if every round brings `data.batch_size` (`all`: one).

        Args:
            learner: index of the learner.
            max_rounds: number of first rounds to include (default: `MAX_ACCOUNTED_ROUNDS`).
        """
        most = MAX_ACCOUNTED_ROUNDS if max_rounds is None else max_rounds
        attendance, size = (
            self.spec.participation.learner_participation(learner, min(self.spec.rounds, most)),
            self.spec.data.batch_size,
        )
        return attendance.mask()[: attendance.end] * np.int64(1 if size == "all" else size)

    def planned_loss(self, learner: int, delta: float = 0.0) -> PrivacyLoss:
        """Return the loss of a learner's planned messages, of the first `MAX_ACCOUNTED_ROUNDS` (or `MAX_ROUNDS_AT_DELTA`) rounds.

        Args:
            learner: index of the learner.
            delta: delta at which epsilon is wanted; 0: Renyi divergences are not computed, and are those of the pure loss.
        """
        counts = self.planned_counts(learner, min(MAX_ACCOUNTED_ROUNDS, MAX_ROUNDS_AT_DELTA) if delta else None)
        accountant = self.algorithm.accountant(learner)
        pure = math.fsum(accountant.losses(counts))
        return PrivacyLoss(pure, accountant.total_renyi(counts)) if delta else PURE.loss(pure)

    def plan_limit(self, learner: int, epsilon: float | None, delta: float) -> EpsilonLimit | None:
        """Return a limit of a learner's spending in this run, with the Renyi order that suits the planned messages.

        Args:
            learner: index of the learner.
            epsilon: maximum; None: none.
            delta: delta at which it holds; 0: pure.

        Returns:
            The limit; None without a maximum and a delta.
        """
        if not delta:
            return None if epsilon is None else EpsilonLimit(epsilon)
        planned = self.planned_loss(learner, delta) if self.spec.rounds <= MAX_ROUNDS_AT_DELTA else None
        return EpsilonLimit.choose(math.inf if epsilon is None else epsilon, delta, planned)

    def budget(self, learner: int) -> EpsilonLimit | None:
        """Return the limit that the spec sets to a learner's spending; as of `plan_limit`."""
        return self.plan_limit(learner, self.spec.get_budget(learner), self.spec.privacy.delta)


def find_first_round_above(spending: FloatArray, limit: float) -> int | None:
    """Return the first round whose message would exceed a limit; None: no round.

    Args:
        spending: `(rounds,)` epsilon after every message, as of `Accountant.spending`.
        limit: epsilon that must not be exceeded.
    """
    above = np.flatnonzero(~(spending <= limit))
    return int(above[0]) if above.size else None


def format_above(value: float, limit: float) -> str:
    """Format a number with six digits, or as many more as show that it is above a limit: finite precision costs 1e-11."""
    digits = next((n for n in range(6, 17) if float(f"{value:.{n}g}") > limit), 17) if value > limit else 6
    return f"{value:.{digits}g}"


def _require_droppable(spec: RunSpec, setting: RunContext, algorithm: Algorithm[Any]) -> None:
    """Require that the run could continue without any one of its learners, if it may drop lost learners.

    Raises:
        AssumptionViolated: LATE_DROP or VIOLATION_DROP.
    """
    code, instead = ("LATE_DROP", "clock.staleness to wait")
    if spec.on_violation == "drop":
        code, instead = ("VIOLATION_DROP", "on_violation to stop")
    network = setting.network
    whole = network.full_network if isinstance(network, PartialNetwork) else network
    gone = ParticipationSchedule(spec.names, [OfflineInterval(learner=spec.names[-1], first_round=1)])
    try:
        left, _ = spec.algorithm.build(replace(setting, network=spec.topology.build_partial_network(whole, gone)))
        if algorithm.accountant(0).has_shared_records:
            raise SpecError("all learners have the same records in all rounds")
        require_equal_noise(algorithm, left, spec)
        if spec.clock.staleness_timeout_s is not None:
            raise SpecError("rounds that continue without late neighbours need one graph for all rounds")
    except SpecError as error:
        text = f"a run of {algorithm.name} must be able to continue without a lost learner, and cannot: {error}; set {instead}"
        raise AssumptionViolated(code, text) from None


def require_equal_noise(before: Algorithm[Any], after: Algorithm[Any], spec: RunSpec) -> None:
    """Require that noise does not depend on participation: sent messages have the noise of the algorithm before.

    Raises:
        SpecError: it depends on participation.
    """
    for i, t in product(range(spec.n_learners), (0, spec.rounds - 1)):
        if before.noise_scale(i, t) != after.noise_scale(i, t):
            raise SpecError("noise must not depend on participation, as it does by its epsilon: give its scale instead")


def build_run(spec: RunSpec, n_features: int) -> Run:
    """Build everything that a run needs except its data.

    Raises:
        SpecError: the spec contradicts itself, needs too much memory, or a condition of the algorithm does
            not hold (`AssumptionViolated`).
    """
    try:
        return _build(spec, n_features)
    except MemoryError:
        text = f"{spec.rounds} rounds of {spec.n_learners} learners with {n_features} features"
        raise SpecError(f"a run must fit into memory, and {text} do not: lower rounds, learners or features") from None


def _build(spec: RunSpec, n_features: int) -> Run:
    network = spec.topology.build_network(spec.n_learners, spec.rounds, spec.participation)
    setting = RunContext(spec.rounds, n_features, spec.loss, spec.decision_set, network, spec.names)
    if setting.dim > MAX_PARAMETERS:
        text = f"a model must have at most {MAX_PARAMETERS} numbers, which every message carries"
        raise SpecError(
            f"{text}: {n_features} features give {setting.dim} with this loss; take fewer features or classes"
        )
    spec.decision_set.require_dim(setting.dim)
    if spec.privacy.budget is not None:
        broadcast_to_learners(spec.privacy.budget, spec.n_learners, "privacy.budget")
    try:
        built = spec.algorithm.build(setting)
    except ArithmeticError as error:  # from Python's numbers; NumPy's become infinite, and the conditions refuse them
        raise SpecError(f"the numbers of this spec must stay in the range of float64, got {error}") from None
    algorithm, warnings = require_algorithm(built, spec.algorithm, setting.dim)
    if spec.offline_intervals and algorithm.accountant(0).has_shared_records:
        text = (
            "this algorithm needs the same records at all learners in all rounds, got offline_intervals: leave them out"
        )
        raise AssumptionViolated("ABSENCES_SHARED", text)
    for i, name in enumerate(spec.names if spec.offline_intervals else ()):
        paused = len(spec.participation.learner_participation(i, spec.rounds).intervals) > 1
        if paused and not algorithm.accountant(i).can_pause:
            raise AssumptionViolated(
                "ABSENCES_PAUSE",
                "a learner may pause only if the guarantee holds for its later messages, and that of "
                f"{algorithm.name} does not say so, got a pause of {name}: let it join late, or leave for good",
            )
    if spec.offline_intervals:
        text = "some learners are offline in some rounds: the bounds on regret are for all learners in all rounds"
        warnings = (*warnings, RunWarning("ABSENCES", text))
    if spec.can_drop_learners:
        _require_droppable(spec, setting, algorithm)
    if spec.clock.staleness_timeout_s is not None:
        fields = tuple(algorithm.field_shapes())
        warnings = (*warnings, *check_bounded_staleness(algorithm.accountant(0), algorithm.name, fields, network))
    return Run(spec, network, algorithm, warnings, build_clipping(spec, algorithm))


# ---- publication -----------------------------------------------------------------------------------------------------


class PublicationCoverage(StrEnum):
    """Guarantees that can cover a published model."""

    MESSAGES = "messages"
    """The model is a function of messages whose noise was charged."""
    DECISIONS = "decisions"
    """A separate guarantee covers it, against adversaries that see decisions and no messages."""
    UNCOVERED = "nothing"


@dataclass(frozen=True, slots=True)
class Publication:
    """Privacy cost of publishing a model.

    Attributes:
        coverage: guarantee that covers it.
        epsilon: epsilon of one use of a record, over everything known of the learner's run; infinite: no guarantee.
        text: reason, for people.
    """

    coverage: PublicationCoverage
    epsilon: float
    text: str

    @property
    def is_protected(self) -> bool:
        """True if a guarantee holds."""
        return self.coverage is not PublicationCoverage.UNCOVERED


def assess_publication(
    run: Run, learner: int, rounds: int, spent: float | None = None, *, has_private_noise: bool = True
) -> Publication:
    """Assess the privacy cost of publishing a learner's model.

    Args:
        run: run that made the model.
        learner: index of the learner.
        rounds: number of rounds that the model has learned from.
        spent: epsilon of its messages, by its accountant; None: as planned.
        has_private_noise: whether the noise was the operating system's; seeded and recorded noise protects nothing.
    """
    name = run.algorithm.name
    if not rounds:
        return Publication(
            PublicationCoverage.MESSAGES,
            0.0,
            "no record was learned: the model is the public starting point",
        )
    if not has_private_noise:
        return Publication(
            PublicationCoverage.UNCOVERED,
            math.inf,
            "its noise is from a seed or a recording, which protects nothing: no epsilon covers it",
        )
    there = run.participation(learner).intervals
    if there and there[0].stop < rounds:
        text = "its learner was offline after it had learned, and continues without noise then: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    if not isinstance(run.algorithm, PublicModelAlgorithm) or not run.algorithm.is_model_public(rounds):
        return _assess_decisions(run, learner, rounds)
    if spent is None:
        spent = run.guarantee(learner).epsilon(rounds)
    if spent == math.inf or not _has_noise(run, learner):
        text = f"the model of {name} follows from its messages, and these carry no noise: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    text = f"the model of {name} follows from messages that were charged: it costs nothing more"
    if run.has_shared_records:
        text += "; all learners hold the same records, so their epsilons add up"
    return Publication(PublicationCoverage.MESSAGES, spent, text)


def _assess_decisions(run: Run, learner: int, rounds: int) -> Publication:
    """Assess a model by the guarantee of decisions alone, which mostly does not exist."""
    name = run.algorithm.name
    alone = None if run.spec.is_unbounded else run.guarantee(learner).output_epsilon
    if alone is None:
        text = f"the model of {name} has learned from records in ways that no message shows: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    if captured := _describe_capture(run.spec):
        text = f"the guarantee of {name} is against adversaries without messages, and {captured}: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    text = f"the guarantee of {name} is against adversaries that see decisions and no messages; its messages carry no noise"
    return Publication(PublicationCoverage.DECISIONS, float(alone[min(rounds, len(alone)) - 1]), text)


def _describe_capture(spec: RunSpec) -> str:
    return f"this run was captured (capture: {spec.capture})" if spec.capture in ("relay", "mirror") else ""


def _has_noise(run: Run, learner: int) -> bool:
    """Return whether messages have noise: then their epsilon is finite, but a run without messages shows nothing."""
    rounds = 2 if run.spec.is_unbounded else run.spec.rounds
    counts = run.planned_counts(learner, min(rounds, 1000))
    return math.isfinite(math.fsum(run.algorithm.accountant(learner).losses(counts)))
