"""Comparison of your own loss with a built-in one: `python own_loss.py`."""

import numpy as np

import sottovoce as sv
from sottovoce_core.losses import MarginLoss
from sottovoce_core.registry import Positive


class Huber(MarginLoss):
    """(1 - yz)^2 / 2 near the margin, a line of slope -width far below it; y = 2b - 1."""

    kind: str = "own_loss:Huber"  # import path for services, which are other processes
    width: Positive = 1.0

    # The guarantee relies on these bounds: they must hold for every record and parameter.
    @property
    def slope_bound(self):
        return self.width

    @property
    def curvature(self):
        return 1.0

    def value(self, scores, labels):
        shortfall = np.maximum(1.0 - (2.0 * labels - 1.0) * scores, 0.0)
        return np.where(shortfall < self.width, shortfall**2 / 2, self.width * (shortfall - self.width / 2))

    def slope(self, scores, labels):
        signs = 2.0 * labels - 1.0
        return -signs * np.clip(1.0 - signs * scores, 0.0, self.width)


def main():
    """Print accuracy and epsilon with each loss."""
    for loss in (Huber(width=0.5), {"kind": "logistic"}):
        experiment = sv.Experiment(
            rounds=100,
            algorithm={"name": "dsgd", "noise": {"kind": "power", "sigma": 0.5}},
            loss=loss,
            decision_set={"kind": "l2_ball", "radius": 10.0},
            data={"source": "breast_cancer", "scale": "standard", "reuse": True, "batch_size": 8},
        )
        final = sv.simulate(experiment, replicas=10, seed=1, metrics=["accuracy"], checkpoints=1).metrics
        accuracy = final.where(metric="accuracy", learner=None)["value"].mean()
        print(f"{experiment.loss.kind:<16} accuracy {accuracy:.3f}, epsilon {experiment.epsilon():.4g}")


if __name__ == "__main__":
    main()
