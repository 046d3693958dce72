"""Comparison at equal epsilon: noise is calibrated to one budget, and other fields are tuned on public records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sottovoce_core.api import calibrate
from sottovoce_core.arrays import Batch
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.simulator import simulate_rounds

_REPLICAS = 4
"""Number of simulations of each candidate, which differ in their noise alone."""


def equalise(
    experiment: Experiment,
    target: float | None,
    delta: float,
    tune: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
) -> Experiment:
    """Return the experiment with its noise calibrated to epsilon `target` of one use of a record, and stated at a delta.

    With `tune` it also gets the combination of values with the lowest loss. Each candidate is calibrated to the target, learns
    the held-out records, which are public, in the same schedule as the experiment's own, and is judged by the mean loss of its
    final decisions on them. So tuning costs no privacy.

    Args:
        experiment: Experiment.
        target: Epsilon; None: the noise stays as it is.
        delta: Delta of both; 0: that of the spec.
        tune: Values of each field to be tuned. Fields that the experiment does not have are left out, so that experiments with
            different algorithms can share them.
        seed: Seed of the noise of the candidates.

    Raises:
        SpecError: The noise cannot be calibrated to it, or no records are held out to tune on.
    """
    if delta:
        experiment = experiment.replace(**{"privacy.delta": delta})
    candidates = [experiment.replace(**setting) for setting in _list_settings(experiment, tune or {})]
    if target is not None:
        candidates = [calibrate(each, target, delta=each.privacy.delta) for each in candidates]
    if len(candidates) == 1:
        return candidates[0]
    losses = [_measure_public_loss(each, seed) for each in candidates]
    return candidates[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))]


def _list_settings(experiment: Experiment, tune: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """List the combinations of values, of the fields that the experiment has."""
    fields = experiment.to_document()
    known = {name: values for name, values in tune.items() if _has_field(fields, name)}
    if empty := [name for name, values in known.items() if not len(values)]:
        raise SpecError(f"tuning needs values for {', '.join(empty)}")
    return [dict(zip(known, values, strict=True)) for values in itertools.product(*known.values())]


def _has_field(fields: Any, name: str) -> bool:
    *sections, field = name.split(".")
    for section in sections:
        fields = fields.get(section) if isinstance(fields, Mapping) else None
    return isinstance(fields, Mapping) and field in fields


def _measure_public_loss(experiment: Experiment, seed: int) -> float:
    """Measure the mean loss on the held-out records of decisions that are learned from them alone."""
    run, data = experiment.run, _place_public_records(experiment)
    *_, last = simulate_rounds(run, data, SeededNoise(seed), _REPLICAS)
    decisions = last.decisions_after.reshape(-1, last.decisions_after.shape[-1])
    batch = Batch(*run.loss.enforce_bounds(data.test_features, data.test_labels))
    return float(np.mean([run.loss.values(each, batch).mean() for each in decisions]))


def _place_public_records(experiment: Experiment) -> PlacedData:
    """Place the held-out records on the learners, again and again, with as many in each round as the experiment's own."""
    data = experiment.records
    if not len(data.test_labels):
        raise SpecError("tuning needs held-out records, which are public, got none: leave tune out, or name the values")
    rows = np.random.default_rng(experiment.data.seed).permutation(len(data.test_labels))

    def place(i: int, own: LearnerData) -> LearnerData:
        mine = rows if experiment.run.has_shared_records else np.roll(rows, -i * (len(rows) // len(data.learners)))
        return LearnerData(data.test_features, data.test_labels, np.resize(mine, len(own.order)), own.offsets)

    return replace(data, learners=tuple(place(i, own) for i, own in enumerate(data.learners)))
