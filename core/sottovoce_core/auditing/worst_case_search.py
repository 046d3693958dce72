"""Search for the most revealing record replacement, among those tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.worlds import (
    MAX_TRANSCRIPT_BYTES,
    RunChunk,
    Worlds,
    replay_losses,
    simulate_runs,
    spawn_seeds,
)
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.data.spec import Schema
from sottovoce_core.errors import DataError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.replay import PrivacyLosses
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.text import format_learner_name

PILOT_RUNS = 32
"""Number of runs by which replacements are compared."""

_MAX_SCREENING_ROUNDS = 40
"""Maximum number of rounds with a loss by which replacements are compared: a record weighs most in the first ones."""

_MAX_OTHER_RECORDS = 24
"""Maximum number of records of other learners that are tried."""


_Replacement = tuple[LearnerData, str]
"""Records of a learner after the replacement, and the replacement in words."""

_Measure = Callable[[PrivacyLosses], FloatArray]
"""Measure of the difference between worlds for several replacements, `(replacements,)`."""


def _compute_mean_loss(losses: PrivacyLosses) -> FloatArray:
    """Return the mean absolute loss of whole runs."""
    strengths: FloatArray = np.nan_to_num(np.abs(losses.total), nan=0.0, posinf=np.inf).mean(axis=1)
    return strengths


def _compute_max_possible_loss(losses: PrivacyLosses) -> FloatArray:
    """Return the largest possible loss of the first round's noise, given the messages."""
    return losses.supremum[:, 0]


def compute_peak_losses(losses: PrivacyLosses) -> FloatArray:
    """Return the largest absolute loss of any run at any round; infinite where a message was impossible."""
    with np.errstate(invalid="ignore"):
        cumulative = np.abs(np.cumsum(losses.realised_losses, axis=0))
    largest: FloatArray = np.nan_to_num(cumulative, nan=np.inf, posinf=np.inf).max(axis=(0, 2))
    return largest


# ---- candidates ------------------------------------------------------------------------------------------------------


def mirror_record(record: FloatArray, schema: Schema | None) -> FloatArray:
    """Return the mirror image of a record, `(features,)` each, or the opposite allowed by a schema, with the same intercept."""
    if schema is None:
        return -record
    return np.concatenate([schema.make_opposite_record(record[: schema.width]), record[schema.width :]])


def list_replacements(
    data: PlacedData,
    learner: int,
    *,
    every_use: bool = False,
    schema: Schema | None = None,
    names: Sequence[str] = (),
) -> list[_Replacement]:
    """List replacements of a learner's first record: the other label, the mirror image, other learners' records.

    Args:
        data: records of all learners.
        learner: index of the learner.
        every_use: replace it in all rounds that use the record, not only in the first.
        schema: schema of the records, if any: it allows all replacements.
        names: names of the learners, for errors.

    Raises:
        DataError: the learner has no record.
    """
    own = data.learners[learner]
    if not len(own.order):
        raise DataError(
            f"the audited learner must have a record, but {format_learner_name(names, learner)} has none: "
            "give it one, or audit another learner"
        )
    row = int(own.order[0])
    features, label = own.features[row], float(own.labels[row])
    labels = np.unique(np.concatenate([each.labels for each in data.learners]))
    other_label = float(labels[labels != label][0]) if np.any(labels != label) else label
    mirror = mirror_record(features, schema)
    candidates = [
        (features, other_label, "itself with the other label"),
        (mirror, label, "its mirror image"),
        (mirror, other_label, "its mirror image with the other label"),
    ]
    others = [each for i, each in enumerate(data.learners) if i != learner and len(each.labels)]
    pool = np.concatenate([each.features for each in others]) if others else own.features
    pool_labels = np.concatenate([each.labels for each in others]) if others else own.labels
    sampled = np.unique(np.linspace(0, len(pool) - 1, _MAX_OTHER_RECORDS).astype(int))
    candidates += [(pool[k], float(pool_labels[k]), "a record of another learner") for k in sampled]
    replace_use, index = (own.with_record, row) if every_use else (own.with_use, 0)
    return [
        (replace_use(index, record, new_label), f"the first record against {description}")
        for record, new_label, description in candidates
        if new_label != label or (record != features).any()
    ]


def _list_extreme_replacements(run: Run, data: PlacedData, learner: int) -> list[tuple[LearnerData, _Replacement]]:
    """List first records on the loss's bound and their mirror images: all weight in one feature, or the same in all."""
    own, n = data.learners[learner], data.n_features
    label = max(own.labels.tolist(), key=abs)
    if (schema := run.spec.data.schema) is not None:
        record = add_intercept(run, schema.make_max_norm_record())
        first, second = (own.with_use(0, each, label) for each in (record, mirror_record(record, schema)))
        description = "a first record at the ends of its schema, against its mirror image"
        return [(first, (second, description))] if _is_different(first, second) else []
    size = _find_max_norm(run, own)
    extremes = (
        (size * np.eye(n)[0], "a first record with all weight in one feature, against its mirror image"),
        (np.full(n, size / np.sqrt(n)), "a first record with equal weight in all features, against its mirror image"),
    )
    return [
        (own.with_use(0, record, label), (own.with_use(0, -record, label), description))
        for record, description in extremes
    ]


def add_intercept(run: Run, features: FloatArray) -> FloatArray:
    """Add the intercept to a record allowed by the schema, as placement does."""
    return np.append(features, 1.0) if run.spec.data.intercept else features


def _find_max_norm(run: Run, own: LearnerData) -> float:
    """Return the largest norm of a record: the bound of the loss, or without one the largest norm of the data."""
    bound = run.loss.feature_bound
    return bound if np.isfinite(bound) else float(np.linalg.norm(own.features, axis=1).max())


# ---- search ----------------------------------------------------------------------------------------------------------


def find_worst_replacement(
    run: Run,
    transcript: Transcript,
    holders: Sequence[int],
    first: LearnerData,
    candidates: Sequence[_Replacement],
    measure: _Measure,
) -> tuple[_Replacement, float]:
    """Find the replacement that a transcript reveals best, and its score.

    Args:
        run: recorded run.
        transcript: messages: more replicas give a better estimate, and cost more.
        holders: learners that hold the record.
        first: their records in world 0.
        candidates: at least one replacement.
        measure: measure by which they are compared.
    """
    batch_size = max(1, MAX_TRANSCRIPT_BYTES // (8 * run.algorithm.dim * transcript.replicas))
    scores = [
        measure(
            replay_losses(
                run, transcript, holders, [first, *(second for second, _ in candidates[start : start + batch_size])]
            )
        )
        for start in range(0, len(candidates), batch_size)
    ]
    score = np.concatenate(scores)
    return candidates[int(score.argmax())], float(score.max())


def _count_screening_rounds(run: Run, learner: int) -> int:
    """Count the rounds by which replacements are compared."""
    costly = np.flatnonzero(run.guarantee(learner).round_losses)[:_MAX_SCREENING_ROUNDS]
    return min(int(costly[-1]) + 1 if len(costly) else run.spec.rounds, run.spec.rounds)


def find_worst_worlds(
    run: Run, data: PlacedData, learner: int, seed: np.random.SeedSequence, *, keep_first_world: bool = False
) -> Worlds:
    """Find the replacement of a learner's first record that simulated runs reveal best.

    It is chosen among `list_replacements` and extreme records.

    Args:
        run: the run.
        data: records of all learners.
        learner: index of the learner.
        seed: seed of the simulated runs.
        keep_first_world: world 0 has the records as they are, no artificial ones.

    Raises:
        DataError: the learner has no record, or there is no different one.
    """
    own = data.learners[learner]
    common = list_replacements(data, learner, schema=run.spec.data.schema, names=run.spec.names)
    extremes = [(first, [replacement]) for first, replacement in _list_extreme_replacements(run, data, learner)]
    if not common and (keep_first_world or not extremes):
        raise DataError(
            f"the first record of {run.spec.names[learner]} must have a different record as replacement, but there is none"
        )
    groups = [(own, common), *([] if keep_first_world else extremes)] if common else extremes[:1] + extremes
    shared, rounds = run.guarantee(learner).has_shared_records, _count_screening_rounds(run, learner)
    scored: list[tuple[float, Worlds]] = []
    for (first, candidates), child in zip(groups, spawn_seeds(seed, len(groups)), strict=True):
        worlds = Worlds(learner, first, *candidates[0], shared)
        transcript = simulate_runs(
            run, data, worlds, RunChunk(0, PILOT_RUNS, child), SeededNoise, rounds=rounds
        ).transcript
        replacement, score = find_worst_replacement(
            run, transcript, worlds.list_holders(run), first, candidates, _compute_mean_loss
        )
        scored.append((score, Worlds(learner, first, *replacement, shared)))
    return max(scored, key=lambda each: each[0])[1]


def build_other_worlds(run: Run, data: PlacedData, learner: int, known: Worlds) -> list[Worlds]:
    """Build pairs of worlds for effects that the most revealing pair may hide: that is often a mirror pair with equal norms.

    The order is: a record of maximum norm against one of minimum norm, for effects of a norm; the first record with the other
    label; a record of a middle round.

    Args:
        run: the run.
        data: records of all learners.
        learner: index of the learner.
        known: most revealing pair, which is not repeated.
    """
    own, labels = data.learners[learner], np.unique(np.concatenate([each.labels for each in data.learners]))
    label, middle = float(own.labels[own.order[0]]), len(own.order) // 2
    features, later = own.features[own.order[0]], own.features[own.order[middle]]
    schema, different = run.spec.data.schema, labels[labels != label]
    if schema is None:
        max_norm, min_norm = _find_max_norm(run, own) * np.eye(data.n_features)[0], np.zeros(data.n_features)
        description = "a first record on the bound, against one without features"
    else:
        max_norm = add_intercept(run, schema.make_max_norm_record())
        min_norm = add_intercept(run, schema.make_min_norm_record())
        description = "a first record at the ends of its schema, against one in the middle"
    pairs = [(own.with_use(0, max_norm, label), own.with_use(0, min_norm, label), description)]
    if len(different):
        other = own.with_use(0, features, float(different[0]))
        pairs.append((own, other, "the first record against itself with the other label"))
    if middle:
        mirrored = own.with_use(middle, mirror_record(later, schema), float(own.labels[own.order[middle]]))
        pairs.append((own, mirrored, "a record of a middle round against its mirror image"))
    return [
        Worlds(learner, first, second, description, known.is_shared)
        for first, second, description in pairs
        if description != known.description and _is_different(first, second)
    ]


def _is_different(first: LearnerData, second: LearnerData) -> bool:
    """Return whether the records differ; a record without features is its own mirror image."""
    same = (first.features[first.order] == second.features[second.order]).all()
    return not (same and (first.labels[first.order] == second.labels[second.order]).all())


def compute_worst_losses(
    run: Run, transcript: Transcript, data: PlacedData, learner: int, *, every_use: bool = False
) -> PrivacyLosses | None:
    """Compute the losses of the replacement of a learner's first record with the largest possible loss; None: there is none.

    Args:
        run: recorded run.
        transcript: messages of all learners (one replica).
        data: records that they learned.
        learner: index of the learner whose record is replaced.
        every_use: replace the record in all rounds that use it, not only in the first.
    """
    own = data.learners[learner]
    candidates = list_replacements(
        data, learner, every_use=every_use, schema=run.spec.data.schema, names=run.spec.names
    )
    if not candidates:
        return None
    (second, _), _ = find_worst_replacement(
        run,
        transcript.truncate(_count_screening_rounds(run, learner)),
        (learner,),
        own,
        candidates,
        _compute_max_possible_loss,
    )
    return replay_losses(run, transcript, (learner,), [own, second])
