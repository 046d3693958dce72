"""A run: built from a checked spec, the same for the simulator, a learner, the coordinator and the auditor.

What it costs to hand out a learner's model, or predictions of it: whether what was spent on messages covers it.

A model that is a function of messages tells nothing beyond them, so it costs nothing more (post-processing). Every other
model has seen records that no noise hides: no epsilon covers it.
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
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.network.network import Network, PartialNetwork
from sottovoce_core.network.participation_schedule import OfflineInterval, Participation, ParticipationSchedule
from sottovoce_core.privacy.accountant import compute_guarantee
from sottovoce_core.privacy.guarantee import Guarantee
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
"""Numbers of a model: a message of more is none that services take, or a capture is read with."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that may start: every check of its algorithm has passed.

    `warnings` are the conditions that void a theorem without making the run unsafe; `clipping` is what becomes of messages
    before they are used, by whoever hears them.
    """

    spec: RunSpec
    network: Network
    algorithm: Algorithm[Any]
    warnings: tuple[RunWarning, ...]
    clipping: Clipping = field(default_factory=Clipping)

    @property
    def loss(self) -> Loss:
        """Of one record."""
        return self.spec.loss

    @property
    def has_bounded_staleness(self) -> bool:
        """Whether a round may go on without a neighbour that is late."""
        return self.spec.clock.staleness_timeout_s is not None

    def require_synchronous_rounds(self, what: str) -> None:
        """Refuse what follows a run round by round, where a round may go on without late neighbours.

        Raises:
            SpecError: it may.
        """
        if self.has_bounded_staleness:
            raise SpecError(
                f"{what} needs a run that waits for late neighbours (clock.staleness: wait, and a mode other than async): elsewhere "
                "only a later message shows what was heard before it; audit its capture"
            )

    @property
    def field_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every field of a message as it crosses the wire, in their order."""
        shapes = self.algorithm.field_shapes()
        return (
            {**shapes, USED_ROUNDS_FIELD: (compute_used_rounds_width(self.network),)}
            if self.has_bounded_staleness
            else shapes
        )

    def participation(self, learner: int) -> Participation:
        """The planned rounds in which a learner takes part."""
        return self.spec.participation.learner_participation(learner, self.spec.rounds)

    def guarantee(self, learner: int, counts: IntArray | None = None, replaced: IntArray | None = None) -> Guarantee:
        """What is promised about one learner's messages over the planned rounds.

        After its last round it says nothing. A round before that, in which it is away, is charged as if it spoke.

        Args:
            learner: its index.
            counts: `(rounds,)` records that each round brings (default: one each in which the learner takes part).
            replaced: `(rounds,)` how many of them differ between the worlds (default: the dearest event).

        Raises:
            SpecError: no end is planned; numbers of another shape, or below 0, or more replaced than there are.
        """
        if self.spec.is_unbounded:
            raise SpecError("what all rounds cost together is known for a number of rounds, got rounds: null: give one")
        attendance = self.participation(learner)
        if counts is None and self.spec.offline_intervals:
            counts = attendance.mask().astype(np.int64)
        promised = compute_guarantee(self.algorithm.accountant(learner), self.spec.rounds, counts, replaced)
        return promised.truncate(attendance.end)

    def planned_losses(self, learner: int, most_rounds: int) -> FloatArray:
        """Epsilon of each of one learner's messages, if every round brings `data.batch_size` records (for `all`: one).

        Args:
            learner: its index.
            most_rounds: the first so many rounds count.
        """
        attendance, size = (
            self.spec.participation.learner_participation(learner, min(self.spec.rounds, most_rounds)),
            self.spec.data.batch_size,
        )
        counts = attendance.mask()[: attendance.end] * np.int64(1 if size == "all" else size)
        return self.algorithm.accountant(learner).losses(counts)

    def planned_epsilon(self, learner: int, most_rounds: int) -> float:
        """Epsilon of one learner's messages together; arguments as of `planned_losses`."""
        return math.fsum(self.planned_losses(learner, most_rounds))


def find_first_round_above(losses: FloatArray, limit: float) -> int | None:
    """The first round whose message would bring the total above a limit, as a learner adds up; None: no round does.

    Args:
        losses: `(rounds,)` epsilon of each message.
        limit: epsilon that must not be exceeded.
    """
    above = np.flatnonzero(~(np.cumsum(losses) <= limit))
    return int(above[0]) if above.size else None


def format_above(value: float, limit: float) -> str:
    """Format a number with six digits, or with as many more as show that it is above a limit: finite precision costs 1e-11."""
    digits = next((n for n in range(6, 17) if float(f"{value:.{n}g}") > limit), 17) if value > limit else 6
    return f"{value:.{digits}g}"


def _require_droppable(spec: RunSpec, setting: RunContext, algorithm: Algorithm[Any]) -> None:
    """A run that is to go on without a learner that is lost must be one that can; which one it will be is not known.

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
            raise SpecError("rounds that go on without late neighbours need one graph for all rounds")
    except SpecError as error:
        text = f"a run of {algorithm.name} cannot go on without a learner that is gone: {error}; set {instead}"
        raise AssumptionViolated(code, text) from None


def require_equal_noise(before: Algorithm[Any], after: Algorithm[Any], spec: RunSpec) -> None:
    """Noise must not follow from who is there: messages that were said had that of the algorithm before.

    Raises:
        SpecError: it does.
    """
    for i, t in product(range(spec.n_learners), (0, spec.rounds - 1)):
        if before.noise_scale(i, t) != after.noise_scale(i, t):
            raise SpecError("its noise follows from who is there, by its epsilon: give the scale of the noise instead")


def build_run(spec: RunSpec, n_features: int) -> Run:
    """Everything that a run needs but its data.

    Raises:
        SpecError: the spec contradicts itself, asks for more memory than there is, or a condition of the algorithm does
            not hold (`AssumptionViolated`).
    """
    try:
        return _built(spec, n_features)
    except MemoryError:
        text = f"{spec.rounds} rounds of {spec.n_learners} learners with {n_features} features"
        raise SpecError(f"{text} need more memory than there is: lower rounds, learners or features") from None


def _built(spec: RunSpec, n_features: int) -> Run:
    network = spec.topology.build_network(spec.n_learners, spec.rounds, spec.participation)
    setting = RunContext(spec.rounds, n_features, spec.loss, spec.decision_set, network, spec.names)
    if setting.dim > MAX_PARAMETERS:
        text = f"a model has at most {MAX_PARAMETERS} numbers, which every message carries"
        raise SpecError(
            f"{text}: {n_features} features give {setting.dim} with this loss; take fewer features or classes"
        )
    spec.decision_set.require_dim(setting.dim)
    if spec.privacy.budget is not None:
        broadcast_to_learners(spec.privacy.budget, spec.n_learners, "privacy.budget")
    try:
        built = spec.algorithm.build(setting)
    except ArithmeticError as error:  # of Python's numbers; NumPy's become infinite, and the conditions refuse that
        raise SpecError(f"the numbers of this spec leave the range of float64: {error}") from None
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
                "a learner may pause only where the guarantee holds for what it says afterwards, and that of "
                f"{algorithm.name} does not say so, got a pause of {name}: let it join late, or leave for good",
            )
    if spec.offline_intervals:
        text = "some learners are away in some rounds: the bounds on regret are for all learners in all rounds"
        warnings = (*warnings, RunWarning("ABSENCES", text))
    if spec.can_drop_learners:
        _require_droppable(spec, setting, algorithm)
    if spec.clock.staleness_timeout_s is not None:
        fields = tuple(algorithm.field_shapes())
        warnings = (*warnings, *check_bounded_staleness(algorithm.accountant(0), algorithm.name, fields, network))
    return Run(spec, network, algorithm, warnings, build_clipping(spec, algorithm))


# ---- publication -----------------------------------------------------------------------------------------------------


class PublicationCoverage(StrEnum):
    """By what a model that leaves its owner is covered."""

    MESSAGES = "messages"
    """It follows from messages whose noise was charged."""
    DECISIONS = "decisions"
    """By a promise of its own, to whoever sees decisions and hears no message."""
    UNCOVERED = "nothing"


@dataclass(frozen=True, slots=True)
class Publication:
    """What a model costs whose owner hands it out.

    Attributes:
        cover: by what it is covered.
        epsilon: of an event, in all that is known then of the learner's run; infinite: nothing is promised.
        text: why, for people.
    """

    coverage: PublicationCoverage
    epsilon: float
    text: str

    @property
    def is_protected(self) -> bool:
        """Does any promise hold?"""
        return self.coverage is not PublicationCoverage.UNCOVERED


def assess_publication(
    run: Run, learner: int, rounds: int, spent: float | None = None, *, has_private_noise: bool = True
) -> Publication:
    """What it costs to hand out a learner's model.

    Args:
        run: that made it.
        learner: its index.
        rounds: that the model has learned from.
        spent: epsilon of its messages, by its meter; None: as planned.
        private: whether the noise was the operating system's; seeded and recorded noise protects nobody.
    """
    name = run.algorithm.name
    if not rounds:
        return Publication(
            PublicationCoverage.MESSAGES,
            0.0,
            "no record was learned: it is where learning starts, which everybody knows",
        )
    if not has_private_noise:
        return Publication(
            PublicationCoverage.UNCOVERED,
            math.inf,
            "its noise is from a seed or a recording, which protects nobody: no epsilon covers it",
        )
    there = run.participation(learner).intervals
    if there and there[0].stop < rounds:
        text = "its learner was away after it had learned, and goes on without noise then: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    if not isinstance(run.algorithm, PublicModelAlgorithm) or not run.algorithm.is_model_public(rounds):
        return _published(run, learner, rounds)
    if spent is None:
        spent = run.guarantee(learner).epsilon(rounds)
    if spent == math.inf or not _noisy(run, learner):
        text = f"the model of {name} follows from its messages, and these carry no noise: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    text = f"the model of {name} follows from messages that were charged: it costs nothing more"
    if run.algorithm.accountant(learner).has_shared_records:
        text += "; all learners hold the same records, so their epsilons add up"
    return Publication(PublicationCoverage.MESSAGES, spent, text)


def _published(run: Run, learner: int, rounds: int) -> Publication:
    """What is promised of decisions alone; mostly nothing."""
    name = run.algorithm.name
    alone = None if run.spec.is_unbounded else run.guarantee(learner).output_epsilon
    if alone is None:
        text = f"the model of {name} has learned from records in ways that no message shows: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    if heard := _heard(run.spec):
        text = f"{name} promises to whoever sees decisions and hears no message, and {heard}: no epsilon covers it"
        return Publication(PublicationCoverage.UNCOVERED, math.inf, text)
    text = f"{name} promises this to whoever sees decisions and hears no message; its messages carry no noise"
    return Publication(PublicationCoverage.DECISIONS, float(alone[min(rounds, len(alone)) - 1]), text)


def _heard(spec: RunSpec) -> str:
    return f"this run was captured (capture: {spec.capture})" if spec.capture in ("relay", "mirror") else ""


def _noisy(run: Run, learner: int) -> bool:
    """A meter is finite where messages have noise; that of a run that has sent none yet says nothing."""
    rounds = 2 if run.spec.is_unbounded else run.spec.rounds
    return math.isfinite(run.planned_epsilon(learner, min(rounds, 1000)))
