"""The arrays that cross module seams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MOST_NUMBERS = 2**27
"""In an array that a plan asks for (1 GiB): beyond it is refused in words, before memory is."""

Scalars = float | FloatArray
"""One number, or one per learner shaped `(learners, 1, 1)` to broadcast against `(learners, replicas, dim)`."""


def scalars(per_learner: Sequence[float]) -> Scalars:
    """A number of each learner, ready to broadcast: one number if all are equal."""
    first = per_learner[0]
    return first if per_learner.count(first) == len(per_learner) else np.array(per_learner).reshape(-1, 1, 1)


FITTING = 2**15
"""Numbers that stay in a processor's cache (256 KiB) while several steps work on them."""


def in_parts(
    steps: Callable[..., object], first: FloatArray, *others: Scalars, out: FloatArray | None = None
) -> FloatArray:
    """What some steps write, number by number, into an array as the first one, in parts that fit into the cache.

    Args:
        steps: they get a part of each, in order, and of the array that they write.
        first: `(learners, replicas, dim)` in parts; else, and where it is not much larger than a part, it is taken whole.
        others: they broadcast to it.
        out: of the first one's shape, and perhaps one of the others; None: a new array.
    """
    made = np.empty(first.shape) if out is None else out
    if first.size <= 4 * FITTING or first.ndim != 3:
        steps(first, *others, made)
        return made
    learners, replicas, dim = first.shape
    most = max(FITTING // dim, 1)
    for i in range(learners):
        for k in range(0, replicas, most):
            steps(*[_part(each, i, k, k + most) for each in (first, *others, made)])
    return made


def _part(values: Scalars, learner: int, first: int, after: int) -> Scalars:
    """Of one learner and some replicas."""
    if isinstance(values, float) or values.ndim < 2:
        return values
    if values.ndim > 2 and len(values) > 1:
        values = values[learner : learner + 1]
    return values[..., first:after, :] if values.shape[-2] > 1 else values


def as_floats(values: Any) -> FloatArray:
    """`values` as a C-contiguous float64 array (no copy where none is needed)."""
    return np.ascontiguousarray(values, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Batch:
    """The records that reach a learner in one round.

    Attributes:
        features: `(..., records, features)`.
        labels: `(..., records)`.
        present: `(..., records)` of 1.0 and 0.0; 0.0 marks padding, where stacked learners got unequal numbers. None: all.
        bounded_by: a loss whose bounds all records are known to obey as they are (`known_bounded`); None: that is not known.
            A batch that is made from this one says nothing of it.
    """

    features: FloatArray
    labels: FloatArray
    present: FloatArray | None = None
    bounded_by: object | None = field(default=None, init=False)

    def known_bounded(self, loss: object) -> Batch:
        """The same records, known to obey the bounds of a loss."""
        return Batch.obeying(loss, self.features, self.labels, self.present)

    @classmethod
    def obeying(
        cls, loss: object, features: FloatArray, labels: FloatArray, present: FloatArray | None = None
    ) -> Batch:
        """Records that are known to obey the bounds of a loss."""
        batch = cls(features, labels, present)
        object.__setattr__(batch, "bounded_by", loss)
        return batch

    @classmethod
    def empty(cls, n_features: int) -> Batch:
        """A round without records."""
        return cls(np.empty((0, n_features)), np.empty(0))

    @property
    def size(self) -> int:
        """Number of record slots (padding included)."""
        return int(self.labels.shape[-1])
