"""Placement of a dataset: held-out part, scaling, learners, order, rounds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sottovoce_core.arrays import MAX_ARRAY_ELEMENTS, Batch, FloatArray, IntArray
from sottovoce_core.data.dataset import Dataset
from sottovoce_core.data.scaling import Scale
from sottovoce_core.data.schedule import LearnerData, PlacedData
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.network.participation_schedule import Mask
from sottovoce_core.registry import MAX_MAGNITUDE
from sottovoce_core.spec import RunSpec
from sottovoce_core.text import abbreviate_names


def place_data(spec: RunSpec, dataset: Dataset) -> PlacedData:
    """Hold a part out, scale by it, and assign records to learners and rounds.

    Placement in the dataset is kept exactly: a `learner` column replaces the partition, a `round` column `batch_size` and
    `reuse`; the order then applies within a learner's round. Records placed by a column are never held out.

    Randomness: `data.seed`, with an independent generator each for the split, the partition and the order of every
    learner, so that changing one of these leaves the others as they were.

    Raises:
        SpecError: a learner gets no record, or there is no held-out part to scale by.
        DataError: a record is placed with a learner or in a round outside the run (the message names its row).
    """
    data = spec.data
    _require_schedule_size(spec, dataset)
    split_rng, deal_rng, order_rng = np.random.default_rng(data.seed).spawn(3)
    rows, test = _hold_out(dataset, data.test_fraction, split_rng)
    rounds = _read_rounds(spec, dataset)
    prepare = _build_transform(data, test.features)

    def place_learner(
        mine: IntArray, rng: np.random.Generator, learner: int = 0, prepared: FloatArray | None = None
    ) -> LearnerData:
        shuffled = rng.permutation(len(mine)) if data.order == "shuffled" else np.arange(len(mine))
        part = spec.participation.learner_participation(learner, spec.rounds).mask()
        timetable = (
            _fill_rounds(shuffled, data, part) if rounds is None else _keep_file_rounds(shuffled, rounds[mine], part)
        )
        features = prepare(dataset.features[mine]) if prepared is None else prepared
        return LearnerData(features, dataset.labels[mine], *timetable)

    if dataset.learner is None and data.partition.has_own_order:
        features = prepare(dataset.features[rows])  # one array for all copies
        rngs = order_rng.spawn(spec.n_learners)
        learners = [place_learner(rows, rng, i, features) for i, rng in enumerate(rngs)]
    elif dataset.learner is None and data.partition.is_shared:
        if spec.offline_intervals:
            raise SpecError(
                "offline_intervals must be empty with data.partition shared: all learners have the same records in all rounds; "
                "set data.partition.own_order to true if each may learn its copy in an order of its own"
            )
        learners = [place_learner(rows, order_rng)] * spec.n_learners
    else:
        owners = _assign_owners(spec, dataset, rows, deal_rng)
        hands = [rows[owners == i] for i in range(spec.n_learners)]
        if empty := [i for i, mine in enumerate(hands) if not mine.size]:
            raise SpecError(_describe_missing_records(spec, empty, dataset))
        rngs = order_rng.spawn(spec.n_learners)
        learners = [place_learner(mine, rng, i) for i, (mine, rng) in enumerate(zip(hands, rngs, strict=True))]
    return PlacedData(tuple(learners), prepare(test.features), test.labels)


def create_empty_live_data(spec: RunSpec) -> PlacedData:
    """Return the data of a live run before any records exist."""
    nothing = np.broadcast_to(np.int64(0), spec.rounds + 1)  # needs no memory, for any number of rounds
    return _place_live(spec, [nothing] * spec.n_learners)


def estimate_live_data(spec: RunSpec, rate: float) -> PlacedData:
    """Return the data of a live run whose records arrive evenly, each used once. Their content is unknown.

    Args:
        spec: spec of the run.
        rate: mean number of records a round; below 1, most rounds bring none. The first brings some.

    Raises:
        SpecError: an impossible rate, or too many records.
    """
    max_batch_size = spec.data.batch_size
    if not 0.0 < rate <= (math.inf if max_batch_size == "all" else max_batch_size):
        raise SpecError(f"records a round must be above 0 and at most data.batch_size, {max_batch_size}, got {rate:g}")
    if spec.rounds * max(rate, 1.0) > MAX_ARRAY_ELEMENTS:
        raise SpecError(
            f"rounds and records must be at most {MAX_ARRAY_ELEMENTS} each, got {spec.rounds} rounds: examine fewer rounds"
        )
    counts = np.diff(np.ceil(np.arange(spec.rounds + 1) * rate)).astype(np.int64)
    parts = [spec.participation.learner_participation(i, spec.rounds).mask() for i in range(spec.n_learners)]
    return _place_live(spec, [np.concatenate([[0], np.cumsum(counts * part)]) for part in parts])


def _place_live(spec: RunSpec, offsets: Sequence[IntArray]) -> PlacedData:
    width, zero = spec.data.width or 0, np.zeros(())

    def of(ends: IntArray) -> LearnerData:
        many = int(ends[-1])
        features, labels = np.broadcast_to(zero, (many, width)), np.broadcast_to(zero, many)
        return LearnerData(features, labels, np.arange(many, dtype=np.int64), ends)

    return PlacedData(tuple(map(of, offsets)), np.empty((0, width)), np.empty(0))


# ---- held-out part ---------------------------------------------------------------------------------------


def _hold_out(dataset: Dataset, fraction: float, rng: np.random.Generator) -> tuple[IntArray, Batch]:
    """Return the rows to learn from, ascending, and the held-out part (empty if the file places all rows)."""
    n = len(dataset.labels)
    if dataset.test is not None:
        return np.arange(n), dataset.test
    place_learner = dataset.learner is not None or dataset.round is not None
    held = 0 if place_learner else min(max(round(fraction * n), 1), n - 1)
    rows = rng.permutation(n)
    test = np.sort(rows[:held])
    return np.sort(rows[held:]), Batch(dataset.features[test], dataset.labels[test])


@dataclass(frozen=True, slots=True, eq=False)
class FeatureTransform:
    """Transform feature rows of a source, `(records, m)`, to rows of a run, `(records, n)`: scaled, then with the intercept.

    Attributes:
        intercept: whether to append a column of ones.
        shift, width: offset to subtract, then divisor, `(m,)` each; None: no scaling.
        clip: bound to which scaled features are clipped; None: no clipping.
    """

    intercept: bool
    shift: FloatArray | None = None
    width: FloatArray | None = None
    clip: float | None = None

    @classmethod
    def from_scale(
        cls, scale: Scale, n_features: int, *, intercept: bool, held_out: FloatArray | None = None
    ) -> FeatureTransform:
        """Build the transform of a scale.

        Args:
            scale: section of the spec.
            n_features: number of features, without the intercept.
            intercept: whether to append a column of ones.
            held_out: `(records, features)`, unless the scale states its constants.

        Raises:
            SpecError, DataError: as `Scale.compute_constants`.
        """
        constants = scale.compute_constants(n_features, held_out)
        return cls(intercept) if constants is None else cls(intercept, *constants, scale.clip_bound)

    def __call__(self, features: FloatArray) -> FloatArray:
        if self.shift is not None and self.width is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                features = (features - self.shift) / self.width
            if self.clip is not None:
                features = np.clip(features, -self.clip, self.clip)
            if not (np.abs(features) <= MAX_MAGNITUDE).all():
                raise DataError(
                    f"scaled features must be between -{MAX_MAGNITUDE:g} and {MAX_MAGNITUDE:g}, got larger ones: a column has "
                    "numbers of another size than its held-out part; rescale it first"
                )
        return _append_intercept(features) if self.intercept else np.asarray(features)


def fit_feature_transform(data: DataSpec, dataset: Dataset) -> FeatureTransform:
    """Fit the transform of a run to its dataset.

    Raises:
        SpecError: there is no held-out part to scale by.
        DataError: the held-out part has an unusable range.
    """
    split_rng, *_ = np.random.default_rng(data.seed).spawn(3)
    return _build_transform(data, _hold_out(dataset, data.test_fraction, split_rng)[1].features)


def _build_transform(data: DataSpec, held_out: FloatArray) -> FeatureTransform:
    """Build the transform: scaling, then the intercept."""
    return FeatureTransform.from_scale(data.scale, held_out.shape[1], intercept=data.intercept, held_out=held_out)


def _append_intercept(features: FloatArray) -> FloatArray:
    """Append a column of ones."""
    return np.hstack([features, np.ones((len(features), 1))])


# ---- learners --------------------------------------------------------------------------------------------


def _assign_owners(spec: RunSpec, dataset: Dataset, rows: IntArray, rng: np.random.Generator) -> IntArray:
    """Return the learner of each of `rows`."""
    if dataset.learner is not None:
        return _read_owners(spec, dataset, dataset.learner)[rows]
    classes = dataset.classes
    if classes is None:
        classes = np.unique(dataset.labels, return_inverse=True)[1].astype(np.int64)
    partition = spec.data.partition.resolve_names(spec.names, dataset.class_names)
    return partition.owners(dataset.labels[rows], classes[rows], spec.n_learners, rng)


def _read_owners(spec: RunSpec, dataset: Dataset, learner: IntArray) -> IntArray:
    """Convert the learner column to indices of the run's learners."""
    names = dataset.learner_names
    if names is None and any(map(str.isdecimal, spec.names)):  # then a number is a name
        known, learner = np.unique(learner, return_inverse=True)
        names = tuple(map(str, known.tolist()))
    if names is None:
        owners, allowed = learner, f"an index in [0, {spec.n_learners})"
    else:
        index = {name: i for i, name in enumerate(spec.names)}
        owners = np.array([index.get(name, -1) for name in names], dtype=np.int64)[learner]
        allowed = f"one of {', '.join(spec.names)}"
    outside = np.flatnonzero((owners < 0) | (owners >= spec.n_learners))
    if outside.size:
        row = int(outside[0])
        near = [] if names is None else difflib.get_close_matches(names[learner[row]], spec.names, 1)
        came = learner[row] if names is None else f"a name similar to {near[0]!r}" if near else "another name"
        raise DataError(f"{dataset.name}: row {row} (counted from 0), column 'learner' must be {allowed}, got {came}")
    return owners


def _describe_missing_records(spec: RunSpec, learners: Sequence[int], dataset: Dataset) -> str:
    """Describe the learners without records, and the remedy."""
    advice = (
        "give each rows in the column 'learner', or take it out of `learners`"
        if dataset.learner is not None
        else "take fewer learners, a milder data.partition (iid, a larger concentration, more labels), another seed or more data"
    )
    who, get = (
        abbreviate_names([f"{spec.names[i]} (index {i})" for i in learners]),
        "gets" if len(learners) == 1 else "get",
    )
    return f"every learner must get at least one record, and {who} {get} none: {advice}"


# ---- rounds ----------------------------------------------------------------------------------------------


def _read_rounds(spec: RunSpec, dataset: Dataset) -> IntArray | None:
    """Return the round column, after checking that all rounds are in the run."""
    if dataset.round is None:
        return None
    outside = np.flatnonzero((dataset.round < 0) | (dataset.round >= spec.rounds))
    if outside.size:
        row = int(outside[0])
        raise DataError(
            f"{dataset.name}: row {row} (counted from 0), column 'round' must be in [0, {spec.rounds}), "
            f"got {dataset.round[row]}; raise `rounds` or drop the row"
        )
    return dataset.round


def _require_schedule_size(spec: RunSpec, dataset: Dataset) -> None:
    """Refuse a schedule that does not fit into memory; with `reuse` it has a record for every place of every round.

    Raises:
        SpecError: it has too many places.
    """
    data, each = spec.data, spec.n_learners
    if data.reuse and dataset.round is None:
        copies = spec.n_learners if data.partition.has_own_order else 1
        each = copies * len(dataset.labels) if data.batch_size == "all" else spec.n_learners * data.batch_size
    if (places := spec.rounds * each) > MAX_ARRAY_ELEMENTS:
        what = f"{spec.rounds} rounds of {spec.n_learners} learners have {places} places for records"
        raise SpecError(
            f"there must be at most {MAX_ARRAY_ELEMENTS} places for records, and {what}: lower rounds or batch_size"
        )


def _fill_rounds(shuffled: IntArray, data: DataSpec, part: Mask) -> tuple[IntArray, IntArray]:
    """Assign `batch_size` records to each round of participation, until they run out, or without end with `reuse`.

    Args:
        shuffled: rows, in learning order.
        data: section of the spec.
        part: `(rounds,)`: True for rounds of participation.

    Returns:
        order, offsets: as in `LearnerData`.
    """
    size = len(shuffled) if data.batch_size == "all" else data.batch_size
    if not data.reuse:
        size = min(size, len(shuffled))  # else the ends of late rounds exceed the largest int64
    ends = np.concatenate([[0], np.cumsum(part, dtype=np.int64)]) * size
    order = np.resize(shuffled, ends[-1]) if data.reuse else shuffled[: ends[-1]]
    return order, np.minimum(ends, len(order))


def _keep_file_rounds(shuffled: IntArray, rounds_of_rows: IntArray, part: Mask) -> tuple[IntArray, IntArray]:
    """Assign every record to its round in the file, except rounds in which the learner is offline: as `_fill_rounds`."""
    shuffled = shuffled[part[rounds_of_rows[shuffled]]]
    order = shuffled[np.argsort(rounds_of_rows[shuffled], kind="stable")]
    return order, np.searchsorted(rounds_of_rows[order], np.arange(len(part) + 1)).astype(np.int64)
