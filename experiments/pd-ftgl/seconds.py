"""Seconds of processor time: of a round of all learners, and of a projection and a linear minimisation of one matrix."""

import time
from collections.abc import Callable, Mapping

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.experiment import Experiment
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.simulator import simulate_rounds

_REPETITIONS = 200


def measure(experiment: Experiment, replicas: int) -> Mapping[str, float]:
    """Measure an experiment; the rounds of `replicas` runs count together."""
    run, data = experiment.run, experiment.records
    began = time.process_time()
    for _ in simulate_rounds(run, data, SeededNoise(0), replicas):
        pass
    seconds = (time.process_time() - began) / experiment.rounds
    size = 10.0 * np.random.default_rng(0).normal(size=(_REPETITIONS, run.algorithm.dim))
    return {
        "seconds_per_round": seconds,
        "seconds_per_projection": _time(experiment.decision_set.project, size),
        "seconds_per_minimisation": _time(experiment.decision_set.minimise, size),
    }


def _time(function: Callable[[FloatArray], FloatArray], vectors: FloatArray) -> float:
    began = time.process_time()
    for each in vectors:
        function(each)
    return (time.process_time() - began) / len(vectors)
