"""Fig. 4: the loss that noise adds, in the paper's unit."""

from __future__ import annotations

from typing import cast

from sottovoce_core.api import simulate
from sottovoce_core.arrays import FloatArray
from sottovoce_core.experiment import Experiment
from sottovoce_core.runs.curves import Curves


def measure(experiment: Experiment, replicas: int) -> dict[str, FloatArray]:
    """Return C_R times the loss of the last messages beyond that of ADMM without noise, `(replicas,)`."""
    settings = experiment.algorithm
    noiseless = {name: getattr(settings, name) for name in ("penalty", "loss_weight", "tolerance")}  # without alpha
    plain = Experiment.model_validate(
        {**experiment.model_dump(mode="json"), "algorithm": {"name": "admm", **noiseless}}
    )

    def measure_loss(of: Experiment) -> FloatArray:
        curves = cast("Curves", simulate(of, replicas, metrics=["released_loss"], checkpoints=1).curves)
        loss: FloatArray = curves["released_loss"].replicas[-1]
        return loss

    return {"excess": noiseless["loss_weight"] * (measure_loss(experiment) - measure_loss(plain))}
