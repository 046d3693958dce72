"""Which record to swap: the one, among those tried, that what was heard tells apart best."""

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
"""Runs by which swaps are compared."""

_MAX_SCREENING_ROUNDS = 40
"""Rounds with a loss by which swaps are compared: a record weighs most in the first ones."""

_MAX_OTHER_RECORDS = 24
"""Records of other learners that are tried, at most."""


_Swap = tuple[LearnerData, str]
"""A learner's other records, and what is swapped in words."""

_Measure = Callable[[PrivacyLosses], FloatArray]
"""How well each of some swaps is told apart, `(swaps,)`."""


def _realised(losses: PrivacyLosses) -> FloatArray:
    """The mean absolute loss of whole runs."""
    strengths: FloatArray = np.nan_to_num(np.abs(losses.total), nan=0.0, posinf=np.inf).mean(axis=1)
    return strengths


def _possible(losses: PrivacyLosses) -> FloatArray:
    """The largest loss that any first run could have shown, given what was heard."""
    return losses.supremum[:, 0]


def compute_peak_losses(losses: PrivacyLosses) -> FloatArray:
    """The largest absolute loss of any run by any round; infinite where a message could not have been said."""
    with np.errstate(invalid="ignore"):
        so_far = np.abs(np.cumsum(losses.realised_losses, axis=0))
    largest: FloatArray = np.nan_to_num(so_far, nan=np.inf, posinf=np.inf).max(axis=(0, 2))
    return largest


# ---- what is tried ---------------------------------------------------------------------------------------------------


def mirror_record(record: FloatArray, schema: Schema | None) -> FloatArray:
    """The mirror image of a record, `(features,)` each, or the opposite that a schema allows, with the same intercept."""
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
) -> list[_Swap]:
    """Replacements of a learner's first record: itself with the other label, its mirror image, other learners' records.

    Args:
        data: of all learners.
        learner: its index.
        every_use: in all rounds that use the record, not only in the first.
        schema: of the records, where there is one: what is tried is allowed by it.
        names: of the learners, for errors.

    Raises:
        DataError: the learner has no record.
    """
    own = data.learners[learner]
    if not len(own.order):
        raise DataError(
            f"{format_learner_name(names, learner)} must have a record to swap, and has none: give it one, or audit another learner"
        )
    row = int(own.order[0])
    features, label = own.features[row], float(own.labels[row])
    labels = np.unique(np.concatenate([each.labels for each in data.learners]))
    other = float(labels[labels != label][0]) if np.any(labels != label) else label
    mirror = mirror_record(features, schema)
    tried = [
        (features, other, "itself with the other label"),
        (mirror, label, "its mirror image"),
        (mirror, other, "its mirror image with the other label"),
    ]
    others = [each for i, each in enumerate(data.learners) if i != learner and len(each.labels)]
    pool = np.concatenate([each.features for each in others]) if others else own.features
    pool_labels = np.concatenate([each.labels for each in others]) if others else own.labels
    picked = np.unique(np.linspace(0, len(pool) - 1, _MAX_OTHER_RECORDS).astype(int))
    tried += [(pool[k], float(pool_labels[k]), "a record of another learner") for k in picked]
    swap, index = (own.with_record, row) if every_use else (own.with_use, 0)
    return [
        (swap(index, record, its), f"the first record against {what}")
        for record, its, what in tried
        if its != label or (record != features).any()
    ]


def _extremes(run: Run, data: PlacedData, learner: int) -> list[tuple[LearnerData, _Swap]]:
    """First records on the loss's bound against their mirror image: all weight in one feature, or the same in all."""
    own, n = data.learners[learner], data.n_features
    label = max(own.labels.tolist(), key=abs)
    if (schema := run.spec.data.schema) is not None:
        record = add_intercept(run, schema.make_max_norm_record())
        first, second = (own.with_use(0, each, label) for each in (record, mirror_record(record, schema)))
        what = "a first record at the ends of its schema, against its mirror image"
        return [(first, (second, what))] if _differ(first, second) else []
    size = _bound(run, own)
    made = (
        (size * np.eye(n)[0], "a first record with all weight in one feature, against its mirror image"),
        (np.full(n, size / np.sqrt(n)), "a first record with equal weight in all features, against its mirror image"),
    )
    return [(own.with_use(0, record, label), (own.with_use(0, -record, label), what)) for record, what in made]


def add_intercept(run: Run, features: FloatArray) -> FloatArray:
    """A record that a schema allows, as it would be placed."""
    return np.append(features, 1.0) if run.spec.data.intercept else features


def _bound(run: Run, own: LearnerData) -> float:
    """The largest norm of a record; where the loss sets none, of those that there are."""
    bound = run.loss.feature_bound
    return bound if np.isfinite(bound) else float(np.linalg.norm(own.features, axis=1).max())


# ---- the search ------------------------------------------------------------------------------------------------------


def find_worst_replacement(
    run: Run,
    transcript: Transcript,
    holders: Sequence[int],
    first: LearnerData,
    tried: Sequence[_Swap],
    measure: _Measure,
) -> tuple[_Swap, float]:
    """The swap that a transcript tells apart best, and how well.

    Args:
        run: the run that was overheard.
        transcript: what was said: the more replicas, the surer, and the more to compute.
        holders: learners that hold the record.
        first: their records in the first world.
        tried: at least one swap.
        measure: by which they are compared.
    """
    together = max(1, MAX_TRANSCRIPT_BYTES // (8 * run.algorithm.dim * transcript.replicas))
    scores = [
        measure(
            replay_losses(run, transcript, holders, [first, *(second for second, _ in tried[start : start + together])])
        )
        for start in range(0, len(tried), together)
    ]
    score = np.concatenate(scores)
    return tried[int(score.argmax())], float(score.max())


def _screened(run: Run, learner: int) -> int:
    """Rounds by which swaps are compared."""
    costly = np.flatnonzero(run.guarantee(learner).round_losses)[:_MAX_SCREENING_ROUNDS]
    return min(int(costly[-1]) + 1 if len(costly) else run.spec.rounds, run.spec.rounds)


def find_worst_worlds(
    run: Run, data: PlacedData, learner: int, seed: np.random.SeedSequence, *, keep_first_world: bool = False
) -> Worlds:
    """The swap of a learner's first record, of `swaps` and `extremes`, that some simulated runs tell apart best.

    Args:
        run: the run.
        data: of all learners.
        learner: its index.
        seed: of the simulated runs.
        keep_first_world: the first world is that of the records as they are, not of one that was made up.

    Raises:
        DataError: the learner has no record, or there is no other one.
    """
    own, common = (
        data.learners[learner],
        list_replacements(data, learner, schema=run.spec.data.schema, names=run.spec.names),
    )
    made = [(first, [swap]) for first, swap in _extremes(run, data, learner)]
    if not common and (keep_first_world or not made):
        raise DataError(
            f"{run.spec.names[learner]}'s first record must have another one to be swapped for, and has none"
        )
    groups = [(own, common), *([] if keep_first_world else made)] if common else made[:1] + made
    shared, rounds = run.guarantee(learner).has_shared_records, _screened(run, learner)
    found: list[tuple[float, Worlds]] = []
    for (first, tried), child in zip(groups, spawn_seeds(seed, len(groups)), strict=True):
        worlds = Worlds(learner, first, *tried[0], shared)
        heard = simulate_runs(run, data, worlds, RunChunk(0, PILOT_RUNS, child), SeededNoise, rounds=rounds).transcript
        swap, score = find_worst_replacement(run, heard, worlds.list_holders(run), first, tried, _realised)
        found.append((score, Worlds(learner, first, *swap, shared)))
    return max(found, key=lambda each: each[0])[1]


def build_other_worlds(run: Run, data: PlacedData, learner: int, known: Worlds) -> list[Worlds]:
    """Pairs of worlds that show what the most telling one may hide: it is often a mirror pair, whose norms are equal.

    In this order: a loud record against a silent one, for whatever depends on a norm; the first record with the other label; a
    record of a middle round.

    Args:
        run: the run.
        data: of all learners.
        learner: its index.
        known: the most telling pair, which is not told again.
    """
    own, labels = data.learners[learner], np.unique(np.concatenate([each.labels for each in data.learners]))
    label, middle = float(own.labels[own.order[0]]), len(own.order) // 2
    features, later = own.features[own.order[0]], own.features[own.order[middle]]
    schema, different = run.spec.data.schema, labels[labels != label]
    if schema is None:
        loud, silent = _bound(run, own) * np.eye(data.n_features)[0], np.zeros(data.n_features)
        what = "a first record on the bound, against one without features"
    else:
        loud, silent = (
            add_intercept(run, schema.make_max_norm_record()),
            add_intercept(run, schema.make_min_norm_record()),
        )
        what = "a first record at the ends of its schema, against one in the middle"
    tried = [(own.with_use(0, loud, label), own.with_use(0, silent, label), what)]
    if len(different):
        other = own.with_use(0, features, float(different[0]))
        tried.append((own, other, "the first record against itself with the other label"))
    if middle:
        turned = own.with_use(middle, mirror_record(later, schema), float(own.labels[own.order[middle]]))
        tried.append((own, turned, "a record of a middle round against its mirror image"))
    return [
        Worlds(learner, first, second, what, known.is_shared)
        for first, second, what in tried
        if what != known.description and _differ(first, second)
    ]


def _differ(first: LearnerData, second: LearnerData) -> bool:
    """A record without features is its own mirror image."""
    same = (first.features[first.order] == second.features[second.order]).all()
    return not (same and (first.labels[first.order] == second.labels[second.order]).all())


def compute_worst_losses(
    run: Run, transcript: Transcript, data: PlacedData, learner: int, *, every_use: bool = False
) -> PrivacyLosses | None:
    """Losses of the swap of a learner's first record, of `swaps`, whose loss could have been largest; None: there is none.

    Args:
        run: the run that was overheard.
        transcript: what all learners said (one replica).
        data: what they learned.
        learner: whose record is swapped.
        every_use: swap the record in all rounds that use it, not only in the first.
    """
    own = data.learners[learner]
    tried = list_replacements(data, learner, every_use=every_use, schema=run.spec.data.schema, names=run.spec.names)
    if not tried:
        return None
    (second, _), _ = find_worst_replacement(
        run, transcript.truncate(_screened(run, learner)), (learner,), own, tried, _possible
    )
    return replay_losses(run, transcript, (learner,), [own, second])
