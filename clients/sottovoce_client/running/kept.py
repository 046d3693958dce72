"""What the learners of a live run have learned, by the logs that they kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sottovoce.arrays import Batch
from sottovoce.data import LearnerData, PlacedData
from sottovoce.experiment import Prepared
from sottovoce.running.run import Run, build_run
from sottovoce_learner.storage.recovery import Learned, learners_in

MOST_ROUNDS = 100_000
"""Rounds whose records are held in memory."""


def learned_by(logs: Path, run: Run, data: PlacedData, run_id: str) -> Prepared | None:
    """A run of live records as if it had been planned: what its learners have learned, by their logs.

    Args:
        logs: their state folder.
        run: as it was prepared.
        data: its held-out records.
        run_id: its number.

    Returns:
        The rounds that all of them have learned; None where a log was not kept, or there are more than `MOST_ROUNDS`.
    """
    spec, n_features = run.spec, data.n_features
    if set(spec.names) - set(learners_in(logs, run_id)):
        return None
    found = [Learned(logs, name, run_id, spec, n_features) for name in spec.names]
    for each in found:
        each.look()
    rounds = min(each.rounds for each in found)
    if not 0 < rounds <= MOST_ROUNDS:
        return None
    learners = tuple(_as_data([each.batch(t) for t in range(rounds)]) for each in found)
    return Prepared(build_run(spec.model_copy(update={"rounds": rounds}), n_features), replace(data, learners=learners))


def _as_data(batches: Sequence[Batch]) -> LearnerData:
    features, labels = (
        np.concatenate(parts) for parts in zip(*((each.features, each.labels) for each in batches), strict=True)
    )
    return LearnerData(features, labels, np.arange(len(labels)), np.cumsum([0, *(each.size for each in batches)]))
