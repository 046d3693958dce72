"""All tests of conformance: they look at runs some at a time, keep little of them, and what they keep adds up.

What is tested, and how it can be refuted, class by class: docs/audit.md. To add a class of tests, write an `Instrument` and list
it in `INSTRUMENTS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

import numpy as np

from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.bounds import Levels, Part, Test
from sottovoce_core.auditing.conformance.block import Block, Instrument
from sottovoce_core.auditing.conformance.freshness import Freshness
from sottovoce_core.auditing.conformance.lags import Lags
from sottovoce_core.auditing.conformance.lattice import Lattice
from sottovoce_core.auditing.conformance.marginal import Marginal
from sottovoce_core.auditing.conformance.pairs import Pairs
from sottovoce_core.auditing.conformance.regressors import Regressors, Relations
from sottovoce_core.auditing.conformance.residuals import Schedule, residuals
from sottovoce_core.auditing.conformance.uniforms import Uniforms
from sottovoce_core.auditing.worlds import Tell, Worlds, nobody, numbers_of, within
from sottovoce_core.data import PlacedData
from sottovoce_core.running.run import Run
from sottovoce_core.running.transcript import Transcript

# ---- dependence ------------------------------------------------------------------------------------------------------


class Dependence(Instrument):
    """Noise depends on no other noise, and on nothing before it.

    It looks at blocks that are `close`: what it does costs more per number than all other tests together.

    Attributes:
        numbers: of noise that it has looked at.
    """

    part: ClassVar[Part] = "dependence"

    def __init__(self) -> None:
        self.numbers = 0
        self._parts = Lags(), Pairs(), Regressors(), Relations(), Uniforms()

    def add(self, block: Block) -> None:
        if block.close and block.count:
            self.numbers += block.count
            for each in self._parts:
                each.add(block)

    def merge(self, other: Self) -> None:
        self.numbers += other.numbers
        lags, pairs, regressors, relations, uniforms = self._parts
        lags.merge(other._parts[0])
        pairs.merge(other._parts[1])
        regressors.merge(other._parts[2])
        relations.merge(other._parts[3])
        uniforms.merge(other._parts[4])

    def tests(self) -> list[Test]:
        return [test for each in self._parts for test in each.tests()]


# ---- the battery -----------------------------------------------------------------------------------------------------

INSTRUMENTS: tuple[type[Instrument], ...] = (Marginal, Lattice, Dependence, Freshness)

_NEAR, _FAR = 2**21, 2**22
"""Numbers in a block that is looked at for dependence, too, some 100 bytes each; and in any other, some 30."""

_TAKEN_NEAR, _TAKEN_FAR = 0.1, 0.3
"""What share of the time of such a block it takes to take the noise off its messages, about."""

_SHOWN = 2**20
"""Numbers of the audited learner that are kept for pictures, at most; of all others together as many again."""


class Battery:
    """What all instruments keep of the runs that they have seen.

    Attributes:
        numbers: of noise, of all learners.
        shown: some of every learner's, standardised, the most of the audited one's.
    """

    def __init__(self, share: float = 1.0) -> None:
        """For such a share of all runs."""
        self.numbers, self._share = 0, share
        self.shown: list[FloatArray] = []
        self._most: Sequence[int] = ()
        self._instruments = tuple(make() for make in INSTRUMENTS)
        for each in self._instruments:
            each.expect(share)

    def add(self, block: Block, audited: int, tell: Tell = nobody) -> None:
        """Look at some more runs, and tell how far that is."""
        self.numbers += block.count
        learners = range(len(block.learners))
        most = [_SHOWN if i == audited else _SHOWN // len(block.learners) for i in learners]
        # Of a share of all runs twice as much as will be shown of it.
        rooms = [min(each, math.ceil(2.0 * self._share * each)) for each in most]
        self._show([_first(block.values[i], rooms[i] - len(self._shown_of(i))) for i in learners], most)
        for k, each in enumerate(self._instruments, 1):
            each.add(block)
            tell(k / len(self._instruments))

    def _shown_of(self, learner: int) -> FloatArray:
        return self.shown[learner] if self.shown else np.empty(0)

    def _show(self, values: Sequence[FloatArray], most: Sequence[int]) -> None:
        pairs = zip(map(self._shown_of, range(len(values))), values, most, strict=True)
        self.shown = [np.concatenate([own, more])[:room] if len(more) else own for own, more, room in pairs]
        self._most = most

    def merge(self, other: Battery) -> None:
        """Take in what another one keeps of other runs."""
        self.numbers += other.numbers
        if other.shown:
            self._show(other.shown, other._most)
        for mine, its in zip(self._instruments, other._instruments, strict=True):
            mine.merge(its)

    def tests(self, levels: Levels) -> tuple[Test, ...]:
        """All tests, each with its level."""
        return tuple(test for each in self._instruments for test in levels.judged(each.part, each.tests()))


def examine_noise(
    run: Run,
    data: PlacedData,
    worlds: Worlds,
    world: int,
    transcript: Transcript,
    close: int,
    share: float = 1.0,
    tell: Tell = nobody,
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
    found, schedule = Battery(share), Schedule()
    fields = {name: values.shape[-1] for name, values in transcript.fields.items()}
    lived, holders = worlds.data(data, world), worlds.holders(run)
    parts = list(_slices(transcript, numbers_of(run), close))
    # Memory that is new to a process costs more than what is done with it.
    memory = Block.blank(run.spec.names, fields, transcript.rounds, max(part.replicas for part, _ in parts))
    learners, looked = run.spec.n_learners, 0
    for part, near in parts:
        room = memory.room(part.replicas)
        other = worlds.of(1 - world) if near else None
        start, looked = looked / transcript.replicas, looked + part.replicas
        stop = looked / transcript.replicas
        middle = start + (_TAKEN_NEAR if near else _TAKEN_FAR) * (stop - start)
        taken = []
        for i in range(learners):
            its = other if i in holders else None
            taken.append(residuals(run, part, lived, i, close=near, other=its, room=room.of(i), schedule=schedule))
            within(tell, start, middle)((i + 1) / learners)
        if any(taken):
            found.add(room.with_past(taken), worlds.learner, within(tell, middle, stop))
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
        most = max(1, (_NEAR if near else _FAR) // numbers)
        stop = min(start + most, close if near else transcript.replicas, transcript.replicas)
        yield Transcript({name: values[:, :, start:stop] for name, values in transcript.fields.items()}), near
        start = stop
