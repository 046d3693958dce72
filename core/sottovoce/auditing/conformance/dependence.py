"""Noise depends on no other noise, and on nothing before it."""

from __future__ import annotations

from typing import ClassVar, Self

from sottovoce.auditing.conformance.block import Block
from sottovoce.auditing.conformance.instrument import Instrument
from sottovoce.auditing.conformance.lags import Lags
from sottovoce.auditing.conformance.pairs import Pairs
from sottovoce.auditing.conformance.regressors import Regressors
from sottovoce.auditing.conformance.relations import Relations
from sottovoce.auditing.conformance.uniforms import Uniforms
from sottovoce.auditing.levels import Part, Test


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
