"""Hypothesis strategies that several test modules share."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sottovoce.arrays import FloatArray
from sottovoce.decision_sets import Box, DecisionSet, L2Ball
from sottovoce.losses import Logistic, Loss, Squared

positive = st.floats(0.01, 100.0)
"""Scales, norms, radii."""

clip_norms = st.one_of(st.just(math.inf), st.floats(0.01, 10.0))


def vectors(dim: int | st.SearchStrategy[int] = 3, size: float = 100.0) -> st.SearchStrategy[FloatArray]:
    """Vectors with entries up to `size`."""
    return hnp.arrays(np.float64, dim, elements=st.floats(-size, size))


def matrices(rows: int, columns: int, size: float = 100.0) -> st.SearchStrategy[FloatArray]:
    """Matrices with entries up to `size`."""
    return hnp.arrays(np.float64, (rows, columns), elements=st.floats(-size, size))


balls = st.builds(L2Ball, positive)
boxes = st.builds(lambda low, width: Box(low, low + width), st.floats(-50.0, 50.0), positive)
decision_sets: st.SearchStrategy[DecisionSet] = st.one_of(balls, boxes)

logistic_losses = st.builds(Logistic, feature_bound=st.floats(0.1, 5.0), ridge=st.just(0.0), clip_norm=clip_norms)
squared_losses = st.builds(
    Squared,
    feature_bound=st.floats(0.1, 5.0),
    label_bound=st.floats(0.1, 5.0),
    ridge=st.just(0.0),
    clip_norm=clip_norms,
)
losses: st.SearchStrategy[Loss] = st.one_of(logistic_losses, squared_losses)


def labels_for(loss: Loss, count: int) -> st.SearchStrategy[FloatArray]:
    """Labels in the domain of a loss; those of the squared loss may lie outside its label bound."""
    element = st.sampled_from([0.0, 1.0]) if isinstance(loss, Logistic) else st.floats(-20.0, 20.0)
    return hnp.arrays(np.float64, count, elements=element)
