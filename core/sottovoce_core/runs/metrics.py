"""Learning performance of a simulated run: losses, regrets, distance to the optimum, agreement, accuracy.

For experiments only: all records and clean decisions are examined here, which no deployed learner reveals.

Round t, counted from 0, brings records to the learners; the decision `theta_t^i` of learner i was made before them.

- `f_{t,j}` is the mean loss of learner j's records of round t, ridge included; a round without records has none. The network
  loss of the round is their sum over j: every learner is measured by the cost of its decision to all learners.
- `F_t` is the mean, over the learners that have records, of the mean loss of all their records of the rounds 0..t, and
  `theta_t*` its minimiser on the decision set (Chen & Wang 2025, section II).
- Means over rounds are over those with records: before the first record they are not-a-number.
- Prequential metrics measure the decision `theta_t^i` on learner i's own records of round t, which it learns after that.

An offline learner is not measured; in sums over rounds its current decision counts.

Losses are unclipped. All replicas learn from the same records, so a minimiser serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sottovoce_core.arrays import Batch, FloatArray, IntArray
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import Loss
from sottovoce_core.network.participation_schedule import Mask
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.runs.minimisers import LabelledRecords, NetworkRecords
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound

DEFAULT_METRICS = (
    "average_loss",
    "consensus_error",
    "instantaneous_regret",
    "tracking_error",
    "tracking_error_of_mean",
    "static_regret",
    "accuracy",
    "balanced_accuracy",
)
"""Metrics of a run that is measured without a choice."""

METRICS = (
    *DEFAULT_METRICS,
    "error",
    "training_accuracy",
    "balanced_training_accuracy",
    "prequential_loss",
    "prequential_accuracy",
    "dynamic_regret",
)
"""All metrics. Definitions: docs/metrics.md."""

_LOSS_SUM_METRICS = frozenset({"average_loss", "static_regret", "dynamic_regret"})
"""Metrics that need the network loss of every round."""
_MINIMISER_METRICS = frozenset({"instantaneous_regret", "tracking_error", "tracking_error_of_mean", "static_regret"})
"""Metrics that need a minimiser at every checkpoint."""
_TEST_METRICS = frozenset({"accuracy", "balanced_accuracy", "error"})
_TRAINING_METRICS = frozenset({"training_accuracy", "balanced_training_accuracy"})
_PREQUENTIAL_METRICS = frozenset({"prequential_loss", "prequential_accuracy"})

CHECKPOINTS = 25
"""Default number of checkpoints: the numbers of rounds after which a run is measured."""


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of records, in [0, 1]."""
    return metric == "error" or metric.endswith("accuracy")


def list_metrics(loss: Loss, data: PlacedData) -> tuple[str, ...]:
    """List the metrics that a run with this loss and these records can be measured by, in the order of `METRICS`."""
    impossible: set[str] = set()
    if not loss.is_convex:
        impossible |= _MINIMISER_METRICS | {"dynamic_regret"}
    if not _has_classes(data.test_labels):
        impossible |= _TEST_METRICS
    if not all(_has_classes(each.labels) for each in data.learners if len(each.labels)):
        impossible |= _TRAINING_METRICS | {"prequential_accuracy"}
    return tuple(name for name in METRICS if name not in impossible)


def select_metrics(loss: Loss, data: PlacedData, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the metrics to measure a run by.

    Args:
        loss: loss of the run.
        data: records of the run.
        names: chosen metrics (default: those of `DEFAULT_METRICS` that the run can be measured by).

    Raises:
        SpecError: no metric is chosen, or the run cannot be measured by one.
    """
    possible = list_metrics(loss, data)
    if names is None:
        return tuple(name for name in DEFAULT_METRICS if name in possible)
    chosen = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    unknown = [str(name) for name in chosen if name not in possible]
    if not chosen or unknown:
        raise SpecError(f"metrics must be of {', '.join(possible)}, got {', '.join(unknown) or 'none'}{_hint(unknown)}")
    return chosen


def _hint(unknown: Sequence[str]) -> str:
    """Say why the run cannot be measured by a metric that exists, or where a number belongs."""
    if any(name.isdigit() for name in unknown):
        return ": numbers of rounds are checkpoints"
    if not set(unknown) & set(METRICS):
        return ""
    return (
        ": regrets and tracking errors need a convex loss, accuracies need labels that are whole numbers, and accuracy, "
        "balanced_accuracy and error need held-out records"
    )


def resolve_checkpoints(rounds: int, checkpoints: int | Iterable[int] = CHECKPOINTS) -> IntArray:
    """Return the numbers of rounds after which to measure, in ascending order.

    Args:
        rounds: number of rounds of the run.
        checkpoints: these numbers of rounds; or how many, evenly spread on a logarithmic scale up to the last round.

    Raises:
        SpecError: there are none, or one is not a number of rounds of the run.
    """
    if isinstance(checkpoints, Iterable):
        listed = list(checkpoints)
        if not listed or not all(each in range(1, rounds + 1) for each in listed):
            got = ", ".join(map(str, listed)) or "none"
            raise SpecError(f"checkpoints must be numbers of rounds from 1 to {rounds}, got {got}")
        return np.unique(np.array(listed, dtype=np.int64))
    if checkpoints < 1:
        raise SpecError(f"the number of checkpoints must be at least 1, got {checkpoints}")
    return _spread_checkpoints(rounds, checkpoints)


def _spread_checkpoints(rounds: int, max_count: int = CHECKPOINTS) -> IntArray:
    """Return numbers of rounds, evenly spread on a logarithmic scale; the first is 1 and the last `rounds`.

    At most `max_count`, and at least four fifths of that in runs with enough rounds: in a short run, some of them coincide.
    One checkpoint is after the last round.
    """
    if max_count == 1:
        return np.array([rounds], dtype=np.int64)
    if rounds <= max_count:
        return np.arange(1, rounds + 1)
    tried = max_count
    while len(found := np.unique(np.rint(np.geomspace(1, rounds, tried)).astype(np.int64))) < 4 * max_count // 5:
        tried += 1 + tried // 1_000
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------


class Metrics:
    """Measures a run during its simulation: `add_round` every round, then read `curves`.

    Only what the chosen metrics need is computed. Memory does not grow with the rounds: cumulative losses `(learners, replicas)`,
    and means at the checkpoints. The search for minimisers and all work on all records happen at checkpoints only; the dynamic
    regret alone needs a minimiser in every round with records.

    Args:
        run: simulated run.
        data: its records.
        metrics: names of metrics, of `METRICS` (default: those of `DEFAULT_METRICS` that the run can be measured by).
        checkpoints: numbers of rounds after which to measure; or how many, evenly spread on a logarithmic scale.

    Raises:
        SpecError: the run cannot be measured by a metric, or a checkpoint is not a number of its rounds.
    """

    def __init__(
        self,
        run: Run,
        data: PlacedData,
        *,
        metrics: Sequence[str] | None = None,
        checkpoints: int | Iterable[int] = CHECKPOINTS,
    ) -> None:
        self._loss, self._set, self._roster = run.loss, run.spec.decision_set, run.spec.participation
        self._names = select_metrics(run.loss, data, metrics)
        self._wanted = frozenset(self._names)
        self._at = frozenset(resolve_checkpoints(run.spec.rounds, checkpoints).tolist())
        self._records = NetworkRecords.of(run.loss, data)
        self._test = (
            LabelledRecords.of(run.loss, data.test_features, data.test_labels) if self._wanted & _TEST_METRICS else None
        )
        self._prequential = _Prequential(self._records, self._wanted) if self._wanted & _PREQUENTIAL_METRICS else None
        self._total: FloatArray | float = 0.0
        self._least = 0.0
        self._counted = 0
        self._best: FloatArray | None = None
        self._measured: list[tuple[int, float, dict[str, FloatArray]]] = []

    def add_round(self, step: SimulatedRound) -> None:
        """Add a round; rounds come in order, each once."""
        self._counted += self._records.having(step.t)
        if self._wanted & _LOSS_SUM_METRICS:
            self._add_losses(step)
        if self._prequential is not None:
            self._prequential.add_round(step)
        if step.t + 1 in self._at:
            self._measured.append((step.t + 1, self._counted / len(step.decisions_before), self._measure(step)))
            if self._prequential is not None:
                self._prequential.measure()

    @property
    def has_measured(self) -> bool:
        """True after the first checkpoint."""
        return bool(self._measured)

    @property
    def curves(self) -> Curves:
        """Measurements so far."""
        names = self._names if self._measured else ()
        rounds = np.array([rounds for rounds, _, _ in self._measured], dtype=np.int64)
        there = np.array([self._roster.participant_mask(t - 1) for t in rounds.tolist()])
        curves = {
            name: self._prequential.build_curve(name)
            if self._prequential is not None and name in _PREQUENTIAL_METRICS
            else _build_curve([values[name] for _, _, values in self._measured], there)
            for name in names
        }
        return Curves(rounds, curves, np.array([counted for _, counted, _ in self._measured]))

    def _add_losses(self, step: SimulatedRound) -> None:
        """Add the network loss of a round, and its minimum if the dynamic regret is wanted."""
        theirs = self._records.of_round(step.t)
        if not len(theirs.labels):
            return
        self._total = self._total + _evaluate(theirs.values, step.decisions_before)
        if "dynamic_regret" in self._wanted:
            best = theirs.minimiser(self._set, step.decisions_before.mean(axis=(0, 1)))
            self._least += float(theirs.values(best[None])[0])

    def _measure(self, step: SimulatedRound) -> dict[str, FloatArray]:
        """Measure a round: `(learners, replicas)` each, or `(replicas,)` for a number of the network, over the participants."""
        there, wanted = self._roster.participant_mask(step.t), self._wanted
        total = np.broadcast_to(self._total, step.decisions_before.shape[:2])
        found: dict[str, FloatArray] = {}
        if "average_loss" in wanted:
            found["average_loss"] = total / (self._counted or math.nan)
        if "consensus_error" in wanted:
            apart = step.decisions_after - step.decisions_after[there].mean(axis=0)
            found["consensus_error"] = np.linalg.norm(apart[there], axis=-1).mean(axis=0)
        if wanted & _MINIMISER_METRICS:
            found |= self._against_optimum(step, total, there)
        if "dynamic_regret" in wanted:
            found["dynamic_regret"] = total - self._least
        if self._test is not None:
            found["accuracy"], found["balanced_accuracy"] = self._test.accuracies(step.decisions_after)
            found["error"] = 1.0 - found["accuracy"]
        if wanted & _TRAINING_METRICS:
            learned = self._records.learned_until(step.t)
            found["training_accuracy"], found["balanced_training_accuracy"] = learned.accuracies(step.decisions_after)
        if there.all():
            return found
        return {
            name: np.where(there[:, None], each, np.nan) if each.ndim == 2 else each for name, each in found.items()
        }

    def _against_optimum(self, step: SimulatedRound, total: FloatArray, there: Mask) -> dict[str, FloatArray]:
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
        if "static_regret" in wanted:
            least = 0.0
            if has_records:
                shared = np.allclose(mean.shares(), whole.shares(), rtol=1e-9)
                comparator = best if shared else whole.minimiser(self._set, best)
                least = float(whole.values(comparator[None])[0])
            found["static_regret"] = total - least
        return found


class _Prequential:
    """Losses and correct predictions of each learner's decision on its own records of a round, before it learns them.

    Args:
        records: records of the learners.
        wanted: names of metrics; others than the prequential ones are ignored.
    """

    def __init__(self, records: NetworkRecords, wanted: frozenset[str]) -> None:
        self._records, self._names = records, wanted & _PREQUENTIAL_METRICS
        self._counts = np.zeros(len(records.order))
        self._sums: dict[str, FloatArray] = {}
        self._measured: list[tuple[FloatArray, dict[str, FloatArray]]] = []

    def add_round(self, step: SimulatedRound) -> None:
        """Add the records of a round, one batch for all learners with equally many of them."""
        records, loss = self._records, self._records.loss
        if not self._sums:
            self._sums = {name: np.zeros(step.decisions_before.shape[:2]) for name in self._names}
        sizes = records.sizes(step.t)
        self._counts += sizes
        for size in np.unique(sizes[sizes > 0]).tolist():
            mine = np.flatnonzero(sizes == size)
            rows = np.stack([records.rows(i, step.t) for i in mine.tolist()])
            features, labels, thetas = records.features[rows], records.labels[rows], step.decisions_before[mine]
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


def _build_curve(values: list[FloatArray], there: Mask) -> Curve:
    stack = np.stack(values)  # (checkpoints, learners, replicas), or without learners
    network = stack.mean(axis=1, where=there[:, :, None]) if stack.ndim == 3 else stack
    return Curve(network, stack.mean(axis=2) if stack.ndim == 3 else None)


def _has_classes(labels: FloatArray) -> bool:
    """Return whether there are records, whose labels are classes and not measurements."""
    return len(labels) > 0 and np.array_equal(labels, np.rint(labels))
