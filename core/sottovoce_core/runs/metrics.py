"""Learning performance of a simulated run: losses, regrets, distance to the optimum, agreement, accuracy.

For experiments only: all records and clean decisions are examined here, which no deployed learner reveals.

Round t, counted from 0, brings records to the learners; the decision `theta_t^i` of learner i was made before them.

- `f_{t,j}` is the mean loss of learner j's records of round t, ridge included; a round without records has none. The network
  loss of the round is their sum over j: every learner is measured by the cost of its decision to all learners.
- `F_t` is the mean, over the learners that have records, of the mean loss of all their records of the rounds 0..t, and
  `theta_t*` its minimiser on the decision set (Chen & Wang 2025, section II).
- Means over rounds are over those with records: before the first record they are not-a-number.
- Prequential metrics measure the decision `theta_t^i` on learner i's own records of round t, which it learns after that.
- Some metrics measure other decisions in place of `theta_t^i` (`OTHER_DECISIONS`): those in messages, or the one that the
  network assembles from the blocks of all learners.

An offline learner is not measured; in sums over rounds its current decision counts.

Losses are unclipped. All replicas learn from the same records, so a minimiser serves all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sottovoce_core.algorithms.interface import BlockAlgorithm, ReleasedDecisionAlgorithm
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.runs.decision_metrics import MINIMISER_METRICS, TEST_METRICS, TRAINING_METRICS, DecisionMetrics
from sottovoce_core.runs.minimisers import NetworkRecords
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import SimulatedRound
from sottovoce_core.text import suggest_name

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
    "average_regret",
    "empirical_loss",
    "released_loss",
    "released_error",
    "assembled_loss",
    "assembled_regret",
    "assembled_mean_regret",
    "assembled_accuracy",
    "assembled_balanced_accuracy",
    "assembled_prequential_accuracy",
    "privacy_loss",
)
"""All metrics. Definitions: docs/reference/metrics.md."""

OTHER_DECISIONS: Mapping[str, tuple[str, str]] = {
    "released_loss": ("released", "empirical_loss"),
    "released_error": ("released", "error"),
    "assembled_loss": ("assembled", "average_loss"),
    "assembled_regret": ("assembled", "average_regret"),
    "assembled_mean_regret": ("assembled_mean", "average_regret"),
    "assembled_accuracy": ("assembled", "accuracy"),
    "assembled_balanced_accuracy": ("assembled", "balanced_accuracy"),
    "assembled_prequential_accuracy": ("assembled", "prequential_accuracy"),
}
"""Metrics of other decisions than the learners' own: the decisions, and the metric that is computed of them.

- `released`: the decisions that an observer reads from the messages of the round (`ReleasedDecisionAlgorithm`).
- `assembled`: the decision of the network, each learner's block put together (`BlockAlgorithm`).
- `assembled_mean`: the mean of the assembled decisions of the rounds 0..t.
"""

CHECKPOINTS = 25
"""Default number of checkpoints: the numbers of rounds after which a run is measured."""


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of records, in [0, 1]."""
    return metric in ("error", "released_error") or metric.endswith("accuracy")


def list_metrics(run: Run, data: PlacedData) -> tuple[str, ...]:
    """List the metrics that a run with these records can be measured by, in the order of `METRICS`."""
    impossible = {name for names, _ in _list_violations(run, data) for name in names}
    return tuple(name for name in METRICS if name not in impossible)


def _list_violations(run: Run, data: PlacedData) -> Iterator[tuple[list[str], str]]:
    """Yield the metrics that a run cannot be measured by, and what they need."""
    if not run.loss.is_convex:
        text = "regrets and tracking errors need a convex loss"
        yield _list_metrics_of(MINIMISER_METRICS | {"dynamic_regret"}), text
    if not _has_classes(data.test_labels):
        text = "accuracy, balanced_accuracy and error need held-out records, with labels that are whole numbers"
        yield _list_metrics_of(TEST_METRICS), text
    if not all(_has_classes(each.labels) for each in data.learners if len(each.labels)):
        text = "training and prequential accuracies need labels that are whole numbers"
        yield _list_metrics_of(TRAINING_METRICS | {"prequential_accuracy"}), text
    algorithm = run.algorithm
    if not isinstance(algorithm, ReleasedDecisionAlgorithm):
        text = f"released metrics need messages that are decisions, and those of {algorithm.name} are not"
        yield [name for name in METRICS if name.startswith("released")], text
    if not (isinstance(algorithm, BlockAlgorithm) and (algorithm.owned_mask.sum(axis=0) == 1).all()):
        text = f"assembled metrics need learners that own a block of the decision each, which {algorithm.name} does not have"
        yield [name for name in METRICS if name.startswith("assembled")], text


def _list_metrics_of(names: Collection[str]) -> list[str]:
    """List these metrics, of all kinds of decisions."""
    return [name for name in METRICS if _split(name)[1] in names]


def _split(name: str) -> tuple[str, str]:
    """Return the decisions that a metric measures, and the metric that is computed of them."""
    return OTHER_DECISIONS.get(name, ("own", name))


def select_metrics(run: Run, data: PlacedData, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the metrics to measure a run by.

    Args:
        run: the run.
        data: records of the run.
        names: chosen metrics (default: those of `DEFAULT_METRICS` that the run can be measured by).

    Raises:
        SpecError: no metric is chosen, or the run cannot be measured by one.
    """
    possible = list_metrics(run, data)
    if names is None:
        return tuple(name for name in DEFAULT_METRICS if name in possible)
    chosen = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    unknown = [str(name) for name in chosen if name not in possible]
    if not chosen or unknown:
        hints = [text for violating, text in _list_violations(run, data) if set(unknown) & set(violating)]
        if any(name.isdigit() for name in unknown):
            hints.append("numbers of rounds are checkpoints")
        raise SpecError(
            f"metrics must be of {', '.join(possible)}, got {', '.join(unknown) or 'none'}"
            f"{': ' * bool(hints)}{'; '.join(hints)}{'' if hints or not unknown else suggest_name(unknown[0], possible)}"
        )
    return chosen


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
        self._run, self._data = run, data
        self._names = select_metrics(run, data, metrics)
        self._at = frozenset(resolve_checkpoints(run.spec.rounds, checkpoints).tolist())
        self._records = NetworkRecords.of(run.loss, data)
        wanted: dict[str, set[str]] = {}
        for decisions, name in map(_split, self._names):
            wanted.setdefault(decisions, set()).add(name)
        self._by_decisions = {
            decisions: DecisionMetrics(run, data, self._records, frozenset(names))
            for decisions, names in wanted.items()
        }
        self._assembled_sum: FloatArray | float = 0.0
        self._counted, self._replicas = 0, 1
        self._measured: list[tuple[int, float]] = []

    def add_round(self, step: SimulatedRound) -> None:
        """Add a round; rounds come in order, each once."""
        self._replicas = step.decisions_before.shape[1]
        self._counted += self._records.having(step.t)
        is_checkpoint = step.t + 1 in self._at
        for decisions, measured in self._by_decisions.items():
            seen = self._replace_decisions(step, decisions)
            measured.add_round(seen)
            if is_checkpoint:
                measured.measure(seen, self._counted)
        if is_checkpoint:
            self._measured.append((step.t + 1, self._counted / len(step.decisions_before)))

    def _replace_decisions(self, step: SimulatedRound, decisions: str) -> SimulatedRound:
        """Return the round with other decisions than the learners' own; assembled ones are `(1, replicas, dim)`."""
        algorithm = self._run.algorithm
        if decisions == "released" and isinstance(algorithm, ReleasedDecisionAlgorithm):
            there = self._run.spec.participation.participant_mask(step.t)  # messages of others are not-a-number
            released = np.where(there[:, None, None], algorithm.released_decision(step.message), step.decisions_before)
            return replace(step, decisions_before=released, decisions_after=released)
        if decisions == "own" or not isinstance(algorithm, BlockAlgorithm):
            return step
        before, after = (
            np.where(algorithm.owned_mask[:, None], each, 0.0).sum(axis=0, keepdims=True)
            for each in (step.decisions_before, step.decisions_after)
        )
        if decisions == "assembled_mean":
            self._assembled_sum = self._assembled_sum + before
            before = after = self._assembled_sum / (step.t + 1)
        return replace(step, decisions_before=before, decisions_after=after)

    @property
    def has_measured(self) -> bool:
        """True after the first checkpoint."""
        return bool(self._measured)

    @property
    def curves(self) -> Curves:
        """Measurements so far."""
        rounds = np.array([rounds for rounds, _ in self._measured], dtype=np.int64)
        counted = np.array([counted for _, counted in self._measured])
        curves = {name: self._build_curve(name, rounds) for name in self._names if self._measured}
        return Curves(rounds, curves, counted)

    def _build_curve(self, name: str, rounds: IntArray) -> Curve:
        decisions, base = _split(name)
        if base == "privacy_loss":
            return self._build_privacy_curve(rounds)
        curve = self._by_decisions[decisions].build_curve(base)
        return Curve(curve.replicas, None) if decisions.startswith("assembled") else curve

    def _build_privacy_curve(self, rounds: IntArray) -> Curve:
        """Build the curve of cumulative pure epsilons, which is the same in all replicas."""
        run = self._run
        guarantees = [
            run.guarantee(i, np.diff(own.offsets)).truncate(run.participation(i).end)
            for i, own in enumerate(self._data.learners)
        ]
        learners = np.stack([each.cumulative_epsilon[rounds - 1] for each in guarantees], axis=1)
        network = learners.sum(axis=1) if run.has_shared_records else learners.max(axis=1)
        return Curve(np.tile(network[:, None], self._replicas), learners)


def _has_classes(labels: FloatArray) -> bool:
    """Return whether there are records, whose labels are classes and not measurements."""
    return len(labels) > 0 and np.array_equal(labels, np.rint(labels))
