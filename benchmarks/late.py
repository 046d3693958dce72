#!/usr/bin/env python3
"""Benchmark of the accuracy with stale messages: updates use messages from up to a given number of rounds before.

The simulator runs the same algorithm as the services and draws the age of each message at random. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce_core.arrays import FloatArray
from sottovoce_core.data.dataset import load_dataset
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.participation import NO_ROUND, USED_ROUNDS_FIELD, encode_punctual_rounds, measure_staleness
from sottovoce_core.runs.placement import place_data
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import parse_spec

COMPARISON: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)
"""Runs of `sottovoce compare --all-algorithms`. Learners get different kinds of records, so that received messages matter."""
NAMES = ("ldp-dol", "dsgd", "dola", "dpsr", "dpsda-c", "dvp", "d-ogd")
LAGS = (0, 1, 5, 20, 80)

console = Console() if sys.stdout.isatty() else Console(width=100)


def draw_used_rounds(run: Run, max_lag: int, seed: int) -> FloatArray:
    """Draw the round of each message that an update uses, `(rounds, learners, width)`; it never decreases between updates."""
    generator = np.random.default_rng(seed)
    own = np.stack([encode_punctual_rounds(run.network, t + 1) for t in range(run.spec.rounds)])
    late = np.where(own == NO_ROUND, NO_ROUND, np.maximum(own - generator.integers(0, max_lag + 1, own.shape), 0.0))
    return np.asarray(np.maximum.accumulate(late, axis=0), dtype=np.float64)


def compute_rows(name: str, replicas: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each bound on age: share of late messages, accuracy on held-out records, and distance between learners."""
    changes = next(run for run in COMPARISON["runs"] if run["name"] == name)
    document = {**COMPARISON["common"], **changes, "clock": {"mode": "async"}}
    if document["data"].get("partition") == "iid":
        document["data"] = {**document["data"], "partition": {"kind": "by_label", "iid_fraction": 0.3}}
    spec = parse_spec(document, allow_imports=False)
    data = place_data(spec, load_dataset(spec.data, spec.loss))
    run = build_run(spec, data.n_features)
    for max_lag in LAGS:
        accuracies, distances, used_rounds = list[float](), list[float](), list[FloatArray]()
        for step in simulate_rounds(run, data, SeededNoise(1), replicas, draw_used_rounds(run, max_lag, 2)):
            used_rounds.append(step.message[USED_ROUNDS_FIELD])
            if step.t >= 0.9 * spec.rounds:
                found = run.loss.classify(run.loss.predict(step.decisions_after, data.test_features))
                accuracies.append(float((found == data.test_labels).mean()))
                distances.append(
                    float(np.linalg.norm(step.decisions_after - step.decisions_after.mean(axis=0), axis=-1).mean())
                )
        late = measure_staleness(np.stack(used_rounds))
        yield (
            name,
            str(max_lag),
            f"{100 * late.stale_share:.0f} %",
            f"{100 * np.mean(accuracies):.1f} %",
            f"{np.mean(distances):.3g}",
        )


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=50)
    options = parser.parse_args()
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("algorithm", "rounds late, at most", "late messages", "held-out accuracy", "learners apart"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for name in NAMES:
        for row in compute_rows(name, options.replicas):
            table.add_row(*row)
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
