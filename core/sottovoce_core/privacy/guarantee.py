"""Privacy guarantee of one learner's messages, and the regularity of the loss that it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from sottovoce_core.arrays import FloatArray, summarize_fields
from sottovoce_core.decision_sets import DecisionSet
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.privacy.loss import Mechanism, PrivacyLoss
from sottovoce_core.table import Table

# ---- guarantee -------------------------------------------------------------------------------------------------------

WEAK_EPSILON = 10.0
"""Epsilon of a record above which a guarantee is weak, independent of an audit: "weak to no formal privacy" in the tiers of
Ponomareva et al. 2023 (How to DP-fy ML). At 10, up to 99.995 of 100 guesses between two records are right in the worst case."""


class ThreatModel(StrEnum):
    """View of the adversary."""

    WIRE = "wire"
    """Every message on every channel."""
    NEIGHBOUR = "neighbour"
    """The messages that one learner receives."""
    OUTPUT = "output"
    """The published decisions only."""


class Adjacency(StrEnum):
    """Privacy unit that is replaced between two adjacent worlds."""

    RECORD_USE = "record_use"
    """A record of a learner, in one use."""
    LEARNER = "learner"
    """All records of a learner: a whole fixed objective."""
    ROUND = "round"
    """The loss of one round, with all its records."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that a guarantee rests on, and what enforces it (clipping, scaling of rows, the decision set …)."""

    value: float
    enforcement: str


@dataclass(frozen=True, slots=True)
class GuaranteeBasis:
    """Assumptions and proof of a guarantee.

    Attributes:
        mode: name of the accounting.
        proof: source of the proof.
        constants: numbers that the proof uses, by name.
        threat_model: strongest adversary that the guarantee covers.
    """

    mode: str = "own"
    proof: str = "not stated"
    constants: Mapping[str, Constant] = field(default_factory=dict)
    threat_model: ThreatModel = ThreatModel.WIRE

    __repr__ = summarize_fields


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Privacy guarantee of one learner's messages, made by `accountant.compute_guarantee`.

    Attributes:
        mechanism: noise mechanism of a message.
        adjacency: privacy unit in which two adjacent worlds differ.
        has_shared_records: all learners hold the same records: the losses of all received learners add up.
        n_replaced: number of records (`Adjacency.ROUND`: losses of a round) that differ; None: one unit, the worst case.
        round_losses: `(rounds,)` privacy losses of the messages of rounds 0, 1, …; infinite without a guarantee.
        paper_epsilon: `(rounds,)` cumulative epsilon by the paper's formula.
        infinite_horizon_epsilon: bound on the cumulative epsilon over infinitely many rounds, or infinity.
        basis: assumptions and proof of the numbers.
        output_epsilon: `(rounds,)` cumulative epsilon against an adversary that sees all published decisions and no message,
            if that is a guarantee of its own; else None. It is never charged, because the messages are observed.
        renyi: `(orders,)` Renyi divergences of all planned messages together, for epsilon at a delta; None: not computed.
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
    renyi: FloatArray | None = None

    def __repr__(self) -> str:
        who = self.basis.threat_model.value
        return f"Guarantee: epsilon {self.epsilon():.4g} over {len(self.round_losses):,} rounds, threat model {who}"

    def _repr_html_(self) -> str:
        """Render the guarantee as a table, for notebooks."""
        facts = {
            "epsilon": self.epsilon(),
            "rounds": len(self.round_losses),
            "epsilon, any number of rounds": self.infinite_horizon_epsilon,
            "epsilon, paper": float(self.paper_epsilon[-1]) if len(self.paper_epsilon) else 0.0,
            "adjacent data sets": self.adjacency_description,
            "threat model": self.basis.threat_model.value,
            "accounting": self.basis.mode,
            "proof": self.basis.proof,
        }
        constants = {f"{name}, by {each.enforcement}": each.value for name, each in self.basis.constants.items()}
        return Table.from_facts({**facts, **constants})._repr_html_()

    @property
    def adjacency_description(self) -> str:
        """Description of two adjacent data sets, for people."""
        count = 1 if self.n_replaced is None else self.n_replaced
        if self.adjacency is Adjacency.ROUND:
            unit = "the loss of one round" if count == 1 else f"the losses of {count} rounds"
            owner = (
                "which every learner holds: epsilons of all learners add up"
                if self.has_shared_records
                else "of one learner"
            )
            return f"{unit} replaced, with all its records, {owner}"
        has_all_records = self.adjacency is Adjacency.LEARNER and self.n_replaced is None
        unit = "each record" if has_all_records else "one record" if count == 1 else f"each of {count} records"
        return f"one use of {unit} of one learner replaced (numbers of records are public)"

    @property
    def cumulative_epsilon(self) -> FloatArray:
        """`(rounds,)` epsilon after the messages of rounds 0..t."""
        return np.cumsum(self.round_losses)

    def truncate(self, end: int) -> Guarantee:
        """Return the guarantee of a learner that sends nothing from round `end` on."""
        if end >= len(self.round_losses):
            return self
        silent = np.arange(len(self.round_losses)) >= end
        truncated = replace(
            self,
            round_losses=np.where(silent, 0.0, self.round_losses),
            paper_epsilon=np.where(silent, self.paper_epsilon[end - 1] if end else 0.0, self.paper_epsilon),
            output_epsilon=None
            if self.output_epsilon is None
            else np.where(silent, self.output_epsilon[max(end - 1, 0)], self.output_epsilon),
        )
        return replace(truncated, infinite_horizon_epsilon=truncated.epsilon(), renyi=None)

    def epsilon(self, rounds: int | None = None, *, delta: float = 0.0) -> float:
        """Return the cumulative epsilon of the first `rounds` messages (default: all planned ones), summed exactly.

        Args:
            rounds: number of messages.
            delta: epsilon at this delta, of all planned messages; 0: pure epsilon.

        Raises:
            SpecError: delta is not at least 0 and below 1, or is given with `rounds`; or this guarantee has no Renyi divergences.
        """
        pure = math.fsum(self.round_losses[:rounds])
        if not delta:
            return pure
        if rounds is not None or self.renyi is None:
            raise SpecError(
                "epsilon at a delta is that of all planned messages, of a guarantee by Experiment.guarantee"
            )
        return PrivacyLoss(pure, self.renyi).epsilon(delta)


def combine_epsilons(epsilons: Iterable[float], *, has_shared_records: bool) -> float:
    """Return epsilon of one unit against an adversary that observes all learners: the largest, or the sum for shared records."""
    return math.fsum(epsilons) if has_shared_records else max(epsilons)


def compose_guarantees(guarantees: Sequence[Guarantee]) -> Guarantee:
    """Return the guarantee for one unit at each of these learners, against an adversary that observes them all: the sum.

    Given all earlier messages, learners draw their noise independently, so their losses add up.
    """
    if len(guarantees) == 1:
        return guarantees[0]
    outputs = [one.output_epsilon for one in guarantees if one.output_epsilon is not None]
    renyi = [one.renyi for one in guarantees if one.renyi is not None]
    return replace(
        guarantees[0],
        round_losses=np.sum([one.round_losses for one in guarantees], axis=0),
        paper_epsilon=np.max([one.paper_epsilon for one in guarantees], axis=0),
        infinite_horizon_epsilon=sum(one.infinite_horizon_epsilon for one in guarantees),
        output_epsilon=np.sum(outputs, axis=0) if outputs else None,
        renyi=np.sum(renyi, axis=0) if len(renyi) == len(guarantees) else None,
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
    """Constants of every record's loss `l`, without its exact ridge term `r/2 ||theta||^2`, on the decision set.

    Attributes:
        gradient_change: C, largest l2 distance between the gradients of two records at one theta.
        smoothness: L, Lipschitz constant of a record's gradient; infinite: unknown.
        clip_norm: G, bound on a record's gradient norm, from clipping or from the margin loss itself; infinite: none.
        ridge: r.
        diameter: largest l2 distance between two points of the decision set.
        is_convex: `l` is convex in theta.
        is_convex_when_clipped: clipped gradients are gradients of another convex function, as for margin losses `l(a.theta)`.
    """

    gradient_change: float
    smoothness: float
    clip_norm: float
    ridge: float
    diameter: float
    is_convex: bool
    is_convex_when_clipped: bool

    __repr__ = summarize_fields

    def __post_init__(self) -> None:
        for name in _CONSTANT_NAMES:
            value = getattr(self, name)
            if not value >= 0 or (name == "ridge" and value == math.inf):
                raise SpecError(f"{name} must be at least 0 (and a ridge finite), got {value}")

    @classmethod
    def from_loss(cls, loss: Loss, decision_set: DecisionSet, dim: int) -> Regularity:
        """Return the constants of a loss on a decision set."""
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
        """Gradient change C after clipping: two gradients of norm at most G differ by at most 2G."""
        return min(self.gradient_change, 2 * self.clip_norm)

    @property
    def can_use_convex_mode(self) -> bool:
        """Return whether mode `convex` applies. Clipped gradients are those of a convex function only for margin losses."""
        return (
            self.is_convex
            and self.smoothness < math.inf
            and (self.is_convex_when_clipped or self.clip_norm == math.inf)
        )

    def constants(self, own_weight: float | None = None) -> dict[str, Constant]:
        """Return every finite constant with what enforces it, and the learner's own weight if given."""
        values = {name: float(getattr(self, name)) for name in _CONSTANT_NAMES}
        if own_weight is not None:
            values["own_weight"] = own_weight
        return {name: Constant(value, _ENFORCED_BY[name]) for name, value in values.items() if value < math.inf}
