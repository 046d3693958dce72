"""Losses of one record, by their `kind` in a spec. To add one: its class in a file here, and a line below."""

from typing import Annotated

from pydantic import SerializeAsAny

from sottovoce_core.losses.loss import Loss, MarginLoss, add_replica_axis, enforce_bounds, mean_gradient, scale_rows
from sottovoce_core.registry import Registry

LOSSES: Registry[Loss] = Registry(
    Loss,  # type: ignore[type-abstract]  # of its subclasses
    {
        "logistic": "sottovoce_core.losses.linear:LogisticLoss",
        "ridge": "sottovoce_core.losses.linear:RidgeLoss",
        "least_squares": "sottovoce_core.losses.linear:LeastSquaresLoss",
        "hinge": "sottovoce_core.losses.linear:HingeLoss",
        "smoothed_hinge": "sottovoce_core.losses.linear:SmoothedHingeLoss",
        "softmax": "sottovoce_core.losses.linear:SoftmaxLoss",
        "torch": "sottovoce_core.losses.torch:TorchLoss",
    },
    group="losses",
    default="logistic",
)

AnyLoss = Annotated[SerializeAsAny[Loss], LOSSES]
"""Type of a spec field that holds a loss, selected by its `kind`."""

__all__ = [
    "LOSSES",
    "AnyLoss",
    "Loss",
    "MarginLoss",
    "add_replica_axis",
    "enforce_bounds",
    "mean_gradient",
    "scale_rows",
]
