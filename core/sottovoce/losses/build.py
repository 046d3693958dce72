"""From a spec to its loss."""

from __future__ import annotations

import math

from sottovoce.errors import SpecError
from sottovoce.losses.loss import Loss
from sottovoce.losses.margin import Hinge, Logistic, SmoothedHinge
from sottovoce.losses.quadratic import PassGlm, Squared
from sottovoce.losses.softmax import Softmax
from sottovoce.losses.specs import (
    HingeSpec,
    LogisticSpec,
    LossSpec,
    SmoothedHingeSpec,
    SoftmaxSpec,
    SquaredSpec,
    TorchLossSpec,
)

# ---- labels 0 and 1 --------------------------------------------------------------------------------------------------


# ---- quadratic in theta ----------------------------------------------------------------------------------------------


# ---- many classes ----------------------------------------------------------------------------------------------------


def build_loss(spec: LossSpec) -> Loss:
    """The loss that a spec names.

    Raises:
        SpecError: a PyTorch module that cannot be used (`torch_loss.build_torch_loss`).
    """
    common = (spec.feature_bound, spec.ridge, math.inf if spec.clip_norm is None else spec.clip_norm)
    match spec:
        case SquaredSpec():
            return Squared(*common, spec.label_bound)
        case HingeSpec():
            return Hinge(*common)
        case SmoothedHingeSpec():
            return SmoothedHinge(*common, spec.width)
        case SoftmaxSpec():
            return Softmax(*common, spec.classes)
        case TorchLossSpec():
            return _torch_loss(spec)
        case LogisticSpec(score_bound=float(bound)):
            return PassGlm(*common, bound)
        case _:
            return Logistic(*common)


def _torch_loss(spec: TorchLossSpec) -> Loss:
    """PyTorch takes seconds to import, so only a run that asks for it does."""
    try:
        from sottovoce.losses.torch import build_torch_loss
    except ModuleNotFoundError:
        raise SpecError("loss.kind: torch needs PyTorch: pip install 'sottovoce[torch]'") from None
    return build_torch_loss(spec)
