#!/usr/bin/env python3
"""Benchmark of PD-FTGL and PD-OCG on the letter data set in the setting of Wang et al. (ICML 2025): 9 learners, 150,000 rounds.

Multiclass logistic regression on 26 x 16 matrices in a trace-norm ball. `sottovoce data fetch letter` downloads the records;
without them, the script uses scikit-learn's digits (10 x 64). It prints time, speed, peak memory and
the average loss; nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: one core
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce_core.arrays import Batch
from sottovoce_core.data.catalogue import find_dataset_file, get_data_folders
from sottovoce_core.errors import SottovoceError
from sottovoce_core.experiment import prepare
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import RunSpec, parse_spec


def choose_dataset() -> tuple[str, int, int]:
    """Choose the data set; return its name, and its numbers of classes and features."""
    return ("letter", 26, 16) if find_dataset_file("letter", get_data_folders()) else ("digits", 10, 64)


def build_spec(algorithm: str, rounds: int) -> RunSpec:
    """Build the spec: one record per learner and round, clipped to norm 1; epsilon 10 on the wire, over the whole run."""
    name, classes, features = choose_dataset()
    return parse_spec(
        {
            "name": f"{name}-{algorithm}",
            "rounds": rounds,
            "learners": 9,
            "algorithm": {"name": algorithm, "epsilon": 10.0, "multiplier": 0.01},
            "loss": {"kind": "softmax", "classes": classes, "ridge": 0.0, "clip_norm": 1.0, "feature_bound": 1.0},
            "decision_set": {"kind": "trace_norm", "rows": classes, "columns": features, "radius": 10.0},
            "topology": {"graph": "complete"},
            "data": {"source": name, "scale": "range", "intercept": False, "reuse": True},
        },
        allow_imports=True,
    )


def run_algorithm(algorithm: str, rounds: int) -> tuple[float, float, float]:
    """Run an algorithm; return seconds, mean loss of all learners over all rounds, and final accuracy on held-out records."""
    prepared = prepare(build_spec(algorithm, rounds), folders=get_data_folders())
    data, loss = prepared.data, prepared.run.loss
    total, seconds, began, decision = 0.0, 0.0, time.perf_counter(), None
    for step in simulate_rounds(prepared.run, data, SeededNoise(0)):
        seconds += time.perf_counter() - began
        if step.t % 100 == 0:
            batch = data.stack_round(step.t)
            records = Batch(*loss.enforce_bounds(batch.features, batch.labels), batch.mask)
            total += 100 * float(loss.values(step.decisions_before, records).mean())
            decision = step.decisions_after
        began = time.perf_counter()
    scores = loss.predict(decision[0], data.test_features)  # type: ignore[index]
    return seconds, total / rounds, float(np.mean(loss.classify(scores)[0] == data.test_labels))


def main() -> int:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=["pd-ftgl", "pd-ocg"], help="default: pd-ftgl pd-ocg")
    parser.add_argument("--rounds", type=int, default=150_000)
    options = parser.parse_args()
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("algorithm", "rounds", "minutes", "ms per round", "average loss", "accuracy", "peak MB"):
        table.add_column(head, justify="left" if head == "algorithm" else "right")
    for algorithm in options.algorithms:
        try:
            seconds, loss, accuracy = run_algorithm(algorithm, options.rounds)
        except SottovoceError as error:
            print(f"{algorithm}: {error}", file=sys.stderr)
            return 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures = (seconds / 60, 1e3 * seconds / options.rounds, loss, accuracy, peak)
        table.add_row(algorithm, f"{options.rounds:,}", *(f"{figure:.3g}" for figure in figures))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
