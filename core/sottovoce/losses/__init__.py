"""Losses of one record, the constants that guarantees rest on, and what makes the constants true."""

from sottovoce.losses.build import build_loss
from sottovoce.losses.loss import Loss, beside, mean_gradient, scale_rows
from sottovoce.losses.margin import Hinge, Logistic, MarginLoss, SmoothedHinge, scores_of, sigmoid
from sottovoce.losses.quadratic import PassGlm, Quadratic, Squared, chebyshev
from sottovoce.losses.softmax import Softmax

__all__ = [
    "Hinge",
    "Logistic",
    "Loss",
    "MarginLoss",
    "PassGlm",
    "Quadratic",
    "SmoothedHinge",
    "Softmax",
    "Squared",
    "beside",
    "build_loss",
    "chebyshev",
    "mean_gradient",
    "scale_rows",
    "scores_of",
    "sigmoid",
]
