"""What a run gives to its algorithm: public values that are fixed before the first round, and the parameters of a spec."""

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
    """Every learner's number times its factor; one number where all are equal.

    Raises:
        SpecError: a list of another length than `factors`.
    """
    products = tuple(
        each * factor for each, factor in zip(broadcast_to_learners(value, len(factors)), factors, strict=True)
    )
    return products[0] if len(set(products)) == 1 else products


def divide_per_learner(value: PerLearner, factors: tuple[float, ...]) -> PerLearner:
    """As `times`, divided: for what a loss is, not a noise."""
    return multiply_per_learner(value, tuple(1.0 / factor for factor in factors))


def broadcast_to_learners(value: PerLearner, n_learners: int, field: str = "") -> tuple[float, ...]:
    """One number for all learners, or one each, as a tuple.

    Raises:
        SpecError: a list of another length than the number of learners; it names the field.
    """
    values = value if isinstance(value, tuple) else (value,) * n_learners
    if len(values) != n_learners:
        place = f"{field}: " if field else ""
        raise SpecError(f"{place}a list must have one number per learner ({n_learners}), got {len(values)}")
    return values


# ---- setting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A condition that voids a theorem without making the run unsafe: the run goes on, and its user is told.

    Attributes:
        code: its name in the docs.
        text: the condition, the value found, and which theorem does not apply.
    """

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RunContext:
    """The surroundings of an algorithm.

    Attributes:
        rounds: planned; `UNBOUNDED_ROUNDS`: no end is.
        n_features: features of a record.
        loss: of one record.
        decision_set: where parameters may lie.
        network: who hears whom, with which weights.
        names: of the learners, by index, for what is told of one; empty: nobody has said.
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
            text = "this algorithm needs all learners in all rounds, got offline_intervals: leave them out"
            raise AssumptionViolated("TOPOLOGY_FIXED", text)
        return self.full_fixed_network

    @property
    def full_fixed_network(self) -> FixedNetwork:
        """The same where some learners may be away: the network of all of them.

        Raises:
            AssumptionViolated: TOPOLOGY_FIXED.
        """
        whole = self.network.full_network if isinstance(self.network, PartialNetwork) else self.network
        if isinstance(whole, FixedNetwork):
            return whole
        raise AssumptionViolated(
            "TOPOLOGY_FIXED",
            "this algorithm needs one undirected graph with symmetric weights for all rounds, got a network that changes, is "
            "directed, or has in_degree or out_degree weights; give topology.graph, undirected, with other weights",
        )

    def require_finite_rounds(self, subject: str) -> None:
        """Refuse a run without a planned end.

        Args:
            what: needs one.

        Raises:
            AssumptionViolated: FINITE_ROUNDS.
        """
        if self.rounds >= UNBOUNDED_ROUNDS:
            raise AssumptionViolated(
                "FINITE_ROUNDS", f"{subject} needs a number of rounds, got rounds: null; give one, or another algorithm"
            )

    def broadcast_to_learners(self, value: PerLearner, field: str) -> tuple[float, ...]:
        """`value` as one number per learner.

        Args:
            value: one number, or one per learner.
            field: as a spec names it, for the error.

        Raises:
            SpecError: a list of another length than the number of learners.
        """
        return broadcast_to_learners(value, self.n_learners, field)


# ---- noise range -----------------------------------------------------------------------------------------------------


def require_scales(scales: Iterable[float], code: str = "NOISE_SCALE") -> None:
    """Refuse noise that would not be drawn as it is charged.

    A scale that overflows would be charged as infinite noise, and one that underflows drawn as none.

    Args:
        scales: of all planned rounds, or the smallest and the largest; 0: no noise, and no promise.
        code: what the condition is called.

    Raises:
        AssumptionViolated: one of them lies outside the range, or is not a number.
    """
    text = f"the noise scale must stay within [{MIN_NOISE_SCALE:.0e}, {MAX_NOISE_SCALE:.0e}] in all rounds"
    for scale in scales:
        require(scale == 0.0 or MIN_NOISE_SCALE <= scale <= MAX_NOISE_SCALE, code, f"{text}, or be 0, got {scale:.3g}")


# ---- parameters ------------------------------------------------------------------------------------------------------


class AlgorithmSpec(Section):
    """The parameters of an algorithm. Each has its own class, beside the algorithm: see `sottovoce_core.algorithms`."""

    name: str
    """Of a built-in algorithm, of one that an installed package offers, or `module:Class`."""

    def build(self, context: RunContext) -> tuple[Algorithm[Any], tuple[RunWarning, ...]]:
        """The algorithm in its surroundings, checked; and the conditions that only void a theorem.

        Raises:
            SpecError: a parameter does not fit the surroundings.
            AssumptionViolated: a condition does not hold without which there is no guarantee.
        """
        raise NotImplementedError

    has_shared_noise_scale: ClassVar[bool] = False
    """Do all learners share one number for their noise?"""

    def scale_noise(self, factors: tuple[float, ...]) -> AlgorithmSpec:
        """The same with every learner's noise multiplied: by `factors`, one for each.

        Raises:
            SpecError: there is no noise, or no way to scale it.
        """
        raise SpecError("this algorithm's noise cannot be calibrated: its class of parameters has no method `noisier`")
