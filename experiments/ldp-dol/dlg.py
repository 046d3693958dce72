"""Table II, inference error: records rebuilt from the first messages of each learner."""

from __future__ import annotations

from itertools import islice

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.experiment import Experiment
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_lab.reconstruction import count_attacked_rounds, reconstruct_records


def measure(experiment: Experiment, replicas: int) -> dict[str, FloatArray]:
    """Attack the messages of the first rounds, and guess without any message; `(replicas,)` each."""
    run, data = experiment.run, experiment.records
    found = []
    for seed in range(replicas):
        rounds = islice(simulate_rounds(run, data, SeededNoise(seed)), count_attacked_rounds(run))
        transcript = Transcript.from_rounds(step.message for step in rounds)
        result = reconstruct_records(run, data, transcript, seed=seed)
        errors = [each.mean_squared_error for each in result.references.values()]
        found.append([result.mean_squared_error, *errors, result.label_share])
    names = ("error", "error_blank", "error_mean", "error_random", "label_share")
    return dict(zip(names, np.transpose(found), strict=True))
