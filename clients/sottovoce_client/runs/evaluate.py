"""What a run came to: accuracies, budgets, and the exact privacy loss of its capture."""

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
from sottovoce_core.budget.composition import group_record_losses, worst_case_record_losses
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
"""Gaps of a capture that are told."""


def summarise(run: Run, data: PlacedData, outcome: Outcome, logs: Path | None = None) -> RunSummary:
    """Gather everything that is shown and saved of a run.

    Args:
        run: as it was prepared.
        data: what its learners learned, and held-out records.
        outcome: what it came to.
        logs: the learners' state folder, where it is here: what they keep there says which live records they learned.
    """
    parts = _Parts()
    transcript, capture = parts.computed("what was captured", lambda: _overheard(run, outcome)) or (None, None)
    took_part = [run.participation(i).end > 0 for i in range(run.spec.n_learners)]
    predictions = [labels if part else None for labels, part in zip(outcome.predictions, took_part, strict=True)]
    unasked = [labels is None for labels in predictions]
    measured = (
        parts.computed("the accuracy of models", lambda: measure(run, data, outcome.statuses, transcript, unasked))
        or {}
    )
    for index, model in measured.items():
        predictions[index] = model.labels
    accuracies = [_accuracy(labels, data.test_labels) for labels in predictions]
    known: PreparedRun | None = PreparedRun(run, data)
    if run.spec.data.is_live:
        known = None
        if logs is not None and transcript is not None:
            known = parts.computed("which records came", lambda: _learned_by(logs, run, data, outcome.run_id))
    learners = tuple(
        _learner(run, known, outcome, transcript, i, accuracy, parts) for i, accuracy in enumerate(accuracies)
    )
    central = parts.computed("the accuracy of a central model", lambda: compute_central_accuracy(run, data))
    costs = (
        parts.computed(
            "what publishing accuracies costs", lambda: describe_publication_cost(run, outcome.statuses, measured)
        )
        or ""
    )
    learners = tuple(
        replace(each, test_curve=measured[i].curve) if i in measured else each for i, each in enumerate(learners)
    )
    return RunSummary(
        name=run.spec.name,
        run_id=outcome.run_id,
        data=run.spec.data.source,
        state=outcome.state,
        detail=outcome.detail,
        rounds=None if run.spec.is_unbounded else run.spec.rounds,
        seconds=outcome.seconds,
        n_features=data.n_features,
        test_records=len(data.test_labels),
        edges=run.network.edges,
        guarantee=_promise(run, outcome),
        learners=learners,
        disagreement=_disagreement(predictions),
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
        wiretap=_tapped(outcome),
        publication_cost=costs,
        failed_parts=tuple(parts.failed),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of a summary that are computed after the run, from its records and messages: the others stand without them.

    Attributes:
        failed: those that raised an error, and why.
    """

    failed: list[str] = field(default_factory=list)

    def computed(self, what: str, compute: Callable[[], _T]) -> _T | None:
        """A part; None where it cannot be computed."""
        try:
            return compute()
        except Exception as error:  # noqa: BLE001 - losses and algorithms, a user's own too, may raise anything
            self.failed.append(f"{what} could not be computed: {describe_reason(error)}")
            return None


def find_one_way_edges(network: Network) -> tuple[tuple[int, int], ...]:
    """Who speaks to whom and never hears it."""
    heard = np.any([network.mixing(t).neighbour_weights > 0 for t in range(network.horizon)], axis=0)
    return tuple((int(speaker), int(listener)) for speaker, listener in np.argwhere(heard.T & ~heard))


def compute_central_accuracy(run: Run, data: PlacedData) -> float | None:
    """Accuracy on the held-out records of a non-private model of all records together, same loss, same ridge.

    The plain hinge stands for the smoothed one, the logistic loss for its approximation and for a network. None without
    held-out records, and for a loss of one's own.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, RidgeLoss
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
        scores = RidgeLoss(alpha=strength / 2, fit_intercept=False).fit(features, labels).predict(test)
        return _accuracy(loss.classify(scores), data.test_labels)
    if isinstance(loss, HingeLoss | SmoothedHingeLoss):
        cost = 1 / max(strength, 1e-4 * len(labels))  # with less of a ridge, the solver gets nowhere
        model = LinearSVC(loss="hinge", C=cost, fit_intercept=False, max_iter=100_000, random_state=0)
    elif not isinstance(loss, LogisticLoss | PassGlmLoss | SoftmaxLoss | TorchLoss):
        return None
    else:
        # Of two classes, scikit-learn learns the difference of their vectors: half the ridge of two vectors.
        halved = isinstance(loss, SoftmaxLoss) and len(np.unique(labels)) == 2
        model = LogisticRegression(C=(2 if halved else 1) / strength, fit_intercept=False, max_iter=5_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # without a ridge there may be no minimiser
        model.fit(features, labels)
    return _accuracy(model.predict(test), data.test_labels)


def _promise(run: Run, outcome: Outcome) -> GuaranteeSummary:
    live = run.spec.data.is_live
    said = max((1, *(status.rounds_committed for status in outcome.statuses)))
    guarantee = promised_by(run.algorithm.accountant(0), said) if live else run.guarantee(0)
    return GuaranteeSummary(
        algorithm=run.algorithm.name,
        threat_model=guarantee.basis.threat_model.value,
        adjacency=guarantee.adjacency_description,
        accounting=guarantee.basis.mode,
        proof=guarantee.basis.proof,
        constants=tuple((name, each.value, each.enforcement) for name, each in guarantee.basis.constants.items()),
        shared=guarantee.has_shared_records,
        output=None if guarantee.output_epsilon is None else float(guarantee.output_epsilon[-1]),
    )


def _overheard(run: Run, outcome: Outcome) -> tuple[Transcript | None, CaptureSummary | None]:
    """The transcript of a capture; none when nothing was captured, or not even one whole round."""
    if (capture := _opened(outcome)) is None:
        return None, None
    try:
        transcript = capture.read_transcript(run.field_shapes, run.spec.n_learners, run.network)
    except (CaptureError, EquivocationError):  # the latter is noticed, too
        return None, None
    heard = next(iter(transcript.fields.values()))[:, 0, 0]
    messages, size = capture.count_messages()
    scales = [scale for t in range(transcript.rounds) if (scale := run.algorithm.noise_scale(0, t)) > 0]
    return transcript, CaptureSummary(
        mode=run.spec.capture,
        location=str(outcome.capture_location),
        messages=messages,
        bytes=size,
        sender=run.spec.names[0],
        sender_values=heard,
        first_scale=scales[0] if scales else 0.0,
        last_scale=scales[-1] if scales else 0.0,
        staleness=measure_staleness(transcript.fields[USED_ROUNDS_FIELD]) if run.has_bounded_staleness else None,
    )


def _opened(outcome: Outcome) -> Capture | None:
    """The capture of a run; None where there is none, or none that can be read here: it may lie on the eavesdropper's host."""
    try:
        return None if outcome.capture_location is None else open_capture(outcome.capture_location)
    except CaptureError:
        return None


def _tapped(outcome: Outcome) -> WiretapSummary | None:
    """What a wiretap noted; None where there was none, or its capture cannot be read here."""
    capture = _opened(outcome)
    counts = None if capture is None else capture.ciphertext
    return (
        None
        if counts is None
        else WiretapSummary(str(outcome.capture_location), counts.connections, counts.records, counts.bytes)
    )


def read_detections(outcome: Outcome) -> DetectionSummary | None:
    """What the eavesdropper noticed in a run; None where there is no capture that can be read here."""
    if (capture := _opened(outcome)) is None or "detection_count" not in (facts := capture.metadata):
        return None
    first = tuple(str(finding.get("text")) for finding in facts.get("detections", ()) if isinstance(finding, dict))
    return DetectionSummary(facts["detection_count"], first, facts.get("unchecked_reason"))


def describe_missing_traffic(outcome: Outcome) -> Iterator[str]:
    """What the capture of a run lacks, a line on each."""
    if outcome.capture_error:
        yield f"The capture is not complete: {outcome.capture_error}"
    gaps = list_capture_gaps(outcome)
    if gaps and _tapped(outcome) is not None:
        yield "The wiretap was started again in the run: the last that it noted before may be missing"
    elif gaps:
        more = f"; and {len(gaps) - _MAX_NAMED_GAPS} more" if len(gaps) > _MAX_NAMED_GAPS else ""
        yield f"The capture has {pluralize(len(gaps), 'gap')}: {'; '.join(gaps[:_MAX_NAMED_GAPS])}{more}"


def list_capture_gaps(outcome: Outcome) -> tuple[str, ...]:
    """What is missing in the middle of a capture, in words; nothing where there is none that can be read here."""
    if (capture := _opened(outcome)) is None:
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


def _learner(
    run: Run,
    known: PreparedRun | None,
    outcome: Outcome,
    transcript: Transcript | None,
    index: int,
    accuracy: float | None,
    parts: _Parts,
) -> LearnerSummary:
    """One learner.

    Args:
        run: as it was prepared.
        known: the same, with what was learned; None: nobody knows that here.
        outcome, transcript: of the run.
        index: the learner's.
        accuracy: on the held-out records.
        parts: of the summary.
    """
    status, live = outcome.statuses[index], run.spec.data.is_live
    said, learned = status.rounds_committed, status.records - status.records_waiting
    own = None if known is None else known.data.learners[index]
    spent = _as_charged(run, outcome, index) if live or own is None else _planned(run, own, index)
    swaps: tuple[ObservedPrivacyLoss | None, ObservedPrivacyLoss | None] = (None, None)
    heard = 0 if transcript is None else transcript.count_complete_rounds(index, run.participation(index))
    if known is not None and own is not None and transcript is not None and heard and len(own.order):
        said_until = transcript.truncate(min(heard, own.rounds))
        whose = f"the privacy loss of the messages of {run.spec.names[index]}"
        swaps = parts.computed(whose, lambda: _swaps(known, said_until, index, spent.event)) or swaps
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
        epsilon_spent=status.epsilon_spent,
        epsilon_limit=status.epsilon_limit,
        epsilon_paper=_last(spent.paper, said),
        epsilon_record_use=_last(spent.event, said),
        epsilon_record=_last(spent.record, said),
        epsilon_infinite_horizon=spent.infinite_horizon,
        epsilon_paper_curve=spent.paper,
        epsilon_record_use_curve=spent.event,
        epsilon_record_curve=spent.record,
        record_use_loss=swaps[0],
        record_loss=swaps[1],
        records_waiting=status.records_waiting,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spent:
    """Cumulative epsilon of a learner, `(rounds,)`: by the paper, of one event, and of the dearest record in all of its uses."""

    paper: FloatArray
    event: FloatArray
    record: FloatArray
    infinite_horizon: float


def _planned(run: Run, own: LearnerData, index: int) -> _Spent:
    """By the records of all planned rounds."""
    event = run.guarantee(index, np.diff(own.offsets))
    losses = group_record_losses(run.algorithm.accountant(index), own, run.participation(index).end)
    record = as_floats(np.cumsum(worst_case_record_losses(losses, event.round_losses)))
    return _Spent(event.paper_epsilon, event.cumulative_epsilon, record, event.infinite_horizon_epsilon)


def _as_charged(run: Run, outcome: Outcome, index: int) -> _Spent:
    """By what a learner of live records said that it had spent, where it said so, and between that on a line.

    Which records came, it alone knows; each is learned once.
    """
    last = outcome.statuses[index]
    looks = sorted({(look.rounds[index], look.epsilon[index]) for look in outcome.progress})
    done, spent = zip(*looks, (last.rounds_committed, last.epsilon_spent), strict=True)
    rounds = max(1, last.rounds_committed)
    charged = as_floats(np.maximum.accumulate(np.interp(np.arange(1, rounds + 1), done, spent)))
    return _Spent(run.algorithm.accountant(index).paper_epsilon(rounds), charged, charged, math.inf)


def _swaps(
    known: PreparedRun, transcript: Transcript, index: int, spent: FloatArray
) -> tuple[ObservedPrivacyLoss | None, ObservedPrivacyLoss | None]:
    """The most telling replacements of one use of a record, and of all uses of one."""
    run, own = known.run, known.data.learners[index]
    counts, uses = np.diff(own.offsets), own.uses_by_round(int(own.order[0]))
    event = run.guarantee(index, counts).cumulative_epsilon if run.spec.data.is_live else spent
    every = run.guarantee(index, counts, uses).cumulative_epsilon
    return (
        _swap(run, transcript, known.data, index, event, every_use=False),
        _swap(run, transcript, known.data, index, every, every_use=True),
    )


def _swap(
    run: Run, transcript: Transcript, data: PlacedData, learner: int, claimed: FloatArray, *, every_use: bool
) -> ObservedPrivacyLoss | None:
    found = compute_worst_losses(run, transcript, data, learner, every_use=every_use)
    if found is None:
        return None
    by_round = np.cumsum(found.realised_losses[:, 0, 0])
    return ObservedPrivacyLoss(
        abs(float(by_round[-1])), float(found.supremum[0, 0]), float(claimed[transcript.rounds - 1]), by_round
    )


def _last(curve: FloatArray, rounds: int) -> float:
    return float(curve[rounds - 1]) if rounds else 0.0


def _accuracy(predicted: FloatArray | None, labels: FloatArray) -> float | None:
    return None if predicted is None else float(np.mean(predicted == labels))


def _disagreement(predictions: Sequence[FloatArray | None]) -> float | None:
    """Largest share of records on which two learners differ."""
    known = [labels for labels in predictions if labels is not None]
    if len(known) < 2:
        return None
    return max(float(np.mean(a != b)) for k, a in enumerate(known) for b in known[:k])


MAX_CURVE_POINTS = 64
"""Rounds after which a model is looked at, evenly over the run, or all of a shorter one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """What a learner's model says of the held-out records.

    Attributes:
        labels: `(test records,)`, after the last round, or the one before.
        curve: rounds, and the accuracy after them.
    """

    labels: FloatArray
    curve: tuple[tuple[int, float], ...]


def measure(
    run: Run,
    data: PlacedData,
    statuses: Sequence[LearnerStatus],
    transcript: Transcript | None,
    wanted: Sequence[bool],
) -> dict[int, _Measured]:
    """Of those learners whose models follow from what is here, by index.

    Args:
        run: that was overheard.
        data: what its learners learned, and held-out records. Live ones are with their learners alone.
        statuses: how far each learner is.
        transcript: what they said; None: nobody knows it here.
        wanted: for each learner, whether it is.
    """
    if transcript is None or run.spec.data.is_live or not len(data.test_labels):
        return {}
    indices = [i for i, each in enumerate(wanted) if each and statuses[i].rounds_done]
    found = {i: _measured(run, data, transcript, i, statuses[i].rounds_done) for i in indices}
    return {i: each for i, each in found.items() if each is not None}


def _measured(run: Run, data: PlacedData, transcript: Transcript, index: int, done: int) -> _Measured | None:
    """None: what is known of its models ends before the last round but one."""
    looks = {int(k) for k in np.rint(np.linspace(0, done - 1, min(done, MAX_CURVE_POINTS)))} | {done - 2}
    curve, labels, rounds = list[tuple[int, float]](), None, 0
    for k, machine in enumerate(iterate_replay(run, transcript, index, data.learners[index])):
        rounds = k + 1
        if k in looks:
            labels = run.loss.classify(run.loss.predict(machine.model[0, 0], data.test_features))
            curve.append((rounds, float(np.mean(labels == data.test_labels))))
    return None if labels is None or rounds < done - 1 else _Measured(labels, tuple(curve))


def describe_publication_cost(run: Run, statuses: Sequence[LearnerStatus], measured: Mapping[int, _Measured]) -> str:
    """What publishing it costs: of the model that costs most, in words; empty where nothing was measured."""
    told = [
        assess_publication(
            run,
            i,
            each.curve[-1][0],
            statuses[i].epsilon_spent,
            has_private_noise=not statuses[i].noise_is_not_private,
        )
        for i, each in measured.items()
    ]
    return max(told, key=lambda each: (not each.is_protected, each.epsilon)).text if told else ""


MAX_ROUNDS_IN_MEMORY = 100_000
"""Rounds whose records are held in memory."""


def _learned_by(logs: Path, run: Run, data: PlacedData, run_id: str) -> PreparedRun | None:
    """A run of live records as if it had been planned: what its learners have learned, by their logs.

    Args:
        logs: their state folder.
        run: as it was prepared.
        data: its held-out records.
        run_id: its number.

    Returns:
        The rounds that all of them have learned; None where a log was not kept, or there are more than `MOST_ROUNDS`.
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
    learners = tuple(_as_data([each.batch(t) for t in range(rounds)]) for each in found)
    return PreparedRun(
        build_run(spec.model_copy(update={"rounds": rounds}), n_features), replace(data, learners=learners)
    )


def _as_data(batches: Sequence[Batch]) -> LearnerData:
    features, labels = (
        np.concatenate(parts) for parts in zip(*((each.features, each.labels) for each in batches), strict=True)
    )
    return LearnerData(features, labels, np.arange(len(labels)), np.cumsum([0, *(each.size for each in batches)]))
