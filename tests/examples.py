"""Small runs and made-up records that tests of several packages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.runs.policy import Policy
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.spec import RunSpec, parse_spec

ALLOWING_FILE = Path(__file__).with_name("allowing.yaml")
ALLOWING = Policy.load(ALLOWING_FILE)
"""A policy under which any run goes on."""


def small_spec(
    rounds: int | None = 20, learners: Any = 3, *, algorithm: dict[str, Any] | None = None, **sections: Any
) -> RunSpec:
    """A spec that needs no file; `algorithm` changes single parameters, `sections` whole sections."""
    chosen = {"name": "ldp-dol", "sigma": 1.0, "varsigma": 0.1, **(algorithm or {})}
    document = {"rounds": rounds, "learners": learners, "algorithm": chosen, "durability": "process", **sections}
    return parse_spec(document, allow_imports=True)


def small_run(rounds: int = 20, learners: Any = 3, n_features: int = 3, **more: Any) -> Run:
    """A run of `small_spec`."""
    return build_run(small_spec(rounds, learners, **more), n_features)


def made_up(
    spec: RunSpec, n_features: int = 3, *, batch: int = 1, records: int | None = None, seed: int = 0
) -> PlacedData:
    """Records for a run: labels 0 and 1, `batch` in every round in which a learner takes part.

    Args:
        spec: the run.
        n_features: features of a record.
        batch: records in a round.
        records: how many a learner has before they repeat (default: as many as it learns).
        seed: of the records.
    """
    generator = np.random.default_rng(seed)
    uses = spec.rounds * batch
    own = records or uses
    learners = []
    for i in range(spec.n_learners):
        features = generator.normal(size=(own, n_features))
        labels = (generator.random(own) < 0.5).astype(np.float64)
        part = spec.participation.learner_participation(i, spec.rounds).mask()
        offsets = np.concatenate([[0], np.cumsum(part * batch)]).astype(np.int64)
        order = (np.arange(offsets[-1]) % own).astype(np.int64)
        learners.append(LearnerData(features, labels, order, offsets))
    test = generator.normal(size=(8, n_features))
    return PlacedData(tuple(learners), test, (test[:, 0] > 0).astype(np.float64))
