"""What is promised about one learner's messages, and the regularity of losses that a promise rests on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss

# ---- guarantee -------------------------------------------------------------------------------------------------------

WEAK_EPSILON = 10.0
"""Epsilon of a record above which a promise is weak, whatever an audit finds: "weak to no formal privacy" in the tiers of
Ponomareva et al. 2023 (How to DP-fy ML). At 10, the worst case lets 99.995 of 100 guesses between two records be right."""


class ThreatModel(StrEnum):
    """Who is listening."""

    WIRE = "wire"
    """Every message on every channel."""
    NEIGHBOUR = "neighbour"
    """The messages that reach one learner."""
    OUTPUT = "output"
    """The published decisions only."""


class Mechanism(StrEnum):
    """Which pair of laws dominates one message: the worst case that composition may put in its place.

    It also says in which currency losses add up: both of these in pure epsilon.
    """

    LAPLACE = "laplace"
    """One Laplace number: for messages with independent Laplace noise on their coordinates, of loss l1 sensitivity over scale."""
    PURE = "pure"
    """Randomised response: any message of this pure epsilon."""


class Adjacency(StrEnum):
    """What is replaced between two adjacent worlds."""

    RECORD_USE = "record_use"
    """One record of a learner, in one use."""
    LEARNER = "learner"
    """All records of a learner: a whole fixed objective."""
    ROUND = "round"
    """The loss of one round, with all its records."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that a guarantee rests on, and what makes it true (clipping, scaling of rows, the decision set …)."""

    value: float
    enforcement: str


@dataclass(frozen=True, slots=True)
class GuaranteeBasis:
    """What the numbers of a guarantee rest on.

    Attributes:
        mode: name of the accounting.
        proof: where the proof stands.
        constants: numbers that the proof uses, by name.
        threat_model: who may listen without the promise being void.
    """

    mode: str = "own"
    proof: str = "not stated"
    constants: Mapping[str, Constant] = field(default_factory=dict)
    threat_model: ThreatModel = ThreatModel.WIRE


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A promise about one learner's messages; `accountant.guarantee` makes it.

    Attributes:
        mechanism: what dominates a message.
        event: what two adjacent worlds differ in.
        shared: an event is every learner's, because all hold the same records: who hears all of them adds their losses up.
        replaced: how many records (`Event.ROUND`: losses of a round) differ; None: one event, the dearest.
        per_round: `(rounds,)` privacy losses of the messages of rounds 0, 1, …; infinite where nothing is promised.
        paper: `(rounds,)` cumulative epsilon by the paper's own formula.
        infinite_horizon: a bound on the cumulative epsilon over infinitely many rounds, or infinity.
        grounds: what the numbers rest on.
        output: `(rounds,)` cumulative epsilon against somebody who sees all published decisions and no message, where that
            is a promise of its own; None: nothing is said of published decisions. Never what a learner is charged: its
            messages are heard.
    """

    mechanism: Mechanism
    adjacency: Adjacency
    has_shared_records: bool
    n_replaced: int | None
    round_losses: FloatArray
    paper_epsilon: FloatArray
    infinite_horizon_epsilon: float
    basis: GuaranteeBasis
    output_epsilon: FloatArray | None = None

    @property
    def adjacency_description(self) -> str:
        """Which two data sets must look alike, for a reader."""
        many = 1 if self.n_replaced is None else self.n_replaced
        if self.adjacency is Adjacency.ROUND:
            what = "the loss of one round" if many == 1 else f"the losses of {many} rounds"
            whose = (
                "which every learner holds: epsilons of all learners add up"
                if self.has_shared_records
                else "of one learner"
            )
            return f"{what} replaced, with all its records, {whose}"
        everything = self.adjacency is Adjacency.LEARNER and self.n_replaced is None
        what = "all records" if everything else f"{many} record{'s' * (many != 1)}"
        return f"{what} of one learner replaced (event level, numbers of records public)"

    @property
    def cumulative_epsilon(self) -> FloatArray:
        """`(rounds,)` epsilon after the messages of rounds 0..t."""
        return np.cumsum(self.round_losses)

    def truncate(self, end: int) -> Guarantee:
        """The same for who says nothing from round `last` on."""
        if end >= len(self.round_losses):
            return self
        silent = np.arange(len(self.round_losses)) >= end
        promised = replace(
            self,
            round_losses=np.where(silent, 0.0, self.round_losses),
            paper_epsilon=np.where(silent, self.paper_epsilon[end - 1] if end else 0.0, self.paper_epsilon),
            output_epsilon=None
            if self.output_epsilon is None
            else np.where(silent, self.output_epsilon[max(end - 1, 0)], self.output_epsilon),
        )
        return replace(promised, infinite_horizon_epsilon=promised.epsilon())

    def epsilon(self, rounds: int | None = None) -> float:
        """Cumulative epsilon of the first `rounds` messages (all planned ones by default), summed exactly."""
        return math.fsum(self.round_losses[:rounds])


def combine_epsilons(epsilons: Iterable[float], *, has_shared_records: bool) -> float:
    """Epsilon of one event for who hears all learners: the largest of theirs, or the sum where an event is everybody's."""
    return math.fsum(epsilons) if has_shared_records else max(epsilons)


def compose_guarantees(guarantees: Sequence[Guarantee]) -> Guarantee:
    """What is promised to somebody who hears all of these learners about an event at every one of them: the sum.

    Given everything said before, learners draw their noise independently, so their losses add up.
    """
    if len(guarantees) == 1:
        return guarantees[0]
    outputs = [one.output_epsilon for one in guarantees if one.output_epsilon is not None]
    return replace(
        guarantees[0],
        round_losses=np.sum([one.round_losses for one in guarantees], axis=0),
        paper_epsilon=np.max([one.paper_epsilon for one in guarantees], axis=0),
        infinite_horizon_epsilon=sum(one.infinite_horizon_epsilon for one in guarantees),
        output_epsilon=np.sum(outputs, axis=0) if outputs else None,
    )


# ---- regularity ------------------------------------------------------------------------------------------------------

_ENFORCED_BY = {
    "gradient_change": "the loss, on rows scaled to feature_bound (and labels clipped to label_bound), clipped to clip_norm",
    "smoothness": "the loss, on rows scaled to feature_bound",
    "clip_norm": "the loss, on rows scaled to feature_bound, and clipping where clip_norm is set",
    "ridge": "the loss, exactly",
    "diameter": "projection onto the decision set",
    "own_weight": "the learner, which refuses a topology whose weights add up to another value",
}


_CONSTANT_NAMES = ("gradient_change", "smoothness", "clip_norm", "ridge", "diameter")


@dataclass(frozen=True, slots=True)
class Regularity:
    """What is known about every record's loss `l`, without its exact ridge term `r/2 ||theta||^2`, on the decision set.

    Attributes:
        gradient_change: C, largest l2 distance between the gradients of two records at one theta.
        smoothness: L, Lipschitz constant of a record's gradient; infinite: unknown.
        clip_norm: G, bound on a record's gradient norm: by clipping, or for margin losses by nature; infinite: none.
        ridge: r.
        diameter: largest l2 distance between two points of the decision set.
        convex: whether `l` is convex in theta.
        margin: whether `l` is a function of `a.theta`. If so, clipped gradients of a convex `l` are those of another.
    """

    gradient_change: float
    smoothness: float
    clip_norm: float
    ridge: float
    diameter: float
    is_convex: bool
    is_convex_when_clipped: bool

    def __post_init__(self) -> None:
        for name in _CONSTANT_NAMES:
            value = getattr(self, name)
            if not value >= 0 or (name == "ridge" and value == math.inf):
                raise SpecError(f"{name} must be at least 0 (and a ridge finite), got {value}")

    @classmethod
    def from_loss(cls, loss: Loss, decision_set: DecisionSet, dim: int) -> Regularity:
        """What accounting needs to know of a loss on a decision set."""
        radius = decision_set.largest_norm(dim)
        return cls(
            gradient_change=loss.gradient_change(radius),
            smoothness=loss.smoothness,
            clip_norm=loss.gradient_bound(radius),
            ridge=loss.ridge,
            diameter=decision_set.diameter(dim),
            is_convex=loss.is_convex,
            is_convex_when_clipped=loss.is_convex_when_clipped,
        )

    @property
    def clipped_gradient_change(self) -> float:
        """C after clipping: two gradients of norm at most G differ by at most 2G."""
        return min(self.gradient_change, 2 * self.clip_norm)

    @property
    def can_use_convex_mode(self) -> bool:
        """Does mode `convex` apply? Clipped gradients are those of a convex function only for margin losses."""
        return (
            self.is_convex
            and self.smoothness < math.inf
            and (self.is_convex_when_clipped or self.clip_norm == math.inf)
        )

    def constants(self, own_weight: float | None = None) -> dict[str, Constant]:
        """Every finite number with what enforces it; with the learner's own weight, where that matters."""
        values = {name: float(getattr(self, name)) for name in _CONSTANT_NAMES}
        if own_weight is not None:
            values["own_weight"] = own_weight
        return {name: Constant(value, _ENFORCED_BY[name]) for name, value in values.items() if value < math.inf}
