"""Curves: measured numbers of a simulated run over the rounds, with their spread over the replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray, summarize_fields
from sottovoce_core.errors import SpecError
from sottovoce_core.text import suggest_name


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A measured number over the rounds.

    Attributes:
        replicas: `(checkpoints, replicas)` means over the learners.
        learners: `(checkpoints, learners)` means over the replicas; None for a number of the network.
    """

    replicas: FloatArray
    learners: FloatArray | None

    __repr__ = summarize_fields

    @property
    def mean(self) -> FloatArray:
        """Mean over learners and replicas, `(checkpoints,)`."""
        mean: FloatArray = self.replicas.mean(axis=1)
        return mean

    @property
    def error(self) -> FloatArray:
        """Standard error of that mean, `(checkpoints,)`, by the spread over the replicas; not-a-number for one replica."""
        n = self.replicas.shape[1]
        if n < 2:
            return np.full(len(self.replicas), math.nan)
        with np.errstate(invalid="ignore"):  # infinite values have no spread
            error: FloatArray = self.replicas.std(axis=1, ddof=1) / math.sqrt(n)
        return error

    @property
    def final_mean(self) -> float:
        """Mean at the last checkpoint."""
        return float(self.mean[-1])

    @property
    def final_error(self) -> float:
        """Standard error of the mean at the last checkpoint."""
        return float(self.error[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Measurements of a run: `curves` by name, each at the numbers of rounds `rounds (checkpoints,)`.

    `rounds_with_records (checkpoints,)` is the number of rounds so far with records, on average over the learners.
    """

    rounds: IntArray
    curves: Mapping[str, Curve]
    rounds_with_records: FloatArray

    __repr__ = summarize_fields

    @property
    def has_records_in_all_rounds(self) -> bool:
        """True if every measured round brought records to every learner."""
        return bool(np.array_equal(self.rounds_with_records, self.rounds))

    def count_rounds_until(self, name: str, threshold: float) -> FloatArray:
        """Return the first measured number of rounds at which a metric reaches a threshold, `(replicas,)`.

        An accuracy reaches it from below, every other metric from above. Not-a-number: it does not reach it. The result is as
        exact as the checkpoints are dense.

        Args:
            name: name of the metric.
            threshold: value to reach, by the mean over the learners.
        """
        values = self[name].replicas
        is_reached = values >= threshold if name.endswith("accuracy") else values <= threshold
        return np.where(is_reached.any(axis=0), self.rounds[is_reached.argmax(axis=0)], math.nan)

    def __getitem__(self, name: str) -> Curve:
        """Return the curve of a metric.

        Raises:
            SpecError: it was not measured.
        """
        if name not in self.curves:
            measured = ", ".join(self.curves) or "none"
            raise SpecError(
                f"the metric must be one of those measured, {measured}, got {name}{suggest_name(name, self.curves)}"
            )
        return self.curves[name]

    def __contains__(self, name: str) -> bool:
        return name in self.curves
