#!/usr/bin/env python3
"""Floor of simulator.py: LDP-DOL for logistic regression on a ring, as a bare numpy loop.

One Laplace vector per learner and round, gossip with both neighbours, the gradient of the round's record (with --history: of all
records so far), projection onto a ball. No lattice, one noise scale for all, no bounds enforced, no recording. Prints a JSON
line: replica-rounds/s, microseconds of CPU time per replica-round, and the mean of all parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy; the client does the same
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PULL, RADIUS = 0.3, 1e5
"""Weight of each neighbour, and the radius of the ball."""


@dataclass(frozen=True, slots=True)
class Records:
    """A record per learner and round, equal for all replicas: features (learners, rounds, dim), labels (learners, rounds)."""

    features: Floats
    labels: Floats

    @classmethod
    def random(cls, learners: int, rounds: int, dim: int) -> Records:
        """Draw rows of norm about 1, labelled by a plane."""
        rng = np.random.default_rng(0)
        features = rng.normal(size=(learners, rounds, dim)) / np.sqrt(dim)
        return cls(features, (features @ rng.normal(size=dim) > 0).astype(np.float64))

    def gradient(self, theta: Floats, first: int, after: int) -> Floats:
        """Return the mean logistic gradient of the records of rounds first..after-1 at theta (learners, replicas, dim)."""
        rows, labels = self.features[:, first:after], self.labels[:, None, first:after]
        sigmoid = 1.0 / (1.0 + np.exp(-(theta @ rows.transpose(0, 2, 1))))
        gradient: Floats = (sigmoid - labels) @ rows / (after - first)
        return gradient


def simulate(records: Records, replicas: int, history: bool) -> Floats:
    """Simulate all rounds; return the parameters after the last one (learners, replicas, dim)."""
    learners, rounds, dim = records.features.shape
    noise = np.random.Generator(np.random.SFC64(1))
    left, right = np.roll(np.arange(learners), 1), np.roll(np.arange(learners), -1)
    theta: Floats = np.zeros((learners, replicas, dim))
    for t in range(rounds):
        k = t + 1.0
        messages = theta + noise.laplace(scale=k**0.11, size=theta.shape)
        gossip = messages[left] + messages[right] - 2.0 * theta
        step = k**-0.77 * records.gradient(theta, 0 if history else t, t + 1)
        theta = theta + k**-0.65 * PULL * gossip - step
        norms = np.linalg.norm(theta, axis=-1, keepdims=True)
        theta *= np.minimum(1.0, RADIUS / np.maximum(norms, 1e-300))
    return theta


def main() -> int:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"--learners": 5, "--dim": 117, "--rounds": 2000, "--replicas": 100}.items():
        parser.add_argument(name, type=int, default=default, help="default: %(default)s")
    parser.add_argument("--history", action="store_true", help="use the gradient of all records so far")
    options = parser.parse_args()
    records = Records.random(options.learners, options.rounds, options.dim)
    wall, cpu = time.perf_counter(), time.process_time()
    theta = simulate(records, options.replicas, options.history)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    units = options.replicas * options.rounds
    print(json.dumps({"replica_rounds_per_s": units / wall, "cpu_us": 1e6 * cpu / units, "mean": float(theta.mean())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
