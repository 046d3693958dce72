"""Array types and records shared by all packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]

MAX_ARRAY_ELEMENTS = 2**27
"""Maximum number of elements of an array that a plan asks for (1 GiB): larger ones are refused before allocation."""

Scalars = float | FloatArray
"""One number, or one per learner shaped `(learners, 1, 1)` to broadcast against `(learners, replicas, dim)`."""


def broadcast_scalars(per_learner: Sequence[float]) -> Scalars:
    """Return one number per learner, ready to broadcast: a single number if all are equal."""
    first = per_learner[0]
    return first if per_learner.count(first) == len(per_learner) else np.array(per_learner).reshape(-1, 1, 1)


def as_floats(values: Any) -> FloatArray:
    """Return `values` as a C-contiguous float64 array, copied only if needed."""
    return np.ascontiguousarray(values, dtype=np.float64)


def has_unrepresentable_integers(values: npt.NDArray[Any]) -> bool:
    """Return whether float64 cannot hold some of these numbers exactly: integers beyond 2**53."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8:
        return False
    with np.errstate(invalid="ignore"):  # beyond the range of integers
        return bool((as_floats(values).astype(values.dtype) != values).any())


_MAX_REPR_CHARACTERS = 80
"""Maximum length of the representation of a field."""
_PLAIN_TYPES = (str, int, float, bool, type(None))


def summarize_fields(self: Any) -> str:
    """Return a dataclass with its public fields on one line: an array by its shape, as it may hold records. For `__repr__`."""
    shown = (
        f"{each.name}={_summarize(getattr(self, each.name))}"
        for each in fields(self)
        if each.repr and not each.name.startswith("_")
    )
    return f"{type(self).__name__}({', '.join(shown)})"


def _summarize(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.shape}"
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(value, list) or (
        isinstance(items, list | tuple) and not all(isinstance(each, _PLAIN_TYPES) for each in items)
    ):
        return f"<{type(value).__name__} of {len(items)}>"
    text = repr(value)
    return text if len(text) <= _MAX_REPR_CHARACTERS and "\n" not in text else f"<{type(value).__name__}>"


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of a learner in one round.

    Attributes:
        features: `(..., records, features)`.
        labels: `(..., records)`.
        mask: `(..., records)` of 1.0 and 0.0; 0.0 marks padding, where stacked learners have unequal numbers. None: no padding.
        bounding_loss: loss whose bounds all records are known to satisfy unchanged; None: unknown. Batches derived from this one
            do not inherit it.
        bounded_batch: the same records, changed to satisfy the bounds of `bounded_batch.bounding_loss`, if computed already.
    """

    features: FloatArray
    labels: FloatArray
    mask: FloatArray | None = None
    bounding_loss: object | None = field(default=None, init=False)
    bounded_batch: Batch | None = field(default=None, init=False)

    __repr__ = summarize_fields

    @classmethod
    def from_bounded_records(
        cls, loss: object, features: FloatArray, labels: FloatArray, present: FloatArray | None = None
    ) -> Batch:
        """Make a batch of records that are known to satisfy the bounds of a loss."""
        batch = cls(features, labels, present)
        object.__setattr__(batch, "bounding_loss", loss)
        return batch

    @classmethod
    def with_bounded_batch(cls, features: FloatArray, labels: FloatArray, bounded: Batch) -> Batch:
        """Make a batch of records with their version within a loss's bounds attached."""
        batch = cls(features, labels)
        object.__setattr__(batch, "bounded_batch", bounded)
        return batch

    @classmethod
    def empty(cls, n_features: int) -> Batch:
        """Make the batch of a round without records."""
        return cls(np.empty((0, n_features)), np.empty(0))

    @property
    def size(self) -> int:
        """Number of record slots, padding included."""
        return int(self.labels.shape[-1])
