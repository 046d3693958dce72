"""The regularity of every record's loss on a decision set, and what makes it true: what accounting rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sottovoce.decision_sets import DecisionSet
from sottovoce.errors import SpecError
from sottovoce.losses import Loss
from sottovoce.privacy.guarantee import Constant

_ENFORCED_BY = {
    "grad_change": "the loss, on rows scaled to feature_bound (and labels clipped to label_bound), clipped to clip_norm",
    "smoothness": "the loss, on rows scaled to feature_bound",
    "clip_norm": "the loss, on rows scaled to feature_bound, and clipping where clip_norm is set",
    "ridge": "the loss, exactly",
    "diameter": "projection onto the decision set",
    "own_weight": "the learner, which refuses a topology whose weights add up to another value",
}


def regularity_of(loss: Loss, decision_set: DecisionSet, dim: int) -> Regularity:
    """What accounting needs to know of a loss on a decision set."""
    radius = decision_set.largest_norm(dim)
    return Regularity(
        grad_change=loss.gradient_change(radius),
        smoothness=loss.smoothness,
        clip_norm=loss.gradient_bound(radius),
        ridge=loss.ridge,
        diameter=decision_set.diameter(dim),
        convex=loss.convex,
        margin=loss.convex_clipped,
    )


_NUMBERS = ("grad_change", "smoothness", "clip_norm", "ridge", "diameter")


@dataclass(frozen=True, slots=True)
class Regularity:
    """What is known about every record's loss `l`, without its exact ridge term `r/2 ||theta||^2`, on the decision set.

    Attributes:
        grad_change: C, largest l2 distance between the gradients of two records at one theta.
        smoothness: L, Lipschitz constant of a record's gradient; infinite: unknown.
        clip_norm: G, bound on a record's gradient norm: by clipping, or for margin losses by nature; infinite: none.
        ridge: r.
        diameter: largest l2 distance between two points of the decision set.
        convex: whether `l` is convex in theta.
        margin: whether `l` is a function of `a.theta`. If so, clipped gradients of a convex `l` are those of another.
    """

    grad_change: float
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

    @property
    def change(self) -> float:
        """C after clipping: two gradients of norm at most G differ by at most 2G."""
        return min(self.grad_change, 2 * self.clip_norm)

    @property
    def convex_step(self) -> bool:
        """Does mode `convex` apply? Clipped gradients are those of a convex function only for margin losses."""
        return self.convex and self.smoothness < math.inf and (self.margin or self.clip_norm == math.inf)

    def constants(self, own_weight: float | None = None) -> dict[str, Constant]:
        """Every finite number with what enforces it; with the learner's own weight, where that matters."""
        values = {name: float(getattr(self, name)) for name in _NUMBERS}
        if own_weight is not None:
            values["own_weight"] = own_weight
        return {name: Constant(value, _ENFORCED_BY[name]) for name, value in values.items() if value < math.inf}
