"""Any PyTorch module as a loss: cross-entropy of its class scores, with every record's gradient clipped.

Only clipping bounds a network's loss: a record's gradient has norm at most `G = clip_norm`, which is required, two differ
by at most `C = 2G`, and there is no smoothness constant. Clipping is computed outside the network, in float64
(`torch_module`). The network sees one record at a time, so no record can change the contribution of another.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from sottovoce_core.arrays import Batch, FloatArray, as_floats
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.losses.loss import Loss, scale_rows
from sottovoce_core.optional import format_install_hint
from sottovoce_core.registry import Count, NonNegative, Positive, require_imports_allowed

if TYPE_CHECKING:
    from sottovoce_core.losses.torch_module import TorchModule


class TorchLoss(Loss):
    """Cross-entropy of a module's scores of the classes 0, 1, ..., `classes - 1`. Needs the extra `torch`."""

    kind: Literal["torch"] = "torch"
    classes: Annotated[int, Field(ge=2, le=2**53)] = 10
    """Labels are the numbers 0 to classes - 1, and the module gives each a score."""
    module: str
    """`mnist-cnn`, `cifar-cnn`, or `package.module:Class` of your own: a subclass of `torch.nn.Module`."""
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults
    """Keyword arguments of the class."""
    shape: tuple[Count, ...] | None = None
    """Shape of a record as input of the module, without the batch axis (default: that of a built-in module)."""
    seed: NonNegativeInt = 0
    """Public seed of the start parameters. Not for noise."""
    dtype: Literal["float64", "float32"] = "float64"
    """Number type in which the module computes."""
    ridge: NonNegative = 0.0
    feature_bound: Positive = 1e6
    """Bound against overflow only: gradients are bounded by `clip_norm`, which is required."""

    has_binary_labels: ClassVar[bool] = False
    has_slow_gradient: ClassVar[bool] = True

    @field_validator("module")
    @classmethod
    def _require_importable(cls, name: str, info: ValidationInfo) -> str:
        try:
            require_imports_allowed(name, allow_imports=":" not in name or (info.context or {}).get("imports", True))
        except SpecError as error:
            raise PydanticCustomError("kind", "{text}", {"text": str(error)}) from None
        return name

    @property
    def n_classes(self) -> int | None:
        return self.classes

    @cached_property
    def loaded_module(self) -> TorchModule:
        """The PyTorch module, made on first use because PyTorch takes seconds to import.

        Raises:
            AssumptionViolated: GRAD_CHANGE, without `clip_norm`.
            SpecError: PyTorch is missing, or the module cannot be used.
        """
        if self.clip_norm is None:
            text = "only clipping bounds the gradient of a network: set loss.clip_norm to a positive number"
            raise AssumptionViolated("GRAD_CHANGE", f"{text}, got none")
        try:
            from sottovoce_core.losses.torch_module import make_module
        except ModuleNotFoundError:
            raise SpecError(f"loss.kind: torch needs PyTorch: {format_install_hint('torch')}") from None
        return make_module(self.module, self.options, self.shape, self.classes, self.dtype, self.seed)

    def dim(self, n_features: int) -> int:
        """Return the number of trainable parameters.

        Raises:
            SpecError: a record has another number of features than `shape`; or as `loaded_module`.
        """
        if n_features != math.prod(self.loaded_module.shape):
            text = f"the product of loss.shape must be the {n_features} features of a record"
            got = f"got {list(self.loaded_module.shape)} with product {math.prod(self.loaded_module.shape)}"
            raise SpecError(f"{text} (data.intercept: true appends one), {got}")
        return self.loaded_module.dim

    def initial_parameters(self, dim: int) -> FloatArray:
        return self.loaded_module.initial_parameters

    def enforce_bounds(self, features: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scale_rows(features, self.feature_bound), np.clip(np.rint(labels), 0.0, self.classes - 1.0)

    def gradient_sum(self, theta: FloatArray, batch: Batch) -> FloatArray:
        return self.loaded_module.gradient_sum(theta, batch, self.clip_threshold)

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        return self.loaded_module.values(theta, batch)

    def gradient_bound(self, radius: float) -> float:
        return self.clip_threshold

    def predict(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        return self.loaded_module.scores(theta, scale_rows(features, self.feature_bound))

    def classify(self, scores: FloatArray) -> FloatArray:
        return as_floats(scores.argmax(axis=-1))
