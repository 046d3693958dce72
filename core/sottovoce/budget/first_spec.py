"""A first spec for somebody's records: an algorithm, batches and noise, such that no record costs more than a wished epsilon.

PD-OGD, with the public mix played: a record shows in one message, whose noise is in proportion to what one record of a batch
can move it, so large batches cost little accuracy, and the model follows from messages that were charged.

A round's records first show in the message after it. So what is left of a learner's records when all batches are full comes in
the last round, which shows in none: a small batch would cost more than a full one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sottovoce.budget.calibration import Target, calibrate, epsilons
from sottovoce.data.dataset import Dataset
from sottovoce.errors import SpecError
from sottovoce.running.placement import place
from sottovoce.running.run import build_run
from sottovoce.spec import RunSpec, parse_spec

ALGORITHM: Mapping[str, Any] = {"name": "pd-ogd", "noise": {"kind": "calibrated"}}
ROUNDS = 6
"""Where nobody says how many: few rounds have large batches, whose noise is small."""
_DIGITS = 4
"""Of a noise, for people: rounded towards more noise."""


def first_spec(document: Mapping[str, Any], dataset: Dataset, epsilon: float, rounds: int = ROUNDS) -> RunSpec:
    """The spec with an algorithm, rounds, batches and noise.

    Args:
        document: of a spec without these.
        dataset: its records.
        epsilon: what a record may cost at most.
        rounds: at most so many; a source that places its records in rounds has its own.

    Raises:
        SpecError: a learner gets no record, or no noise is enough, or only with a warning.
        DataError: the records cannot be placed.
    """
    if dataset.round is not None:
        rounds, batch = int(dataset.round.max()) + 1, 1
    else:
        least = min(len(own.labels) for own in place(_parsed(document, 1, "all"), dataset).learners)
        batch = max(1, least // max(rounds - 1, 1))
        rounds = min(rounds, least // batch + 1)
    if rounds < 2:
        raise SpecError(f"rounds must be at least 2, for records of round 0 show in round 1, got {rounds}")
    spec = _parsed(document, rounds, batch)
    data = place(spec, dataset)
    found = calibrate(spec, data, Target((epsilon,) * spec.n_learners, per="record")).spec
    found = found.model_copy(update={"algorithm": _readable(found.algorithm)})
    run = build_run(found, data.n_features)
    if run.warnings:
        raise SpecError(f"no spec for epsilon {epsilon:g} is within the theory: {run.warnings[0].text}")
    spent = max(epsilons(run, data, per="record"))
    if spent > epsilon:  # noise only grew
        raise AssertionError(f"epsilon {spent} was to be at most {epsilon}")
    return found


def _parsed(document: Mapping[str, Any], rounds: int, batch: int | str) -> RunSpec:
    data = {**document["data"], "batch_size": batch}
    return parse_spec({**document, "rounds": rounds, "algorithm": dict(ALGORITHM), "data": data}, imports=False)


def _readable(algorithm: Any) -> Any:
    """The same with an epsilon of few digits, not above what it was."""
    noise, told = algorithm.noise, np.atleast_1d(algorithm.noise.epsilon)
    rounded = tuple(_down(float(each)) for each in told)
    fewer = rounded if len(set(rounded)) > 1 else rounded[0]
    return algorithm.model_copy(update={"noise": noise.model_copy(update={"epsilon": fewer})})


def _down(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return float(f"{math.floor(value / step * (1 + 1e-12)) * step:.{_DIGITS}g}")
