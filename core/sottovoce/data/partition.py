"""Which learner gets which record, where the file does not say."""

from __future__ import annotations

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.data.specs import ByLabel, Dirichlet, Iid, Partition

OWN_SHARE = 0.4
"""Share of a class that goes to the learner of that class (Chen & Wang 2025, experiments B and C)."""


def assign(
    partition: Partition, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator
) -> IntArray:
    """Deal records out: the learner of every record, `(records,)`.

    Args:
        partition: the rule; `shared` is none, nothing is dealt then.
        labels: `(records,)` in the domain of the loss.
        classes: `(records,)` class of each record, at least as fine as the labels.
        n_learners: number of learners.
        rng: source of all randomness.
    """
    match partition:
        case Iid():
            parts = np.array_split(rng.permutation(len(labels)), n_learners)
        case ByLabel(mixed=mixed):
            parts = _by_label(mixed, labels, classes, n_learners, rng)
        case Dirichlet(concentration=concentration):
            parts = _dirichlet(concentration, classes, n_learners, rng)
        case _:
            parts = _paper_40_60(classes, n_learners, rng)
    owners = np.empty(len(labels), dtype=np.int64)
    for learner, rows in enumerate(parts):
        owners[rows] = learner
    return owners


def _by_label(
    mixed: float, labels: FloatArray, classes: IntArray, n_learners: int, rng: np.random.Generator
) -> list[IntArray]:
    """A random pool of the share `mixed`, dealt evenly; the rest sorted by label, then class, and cut evenly."""
    shuffled = rng.permutation(len(labels))
    pool, rest = np.split(shuffled, [round(mixed * len(labels))])
    rest = rest[np.lexsort((classes[rest], labels[rest]))]
    # array_split gives its surplus records to the first parts; reversed, the pool's surplus goes to the last learners,
    # so that totals differ by at most one.
    pools = np.array_split(pool, n_learners)[::-1]
    return [np.concatenate(pair) for pair in zip(np.array_split(rest, n_learners), pools, strict=True)]


def _dirichlet(concentration: float, classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
    """Shares p ~ Dirichlet(concentration, ..., concentration) of each class.

    Learner i gets the records of the shuffled class between the rounded cuts `records * (p_0 + ... + p_{i-1})` and
    `records * (p_0 + ... + p_i)`.
    """
    parts: list[list[IntArray]] = [[] for _ in range(n_learners)]
    for rows in _shuffled_classes(classes, rng):
        shares = rng.dirichlet(np.full(n_learners, concentration))
        cuts = np.rint(len(rows) * np.cumsum(shares)[:-1]).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _paper_40_60(classes: IntArray, n_learners: int, rng: np.random.Generator) -> list[IntArray]:
    """40 % of class c to learner `c mod n_learners`, 60 % evenly to the others (to itself, if there are none)."""
    parts: list[list[IntArray]] = [[] for _ in range(n_learners)]
    for c, rows in enumerate(_shuffled_classes(classes, rng)):
        owner = c % n_learners
        others = rng.permutation(np.delete(np.arange(n_learners), owner)) if n_learners > 1 else np.array([owner])
        own, rest = np.split(rows, [round(OWN_SHARE * len(rows))])
        parts[owner].append(own)
        for other, piece in zip(others, np.array_split(rest, len(others)), strict=True):
            parts[other].append(piece)
    return [np.concatenate(part) for part in parts]


def _shuffled_classes(classes: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """The records of each class that occurs, in random order, class by class."""
    rows = rng.permutation(len(classes))
    rows = rows[np.argsort(classes[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(classes[rows])) + 1)
