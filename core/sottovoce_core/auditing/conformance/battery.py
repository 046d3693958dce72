"""All tests of conformance: they look at runs some at a time, keep little of them, and what they keep adds up.

What is tested, and how it can be refuted, class by class: docs/audit.md. To add a class of tests, write an `ConformanceTest` and list
it in `CONFORMANCE_TESTS`.
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
    """Noise depends on no other noise, and on nothing before it.

    It looks at blocks that are `close`: what it does costs more per number than all other tests together.
    """

    part: ClassVar[BudgetPart] = "dependence"

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        super().__init__(layout, share)
        self._parts: tuple[ConformanceTest, ...] = tuple(
            kind(layout) for kind in (Lags, Correlations, Regressors, Relations, Uniforms)
        )

    def add(self, block: Block) -> None:
        if block.has_past and block.count:
            for each in self._parts:
                each.add(block)

    def merge(self, other: Self) -> None:
        for mine, its in zip(self._parts, other._parts, strict=True):
            mine.merge(its)

    def _every(self) -> Iterator[Test]:
        return (test for each in self._parts for test in each.compute_tests())


# ---- the battery -----------------------------------------------------------------------------------------------------

CONFORMANCE_TESTS: tuple[type[ConformanceTest], ...] = (Marginal, Lattice, Dependence, Freshness)

_MAX_CLOSE_BLOCK_NUMBERS, _MAX_BLOCK_NUMBERS = 2**21, 2**22
"""Numbers in a block that is looked at for dependence, too, some 100 bytes each; and in any other, some 30."""

_MAX_SAMPLE_NUMBERS = 2**20
"""Numbers of the audited learner that are kept for pictures, at most; of all others together as many again."""


class Battery:
    """What all instruments keep of the runs that they have seen.

    Args:
        layout: of their blocks.
        audited: index of the learner of whose noise most is shown.
        share: of all runs that it is to see, to be merged with the others.

    Attributes:
        numbers: of noise, of all learners.
        shown: some of every learner's, standardised, the most of the audited one's.
    """

    def __init__(self, layout: Layout, audited: int, share: float = 1.0) -> None:
        learners = len(layout.learners)
        self.noise_count = 0
        self.noise_samples: list[FloatArray] = [np.empty(0)] * learners
        self._most = [_MAX_SAMPLE_NUMBERS if i == audited else _MAX_SAMPLE_NUMBERS // learners for i in range(learners)]
        # Of a share of all runs twice as much as will be shown of it.
        self._rooms = [min(each, math.ceil(2.0 * share * each)) for each in self._most]
        self._instruments = tuple(kind(layout, share) for kind in CONFORMANCE_TESTS)

    def add(self, block: Block, tell: ProgressCallback = discard_progress) -> None:
        """Look at some more runs, and tell how far that is."""
        self.noise_count += block.count
        rooms = zip(block.values, self._rooms, self.noise_samples, strict=True)
        self._show([_first(values, room - len(own)) for values, room, own in rooms])
        for k, each in enumerate(self._instruments, 1):
            each.add(block)
            tell(k / len(self._instruments))

    def _show(self, values: Sequence[FloatArray]) -> None:
        pairs = zip(self.noise_samples, values, self._most, strict=True)
        self.noise_samples = [np.concatenate([own, more])[:most] if len(more) else own for own, more, most in pairs]

    def merge(self, other: Battery) -> None:
        """Take in what another one keeps of other runs."""
        self.noise_count += other.noise_count
        self._show(other.noise_samples)
        for mine, its in zip(self._instruments, other._instruments, strict=True):
            mine.merge(its)

    def compute_tests(self, levels: AlphaAllocation) -> tuple[Test, ...]:
        """All tests, each with its level."""
        return tuple(
            test for each in self._instruments for test in levels.assign_levels(each.part, each.compute_tests())
        )


def examine_noise(
    run: Run,
    data: PlacedData,
    worlds: Worlds,
    world: int,
    transcript: Transcript,
    close: int,
    share: float = 1.0,
    tell: ProgressCallback = discard_progress,
) -> Battery:
    """Take the noise off all messages of some runs of one world, and look at it.

    Args:
        run: what is claimed to run.
        data: of all learners.
        worlds: the two worlds.
        world: of these runs.
        transcript: what all learners said.
        close: so many runs are looked at for dependence, too.
        share: of all runs of the audit; less is kept of a smaller one, before it is merged with the others.
        tell: is told how far it is.
    """
    fields = tuple((name, values.shape[-1]) for name, values in transcript.fields.items())
    layout = Layout(run.spec.names, transcript.rounds, fields)
    found, schedule = Battery(layout, worlds.learner, share), Schedule()
    lived, holders = worlds.build_data(data, world), worlds.list_holders(run)
    parts = list(_slices(transcript, count_numbers(run), close))
    # Memory that is new to a process costs more than what is done with it.
    memory = Block.create_blank(layout, max(part.replicas for part, _ in parts))
    looked = 0
    for part, near in parts:
        room = memory.reuse_memory(part.replicas)
        other = worlds.get_records(1 - world) if near else None
        start, looked = looked / transcript.replicas, looked + part.replicas
        taken = []
        for i in range(run.spec.n_learners):
            its = other if i in holders else None
            taken.append(
                compute_residuals(
                    run,
                    part,
                    lived,
                    i,
                    keep_past=near,
                    other_records=its,
                    buffers=room.get_residuals(i),
                    schedule=schedule,
                )
            )
        if any(taken):
            found.add(room.add_past(taken), scale_progress(tell, start, looked / transcript.replicas))
    return found


def _first(values: FloatArray, most: int) -> FloatArray:
    """The first numbers that are known, so many at most."""
    if most <= 0:
        return np.empty(0)
    some = values.reshape(-1)
    if not np.isfinite(some[:most]).all():
        some = some[np.isfinite(some)]
    return some[:most].copy()


def _slices(transcript: Transcript, numbers: int, close: int) -> Iterator[tuple[Transcript, bool]]:
    """Some runs of so many numbers at a time, and whether they are to be looked at closely."""
    start = 0
    while start < transcript.replicas:
        near = start < close
        most = max(1, (_MAX_CLOSE_BLOCK_NUMBERS if near else _MAX_BLOCK_NUMBERS) // numbers)
        stop = min(start + most, close if near else transcript.replicas, transcript.replicas)
        yield Transcript({name: values[:, :, start:stop] for name, values in transcript.fields.items()}), near
        start = stop
