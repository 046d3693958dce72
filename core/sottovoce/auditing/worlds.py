"""Two adjacent worlds: all records of a run, but for one record that is another one in the second world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.data import LearnerData, PlacedData
from sottovoce.data.dataset import check_batch
from sottovoce.errors import DataError
from sottovoce.losses import Loss
from sottovoce.privacy.guarantee import Guarantee, joint
from sottovoce.running.replay import Losses, replay
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Worlds:
    """Two adjacent data sets.

    Attributes:
        learner: whose record differs.
        first, second: its records in either world.
        what: the swap in words.
        shared: all learners hold these very records, so that one swap is everybody's.

    Raises:
        DataError: they are not adjacent.
    """

    learner: int
    first: LearnerData
    second: LearnerData
    what: str
    shared: bool = False

    def __post_init__(self) -> None:
        if not np.array_equal(self.first.offsets, self.second.offsets):
            raise DataError("adjacent worlds must have equally many records in every round")
        swapped = np.flatnonzero(self.swapped())
        rows = {(int(self.first.order[k]), int(self.second.order[k])) for k in swapped.tolist()}
        if len(rows) != 1:
            raise DataError(f"adjacent worlds must differ in exactly one record, got {len(rows)}")

    def swapped(self) -> FloatArray:
        """`(uses,)` which uses differ."""
        first, second = self.first, self.second
        features = (first.features[first.order] != second.features[second.order]).any(axis=1)
        differs: FloatArray = features | (first.labels[first.order] != second.labels[second.order])
        return differs

    @property
    def replaced(self) -> IntArray:
        """`(rounds,)` how many records of each round differ."""
        rounds = np.searchsorted(self.first.offsets, np.flatnonzero(self.swapped()), side="right") - 1
        return np.bincount(rounds, minlength=self.first.rounds).astype(np.int64)

    def of(self, world: int) -> LearnerData:
        """Records of the learner in world 0 or 1."""
        return self.second if world else self.first

    def data(self, data: PlacedData, world: int) -> PlacedData:
        """All learners' records in world 0 or 1."""
        if self.shared:
            return replace(data, learners=(self.of(world),) * len(data.learners))
        return data.with_learner(self.learner, self.of(world))

    def holders(self, run: Run) -> tuple[int, ...]:
        """The learners whose messages depend on the record."""
        return tuple(range(run.spec.n_learners)) if self.shared else (self.learner,)

    def require_learnable(self, loss: Loss) -> None:
        """Refuse records that the loss is not defined for: what is promised is about others.

        Raises:
            DataError: a label outside the loss's domain, or numbers that are not finite.
        """
        use = int(np.flatnonzero(self.swapped())[0])
        for data in (self.first, self.second):
            row = data.order[use : use + 1]
            try:
                check_batch(data.features[row], data.labels[row], data.features.shape[1], loss)
            except DataError as error:
                raise DataError(f"a record of the two worlds ({self.what}) does not fit: {error}") from None

    def guarantee(self, run: Run) -> Guarantee:
        """What is promised for this very swap to somebody who hears every holder: their losses added up."""
        counts = np.diff(self.first.offsets)
        return joint([run.guarantee(i, counts, self.replaced) for i in self.holders(run)])

    def losses(self, run: Run, transcript: Transcript) -> FloatArray:
        """`(rounds, replicas)` exact privacy loss of every round, `log p(y|first) - log p(y|second)`.

        Infinite where one world could not have said it, not-a-number where neither could.

        Raises:
            CaptureError: a holder was not heard in the first round.
        """
        return told(run, transcript, self.holders(run), [self.first, self.second]).realised[:, 0]


def told(run: Run, transcript: Transcript, holders: Sequence[int], worlds: Sequence[LearnerData]) -> Losses:
    """What the messages of all holders of a record tell, between the first world and each other one: their losses added up.

    Raises:
        CaptureError: a holder was not heard in the first round.
    """
    with np.errstate(invalid="ignore"):  # neither world could have said it
        each = [replay(run, transcript, i, worlds) for i in holders]
        rounds = min(len(losses.realised) for losses in each)
        realised: FloatArray = np.sum([losses.realised[:rounds] for losses in each], axis=0)
        largest: FloatArray = np.sum([losses.largest[:rounds] for losses in each], axis=0)
    return Losses(realised, largest)


def chosen(
    data: PlacedData,
    learner: int,
    row: int,
    features: FloatArray,
    label: float,
    *,
    other: str = "another one",
    shared: bool = False,
) -> Worlds:
    """One record of a learner, in all of its uses, against another one.

    Args:
        data: all records.
        learner: whose.
        row: which.
        features: of the other one, as placed: scaled, with the intercept.
        label: of the other one, in the domain of the loss.
        other: the other one, in words.
        shared: all learners hold the same records.

    Raises:
        DataError: no such record, one that does not fit, or the same again.
    """
    own = data.learners[learner]
    if 0 <= row < len(own.labels) and row not in own.order:
        raise DataError(
            f"record {row} is learned in no round, so a swap shows nothing; record {own.order[0]} is learned"
        )
    what = f"record {row}, in all of its uses, against {other}"
    return Worlds(learner, own, own.with_record(row, features, label), what, shared)
