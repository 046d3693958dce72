"""Noise that runs share: from few seeds, or from a snapshot."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from sottovoce.arrays import FloatArray
from sottovoce.lab.selftest.breaking import Change
from sottovoce.lab.selftest.evidence import each_number, each_run, event, repeated
from sottovoce.lab.selftest.mutants import MOST, SEEN, Mutant, laplace_only, noisy, unaided
from sottovoce.noise import Draw
from sottovoce.running.run import Run

_TIE = 2.0**-40
"""About the probability that a number is one that was said before."""


def _every_run_alike(noise: FloatArray, draw: Draw) -> FloatArray:
    """All runs say the noise of the first one, as from a seed that never changes."""
    return np.broadcast_to(noise[..., :1, :], noise.shape).copy()


def _mixed(words: Any) -> Any:
    """64 bits that look random, of 64 bits that are not (SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _numbers(seeds: Any, count: int) -> FloatArray:
    """The first standard Laplace numbers of streams, along the last axis, which `seeds` has with length 1."""
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = _mixed(_mixed(seeds.astype(np.uint64)) + places)
    sizes: FloatArray = -np.log1p(-((words >> np.uint64(11)).astype(np.float64)) * 2.0**-53)
    return np.where(words & np.uint64(1), sizes, -sizes)


def _streams(generator: Generator, count: int, *, messages: bool = False) -> Change:
    """A generator that knows so many seeds: it gets one of them for every learner of a run, or for every message."""
    chosen: dict[tuple[int, ...], Any] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        shape = (*noise.shape[:-1], 1)
        if messages:
            seeds = generator.integers(0, count, shape)
        else:
            seeds = chosen.setdefault(shape, generator.integers(0, count, shape)) + (draw.round + 1) * 2**40
        return draw.rounded(_numbers(seeds, noise.shape[-1]) * draw.scale)

    return change


def _low_words(generator: Generator, share: float) -> Change:
    """The 32 low bits of some numbers are those of the number of the round before."""
    last: dict[str, Any] = {}
    low = np.int64(2**32 - 1)

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        if draw.grid is None:
            return noise
        steps = np.rint(noise / draw.grid).astype(np.int64)
        before, last[draw.field] = last.get(draw.field), steps
        if before is None or before.shape != steps.shape:
            return noise
        mixed = (steps & ~low) | (before & low)
        return np.where(generator.random(noise.shape) < share, mixed, steps) * draw.grid

    return change


def _restored(generator: Generator, share: float) -> Change:
    """Some runs go on from a snapshot of the run before: they say its noise."""
    chosen: dict[int, Any] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        replicas = noise.shape[-2]
        if replicas not in chosen:
            own = np.arange(replicas)
            chosen[replicas] = np.where(generator.random(replicas) < share, np.maximum(own - 1, 0), own)
        return noise[..., chosen[replicas], :]

    return change


_runs = partial(Mutant, family="conformance", kind="across runs", runs=MOST, quick=False)


def _spoken(run: Run) -> float:
    return float(run.spec.rounds * run.spec.n_learners)


def _started(run: Run) -> float:
    return float(run.spec.n_learners)


RUNS = (
    Mutant(
        "constant seed",
        "every run draws from the same seed",
        unaided(lambda: _every_run_alike),
        "conformance",
        SEEN,
        kind="across runs",
        limit=repeated(1.0, _started),
    ),
    *(
        _runs(
            f"2^{bits} seeds",
            "a run's seed is one of few",
            laplace_only(noisy(partial(_streams, count=2**bits))),
            limit=repeated(2.0**bits, _started),
        )
        for bits in (8, 12, 16, 20)
    ),
    _runs(
        "seconds of a day",
        "a learner's seed is the time it started",
        laplace_only(noisy(partial(_streams, count=86_400))),
        limit=repeated(86_400.0, _started),
    ),
    *(
        _runs(
            f"2^{bits} streams",
            "a message's seed is one of few",
            laplace_only(noisy(partial(_streams, count=2**bits, messages=True))),
            limit=repeated(2.0**bits, _spoken),
        )
        for bits in (16, 20, 24)
    ),
    *(
        _runs(
            f"low words again in {100 * share:g} %",
            "32 low bits said again a round later",
            laplace_only(noisy(partial(_low_words, share=share))),
            limit=each_number(event(share, 2.0**-32), share),
        )
        for share in (0.01, 0.0005)
    ),
    _runs(
        "restored",
        "2 % of the runs say the noise of the run before",
        laplace_only(noisy(partial(_restored, share=0.02))),
        limit=each_run(event(0.02, 2.0**-60), 0.02),
    ),
)
"""Noise that runs share."""
