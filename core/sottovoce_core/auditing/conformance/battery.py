"""Battery of all conformance tests: they process runs in blocks, keep little of them, and their statistics are additive.

The tests and the faults that each class detects are described in docs/audit/run.md. To add a class of tests, write a
`ConformanceTest` and list it in `CONFORMANCE_TESTS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.bounds import AlphaAllocation, BudgetPart, Test
from sottovoce_core.auditing.conformance.block import Block, ConformanceTest, Layout
from sottovoce_core.auditing.conformance.correlations import Correlations
from sottovoce_core.auditing.conformance.freshness import Freshness
from sottovoce_core.auditing.conformance.lags import Lags
from sottovoce_core.auditing.conformance.lattice import Lattice
from sottovoce_core.auditing.conformance.marginal import Marginal
from sottovoce_core.auditing.conformance.regressors import Regressors, Relations
from sottovoce_core.auditing.conformance.residuals import Schedule, compute_residuals
from sottovoce_core.auditing.conformance.uniforms import Uniforms
from sottovoce_core.auditing.worlds import ProgressCallback, Worlds, count_numbers, discard_progress, scale_progress
from sottovoce_core.data import PlacedData
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript

# ---- dependence ------------------------------------------------------------------------------------------------------


class Dependence(ConformanceTest):
    """Tests that noise is independent of other noise and of everything before it.

    They use blocks that have the past: their cost per number is higher than that of all other tests together.
    """

    part: ClassVar[BudgetPart] = "dependence"

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        super().__init__(layout, fraction)
        self._parts: tuple[ConformanceTest, ...] = tuple(
            kind(layout) for kind in (Lags, Correlations, Regressors, Relations, Uniforms)
        )

    def add(self, block: Block) -> None:
        if block.has_past and block.count:
            for each in self._parts:
                each.add(block)

    def merge(self, other: Self) -> None:
        for own, theirs in zip(self._parts, other._parts, strict=True):
            own.merge(theirs)

    def _iterate_tests(self) -> Iterator[Test]:
        return (test for each in self._parts for test in each.compute_tests())


# ---- battery ---------------------------------------------------------------------------------------------------------

CONFORMANCE_TESTS: tuple[type[ConformanceTest], ...] = (Marginal, Lattice, Dependence, Freshness)

_MAX_CLOSE_BLOCK_NUMBERS, _MAX_BLOCK_NUMBERS = 2**21, 2**22
"""Maximum numbers in a block that is tested for dependence, too, some 100 bytes each; and in any other, some 30."""

_MAX_SAMPLE_NUMBERS = 2**20
"""Maximum number of noise values of the audited learner kept for plots; the same number for all others together."""


class Battery:
    """Statistics of all tests over the runs added so far.

    Args:
        layout: layout of the blocks.
        audited: index of the learner with the largest noise sample.
        fraction: fraction of all runs that will be added here, to be merged with the others.

    Attributes:
        noise_count: number of noise values, of all learners.
        noise_samples: sample of every learner's noise, standardised, the largest of the audited one's.
    """

    def __init__(self, layout: Layout, audited: int, fraction: float = 1.0) -> None:
        learners = len(layout.learners)
        self.noise_count = 0
        self.noise_samples: list[FloatArray] = [np.empty(0)] * learners
        self._max_samples = [
            _MAX_SAMPLE_NUMBERS if i == audited else _MAX_SAMPLE_NUMBERS // learners for i in range(learners)
        ]
        # For a fraction of all runs, twice the sample that will be kept of it.
        self._sample_limits = [min(each, math.ceil(2.0 * fraction * each)) for each in self._max_samples]
        self._tests = tuple(kind(layout, fraction) for kind in CONFORMANCE_TESTS)

    def add(self, block: Block, on_progress: ProgressCallback = discard_progress) -> None:
        """Add a block of runs, and report the progress."""
        self.noise_count += block.count
        limits = zip(block.values, self._sample_limits, self.noise_samples, strict=True)
        self._add_samples([_take_first_known(values, limit - len(own)) for values, limit, own in limits])
        for k, each in enumerate(self._tests, 1):
            each.add(block)
            on_progress(k / len(self._tests))

    def _add_samples(self, values: Sequence[FloatArray]) -> None:
        pairs = zip(self.noise_samples, values, self._max_samples, strict=True)
        self.noise_samples = [
            np.concatenate([own, new])[:max_count] if len(new) else own for own, new, max_count in pairs
        ]

    def merge(self, other: Battery) -> None:
        """Merge the statistics of other runs."""
        self.noise_count += other.noise_count
        self._add_samples(other.noise_samples)
        for own, theirs in zip(self._tests, other._tests, strict=True):
            own.merge(theirs)

    def compute_tests(self, levels: AlphaAllocation) -> tuple[Test, ...]:
        """Compute all tests, each with its level."""
        return tuple(test for each in self._tests for test in levels.assign_levels(each.part, each.compute_tests()))


def examine_noise(
    run: Run,
    data: PlacedData,
    worlds: Worlds,
    world: int,
    transcript: Transcript,
    past_runs: int,
    fraction: float = 1.0,
    on_progress: ProgressCallback = discard_progress,
) -> Battery:
    """Extract the noise of all messages of some runs of one world, and add it to a battery.

    Args:
        run: claimed run.
        data: records of all learners.
        worlds: the two worlds.
        world: world of these runs.
        transcript: messages of all learners.
        past_runs: number of runs that are tested for dependence, too.
        fraction: fraction of all runs of the audit; a smaller one keeps less until it is merged with the others.
        on_progress: receives the progress.
    """
    fields = tuple((name, values.shape[-1]) for name, values in transcript.fields.items())
    layout = Layout(run.spec.names, transcript.rounds, fields)
    battery, schedule = Battery(layout, worlds.learner, fraction), Schedule()
    world_data, holders = worlds.build_data(data, world), worlds.list_holders(run)
    parts = list(_slice_runs(transcript, count_numbers(run), past_runs))
    # Memory is reused, because new memory costs a process more than the work on it.
    memory = Block.create_blank(layout, max(part.replicas for part, _ in parts))
    done = 0
    for part, has_past in parts:
        block = memory.reuse_memory(part.replicas)
        other_records = worlds.get_records(1 - world) if has_past else None
        start, done = done / transcript.replicas, done + part.replicas
        residuals = []
        for i in range(run.spec.n_learners):
            replaced_records = other_records if i in holders else None
            residuals.append(
                compute_residuals(
                    run,
                    part,
                    world_data,
                    i,
                    keep_past=has_past,
                    other_records=replaced_records,
                    buffers=block.get_residuals(i),
                    schedule=schedule,
                )
            )
        if any(residuals):
            battery.add(block.add_past(residuals), scale_progress(on_progress, start, done / transcript.replicas))
    return battery


def _take_first_known(values: FloatArray, max_count: int) -> FloatArray:
    """Return at most `max_count` of the first known numbers."""
    if max_count <= 0:
        return np.empty(0)
    flat = values.reshape(-1)
    if not np.isfinite(flat[:max_count]).all():
        flat = flat[np.isfinite(flat)]
    return flat[:max_count].copy()


def _slice_runs(transcript: Transcript, numbers: int, past_runs: int) -> Iterator[tuple[Transcript, bool]]:
    """Iterate over slices of at most a block's numbers, and whether each is tested for dependence."""
    start = 0
    while start < transcript.replicas:
        has_past = start < past_runs
        max_runs = max(1, (_MAX_CLOSE_BLOCK_NUMBERS if has_past else _MAX_BLOCK_NUMBERS) // numbers)
        stop = min(start + max_runs, past_runs if has_past else transcript.replicas, transcript.replicas)
        yield Transcript({name: values[:, :, start:stop] for name, values in transcript.fields.items()}), has_past
        start = stop
