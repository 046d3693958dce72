"""Data as a spec names it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
)

from sottovoce.registry import Positive, Section, shorthand


class Iid(Section):
    """Records are dealt out at random."""

    kind: Literal["iid"]


class ByLabel(Section):
    """Records are sorted by label and cut into equal parts: most learners see one label only.

    `mixed` is the share of each learner's records that is dealt out at random instead (0: the hardest skew).
    """

    kind: Literal["by_label"]
    mixed: Annotated[float, Field(ge=0, le=1)] = 0.0


class Dirichlet(Section):
    """For each label, shares over learners drawn from a symmetric Dirichlet law: small concentration, strong skew."""

    kind: Literal["dirichlet"]
    concentration: Positive


class Paper4060(Section):
    """40 % of class c to learner c mod learners, the rest of it dealt out evenly (Chen & Wang, experiments B and C)."""

    kind: Literal["paper_40_60"]


class Shared(Section):
    """Every learner has every record, in the same rounds: for one global objective that all know (the dpsda family)."""

    kind: Literal["shared"]


Partition = Annotated[
    Iid | ByLabel | Dirichlet | Paper4060 | Shared, Field(discriminator="kind"), BeforeValidator(shorthand)
]


class DataSpec(Section):
    """Where records come from, who gets which, and in what order."""

    source: str = "breast_cancer"
    """`breast_cancer` and `digits` (shipped with scikit-learn), or a path to a `.npz`, `.csv` or `.parquet` file."""
    label: str | None = None
    """Label column of a `.csv` or `.parquet` file (default: `label`, else `y`, else the last column)."""
    positive: tuple[int | str, ...] | None = None
    """Labels that count as 1 in a binary problem (default: the later half of the sorted labels)."""
    partition: Partition = Iid(kind="iid")
    """Ignored where the file carries a `learner` column."""
    order: Literal["given", "shuffled"] = "shuffled"
    batch_size: PositiveInt | Literal["all"] = 1
    """Records per learner and round; `all`: all in round 0 (with `reuse`, in every round).

    Ignored where the file carries a `round` column.
    """
    reuse: bool = False
    """Start again from the first record when a learner's records run out. Each use is an event of its own."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Held out for accuracy. Treated as public: the constants of `scale` are read off it."""
    scale: Literal["none", "standard", "range"] = "none"
    """Per-feature scaling by constants of the held-out part, so that no constant depends on a learner's records."""
    intercept: bool = True
    """Append a constant feature."""
    seed: NonNegativeInt = 0
    """For the split, the partition and the order. Not for noise."""
