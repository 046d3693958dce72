"""Losses as a spec names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from sottovoce.registry import Positive, Section, shorthand


class LossSpec(Section):
    """The loss of one record: what every kind has. Each kind has its own class."""

    kind: Literal["logistic", "ridge", "least_squares", "hinge", "smoothed_hinge", "softmax", "torch"] = "logistic"
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Coefficient r of the exact term r*theta in every gradient."""
    feature_bound: Positive = 1.0
    """Every row is scaled to at most this l2 norm, row by row, before use."""
    clip_norm: Positive | None = None
    """Clip every record's data gradient to this l2 norm (None: no clipping)."""


class LogisticSpec(LossSpec):
    """Cross-entropy of two classes."""

    kind: Literal["logistic"] = "logistic"
    history: Literal["exact", "pass_glm"] = "exact"
    """pass_glm: learn the loss's quadratic approximation, whose history takes constant time and memory."""
    score_bound: Positive | None = None
    """pass_glm only: the approximation is close where scores lie in [-score_bound, score_bound]."""

    @model_validator(mode="after")
    def _bound_when_approximate(self) -> LogisticSpec:
        if (self.history == "pass_glm") != (self.score_bound is not None):
            raise ValueError("score_bound must be given with history pass_glm, and only there")
        if self.history == "pass_glm" and self.clip_norm is not None:
            raise ValueError("clip_norm must not be given with history pass_glm: to clip, one needs the records")
        return self


class SquaredSpec(LossSpec):
    """Squared error, with either default of the ridge."""

    label_bound: Positive = 1.0
    """Labels are clipped to [-label_bound, label_bound]."""


class RidgeSpec(SquaredSpec):
    """Squared error, by default with a ridge."""

    kind: Literal["ridge"] = "ridge"


class LeastSquaresSpec(SquaredSpec):
    """Squared error, by default without ridge."""

    kind: Literal["least_squares"] = "least_squares"
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class HingeSpec(LossSpec):
    """The support vector machine's loss of two classes. It is not smooth."""

    kind: Literal["hinge"] = "hinge"


class SmoothedHingeSpec(LossSpec):
    """The hinge with a rounded corner."""

    kind: Literal["smoothed_hinge"] = "smoothed_hinge"
    width: Positive = 1.0
    """Of the corner, in units of the score: the smoothness is feature_bound^2 / width."""


class ManyClassesSpec(LossSpec):
    """Cross-entropy of many classes."""

    classes: Annotated[int, Field(ge=2)]
    """Labels are the numbers 0 to classes - 1."""


class SoftmaxSpec(ManyClassesSpec):
    """Linear scores: one parameter for each class and feature."""

    kind: Literal["softmax"] = "softmax"


class TorchLossSpec(ManyClassesSpec):
    """The scores of any PyTorch module. Needs the extra `torch`."""

    kind: Literal["torch"] = "torch"
    classes: Annotated[int, Field(ge=2)] = 10
    """Labels are the numbers 0 to classes - 1, and the module gives each a score."""
    module: str
    """`mnist-cnn`, `cifar-cnn`, or `package.module:Class` of your own: a subclass of `torch.nn.Module`."""
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults
    """Keyword arguments of the class."""
    shape: tuple[PositiveInt, ...] | None = None
    """Of a record as the module takes it, without the batch (default: that of a built-in module)."""
    seed: NonNegativeInt = 0
    """For the parameters that learning starts from: public. Not for noise."""
    dtype: Literal["float64", "float32"] = "float64"
    """In which the module computes."""
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    feature_bound: Positive = 1e6
    """Guards against overflow: what bounds a gradient is `clip_norm`, which a module must have."""


_LOSSES: dict[str, type[LossSpec]] = {
    each.model_fields["kind"].default: each
    for each in (LogisticSpec, RidgeSpec, LeastSquaresSpec, HingeSpec, SmoothedHingeSpec, SoftmaxSpec, TorchLossSpec)
}


def _loss_of_kind(value: object) -> object:
    """The section `loss` by the class of its kind, logistic by default; other kinds are refused by `LossSpec`."""
    value = shorthand(value)
    if not isinstance(value, Mapping):
        return value
    return _LOSSES.get(str(value.get("kind", "logistic")), LossSpec).model_validate(value)


AnyLossSpec = Annotated[
    LogisticSpec | RidgeSpec | LeastSquaresSpec | HingeSpec | SmoothedHingeSpec | SoftmaxSpec | TorchLossSpec,
    Field(discriminator="kind"),
    BeforeValidator(_loss_of_kind),
]
