"""Losses, regrets and errors of one kind of decisions: one by learner, or one of the network. Definitions: `metrics`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.data import PlacedData
from sottovoce_core.network.participation_schedule import Mask
from sottovoce_core.runs.curves import Curve
from sottovoce_core.runs.minimisers import LabelledRecords, NetworkRecords
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound

LOSS_SUM_METRICS = frozenset({"average_loss", "static_regret", "average_regret", "dynamic_regret"})
"""Metrics that need the network loss of every round."""
MINIMISER_METRICS = frozenset(
    {"instantaneous_regret", "tracking_error", "tracking_error_of_mean", "static_regret", "average_regret"}
)
"""Metrics that need a minimiser at every checkpoint."""
TEST_METRICS = frozenset({"accuracy", "balanced_accuracy", "error"})
TRAINING_METRICS = frozenset({"training_accuracy", "balanced_training_accuracy"})
PREQUENTIAL_METRICS = frozenset({"prequential_loss", "prequential_accuracy"})


class DecisionMetrics:
    """Measures one kind of decisions, `(learners, replicas, dim)` or, of the network, `(1, replicas, dim)`.

    Args:
        run: simulated run.
        data: its records.
        records: the same, in one array.
        wanted: names of metrics.
    """

    def __init__(self, run: Run, data: PlacedData, records: NetworkRecords, wanted: frozenset[str]) -> None:
        self._set, self._roster = run.spec.decision_set, run.spec.participation
        self._records, self._wanted = records, wanted
        self._test = (
            LabelledRecords.of(run.loss, data.test_features, data.test_labels) if wanted & TEST_METRICS else None
        )
        self._prequential = _Prequential(records, wanted) if wanted & PREQUENTIAL_METRICS else None
        self._total: FloatArray | float = 0.0
        self._least = 0.0
        self._best: FloatArray | None = None
        self._measured: list[dict[str, FloatArray]] = []
        self._present: list[Mask] = []
        self._with_records: list[Mask] = []

    def add_round(self, step: SimulatedRound) -> None:
        """Add a round."""
        if self._wanted & LOSS_SUM_METRICS:
            self._add_losses(step)
        if self._prequential is not None:
            self._prequential.add_round(step)

    def measure(self, step: SimulatedRound, counted: int) -> None:
        """Measure after a round; `counted` is how many rounds of all learners brought records."""
        there = self._roster.participant_mask(step.t)
        if len(step.decisions_before) != len(there):  # the assembled decision
            there = np.ones(1, dtype=bool)
        with_records = there & self._records.have_records(step.t)
        self._present.append(there)
        self._with_records.append(with_records if with_records.any() else there)
        self._measured.append(self._measure(step, counted, there))
        if self._prequential is not None:
            self._prequential.measure()

    def build_curve(self, name: str) -> Curve:
        """Build the curve of a metric: means over the participants; of `empirical_loss`, over those that have records."""
        if self._prequential is not None and name in PREQUENTIAL_METRICS:
            return self._prequential.build_curve(name)
        values = np.stack(
            [each[name] for each in self._measured]
        )  # (checkpoints, learners, replicas), or without learners
        if values.ndim == 2:
            return Curve(values, None)
        there = np.stack(self._with_records if name == "empirical_loss" else self._present)
        return Curve(values.mean(axis=1, where=there[:, :, None]), values.mean(axis=2))

    def _add_losses(self, step: SimulatedRound) -> None:
        """Add the network loss of a round, and its minimum if the dynamic regret is wanted."""
        theirs = self._records.of_round(step.t)
        if not len(theirs.labels):
            return
        self._total = self._total + _evaluate(theirs.values, step.decisions_before)
        if "dynamic_regret" in self._wanted:
            best = theirs.minimiser(self._set, step.decisions_before.mean(axis=(0, 1)))
            self._least += float(theirs.values(best[None])[0])

    def _measure(self, step: SimulatedRound, counted: int, there: Mask) -> dict[str, FloatArray]:
        """Measure a round: `(learners, replicas)` each, or `(replicas,)` for a number of the network, over the participants."""
        wanted = self._wanted
        total = np.broadcast_to(self._total, step.decisions_before.shape[:2])
        found: dict[str, FloatArray] = {}
        if "average_loss" in wanted:
            found["average_loss"] = total / (counted or math.nan)
        if "consensus_error" in wanted:
            apart = step.decisions_after - step.decisions_after[there].mean(axis=0)
            found["consensus_error"] = np.linalg.norm(apart[there], axis=-1).mean(axis=0)
        if wanted & MINIMISER_METRICS:
            found |= self._against_optimum(step, total, there, counted)
        if "dynamic_regret" in wanted:
            found["dynamic_regret"] = total - self._least
        if "empirical_loss" in wanted:
            found["empirical_loss"] = self._records.own_losses(step.decisions_before, step.t)
        if self._test is not None:
            found["accuracy"], found["balanced_accuracy"] = self._test.accuracies(step.decisions_after)
            found["error"] = 1.0 - found["accuracy"]
        if wanted & TRAINING_METRICS:
            learned = self._records.learned_until(step.t)
            found["training_accuracy"], found["balanced_training_accuracy"] = learned.accuracies(step.decisions_after)
        if there.all():
            return found
        return {
            name: np.where(there[:, None], each, np.nan) if each.ndim == 2 else each for name, each in found.items()
        }

    def _against_optimum(
        self, step: SimulatedRound, total: FloatArray, there: Mask, counted: int
    ) -> dict[str, FloatArray]:
        mean, whole = self._records.until(step.t)
        before, wanted = step.decisions_before, self._wanted
        has_records = bool(len(mean.labels))
        best = np.full(before.shape[-1], math.nan)
        if has_records:
            start = before.mean(axis=(0, 1)) if self._best is None else self._best
            self._best = best = mean.minimiser(self._set, start)
        found = {
            "tracking_error": np.linalg.norm(before - best, axis=-1),
            "tracking_error_of_mean": np.linalg.norm(before[there].mean(axis=0) - best, axis=-1),
        }
        if "instantaneous_regret" in wanted:
            found["instantaneous_regret"] = (
                _evaluate(mean.values, before) - mean.values(best[None])[0]
                if has_records
                else np.full(before.shape[:2], math.nan)
            )
        if wanted & {"static_regret", "average_regret"}:
            least = 0.0
            if has_records:
                shared = np.allclose(mean.shares(), whole.shares(), rtol=1e-9)
                comparator = best if shared else whole.minimiser(self._set, best)
                least = float(whole.values(comparator[None])[0])
            found["static_regret"] = total - least
            found["average_regret"] = found["static_regret"] / (counted or math.nan)
        return found


class _Prequential:
    """Losses and correct predictions of each learner's decision on its own records of a round, before it learns them.

    Args:
        records: records of the learners.
        wanted: names of metrics; others than the prequential ones are ignored.
    """

    def __init__(self, records: NetworkRecords, wanted: frozenset[str]) -> None:
        self._records, self._names = records, wanted & PREQUENTIAL_METRICS
        self._counts = np.zeros(len(records.order))
        self._sums: dict[str, FloatArray] = {}
        self._measured: list[tuple[FloatArray, dict[str, FloatArray]]] = []

    def add_round(self, step: SimulatedRound) -> None:
        """Add the records of a round, one batch for all learners with equally many of them."""
        records, loss = self._records, self._records.loss
        decisions = np.broadcast_to(step.decisions_before, (len(self._counts), *step.decisions_before.shape[1:]))
        if not self._sums:
            self._sums = {name: np.zeros(decisions.shape[:2]) for name in self._names}
        sizes = records.sizes(step.t)
        self._counts += sizes
        for size in np.unique(sizes[sizes > 0]).tolist():
            mine = np.flatnonzero(sizes == size)
            rows = np.stack([records.rows(i, step.t) for i in mine.tolist()])
            features, labels, thetas = records.features[rows], records.labels[rows], decisions[mine]
            if "prequential_loss" in self._names:
                ridge = 0.5 * size * loss.ridge * np.vecdot(thetas, thetas)
                self._sums["prequential_loss"][mine] += (
                    loss.values(thetas, Batch(features, labels)).sum(axis=-1) + ridge
                )
            if "prequential_accuracy" in self._names:
                is_right = loss.classify(loss.predict(thetas, features)) == labels[:, None]
                self._sums["prequential_accuracy"][mine] += is_right.sum(axis=-1)

    def measure(self) -> None:
        """Keep the sums at a checkpoint."""
        self._measured.append((self._counts.copy(), {name: each.copy() for name, each in self._sums.items()}))

    def build_curve(self, name: str) -> Curve:
        """Build the curve of means over records: of each learner's own, and of the records of all learners."""
        counts = np.array([each for each, _ in self._measured])[:, :, None]
        sums = np.stack([each[name] for _, each in self._measured])  # (checkpoints, learners, replicas)
        with np.errstate(invalid="ignore"):  # 0 / 0 before the first record
            return Curve(sums.sum(axis=1) / counts.sum(axis=1), (sums / counts).mean(axis=2))


def _evaluate(function: Any, thetas: FloatArray) -> FloatArray:
    """Evaluate a function of `(vectors, dim)` at `(learners, replicas, dim)`: `(learners, replicas)`."""
    values: FloatArray = function(thetas.reshape(-1, thetas.shape[-1]))
    return values.reshape(thetas.shape[:2])
