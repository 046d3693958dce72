"""Losses of many records, and the points of a decision set that minimise them.

Losses are unclipped, and all records are within the loss's bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, IntArray
from sottovoce_core.data import PlacedData
from sottovoce_core.decision_sets import Box, DecisionSet
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.network.participation_schedule import Mask
from sottovoce_core.optional import import_optional

MAX_CHUNK_ELEMENTS = 2**21
"""Maximum number of numbers (decisions times records) that are computed at a time: 16 MiB."""

MAX_OPTIMISER_STEPS = 5_000
_TOLERANCE = 1e-9
"""Tolerance of the search for a minimiser: the norm of the projected gradient of a mean loss."""

# ---- objectives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """`sum_k weight_k phi(theta; record_k) + (pull/2) ||theta||^2`, with phi the data part of the loss, unclipped.

    Attributes:
        loss: loss of one record.
        features: `(records, features)`, within the loss's bounds.
        labels: `(records,)`.
        weights: `(records,)`, positive.
        pull: coefficient of the ridge.
    """

    loss: Loss
    features: FloatArray
    labels: FloatArray
    weights: FloatArray
    pull: float

    def values(self, thetas: FloatArray) -> FloatArray:
        """Return the objective, `(vectors,)`, for `thetas (vectors, dim)`."""
        total: FloatArray = 0.5 * self.pull * np.vecdot(thetas, thetas)
        batch = Batch(self.features[None], self.labels[None])
        for part in _slice_decisions(len(thetas), len(self.labels)):
            total[part] += self.loss.values(thetas[None, part], batch)[0] @ self.weights
        return total

    def minimiser(self, decision_set: DecisionSet, start: FloatArray) -> FloatArray:
        """Find the point of the set `(dim,)` that minimises the objective; approximate if the loss is not smooth.

        L-BFGS-B, in the bounds of a box. If that ends outside the set, accelerated projected gradient steps follow.

        Args:
            decision_set: set to search.
            start: `(dim,)`, starting point.

        Raises:
            SpecError: the loss is not convex, or SciPy is missing.
        """
        if not self.loss.is_convex:
            raise SpecError("a minimiser needs a convex loss, got one that is not convex")
        minimize = import_optional("scipy.optimize", "SciPy", "regret or tracking error").minimize
        mean = _Mean(self)
        bounds = [(decision_set.low, decision_set.high)] * len(start) if isinstance(decision_set, Box) else None
        options = {
            "maxiter": MAX_OPTIMISER_STEPS,
            "maxfun": 2 * MAX_OPTIMISER_STEPS,
            "ftol": 1e-15,
            "gtol": _TOLERANCE,
            "maxcor": 20,
        }
        found = minimize(mean.value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        free: FloatArray = np.asarray(found.x, dtype=np.float64)
        inside = decision_set.project(free)
        if np.linalg.norm(inside - free) <= _TOLERANCE * (1.0 + np.linalg.norm(free)):
            return inside
        return _descend(mean, decision_set, inside)

    def shares(self) -> FloatArray:
        """Return weights and ridge relative to the sum of the weights, `(records + 1,)`. Equal shares have equal minimisers."""
        shares: FloatArray = np.append(self.weights, self.pull) / self.weights.sum()
        return shares


class _Mean:
    """An objective divided by the sum of its weights, with its gradient."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self._total = objective, float(objective.weights.sum())
        loss = objective.loss
        self.smoothness = loss.smoothness + objective.pull / self._total
        """Lipschitz constant of the gradient; infinite: unknown."""
        self._loss = loss.model_copy(update={"clip_norm": None})
        # A loss sums over records of equal weight, and there are few different weights.
        kinds, kind = np.unique(np.round(objective.weights / objective.weights.max(), 12), return_inverse=True)
        self._groups = [
            (float(objective.weights[mine][0]), Batch(objective.features[None, mine], objective.labels[None, mine]))
            for mine in (kind == k for k in range(len(kinds)))
        ]

    def value(self, theta: FloatArray) -> float:
        return float(self._objective.values(theta[None])[0]) / self._total

    def gradient(self, theta: FloatArray) -> FloatArray:
        total = self._objective.pull * theta
        for weight, batch in self._groups:
            total = total + weight * self._loss.gradient_sum(theta[None, None], batch)[0, 0]
        return total / self._total

    def value_and_gradient(self, theta: FloatArray) -> tuple[float, FloatArray]:
        return self.value(theta), self.gradient(theta)


def _descend(mean: _Mean, decision_set: DecisionSet, start: FloatArray) -> FloatArray:
    """Minimise by accelerated projected gradient (FISTA), restarted if the momentum points uphill.

    Steps have the length `1 / smoothness`, or are halved until they descend if that is unknown.
    """
    here, ahead, momentum = start, start, 1.0
    is_smooth = 0.0 < mean.smoothness < math.inf
    step = 1.0 / mean.smoothness if is_smooth else 1.0
    for _ in range(MAX_OPTIMISER_STEPS):
        gradient = mean.gradient(ahead)
        value = 0.0 if is_smooth else mean.value(ahead)
        while True:
            there = decision_set.project(ahead - step * gradient)
            move = there - ahead
            if is_smooth or step < 1e-12:
                break
            model = value + float(gradient @ move) + float(move @ move) / (2.0 * step)
            if mean.value(there) <= model + 1e-14 * (1.0 + abs(value)):
                break
            step /= 2.0
        if np.linalg.norm(move) <= _TOLERANCE * step or step < 1e-12:
            return there
        if float(move @ (there - here)) < 0.0:
            momentum = 1.0
        following = 0.5 + math.sqrt(0.25 + momentum**2)
        ahead = there + (momentum - 1.0) / following * (there - here)
        here, momentum = there, following
    return here


def _slice_decisions(vectors: int, records: int) -> Iterator[slice]:
    """Return slices of the decisions such that decisions times records stay within `MAX_CHUNK_ELEMENTS`."""
    size = max(MAX_CHUNK_ELEMENTS // max(records, 1), 1)
    return (slice(first, first + size) for first in range(0, vectors, size))


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class NetworkRecords:
    """All learners' records in one array, within the loss's bounds, with their learning schedule.

    `order[i]` and `offsets[i]` are as in `LearnerData`, with rows of the one array. `counts (rounds, learners)` are the numbers
    of records of each round.
    """

    loss: Loss
    features: FloatArray
    labels: FloatArray
    order: tuple[IntArray, ...]
    offsets: tuple[IntArray, ...]
    counts: IntArray

    @classmethod
    def of(cls, loss: Loss, data: PlacedData) -> NetworkRecords:
        features, labels = loss.enforce_bounds(
            np.concatenate([each.features for each in data.learners]),
            np.concatenate([each.labels for each in data.learners]),
        )
        first = np.cumsum([0, *(len(each.labels) for each in data.learners)])
        order = tuple(each.order + start for each, start in zip(data.learners, first, strict=False))
        offsets = tuple(each.offsets for each in data.learners)
        counts: IntArray = np.stack([each[1:] - each[:-1] for each in offsets], axis=1)
        return cls(loss, features, labels, order, offsets, counts)

    def of_round(self, t: int) -> Objective:
        """Return `sum_j f_{t,j}`."""
        rows = [order[offsets[t] : offsets[t + 1]] for order, offsets in zip(self.order, self.offsets, strict=True)]
        sizes = self.counts[t]
        weights = np.repeat(1.0 / np.maximum(sizes, 1), sizes)
        return self._objective(np.concatenate(rows), weights, float(self.having(t)))

    def rows(self, learner: int, t: int) -> IntArray:
        """Return the rows of a learner's records of round t."""
        offsets = self.offsets[learner]
        return self.order[learner][offsets[t] : offsets[t + 1]]

    def sizes(self, t: int) -> IntArray:
        """Return the number of records of round t, `(learners,)`."""
        sizes: IntArray = self.counts[t]
        return sizes

    def own_losses(self, thetas: FloatArray, t: int) -> FloatArray:
        """Return each learner's mean loss, without ridge, on its own records of the rounds 0..t, `(learners, replicas)`.

        Not-a-number for a learner without records.

        Args:
            thetas: decisions of the learners, `(learners, replicas, dim)`.
            t: last round.
        """
        losses = np.full(thetas.shape[:2], math.nan)
        for i, (order, offsets) in enumerate(zip(self.order, self.offsets, strict=True)):
            rows, uses = np.unique(order[: offsets[t + 1]], return_counts=True)
            if len(rows):
                own = Objective(self.loss, self.features[rows], self.labels[rows], uses / uses.sum(), 0.0)
                losses[i] = own.values(thetas[i])
        return losses

    def learned_until(self, t: int) -> LabelledRecords:
        """Return the records of the rounds 0..t, each once."""
        parts = [order[: offsets[t + 1]] for order, offsets in zip(self.order, self.offsets, strict=True)]
        rows = np.unique(np.concatenate(parts))
        return LabelledRecords.of(self.loss, self.features[rows], self.labels[rows])

    def having(self, t: int) -> int:
        """Return the number of learners with records in round t."""
        return int(np.count_nonzero(self.counts[t]))

    def have_records(self, t: int) -> Mask:
        """Return the mask `(learners,)` of those with records in the rounds 0..t."""
        return np.array([offsets[t + 1] > 0 for offsets in self.offsets])

    def until(self, t: int) -> tuple[Objective, Objective]:
        """Return `F_t`, and the sum of `f_{s,j}` over the rounds s = 0..t and the learners j."""
        n = sum(bool(offsets[t + 1]) for offsets in self.offsets)
        mean, whole, rounds = np.zeros(len(self.labels)), np.zeros(len(self.labels)), 0
        for order, offsets in zip(self.order, self.offsets, strict=True):
            rows, sizes = order[: offsets[t + 1]], np.diff(offsets[: t + 2])
            if len(rows):
                mean += np.bincount(rows, minlength=len(mean)) / (n * len(rows))
                each = np.repeat(1.0 / np.maximum(sizes, 1), sizes)
                whole += np.bincount(rows, weights=each, minlength=len(mean))
                rounds += int(np.count_nonzero(sizes))
        seen = np.flatnonzero(mean)
        return self._objective(seen, mean[seen], float(n > 0)), self._objective(seen, whole[seen], float(rounds))

    def _objective(self, rows: IntArray, weights: FloatArray, ridges: float) -> Objective:
        return Objective(self.loss, self.features[rows], self.labels[rows], weights, ridges * self.loss.ridge)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRecords:
    """Records with one column per class that occurs: 1 over its number of records for those with the label."""

    loss: Loss
    features: FloatArray
    labels: FloatArray
    classes: FloatArray

    @classmethod
    def of(cls, loss: Loss, features: FloatArray, labels: FloatArray) -> LabelledRecords:
        belongs = (labels[:, None] == np.unique(labels)).astype(np.float64)
        return cls(loss, features, labels, belongs / belongs.sum(axis=0))

    def accuracies(self, thetas: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return accuracy, and its mean over the classes; `(learners, replicas)` each. Not-a-number without records."""
        flat, lead = thetas.reshape(-1, thetas.shape[-1]), thetas.shape[:2]
        recalls = np.empty((len(flat), self.classes.shape[1]))
        accuracy = np.empty(len(flat))
        if not len(self.labels):
            return np.full(lead, math.nan), np.full(lead, math.nan)
        for part in _slice_decisions(len(flat), len(self.labels)):
            predicted = self.loss.classify(self.loss.predict(flat[None, part], self.features[None]))[0]
            right = (predicted == self.labels).astype(np.float64)
            accuracy[part], recalls[part] = right.mean(axis=1), right @ self.classes
        return accuracy.reshape(lead), recalls.mean(axis=1).reshape(lead)
