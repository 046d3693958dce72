"""Hypothesis strategies that several test modules share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sottovoce_core.arrays import FloatArray
from sottovoce_core.decision_sets import Box, DecisionSet, L2Ball, _Block, _L1Ball, _Product, _Simplex, _TraceNorm
from sottovoce_core.losses import MarginLoss
from sottovoce_core.losses.linear import (
    HingeLoss,
    LogisticLoss,
    PassGlmLoss,
    RidgeLoss,
    SmoothedHingeLoss,
    SoftmaxLoss,
    SquaredLoss,
)

positive = st.floats(0.01, 100.0)
"""Scales, norms, radii."""

clip_norms = st.one_of(st.none(), st.floats(0.01, 10.0))


def vectors(dim: int | st.SearchStrategy[int] = 3, size: float = 100.0) -> st.SearchStrategy[FloatArray]:
    """Vectors with entries up to `size`."""
    return hnp.arrays(np.float64, dim, elements=st.floats(-size, size))


def matrices(rows: int, columns: int, size: float = 100.0) -> st.SearchStrategy[FloatArray]:
    """Matrices with entries up to `size`."""
    return hnp.arrays(np.float64, (rows, columns), elements=st.floats(-size, size))


balls = st.builds(L2Ball, radius=positive)
boxes = st.builds(lambda low, width: Box(low=low, high=low + width), st.floats(-50.0, 50.0), positive)
l1_balls = st.builds(_L1Ball, radius=positive)
simplices = st.builds(_Simplex, radius=positive)
products = st.builds(
    lambda *parts: _Product(
        blocks=tuple(_Block(size=size, set=part) for size, part in zip((1, 3, 2), parts, strict=True))
    ),
    balls,
    st.one_of(l1_balls, simplices),
    boxes,
)
trace_norms = st.builds(_TraceNorm, rows=st.just(2), columns=st.just(3), radius=positive)
decision_sets: st.SearchStrategy[DecisionSet] = st.one_of(balls, boxes, l1_balls, simplices, trace_norms, products)
"""Of vectors of length 6."""

CLASSES = 3

bounds = st.floats(0.1, 5.0)
exact = st.just(0.0)
logistic_losses = st.builds(LogisticLoss, feature_bound=bounds, ridge=exact, clip_norm=clip_norms)
hinges = st.builds(HingeLoss, feature_bound=bounds, ridge=exact, clip_norm=clip_norms)
smoothed_hinges = st.builds(SmoothedHingeLoss, feature_bound=bounds, ridge=exact, clip_norm=clip_norms, width=bounds)
squared_losses = st.builds(RidgeLoss, feature_bound=bounds, label_bound=bounds, ridge=exact, clip_norm=clip_norms)
pass_glms = st.builds(PassGlmLoss, feature_bound=bounds, ridge=exact, score_bound=st.floats(0.01, 50.0))
softmaxes = st.builds(SoftmaxLoss, feature_bound=bounds, ridge=exact, clip_norm=clip_norms, classes=st.just(CLASSES))
margin_losses: st.SearchStrategy[MarginLoss] = st.one_of(
    logistic_losses, squared_losses, hinges, smoothed_hinges, pass_glms
)


def labels_for(loss: object, count: int) -> st.SearchStrategy[FloatArray]:
    """Labels in the domain of a loss; those of the squared loss may lie outside its label bound."""
    if isinstance(loss, SquaredLoss):
        return hnp.arrays(np.float64, count, elements=st.floats(-20.0, 20.0))
    classes = loss.classes if isinstance(loss, SoftmaxLoss) else 2
    return hnp.arrays(np.float64, count, elements=st.sampled_from(np.arange(float(classes)).tolist()))
