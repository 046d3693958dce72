#!/usr/bin/env python3
"""Benchmark of audit power: mean lower bounds on epsilon, at 95 % confidence, by guesser and number of runs of each world.

Two mechanisms have a known epsilon: one Laplace number (epsilon 1), and 50 of them whose epsilons decrease as 0.8^t (2 in all).
The guessers are those of `sottovoce audit`, each with the whole 5 %. --markdown prints the table of docs/audit/run.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.audit import count_rehearsal_runs
from sottovoce_core.auditing.blackbox import MAX_ROUNDS, attack, build_number_views
from sottovoce_core.auditing.bounds import (
    BLACK_BOX_ALLOCATION,
    AlphaAllocation,
    choose_threshold,
    compute_epsilon_lower_bound,
)
from sottovoce_core.noise import NoiseRequest, SeededNoise, lattice_spacing, round_to_lattice

ALPHA = 0.05
RUNS = (1_000, 10_000, 100_000)
AUDITS = {"likelihood ratio": (200, 400, 40), "black box": (20, 10, 3)}
TARGETS = {
    ("one number", "likelihood ratio"): (0.90, 0.96, 0.985),
    ("one number", "black box"): (0.75, 0.88, 0.92),
    ("decay", "likelihood ratio"): (1.0, 1.35, 1.55),
}


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Mechanism of Laplace numbers of scale 1, whose means differ by `epsilons (rounds,)` between the two worlds."""

    name: str
    epsilons: FloatArray

    def draw_runs(self, count: int, generator: np.random.Generator) -> tuple[IntArray, FloatArray]:
        """Draw worlds `(runs,)` by fair coins, and messages `(runs, rounds)`."""
        worlds = generator.integers(0, 2, count)
        # On a lattice, because the low bits of a float64 sum reveal the world to the black box.
        noise = SeededNoise(generator.integers(2**63))(
            NoiseRequest("laplace", "y", 0, 1.0, lattice_spacing(1.0), (count, len(self.epsilons)))
        )
        return worlds, round_to_lattice(worlds[:, None] * self.epsilons, lattice_spacing(1.0)) + noise

    def compute_losses(self, messages: FloatArray) -> FloatArray:
        """Return the exact privacy losses `(runs,)`."""
        losses: FloatArray = (np.abs(messages - self.epsilons) - np.abs(messages)).sum(axis=1)
        return losses


def _compute_decaying_epsilons() -> FloatArray:
    shares = 0.8 ** np.arange(50)
    return np.asarray(2.0 * shares / shares.sum())


MECHANISMS = (Mechanism("one number", np.ones(1)), Mechanism("decay", _compute_decaying_epsilons()))


def bound_by_likelihood(mechanism: Mechanism, runs: int, seed: int) -> float:
    """Return the bound of the guesser by the sign of the loss, with a threshold chosen on other runs."""
    before, audited = np.random.default_rng(seed).spawn(2)
    claimed = mechanism.compute_losses(mechanism.draw_runs(2 * count_rehearsal_runs(runs), before)[1])
    worlds, messages = mechanism.draw_runs(2 * runs, audited)
    losses = mechanism.compute_losses(messages)
    guessed = np.abs(losses) >= choose_threshold(np.abs(claimed), 2 * runs, ALPHA)
    right = (losses < 0) == (worlds == 1)
    return compute_epsilon_lower_bound(int((guessed & right).sum()), int(guessed.sum()), ALPHA)


def bound_by_black_box(mechanism: Mechanism, runs: int, seed: int) -> float:
    """Return the best bound of the classifiers, with their share of alpha."""
    worlds, messages = mechanism.draw_runs(2 * runs, np.random.default_rng(seed))
    views = build_number_views(messages[:, :MAX_ROUNDS, None])
    attacks = attack(
        views, worlds, AlphaAllocation(ALPHA, BLACK_BOX_ALLOCATION), math.inf, np.random.SeedSequence(seed)
    )
    return max(each.bound.value for each in attacks)


GUESSERS: dict[str, Callable[[Mechanism, int, int], float]] = {
    "likelihood ratio": bound_by_likelihood,
    "black box": bound_by_black_box,
}


def main() -> int:
    """Run the benchmark and print the results; return 1 if a mean is below its target by more than two standard errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="1,000 runs only, few audits, to test the benchmark itself"
    )
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    options = parser.parse_args()
    sizes = RUNS[:1] if options.quick else RUNS
    rows, misses = [], []
    console = Console(stderr=True)
    for mechanism in MECHANISMS:
        for name, guesser in GUESSERS.items():
            means = []
            for k, runs in enumerate(sizes):
                began, audits = time.perf_counter(), 3 if options.quick else AUDITS[name][k]
                bounds = [guesser(mechanism, runs, seed) for seed in range(audits)]
                mean, error = float(np.mean(bounds)), float(np.std(bounds)) / audits**0.5
                means.append(f"{mean:.3f} ± {error:.3f}")
                target = TARGETS.get((mechanism.name, name))
                if target is not None and mean + 2 * error < target[k]:
                    misses.append(f"{mechanism.name}, {name}, {runs:,} runs: {means[-1]}, target {target[k]}")
                console.print(f"{mechanism.name}, {name}, {runs:,}: {time.perf_counter() - began:.1f} s", style="dim")
            rows.append((mechanism.name, f"{mechanism.epsilons.sum():.3g}", name, *means))
    heads = ("mechanism", "ε", "guesser", *(f"{runs:,} runs" for runs in sizes))
    if options.markdown:
        print("\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)))
    else:
        table = Table(*heads, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    for line in misses:
        console.print(line, style="red")
    return 1 if misses and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
