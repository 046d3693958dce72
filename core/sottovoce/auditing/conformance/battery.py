"""All tests of conformance: they look at runs some at a time, keep little of them, and what they keep adds up.

What is tested, and how it can be refuted, class by class: docs/audit.md. To add a class of tests, write an `Instrument` and list
it in `INSTRUMENTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.conformance.block import Block
from sottovoce.auditing.conformance.dependence import Dependence
from sottovoce.auditing.conformance.freshness import Freshness
from sottovoce.auditing.conformance.instrument import Instrument
from sottovoce.auditing.conformance.lattice import Lattice
from sottovoce.auditing.conformance.marginal import Marginal
from sottovoce.auditing.conformance.residuals import residuals
from sottovoce.auditing.levels import Levels, Test
from sottovoce.auditing.simulated import numbers_of
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript

INSTRUMENTS: tuple[type[Instrument], ...] = (Marginal, Lattice, Dependence, Freshness)

_NUMBERS = 2**21
"""In a block: some 100 bytes each."""

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
        self.numbers = 0
        self.shown: list[FloatArray] = []
        self._most: Sequence[int] = ()
        self._instruments = tuple(make() for make in INSTRUMENTS)
        for each in self._instruments:
            each.expect(share)

    def add(self, block: Block, audited: int) -> None:
        """Look at some more runs."""
        self.numbers += block.count
        most = [_SHOWN if i == audited else _SHOWN // len(block.learners) for i in range(len(block.learners))]
        self._show([own[np.isfinite(own)][:room] for own, room in zip(block.values, most, strict=True)], most)
        for each in self._instruments:
            each.add(block)

    def _show(self, values: Sequence[FloatArray], most: Sequence[int]) -> None:
        before = self.shown or [np.empty(0)] * len(values)
        pairs = zip(before, values, most, strict=True)
        self.shown = [own if len(own) >= room else np.concatenate([own, more])[:room] for own, more, room in pairs]
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
    """
    found, room = Battery(share), None
    fields = {name: values.shape[-1] for name, values in transcript.fields.items()}
    lived, holders = worlds.data(data, world), worlds.holders(run)
    for part, near in _slices(transcript, max(1, _NUMBERS // numbers_of(run)), close):
        # Memory that is new to a process costs more than what is done with it.
        if room is None or room.runs != part.replicas:
            room = Block.blank(run.spec.names, fields, part.rounds, part.replicas)
        room = room.cleared()
        other = worlds.of(1 - world) if near else None
        taken = [
            residuals(run, part, lived, i, close=near, other=other if i in holders else None, room=room.of(i))
            for i in range(run.spec.n_learners)
        ]
        if any(taken):
            found.add(room.with_past(taken), worlds.learner)
    return found


def _slices(transcript: Transcript, most: int, close: int) -> Iterator[tuple[Transcript, bool]]:
    """At most so many runs at a time, and whether they are to be looked at closely."""
    start = 0
    while start < transcript.replicas:
        near = start < close
        stop = min(start + most, close if near else transcript.replicas, transcript.replicas)
        yield Transcript({name: values[:, :, start:stop] for name, values in transcript.fields.items()}), near
        start = stop
