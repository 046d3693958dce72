"""Warnings before a run begins: its budget or its records end early, or its labels reveal little."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sottovoce_core.algorithms.run_context import RunWarning
from sottovoce_core.arrays import FloatArray
from sottovoce_core.data.dataset import Dataset
from sottovoce_core.data.encoding import describe_similar_labels
from sottovoce_core.data.scaling import Scale
from sottovoce_core.data.schedule import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.privacy.loss import EpsilonLimit
from sottovoce_core.runs.run import Run, build_run, find_first_round_above, format_above
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import abbreviate_names

_MAX_IDLE_SHARE = 0.01
"""Share of the rounds that a learner may lack records at the end: evenly split records differ by so much."""
_MAX_ROW_RATIO = 20.0
"""Ratio of the norm of a scaled record to the median one, from which on its largest feature is taken for an artefact."""
_MAX_NAMED_FEATURES = 3
"""Maximum number of features that a warning names."""
BUDGET_ENDS = "BUDGET_ENDS"
"""Code of the warning that a budget ends before the run."""


def find_budget_warnings(run: Run, data: PlacedData) -> Iterator[RunWarning]:
    """Warn about learners that stop sending before the last planned round, because `privacy.budget` allows no more.

    Args:
        run: the run as planned.
        data: its records; only their numbers by round matter.
    """
    spec = run.spec
    if spec.privacy.budget is None or spec.is_unbounded:
        return
    budgets = [spec.get_budget(i) or math.inf for i in range(spec.n_learners)]
    spending = [_compute_spending(run, data, i) for i in range(spec.n_learners)]
    found = [find_first_round_above(each, limit) for each, limit in zip(spending, budgets, strict=True)]
    first = {i: t for i, t in enumerate(found) if t is not None}
    if not first:
        return
    stops = [f"{spec.names[i]} in round {t}" for i, t in sorted(first.items(), key=lambda each: each[1])]
    rounds, totals = min(first.values()), [float(each[-1]) for each in spending]
    largest = max(first, key=lambda i: totals[i])
    cost = format_above(totals[largest], budgets[largest])
    at_delta = f" (at delta {spec.privacy.delta:g})" if spec.privacy.delta else ""
    fits = [f"rounds: {rounds}"] if _is_within_budget(run, data, rounds) else []
    if all(map(math.isfinite, totals)):
        fits.append(f"privacy.budget: {_suggest_budget(spec, totals)}")
    yield RunWarning(
        BUDGET_ENDS,
        f"privacy.budget {budgets[largest]:g} is below what {spec.rounds} rounds cost, epsilon {cost}{at_delta} at "
        f"{spec.names[largest]}: {abbreviate_names(stops)} (rounds count from 0) would exceed it and sends no message; "
        f"a run of services ends there, a simulation goes on; what fits: {', '.join([*fits, 'or more noise'])} "
        "(sottovoce budget --target)",
    )


def _compute_spending(run: Run, data: PlacedData, learner: int) -> FloatArray:
    """Return the epsilon `(rounds,)` that counts against the budget after each message until the learner's last round."""
    own, limit = data.learners[learner], run.budget(learner) or EpsilonLimit(math.inf)
    if run.spec.data.is_live and not own.offsets[-1]:  # the number of records is still unknown
        return run.algorithm.accountant(learner).spending(run.planned_counts(learner), limit)
    return run.algorithm.accountant(learner).spending(np.diff(own.offsets), limit)[: run.participation(learner).end]


def _is_within_budget(run: Run, data: PlacedData, rounds: int) -> bool:
    """Return whether the first rounds alone keep the budget: noise may depend on the number of planned rounds."""
    if rounds < 1:
        return False
    try:
        shorter = build_run(run.spec.model_copy(update={"rounds": rounds}), data.n_features)
    except SpecError:
        return False
    cut = replace(
        data, learners=tuple(replace(own, order=own.order, offsets=own.offsets[: rounds + 1]) for own in data.learners)
    )
    budgets = [run.spec.get_budget(i) or math.inf for i in range(run.spec.n_learners)]
    return all(
        find_first_round_above(_compute_spending(shorter, cut, i), limit) is None for i, limit in enumerate(budgets)
    )


def _suggest_budget(spec: RunSpec, totals: Sequence[float]) -> str:
    """Return the smallest budgets of three digits that allow these totals, as the spec writes them."""
    enough = [_round_up(total) for total in totals]
    if not isinstance(spec.privacy.budget, tuple):
        return f"{max(enough):g}"
    return (
        f"[{', '.join(f'{max(least, budget):g}' for least, budget in zip(enough, spec.privacy.budget, strict=True))}]"
    )


def _round_up(value: float) -> float:
    """Round up to three significant digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit) * unit:.3g}")


def find_data_warnings(spec: RunSpec, dataset: Dataset, data: PlacedData) -> Iterator[RunWarning]:
    """Warn about properties of the data that limit results; none makes a run unsafe, or costs privacy.

    Args:
        spec: spec of the run.
        dataset: records before placement.
        data: records after placement.
    """
    yield from _find_ended_records(spec, dataset, data)
    yield from _find_label_problems(spec, dataset, data)
    yield from _find_long_scaled_rows(spec, dataset, data)


def _find_ended_records(spec: RunSpec, dataset: Dataset, data: PlacedData) -> Iterator[RunWarning]:
    """Warn about learners that participate after their last record has been learned."""
    dealt = dataset.round is None  # else the file sets the rounds, and a learner may pause to the end
    if dealt and spec.data.batch_size == "all":
        return  # `all` places all records in the first round
    short = dict[int, int]()
    for i, own in enumerate(data.learners):
        last = int(np.searchsorted(own.offsets, own.offsets[-1]))  # rounds until all records are learned
        idle = np.count_nonzero(spec.participation.learner_participation(i, spec.rounds).mask()[last:])
        if idle > max(
            1, _MAX_IDLE_SHARE * spec.rounds
        ):  # the last round shows in no message, and `init` may leave it empty
            short[i] = last
    if not short or (not dealt and len(short) < spec.n_learners):
        return
    shortest, longest = min(short.values()), max(short.values())
    if shortest == longest and len(short) == spec.n_learners:
        lasting, rounds = f"{shortest}", "at every learner"
    else:
        short_texts = [f"{spec.names[i]} ({last})" for i, last in sorted(short.items(), key=lambda each: each[1])]
        lasting, rounds = (
            f"{shortest}" if shortest == longest else f"{shortest} to {longest}",
            f"at {abbreviate_names(short_texts)}",
        )
    instead = ", take a smaller data.batch_size, or data.reuse: true, which costs more epsilon" if dealt else ""
    yield RunWarning(
        "RECORDS_END",
        f"the records last {lasting} of {spec.rounds} rounds {rounds}: after that nothing more is learned from them, and "
        f"average_loss is over the rounds that bring records: set rounds to at most {longest}{instead}",
    )


def _find_label_problems(spec: RunSpec, dataset: Dataset, data: PlacedData) -> Iterator[RunWarning]:
    """Warn about labels merged by a loss of two classes, and about labels that are all equal."""
    loss, texts = spec.loss, dataset.class_names
    if loss.n_classes is None or dataset.classes is None or not texts:
        return
    if short_texts := describe_similar_labels(texts):
        yield RunWarning("LABELS_ALIKE", f"labels {short_texts}")
    labels = np.concatenate([*(own.labels for own in data.learners), data.test_labels])
    if (labels == labels[0]).all():
        only = texts[int(dataset.classes[0])]
        yield RunWarning(
            "ONE_CLASS",
            f"all records have the same class ({only}): there is nothing to distinguish, and an accuracy near 1 means nothing; "
            "bring records of another class",
        )
    elif loss.has_binary_labels and spec.data.positive is None and len(texts) > 2:
        yield RunWarning(
            "CLASSES_JOINED",
            f"{len(texts)} labels under the {loss.kind} loss, which has two classes: {_describe_mapping(texts, dataset)}; take "
            f"loss: {{kind: softmax, classes: {len(texts)}}}, or name in data.positive those that count as 1",
        )


def _describe_mapping(texts: Sequence[str], dataset: Dataset) -> str:
    found, first = np.unique(dataset.classes if dataset.classes is not None else (), return_index=True)
    read = [f"{texts[int(k)]} is {dataset.labels[at]:g}" for k, at in zip(found, first, strict=True)]
    if 2 * len(texts) > len(dataset.labels):
        return "as many as there are records, or nearly"
    return abbreviate_names(read)


def _find_long_scaled_rows(spec: RunSpec, dataset: Dataset, data: PlacedData) -> Iterator[RunWarning]:
    """Warn about records that scaling has made many times as long as the others, by features that hardly vary elsewhere."""
    scale = spec.data.scale
    if scale.kind == "none":
        return
    learners = data.learners[:1] if spec.data.partition.is_shared else data.learners
    norms = [np.linalg.norm(own.features, axis=1) for own in learners]
    every_norm = np.concatenate(norms)
    median = float(np.median(every_norm))
    if median == 0.0 or (ratio := float(every_norm.max()) / median) <= _MAX_ROW_RATIO:
        return
    longest = [
        np.argmax(np.abs(own.features[each > _MAX_ROW_RATIO * median]), axis=1)
        for own, each in zip(learners, norms, strict=True)
    ]
    columns, counts = np.unique(np.concatenate(longest), return_counts=True)
    names = [repr(name) for name in dataset.columns] if dataset.columns else [f"{k}" for k in range(data.n_features)]
    named = abbreviate_names(
        [names[int(k)] for k in columns[np.argsort(-counts)] if k < len(names)], _MAX_NAMED_FEATURES
    )
    named += "" if dataset.columns else " (counted from 0)"
    yield RunWarning(
        "SCALED_ROWS",
        f"data.scale {scale.kind} makes the longest record {ratio:.0f} times as long as the median one, by features that hardly "
        f"vary where the constants are from: {named}; {_suggest_scale(scale)}, or "
        "leave such features out",
    )


def _suggest_scale(scale: Scale) -> str:
    if scale.kind == "standard" and scale.clip_bound is None:
        return "clip scaled features (data.scale: {kind: standard, clip: 5})"
    if scale.kind == "standard":
        return "lower data.scale.clip"
    return "state the possible values (data.scale: {kind: range, low: ..., high: ...})"
