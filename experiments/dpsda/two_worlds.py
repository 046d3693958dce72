"""Table 5: the decisions in two worlds that differ in the loss of one round, with the same noise and with fresh noise."""

from __future__ import annotations

import numpy as np

from sottovoce_core.api import simulate
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.worlds import Worlds, replay_losses
from sottovoce_core.experiment import Experiment
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.simulator import simulate_rounds


def measure(experiment: Experiment, replicas: int) -> dict[str, FloatArray]:
    """Give the record of the last round but one the other label, and compare the decisions after it, `(replicas,)` each."""
    run, data = experiment.run, experiment.records
    own, t = data.learners[0], experiment.rounds - 2
    use = int(own.offsets[t])
    row = int(own.order[use])
    other = own.with_use(use, own.features[row], 1.0 - float(own.labels[row]))
    worlds = Worlds(0, own, other, "the other label", is_shared=True)

    def assemble(world: int, seed: int) -> FloatArray:
        """Return the decisions of the last two rounds, each learner's own block of its copy: `(2, replicas, dim)`."""
        owned = run.algorithm.owned_mask[:, None, :]  # type: ignore[attr-defined]  # of this family
        steps = simulate_rounds(run, worlds.build_data(data, world), SeededNoise(seed), replicas)
        decisions = [step.decisions_before for step in steps][-2:]
        return np.stack([(each * owned).sum(axis=0) for each in decisions])

    world_0, world_1, fresh = assemble(0, 0), assemble(1, 0), assemble(1, 1)
    found = {
        "difference_before": np.abs(world_0 - world_1)[0].max(axis=-1),
        "difference": np.abs(world_0 - world_1)[1].max(axis=-1),
        "distance_with_fresh_noise": np.linalg.norm(world_0[1] - fresh[1], axis=-1),
    }
    if run.algorithm.noise_scale(0, 1) > 0:
        transcript = simulate(experiment, replicas, metrics=False, transcript=True).transcript
        both = [worlds.records_0, worlds.records_1]
        losses = replay_losses(run, transcript, worlds.list_holders(run), both)  # type: ignore[arg-type]  # it is kept
        found["loss_of_messages"] = losses.max_losses[-1, 0]
    else:
        found["loss_of_messages"] = np.full(replicas, np.inf)
    return found
