"""From a spec to a run and its data, ready to start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sottovoce.budget.lattice_slack import check_lattice
from sottovoce.data import LearnerData, PlacedData, load_dataset
from sottovoce.errors import SpecError
from sottovoce.running.placement import place
from sottovoce.running.run import Run, build_run
from sottovoce.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may start, and who learns what when."""

    run: Run
    data: PlacedData


def prepare(spec: RunSpec, *, data_folder: str | None = None) -> Prepared:
    """Load and place the data, and check the run.

    Args:
        spec: the run spec.
        data_folder: where downloaded public data sets lie.

    Raises:
        SpecError: the spec cannot be run as it is.
        DataError: its data cannot be used.
    """
    dataset = load_dataset(spec.data, spec.loss, folder=Path(data_folder) if data_folder else None)
    data = place(spec, dataset)
    run = build_run(spec, data.n_features)
    if run.algorithm.accountant(0).shared and not all(_same(data.learners[0], other) for other in data.learners[1:]):
        raise SpecError(
            f"{spec.algorithm.name} needs the same records at every learner in every round: set data.partition to shared"
        )
    slack = check_lattice(run)
    return Prepared(replace(run, warnings=run.warnings + slack), data)


def _same(one: LearnerData, other: LearnerData) -> bool:
    parts = ("features", "labels", "order", "offsets")
    return one is other or all(np.array_equal(getattr(one, part), getattr(other, part)) for part in parts)
