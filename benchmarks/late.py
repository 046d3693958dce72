#!/usr/bin/env python3
"""What older messages cost in accuracy: runs in which updates use messages of up to so many rounds before.

The simulator runs the algorithm that services run; how old each message is, is drawn at random. Printed, never enforced.
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

FIELD: dict[str, Any] = yaml.safe_load(
    resources.files("sottovoce_client.runs").joinpath("builtin_algorithms.yaml").read_text("utf-8")
)
"""As `sottovoce compare --all-algorithms` runs them, but that learners hold other kinds of records: what they hear matters."""
NAMES = ("ldp-dol", "dsgd", "dola", "dpsr", "dpsda-c", "dvp", "d-ogd")
LAGS = (0, 1, 5, 20, 80)

console = Console() if sys.stdout.isatty() else Console(width=100)


def lags(run: Run, most: int, seed: int) -> FloatArray:
    """`(rounds, learners, width)`: whose message an update uses, of which round; never older than the one before it."""
    generator = np.random.default_rng(seed)
    own = np.stack([encode_punctual_rounds(run.network, t + 1) for t in range(run.spec.rounds)])
    late = np.where(own == NO_ROUND, NO_ROUND, np.maximum(own - generator.integers(0, most + 1, own.shape), 0.0))
    return np.asarray(np.maximum.accumulate(late, axis=0), dtype=np.float64)


def rows(name: str, replicas: int) -> Iterator[tuple[str, ...]]:
    """For each bound on how old messages are: how many were, accuracy on held-out records, and how far learners are apart."""
    changes = next(run for run in FIELD["runs"] if run["name"] == name)
    document = {**FIELD["common"], **changes, "clock": {"mode": "async"}}
    if document["data"].get("partition") == "iid":
        document["data"] = {**document["data"], "partition": {"kind": "by_label", "mixed": 0.3}}
    spec = parse_spec(document, allow_imports=False)
    data = place_data(spec, load_dataset(spec.data, spec.loss))
    run = build_run(spec, data.n_features)
    for most in LAGS:
        right, apart, said = list[float](), list[float](), list[FloatArray]()
        for step in simulate_rounds(run, data, SeededNoise(1), replicas, lags(run, most, 2)):
            said.append(step.message[USED_ROUNDS_FIELD])
            if step.t >= 0.9 * spec.rounds:
                found = run.loss.classify(run.loss.predict(step.decisions_after, data.test_features))
                right.append(float((found == data.test_labels).mean()))
                apart.append(
                    float(np.linalg.norm(step.decisions_after - step.decisions_after.mean(axis=0), axis=-1).mean())
                )
        late = measure_staleness(np.stack(said))
        yield (
            name,
            str(most),
            f"{100 * late.stale_share:.0f} %",
            f"{100 * np.mean(right):.1f} %",
            f"{np.mean(apart):.3g}",
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=50)
    told = parser.parse_args()
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("algorithm", "rounds late, at most", "late messages", "held-out accuracy", "learners apart"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for name in NAMES:
        for row in rows(name, told.replicas):
            table.add_row(*row)
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
