"""Two adjacent worlds, and runs of each: one learner, one of its records swapped, and a fair coin for every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.data import LearnerData, PlacedData
from sottovoce.errors import DataError
from sottovoce.machine import Noise
from sottovoce.noise import SeededNoise
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.replay import SCREENED_ROUNDS, candidates, replay
from sottovoce.run import Run
from sottovoce.simulator import simulate
from sottovoce.transcript import Transcript

NoiseOf = Callable[[np.random.SeedSequence], Noise]
"""How an audited learner draws its noise."""

BYTES = 2**27
"""Of the messages that are held at a time."""

PILOT = 32
"""Runs by which swaps are compared."""


@dataclass(frozen=True, slots=True)
class Worlds:
    """Two adjacent data sets: all learners' records, but for one record of one learner.

    Attributes:
        learner: whose record.
        first, second: its records in either world.
        what: the swap in words.

    Raises:
        DataError: they are not adjacent.
    """

    learner: int
    first: LearnerData
    second: LearnerData
    what: str

    def __post_init__(self) -> None:
        if not np.array_equal(self.first.offsets, self.second.offsets):
            raise DataError("adjacent worlds must have equally many records in every round")
        swapped = np.flatnonzero(self._swapped())
        rows = {(int(self.first.order[k]), int(self.second.order[k])) for k in swapped.tolist()}
        if len(rows) != 1:
            raise DataError(f"adjacent worlds must differ in exactly one record, got {len(rows)}")

    def _swapped(self) -> FloatArray:
        """`(uses,)` which uses differ."""
        first, second = self.first, self.second
        features = (first.features[first.order] != second.features[second.order]).any(axis=1)
        differs: FloatArray = features | (first.labels[first.order] != second.labels[second.order])
        return differs

    @property
    def replaced(self) -> IntArray:
        """`(rounds,)` how many records of each round differ."""
        rounds = np.searchsorted(self.first.offsets, np.flatnonzero(self._swapped()), side="right") - 1
        return np.bincount(rounds, minlength=self.first.rounds).astype(np.int64)

    def guarantee(self, run: Run) -> Guarantee:
        """What is promised for this very swap."""
        return run.algorithm.guarantee(self.learner, np.diff(self.first.offsets), self.replaced)


def chosen(data: PlacedData, learner: int, row: int, features: FloatArray, label: float) -> Worlds:
    """One record of a learner, in all of its uses, against another one.

    Args:
        data: all records.
        learner: whose.
        row: which.
        features: of the other one, as placed: scaled, with the intercept.
        label: of the other one, in the domain of the loss.

    Raises:
        DataError: no such record, one that does not fit, or the same again.
    """
    own = data.learners[learner]
    return Worlds(learner, own, own.with_record(row, features, label), f"record {row} swapped in all of its uses")


def worst(run: Run, data: PlacedData, learner: int, seed: np.random.SeedSequence) -> Worlds:
    """The swap of a learner's first record, among those tried, that some simulated runs tell apart best.

    Tried: the candidates of `replay.worst_swap`, and records on the loss's bound against their mirror image: a spike, all of
    whose weight is in one feature, and one that spreads it over all.

    Raises:
        DataError: the learner has no record.
    """
    if not len(data.learners[learner].order):
        raise DataError(f"learner {learner} must have a record to swap, and has none")
    costly = np.flatnonzero(run.algorithm.guarantee(learner).per_round)[:SCREENED_ROUNDS]
    rounds = int(costly[-1]) + 1 if len(costly) else run.spec.rounds
    best: tuple[float, Worlds] | None = None
    for group, child in zip(_tried(run, data, learner), seed.spawn(3), strict=True):
        first = group[0].first
        transcript = _overheard(
            run, data.with_learner(learner, first), learner, SeededNoise(child), PILOT, min(rounds, run.spec.rounds)
        )
        with np.errstate(invalid="ignore"):
            total = replay(run, transcript, learner, [first, *(worlds.second for worlds in group)]).total
        strengths = np.nan_to_num(np.abs(total), nan=0.0, posinf=np.inf).mean(axis=1)
        strongest = int(strengths.argmax())
        if best is None or strengths[strongest] > best[0]:
            best = float(strengths[strongest]), group[strongest]
    assert best is not None  # noqa: S101 - there are always three groups
    return best[1]


def _tried(run: Run, data: PlacedData, learner: int) -> list[list[Worlds]]:
    """Swaps of a learner's first use of a record; those of a group share the first world."""
    own = data.learners[learner]
    row, n = int(own.order[0]), data.n_features
    label = max(own.labels.tolist(), key=abs)
    bound = run.loss.feature_bound
    size = bound if np.isfinite(bound) else float(np.linalg.norm(own.features, axis=1).max())
    spike, spread = size * np.eye(n)[0], np.full(n, size / np.sqrt(n))
    others = [
        Worlds(learner, own, own.with_use(0, features, other), "the first record against another one")
        for features, other in candidates(data, learner)
        if other != own.labels[row] or (features != own.features[row]).any()
    ]
    mirrored = [
        [Worlds(learner, own.with_use(0, record, label), own.with_use(0, -record, label), what)]
        for record, what in (
            (spike, "a first record with all weight in one feature, against its mirror image"),
            (spread, "a first record with equal weight in all features, against its mirror image"),
        )
    ]
    return [others or mirrored[0], *mirrored]


@dataclass(frozen=True, slots=True)
class Overheard:
    """Some runs of one world."""

    world: int
    transcript: Transcript


def overhear(
    run: Run, data: PlacedData, worlds: Worlds, runs: int, seed: np.random.SeedSequence, noise: NoiseOf = SeededNoise
) -> Iterator[Overheard]:
    """Simulate `2 runs` runs, each in a world that a fair coin chose, some at a time.

    Args:
        run: what to run.
        data: of all learners; the audited learner's records are those of the world.
        worlds: the two worlds.
        runs: of each world, on average.
        seed: of coins and noise; every part has noise of its own.
        noise: where the noise comes from.
    """
    coins, *seeds = seed.spawn(3)
    seconds = int(np.random.default_rng(coins).binomial(2 * runs, 0.5))
    for world, (count, source) in enumerate(zip((2 * runs - seconds, seconds), seeds, strict=True)):
        own = worlds.second if world else worlds.first
        known = data.with_learner(worlds.learner, own)
        most = _at_a_time(run, worlds.learner)
        for done in range(0, count, most):
            here = noise(source.spawn(1)[0])
            part = _overheard(run, known, worlds.learner, here, min(most, count - done), run.spec.rounds)
            yield Overheard(world, part)


def _concerned(run: Run, learner: int) -> list[int]:
    """The learners whose messages a replay of this one needs: its own, and those that it ever hears."""
    heard = {j for t in range(run.spec.rounds) for j in run.topology.at(t).heard_by(learner)}
    return sorted(heard | {learner})


def _at_a_time(run: Run, learner: int) -> int:
    numbers = sum(int(np.prod(shape)) for shape in run.algorithm.field_shapes().values())
    return max(1, BYTES // (8 * run.spec.rounds * len(_concerned(run, learner)) * numbers))


def _overheard(run: Run, data: PlacedData, learner: int, noise: Noise, replicas: int, rounds: int) -> Transcript:
    """What this learner and those that it hears said; all else is left at zero, whose pages take no memory."""
    concerned = _concerned(run, learner)
    shapes = run.algorithm.field_shapes()
    said = {name: np.zeros((rounds, run.spec.n_learners, replicas, *shape)) for name, shape in shapes.items()}
    for step in islice(simulate(run, data, noise, replicas), rounds):
        for name, values in said.items():
            values[step.t, concerned] = step.message[name][concerned]
    return Transcript(said)
