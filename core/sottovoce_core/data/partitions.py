"""Partitions: rules that assign the records of a source to the learners."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import SpecError
from sottovoce_core.registry import Count, Positive, Registry, Section
from sottovoce_core.text import abbreviate_names, suggest_name


class Partition(Section, ABC):
    """Rule that assigns records to learners."""

    kind: str

    is_shared: ClassVar[bool] = False
    """True if every learner gets every record, so that nothing is split."""

    @property
    def has_own_order(self) -> bool:
        """True if learners that share all records learn them in different orders."""
        return False

    def resolve_names(self, learners: Sequence[str], labels: Sequence[str]) -> Partition:
        """Return a partition that needs no names; by default this one.

        Args:
            learners: names of the learners, by index.
            labels: names of the classes, by class; empty if the loss has no classes.

        Raises:
            SpecError: this partition names a learner or a label that does not exist.
        """
        return self

    @abstractmethod
    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """Split the records among learners: return the places in `labels` of each learner's records.

        Each record belongs to at most one learner, unless `is_shared`; one that belongs to none is not used.

        Args:
            labels: `(records,)` in the domain of the loss.
            classes: `(records,)` class of each record, at least as fine as the labels.
            n_learners: number of learners.
            rng: source of all randomness.
        """

    def owners(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> IntArray:
        """Return the learner of every record, `(records,)`, or -1 if no learner gets it; arguments as in `split`."""
        owners = np.full(len(labels), -1, dtype=np.int64)
        for learner, rows in enumerate(self.split(labels, classes, n_learners, rng)):
            owners[rows] = learner
        return owners


PARTITIONS: Registry[Partition] = Registry(
    Partition,  # type: ignore[type-abstract]  # of its subclasses
    {
        "iid": "IidPartition",
        "by_label": "LabelPartition",
        "dirichlet": "DirichletPartition",
        "paper_40_60": "Paper4060Partition",
        "classes": "ClassPartition",
        "contiguous": "ContiguousPartition",
        "shared": "SharedPartition",
    },
    group="partitions",
)

AnyPartition = Annotated[SerializeAsAny[Partition], PARTITIONS]
"""Field of a spec: the partition of the named kind."""


class IidPartition(Partition):
    """Random assignment of records."""

    kind: Literal["iid"] = "iid"

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        return np.array_split(rng.permutation(len(labels)), n_learners)


class LabelPartition(Partition):
    """Records sorted by label and cut into equal parts: most learners see one label only.

    `iid_fraction` is the share of each learner's records that is assigned at random instead (0: the hardest skew).
    """

    kind: Literal["by_label"] = "by_label"
    iid_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the records that is assigned at random."""

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """Split a random pool of the share `iid_fraction` evenly; sort the rest by label, then class, and cut it evenly."""
        shuffled = rng.permutation(len(labels))
        pool, rest = np.split(shuffled, [round(self.iid_fraction * len(labels))])
        rest = rest[np.lexsort((classes[rest], labels[rest]))]
        # array_split puts surplus records in the first parts; reversed, the pool's surplus goes to the last learners,
        # so that totals differ by at most one.
        pools = np.array_split(pool, n_learners)[::-1]
        return [np.concatenate(pair) for pair in zip(np.array_split(rest, n_learners), pools, strict=True)]


class DirichletPartition(Partition):
    """For each class, shares over learners drawn from a symmetric Dirichlet distribution: small concentration, strong skew."""

    kind: Literal["dirichlet"] = "dirichlet"
    concentration: Positive
    """Concentration: small for learners with different labels."""

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """Draw shares p ~ Dirichlet(concentration, ..., concentration) of each class.

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


class Paper4060Partition(Partition):
    """40 % of class c to learner c mod learners, the rest split evenly (Chen & Wang, experiments B and C)."""

    kind: Literal["paper_40_60"] = "paper_40_60"

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """Give 40 % of class c to learner `c mod n_learners`, 60 % evenly to the others (to itself, if there are none)."""
        parts: list[list[IntArray]] = [[] for _ in range(n_learners)]
        for c, rows in enumerate(_shuffled_classes(classes, rng)):
            owner = c % n_learners
            others = rng.permutation(np.delete(np.arange(n_learners), owner)) if n_learners > 1 else np.array([owner])
            own, rest = np.split(rows, [round(_OWN_SHARE * len(rows))])
            parts[owner].append(own)
            for other, piece in zip(others, np.array_split(rest, len(others)), strict=True):
                parts[other].append(piece)
        return [np.concatenate(part) for part in parts]


class ClassPartition(Partition):
    """Records of some labels only at each learner; the records of a label are split evenly among its learners, at random.

    The labels of each learner are part of the spec, or follow from it: they are public.
    """

    kind: Literal["classes"] = "classes"
    labels: Annotated[
        Annotated[Count, Field(strict=True)] | dict[str, Annotated[tuple[int | str, ...], Field(min_length=1)]],
        Field(examples=[2, {"ann": [0, 1], "ben": [2]}]),
    ]
    """Number of labels of each learner, chosen at random; or the labels of each learner, by its name."""

    def resolve_names(self, learners: Sequence[str], labels: Sequence[str]) -> Partition:
        if isinstance(self.labels, int):
            return self
        if not labels:
            raise SpecError(
                "data.partition classes must name labels that are classes, and those of this loss are numbers: take a loss of "
                "classes, or another partition"
            )
        if unknown := [name for name in self.labels if name not in learners]:
            raise SpecError(
                f"data.partition.labels must name learners of the run, {abbreviate_names(learners)}, got {unknown[0]!r}"
                f"{suggest_name(unknown[0], learners)}"
            )
        if missing := [name for name in learners if name not in self.labels]:
            raise SpecError(
                f"data.partition.labels must have a list for every learner, and has none for {abbreviate_names(missing)}"
            )
        classes = {text: k for k, text in enumerate(labels)}
        chosen = [dict.fromkeys(map(str, self.labels[name])) for name in learners]
        if unknown := [text for texts in chosen for text in texts if text not in classes]:
            raise SpecError(
                f"data.partition.labels must be labels that occur, {abbreviate_names(labels)}, got "
                f"{abbreviate_names(list(dict.fromkeys(unknown)))}"
            )
        return _AssignedClasses(classes=tuple(tuple(classes[text] for text in texts) for texts in chosen))

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """Give every learner equally many classes, and every class to equally many learners, or to one more.

        Raises:
            SpecError: the labels are named, so that `resolve_names` comes first; or their number is impossible.
        """
        if not isinstance(self.labels, int):
            raise SpecError("a partition of named labels must be resolved before it splits records")
        known = rng.permutation(np.unique(classes))
        if self.labels > len(known):
            raise SpecError(
                f"data.partition.labels must be at most the number of labels, {len(known)}, got {self.labels}"
            )
        if (given := self.labels * n_learners) < len(known):
            raise SpecError(
                f"data.partition.labels must give every label to a learner, and {n_learners} learners of {self.labels} have "
                f"{given} of {len(known)}: set it to at least {math.ceil(len(known) / n_learners)}, or name the labels of each "
                "learner"
            )
        dealt = np.resize(known, given).reshape(n_learners, self.labels)
        assigned = _AssignedClasses(classes=tuple(tuple(map(int, own)) for own in dealt))
        return assigned.split(labels, classes, n_learners, rng)


class _AssignedClasses(Partition):
    """Classes of each learner, by index; the records of a class are split evenly among its learners, at random."""

    kind: Literal["classes"] = "classes"
    classes: tuple[tuple[int, ...], ...]

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        parts: list[list[IntArray]] = [[np.empty(0, dtype=np.int64)] for _ in range(n_learners)]
        for rows in _shuffled_classes(classes, rng):
            holders = [i for i, own in enumerate(self.classes) if int(classes[rows[0]]) in own]
            for holder, piece in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
                parts[holder].append(piece)
        return [np.concatenate(part) for part in parts]


class ContiguousPartition(Partition):
    """Consecutive records, in the order of the source: the first ones to the first learner, and so on."""

    kind: Literal["contiguous"] = "contiguous"
    counts: Annotated[Count | tuple[Count, ...] | None, Field(examples=[[500, 300, 200]])] = None
    """Number of records of each learner: one number, or one per learner; None: all records, in equal parts."""

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        """Cut the records at the sums of `counts`; records beyond the last one are not used.

        Raises:
            SpecError: another number of counts than learners, or more records than there are.
        """
        rows = np.arange(len(labels))
        if self.counts is None:
            return np.array_split(rows, n_learners)
        counts = self.counts if isinstance(self.counts, tuple) else (self.counts,) * n_learners
        if len(counts) != n_learners:
            raise SpecError(
                f"data.partition.counts must have one number for each of the {n_learners} learners, got {len(counts)}"
            )
        if (total := sum(counts)) > len(rows):
            raise SpecError(
                f"data.partition.counts must add up to at most {len(rows)}, the records that are not held out, got {total}: "
                "lower the counts, or data.test_fraction"
            )
        return np.split(rows[:total], np.cumsum(counts)[:-1])


class SharedPartition(Partition):
    """Every record at every learner: a copy for each.

    By default all learn the same records in the same rounds, as one global objective known to all needs (the dpsda family).
    """

    kind: Literal["shared"] = "shared"
    own_order: bool = False
    """Shuffle each learner's copy separately, so that learners learn different records in a round."""

    is_shared: ClassVar[bool] = True

    @property
    def has_own_order(self) -> bool:
        return self.own_order

    def split(self, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
        return [np.arange(len(labels))] * n_learners


def _shuffled_classes(classes: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Return the records of each class that occurs, in random order, class by class."""
    rows = rng.permutation(len(classes))
    rows = rows[np.argsort(classes[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(classes[rows])) + 1)
