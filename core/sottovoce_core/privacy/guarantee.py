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


class Event(StrEnum):
    """What is replaced between two adjacent worlds."""

    RECORD = "record"
    """One record of a learner, in one use."""
    LEARNER = "learner"
    """All records of a learner: a whole fixed objective."""
    ROUND = "round"
    """The loss of one round, with all its records."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that a guarantee rests on, and what makes it true (clipping, scaling of rows, the decision set …)."""

    value: float
    enforced_by: str


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
    event: Event
    shared: bool
    replaced: int | None
    per_round: FloatArray
    paper: FloatArray
    infinite_horizon: float
    grounds: GuaranteeBasis
    output: FloatArray | None = None

    @property
    def adjacency(self) -> str:
        """Which two data sets must look alike, for a reader."""
        many = 1 if self.replaced is None else self.replaced
        if self.event is Event.ROUND:
            what = "the loss of one round" if many == 1 else f"the losses of {many} rounds"
            whose = "which every learner holds: epsilons of all learners add up" if self.shared else "of one learner"
            return f"{what} replaced, with all its records, {whose}"
        everything = self.event is Event.LEARNER and self.replaced is None
        what = "all records" if everything else f"{many} record{'s' * (many != 1)}"
        return f"{what} of one learner replaced (event level, numbers of records public)"

    @property
    def cumulative_epsilon(self) -> FloatArray:
        """`(rounds,)` epsilon after the messages of rounds 0..t."""
        return np.cumsum(self.per_round)

    def until(self, last: int) -> Guarantee:
        """The same for who says nothing from round `last` on."""
        if last >= len(self.per_round):
            return self
        silent = np.arange(len(self.per_round)) >= last
        promised = replace(
            self,
            per_round=np.where(silent, 0.0, self.per_round),
            paper=np.where(silent, self.paper[last - 1] if last else 0.0, self.paper),
            output=None if self.output is None else np.where(silent, self.output[max(last - 1, 0)], self.output),
        )
        return replace(promised, infinite_horizon=promised.epsilon())

    def epsilon(self, rounds: int | None = None) -> float:
        """Cumulative epsilon of the first `rounds` messages (all planned ones by default), summed exactly."""
        return math.fsum(self.per_round[:rounds])


def combine_epsilons(epsilons: Iterable[float], *, shared: bool) -> float:
    """Epsilon of one event for who hears all learners: the largest of theirs, or the sum where an event is everybody's."""
    return math.fsum(epsilons) if shared else max(epsilons)


def compose_guarantees(each: Sequence[Guarantee]) -> Guarantee:
    """What is promised to somebody who hears all of these learners about an event at every one of them: the sum.

    Given everything said before, learners draw their noise independently, so their losses add up.
    """
    if len(each) == 1:
        return each[0]
    outputs = [one.output for one in each if one.output is not None]
    return replace(
        each[0],
        per_round=np.sum([one.per_round for one in each], axis=0),
        paper=np.max([one.paper for one in each], axis=0),
        infinite_horizon=sum(one.infinite_horizon for one in each),
        output=np.sum(outputs, axis=0) if outputs else None,
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


_NUMBERS = ("gradient_change", "smoothness", "clip_norm", "ridge", "diameter")


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
    convex: bool
    margin: bool

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not value >= 0 or (name == "ridge" and value == math.inf):
                raise SpecError(f"{name} must be at least 0 (and a ridge finite), got {value}")

    @classmethod
    def of(cls, loss: Loss, decision_set: DecisionSet, dim: int) -> Regularity:
        """What accounting needs to know of a loss on a decision set."""
        radius = decision_set.largest_norm(dim)
        return cls(
            gradient_change=loss.gradient_change(radius),
            smoothness=loss.smoothness,
            clip_norm=loss.gradient_bound(radius),
            ridge=loss.ridge,
            diameter=decision_set.diameter(dim),
            convex=loss.convex,
            margin=loss.is_convex_when_clipped,
        )

    @property
    def change(self) -> float:
        """C after clipping: two gradients of norm at most G differ by at most 2G."""
        return min(self.gradient_change, 2 * self.clip_norm)

    @property
    def can_use_convex_mode(self) -> bool:
        """Does mode `convex` apply? Clipped gradients are those of a convex function only for margin losses."""
        return self.convex and self.smoothness < math.inf and (self.margin or self.clip_norm == math.inf)

    def constants(self, own_weight: float | None = None) -> dict[str, Constant]:
        """Every finite number with what enforces it; with the learner's own weight, where that matters."""
        values = {name: float(getattr(self, name)) for name in _NUMBERS}
        if own_weight is not None:
            values["own_weight"] = own_weight
        return {name: Constant(value, _ENFORCED_BY[name]) for name, value in values.items() if value < math.inf}
