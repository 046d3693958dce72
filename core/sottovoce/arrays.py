"""The array types that cross module seams."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Scalars = float | FloatArray
"""One number, or one per learner shaped `(learners, 1, 1)` to broadcast against `(learners, replicas, dim)`."""


def as_floats(values: Any) -> FloatArray:
    """`values` as a C-contiguous float64 array (no copy where none is needed)."""
    return np.ascontiguousarray(values, dtype=np.float64)
