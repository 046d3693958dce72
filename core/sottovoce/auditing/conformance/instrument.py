"""One class of tests of conformance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from sottovoce.auditing.conformance.block import Block
from sottovoce.auditing.levels import Part, Test


class Instrument(ABC):
    """One class of tests: sees every run once, in whole runs, and keeps what adds up.

    Attributes:
        part: of the error budget, which all of its tests share.
    """

    part: ClassVar[Part]

    def expect(self, share: float) -> None:  # noqa: B027  most keep as much of few runs as of many
        """It is to see such a share of all runs, and to be merged with what sees the others."""

    @abstractmethod
    def add(self, block: Block) -> None:
        """Look at some more runs; blocks of one audit have the same learners, rounds and fields."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Take in what another one keeps of other runs."""

    @abstractmethod
    def tests(self) -> list[Test]:
        """What all runs come to; no level is set yet."""
