"""Evaluation of a run: accuracies, budgets, and the exact privacy loss of its capture."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import numpy as np

from sottovoce_client.formatting import describe_offline_interval, pluralize
from sottovoce_client.runs.run_client import Outcome, has_left
from sottovoce_client.runs.summary import (
    CaptureSummary,
    DetectionSummary,
    GuaranteeSummary,
    LearnerSummary,
    ObservedPrivacyLoss,
    RunSummary,
    WiretapSummary,
)
from sottovoce_core.arrays import Batch, FloatArray, as_floats
from sottovoce_core.auditing.worst_case_search import compute_worst_losses
from sottovoce_core.budget.cost import LearnerCost, PrivacyUnit, combine_costs
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import CaptureError, EquivocationError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.losses.linear import (
    HingeLoss,
    LogisticLoss,
    PassGlmLoss,
    SmoothedHingeLoss,
    SoftmaxLoss,
    SquaredLoss,
)
from sottovoce_core.losses.torch import TorchLoss
from sottovoce_core.network.network import Network
from sottovoce_core.privacy.accountant import compute_guarantee as promised_by
from sottovoce_core.runs.participation import USED_ROUNDS_FIELD, measure_staleness
from sottovoce_core.runs.replay import iterate_replay
from sottovoce_core.runs.run import Run, assess_publication, build_run
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import dump_spec
from sottovoce_core.text import format_learner_name
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_learner.storage.logged_records import LoggedRecords, find_learners
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.logs import describe_reason

_T = TypeVar("_T")
_MAX_NAMED_GAPS = 10
"""Maximum number of capture gaps that are named."""


def summarise(run: Run, data: PlacedData, outcome: Outcome, logs: Path | None = None) -> RunSummary:
    """Compute everything that is shown and saved of a run.

    Args:
        run: Run as it was prepared.
        data: Records that its learners learned, and held-out records.
        outcome: Outcome of the run.
        logs: State folder of the learners, if it is on this machine; their logs give the learned live records.
    """
    parts = _Parts()
    transcript, capture = parts.compute("the summary of the capture", lambda: _read_capture(run, outcome)) or (
        None,
        None,
    )
    participated = [run.participation(i).end > 0 for i in range(run.spec.n_learners)]
    predictions = [
        labels if participates else None for labels, participates in zip(outcome.predictions, participated, strict=True)
    ]
    missing = [labels is None for labels in predictions]
    measured = (
        parts.compute("the accuracy of models", lambda: measure(run, data, outcome.statuses, transcript, missing)) or {}
    )
    for index, model in measured.items():
        predictions[index] = model.labels
    accuracies = [_accuracy(labels, data.test_labels) for labels in predictions]
    known: PreparedRun | None = PreparedRun(run, data)
    if run.spec.data.is_live:
        known = None
        if logs is not None and transcript is not None:
            known = parts.compute("the learned records", lambda: _load_learned_run(logs, run, data, outcome.run_id))
    learners = tuple(
        _summarise_learner(run, known, outcome, transcript, i, accuracy, parts) for i, accuracy in enumerate(accuracies)
    )
    central = parts.compute("the accuracy of a central model", lambda: compute_central_accuracy(run, data))
    costs = (
        parts.compute(
            "the cost of publishing accuracies", lambda: describe_publication_cost(run, outcome.statuses, measured)
        )
        or ""
    )
    learners = tuple(
        replace(each, test_curve=measured[i].curve) if i in measured else each for i, each in enumerate(learners)
    )
    return RunSummary(
        name=run.spec.name,
        run_id=outcome.run_id,
        data=str(run.spec.data.source),
        state=outcome.state,
        detail=outcome.detail,
        rounds=None if run.spec.is_unbounded else run.spec.rounds,
        seconds=outcome.seconds,
        n_features=data.n_features,
        test_records=len(data.test_labels),
        edges=run.network.edges,
        guarantee=_summarise_guarantee(run, data, outcome),
        learners=learners,
        disagreement=_compute_disagreement(predictions),
        central_accuracy=central,
        capture=capture,
        warnings=tuple((finding.code, finding.text) for finding in run.warnings),
        spec_yaml=dump_spec(run.spec),
        version=version("sottovoce"),
        started_at=(datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=outcome.seconds)).isoformat(
            timespec="seconds"
        ),
        progress=outcome.progress,
        private_noise=not any(status.noise_is_not_private for status in outcome.statuses),
        detections=read_detections(outcome),
        one_way=find_one_way_edges(run.network),
        offline_intervals=tuple(map(describe_offline_interval, run.spec.offline_intervals)),
        missing_traffic=tuple(describe_missing_traffic(outcome)),
        violations=outcome.violations,
        wiretap=_read_wiretap(outcome),
        publication_cost=costs,
        failed_parts=tuple(parts.failed),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of a summary that are computed after the run from records and messages; a failed part does not affect the others.

    Attributes:
        failed: Parts that raised an error, and why.
    """

    failed: list[str] = field(default_factory=list)

    def compute(self, what: str, function: Callable[[], _T]) -> _T | None:
        """Compute a part; None if it fails."""
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - losses and algorithms, also user-defined ones, may raise any error
            self.failed.append(f"{what} could not be computed: {describe_reason(error)}")
            return None


def find_one_way_edges(network: Network) -> tuple[tuple[int, int], ...]:
    """Find the pairs of a sender and a receiver that are connected in this direction alone."""
    is_receiving = np.any([network.mixing(t).neighbour_weights > 0 for t in range(network.horizon)], axis=0)
    return tuple((int(sender), int(receiver)) for sender, receiver in np.argwhere(is_receiving.T & ~is_receiving))


def compute_central_accuracy(run: Run, data: PlacedData) -> float | None:
    """Compute the accuracy on held-out records of a non-private model of all records together, with the same loss and ridge.

    The plain hinge loss replaces the smoothed one, the logistic loss replaces its approximation and a network. None without
    held-out records, and for a user-defined loss.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.svm import LinearSVC

    if not len(data.test_labels):
        return None
    loss = run.loss
    features = np.concatenate([each.features for each in data.learners])
    labels = np.concatenate([each.labels for each in data.learners])
    features, labels = loss.enforce_bounds(features, labels)
    test, _ = loss.enforce_bounds(data.test_features, np.zeros(len(data.test_labels)))
    strength = max(loss.ridge, 1e-9) * len(labels)
    if isinstance(loss, SquaredLoss):
        scores = Ridge(alpha=strength / 2, fit_intercept=False).fit(features, labels).predict(test)
        return _accuracy(loss.classify(scores), data.test_labels)
    if isinstance(loss, HingeLoss | SmoothedHingeLoss):
        cost = 1 / max(strength, 1e-4 * len(labels))  # with a smaller ridge, the solver does not converge
        model = LinearSVC(loss="hinge", C=cost, fit_intercept=False, max_iter=100_000, random_state=0)
    elif not isinstance(loss, LogisticLoss | PassGlmLoss | SoftmaxLoss | TorchLoss):
        return None
    else:
        # With two classes, scikit-learn learns the difference of their vectors: half the ridge of two vectors.
        halved = isinstance(loss, SoftmaxLoss) and len(np.unique(labels)) == 2
        model = LogisticRegression(C=(2 if halved else 1) / strength, fit_intercept=False, max_iter=5_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # without a ridge there may be no minimiser
        model.fit(features, labels)
    return _accuracy(model.predict(test), data.test_labels)


def _summarise_guarantee(run: Run, data: PlacedData, outcome: Outcome) -> GuaranteeSummary:
    live, delta = run.spec.data.is_live, run.spec.privacy.delta
    rounds = max((1, *(status.rounds_committed for status in outcome.statuses)))
    guarantee = promised_by(run.algorithm.accountant(0), rounds) if live else run.guarantee(0)
    return GuaranteeSummary(
        algorithm=run.algorithm.name,
        threat_model=guarantee.basis.threat_model.value,
        adjacency=guarantee.adjacency_description,
        accounting=guarantee.basis.mode,
        proof=guarantee.basis.proof,
        constants=tuple((name, each.value, each.enforcement) for name, each in guarantee.basis.constants.items()),
        shared=run.has_shared_records,
        output=None if guarantee.output_epsilon is None else float(guarantee.output_epsilon[-1]),
        delta=delta,
        record_use_at_delta=_compute_epsilon_at_delta(run, data, outcome, "record_use") if delta else None,
        record_at_delta=_compute_epsilon_at_delta(run, data, outcome, "record") if delta else None,
    )


def _compute_epsilon_at_delta(run: Run, data: PlacedData, outcome: Outcome, unit: PrivacyUnit) -> float | None:
    """Compute epsilon of the committed messages at the spec's delta.

    Of live records, of which each is learned once, it is what the learners charged; None if that is at another delta.
    """
    delta, statuses = run.spec.privacy.delta, outcome.statuses
    if run.spec.data.is_live:
        return max(each.epsilon_charged for each in statuses) if {each.delta for each in statuses} == {delta} else None
    costs = [
        LearnerCost(run, i, own, status.rounds_committed)
        for i, (own, status) in enumerate(zip(data.learners, statuses, strict=True))
    ]
    return combine_costs(costs, unit, delta, has_distributions=False)


def _read_capture(run: Run, outcome: Outcome) -> tuple[Transcript | None, CaptureSummary | None]:
    """Read the transcript of a capture; None if there is no capture, or no complete round in it."""
    if (capture := _open(outcome)) is None:
        return None, None
    try:
        transcript = capture.read_transcript(run.field_shapes, run.spec.n_learners, run.network)
    except (CaptureError, EquivocationError):  # the latter is also detected online
        return None, None
    values = next(iter(transcript.fields.values()))[:, 0, 0]
    messages, size = capture.count_messages()
    scales = [scale for t in range(transcript.rounds) if (scale := run.algorithm.noise_scale(0, t)) > 0]
    return transcript, CaptureSummary(
        mode=run.spec.capture,
        location=str(outcome.capture_location),
        messages=messages,
        bytes=size,
        sender=run.spec.names[0],
        sender_values=values,
        first_scale=scales[0] if scales else 0.0,
        last_scale=scales[-1] if scales else 0.0,
        staleness=measure_staleness(transcript.fields[USED_ROUNDS_FIELD]) if run.has_bounded_staleness else None,
    )


def _open(outcome: Outcome) -> Capture | None:
    """Open the capture of a run; None if there is none, or none readable here: it may be on the eavesdropper's host."""
    try:
        return None if outcome.capture_location is None else open_capture(outcome.capture_location)
    except CaptureError:
        return None


def _read_wiretap(outcome: Outcome) -> WiretapSummary | None:
    """Read the counts of a wiretap; None if there was none, or its capture cannot be read here."""
    capture = _open(outcome)
    counts = None if capture is None else capture.ciphertext
    return (
        None
        if counts is None
        else WiretapSummary(str(outcome.capture_location), counts.connections, counts.records, counts.bytes)
    )


def read_detections(outcome: Outcome) -> DetectionSummary | None:
    """Read the detections of the eavesdropper; None without a capture that can be read here."""
    if (capture := _open(outcome)) is None or "detection_count" not in (facts := capture.metadata):
        return None
    first = tuple(str(finding.get("text")) for finding in facts.get("detections", ()) if isinstance(finding, dict))
    return DetectionSummary(facts["detection_count"], first, facts.get("unchecked_reason"))


def describe_missing_traffic(outcome: Outcome) -> Iterator[str]:
    """Yield one line for each part that the capture lacks."""
    if outcome.capture_error:
        yield f"The capture is not complete: {outcome.capture_error}"
    gaps = list_capture_gaps(outcome)
    if gaps and _read_wiretap(outcome) is not None:
        yield "The wiretap was restarted during the run: its last records before that may be missing"
    elif gaps:
        more = f"; and {len(gaps) - _MAX_NAMED_GAPS} more" if len(gaps) > _MAX_NAMED_GAPS else ""
        yield f"The capture has {pluralize(len(gaps), 'gap')}: {'; '.join(gaps[:_MAX_NAMED_GAPS])}{more}"


def list_capture_gaps(outcome: Outcome) -> tuple[str, ...]:
    """List the gaps inside a capture, in words; empty without a capture that can be read here."""
    if (capture := _open(outcome)) is None:
        return ()
    gaps = [
        gap
        for gap in capture.metadata.get("gaps", ())
        if isinstance(gap, dict) and isinstance(gap.get("to"), int | None) and isinstance(gap.get("sender"), int)
    ]
    return tuple(
        f"{format_learner_name(capture.names, gap['sender'])}, rounds {gap.get('from')} to "
        f"{'the end' if gap.get('to') is None else gap['to'] - 1}"
        for gap in gaps
    )


def _summarise_learner(
    run: Run,
    known: PreparedRun | None,
    outcome: Outcome,
    transcript: Transcript | None,
    index: int,
    accuracy: float | None,
    parts: _Parts,
) -> LearnerSummary:
    """Summarise one learner.

    Args:
        run: Run as it was prepared.
        known: The run with the learned records; None: they are not available here.
        outcome, transcript: Outcome and messages of the run.
        index: Index of the learner.
        accuracy: Accuracy on the held-out records.
        parts: Parts of the summary.
    """
    status, live = outcome.statuses[index], run.spec.data.is_live
    sent, learned = status.rounds_committed, status.records - status.records_waiting
    own = None if known is None else known.data.learners[index]
    spent = _read_charged_cost(run, outcome, index) if live or own is None else _compute_planned_cost(run, own, index)
    losses: tuple[ObservedPrivacyLoss | None, ObservedPrivacyLoss | None] = (None, None)
    complete = 0 if transcript is None else transcript.count_complete_rounds(index, run.participation(index))
    if known is not None and own is not None and transcript is not None and complete and len(own.order):
        messages = transcript.truncate(min(complete, own.rounds))
        part = f"the privacy loss of the messages of {run.spec.names[index]}"
        losses = parts.compute(part, lambda: _compute_losses(known, messages, index, spent.record_use)) or losses
    return LearnerSummary(
        name=run.spec.names[index],
        records=learned if live or own is None else len(np.unique(own.order)),
        max_uses=min(learned, 1) if live or own is None else int(own.uses().max(initial=0)),
        rounds_done=status.rounds_done,
        has_left=has_left(run.spec, index),
        test_accuracy=accuracy,
        prequential_accuracy=status.prequential_accuracy,
        messages=status.messages_sent,
        bytes=status.bytes_sent,
        epsilon_spent=status.epsilon_charged,
        delta=status.delta,
        epsilon_limit=status.epsilon_limit,
        epsilon_paper=_last(spent.paper, sent),
        epsilon_record_use=_last(spent.record_use, sent),
        epsilon_record=_last(spent.record, sent),
        epsilon_infinite_horizon=spent.infinite_horizon,
        epsilon_paper_curve=spent.paper,
        epsilon_record_use_curve=spent.record_use,
        epsilon_record_curve=spent.record,
        record_use_loss=losses[0],
        record_loss=losses[1],
        records_waiting=status.records_waiting,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Cost:
    """Cumulative epsilon of a learner, `(rounds,)`: paper's formula, one record use, most expensive record in all its uses."""

    paper: FloatArray
    record_use: FloatArray
    record: FloatArray
    infinite_horizon: float


def _compute_planned_cost(run: Run, own: LearnerData, index: int) -> _Cost:
    """Compute the cost from the records of all planned rounds."""
    cost = LearnerCost(run, index, own)
    guarantee, record = cost.guarantee, as_floats(np.cumsum(cost.losses("record")))
    return _Cost(guarantee.paper_epsilon, guarantee.cumulative_epsilon, record, guarantee.infinite_horizon_epsilon)


def _read_charged_cost(run: Run, outcome: Outcome, index: int) -> _Cost:
    """Return the cost that a learner of live records reported, linearly interpolated between its reports.

    The learner alone knows its records; each is learned once.
    """
    last = outcome.statuses[index]
    reports = sorted({(each.rounds[index], each.epsilon[index]) for each in outcome.progress})
    done, spent = zip(*reports, (last.rounds_committed, last.epsilon_spent), strict=True)
    rounds = max(1, last.rounds_committed)
    charged = as_floats(np.maximum.accumulate(np.interp(np.arange(1, rounds + 1), done, spent)))
    return _Cost(run.algorithm.accountant(index).paper_epsilon(rounds), charged, charged, math.inf)


def _compute_losses(
    known: PreparedRun, transcript: Transcript, index: int, spent: FloatArray
) -> tuple[ObservedPrivacyLoss | None, ObservedPrivacyLoss | None]:
    """Compute the loss under the worst replacement of one use of a record, and of all uses of one."""
    run, own = known.run, known.data.learners[index]
    counts, uses = np.diff(own.offsets), own.uses_by_round(int(own.order[0]))
    record_use = run.guarantee(index, counts).cumulative_epsilon if run.spec.data.is_live else spent
    every = run.guarantee(index, counts, uses).cumulative_epsilon
    return (
        _compute_loss(run, transcript, known.data, index, record_use, every_use=False),
        _compute_loss(run, transcript, known.data, index, every, every_use=True),
    )


def _compute_loss(
    run: Run, transcript: Transcript, data: PlacedData, learner: int, claimed: FloatArray, *, every_use: bool
) -> ObservedPrivacyLoss | None:
    found = compute_worst_losses(run, transcript, data, learner, every_use=every_use)
    if found is None:
        return None
    cumulative = np.cumsum(found.realised_losses[:, 0, 0])
    return ObservedPrivacyLoss(
        abs(float(cumulative[-1])), float(found.supremum[0, 0]), float(claimed[transcript.rounds - 1]), cumulative
    )


def _last(curve: FloatArray, rounds: int) -> float:
    return float(curve[rounds - 1]) if rounds else 0.0


def _accuracy(predicted: FloatArray | None, labels: FloatArray) -> float | None:
    return None if predicted is None else float(np.mean(predicted == labels))


def _compute_disagreement(predictions: Sequence[FloatArray | None]) -> float | None:
    """Return the largest share of records on which two learners predict different labels."""
    known = [labels for labels in predictions if labels is not None]
    if len(known) < 2:
        return None
    return max(float(np.mean(a != b)) for k, a in enumerate(known) for b in known[:k])


MAX_CURVE_POINTS = 64
"""Maximum number of rounds after which a model is measured, evenly spaced over the run."""


@dataclass(frozen=True, slots=True, eq=False)
class _Measurement:
    """Predictions of a learner's model on the held-out records.

    Attributes:
        labels: `(test records,)` labels after the last round, or the one before.
        curve: Pairs of a round and the accuracy after it.
    """

    labels: FloatArray
    curve: tuple[tuple[int, float], ...]


def measure(
    run: Run,
    data: PlacedData,
    statuses: Sequence[LearnerStatus],
    transcript: Transcript | None,
    wanted: Sequence[bool],
) -> dict[int, _Measurement]:
    """Measure the learners whose models follow from the capture and the records; return the measurements by index.

    Args:
        run: Captured run.
        data: Records that its learners learned, and held-out records. Live ones are known to their learners alone.
        statuses: Statuses of the learners.
        transcript: Messages; None: not available here.
        wanted: Whether each learner is to be measured.
    """
    if transcript is None or run.spec.data.is_live or not len(data.test_labels):
        return {}
    indices = [i for i, each in enumerate(wanted) if each and statuses[i].rounds_done]
    found = {i: _measure_learner(run, data, transcript, i, statuses[i].rounds_done) for i in indices}
    return {i: each for i, each in found.items() if each is not None}


def _measure_learner(run: Run, data: PlacedData, transcript: Transcript, index: int, done: int) -> _Measurement | None:
    """Measure one learner; None if its known models end before the last round but one."""
    checkpoints = {int(k) for k in np.rint(np.linspace(0, done - 1, min(done, MAX_CURVE_POINTS)))} | {done - 2}
    curve, labels, rounds = list[tuple[int, float]](), None, 0
    for k, machine in enumerate(iterate_replay(run, transcript, index, data.learners[index])):
        rounds = k + 1
        if k in checkpoints:
            labels = run.loss.classify(run.loss.predict(machine.model[0, 0], data.test_features))
            curve.append((rounds, float(np.mean(labels == data.test_labels))))
    return None if labels is None or rounds < done - 1 else _Measurement(labels, tuple(curve))


def describe_publication_cost(run: Run, statuses: Sequence[LearnerStatus], measured: Mapping[int, _Measurement]) -> str:
    """Describe the cost of publishing measured accuracies, of the model that costs most; empty if none was measured."""
    costs = [
        assess_publication(
            run,
            i,
            each.curve[-1][0],
            statuses[i].epsilon_spent,
            has_private_noise=not statuses[i].noise_is_not_private,
        )
        for i, each in measured.items()
    ]
    return max(costs, key=lambda each: (not each.is_protected, each.epsilon)).text if costs else ""


MAX_ROUNDS_IN_MEMORY = 100_000
"""Maximum number of rounds whose records are held in memory."""


def _load_learned_run(logs: Path, run: Run, data: PlacedData, run_id: str) -> PreparedRun | None:
    """Load a run of live records as if it had been planned, with the records from the learners' logs.

    Args:
        logs: State folder of the learners.
        run: Run as it was prepared.
        data: Held-out records of the run.
        run_id: Id of the run.

    Returns:
        Rounds that all of them have learned; None if a log was not kept, or there are more than `MAX_ROUNDS_IN_MEMORY`.
    """
    spec, n_features = run.spec, data.n_features
    if set(spec.names) - set(find_learners(logs, run_id)):
        return None
    found = [LoggedRecords(logs, name, run_id, spec, n_features) for name in spec.names]
    for each in found:
        each.refresh()
    rounds = min(each.known_rounds for each in found)
    if not 0 < rounds <= MAX_ROUNDS_IN_MEMORY:
        return None
    learners = tuple(_join_batches([each.batch(t) for t in range(rounds)]) for each in found)
    return PreparedRun(
        build_run(spec.model_copy(update={"rounds": rounds}), n_features), replace(data, learners=learners)
    )


def _join_batches(batches: Sequence[Batch]) -> LearnerData:
    features, labels = (
        np.concatenate(parts) for parts in zip(*((each.features, each.labels) for each in batches), strict=True)
    )
    return LearnerData(features, labels, np.arange(len(labels)), np.cumsum([0, *(each.size for each in batches)]))
