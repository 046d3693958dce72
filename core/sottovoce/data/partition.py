"""Rules by which records are dealt out to learners, by the kind that a spec gives, where the file does not say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.registry import Positive, Registry, Section


class Partition(Section, ABC):
    """Who gets which record."""

    kind: str

    shared: ClassVar[bool] = False
    """Does every learner get every record, so that nothing is dealt?"""

    @abstractmethod
    def deal(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """The records of each learner, as places in `labels`.

        Args:
            labels: `(records,)` in the domain of the loss.
            classes: `(records,)` class of each record, at least as fine as the labels.
            n_learners: number of learners.
            rng: source of all randomness.
        """

    def owners(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> IntArray:
        """The learner of every record, `(records,)`; arguments as in `deal`."""
        owners = np.empty(len(labels), dtype=np.int64)
        for learner, rows in enumerate(self.deal(labels, classes, n_learners, rng)):
            owners[rows] = learner
        return owners


PARTITIONS: Registry[Partition] = Registry(
    Partition,  # type: ignore[type-abstract]  # of its subclasses
    {
        "iid": "Iid",
        "by_label": "ByLabel",
        "dirichlet": "Dirichlet",
        "paper_40_60": "Paper4060",
        "shared": "Shared",
    },
    group="partitions",
)

AnyPartition = Annotated[SerializeAsAny[Partition], PARTITIONS]
"""A field of a spec: the partition of the kind that it names."""


class Iid(Partition):
    """Records are dealt out at random."""

    kind: Literal["iid"] = "iid"

    def deal(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        return np.array_split(rng.permutation(len(labels)), n_learners)


class ByLabel(Partition):
    """Records are sorted by label and cut into equal parts: most learners see one label only.

    `mixed` is the share of each learner's records that is dealt out at random instead (0: the hardest skew).
    """

    kind: Literal["by_label"] = "by_label"
    mixed: Annotated[float, Field(ge=0, le=1)] = 0.0

    def deal(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """A random pool of the share `mixed`, dealt evenly; the rest sorted by label, then class, and cut evenly."""
        shuffled = rng.permutation(len(labels))
        pool, rest = np.split(shuffled, [round(self.mixed * len(labels))])
        rest = rest[np.lexsort((classes[rest], labels[rest]))]
        # array_split gives its surplus records to the first parts; reversed, the pool's surplus goes to the last learners,
        # so that totals differ by at most one.
        pools = np.array_split(pool, n_learners)[::-1]
        return [np.concatenate(pair) for pair in zip(np.array_split(rest, n_learners), pools, strict=True)]


class Dirichlet(Partition):
    """For each label, shares over learners drawn from a symmetric Dirichlet law: small concentration, strong skew."""

    kind: Literal["dirichlet"] = "dirichlet"
    concentration: Positive

    def deal(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """Shares p ~ Dirichlet(concentration, ..., concentration) of each class.

        Learner i gets the records of the shuffled class between the rounded cuts `records * (p_0 + ... + p_{i-1})` and
        `records * (p_0 + ... + p_i)`.
        """
        parts: list[list[IntArray]] = [[] for _ in range(n_learners)]
        for rows in _shuffled_classes(classes, rng):
            shares = rng.dirichlet(np.full(n_learners, self.concentration))
            cuts = np.rint(len(rows) * np.cumsum(shares)[:-1]).astype(np.int64)
            for part, piece in zip(parts, np.split(rows, cuts), strict=True):
                part.append(piece)
        return [np.concatenate(part) for part in parts]


_OWN_SHARE = 0.4
"""Share of a class that goes to the learner of that class (Chen & Wang 2025, experiments B and C)."""


class Paper4060(Partition):
    """40 % of class c to learner c mod learners, the rest of it dealt out evenly (Chen & Wang, experiments B and C)."""

    kind: Literal["paper_40_60"] = "paper_40_60"

    def deal(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """40 % of class c to learner `c mod n_learners`, 60 % evenly to the others (to itself, if there are none)."""
        parts: list[list[IntArray]] = [[] for _ in range(n_learners)]
        for c, rows in enumerate(_shuffled_classes(classes, rng)):
            owner = c % n_learners
            others = rng.permutation(np.delete(np.arange(n_learners), owner)) if n_learners > 1 else np.array([owner])
            own, rest = np.split(rows, [round(_OWN_SHARE * len(rows))])
            parts[owner].append(own)
            for other, piece in zip(others, np.array_split(rest, len(others)), strict=True):
                parts[other].append(piece)
        return [np.concatenate(part) for part in parts]


class Shared(Partition):
    """Every learner has every record, in the same rounds: for one global objective that all know (the dpsda family)."""

    kind: Literal["shared"] = "shared"

    shared: ClassVar[bool] = True

    def deal(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        return [np.arange(len(labels))] * n_learners


def _shuffled_classes(classes: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """The records of each class that occurs, in random order, class by class."""
    rows = rng.permutation(len(classes))
    rows = rows[np.argsort(classes[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(classes[rows])) + 1)
