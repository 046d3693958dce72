"""Public values of a run that its algorithm depends on, fixed before the first round, and the base class of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from sottovoce_core.algorithms.interface import Algorithm
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.errors import AssumptionViolated, SpecError, require
from sottovoce_core.losses import Loss
from sottovoce_core.network.network import Network, PartialNetwork
from sottovoce_core.network.topology import FixedNetwork
from sottovoce_core.noise import MAX_NOISE_SCALE, MIN_NOISE_SCALE
from sottovoce_core.registry import UNBOUNDED_ROUNDS, Section

# ---- per learner -----------------------------------------------------------------------------------------------------

PerLearner = float | tuple[float, ...]
"""One number for all learners, or a list with one number each."""


def multiply_per_learner(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """Multiply every learner's number by its factor; return one number if all products are equal.

    Raises:
        SpecError: the list has another length than `factors`.
    """
    products = tuple(
        each * factor for each, factor in zip(broadcast_to_learners(value, len(factors)), factors, strict=True)
    )
    return products[0] if len(set(products)) == 1 else products


def divide_per_learner(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """Divide every learner's number by its factor, for privacy losses, which fall as noise grows."""
    return multiply_per_learner(value, tuple(1.0 / factor for factor in factors))


def broadcast_to_learners(value: PerLearner, n_learners: int, field: str = "") -> tuple[float, ...]:
    """Return one number per learner, as a tuple.

    Raises:
        SpecError: the list has another length than the number of learners; the error names the field.
    """
    values = value if isinstance(value, tuple) else (value,) * n_learners
    if len(values) != n_learners:
        place = f"{field}: " if field else ""
        raise SpecError(f"{place}a list must have one number per learner ({n_learners}), got {len(values)}")
    return values


# ---- context ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunWarning:
    """Warning about a condition that voids a theorem but not the privacy guarantee: the run continues.

    Attributes:
        code: name of the condition in the docs.
        text: the condition, the value found, and the theorem that does not apply.
    """

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RunContext:
    """Public values of a run that its algorithm is built from.

    Attributes:
        rounds: planned rounds; `UNBOUNDED_ROUNDS`: no planned end.
        n_features: number of features of a record.
        loss: loss of one record.
        decision_set: set of admissible parameters.
        network: senders, receivers and weights by round.
        names: names of the learners by index, for messages to the user; empty: unknown.
    """

    rounds: int
    n_features: int
    loss: Loss
    decision_set: DecisionSet
    network: Network
    names: tuple[str, ...] = ()

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return self.network.n_learners

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.loss.dim(self.n_features)

    @property
    def fixed_network(self) -> FixedNetwork:
        """The network as one fixed undirected graph with symmetric weights.

        Raises:
            AssumptionViolated: TOPOLOGY_FIXED.
        """
        if isinstance(self.network, PartialNetwork):
            text = "this algorithm needs all learners in all rounds, got offline_intervals: remove them"
            raise AssumptionViolated("TOPOLOGY_FIXED", text)
        return self.full_fixed_network

    @property
    def full_fixed_network(self) -> FixedNetwork:
        """Fixed network of all learners, in a run where some may be offline in some rounds.

        Raises:
            AssumptionViolated: TOPOLOGY_FIXED.
        """
        full = self.network.full_network if isinstance(self.network, PartialNetwork) else self.network
        if isinstance(full, FixedNetwork):
            return full
        raise AssumptionViolated(
            "TOPOLOGY_FIXED",
            "this algorithm needs one undirected graph with symmetric weights for all rounds, got a network that changes, is "
            "directed, or has in_degree or out_degree weights; give topology.graph, undirected, with other weights",
        )

    def require_finite_rounds(self, subject: str) -> None:
        """Raise an error for a run without a planned end.

        Args:
            subject: what needs one.

        Raises:
            AssumptionViolated: FINITE_ROUNDS.
        """
        if self.rounds >= UNBOUNDED_ROUNDS:
            raise AssumptionViolated(
                "FINITE_ROUNDS", f"{subject} needs a number of rounds, got rounds: null; give one, or another algorithm"
            )

    def broadcast_to_learners(self, value: PerLearner, field: str) -> tuple[float, ...]:
        """Return `value` as one number per learner.

        Args:
            value: one number, or one per learner.
            field: field name in the spec, for the error.

        Raises:
            SpecError: the list has another length than the number of learners.
        """
        return broadcast_to_learners(value, self.n_learners, field)


# ---- noise range -----------------------------------------------------------------------------------------------------


def require_scales(scales: Iterable[float], code: str = "NOISE_SCALE") -> None:
    """Raise an error for noise whose drawn scale would differ from the charged one.

    A scale that overflows would be charged as infinite noise, and one that underflows would be drawn as no noise.

    Args:
        scales: scales of all planned rounds, or the smallest and the largest; 0: no noise and no guarantee.
        code: condition code of the error.

    Raises:
        AssumptionViolated: a scale is outside the range, or NaN.
    """
    text = f"the noise scale must stay within [{MIN_NOISE_SCALE:.0e}, {MAX_NOISE_SCALE:.0e}] in all rounds"
    for scale in scales:
        require(scale == 0.0 or MIN_NOISE_SCALE <= scale <= MAX_NOISE_SCALE, code, f"{text}, or be 0, got {scale:.3g}")


# ---- parameters ------------------------------------------------------------------------------------------------------


class AlgorithmSpec(Section):
    """Parameters of an algorithm. Each algorithm has its own subclass: see `sottovoce_core.algorithms`."""

    name: str
    """Name of a built-in algorithm, of one that an installed package offers, or `module:Class`."""

    def build(self, context: RunContext) -> tuple[Algorithm[Any], tuple[RunWarning, ...]]:
        """Build the algorithm for a run and check it; also return warnings about conditions that only void a theorem.

        Raises:
            SpecError: a parameter does not fit the run.
            AssumptionViolated: a condition of the guarantee does not hold.
        """
        raise NotImplementedError

    has_shared_noise_scale: ClassVar[bool] = False
    """True if all learners share one noise scale."""

    def scale_noise(self, factors: tuple[float, ...]) -> AlgorithmSpec:
        """Return the parameters with every learner's noise multiplied by its factor.

        Raises:
            SpecError: there is no noise, or it cannot be scaled.
        """
        raise SpecError(
            "this algorithm's noise cannot be calibrated: its class of parameters has no method `scale_noise`"
        )
